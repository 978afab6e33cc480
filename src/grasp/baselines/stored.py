"""Scores cached on disk: computed block by block, and looked up by a digest of everything that determines them.

Start with `BlockMethod`. Layout:

    <cache>/<method>-<digest>/
        scores.npy        (N, E) or (N, 1), float16 or float32, rows in corpus order
        scores.ids.json   {"units": [[target, unit_id], ...]}: the columns of (N, E) scores
        method.json       settings, seconds, account, and the identity that the digest is computed from; written last
        blocks/, work/    until then: scores so far, and intermediate results of the method

`<cache>` defaults to `<artifact>/baselines`. A subclass of `BlockMethod` implements `prepare`, which runs before the
first block and returns a `RowScorer` that scores a block of rows. A method may read the rows in several passes, called
parts, and its scores are the sum over them. A finished block is marked on disk, so that a killed run continues with the
next one.
"""

import hashlib
import json
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from pydantic import Field

from grasp.arrays import F32
from grasp.baselines.checkpoints import training_checkpoints
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError, SettingsError, ShapeError
from grasp.files import UNSIGNED, FileEntry
from grasp.methods.contract import Account, MethodInputs, MethodScores, RowMethod, Scores, Seconds
from grasp.settings import Settings
from grasp.store.contents import npy_bytes
from grasp.store.directory import Content, Schema, Store, write_content
from grasp.store.locks import locked
from grasp.store.records import JsonModel, Mark, Signed
from grasp.store.remote import open_store

SCORES, IDS, LOCK = "scores.npy", "scores.ids.json", ".lock"
BLOCK_ROWS = 16_384  # rows per block when stored scores are read
FORMAT_VERSION = 2


class ScoredBlock(Mark):
    """Scores of a block, summed over the parts so far; `seconds` is the total of these parts."""

    part: int
    start: int
    stop: int
    seconds: Seconds


class ScoreRecord(JsonModel):
    """Contents of method.json."""

    format: Literal["grasp-scores"] = "grasp-scores"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Checksum of this file with the checksum field zeroed.")
    identity: dict[str, Any]
    seconds: Seconds
    account: Account
    files: dict[str, FileEntry]


RECOVERY_HINT = "delete its directory to recompute it"
BLOCKS = Schema(
    mark=ScoredBlock, marks="blocks/*.json", plan="plan.json", other_files=("blocks",), recovery_hint=RECOVERY_HINT
)
RECORD = Signed(
    "method.json",
    ScoreRecord,
    "a record of scores",
    "grasp-scores",
    FORMAT_VERSION,
    RECOVERY_HINT,
    error_type=SettingsError,
)

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class RowScorer:
    """Scores rows for one part of a method.

    Attributes:
        score: returns the scores of rows [start, stop): (n, E) in the order of `inputs.units`, or (n, 1). The score of
            a row must not depend, up to rounding, on the block and the batches that contain it.
        account: summary, of which that of the last part is stored.
    """

    score: Callable[[int, int], Scores]
    account: Account


class BlockMethod(RowMethod[S]):
    """Base of methods that score rows block by block. The result is the sum over parts; most methods have one."""

    dtype: ClassVar[Literal["float16", "float32"]] = "float32"  # type of the stored scores
    version: ClassVar[int] = 1  # incremented when the numbers change; stored results of older versions are ignored

    def parts(self, inputs: MethodInputs) -> int:
        """Return the number of passes over the rows to sum, e.g. one per checkpoint to hold one model in memory."""
        del inputs
        return 1

    def extra_identity(self, inputs: MethodInputs) -> Mapping[str, Any]:
        """Return further values that determine the scores, besides the inputs that `requires` names."""
        del inputs
        return {}

    @abstractmethod
    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        """Do everything before the first block of a part: models, units, statistics over all rows.

        Called again when a killed run is resumed; save expensive intermediate results in `work`.

        Args:
            inputs: rows, units and models of the artifact.
            work: directory for intermediate results of this run.
            part: number of the pass over the rows, from 0; see `parts`.
        """

    def check(self, inputs: MethodInputs) -> None:
        super().check(inputs)
        if "checkpoints" in self.requires:
            training_checkpoints(inputs)

    def scores(self, inputs: MethodInputs, cache: Path) -> MethodScores:
        """Read the scores from disk, or compute them, resuming a killed run.

        Raises:
            GraspError: a required input is missing. Finished blocks are preserved.
            SettingsError: another process is computing the same scores.
        """
        directory = result_directory(cache, result_identity := identity(self, inputs))
        if not (directory / RECORD.name).exists() or (directory / BLOCKS.plan).exists():
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise SettingsError(
                    f"{cache}: scores cannot be stored here ({err.strerror}); copy the artifact to a writable directory"
                ) from err
            with locked(directory / LOCK):
                run = _Run(directory, shared_directory(cache, inputs, self.version), self, inputs)
                if not (directory / RECORD.name).exists():
                    run.finish(result_identity)
                run.clear()
        return _read(directory)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of an array on disk; the file is opened on each iteration."""

    path: Path

    def __iter__(self) -> Iterator[tuple[int, NDArray[Any]]]:
        scores = np.load(self.path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(scores), BLOCK_ROWS):
            yield start, np.asarray(scores[start : start + BLOCK_ROWS])


def result_directory(cache: Path, result_identity: Mapping[str, Any]) -> Path:
    """Return the directory of a result from its `identity`."""
    return cache / f"{result_identity['method']}-{digest(result_identity)}"


def shared_directory(cache: Path, inputs: MethodInputs, version: int) -> Path:
    """Return the directory that methods of one version share, for one model, tokenizer and corpus."""
    fingerprints = inputs.artifact.manifest.fingerprints
    shared_identity = {key: fingerprints.get(key) for key in ("model", "tokenizer", "corpus")} | {"version": version}
    return cache / f"shared-{digest(shared_identity)}"


def identity(method: BlockMethod[Any], inputs: MethodInputs) -> dict[str, Any]:
    """Return everything that determines a method's scores on an artifact."""
    fingerprints = inputs.artifact.manifest.fingerprints
    result_identity: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "method": method.name,
        "version": method.version,
        "settings": method.settings.model_dump(mode="json"),
        "seed": method.seed,
        "corpus": fingerprints.get("corpus"),
        "units": inputs.units.fingerprint,
    } | dict(method.extra_identity(inputs))
    if "tokens" in method.requires:
        result_identity["tokenizer"] = fingerprints.get("tokenizer")
        result_identity["unit_length"] = inputs.settings.targets.max_length
    if method.requires & {"model", "checkpoints"}:
        result_identity["model"] = fingerprints.get("model")
    if "checkpoints" in method.requires:
        result_identity["checkpoints"] = [
            (checkpoint.fingerprint, checkpoint.learning_rate) for checkpoint in training_checkpoints(inputs)
        ]
    if "runs" in method.requires:
        info = inputs.required_runs.runs.info
        result_identity["environment"] = [info.masks_checksum, info.recipe_settings, list(info.seeds)]
    return result_identity


def digest(identity: Mapping[str, Any]) -> str:
    """Return a short hash of an identity."""
    text = json.dumps(dict(identity), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Run:
    """A computation of scores, new or resumed."""

    def __init__(self, directory: Path, shared: Path, method: BlockMethod[Any], inputs: MethodInputs) -> None:
        self._directory, self._method, self._inputs = directory, method, inputs
        self._work, self._store = WorkArea(directory / "work", shared), Store(directory, BLOCKS)
        self._unrecorded = Seconds()  # time not yet recorded in the mark of a block

    def finish(self, result_identity: Mapping[str, Any]) -> None:
        """Score the remaining blocks, then write the result."""
        n_parts, blocks = self._method.parts(self._inputs), list(self._inputs.blocks())
        assert n_parts > 0
        self._store.begin({**result_identity, "blocks": [stop for _, stop in blocks]}, replace=True)
        last_part_of = {mark.start: mark.part for mark, _ in self._marks()}  # by first row of the block
        for part in range(n_parts):
            remaining = [block for block in blocks if last_part_of.get(block[0], -1) < part]
            # The last part always runs, since its scorer returns the account, even if all blocks are on disk.
            if remaining or part == n_parts - 1:
                account = self._score_part(part, remaining, "" if n_parts == 1 else f" {part + 1} of {n_parts}")
        self._write_result(account, result_identity)

    def _marks(self) -> list[tuple[ScoredBlock, str]]:
        """Return the marks of finished blocks and their names, ordered by part and row."""
        marks = [(self._store.mark(name), name) for name in self._store.parts]
        return sorted(marks, key=lambda item: (item[0].part, item[0].start))

    def clear(self) -> None:
        """Remove files that are only needed to resume."""
        shutil.rmtree(self._directory / "work")
        self._store.clear()

    def _score_part(self, part: int, remaining: list[tuple[int, int]], which: str) -> Account:
        """Score the remaining blocks of a part, and store each as the sum over the parts so far.

        Args:
            part: number of the part.
            remaining: first row, and row after the last, of each block.
            which: suffix of the progress message.
        """
        with self._timed():
            scorer = self._method.prepare(self._inputs, self._work, part)
        rows = sum(stop - start for start, stop in remaining)
        self._inputs.progress.stage(f"scoring rows{which}", rows=rows, tokens=None)
        for start, stop in remaining:
            previous_name, name = f"{part - 1}-{start}", f"{part}-{start}"
            with self._timed():
                block = self._score_block(scorer, start, stop)
            if part:
                block = block + np.load(self._store.file(previous_name), allow_pickle=False)
                self._unrecorded += self._store.mark(previous_name).seconds
            mark_fields = {"part": part, "start": start, "stop": stop, "seconds": self._unrecorded}
            self._store.put(name, {f"blocks/{name}.npy": npy_bytes(block)}, **mark_fields)
            self._store.drop(previous_name)
            self._unrecorded = Seconds()
            self._inputs.progress.advance(stop - start, 0)
        return scorer.account

    def _score_block(self, scorer: RowScorer, start: int, stop: int) -> F32:
        """Score a block, and check the shape and that all scores are finite in the stored dtype."""
        block, name = np.asarray(scorer.score(start, stop)), type(self._method).__name__
        n_units = self._inputs.n_units
        if block.ndim != 2 or len(block) != stop - start or block.shape[1] not in (1, n_units):
            raise ShapeError(
                f"{name}: rows {start} to {stop}: got shape {block.shape}, expected {(stop - start, n_units)} or "
                f"{(stop - start, 1)}"
            )
        # `not <=` instead of `>`: a NaN compares false, and must be refused.
        bad = np.argwhere(~(np.abs(block) <= np.finfo(self._method.dtype).max))
        if len(bad):
            row, column = bad[0]
            unit = self._inputs.units.units[column].unit_id if block.shape[1] > 1 else "any"
            raise ModelError(
                f"{name}: score of row {start + row} for unit {unit!r} is {block[row, column]} ({len(bad)} such in "
                f"this block), expected a finite {self._method.dtype} number; {self._advice()}"
            )
        return block.astype(np.float32, copy=False)

    def _advice(self) -> str:
        """Return a hint for a score that is not finite."""
        dtype = self._inputs.settings.model.dtype
        if self._method.requires & {"model", "checkpoints"} and dtype != "float32":
            return f"the model is in {dtype}, build with model.dtype: float32"
        return "check the row, the unit and the settings of the method"

    def _write_result(self, account: Account, result_identity: Mapping[str, Any]) -> None:
        """Write the scores of all blocks, the ids of the units, and the record, which makes the result complete."""
        # A killed run may leave marks of an earlier part; marks are ordered by part, so the last one is taken.
        final_marks = {mark.start: (mark, name) for mark, name in self._marks()}.values()
        for mark, _ in final_marks:
            self._unrecorded += mark.seconds

        def write_scores(path: Path) -> None:
            scores = None
            for mark, name in final_marks:
                block = np.load(self._store.file(name), allow_pickle=False)
                if scores is None:
                    shape = self._inputs.n_rows, block.shape[1]
                    scores = open_memmap(path, mode="w+", dtype=np.dtype(self._method.dtype), shape=shape)
                scores[mark.start : mark.stop] = block
            assert scores is not None
            scores.flush()

        units = [[unit.target, unit.unit_id] for unit in self._inputs.units.units]
        files: dict[str, Content] = {SCORES: write_scores, IDS: json.dumps({"units": units}).encode()}
        entries = {name: write_content(self._directory / name, content) for name, content in files.items()}
        record = ScoreRecord(identity=dict(result_identity), seconds=self._unrecorded, account=account, files=entries)
        RECORD.write(self._directory, record)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of the `with` block to that of the next mark."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._unrecorded += Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def _read(directory: Path) -> MethodScores:
    record, files = open_store(directory, RECORD)
    files.file(IDS)
    shape = np.load(files.file(SCORES), mmap_mode="r", allow_pickle=False).shape
    return MethodScores(_Blocks(directory / SCORES), shape, record.account, record.seconds)
