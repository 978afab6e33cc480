r"""The effect of a training of K steps on a row, from gradients and curvature of all layers at the initial weights.

*Training.* Adam moves along P g, with P = diag(v)^(-1/2) and v the second moment of the gradients of batches. In the
coordinates y = P^(-1/2) theta, with g~ = P^(1/2) g and H~ = P^(1/2) H P^(1/2), training is the gradient flow

    dy/dtau = -(g~ + H~ y),    y(0) = 0,    tau from 0 to h = c sum of the learning rates of all steps.

A row i that is added to the corpus adds its gradient g_i to the mean; its share of y(h) is -f(H~) g~_i, with
f(z) = (1 - exp(-h z)) / z: h z^0 for a short training, 1 / z for a long one. The loss of unit e decreases by the inner
product of that share with the unit's gradient, which has moved as well: from g~_e to g~_e + H~ ybar(h), where
ybar(h) = -f(H~) gbar~ is the training on the mean row, and the curvature of the unit's loss is taken to be that of the
corpus. With phi(x) = (1 - exp(-x)) / x and x = h H~,

    a_{i,e} = n_i <g~_i, phi(x) [g~_e - (1 - exp(-x)) gbar~]>

up to the constant h. Gradients are of mean losses over tokens; the factor n_i, the number of tokens with loss, makes
the sum of a row's losses count, as in training, where the loss of a batch is the mean over its tokens.

*Kronecker factors.* The gradient of a matrix is a sum over positions of delta_t a_t^T. P must be a Kronecker product,
so v is approximated by r c^T / mean(v), with r and c its means over inputs and outputs (Adafactor, arXiv 1804.04235):
P^(1/2) = s_l (x) s_r with s_l = (r / sqrt(mean v))^(-1/4), and s_r of c. The curvature is approximated by
E[delta delta^T] (x) E[a a^T] (K-FAC, arXiv 1503.05671), with labels drawn from the model. In coordinates of y both
factors are scaled by s, and have eigenvectors Q_l, Q_r, whose eigenvalues multiply to those of H~. Sides wider than
`WIDEST` and the vocabulary are diagonal; vectors (norms) have phi = 1. Source: SOURCE (arXiv 2405.12186), in Adam's
geometry. The constant c = `HORIZON` was measured (experiments/finetune): theory says 1.

*Price.* phi(x) differs from 1 where x is large: in few directions. With Q_l and Q_r cut to those where x can
exceed `NEGLIGIBLE`,

    P^(1/2) phi(x) P^(1/2) G = s_l^2 (G) s_r^2 + s_l Q_l [(phi(x) - 1) (Q_l^T (s_l G s_r) Q_r)] Q_r^T s_r

so that a unit costs two small products of its factors besides its gradient; no rotation of a whole matrix is formed,
and rows are not rotated at all. Of rows and units a sample of coordinates is used (`grasp.kernels.coordinates`).
Start with `Curvature` and `Gradient`.

Shape letters: X outputs and Y inputs of a matrix, A and B their eigenvectors, T positions, U examples of a batch,
E units, K sampled coordinates, G groups, R and C members of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.kernels.coordinates import SampledGradients, Tiles, by_member
from grasp.kernels.kernel import TYPICAL_ROW_TOKENS, CorpusMoments, Kernel
from grasp.kernels.whitening import Moments
from grasp.models.batch import Batch
from grasp.models.gradients import Block, Example, GradientFactors
from grasp.seeds import stream

HORIZON = 10.0  # c: 1 in theory; 10 to 30 were best on four trainings of a small model (experiments/finetune)
CURVATURE_ROWS = 48  # rows that the curvature is measured on: 512 are no better
DAMPING = 0.01  # added to r and c, in units of their mean: of tokens that these rows lack v is unknown
NEGLIGIBLE = 0.02  # x below it counts as 0: phi is then at least .99
WIDEST = 4096  # a wider side is diagonal
MEAN_NAME = "gradient.side"  # name of the array that `unit_means` returns
CHUNK_COORDINATES = 1 << 17  # coordinates that are widened and multiplied at once


def decay(x: Tensor) -> Tensor:
    """Return phi(x) = (1 - exp(-x)) / x, which is 1 at x = 0."""
    return torch.where(x > 0, -torch.expm1(-x) / x.clamp(min=1e-30), 1.0)


class BlockSums:
    """Sums over rows: the gradient of one block, and the factors of its curvature."""

    def __init__(self, block: Block, device: torch.device, dtype: torch.dtype) -> None:
        zeros = partial(torch.zeros, device=device, dtype=dtype)
        self.mean_XY = zeros(block.left, block.right)  # gradient of the sum of losses
        self.is_vector = "vector" in block.kinds
        is_dense = block.left <= WIDEST and not block.head and "embedding" not in block.kinds
        # Factors of the curvature, by use: of a matrix product, and of an embedding; a tied head has both.
        self.left = [zeros((block.left, block.left) if is_dense else (block.left,))]
        self.right_YY = [zeros(block.right, block.right)]
        self.n_positions = [0]
        if "embedding" in block.kinds:
            self.left.append(zeros(block.left))
            self.right_YY.append(zeros(block.right, block.right))
            self.n_positions.append(0)

    def add_gradient(self, left: Tensor, right_TY: Tensor, n_labels: int) -> None:
        """Add the gradient of an example with these factors at T positions, `left` (T, X) or tokens (T,)."""
        if left.ndim == 1:
            self.mean_XY.index_add_(0, left, right_TY, alpha=n_labels)
        else:
            self.mean_XY.addmm_(left.T, right_TY, alpha=n_labels)

    def add_curvature(self, left: Tensor, right_TY: Tensor, n_labels: int) -> None:
        """Add the same factors of an example with drawn labels to those of the curvature."""
        if self.is_vector:  # no curvature
            return
        use = 1 if left.ndim == 1 else 0
        # gradients of the sum of losses, not of their mean: those of an embedding are on the right
        if left.ndim == 1:
            self.left[1].index_add_(0, left, torch.ones_like(left, dtype=self.left[1].dtype))
            self.right_YY[1].addmm_(right_TY.T, right_TY, alpha=n_labels**2)
        else:
            left_TX = left * n_labels
            self.left[0] += left_TX.T @ left_TX if self.left[0].ndim == 2 else left_TX.square().sum(dim=0)
            self.right_YY[0].addmm_(right_TY.T, right_TY)
        self.n_positions[use] += len(right_TY)

    def curvature(self, n_labels: int) -> tuple[Tensor, Tensor]:
        """Return the Kronecker factors of the curvature of the mean loss of a token, left (X, X) or (X,), and (Y, Y).

        Inputs are averaged over positions; gradients are summed over them and divided by the number of labels. The sum
        of two uses is approximated by the product of the sums of their factors, of trace 1 and weighted by the traces
        of the products, so that the trace of the sum is exact.
        """
        sum_left, sum_right_YY, total = torch.zeros_like(self.left[0]), torch.zeros_like(self.right_YY[0]), 0.0
        for left, right_YY, count in zip(self.left, self.right_YY, self.n_positions, strict=True):
            traces = float(left.trace() if left.ndim == 2 else left.sum()), float(right_YY.trace())
            if count and traces[0] > 0 and traces[1] > 0:
                # one side has inputs (of an embedding the left one, tokens), whose mean is over positions
                weight = traces[0] * traces[1] / (count * n_labels)
                sum_left += weight / traces[0] * left
                sum_right_YY += weight / traces[1] * right_YY
                total += weight
        return sum_left, sum_right_YY / (total or 1.0)


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The optimizer's geometry and the curvature of one block.

    Attributes:
        left_X: s_l, the root of the preconditioner of outputs.
        right_Y: s_r, of inputs.
        left_XA: eigenvectors Q_l of the left factor of the curvature; None: it is diagonal, and A is X.
        right_YB: eigenvectors Q_r of the right factor, of which B may be 0.
        left_value_A: eigenvalues.
        right_value_B: eigenvalues.
        mean_AB: Q_l^T s_l (gradient of the mean loss over the corpus) s_r Q_r.
    """

    left_X: Tensor
    right_Y: Tensor
    left_XA: Tensor | None
    right_YB: Tensor
    left_value_A: Tensor
    right_value_B: Tensor
    mean_AB: Tensor

    @classmethod
    def of(cls, sums: BlockSums, n_labels: int, roots: tuple[Tensor, Tensor], horizon: float) -> Self:
        """Return the geometry of a block.

        Args:
            sums: sums over rows with `n_labels` tokens with loss.
            roots: s_l and s_r, see `preconditioner_roots`.
            horizon: h.
        """
        mean_XY = sums.mean_XY / n_labels
        left_X, right_Y = (root.to(mean_XY.dtype) for root in roots)
        left, right_YY = sums.curvature(n_labels)
        right_value, right_vector = torch.linalg.eigh(right_Y[:, None] * right_YY * right_Y)
        left_vector = None
        if left.ndim == 2:
            left_value, left_vector = torch.linalg.eigh(left_X[:, None] * left * left_X)
        else:
            left_value = left * left_X.square()
        left_value, right_value = left_value.clamp(min=0), right_value.clamp(min=0)
        # cut to directions in which x = h (product of eigenvalues) can exceed NEGLIGIBLE
        chosen_B = horizon * left_value.max() * right_value > NEGLIGIBLE
        right_value, right_vector = right_value[chosen_B], right_vector[:, chosen_B]
        if left_vector is not None:
            chosen_A = horizon * left_value * (right_value.max() if len(right_value) else 0.0) > NEGLIGIBLE
            left_value, left_vector = left_value[chosen_A], left_vector[:, chosen_A]
        mean_XB = (mean_XY * left_X[:, None] * right_Y) @ right_vector
        mean_AB = mean_XB if left_vector is None else left_vector.T @ mean_XB
        return cls(left_X, right_Y, left_vector, right_vector, left_value, right_value, mean_AB)

    def exponent(self, horizon: float) -> Tensor:
        """Return x = h (product of eigenvalues), (A, B)."""
        return horizon * self.left_value_A[:, None] * self.right_value_B

    def sampled(self, factors: GradientFactors, tile: Tiles, horizon: float) -> Tensor:
        """Return the sampled coordinates of P^(1/2) phi(x) P^(1/2) G for the gradients G of examples, (U, size)."""
        left_square_X, right_square_Y = self.left_X.square(), self.right_Y.square()
        basis_YB = self.right_YB * self.right_Y[:, None]
        if factors.one_hot:  # a token is a direction of its own, so that only right factors change
            token_UT = factors.left
            right_UTY = factors.right * right_square_Y
            change_UTB = decay(horizon * self.left_value_A[token_UT][..., None] * self.right_value_B) - 1.0
            right_UTY = right_UTY + (change_UTB * (factors.right @ basis_YB)) @ basis_YB.T
            return tile.sampled_embedding(token_UT, right_UTY * left_square_X[token_UT][..., None])
        left, right = factors.left, factors.right
        plain_UK = tile.sampled_gradient(by_member(left * left_square_X), by_member(right * right_square_Y))
        if not basis_YB.shape[1]:
            return plain_UK
        left = left * self.left_X
        if self.left_XA is not None:
            left = left @ self.left_XA
        change_AB, right_UTB = decay(self.exponent(horizon)) - 1.0, right @ basis_YB
        if self.left_XA is not None:
            return plain_UK + self.from_basis(change_AB * (left.mT @ right_UTB), tile)
        for u, (left_TX, right_TB) in enumerate(zip(left, right_UTB, strict=True)):  # each as large as the matrix
            plain_UK[u] += self.from_basis((change_AB * (left_TX.mT @ right_TB))[None], tile)[0]
        return plain_UK

    def from_basis(self, value_UAB: Tensor, tile: Tiles) -> Tensor:
        """Return the sampled coordinates of s_l Q_l (value) Q_r^T s_r, (U, size)."""
        right_GCB = _padded(self.right_YB * self.right_Y[:, None])[tile.right_GC]
        if self.left_XA is None:
            scaled_UXB = value_UAB * self.left_X[:, None]
            row_UGRB = functional.pad(scaled_UXB, (0, 0, 0, 1))[:, tile.left_GR]
        else:
            row_UGRB = _padded(self.left_XA * self.left_X[:, None])[tile.left_GR] @ value_UAB[:, None]
        return (row_UGRB @ right_GCB.mT).flatten(1)


def _padded(matrix_XA: Tensor) -> Tensor:
    """Append a row of zeros, to which the padding of tiles refers."""
    return functional.pad(matrix_XA, (0, 0, 0, 1))


def preconditioner_roots(v_K: Tensor, tile: Tiles, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Return s_l (X,) and s_r (Y,) of a block from v at its sampled coordinates, float64.

    P^(1/2) = s_l (x) s_r is (r c^T / mean v)^(-1/4), with r and c the means of v over inputs and outputs, which are
    estimated by those over the sampled coordinates of an output or an input; `DAMPING` is added to them.

    Args:
        v_K: second moments of batch gradients at the coordinates of the tile.
        tile: the sampled coordinates of the block.
        left: number of outputs X.
        right: number of inputs Y.
    """
    v_GRC = v_K.view(*tile.left_GR.shape, -1)
    roots = []
    for member_GN, sum_GN, count_GN, width in (
        (tile.left_GR, v_GRC.sum(dim=2), (tile.right_GC < right).sum(dim=1), left),
        (tile.right_GC, v_GRC.sum(dim=1), (tile.left_GR < left).sum(dim=1), right),
    ):
        mean_GN = sum_GN / count_GN.clamp(min=1)[:, None]
        mean_N = mean_GN.new_zeros(width + 1).scatter_(0, member_GN.flatten(), mean_GN.flatten())[:width]
        mean = mean_N.mean()
        root_N = ((mean_N + DAMPING * mean) / mean.sqrt()) ** -0.25 if mean > 0 else torch.ones_like(mean_N)
        roots.append(root_N)
    return roots[0], roots[1]


class Curvature(Moments):
    """The geometry of all blocks: moments of the sampled coordinates over rows, and then one more pass over a few.

    Attributes:
        horizon: h.
        blocks: the geometry of each block, from `measure`.
    """

    of_rows = True

    def __init__(self, corpus: CorpusMoments) -> None:
        self.horizon = 0.0
        self.blocks: list[BlockGeometry] = []
        self._count = 0  # rows whose gradient is finite; the sums are over them, float64
        self._sum_K: Tensor | float = 0.0
        self._square_K: Tensor | float = 0.0

    def observe(self, batch: Batch) -> None:
        assert batch.gradient_BK is not None
        finite_BK = batch.gradient_BK[batch.gradient_BK.isfinite().all(dim=1)].double().cpu()
        self._add(len(finite_BK), finite_BK.sum(dim=0), finite_BK.square().sum(dim=0))

    def merge(self, other: Self) -> None:
        self._add(other._count, other._sum_K, other._square_K)

    def _add(self, count: int, sum_K: Tensor | float, square_K: Tensor | float) -> None:
        self._count, self._sum_K, self._square_K = self._count + count, self._sum_K + sum_K, self._square_K + square_K

    def batch_second_moment(self, batch_rows: int) -> Tensor:
        """Return v, (K,): the second moment of gradients of batches of independent rows, mean^2 + variance / batch."""
        if not self._count:
            raise ModelError("no row of the sample has a finite gradient; use --set model.dtype=bfloat16 or float32")
        mean_K, square_K = torch.as_tensor(self._sum_K) / self._count, torch.as_tensor(self._square_K) / self._count
        return square_K / batch_rows + mean_K.square() * (1.0 - 1.0 / batch_rows)

    def measure(
        self,
        gradients: SampledGradients,
        rows: Sequence[Example],
        *,
        learning_rate_sum: float,
        batch_rows: int,
        seed: int,
        advance: Callable[[int, int], None],
    ) -> None:
        """Run the model on rows of the corpus, and compute geometry and curvature.

        Labels of the curvature are drawn from the model. With those of the corpus the gradient at a token that many
        later ones attend to would be a sum of terms of one sign, and the curvature there a hundred times too large.

        Args:
            gradients: engine and layers.
            rows: rows, as examples.
            learning_rate_sum: sum of the learning rates of all steps.
            batch_rows: rows of a step.
            seed: seed of the drawn labels.
            advance: receives numbers of rows and tokens.
        Raises:
            ModelError: no row that was observed has a finite gradient.
        """
        engine, self.horizon = gradients.engine, HORIZON * learning_rate_sum
        blocks = engine.layers.blocks
        sums = [BlockSums(block, engine.model.device, engine.work) for block in blocks]
        for index in gradients.batches(rows):
            examples = [rows[int(i)] for i in index]

            uniforms = [
                stream(seed, "curvature", "labels", int(i)).random(example.labels)
                for i, example in zip(index, examples, strict=True)
            ]

            def add(
                add_to: Callable[[BlockSums, Tensor, Tensor, int], None],
                number: int,
                factors: GradientFactors,
                part: slice,
                examples: list[Example] = examples,
            ) -> None:
                # uses of the head have the positions with labels, others all positions of the padded batch
                of_head = not factors.one_hot and factors.left.shape[2] == engine.model.vocab_size
                for k, example in enumerate(examples[part]):
                    size = example.labels if of_head else min(factors.right.shape[1], len(example.input_ids))
                    add_to(sums[number], factors.left[k, :size], factors.right[k, :size], example.labels)

            engine.run(examples, partial(add, BlockSums.add_gradient))
            engine.run(examples, partial(add, BlockSums.add_curvature), "sampled", uniforms)
            advance(len(examples), sum(len(example.input_ids) for example in examples))
        n_labels, v_K = sum(example.labels for example in rows), self.batch_second_moment(batch_rows)
        self.blocks = []
        for block, tile in zip(blocks, gradients.sample.tiles, strict=True):
            roots = preconditioner_roots(v_K[tile.columns].to(engine.model.device), tile, block.left, block.right)
            self.blocks.append(BlockGeometry.of(sums.pop(0), n_labels, roots, self.horizon))

    def precondition(self, gradients: SampledGradients, number: int, factors: GradientFactors) -> Tensor:
        """Return the sampled coordinates of P^(1/2) phi(x) P^(1/2) G of a block, (U, size)."""
        return self.blocks[number].sampled(factors, gradients.sample.tiles[number], self.horizon)

    def decayed_mean(self, gradients: SampledGradients) -> Tensor:
        """Return the sampled coordinates of P^(1/2) phi(x) (1 - exp(-x)) P^(1/2) gbar, (K,)."""
        mean_K = gradients.zeros(1)[0]
        for block, tile in zip(self.blocks, gradients.sample.tiles, strict=True):
            if len(block.right_value_B):
                x_AB = block.exponent(self.horizon)
                mean_K[tile.columns] = block.from_basis(
                    (-decay(x_AB) * torch.expm1(-x_AB) * block.mean_AB)[None], tile
                )[0]
        return mean_K

    def arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"curvature.horizon": np.array([self.horizon])}
        for number, block in enumerate(self.blocks):
            for name in BlockGeometry.__slots__:
                if (value := getattr(block, name)) is not None:
                    arrays[f"curvature.{number}.{name}"] = value.cpu().numpy()
        return arrays

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.horizon, self.blocks = float(arrays["curvature.horizon"][0]), []
        while f"curvature.{len(self.blocks)}.left_X" in arrays:
            prefix = f"curvature.{len(self.blocks)}."
            parts: dict[str, Any] = {
                name: torch.from_numpy(arrays[prefix + name])
                for name in BlockGeometry.__slots__
                if prefix + name in arrays
            }
            self.blocks.append(BlockGeometry(**({"left_XA": None} | parts)))


class Gradient(Kernel):
    """The kernel of the gradients of all layers. Coordinates of rows and units are rounded to bfloat16.

    bfloat16 has 8 binary digits. The rounding errors of some 10^6 terms are independent, so that the error of the sum
    is below 2^-8 of the root of the sum of squares of its terms, far below the error of sampling coordinates.
    """

    name = "gradient"
    needs = "backward"
    moment_types = (Curvature,)

    def prepare(self, units: Batch) -> None:
        if units.gradient_BK is not None:  # prepared elsewhere
            self.unit_EK, self._self_relevance_E = units.gradient_BK, torch.ones(units.n_rows)
            self.sampled = units.sampled
            return
        assert units.unit_gradients is not None
        self.sampled = units.sampled
        self.unit_EK, self._self_relevance_E = units.unit_gradients(self.moments(Curvature))

    def unit_means(self, columns_E: I64) -> dict[str, NDArray[Any]]:
        """Return the mean of the preconditioned coordinates of some units, (K,), in bfloat16 as unsigned 16-bit."""
        unit_K = torch.zeros(self.unit_EK.shape[1], dtype=torch.float32)
        for e in columns_E.tolist():
            unit_K += self.unit_EK[e].float().cpu()
        return {MEAN_NAME: (unit_K / len(columns_E)).bfloat16().view(torch.uint16).numpy()}

    def prepare_mean(self, sampled: SampledGradients, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Use the mean of units that `unit_means` returned as the only unit; replaces `prepare`."""
        self.sampled = sampled
        self.unit_EK = torch.from_numpy(arrays[MEAN_NAME]).view(torch.bfloat16)[None].to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        """Return the relevance of rows, (B, E); a row without a finite gradient gets 0 for every unit."""
        assert batch.gradient_BK is not None
        work, device = batch.gradient_BK.dtype, self.model.device
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
        # n_i of a typical row, in place of that of a unit
        return np.asarray(self._self_relevance_E.numpy() * TYPICAL_ROW_TOKENS, dtype=np.float64)
