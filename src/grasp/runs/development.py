"""What protocols are compared on: artifacts beside environments, and of those the ones that may be selected on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, ProtocolLeakError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.protocol import Calibration, Requirements, ScoringProtocol
from grasp.predict.row_arrays import RowArrays
from grasp.predict.slices import LabelTable
from grasp.predict.subset_tables import RowIndex
from grasp.runs.candidates import Binding, Candidate, candidate_of
from grasp.runs.environment import Environment
from grasp.runs.evaluate import artifact_targets
from grasp.runs.parts import Parts, PartsSource
from grasp.runs.predictions import Predictions

DEFAULT_CALIBRATION = "uniform:0.5"


@dataclass(frozen=True, slots=True)
class Scored:
    """An artifact beside an environment: what predictions for its subsets are made of. Says nothing of roles."""

    environment: Environment
    source: RowArrays
    renamed: Mapping[str, str]  # the artifact's name of a target -> the environment's
    blocks: tuple[SubsetBlock, ...]
    calibration: Calibration  # by which geometry is standardised here
    fingerprints: Mapping[str, str]

    @classmethod
    def of(
        cls, environment: Environment, artifact: ArtifactReader, *, calibration_subsets: int = 256, seed: int = 0
    ) -> "Scored":
        """Check that both belong together, and draw a calibration family like the environment's own.

        Its stream is another than that of the subsets that were retrained, so no intervention that is scored
        standardises itself. A table of given subsets has no family: uniform:0.5 stands in.

        Raises:
            EnvironmentDataError: corpora or targets differ, the masks are not those trained on.
        """
        common = artifact_targets(environment, artifact)
        spec = environment.info.family.spec if environment.info.family else DEFAULT_CALIBRATION
        calibration = Calibration(family=spec, n_subsets=calibration_subsets, seed=seed)
        label = calibration.parsed.label
        labels = LabelTable(artifact.rows_path).column(label) if label is not None else None
        blocks = tuple(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
        return cls(
            environment=environment,
            source=artifact,
            renamed={own: name for name, own in common.items()},
            blocks=blocks,
            calibration=calibration,
            fingerprints=dict(artifact.manifest.fingerprints),
        )

    def parts(
        self, candidates: Sequence[Candidate], targets: Sequence[str], *, per_unit: bool = False
    ) -> dict[Binding, Parts]:
        """Parts of every binding that occurs, for targets by the environment's names."""
        own = {name: mine for mine, name in self.renamed.items()}
        maker = PartsSource(self.source, tuple(own[name] for name in targets), self.blocks, self.calibration)
        groups: dict[Binding, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.binding, []).append(candidate)
        return {binding: maker.parts(binding, group, per_unit=per_unit) for binding, group in groups.items()}

    def predictions(self, candidates: Mapping[str, Candidate], targets: Sequence[str]) -> list[Predictions]:
        """Predictions of units and tasks by each of the candidates, whatever the environment's role."""
        parts = self.parts(tuple(candidates.values()), targets, per_unit=True)
        return [parts[c.binding].predictions(c, name, self.renamed) for name, c in candidates.items()]

    def predict(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predictions of units and tasks by frozen protocols, standardised by the environment's calibration family.

        Raises:
            ProtocolError: the artifact does not fit a protocol.
        """
        return self.predictions({n: candidate_of(p, self.source) for n, p in protocols.items()}, targets)


@dataclass(frozen=True, slots=True)
class Development:
    """An environment that may be selected on, with the artifacts built for it: made by `of` alone."""

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
