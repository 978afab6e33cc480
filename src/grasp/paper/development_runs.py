"""Development runs on which protocols may be selected, bound to the artifacts of their corpus.

Start with `bind_developments`. An *environment* is a set of runs; a *result* is one target of one environment. Held-out
results cannot leak into a selection: a `Development` cannot be created from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, ProtocolLeakError, RunsError
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.runs.alignment import match_targets
from grasp.runs.training_runs import TrainingRuns


@dataclass(frozen=True, slots=True)
class Development:
    """Development runs that protocols may be selected on, with the artifact of their corpus.

    Creating one from held-out runs or targets raises ProtocolLeakError.
    """

    runs: TrainingRuns
    targets: tuple[str, ...]
    predictor: CandidatePredictor

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
        return dict.fromkeys((f"{self.runs.name}/{target}" for target in self.targets), self.predictor.runs_fingerprint)

    @classmethod
    def from_runs(
        cls,
        runs: TrainingRuns,
        artifact: ArtifactReader,
        *,
        targets: Sequence[str] | None = None,
        calibration_subsets: int = 256,
    ) -> "Development":
        """Bind runs to an artifact of their corpus.

        Args:
            runs: development runs.
            artifact: artifact of the corpus of the runs.
            targets: default: all development targets that the artifact has.
            calibration_subsets: subsets drawn from the calibration family, if its moments have no closed form.
        Raises:
            ProtocolLeakError: the runs, or one of `targets`, are held out.
            ProtocolError: no development target.
            RunsError: the artifact does not match the runs.
        """
        if runs.role != "dev":
            raise ProtocolLeakError(
                f"{runs.path}: selection was given a held-out environment; pass development environments only"
            )
        predictor = CandidatePredictor.from_runs(runs, artifact, calibration_subsets=calibration_subsets)
        common = [name for name in runs.targets if name in predictor.run_targets.values()]
        selected = tuple(targets) if targets is not None else tuple(n for n in common if runs.role_of(n) == "dev")
        if not selected or not set(selected) <= set(common):
            raise ProtocolError(
                f"{runs.path}: development targets {list(selected)}, the artifact has {common}; expected at least one "
                "target, and only those of the artifact"
            )
        return cls(runs, selected, predictor)


def bind_developments(
    artifacts: Sequence[ArtifactReader],
    all_runs: Sequence[TrainingRuns],
    *,
    targets: Sequence[str] | None = None,
    calibration_subsets: int,
) -> list[Development]:
    """Bind every environment to the artifacts that were built from its corpus.

    Args:
        artifacts: artifacts; those of one corpus have different targets, or another loss.
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
        of_corpus = of_corpus or list(artifacts[:1])
        names_of = {artifact.path: match_targets(runs, artifact) for artifact in of_corpus}
        if missing := sorted(set(targets or ()).difference(*names_of.values())):
            raise RunsError(f"target: got {missing}, which {runs.path} and the artifacts do not have in common")
        for artifact in of_corpus:
            of_artifact = None if targets is None else [name for name in targets if name in names_of[artifact.path]]
            if of_artifact != []:
                bound.append(
                    Development.from_runs(runs, artifact, targets=of_artifact, calibration_subsets=calibration_subsets)
                )
    unused = [str(artifact.path) for artifact in artifacts if artifact.path not in used]
    if unused:
        raise RunsError(
            f"{', '.join(unused)}: not built from the corpus of any environment; drop it, or pass its environment"
        )
    return bound
