"""Projected gradients of examples: K numbers each, from one forward and one backward pass.

Shape letters: N examples, B of them in a batch, K projected width, D parameters covered, X, Y a block's widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F32, F64
from grasp.baselines.gradients.projection import Form, Projection
from grasp.baselines.gradients.queries import Transform
from grasp.baselines.gradients.sinks import MatrixSink, everything
from grasp.errors import ModelError
from grasp.models.gradients import Example, Output, PerExample, Use


@dataclass(frozen=True, slots=True)
class Features:
    """What is kept of examples."""

    value_NK: F32  # (blocks, N, K) where blocks are kept apart
    loss_N: F64  # nats a label
    doubt_N: F64  # mean of 1 - p of the true label


class Sink(Protocol):
    """Takes factors of one batch, and gives numbers an example."""

    def __call__(self, number: int, use: Use, rows: slice) -> None: ...
    def finish(self) -> Tensor: ...


class ProjectionSink:
    """Sums the projections of all blocks, or keeps those of blocks apart."""

    def __init__(self, projection: Projection, examples: int, *, per_block: bool = False) -> None:
        self._projection, self._apart = projection, per_block
        self._out = projection.zeros(examples, per_block)

    def __call__(self, number: int, use: Use, rows: slice) -> None:
        out = self._out[number] if self._apart else self._out
        self._projection.add(number, use, out[rows])

    def finish(self) -> Tensor:
        return self._out


class TransformedSink:
    """Projects what a transform makes of whole gradients, e.g. an optimizer's update."""

    def __init__(self, engine: PerExample, projection: Projection, transform: Transform, examples: int) -> None:
        out = projection.zeros(examples)

        def take(number: int, matrix: Tensor, rows: slice) -> None:
            out[rows] += projection.of_matrix(number, transform(number, matrix))

        self._matrices, self._out = MatrixSink(engine, everything(engine), take), out

    def __call__(self, number: int, use: Use, rows: slice) -> None:
        self._matrices(number, use, rows)

    def finish(self) -> Tensor:
        self._matrices.finish()
        return self._out


class WholeSink:
    """Gradients in full, blocks side by side: K = D."""

    def __init__(self, engine: PerExample, examples: int) -> None:
        sizes = [block.size for block in engine.layers.blocks]
        begin = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        out = torch.zeros(examples, begin[-1], dtype=engine.work, device=engine.model.device)

        def take(number: int, matrix: Tensor, rows: slice) -> None:
            out[rows, begin[number] : begin[number + 1]] = matrix.flatten(1)

        self._matrices, self._out = MatrixSink(engine, everything(engine), take), out

    def __call__(self, number: int, use: Use, rows: slice) -> None:
        self._matrices(number, use, rows)

    def finish(self) -> Tensor:
        self._matrices.finish()
        return self._out


@dataclass(frozen=True, slots=True)
class Featurizer:
    """From examples to features: the engine, and how its gradients are reduced."""

    engine: PerExample
    projection: Projection | None  # none: whole gradients
    transform: Transform | None = None
    per_block: bool = False

    @classmethod
    def projecting(
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
        """To `width` numbers by maps that depend on the seed, the layers, the width and `tokens`, see `Projection`."""
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
        """Features of examples, in their order.

        Raises:
            ModelError: a gradient is not a number; the message names the example.
        """
        apart = self.per_block and self.projection is not None
        value: F32 | None = None
        loss_N, doubt_N = np.zeros(len(examples)), np.zeros(len(examples))
        for index_B in self.engine.batches(examples):
            sink = self._sink(len(index_B))
            outcome = self.engine.run([examples[int(i)] for i in index_B], sink, output)
            found = sink.finish()
            if value is None:
                shape = (*found.shape[:-2], len(examples), found.shape[-1])
                value = np.zeros(shape, dtype=np.float32)
            value[..., index_B, :] = found.cpu().numpy()
            loss_N[index_B], doubt_N[index_B] = outcome.loss_B.cpu().numpy(), outcome.doubt_B.cpu().numpy()
        assert value is not None
        refuse_non_finite(value.sum(axis=0) if apart else value, self.engine.model.dtype)
        return Features(value, loss_N, doubt_N)

    def _sink(self, examples: int) -> Sink:
        if self.projection is None:
            return WholeSink(self.engine, examples)
        if self.transform is not None:
            return TransformedSink(self.engine, self.projection, self.transform, examples)
        return ProjectionSink(self.projection, examples, per_block=self.per_block)


def refuse_non_finite(value_NK: NDArray[np.floating], dtype: torch.dtype) -> None:
    """See that all gradients are numbers.

    Raises:
        ModelError: names the first example and the type that overflowed.
    """
    bad = np.flatnonzero(~np.isfinite(value_NK).all(axis=1))
    if bad.size:
        name = str(dtype).removeprefix("torch.")
        hint = "float16 overflows, set model.dtype to bfloat16 or float32" if name == "float16" else "look at the row"
        raise ModelError(
            f"example {bad[0]} of {len(value_NK)} has a gradient that is not finite ({bad.size} such) in {name}, "
            f"expected numbers; {hint}"
        )
