"""What protocols are chosen by: agreement with retraining on development results, plain and resampled.

    task_rho    Spearman's rho between predicted and realized utility of the task
    mean_lds    the mean over the task's units of each unit's own rho

A task's utility is the mean of its units', so one rho stands on as many numbers as there are subsets; the mean over
units says the same of hundreds of columns and is several times less noisy, which lets a selection tell protocols
apart that the task alone cannot.

Shape letters: B subsets, C candidates, E columns of one target (its units, or the task), T targets, R resamples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.errors import ProtocolError
from grasp.predict.row_arrays import F64
from grasp.runs.candidates import Candidate, Criterion
from grasp.runs.development import Development
from grasp.runs.environment import Utilities
from grasp.runs.metrics import mean_defined, rank_correlations
from grasp.runs.scored import Parts
from grasp.seeds import bootstrap_weights, stream

COLUMNS_AT_ONCE = 2_048


def agreement(
    one: Development, candidates: Sequence[Candidate], criterion: Criterion, *, resamples: int, seed: int
) -> F64:
    """Criterion of every candidate on every target, plain and then resampled, (C, T, 1 + R).

    nan where it is undefined: predictions that are constant, for mean_lds those of every unit.

    Raises:
        ProtocolError: realized utilities that are constant.
    """
    utilities = one.environment.utilities()
    realized = [_realized(utilities, name, criterion) for name in one.targets]
    flat = [name for name, values_BE in zip(one.targets, realized, strict=True) if not np.ptp(values_BE, axis=0).any()]
    if flat:
        raise ProtocolError(f"{one.environment.path}: utilities of {flat} are constant; no protocol can be told apart")
    plain_1B = np.ones((1, len(utilities.subset_ids)))
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples, seed=seed)
    out = np.empty((len(candidates), len(one.targets), 1 + resamples))
    for variant in dict.fromkeys(candidate.variant for candidate in candidates):
        own = [c for c, candidate in enumerate(candidates) if candidate.variant == variant]
        listed = [candidates[c] for c in own]
        parts = one.variants[variant].parts(listed, one.targets, per_unit=criterion == "mean_lds")
        order = _in_order(utilities.subset_ids, next(iter(parts.values())).subset_ids)
        for t, realized_BE in enumerate(realized):
            at_once = max(1, COLUMNS_AT_ONCE // realized_BE.shape[1])
            for start in range(0, len(own), at_once):
                group = own[start : start + at_once]
                chosen = [candidates[c] for c in group]
                predicted = [_predicted(parts[one.binding], one, t, criterion)[order] for one in chosen]
                out[group, t, :1] = _mean_rho(predicted, realized_BE, plain_1B)
                out[group, t, 1:] = _mean_rho(predicted, realized_BE, weights_RB)
    return out


def _mean_rho(predicted: Sequence[F64], realized_BE: F64, weights_RB: NDArray[np.floating[Any]]) -> F64:
    """Mean over columns of each prediction's rho, (C, R); the ranks of what was realized are made once."""
    pairs = [(0, 1 + c) for c in range(len(predicted))]
    return mean_defined(rank_correlations([realized_BE, *predicted], pairs, weights_RB), axis=1)


def _realized(utilities: Utilities, target: str, criterion: Criterion) -> F64:
    """Mean over seeds, (B, E) by units, or (B, 1) of the task."""
    values_BE = utilities.of(target).values_BSE.mean(axis=1)
    return np.asarray(values_BE if criterion == "mean_lds" else values_BE.mean(axis=1, keepdims=True))


def _predicted(parts: Parts, candidate: Candidate, target: int, criterion: Criterion) -> F64:
    if criterion == "task_rho":
        return parts.tasks_of(candidate)[:, target : target + 1]
    return parts.units_of(candidate)[:, [name == parts.targets[target] for name, _ in parts.units]]


def _in_order(wanted: Sequence[str], have: Sequence[str]) -> NDArray[np.int64]:
    position = {name: b for b, name in enumerate(have)}
    return np.array([position[name] for name in wanted], dtype=np.int64)


def standard_errors(resampled: Sequence[F64], seed: int) -> F64:
    """Standard error of each candidate's mean over all results, (C,); `resampled` has (C, T, R) an environment.

    A resample of environments takes, for each place, an environment at random and one of its resamples of subsets.
    Its mean weighs environments by their targets, as the plain mean does. A resample without a value is left out.
    """
    n_places, n_resamples = len(resampled), resampled[0].shape[2]
    rng = stream(seed, "selection", "environments")
    total_CR = np.zeros((len(resampled[0]), n_resamples))
    count_CR = np.zeros_like(total_CR)
    for _ in range(n_places):
        drawn_R = rng.integers(0, n_places, size=n_resamples) if n_places > 1 else np.zeros(n_resamples, dtype=int)
        which_R = rng.permutation(n_resamples)
        for j, value_CTR in enumerate(resampled):
            picked = drawn_R == j
            value = value_CTR[:, :, which_R[picked]]
            total_CR[:, picked] += np.where(np.isfinite(value), value, 0.0).sum(axis=1)
            count_CR[:, picked] += np.isfinite(value).sum(axis=1)
    mean_CR = np.divide(total_CR, count_CR, out=np.full_like(total_CR, np.nan), where=count_CR > 0)
    return np.array([_deviation(row) for row in mean_CR])


def _deviation(values: F64) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else np.inf
