"""Scores on disk: computed once for what decides them, block by block, found again by a digest.

    <cache>/<method>-<digest>/
        scores.npy        (N, E) or (N, 1), float16 or float32, rows in corpus order
        scores.ids.json   {"units": [[target, unit_id], ...]}: with it, (N, E) is what `evaluate --predictions` reads
        method.json       settings, seconds, account; everything that the digest is made of; written last
        blocks/, work/    until then: the scores so far, and what the method keeps for itself

`<cache>` is `<artifact>/baselines` unless another directory is named. `BlockMethod` gives all of this to a method that
says what is done before the first block, and how a block is scored.
"""

import hashlib
import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from pydantic import Field

from grasp.arrays import F32
from grasp.baselines.checkpoints import checkpoints_of
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
READ_ROWS = 16_384
FORMAT_VERSION = 2


class ScoredBlock(Mark):
    """Some rows' scores, summed over the parts so far; seconds are those of all these parts."""

    part: int
    start: int
    stop: int
    seconds: Seconds


class ScoreRecord(JsonModel):
    """method.json."""

    format: Literal["grasp-scores"] = "grasp-scores"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Of this file, with the checksum itself as zeros.")
    identity: dict[str, Any]
    seconds: Seconds
    account: Account
    files: dict[str, FileEntry]


REMADE = "delete its directory, it is made again"
BLOCKS = Schema(mark=ScoredBlock, marks="blocks/*.json", plan="plan.json", ours=("blocks",), again=REMADE)
RECORD = Signed(
    "method.json", ScoreRecord, "a record of scores", "grasp-scores", FORMAT_VERSION, REMADE, mistake=SettingsError
)

S = TypeVar("S", bound=Settings)


class RowScorer(ABC):
    """A part of a method, ready to score."""

    @abstractmethod
    def score(self, start: int, stop: int) -> Scores:
        """Rows [start, stop): (n, E) in the order of `material.units`, or (n, 1).

        Every row's score is the same, up to rounding, whatever the block and the batches it is in.
        """

    @abstractmethod
    def account(self) -> Account:
        """Asked of the last part after its last block; also when all blocks were found ready."""


class BlockMethod(RowMethod[S]):
    """Scores rows block by block, on disk. The sum over all parts is the result; most methods have one part."""

    dtype: ClassVar[Literal["float16", "float32"]] = "float32"  # of the stored scores
    version: ClassVar[int] = 1  # raised when the numbers change: stored results of an older one are not used

    def parts(self, material: MethodInputs) -> int:
        """How many passes over the rows are added up: one a checkpoint, say, so that one model is in memory."""
        del material
        return 1

    def decided_by(self, material: MethodInputs) -> Mapping[str, Any]:
        """What of the material decides the numbers beside what `looks_at` names; part of what a result is found by."""
        del material
        return {}

    @abstractmethod
    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        """Everything before the first block of a part: models, units, statistics over all rows.

        Called again when a killed run goes on; what takes long is kept in `work` and found there.
        """

    def check(self, material: MethodInputs) -> None:
        super().check(material)
        if "checkpoints" in self.looks_at:
            checkpoints_of(material)

    def scores(self, material: MethodInputs, cache: Path) -> "StoredScores":
        """Scores that are read if they are there, else computed, going on where a killed run was.

        Raises:
            GraspError: what the method needs is not there. Nothing that was finished is lost.
            SettingsError: another process computes the same scores.
        """
        place = place_of(cache, described := identity(self, material))
        if not (place / RECORD.name).exists() or (place / BLOCKS.plan).exists():
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise SettingsError(
                    f"{cache}: scores cannot be kept here ({err.strerror}); name another place with --cache"
                ) from err
            with locked(place / LOCK):
                run = _Run(place, shared_of(cache, material, self.version), self, material)
                if not (place / RECORD.name).exists():
                    run.finish(described)
                run.clear()
        return _read(place)


@dataclass(frozen=True)
class StoredScores(MethodScores):
    """Scores of every row, on disk."""

    path: Path = Path()


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of an array on disk; opened each time they are gone through."""

    path: Path

    def __iter__(self) -> Iterator[tuple[int, NDArray[Any]]]:
        scores = np.load(self.path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(scores), READ_ROWS):
            yield start, np.asarray(scores[start : start + READ_ROWS])


def place_of(cache: Path, described: Mapping[str, Any]) -> Path:
    """Directory of a result, by what `identity` says."""
    return cache / f"{described['method']}-{digest(described)}"


def shared_of(cache: Path, material: MethodInputs, version: int) -> Path:
    """Where methods of one version keep what others can use, for one model, tokenizer and corpus."""
    fingerprints = material.artifact.manifest.fingerprints
    decided = {key: fingerprints.get(key) for key in ("model", "tokenizer", "corpus")} | {"version": version}
    return cache / f"shared-{digest(decided)}"


def identity(method: BlockMethod[Any], material: MethodInputs) -> dict[str, Any]:
    """Everything that decides a method's numbers on an artifact."""
    fingerprints = material.artifact.manifest.fingerprints
    found: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "method": method.name,
        "version": method.version,
        "settings": method.settings.model_dump(mode="json"),
        "seed": method.seed,
        "corpus": fingerprints.get("corpus"),
        "units": material.units.fingerprint,
    } | dict(method.decided_by(material))
    if "tokens" in method.looks_at:
        found["tokenizer"] = fingerprints.get("tokenizer")
        found["unit_length"] = material.settings.targets.max_length
    if method.looks_at & {"model", "checkpoints"}:
        found["model"] = fingerprints.get("model")
    if "checkpoints" in method.looks_at:
        found["checkpoints"] = [(one.fingerprint, one.learning_rate) for one in checkpoints_of(material)]
    if "environment" in method.looks_at:
        info = material.environment.environment.info
        found["environment"] = [info.masks_checksum, info.recipe_settings, list(info.seeds)]
    return found


def digest(identity: Mapping[str, Any]) -> str:
    """Short name of an identity."""
    text = json.dumps(dict(identity), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Run:
    """One computation, begun or gone on with."""

    def __init__(self, place: Path, shared: Path, method: BlockMethod[Any], material: MethodInputs) -> None:
        self._place, self._method, self._material = place, method, material
        self._work, self._store = WorkArea(place / "work", shared), Store(place, BLOCKS)
        self._spent = Seconds()  # that no block's mark says yet

    def finish(self, described: Mapping[str, Any]) -> None:
        """Score what is left, then let the result appear under its name."""
        n_parts, blocks = self._method.parts(self._material), list(self._material.blocks())
        if n_parts < 1:
            raise ModelError(f"{type(self._method).__name__}: got {n_parts} passes over the rows, expected at least 1")
        self._store.begin({**described, "blocks": [stop for _, stop in blocks]}, replace=True)
        done = {mark.start: mark.part for mark, _ in self._marks()}
        for part in range(n_parts):
            left = [block for block in blocks if done.get(block[0], -1) < part]
            if left or part == n_parts - 1:
                account = self._score_part(part, left, "" if n_parts == 1 else f" {part + 1} of {n_parts}")
        self._write_result(account, described)

    def _marks(self) -> list[tuple[ScoredBlock, str]]:
        """Marks of the blocks so far and their names; those of a later part come later."""
        marks = [(self._store.mark(name), name) for name in self._store.parts]
        return sorted(marks, key=lambda item: (item[0].part, item[0].start))

    def clear(self) -> None:
        """Remove what only a run that is killed needs."""
        shutil.rmtree(self._place / "work")
        self._store.clear()

    def _score_part(self, part: int, left: list[tuple[int, int]], which: str) -> Account:
        with self._timed():
            scorer = self._method.prepare(self._material, self._work, part)
        rows = sum(stop - start for start, stop in left)
        self._material.progress.stage(f"scoring rows{which}", rows=rows, tokens=None)
        for start, stop in left:
            before, name = f"{part - 1}-{start}", f"{part}-{start}"
            with self._timed():
                block = self._checked(scorer, start, stop)
            if part:
                block = block + np.load(self._store.file(before), allow_pickle=False)
                self._spent += self._store.mark(before).seconds
            told = {"part": part, "start": start, "stop": stop, "seconds": self._spent}
            self._store.put(name, {f"blocks/{name}.npy": npy_bytes(block)}, **told)
            self._store.drop(before)
            self._spent = Seconds()
            self._material.progress.advance(stop - start, 0)
        return scorer.account()

    def _checked(self, scorer: RowScorer, start: int, stop: int) -> F32:
        block, name = np.asarray(scorer.score(start, stop)), type(self._method).__name__
        n_units = self._material.n_units
        if block.ndim != 2 or len(block) != stop - start or block.shape[1] not in (1, n_units):
            raise ShapeError(
                f"{name}: rows {start} to {stop}: got shape {block.shape}, expected {(stop - start, n_units)} or "
                f"{(stop - start, 1)}"
            )
        bad = np.argwhere(~(np.abs(block) <= np.finfo(self._method.dtype).max))
        if len(bad):
            row, column = bad[0]
            unit = self._material.units.units[column].unit_id if block.shape[1] > 1 else "any"
            raise ModelError(
                f"{name}: score of row {start + row} for unit {unit!r} is {block[row, column]} ({len(bad)} such in "
                f"this block), expected a number that {self._method.dtype} holds; {self._advice()}"
            )
        return block.astype(np.float32, copy=False)

    def _advice(self) -> str:
        """What may help where a score is no number."""
        dtype = self._material.settings.model.dtype
        if self._method.looks_at & {"model", "checkpoints"} and dtype != "float32":
            return f"the model is in {dtype}, build with model.dtype: float32"
        return "look at the row, the unit and the method's settings"

    def _write_result(self, account: Account, described: Mapping[str, Any]) -> None:
        last = {mark.start: (mark, name) for mark, name in self._marks()}.values()  # a kill may have left earlier ones
        for mark, _ in last:
            self._spent += mark.seconds

        def joined(path: Path) -> None:
            scores = None
            for mark, name in last:
                block = np.load(self._store.file(name), allow_pickle=False)
                if scores is None:
                    shape = self._material.n_rows, block.shape[1]
                    scores = open_memmap(path, mode="w+", dtype=np.dtype(self._method.dtype), shape=shape)
                scores[mark.start : mark.stop] = block
            assert scores is not None
            scores.flush()

        units = [[unit.target, unit.unit_id] for unit in self._material.units.units]
        files: dict[str, Content] = {SCORES: joined, IDS: json.dumps({"units": units}).encode()}
        entries = {name: write_content(self._place / name, content) for name, content in files.items()}
        record = ScoreRecord(identity=dict(described), seconds=self._spent, account=account, files=entries)
        RECORD.write(self._place, record)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._spent += Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def _read(place: Path) -> StoredScores:
    record, files = open_store(place, RECORD)
    files.file(IDS)
    shape = np.load(files.file(SCORES), mmap_mode="r", allow_pickle=False).shape
    return StoredScores(_Blocks(place / SCORES), shape, record.account, record.seconds, place)
