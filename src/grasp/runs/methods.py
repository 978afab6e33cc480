"""Methods side by side in one environment: additive cores, protocols, controls, oracles, and predictions from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.blocks import Side
from grasp.predict.protocol import Match, ScoringProtocol
from grasp.predict.slices import LabelTable
from grasp.predict.subset_tables import RowIndex
from grasp.runs.candidates import Binding, Candidate, ProtocolFamily, candidate_of, needed_arrays
from grasp.runs.configured import ConfiguredMethod
from grasp.runs.controls import CONTROLS
from grasp.runs.development import Development, Scored
from grasp.runs.environment import Environment, Utilities
from grasp.runs.evaluate import EvaluationReport, artifact_targets, evaluate
from grasp.runs.material import Material, Retrained
from grasp.runs.method_predictions import predict
from grasp.runs.metrics import RESAMPLES
from grasp.runs.oracles import fraction_features, lasso_oracle, mask_features, ridge_oracle
from grasp.runs.predictions import Cost, Predictions, read_predictions
from grasp.runs.selection import select

PLAIN = Binding("retained", "mean", "mean_relevance")
ADDITIVE: Mapping[str, tuple[tuple[Match, float], ...]] = {
    "token additive": (("token", 1.0),),
    "pooled additive": (("pooled", 1.0),),
    "both additive": (("token", 1.0), ("pooled", 1.0)),
    "input additive": (("input", 1.0),),
    "token+input additive": (("token", 1.0), ("input", 1.0)),
    "token+input+pooled additive": (("token", 1.0), ("input", 1.0), ("pooled", 1.0)),
}
SIDES: tuple[Side, ...] = ("retained", "omitted")
ORACLES = {"ridge": ridge_oracle, "lasso": lasso_oracle}
MASKS = "masks"


@dataclass(frozen=True, slots=True)
class Contenders:
    """What is compared beside the additive cores."""

    protocols: Mapping[str, ScoringProtocol]
    controls: Mapping[str, Candidate] | None = None
    controls_in_sample: bool = False  # their weights were selected on the environment that is evaluated
    files: Sequence[Path] = ()
    oracles: Sequence[str] = ()  # ridge or lasso, with `:masks` or `:LABEL` for what the oracle sees
    notes: Sequence[str] = ()  # how the methods came about
    methods: Sequence[ConfiguredMethod] = ()  # published ones
    checkpoints: Sequence[Path] = ()  # for those that look at several; none: those beside the reference model
    cache: Path | None = None  # where their scores are kept; None: inside the artifact
    progress: Progress = Silent()  # noqa: RUF009 - it has no state

    def in_sample(self, environment: Environment) -> set[str]:
        """Protocols and controls that were chosen on the environment that they are judged on."""
        mark = f"{environment.name}/"
        chosen = {
            name for name, one in self.protocols.items() if any(text.startswith(mark) for text in one.selected_on or ())
        }
        return chosen | (set(self.controls or {}) if self.controls_in_sample else set())


def compare(
    artifact: ArtifactReader,
    environment: Environment,
    contenders: Contenders,
    *,
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
) -> EvaluationReport:
    """Evaluate methods side by side.

    Args:
        targets: by the environment's names; None: all that the artifact and every file have.
        seeds: retraining seeds to use; None: all.
        partial: of an unfinished environment use the subsets that are there.
    Raises:
        EnvironmentDataError: artifact, files or utilities do not belong together or are incomplete.
        ProtocolError: the artifact does not fit a protocol.
        SettingsError: no such oracle, or a method lacks something.
    """
    scored = Scored.of(environment, artifact)
    chosen = _checked_targets(scored, targets)
    utilities = environment.utilities(seeds=seeds, partial=partial).of(*chosen)
    published, notes = _published(artifact, scored, utilities, contenders)
    predictions = [*_own_predictions(artifact, scored, contenders, chosen), *published]
    rows = RowIndex.from_parquet(artifact.rows_path)
    for path in contenders.files:
        taken = {known.method for known in predictions}
        predictions.append(read_predictions(path, rows, scored.blocks, str(path) if path.stem in taken else None))
    predictions += [_oracle(text, scored, LabelTable(artifact.rows_path), utilities) for text in contenders.oracles]
    common = [name for name in chosen if targets is not None or all(name in p.targets for p in predictions)]
    report = evaluate(
        environment,
        predictions,
        targets=common or None,
        seeds=seeds,
        partial=partial,
        resamples=resamples,
        notes=[*contenders.notes, *notes],
        in_sample=contenders.in_sample(environment),
    )
    left_out = [name for name in environment.targets if name not in common]
    if targets is None and left_out:
        report = report.noted(f"not evaluated, since not every method predicts them: {', '.join(left_out)}")
    return report


def _own_predictions(
    artifact: ArtifactReader, scored: Scored, contenders: Contenders, targets: Sequence[str]
) -> list[Predictions]:
    """Additive cores, protocols and controls."""
    protocols = {name: candidate_of(protocol, artifact) for name, protocol in contenders.protocols.items()}
    predictions: list[Predictions] = []
    for candidates in (additive_methods(artifact.array_names), protocols, contenders.controls or {}):
        found = scored.predictions(candidates, targets)
        predictions += [replace(one, cost=cost_of(candidates[one.method], artifact)) for one in found]
    return predictions


def _published(
    artifact: ArtifactReader, scored: Scored, utilities: Utilities, contenders: Contenders
) -> tuple[list[Predictions], list[str]]:
    """Predictions of the methods asked for, and what must be said of them; all are checked before the first begins."""
    renamed = {own: name for own, name in scored.renamed.items() if name in utilities.targets}
    material = Material(
        artifact,
        checkpoint_places=tuple(contenders.checkpoints),
        retrained=retrained(scored, utilities),
        progress=contenders.progress,
    )
    ours = {*ADDITIVE, *contenders.protocols, *(contenders.controls or {})}
    for one in contenders.methods:
        if one.label in ours:
            raise SettingsError(f"methods: {one.label!r} is a predictor of ours; choose another label")
        one.method.check(material)
    found = [predict(one, material, scored.blocks, contenders.cache, renamed=renamed) for one in contenders.methods]
    return [one.predictions for one in found], [note for one in found for note in one.notes]


def retrained(scored: Scored, utilities: Utilities) -> Retrained:
    """The environment as methods see it: targets by the artifact's names."""
    own = {name: mine for mine, name in scored.renamed.items()}
    return Retrained(
        scored.environment, replace(utilities, targets=tuple(own[name] for name in utilities.targets)), scored.blocks
    )


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
    results = ", ".join(f"{dev.environment.name}/{target}" for dev in developments for target in dev.targets)
    chosen: dict[str, Candidate] = {}
    notes = [f"weights of every control were selected on {results}"]
    for name, restricted in families.items():
        if not all(restricted.members(array_names)[0] for array_names in served):
            notes.append(f"control {name}: left out, nothing of the family remains")
            continue
        chosen[name] = select(restricted, developments, resamples=resamples).best.candidate
        notes.append(f"control {name}: {chosen[name].name}")
    return chosen, notes


def developments_of(
    artifacts: Sequence[ArtifactReader],
    environments: Sequence[Environment],
    *,
    targets: Sequence[str] | None = None,
    calibration_subsets: int = 256,
) -> list[Development]:
    """Give every environment the artifacts of its corpus.

    Args:
        targets: by the environments' names; None: all development targets.
    Raises:
        ProtocolLeakError: an environment, or a target that was asked for, is held out.
        EnvironmentDataError: an environment without an artifact of its corpus, or an artifact without an environment.
    """
    used: set[Path] = set()
    bound: list[Development] = []
    for environment in environments:
        same = [
            one for one in artifacts if one.manifest.fingerprints.get("corpus") == environment.info.corpus_fingerprint
        ]
        used |= {one.path for one in same}
        # without one of its corpus, the first artifact's mismatch is told
        bound += [
            Development.of(environment, group, targets=wanted, calibration_subsets=calibration_subsets)
            for group, wanted in _shared_out(environment, same or artifacts[:1], targets)
        ]
    idle = [str(one.path) for one in artifacts if one.path not in used]
    if idle:
        raise EnvironmentDataError(
            f"{', '.join(idle)}: of no corpus that an environment was trained on; leave it out, or pass its environment"
        )
    return bound


def _shared_out(
    environment: Environment, artifacts: Sequence[ArtifactReader], targets: Sequence[str] | None
) -> list[tuple[list[ArtifactReader], Sequence[str] | None]]:
    """Artifacts that have targets in common, which tell feature settings apart, and the targets asked of them.

    Those of other targets, or of the other loss, stand beside each other.
    """
    groups: list[tuple[set[str], list[ArtifactReader]]] = []
    for one in artifacts:
        names = set(artifact_targets(environment, one))
        joined = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        groups.append((names.union(*(own for own, _ in joined)), [a for _, some in joined for a in some] + [one]))
    if targets is None or len(groups) == 1:
        return [(group, targets) for _, group in groups]
    missing = sorted(set(targets).difference(*(names for names, _ in groups)))
    if missing:
        raise EnvironmentDataError(f"targets: got {missing}, which {environment.path} and the artifacts do not share")
    shared = [(group, [name for name in targets if name in names]) for names, group in groups]
    return [(group, wanted) for group, wanted in shared if wanted]


def _checked_targets(scored: Scored, targets: Sequence[str] | None) -> tuple[str, ...]:
    have = tuple(scored.renamed.values())
    unknown = [name for name in targets or () if name not in have]
    if unknown or targets == []:
        raise EnvironmentDataError(
            f"targets: got {list(targets or ())}; environment and artifact have {list(have)} in common"
        )
    return tuple(targets) if targets is not None else have


def _oracle(text: str, scored: Scored, labels: LabelTable, utilities: Utilities) -> Predictions:
    """`ridge` or `lasso` on what the environment's family draws by: shares of its label, else masks."""
    kind, _, sees = text.partition(":")
    if kind not in ORACLES:
        raise SettingsError(f"oracle: got {text!r}, expected {' or '.join(ORACLES)}, alone or with :masks or :LABEL")
    sees = sees or scored.calibration.parsed.label or MASKS
    if sees == MASKS:
        return ORACLES[kind](mask_features(scored.blocks), utilities)
    return ORACLES[kind](fraction_features(scored.blocks, labels.column(sees)), utilities)
