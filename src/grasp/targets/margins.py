"""Utilities of units with several answers: margins and accuracies, from the mean losses of the answers.

    l_k = -scale_k loss_k                     log-probability of answer k, as the metric normalises it
    margin    = l_0 - log sum_{k>0} exp(l_k)  l_0 is the right answer
    accuracy  = 1 if l_0 > l_k for all k > 0, else 0

`scale_k` is the number of tokens of the answer for its log-probability, tokens per character for the log-probability
per character, and 1 per token. To first order, a margin is a signed sum of the losses of its answers,

    d margin = -scale_0 d loss_0 + sum_{k>0} softmax(l)_k scale_k d loss_k

so the gradient of a unit is the sum of the gradients of its answers by the weights of `Answers.weights`. A unit with
one answer has the utility -loss. Start with `Answers.of`.
Shape letters: E units, A answers of all units, M units with several answers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from grasp.arrays import F64, I64, Bool
from grasp.errors import TargetError
from grasp.targets.units import Unit, UnitSet, UnitTokens

SUFFIX: Final = re.compile(r"(?P<target>.+)@(?P<metric>(?:margin|accuracy)(?:_per_char|_per_token)?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of units, unit by unit with the right one first, and how utilities follow from their losses.

    Attributes:
        tokens: tokens of each answer, (A,).
        unit_A: index of the unit of each answer.
        scale_A: factor from the mean loss of an answer to its negative log-probability.
        sign_E: signed factor of the utility of each unit; not 1 for metrics of the user.
        is_accuracy_E: whether the utility is an accuracy.
    """

    tokens: tuple[UnitTokens, ...]
    unit_A: I64
    scale_A: F64
    sign_E: F64
    is_accuracy_E: Bool

    @classmethod
    def of(cls, units: Sequence[UnitTokens]) -> Self:
        """Collect the answers of all units."""
        counts = [1 + len(unit.others) for unit in units]
        tokens = tuple(answer for unit in units for answer in (unit, *unit.others))
        return cls(
            tokens,
            np.repeat(np.arange(len(units)), counts),
            np.array([answer.scale for answer in tokens], dtype=np.float64),
            np.array([unit.weight for unit in units], dtype=np.float64),
            np.array([unit.is_accuracy for unit in units], dtype=np.bool_),
        )

    @property
    def are_units(self) -> bool:
        """Return whether every unit is one answer with the utility -loss."""
        return len(self.tokens) == len(self.sign_E) and bool((self.scale_A == 1.0).all() and (self.sign_E == 1.0).all())

    @property
    def is_first_A(self) -> Bool:  # noqa: N802 - a shape suffix
        """Return which answers are the right ones."""
        return np.diff(self.unit_A, prepend=-1) > 0

    def utilities(self, loss_A: F64) -> F64:
        """Return the utility of each unit, (..., E), from the mean losses of the answers, (..., A)."""
        if self.are_units:
            return -loss_A
        logp_A, first_A = -self.scale_A * loss_A, self.is_first_A
        utility_E = logp_A[..., first_A]
        if not first_A.all():
            other_A = logp_A[..., ~first_A]
            unit_M, start_M = np.unique(self.unit_A[~first_A], return_index=True)
            margin_M = utility_E[..., unit_M] - np.logaddexp.reduceat(other_A, start_M, axis=-1)
            is_right_M = utility_E[..., unit_M] > np.maximum.reduceat(other_A, start_M, axis=-1)
            utility_E[..., unit_M] = np.where(self.is_accuracy_E[unit_M], is_right_M, margin_M)
        return np.asarray(self.sign_E * utility_E)

    def weights(self, loss_A: F64) -> F64:
        """Return the derivative of a unit's utility with respect to the negative mean loss of each answer, (A,)."""
        logp_A, first_A = -self.scale_A * loss_A, self.is_first_A
        weight_A = self.scale_A.copy()
        if not first_A.all():
            other_A = logp_A[~first_A]
            _, start_M, unit_index_A = np.unique(self.unit_A[~first_A], return_index=True, return_inverse=True)
            # minus the softmax over the wrong answers of each unit
            weight_A[~first_A] *= -np.exp(other_A - np.logaddexp.reduceat(other_A, start_M)[unit_index_A])
        return np.asarray(weight_A * self.sign_E[self.unit_A])


def split_metric(name: str) -> tuple[str, str | None]:
    """Split the name of a target into the name of a task or file, and its metric; None: the loss.

    `sciq@margin` is the margin of the right answer, `sciq@margin_per_char` and `sciq@margin_per_token` those of
    normalised log-probabilities.
    """
    match = SUFFIX.fullmatch(name)
    return (match["target"], match["metric"]) if match else (name, None)


def refuse_accuracy(units: UnitSet) -> None:
    """Refuse targets that have no gradient.

    Raises:
        TargetError: a target is an accuracy.
    """
    for unit in units.units:
        if unit.metric.startswith("accuracy"):
            margin = unit.metric.replace("accuracy", "margin")
            raise TargetError(
                f"targets.names: {unit.target}: an accuracy has no gradient; build for {unit.target.partition('@')[0]}"
                f"@{margin}, and record accuracies with grasp retrain"
            )


def with_metric(unit: Unit, metric: str) -> Unit:
    """Return a unit with several answers whose utility is a margin or an accuracy; its id and target have the suffix.

    Raises:
        TargetError: the unit has no choices, or has loss on more than the completion.
    """
    location = f"unit {unit.unit_id!r} of {unit.target}"
    if unit.others:  # a preference pair
        return replace(unit, unit_id=f"{unit.unit_id}@{metric}", target=f"{unit.target}@{metric}", metric=metric)
    if unit.gold is None or len(unit.choices) < 2:
        raise TargetError(f"{location}: @{metric} needs the wrong answers too; expected `choices` and `answer`")
    if unit.loss_on != "completion":
        raise TargetError(f"{location}: @{metric} is defined for loss on the completion; got loss_on {unit.loss_on}")
    return unit.scored_by(metric)
