"""What the values of a label are worth: mean effect, and the change if a value is dropped or doubled.

A target's units are a sample of what the target stands for, so units are what is resampled for the intervals: a task's
effect is a mean over units, in a unit of measurement that stays fixed (geometry is the same for all units). An
interval says how far a change would move with other units of the same kind; it says nothing of how well predictions
agree with retraining.
Shape letters: G slices, E units, T targets, R resamples.
"""

from dataclasses import dataclass

import numpy as np

from grasp.predict.geometry import SketchSums
from grasp.predict.label_slices import LabelSlices
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.relevance import relevance_blocks
from grasp.predict.row_arrays import F64, RowArrays
from grasp.predict.row_sums import BlockSums
from grasp.seeds import bootstrap_weights

RESAMPLES = 1_000
TAILS = (0.025, 0.975)
DROPPED, DOUBLED = -1.0, 1.0
SIMILAR = ("hidden", "residual")  # sketches by which redundancy is told


@dataclass(frozen=True, slots=True)
class SliceEffects:
    """What every slice of one label is worth: (G, T) each, but for redundancy, which has no target."""

    sums: SubsetSums  # of the slices
    effect_GT: F64  # mean over the rows of the slice; helps or hurts: above or below the corpus average
    dropped_GT: F64  # change against the whole corpus; nan where nothing would be left
    doubled_GT: F64
    redundancy_G: F64 | None  # cosine of the sketch sum to that of all other rows; None without sketches


def slice_effects(predictor: Predictor, slices: LabelSlices) -> SliceEffects:
    """What dropping, and doubling, each slice changes; the cost is linear in the slices."""
    sums, corpus = predictor.sums(slices.indicators()), predictor.whole()
    rows_G = sums.mass.retained_B
    dropped_GT = predictor.change_of(sums.from_whole(corpus, DROPPED))
    dropped_GT[rows_G == predictor.n_rows] = np.nan
    return SliceEffects(
        sums=sums,
        effect_GT=np.asarray(sums.effect_BT / rows_G[:, None]),
        dropped_GT=dropped_GT,
        doubled_GT=predictor.change_of(sums.from_whole(corpus, DOUBLED)),
        redundancy_G=_redundancy(sums, corpus),
    )


def dropped_intervals(
    artifact: RowArrays, predictor: Predictor, effects: SliceEffects, slices: LabelSlices, *, seed: int = 0
) -> tuple[F64, F64]:
    """95 % interval of each slice's `dropped`, low and high, (G, T); nan where a target has a single unit.

    Cost: one more pass over the relevance of every kernel; memory: slices x units.
    """
    n_slices = len(slices.slices)
    without = effects.sums.from_whole(predictor.whole(), DROPPED)
    part_GE = _unit_parts(artifact, predictor, slices)
    mean_E = part_GE.sum(axis=0) / predictor.n_rows
    rest_GE = np.outer(effects.sums.mass.retained_B, mean_E) - part_GE  # all other rows, counted from the mean
    offset_E = mean_E if predictor.protocol.weighting == "count" else np.zeros_like(mean_E)
    change_GE = predictor.relative(rest_GE, offset_E, without.mass)
    geometry_G = predictor.geometry_change(without)
    bounds = np.full((2, len(predictor.targets), n_slices), np.nan)
    stops = np.cumsum(predictor.units.counts_T)
    for t, (start, stop) in enumerate(zip(stops - predictor.units.counts_T, stops, strict=True)):
        if stop - start > 1:
            weights_RE = bootstrap_weights(int(stop - start), resamples=RESAMPLES, seed=seed) / (stop - start)
            change_GR = predictor.task.gain_C[t] * (change_GE[:, start:stop] @ weights_RE.T)
            bounds[:, t] = np.quantile(change_GR, TAILS, axis=1) + geometry_G
    empty_G = effects.sums.mass.retained_B == predictor.n_rows
    bounds[:, :, empty_G] = np.nan
    return bounds[0].T, bounds[1].T


def _unit_parts(artifact: RowArrays, predictor: Predictor, slices: LabelSlices) -> F64:
    """Sums over slices of what each unit adds to the effect of its task, times the task's units: (G, E)."""
    units, negative = predictor.units, predictor.protocol.negative
    sums = BlockSums(slices.indicators())
    out_GE = np.zeros((len(slices.slices), len(units.columns_E)))
    for kernel, share_T in predictor.task.shares.items():
        part_GE = np.zeros_like(out_GE)
        for start, block in relevance_blocks(artifact, kernel, units.columns_E, negative):
            part_GE += sums.product(start, block)
        out_GE += part_GE * (units.of_task(share_T) * predictor.unit_scales[kernel])
    return out_GE


def _redundancy(slices: SubsetSums, corpus: SubsetSums) -> F64 | None:
    """Cosine of each slice's sketch sum to the sum of all other rows, (G,); NaN where either is zero."""
    halves = [half for half in SIMILAR if half in slices.sketch]
    if not halves:
        return None
    slice_GD, corpus_1D = (_joined([of.sketch[half] for half in halves]) for of in (slices, corpus))
    rest_GD = corpus_1D - slice_GD
    norm_G = np.linalg.norm(slice_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
    floor = 1e-12 * np.linalg.norm(slice_GD, axis=1) ** 2
    product_G = np.einsum("gd,gd->g", slice_GD, rest_GD)
    return np.asarray(np.divide(product_G, norm_G, out=np.full_like(norm_G, np.nan), where=norm_G > floor))


def _joined(parts: list[SketchSums]) -> F64:
    return np.concatenate([part.total_BD for part in parts], axis=1)
