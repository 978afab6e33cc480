"""Scores against retraining: mean LDS and task rho of every method, and of its difference to the built-in rule.

Shape letters: B subsets, E units, N rows, R resamples, M methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.predict.predictor import downweight_negative
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Utilities
from grasp.seeds import bootstrap_weights

RESAMPLES = 1_000
MIN_PAIRS = 3  # subsets with two seeds, below which nothing is said of noise


@dataclass(frozen=True)
class Method:
    """Kernels (N, E) that are added up after each is divided by its standard deviation over rows."""

    kernels: tuple[F64, ...]
    negative: float | tuple[float, ...] = 1.0  # what negative scores are multiplied by, of all or of each
    weights: tuple[float, ...] = ()
    tokens_N: F64 | None = None  # rows count in proportion to these; None: all alike
    of_task: bool = False  # but for the first kernel a unit's score is the mean over the units of its target

    def predict(self, share_BN: F64, targets: Sequence[str]) -> tuple[F64, F64]:
        """Predicted utility of units, (B, E), and of targets, (B, T), of subsets given as shares that add up to 1.

        A target's is the mean of its units' scores, standardised over rows as a whole, as the default protocol has it.
        """
        if self.tokens_N is not None:
            share_BN = share_BN * self.tokens_N
            share_BN = share_BN / share_BN.sum(axis=1, keepdims=True)
        names = list(dict.fromkeys(targets))
        member_ET = np.array([[target == name for name in names] for target in targets], dtype=np.float64)
        units_BE, tasks_BT = np.zeros((len(share_BN), len(targets))), np.zeros((len(share_BN), len(names)))
        n = len(self.kernels)
        negatives = self.negative if isinstance(self.negative, tuple) else (self.negative,) * n
        parts = zip(self.kernels, self.weights or (1.0,) * n, negatives, strict=True)
        for k, (kernel_NE, weight, negative) in enumerate(parts):
            score_NE = downweight_negative(kernel_NE, negative)
            task_NT = _scaled(score_NE @ (member_ET / member_ET.sum(axis=0)))
            tasks_BT += weight * (share_BN @ task_NT)
            units_BE += weight * (share_BN @ (task_NT @ member_ET.T if self.of_task and k else _scaled(score_NE)))
        return units_BE, tasks_BT


@dataclass(frozen=True)
class Predictions:
    """What is predicted already, of subsets in the order of the environment; `predict` as a method has it."""

    units_BE: F64
    tasks_BT: F64

    def predict(self, share_BN: F64, targets: Sequence[str]) -> tuple[F64, F64]:
        return self.units_BE, self.tasks_BT


def _scaled(score_NE: F64) -> F64:
    """Divided by the standard deviation over rows; a column without any stays zero."""
    deviation_E = score_NE.std(axis=0)
    return np.divide(score_NE - score_NE.mean(axis=0), deviation_E, out=np.zeros_like(score_NE), where=deviation_E > 0)


def compare(
    methods: Mapping[str, Method | Predictions],
    utilities: Utilities,
    share_BN: F64,
    *,
    base: str,
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """A record a method: estimate and 95 % interval over subsets of mean LDS (mean over targets of the mean over units)
    and of task rho, the share of units with rho above 0, mean LDS target by target, and the difference to `base`.
    """
    return records(agreements(methods, utilities, share_BN, resamples), utilities, base)


def agreements(
    methods: Mapping[str, "Method | Predictions"], utilities: Utilities, share_BN: F64, resamples: int = RESAMPLES
) -> dict[str, "Agreement"]:
    """Of every method, by the same resamples of subsets."""
    weights_RB = np.concatenate([np.ones((1, len(share_BN))), bootstrap_weights(len(share_BN), resamples=resamples)])
    return {name: agreement(method, utilities, share_BN, weights_RB) for name, method in methods.items()}


def records(agreements: Mapping[str, "Agreement"], utilities: Utilities, base: str) -> list[dict[str, Any]]:
    """See `compare`."""
    names = list(dict.fromkeys(utilities.targets))
    lds = {name: agreement.lds_TR.mean(axis=0) for name, agreement in agreements.items()}
    return [
        {
            "method": name,
            "mean_lds": _interval(lds[name], -1.0, 1.0),
            "task_rho": _interval(agreement.task_R, -1.0, 1.0),
            "positive": round(agreement.positive, 4),
            "mean_lds_of_target": {
                t: round(float(value), 4) for t, value in zip(names, agreement.lds_TR[:, 0], strict=True)
            },
            "difference": _interval(lds[name] - lds[base], -2.0, 2.0) if name != base else None,
        }
        for name, agreement in agreements.items()
    ]


@dataclass(frozen=True)
class Agreement:
    """Agreement of a method with the runs: on the data in the first column, then resampled over subsets."""

    lds_TR: F64  # mean over the units of each target
    task_R: F64  # mean over targets
    positive: float  # share of units with rho above 0


def agreement(
    method: Method | Predictions, utilities: Utilities, share_BN: F64, weights_RB: NDArray[np.floating[Any]]
) -> Agreement:
    """Of one method; `weights_RB` says how often each resample draws each subset."""
    realized_BE, targets = utilities.values_BSE.mean(axis=1), list(utilities.targets)
    of_target_TE = [[target == name for target in targets] for name in dict.fromkeys(targets)]
    units_BE, tasks_BT = method.predict(share_BN, targets)
    task_BT = np.stack([realized_BE[:, of_target_E].mean(axis=1) for of_target_E in of_target_TE], axis=1)
    rho_ER = rank_correlations([units_BE, realized_BE], [(0, 1)], weights_RB)[0]
    return Agreement(
        np.stack([np.nanmean(rho_ER[of_target_E], axis=0) for of_target_E in of_target_TE]),
        np.nanmean(rank_correlations([tasks_BT, task_BT], [(0, 1)], weights_RB)[0], axis=0),
        float(np.mean(rho_ER[:, 0] > 0)),
    )


def noise(environment: RetrainedRuns, utilities: Utilities) -> dict[str, Any]:
    """How far two seeds agree over the subsets that have both, target by target: the correlation of utilities, each
    less its unit's mean over these subsets; and what their mean says of the ceiling of mean LDS, for as many seeds as
    `utilities` has (Spearman-Brown).
    """
    both = environment.utilities(seeds=environment.info.seeds[:2], partial=True)
    if len(both.subset_ids) < MIN_PAIRS:
        return {"subsets_with_two_seeds": len(both.subset_ids), "correlation": None, "ceiling": None}
    correlation: dict[str, float] = {}
    for target in dict.fromkeys(utilities.targets):
        value_BSE = both.select(target).values_BSE
        first, second = (value_BSE - value_BSE.mean(axis=0)).transpose(1, 0, 2).reshape(2, -1)
        correlation[target] = round(float(np.corrcoef(first, second)[0, 1]), 3)
    mean = float(np.mean(list(correlation.values())))
    seeds = len(utilities.seeds)
    ceiling = round((seeds * mean / (1 + (seeds - 1) * mean)) ** 0.5, 3) if mean > 0 else None
    return {"subsets_with_two_seeds": len(both.subset_ids), "correlation": correlation, "ceiling": ceiling}


def _interval(value_R: F64, low: float, high: float) -> list[float]:
    """Estimate, and the estimate plus the spread of the resamples about their own mean."""
    spread = np.nanpercentile(value_R[1:] - np.nanmean(value_R[1:]), [2.5, 97.5])
    return [
        round(float(np.clip(v, low, high)), 4) for v in (value_R[0], value_R[0] + spread[0], value_R[0] + spread[1])
    ]
