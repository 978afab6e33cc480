r"""A sample of the coordinates of gradients of all layers, so that the gradient of a row fits in memory.

Gradients are not projected: the cosine of a row and a unit is tiny, and the error of a projection to fewer than some
10^5 numbers exceeds it. Instead a sample of the coordinates of each matrix is used, each weighted by
1 / (sampled share).

The gradient of a matrix is a sum over positions of outer products delta_t a_t^T. Its X outputs and its Y
inputs are each divided at random into n groups, and coordinate (x, y) is sampled if x and y are in groups of the same
number. The sampled share is 1/n, in n tiles that are small matrix products, and every output and every input is in one
tile. A coordinate is sampled with probability 1/n, so that sums over the sample, times n, are unbiased. For a single
position, with u_g and w_g the terms of group g in <delta, delta'> and <a, a'>, the estimate of sum_g u_g sum_h w_h is
n sum_g u_g w_g: its error is proportional to the product of the standard deviations of u_g and
w_g, while that of independently sampled coordinates is proportional to their sum.
Start with `SampledGradients`.

Shape letters: B rows of a batch, T positions, X outputs, Y inputs, G groups, R and C members of a group, K coordinates
of the whole sample, E units.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64, I64
from grasp.errors import ModelError, SettingsError
from grasp.models.batch import Batch
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Reference
from grasp.models.gradients import (
    Example,
    GradientFactors,
    LayerSet,
    PerExample,
    UnsupportedLayerError,
    layers_of,
)
from grasp.seeds import stream
from grasp.settings import FeatureSettings

COORDINATES = 2_000_000  # of the 134 million of SmolLM2-135M: LDS within .02 of that of all coordinates
CPU_DIVISOR, GPU_DIVISOR = 8, 2  # of the forward batch size: a backward pass stores the inputs of every layer
MAX_MEMORY_BYTES = 4 << 30  # of the gradients of units; larger ones are stored in a file, which is slower


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sampled coordinates of one block: member r of group g with member c of the same group."""

    left_GR: Tensor  # int64, outputs; X is padding
    right_GC: Tensor  # int64, inputs; Y is padding
    start: int  # position of its first coordinate in the sample
    place_X: Tensor  # int64, place g R + r of each output

    @property
    def size(self) -> int:
        return self.left_GR.numel() * self.right_GC.shape[1]

    @property
    def columns(self) -> slice:
        """Return the positions of its coordinates in the sample."""
        return slice(self.start, self.start + self.size)

    @property
    def weight(self) -> float:
        """Return the weight of a coordinate, 1 / (sampled share)."""
        return float(len(self.left_GR))

    def sampled_gradient(self, left_BXT: Tensor, right_BYT: Tensor) -> Tensor:
        """Return the sampled coordinates of each row's gradient, (B, size), given factors laid out by `by_member`.

        The gradient is sum_t delta_t a_t^T. Within a group all pairs of an output and an input are sampled, so the
        coordinates of the group are one matrix product over positions, and those of all groups a batched one.
        """
        left_BGRT, right_BGCT = (  # gather the members of a group, so that they are adjacent
            factor_BXT.index_select(1, member_GR.flatten()).view(len(factor_BXT), *member_GR.shape, -1)
            for factor_BXT, member_GR in ((left_BXT, self.left_GR), (right_BYT, self.right_GC))
        )
        return torch.matmul(left_BGRT, right_BGCT.mT).flatten(1)

    def sampled_embedding(self, token_BT: Tensor, right_BTY: Tensor) -> Tensor:
        """Return the same for one-hot left factors: position t adds its right factor to the output `token_BT`."""
        n_members, width = self.left_GR.shape[1], self.right_GC.shape[1]
        place_BT = self.place_X[token_BT]
        member_BTC = self.right_GC[torch.div(place_BT, n_members, rounding_mode="floor")]
        value_BTC = F.pad(right_BTY, (0, 1)).gather(2, member_BTC)
        coordinate_BTC = place_BT[..., None] * width + torch.arange(width, device=token_BT.device)
        gradient_BK = right_BTY.new_zeros(len(token_BT), self.size)
        return gradient_BK.scatter_add_(1, coordinate_BTC.flatten(1), value_BTC.flatten(1))


def by_member(factor_BTX: Tensor) -> Tensor:
    """Transpose a factor to (B, X + 1, T), and append a row of zeros, to which padding refers."""
    return F.pad(factor_BTX.mT, (0, 0, 0, 1))


@dataclass(frozen=True, slots=True)
class CoordinateSample:
    """The sampled coordinates of all blocks, in the order of the blocks."""

    tiles: tuple[Tiles, ...]
    weight_K: Tensor  # weight of each coordinate, float32

    @classmethod
    def draw(cls, layers: LayerSet, count: int, seed: int, device: torch.device) -> Self:
        """Sample about `count` coordinates: the same share of every matrix, and all of vectors (norms, biases).

        The sample depends only on the seed and on name and shape of each block.
        """
        tiles, start = [], 0
        matrix_size = sum(block.size for block in layers.blocks if block.left > 1)
        vector_size = layers.size - matrix_size
        n_groups = max(1, round(matrix_size / max(1, count - vector_size)))  # the sampled share is 1 / n_groups
        for block in layers.blocks:
            block_groups = max(1, min(n_groups, block.left, block.right))
            sides = []
            for width, side in ((block.left, "outputs"), (block.right, "inputs")):
                # Groups have equal sizes, and padding (number `width`) is shuffled too, so that an output and an input
                # are in the same group with probability exactly 1 / G.
                padded_width = -(-width // block_groups) * block_groups  # rounded up to a multiple
                member = np.append(np.arange(width), np.full(padded_width - width, width))
                if block_groups > 1:
                    member = stream(seed, "gradient", block.name, side).permutation(member)
                sides.append(torch.from_numpy(member.reshape(block_groups, -1)).to(device))
            tiles.append(Tiles(sides[0], sides[1], start, sides[0].flatten().argsort()[: block.left]))
            start += tiles[-1].size
        weight_K = torch.cat([torch.full((tile.size,), tile.weight) for tile in tiles])
        return cls(tuple(tiles), weight_K.to(device))

    @property
    def size(self) -> int:
        return len(self.weight_K)


# sampled coordinates of the gradients of a block, changed, (B, size)
Precondition = Callable[["SampledGradients", int, GradientFactors], Tensor]


@dataclass(frozen=True, slots=True)
class SampledGradients:
    """Compute sampled coordinates of the gradients of rows or units, in batches of similar lengths."""

    engine: PerExample
    sample: CoordinateSample
    batch_tokens: int
    skipped_layers: tuple[str, ...] = ()  # layers without per-example gradients

    @classmethod
    def choose(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Choose layers and coordinates; two short rows are passed through the model.

        The layers are all that are not frozen. Layers without per-example gradients are detected one by one.
        """
        if not isinstance(model, ReferenceModel):
            raise ModelError("features.kernels: got gradient, which needs a causal LM")
        root = model.model
        # `named_parameters` lists a parameter that several modules share once, under its first name.
        name_of = {id(parameter): name for name, parameter in root.named_parameters()}
        trained = set(name_of.values()) - set(model.frozen)
        engine: PerExample | None = None
        skipped_layers: list[str] = []
        while trained and engine is None:
            try:
                engine = PerExample(model, layers_of(model, trained))
            except UnsupportedLayerError as err:
                skipped_layers += err.layers
                n_before, prefixes = len(trained), tuple(f"{layer}." for layer in err.layers)
                for name, parameter in root.named_parameters(remove_duplicate=False):
                    if f"{name}.".startswith(prefixes):
                        trained.discard(name_of[id(parameter)])
                if len(trained) == n_before:  # nothing was removed, so that another attempt would fail again
                    raise
        if engine is None:
            raise ModelError(
                f"{type(root).__name__}: no layer has per-example gradients ({', '.join(skipped_layers[:3])}); build "
                "without: --set features.kernels=[output_layer,embedding,hidden_sketch,residual_sketch]"
            )
        requested, n_parameters = settings.gradient_coordinates, engine.layers.size
        if isinstance(requested, int) and requested > n_parameters:
            raise SettingsError(
                f"features.gradient_coordinates: got {requested:,}, its layers have {n_parameters:,}; use all"
            )
        default_count = n_parameters if model.frozen else COORDINATES  # an adapter is small, so all of it is used
        count = min(
            default_count if requested is None else n_parameters if requested == "all" else requested, n_parameters
        )
        sample = CoordinateSample.draw(engine.layers, count, settings.seed, model.device)
        divisor = CPU_DIVISOR if model.device.type == "cpu" else GPU_DIVISOR
        return cls(engine, sample, max(1, model.batch_tokens // divisor), tuple(skipped_layers))

    def describe(self) -> str:
        """Describe the sample in one line."""
        layers = self.engine.layers
        summary = f"gradients of {self.sample.size:,} of {layers.size:,} parameters in {len(layers.blocks)} layers"
        if self.engine.model.frozen:
            summary += ", without frozen ones"
        if self.skipped_layers:
            named = ", ".join(self.skipped_layers[:3])
            summary += f"; skipped layers without per-example gradients: {named} ({len(self.skipped_layers)} in total)"
        return summary

    def batches(self, examples: Sequence[Example]) -> list[I64]:
        """Return the indices of the examples of each batch."""
        return self.engine.batches(examples, self.batch_tokens)

    def compute(
        self, examples: Sequence[Example], precondition: Precondition | None = None, top_k: int | None = None
    ) -> tuple[Tensor, Tensor, Batch | None]:
        """Return the coordinates of each example's gradient, (B, K), also changed, (B, K), and features.

        The second tensor has the coordinates that `precondition` returns; without it, it is empty. Features are those
        of `PerExample.run` with `top_k`.
        """
        gradient_BK = self.zeros(len(examples))
        changed_BK = self.zeros(len(examples) if precondition is not None else 0)

        def add(number: int, factors: GradientFactors, rows: slice) -> None:
            columns = self.sample.tiles[number].columns
            gradient_BK[rows, columns] += self.sampled(number, factors)
            if precondition is not None:
                changed_BK[rows, columns] += precondition(self, number, factors)

        result = self.engine.run(examples, add, top_k=top_k)
        return gradient_BK, changed_BK, result.features

    def zeros(self, n_rows: int) -> Tensor:
        """Return zeros for the coordinates of rows, (n_rows, K), on the device of the model."""
        return torch.zeros(n_rows, self.sample.size, dtype=self.engine.work, device=self.engine.model.device)

    def sampled(self, number: int, factors: GradientFactors) -> Tensor:
        """Return the sampled coordinates of the gradients of a block, (B, size)."""
        tile = self.sample.tiles[number]
        if factors.one_hot:
            return tile.sampled_embedding(factors.left, factors.right)
        return tile.sampled_gradient(by_member(factors.left), by_member(factors.right))

    def by_position(self, example: Example, unit_EK: Tensor) -> F64:
        """Return the contribution of each position to the relevance to E units, (L, E); the sum over L is a_ie / n_i.

        Args:
            example: the row.
            unit_EK: preconditioned coordinates of the units.
        """
        product_LE = torch.zeros(
            len(example.input_ids), len(unit_EK), dtype=self.engine.work, device=self.engine.model.device
        )

        def add(number: int, factors: GradientFactors, rows: slice) -> None:
            unit_columns = unit_EK[:, self.sample.tiles[number].columns].to(product_LE.device, product_LE.dtype)
            product_LE[rows] += self.sampled(number, factors) @ unit_columns.T

        self.engine.run([example], add, by_position=True)
        return np.asarray(product_LE.double().cpu().numpy())


def allocate_unit_gradients(n_units: int, gradients: SampledGradients) -> Tensor:
    """Allocate the units' gradients, (n_units, K), in memory, or in an unlinked memory-mapped temporary file.

    In memory they have the dtype of the rows' gradients if they fit, so that they need not be converted per batch.

    Args:
        n_units: number of units.
        gradients: the sample of coordinates, and the device.
    Raises:
        SettingsError: neither memory nor the directory of temporary files has enough space.
    """
    shape, work = (n_units, gradients.sample.size), gradients.engine.work
    stored, device = work if work == torch.float64 else torch.bfloat16, gradients.engine.model.device
    count = n_units * gradients.sample.size
    for dtype in (work, stored) if device.type == "cpu" else (stored,):
        if count * dtype.itemsize <= MAX_MEMORY_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
    size, free = count * stored.itemsize, shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise SettingsError(
            f"features.gradient_coordinates: {n_units:,} units at {gradients.sample.size:,} coordinates need "
            f"{size / 2**30:.1f} GiB, {tempfile.gettempdir()} has {free / 2**30:.1f} free; use fewer coordinates or "
            "units, or set TMPDIR"
        )
    handle, name = tempfile.mkstemp(prefix="grasp-gradients-")
    try:
        return torch.from_file(name, shared=True, size=count, dtype=stored).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)  # the mapping keeps the data until the process ends
