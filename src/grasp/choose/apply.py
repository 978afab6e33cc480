"""Score any corpus with a scorer, at the speed at which its texts can be read. Nothing passes through a model.

The corpus is cut into lanes, which several processes share: a range of rows of a Parquet file, a whole file of JSON
lines. A lane is written part by part; after a kill what is written stays, and the rest goes on behind it. Memory is a
part's scores and a batch of texts for each process, however long the corpus is.
"""

import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.choose.amounts import parse_budget
from grasp.choose.export import MANIFEST, write_documents
from grasp.choose.ngrams import as_bytes
from grasp.choose.scorer import SCORE, UNFAMILIAR, UNFAMILIAR_SHARE, Scorer, percents, with_interval
from grasp.corpus.conversations import Form, form_of
from grasp.corpus.documents import check_id_columns, id_columns
from grasp.corpus.labels import is_text, label_text
from grasp.corpus.sources import (
    BATCH_ROWS,
    PARQUET,
    ArrowChunk,
    DatasetSource,
    FileSource,
    JsonRecord,
    Source,
    open_source,
    parquet_rows,
)
from grasp.errors import CorpusError, EngineError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.files import check_place, differences, own_directory, remove_parts, write_whole, written_aside
from grasp.locks import DirectoryLock
from grasp.results import Result
from grasp.settings import CorpusSettings
from grasp.text import parse_json
from grasp.yaml_files import read_yaml

MARKER = ".grasp-scores"
PARTS = "scores-*.parquet"
RUN = "_apply.json"  # Parquet readers pass over names that begin with an underscore
KEPT = "kept"
PART_DOCUMENTS = 250_000
BATCH_DOCUMENTS = 4_096
BATCH_BYTES = 8 << 20
LAST = b"last of its lane"
CUTS = (0.01, 0.05, 0.1, 0.2, 0.5)
TOO_STRANGE = 0.05
BEAT = 0.5  # seconds between looks at what the processes did

Count = Callable[[int], None]


@dataclass(frozen=True, eq=False, repr=False)
class Applied(Result):
    """What was scored; the table has the score that so large a share of the documents reaches."""

    path: Path | None = None
    documents: int = 0


@dataclass(frozen=True, slots=True)
class _Lane:
    """Consecutive records that one process reads: of one file or of a table, from `start` to `stop` or to the end."""

    number: int
    file: int | None  # of the source; none: the source is one table
    start: int
    stop: int | None

    def part(self, k: int) -> str:
        """Name of the k-th part of it."""
        return f"scores-{self.number:05d}-{k:04d}.parquet"


def apply(
    scorer: Scorer | Path | str,
    corpus: str,
    out: Path | str,
    *,
    keep: str | float | None = None,
    split: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Applied:
    """Score every document of a corpus, and write the scores beside the documents' names; cut off, it goes on.

    Args:
        corpus: file, directory, URL or hub name, as `build` reads it.
        out: directory of Parquet parts: file, position (row of it, or line from 1), the corpus's row_id and doc_id,
            `score` (standard deviations of relevance, higher is better) and `unfamiliar`.
        keep: copy the best documents as well, to `kept` in `out`: 20%, or a number of them.
        split, text_column, id_column: as in `build`.
        workers: processes; one file of JSON lines is read by one.
    Raises:
        SettingsError: `out` is something else, or was begun with another scorer or corpus.
        CorpusError: the corpus cannot be read, or has no text.
        ArtifactError: the scorer is none, or damaged.
    """
    out, progress = Path(out), progress or Silent()
    reads = {"is the scorer": None if isinstance(scorer, Scorer) else scorer, "is the corpus": str(corpus)}
    scorer = scorer if isinstance(scorer, Scorer) else Scorer.open(scorer)
    settings = CorpusSettings(path=str(corpus), split=split, text_column=text_column, row_id_column=id_column)
    budget = None if keep is None else parse_budget(keep)
    if budget is not None and budget.unit == "tokens":
        raise SettingsError(f"keep: got {keep}, but a scorer counts no tokens; give 20% or a number of documents")
    if workers < 1:
        raise SettingsError(f"workers: got {workers}, expected at least 1")
    source = open_source(settings.path, settings.split)
    lanes = _lanes(source)
    own_directory(out, MARKER, lambda _: False, reads)
    with DirectoryLock.acquire(out, MARKER):
        copies = budget is not None and not _kept_already(out / KEPT, str(keep))
        _same_as_before(out, scorer, source, settings)
        remove_parts(out)
        _score_all(lanes, scorer, settings, out, workers, progress)
        documents, unfamiliar = _counted(out)
        notes = _notes(scorer, unfamiliar / max(1, documents))
        kept = 0 if budget is None else budget.of(documents, up=True)
        ranks = [math.ceil(share * documents) for share in CUTS]
        *least, edge = _of_rank(out, documents, [*ranks, kept])
        if copies:
            progress.stage("copying the best", rows=None, tokens=None)
            asked = {"chosen by": "grasp apply", "keep": str(keep)}
            export = write_documents(settings, _Best(out, edge, kept), 0, out / KEPT, "parquet", asked)
            notes.insert(0, f"{out / KEPT}: the best {export.records:,} documents, whole and as they were")
    table = pa.table({"best": [f"{share:.0%}" for share in CUTS], "score at least": pa.array(least, pa.float64())})
    headline = f"{out}: {documents:,} documents scored for {scorer.card.target}"
    return Applied(table, headline, tuple(notes), path=out, documents=documents)


def _notes(scorer: Scorer, share: float) -> list[str]:
    """What to think of these scores: is the corpus like the one that was learned from, and how good is the scorer?"""
    strange = f"{share:.1%} of the documents are unlike the rows that it learned from (of these {UNFAMILIAR_SHARE:.0%})"
    if share > TOO_STRANGE:
        strange += "; their scores are guesses: build an artifact of some of them, and distil from that"
    quality = scorer.card.quality
    return [
        strange,
        f"on held-out rows of its own corpus its Spearman with relevance is {with_interval(quality.spearman)}, and its "
        f" best 20% have {percents(quality.gain)} of the relevance of the best 20%",
    ]


def _lanes(source: Source) -> list[_Lane]:
    """The records of a source in order, cut where they can be read from."""
    pieces: list[tuple[int | None, int, int | None]] = []
    if isinstance(source, FileSource):
        for k, (name, path) in enumerate(source.files):
            if path.endswith(PARQUET):
                pieces += [(k, start, stop) for start, stop in _ranges(parquet_rows(source.fs, path, name))]
            else:
                pieces.append((k, 0, None))
    else:
        assert isinstance(source, DatasetSource)  # a path opens as nothing else
        pieces = [(None, start, stop) for start, stop in _ranges(source.table.num_rows)]
    return [_Lane(number, *piece) for number, piece in enumerate(pieces)]


def _ranges(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, PART_DOCUMENTS):
        yield start, min(rows, start + PART_DOCUMENTS)


def _kept_already(place: Path, keep: str) -> bool:
    """Whether the best were copied before; any other directory is in the way."""
    if (place / MANIFEST).exists() and read_yaml(place / MANIFEST).get("keep") == keep:
        return True
    check_place(place)
    return False


def _same_as_before(out: Path, scorer: Scorer, source: Source, settings: CorpusSettings) -> None:
    """Write down what is scored by what, or see that it is what was begun here."""
    now = {
        "scorer": scorer.card.weights.checksum,
        "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
        "settings": settings.model_dump(mode="json", exclude={"path"}),
    }
    path = out / RUN
    if not path.exists() or not any(out.glob(PARTS)):  # a start that scored nothing binds nobody
        write_whole(path, (json.dumps(now, indent=1) + "\n").encode())
    try:
        then = parse_json(path.read_bytes())
    except ValueError as err:
        raise SettingsError(f"{path}: damaged: {err}; delete {out} and score again") from err
    if changed := list(differences(then, now)):
        raise SettingsError(f"{out}: was begun with another input: {'; '.join(changed[:3])}; choose another --out")


# ----------------------------------------------------------------------------------------------------- lanes, processes


def _score_all(
    lanes: Sequence[_Lane], scorer: Scorer, settings: CorpusSettings, out: Path, workers: int, progress: Progress
) -> None:
    """Write every part that is missing."""
    progress.stage("scoring", rows=None if any(one.stop is None for one in lanes) else _rows_of(lanes), tokens=None)
    if workers == 1:
        for lane in lanes:
            _score_lane(lane, scorer, settings, out, lambda n: progress.advance(n, 0))
        return
    context = multiprocessing.get_context("spawn")  # threads of the caller do not survive a fork
    done, told = context.Value("q", 0), 0
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(done, scorer)) as pool:
        left = {pool.submit(_in_process, lane, settings, out) for lane in lanes}
        try:
            while left:
                ended, left = wait(left, timeout=BEAT, return_when=FIRST_EXCEPTION)
                for one in ended:
                    one.result()
                progress.advance(done.value - told, 0)
                told = done.value
        except BrokenProcessPool as err:
            raise EngineError(
                f"{out}: a process was killed; if memory ran out, take fewer --workers; the same command goes on "
                "behind what is written"
            ) from err
        finally:
            pool.shutdown(cancel_futures=True)


def _rows_of(lanes: Sequence[_Lane]) -> int:
    return sum((lane.stop or 0) - lane.start for lane in lanes)


_given: tuple[Any, Scorer] | None = None  # documents that all processes have scored, and by what


def _begin(done: Any, scorer: Scorer) -> None:
    global _given  # noqa: PLW0603 - a pool hands shared memory on in no other way
    _given = done, scorer


def _in_process(lane: _Lane, settings: CorpusSettings, out: Path) -> None:
    assert _given is not None
    done, scorer = _given

    def count(documents: int) -> None:
        with done.get_lock():
            done.value += documents

    _score_lane(lane, scorer, settings, out, count)


def _score_lane(lane: _Lane, scorer: Scorer, settings: CorpusSettings, out: Path, count: Count) -> None:
    """Write the parts of a lane that are missing."""
    start, k = lane.start, 0
    while (out / lane.part(k)).exists():
        table = _read(out / lane.part(k))
        start, k = start + len(table), k + 1
        count(len(table))
        if LAST in (table.schema.metadata or {}):
            return
    source = open_source(settings.path, settings.split)
    if isinstance(source, FileSource) and lane.file is not None:
        source = FileSource(source.fs, [source.files[lane.file]], source.root)
    waiting: list[pa.Table] = []
    for texts, table in _batches(source, settings, start, lane.stop):
        score_N, unfamiliar_N = scorer.score(texts)
        waiting.append(table.append_column(SCORE, pa.array(score_N)).append_column(UNFAMILIAR, pa.array(unfamiliar_N)))
        count(len(table))
        if sum(map(len, waiting)) >= PART_DOCUMENTS:
            whole = pa.concat_tables(waiting)
            _write(out / lane.part(k), whole.slice(0, PART_DOCUMENTS), last=False)
            waiting, k = [whole.slice(PART_DOCUMENTS)], k + 1
    _write(out / lane.part(k), pa.concat_tables(waiting) if waiting else _EMPTY, last=True)


_EMPTY = pa.table(
    {
        "file": pa.array([], pa.string()),
        "position": pa.array([], pa.int64()),
        "row_id": pa.array([], pa.string()),
        "doc_id": pa.array([], pa.string()),
        SCORE: pa.array([], pa.float32()),
        UNFAMILIAR: pa.array([], pa.bool_()),
    }
)


def _write(path: Path, table: pa.Table, *, last: bool) -> None:
    marked = table.replace_schema_metadata({LAST: b"yes"} if last else None)
    with written_aside(path) as part:
        pq.write_table(marked, part, compression="zstd", write_page_checksum=True)


def _read(path: Path, columns: Sequence[str] = _EMPTY.schema.names) -> pa.Table:
    """A part, or columns of it, as it was written.

    Raises:
        SettingsError: it is damaged, or something else.
    """
    try:
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
        return table.cast(_EMPTY.schema).select(columns).replace_schema_metadata(table.schema.metadata)
    except (pa.ArrowException, OSError, ValueError) as err:
        raise SettingsError(f"{path}: damaged: {' '.join(str(err).split())}; delete it and score again") from err


# --------------------------------------------------------------------------------------------------- documents as texts


def _batches(
    source: Source, settings: CorpusSettings, start: int, stop: int | None
) -> Iterator[tuple[pa.LargeBinaryArray, pa.Table]]:
    """Texts from position `start` on, some thousands at a time, and what names them: file, position and ids."""
    texts: list[pa.Array] = []
    tables: list[pa.Table] = []
    size = 0
    for text, table in _chunks(source, settings, start, stop):
        texts.append(text)
        tables.append(table)
        size += text.nbytes
        if size >= BATCH_BYTES or sum(map(len, tables)) >= BATCH_DOCUMENTS:
            yield pa.concat_arrays(texts), pa.concat_tables(tables)
            texts, tables, size = [], [], 0
    if texts:
        yield pa.concat_arrays(texts), pa.concat_tables(tables)


def _chunks(
    source: Source, settings: CorpusSettings, start: int, stop: int | None
) -> Iterator[tuple[pa.LargeBinaryArray, pa.Table]]:
    forms: dict[str, Form] = {}

    def select(schema: pa.Schema, name: str) -> list[str]:
        check_id_columns(settings, schema.names, name)
        form = forms[name] = form_of(schema.names, settings, name)
        if form.columns[0] not in schema.names:
            raise CorpusError(f"{name}: has token ids and no text, and a scorer reads text; name a corpus of text")
        needed = {*form.columns, *id_columns(settings, schema.names)}
        return [column for column in schema.names if column in needed]

    lines: list[JsonRecord] = []
    for chunk in source.chunks(start, select):
        if stop is not None and chunk.index >= stop:
            break
        if isinstance(chunk, ArrowChunk):
            yield _of_table(chunk, forms[chunk.name], settings, stop)
            continue
        lines.append(chunk)
        if len(lines) == BATCH_ROWS:
            yield _of_lines(lines, settings)
            lines = []
    if lines:
        yield _of_lines(lines, settings)


def _of_table(
    chunk: ArrowChunk, form: Form, settings: CorpusSettings, stop: int | None
) -> tuple[pa.LargeBinaryArray, pa.Table]:
    batch = chunk.batch if stop is None else chunk.batch.slice(0, stop - chunk.index)
    names = batch.schema.names
    column = batch.column(form.columns[0])
    if form.kind == "text" and is_text(column.type):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        texts = pc.fill_null(column.cast(pa.large_string()).cast(pa.large_binary()), b"")
    else:
        where = f"{chunk.name}, rows from {chunk.first} on"
        texts = as_bytes([_said(form, record, where) for record in batch.to_pylist()])
    position = np.arange(chunk.first, chunk.first + batch.num_rows)
    ids = [
        [None] * batch.num_rows
        if name not in names
        else [label_text(value) for value in batch.column(name).to_pylist()]
        for name in id_columns(settings, names)
    ]
    return texts, _named(chunk.name, position, *ids)


def _of_lines(lines: Sequence[JsonRecord], settings: CorpusSettings) -> tuple[pa.LargeBinaryArray, pa.Table]:
    texts, ids = [], []
    for line in lines:
        where = f"{line.name}:{line.line}"
        check_id_columns(settings, list(line.record), where)
        texts.append(_said(form_of(line.record.keys(), settings, where), line.record, where))
        ids.append([label_text(line.record.get(name or "")) for name in id_columns(settings, line.record)])
    rows, documents = zip(*ids, strict=True)
    return as_bytes(texts), _named(lines[0].name, np.array([line.line for line in lines]), rows, documents)


def _said(form: Form, record: Mapping[str, Any], where: str) -> str:
    """A text, or the turns of a conversation one after the other."""
    content = form.read(record, where)
    return (content.text or "") if content.conversation is None else str(content.conversation)


def _named(
    file: str, position: NDArray[np.int64], row_ids: Sequence[str | None], doc_ids: Sequence[str | None]
) -> pa.Table:
    columns = [pa.array([file] * len(position)), pa.array(position), row_ids, doc_ids]
    return pa.table(columns, schema=pa.schema(list(_EMPTY.schema)[:4]))


# ---------------------------------------------------------------------------------------------------- what was written


def _parts(out: Path) -> list[Path]:
    """All parts, in the order of the corpus."""
    return sorted(out.glob(PARTS), key=lambda path: [int(number) for number in path.stem.split("-")[1:]])


def _scores(out: Path) -> Iterator[NDArray[np.float32]]:
    """The scores of all documents in the order of the corpus, some at a time."""
    for path in _parts(out):
        yield _read(path, [SCORE])[SCORE].to_numpy()


def _counted(out: Path) -> tuple[int, int]:
    """Documents, and how many of them are unlike what was learned from."""
    documents = unfamiliar = 0
    for path in _parts(out):
        marks = _read(path, [UNFAMILIAR])[UNFAMILIAR]
        documents += len(marks)
        unfamiliar += pc.sum(marks).as_py() or 0
    return documents, unfamiliar


def _of_rank(out: Path, documents: int, ranks: Sequence[int]) -> list[float | None]:
    """The first, second, ... best score; None for rank 0. They are put in order on disk, so any number will do."""
    if not any(ranks):
        return [None for _ in ranks]
    with tempfile.TemporaryFile(dir=out) as file:
        for score_n in _scores(out):
            file.write(score_n.tobytes())  # a full disk is an error here; in a map it would end the process
        file.flush()
        score_M = np.memmap(file, np.float32, "r+", shape=(documents,))
        score_M.partition(sorted({documents - rank for rank in ranks if rank}))
        return [float(score_M[documents - rank]) if rank else None for rank in ranks]


class _Best:
    """Whether documents are among the best; of equal ones the first are. Asked in the order of the corpus."""

    def __init__(self, out: Path, edge: float | None, count: int) -> None:
        self._edge = np.inf if edge is None else edge
        self._equal = count - sum(int((score_n > self._edge).sum()) for score_n in _scores(out))
        self._coming = _scores(out)
        self._waiting = np.empty(0, np.float32)

    def __call__(self, start: int, stop: int) -> NDArray[np.bool_]:
        while len(self._waiting) < stop - start and (more := next(self._coming, None)) is not None:
            self._waiting = np.concatenate([self._waiting, more])
        score_n, self._waiting = self._waiting[: stop - start], self._waiting[stop - start :]
        equal_n = score_n == self._edge
        kept_n = (score_n > self._edge) | (equal_n & (np.cumsum(equal_n) <= self._equal))
        self._equal -= int((equal_n & kept_n).sum())
        return np.asarray(kept_n)
