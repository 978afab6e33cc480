"""Where things lie in an artifact, and how rows fall into shards.

manifest.json                 written last: where it exists the artifact is complete
build.json                    identity of the build, compared when it is resumed
run.yaml                      settings of the build, to be replayed; those of the manifest are what counts
rows.parquet units.parquet moments.safetensors
arrays/NAME/00000.npy ...     the rows of one shard, as numpy.save writes them
arrays/NAME/scale.npy         per column: value = stored * scale * the array's gain in the manifest
shards/00000.json .parquet    completion mark and row table of a shard
features/                     kept features, if any
extensions/J/                 build.json and shards/ of the J-th extension, whose arrays are NAME.J
tokens/                       the rows themselves, if they are kept
work/                         temporary, of a build in progress
.grasp-artifact               whose directory this is; the lock of the one that writes
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grasp.errors import ArtifactError

FORMAT = "grasp-artifact"
FORMAT_VERSION = 2
MARKER = ".grasp-artifact"
TOKENS = "tokens"
FEATURES = "features"
RUN = "run.yaml"
MANIFEST = "manifest.json"
BUILD = "build.json"
ROWS = "rows.parquet"
SUM = "sum."  # prefix, in a moments file, of totals over all rows
PER_UNIT = "relevance_"  # arrays whose columns are units, in the order of units.parquet


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """N rows cut into shards of `shard_rows`; the last one may be short."""

    n_rows: int
    shard_rows: int

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.shard_rows < 1:
            raise ArtifactError(
                f"shards: got n_rows={self.n_rows}, shard_rows={self.shard_rows}, expected positive numbers"
            )

    @property
    def n_shards(self) -> int:
        return -(-self.n_rows // self.shard_rows)

    def bounds(self, k: int) -> tuple[int, int]:
        """First row of shard k, and the row after its last."""
        if not 0 <= k < self.n_shards:
            raise ArtifactError(f"shard {k}: expected 0 to {self.n_shards - 1} ({self.n_rows} rows)")
        return k * self.shard_rows, min((k + 1) * self.shard_rows, self.n_rows)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Shards that rows [start, stop) touch, as (k, first row and end row counted within the shard)."""
        for k in range(start // self.shard_rows, -(-stop // self.shard_rows)):
            begin, end = self.bounds(k)
            yield k, max(start, begin) - begin, min(stop, end) - begin


def chunk_file(group: str, k: int) -> str:
    """File of shard k of one column group, relative to the artifact."""
    return f"arrays/{group}/{k:05d}.npy"


def scale_file(group: str) -> str:
    """File of the scales of one column group, relative to the artifact."""
    return f"arrays/{group}/scale.npy"


def group_name(array: str, part: int) -> str:
    """Column group of `array` written by the build (part 0) or by its part-th extension."""
    return array if part == 0 else f"{array}.{part}"


def row_file(k: int) -> str:
    """Row table of shard k, relative to the artifact."""
    return f"shards/{k:05d}.parquet"


def spool_part(k: int) -> str:
    """What shard k is called among features and in the work area."""
    return f"shard-{k:05d}"


def part_dir(part: int) -> Path:
    """Where the build (part 0) or an extension keeps its build.json and its marks."""
    return Path() if part == 0 else Path("extensions") / str(part)


def part_file(stem: str, suffix: str, part: int) -> str:
    """`units.parquet` for the build, `units.1.parquet` for its first extension."""
    return f"{stem}{suffix}" if part == 0 else f"{stem}.{part}{suffix}"
