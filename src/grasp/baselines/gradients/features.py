"""Features of examples: their gradients, projected at random or whole, from one forward and one backward pass.

Start with `Featurizer`.

Shape letters: N examples, B of them in a batch, K width, D parameters covered, X, Y a block's widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F32, F64
from grasp.baselines.gradients.projection import Projection
from grasp.baselines.gradients.whole import Transform, run_whole
from grasp.errors import ModelError
from grasp.models.gradients import Example, GradientFactors, Output, PerExample


@dataclass(frozen=True, slots=True)
class Featurizer:
    """Computes features of examples: a gradient engine with an optional transform and projection."""

    engine: PerExample
    projection: Projection | None  # None: whole gradients, K = D
    transform: Transform | None = None
    per_block: bool = False

    @classmethod
    def with_projection(
        cls, engine: PerExample, width: int, *, seed: int, tokens: int, per_block: bool = False
    ) -> Self:
        """Create a featurizer with a random projection to `width` features; see `Projection` for the arguments."""
        projection = Projection(
            engine.layers.blocks, width, seed=seed, tokens=tokens, device=engine.model.device, dtype=engine.work
        )
        return cls(engine, projection, per_block=per_block)

    def features(self, examples: Sequence[Example], output: Output = "loss") -> tuple[F32, F64]:
        """Return features, (N, K), or (blocks, N, K), and the mean of 1 - p of the labels, (N,).

        Raises:
            ModelError: a gradient is not finite; the message names the example.
        """
        value: F32 | None = None
        doubt_N = np.zeros(len(examples))
        for index_B in self.engine.batches(examples):
            values, doubt_B = self._batch([examples[int(i)] for i in index_B], output)
            if value is None:
                value = np.zeros((*values.shape[:-2], len(examples), values.shape[-1]), dtype=np.float32)
            value[..., index_B, :] = values.cpu().numpy()
            doubt_N[index_B] = doubt_B.cpu().numpy()
        assert value is not None
        check_finite(value.sum(axis=0) if self.per_block else value, self.engine.model.dtype)
        return value, doubt_N

    def _batch(self, examples: Sequence[Example], output: Output) -> tuple[Tensor, Tensor]:
        engine, projection, transform = self.engine, self.projection, self.transform
        if projection is None:
            out = torch.zeros(len(examples), engine.layers.size, dtype=engine.work, device=engine.model.device)
            parts = torch.split(out, [block.size for block in engine.layers.blocks], dim=1)

            def concatenate(number: int, matrix: Tensor, at: slice) -> None:
                parts[number][at] = matrix.flatten(1)

            return out, run_whole(engine, examples, concatenate, output).miss_probability_B
        out = projection.zeros(len(examples), self.per_block)
        if transform is not None:

            def project(number: int, matrix: Tensor, at: slice) -> None:
                out[at] += projection.of_matrix(number, transform(number, matrix))

            return out, run_whole(engine, examples, project, output).miss_probability_B

        def add(number: int, use: GradientFactors, rows: slice) -> None:
            projection.add(number, use, (out[number] if self.per_block else out)[rows])

        return out, engine.run(examples, add, output).miss_probability_B


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
