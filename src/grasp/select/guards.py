"""Maximise a smooth function of mixtures, subject to guards: other targets must not become worse.

A guard is a target with a tolerance: the lower bound of its predicted change must be at least -tolerance, so that it is
not worse with 90 % probability. Start with `Guards.optimize`. Where no mixture meets all guards, they are relaxed by
the amounts with the least sum; the price of a guard is what the objective would gain without it.

Shape letters: B mixtures, G label values, K guards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from grasp.arrays import F64
from grasp.errors import SettingsError
from grasp.select.linear_program import MixtureProblem
from grasp.text import did_you_mean, parse_names

CONFIDENCE = 0.9  # of a change being above its lower bound, one-sided
MAX_STARTS, MAX_PRICE_STARTS = 8, 3  # of the optimum, and of that without a guard
MAX_STEPS = 100
DIFFERENCE_STEP = 1e-4  # finite-difference step of shares
MIN_MARGIN = 0.05  # of a guard that does not bind: least part of the distance between a change and its lower bound
MIN_PRICE = 0.0005  # smaller gains are printed as 0
TOLERANCE = 1e-5  # violations below this part of the range of the slack count as none


@dataclass(frozen=True, slots=True)
class GuardOutcome:
    """A guard at the optimum, in the unit of its changes; the price is in that of the objective.

    Attributes:
        low: lower bound of the predicted change, which is at least `limit`.
        limit: minus the tolerance, or less if the guard is relaxed because no mixture meets it.
        price: what the objective would gain without the guard; 0: it does not bind.
    """

    target: str
    change: float
    low: float
    limit: float
    is_relaxed: bool
    price: float

    @property
    def note(self) -> str:
        """Return the outcome as a sentence."""
        note = f"guard {self.target}: predicted change {self.change:+z.3f}, with {CONFIDENCE:.0%} at least "
        note += f"{self.low:+z.3f}, above 0 is better; "
        note += f"without it the objective gains {self.price:.3f}" if self.price else "it does not bind"
        if self.is_relaxed:
            note += (
                f"; no mixture within the bounds keeps every guard: relaxed to {-self.limit:.3g}, the least possible"
            )
        return note


@dataclass(frozen=True, slots=True)
class Guards:
    """Targets that must not become worse; by default none.

    Attributes:
        names: targets or metrics.
        tolerance: how much worse each may become, in the unit of its changes.
        changes: of mixtures (B, G), the predicted changes and their lower bounds, (B, K) each; higher is better.
    """

    names: tuple[str, ...] = ()
    tolerance: float = 0.0
    changes: Callable[[F64], tuple[F64, F64]] = lambda share_BG: (np.zeros((len(share_BG), 0)),) * 2

    def optimize(
        self, problem: MixtureProblem, value: Callable[[F64], F64], starts: Sequence[F64]
    ) -> tuple[F64, list[GuardOutcome]]:
        """Return the best mixture that meets the guards, relaxed if they cannot be met, and the outcome of each.

        Args:
            problem: bounds and distance.
            value: function of mixtures, (B, G) -> (B,), that is also defined if they do not add up to 1.
            starts: initial mixtures; those outside the bounds are ignored, and at least one must be inside.
        """
        low_G, high_G = problem.low_G - TOLERANCE, problem.high_G + TOLERANCE
        starts = [start_G for start_G in starts if ((low_G <= start_G) & (start_G <= high_G)).all()][:MAX_STARTS]
        every = list(range(len(self.names)))
        share_G, relaxed_K = self._optimize(problem, value, starts, every)
        change_1K, lower_1K = self.changes(share_G[None])
        value_here, outcomes = float(value(share_G[None])[0]), []
        for k, name in enumerate(self.names):
            change, low, price = float(change_1K[0, k]), float(lower_1K[0, k]), 0.0
            # with room to spare, only the accuracy of the solver would differ
            if low + self.tolerance <= MIN_MARGIN * abs(change - low):
                points, others = [share_G, *starts][:MAX_PRICE_STARTS], [j for j in every if j != k]
                other_G, _ = self._optimize(problem, value, points, others)
                price = float(value(other_G[None])[0]) - value_here
            limit, is_relaxed = -self.tolerance - float(relaxed_K[k]), bool(relaxed_K[k])
            outcomes.append(GuardOutcome(name, change, low, limit, is_relaxed, price if price >= MIN_PRICE else 0.0))
        return share_G, outcomes

    def _optimize(
        self, problem: MixtureProblem, value: Callable[[F64], F64], starts: Sequence[F64], guards: list[int]
    ) -> tuple[F64, F64]:
        """Return the mixture, and by how much each guard is relaxed, (K,)."""

        def slack(share_BG: F64) -> F64:
            return self.changes(share_BG)[1][:, guards] + self.tolerance

        points_BG = np.stack(starts)
        scale = float(np.ptp(slack(points_BG), axis=0).max(initial=0.0)) or 1.0
        # the least sum of violations: by the program with them as further variables, from the start that violates least
        violation_B = np.maximum(-slack(points_BG), 0.0).sum(axis=1)
        nearest_G, relaxed = points_BG[int(violation_B.argmin())], np.zeros(len(guards))
        if violation_B.min() > 0.0:
            nearest_G = _solve(problem, lambda p_BG: np.zeros(len(p_BG)), slack, scale, nearest_G, None)
            relaxed = np.maximum(-slack(nearest_G[None])[0], 0.0)
            relaxed[relaxed < TOLERANCE * scale] = 0.0
        optima = [_solve(problem, value, slack, scale, start_G, relaxed) for start_G in (nearest_G, *points_BG)]
        optimum_BG = np.stack([nearest_G, *optima])
        meets_B = np.asarray((slack(optimum_BG) + relaxed >= -TOLERANCE * scale).all(axis=1))
        meets_B[0] = True
        best_G = optimum_BG[int(np.where(meets_B, value(optimum_BG), -np.inf).argmax())]
        relaxed_K = np.zeros(len(self.names))
        relaxed_K[guards] = relaxed
        return best_G, relaxed_K


def _solve(
    problem: MixtureProblem,
    value: Callable[[F64], F64],
    slack: Callable[[F64], F64],
    scale: float,
    start_G: F64,
    relaxed_K: F64 | None,
) -> F64:
    """Return a local optimum by sequential quadratic programming, or the start if it finds none within the bounds.

    Args:
        scale: of the slack, by which constraints are divided.
        relaxed_K: amounts that are added to the slack; None: they are variables too, and their sum is minimised.
    """
    n_values, n_guards = len(start_G), slack(start_G[None]).shape[1]
    n_free = 0 if relaxed_K is not None else n_guards

    def gradient(function: Callable[[F64], F64], x: F64) -> F64:
        """Return forward differences of a function of mixtures, (G, ...); all mixtures are evaluated at once."""
        points_BG = x[:n_values] + np.concatenate([np.zeros((1, n_values)), DIFFERENCE_STEP * np.eye(n_values)])
        values_B = function(points_BG)
        return np.asarray((values_B[1:] - values_B[0]) / DIFFERENCE_STEP)

    def slacks(x: F64) -> F64:
        extra_K = x[n_values:] if relaxed_K is None else relaxed_K / scale
        return np.asarray(slack(x[None, :n_values])[0] / scale + extra_K)

    def slacks_gradient(x: F64) -> F64:
        return np.concatenate([gradient(slack, x).T / scale, np.eye(n_guards)[:, :n_free]], axis=1)

    size = float(np.abs(gradient(value, start_G)).max()) or 1.0
    constraints: list[Any] = [
        {"type": "eq", "fun": lambda x: x[:n_values].sum() - 1.0},
        {"type": "ineq", "fun": slacks, "jac": slacks_gradient},
    ]
    if problem.distance is not None:
        distance, current_G = problem.distance, problem.current_G
        constraints.append({"type": "ineq", "fun": lambda x: distance - 0.5 * np.abs(x[:n_values] - current_G).sum()})
    sequential: Any = minimize  # its stubs do not admit a gradient function beside such constraints
    solution = sequential(
        lambda x: -float(value(x[None, :n_values])[0]) / size + x[n_values:].sum(),
        np.concatenate([start_G, np.maximum(-slack(start_G[None])[0] / scale, 0.0)[:n_free]]),
        jac=lambda x: np.concatenate([-gradient(value, x) / size, np.ones(n_free)]),
        bounds=[*zip(problem.low_G, problem.high_G, strict=True), *[(0.0, np.inf)] * n_free],
        constraints=constraints,
        method="SLSQP",
        options={"maxiter": MAX_STEPS, "ftol": 1e-7},
    )
    share_G = np.clip(solution.x[:n_values], problem.low_G, problem.high_G)
    moved = 0.5 * float(np.abs(share_G - problem.current_G).sum())
    max_moved = np.inf if problem.distance is None else problem.distance
    is_valid = abs(share_G.sum() - 1.0) <= TOLERANCE and moved <= max_moved + TOLERANCE
    return share_G if is_valid else start_G


def parse_guards(not_worse: str | Sequence[str] | None, tolerance: float, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the guarded targets.

    Raises:
        SettingsError: one is unknown, or `tolerance` is negative, or there is no guard.
    """
    names = parse_names(not_worse, known) if not_worse else ()
    if unknown := [name for name in names if name not in known]:
        raise SettingsError(
            f"not_worse: got {unknown[0]!r}{did_you_mean(unknown[0], known)}, expected some of {', '.join(known)}"
        )
    if not 0 <= tolerance < np.inf or (tolerance and not names):
        raise SettingsError(
            f"tolerance: got {tolerance:g}, expected 0 or more, and targets that must not be worse (not_worse)"
        )
    return tuple(names)
