"""Labelled images: read them as a stream of records, and store those of a corpus as rows.

Start with `read_images`, which yields an `ImageRecord` for each image of a source, and `ImageStore`, which keeps the
decodable ones on disk in shards. Images come from Parquet or a `datasets` table (bytes, paths, or the struct
of both that `datasets` writes), from JSONL with paths, or from a directory with one folder per class. Each has encoded
bytes, a class, a stable name and labels. The format of the store is that of `grasp.corpus.row_store`.
"""

import hashlib
import io
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, Self

import fsspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import I32, I64
from grasp.corpus.documents import read_records
from grasp.corpus.labels import Label, is_text
from grasp.corpus.packing import Cursor, Row, Skipped
from grasp.corpus.row_store import RowStore, StoreSummary, TokenRows, summary_of
from grasp.corpus.sources import ArrowChunk, Chunk, Selector, Source, open_source
from grasp.errors import CorpusError
from grasp.extras import require
from grasp.settings import CorpusSettings
from grasp.store.records import Signed
from grasp.store.remote import remote_errors
from grasp.vision.settings import ClassifierSettings

IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
IS_BINARY: Final = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
IMAGE_COLUMN, CLASS_COLUMN = "image", "label"  # columns of a directory of images
CLASS_LABEL, HASH_LABEL = "image_class", "image_hash"  # labels of image rows
HIDDEN: Final = re.compile(r"(^|/)[._]")  # part of a path that hides it
FILES_PER_CHUNK: Final = 64
SCALE_16_TO_8_BITS: Final = 257  # 65535 / 255


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An image of a corpus, not decoded."""

    index: int  # position in the corpus, from 0, skipped images included
    location: str  # file and line or row, for messages
    source_id: str | None  # doc_id of the source; for a directory, the path relative to it
    row_id: str | None  # row_id of the source
    encoded: bytes | None  # content of the image file; None if there is no image, b"" if it cannot be read
    class_value: Label  # class as it stands in the source: a name or a number
    labels: Mapping[str, Label]  # the other columns
    ignored: tuple[str, ...] = field(default=(), repr=False)  # columns whose type is not supported as a label


def read_images(
    settings: CorpusSettings,
    classifier: ClassifierSettings,
    *,
    source: Source | None = None,
    start: int = 0,
) -> Iterator[ImageRecord]:
    """Yield the images of a corpus, files sorted by name.

    Args:
        settings: settings of the corpus.
        classifier: columns of images and classes.
        source: the opened corpus. Default: it is opened at `settings.path`.
        start: position of the first image.
    Raises:
        CorpusError: at the call, if there is nothing to read; while streaming, if a file is damaged or lacks the
            column of images or of classes.
    """
    source = open_images(settings.path, settings.split) if source is None else source

    def content_columns(columns: Mapping[str, pa.DataType | None]) -> tuple[tuple[str], None]:
        """Check that the columns of images and classes exist, and that the type of the images is supported."""
        image_column = classifier.image_column
        required = (("images", "image_column", image_column), ("classes", "class_column", classifier.class_column))
        for content, setting, column in required:
            if column not in columns:
                raise CorpusError(
                    f"no column {column!r} of {content}; columns found: {', '.join(columns) or 'none'}; set "
                    f"model.classifier.{setting} to the column of {content}"
                )
        dtype = columns[image_column]  # None if the format has no types, e.g. JSONL
        fields = [dtype.field(i).name for i in range(dtype.num_fields)] if dtype and pa.types.is_struct(dtype) else []
        if dtype is not None and not (is_text(dtype) or any(test(dtype) for test in IS_BINARY) or "bytes" in fields):
            raise CorpusError(
                f"image column {image_column!r} has type {dtype}, expected encoded images (binary), paths "
                "(text) or a struct of bytes and path"
            )
        return (image_column,), None

    return (
        ImageRecord(
            index=record.index,
            location=record.location,
            source_id=record.doc_id,
            row_id=record.row_id,
            encoded=_encoded(record.values.get(classifier.image_column), record.file),
            class_value=record.values.get(classifier.class_column),
            labels=record.labels,
            ignored=record.ignored,
        )
        for record in read_records(source, settings, content_columns, start)
    )


def open_images(path: str, split: str | None) -> Source:
    """Open a directory with one folder of image files per class, or anything that `open_source` supports."""
    try:
        with remote_errors(path, CorpusError):
            fs, root = fsspec.core.url_to_fs(path)
            is_directory = fs.isdir(root)
    except (ValueError, ImportError, OSError):
        return open_source(path, split)  # raises with the reason
    if is_directory:
        files = sorted(file for file in fs.find(root) if file.lower().endswith(IMAGE_SUFFIXES))
        visible = [file for file in files if not HIDDEN.search(str(PurePosixPath(file).relative_to(root)))]
        if visible:
            return ImageFolder(fs, root, tuple(visible))
    return open_source(path, split)


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Image files in folders named after their classes; the name of an image is its path relative to the root."""

    fs: Any
    root: str
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        without_class = [file for file in self.files if len(self._relative(file).parts) < 2]
        if without_class:
            raise CorpusError(
                f"{without_class[0]}: not in a folder of a class; expected {self.root}/CLASS/IMAGE, one folder per "
                "class"
            )

    def identity(self) -> list[list[str]]:
        """Return name, size and modification time of each file."""
        described = [(str(self._relative(file)), self.fs.info(file)) for file in self.files]
        return [[name, str(info.get("size")), str(info.get("mtime", ""))] for name, info in described]

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Yield files in chunks, from position `start` on."""
        for first in range(start, len(self.files), FILES_PER_CHUNK):
            files = self.files[first : first + FILES_PER_CHUNK]
            relative = [self._relative(file) for file in files]
            batch = pa.record_batch(
                {
                    "doc_id": [str(name) for name in relative],
                    IMAGE_COLUMN: pa.array([self.fs.cat_file(file) for file in files], pa.binary()),
                    CLASS_COLUMN: [name.parts[0] for name in relative],
                }
            )
            select(batch.schema, self.root)
            yield ArrowChunk(first, self.root, first, batch)

    def approximate_length(self, n: int) -> int:
        """Return the number of images."""
        return len(self.files)

    def _relative(self, file: str) -> PurePosixPath:
        return PurePosixPath(file).relative_to(self.root)


def _encoded(image: Any, name: str) -> bytes | None:
    """Return the bytes of an image given as bytes, as a path, or as the struct that `datasets` writes."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if image is None or isinstance(image, bytes):
        return image
    path = str(image)
    if "://" not in path and not PurePosixPath(path).is_absolute():
        path = f"{name.rpartition('/')[0] or '.'}/{path}"
    if "://" not in path and not os.path.isfile(path):
        return b""  # not a regular file: reading a device or a pipe may not terminate
    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
    except (OSError, ValueError):
        return b""  # counted and reported as a broken image
    return content


def decode_image(encoded: bytes) -> Any | None:
    """Decode an image to upright RGB without transparency; return None if the bytes cannot be decoded.

    16-bit grey is scaled to 8 bits; the first frame of an animation is used.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    module = require("PIL.Image", extra="vision", feature="reading images")
    ops = require("PIL.ImageOps", extra="vision", feature="reading images")
    try:
        with module.open(io.BytesIO(encoded)) as image:
            image.load()
            upright = ops.exif_transpose(image)
            if upright.mode.startswith("I"):
                return module.fromarray((np.asarray(upright) // SCALE_16_TO_8_BITS).astype(np.uint8)).convert("RGB")
            if upright.mode == "F":
                return None  # floating point without a defined white level
            return upright.convert("RGBA").convert("RGB") if "transparency" in upright.info else upright.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, module.DecompressionBombError):
        return None


def usable_images(records: Iterable[ImageRecord], log: Skipped) -> Iterator[tuple[ImageRecord, Any]]:
    """Yield records with their decoded images; log those without a class or that cannot be decoded."""
    for record in records:
        name = record.row_id or record.source_id or record.location
        if record.encoded is None:
            log.add("records without an image", name)
        elif record.class_value is None:
            log.add("images without a class", name)
        elif (image := decode_image(record.encoded)) is None:
            log.add("broken images", name)
        else:
            yield record, image


def pixel_hash(image: Any) -> str:
    """Return a 64-bit hash of the pixels, independent of the file format."""
    content = f"{image.width} {image.height} ".encode() + image.tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def class_index(value: Label, classes: Sequence[str], n_classes: int, location: str) -> int:
    """Return the index of a class that is given by number or by name.

    Raises:
        CorpusError: a number outside the classes of the head, or an unknown name.
    """
    if isinstance(value, str) and value in classes:
        return classes.index(value)
    number = int(value) if isinstance(value, int | float) and float(value).is_integer() else None
    if number is None and isinstance(value, str) and not classes and value.isdecimal():
        number = int(value)
    if number is None or isinstance(value, bool) or not 0 <= number < n_classes:
        known = f" or one of {', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}" if classes else ""
        hint = "" if classes else "; set names with model.classifier.classes"
        raise CorpusError(f"{location}: class {value!r}, expected a number from 0 to {n_classes - 1}{known}{hint}")
    return number


BYTES_COLUMN: Final = "__image__"
INDEX_COLUMN: Final = "__class__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow(Row):
    """An image as a row: one supervised position, whose label is the class of the image."""

    encoded: bytes


@dataclass(frozen=True, slots=True)
class ImageRows(TokenRows):
    """Images with one token each, their class."""

    encoded: tuple[bytes, ...] = ()

    @property
    def class_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Return the class of every image."""
        return self.flat_ids.astype(np.int64)

    @classmethod
    def from_images(cls, encoded: Sequence[bytes], class_N: I32, table: pa.Table) -> Self:
        """Create rows from encoded images and their classes."""
        return cls(class_N, np.arange(len(class_N) + 1), table, encoded=tuple(encoded))


class ImageStore(RowStore):
    """The images of a corpus on disk; opening does not read them."""

    signed: ClassVar[Signed[StoreSummary]] = summary_of("images")
    seed: ClassVar[bytes] = b"grasp images 1"
    content: ClassVar[tuple[str, ...]] = (INDEX_COLUMN, BYTES_COLUMN)

    @classmethod
    def write_images(
        cls,
        directory: Path,
        settings: CorpusSettings,
        classifier: ClassifierSettings,
        n_classes: int,
        *,
        shard_rows: int,
        replace: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read, check and store the images, resuming an interrupted call; then open the store.

        Images that are missing, cannot be decoded, or have no class are skipped, counted and reported by name.

        Args:
            directory: directory of the store.
            settings: settings of the corpus.
            classifier: columns of images and classes, and names of the classes; empty if they have no names.
            n_classes: number of classes of the head.
            shard_rows: images per shard.
            replace: discard an unfinished store of other input.
            progress: receives the number of images of each finished shard.
        Raises:
            CorpusError: no usable image, a class that the head does not have, a duplicate name, or `directory` was
                started with another corpus.
        """
        source = open_images(settings.path, settings.split)
        columns = [classifier.image_column, classifier.class_column]
        return cls._write(
            directory,
            source=source,
            settings=settings,
            documents=lambda start: read_images(settings, classifier, source=source, start=start),
            rows=lambda records, _, skipped: image_rows(records, classifier.classes, n_classes, skipped),
            progress=progress,
            shard_rows=shard_rows,
            replace=replace,
            reader={"classes": {"names": ", ".join(classifier.classes), "count": n_classes, "columns": columns}},
            details={},
        )

    @staticmethod
    def _content_columns(rows: Sequence[Any]) -> dict[str, pa.Array]:
        return {
            BYTES_COLUMN: pa.array([row.encoded for row in rows], pa.binary()),
            INDEX_COLUMN: pa.array(np.concatenate([row.input_ids for row in rows])),
        }

    @staticmethod
    def _row_bytes(with_content: pa.Table) -> Iterator[bytes]:
        for line in with_content.to_pylist():
            name, content = line["row_id"].encode(), line[BYTES_COLUMN]
            sizes = (len(name), line[INDEX_COLUMN], len(content))
            yield b"".join(size.to_bytes(8, "little") for size in sizes) + name + content

    def _rows_from(self, with_content: pa.Table) -> ImageRows:
        class_N = with_content.column(INDEX_COLUMN).to_numpy()
        encoded = with_content.column(BYTES_COLUMN).to_pylist()
        return ImageRows.from_images(encoded, class_N, with_content.select(self._public_columns))

    def loss_counts(self, k: int | None = None) -> I64:
        """Return 1 for every image, (N,), or for those of shard k."""
        return np.ones(self.n_rows if k is None else len(self.table(k)), dtype=np.int64)


def image_rows(
    records: Iterator[ImageRecord], classes: Sequence[str], n_classes: int, log: Skipped
) -> Iterator[ImageRow]:
    """Yield rows for usable records; log the others.

    Raises:
        CorpusError: a class that the head does not have.
    """
    for record, image in usable_images(records, log):
        index, digest = class_index(record.class_value, classes, n_classes, record.location), pixel_hash(image)
        doc_id = record.source_id or f"{digest}-{record.index}"
        name = classes[index] if classes else str(index)
        built_in: dict[str, Label] = {CLASS_LABEL: name, HASH_LABEL: digest}
        # labels of the corpus keep their names, with a trailing underscore if a built-in label has the same name
        labels = {f"{label}_" if label in built_in else label: value for label, value in record.labels.items()}
        assert record.encoded is not None
        yield ImageRow(
            row_id=record.row_id or doc_id,
            doc_id=doc_id,
            document=record.index,
            n_tokens=1,
            next_cursor=Cursor(record.index + 1),
            input_ids=np.array([index], np.int32),
            encoded=record.encoded,
            snippet=f"{name}, {image.width} x {image.height} pixels",
            labels=labels | built_in,
            ignored=record.ignored,
        )
