"""What a build costs beside the bare forward pass over the same batches, and whether memory grows with the corpus.

    python benchmarks/build.py                       # about 10 minutes on 2 cores
    python benchmarks/build.py --rows 256 --skip-memory

The model is a Phi of 18 M parameters, 2 M of them body and 8 M each embedding and head, with a vocabulary of 50,304
and a head bias that follows Zipf's law, so that the largest probabilities fall on frequent tokens, as they do in
trained models. Rows are Zipf tokens.
"body" is the transformer without its head; "head" is the logits, in buffers as large as the build's.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PhiConfig, PhiForCausalLM

from grasp.build.local import build
from grasp.corpus.store import RowStore
from grasp.features.positions import position_mask
from grasp.features.residuals import LOGIT_ELEMENTS
from grasp.models.causal_lm import ReferenceModel, batches, pad_rows
from grasp.models.tokenizer import train_tokenizer
from grasp.settings import build_settings

VOCAB = 50_304
TARGETS = 5


def zipf(generator: np.random.Generator, size: Any) -> np.ndarray:
    return np.minimum(generator.zipf(1.2, size=size), VOCAB) - 1


def write_world(root: Path, rows: int, length: int, units: int, unit_tokens: int) -> None:
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=VOCAB,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = PhiForCausalLM(config)
    model.lm_head.weight.data.mul_(0.5 / model.lm_head.weight.data.std() / config.hidden_size**0.5)
    model.lm_head.bias.data.copy_(-1.2 * torch.log(torch.arange(1, VOCAB + 1.0)))
    model.save_pretrained(root / "model")
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(root / "model")
    write_rows(root / "corpus.parquet", rows, length, generator)
    for t in range(TARGETS):
        with (root / f"target-{t}.jsonl").open("w") as file:
            for i in range(units // TARGETS):
                text = "".join(generator.choice(list("abcdefghij"), size=40 + unit_tokens))
                line = {"task": f"target-{t}", "unit_id": f"{t}-{i}", "prompt": text[:40], "completion": text[40:]}
                file.write(json.dumps(line) + "\n")


def write_rows(path: Path, rows: int, length: int, generator: np.random.Generator) -> None:
    ids = [zipf(generator, length).astype(np.int32) for _ in range(rows)]
    pq.write_table(pa.table({"row_id": [f"r{i}" for i in range(rows)], "input_ids": ids}), path)


def settings_of(root: Path, corpus: Path, length: int, match: str, threads: int) -> Any:
    return build_settings(
        {
            "model": {"path": str(root / "model"), "threads": threads},
            "corpus": {"path": str(corpus), "max_length": length},
            "targets": {"names": [str(root / f"target-{t}.jsonl") for t in range(TARGETS)], "units_per_target": None},
            "features": {"match": match, "product_width": 0},
            "shard_rows": 256,
        }
    )


class Clock:
    """Seconds of each stage of a build."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._begun = "load and units", time.perf_counter()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begun
        self._name, self._begun = name, now

    def advance(self, rows: int, tokens: int) -> None:
        pass

    def stop(self) -> dict[str, float]:
        self.stage("", rows=None, tokens=None)
        return self.seconds


def timed_build(settings: Any, out: Path) -> dict[str, float]:
    clock = Clock()
    build(settings, out, progress=clock)
    return clock.stop()


@torch.inference_mode()
def bare(model: ReferenceModel, store: RowStore, spec: str | None) -> float:
    """Seconds of the body over the build's own batches, and of the head at the positions of `spec`."""
    buffer = torch.empty(LOGIT_ELEMENTS // model.vocab_size, model.vocab_size)
    begun = time.perf_counter()
    for k in range(store.n_shards):
        rows = store.shard(k)
        for index in batches(np.diff(rows.offsets), model.batch_tokens):
            ids, length = pad_rows([rows.ids(int(i)) for i in index])
            hidden = model.hidden(ids)
            if spec is not None:
                used = hidden[position_mask(spec, torch.zeros_like(length), length, ids.shape[1])]
                for start in range(0, len(used), len(buffer)):
                    part = used[start : start + len(buffer)]
                    model.head.linear_logits(part, out=buffer[: len(part)])
    return time.perf_counter() - begun


def speed(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    corpus = root / "corpus.parquet"
    model = ReferenceModel.load(settings_of(root, corpus, args.length, "both", args.threads).model)
    builds: dict[str, dict[str, float]] = {}
    forwards: dict[str, list[float]] = {"body": [], "body + head, tail:32": [], "body + head, all": []}
    timed_build(settings_of(root, corpus, args.length, "both", args.threads), root / "warm")
    store = RowStore.open(root / "warm" / "tokens")
    for _ in range(args.repeats):
        for name, spec in (("body", None), ("body + head, tail:32", "tail:32"), ("body + head, all", "all")):
            forwards[name].append(bare(model, store, spec))
        for match in args.match:
            seconds = timed_build(settings_of(root, corpus, args.length, match, args.threads), root / match)
            shutil.rmtree(root / match)
            if match not in builds or sum(seconds.values()) < sum(builds[match].values()):
                builds[match] = seconds
    best = {name: min(seconds) for name, seconds in forwards.items()}
    work = {match: seconds["forward"] + seconds.get("token moments", 0.0) for match, seconds in builds.items()}
    return {
        "rows": args.rows,
        "tokens": store.n_tokens,
        "parameters": sum(p.numel() for p in model.model.parameters()),
        "seconds": best,
        "build_seconds": builds,
        **ratios(work, builds, best),
    }


def ratios(work: dict[str, float], builds: dict[str, dict[str, float]], best: dict[str, float]) -> dict[str, float]:
    """Seconds of each build over those of the bare forward pass that it cannot do without."""
    found: dict[str, float] = {}
    if "pooled" in work:
        found["pooled_over_body"] = work["pooled"] / best["body"]
        found["pooled_over_body_and_tail_head"] = work["pooled"] / best["body + head, tail:32"]
    for match in work.keys() - {"pooled"}:
        found[f"{match}_over_body_and_head"] = work[match] / best["body + head, all"]
        found[f"{match}_forward_over_body_and_head"] = builds[match]["forward"] / best["body + head, all"]
    return found


def _peak(settings: Any, out: Path, queue: Any) -> None:
    build(settings, out)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    peaks: dict[int, int] = {}
    for rows in args.memory_rows:
        corpus = root / f"corpus-{rows}.parquet"
        write_rows(corpus, rows, args.memory_length, np.random.default_rng(1))
        queue = context.Queue()
        settings = settings_of(root, corpus, args.memory_length, "both", args.threads)
        child = context.Process(target=_peak, args=(settings, root / f"memory-{rows}", queue))
        child.start()
        peaks[rows] = queue.get()
        child.join()
        shutil.rmtree(root / f"memory-{rows}")
    low, high = min(peaks), max(peaks)
    return {"length": args.memory_length, "peak_bytes": peaks, "growth": peaks[high] / peaks[low] - 1.0}


def table(result: dict[str, Any]) -> str:
    lines = []
    if found := result.get("speed"):
        lines.append(
            f"{found['rows']:,} rows, {found['tokens']:,} tokens, {found['parameters'] / 1e6:.1f} M parameters"
        )
        lines += [f"  {name:<28} {seconds:8.2f} s" for name, seconds in found["seconds"].items()]
        for match, seconds in found["build_seconds"].items():
            parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            lines.append(f"  build, match {match:<14} {sum(seconds.values()):8.2f} s   ({parts})")
        lines += [f"  {name:<40} {found[name]:.3f}" for name in found if "_over_" in name]
    if found := result.get("memory"):
        for rows, peak in found["peak_bytes"].items():
            lines.append(f"  peak memory at N = {rows:>6,}  {peak / 1e6:8.0f} MB")
        lines.append(f"  growth {found['growth']:+.1%} (target: within 5 %)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--units", type=int, default=640)
    parser.add_argument("--unit-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many is kept")
    parser.add_argument("--match", nargs="+", default=["pooled", "token", "both"])
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--memory-length", type=int, default=32)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    steps: dict[str, tuple[bool, Callable[..., Any]]] = {
        "speed": (args.skip_speed, speed),
        "memory": (args.skip_memory, memory),
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_world(root, args.rows, args.length, args.units, args.unit_tokens)
        result = {name: step(root, args) for name, (skip, step) in steps.items() if not skip}
    print(table(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
