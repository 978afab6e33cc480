"""Covariance function of the Gaussian process of `grasp.runs.gaussian_process`, a sum of components.

Each component of g, the correction of the prediction r, is one way in which r may be wrong:

    slope      linear in r: the task depends more or less strongly on its relevance
    kernels    linear in the relevance of each kernel: another kernel predicts this model better
    tasks      linear in the predictions for all tasks: tasks have effects in common
    sketch     linear in the mean sketch: the errors of similar rows are similar
    straight   linear in the shares of the slices of every label; only this trend continues far from the runs
    linear     linear in f(share) = log(share + offset)
    additive   a smooth function of each f(share): the value of a slice saturates
    joint      a smooth function of all f(share): slices can substitute for each other

The smooth functions have a squared-exponential covariance. Each component is normalized by its mean variance over the
runs, so that a prior on its variance is a prior on the fraction of the variation that it explains. Start with
`Covariance`.

Shape letters: B subsets, n runs or other subsets, G slices of all labels, T tasks. C is the number of covariance
matrices: 1 if no component depends on the task, else T.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from grasp.arrays import F64
from grasp.runs.subset_features import TINY, SubsetFeatures

SHARE_COMPONENTS = ("straight", "linear", "additive", "joint")  # the components that depend on shares
# Hyperparameters of these components other than variances: c is the offset in f relative to an even share, the length
# scales are relative to the standard deviation of f(share) over the runs.
SHAPE_PARAMETERS = ("c", "additive length", "joint length")


@dataclass(frozen=True, slots=True)
class Covariance:
    """Covariance of g between subsets: the components, each times its variance.

    Attributes:
        variances: variance of each component, by name; other names, such as `SHAPE_PARAMETERS`, are ignored.
        of_shares: the components that depend on shares.
    """

    variances: Mapping[str, float]
    of_shares: "ShareCovariance"

    def between(self, subsets: SubsetFeatures, others: SubsetFeatures) -> F64:
        """Return the covariance between two sets of subsets with standardized features, (C, B, n)."""
        of_shares = self.of_shares.between(subsets.share_BG, others.share_BG)
        components = linear_covariances(subsets, others) | {name: k_Bn[None] for name, k_Bn in of_shares.items()}
        return weighted_sum(self.variances, components)

    def variance(self, subsets: SubsetFeatures) -> F64:
        """Return the variance at each subset, (B, C): the diagonal of `between`."""
        slope_TB = (subsets.relevance_BT**2).T
        n_kernels = max(subsets.kernel_BTM.shape[2], 1)
        components = {
            "slope": slope_TB,
            "kernels": np.einsum("btm,btm->tb", subsets.kernel_BTM, subsets.kernel_BTM) / n_kernels,
            "tasks": slope_TB.mean(axis=0, keepdims=True),
            "sketch": np.einsum("bd,bd->b", subsets.sketch_BD, subsets.sketch_BD)[None],
        }
        of_shares = self.of_shares.variance(subsets.share_BG)
        components |= {name: variance_B[None] for name, variance_B in of_shares.items()}
        return np.asarray(weighted_sum(self.variances, components).T)

    def difference_variance(self, subsets: SubsetFeatures, corpus: SubsetFeatures) -> F64:
        """Return the variance of the difference of g from its value at the corpus, (B, C).

        Var(g_b - g_0) = Var g_b + Var g_0 - 2 Cov(g_b, g_0); rounding may make it slightly negative near the corpus.
        """
        cross_CB1 = self.between(subsets, corpus)
        difference_BC = self.variance(subsets) + self.variance(corpus) - 2 * cross_CB1[:, :, 0].T
        return np.asarray(np.maximum(difference_BC, 0.0))


@dataclass(frozen=True, slots=True)
class ShareCovariance:
    """Components of the covariance that depend on shares, each with mean variance 1 over the runs.

    Attributes:
        offset: added to each share in f(share) = log(share + offset).
        mean_G: mean shares of the runs.
        log_mean_G: mean of f over the runs. It is subtracted because for a large offset it is large relative to the
            differences between runs.
        log_std: root mean square over slices of the standard deviation of f over the runs.
        lengths: length scales of the components additive and joint, in units of `log_std`.
        factors: normalization factor of each component.
    """

    offset: float
    mean_G: F64
    log_mean_G: F64
    log_std: float
    lengths: tuple[float, float]
    factors: dict[str, float]

    @classmethod
    def from_shares(cls, share_nG: F64, log_shape: Sequence[float] | F64) -> Self:
        """Normalize the components over the runs.

        Args:
            share_nG: shares of the runs.
            log_shape: logarithms of `SHAPE_PARAMETERS`.
        """
        offset = float(np.exp(log_shape[0])) / max(share_nG.shape[1], 1)
        log_nG = np.log(share_nG + offset)
        log_std = float(np.sqrt(log_nG.var(axis=0).mean())) if share_nG.size else 0.0
        log_std = log_std if log_std > TINY else 1.0
        lengths = (float(np.exp(log_shape[1])), float(np.exp(log_shape[2])))
        factors = dict.fromkeys(SHARE_COMPONENTS, 1.0)
        unnormalized = cls(offset, share_nG.mean(axis=0), log_nG.mean(axis=0), log_std, lengths, factors)
        # The mean variance over the runs about their mean is tr(K) / n - 1'K 1 / n^2: a constant offset of a component
        # is part of the level, and does not count.
        covariances = unnormalized.between(share_nG, share_nG)
        variances = {name: float(np.diag(k_nn).mean() - k_nn.mean()) for name, k_nn in covariances.items()}
        return replace(unnormalized, factors={name: 1.0 / v if v > TINY else 0.0 for name, v in variances.items()})

    def transform(self, share_BG: F64) -> F64:
        """Return f(share) = log(share + offset), standardized over the runs."""
        return np.asarray((np.log(share_BG + self.offset) - self.log_mean_G) / self.log_std)

    def between(self, share_BG: F64, other_share_nG: F64) -> dict[str, F64]:
        """Return the covariance between two sets of subsets, (B, n), by component."""
        log_BG, other_nG = self.transform(share_BG), self.transform(other_share_nG)
        n_slices = max(log_BG.shape[1], 1)
        additive_length, joint_length = self.lengths
        additive_Bn = np.zeros((len(log_BG), len(other_nG)))
        square_Bn = np.zeros_like(additive_Bn)
        # Slice by slice and in place: an array of shape (B, n, G) would not fit memory. Squared differences are not
        # expanded to |x|^2 - 2 x y + |y|^2, which cancels for runs that are nearly equal.
        for g in range(log_BG.shape[1]):
            term_Bn = (log_BG[:, g, None] - other_nG[None, :, g]) ** 2
            square_Bn += term_Bn
            term_Bn *= -0.5 / additive_length**2
            additive_Bn += np.exp(term_Bn, out=term_Bn)
        square_Bn *= -0.5 / (n_slices * joint_length**2)
        components = {
            "straight": (share_BG - self.mean_G) @ (other_share_nG - self.mean_G).T,
            "linear": log_BG @ other_nG.T / n_slices,
            "additive": additive_Bn / n_slices,
            "joint": np.exp(square_Bn, out=square_Bn),
        }
        return {name: k_Bn * self.factors[name] for name, k_Bn in components.items()}

    def variance(self, share_BG: F64) -> dict[str, F64]:
        """Return the variance at each subset, (B,), by component: the diagonal of `between`."""
        log_BG = self.transform(share_BG)
        ones_B = np.ones(len(log_BG))
        linear_B = np.einsum("bg,bg->b", log_BG, log_BG) / max(log_BG.shape[1], 1)
        straight_B = ((share_BG - self.mean_G) ** 2).sum(axis=1)
        components = {"straight": straight_B, "linear": linear_B, "additive": ones_B, "joint": ones_B}
        return {name: variance_B * self.factors[name] for name, variance_B in components.items()}


def linear_covariances(subsets: SubsetFeatures, others: SubsetFeatures) -> dict[str, F64]:
    """Return the components linear in standardized features other than shares, (1 or T, B, n), by component.

    Standardization gives the features mean square 1 over the runs, so these components need no further normalization.
    """
    n_tasks, n_kernels = subsets.relevance_BT.shape[1], max(subsets.kernel_BTM.shape[2], 1)
    slope_TBn = np.einsum("bt,nt->tbn", subsets.relevance_BT, others.relevance_BT)
    return {
        "slope": slope_TBn,
        "kernels": np.einsum("btm,ntm->tbn", subsets.kernel_BTM, others.kernel_BTM) / n_kernels,
        "tasks": slope_TBn.sum(axis=0, keepdims=True) / max(n_tasks, 1),
        "sketch": (subsets.sketch_BD @ others.sketch_BD.T)[None],
    }


def weighted_sum(variances: Mapping[str, float], components: Mapping[str, F64]) -> F64:
    """Return the sum of the components times their variances, (C, ...); components with variance 0 are skipped.

    Skipping keeps C at 1 if the components that depend on the task have no variance.
    """
    zero = np.zeros((1, *components["tasks"].shape[1:])) if "tasks" in components else np.zeros((1, 1, 1))
    return np.asarray(
        sum((variances[name] * component for name, component in components.items() if variances[name]), zero)
    )
