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
        kind: what the items are.
        item_N: item of each row.
        rows_M: number of rows of each item.
        effect_M: effect of each item; that of a document is the mean over its rows.
        allowed_M: whether the item may be selected; a document may if all of its rows may.
        tokens_M: number of tokens of each item.
        labels: label of the items that floors and caps refer to; a document has the label of its first row.
    """

    kind: Literal["rows", "documents"]
    item_N: I64
    rows_M: I64
    effect_M: F64
    allowed_M: Bool
    tokens_M: I64
    labels: LabelColumn | None

    @classmethod
    def of_rows(
        cls,
        effect_N: F64,
        allowed_N: Bool,
        tokens_N: I64,
        labels: LabelColumn | None,
        document_N: I64 | None = None,
    ) -> Self:
        """Return rows as items, or documents; `document_N` is the document of each row, numbered from 0."""
        if document_N is None:
            return cls(
                kind="rows",
                item_N=np.arange(len(effect_N)),
                rows_M=np.broadcast_to(np.int64(1), len(effect_N)),  # needs no memory
                effect_M=effect_N,
                allowed_M=allowed_N,
                tokens_M=tokens_N,
                labels=labels,
            )
        rows_M = np.bincount(document_N)
        if labels is not None:
            labels = replace(labels, codes_N=labels.codes_N[np.unique(document_N, return_index=True)[1]])
        return cls(
            kind="documents",
            item_N=document_N,
            rows_M=rows_M,
            effect_M=np.bincount(document_N, effect_N) / rows_M,
            allowed_M=np.bincount(document_N, ~allowed_N) == 0,
            tokens_M=np.bincount(document_N, tokens_N).astype(np.int64),
            labels=labels,
        )

    def ranked_rows(self, order_P: I64) -> I64:
        """Return the rows of items in ranked order; those of a document keep the order of the corpus."""
        if self.kind == "rows":
            return order_P
        rank_M = np.full(len(self.effect_M), len(order_P))
        rank_M[order_P] = np.arange(len(order_P))
        rank_N = rank_M[self.item_N]
        n_ranked = int((rank_N < len(order_P)).sum())
        return np.argsort(rank_N, kind="stable")[:n_ranked]

    def subsets(self, mask_BM: Bool) -> Weights:
        """Return sets of items as subsets of rows with weight 1."""
        indices = np.nonzero(mask_BM[:, self.item_N])
        return Weights(csr_array((np.ones(len(indices[0])), indices), shape=(len(mask_BM), len(self.item_N))))
