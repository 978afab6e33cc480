"""The forward half of a shard: everything that needs the model. One pass gives both relevance kernels' inputs.

Shape letters: N rows of the shard, E units, S unit positions, H hidden width, V vocabulary, D sketch width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from torch import Tensor

from grasp.corpus.store import RowShard
from grasp.errors import ModelError
from grasp.features.extract import BatchFeatures, bad_rows, extract
from grasp.features.moments import MomentAccumulator, Moments
from grasp.features.pooling import PooledFeatures, pool
from grasp.features.product_sketch import ProductSketch
from grasp.features.residuals import SparseResidual, stack_residuals
from grasp.features.token_match import TokenTargets, prepare_targets, token_relevance
from grasp.features.whitening import Whitener
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, batches, pad_rows
from grasp.settings import FeatureSettings
from grasp.targets.units import UnitTokens


@dataclass(frozen=True, slots=True)
class UnitFeatures:
    """The units' side, before any moments are known."""

    pooled: PooledFeatures
    hidden_SH: Tensor
    residual: SparseResidual
    unit_S: Tensor
    loss_E: NDArray[np.float32]

    @property
    def n_units(self) -> int:
        return len(self.loss_E)


@dataclass(frozen=True, slots=True)
class TokenKernel:
    """What the token kernel and the product sketch need from the moments."""

    moments: Moments
    targets: TokenTargets | None
    sketch: ProductSketch | None

    @classmethod
    def prepare(cls, units: UnitFeatures, moments: Moments, settings: FeatureSettings, device: torch.device) -> Self:
        whitener = Whitener.fit(moments, tau=settings.tau, alpha=settings.alpha, epsilon=settings.epsilon)
        targets = sketch = None
        if settings.token:
            targets = prepare_targets(
                units.hidden_SH, units.residual, units.unit_S, units.n_units, whitener, BATCH_ROWS
            )
        if settings.product_width:
            sketch = ProductSketch.prepare(whitener, settings.product_width, settings.seed, device)
        return cls(moments=moments, targets=targets, sketch=sketch)

    def apply(
        self, hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int
    ) -> dict[str, NDArray[np.float32]]:
        """Relevance and product sketch of the rows of one batch."""
        out: dict[str, NDArray[np.float32]] = {}
        if self.targets is not None:
            relevance_NE = token_relevance(self.targets, hidden_PH, residual, row_P, n_rows)
            out["relevance_token"] = relevance_NE.cpu().numpy()
        if self.sketch is not None:
            out["product_sketch"] = self.sketch.apply(hidden_PH, residual, row_P, n_rows).cpu().numpy()
        return out

    def unit_relevance(self, units: UnitFeatures) -> NDArray[np.float64]:
        """Relevance of each unit to itself, (E,)."""
        assert self.targets is not None
        own_E = np.empty(units.n_units)
        unit_S = units.unit_S.cpu()
        for start in range(0, units.n_units, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, units.n_units)
            mask_S = ((unit_S >= start) & (unit_S < stop)).to(units.hidden_SH.device)
            residual = SparseResidual(
                units.residual.index_PK[mask_S],
                units.residual.value_PK[mask_S],
                units.residual.loss_P[mask_S],
            )
            block = token_relevance(
                self.targets, units.hidden_SH[mask_S], residual, units.unit_S[mask_S] - start, stop - start
            )
            own_E[start:stop] = block[:, start:stop].diagonal().cpu().numpy()
        return own_E


@dataclass(frozen=True, slots=True)
class ShardForward:
    """What the forward pass gave for the rows of one shard, in row order."""

    pooled: PooledFeatures
    loss_N: NDArray[np.float32]
    token: dict[str, NDArray[np.float32]]  # relevance_token (N, E), product_sketch (N, D), where they are built

    def spool(self) -> dict[str, NDArray[Any]]:
        """As named arrays for a FeatureSpool."""
        residual = self.pooled.residual_NV
        return {
            "hidden": self.pooled.hidden_NH,
            "residual_value": residual.data,
            "residual_index": residual.indices.astype(np.int32),
            "residual_indptr": residual.indptr.astype(np.int64),
            "loss": self.loss_N,
            **{f"token.{name}": array for name, array in self.token.items()},
        }

    @classmethod
    def unspool(cls, arrays: dict[str, NDArray[Any]], vocab: int) -> Self:
        """From the arrays of a FeatureSpool."""
        residual = csr_array(
            (arrays["residual_value"], arrays["residual_index"], arrays["residual_indptr"]),
            shape=(len(arrays["loss"]), vocab),
        )
        token = {name.removeprefix("token."): array for name, array in arrays.items() if name.startswith("token.")}
        return cls(PooledFeatures(arrays["hidden"], residual), arrays["loss"], token)


def forward_units(
    model: ReferenceModel, units: list[UnitTokens], names: list[str], settings: FeatureSettings
) -> UnitFeatures:
    """Hidden states and residuals of all units; `names` are for messages."""
    length_E = np.fromiter((len(unit.input_ids) for unit in units), dtype=np.int64, count=len(units))
    first_E = torch.tensor([unit.first - 1 for unit in units])
    pooled, hidden, residual, unit_of, order = [], [], [], [], []
    loss_E = np.empty(len(units), dtype=np.float32)
    for index in batches(length_E, model.batch_tokens):
        ids, length_B = pad_rows([units[e].input_ids for e in index])
        batch = extract(model, ids, first_E[index], length_B, (settings.pooling, "all"), settings.top_k)
        _refuse_bad(batch, [names[e] for e in index], "unit")
        loss_E[index] = batch.loss_B(len(index)).cpu().numpy()
        pooled.append(pool(*batch.take(0), len(index), model.vocab_size))
        part_hidden, part_residual, row_P = batch.take(1)
        hidden.append(part_hidden)
        residual.append(part_residual)
        unit_of.append(torch.from_numpy(index).to(row_P.device)[row_P])
        order.append(index)
    return UnitFeatures(
        pooled=_in_order(pooled, np.concatenate(order)),
        hidden_SH=torch.cat(hidden),
        residual=stack_residuals(residual),
        unit_S=torch.cat(unit_of),
        loss_E=loss_E,
    )


def forward_rows(
    model: ReferenceModel,
    rows: RowShard,
    settings: FeatureSettings,
    kernel: TokenKernel | None,
) -> Iterator[tuple[NDArray[np.int64], PooledFeatures, NDArray[np.float32], dict[str, NDArray[np.float32]]]]:
    """Run the model over the rows of a shard, a batch at a time, alike in length."""
    specs = (settings.pooling,) if kernel is None else (settings.pooling, settings.token_positions)
    names = rows.table.column("row_id")
    length_N = np.diff(rows.offsets)
    for index in batches(length_N, model.batch_tokens):
        ids, length_B = pad_rows([rows.ids(int(i)) for i in index])
        batch = extract(model, ids, torch.zeros_like(length_B), length_B, specs, settings.top_k)
        _refuse_bad(batch, [names[int(i)].as_py() for i in index], "row")
        token = {} if kernel is None else kernel.apply(*batch.take(1), len(index))
        pooled = pool(*batch.take(0), len(index), model.vocab_size)
        yield index, pooled, batch.loss_B(len(index)).cpu().numpy(), token


def forward_shard(
    model: ReferenceModel, rows: RowShard, settings: FeatureSettings, kernel: TokenKernel | None
) -> ShardForward:
    """Run the model over one shard and put the results back in row order."""
    order, pooled, token = [], [], []
    loss_N = np.empty(len(rows), dtype=np.float32)
    for index, part, loss_B, arrays in forward_rows(model, rows, settings, kernel):
        order.append(index)
        pooled.append(part)
        token.append(arrays)
        loss_N[index] = loss_B
    where = np.concatenate(order)
    back = np.argsort(where)
    return ShardForward(
        pooled=_in_order(pooled, where),
        loss_N=loss_N,
        token={name: np.concatenate([part[name] for part in token])[back] for name in token[0]},
    )


def token_moments(model: ReferenceModel, rows: RowShard, settings: FeatureSettings, into: MomentAccumulator) -> None:
    """Add the used positions of `rows` to the token-level moments."""
    names = rows.table.column("row_id")
    for index in batches(np.diff(rows.offsets), model.batch_tokens):
        ids, length_B = pad_rows([rows.ids(int(i)) for i in index])
        specs = (settings.token_positions,)
        batch = extract(model, ids, torch.zeros_like(length_B), length_B, specs, settings.top_k)
        _refuse_bad(batch, [names[int(i)].as_py() for i in index], "row")
        into.add(
            batch.hidden_PH.cpu().numpy(),
            batch.residual.index_PK.cpu().numpy(),
            batch.residual.value_PK.cpu().numpy(),
        )


def _in_order(parts: list[PooledFeatures], where: NDArray[np.int64]) -> PooledFeatures:
    back = np.argsort(where)
    residual = vstack([part.residual_NV for part in parts], format="csr")[back]
    return PooledFeatures(np.concatenate([part.hidden_NH for part in parts])[back], residual)


def _refuse_bad(batch: BatchFeatures, names: list[str], what: str) -> None:
    bad = bad_rows(batch, len(names))
    if bad:
        named = ", ".join(repr(names[b]) for b in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ModelError(
            f"{what} {named}{more}: the model computed NaN or infinity, expected finite hidden states and losses; "
            "use model.dtype float32, or take it out"
        )
