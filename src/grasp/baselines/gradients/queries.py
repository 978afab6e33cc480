"""Exact inner products of the gradients of rows with those of units, block by block, without projection.

Start with `Queries.collect`, then `exact_products`. The units' gradients, the queries, are computed once and stored per
block in the cheaper of two forms:

    dense     the matrices themselves, (E, X Y): a row's matrix is formed and multiplied, T X Y + E X Y products
    factors   left and right factors of the units' S positions: sum_{t,s} <l_t, l_s> <r_t, r_s>, T S (X + Y) products

Both are exact. An embedding is always stored as factors, since only positions with the same token interact.

Shape letters: B rows of a batch, T positions of a row, E units, S positions of all units, X left width, Y right width,
C distinct tokens of units, P pairs of a token and a unit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.baselines.gradients.factors import left_products, squared_norm
from grasp.baselines.gradients.sinks import MatrixSink, UseSink
from grasp.models.gradient_sums import BLOCK_ELEMENTS
from grasp.models.gradients import Block, Example, GradientFactors, PerExample

ELEMENTWISE = 32  # cost of a pair of positions besides its two inner products, in multiplications


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that determine the cheaper form."""

    row_positions: int  # of a typical row
    units: int
    unit_positions: int  # of all units together
    unit_labels: int

    @classmethod
    def from_counts(cls, row_positions: int, units: Sequence[Example]) -> "Sizes":
        labels = sum(unit.labels for unit in units)
        return cls(row_positions, len(units), sum(len(unit.input_ids) - 1 for unit in units), labels)

    def positions(self, block: Block) -> int:
        """Return the number of positions of all units at which a block has factors."""
        return self.unit_labels if block.head else self.unit_positions


def products(block: Block, sizes: Sizes, *, dense: bool, passes: int = 1) -> int:
    """Return the multiplications per row in a block, against all units, in `passes` passes over the rows."""
    if dense:
        return (passes * sizes.row_positions + sizes.units) * block.size
    pairs = sizes.row_positions * sizes.positions(block) * len(block.kinds) ** 2
    return pairs * (block.left + block.right + ELEMENTWISE)


def choose_dense(block: Block, sizes: Sizes) -> bool:
    """Return whether forming matrices takes fewer multiplications than pairs of positions."""
    if set(block.kinds) == {"embedding"}:
        return False
    return "vector" in block.kinds or products(block, sizes, dense=True) <= products(block, sizes, dense=False)


def query_elements(blocks: Sequence[Block], dense: Sequence[bool], sizes: Sizes) -> int:
    """Return the number of elements stored per unit."""
    total = 0
    for block, whole in zip(blocks, dense, strict=True):
        left = 1 if set(block.kinds) == {"embedding"} else block.left
        positions = -(-sizes.positions(block) // max(1, sizes.units))
        total += block.size if whole else positions * (left + block.right) * len(block.kinds)
    return total


@dataclass
class DenseQuery:
    """Whole gradients of units."""

    matrix_ED: Tensor  # D = X Y


@dataclass
class FactorQuery:
    """Factors of the uses of a block by all units, without positions whose product is zero."""

    uses: list["FlatUse"]


@dataclass(frozen=True, slots=True)
class FlatUse:
    """One use, with the positions of all units flattened."""

    left: Tensor  # (S, X), or int64 (S,): coordinates of one-hot vectors
    right_SY: Tensor
    unit_S: Tensor

    @property
    def one_hot(self) -> bool:
        return self.left.ndim == 1


class Queries:
    """Gradients of the units, per block."""

    def __init__(self, engine: PerExample, blocks: list[DenseQuery | FactorQuery], n_units: int) -> None:
        self.engine, self.blocks, self.n_units = engine, blocks, n_units
        self._embeddings: dict[int, _TokenPairs] = {}

    @classmethod
    def collect(cls, engine: PerExample, units: Sequence[Example], dense: Sequence[bool]) -> "Queries":
        """Compute the gradients of units, each block as a matrix if `dense`, else as factors."""
        collector = _Collector(engine, len(units), dense)
        for index_B in engine.batches(units):
            collector.begin(torch.from_numpy(index_B).to(engine.model.device))
            engine.run([units[int(i)] for i in index_B], collector)
            collector.matrices.finish()
        return cls(engine, collector.queries(), len(units))

    def squared_norms(self) -> Tensor:
        """Return ||g_e||^2 over all blocks, (E,)."""
        total = torch.zeros(self.n_units, dtype=self.engine.work, device=self.engine.model.device)
        for number, query in enumerate(self.blocks):
            if isinstance(query, DenseQuery):
                total += query.matrix_ED.square().sum(dim=1)
            else:
                total += self._factor_norms(number, query)
        return total

    def _factor_norms(self, number: int, query: FactorQuery) -> Tensor:
        width = self.engine.layers.blocks[number].left
        norms = []
        for unit in range(self.n_units):
            uses = []
            for use in query.uses:
                is_unit = use.unit_S == unit
                uses.append(GradientFactors(use.left[is_unit][None], use.right_SY[is_unit][None]))
            norms.append(squared_norm(uses, width)[0])
        return torch.stack(norms)

    def add_products(self, number: int, use: GradientFactors, out_BE: Tensor) -> None:
        """Add <G_b, G_e> of one block, for one use of it by the rows, to `out_BE`."""
        query = self.blocks[number]
        assert isinstance(query, FactorQuery)
        for k, flat in enumerate(query.uses):
            if flat.one_hot and use.one_hot:
                key = number * 64 + k
                if key not in self._embeddings:
                    self._embeddings[key] = _TokenPairs.from_flat(flat, self.n_units)
                self._embeddings[key].add_products(use, out_BE)
            else:
                _add_pairs(use, flat, out_BE)


class _Collector:
    """Collects the units' factors, batch by batch."""

    def __init__(self, engine: PerExample, n_units: int, dense: Sequence[bool]) -> None:
        blocks, device = engine.layers.blocks, engine.model.device
        self._dense = dense
        self._at = torch.arange(n_units, device=device)
        self._whole = {
            k: torch.zeros(n_units, blocks[k].size, dtype=engine.work, device=device) for k, d in enumerate(dense) if d
        }
        self._flatten_use: dict[int, list[FlatUse]] = {}
        self.matrices = MatrixSink(engine, dense, self._take)

    def begin(self, unit_B: Tensor) -> None:
        """Set the units of the next batch."""
        self._at = unit_B

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        if self._dense[number]:
            self.matrices(number, use, rows)
        else:
            self._flatten_use.setdefault(number, []).append(_flatten_use(use, self._at[rows]))

    def _take(self, number: int, matrix: Tensor, rows: slice) -> None:
        self._whole[number][self._at[rows]] = matrix.flatten(1)

    def queries(self) -> list[DenseQuery | FactorQuery]:
        return [
            DenseQuery(self._whole[k]) if whole else FactorQuery(_concatenate_uses(self._flatten_use[k]))
            for k, whole in enumerate(self._dense)
        ]


def _flatten_use(use: GradientFactors, unit_B: Tensor) -> FlatUse:
    """Flatten positions, without those whose product is zero."""
    carries = use.right.abs().amax(dim=2) > 0
    if not use.one_hot:
        carries &= use.left.abs().amax(dim=2) > 0
    unit_BT = unit_B[:, None].expand_as(carries)
    return FlatUse(use.left[carries], use.right[carries], unit_BT[carries])


def _concatenate_uses(all_uses: Sequence[FlatUse]) -> list[FlatUse]:
    """Concatenate all one-hot uses into one, and all others into another."""
    merged = []
    for one_hot in (True, False):
        same = [use for use in all_uses if use.one_hot == one_hot]
        if same:
            merged.append(
                FlatUse(
                    torch.cat([use.left for use in same]),
                    torch.cat([use.right_SY for use in same]),
                    torch.cat([use.unit_S for use in same]),
                )
            )
    return merged


def _add_pairs(use: GradientFactors, flat: FlatUse, out_BE: Tensor) -> None:
    """Add the sum over pairs of positions, a chunk of the units' positions at a time."""
    examples, positions = use.right.shape[:2]
    left = use.left.flatten() if use.one_hot else use.left.flatten(0, 1)
    right = use.right.flatten(0, 1)
    step = max(1, BLOCK_ELEMENTS // max(1, examples * positions))
    for begin in range(0, len(flat.unit_S), step):
        chunk = slice(begin, begin + step)
        pairs = left_products(left, flat.left[chunk]) * (right @ flat.right_SY[chunk].T)
        out_BE.index_add_(1, flat.unit_S[chunk], pairs.view(examples, positions, -1).sum(dim=1))


@dataclass(frozen=True, slots=True)
class _TokenPairs:
    """Right factors of units summed over positions with the same token, ordered by token."""

    token_C: I64
    offset: I64  # (C + 1,)
    unit_P: Tensor
    right_PY: Tensor

    @classmethod
    def from_flat(cls, flat: FlatUse, n_units: int) -> "_TokenPairs":
        key, right = _sum_by_key(flat.left * n_units + flat.unit_S, flat.right_SY)
        token, count = torch.unique_consecutive(torch.div(key, n_units, rounding_mode="floor"), return_counts=True)
        return cls(token.cpu().numpy(), _offsets(count), key % n_units, right)

    def add_products(self, use: GradientFactors, out_BE: Tensor) -> None:
        """Add products token by token: rows that contain it times units that contain it."""
        examples = len(use.right)
        row = torch.arange(examples, device=use.left.device)[:, None]
        known = torch.from_numpy(self.token_C).to(use.left.device)
        place = torch.searchsorted(known, use.left.contiguous()).clamp_(max=len(known) - 1)
        both = known[place] == use.left
        key, right = _sum_by_key((place * examples + row)[both], use.right[both])
        place_C, count = torch.unique_consecutive(torch.div(key, examples, rounding_mode="floor"), return_counts=True)
        begin = _offsets(count)
        row_P = key % examples
        for c, at in enumerate(place_C.cpu().numpy()):
            units = slice(int(self.offset[at]), int(self.offset[at + 1]))
            rows = slice(int(begin[c]), int(begin[c + 1]))
            block = right[rows] @ self.right_PY[units].T
            out_BE[row_P[rows, None], self.unit_P[units]] += block


def _sum_by_key(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted distinct keys, and the sum of the values of each."""
    distinct, inverse = torch.unique(key, return_inverse=True)
    total = value.new_zeros(len(distinct), value.shape[1])
    return distinct, total.index_add_(0, inverse, value)


def _offsets(count: Tensor) -> I64:
    return np.concatenate([[0], np.cumsum(count.cpu().numpy())]).astype(np.int64)


Transform = Callable[[int, Tensor], Tensor]  # block, gradients (b, X, Y) -> their replacement


class RowProducts:
    """Inner products of a batch with all queries, and optionally the squared norms of the rows.

    A transform of the rows' gradients requires all queries to be dense.
    """

    def __init__(self, queries: Queries, examples: int, *, norms: bool, transform: Transform | None = None) -> None:
        engine = queries.engine
        dense = [isinstance(query, DenseQuery) for query in queries.blocks]
        if transform is not None and not all(dense):
            raise AssertionError("a transform requires whole gradients")
        self._queries, self._norms, self._transform = queries, norms, transform
        device, work = engine.model.device, engine.work
        self.product_BE = torch.zeros(examples, queries.n_units, dtype=work, device=device)
        self.square_B = torch.zeros(examples, dtype=work, device=device)
        self._matrices = MatrixSink(engine, dense, self._dense)
        self._others = UseSink(engine, [norms and not whole for whole in dense], self._norm)
        self._is_dense = dense

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        if self._is_dense[number]:
            self._matrices(number, use, rows)
            return
        self._queries.add_products(number, use, self.product_BE[rows])
        self._others(number, use, rows)

    def finish(self) -> None:
        self._matrices.finish()
        self._others.finish()

    def _dense(self, number: int, matrix: Tensor, rows: slice) -> None:
        query = self._queries.blocks[number]
        assert isinstance(query, DenseQuery)
        flat = (matrix if self._transform is None else self._transform(number, matrix)).flatten(1)
        self.product_BE[rows].addmm_(flat, query.matrix_ED.T)
        if self._norms:
            self.square_B[rows] += flat.square_().sum(dim=1)

    def _norm(self, number: int, uses: list[GradientFactors], rows: slice) -> None:
        self.square_B[rows] += squared_norm(uses, self._queries.engine.layers.blocks[number].left)


def exact_products(
    queries: Queries, rows: Sequence[Example], *, norms: bool = False, transform: Transform | None = None
) -> tuple[F64, F64]:
    """Return inner products (N, E) of rows with queries, and squared norms (N,) of the rows (0 unless `norms`)."""
    engine = queries.engine
    product_NE = np.zeros((len(rows), queries.n_units))
    square_N = np.zeros(len(rows))
    for index_B in engine.batches(rows):
        sink = RowProducts(queries, len(index_B), norms=norms, transform=transform)
        engine.run([rows[int(i)] for i in index_B], sink)
        sink.finish()
        product_NE[index_B] = sink.product_BE.cpu().numpy()
        square_N[index_B] = sink.square_B.cpu().numpy()
    return product_NE, square_N
