"""The objective that `select` and `mix` maximise, and the result that both return.

Start with `SelectionObjective.from_artifact`. Shape letters: N rows, T targets, B subsets.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from grasp.arrays import F64, I32, I64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.errors import SettingsError
from grasp.files import UNSIGNED, atomic_path, with_checksum, write_atomically
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor, RepetitionLaw, SubsetSums
from grasp.predict.scoring_rule import ScoringProtocol, save_protocol
from grasp.predict.subset_tables import CORPUS_KEY
from grasp.predict.weights import Weights
from grasp.results import Result
from grasp.select.change_intervals import change_interval
from grasp.store.checksummed_parquet import write_checksummed
from grasp.text import did_you_mean, json_text, signed, text_table

if TYPE_CHECKING:
    from grasp.runs.calibration import OutcomePredictor
    from grasp.runs.table import RunTable
    from grasp.runs.training_runs import TrainingRuns

GROUP_ROWS = 65_536  # rows per row group of a Parquet file
SUMMARY_VERSION = 2  # of the .json file that is saved with a result
EXPECTED_COLUMN = "expected"  # column of the expected change on other questions
# Changes are printed with a sign; shares, weights and factors without.
FORMATS = {
    "weight": "{:.2f}",
    "now": "{:.1%}",
    "proposed": "{:.1%}",
    "times_as_often": "{:.2f}",
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OptimizationResult(Result):
    """A selection or a mixture, and the change that it is predicted to cause.

    Attributes:
        targets: one row per target, with the columns

            target, weight
            expected, expected_low, expected_high   change on other questions of the target, with its 95 % interval;
                                                    only if the protocol estimates tasks
            change                                  relative to the whole corpus
            nats, nats_low, nats_high               change that the runs predict, with its 90 % interval; only with
                                                    runs, and named after their metric if it is not a loss

        value: weighted mean of the changes, reduced by repetition under a training budget.
        unit: unit of the changes.
        params: arguments of the call.
        outside: how the result extrapolates beyond the runs; empty if it does not.
    """

    kind: ClassVar[str]

    targets: pa.Table
    value: float
    unit: str
    params: Mapping[str, Any]
    protocol: ScoringProtocol
    artifact: ArtifactReader
    outside: str

    def save(self, path: Path | str) -> Path:
        """Write the table as Parquet, and next to it a summary (.json) and the protocol (.protocol.yaml).

        `report --selection` and `--mixture` read the summary, `predict --subsets` the table of a selection. All three
        files record the fingerprint of the corpus.

        Raises:
            SettingsError: the path does not end in .parquet.
        """
        path = Path(path)
        if path.suffix != ".parquet":
            raise SettingsError(f"{path}: expected a path that ends in .parquet")
        corpus = self.artifact.manifest.fingerprints.get("corpus", "")
        with atomic_path(path) as part:
            marked = self.table.replace_schema_metadata({CORPUS_KEY: corpus})
            write_checksummed(marked, part, group_rows=GROUP_ROWS)
        text = json_text({"checksum": UNSIGNED, **self.summary(), CORPUS_KEY: corpus})
        write_atomically(path.with_suffix(".json"), with_checksum(f"{text}\n".encode()))
        save_protocol(self.protocol, path.with_suffix(".protocol.yaml"))
        return path

    def summary(self) -> dict[str, Any]:
        """Return everything but the rows as JSON data, which `grasp.select.summaries` reads."""
        # the columns of runs have fixed names in the summary; `runs_unit` holds their unit
        names, run_columns = self.targets.column_names, self._run_columns
        n_others = len(names) - len(run_columns)
        stored_names = [*names[:n_others], *("nats", "nats_low", "nats_high")[: len(run_columns)]]
        return {
            "kind": self.kind,
            "format_version": SUMMARY_VERSION,
            "headline": self.headline,
            "params": dict(self.params),
            "targets": self.targets.rename_columns(stored_names).to_pylist(),
            "runs_unit": next(iter(run_columns), None),
            "value": self.value,
            "scale": self.unit,
            "protocol": self.protocol.model_dump(mode="json"),
            "outside": self.outside,
            "notes": list(self.notes),
        }

    @property
    def _run_columns(self) -> list[str]:
        """Return the columns of `targets` that the runs predict, which are the last ones; empty without runs."""
        names: list[str] = self.targets.column_names
        return names[names.index("change") + 1 :]

    def _shown_table(self, title: str, table: pa.Table) -> str:
        """Format a table as text."""
        run_columns = self._run_columns  # printed with one more digit, as they differ little
        lines = []
        for row in table.to_pylist():
            cells = []
            for name, value in row.items():
                if isinstance(value, float):
                    digits = 4 if name in run_columns else 3
                    cells.append(FORMATS[name].format(value) if name in FORMATS else signed(value, digits))
                elif value is None:
                    cells.append("-")
                else:
                    cells.append(f"{value:,}" if isinstance(value, int) else str(value))
            lines.append(cells)
        return text_table(title, table.column_names, lines)

    def _shown_changes(self) -> str:
        """Format the table of changes as text."""
        title = f"predicted change against the whole corpus, {self.unit}"
        if EXPECTED_COLUMN in self.targets.column_names:
            title += "; expected: on other questions, 95% interval"
        return self._shown_table(title, self.targets)


@dataclass(frozen=True, slots=True)
class EvaluatedSubset:
    """Predicted changes of one subset: `OptimizationResult.targets`, `OptimizationResult.outside`, and their notes.

    `verdict` begins the headline if the interval of the weighted change contains 0; else it is empty. There is none if
    the runs have metrics of different kinds, which cannot be averaged.
    """

    targets: pa.Table
    outside: str
    verdict: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectionObjective:
    """Weighted mean of the predicted changes of the targets, as a function of a row or of a set of rows.

    A training run passes (its tokens) / (tokens of the corpus) times over the corpus. A small selection has a high mean
    effect but is repeated often; the whole corpus has a change of 0; the optimal size lies in between. Repetition is
    counted in rows: half of the rows are seen twice as often, whatever their lengths.

    Attributes:
        protocol: protocol that was requested; `predictor` uses its additive part.
        budget_predictor: `predictor` with the repetition law of the training budget, if there is one.
        weights_T: weights of the targets; they add up to 1.
        effect_N: weighted mean over the targets of the effect of each row.
        tokens_N: tokens of each row.
        train_tokens: length of the training run; None: one epoch of the corpus.
        run_model: predictor fitted to runs, if there are any.
        cautious: maximise the lower confidence bound of `run_model` instead of its mean.
    """

    artifact: ArtifactReader
    protocol: ScoringProtocol
    predictor: Predictor
    budget_predictor: Predictor
    weights_T: F64
    effect_N: F64
    tokens_N: I64
    train_tokens: float | None
    run_model: "OutcomePredictor | None"
    cautious: bool

    @classmethod
    def from_artifact(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol | Path | str | None,
        targets: Mapping[str, float],
        train_tokens: float | None,
        runs: "TrainingRuns | RunTable | Path | str | None",
        *,
        cautious: bool,
    ) -> Self:
        """Compute the effect of every row in one pass over the relevance, and fit a model to the runs, if any.

        Args:
            artifact: artifact of the corpus.
            protocol: protocol to predict with. None: the built-in one.
            targets: weight of each target; they add up to 1.
            train_tokens: length of the training run; None: one epoch of the corpus.
            runs: retrained or imported runs.
            cautious: maximise the lower confidence bound of the model fitted to the runs.
        Raises:
            SettingsError: `cautious` without runs, or together with `train_tokens`; or the runs have metrics of
                different kinds for the targets.
        """
        if cautious and (runs is None or train_tokens is not None):
            raise SettingsError("cautious: requires `runs`, and cannot be combined with train_tokens")
        sketches = () if runs is None else SIMILARITY_SKETCHES
        weights_T, tokens_N = np.array(list(targets.values())), row_tokens(artifact)
        rule = resolve_protocol(protocol, artifact)
        additive = rule if rule.is_additive else rule.additive
        predictor = Predictor.from_artifact(artifact, additive, list(targets), sketches=sketches)
        effect_N = predictor.task.effects.dot(weights_T)
        run_model = None
        if runs is not None:
            from grasp.runs.calibration import fit_outcomes  # noqa: PLC0415 - imported only if there are runs

            run_model = fit_outcomes(predictor, artifact, runs)
            if len(run_model.requested_kinds) > 1 and train_tokens is None:
                kinds = ", ".join(f"{run_model.kinds[target]} of {target}" for target in run_model.task_by_target)
                raise SettingsError(f"target: got {kinds}; different metrics cannot be averaged, pass one target")
        budget_predictor = predictor
        if train_tokens is not None:
            budget_predictor = replace(predictor, repetition_law=repetition_law(train_tokens, tokens_N))
        terms = predictor, budget_predictor, weights_T, effect_N
        return cls(artifact, rule, *terms, tokens_N, train_tokens, run_model, cautious)

    @property
    def by_runs(self) -> bool:
        """Return whether to maximise the change that the runs predict, instead of that by relevance.

        The model fitted to runs is a function of means over rows, so it says nothing of repetition: under a training
        budget, relevance decides.
        """
        return self.run_model is not None and self.train_tokens is None

    def value(self, sums: SubsetSums) -> F64:
        """Return the weighted change of subsets, (B,), reduced by repetition under a training budget.

        Args:
            sums: sums of `predictor` over subsets whose rows have weight 1. `predictor` has no repetition law, so that
                its sums do not depend on the training budget.
        """
        return np.asarray(self.budget_predictor.change_of(sums) @ self.weights_T)

    def predicted_by_runs(self, weights: Weights) -> F64:
        """Return the weighted change that the runs predict, (B,), or its lower confidence bound if `cautious`."""
        assert self.run_model is not None
        predicted = self.run_model.predict(weights)
        # NaN: a target without runs, which does not count
        return np.asarray(np.nan_to_num(predicted.low_BT if self.cautious else predicted.change_BT) @ self.weights_T)

    def result_fields(self, changes: EvaluatedSubset, value: float, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `OptimizationResult` other than those of `Result`."""
        fields = {"unit": self.predictor.unit, "protocol": self.predictor.protocol, "artifact": self.artifact}
        return {"targets": changes.targets, "outside": changes.outside, "value": value, "params": params, **fields}

    def evaluate(self, name: str, weights: Weights, baseline: str, codes_N: I32 | None = None) -> EvaluatedSubset:
        """Predict the changes of one subset.

        Args:
            name: name of the subset, for notes.
            weights: weights of its rows.
            baseline: baseline of the changes, for notes, e.g. "the whole corpus".
            codes_N: slice of each row, for a mixture; its intervals are then over rows as well as over units.

        Returns:
            The changes, and notes on intervals, extrapolation, reliability and the protocol.
        """
        columns = {"target": pa.array(self.predictor.units.targets, pa.string()), "weight": pa.array(self.weights_T)}
        # Reliability says how far a change carries over to other questions if single rows are selected by the known
        # ones. A mixture does not depend on single rows, so that its change on the known questions is not optimistic.
        reliability = self.predictor.reliability if codes_N is None else {}
        interval = None
        if self.run_model is None or reliability:
            interval = change_interval(self.artifact, self.predictor, weights, self.weights_T, codes_N)
            if interval.expected_T is not None:
                ends = {"": interval.expected_T, "_low": interval.low_T, "_high": interval.high_T}
                columns |= {
                    f"{EXPECTED_COLUMN}{end}": pa.array(value_T, from_pandas=True) for end, value_T in ends.items()
                }
        columns["change"] = pa.array(self.predictor.change(weights)[0])
        outside = ""
        if self.run_model is None:
            assert interval is not None
            interval_notes = tuple(interval.notes(self.predictor.units.targets))
            (low, high), level, unit = interval.weighted, 0.95, self.predictor.unit
        else:
            from grasp.runs.calibration import COVERAGE, ExtrapolationLog  # noqa: PLC0415 - only if there are runs

            predicted, extrapolation = self.run_model.predict(weights), ExtrapolationLog()
            extrapolation.add([name], predicted)
            columns |= {end: pa.array(value_BT[0], from_pandas=True) for end, value_BT in predicted.columns.items()}
            interval_notes, outside = extrapolation.notes, predicted.outside[0]
            # errors of the targets may be correlated, so that half-widths add up
            low, high = (
                float(np.nan_to_num(end_BT[0]) @ self.weights_T) for end_BT in (predicted.low_BT, predicted.high_BT)
            )
            level, unit = COVERAGE, predicted.unit
        verdict = ""
        if low <= 0.0 <= high and (self.run_model is None or len(self.run_model.requested_kinds) == 1):
            verdict = f"not distinguishable from {baseline} ({low:+.3f} to {high:+.3f} {unit}, {level:.0%} interval); "
        notes = [*interval_notes, *(of_target.note(target) for target, of_target in reliability.items())]
        if not self.protocol.is_additive:
            notes.append(f"protocol {self.protocol.name} is not additive: rows are selected by its additive part")
        return EvaluatedSubset(pa.table(columns), outside, verdict, tuple(notes))


def repetition_law(train_tokens: float | None, tokens_N: I64) -> RepetitionLaw:
    """Return the repetition law of a training run on the whole corpus; None: a run of one epoch."""
    return RepetitionLaw(None if train_tokens is None else train_tokens / int(tokens_N.sum()))


def weighted_targets(
    targets: str | Sequence[str] | Mapping[str, float] | None, artifact_targets: Sequence[str]
) -> Mapping[str, float]:
    """Parse targets and normalise their weights to a sum of 1.

    Args:
        targets: `sciq`, `sciq=2,openbookqa=1`, names, or a mapping of names to weights; None: the only target.
        artifact_targets: targets of the artifact, which identify names that contain a comma or `=`.

    Raises:
        SettingsError: no target is named and there are several; a target is unknown or occurs twice; or a weight is not
            a positive number.
    """
    targets_text = f"the artifact has {', '.join(artifact_targets)}"
    if targets is None:
        targets = artifact_targets if len(artifact_targets) == 1 else ()
    pairs: list[tuple[str, float]] = []
    problems: list[str] = []
    if isinstance(targets, str):
        # a name of the artifact, which may contain a comma or = (longest first, as one may be a prefix of another), or
        # any other name; then its weight. Anything else is no target.
        names = "|".join(re.escape(name) for name in sorted(artifact_targets, key=len, reverse=True))
        pattern = rf"\s*(?:({names})|([^,=]+?))\s*(?:=\s*([^,]*))?(?:,|$)|.+"
        for match in re.finditer(pattern, targets, re.DOTALL):
            known_name, other_name, weight = match.groups()
            try:
                pairs.append((known_name or other_name or match[0], 1.0 if weight is None else float(weight)))
            except ValueError:
                problems.append(f"got {match[0].strip(' ,')!r}")
    else:
        pairs = [(name, float(targets[name]) if isinstance(targets, Mapping) else 1.0) for name in targets]
    weights, example = dict(pairs), ",".join(f"{name}={2 - k}" for k, name in enumerate(artifact_targets[:2]))
    problems += [
        f"got {name!r}{did_you_mean(name, artifact_targets)}" for name in weights if name not in artifact_targets
    ]
    problems += [
        f"got {name} more than once" for name, count in Counter(name for name, _ in pairs).items() if count > 1
    ]
    problems += [f"got {name} with the weight {weight:g}" for name, weight in pairs if not 0 < weight < math.inf]
    if problems or not pairs:
        raise SettingsError(
            f"target: {'; '.join(problems) or 'missing'}; {targets_text}; pass one, or several once each with weights "
            f"above 0, e.g. {example}"
        )
    largest = max(weights.values())  # divide by it first: the sum of very large weights would overflow
    total = sum(weight / largest for weight in weights.values())
    return {name: weight / largest / total for name, weight in weights.items()}


def format_targets(targets: Mapping[str, float]) -> str:
    """Format targets as `weighted_targets` parses them, with weights if they differ."""
    are_equal = len(set(targets.values())) == 1
    return ",".join(targets if are_equal else (f"{name}={weight:.4g}" for name, weight in targets.items()))
