"""Agreement of candidate protocols with development results, and its standard error by the bootstrap.

Start with `measure_agreement`. Two criteria measure the agreement of predicted with realized utilities over subsets:

    task_rho    Spearman's rho between predicted and realized utility of the task, or
    mean_lds    the mean over the units of the task of the rho of each unit, which is several times less noisy.

Shape letters: B subsets, C candidates, E columns of one target (its units, or the task), T targets, R resamples.
"""

from collections.abc import Sequence

import numpy as np

from grasp.arrays import F64, ratio
from grasp.errors import ProtocolError
from grasp.paper.candidates import Candidate, Criterion
from grasp.paper.development_runs import Development
from grasp.runs.metrics import mean_defined, rank_correlations
from grasp.runs.predictions import WHOLE_TASK
from grasp.seeds import bootstrap_weights, stream

COLUMNS_PER_BLOCK = 2_048  # columns of predictions that are ranked at once, to bound the memory


def measure_agreement(
    development: Development, candidates: Sequence[Candidate], criterion: Criterion, *, resamples: int
) -> F64:
    """Return the criterion of every candidate on every target, (C, T, 1 + R): the estimate, then its resamples.

    nan if undefined: predictions are constant (for mean_lds, those of every unit).

    Args:
        development: runs and their artifact.
        candidates: candidates whose agreement is measured.
        criterion: `task_rho` or `mean_lds`, see the module docstring.
        resamples: number of bootstrap resamples of the subsets, R.
    Raises:
        ProtocolError: realized utilities are constant.
    """
    utilities = development.runs.utilities()
    criterion = "task_rho" if WHOLE_TASK in utilities.unit_ids else criterion  # runs without results per unit
    per_unit = criterion == "mean_lds"
    realized = [utilities.select(name).values_BSE.mean(axis=1) for name in development.targets]  # (B, E) each
    if not per_unit:
        realized = [values_BE.mean(axis=1, keepdims=True) for values_BE in realized]
    constant = [
        name
        for name, values_BE in zip(development.targets, realized, strict=True)
        if not np.ptp(values_BE, axis=0).any()
    ]
    if constant:
        raise ProtocolError(
            f"{development.runs.path}: utilities of {constant} are constant, so protocols cannot be compared"
        )
    all_once_1B = np.ones((1, len(utilities.subset_ids)))
    resampled_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples)
    agreement_CTR = np.empty((len(candidates), len(development.targets), 1 + resamples))
    values = development.predictor.component_values(candidates, development.targets, per_unit=per_unit)
    position = {name: b for b, name in enumerate(next(iter(values.values())).subset_ids)}
    order = [position[name] for name in utilities.subset_ids]
    for t, realized_BE in enumerate(realized):
        block = max(1, COLUMNS_PER_BLOCK // realized_BE.shape[1])
        for start in range(0, len(candidates), block):
            group = slice(start, start + block)
            predicted = []
            for candidate in candidates[group]:
                value = values[candidate.settings]
                if per_unit:
                    is_unit_E = [name == value.targets[t] for name, _ in value.units]
                    predicted.append(value.predict_units(candidate)[order][:, is_unit_E])
                else:
                    predicted.append(value.predict_tasks(candidate)[order, t : t + 1])
            # all predictions at once, so that realized utilities are ranked only once
            pairs = [(0, 1 + c) for c in range(len(predicted))]
            for weights_RB, resample in ((all_once_1B, slice(1)), (resampled_RB, slice(1, None))):
                rho_CER = rank_correlations([realized_BE, *predicted], pairs, weights_RB)
                agreement_CTR[group, t, resample] = mean_defined(rho_CER, axis=1)
    return agreement_CTR


def standard_errors(resampled: Sequence[F64]) -> F64:
    """Return the standard error of the mean over all results of each candidate, (C,).

    Each bootstrap resample draws environments with replacement, and for each draw one of its resamples of subsets. The
    mean weights environments by their number of targets, like the estimate. Undefined resamples are ignored.

    Args:
        resampled: agreement (C, T, R) of each environment.
    """
    n_environments, n_resamples = len(resampled), resampled[0].shape[2]
    rng = stream(0, "selection", "environments")
    total_CR = np.zeros((len(resampled[0]), n_resamples))
    count_CR = np.zeros_like(total_CR)
    for _ in range(n_environments):
        drawn_R = (
            rng.integers(0, n_environments, size=n_resamples)
            if n_environments > 1
            else np.zeros(n_resamples, dtype=int)
        )
        resample_R = rng.permutation(n_resamples)
        for j, value_CTR in enumerate(resampled):
            is_drawn = drawn_R == j
            value = value_CTR[:, :, resample_R[is_drawn]]
            total_CR[:, is_drawn] += np.where(np.isfinite(value), value, 0.0).sum(axis=1)
            count_CR[:, is_drawn] += np.isfinite(value).sum(axis=1)
    mean_CR = ratio(total_CR, count_CR, undefined=np.nan)
    defined = [mean_R[np.isfinite(mean_R)] for mean_R in mean_CR]
    return np.array([mean_R.std(ddof=1) if len(mean_R) > 1 else np.inf for mean_R in defined])
