"""Retrained runs in a directory (an environment), finished or in progress. Start with `RetrainedRuns.open`.

    environment.json     subsets, recipe, seeds and targets of the runs, and their role
    subsets.parquet      subset_id, row_id, weight of the rows trained on; may be removed if the family draws them again
    utilities.parquet    subset_id, seed, target, unit_id, utility = -loss in nats per token; once all runs are finished
    reference.parquet    the same for the runs on the whole corpus, with subset_id `full`
    runs/                until then, one small file per finished run: `<subset_id>-<seed>.parquet`
    claims/              leases of the runs in progress
    reference/seed-<s>/  checkpoints of the runs on the whole corpus

Several worker processes fill a directory: each takes runs with `claim` and stores their results with `write_run`; at
the end `compact` merges the results into two tables. Every file is written to a temporary name and renamed, so an
existing file is complete. `training_runs` defines runs, utilities and environment.json; `utility_tables` reads and
writes the tables of utilities. Shape letters: B subsets, S seeds, E units, T targets, R runs.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import RunsError
from grasp.files import atomic_path, differences, is_part, kind_of, remove_if_stale, write_atomically
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import Result
from grasp.runs.training_runs import (
    INFO,
    MAX_EXAMPLES,
    SIGNED_INFO,
    SUBSETS,
    UTILITIES,
    WHOLE_CORPUS_RUN,
    Run,
    RunsInfo,
    TrainingRuns,
)
from grasp.runs.utility_tables import COLUMNS, RESULTS_SCHEMA, encode_utilities, read_results, result_array
from grasp.store.locks import TTL_SECONDS, Lease, acquire_lease, generations
from grasp.text import plain

REFERENCE = "reference.parquet"
RUNS_DIRECTORY = "runs"
CLAIMS_DIRECTORY = "claims"
MARKER = ".grasp-environment"  # lock file of `grasp retrain` while it prepares the directory
STEM_BYTES = 200  # longest file name of a run without suffix; file systems allow 255 bytes in total
MAX_ID_LENGTH = 40  # characters of a subset id in a message
MAX_DIFFERENCE_LENGTH = 400  # characters of a difference between settings in a message


def is_environment(path: Path) -> bool:
    """Return whether the directory contains retrained runs."""
    try:
        return not SIGNED_INFO.read(path).metrics
    except RunsError:
        return False


class RetrainedRuns(TrainingRuns):
    """Runs of `grasp retrain` in a directory, finished or in progress."""

    # ------------------------------------------------------------------------------------- open, create

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a directory of runs; utilities are read and validated on first use.

        Raises:
            RunsError: not found, damaged, of another format version, or one of the files is not a regular file.
        """
        path = Path(path)
        for name in (INFO, SUBSETS, UTILITIES, REFERENCE):
            # the directory is untrusted: reading a named pipe would block forever
            if (kind := kind_of(path / name)) not in ("file", "nothing"):
                raise RunsError(f"{path / name}: is a {kind}, expected a regular file; restore it")
        info = SIGNED_INFO.read(path)
        if info.metrics:
            raise RunsError(f"{path}: contains imported runs, expected a directory written by grasp retrain")
        seeds = f"{len(info.seeds)} seed" + ("s" if len(info.seeds) > 1 else "")
        model = f"for a model retrained as in {path.name} (recipe {info.recipe}, mean of {seeds})"
        return cls(path, info, measurement=("change in nats per token", model))

    @classmethod
    def create(cls, path: Path, info: RunsInfo, blocks: Iterable[SubsetBlock], rows: RowIndex) -> Self:
        """Create a directory of runs, or continue one that was created with the same settings.

        Seeds and subsets may be added; all other settings must be equal.

        Args:
            info: record of the runs; `subset_ids` and `masks_checksum` are set from `blocks`.
            blocks: subsets trained on; a row of weight 2 is seen twice as often as one of weight 1.
            rows: names of the rows of the corpus.
        Raises:
            RunsError: the directory contains other runs (the message names every difference), or there are no subsets,
                or their names are repeated, reserved or too long.
        """
        path.mkdir(parents=True, exist_ok=True)
        with atomic_path(path / SUBSETS) as temporary:  # replaces the file only if no check fails
            ids: list[str] = []
            checksums: list[str] = []
            digested = _with_checksums(blocks, ids, checksums)
            write_subsets(temporary, digested, rows, weights=True, compression_level=19)
            unusable = {name for name, count in Counter(ids).items() if count > 1 or name == WHOLE_CORPUS_RUN}
            unusable |= {name for name in ids if len(Run(0, name).stem) > STEM_BYTES}
            if unusable or not ids:
                listed = [name[:MAX_ID_LENGTH] for name in sorted(unusable)[:MAX_EXAMPLES]]
                raise RunsError(
                    f"{path / SUBSETS}: subset ids {listed} of {len(ids)} are repeated, reserved or take over "
                    f"{STEM_BYTES} bytes in the name of a file; expected at least one subset, each with a unique name"
                )
            info = info.model_copy(update={"subset_ids": tuple(ids), "masks_checksum": checksums[-1]})
            if (path / INFO).exists():
                recorded = SIGNED_INFO.read(path)
                may_change = {"seeds", "subset_ids", "masks_checksum", "made_by", "checksum"}
                before, now = (record.model_dump(mode="json", exclude=may_change) for record in (recorded, info))
                problems = list(differences(before, now))
                if info.seeds[: len(recorded.seeds)] != recorded.seeds:
                    problems.append(f"seeds: was {recorded.seeds}, is {info.seeds}")
                n_recorded = len(recorded.subset_ids)
                if len(ids) < n_recorded or checksums[n_recorded - 1] != recorded.masks_checksum:
                    problems.append(
                        f"subsets: was {n_recorded} with checksum {recorded.masks_checksum}, is {len(ids)} with "
                        f"{checksums[-1]}"
                    )
                if problems:
                    shortened = (plain(problem, MAX_DIFFERENCE_LENGTH) for problem in problems)
                    raise RunsError(
                        f"{path}: contains runs with other settings: {'; '.join(shortened)}; continue with the old "
                        "settings, or use another directory"
                    )
                same_origin = {"made_by": recorded.made_by, "checksum": recorded.checksum}
                nothing_added = recorded == info.model_copy(update=same_origin)
                if nothing_added:  # then the record keeps who made it
                    info = recorded
        SIGNED_INFO.write(path, info)
        return cls.open(path)

    # ------------------------------------------------------------------------------------------ contents

    def summary(self) -> Result:
        """Summarize the utilities of the finished runs per target, and list the next commands."""
        utilities = self.utilities(partial=True)
        reference_ST = self.task_reference(self.targets)
        lines = []
        for t, (name, target) in enumerate(self.info.targets.items()):
            task_BS = utilities.select(name).values_BSE.mean(axis=2)
            mean = float(task_BS.mean()) if task_BS.size else None
            # The models of the whole corpus are comparable once there is one per seed.
            whole_corpus = float(reference_ST[:, t].mean()) if len(reference_ST) == task_BS.shape[1] else None
            lines.append(
                {
                    "target": name,
                    "units": len(target.unit_ids),
                    "utility": mean,
                    "against the corpus": None if mean is None or whole_corpus is None else mean - whole_corpus,
                    "sd over subsets": float(task_BS.mean(axis=1).std(ddof=1)) if len(task_BS) > 1 else None,
                }
            )
        build = self.info.build_command(self.path)
        next_commands = [f"next: {build}", f"then: grasp evaluate art --runs {self.path}"] if build else []
        return Result(pa.Table.from_pylist(lines), self._description().headline, tuple(next_commands))

    def __repr__(self) -> str:
        return repr(self._description())

    def _repr_html_(self) -> str:
        return self._description()._repr_html_()

    def _description(self) -> Result:
        """Return the contents of environment.json, without reading any runs."""
        units = {name: len(target.unit_ids) for name, target in self.info.targets.items()}
        headline = (
            f"{self.path}: {self.role}, recipe {self.info.recipe}, {len(self.subset_ids)} subsets x "
            f"{len(self.info.seeds)} seeds of {self.info.n_rows:,} rows"
        )
        table = pa.table({"target": list(units), "units": list(units.values())})
        return Result(table, headline, ("summary() shows the results of the runs",))

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """Yield the subsets in blocks, in the order of `subset_ids`, and verify their checksum at the end.

        Args:
            rows: names of the rows of the corpus.
            labels: label column that the family draws by; only required without subsets.parquet.
            block: maximum number of subsets per block.
        Raises:
            RunsError: the subsets are not those trained on; known after the last block only.
            SubsetError: subsets.parquet cannot be read.
        """
        info = self.info
        if info.family is None or (self.path / SUBSETS).exists():
            blocks = read_subsets(self.path / SUBSETS, rows, block)
        else:
            blocks = parse_family(info.family.spec).draw(
                len(info.subset_ids),
                n_rows=rows.n_rows,
                labels=labels,
                seed=info.family.seed,
                purpose=info.family.purpose,
                block=block,
            )
        ids: list[str] = []
        checksums: list[str] = []
        yield from _with_checksums(blocks, ids, checksums)
        if tuple(ids) != info.subset_ids or checksums[-1] != info.masks_checksum:
            raise RunsError(
                f"{self.path}: {len(ids)} subsets with checksum {checksums[-1]}, expected "
                f"{len(info.subset_ids)} with {info.masks_checksum}; these are not the subsets trained on"
            )

    # --------------------------------------------------------------------------------------- adding runs

    def runs(self) -> tuple[Run, ...]:
        """Return all runs: seed after seed, the whole corpus first."""
        subsets = ((WHOLE_CORPUS_RUN,) if self.info.reference else ()) + self.subset_ids
        return tuple(Run(seed, subset) for seed in self.info.seeds for subset in subsets)

    def pending(self) -> tuple[Run, ...]:
        """Return the runs without a result."""
        finished = self._finished()
        return tuple(run for run in self.runs() if run not in finished)

    def claim(self, *, ttl: float = TTL_SECONDS) -> tuple[Run, Lease] | None:
        """Lease the first pending run that no other worker holds; return None if there is none.

        Args:
            ttl: seconds after which a lease of another worker expires and is taken over.
        """
        claims = self.path / CLAIMS_DIRECTORY
        known_generations = generations(claims)  # one listing of the directory for all runs
        for run in self.pending():
            lease = acquire_lease(claims, run.stem, ttl=ttl, known=known_generations)
            if lease is None:
                continue
            if run in self.pending():
                return run, lease
            lease.release()  # finished before the lease was acquired
        return None

    def write_run(self, run: Run, utility_E: F64) -> None:
        """Write the result of a run, unless it exists already.

        Args:
            run: one of `runs`.
            utility_E: -loss of every unit in nats per token, in the order of `units`.
        Raises:
            RunsError: a value is not finite.
        """
        assert utility_E.shape == (len(self.units),)
        infinite = np.flatnonzero(~np.isfinite(utility_E))
        if infinite.size:
            target, unit_id = self.units[infinite[0]]
            raise RunsError(
                f"{self.path}: run {run.stem}: utility of unit {unit_id!r} of {target} is {utility_E[infinite[0]]} "
                f"({infinite.size} such); the run diverged, lower the learning rate of the recipe"
            )
        path = self._run_path(run)
        if run not in self._finished():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, encode_utilities([run], self.units, utility_E[None]))

    def compact(self) -> None:
        """Merge the files of single runs into utilities.parquet and reference.parquet, and remove them; idempotent.

        All runs must be finished.
        """
        all_runs = self.runs()
        assert not self.pending()
        if self._runs_in_single_files():
            values_RE = self._values_by_subset().swapaxes(0, 1).reshape(len(all_runs), -1)
            is_whole_R = np.array([run.subset_id == WHOLE_CORPUS_RUN for run in all_runs])
            for name, selected_R in ((REFERENCE, is_whole_R), (UTILITIES, ~is_whole_R)):
                if selected_R.any():
                    content = encode_utilities(list(compress(all_runs, selected_R)), self.units, values_RE[selected_R])
                    write_atomically(self.path / name, content)
        for run in all_runs:
            self._run_path(run).unlink(missing_ok=True)
        stems = {run.stem for run in all_runs}
        for file in (self.path / CLAIMS_DIRECTORY).glob("*.*"):  # leases: the run and a number; leave all other files
            stem, _, generation = file.name.rpartition(".")
            if stem in stems and generation.isdigit():
                file.unlink(missing_ok=True)
        for file in (*self.path.glob(".*"), *(self.path / RUNS_DIRECTORY).glob(".*")):
            if is_part(file):  # the temporary file of a process that was killed
                remove_if_stale(file, older_than=TTL_SECONDS)

    # ------------------------------------------------------------------------------------------ internals

    def _run_path(self, run: Run) -> Path:
        return self.path / RUNS_DIRECTORY / f"{run.stem}.parquet"

    def _runs_in_single_files(self) -> list[Run]:
        """Return the runs whose result is in a separate file."""
        directory = self.path / RUNS_DIRECTORY
        names = {file.name for file in directory.iterdir()} if directory.exists() else set()
        return [run for run in self.runs() if self._run_path(run).name in names]

    def _finished(self) -> set[Run]:
        """Return the runs that have a result."""
        # List single files first: a concurrent merge moves results from there to the merged files.
        finished = set(self._runs_in_single_files())
        for path in (self.path / UTILITIES, self.path / REFERENCE):
            if path.exists():
                pairs = read_results(path, ("subset_id", "seed")).group_by(["subset_id", "seed"]).aggregate([])
                finished |= {Run(row["seed"], row["subset_id"]) for row in pairs.to_pylist()} & set(self.runs())
        return finished

    def _values_by_subset(self) -> F64:
        single_files = [self._run_path(run) for run in self._runs_in_single_files()]
        tables = [pa.schema([RESULTS_SCHEMA.field(name) for name in COLUMNS]).empty_table()]
        for path in (*single_files, self.path / UTILITIES, self.path / REFERENCE):
            with suppress(FileNotFoundError):  # not merged yet, or merged and removed in the meantime
                tables.append(read_results(path))
        results = pa.concat_tables(tables)
        subset_ids = tuple(dict.fromkeys(run.subset_id for run in self.runs()))
        values_BSE = result_array(results, subset_ids, self.info.seeds, self.units, str(self.path))
        n_results_BS = np.isfinite(values_BSE).sum(axis=2)
        has_result_BS = ~np.isnan(values_BSE).all(axis=2)
        if n_missing := int((len(self.units) - n_results_BS)[has_result_BS].sum()):
            b, s = np.argwhere(has_result_BS & (n_results_BS < len(self.units)))[0]
            raise RunsError(
                f"{self.path}: run {Run(self.info.seeds[s], subset_ids[b]).stem}: {n_missing} utilities are missing, "
                "nan or infinite; delete these runs and retrain them"
            )
        return values_BSE


def _with_checksums(blocks: Iterable[SubsetBlock], ids: list[str], checksums: list[str]) -> Iterator[SubsetBlock]:
    """Yield blocks unchanged, and append the id of each subset, and a checksum of all subsets up to and including it.

    The checksum is that of ids, rows, and weights other than 1, in order. That of each subset recognizes runs to which
    subsets are added.
    """
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        matrix = block.weights_BN
        for b, subset_id in enumerate(block.subset_ids):
            entries = slice(matrix.indptr[b], matrix.indptr[b + 1])
            order = np.argsort(matrix.indices[entries])
            rows, weights = matrix.indices[entries][order], matrix.data[entries][order]
            digest.update(subset_id.encode() + b"\0" + rows.astype("<i8").tobytes())
            if (weights != 1.0).any():
                digest.update(weights.astype("<f8").tobytes())
            ids.append(subset_id)
            checksums.append(digest.hexdigest())
        yield block
