"""A directory of parts, each of which is either complete or absent. Interrupted work can be resumed at any point.

An artifact, a row store and the states of a training are such directories, and e.g. each shard is a part:

    plan     the settings that determine the content, written first
    part     some files, and a mark that is written after them, with the size and checksum of each
    summary  written last, with a checksum (`records.Signed`): the store is complete

Resuming with other settings is refused, and the message lists the differences. A `Schema` defines file names and
messages. All files are written to a temporary name and renamed. Start with `Store`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from grasp.errors import ArtifactError, GraspError
from grasp.files import (
    FileEntry,
    atomic_path,
    check_directory,
    differences,
    discard,
    entry_of,
    fault,
    kind_of,
    remove_parts,
    report_full_disk,
    write_atomically,
)
from grasp.store.records import Mark, R, Signed, dump_json, plain_json, read_record
from grasp.text import parse_json, plain

M = TypeVar("M", bound=Mark)


class Files:
    """Files of a directory with known sizes and checksums; a file is verified when it is first used."""

    def __init__(
        self,
        root: Path,
        entries: Mapping[str, FileEntry],
        recovery_hint: str,
        error_type: type[GraspError] = ArtifactError,
    ) -> None:
        self.root, self.entries = root, entries
        self.location = str(root)  # path or URL, for messages
        self._recovery_hint, self._error_type = recovery_hint, error_type
        self._verified: set[str] = set()

    def file(self, name: str) -> Path:
        """Return the local path of a file, after verifying it.

        Raises:
            GraspError: the file is not listed, missing or damaged.
        """
        if name not in self.entries:
            raise self._error_type(f"{self.location}: lists no {name}; {self._recovery_hint}")
        if name not in self._verified:
            if problem := fault(self.root, name, self.entries[name]):
                self._handle_missing(name, problem)
            self._verified.add(name)
        return self.root / name

    def _handle_missing(self, name: str, problem: str) -> None:
        """Handle a file that is missing or damaged locally."""
        raise self._error_type(f"{self.root / name}: {problem}; {self._recovery_hint}")

    def fault(self, name: str) -> str | None:
        """Return what is wrong with a file, in words; None: it is intact."""
        return fault(self.root, name, self.entries[name])


Content = bytes | Callable[[Path], object]  # content of a file, or a function that writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(Generic[M]):
    """The file names and messages of a kind of store.

    Attributes:
        mark: model of a mark, which lists the files of its part.
        marks: pattern of the marks, e.g. `shards/*.json`; the stem of a mark is the name of its part.
        plan: name of the file with the settings that determine the content; empty: the directory name determines it.
        other_files: patterns of further files that are removed when the store is cleared.
        recovery_hint: what the user should do if a file is damaged, for messages.
        error_type: type of errors about this directory.
    """

    mark: type[M]
    marks: str
    plan: str = ""
    other_files: tuple[str, ...] = ()
    recovery_hint: str = "build it again"
    error_type: type[GraspError] = ArtifactError


class Store(Generic[M]):
    """The parts of a directory. Writers must hold its lock (`locks.locked`)."""

    def __init__(self, root: Path, schema: Schema[M]) -> None:
        self.root, self.schema = root, schema

    def begin(self, identity: Mapping[str, Any], *, replace: bool = False) -> None:
        """Start a store, or resume it if the settings are the same; remove temporary files.

        Args:
            identity: all settings that determine the content, as JSON.
            replace: whether to delete a store with other settings; without it, only if it has no complete part.
        Raises:
            GraspError: the directory has a store with other settings; the message lists the differences.
        """
        plan, requested = self.root / self.schema.plan, plain_json(identity)
        with report_full_disk(str(self.root), lambda: "nothing is written yet"):
            try:
                plan.parent.mkdir(parents=True, exist_ok=True)
                stored = parse_json(plan.read_bytes()) if plan.exists() else None
            except (FileExistsError, NotADirectoryError, IsADirectoryError, ValueError) as err:
                hint = f"choose another directory, or {self.schema.recovery_hint}"
                raise self.schema.error_type(f"{plan}: cannot be created, or is damaged: {plain(err)}; {hint}") from err
            if stored is not None and (changed := list(differences(stored, requested))):
                if not replace and any(self.root.glob(self.schema.marks)):
                    raise self.schema.error_type(
                        f"{self.root}: was begun with other input: {'; '.join(changed)}; restore it, choose another "
                        f"directory, or delete {plan.parent} to start over"
                    )
                self.clear()
                stored = None
            if stored is None:
                write_atomically(plan, (json.dumps(requested, indent=1) + "\n").encode())
        remove_parts(*(path for path in {self.root, plan.parent, self._mark_path("").parent} if path.is_dir()))

    @cached_property
    def parts(self) -> dict[str, Files]:
        """Return the files of complete parts, by name. A part with missing or truncated files is not complete."""
        complete = {}
        for mark in sorted(self.root.glob(self.schema.marks)):
            entries = self.mark(mark.stem).files
            sizes = {self.root / name: entry.bytes for name, entry in entries.items()}
            if all(kind_of(file) == "file" and file.stat().st_size == size for file, size in sizes.items()):
                complete[mark.stem] = Files(self.root, entries, self.schema.recovery_hint, self.schema.error_type)
        return complete

    def mark(self, part: str) -> M:
        """Read the mark of a part."""
        return read_record(self._mark_path(part), self.schema.mark, self.schema.error_type)

    def progress(self) -> str:
        """Describe the progress, for messages."""
        return f"{len(self.parts)} parts are complete"

    def put(self, part: str, files: Mapping[str, Content], /, **fields: Any) -> M:
        """Write a part. It is complete when this returns; if an exception is raised, no part of it remains.

        Args:
            part: name of the part.
            files: content by path relative to the directory.
            fields: further fields of the mark.
        Returns:
            The mark.
        """
        mark = self._mark_path(part)
        shown = mark.relative_to(self.root).with_suffix("")
        with report_full_disk(f"{self.root}: {shown} was not written", self.progress):
            try:
                self.drop(part)
                entries = {name: write_content(self.root / name, content) for name, content in files.items()}
                record = self.schema.mark.model_validate({"files": entries, **fields})
                mark.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(mark, dump_json(record))
            except OSError:
                for path in (mark, *(self.root / name for name in files)):  # the mark first, so that it never dangles
                    path.unlink(missing_ok=True)
                raise
        self.parts[part] = Files(self.root, entries, self.schema.recovery_hint, self.schema.error_type)
        return record

    def drop(self, part: str) -> None:
        """Delete a part, beginning with its mark."""
        self._mark_path(part).unlink(missing_ok=True)
        if part in self.parts:
            for name in self.parts.pop(part).entries:
                (self.root / name).unlink(missing_ok=True)

    def file(self, part: str, name: str = "") -> Path:
        """Return the path of a file of a part, verified on first use.

        Args:
            part: name of the part.
            name: path relative to the directory; optional if the part has one file.
        """
        files = self.parts.get(part)
        if files is None:
            raise self.schema.error_type(f"{self.root}: has no {part}; {self.schema.recovery_hint}")
        return files.file(name or next(iter(files.entries)))

    def entries(self) -> dict[str, FileEntry]:
        """Return size and checksum of all files, including marks, by path relative to the directory."""
        entries: dict[str, FileEntry] = {}
        for part, files in sorted(self.parts.items()):
            path = self._mark_path(part)
            entries |= {**files.entries, path.relative_to(self.root).as_posix(): entry_of(path)}
        return entries

    def clear(self) -> None:
        """Delete all parts and all other files of the store."""
        for pattern in filter(None, (self.schema.marks, *self.schema.other_files, self.schema.plan)):
            for path in self.root.glob(pattern):
                discard(path)
        self.__dict__.pop("parts", None)

    def _mark_path(self, part: str) -> Path:
        return self.root / Path(self.schema.marks).parent / f"{part}.json"


def write_content(path: Path, content: Content) -> FileEntry:
    """Write a file atomically, and return its size and checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        return write_atomically(path, content)
    with atomic_path(path) as temporary:
        content(temporary)
        return entry_of(temporary)


def write_at_once(
    path: Path, signed: Signed[R], files: Mapping[str, Content], record: Callable[[dict[str, FileEntry]], R]
) -> None:
    """Write a complete store atomically: it is written to a temporary directory and renamed.

    Args:
        path: new directory.
        signed: kind of the store's record.
        files: content by path relative to the directory.
        record: function that makes the record from the size and checksum of each file.
    Raises:
        SettingsError: the path already exists.
    """
    check_directory(path)
    with atomic_path(path) as temporary:
        temporary.mkdir()
        entries = {name: write_content(temporary / name, content) for name, content in files.items()}
        signed.write(temporary, record(entries))
