"""A stream of labelled images: encoded bytes, a class, a stable name, and labels.

Images come from Parquet or a `datasets` table (bytes, or paths, or the struct of both that `datasets` writes), from
JSONL with paths, or from a directory with one folder a class.
"""

import hashlib
import io
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

import fsspec
import numpy as np
import pyarrow as pa

from grasp.corpus.labels import Label, is_text
from grasp.corpus.packing import SkipLog
from grasp.corpus.records import check_id_columns, names_and_labels, read_records
from grasp.corpus.sources import ArrowChunk, Chunk, Selector, Source, open_source
from grasp.errors import CorpusError
from grasp.extras import require
from grasp.settings import CorpusSettings

IMAGE_FILES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
IMAGE_COLUMN: Final = "image"
CLASS_COLUMN: Final = "label"
FILES_AT_ONCE: Final = 64
SIXTEEN_BITS: Final = 257  # 65535 / 255


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image of a corpus as it was found; `encoded` is None where there is none."""

    index: int  # position in the corpus, from 0, skipped images included
    where: str  # file and line or row, for messages
    given_id: str | None
    row_id: str | None
    encoded: bytes | None
    class_value: Label
    labels: Mapping[str, Label]
    ignored: tuple[str, ...] = field(default=(), repr=False)


def read_images(settings: CorpusSettings, *, start: int = 0, fetch: bool = True) -> Iterator[ImageRecord]:
    """Stream the images of a corpus from position `start` on, files sorted by name.

    Args:
        fetch: images that are named by a URL are fetched; or there is nothing of them.
    Raises:
        CorpusError: at the call, when there is nothing to read; while streaming, when a file is damaged or lacks
            the column of images or of classes.
    """
    return images_of(open_images(settings.path, settings.split), settings, start=start, fetch=fetch)


def images_of(source: Source, settings: CorpusSettings, *, start: int = 0, fetch: bool = True) -> Iterator[ImageRecord]:
    """Images of a source that is open, from position `start` to the limit that the settings give."""
    image = settings.image_column or IMAGE_COLUMN

    def content(columns: Mapping[str, pa.DataType | None], where: str) -> tuple[str]:
        _check_columns(columns, settings, where)
        return (image,)

    for record in read_records(source, settings, content, start):
        row_id, doc_id, labels = names_and_labels(record, settings)
        yield ImageRecord(
            index=record.index,
            where=record.where,
            given_id=doc_id,
            row_id=row_id,
            encoded=_encoded(record.values.get(image), record.name, fetch),
            class_value=record.values.get(settings.class_column or CLASS_COLUMN),
            labels=labels,
            ignored=record.ignored,
        )


def _check_columns(columns: Mapping[str, pa.DataType | None], settings: CorpusSettings, where: str) -> None:
    """The columns of images and of classes must be there, and images be of a type that can be read."""
    image = settings.image_column or IMAGE_COLUMN
    wanted = (("images", "image_column", image), ("classes", "class_column", settings.class_column or CLASS_COLUMN))
    for what, setting, column in wanted:
        if column not in columns:
            raise CorpusError(
                f"{where}: no column {column!r} of {what}; columns found: {', '.join(columns) or 'none'}. Set "
                f"corpus.{setting} to the one that holds the {what}"
            )
    check_id_columns(settings, list(columns), where)
    kind = columns[image]
    if kind is not None and not (_is_binary(kind) or is_text(kind) or _is_struct(kind)):
        raise CorpusError(
            f"{where}: image column {image!r} holds {kind}, expected encoded images (binary), paths (text) or "
            "a struct of bytes and path"
        )


def open_images(path: str, split: str | None = None) -> Source:
    """A directory with one folder of image files a class, or anything that `open_source` opens."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        is_directory = fs.isdir(root)
    except (ValueError, ImportError, OSError):
        return open_source(path, split)  # which says what is wrong
    if is_directory:
        found = sorted(file for file in fs.find(root) if _is_image(PurePosixPath(file).relative_to(root)))
        if found:
            return ImageFolder(fs, root, tuple(found))
    return open_source(path, split)


def _is_image(relative: PurePosixPath) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    return not hidden and relative.suffix.lower() in IMAGE_FILES


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Image files in folders that are named after their classes; the name of an image is its path in the root."""

    fs: Any
    root: str
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        loose = [file for file in self.files if len(self._relative(file).parts) < 2]
        if loose:
            raise CorpusError(
                f"{loose[0]}: lies in no folder of a class; expected {self.root}/CLASS/IMAGE, a folder for each class"
            )

    def identity(self) -> list[list[str]]:
        """Name, size and time of change of each file."""
        described = [(str(self._relative(file)), self.fs.info(file)) for file in self.files]
        return [[name, str(info.get("size")), str(info.get("mtime", ""))] for name, info in described]

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Files from position `start` on, some at a time."""
        for first in range(start, len(self.files), FILES_AT_ONCE):
            files = self.files[first : first + FILES_AT_ONCE]
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

    def _relative(self, file: str) -> PurePosixPath:
        return PurePosixPath(file).relative_to(self.root)


def _encoded(image: Any, name: str, fetch: bool) -> bytes | None:
    """Bytes of an image that is given as such, by its path, or as the struct that `datasets` writes."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if image is None or isinstance(image, bytes):
        return image
    path = str(image)
    if "://" not in path and not PurePosixPath(path).is_absolute():
        path = f"{name.rpartition('/')[0] or '.'}/{path}"
    if not (fetch if "://" in path else os.path.isfile(path)):
        return b""  # a device or a pipe would not end
    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
    except (OSError, ValueError):
        return b""  # no image can be made of it: named and counted as a broken one
    return content


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]


def decode_image(encoded: bytes) -> Any | None:
    """An image in RGB, upright, transparency on black left out; None where no image can be made of the bytes.

    Greys of 16 bits are scaled to 8; of an animation the first picture is taken.

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
                return module.fromarray((np.asarray(upright) // SIXTEEN_BITS).astype(np.uint8)).convert("RGB")
            if upright.mode == "F":
                return None  # its white is anywhere
            return upright.convert("RGBA").convert("RGB") if "transparency" in upright.info else upright.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, module.DecompressionBombError):
        return None


def usable(records: Iterable[ImageRecord], log: SkipLog) -> Iterator[tuple[ImageRecord, Any]]:
    """Records with a class and their decoded images; what has no class or cannot be decoded goes to the log."""
    for record in records:
        name = record.row_id or record.given_id or record.where
        if record.encoded is None:
            log.add("no_image", name)
        elif record.class_value is None:
            log.add("no_class", name)
        elif (image := decode_image(record.encoded)) is None:
            log.add("broken_image", name)
        else:
            yield record, image


def pixel_hash(image: Any) -> str:
    """64 bits of a hash of the pixels: the same for the same picture in whatever file."""
    content = f"{image.width} {image.height} ".encode() + image.tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def png(image: Any, largest: int) -> bytes:
    """A decoded image encoded again, its longer side `largest` pixels at most: of its file only colours are left."""
    out = io.BytesIO()
    small = image.copy()
    small.thumbnail((largest, largest))
    small.save(out, "PNG")
    return out.getvalue()


def class_index(value: Label, classes: Sequence[str], n_classes: int, where: str) -> int:
    """Number of a class that is given by number or by name.

    Raises:
        CorpusError: a number outside the head's classes, or a name that is none of them.
    """
    if isinstance(value, str) and value in classes:
        return classes.index(value)
    number = int(value) if isinstance(value, int | float) and float(value).is_integer() else None
    if number is None and isinstance(value, str) and not classes and value.isdecimal():
        number = int(value)
    if number is None or isinstance(value, bool) or not 0 <= number < n_classes:
        known = f" or one of {', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}" if classes else ""
        hint = "" if classes else "; give names with model.classifier.classes"
        raise CorpusError(f"{where}: class {value!r}, expected a number from 0 to {n_classes - 1}{known}{hint}")
    return number
