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
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64
from grasp.errors import ModelError, SettingsError
from grasp.features.extract import Reference
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example, LayerSet, PerExample, UntakenLayerError, Use, layers_of
from grasp.seeds import stream
from grasp.settings import FeatureSettings

COORDINATES = 2_000_000  # of 106 million of SmolLM2-135M give what all give, to .02 of LDS
CPU_SHARE, GPU_SHARE = 8, 2  # of the tokens of a forward batch; a backward pass holds what every layer received


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

    def take(self, left_BXT: Tensor, right_BYT: Tensor) -> Tensor:
        """The coordinates taken of every row's gradient, (B, size), of factors as `by_member` lays them."""
        return torch.matmul(_dealt(left_BXT, self.left_GR), _dealt(right_BYT, self.right_GC).mT).flatten(1)


def by_member(factor_BTX: Tensor) -> Tensor:
    """(B, X + 1, T): the positions of each output (or input) beside each other, and of one more that is all zeros."""
    return F.pad(factor_BTX.mT, (0, 0, 0, 1))


def _dealt(factor_BXT: Tensor, member_GR: Tensor) -> Tensor:
    """(B, G, R, T): a group's members beside each other."""
    chosen_BMT = factor_BXT.index_select(1, member_GR.flatten())
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


@dataclass(frozen=True, slots=True)
class SampledGradients:
    """The coordinates taken of the gradients of rows or units, a batch of like lengths at a time."""

    engine: PerExample
    sample: CoordinateSample
    batch_tokens: int
    untaken: tuple[str, ...] = ()  # layers that have no gradient a row

    @classmethod
    def choose(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Choose layers and coordinates; two short rows go through the model.

        Raises:
            ModelError: no layer can be taken; the model is a classifier.
            SettingsError: more coordinates than there are.
        """
        if not isinstance(model, ReferenceModel):
            raise ModelError("features.gradient_match: got true, but the model is a classifier; expected a causal LM")
        engine, untaken = _engine(model)
        wanted, there = settings.gradient_coordinates, engine.layers.size
        if isinstance(wanted, int) and wanted > there:
            raise SettingsError(f"features.gradient_coordinates: got {wanted:,}, its layers have {there:,}; say all")
        some = there if model.frozen else COORDINATES  # an adapter is small, and all that is trained
        count = min(some if wanted is None else there if wanted == "all" else wanted, there)
        sample = CoordinateSample.draw(engine.layers, count, settings.seed, model.device)
        share = CPU_SHARE if model.device.type == "cpu" else GPU_SHARE
        return cls(engine, sample, max(1, model.batch_tokens // share), untaken)

    def describe(self) -> str:
        """One line: how much of the model is looked at."""
        layers = self.engine.layers
        frozen = ", frozen ones left out" * bool(self.engine.model.frozen)
        named = f"; no gradient for each row, so left out: {', '.join(self.untaken[:3])} ({len(self.untaken)} in all)"
        taken = f"gradients of {self.sample.size:,} among {layers.size:,} parameters of {len(layers.blocks)} layers"
        return taken + frozen + named * bool(self.untaken)

    def batches(self, examples: Sequence[Example]) -> list[NDArray[np.int64]]:
        """Which examples go through the model together."""
        return self.engine.batches(examples, self.batch_tokens)

    def compute(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """The coordinates of each example's gradient, (B, K), and the hidden states that the head sees, (B, L, H)."""
        model = self.engine.model
        taken_BK = torch.zeros(len(examples), self.sample.size, dtype=self.engine.work, device=model.device)
        last: tuple[Tensor, Tensor] | None = None  # what a layer received; q, k and v receive the same, one by one

        def consume(number: int, use: Use, rows: slice) -> None:
            nonlocal last
            if last is None or last[0] is not use.right:
                last = use.right, by_member(use.right)
            tile = self.sample.tiles[number]
            taken_BK[rows, tile.start : tile.start + tile.size] += tile.take(by_member(use.left), last[1])

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
            product_LE[rows] += tile.take(by_member(use.left), by_member(use.right)) @ side.T

        self.engine.run([example], consume, by_position=True)
        return np.asarray(product_LE.double().cpu().numpy())


def _engine(model: ReferenceModel) -> tuple[PerExample, tuple[str, ...]]:
    """The body without what is frozen, and without layers that have no gradient a row, which are found one by one.

    Embeddings and head are large, and token and input look at them. Of a small model they hold most there is to see.
    """
    root = model.model
    tables = [module for module in root.modules() if isinstance(module, nn.Embedding)]
    outside = {id(parameter) for module in (*tables, model.head.linear) for parameter in module.parameters()}
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    chosen = {name for number, name in names.items() if number not in outside} - set(model.frozen)
    untaken: list[str] = []
    while chosen:
        try:
            return PerExample(model, layers_of(model, chosen)), tuple(untaken)
        except UntakenLayerError as err:
            untaken.append(err.layer)
            rest = chosen.difference(
                names[id(parameter)]
                for name, parameter in root.named_parameters(remove_duplicate=False)
                if f"{name}.".startswith(f"{err.layer}.")
            )
            if rest == chosen:
                raise
            chosen = rest
    raise ModelError(
        f"{type(root).__name__}: no layer has a gradient for each row ({', '.join(untaken[:3])}); say --match forward"
    )


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


def gradient_preconditioner(square_K: F64, weight_K: F64, damping: float) -> F64:
    """What products of coordinates are multiplied by, (K,): n / (v + damping mean v), the mean over all parameters.

    A coordinate in which no gradient is ever other than 0 counts like any other, with v = 0.
    """
    mean = float((square_K * weight_K).sum() / weight_K.sum())
    return weight_K / (square_K + damping * mean) if mean > 0 else weight_K
