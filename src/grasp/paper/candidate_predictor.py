"""Predictions of candidate protocols for the subsets of runs, from component values that all candidates share.

A candidate (`candidates.Candidate`) is a weighted sum of kernels, `match`, and of geometric quantities, `components`.
In this module both are components. `grasp calibrate` compares thousands of candidates, so every component is computed
once per `ComponentSettings` and then only weighted.

A candidate may be *shuffled*: the control of the paper (`shuffled_pairs`), whose pair similarities are assigned to
other pairs of rows.

Start with `CandidatePredictor.from_runs`.
Shape letters: B subsets, E units, T targets, C columns (targets or units), N rows, D sketch width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from grasp.arrays import F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.moments import MeanStd, StreamingMoments
from grasp.paper.candidates import Candidate, ComponentSettings
from grasp.paper.interaction_predictor import InteractionEffects
from grasp.paper.protocol import DEFAULT_CALIBRATION, CalibrationSettings, InteractionProtocol
from grasp.paper.shuffled_pairs import ShuffledPairs
from grasp.paper.sketches import SketchWithNorms
from grasp.paper.standardize import has_closed_form, relevance_moments, sampled_moments
from grasp.paper.subset_sums import WeightSums, required_sketches
from grasp.paper.terms import CalibrationFamily, GeometryTerms
from grasp.predict.predictor import Predictor
from grasp.predict.weights import Side, Weights
from grasp.runs.alignment import Alignment
from grasp.runs.predictions import Predictions, Weighting
from grasp.runs.training_runs import TrainingRuns

SHUFFLED_PREFIX = "shuffled "  # name prefix of components of shuffled pairs


@dataclass(frozen=True, slots=True)
class ComponentValues:
    """Values of components by name: (B, T) or (B, 1) for tasks, (B, E) or (B, 1) for units.

    The component of a kernel is the predicted change of this kernel alone, in effect sizes. Candidates with geometry
    are sums of z-scores, so they divide it by its standard deviation over the calibration family.
    """

    subset_ids: tuple[str, ...]
    targets: tuple[str, ...]
    units: tuple[tuple[str, str], ...]  # (target, unit_id)
    task: Mapping[str, F64]
    unit: Mapping[str, F64]  # empty unless `per_unit`
    task_std: Mapping[str, F64]  # by kernel: sd of the change over the family; empty if no candidate has geometry
    unit_std: Mapping[str, F64]

    def predict_tasks(self, candidate: Candidate) -> F64:
        """Return the predicted utility of every target up to a constant, (B, T). Source: eq:component-predictor."""
        shape = (len(self.subset_ids), len(self.targets))
        return np.array(np.broadcast_to(_weighted_sum(self.task, self.task_std, candidate), shape))

    def predict_units(self, candidate: Candidate) -> F64:
        """Return the predicted utility of every unit up to a constant, (B, E); requires `per_unit`."""
        shape = (len(self.subset_ids), len(self.units))
        return np.array(np.broadcast_to(_weighted_sum(self.unit, self.unit_std, candidate), shape))


def _weighted_sum(values: Mapping[str, F64], std: Mapping[str, F64], candidate: Candidate) -> F64:
    """Return the sum of the components with the weights of a candidate; see `ComponentValues`."""
    total: F64 = np.zeros((1, 1))
    for kernel, weight in candidate.match:
        scale_C = std[kernel] if candidate.components else 1.0
        total = total + weight * ratio(values[kernel], scale_C)
    for component, omega in candidate.components:
        # K_self has no pairs and K_cent no decomposition into pairs: both are not shuffled
        shuffled = candidate.shuffled and component.endswith((".pair", ".raw"))
        total = total + omega * values[SHUFFLED_PREFIX + component if shuffled else component]
    return total


@dataclass(frozen=True)
class CandidatePredictor(Alignment):
    """Predict the utilities of the subsets of runs by candidate protocols.

    Extends `Alignment`: runs and an artifact of the same corpus, with the subsets of the runs.
    """

    calibration: CalibrationSettings  # family that standardizes the geometry

    @classmethod
    def from_runs(cls, runs: TrainingRuns, artifact: ArtifactReader, *, calibration_subsets: int = 256) -> Self:
        """Align runs with an artifact, with a calibration family of the same kind as the family of the runs.

        The calibration family uses another random stream than the retrained subsets, so that evaluated subsets do not
        standardize themselves. Runs on a table of subsets have no family; uniform:0.5 is used.

        Args:
            runs: retrained or imported runs.
            artifact: artifact of the corpus of the runs.
            calibration_subsets: subsets drawn from the calibration family, if its moments have no closed form.
        Raises:
            RunsError: corpora or targets differ, or the subsets are not those trained on.
        """
        spec = runs.info.family.spec if runs.info.family else DEFAULT_CALIBRATION
        calibration = CalibrationSettings(family=spec, n_subsets=calibration_subsets)
        alignment = Alignment.from_runs(runs, artifact)
        return cls(alignment.runs, alignment.source, alignment.run_targets, alignment.blocks, calibration)

    def predict_candidates(self, candidates: Mapping[str, Candidate], targets: Sequence[str]) -> list[Predictions]:
        """Predict units and tasks with each of the candidates.

        Args:
            candidates: candidates by the name of their predictions.
            targets: target names of the runs.
        """
        values_by_settings = self.component_values(tuple(candidates.values()), targets, per_unit=True)
        results = []
        for name, candidate in candidates.items():
            values = values_by_settings[candidate.settings]
            task_BT, unit_BE = values.predict_tasks(candidate), values.predict_units(candidate)
            results.append(self.predictions(name, values.targets, task_BT, unit_BE))
        return results

    def component_values(
        self, candidates: Sequence[Candidate], targets: Sequence[str], *, per_unit: bool = False
    ) -> dict[ComponentSettings, ComponentValues]:
        """Compute the components of the candidates, by their settings.

        Args:
            candidates: candidates whose components are computed.
            targets: target names of the runs.
            per_unit: also compute components per unit.
        Raises:
            ProtocolError: the artifact lacks a kernel or a sketch.
        """
        groups: dict[ComponentSettings, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.settings, []).append(candidate)
        artifact_targets = self.artifact_targets_of(targets)
        return {
            settings: self._component_values(settings, group, artifact_targets, per_unit=per_unit)
            for settings, group in groups.items()
        }

    def _component_values(
        self,
        settings: ComponentSettings,
        candidates: Sequence[Candidate],
        artifact_targets: tuple[str, ...],
        *,
        per_unit: bool,
    ) -> ComponentValues:
        """Compute the components of candidates with the same settings."""
        kernels = list(dict.fromkeys(kernel for c in candidates for kernel, _ in c.match))
        components = list(dict.fromkeys(name for c in candidates for name, _ in c.components))
        task: dict[str, F64] = {}
        unit: dict[str, F64] = {}
        task_std: dict[str, F64] = {}
        unit_std: dict[str, F64] = {}
        for kernel in kernels:
            protocol = settings.protocol([kernel], []).model_copy(update={"calibration": self.calibration})
            predictor = Predictor.from_artifact(self.source, protocol, artifact_targets, per_unit=per_unit)
            task[kernel], unit[kernel] = self.changes(predictor)
            if components:
                task_std[kernel], unit_std[kernel] = self._family_std(predictor)
        geometry = self._shuffled_geometry(settings, candidates)
        if components:
            resolved = settings.protocol([], components).resolved_for(self.source)
            sketches = {name: SketchWithNorms(self.source, name) for name in required_sketches(resolved.components)}
            terms = GeometryTerms.from_artifact(self.source, resolved, sketches, self._family)
            z_of_blocks = [
                terms.z_scores(
                    {name: sketch.sketch_sums(block.weights) for name, sketch in sketches.items()},
                    WeightSums.from_weights(block.weights),
                )
                for block in self.blocks
            ]
            geometry |= {name: np.concatenate([z[name] for z in z_of_blocks])[:, None] for name in components}
        return ComponentValues(
            subset_ids=tuple(name for block in self.blocks for name in block.subset_ids),
            targets=artifact_targets,
            units=self.units(artifact_targets),
            task=task | geometry,
            unit=unit | geometry if per_unit else {},
            task_std=task_std,
            unit_std=unit_std,
        )

    def _family_std(self, predictor: Predictor) -> tuple[F64, F64]:
        """Return the standard deviation of changes over the calibration family, for tasks and units, (C,) each.

        0 for a column without variance. Without units, the second result equals the first.
        """
        family, n_rows, protocol = self._family, predictor.n_rows, predictor.protocol
        if not has_closed_form(family.family):
            # treat each drawn block of subsets as if it were the subsets of the runs
            changes = (replace(self, blocks=(block,)).changes(predictor) for block in family.blocks(n_rows))
            sampled = sampled_moments({"task": task_BT, "unit": unit_BE} for task_BT, unit_BE in changes)
            return _positive_std(sampled["task"]), _positive_std(sampled["unit"])
        assert isinstance(protocol, InteractionProtocol)
        stds, levels = [], (predictor.task, predictor.unit_level)
        for level in (level for level in levels if level is not None):
            # A change is gain * A of effects plus offset. Over the rows, effects have mean 0 and standard deviation 1,
            # so that effects plus offset have the mean `offset`, and a scatter (sum of squared deviations) of N.
            scatter_C = np.where(level.raw_mean_std.std_C > 0, float(n_rows), 0.0)
            gain_C, offset_C = np.ones(len(scatter_C)), np.zeros(len(scatter_C))
            if isinstance(level, InteractionEffects):
                gain_C, offset_C = level.gain_C, level.offset_C
            effect_moments = StreamingMoments(n_rows, offset_C, scatter_C)
            moments = relevance_moments(effect_moments, family.family, protocol.side, protocol.weighting)
            stds.append(gain_C * _positive_std(moments))
        return stds[0], stds[-1]

    def _shuffled_geometry(self, settings: ComponentSettings, candidates: Sequence[Candidate]) -> dict[str, F64]:
        """Return z-scores of K_pair, and of K_raw = K_self + K_pair, with shuffled pairs, (B, 1)."""
        components = {name for c in candidates if c.shuffled for name, _ in c.components}
        sketch_names = sorted({name.split(".")[0] for name in components if name.endswith((".pair", ".raw"))})
        if not sketch_names:
            return {}
        side, weighting = settings.side, settings.weighting
        mean_std = sampled_moments(
            self._shuffled_block(block.weights, sketch_names, side, weighting)
            for block in self._family.blocks(self.source.n_rows)
        )
        values_of_blocks = [self._shuffled_block(block.weights, sketch_names, side, weighting) for block in self.blocks]
        values = {name: np.concatenate([block[name] for block in values_of_blocks]) for name in values_of_blocks[0]}
        return {SHUFFLED_PREFIX + name: mean_std[name].z_scores(value_B[:, None]) for name, value_B in values.items()}

    def _shuffled_block(
        self, weights: Weights, sketch_names: Sequence[str], side: Side, weighting: Weighting
    ) -> dict[str, F64]:
        """Return K_pair and K_raw with shuffled pairs for one block of subsets, (B,), by component name."""
        weight_BN = weights.csr().toarray()
        if side == "omitted":
            weight_BN = 1.0 - weight_BN
        weight_BN = weight_BN * WeightSums.from_weights(weights).factor(side, weighting)[:, None]
        values: dict[str, F64] = {}
        for name in sketch_names:
            if name not in self._shuffle_cache:  # `joint` concatenates hidden and residual
                stored = required_sketches([f"{name}.pair"])
                blocks_of = [self.source.array_blocks(f"{sketch}_sketch") for sketch in stored]
                arrays = [np.concatenate([block.astype(np.float64) for _, block in blocks]) for blocks in blocks_of]
                sketch_ND = np.concatenate(arrays, axis=1)
                self._shuffle_cache[name] = sketch_ND, ShuffledPairs.draw(sketch_ND, seed=0)
            sketch_ND, shuffled = self._shuffle_cache[name]
            values[f"{name}.pair"] = pair_B = shuffled.k_pair(weight_BN)
            values[f"{name}.raw"] = pair_B + weight_BN**2 @ np.einsum("nd,nd->n", sketch_ND, sketch_ND)
        return values

    @cached_property
    def _family(self) -> CalibrationFamily:
        return CalibrationFamily.from_calibration(self.calibration, self.source)

    @cached_property
    def _shuffle_cache(self) -> dict[str, tuple[F64, ShuffledPairs]]:
        return {}  # sketches (N, D) and their shuffles, filled by `_shuffled_block`


def _positive_std(mean_std: MeanStd) -> F64:
    """Return the standard deviation of each column, exactly 0 where it is rounding error."""
    return np.asarray(mean_std.std_C * (mean_std.inverse_std_C > 0))
