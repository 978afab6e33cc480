"""Match runs with an artifact: the subsets of the runs in its rows, and its predictions for them.

Start with `Alignment.from_runs`. Retrained runs were trained on the rows of the artifact. For imported runs,
`imported_runs.bind_runs` expresses their subsets in the rows of the artifact first.
Shape letters: T targets, B subsets, E units.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column
from grasp.errors import RunsError
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock
from grasp.runs.predictions import Cost, Predictions
from grasp.runs.training_runs import ALL_SUFFIX, TrainingRuns
from grasp.targets.units import LossOn, UnitSet, stored_units

BLOCK_SUBSETS = 256
NATS = r"(^|_)(loss|nll|ce)($|_)|loss$"  # names of metrics in nats per token


def unit_fingerprints(artifact: ArtifactReader, loss_on: LossOn) -> dict[str, str]:
    """Return the fingerprint of the units of every target of an artifact."""
    units = stored_units(artifact.units, loss_on)
    return {
        target: UnitSet(tuple(unit for unit in units if unit.target == target)).fingerprint
        for target in artifact.targets
    }


def match_targets(runs: TrainingRuns, artifact: ArtifactReader) -> dict[str, str]:
    """Return the targets that runs and artifact have in common: the name in the artifact by the name in the runs.

    Runs evaluate `sciq` with loss on the completion and `sciq@all` with loss on every token; an artifact has one of the
    two, with the name `sciq`.

    Raises:
        RunsError: corpora differ, units of a target differ, or there is no common target.
    """
    location = str(artifact.path)
    try:
        runs.check_corpus(artifact.manifest.fingerprints.get("corpus", "none"), location)
    except RunsError as err:
        command = runs.info.build_command(runs.path)
        raise RunsError(f"{err}" + (f": {command}" if command else "")) from err
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    fingerprints = unit_fingerprints(artifact, loss_on)
    common: dict[str, str] = {}
    for name, info in runs.info.targets.items():
        artifact_target = name.removesuffix(ALL_SUFFIX)
        if artifact_target not in artifact.targets or info.loss_on != loss_on:
            continue
        if fingerprints[artifact_target] != info.fingerprint:
            raise RunsError(
                f"{location}: units of {name} have fingerprint {fingerprints[artifact_target]}, but {runs.path} scored "
                f"{info.fingerprint}; build with the same target settings (variant, loss_on, units_per_target, seed)"
            )
        common[name] = artifact_target
    if not common:
        raise RunsError(
            f"{location}: has targets {list(artifact.targets)} with loss_on {loss_on!r}; {runs.path} has "
            f"{[(name, info.loss_on) for name, info in runs.info.targets.items()]}; none is common to both"
        )
    return common


@dataclass(frozen=True)
class Alignment:
    """Runs and an artifact of the same corpus and targets, with the subsets of the runs.

    Attributes:
        runs: retrained or imported runs.
        source: the artifact.
        run_targets: name of each common target in the runs, by its name in the artifact.
        blocks: subsets of the runs as weights of the rows of the artifact.
    """

    runs: TrainingRuns
    source: ArtifactReader
    run_targets: Mapping[str, str]
    blocks: tuple[SubsetBlock, ...]

    @classmethod
    def from_runs(cls, runs: TrainingRuns, artifact: ArtifactReader) -> Self:
        """Match runs with an artifact.

        Raises:
            RunsError: corpora or targets differ, or the subsets are not those trained on.
        """
        common = match_targets(runs, artifact)
        label = runs.label
        labels = None if label is None else label_column(artifact, label)
        blocks = tuple(runs.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
        return cls(runs, artifact, {artifact_target: name for name, artifact_target in common.items()}, blocks)

    @property
    def runs_fingerprint(self) -> str:
        """Fingerprint of the runs; see `TrainingRuns.fingerprint`."""
        return self.runs.fingerprint(self.blocks[0])

    def artifact_targets_of(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return the names in the artifact of targets of the runs."""
        name_in_artifact = {name: artifact_target for artifact_target, name in self.run_targets.items()}
        return tuple(name_in_artifact[name] for name in targets)

    def units(self, targets: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return (target, unit_id) of targets of the artifact, in the order of a predictor for them."""
        unit_ids = self.source.units.column("unit_id").to_pylist()
        return tuple((target, unit_ids[e]) for target in targets for e in self.source.unit_columns(target))

    def changes(self, predictor: Predictor) -> tuple[F64, F64]:
        """Predict the changes of the subsets, (B, T), and of units, (B, E); without columns if there are no units."""
        sums = [predictor.sums(block.weights) for block in self.blocks]
        task_BT = np.concatenate([predictor.change_of(subset_sums) for subset_sums in sums])
        if predictor.unit_level is None:
            return task_BT, np.empty((len(task_BT), 0))
        pairs = zip(self.blocks, sums, strict=True)
        return task_BT, np.concatenate(
            [predictor.unit_change(block.weights, subset_sums) for block, subset_sums in pairs]
        )

    def predictions(self, method: str, artifact_targets: Sequence[str], task_BT: F64, unit_BE: F64) -> Predictions:
        """Return predictions of targets and units under the target names of the runs.

        Args:
            method: name of the method.
            artifact_targets: names of the targets in the artifact.
            task_BT: predictions of targets.
            unit_BE: predictions of units; without columns if there are none.
        """
        return Predictions(
            method=method,
            subset_ids=tuple(name for block in self.blocks for name in block.subset_ids),
            units=tuple((self.run_targets[target], unit) for target, unit in self.units(artifact_targets))
            if unit_BE.shape[1]
            else (),
            values_BE=unit_BE,
            task_B={self.run_targets[target]: task_BT[:, t] for t, target in enumerate(artifact_targets)},
        )

    def predict(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predict targets and units with protocols, as `grasp predict` does.

        Args:
            protocols: protocols by the name of the method.
            targets: names of the targets in the runs.
        """
        artifact_targets, results = self.artifact_targets_of(targets), []
        family = self.runs.info.family.spec if self.runs.info.family else None
        for name, rule in protocols.items():
            protocol = rule.for_runs(family)
            predictor = Predictor.from_artifact(self.source, protocol, artifact_targets, per_unit=True)
            predictions = self.predictions(name, artifact_targets, *self.changes(predictor))
            results.append(replace(predictions, cost=read_cost(protocol.arrays, self.source)))
        return results


def read_cost(arrays: Iterable[str], artifact: ArtifactReader) -> Cost:
    """Return the number of floats per row that a predictor reads (relevance and sketches), and the build time.

    The time is that of the whole build, including tokenization, which serves all predictors of the artifact.
    """
    width = {name: artifact.manifest.arrays[name].width for name in arrays if name in artifact.array_names}
    scores = sum(size for name, size in width.items() if name.startswith("relevance_"))
    seconds = artifact.manifest.details.get("build_seconds") or {}
    return Cost(sum(width.values()) - scores, scores, seconds.get("wall"), seconds.get("cpu"))
