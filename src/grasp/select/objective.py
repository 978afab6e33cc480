"""What `select` and `mix` share: the question (targets and their weights) and an answer that can be saved.

Shape letters: N rows, T targets, B subsets.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from grasp.api.predict import notes
from grasp.arrays import F64, I32, I64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.errors import SettingsError
from grasp.files import UNSIGNED, with_checksum, write_whole, written_aside
from grasp.predict.predictor import SIMILAR, Predictor, RepetitionLaw, SubsetSums
from grasp.predict.scoring_rule import ScoringProtocol, parse_protocol, resolve_protocol, save_protocol
from grasp.predict.subset_tables import CORPUS
from grasp.predict.weights import Weights
from grasp.results import Result
from grasp.select.change_intervals import change_interval
from grasp.store.checksummed_parquet import write_checksummed
from grasp.text import did_you_mean, json_text, signed, text_table

if TYPE_CHECKING:
    from grasp.runs.calibration import OutcomePredictor
    from grasp.runs.retrained import TrainingRuns
    from grasp.runs.table import RunTable

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
class OptimizationResult(Result):
    """What was chosen, and what it is predicted to bring.

    Attributes:
        targets: target, weight, change (against the whole corpus), and, with runs, nats, nats_low and nats_high, or
            the metric of the runs in their place.
        value: weighted mean of the changes, less what repetition takes under a training budget.
        unit: of the changes.
        params: arguments of the call.
    """

    kind: ClassVar[str]

    targets: pa.Table
    value: float
    unit: str
    params: Mapping[str, Any]
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
            write_checksummed(marked, part, group_rows=GROUP_ROWS)
        text = json_text({"checksum": UNSIGNED, **self.summary(), CORPUS: corpus})
        write_whole(path.with_suffix(".json"), with_checksum(f"{text}\n".encode()))
        save_protocol(self.protocol, path.with_suffix(".protocol.yaml"))
        return path

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON; `grasp.select.summaries` reads it."""
        names = self.targets.column_names
        plain_names = [*names[:3], *("nats", "nats_low", "nats_high")[: len(names) - 3]]  # `runs_unit` says what it is
        return {
            "kind": self.kind,
            "format_version": SUMMARY_VERSION,
            "headline": self.headline,
            "asked": dict(self.params),
            "targets": self.targets.rename_columns(plain_names).to_pylist(),
            "runs_unit": next(iter(names[3:]), None),
            "value": self.value,
            "scale": self.unit,
            "protocol": self.protocol.model_dump(mode="json"),
            "notes": list(self.notes),
        }

    def _shown_table(self, title: str, table: pa.Table) -> str:
        """A table as text."""
        by_runs = self.targets.column_names[3:]  # which differ little
        lines = []
        for row in table.to_pylist():
            cells = []
            for name, value in row.items():
                if isinstance(value, float):
                    digits = 4 if name in by_runs else 3
                    cells.append(FORMATS[name].format(value) if name in FORMATS else signed(value, digits))
                elif value is None:
                    cells.append("-")
                else:
                    cells.append(f"{value:,}" if isinstance(value, int) else str(value))
            lines.append(cells)
        return text_table(title, table.column_names, lines)

    def _shown_changes(self) -> str:
        return self._shown_table(f"predicted change against the whole corpus, {self.unit}", self.targets)


@dataclass(frozen=True, slots=True)
class SelectionObjective:
    """What is aimed at: targets and their weights. Says what a row, or a set of rows, is worth to them.

    A training budget of T tokens reads a corpus of C tokens T / C times. A small choice has a high mean effect and is
    read often, all rows have the change 0, and the best budget lies in between. Repetition is counted in rows: half of
    them are read twice as often, whatever their lengths.
    """

    artifact: ArtifactReader
    predictor: Predictor
    budget_predictor: Predictor  # for the training budget, if one was said
    weights_T: F64
    effect_N: F64  # of every row, weighed over the targets
    tokens_N: I64
    train_tokens: float | None  # None: not said; as long as the corpus
    run_model: "OutcomePredictor | None"
    cautious: bool  # the lower ends of the intervals are what counts

    @classmethod
    def from_artifact(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol,
        targets: Mapping[str, float],
        train_tokens: float | None,
        runs: "TrainingRuns | RunTable | Path | str | None",
        *,
        cautious: bool,
    ) -> Self:
        """Read the relevance of the rows, once.

        Raises:
            SettingsError: `cautious`, and there are no intervals.
        """
        if cautious and (runs is None or train_tokens is not None):
            raise SettingsError(
                "cautious: is of what runs lead to expect; give runs, and no train_tokens, or leave it out"
            )
        sketches = () if runs is None else SIMILAR
        weights_T, tokens_N = np.array(list(targets.values())), row_tokens(artifact)
        predictor = Predictor.from_artifact(artifact, protocol, list(targets), sketches=sketches)
        effect_N = predictor.task.effects.dot(weights_T)
        intervals = None
        if runs is not None:
            from grasp.runs.calibration import fit_outcomes  # noqa: PLC0415 - read only if there are runs

            intervals = fit_outcomes(predictor, artifact, runs)
        trained = (
            predictor if train_tokens is None else replace(predictor, exposure=repetition_law(train_tokens, tokens_N))
        )
        return cls(artifact, predictor, trained, weights_T, effect_N, tokens_N, train_tokens, intervals, cautious)

    def value(self, sums: SubsetSums) -> F64:
        """Weighted change of plain subsets, (B,), less what repetition takes under a training budget."""
        return np.asarray(self.budget_predictor.change_of(sums) @ self.weights_T)

    def predicted_by_runs(self, weights: Weights) -> F64:
        """The weighted change that runs lead to expect, (B,), or the lower end of its interval."""
        assert self.run_model is not None
        nats = self.run_model.predict(weights)
        return np.asarray(np.nan_to_num(nats.low_BT if self.cautious else nats.nats_BT) @ self.weights_T)

    def evaluate(
        self, name: str, weights: Weights, today: str, codes_N: I32 | None = None
    ) -> tuple[pa.Table, tuple[str, ...]]:
        """target, weight, change[, nats, nats_low, nats_high] of one subset, and what should be known of them.

        Args:
            today: what changes are counted from, for a message.
            codes_N: slice of each row, of a mixture: its interval is over rows as well.
        """
        change_1T, beyond = self.predictor.change(weights), tuple[str, ...]()
        columns = {"target": pa.array(self.predictor.units.targets, pa.string()), "weight": pa.array(self.weights_T)}
        columns["change"] = pa.array(change_1T[0])
        if self.run_model is None:
            interval = change_interval(self.artifact, self.predictor, weights, self.weights_T, codes_N)
            beyond = tuple(interval.sentences(self.predictor.units.targets, today))
        else:
            from grasp.runs.calibration import ExtrapolationLog  # noqa: PLC0415 - as above

            nats, outside = self.run_model.predict(weights), ExtrapolationLog()
            outside.add([name], nats)
            beyond = outside.notes
            columns |= {name: pa.array(value_BT[0], from_pandas=True) for name, value_BT in nats.columns.items()}
        return pa.table(columns), (*beyond, *notes(self.predictor, self.run_model))

    def result_fields(self, changes: pa.Table, value: float, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that every `OptimizationResult` for this objective has."""
        return {
            "targets": changes,
            "value": value,
            "unit": self.predictor.unit,
            "params": params,
            "protocol": self.predictor.protocol,
            "artifact": self.artifact,
        }


def resolve_rule(
    artifact: ArtifactReader, protocol: ScoringProtocol | Path | str | None, diversity: float | None
) -> ScoringProtocol:
    """Return the rule that is asked for, with `diversity`, if given, in the place of its geometry."""
    rule = resolve_protocol(protocol, artifact)
    return rule if diversity is None else with_diversity(rule, diversity, artifact.array_names)


def repetition_law(train_tokens: float | None, tokens_N: I64) -> RepetitionLaw:
    """What rows count in a training of so many tokens on a corpus; None: as long as the corpus."""
    return RepetitionLaw(None if train_tokens is None else train_tokens / int(tokens_N.sum()))


def with_diversity(protocol: ScoringProtocol, weight: float, array_names: Sequence[str]) -> ScoringProtocol:
    """The protocol with a penalty on K_raw as its only geometry; 0 takes it all away.

    The penalty is on the joint sketch where the artifact has both halves, else on the sketch that it has.

    Raises:
        SettingsError: a negative weight, or no sketch to measure diversity by.
    """
    if not 0 <= weight <= MOST_DIVERSITY:
        raise SettingsError(
            f"diversity: got {weight:g}, expected 0 to {MOST_DIVERSITY:g}: the weight of the penalty on redundancy"
        )
    built = [half for half in ("hidden", "residual", "product") if f"{half}_sketch" in array_names]
    if weight and not built:
        raise SettingsError("diversity: the artifact has no sketch to measure it by; leave it out, or build sketches")
    half = "joint" if {"hidden", "residual"} <= set(built) else (built[-1] if built else "")
    changed = {
        "name": f"{protocol.name}, diversity {weight:g}",
        "components": {f"{half}.raw": -weight} if weight else {},
        "selected_on": None,
    }
    return parse_protocol(protocol.model_dump() | changed, "diversity")


def weighted_targets(
    targets: str | Sequence[str] | Mapping[str, float] | None, known: Sequence[str]
) -> Mapping[str, float]:
    """Targets and their weights, which add up to 1.

    Args:
        given: `sciq`, `sciq=2,openbookqa=1`, names, or names and weights; None: the one that there is.
        known: targets of the artifact; names with a comma or `=` in them are found by it.
    Raises:
        SettingsError: none named where there are several, an unknown one, one twice, or a weight that is not a
            positive number.
    """
    has = f"the artifact has {', '.join(known)}"
    if targets is None:
        if len(known) != 1:
            raise SettingsError(f"target: got none, and {has}; name one, or weigh several: {known[0]}=2,{known[1]}=1")
        return {known[0]: 1.0}
    pairs: list[tuple[str, float]] = []
    if isinstance(targets, str):
        # where one name begins another, the longer one is meant
        names = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
        part, at = re.compile(rf"\s*(?:({names})|([^,=]+?))\s*(?:=\s*([^,]*))?(?:,|$)"), 0
        while at < len(targets):
            match = part.match(targets, at)
            if match is None:
                raise SettingsError(f"target: got {targets[at:]!r}, expected target or target=weight; {has}")
            try:
                pairs.append((match[1] or match[2], 1.0 if match[3] is None else float(match[3])))
            except ValueError as err:
                raise SettingsError(
                    f"target: got {match[0].strip(' ,')!r}, expected a target, or target=weight with a weight above 0"
                ) from err
            at = match.end()
    else:
        pairs += [(name, float(targets[name]) if isinstance(targets, Mapping) else 1.0) for name in targets]
    weights: dict[str, float] = {}
    for name, weight in pairs:
        if name not in known:
            raise SettingsError(f"target: got {name!r}{did_you_mean(name, known)}, {has}")
        if name in weights:
            raise SettingsError(f"target: got {name} more than once; give it one weight, e.g. {name}=2")
        if not 0 < weight < math.inf:
            raise SettingsError(f"target: got {name} with the weight {weight:g}, expected a number above 0")
        weights[name] = weight
    if not weights:
        raise SettingsError(f"target: got none; {has}")
    most = max(weights.values())  # sums of the largest numbers there are would overflow
    total = sum(weight / most for weight in weights.values())
    return {name: weight / most / total for name, weight in weights.items()}
