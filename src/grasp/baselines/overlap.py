"""Query overlap: share of a unit's distinct words that occur in a row, without weights by rarity.

Start with `Overlap`.

Shape letters: n rows of a block, E units, W words of any unit.
"""

from collections.abc import Sequence, Set
from itertools import chain
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
        word_id = {word: w for w, word in enumerate(sorted(set().union(*queries)))}

        def has_words(sets: Sequence[Set[str]]) -> csr_array:
            """Return whether each set has each word of a query, 0 or 1, (number of sets, W)."""
            ids = [[word_id[word] for word in found & word_id.keys()] for found in sets]
            indptr = np.cumsum([0, *map(len, ids)], dtype=np.int64)
            indices = np.fromiter(chain.from_iterable(ids), dtype=np.int64)
            return csr_array((np.ones(len(indices)), indices, indptr), shape=(len(sets), len(word_id)))

        query_WE = has_words(queries).T.tocsr()
        # a unit without words has an empty column: 0 for every row
        size_E = np.maximum(1, np.array([len(query) for query in queries]))

        def score(start: int, stop: int) -> Scores:
            shared_nE = has_words([set(words(text)) for text in inputs.texts(start, stop)]) @ query_WE
            return np.asarray(shared_nE.toarray() / size_E)

        n_empty = sum(not query for query in queries)
        counts = {"units without a query word: 0 for every row": n_empty} if n_empty else {}
        return RowScorer(score, Account(covers=COVERS, counts=counts))
