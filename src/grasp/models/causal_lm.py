"""A Hugging Face causal LM as the reference model: its last hidden states and its output head.

Start with `ReferenceModel.load`. Shape letters: B rows of a batch, L tokens, P positions, H hidden width, V vocabulary.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from grasp.arrays import I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.checkpoint import device_of, dtype_name, dtype_of, load_causal_lm, text_config_of, tokenizer_of
from grasp.models.head import TOLERANCE, OutputHead, output_head
from grasp.models.tokenizer import HfTokenizer
from grasp.settings import ModelSettings

CHECKED_TOKENS = 32  # length of the two rows of `ReferenceModel.check`
# Maximum number of rows per batch. It bounds memory that grows with the number of rows if rows are short.
BATCH_ROWS = 64


class _HeadReachedError(Exception):
    """The forward pass has reached the output layer."""


class ReferenceModel:
    """A frozen causal LM, from which hidden states and logits are read."""

    def __init__(self, model: nn.Module, tokenizer: HfTokenizer, *, batch_tokens: int = 8192) -> None:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        n_parameters = sum(1 for _ in model.parameters())
        # Parameters that the user froze. If all are frozen, the model was loaded for inference: none counts.
        self.frozen = tuple(frozen) if len(frozen) < n_parameters else ()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.head = output_head(self.model)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.work = torch.promote_types(self.dtype, torch.float32)  # dtype of probabilities
        n_outputs, self.hidden_size = self.head.linear.get_parameter("weight").shape
        self.vocab_size = self.head.classes or n_outputs
        self._dynamic_ropes = dynamic_ropes(model)

    @classmethod
    def load(cls, settings: ModelSettings) -> Self:
        """Load checkpoint and tokenizer, and verify that head(hidden) equals the model's logits and that it is causal.

        Raises:
            ModelError: the checkpoint does not exist; its output head is not supported; the model is not causal, or
                requires inputs other than token ids.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device)
        dtype = dtype_of(settings.dtype, device)
        model, tokenizer = load_causal_lm(settings, dtype)
        return cls.from_model(model.to(device), tokenizer, settings)

    @classmethod
    def from_model(cls, model: nn.Module, tokenizer: Any, settings: ModelSettings) -> Self:
        """Wrap a loaded transformers model and its tokenizer, and verify it as `load` does.

        Raises:
            ModelError: as `load`; or the dtype of the weights is not supported.
        """
        dtype = dtype_name(next(model.parameters()).dtype)
        wrapped = HfTokenizer.from_settings(tokenizer, settings, len(tokenizer))
        try:
            reference = cls(model, wrapped, batch_tokens=settings.batch_tokens)
            if settings.check:
                reference.check()
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as err:
            # inconsistent sizes in the config, or a model that requires other inputs
            reason = " ".join(str(err).split())[:300]
            raise ModelError(
                f"{settings.path}: {type(model).__name__} in {dtype} fails on rows of token ids alone: {reason}"
            ) from err
        wrapped.vocab_size = reference.vocab_size
        return reference

    @property
    def batching(self) -> dict[str, Any]:
        """Return the settings of a forward pass that can change its rounding errors."""
        return {"batch_tokens": self.batch_tokens}

    @property
    def reader(self) -> tuple[str, str]:
        """Return the kind of preprocessing (the tokenizer) and its fingerprint."""
        return "tokenizer", self.tokenizer.fingerprint

    @property
    def body(self) -> nn.Module:
        """Return the base model in the sense of transformers; the whole model if there is none."""
        body: nn.Module = getattr(self.model, "base_model", self.model)
        return body

    @property
    def context(self) -> int | None:
        """Return the context length; None: the model does not define one."""
        context = context_of(self.model.config)
        if context is None:
            return None
        for name, module in self.model.named_modules():
            # tables with an offset for padding, e.g. RoBERTa's, have fewer usable positions
            if isinstance(module, nn.Embedding) and module.num_embeddings == context and "position" in name:
                return context if module.padding_idx is None else context - module.padding_idx - 1
        return context

    @torch.inference_mode()
    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Return the inputs of the head, (B, L, H), in the dtype of the model.

        Rows are padded on the right. With causal attention, padding does not affect other positions, so no mask is
        passed, which allows fast causal kernels.
        """
        return self.run_body(ids_BL.to(self.device))

    def run_body(self, ids_BL: Tensor, **inputs: Tensor) -> Tensor:
        """Return the inputs of the head, (B, L, H), with their autograd graph."""
        reset_ropes(self._dynamic_ropes)
        return run_body(self.model, self.head, ids_BL, **inputs)

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Return the inputs of the softmax, (P, V), float32 (float64 for a model in float64)."""
        dtype = self.head.linear.get_parameter("weight").dtype
        return self.head.link(self.head.linear_logits(hidden_PH.to(dtype)).to(self.work))

    def batches(self, length_N: I64, batch_tokens: int | None = None) -> list[I64]:
        """Group rows into batches; see the function `batches`."""
        return batches(length_N, batch_tokens or self.batch_tokens, length_class(self.model.config, length_N))

    @torch.inference_mode()
    def check(self) -> None:
        """Verify head(hidden) and causality on two rows, one of which is padded.

        head(hidden) must equal the logits of the model, and hidden states must not change if later tokens change.

        Raises:
            ModelError: the logits differ by more than rounding, so the head is not a linear layer with a scale or a
                soft cap; or hidden states changed, so losses would depend on the token that they predict, and features
                of a row on its padding.
        """
        tolerance, fault = TOLERANCE[self.dtype], ""
        length = min(CHECKED_TOKENS, self.context or CHECKED_TOKENS)
        first = length // 2
        draws = np.random.default_rng(0).integers(self.vocab_size, size=(3, length))
        draws[1] = np.where(np.arange(length) < first, draws[0], 0)  # first tokens of row 0, then padding
        ids_BL = torch.from_numpy(draws[:2]).to(self.device)
        hidden_BLH = self.hidden(ids_BL)
        reset_ropes(self._dynamic_ropes)
        model_logits_BLV = self.model(input_ids=ids_BL, use_cache=False).logits.to(self.work)
        difference = float(
            (model_logits_BLV - self.logits(hidden_BLH.flatten(0, 1)).view_as(model_logits_BLV)).abs().max()
        )
        allowed = tolerance * max(float(model_logits_BLV.std()), 1e-6)
        if not difference <= allowed:
            fault = (
                f"head(hidden) differs from the model's logits by {difference:.3g}, expected at most {allowed:.3g}; "
                "its output head is not linear + scale + soft cap"
            )
        changed_ids_BL = ids_BL.clone()
        changed_ids_BL[:, first:] = torch.from_numpy(draws[2, first:])
        before, after = hidden_BLH[:, :first].to(self.work), self.hidden(changed_ids_BL)[:, :first].to(self.work)
        change = float(torch.cat([after - before, before[:1] - before[1:]]).abs().max())
        allowed = tolerance * max(float(before.std()), 1e-6)
        if not change <= allowed and not fault:
            config = vars(self.model.config)
            encoder_fields = [f"{field}: false" for field in ("is_decoder", "causal") if config.get(field) is False]
            hint = f" (its config has {encoder_fields[0]}, set it to true for a decoder)" if encoder_fields else ""
            fault = (
                f"hidden states changed by {change:.3g} with later tokens or padding, expected at most "
                f"{allowed:.3g}; it is not a causal LM{hint}"
            )
        if "lsh" in (getattr(self.model.config, "attn_layers", None) or ()):
            # The rows above may be too short to reveal this: within one chunk nothing is sorted.
            fault = "its LSH attention sorts all tokens of a row into chunks; it is not a causal LM"
        if fault:
            raise ModelError(f"{type(self.model).__name__}: {fault}, so GRASP cannot read it")

    def fingerprint(self) -> str:
        """Return a blake2b hash of the loaded weights and the logit link."""
        return weights_fingerprint(self.model, repr((self.head.scale, self.head.cap)).encode())


def run_body(model: nn.Module, head: OutputHead, ids_BL: Tensor, **inputs: Tensor) -> Tensor:
    """Run a model up to its output layer, and return the layer's input, (B, L, H), with its autograd graph.

    Raises:
        ModelError: the input of the layer is not one state per token.
    """
    head_inputs: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        head_inputs.append(next(iter((*args, *kwargs.values()))))
        raise _HeadReachedError

    handle = head.linear.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=ids_BL, use_cache=False, **inputs)
    except _HeadReachedError:
        pass
    finally:
        handle.remove()
    (hidden_BLH,) = head_inputs
    hidden_size = head.linear.get_parameter("weight").shape[1]
    if hidden_BLH.shape != (*ids_BL.shape, hidden_size):
        raise ModelError(
            f"{type(model).__name__}: its output layer receives {tuple(hidden_BLH.shape)} for "
            f"{tuple(ids_BL.shape)} tokens, expected one state of {hidden_size} numbers per token"
        )
    return hidden_BLH


def context_of(config: Any) -> int | None:
    """Return the context length of a configuration; None: it does not define one."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


def tokenizer_and_context(settings: ModelSettings) -> tuple[HfTokenizer, int | None]:
    """Load the tokenizer of a model, and its context length, without its weights."""
    config, loaded = text_config_of(settings), tokenizer_of(settings)
    vocab_size = getattr(config, "vocab_size", None) or len(loaded)
    return HfTokenizer.from_settings(loaded, settings, vocab_size), context_of(config)


def weights_fingerprint(model: nn.Module, prefix: bytes) -> str:
    """Return a blake2b hash of `prefix` and of the loaded weights.

    Args:
        model: model with these weights.
        prefix: anything else that determines the output of the model.
    """
    digest = hashlib.blake2b(prefix, digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def restored_modes(model: Any) -> Iterator[None]:
    """Restore training modes and `requires_grad` of a model that was passed as an object, after the `with` block."""
    model = model[0] if isinstance(model, tuple | list) and model else model
    module = model if isinstance(model, nn.Module) else nn.Module()  # a path has no modes to restore
    state: list[tuple[Any, str, bool]] = [(child, "training", child.training) for child in module.modules()]
    state += [(parameter, "requires_grad", parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for owner, name, value in state:
            setattr(owner, name, value)


def pad_rows(rows: Sequence[I32], labels: Sequence[int | Bool | None] | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids (B, L), padded on the right with 0, and a mask of the tokens that carry loss, (B, L).

    Args:
        rows: token ids of each row.
        labels: per row, the position of the first token that carries loss, or a mask of these tokens; None: 1.
    """
    ids_BL = np.zeros((len(rows), max((len(row) for row in rows), default=1)), dtype=np.int64)
    loss_mask_BL = np.zeros(ids_BL.shape, dtype=np.bool_)
    for b, (row, row_labels) in enumerate(zip(rows, labels or [None] * len(rows), strict=True)):
        ids_BL[b, : len(row)] = row
        if isinstance(row_labels, np.ndarray):
            loss_mask_BL[b, : len(row)] = row_labels
        else:
            loss_mask_BL[b, row_labels or 1 : len(row)] = True
    return torch.from_numpy(ids_BL), torch.from_numpy(loss_mask_BL)


def batches(length_N: I64, batch_tokens: int, class_N: I64 | None = None) -> list[I64]:
    """Group rows of similar length into batches of at most `batch_tokens` tokens, including padding.

    The result depends on the lengths only. The longest rows come first, so that padding is small and peak memory is
    reached in the first batch. A row longer than `batch_tokens` is a batch of its own. A batch has at most `BATCH_ROWS`
    rows, all of the same class (see `length_class`).

    Args:
        length_N: tokens of each row.
        batch_tokens: maximum number of tokens of a batch.
        class_N: class of each row; None: there is one class.
    """
    order = np.argsort(-length_N, kind="stable")
    batches_of_rows: list[I64] = []
    start = 0
    while start < len(order):
        rows = min(BATCH_ROWS, max(1, batch_tokens // max(1, int(length_N[order[start]]))))
        batch = order[start : start + rows]
        if class_N is not None:
            batch = batch[class_N[batch] == class_N[batch[0]]]  # classes are sorted like lengths
        batches_of_rows.append(batch)
        start += len(batch)
    return batches_of_rows


def length_class(config: Any, length_N: I64) -> I64 | None:
    """Return the class of each row; rows of different classes must not share a batch. None: there is one class.

    transformers computes rotary embeddings for the longest row of a batch. With longrope, a row longer than the
    original context changes the frequencies of all positions; with dynamic scaling, every length beyond the context has
    different frequencies. The class does not decrease with the length.
    """
    beyond_N, exact_N = np.zeros_like(length_N), np.zeros_like(length_N)
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    context = getattr(text, "max_position_embeddings", None)
    for group in (parameters, *parameters.values()):  # for all layers, or by layer type
        if isinstance(group, dict):
            rope_type = str(group.get("rope_type", group.get("type")))
            original = group.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", context
            )
            if rope_type == "longrope" and original:
                beyond_N += length_N > int(original)
            elif "dynamic" in rope_type and context:
                exact_N = np.maximum(exact_N, np.where(length_N > int(context), length_N, 0))
    class_N = beyond_N + exact_N * (int(beyond_N.max(initial=0)) + 1)
    return class_N if class_N.any() else None


def dynamic_ropes(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that cache the frequencies of the longest row so far."""
    return tuple(module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", "")))


def reset_ropes(modules: Iterable[nn.Module]) -> None:
    """Reset rotary embeddings to their initial state."""
    for module in modules:
        for name, frequencies in list(module.named_buffers(recurse=False)):
            prefix, match, _ = name.partition("original_inv_freq")
            if match:
                module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
