"""The sketches of an artifact, with weighted sums of sketches and of their squared norms over subsets.

Start with `SketchWithNorms`. It extends `grasp.predict.weights.RowSums`, which computes W @ X for row weights W.
Shape letters: B subsets, D sketch width, N rows, n rows of a block, C columns of a `RowSums`: D, or D + 1 with norms.
"""

import functools

import numpy as np

from grasp.arrays import F64, Blocks
from grasp.artifact.cache import cached
from grasp.artifact.reader import ArtifactReader
from grasp.moments import StreamingMoments
from grasp.paper.subset_sums import SketchSums, SketchTotals
from grasp.predict.weights import RowSums, Weights, block_rows

BLOCK_ROWS = 8_192


class SketchWithNorms(RowSums):
    """One sketch phi_i of every row, with sums over subsets of the sketch and of ||phi_i||^2.

    If the sketch fits in memory, it is one array with ||phi_i||^2 as its last column: `_with_norms` computes sums over
    subsets from all of its columns, and the methods that read rows see it without the last one.

    Attributes:
        totals: sums over the corpus.
        norm2_moments: moments of ||phi_i||^2 over the corpus, one column.
    """

    def __init__(self, artifact: ArtifactReader, sketch_name: str) -> None:
        self.artifact, self.array_name = artifact, f"{sketch_name}_sketch"
        width = next(artifact.array_blocks(self.array_name, block_rows=1))[1].shape[1]

        def blocks_with_norms() -> Blocks:
            """Yield the sketch with the squared norm of each row as a last column.

            A norm is rounded to float32 as the sketch is, once, after a sum in float64.
            """
            for start, block in artifact.array_blocks(self.array_name, block_rows=block_rows(width + 1)):
                wider = np.empty((len(block), width + 1), dtype=np.float32)
                wider[:, :-1], wider[:, -1] = block, np.einsum("nd,nd->n", block, block, dtype=np.float64)
                yield start, wider

        self._with_norms = RowSums(blocks_with_norms, artifact.n_rows, width + 1)  # the last column is ||phi||^2
        in_memory_NC = self._with_norms.array_NC
        array_ND = None if in_memory_NC is None else in_memory_NC[:, :-1]
        on_disk = functools.partial(artifact.array_blocks, self.array_name, block_rows=BLOCK_ROWS)
        super().__init__(on_disk, artifact.n_rows, width, array_NC=array_ND)

        def corpus_totals() -> tuple[SketchTotals, StreamingMoments]:
            norm2_moments = StreamingMoments()
            block_totals: list[F64] = []
            for _, block in self._with_norms.blocks():
                block_totals.append(block.sum(axis=0, dtype=np.float64))
                norm2_moments.add(block[:, -1:])
            total_C = np.sum(block_totals, axis=0)
            return SketchTotals(total_C[:-1], float(total_C[-1]), norm2_moments.n_rows), norm2_moments

        key = self.array_name, "norms"
        self.totals, self.norm2_moments = cached(artifact, key, 8 * width, corpus_totals)

    def blocks(self) -> Blocks:
        """Yield the sketch in blocks of BLOCK_ROWS rows, from memory if it is loaded."""
        if self.array_NC is None:
            yield from self._blocks()
            return
        for start in range(0, len(self.array_NC), BLOCK_ROWS):
            yield start, self.array_NC[start : start + BLOCK_ROWS]

    def sums(self, weights: Weights) -> F64:
        """Return sum_i w_i phi_i of every subset, (B, D)."""
        return self._with_norms.sums(weights)[:, :-1]

    def sketch_sums(self, weights: Weights) -> SketchSums:
        """Return the sums of w phi, w ||phi||^2 and w^2 ||phi||^2 over each of B subsets."""
        sum_BC = self._with_norms.sums(weights)
        sum_w_norm2_B = sum_w2_norm2_B = sum_BC[:, -1]  # w^2 = w for binary weights
        if not weights.is_binary:
            sum_w2_norm2_B = self._with_norms.sums(weights.mapped(np.square))[:, -1]
        return SketchSums(sum_BC[:, :-1], sum_w_norm2_B, sum_w2_norm2_B)
