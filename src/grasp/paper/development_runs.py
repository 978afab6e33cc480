"""Development runs on which protocols may be selected, bound to the artifacts of their corpus.

Start with `bind_developments`. An *environment* is a set of runs; a *result* is one target of one environment. Held-out
results cannot leak into a selection: a `Development` cannot be created from them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, ProtocolLeakError, RunsError
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.predict.scoring_rule import Requirements
from grasp.runs.alignment import match_targets
from grasp.runs.training_runs import TrainingRuns


@dataclass(frozen=True, slots=True)
class Development:
    """Development runs that protocols may be selected on, with the artifacts of their corpus.

    Creating one from held-out runs or targets raises ProtocolLeakError.
    """

    runs: TrainingRuns
    targets: tuple[str, ...]
    variants: Mapping[str, CandidatePredictor]  # by the feature settings in which the artifacts differ

    def __post_init__(self) -> None:
        held_out = [name for name in self.targets if self.runs.role_of(name) != "dev"]
        if held_out:
            raise ProtocolLeakError(
                f"{self.runs.path}: selection was given {held_out}, which are held out; pass development "
                "environments and targets only"
            )

    @property
    def results(self) -> dict[str, str]:
        """Results used for the selection, as `environment/target`, each with the fingerprint of its runs."""
        (fingerprint,) = {predictor.runs_fingerprint for predictor in self.variants.values()}
        return {f"{self.runs.name}/{target}": fingerprint for target in self.targets}

    @classmethod
    def from_runs(
        cls,
        runs: TrainingRuns,
        artifacts: Sequence[ArtifactReader],
        *,
        targets: Sequence[str] | None = None,
        calibration_subsets: int = 256,
    ) -> "Development":
        """Bind runs to artifacts, one artifact for each of the feature settings to compare.

        Args:
            runs: development runs.
            artifacts: artifacts of the corpus of the runs.
            targets: default: all development targets that the artifacts have.
            calibration_subsets: subsets drawn from the calibration family, if its moments have no closed form.
        Raises:
            ProtocolLeakError: the runs, or one of `targets`, are held out.
            ProtocolError: no development target, or two artifacts have the same feature settings.
            RunsError: an artifact does not match the runs.
        """
        if runs.role != "dev":
            raise ProtocolLeakError(
                f"{runs.path}: selection was given a held-out environment; pass development environments only"
            )
        predictors = [
            CandidatePredictor.from_runs(runs, artifact, calibration_subsets=calibration_subsets)
            for artifact in artifacts
        ]
        common = [name for name in runs.targets if all(name in each.run_targets.values() for each in predictors)]
        selected = tuple(targets) if targets is not None else tuple(n for n in common if runs.role_of(n) == "dev")
        missing = [name for name in selected if name not in common]
        if missing or not selected or not predictors:
            raise ProtocolError(
                f"{runs.path}: development targets {list(selected)}, the artifacts have {common}; "
                "expected at least one target that all of them have"
            )
        names = variant_names([predictor.source.feature_settings for predictor in predictors])
        if len(set(names)) < len(names):
            raise ProtocolError(f"{runs.path}: two artifacts have the same feature settings; pass one of them")
        return cls(runs, selected, dict(zip(names, predictors, strict=True)))


def variant_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each of several feature settings, from the fields of `Requirements` in which they differ."""
    fields = list(Requirements.model_fields)
    differing = [name for name in fields if len({json.dumps(features.get(name)) for features in settings}) > 1]
    return [", ".join(f"{name}={features.get(name)}" for name in differing) for features in settings]


def bind_developments(
    artifacts: Sequence[ArtifactReader],
    all_runs: Sequence[TrainingRuns],
    *,
    targets: Sequence[str] | None = None,
    calibration_subsets: int = 256,
) -> list[Development]:
    """Bind every environment to the artifacts that were built from its corpus.

    Args:
        artifacts: artifacts; those of one corpus are variants with different feature settings.
        all_runs: development runs.
        targets: target names of the environments; default: all development targets.
        calibration_subsets: subsets drawn from the calibration family, if its moments have no closed form.
    Raises:
        ProtocolLeakError: an environment, or one of `targets`, is held out.
        RunsError: no artifact was built from the corpus of an environment, or an artifact matches no environment.
    """
    used: set[Path] = set()
    bound: list[Development] = []
    for runs in all_runs:
        of_corpus = [
            artifact
            for artifact in artifacts
            if artifact.manifest.fingerprints.get("corpus") == runs.info.corpus_fingerprint
        ]
        used |= {artifact.path for artifact in of_corpus}
        # if no artifact has this corpus, binding the first one raises the error that explains the mismatch
        bound += [
            Development.from_runs(runs, group, targets=group_targets, calibration_subsets=calibration_subsets)
            for group, group_targets in _group_by_targets(runs, of_corpus or artifacts[:1], targets)
        ]
    unused = [str(artifact.path) for artifact in artifacts if artifact.path not in used]
    if unused:
        raise RunsError(
            f"{', '.join(unused)}: not built from the corpus of any environment; drop it, or pass its environment"
        )
    return bound


def _group_by_targets(
    runs: TrainingRuns, artifacts: Sequence[ArtifactReader], targets: Sequence[str] | None
) -> list[tuple[list[ArtifactReader], Sequence[str] | None]]:
    """Group artifacts that share targets, and assign the requested targets to the groups.

    Artifacts in one group are variants with different feature settings; artifacts of different targets, or of another
    loss, form separate groups.
    """
    groups: list[tuple[set[str], list[ArtifactReader]]] = []
    for artifact in artifacts:
        names = set(match_targets(runs, artifact))
        overlapping = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        members = [member for _, group in overlapping for member in group]
        groups.append((names.union(*(group_names for group_names, _ in overlapping)), [*members, artifact]))
    if targets is None or len(groups) == 1:
        return [(group, targets) for _, group in groups]
    missing = sorted(set(targets).difference(*(names for names, _ in groups)))
    if missing:
        raise RunsError(f"target: got {missing}, which {runs.path} and the artifacts do not have in common")
    shared = [(group, [name for name in targets if name in names]) for names, group in groups]
    return [(group, names) for group, names in shared if names]
