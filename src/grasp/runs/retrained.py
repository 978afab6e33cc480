"""Retrained runs on disk, an environment: what was trained on what, and the utilities that came of it.

    environment.json     what was trained on what, with which recipe and seeds; its role
    subsets.parquet      subset_id, row_id, weight of the retained side; absent where the family regenerates it
    utilities.parquet    subset_id, seed, target, unit_id, utility = -loss in nats a token; once all runs are there
    reference.parquet    the same of the runs on the whole corpus, subset_id `full`
    runs/                one small file a run until then: `<subset_id>-<seed>.parquet`
    claims/              who is at work on which run
    failed/              of runs that failed since `grasp retrain` was last called, why, a line each
    reference/seed-<s>/  checkpoints of the run on the whole corpus

Every file is written aside and renamed, so what exists is whole. A run is one subset with one seed; the run on the
whole corpus is called `full`. Tables may have their lines in any order, and are checked on reading. Readers see arrays
(B, S, E): subsets, seeds, units; R: runs.
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
from grasp.artifact.where import LabelColumn
from grasp.errors import ModelError, RunsError
from grasp.files import differences, discard, is_part, kind_of, remove_stale, write_whole, written_aside
from grasp.predict.families import parse_family
from grasp.predict.scoring_rule import geometry
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import Result
from grasp.settings import CorpusSettings, Settings, TargetSettings
from grasp.store.checksummed_parquet import ChecksummedParquetWriter, read_checksummed
from grasp.store.locks import TTL_SECONDS, Lease, acquire_lease, generations
from grasp.store.records import Signed
from grasp.targets.units import LossOn

Role = Literal["dev", "held-out"]

FORMAT_VERSION = 1
INFO = "environment.json"
SUBSETS = "subsets.parquet"
UTILITIES = "utilities.parquet"
REFERENCE = "reference.parquet"
FAILED = "failed"
MARKER = ".grasp-environment"  # whose directory it is; the lock of those who prepare it
FULL = "full"  # the run on the whole corpus
ALL_SUFFIX = "@all"  # of a target whose units carry loss on every token
EXAMPLES = 3
STEM_BYTES = 200  # of the file names of a run; file systems take 255, endings included
LARGEST = 1e30  # of a utility: sums of squares stay finite
COLUMNS = ("subset_id", "seed", "target", "unit_id", "utility")


# ---------------------------------------------------------------------------------------------------- environment.json


class TargetInfo(Settings):
    """One target as it was scored."""

    fingerprint: str = Field(description="Of its units: ids, prompts, completions, tokens that carry loss.")
    loss_on: LossOn
    unit_ids: tuple[str, ...]


class FamilyInfo(Settings):
    """How the subsets were drawn, so that they can be drawn again."""

    spec: str = Field(description="E.g. mixture:topic.")
    seed: int
    purpose: str


class RetrainedRunsInfo(Settings):
    """environment.json."""

    format: Literal["grasp-environment"] = "grasp-environment"
    format_version: int = FORMAT_VERSION
    role: Role = Field(description="Whether protocols may be selected on it.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of a dev environment that are held out.")
    recipe: str = Field(description="Name of the recipe.")
    recipe_settings: dict[str, Any] = Field({}, description="The recipe in full.")
    checkpoint: str = Field("reference/seed-0", description="The reference model, relative to the environment.")
    seeds: tuple[int, ...]
    corpus_fingerprint: str
    n_rows: int
    targets: dict[str, TargetInfo]
    side: Literal["retained"] = "retained"
    family: FamilyInfo | None = Field(None, description="None: the subsets were given as a table.")
    subset_ids: tuple[str, ...]
    masks_checksum: str = Field(description="Over subset ids, row positions and weights, in order.")
    reference: bool = Field(True, description="Whether the whole corpus is trained on as well, once a seed.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and settings; not compared on resume.")
    checksum: str = Field("", description="Of this file, with the checksum itself as zeros; empty: written by hand.")

    def build_command(self, path: Path) -> str | None:
        """The `grasp build` that gives an artifact of the same rows and units; None: it is not known how they came.

        Args:
            path: directory of the environment.
        """
        corpus, targets = (self.made_by.get(group) for group in ("corpus", "targets"))
        if not isinstance(corpus, dict) or not isinstance(targets, dict) or not self.reference:
            return None
        words = ["--model", str(path / self.checkpoint), "--corpus", str(corpus["path"])]
        words += ["--targets", ",".join(targets["names"])] if targets.get("names") else []
        for group, group_settings, kind in (("corpus", corpus, CorpusSettings), ("targets", targets, TargetSettings)):
            for name, value in group_settings.items():
                if name in ("path", "names") or (field := kind.model_fields.get(name)) is None:
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
    none=f"is not an environment (no {INFO}); name what grasp retrain or grasp runs import wrote",
    unsigned=True,
)


def is_environment(path: Path) -> bool:
    """Whether an environment lies there."""
    try:
        return bool(SIGNED_INFO.read(path))
    except RunsError:
        return False


# --------------------------------------------------------------------------------------------------- runs and utilities


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One training run: the unit of work, of claims, and of what a kill can cost."""

    seed: int
    subset_id: str

    @property
    def stem(self) -> str:
        """File name without suffix; safe for any subset id."""
        return f"{quote(self.subset_id, safe='')}-{self.seed}"


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
            raise RunsError(f"target {unknown[0]!r}: not among {list(dict.fromkeys(self.targets))}; name one of them")
        columns = [e for e, name in enumerate(self.targets) if name in targets]
        return Utilities(
            self.values_BSE[:, :, columns],
            self.subset_ids,
            self.seeds,
            tuple(self.targets[e] for e in columns),
            tuple(self.unit_ids[e] for e in columns),
        )


class TrainingRuns(ABC):
    """Runs on subsets of a corpus, with the utilities that training gave; either retrained or imported."""

    unit = "nats"  # what columns of realized utilities are called
    notes: Sequence[str] = ()  # what should be known of the runs

    def __init__(self, path: Path, info: RetrainedRunsInfo) -> None:
        self.path = path
        self.info = info

    # --------------------------------------------------------------------------- supplied by each kind of runs

    @property
    @abstractmethod
    def measurement(self) -> tuple[str, str]:
        """What was measured, and of which models, in words."""

    @property
    @abstractmethod
    def label(self) -> str | None:
        """The label that the subsets were drawn by."""

    @abstractmethod
    def pending(self) -> tuple[Run, ...]:
        """Runs without a result."""

    @abstractmethod
    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """The subsets in blocks, in the order of `subset_ids`."""

    @abstractmethod
    def _values(self) -> F64:
        """Utilities of all runs, (R, E): seed after seed, the whole corpus first; nan where there is none yet."""

    # --------------------------------------------------------------------------------------- what it is

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

    def check_corpus(self, fingerprint: str, where: str) -> None:
        """Refuse a corpus other than the one trained on.

        Raises:
            RunsError: fingerprints differ; the message has both.
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
        """Realized utilities, (B, S, E), -loss in nats a token; higher is better.

        Args:
            target: None: all of them, target after target.
            seeds: None: all of them.
            partial: of an unfinished environment, the subsets that have a result for every one of `seeds`.
        Raises:
            RunsError: a run is missing (unless `partial`), repeated or not a number; an unknown
                subset, seed, target or unit. The message names it.
        """
        if target is not None:
            self._check_target(target)
        chosen = self.info.seeds if seeds is None else tuple(seeds)
        unknown = [seed for seed in chosen if seed not in self.info.seeds]
        if unknown or not chosen:
            raise RunsError(f"{self.path}: got seeds {list(chosen)}, expected some of {self.info.seeds}")
        values_BSE = self._values_by_subset()[-len(self.subset_ids) :]
        values_BSE = values_BSE[:, [self.info.seeds.index(seed) for seed in chosen]]
        lacks_BS = np.isnan(values_BSE[:, :, 0])
        if lacks_BS.any() and not partial:
            missing = [Run(chosen[s], self.subset_ids[b]).stem for s, b in np.argwhere(lacks_BS.T)]
            raise RunsError(
                f"{self.path}: {len(missing)} runs are missing, e.g. {missing[:EXAMPLES]}; "
                "run `grasp retrain --resume` to go on, or use what is there: --partial (partial=True)"
            )
        complete = np.flatnonzero(~lacks_BS.any(axis=1))
        targets, unit_ids = (tuple(unit[k] for unit in self.units) for k in (0, 1))
        ids = tuple(self.subset_ids[b] for b in complete)
        utilities = Utilities(values_BSE[complete], ids, chosen, targets, unit_ids)
        return utilities if target is None else utilities.select(target)

    def task_utilities(self, targets: Sequence[str]) -> F64:
        """Mean over the units of targets, (B, S, T); nan for a run without that seed."""
        utilities = self.utilities()
        return np.stack([utilities.select(name).values_BSE.mean(axis=2) for name in targets], axis=2)

    def reference_utilities(self) -> F64:
        """Utilities of the model trained on the whole corpus, (S, E); none where it was not trained."""
        if not self.info.reference:
            return np.empty((0, len(self.units)))
        whole_SE = self._values_by_subset()[0]
        return np.asarray(whole_SE[~np.isnan(whole_SE[:, 0])])

    def task_reference(self, targets: Sequence[str]) -> F64:
        """The same by target, (S, T)."""
        reference_SE = self.reference_utilities()
        of_target = [[e for e, (name, _) in enumerate(self.units) if name == target] for target in targets]
        return np.stack([reference_SE[:, columns].mean(axis=1) for columns in of_target], axis=1)

    def _check_target(self, target: str) -> None:
        if target not in self.info.targets:
            raise RunsError(f"{self.path}: has no target {target!r}, expected one of {list(self.info.targets)}")

    def _values_by_subset(self) -> F64:
        """The same by subset, the whole corpus first if it is trained on, and seed: (1 + B, S, E)."""
        return self._values().reshape(len(self.info.seeds), -1, len(self.units)).swapaxes(0, 1)


class RetrainedRuns(TrainingRuns):
    """A directory of runs, being filled or complete."""

    # ------------------------------------------------------------------------------------- open, create

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an environment; its utilities are read, and checked, when asked for.

        Raises:
            RunsError: not there, damaged, or of another format version; one of its files is no file.
        """
        path = Path(path)
        for name in (INFO, SUBSETS, UTILITIES, REFERENCE):  # it may come from a stranger: a pipe has no end
            if (kind := kind_of(path / name)) not in ("file", "nothing"):
                raise RunsError(f"{path / name}: is a {kind}, expected a regular file; restore it")
        return cls(path, SIGNED_INFO.read(path))

    @classmethod
    def create(cls, path: Path, info: RetrainedRunsInfo, blocks: Iterable[SubsetBlock], rows: RowIndex) -> Self:
        """Begin an environment, or go on with one that was begun with the same settings.

        Seeds and subsets may be added to what was begun; nothing else may change.

        Args:
            info: `subset_ids` and `masks_checksum` are filled in from `blocks`.
            blocks: the retained sides; a row of weight 2 is seen twice as often as one of weight 1.
        Raises:
            RunsError: another environment was begun here (every difference is named), or the subsets are
                none, unnamed, repeated, or have names too long for a file.
        """
        path.mkdir(parents=True, exist_ok=True)
        with written_aside(path / SUBSETS) as part:
            digest = MaskDigest()
            write_subsets(part, digest.seen(blocks), rows, weights=True, compression_level=19)
            ids, checksums = tuple(digest.ids), digest.checksums
            _check_names(ids, path / SUBSETS)
            info = info.model_copy(update={"subset_ids": ids, "masks_checksum": checksums[-1]})
            if (path / INFO).exists():
                begun = SIGNED_INFO.read(path)
                may_change = {"seeds", "subset_ids", "masks_checksum", "made_by", "checksum"}
                then, now = (record.model_dump(mode="json", exclude=may_change) for record in (begun, info))
                differs = list(differences(then, now))
                if info.seeds[: len(begun.seeds)] != begun.seeds:
                    differs.append(f"seeds: was {begun.seeds}, is {info.seeds}")
                n_begun = len(begun.subset_ids)
                if len(ids) < n_begun or checksums[n_begun - 1] != begun.masks_checksum:
                    differs.append(
                        f"subsets: was {n_begun} with checksum {begun.masks_checksum}, is {len(ids)} with "
                        f"{checksums[-1]}"
                    )
                if differs:
                    shortened = [text if len(text) < 400 else text[:400] + " ..." for text in differs]
                    raise RunsError(
                        f"{path}: another environment was begun here: {'; '.join(shortened)}; "
                        "go on with the old settings, or choose another directory"
                    )
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
        failed = self._failed_line()
        notes = (*([failed] if failed else []), *steps, geometry().calibration_evidence(len(self.subset_ids)))
        return Result(pa.Table.from_pylist(lines), self._headline(), notes)

    def __repr__(self) -> str:
        return repr(self._described())

    def _repr_html_(self) -> str:
        return self._described()._repr_html_()

    def _described(self) -> Result:
        """What environment.json says: runs are read, and checked, when they are asked for."""
        units = {name: len(target.unit_ids) for name, target in self.info.targets.items()}
        table = pa.table({"target": list(units), "units": list(units.values())})
        return Result(table, self._headline(), ("summary(): what came of the runs",))

    def _headline(self) -> str:
        return (
            f"{self.path}: {self.role}, recipe {self.info.recipe}, {len(self.subset_ids)} subsets x "
            f"{len(self.info.seeds)} seeds of {self.info.n_rows:,} rows"
        )

    @cached_property
    def measurement(self) -> tuple[str, str]:
        """What was measured, and of which models, in words."""
        seeds = f"{len(self.info.seeds)} seed" + ("s" if len(self.info.seeds) > 1 else "")
        return "nats a token", f"for a model retrained as in {self.name} (recipe {self.info.recipe}, mean of {seeds})"

    @cached_property
    def label(self) -> str | None:
        """The label that the subsets were drawn by."""
        return None if self.info.family is None else parse_family(self.info.family.spec).label

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
        failed = self._failures()
        return tuple(run for run in self.pending() if run.stem not in failed)

    def claim(self, limit: int = 1, *, ttl: float = TTL_SECONDS) -> dict[Run, Lease]:
        """Lease up to `limit` untried runs of one seed; fewer, or none, where others hold the rest.

        A run on the whole corpus comes alone. A run whose lease is older than `ttl` seconds is taken over.
        """
        claimed: dict[Run, Lease] = {}
        claims = self.path / "claims"
        known = generations(claims)
        for run in self.untried():
            whole_corpus = run.subset_id == FULL
            if len(claimed) == limit:
                break
            if claimed and (whole_corpus or run.seed != next(iter(claimed)).seed):
                continue
            lease = acquire_lease(claims, run.stem, ttl=ttl, known=known)
            if lease is None:
                continue
            if run not in self.untried():  # finished between the look and the lease
                lease.release()
                continue
            claimed[run] = lease
            if whole_corpus:
                break
        return claimed

    def write_run(self, run: Run, utility_E: F64) -> None:
        """Keep the result of one run; a result that is there already stays as it is.

        Args:
            utility_E: -loss of every unit, in the order of `units`.
        Raises:
            RunsError: another number of units, or a value that is not finite.
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
            write_whole(path, run_bytes([run], self.units, utility_E[None]))

    def compact(self) -> None:
        """Merge the runs into utilities.parquet and reference.parquet, then remove them; again does nothing.

        Raises:
            RunsError: runs are missing; the message counts and names them.
        """
        all_runs, missing = self.runs(), self.pending()
        if missing:
            raise RunsError(
                f"{self.path}: {len(missing)} of {len(all_runs)} runs are missing, e.g. "
                f"{[run.stem for run in missing[:EXAMPLES]]}; run `grasp retrain --resume` to go on"
            )
        if self._single():
            values_RE = self._values()
            for name, is_reference in ((REFERENCE, True), (UTILITIES, False)):
                group = [r for r, run in enumerate(all_runs) if (run.subset_id == FULL) == is_reference]
                if group:
                    write_whole(self.path / name, run_bytes([all_runs[r] for r in group], self.units, values_RE[group]))
        for run in all_runs:
            self._run_path(run).unlink(missing_ok=True)
        stems = {run.stem for run in all_runs}
        for lease in (self.path / "claims").glob("*.*"):  # only what we made: a name of a run and a number
            stem, _, generation = lease.name.rpartition(".")
            if stem in stems and generation.isdigit():
                lease.unlink(missing_ok=True)
        for part in (*self.path.glob(".*"), *(self.path / "runs").glob(".*")):
            if is_part(part):
                remove_stale(part, older_than=TTL_SECONDS)

    # ---------------------------------------------------------------------------------- runs that failed

    def mark_failed(self, run: Run, why: str) -> None:
        """Keep why a run failed."""
        (self.path / FAILED).mkdir(exist_ok=True)
        write_whole(self.path / FAILED / f"{run.stem}.txt", " ".join(why.split()).encode())

    def forget_failures(self) -> None:
        """What failed is tried again."""
        discard(self.path / FAILED)

    def refuse_all_failed(self) -> None:
        """See that not every run failed.

        Raises:
            ModelError: every one did.
        """
        if len(self._failures()) == len(self.runs()):
            raise ModelError(f"{self.path}: {self._failed_line()}")

    def _failures(self) -> dict[str, str]:
        """Why each run failed, by its stem."""
        files = sorted((self.path / FAILED).glob("[!.]*.txt"))
        return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}

    def _failed_line(self) -> str | None:
        """How many runs failed, and why the first of them did; none: no run failed."""
        failed = self._failures()
        if not failed:
            return None
        stem, why = next(iter(failed.items()))
        hint = f"the same command tries {'it' if len(failed) == 1 else 'them'} again"
        return f"{len(failed)} of {len(self.runs())} runs failed, e.g. {stem}: {why}; {hint}"

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """The subsets in blocks, in the order of `subset_ids`; checked against the checksum as they pass.

        Args:
            rows: names of the corpus' rows.
            labels: the label that the family is drawn by; needed only where subsets.parquet is not there.
        Raises:
            RunsError: another number of rows, or masks that are not the ones trained on.
            SubsetError: subsets.parquet cannot be read.
        """
        info = self.info
        if rows.n_rows != info.n_rows:
            raise RunsError(
                f"{self.path}: drawn from {info.n_rows} rows, got a corpus of {rows.n_rows}; "
                "use the corpus of the environment"
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
        yield from digest.seen(blocks)
        if tuple(digest.ids) != info.subset_ids or digest.checksums[-1] != info.masks_checksum:
            raise RunsError(
                f"{self.path}: {len(digest.ids)} subsets with checksum {digest.checksums[-1]}, expected "
                f"{len(info.subset_ids)} with {info.masks_checksum}; these are not the subsets trained on"
            )

    # ------------------------------------------------------------------------------------------- inside

    def _run_path(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.stem}.parquet"

    def _single(self) -> list[Run]:
        """Runs whose result has a file of its own."""
        directory = self.path / "runs"
        names = {path.name for path in directory.iterdir()} if directory.exists() else set()
        return [run for run in self.runs() if self._run_path(run).name in names]

    def _finished(self) -> set[Run]:
        done = set(self._single())  # these first: a merge in between moves results from here to the merged files
        for path in (self.path / UTILITIES, self.path / REFERENCE):
            if path.exists():
                pairs = _read(path, ["subset_id", "seed"]).group_by(["subset_id", "seed"]).aggregate([])
                done |= {Run(row["seed"], row["subset_id"]) for row in pairs.to_pylist()} & set(self.runs())
        return done

    def _values(self) -> F64:
        """Utilities of all `runs`, (R, E); nan where there is none yet."""
        runs, single = self.runs(), set(self._single())
        values_RE = np.full((len(runs), len(self.units)), np.nan)
        for r, run in enumerate(runs):
            with suppress(FileNotFoundError):  # merged and removed meanwhile
                if run in single:
                    values_RE[r] = read_runs(self._run_path(run), [run], self.units)
        for path in (self.path / UTILITIES, self.path / REFERENCE):
            if path.exists():
                merged_RE = read_runs(path, runs, self.units)
                values_RE = np.where(np.isnan(merged_RE), values_RE, merged_RE)
        return values_RE


def _check_names(ids: Sequence[str], where: Path) -> None:
    """See that runs can be called by the ids of the subsets."""
    if not ids:
        raise RunsError(f"{where}: got no subsets, expected at least one")
    wrong = sorted({name for name, count in Counter(ids).items() if count > 1} | ({FULL} & set(ids)))
    if wrong:
        raise RunsError(f"{where}: subset ids {wrong[:EXAMPLES]} are repeated or reserved; name every subset once")
    long = [name for name in ids if len(Run(0, name).stem) > STEM_BYTES]
    if long:
        raise RunsError(
            f"{where}: subset id {long[0][:40]!r}... takes {len(Run(0, long[0]).stem)} bytes in the name of a file "
            f"({len(long)} such), expected at most {STEM_BYTES}; shorten it"
        )


class MaskDigest:
    """Running checksum over the ids and rows of subsets, and weights other than 1, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.ids: list[str] = []
        self.checksums: list[str] = []  # after each subset

    def seen(self, blocks: Iterable[SubsetBlock]) -> Iterator[SubsetBlock]:
        """The same blocks, each of which is added as it passes."""
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


# ------------------------------------------------------------------------------------------------ results, line by line


def run_bytes(runs: Sequence[Run], units: Sequence[tuple[str, str]], utility_RE: F64) -> bytes:
    """A Parquet file of the utilities of `runs`; float32, 3 to 4 bytes a line.

    Args:
        units: (target, unit_id) of each column.
        utility_RE: -loss, nats a token.
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
    how: dict[str, Any] = {"use_dictionary": list(COLUMNS[:-1]), "column_encoding": {"utility": "BYTE_STREAM_SPLIT"}}
    with ChecksummedParquetWriter(sink, table.schema, compression_level=19, **how) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def read_runs(path: Path, runs: Sequence[Run], units: Sequence[tuple[str, str]]) -> F64:
    """Utilities of `runs`, (R, E); nan for a run that the table has no line of.

    Args:
        runs: all runs that may occur.
        units: (target, unit_id) of each unit; every run must have every one.
    Raises:
        RunsError: not Parquet, a column is missing, an empty cell, a name that may not occur, a
            utility that is not finite, a line twice, a run that lacks units. The message names the first.
        FileNotFoundError: no such file; where runs are merged while they are read this is no mistake.
    """
    table = _read(path, list(COLUMNS))
    r = _codes(table, ("subset_id", "seed"), {(run.subset_id, run.seed): i for i, run in enumerate(runs)}, path)
    e = _codes(table, ("target", "unit_id"), {unit: i for i, unit in enumerate(units)}, path)
    utility = table.column("utility").to_numpy().astype(np.float64)

    def cell(r: int, e: int) -> str:
        return f"{path}: subset {runs[r].subset_id!r}, seed {runs[r].seed}, {units[e][0]} unit {units[e][1]!r}"

    bad = np.flatnonzero(~(np.abs(utility) <= LARGEST))  # nan compares false
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
    try:
        names = list(pq.read_schema(path).names)
        if missing := [name for name in COLUMNS if name not in names]:
            raise RunsError(f"{path}: has columns {names}, lacks {missing}")
        table = read_checksummed(path, columns)
        table.validate(full=True)  # a flipped bit may leave names that are no text
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
    """Position of each line's pair of names; a pair that the environment does not have is refused."""
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
