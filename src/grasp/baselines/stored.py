"""Scores cached on disk: computed block by block, and looked up by a digest of everything that determines them.

Start with `BlockMethod`. Layout:

    <cache>/<method>-<digest>/
        scores.npy        (N, E) or (N, 1), float16 or float32, rows in corpus order
        scores.ids.json   {"units": [[target, unit_id], ...]}: the columns of (N, E) scores
        method.json       settings, seconds, account, and the identity that the digest is computed from; written last
        work/             until then: scores so far, progress.json, and intermediate results of the method

`<cache>` defaults to `<artifact>/baselines`. A subclass of `BlockMethod` implements `prepare`, which runs before the
first block and returns a `RowScorer` that scores a block of rows. A method may read the rows in several passes, called
parts, and its scores are the sum over them. Progress is recorded after each block, so that a killed run continues with
the next one.
"""

import hashlib
import json
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load_file, save_file

from grasp.arrays import F32
from grasp.baselines.checkpoints import training_checkpoints
from grasp.errors import ModelError, SettingsError, ShapeError
from grasp.files import UNSIGNED, FileEntry, atomic_path, write_atomically
from grasp.methods.contract import Account, MethodInputs, MethodScores, RowMethod, Scores, Seconds
from grasp.settings import Settings
from grasp.store.directory import Content, write_content
from grasp.store.locks import locked
from grasp.store.records import JsonModel, Signed
from grasp.store.remote import open_store

SCORES, IDS, WORK, LOCK = "scores.npy", "scores.ids.json", "work", ".lock"
PROGRESS = "progress.json"
BLOCK_ROWS = 16_384  # rows per block when stored scores are read
FORMAT_VERSION = 3


class ScoreRecord(JsonModel):
    """Contents of method.json."""

    format: Literal["grasp-scores"] = "grasp-scores"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Checksum of this file with the checksum field zeroed.")
    identity: dict[str, Any]
    seconds: Seconds
    account: Account
    files: dict[str, FileEntry]


RECORD = Signed(
    "method.json",
    ScoreRecord,
    "a record of scores",
    "grasp-scores",
    FORMAT_VERSION,
    "delete its directory to recompute it",
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
    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        """Do everything before the first block of a part: models, units, statistics over all rows.

        Called again when a killed run is resumed; save expensive intermediate results in `work`, see `cached`.

        Args:
            inputs: rows, units and models of the artifact.
            work: directory for intermediate results of this run, removed at its end.
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
        result_identity = identity(self, inputs)
        digest = hashlib.blake2b(json.dumps(result_identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        directory = cache / f"{self.name}-{digest}"
        work = directory / WORK
        if not (directory / RECORD.name).exists() or work.exists():
            try:
                work.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise SettingsError(
                    f"{cache}: scores cannot be stored here ({err.strerror}); copy the artifact to a writable directory"
                ) from err
            with locked(directory / LOCK):
                if not (directory / RECORD.name).exists():
                    _Run(self, inputs, work).finish(directory, result_identity)
                shutil.rmtree(work, ignore_errors=True)
        record, files = open_store(directory, RECORD)
        files.file(IDS)
        scores = np.load(files.file(SCORES), mmap_mode="r", allow_pickle=False)
        blocks = [
            (k, np.asarray(scores[k : k + BLOCK_ROWS])) for k in range(0, len(scores), BLOCK_ROWS)
        ]  # not yet read
        return MethodScores(blocks, scores.shape, record.account, record.seconds)


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


def cached(path: Path, compute: Callable[[], Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Load the arrays of an intermediate result; compute and save them first if the file does not exist."""
    if not path.exists():
        arrays = {name: np.ascontiguousarray(array) for name, array in compute().items()}
        with atomic_path(path) as part:
            save_file(arrays, part)
    return dict(load_file(path))


class _Run:
    """A computation of scores, new or resumed: rows before `stop` are scored in part `part`, and in earlier parts."""

    def __init__(self, method: BlockMethod[Any], inputs: MethodInputs, work: Path) -> None:
        self._method, self._inputs, self._work = method, inputs, work
        self._part, self._stop, self._seconds = 0, 0, Seconds()
        if (work / PROGRESS).exists():
            recorded = json.loads((work / PROGRESS).read_text(encoding="utf-8"))
            self._part, self._stop, self._seconds = recorded["part"], recorded["stop"], Seconds(**recorded["seconds"])

    def finish(self, directory: Path, result_identity: Mapping[str, Any]) -> None:
        """Score the remaining blocks of all parts, then write the scores and the record that makes them complete."""
        n_parts = self._method.parts(self._inputs)
        for part in range(self._part, n_parts):
            if self._stop == self._inputs.n_rows and part < n_parts - 1:
                self._stop = 0
                continue
            # The last part always runs, since its scorer returns the account, even if all blocks are on disk.
            which = "" if n_parts == 1 else f" {part + 1} of {n_parts}"
            with self._timed():
                scorer = self._method.prepare(self._inputs, self._work, part)
            self._inputs.progress.stage(f"scoring rows{which}", rows=self._inputs.n_rows - self._stop, tokens=None)
            for start, stop in self._inputs.blocks(self._stop):
                with self._timed():
                    block = self._score_block(scorer, start, stop)
                if part:
                    block = block + np.load(self._part_path(part - 1), mmap_mode="r", allow_pickle=False)[start:stop]
                path, shape = self._part_path(part), (self._inputs.n_rows, block.shape[1])
                if not path.exists():
                    with atomic_path(path) as unfinished:
                        open_memmap(unfinished, mode="w+", dtype=np.float32, shape=shape).flush()
                total_NE = open_memmap(path, mode="r+")
                total_NE[start:stop] = block
                total_NE.flush()
                self._stop = stop
                recorded = {"part": part, "stop": stop, "seconds": asdict(self._seconds)}
                write_atomically(self._work / PROGRESS, json.dumps(recorded).encode())
                self._inputs.progress.advance(stop - start, 0)
            self._part_path(part - 1).unlink(missing_ok=True)
            self._stop = 0 if part < n_parts - 1 else self._stop
        total_NE = np.load(self._part_path(n_parts - 1), mmap_mode="r", allow_pickle=False)

        def write_scores(path: Path) -> None:
            scores = open_memmap(path, mode="w+", dtype=np.dtype(self._method.dtype), shape=total_NE.shape)
            scores[:] = total_NE
            scores.flush()

        units = [[unit.target, unit.unit_id] for unit in self._inputs.units.units]
        files: dict[str, Content] = {SCORES: write_scores, IDS: json.dumps({"units": units}).encode()}
        entries = {name: write_content(directory / name, content) for name, content in files.items()}
        account, seconds = scorer.account, self._seconds
        record = ScoreRecord(identity=dict(result_identity), seconds=seconds, account=account, files=entries)
        RECORD.write(directory, record)

    def _part_path(self, part: int) -> Path:
        """Return the path of the scores summed over the parts up to this one, (N, E) or (N, 1)."""
        return self._work / f"part-{part}.npy"

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
            dtype, advice = self._inputs.settings.model.dtype, "check the row, the unit and the settings of the method"
            if self._method.requires & {"model", "checkpoints"} and dtype != "float32":
                advice = f"the model is in {dtype}, build with model.dtype: float32"
            unit = self._inputs.units.units[column].unit_id if block.shape[1] > 1 else "any"
            raise ModelError(
                f"{name}: score of row {start + row} for unit {unit!r} is {block[row, column]} ({len(bad)} such in "
                f"this block), expected a finite {self._method.dtype} number; {advice}"
            )
        return block.astype(np.float32, copy=False)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of the `with` block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._seconds += Seconds(time.perf_counter() - wall, time.process_time() - cpu)
