"""Covariances between subsets before any run: the parts of the learned predictor's Gaussian process.

What each part is for stands in `grasp.runs.learned`. Shape letters: B subsets (n of them runs), G slices of all labels,
T tasks, M relevance kernels, D sketch width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64

TINY = 1e-12
WITHIN, WITHIN_SD = 0.4, 0.4  # what relevance within a slice is worth against that of the slice: experiments/exposure
SHAPES = ("c", "additive length", "joint length")
CURVES = ("linear", "additive", "joint")


@dataclass(frozen=True, slots=True)
class SubsetFeatures:
    """What is known of B subsets before any run: means over the rows that they retain.

    Attributes:
        share_BG: of the slices of every label, the labels side by side; no columns: no labels.
        relevance_BT: predicted change of each task; 0 for a task that is learned from runs alone.
        kernel_BTM: the mean of each relevance kernel.
        sketch_BD: the mean sketch.
        within_BT: what rows were chosen by within slices, as a part of the predicted change, before it is made less.
    """

    share_BG: F64
    relevance_BT: F64
    kernel_BTM: F64
    sketch_BD: F64
    within_BT: F64

    @classmethod
    def from_shares(cls, share_BG: F64, n_tasks: int) -> Self:
        """Of mixtures without an artifact."""
        n = len(share_BG)
        nothing_BT = np.zeros((n, n_tasks))
        return cls(
            np.asarray(share_BG, np.float64), nothing_BT, np.zeros((n, n_tasks, 0)), np.zeros((n, 0)), nothing_BT
        )

    @classmethod
    def joined(cls, parts: "Sequence[SubsetFeatures]") -> Self:
        """Of several blocks, one after the other."""
        return cls(
            np.concatenate([one.share_BG for one in parts]),
            np.concatenate([one.relevance_BT for one in parts]),
            np.concatenate([one.kernel_BTM for one in parts]),
            np.concatenate([one.sketch_BD for one in parts]),
            np.concatenate([one.within_BT for one in parts]),
        )

    def __len__(self) -> int:
        return len(self.share_BG)

    def flat(self) -> F64:
        """All features of a subset side by side, (B, P)."""
        kernel_BK = self.kernel_BTM.reshape(len(self), -1)
        return np.concatenate([self.share_BG, self.relevance_BT, kernel_BK, self.sketch_BD, self.within_BT], axis=1)

    def unflatten(self, flat_BP: F64) -> "SubsetFeatures":
        """The opposite, for features of the same shapes as these."""
        parts = self.share_BG, self.relevance_BT, self.kernel_BTM, self.sketch_BD
        widths = [int(np.prod(part.shape[1:])) for part in parts]
        share_BG, relevance_BT, kernel_BK, sketch_BD, within_BT = np.split(flat_BP, np.cumsum(widths), axis=1)
        kernel_BTM = kernel_BK.reshape(-1, *self.kernel_BTM.shape[1:])
        return SubsetFeatures(share_BG, relevance_BT, kernel_BTM, sketch_BD, within_BT)

    def take(self, index: NDArray[np.integer] | slice) -> "SubsetFeatures":
        """Some of the subsets."""
        return SubsetFeatures(
            self.share_BG[index],
            self.relevance_BT[index],
            self.kernel_BTM[index],
            self.sketch_BD[index],
            self.within_BT[index],
        )


@dataclass(frozen=True, slots=True)
class FeatureScales:
    """Brings features to one scale: over the runs they have mean 0 and mean square 1.

    Beyond the runs a prediction r counts by its logarithm: farthest (1 + log(|r| / farthest)), of its sign. Choosing
    goes there by what looks best, and what came true of it along a straight line was half: see experiments/exposure.
    Shares stay as they are. Rows chosen within slices, more than those of any run, leave a standard deviation.
    """

    relevance_T: tuple[F64, F64]
    kernel_TM: tuple[F64, F64]
    sketch_D: tuple[F64, float]
    share_G: tuple[F64, float]
    farthest_T: F64  # largest prediction of a run, whatever its sign
    within_T: F64  # the same of what its rows were chosen by within slices

    @classmethod
    def from_runs(cls, runs: SubsetFeatures) -> Self:
        spread, apart = (float(np.sqrt(one.var(axis=0).sum())) for one in (runs.sketch_BD, runs.share_BG))
        return cls(
            (runs.relevance_BT.mean(axis=0), inverse_of(runs.relevance_BT.std(axis=0))),
            (runs.kernel_BTM.mean(axis=0), inverse_of(runs.kernel_BTM.std(axis=0))),
            (runs.sketch_BD.mean(axis=0), float(inverse_of(np.array([spread]))[0])),
            (runs.share_BG.mean(axis=0), float(inverse_of(np.array([apart]))[0])),
            np.abs(runs.relevance_BT).max(axis=0, initial=0.0),
            np.abs(runs.within_BT).max(axis=0, initial=0.0),
        )

    def near(self, relevance_BT: F64) -> F64:
        """Predictions as they are among the runs, and less and less of them beyond."""
        far_BT = np.maximum(np.abs(relevance_BT) / np.maximum(self.farthest_T, TINY), 1.0)
        return np.asarray(relevance_BT / far_BT * (1.0 + np.log(far_BT)))

    def edge(self, share_BG: F64) -> F64:
        """Distance of shares from their mean over the runs, (B, 1): 1 is the runs' root mean square, and the least."""
        mean_G, inverse = self.share_G
        return np.asarray(np.maximum(inverse * np.linalg.norm(share_BG - mean_G, axis=1, keepdims=True), 1.0))

    def step(self, at: SubsetFeatures, part: float) -> SubsetFeatures:
        """A small part of what each feature varies by over the runs; 0 where it does not vary."""
        (_, inverse_T), (_, inverse_TM), (_, inverse) = self.relevance_T, self.kernel_TM, self.sketch_D
        return SubsetFeatures(
            part * (at.share_BG + 1 / max(at.share_BG.shape[1], 1)),
            part * inverse_of(inverse_T)[None],
            part * inverse_of(inverse_TM)[None],
            np.full_like(at.sketch_BD, part * inverse_of(np.array([inverse]))[0]),
            part * inverse_of(inverse_T)[None],
        )

    def measure(self, features: SubsetFeatures) -> SubsetFeatures:
        (mean_T, inverse_T), (mean_TM, inverse_TM), (mean_D, inverse) = self.relevance_T, self.kernel_TM, self.sketch_D
        beyond_BT = WITHIN_SD * np.maximum(np.abs(features.within_BT) - self.within_T, 0.0)
        less_BT, more_BT = features.relevance_BT - beyond_BT, features.relevance_BT + beyond_BT
        return SubsetFeatures(
            features.share_BG,
            (self.near(features.relevance_BT) - mean_T) * inverse_T,
            (features.kernel_BTM - mean_TM) * inverse_TM,
            (features.sketch_BD - mean_D) * inverse,
            (self.near(more_BT) - self.near(less_BT)) / 2 * inverse_T,
        )


@dataclass(frozen=True, slots=True)
class Curves:
    """The parts of g that see shares, for one c and one pair of lengths, each with mean variance 1 over the runs."""

    c: float
    centre_G: F64  # mean of log(share + c) over the runs: where c is large, it is large against their differences
    spread: float  # its standard deviation
    lengths: tuple[float, float]  # additive, joint
    units: dict[str, float]

    @classmethod
    def from_shares(cls, share_nG: F64, shape: Sequence[float] | F64) -> Self:
        """Curves for runs.

        Args:
            share_nG: of the runs.
            shape: logarithms of c, the additive length and the joint length.
        """
        c = float(np.exp(shape[0])) / max(share_nG.shape[1], 1)
        seen_nG = np.log(share_nG + c)
        spread = float(np.sqrt(seen_nG.var(axis=0).mean())) if share_nG.size else 0.0
        lengths = (float(np.exp(shape[1])), float(np.exp(shape[2])))
        bare = cls(c, seen_nG.mean(axis=0), spread if spread > TINY else 1.0, lengths, dict.fromkeys(CURVES, 1.0))
        seen_nG = bare.seen(share_nG)
        variance = {k: float(np.diag(v).mean() - v.mean()) for k, v in bare.between(seen_nG, seen_nG).items()}
        return cls(
            c, bare.centre_G, bare.spread, lengths, {k: 1.0 / v if v > TINY else 0.0 for k, v in variance.items()}
        )

    def seen(self, share_BG: F64) -> F64:
        """log(share + c), less its mean over the runs, over its spread."""
        return np.asarray((np.log(share_BG + self.c) - self.centre_G) / self.spread)

    def between(self, seen_BG: F64, other_nG: F64) -> dict[str, F64]:
        """(B, n) covariance of two sets of subsets, by part."""
        n_slices = max(seen_BG.shape[1], 1)
        additive_Bn = np.zeros((len(seen_BG), len(other_nG)))
        square_Bn = np.zeros_like(additive_Bn)
        for g in range(seen_BG.shape[1]):
            part_Bn = (seen_BG[:, g, None] - other_nG[None, :, g]) ** 2
            square_Bn += part_Bn
            part_Bn *= -0.5 / self.lengths[0] ** 2
            additive_Bn += np.exp(part_Bn, out=part_Bn)
        square_Bn *= -0.5 / (n_slices * self.lengths[1] ** 2)
        found = {
            "linear": seen_BG @ other_nG.T / n_slices,
            "additive": additive_Bn / n_slices,
            "joint": np.exp(square_Bn, out=square_Bn),
        }
        return {name: part * self.units[name] for name, part in found.items()}

    def own(self, seen_BG: F64) -> dict[str, F64]:
        """(B,) variance of each part at subsets."""
        one_B = np.ones(len(seen_BG))
        linear_B = np.einsum("bg,bg->b", seen_BG, seen_BG) / max(seen_BG.shape[1], 1)
        found = {"linear": linear_B, "additive": one_B, "joint": one_B}
        return {name: part * self.units[name] for name, part in found.items()}


def linear_parts(own: SubsetFeatures, runs: SubsetFeatures) -> dict[str, F64]:
    """Covariances that are linear in what is known, by part: (1 or T, B, n). Both are measured by one ruler."""
    n_tasks, n_kernels = own.relevance_BT.shape[1], max(own.kernel_BTM.shape[2], 1)
    slope_TBn = np.einsum("bt,nt->tbn", own.relevance_BT, runs.relevance_BT)
    return {
        "slope": slope_TBn,
        "kernels": np.einsum("btm,ntm->tbn", own.kernel_BTM, runs.kernel_BTM) / n_kernels,
        "tasks": slope_TBn.sum(axis=0, keepdims=True) / max(n_tasks, 1),
        "sketch": (own.sketch_BD @ runs.sketch_BD.T)[None],
    }


def own_linear(own: SubsetFeatures) -> dict[str, F64]:
    """The same of each subset with itself: (1 or T, B)."""
    slope_TB = (own.relevance_BT**2).T
    return {
        "slope": slope_TB,
        "kernels": np.einsum("btm,btm->tb", own.kernel_BTM, own.kernel_BTM) / max(own.kernel_BTM.shape[2], 1),
        "tasks": slope_TB.mean(axis=0, keepdims=True),
        "sketch": np.einsum("bd,bd->b", own.sketch_BD, own.sketch_BD)[None],
    }


def covariance(numbers: Mapping[str, float], curves: Curves, own: SubsetFeatures, other: SubsetFeatures) -> F64:
    """(1 or T, B, n) covariance of g between two sets of measured subsets."""
    curved = curves.between(curves.seen(own.share_BG), curves.seen(other.share_BG))
    return add_parts(numbers, linear_parts(own, other) | {name: part[None] for name, part in curved.items()})


def add_parts(numbers: Mapping[str, float], parts: Mapping[str, F64]) -> F64:
    """The parts by their variances; one copy where no part differs between tasks."""
    nothing = np.zeros((1, *parts["tasks"].shape[1:])) if "tasks" in parts else np.zeros((1, 1, 1))
    return np.asarray(sum((numbers[name] * part for name, part in parts.items() if numbers[name]), nothing))


def inverse_of(spread: F64) -> F64:
    return np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > TINY)
