"""Pipeline steps for datatrove: filter documents by a selection or by score. Requires the extra `datatrove`.

from grasp.formats.datatrove_step import ScoredDocuments, SelectedDocuments

pipeline = [ParquetReader("corpus", id_key="doc_id"), SelectedDocuments("kept.txt"), JsonlWriter("kept")]
pipeline = [JsonlReader("crawl"), ScoredDocuments("scorer", at_least=1.0), JsonlWriter("kept")]
"""

import io
import re
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from grasp.corpus.documents import content_hash
from grasp.distil.scorer import SCORE, UNFAMILIAR, Scorer
from grasp.errors import CorpusError, MissingExtraError
from grasp.extras import install_hint
from grasp.results import FORMULA_PREFIX
from grasp.store.remote import remote_errors

try:
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError as err:
    raise MissingExtraError(
        f"filtering in a datatrove pipeline needs `datatrove`, which is not installed: {install_hint('datatrove')}"
    ) from err

CONTENT = "content"
BATCH_DOCUMENTS = 1_024  # documents per call of the scorer


class SelectedDocuments(BaseFilter):  # type: ignore[misc]
    """Keep the documents whose identifiers are in a list written by `grasp select --ids-out`.

    Args:
        ids: .csv or .parquet with a column `name`, or text with one identifier per line; a path or any fsspec URL.
            Each worker reads it once.
        by: what the identifiers are compared with: `id` (the document's id), `content` (a hash of its text, for a
            corpus without identifiers; all copies of a selected text are kept), or the name of a metadata field.
        exclusion_writer: datatrove writer that receives the removed documents.
    """

    name = "selected by grasp"

    def __init__(self, ids: str, by: str = "id", exclusion_writer: Any = None) -> None:
        super().__init__(exclusion_writer)
        self.ids = str(ids)
        self.by = by
        self._names: frozenset[str] | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document is kept; removed documents are counted as `not_selected`.

        Raises:
            CorpusError: the list cannot be read or has no column `name`, or the document lacks the field.
        """
        if self._names is None:
            try:
                with remote_errors(self.ids, CorpusError), fsspec.open(self.ids, "rb") as file:
                    names = _names_in(self.ids, file.read())
                # a generated identifier is the hash of the text, a dash, and the position in the corpus
                self._names = frozenset(n.rpartition("-")[0] if self.by == CONTENT else n for n in names)
            except (OSError, UnicodeDecodeError, pa.ArrowException) as err:
                reason = " ".join(str(err).split())
                raise CorpusError(f"{self.ids}: cannot be read as a list of identifiers: {reason}") from err
        if self.by not in ("id", CONTENT) and self.by not in doc.metadata:
            raise CorpusError(
                f"document {doc.id!r}: no metadata field {self.by!r}; available: {', '.join(doc.metadata)}"
            )
        if self.by == CONTENT:
            name = content_hash(doc.text.encode())
        else:
            name = str(doc.id if self.by == "id" else doc.metadata[self.by])
        return True if name in self._names else (False, "not_selected")

    def __getstate__(self) -> dict[str, Any]:
        # each worker reads the list itself, so it is not pickled with the pipeline
        return {**self.__dict__, "_names": None}


def _names_in(path: str, content: bytes) -> list[str]:
    """Return the identifiers in a file that `grasp select --ids-out` wrote."""
    if path.endswith((".json", ".jsonl", ".yaml")):
        raise CorpusError(f"{path}: expected a list of grasp select --ids-out: .csv, .parquet, or one id per line")
    if not path.endswith((".csv", ".parquet")):
        return [line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig")]
    if path.endswith(".parquet"):
        table = pq.read_table(io.BytesIO(content))
    else:
        as_text = pacsv.ConvertOptions(column_types={"name": pa.string()})
        multiline = pacsv.ParseOptions(newlines_in_values=True)
        table = pacsv.read_csv(io.BytesIO(content), parse_options=multiline, convert_options=as_text)
    if "name" not in table.column_names:
        raise CorpusError(
            f"{path}: got the columns {', '.join(table.column_names)}, expected `name`; pass the file of grasp select "
            "--ids-out, as that of --out lists rows"
        )
    names: list[str] = table["name"].cast(pa.string()).to_pylist()
    if path.endswith(".parquet"):
        return names
    # in CSV an apostrophe precedes what a spreadsheet would take for a formula
    return [name[1:] if name[:1] == "'" and re.match(FORMULA_PREFIX, name[1:]) else name for name in names]


class ScoredDocuments(BaseFilter):  # type: ignore[misc]
    """Write `score` and `unfamiliar` into the metadata of documents, and keep those above a score threshold.

    Args:
        scorer: directory written by `grasp distil`. Each worker reads it once.
        at_least: documents below this score are removed; None keeps all. `grasp apply` prints thresholds.
        exclusion_writer: datatrove writer that receives the removed documents.
    """

    name = "scored by grasp"

    def __init__(self, scorer: str, at_least: float | None = None, exclusion_writer: Any = None) -> None:
        super().__init__(exclusion_writer, batch_size=BATCH_DOCUMENTS)
        self.scorer = str(scorer)
        self.at_least = at_least
        self._loaded: Scorer | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Score a single document."""
        return self.filter_batch([doc])[0]

    def filter_batch(self, batch: list[Document]) -> list[bool | tuple[bool, str]]:
        """Return whether each document is kept; removed documents are counted as `low_score`.

        Raises:
            ArtifactError: the scorer does not exist or is damaged.
        """
        if self._loaded is None:
            self._loaded = Scorer.open(self.scorer)
        score_N, unfamiliar_N = self._loaded.score([doc.text for doc in batch])
        for doc, score, unfamiliar in zip(batch, score_N.tolist(), unfamiliar_N.tolist(), strict=True):
            doc.metadata |= {SCORE: score, UNFAMILIAR: unfamiliar}
        threshold = -float("inf") if self.at_least is None else self.at_least
        return [True if score >= threshold else (False, "low_score") for score in score_N.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        # each worker reads the scorer itself, so it is not pickled with the pipeline
        return {**self.__dict__, "_loaded": None}
