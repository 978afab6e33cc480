"""What `select` and `mix` share: the question (targets and their weights) and an answer that can be saved.

Shape letters: N rows, T targets, B subsets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa

from grasp.artifact.reader import ArtifactReader
from grasp.choose.limits import I64
from grasp.choose.records import write_with_summary
from grasp.choose.repetition import Training
from grasp.errors import SettingsError
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.protocol import ScoringProtocol, as_protocol
from grasp.predict.row_arrays import F64, row_tokens
from grasp.predict.weights import Weights
from grasp.results import Result
from grasp.runs.environment import Environment
from grasp.runs.imported import runs_beside
from grasp.runs.learning import Expected, Outside, learn, measures
from grasp.runs.table import RunTable
from grasp.text import text_table
from grasp.verbs.predict import notes

Asked = TypeVar("Asked")  # what subsets are given by

# Changes have a sign; shares, weights and factors have none.
FORMATS = {
    "weight": "{:.2f}",
    "now": "{:.1%}",
    "proposed": "{:.1%}",
    "times_as_often": "{:.2f}",
}


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Result):
    """What was chosen, and what it is predicted to bring.

    Attributes:
        targets: target, weight, change (against the whole corpus), and, with runs, nats, nats_low and nats_high, or
            the metric of the runs in their place.
        value: weighted mean of the changes, repetition counted if the training budget is known.
        unit: of the changes.
        asked: the question.
    """

    kind: ClassVar[str]

    targets: pa.Table = None
    value: float = 0.0
    unit: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    protocol: ScoringProtocol | None = None
    artifact: ArtifactReader | None = None

    def save(self, path: Path | str) -> Path:
        """Write the table as Parquet, with a summary (.json) and the protocol (.protocol.yaml) beside it.

        `report --selection` and `--mixture` take the summary, `predict --subsets` the table of a selection.
        """
        assert self.artifact is not None
        assert self.protocol is not None
        return write_with_summary(self.table, self.summary(), self.protocol, self.artifact, Path(path))

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        assert self.protocol is not None
        return {
            "kind": self.kind,
            "headline": self.headline,
            "asked": dict(self.asked),
            "targets": self.targets.rename_columns(_plain_names(self.targets.column_names)).to_pylist(),
            "runs_unit": next(iter(self.targets.column_names[3:]), None),
            "value": self.value,
            "scale": self.unit,
            "protocol": self.protocol.model_dump(mode="json"),
            "notes": list(self.notes),
        }

    def _change_text(self) -> str:
        expected = dict.fromkeys(self.targets.column_names[3:], "{:+z.4f}")  # by runs, which differ little
        return text_of(f"predicted change against the whole corpus, {self.unit}", self.targets, expected)


@dataclass(frozen=True, slots=True)
class Aim:
    """What is aimed at: targets and their weights. Says what a row, or a set of rows, is worth to them."""

    artifact: ArtifactReader
    predictor: Predictor
    weights_T: F64
    effect_N: F64  # of every row, weighed over the targets
    tokens_N: I64
    training: Training
    intervals: Expected | None

    @classmethod
    def of(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol,
        targets: Mapping[str, float],
        training: Training,
        runs: Environment | RunTable | Path | str | None = None,
    ) -> Self:
        """Read the relevance of the rows, once."""
        beside = None if runs is None else runs_beside(artifact, runs)
        sketches = () if beside is None else measures(artifact.array_names)
        predictor = Predictor.of(artifact, protocol, list(targets), sketches=sketches)
        weights_T, tokens_N = np.array(list(targets.values())), row_tokens(artifact)
        effect_N = np.asarray(predictor.effect_NT @ weights_T, dtype=np.float64)
        bound = training.of_corpus(int(tokens_N.sum()))
        learned = None if beside is None else learn(predictor, artifact, beside)
        return cls(artifact, predictor, weights_T, effect_N, tokens_N, bound, learned)

    def value(self, sums: SubsetSums, tokens_B: F64 | I64) -> F64:
        """Weighted change of subsets with so many tokens, what repetition leaves of it, (B,)."""
        return np.asarray((self.predictor.change_of(sums) @ self.weights_T) * self.training.share(tokens_B))

    def learned(
        self, weights_of: Callable[[Asked], Weights], *, cautious: bool = False
    ) -> Callable[[Asked], F64] | None:
        """The weighted change that runs lead to expect, (B,), by what `weights_of` takes; None: without runs.

        Args:
            cautious: the lower ends of the intervals in its place.
        """
        intervals = self.intervals
        if intervals is None:
            return None

        def value(asked: Asked) -> F64:
            nats = intervals.of(weights_of(asked))
            return np.asarray(np.nan_to_num(nats.low_BT if cautious else nats.nats_BT) @ self.weights_T)

        return value

    @property
    def ranks_by_runs(self) -> bool:
        """Whether rows can be ranked by what runs lead to expect, which is of means over the retained rows."""
        protocol = self.predictor.protocol
        means = (protocol.side, protocol.weighting) == ("retained", "mean") and self.predictor.additive
        return means and self.intervals is not None and self.training.tokens is None

    def judged(self, name: str, weights: Weights) -> tuple[pa.Table, tuple[str, ...]]:
        """target, weight, change[, nats, nats_low, nats_high] of one subset, and what should be known of them."""
        change_1T, outside = self.predictor.change(weights), Outside()
        columns = {"target": pa.array(self.predictor.targets, pa.string()), "weight": pa.array(self.weights_T)}
        columns["change"] = pa.array(change_1T[0])
        if self.intervals is not None:
            nats = self.intervals.of(weights)
            outside.add([name], nats)
            columns |= {name: pa.array(value_BT[0], from_pandas=True) for name, value_BT in nats.columns.items()}
        return pa.table(columns), (*outside.notes, *notes(self.predictor, self.intervals))


def cautiously(cautious: bool, runs: Environment | RunTable | Path | str | None, training: Training) -> dict[str, Any]:
    """What is noted of the question whether lower ends are maximised.

    Raises:
        SettingsError: there are none.
    """
    if cautious and (runs is None or training.tokens is not None):
        raise SettingsError("cautious: is of what runs lead to expect; give runs, and no train_tokens, or leave it out")
    return {"cautious": True} if cautious else {}


def protocol_of(
    protocol: ScoringProtocol | Path | str | None, diversity: float | None, array_names: Sequence[str]
) -> ScoringProtocol:
    """The protocol, or, with `diversity`, one with a penalty on K_raw as its only geometry; 0 takes it all away.

    The penalty is on the joint sketch where the artifact has both halves, else on the sketch that it has.

    Raises:
        SettingsError: a negative weight, or no sketch to measure diversity by.
    """
    chosen, weight = as_protocol(protocol), diversity
    if weight is None:
        return chosen
    if not 0 <= weight < np.inf:
        raise SettingsError(f"diversity: got {weight:g}, expected 0 or more: the weight of the penalty on redundancy")
    built = [half for half in ("hidden", "residual", "product") if f"{half}_sketch" in array_names]
    if weight and not built:
        raise SettingsError("diversity: the artifact has no sketch to measure it by; leave it out, or build sketches")
    half = "joint" if {"hidden", "residual"} <= set(built) else (built[-1] if built else "")
    components = {f"{half}.raw": -weight} if weight else {}
    name = f"{chosen.name}, diversity {weight:g}"
    return chosen.model_copy(update={"name": name, "components": components, "selected_on": None})


def text_of(title: str, table: pa.Table, formats: Mapping[str, str] | None = None) -> str:
    """A table as text."""
    known = {**FORMATS, **(formats or {})}
    rows = [[_cell(value, known.get(name)) for name, value in row.items()] for row in table.to_pylist()]
    return text_table(title, table.column_names, rows)


def _plain_names(names: Sequence[str]) -> list[str]:
    """Whatever the runs were measured in, summaries call it nats, and say in `runs_unit` what it is."""
    return [*names[:3], *("nats", "nats_low", "nats_high")[: len(names) - 3]]


def _cell(value: Any, form: str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return (form or "{:+z.3f}").format(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
