"""Run the model on batches of rows and units: a forward pass, and a backward pass if a kernel needs it.

All kernels read the same batches: they observe a sample of rows in loop 1 of a build (`observe_part`), and score every
row in loop 2 (`score_shard`). `BatchCache` stores batches between the loops, so that a small corpus passes through the
model once. Start with `ModelPass.batches`.

Shape letters: N rows of a shard, B rows of a batch, S sides of preference pairs, P positions, L tokens, K coordinates,
E units, A answers, C columns of an array.
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
from grasp.artifact.manifest import ArrayFiles
from grasp.corpus.row_store import TokenRows
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

SUMMARY_PREFIX = "tail."  # of the names of stored arrays of `Batch.summary_batch`

Outcome = TypeVar("Outcome")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ModelPass:
    """The model, and the extraction of features for the kernels.

    Attributes:
        model: language model or classifier.
        settings: kernels, positions, and number of probabilities per position.
        sampled: sampled coordinates of gradients; None if no kernel needs a backward pass.
    """

    model: Reference
    settings: FeatureSettings
    sampled: SampledGradients | None = None

    @classmethod
    def choose(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Return the passes that the kernels of `settings` need; chooses coordinates of gradients if they need them."""
        sampled = SampledGradients.choose(model, settings) if needs_backward(settings.kernels) else None
        return cls(model, settings, sampled)

    def batches(self, rows: Rows) -> Iterator[tuple[I64, Batch]]:
        """Yield batches of rows of similar length, each with the positions of its rows in `rows`.

        Raises:
            ModelError: the model computed NaN or infinity; the message names the rows.
        """
        if isinstance(rows, TokenRows) and rows.split_N is not None:
            yield from self._pair_batches(rows)
            return
        row_ids = rows.table.column("row_id")
        for index, features, gradient_BK in self._run_model(rows, self.settings.row_positions):
            batch = self._build_batch(features, [row_ids[int(i)].as_py() for i in index], "row")
            yield index, batch if gradient_BK is None else self._with_gradients(batch, gradient_BK)

    def _with_gradients(self, batch: Batch, gradient_BK: Tensor) -> Batch:
        """Add gradients to a batch, rounded as in storage, so that scores do not depend on whether it is stored."""
        return replace(batch, gradient_BK=_round_to_stored(gradient_BK).to(gradient_BK.dtype), sampled=self.sampled)

    def _pair_batches(self, rows: TokenRows) -> Iterator[tuple[I64, Batch]]:
        """Yield batches of preference pairs, each pair as the difference of its sides.

        At the reference policy, where all log-ratios are 0, the gradient of the DPO loss of a pair is
        beta / 2 (sum of the gradients of the chosen tokens' losses - the same of the rejected tokens). The constant
        is the same for all rows and left out. The mean over the positions of both sides is the mean gradient of a row:
        a side with |P_s| of the |P| positions of the pair has the weight +- |P_s| / |P|.
        Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7.
        """
        assert isinstance(self.model, ReferenceModel)
        for index in self.model.batches(np.diff(rows.offsets)):
            pairs = rows.take(index)
            sides = pairs.sides()
            names = sides.table.column("row_id").to_pylist()
            parts: list[tuple[I64, Batch]] = []
            gradient_SK: Tensor | None = None
            for side, features, gradient_BK in self._run_model(sides, self.settings.row_positions):
                parts.append((side, self._build_batch(features, [names[s] for s in side], "row")))
                if gradient_BK is not None:
                    if gradient_SK is None:
                        gradient_SK = gradient_BK.new_empty(len(sides), gradient_BK.shape[1])
                    gradient_SK[torch.from_numpy(side).to(gradient_BK.device)] = gradient_BK
            batch = merge_batches(parts, len(sides)).rows(0, len(sides))  # positions in the order of the sides
            pair_S, n_positions_S = np.repeat(np.arange(len(index)), 2), batch.positions_B.cpu().numpy()
            share_S = n_positions_S / np.bincount(pair_S, n_positions_S)[pair_S]
            weight_S = np.tile([1.0, -1.0], len(index)) * share_S
            loss_B = np.bincount(pair_S, share_S * batch.loss_B.double().cpu().numpy())
            batch = batch.combined(pair_S, weight_S, torch.from_numpy(loss_B).to(batch.loss_B))
            if gradient_SK is not None:
                gradient_SK *= torch.from_numpy(weight_S).to(gradient_SK)[:, None]
                batch = self._with_gradients(batch, gradient_SK.view(len(index), 2, -1).sum(dim=1))
            yield index, batch

    def units(self, units: Units, names: Sequence[str]) -> Batch:
        """Return all units as one batch with a row per unit; positions are in any order.

        A unit with several answers is the sum of its answers with the weights of its margin, see `Answers.weights`.

        Args:
            units: units, or images of a classifier.
            names: name of each unit, for messages.
        Raises:
            ModelError: the model computed NaN or infinity; the message names the units.
        """
        answers = Answers.of(units) if isinstance(units, Sequence) else None
        if answers is None or answers.are_units:
            weighted: tuple[I64, F64] | None = None
        else:
            units, names = answers.tokens, [names[e] for e in answers.unit_A]
            losses_A = self._answer_losses(units, names)
            # The sign of a unit's weight is that of its column. Its size is left out here, since it counts only when
            # units are averaged.
            weighted = answers.unit_A, answers.weights(losses_A) / np.abs(answers.sign_E)[answers.unit_A]
        n_units = len(units) if answers is None else len(answers.sign_E)
        gradient_EK = (
            None
            if self.sampled is None
            else allocate_unit_gradients(n_units, self.sampled, self.settings.gradient_memory_mb)
        )
        if gradient_EK is not None and weighted is not None:
            gradient_EK.zero_()
        parts: list[tuple[I64, Batch]] = []
        for index, features, gradient_BK in self._run_model(units, self.settings.unit_positions):
            parts.append((index, self._build_batch(features, [names[e] for e in index], "unit")))
            if gradient_BK is None or gradient_EK is None:
                continue
            # Rounded before the copy, so that results do not depend on where the units are stored.
            rounded_BK = _round_to_stored(gradient_BK).to(gradient_EK.device, gradient_EK.dtype)
            if weighted is None:
                gradient_EK[torch.from_numpy(index).to(gradient_EK.device)] = rounded_BK
                continue
            unit_A, weight_A = weighted
            for a, gradient_K in zip(index, rounded_BK, strict=True):
                gradient_EK[unit_A[a]] += float(weight_A[a]) * gradient_K
        batch = merge_batches(parts, len(units))
        if weighted is not None and answers is not None:
            loss_E = torch.from_numpy(-answers.utilities(losses_A)).to(batch.loss_B)
            batch = batch.combined(*weighted, loss_E)
        return replace(batch, gradient_BK=gradient_EK, sampled=self.sampled)

    def _answer_losses(self, units: Sequence[UnitTokens], names: Sequence[str]) -> F64:
        """Return the mean loss of each answer, (A,)."""
        loss_A = np.empty(len(units))
        for index, features in forward_passes(self.model, units, ("all",), 1):
            refuse_non_finite(features, [names[a] for a in index], "unit")
            loss_A[index] = features.row_loss(len(index)).double().cpu().numpy()
        return loss_A

    def _run_model(
        self, items: Rows | Units, position_specs: tuple[str, ...]
    ) -> Iterator[tuple[I64, BatchFeatures, Tensor | None]]:
        """Run the model on rows or units in batches.

        Args:
            items: rows or units.
            position_specs: positions whose features are extracted, such as `all` or `tail:32`.
        Yields:
            Positions of the batch in `items`, its features, and coordinates of its gradients, if a kernel needs them.
        """
        if self.sampled is None:
            for index, features in forward_passes(self.model, items, position_specs, self.settings.top_k):
                yield index, features, None
            return
        assert isinstance(self.model, ReferenceModel)
        assert isinstance(items, TokenRows | Sequence)
        examples = row_examples(items, self.settings) if isinstance(items, TokenRows) else unit_examples(items)
        compute = self.sampled.compute
        for batch_index in self.sampled.batches(examples):
            parts = split_on_oom(batch_index, lambda index: compute([examples[int(i)] for i in index]))
            for index, (gradient_BK, hidden_BLH) in parts:
                batch_examples = [examples[int(i)] for i in index]
                loss_positions = (
                    [items.mask(int(i)) for i in index]
                    if isinstance(items, TokenRows)
                    else [example.first for example in batch_examples]
                )
                padded = pad_rows([example.input_ids for example in batch_examples], loss_positions)
                features = extract(self.model, *padded, position_specs, self.settings.top_k, hidden_BLH)
                yield index, features, gradient_BK

    def _build_batch(self, features: BatchFeatures, names: Sequence[str], kind: str) -> Batch:
        """Build a batch from the features of a pass.

        The first set of positions is that of the kernels; a second one, if any, is that of summaries.

        Args:
            features: features of the rows or units.
            names: their names, for messages.
            kind: `row` or `unit`, for messages.
        """
        refuse_non_finite(features, names, kind)
        n_rows = len(names)
        loss_B, head, vocab_size = features.row_loss(n_rows), self.model.head, self.model.vocab_size
        batch: Batch | None = None
        for spec_index in reversed(range(len(features.position_masks))):
            hidden_PH, residual, row_P = features.take(spec_index)
            input_P = features.input_P[features.position_masks[spec_index]]
            batch = Batch(hidden_PH, residual, row_P, input_P, n_rows, loss_B, head, vocab_size, summary_batch=batch)
        assert batch is not None
        return batch


def merge_batches(parts: Sequence[tuple[I64, Batch]], n_rows: int) -> Batch:
    """Merge batches without their gradients; positions are in the order of the batches.

    Args:
        parts: batches, each with the row numbers of its rows in the merged batch.
        n_rows: number of rows of the merged batch.
    """
    batches = [batch for _, batch in parts]
    loss_B = batches[0].loss_B.new_zeros(n_rows)
    row_numbers = [torch.from_numpy(index).to(loss_B.device) for index, _ in parts]
    for row_B, batch in zip(row_numbers, batches, strict=True):
        loss_B[row_B] = batch.loss_B
    summaries = [(index, batch.summary_batch) for index, batch in parts if batch.summary_batch is not None]
    return replace(
        batches[0],
        hidden_PH=torch.cat([batch.hidden_PH for batch in batches]),
        residual=stack_residuals([batch.residual for batch in batches]),
        row_P=torch.cat([row_B[batch.row_P] for row_B, batch in zip(row_numbers, batches, strict=True)]),
        input_P=torch.cat([batch.input_P for batch in batches]),
        n_rows=n_rows,
        loss_B=loss_B,
        summary_batch=merge_batches(summaries, n_rows) if summaries else None,
        gradient_BK=None,
    )


def unit_examples(units: Sequence[UnitTokens]) -> list[Example]:
    """Return units as texts for a backward pass."""
    return [Example(unit.input_ids, unit.first) for unit in units]


def row_examples(rows: TokenRows, settings: FeatureSettings) -> list[Example]:
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
    """Run a batch; if the GPU runs out of memory, run its halves, recursively.

    Args:
        index: indices of the rows of the batch.
        run: computes the outcome of some rows.
    Raises:
        ModelError: the memory does not suffice for one row.
    """
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


def refuse_non_finite(features: BatchFeatures, names: Sequence[str], kind: str) -> None:
    """Raise an error that names the rows or units for which the model computed NaN or infinity."""
    finite_P = features.hidden_PH.isfinite().all(dim=1) & features.residual.loss_P.isfinite()
    finite_P &= features.residual.value_PK.isfinite().all(dim=1)
    non_finite = torch.unique(features.row_P[~finite_P]).tolist()
    if non_finite:
        named = ", ".join(repr(names[row]) for row in non_finite[:5])
        more = f" and {len(non_finite) - 5} more" if len(non_finite) > 5 else ""
        raise ModelError(
            f"{kind} {named}{more}: the model computed NaN or infinity, expected finite hidden states and losses; "
            "use model.dtype: float32, or remove it from the input"
        )


# ---------------------------------------------------------------------------------- batches that are stored


def batch_arrays(k: int, index: I64, batch: Batch, *, half: bool = False) -> Arrays:
    """Convert the k-th batch of a part of the corpus to named arrays; the inverse of `read_batches`.

    Args:
        k: number of the batch, the prefix of the names.
        index: positions of its rows in the part.
        batch: features of the rows.
        half: store hidden states and residuals in float16, as an artifact does; else unchanged.
    Raises:
        ModelError: hidden states that do not fit float16.
    """
    arrays: Arrays = {f"{k}.rows": index}
    for prefix, positions in (("", batch), (SUMMARY_PREFIX, batch.summary_batch)):
        if positions is not None:
            arrays |= {f"{k}.{prefix}{name}": array for name, array in _position_arrays(positions, half=half).items()}
    if batch.gradient_BK is not None:
        stored_BK = _round_to_stored(batch.gradient_BK)
        is_bfloat16 = stored_BK.dtype == torch.bfloat16  # numpy has no bfloat16: its bits are stored
        arrays[f"{k}.gradient"] = (stored_BK.view(torch.uint16) if is_bfloat16 else stored_BK).cpu().numpy()
    return arrays


def _round_to_stored(gradient_BK: Tensor) -> Tensor:
    """Convert coordinates to the dtype in which they are stored: bfloat16, or float64 if the model has float64."""
    return gradient_BK if gradient_BK.dtype == torch.float64 else gradient_BK.bfloat16()


def _position_arrays(batch: Batch, *, half: bool) -> Arrays:
    """Return the features of a batch at its positions as named arrays."""
    hidden_PH = batch.hidden_PH.half() if half else batch.hidden_PH
    if half and not bool(hidden_PH.isfinite().all()):
        raise ModelError(
            "keep_features: hidden states beyond 65504 do not fit float16, in which features are stored; build "
            "without keep_features"
        )
    residual = batch.residual
    tensors = {
        "hidden": hidden_PH,
        "index": residual.index_PK.int(),
        "value": residual.value_PK.half() if half else residual.value_PK,
        "loss": residual.loss_P,
        "row": batch.row_P.int(),
        "input": batch.input_P.int(),
        "row_loss": batch.loss_B,
    }
    if batch.weight_P is not None:
        tensors["weight"] = batch.weight_P
    if residual.rest_P is not None:
        tensors["rest"] = residual.rest_P.half() if half else residual.rest_P
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def read_batches(
    arrays: Mapping[str, NDArray[Any]], model_pass: ModelPass | None, vocab_size: int
) -> Iterator[tuple[I64, Batch]]:
    """Yield the batches that `batch_arrays` converted, on the device of the model, each with positions of its rows.

    Args:
        arrays: named arrays of one or several batches.
        model_pass: None if the model is not loaded; batches then lack the output layer and gradients.
        vocab_size: number of outputs of the model.
    Raises:
        ArtifactError: the batches were stored by another version.
    """
    if "0.rows" not in arrays:
        raise ArtifactError("features: stored by another version; rebuild the artifact")
    n_batches = 1 + max(int(name.partition(".")[0]) for name in arrays)
    for k in range(n_batches):
        index, summary_prefix = arrays[f"{k}.rows"], f"{k}.{SUMMARY_PREFIX}"
        batch = _read_batch(arrays, f"{k}.", len(index), model_pass, vocab_size)
        if f"{summary_prefix}hidden" in arrays:
            summary_batch = _read_batch(arrays, summary_prefix, len(index), model_pass, vocab_size)
            batch = replace(batch, summary_batch=summary_batch)
        if model_pass is None:
            yield index, batch
            continue
        gradient_BK = None
        if f"{k}.gradient" in arrays and model_pass.sampled is not None:
            stored_BK = torch.from_numpy(arrays[f"{k}.gradient"])
            stored_BK = stored_BK.view(torch.bfloat16) if stored_BK.dtype == torch.uint16 else stored_BK
            gradient_BK = stored_BK.to(model_pass.model.device, model_pass.sampled.engine.work)
        yield index, replace(batch, gradient_BK=gradient_BK, sampled=model_pass.sampled)


def _read_batch(
    arrays: Mapping[str, NDArray[Any]], prefix: str, n_rows: int, model_pass: ModelPass | None, vocab_size: int
) -> Batch:
    """Return the batch whose arrays have names with a prefix, in the precision of its losses."""
    device = torch.device("cpu") if model_pass is None else model_pass.model.device
    tensors = {
        name.removeprefix(prefix): torch.from_numpy(array).to(device)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    dtype = tensors["loss"].dtype
    residual = SparseResidual(
        tensors["index"].long(),
        tensors["value"].to(dtype),
        tensors["loss"],
        tensors["rest"].to(dtype) if "rest" in tensors else None,
    )
    return Batch(
        tensors["hidden"].to(dtype),
        residual,
        tensors["row"].long(),
        tensors["input"].long(),
        n_rows,
        tensors["row_loss"],
        None if model_pass is None else model_pass.model.head,
        vocab_size,
        weight_P=tensors["weight"].to(dtype) if "weight" in tensors else None,
    )


# -------------------------------------------------------------------- the two loops of a build


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """Losses and arrays of the rows of a shard, in their order.

    Attributes:
        loss_N: mean loss of each row, nats per token.
        arrays: array of each kernel, (N, C), by its name.
        features: the batches as an artifact stores them; None if they are not stored.
    """

    loss_N: F32
    arrays: dict[str, F32]
    features: Arrays | None = None


class BatchCache:
    """Batches of loop 1 on disk, which loop 2 reads instead of running the model. Memory: one batch.

    Args:
        directory: directory of the files.
        ends: number of batches up to the end of each shard. Default: none are written yet.
    """

    def __init__(self, directory: Path, ends: Sequence[int] | None = None) -> None:
        self._spool = ArrayFiles(directory)
        self._n_batches = 0
        self.ends = list(ends or ())

    def write(self, batch: Arrays) -> None:
        """Write the next batch of the shard."""
        self._spool.write(self._n_batches, batch)
        self._n_batches += 1

    def end_shard(self) -> None:
        """Record that the next batches are those of the next shard."""
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
    on_batch: Callable[[Arrays], None] | None = None,
    advance: Advance = ignore,
) -> CorpusMoments:
    """Run the model on a part of the sample, and return the moments of all kernels.

    Args:
        model_pass: the model, and the features to extract.
        rows: rows of the part.
        states_every: one in `states_every` hidden states is stored.
        on_batch: callback that receives each batch as arrays, which `score_shard` accepts as `cached_batches`.
        advance: callback that receives the numbers of rows and tokens of each batch.
    """
    corpus = CorpusMoments(model_pass.model, states_every)
    kernels = make_kernels(model_pass.settings.kernels, model_pass.model, model_pass.settings, corpus)
    for index, batch in model_pass.batches(rows):
        corpus.observe_loss(batch)
        for kernel in kernels:
            kernel.observe(batch)
        if on_batch is not None:
            on_batch(batch_arrays(0, index, batch))
        advance(len(index), rows.tokens_of(index))
    return corpus


def score_shard(
    model_pass: ModelPass,
    rows: Rows,
    *,
    kernels: Sequence[Kernel],
    keep_features: bool = False,
    cached_batches: Iterable[Arrays] | None = None,
    advance: Advance = ignore,
) -> ScoredShard:
    """Run the model on the rows of a shard, and score each batch by every kernel.

    Args:
        model_pass: the model, and the features to extract.
        rows: rows of the shard.
        kernels: prepared kernels.
        keep_features: also return the batches as an artifact stores them.
        cached_batches: batches of these rows from `batch_arrays`, used instead of running the model.
        advance: callback that receives the numbers of rows and tokens of each batch.
    """
    loss_N = np.empty(len(rows), dtype=np.float32)
    arrays: dict[str, F32] = {}
    features: Arrays = {}
    batches = model_pass.batches(rows)
    if cached_batches is not None:
        vocab_size = model_pass.model.vocab_size
        batches = chain.from_iterable(read_batches(cached, model_pass, vocab_size) for cached in cached_batches)
    for k, (index, batch) in enumerate(batches):
        loss_N[index] = batch.loss_B.cpu().numpy()
        for kernel in kernels:
            score_BC = kernel.score(batch).cpu().numpy()
            if kernel.array not in arrays:
                arrays[kernel.array] = np.empty((len(rows), score_BC.shape[1]), dtype=np.float32)
            arrays[kernel.array][index] = score_BC
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
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the result of `job(model_pass, rows, **options)` for each part, with the number of the part.

        Args:
            job: function to run, such as `observe_part`.
            parts: numbers and rows of the parts.
            advance: callback that receives the numbers of rows and tokens processed.
            in_order: yield results in the order of the parts, not as they finish.
            options: further arguments of the job.
        """
        for k, rows in parts:
            yield k, job(self._model_pass, rows, advance=advance, **options)
