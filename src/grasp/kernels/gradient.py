r"""The inner product of preconditioned gradients of all layers, on a sample of coordinates.

    a_{i,e} = n_i sum_j g_ij g_ej / (v_j + damping mean v),    v_j = E_i g_ij^2

g_i is the gradient of row i's mean loss over its n_i tokens with loss, g_e that of unit e, both at the model before it
is trained further, and v the second moment over rows. The factor n_i makes the sum of a row's losses count, as in
training, where the loss of a batch is the mean over its tokens: a row of a hundred tokens changes the model more than a
row of two. Gradients are not projected: the cosine of a row and a unit is tiny, and the error of a projection to fewer
than some 10^5 numbers exceeds it. Instead j runs over a sample of the coordinates of each matrix, each weighted by
1 / (sampled share).

The sample. The gradient of a matrix is a sum over positions of outer products delta_t a_t^T. Its X outputs and its Y
inputs are each divided at random into n groups, and coordinate (x, y) is sampled if x and y are in groups of the same
number. The sampled share is 1/n, in n tiles that are small matrix products, and every output and every input is in one
tile. A coordinate is sampled with probability 1/n, so that sums over the sample, times n, are unbiased. For a single
position, with u_g and w_g the terms of group g in <delta, delta'> and <a, a'>, the estimate of sum_g u_g sum_h w_h is
n sum_g u_g w_g: its error is proportional to the product of the standard deviations of u_g and
w_g, while that of independently sampled coordinates is proportional to their sum.
Start with `SampledGradients` and `Gradient`.

Shape letters: B rows of a batch, T positions, X outputs, Y inputs, G groups, R and C members of a group, K coordinates
of the whole sample, E units.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64, I64
from grasp.errors import ModelError, SettingsError
from grasp.kernels.kernel import TYPICAL_ROW_TOKENS, Batch, CorpusMoments, Kernel
from grasp.kernels.whitening import Moments
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Reference
from grasp.models.gradients import Example, GradientFactors, LayerSet, PerExample, UnsupportedLayerError, layers_of
from grasp.seeds import stream
from grasp.settings import FeatureSettings

COORDINATES = 2_000_000  # of the 106 million of SmolLM2-135M: LDS within .02 of that of all coordinates
CPU_DIVISOR, GPU_DIVISOR = 8, 2  # of the forward batch size: a backward pass stores the inputs of every layer
MAX_MEMORY_BYTES = 4 << 30  # of the gradients of units; larger ones are stored in a file, which is slower
MEAN_NAME = "gradient.side"  # name of the array that `unit_means` returns
CHUNK_COORDINATES = 1 << 17  # coordinates that are widened and multiplied at once


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sampled coordinates of one block: member r of group g with member c of the same group."""

    left_GR: Tensor  # int64, outputs; X is padding
    right_GC: Tensor  # int64, inputs; Y is padding
    start: int  # position of its first coordinate in the sample

    @property
    def size(self) -> int:
        return self.left_GR.numel() * self.right_GC.shape[1]

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
            tiles.append(Tiles(sides[0], sides[1], start))
            start += tiles[-1].size
        weight_K = torch.cat([torch.full((tile.size,), tile.weight) for tile in tiles])
        return cls(tuple(tiles), weight_K.to(device))

    @property
    def size(self) -> int:
        return len(self.weight_K)


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

        The layers are those of the body that are not frozen. Embeddings and head are covered by the kernels `embedding`
        and `output_layer`, and would dominate the sample of a small model. Layers without per-example gradients are
        detected one by one.
        """
        if not isinstance(model, ReferenceModel):
            raise ModelError("features.kernels: got gradient, which needs a causal LM")
        root = model.model
        embeddings = [module for module in root.modules() if isinstance(module, nn.Embedding)]
        excluded = {id(parameter) for module in (*embeddings, model.head.linear) for parameter in module.parameters()}
        # `named_parameters` lists a parameter that several modules share once, under its first name.
        name_of = {id(parameter): name for name, parameter in root.named_parameters()}
        trained = {name for key, name in name_of.items() if key not in excluded} - set(model.frozen)
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
                f"{type(root).__name__}: no layer has per-example gradients ({', '.join(skipped_layers[:3])}); use "
                "--rule forward"
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
        summary = (
            f"gradients of {self.sample.size:,} of {layers.size:,} parameters in {len(layers.blocks)} layers of the "
            "body, without embeddings and output layer"
        )
        if self.engine.model.frozen:
            summary += ", without frozen ones"
        if self.skipped_layers:
            named = ", ".join(self.skipped_layers[:3])
            summary += f"; skipped layers without per-example gradients: {named} ({len(self.skipped_layers)} in total)"
        return summary

    def batches(self, examples: Sequence[Example]) -> list[I64]:
        """Return the indices of the examples of each batch."""
        return self.engine.batches(examples, self.batch_tokens)

    def compute(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Return the coordinates of each example's gradient, (B, K), and the inputs of the head, (B, L, H)."""
        model = self.engine.model
        gradient_BK = torch.zeros(len(examples), self.sample.size, dtype=self.engine.work, device=model.device)
        # The input of the last layer and its transpose: the projections q, k and v share theirs, transposed once.
        cached_input: tuple[Tensor, Tensor] | None = None

        def consume(number: int, factors: GradientFactors, rows: slice) -> None:
            nonlocal cached_input
            if cached_input is None or cached_input[0] is not factors.right:
                cached_input = factors.right, by_member(factors.right)
            tile = self.sample.tiles[number]
            gradient_BK[rows, tile.start : tile.start + tile.size] += tile.sampled_gradient(
                by_member(factors.left), cached_input[1]
            )

        result = self.engine.run(examples, consume)
        return gradient_BK, result.hidden_BLH

    def by_position(self, example: Example, unit_EK: Tensor) -> F64:
        """Return the contribution of each position to the relevance to E units, (L, E); the sum over L is a_ie / n_i.

        Args:
            example: the row.
            unit_EK: preconditioned coordinates of the units.
        """
        product_LE = torch.zeros(
            len(example.input_ids), len(unit_EK), dtype=self.engine.work, device=self.engine.model.device
        )

        def consume(number: int, factors: GradientFactors, rows: slice) -> None:
            tile = self.sample.tiles[number]
            unit_columns = unit_EK[:, tile.start : tile.start + tile.size].to(product_LE.device, product_LE.dtype)
            product_LE[rows] += (
                tile.sampled_gradient(by_member(factors.left), by_member(factors.right)) @ unit_columns.T
            )

        self.engine.run([example], consume, by_position=True)
        return np.asarray(product_LE.double().cpu().numpy())


class GradientSquares(Moments):
    """Second moments of the sampled coordinates of gradients, over rows whose gradient is finite; float64."""

    of_rows = True

    def __init__(self, corpus: CorpusMoments) -> None:
        self.count = 0
        self._square_K: F64 | None = None
        self._loaded: F64 | None = None

    def observe(self, batch: Batch) -> None:
        assert batch.gradient_BK is not None
        finite_BK = batch.gradient_BK[batch.gradient_BK.isfinite().all(dim=1)]
        self._add(len(finite_BK), finite_BK.double().square().sum(dim=0).cpu().numpy())

    def merge(self, other: Self) -> None:
        if other._square_K is not None:
            self._add(other.count, other._square_K)

    def _add(self, count: int, square_K: F64) -> None:
        self.count += count
        self._square_K = square_K if self._square_K is None else self._square_K + square_K

    @property
    def value(self) -> F64:
        """Return v, (K,), rounded to float32, in which it is stored, so that a resumed build has the same digits.

        Raises:
            ModelError: no row has a finite gradient.
        """
        if self._loaded is not None:
            return self._loaded
        if self._square_K is None or not self.count:
            raise ModelError(
                "no row of the sample has a finite gradient; use --dtype bfloat16 or float32, or --rule forward"
            )
        return (self._square_K / self.count).astype(np.float32).astype(np.float64)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"gradient.square": self.value.astype(np.float32)}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._loaded = np.asarray(arrays["gradient.square"], dtype=np.float64)


def gradient_preconditioner(square_K: F64, weight_K: F64, damping: float) -> F64:
    """Return the preconditioner, (K,): n / (v + damping mean v), with n the weight of a coordinate.

    The weights make the mean of v over the sample an estimate of its mean over all parameters. A coordinate whose
    gradients are all 0 has v = 0, and the damping keeps its factor finite.

    Args:
        square_K: second moments v of the sampled coordinates.
        weight_K: weights n, 1 / (sampled share).
        damping: relative to the mean of v; without a unit.
    """
    mean = float((square_K * weight_K).sum() / weight_K.sum())
    return weight_K / (square_K + damping * mean) if mean > 0 else weight_K


class Gradient(Kernel):
    """The kernel of the gradients of all layers. Coordinates of rows and units are rounded to bfloat16.

    bfloat16 has 8 binary digits. The rounding errors of some 10^6 terms are independent, so that the error of the sum
    is below 2^-8 of the root of the sum of squares of its terms, far below the error of sampling coordinates.
    """

    name = "gradient"
    needs = "backward"
    moment_types = (GradientSquares,)

    def prepare(self, units: Batch) -> None:
        """Precondition the units' coordinates in place, since a copy would double the memory."""
        assert units.gradient_BK is not None
        assert units.sampled is not None
        self.sampled, self.unit_EK = units.sampled, units.gradient_BK
        square_K, sample = self.moments(GradientSquares).value, self.sampled.sample
        assert len(square_K) == sample.size
        precondition_K = gradient_preconditioner(
            square_K, sample.weight_K.double().cpu().numpy(), self.settings.gradient_damping
        )
        work = self.sampled.engine.work
        factor_K = torch.from_numpy(precondition_K).to(self.model.device, work)
        self._self_relevance_E = np.zeros(units.n_rows)
        for e in range(units.n_rows):
            gradient_K = self.unit_EK[e].to(factor_K.device, work)
            unit_K = gradient_K * factor_K
            self._self_relevance_E[e] = float(gradient_K.double() @ unit_K.double())
            rounded_K = unit_K if work == torch.float64 else unit_K.bfloat16()
            self.unit_EK[e] = rounded_K.to(self.unit_EK.device, self.unit_EK.dtype)

    def unit_means(self, columns_E: I64) -> dict[str, NDArray[Any]]:
        """Return the mean of the preconditioned coordinates of some units, (K,), in bfloat16 as unsigned 16-bit."""
        unit_K = torch.zeros(self.unit_EK.shape[1], dtype=torch.float32)
        for e in columns_E.tolist():
            unit_K += self.unit_EK[e].float().cpu()
        return {MEAN_NAME: (unit_K / len(columns_E)).bfloat16().view(torch.uint16).numpy()}

    def prepare_mean(self, sampled: "SampledGradients", arrays: Mapping[str, NDArray[Any]]) -> None:
        """Use the mean of units that `unit_means` returned as the only unit; replaces `prepare`."""
        self.sampled = sampled
        self.unit_EK = torch.from_numpy(arrays[MEAN_NAME]).view(torch.bfloat16)[None].to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        """Return the relevance of rows, (B, E); a row without a finite gradient gets 0 for every unit."""
        assert batch.gradient_BK is not None
        work, device = self.sampled.engine.work, self.model.device
        product_BE = torch.zeros(batch.n_rows, len(self.unit_EK), dtype=work, device=device)
        # Widen a chunk of coordinates at a time: sums in bfloat16 lose digits, and a full copy doubles the memory.
        for start in range(0, batch.gradient_BK.shape[1], CHUNK_COORDINATES):
            gradient_BK, unit_EK = (
                values[:, start : start + CHUNK_COORDINATES].to(device, work)
                for values in (batch.gradient_BK, self.unit_EK)
            )
            product_BE += gradient_BK @ unit_EK.T
        product_BE *= batch.positions_B.to(device)[:, None]  # n_i: gradient of the sum of the losses, not of their mean
        finite_B1 = product_BE.isfinite().all(dim=1, keepdim=True)
        return torch.where(finite_B1, product_BE, 0.0).float()

    def self_relevance(self, units: Batch) -> F64:
        return self._self_relevance_E * TYPICAL_ROW_TOKENS  # n_i of a typical row, in place of that of a unit


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
