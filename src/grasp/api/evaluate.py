"""Do predictions agree with retraining? The verb `evaluate`, which compares methods side by side in one environment.

Additive cores, protocols, controls, published methods, and files of predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.api.retrain import Opened, Place, Runs
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, SettingsError
from grasp.methods.contract import MethodInputs, Retrained
from grasp.methods.registry import ConfiguredMethod, configured_methods, method_predictions, published_methods
from grasp.predict.families import parse_family
from grasp.predict.scoring_rule import Match, ScoringProtocol, as_protocol, chosen_on, geometry
from grasp.predict.subset_tables import RowIndex
from grasp.progress import Progress, Silent
from grasp.runs.alignment import Joined, artifact_targets, runs_beside
from grasp.runs.evaluation import Evaluation, evaluation_of
from grasp.runs.metrics import MIN_SUBSETS, RESAMPLES
from grasp.runs.predictions import read_predictions
from grasp.runs.retrained import Environment, Role
from grasp.text import listed

_EACH = ("gradient", "output_layer", "pooled", "embedding", "knn", "hidden_bias", "hidden_linear")
_TOGETHER = (
    ("output_layer", "pooled"),
    ("output_layer", "embedding"),
    ("output_layer", "embedding", "knn"),
    ("output_layer", "embedding", "hidden_bias", "hidden_linear"),
    ("output_layer", "embedding", "pooled"),
)
ADDITIVE: Mapping[str, dict[Match, float]] = {
    f"{'+'.join(kernels)} additive": dict.fromkeys(kernels, 1.0)
    for kernels in (*((kernel,) for kernel in _EACH), *_TOGETHER)
}


def evaluate(
    art: Opened,
    runs: Runs,
    *,
    protocol: ScoringProtocol | Place | None = None,
    target: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    predictions: Sequence[Place] = (),
    partial: bool = False,
    controls: bool = False,
    development: Sequence[Runs] = (),
    family: Place | Any = None,
    method_settings: Place | Mapping[str, Any] | None = None,
    checkpoints: Sequence[Place] = (),
    cache: Place | None = None,
    oracles: str | Sequence[str] = (),
    resamples: int = RESAMPLES,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare predictions with retraining, method by method.

    Rho is Spearman's, with 95 % intervals, beside the noise ceiling: what a perfect predictor would reach. Scores of
    published methods are computed once and kept; after a kill the same command goes on where it was. Figures by which a
    protocol or a control was chosen are marked "in sample".

    Args:
        runs: retrained subsets; see `grasp retrain`.
        protocol: protocol that is compared beside the one that ships.
        target: targets, separated by commas. Default: all that artifact, runs and files have in common.
        methods: published methods, separated by commas; see `grasp methods`.
        predictions: predictions of your own: Parquet or .npy, a value a subset, or a score a row.
        partial: use what unfinished runs have.
        controls: the paper's controls and ablations as well.
        development: runs that the weights of `controls` are selected on. Default: `runs`.
        family: protocols that `controls` take parts away from. Default: those that ship. In Python also a
            `grasp.geometry.candidates.ProtocolFamily`.
        method_settings: YAML of settings by method, or by a label of your own; see `grasp methods`.
        checkpoints: checkpoint, or training run, for methods that look at several. Default: beside the model.
        cache: where scores of methods are kept. Default: in the artifact.
        oracles: fit ridge or lasso on the retrained subsets; :masks or :LABEL says on what.
        resamples: bootstrap resamples of the subsets.
    Raises:
        EnvironmentDataError: artifact and runs are not of the same rows (the command that builds such an artifact is in
            the message), or files and utilities are incomplete.
        ProtocolLeakError: controls without a development environment on held-out runs.
    """
    environment = runs_beside(art.files, runs)
    if not controls and (development or family is not None):
        raise SettingsError("development, family: no meaning without controls; leave them out")
    published = published_methods(methods, method_settings, checkpoints=checkpoints, cache=cache)
    drawn = environment.info.family
    drawn_by = None if drawn is None else parse_family(drawn.spec).label
    fitted = {}  # oracles see what the family of the runs draws by, unless told otherwise
    for text in listed(oracles):
        kind, _, sees = text.partition(":")
        if kind not in ("ridge", "lasso"):
            raise SettingsError(f"oracle: got {text!r}, expected ridge or lasso, alone or with :masks or :LABEL")
        sees = sees or drawn_by or "masks"
        label = f"oracle-{kind}-{sees}" + ("" if sees == "masks" else "-share-of-subset")
        fitted[label] = {"method": "datamodels", "penalty": kind, "sees": sees}
    published += configured_methods(None, fitted)
    chosen, controls_on, why = dict[str, Any](), dict[str, str](), list[str]()
    if controls:
        chosen, controls_on, why = geometry().controls(
            art.files, environment, development, family=family, resamples=resamples
        )
    shipped = as_protocol(None, art.files)
    protocols = {shipped.name: shipped}
    if protocol is not None:  # beside the one that ships; where its name is taken, it has the file's as well
        given = as_protocol(protocol, art.files)
        also = "yours" if isinstance(protocol, ScoringProtocol) else Path(protocol).name
        taken = {shipped.name, *ADDITIVE, *chosen}
        protocols[f"{given.name} ({also})" if given.name in taken else given.name] = given
    notes = [*(f"protocol {name}: {one.provenance}" for name, one in protocols.items()), *why]
    return compare(
        art.files,
        environment,
        protocols,
        controls=chosen,
        controls_on=controls_on,
        files=[Path(place) for place in predictions],
        methods=published,
        checkpoints=[Path(place) for place in checkpoints],
        cache=None if cache is None else Path(cache),
        targets=None if target is None else listed(target, art.files.targets),
        partial=partial,
        resamples=resamples,
        notes=notes,
        progress=progress,
    )


def compare(
    artifact: ArtifactReader,
    environment: Environment,
    protocols: Mapping[str, ScoringProtocol],
    *,
    controls: Mapping[str, Any] | None = None,
    controls_on: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
    methods: Sequence[ConfiguredMethod] = (),
    checkpoints: Sequence[Path] = (),
    cache: Path | None = None,
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate methods side by side; the additive cores are always among them.

    Args:
        controls: of `grasp.geometry`, by name.
        controls_on: fingerprints of the runs that the controls' weights were selected on, by `environment/target`.
        files: predictions of others.
        methods: published ones; `checkpoints` for those that look at several, `cache` for their scores.
        targets: by the environment's names; None: all that the artifact and every file have.
        seeds: retraining seeds to use; None: all.
        partial: of an unfinished environment use the subsets that are there.
        notes: how the methods came about.
    Raises:
        EnvironmentDataError: artifact, files or utilities do not belong together or are incomplete.
        ProtocolError: the artifact does not fit a protocol.
        SettingsError: a method lacks something.
    """
    joined = Joined.from_environment(environment, artifact)
    common = tuple(joined.renamed.values())
    if targets == [] or any(name not in common for name in targets or ()):
        raise EnvironmentDataError(
            f"target: got {list(targets or ())}; runs and artifact have {list(common)} in common"
        )
    chosen = common if targets is None else tuple(targets)
    utilities = environment.utilities(seeds=seeds, partial=partial).select(*chosen)
    material = MethodInputs(
        artifact,
        checkpoint_paths=tuple(checkpoints),
        retrained=Retrained.from_alignment(joined, utilities),
        progress=progress or Silent(),
    )
    fitted = {name: one.fitted(artifact.array_names, artifact.feature_settings) for name, one in protocols.items()}
    ours = additive_methods(artifact.array_names) | fitted | dict(controls or {})
    for one in methods:
        if one.label in {*ADDITIVE, *ours}:
            raise SettingsError(f"methods: {one.label!r} is a predictor of ours; choose another label")
        one.method.check(material)
    renamed = {own: name for own, name in joined.renamed.items() if name in chosen}
    published = [method_predictions(one, material, joined.blocks, cache, renamed=renamed) for one in methods]
    additive = {name: one for name, one in ours.items() if isinstance(one, ScoringProtocol) and not one.beside}
    found = {one.method: one for one in joined.additive(additive, chosen)}
    if beside := {name: one for name, one in ours.items() if name not in additive}:
        found |= {one.method: one for one in geometry().predictions(joined, beside, chosen)}
    predictions = [*(found[name] for name in ours), *published]
    for path in files:
        name = "/".join(path.parts[-2:]) if path.stem in {known.method for known in predictions} else None
        predictions.append(read_predictions(path, RowIndex.from_parquet(artifact.rows_path), joined.blocks, name))
    judged = [name for name in chosen if targets is not None or all(name in p.targets for p in predictions)]
    notes = [*notes, *(note for one in published for note in one.notes)]
    if targets is None and (left_out := [name for name in environment.targets if name not in judged]):
        notes.append(f"not evaluated, since not every method predicts them: {', '.join(left_out)}")
    return evaluation_of(
        environment,
        predictions,
        targets=judged or None,
        seeds=seeds,
        partial=partial,
        resamples=resamples,
        notes=notes,
        chosen_on={name: one.chosen_on(joined.runs_fingerprint) for name, one in protocols.items()}
        | dict.fromkeys(controls or {}, chosen_on(controls_on or {}, joined.runs_fingerprint)),
    )


def additive_methods(array_names: Sequence[str]) -> dict[str, ScoringProtocol]:
    """Relevance alone by each kernel that the artifact has, and by several together."""
    return {
        name: ScoringProtocol(name=name, match=match)
        for name, match in ADDITIVE.items()
        if all(f"relevance_{kernel}" in array_names for kernel in match)
    }


# ------------------------------------------------------------------------------------------ subset by subset


@dataclass(frozen=True, slots=True)
class TargetPoints:
    """A scatter of one target: for each subset what was predicted, and what came out."""

    target: str  # the environment's name
    role: Role
    subset_ids: tuple[str, ...]
    predicted_B: F64  # change, but for a constant; in effect sizes where the protocol has no geometry
    realized_B: F64  # mean over seeds and units, nats a token; higher is better
    spread_B: F64  # standard deviation over seeds; nan for one seed


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a protocol agrees with an environment, for the report: figures, and points to draw."""

    protocol: str
    report: Evaluation
    points: tuple[TargetPoints, ...]
    n_planned: int  # subsets that the environment is meant to have
    seeds_planned: int


def agreement(
    artifact: ArtifactReader,
    environment: Environment,
    protocol: ScoringProtocol,
    *,
    targets: Sequence[str] | None = None,
    partial: bool = False,
) -> Agreement:
    """Compare a protocol, and the additive cores beside it, with an environment.

    Args:
        targets: by the artifact's names; None: all that both have.
        partial: of an unfinished environment use the subsets that have a result for every seed; where these are fewer
            than three, leave out the last seeds.
    Raises:
        EnvironmentDataError: artifact and environment do not belong together, or results are missing.
        ProtocolError: the artifact does not fit the protocol.
    """
    renamed = artifact_targets(environment, artifact)
    chosen = [theirs for theirs, own in renamed.items() if targets is None or own in targets]
    if not chosen:
        raise EnvironmentDataError(
            f"{environment.path}: has targets {list(environment.targets)}, asked are {list(targets or ())}; none is "
            "common to both"
        )
    seeds = None
    if partial:  # as many as leave enough subsets: seeds are trained one after the other
        counts = range(len(environment.info.seeds), 0, -1)
        there = (environment.utilities(seeds=environment.info.seeds[:count], partial=True) for count in counts)
        seeds = next((one.seeds for one in there if len(one.subset_ids) >= MIN_SUBSETS), None)
        if seeds is None:
            raise EnvironmentDataError(
                f"{environment.path}: fewer than {MIN_SUBSETS} subsets have a result yet; wait for some, or leave it "
                "out"
            )
    report = compare(artifact, environment, {protocol.name: protocol}, targets=chosen, seeds=seeds, partial=partial)
    (own,) = [result.predictions for result in report.methods if result.method == protocol.name]
    points = []
    for target in chosen:
        utilities = report.utilities.select(target)
        _, predicted_B = own.aligned(utilities.subset_ids, target, utilities.unit_ids)
        assert predicted_B is not None
        realized_BS = utilities.values_BSE.mean(axis=2)
        spread_B = realized_BS.std(axis=1, ddof=1) if realized_BS.shape[1] > 1 else np.full(len(realized_BS), np.nan)
        realized_B = realized_BS.mean(axis=1)
        points.append(
            TargetPoints(target, report.roles[target], utilities.subset_ids, predicted_B, realized_B, spread_B)
        )
    return Agreement(protocol.name, report, tuple(points), len(environment.subset_ids), len(environment.info.seeds))
