"""Artifacts of the worlds: the rows and units of their runs, built as `grasp build --train further` does.

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from transformers import AutoTokenizer

from experiments.kernel_names import KERNEL_OF
from experiments.worlds.setting import (
    ENVIRONMENTS,
    LENGTH,
    Corpus,
    Name,
    Rows,
    corpus_settings,
    open_corpus,
    target_settings,
    write_parquet,
)
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.models.build_source import BuildSource
from grasp.models.tokenizer import HfTokenizer
from grasp.pipeline.build import build
from grasp.retraining.plan import row_names
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Utilities

POOLED = {"rule": "paper"}  # methods read rows and units; our kernels are made in `scores`
FORWARD = ("token", "input")  # as the recorded results call them
FEATURES = {"kernels": ("gradient", *(KERNEL_OF[name] for name in FORWARD), "hidden_sketch", "residual_sketch")}


def artifact_of(
    name: Name,
    work: Path,
    start: Path,
    tokenizer: HfTokenizer,
    features: Mapping[str, Any] = POOLED,
    batch_tokens: int = 1024,
    out: str = "artifact",
) -> ArtifactReader:
    """Of the same rows and units as the runs; environments of the same rows share it, but for gradients, which know
    the length of a training.
    """
    kind = ENVIRONMENTS[name]
    shared = features == POOLED
    if not shared:
        training = {"learning_rate_sum": kind.recipe.learning_rate_sum, "batch_rows": kind.recipe.batch_rows}
        features = training | dict(features)
    dtype = "bfloat16" if kind.recipe.bfloat16 else "float32"
    trained_on = open_corpus(name, work, tokenizer)
    settings: dict[str, Any] = {
        "model": {"path": str(start), "dtype": dtype, "batch_tokens": batch_tokens, "threads": 1},
        "corpus": corpus_settings(name, work).model_dump(exclude_unset=True),
        "targets": target_settings(name, work).model_dump(exclude_unset=True),
        "train": "further",
        "features": dict(features),
    }
    if kind.label == "group":
        texts, settings["model"]["tokenizer"] = write_cut(kind.rows, work, trained_on, tokenizer)
        parts = {"prompt": "{prompt}", "completion": "{completion}"}
        settings["corpus"] = {"path": str(texts), "max_length": LENGTH} | parts
    artifact = build(out=work / f"{kind.rows if shared else name}-{out}", settings=settings)
    rows = BuildSource(artifact).rows.rows(np.arange(artifact.n_rows))
    for i, (ids, first) in enumerate(zip(trained_on.rows, trained_on.first_N, strict=True)):
        same = len(ids) - 2  # cut text may end in other tokens: of one row in 380, two line breaks become one
        assert np.array_equal(rows.ids(i)[:same], ids[:same])
        mask = rows.mask(i)
        assert mask is None or np.array_equal(np.flatnonzero(mask), np.arange(first, len(rows.ids(i))))
    return artifact


def write_cut(rows: Rows, work: Path, corpus: Corpus, tokenizer: HfTokenizer) -> tuple[Path, str]:
    """Prompts and completions cut where the runs cut them, at the end, and a tokenizer that ends no row itself.

    A build would keep the end of a conversation that is longer than a row.
    """
    texts, directory = work / f"{rows}-rows.parquet", work / "tokenizer-without-end"
    if not texts.exists():
        pieces = [tokenizer.token_texts(row.tolist()) for row in corpus.rows]
        halves = [(row[:first], row[first:]) for row, first in zip(pieces, corpus.first_N.tolist(), strict=True)]
        prompt, completion = (["".join(part) for part in parts] for parts in zip(*halves, strict=True))
        names = pq.read_table(work / f"{rows}.parquet", columns=["doc_id", "group"])
        table = names.append_column("prompt", pa.array(prompt)).append_column("completion", pa.array(completion))
        model_tokenizer = AutoTokenizer.from_pretrained(work / "model")
        model_tokenizer.eos_token = None
        model_tokenizer.save_pretrained(directory)
        write_parquet(texts, table)
    return texts, str(directory)


def relevance(artifact: ArtifactReader, kernel: str, columns: NDArray[np.int64]) -> F64:
    blocks = artifact.array_blocks(artifact.relevance_name(KERNEL_OF.get(kernel, kernel)), columns=columns)
    return np.concatenate([block for _, block in blocks]).astype(np.float64)


def shares(environment: RetrainedRuns, store: RowStore, utilities: Utilities) -> F64:
    label, labels = environment.label, None  # that subsets were drawn by
    if label is not None:
        labels = [value for k in range(store.n_shards) for value in store.table(k).column(label).to_pylist()]
    blocks = list(environment.subset_blocks(row_names(store), labels))
    ids = [subset for block in blocks for subset in block.subset_ids]
    weight_BN = np.concatenate([block.weights_BN.toarray() for block in blocks])
    weight_BN = weight_BN[[ids.index(subset) for subset in utilities.subset_ids]]
    return np.asarray(weight_BN / weight_BN.sum(axis=1, keepdims=True))
