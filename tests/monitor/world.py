"""A tiny model, a tokenizer of words, and a dataset of three sources: one of the target's kind, another, and noise."""

import json
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{k}" for k in range(60)]
SOURCES = ("exam", "letters", "noise")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    vocab = {word: k for k, word in enumerate(["<unk>", "</s>", "<pad>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="</s>", pad_token="<pad>", model_max_length=128
    )


def model(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model of two layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3 + len(WORDS),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=2,
        bos_token_id=None,
        eos_token_id=1,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).to(dtype)


def _text(source: str, draws: np.random.Generator) -> str:
    start, length = int(draws.integers(20)), int(draws.integers(5, 12))
    if source == "exam":  # the next word follows from the one before
        return " ".join(WORDS[(start + 3 * k) % 20] for k in range(length))
    if source == "letters":
        return " ".join(WORDS[20 + (start + k) % 20] for k in range(length))
    return " ".join(WORDS[k] for k in draws.integers(60, size=length))


def rows(n: int = 48, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with a text, the sides of a preference pair, a source and a second label."""
    draws = np.random.default_rng(seed)
    drawn = []
    for k in range(n):
        source = SOURCES[k % len(SOURCES)]
        prompt, *words = _text(source, draws).split()
        row = {"text": " ".join([prompt, *words]), "source": source, "length": "long" if len(words) > 7 else "short"}
        row |= {"prompt": prompt, "chosen": " " + " ".join(words), "rejected": " " + _text("noise", draws)}
        drawn.append(row)
    return drawn


def dataset(*columns: str, n: int = 48) -> Dataset:
    """Return a dataset with some of the columns."""
    return Dataset.from_list([{name: row[name] for name in columns} for row in rows(n)])


def write_exam(path: Path, n: int = 16) -> str:
    """Write questions of the kind of the source `exam`."""
    draws = np.random.default_rng(9)
    lines = []
    for _ in range(n):
        words = _text("exam", draws).split()
        lines.append(json.dumps({"prompt": " ".join(words[:2]), "completion": " " + " ".join(words[2:])}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)
