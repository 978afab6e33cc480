"""What a store says of itself: records in JSON, and those that are signed, which may come from a stranger."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from grasp.errors import ArtifactError, GraspError
from grasp.files import UNSIGNED, FileEntry, is_signed, kind_of, with_checksum, write_whole
from grasp.text import parse_json, plain
from grasp.yaml_files import describe

LARGEST = 1 << 30  # bytes of a record

# Names come from whoever made a store and become paths: letters, digits, `_`, `-`, `.`; no step begins with a dot, so
# nothing is absolute, hidden, on another drive, or outside.
_STEP = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
Name = Annotated[str, StringConstraints(pattern=rf"^{_STEP}\Z", max_length=100)]
FileName = Annotated[str, StringConstraints(pattern=rf"^{_STEP}(/{_STEP})*\Z", max_length=300)]


class JsonModel(BaseModel):
    """Base of what is written as JSON: immutable, unknown fields and wrong types refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re", allow_inf_nan=False)


class Mark(JsonModel):
    """Written when a part is whole."""

    files: dict[FileName, FileEntry] = Field(description="Size and checksum of each, by path below the store.")


R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Signed(Generic[R]):
    """A record with format, version, and its own checksum in its field `checksum`.

    Attributes:
        what: in messages, e.g. "the manifest of an artifact".
        again: what to do where it is damaged.
        none: what to say where there is none, after the path of the store, which is its `{place}` as well.
        unsigned: whether one without a checksum is read too, as written by hand.
        key: of the field that holds `format`.
        older: versions that are read as well.
        check: what is wrong with the whole of it, in words; None: nothing.
        files: size and checksum of each of the store's files.
    """

    name: str
    kind: type[R]
    what: str
    format: str
    version: int
    again: str
    mistake: type[GraspError] = ArtifactError
    largest: int = LARGEST
    none: str = ""
    unsigned: bool = False
    key: str = "format"
    older: tuple[int, ...] = ()
    check: Callable[[R], str | None] = lambda _: None
    files: Callable[[R], Mapping[str, FileEntry]] = attrgetter("files")

    def write(self, root: Path, record: R) -> None:
        """Sign it and let it appear: from now on the store is complete."""
        write_whole(root / self.name, with_checksum(dump_json(record.model_copy(update={"checksum": UNSIGNED}))))

    def read(self, root: Path) -> R:
        """The record of a store on this machine.

        Raises:
            GraspError: no regular file, too large, or as `parse`.
        """
        path = root / self.name
        if (kind := kind_of(path)) == "nothing" and self.none:
            raise self.mistake(f"{root}: {self.none.format(place=root)}")
        if kind != "file":
            raise self.mistake(f"{path}: is a {kind}, expected a regular file; restore a copy, or {self.again}")
        if (size := path.stat().st_size) > self.largest:
            raise self.mistake(f"{path}: has {size} bytes, expected at most {self.largest}; {self.again}")
        return self.parse(path, path.read_bytes())

    def parse(self, path: Path | str, data: bytes) -> R:
        """Check format, version, checksum and fields, in this order: another version may sign in another way.

        Raises:
            GraspError: the first of them that is wrong.
        """
        try:
            raw = parse_json(data)
        except ValueError as err:
            raise self.mistake(f"{path}: damaged: not JSON ({plain(err)}); restore a copy, or {self.again}") from err
        by_hand = self.unsigned and isinstance(raw, dict) and not raw.get("checksum")
        if by_hand:
            raw = {self.key: self.format, "format_version": self.version} | raw
        if not isinstance(raw, dict) or raw.get(self.key) != self.format:
            raise self.mistake(f"{path}: not {self.what}: expected `{self.key}` to be {self.format!r}; {self.again}")
        if (version := raw.get("format_version")) not in (self.version, *self.older):
            raise self.mistake(
                f"{path}: format version {version!r}, this program reads {self.version}; {self.again}, or use the "
                "version of grasp that wrote it"
            )
        if not by_hand and not is_signed(data):
            raise self.mistake(f"{path}: damaged: its checksum does not match; restore a copy, or {self.again}")
        try:
            record = self.kind.model_validate_json(data)
        except ValidationError as err:
            raise self.mistake(f"{describe(err, str(path), self.kind)}; {self.again}") from err
        if what := self.check(record):
            raise self.mistake(f"{path}: {what}; {self.again}")
        return record


def dump_json(record: BaseModel) -> bytes:
    """Stable text of a record: the same record gives the same bytes."""
    return (json.dumps(record.model_dump(mode="json"), indent=1) + "\n").encode()


def read_record(path: Path, kind: type[R], mistake: type[GraspError] = ArtifactError) -> R:
    """Read a record, or say that the file is damaged."""
    if kind_of(path) != "file":
        raise mistake(f"{path}: is no regular file; restore a copy or build again")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as err:
        raise mistake(f"{describe(err, f'{path}: damaged')}; delete it and run again") from err


def plain_json(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`data` as JSON gives it back, so that what is compared later is what was written."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(data), allow_nan=False))
    except (TypeError, ValueError) as err:
        raise ArtifactError(f"{where}: holds something that is not JSON: {err}") from err
    return plain
