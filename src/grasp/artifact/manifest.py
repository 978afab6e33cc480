"""The layout of an artifact and the schemas of its JSON files. Start with `Manifest`.

manifest.json                 written last: the artifact is complete if it exists
build.json                    identity of the build, compared when it is resumed
run.yaml                      settings of the build, to run it again; those of the manifest are authoritative
rows.parquet units.parquet moments.safetensors
arrays/NAME/00000.npy ...     the rows of one shard, as numpy.save writes them
arrays/NAME/scale.npy         per column: value = stored * scale * the array's gain in the manifest
shards/00000.json .parquet    completion mark and row table of a shard
features/                     stored features, if any
extensions/J/                 build.json and shards/ of the J-th extension, whose arrays are NAME.J
tokens/                       the rows, if they are stored; replays and retrainings read them
model/ tokenizer/             a model that the build trained: a proxy, or after a warm-up (warm-up.json)
warm-up/ replay/              states of an unfinished warm-up or replay
work/                         temporary files of a build in progress
.grasp-artifact               marks the directory as an artifact; lock of the writer

An extension adds targets to a finished artifact. Files of the build have part number 0, those of extension J have J.
The columns of an array are stored in groups: those of the build, then those of each extension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray
from pydantic import Field

from grasp.files import UNSIGNED, FileEntry
from grasp.store.contents import read_tensors, tensor_bytes
from grasp.store.directory import Schema, Store
from grasp.store.records import FileName, JsonModel, Mark, Name, Signed

FORMAT = "grasp-artifact"
FORMAT_VERSION = 2

# Prefixes of names in a moments file
UNITS = "units."  # what the model computed for the units of a target, which `explain` reads
LEAKS = "leaks."  # rows that contain questions of a target, and the number of questions that were searched for
SUM = "sum."  # totals over all rows

# Files and directories
MARKER = ".grasp-artifact"
TOKENS = "tokens"
MODEL, TOKENIZER = "model", "tokenizer"
FEATURES = "features"
REPLAY = "replay"  # directory of intermediate results while a replay is in progress
RUN = "run.yaml"
MANIFEST = "manifest.json"
BUILD = "build.json"
ROWS = "rows.parquet"
CHUNK = "arrays/{}/{:05d}.npy"  # numbers of a column group in a shard
SCALE = "arrays/{}/scale.npy"  # scale of each column of a group
SHARD_ROWS = "shards/{:05d}.parquet"
SHARD_FEATURES = "features/shard-{:05d}.safetensors"
ROW_COLUMNS = ("row_id", "doc_id", "n_tokens", "loss", "snippet")  # columns of the row table before the labels
LOSS_TOKENS = "n_loss"  # a further column if not every token of a row carries loss
ADDED_TARGETS = "added_targets"  # of `details`: names of targets that were added to a finished artifact
PER_UNIT = "relevance_"  # arrays whose columns are units, in the order of units.parquet, or targets: `ArrayEntry`

ArrayDtype = Literal["float16", "float32"]


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """N rows in shards of `shard_rows`; the last one may be shorter."""

    n_rows: int
    shard_rows: int

    @property
    def n_shards(self) -> int:
        """Return the number of shards."""
        return -(-self.n_rows // self.shard_rows)

    def bounds(self, k: int) -> tuple[int, int]:
        """Return the first row of shard k, and the row after its last."""
        assert 0 <= k < self.n_shards
        return k * self.shard_rows, min((k + 1) * self.shard_rows, self.n_rows)


def of_part(name: str, part: int) -> str:
    """Return the file name of `name` in the build (part 0) or an extension, e.g. `name.1`."""
    return name if part == 0 else f"{name}.{part}"


class ColumnGroup(JsonModel):
    """Columns [start, stop) of an array, stored in the files of `arrays/<name>`."""

    name: Name
    start: int = Field(ge=0)
    stop: int
    dtype: ArrayDtype


class ArrayEntry(JsonModel):
    """A logical array of N rows: the meaning of its numbers, and the groups in which its columns are stored."""

    width: int = Field(ge=1)
    unit: str
    sign: str
    gain: float = Field(
        1.0, gt=0, lt=1e30, description="Factor of every column, applied on reading; sums are of numbers before it."
    )
    groups: tuple[ColumnGroup, ...]
    targets: tuple[str, ...] = Field(
        (),
        description="Targets of the columns, if they are not units. Readers repeat a column for every unit of its "
        "target, and give 0 for the units of other targets.",
    )


class ReplayRecord(JsonModel):
    """A replay of trainings: what was replayed, and whether its scores are to be trusted.

    A replay differentiates one or more trainings by a recipe, which differ in the order of the rows. A gate checks that
    the derivatives are smooth, and that two orders agree; see docs/howto/replay.md.

    Attributes:
        recipe: settings of the training.
        settings: settings of the replay.
        steps: number of steps of a training.
        targets: those that were differentiated.
        passed: whether the array `relevance_replay` has columns for them.
        trainings: price of all orders, in trainings.
        agreement: rank correlation of the rows' scores in two orders, by target; empty for a single order.
        notes: result of the gate for each order, what was left out, and what to do.
    """

    recipe: dict[str, Any]
    settings: dict[str, Any]
    targets: tuple[str, ...]
    passed: bool
    steps: int
    trainings: float
    agreement: dict[str, float]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        orders = self.settings.get("orders", 1)
        parts = [f"replay of {orders} x {self.steps} steps for {', '.join(self.targets)}"]
        if not self.passed:
            parts[0] += ": not used, rows rank by the other kernels"
        if self.agreement:
            parts.append(f"rank correlation of rows in two orders {min(self.agreement.values()):.2f} or more")
        if self.passed:
            parts.append("intervals do not contain its uncertainty")
        return "; ".join([*parts, *self.notes])


class Manifest(JsonModel):
    """The manifest of a complete artifact. `files` has size and checksum of every file but this one."""

    format: Literal["grasp-artifact"] = "grasp-artifact"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Checksum of this file, with zeros in its place.")
    n_rows: int = Field(ge=1)
    shard_rows: int = Field(ge=1)
    targets: dict[str, int] = Field(description="Units per target, in the order of the columns.")
    arrays: dict[Name, ArrayEntry]
    units: tuple[FileName, ...] = Field(description="Unit tables, in the order of the columns.")
    moments: tuple[FileName, ...] = Field(description="Moments of the build and of each extension.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and device that wrote it.")
    fingerprints: dict[str, str] = Field({}, description="Hashes of model, tokenizer, corpus and targets.")
    settings: dict[str, Any] = Field({}, description="The settings of the build.")
    skipped: dict[str, Any] = Field({}, description="What was skipped, by reason.")
    details: dict[str, Any] = Field({}, description="Further facts about the build.")
    files: dict[FileName, FileEntry]
    rows_kept: dict[FileName, FileEntry] = Field(
        {}, description="Files of tokens/, which are not copied with the artifact."
    )

    @property
    def replays(self) -> tuple[ReplayRecord, ...]:
        """Return the replays of the artifact, in order."""
        records = self.details.get("replays", ())
        return tuple(ReplayRecord.model_validate(record, strict=False) for record in records)


PROVENANCE = ("made_by", "fingerprints", "settings", "skipped", "details")


class ShardMark(Mark):
    """Completion mark of a shard: its rows, its files, and sums over its rows."""

    start: int
    stop: int
    sums: dict[str, tuple[float, ...]]


class BuildRecord(JsonModel):
    """Identity of a build in progress; a resumed build must be equal in every field."""

    format_version: int = FORMAT_VERSION
    n_rows: int = Field(ge=1)
    shard_rows: int = Field(ge=1)
    arrays: dict[str, dict[str, Any]]
    identity: dict[str, Any]


class BuiltShards(Store[ShardMark]):
    """The shards of one part of an artifact: the build (part 0), or an extension."""

    def __init__(self, root: Path, part: int, grid: ShardGrid) -> None:
        directory = Path("extensions") / str(part) if part else Path()
        plan, marks = (directory / BUILD).as_posix(), (directory / "shards" / "[0-9]*.json").as_posix()
        super().__init__(root, Schema(mark=ShardMark, marks=marks, plan=plan, recovery_hint="rebuild the artifact"))
        self.grid = grid

    @property
    def left(self) -> list[int]:
        """Return the shards that are still to be written, including those whose files are missing or truncated."""
        return [k for k in range(self.grid.n_shards) if f"{k:05d}" not in self.parts]

    def progress(self) -> str:
        """Return the progress of the build, for messages."""
        return f"{len(self.parts)} of {self.grid.n_shards} shards are finished"


class ArrayFiles(Store[Mark]):
    """Numbered files of named arrays: the features of each shard, or intermediate results of a build."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Schema(mark=Mark, marks="shard-*.json", other_files=("shard-*.safetensors",)))

    def write(self, k: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write arrays of any shapes as file k, and replace an earlier one.

        Raises:
            ArtifactError: the disk is full (no part of this file remains).
        """
        self.put(f"shard-{k:05d}", {f"shard-{k:05d}.safetensors": tensor_bytes(arrays)})

    def read(self, k: int) -> dict[str, NDArray[Any]]:
        """Read the arrays of file k.

        Raises:
            ArtifactError: the file is missing or damaged.
        """
        return read_tensors(self.file(f"shard-{k:05d}"), self.schema.recovery_hint)

    def has(self, k: int) -> bool:
        """Return whether file k is complete."""
        return f"shard-{k:05d}" in self.parts


SIGNED_MANIFEST = Signed(
    MANIFEST,
    Manifest,
    "the manifest of an artifact",
    FORMAT,
    FORMAT_VERSION,
    "rebuild the artifact",
    missing_message="no complete artifact here; create one with `grasp build --out {location}`, or check the URL",
)
