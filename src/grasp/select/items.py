"""The candidates of a selection: single rows, or whole documents. Start with `Items.of_rows` and `Items.of_documents`.

Shape letters: N rows, M items (rows or documents), P items in ranked order, B subsets.
"""

from dataclasses import dataclass, replace
from typing import Self

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

    @classmethod
    def of_documents(
        cls, document_N: I64, effect_N: F64, allowed_N: Bool, tokens_N: I64, labels: LabelColumn | None
    ) -> Self:
        """Return the documents as items; `document_N` is the document of each row, numbered from 0."""
        if labels is not None:
            _, first_M = np.unique(document_N, return_index=True)
            labels = replace(labels, codes_N=labels.codes_N[first_M])
        return cls(
            n_rows=len(effect_N),
            document_N=document_N,
            effect_M=_mean_by_document(document_N, effect_N),
            allowed_M=np.bincount(document_N, ~allowed_N) == 0,
            tokens_M=np.bincount(document_N, tokens_N).astype(np.int64),
            rows_M=np.bincount(document_N),
            labels=labels,
        )

    @property
    def are_documents(self) -> bool:
        """Return whether the items are whole documents; otherwise they are rows."""
        return self.document_N is not None

    @property
    def kind(self) -> str:
        """Return what the items are: rows or documents."""
        return "documents" if self.are_documents else "rows"

    def mean(self, value_N: F64) -> F64:
        """Return the mean of a value over the rows of each item, (M,)."""
        return value_N if self.document_N is None else _mean_by_document(self.document_N, value_N)

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


def _mean_by_document(document_N: I64, value_N: F64) -> F64:
    return np.asarray(np.bincount(document_N, value_N) / np.bincount(document_N), np.float64)
