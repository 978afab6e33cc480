"""A small real world on disk: texts, a checkpoint with its tokenizer, JSONL targets. Nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.artifact.reader import ArtifactReader
from grasp.models.tokenizer import train_tokenizer
from grasp.settings import BuildSettings, TargetSettings, build_settings

WORDS = ["water", "light", "cell", "river", "energy", "stone", "bird", "plant"]
WORDS += ["metal", "star", "ocean", "wind", "heart", "blood", "salt", "iron"]
TOPICS = ("earth", "life", "sky")
SKETCHES = ("hidden_sketch", "residual_sketch", "product_sketch")
FORWARD = ("output_layer", "embedding", "knn", "pooled", *SKETCHES)
EVERY = (*FORWARD, "gradient")


def texts(n_rows: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=int(generator.integers(5, 40)))) + "." for _ in range(n_rows)]


def write_corpus(path: Path, n_rows: int) -> Path:
    with path.open("w") as file:
        for i, text in enumerate(texts(n_rows)):
            file.write(json.dumps({"row_id": f"row-{i}", "text": text, "topic": TOPICS[i % 3]}) + "\n")
    return path


def write_targets(path: Path, task: str = "facts", n_units: int = 6, seed: int = 1) -> Path:
    generator = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(n_units):
            prompt = "Question: what is " + " ".join(generator.choice(WORDS, size=3)) + "?\nAnswer:"
            completion = " " + " ".join(generator.choice(WORDS, size=1 + i % 3))
            line = {"task": task, "prompt": prompt, "completion": completion, "unit_id": f"{task}-{i}"}
            file.write(json.dumps(line) + "\n")
    return path


def write_checkpoint(path: Path, vocab: int = 300, context: int = 128, train: str | None = "new") -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=0,
        grasp_train=train,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    train_tokenizer(texts(50), vocab_size=vocab).save_pretrained(path)
    return path


def world(root: Path, n_rows: int = 40, **changes: Any) -> BuildSettings:
    """Write a world to `root` and return its build settings; `changes` update `features` or the top level."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "model").exists():
        write_checkpoint(root / "model")
        write_corpus(root / "corpus.jsonl", n_rows)
        write_targets(root / "facts.jsonl")
    widths = {"hidden_width": 8, "residual_width": 8}
    features = {"top_k": 12, **widths, "sample_positions": 200, "sample_rows": 2}
    data: dict[str, Any] = {
        "model": {"path": str(root / "model"), "threads": 1, "batch_tokens": 1024},
        "corpus": {"path": str(root / "corpus.jsonl"), "max_length": 48, "shortest_end": 1},
        "targets": {"names": [str(root / "facts.jsonl")], "max_length": 64},
        "features": features | changes.pop("features", {}),
        "train": "new",
        "shard_rows": 16,
        "array_dtype": "float32",
    }
    settings = build_settings(data | changes)
    if settings.train is None:
        return settings
    return settings.model_copy(update={"features": settings.features.decided(settings.train)})


def changed(settings: BuildSettings, **groups: Any) -> BuildSettings:
    """Return settings in which fields of groups, or top-level settings, have other values."""
    return settings.model_copy(
        update={
            name: getattr(settings, name).model_copy(update=value) if isinstance(value, dict) else value
            for name, value in groups.items()
        }
    )


def more_targets(root: Path, **settings: Any) -> TargetSettings:
    """Write a second target to `root`."""
    names = (str(write_targets(root / "more.jsonl", task="more", seed=5)),)
    return TargetSettings(names=names, max_length=64, **settings)


def relevance(out: Path | ArtifactReader, kernel: str = "gradient") -> np.ndarray:
    artifact = out if isinstance(out, ArtifactReader) else ArtifactReader.open(out)
    return np.concatenate([block for _, block in artifact.array_blocks(f"relevance_{kernel}", block_rows=16)])
