"""Train a small model from scratch on a corpus, for a build without a checkpoint.

Relevance is computed with this proxy instead of a model of the user. `train_proxy` stores it in the directory of the
artifact together with its tokenizer, so that targets can be added later. `forecast_proxy` times it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from grasp.artifact.manifest import MODEL, TOKENIZER, TOKENS
from grasp.artifact.writer import lock_artifact
from grasp.corpus import RowStore, read_documents
from grasp.errors import CorpusError
from grasp.files import atomic_path
from grasp.models.checkpoint import tokenizer_at
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.pipeline.replay_plan import time_step
from grasp.progress import Progress
from grasp.settings import SHARD_ROWS, CorpusSettings, ModelSettings, path_settings
from grasp.training.fine_tuning_recipe import default_proxy_recipe, proxy_training
from grasp.training.recipe import RECIPES, TrainingRecipe
from grasp.training.train import RECORD, start_training, train

TOKENIZER_CHARS = 50_000_000  # characters of the corpus that a tokenizer is trained on; more do not help
CONTEXT = RECIPES["tiny"].shape.context  # default tokens of a row
N_SEGMENTS = 4  # of a training; an interrupted one resumes from the end of the last finished segment
FORECAST_SHARD_ROWS = 1024  # rows per shard of the temporary copy of a part of the corpus


def train_proxy(
    corpus: CorpusSettings | Mapping[str, Any] | Path | str,
    out: Path | str,
    *,
    tokenizer: Path | str | None = None,
    shard_rows: int = SHARD_ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Train a small model from scratch on all rows of a corpus, as `build` does without a model; return its directory.

    The model, of the size of the recipe `tiny`, is stored in `out`, where `build` finds it. A finished one is reused.
    An interrupted training is resumed by the same call, with the same weights on a CPU.

    Args:
        corpus: path of texts, or settings of the corpus by name: path, text_column, max_length, ... `max_length` is
            the context of the model.
        out: directory of an artifact, which will use the same rows.
        tokenizer: directory of a tokenizer. Default: byte-level BPE with the vocabulary of `tiny`, which is trained
            on the corpus.
        shard_rows: rows per shard.
        seed: seed of the training.
        progress: receives the stages, and the rows and tokens of each step.
    Raises:
        CorpusError: the corpus has no texts that a tokenizer can be trained on.
        ModelError: the directory has a model of other rows, or the training diverges.
    """
    out, progress, corpus = Path(out), progress or Progress(), path_settings(CorpusSettings, corpus, "corpus")
    corpus = corpus.model_copy(update={"max_length": corpus.max_length or CONTEXT})
    with lock_artifact(out):
        named = None if tokenizer is None else str(tokenizer)
        encoder, rows = prepare_rows(
            out / TOKENIZER, out / TOKENS, corpus, named, shard_rows=shard_rows, progress=progress
        )
        recipe = _proxy_recipe(rows.n_rows, encoder.vocab_size, corpus)
        if not (out / MODEL / RECORD).exists():
            progress.note(
                f"no --model: a model of {recipe.shape.layers} layers of width {recipe.shape.hidden} and "
                f"{encoder.vocab_size:,} tokens is trained from scratch on {rows.n_rows:,} rows: {recipe.steps} steps "
                f"of {recipe.batch_rows} rows; it is stored in {out / MODEL}"
            )
        step_tokens = min(recipe.batch_rows * recipe.shape.context, rows.n_tokens)
        progress.stage("training", rows=recipe.steps * recipe.batch_rows, tokens=recipe.steps * step_tokens)
        train(
            recipe,
            rows,
            seed=seed,
            tokenizer=encoder,
            out=out / MODEL,
            checkpoints=tuple(recipe.steps * k // N_SEGMENTS for k in range(1, N_SEGMENTS)),
            progress=lambda _: progress.advance(recipe.batch_rows, step_tokens),
        )
    return out / MODEL


def forecast_proxy(out: Path, corpus: CorpusSettings, tokenizer: str | None, ratio: float) -> tuple[Path, float]:
    """Save an untrained proxy for the whole corpus, `ratio` times its part; return it and the seconds of training."""
    encoder, rows = prepare_rows(out / TOKENIZER, out / TOKENS, corpus, tokenizer, shard_rows=FORECAST_SHARD_ROWS)
    recipe = _proxy_recipe(round(ratio * rows.n_rows), encoder.vocab_size, corpus)
    training = start_training(recipe, 0, eos_id=encoder.eos_id)
    batch_rows = min(recipe.batch_rows, rows.n_rows)  # the part may have fewer rows than a batch
    step_seconds = time_step(training, rows, np.arange(batch_rows)) * recipe.batch_rows / batch_rows
    hf_logging.disable_progress_bar()  # the command line has its own progress display
    training.model.save_pretrained(out / MODEL)
    encoder.save(out / MODEL)
    return out / MODEL, step_seconds * recipe.steps


def prepare_rows(
    directory: Path,
    tokens: Path,
    corpus: CorpusSettings,
    tokenizer: str | None = None,
    *,
    shard_rows: int = SHARD_ROWS,
    progress: Progress | None = None,
) -> tuple[HfTokenizer, RowStore]:
    """Encode a corpus to rows by a tokenizer, or by one that is trained on the corpus.

    Args:
        directory: where a trained tokenizer is stored; one that is there is used.
        tokens: directory of the rows.
        corpus: settings of the corpus.
        tokenizer: directory of a tokenizer. Default: train byte-level BPE with the vocabulary of `tiny`.
        shard_rows: rows per shard.
        progress: receives the stages.
    Raises:
        CorpusError: the corpus has no texts that a tokenizer can be trained on.
    """
    progress = progress or Progress()
    if tokenizer is not None:
        hf_tokenizer = tokenizer_at("tokenizer", tokenizer, ModelSettings(path=tokenizer))
    else:
        if not directory.exists():
            progress.stage("tokenizer", rows=None, tokens=None)
            with atomic_path(directory) as part:
                trained = train_tokenizer(tokenizer_texts(corpus), vocab_size=RECIPES["tiny"].shape.vocab_size)
                trained.save_pretrained(part)
        hf_tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    encoder = HfTokenizer(hf_tokenizer, vocab_size=len(hf_tokenizer))
    progress.stage("rows", rows=None, tokens=None)
    return encoder, RowStore.write(tokens, corpus, encoder, shard_rows=shard_rows)


def _proxy_recipe(n_rows: int, vocab_size: int, corpus: CorpusSettings) -> TrainingRecipe:
    """Return the training of a proxy on `n_rows` rows; a batch has at most all of them."""
    assert corpus.max_length is not None
    recipe = proxy_training(default_proxy_recipe(n_rows), n_rows, vocab_size, corpus.max_length)
    return recipe.model_copy(update={"batch_rows": min(recipe.batch_rows, n_rows)})


def tokenizer_texts(corpus: CorpusSettings) -> Iterator[str]:
    """Yield the first texts of a corpus, about `TOKENIZER_CHARS` characters, to train a tokenizer on."""
    chars = 0
    for document in read_documents(corpus):
        if document.text is None:
            raise CorpusError(
                f"{corpus.path}: no tokenizer can be trained on token ids or conversations; pass theirs as `tokenizer`"
            )
        yield document.text
        chars += len(document.text)
        if chars >= TOKENIZER_CHARS:
            return
