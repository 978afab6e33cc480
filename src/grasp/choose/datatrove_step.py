"""A datatrove step that keeps the documents of a selection. Needs the extra `datatrove`.

from grasp.choose.datatrove_step import SelectedDocuments

pipeline = [ParquetReader("corpus", id_key="doc_id"), SelectedDocuments("kept.txt"), JsonlWriter("kept")]
"""

from typing import Any

import fsspec

from grasp.corpus.documents import content_hash
from grasp.errors import CorpusError, MissingExtraError

try:
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError as err:
    raise MissingExtraError(
        "filtering in a datatrove pipeline needs `datatrove`, which is not installed: "
        "pip install 'grasp-attribution[datatrove]'"
    ) from err

CONTENT = "content"


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
            self._names = _read_names(self.ids, self.by)
        return True if self._name_of(doc) in self._names else (False, "not_selected")

    def __getstate__(self) -> dict[str, Any]:
        # workers read the list themselves: it is not sent along with the pipeline
        return {**self.__dict__, "_names": None}

    def _name_of(self, doc: Document) -> str:
        if self.by == "id":
            return str(doc.id)
        if self.by == CONTENT:
            return content_hash(doc.text)
        if self.by not in doc.metadata:
            raise CorpusError(
                f"document {doc.id!r}: its metadata have no field {self.by!r}; they have {', '.join(doc.metadata)}"
            )
        return str(doc.metadata[self.by])


def _read_names(ids: str, by: str) -> frozenset[str]:
    try:
        with fsspec.open(ids, "rt", encoding="utf-8-sig") as file:
            names = (line.rstrip("\n") for line in file)
            # a made name is the hash of the text, a dash, and the position in the corpus
            return frozenset(name.rpartition("-")[0] if by == CONTENT else name for name in names)
    except (OSError, UnicodeDecodeError) as err:
        raise CorpusError(f"{ids}: cannot be read as a list of names: {' '.join(str(err).split())}") from err
