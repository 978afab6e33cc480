"""Gradients of rows by a causal LM's weights, as factors: one forward and one backward pass a batch.

The gradient of a row by a matrix is a sum over positions of outer products, of what came back at the output with what
was received:

    G_b = sum_t left_{b,t} (x) right_{b,t}

No weight asks for a gradient. A hook on every chosen module makes its output ask for one where nothing before it did,
so the backward pass ends at the earliest chosen module and computes gradients of activations only. The factors go to
a consumer at once and are not kept.

Shape letters: B examples, L tokens, T positions of a factor, S supervised positions (padded), X left width, Y right
width, P parameters of a norm, H hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from grasp.arrays import F64, I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.head import TOLERANCE

MAX_VECTOR = 1_000_000  # numbers in a module that is neither linear nor embedding: its gradients are held a row each
TINY = torch.finfo(torch.float32).tiny  # a loss beyond 87 nats reads 87; its gradient is exact all the same
CPU_LOGITS = 1 << 24  # numbers in one chunk of logits
CUDA_LOGITS = 1 << 28
FLOAT16_HINT = "; float16 overflows, set dtype to bfloat16 or float32"

Kind = Literal["linear", "embedding", "vector"]
Output = Literal["loss", "margin", "sampled"]


class UntakenLayerError(ModelError):
    """Layers that have no gradient for each row of a batch: names of modules or of parameters."""

    def __init__(self, why: str, *layers: str) -> None:
        named = ", ".join(f"!{layer}" for layer in layers[:3])
        more = f" and so on ({len(layers)} in all)" * (len(layers) > 3)
        super().__init__(f"layers: {why}; leave {'it' if len(layers) == 1 else 'them'} out with {named}{more}")
        self.why, self.layers = why, layers


class SharedPositionsError(Exception):
    """An embedding was looked up once for all examples."""


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, slots=True)
class Block:
    """One matrix whose gradient is a sum of outer products left x right, or the vectors of one module as (1, P)."""

    name: str
    kinds: tuple[Kind, ...]  # of its uses: a tied head is ("embedding", "linear")
    left: int
    right: int  # the bias, where it is covered, is the last column
    weight: bool  # False: the bias alone
    bias: bool
    parameters: tuple[str, ...]  # canonical names
    transposed: bool = False  # the parameter is (right, left), as GPT-2 has it
    head: bool = False  # of the model: it sees positions with a label only

    @property
    def size(self) -> int:
        return self.left * self.right


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Blocks of chosen parameters, with the modules that feed them."""

    blocks: tuple[Block, ...]
    modules: tuple[tuple[nn.Module, int], ...]  # each with its block
    total: int  # parameters of the model

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


def layers_of(model: ReferenceModel, chosen: Iterable[str]) -> LayerSet:
    """The blocks of chosen parameters, in the order of the modules.

    A block is what one matrix product owns: the weight of a linear layer with its bias, an embedding, the vectors of a
    norm. A weight that several modules use, a tied head say, is one block without a bias, and its gradient the sum
    over all uses.

    Args:
        chosen: canonical names of parameters, as `named_parameters` of the model gives them.
    Raises:
        UntakenLayerError: a parameter has no per-example form.
    """
    chosen, root = set(chosen), model.model
    canonical = {id(parameter): name for name, parameter in root.named_parameters()}
    owners: dict[str, list[tuple[str, nn.Module]]] = {}
    for module_name, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            if (name := canonical[id(parameter)]) in chosen:
                owners.setdefault(name, []).append((module_name, module))
    together: dict[tuple[int, ...], list[str]] = {}
    for name, users in owners.items():
        together.setdefault(tuple(id(module) for _, module in users), []).append(name)
    blocks: list[Block] = []
    modules: list[tuple[nn.Module, int]] = []
    for names in together.values():
        users = owners[names[0]]
        _refuse_part_of_head(model, names[0], [module for _, module in users])
        roles = {canonical[id(parameter)]: role for role, parameter in users[0][1].named_parameters(recurse=False)}
        modules += [(module, len(blocks)) for _, module in users]
        is_head = [module for _, module in users] == [model.head.linear]
        blocks.append(_block(tuple(names), users, roles, is_head))
    return LayerSet(tuple(blocks), tuple(modules), sum(parameter.numel() for parameter in root.parameters()))


def _refuse_part_of_head(model: ReferenceModel, name: str, users: Sequence[nn.Module]) -> None:
    """The output layer is not called in a forward pass here: its gradient is that by one matrix."""
    linear, kind = model.head.linear, type(model.head.linear).__name__
    if linear in users and not model.head.is_weight:
        why = f"{name}: the logits are not those of all of this weight ({kind}), so it has no gradient by them here"
        raise UntakenLayerError(why, name)
    if any(user in list(linear.modules())[1:] for user in users):
        raise UntakenLayerError(f"{name} is inside the output layer ({kind}), whose gradient is taken as a whole", name)


def _block(
    names: tuple[str, ...], users: Sequence[tuple[str, nn.Module]], roles: Mapping[str, str], is_head: bool
) -> Block:
    """The block of parameters that the same modules use; `roles` are their names in the first of these."""
    name, module = users[0]
    kinds: tuple[Kind, ...] = tuple(
        "linear"
        if isinstance(user, nn.Linear | Conv1D)
        else "embedding"
        if isinstance(user, nn.Embedding)
        else "vector"
        for _, user in users
    )
    if "vector" in kinds:
        if len(users) > 1:
            raise UntakenLayerError(f"{names[0]} is shared by {len(kinds)} modules that are no linear layers", *names)
        total = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if total > MAX_VECTOR or list(module.children()):
            why = (
                f"{name} ({type(module).__name__}, {total:,} parameters of its own) is neither linear nor an embedding "
                "nor small, so they have no per-example form here"
            )
            raise UntakenLayerError(why, *names)
        size = sum(module.get_parameter(roles[parameter]).numel() for parameter in names)
        return Block(name, kinds, 1, size, weight=True, bias=False, parameters=names)
    for parameter in names:
        if roles[parameter] not in ("weight", "bias"):
            why = (
                f"{parameter}: a {type(module).__name__} with another parameter than weight and bias has no "
                "per-example form here"
            )
            raise UntakenLayerError(why, parameter)
    has_weight, has_bias = (role in {roles[parameter] for parameter in names} for role in ("weight", "bias"))
    is_transposed = isinstance(module, Conv1D)
    rows, columns = module.get_parameter("weight").shape  # (output, input), or (vocabulary, width) of an embedding
    left, width = (columns, rows) if is_transposed else (rows, columns)
    right = width * has_weight + has_bias
    return Block(name, kinds, left, right, has_weight, has_bias, names, is_transposed, is_head)


# -------------------------------------------------------------------------------------------------------------- factors


@dataclass(frozen=True, slots=True)
class Use:
    """Factors of a batch in one block: positions that carry nothing have a right (or a left) factor of zero."""

    left: Tensor  # (B, T, X), or int64 (B, T): coordinates of one-hot vectors
    right: Tensor  # (B, T, Y)

    @property
    def one_hot(self) -> bool:
        return self.left.ndim == 2


Consumer = Callable[[int, Use, slice], None]  # block, factors, and the examples of the batch that they belong to


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of a row or a unit; the labels that carry loss are ``input_ids[first:]``, first >= 1, or by a mask."""

    input_ids: I32
    first: int = 1
    labelled: Bool | None = None

    @property
    def labels(self) -> int:
        return len(self.input_ids) - self.first if self.labelled is None else int(self.labelled.sum())


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
        self.work = model.work
        self.narrow = model.dtype != self.work
        self._head_blocks = [number for module, number in layers.modules if module is model.head.linear]
        self._body: dict[nn.Module, list[int]] = {}
        for module, number in layers.modules:
            if module is not model.head.linear:
                self._body.setdefault(module, []).append(number)
        self.pass_positions = False  # whether the model is given the position of every token of every row
        self.probing = True
        self._errors: list[UntakenLayerError] = []  # that probing met
        length = min(6, model.context or 6)
        ids = np.arange(2 * length, dtype=np.int32).reshape(2, length) % model.vocab_size
        calls: list[int] = []

        def count(number: int, _: Use, rows: slice) -> None:
            if rows.start == 0:
                calls.append(number)

        try:
            self.run([Example(row) for row in ids], count)
        except SharedPositionsError:
            self.pass_positions = True  # positions were looked up once for the whole batch
            calls.clear()
            self.run([Example(row) for row in ids], count)
        self.probing = False
        self.calls = tuple(calls.count(number) for number in range(len(layers.blocks)))  # uses of each in one pass
        failed = dict.fromkeys(layer for error in self._errors for layer in error.layers)
        idle = [block.name for block, uses in zip(layers.blocks, self.calls, strict=True) if uses == 0]
        if idle := [name for name in idle if name not in failed]:
            why = f"{', '.join(idle[:3])} took no part in a row's loss: nothing can be attributed to it"
            self._errors.append(UntakenLayerError(why, *idle))
        if self._errors:
            raise UntakenLayerError(self._errors[0].why, *failed, *idle)

    def note_untaken(self, error: UntakenLayerError) -> None:
        """Remember a layer that has no gradient for each row until the probing pass is over."""
        self._errors.append(error)

    def batches(self, examples: Sequence[Example], batch_tokens: int | None = None) -> list[I64]:
        """Positions of the examples of each batch, alike in length; by default as many tokens as the model's own."""
        lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
        return self.model.batches(lengths, batch_tokens)

    def run(
        self,
        examples: Sequence[Example],
        consume: Consumer,
        output: Output = "loss",
        uniforms: Sequence[F64] | None = None,
        *,
        by_position: bool = False,
    ) -> Outcome:
        """Hand the factors of every use of every block to `consume`.

        The gradient is that of the mean over the labels of each example. Blocks come in no particular order; those
        of the head come in pieces of the batch. Three functions of a position's logits z with label y:

            loss     -log p_y                      gradient  p - onehot_y
            margin   -log(p_y / (1 - p_y))         gradient  p without y - onehot_y
            sampled  -log p_y', y' drawn from p    gradient  p - onehot_y'         (the Fisher of the model itself)

        Args:
            uniforms: for `sampled`, one number in [0, 1) a label of each example, which picks the label by the inverse
                of the cumulative p: the same for the same number, whatever else is in the batch.
            by_position: of a single example every position's part of the gradient is handed on as an example's; they
                add up to the whole. Not of the head.
        Raises:
            ModelError: the loss of an example is not a number.
        """
        device = self.model.device
        marks = [example.first if example.labelled is None else example.labelled for example in examples]
        ids_BL, labelled_BL = (part.to(device) for part in pad_rows([one.input_ids for one in examples], marks))
        scale_B = torch.tensor([1.0 / max(1, one.labels) for one in examples], dtype=self.work).to(device)
        # supervised positions gathered to the left: a stable sort brings labelled tokens to the front, in their order
        labels_B = labelled_BL.sum(dim=1)
        real_BS = torch.arange(int(labels_B.max()), device=device) < labels_B[:, None]
        token_BS = labelled_BL.int().argsort(dim=1, descending=True, stable=True)[:, : real_BS.shape[1]]
        label_BS = ids_BL.gather(1, torch.where(real_BS, token_BS, 0))
        at_BS = torch.where(real_BS, token_BS - 1, 0)
        uniform_BS = None
        if uniforms is not None:
            padded = np.zeros(tuple(real_BS.shape))
            for row, draws in zip(padded, uniforms, strict=True):
                row[: len(draws)] = draws
            uniform_BS = torch.from_numpy(padded).to(device)
        hooks = _Hooks(self, consume, tuple(ids_BL.shape), scale_B if self.narrow else None, by_position)
        with torch.enable_grad(), ExitStack() as stack:
            for module, numbers in self._body.items():
                handle = module.register_forward_hook(partial(hooks.forward, numbers), with_kwargs=True)
                stack.callback(handle.remove)
            where = {}
            if self.pass_positions:
                where["position_ids"] = torch.arange(ids_BL.shape[1], device=device).expand_as(ids_BL)
            hidden_BLH = self.model.run_body(ids_BL, **where)
            loss_B, doubt_B, grad_BLH = self._through_head(
                hidden_BLH.detach(), at_BS, label_BS, real_BS, scale_B, output, uniform_BS, consume
            )
            if hidden_BLH.requires_grad:
                torch.autograd.backward(hidden_BLH, grad_BLH)
        return Outcome(loss_B, doubt_B, hidden_BLH.detach())

    def _through_head(
        self,
        hidden_BLH: Tensor,
        at_BS: Tensor,
        label_BS: Tensor,
        real_BS: Tensor,
        scale_B: Tensor,
        output: Output,
        uniform_BS: Tensor | None,
        consume: Consumer,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean losses, mean doubts, and the gradient by the hidden states, a chunk of logits at a time.

        In bfloat16 and float16 it is that of the sum over labels: the mean over thousands of them would lose digits.
        """
        model, head = self.model, self.model.head
        grad_BLH = torch.zeros_like(hidden_BLH)
        losses, doubts = [], []
        limit = CPU_LOGITS if model.device.type == "cpu" else CUDA_LOGITS
        step = max(1, limit // (label_BS.shape[1] * model.vocab_size))
        for begin in range(0, len(hidden_BLH), step):
            rows = slice(begin, min(begin + step, len(hidden_BLH)))
            real, scale, label_BS1 = real_BS[rows], scale_B[rows], label_BS[rows][..., None]
            weight = real * scale[:, None]
            index = at_BS[rows][..., None].expand(-1, -1, hidden_BLH.shape[2])
            hidden_BSH = hidden_BLH[rows].gather(1, index)
            logits_BSV = head.link(head.linear_logits(hidden_BSH).to(self.work))
            value_BSV = torch.softmax(logits_BSV, dim=-1)
            p_BS = value_BSV.gather(-1, label_BS1).squeeze(-1)
            loss_BS = torch.where(real, -p_BS.clamp(min=TINY).log(), 0.0)
            if output == "margin":
                value_BSV = torch.softmax(logits_BSV.scatter(-1, label_BS1, -torch.inf), dim=-1)
            if output == "sampled":
                assert uniform_BS is not None
                cumulative = torch.cumsum(value_BSV, dim=-1)
                drawn = (uniform_BS[rows].to(cumulative) * cumulative[..., -1])[..., None]
                label_BS1 = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=model.vocab_size - 1)
            value_BSV.scatter_add_(-1, label_BS1, -torch.ones_like(label_BS1, dtype=self.work))
            slope = head.slope(logits_BSV)
            if isinstance(slope, Tensor):
                value_BSV *= slope
                value_BSV *= weight[..., None]
            else:
                value_BSV *= (weight * slope)[..., None]
            losses.append(loss_BS.sum(dim=1) * scale)
            doubts.append(1.0 - torch.where(real, p_BS, 0.0).sum(dim=1) * scale)
            if self._body:
                back, matrix_VH = value_BSV / scale[:, None, None] if self.narrow else value_BSV, head.matrix()
                grad_BLH[rows].scatter_add_(1, index, (back.to(matrix_VH.dtype) @ matrix_VH).to(grad_BLH.dtype))
            for number in self._head_blocks:
                right = _augmented(hidden_BSH.to(self.work), self.layers.blocks[number])
                consume(number, Use(value_BSV, right), rows)
        loss_B = torch.cat(losses)
        bad = (~loss_B.isfinite()).nonzero()[:, 0]
        if len(bad):
            raise ModelError(
                f"example {int(bad[0])} of a batch: its loss is {float(loss_B[bad[0]])} in "
                f"{str(model.dtype).split('.')[1]}, expected a number"
                f"{FLOAT16_HINT if model.dtype == torch.float16 else ''}"
            )
        return loss_B, torch.cat(doubts), grad_BLH


class _Hooks:
    """What modules received in one pass over a batch, and what came back at their outputs."""

    def __init__(
        self,
        engine: PerExample,
        consume: Consumer,
        shape: tuple[int, ...],  # (B, L)
        scale_B: Tensor | None,  # what gradients are multiplied by
        by_position: bool,
    ) -> None:
        self._engine, self._consume, self._shape = engine, consume, shape
        self._scale_B, self._by_position = scale_B, by_position
        self._quiet = False  # a norm's gradients are found by calling it again
        self._last: tuple[Tensor, bool, bool, Tensor] | None = None  # what a layer received, and its right factor

    def forward(
        self,
        numbers: Sequence[int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Tensor | None:
        """Keep what a module received until the gradient by its output is there."""
        if self._quiet or not torch.is_grad_enabled():  # the model itself cuts the graph here
            return None
        try:
            return self._track(numbers, module, args, kwargs, output)
        except UntakenLayerError as err:
            if not self._engine.probing:
                raise
            self._engine.note_untaken(err)  # all layers are tried, so that one pass finds all that fail
            return None

    def _track(
        self,
        numbers: Sequence[int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Tensor:
        name = self._engine.layers.blocks[numbers[0]].name
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            why = f"{name} ({type(module).__name__}) takes {len(tensors)} tensors; expected one in, one out"
            raise UntakenLayerError(why, name)
        received = tensors[0].detach()
        if isinstance(module, nn.Embedding) and received.shape[0] == 1 < self._shape[0]:
            if self._engine.pass_positions:
                raise UntakenLayerError(f"{name} is looked up once for a whole batch", name)
            raise SharedPositionsError
        if tuple(received.shape[:2]) != self._shape:
            why = (
                f"{name} ({type(module).__name__}) receives {tuple(received.shape)}, expected one entry a token, "
                f"{self._shape}: what belongs to which row is lost"
            )
            raise UntakenLayerError(why, name)
        if self._engine.probing:
            _check_forward(module, name, received, output)
        tracked: Tensor = output
        if not output.requires_grad:
            tracked = output.detach().requires_grad_().clone()  # a leaf may not be changed in place, its copy may
        tracked.register_hook(partial(self._backward, numbers, module, received))  # type: ignore[no-untyped-call]
        return tracked

    def _backward(self, numbers: Sequence[int], module: nn.Module, received: Tensor, grad: Tensor) -> None:
        """Hand on the factors of every block that the module feeds."""
        work = self._engine.work
        scaled = grad.to(work)
        if self._scale_B is not None:
            scaled = scaled * self._scale_B.view(-1, *(1,) * (grad.ndim - 1))
        if self._by_position:
            received, scaled = received.transpose(0, 1), scaled.transpose(0, 1)
        for number in numbers:
            block = self._engine.layers.blocks[number]
            if "vector" in block.kinds:
                self._quiet = True
                try:
                    right = _vector_gradients(module, block, received.to(work), scaled)
                finally:
                    self._quiet = False
                use = Use(right.new_ones(len(right), 1, 1), right[:, None, :])
            elif isinstance(module, nn.Embedding):
                scale = _embedding_scale(module)
                rows = scaled if scale == 1.0 else scaled * scale
                if module.padding_idx is not None:  # as torch does: the padding token is not trained
                    rows = rows * (received != module.padding_idx)[..., None]
                use = Use(received, rows)
            else:
                # one object for layers that receive the same, q, k and v say, which come one by one
                last = self._last
                same = (
                    last is not None and last[0].data_ptr() == received.data_ptr() and last[0].shape == received.shape
                )
                if last is None or not same or last[1:3] != (block.weight, block.bias):
                    right = _augmented(received.to(work).flatten(1, -2), block)
                    self._last = last = received, block.weight, block.bias, right
                use = Use(scaled.flatten(1, -2), last[3])
            self._consume(number, use, slice(0, len(scaled)))


def _check_forward(module: nn.Module, name: str, received: Tensor, output: Tensor) -> None:
    """A subclass may do more than its name says: its factors would then be those of another function."""
    try:
        if isinstance(module, nn.Embedding):
            expected = functional.embedding(received, module.weight) * _embedding_scale(module)
        elif isinstance(module, nn.Linear):
            expected = functional.linear(received, module.weight, module.bias)
        elif isinstance(module, Conv1D):
            expected = received @ module.weight + module.bias
        else:
            return
        expected, output = expected.detach().float(), output.detach().float()
        spread, worst = float(expected.std()), float((expected - output).abs().max())
    except RuntimeError as err:  # of shapes
        why = f"{name} ({type(module).__name__}) does not multiply its input with its weight as it is: {err}"
        raise UntakenLayerError(why, name) from err
    if not worst <= TOLERANCE.get(module.weight.dtype, max(TOLERANCE.values())) * max(spread, 1e-6):
        why = (
            f"{name} ({type(module).__name__}) gives something else than its weight times its input (off by "
            f"{worst:.3g} of {spread:.3g}), so it has no per-example form here"
        )
        raise UntakenLayerError(why, name)


def _embedding_scale(module: nn.Embedding) -> float:
    """What an embedding multiplies its rows by, as Gemma's does."""
    return float(getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)))


def _augmented(received: Tensor, block: Block) -> Tensor:
    """The right factor of a linear layer: its input, and 1 for the bias."""
    if not block.bias:
        return received
    one = received.new_ones(*received.shape[:-1], 1)
    return torch.cat([received, one], dim=-1) if block.weight else one


def _vector_gradients(module: nn.Module, block: Block, received: Tensor, grad: Tensor) -> Tensor:
    """Plain per-example gradients of the vectors of a norm, (B, P)."""
    vectors = {
        name: parameter.detach().to(received.dtype) for name, parameter in module.named_parameters(recurse=False)
    }
    kept = [name for name in vectors if any(full.rpartition(".")[2] == name for full in block.parameters)]

    def pull(one: Tensor, back: Tensor) -> dict[str, Tensor]:
        def forward(chosen: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(module, vectors | chosen, (one[None],))
            return out[0]

        pullback = torch.func.vjp(forward, {name: vectors[name] for name in kept})[1]
        by_name: dict[str, Tensor] = pullback(back)[0]
        return by_name

    by_name = torch.func.vmap(pull)(received, grad)
    return torch.cat([by_name[name].flatten(1) for name in kept], dim=1)
