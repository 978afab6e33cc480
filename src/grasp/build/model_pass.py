"""Pass rows and units through the model in batches: forward, and backward if a kernel needs it.

Each row and each unit passes through the model once, and all kernels read the same batch: they observe it in loop 1
(`observe_part`) and score it in loop 2 (`score_shard`). `BatchCache` stores batches between the loops.
Start with `ModelPass.batches`.
Shape letters: N rows of a shard, B rows of a batch, L tokens, K coordinates, E units, C columns of an array.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F32, F64, I64
from grasp.artifact.manifest import FeatureSpool
from grasp.corpus.row_store import RowShard
from grasp.errors import ArtifactError, ModelError
from grasp.kernels.gradient import SampledGradients, allocate_unit_gradients
from grasp.kernels.kernel import Batch, CorpusMoments, Kernel, make_kernels, needs_backward
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import BatchFeatures, Reference, Rows, Units, extract, forward_passes, position_mask
from grasp.models.gradients import Example
from grasp.models.residuals import SparseResidual, stack_residuals
from grasp.progress import Advance, ignore
from grasp.settings import FeatureSettings
from grasp.targets.margins import Answers
from grasp.targets.units import UnitTokens

Outcome = TypeVar("Outcome")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ModelPass:
    """The model and the extraction of features for the kernels.

    Attributes:
        sampled: sampled coordinates of gradients; None if no kernel needs a backward pass.
    """

    model: Reference
    settings: FeatureSettings
    sampled: SampledGradients | None = None

    @classmethod
    def choose(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Prepare the passes that the kernels of `settings` need."""
        sampled = SampledGradients.choose(model, settings) if needs_backward(settings.kernels) else None
        return cls(model, settings, sampled)

    def batches(self, rows: Rows) -> Iterator[tuple[I64, Batch]]:
        """Yield batches of rows of similar length, each with the positions of its rows in `rows`.

        Raises:
            ModelError: the model computed NaN or infinity; the message names the rows.
        """
        if isinstance(rows, RowShard) and rows.split_N is not None:
            yield from self._pair_batches(rows)
            return
        column, specs = rows.table.column("row_id"), self.settings.row_positions
        for index, features, gradient_BK in self._passes(rows, specs):
            batch = self._batch(features, [column[int(i)].as_py() for i in index], "row")
            if gradient_BK is not None:
                batch = replace(batch, gradient_BK=_narrow(gradient_BK).to(gradient_BK.dtype), sampled=self.sampled)
            yield index, batch

    def _pair_batches(self, rows: RowShard) -> Iterator[tuple[I64, Batch]]:
        """Yield batches of preference pairs, as the difference of their sides.

        At the reference policy, where all log-ratios are 0, the gradient of the DPO loss of a pair is
        beta / 2 (sum of the gradients of the chosen tokens' losses - the same of the rejected tokens). The constant
        is the same for all rows and left out. The mean over the positions of both sides is the mean gradient of a row.
        Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7.
        """
        assert isinstance(self.model, ReferenceModel)
        for index in self.model.batches(np.diff(rows.offsets)):
            pairs = rows.take(index)
            sides = pairs.sides()
            names = sides.table.column("row_id").to_pylist()
            parts: list[tuple[I64, Batch]] = []
            gradient_SK: Tensor | None = None
            for part, features, gradient_BK in self._passes(sides, self.settings.row_positions):
                parts.append((part, self._batch(features, [names[s] for s in part], "row")))
                if gradient_BK is not None:
                    if gradient_SK is None:
                        gradient_SK = gradient_BK.new_empty(len(sides), gradient_BK.shape[1])
                    gradient_SK[torch.from_numpy(part).to(gradient_BK.device)] = gradient_BK
            batch = merge_batches(parts, len(sides)).rows(0, len(sides))  # positions in the order of the sides
            pair_S, count_S = np.repeat(np.arange(len(index)), 2), batch.positions_B.cpu().numpy()
            share_S = count_S / np.bincount(pair_S, count_S)[pair_S]
            weight_S = np.tile([1.0, -1.0], len(index)) * share_S
            loss_B = np.bincount(pair_S, share_S * batch.loss_B.double().cpu().numpy())
            batch = batch.combined(pair_S, weight_S, torch.from_numpy(loss_B).to(batch.loss_B))
            if gradient_SK is not None:
                gradient_SK *= torch.from_numpy(weight_S).to(gradient_SK)[:, None]
                gradient_BK = gradient_SK.view(len(index), 2, -1).sum(dim=1)
                batch = replace(batch, gradient_BK=_narrow(gradient_BK).to(gradient_BK.dtype), sampled=self.sampled)
            yield index, batch

    def units(self, units: Units, names: Sequence[str]) -> Batch:
        """Pass all units and return them as one batch with a row per unit; positions are in any order.

        A unit with several answers is the sum of its answers with the weights of its margin, see `Answers.weights`.
        """
        answers = Answers.of(units) if isinstance(units, Sequence) else None
        if answers is None or answers.are_units:
            sums: tuple[I64, F64] | None = None
        else:
            units, names = answers.tokens, [names[e] for e in answers.unit_A]
            losses_A = self._losses(units, names)
            # the sign of a unit's weight is that of its column; its size counts where units are averaged
            sums = answers.unit_A, answers.weights(losses_A) / np.abs(answers.sign_E)[answers.unit_A]
        n_units = len(units) if answers is None else len(answers.sign_E)
        gradient_EK = (
            None
            if self.sampled is None
            else allocate_unit_gradients(n_units, self.sampled, self.settings.gradient_memory_mb)
        )
        if gradient_EK is not None and sums is not None:
            gradient_EK.zero_()
        parts: list[tuple[I64, Batch]] = []
        for index, features, gradient_BK in self._passes(units, self.settings.unit_positions):
            parts.append((index, self._batch(features, [names[e] for e in index], "unit")))
            if gradient_BK is None or gradient_EK is None:
                continue
            # Rounded before the copy, so that results do not depend on where the units are stored.
            narrow_BK = _narrow(gradient_BK).to(gradient_EK.device, gradient_EK.dtype)
            if sums is None:
                gradient_EK[torch.from_numpy(index).to(gradient_EK.device)] = narrow_BK
                continue
            for a, gradient_K in zip(index, narrow_BK, strict=True):
                gradient_EK[sums[0][a]] += float(sums[1][a]) * gradient_K
        batch = merge_batches(parts, len(units))
        if sums is not None and answers is not None:
            loss_E = torch.from_numpy(-answers.utilities(losses_A)).to(batch.loss_B)
            batch = batch.combined(*sums, loss_E)
        return replace(batch, gradient_BK=gradient_EK, sampled=self.sampled)

    def _losses(self, units: Sequence[UnitTokens], names: Sequence[str]) -> F64:
        """Return the mean loss of each answer, (A,)."""
        loss_A = np.empty(len(units))
        for index, features in forward_passes(self.model, units, ("all",), 1):
            refuse_non_finite(features, [names[a] for a in index], "unit")
            loss_A[index] = features.row_loss(len(index)).double().cpu().numpy()
        return loss_A

    def _passes(
        self, items: Rows | Units, specs: tuple[str, ...]
    ) -> Iterator[tuple[I64, BatchFeatures, Tensor | None]]:
        """Yield batches of rows or units: their positions in `items`, features, and coordinates of gradients."""
        if self.sampled is None:
            for index, features in forward_passes(self.model, items, specs, self.settings.top_k):
                yield index, features, None
            return
        assert isinstance(self.model, ReferenceModel)
        assert isinstance(items, RowShard | Sequence)
        examples = row_examples(items, self.settings) if isinstance(items, RowShard) else unit_examples(items)
        for index in self.sampled.batches(examples):
            for part, (gradient_BK, hidden_BLH) in split_on_oom(index, self._backward_pass(examples)):
                batch_examples = [examples[int(i)] for i in part]
                scored = (
                    [items.mask(int(i)) for i in part]
                    if isinstance(items, RowShard)
                    else [example.first for example in batch_examples]
                )
                padded = pad_rows([example.input_ids for example in batch_examples], scored)
                yield part, extract(self.model, *padded, specs, self.settings.top_k, hidden_BLH), gradient_BK

    def _backward_pass(self, examples: Sequence[Example]) -> Callable[[I64], tuple[Tensor, Tensor]]:
        assert self.sampled is not None
        compute = self.sampled.compute
        return lambda index: compute([examples[int(i)] for i in index])

    def _batch(self, features: BatchFeatures, names: Sequence[str], what: str) -> Batch:
        """Build a batch from the features of a pass; `tail` has the positions of summaries if they differ."""
        refuse_non_finite(features, names, what)
        n_rows = len(names)
        loss_B, head, vocab_size = features.row_loss(n_rows), self.model.head, self.model.vocab_size
        tail = None
        for spec_index in reversed(range(len(features.position_masks))):
            hidden_PH, residual, row_P = features.take(spec_index)
            input_P = features.input_P[features.position_masks[spec_index]]
            tail = Batch(hidden_PH, residual, row_P, input_P, n_rows, loss_B, head, vocab_size, tail)
        assert tail is not None
        return tail


def merge_batches(parts: Sequence[tuple[I64, Batch]], n_rows: int) -> Batch:
    """Merge batches, given the row numbers of each; positions are in the order of the batches."""
    first = parts[0][1]
    loss_B = first.loss_B.new_zeros(n_rows)
    numbers = [torch.from_numpy(index).to(loss_B.device) for index, _ in parts]
    for number_B, (_, part) in zip(numbers, parts, strict=True):
        loss_B[number_B] = part.loss_B
    tails = [(index, part.tail) for index, part in parts if part.tail is not None]
    return replace(
        first,
        hidden_PH=torch.cat([part.hidden_PH for _, part in parts]),
        residual=stack_residuals([part.residual for _, part in parts]),
        row_P=torch.cat([number_B[part.row_P] for number_B, (_, part) in zip(numbers, parts, strict=True)]),
        input_P=torch.cat([part.input_P for _, part in parts]),
        n_rows=n_rows,
        loss_B=loss_B,
        tail=merge_batches(tails, n_rows) if tails else None,
        gradient_BK=None,
    )


def unit_examples(units: Sequence[UnitTokens]) -> list[Example]:
    """Return units as texts for a backward pass."""
    return [Example(unit.input_ids, unit.first) for unit in units]


def row_examples(rows: RowShard, settings: FeatureSettings) -> list[Example]:
    """Return rows as texts for a backward pass, with the tokens that carry loss at the positions of the kernels."""
    examples = []
    for i in range(len(rows)):
        ids, mask = rows.ids(i), rows.mask(i)
        loss_mask = np.ones(len(ids), dtype=np.bool_) if mask is None else mask.copy()
        loss_mask[0] = False
        if settings.positions != "all":
            used_1L = position_mask(settings.positions, torch.from_numpy(loss_mask)[None])
            loss_mask[1:] = used_1L[0, :-1].numpy()
        examples.append(Example(ids, loss_mask=loss_mask))
    return examples


def split_on_oom(index: I64, run: Callable[[I64], Outcome]) -> Iterator[tuple[I64, Outcome]]:
    """Run a batch; if the GPU runs out of memory, run its halves."""
    try:
        outcome = run(index)
    except torch.cuda.OutOfMemoryError as err:
        if len(index) == 1:
            raise ModelError(
                "the GPU has no memory for a backward pass over one row; use --dtype bfloat16, a smaller "
                "--max-length, or --rule forward"
            ) from err
    else:
        yield index, outcome
        return
    torch.cuda.empty_cache()  # after the except block: the error holds references to the batch's tensors
    for half in np.array_split(index, 2):
        yield from split_on_oom(half, run)


def refuse_non_finite(features: BatchFeatures, names: Sequence[str], what: str) -> None:
    """Raise an error if the model computed a NaN or an infinity."""
    finite_P = features.hidden_PH.isfinite().all(dim=1) & features.residual.loss_P.isfinite()
    finite_P &= features.residual.value_PK.isfinite().all(dim=1)
    bad = torch.unique(features.row_P[~finite_P]).tolist()
    if bad:
        named = ", ".join(repr(names[b]) for b in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ModelError(
            f"{what} {named}{more}: the model computed NaN or infinity, expected finite hidden states and losses; "
            "use model.dtype: float32, or remove it from the input"
        )


# ---------------------------------------------------------------------------------- batches that are kept in a file


def batch_arrays(k: int, index: I64, batch: Batch, *, half: bool = False) -> Arrays:
    """Convert the k-th batch of a part to named arrays, the inverse of `read_batches`.

    Args:
        index: places of its rows in the part.
        half: store hidden states and residuals in float16, as an artifact does; else unchanged.
    Raises:
        ModelError: hidden states that do not fit float16.
    """
    arrays: Arrays = {f"{k}.rows": index}
    for part, at in (("", batch), ("tail.", batch.tail)):
        if at is not None:
            arrays |= {f"{k}.{part}{name}": array for name, array in _arrays(at, half=half).items()}
    if batch.gradient_BK is not None:
        narrow_BK = _narrow(batch.gradient_BK)
        is_short = narrow_BK.dtype == torch.bfloat16
        arrays[f"{k}.gradient"] = (narrow_BK.view(torch.uint16) if is_short else narrow_BK).cpu().numpy()
    return arrays


def _narrow(gradient_BK: Tensor) -> Tensor:
    """Convert coordinates to the dtype in which they are stored: bfloat16, or float64 if the model has float64."""
    return gradient_BK if gradient_BK.dtype == torch.float64 else gradient_BK.bfloat16()


def _arrays(batch: Batch, *, half: bool) -> Arrays:
    hidden_PH = batch.hidden_PH.half() if half else batch.hidden_PH
    if half and not bool(hidden_PH.isfinite().all()):
        raise ModelError(
            "keep_features: hidden states beyond 65504 do not fit float16, in which features are stored; build "
            "without keep_features"
        )
    at = batch.residual
    parts = {
        "hidden": hidden_PH,
        "index": at.index_PK.int(),
        "value": at.value_PK.half() if half else at.value_PK,
        "loss": at.loss_P,
        "row": batch.row_P.int(),
        "input": batch.input_P.int(),
        "row_loss": batch.loss_B,
    }
    if batch.weight_P is not None:
        parts["weight"] = batch.weight_P
    if at.rest_P is not None:
        parts["rest"] = at.rest_P.half() if half else at.rest_P
    return {name: part.cpu().numpy() for name, part in parts.items()}


def read_batches(
    arrays: Mapping[str, NDArray[Any]], model_pass: ModelPass | None, vocab_size: int
) -> Iterator[tuple[I64, Batch]]:
    """Yield the batches of `batch_arrays`, on the device of the model.

    Args:
        model_pass: None if the model is not loaded; batches then lack the output layer and gradients.
    Raises:
        ArtifactError: the batches were stored by another version.
    """
    if "0.rows" not in arrays:
        raise ArtifactError("features: stored by another version; rebuild the artifact")
    count = 1 + max(int(name.partition(".")[0]) for name in arrays)
    for k in range(count):
        index = arrays[f"{k}.rows"]
        context = len(index), model_pass, vocab_size
        tail = _batch_of(arrays, f"{k}.tail.", *context) if f"{k}.tail.hidden" in arrays else None
        batch = _batch_of(arrays, f"{k}.", *context)
        if model_pass is None:
            yield index, replace(batch, tail=tail)
            continue
        gradient_BK = None
        if f"{k}.gradient" in arrays and model_pass.sampled is not None:
            stored_BK = torch.from_numpy(arrays[f"{k}.gradient"])
            stored_BK = stored_BK.view(torch.bfloat16) if stored_BK.dtype == torch.uint16 else stored_BK
            gradient_BK = stored_BK.to(model_pass.model.device, model_pass.sampled.engine.work)
        yield index, replace(batch, tail=tail, gradient_BK=gradient_BK, sampled=model_pass.sampled)


def _batch_of(
    arrays: Mapping[str, NDArray[Any]], prefix: str, n_rows: int, model_pass: ModelPass | None, vocab_size: int
) -> Batch:
    device = torch.device("cpu") if model_pass is None else model_pass.model.device
    part = {
        name.removeprefix(prefix): torch.from_numpy(array).to(device)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    work = part["loss"].dtype
    residual = SparseResidual(
        part["index"].long(), part["value"].to(work), part["loss"], part["rest"].to(work) if "rest" in part else None
    )
    return Batch(
        part["hidden"].to(work),
        residual,
        part["row"].long(),
        part["input"].long(),
        n_rows,
        part["row_loss"],
        None if model_pass is None else model_pass.model.head,
        vocab_size,
        weight_P=part["weight"].to(work) if "weight" in part else None,
    )


# -------------------------------------------------------------------- what the model does in the two loops of a build


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """The numbers of a shard, in order of row.

    Attributes:
        arrays: numbers of each kernel, (N, C), by the name of its array.
        features: the batches as an artifact stores them; None if they are not stored.
    """

    loss_N: F32
    arrays: dict[str, F32]
    features: Arrays | None = None


class BatchCache:
    """Batches of loop 1 on disk, which loop 2 reads instead of running the model. Memory: one batch.

    Args:
        ends: number of batches up to the end of each shard. Default: none are written yet.
    """

    def __init__(self, directory: Path, ends: Sequence[int] | None = None) -> None:
        self._spool = FeatureSpool(directory)
        self._n_batches = 0
        self.ends = list(ends or ())

    def write(self, batch: Arrays) -> None:
        """Write the next batch of the shard."""
        self._spool.write(self._n_batches, batch)
        self._n_batches += 1

    def end_shard(self) -> None:
        """Note that the batches of the next shard follow."""
        self.ends.append(self._n_batches)

    def read(self, k: int) -> Iterator[Arrays]:
        """Yield the batches of shard k."""
        for number in range(self.ends[k - 1] if k else 0, self.ends[k]):
            yield self._spool.read(number)


def observe_part(
    model_pass: ModelPass,
    rows: Rows,
    *,
    states_every: int,
    keep: Callable[[Arrays], None] | None = None,
    advance: Advance = ignore,
) -> CorpusMoments:
    """Pass a part of the sample through the model, and return the moments of all kernels.

    Args:
        states_every: one in `states_every` hidden states is stored.
        keep: receives each batch as arrays, which `score_shard` accepts as `passed`.
    """
    corpus = CorpusMoments(model_pass.model, states_every)
    kernels = make_kernels(model_pass.settings.kernels, model_pass.model, model_pass.settings, corpus)
    for index, batch in model_pass.batches(rows):
        corpus.observe_loss(batch)
        for kernel in kernels:
            kernel.observe(batch)
        if keep is not None:
            keep(batch_arrays(0, index, batch))
        advance(len(index), rows.tokens_of(index))
    return corpus


def score_shard(
    model_pass: ModelPass,
    rows: Rows,
    *,
    kernels: Sequence[Kernel],
    keep_features: bool = False,
    passed: Iterable[Arrays] | None = None,
    advance: Advance = ignore,
) -> ScoredShard:
    """Pass the rows of a shard through the model, and score each batch by every kernel.

    Args:
        keep_features: also return the batches as an artifact stores them.
        passed: batches of these rows from `batch_arrays`, used instead of running the model.
    """
    loss_N = np.empty(len(rows), dtype=np.float32)
    arrays: dict[str, F32] = {}
    features: Arrays = {}
    batches = model_pass.batches(rows)
    if passed is not None:
        vocab_size = model_pass.model.vocab_size
        batches = chain.from_iterable(read_batches(arrays, model_pass, vocab_size) for arrays in passed)
    for k, (index, batch) in enumerate(batches):
        loss_N[index] = batch.loss_B.cpu().numpy()
        for kernel in kernels:
            part_BC = kernel.score(batch).cpu().numpy()
            if kernel.array not in arrays:
                arrays[kernel.array] = np.empty((len(rows), part_BC.shape[1]), dtype=np.float32)
            arrays[kernel.array][index] = part_BC
        if keep_features:
            features |= batch_arrays(k, index, batch, half=True)
        advance(len(index), rows.tokens_of(index))
    return ScoredShard(loss_N, arrays, features or None)


class Workers:
    """Run jobs of the model over parts of the corpus, in this process; see also `engine.RayWorkers`."""

    def __init__(self, model_pass: ModelPass) -> None:
        self._model_pass = model_pass

    def run(
        self,
        job: Callable[..., Any],
        parts: Iterable[tuple[int, Rows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **how: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the result of `job(model_pass, rows, **how)` for each numbered part, as parts finish or `in_order`."""
        for k, rows in parts:
            yield k, job(self._model_pass, rows, advance=advance, **how)
