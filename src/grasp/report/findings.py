"""Everything that a report shows, as numbers and texts: what was built, what its slices and rows are worth, how far
predictions agree with retraining, and what was decided. A part that is missing says why, and how to get it.

Texts are as the corpus has them: whoever shows them must treat them as data.
Shape letters: G slices, T targets, B subsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.api.evaluate import Agreement, agreement
from grasp.arrays import F64
from grasp.artifact.inspection import info
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import SHORT, checked_targets, label_column, leak_notes, length_column, ranked, row_tokens
from grasp.errors import ProtocolLeakError, RunsError
from grasp.inspect.detect import ShownSuspects, read_suspects
from grasp.predict.predictor import EFFECT_SIZE, SIMILAR, Predictor
from grasp.predict.scoring_rule import Interaction, ScoringProtocol
from grasp.predict.slices import (
    LabelSlices,
    SliceFormula,
    cosines,
    dropped_intervals,
    label_slices,
    slice_effects,
    suggest_labels,
)
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.report.example_rows import HeldRows, Pictures, Shades, by_column, crossed, explained, held_rows
from grasp.report.trends import LabelTrend, label_trends
from grasp.runs.calibration import LearningCurve, OutcomePredictor, learn, learning_curve
from grasp.runs.retrained import TrainingRuns
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.text import LONGEST_CELL, different
from grasp.yaml_files import read_yaml, yaml_text

BEST_SHARE = 0.3  # of the rows, in the sentence that says what a choice of rows is worth
NATS = {"nats": "nats a token"}  # what the unit of runs is called on the page, if not by itself


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that is not there."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Change:
    """The predicted change of every target, with an interval; nan where there is none. (G, T) each."""

    value_GT: F64
    low_GT: F64
    high_GT: F64

    @property
    def sign_GT(self) -> NDArray[np.int8]:  # noqa: N802 - a shape suffix
        """1 a gain, -1 a loss, 0: the interval holds zero, or there is none."""
        return (self.low_GT > 0).astype(np.int8) - (self.high_GT < 0).astype(np.int8)


@dataclass(frozen=True, slots=True)
class LabelFindings:
    """One label: its slices, how each target changes without them, and all that is needed to play with them."""

    slices: LabelSlices
    names: list[str]  # of the slices, as a page shows them
    dropped: Change  # in the unit of the findings; a slice that helps is a loss
    by_relevance: Change  # the same in effect sizes, with intervals over the questions of a target
    mean_GT: F64  # effect of a row of the slice; 0 is the average row of the corpus
    cosine_GG: F64 | None  # of the slices' sketches; None: the artifact keeps none
    price: SliceFormula | Predictor  # of weights of the slices: a formula, or who prices them one by one

    def signs(self, targets: Sequence[int]) -> tuple[NDArray[np.int8], bool]:
        """What helps (1) and what hurts (-1) some targets, (G, T), and whether only relevance says so.

        By runs where they are sure of any slice. A single slice often moves a model less than the noise of the runs:
        then by relevance, whose intervals tell whether other questions would say the same.
        """
        sign_GT = -self.dropped.sign_GT[:, targets]
        if sign_GT.any():
            return sign_GT, False
        sign_GT = -self.by_relevance.sign_GT[:, targets]
        return sign_GT, bool(sign_GT.any())


@dataclass(frozen=True, slots=True)
class Worth:
    """What a choice of rows is worth to a target."""

    value: float
    unit: str
    low: float = nan
    high: float = nan
    outside: str = ""  # in which way it lies beyond the runs


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it."""

    environment: TrainingRuns | None = field(repr=False)
    flags: Mapping[str, Any]  # that make the command line say what the page says
    command: str  # that makes the report again
    artifact_path: str
    name: str
    n_rows: int
    n_tokens: int
    targets: tuple[str, ...]
    units: Mapping[str, int]  # of each target, how many
    facts: tuple[tuple[str, str], ...]  # what was built, and from what
    skipped: Mapping[str, int]
    settings: str  # YAML that `grasp build --config` replays
    unit: str  # of the changes: nats where all targets have runs
    plain_unit: str  # of what the formulas of the slices give
    scored_by: str  # in one line
    labels: tuple[LabelFindings, ...]
    parts: LabelFindings | None  # of the first two labels crossed
    best_share: float  # of the rows of each target, the best ones
    best: tuple[Worth, ...]  # what each target gains by keeping those
    rows: HeldRows
    shades: Shades
    pictures: Pictures
    nats: OutcomePredictor | Missing
    trends: tuple[LabelTrend, ...] | Missing
    agreement: Agreement | Missing  # of predictions with retraining
    runs_settings: str  # YAML that `grasp retrain --config` replays; empty where there is none
    curve: LearningCurve | None
    selection: SelectionSummary | Missing
    mixture: MixtureSummary | Missing
    suspects: ShownSuspects | Missing
    lacking: tuple[Missing, ...]


def findings(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    *,
    target: Sequence[str] | None = None,
    by: Sequence[str] = (),
    previous: Sequence[ArtifactReader] = (),
    environment: TrainingRuns | None = None,
    partial: bool = False,
    selection: Path | None = None,
    mixture: Path | None = None,
    suspects: Path | None = None,
    protocol_path: Path | None = None,
    explain: int = 0,
    command: str = "",
) -> Findings:
    """Gather what a report shows.

    Memory: as `predict`; nothing grows with the corpus but a few numbers a row.

    Args:
        by: labels; none: those with a sensible number of values.
        protocol_path: as it was given; None: the one that ships.
        explain: best rows of each target whose words are shaded.
        command: that makes the report again.
    """
    targets = checked_targets(artifact, target)
    selected = NO_SELECTION if selection is None else read_summary(SelectionSummary, selection, artifact)
    mixed = NO_MIXTURE if mixture is None else read_summary(MixtureSummary, mixture, artifact)
    tokens_N = row_tokens(artifact)
    # nobody having asked by name, that of the mixture comes first, for the page opens on the first
    first = () if isinstance(mixed, Missing) else (mixed.label,)
    names = tuple(by) or tuple(dict.fromkeys([*first, *suggest_labels(artifact)]))

    # how far predictions agree with retraining, and what runs say of changes: finished development ones, enough of them
    agreed: Agreement | Missing = NO_RUNS
    if environment is not None:
        agreed = agreement(artifact, environment, protocol, targets=targets, partial=partial)
    predictor = Predictor.from_artifact(artifact, protocol, targets, sketches=SIMILAR)
    columns = [label_slices(label_column(artifact, name, "--by"), tokens_N) for name in names]
    nats: OutcomePredictor | Missing = NO_RUNS
    if environment is not None and partial and environment.pending():
        nats = Missing("No intervals in nats: the runs are unfinished.", "They come with the last of them.")
    elif environment is not None:
        try:
            nats = learn(predictor, artifact, environment)
        except (ProtocolLeakError, RunsError) as err:
            nats = Missing(f"No intervals in nats: {err}.", "Finished development runs give them.")
    covering = nats if isinstance(nats, OutcomePredictor) and set(nats.columns) == set(targets) else None

    # slices, rows
    labels = [_label(artifact, predictor, one, covering) for one in columns]
    parts = _label(artifact, predictor, crossed(*columns[:2]), None) if len(columns) > 1 else None
    long_N = row_tokens(artifact, length_column(artifact)) >= SHORT
    if not long_N.any():
        long_N[:] = True
    rows = held_rows(artifact, predictor, columns, None if parts is None else parts.slices, long_N)
    shades, pictures, unshaded = explained(artifact, protocol, targets, rows, explain) if explain else ({}, {}, "")
    trends = label_trends([*previous, artifact], columns, targets) if previous else NO_TRENDS
    detected = NO_SUSPECTS if suspects is None else read_suspects(suspects, artifact, names)

    n_best = max(1, round(BEST_SHARE * artifact.n_rows))

    # what is not there, and how to get it
    lacking = [Missing(unshaded, "")] if unshaded else []
    if not labels:
        lacking.append(NO_LABELS)
    if not any(row["snippet"] for row in rows.rows):
        lacking.append(NO_TEXT)
    if labels and labels[0].cosine_GG is None:
        lacking.append(NO_SKETCHES)
    lacking += [part for part in (trends, agreed, selected, mixed, detected) if isinstance(part, Missing)]

    manifest, there = artifact.manifest, info(artifact.where)
    facts = (
        ("corpus", str(manifest.settings.get("corpus", {}).get("path", "unknown"))),
        ("reference model", str(manifest.settings.get("model", {}).get("path", "unknown"))),
        *((f"{name} fingerprint", str(value)) for name, value in manifest.fingerprints.items()),
        ("made by", ", ".join(f"{name} {value}" for name, value in manifest.made_by.items())),
        ("arrays", ", ".join(f"{one.name} {one.shape[0]:,} x {one.shape[1]}" for one in there.arrays)),
        *(("leaks", note) for note in leak_notes(artifact, targets)),
        *(("questions", known.note(target)) for target, known in predictor.reliability.items()),
        ("bytes on disk", f"{there.bytes_total:,} ({there.bytes_per_row:,.0f} a row)"),
    )
    run = None if environment is None else environment.path / "run.yaml"
    return Findings(
        environment=environment,
        flags={
            "--target": None if target is None else ",".join(targets),
            "--protocol": protocol_path,
            "--runs": environment.path if isinstance(nats, OutcomePredictor) and environment is not None else None,
        },
        command=command,
        artifact_path=artifact.where,
        name=Path(artifact.where).resolve().name,
        n_rows=artifact.n_rows,
        n_tokens=int(tokens_N.sum()),
        targets=targets,
        units={target: manifest.targets[target] for target in targets},
        facts=facts,
        skipped=dict(manifest.skipped.get("rows", {}).get("counts", {})),
        settings=yaml_text(manifest.settings),
        unit=predictor.unit if covering is None else NATS.get(covering.unit, covering.unit),
        plain_unit=predictor.unit,
        scored_by=f"{predictor.scale}; {predictor.protocol.description}",
        labels=tuple(labels),
        parts=parts,
        best_share=n_best / artifact.n_rows,
        best=best_worth(predictor, targets, n_best, nats),
        rows=rows,
        shades=shades,
        pictures=pictures,
        nats=nats,
        trends=trends,
        agreement=agreed,
        runs_settings=yaml_text(read_yaml(run)) if run is not None and run.exists() else "",
        curve=learning_curve(nats) if isinstance(nats, OutcomePredictor) else None,
        selection=selected,
        mixture=mixed,
        suspects=detected,
        lacking=tuple(lacking),
    )


def best_worth(
    predictor: Predictor, targets: Sequence[str], n_best: int, nats: OutcomePredictor | Missing
) -> tuple[Worth, ...]:
    """What each target gains if the rows with the highest effects on it are kept, and no others."""
    n_rows = len(predictor.effect_NT)
    effects = by_column(predictor.effect_NT, np.arange(n_rows))
    subsets = (
        WeightedRows(target, np.sort(ranked(effect_N, count=n_best)))
        for target, effect_N in zip(targets, effects, strict=True)
    )
    blocks = list(in_blocks(subsets, n_rows, len(targets)))
    value_T = np.diag(np.concatenate([predictor.change(block.weights) for block in blocks])).copy()
    plain_unit = "effect sizes" if predictor.unit == EFFECT_SIZE else predictor.unit
    best = [Worth(float(value), plain_unit) for value in value_T]
    if isinstance(nats, OutcomePredictor):
        tables = [nats.predict(block.weights) for block in blocks]
        bounds_3BT = np.concatenate([[table.nats_BT, table.low_BT, table.high_BT] for table in tables], axis=1)
        outside = [text for table in tables for text in table.outside]
        for t, (value, low, high) in enumerate(np.diagonal(bounds_3BT, axis1=1, axis2=2).T.tolist()):
            learned = isfinite(value)
            unit = NATS.get(nats.unit, nats.unit) if learned else plain_unit
            best[t] = Worth(value if learned else best[t].value, unit, low, high, outside[t])
    return tuple(best)


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
NO_RUNS = Missing(
    "No runs were given, so nothing here says how far predictions agree with retraining.",
    "Retrain on some subsets with grasp retrain, and name the directory with --runs.",
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
NO_SKETCHES = Missing(
    "The artifact keeps no sketches, which interactions are measured by.",
    "Build it with features.hidden_width and features.residual_width above 0.",
)


def _label(
    artifact: ArtifactReader, predictor: Predictor, slices: LabelSlices, nats: OutcomePredictor | None
) -> LabelFindings:
    """Slices of a label; in nats where runs say how much a change is."""
    effects = slice_effects(predictor, slices)
    low_GT, high_GT = dropped_intervals(artifact, predictor, effects, slices)
    dropped = by_relevance = Change(effects.dropped_GT, low_GT, high_GT)
    if nats is not None:
        learned = nats.predict(slices.weights(1.0 - np.eye(len(slices.slices))))
        dropped = Change(learned.nats_BT, learned.low_BT, learned.high_BT)
    price: SliceFormula | Predictor = predictor
    if predictor.protocol.interaction is Interaction.NONE:  # what rows do to one another is no sum over slices
        price = SliceFormula(effects.sums.n_retained_B, effects.sums.effect_BT, predictor.exposure)
    names = different(slices.names, LONGEST_CELL)
    return LabelFindings(slices, names, dropped, by_relevance, effects.effect_GT, cosines(effects.sums), price)
