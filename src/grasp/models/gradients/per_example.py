"""Per-example gradients of a causal LM: one forward and one backward pass a batch, in factorised form.

No weight asks for a gradient. A hook on every chosen module makes its output ask for one where nothing before it
did, so the backward pass ends at the earliest chosen module and computes gradients of activations only. What a module
received and what came back at its output are its factors; they go to a consumer at once and are not kept.

Shape letters: B examples, L tokens, S supervised positions (padded), H hidden width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from grasp.errors import ModelError
from grasp.models.causal_lm import ReferenceModel, batches, pad_rows
from grasp.models.gradients.capture import Capture, Consumer, SharedPositionsError, augmented
from grasp.models.gradients.factors import Use
from grasp.models.gradients.layers import LayerSet, UntakenLayerError
from grasp.models.gradients.output import Output, residual

CPU_LOGITS = 1 << 24  # numbers in one chunk of logits
CUDA_LOGITS = 1 << 28
FLOAT16_HINT = "; float16 overflows, set dtype to bfloat16 or float32"


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of a row or a unit; the labels that carry loss are ``input_ids[first:]``, first >= 1, or by a mask."""

    input_ids: NDArray[np.int32]
    first: int = 1
    labelled: NDArray[np.bool_] | None = None

    @property
    def labels(self) -> int:
        return len(self.input_ids) - self.first if self.labelled is None else int(self.labelled.sum())

    @property
    def positions(self) -> int:
        """Tokens before the last that carries loss: those that the loss comes from, a prompt's among them."""
        return len(self.input_ids) - 1 if self.labelled is None else int(np.flatnonzero(self.labelled)[-1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the forward pass said of each example: means over its labels, and hidden states as the head sees them."""

    loss_B: Tensor
    doubt_B: Tensor  # 1 - p of the true label
    hidden_BLH: Tensor


class PerExample:
    """Factors of per-example gradients of the mean over an example's labels of a function of its logits."""

    def __init__(self, model: ReferenceModel, layers: LayerSet) -> None:
        """Run two short rows through the model, to see that every chosen parameter takes part.

        Raises:
            ModelError: a chosen parameter is not used, or in a way that leaves nothing per example.
        """
        self.model = model
        self.layers = layers
        self.work = torch.float64 if model.dtype == torch.float64 else torch.float32
        self._narrow = model.dtype != self.work
        self._head = model.head.linear
        self._head_blocks = [block for module, block in layers.modules if module is self._head]
        self._has_body = any(module is not self._head for module, _ in layers.modules)
        self.pass_positions = False
        self.probing = True
        self.calls = self._probe()  # uses of each block in one pass
        self.probing = False

    def batches(self, examples: Sequence[Example], batch_tokens: int | None = None) -> list[NDArray[np.int64]]:
        """Positions of the examples of each batch, alike in length; by default as many tokens as the model's own."""
        lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
        return batches(lengths, batch_tokens or self.model.batch_tokens)

    def run(
        self,
        examples: Sequence[Example],
        consume: Consumer,
        output: Output = "loss",
        uniforms: Sequence[NDArray[np.float64]] | None = None,
        *,
        by_position: bool = False,
    ) -> Outcome:
        """Hand the factors of every use of every block to `consume`.

        The gradient is that of the mean over the labels of each example. Blocks come in no particular order; those
        of the head come in pieces of the batch.

        Args:
            uniforms: for `sampled`, one number a label of each example.
            by_position: of a single example every position's part of the gradient is handed on as an example's; they
                add up to the whole. Not of the head.
        Raises:
            ModelError: the loss of an example is not a number.
        """
        marks = [example.first if example.labelled is None else example.labelled for example in examples]
        ids_BL, labelled_BL = (
            part.to(self.model.device) for part in pad_rows([example.input_ids for example in examples], marks)
        )
        scale_B = torch.tensor([1.0 / max(1, example.labels) for example in examples], dtype=self.work)
        scale_B = scale_B.to(self.model.device)
        places = _places(ids_BL, labelled_BL, uniforms)
        capture = Capture(
            self.layers,
            consume,
            (len(examples), ids_BL.shape[1]),
            self.work,
            scale_B if self._narrow else None,
            self.probing,
            self.pass_positions,
            by_position,
        )
        with torch.enable_grad(), self._hooked(capture):
            where = {}
            if self.pass_positions:
                where["position_ids"] = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
            hidden_BLH = self.model.body(input_ids=ids_BL, use_cache=False, **where).last_hidden_state
            outcome, grad_BLH = self._through_head(hidden_BLH.detach(), places, scale_B, output, consume)
            if hidden_BLH.requires_grad:
                hidden_BLH.backward(grad_BLH)
        return outcome

    def _through_head(
        self, hidden_BLH: Tensor, places: "_Places", scale_B: Tensor, output: Output, consume: Consumer
    ) -> tuple[Outcome, Tensor]:
        """Outcome, and the gradient with respect to the hidden states.

        In bfloat16 and float16 it is that of the sum over labels: the mean over thousands of them would lose digits.
        """
        model, width = self.model, places.label_BS.shape[1]
        weight_VH = self._head.weight
        assert isinstance(weight_VH, Tensor)
        grad_BLH = torch.zeros_like(hidden_BLH)
        loss, doubt = [], []
        limit = CPU_LOGITS if model.device.type == "cpu" else CUDA_LOGITS
        step = max(1, limit // (width * model.vocab_size))
        for begin in range(0, len(hidden_BLH), step):
            rows = slice(begin, min(begin + step, len(hidden_BLH)))
            scale = scale_B[rows]
            weight = places.mask_BS[rows] * scale[:, None]
            index = places.at_BS[rows][..., None].expand(-1, -1, hidden_BLH.shape[2])
            hidden_BSH = hidden_BLH[rows].gather(1, index)
            uniform = None if places.uniform_BS is None else places.uniform_BS[rows]
            found = residual(model.head, hidden_BSH, places.label_BS[rows], weight, output, uniform)
            loss.append(found.loss_BS.sum(dim=1) * scale)
            doubt.append(1.0 - found.probability_BS.sum(dim=1) * scale)
            if self._has_body:
                back = found.value_BSV / scale[:, None, None] if self._narrow else found.value_BSV
                grad_BLH[rows].scatter_add_(1, index, back.to(model.dtype) @ weight_VH.detach())
            for block in self._head_blocks:
                right = augmented(hidden_BSH.to(self.work), self.layers.blocks[block])
                consume(block, Use(found.value_BSV, right), rows)
        outcome = Outcome(torch.cat(loss), torch.cat(doubt), hidden_BLH)
        bad = (~outcome.loss_B.isfinite()).nonzero()[:, 0]
        if len(bad):
            raise ModelError(
                f"example {int(bad[0])} of a batch: its loss is {float(outcome.loss_B[bad[0]])} in "
                f"{str(model.dtype).split('.')[1]}, expected a number"
                f"{FLOAT16_HINT if model.dtype == torch.float16 else ''}"
            )
        return outcome, grad_BLH

    @contextmanager
    def _hooked(self, capture: Capture) -> Iterator[None]:
        handles = []
        grouped: dict[int, tuple[nn.Module, list[int]]] = {}
        for module, block in self.layers.modules:
            if module is not self._head:
                grouped.setdefault(id(module), (module, []))[1].append(block)
        for module, blocks in grouped.values():
            handles.append(module.register_forward_hook(capture.hook(blocks), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _probe(self) -> tuple[int, ...]:
        length = min(6, self.model.context or 6)
        ids = np.arange(2 * length, dtype=np.int32).reshape(2, length) % self.model.vocab_size
        examples = [Example(row) for row in ids]
        try:
            return self._counted(examples)
        except SharedPositionsError:
            self.pass_positions = True  # positions were looked up once for the whole batch
            return self._counted(examples)

    def _counted(self, examples: Sequence[Example]) -> tuple[int, ...]:
        calls = [0] * len(self.layers.blocks)

        def count(block: int, _: Use, rows: slice) -> None:
            calls[block] += rows.start == 0

        self.run(examples, count)
        idle = [block.name for block, n in zip(self.layers.blocks, calls, strict=True) if n == 0]
        if idle:
            more = f" ({len(idle)} in all)" * (len(idle) > 1)
            raise UntakenLayerError(
                idle[0], f"{', '.join(idle[:3])}{more} took no part in a row's loss: nothing can be attributed to it"
            )
        return tuple(calls)


@dataclass(frozen=True, slots=True)
class _Places:
    """Supervised positions, gathered to the left: where they stand, their labels, which are real."""

    at_BS: Tensor
    label_BS: Tensor
    mask_BS: Tensor
    uniform_BS: Tensor | None


def _places(ids_BL: Tensor, labelled_BL: Tensor, uniforms: Sequence[NDArray[np.float64]] | None) -> _Places:
    device = ids_BL.device
    labels_B = labelled_BL.sum(dim=1)
    mask_BS = torch.arange(int(labels_B.max()), device=device) < labels_B[:, None]
    # a stable sort brings the labelled tokens to the front, in their order
    token_BS = labelled_BL.int().argsort(dim=1, descending=True, stable=True)[:, : mask_BS.shape[1]]
    at_BS = torch.where(mask_BS, token_BS - 1, 0)
    label_BS = ids_BL.gather(1, torch.where(mask_BS, token_BS, 0))
    uniform_BS = None
    if uniforms is not None:
        padded = np.zeros(tuple(mask_BS.shape))
        for row, numbers in zip(padded, uniforms, strict=True):
            row[: len(numbers)] = numbers
        uniform_BS = torch.from_numpy(padded).to(device)
    return _Places(at_BS, label_BS, mask_BS, uniform_BS)
