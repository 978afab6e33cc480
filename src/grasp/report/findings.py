"""Everything that a report shows, as numbers and texts: what was built, what its slices and rows are worth, how far
predictions agree with retraining, and what was decided. A part that is missing says why, and how to get it.

Texts are as the corpus has them: whoever shows them must treat them as data.
Shape letters: G slices, T targets, P places of a grid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.inspection import info
from grasp.artifact.reader import ArtifactReader
from grasp.choose.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.errors import EnvironmentDataError, ProtocolLeakError
from grasp.predict.intervals import Intervals, measures
from grasp.predict.label_slices import LabelSlices, label_slices, sensible_labels
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.ranking import ranked
from grasp.predict.row_arrays import F64, checked_targets, row_tokens
from grasp.predict.slice_effects import SliceEffects, dropped_intervals, slice_effects
from grasp.predict.slice_formula import SliceFormula
from grasp.predict.slices import LabelTable
from grasp.report.interactions import Interactions, interactions
from grasp.report.suspects import ShownSuspects, read_suspects
from grasp.report.trends import LabelTrend, label_trends
from grasp.runs.compare import Agreement, agreement
from grasp.runs.environment import Environment
from grasp.runs.trust import fit_intervals
from grasp.settings import read_yaml, yaml_text

ROWS_SHOWN = 8
MIN_TOKENS = 32  # relevance is a mean over a row's positions: very short rows lie far out


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that is not there."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Built:
    """What was built, and from what."""

    name: str
    n_rows: int
    n_tokens: int
    targets: Mapping[str, int]  # units
    examples: Mapping[str, tuple[str, str]]  # prompt and completion of one unit a target
    facts: tuple[tuple[str, str], ...]
    skipped: Mapping[str, int]
    settings: str  # YAML that `grasp build --config` replays


@dataclass(frozen=True, slots=True)
class LabelFindings:
    """One label: its slices, what they are worth, how they interact, and all that is needed to play with them."""

    slices: LabelSlices
    effects: SliceEffects
    low_GT: F64  # 95 % interval of what dropping a slice changes, over units; nan where a target has a single unit
    high_GT: F64
    formula: SliceFormula
    interactions: Interactions | Missing


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One row of the corpus with its text."""

    row_id: str
    effect: float
    tokens: int
    labels: tuple[tuple[str, str], ...]
    text: str


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows with the highest and the lowest relevance to a target."""

    target: str
    top: tuple[ShownRow, ...]
    bottom: tuple[ShownRow, ...]


@dataclass(frozen=True, slots=True)
class Retraining:
    """Predictions beside retraining."""

    agreement: Agreement
    role: str
    settings: str  # YAML that `grasp retrain --config` replays; empty where the environment keeps none


@dataclass(frozen=True, slots=True)
class Question:
    """What a report is asked to show, and of what."""

    targets: Sequence[str] | None = None
    by: Sequence[str] = ()  # labels; none: those with a sensible number of values
    previous: Sequence[ArtifactReader] = ()
    environment: Environment | None = None
    partial: bool = False
    selection: Path | None = None
    mixture: Path | None = None
    suspects: Path | None = None
    protocol_path: Path | None = None  # as it was given; none: the one that ships
    command: str = ""  # that makes the report again


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it."""

    built: Built
    question: Question = field(repr=False)
    artifact_path: str
    targets: tuple[str, ...]
    unit: str  # of every change
    scored_by: str  # in one line
    labels: tuple[LabelFindings, ...]
    nats: Intervals | Missing
    no_labels: Missing | None
    rows: tuple[TargetRows, ...]
    no_text: Missing | None
    trends: tuple[LabelTrend, ...] | Missing
    retraining: Retraining | Missing
    selection: SelectionSummary | Missing
    mixture: MixtureSummary | Missing
    suspects: ShownSuspects | Missing


def findings(artifact: ArtifactReader, protocol: ScoringProtocol, question: Question) -> Findings:
    """Gather what a report shows.

    Memory: as `predict`; nothing grows with the corpus but a few numbers a row.
    Raises:
        ProtocolError: the artifact does not fit the protocol, or has no such target.
        EnvironmentDataError: environment and artifact do not belong together.
        ArtifactError: an earlier artifact of another corpus.
        SubsetError: no such label, or one with a single value.
        SettingsError: a file that is no summary of a selection or a mixture of these rows, or no detection in them.
    """
    targets = checked_targets(artifact, question.targets)
    kept, mixed = question.selection, question.mixture
    selection = NO_SELECTION if kept is None else read_summary(SelectionSummary, kept, artifact)
    mixture = NO_MIXTURE if mixed is None else read_summary(MixtureSummary, mixed, artifact)
    tokens_N = row_tokens(artifact)
    names = tuple(question.by) or sensible_labels(artifact)
    table = LabelTable(artifact.rows_path)
    retraining = _retraining(artifact, protocol, targets, question)
    predictor = Predictor.of(artifact, protocol, targets, sketches=measures(artifact.array_names))
    columns = [label_slices(table.column(name, "--by"), tokens_N) for name in names]
    labels = [_label(artifact, predictor, one) for one in columns]
    long_N = tokens_N >= (MIN_TOKENS if bool((tokens_N >= MIN_TOKENS).any()) else 0)
    rows = tuple(_target_rows(artifact, predictor, target, names, long_N) for target in targets)
    return Findings(
        built=_built(artifact, targets, int(tokens_N.sum())),
        question=question,
        artifact_path=artifact.where,
        targets=targets,
        unit=predictor.unit,
        scored_by=predictor.provenance,
        labels=tuple(labels),
        nats=_nats(predictor, artifact, question),
        no_labels=None if labels else NO_LABELS,
        rows=rows,
        no_text=None if any(row.text for one in rows for row in (*one.top, *one.bottom)) else NO_TEXT,
        trends=label_trends([*question.previous, artifact], columns, targets) if question.previous else NO_TRENDS,
        retraining=retraining,
        selection=selection,
        mixture=mixture,
        suspects=NO_SUSPECTS if question.suspects is None else read_suspects(question.suspects, artifact, names),
    )


NO_LABELS = Missing(
    "The corpus has no label column with 2 to 100 values.",
    "Name one with --by LABEL (the tail of a label with more values is grouped), or add a column such as topic or "
    "source to the corpus and build again.",
)
NO_TEXT = Missing(
    "The artifact keeps no text of its rows (corpus.snippet_chars is 0).",
    "Build it with --set corpus.snippet_chars=240 to read the rows here.",
)
NO_TRENDS = Missing(
    "One checkpoint was built.",
    "Build earlier checkpoints of the model on the same corpus, and name the artifacts, oldest first, with --previous.",
)
NO_ENVIRONMENT = Missing(
    "No environment was given, so nothing here says how far predictions agree with retraining.",
    "Retrain on some subsets with grasp retrain, and name the directory with --environment.",
)
NO_SELECTION = Missing(
    "No selection was given.", "Choose rows with grasp select, and name the .json beside its --out with --selection."
)
NO_MIXTURE = Missing(
    "No mixture was given.", "Choose weights with grasp mix, and name the .json beside its --out with --mixture."
)
NO_SUSPECTS = Missing(
    "No detection was given.", "Look for suspicious rows with grasp detect, and name its --out with --detect."
)
NO_INTERACTION = Missing(
    "The artifact keeps no sketches, which interactions are measured by.",
    "Build it with features.hidden_width and features.residual_width above 0.",
)


# ----------------------------------------------------------------------------------------- what was built


def _built(artifact: ArtifactReader, targets: Sequence[str], n_tokens: int) -> Built:
    manifest, found = artifact.manifest, info(artifact.where)
    settings = manifest.settings
    units = artifact.units.select(["target", "prompt", "completion"]).to_pylist()
    first = {target: next(unit for unit in units if unit["target"] == target) for target in targets}
    facts = [
        ("corpus", str(settings.get("corpus", {}).get("path", "unknown"))),
        ("reference model", str(settings.get("model", {}).get("path", "unknown"))),
        *((f"{name} fingerprint", str(value)) for name, value in manifest.fingerprints.items()),
        ("made by", ", ".join(f"{name} {value}" for name, value in manifest.made_by.items())),
        ("arrays", ", ".join(f"{one.name} {one.shape[0]:,} x {one.shape[1]}" for one in found.arrays)),
        ("bytes on disk", f"{found.bytes_total:,} ({found.bytes_per_row:,.0f} a row)"),
    ]
    return Built(
        name=Path(artifact.where).resolve().name,
        n_rows=artifact.n_rows,
        n_tokens=n_tokens,
        targets={target: manifest.targets[target] for target in targets},
        examples={target: (str(unit["prompt"]), str(unit["completion"])) for target, unit in first.items()},
        facts=tuple(facts),
        skipped=dict(manifest.skipped.get("rows", {}).get("counts", {})),
        settings=yaml_text(settings),
    )


# ------------------------------------------------------------------------------------------------ labels


def _label(artifact: ArtifactReader, predictor: Predictor, slices: LabelSlices) -> LabelFindings:
    effects = slice_effects(predictor, slices)
    low_GT, high_GT = dropped_intervals(artifact, predictor, effects, slices)
    formula = SliceFormula.of(predictor, effects.sums)
    return LabelFindings(slices, effects, low_GT, high_GT, formula, interactions(formula) or NO_INTERACTION)


def _nats(predictor: Predictor, artifact: ArtifactReader, question: Question) -> Intervals | Missing:
    """Intervals, where the environment allows for them: a development one, finished, with enough subsets."""
    if question.environment is None:
        return NO_ENVIRONMENT
    if question.partial and question.environment.pending():
        return Missing("No intervals in nats: the environment is unfinished.", "They come with its last run.")
    try:
        return fit_intervals(predictor, artifact, question.environment)
    except (ProtocolLeakError, EnvironmentDataError) as err:
        return Missing(f"No intervals in nats: {err}.", "A finished development environment gives them.")


# -------------------------------------------------------------------------------------------------- rows


def _target_rows(
    artifact: ArtifactReader, predictor: Predictor, target: str, labels: Sequence[str], long_N: NDArray[np.bool_]
) -> TargetRows:
    effect_N = predictor.effect_NT[:, predictor.targets.index(target)]
    ends = [ranked(sign * effect_N, among_N=long_N)[:ROWS_SHOWN] for sign in (1, -1)]
    top, bottom = (tuple(_shown(artifact, end, effect_N, labels)) for end in ends)
    return TargetRows(target, top, bottom)


def _shown(
    artifact: ArtifactReader, row_index: NDArray[np.int64], effect_N: NDArray[np.float32], labels: Sequence[str]
) -> Iterator[ShownRow]:
    for i, row in zip(row_index, artifact.rows(row_index).to_pylist(), strict=True):
        named = tuple((name, str(row[name])) for name in labels if row[name] is not None)
        yield ShownRow(row["row_id"], float(effect_N[i]), row["n_tokens"], named, row["snippet"] or "")


# -------------------------------------------------------------------------------------------- retraining


def _retraining(
    artifact: ArtifactReader, protocol: ScoringProtocol, targets: Sequence[str], question: Question
) -> Retraining | Missing:
    environment = question.environment
    if environment is None:
        return NO_ENVIRONMENT
    run = environment.path / "run.yaml"
    return Retraining(
        agreement(artifact, environment, protocol, targets=targets, partial=question.partial),
        environment.role,
        yaml_text(read_yaml(run)) if run.exists() else "",
    )
