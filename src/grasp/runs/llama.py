"""A Llama as arrays: K models of one shape in one batched forward pass, and their Hugging Face form.

Shape letters: K models, B rows of a batch, L tokens, T = B L, H hidden width, V vocabulary.

Training a tiny model is dominated by what happens between the matrix products, so the weights that meet the
same input (query, key, value; gate, up) are one matrix here, and all weights of all models are views of two
flat buffers that the optimizer updates in one call. Everything has a leading model axis; one model is K = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.errors import ModelError
from grasp.runs.fused import rms_norm, rotate, swiglu
from grasp.seeds import stream

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6

Size = Annotated[int, Field(ge=1)]


class LlamaShape(BaseModel):
    """Sizes of a Llama with as many key and value heads as query heads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: Size
    hidden: Size
    intermediate: Size
    layers: Size
    heads: Size
    context: Annotated[int, Field(ge=2)]
    tied: bool = False

    @property
    def n_parameters(self) -> int:
        return sum(rows * columns for _, rows, columns in _blocks(self)) + self.hidden * (2 * self.layers + 1)

    def config(self, eos_id: int | None = None) -> LlamaConfig:
        """The Hugging Face configuration of the same model."""
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
        )


class StackedLlama:
    """Weights of K models of one shape: float32 views of two flat buffers, each with a gradient buffer.

    `matrices` and `vectors` (norm gains) are what an optimizer updates; `weights[name]` is (K, rows,
    columns), or (K, H) for a gain.
    """

    def __init__(self, shape: LlamaShape, n_models: int, device: torch.device) -> None:
        if shape.hidden % (2 * shape.heads):
            raise ModelError(
                f"hidden: got {shape.hidden}, expected a multiple of 2 x {shape.heads} heads: rotary embeddings turn"
                " pairs of coordinates"
            )
        self.shape = shape
        self.n_models = n_models
        self.device = device
        gains = [(name, shape.hidden) for name in _gains(shape)]
        self.matrices = _buffer(n_models * sum(rows * columns for _, rows, columns in _blocks(shape)), device)
        self.vectors = _buffer(n_models * sum(width for _, width in gains), device)
        views = _views(self.matrices, [(name, (n_models, r, c)) for name, r, c in _blocks(shape)])
        views |= _views(self.vectors, [(name, (n_models, width)) for name, width in gains])
        self.weights: dict[str, Tensor] = views
        self._rotary: tuple[Tensor, Tensor] | None = None

    def initialise(self, seeds: Sequence[int]) -> None:
        """Draw the weights of model k from ``seeds[k]`` alone: normal, 0.02, as Hugging Face does; gains are
        1."""
        for k, seed in enumerate(seeds):
            self.load(k, {name: _draw(seed, name, tensor) for name, tensor in self.tensors(k)})

    def tensors(self, k: int) -> Iterator[tuple[str, Tensor]]:
        """Weights of model k under their Hugging Face names; views, not copies."""
        for name, weight in self.weights.items():
            yield from _hf_views(name, weight.detach()[k])

    def load(self, k: int, state: Mapping[str, Tensor]) -> None:
        """Copy a Hugging Face state into model k."""
        for name, tensor in self.tensors(k):
            tensor.copy_(state[name])

    def state(self, k: int) -> dict[str, Tensor]:
        """Copies of the weights of model k under their Hugging Face names, on the CPU."""
        state = {name: tensor.cpu().clone() for name, tensor in self.tensors(k)}
        if self.shape.tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def to_hf(self, k: int, eos_id: int | None = None) -> LlamaForCausalLM:
        """Model k as an ordinary Hugging Face model on the CPU, float32."""
        with torch.random.fork_rng(devices=[]):  # its own initialisation is thrown away, the caller's stream kept
            model = LlamaForCausalLM(self.shape.config(eos_id))
        model.load_state_dict(self.state(k))
        return model.eval()

    @property
    def head(self) -> Tensor:
        """Output matrix, (K, V, H)."""
        return self.weights["embed" if self.shape.tied else "head"]

    def hidden(self, ids_KBL: Tensor) -> Tensor:
        """Hidden states as the head sees them, (K, B, L, H).

        Rows are padded on the right: under causal attention padding cannot reach a real position.
        """
        n_models, n_rows, length = ids_KBL.shape
        w = self.weights
        offset = torch.arange(n_models, device=ids_KBL.device).mul_(self.shape.vocab_size)
        flat_ids = ids_KBL.reshape(n_models, -1) + offset[:, None]
        x_KTH = F.embedding(flat_ids, w["embed"].reshape(-1, self.shape.hidden))
        rotary = self._cos_sin(length)
        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}."
            packed = _times(rms_norm(x_KTH, w[prefix + "norm"], NORM_EPS), w[prefix + "qkv"])
            mixed = _attention(packed, n_models * n_rows, self.shape.heads, rotary)
            x_KTH = x_KTH + _times(mixed.reshape(x_KTH.shape), w[prefix + "out"])
            packed = _times(rms_norm(x_KTH, w[prefix + "mlp_norm"], NORM_EPS), w[prefix + "gate_up"])
            x_KTH = x_KTH + _times(swiglu(packed), w[prefix + "down"])
        return rms_norm(x_KTH, w["norm"], NORM_EPS).reshape(n_models, n_rows, length, -1)

    def _cos_sin(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, each (L, 1, head width / 2), as Hugging Face computes
        them."""
        if self._rotary is None or self._rotary[0].shape[0] < length:
            width = self.shape.hidden // self.shape.heads
            inverse = 1.0 / (ROPE_THETA ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
            angles = torch.arange(max(length, self.shape.context))[:, None].float() * inverse
            angles = angles[:, None, :].to(self.device)
            self._rotary = (angles.cos(), angles.sin())
        return self._rotary[0][:length], self._rotary[1][:length]


def _blocks(shape: LlamaShape) -> list[tuple[str, int, int]]:
    """Matrices (name, rows, columns), in the order of the flat buffer."""
    hidden, inner = shape.hidden, shape.intermediate
    blocks = [("embed", shape.vocab_size, hidden)]
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        blocks += [(prefix + "qkv", 3 * hidden, hidden), (prefix + "out", hidden, hidden)]
        blocks += [(prefix + "gate_up", 2 * inner, hidden), (prefix + "down", hidden, inner)]
    return blocks if shape.tied else [*blocks, ("head", shape.vocab_size, hidden)]


def _gains(shape: LlamaShape) -> list[str]:
    layers = [f"layers.{layer}.{name}" for layer in range(shape.layers) for name in ("norm", "mlp_norm")]
    return [*layers, "norm"]


_PARTS = {
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "out": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "norm": ("input_layernorm.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
}
_WHOLE = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}


def _hf_views(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of one of our weights under the Hugging Face names of its parts."""
    if name in _WHOLE:
        yield _WHOLE[name], weight
        return
    layers, layer, kind = name.split(".")
    parts = _PARTS[kind]
    for part, view in zip(parts, weight.chunk(len(parts)), strict=True):
        yield f"model.{layers}.{layer}.{part}", view


def _draw(seed: int, name: str, like: Tensor) -> Tensor:
    if like.ndim == 1:
        return torch.ones_like(like)
    values = stream(seed, "init", name).standard_normal(tuple(like.shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(0.02)


def _buffer(size: int, device: torch.device) -> Tensor:
    buffer = torch.zeros(size, device=device, requires_grad=True)
    buffer.grad = torch.zeros_like(buffer)
    return buffer


def _views(buffer: Tensor, sizes: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Leaves over one buffer; their gradients are views of its gradient, which backward adds to in place."""
    assert buffer.grad is not None
    views, start = {}, 0
    for name, size in sizes:
        stop = start + int(np.prod(size))
        view = buffer.detach()[start:stop].view(size).requires_grad_()
        view.grad = buffer.grad[start:stop].view(size)
        views[name] = view
        start = stop
    return views


def _times(x_KTI: Tensor, weight_KOI: Tensor) -> Tensor:
    return torch.bmm(x_KTI, weight_KOI.transpose(1, 2))


def _attention(packed: Tensor, n_rows: int, heads: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention of (rows, L, 3, heads, width) packed queries, keys, values; (rows, L, heads,
    width)."""
    query, key, value = packed.view(n_rows, -1, 3, heads, packed.shape[-1] // (3 * heads)).unbind(dim=2)
    query, key = rotate(query, *rotary), rotate(key, *rotary)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
    )
    return mixed.transpose(1, 2)
