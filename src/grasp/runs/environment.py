"""An environment on disk: subsets, and the utilities that retraining on each of them gave.

    environment.json     what was trained on what, with which recipe and seeds; its role
    subsets.parquet      subset_id, row_id, weight of the retained side; absent where the family regenerates it
    utilities.parquet    subset_id, seed, target, unit_id, utility = -loss in nats a token; once all runs are there
    reference.parquet    the same of the runs on the whole corpus, subset_id `full`
    runs/                one small file a run until then: `<subset_id>-<seed>.parquet`
    claims/              who is at work on which run
    reference/seed-<s>/  checkpoints of the run on the whole corpus

Every file is written aside and renamed, so what exists is whole. A run is one subset with one seed; the run on the
whole corpus is called `full`. Readers see arrays (B, S, E): subsets, seeds, units.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from grasp.arrays import F64
from grasp.errors import EnvironmentDataError
from grasp.files import is_part, kind_of, remove_stale, write_whole, written_aside
from grasp.predict.families import parse_family
from grasp.predict.labels import LabelColumn
from grasp.predict.protocol import geometry
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import Result
from grasp.runs.environment_files import (
    EXAMPLES,
    FULL,
    INFO,
    SIGNED_INFO,
    EnvironmentInfo,
    MaskDigest,
    Role,
    Run,
    check_growth,
    failed_line,
    failures,
    read_runs,
    run_bytes,
    runs_in,
)
from grasp.store.locks import TTL_SECONDS, Lease, acquire_lease, generations

ALL_SUFFIX = "@all"  # of a target whose units carry loss on every token
MARKER = ".grasp-environment"  # whose directory it is; the lock of those who prepare it
SUBSETS = "subsets.parquet"
UTILITIES = "utilities.parquet"
REFERENCE = "reference.parquet"


@dataclass(frozen=True, slots=True)
class Utilities:
    """What training gave, by subset, seed and unit: minus the loss, or the runs' own metric."""

    values_BSE: F64
    subset_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    targets: tuple[str, ...]  # of each unit, (E,)
    unit_ids: tuple[str, ...]  # (E,)

    def select(self, *targets: str) -> "Utilities":
        """The units of one target, or of several in the order that they have here."""
        unknown = [name for name in targets if name not in self.targets]
        if unknown:
            raise EnvironmentDataError(
                f"target {unknown[0]!r}: not among {list(dict.fromkeys(self.targets))}; name one of them"
            )
        columns = [e for e, name in enumerate(self.targets) if name in targets]
        return Utilities(
            self.values_BSE[:, :, columns],
            self.subset_ids,
            self.seeds,
            tuple(self.targets[e] for e in columns),
            tuple(self.unit_ids[e] for e in columns),
        )


def is_environment(path: Path) -> bool:
    """Whether an environment lies there."""
    try:
        return bool(SIGNED_INFO.read(path))
    except EnvironmentDataError:
        return False


class Environment:
    """An environment directory, being filled or complete."""

    def __init__(self, path: Path, info: EnvironmentInfo) -> None:
        self.path = path
        self.info = info

    # ------------------------------------------------------------------------------------- open, create

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an environment; its utilities are read, and checked, when asked for.

        Raises:
            EnvironmentDataError: not there, damaged, or of another format version; one of its files is no file.
        """
        path = Path(path)
        for name in (INFO, SUBSETS, UTILITIES, REFERENCE):  # it may come from a stranger: a pipe has no end
            if (kind := kind_of(path / name)) not in ("file", "nothing"):
                raise EnvironmentDataError(f"{path / name}: is a {kind}, expected a regular file; restore it")
        return cls(path, SIGNED_INFO.read(path))

    @classmethod
    def create(cls, path: Path, info: EnvironmentInfo, blocks: Iterable[SubsetBlock], rows: RowIndex) -> Self:
        """Begin an environment, or go on with one that was begun with the same settings.

        Seeds and subsets may be added to what was begun; nothing else may change.

        Args:
            info: `subset_ids` and `masks_checksum` are filled in from `blocks`.
            blocks: the retained sides; a row of weight 2 is seen twice as often as one of weight 1.
        Raises:
            EnvironmentDataError: another environment was begun here (every difference is named), or the
                subsets are none, unnamed or repeated.
        """
        path.mkdir(parents=True, exist_ok=True)
        with written_aside(path / SUBSETS) as part:
            digest = MaskDigest()
            write_subsets(part, digest.seen(blocks), rows, weights=True, compression_level=19)
            digest.check_names(path / SUBSETS)
            info = info.model_copy(update={"subset_ids": tuple(digest.ids), "masks_checksum": digest.checksums[-1]})
            if (path / INFO).exists():
                begun = SIGNED_INFO.read(path)
                check_growth(path, begun, info, digest.checksums)
                if begun == info.model_copy(update={"made_by": begun.made_by, "checksum": begun.checksum}):
                    info = begun
        SIGNED_INFO.write(path, info)
        return cls.open(path)

    # ---------------------------------------------------------------------------------------- what it is

    def summary(self) -> Result:
        """What was trained, a line a target: its units, how far subsets lie from the corpus and apart; what is next."""
        utilities = self.utilities(partial=True)
        whole_ST, lines = self.task_reference(list(self.info.targets)), []
        for t, (name, target) in enumerate(self.info.targets.items()):
            task_BS = utilities.select(name).values_BSE.mean(axis=2)
            whole = float(whole_ST[:, t].mean()) if len(whole_ST) == task_BS.shape[1] else None
            lines.append(
                {
                    "target": name,
                    "units": len(target.unit_ids),
                    "utility": float(task_BS.mean()) if task_BS.size else None,
                    "against the corpus": float(task_BS.mean()) - whole if task_BS.size and whole is not None else None,
                    "sd over subsets": float(task_BS.mean(axis=1).std(ddof=1)) if len(task_BS) > 1 else None,
                }
            )
        build = self.info.build_command(self.path)
        steps = [f"next: {build}", f"then: grasp evaluate art --runs {self.path}"] if build else []
        failed = failed_line(self.path, len(self.runs()))
        notes = (*([failed] if failed else []), *steps, geometry().evidence(len(self.subset_ids)))
        return Result(pa.Table.from_pylist(lines), self._headline, notes)

    def __repr__(self) -> str:
        return repr(self._described())

    def _repr_html_(self) -> str:
        return self._described()._repr_html_()

    def _described(self) -> Result:
        """What environment.json says: runs are read, and checked, when they are asked for."""
        units = {name: len(target.unit_ids) for name, target in self.info.targets.items()}
        table = pa.table({"target": list(units), "units": list(units.values())})
        return Result(table, self._headline, ("summary(): what came of the runs",))

    @property
    def _headline(self) -> str:
        return (
            f"{self.path}: {self.role}, recipe {self.info.recipe}, {len(self.subset_ids)} subsets x "
            f"{len(self.info.seeds)} seeds of {self.info.n_rows:,} rows"
        )

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

    @cached_property
    def unit(self) -> str:
        """What columns of realized utilities are called."""
        return "nats"

    @cached_property
    def described(self) -> tuple[str, str]:
        """What was measured, and of which models, in words."""
        seeds = f"{len(self.info.seeds)} seed" + ("s" if len(self.info.seeds) > 1 else "")
        return "nats a token", f"for a model retrained as in {self.name} (recipe {self.info.recipe}, mean of {seeds})"

    @cached_property
    def label(self) -> str | None:
        """The label that the subsets were drawn by."""
        return None if self.info.family is None else parse_family(self.info.family.spec).label

    @cached_property
    def notes(self) -> list[str]:
        """What should be known of the runs."""
        return []

    @property
    def units(self) -> tuple[tuple[str, str], ...]:
        """(target, unit_id) of every unit, target after target: the order of the last axis."""
        return tuple((name, unit) for name, info in self.info.targets.items() for unit in info.unit_ids)

    def role_of(self, target: str) -> Role:
        """Role of one target; a held-out environment holds out all of its targets.

        A task is held out with all of its losses: holding out `sciq` holds out `sciq@all` as well.
        """
        self._check_target(target)
        held_out = {target, target.removesuffix(ALL_SUFFIX)} & set(self.info.held_out_targets)
        return "held-out" if held_out else self.info.role

    def fingerprint(self, first: SubsetBlock) -> str:
        """What these runs are known by in any directory: corpus, recipe and draw; more subsets or seeds keep it.

        Args:
            first: the first block of the subsets; the first of them stands for the draw where a table gave them.
        """
        info = self.info
        drawn = info.family.model_dump() if info.family else np.sort(first.weights_BN[[0]].indices).tolist()
        known = [info.corpus_fingerprint, info.recipe, info.recipe_settings, drawn]
        return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()

    # --------------------------------------------------------------------------------------- filling it

    def runs(self) -> tuple[Run, ...]:
        """All runs: seed after seed, the whole corpus first."""
        subsets = ((FULL,) if self.info.reference else ()) + self.subset_ids
        return tuple(Run(seed, subset) for seed in self.info.seeds for subset in subsets)

    def pending(self) -> tuple[Run, ...]:
        """Runs without a result."""
        done = self._finished()
        return tuple(run for run in self.runs() if run not in done)

    def untried(self) -> tuple[Run, ...]:
        """Runs without a result that have not failed either."""
        failed = failures(self.path)
        return tuple(run for run in self.pending() if run.stem not in failed)

    def claim(self, limit: int = 1, *, ttl: float = TTL_SECONDS) -> dict[Run, Lease]:
        """Lease up to `limit` untried runs of one seed; fewer, or none, where others hold the rest.

        A run on the whole corpus comes alone. A run whose lease is older than `ttl` seconds is taken over.
        """
        claimed: dict[Run, Lease] = {}
        known = generations(self._claims)
        seed: int | None = None
        for run in self.untried():
            alone = run.subset_id == FULL
            if len(claimed) == limit:
                break
            if (seed is not None and run.seed != seed) or (alone and claimed):
                continue
            lease = acquire_lease(self._claims, run.stem, ttl=ttl, known=known)
            if lease is None:
                continue
            if run not in self.untried():  # finished between the look and the lease
                lease.release()
                continue
            seed = run.seed
            claimed[run] = lease
            if alone:
                break
        return claimed

    def write_run(self, run: Run, utility_E: F64) -> None:
        """Keep the result of one run; a result that is there already stays as it is.

        Args:
            utility_E: -loss of every unit, in the order of `units`.
        Raises:
            EnvironmentDataError: another number of units, or a value that is not finite.
        """
        if utility_E.shape != (len(self.units),):
            raise EnvironmentDataError(
                f"{self.path}: run {run.stem}: got {utility_E.shape} utilities, expected ({len(self.units)},)"
            )
        bad = np.flatnonzero(~np.isfinite(utility_E))
        if bad.size:
            target, unit = self.units[bad[0]]
            raise EnvironmentDataError(
                f"{self.path}: run {run.stem}: utility of unit {unit!r} of {target} is {utility_E[bad[0]]} "
                f"({bad.size} such); the run diverged, lower the learning rate of the recipe"
            )
        path = self._run_path(run)
        if run not in self._finished():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, run_bytes([run], self.units, utility_E[None]))

    def compact(self) -> None:
        """Merge the runs into utilities.parquet and reference.parquet, then remove them; again does nothing.

        Raises:
            EnvironmentDataError: runs are missing; the message counts and names them.
        """
        missing = self.pending()
        if missing:
            raise EnvironmentDataError(
                f"{self.path}: {len(missing)} of {len(self.runs())} runs are missing, e.g. "
                f"{[run.stem for run in missing[:EXAMPLES]]}; run `grasp retrain --resume` to go on"
            )
        if any(self._run_path(run).exists() for run in self.runs()):
            try:
                values = {run: self._read_run(run) for run in self.runs() if self._run_path(run).exists()}
                values = self._merged() | values
            except FileNotFoundError:
                return  # another process has just merged and removed them
            for path, keep in ((REFERENCE, True), (UTILITIES, False)):
                runs = [run for run in self.runs() if (run.subset_id == FULL) == keep]
                if runs:
                    stacked = np.stack([values[run] for run in runs])
                    write_whole(self.path / path, run_bytes(runs, self.units, stacked))
        for run in self.runs():
            self._run_path(run).unlink(missing_ok=True)
        stems = {run.stem for run in self.runs()}
        for lease in self._claims.glob("*.*"):  # only what we made: a name of a run and a number
            stem, _, generation = lease.name.rpartition(".")
            if stem in stems and generation.isdigit():
                lease.unlink(missing_ok=True)
        for part in (*self.path.glob(".*"), *(self.path / "runs").glob(".*")):
            if is_part(part):
                remove_stale(part, older_than=TTL_SECONDS)

    # --------------------------------------------------------------------------------------- reading it

    def utilities(
        self, target: str | None = None, *, seeds: Sequence[int] | None = None, partial: bool = False
    ) -> Utilities:
        """Realized utilities, (B, S, E), -loss in nats a token; higher is better.

        Args:
            target: None: all of them, target after target.
            seeds: None: all of them.
            partial: of an unfinished environment, the subsets that have a result for every one of `seeds`.
        Raises:
            EnvironmentDataError: a run is missing (unless `partial`), repeated or not a number; an unknown
                subset, seed, target or unit. The message names it.
        """
        if target is not None:
            self._check_target(target)
        chosen = self.info.seeds if seeds is None else tuple(seeds)
        unknown = [seed for seed in chosen if seed not in self.info.seeds]
        if unknown or not chosen:
            raise EnvironmentDataError(f"{self.path}: got seeds {list(chosen)}, expected some of {self.info.seeds}")
        values = self._all_values()
        ids = [b for b in self.subset_ids if all(Run(seed, b) in values for seed in chosen)]
        if len(ids) < len(self.subset_ids) and not partial:
            missing = [r.stem for r in self.runs() if r not in values and r.seed in chosen and r.subset_id != FULL]
            raise EnvironmentDataError(
                f"{self.path}: {len(missing)} runs are missing, e.g. {missing[:EXAMPLES]}; "
                "run `grasp retrain --resume` to go on, or use what is there: --partial (partial=True)"
            )
        shape = (len(ids), len(chosen), len(self.units))
        flat = [values[Run(seed, b)] for b in ids for seed in chosen]
        whole = Utilities(
            np.stack(flat).reshape(shape) if flat else np.empty(shape),
            tuple(ids),
            chosen,
            tuple(name for name, _ in self.units),
            tuple(unit for _, unit in self.units),
        )
        return whole if target is None else whole.select(target)

    def task_utilities(self, targets: Sequence[str]) -> F64:
        """Mean over the units of targets, (B, S, T); nan for a run without that seed."""
        utilities = self.utilities()
        return np.stack([utilities.select(name).values_BSE.mean(axis=2) for name in targets], axis=2)

    def task_reference(self, targets: Sequence[str]) -> F64:
        """The same of the model trained on the whole corpus, (S, T); none where it was not trained."""
        reference_SE = self.reference_utilities()
        of_target = [[e for e, (name, _) in enumerate(self.units) if name == target] for target in targets]
        return np.stack([reference_SE[:, columns].mean(axis=1) for columns in of_target], axis=1)

    def reference_utilities(self) -> F64:
        """Utilities of the model trained on the whole corpus, (S, E); none where it was not trained."""
        values = self._all_values()
        found = [values[Run(seed, FULL)] for seed in self.info.seeds if Run(seed, FULL) in values]
        return np.stack(found) if found else np.empty((0, len(self.units)))

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """The subsets in blocks, in the order of `subset_ids`; checked against the checksum as they pass.

        Args:
            rows: names of the corpus' rows.
            labels: the label that the family is drawn by; needed only where subsets.parquet is not there.
        Raises:
            EnvironmentDataError: another number of rows, or masks that are not the ones trained on.
            SubsetError: subsets.parquet cannot be read.
        """
        if rows.n_rows != self.info.n_rows:
            raise EnvironmentDataError(
                f"{self.path}: drawn from {self.info.n_rows} rows, got a corpus of {rows.n_rows}; "
                "use the corpus of the environment"
            )
        return self._checked_blocks(self._blocks(rows, labels, block))

    def check_corpus(self, fingerprint: str, where: str) -> None:
        """Refuse a corpus other than the one trained on.

        Raises:
            EnvironmentDataError: fingerprints differ; the message has both.
        """
        if fingerprint != self.info.corpus_fingerprint:
            raise EnvironmentDataError(
                f"{where}: corpus fingerprint {fingerprint}, but {self.path} was trained on "
                f"{self.info.corpus_fingerprint}; build from the same corpus, tokenizer and packing"
            )

    # ------------------------------------------------------------------------------------------- inside

    @property
    def _claims(self) -> Path:
        return self.path / "claims"

    def _run_path(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.stem}.parquet"

    def _check_target(self, target: str) -> None:
        if target not in self.info.targets:
            raise EnvironmentDataError(
                f"{self.path}: has no target {target!r}, expected one of {list(self.info.targets)}"
            )

    def _finished(self) -> set[Run]:
        # runs first, merged files second: a merge in between moves results from the first to the second
        runs = self.path / "runs"
        stems = {path.name for path in runs.iterdir()} if runs.exists() else set()
        done = {run for run in self.runs() if self._run_path(run).name in stems}
        paths = [self.path / name for name in (UTILITIES, REFERENCE)]
        merged = {run for path in paths if path.exists() for run in runs_in(path)}
        return done | (merged & set(self.runs()))

    def _read_run(self, run: Run) -> F64:
        return read_runs(self._run_path(run), self.runs(), self.units)[run]

    def _merged(self) -> dict[Run, F64]:
        values: dict[Run, F64] = {}
        for name in (UTILITIES, REFERENCE):
            path = self.path / name
            if path.exists():
                values |= read_runs(path, self.runs(), self.units)
        return values

    def _all_values(self) -> dict[Run, F64]:
        done = self._finished()
        try:
            parts = {run: self._read_run(run) for run in done if self._run_path(run).exists()}
        except FileNotFoundError:
            parts = {}  # merged and removed meanwhile
        return parts | self._merged()

    def _blocks(self, rows: RowIndex, labels: LabelColumn | None, block: int) -> Iterator[SubsetBlock]:
        if (self.path / SUBSETS).exists():
            return read_subsets(self.path / SUBSETS, rows, block)
        family = self.info.family
        if family is None:
            raise EnvironmentDataError(f"{self.path / SUBSETS}: no such file; restore it from a copy")
        return parse_family(family.spec).draw(
            len(self.subset_ids),
            n_rows=rows.n_rows,
            labels=labels,
            seed=family.seed,
            purpose=family.purpose,
            block=block,
        )

    def _checked_blocks(self, blocks: Iterable[SubsetBlock]) -> Iterator[SubsetBlock]:
        digest = MaskDigest()
        yield from digest.seen(blocks)
        if tuple(digest.ids) != self.subset_ids or digest.checksums[-1] != self.info.masks_checksum:
            raise EnvironmentDataError(
                f"{self.path}: {len(digest.ids)} subsets with checksum {digest.checksums[-1]}, expected "
                f"{len(self.subset_ids)} with {self.info.masks_checksum}; these are not the subsets trained on"
            )
