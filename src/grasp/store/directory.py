"""One directory of whole parts. Killed anywhere, the same work goes on; other work is refused, and the difference said.

    plan     what decides the content, written first
    part     some files, and a mark written after them: size and checksum of each
    summary  written last and signed (`records.Signed`): the store is complete

A `Schema` names the files, and says how messages end. Everything is written aside and renamed.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from grasp.errors import ArtifactError, GraspError
from grasp.files import (
    FileEntry,
    check_place,
    differences,
    discard,
    entry_of,
    fault,
    kind_of,
    out_of_space,
    remove_parts,
    write_whole,
    written_aside,
)
from grasp.store.records import R, Signed, dump_json, plain_json, read_record
from grasp.text import parse_json

M = TypeVar("M", bound=BaseModel)


class Files:
    """Files of one directory, by what was noted of them; each is compared with its checksum when first asked for."""

    def __init__(
        self,
        root: Path,
        entries: Mapping[str, FileEntry],
        recovery_hint: str,
        error_type: type[GraspError] = ArtifactError,
    ) -> None:
        self.root, self.entries = root, entries
        self.where = str(root)  # what the user calls it: the path, or the URL
        self._recovery_hint, self._error_type = recovery_hint, error_type
        self._checked: set[str] = set()

    def file(self, name: str) -> Path:
        """Where a file lies on this machine, as it was written.

        Raises:
            GraspError: it is not listed, not there, or not what was written.
        """
        if name not in self.entries:
            raise self._error_type(f"{self.where}: lists no {name}; {self._recovery_hint}")
        if name not in self._checked:
            if what := fault(self.root, name, self.entries[name]):
                self._not_here(name, what)
            self._checked.add(name)
        return self.root / name

    def _not_here(self, name: str, what: str) -> None:
        """What is done about a file that is missing here, or damaged."""
        raise self._error_type(f"{self.root / name}: {what}; {self._recovery_hint}")

    def fault(self, name: str) -> str | None:
        """What is wrong with a file where it lies, in words; None: nothing."""
        return fault(self.root, name, self.entries[name])

    def verify(self) -> dict[str, str]:
        """What is wrong with each file that is not as it was written, by name; all are read."""
        return {name: what for name in sorted(self.entries) if (what := self.fault(name))}


Content = bytes | Callable[[Path], object]  # of a file: as it is, or what writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(Generic[M]):
    """What is particular about one kind of store.

    Attributes:
        mark: what a mark holds; the files of its part among it.
        marks: where marks lie, e.g. `shards/*.json`; a part is called as its mark is, without the ending.
        plan: name of the file that says what decides the content; empty: the directory's name does.
        ours: patterns of further files that go when other work takes the place.
        recovery_hint: what to do if a file is damaged.
        error_type: raised for errors of this store.
    """

    mark: type[M]
    marks: str
    plan: str = ""
    ours: tuple[str, ...] = ()
    recovery_hint: str = "build it again"
    error_type: type[GraspError] = ArtifactError
    files: Callable[[M], Mapping[str, FileEntry]] = attrgetter("files")


class Store(Generic[M]):
    """The parts of one directory; whoever writes holds its lock."""

    def __init__(self, root: Path, schema: Schema[M]) -> None:
        self.root, self.schema = root, schema

    def begin(self, identity: Mapping[str, Any], *, replace: bool = False) -> None:
        """Begin, or go on with the same work; what a kill left aside is removed.

        Args:
            identity: all that decides the content; JSON.
            replace: other work makes way; else only where no part of it is whole.
        Raises:
            GraspError: other work was begun here, with every field in which it differs.
        """
        plan, now = self.root / self.schema.plan, plain_json(identity, self.schema.plan)
        with out_of_space(str(self.root), lambda: "nothing is written yet"):
            try:
                plan.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as err:
                raise self.schema.error_type(
                    f"{plan.parent}: no directory can be made here; choose another one"
                ) from err
            then = None
            if plan.exists():
                try:
                    then = parse_json(plan.read_bytes())
                except (OSError, ValueError) as err:
                    raise self.schema.error_type(f"{plan}: damaged: {err}; {self.schema.recovery_hint}") from err
            if then is not None and (changed := list(differences(then, now))):
                if not replace and any(self.root.glob(self.schema.marks)):
                    raise self.schema.error_type(
                        f"{self.root}: was begun with other input: {'; '.join(changed)}; restore it, choose another "
                        f"place, or delete {plan.parent} to start over"
                    )
                self.clear()
                then = None
            if then is None:
                write_whole(plan, (json.dumps(now, indent=1) + "\n").encode())
        remove_parts(*(path for path in {self.root, plan.parent, self._mark("").parent} if path.is_dir()))

    @cached_property
    def parts(self) -> dict[str, Files]:
        """Files of the parts that are whole, by name; one whose files are gone or cut is not, and is redone."""
        found = {}
        for mark in sorted(self.root.glob(self.schema.marks)):
            entries = self.schema.files(self.mark(mark.stem))
            sizes = {self.root / name: entry.bytes for name, entry in entries.items()}
            if all(kind_of(file) == "file" and file.stat().st_size == size for file, size in sizes.items()):
                found[mark.stem] = Files(self.root, entries, self.schema.recovery_hint, self.schema.error_type)
        return found

    def mark(self, part: str) -> M:
        """What the mark of a part says.

        Raises:
            GraspError: there is none, or it is damaged.
        """
        return read_record(self._mark(part), self.schema.mark, self.schema.error_type)

    def missing(self, parts: Iterable[str]) -> list[str]:
        """Those of the parts that are not whole yet."""
        return [part for part in parts if part not in self.parts]

    def progress(self) -> str:
        """How far it is, in words."""
        return f"{len(self.parts)} parts are whole"

    def put(self, part: str, files: Mapping[str, Content], /, **told: Any) -> M:
        """Write a part: it is whole when this returns, and as if never begun when this raises.

        Args:
            files: by path below the directory.
            told: what else its mark says.
        """
        mark = self._mark(part)
        shown = mark.relative_to(self.root).with_suffix("")
        with out_of_space(f"{self.root}: {shown} was not written", self.progress):
            try:
                self.drop(part)
                entries = {name: write_content(self.root / name, content) for name, content in files.items()}
                record = self.schema.mark.model_validate({"files": entries, **told})
                mark.parent.mkdir(parents=True, exist_ok=True)
                write_whole(mark, dump_json(record))
            except OSError:
                for path in (mark, *(self.root / name for name in files)):  # the mark first: none without its files
                    path.unlink(missing_ok=True)
                raise
        self.parts[part] = Files(self.root, entries, self.schema.recovery_hint, self.schema.error_type)
        return record

    def drop(self, part: str) -> None:
        """Remove a part, its mark first."""
        self._mark(part).unlink(missing_ok=True)
        if part in self.parts:
            for name in self.parts.pop(part).entries:
                (self.root / name).unlink(missing_ok=True)

    def file(self, part: str, name: str = "") -> Path:
        """A file of a part, as it was written: its checksum is compared when it is first asked for.

        Args:
            name: below the directory; may be left out where the part has one file.
        """
        files = self.parts.get(part)
        if files is None:
            raise self.schema.error_type(f"{self.root}: has no {part}; {self.schema.recovery_hint}")
        return files.file(name or next(iter(files.entries)))

    def entries(self) -> dict[str, FileEntry]:
        """Size and checksum of everything here, marks too, by path below the directory."""
        entries: dict[str, FileEntry] = {}
        for part, files in sorted(self.parts.items()):
            path = self._mark(part)
            entries |= {**files.entries, path.relative_to(self.root).as_posix(): entry_of(path)}
        return entries

    def clear(self) -> None:
        """Remove all parts, and whatever else is a store's."""
        for pattern in filter(None, (self.schema.marks, *self.schema.ours, self.schema.plan)):
            for path in self.root.glob(pattern):
                discard(path)
        self.__dict__.pop("parts", None)

    def _mark(self, part: str) -> Path:
        return self.root / Path(self.schema.marks).parent / f"{part}.json"


def write_content(path: Path, content: Content) -> FileEntry:
    """Write a file that is whole when it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        return write_whole(path, content)
    with written_aside(path) as aside:
        content(aside)
        return entry_of(aside)


def write_at_once(
    path: Path, signed: Signed[R], files: Mapping[str, Content], record: Callable[[dict[str, FileEntry]], R]
) -> None:
    """Write a whole store, which appears only when it is complete.

    Args:
        record: its signed record, from the size and checksum of each file.
    Raises:
        SettingsError: something is there already.
    """
    check_place(path)
    with written_aside(path) as aside:
        aside.mkdir()
        signed.write(aside, record({name: write_content(aside / name, content) for name, content in files.items()}))
