"""What is loaded of a Hugging Face checkpoint, on disk or on a hub: the model, its tokenizer, what lies beside them.

Weights that transformers would fill with random numbers are refused, and so is a config that its weights cannot meet.
An adapter of peft is folded into the model that it names.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from grasp.corpus.sources import IN_MEMORY
from grasp.errors import ModelError
from grasp.extras import require
from grasp.hub import fetched_before, is_path, meant, refusal
from grasp.settings import ModelSettings, Train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAIN = "grasp_train"  # in a config: what is trained on the corpora that this model reads, if it says
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
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


def device_of(name: str) -> torch.device:
    """The device that a setting names."""
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
    """What the settings call a number format."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ModelError(f"model: its weights are {dtype}, expected {', '.join(DTYPES)}; convert it, e.g. model.float()")


def load_causal_lm(settings: ModelSettings, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal LM and its tokenizer, both of transformers, on the cpu."""
    refuse_unreadable(settings.path)
    base = _base_of(settings.path)
    tokenizer = tokenizer_of(settings)
    model = load_checkpoint(AutoModelForCausalLM, settings, "is not a causal LM", dtype, base)
    return model if base is None else _adapted(model, settings), tokenizer


def load_checkpoint(
    kind: Any, settings: ModelSettings, what: str, dtype: torch.dtype = torch.float32, name: str | None = None
) -> Any:
    """The module of a Hugging Face checkpoint, whole; refused if any of its weights would be random.

    Args:
        kind: the class of transformers that loads it.
        what: of a checkpoint that it does not load, e.g. "is not an image classifier".
        name: another place than that of the settings.
    """
    name = settings.path if name is None else name
    where = _source("model.path", name, settings)
    _refuse_endless(Path(where["pretrained_model_name_or_path"], where.get("gguf_file", "")))
    how = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = _loaded(kind, "model.path", what, where, **how)
    # transformers fills what it does not find with random numbers; as a reference that is no model at all
    random = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if random:
        raise ModelError(
            f"model.path: `{name}` lacks {len(random)} weights of its {type(model).__name__}, or has them in another "
            f"shape: {', '.join(random[:3])}; save the whole checkpoint again"
        )
    return model


def load_beside(kind: Any, settings: ModelSettings, what: str, **how: Any) -> Any:
    """What a checkpoint has beside its weights, e.g. an image processor."""
    return _loaded(kind, "model.path", what, _source("model.path", settings.path, settings), **how)


def refuse_unreadable(name: str) -> None:
    """What can be seen of a causal LM without loading it: a checkpoint of images would be told it has no tokenizer."""
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
    _refuse_endless(Path(name))


def said_train(settings: ModelSettings, model: nn.Module | None = None) -> Train | None:
    """What a checkpoint, or a model that is loaded, says is trained on the corpora that it reads; None: nothing.

    The references of `grasp retrain` say `new`.
    """
    if model is None:
        said = _json_of(Path(settings.path) / "config.json").get(TRAIN)
    else:
        said = getattr(model.config, TRAIN, None)
    return next((known for known in get_args(Train) if known == said), None)


def text_config_of(settings: ModelSettings) -> Any:
    """Return the configuration of a causal LM's text model, without loading its weights."""
    name = _base_of(settings.path) or settings.path
    config = _loaded(AutoConfig, "model.path", "has no configuration", _source("model.path", name, settings))
    config = config.get_text_config(decoder=True)
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int) and vocab_size < 1:
        raise ModelError(f"model.path: `{name}` has a config.json with vocab_size {vocab_size}; mend the config")
    return config


def tokenizer_of(settings: ModelSettings) -> Any:
    """The tokenizer of transformers that a model's settings name, without its weights."""
    if settings.tokenizer is None:
        return tokenizer_at("model.path", settings.path, settings)
    return tokenizer_at("model.tokenizer", settings.tokenizer, settings)


def tokenizer_at(field: str, name: str, settings: ModelSettings) -> Any:
    """A tokenizer of transformers by its place: a directory, a GGUF file, a repository, or an adapter of a model."""
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        base = _base_of(name)
        if base is not None:
            return tokenizer_at(field, base, settings)
        flag = " with --tokenizer (model.tokenizer)" if field.startswith("model.") else ""
        raise ModelError(
            f"{field}: `{name}` holds no tokenizer; name its directory{flag}, or put it there with "
            "tokenizer.save_pretrained"
        )
    return _loaded(AutoTokenizer, field, "has no tokenizer", _source(field, name, settings))


def _base_of(name: str) -> str | None:
    """The model that an adapter of peft belongs to; None: it is no adapter."""
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


def is_adapter(name: str) -> bool:
    """Whether a checkpoint is an adapter of peft, without reading the model that it is for."""
    return bool(_json_of(Path(name) / "adapter_config.json"))


def _adapted(model: nn.Module, settings: ModelSettings) -> Any:
    """The model with an adapter folded into its weights; or beside them, and then they alone are frozen."""
    name, apart = settings.path, settings.adapter == "apart"
    peft = require("peft", extra="peft", feature=f"{name}, which is an adapter,")
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what the one library asks the other by old names
            adapted = peft.PeftModel.from_pretrained(model, name, is_trainable=apart)
            return adapted.get_base_model() if apart else adapted.merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError, UnpicklingError) as err:
        raise ModelError(
            f"model.path: `{name}` is an adapter that does not fit its model: {' '.join(str(err).split())[:300]}"
        ) from err


def _loaded(kind: Any, field: str, what: str, where: Mapping[str, Any], **how: Any) -> Any:
    try:
        with _quiet():
            return kind.from_pretrained(**where, **how)
    except UNLOADABLE as err:
        name = where["pretrained_model_name_or_path"]
        reason = " ".join(str(err).split())[:300]
        if "trust_remote_code" in str(err):
            raise ModelError(
                f"{field}: `{name}` brings Python code of its own, which is not run; read it, and if you trust it "
                "say --set model.trust_remote_code=true"
            ) from err
        if not Path(name).exists() and "gguf_file" not in where:
            raise ModelError(
                f"{field}: no `{name}` on this disk{meant(name)}, and none can be had from a hub: {reason}"
            ) from err
        raise ModelError(f"{field}: `{name}` {what} that transformers can load: {reason}") from err


def _source(field: str, name: str, settings: ModelSettings) -> dict[str, Any]:
    """Where a checkpoint is and whether its code may run: arguments of `from_pretrained`."""
    is_local = _is_local(field, name)
    if not is_local and (why := refusal()):  # a library would ask all the same, for a minute
        kept = fetched_before(name)
        if kept is None:
            raise ModelError(f"{field}: no `{name}` on this disk{meant(name)}, and none can be had from a hub: {why}")
        name, is_local = kept, True
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": name,
        "local_files_only": is_local,  # a checkpoint on disk never asks a hub
        "trust_remote_code": settings.trust_remote_code,  # said either way, so that nobody is asked
    }
    path = Path(name)
    if path.suffix == ".gguf":
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", feature="a GGUF checkpoint")
        where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return where


def _is_local(field: str, name: str) -> bool:
    """Whether it lies on disk; what is not there and cannot be the name of a repository either is refused."""
    if name.startswith(IN_MEMORY):
        raise ModelError(f"{field}: it was {name}: it is on no disk; pass it again, or save it and name its directory")
    path = Path(name)
    if os.path.lexists(path) and not path.exists():
        raise ModelError(f"{field}: `{name}` is a symbolic link that leads nowhere, or in a circle; repair it")
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(
            f"{field}: `{name}` is a file; expected a directory, a GGUF file or the name of a repository"
            + "; weights of an image classifier need model.classifier.factory" * (path.suffix in WEIGHT_SUFFIXES)
        )
    if path.exists():
        return True
    if path.suffix == ".gguf" or not REPOSITORY.fullmatch(name) or is_path(name):
        raise ModelError(f"{field}: `{name}`: no such file or directory{meant(name)}; expected a checkpoint")
    return False


def _refuse_endless(path: Path) -> None:
    """Refuse a config of sizes for which the weights beside it have no room: making such a model would not end."""
    config = _json_of(path / "config.json")
    # a weight has 4 bits or more
    room = 2 * sum(file.stat().st_size for file in path.glob("*") if file.suffix in (*WEIGHT_SUFFIXES, ".gguf"))
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        widths = [part[width] for width in WIDTHS if isinstance(part.get(width), int)]
        kind = part.get("model_type")
        # a type that learns positions has a row of numbers for each, and does not compute them
        is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
        learns_positions = is_known and not any(
            argument.startswith("rope") for argument in signature(CONFIG_MAPPING[kind]).parameters
        )
        for size, value in part.items():
            sized = size in ("vocab_size", "intermediate_size", "n_inner") or re.search(r"layers?$", size)
            least = room
            if size in POSITIONS and learns_positions:
                sized, least = True, max(room, FREE_POSITIONS)
            if sized and isinstance(value, int) and widths and value * max(widths) > least and room > 0:
                raise ModelError(
                    f"model.path: `{path}` has a config.json with {size} {value:,} and a width of {max(widths):,}, for "
                    "which its weights are too few; mend the config, or save the whole checkpoint again"
                )


def _json_of(path: Path) -> dict[str, Any]:
    """A mapping in a file; nothing where there is none, whose loader says what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


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
