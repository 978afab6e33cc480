"""An artifact beside an environment: the subsets that were trained on, in its rows, and what it predicts of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.rows import label_column
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock
from grasp.runs.environment import ALL_SUFFIX, Environment
from grasp.runs.predictions import Cost, Predictions
from grasp.targets.units import LossOn, Unit, UnitSet


def unit_fingerprints(artifact: ArtifactReader, loss_on: LossOn) -> dict[str, str]:
    """Fingerprint of the units of every target of an artifact."""
    lines = artifact.units.select(["unit_id", "target", "prompt", "completion"]).to_pylist()
    return {
        target: UnitSet(tuple(Unit(**line, loss_on=loss_on) for line in lines if line["target"] == target)).fingerprint
        for target in artifact.targets
    }


def artifact_targets(environment: Environment, artifact: ArtifactReader) -> dict[str, str]:
    """Targets of the environment that the artifact has: environment's name -> artifact's name.

    An environment scores `sciq` with its loss on the completion and `sciq@all` with its loss on every token; an
    artifact has one of the two, under the name `sciq`.

    Raises:
        EnvironmentDataError: corpora differ, units of a target differ, or no target is common to both.
    """
    where = str(artifact.path)
    try:
        environment.check_corpus(artifact.manifest.fingerprints.get("corpus", "none"), where)
    except EnvironmentDataError as err:
        command = environment.info.build_command(environment.path)
        raise EnvironmentDataError(f"{err}" + (f": {command}" if command else "")) from err
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    known = unit_fingerprints(artifact, loss_on)
    common: dict[str, str] = {}
    for name, info in environment.info.targets.items():
        own = name.removesuffix(ALL_SUFFIX)
        if own not in artifact.targets or info.loss_on != loss_on:
            continue
        if known[own] != info.fingerprint:
            raise EnvironmentDataError(
                f"{where}: units of {name} have fingerprint {known[own]}, but {environment.path} scored "
                f"{info.fingerprint}; build with the same target settings (variant, loss_on, units_per_target, seed)"
            )
        common[name] = own
    if not common:
        raise EnvironmentDataError(
            f"{where}: has targets {list(artifact.targets)} with loss_on {loss_on!r}; {environment.path} has "
            f"{[(name, info.loss_on) for name, info in environment.info.targets.items()]}; none is common to both"
        )
    return common


@dataclass(frozen=True)
class Joined:
    """Both, known to belong together."""

    environment: Environment
    source: ArtifactReader
    renamed: Mapping[str, str]  # the artifact's name of a target -> the environment's
    blocks: tuple[SubsetBlock, ...]

    @classmethod
    def from_environment(cls, environment: Environment, artifact: ArtifactReader) -> Self:
        """Check that both belong together.

        Raises:
            EnvironmentDataError: corpora or targets differ, the masks are not those trained on.
        """
        common = artifact_targets(environment, artifact)
        label = environment.label
        labels = None if label is None else label_column(artifact, label)
        blocks = tuple(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
        return cls(environment, artifact, {own: name for name, own in common.items()}, blocks)

    @property
    def runs_fingerprint(self) -> str:
        """See `Environment.fingerprint`."""
        return self.environment.fingerprint(self.blocks[0])

    def own_names(self, targets: Sequence[str]) -> tuple[str, ...]:
        """The artifact's names of targets of the environment."""
        theirs = {name: own for own, name in self.renamed.items()}
        return tuple(theirs[name] for name in targets)

    def units(self, targets: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Units of targets by the artifact's names, in the order of a predictor of them."""
        unit_ids = self.source.units.column("unit_id").to_pylist()
        return tuple((target, unit_ids[e]) for target in targets for e in self.source.unit_columns(target))

    def changes(self, predictor: Predictor) -> tuple[F64, F64]:
        """Predicted changes of the subsets, (B, T), and, where the predictor has them, of units, (B, E)."""
        sums = [predictor.sums(block.weights) for block in self.blocks]
        task_BT = np.concatenate([predictor.change_of(one) for one in sums])
        if predictor.unit_level is None:
            return task_BT, np.empty((len(task_BT), 0))
        pairs = zip(self.blocks, sums, strict=True)
        return task_BT, np.concatenate([predictor.unit_change(block.weights, one) for block, one in pairs])

    def predictions(self, method: str, own: Sequence[str], task_BT: F64, unit_BE: F64) -> Predictions:
        """Predictions of targets and units.

        Args:
            own: the artifact's names of the targets.
            unit_BE: without columns: of targets alone.
        """
        return Predictions(
            method=method,
            subset_ids=tuple(name for block in self.blocks for name in block.subset_ids),
            units=tuple((self.renamed[target], unit) for target, unit in self.units(own)) if unit_BE.shape[1] else (),
            values_BE=unit_BE,
            task_B={self.renamed[target]: task_BT[:, t] for t, target in enumerate(own)},
        )

    def additive(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predictions by additive protocols, as `grasp predict` has them."""
        own, found = self.own_names(targets), []
        for name, protocol in protocols.items():
            predictor = Predictor.from_artifact(self.source, protocol, own, per_unit=True)
            predictions = self.predictions(name, own, *self.changes(predictor))
            found.append(replace(predictions, cost=cost_of(protocol.arrays, self.source)))
        return found


def cost_of(arrays: Iterable[str], artifact: ArtifactReader) -> Cost:
    """What a predictor of ours reads of every row: its relevance matrices and its sketches.

    Its time is that of the whole build, tokenising included, which gave every predictor of the artifact at once.
    """
    width = {name: artifact.manifest.arrays[name].width for name in arrays if name in artifact.array_names}
    scores = sum(size for name, size in width.items() if name.startswith("relevance_"))
    seconds = artifact.manifest.details.get("build_seconds") or {}
    return Cost(sum(width.values()) - scores, scores, seconds.get("wall"), seconds.get("cpu"))
