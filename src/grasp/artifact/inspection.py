"""Describe an artifact (`info`), and compare its files with their recorded checksums (`verify`).

Both also accept the directory of an unfinished build. Its manifest is not written yet, so they read the completion
marks of its finished shards.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import (
    BUILD,
    MANIFEST,
    REPLAY,
    RUN,
    SIGNED_MANIFEST,
    TOKENS,
    ArrayEntry,
    BuildRecord,
    BuiltShards,
    ColumnGroup,
    Manifest,
    ShardGrid,
    ShardMark,
    part_dir,
)
from grasp.artifact.reader import refuse_unfinished
from grasp.errors import ArtifactError, SettingsError
from grasp.files import FileEntry, differences, is_signed, kind_of
from grasp.store.directory import Files
from grasp.store.records import read_record
from grasp.store.remote import local_path, open_store, remote_url
from grasp.text import plain, size_text, skipped_text, text_table
from grasp.yaml_files import read_yaml

UNFINISHED_REPLAY = "a replay is unfinished; repeat the command that started it, with the same --recipe, to continue it"
FILE_GROUPS = ("arrays", "rows", "shards", "units", "moments", "features")


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged file: its path in the artifact, and the damage."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification: what was verified, and all damaged files."""

    path: str
    complete: bool  # False for a build in progress, whose finished shards were verified
    n_files: int
    n_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array of the artifact; `bytes` is the size of its numbers."""

    name: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    bytes_per_row: float
    unit: str
    sign: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ArtifactInfo:
    """Description of an artifact, shown by `grasp info`."""

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
    bytes: dict[str, int]  # size of the files by `FILE_GROUPS`, or other
    bytes_total: int
    bytes_per_row: float
    made_by: dict[str, Any]
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    skipped: dict[str, Any]
    details: dict[str, Any]
    replays: tuple[str, ...]  # one line for each replay: targets, result of the gate, what to do; or an unfinished one

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self.finished_shards} of {self.n_shards} shards finished"
        total = f"{self.n_rows:,} rows, {size_text(self.bytes_total)}"
        origin = self.made_by | {f"{name} fingerprint": value for name, value in self.fingerprints.items()}
        targets = ", ".join(f"{name} ({units} units)" for name, units in self.targets.items())
        other = ", ".join(f"{group} {size_text(size)}" for group, size in self.bytes.items() if group != "arrays")
        below = [f"other files: {other}; {self.bytes_per_row:,.0f} bytes per row in total", *self.replays]
        if counts := self.skipped.get("rows", {}).get("counts"):
            below.append(f"left out: {skipped_text(counts)}")
        if self.extension_in_progress is not None:
            below.append(f"adding targets: {self.extension_in_progress} finished")
        return "\n".join(
            [
                plain(f"{self.path}: {state}, format {self.format_version}, {total}"),
                *(f"  {plain(name)}: {plain(value)}" for name, value in origin.items()),
                plain(f"targets: {targets}"),
                text_table("arrays", ("array", "dtype", "shape", "size", "bytes per row"), self._array_cells()),
                *map(plain, below),
            ]
        )

    def _array_cells(self) -> list[tuple[str, ...]]:
        return [
            (
                array.name,
                array.dtype,
                f"{array.shape[0]} x {array.shape[1]}",
                size_text(array.bytes),
                f"{array.bytes_per_row:.0f}",
            )
            for array in self.arrays
        ]


def verify(path: Path | str) -> VerifyReport:
    """Compare every file with its recorded size and checksum.

    If the artifact is unfinished or its manifest is damaged, the finished shards are verified. Files behind a URL are
    streamed, and not stored.

    Raises:
        ArtifactError: not an artifact, or another format version.
    """
    if (url := remote_url(path)) is not None:
        (_, files), complete, problems = open_store(url, SIGNED_MANIFEST), True, list[Problem]()
    else:
        path = local_path(path)
        complete = kind_of(path / MANIFEST) != "nothing"
        if not complete and not (path / BUILD).exists():
            refuse_unfinished(path)
        kind, problems = kind_of(path / MANIFEST), list[Problem]()
        if kind == "file" and is_signed((path / MANIFEST).read_bytes()):
            manifest = SIGNED_MANIFEST.read(path)
            expected = dict(manifest.files)
            if (path / TOKENS).exists():  # they are not copied with the artifact
                expected |= manifest.rows_kept
            if (path / RUN).exists() and _settings_differ(path / RUN, manifest):
                problems.append(Problem(RUN, "damaged: its settings differ from those in the manifest"))
        else:
            expected, problems = _files_of_finished_shards(path)
            if complete:
                damage = (
                    f"is a {kind}, expected a regular file"
                    if kind != "file"
                    else "damaged: its checksum does not match"
                )
                problems.insert(0, Problem(MANIFEST, damage))
        files = Files(path, expected, "")
    problems += [Problem(name, damage) for name, damage in files.verify().items()]
    n_bytes = sum(entry.bytes for entry in files.entries.values())
    return VerifyReport(files.location, complete, len(files.entries), n_bytes, tuple(problems))


def _files_of_finished_shards(path: Path) -> tuple[dict[str, FileEntry], list[Problem]]:
    """Return the files that completion marks list, and a problem for each damaged mark."""
    expected, problems = dict[str, FileEntry](), list[Problem]()
    for mark in sorted([*path.glob("shards/*.json"), *path.glob("extensions/*/shards/*.json")]):
        try:
            expected |= read_record(mark, ShardMark).files
        except ArtifactError:
            problems.append(Problem(mark.relative_to(path).as_posix(), "damaged: not a completion mark"))
    return expected, problems


def info(path: Path | str) -> ArtifactInfo:
    """Describe an artifact, or the progress of an unfinished one.

    Raises:
        ArtifactError: not an artifact, a damaged manifest, or another format version.
    """
    complete = remote_url(path) is not None or kind_of(local_path(path) / MANIFEST) != "nothing"
    if complete:
        manifest, files = open_store(path, SIGNED_MANIFEST)
    else:
        path = local_path(path)
        if not (path / BUILD).exists():
            refuse_unfinished(path)
        manifest = _manifest_of_unfinished(path)
        files = Files(path, manifest.files, "")
    grid, extension = ShardGrid(manifest.n_rows, manifest.shard_rows), None
    # Part 0 is the build, part k the k-th extension by other targets; the next one may be in progress.
    next_part = len(manifest.units)
    finished = grid.n_shards if complete else len(BuiltShards(files.root, 0, grid).parts)
    if complete and (files.root / part_dir(next_part) / BUILD).exists():
        extension = f"{len(BuiltShards(files.root, next_part, grid).parts)} of {grid.n_shards} shards"
    unfinished = [UNFINISHED_REPLAY] if complete and (files.root / REPLAY).exists() else []
    n_finished_rows = min(finished * grid.shard_rows, grid.n_rows)
    bytes_by_group = _bytes_by_group(manifest.files)
    bytes_total = sum(bytes_by_group.values())
    return ArtifactInfo(
        path=files.location,
        complete=complete,
        format_version=manifest.format_version,
        n_rows=manifest.n_rows,
        shard_rows=manifest.shard_rows,
        n_shards=grid.n_shards,
        finished_shards=finished,
        extension_in_progress=extension,
        targets=manifest.targets,
        arrays=tuple(_array_info(name, entry, manifest, n_finished_rows) for name, entry in manifest.arrays.items()),
        bytes=bytes_by_group,
        bytes_total=bytes_total,
        bytes_per_row=bytes_total / n_finished_rows if n_finished_rows else 0.0,
        made_by=manifest.made_by,
        fingerprints=manifest.fingerprints,
        settings=manifest.settings,
        skipped=manifest.skipped,
        details=manifest.details,
        replays=(*map(str, manifest.replays), *unfinished),
    )


def _array_info(name: str, entry: ArrayEntry, manifest: Manifest, n_finished_rows: int) -> ArrayInfo:
    """Describe an array; its size is that of the finished rows."""
    bytes_per_row = sum(np.dtype(group.dtype).itemsize * (group.stop - group.start) for group in entry.groups)
    return ArrayInfo(
        name=name,
        shape=(manifest.n_rows, entry.width),
        dtype="/".join(dict.fromkeys(group.dtype for group in entry.groups)),
        bytes=n_finished_rows * bytes_per_row,
        bytes_per_row=float(bytes_per_row) if n_finished_rows else 0.0,
        unit=entry.unit,
        sign=entry.sign,
        groups=tuple(group.name for group in entry.groups),
    )


def _bytes_by_group(files: Mapping[str, FileEntry]) -> dict[str, int]:
    """Return the total size of the files of each directory or table that `FILE_GROUPS` lists, and of all others."""
    totals: dict[str, int] = {}
    for name, entry in files.items():
        first = name.partition("/")[0].partition(".")[0]  # directory, or name without suffix
        group = first if first in FILE_GROUPS else "other"
        totals[group] = totals.get(group, 0) + entry.bytes
    return totals


def _manifest_of_unfinished(path: Path) -> Manifest:
    """Return a manifest that describes the finished shards of an unfinished build; it is not written."""
    record = read_record(path / BUILD, BuildRecord)
    shards = BuiltShards(path, 0, ShardGrid(record.n_rows, record.shard_rows)).parts
    arrays = {}
    for name, spec in record.arrays.items():
        group = ColumnGroup(name=name, start=0, stop=spec["width"], dtype=spec["dtype"])
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


def _settings_differ(path: Path, manifest: Manifest) -> bool:
    """Return whether run.yaml differs from the settings in the manifest, except for values that the build resolved.

    These are unset values, and a `targets.max_length` above the context of the model, which the build reduces to it.
    """
    try:
        settings = read_yaml(path)
    except SettingsError:
        return True
    targets, resolved_targets = settings.get("targets"), manifest.settings.get("targets")
    if isinstance(targets, dict) and isinstance(resolved_targets, dict):
        max_length, resolved_length = targets.get("max_length"), resolved_targets.get("max_length")
        if isinstance(max_length, int) and isinstance(resolved_length, int):
            targets["max_length"] = min(max_length, resolved_length)
    return any(differences(manifest.settings, settings, ignore_unset=True))
