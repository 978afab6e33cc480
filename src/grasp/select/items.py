"""The candidates of a selection: single rows, or whole documents. Start with `Items.of_rows`.

Shape letters: N rows, M items (rows or documents), P items in ranked order, B subsets.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I64, Bool
from grasp.artifact.label_table import LabelColumn
from grasp.predict.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Rows or whole documents that are selected one by one.

    Attributes:
        n_rows: number of rows of the corpus.
        document_N: document of each row; None: every item is a row.
        effect_M: effect of each item; that of a document is the mean over its rows.
        allowed_M: whether the item may be selected; a document may if all of its rows may.
        tokens_M: number of tokens of each item.
        rows_M: number of rows of each item; None: 1.
        labels: label of the items that floors and caps refer to; a document has the label of its first row.
    """

    n_rows: int
    document_N: I64 | None = None
    effect_M: F64
    allowed_M: Bool
    tokens_M: I64
    rows_M: I64 | None = None
    labels: LabelColumn | None

    @classmethod
    def of_rows(cls, effect_N: F64, allowed_N: Bool, tokens_N: I64, labels: LabelColumn | None) -> Self:
        """Return the rows as items."""
        return cls(n_rows=len(effect_N), effect_M=effect_N, allowed_M=allowed_N, tokens_M=tokens_N, labels=labels)

    def as_documents(self, document_N: I64) -> Self:
        """Return the documents of rows as items; `document_N` is the document of each row, numbered from 0."""
        labels, rows_M = self.labels, np.bincount(document_N)
        if labels is not None:
            _, first_M = np.unique(document_N, return_index=True)
            labels = replace(labels, codes_N=labels.codes_N[first_M])
        return replace(
            self,
            document_N=document_N,
            effect_M=np.bincount(document_N, self.effect_M) / rows_M,
            allowed_M=np.bincount(document_N, ~self.allowed_M) == 0,
            tokens_M=np.bincount(document_N, self.tokens_M).astype(np.int64),
            rows_M=rows_M,
            labels=labels,
        )

    @property
    def kind(self) -> Literal["rows", "documents"]:
        """Return what the items are: rows or documents."""
        return "rows" if self.document_N is None else "documents"

    def mean(self, value_N: F64) -> F64:
        """Return the mean of a value over the rows of each item, (M,)."""
        if self.document_N is None or self.rows_M is None:
            return value_N
        return np.asarray(np.bincount(self.document_N, value_N) / self.rows_M)

    def per_row(self, value_M: F64) -> F64:
        """Return the value of the item that each row belongs to, (N,)."""
        return value_M if self.document_N is None else value_M[self.document_N]

    def ranked_rows(self, order_P: I64) -> I64:
        """Return the rows of items in ranked order; those of a document keep the order of the corpus."""
        if self.document_N is None:
            return order_P
        rank_M = np.full(len(self.effect_M), len(order_P))
        rank_M[order_P] = np.arange(len(order_P))
        rank_N = rank_M[self.document_N]
        n_ranked = int((rank_N < len(order_P)).sum())
        return np.argsort(rank_N, kind="stable")[:n_ranked]

    def subsets(self, mask_BM: Bool) -> Weights:
        """Return sets of items as subsets of rows with weight 1."""
        mask_BN = mask_BM if self.document_N is None else mask_BM[:, self.document_N]
        indices = np.nonzero(mask_BN)
        return Weights(csr_array((np.ones(len(indices[0])), indices), shape=(len(mask_BN), self.n_rows)))
