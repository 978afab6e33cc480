"""Everything that a report shows, as numbers and texts: what was built, what its slices and rows are worth, how far
predictions agree with retraining, and what was decided. A part that is missing says why, and how to get it.

Texts are as the corpus has them: whoever shows them must treat them as data.
Shape letters: G slices, T targets, P places of a grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.inspection import info
from grasp.artifact.reader import Artifact
from grasp.choose.summaries import MixtureSummary, SelectionSummary, read_mixture, read_selection
from grasp.errors import EnvironmentDataError, ProtocolLeakError
from grasp.predict.families import parse_family
from grasp.predict.label_slices import LabelSlices, label_slices, sensible_labels
from grasp.predict.predictions import describe
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.row_tables import ranked_rows, row_tokens
from grasp.predict.scorer import CalibrationFamily, Scorer
from grasp.predict.slice_model import SliceModel
from grasp.predict.slices import LabelTable
from grasp.predict.source import F64, checked_targets
from grasp.report.effects import SliceEffects, slice_effects
from grasp.report.interactions import Interactions, interactions
from grasp.report.suspects import ShownSuspects, read_suspects
from grasp.report.trends import LabelTrend, label_trends
from grasp.runs.agreement import Agreement, agreement
from grasp.runs.environment import Environment
from grasp.runs.old_trust import Trust, UtilityLine, sketches_for
from grasp.settings import read_yaml, yaml_text

ROWS_SHOWN = 8
MIN_TOKENS = 32  # relevance is a mean over a row's positions: very short rows lie far out
GRID_PLACES = 121
GRID_REACH = 2.0  # the grid goes so many times as far as the largest change of a single slice


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
class ScoredBy:
    """How numbers were made."""

    protocol: str
    provenance: str
    calibration: str
    match: str
    negative: str
    components: str
    dropped: str


@dataclass(frozen=True, slots=True)
class NatsLine:
    """Change of realized utility that goes with a change of the prediction, on a grid that is read by interpolation."""

    change_P: F64
    expected_P: F64
    low_P: F64
    high_P: F64


@dataclass(frozen=True, slots=True)
class NatsIntervals:
    """Intervals in nats a token, as one environment shows them, and what it covered."""

    title: str
    lines: Mapping[str, NatsLine]  # by target
    least_share: float
    most_share: float
    distance: Mapping[str, float]  # squared, by sketch
    predicted: Mapping[str, tuple[float, float]]  # the lowest and the highest utility of its subsets, by target
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabelFindings:
    """One label: its slices, what they are worth, how they interact, and all that is needed to play with them."""

    slices: LabelSlices
    effects: SliceEffects
    model: SliceModel
    scored_by: ScoredBy
    interactions: Interactions | Missing
    nats: NatsIntervals | Missing


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One row of the corpus with its text."""

    row_id: str
    relevance: float
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
    previous: Sequence[Artifact] = ()
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
    kernel: str
    labels: tuple[LabelFindings, ...]
    no_labels: Missing | None
    rows: tuple[TargetRows, ...]
    no_text: Missing | None
    trends: tuple[LabelTrend, ...] | Missing
    retraining: Retraining | Missing
    selection: SelectionSummary | Missing
    mixture: MixtureSummary | Missing
    suspects: ShownSuspects | Missing


def findings(artifact: Artifact, protocol: ScoringProtocol, question: Question) -> Findings:
    """Gather what a report shows.

    Memory: as `predict`; nothing grows with the corpus but a few numbers a row.
    Raises:
        ProtocolError: the artifact does not fit the protocol, or has no such target.
        EnvironmentDataError: environment and artifact do not belong together.
        ArtifactError: an earlier artifact of another corpus.
        SubsetError: no such label, or one with a single value.
        SettingsError: a file that is no summary of a selection or a mixture of these rows, or no detection in them.
    """
    targets = checked_targets(artifact, question.targets, "--targets")
    chosen = NO_SELECTION if question.selection is None else read_selection(question.selection, artifact.n_rows)
    mixed = NO_MIXTURE if question.mixture is None else read_mixture(question.mixture, artifact.n_rows)
    tokens_N = row_tokens(artifact)
    names = tuple(question.by) or sensible_labels(artifact)
    table = LabelTable(artifact.rows_path)
    retraining = _retraining(artifact, protocol, targets, question)
    columns = [label_slices(table.column(name, "--by"), tokens_N) for name in names]
    labels = [_label(artifact, protocol, one, table, targets, question) for one in columns]
    rows = tuple(_target_rows(artifact, target, names) for target in targets)
    return Findings(
        built=_built(artifact, targets, int(tokens_N.sum())),
        question=question,
        artifact_path=artifact.where,
        targets=targets,
        kernel=artifact_kernel(artifact),
        labels=tuple(labels),
        no_labels=None if labels else NO_LABELS,
        rows=rows,
        no_text=None if any(row.text for one in rows for row in (*one.top, *one.bottom)) else NO_TEXT,
        trends=label_trends([*question.previous, artifact], columns, targets) if question.previous else NO_TRENDS,
        retraining=retraining,
        selection=chosen,
        mixture=mixed,
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


def artifact_kernel(artifact: Artifact) -> str:
    """The kernel that single rows are ranked by."""
    return "token" if "relevance_token" in artifact.array_names else "pooled"


# ----------------------------------------------------------------------------------------- what was built


def _built(artifact: Artifact, targets: Sequence[str], n_tokens: int) -> Built:
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


def _label(
    artifact: Artifact,
    protocol: ScoringProtocol,
    slices: LabelSlices,
    table: LabelTable,
    targets: Sequence[str],
    question: Question,
) -> LabelFindings:
    halves = sketches_for(artifact.array_names)
    scorer = Scorer.prepare(
        artifact,
        protocol,
        targets=targets,
        per_unit=protocol.standardize.task == "mean_of_standardised",
        calibration=_calibration(protocol, slices.label, table, question),
        halves=halves,
    )
    model = SliceModel.of(scorer, slices)
    said = describe(scorer)
    return LabelFindings(
        slices=slices,
        effects=slice_effects(artifact, scorer, model, slices),
        model=model,
        scored_by=ScoredBy(*(said[f"grasp.{name}"] for name in _SAID)),
        interactions=interactions(model) or NO_INTERACTION,
        nats=_nats(scorer, artifact, model, question),
    )


_SAID = ("protocol", "provenance", "calibration", "match", "negative", "components", "dropped")


def _calibration(protocol: ScoringProtocol, label: str, table: LabelTable, question: Question) -> CalibrationFamily:
    """As `grasp predict --by`: a protocol that was given says itself what standardises."""
    if question.protocol_path is not None:
        return CalibrationFamily.of(protocol, table)
    own = protocol.calibration
    return CalibrationFamily(parse_family(f"mixture:{label}"), own.n_subsets, own.seed, table.column(label))


def _nats(scorer: Scorer, artifact: Artifact, model: SliceModel, question: Question) -> NatsIntervals | Missing:
    """Intervals, where the environment allows for them: a development one, finished, with enough subsets."""
    if question.environment is None:
        return NO_ENVIRONMENT
    if question.partial and question.environment.pending():
        return Missing("No intervals in nats: the environment is unfinished.", "They come with its last run.")
    try:
        trust = Trust.of(scorer, artifact, question.environment)
    except (ProtocolLeakError, EnvironmentDataError) as err:
        return Missing(f"No intervals in nats: {err}.", "A finished development environment gives them.")
    single = np.abs(model.changes(np.concatenate([1.0 - np.eye(len(model.rows_G)), np.eye(len(model.rows_G))])))
    reach = GRID_REACH * float(single.max())
    return NatsIntervals(
        title=trust.title,
        lines={target: _grid(line, reach) for target, line in trust.lines.items()},
        least_share=trust.reach.least,
        most_share=trust.reach.most,
        distance=dict(trust.reach.distance),
        predicted=dict(trust.reach.predicted),
        notes=trust.notes,
    )


def _grid(line: UtilityLine, reach: float) -> NatsLine:
    """Dense where changes are small: places are cubes."""
    change_P = reach * np.linspace(-1.0, 1.0, GRID_PLACES) ** 3
    found = line.change(change_P)
    return NatsLine(change_P, found.expected, found.low, found.high)


# -------------------------------------------------------------------------------------------------- rows


def _target_rows(artifact: Artifact, target: str, labels: Sequence[str]) -> TargetRows:
    least = MIN_TOKENS if bool((row_tokens(artifact) >= MIN_TOKENS).any()) else 0
    top, bottom = (
        ranked_rows(artifact, target, ROWS_SHOWN, bottom=bottom, min_tokens=least).to_pylist()
        for bottom in (False, True)
    )
    return TargetRows(target, *(tuple(_shown(row, labels) for row in rows) for rows in (top, bottom)))


def _shown(row: Mapping[str, Any], labels: Sequence[str]) -> ShownRow:
    named = tuple((name, str(row[name])) for name in labels if row[name] is not None)
    return ShownRow(row["row_id"], row["relevance"], row["n_tokens"], named, row["snippet"] or "")


# -------------------------------------------------------------------------------------------- retraining


def _retraining(
    artifact: Artifact, protocol: ScoringProtocol, targets: Sequence[str], question: Question
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
