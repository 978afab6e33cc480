r"""Gradient relevance: would a step on the row and a step on the unit move the weights the same way? All layers.

    a_{i,e} = n_i sum_j g_ij g_ej / (v_j + damping mean v),    v_j = E_i g_ij^2

g_i is the gradient of row i's mean loss over its n_i tokens with loss, g_e that of unit e's, both at the model before
it is trained further, and v the second moment over rows. A row counts with all of its loss, as in training, where a
batch's loss is the mean over its tokens: a row of a hundred moves the model more than one of two. No projection: the
cosine of a row and a unit is tiny, and k random numbers drown it below some 10^5. Instead j runs over a sample of the
coordinates of each matrix, each counted 1 / (share sampled) times.

The sample. The gradient of a matrix is a sum over positions of outer products delta_t a_t^T. Its X outputs and its Y
inputs are each dealt at random into n groups, and coordinate (x, y) is taken where x and y are in groups of the same
number. So a share of 1/n is taken, in n tiles that are small matrix products, and every output and every input is in
one tile. A coordinate is taken with probability 1/n: counted n times, sums over the sample are unbiased. For a single
position, with u_g and w_g what group g adds to <delta, delta'> and <a, a'>, the estimate of sum_g u_g sum_h w_h is
n sum_g u_g w_g: its error has the product of the two spreads alone, where coordinates drawn one by one add each.

Shape letters: B rows of a batch, T positions, X outputs, Y inputs, G groups, R and C members of a group, K coordinates
of the whole sample, E units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.models.causal_lm import batches
from grasp.models.gradients.factors import Use
from grasp.models.gradients.layers import LayerSet
from grasp.models.gradients.per_example import Example, PerExample
from grasp.seeds import stream

F64 = NDArray[np.float64]
CHUNK = 1 << 17  # coordinates that are multiplied at once: units' sides are widened from 16 bits as they are used


@dataclass(frozen=True, slots=True)
class Tiles:
    """The coordinates of one block that are taken: member r of group g with member c of the same group."""

    left_GR: Tensor  # int64, outputs; X where a group has fewer
    right_GC: Tensor  # int64, inputs; Y where a group has fewer
    start: int  # its first coordinate in the whole sample

    @property
    def size(self) -> int:
        return self.left_GR.numel() * self.right_GC.shape[1]

    @property
    def weight(self) -> float:
        """What a coordinate counts for: 1 / the share taken."""
        return float(len(self.left_GR))

    def take(self, use: Use) -> Tensor:
        """The coordinates taken of every row's gradient, (B, size)."""
        left_BGRT, right_BGCT = _dealt(use.left, self.left_GR), _dealt(use.right, self.right_GC)
        return torch.matmul(left_BGRT, right_BGCT.mT).flatten(1)


def _dealt(factor_BTX: Tensor, member_GR: Tensor) -> Tensor:
    """(B, G, R, T): a group's members beside each other; zeros where a group has fewer."""
    width = factor_BTX.shape[2]
    factor_BXT = factor_BTX.mT
    if int(member_GR.max()) == width:
        factor_BXT = F.pad(factor_BXT, (0, 0, 0, 1))
    chosen_BMT = factor_BXT.contiguous().index_select(1, member_GR.flatten())
    return chosen_BMT.view(len(chosen_BMT), *member_GR.shape, -1)


@dataclass(frozen=True, slots=True)
class CoordinateSample:
    """Which coordinates of all blocks are taken, in the order of the blocks."""

    tiles: tuple[Tiles, ...]
    weight_K: Tensor  # what each counts for, float32

    @classmethod
    def draw(cls, layers: LayerSet, count: int, seed: int, device: torch.device) -> Self:
        """About `count` coordinates, the same share of every matrix, and those of norms whole.

        The draw depends on the seed and on a block's name and shape alone.
        """
        tiles, start = [], 0
        matrices = sum(block.size for block in layers.blocks if block.left > 1)
        whole = layers.size - matrices
        groups = max(1, round(matrices / max(1, count - whole)))
        for block in layers.blocks:
            own = max(1, min(groups, block.left, block.right))
            left_GR = _deal(block.left, own, seed, block.name, "outputs")
            right_GC = _deal(block.right, own, seed, block.name, "inputs")
            tiles.append(Tiles(left_GR.to(device), right_GC.to(device), start))
            start += tiles[-1].size
        weight_K = torch.cat([torch.full((tile.size,), tile.weight) for tile in tiles])
        return cls(tuple(tiles), weight_K.to(device))

    @property
    def size(self) -> int:
        return len(self.weight_K)


def _deal(size: int, groups: int, seed: int, *purpose: str) -> Tensor:
    """Numbers up to `size` dealt into groups of one size, (G, R); empty places are dealt as well, as number `size`.

    So two numbers of different sides meet in a group with a probability of exactly 1 / G.
    """
    if groups == 1:
        return torch.arange(size)[None]
    members = -(-size // groups)
    place = np.full(groups * members, size)
    place[:size] = np.arange(size)
    return torch.from_numpy(stream(seed, "gradient", *purpose).permutation(place).reshape(groups, members))


class SampledGradients:
    """The coordinates taken of the gradients of rows or units, a batch of like lengths at a time."""

    def __init__(self, engine: PerExample, sample: CoordinateSample) -> None:
        self.engine, self.sample = engine, sample

    @property
    def side_dtype(self) -> torch.dtype:
        """Of the units' side: 16 bits, but where the model has 64."""
        return torch.float64 if self.engine.work == torch.float64 else torch.bfloat16

    def of(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """The coordinates of each example's gradient, (B, K), and the hidden states that the head sees, (B, L, H)."""
        model = self.engine.model
        taken_BK = torch.zeros(len(examples), self.sample.size, dtype=self.engine.work, device=model.device)

        def consume(number: int, use: Use, rows: slice) -> None:
            tile = self.sample.tiles[number]
            taken_BK[rows, tile.start : tile.start + tile.size] += tile.take(use)

        outcome = self.engine.run(examples, consume)
        return taken_BK, outcome.hidden_BLH

    def by_position(self, example: Example, side_EK: Tensor) -> F64:
        """What each position's own delta and input add to the products with E units, (L, E); they add up to a_i."""
        product_LE = torch.zeros(
            len(example.input_ids), len(side_EK), dtype=self.engine.work, device=self.engine.model.device
        )

        def consume(number: int, use: Use, rows: slice) -> None:
            tile = self.sample.tiles[number]
            side = side_EK[:, tile.start : tile.start + tile.size].to(product_LE.device, product_LE.dtype)
            product_LE[rows] += tile.take(use) @ side.T

        self.engine.run([example], consume, by_position=True)
        return np.asarray(product_LE.double().cpu().numpy())


class SquareSums:
    """Sums of squares of gradients over rows, float64. Parts merge; their order decides the last digits."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.square_K: F64 = np.zeros(size)

    def add(self, taken_BK: Tensor) -> None:
        self.count += len(taken_BK)
        self.square_K += taken_BK.double().square().sum(dim=0).cpu().numpy()

    def merge(self, other: "SquareSums") -> None:
        self.count += other.count
        self.square_K += other.square_K

    def mean(self) -> F64:
        """v, (K,); at least one row. It has the digits of float32, in which it is kept, so that both are the same."""
        return (self.square_K / self.count).astype(np.float32).astype(np.float64)


def preconditioner(square_K: F64, weight_K: F64, damping: float) -> F64:
    """What products of coordinates are multiplied by, (K,): n / (v + damping mean v), the mean over all parameters.

    A coordinate in which no gradient is ever other than 0 counts like any other, with v = 0.
    """
    mean = float((square_K * weight_K).sum() / weight_K.sum())
    return weight_K / (square_K + damping * mean) if mean > 0 else weight_K


@dataclass(frozen=True, slots=True)
class GradientTargets:
    """The questions' side of the kernel: preconditioned coordinates of each unit's gradient, and their own product."""

    side_EK: Tensor
    own_E: F64  # relevance of each unit to itself


def prepare_gradients(
    gradients: SampledGradients, units: Sequence[Example], precondition_K: F64, batch_tokens: int, side_EK: Tensor
) -> GradientTargets:
    """Run the model over the units, there and back, and fold the preconditioner into their gradients.

    Args:
        side_EK: where they are written.

    bfloat16 keeps 8 digits (binary) of each of some 10^6 terms whose errors are independent: the sum is off by less
    than 2^-8 of the root of its terms' squares, which is far under what another sample of coordinates moves.
    """
    engine, own_E = gradients.engine, np.zeros(len(units))
    factor_K = torch.from_numpy(precondition_K).to(engine.model.device, engine.work)
    for index_B in example_batches(units, batch_tokens):
        taken_BK, _ = gradients.of([units[int(e)] for e in index_B])
        side_BK = taken_BK * factor_K
        own_E[index_B] = (taken_BK.double() * side_BK.double()).sum(dim=1).cpu().numpy()
        side_EK[torch.from_numpy(index_B).to(side_EK.device)] = side_BK.to(side_EK.device, side_EK.dtype)
    return GradientTargets(side_EK, own_E)


def gradient_relevance(targets: GradientTargets, taken_BK: Tensor) -> Tensor:
    """a_{i,e} of B rows and all units, (B, E). A row whose gradient is not finite gets 0 for every unit."""
    product_BE = taken_BK.new_zeros(len(taken_BK), len(targets.side_EK))
    for start in range(0, taken_BK.shape[1], CHUNK):
        some = slice(start, start + CHUNK)
        product_BE += taken_BK[:, some] @ targets.side_EK[:, some].to(taken_BK.device, taken_BK.dtype).T
    return torch.where(product_BE.isfinite().all(dim=1, keepdim=True), product_BE, 0.0)


def example_batches(examples: Sequence[Example], batch_tokens: int) -> list[NDArray[np.int64]]:
    """Which examples go through the model together, alike in length."""
    return batches(np.array([len(example.input_ids) for example in examples], dtype=np.int64), batch_tokens)
