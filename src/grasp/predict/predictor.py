"""The predictor: relevance of rows, combined once, then averaged over the rows of a subset.

    effect_i    relevance of row i to the target, summed over kernels, mean 0 and standard deviation 1 over the rows
    change(S)   sum_i w_i effect_i / sum_i w_i

This is the whole prediction if all retained rows have the same weight. The change is relative to the whole corpus: 0
is the corpus, positive is better. Its unit, *effect size*, is the same for all targets, and the mean effect of a slice
determines its rank: dropping a share p of the rows with mean effect m changes -p / (1 - p) m.

Repetition has diminishing returns: rows that are repeated are together worth less than as many different rows. If n
rows are retained, training reads n rows per epoch, a row of weight w_i

    y_i = w_i n / sum_j w_j     times per epoch, and the row is worth
    x_i = law(y_i)              rows that are read once per epoch; law(0) = 0, law(1) = 1 (`RepetitionLaw`)

Any row that the model has not seen is worth b effect sizes (`NEW_ROW_VALUE`), so

    factor(S) = sum_i x_i / n
    change(S) = factor(S) (sum_i x_i effect_i / sum_i x_i + b) - b

b is small compared with the value of a relevant row, and only matters if few rows are repeated very often. With a
training budget, n is the number of rows of the corpus. The code sums with the *effective weights* v_i = x_i / law(y),
y = n / sum_j w_j, in the place of x_i: the mean is the same, and weights 0 and 1 stay 0 and 1.

Start with `Predictor.from_artifact` and `Predictor.change`. Order of the module: effective weights (`RepetitionLaw`),
effects of rows (`KernelRelevance`, `RowEffects`), changes of subsets (`Predictor`), reading and combining the kernels
(`assemble_predictor`). Weighted sums over rows are in `grasp.predict.weights`. Protocols of other packages have their
own assembly (`RegisteredProtocol.bind`) and may have a subclass of `Predictor`.
Source: eq:method-additive, eq:component-predictor of the paper, see docs/paper_map.md.
Shape letters: B subsets, N rows, n rows of a block, E units, T targets, G slices, C columns (targets or units), D
sketch width.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, I64, Blocks, ratio
from grasp.artifact.cache import cached
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import checked_targets, label_column, row_documents, row_tokens, suggest_labels
from grasp.errors import ProtocolError
from grasp.kernel_table import REPLAY
from grasp.moments import MeanStd, StreamingMoments
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.scoring_rule import RegisteredProtocol, ScoringProtocol, kernel_weights
from grasp.predict.task_scores import Prior, Reliability, Texts, fit_prior, mean_reliability
from grasp.predict.weights import RowSums, Weights, block_rows
from grasp.targets.units import WEIGHT_COLUMN

EFFECT_SIZE = "effect size"
SIMILARITY_SKETCHES = ("hidden", "residual")  # sketches that measure the similarity of rows
TEXT_PART = "text"  # the part of an effect that is predicted from the row's text and labels
REPEAT_WORTH = 15.4  # R*: scale of diminishing returns, in repetitions
NEW_ROW_VALUE = 0.4  # b: value of any unseen row in effect sizes, lost by repetition: experiments/exposure
Floats = TypeVar("Floats", bound=np.floating[Any])


# -------------------------------------------------------------------------------- effective weights of repeated rows


@dataclass(frozen=True, slots=True)
class RepetitionLaw:
    """Value of rows that are read repeatedly, with diminishing returns.

    A row that is read z times is worth as much as

        value(z) = z  if z <= 1,   1 + R* (1 - exp(-(z - 1) / R*))  if z > 1,   R* = 15.4

    different rows. Training lasts E epochs of n rows each. Without a training budget that is one epoch of the retained
    rows (E = 1, n retained rows); with a budget, E epochs of the corpus (n = N). Relative to a row that is read once
    per epoch, a row that is read y times per epoch is worth

        law(y) = value(E y) / value(E)

    Source: Muennighoff et al. 2023, arXiv 2305.16264, eq. 5 and the fit of R*.
    """

    epochs: float | None = None  # E, epochs of the whole corpus; None: no training budget

    def __call__(self, per_epoch: Any) -> F64:
        """Return law(y) of rows that are read `per_epoch` = y times per epoch; maps 0 to 0 and 1 to 1."""
        epochs = np.asarray(1.0 if self.epochs is None else self.epochs)
        value, value_once_per_epoch = (
            # -expm1(-x) = 1 - exp(-x) without cancellation for few repetitions
            np.where(z <= 1.0, z, 1.0 - REPEAT_WORTH * np.expm1(-np.maximum(z - 1.0, 0.0) / REPEAT_WORTH))
            for z in (epochs * np.asarray(per_epoch, dtype=np.float64), epochs)
        )
        return np.asarray(value / value_once_per_epoch)

    def rows_per_epoch(self, n_retained_B: Any, n_rows: int) -> F64:
        """Return n, the rows that training reads per epoch: the retained rows, or with a budget all N; (B,)."""
        rows_B = np.asarray(n_retained_B, np.float64)
        return rows_B if self.epochs is None else np.full_like(rows_B, n_rows)

    def effective_weights(self, weights: Weights) -> Weights:
        """Return v_i = law(w_i y) / law(y) with y = n / sum_j w_j; binary weights are returned unchanged."""
        if weights.is_binary:
            return weights
        per_epoch_B = self.rows_per_epoch(weights.sizes, weights.shape[1]) / weights.sums  # y, of a row of weight 1
        return weights.mapped(lambda weight, per_epoch: self(weight * per_epoch) / self(per_epoch), per_epoch_B)


# --------------------------------------------------------------------------------------------------- effects of rows


def downweight_negative(relevance_NE: NDArray[Floats], negative: float) -> NDArray[Floats]:
    """Multiply negative relevance by `negative`, between 0 and 1, because it predicts less than positive relevance.

    Source: ours; eq:grasp-score treats both signs alike, which is negative = 1.
    """
    if negative == 1.0:
        return relevance_NE
    factor = relevance_NE.dtype.type(negative)
    less_NE = relevance_NE * factor if negative else factor  # 0 is a scalar here: 0 * inf would be nan
    return np.asarray(np.maximum(relevance_NE, less_NE))


def relevance_blocks(artifact: ArtifactReader, kernel: str, columns: I64, negative: float = 1.0) -> Blocks:
    """Yield (first row, relevance (n, columns)) with negative relevance scaled by `negative`."""
    rows = block_rows(len(columns))
    for start, block in artifact.array_blocks(f"relevance_{kernel}", columns=columns, block_rows=rows):
        yield start, downweight_negative(block, negative)


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """The units of selected targets: their columns in the artifact, target by target."""

    targets: tuple[str, ...]
    columns_E: I64
    counts_T: I64
    # weight of each unit in the mean of its task, 1 on average and positive: the stored relevance already has the sign
    weight_E: F64 | float = 1.0

    @classmethod
    def from_targets(cls, artifact: ArtifactReader, targets: Sequence[str]) -> Self:
        """Select all units of the targets."""
        columns = [artifact.unit_columns(target) for target in targets]
        assert all(map(len, columns))
        columns_E, counts_T = np.concatenate(columns), np.array([len(columns_e) for columns_e in columns])
        if WEIGHT_COLUMN not in artifact.units.column_names:
            return cls(tuple(targets), columns_E, counts_T)
        stored = artifact.units[WEIGHT_COLUMN].to_numpy(zero_copy_only=False)[columns_E]
        size_E = np.abs(np.nan_to_num(stored, nan=1.0))
        means = [size_E[stop - count : stop].mean() for count, stop in zip(counts_T, np.cumsum(counts_T), strict=True)]
        return cls(tuple(targets), columns_E, counts_T, size_E / np.repeat(means, counts_T))

    def mean_per_task(self, values_nE: NDArray[Any], scale_E: F64 | float = 1.0) -> F64:
        """Return the mean over the units of each task of value times scale, (n, T) float64."""
        factor_E = scale_E * np.repeat(1.0 / self.counts_T, self.counts_T)
        if len(factor_E) == len(self.counts_T):  # a single unit per task
            return np.asarray(values_nE * factor_E)
        wide_nE, mean_nT = np.asarray(values_nE, dtype=np.float64), np.empty((len(values_nE), len(self.counts_T)))
        for t, stop in enumerate(np.cumsum(self.counts_T)):
            task = slice(stop - self.counts_T[t], stop)
            np.matmul(wide_nE[:, task], factor_E[task], out=mean_nT[:, t])
        return mean_nT


@dataclass(frozen=True, slots=True)
class KernelRelevance:
    """The relevance of one kernel with its moments; one column per task, or per unit."""

    rows: StreamingMoments  # moments over the rows of the corpus
    relevance: RowSums  # (N, C)


@dataclass(frozen=True, slots=True)
class RowEffects:
    """Effects of rows for all tasks (or all units), one column each."""

    effects: RowSums  # effect of every row, mean 0 and standard deviation 1 over the rows of the artifact
    raw_mean_std: MeanStd  # mean and standard deviation over the rows before standardization
    new_row_value_C: F64  # b: value of any unseen row, in effects of the column

    @classmethod
    def from_kernels(cls, slopes: Mapping[str, F64], kernels: Mapping[str, RowSums], array_NC: F32 | None) -> Self:
        """Compute the effect of every row: sum_m slope_m a_m, standardized to mean 0 and standard deviation 1.

        The sum is standardized in a second pass, since its moments are known only after the first.

        Args:
            slopes: by kernel m: weight over standard deviation, (C,).
            kernels: by kernel m: relevance a_m.
            array_NC: output array; may be the array of the first kernel, which is then overwritten. None: effects are
                recomputed whenever they are summed, unless they are small.
        """

        def summed_blocks() -> Iterator[tuple[int, F64]]:
            """Yield the weighted sum of the kernels, block by block."""
            readers = [kernels[name].blocks() for name in slopes]
            for blocks in zip(*readers, strict=True):
                terms = (block * slope_C for (_, block), slope_C in zip(blocks, slopes.values(), strict=True))
                yield blocks[0][0], functools.reduce(operator.iadd, terms)

        mean_std = StreamingMoments.from_blocks(summed_blocks(), array_NC).mean_std
        inverse_C = mean_std.inverse_std_C
        if array_NC is None:
            first = next(iter(kernels.values()))
            effects = RowSums(
                lambda: (
                    (start, ((block - mean_std.mean_C) * inverse_C).astype(np.float32))
                    for start, block in summed_blocks()
                ),
                first.n_rows,
                first.width,
            )
        else:
            effects = RowSums.over(array_NC)
            for _, block in effects.blocks():
                block[:] = (block - mean_std.mean_C) * inverse_C
        return cls(effects, mean_std, np.full(len(inverse_C), NEW_ROW_VALUE))


# ----------------------------------------------------------------------------------------------- changes of subsets


@dataclass(frozen=True, slots=True)
class SubsetSums:
    """The sums over retained rows that a prediction depends on."""

    n_rows: int  # rows of the corpus
    weight_B: F64  # sum of w_i
    n_retained_B: F64  # number of rows with a positive weight
    effective_B: F64  # sum of v_i, the effective weights
    effect_BT: F64  # sum of v_i effect_i
    sketch: Mapping[str, F64]  # by sketch: sum of v_i phi_i, (B, D)

    def repetition_factor(self, law: RepetitionLaw) -> F64:
        """Return factor(S) = law(y) sum_i v_i / n, (B,): 1 if all retained rows are read equally often, else less."""
        n_B = law.rows_per_epoch(self.n_retained_B, self.n_rows)
        return np.asarray(law(n_B * ratio(1.0, self.weight_B)) * self.effective_B * ratio(1.0, n_B))

    def cumulative(self) -> "SubsetSums":
        """Return sums over the first subset, the first two together, and so on; disjoint subsets with weights 1."""
        size_B = np.cumsum(self.effective_B)
        sketch = {name: np.cumsum(total_BD, axis=0) for name, total_BD in self.sketch.items()}
        return SubsetSums(self.n_rows, size_B, size_B, size_B, np.cumsum(self.effect_BT, axis=0), sketch)


@dataclass(frozen=True, slots=True)
class Predictor:
    """A protocol bound to an artifact.

    Create it with `from_artifact`, which reads each relevance matrix once (twice for units) and caches the effects for
    further predictors of the same opened artifact.
    """

    protocol: ScoringProtocol
    units: UnitSelection
    n_rows: int
    task: RowEffects
    unit_level: RowEffects | None
    sketches: Mapping[str, RowSums]  # sketches of rows, for similarities between subsets
    dropped: tuple[str, ...]  # kernels and components without variance, which contribute nothing
    # By kernel: factor from a unit's relevance to its task's effect, times the number of units of its task, (E,).
    # Without a prior, the effect of a row is the mean over units of factor times relevance, up to a constant.
    unit_relevance_to_effect: Mapping[str, F64]
    repetition_law: RepetitionLaw
    unit: str  # unit of changes
    prior: Prior | None  # prediction of tasks from text and labels; None for `task: mean`
    measure_reliability: Callable[[], tuple[Reliability, ...]] | None  # None: no held-out questions to measure it on

    @property
    def has_replay(self) -> bool:
        """Whether the replay of a training is part of the scores."""
        return REPLAY in kernel_weights(self.protocol)

    @property
    def protocol_text(self) -> str:
        """Return the name of the protocol, and whether the replay of a training is part of the scores."""
        return f"protocol {self.protocol.name}" + ", with the replay" * self.has_replay

    @staticmethod
    def from_artifact(
        artifact: ArtifactReader,
        protocol: ScoringProtocol | None = None,
        targets: Sequence[str] | None = None,
        *,
        per_unit: bool = False,
        sketches: Sequence[str] = (),
        units: UnitSelection | None = None,
        repetition_law: RepetitionLaw | None = None,
    ) -> "Predictor":
        """Bind a protocol to an artifact.

        Args:
            artifact: artifact to read.
            protocol: default: the built-in protocol.
            targets: default: all targets.
            per_unit: prepare for `unit_change`.
            sketches: sketches to sum; those that the artifact does not have are skipped.
            units: unit columns to use, with the kernels of units; default: all units of the targets.
            repetition_law: law of a training budget; default: no budget.
        Raises:
            ProtocolError: the artifact does not fit the protocol, or has no such target.
        """
        resolved = resolve_protocol(protocol, artifact).resolved_for(artifact)
        if units is None:
            selected = UnitSelection.from_targets(artifact, checked_targets(artifact, targets))
        else:
            resolved, selected = resolved.for_units, units
        law = repetition_law or RepetitionLaw()
        available = [name for name in sketches if f"{name}_sketch" in artifact.array_names]
        if isinstance(resolved, RegisteredProtocol):
            bound = resolved.bind(artifact, selected, sketches=available, per_unit=per_unit)
            return replace(bound, repetition_law=law)
        if units is None:
            key = "relevance", resolved.model_dump_json(), selected.targets
            n_bytes = 4 * artifact.n_rows * len(selected.targets)
            shared = cached(artifact, key, n_bytes, lambda: assemble_predictor(artifact, resolved, selected))
            # `RowSums` caches sums of one caller's subsets, so every predictor has its own over the shared array
            predictor = replace(shared, task=replace(shared.task, effects=RowSums.over(shared.effect_NT)))
        else:
            predictor = assemble_predictor(artifact, resolved, selected)
        if per_unit:
            kernels = unit_kernels(artifact, resolved.for_units, selected)
            scales = {name: kernel.rows.mean_std for name, kernel in kernels.items()}
            unit_level = unit_effects(resolved, selected, kernels, scales)
            predictor = replace(predictor, unit_level=unit_level)
        loaded_sketches = {name: load_sketch(artifact, name) for name in sorted(available)}
        return replace(predictor, sketches=loaded_sketches, repetition_law=law)

    @property
    def effect_NT(self) -> F32:  # noqa: N802 - a shape suffix
        """The effect of every row: mean 0, standard deviation 1 over the rows of the artifact."""
        effect_NT = self.task.effects.array_NC
        assert effect_NT is not None
        return effect_NT

    @property
    def reliability(self) -> Mapping[str, Reliability]:
        """Return the reliability of each task's scores; empty if the protocol does not allow to hold out questions.

        The first call costs one pass over the relevance if the protocol scores by the mean (`task: mean`).
        """
        if self.measure_reliability is None:
            return {}
        return dict(zip(self.units.targets, self.measure_reliability(), strict=True))

    @property
    def scale(self) -> str:
        """Description of the unit and zero of changes."""
        return f"change against the whole corpus in {self.unit}: 0 = the corpus, higher is better"

    def effective_weights(self, weights: Weights) -> Weights:
        """Return the effective weights of rows under the repetition law."""
        return self.repetition_law.effective_weights(weights)

    def sums(self, weights: Weights, sketch_names: Collection[str] | None = None) -> SubsetSums:
        """Compute the sums of one block of subsets.

        Args:
            weights: weights of the subsets.
            sketch_names: sketches to sum; None: all sketches of the predictor.
        """
        effective, weight_B = self.effective_weights(weights), weights.sums
        return SubsetSums(
            self.n_rows,
            weight_B,
            weights.sizes.astype(np.float64),
            weight_B if effective is weights else effective.sums,
            self.task.effects.sums(effective),
            {
                name: sketch.sums(effective)
                for name, sketch in self.sketches.items()
                if sketch_names is None or name in sketch_names
            },
        )

    def reweighted(self, sums: SubsetSums, weight: float) -> SubsetSums:
        """Return the sums of the corpus in which the rows of each subset have another weight; without sketches.

        Args:
            sums: sums of subsets with weights 0 and 1.
            weight: new weight of the rows of the subset; 0 drops them, 2 doubles them.
        """
        law, n_rows, size_B = self.repetition_law, self.n_rows, sums.effective_B  # a sum of ones: the number of rows
        weight_B, n_retained_B = n_rows + (weight - 1.0) * size_B, n_rows - (weight == 0.0) * size_B
        row_effective_B = np.full(len(size_B), weight)  # effective weight of a row of the subset
        if weight > 0.0:
            per_epoch_B = law.rows_per_epoch(n_retained_B, n_rows) / np.maximum(weight_B, 1.0)
            row_effective_B = law(weight * per_epoch_B) / law(per_epoch_B)
        step_B = row_effective_B - 1.0  # all other rows keep the effective weight 1
        # effects sum to 0 over the corpus, so the step contributes the whole sum
        effect_BT = step_B[:, None] * sums.effect_BT
        return SubsetSums(n_rows, weight_B, n_retained_B, n_rows + step_B * size_B, effect_BT, {})

    def change_of(self, sums: SubsetSums) -> F64:
        """Predict the change of utility relative to the whole corpus, (B, T); positive is better."""
        return self._change_from_sums(sums.effect_BT, sums, self.task.new_row_value_C)

    def change(self, weights: Weights) -> F64:
        """Predict the change of utility of subsets given by their weights, (B, T)."""
        return self.change_of(self.sums(weights, ()))

    def unit_change(self, weights: Weights, sums: SubsetSums) -> F64:
        """Predict the change of every unit from its own relevance, (B, E).

        Args:
            weights: weights of the subsets.
            sums: sums of the same subsets.
        """
        assert self.unit_level is not None
        effect_BE = self.unit_level.effects.sums(self.effective_weights(weights))
        return self._change_from_sums(effect_BE, sums, self.unit_level.new_row_value_C)

    def prior_effect(self, row: int) -> float:
        """Return the part of a row's effect on the first task that its text and labels predict; 0 without a prior."""
        if self.prior is None:
            return 0.0
        prior_N, factor = self.prior.prior_NT[:, 0], (1.0 - self.prior.rho_T) * self.task.raw_mean_std.inverse_std_C
        return float(factor[0] * (prior_N[row] - prior_N.mean(dtype=np.float64)))

    def change_by_units(self, sum_BE: F64, mean_E: F64, sums: SubsetSums) -> F64:
        """Decompose the change of each task into contributions of its units, (B, E), whose mean is the change.

        With c_ie the sum over kernels of `unit_relevance_to_effect` times the relevance of row i to unit e, m_e the
        mean of c_ie over the rows of the corpus, and v_i the effective weight, the change of unit e is

            factor(S) (sum_i v_i (c_ie - m_e) / sum_i v_i + b) - b

        Args:
            sum_BE: sum_i v_i (c_ie - m_e).
            mean_E: m_e; only needed by subclasses, for which the prediction for the corpus is not 0.
            sums: sums of the same subsets.
        """
        del mean_E
        return self._change_from_sums(sum_BE, sums, NEW_ROW_VALUE)

    def _change_from_sums(self, sum_BC: F64, sums: SubsetSums, new_row_value_C: F64 | float) -> F64:
        """Return factor (mean + b) - b, (B, C), from sums of v_i times values whose sum over the corpus is 0."""
        mean_BC = ratio(1.0, sums.effective_B)[:, None] * sum_BC
        factor_B1 = sums.repetition_factor(self.repetition_law)[:, None]
        return np.asarray(factor_B1 * mean_BC - (1.0 - factor_B1) * new_row_value_C)


# ---------------------------------------------------------------------------------- reading and combining the kernels


def load_sketch(artifact: ArtifactReader, name: str) -> RowSums:
    """Return one sketch of all rows, by its name without `_sketch`, as `RowSums`."""
    array = f"{name}_sketch"
    width = next(artifact.array_blocks(array, block_rows=1))[1].shape[1]
    return RowSums(lambda: artifact.array_blocks(array, block_rows=block_rows(width)), artifact.n_rows, width)


def assemble_predictor(artifact: ArtifactReader, protocol: ScoringProtocol, units: UnitSelection) -> Predictor:
    """Read relevance and combine the kernels into a predictor without sketches.

    The order of the steps matters:

    1. Negative relevance is scaled (`relevance_blocks`).
    2. With the protocol's `task: estimate`, every unit is divided by its standard deviation.
    3. The units of each task are averaged (`KernelRelevance.for_tasks`).
    4. Every kernel is divided by its standard deviation and multiplied by its weight, by its slope.
    5. With `task: estimate`, the prediction from text and labels is added as a further kernel (`fit_prior`).
    6. The sum of the kernels is standardized over the rows (`RowEffects.from_kernels`).

    Args:
        artifact: artifact to read.
        protocol: protocol, resolved for the artifact.
        units: units of the targets.
    """
    relevance = kernel_blocks(artifact, protocol, units)
    unit_factors: dict[str, F64 | float] = dict.fromkeys(relevance, units.weight_E)
    if protocol.task == "estimate":
        for name, blocks in relevance.items():
            unit_factors[name] = units.weight_E * StreamingMoments.from_blocks(blocks()).mean_std.inverse_std_C
    kernels = task_kernels(artifact, protocol, units, unit_factors)
    scales = {name: kernel.rows.mean_std for name, kernel in kernels.items()}
    if units.counts_T.max() == 1:  # no questions can be held out
        return combine_kernels(artifact, protocol, units, kernels, scales, unit_factors)
    # coefficients of relevance in the score of a question, see `task_scores`
    slopes = slopes_of(protocol, scales)
    coefficients = {name: unit_factors[name] * np.repeat(slope_T, units.counts_T) for name, slope_T in slopes.items()}
    prior = None
    if protocol.task == "estimate":
        labels = [label_column(artifact, label).codes_N for label in suggest_labels(artifact)]
        texts, documents_N, is_merged = None, row_documents(artifact), bool(artifact.manifest.details.get("parts"))
        if not is_merged and artifact.reader is None and artifact.tokens_path.exists():  # the tokens of one corpus
            ids_of, store = operator.attrgetter("flat_ids", "offsets"), artifact.open_rows()
            texts = Texts(row_tokens(artifact), lambda row_index: ids_of(store.rows(row_index)))
        prior = fit_prior(relevance, coefficients, units.counts_T, _row_names(artifact), documents_N, texts, labels)
    predictor = combine_kernels(artifact, protocol, units, kernels, scales, unit_factors, prior)
    if REPLAY in relevance:  # the replay scores whole targets, so that no questions can be held out
        return predictor
    measure = functools.cache(lambda: mean_reliability(relevance, coefficients, units.counts_T, _row_names(artifact)))
    return replace(predictor, measure_reliability=measure if prior is None else lambda: prior.reliability)


def kernel_blocks(
    artifact: ArtifactReader, protocol: ScoringProtocol, units: UnitSelection
) -> dict[str, Callable[[], Blocks]]:
    """Return, by kernel of a protocol, a function that yields (first row, relevance (n, E)); see `relevance_blocks`."""
    return {
        name: functools.partial(relevance_blocks, artifact, name, units.columns_E, protocol.negative_factor(name))
        for name in kernel_weights(protocol)
    }


def task_kernels(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    units: UnitSelection,
    unit_factors: Mapping[str, F64 | float],
) -> dict[str, KernelRelevance]:
    """Return kernels with one column per task, its mean over units; one pass, 4 bytes per row and task.

    Args:
        artifact: artifact to read.
        protocol: protocol, which has the factors of negative relevance.
        units: units of the targets.
        unit_factors: by kernel: factor of each unit before the mean over units, (E,).
    """
    kernels = {}
    for name, factor_E in unit_factors.items():
        task_NT = np.empty((artifact.n_rows, len(units.targets)), dtype=np.float32)
        blocks = relevance_blocks(artifact, name, units.columns_E, protocol.negative_factor(name))
        reduced = ((start, units.mean_per_task(block, factor_E)) for start, block in blocks)
        kernels[name] = KernelRelevance(StreamingMoments.from_blocks(reduced, task_NT), RowSums.over(task_NT))
    return kernels


def unit_kernels(
    artifact: ArtifactReader, protocol: ScoringProtocol, units: UnitSelection
) -> dict[str, KernelRelevance]:
    """Return the kernels of a protocol with one column per unit: a pass for moments, another to load what fits."""
    return {
        name: KernelRelevance(
            StreamingMoments.from_blocks(blocks()), RowSums(blocks, artifact.n_rows, len(units.columns_E))
        )
        for name, blocks in kernel_blocks(artifact, protocol, units).items()
    }


def combine_kernels(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    units: UnitSelection,
    kernels: Mapping[str, KernelRelevance],
    scales: Mapping[str, MeanStd],
    unit_factors: Mapping[str, F64 | float],
    prior: Prior | None = None,
) -> Predictor:
    """Combine kernels with one column per task into a predictor; the array of the first one is overwritten.

    Args:
        artifact: artifact of the rows.
        protocol: protocol of the predictor.
        units: units of the targets.
        kernels: kernels of the protocol.
        scales: by kernel: mean and standard deviation.
        unit_factors: by kernel: factor of each unit before the mean over units.
        prior: prediction from text and labels.
    """
    mean_slopes = slopes = slopes_of(protocol, scales)  # of the mean over the known questions
    relevance = {name: kernel.relevance for name, kernel in kernels.items()}
    if prior is not None:
        # The score p + rho (b - p) with the prior p as a further kernel: the mean b over the known questions is the sum
        # of the kernels by their slopes, and p has the same scale.
        relevance[TEXT_PART] = RowSums.over(prior.prior_NT)
        slopes = {name: slope_T * prior.rho_T for name, slope_T in slopes.items()} | {TEXT_PART: 1.0 - prior.rho_T}
    task = RowEffects.from_kernels(slopes, relevance, next(iter(relevance.values())).array_NC)
    return Predictor(
        protocol=protocol,
        units=units,
        n_rows=artifact.n_rows,
        task=task,
        unit_level=None,
        sketches={},
        dropped=tuple(name for name in mean_slopes if not scales[name].inverse_std_C.any()),
        unit_relevance_to_effect={
            name: np.repeat(slope_T * task.raw_mean_std.inverse_std_C, units.counts_T) * unit_factors[name]
            for name, slope_T in mean_slopes.items()
        },
        repetition_law=RepetitionLaw(),
        unit=EFFECT_SIZE,
        prior=prior,
        measure_reliability=None,
    )


def slopes_of(protocol: ScoringProtocol, scales: Mapping[str, MeanStd]) -> dict[str, F64]:
    """Return the weight of each kernel over its standard deviation."""
    return {name: weight * scales[name].inverse_std_C for name, weight in kernel_weights(protocol).items()}


def unit_effects(
    protocol: ScoringProtocol,
    units: UnitSelection,
    kernels: Mapping[str, KernelRelevance],
    scales: Mapping[str, MeanStd],
) -> RowEffects:
    """Return the effects of rows on every unit, from kernels with one column per unit."""
    relevance = {name: kernel.relevance for name, kernel in kernels.items()}
    unit_level = RowEffects.from_kernels(slopes_of(protocol.for_units, scales), relevance, None)
    # b is in effect sizes of the task; the effects of its units average to a column with this standard deviation
    task_means = StreamingMoments.from_blocks(
        (start, units.mean_per_task(block, units.weight_E)) for start, block in unit_level.effects.blocks()
    )
    task_std_E = np.repeat(task_means.mean_std.std_C, units.counts_T)
    return replace(unit_level, new_row_value_C=unit_level.new_row_value_C * task_std_E)


def _row_names(artifact: ArtifactReader) -> list[str]:
    """Return the row_id of every row."""
    return [name for batch in artifact.row_batches(["row_id"]) for name in batch.column(0).to_pylist()]


def additive_predictor(
    artifact: ArtifactReader,
    target: str,
    *,
    protocol: ScoringProtocol | Path | str | None = None,
    match: str | None = None,
    unit: str | None = None,
) -> Predictor:
    """Return an additive predictor for one target or one of its units; its `effect_NT` (N, 1) ranks rows.

    Args:
        artifact: artifact of the rows.
        target: target of the predictor.
        protocol: default: the built-in protocol.
        match: use only this kernel, instead of the protocol's kernels.
        unit: use only this unit, instead of all units of the target.
    Raises:
        ProtocolError: no such unit, or the artifact does not fit the protocol.
    """
    rule, units = resolve_protocol(protocol, artifact), None
    if match is not None:
        single_kernel = {"name": f"{rule.name}, {match} alone", "match": {match: 1.0}, "task": "mean"}
        rule = rule.model_copy(update={**single_kernel, "selected_on": None})
    if unit is not None:
        columns, names = artifact.unit_columns(target), artifact.units.column("unit_id").to_pylist()
        column = next((e for e in columns if names[e] == unit), None)
        if column is None:
            examples = ", ".join(names[e] for e in columns[:3])
            raise ProtocolError(f"unit: {target} has no unit {unit!r}; it has {len(columns):,}, e.g. {examples}")
        units = UnitSelection((target,), np.array([column]), np.ones(1, dtype=np.int64))
    return Predictor.from_artifact(artifact, rule.additive, [target], units=units)
