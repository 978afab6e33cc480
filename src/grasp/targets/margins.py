"""Compute utilities of units with several answers, margins and accuracies, from the mean losses of the answers.

Answer 0 of a unit is the right one. A loss is a mean over the tokens of an answer, in nats per token.

    l_k       = -scale_k loss_k               log-probability of answer k, as the metric normalises it
    margin    = l_0 - log sum_{k>0} exp(l_k)
    accuracy  = 1 if l_0 > l_k for all k > 0, else 0

`scale_k` depends on the metric: the number of tokens of the answer (margin), tokens per character (margin_per_char), or
1 (margin_per_token). To first order, a margin is a signed sum of the losses of its answers,

    d margin = -scale_0 d loss_0 + sum_{k>0} softmax(l)_k scale_k d loss_k,  softmax over the wrong answers

so the gradient of a unit is the sum of the gradients of its answers by the weights of `Answers.weights`. A unit with
one answer has the utility -loss. Start with `Answers.of`.

Shape letters: E units, A answers of all units, W wrong answers of all units, M units with several answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from grasp.arrays import F64, I64, Bool
from grasp.errors import TargetError
from grasp.targets.units import PER_CHAR, PER_TOKEN, Unit, UnitSet, UnitTokens

METRICS: Final = tuple(f"{base}{per}" for base in ("margin", "accuracy") for per in ("", PER_CHAR, PER_TOKEN))


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of all units in one list, from whose losses the utilities of the units are computed.

    The answers of a unit are adjacent, the right one first.

    Attributes:
        tokens: tokens of each answer, A of them.
        unit_A: index of the unit of each answer, (A,).
        scale_A: factor from the mean loss of an answer to its negative log-probability, (A,).
        weight_E: signed factor of the utility of each unit, (E,); not 1 for user-defined metrics.
        is_accuracy_E: whether the utility is an accuracy, (E,).
    """

    tokens: tuple[UnitTokens, ...]
    unit_A: I64
    scale_A: F64
    weight_E: F64
    is_accuracy_E: Bool

    @classmethod
    def of(cls, units: Sequence[UnitTokens]) -> Self:
        """Collect the answers of units, E of them."""
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
        """Return whether every unit has one answer and the utility -loss, so that answers and units coincide."""
        return len(self.tokens) == len(self.weight_E) and bool(
            (self.scale_A == 1.0).all() and (self.weight_E == 1.0).all()
        )

    @property
    def is_first_A(self) -> Bool:  # noqa: N802 - a shape suffix
        """Return which answers are right: the first of each unit, (A,)."""
        return np.diff(self.unit_A, prepend=-1) > 0

    def utilities(self, loss_A: F64) -> F64:
        """Return the utility of each unit, (..., E), from the mean losses of the answers, (..., A)."""
        if self.are_units:
            return -loss_A
        logp_A, first_A = -self.scale_A * loss_A, self.is_first_A
        utility_E = logp_A[..., first_A]
        if not first_A.all():
            wrong_W = logp_A[..., ~first_A]
            # the units that have wrong answers, and the position of the first one in wrong_W
            unit_M, start_M = np.unique(self.unit_A[~first_A], return_index=True)
            margin_M = utility_E[..., unit_M] - np.logaddexp.reduceat(wrong_W, start_M, axis=-1)
            is_correct_M = utility_E[..., unit_M] > np.maximum.reduceat(wrong_W, start_M, axis=-1)
            utility_E[..., unit_M] = np.where(self.is_accuracy_E[unit_M], is_correct_M, margin_M)
        return np.asarray(self.weight_E * utility_E)

    def weights(self, loss_A: F64) -> F64:
        """Return the derivative of a unit's utility with respect to the negative mean loss of each answer, (A,)."""
        logp_A, first_A = -self.scale_A * loss_A, self.is_first_A
        weight_A = self.scale_A.copy()
        if not first_A.all():
            wrong_W = logp_A[~first_A]
            _, start_M, index_W = np.unique(self.unit_A[~first_A], return_index=True, return_inverse=True)
            # minus the softmax over the wrong answers of each unit
            weight_A[~first_A] *= -np.exp(wrong_W - np.logaddexp.reduceat(wrong_W, start_M)[index_W])
        return np.asarray(weight_A * self.weight_E[self.unit_A])


def split_metric(name: str) -> tuple[str, str | None]:
    """Split the name of a target into the name of a task or file, and its metric; None: the loss.

    `sciq@margin` is the margin of the right answer, `sciq@margin_per_char` and `sciq@margin_per_token` those of
    normalised log-probabilities.
    """
    target, _, metric = name.rpartition("@")
    return (target, metric) if target and metric in METRICS else (name, None)


def refuse_accuracy(units: UnitSet) -> None:
    """Refuse targets that are accuracies: an accuracy has no gradient, from which relevance could be computed.

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
    """Return a unit with several answers whose utility is a margin or an accuracy.

    The metric is added to its unit_id and target, as in `sciq:3@margin` and `sciq@margin`.

    Raises:
        TargetError: the unit has no choices, one without text, or loss on more than the completion.
    """
    named = replace(unit, unit_id=f"{unit.unit_id}@{metric}", target=f"{unit.target}@{metric}", metric=metric)
    if unit.others:  # a preference pair
        return named
    fault, others = "", []
    if unit.gold is None or len(unit.choices) < 2:
        fault = " needs the wrong answers too; expected `choices` and `answer`"
    elif unit.loss_on != "completion":
        fault = f" is defined for loss on the completion; got loss_on {unit.loss_on}"
    else:
        are_completions = unit.choices[unit.gold] == unit.completion  # else they are prompts
        answer = replace(unit, choices=(), gold=None)
        others = [
            replace(answer, completion=text) if are_completions else replace(answer, prompt=text)
            for k, text in enumerate(unit.choices)
            if k != unit.gold
        ]
        if not all(other.completion.strip() for other in others):
            fault = ": got a choice without text; remove the choice, or the record"
    if fault:
        raise TargetError(f"unit {unit.unit_id!r} of {unit.target}: @{metric}{fault}")
    return replace(named, others=tuple(others))
