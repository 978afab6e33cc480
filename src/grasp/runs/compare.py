"""Methods side by side in one environment: additive cores, protocols, controls, published methods, and files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.blocks import Side
from grasp.predict.protocol import Match, ScoringProtocol, chosen_on
from grasp.predict.row_arrays import F64
from grasp.predict.subset_tables import RowIndex
from grasp.runs.candidates import CONTROLS, Binding, Candidate, ProtocolFamily, candidate_of, needed_arrays
from grasp.runs.contract import Material, Retrained
from grasp.runs.environment import Environment, Utilities
from grasp.runs.environment_info import Role
from grasp.runs.evaluate import Evaluation, artifact_targets, evaluate
from grasp.runs.methods import ConfiguredMethod, predict
from grasp.runs.metrics import MIN_SUBSETS, RESAMPLES
from grasp.runs.predictions import Cost, Predictions, read_predictions
from grasp.runs.scored import Scored
from grasp.runs.selection import Development, select

PLAIN = Binding("retained", "mean", "mean_relevance")
ADDITIVE: Mapping[str, tuple[tuple[Match, float], ...]] = {
    "token additive": (("token", 1.0),),
    "pooled additive": (("pooled", 1.0),),
    "both additive": (("token", 1.0), ("pooled", 1.0)),
    "input additive": (("input", 1.0),),
    "neighbour additive": (("neighbour", 1.0),),
    "shift additive": (("shift", 1.0),),
    "token+input additive": (("token", 1.0), ("input", 1.0)),
    "token+input+neighbour additive": (("token", 1.0), ("input", 1.0), ("neighbour", 1.0)),
    "token+input+pooled additive": (("token", 1.0), ("input", 1.0), ("pooled", 1.0)),
}
SIDES: tuple[Side, ...] = ("retained", "omitted")


def compare(
    artifact: ArtifactReader,
    environment: Environment,
    protocols: Mapping[str, ScoringProtocol],
    *,
    controls: Mapping[str, Candidate] | None = None,
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
    scored = Scored.of(environment, artifact)
    chosen = _checked_targets(scored, targets)
    utilities = environment.utilities(seeds=seeds, partial=partial).of(*chosen)
    ours = [
        additive_methods(artifact.array_names),
        {name: candidate_of(protocol, artifact) for name, protocol in protocols.items()},
        dict(controls or {}),
    ]
    material = Material(
        artifact,
        checkpoint_places=tuple(checkpoints),
        retrained=Retrained.of(scored, utilities),
        progress=progress or Silent(),
    )
    _check_methods(methods, material, {*ADDITIVE, *protocols, *(controls or {})})
    renamed = {own: name for own, name in scored.renamed.items() if name in chosen}
    published = [predict(one, material, scored.blocks, cache, renamed=renamed) for one in methods]
    predictions = [
        replace(prediction, cost=cost_of(candidates[prediction.method], artifact))
        for candidates in ours
        for prediction in scored.predictions(candidates, chosen)
    ] + published
    for path in files:
        name = "/".join(path.parts[-2:]) if path.stem in {known.method for known in predictions} else None
        predictions.append(read_predictions(path, RowIndex.from_parquet(artifact.rows_path), scored.blocks, name))
    common = [name for name in chosen if targets is not None or all(name in p.targets for p in predictions)]
    left_out = [name for name in environment.targets if name not in common] if targets is None else []
    whole = f"not evaluated, since not every method predicts them: {', '.join(left_out)}"
    return evaluate(
        environment,
        predictions,
        targets=common or None,
        seeds=seeds,
        partial=partial,
        resamples=resamples,
        notes=[*notes, *(note for one in published for note in one.notes), *([whole] if left_out else [])],
        chosen_on={name: one.chosen_on(scored.runs_fingerprint) for name, one in protocols.items()}
        | dict.fromkeys(controls or {}, chosen_on(controls_on or {}, scored.runs_fingerprint)),
    )


def _check_methods(methods: Sequence[ConfiguredMethod], material: Material, ours: Collection[str]) -> None:
    """See that published methods have what they need, and names of their own."""
    for one in methods:
        if one.label in ours:
            raise SettingsError(f"methods: {one.label!r} is a predictor of ours; choose another label")
        one.method.check(material)


def cost_of(candidate: Candidate, artifact: ArtifactReader) -> Cost:
    """What a predictor of ours reads of every row: its relevance matrices and its sketches.

    Its time is that of the whole build, tokenising included, which gave every predictor of the artifact at once.
    """
    width = {name: artifact.array_shape(name)[1] for name in needed_arrays(candidate) if name in artifact.array_names}
    scores = sum(size for name, size in width.items() if name.startswith("relevance_"))
    seconds = artifact.manifest.details.get("build_seconds") or {}
    return Cost(sum(width.values()) - scores, scores, seconds.get("wall"), seconds.get("cpu"))


def additive_methods(array_names: Sequence[str]) -> dict[str, Candidate]:
    """Relevance alone by each kernel that the artifact has, and by several together."""
    return {
        name: Candidate(PLAIN, match, ())
        for name, match in ADDITIVE.items()
        if all(f"relevance_{kernel}" in array_names for kernel, _ in match)
    }


def control_methods(
    family: ProtocolFamily, developments: Sequence[Development], *, resamples: int = RESAMPLES
) -> tuple[dict[str, Candidate], list[str]]:
    """The paper's controls, and the full predictor by side, each with weights selected on development results.

    Returns:
        The selected candidate of each, and a note a control: which it is, or why there is none.
    Raises:
        ProtocolError: fewer than two development results.
    """
    families = {control.name: family.restricted(control) for control in CONTROLS}
    families |= {f"full-{side}": family.model_copy(update={"sides": (side,)}) for side in SIDES}
    served = [one.source.array_names for dev in developments for one in dev.variants.values()]
    results = ", ".join(name for dev in developments for name in dev.results)
    chosen: dict[str, Candidate] = {}
    notes = [f"weights of every control were selected on {results}"]
    for name, restricted in families.items():
        if not all(restricted.members(array_names)[0] for array_names in served):
            notes.append(f"control {name}: left out, nothing of the family remains")
            continue
        chosen[name] = select(restricted, developments, resamples=resamples).best.candidate
        notes.append(f"control {name}: {chosen[name].name}")
    return chosen, notes


def _checked_targets(scored: Scored, targets: Sequence[str] | None) -> tuple[str, ...]:
    have = tuple(scored.renamed.values())
    unknown = [name for name in targets or () if name not in have]
    if unknown or targets == []:
        raise EnvironmentDataError(
            f"target: got {list(targets or ())}; environment and artifact have {list(have)} in common"
        )
    return tuple(targets) if targets is not None else have


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
    seeds = _seeds_there(environment) if partial else None
    report = compare(artifact, environment, {protocol.name: protocol}, targets=chosen, seeds=seeds, partial=partial)
    (own,) = [result.predictions for result in report.methods if result.method == protocol.name]
    points = tuple(_points(name, report.roles[name], report.utilities.of(name), own) for name in chosen)
    return Agreement(protocol.name, report, points, len(environment.subset_ids), len(environment.info.seeds))


def _seeds_there(environment: Environment) -> tuple[int, ...]:
    """Of an unfinished environment, as many seeds as leave enough subsets; seeds are trained one after the other."""
    for count in range(len(environment.info.seeds), 0, -1):
        found = environment.utilities(seeds=environment.info.seeds[:count], partial=True)
        if len(found.subset_ids) >= MIN_SUBSETS:
            return found.seeds
    raise EnvironmentDataError(
        f"{environment.path}: fewer than {MIN_SUBSETS} subsets have a result yet; wait for some, or leave it out"
    )


def _points(target: str, role: Role, utilities: Utilities, predictions: Predictions) -> TargetPoints:
    _, predicted_B = predictions.aligned(utilities.subset_ids, target, utilities.unit_ids)
    assert predicted_B is not None
    realized_BS = utilities.values_BSE.mean(axis=2)
    spread_B = realized_BS.std(axis=1, ddof=1) if realized_BS.shape[1] > 1 else np.full(len(realized_BS), np.nan)
    return TargetPoints(target, role, utilities.subset_ids, predicted_B, realized_BS.mean(axis=1), spread_B)
