"""Query overlap: share of a unit's distinct words that occur in a row, without weights by rarity.

Start with `Overlap`.

Shape letters: n rows of a block, E units, W words of any unit.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from grasp.baselines.bm25 import COVERS, check_queries, query_text, words
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.methods.contract import Account, MethodInputs, NoSettings, Scores


class Overlap(BlockMethod[NoSettings]):
    """Share of the unit's distinct words that the row has.

    Source: the GRASP paper's retrieval table.
    As published: listed as "query overlap", without a definition.
    Deviation: none known, since the share is a definition of our own. Words are those of bm25: no stop words, rows
    decoded from their tokens.
    """

    requires = frozenset({"tokens"})
    dtype = "float16"

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work, part
        queries = [set(words(query_text(unit))) for unit in inputs.units.units]
        check_queries(self.name, queries, inputs.units.units)
        n_empty = sum(not query for query in queries)
        account = Account(
            covers=COVERS,
            counts={"units without a query word: 0 for every row": n_empty} if n_empty else {},
        )
        return RowScorer(_Overlaps(inputs, queries), account)


class _Overlaps:
    """Shares of the words of each unit that rows have."""

    def __init__(self, inputs: MethodInputs, queries: Sequence[set[str]]) -> None:
        self._inputs = inputs
        self._word_id = {word: w for w, word in enumerate(sorted(set().union(*queries)))}
        self._share_WE = self._matrix([[self._word_id[word] for word in query] for query in queries]).T.tocsr()
        # a unit without words has an empty column: 0 for every row
        self._size_E = np.maximum(1, np.array([len(query) for query in queries]))

    def __call__(self, start: int, stop: int) -> Scores:
        texts = self._inputs.texts(start, stop)
        known = [[self._word_id[word] for word in set(words(text)) & self._word_id.keys()] for text in texts]
        shared_nE = (self._matrix(known) @ self._share_WE).toarray()
        return np.asarray(shared_nE / self._size_E)

    def _matrix(self, word_lists: Sequence[Sequence[int]]) -> csr_array:
        """Return a 0/1 matrix with one row per list of words."""
        indptr = np.concatenate([[0], np.cumsum([len(word_ids) for word_ids in word_lists])]).astype(np.int64)
        indices = np.array([w for word_ids in word_lists for w in word_ids], dtype=np.int64)
        return csr_array((np.ones(len(indices)), indices, indptr), shape=(len(word_lists), len(self._word_id)))
