"""Environments that protocols may be selected on, each with the artifacts of its corpus."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, ProtocolError, ProtocolLeakError
from grasp.predict.protocol import Requirements
from grasp.runs.environment import Environment
from grasp.runs.evaluate import artifact_targets
from grasp.runs.scored import Scored


@dataclass(frozen=True, slots=True)
class Development:
    """An environment that protocols may be chosen on, with the artifacts built for it.

    Only `of` makes one, and it refuses held-out environments: so what was held out cannot be chosen on by mistake.
    """

    environment: Environment
    targets: tuple[str, ...]
    variants: Mapping[str, Scored]  # by the feature settings in which the artifacts differ

    def __post_init__(self) -> None:
        held_out = [name for name in self.targets if self.environment.role_of(name) != "dev"]
        if held_out:
            raise ProtocolLeakError(
                f"{self.environment.path}: selection was given {held_out}, which are held out; pass development "
                "environments and targets only"
            )

    @property
    def results(self) -> dict[str, str]:
        """The results that a choice is made on, as `environment/target`, each with the fingerprint of its runs."""
        (fingerprint,) = {one.runs_fingerprint for one in self.variants.values()}
        return {f"{self.environment.name}/{target}": fingerprint for target in self.targets}

    @classmethod
    def of(
        cls,
        environment: Environment,
        artifacts: Sequence[ArtifactReader],
        *,
        targets: Sequence[str] | None = None,
        calibration_subsets: int = 256,
    ) -> "Development":
        """Bind an environment and one artifact for each of the feature settings that are tried.

        Args:
            targets: None: all development targets that the artifacts have.
        Raises:
            ProtocolLeakError: the environment, or a target that was asked for, is held out.
            ProtocolError: no development target, or two artifacts of the same feature settings.
            EnvironmentDataError: an artifact does not belong to the environment.
        """
        if environment.role != "dev":
            raise ProtocolLeakError(
                f"{environment.path}: selection was given a held-out environment; pass development environments only"
            )
        scored = [Scored.of(environment, artifact, calibration_subsets=calibration_subsets) for artifact in artifacts]
        common = [name for name in environment.targets if all(name in one.renamed.values() for one in scored)]
        chosen = tuple(targets) if targets is not None else tuple(n for n in common if environment.role_of(n) == "dev")
        missing = [name for name in chosen if name not in common]
        if missing or not chosen or not scored:
            raise ProtocolError(
                f"{environment.path}: development targets {list(chosen)}, the artifacts have {common}; "
                "expected at least one target that all of them have"
            )
        names = variant_names([one.source.feature_settings for one in scored])
        if len(set(names)) < len(names):
            raise ProtocolError(f"{environment.path}: two artifacts have the same feature settings; pass one of them")
        return cls(environment, chosen, dict(zip(names, scored, strict=True)))


def variant_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each of several feature settings, out of the required fields in which they differ."""
    fields = list(Requirements.model_fields)
    differing = [name for name in fields if len({json.dumps(own.get(name)) for own in settings}) > 1]
    return [", ".join(f"{name}={own.get(name)}" for name in differing) for own in settings]


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
        raise EnvironmentDataError(f"target: got {missing}, which {environment.path} and the artifacts do not share")
    shared = [(group, [name for name in targets if name in names]) for names, group in groups]
    return [(group, wanted) for group, wanted in shared if wanted]
