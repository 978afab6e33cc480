"""Model, tokenizer and rows of an environment, made once and kept in the work directory."""

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from experiments.worlds.contrasts import write_contrasts
from experiments.worlds.setting import ENVIRONMENTS, LENGTH, NAMES, Name, write_corpora, write_longer, write_small
from experiments.worlds.training import load_model, prepare_adapter, prepare_model, with_adapter
from grasp.corpus import RowStore
from grasp.corpus.documents import read_documents
from grasp.files import write_atomically
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.settings import CorpusSettings
from grasp.training.recipe import RECIPES
from grasp.training.train import train


def prepared(name: Name, data: Path, work: Path) -> tuple[LlamaForCausalLM, HfTokenizer]:
    """The model before any run, and its tokenizer; rows and questions are written."""
    work.mkdir(parents=True, exist_ok=True)
    directory = model_directory(name, work)
    if ENVIRONMENTS[name].rows == "small":
        _train_reference(data, directory)
        write_small(data, work)
    else:
        prepare_model(work / "model")
        tokenizer = AutoTokenizer.from_pretrained(work / "model")
        write_corpora(data, work, tokenizer)
        if ENVIRONMENTS[name].rows == "contrasts":
            write_contrasts(data, work, tokenizer)
        if ENVIRONMENTS[name].rows == "longer":
            write_longer(data, work, tokenizer)
        if rank := ENVIRONMENTS[name].recipe.lora_rank:
            prepare_adapter(directory, work / "model", rank)
            _, reader = _opened(work / "model")
            return _adapted(work / "model", directory), reader
    return _opened(directory)


@cache
def _adapted(start: Path, directory: Path) -> LlamaForCausalLM:
    """A model of its own: the adapter is put into its layers."""
    return with_adapter(load_model(start), directory)


@cache
def _opened(directory: Path) -> tuple[LlamaForCausalLM, HfTokenizer]:
    """One model for all environments that begin with it."""
    model = load_model(directory)
    return model, HfTokenizer(AutoTokenizer.from_pretrained(directory), vocab_size=model.config.vocab_size)


def model_directory(name: Name, work: Path) -> Path:
    """What a run begins with: a checkpoint, or an adapter of one."""
    if ENVIRONMENTS[name].recipe.lora_rank:
        return work / "adapter"
    return work / ("small-model" if ENVIRONMENTS[name].rows == "small" else "model")


def _train_reference(data: Path, directory: Path) -> None:
    """A model and a tokenizer of Common Crawl pages alone; a minute of training."""
    if directory.exists():
        return
    recipe = RECIPES["tiny"]
    size = recipe.shape.vocab_size
    corpus = CorpusSettings(
        path=str(data / "cc_weborganizer.parquet"), text_column="text", max_length=LENGTH, max_rows_per_document=1
    )
    texts = (document.text or "" for document in read_documents(corpus))
    tokenizer = HfTokenizer(train_tokenizer(texts, vocab_size=size), vocab_size=size)
    store = RowStore.write(directory.with_suffix(".tokens"), corpus, tokenizer, shard_rows=16384)
    part = directory.with_suffix(".part")
    train(recipe, store, seed=0, tokenizer=tokenizer, out=part)
    part.replace(directory)


def environments_parser(module: str, about: str) -> argparse.ArgumentParser:
    """What a command is asked that judges predictions by the runs of some environments; torch keeps to one thread."""
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{module}", description=about.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    work = Path(__file__).parent / "work"
    parser.add_argument("--work", type=Path, default=work, help="Model, rows and artifacts.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    return parser


def write_reports(args: argparse.Namespace, report: Callable[[Name, Path, Path], dict[str, Any]]) -> None:
    """One environment after the other, but those that the JSON has; it is written after each."""
    written = json.loads(args.out.read_text())["environments"] if args.out.exists() else []
    done = {report["environment"]: report for report in written}
    for name in args.names:
        if name not in done:
            done[name] = report(name, args.data, args.work)
            write_atomically(args.out, (json.dumps({"environments": list(done.values())}, indent=1) + "\n").encode())
            print(f"{name}: {done[name]['cpu_seconds']} s of CPU", flush=True)
