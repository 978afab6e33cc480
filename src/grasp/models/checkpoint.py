"""Load Hugging Face checkpoints from disk or from a hub: models, tokenizers, adapters.

A checkpoint is refused if transformers would initialise some of its weights randomly, or if its config needs more
weights than it has. A PEFT adapter is merged into its base model. Start with `load_causal_lm`.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from grasp.corpus.sources import IN_MEMORY
from grasp.errors import ModelError
from grasp.extras import require
from grasp.hub import fetched_before, is_path, refusal, suggest_path
from grasp.settings import ModelSettings, Train, model_readers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAIN_FIELD = "grasp_train"  # field of a config: the kind of training (`Train`) for which the model is a reference
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
# Whole embeddings and output layers in the weights of an adapter, by the names that transformers gives to them.
VOCABULARY_WEIGHT = re.compile(r"\.(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)\.([a-z_]+\.)*weight")
MERGEABLE_ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3")  # types of PEFT adapters that can be merged into weights
MERGE_HINT = "load it with peft as it was trained, and pass what merge_and_unload() and save_pretrained() give"
LOADING_ERRORS = (
    *(OSError, ValueError, LookupError, ImportError, RuntimeError, SafetensorError, UnpicklingError),
    # invalid fields of config.json: of a wrong type, zero or negative
    *(StrictDataclassError, TypeError, AttributeError, ArithmeticError, AssertionError),
)
WIDTHS = ("hidden_size", "n_embd", "d_model")
SIZES = re.compile(r"vocab_size|intermediate_size|n_inner|n_positions|max_position_embeddings|.*layers?")
FREE_POSITIONS = 1 << 28  # positions x width that are always allowed: many models have no table of positions
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def device_of(name: str) -> torch.device:
    """Return the torch device of a setting."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n_devices = torch.cuda.device_count()
    try:
        device = torch.device(name)
        if device.type != "cuda" or (device.index or 0) < n_devices:
            return device
    except RuntimeError:  # no name of a device
        pass
    raise ModelError(
        f"model.device: got `{name}`, expected auto, cpu, cuda or cuda:N; torch sees {n_devices} CUDA devices"
    )


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a setting."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in settings."""
    if dtype not in DTYPES.values():
        raise ModelError(
            f"model: its weights are {dtype}, expected {', '.join(DTYPES)}; convert it, e.g. model.float()"
        )
    return str(dtype).removeprefix("torch.")


def load_causal_lm(settings: ModelSettings, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer, both of transformers, on the CPU."""
    check_readable(settings.path)
    base = _adapter_base(settings.path)
    tokenizer = tokenizer_of(settings)
    model = load_checkpoint(AutoModelForCausalLM, settings, "is not a causal LM", dtype, base)
    return model if base is None else _load_adapter(model, settings), tokenizer


def load_checkpoint(
    auto_class: Any, settings: ModelSettings, problem: str, dtype: torch.dtype = torch.float32, name: str | None = None
) -> Any:
    """Load the module of a Hugging Face checkpoint with all of its weights.

    Args:
        auto_class: transformers class that loads it, e.g. `AutoModelForCausalLM`.
        settings: path of the checkpoint and options of the loader.
        problem: predicate for the error message, e.g. "is not a causal LM".
        dtype: dtype of the weights.
        name: path or repository. Default: that of the settings.
    Raises:
        ModelError: the checkpoint cannot be loaded, or lacks weights.
    """
    name = settings.path if name is None else name
    arguments = _load_arguments("model.path", name, settings)
    _check_weight_size(Path(arguments["pretrained_model_name_or_path"], arguments.get("gguf_file", "")))
    options = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = _from_pretrained(auto_class, "model.path", problem, name, settings, **options)
    # transformers initialises missing weights randomly, which is useless for a reference model
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        raise ModelError(
            f"model.path: `{name}` lacks {len(missing)} weights of its {type(model).__name__}, or has them in another "
            f"shape: {', '.join(missing[:3])}; save the whole checkpoint again"
        )
    return model


def load_auxiliary(auto_class: Any, settings: ModelSettings, problem: str, **options: Any) -> Any:
    """Load another part of a checkpoint than its weights, with a class of transformers."""
    return _from_pretrained(auto_class, "model.path", problem, settings.path, settings, **options)


def check_readable(name: str) -> None:
    """Check the files of a causal LM's checkpoint without loading it.

    Raises:
        ModelError: its weights are quantised, it is no language model (whose missing tokenizer would otherwise be the
            error).
    """
    _check_local("model.path", name)
    config = _read_json(Path(name) / "config.json")
    fault, architectures = "", config.get("architectures") or []
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        fault = (
            f"has weights quantised by {method}, which are not supported; pass the original checkpoint, or save the "
            "result of model.dequantize()"
        )
    elif any(str(architecture).endswith("Classification") for architecture in architectures):
        fault = f"is a {architectures[0]}, not a causal LM{_reader_hint()}"
    if fault:
        raise ModelError(f"model.path: `{name}` {fault}")
    _check_weight_size(Path(name))


def _reader_hint() -> str:
    """Return which settings choose a reader for a model that is no causal LM."""
    groups = [f"model.{name}" for name in model_readers()]
    return f"; for another kind of model, set what its reader needs: {', '.join(groups)}" if groups else ""


def recorded_train(settings: ModelSettings, model: nn.Module | None = None) -> Train | None:
    """Return the kind of training that the config of a checkpoint or a loaded model records; None: not recorded.

    Reference models of `grasp retrain` record `new`.
    """
    if model is None:
        recorded = _read_json(Path(settings.path) / "config.json").get(TRAIN_FIELD)
    else:
        recorded = getattr(model.config, TRAIN_FIELD, None)
    return next((known for known in get_args(Train) if known == recorded), None)


def text_config_of(settings: ModelSettings) -> Any:
    """Return the configuration of a causal LM's text model, without loading its weights."""
    name = _adapter_base(settings.path) or settings.path
    config = _from_pretrained(AutoConfig, "model.path", "has no configuration", name, settings)
    config = config.get_text_config(decoder=True)
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int) and vocab_size < 1:
        raise ModelError(f"model.path: `{name}` has a config.json with vocab_size {vocab_size}; fix the config")
    if isinstance(vocab_size, int) and is_adapter(settings.path):
        config.vocab_size = _adapted_vocab_size(settings.path, vocab_size)
    return config


def tokenizer_of(settings: ModelSettings) -> Any:
    """Load the transformers tokenizer of a model's settings."""
    if settings.tokenizer is None:
        return tokenizer_at("model.path", settings.path, settings)
    return tokenizer_at("model.tokenizer", settings.tokenizer, settings)


def tokenizer_at(field: str, name: str, settings: ModelSettings) -> Any:
    """Load a transformers tokenizer from a directory, a GGUF file, a repository, or the base model of an adapter."""
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        base = _adapter_base(name)
        if base is not None:
            return tokenizer_at(field, base, settings)
        flag = " with --tokenizer (model.tokenizer)" if field.startswith("model.") else ""
        raise ModelError(
            f"{field}: `{name}` has no tokenizer; pass its directory{flag}, or save it there with "
            "tokenizer.save_pretrained"
        )
    return _from_pretrained(AutoTokenizer, field, "has no tokenizer", name, settings)


def _adapter_base(name: str) -> str | None:
    """Return the base model of a PEFT adapter; None: it is not an adapter."""
    adapter = _read_json(Path(name) / "adapter_config.json")
    if not adapter:
        return None
    peft_type, base = adapter.get("peft_type"), adapter.get("base_model_name_or_path")
    if peft_type not in MERGEABLE_ADAPTERS or not isinstance(base, str):
        raise ModelError(
            f"model.path: `{name}` is an adapter of type {peft_type} for {base}, expected "
            f"{', '.join(MERGEABLE_ADAPTERS)} with the path of its base model"
        )
    check_readable(base)
    return base


def is_adapter(name: str) -> bool:
    """Return whether a checkpoint is a PEFT adapter."""
    return bool(_read_json(Path(name) / "adapter_config.json"))


def _adapted_vocab_size(name: str, base_size: int) -> int:
    """Return the vocabulary size of a model with an adapter, which may have been trained with added tokens."""
    sizes = []
    try:
        with safe_open(Path(name) / "adapter_model.safetensors", "pt") as weights:
            matrices = (key for key in weights.keys() if VOCABULARY_WEIGHT.search(key) and ".lora_" not in key)  # noqa: SIM118
            sizes = [int(weights.get_slice(key).get_shape()[0]) for key in matrices]
    except (OSError, SafetensorError):
        pass  # reported when the adapter is loaded
    trained = _read_json(Path(name) / "adapter_config.json").get("trainable_token_indices") or []
    groups = trained.values() if isinstance(trained, dict) else [trained]
    return int(max(sizes or [base_size, *(1 + index for group in groups for index in group)]))


def _load_adapter(model: Any, settings: ModelSettings) -> Any:
    """Load an adapter into a model: merged into its weights, or separate, with the weights of the model frozen."""
    name, apart = settings.path, settings.adapter == "apart"
    peft = require("peft", extra="peft", feature=f"{name}, which is an adapter,")
    base_size = model.get_input_embeddings().weight.shape[0]
    vocab_size = _adapted_vocab_size(name, base_size)
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
            if vocab_size != base_size:
                model.resize_token_embeddings(vocab_size, mean_resizing=False)
                for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                    for parameter in layer.parameters():
                        parameter.data[base_size:] = torch.nan  # until the adapter sets them
            adapted = peft.PeftModel.from_pretrained(model, name, is_trainable=apart)
            for layer in () if apart else adapted.modules():  # merging would change layers that share weights, too
                if "weight" in getattr(getattr(layer, "base_layer", None), "_parameters", ()):
                    layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.detach().clone())
            adapted = adapted.get_base_model() if apart else adapted.merge_and_unload()
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, SafetensorError, UnpicklingError) as err:
        raise ModelError(
            f"model.path: `{name}` is an adapter that does not fit its model: {' '.join(str(err).split())[:300]}; "
            f"{MERGE_HINT}"
        ) from err
    if vocab_size > base_size:
        with torch.inference_mode():
            added_N = torch.arange(base_size, vocab_size)
            outputs = adapted.get_input_embeddings()(added_N), adapted(input_ids=added_N[:1, None]).logits
        if any(output.isnan().any() for output in outputs):
            raise ModelError(
                f"model.path: `{name}` has {vocab_size} tokens, its base model {base_size}, and it lacks embeddings or "
                f"output weights of the added ones; save it with save_embedding_layers=True, or {MERGE_HINT}"
            )
    return adapted


def _from_pretrained(
    auto_class: Any, field: str, problem: str, name: str, settings: ModelSettings, **options: Any
) -> Any:
    """Call `from_pretrained`, and convert its errors to one line that begins with the setting `field`."""
    arguments = _load_arguments(field, name, settings)
    try:
        with _quiet():
            return auto_class.from_pretrained(**arguments, **options)
    except LOADING_ERRORS as err:
        name = arguments["pretrained_model_name_or_path"]
        reason = " ".join(str(err).split())[:300]
        message = f"`{name}` {problem} that transformers can load: {reason}"
        if "trust_remote_code" in str(err):
            message = (
                f"`{name}` brings Python code of its own, which is not run; review it, and if you trust it, add --set "
                "model.trust_remote_code=true"
            )
        elif not Path(name).exists() and "gguf_file" not in arguments:
            message = _not_available(name, reason)
        raise ModelError(f"{field}: {message}") from err


def _not_available(name: str, reason: str) -> str:
    """Return the message about a checkpoint that is neither on disk nor on a hub."""
    return f"no `{name}` on this disk{suggest_path(name)}, and it cannot be downloaded from a hub: {reason}"


def _load_arguments(field: str, name: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the location of a checkpoint and the permission to run its code."""
    is_local = _check_local(field, name)
    if not is_local and (reason := refusal()):  # the libraries would retry for a minute
        cached = fetched_before(name)
        if cached is None:
            raise ModelError(f"{field}: {_not_available(name, reason)}")
        name, is_local = cached, True
    arguments: dict[str, Any] = {
        "pretrained_model_name_or_path": name,
        "local_files_only": is_local,  # a local checkpoint never contacts a hub
        "trust_remote_code": settings.trust_remote_code,  # always set, to avoid an interactive prompt
    }
    path = Path(name)
    if path.suffix == ".gguf":
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", feature="a GGUF checkpoint")
        arguments |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return arguments


def _check_local(field: str, name: str) -> bool:
    """Return whether a checkpoint is on disk; its name may be that of a repository otherwise."""
    path, fault = Path(name), ""
    if name.startswith(IN_MEMORY):
        fault = " is not on disk; pass it again, or save it and pass its directory"
    elif os.path.lexists(path) and not path.exists():
        fault = " is a broken or circular symbolic link; fix it"
    elif path.is_file() and path.suffix != ".gguf":
        hint = _reader_hint() * (path.suffix in WEIGHT_SUFFIXES)
        fault = f" is a file; expected a directory, a GGUF file or the name of a repository{hint}"
    elif not path.exists() and (path.suffix == ".gguf" or not REPOSITORY.fullmatch(name) or is_path(name)):
        fault = f": no such file or directory{suggest_path(name)}; expected a checkpoint"
    if fault:
        raise ModelError(f"{field}: `{name}`{fault}")
    return path.exists()


def _check_weight_size(path: Path) -> None:
    """Refuse a config whose sizes exceed the size of the weight files; creating such a model could exhaust memory."""
    config = _read_json(path / "config.json")
    # a weight has at least 4 bits
    max_weights = 2 * sum(file.stat().st_size for file in path.glob("*") if file.suffix in (*WEIGHT_SUFFIXES, ".gguf"))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):  # e.g. text_config
        width = max((section[name] for name in WIDTHS if isinstance(section.get(name), int)), default=0)
        for field, value in section.items():
            limit = max(max_weights, FREE_POSITIONS if "position" in field else 0)
            if SIZES.fullmatch(field) and isinstance(value, int) and value * width > limit and max_weights > 0:
                raise ModelError(
                    f"model.path: `{path}` has a config.json with {field} {value:,} and a width of {width:,}, for "
                    "which it has too few weights; fix the config, or save the whole checkpoint again"
                )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping; empty if the file is missing or invalid, which is reported when it is loaded."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and reports of transformers, whose relevant content is raised as an error."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
