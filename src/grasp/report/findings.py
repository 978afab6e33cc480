"""Collect the contents of a report as numbers and texts.

`collect_findings` returns `Findings`: the provenance of the artifact, effects of slices and rows, agreement with
retraining, a selection, and the mixture that another command found. A part that is not available is None. Corpus text
is unescaped here: code that displays it must treat it as data.

A slice is the set of rows with one value of a label. The effect of a row on a target is the predicted change of its
utility from training on the row, in effect sizes: standard deviations over the rows. Runs are models that were
retrained on subsets. With runs of every target, changes are in the unit of the runs instead, e.g. nats per token.

The page leads with the label that has most evidence: with the mean effect m_g of the rows of slice g, its share p_g of
the rows, and the ratio z_g of the change if it is dropped to its standard error, which random groups of the same size
have as well,

    evidence = sum_g p_g m_g^2 (1 - 1 / z_g^2)

is the variance of the effects between slices beyond that of random groups, averaged over the targets by their weights.
It counts only if a slice is significant among all slices and targets that are compared.

Shape letters: N rows, G slices, T targets, B subsets.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.api.evaluate import Agreement, agreement
from grasp.arrays import F64, ratio
from grasp.artifact.inspection import info
from grasp.artifact.manifest import MODEL
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import (
    MIN_RELIABLE_TOKENS,
    label_column,
    leak_notes,
    leaked_rows,
    row_lengths,
    row_tokens,
    suggest_labels,
)
from grasp.errors import ProtocolLeakError, RunsError
from grasp.models.build_source import WARM_UP, WarmUpRecord
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor
from grasp.predict.scoring_rule import ScoringProtocol, load_protocol
from grasp.predict.slice_intervals import dropped_errors
from grasp.predict.slices import LabelSlices, label_slices, slice_effects
from grasp.progress import Progress
from grasp.report.example_rows import ExampleRows, Shades, collect_example_rows, explain_rows
from grasp.runs.calibration import COVERAGE, OutcomePredictor, fit_outcomes
from grasp.runs.training_runs import TrainingRuns
from grasp.select.objective import weighted_targets
from grasp.select.select import select
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.store.records import read_record
from grasp.text import MAX_CELL_CHARS, unique_names
from grasp.yaml_files import read_yaml, yaml_text

NO_INTERVALS = "No intervals in the unit of the runs"
DEFAULT_BUDGET = "30%"  # of the selection, if none is given
# An address, a path of a file, or an id of hexadecimal digits: values that name a place and not a kind of text.
PLACE = re.compile(r".*://.*|[^ ]*/[^ ]*\.\w{1,9}|(\w+[:_-])?(?=\D*\d)[0-9a-fA-F-]{12,}")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What the slices contribute to every target, with confidence intervals, (G, T) each; nan if there is none.

    Attributes:
        value_GT: contributions: the change if the slice is dropped, with the opposite sign. Above 0: the slice helps.
        low_GT, high_GT: bounds of the interval of each contribution alone.
        bound_GT: magnitude above which a contribution is significant: half the width of the interval if the probability
            of an error is divided by the number of slices (Bonferroni), so that it holds for all slices together.
    """

    value_GT: F64
    low_GT: F64
    high_GT: F64
    bound_GT: F64

    @property
    def sign_GT(self) -> NDArray[np.int8]:  # noqa: N802 - a shape suffix
        """Return 1 for slices that significantly help, -1 for those that hurt, and 0 otherwise."""
        return (self.value_GT > self.bound_GT).astype(np.int8) - (self.value_GT < -self.bound_GT).astype(np.int8)


@dataclass(frozen=True, slots=True)
class LabelFindings:
    """One label: its slices, the effect of dropping each, and a model that predicts any mixture of them."""

    slices: LabelSlices
    names: list[str]  # display names of the slices
    evidence: float  # variance of effects between slices, beyond that of random groups; 0: no slice is significant
    contribution: Contribution  # of each slice, in `Findings.unit`
    by_relevance: Contribution  # the same in effect sizes, with intervals over questions and documents
    weights_model: F64 | Predictor  # what `payload` computes the change under any weights of the slices from

    def signs(self, targets: Sequence[int]) -> tuple[NDArray[np.int8], bool]:
        """Return which slices help (1) or hurt (-1) the given targets, (G, T), and whether by relevance only.

        Uses the runs if they find any significant slice. Dropping a single slice often changes a model by less than
        the noise of the runs; then relevance is used, with intervals over questions and documents.
        """
        sign_GT = self.contribution.sign_GT[:, targets]
        if sign_GT.any():
            return sign_GT, False
        sign_GT = self.by_relevance.sign_GT[:, targets]
        return sign_GT, bool(sign_GT.any())


@dataclass(frozen=True, slots=True)
class Findings:
    """The complete contents of a report."""

    # commands that reproduce the report
    command: str  # command line of the report
    flags: Mapping[str, Any]  # options with which `grasp predict` prints the numbers of the page
    settings: str  # YAML for `grasp build --config`
    warm_up: str  # option of `grasp build` with the steps before the model was read; empty if there are none
    runs_settings: str  # YAML for `grasp retrain --config`; empty if there is none
    # the artifact
    artifact_path: str
    n_rows: int
    n_tokens: int
    targets: tuple[str, ...]
    weights_T: F64  # of the targets; they add up to 1
    units: Mapping[str, int]  # number of units per target
    facts: tuple[tuple[str, str], ...]  # provenance: name and value
    skipped: Mapping[str, int]  # number of skipped rows by reason
    # predictions
    unit: str  # unit of the changes: that of the runs if all targets have runs
    effect_unit: str  # unit of predictions without runs
    scored_by: str  # one-line description of the scoring rule
    labels: tuple[LabelFindings, ...]
    rows: ExampleRows
    shades: Shades  # words of the example rows, shaded by their contribution
    unshaded: str  # reason why words are not shaded; empty if they are, or were not requested
    # comparison with retrained runs
    runs: TrainingRuns | None = field(repr=False)
    outcomes: OutcomePredictor | str  # predicts in the unit of the runs; or the reason why nothing does
    agreement: Agreement | None  # of predictions with retraining
    selection_protocol: Path | None  # file of the scoring rule of the selection; None: the built-in rule
    selection: SelectionSummary  # that of another command, or the best 30 % of the rows
    mixture: MixtureSummary | None


def collect_findings(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    *,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    by: Sequence[str] = (),
    runs: TrainingRuns | None = None,
    selection: Path | None = None,
    mixture: Path | None = None,
    protocol_path: Path | None = None,
    explain: int = 0,
    command: str = "",
    progress: Progress | None = None,
) -> Findings:
    """Collect the contents of a report.

    Memory: as for `predict`; only a few numbers per row grow with the corpus. Further arguments are those of
    `grasp.report.build_report.report`.

    Args:
        protocol: scoring rule of the predictions.
        by: labels to slice by. Default: all labels with a suitable number of values that are no paths or ids.
        protocol_path: file of the scoring rule, shown in commands. None: the built-in rule.
        command: command line that reproduces the report.
    Raises:
        SettingsError, ProtocolError, RunsError, SubsetError: as `grasp.report.build_report.report`.
    """
    progress = progress or Progress()
    progress.stage("predictions", rows=None, tokens=None)
    weight_by_target = weighted_targets(artifact.targets if target is None else target, artifact.targets)
    targets, weights_T = tuple(weight_by_target), np.array(list(weight_by_target.values()))
    if selection is not None:
        selection_summary = read_summary(SelectionSummary, selection, artifact)
    mixture_summary = None if mixture is None else read_summary(MixtureSummary, mixture, artifact)

    run_agreement = None if runs is None else agreement(artifact, runs, protocol, targets=targets)
    sketches = () if runs is None else SIMILARITY_SKETCHES
    predictor = Predictor.from_artifact(artifact, protocol, targets, sketches=sketches)
    tokens_N = row_tokens(artifact)
    columns = [label_column(artifact, name, "--by") for name in by or suggest_labels(artifact)]
    if not by:  # without labels most of whose values are addresses, paths of files or ids
        places = [sum(PLACE.fullmatch(str(value)) is not None for value in column.values) for column in columns]
        columns = [column for column, n in zip(columns, places, strict=True) if 2 * n <= len(column.values)]
    slices_by_label = [label_slices(column, tokens_N) for column in columns]
    outcomes: OutcomePredictor | str = ""  # predictions in the unit of the runs need finished development runs
    if runs is not None and runs.pending():
        outcomes = f"{NO_INTERVALS}: they are unfinished"
    elif runs is not None:
        try:
            outcomes = fit_outcomes(predictor, artifact, runs)
        except (ProtocolLeakError, RunsError) as err:
            outcomes = f"{NO_INTERVALS}: {err}"
    complete_outcomes = None  # changes are in the unit of the runs only if every target has runs, all in one unit
    if isinstance(outcomes, OutcomePredictor) and set(outcomes.task_by_target) == set(targets):
        complete_outcomes = outcomes if len(outcomes.requested_kinds) == 1 else None

    n_compared = len(targets) * sum(len(slices.slices) for slices in slices_by_label)
    labels = [
        _label_findings(artifact, predictor, slices, complete_outcomes, weights_T, n_compared)
        for slices in slices_by_label
    ]
    # the page opens on the label of the mixture, or on that with most evidence
    opens_on = None if mixture_summary is None else mixture_summary.label
    labels.sort(key=lambda label: (label.slices.label == opens_on, label.evidence), reverse=True)
    if selection is None:
        used_runs = None if complete_outcomes is None else runs
        has_leaks = bool(leak_notes(artifact, targets))
        drop_leaks = has_leaks and len(leaked_rows(artifact, targets)) < artifact.n_rows
        best = select(
            artifact, DEFAULT_BUDGET, weight_by_target, runs=used_runs, drop_leaks=drop_leaks, protocol=protocol
        )
        selection_summary = SelectionSummary.model_validate(best.summary() | {"corpus": ""})
    long_N = row_lengths(artifact) >= MIN_RELIABLE_TOKENS
    label_slices_shown = [label.slices for label in labels]
    rows = collect_example_rows(artifact, predictor, label_slices_shown, long_N if long_N.any() else ~long_N)
    shades, unshaded = explain_rows(artifact, protocol, targets, rows, explain, progress) if explain else ({}, "")
    run_file = None if runs is None else runs.path / "run.yaml"
    runs_settings = yaml_text(read_yaml(run_file)) if run_file is not None and run_file.exists() else ""
    rule_file = None if selection is None else selection.with_suffix(".protocol.yaml")
    saved = None if rule_file is None or not rule_file.exists() else load_protocol(rule_file)
    settings, warm_up, record_file = artifact.manifest.settings, "", artifact.path / MODEL / WARM_UP
    if record_file.exists():  # the build began with another model
        from grasp.training.fine_tuning_recipe import FineTuningRecipe  # noqa: PLC0415 - brings torch

        record = read_record(record_file, WarmUpRecord)
        settings = settings | {"model": settings["model"] | {"path": record.model}}
        warm_up = f" --warm-up {record.steps or FineTuningRecipe(**record.recipe or {}).steps(artifact.n_rows) // 2}"
    return Findings(
        command=command,
        flags={
            "--target": None if target is None else ",".join(targets),
            "--protocol": protocol_path,
            "--runs": runs.path if isinstance(outcomes, OutcomePredictor) and runs is not None else None,
        },
        settings=yaml_text(settings),
        warm_up=warm_up,
        runs_settings=runs_settings,
        artifact_path=artifact.location,
        n_rows=artifact.n_rows,
        n_tokens=int(tokens_N.sum()),
        targets=targets,
        weights_T=weights_T,
        units={target: artifact.manifest.targets[target] for target in targets},
        facts=_facts(artifact, targets, predictor),
        skipped=dict(artifact.manifest.skipped.get("rows", {}).get("counts", {})),
        unit=predictor.unit if complete_outcomes is None else display_unit(complete_outcomes.unit),
        effect_unit=predictor.unit,
        scored_by=f"{predictor.scale}; {predictor.protocol.description}",
        labels=tuple(labels),
        rows=rows,
        shades=shades,
        unshaded=unshaded,
        runs=runs,
        outcomes=outcomes,
        agreement=run_agreement,
        selection_protocol=protocol_path if saved is None or saved == predictor.protocol.additive else rule_file,
        selection=selection_summary,
        mixture=mixture_summary,
    )


def display_unit(unit: str) -> str:
    """Return the unit of runs as the page names it."""
    return "nats per token" if unit == "nats" else unit


def _facts(artifact: ArtifactReader, targets: Sequence[str], predictor: Predictor) -> tuple[tuple[str, str], ...]:
    """Return the provenance of the artifact, warnings included, as pairs of a name and a text."""
    manifest, artifact_info = artifact.manifest, info(artifact.location)
    return (
        ("corpus", str(manifest.settings.get("corpus", {}).get("path", "unknown"))),
        ("reference model", str(manifest.settings.get("model", {}).get("path", "unknown"))),
        *((f"{name} fingerprint", str(value)) for name, value in manifest.fingerprints.items()),
        ("made by", ", ".join(f"{name} {value}" for name, value in manifest.made_by.items())),
        ("arrays", ", ".join(f"{array.name} {array.shape[0]:,} x {array.shape[1]}" for array in artifact_info.arrays)),
        *(("leaks", note) for note in leak_notes(artifact, targets)),
        *(("replay", line) for line in artifact_info.replays),
        *(("questions", known.note(target)) for target, known in predictor.reliability.items()),
        ("bytes on disk", f"{artifact_info.bytes_total:,} ({artifact_info.bytes_per_row:,.0f} per row)"),
    )


def _label_findings(
    artifact: ArtifactReader,
    predictor: Predictor,
    slices: LabelSlices,
    outcomes: OutcomePredictor | None,
    weights_T: F64,
    n_compared: int,
) -> LabelFindings:
    """Compute the findings of one label; contributions are in the unit of the runs if `outcomes` is given."""
    effects = slice_effects(predictor, slices)
    errors, n_slices = dropped_errors(artifact, predictor, effects, slices), len(slices.slices)
    low_GT, high_GT = errors.interval
    by_relevance = Contribution(-effects.dropped_GT, -high_GT, -low_GT, errors.half_widths(compared=n_slices))
    contribution = by_relevance
    if outcomes is not None:
        predicted = outcomes.predict(slices.weights(1.0 - np.eye(n_slices)))  # drop one slice at a time
        quantile, joint = outcomes.gaussian_process.quantile, 1.0 - (1.0 - COVERAGE) / n_slices
        bound_GT = (predicted.high_BT - predicted.change_BT) * quantile(joint) / quantile(COVERAGE)
        contribution = Contribution(-predicted.change_BT, -predicted.high_BT, -predicted.low_BT, bound_GT)
    # other changes are not a sum over slices
    weights_model = effects.sums.effect_BT if predictor.protocol.is_additive else predictor
    names = unique_names(slices.names, MAX_CELL_CHARS)
    # the variance of the effects between slices beyond that of random groups; 0: none is significant
    share_G = slices.rows_G / slices.rows_G.sum()
    is_significant_T = (np.abs(errors.value_GT) > errors.half_widths(compared=n_compared)).any(axis=0)
    noise_GT = ratio(errors.error_GT, errors.value_GT) ** 2  # 1 / z^2
    variance_T = share_G @ np.nan_to_num(effects.effect_GT**2 * (1.0 - noise_GT))
    evidence = float(np.where(is_significant_T, np.maximum(variance_T, 0.0), 0.0) @ weights_T)
    return LabelFindings(slices, names, evidence, contribution, by_relevance, weights_model)
