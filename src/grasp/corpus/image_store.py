"""The rows of a corpus of images on disk: encoded bytes and classes, shard by shard; see `shard_files`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.images import ImageRecord, class_index, images_of, open_images, pixel_hash, usable
from grasp.corpus.packing import Cursor, SkipLog, StoredRow
from grasp.corpus.shard_files import FORMAT, RowStream, ShardStore
from grasp.corpus.sources import Source
from grasp.settings import CorpusSettings

BYTES_COLUMN: Final = "__image__"
INDEX_COLUMN: Final = "__class__"
CLASS_LABEL: Final = "image_class"
HASH_LABEL: Final = "image_hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow(StoredRow):
    """One image with what is known of it: one supervised position."""

    encoded: bytes
    class_index: int


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

    def tokens_of(self, index: NDArray[np.int64]) -> int:
        """Positions of some images."""
        return len(index)

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
    seed: ClassVar[bytes] = b"grasp images 1"
    content: ClassVar[tuple[str, ...]] = (INDEX_COLUMN, BYTES_COLUMN)

    @classmethod
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        classes: Sequence[str],
        n_classes: int,
        *,
        shard_rows: int,
        replace: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read and check the images; go on where an earlier call was cut off; open what is complete.

        An image that cannot be decoded, is missing, or has no class is left out, named and counted.

        Args:
            classes: names of the head's classes, in order; empty: they have none.
            n_classes: classes of the head.
            replace: throw away what was begun here with other input.
        Raises:
            CorpusError: no image is left, a class that the head does not have, a name that occurs twice, or another
                corpus than the one that `directory` was begun with.
        """
        source = open_images(settings.path, settings.split)
        plan = {  # the path is not in it: a corpus may move
            "format": FORMAT,
            "settings": settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
            "classes": {"names": ", ".join(classes), "count": n_classes},
            "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
        }
        stream = ImageRows(source, settings, classes, n_classes)
        return cls._write(directory, plan, stream, progress, replace=replace, details={})

    def _shard(self, start: int, whole: pa.Table) -> ImageShard:
        encoded = tuple(whole.column(BYTES_COLUMN).to_pylist())
        classes = whole.column(INDEX_COLUMN).to_numpy().astype(np.int64)
        return ImageShard(start, encoded, classes, self._public(whole))

    @staticmethod
    def _hashed(whole: pa.Table) -> Iterator[bytes]:
        for line in whole.to_pylist():
            name, content = line["row_id"].encode(), line[BYTES_COLUMN]
            sizes = (len(name), line[INDEX_COLUMN], len(content))
            yield b"".join(size.to_bytes(8, "little") for size in sizes) + name + content


class ImageRows(RowStream[ImageRow]):
    """The images of a source that can be used."""

    def __init__(self, source: Source, settings: CorpusSettings, classes: Sequence[str], n_classes: int) -> None:
        super().__init__(settings)
        self._source, self._classes, self._n_classes = source, classes, n_classes

    def rows(self, cursor: Cursor, log: SkipLog) -> Iterator[ImageRow]:
        return image_rows(self._records(cursor), self._classes, self._n_classes, log)

    def _records(self, cursor: Cursor) -> Iterator[ImageRecord]:
        for record in images_of(self._source, self.settings, start=cursor.document):
            self.next_document = record.index + 1
            yield record

    def payload(self, rows: Sequence[ImageRow]) -> dict[str, pa.Array]:
        return {
            BYTES_COLUMN: pa.array([row.encoded for row in rows], pa.binary()),
            INDEX_COLUMN: pa.array([row.class_index for row in rows], pa.int32()),
        }

    def where(self, document: int) -> str:
        return next(images_of(self._source, self.settings, start=document)).where


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
        n_tokens=1,
        after=Cursor(record.index + 1),
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
