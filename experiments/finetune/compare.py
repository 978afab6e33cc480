"""Scores of one forward pass side by side, against the runs that there are.

    python -m experiments.finetune.compare documents --data ../shared/data --out experiments/finetune/documents.json

Features and scores are kept in --work; the comparison takes seconds and is made anew each time.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import bm25s
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from experiments.finetune.evaluate import Method, compare, noise
from experiments.finetune.features import Features, features_of
from experiments.finetune.run import HERE
from experiments.finetune.scores import (
    Sides,
    delta_kernel,
    hidden_cosine,
    hidden_kernel,
    input_kernel,
    kernel_lm,
    ngram_lm,
    pooled_kernel,
    token_kernel,
)
from experiments.finetune.setting import LENGTH, NAMES, Name, open_corpus, target_settings, write_corpora
from experiments.finetune.training import load_model, prepare_model
from grasp.baselines.bm25 import words
from grasp.errors import GraspError
from grasp.files import write_whole
from grasp.models.tokenizer import HfTokenizer
from grasp.runs.environment import Environment
from grasp.runs.retrain import row_index
from grasp.seeds import stream
from grasp.targets import UnitSet, load_units

F64 = NDArray[np.float64]
SHIPS = "ships"
RIDGES = {"raw": None, "0.01": 0.01, "1": 1.0}  # of whitening; raw: none


def kernels(sides: Sides, text: Callable[[], F64]) -> dict[str, Callable[[], F64]]:
    """What is computed once and kept: a matrix (N, E) a name."""
    out: dict[str, Callable[[], F64]] = {
        "token": lambda: token_kernel(sides),
        "token a.5": lambda: token_kernel(sides, alpha=0.5),
        "input": lambda: input_kernel(sides),
        "pooled": lambda: pooled_kernel(sides),
        "repsim": lambda: hidden_cosine(sides),
        "repsim loss": lambda: hidden_cosine(sides, supervised=True),
        "bm25": text,
        "kernel lm": lambda: kernel_lm(sides),
        "ngram lm": lambda: ngram_lm(sides),
        "loss": lambda: _of_rows(sides, -np.bincount(sides.rows.owner_P, sides.rows.loss_P) / sides.rows.count_N),
        "length": lambda: _of_rows(sides, sides.rows.count_N.astype(np.float64)),
        "random": lambda: stream(0, "finetune", "random").normal(size=(sides.rows.n, sides.units.n)),
    }
    for of_hidden, hidden in RIDGES.items():
        out[f"hidden kernel {of_hidden}"] = lambda hidden=hidden: hidden_kernel(sides, hidden)
        out[f"input delta {of_hidden} flat"] = lambda hidden=hidden: input_kernel(sides, hidden, by_frequency=False)
        for of_delta, delta in RIDGES.items():
            out[f"delta h {of_hidden} d {of_delta}"] = lambda hidden=hidden, delta=delta: delta_kernel(
                sides, hidden, delta
            )
    return out


SUMS: dict[str, tuple[str, ...]] = {
    SHIPS: ("token", "input"),
    "ships + repsim": ("token", "input", "repsim"),
    "ships + kernel lm": ("token", "input", "kernel lm"),
    "delta + input flat": ("delta h raw d 0.01", "input delta 0.01 flat"),
    "delta + input flat + repsim": ("delta h raw d 0.01", "input delta 0.01 flat", "repsim"),
    "whitened delta + input flat": ("delta h 0.01 d 0.01", "input delta 0.01 flat"),
    "whitened delta + input flat + repsim": ("delta h 0.01 d 0.01", "input delta 0.01 flat", "repsim"),
    "whitened delta (1) + input flat + repsim": ("delta h 1 d 0.01", "input delta 0.01 flat", "repsim"),
    "whitened delta (1) + input": ("delta h 1 d 0.01", "input"),
    "whitened delta (1) + input + repsim": ("delta h 1 d 0.01", "input", "repsim"),
    "delta + input flat + kernel lm": ("delta h raw d 0.01", "input delta 0.01 flat", "kernel lm"),
    "delta + input flat + repsim + kernel lm": ("delta h raw d 0.01", "input delta 0.01 flat", "repsim", "kernel lm"),
    "ships + delta + input flat + repsim": ("token", "input", "delta h raw d 0.01", "input delta 0.01 flat", "repsim"),
    "kernel lm + repsim": ("kernel lm", "repsim"),
    "input + repsim": ("input", "repsim"),
    "input + kernel lm": ("input", "kernel lm"),
}


def methods_of(kernel_of: dict[str, F64]) -> dict[str, Method]:
    """Every kernel and every sum, with negative scores in full (1) and times .25; what ships has them times .25."""
    named = {name: (name,) for name in kernel_of} | SUMS
    out = {SHIPS: Method(tuple(kernel_of[part] for part in SUMS[SHIPS]), negative=0.25)}
    for name, parts in named.items():
        out[f"{name} (negatives in full)"] = Method(tuple(kernel_of[part] for part in parts))
        out.setdefault(name, Method(tuple(kernel_of[part] for part in parts), negative=0.25))
    return out


def bm25_scores(texts: list[str], queries: list[str]) -> F64:
    """Of the rows' text for prompt and completion, k1 1.2, b .75, (N, E)."""
    index = bm25s.BM25(k1=1.2, b=0.75)
    known = {word: k for k, word in enumerate(sorted({word for text in texts for word in words(text)}))}
    index.index(([[known[word] for word in words(text)] for text in texts], known), show_progress=False)
    found = [[known[word] for word in words(query) if word in known] for query in queries]
    scores = [index.get_scores(query) if query else np.zeros(len(texts)) for query in found]
    return np.stack(scores, axis=1).astype(np.float64)


def tails(kernel_NE: F64) -> float:
    """Median over units of the share of a unit's squared scores that its largest row holds."""
    square_NE = kernel_NE**2
    return float(np.median(square_NE.max(axis=0) / np.maximum(square_NE.sum(axis=0), 1e-300)))


def agreement(kernel_of: dict[str, F64], names: list[str]) -> dict[str, float]:
    """Mean over units of the rank correlation over rows of pairs of kernels."""
    rank_of = {name: rankdata(kernel_of[name], axis=0) for name in names}
    z_of = {name: (rank - rank.mean(axis=0)) / rank.std(axis=0) for name, rank in rank_of.items()}
    pairs = [(a, b) for k, a in enumerate(names) for b in names[k + 1 :]]
    return {f"{a} ~ {b}": round(float(np.mean(z_of[a] * z_of[b])), 3) for a, b in pairs}


def run(name: Name, data: Path, work: Path, environments: Path, out: Path) -> None:
    """Features, scores, comparison."""
    prepare_model(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    write_corpora(data, work, tokenizer)
    reader = HfTokenizer(tokenizer, vocab_size=49_152)
    corpus = open_corpus(name, work, reader)
    units = load_units(target_settings(name, work))
    sides = Sides(*_features(name, work, corpus.rows, corpus.first_N, units, reader))
    texts = reader.decode([row.tolist() for row in corpus.rows])
    make = kernels(sides, lambda: bm25_scores(texts, [unit.prompt + unit.completion for unit in units.units]))
    kept = work / f"{name}-scores"
    kept.mkdir(exist_ok=True)
    kernel_of = {label: _kept(kept / f"{label}.npy", kernel) for label, kernel in make.items()}
    environment = Environment.open(environments / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    (block,) = environment.subset_blocks(row_index(corpus.store))
    chosen = [block.subset_ids.index(subset) for subset in utilities.subset_ids]
    share_BN = block.weights_BN.toarray()[chosen]
    share_BN /= share_BN.sum(axis=1, keepdims=True)
    result = {
        "environment": name,
        "role": environment.role,
        "subsets": len(chosen),
        "planned": len(block.subset_ids),
        "seeds": [0],
        "units": len(units.units),
        "noise": noise(environment),
        "share_of_top_row": {label: round(tails(kernel), 3) for label, kernel in kernel_of.items()},
        "rank_agreement": agreement(kernel_of, ["token", "input", "repsim", "kernel lm", "delta h raw d 0.01", "bm25"]),
        "methods": compare(methods_of(kernel_of), utilities, share_BN, base=SHIPS),
    }
    write_whole(out, (json.dumps(result, indent=1) + "\n").encode())


def _features(
    name: Name,
    work: Path,
    rows: list[NDArray[np.int32]],
    first_N: NDArray[np.int64],
    units: UnitSet,
    reader: HfTokenizer,
) -> tuple[Features, Features]:
    paths = [work / f"{name}-{side}.npz" for side in ("rows", "units")]
    if not all(path.exists() for path in paths):
        model = load_model(work / "model")
        tokens = units.tokenize(reader, LENGTH)
        features_of(model, [unit.input_ids for unit in tokens], [unit.first for unit in tokens]).save(paths[1])
        features_of(model, rows, first_N).save(paths[0])
    return Features.load(paths[0]), Features.load(paths[1])


def _kept(path: Path, make: Callable[[], F64]) -> F64:
    if not path.exists():
        np.save(path, make().astype(np.float32))
        print(path.stem, flush=True)
    return np.load(path).astype(np.float64)


def _of_rows(sides: Sides, score_N: F64) -> F64:
    return np.repeat(score_N[:, None], sides.units.n, axis=1)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.compare", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--environments", type=Path, default=HERE, help="Where the runs are.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="Model, rows, features and scores.")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    try:
        run(given.name, given.data, given.work, given.environments, given.out)
    except GraspError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
