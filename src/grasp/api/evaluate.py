"""Compare predictions with retrained models: the function `evaluate` behind `grasp.evaluate`.

Methods are additive combinations of kernels, scoring protocols and published methods. A target is called `sciq` in an
artifact, and `sciq` or `sciq@all` in runs, by the tokens whose loss was evaluated.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader, Opened
from grasp.errors import RunsError, SettingsError
from grasp.methods.contract import AlignedRuns, MethodInputs
from grasp.methods.registry import ConfiguredMethod, configure_methods, method_predictions
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.progress import Progress
from grasp.runs.alignment import Alignment, match_targets
from grasp.runs.evaluation import Evaluation, evaluate_predictions
from grasp.runs.imported_runs import bind_runs
from grasp.runs.metrics import MIN_SUBSETS, RESAMPLES
from grasp.runs.predictions import Predictions
from grasp.runs.table import Place, Runs
from grasp.runs.training_runs import Role, TrainingRuns
from grasp.text import parse_names

SUMS = (  # sums of kernels that are evaluated, besides every kernel alone
    ("output_layer", "embedding"),
    ("output_layer", "embedding", "knn"),
)


def evaluate(
    art: Opened,
    runs: Runs,
    *,
    protocol: ScoringProtocol | Place | None = None,
    target: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    method_settings: Place | Mapping[str, Any] | None = None,
    checkpoints: Sequence[Place] = (),
    resamples: int = RESAMPLES,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare the predictions of several methods with retrained models.

    Reports Spearman's rho with 95 % intervals, and the noise ceiling, which a perfect predictor would reach. Scores of
    published methods are cached, so an interrupted command continues where it stopped. Results on which a protocol was
    selected are marked "in sample".

    Args:
        runs: retrained subsets; see `grasp retrain`. Of an unfinished directory, the finished ones.
        protocol: additional protocol to compare with the built-in one.
        target: targets, separated by commas. Default: all that artifact and runs have in common.
        methods: published methods, separated by commas; see `grasp methods`.
        method_settings: YAML of settings by method, or by a label of your own; see `grasp methods`.
        checkpoints: checkpoint, or training run, for methods that use several. Default: next to the model.
        resamples: bootstrap resamples of the subsets.
        progress: receives the progress of published methods.
    Raises:
        RunsError: artifact and runs have different rows (the message contains the command that builds a matching
            artifact), or utilities are incomplete.
    """
    bound_runs = bind_runs(art.files, runs)
    published = configure_methods(methods, method_settings)
    if checkpoints and not any("checkpoints" in entry.method.requires for entry in published):
        raise SettingsError(
            "checkpoints: no effect without a method that uses them; pass one with --methods, or omit it"
        )
    built_in = resolve_protocol(None, art.files, known_questions=True)
    protocols = {built_in.name: built_in}
    if protocol is not None:  # if its name is taken, the name of the file is added
        requested = resolve_protocol(protocol, art.files, known_questions=True)
        origin = "yours" if isinstance(protocol, ScoringProtocol) else Path(protocol).name
        used_names = {built_in.name, *additive_methods(art.files.array_names)}
        protocols[f"{requested.name} ({origin})" if requested.name in used_names else requested.name] = requested
    notes = [f"protocol {name}: {rule.selection_summary}" for name, rule in protocols.items()]
    return compare(
        art.files,
        bound_runs,
        protocols,
        methods=published,
        checkpoints=[Path(path) for path in checkpoints],
        targets=None if target is None else parse_names(target, art.files.targets),
        resamples=resamples,
        notes=notes,
        progress=progress,
    )


def compare(
    artifact: ArtifactReader,
    runs: TrainingRuns,
    protocols: Mapping[str, ScoringProtocol],
    *,
    predicted: Sequence[Predictions] = (),
    selected_on: Mapping[str, Collection[str]] | None = None,
    methods: Sequence[ConfiguredMethod] = (),
    checkpoints: Sequence[Path] = (),
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate several methods on the same runs; the additive kernel combinations are always included.

    Args:
        predicted: predictions of further methods.
        selected_on: targets of these runs that further methods were selected on, by the name of the method.
        methods: published methods; `checkpoints` for those that use several.
        targets: target names of the runs; default: all that the artifact has.
        seeds: training seeds to use; default: all.
        notes: notes to include in the result.
    Raises:
        RunsError: artifact or utilities do not match, or are incomplete.
        ProtocolError: the artifact does not fit a protocol.
        SettingsError: an input that a method requires is missing, or its label is used already.
    """
    alignment = Alignment.from_runs(runs, artifact)
    common = tuple(alignment.run_targets.values())
    if targets == [] or any(name not in common for name in targets or ()):
        raise RunsError(f"target: got {list(targets or ())}; runs and artifact have {list(common)} in common")
    selected = common if targets is None else tuple(targets)
    utilities = runs.utilities(seeds=seeds, partial=True).select(*selected)
    inputs = MethodInputs(
        artifact,
        checkpoint_paths=tuple(checkpoints),
        runs=AlignedRuns.from_alignment(alignment, utilities),
        progress=progress or Progress(),
    )
    resolved = {name: protocol.resolved_for(artifact) for name, protocol in protocols.items()}
    rules = additive_methods(artifact.array_names) | resolved
    for method in methods:
        if method.label in rules:
            raise SettingsError(f"methods: {method.label!r} is the name of a built-in method; use another label")
        method.method.check(inputs)
    run_targets = {target: run_target for target, run_target in alignment.run_targets.items() if run_target in selected}
    published = [method_predictions(method, inputs, alignment.blocks, renamed=run_targets) for method in methods]
    predictions = [*alignment.predict(rules, selected), *predicted, *published]
    evaluated = [
        name
        for name in selected
        if targets is not None or all(name in prediction.targets for prediction in predictions)
    ]
    notes = [*notes, *(note for prediction in published for note in prediction.notes)]
    if targets is None and (left_out := [name for name in runs.targets if name not in evaluated]):
        notes.append(f"not evaluated, since not every method predicts them: {', '.join(left_out)}")
    fingerprint = alignment.runs_fingerprint
    protocols_on = {name: protocol.targets_selected_on(fingerprint) for name, protocol in protocols.items()}
    return evaluate_predictions(
        runs,
        predictions,
        targets=evaluated or None,
        seeds=seeds,
        resamples=resamples,
        notes=notes,
        selected_on=protocols_on | dict(selected_on or {}),
    )


def additive_methods(array_names: Sequence[str]) -> dict[str, ScoringProtocol]:
    """Return an additive protocol for each kernel, and for sums of kernels, that the artifact has."""
    available = [name.removeprefix("relevance_") for name in array_names if name.startswith("relevance_")]
    combinations = [*((kernel,) for kernel in available), *(kernels for kernels in SUMS if {*kernels} <= {*available})]
    names = [f"{'+'.join(kernels)} additive" for kernels in combinations]
    return {
        name: ScoringProtocol(name=name, match=dict.fromkeys(kernels, 1.0))
        for name, kernels in zip(names, combinations, strict=True)
    }


@dataclass(frozen=True, slots=True)
class TargetPoints:
    """Predicted and realized utility of every subset, for one target.

    Attributes:
        target: target name of the runs.
        role: role of the target.
        subset_ids: names of the subsets.
        predicted_B: predicted change up to a constant; in effect sizes if the protocol is additive.
        realized_B: mean over seeds and units, nats per token; higher is better.
        spread_B: standard deviation over seeds; nan for one seed.
    """

    target: str
    role: Role
    subset_ids: tuple[str, ...]
    predicted_B: F64
    realized_B: F64
    spread_B: F64


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a protocol with runs, for the report: metrics, and points of scatter plots."""

    protocol: str
    report: Evaluation
    points: tuple[TargetPoints, ...]
    n_planned: int  # planned number of subsets
    seeds_planned: int


def agreement(
    artifact: ArtifactReader,
    runs: TrainingRuns,
    protocol: ScoringProtocol,
    *,
    targets: Sequence[str] | None = None,
) -> Agreement:
    """Compare a protocol, and the additive kernel combinations, with runs.

    Of unfinished runs, the subsets are used that have a result for every seed; if there are fewer than three, the last
    seeds are ignored.

    Args:
        targets: target names of the artifact; default: all that both have.
    Raises:
        RunsError: artifact and runs do not match, or results are missing.
        ProtocolError: the artifact does not fit the protocol.
    """
    selected = [
        run_target
        for run_target, target in match_targets(runs, artifact).items()
        if targets is None or target in targets
    ]
    seeds = None
    if runs.pending():  # use as many seeds as leave enough subsets; seeds are trained one after the other
        counts = range(len(runs.info.seeds), 0, -1)
        candidates = (runs.utilities(seeds=runs.info.seeds[:count], partial=True) for count in counts)
        seeds = next((finished.seeds for finished in candidates if len(finished.subset_ids) >= MIN_SUBSETS), None)
        if seeds is None:
            raise RunsError(
                f"{runs.path}: fewer than {MIN_SUBSETS} subsets have a result; wait for more, or drop the runs"
            )
    report = compare(artifact, runs, {protocol.name: protocol}, targets=selected, seeds=seeds)
    (predictions,) = [result.predictions for result in report.methods if result.method == protocol.name]
    points = []
    for target in selected:
        utilities = report.utilities.select(target)
        _, predicted_B = predictions.aligned(utilities.subset_ids, target, utilities.unit_ids)
        assert predicted_B is not None
        realized_BS = utilities.values_BSE.mean(axis=2)
        spread_B = realized_BS.std(axis=1, ddof=1) if realized_BS.shape[1] > 1 else np.full(len(realized_BS), np.nan)
        realized_B = realized_BS.mean(axis=1)
        points.append(
            TargetPoints(target, report.roles[target], utilities.subset_ids, predicted_B, realized_B, spread_B)
        )
    return Agreement(protocol.name, report, tuple(points), len(runs.subset_ids), len(runs.info.seeds))
