"""What each slice is worth, with intervals over the units of the target.

A target's units are a sample of what the target stands for, so units are what is resampled: the effect of a slice is
a mean over units (plus geometry, which is the same for all of them), in the fixed unit of measurement of the
prediction. The interval says how far the effect would move with other units of the same kind; it says nothing of how
well predictions agree with retraining.
Shape letters: G slices, E units, T targets, R resamples.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from grasp.predict.geometry import BlockSums, SubsetMass, subset_relevance
from grasp.predict.held import relevance_sums
from grasp.predict.label_slices import LabelSlices
from grasp.predict.scorer import Scorer
from grasp.predict.slice_model import SliceModel
from grasp.predict.source import F64, FeatureSource, relevance_blocks
from grasp.seeds import bootstrap_weights

RESAMPLES = 1_000
TAILS = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class SliceEffects:
    """Changes of utility against the whole corpus, (G, T), in standard deviations over the calibration family."""

    dropped_GT: F64
    low_GT: F64  # 95 % interval of `dropped_GT`; nan where a target has a single unit
    high_GT: F64
    doubled_GT: F64
    relevance_GT: F64  # mean over the rows of the slice, in the unit of the relevance
    kernel: str  # whose mean that is


def slice_effects(
    source: FeatureSource, scorer: Scorer, model: SliceModel, slices: LabelSlices, *, seed: int = 0
) -> SliceEffects:
    """Drop and double every slice.

    Args:
        scorer: the one that `model` was made of; with units, where tasks are means of standardised units.
    Cost: one more pass over the relevance of every kernel, and one over the first.
    """
    identity_GG = np.eye(len(slices.slices))
    dropped_GG = 1.0 - identity_GG
    low_GT, high_GT = _intervals(source, scorer, model, slices, seed)
    kernel = next(iter(model.kernels))
    (sum_GT,) = relevance_sums(source, kernel, scorer.units, [slices.indicators()])
    return SliceEffects(
        dropped_GT=model.changes(dropped_GG),
        low_GT=low_GT,
        high_GT=high_GT,
        doubled_GT=model.changes(1.0 + identity_GG),
        relevance_GT=sum_GT / model.rows_G[:, None],
        kernel=kernel,
    )


def _intervals(
    source: FeatureSource, scorer: Scorer, model: SliceModel, slices: LabelSlices, seed: int
) -> tuple[F64, F64]:
    dropped_GG = 1.0 - np.eye(len(slices.slices))
    geometry_G = model.geometry_change(dropped_GG)
    part_GE = _unit_changes(source, scorer, model, slices)
    bounds = np.full((2, *model.whole_T.shape, len(geometry_G)), np.nan)
    stops = np.cumsum(scorer.units.counts_T)
    for t, (start, stop) in enumerate(zip(stops - scorer.units.counts_T, stops, strict=True)):
        if stop - start > 1:
            weights_RE = bootstrap_weights(int(stop - start), resamples=RESAMPLES, seed=seed) / (stop - start)
            change_GR = np.stack([part[t] @ weights_RE.T for part in part_GE.values()]).sum(axis=0)
            bounds[:, t] = np.quantile(change_GR, TAILS, axis=1) + geometry_G
    return bounds[0].T, bounds[1].T


def _unit_changes(
    source: FeatureSource, scorer: Scorer, model: SliceModel, slices: LabelSlices
) -> Mapping[str, list[F64]]:
    """By kernel and target: what dropping each slice changes through each unit, (G, E); the term is the mean over E."""
    indicators = slices.indicators()
    size_G = model.rows_G
    mass = SubsetMass(size_G.sum() - size_G, size_G, int(size_G.sum()))
    stops = np.cumsum(scorer.units.counts_T)[:-1]
    out: dict[str, list[F64]] = {}
    for kernel, component in model.kernels.items():
        sums = BlockSums(indicators)
        sum_GE = np.zeros((len(size_G), len(scorer.units.columns_E)))
        for start, block in relevance_blocks(source, kernel, scorer.units.columns_E, scorer.protocol.negative):
            sum_GE += sums.product(start, block)
        sum_GE /= _divisor(scorer, kernel)
        total_E = sum_GE.sum(axis=0)
        rest_GE = subset_relevance(total_E - sum_GE, total_E, mass, model.side, model.weighting)
        whole = SubsetMass(np.array([size_G.sum()]), np.zeros(1), mass.n_rows)
        change_GE = rest_GE - subset_relevance(total_E[None], total_E, whole, model.side, model.weighting)
        scale_T = component.weight * component.inverse_T
        out[kernel] = [part * scale for part, scale in zip(np.split(change_GE, stops, axis=1), scale_T, strict=True)]
    return out


def _divisor(scorer: Scorer, kernel: str) -> F64 | float:
    """What every unit is divided by before a task takes their mean."""
    if scorer.protocol.standardize.task == "mean_relevance":
        return 1.0
    assert scorer.unit is not None
    moments = scorer.unit.moments[kernel]
    return np.where(moments.varies_E, moments.std_E, np.inf)
