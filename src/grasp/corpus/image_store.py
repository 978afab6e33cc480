"""The rows of a corpus of images on disk: encoded bytes and classes, shard by shard; see `shard_files`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.images import ImageRecord, class_index, images_of, open_images, pixel_hash, usable
from grasp.corpus.labels import Label
from grasp.corpus.packing import SkipLog
from grasp.corpus.shard_files import FORMAT, ShardStore, StoreWriter, begin, first_duplicate, read_shard
from grasp.corpus.sources import Source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

BYTES_COLUMN: Final = "__image__"
INDEX_COLUMN: Final = "__class__"
CLASS_LABEL: Final = "image_class"
HASH_LABEL: Final = "image_hash"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """One image with what is known of it; `grasp.corpus.shard_files.StoredRow`."""

    row_id: str
    doc_id: str
    document: int
    encoded: bytes
    class_index: int
    snippet: str
    labels: Mapping[str, Label]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImageShard:
    """Images and their classes."""

    start: int  # row_index of the first; -1 for images picked one by one
    encoded: tuple[bytes, ...]
    class_N: NDArray[np.int64]
    table: pa.Table  # row_id, doc_id, n_tokens (1), snippet, then the labels

    def __len__(self) -> int:
        return len(self.encoded)

    @property
    def n_tokens(self) -> int:
        """One supervised position an image."""
        return len(self)

    def take(self, index: NDArray[np.int64]) -> "ImageShard":
        """Images by position in the shard, in the order given."""
        chosen = tuple(self.encoded[int(i)] for i in index)
        return ImageShard(-1, chosen, self.class_N[index], self.table.take(pa.array(index)))

    @classmethod
    def joined(cls, parts: Sequence["ImageShard"]) -> "ImageShard":
        """Images of all parts, one after the other."""
        encoded = tuple(image for part in parts for image in part.encoded)
        return cls(-1, encoded, np.concatenate([p.class_N for p in parts]), pa.concat_tables([p.table for p in parts]))

    @classmethod
    def of(cls, rows: Sequence[ImageRow]) -> "ImageShard":
        """Images that are in no store."""
        names = [row.row_id for row in rows]
        table = pa.table({"row_id": pa.array(names, pa.string())})
        return cls(-1, tuple(row.encoded for row in rows), np.array([row.class_index for row in rows], np.int64), table)


class ImageStore(ShardStore[ImageShard]):
    """The images of a corpus, complete and on disk; opens without reading them."""

    holds: ClassVar[str] = "images"
    unpredicted: ClassVar[int] = 0  # every position of a row carries loss

    @classmethod
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        classes: Sequence[str],
        n_classes: int,
        *,
        shard_rows: int,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read and check the images; go on where an earlier call was cut off; open what is complete.

        An image that cannot be decoded, is missing, or has no class is left out, named and counted.

        Args:
            classes: names of the head's classes, in order; empty: they have none.
            n_classes: classes of the head.
        Raises:
            CorpusError: no image is left, a class that the head does not have, a name that occurs twice, or another
                corpus than the one that `directory` was begun with.
        """
        source = open_images(settings.path)
        begin(directory, _plan(source, settings, classes, n_classes, shard_rows))
        if not (directory / "store.json").exists():
            _write(directory, source, settings, classes, n_classes, shard_rows, progress)
        return cls.open(directory)

    def _shard(self, start: int, whole: pa.Table) -> ImageShard:
        encoded = tuple(whole.column(BYTES_COLUMN).to_pylist())
        classes = whole.column(INDEX_COLUMN).to_numpy().astype(np.int64)
        return ImageShard(start, encoded, classes, self._public(whole))


def image_rows(
    records: Iterator[ImageRecord], classes: Sequence[str], n_classes: int, log: SkipLog
) -> Iterator[ImageRow]:
    """The records that can be used; what cannot goes to the log.

    Raises:
        CorpusError: a class that the head does not have.
    """
    for record, image in usable(records, log):
        yield _row(record, image, class_index(record.class_value, classes, n_classes, record.where), classes)


def _row(record: ImageRecord, image: Any, index: int, classes: Sequence[str]) -> ImageRow:
    digest = pixel_hash(image)
    doc_id = record.given_id or f"{digest}-{record.index}"
    name = classes[index] if classes else str(index)
    assert record.encoded is not None
    return ImageRow(
        row_id=record.row_id or doc_id,
        doc_id=doc_id,
        document=record.index,
        encoded=record.encoded,
        class_index=index,
        snippet=f"{name}, {image.width} x {image.height} pixels",
        labels={_theirs(label): value for label, value in record.labels.items()}
        | {CLASS_LABEL: name, HASH_LABEL: digest},
        ignored=record.ignored,
    )


def _theirs(label: str) -> str:
    """A column of the corpus under its own name, unless ours has it."""
    return f"{label}_" if label in (CLASS_LABEL, HASH_LABEL) else label


def _write(
    directory: Path,
    source: Source,
    settings: CorpusSettings,
    classes: Sequence[str],
    n_classes: int,
    shard_rows: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Every shard from the cursor of the last finished one on, then the end of the store."""
    log = SkipLog()
    shards = StoreWriter(directory, log)
    start = shards.states[-1]["cursor"]["document"] if shards.states else 0
    seen = _Seen(images_of(source, settings, start=start), start)
    rows = image_rows(seen, classes, n_classes, log)
    while shard := list(islice(rows, shard_rows)):
        after = shard[-1].document + 1 if len(shard) == shard_rows else seen.next_index
        payload = {
            BYTES_COLUMN: pa.array([row.encoded for row in shard], pa.binary()),
            INDEX_COLUMN: pa.array([row.class_index for row in shard], pa.int32()),
        }
        shards.add(shard, [1] * len(shard), payload, {"document": after})
        if progress is not None:
            progress(shards.n_rows)
    _check(directory, shards, settings, seen.next_index, shard_rows)
    shards.close(
        holds=ImageStore.holds,
        shard_rows=shard_rows,
        n_documents=seen.next_index,
        fingerprint=_fingerprint(directory, len(shards.states)),
    )


class _Seen:
    """Records as they come, and how far they went."""

    def __init__(self, records: Iterator[ImageRecord], start: int) -> None:
        self._records = records
        self.next_index = start

    def __iter__(self) -> Iterator[ImageRecord]:
        return self

    def __next__(self) -> ImageRecord:
        record = next(self._records)
        self.next_index = record.index + 1
        return record


def _check(directory: Path, shards: StoreWriter, settings: CorpusSettings, end: int, shard_rows: int) -> None:
    if not shards.states:
        counts = ", ".join(f"{count} {reason}" for reason, count in shards.skipped().counts.items())
        raise CorpusError(
            f"{settings.path}: none of the {end} images can be used{f' ({counts})' if counts else ''}; expected at "
            "least one with a class"
        )
    twice = first_duplicate(directory, len(shards.states), shard_rows)
    if twice is not None:
        row_id, places = twice
        raise CorpusError(
            f"row_id {row_id!r} occurs twice: {' and '.join(f'row_index {row}' for row, _ in places)}; give every "
            f"image a name of its own in the column {settings.row_id_column!r}, or drop one of them"
        )


def _plan(
    source: Source, settings: CorpusSettings, classes: Sequence[str], n_classes: int, shard_rows: int
) -> dict[str, Any]:
    """What makes this store this store. The path is not in it: a corpus may move."""
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
        "classes": {"names": ", ".join(classes), "count": n_classes},
        "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
    }


def _fingerprint(directory: Path, n_shards: int) -> str:
    """Hash over (row_id, class, bytes) in row order; shards do not enter."""
    digest = hashlib.blake2b(b"grasp images 1", digest_size=16)
    for k in range(n_shards):
        table = read_shard(directory, k, ["row_id", INDEX_COLUMN, BYTES_COLUMN])
        for line in table.to_pylist():
            name, content = line["row_id"].encode(), line[BYTES_COLUMN]
            sizes = (len(name), line[INDEX_COLUMN], len(content))
            digest.update(b"".join(size.to_bytes(8, "little") for size in sizes) + name + content)
    return digest.hexdigest()
