"""The one predictor, all of it: relevance once, added up over a subset.

    effect_i    the row's relevance to the target, kernels added, mean 0 and standard deviation 1 over the rows
    change(S)   sum_i w_i effect_i / sum_i w_i

is all of it where all rows that are kept have one weight. The change is against the whole corpus: 0 is the corpus,
positive is better. Its unit, *effect size*, does not depend on the question, and a slice's mean effect explains its
rank: dropping a share p of the rows with the mean effect m changes -p / (1 - p) m.

Repetition takes a part. Rows count by the law of exposure (`Exposure`), x_i in place of w_i, and together less than as
many rows that are seen once: worth(S) = sum_i x_i / rows kept. Any new row is worth b effects, so

    change(S) = worth(S) (sum_i x_i effect_i / sum_i x_i + b) - b

b is small against what a row of the right kind is worth, and decides where a few rows are seen very often.

Top to bottom: what a row counts (`Exposure`), what it is worth (`KernelRelevance`, `Level`), what a subset is worth
(`Predictor`). Sums over the rows of subsets are in `grasp.predict.weights`. Where rows bear on one another, or are not
averaged, `grasp.geometry` has a predictor that is this and more.
Source: eq:method-additive, eq:component-predictor.
Shape letters: B subsets, N rows, n rows of a block, E units, T targets, G slices, C columns (targets or units), D
sketch width.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, I32, I64, Blocks, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import cached, checked_targets, row_documents
from grasp.build.provenance import BuildSource
from grasp.corpus.row_store import RowStore
from grasp.errors import ProtocolError
from grasp.predict.scoring_rule import (
    ScoringProtocol,
    as_protocol,
    geometry,
    kernel_weights,
    protocol_from,
)
from grasp.predict.task_scores import Prior, Reliability, Texts, fit_prior
from grasp.predict.weights import RowSums, Weights, block_rows

EFFECT_SIZE = "effect size"
SIMILAR = ("hidden", "residual")  # sketches that tell how alike rows are
TEXT = "text"  # beside the kernels: what the rows' text says of a task
REPETITION = "repetition"  # beside the kernels, as a part of a change
REPEAT_WORTH = 15.4  # R*: past so many repetitions, more of them add little
ANY_TEXT = 0.4  # effect sizes that any new row is worth, and repetition takes: experiments/exposure
# A spread this small against the size of the numbers is rounding, not variance.
RELATIVE_ZERO = 1e-9
Floats = TypeVar("Floats", bound=np.floating[Any])


# ------------------------------------------------------------------------------------------------ what a row counts


@dataclass(frozen=True, slots=True)
class Exposure:
    """The law of diminishing returns: what a row counts that is seen more often than another.

    Seen for the first time a row counts whole, and less and less each time after that: x times do as much as

        seen(x) = x where x <= 1,   1 + R* (1 - exp(-(x - 1) / R*)) beyond,   R* = 15.4

    rows that are all different. Where no budget is known, training is as long as the rows that are kept: one of the
    mean weight is seen once, and weights of 0 and 1 stay what they are. A budget reads the corpus E times, so a row of
    the weight w in a corpus of N rows is seen E N w / sum w times, and counts against seen(E).
    Source: Muennighoff et al. 2023, arXiv 2305.16264, eq. 5 and the fit of R*.
    """

    epochs: float | None = None  # E; None: no budget

    def __call__(self, times: Any) -> F64:
        """What a row counts that is seen so many times as often as with the weight 1; 0 gives 0, and 1 gives 1."""
        once = np.asarray(1.0 if self.epochs is None else self.epochs)
        seen, seen_once = (
            np.where(x <= 1.0, x, 1.0 - REPEAT_WORTH * np.expm1(-np.maximum(x - 1.0, 0.0) / REPEAT_WORTH))
            for x in (once * np.asarray(times, dtype=np.float64), once)
        )
        return np.asarray(seen / seen_once)

    def base(self, kept_B: Any, n_rows: int) -> F64:
        """Rows among which a training is shared out, that each would be seen once, or E times."""
        return np.asarray(kept_B, np.float64) if self.epochs is None else np.full(np.shape(kept_B), float(n_rows))

    def weigh(self, weights: Weights) -> Weights:
        """What every row counts against a row of the weight 1, in the same form; weights of 0 and 1 stay."""
        if weights.is_plain:
            return weights
        times_B = self.base(weights.sizes, weights.shape[1]) / weights.sums  # a row of the weight 1 is seen
        return weights.mapped(lambda weight, times: self(weight * times) / self(times), times_B)


# --------------------------------------------------------------------------------------------- what a row is worth


@dataclass(frozen=True, slots=True)
class ColumnSpread:
    """Mean and standard deviation of columns, over rows or over subsets, (E,)."""

    mean_E: F64
    std_E: F64

    @property
    def inverse_E(self) -> F64:  # noqa: N802 - a shape suffix
        """1 / std; 0 where there is no variance worth the name: such a column is dropped."""
        return ratio(1.0, self.std_E, least=RELATIVE_ZERO * np.maximum(np.abs(self.mean_E), np.finfo(float).tiny))

    def z(self, value_BE: F64) -> F64:
        """(x - mean) / std; 0 where nothing varies. Source: eq:component-predictor."""
        return np.asarray((value_BE - self.mean_E) * self.inverse_E)


@dataclass(slots=True)
class RowMoments:
    """Count, mean and squares of the numbers of each row, or subset, added up block by block."""

    n_rows: int = 0
    mean_E: F64 = field(default_factory=lambda: np.zeros(1))
    scatter_E: F64 = field(default_factory=lambda: np.zeros(1))  # sum of (x - mean)^2

    @classmethod
    def from_blocks(cls, blocks: Iterable[tuple[int, NDArray[Any]]], held_NE: F32 | None = None) -> Self:
        """Moments of rows that arrive in blocks; `held_NE` keeps them."""
        moments = cls()
        for start, block in blocks:
            if held_NE is not None:
                held_NE[start : start + len(block)] = block
            moments.add(block)
        return moments

    def add(self, values_NE: NDArray[Any]) -> None:
        """One more block of rows (Chan's merge)."""
        values_NE = np.asarray(values_NE, dtype=np.float64)
        n_new, n_rows = len(values_NE), self.n_rows + len(values_NE)
        mean_E = np.ones(n_new) @ values_NE / n_new  # a product is the fastest sum over rows
        apart_NE, shift_E = values_NE - mean_E, mean_E - self.mean_E
        scatter_E = self.scatter_E + np.einsum("ne,ne->e", apart_NE, apart_NE)
        self.scatter_E = scatter_E + shift_E**2 * (self.n_rows * n_new / n_rows)
        self.mean_E, self.n_rows = self.mean_E + shift_E * (n_new / n_rows), n_rows

    @property
    def spread(self) -> ColumnSpread:
        """Mean and population standard deviation."""
        return ColumnSpread(self.mean_E, np.sqrt(self.scatter_E / self.n_rows))


def counted(relevance_NE: NDArray[Floats], negative: float) -> NDArray[Floats]:
    """Let negative relevance count less: it is multiplied by `negative`, between 0 and 1, since it predicts little.

    Source: ours; a sum over rows of eq:grasp-score counts both alike, which is negative = 1.
    """
    if negative == 1.0:
        return relevance_NE
    factor = relevance_NE.dtype.type(negative)
    less_NE = relevance_NE * factor if negative else factor  # 0 times infinity is no number
    return np.asarray(np.maximum(relevance_NE, less_NE))


def relevance_blocks(artifact: ArtifactReader, kernel: str, columns: I64, negative: float = 1.0) -> Blocks:
    """Relevance by blocks of rows, (n, columns), as a protocol counts it."""
    rows = block_rows(len(columns))
    for start, block in artifact.array_blocks(f"relevance_{kernel}", columns=columns, block_rows=rows):
        yield start, counted(block, negative)


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """Units of the chosen targets: their columns in the artifact, target by target."""

    targets: tuple[str, ...]
    columns_E: I64
    counts_T: I64

    @classmethod
    def from_targets(cls, artifact: ArtifactReader, targets: Sequence[str]) -> Self:
        """All units of the targets.

        Raises:
            ProtocolError: a target without units: nothing can be predicted for it.
        """
        columns = [artifact.unit_columns(target) for target in targets]
        empty = [target for target, part in zip(targets, columns, strict=True) if not len(part)]
        if empty:
            raise ProtocolError(f"targets: {', '.join(empty)}: has no units, expected one at least; leave it out")
        return cls(tuple(targets), np.concatenate(columns), np.array([len(part) for part in columns]))

    def mean_per_task(self, values_nE: NDArray[Any], scale_E: F64 | float = 1.0) -> F64:
        """(n, T) mean over the units of each task of the values times a scale, float64."""
        share_E = scale_E * np.repeat(1.0 / self.counts_T, self.counts_T)
        if len(share_E) == len(self.counts_T):
            return np.asarray(values_nE * share_E)
        values_nE, mean_nT = np.asarray(values_nE, dtype=np.float64), np.empty((len(values_nE), len(self.counts_T)))
        for t, stop in enumerate(np.cumsum(self.counts_T)):
            task = slice(stop - self.counts_T[t], stop)
            np.matmul(values_nE[:, task], share_E[task], out=mean_nT[:, t])
        return mean_nT


@dataclass(frozen=True, slots=True)
class KernelRelevance:
    """The relevance of one kernel, ready to be added up: a column for each task, or for each unit."""

    rows: RowMoments  # over the corpus
    held: RowSums

    @classmethod
    def for_units(cls, artifact: ArtifactReader, kernel: str, units: UnitSelection, negative: float) -> Self:
        """Every unit a column; one pass for the moments, and one to hold the matrix where it fits."""
        blocks = functools.partial(relevance_blocks, artifact, kernel, units.columns_E, negative)
        return cls(RowMoments.from_blocks(blocks()), RowSums(blocks, artifact.n_rows, len(units.columns_E)))

    @classmethod
    def for_tasks(
        cls, artifact: ArtifactReader, kernel: str, units: UnitSelection, negative: float, scale_E: F64 | float = 1.0
    ) -> Self:
        """Every task a column: the mean over its units of their counted relevance; one pass, 4 bytes a row and task.

        Args:
            scale_E: what each unit is multiplied by before the mean over units.
        """
        task_NT = np.empty((artifact.n_rows, len(units.targets)), dtype=np.float32)
        blocks = relevance_blocks(artifact, kernel, units.columns_E, negative)
        reduced = ((start, units.mean_per_task(block, scale_E)) for start, block in blocks)
        return cls(RowMoments.from_blocks(reduced, task_NT), RowSums.over(task_NT))


@dataclass(frozen=True, slots=True)
class Level:
    """What is added up over rows, a column each: the tasks, or the units."""

    effects: RowSums  # of every row, mean 0 and standard deviation 1 over the rows of the artifact
    spread: ColumnSpread  # what both were before
    scales: Mapping[str, ColumnSpread]  # by kernel: what brought it to one scale
    shares: Mapping[str, F64]  # by kernel: what it adds to the effect, as slope / sd of the sum
    whole_C: F64  # of the corpus: what its own prediction is, before a change is taken
    base_C: F64  # what any new row is worth, in effects of the column

    @classmethod
    def from_kernels(
        cls,
        slopes: Mapping[str, F64],
        kernels: Mapping[str, KernelRelevance],
        scales: Mapping[str, ColumnSpread],
        held_NC: F32 | None,
    ) -> Self:
        """The effect of every row: sum_m slope_m a_m, brought to mean 0 and standard deviation 1 over the rows.

        The order matters. Each unit's relevance is counted first (negative relevance less), then averaged over the
        units of a task. Then each kernel is divided by its spread (that is in its slope), kernels are added, and the
        sum is divided by its own spread over the rows. That is known only when all rows were added.

        Args:
            held_NC: where the result goes; it may be what the first kernel holds, which is lost then. None: the result
                is made anew whenever it is summed, unless it is small.
        """

        def added() -> Iterator[tuple[int, F64]]:
            readers = [kernels[name].held.blocks() for name in slopes]
            for parts in zip(*readers, strict=True):
                terms = (block * slope_C for (_, block), slope_C in zip(parts, slopes.values(), strict=True))
                yield parts[0][0], functools.reduce(operator.iadd, terms)

        before = RowMoments.from_blocks(added(), held_NC).spread
        inverse_C = before.inverse_E
        if held_NC is None:
            first = next(iter(kernels.values()))
            effects = RowSums(
                lambda: ((start, ((block - before.mean_E) * inverse_C).astype(np.float32)) for start, block in added()),
                first.rows.n_rows,
                first.held.width,
            )
        else:
            effects = RowSums.over(held_NC)
            for _, block in effects.blocks():
                block[:] = (block - before.mean_E) * inverse_C
        shares = {name: slope_C * inverse_C for name, slope_C in slopes.items()}
        return cls(effects, before, scales, shares, before.mean_E * inverse_C, np.full(len(inverse_C), ANY_TEXT))


# ------------------------------------------------------------------------------------------- what a subset is worth


@dataclass(frozen=True, slots=True)
class SubsetSums:
    """All that a prediction of a subset depends on: sums over the rows that it keeps."""

    n_rows: int  # of the corpus
    weight_B: F64  # sum of w_i
    kept_B: F64  # rows with a weight above 0
    counted_B: F64  # sum of x_i, what each row counts
    effect_BT: F64  # sum of x_i effect_i
    sketch: Mapping[str, F64]  # sum of x_i phi_i, (B, D)

    def worth(self, exposure: Exposure) -> F64:
        """What the rows count together against rows that are all seen equally often, (B,): less where they are not."""
        base_B = exposure.base(self.kept_B, self.n_rows)
        return np.asarray(exposure(base_B * ratio(1.0, self.weight_B)) * self.counted_B * ratio(1.0, base_B))

    def cumulated(self) -> "SubsetSums":
        """Sums of the first subset, of the first two together, and so on; they share no row, weights are 1."""
        kept_B = np.cumsum(self.counted_B)
        sketch = {half: np.cumsum(total_BD, axis=0) for half, total_BD in self.sketch.items()}
        return SubsetSums(self.n_rows, kept_B, kept_B, kept_B, np.cumsum(self.effect_BT, axis=0), sketch)


@dataclass(frozen=True, slots=True)
class Predictor:
    """A protocol bound to an artifact.

    Made by `from_artifact`, which reads each relevance matrix once, and twice for units; the next question of an opened
    artifact finds the effects kept.
    """

    protocol: ScoringProtocol
    units: UnitSelection
    n_rows: int
    task: Level
    unit_level: Level | None
    sketches: Mapping[str, RowSums]  # what rows are like, whatever they are good for: alike if their sums are
    dropped: tuple[str, ...]  # what does not vary, and hence contributes nothing
    unit_shares: Mapping[str, F64]  # by kernel: what a unit's relevance adds to the effect of its task, times its units
    task_kernels: Mapping[str, KernelRelevance] = field(repr=False)  # empty unless asked for
    exposure: Exposure  # how weights count
    unit: str  # what a change is measured in
    prior: Prior | None  # what text says, and how far tasks are to be trusted; None: not estimated

    @staticmethod
    def from_artifact(
        artifact: ArtifactReader,
        protocol: ScoringProtocol | None = None,
        targets: Sequence[str] | None = None,
        *,
        per_unit: bool = False,
        sketches: Sequence[str] = (),
        components: bool = False,
        units: UnitSelection | None = None,
        exposure: Exposure | None = None,
    ) -> "Predictor":
        """Bind a protocol to an artifact.

        Args:
            protocol: None: the one that ships.
            targets: None: all.
            per_unit: prepare for `unit_change`.
            sketches: halves whose sums are wanted, as far as they are built.
            components: keep the kernels apart, for `parts`.
            units: other columns than all units of the targets.
            exposure: of a training budget; None: of no budget.
        Raises:
            ProtocolError: the artifact does not fit the protocol, or has no such target.
        """
        fitted = as_protocol(protocol, artifact).fitted(artifact.array_names, artifact.feature_settings)
        selected = units or UnitSelection.from_targets(artifact, checked_targets(artifact, targets))
        law = exposure or Exposure()
        sketches = [half for half in sketches if f"{half}_sketch" in artifact.array_names]
        if fitted.beside:
            bound: Predictor = geometry().bind(
                artifact, fitted, selected, sketches=sketches, per_unit=per_unit, components=components
            )
            return replace(bound, exposure=law)
        held = {half: sketch_of(artifact, half) for half in sorted(sketches)}
        if per_unit or components or units is not None:
            bound = assembled(artifact, fitted, selected, per_unit=per_unit, components=components)
            return replace(bound, sketches=held, exposure=law)
        key = "relevance", fitted.model_dump_json(), selected.targets
        n_bytes = 4 * artifact.n_rows * len(selected.targets)
        bound = cached(artifact, key, n_bytes, lambda: assembled(artifact, fitted, selected))
        own = replace(bound.task, effects=RowSums.over(bound.effect_NT))  # which adds up for itself
        return replace(bound, task=own, sketches=held, exposure=law)

    @property
    def effect_NT(self) -> F32:  # noqa: N802 - a shape suffix
        """The effect of every row: mean 0, standard deviation 1 over the rows of the artifact."""
        held_NT = self.task.effects.held_NC
        assert held_NT is not None
        return held_NT

    @property
    def reliability(self) -> Mapping[str, Reliability]:
        """How far each task depends on the known questions; empty where tasks are not estimated."""
        return {} if self.prior is None else dict(zip(self.units.targets, self.prior.reliability, strict=True))

    @property
    def scale(self) -> str:
        """What a change is, in words."""
        return f"change against the whole corpus in {self.unit}: 0 = the corpus, higher is better"

    def counted(self, weights: Weights) -> Weights:
        """What every row counts against a row of the weight 1."""
        return self.exposure.weigh(weights)

    def sums(self, weights: Weights, halves: Collection[str] | None = None) -> SubsetSums:
        """Sums of one block of subsets.

        Args:
            halves: sketches that are summed; None: all that the predictor was made with.
        """
        counted, weight_B = self.counted(weights), weights.sums
        return SubsetSums(
            self.n_rows,
            weight_B,
            weights.sizes.astype(np.float64),
            weight_B if counted is weights else counted.sums,
            self.task.effects.sums(counted),
            {half: one.sums(counted) for half, one in self.sketches.items() if halves is None or half in halves},
        )

    def reweighted(self, sums: SubsetSums, weight: float) -> SubsetSums:
        """The corpus with the rows of each subset at another weight: 0 drops them, 2 doubles them; without sketches.

        Args:
            sums: of subsets with weights 0 and 1.
        """
        size_B, n_rows = sums.counted_B, self.n_rows
        weight_B, kept_B = n_rows + (weight - 1.0) * size_B, n_rows - (weight == 0.0) * size_B
        counted_B = np.full(len(size_B), weight)
        if weight > 0.0:
            times_B = self.exposure.base(kept_B, n_rows) / np.maximum(weight_B, 1.0)
            counted_B = self.exposure(weight * times_B) / self.exposure(times_B)
        step_B = counted_B - 1.0
        return SubsetSums(n_rows, weight_B, kept_B, n_rows + step_B * size_B, step_B[:, None] * sums.effect_BT, {})

    def change_of(self, sums: SubsetSums) -> F64:
        """Predicted change of utility against the whole corpus, (B, T); positive is better."""
        return self._mean(sums.effect_BT, sums, self.task.base_C)

    def change(self, weights: Weights) -> F64:
        """The same for subsets given by their weights."""
        return self.change_of(self.sums(weights, ()))

    def unit_change(self, weights: Weights, sums: SubsetSums) -> F64:
        """The same for every unit, by its own relevance, (B, E).

        Args:
            sums: of the same subsets.
        """
        assert self.unit_level is not None
        return self._mean(self.unit_level.effects.sums(self.counted(weights)), sums, self.unit_level.base_C)

    def text_of(self, row: int) -> float:
        """What text adds to the effect of one row on the first task; 0 where nothing is estimated."""
        if self.prior is None:
            return 0.0
        return float(self.task.shares[TEXT][0] * (self.prior.text_NT[row, 0] - self.task.scales[TEXT].mean_E[0]))

    def text_sums(self, weights: Weights) -> F64 | float:
        """What text adds to the effects of rows, summed over subsets, (B, T); 0 where nothing is estimated."""
        if self.prior is None:
            return 0.0
        counted, share_T = self.counted(weights), self.task.shares[TEXT]
        sum_BT = RowSums.over(self.prior.text_NT).sums(counted)
        return np.asarray(share_T * (sum_BT - np.outer(counted.sums, self.task.scales[TEXT].mean_E)))

    def change_by_units(self, sum_BE: F64, mean_E: F64, sums: SubsetSums) -> F64:
        """The change of its task by each unit alone, (B, E), whose mean over the units is the change of the task.

        Args:
            sum_BE: of what each unit adds to the effect of its task, times the task's units, less its mean.
            mean_E: this mean.
            sums: of the same subsets.
        """
        del mean_E  # the corpus itself is 0
        return self._mean(sum_BE, sums, ANY_TEXT)

    def parts(self, weights: Weights, sums: SubsetSums) -> dict[str, F64]:
        """Columns of `part_names`: what each kernel adds to a change, and what repetition takes of any row's worth.

        (B, T) each, or (B,) where it is the same for every target and unit.
        """
        parts, counted = dict[str, F64](), self.counted(weights)
        for name, kernel in self.task_kernels.items():
            sum_BT = kernel.held.sums(counted) - np.outer(sums.counted_B, kernel.rows.mean_E)
            sum_BT = self.task.shares[name] * sum_BT
            parts[f"part_{name}"] = self._mean(sum_BT, sums, 0.0)
        parts[f"part_{REPETITION}"] = np.outer(sums.worth(self.exposure) - 1.0, self.task.base_C)
        return parts

    @property
    def part_names(self) -> tuple[str, ...]:
        """What `parts` has."""
        return tuple(f"part_{name}" for name in (*self.task_kernels, REPETITION))

    def worth_of_tokens(self, effect_N: F64, weights_T: F64, tokens_N: I64) -> F64:
        """What rows are ranked by where tokens are spent: their effect, for all rows count alike."""
        del weights_T, tokens_N
        return effect_N

    def _mean(self, sum_BC: F64, sums: SubsetSums, base_C: F64 | float) -> F64:
        """worth (mean + b) - b of values that add up to 0 over the corpus."""
        mean_BC = ratio(1.0, sums.counted_B)[:, None] * sum_BC
        worth_B1 = sums.worth(self.exposure)[:, None]
        return np.asarray(worth_B1 * mean_BC - (1.0 - worth_B1) * base_C)


def sketch_of(artifact: ArtifactReader, half: str) -> RowSums:
    """One sketch of every row."""
    name = f"{half}_sketch"
    width = next(artifact.array_blocks(name, block_rows=1))[1].shape[1]
    return RowSums(lambda: artifact.array_blocks(name, block_rows=block_rows(width)), artifact.n_rows, width)


def assembled(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    units: UnitSelection,
    *,
    per_unit: bool = False,
    components: bool = False,
    family: Callable[[Mapping[str, KernelRelevance]], Mapping[str, ColumnSpread]] | None = None,
    units_first: bool = False,
) -> Predictor:
    """Read the relevance, and add its kernels up; the predictor has no sketches yet.

    Args:
        per_unit: a level of the units, too.
        components: keep the kernels.
        family: what brings kernels to one scale; None: their spread over the rows.
        units_first: bring every unit to one scale before a task takes the mean.
    """

    def scales_of(kernels: Mapping[str, KernelRelevance]) -> Mapping[str, ColumnSpread]:
        return {name: one.rows.spread for name, one in kernels.items()} if family is None else family(kernels)

    negative = {name: protocol.negative_of(name) for name in kernel_weights(protocol)}
    estimates = protocol.task == "estimate" and family is None  # a family standardises what is known alone
    by_unit: dict[str, KernelRelevance] = {}
    if per_unit or units_first:
        by_unit = {name: KernelRelevance.for_units(artifact, name, units, less) for name, less in negative.items()}
    unit_scales = scales_of(by_unit)
    if estimates and not by_unit:
        read = {name: relevance_blocks(artifact, name, units.columns_E, less) for name, less in negative.items()}
        unit_scales = {name: RowMoments.from_blocks(blocks).spread for name, blocks in read.items()}
    units_first = units_first or estimates
    before = {name: unit_scales[name].inverse_E if units_first else 1.0 for name in negative}
    kernels = {
        name: KernelRelevance.for_tasks(artifact, name, units, less, before[name]) for name, less in negative.items()
    }
    unit_level = None
    if per_unit:
        unit_level = Level.from_kernels(_slopes(protocol, unit_scales), by_unit, unit_scales, None)
    scales = scales_of(kernels)
    slopes, prior = _slopes(protocol, scales), None
    own_T = np.ones(len(units.targets))
    if estimates and units.counts_T.max() > 1:
        coefficients = {name: before[name] * np.repeat(slope_T, units.counts_T) for name, slope_T in slopes.items()}
        prior = task_prior(artifact, units, negative, coefficients)
        own_T, held = prior.own_T, RowSums.over(prior.text_NT)
        text = KernelRelevance(RowMoments.from_blocks(held.blocks()), held)
        slopes = {name: slope_T * own_T for name, slope_T in slopes.items()} | {TEXT: 1.0 - own_T}
        kernels, scales = kernels | {TEXT: text}, {**scales, TEXT: text.rows.spread}
    first_NT = next(iter(kernels.values())).held.held_NC
    assert first_NT is not None
    task = Level.from_kernels(slopes, kernels, scales, np.empty_like(first_NT) if components else first_NT)
    if unit_level is not None:  # a task's effect in those of each of its units: its standard deviation over them
        blocks = unit_level.effects.blocks()
        of_tasks = RowMoments.from_blocks((start, units.mean_per_task(block)) for start, block in blocks)
        unit_level = replace(unit_level, base_C=unit_level.base_C * np.repeat(of_tasks.spread.std_E, units.counts_T))
    return Predictor(
        protocol=protocol,
        units=units,
        n_rows=artifact.n_rows,
        task=task,
        unit_level=unit_level,
        sketches={},
        dropped=tuple(name for name in negative if not scales[name].inverse_E.any()),
        unit_shares={name: np.repeat(task.shares[name], units.counts_T) * before[name] for name in negative},
        task_kernels=kernels if components else {},
        exposure=Exposure(),
        unit=EFFECT_SIZE,
        prior=prior,
    )


def _slopes(protocol: ScoringProtocol, scales: Mapping[str, ColumnSpread]) -> dict[str, F64]:
    """What brings each kernel to unit spread, times its weight."""
    return {name: weight * scales[name].inverse_E for name, weight in kernel_weights(protocol).items()}


def task_prior(
    artifact: ArtifactReader, units: UnitSelection, negative: Mapping[str, float], coefficients: Mapping[str, F64]
) -> Prior:
    """What the rows' text says of the tasks; nothing where the artifact keeps no tokens."""
    source = BuildSource(artifact)
    texts: Texts | None = None
    is_merged = bool(artifact.manifest.details.get("parts"))
    if artifact.tokens_path.exists() and not is_merged and not source.has_images:
        store = source.rows
        assert isinstance(store, RowStore)

        def texts(row_index: I64) -> tuple[I32, I64]:
            rows = store.rows(row_index)
            return rows.flat_ids, rows.offsets

    read = {
        name: functools.partial(relevance_blocks, artifact, name, units.columns_E, less)
        for name, less in negative.items()
    }
    names = [name for batch in artifact.row_batches(["row_id"]) for name in batch.column(0).to_pylist()]
    return fit_prior(read, coefficients, units.counts_T, names, row_documents(artifact), texts)


def additive_predictor(
    artifact: ArtifactReader,
    target: str,
    *,
    protocol: ScoringProtocol | Path | str | None = None,
    match: str | None = None,
    unit: str | None = None,
) -> Predictor:
    """What rows are ranked by for one target, or one unit of it: `effect_NT` has one column.

    Args:
        match: one kernel in the place of the protocol's.
        unit: one unit in the place of all those of the target.
    """
    chosen, units = as_protocol(protocol, artifact), None
    if match is not None:
        alone = {"name": f"{chosen.name}, {match} alone", "match": {match: 1.0}, "selected_on": None}
        chosen = protocol_from(chosen.model_dump() | alone, f"match {match}")
    if unit is not None:
        columns, names = artifact.unit_columns(target), artifact.units.column("unit_id").to_pylist()
        column = next((e for e in columns if names[e] == unit), None)
        if column is None:
            some = ", ".join(names[e] for e in columns[:3])
            raise ProtocolError(f"unit: {target} has no unit {unit!r}; it has {len(columns):,}, e.g. {some}")
        units = UnitSelection((target,), np.array([column]), np.ones(1, dtype=np.int64))
    return Predictor.from_artifact(artifact, chosen.additive, [target], units=units)
