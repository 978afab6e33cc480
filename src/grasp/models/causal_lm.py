"""A Hugging Face causal LM as a reference model: hidden states as the head sees them, the head where asked.

Shape letters: B rows of a batch, L tokens, P positions, H hidden width, V vocabulary.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from grasp.arrays import I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.checkpoint import device_of, dtype_name, dtype_of, load_causal_lm
from grasp.models.head import TOLERANCE, output_head
from grasp.models.tokenizer import HfTokenizer
from grasp.settings import ModelSettings

CHECKED_TOKENS = 32  # of the two rows that the load check reads
# Rows in one batch at most: bounds what grows with rows rather than tokens when rows are short.
BATCH_ROWS = 64


class _HeadReachedError(Exception):
    """The forward pass has come to the output layer."""


class ReferenceModel:
    """Frozen causal LM that gives hidden states and output head at chosen positions."""

    def __init__(self, model: nn.Module, tokenizer: HfTokenizer, *, batch_tokens: int = 8192) -> None:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        everything = sum(1 for _ in model.parameters())
        self.frozen = tuple(frozen) if len(frozen) < everything else ()  # as given; all: it was only made to be read
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.head = output_head(self.model)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.work = torch.promote_types(self.dtype, torch.float32)  # in which logits become probabilities
        rows, self.hidden_size = self.head.linear.get_parameter("weight").shape
        self.vocab_size = self.head.classes or rows
        self._dynamic_ropes = dynamic_ropes(model)

    @classmethod
    def load(cls, settings: ModelSettings) -> Self:
        """Load checkpoint and tokenizer; prove that head(hidden) equals the model's logits and that no position
        sees a later one.

        Raises:
            ModelError: nothing there; the output head is of a kind that is not read; the model is not causal, or needs
                other inputs than token ids.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device)
        dtype = dtype_of(settings.dtype, device)
        model, tokenizer = load_causal_lm(settings, dtype)
        return cls.from_model(model.to(device), tokenizer, settings)

    @classmethod
    def from_model(cls, model: nn.Module, tokenizer: Any, settings: ModelSettings) -> Self:
        """A model of transformers and its tokenizer that are loaded; checked as `load` does.

        Raises:
            ModelError: as `load`; weights of a type that is not read.
        """
        dtype = dtype_name(next(model.parameters()).dtype)
        reader = HfTokenizer.from_settings(tokenizer, settings, len(tokenizer))
        try:
            reference = cls(model, reader, batch_tokens=settings.batch_tokens)
            if settings.check:
                reference.check()
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as err:
            # sizes of a config that do not go together, or a model that needs more than token ids
            reason = " ".join(str(err).split())[:300]
            raise ModelError(
                f"{settings.path}: {type(model).__name__} in {dtype} fails on rows of token ids alone: {reason}"
            ) from err
        reader.vocab_size = reference.vocab_size
        return reference

    @property
    def batching(self) -> dict[str, Any]:
        """What of a forward pass may move the last digits of the numbers."""
        return {"batch_tokens": self.batch_tokens}

    @property
    def reader(self) -> tuple[str, str]:
        """What turns text into the model's input, and its fingerprint."""
        return "tokenizer", self.tokenizer.fingerprint

    @property
    def body(self) -> nn.Module:
        """The part that transformers calls the base model; the whole model if it names none."""
        body: nn.Module = getattr(self.model, "base_model", self.model)
        return body

    @property
    def context(self) -> int | None:
        """Positions that the model knows; none: it does not say."""
        context = context_of(self.model.config)
        if context is None:
            return None
        for name, module in self.model.named_modules():
            # a table of positions that begins after its padding, as RoBERTa's does
            if isinstance(module, nn.Embedding) and module.num_embeddings == context and "position" in name:
                return context if module.padding_idx is None else context - module.padding_idx - 1
        return context

    @torch.inference_mode()
    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Hidden states as the head sees them, (B, L, H), model dtype.

        Rows are padded on the right; under causal attention padding cannot reach a real position, so no mask
        is passed and the fast causal kernels stay in use.
        """
        return self.run_body(ids_BL.to(self.device))

    def run_body(self, ids_BL: Tensor, **inputs: Tensor) -> Tensor:
        """What the output layer receives, (B, L, H), with its graph where gradients are on; the layer is not applied.

        Raises:
            ModelError: the layer receives something else than one state a token.
        """
        reset_ropes(self._dynamic_ropes)

        received: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            received.append(next(iter((*args, *kwargs.values()))))
            raise _HeadReachedError

        handle = self.head.linear.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(input_ids=ids_BL, use_cache=False, **inputs)
        except _HeadReachedError:
            pass
        finally:
            handle.remove()
        (hidden_BLH,) = received
        if hidden_BLH.shape != (*ids_BL.shape, self.hidden_size):
            raise ModelError(
                f"{type(self.model).__name__}: its output layer receives {tuple(hidden_BLH.shape)} for "
                f"{tuple(ids_BL.shape)} tokens, expected one state of {self.hidden_size} numbers a token"
            )
        return hidden_BLH

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits as the softmax sees them, (P, V), float32 (float64 of a model in float64)."""
        dtype = self.head.linear.get_parameter("weight").dtype
        return self.head.link(self.head.linear_logits(hidden_PH.to(dtype)).to(self.work))

    def batches(self, length_N: I64, batch_tokens: int | None = None) -> list[I64]:
        """Rows that go through the model together; see `batches`."""
        return batches(length_N, batch_tokens or self.batch_tokens, length_class(self.model.config, length_N))

    @torch.inference_mode()
    def check(self) -> None:
        """Compare head(hidden) with the model's own logits on two rows, of which one is padded; then change what
        comes after the first tokens of each, at which every hidden state must stay.

        Raises:
            ModelError: the logits differ by more than rounding: the model does something after its last hidden state
                that is not a linear head, a scale or a soft cap. Or a state changed: its losses would know the token
                that they predict, and a row's features would depend on the padding beside it.
        """
        name, tolerance = type(self.model).__name__, TOLERANCE[self.dtype]
        if "lsh" in (getattr(self.model.config, "attn_layers", None) or ()):
            # rows as short as those below may fit in one chunk, in which nothing is sorted
            raise ModelError(
                f"{name}: its LSH attention sorts all tokens of a row into chunks, so that states depend on later "
                "tokens; it is not a causal LM, so GRASP cannot read it"
            )
        length = min(CHECKED_TOKENS, self.context or CHECKED_TOKENS)
        first = length // 2
        draws = np.random.default_rng(0).integers(self.vocab_size, size=(3, length))
        draws[1] = np.where(np.arange(length) < first, draws[0], 0)  # the first tokens of the other row, and padding
        ids_BL = torch.from_numpy(draws[:2]).to(self.device)
        hidden_BLH = self.hidden(ids_BL)
        reset_ropes(self._dynamic_ropes)
        own = self.model(input_ids=ids_BL, use_cache=False).logits.to(self.work)
        worst = float((own - self.logits(hidden_BLH.flatten(0, 1)).view_as(own)).abs().max())
        allowed = tolerance * max(float(own.std()), 1e-6)
        if not worst <= allowed:
            raise ModelError(
                f"{name}: head(hidden) differs from the model's logits by {worst:.3g}, expected at most {allowed:.3g}; "
                "its output head is not linear + scale + soft cap, so GRASP cannot read it"
            )
        after_BL = ids_BL.clone()
        after_BL[:, first:] = torch.from_numpy(draws[2, first:])
        before, after = hidden_BLH[:, :first].to(self.work), self.hidden(after_BL)[:, :first].to(self.work)
        change = float(torch.cat([after - before, before[:1] - before[1:]]).abs().max())
        allowed = tolerance * max(float(before.std()), 1e-6)
        if not change <= allowed:
            config = vars(self.model.config)
            encoder = [f"{field}: false" for field in ("is_decoder", "causal") if config.get(field) is False]
            hint = f"; its config has {encoder[0]}, set it to true for a decoder" if encoder else ""
            raise ModelError(
                f"{name}: hidden states changed by {change:.3g} with tokens or padding that come after them, expected "
                f"at most {allowed:.3g}; it is not a causal LM, so GRASP cannot read it{hint}"
            )

    def fingerprint(self) -> str:
        """blake2b over the weights as loaded and the logit link."""
        return weights_fingerprint(self.model, repr((self.head.scale, self.head.cap)).encode())


def context_of(config: Any) -> int | None:
    """Return how many positions a model knows, by its configuration; None: it does not say."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


def weights_fingerprint(model: nn.Module, beside: bytes) -> str:
    """blake2b over what else decides a model's output, and over its weights as loaded."""
    digest = hashlib.blake2b(beside, digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pad_rows(rows: Sequence[I32], labels: Sequence[int | Bool | None] | None = None) -> tuple[Tensor, Tensor]:
    """Token ids (B, L), padded on the right with 0, and which of them carry loss, (B, L).

    Args:
        labels: of each row the first token that carries loss, as all after it do, or a mask; None: 1.
    """
    ids_BL = np.zeros((len(rows), max((len(row) for row in rows), default=1)), dtype=np.int64)
    labelled_BL = np.zeros(ids_BL.shape, dtype=np.bool_)
    for b, (row, own) in enumerate(zip(rows, labels or [None] * len(rows), strict=True)):
        ids_BL[b, : len(row)] = row
        if isinstance(own, np.ndarray):
            labelled_BL[b, : len(row)] = own
        else:
            labelled_BL[b, own or 1 : len(row)] = True
    return torch.from_numpy(ids_BL), torch.from_numpy(labelled_BL)


def batches(length_N: I64, batch_tokens: int, class_N: I64 | None = None) -> list[I64]:
    """Cut rows into batches of at most `batch_tokens` padded tokens, alike in length; a pure function of lengths.

    Longest first, so that padding is small and memory peaks at once. A single row longer than `batch_tokens` is a
    batch of its own; no batch has more than `BATCH_ROWS` rows, or rows of two classes (see `length_class`).
    """
    order = np.argsort(-length_N, kind="stable")
    out: list[I64] = []
    start = 0
    while start < len(order):
        rows = min(BATCH_ROWS, max(1, batch_tokens // max(1, int(length_N[order[start]]))))
        some = order[start : start + rows]
        if class_N is not None:
            some = some[class_N[some] == class_N[some[0]]]  # classes fall with lengths
        out.append(some)
        start += len(some)
    return out


# ------------------------------------------------------------------------------------------------- rotary embeddings


def length_class(config: Any, length_N: I64) -> I64 | None:
    """Classes of rows that must not share a batch, since their rotary embeddings differ; None: there is only one.

    transformers computes the embeddings of a batch for its longest row. With longrope a row beyond the original context
    changes the frequencies of all positions; with dynamic scaling each length beyond the context has its own.
    The class never falls as rows get longer.
    """
    beyond_N, exact_N = np.zeros_like(length_N), np.zeros_like(length_N)
    for kind, border in _rope_borders(config):
        if kind == "longrope":
            beyond_N += length_N > border
        else:
            exact_N = np.maximum(exact_N, np.where(length_N > border, length_N, 0))
    class_N = beyond_N + exact_N * (int(beyond_N.max(initial=0)) + 1)
    return class_N if class_N.any() else None


def _rope_borders(config: Any) -> Iterator[tuple[str, int]]:
    """Rotary embeddings that depend on the length of a row: their type, and the length beyond which they do."""
    text = config.get_text_config(decoder=True)
    whole = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    context = getattr(text, "max_position_embeddings", None)
    for part in (whole, *whole.values()):  # of all layers, or by type of layer
        if isinstance(part, dict):
            kind = str(part.get("rope_type", part.get("type")))
            original = part.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", context
            )
            if kind == "longrope" and original:
                yield kind, int(original)
            elif "dynamic" in kind and context:
                yield kind, int(context)


def dynamic_ropes(model: nn.Module) -> tuple[nn.Module, ...]:
    """Modules of transformers that keep the frequencies of the longest row that they have seen."""
    return tuple(module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", "")))


def reset_ropes(modules: Iterable[nn.Module]) -> None:
    """Put rotary embeddings back to how they were before any row."""
    for module in modules:
        for name, frequencies in list(module.named_buffers(recurse=False)):
            prefix, found, _ = name.partition("original_inv_freq")
            if found:
                module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
