"""The paper's controls and ablations, as restrictions of the full predictor, and the shuffles they need.

A control says which parts of a predictor are left: whether relevance counts, and what becomes of each geometric
component (`half.kind`; halves hidden, residual, joint, product; kinds raw, self, pair, cent). Weights of what is left
follow the same development-only selection as the full predictor's.

Shape letters: B subsets, N rows, D sketch width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from grasp.errors import ShapeError
from grasp.seeds import stream

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

RETENTION_RATIOS = (0.20, 0.50, 0.80, 0.90, 0.95, 0.99)  # of the paper; families uniform:R
EXACT_ROWS = 12_000  # pair similarities are permuted one by one up to here: 4 bytes a pair, 288 MB
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Control:
    """One control of the paper: which components of the full predictor it leaves."""

    name: str
    says: str
    relevance: bool = True
    kinds: tuple[str, ...] | None = None  # kinds of geometry that stay; None: all
    halves: Literal["all", "without-hidden", "without-residual"] = "all"
    shuffled: bool = False

    def components(self, full: Sequence[str]) -> tuple[str, ...]:
        """Components of the full predictor that stay, renamed where only a half of one stays."""
        kept = [left for name in full if (left := self._left(name)) is not None]
        return tuple(dict.fromkeys(kept))

    def _left(self, name: str) -> str | None:
        half, kind = name.split(".")
        if self.kinds is not None and kind not in self.kinds:
            # raw = self + pair: without one of the two it is the other
            if kind != "raw" or len(self.kinds) != 1:
                return None
            kind = self.kinds[0]
        if self.halves == "all":
            return f"{half}.{kind}"
        other = "residual" if self.halves == "without-hidden" else "hidden"
        return f"{other}.{kind}" if half in ("joint", other) else None


CONTROLS = (
    Control("full", "everything"),
    Control("additive", "relevance alone", kinds=()),
    Control("additive-self-norm", "relevance and K_self: additive still, but with a norm", kinds=("self",)),
    Control("pair-only", "K_pair alone: cross-example geometry without relevance", relevance=False, kinds=("pair",)),
    Control(
        "pair-shuffled",
        "everything, with the similarity of every pair moved to another pair; for more than "
        f"{EXACT_ROWS:,} rows, with the sketches moved to other rows",
        shuffled=True,
    ),
    Control(
        "without-hidden-geometry",
        "geometry of the residual half alone; the product sketch, which has hidden states in it, is left out",
        halves="without-hidden",
    ),
    Control(
        "without-residual-geometry",
        "geometry of the hidden half alone; relevance stays",
        halves="without-residual",
    ),
    Control(
        "without-residual-alignment",
        "no residuals at all: geometry of the hidden half alone, and no relevance, which is residual match x hidden "
        "match and cannot be taken apart in an artifact",
        relevance=False,
        halves="without-residual",
    ),
    Control("without-self", "K_self left out, K_raw replaced by K_pair", kinds=("pair",)),
)


def named_controls() -> dict[str, Control]:
    """Controls by name."""
    return {control.name: control for control in CONTROLS}


# ------------------------------------------------------------------------------------------- shuffling


@dataclass(frozen=True, slots=True)
class ShuffledPairs:
    """G_ij = <phi_i, phi_j> of every unordered pair i < j, moved to another pair by one fixed permutation.

    Preserves the multiset of pair similarities exactly, and nothing of which pair has which. What it gives is no
    Gram matrix any more: K_pair may be lower than -K_self.
    """

    n_rows: int
    condensed: F32  # row i of the upper triangle starts at i N - i (i + 1) / 2

    @classmethod
    def of(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledPairs":
        """Permute the pair similarities of a sketch; memory 2 N^2 bytes, time O(N^2 D)."""
        sketch_ND = np.asarray(sketch_ND, dtype=np.float32)
        n_rows = len(sketch_ND)
        if n_rows > EXACT_ROWS:
            raise ShapeError(f"shuffled pairs: got {n_rows} rows, expected at most {EXACT_ROWS}; shuffle rows instead")
        condensed = np.empty(n_rows * (n_rows - 1) // 2, dtype=np.float32)
        end = 0
        for start in range(0, n_rows, _ROWS_AT_ONCE):
            block = sketch_ND[start : start + _ROWS_AT_ONCE] @ sketch_ND.T
            for i, row in enumerate(block, start=start):
                begin, end = end, end + n_rows - 1 - i
                condensed[begin:end] = row[i + 1 :]
        stream(seed, "fidelity", "pair-shuffled").shuffle(condensed)
        return cls(n_rows, condensed)

    def pair(self, weights_BN: NDArray[np.floating]) -> F64:
        """K_pair = 2 sum_{i<j} w_i w_j G_shuffled(ij), (B,). Source: the paper's pair-shuffled control."""
        weights_BN = np.asarray(weights_BN, dtype=np.float64)
        if weights_BN.shape[1] != self.n_rows:
            raise ShapeError(f"shuffled pairs: weights {weights_BN.shape} for {self.n_rows} rows")
        total_B = np.zeros(len(weights_BN))
        end = 0
        for start in range(0, self.n_rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, self.n_rows)
            block = np.zeros((stop - start, self.n_rows))
            for i in range(start, stop):
                begin, end = end, end + self.n_rows - 1 - i
                block[i - start, i + 1 :] = self.condensed[begin:end]
            total_B += np.einsum("bi,bi->b", weights_BN[:, start:stop], weights_BN @ block.T)
        return np.asarray(2.0 * total_B)


@dataclass(frozen=True, slots=True)
class ShuffledRows:
    """Every row's sketch taken from another row, where pairs are too many to be permuted one by one.

    With phi_i replaced by phi_perm(i) in K_pair alone, the Gram matrix is permuted by rows and columns alike: the
    multiset of pair similarities, the norms and the spectrum are all preserved, and which training row has which
    sketch is destroyed. The exact shuffle destroys the Gram structure as well. Needs no N x N matrix.
    """

    moved_ND: NDArray[np.floating]

    @classmethod
    def of(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledRows":
        return cls(sketch_ND[stream(seed, "fidelity", "row-shuffled").permutation(len(sketch_ND))])

    def pair(self, weights_BN: F64) -> F64:
        """K_pair with the sketches that were moved, (B,)."""
        total_BD = weights_BN @ self.moved_ND
        self_B = weights_BN**2 @ np.einsum("nd,nd->n", self.moved_ND, self.moved_ND)
        return np.asarray(np.einsum("bd,bd->b", total_BD, total_BD) - self_B)
