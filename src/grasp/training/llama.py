"""K Llama models of the same shape in one batched forward pass, and their conversion to Hugging Face models.

The architecture is that of `transformers.LlamaForCausalLM`: pre-norm blocks of causal attention with rotary embeddings
and a SwiGLU feed-forward layer.

For tiny models, operations between the matrix products dominate the training time. Therefore weights with the same
input (query, key, value; gate, up) are packed into one matrix, and all weights of all models are views of two flat
buffers, which the optimizer updates in one call. All tensors have a leading model axis; one model is K = 1.

Some functions have explicit gradients, which need fewer passes through memory than autograd. In particular, a tiny
model spends most of a step on memory traffic of logits: `head_loss` runs head, softmax and both gradient products on a
chunk of positions while it is in the cache, with one buffer of `chunk` x V per batch. All explicit gradients are tested
against autograd in float64.

Start with `StackedLlama`.
Shape letters: K models, B rows of a batch, L tokens, T = B L, P positions with loss, H hidden width, V vocabulary,
I inner width, E units, A answers of units.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.models.causal_lm import batches
from grasp.models.checkpoint import TRAIN_FIELD
from grasp.models.unit_loss import check_finite_losses, deduplicate_answers, mean_losses, pad_units, supervised_states
from grasp.seeds import stream
from grasp.settings import Settings
from grasp.targets.margins import Answers
from grasp.targets.units import UnitTokens

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6

Size = Annotated[int, Field(ge=1)]
SEQUENTIAL_DEVICES = ("cpu",)  # devices that process one model at a time, so that a chunk fits the cache
CPU_CHUNK = 256  # positions: fast between 128 and 512 at a vocabulary of a few thousand
CUDA_CHUNK_ELEMENTS = 1 << 27  # elements of a chunk of logits: 512 MB in float32
MIN_CUDA_POSITIONS = 256
TINY = torch.finfo(torch.float32).tiny  # losses above 87 nats are reported as 87; their gradients are exact


class LlamaShape(Settings):
    """Sizes of a Llama model with as many key and value heads as query heads."""

    vocab_size: Size
    hidden: Size
    intermediate: Size
    layers: Size
    heads: Size
    context: Annotated[int, Field(ge=2)]
    tied: bool = False

    @property
    def n_parameters(self) -> int:
        """Return the number of parameters."""
        n_gains = self.hidden * (2 * self.layers + 1)  # two norms per layer, and the final one
        return sum(rows * columns for _, rows, columns in _matrices(self)) + n_gains

    def config(self, eos_id: int | None = None) -> LlamaConfig:
        """Return the Hugging Face configuration of the model."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            rms_norm_eps=NORM_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            bos_token_id=None,
            eos_token_id=eos_id,
            **{TRAIN_FIELD: "new"},
        )


class StackedLlama:
    """K models of the same shape, whose float32 weights are views of two flat buffers with gradient buffers.

    An optimizer updates the buffers `matrices` and `vectors` (norm gains); `weights[name]` is (K, rows, columns), or
    (K, H) for a gain.
    """

    def __init__(self, shape: LlamaShape, n_models: int, device: torch.device) -> None:
        if shape.hidden % (2 * shape.heads):
            raise ModelError(
                f"hidden: got {shape.hidden}, expected a multiple of 2 x {shape.heads} heads: rotary embeddings "
                "rotate pairs of coordinates"
            )
        self.shape = shape
        self.n_models = n_models
        self.device = device
        layer_norms = [f"layers.{layer}.{name}" for layer in range(shape.layers) for name in ("norm", "mlp_norm")]
        norms = [*layer_norms, "norm"]
        matrix_sizes = [(name, (n_models, rows, columns)) for name, rows, columns in _matrices(shape)]
        self.matrices, matrices = _flat_parameters(matrix_sizes, device)
        self.vectors, vectors = _flat_parameters([(name, (n_models, shape.hidden)) for name in norms], device)
        self.weights: dict[str, Tensor] = matrices | vectors
        self._rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine of the angles, (L, 1, head width / 2)

    def initialise(self, seeds: Sequence[int]) -> None:
        """Initialise model k from ``seeds[k]``: normal with standard deviation 0.02, as Hugging Face; gains are 1."""
        for k, seed in enumerate(seeds):
            for name, tensor in self.tensors(k):
                if tensor.ndim == 1:
                    tensor.fill_(1.0)
                    continue
                values = stream(seed, "init", name).standard_normal(tuple(tensor.shape), dtype=np.float32)
                tensor.copy_(torch.from_numpy(values).mul_(0.02))

    def tensors(self, k: int) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the weights of model k with their Hugging Face names."""
        for name, weights in self.weights.items():
            weight = weights.detach()[k]
            if name in _HF_NAMES:
                yield _HF_NAMES[name], weight
                continue
            layers, layer, block = name.split(".")
            hf_names = _HF_NAMES_IN_LAYER[block]
            for hf_name, view in zip(hf_names, weight.chunk(len(hf_names)), strict=True):
                yield f"model.{layers}.{layer}.{hf_name}", view

    def load(self, k: int, state: Mapping[str, Tensor]) -> None:
        """Copy a Hugging Face state dict to model k."""
        for name, tensor in self.tensors(k):
            tensor.copy_(state[name])

    def state(self, k: int) -> dict[str, Tensor]:
        """Return the state dict of model k with Hugging Face names, as copies on the CPU."""
        state = {name: tensor.cpu().clone() for name, tensor in self.tensors(k)}
        if self.shape.tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def to_hf(self, k: int, eos_id: int | None = None) -> LlamaForCausalLM:
        """Return model k as a Hugging Face model on the CPU, in float32 and eval mode."""
        with torch.random.fork_rng(devices=[]):  # its random initialisation must not advance the caller's generator
            model = LlamaForCausalLM(self.shape.config(eos_id))
        model.load_state_dict(self.state(k))
        return model.eval()

    @property
    def head(self) -> Tensor:
        """Return the output matrices, (K, V, H)."""
        return self.weights["embed" if self.shape.tied else "head"]

    def hidden(self, ids_KBL: Tensor) -> Tensor:
        """Run the models without their heads, and return the inputs of the heads, (K, B, L, H).

        Rows are padded on the right, which does not affect other positions with causal attention.
        """
        n_models, n_rows, length = ids_KBL.shape
        w = self.weights
        # one lookup for all models: the embeddings of model k begin at row k V of the concatenated matrices
        offset = torch.arange(n_models, device=ids_KBL.device).mul_(self.shape.vocab_size)
        flat_ids = ids_KBL.reshape(n_models, -1) + offset[:, None]
        x_KTH = F.embedding(flat_ids, w["embed"].reshape(-1, self.shape.hidden))
        rotary = self._rotary_embedding(length)
        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}."
            qkv = _linear(rms_norm(x_KTH, w[prefix + "norm"], NORM_EPS), w[prefix + "qkv"])
            attended = _attention(qkv, n_models * n_rows, self.shape.heads, rotary)
            x_KTH = x_KTH + _linear(attended.reshape(x_KTH.shape), w[prefix + "out"])
            gate_up = _linear(rms_norm(x_KTH, w[prefix + "mlp_norm"], NORM_EPS), w[prefix + "gate_up"])
            x_KTH = x_KTH + _linear(swiglu(gate_up), w[prefix + "down"])
        return rms_norm(x_KTH, w["norm"], NORM_EPS).reshape(n_models, n_rows, length, -1)

    def _rotary_embedding(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles of the first positions; same formula as Hugging Face."""
        if self._rotary is None or self._rotary[0].shape[0] < length:
            width = self.shape.hidden // self.shape.heads
            inverse = 1.0 / (ROPE_THETA ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
            angles = torch.arange(max(length, self.shape.context))[:, None].float() * inverse
            angles = angles[:, None, :].to(self.device)
            self._rotary = (angles.cos(), angles.sin())
        return self._rotary[0][:length], self._rotary[1][:length]

    def unit_losses(self, unit_tokens: Sequence[UnitTokens], batch_tokens: int = 8192) -> F64:
        """Return the results of `grasp.models.unit_loss.evaluate_units` of every model, (K, E) float64.

        Args:
            unit_tokens: units with their token ids.
            batch_tokens: tokens per forward pass, of all models together on a CPU, of each model on a GPU.
        """
        if self.device.type == "cpu":
            batch_tokens = max(1, batch_tokens // self.n_models)
        answers = Answers.of(unit_tokens)
        tokens, distinct_index_A = deduplicate_answers(answers.tokens)  # equal answers are evaluated once
        losses_KA = np.full((self.n_models, len(tokens)), np.nan)
        with torch.inference_mode():
            lengths_A = np.array([len(answer.input_ids) for answer in tokens], dtype=np.int64)
            for index_B in batches(lengths_A, batch_tokens):
                ids_BL, loss_mask_BL = pad_units([tokens[int(i)] for i in index_B])
                hidden_KBLH = self.hidden(ids_BL.to(self.device).expand(self.n_models, -1, -1))
                hidden_KPH = [supervised_states(hidden_BLH, loss_mask_BL) for hidden_BLH in hidden_KBLH]
                pairs = zip(hidden_KPH, self.head, strict=True)
                losses = [mean_losses(hidden_PH @ head.T, ids_BL, loss_mask_BL) for hidden_PH, head in pairs]
                losses_KA[:, index_B] = np.stack(losses)
        for losses_A in losses_KA:
            check_finite_losses(losses_A)
        return -answers.utilities(losses_KA[:, distinct_index_A])


def _matrices(shape: LlamaShape) -> list[tuple[str, int, int]]:
    """Return name, rows and columns of each matrix, in the order of the flat buffer."""
    hidden, inner = shape.hidden, shape.intermediate
    blocks = [("embed", shape.vocab_size, hidden)]
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        blocks += [(prefix + "qkv", 3 * hidden, hidden), (prefix + "out", hidden, hidden)]
        blocks += [(prefix + "gate_up", 2 * inner, hidden), (prefix + "down", hidden, inner)]
    return blocks if shape.tied else [*blocks, ("head", shape.vocab_size, hidden)]


# Hugging Face names of the weights that each matrix or gain of a layer packs, in order, and of the other weights.
_HF_NAMES_IN_LAYER = {
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "out": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "norm": ("input_layernorm.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
}
_HF_NAMES = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}


def _flat_parameters(
    sizes: Sequence[tuple[str, tuple[int, ...]]], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a buffer and leaf tensors that are views of it; their gradients are views of the buffer's gradient."""
    counts = [math.prod(size) for _, size in sizes]
    buffer = torch.zeros(sum(counts), device=device, requires_grad=True)
    buffer.grad = torch.zeros_like(buffer)
    views = {}
    segments = zip(sizes, torch.split(buffer.detach(), counts), torch.split(buffer.grad, counts), strict=True)
    for (name, size), values, gradient in segments:
        views[name] = values.view(size).requires_grad_()
        views[name].grad = gradient.view(size)
    return buffer, views


def _linear(x_KTI: Tensor, weight_KOI: Tensor) -> Tensor:
    """Apply the linear layer of each model, from I inputs to O outputs, without bias."""
    return torch.bmm(x_KTI, weight_KOI.transpose(1, 2))


def _attention(qkv: Tensor, n_rows: int, heads: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply causal attention to packed queries, keys and values; return (rows, L, heads, width)."""
    query, key, value = qkv.view(n_rows, -1, 3, heads, qkv.shape[-1] // (3 * heads)).unbind(dim=2)
    query, key = rotate(query, *rotary), rotate(key, *rotary)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
    )
    return attended.transpose(1, 2)


# --------------------------------------------------------------------------------- functions with explicit gradients


def rms_norm(x_KTH: Tensor, gain_KH: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * gain``, with the mean over H."""
    normed: Tensor = _RmsNorm.apply(x_KTH, gain_KH, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(packed_KT2I: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for packed ``[gate, up]``, (K, T, 2 I) -> (K, T, I)."""
    product: Tensor = _SwiGlu.apply(packed_KT2I)  # type: ignore[no-untyped-call]
    return product


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (..., L, heads, width): rotate coordinates i and i + width / 2.

    Args:
        cos: cosines of the angles, (L, 1, width / 2).
        sin: sines of the angles, (L, 1, width / 2).
    """
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


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
        # With u = x / r and r the root mean square: d loss / dx = (g - u mean(g u)) / r for g = grad * gain.
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
        return _apply_rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _apply_rotation(grad_outputs[0], cos, -sin), None, None


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x)
    rotated_left, rotated_right = rotated.chunk(2, dim=-1)
    torch.mul(left, cos, out=rotated_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=rotated_right).addcmul_(left, sin)
    return rotated


# ---------------------------------------------------------------------------------------------- head and its loss


def head_loss(
    hidden_KTH: Tensor, head_KVH: Tensor, labels_KT: Tensor, weight_KT: Tensor, loss_KT: Tensor | None = None
) -> Tensor:
    """Return weighted sums of cross-entropies, (K,), float32: ``sum_t weight_t * (logsumexp(z_t) - z_t[label_t])``.

    z_t are the logits. Gradients flow to `hidden_KTH` and `head_KVH`; the forward pass computes them, as it has the
    softmax in the cache. Under autocast the products are computed in its type, the softmax in float32.

    Args:
        hidden_KTH: inputs of the heads.
        head_KVH: output matrices.
        labels_KT: int64; positions of weight 0 are skipped, and their label is ignored.
        weight_KT: float32, no gradient; normalise it to get a mean.
        loss_KT: float32 zeros; the terms of the sum are written there.
    """
    losses: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_KTH, head_KVH, labels_KT, weight_KT, loss_KT
    )
    return losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KTH: Tensor,
        head_KVH: Tensor,
        labels_KT: Tensor,
        weight_KT: Tensor,
        loss_KT: Tensor | None,
    ) -> Tensor:
        device = hidden_KTH.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
        grad_hidden = torch.zeros_like(hidden_KTH)
        grad_head = torch.zeros_like(head_KVH)
        losses = torch.zeros(hidden_KTH.shape[0], device=device)
        if loss_KT is None:
            loss_KT = torch.zeros_like(weight_KT)
        with torch.autocast(device.type, enabled=False):
            cast_head_KVH = head_KVH.to(dtype)
            if device.type in SEQUENTIAL_DEVICES:
                for k in range(hidden_KTH.shape[0]):
                    losses[k] = _one_model(
                        hidden_KTH[k],
                        cast_head_KVH[k],
                        labels_KT[k],
                        weight_KT[k],
                        loss_KT[k],
                        grad_hidden[k],
                        grad_head[k],
                    )
            else:
                _all_models(losses, hidden_KTH, cast_head_KVH, labels_KT, weight_KT, loss_KT, grad_hidden, grad_head)
        ctx.save_for_backward(grad_hidden, grad_head)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0][:, None, None]
        return grad_hidden * scale, grad_head * scale, None, None, None


def _one_model(
    hidden_TH: Tensor,
    head_VH: Tensor,
    labels_T: Tensor,
    weight_T: Tensor,
    loss_T: Tensor,
    grad_hidden: Tensor,
    grad_head: Tensor,
) -> Tensor:
    """Return the loss of one model; write its terms to `loss_T`, its gradients to `grad_hidden` and `grad_head`."""
    total = torch.zeros((), device=hidden_TH.device)
    for positions in torch.split(weight_T.nonzero().squeeze(1), CPU_CHUNK):
        hidden = hidden_TH[positions]
        weight = weight_T[positions, None]
        label = labels_T[positions, None]
        cast_hidden = hidden.to(head_VH.dtype)
        logits = torch.mm(cast_hidden, head_VH.T).float()
        probability = torch.softmax(logits, dim=1)
        log_likelihood = probability.gather(1, label).clamp_min_(TINY).log_() * weight
        total -= log_likelihood.sum()
        loss_T[positions] = -log_likelihood[:, 0]
        # the gradient with respect to the logits is p - onehot(label), times the weight; reuse the buffer of p
        probability.scatter_add_(1, label, torch.full_like(weight, -1.0))
        residual = probability.to(head_VH.dtype)
        grad_hidden[positions] = (torch.mm(residual, head_VH).float() * weight).to(grad_hidden.dtype)
        weighted_hidden = cast_hidden * weight.to(cast_hidden.dtype)
        if residual.dtype == grad_head.dtype:
            grad_head.addmm_(residual.T, weighted_hidden)
        else:
            grad_head += torch.mm(residual.T, weighted_hidden)
    return total


def _all_models(
    losses_K: Tensor,
    hidden_KTH: Tensor,
    head_KVH: Tensor,
    labels_KT: Tensor,
    weight_KT: Tensor,
    loss_KT: Tensor,
    grad_hidden: Tensor,
    grad_head: Tensor,
) -> None:
    """Compute losses and gradients of many models at once, in few large kernels without synchronizing with the device.

    `losses_K`, `loss_KT`, `grad_hidden` and `grad_head` are outputs, as in `_one_model`.

    Positions of weight 0 are computed and multiplied by 0, because finding them would require a synchronization.
    """
    n_models, n_positions, _ = hidden_KTH.shape
    vocabulary = head_KVH.shape[1]
    chunk_positions = min(n_positions, max(MIN_CUDA_POSITIONS, CUDA_CHUNK_ELEMENTS // vocabulary))
    chunk_models = max(1, CUDA_CHUNK_ELEMENTS // (chunk_positions * vocabulary))
    for first, start in product(range(0, n_models, chunk_models), range(0, n_positions, chunk_positions)):
        k, t = slice(first, first + chunk_models), slice(start, start + chunk_positions)
        weight, label = weight_KT[k, t, None], labels_KT[k, t, None]
        cast_hidden = hidden_KTH[k, t].to(head_KVH.dtype)
        probability = torch.softmax(torch.bmm(cast_hidden, head_KVH[k].transpose(1, 2)).float(), dim=2)
        log_likelihood = probability.gather(2, label).clamp_min_(TINY).log_() * weight
        losses_K[k] -= log_likelihood.sum(dim=(1, 2))
        loss_KT[k, t] = -log_likelihood[..., 0]
        probability.scatter_add_(2, label, torch.full_like(weight, -1.0))
        residual = probability.to(head_KVH.dtype)
        grad_hidden[k, t] = (torch.bmm(residual, head_KVH[k]).float() * weight).to(grad_hidden.dtype)
        grad_head[k] += torch.bmm(residual.transpose(1, 2), cast_hidden * weight.to(cast_hidden.dtype))
