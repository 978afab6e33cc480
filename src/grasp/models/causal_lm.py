"""A Hugging Face causal LM as a reference model: hidden states as the head sees them, the head where asked.

Shape letters: B rows of a batch, L tokens, P positions, H hidden width, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from grasp.arrays import I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.checkpoint import device_of, dtype_name, dtype_of, load_causal_lm
from grasp.models.head import output_head
from grasp.models.tokenizer import HfTokenizer
from grasp.settings import ModelSettings

# Largest |head(hidden) - logits| the load check lets pass, in units of the logits' standard deviation.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Rows in one batch at most: bounds what grows with rows rather than tokens when rows are short.
BATCH_ROWS = 64


class ReferenceModel:
    """Frozen causal LM that gives hidden states and output head at chosen positions."""

    def __init__(self, model: nn.Module, tokenizer: HfTokenizer, *, batch_tokens: int = 8192) -> None:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        everything = sum(1 for _ in model.parameters())
        self.frozen = tuple(frozen) if len(frozen) < everything else ()  # as given; all: it was only made to be read
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.head = output_head(model)
        prefix = getattr(model, "base_model_prefix", "")
        body = getattr(model, prefix, None) if prefix else None
        if not isinstance(body, nn.Module) or body is model:
            raise ModelError(
                f"{type(model).__name__}: no transformer body under `{prefix or 'base_model_prefix'}`; expected a "
                "Hugging Face causal LM"
            )
        self.body = body
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size, self.hidden_size = self.head.linear.get_parameter("weight").shape

    @classmethod
    def load(cls, settings: ModelSettings) -> Self:
        """Load checkpoint and tokenizer; prove that head(hidden) equals the model's logits and that no position
        sees a later one.

        Raises:
            ModelError: nothing there; tokenizer and model do not match; the head is not where we look for it; the
                model is not causal.
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
        dtype_name(next(model.parameters()).dtype)
        vocab_size = len(output_head(model).linear.get_parameter("weight"))
        reference = cls(
            model, HfTokenizer.from_settings(tokenizer, settings, vocab_size), batch_tokens=settings.batch_tokens
        )
        if len(tokenizer) > vocab_size:
            raise ModelError(
                f"{settings.tokenizer or settings.path}: the tokenizer has {len(tokenizer)} tokens, the model's head "
                f"{vocab_size}; they do not belong together: pass the model's own tokenizer"
            )
        if settings.check:
            try:
                reference.check()
            except (RuntimeError, ValueError, LookupError) as err:  # sizes of a config that do not go together
                reason = " ".join(str(err).split())[:300]
                raise ModelError(f"{settings.path}: the model cannot read two rows of 6 tokens: {reason}") from err
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
    def context(self) -> int | None:
        """Positions that the model knows; none: it does not say."""
        return context_of(self.model.config)

    @torch.inference_mode()
    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Hidden states as the head sees them, (B, L, H), model dtype.

        Rows are padded on the right; under causal attention padding cannot reach a real position, so no mask
        is passed and the fast causal kernels stay in use.
        """
        output = self.body(input_ids=ids_BL.to(self.device), use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits as the softmax sees them, (P, V), float32."""
        return self.head.link(self.head.linear_logits(hidden_PH.to(self.dtype)).float())

    @torch.inference_mode()
    def check(self) -> None:
        """Compare head(hidden) with the model's own logits on two short rows; then change the last token of each, at
        which every hidden state before it must stay.

        Raises:
            ModelError: the logits differ by more than rounding: the model does something after its last hidden state
                that is not a linear head, a scale or a soft cap. Or a state changed: its losses would know the token
                that they predict, and a row's features would depend on the padding beside it.
        """
        name, tolerance = type(self.model).__name__, HEAD_TOLERANCE[self.dtype]
        ids_BL = torch.arange(2 * 6, device=self.device).reshape(2, 6) % self.vocab_size
        hidden_BLH = self.hidden(ids_BL)
        own = self.model(input_ids=ids_BL, use_cache=False).logits.float()
        worst = float((own - self.logits(hidden_BLH.flatten(0, 1)).view_as(own)).abs().max())
        allowed = tolerance * max(float(own.std()), 1e-6)
        if not worst <= allowed:
            raise ModelError(
                f"{name}: head(hidden) differs from the model's logits by {worst:.3g}, expected at most {allowed:.3g}; "
                "its output head is not linear + scale + soft cap, so GRASP cannot read it"
            )
        ids_BL[:, -1] = (ids_BL[:, -1] + 1) % self.vocab_size
        before = hidden_BLH[:, :-1].float()
        change = float((self.hidden(ids_BL)[:, :-1].float() - before).abs().max())
        allowed = tolerance * max(float(before.std()), 1e-6)
        if not change <= allowed:
            raise ModelError(
                f"{name}: hidden states changed by {change:.3g} with a token that comes after them, expected at most "
                f"{allowed:.3g}; it is not a causal LM, so GRASP cannot read it"
            )

    def fingerprint(self) -> str:
        """blake2b over the weights as loaded and the logit link."""
        return weights_fingerprint(self.model, repr((self.head.scale, self.head.cap)).encode())


def context_of(config: Any) -> int | None:
    """Return how many positions a model knows, by its configuration; None: it does not say."""
    context = getattr(config, "max_position_embeddings", None)
    return context if isinstance(context, int) else None


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


def batches(length_N: I64, batch_tokens: int) -> list[I64]:
    """Cut rows into batches of at most `batch_tokens` padded tokens, alike in length; a pure function of lengths.

    Longest first, so that padding is small and memory peaks at once. A single row longer than `batch_tokens` is a
    batch of its own; no batch has more than `BATCH_ROWS` rows.
    """
    order = np.argsort(-length_N, kind="stable")
    out: list[I64] = []
    start = 0
    while start < len(order):
        rows = min(BATCH_ROWS, max(1, batch_tokens // max(1, int(length_N[order[start]]))))
        out.append(order[start : start + rows])
        start += rows
    return out
