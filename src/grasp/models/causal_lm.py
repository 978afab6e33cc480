"""A Hugging Face causal LM as a reference model: hidden states as the head sees them, the head where asked.

Shape letters: B rows of a batch, L tokens, P positions, H hidden width, V vocabulary.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from grasp.corpus.sources import IN_MEMORY
from grasp.errors import ModelError
from grasp.extras import require
from grasp.models.head import head_shape, output_head
from grasp.models.tokenizer import HfTokenizer
from grasp.settings import ModelSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WEIGHTS = (".pth", ".pt", ".bin", ".safetensors")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
MERGED = ("LORA", "LOHA", "LOKR", "IA3")  # adapters of peft that weights can take in
UNLOADABLE = (
    *(OSError, ValueError, LookupError, ImportError, RuntimeError, SafetensorError, UnpicklingError),
    # fields of config.json that cannot be meant: of another type, zero, negative
    *(StrictDataclassError, TypeError, AttributeError, ArithmeticError, AssertionError),
)
WIDTHS = ("hidden_size", "n_embd", "d_model")
POSITIONS = ("max_position_embeddings", "n_positions")
FREE_POSITIONS = 1 << 28  # positions x width that hurt nobody: some types only name the context
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

# Largest |head(hidden) - logits| the load check lets pass, in units of the logits' standard deviation.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class ReferenceModel:
    """Frozen causal LM that gives hidden states and output head at chosen positions."""

    def __init__(self, model: nn.Module, tokenizer: HfTokenizer, *, batch_tokens: int = 8192) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.head = output_head(model)
        self.body = _body(model)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size, self.hidden_size = head_shape(self.head.linear)

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
        model, tokenizer = _from_pretrained(settings, dtype)
        return cls.of(model.to(device), tokenizer, settings)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, settings: ModelSettings) -> Self:
        """A model of transformers and its tokenizer that are loaded; checked as `load` does.

        Raises:
            ModelError: as `load`; weights of a type that is not read.
        """
        dtype_name(next(model.parameters()).dtype)
        vocab_size, _ = head_shape(output_head(model).linear)
        reference = cls(model, HfTokenizer(tokenizer, vocab_size=vocab_size), batch_tokens=settings.batch_tokens)
        if len(tokenizer) > vocab_size:
            raise ModelError(
                f"{settings.tokenizer or settings.path}: the tokenizer has {len(tokenizer)} tokens, the model's head "
                f"{vocab_size}; they do not belong together: pass the model's own tokenizer"
            )
        if settings.check:
            try:
                reference.check_head()
                reference.check_causal()
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
        context = getattr(self.model.config, "max_position_embeddings", None)
        return context if isinstance(context, int) else None

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
    def check_head(self) -> None:
        """Compare head(hidden) with the model's own logits on two short rows.

        Raises:
            ModelError: they differ by more than rounding; the model does something after its last hidden state
                that is not a linear head, a scale or a soft cap.
        """
        ids_BL = torch.arange(2 * 6, device=self.device).reshape(2, 6) % self.vocab_size
        own = self.model(input_ids=ids_BL, use_cache=False).logits.float()
        ours = self.logits(self.hidden(ids_BL).reshape(12, -1)).reshape(own.shape)
        spread = float(own.std())
        worst = float((own - ours).abs().max())
        allowed = HEAD_TOLERANCE[self.dtype] * max(spread, 1e-6)
        if not worst <= allowed:
            raise ModelError(
                f"{type(self.model).__name__}: head(hidden) differs from the model's logits by {worst:.3g}, expected "
                f"at most {allowed:.3g}; its output head is not linear + scale + soft cap, so GRASP cannot read it"
            )

    @torch.inference_mode()
    def check_causal(self) -> None:
        """Change the last token of two short rows; every hidden state before it must stay.

        Raises:
            ModelError: one changed by more than rounding; its losses would know the token that they predict, and a
                row's features would depend on the padding beside it.
        """
        ids_BL = torch.arange(2 * 6, device=self.device).reshape(2, 6) % self.vocab_size
        other_BL = ids_BL.clone()
        other_BL[:, -1] = (other_BL[:, -1] + 1) % self.vocab_size
        before = self.hidden(ids_BL)[:, :-1].float()
        change = float((self.hidden(other_BL)[:, :-1].float() - before).abs().max())
        allowed = HEAD_TOLERANCE[self.dtype] * max(float(before.std()), 1e-6)
        if not change <= allowed:
            raise ModelError(
                f"{type(self.model).__name__}: hidden states changed by {change:.3g} with a token that comes after "
                f"them, expected at most {allowed:.3g}; it is not a causal LM, so GRASP cannot read it"
            )

    def fingerprint(self) -> str:
        """blake2b over the weights as loaded and the logit link."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.head.scale, self.head.cap)).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def device_of(name: str) -> torch.device:
    """The device that a setting names.

    Raises:
        ModelError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ModelError(f"model.device: got `{name}`, expected auto, cpu, cuda or cuda:N") from err
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model.device: got `{name}`, but torch sees {torch.cuda.device_count()} CUDA devices; use `cpu` or `auto`"
        )
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The number format that a setting names."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What the settings call a number format.

    Raises:
        ModelError: one that they do not know.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ModelError(f"model: its weights are {dtype}, expected {', '.join(DTYPES)}; convert it, e.g. model.float()")


def load_tokenizer(settings: ModelSettings, vocab_size: int) -> HfTokenizer:
    """The tokenizer of a reference model, without its weights.

    Args:
        vocab_size: ids of the model's vocabulary, which is often padded beyond the tokenizer's.
    Raises:
        ModelError: nothing there, or nothing that transformers can load.
    """
    return HfTokenizer(_hf_tokenizer(settings), vocab_size=vocab_size)


def _from_pretrained(settings: ModelSettings, dtype: torch.dtype) -> tuple[Any, Any]:
    refuse_unreadable(settings.path)
    base = _base_of(settings.path)
    name = settings.path if base is None else base
    where = _checkpoint_at("model.path", name, settings)
    tokenizer = _hf_tokenizer(settings)
    model = load_weights(AutoModelForCausalLM, name, "is not a causal LM", where, dtype)
    return model if base is None else _adapted(model, settings.path), tokenizer


def _base_of(name: str) -> str | None:
    """The model that an adapter of peft belongs to; None: it is no adapter.

    Raises:
        ModelError: an adapter that cannot be folded into the weights of its model.
    """
    adapter = _json_of(Path(name) / "adapter_config.json")
    if not adapter:
        return None
    kind, base = adapter.get("peft_type"), adapter.get("base_model_name_or_path")
    if kind not in MERGED or not isinstance(base, str):
        raise ModelError(
            f"model.path: `{name}` is an adapter of type {kind} for {base}, expected {', '.join(MERGED)} for a model "
            "that is named"
        )
    refuse_unreadable(base)
    return base


def _adapted(model: nn.Module, name: str) -> Any:
    """The model with an adapter folded into its weights."""
    peft = require("peft", extra="peft", feature=f"{name}, which is an adapter,")
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what the one library asks the other by old names
            return peft.PeftModel.from_pretrained(model, name).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError, UnpicklingError) as err:
        raise ModelError(
            f"model.path: `{name}` is an adapter that does not fit its model: {' '.join(str(err).split())[:300]}"
        ) from err


def _json_of(path: Path) -> dict[str, Any]:
    """A mapping in a file; nothing where there is none, whose loader says what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def refuse_unreadable(name: str) -> None:
    """What can be seen of a causal LM without loading it: a checkpoint of images would be told it has no tokenizer.

    Raises:
        ModelError: no checkpoint, one of images, or one of quantised weights.
    """
    _is_local("model.path", name)
    config = _json_of(Path(name) / "config.json")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"model.path: `{name}` has weights quantised by {method}, which are not read; name the original, or save "
            "what model.dequantize() gives"
        )
    kinds = config.get("architectures") or []
    if any(str(kind).endswith("ForImageClassification") for kind in kinds):
        raise ModelError(
            f"model.path: `{name}` is an image classifier ({kinds[0]}), not a causal LM; name its linear output layer, "
            "e.g. --set model.classifier.head=classifier"
        )


def load_checkpoint(kind: Any, settings: ModelSettings, what: str) -> Any:
    """The module of a Hugging Face checkpoint of another kind than a causal LM, whole, in float32.

    Args:
        kind: the class of transformers that loads it.
        what: of a checkpoint that it does not load, e.g. "is not an image classifier".
    Raises:
        ModelError: nothing there, another kind, or weights are missing.
    """
    return load_weights(kind, settings.path, what, _checkpoint_at("model.path", settings.path, settings), torch.float32)


def load_beside(kind: Any, settings: ModelSettings, what: str, **how: Any) -> Any:
    """What a checkpoint has beside its weights, e.g. an image processor.

    Args:
        kind, what: as in `load_checkpoint`.
        how: more arguments of the loader.
    Raises:
        ModelError: nothing there, or nothing that transformers can load.
    """
    with _quiet():
        return _loaded(kind, "model.path", what, **_checkpoint_at("model.path", settings.path, settings), **how)


def load_weights(kind: Any, name: str, what: str, where: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A module by `from_pretrained`, refused if any of its weights would be random."""
    how = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with _quiet():
        model, report = _loaded(kind, "model.path", what, **where, **how)
    _refuse_random_weights(name, model, report)
    return model.to(dtype)


def _checkpoint_at(field: str, name: str, settings: ModelSettings) -> dict[str, Any]:
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": name,
        "local_files_only": _is_local(field, name),  # a checkpoint on disk never asks a hub
        "trust_remote_code": settings.trust_remote_code,  # said either way, so that nobody is asked
    }
    path = Path(name)
    _refuse_endless(field, path)
    if path.suffix == ".gguf":
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", feature="a GGUF checkpoint")
        where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return where


def _refuse_endless(field: str, path: Path) -> None:
    """Refuse a config of sizes for which the weights beside it have no room: making such a model would not end."""
    config = _json_of(path / "config.json")
    # a weight has 4 bits or more
    room = 2 * sum(file.stat().st_size for file in path.glob("*") if file.suffix in (*WEIGHTS, ".gguf"))
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        widths = [part[name] for name in WIDTHS if isinstance(part.get(name), int)]
        for name, value in part.items():
            sized = name in ("vocab_size", "intermediate_size", "n_inner") or re.search(r"layers?$", name)
            least = room
            if name in POSITIONS and _learns_positions(part.get("model_type")):
                sized, least = True, max(room, FREE_POSITIONS)
            if sized and isinstance(value, int) and widths and value * max(widths) > least and room > 0:
                raise ModelError(
                    f"{field}: `{path}` has a config.json with {name} {value:,} and a width of {max(widths):,}, for "
                    "which its weights are too few; mend the config, or save the whole checkpoint again"
                )


def _learns_positions(kind: object) -> bool:
    """Whether a model of this type has a row of numbers for every position, and does not compute them."""
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    return not any(name.startswith("rope") for name in signature(CONFIG_MAPPING[kind]).parameters)


def _hf_tokenizer(settings: ModelSettings) -> Any:
    field, name = "model.path", settings.path
    if settings.tokenizer is not None:
        field, name = "model.tokenizer", settings.tokenizer
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        base = _base_of(name)
        if base is not None:
            return _hf_tokenizer(settings.model_copy(update={"path": base}))
        raise ModelError(
            f"{field}: `{name}` holds no tokenizer; name its directory with --tokenizer (model.tokenizer), or put it "
            "there with tokenizer.save_pretrained"
        )
    with _quiet():
        return _loaded(AutoTokenizer, field, "has no tokenizer", **_checkpoint_at(field, name, settings))


def _is_local(field: str, name: str) -> bool:
    """Whether it lies on disk; what is not there and cannot be the name of a repository either is refused."""
    if name.startswith(IN_MEMORY):
        raise ModelError(f"{field}: it was {name}: it is on no disk; pass it again, or save it and name its directory")
    path = Path(name)
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(
            f"{field}: `{name}` is a file; expected a directory, a GGUF file or the name of a repository"
            + ("; weights of an image classifier need model.classifier.factory" if path.suffix in WEIGHTS else "")
        )
    if path.exists():
        return True
    if path.suffix == ".gguf" or not REPOSITORY.fullmatch(name):
        raise ModelError(f"{field}: `{name}`: no such file or directory; expected a checkpoint")
    return False


def _loaded(kind: Any, field: str, what: str, **where: Any) -> Any:
    try:
        return kind.from_pretrained(**where)
    except UNLOADABLE as err:
        name = where["pretrained_model_name_or_path"]
        reason = " ".join(str(err).split())[:300]
        if "trust_remote_code" in str(err):
            raise ModelError(
                f"{field}: `{name}` brings Python code of its own, which is not run; read it, and if you trust it "
                "say --set model.trust_remote_code=true"
            ) from err
        if not where["local_files_only"]:
            raise ModelError(f"{field}: no `{name}` on this disk, and none can be had from a hub: {reason}") from err
        raise ModelError(f"{field}: `{name}` {what} that transformers can load: {reason}") from err


def _refuse_random_weights(name: str, model: nn.Module, report: Mapping[str, Any]) -> None:
    """transformers fills what it does not find with random numbers; as a reference that is no model at all."""
    random = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if random:
        raise ModelError(
            f"model.path: `{name}` lacks {len(random)} weights of its {type(model).__name__}, or has them in another "
            f"shape: {', '.join(random[:3])}; save the whole checkpoint again"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and reports of transformers: what matters in them is an error here."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _body(model: nn.Module) -> nn.Module:
    """The transformer without its head."""
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None) if prefix else None
    if not isinstance(body, nn.Module) or body is model:
        raise ModelError(
            f"{type(model).__name__}: no transformer body under `{prefix or 'base_model_prefix'}`; expected a Hugging "
            "Face causal LM"
        )
    return body


def pad_rows(
    rows: Sequence[NDArray[np.int32]], labels: Sequence[int | NDArray[np.bool_] | None] | None = None
) -> tuple[Tensor, Tensor]:
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


# Rows in one batch at most: bounds what grows with rows rather than tokens when rows are short.
BATCH_ROWS = 64


def batches(length_N: NDArray[np.int64], batch_tokens: int) -> list[NDArray[np.int64]]:
    """Cut rows into batches of at most `batch_tokens` padded tokens, alike in length; a pure function of lengths.

    Longest first, so that padding is small and memory peaks at once. A single row longer than `batch_tokens` is a
    batch of its own; no batch has more than `BATCH_ROWS` rows.
    """
    order = np.argsort(-length_N, kind="stable")
    out: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        rows = min(BATCH_ROWS, max(1, batch_tokens // max(1, int(length_N[order[start]]))))
        out.append(order[start : start + rows])
        start += rows
    return out
