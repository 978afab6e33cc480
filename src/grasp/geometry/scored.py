"""Predictions of candidate protocols for the subsets of runs, from components that all candidates share.

Start with `Scored.from_runs` and `predictions`. Every candidate is a weighted sum of components.
Shape letters: B subsets, E units, T targets, N rows, D sketch width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ShapeError
from grasp.geometry.candidates import Binding, Candidate, candidate_of, needed_arrays
from grasp.geometry.geometry_predictor import InteractionLevel
from grasp.geometry.geometry_rule import CalibrationSettings, InteractionProtocol
from grasp.geometry.standardize import has_closed_form, relevance_moments, sampled_moments
from grasp.geometry.subset_sums import SubsetMass, halves_needed
from grasp.geometry.terms import CalibrationFamily, GeometryTerms, NormedSketch
from grasp.moments import StreamingMoments
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.weights import Side, Weights
from grasp.runs.alignment import Alignment, read_cost
from grasp.runs.predictions import Predictions, Weighting
from grasp.runs.training_runs import TrainingRuns
from grasp.seeds import stream

DEFAULT_CALIBRATION = "uniform:0.5"
EXACT_ROWS = 12_000  # up to this many rows, all pair similarities are permuted: 4 bytes per pair, 288 MB
_ROWS_AT_ONCE = 256
SHUFFLED_PREFIX = "shuffled "  # name prefix of components of shuffled pairs


@dataclass(frozen=True, slots=True)
class Parts:
    """Components by name: (B, T) or (B, 1) for tasks, (B, E) or (B, 1) for units.

    The component of a kernel is the predicted change of this kernel alone, in effect sizes. Candidates with geometry
    are sums of z-scores, so they divide it by its standard deviation over the calibration family.
    """

    subset_ids: tuple[str, ...]
    targets: tuple[str, ...]
    units: tuple[tuple[str, str], ...]
    task: Mapping[str, F64]
    unit: Mapping[str, F64]  # empty unless `per_unit`
    task_std: Mapping[str, F64]  # by kernel: sd of the change over the family; empty if no candidate has geometry
    unit_std: Mapping[str, F64]

    def tasks_of(self, candidate: Candidate) -> F64:
        """Return the predicted utility of every target up to a constant, (B, T). Source: eq:component-predictor."""
        shape = (len(self.subset_ids), len(self.targets))
        return np.array(np.broadcast_to(_weighted(self.task, self.task_std, candidate), shape))

    def units_of(self, candidate: Candidate) -> F64:
        """Return the predicted utility of every unit up to a constant, (B, E); requires `per_unit`."""
        shape = (len(self.subset_ids), len(self.units))
        return np.array(np.broadcast_to(_weighted(self.unit, self.unit_std, candidate), shape))


def _weighted(parts: Mapping[str, F64], std: Mapping[str, F64], candidate: Candidate) -> F64:
    total: F64 = np.zeros((1, 1))
    for kernel, weight in candidate.match:
        scale_C = std[kernel] if candidate.omega else 1.0
        total = total + weight * ratio(parts[kernel], scale_C)
    for name, omega in candidate.omega:
        # K_self has no pairs and K_cent no decomposition into pairs: both are not shuffled
        shuffled = candidate.shuffled and name.endswith((".pair", ".raw"))
        total = total + omega * parts[SHUFFLED_PREFIX + name if shuffled else name]
    return total


@dataclass(frozen=True)
class Scored(Alignment):
    """Runs aligned with an artifact, with a calibration family for the geometry of candidates."""

    calibration: CalibrationSettings  # family that standardizes the geometry

    @classmethod
    def from_runs(cls, runs: TrainingRuns, artifact: ArtifactReader, *, calibration_subsets: int = 256) -> Self:
        """Align runs with an artifact, with a calibration family of the same kind as the family of the runs.

        The calibration family uses another random stream than the retrained subsets, so that evaluated subsets do not
        standardize themselves. Runs on a table of subsets have no family; uniform:0.5 is used.

        Raises:
            RunsError: corpora or targets differ, or the subsets are not those trained on.
        """
        spec = runs.info.family.spec if runs.info.family else DEFAULT_CALIBRATION
        calibration = CalibrationSettings(family=spec, n_subsets=calibration_subsets)
        plain = Alignment.from_runs(runs, artifact)
        return cls(plain.runs, plain.source, plain.run_targets, plain.blocks, calibration)

    def select_candidates(self, candidates: Mapping[str, Candidate], targets: Sequence[str]) -> list[Predictions]:
        """Predict units and tasks with each of the candidates."""
        bound = self.parts(tuple(candidates.values()), targets, per_unit=True)
        results = []
        for name, candidate in candidates.items():
            parts = bound[candidate.binding]
            results.append(self.predictions(name, parts.targets, parts.tasks_of(candidate), parts.units_of(candidate)))
        return results

    def predict(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predict units and tasks with protocols, standardized by the calibration family of the runs.

        Raises:
            ProtocolError: the artifact does not fit a protocol.
        """
        return self.select_candidates({n: candidate_of(p, self.source) for n, p in protocols.items()}, targets)

    def parts(
        self, candidates: Sequence[Candidate], targets: Sequence[str], *, per_unit: bool = False
    ) -> dict[Binding, Parts]:
        """Compute the components of the candidates, by binding.

        Args:
            targets: target names of the runs.
            per_unit: also compute components per unit.
        Raises:
            ProtocolError: the artifact lacks a kernel or a sketch.
        """
        groups: dict[Binding, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.binding, []).append(candidate)
        match_targets = self.artifact_targets_of(targets)
        return {
            binding: self._parts(binding, group, match_targets, per_unit=per_unit) for binding, group in groups.items()
        }

    def _parts(
        self, binding: Binding, candidates: Sequence[Candidate], targets: tuple[str, ...], *, per_unit: bool
    ) -> Parts:
        kernels = list(dict.fromkeys(kernel for c in candidates for kernel, _ in c.match))
        components = list(dict.fromkeys(name for c in candidates for name, _ in c.omega))
        task: dict[str, F64] = {}
        unit: dict[str, F64] = {}
        task_std: dict[str, F64] = {}
        unit_std: dict[str, F64] = {}
        for kernel in kernels:
            protocol = binding.protocol([kernel], []).model_copy(update={"calibration": self.calibration})
            predictor = Predictor.from_artifact(self.source, protocol, targets, per_unit=per_unit)
            task[kernel], unit[kernel] = self.changes(predictor)
            if components:
                task_std[kernel], unit_std[kernel] = self._spread(predictor)
        geometry = self._geometry(binding, components) | self._shuffled(binding, candidates)
        return Parts(
            subset_ids=tuple(name for block in self.blocks for name in block.subset_ids),
            targets=targets,
            units=self.units(targets),
            task=task | geometry,
            unit=unit | geometry if per_unit else {},
            task_std=task_std,
            unit_std=unit_std,
        )

    def _spread(self, predictor: Predictor) -> tuple[F64, F64]:
        """Return the standard deviation of changes over the family, for tasks and units; 0 without variance."""
        levels = [level for level in (predictor.task, predictor.unit_level) if level is not None]
        if has_closed_form(self._family.family):
            protocol = predictor.protocol
            assert isinstance(protocol, InteractionProtocol)
            std_of_level = []
            for level in levels:
                scatter_C = np.where(level.spread.std_C > 0, float(predictor.n_rows), 0.0)
                gain_C, offset_C = np.ones(len(scatter_C)), np.zeros(len(scatter_C))
                if isinstance(level, InteractionLevel):
                    gain_C, offset_C = level.gain_C, level.offset_C
                rows = StreamingMoments(predictor.n_rows, offset_C, scatter_C)
                known = relevance_moments(rows, self._family.family, protocol.side, protocol.weighting)
                std_of_level.append(gain_C * known.std_C * (known.inverse_C > 0))
        else:
            blocks = self._family.blocks(self.source.n_rows)
            drawn = (replace(self, blocks=(block,)).changes(predictor) for block in blocks)
            sampled = sampled_moments(dict(zip("tu", changes, strict=True)) for changes in drawn)
            std_of_level = [known.std_C * (known.inverse_C > 0) for known in sampled.values()]
        return std_of_level[0], std_of_level[-1]

    def _geometry(self, binding: Binding, components: Sequence[str]) -> dict[str, F64]:
        """Return z-scores of geometric components over the family, (B, 1)."""
        if not components:
            return {}
        protocol = binding.protocol([], components)
        fitted = protocol.fitted(self.source.array_names, self.source.feature_settings)
        sketches = {half: NormedSketch(self.source, half) for half in halves_needed(fitted.components)}
        terms = GeometryTerms.from_artifact(self.source, fitted, sketches, self._family)
        z = [
            terms.z(
                {half: sketch.normed_sums(block.weights) for half, sketch in sketches.items()},
                SubsetMass.from_weights(block.weights),
            )
            for block in self.blocks
        ]
        return {name: np.concatenate([part[name] for part in z])[:, None] for name in components}

    def _shuffled(self, binding: Binding, candidates: Sequence[Candidate]) -> dict[str, F64]:
        """Return z-scores of K_pair, and of K_raw = K_self + K_pair, with shuffled pairs, (B, 1)."""
        names = {name for c in candidates if c.shuffled for name, _ in c.omega if name.endswith((".pair", ".raw"))}
        if not names:
            return {}
        halves = sorted({name.split(".")[0] for name in names})
        known = sampled_moments(
            self._shuffled_block(block.weights, halves, binding.side, binding.weighting)
            for block in self._family.blocks(self.source.n_rows)
        )
        shuffled = [
            self._shuffled_block(block.weights, halves, binding.side, binding.weighting) for block in self.blocks
        ]
        values = {name: np.concatenate([part[name] for part in shuffled]) for name in shuffled[0]}
        return {SHUFFLED_PREFIX + name: known[name].z(value_B[:, None]) for name, value_B in values.items()}

    def _shuffled_block(
        self, weights: Weights, halves: Sequence[str], side: Side, weighting: Weighting
    ) -> dict[str, F64]:
        weight_BN = weights.csr().toarray()
        if side == "omitted":
            weight_BN = 1.0 - weight_BN
        weight_BN = weight_BN * SubsetMass.from_weights(weights).factor(side, weighting)[:, None]
        out: dict[str, F64] = {}
        for half in halves:
            sketch_ND, pairs = self._sketch(half)
            out[f"{half}.pair"] = pair_B = pairs.pair(weight_BN)
            out[f"{half}.raw"] = pair_B + weight_BN**2 @ np.einsum("nd,nd->n", sketch_ND, sketch_ND)
        return out

    @cached_property
    def _family(self) -> CalibrationFamily:
        return CalibrationFamily.from_calibration(self.calibration, self.source)

    @cached_property
    def _sketches(self) -> dict[str, tuple[F64, "ShuffledPairs | ShuffledRows"]]:
        return {}

    def _sketch(self, half: str) -> "tuple[F64, ShuffledPairs | ShuffledRows]":
        """Return a sketch (N, D) and its shuffle from a cache; `joint` concatenates hidden and residual."""
        if half not in self._sketches:
            arrays = [self.source.array_blocks(f"{part}_sketch") for part in halves_needed({f"{half}.pair": 1.0})]
            parts = [np.concatenate([block.astype(np.float64) for _, block in blocks]) for blocks in arrays]
            sketch_ND = np.concatenate(parts, axis=1)
            shuffle = ShuffledPairs if len(sketch_ND) <= EXACT_ROWS else ShuffledRows
            self._sketches[half] = sketch_ND, shuffle.draw(sketch_ND, seed=0)
        return self._sketches[half]


def predictions(
    alignment: Alignment, rules: Mapping[str, ScoringProtocol | Candidate], targets: Sequence[str]
) -> list[Predictions]:
    """Predict units and tasks with protocols and candidates, standardized by a family like that of the runs.

    Raises:
        ProtocolError: the artifact does not fit a protocol.
    """
    source = alignment.source
    candidates = {
        name: candidate_of(rule, source) if isinstance(rule, ScoringProtocol) else rule for name, rule in rules.items()
    }
    results = Scored.from_runs(alignment.runs, source).select_candidates(candidates, targets)
    return [replace(result, cost=read_cost(needed_arrays(candidates[result.method]), source)) for result in results]


# ------------------------------------------------------------------------ shuffled pairs, for the paper's control


@dataclass(frozen=True, slots=True)
class ShuffledPairs:
    """Pair similarities G_ij = <phi_i, phi_j>, i < j, reassigned to pairs by one fixed random permutation.

    Preserves the multiset of pair similarities exactly and destroys their assignment to pairs. The result is not a Gram
    matrix: K_pair may be lower than -K_self.
    """

    n_rows: int
    condensed: F32  # row i of the upper triangle starts at i N - i (i + 1) / 2

    @classmethod
    def draw(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledPairs":
        """Permute the pair similarities of a sketch. Memory: 2 N^2 bytes; time: O(N^2 D)."""
        sketch_ND = np.asarray(sketch_ND, dtype=np.float32)
        n_rows = len(sketch_ND)
        if n_rows > EXACT_ROWS:
            raise ShapeError(f"shuffled pairs: got {n_rows} rows, expected at most {EXACT_ROWS}; shuffle rows instead")
        condensed = np.empty(n_rows * (n_rows - 1) // 2, dtype=np.float32)
        end = 0
        for start in range(0, n_rows, _ROWS_AT_ONCE):
            block = sketch_ND[start : start + _ROWS_AT_ONCE] @ sketch_ND.T
            for i, row in enumerate(block, start=start):
                begin, end = end, end + n_rows - 1 - i
                condensed[begin:end] = row[i + 1 :]
        stream(seed, "fidelity", "pair-shuffled").shuffle(condensed)
        return cls(n_rows, condensed)

    def pair(self, weights_BN: NDArray[np.floating]) -> F64:
        """Return K_pair = 2 sum_{i<j} w_i w_j G_shuffled(ij), (B,). Source: the paper's pair-shuffled control."""
        weights_BN = np.asarray(weights_BN, dtype=np.float64)
        if weights_BN.shape[1] != self.n_rows:
            raise ShapeError(f"shuffled pairs: weights {weights_BN.shape} for {self.n_rows} rows")
        total_B = np.zeros(len(weights_BN))
        end = 0
        for start in range(0, self.n_rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, self.n_rows)
            block = np.zeros((stop - start, self.n_rows))
            for i in range(start, stop):
                begin, end = end, end + self.n_rows - 1 - i
                block[i - start, i + 1 :] = self.condensed[begin:end]
            total_B += np.einsum("bi,bi->b", weights_BN[:, start:stop], weights_BN @ block.T)
        return np.asarray(2.0 * total_B)


@dataclass(frozen=True, slots=True)
class ShuffledRows:
    """Sketches reassigned to rows by a random permutation, for corpora with too many pairs for `ShuffledPairs`.

    phi_i is replaced by phi_perm(i) in K_pair only, which permutes rows and columns of the Gram matrix alike: the
    multiset of pair similarities, the norms and the spectrum are preserved, and the assignment of sketches to rows is
    destroyed. `ShuffledPairs` also destroys the Gram structure. Does not require an N x N matrix.
    """

    moved_ND: NDArray[np.floating]

    @classmethod
    def draw(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledRows":
        return cls(sketch_ND[stream(seed, "fidelity", "row-shuffled").permutation(len(sketch_ND))])

    def pair(self, weights_BN: F64) -> F64:
        """Return K_pair of the permuted sketches, (B,)."""
        total_BD = weights_BN @ self.moved_ND
        self_B = weights_BN**2 @ np.einsum("nd,nd->n", self.moved_ND, self.moved_ND)
        return np.asarray(np.einsum("bd,bd->b", total_BD, total_BD) - self_B)
