"""Per-example gradients with respect to the weights of a causal LM, as factors, by one forward and one backward pass.

The gradient of example b with respect to a matrix is a sum over positions of outer products of the gradient at the
output of the layer (left) and the input of the layer (right):

    G_b = sum_t left_{b,t} (x) right_{b,t}

A *block* is a matrix of parameters with such a gradient, or the vectors of a norm. Weights do not require gradients. A
hook on every selected module makes its output require a gradient unless it already does, so the backward pass ends at
the earliest selected module and computes gradients of activations only. Factors are passed to a consumer immediately
and not stored.

Start with `layers_of` and `PerExample.run`.

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
from grasp.models.batch import Batch
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.head import TOLERANCE
from grasp.models.residuals import SparseResidual, sparse_residual, stack_residuals

MAX_VECTOR = 1_000_000  # parameters of a module that is neither linear nor embedding: gradients are stored per example
TINY = torch.finfo(torch.float32).tiny  # losses above 87 nats are reported as 87; their gradients are exact
CPU_CHUNK_ELEMENTS = 1 << 24  # elements of a chunk of logits
CUDA_CHUNK_ELEMENTS = 1 << 28
FLOAT16_HINT = "; float16 overflows, set dtype to bfloat16 or float32"

Kind = Literal["linear", "embedding", "vector"]
Output = Literal["loss", "margin", "sampled"]


class UnsupportedLayerError(ModelError):
    """Layers without per-example gradients, by names of modules or parameters."""

    def __init__(self, reason: str, *layers: str) -> None:
        patterns = ", ".join(f"!{layer}" for layer in layers[:3])
        more = f" and so on ({len(layers)} in total)" * (len(layers) > 3)
        super().__init__(f"layers: {reason}; exclude {'it' if len(layers) == 1 else 'them'} with {patterns}{more}")
        self.reason, self.layers = reason, layers


class SharedPositionsError(Exception):
    """An embedding was looked up once for all examples of a batch."""


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix whose gradient is a sum of outer products left x right, or the vectors of one module as (1, P)."""

    name: str
    kinds: tuple[Kind, ...]  # kind of each use: a tied head has ("embedding", "linear")
    left: int
    right: int  # includes one last column for the bias
    weight: bool  # False: only the bias
    bias: bool
    parameters: tuple[str, ...]  # canonical names
    transposed: bool = False  # the parameter has the shape (right, left), as in GPT-2
    head: bool = False  # output layer of the model, which is applied to positions with a label only

    @property
    def size(self) -> int:
        """Return the number of coordinates."""
        return self.left * self.right


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Blocks of the selected parameters, and the modules that use them."""

    blocks: tuple[Block, ...]
    modules: tuple[tuple[nn.Module, int], ...]  # module and index of its block
    total: int  # number of parameters of the model

    @property
    def size(self) -> int:
        """Return the number of coordinates of all blocks."""
        return sum(block.size for block in self.blocks)


def layers_of(model: ReferenceModel, parameter_names: Iterable[str]) -> LayerSet:
    """Return the blocks of the selected parameters, in the order of the modules.

    A block has the parameters of one matrix product: the weight of a linear layer with its bias, an embedding, or the
    vectors of a norm. A weight that several modules use, e.g. a tied head, is one block without a bias; its gradient is
    the sum over all uses.

    Args:
        model: model with these parameters.
        parameter_names: canonical names of parameters, as in `named_parameters` of the model.
    Raises:
        UnsupportedLayerError: per-example gradients of a parameter are not supported.
    """
    selected, root = set(parameter_names), model.model
    canonical = {id(parameter): name for name, parameter in root.named_parameters()}
    owners: dict[str, list[tuple[str, nn.Module]]] = {}
    for module_name, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            if (name := canonical[id(parameter)]) in selected:
                owners.setdefault(name, []).append((module_name, module))
    names_by_users: dict[tuple[int, ...], list[str]] = {}
    for name, users in owners.items():
        names_by_users.setdefault(tuple(id(module) for _, module in users), []).append(name)
    head_type, inner_modules = type(model.head.linear).__name__, set(model.head.linear.modules()) - {model.head.linear}
    blocks: list[Block] = []
    modules: list[tuple[nn.Module, int]] = []
    for names in names_by_users.values():
        users = owners[names[0]]
        using = [module for _, module in users]
        fault = ""  # the output layer, which is not called during a pass, is selected as one complete matrix
        has_scaled_bias = model.head.factor_V is not None and getattr(model.head.linear, "bias", None) is not None
        if model.head.linear in using and (not model.head.is_weight or has_scaled_bias):
            fault = f"{names[0]}: the logits are not those of the complete weight ({head_type})"
        elif any(module in inner_modules for module in using):
            fault = f"{names[0]} is inside the output layer ({head_type}), which is supported as a whole only"
        if fault:
            raise UnsupportedLayerError(fault, names[0])
        roles = {canonical[id(parameter)]: role for role, parameter in users[0][1].named_parameters(recurse=False)}
        modules += [(module, len(blocks)) for module in using]
        blocks.append(_block(tuple(names), users, roles, is_head=using == [model.head.linear]))
    return LayerSet(tuple(blocks), tuple(modules), sum(parameter.numel() for parameter in root.parameters()))


def _block(
    names: tuple[str, ...], users: Sequence[tuple[str, nn.Module]], roles: Mapping[str, str], *, is_head: bool
) -> Block:
    """Return the block of parameters that are used by the same modules; `roles` are their names in the first one."""
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
        total = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if len(users) > 1 or total > MAX_VECTOR or list(module.children()):
            reason = (
                f"{name} ({type(module).__name__}, {total:,} parameters of its own, {len(users)} uses) is neither "
                "linear nor an embedding nor small, so its per-example gradients are not supported"
            )
            raise UnsupportedLayerError(reason, *names)
        size = sum(module.get_parameter(roles[parameter]).numel() for parameter in names)
        return Block(name, kinds, 1, size, weight=True, bias=False, parameters=names)
    for parameter in names:
        if roles[parameter] not in ("weight", "bias"):
            reason = (
                f"{parameter}: per-example gradients of a {type(module).__name__} with other parameters than weight "
                "and bias are not supported"
            )
            raise UnsupportedLayerError(reason, parameter)
    has_weight, has_bias = (role in {roles[parameter] for parameter in names} for role in ("weight", "bias"))
    is_transposed = isinstance(module, Conv1D)
    rows, columns = module.get_parameter("weight").shape  # (output, input), or (vocabulary, width) of an embedding
    left, width = (columns, rows) if is_transposed else (rows, columns)
    right = width * has_weight + has_bias
    return Block(name, kinds, left, right, has_weight, has_bias, names, is_transposed, is_head)


# -------------------------------------------------------------------------------------------------------------- factors


@dataclass(frozen=True, slots=True)
class GradientFactors:
    """Factors of a batch in one use of a block.

    Positions without a contribution have a right (or a left) factor of zero.
    """

    left: Tensor  # (B, T, X), or int64 (B, T): coordinates of one-hot vectors
    right: Tensor  # (B, T, Y)

    @property
    def one_hot(self) -> bool:
        """Return whether the left factors are coordinates of one-hot vectors."""
        return self.left.ndim == 2


Consumer = Callable[[int, GradientFactors, slice], None]  # index of the block, factors, and their examples in the batch


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of a row or a unit; the labels are ``input_ids[first:]`` with first >= 1, or those of a mask."""

    input_ids: I32
    first: int = 1
    loss_mask: Bool | None = None

    @property
    def labels(self) -> int:
        """Return the number of labels."""
        return len(self.input_ids) - self.first if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Results of the forward pass: means over the labels of each example, and features at its labels."""

    loss_B: Tensor  # nats
    miss_probability_B: Tensor  # 1 - p of the label
    features: Batch | None  # None without `top_k`


class PerExample:
    """Computation of per-example gradient factors, of the mean over the labels of a function of the logits."""

    def __init__(self, model: ReferenceModel, layers: LayerSet) -> None:
        """Run two short rows through the model to check that every selected parameter is used.

        Raises:
            ModelError: a selected parameter is not used, or such that per-example gradients are not supported.
        """
        self.model = model
        self.layers = layers
        self.work = model.work
        self.is_half_precision = model.dtype != self.work
        self._head_blocks = [number for module, number in layers.modules if module is model.head.linear]
        self._body: dict[nn.Module, list[int]] = {}
        for module, number in layers.modules:
            if module is not model.head.linear:
                self._body.setdefault(module, []).append(number)
        self.pass_positions = False  # whether to pass `position_ids` of every row to the model
        self.probing = True
        self.errors: list[UnsupportedLayerError] = []  # errors found while probing
        length = min(6, model.context or 6)
        ids = np.arange(2 * length, dtype=np.int32).reshape(2, length) % model.vocab_size
        calls: list[int] = []

        def count(number: int, _: GradientFactors, rows: slice) -> None:
            if rows.start == 0:
                calls.append(number)

        try:
            self.run([Example(row) for row in ids], count)
        except SharedPositionsError:
            self.pass_positions = True  # without them, positions are looked up once for the whole batch
            calls.clear()
            self.run([Example(row) for row in ids], count)
        self.probing = False
        self.calls = tuple(
            calls.count(number) for number in range(len(layers.blocks))
        )  # uses of each block in one pass
        failed = dict.fromkeys(layer for error in self.errors for layer in error.layers)
        unused = [block.name for block, uses in zip(layers.blocks, self.calls, strict=True) if uses == 0]
        if unused := [name for name in unused if name not in failed]:
            reason = f"{', '.join(unused[:3])} does not affect the loss of a row, so it has no gradient"
            self.errors.append(UnsupportedLayerError(reason, *unused))
        if self.errors:
            raise UnsupportedLayerError(self.errors[0].reason, *failed, *unused)

    def batches(self, examples: Sequence[Example], batch_tokens: int | None = None) -> list[I64]:
        """Return the indices of the examples of each batch; the default size is that of the model."""
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
        top_k: int | None = None,
    ) -> ForwardResult:
        """Compute the factors of every use of every block, and pass them to `consume`.

        The gradient is that of the mean over the labels of each example. The order of blocks is not defined; those of
        the head come in several parts of the batch. There are three functions of the logits z with label y:

            loss     -log p_y                      gradient  p - onehot_y
            margin   -log(p_y / (1 - p_y))         gradient  p without y - onehot_y
            sampled  -log p_y', y' drawn from p    gradient  p - onehot_y'         (true Fisher of the model)

        Args:
            examples: examples of the batch.
            consume: receives the factors; see `Consumer`.
            output: function of the logits.
            uniforms: for `sampled`, one number in [0, 1) per label of each example, from which the label is drawn by
                inverse transform sampling, so that it does not depend on the rest of the batch.
            by_position: for a single example, treat every position as an example; the gradients of all positions sum to
                that of the example.
            top_k: also return features with this number of probabilities per residual, as `extract` does, without
                another pass through the head.
        Raises:
            ModelError: the loss of an example is not finite.
        """
        device = self.model.device
        loss_masks = [example.first if example.loss_mask is None else example.loss_mask for example in examples]
        padded = pad_rows([example.input_ids for example in examples], loss_masks)
        ids_BL, loss_mask_BL = (tensor.to(device) for tensor in padded)
        scale_B = torch.tensor([1.0 / max(1, example.labels) for example in examples], dtype=self.work).to(device)
        # Gather supervised positions: a stable sort moves tokens with loss to the front in their order. Rows with fewer
        # labels are padded, and `is_label_BS` is False there.
        n_labels_B = loss_mask_BL.sum(dim=1)
        is_label_BS = torch.arange(int(n_labels_B.max()), device=device) < n_labels_B[:, None]
        token_BS = loss_mask_BL.int().argsort(dim=1, descending=True, stable=True)[:, : is_label_BS.shape[1]]
        label_BS = ids_BL.gather(1, torch.where(is_label_BS, token_BS, 0))
        position_BS = torch.where(is_label_BS, token_BS - 1, 0)
        uniform_BS = None
        if uniforms is not None:
            padded_uniforms = np.zeros(tuple(is_label_BS.shape))
            for row, draws in zip(padded_uniforms, uniforms, strict=True):
                row[: len(draws)] = draws
            uniform_BS = torch.from_numpy(padded_uniforms).to(device)
        hooks = _Hooks(self, consume, tuple(ids_BL.shape), scale_B if self.is_half_precision else None, by_position)
        with torch.enable_grad(), ExitStack() as stack:
            for module, numbers in self._body.items():
                handle = module.register_forward_hook(partial(hooks.forward, numbers), with_kwargs=True)
                stack.callback(handle.remove)
            inputs = {}
            if self.pass_positions:
                inputs["position_ids"] = torch.arange(ids_BL.shape[1], device=device).expand_as(ids_BL)
            hidden_BLH = self.model.run_body(ids_BL, **inputs)
            loss_B, miss_probability_B, grad_BLH, residual = self._through_head(
                hidden_BLH.detach(),
                position_BS,
                label_BS,
                is_label_BS,
                scale_B,
                output,
                uniform_BS,
                consume,
                by_position=by_position,
                top_k=top_k,
            )
            if hidden_BLH.requires_grad:
                torch.autograd.backward(hidden_BLH, grad_BLH)
        features = None
        if residual is not None:
            row_P, label_P = is_label_BS.nonzero(as_tuple=True)
            at_P, residual = (row_P, position_BS[row_P, label_P]), residual.select(is_label_BS.flatten())
            hidden_PH = hidden_BLH.detach()[at_P].to(self.work)
            head, vocab_size = self.model.head, self.model.vocab_size
            features = Batch.of_positions(hidden_PH, residual, row_P, ids_BL[at_P], len(ids_BL), head, vocab_size)
        return ForwardResult(loss_B, miss_probability_B, features)

    def _through_head(
        self,
        hidden_BLH: Tensor,
        position_BS: Tensor,
        label_BS: Tensor,
        is_label_BS: Tensor,
        scale_B: Tensor,
        output: Output,
        uniform_BS: Tensor | None,
        consume: Consumer,
        *,
        by_position: bool,
        top_k: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, SparseResidual | None]:
        """Return mean losses, means of 1 - p of the label, the gradient with respect to hidden states, and residuals.

        Residuals are those at all B S positions, padding included; None without `top_k`.

        In bfloat16 and float16 the gradient is that of the sum over labels, since the mean over thousands of labels
        would underflow or lose digits; the hooks multiply by the scale in float32.
        """
        model, head = self.model, self.model.head
        grad_BLH = torch.zeros_like(hidden_BLH)
        losses, miss_probabilities, residuals = [], [], []
        limit = CPU_CHUNK_ELEMENTS if model.device.type == "cpu" else CUDA_CHUNK_ELEMENTS
        step = max(1, limit // (label_BS.shape[1] * model.vocab_size))
        for begin in range(0, len(hidden_BLH), step):
            rows = slice(begin, min(begin + step, len(hidden_BLH)))
            is_label, scale, label_BS1 = is_label_BS[rows], scale_B[rows], label_BS[rows][..., None]
            weight = is_label * scale[:, None]
            index = position_BS[rows][..., None].expand(-1, -1, hidden_BLH.shape[2])
            hidden_BSH = hidden_BLH[rows].gather(1, index)
            logits_BSV = head.link(head.linear_logits(hidden_BSH).to(self.work))
            value_BSV = torch.softmax(logits_BSV, dim=-1)  # becomes the gradient with respect to the logits
            p_BS = value_BSV.gather(-1, label_BS1).squeeze(-1)
            loss_BS = torch.where(is_label, -p_BS.clamp(min=TINY).log(), 0.0)
            slope = head.slope(logits_BSV)
            if top_k is not None:
                logits_PV, probability_PV = logits_BSV.flatten(0, 1), value_BSV.flatten(0, 1)
                label_P, slope_PV = label_BS[rows].flatten(), slope
                if isinstance(slope, Tensor) and slope.ndim == 3:  # else one by logit, (V,)
                    slope_PV = slope.flatten(0, 1)
                residuals.append(sparse_residual(logits_PV, label_P, top_k, slope_PV, probability_PV=probability_PV))
            if output == "margin":
                value_BSV = torch.softmax(logits_BSV.scatter(-1, label_BS1, -torch.inf), dim=-1)
            if output == "sampled":
                assert uniform_BS is not None
                cumulative = torch.cumsum(value_BSV, dim=-1)
                drawn = (uniform_BS[rows].to(cumulative) * cumulative[..., -1])[..., None]
                label_BS1 = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=model.vocab_size - 1)
            value_BSV.scatter_add_(-1, label_BS1, -torch.ones_like(label_BS1, dtype=self.work))
            if isinstance(slope, Tensor):
                value_BSV *= slope
                value_BSV *= weight[..., None]
            else:
                value_BSV *= (weight * slope)[..., None]
            losses.append(loss_BS.sum(dim=1) * scale)
            miss_probabilities.append(1.0 - torch.where(is_label, p_BS, 0.0).sum(dim=1) * scale)
            if self._body:
                grad_logits_BSV = value_BSV / scale[:, None, None] if self.is_half_precision else value_BSV
                matrix_VH = head.matrix()
                grad_hidden_BSH = grad_logits_BSV.to(matrix_VH.dtype) @ matrix_VH
                grad_BLH[rows].scatter_add_(1, index, grad_hidden_BSH.to(grad_BLH.dtype))
            for number in self._head_blocks:
                right = _with_ones(hidden_BSH.to(self.work), self.layers.blocks[number])
                if not by_position:
                    consume(number, GradientFactors(value_BSV, right), rows)
                    continue
                for s, position in enumerate(position_BS[0].tolist()):  # positions of the only example become examples
                    at_position = GradientFactors(value_BSV[:, s : s + 1], right[:, s : s + 1])
                    consume(number, at_position, slice(position, position + 1))
        loss_B = torch.cat(losses)
        invalid = (~loss_B.isfinite()).nonzero()[:, 0]
        if len(invalid):
            raise ModelError(
                f"example {int(invalid[0])} of a batch: its loss is {float(loss_B[invalid[0]])} in "
                f"{str(model.dtype).split('.')[1]}, expected a number"
                f"{FLOAT16_HINT if model.dtype == torch.float16 else ''}"
            )
        residual = stack_residuals(residuals) if residuals else None
        return loss_B, torch.cat(miss_probabilities), grad_BLH, residual


class _Hooks:
    """Forward and backward hooks of one pass over a batch, which combine inputs of modules and output gradients."""

    def __init__(
        self,
        engine: PerExample,
        consume: Consumer,
        shape: tuple[int, ...],  # (B, L)
        scale_B: Tensor | None,  # factor of gradients
        by_position: bool,
    ) -> None:
        self._engine, self._consume, self._shape = engine, consume, shape
        self._scale_B, self._by_position = scale_B, by_position
        self._paused = False  # ignore calls, while the gradients of a norm are computed by calling it again
        # input of the last layer, whether it has a weight and a bias, and its right factor
        self._last: tuple[Tensor, bool, bool, Tensor] | None = None

    def forward(
        self,
        numbers: Sequence[int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Tensor | None:
        """Record the input of a module until the gradient of its output is available."""
        if self._paused or not torch.is_grad_enabled():  # the model itself disables gradients here
            return None
        try:
            return self._track(numbers, module, args, kwargs, output)
        except UnsupportedLayerError as err:
            if not self._engine.probing:
                raise
            self._engine.errors.append(err)  # go on, to find all such layers in one pass
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
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if isinstance(module, nn.Embedding) and shapes[0][0] == 1 < self._shape[0] and not self._engine.pass_positions:
            raise SharedPositionsError
        if len(tensors) != 1 or not isinstance(output, Tensor) or shapes[0][:2] != self._shape:
            reason = (
                f"{name} ({type(module).__name__}) receives {', '.join(map(str, shapes))}, expected one tensor in and "
                f"out, with one entry per token, {self._shape}: rows cannot be distinguished"
            )
            raise UnsupportedLayerError(reason, name)
        layer_input = tensors[0].detach()
        if self._engine.probing:
            _check_forward(module, name, layer_input, output)
        tracked: Tensor = output
        if not output.requires_grad:
            tracked = output.detach().requires_grad_().clone()  # a leaf must not be changed in place, a clone may
        tracked.register_hook(partial(self._backward, numbers, module, layer_input))  # type: ignore[no-untyped-call]
        return tracked

    def _backward(self, numbers: Sequence[int], module: nn.Module, layer_input: Tensor, grad: Tensor) -> None:
        """Pass the factors of all blocks of a module to the consumer."""
        work = self._engine.work
        scaled = grad.to(work)
        if self._scale_B is not None:
            scaled = scaled * self._scale_B.view(-1, *(1,) * (grad.ndim - 1))
        if self._by_position:
            layer_input, scaled = layer_input.transpose(0, 1), scaled.transpose(0, 1)
        for number in numbers:
            block = self._engine.layers.blocks[number]
            if "vector" in block.kinds:
                self._paused = True
                try:
                    right = _vector_gradients(module, block, layer_input.to(work), scaled)
                finally:
                    self._paused = False
                factors = GradientFactors(right.new_ones(len(right), 1, 1), right[:, None, :])
            elif isinstance(module, nn.Embedding):
                scale = _embedding_scale(module)
                rows = scaled if scale == 1.0 else scaled * scale
                if module.padding_idx is not None:  # torch does not train the padding token
                    rows = rows * (layer_input != module.padding_idx)[..., None]
                factors = GradientFactors(layer_input, rows)
            else:
                # Layers with the same input, e.g. q, k and v, follow each other: reuse the right factor.
                last = self._last
                same = (
                    last is not None
                    and last[0].data_ptr() == layer_input.data_ptr()
                    and last[0].shape == layer_input.shape
                )
                if last is None or not same or last[1:3] != (block.weight, block.bias):
                    right = _with_ones(layer_input.to(work).flatten(1, -2), block)
                    self._last = last = layer_input, block.weight, block.bias, right
                factors = GradientFactors(scaled.flatten(1, -2), last[3])
            self._consume(number, factors, slice(0, len(scaled)))


def _check_forward(module: nn.Module, name: str, layer_input: Tensor, output: Tensor) -> None:
    """Check that a module computes the function of its base class, since a subclass may override it."""
    fault = ""
    try:
        if isinstance(module, nn.Embedding):
            expected = functional.embedding(layer_input, module.weight) * _embedding_scale(module)
        elif isinstance(module, nn.Linear):
            expected = functional.linear(layer_input, module.weight, module.bias)
        elif isinstance(module, Conv1D):
            expected = layer_input @ module.weight + module.bias
        else:
            return
        expected, output = expected.detach().float(), output.detach().float()
        std, worst = float(expected.std()), float((expected - output).abs().max())
        if not worst <= TOLERANCE.get(module.weight.dtype, max(TOLERANCE.values())) * max(std, 1e-6):
            fault = f"off by {worst:.3g} of {std:.3g}"
    except RuntimeError as err:  # shapes do not match
        fault = str(err)
    if fault:
        reason = (
            f"{name} ({type(module).__name__}) does not return its weight times its input ({fault}), so its "
            "per-example gradients are not supported"
        )
        raise UnsupportedLayerError(reason, name)


def _embedding_scale(module: nn.Embedding) -> float:
    """Return the factor by which an embedding scales its rows (Gemma)."""
    return float(getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)))


def _with_ones(layer_input: Tensor, block: Block) -> Tensor:
    """Return the right factor of a linear layer: its input, and a column of ones for the bias."""
    if not block.bias:
        return layer_input
    ones = layer_input.new_ones(*layer_input.shape[:-1], 1)
    return torch.cat([layer_input, ones], dim=-1) if block.weight else ones


def _vector_gradients(module: nn.Module, block: Block, layer_input: Tensor, grad: Tensor) -> Tensor:
    """Return the per-example gradients of the vectors of a norm, (B, P)."""
    vectors = {
        name: parameter.detach().to(layer_input.dtype) for name, parameter in module.named_parameters(recurse=False)
    }
    names = [name for name in vectors if any(full.rpartition(".")[2] == name for full in block.parameters)]

    def gradient_of_example(input_row: Tensor, output_gradient: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(module, vectors | parameters, (input_row[None],))
            return out[0]

        pullback = torch.func.vjp(forward, {name: vectors[name] for name in names})[1]
        by_name: dict[str, Tensor] = pullback(output_gradient)[0]
        return by_name

    by_name = torch.func.vmap(gradient_of_example)(layer_input, grad)
    return torch.cat([by_name[name].flatten(1) for name in names], dim=1)
