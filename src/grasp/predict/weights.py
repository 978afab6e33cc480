"""How much each row counts in each subset, in the form that takes least memory:

    csr_array      few rows of each: 12 bytes an entry
    OmittedRows    nearly all rows of each: entries for what is missing
    PackedMasks    a good part of a large corpus: one bit a row
    SliceShares    whole slices: one number a slice, whatever N
    EachSlice      one slice each

All of them mean the same matrix of weights w_i of the retained side. What is summed over subsets takes each form as
it is (`grasp.predict.row_sums`); `as_csr` is for everyone else.
Shape letters: B subsets, N rows of the corpus, G slices.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

F64 = NDArray[np.float64]

REPEAT_WORTH = 15.4  # R*: past so many repetitions, more of them add little
ANY_TEXT = 0.4  # effect sizes that any new row is worth, and repetition takes: experiments/exposure

_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)


@dataclass(frozen=True, slots=True)
class OmittedRows:
    """Subsets named by what they leave out: every row has the weight 1, less its entry in `omitted_BN`."""

    omitted_BN: csr_array

    @property
    def shape(self) -> tuple[int, int]:
        return self.omitted_BN.shape

    def csr(self) -> csr_array:
        """The weights one by one, without those that are 0."""
        weights_N, rows, values = np.ones(self.shape[1]), [], []
        for b in range(self.shape[0]):
            own = slice(self.omitted_BN.indptr[b], self.omitted_BN.indptr[b + 1])
            changed = self.omitted_BN.indices[own]
            weights_N[changed] -= self.omitted_BN.data[own]
            rows.append(np.flatnonzero(weights_N))
            values.append(weights_N[rows[-1]])
            weights_N[changed] = 1.0
        return _joined(rows, values, self.shape)

    def sizes(self) -> NDArray[np.int64]:
        gone_BN = csr_array((self.omitted_BN.data == 1.0, self.omitted_BN.indices, self.omitted_BN.indptr), self.shape)
        return self.shape[1] - np.asarray(gone_BN.sum(axis=1), dtype=np.int64).ravel()

    def squared(self) -> Self:
        """w^2 = 1 - (2 o - o^2)."""
        square_BN = self.omitted_BN.copy()
        square_BN.data = square_BN.data * (2.0 - square_BN.data)
        return type(self)(square_BN)

    def sums(self) -> tuple[F64, F64]:
        return self.shape[1] - _row_sums(self.omitted_BN), _row_sums(abs(self.omitted_BN))


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Weights 0 and 1, eight rows a byte, first row in the highest bit; (B, ceil(N / 8)) uint8."""

    bits_BN: NDArray[np.uint8]
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bits_BN), self.n_rows

    def csr(self) -> csr_array:
        rows = [np.flatnonzero(np.unpackbits(bits, count=self.n_rows)) for bits in self.bits_BN]
        return _joined(rows, [np.ones(len(row)) for row in rows], self.shape)

    def sizes(self) -> NDArray[np.int64]:
        return self.sums()[0].astype(np.int64)

    def squared(self) -> Self:
        return self

    def sums(self) -> tuple[F64, F64]:
        kept_B = np.array([_ONES_OF_BYTE[bits].sum() for bits in self.bits_BN], dtype=np.float64)
        return kept_B, self.n_rows - kept_B

    def columns(self, start: int, stop: int) -> NDArray[np.uint8]:
        """(B, stop - start) zeros and ones of the rows [start, stop)."""
        first = start // 8
        part = np.unpackbits(self.bits_BN[:, first : -(-stop // 8)], axis=1)
        return part[:, start - 8 * first : stop - 8 * first]


@dataclass(frozen=True, slots=True)
class SliceShares:
    """Every row of slice g has the weight of the slice: w_i = share_g(i)."""

    share_BG: F64
    codes_N: NDArray[np.integer]  # slice of each row; blocks of one question share the array itself

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.share_BG), len(self.codes_N)

    def csr(self) -> csr_array:
        rows, values = [], []
        for share_G in self.share_BG:
            weights_N = share_G[self.codes_N]
            rows.append(np.flatnonzero(weights_N))
            values.append(weights_N[rows[-1]])
        return _joined(rows, values, self.shape)

    def sizes(self) -> NDArray[np.int64]:
        return (self.share_BG > 0) @ self._rows_G

    def squared(self) -> Self:
        return type(self)(self.share_BG**2, self.codes_N)

    def sums(self) -> tuple[F64, F64]:
        return self.share_BG @ self._rows_G, np.abs(1.0 - self.share_BG) @ self._rows_G

    @property
    def slices(self) -> "EachSlice":
        """The slices, whose sums give those of any shares."""
        return EachSlice(self.codes_N, self.share_BG.shape[1])

    @property
    def _rows_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        return np.bincount(self.codes_N, minlength=self.share_BG.shape[1]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EachSlice:
    """One subset a slice, (G, N): 1 where a row is in the slice."""

    codes_N: NDArray[np.integer]  # slice of each row
    n_slices: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_slices, len(self.codes_N)

    def csr(self) -> csr_array:
        order, rows_G = grouped(self.codes_N, self.n_slices)
        return csr_array((np.ones(len(order)), order, np.concatenate([[0], np.cumsum(rows_G)])), self.shape)

    def sizes(self) -> NDArray[np.int64]:
        return np.bincount(self.codes_N, minlength=self.n_slices).astype(np.int64)

    def squared(self) -> Self:
        return self

    def sums(self) -> tuple[F64, F64]:
        rows_G = self.sizes().astype(np.float64)
        return rows_G, len(self.codes_N) - rows_G

    def product(self, start: int, values_nC: F64) -> F64:
        """(G, C) sums of the rows [start, start + n)."""
        n_rows = len(values_nC)
        parts = np.ones(n_rows), self.codes_N[start : start + n_rows], np.arange(n_rows + 1)
        return np.asarray(csc_array(parts, shape=(self.n_slices, n_rows)) @ values_nC)


def grouped(codes_N: NDArray[np.integer], n_slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows slice by slice, (N,), and how many each slice has, (G,)."""
    short_N = codes_N.astype(np.int16) if n_slices < 1 << 15 else codes_N  # numpy counts 16 bits, and sorts 32
    return np.argsort(short_N, kind="stable"), np.bincount(codes_N, minlength=n_slices)


def _seen(x: F64) -> F64:
    return np.where(x <= 1.0, x, 1.0 - REPEAT_WORTH * np.expm1(-np.maximum(x - 1.0, 0.0) / REPEAT_WORTH))


Compact = OmittedRows | PackedMasks | SliceShares | EachSlice
Weights = csr_array | Compact


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
        if is_plain(weights):
            return weights
        times_B = self.base(sizes(weights), weights.shape[1]) / weight_sums(weights)[0]
        if isinstance(weights, SliceShares):
            return SliceShares(self.relative(weights.share_BG, times_B[:, None]), weights.codes_N)
        if isinstance(weights, OmittedRows):
            gone_BN = weights.omitted_BN.copy()
            gone_BN.data = 1.0 - self.relative(1.0 - gone_BN.data, np.repeat(times_B, np.diff(gone_BN.indptr)))
            return OmittedRows(gone_BN)
        assert isinstance(weights, csr_array)
        own_BN = weights.copy()
        own_BN.data = self.relative(own_BN.data, np.repeat(times_B, np.diff(own_BN.indptr)))
        return own_BN

    def relative(self, weight: Any, times: Any) -> F64:
        """What the weight w counts against the weight 1, of which a row is seen `times`; elementwise."""
        return np.asarray(self(weight * times) / self(times))


def as_csr(weights: Weights) -> csr_array:
    """The (B, N) matrix of weights, without stored zeros where it is made here; 12 bytes an entry."""
    return weights if isinstance(weights, csr_array) else weights.csr()


def canonical(weights_BN: csr_array) -> csr_array:
    """The same matrix with one entry for a row and none for 0: what `sizes` and `squared` count on."""
    if weights_BN.has_canonical_format and weights_BN.data.all():
        return weights_BN
    own_BN = weights_BN.copy()
    own_BN.sum_duplicates()
    own_BN.eliminate_zeros()
    return own_BN


def squared(weights: Weights) -> Weights:
    """Weights w_i^2 in the same form."""
    return weights.power(2) if isinstance(weights, csr_array) else weights.squared()


def is_plain(weights: Weights) -> bool:
    """Whether all weights are 0 or 1, so that they are their own squares."""
    if isinstance(weights, PackedMasks | EachSlice):
        return True
    if isinstance(weights, SliceShares):
        return bool(np.isin(weights.share_BG, (0.0, 1.0)).all())
    return bool(np.all((weights.omitted_BN if isinstance(weights, OmittedRows) else weights).data == 1.0))


def sizes(weights: Weights) -> NDArray[np.int64]:
    """Rows with a weight above zero, (B,)."""
    return np.diff(weights.indptr).astype(np.int64) if isinstance(weights, csr_array) else weights.sizes()


def weight_sums(weights: Weights) -> tuple[F64, F64]:
    """Sum of w_i, and sum over the corpus of |1 - w_i|, (B,) each."""
    if not isinstance(weights, csr_array):
        return weights.sums()
    outside = abs(1.0 - weights.data) - 1.0
    change = csr_array((outside, weights.indices, weights.indptr), shape=weights.shape)
    return _row_sums(weights), weights.shape[1] + _row_sums(change)


def _joined(rows: list[NDArray[np.int64]], values: list[F64], shape: tuple[int, int]) -> csr_array:
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return csr_array((np.concatenate(values), np.concatenate(rows), indptr), shape=shape)


def _row_sums(matrix_BN: csr_array) -> F64:
    return np.asarray(matrix_BN.sum(axis=1), dtype=np.float64).ravel()
