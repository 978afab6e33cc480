"""The JSON files of an artifact: manifest, identity of a build, completion marks."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, model_validator, with_config
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from grasp.artifact.layout import (
    BUILD,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PER_UNIT,
    ROWS,
    ShardGrid,
    chunk_file,
    group_name,
    part_dir,
    row_file,
    scale_file,
)
from grasp.errors import ArtifactError
from grasp.files import UNSIGNED, FileEntry
from grasp.store.directory import Schema, Store
from grasp.store.records import FileName, JsonModel, Name, Signed, plain_json

ArrayDtype = Literal["float16", "float32"]


class ColumnGroup(JsonModel):
    """Columns [start, stop) of an array, kept in the files of `arrays/<name>`."""

    name: Name
    start: int = Field(ge=0)
    stop: int
    dtype: ArrayDtype


class ArrayEntry(JsonModel):
    """One logical array of N rows: what its numbers mean, and the groups its columns are kept in."""

    width: int = Field(ge=1)
    unit: str
    sign: str
    gain: float = Field(
        1.0, gt=0, lt=1e30, description="Every column is multiplied by it on reading; sums are of numbers before it."
    )
    groups: tuple[ColumnGroup, ...]

    @model_validator(mode="after")
    def _groups_are_the_columns(self) -> Self:
        columns = [(group.start, group.stop) for group in self.groups]
        edges = [0, *(stop for _, stop in columns)]
        if columns != list(pairwise(edges)) or edges[-1] != self.width or edges != sorted(set(edges)):
            raise ValueError(f"groups: {columns} are not columns 0 to {self.width}")
        return self


# What the caller of a writer tells is a mapping, of which readers use some fields: where there, these have a type.
_told = with_config(ConfigDict(extra="allow"))


@_told
class _SkippedRows(TypedDict, total=False):
    counts: dict[str, int]
    ids: dict[str, list[str]]


@_told
class _Skipped(TypedDict, total=False):
    rows: _SkippedRows
    columns: list[str]


@_told
class _Details(TypedDict, total=False):
    labels: list[str]
    n_tokens: int
    n_documents: int
    vocab_size: int
    build_seconds: dict[str, float] | None
    columns: dict[str, Any] | None
    parts: list[dict[str, Any]]


@_told
class _CorpusSettings(TypedDict, total=False):
    snippet_chars: int
    max_rows_per_document: int | None


@_told
class _Settings(TypedDict, total=False):
    corpus: _CorpusSettings | None
    model: dict[str, Any]
    features: dict[str, Any]
    targets: dict[str, Any]


class _Like:
    """Checks a mapping as if it had this type; it stays a mapping."""

    def __init__(self, shape: type) -> None:
        self._shape = shape

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self._shape)


class Manifest(JsonModel):
    """What a complete artifact holds. `files` has size and checksum of every file but this one."""

    format: Literal["grasp-artifact"] = "grasp-artifact"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Of this file, with the checksum itself as zeros.")
    n_rows: int = Field(ge=1)
    shard_rows: int = Field(ge=1)
    targets: dict[str, int] = Field(description="Units per target, in the order of the columns.")
    arrays: dict[Name, ArrayEntry]
    units: tuple[FileName, ...] = Field(description="Unit tables; their units in this order are the columns.")
    moments: tuple[FileName, ...] = Field(description="Moments of the build, then of each extension.")
    made_by: dict[str, Any] = Field({}, description="Program, version, machine: what wrote it.")
    fingerprints: dict[str, str] = Field({}, description="Of model, tokenizer, corpus and targets.")
    settings: Annotated[dict[str, Any], _Like(_Settings)] = Field({}, description="The settings of the build.")
    skipped: Annotated[dict[str, Any], _Like(_Skipped)] = Field({}, description="What was left out, by reason.")
    details: Annotated[dict[str, Any], _Like(_Details)] = Field({}, description="What else the build reports.")
    files: dict[FileName, FileEntry]
    rows_kept: dict[FileName, FileEntry] = Field({}, description="Files of tokens/, which stay where they were built.")

    @model_validator(mode="after")
    def _columns_are_units(self) -> Self:
        n_units = sum(self.targets.values())
        for name, entry in self.arrays.items():
            groups = [group.name for group in entry.groups]
            if groups != [group_name(name, part) for part in range(len(groups))]:
                raise ValueError(f"arrays.{name}: has groups {groups}, which are not its own")
            if self.targets and name.startswith(PER_UNIT) and entry.width != n_units:
                raise ValueError(f"arrays.{name}: has {entry.width} columns, there are {n_units} units")
        return self

    def detail(self, name: str) -> Any:
        """One of the details.

        Raises:
            ArtifactError: it is not there.
        """
        if name not in self.details:
            raise ArtifactError(f"{MANIFEST}: details.{name}: missing; build the artifact again")
        return self.details[name]

    def needed(self) -> set[str]:
        """Files that a reader may ask for."""
        shards = range(ShardGrid(self.n_rows, self.shard_rows).n_shards)
        groups = [group.name for entry in self.arrays.values() for group in entry.groups]
        names = {chunk_file(group, k) for group in groups for k in shards}
        names |= {scale_file(group) for group in groups}
        names |= {row_file(k) for k in shards}
        return names | {ROWS, *self.units, *self.moments}


PROVENANCE = ("made_by", "fingerprints", "settings", "skipped", "details")


class SumEntry(JsonModel):
    """A float64 array, bit for bit: little-endian bytes in base64, a third of the size of decimal text."""

    shape: tuple[int, ...]
    base64: str

    @classmethod
    def from_array(cls, array: NDArray[np.float64]) -> Self:
        return cls(shape=array.shape, base64=b64encode(array.astype("<f8").tobytes()).decode())

    def array(self) -> NDArray[np.float64]:
        return np.frombuffer(b64decode(self.base64), dtype="<f8").astype(np.float64).reshape(self.shape)


class ShardMark(JsonModel):
    """Written when a shard is whole: its rows, its files, and float64 sums over its rows."""

    start: int
    stop: int
    files: dict[FileName, FileEntry]
    sums: dict[str, SumEntry]


class BuildRecord(JsonModel):
    """Identity of a build in progress: a resumed build must agree in every field."""

    format_version: int = FORMAT_VERSION
    n_rows: int
    shard_rows: int
    arrays: dict[str, dict[str, Any]]
    identity: dict[str, Any]


class BuiltShards(Store[ShardMark]):
    """The shards of one part of an artifact: of the build (part 0), or of its part-th extension."""

    def __init__(self, root: Path, part: int, grid: ShardGrid) -> None:
        under = part_dir(part)
        plan, marks = (under / BUILD).as_posix(), (under / "shards" / "[0-9]*.json").as_posix()
        super().__init__(root, Schema(mark=ShardMark, marks=marks, plan=plan, again="build the artifact again"))
        self.grid = grid

    def mark(self, part: str) -> ShardMark:
        mark = super().mark(part)
        if int(part) >= self.grid.n_shards or (mark.start, mark.stop) != self.grid.bounds(int(part)):
            raise ArtifactError(f"{self._mark(part)}: rows {mark.start} to {mark.stop} are not a shard here; delete it")
        return mark

    @property
    def finished(self) -> frozenset[int]:
        """Shards that need not be written again; one whose files are gone or cut does not count."""
        return frozenset(map(int, self.parts))

    def progress(self) -> str:
        """How far the build is, in words."""
        return f"{len(self.parts)} of {self.grid.n_shards} shards are finished"


def _other_files(manifest: Manifest) -> str | None:
    """What a manifest lists too much or too little."""
    if manifest.n_rows > len(manifest.files) * manifest.shard_rows:  # before the names of 1e18 shards are made
        return "lists no shards"
    needed = manifest.needed()
    if lost := needed - manifest.files.keys():
        return f"lists no {min(lost)}"
    idle = {name for name in manifest.files if name.endswith((".npy", ".parquet"))} - needed
    return f"lists {min(idle)}, which belongs to no array or shard" if idle else None


SIGNED_MANIFEST = Signed(
    MANIFEST,
    Manifest,
    "the manifest of an artifact",
    FORMAT,
    FORMAT_VERSION,
    "build the artifact again",
    none="no complete artifact here; make one with `grasp build --out {place}`, or see that the URL is right",
    check=_other_files,
)


def provenance(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The caller's share of the manifest, checked: only the fields of `PROVENANCE`, each a mapping."""
    unknown = sorted(set(given) - set(PROVENANCE))
    wrong = sorted(key for key, value in given.items() if not isinstance(value, Mapping))
    if unknown or wrong:
        raise ArtifactError(
            f"manifest: unknown fields {unknown}, fields that are not mappings {wrong}; "
            f"expected mappings among {list(PROVENANCE)}"
        )
    return {key: plain_json(value, f"manifest.{key}") for key, value in given.items()}
