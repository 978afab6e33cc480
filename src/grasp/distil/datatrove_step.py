"""Datatrove steps: keep the documents of a selection, or score documents. They need the extra `datatrove`.

from grasp.distil.datatrove_step import ScoredDocuments, SelectedDocuments

pipeline = [ParquetReader("corpus", id_key="doc_id"), SelectedDocuments("kept.txt"), JsonlWriter("kept")]
pipeline = [JsonlReader("crawl"), ScoredDocuments("scorer", at_least=1.0), JsonlWriter("kept")]
"""

from typing import Any

import fsspec

from grasp.corpus.documents import content_hash
from grasp.distil.scorer import SCORE, UNFAMILIAR, Scorer
from grasp.errors import CorpusError, MissingExtraError
from grasp.extras import install_hint

try:
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError as err:
    raise MissingExtraError(
        f"filtering in a datatrove pipeline needs `datatrove`, which is not installed: {install_hint('datatrove')}"
    ) from err

CONTENT = "content"
AT_ONCE = 1_024  # documents that are scored together


class SelectedDocuments(BaseFilter):  # type: ignore[misc]
    """Keep the documents whose names are in a list that `grasp select --ids-out` wrote.

    Args:
        ids: the list, one name a line; a path or any fsspec URL. Each worker reads it once.
        by: `id`: the document's id; `content`: its text, for a corpus whose documents have no names of their own (of
            copies with the same text all are kept, if one was selected); else a field of its metadata.
        exclusion_writer: takes the documents that are dropped.
    """

    name = "selected by grasp"

    def __init__(self, ids: str, by: str = "id", exclusion_writer: Any = None) -> None:
        super().__init__(exclusion_writer)
        self.ids = str(ids)
        self.by = by
        self._names: frozenset[str] | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """KEPT or REMOVED, the latter counted as `not_selected`.

        Raises:
            CorpusError: the list cannot be read, or the document lacks the field.
        """
        if self._names is None:
            try:
                with fsspec.open(self.ids, "rt", encoding="utf-8-sig") as file:
                    names = (line.rstrip("\n") for line in file)
                    # a made name is the hash of the text, a dash, and the position in the corpus
                    self._names = frozenset(n.rpartition("-")[0] if self.by == CONTENT else n for n in names)
            except (OSError, UnicodeDecodeError) as err:
                why = " ".join(str(err).split())
                raise CorpusError(f"{self.ids}: cannot be read as a list of names: {why}") from err
        if self.by not in ("id", CONTENT) and self.by not in doc.metadata:
            raise CorpusError(
                f"document {doc.id!r}: its metadata have no field {self.by!r}; they have {', '.join(doc.metadata)}"
            )
        if self.by == CONTENT:
            name = content_hash(doc.text.encode())
        else:
            name = str(doc.id if self.by == "id" else doc.metadata[self.by])
        return True if name in self._names else (False, "not_selected")

    def __getstate__(self) -> dict[str, Any]:
        # workers read the list themselves: it is not sent along with the pipeline
        return {**self.__dict__, "_names": None}


class ScoredDocuments(BaseFilter):  # type: ignore[misc]
    """Write `score` and `unfamiliar` into the metadata of documents, and keep those that reach a score.

    Args:
        scorer: directory that `grasp distil` wrote. Each worker reads it once.
        at_least: documents below this score are dropped; None: none is. `grasp apply` prints which share reaches which.
        exclusion_writer: takes the documents that are dropped.
    """

    name = "scored by grasp"

    def __init__(self, scorer: str, at_least: float | None = None, exclusion_writer: Any = None) -> None:
        super().__init__(exclusion_writer, batch_size=AT_ONCE)
        self.scorer = str(scorer)
        self.at_least = at_least
        self._opened: Scorer | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """One document."""
        return self.filter_batch([doc])[0]

    def filter_batch(self, batch: list[Document]) -> list[bool | tuple[bool, str]]:
        """KEPT or REMOVED of each document, the latter counted as `low_score`.

        Raises:
            ArtifactError: there is no scorer, or it is damaged.
        """
        if self._opened is None:
            self._opened = Scorer.open(self.scorer)
        score_N, unfamiliar_N = self._opened.score([doc.text for doc in batch])
        for doc, score, unfamiliar in zip(batch, score_N.tolist(), unfamiliar_N.tolist(), strict=True):
            doc.metadata |= {SCORE: score, UNFAMILIAR: unfamiliar}
        least = -float("inf") if self.at_least is None else self.at_least
        return [True if score >= least else (False, "low_score") for score in score_N.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        # workers read the scorer themselves: it is not sent along with the pipeline
        return {**self.__dict__, "_opened": None}
