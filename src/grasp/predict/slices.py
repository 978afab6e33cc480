"""Predicted effect of each value of a label.

`label_slices` turns the values of a label into named slices with the expression that selects each; if there are too
many values, the largest keep a slice of their own and the others share one. `slice_effects` predicts what dropping and
doubling each slice changes; the intervals are in `grasp.predict.slice_intervals`.
Equations are those of the paper, see docs/paper_map.md.
Shape letters: G slices, N rows, T targets, D sketch width, V label values, M elements of labels
that are lists.
"""

import functools
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.arrays import F64, ratio
from grasp.artifact.label_table import Label, LabelColumn, equals, none_of
from grasp.artifact.rows import MAX_SLICES
from grasp.errors import SubsetError
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor, SubsetSums
from grasp.predict.weights import Weights
from grasp.text import unique_names

DROPPED, DOUBLED = 0.0, 2.0  # weights of the rows of a slice


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows that an expression selects."""

    name: str  # display name, unique among the slices of the label
    expression: str  # in the syntax of `grasp predict --drop`
    rows: int
    tokens: int


@dataclass(frozen=True)
class LabelSlices:
    """The slices of one label, largest first; grouped values come last.

    Every row is in exactly one slice, unless the label has several values per row (`membership_GN`).
    """

    label: str
    slices: tuple[Slice, ...]
    codes_N: NDArray[np.int32]
    n_grouped: int  # number of values that share the last slice; 0 if every value has its own
    membership_GN: csr_array | None = None  # rows may be in several slices, or in none; then codes_N is empty

    @property
    def rows_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Number of rows of each slice."""
        return np.array([part.rows for part in self.slices], dtype=np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.slices)

    @functools.cached_property
    def each(self) -> Weights:
        """The slices as subsets, (G, N)."""
        if self.membership_GN is not None:
            return Weights(self.membership_GN)
        return Weights.from_slices(self.codes_N, len(self.slices))

    @property
    def dropped(self) -> Weights:
        """The corpus without each slice, as subsets, (G, N)."""
        if self.membership_GN is not None:
            return Weights(-self.membership_GN, base=1.0)
        return self.weights(1.0 - np.eye(len(self.slices)))

    def weights(self, share_BG: NDArray[np.float64]) -> Weights:
        """Return subsets (B, N) in which every row has the weight of its slice, from slice weights (B, G)."""
        return self.each.mixed(share_BG)


def label_slices(column: LabelColumn, tokens_N: NDArray[np.integer], *, most: int = MAX_SLICES) -> LabelSlices:
    """Split the corpus into slices by a label.

    Args:
        tokens_N: number of tokens of each row.
        most: maximum number of slices; the values after the largest `most - 1` share one slice.
    Raises:
        SubsetError: the label has fewer than two values.
    """
    if len(column.values) < 2:
        raise SubsetError(
            f"--by {column.name}: has the single value {column.values[0]!r}; expected a label with at least two values"
        )
    order = np.argsort(-column.counts, kind="stable").tolist()
    single = order if len(order) <= most else order[: most - 1]
    grouped = order[len(single) :]
    slice_of = np.full(len(order), len(single), dtype=np.int32)
    slice_of[single] = np.arange(len(single))
    codes_N = slice_of[column.codes_N]
    values = [column.values[code] for code in single]
    value_names = column.names()
    names = [value_names[code] for code in single]
    expressions = [equals(column.operand, value) for value in values]
    if grouped:
        names += unique_names([*value_names, f"{len(grouped):,} other values"])[-1:]
        others = none_of(column.operand, values)
        unlabelled = None in (column.values[code] for code in grouped)
        expressions.append(f"{equals(column.operand, None)} OR {others}" if unlabelled else others)
    rows_G = np.bincount(codes_N, minlength=len(names))
    tokens_G = np.bincount(codes_N, weights=tokens_N, minlength=len(names))
    slices = [
        Slice(name, expression, int(rows), int(tokens))
        for name, expression, rows, tokens in zip(names, expressions, rows_G, tokens_G, strict=True)
    ]
    return LabelSlices(column.name, tuple(slices), codes_N, len(grouped))


def list_slices(column: LabelColumn, tokens_N: NDArray[np.integer], *, most: int = MAX_SLICES) -> LabelSlices | None:
    """Return one slice per element of a label that is a list, such as `["math", "code"]`: slices that overlap.

    Args:
        most: maximum number of slices, the largest ones; rare elements get no slice.
    Returns:
        None if not all values of the label are lists of texts, as JSON, or no element is in some rows only.
    """
    elements_of = [() if value is None else _elements(value) for value in column.values]
    if None in elements_of or not any(elements_of):
        return None
    code_of: dict[str, int] = {}  # by element
    pairs = [(code_of.setdefault(part, len(code_of)), v) for v, parts in enumerate(elements_of) for part in parts or ()]
    element, value = np.array(pairs).T
    in_value_MV = csr_array((np.ones(len(pairs)), (element, value)), shape=(len(code_of), len(column.values)))
    n_rows = len(column.codes_N)
    in_row_VN = csr_array((np.ones(n_rows), (column.codes_N, np.arange(n_rows))), shape=(len(column.values), n_rows))
    in_row_MN = (in_value_MV @ in_row_VN).tocsr()
    rows_M = np.diff(in_row_MN.indptr)
    largest_first = np.argsort(-rows_M, kind="stable")
    selected = largest_first[rows_M[largest_first] < n_rows][:most]  # an element of every row selects nothing
    if not len(selected):
        return None
    membership_GN, names = csr_array(in_row_MN[selected]), list(code_of)
    tokens_G = membership_GN @ tokens_N.astype(np.float64)
    literals = ["'" + name.replace("'", "''") + "'" for name in names]  # of SQL
    slices = [
        Slice(names[m], f"has({column.operand}, {literals[m]})", int(rows_M[m]), int(tokens))
        for m, tokens in zip(selected.tolist(), tokens_G, strict=True)
    ]
    return LabelSlices(column.name, tuple(slices), np.empty(0, np.int32), 0, membership_GN)


def _elements(value: Label) -> tuple[str, ...] | None:
    """Return the different elements of a JSON list of texts, or None."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return None
    try:
        parts = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return tuple(dict.fromkeys(parts)) if all(isinstance(part, str) for part in parts) else None


@dataclass(frozen=True, slots=True)
class SliceEffects:
    """Predicted effects of the slices of one label, (G, T) each; redundancy does not depend on the target."""

    sums: SubsetSums  # sums over the rows of each slice
    effect_GT: F64  # mean effect of the rows; above 0: more helpful than the average row
    dropped_GT: F64  # change if the slice is dropped; nan if no row would remain
    doubled_GT: F64  # change if the slice is seen twice as often
    redundancy_G: F64 | None  # cosine between the sketch sums of the slice and of all other rows; None without sketches


def slice_effects(predictor: Predictor, slices: LabelSlices) -> SliceEffects:
    """Predict the change if each slice is dropped, and if it is doubled. Cost: linear in the number of slices."""
    sums = predictor.sums(slices.each)
    rows_G = sums.n_retained_B
    dropped_GT = predictor.change_of(predictor.reweighted(sums, DROPPED))
    dropped_GT[rows_G == predictor.n_rows] = np.nan
    redundancy_G = None
    if sketches := [name for name in SIMILARITY_SKETCHES if name in sums.sketch]:
        slice_GD = np.concatenate([sums.sketch[name] for name in sketches], axis=1)
        if slices.membership_GN is None:
            total_D = slice_GD.sum(axis=0)  # each row is in exactly one slice
        else:
            corpus = predictor.sums(Weights.from_slices(np.zeros(predictor.n_rows, np.int32), 1))
            total_D = np.concatenate([corpus.sketch[name][0] for name in sketches])
        rest_GD = total_D - slice_GD
        norm_G = np.linalg.norm(slice_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
        floor_G = 1e-12 * np.linalg.norm(slice_GD, axis=1) ** 2
        product_G = np.einsum("gd,gd->g", slice_GD, rest_GD)
        redundancy_G = ratio(product_G, norm_G, minimum=floor_G, undefined=np.nan)
    return SliceEffects(
        sums=sums,
        effect_GT=np.asarray(sums.effect_BT / rows_G[:, None]),
        dropped_GT=dropped_GT,
        doubled_GT=predictor.change_of(predictor.reweighted(sums, DOUBLED)),
        redundancy_G=redundancy_G,
    )
