"""Projected gradients of examples, K features each, from one forward and one backward pass.

Start with `Featurizer`.

Shape letters: N examples, B of them in a batch, K projected width, D parameters covered, X, Y a block's widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F32, F64
from grasp.baselines.gradients.projection import Form, Projection
from grasp.baselines.gradients.queries import Transform
from grasp.baselines.gradients.sinks import MatrixSink, TakeMatrix, all_blocks
from grasp.errors import ModelError
from grasp.models.gradients import Example, GradientFactors, Output, PerExample


@dataclass(frozen=True, slots=True)
class Features:
    """Features and losses of examples."""

    value_NK: F32  # (blocks, N, K) if blocks are projected separately
    loss_N: F64  # nats per label
    doubt_N: F64  # mean of 1 - p of the true label


class ProjectionSink:
    """Projects gradients, summed over blocks or per block."""

    def __init__(self, projection: Projection, examples: int, *, per_block: bool = False) -> None:
        self._projection, self._per_block = projection, per_block
        self._out = projection.zeros(examples, per_block)

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        out = self._out[number] if self._per_block else self._out
        self._projection.add(number, use, out[rows])

    def finish(self) -> Tensor:
        return self._out


class WholeSink:
    """Forms whole gradients, and returns the features that `take` writes to `out` for a block and some examples."""

    def __init__(self, engine: PerExample, out: Tensor, take: TakeMatrix) -> None:
        self._matrices, self._out = MatrixSink(engine, all_blocks(engine), take), out

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        self._matrices(number, use, rows)

    def finish(self) -> Tensor:
        self._matrices.finish()
        return self._out


@dataclass(frozen=True, slots=True)
class Featurizer:
    """Computes features of examples: a gradient engine with an optional transform and projection."""

    engine: PerExample
    projection: Projection | None  # None: whole gradients
    transform: Transform | None = None
    per_block: bool = False

    @classmethod
    def with_projection(
        cls,
        engine: PerExample,
        width: int,
        *,
        seed: int,
        tokens: int,
        form: Form = "auto",
        transform: Transform | None = None,
        per_block: bool = False,
    ) -> Self:
        """Create a featurizer with a random projection to `width` features; see `Projection` for the arguments."""
        projection = Projection(
            engine.layers.blocks,
            width,
            seed=seed,
            tokens=tokens,
            form=form,
            device=engine.model.device,
            dtype=engine.work,
        )
        return cls(engine, projection, transform, per_block)

    def features(self, examples: Sequence[Example], output: Output = "loss") -> Features:
        """Compute the features of examples, in order.

        Raises:
            ModelError: a gradient is not finite; the message names the example.
        """
        per_block = self.per_block and self.projection is not None
        value: F32 | None = None
        loss_N, doubt_N = np.zeros(len(examples)), np.zeros(len(examples))
        for index_B in self.engine.batches(examples):
            sink = self._sink(len(index_B))
            outcome = self.engine.run([examples[int(i)] for i in index_B], sink, output)
            values = sink.finish()
            if value is None:
                shape = (*values.shape[:-2], len(examples), values.shape[-1])
                value = np.zeros(shape, dtype=np.float32)
            value[..., index_B, :] = values.cpu().numpy()
            loss_N[index_B], doubt_N[index_B] = outcome.loss_B.cpu().numpy(), outcome.miss_probability_B.cpu().numpy()
        assert value is not None
        check_finite(value.sum(axis=0) if per_block else value, self.engine.model.dtype)
        return Features(value, loss_N, doubt_N)

    def _sink(self, examples: int) -> ProjectionSink | WholeSink:
        engine, projection, transform = self.engine, self.projection, self.transform
        if projection is None:  # whole gradients, with blocks concatenated: K = D
            parts = torch.split(
                whole := torch.zeros(examples, engine.layers.size, dtype=engine.work, device=engine.model.device),
                [block.size for block in engine.layers.blocks],
                dim=1,
            )

            def concatenate(number: int, matrix: Tensor, rows: slice) -> None:
                parts[number][rows] = matrix.flatten(1)

            return WholeSink(engine, whole, concatenate)
        if transform is None:
            return ProjectionSink(projection, examples, per_block=self.per_block)
        projected = projection.zeros(examples)

        def project(number: int, matrix: Tensor, rows: slice) -> None:
            projected[rows] += projection.of_matrix(number, transform(number, matrix))

        return WholeSink(engine, projected, project)


def check_finite(value_NK: NDArray[np.floating], dtype: torch.dtype) -> None:
    """Check that all gradients are finite.

    Raises:
        ModelError: names the first bad example and the dtype.
    """
    bad = np.flatnonzero(~np.isfinite(value_NK).all(axis=1))
    if bad.size:
        name = str(dtype).removeprefix("torch.")
        hint = "float16 overflows, set model.dtype to bfloat16 or float32" if name == "float16" else "check the row"
        raise ModelError(
            f"example {bad[0]} of {len(value_NK)}: its gradient is not finite in {name} ({bad.size} such); {hint}"
        )
