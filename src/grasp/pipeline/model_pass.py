"""Run the model on batches of rows and units: a forward pass, and a backward pass if a kernel needs it.

`ModelPass` turns rows or units into batches of features, which all kernels read. The two loops of a build (see
`grasp.pipeline.pipeline`) call `compute_moments` on a sample of rows, and `score_shard` on every shard. `BatchCache`
stores batches between the loops, so that a small corpus passes through the model once. Start with `ModelPass.batches`.

A row or unit has loss at some positions (predictions of a next token); features are extracted there or at some of them.
Shape letters: N rows of a shard, B rows of a batch, S sides of preference pairs, P positions, K sampled coordinates of
a gradient, E units, A answers of units, C columns of an array; L tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from grasp.errors import ModelError
from grasp.kernels.coordinates import SampledGradients, allocate_unit_gradients
from grasp.kernels.gradient import Curvature
from grasp.kernels.kernel import CorpusMoments, Kernel, make_kernels, needs_backward
from grasp.models.batch import Batch
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Reference, Units, forward_passes, position_mask
from grasp.models.gradients import Example
from grasp.models.residuals import SparseResidual, stack_residuals
from grasp.progress import Advance, ignore
from grasp.settings import FeatureSettings
from grasp.targets.margins import Answers

Outcome = TypeVar("Outcome")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ModelPass:
    """The model, and the extraction of features for the kernels.

    Attributes:
        model: language model, or that of a reader.
        settings: kernels, positions, and number of probabilities per position.
        sampled: sampled coordinates of gradients; None if no kernel needs a backward pass.
    """

    model: Reference
    settings: FeatureSettings
    sampled: SampledGradients | None = None

    @classmethod
    def choose(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Return a pass for the kernels of `settings`, with a sample of coordinates if one of them needs gradients."""
        sampled = SampledGradients.choose(model, settings) if needs_backward(settings.kernels) else None
        return cls(model, settings, sampled)

    def batches(self, rows: TokenRows) -> Iterator[tuple[I64, Batch]]:
        """Yield batches of rows of similar length, each with the indices of its rows in `rows`.

        Raises:
            ModelError: the model computed NaN or infinity; the message names the rows.
        """
        if isinstance(rows, TokenRows) and rows.split_N is not None:
            yield from self._pair_batches(rows)
            return
        row_ids = rows.table.column("row_id")
        for index, batch, gradient_BK in self._run_model(rows):
            refuse_non_finite(batch, [row_ids[int(i)].as_py() for i in index], "row")
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
            side_batches: list[tuple[I64, Batch]] = []
            gradient_SK: Tensor | None = None
            for side_index, side_batch, gradient_BK in self._run_model(sides):
                refuse_non_finite(side_batch, [names[s] for s in side_index], "row")
                side_batches.append((side_index, side_batch))
                if gradient_BK is not None:
                    if gradient_SK is None:
                        gradient_SK = gradient_BK.new_empty(len(sides), gradient_BK.shape[1])
                    gradient_SK[torch.from_numpy(side_index).to(gradient_BK.device)] = gradient_BK
            batch = merge_batches(side_batches, len(sides)).rows(0, len(sides))  # sort positions by side
            pair_S, n_positions_S = np.repeat(np.arange(len(index)), 2), batch.positions_B.cpu().numpy()
            fraction_S = n_positions_S / np.bincount(pair_S, n_positions_S)[pair_S]  # of the positions of the pair
            weight_S = np.tile([1.0, -1.0], len(index)) * fraction_S  # sides alternate: chosen, rejected
            loss_B = np.bincount(pair_S, fraction_S * batch.loss_B.double().cpu().numpy())
            batch = batch.combined(pair_S, weight_S, torch.from_numpy(loss_B).to(batch.loss_B))
            if gradient_SK is not None:
                gradient_SK *= torch.from_numpy(weight_S).to(gradient_SK)[:, None]
                batch = self._with_gradients(batch, gradient_SK.view(len(index), 2, -1).sum(dim=1))
            yield index, batch

    def units(self, units: Units, names: Sequence[str]) -> Batch:
        """Return all units as one batch with a row per unit; positions are not sorted by unit.

        A unit with several answers is the sum of its answers with the weights of its margin, see `Answers.weights`.

        Args:
            units: units, or those of a reader.
            names: name of each unit, for messages.
        Raises:
            ModelError: the model computed NaN or infinity; the message names the units.
        """
        answers = Answers.of(units) if isinstance(units, Sequence) else None
        if answers is not None and answers.are_units:
            answers = None
        items, n_units = units, len(units)
        if answers is not None:
            items, n_units = answers.tokens, len(answers.weight_E)
            names = [names[e] for e in answers.unit_A]
            losses_A = np.empty(len(names))  # mean loss of each answer
            for index, features in forward_passes(self.model, items, "all", 1):
                refuse_non_finite(features, [names[a] for a in index], "unit")
                losses_A[index] = features.loss_B.double().cpu().numpy()
            # The sign of a unit's weight is that of its column. Its size is left out here, since it counts only when
            # units are averaged.
            weight_A = answers.weights(losses_A) / np.abs(answers.weight_E)[answers.unit_A]
        batches = list(forward_passes(self.model, items, self.settings.unit_positions, self.settings.top_k))
        for index, features in batches:
            refuse_non_finite(features, [names[e] for e in index], "unit")
        batch = merge_batches(batches, len(items))
        unit_A, weight_of_A = np.arange(n_units), np.ones(n_units)
        if answers is not None:
            unit_A, weight_of_A = answers.unit_A, weight_A
            loss_E = torch.from_numpy(-answers.utilities(losses_A)).to(batch.loss_B)
            batch = batch.combined(answers.unit_A, weight_A, loss_E)
        if self.sampled is None:
            return batch
        assert isinstance(items, Sequence)
        examples = [Example(unit.input_ids, unit.first) for unit in items]
        compute = partial(unit_gradients, self.sampled, examples, unit_A, weight_of_A, n_units)
        return replace(batch, sampled=self.sampled, unit_gradients=compute)

    def _run_model(self, rows: TokenRows) -> Iterator[tuple[I64, Batch, Tensor | None]]:
        """Yield batches of rows: indices in `rows`, features, and sampled gradients, (B, K), or None."""
        sampled, settings = self.sampled, self.settings
        if sampled is None:
            for index, features in forward_passes(self.model, rows, settings.positions, settings.top_k):
                yield index, features, None
            return
        examples = row_examples(rows, settings)
        for batch_index in sampled.batches(examples):
            passes = split_on_oom(
                batch_index, lambda index: sampled.compute([examples[int(i)] for i in index], top_k=settings.top_k)
            )
            for index, (gradient_BK, _, batch) in passes:
                assert batch is not None
                yield index, batch, gradient_BK


def unit_gradients(
    sampled: SampledGradients,
    examples: Sequence[Example],
    unit_A: I64,
    weight_A: F64,
    n_units: int,
    curvature: Curvature,
) -> tuple[Tensor, Tensor]:
    """Return the preconditioned coordinates of units, (E, K), rounded to bfloat16, and their relevance to themselves.

    A unit is a weighted sum of answers. Its gradient moves during the training with the sum of the weights, as every
    loss does; it stays if the weights cancel, as in a margin.

    Args:
        examples: answers A.
        unit_A: unit of each answer.
        weight_A: weight of the mean loss of each answer in the unit.
        curvature: geometry of the training.
    """
    unit_EK, self_relevance_E = allocate_unit_gradients(n_units, sampled), torch.zeros(n_units, dtype=torch.float64)
    weight_K, mean_K = sampled.sample.weight_K.to(sampled.engine.work), curvature.decayed_mean(sampled)
    answers_E = np.bincount(unit_A, minlength=n_units)
    pending: dict[int, Tensor] = {}  # sums of units whose answers are not complete
    for batch_index in sampled.batches(examples):
        passes = split_on_oom(
            batch_index, lambda index: sampled.compute([examples[int(a)] for a in index], curvature.precondition)
        )
        for index, (raw_BK, gradient_BK, _) in passes:
            for a, raw_K, gradient_K in zip(index.tolist(), raw_BK, gradient_BK, strict=True):
                e, weight = int(unit_A[a]), float(weight_A[a])
                moved_K = (gradient_K - mean_K) * weight_K
                # a bound for several answers, which determines a scale of storage only
                self_relevance_E[e] += abs(weight) * abs(float(raw_K.double() @ moved_K.double()))
                sum_K = weight * moved_K + pending.pop(e, 0.0)
                answers_E[e] -= 1
                if answers_E[e]:
                    pending[e] = sum_K
                    continue
                rounded_K = sum_K if sum_K.dtype == torch.float64 else sum_K.bfloat16()
                unit_EK[e] = rounded_K.to(unit_EK.device, unit_EK.dtype)
    return unit_EK, self_relevance_E


def merge_batches(parts: Sequence[tuple[I64, Batch]], n_rows: int) -> Batch:
    """Merge batches into one, without their gradients; its positions are in the order of the batches.

    Args:
        parts: batches, each with the row number that each of its rows has in the merged batch.
    """
    batches = [batch for _, batch in parts]
    loss_B = batches[0].loss_B.new_zeros(n_rows)
    row_numbers = [torch.from_numpy(index).to(loss_B.device) for index, _ in parts]
    for row_B, batch in zip(row_numbers, batches, strict=True):
        loss_B[row_B] = batch.loss_B
    return replace(
        batches[0],
        hidden_PH=torch.cat([batch.hidden_PH for batch in batches]),
        residual=stack_residuals([batch.residual for batch in batches]),
        row_P=torch.cat([row_B[batch.row_P] for row_B, batch in zip(row_numbers, batches, strict=True)]),
        input_P=torch.cat([batch.input_P for batch in batches]),
        n_rows=n_rows,
        loss_B=loss_B,
        gradient_BK=None,
    )


def row_examples(rows: TokenRows, settings: FeatureSettings) -> list[Example]:
    """Return rows as inputs of a backward pass, whose loss is that at the positions that kernels read."""
    examples = []
    for i in range(len(rows)):
        ids, mask = rows.ids(i), rows.mask(i)
        loss_mask = np.ones(len(ids), dtype=np.bool_) if mask is None else mask.copy()
        loss_mask[0] = False  # the first token is never predicted
        if settings.positions != "all":
            used_1L = position_mask(settings.positions, torch.from_numpy(loss_mask)[None])
            loss_mask[1:] = used_1L[0, :-1].numpy()  # position t predicts token t + 1
        examples.append(Example(ids, loss_mask=loss_mask))
    return examples


def split_on_oom(index: I64, run: Callable[[I64], Outcome]) -> Iterator[tuple[I64, Outcome]]:
    """Run a batch; if the GPU runs out of memory, run its halves, recursively, down to one row."""
    try:
        outcome = run(index)
    except torch.cuda.OutOfMemoryError as err:
        if len(index) == 1:
            raise ModelError(
                "the GPU has no memory for a backward pass over a row; --set model.dtype=bfloat16 or lower --max-length"
            ) from err
    else:
        yield index, outcome
        return
    torch.cuda.empty_cache()  # after the except block: the error holds references to the batch's tensors
    for half in np.array_split(index, 2):
        yield from split_on_oom(half, run)


def refuse_non_finite(batch: Batch, names: Sequence[str], noun: str) -> None:
    """Raise an error that names the rows or units (`noun`) for which the model computed NaN or infinity."""
    finite_P = batch.hidden_PH.isfinite().all(dim=1) & batch.residual.loss_P.isfinite()
    finite_P &= batch.residual.value_PK.isfinite().all(dim=1)
    non_finite = torch.unique(batch.row_P[~finite_P]).tolist()
    if non_finite:
        named = ", ".join(repr(names[row]) for row in non_finite[:5])
        more = f" and {len(non_finite) - 5} more" if len(non_finite) > 5 else ""
        raise ModelError(
            f"{noun} {named}{more}: the model computed NaN or infinity, expected finite hidden states and losses; "
            "use model.dtype: float32, or remove it from the input"
        )


# ---------------------------------------------------------------------------------- batches that are stored


def batch_arrays(k: int, index: I64, batch: Batch, *, half: bool = False) -> Arrays:
    """Convert a batch to named arrays; the inverse of `read_batches`.

    Args:
        k: number of the batch within its shard, the prefix of the names.
        index: indices of its rows in the shard.
        batch: features of the rows.
        half: store hidden states and residuals in float16, as an artifact does; else unchanged.
    Raises:
        ModelError: hidden states that do not fit float16.
    """
    hidden_PH, residual = batch.hidden_PH.half() if half else batch.hidden_PH, batch.residual
    if half and not bool(hidden_PH.isfinite().all()):
        raise ModelError(
            "keep_features: hidden states beyond 65504 do not fit float16, in which features are stored; build "
            "without keep_features"
        )
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
    if residual.truncated_P is not None:
        tensors["rest"] = residual.truncated_P.half() if half else residual.truncated_P
    arrays: Arrays = {f"{k}.rows": index} | {f"{k}.{name}": tensor.cpu().numpy() for name, tensor in tensors.items()}
    if batch.gradient_BK is not None:
        stored_BK = _round_to_stored(batch.gradient_BK)
        is_bfloat16 = stored_BK.dtype == torch.bfloat16  # numpy has no bfloat16: its bits are stored
        arrays[f"{k}.gradient"] = (stored_BK.view(torch.uint16) if is_bfloat16 else stored_BK).cpu().numpy()
    return arrays


def _round_to_stored(gradient_BK: Tensor) -> Tensor:
    """Convert coordinates to the dtype in which they are stored: bfloat16, or float64 if the model has float64."""
    return gradient_BK if gradient_BK.dtype == torch.float64 else gradient_BK.bfloat16()


def read_batches(
    arrays: Mapping[str, NDArray[Any]], model_pass: ModelPass | None, vocab_size: int
) -> Iterator[tuple[I64, Batch]]:
    """Yield the batches that `batch_arrays` converted, with the indices of their rows; without a model on the CPU."""
    device = torch.device("cpu") if model_pass is None else model_pass.model.device
    for k in range(1 + max(int(name.partition(".")[0]) for name in arrays)):
        prefix, index = f"{k}.", arrays[f"{k}.rows"]
        tensors = {
            name.removeprefix(prefix): torch.from_numpy(array).to(device)
            for name, array in arrays.items()
            if name.startswith(prefix) and name != f"{k}.gradient"
        }
        dtype = tensors["loss"].dtype
        truncated_P = tensors["rest"].to(dtype) if "rest" in tensors else None
        batch = Batch(
            tensors["hidden"].to(dtype),
            SparseResidual(tensors["index"].long(), tensors["value"].to(dtype), tensors["loss"], truncated_P),
            tensors["row"].long(),
            tensors["input"].long(),
            len(index),
            tensors["row_loss"],
            None if model_pass is None else model_pass.model.head,
            vocab_size,
            weight_P=tensors["weight"].to(dtype) if "weight" in tensors else None,
        )
        if model_pass is not None and model_pass.sampled is not None:
            batch = replace(batch, sampled=model_pass.sampled)
            if f"{k}.gradient" in arrays:
                stored_BK = torch.from_numpy(arrays[f"{k}.gradient"])
                stored_BK = stored_BK.view(torch.bfloat16) if stored_BK.dtype == torch.uint16 else stored_BK
                batch = replace(batch, gradient_BK=stored_BK.to(device, model_pass.sampled.engine.work))
        yield index, batch


# -------------------------------------------------------------------- the jobs of the two loops of a build


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """Of the rows of a shard: mean losses in nats per token, scores by `Kernel.array`, and features that are stored."""

    loss_N: F32
    arrays: dict[str, F32]
    features: Arrays | None = None


class BatchCache:
    """Batches of loop 1 on disk, which loop 2 reads instead of running the model. Memory: one batch.

    Batches of all shards are numbered consecutively; `ends[k]` is the number of batches of shards 0 to k.

    Args:
        directory: directory of the files.
        ends: see above. Default: none are written yet.
    """

    def __init__(self, directory: Path, ends: Sequence[int] | None = None) -> None:
        self._files = ArrayFiles(directory)
        self.n_batches = 0
        self.ends = list(ends or ())

    def write(self, batch: Arrays) -> None:
        """Write the next batch of the current shard."""
        self._files.write(self.n_batches, batch)
        self.n_batches += 1

    def read(self, k: int) -> Iterator[Arrays]:
        """Yield the batches of shard k."""
        for number in range(self.ends[k - 1] if k else 0, self.ends[k]):
            yield self._files.read(number)


def compute_moments(
    model_pass: ModelPass,
    rows: TokenRows,
    *,
    states_every: int,
    on_batch: Callable[[Arrays], None] | None = None,
    advance: Advance = ignore,
) -> CorpusMoments:
    """Run the model on rows of the sample, and return their moments for all kernels.

    Args:
        states_every: store every `states_every`-th hidden state.
        on_batch: callback that receives each batch as named arrays, which `score_shard` accepts as `cached_batches`.
    """
    corpus = CorpusMoments(model_pass.model.vocab_size, states_every)
    make_kernels(model_pass.settings.kernels, model_pass.model, model_pass.settings, corpus)  # add their moments
    for index, batch in model_pass.batches(rows):
        corpus.observe(batch)
        if on_batch is not None:
            on_batch(batch_arrays(0, index, batch))
        advance(len(index), rows.tokens_of(index))
    return corpus


def score_shard(
    model_pass: ModelPass,
    rows: TokenRows,
    *,
    kernels: Sequence[Kernel],
    keep_features: bool = False,
    cached_batches: Iterable[Arrays] | None = None,
    advance: Advance = ignore,
) -> ScoredShard:
    """Run the model on the rows of a shard, and score each batch by every kernel.

    Args:
        cached_batches: batches of these rows from `batch_arrays`, used instead of running the model.
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


@dataclass
class Workers:
    """Run jobs on chunks of rows, one after another in this process; `engine.RayWorkers` runs them on a cluster."""

    model_pass: ModelPass

    def run(
        self,
        job: Callable[..., Any],
        chunks: Iterable[tuple[int, TokenRows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the result of `job(model_pass, rows, **options)` for each chunk, with the number of the chunk.

        Args:
            job: `compute_moments` or `score_shard`.
            chunks: number and rows of each chunk.
            advance: callback that receives the numbers of rows and tokens processed.
            in_order: yield results in the order of the chunks, not as they finish.
            options: further arguments of the job.
        """
        for k, rows in chunks:
            yield k, job(self.model_pass, rows, advance=advance, **options)
