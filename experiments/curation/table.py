"""From realized utilities to the table: losses and accuracy of every selection, and how far from random choice.

Intervals are of a mean over training seeds and units, both drawn at random: the variances of the two means add up (an
upper bound, since each holds a share of the noise of single runs), with Satterthwaite's degrees of freedom, which with
three seeds is an approximation: nine in ten of them or a little more hold the truth. Differences from random choice are
taken seed by seed and unit by unit, and the spread of the random selections is a third part.

Shape letters: D draws of a random selection, S seeds, U units or documents, E units of the environment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from experiments.curation.choices import RANDOM, SelectionRecord
from experiments.curation.setting import HELD_OUT, ScoredUnit, World, choice_id
from grasp.arrays import F64
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import WHOLE_CORPUS_RUN

MEASURES = ("selected_loss", "fresh_loss", "accuracy", "held_out_loss")
LEVEL = 0.95
WHOLE = "whole pool"


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; without one where there is a single seed."""

    mean: float
    low: float | None
    high: float | None


class Reading:
    """Models of an environment whose seeds are all trained: their losses and accuracies."""

    def __init__(self, world: World, environment: RetrainedRuns) -> None:
        known = environment.utilities(partial=True)
        place = {unit_id: e for e, unit_id in enumerate(known.unit_ids)}
        self.targets = world.artifact.targets
        self._utility = dict(zip(known.subset_ids, known.values_BSE, strict=True))
        full_SE = environment.reference_utilities()
        if len(full_SE) == len(known.seeds):
            self._utility[WHOLE_CORPUS_RUN] = full_SE
        self._units = [_Placed.from_unit(world, unit, place) for unit in world.scored_units]
        self._held_out = np.array([e for e, target in enumerate(known.targets) if target == HELD_OUT])

    def has(self, subset_id: str) -> bool:
        """Whether every seed is trained."""
        return subset_id in self._utility

    def measured(self, subset_id: str, measure: str, targets: Sequence[str]) -> F64:
        """(S, U): losses in nats per token, or 1 where the right choice has the lowest loss a character."""
        utility_SE = self._utility[subset_id]
        if measure == "held_out_loss":
            return -utility_SE[:, self._held_out]
        units = [unit for unit in self._units if unit.target in targets]
        if measure == "accuracy":
            return np.stack([unit.is_right(utility_SE) for unit in units], axis=1)
        fresh = measure == "fresh_loss"
        return np.stack([-utility_SE[:, unit.gold] for unit in units if unit.is_fresh == fresh], axis=1)


@dataclass(frozen=True)
class _Placed:
    """A unit among the columns of an environment."""

    target: str
    is_fresh: bool
    gold: int  # column of the right choice
    right: int  # its place among the choices
    choices: NDArray[np.int64]  # columns
    per_char: F64  # tokens a character: a loss a token times it is a loss a character

    @classmethod
    def from_unit(cls, world: World, unit: ScoredUnit, place: Mapping[str, int]) -> "_Placed":
        columns = np.array([place[choice_id(unit.unit_id, k)] for k in range(len(unit.choices))])
        characters = np.array([max(1, len(answer)) for answer in unit.choices])
        per_char = world.completion_tokens(list(unit.choices)) / characters
        return cls(unit.target, unit.is_fresh, int(columns[unit.gold]), unit.gold, columns, per_char)

    def is_right(self, utility_SE: F64) -> F64:
        return (np.argmax(utility_SE[:, self.choices] * self.per_char, axis=1) == self.right).astype(np.float64)


def estimate(values_DSU: F64) -> Estimate:
    """Mean over draws, seeds and units, with the interval of all that were drawn.

    Args:
        values_DSU: a selection that is no draw has D = 1, and an axis of one counts for no spread.
    """
    mean = float(values_DSU.mean())
    if values_DSU.shape[1] < 2:
        return Estimate(mean, None, None)
    parts = []
    for axis, size in enumerate(values_DSU.shape):
        if size > 1:
            others = tuple(other for other in range(3) if other != axis)
            parts.append((float(values_DSU.mean(axis=others).var(ddof=1)) / size, size - 1))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Estimate(mean, mean, mean)
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * variance**0.5
    return Estimate(mean, mean - half, mean + half)


def lines(reading: Reading, choices: Sequence[SelectionRecord]) -> list[dict[str, Any]]:
    """One line a selection whose models are all there; random ones of a size share a line."""
    done = [candidate for candidate in choices if reading.has(candidate.subset_id)]
    records = []
    groups = dict.fromkeys(
        (selected.asked.targets, selected.asked.share) for selected in done if selected.asked.method != RANDOM
    )
    for targets, share in sorted(groups):
        target_names = reading.targets if targets == "all" else (targets,)
        random = [selected for selected in done if selected.asked.method == RANDOM and selected.asked.share == share]
        draws = list(dict.fromkeys(selected.subset_id for selected in random))
        if random:
            line = _line(reading, draws, [], target_names)
            records.append(_named(random[0]) | {"targets": targets, "draws": len(draws)} | line)
        chosen = [
            selected for selected in done if selected.asked.method != RANDOM and selected.asked.targets == targets
        ]
        same = [selected for selected in chosen if selected.asked.share == share]
        records += [_named(selected) | _line(reading, [selected.subset_id], draws, target_names) for selected in same]
    return records + _whole(reading, [targets for targets, _ in groups])


def _whole(reading: Reading, targets: Sequence[str]) -> list[dict[str, Any]]:
    """Models of the whole pool, trained for as long."""
    if not reading.has(WHOLE_CORPUS_RUN):
        return []
    return [
        {"method": WHOLE, "targets": name, "share": 1.0}
        | _line(reading, [WHOLE_CORPUS_RUN], [], reading.targets if name == "all" else (name,))
        for name in dict.fromkeys(targets)
    ]


def _line(reading: Reading, subsets: Sequence[str], draws: Sequence[str], targets: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for measure in MEASURES:
        value_DSU = np.stack([reading.measured(subset, measure, targets) for subset in subsets])
        out[measure] = asdict(estimate(value_DSU))
        if draws:
            random_DSU = np.stack([reading.measured(subset, measure, targets) for subset in draws])
            out[f"{measure}_minus_random"] = asdict(estimate(value_DSU - random_DSU))
    return out


def _named(selected: SelectionRecord) -> dict[str, Any]:
    request = selected.asked
    return {
        "method": request.method,
        "scored_by": request.scorer,
        "targets": request.targets,
        "share": request.share,
        "rows": selected.rows,
        "tokens": selected.tokens,
        "subset_id": selected.subset_id,
        "about": dict(selected.about),
    }


def as_text(records: Sequence[Mapping[str, Any]]) -> str:
    """The lines as a Markdown table; differences from random choice in brackets."""
    head = ["for", "rows kept", "method", "task loss", "other units' loss", "accuracy", "held-out loss"]
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for line in records:
        method = line["method"] + (
            f" (scored by {line['scored_by']})" if line.get("scored_by", "llama") != "llama" else ""
        )
        cells = [line["targets"], f"{line['share']:.0%}", method, *(_cell(line, measure) for measure in MEASURES)]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def _cell(line: Mapping[str, Any], measure: str) -> str:
    mean = f"{line[measure]['mean']:.3f}"
    difference = line.get(f"{measure}_minus_random")
    if difference is None:
        return mean
    if difference["low"] is None:
        return f"{mean} ({difference['mean']:+.3f})"
    return f"{mean} ({difference['mean']:+.3f}, {difference['low']:+.3f} to {difference['high']:+.3f})"
