"""Query overlap: how many of a unit's words occur in a row, each word once, none rarer than another.

Shape letters: n rows of a block, E units, W words of any unit.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field
from scipy.sparse import csr_array

from grasp.baselines.bm25 import query_text, words
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import TargetError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.settings import Settings


class OverlapSettings(Settings):
    """What counts as a unit's words."""

    query: Literal["both", "prompt", "completion"] = Field(
        "both", description="Text of a unit whose words are looked for: prompt and completion, or one of them."
    )


class Overlap(BlockMethod[OverlapSettings]):
    """Share of the unit's words that the row has.

    Share of a unit's distinct words that the row has.

    Source: the paper's retrieval table, which names "query overlap" and defines it nowhere; the share is ours. Words
    are cut as those of bm25: no stop words, rows decoded from their tokens.
    """

    settings_type = OverlapSettings
    version = 2  # words of every alphabet
    looks_at = frozenset({"tokens"})
    dtype = "float16"

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del work, part
        queries = [set(words(query_text(unit, self.settings.query))) for unit in material.units.units]
        if not any(queries):
            unit = material.units.units[0]
            raise TargetError(
                f"overlap: none of the {len(queries)} units has a word to look for, e.g. {unit.unit_id!r} of "
                f"{unit.target}; its setting query is {self.settings.query!r}, try 'both'"
            )
        return _Shares(material, queries, self.settings.query)


class _Shares(RowScorer):
    def __init__(self, material: MethodInputs, queries: Sequence[set[str]], which: str) -> None:
        self._material, self._which = material, which
        self._place = {word: w for w, word in enumerate(sorted(set().union(*queries)))}
        self._share_WE = self._matrix([[self._place[word] for word in query] for query in queries]).T.tocsr()
        # a unit without words has an empty column: 0 for every row
        self._size_E = np.maximum(1, np.array([len(query) for query in queries]))
        self._n_empty = sum(not query for query in queries)

    def score(self, start: int, stop: int) -> Scores:
        texts = self._material.texts(start, stop)
        known = [[self._place[word] for word in set(words(text)) & self._place.keys()] for text in texts]
        shared_nE = (self._matrix(known) @ self._share_WE).toarray()
        return np.asarray(shared_nE / self._size_E)

    def account(self) -> Account:
        query = {"both": "prompts and completions", "prompt": "prompts", "completion": "completions"}
        counts = {"units without a word to look for: 0 for every row": self._n_empty} if self._n_empty else {}
        covers = ("text of the rows, decoded from their tokens", f"units' {query[self._which]}")
        return Account(covers=covers, counts=counts)

    def _matrix(self, places: Sequence[Sequence[int]]) -> csr_array:
        """A line of zeros and ones for each list of words."""
        indptr = np.concatenate([[0], np.cumsum([len(one) for one in places])]).astype(np.int64)
        indices = np.array([w for one in places for w in one], dtype=np.int64)
        return csr_array((np.ones(len(indices)), indices, indptr), shape=(len(places), len(self._place)))
