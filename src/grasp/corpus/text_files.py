"""Records of text files: JSON lines, a JSON array, and delimited text (CSV, TSV), compressed or not.

Files are read as streams: memory is one record, or a block of a JSON array. Start with `text_records`.
"""

import codecs
import csv
import io
import json
import lzma
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa

from grasp.errors import CorpusError

COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
DELIMITER = {"csv": ",", "tsv": "\t"}
FILE_TYPES = ("parquet", "jsonl", "json", *DELIMITER)  # of files that sources read
_USUAL_SUFFIX = {".ndjson": ".jsonl", ".pq": ".parquet", ".zstd": ".zst", ".gzip": ".gz"}  # by another one in use
MAX_LINE_BYTES = 256 << 20  # bytes of a JSON line, or of a record of another file, which is held in memory
_BLOCK_BYTES = 1 << 20
_SPACE = " \t\r\n"
_MAX_TOKEN_CHARS = 16  # characters of a word or an escape that a block may cut
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})", re.ASCII)  # 007 is text
_FLOAT = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_LEADING_ZERO = re.compile(r"-?0\d", re.ASCII)

Records = Iterator[tuple[int, Any]]


@lru_cache(maxsize=256)
def file_type(name: str) -> tuple[str, str]:
    """Return the usual suffix of a file in lower case without its dot, and the usual suffix of its compression.

    For example ("jsonl", ".gz") of `A.NDJSON.gzip`; either is empty if there is none. Compressed Parquet is no type.
    """
    suffixes = [_USUAL_SUFFIX.get(suffix, suffix) for suffix in PurePosixPath(name.lower()).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSION_BY_SUFFIX else ""
    kind = suffixes[-1][1:] if suffixes else ""
    return "" if kind == "parquet" and compression else kind, compression


def text_records(handle: BinaryIO, name: str, skip: int = 0) -> Records:
    """Yield the records of a file with their numbers from 1: the line, or the position in a JSON array.

    The first `skip` records are yielded as None.

    Raises:
        CorpusError: a record is damaged, or a compressed stream is; the message has file and line.
    """
    try:
        stream = open_decompressed(handle, name)
        if _first_bytes(stream).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise CorpusError(f"{name}: text is UTF-16, expected UTF-8; convert it: iconv -f utf-16 -t utf-8 FILE")
        if file_type(name)[0] in DELIMITER:  # values are text: `cell_value` gives their type
            yield from _read_delimited(stream, name, skip)
            return
        is_array = begins_with_bracket(stream)
        for k, (number, record) in enumerate((_read_json_array if is_array else _json_lines)(stream, name, skip)):
            if k >= skip and not isinstance(record, dict):
                location = f"{name}, record {number}" if is_array else f"{name}:{number}"
                got = type(record).__name__
                raise CorpusError(f"{location}: got {got}, expected a JSON object with the text in a field")
            yield number, record
    except (EOFError, OSError, lzma.LZMAError, pa.ArrowException) as err:
        raise CorpusError(f"{name}: damaged or truncated: {one_line(err)}; write or download it again") from err


def one_line(err: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(err).split()) or type(err).__name__


def open_decompressed(handle: BinaryIO, name: str) -> Any:
    """Return a stream of the decompressed content of a file, whose suffix names the compression."""
    codec = COMPRESSION_BY_SUFFIX.get(file_type(name)[1])
    if codec is None:
        return handle
    return io.BufferedReader(lzma.LZMAFile(handle) if codec == "xz" else pa.CompressedInputStream(handle, codec))


def begins_with_bracket(stream: Any) -> bool:
    """Return whether a file is a JSON array: it begins with a bracket, which no JSON line does."""
    return _first_bytes(stream).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _first_bytes(stream: Any) -> bytes:
    """Return the first bytes of a stream that is not read yet, without reading it."""
    if isinstance(stream, io.BufferedReader):
        return stream.peek(64)
    begin: bytes = stream.read(64)
    stream.seek(0)
    return begin


def _json_lines(stream: Any, name: str, skip: int = 0) -> Records:
    """Yield JSON objects with their line numbers, from 1; blank lines are ignored."""
    number = 0
    while content := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        location = f"{name}:{number}"
        record, fault = None, ""
        if not content.strip():
            continue
        if len(content) > MAX_LINE_BYTES:
            fault = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"
        elif skip > 0:
            skip -= 1
            yield number, None
            continue
        try:
            record = fault or json.loads(content.rstrip(b"\n").decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as err:
            is_begin = content.strip() == b"{"
            fault = "an object over several lines" if is_begin else f"not JSON: {one_line(err)}"
        if fault:
            raise CorpusError(f"{location}: {fault}; write one record per line, or an array")
        yield number, record


def _read_json_array(stream: Any, name: str, skip: int) -> Records:
    """Yield the objects of a JSON array with their positions, from 1; a block of the file is held in memory.

    Every iteration parses one record or separator at `at`, or reads another block if what is expected there may be
    incomplete. `expected` is "[" at the beginning, then "record" and "," in turn.
    """
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at = "", 0  # characters that were read, and the position of the first one that is not parsed
    number, block_bytes, ended = 0, _BLOCK_BYTES, False  # records so far, bytes to read next, end of the file
    expected = "["
    while True:
        at = len(text) - len(text[at:].lstrip(_SPACE)) if text[at : at + 1] in _SPACE else at
        location, is_incomplete = f"{name}, record {number + 1}", at == len(text)
        if not is_incomplete and expected == "record" and not (number == 0 and text[at] == "]"):
            try:
                record, at = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError) as err:
                reason = "nested too deeply"
                if isinstance(err, json.JSONDecodeError):
                    is_incomplete = "Unterminated" in err.msg or err.pos + _MAX_TOKEN_CHARS >= len(text)
                    reason = f"not JSON: {err.msg}"
                if not is_incomplete or len(text) - at > MAX_LINE_BYTES:
                    break
            else:
                number, expected, block_bytes = number + 1, ",", _BLOCK_BYTES
                yield number, None if number <= skip else record
                continue
        elif not is_incomplete:
            if expected != "[" and text[at] == "]":
                return
            if text[at] != expected:
                reason = f"got {text[at]!r} before it, expected {expected!r}"
                break
            at, expected = at + 1, "record"
            continue
        if ended:
            reason = f"the array ends early, after {number:,} whole records, which corpus.limit={number} reads"
            break
        content = stream.read(block_bytes)
        ended, block_bytes = not content, 2 * block_bytes  # so that a record longer than a block is parsed few times
        try:
            text, at = text[at:] + decode.decode(content, ended), 0
        except UnicodeDecodeError as err:
            reason = f"text is not UTF-8: {err}"
            break
    raise CorpusError(f"{location}: {reason}; fix the file")


def _read_delimited(stream: Any, name: str, skip: int) -> Records:
    """Yield the records of a CSV or TSV file, whose first line has the names; numbers are those of their last line."""
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = iter(lambda: stream.readline(MAX_LINE_BYTES), b"")
    texts = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(lines))
    reader = csv.reader(texts, delimiter=DELIMITER[file_type(name)[0]], strict=True)
    fault, n_uncounted = "", 0
    try:
        names = next(reader, [])
        if len(names) == 1 and ";" in names[0]:
            fault = "fields are separated by semicolons, expected commas, and decimal points in numbers"
        elif duplicates := sorted({column for column in names if names.count(column) > 1}):
            fault = f"has the column {duplicates[0]!r} more than once; expected the names of the columns here"
        for values in () if fault else reader:
            if not values:
                continue
            if len(values) != len(names):
                fault = f"has {len(values)} fields, expected {len(names)} as in the first line"
                break
            if skip > 0:
                skip -= 1
                yield reader.line_num, None
                continue
            yield reader.line_num, {column: value or None for column, value in zip(names, values, strict=True)}
    except csv.Error as err:
        fault = one_line(err)
    except UnicodeDecodeError as err:
        fault, n_uncounted = f"text is not UTF-8: {err}", 1  # the reader counts lines that it has received
    if fault:
        raise CorpusError(f"{name}:{reader.line_num + n_uncounted}: {fault}; fix the line, or quote its fields")


def cell_value(text: str) -> str | int | float:
    """Return a cell of delimited text as a number if it is written like one; `007` is text."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text) else text
