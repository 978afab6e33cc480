"""Describe an artifact (`info`), and compare its files with their recorded checksums (`verify`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import PROVENANCE, REPLAY, TOKENS, ShardGrid
from grasp.artifact.reader import open_manifest
from grasp.text import plain, size_text, skipped_text, text_table

UNFINISHED_REPLAY = "a replay is unfinished; repeat the command that started it, with the same --recipe, to continue it"
FILE_GROUPS = ("arrays", "rows", "shards", "units", "moments", "features")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification: what was verified, and the damage of each damaged file, by its path in the artifact."""

    path: str
    n_files: int
    n_bytes: int
    problems: dict[str, str]

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
    format_version: int
    n_rows: int
    shard_rows: int
    n_shards: int
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
        total = f"{self.n_rows:,} rows, {size_text(self.bytes_total)}"
        arrays = [
            (
                array.name,
                array.dtype,
                "{} x {}".format(*array.shape),
                size_text(array.bytes),
                f"{array.bytes_per_row:.0f}",
            )
            for array in self.arrays
        ]
        origin = self.made_by | {f"{name} fingerprint": value for name, value in self.fingerprints.items()}
        targets = ", ".join(f"{name} ({units} units)" for name, units in self.targets.items())
        other = ", ".join(f"{group} {size_text(size)}" for group, size in self.bytes.items() if group != "arrays")
        below = [f"other files: {other}; {self.bytes_per_row:,.0f} bytes per row in total", *self.replays]
        if counts := self.skipped.get("rows", {}).get("counts"):
            below.append(f"left out: {skipped_text(counts)}")
        return "\n".join(
            [
                plain(f"{self.path}: format {self.format_version}, {total}"),
                *(f"  {plain(name)}: {plain(value)}" for name, value in origin.items()),
                plain(f"targets: {targets}"),
                text_table("arrays", ("array", "dtype", "shape", "size", "bytes per row"), arrays),
                *map(plain, below),
            ]
        )


def verify(path: Path | str) -> VerifyReport:
    """Compare every file with its recorded size and checksum. Files behind a URL are streamed, and not stored.

    Raises:
        ArtifactError: not an artifact, unfinished, a damaged manifest, or another format version.
    """
    manifest, files = open_manifest(path)
    if (files.root / TOKENS).exists():  # they are not copied with the artifact
        files.entries = manifest.files | manifest.rows_kept
    problems = {name: damage for name in sorted(files.entries) if (damage := files.fault(name))}
    n_bytes = sum(entry.bytes for entry in files.entries.values())
    return VerifyReport(files.location, len(files.entries), n_bytes, problems)


def info(path: Path | str) -> ArtifactInfo:
    """Describe an artifact.

    Raises:
        ArtifactError: not an artifact, unfinished, a damaged manifest, or another format version.
    """
    manifest, files = open_manifest(path)
    unfinished = [UNFINISHED_REPLAY] if (files.root / REPLAY).exists() else []
    bytes_by_group: dict[str, int] = {}
    for name, file in manifest.files.items():
        first = name.partition("/")[0].partition(".")[0]  # directory, or name without suffix
        group = first if first in FILE_GROUPS else "other"
        bytes_by_group[group] = bytes_by_group.get(group, 0) + file.bytes
    bytes_total = sum(bytes_by_group.values())
    arrays = []
    for name, entry in manifest.arrays.items():
        bytes_per_row = sum(np.dtype(group.dtype).itemsize * (group.stop - group.start) for group in entry.groups)
        arrays.append(
            ArrayInfo(
                name=name,
                shape=(manifest.n_rows, entry.width),
                dtype="/".join(dict.fromkeys(group.dtype for group in entry.groups)),
                bytes=manifest.n_rows * bytes_per_row,
                bytes_per_row=float(bytes_per_row),
                unit=entry.unit,
                sign=entry.sign,
                groups=tuple(group.name for group in entry.groups),
            )
        )
    copied = ("format_version", "n_rows", "shard_rows", "targets", *PROVENANCE)
    return ArtifactInfo(
        **{name: getattr(manifest, name) for name in copied},
        path=files.location,
        n_shards=ShardGrid(manifest.n_rows, manifest.shard_rows).n_shards,
        arrays=tuple(arrays),
        bytes=bytes_by_group,
        bytes_total=bytes_total,
        bytes_per_row=bytes_total / manifest.n_rows,
        replays=(*map(str, manifest.replays), *unfinished),
    )
