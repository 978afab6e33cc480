"""The values of a label as slices that people look at: a few, named, each with the expression that selects it.

A label with too many values keeps the largest of them; the others share one slice, and how many they are is said. What
each is worth is in `slice_effects`; `SliceFormula` is the predictor in one weight a slice.
Shape letters: G slices, N rows, E units, T targets, R resamples.
"""

import functools
import itertools
import operator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.where import Label, LabelColumn, equals, none_of
from grasp.corpus.labels import OWN_COLUMNS
from grasp.errors import SubsetError
from grasp.predict.predictor import SIMILAR, Exposure, Predictor, SubsetSums, relevance_blocks
from grasp.predict.weights import Weights, sums_over
from grasp.seeds import bootstrap_weights
from grasp.text import different

MOST_SLICES = 100
MOST_LABELS = 4
RESAMPLES = 1_000
TAILS = (0.025, 0.975)
DROPPED, DOUBLED = 0.0, 2.0  # weights


@dataclass(frozen=True, slots=True)
class Slice:
    """All rows that an expression selects."""

    name: str  # for people; no other slice of the label has it
    expression: str  # what `grasp predict --drop` takes
    rows: int
    tokens: int


@dataclass(frozen=True)
class LabelSlices:
    """The slices of one label, largest first as far as they are single values; every row is in one of them."""

    label: str
    slices: tuple[Slice, ...]
    codes_N: NDArray[np.int32]
    n_grouped: int  # values that share the last slice; 0: every value has a slice of its own

    @property
    def rows_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows of each slice."""
        return np.array([one.rows for one in self.slices], dtype=np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.slices)

    @functools.cached_property
    def each(self) -> Weights:
        """The slices as subsets, (G, N)."""
        return Weights.from_slices(self.codes_N, len(self.slices))

    def weights(self, share_BG: NDArray[np.float64]) -> Weights:
        """(B, N) weights of subsets that give every row of a slice the weight of the slice."""
        return self.each.mixed(share_BG)


def label_slices(column: LabelColumn, tokens_N: NDArray[np.integer], *, most: int = MOST_SLICES) -> LabelSlices:
    """Slices of one label.

    Args:
        most: slices at most; the values beyond the largest `most - 1` share one.
    Raises:
        SubsetError: fewer than two values: nothing can be told apart by them.
    """
    if len(column.values) < 2:
        raise SubsetError(
            f"--by {column.name}: has the single value {column.values[0]!r}; expected a label with two values or more"
        )
    order = np.argsort(-column.counts, kind="stable").tolist()
    single = order if len(order) <= most else order[: most - 1]
    grouped = order[len(single) :]
    slice_of = np.full(len(order), len(single), dtype=np.int32)
    slice_of[single] = np.arange(len(single))
    codes_N = slice_of[column.codes_N]
    values = [column.values[code] for code in single]
    called = column.names()
    names = [called[code] for code in single]
    expressions = [equals(column.name, value) for value in values]
    if grouped:
        names += different([*called, f"{len(grouped):,} other values"])[-1:]
        others = none_of(column.name, values)
        unlabelled = None in (column.values[code] for code in grouped)
        expressions.append(f"{equals(column.name, None)} OR {others}" if unlabelled else others)
    rows_G = np.bincount(codes_N, minlength=len(names))
    tokens_G = np.bincount(codes_N, weights=tokens_N, minlength=len(names))
    slices = [
        Slice(name, expression, int(rows), int(tokens))
        for name, expression, rows, tokens in zip(names, expressions, rows_G, tokens_G, strict=True)
    ]
    return LabelSlices(column.name, tuple(slices), codes_N, len(grouped))


def sensible_labels(source: ArtifactReader, *, most: int = MOST_SLICES) -> tuple[str, ...]:
    """Label columns that cut the corpus into 2 to `most` slices: text if there is any, else whole numbers and flags.

    A column with another value in every row tells none apart. Reads each no further than it takes to see that it has
    more values.
    """
    most = min(most, source.n_rows - 1)

    def cuts(name: str) -> bool:
        seen: set[Label] = set()
        for batch in source.row_batches([name]):
            seen.update(batch.column(0).unique().to_pylist())
            if len(seen) > most:
                return False
        return len(seen) >= 2

    schema = source.rows(np.empty(0, dtype=np.int64)).schema
    own = [field for field in schema if field.name not in OWN_COLUMNS]
    text = [field.name for field in own if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    other = [field.name for field in own if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)]
    for names in (text, other):
        if chosen := tuple(itertools.islice(filter(cuts, names), MOST_LABELS)):
            return chosen
    return ()


@dataclass(frozen=True, slots=True)
class SliceEffects:
    """What every slice of one label is worth: (G, T) each, but for redundancy, which has no target."""

    sums: SubsetSums  # of the slices
    effect_GT: F64  # mean over the rows of the slice; helps or hurts: above or below the corpus average
    dropped_GT: F64  # change against the whole corpus; nan where nothing would be left
    doubled_GT: F64
    redundancy_G: F64 | None  # cosine of the sketch sum to that of all other rows; None without sketches


def slice_effects(predictor: Predictor, slices: LabelSlices) -> SliceEffects:
    """What dropping, and doubling, each slice changes; the cost is linear in the slices."""
    sums = predictor.sums(slices.each)
    rows_G = sums.kept_B
    dropped_GT = predictor.change_of(predictor.reweighted(sums, DROPPED))
    dropped_GT[rows_G == predictor.n_rows] = np.nan
    halves, redundancy_G = [half for half in SIMILAR if half in sums.sketch], None
    if halves:
        slice_GD = np.concatenate([sums.sketch[half] for half in halves], axis=1)
        rest_GD = slice_GD.sum(axis=0) - slice_GD  # every row is in one slice
        norm_G = np.linalg.norm(slice_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
        floor = 1e-12 * np.linalg.norm(slice_GD, axis=1) ** 2
        product_G = np.einsum("gd,gd->g", slice_GD, rest_GD)
        redundancy_G = ratio(product_G, norm_G, least=floor, undefined=np.nan)
    return SliceEffects(
        sums=sums,
        effect_GT=np.asarray(sums.effect_BT / rows_G[:, None]),
        dropped_GT=dropped_GT,
        doubled_GT=predictor.change_of(predictor.reweighted(sums, DOUBLED)),
        redundancy_G=redundancy_G,
    )


def dropped_intervals(
    artifact: ArtifactReader, predictor: Predictor, effects: SliceEffects, slices: LabelSlices
) -> tuple[F64, F64]:
    """95 % interval of each slice's `dropped`, low and high, (G, T); nan where a target has a single unit.

    A target's units are a sample of what the target stands for, so units are what is resampled: a task's effect is a
    mean over units, in a unit of measurement that stays fixed. An interval says how far a change would move with other
    units of the same kind; it says nothing of how well predictions agree with retraining.

    Cost: one more pass over the relevance of every kernel; memory: slices x units.
    """
    n_slices, rows_G = len(slices.slices), effects.sums.kept_B
    columns_E, protocol = predictor.units.columns_E, predictor.protocol
    part_GE = np.zeros((n_slices, len(columns_E)))  # what each unit adds to the effect of its task, times its units
    for kernel, share_E in predictor.unit_shares.items():
        blocks = relevance_blocks(artifact, kernel, columns_E, protocol.negative_of(kernel))
        (sum_GE,) = sums_over(blocks, [slices.each], len(columns_E))
        part_GE += sum_GE * share_E
    if predictor.prior is not None:  # of the text's part nobody knows which question it owes what
        part_GE += np.repeat(predictor.text_sums(slices.each), predictor.units.counts_T, axis=1)
    mean_E = part_GE.sum(axis=0) / predictor.n_rows
    rest_GE = np.outer(rows_G, mean_E) - part_GE  # all other rows, counted from the mean
    change_GE = predictor.change_by_units(rest_GE, mean_E, predictor.reweighted(effects.sums, DROPPED))
    bounds = np.full((2, len(predictor.units.targets), n_slices), np.nan)
    stops = np.cumsum(predictor.units.counts_T)
    for t, (start, stop) in enumerate(zip(stops - predictor.units.counts_T, stops, strict=True)):
        if stop - start > 1:
            weights_RE = bootstrap_weights(int(stop - start), resamples=RESAMPLES) / (stop - start)
            bounds[:, t] = np.quantile(change_GE[:, start:stop] @ weights_RE.T, TAILS, axis=1)
    bounds[:, :, rows_G == predictor.n_rows] = np.nan
    return bounds[0].T, bounds[1].T


def cosines(slices: SubsetSums) -> F64 | None:
    """(G, G) cosine of the slices' sketch sums, the mean sketch of the corpus taken off every row first.

    nan where a sum is zero; the diagonal is 1. None without sketches.
    """
    halves = [half for half in SIMILAR if half in slices.sketch]
    if not halves:
        return None
    rows_G = slices.kept_B
    grams = (slices.sketch[half] @ slices.sketch[half].T for half in halves)
    gram_GG = functools.reduce(operator.add, grams)
    shift_GG = np.eye(len(rows_G)) - np.outer(rows_G, np.ones(len(rows_G))) / rows_G.sum()
    centred_GG = shift_GG @ gram_GG @ shift_GG.T
    size_G = np.sqrt(np.maximum(np.diag(centred_GG), 0.0))
    product_GG = np.outer(size_G, size_G)
    floor = 1e-12 * float(np.trace(gram_GG))
    cosine_GG = ratio(centred_GG, product_GG, least=floor, undefined=np.nan)
    return np.asarray(np.clip(cosine_GG, -1.0, 1.0))


@dataclass(frozen=True, slots=True)
class SliceFormula:
    """The predictor as a formula in one weight a slice: numbers that a page can compute with by itself.

    Give every row of slice g the weight f_g: 0 drops the slice, 1 keeps it, 0.3 keeps 30 % of its weight. With n_g the
    rows and e_g the sum of the effects of a slice, K the rows with a weight above 0, the change against the corpus is

        (sum_g x_g (e_g + b n_g)) / K - b,    x_g = exposure(f_g K / sum_h f_h n_h)

    Keeping each row with the weight f_g gives what a random part f_g of the slice gives on average.
    Source: eq:method-additive.
    """

    rows_G: F64
    effect_GT: F64
    exposure: Exposure
