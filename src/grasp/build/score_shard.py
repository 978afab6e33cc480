"""The half of a shard that needs the model. One pass gives every relevance kernel, one there and back `gradient` too.

Shape letters: N rows of the shard, E units, S unit positions, H hidden width, V vocabulary, D sketch width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from torch import Tensor

from grasp.build.backward import backward_passes
from grasp.errors import ArtifactError, ModelError
from grasp.kernels.embedding import (
    hidden_gradient,
    input_relevance,
    input_tokens,
    prepare_shift,
    shift_relevance,
)
from grasp.kernels.gradient import GradientKernel
from grasp.kernels.hidden_affine import TiltTargets, prepare_tilt, tilt_relevance
from grasp.kernels.knn import NeighbourTargets, neighbour_relevance, prepare_neighbours
from grasp.kernels.output_layer import TokenTargets, prepare_targets, token_relevance
from grasp.kernels.sketch import ProductSketch
from grasp.kernels.whitening import LabelledStates, MomentAccumulator, PositionMoments, Whitener
from grasp.models.causal_lm import BATCH_ROWS
from grasp.models.forward_pass import BatchFeatures, Pass, Reference, Rows, Units, forward_passes
from grasp.models.head import OutputHead
from grasp.models.residuals import PooledFeatures, SparseResidual, pool, stack_residuals
from grasp.models.sampled_gradients import Example
from grasp.progress import Advance, ignore
from grasp.settings import FeatureSettings


@dataclass(frozen=True, slots=True)
class PositionBatch:
    """Features of a few rows at the positions with loss, in order of row."""

    hidden_PH: Tensor
    residual: SparseResidual
    row_P: Tensor
    input_P: Tensor  # token at the position
    n_rows: int

    @classmethod
    def from_batch(cls, batch: BatchFeatures, n_rows: int) -> Self:
        """From a forward pass whose second specification of positions is that of the kernels."""
        return cls(*batch.take(1), batch.input_P[batch.chosen[1]], n_rows)

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""
        kept = self.residual
        rest_P = None if kept.rest_P is None else kept.rest_P.to(device)
        residual = SparseResidual(kept.index_PK.to(device), kept.value_PK.to(device), kept.loss_P.to(device), rest_P)
        return replace(
            self,
            hidden_PH=self.hidden_PH.to(device),
            residual=residual,
            row_P=self.row_P.to(device),
            input_P=self.input_P.to(device),
        )


@dataclass(frozen=True, slots=True)
class UnitFeatures:
    """What the model gave for the questions, before the corpus' moments are known."""

    pooled: PooledFeatures
    positions: PositionBatch  # a unit is a row; batch after batch, so not in order of unit
    loss_E: NDArray[np.float32]
    examples: tuple[Example, ...] = ()  # the texts themselves, for a backward pass


@dataclass(frozen=True, slots=True)
class PositionKernels:
    """The kernels that look at single positions, and the product sketch, ready to be applied to rows."""

    moments: PositionMoments
    head: OutputHead
    targets: TokenTargets | None
    inputs: TokenTargets | None  # of the input kernel: gradients and tokens in the place of states and mistakes
    shift_EH: Tensor | None
    tilt: TiltTargets | None
    neighbours: NeighbourTargets | None
    sketch: ProductSketch | None
    gradient: GradientKernel | None = None

    @classmethod
    def prepare(
        cls, units: UnitFeatures, moments: PositionMoments, settings: FeatureSettings, model: Reference
    ) -> Self:
        """Fold the moments into the units."""
        weighing: dict[str, Any] = {"tau": settings.tau, "alpha": settings.alpha, "epsilon": settings.epsilon}
        whitener = Whitener.fit(moments.token, **weighing)
        at, of_units = units.positions, (units.positions.row_P, units.positions.n_rows)
        targets = inputs = shift = tilt = neighbours = sketch = gradient = None
        if "token" in settings.kernels:
            targets = prepare_targets(at.hidden_PH, at.residual, *of_units, whitener, BATCH_ROWS)
        if moments.input is not None:
            own = Whitener.fit(moments.input, **weighing, centred=False)
            delta_SH = hidden_gradient(model.head, at.residual)
            inputs = prepare_targets(delta_SH, input_tokens(at.input_P), *of_units, own, BATCH_ROWS)
            if "shift" in settings.kernels:
                shift = prepare_shift(delta_SH, *of_units, own)
            if "tilt" in settings.kernels:
                tilt = prepare_tilt(at.hidden_PH, delta_SH, *of_units, moments)
        if "neighbour" in settings.kernels and moments.states is not None:
            neighbours = prepare_neighbours(at.hidden_PH, at.residual, *of_units, whitener, moments)
        if settings.product_width:
            sketch = ProductSketch.prepare(whitener, settings.product_width, settings.seed, model.device)
        if "gradient" in settings.kernels and moments.gradient_K is not None:
            gradient = GradientKernel.prepare(model, units.examples, moments.gradient_K, settings)
        return cls(moments, model.head, targets, inputs, shift, tilt, neighbours, sketch, gradient)

    def apply(self, batch: PositionBatch) -> dict[str, NDArray[np.float32]]:
        """Relevance of the rows of one batch by each kernel that is built, (n_rows, E), and their product sketch."""
        out: dict[str, Tensor] = {}
        of_rows = batch.row_P, batch.n_rows
        if self.targets is not None:
            out["relevance_token"] = token_relevance(self.targets, batch.hidden_PH, batch.residual, *of_rows)
        if self.inputs is not None:
            out["relevance_input"] = input_relevance(self.inputs, self.head, batch.residual, batch.input_P, *of_rows)
        if self.shift_EH is not None or self.tilt is not None:
            delta_PH = hidden_gradient(self.head, batch.residual)
            if self.shift_EH is not None:
                out["relevance_shift"] = shift_relevance(self.shift_EH, delta_PH, *of_rows)
            if self.tilt is not None:
                out["relevance_tilt"] = tilt_relevance(self.tilt, batch.hidden_PH, delta_PH, *of_rows)
        if self.neighbours is not None:
            label_P = batch.residual.label_P
            out["relevance_neighbour"] = neighbour_relevance(self.neighbours, batch.hidden_PH, label_P, *of_rows)
        if self.sketch is not None:
            out["product_sketch"] = self.sketch.apply(batch.hidden_PH, batch.residual, *of_rows)
        return {name: array.cpu().numpy() for name, array in out.items()}

    def unit_relevance(self, units: UnitFeatures) -> dict[str, NDArray[np.float64]]:
        """Relevance of each unit to itself by each kernel that is built, (E,)."""
        every = units.positions
        blocks: list[dict[str, NDArray[np.float64]]] = []
        for start in range(0, every.n_rows, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, every.n_rows)
            among = torch.nonzero((every.row_P >= start) & (every.row_P < stop))[:, 0]
            row_P, by_row = torch.sort(every.row_P[among] - start, stable=True)
            among = among[by_row]
            some = PositionBatch(
                every.hidden_PH[among], every.residual.at(among), row_P, every.input_P[among], stop - start
            )
            found = {name: part for name, part in self.apply(some).items() if name != "product_sketch"}
            blocks.append({name: part[:, start:stop].diagonal().astype(np.float64) for name, part in found.items()})
        out = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        return out if self.gradient is None else out | {"relevance_gradient": self.gradient.own_E}


@dataclass(frozen=True, slots=True)
class Positions:
    """Features at the positions with loss, as they are kept: float16, in order of row."""

    hidden_PH: NDArray[np.float16]
    index_PK: NDArray[np.int32]
    value_PK: NDArray[np.float16]
    row_P: NDArray[np.int32]
    input_P: NDArray[np.int32]
    rest_P: NDArray[np.float16] | None = None

    @classmethod
    def from_batch(cls, batch: PositionBatch, index: NDArray[np.int64]) -> Self:
        """Of the rows `index` of a shard."""
        hidden = batch.hidden_PH.half()
        if not bool(hidden.isfinite().all()):
            raise ModelError(
                "keep_features: hidden states beyond 65504 do not fit the float16 in which positions are kept; "
                "build without keep_features"
            )
        return cls(
            hidden_PH=hidden.cpu().numpy(),
            index_PK=batch.residual.index_PK.int().cpu().numpy(),
            value_PK=batch.residual.value_PK.half().cpu().numpy(),
            row_P=index[batch.row_P.cpu().numpy()].astype(np.int32),
            input_P=batch.input_P.int().cpu().numpy(),
            rest_P=None if batch.residual.rest_P is None else batch.residual.rest_P.half().cpu().numpy(),
        )

    @classmethod
    def join(cls, parts: "Sequence[Positions]") -> Self:
        """Positions of all batches in order of row."""
        order = np.argsort(np.concatenate([part.row_P for part in parts]), kind="stable")
        each = [part.arrays() for part in parts]
        return cls(**{name: np.concatenate([arrays[name] for arrays in each])[order] for name in each[0]})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Those that there are, by name."""
        return {field.name: array for field in fields(self) if (array := getattr(self, field.name)) is not None}

    def batches(self, n_rows: int, device: torch.device) -> Iterator[PositionBatch]:
        """A few rows at a time."""
        edges = np.searchsorted(self.row_P, np.arange(0, n_rows + BATCH_ROWS, BATCH_ROWS))
        for block, (low, high) in enumerate(pairwise(edges)):
            first = block * BATCH_ROWS
            value = torch.from_numpy(self.value_PK[low:high]).to(device).float()
            residual = SparseResidual(
                index_PK=torch.from_numpy(self.index_PK[low:high]).to(device).long(),
                value_PK=value,
                loss_P=value.new_zeros(high - low),
                rest_P=None if self.rest_P is None else torch.from_numpy(self.rest_P[low:high]).to(device).float(),
            )
            hidden = torch.from_numpy(self.hidden_PH[low:high]).to(device).float()
            row = torch.from_numpy(self.row_P[low:high]).to(device).long() - first
            token = torch.from_numpy(self.input_P[low:high]).to(device).long()
            yield PositionBatch(hidden, residual, row, token, min(BATCH_ROWS, n_rows - first))


@dataclass(frozen=True, slots=True)
class ShardForward:
    """What the forward pass gave for the rows of one shard, in row order."""

    pooled: PooledFeatures
    loss_N: NDArray[np.float32]
    arrays: dict[str, NDArray[np.float32]]  # relevance by each position kernel that is built; product_sketch
    positions: Positions | None = None  # where features are kept and kernels of positions are built
    gradients_NK: NDArray[np.uint16] | None = None  # bits of bfloat16; where features and the gradient kernel are

    def spool(self, *, relevance: bool) -> dict[str, NDArray[Any]]:
        """As named arrays: with what the kernels gave, or with all from which a target can be added later."""
        residual = self.pooled.residual_NV
        arrays: dict[str, NDArray[Any]] = {
            "hidden": self.pooled.hidden_NH,
            "residual_value": residual.data,
            "residual_index": residual.indices.astype(np.int32),
            "residual_indptr": residual.indptr.astype(np.int64),
            "loss": self.loss_N,
        }
        if relevance:
            return arrays | {f"token.{name}": array for name, array in self.arrays.items()}
        if self.gradients_NK is not None:
            arrays["gradient"] = self.gradients_NK
        if self.positions is not None:
            arrays |= {f"position.{name}": array for name, array in self.positions.arrays().items()}
        return arrays

    @classmethod
    def unspool(cls, arrays: dict[str, NDArray[Any]], vocab: int) -> Self:
        """Back from named arrays."""
        residual = csr_array(
            (arrays["residual_value"], arrays["residual_index"], arrays["residual_indptr"]),
            shape=(len(arrays["loss"]), vocab),
        )
        built = {name.removeprefix("token."): array for name, array in arrays.items() if name.startswith("token.")}
        positions = None
        if "position.row_P" in arrays:
            names = [field.name for field in fields(Positions) if f"position.{field.name}" in arrays]
            lacking = {field.name for field in fields(Positions)} - {"rest_P"} - set(names)
            if lacking:
                raise ArtifactError(
                    f"features: kept by another version, without {sorted(lacking)}; build the artifact again"
                )
            positions = Positions(**{name: arrays[f"position.{name}"] for name in names})
        return cls(PooledFeatures(arrays["hidden"], residual), arrays["loss"], built, positions, arrays.get("gradient"))


def forward_units(model: Reference, units: Units, names: list[str], settings: FeatureSettings) -> UnitFeatures:
    """Hidden states and residuals of all units; `names` are for messages."""
    pooled, hidden, residual, unit_of, tokens, order = [], [], [], [], [], []
    loss_E = np.empty(len(units), dtype=np.float32)
    for index, batch in forward_passes(model, units, (settings.pooling, "all"), settings.top_k):
        _refuse_bad(batch, [names[e] for e in index], "unit")
        loss_E[index] = batch.row_loss(len(index)).cpu().numpy()
        pooled.append(pool(*batch.take(0), len(index), model.vocab_size))
        part_hidden, part_residual, row_P = batch.take(1)
        hidden.append(part_hidden)
        residual.append(part_residual)
        unit_of.append(torch.from_numpy(index).to(row_P.device)[row_P])
        tokens.append(batch.input_P[batch.chosen[1]])
        order.append(index)
    return UnitFeatures(
        pooled=_in_order(pooled, np.concatenate(order)),
        positions=PositionBatch(
            torch.cat(hidden), stack_residuals(residual), torch.cat(unit_of), torch.cat(tokens), len(units)
        ),
        loss_E=loss_E,
        examples=tuple(Example(unit.input_ids, unit.first) for unit in units) if isinstance(units, Sequence) else (),
    )


def forward_shard(
    model: Reference,
    rows: Rows,
    settings: FeatureSettings,
    kernel: PositionKernels | None,
    *,
    keep_positions: bool = False,
    advance: Advance = ignore,
    seen: list[Pass] | None = None,
) -> ShardForward:
    """Run the model over one shard, a batch of like lengths at a time, and put the results back in row order.

    Args:
        seen: what `position_sums` kept of the same rows, given up here: the model is not run again.
    """
    with_positions = kernel is not None or keep_positions
    specs = (settings.pooling, settings.token_positions) if with_positions else (settings.pooling,)
    names = rows.table.column("row_id")
    order, pooled, arrays, positions = [], [], [], []
    gradients_NK: NDArray[np.uint16] | None = None  # gigabytes: there is one copy of it
    loss_N = np.empty(len(rows), dtype=np.float32)
    back = None if kernel is None else kernel.gradient
    passes: Iterator[tuple[Pass, Tensor | None]]
    if back is not None:
        passes = backward_passes(back.gradients, rows, specs, settings)
    elif seen:
        passes = ((seen.pop(0), None) for _ in range(len(seen)))
    else:
        passes = ((one, None) for one in forward_passes(model, rows, specs, settings.top_k))
    for (index, batch), taken_BK in passes:
        _refuse_bad(batch, [names[int(i)].as_py() for i in index], "row")
        order.append(index)
        loss_N[index] = batch.row_loss(len(index)).cpu().numpy()
        pooled.append(pool(*batch.take(0), len(index), model.vocab_size))
        if with_positions:
            at_positions = PositionBatch.from_batch(batch, len(index))
            if kernel is not None:
                arrays.append(kernel.apply(at_positions))
            if back is not None and taken_BK is not None:
                arrays[-1]["relevance_gradient"] = back.relevance(taken_BK)
            if keep_positions:
                positions.append(Positions.from_batch(at_positions, index))
                if taken_BK is not None:
                    if gradients_NK is None:
                        gradients_NK = np.empty((len(rows), taken_BK.shape[1]), dtype=np.uint16)
                    gradients_NK[index] = taken_BK.bfloat16().view(torch.uint16).cpu().numpy()
        advance(len(index), rows.tokens_of(index))
    where = np.concatenate(order)
    place = np.argsort(where)
    return ShardForward(
        pooled=_in_order(pooled, where),
        loss_N=loss_N,
        arrays={name: np.concatenate([part[name] for part in arrays])[place] for name in arrays[0]} if arrays else {},
        positions=Positions.join(positions) if positions else None,
        gradients_NK=gradients_NK,
    )


class PositionSums:
    """Sums for the token-level moments. Parts merge, and the order of merges decides the last digits."""

    def __init__(self, model: Reference, settings: FeatureSettings) -> None:
        size = model.hidden_size, model.vocab_size
        self.loss: list[float] = []  # sums over some of the positions
        self.token = MomentAccumulator(*size)
        self.input = MomentAccumulator(*size) if "input" in settings.kernels else None
        self.states: list[LabelledStates] | None = [] if "neighbour" in settings.kernels else None

    def merge(self, other: "PositionSums") -> None:
        """Add what another part has."""
        self.token.merge(other.token)
        self.loss.extend(other.loss)
        if self.input is not None and other.input is not None:
            self.input.merge(other.input)
        if self.states is not None and other.states is not None:
            self.states.extend(other.states)

    def moments(self) -> PositionMoments:
        """The moments so far; at least one position."""
        states = None
        if self.states is not None:
            hidden, label = zip(*((part.hidden_MH, part.label_M) for part in self.states), strict=True)
            states = LabelledStates(np.concatenate(hidden), np.concatenate(label))
        token, gradients = self.token.moments(), None if self.input is None else self.input.moments()
        return PositionMoments(token, gradients, states, loss=math.fsum(self.loss) / token.count)


def position_sums(
    model: Reference,
    rows: Rows,
    settings: FeatureSettings,
    every: int = 1,
    *,
    advance: Advance = ignore,
    seen: list[Pass] | None = None,
) -> PositionSums:
    """Sums over the used positions of `rows`; for the neighbour kernel the states of one in `every` are kept.

    Args:
        seen: what the model gave is put there, for `forward_shard`.
    """
    sums = PositionSums(model, settings)
    names = rows.table.column("row_id")
    # the positions of a shard, so that the digits are the same whether these passes are kept or made again
    for index, batch in forward_passes(model, rows, (settings.pooling, settings.token_positions), settings.top_k):
        _refuse_bad(batch, [names[int(i)].as_py() for i in index], "row")
        at = PositionBatch.from_batch(batch, len(index))
        dense = [(sums.token, at.hidden_PH, at.residual)]
        if sums.input is not None:
            dense.append((sums.input, hidden_gradient(model.head, at.residual), input_tokens(at.input_P)))
        for moments, dense_PH, sparse in dense:
            moments.add(dense_PH.cpu().numpy(), sparse.index_PK.cpu().numpy(), sparse.value_PK.cpu().numpy())
        sums.loss.append(float(at.residual.loss_P.double().sum()))
        if sums.states is not None:
            some = slice(every // 2, None, every)
            label_P = at.residual.label_P[some]
            sums.states.append(LabelledStates(at.hidden_PH[some].cpu().numpy(), label_P.cpu().numpy()))
        if seen is not None:
            seen.append((index, batch))
        advance(len(index), rows.tokens_of(index))
    return sums


class Workers:
    """Who runs jobs of the model over parts of the corpus: this process; see also `engine.RayWorkers`.

    Args:
        keep_passes: what the model gives a part for the moments is used again for the shard of the same number.
    """

    def __init__(self, model: Reference, settings: FeatureSettings, *, keep_passes: bool = False) -> None:
        self._model, self._settings = model, settings
        self._seen: dict[int, list[Pass]] | None = {} if keep_passes else None

    def run(
        self,
        job: Callable[..., Any],
        parts: Iterable[tuple[int, Rows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **how: Any,
    ) -> Iterator[tuple[int, Any]]:
        """What `job(model, rows, settings, **how)` gives for each numbered part, as parts are done or `in_order`."""
        for k, rows in parts:
            if self._seen is not None:
                how["seen"] = self._seen.setdefault(k, [])
            yield k, job(self._model, rows, self._settings, advance=advance, **how)


def _in_order(parts: list[PooledFeatures], where: NDArray[np.int64]) -> PooledFeatures:
    back = np.argsort(where)
    residual = vstack([part.residual_NV for part in parts], format="csr")[back]
    return PooledFeatures(np.concatenate([part.hidden_NH for part in parts])[back], residual)


def _refuse_bad(batch: BatchFeatures, names: list[str], what: str) -> None:
    """Stop where the model computed a NaN or an infinity."""
    finite_P = batch.hidden_PH.isfinite().all(dim=1) & batch.residual.loss_P.isfinite()
    finite_P &= batch.residual.value_PK.isfinite().all(dim=1)
    bad = torch.unique(batch.row_P[~finite_P]).tolist()
    if bad:
        named = ", ".join(repr(names[b]) for b in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ModelError(
            f"{what} {named}{more}: the model computed NaN or infinity, expected finite hidden states and losses; "
            "use model.dtype float32, or take it out"
        )
