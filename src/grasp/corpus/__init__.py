"""Text or token ids become rows: readers, packing, label columns, and a store on disk that can be resumed."""

from grasp.corpus.documents import Document, Tokenizer, read_documents
from grasp.corpus.labels import Label
from grasp.corpus.packing import Skipped
from grasp.corpus.passages import PassageCounts, normalised, read_passages, write_passages
from grasp.corpus.store import RowShard, RowStore

__all__ = [
    "Document",
    "Label",
    "PassageCounts",
    "RowShard",
    "RowStore",
    "Skipped",
    "Tokenizer",
    "normalised",
    "read_documents",
    "read_passages",
    "write_passages",
]
