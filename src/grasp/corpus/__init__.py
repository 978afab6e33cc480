"""Read a corpus (text, chats, token ids) and pack it into rows: readers, labels, tokenisation, a store on disk.

In: files, a `datasets` directory, a table in memory. Out: a resumable store of rows, readable by position. Read
`documents` first (a stream of records), then `encoding` (tokens and loss masks), `packing` (rows) and `row_store`.
"""

from grasp.corpus.documents import Document, read_documents
from grasp.corpus.encoding import Tokenizer
from grasp.corpus.labels import Label
from grasp.corpus.packing import Skipped
from grasp.corpus.row_store import RowStore, TokenRows

__all__ = [
    "Document",
    "Label",
    "RowStore",
    "Skipped",
    "TokenRows",
    "Tokenizer",
    "read_documents",
]
