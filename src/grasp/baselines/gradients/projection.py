r"""Random projection of per-example gradients to K features, summed over blocks. Start with `Projection`.

For a block with gradient G (X, Y), and random signs +-1 determined by a seed:

    dense       y = K^-1/2 R^T vec(G)                    R (X Y, K), as in TRAK
    two-sided   y = K^-1/2 S^T vec(A^T G B) / M          A (X, M), B (Y, M), S (M^2, K): never forms G

Both are unbiased estimators of inner products, and blocks are independent, so their sum projects the whole gradient.
The variance of a squared norm is 2/K ||G||^4 for dense; two-sided adds up to 4/M ||G||^4 if G is a single outer product
(M = 32), and less if G is a sum over more positions or the norm is spread over more blocks. A side no wider than M is
not compressed. Two-sided is chosen if dense costs more than twice as much, i.e. for large layers. An embedding,
and a head tied to one, is always two-sided: a one-hot coordinate is a look-up.

Source: TRAK (Park et al. 2023), section 3.2; two-sided as LoGra (Choe et al. 2024). Deviation from TRAK: large layers.

Shape letters: B examples, T positions, X left width, Y right width, M compressed width, K projected width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grasp.baselines.gradients.factors import materialise, select_examples
from grasp.models.gradient_sums import BLOCK_ELEMENTS
from grasp.models.gradients import Block, GradientFactors
from grasp.seeds import stream

SIDE = 32  # M
DENSE_ELEMENTS = 1 << 27  # total signs of dense blocks: 512 MB of float32


@dataclass(frozen=True, slots=True)
class _Dense:
    sign_DK: Tensor  # D = X Y

    def add(self, use: GradientFactors, block: Block, out_BK: Tensor) -> None:
        step = max(1, BLOCK_ELEMENTS // block.size)
        for begin in range(0, len(use.right), step):
            gradient = materialise(select_examples(use, begin, begin + step), block.left)
            out_BK[begin : begin + step].addmm_(gradient.flatten(1), self.sign_DK)

    def of_matrix(self, gradient_BXY: Tensor) -> Tensor:
        return gradient_BXY.flatten(1) @ self.sign_DK


@dataclass(frozen=True, slots=True)
class _TwoSided:
    left_XM: Tensor | None  # None: the side is not compressed
    right_YM: Tensor | None
    sign_CK: Tensor  # int8; C: size of the compressed matrix. 210 matrices with K = 8,192 take 1.8 GB
    scale: float

    def add(self, use: GradientFactors, block: Block, out_BK: Tensor) -> None:
        right = use.right if self.right_YM is None else use.right @ self.right_YM
        if self.left_XM is None:
            small_BMM = materialise(GradientFactors(use.left, right), block.left)
        else:
            left = self.left_XM[use.left] if use.one_hot else use.left @ self.left_XM
            small_BMM = torch.bmm(left.mT, right)
        out_BK.addmm_(small_BMM.flatten(1), self._signs(small_BMM))

    def of_matrix(self, gradient_BXY: Tensor) -> Tensor:
        small = gradient_BXY if self.right_YM is None else gradient_BXY @ self.right_YM
        small = small if self.left_XM is None else self.left_XM.T @ small
        return small.flatten(1) @ self._signs(small)

    def _signs(self, like: Tensor) -> Tensor:
        return self.sign_CK.to(like.dtype) * self.scale


class Projection:
    """Projection maps of all blocks; identical on every device."""

    def __init__(
        self,
        blocks: Sequence[Block],
        width: int,
        *,
        seed: int,
        tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Draw the maps.

        Args:
            width: K.
            tokens: typical length of a row, by which the costs of the forms are compared; affects the results.
        """
        self.blocks, self.width = tuple(blocks), width
        self.device, self.dtype = device, dtype
        self.forms = choose_forms(blocks, width, tokens)
        self._maps = [self._map(block, kind, seed) for block, kind in zip(blocks, self.forms, strict=True)]

    def _map(self, block: Block, kind: str, seed: int) -> _Dense | _TwoSided:
        generator = stream(seed, "gradient projection", self.width, kind, *block.parameters)
        scale = self.width**-0.5
        if kind == "dense":
            return _Dense(self._drawn(generator, block.size).to(self.dtype) * scale)
        left, right = (
            None if side <= SIDE else self._drawn(generator, side, SIDE).to(self.dtype) * SIDE**-0.5
            for side in (block.left, block.right)
        )
        size = min(SIDE, block.left) * min(SIDE, block.right)
        return _TwoSided(left, right, self._drawn(generator, size), scale)

    def _drawn(self, generator: np.random.Generator, rows: int, columns: int | None = None) -> Tensor:
        """Draw independent +1 and -1, (rows, columns), int8, one random bit each."""
        size = rows * (columns or self.width)
        bits = np.unpackbits(np.frombuffer(generator.bytes(-(-size // 8)), dtype=np.uint8))
        return torch.from_numpy((bits[:size].astype(np.int8) * 2 - 1).reshape(rows, -1)).to(self.device)

    def zeros(self, examples: int, per_block: bool = False) -> Tensor:
        """Return zeros to accumulate projections in: (B, K), or (blocks, B, K)."""
        shape = (len(self.blocks), examples, self.width) if per_block else (examples, self.width)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def add(self, number: int, use: GradientFactors, out_BK: Tensor) -> None:
        """Add the projection of one use of block `number`."""
        self._maps[number].add(use, self.blocks[number], out_BK)

    def of_matrix(self, number: int, gradient_BXY: Tensor) -> Tensor:
        """Project whole gradients, (B, K)."""
        return self._maps[number].of_matrix(gradient_BXY)


def choose_forms(blocks: Sequence[Block], width: int, tokens: int) -> list[str]:
    """Choose `dense` or `two-sided` for each block by number of multiplications; dense blocks share a memory bound."""
    chosen = ["two-sided"] * len(blocks)
    left = DENSE_ELEMENTS
    for number in sorted(range(len(blocks)), key=lambda k: blocks[k].size):
        block = blocks[number]
        small = min(SIDE, block.left) * min(SIDE, block.right)
        two_sided = tokens * (SIDE * (block.left + block.right) + small) + small * width
        is_affordable = (tokens + width) * block.size <= 2 * two_sided
        if "embedding" not in block.kinds and is_affordable and block.size * width <= left:
            chosen[number] = "dense"
            left -= block.size * width
    return chosen
