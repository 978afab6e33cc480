"""Scores on disk: computed once for what decides them, block by block, found again by a digest.

    <cache>/<method>-<digest>/
        scores.npy        (N, E) or (N, 1), float16 or float32, rows in corpus order
        scores.ids.json   {"units": [[target, unit_id], ...]}: with it, (N, E) is what `evaluate --predictions` reads
        method.json       settings, seconds, account; everything that the digest is made of
    <cache>/<method>-<digest>.part/     of a run that goes on where it was, or goes on being killed
        sum-<p>.npy       the scores of the parts so far, added up
        progress.json     which part, rows that are done, seconds spent
        work/             what the method keeps for itself

`<cache>` is `<artifact>/baselines` unless another directory is named. `BlockMethod` gives all of this to a method that
says what is done before the first block, and how a block is scored.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from grasp.baselines.checkpoints import checkpoints_of
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError, SettingsError, ShapeError
from grasp.files import write_whole
from grasp.runs.contract import Account, Material, MethodScores, RowMethod, Scores, Seconds
from grasp.settings import Settings

SCORES, IDS, RECORD, PROGRESS, LOCK = "scores.npy", "scores.ids.json", "method.json", "progress.json", "lock"
READ_ROWS = 16_384


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

    def parts(self, material: Material) -> int:
        """How many passes over the rows are added up: one a checkpoint, say, so that one model is in memory."""
        del material
        return 1

    def decided_by(self, material: Material) -> Mapping[str, Any]:
        """What of the material decides the numbers beside what `looks_at` names; part of what a result is found by."""
        del material
        return {}

    @abstractmethod
    def prepare(self, material: Material, work: WorkArea, part: int) -> RowScorer:
        """Everything before the first block of a part: models, units, statistics over all rows.

        Called again when a killed run goes on; what takes long is kept in `work` and found there.
        """

    def check(self, material: Material) -> None:
        super().check(material)
        if "checkpoints" in self.looks_at:
            checkpoints_of(material)

    def scores(self, material: Material, cache: Path) -> "StoredScores":
        """Scores that are read if they are there, else computed, going on where a killed run was.

        Raises:
            GraspError: what the method needs is not there. Nothing that was finished is lost.
            SettingsError: another process computes the same scores.
        """
        described = identity(self, material)
        place = place_of(cache, described)
        if not place.exists():
            part = place.with_name(place.name + ".part")
            _make(part)
            with _alone(part):
                if not place.exists():
                    _Run(part, shared_of(cache, material, self.version), self, material).finish(place, described)
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


def shared_of(cache: Path, material: Material, version: int) -> Path:
    """Where methods of one version keep what others can use, for one model, tokenizer and corpus."""
    fingerprints = material.artifact.manifest.fingerprints
    decided = {key: fingerprints.get(key) for key in ("model", "tokenizer", "corpus")} | {"version": version}
    return cache / f"shared-{digest(decided)}"


def identity(method: BlockMethod[Any], material: Material) -> dict[str, Any]:
    """Everything that decides a method's numbers on an artifact."""
    fingerprints = material.artifact.manifest.fingerprints
    found: dict[str, Any] = {
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

    def __init__(self, part: Path, shared: Path, method: BlockMethod[Any], material: Material) -> None:
        self._part, self._method, self._material = part, method, material
        self._work = WorkArea(part / "work", shared)
        path = part / PROGRESS
        begun = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._at: int = begun.get("part", 0)
        self._rows: int = begun.get("rows", 0)
        self._spent = Seconds(**begun.get("seconds", {}))

    def finish(self, place: Path, described: Mapping[str, Any]) -> None:
        """Score what is left, then let the result appear under its name."""
        n_parts = self._method.parts(self._material)
        if n_parts < 1:
            raise ModelError(f"{type(self._method).__name__}: got {n_parts} passes over the rows, expected at least 1")
        account = Account()
        for at in range(self._at, n_parts):
            account = self._score_part(at, n_parts)
        self._write_result(account, self._sum(n_parts - 1), described)
        shutil.rmtree(self._part / "work")
        for name in (PROGRESS, LOCK):
            (self._part / name).unlink(missing_ok=True)
        self._part.replace(place)

    def _score_part(self, at: int, n_parts: int) -> Account:
        if at != self._at:
            self._at, self._rows = at, 0
        with self._timed():
            scorer = self._method.prepare(self._material, self._work, at)
        stage = "scoring rows" if n_parts == 1 else f"scoring rows {at + 1} of {n_parts}"
        self._material.progress.stage(stage, rows=self._material.n_rows - self._rows, tokens=None)
        for start, stop in self._material.blocks(self._rows):
            with self._timed():
                self._add(at, start, self._checked(scorer, start, stop))
            self._keep_progress(at, stop)
            self._material.progress.advance(stop - start, 0)
        self._sum(at - 1).unlink(missing_ok=True)
        return scorer.account()

    def _add(self, at: int, start: int, block: NDArray[np.float32]) -> None:
        """Scores of a block on top of those of the parts before; the same again after a kill."""
        path, shape = self._sum(at), (self._material.n_rows, block.shape[1])
        here = slice(start, start + len(block))
        if at:
            block = block + np.load(self._sum(at - 1), mmap_mode="r")[here]
        if not path.exists():
            fresh = path.with_suffix(".new")
            open_memmap(fresh, mode="w+", dtype=np.float32, shape=shape).flush()
            fresh.replace(path)
        sums = open_memmap(path, mode="r+")
        sums[here] = block
        sums.flush()

    def _checked(self, scorer: RowScorer, start: int, stop: int) -> NDArray[np.float32]:
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

    def _write_result(self, account: Account, sums: Path, described: Mapping[str, Any]) -> None:
        scores = self._part / SCORES
        if sums.exists():
            if self._method.dtype != "float32":
                _convert(sums, self._method.dtype)
            sums.replace(scores)
        units = [[unit.target, unit.unit_id] for unit in self._material.units.units]
        write_whole(self._part / IDS, json.dumps({"units": units}).encode())
        record = {"identity": dict(described), "seconds": asdict(self._spent), "account": asdict(account)}
        write_whole(self._part / RECORD, (json.dumps(record, indent=1) + "\n").encode())

    def _keep_progress(self, at: int, rows: int) -> None:
        self._rows = rows
        record = {"part": at, "rows": rows, "seconds": asdict(self._spent)}
        write_whole(self._part / PROGRESS, json.dumps(record).encode())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._spent += Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def _sum(self, at: int) -> Path:
        return self._part / f"sum-{at}.npy"


def _convert(path: Path, dtype: str) -> None:
    """Rewrite an array in another type, block by block."""
    wide = np.load(path, mmap_mode="r")
    if wide.dtype == np.dtype(dtype):
        return  # a kill came between this and the renaming
    fresh = path.with_suffix(".new")
    narrow = open_memmap(fresh, mode="w+", dtype=np.dtype(dtype), shape=wide.shape)
    for start in range(0, len(wide), READ_ROWS):
        narrow[start : start + READ_ROWS] = wide[start : start + READ_ROWS]
    narrow.flush()
    fresh.replace(path)


def _make(part: Path) -> None:
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise SettingsError(
            f"{part.parent}: scores cannot be kept here ({err.strerror}); name another place with --cache"
        ) from err


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """One process at a time computes a result; the kernel releases the lock when its holder dies."""
    descriptor = os.open(part / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise SettingsError(f"{part}: another process computes these scores; wait for it, or stop it") from err
    else:
        yield
    finally:
        os.close(descriptor)


def _read(place: Path) -> StoredScores:
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
        account = record["account"] | {"ready": Seconds(**record["account"]["ready"])}
        for name in ("covers", "notes"):
            account[name] = tuple(account[name])
        shape = np.load(place / SCORES, mmap_mode="r", allow_pickle=False).shape
        seconds = Seconds(**record["seconds"])
        return StoredScores(_Blocks(place / SCORES), shape, Account(**account), seconds, place)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as err:
        raise SettingsError(f"{place}: damaged: {' '.join(str(err).split())}; delete it, it is made again") from err
