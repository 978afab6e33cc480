"""How much each row of the corpus counts in each subset: one matrix of subsets x rows, which is never dense.

    w = base + mix @ rows

`rows` is sparse, a subset a line, or packed bits where subsets keep a good part of a large corpus. A `base` of 1 names
subsets by what they leave out; a `mix` gives every row of a slice the weight of the slice, whatever N.
Shape letters: B subsets, N rows of the corpus, G lines of `rows`: slices, or the subsets themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from grasp.arrays import F64

REPEAT_WORTH = 15.4  # R*: past so many repetitions, more of them add little
ANY_TEXT = 0.4  # effect sizes that any new row is worth, and repetition takes: experiments/exposure

_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Weights 0 and 1, eight rows a byte, first row in the highest bit; (G, ceil(N / 8)) uint8."""

    bits_GN: NDArray[np.uint8]
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bits_GN), self.n_rows

    def __getitem__(self, columns: tuple[slice, slice]) -> NDArray[np.uint8]:
        """(G, stop - start) zeros and ones of `[:, start:stop]`."""
        start, stop = columns[1].start, columns[1].stop
        first = start // 8
        part = np.unpackbits(self.bits_GN[:, first : -(-stop // 8)], axis=1)
        return part[:, start - 8 * first : stop - 8 * first]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights w_i >= 0 of the retained side, (B, N).

    Attributes:
        rows: entries named twice are added up, as scipy has it; bits go without `base` and `mix`.
        mix: None: `rows` are the subsets. Else every row of the corpus is in one line of `rows`, with the entry 1, and
            there is no `base`.
        base: 0, or 1: what a row counts that has no entry.
    """

    rows: csr_array | csc_array | PackedMasks
    mix: F64 | None = None  # (B, G)
    base: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.rows, csr_array):
            object.__setattr__(self, "rows", _canonical(self.rows))

    @classmethod
    def from_slices(cls, codes_N: NDArray[np.integer], n_slices: int) -> Self:
        """The slices as subsets, from the slice of each row; `mixed` gives others of the same slices."""
        n_rows = len(codes_N)
        one_each = np.ones(n_rows), codes_N, np.arange(n_rows + 1)
        return cls(csc_array(one_each, shape=(n_slices, n_rows)), np.eye(n_slices))

    def mixed(self, share_BG: Any) -> Self:
        """Subsets that give every row of a slice the weight of the slice."""
        return replace(self, mix=np.asarray(share_BG, dtype=np.float64))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.shape[0] if self.mix is None else len(self.mix)), self.rows.shape[1]

    def mapped(self, function: Callable[..., Any], *given_B: F64) -> Self:
        """function(w, what is given of the subset) in place of w; 0 stays 0, and where `base` is 1, 1 stays 1."""
        if isinstance(self.rows, PackedMasks):
            return self
        if self.mix is not None:
            return replace(self, mix=function(self.mix, *(value_B[:, None] for value_B in given_B)))
        lines = self.rows.tocsr()
        of_entries = (np.repeat(value_B, np.diff(lines.indptr)) for value_B in given_B)
        values = function(self.base + lines.data, *of_entries) - self.base
        return replace(self, rows=csr_array((values, lines.indices, lines.indptr), lines.shape))

    def total(self, function: Callable[[F64], F64]) -> F64:
        """Sum of function(w_i) over the rows of the corpus, (B,)."""
        n_rows, outside = self.shape[1], function(np.asarray(self.base))
        if isinstance(self.rows, PackedMasks):
            kept_B = np.array([_ONES_OF_BYTE[bits].sum() for bits in self.rows.bits_GN], dtype=np.float64)
            return np.asarray(outside * (n_rows - kept_B) + function(np.asarray(1.0)) * kept_B)
        if self.mix is not None:
            return np.asarray(function(self.mix) @ self.rows.sum(axis=1))
        lines = self.rows.tocsr()
        change = csr_array((function(self.base + lines.data) - outside, lines.indices, lines.indptr), lines.shape)
        return np.asarray(n_rows * outside + change.sum(axis=1), dtype=np.float64)

    @property
    def sums(self) -> F64:
        """Sum of w_i, (B,)."""
        return self.total(lambda weight: weight)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows with a weight above zero, (B,)."""
        return self.total(np.sign).astype(np.int64)

    @property
    def is_plain(self) -> bool:
        """Whether all weights are 0 or 1, so that they are their own squares."""
        if isinstance(self.rows, PackedMasks):
            return True
        return bool(np.isin(self.base + self.rows.data if self.mix is None else self.mix, (0.0, 1.0)).all())

    def csr(self) -> csr_array:
        """The (B, N) matrix without stored zeros, for who needs it whole; 12 bytes an entry."""
        if isinstance(self.rows, csr_array) and self.mix is None and not self.base:
            return self.rows
        found, values = [], []
        for b in range(self.shape[0]):
            if isinstance(self.rows, PackedMasks):
                weight_N = np.unpackbits(self.rows.bits_GN[b], count=self.shape[1]).astype(np.float64)
            elif self.mix is not None:
                weight_N = self.rows.T @ self.mix[b]
            else:
                weight_N = self.base + self.rows[[b]].toarray()[0]
            found.append(np.flatnonzero(weight_N))
            values.append(weight_N[found[-1]])
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in found])])
        return csr_array((np.concatenate(values), np.concatenate(found), indptr), shape=self.shape)


def grouped(codes_N: NDArray[np.integer], n_slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows slice by slice, (N,), and how many each slice has, (G,)."""
    short_N = codes_N.astype(np.int16) if n_slices < 1 << 15 else codes_N  # numpy counts 16 bits, and sorts 32
    return np.argsort(short_N, kind="stable"), np.bincount(codes_N, minlength=n_slices)


def _seen(x: F64) -> F64:
    return np.where(x <= 1.0, x, 1.0 - REPEAT_WORTH * np.expm1(-np.maximum(x - 1.0, 0.0) / REPEAT_WORTH))


@dataclass(frozen=True, slots=True)
class Exposure:
    """The law of diminishing returns: what a row counts that is seen more often than another.

    Seen for the first time a row counts whole, and less and less each time after that: x times do as much as

        seen(x) = x where x <= 1,   1 + R* (1 - exp(-(x - 1) / R*)) beyond,   R* = 15.4

    rows that are all different. Where no budget is known, training is as long as the rows that are kept: one of the
    mean weight is seen once, and weights of 0 and 1 stay what they are. A budget reads the corpus E times, so a row of
    the weight w in a corpus of N rows is seen E N w / sum w times, and counts against seen(E).
    Source: Muennighoff et al. 2023, arXiv 2305.16264, eq. 5 and the fit of R*.
    """

    epochs: float | None = None  # E; None: no budget

    def __call__(self, times: Any) -> F64:
        """What a row counts that is seen so many times as often as with the weight 1; 0 gives 0, and 1 gives 1."""
        once = 1.0 if self.epochs is None else self.epochs
        return np.asarray(_seen(once * np.asarray(times, dtype=np.float64)) / _seen(np.asarray(once)))

    def base(self, kept_B: Any, n_rows: int) -> F64:
        """Rows among which a training is shared out, that each would be seen once, or E times."""
        return np.asarray(kept_B, np.float64) if self.epochs is None else np.full(np.shape(kept_B), float(n_rows))

    def weigh(self, weights: Weights) -> Weights:
        """What every row counts against a row of the weight 1, in the same form; weights of 0 and 1 stay."""
        if weights.is_plain:
            return weights
        return weights.mapped(self.relative, self.base(weights.sizes, weights.shape[1]) / weights.sums)

    def relative(self, weight: Any, times: Any) -> F64:
        """What the weight w counts against the weight 1, of which a row is seen `times`; elementwise."""
        return np.asarray(self(weight * times) / self(times))


def _canonical(weights_BN: csr_array) -> csr_array:
    """The same matrix with one entry for a row and none for 0."""
    if weights_BN.has_canonical_format and weights_BN.data.all():
        return weights_BN
    own_BN = weights_BN.copy()
    own_BN.sum_duplicates()
    own_BN.eliminate_zeros()
    return own_BN
