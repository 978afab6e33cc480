r"""Random projection of per-example gradients to K numbers, the blocks' projections summed.

Of one block with gradient G (X, Y), for k = 1..K, signs +-1 drawn once for a seed:

    dense       y_k = K^-1/2 <R_k, G>         R_k a matrix of signs: what TRAK does
    rank one    y_k = K^-1/2 p_k^T G q_k      R_k = p_k q_k^T: never forms G, stores K (X + Y) signs instead of K X Y

Both keep inner products without bias, and blocks are independent, so their sum projects the whole gradient. The
variance of a squared norm is 2/K ||G||^4 for dense, and between 2/K (spread spectrum) and 8/K (a single outer product)
for rank one. `auto` takes dense where it costs less: small layers. An embedding, and a head tied to one, always takes
rank one, in which a one-hot coordinate is a look-up.

Source: TRAK (Park et al. 2023), section 3.2. Deviation: rank one for large layers.

Shape letters: B examples, T positions, X left width, Y right width, K projected width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.baselines.gradients.factors import ELEMENTS, Use, materialise
from grasp.baselines.gradients.layers import Block
from grasp.seeds import stream

Form = Literal["auto", "dense", "rank-one"]

DENSE_ELEMENTS = 1 << 27  # signs of dense blocks, all together: 512 MB of float32


@dataclass(frozen=True, slots=True)
class _Dense:
    sign_DK: Tensor  # D = X Y

    def add(self, use: Use, block: Block, out_BK: Tensor) -> None:
        step = max(1, ELEMENTS // block.size)
        for begin in range(0, use.examples, step):
            gradient = materialise(use.rows(begin, begin + step), block.left)
            out_BK[begin : begin + step].addmm_(gradient.flatten(1), self.sign_DK)

    def of_matrix(self, gradient_BXY: Tensor) -> Tensor:
        return gradient_BXY.flatten(1) @ self.sign_DK


@dataclass(frozen=True, slots=True)
class _RankOne:
    left_XK: Tensor
    right_YK: Tensor

    def add(self, use: Use, block: Block, out_BK: Tensor) -> None:
        left = self.left_XK[use.left] if use.one_hot else use.left @ self.left_XK
        out_BK += torch.einsum("btk,btk->bk", left, use.right @ self.right_YK)

    def of_matrix(self, gradient_BXY: Tensor) -> Tensor:
        return torch.einsum("bxk,xk->bk", gradient_BXY @ self.right_YK, self.left_XK)


class Projection:
    """Maps of all blocks, drawn once; the same on every device."""

    def __init__(
        self,
        blocks: Sequence[Block],
        width: int,
        *,
        seed: int,
        tokens: int,
        form: Form = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Draw the maps.

        Args:
            width: K.
            tokens: typical length of a row; with it `auto` compares costs. Part of what decides the numbers.
        """
        self.blocks, self.width = tuple(blocks), width
        self.device, self.dtype = device, dtype
        self.forms = choose_forms(blocks, width, tokens, form)
        self._maps = [self._map(block, kind, seed) for block, kind in zip(blocks, self.forms, strict=True)]

    def _map(self, block: Block, kind: str, seed: int) -> _Dense | _RankOne:
        generator = stream(seed, "gradient projection", self.width, kind, *block.parameters)
        scale = self.width**-0.5
        if kind == "dense":
            return _Dense(self._signs(generator, block.size, scale))
        left = self._signs(generator, block.left, 1.0)
        return _RankOne(left, self._signs(generator, block.right, scale))

    def _signs(self, generator: np.random.Generator, rows: int, scale: float) -> Tensor:
        return torch.from_numpy(signs(generator, rows, self.width)).to(self.device, self.dtype) * scale

    def zeros(self, examples: int, per_block: bool = False) -> Tensor:
        """Where projections are added up: (B, K), or (blocks, B, K)."""
        shape = (len(self.blocks), examples, self.width) if per_block else (examples, self.width)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def add(self, number: int, use: Use, out_BK: Tensor) -> None:
        """Add the projection of one use of block `number`."""
        self._maps[number].add(use, self.blocks[number], out_BK)

    def of_matrix(self, number: int, gradient_BXY: Tensor) -> Tensor:
        """Projection (B, K) of gradients that are there in full."""
        return self._maps[number].of_matrix(gradient_BXY)


def signs(generator: np.random.Generator, rows: int, columns: int) -> NDArray[np.int8]:
    """Independent +1 and -1, (rows, columns), one random bit each."""
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-rows * columns // 8)), dtype=np.uint8))
    return (bits[: rows * columns].astype(np.int8) * 2 - 1).reshape(rows, columns)


def choose_forms(blocks: Sequence[Block], width: int, tokens: int, form: Form) -> list[str]:
    """`dense` or `rank-one` for each block, by multiplications; dense ones share a bound on memory."""
    chosen = ["rank-one"] * len(blocks)
    left = DENSE_ELEMENTS
    for number in sorted(range(len(blocks)), key=lambda k: blocks[k].size):
        block = blocks[number]
        if "embedding" in block.kinds or form == "rank-one":
            continue
        cheaper = (tokens + width) * block.size <= tokens * width * (block.left + block.right)
        wanted = form == "dense" or "vector" in block.kinds or cheaper
        if wanted and (form == "dense" or block.size * width <= left):
            chosen[number] = "dense"
            left -= block.size * width
    return chosen
