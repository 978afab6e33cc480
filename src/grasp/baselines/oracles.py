"""Supervised datamodels: how much of the measured utilities a linear function of the subset explains.

Start with `oracle`. An oracle is fitted to retrained subsets, so it does not compete with predictors that never
see retrained runs; it is an upper bound on the information in masks or label fractions. All predictions are out of
fold, and the strength of the penalty is chosen inside the training folds.

Predictions are deviations from the mean of the training folds, without that mean: holding out a subset moves the mean
of the others away from it, so with a strong penalty the means alone would rank subsets in reverse. The coefficients
have a trace of the same bias: with uninformative features, rho is about -0.1 with 16 subsets and -0.05 with 64.

Shape letters: B subsets, F features, E outputs (units, and the task's mean as an output of its own), N rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import RunsError
from grasp.extras import require
from grasp.predict.weights import SubsetBlock
from grasp.runs.predictions import Predictions
from grasp.runs.training_runs import Utilities
from grasp.seeds import stream

# training features, training outputs, held-out features -> deviations of the held-out outputs from the training mean
Fitter = Callable[[F64, F64, F64], F64]

FOLDS = 8
# Ridge penalties in units of the mean squared norm of a training row, from negligible to dominant.
RELATIVE_PENALTIES = np.logspace(-4, 3, 15)
LASSO_PENALTIES = np.logspace(-3, 0, 12)  # in units of the smallest penalty at which all coefficients are zero


@dataclass(frozen=True, slots=True)
class OracleFeatures:
    """Features of subsets that an oracle is fitted to."""

    name: str
    subset_ids: tuple[str, ...]
    values_BF: F64


def mask_features(blocks: Iterable[SubsetBlock]) -> OracleFeatures:
    """Return the retained mask of each subset, (B, N), as in the datamodels of Ilyas et al.

    Memory: 8 bytes per subset and row, suitable for pools of up to about 100,000 rows.
    """
    blocks = list(blocks)
    ids = tuple(name for block in blocks for name in block.subset_ids)
    mask_BN = np.concatenate([(block.weights_BN > 0).toarray() for block in blocks])
    return OracleFeatures("masks", ids, mask_BN.astype(float))


def fraction_features(blocks: Iterable[SubsetBlock], labels: LabelColumn) -> OracleFeatures:
    """Return the share of each subset's rows that have each value of a label, (B, number of values)."""
    ids: list[str] = []
    parts: list[F64] = []
    n_rows = len(labels.codes_N)
    has_value_NF = csr_array((np.ones(n_rows), labels.codes_N, np.arange(n_rows + 1)), (n_rows, len(labels.values)))
    for block in blocks:
        counts_BF = ((block.weights_BN > 0) @ has_value_NF).toarray()
        ids += block.subset_ids
        parts.append(counts_BF / counts_BF.sum(axis=1, keepdims=True))
    return OracleFeatures(f"{labels.name}-share-of-subset", tuple(ids), np.concatenate(parts))


def oracle(
    penalty: Literal["ridge", "lasso"],
    features: OracleFeatures,
    utilities: Utilities,
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> Predictions:
    """Predict units and task means by out-of-fold regression on the features.

    Args:
        penalty: ridge: in closed form, chosen by leave-one-out error; lasso: by scikit-learn, chosen by inner folds for
            each output.
        features: features of the subsets of `utilities`, in any order; other subsets are ignored.
        utilities: measured utilities; the mean over seeds is regressed.
        folds: number of folds; subsets are assigned at random, from a named stream.
    Raises:
        RunsError: a subset has no features, or there are too few subsets for the folds.
        MissingExtraError: scikit-learn is not installed, for lasso.
    """
    position = {name: b for b, name in enumerate(features.subset_ids)}
    if missing := [name for name in utilities.subset_ids if name not in position]:
        raise RunsError(f"oracle: {len(missing)} subsets have no features, e.g. {missing[:3]}")
    values_BF = features.values_BF[[position[name] for name in utilities.subset_ids]]
    realized_BE = utilities.values_BSE.mean(axis=1)
    n_units, target_E = realized_BE.shape[1], np.array(utilities.targets)
    targets = tuple(dict.fromkeys(utilities.targets))
    tasks_BT = np.stack([realized_BE[:, target_E == name].mean(axis=1) for name in targets], axis=1)
    fit = {"ridge": ridge_out, "lasso": lasso_out}[penalty]
    out = cross_fit(fit, values_BF, np.concatenate([realized_BE, tasks_BT], axis=1), folds=folds, seed=seed)
    return Predictions(
        method=f"oracle-{penalty}-{features.name}",
        subset_ids=utilities.subset_ids,
        units=tuple(zip(utilities.targets, utilities.unit_ids, strict=True)),
        values_BE=out[:, :n_units],
        task_B={name: out[:, n_units + t] for t, name in enumerate(targets)},
        method_role="supervised oracle",
    )


class RidgeFit:
    """A ridge fit in dual closed form, for all outputs and all penalties at once.

    With centred rows, K = X X^T = V diag(s) V^T, the smoother of penalty l is H = 1/n + V diag(s/(s+l)) V^T,
    and the leave-one-out residual of row i is exactly (y - Hy)_i / (1 - H_ii).
    """

    def __init__(self, x_BF: F64, y_BE: F64) -> None:
        self.mean_F = x_BF.mean(axis=0)
        self.x_BF, self.y_BE = x_BF - self.mean_F, y_BE - y_BE.mean(axis=0)
        spectrum, self.v = np.linalg.eigh(self.x_BF @ self.x_BF.T)
        self.spectrum = np.clip(spectrum, 0.0, None)
        scale = self.spectrum.mean()
        self.penalties = RELATIVE_PENALTIES * (scale if scale > 0 else 1.0)

    def left_out_error(self, penalty: float) -> F64:
        """Return the mean squared leave-one-out residual of each output, (E,)."""
        shrink = self.spectrum / (self.spectrum + penalty)
        fitted = (self.v * shrink) @ (self.v.T @ self.y_BE)
        leverage = 1.0 / len(self.x_BF) + np.einsum("bk,k,bk->b", self.v, shrink, self.v)
        residual = (self.y_BE - fitted) / np.clip(1.0 - leverage, 1e-12, None)[:, None]
        return np.asarray(np.mean(residual**2, axis=0))

    def predict(self, x_BF: F64) -> F64:
        """Predict deviations from the training mean; each output uses the penalty of least leave-one-out error."""
        best_E = np.argmin([self.left_out_error(penalty) for penalty in self.penalties], axis=0)
        product_BB = (x_BF - self.mean_F) @ self.x_BF.T  # inner products of new and training rows
        shrink_KE = 1.0 / (self.spectrum[:, None] + self.penalties[best_E][None])
        dual_BE = self.v @ (shrink_KE * (self.v.T @ self.y_BE))
        return np.asarray(product_BB @ dual_BE)


def ridge_out(x_BF: F64, y_BE: F64, test_BF: F64) -> F64:
    """Fit the training fold and predict the held-out rows; the penalty is chosen by leave-one-out error."""
    return RidgeFit(x_BF, y_BE).predict(test_BF)


def lasso_out(x_BF: F64, y_BE: F64, test_BF: F64) -> F64:
    """Fit the training fold with an L1 penalty, output by output, and predict the held-out rows."""
    linear = require("sklearn.linear_model", extra="baselines", feature="the lasso oracle")
    out = np.empty((len(test_BF), y_BE.shape[1]))
    centred_BF = x_BF - x_BF.mean(axis=0)
    for e in range(y_BE.shape[1]):
        y = y_BE[:, e]
        largest = np.abs(centred_BF.T @ (y - y.mean())).max() / len(y)  # smallest penalty at which all are zero
        if largest == 0.0:
            out[:, e] = 0.0
            continue
        model = linear.LassoCV(alphas=largest * LASSO_PENALTIES, cv=min(5, len(y)), max_iter=20_000, tol=1e-3)
        out[:, e] = model.fit(x_BF, y).predict(test_BF) - y.mean()
    return out


def cross_fit(fit: Fitter, x_BF: F64, y_BE: F64, *, folds: int, seed: int) -> F64:
    """Predict each subset by a fit to the other folds, (B, E).

    Raises:
        RunsError: fewer than two subsets per training fold.
    """
    n_subsets = len(x_BF)
    assert len(y_BE) == n_subsets
    folds = min(folds, n_subsets)
    if folds < 2 or n_subsets < 4:
        raise RunsError(f"oracle: got {n_subsets} subsets and {folds} folds, expected 4 and 2 or more")
    order = stream(seed, "fidelity", "folds", n_subsets).permutation(n_subsets)
    fold_B = np.empty(n_subsets, dtype=np.int64)
    fold_B[order] = np.arange(n_subsets) % folds
    out_BE = np.empty(y_BE.shape)
    for k in range(folds):
        is_test_B = fold_B == k
        out_BE[is_test_B] = fit(x_BF[~is_test_B], y_BE[~is_test_B], x_BF[is_test_B])
    return out_BE
