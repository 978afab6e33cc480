"""What is in an artifact, and whether it is still what was written."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.layout import BUILD, MANIFEST, RUN, TOKENS, ShardGrid, group_name, part_dir
from grasp.artifact.manifest import (
    SIGNED_MANIFEST,
    ArrayEntry,
    BuildRecord,
    BuiltShards,
    ColumnGroup,
    Manifest,
    ShardMark,
)
from grasp.artifact.reader import why_not_open
from grasp.errors import ArtifactError, SettingsError
from grasp.files import FileEntry, differences, is_signed, kind_of
from grasp.store.directory import Files
from grasp.store.records import read_record
from grasp.store.remote import local_path, open_store, remote_url
from grasp.yaml_files import read_yaml


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken file: its path within the artifact, and what is wrong with it."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of a verification: what was checked, and everything that is broken."""

    path: str
    complete: bool  # False: a build in progress, of which the finished shards were checked
    n_files: int
    n_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array; bytes are those of its numbers."""

    name: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    bytes_per_row: float
    unit: str
    sign: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What `grasp info` shows."""

    path: str
    complete: bool
    format_version: int
    n_rows: int
    shard_rows: int
    n_shards: int
    finished_shards: int
    extension_in_progress: str | None
    targets: dict[str, int]  # units per target
    arrays: tuple[ArrayInfo, ...]
    bytes: dict[str, int]  # by kind: arrays, rows, shards, units, moments, features, other
    bytes_total: int
    bytes_per_row: float
    made_by: dict[str, Any]
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    skipped: dict[str, Any]
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def verify(path: Path | str) -> VerifyReport:
    """Compare every file with the size and checksum that were noted when it was written.

    Of an unfinished artifact, and of one whose manifest is damaged, the finished shards are checked. Files behind a URL
    are read where they lie; nothing of them is kept.

    Raises:
        ArtifactError: there is no artifact, or one of another format version.
    """
    if (url := remote_url(path)) is not None:
        _, files = open_store(url, SIGNED_MANIFEST)
        return _report(url, files)
    path = local_path(path)
    complete = kind_of(path / MANIFEST) != "nothing"
    if not complete and not (path / BUILD).exists():
        raise ArtifactError(why_not_open(path))
    before: list[Problem] = []
    there = _manifest_or_problem(path, before) if complete else None
    expected = dict(there.files) if there else dict(_marked(path, before))
    if there and (path / TOKENS).exists():
        expected |= there.rows_kept
    if there and (path / RUN).exists() and _other_settings(path / RUN, there):
        before.append(Problem(RUN, "damaged: these are not the settings in the manifest"))
    return _report(str(path), Files(path, expected, ""), complete=complete, before=before)


def _report(path: str, files: Files, *, complete: bool = True, before: Sequence[Problem] = ()) -> VerifyReport:
    """The files compared, after what was found before."""
    total = sum(entry.bytes for entry in files.entries.values())
    problems = (Problem(name, what) for name, what in files.verify().items())
    return VerifyReport(path, complete, len(files.entries), total, (*before, *problems))


def info(path: Path | str) -> ArtifactInfo:
    """What is in an artifact; of an unfinished one, how far it is.

    Raises:
        ArtifactError: there is no artifact, its manifest is damaged, or it is of another format version.
    """
    if (url := remote_url(path)) is not None:
        manifest, files = open_store(url, SIGNED_MANIFEST)
        return replace(_describe(files.root, manifest), path=url)
    path = local_path(path)
    if kind_of(path / MANIFEST) != "nothing":
        return _describe(path, SIGNED_MANIFEST.read(path))
    if not (path / BUILD).exists():
        raise ArtifactError(why_not_open(path))
    return _describe(path, _unfinished(path), complete=False)


def _describe(path: Path, manifest: Manifest, *, complete: bool = True) -> ArtifactInfo:
    grid = ShardGrid(manifest.n_rows, manifest.shard_rows)
    finished = grid.n_shards if complete else len(BuiltShards(path, 0, grid).parts)
    rows = min(finished * grid.shard_rows, grid.n_rows)
    by_kind: dict[str, int] = {}
    for name, entry in manifest.files.items():
        first = name.partition("/")[0].partition(".")[0]
        kind = first if first in ("arrays", "rows", "shards", "units", "moments", "features") else "other"
        by_kind[kind] = by_kind.get(kind, 0) + entry.bytes
    total = sum(by_kind.values())
    extension, part = None, len(manifest.units)
    if complete and (path / part_dir(part) / BUILD).exists():
        extension = f"{len(BuiltShards(path, part, grid).parts)} of {grid.n_shards} shards"
    return ArtifactInfo(
        path=str(path),
        complete=complete,
        format_version=manifest.format_version,
        n_rows=manifest.n_rows,
        shard_rows=manifest.shard_rows,
        n_shards=grid.n_shards,
        finished_shards=finished,
        extension_in_progress=extension,
        targets=manifest.targets,
        arrays=tuple(_array(manifest, name, rows) for name in manifest.arrays),
        bytes=by_kind,
        bytes_total=total,
        bytes_per_row=_per_row(total, rows),
        made_by=manifest.made_by,
        fingerprints=manifest.fingerprints,
        settings=manifest.settings,
        skipped=manifest.skipped,
        details=manifest.details,
    )


def _array(manifest: Manifest, name: str, rows: int) -> ArrayInfo:
    entry = manifest.arrays[name]
    size = rows * sum(np.dtype(group.dtype).itemsize * (group.stop - group.start) for group in entry.groups)
    return ArrayInfo(
        name=name,
        shape=(manifest.n_rows, entry.width),
        dtype="/".join(dict.fromkeys(group.dtype for group in entry.groups)),
        bytes=size,
        bytes_per_row=_per_row(size, rows),
        unit=entry.unit,
        sign=entry.sign,
        groups=tuple(group.name for group in entry.groups),
    )


def _per_row(size: int, rows: int) -> float:
    return size / rows if rows else 0.0


def _unfinished(path: Path) -> Manifest:
    """A manifest of what is there so far."""
    record = read_record(path / BUILD, BuildRecord)
    shards = BuiltShards(path, 0, ShardGrid(record.n_rows, record.shard_rows)).parts
    arrays = {}
    for name, spec in record.arrays.items():
        group = ColumnGroup(name=group_name(name, 0), start=0, stop=spec["width"], dtype=spec["dtype"])
        arrays[name] = ArrayEntry(width=spec["width"], unit=spec["unit"], sign=spec["sign"], groups=(group,))
    return Manifest(
        n_rows=record.n_rows,
        shard_rows=record.shard_rows,
        targets={},
        arrays=arrays,
        units=(),
        moments=(),
        files={name: entry for files in shards.values() for name, entry in files.entries.items()},
        details={"identity": record.identity},
    )


def _manifest_or_problem(path: Path, problems: list[Problem]) -> Manifest | None:
    if (kind := kind_of(path / MANIFEST)) != "file":
        problems.append(Problem(MANIFEST, f"is a {kind}, expected a regular file"))
        return None
    if not is_signed((path / MANIFEST).read_bytes()):
        problems.append(Problem(MANIFEST, "damaged: its checksum does not match"))
        return None
    return SIGNED_MANIFEST.read(path)


def _other_settings(path: Path, manifest: Manifest) -> bool:
    """Whether the run.yaml is not what was built: lengths that it leaves open, or to the model, follow from both."""
    try:
        asked = read_yaml(path)
        built = manifest.settings
        units, reads = asked.get("targets"), built.get("targets")
        if isinstance(units, dict) and isinstance(reads, dict) and isinstance(units.get("max_length"), int):
            units["max_length"] = min(units["max_length"], reads["max_length"])
        return not all(line.endswith("now null") for line in differences(built, asked))
    except SettingsError:
        return True


def _marked(path: Path, problems: list[Problem]) -> Iterator[tuple[str, FileEntry]]:
    """Files that completion marks speak of."""
    for mark in sorted([*path.glob("shards/*.json"), *path.glob("extensions/*/shards/*.json")]):
        try:
            yield from read_record(mark, ShardMark).files.items()
        except ArtifactError:
            problems.append(Problem(mark.relative_to(path).as_posix(), "damaged: not a completion mark"))
