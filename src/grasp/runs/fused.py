"""Pieces of a Llama with their gradients written out: fewer passes through memory than autograd.

The head: a tiny model spends most of a step moving logits through memory. Here a chunk of positions goes through head,
softmax and both gradient products while it is in cache, so a batch costs one buffer of `chunk` x V and three products.

Shape letters: K models, T tokens, H hidden width, I inner width of the feed-forward block. Each is tested
against autograd on the plain formula, in float64.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

CPU_CHUNK = 256  # positions: fast between 128 and 512 at a vocabulary of a few thousand
CUDA_CHUNK_ELEMENTS = 1 << 27  # of logits; 512 MB in float32
MIN_CUDA_POSITIONS = 256
TINY = torch.finfo(torch.float32).tiny  # a loss beyond 87 nats reads 87; its gradient is exact all the same


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
        # With u = x / r, r the root mean square: d loss / dx = (g - u mean(g u)) / r, where g = grad * gain.
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


# ---------------------------------------------------------------------------------------------- head and its loss


def head_loss(hidden_KTH: Tensor, head_KVH: Tensor, labels_KT: Tensor, weight_KT: Tensor) -> Tensor:
    """Weighted sum of cross-entropies, (K,), float32: ``sum_t weight_t * (logsumexp(z_t) - z_t[label_t])``.

    Args:
        labels_KT: int64; positions of weight 0 are skipped, their label is never looked at.
        weight_KT: float32, no gradient; normalise it to get a mean.
    Gradients flow to `hidden_KTH` and `head_KVH`. Under autocast the products are done in its type, the
    softmax in float32.
    """
    losses: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_KTH, head_KVH, labels_KT, weight_KT
    )
    return losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_KTH: Tensor, head_KVH: Tensor, labels_KT: Tensor, weight_KT: Tensor) -> Tensor:
        device = hidden_KTH.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
        grad_hidden = torch.zeros_like(hidden_KTH)
        grad_head = torch.zeros_like(head_KVH)
        losses = torch.zeros(hidden_KTH.shape[0], device=device)
        with torch.autocast(device.type, enabled=False):
            low_head_KVH = head_KVH.to(dtype)
            if _in_cpu_cache(device):
                for k in range(hidden_KTH.shape[0]):
                    losses[k] = _one_model(
                        hidden_KTH[k], low_head_KVH[k], labels_KT[k], weight_KT[k], grad_hidden[k], grad_head[k]
                    )
            else:
                _all_models(losses, hidden_KTH, low_head_KVH, labels_KT, weight_KT, grad_hidden, grad_head)
        ctx.save_for_backward(grad_hidden, grad_head)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0][:, None, None]
        return grad_hidden * scale, grad_head * scale, None, None


def _in_cpu_cache(device: torch.device) -> bool:
    return device.type == "cpu"


def _one_model(
    hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, weight_T: Tensor, grad_hidden: Tensor, grad_head: Tensor
) -> Tensor:
    """Loss of one model; its gradients are written to `grad_hidden` and `grad_head`."""
    total = torch.zeros((), device=hidden_TH.device)
    for positions in torch.split(weight_T.nonzero().squeeze(1), CPU_CHUNK):
        hidden = hidden_TH[positions]
        weight = weight_T[positions, None]
        label = labels_T[positions, None]
        low = hidden.to(head_VH.dtype)
        logits = torch.mm(low, head_VH.T).float()
        probability = torch.softmax(logits, dim=1)
        total -= (probability.gather(1, label).clamp_min_(TINY).log_() * weight).sum()
        probability.scatter_add_(1, label, torch.full_like(weight, -1.0))
        residual = probability.to(head_VH.dtype)
        grad_hidden[positions] = (torch.mm(residual, head_VH).float() * weight).to(grad_hidden.dtype)
        _add_product(grad_head, residual.T, low * weight.to(low.dtype))
    return total


def _all_models(
    losses_K: Tensor,
    hidden_KTH: Tensor,
    head_KVH: Tensor,
    labels_KT: Tensor,
    weight_KT: Tensor,
    grad_hidden: Tensor,
    grad_head: Tensor,
) -> None:
    """The same for many models at once, in few large kernels and without waiting for the device: positions of
    weight 0 are computed and multiplied by 0, since finding them would make the host wait."""
    n_models, n_positions, _ = hidden_KTH.shape
    vocabulary = head_KVH.shape[1]
    positions = min(n_positions, max(MIN_CUDA_POSITIONS, CUDA_CHUNK_ELEMENTS // vocabulary))
    models = max(1, CUDA_CHUNK_ELEMENTS // (positions * vocabulary))
    for first, start in product(range(0, n_models, models), range(0, n_positions, positions)):
        k, t = slice(first, first + models), slice(start, start + positions)
        weight, label = weight_KT[k, t, None], labels_KT[k, t, None]
        low = hidden_KTH[k, t].to(head_KVH.dtype)
        probability = torch.softmax(torch.bmm(low, head_KVH[k].transpose(1, 2)).float(), dim=2)
        losses_K[k] -= (probability.gather(2, label).clamp_min_(TINY).log_() * weight).sum(dim=(1, 2))
        probability.scatter_add_(2, label, torch.full_like(weight, -1.0))
        residual = probability.to(head_KVH.dtype)
        grad_hidden[k, t] = (torch.bmm(residual, head_KVH[k]).float() * weight).to(grad_hidden.dtype)
        grad_head[k] += torch.bmm(residual.transpose(1, 2), low * weight.to(low.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)
