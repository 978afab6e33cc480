"""Relevance of one row, position by position: what each adds, and which position of a unit receives it.

A kernel of positions is a mean over those of the row and of the unit, so the build's own kernels take it apart when
every position is handed to them as a row, or as a unit, of its own:

    a_{i,e} = 1/|P_i| sum_{t in P_i} a_{t,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} a_{t,s}

The pooled kernel, a = R sgn(H) log(1 + |H|), is no sum over pairs, since H is damped as a whole. It is linear in the
residuals: a position counts by its share in R, times the damped H of the whole row with the whole unit.
Shape letters: P row positions, S unit positions, E units, C columns (E, or S of one unit), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from grasp.corpus.store import RowShard
from grasp.extract.finish import PooledKernel
from grasp.extract.forward import PositionBatch, TokenKernel, UnitFeatures
from grasp.extract.passes import row_passes
from grasp.features.extract import BatchFeatures
from grasp.features.pooling import PooledFeatures, pool
from grasp.features.positions import position_mask, supervised_positions
from grasp.features.residuals import SparseResidual
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, pad_rows
from grasp.settings import FeatureSettings

F64 = NDArray[np.float64]
Part = tuple[str, NDArray[np.int64], F64]  # kernel, (n,) tokens of the row, (n, C) what they add


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """Features of one row at the positions of the kernels: first those of the pooled one, then of the others."""

    batch: BatchFeatures
    token_P: NDArray[np.int64]  # the token that each position predicts, by its place in the row
    vocab: int

    @classmethod
    def of(cls, model: ReferenceModel, row: RowShard, settings: FeatureSettings) -> Self:
        """Run the model over a row."""
        specs = settings.pooling, settings.token_positions
        ((_, batch),) = row_passes(model, row, specs, settings.top_k)
        _, labelled_BL = pad_rows([row.ids(0)], [row.mask(0)])
        supervised_BL = supervised_positions(labelled_BL)
        used_L = torch.stack([position_mask(spec, supervised_BL) for spec in specs]).any(dim=0)[0]
        return cls(batch, used_L.nonzero()[:, 0].numpy() + 1, model.vocab_size)

    def tokens(self, which: int) -> NDArray[np.int64]:
        """Tokens that are predicted at the positions of one specification."""
        return np.asarray(self.token_P[self.batch.chosen[which].cpu().numpy()])


def unit_by_position(unit: UnitFeatures, settings: FeatureSettings, vocab: int) -> UnitFeatures:
    """One unit as if each of its S positions were a unit. The kernels of positions then lack the factor 1/S."""
    n = len(unit.unit_S)
    used_S = position_mask(settings.pooling, torch.ones(1, n, dtype=torch.bool))[0].to(unit.unit_S.device)
    return replace(
        unit,
        pooled=_shares(unit.pooled, unit.hidden_SH, unit.residual, used_S, vocab),
        unit_S=torch.arange(n, device=unit.unit_S.device),
        loss_E=np.repeat(unit.loss_E, n),
    )


def relevance_by_position(
    row: RowFeatures, token: TokenKernel | None, pooled: PooledKernel, unit_positions: int = 1
) -> Iterator[Part]:
    """What every position of a row adds to its relevance by each kernel that is built, some positions at a time.

    Args:
        unit_positions: S, where the kernels were prepared for `unit_by_position`.
    """
    if pooled.units is not None:
        hidden_PH, residual, row_P = row.batch.take(0)
        shares = _shares(pool(hidden_PH, residual, row_P, 1, row.vocab), hidden_PH, residual, row_P == 0, row.vocab)
        yield "pooled", row.tokens(0), pooled.relevance(shares)["relevance_pooled"].astype(np.float64)
    if token is None:
        return
    every, predicted = PositionBatch.of(row.batch, 1), row.tokens(1)
    for start in range(0, len(predicted), BATCH_ROWS):
        some = slice(start, start + BATCH_ROWS)
        tokens = predicted[some]
        alone = PositionBatch(
            every.hidden_PH[some],
            every.residual.at(some),
            torch.arange(len(tokens), device=every.row_P.device),
            every.input_P[some],
            len(tokens),
        )
        for name, part_PC in token.relevance(alone).items():
            mean_PC = part_PC.double().cpu().numpy() / (len(predicted) * unit_positions)
            yield name.removeprefix("relevance_"), tokens, mean_PC


def _shares(
    whole: PooledFeatures, hidden_PH: Tensor, residual: SparseResidual, used_P: Tensor, vocab: int
) -> PooledFeatures:
    """Every position of one row as a row with its share in the pooled residual, and the pooled hidden state."""
    n = len(hidden_PH)
    own_PV = pool(hidden_PH, residual, torch.arange(n, device=hidden_PH.device), n, vocab).residual_NV
    share_P = used_P.float().cpu().numpy() / float(used_P.sum())
    return PooledFeatures(np.repeat(whole.hidden_NH, n, axis=0), csr_array(own_PV.multiply(share_P[:, None])))
