"""Three elementwise pieces of a Llama with their gradients written out: fewer passes through memory than
autograd.

Shape letters: K models, T tokens, H hidden width, I inner width of the feed-forward block. Each is tested
against autograd on the plain formula, in float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def rms_norm(x_KTH: Tensor, gain_KH: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain``, the mean over H."""
    normed: Tensor = _RmsNorm.apply(x_KTH, gain_KH, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(packed_KT2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of a packed ``[gate, up]``, (K, T, 2 I) -> (K, T, I)."""
    product: Tensor = _SwiGlu.apply(packed_KT2I)  # type: ignore[no-untyped-call]
    return product


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (..., L, heads, width); `cos`, `sin` (L, 1, width / 2) turn coordinates i, i +
    width / 2."""
    turned: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, gain)
        scaled: Tensor = unit * gain[:, None, :]
        return scaled

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, inverse, gain = ctx.saved_tensors
        grad_gain = (product := grad_outputs[0] * unit).sum(dim=1)
        along = torch.matmul(product, gain[:, :, None]).div_(-unit.shape[-1])
        grad = (grad_outputs[0] * gain[:, None, :]).addcmul_(unit, along).mul_(inverse)
        return grad, grad_gain, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        active = F.silu(gate)
        ctx.save_for_backward(packed, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        packed, active = ctx.saved_tensors
        gate, up = packed.chunk(2, dim=-1)
        grad = torch.empty_like(packed)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grad_outputs[0], active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_outputs[0] * up, gate, grad_input=grad_gate)
        return grad


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_outputs[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    turned = torch.empty_like(x)
    turned_left, turned_right = turned.chunk(2, dim=-1)
    torch.mul(left, cos, out=turned_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=turned_right).addcmul_(left, sin)
    return turned
