"""Retrained runs in a directory (an environment): subsets, recipe, and the utilities of the trained models.

    environment.json     subsets, recipe, seeds and targets of the runs, and their role
    subsets.parquet      subset_id, row_id, weight of the retained side; absent if the family regenerates the subsets
    utilities.parquet    subset_id, seed, target, unit_id, utility = -loss in nats per token; once all runs are finished
    reference.parquet    the same for the runs on the whole corpus, with subset_id `full`
    runs/                until then, one small file per finished run: `<subset_id>-<seed>.parquet`
    claims/              leases of the runs in progress
    failed/              error messages of the runs that failed since the last call of `grasp retrain`
    reference/seed-<s>/  checkpoints of the runs on the whole corpus

Start with `RetrainedRuns.open` and `TrainingRuns.utilities`. Every file is written to a temporary name and renamed, so
an existing file is complete. A run is one subset with one seed; the run on the whole corpus is called `full`. Tables
may have their lines in any order; they are validated on reading.
Shape letters: B subsets, S seeds, E units, T targets, R runs.
"""

import hashlib
import json
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from pydantic_core import to_jsonable_python

from grasp.arrays import F64, I64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import ModelError, RunsError
from grasp.files import atomic_path, differences, discard, is_part, kind_of, remove_if_stale, write_atomically
from grasp.predict.families import parse_family
from grasp.predict.scoring_rule import geometry
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import Result
from grasp.settings import CorpusSettings, Settings, TargetSettings
from grasp.store.checksummed_parquet import ChecksummedParquetWriter, read_checksummed
from grasp.store.locks import TTL_SECONDS, Lease, acquire_lease, generations
from grasp.store.records import Signed
from grasp.targets.margins import split_metric
from grasp.targets.units import LossOn

Role = Literal["dev", "held-out"]

FORMAT_VERSION = 1
INFO = "environment.json"
SUBSETS = "subsets.parquet"
UTILITIES = "utilities.parquet"
REFERENCE = "reference.parquet"
FAILED_DIRECTORY = "failed"
MARKER = ".grasp-environment"  # marks the directory as ours; also the lock file during preparation
WHOLE_CORPUS_RUN = "full"  # the run on the whole corpus
ALL_SUFFIX = "@all"  # suffix of targets with loss on every token
MAX_EXAMPLES = 3
STEM_BYTES = 200  # longest file name of a run without suffix; file systems allow 255 bytes in total
MAX_UTILITY = 1e30  # largest utility, so that sums of squares stay finite
COLUMNS = ("subset_id", "seed", "target", "unit_id", "utility")


# ---------------------------------------------------------------------------------------------------- environment.json


class TargetInfo(Settings):
    """One target as it was evaluated."""

    fingerprint: str = Field(description="Fingerprint of the units: ids, prompts, completions, tokens with loss.")
    loss_on: LossOn
    unit_ids: tuple[str, ...]


class FamilyInfo(Settings):
    """Family, seed and stream of the subsets, from which they can be regenerated."""

    spec: str = Field(description="E.g. mixture:topic.")
    seed: int
    purpose: str


class RetrainedRunsInfo(Settings):
    """Contents of environment.json."""

    format: Literal["grasp-environment"] = "grasp-environment"
    format_version: int = FORMAT_VERSION
    role: Role = Field(description="dev: protocols may be selected on the runs; held-out: evaluation only.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of development runs that are held out.")
    recipe: str = Field(description="Name of the recipe.")
    recipe_settings: dict[str, Any] = Field({}, description="All settings of the recipe.")
    checkpoint: str = Field("reference/seed-0", description="Path of the reference model, relative to the directory.")
    seeds: tuple[int, ...]
    corpus_fingerprint: str
    n_rows: int
    targets: dict[str, TargetInfo]
    side: Literal["retained"] = "retained"
    family: FamilyInfo | None = Field(None, description="None: the subsets were read from a table.")
    subset_ids: tuple[str, ...]
    masks_checksum: str = Field(description="Checksum of subset ids, row positions and weights, in order.")
    reference: bool = Field(True, description="Whether models are also trained on the whole corpus, one per seed.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and settings; not compared on resume.")
    checksum: str = Field(
        "", description="Checksum of this file, computed with zeros in its place; empty: written by hand."
    )

    def build_command(self, path: Path) -> str | None:
        """Return the `grasp build` command for an artifact of the same rows and units; None if it is unknown.

        Args:
            path: directory of the runs.
        """
        corpus, targets = (self.made_by.get(group) for group in ("corpus", "targets"))
        if not isinstance(corpus, dict) or not isinstance(targets, dict) or not self.reference:
            return None
        words = ["--model", str(path / self.checkpoint), "--corpus", str(corpus["path"])]
        words += ["--targets", ",".join(targets["names"])] if targets.get("names") else []
        for group, group_settings, settings_type in (
            ("corpus", corpus, CorpusSettings),
            ("targets", targets, TargetSettings),
        ):
            for name, value in group_settings.items():
                if name in ("path", "names") or (field := settings_type.model_fields.get(name)) is None:
                    continue
                if value != to_jsonable_python(field.get_default(call_default_factory=True)):
                    words += ["--set", f"{group}.{name}={json.dumps(value)}"]
        return f"grasp build {shlex.join([*words, '--out', 'art'])}"


SIGNED_INFO = Signed(
    INFO,
    RetrainedRunsInfo,
    "the record of an environment",
    "grasp-environment",
    FORMAT_VERSION,
    "restore it from a copy",
    RunsError,
    none=f"is not an environment (no {INFO}); pass a directory written by grasp retrain or grasp runs import",
    unsigned=True,
)


def is_environment(path: Path) -> bool:
    """Return whether the directory contains retrained runs."""
    try:
        return bool(SIGNED_INFO.read(path))
    except RunsError:
        return False


# --------------------------------------------------------------------------------------------------- runs and utilities


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One training run: the unit of work, of leases, and of what an interruption can lose."""

    seed: int
    subset_id: str

    @property
    def stem(self) -> str:
        """File name without suffix, escaped for any subset id."""
        return f"{quote(self.subset_id, safe='')}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Utilities:
    """Utilities by subset, seed and unit: minus the loss, or the metric of imported runs; higher is better."""

    values_BSE: F64
    subset_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    targets: tuple[str, ...]  # target of each unit, (E,)
    unit_ids: tuple[str, ...]  # (E,)

    def select(self, *targets: str) -> "Utilities":
        """Return the utilities of one or several targets, with units in the same order."""
        unknown = [name for name in targets if name not in self.targets]
        if unknown:
            raise RunsError(f"target {unknown[0]!r}: expected one of {list(dict.fromkeys(self.targets))}")
        columns = [e for e, name in enumerate(self.targets) if name in targets]
        return Utilities(
            self.values_BSE[:, :, columns],
            self.subset_ids,
            self.seeds,
            tuple(self.targets[e] for e in columns),
            tuple(self.unit_ids[e] for e in columns),
        )


class TrainingRuns(ABC):
    """Base class of retrained and imported runs: trained subsets of a corpus, and the utilities of the models."""

    unit = "nats"  # unit of utilities, used as column name
    notes: Sequence[str] = ()  # notes for reports

    def __init__(self, path: Path, info: RetrainedRunsInfo) -> None:
        self.path = path
        self.info = info

    # --------------------------------------------------------------------------- abstract members

    @property
    @abstractmethod
    def measurement(self) -> tuple[str, str]:
        """Text that describes the measured utility, and text that describes the models."""

    @property
    @abstractmethod
    def label(self) -> str | None:
        """The label that the subsets were drawn by, if any."""

    @abstractmethod
    def pending(self) -> tuple[Run, ...]:
        """Return the runs without a result."""

    @abstractmethod
    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """Yield the subsets in blocks, in the order of `subset_ids`."""

    @abstractmethod
    def _values(self) -> F64:
        """Return utilities of all runs, (R, E): seed after seed, the whole corpus first; nan for unfinished runs."""

    # -------------------------------------------------------------------------------------- description

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def role(self) -> Role:
        return self.info.role

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.info.targets)

    @property
    def subset_ids(self) -> tuple[str, ...]:
        return self.info.subset_ids

    @property
    def units(self) -> tuple[tuple[str, str], ...]:
        """(target, unit_id) of every unit, target by target: the order of the last axis."""
        return tuple((name, unit) for name, info in self.info.targets.items() for unit in info.unit_ids)

    def role_of(self, target: str) -> Role:
        """Return the role of a target; all targets of held-out runs are held out.

        A task is held out with all of its losses and metrics: if `sciq` is held out, so are `sciq@all` and
        `sciq@margin`.
        """
        self._check_target(target)
        held_out = {target, split_metric(target.removesuffix(ALL_SUFFIX))[0]} & set(self.info.held_out_targets)
        return "held-out" if held_out else self.info.role

    def fingerprint(self, first: SubsetBlock) -> str:
        """Return a fingerprint of corpus, recipe and family; it does not depend on the directory or number of runs.

        Args:
            first: first block of the subsets; its first subset represents the family if subsets come from a table.
        """
        info = self.info
        drawn = info.family.model_dump() if info.family else np.sort(first.weights_BN[[0]].indices).tolist()
        identity = [info.corpus_fingerprint, info.recipe, info.recipe_settings, drawn]
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    def check_corpus(self, fingerprint: str, where: str) -> None:
        """Check that a corpus is the one that the runs were trained on.

        Raises:
            RunsError: fingerprints differ; the message contains both.
        """
        if fingerprint != self.info.corpus_fingerprint:
            raise RunsError(
                f"{where}: corpus fingerprint {fingerprint}, but {self.path} was trained on "
                f"{self.info.corpus_fingerprint}; build from the same corpus, tokenizer and packing"
            )

    # ---------------------------------------------------------------------------------------- utilities

    def utilities(
        self, target: str | None = None, *, seeds: Sequence[int] | None = None, partial: bool = False
    ) -> Utilities:
        """Return realized utilities, (B, S, E); higher is better: -loss in nats per token, or the metric of a target.

        Args:
            target: default: all targets, one after the other.
            seeds: default: all seeds.
            partial: return only the subsets that have a result for each of `seeds`, instead of raising an error.
        Raises:
            RunsError: a run is missing (unless `partial`), repeated or not a number, or a subset, seed, target or unit
                is unknown. The message names it.
        """
        if target is not None:
            self._check_target(target)
        selected_seeds = self.info.seeds if seeds is None else tuple(seeds)
        unknown = [seed for seed in selected_seeds if seed not in self.info.seeds]
        if unknown or not selected_seeds:
            raise RunsError(f"{self.path}: got seeds {list(selected_seeds)}, expected some of {self.info.seeds}")
        values_BSE = self._values_by_subset()[-len(self.subset_ids) :]
        values_BSE = values_BSE[:, [self.info.seeds.index(seed) for seed in selected_seeds]]
        is_missing_BS = np.isnan(values_BSE[:, :, 0])
        if is_missing_BS.any() and not partial:
            missing = [Run(selected_seeds[s], self.subset_ids[b]).stem for s, b in np.argwhere(is_missing_BS.T)]
            raise RunsError(
                f"{self.path}: {len(missing)} runs are missing, e.g. {missing[:MAX_EXAMPLES]}; "
                "continue with `grasp retrain --resume`, or use the finished runs with --partial (partial=True)"
            )
        complete = np.flatnonzero(~is_missing_BS.any(axis=1))
        targets, unit_ids = (tuple(unit[k] for unit in self.units) for k in (0, 1))
        ids = tuple(self.subset_ids[b] for b in complete)
        utilities = Utilities(values_BSE[complete], ids, selected_seeds, targets, unit_ids)
        return utilities if target is None else utilities.select(target)

    def task_utilities(self, targets: Sequence[str]) -> F64:
        """Return the mean over the units of each target, (B, S, T); nan if a run has no such seed."""
        utilities = self.utilities()
        return np.stack([utilities.select(name).values_BSE.mean(axis=2) for name in targets], axis=2)

    def reference_utilities(self) -> F64:
        """Return utilities of the models trained on the whole corpus, (S, E); S is 0 if there are none."""
        if not self.info.reference:
            return np.empty((0, len(self.units)))
        whole_SE = self._values_by_subset()[0]
        return np.asarray(whole_SE[~np.isnan(whole_SE[:, 0])])

    def task_reference(self, targets: Sequence[str]) -> F64:
        """Return the mean utility of each target of the models trained on the whole corpus, (S, T)."""
        reference_SE = self.reference_utilities()
        of_target = [[e for e, (name, _) in enumerate(self.units) if name == target] for target in targets]
        return np.stack([reference_SE[:, columns].mean(axis=1) for columns in of_target], axis=1)

    def _check_target(self, target: str) -> None:
        if target not in self.info.targets:
            raise RunsError(f"{self.path}: has no target {target!r}, expected one of {list(self.info.targets)}")

    def _values_by_subset(self) -> F64:
        """Return utilities by subset and seed, (1 + B, S, E); the whole corpus comes first if it was trained on."""
        return self._values().reshape(len(self.info.seeds), -1, len(self.units)).swapaxes(0, 1)


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
        return cls(path, SIGNED_INFO.read(path))

    @classmethod
    def create(cls, path: Path, info: RetrainedRunsInfo, blocks: Iterable[SubsetBlock], rows: RowIndex) -> Self:
        """Create a directory of runs, or continue one that was created with the same settings.

        Seeds and subsets may be added; all other settings must be equal.

        Args:
            info: record of the runs; `subset_ids` and `masks_checksum` are set from `blocks`.
            blocks: retained sides; a row of weight 2 is seen twice as often as one of weight 1.
            rows: names of the rows of the corpus.
        Raises:
            RunsError: the directory contains other runs (the message names every difference), or there are no subsets,
                or their names are repeated, reserved or too long.
        """
        path.mkdir(parents=True, exist_ok=True)
        with atomic_path(path / SUBSETS) as part:
            digest = MaskDigest()
            write_subsets(part, digest.update_with(blocks), rows, weights=True, compression_level=19)
            ids, checksums = tuple(digest.ids), digest.checksums
            _check_names(ids, path / SUBSETS)
            info = info.model_copy(update={"subset_ids": ids, "masks_checksum": checksums[-1]})
            if (path / INFO).exists():
                recorded = SIGNED_INFO.read(path)
                may_change = {"seeds", "subset_ids", "masks_checksum", "made_by", "checksum"}
                before, now = (record.model_dump(mode="json", exclude=may_change) for record in (recorded, info))
                differs = list(differences(before, now))
                if info.seeds[: len(recorded.seeds)] != recorded.seeds:
                    differs.append(f"seeds: was {recorded.seeds}, is {info.seeds}")
                n_recorded = len(recorded.subset_ids)
                if len(ids) < n_recorded or checksums[n_recorded - 1] != recorded.masks_checksum:
                    differs.append(
                        f"subsets: was {n_recorded} with checksum {recorded.masks_checksum}, is {len(ids)} with "
                        f"{checksums[-1]}"
                    )
                if differs:
                    shortened = [text if len(text) < 400 else text[:400] + " ..." for text in differs]
                    raise RunsError(
                        f"{path}: contains runs with other settings: {'; '.join(shortened)}; "
                        "continue with the old settings, or use another directory"
                    )
                if recorded == info.model_copy(update={"made_by": recorded.made_by, "checksum": recorded.checksum}):
                    info = recorded
        SIGNED_INFO.write(path, info)
        return cls.open(path)

    # ------------------------------------------------------------------------------------------ contents

    def summary(self) -> Result:
        """Summarize the utilities per target, and list the next commands."""
        utilities = self.utilities(partial=True)
        reference_ST, lines = self.task_reference(list(self.info.targets)), []
        for t, (name, target) in enumerate(self.info.targets.items()):
            task_BS = utilities.select(name).values_BSE.mean(axis=2)
            corpus_utility = float(reference_ST[:, t].mean()) if len(reference_ST) == task_BS.shape[1] else None
            lines.append(
                {
                    "target": name,
                    "units": len(target.unit_ids),
                    "utility": float(task_BS.mean()) if task_BS.size else None,
                    "against the corpus": float(task_BS.mean()) - corpus_utility
                    if task_BS.size and corpus_utility is not None
                    else None,
                    "sd over subsets": float(task_BS.mean(axis=1).std(ddof=1)) if len(task_BS) > 1 else None,
                }
            )
        build = self.info.build_command(self.path)
        steps = [f"next: {build}", f"then: grasp evaluate art --runs {self.path}"] if build else []
        failed = self._failed_line()
        notes = (*([failed] if failed else []), *steps, geometry().calibration_evidence(len(self.subset_ids)))
        return Result(pa.Table.from_pylist(lines), self._headline(), notes)

    def __repr__(self) -> str:
        return repr(self._description())

    def _repr_html_(self) -> str:
        return self._description()._repr_html_()

    def _description(self) -> Result:
        """Return the contents of environment.json, without reading any runs."""
        units = {name: len(target.unit_ids) for name, target in self.info.targets.items()}
        table = pa.table({"target": list(units), "units": list(units.values())})
        return Result(table, self._headline(), ("summary() shows the results of the runs",))

    def _headline(self) -> str:
        return (
            f"{self.path}: {self.role}, recipe {self.info.recipe}, {len(self.subset_ids)} subsets x "
            f"{len(self.info.seeds)} seeds of {self.info.n_rows:,} rows"
        )

    @cached_property
    def measurement(self) -> tuple[str, str]:
        """Text that describes the measured utility, and text that describes the models."""
        seeds = f"{len(self.info.seeds)} seed" + ("s" if len(self.info.seeds) > 1 else "")
        return (
            "change in nats per token",
            f"for a model retrained as in {self.name} (recipe {self.info.recipe}, mean of {seeds})",
        )

    @cached_property
    def label(self) -> str | None:
        """The label that the subsets were drawn by."""
        return None if self.info.family is None else parse_family(self.info.family.spec).label

    # --------------------------------------------------------------------------------------- adding runs

    def runs(self) -> tuple[Run, ...]:
        """Return all runs: seed after seed, the whole corpus first."""
        subsets = ((WHOLE_CORPUS_RUN,) if self.info.reference else ()) + self.subset_ids
        return tuple(Run(seed, subset) for seed in self.info.seeds for subset in subsets)

    def pending(self) -> tuple[Run, ...]:
        """Return the runs without a result."""
        finished = self._finished()
        return tuple(run for run in self.runs() if run not in finished)

    def untried(self) -> tuple[Run, ...]:
        """Return the runs that have neither a result nor failed."""
        failed = self._failures()
        return tuple(run for run in self.pending() if run.stem not in failed)

    def claim(self, limit: int = 1, *, ttl: float = TTL_SECONDS) -> dict[Run, Lease]:
        """Lease up to `limit` untried runs of one seed; fewer, or none, if other workers hold the remaining ones.

        A run on the whole corpus is leased alone.

        Args:
            limit: maximum number of runs.
            ttl: seconds after which a lease of another worker expires and is taken over.
        """
        claimed: dict[Run, Lease] = {}
        claims = self.path / "claims"
        lease_generations = generations(claims)
        for run in self.untried():
            whole_corpus = run.subset_id == WHOLE_CORPUS_RUN
            if len(claimed) == limit:
                break
            if claimed and (whole_corpus or run.seed != next(iter(claimed)).seed):
                continue
            lease = acquire_lease(claims, run.stem, ttl=ttl, known=lease_generations)
            if lease is None:
                continue
            if run not in self.untried():  # finished before the lease was acquired
                lease.release()
                continue
            claimed[run] = lease
            if whole_corpus:
                break
        return claimed

    def write_run(self, run: Run, utility_E: F64) -> None:
        """Write the result of a run, unless it exists already.

        Args:
            utility_E: -loss of every unit, in the order of `units`.
        Raises:
            RunsError: wrong number of units, or a value that is not finite.
        """
        if utility_E.shape != (len(self.units),):
            raise RunsError(
                f"{self.path}: run {run.stem}: got {utility_E.shape} utilities, expected ({len(self.units)},)"
            )
        bad = np.flatnonzero(~np.isfinite(utility_E))
        if bad.size:
            target, unit = self.units[bad[0]]
            raise RunsError(
                f"{self.path}: run {run.stem}: utility of unit {unit!r} of {target} is {utility_E[bad[0]]} "
                f"({bad.size} such); the run diverged, lower the learning rate of the recipe"
            )
        path = self._run_path(run)
        if run not in self._finished():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, run_bytes([run], self.units, utility_E[None]))

    def compact(self) -> None:
        """Merge the files of single runs into utilities.parquet and reference.parquet, and remove them; idempotent.

        Raises:
            RunsError: runs are missing; the message contains their number and names.
        """
        all_runs, missing = self.runs(), self.pending()
        if missing:
            raise RunsError(
                f"{self.path}: {len(missing)} of {len(all_runs)} runs are missing, e.g. "
                f"{[run.stem for run in missing[:MAX_EXAMPLES]]}; continue with `grasp retrain --resume`"
            )
        if self._runs_in_single_files():
            values_RE = self._values()
            for name, is_reference in ((REFERENCE, True), (UTILITIES, False)):
                group = [r for r, run in enumerate(all_runs) if (run.subset_id == WHOLE_CORPUS_RUN) == is_reference]
                if group:
                    write_atomically(
                        self.path / name, run_bytes([all_runs[r] for r in group], self.units, values_RE[group])
                    )
        for run in all_runs:
            self._run_path(run).unlink(missing_ok=True)
        stems = {run.stem for run in all_runs}
        for lease in (self.path / "claims").glob("*.*"):  # only remove our own files: name of a run, dot, number
            stem, _, generation = lease.name.rpartition(".")
            if stem in stems and generation.isdigit():
                lease.unlink(missing_ok=True)
        for part in (*self.path.glob(".*"), *(self.path / "runs").glob(".*")):
            if is_part(part):
                remove_if_stale(part, older_than=TTL_SECONDS)

    # --------------------------------------------------------------------------------------- failed runs

    def mark_failed(self, run: Run, message: str) -> None:
        """Record the error message of a failed run."""
        (self.path / FAILED_DIRECTORY).mkdir(exist_ok=True)
        write_atomically(self.path / FAILED_DIRECTORY / f"{run.stem}.txt", " ".join(message.split()).encode())

    def forget_failures(self) -> None:
        """Delete the records of failed runs, so that they are retried."""
        discard(self.path / FAILED_DIRECTORY)

    def refuse_all_failed(self) -> None:
        """Check that at least one run did not fail.

        Raises:
            ModelError: all runs failed.
        """
        if len(self._failures()) == len(self.runs()):
            raise ModelError(f"{self.path}: {self._failed_line()}")

    def _failures(self) -> dict[str, str]:
        """Return the error messages of failed runs by stem."""
        files = sorted((self.path / FAILED_DIRECTORY).glob("[!.]*.txt"))
        return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}

    def _failed_line(self) -> str | None:
        """Return the number of failed runs with the error of the first one; None if no run failed."""
        failed = self._failures()
        if not failed:
            return None
        stem, message = next(iter(failed.items()))
        hint = f"rerun the command to retry {'it' if len(failed) == 1 else 'them'}"
        return f"{len(failed)} of {len(self.runs())} runs failed, e.g. {stem}: {message}; {hint}"

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """Yield the subsets in blocks, in the order of `subset_ids`, and verify their checksum at the end.

        Args:
            rows: names of the rows of the corpus.
            labels: label that the family draws by; only required without subsets.parquet.
            block: maximum number of subsets per block.
        Raises:
            RunsError: wrong number of rows, or the subsets are not those trained on.
            SubsetError: subsets.parquet cannot be read.
        """
        info = self.info
        if rows.n_rows != info.n_rows:
            raise RunsError(
                f"{self.path}: drawn from {info.n_rows} rows, got a corpus of {rows.n_rows}; use the corpus of the runs"
            )
        if (self.path / SUBSETS).exists():
            blocks = read_subsets(self.path / SUBSETS, rows, block)
        elif info.family is None:
            raise RunsError(f"{self.path / SUBSETS}: no such file; restore it from a copy")
        else:
            spec, seed, purpose = info.family.spec, info.family.seed, info.family.purpose
            blocks = parse_family(spec).draw(
                len(info.subset_ids), n_rows=rows.n_rows, labels=labels, seed=seed, purpose=purpose, block=block
            )
        digest = MaskDigest()
        yield from digest.update_with(blocks)
        if tuple(digest.ids) != info.subset_ids or digest.checksums[-1] != info.masks_checksum:
            raise RunsError(
                f"{self.path}: {len(digest.ids)} subsets with checksum {digest.checksums[-1]}, expected "
                f"{len(info.subset_ids)} with {info.masks_checksum}; these are not the subsets trained on"
            )

    # ------------------------------------------------------------------------------------------ internals

    def _run_path(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.stem}.parquet"

    def _runs_in_single_files(self) -> list[Run]:
        """Return the runs whose result is in a separate file."""
        directory = self.path / "runs"
        names = {path.name for path in directory.iterdir()} if directory.exists() else set()
        return [run for run in self.runs() if self._run_path(run).name in names]

    def _finished(self) -> set[Run]:
        """Return the runs that have a result."""
        # List single files first: a concurrent merge moves results from there to the merged files.
        finished = set(self._runs_in_single_files())
        for path in (self.path / UTILITIES, self.path / REFERENCE):
            if path.exists():
                pairs = _read(path, ["subset_id", "seed"]).group_by(["subset_id", "seed"]).aggregate([])
                finished |= {Run(row["seed"], row["subset_id"]) for row in pairs.to_pylist()} & set(self.runs())
        return finished

    def _values(self) -> F64:
        """Return utilities of all `runs`, (R, E); nan for unfinished runs."""
        runs, single = self.runs(), set(self._runs_in_single_files())
        values_RE = np.full((len(runs), len(self.units)), np.nan)
        for r, run in enumerate(runs):
            with suppress(FileNotFoundError):  # merged and removed in the meantime
                if run in single:
                    values_RE[r] = read_runs(self._run_path(run), [run], self.units)
        for path in (self.path / UTILITIES, self.path / REFERENCE):
            if path.exists():
                merged_RE = read_runs(path, runs, self.units)
                values_RE = np.where(np.isnan(merged_RE), values_RE, merged_RE)
        return values_RE


def _check_names(ids: Sequence[str], where: Path) -> None:
    """Check that subset ids are unique and usable as file names."""
    if not ids:
        raise RunsError(f"{where}: got no subsets, expected at least one")
    wrong = sorted({name for name, count in Counter(ids).items() if count > 1} | ({WHOLE_CORPUS_RUN} & set(ids)))
    if wrong:
        raise RunsError(
            f"{where}: subset ids {wrong[:MAX_EXAMPLES]} are repeated or reserved; give every subset a unique name"
        )
    long = [name for name in ids if len(Run(0, name).stem) > STEM_BYTES]
    if long:
        raise RunsError(
            f"{where}: subset id {long[0][:40]!r}... takes {len(Run(0, long[0]).stem)} bytes in the name of a file "
            f"({len(long)} such), expected at most {STEM_BYTES}; shorten it"
        )


class MaskDigest:
    """Running checksum of subset ids, rows, and weights other than 1, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.ids: list[str] = []
        self.checksums: list[str] = []  # after each subset

    def update_with(self, blocks: Iterable[SubsetBlock]) -> Iterator[SubsetBlock]:
        """Yield the blocks unchanged while adding them to the checksum."""
        for block in blocks:
            matrix = block.weights_BN
            for b, subset_id in enumerate(block.subset_ids):
                entries = slice(matrix.indptr[b], matrix.indptr[b + 1])
                order = np.argsort(matrix.indices[entries])
                rows, weights = matrix.indices[entries][order], matrix.data[entries][order]
                self._digest.update(subset_id.encode() + b"\0" + rows.astype("<i8").tobytes())
                if (weights != 1.0).any():
                    self._digest.update(weights.astype("<f8").tobytes())
                self.ids.append(subset_id)
                self.checksums.append(self._digest.hexdigest())
            yield block


# ----------------------------------------------------------------------------------------------- tables of utilities


def run_bytes(runs: Sequence[Run], units: Sequence[tuple[str, str]], utility_RE: F64) -> bytes:
    """Return a Parquet file of the utilities of `runs`; float32, 3 to 4 bytes per line.

    Args:
        units: (target, unit_id) of each column.
        utility_RE: -loss, nats per token.
    """
    n_runs, n_units = utility_RE.shape
    unit_of = pa.array(np.tile(np.arange(n_units), n_runs))
    run_of = pa.array(np.repeat(np.arange(n_runs), n_units))
    table = pa.table(
        {
            "subset_id": pa.array([run.subset_id for run in runs], pa.string()).take(run_of),
            "seed": pa.array([run.seed for run in runs], pa.int64()).take(run_of),
            "target": pa.array([name for name, _ in units], pa.string()).take(unit_of),
            "unit_id": pa.array([unit for _, unit in units], pa.string()).take(unit_of),
            "utility": pa.array(utility_RE.ravel(), pa.float32()),
        }
    )
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "use_dictionary": list(COLUMNS[:-1]),
        "column_encoding": {"utility": "BYTE_STREAM_SPLIT"},
    }
    with ChecksummedParquetWriter(sink, table.schema, compression_level=19, **options) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def read_runs(path: Path, runs: Sequence[Run], units: Sequence[tuple[str, str]]) -> F64:
    """Read utilities of `runs`, (R, E); nan for a run without lines.

    Args:
        runs: all runs that may occur.
        units: (target, unit_id) of each unit; a run must have all units.
    Raises:
        RunsError: not Parquet, missing columns or cells, unknown names, utilities that are not finite, duplicate lines,
            or missing units of a run. The message names the first.
        FileNotFoundError: no such file; expected if runs are merged concurrently.
    """
    table = _read(path, list(COLUMNS))
    r = _codes(table, ("subset_id", "seed"), {(run.subset_id, run.seed): i for i, run in enumerate(runs)}, path)
    e = _codes(table, ("target", "unit_id"), {unit: i for i, unit in enumerate(units)}, path)
    utility = table.column("utility").to_numpy().astype(np.float64)

    def cell(r: int, e: int) -> str:
        return f"{path}: subset {runs[r].subset_id!r}, seed {runs[r].seed}, {units[e][0]} unit {units[e][1]!r}"

    bad = np.flatnonzero(~(np.abs(utility) <= MAX_UTILITY))  # nan compares false
    if bad.size:
        raise RunsError(
            f"{cell(r[bad[0]], e[bad[0]])}: utility is {utility[bad[0]]} ({bad.size} such); delete that run and "
            "retrain it"
        )
    counts_RE = np.bincount(r * len(units) + e, minlength=len(runs) * len(units)).reshape(len(runs), len(units))
    for wrong, what, expected in (
        (counts_RE > 1, f"occurs {counts_RE.max()} times", "each once"),
        ((counts_RE == 0) & counts_RE.any(axis=1, keepdims=True), "is missing", "every unit of a run"),
    ):
        if wrong.any():
            r0, e0 = np.argwhere(wrong)[0]
            raise RunsError(f"{cell(r0, e0)} {what} ({wrong.sum()} such); expected {expected}")
    values_RE = np.full(counts_RE.shape, np.nan)
    values_RE[r, e] = utility
    return values_RE


def _read(path: Path, columns: list[str]) -> pa.Table:
    """Read columns of a table of utilities, all of whose cells have values."""
    try:
        names = list(pq.read_schema(path).names)
        if missing := [name for name in COLUMNS if name not in names]:
            raise RunsError(f"{path}: has columns {names}, lacks {missing}")
        table = read_checksummed(path, columns)
        table.validate(full=True)  # a flipped bit may result in invalid UTF-8
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise RunsError(
            f"{path}: cannot be read as Parquet: {' '.join(str(err).split())}; delete it and retrain, or restore it"
        ) from err
    for name in columns:
        empty = table.column(name).null_count
        if empty:
            raise RunsError(f"{path}: column {name} has {empty} empty cells, expected none")
    return table


def _codes(table: pa.Table, columns: tuple[str, str], code_of: Mapping[Any, int], path: Path) -> I64:
    """Return the position of each line's pair of names; raise RunsError for unknown pairs."""
    first, second = (table.column(name).combine_chunks().dictionary_encode() for name in columns)
    a_names, b_names = first.dictionary.to_pylist(), second.dictionary.to_pylist()
    grid = np.array([[code_of.get((a, b), -1) for b in b_names] for a in a_names], dtype=np.int64)
    a = first.indices.to_numpy(zero_copy_only=False)
    b = second.indices.to_numpy(zero_copy_only=False)
    codes = grid.reshape(len(a_names), len(b_names))[a, b]
    unknown = np.flatnonzero(codes < 0)
    if unknown.size:
        line = unknown[0]
        raise RunsError(
            f"{path}: line {line} has {columns[0]} {a_names[a[line]]!r}, {columns[1]} {b_names[b[line]]!r}, which "
            f"environment.json does not list ({unknown.size} such lines)"
        )
    return np.asarray(codes, dtype=np.int64)
