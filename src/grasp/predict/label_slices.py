"""The values of a label as slices that people look at: a few, named, each with the expression that selects it.

A label with too many values keeps the largest of them; the others share one slice, and how many they are is said. What
each is worth is in `slice_effects`; `SliceFormula` is the predictor in one weight a slice.
Shape letters: G slices, N rows, E units, T targets, R resamples.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import OWN_COLUMNS
from grasp.errors import SubsetError
from grasp.geometry.sums import JOINT, QuadraticWeights, SketchSums, SubsetMass, Weighting
from grasp.predict.blocks import Side
from grasp.predict.labels import Label, LabelColumn, equals, none_of
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.relevance import relevance_blocks
from grasp.predict.row_arrays import F64
from grasp.predict.row_sums import BlockSums
from grasp.predict.weights import ANY_TEXT, EachSlice, Exposure, SliceShares
from grasp.seeds import bootstrap_weights
from grasp.text import different

MOST_SLICES = 100
MOST_LABELS = 4
RESAMPLES = 1_000
TAILS = (0.025, 0.975)
DROPPED, DOUBLED = 0.0, 2.0  # weights
SIMILAR = ("hidden", "residual")  # sketches by which redundancy is told


@dataclass(frozen=True, slots=True)
class Slice:
    """All rows that an expression selects."""

    name: str  # for people; no other slice of the label has it
    expression: str  # what `grasp predict --drop` takes
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
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
    def tokens_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Tokens of each slice."""
        return np.array([one.tokens for one in self.slices], dtype=np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.slices)

    @property
    def column(self) -> LabelColumn:
        """The label of every row, with the values that share a slice merged into one."""
        return LabelColumn(self.label, self.names, self.codes_N)

    @property
    def each(self) -> EachSlice:
        """The slices as subsets, (G, N)."""
        return EachSlice(self.codes_N, len(self.slices))

    def weights(self, share_BG: NDArray[np.float64]) -> SliceShares:
        """(B, N) weights of subsets that give every row of a slice the weight of the slice."""
        return SliceShares(np.asarray(share_BG, dtype=np.float64), self.codes_N)


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
    schema = source.rows(np.empty(0, dtype=np.int64)).schema
    own = [field for field in schema if field.name not in OWN_COLUMNS]
    text = [field.name for field in own if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    other = [field.name for field in own if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)]
    for names in (text, other):
        found = itertools.islice((name for name in names if 2 <= _n_values(source, name, most) <= most), MOST_LABELS)
        if chosen := tuple(found):
            return chosen
    return ()


def _n_values(source: ArtifactReader, name: str, most: int) -> int:
    """Different values, counted up to one more than `most`."""
    seen: set[Label] = set()
    batches: Iterator[pa.RecordBatch] = source.row_batches([name])
    for batch in batches:
        seen.update(batch.column(0).unique().to_pylist())
        if len(seen) > most:
            break
    return min(len(seen), most + 1)


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
    sums, corpus = predictor.sums(slices.each), predictor.whole()
    rows_G = sums.mass.retained_B
    dropped_GT = predictor.change_of(sums.from_whole(corpus, DROPPED, predictor.exposure))
    dropped_GT[rows_G == predictor.n_rows] = np.nan
    return SliceEffects(
        sums=sums,
        effect_GT=np.asarray(sums.effect_BT / rows_G[:, None]),
        dropped_GT=dropped_GT,
        doubled_GT=predictor.change_of(sums.from_whole(corpus, DOUBLED, predictor.exposure)),
        redundancy_G=_redundancy(sums, corpus),
    )


def dropped_intervals(
    artifact: ArtifactReader, predictor: Predictor, effects: SliceEffects, slices: LabelSlices
) -> tuple[F64, F64]:
    """95 % interval of each slice's `dropped`, low and high, (G, T); nan where a target has a single unit.

    A target's units are a sample of what the target stands for, so units are what is resampled: a task's effect is a
    mean over units, in a unit of measurement that stays fixed (geometry is the same for all units). An interval says
    how far a change would move with other units of the same kind; it says nothing of how well predictions agree with
    retraining.

    Cost: one more pass over the relevance of every kernel; memory: slices x units.
    """
    n_slices = len(slices.slices)
    without = effects.sums.from_whole(predictor.whole(), DROPPED, predictor.exposure)
    part_GE = _unit_parts(artifact, predictor, slices)
    mean_E = part_GE.sum(axis=0) / predictor.n_rows
    rest_GE = np.outer(effects.sums.mass.retained_B, mean_E) - part_GE  # all other rows, counted from the mean
    offset_E = mean_E if predictor.protocol.weighting == "count" else np.zeros_like(mean_E)
    change_GE = predictor.relative(rest_GE, offset_E, without.mass, ANY_TEXT)
    geometry_G = predictor.geometry_change(without)
    bounds = np.full((2, len(predictor.targets), n_slices), np.nan)
    stops = np.cumsum(predictor.units.counts_T)
    for t, (start, stop) in enumerate(zip(stops - predictor.units.counts_T, stops, strict=True)):
        if stop - start > 1:
            weights_RE = bootstrap_weights(int(stop - start), resamples=RESAMPLES) / (stop - start)
            change_GR = predictor.task.gain_C[t] * (change_GE[:, start:stop] @ weights_RE.T)
            bounds[:, t] = np.quantile(change_GR, TAILS, axis=1) + geometry_G
    empty_G = effects.sums.mass.retained_B == predictor.n_rows
    bounds[:, :, empty_G] = np.nan
    return bounds[0].T, bounds[1].T


def _unit_parts(artifact: ArtifactReader, predictor: Predictor, slices: LabelSlices) -> F64:
    """Sums over slices of what each unit adds to the effect of its task, times the task's units: (G, E)."""
    units, protocol = predictor.units, predictor.protocol
    sums = BlockSums(slices.each)
    out_GE = np.zeros((len(slices.slices), len(units.columns_E)))
    for kernel, share_T in predictor.task.shares.items():
        part_GE = np.zeros_like(out_GE)
        for start, block in relevance_blocks(artifact, kernel, units.columns_E, protocol.negative_of(kernel)):
            part_GE += sums.product(start, block)
        out_GE += part_GE * (np.repeat(share_T, units.counts_T) * predictor.unit_scales[kernel])
    return out_GE


def _redundancy(slices: SubsetSums, corpus: SubsetSums) -> F64 | None:
    """Cosine of each slice's sketch sum to the sum of all other rows, (G,); NaN where either is zero."""
    halves = [half for half in SIMILAR if half in slices.sketch]
    if not halves:
        return None
    slice_GD, corpus_1D = (_joined([of.sketch[half] for half in halves]) for of in (slices, corpus))
    rest_GD = corpus_1D - slice_GD
    norm_G = np.linalg.norm(slice_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
    floor = 1e-12 * np.linalg.norm(slice_GD, axis=1) ** 2
    product_G = np.einsum("gd,gd->g", slice_GD, rest_GD)
    return np.asarray(np.divide(product_G, norm_G, out=np.full_like(norm_G, np.nan), where=norm_G > floor))


def _joined(parts: list[SketchSums]) -> F64:
    return np.concatenate([part.total_BD for part in parts], axis=1)


@dataclass(frozen=True, slots=True)
class SliceFormula:
    """The predictor as a formula in one weight a slice: G and G x G numbers that a page can compute with by itself.

    Give every row of slice g the weight f_g: 0 drops the slice, 1 keeps it, 0.3 keeps 30 % of its weight. With n_g the
    rows and e_g the sum of the effects of a slice, K the rows with a weight above 0, the change against the corpus is

        (sum_g x_g (e_g + b n_g)) / K - b,    x_g = exposure(f_g K / sum_h f_h n_h)

    for an additive protocol of the retained side and the mean. In general, with u = f on the retained side and 1 - f on
    the omitted one, c = 1 or 1 / sum |u_g| n_g by the weighting, the Gram matrix of the slices' sketch sums
    C_gh = <Phi_g, Phi_h>, and p_g the sum of ||phi_i||^2 over the slice, it is

        c (sum_g f_g relevance_g - taken) + c^2 (raw u'C u + own sum_g u_g^2 p_g + cent v'C v) - corpus,
        v_g = u_g - sum_h u_h n_h / N                                (sum_g Phi_g is N times the mean sketch),

    with `corpus` the value of the same at f = 1. Keeping each row with the weight f_g gives the relevance that a random
    part f_g of the slice has on average; quadratic terms see lighter rows, not fewer.
    Source: eq:component-predictor, eq:grasp-subset-relevance, eq:ia-components.
    """

    side: Side
    weighting: Weighting
    rows_G: F64
    relevance_GT: F64
    taken_T: F64  # 0 on the retained side
    corpus_T: F64
    quadratic: Mapping[str, QuadraticWeights]  # by half; empty for an additive protocol
    gram_GG: Mapping[str, F64]  # by half; joint where hidden and residual are there
    norm_G: Mapping[str, F64]
    exposure: Exposure | None

    @classmethod
    def of(cls, predictor: Predictor, slices: SubsetSums) -> Self:
        """Coefficients of a predictor for the slices whose sums these are."""
        protocol, rows_G = predictor.protocol, slices.mass.retained_B
        gain_T, offset_T = predictor.task.gain_C, predictor.task.offset_C
        grams, norms = _grams(slices)
        halves = {} if predictor.geometry is None else predictor.geometry.halves
        whole = predictor.whole()
        factor = float(SubsetMass.whole(predictor.n_rows).factor(protocol.side, protocol.weighting)[0])
        total_T = predictor.n_rows * gain_T * offset_T
        corpus_T = factor * total_T if protocol.side == "retained" else np.zeros_like(total_T)
        bend = 0.0
        if protocol.side == "retained":
            for half, weights in halves.items():
                total_D, norm = whole.sketch[half].total_BD[0], float(whole.sketch[half].norm_B[0])
                bend += factor**2 * (weights.raw * float(total_D @ total_D) + weights.own * norm)
        return cls(
            side=protocol.side,
            weighting=protocol.weighting,
            rows_G=rows_G,
            relevance_GT=gain_T * (slices.effect_BT + np.outer(rows_G, offset_T)),
            taken_T=total_T * (protocol.side == "omitted"),
            corpus_T=corpus_T + bend,
            quadratic=halves,
            gram_GG=grams,
            norm_G=norms,
            exposure=predictor.exposure,
        )

    def cosines(self, half: str) -> F64:
        """(G, G) cosine of the slices' sketch sums, the mean sketch of the corpus taken off every row first.

        nan where a sum is zero; the diagonal is 1.
        """
        gram_GG, rows_G = self.gram_GG[half], self.rows_G
        shift_GG = np.eye(len(rows_G)) - np.outer(rows_G, np.ones(len(rows_G))) / rows_G.sum()
        centred_GG = shift_GG @ gram_GG @ shift_GG.T
        size_G = np.sqrt(np.maximum(np.diag(centred_GG), 0.0))
        product_GG = np.outer(size_G, size_G)
        floor = 1e-12 * float(np.trace(gram_GG))
        cosine_GG = np.divide(centred_GG, product_GG, out=np.full_like(gram_GG, np.nan), where=product_GG > floor)
        return np.asarray(np.clip(cosine_GG, -1.0, 1.0))


def _grams(slices: SubsetSums) -> tuple[dict[str, F64], dict[str, F64]]:
    """Gram matrices of the slices and sums of squared norms, by half; joint adds. Source: eq:feature-sketch."""
    grams = {half: sums.total_BD @ sums.total_BD.T for half, sums in slices.sketch.items()}
    norms = {half: sums.norm_B for half, sums in slices.sketch.items()}
    if all(half in grams for half in JOINT):
        grams["joint"] = sum((grams[half] for half in JOINT), np.zeros_like(grams[JOINT[0]]))
        norms["joint"] = sum((norms[half] for half in JOINT), np.zeros_like(norms[JOINT[0]]))
    return grams, norms
