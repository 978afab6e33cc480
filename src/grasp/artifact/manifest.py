"""The JSON files of an artifact: manifest, identity of a build, completion marks."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grasp.artifact.files import FileEntry, checksum, write_whole
from grasp.artifact.layout import FORMAT, FORMAT_VERSION, MANIFEST, ShardGrid, part_dir
from grasp.errors import ArtifactError

ArrayDtype = Literal["float16", "float32"]

_UNSIGNED = "0" * 32
_SIGNATURE = re.compile(rb'"checksum": "([0-9a-f]{32})"')


class Record(BaseModel):
    """Base of what is written as JSON: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ColumnGroup(Record):
    """Columns [start, stop) of an array, kept as one Zarr array `arrays/<name>`."""

    name: str
    start: int
    stop: int
    dtype: ArrayDtype


class ArrayEntry(Record):
    """One logical array of N rows: what its numbers mean, and the groups its columns are kept in."""

    width: int
    unit: str
    sign: str
    gain: float = Field(1.0, description="Every column is multiplied by it on reading; sums are of numbers before it.")
    groups: tuple[ColumnGroup, ...]


class Manifest(Record):
    """What a complete artifact holds. `files` has size and checksum of every file but this one."""

    format: Literal["grasp-artifact"] = "grasp-artifact"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(_UNSIGNED, description="Of this file, with the checksum itself as zeros.")
    n_rows: int
    shard_rows: int
    targets: dict[str, int] = Field(description="Units per target, in the order of the columns.")
    arrays: dict[str, ArrayEntry]
    units: tuple[str, ...] = Field(description="Unit tables; their units in this order are the columns.")
    moments: tuple[str, ...] = Field(description="Moments of the build, then of each extension.")
    made_by: dict[str, Any] = Field({}, description="Program, version, machine: what wrote it.")
    fingerprints: dict[str, str] = Field({}, description="Of model, tokenizer, corpus and targets.")
    settings: dict[str, Any] = Field({}, description="The settings of the build.")
    skipped: dict[str, Any] = Field({}, description="What was left out, by reason.")
    details: dict[str, Any] = Field({}, description="What else the build reports.")
    files: dict[str, FileEntry]


PROVENANCE = ("made_by", "fingerprints", "settings", "skipped", "details")


class SumEntry(Record):
    """A float64 array, bit for bit: little-endian bytes in base64, a third of the size of decimal text."""

    shape: tuple[int, ...]
    base64: str

    @classmethod
    def of(cls, array: NDArray[np.float64]) -> Self:
        return cls(shape=array.shape, base64=b64encode(array.astype("<f8").tobytes()).decode())

    def array(self) -> NDArray[np.float64]:
        return np.frombuffer(b64decode(self.base64), dtype="<f8").astype(np.float64).reshape(self.shape)


class ShardMark(Record):
    """Written when a shard is whole: its rows, its files, and float64 sums over its rows."""

    start: int
    stop: int
    files: dict[str, FileEntry]
    sums: dict[str, SumEntry]


class BuildRecord(Record):
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
        if all(_has_size(root / name, entry.bytes) for name, entry in mark.files.items()):
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
    data = dump_json(manifest.model_copy(update={"checksum": _UNSIGNED}))
    signed = data.replace(_UNSIGNED.encode(), checksum(data).encode(), 1)
    write_whole(root / MANIFEST, signed)


def is_signed(data: bytes) -> bool:
    """Whether the bytes of a manifest agree with the checksum in it."""
    found = _SIGNATURE.search(data)
    if found is None:
        return False
    unsigned = data[: found.start(1)] + _UNSIGNED.encode() + data[found.end(1) :]
    return checksum(unsigned) == found.group(1).decode()


def parse_manifest(path: Path, data: bytes) -> Manifest:
    """Check version, checksum and fields, in this order: another version may sign in another way."""
    try:
        raw = json.loads(data)
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
        return Manifest.model_validate(raw)
    except ValidationError as err:
        raise ArtifactError(f"{path}: {_first_problem(err)}; build the artifact again") from err


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


def differences(old: BuildRecord, new: BuildRecord) -> list[str]:
    """Every field in which two builds differ, as `field: was X, now Y`."""
    was, now = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    fields = sorted(was.keys() | now.keys())
    absent = "absent"
    return [
        f"{field.removeprefix('identity.')}: was {was.get(field, absent)}, now {now.get(field, absent)}"
        for field in fields
        if was.get(field) != now.get(field)
    ]


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{field}.{key}" if field else str(key))
    else:
        yield field, json.dumps(value)


def _first_problem(err: ValidationError) -> str:
    item = err.errors()[0]
    field = ".".join(str(step) for step in item["loc"])
    return f"{field}: {item['msg']}" if field else item["msg"]
