"""What modules received and what came back at their outputs, as factors of per-example gradients.

Shape letters: B examples, L tokens, P parameters of a norm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from grasp.models.gradients.factors import Use
from grasp.models.gradients.layers import Block, LayerSet, UntakenLayerError

FORWARD_TOLERANCE = 0.05  # of the output's standard deviation: room for bfloat16, none for another function


class SharedPositionsError(Exception):
    """An embedding was looked up once for all examples."""


Consumer = Callable[[int, Use, slice], None]  # block, factors, and the examples of the batch that they belong to


@dataclass
class Capture:
    """Hooks of one pass over one batch."""

    layers: LayerSet
    consume: Consumer
    shape: tuple[int, int]  # (B, L)
    work: torch.dtype
    scale_B: Tensor | None  # what gradients are multiplied by
    probing: bool  # whether it is the pass that looks at how modules behave
    positions_passed: bool  # whether the model was given the position of every token of every row
    by_position: bool = False  # of the one example each position is handed on as if it were an example
    _quiet: bool = False  # a norm's gradients are found by calling it again
    _last: tuple[Tensor, bool, bool, Tensor] | None = None  # what a layer received, and its right factor

    def hook(self, blocks: Sequence[int]) -> Callable[..., Tensor | None]:
        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor | None:
            if self._quiet:
                return None
            received = self._received(module, blocks[0], args, kwargs, output)
            if self.probing:
                _check_forward(module, self.layers.blocks[blocks[0]].name, received, output)
            tracked: Tensor = output
            if not output.requires_grad:
                tracked = output.detach().requires_grad_().clone()  # a leaf may not be changed in place, its copy may
            tracked.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._capture(module, blocks, received, grad)
            )
            return tracked

        return forward

    def _received(
        self, module: nn.Module, block: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        name = self.layers.blocks[block].name
        if len(tensors) != 1 or not isinstance(output, Tensor):
            why = f"{name} ({type(module).__name__}) takes {len(tensors)} tensors; expected one in, one out"
            raise UntakenLayerError(name, why)
        received = tensors[0]
        if isinstance(module, nn.Embedding) and received.shape[0] == 1 < self.shape[0]:
            if self.positions_passed:
                raise UntakenLayerError(name, f"{name} is looked up once for a whole batch")
            raise SharedPositionsError
        if tuple(received.shape[:2]) != self.shape:
            raise UntakenLayerError(
                name,
                f"{name} ({type(module).__name__}) receives {tuple(received.shape)}, expected one entry a token, "
                f"{self.shape}: what belongs to which row is lost",
            )
        return received.detach()

    def _capture(self, module: nn.Module, blocks: Sequence[int], received: Tensor, grad: Tensor) -> None:
        scaled = grad.to(self.work)
        if self.scale_B is not None:
            scaled = scaled * self.scale_B.view(-1, *(1,) * (grad.ndim - 1))
        if self.by_position:
            received, scaled = received.transpose(0, 1), scaled.transpose(0, 1)
        examples = slice(0, len(scaled))
        for number in blocks:
            block = self.layers.blocks[number]
            if "vector" in block.kinds:
                self._quiet = True
                try:
                    right = _vector_gradients(module, block, received.to(self.work), scaled)
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
                use = Use(scaled.flatten(1, -2), self._right(received, block))
            self.consume(number, use, examples)

    def _right(self, received: Tensor, block: Block) -> Tensor:
        """The right factor; one object for layers that receive the same, q, k and v say, which come one by one."""
        last = self._last
        same = last is not None and last[0].data_ptr() == received.data_ptr() and last[0].shape == received.shape
        if last is None or not same or last[1:3] != (block.weight, block.bias):
            right = augmented(received.to(self.work).flatten(1, -2), block)
            self._last = last = received, block.weight, block.bias, right
        return last[3]


def _check_forward(module: nn.Module, name: str, received: Tensor, output: Tensor) -> None:
    """A subclass may do more than its name says: its factors would then be those of another function."""
    if isinstance(module, nn.Embedding):
        expected = functional.embedding(received, module.weight) * _embedding_scale(module)
    elif isinstance(module, nn.Linear):
        expected = functional.linear(received, module.weight, module.bias)
    elif isinstance(module, Conv1D):
        expected = received @ module.weight + module.bias
    else:
        return
    expected, output = expected.detach().float(), output.detach().float()
    spread = float(expected.std())
    worst = float((expected - output).abs().max())
    if not worst <= FORWARD_TOLERANCE * max(spread, 1e-6):
        raise UntakenLayerError(
            name,
            f"{name} ({type(module).__name__}) gives something else than its weight times its input (off by "
            f"{worst:.3g} of {spread:.3g}), so it has no per-example form here",
        )


def _embedding_scale(module: nn.Embedding) -> float:
    """What an embedding multiplies its rows by, as Gemma's does."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0))
    return float(scale)


def augmented(received: Tensor, block: Block) -> Tensor:
    """The right factor of a linear layer: its input, and 1 for the bias."""
    if not block.bias:
        return received
    one = received.new_ones(*received.shape[:-1], 1)
    return torch.cat([received, one], dim=-1) if block.weight else one


def _vector_gradients(module: nn.Module, block: Block, received: Tensor, grad: Tensor) -> Tensor:
    """Plain per-example gradients of the vectors of a norm, (B, P)."""
    own = {name: parameter.detach().to(received.dtype) for name, parameter in module.named_parameters(recurse=False)}
    kept = [name for name in own if any(full.rpartition(".")[2] == name for full in block.parameters)]

    def pull(one: Tensor, back: Tensor) -> dict[str, Tensor]:
        def forward(chosen: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(module, own | chosen, (one[None],))
            return out[0]

        pullback = torch.func.vjp(forward, {name: own[name] for name in kept})[1]
        found: dict[str, Tensor] = pullback(back)[0]
        return found

    found = torch.func.vmap(pull)(received, grad)
    return torch.cat([found[name].flatten(1) for name in kept], dim=1)
