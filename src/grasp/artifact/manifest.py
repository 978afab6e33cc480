"""The JSON files of an artifact: manifest, identity of a build, completion marks."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from grasp.artifact.layout import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PER_UNIT,
    ROWS,
    ShardGrid,
    chunk_file,
    group_name,
    part_dir,
    scale_file,
)
from grasp.errors import ArtifactError
from grasp.files import UNSIGNED, FileEntry, is_signed, kind_of, with_checksum, write_whole
from grasp.text import parse_json, plain

ArrayDtype = Literal["float16", "float32"]

SHOWN = 200  # characters of a name in a message


# Names come from whoever made the artifact and become paths: letters, digits, `_`, `-`, `.`; no step begins with a dot,
# so nothing is absolute, hidden, on another drive, or outside.
_STEP = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
Name = Annotated[str, StringConstraints(pattern=rf"^{_STEP}\Z", max_length=100)]
FileName = Annotated[str, StringConstraints(pattern=rf"^{_STEP}(/{_STEP})*\Z", max_length=300)]


class JsonModel(BaseModel):
    """Base of what is written as JSON: immutable, unknown fields and wrong types refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re", allow_inf_nan=False)


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
        names = {chunk_file(group, k).as_posix() for group in groups for k in shards}
        names |= {scale_file(group).as_posix() for group in groups}
        names |= {(part_dir(0) / "shards" / f"{k:05d}.parquet").as_posix() for k in shards}
        return names | {ROWS, *self.units, *self.moments}


PROVENANCE = ("made_by", "fingerprints", "settings", "skipped", "details")


class SumEntry(JsonModel):
    """A float64 array, bit for bit: little-endian bytes in base64, a third of the size of decimal text."""

    shape: tuple[int, ...]
    base64: str

    @classmethod
    def of(cls, array: NDArray[np.float64]) -> Self:
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


R = TypeVar("R", bound=BaseModel)


def dump_json(record: BaseModel) -> bytes:
    """Stable text of a record: the same record gives the same bytes."""
    return (json.dumps(record.model_dump(mode="json"), indent=1) + "\n").encode()


def read_record(path: Path, kind: type[R]) -> R:
    """Read a record, or say that the file is damaged."""
    if kind_of(path) != "file":
        raise ArtifactError(f"{path}: is no regular file; restore a copy or build again")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as err:
        raise ArtifactError(f"{path}: damaged: {_first_problem(err)}; delete it and run again") from err


def finished_shards(root: Path, part: int, grid: ShardGrid) -> dict[int, dict[str, FileEntry]]:
    """Files of the finished shards; a shard whose files are gone or cut does not count, and is redone."""
    shards: dict[int, dict[str, FileEntry]] = {}
    for path in sorted((root / part_dir(part) / "shards").glob("[0-9]*.json")):
        k, mark = int(path.stem), read_record(path, ShardMark)
        if k >= grid.n_shards or (mark.start, mark.stop) != grid.bounds(k):
            raise ArtifactError(f"{path}: rows {mark.start} to {mark.stop} are not a shard here; delete it")
        paths = {root / name: entry.bytes for name, entry in mark.files.items()}
        if all(kind_of(file) == "file" and file.stat().st_size == size for file, size in paths.items()):
            shards[k] = mark.files
    return shards


def plain_json(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`data` as JSON gives it back, so that what is compared later is what was written."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(data), allow_nan=False))
    except (TypeError, ValueError) as err:
        raise ArtifactError(f"{where}: holds something that is not JSON: {err}") from err
    return plain


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest with its own checksum in it; from now on the artifact is complete."""
    write_whole(root / MANIFEST, signed_json(manifest))


def signed_json(record: BaseModel) -> bytes:
    """Text of a record with its own checksum in its field `checksum`."""
    return with_checksum(dump_json(record.model_copy(update={"checksum": UNSIGNED})))


def parse_manifest(path: Path, data: bytes) -> Manifest:
    """Check version, checksum and fields, in this order: another version may sign in another way."""
    try:
        raw = parse_json(data)
    except ValueError as err:
        raise ArtifactError(f"{path}: damaged: not JSON ({err}); restore a copy or build again") from err
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ArtifactError(f"{path}: not the manifest of an artifact: expected `format` to be {FORMAT!r}")
    if raw.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: format version {raw.get('format_version')!r}, this program reads "
            f"{FORMAT_VERSION}; build the artifact again, or use the version of grasp that wrote it"
        )
    if not is_signed(data):
        raise ArtifactError(f"{path}: damaged: its checksum does not match; restore a copy or build again")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as err:
        raise ArtifactError(f"{path}: {_first_problem(err)}; build the artifact again") from err
    few = manifest.n_rows > len(manifest.files) * manifest.shard_rows  # before the names of 1e18 shards are made
    if few or (lost := manifest.needed() - manifest.files.keys()):
        raise ArtifactError(f"{path}: lists no {'shards' if few else min(lost)}; build the artifact again")
    if idle := {name for name in manifest.files if name.endswith((".npy", ".parquet"))} - manifest.needed():
        raise ArtifactError(f"{path}: lists {min(idle)}, which belongs to no array or shard; build the artifact again")
    return manifest


def read_manifest(root: Path) -> Manifest:
    """The manifest of a complete artifact on this machine."""
    path = root / MANIFEST
    if (kind := kind_of(path)) != "file":
        raise ArtifactError(f"{path}: is a {kind}, expected a regular file; restore a copy or build again")
    return parse_manifest(path, path.read_bytes())


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


def _first_problem(err: ValidationError) -> str:
    item = err.errors()[0]
    field = plain(".".join(str(step) for step in item["loc"]))
    what = "no name of ours" if item["type"] in ("string_pattern_mismatch", "string_too_long") else item["msg"]
    return f"{field[:SHOWN]}: {what}" if field else what
