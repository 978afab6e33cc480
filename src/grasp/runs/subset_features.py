"""Features of subsets of a corpus: the inputs of the Gaussian process of `grasp.runs.gaussian_process`.

`SubsetFeatures` holds what is known of a subset before a model is trained on it, and `FeatureScales` standardizes it
over the training runs. docs/glossary.md defines the terms: relevance, slice, sketch, runs. "Kernel" means a way to
compute relevance, not the covariance function of a Gaussian process.

Shape letters: B subsets, n runs, G slices of all labels, T tasks, M relevance kernels, D sketch width, P values of a
feature vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from grasp.arrays import F64, Integers, ratio

TINY = 1e-12  # smaller standard deviations and variances count as 0
# Standard deviation of the factor by which `grasp.runs.calibration` multiplies the deviations of rows from the mean of
# their slice: experiments/exposure.
WITHIN_SLICE_SD = 0.4


@dataclass(frozen=True, slots=True)
class SubsetFeatures:
    """Features of B subsets that are known before training: means over the rows of each subset.

    Attributes:
        share_BG: shares of the slices of all labels, concatenated; no columns without labels.
        relevance_BT: change of each task that the artifact predicts from relevance; 0 without an artifact.
        kernel_BTM: mean relevance of each kernel.
        sketch_BD: mean sketch.
        within_slice_BT: the amount of `relevance_BT` that is due to deviations of rows from the mean of their slice.
    """

    share_BG: F64
    relevance_BT: F64
    kernel_BTM: F64
    sketch_BD: F64
    within_slice_BT: F64

    @classmethod
    def from_shares(cls, share_BG: F64, n_tasks: int) -> Self:
        """Return the features of mixtures without an artifact."""
        n = len(share_BG)
        share_BG, zero_BT = np.asarray(share_BG, np.float64), np.zeros((n, n_tasks))
        return cls(share_BG, zero_BT, np.zeros((n, n_tasks, 0)), np.zeros((n, 0)), zero_BT)

    @classmethod
    def concatenate(cls, blocks: "Sequence[SubsetFeatures]") -> Self:
        """Concatenate blocks of subsets."""
        return cls(*map(np.concatenate, zip(*(block._arrays() for block in blocks), strict=True)))

    def __len__(self) -> int:
        return len(self.share_BG)

    def _arrays(self) -> list[F64]:
        return [getattr(self, field.name) for field in fields(self)]

    def flat(self) -> F64:
        """Return all features of each subset as a vector, (B, P)."""
        return np.concatenate([array.reshape(len(self), -1) for array in self._arrays()], axis=1)

    def unflatten(self, flat_BP: F64) -> "SubsetFeatures":
        """Invert `flat`, for features of the same shapes as these."""
        shapes = [array.shape[1:] for array in self._arrays()]
        columns = np.split(flat_BP, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1], axis=1)
        return SubsetFeatures(
            *(array.reshape(len(array), *shape) for array, shape in zip(columns, shapes, strict=True))
        )

    def take(self, index: Integers | slice) -> "SubsetFeatures":
        """Return the features of the subsets at these positions."""
        return SubsetFeatures(*(array[index] for array in self._arrays()))


@dataclass(frozen=True, slots=True)
class Standardization:
    """Subtract a mean and multiply by an inverse standard deviation.

    Attributes:
        mean: mean over the runs, of the shape of one subset's feature.
        inverse_std: per value or one for all values; 0 if constant over the runs, so that the feature has no effect.
    """

    mean: F64
    inverse_std: F64

    @classmethod
    def of_values(cls, values: F64) -> Self:
        """Standardize each value on its own."""
        return cls(values.mean(axis=0), ratio(1.0, values.std(axis=0), minimum=TINY))

    @classmethod
    def of_vectors(cls, values_nP: F64) -> Self:
        """Divide vectors by the root mean square of their distance from the mean, which keeps angles."""
        return cls(values_nP.mean(axis=0), ratio(1.0, np.sqrt(values_nP.var(axis=0).sum()), minimum=TINY))

    def apply(self, values: F64) -> F64:
        """Return the standardized values."""
        return (values - self.mean) * self.inverse_std


@dataclass(frozen=True, slots=True)
class FeatureScales:
    """Standardize features to mean 0 and mean square 1 over the runs; shares are not changed.

    Selected subsets are extreme, and trained models realized only about half of a linear extrapolation of r, the
    predicted change `relevance_BT` (experiments/exposure). A prediction beyond the range of the runs is therefore
    compressed to sign(r) range (1 + log(|r| / range)), where range is the largest |r| of a run. If the rows of a subset
    were selected within slices more strongly than those of any run, this adds to the standard deviation.

    Attributes:
        relevance: of `relevance_BT`, per task.
        kernel: of `kernel_BTM`, per task and kernel.
        sketch: of `sketch_BD`, with one standard deviation for all coordinates.
        share: of `share_BG`, with one standard deviation for all slices.
        relevance_range_T: largest absolute `relevance_BT` of a run.
        within_slice_range_T: largest absolute `within_slice_BT` of a run.
    """

    relevance: Standardization
    kernel: Standardization
    sketch: Standardization
    share: Standardization
    relevance_range_T: F64
    within_slice_range_T: F64

    @classmethod
    def from_runs(cls, runs: SubsetFeatures) -> Self:
        """Compute means, standard deviations and ranges over the runs."""
        return cls(
            relevance=Standardization.of_values(runs.relevance_BT),
            kernel=Standardization.of_values(runs.kernel_BTM),
            sketch=Standardization.of_vectors(runs.sketch_BD),
            share=Standardization.of_vectors(runs.share_BG),
            relevance_range_T=np.abs(runs.relevance_BT).max(axis=0, initial=0.0),
            within_slice_range_T=np.abs(runs.within_slice_BT).max(axis=0, initial=0.0),
        )

    def compress(self, relevance_BT: F64) -> F64:
        """Compress predictions beyond the range of the runs logarithmically; others are not changed."""
        ratio_BT = np.maximum(np.abs(relevance_BT) / np.maximum(self.relevance_range_T, TINY), 1.0)
        return np.asarray(relevance_BT / ratio_BT * (1.0 + np.log(ratio_BT)))

    def extrapolation_factor(self, share_BG: F64) -> F64:
        """Return the distance of shares from the mean of the runs over the root mean square of the runs, (B, 1).

        It is at least 1.
        """
        distance_B1 = np.linalg.norm(share_BG - self.share.mean, axis=1, keepdims=True)
        return np.asarray(np.maximum(self.share.inverse_std * distance_B1, 1.0))

    def transform(self, features: SubsetFeatures) -> SubsetFeatures:
        """Standardize features; `within_slice_BT` becomes the additional standard deviation of r."""
        # One standard deviation of r, from the part of the deviations within slices that exceeds that of any run. It is
        # compressed like r itself, by half the difference of the compressed bounds.
        std_BT = WITHIN_SLICE_SD * np.maximum(np.abs(features.within_slice_BT) - self.within_slice_range_T, 0.0)
        low_BT, high_BT = features.relevance_BT - std_BT, features.relevance_BT + std_BT
        return SubsetFeatures(
            share_BG=features.share_BG,
            relevance_BT=self.relevance.apply(self.compress(features.relevance_BT)),
            kernel_BTM=self.kernel.apply(features.kernel_BTM),
            sketch_BD=self.sketch.apply(features.sketch_BD),
            within_slice_BT=(self.compress(high_BT) - self.compress(low_BT)) / 2 * self.relevance.inverse_std,
        )
