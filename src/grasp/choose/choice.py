"""What `select` and `mix` share: the question (targets and their weights) and an answer that can be saved.

Shape letters: N rows, T targets, B subsets.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from grasp.arrays import F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.files import UNSIGNED, with_checksum, write_whole, written_aside
from grasp.predict.predictor import Exposure, Predictor, SubsetSums
from grasp.predict.protocol import ScoringProtocol, as_protocol, protocol_from, save_protocol
from grasp.predict.rows import row_tokens
from grasp.predict.subset_tables import CORPUS
from grasp.predict.weights import Weights
from grasp.results import Result
from grasp.runs.environment import Environment
from grasp.runs.imported import runs_beside
from grasp.runs.learning import OutcomePredictor, Outside, learn, measures
from grasp.runs.table import RunTable
from grasp.store.sealed import write_sealed
from grasp.text import json_text, signed, text_table
from grasp.verbs.predict import notes

GROUP_ROWS = 65_536
MOST_DIVERSITY = 1e6  # far more than leaves anything to relevance
SUMMARY_VERSION = 1  # of the .json beside a choice
# Changes have a sign; shares, weights and factors have none.
FORMATS = {
    "weight": "{:.2f}",
    "now": "{:.1%}",
    "proposed": "{:.1%}",
    "times_as_often": "{:.2f}",
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Choice(Result):
    """What was chosen, and what it is predicted to bring.

    Attributes:
        targets: target, weight, change (against the whole corpus), and, with runs, nats, nats_low and nats_high, or
            the metric of the runs in their place.
        value: weighted mean of the changes, less what repetition takes under a training budget.
        unit: of the changes.
        asked: the question.
    """

    kind: ClassVar[str]

    targets: pa.Table
    value: float
    unit: str
    asked: Mapping[str, Any]
    protocol: ScoringProtocol
    artifact: ArtifactReader

    def save(self, path: Path | str) -> Path:
        """Write the table as Parquet, with a summary (.json) and the protocol (.protocol.yaml) beside it.

        `report --selection` and `--mixture` take the summary, `predict --subsets` the table of a selection. All three
        say which corpus they are of.

        Raises:
            SettingsError: another ending than .parquet.
        """
        path = Path(path)
        if path.suffix != ".parquet":
            raise SettingsError(f"{path}: expected a name that ends in .parquet")
        corpus = self.artifact.manifest.fingerprints.get("corpus", "")
        with written_aside(path) as part:
            marked = self.table.replace_schema_metadata({CORPUS: corpus})
            write_sealed(marked, part, group_rows=GROUP_ROWS)
        text = json_text({"checksum": UNSIGNED, **self.summary(), CORPUS: corpus})
        write_whole(path.with_suffix(".json"), with_checksum(f"{text}\n".encode()))
        save_protocol(self.protocol, path.with_suffix(".protocol.yaml"))
        return path

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        names = self.targets.column_names
        plain_names = [*names[:3], *("nats", "nats_low", "nats_high")[: len(names) - 3]]  # `runs_unit` says what it is
        return {
            "kind": self.kind,
            "format_version": SUMMARY_VERSION,
            "headline": self.headline,
            "asked": dict(self.asked),
            "targets": self.targets.rename_columns(plain_names).to_pylist(),
            "runs_unit": next(iter(names[3:]), None),
            "value": self.value,
            "scale": self.unit,
            "protocol": self.protocol.model_dump(mode="json"),
            "notes": list(self.notes),
        }

    def _change_text(self) -> str:
        digits = dict.fromkeys(self.targets.column_names[3:], 4)  # by runs, which differ little
        return text_of(f"predicted change against the whole corpus, {self.unit}", self.targets, digits)


@dataclass(frozen=True, slots=True)
class Training:
    """How long the model will be trained: a budget of T tokens reads a corpus of C tokens T / C times.

    A small choice has a high mean effect and is read often, all rows have the change 0, and the best budget lies in
    between. Repetition is counted in rows: half of them are read twice as often, whatever their lengths.
    """

    tokens: float | None  # None: not said; as long as the corpus
    corpus_tokens: int

    @property
    def epochs(self) -> float:
        """How often the corpus is seen; 1 where no budget was said."""
        return 1.0 if self.tokens is None else self.tokens / self.corpus_tokens

    @property
    def exposure(self) -> Exposure:
        """What rows count that are seen more, or less, often."""
        return Exposure(None if self.tokens is None else self.epochs)


@dataclass(frozen=True, slots=True)
class SelectionObjective:
    """What is aimed at: targets and their weights. Says what a row, or a set of rows, is worth to them."""

    artifact: ArtifactReader
    predictor: Predictor
    weights_T: F64
    effect_N: F64  # of every row, weighed over the targets
    tokens_N: I64
    training: Training
    intervals: OutcomePredictor | None
    cautious: bool  # the lower ends of the intervals are what counts

    @classmethod
    def from_artifact(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol,
        targets: Mapping[str, float],
        training: Training,
        runs: Environment | RunTable | Path | str | None,
        *,
        cautious: bool,
    ) -> Self:
        """Read the relevance of the rows, once.

        Raises:
            SettingsError: `cautious`, and there are no intervals.
        """
        if cautious and (runs is None or training.tokens is not None):
            raise SettingsError(
                "cautious: is of what runs lead to expect; give runs, and no train_tokens, or leave it out"
            )
        beside = None if runs is None else runs_beside(artifact, runs)
        sketches = () if beside is None else measures(artifact.array_names)
        weights_T, tokens_N = np.array(list(targets.values())), row_tokens(artifact)
        predictor = Predictor.from_artifact(artifact, protocol, list(targets), sketches=sketches)
        effect_N = predictor.task.effects.dot(weights_T)
        intervals = None if beside is None else learn(predictor, artifact, beside)
        return cls(artifact, predictor, weights_T, effect_N, tokens_N, training, intervals, cautious)

    @property
    def trained(self) -> Predictor:
        """The predictor for the training budget, if one was said."""
        return self.predictor if self.training.tokens is None else self.predictor.trained(self.training.exposure)

    def value(self, sums: SubsetSums) -> F64:
        """Weighted change of plain subsets, (B,), less what repetition takes under a training budget."""
        return np.asarray(self.trained.change_of(sums) @ self.weights_T)

    def learned(self, weights: Weights) -> F64:
        """The weighted change that runs lead to expect, (B,), or the lower end of its interval."""
        assert self.intervals is not None
        nats = self.intervals.predict(weights)
        return np.asarray(np.nan_to_num(nats.low_BT if self.cautious else nats.nats_BT) @ self.weights_T)

    @property
    def ranks_by_runs(self) -> bool:
        """Whether rows can be ranked by what runs lead to expect, which is of means over the retained rows."""
        return not self.predictor.protocol.interacts and self.intervals is not None and self.training.tokens is None

    def judged(self, name: str, weights: Weights) -> tuple[pa.Table, tuple[str, ...]]:
        """target, weight, change[, nats, nats_low, nats_high] of one subset, and what should be known of them."""
        change_1T, outside = self.predictor.change(weights), Outside()
        columns = {"target": pa.array(self.predictor.targets, pa.string()), "weight": pa.array(self.weights_T)}
        columns["change"] = pa.array(change_1T[0])
        if self.intervals is not None:
            nats = self.intervals.predict(weights)
            outside.add([name], nats)
            columns |= {name: pa.array(value_BT[0], from_pandas=True) for name, value_BT in nats.columns.items()}
        return pa.table(columns), (*outside.notes, *notes(self.predictor, self.intervals))


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
    if not 0 <= weight <= MOST_DIVERSITY:
        raise SettingsError(
            f"diversity: got {weight:g}, expected 0 to {MOST_DIVERSITY:g}: the weight of the penalty on redundancy"
        )
    built = [half for half in ("hidden", "residual", "product") if f"{half}_sketch" in array_names]
    if weight and not built:
        raise SettingsError("diversity: the artifact has no sketch to measure it by; leave it out, or build sketches")
    half = "joint" if {"hidden", "residual"} <= set(built) else (built[-1] if built else "")
    changed = {
        "name": f"{chosen.name}, diversity {weight:g}",
        "components": {f"{half}.raw": -weight} if weight else {},
        "selected_on": None,
    }
    return protocol_from(chosen.model_dump() | changed, "diversity")


def text_of(title: str, table: pa.Table, digits: Mapping[str, int] | None = None) -> str:
    """A table as text; `digits` of columns that are to have others than 3."""
    digits_of = digits or {}
    rows = [[_cell(name, value, digits_of.get(name, 3)) for name, value in row.items()] for row in table.to_pylist()]
    return text_table(title, table.column_names, rows)


def _cell(name: str, value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return FORMATS[name].format(value) if name in FORMATS else signed(value, digits)
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows in the order in which they were taken, and what is proven of them."""

    row_index: I64
    gain: F64 | None  # exact marginal gain of each when it was taken; None: its effect
    bound: float | None  # no selection of as many rows within the limits has a higher change
    guarantee: str
    notes: tuple[str, ...]


PLACES = 50
SEARCHED = 200  # lengths that are compared at once for the best one


@dataclass(frozen=True, slots=True)
class Curve:
    """The first rows of a choice."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    effect: tuple[float, ...]  # of the last row, or document, of each beginning
    value: tuple[float, ...]  # of all its rows: change against the corpus, repetition counted


def curve_of(aim: SelectionObjective, row_index: I64, places: Sequence[int], effect_N: F64 | None = None) -> Curve:
    """The beginnings of a choice that have so many rows; `places` ascend.

    Args:
        effect_N: what rows are ordered by, if it is not their own effect but that of their document.
    """
    cuts = np.concatenate([[0], places])
    parts = [np.sort(row_index[a:b]) for a, b in itertools.pairwise(cuts)]
    indices = np.concatenate(parts)
    rows_BN = csr_array((np.ones(len(indices)), indices, cuts), shape=(len(parts), aim.predictor.n_rows))
    sums = aim.predictor.sums(Weights(rows_BN)).cumulated()
    tokens_B = np.cumsum([int(aim.tokens_N[part].sum()) for part in parts])
    last_B = (aim.effect_N if effect_N is None else effect_N)[row_index[np.asarray(places) - 1]]
    columns = (np.asarray(places), tokens_B, last_B, aim.value(sums))
    return Curve(*(tuple(column.tolist()) for column in columns))


def searched(most: int, values: Callable[[I64], Sequence[float]], at_once: int = SEARCHED, near: float = 0.0) -> int:
    """The length up to `most` with the highest value; on a grid, then between its neighbours.

    Args:
        at_once: lengths that are compared at once.
        near: stop where neighbours are this share of the length apart; 0: at single rows.
    """
    places = np.unique(np.geomspace(1, most, at_once).round().astype(np.int64))
    while True:
        at = int(np.argmax(values(places)))
        low, high = int(places[max(at - 1, 0)]), int(places[min(at + 1, len(places) - 1)])
        if len(places) == places[-1] - places[0] + 1 or high - low <= near * places[at]:
            return int(places[at])
        places = np.unique(np.linspace(low, high, at_once).round().astype(np.int64))


def even_places(n_rows: int, also: int = 0) -> list[int]:
    """Up to PLACES lengths, evenly spaced, the last one being all; and one more, if it is asked for."""
    places = np.unique(np.round(np.linspace(0, n_rows, PLACES + 1)[1:]).astype(np.int64))
    return sorted({int(place) for place in (*places, also) if place})
