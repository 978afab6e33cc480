"""JSON records of a store: completion marks, and signed summaries with a format version and a checksum.

A record may come from an untrusted source: names in it are validated before they become paths.
Start with `Signed`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from grasp.errors import ArtifactError, GraspError
from grasp.files import UNSIGNED, FileEntry, is_signed, kind_of, with_checksum, write_atomically
from grasp.text import parse_json, plain
from grasp.yaml_files import describe

# Names in a record become paths, and a record may be forged. Only letters, digits, `_`, `-` and `.` are allowed, and no
# component begins with a dot, so that a path is never absolute, hidden, on another drive, or outside the store.
_COMPONENT = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
Name = Annotated[str, StringConstraints(pattern=rf"^{_COMPONENT}\Z", max_length=100)]
FileName = Annotated[str, StringConstraints(pattern=rf"^{_COMPONENT}(/{_COMPONENT})*\Z", max_length=300)]


class JsonModel(BaseModel):
    """Base class of records that are written as JSON: frozen; unknown fields and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re", allow_inf_nan=False)


class Mark(JsonModel):
    """Completion mark of a part of a store, written when its files are complete."""

    files: dict[FileName, FileEntry] = Field(description="Size and checksum of each file, by its path in the store.")


R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Signed(Generic[R]):
    """A kind of record that stores its format, its version and its own checksum (field `checksum`).

    Attributes:
        name: file name of the record.
        model: pydantic model of the record.
        description: name of the record in messages, e.g. "the manifest of an artifact".
        format: expected value of the field `format_field`.
        version: format version that is written.
        recovery_hint: what to do if the record is damaged.
        error_type: raised for every error.
        missing_message: message if there is no record, after the path of the store; may contain `{location}`, the same
            path.
        format_field: name of the field that holds `format`.
        files: function that returns size and checksum of each file of the store.
    """

    name: str
    model: type[R]
    description: str
    format: str
    version: int
    recovery_hint: str
    error_type: type[GraspError] = ArtifactError
    missing_message: str = ""
    format_field: str = "format"
    files: Callable[[R], Mapping[str, FileEntry]] = attrgetter("files")

    def write(self, root: Path, record: R) -> None:
        """Sign and write a record atomically; the store is complete once it exists."""
        write_atomically(root / self.name, with_checksum(dump_json(record.model_copy(update={"checksum": UNSIGNED}))))

    def read(self, root: Path) -> R:
        """Read the record of a store on this machine.

        Raises:
            GraspError: it is not a regular file, or as `parse`.
        """
        path = root / self.name
        if (kind := kind_of(path)) == "file":
            return self.parse(path, path.read_bytes())
        problem = f"{path}: is a {kind}, expected a regular file; restore a copy, or {self.recovery_hint}"
        if kind == "nothing" and self.missing_message:
            problem = f"{root}: {self.missing_message.format(location=root)}"
        raise self.error_type(problem)

    def parse(self, path: Path | str, data: bytes) -> R:
        """Validate format, version, checksum and fields, in this order: versions may differ in the checksum.

        Raises:
            GraspError: the first of them that is invalid.
        """
        try:
            raw = parse_json(data)
            if not isinstance(raw, dict) or raw.get(self.format_field) != self.format:
                problem = f"not {self.description}: expected `{self.format_field}` to be {self.format!r}; "
                problem += self.recovery_hint
            elif (version := raw.get("format_version")) != self.version:
                problem = (
                    f"format version {version!r}, this program reads {self.version}; {self.recovery_hint}, or use the "
                    "version of grasp that wrote it"
                )
            elif not is_signed(data):
                problem = f"damaged: its checksum does not match; restore a copy, or {self.recovery_hint}"
            else:
                return self.model.model_validate_json(data)
            problem = f"{path}: {problem}"
        except ValidationError as err:
            problem = f"{describe(err, str(path), self.model)}; {self.recovery_hint}"
        except ValueError as err:
            problem = f"{path}: damaged: not JSON ({plain(err)}); restore a copy, or {self.recovery_hint}"
        raise self.error_type(problem)


def dump_json(record: BaseModel) -> bytes:
    """Serialise a record; equal records give equal bytes."""
    return (json.dumps(record.model_dump(mode="json"), indent=1) + "\n").encode()


def read_record(path: Path, model: type[R], error_type: type[GraspError] = ArtifactError) -> R:
    """Read an unsigned record.

    Raises:
        GraspError: `error_type`; the file is not a regular file, or damaged.
    """
    problem = f"{path}: not a regular file; restore a copy, or rebuild"
    if kind_of(path) == "file":
        try:
            return model.model_validate_json(path.read_bytes())
        except ValidationError as err:
            problem = f"{describe(err, f'{path}: damaged')}; delete it and run again"
    raise error_type(problem)


def plain_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values after a round trip through JSON, so that later comparisons see what was written."""
    parsed: dict[str, Any] = json.loads(json.dumps(dict(data), allow_nan=False))
    return parsed
