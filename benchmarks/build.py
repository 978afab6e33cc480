"""What a build costs beside the bare forward pass over the same batches, and whether memory grows with the corpus.

    python benchmarks/build.py                       # about 10 minutes on 2 cores
    python benchmarks/build.py --rows 256 --skip-memory
    python benchmarks/build.py --rows 2 --skip-memory --skip-speed        # the kernels alone, in a minute
    python benchmarks/build.py --rows 64 --skip-memory --skip-speed --skip-kernels --profile     # where the time goes
    python benchmarks/build.py ... --profile --model DIR --corpus pool.parquet     # of a model and documents of yours
    python benchmarks/build.py --skip-memory --skip-speed --skip-kernels --backward --model paper-50m --rows 4 \
        --length 256 --units 10 --repeats 2     # the pass of --train further over a plain forward and backward pass

The model is a Phi of 18 M parameters, 2 M of them body and 8 M each embedding and head, with a vocabulary of 50,304
and a head bias that follows Zipf's law, so that the largest probabilities fall on frequent tokens, as they do in
trained models. Rows are Zipf tokens.
"body" is the transformer without its head; "head" is the logits, in buffers as large as the build's. The kernels are
also timed one by one, on one batch of Zipf tokens with units of Zipf tokens, so that many input tokens are shared.
The profile is of a whole build, in CPU seconds, by stage and within a stage by what the work is for.
"""

import argparse
import cProfile
import json
import multiprocessing
import pstats
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaForCausalLM, PhiConfig, PhiForCausalLM

from grasp.corpus.row_store import RowStore
from grasp.kernels.gradient import Curvature
from grasp.kernels.kernel import make_kernels
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, batches, pad_rows
from grasp.models.forward_pass import position_mask
from grasp.models.residuals import LOGIT_ELEMENTS, hidden_gradient
from grasp.models.tokenizer import train_tokenizer
from grasp.pipeline.model_pass import ModelPass, compute_moments, row_examples
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import Progress, ignore
from grasp.settings import CorpusSettings, FeatureSettings, build_settings
from grasp.targets import UnitTokens
from grasp.training.recipe import named_recipe

VOCAB = 50_304
TARGETS = 5
FORWARD = ["output_layer", "embedding", "knn", "pooled"]
SKETCHES = ["hidden_sketch", "residual_sketch", "product_sketch"]
KERNELS: dict[str, dict[str, Any]] = {
    "paper": {"rule": "paper"},
    "output_layer": {"kernels": ["output_layer"]},
    "new": {},
    "further": {},
    "everything": {"kernels": [*FORWARD, *SKETCHES]},
}


def zipf(generator: np.random.Generator, size: Any) -> np.ndarray:
    return np.minimum(generator.zipf(1.2, size=size), VOCAB) - 1


def write_world(root: Path, args: argparse.Namespace) -> None:
    generator = np.random.default_rng(0)
    if args.model is None:
        write_model(root / "model")
    elif args.model.exists():
        (root / "model").symlink_to(args.model.absolute())
    else:
        write_recipe_model(root / "model", str(args.model))
    if args.corpus is None:
        write_rows(root / "corpus.parquet", args.rows, args.length, generator)
    else:
        documents = pq.read_table(args.corpus, columns=["text"])["text"].to_pylist()
        long = [text[: 8 * args.length] for text in documents if len(text) >= 8 * args.length]
        pq.write_table(pa.table({"text": long[: args.rows]}), root / "corpus.parquet")
    for t in range(TARGETS):
        with (root / f"target-{t}.jsonl").open("w") as file:
            for i in range(args.units // TARGETS):
                text = "".join(generator.choice(list("abcdefghij"), size=40 + args.unit_tokens))
                line = {"task": f"target-{t}", "unit_id": f"{t}-{i}", "prompt": text[:40], "completion": text[40:]}
                file.write(json.dumps(line) + "\n")


def write_model(path: Path) -> None:
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
    model.save_pretrained(path)
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(path)


def write_recipe_model(path: Path, recipe: str) -> None:
    """Write a model of the shape of a recipe with random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(named_recipe(recipe).shape.config(eos_id=0)).save_pretrained(path)
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(path)


def write_rows(path: Path, rows: int, length: int, generator: np.random.Generator) -> None:
    ids = [zipf(generator, length).astype(np.int32) for _ in range(rows)]
    pq.write_table(pa.table({"row_id": [f"r{i}" for i in range(rows)], "input_ids": ids}), path)


def settings_of(root: Path, corpus: Path, length: int, kernels: str, threads: int) -> Any:
    return build_settings(
        {
            "model": {"path": str(root / "model"), "threads": threads},
            "corpus": {"path": str(corpus), "max_length": length, "max_rows_per_document": 1},
            "targets": {"names": [str(root / f"target-{t}.jsonl") for t in range(TARGETS)], "units_per_target": None},
            "train": "further" if kernels == "further" else "new",
            "features": KERNELS[kernels],
            "shard_rows": 256,
        }
    )


PASSES = ("moments", "rows scored")  # stages in which rows pass the model, and are scored


class Clock(Progress):
    """Seconds of each stage of a build."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._begun = "load and units", time.perf_counter()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begun
        self._name, self._begun = name, now

    def stop(self) -> dict[str, float]:
        self.stage("", rows=None, tokens=None)
        return self.seconds


def timed_build(settings: Any, out: Path) -> dict[str, float]:
    clock = Clock()
    build_artifact(settings, out, progress=clock)
    return clock.stop()


@torch.inference_mode()
def bare(model: ReferenceModel, store: RowStore, spec: str | None) -> float:
    """Seconds of the body over the build's own batches, and of the head at the positions of `spec`."""
    shape = (LOGIT_ELEMENTS // model.vocab_size, model.vocab_size)
    buffer = torch.empty(shape, dtype=model.dtype, device=model.device)
    begun = time.perf_counter()
    for k in range(store.n_shards):
        rows = store.shard(k)
        for index in batches(np.diff(rows.offsets), model.batch_tokens):
            ids, loss_mask = pad_rows([rows.ids(int(i)) for i in index])
            hidden = model.hidden(ids)
            if spec is not None:
                used = hidden[position_mask(spec, loss_mask).to(model.device)]
                for start in range(0, len(used), len(buffer)):
                    part = used[start : start + len(buffer)]
                    model.head.linear_logits(part, out=buffer[: len(part)])
    return time.perf_counter() - begun


def speed(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    corpus = root / "corpus.parquet"
    model = ReferenceModel.load(settings_of(root, corpus, args.length, "new", args.threads).model)
    builds: dict[str, dict[str, float]] = {}
    forwards: dict[str, list[float]] = {"body": [], "body + head, tail:32": [], "body + head, all": []}
    timed_build(settings_of(root, corpus, args.length, "new", args.threads), root / "warm")
    store = RowStore.open(root / "warm" / "tokens")
    for _ in range(args.repeats):
        for name, spec in (("body", None), ("body + head, tail:32", "tail:32"), ("body + head, all", "all")):
            forwards[name].append(bare(model, store, spec))
        for name in args.kernels:
            seconds = timed_build(settings_of(root, corpus, args.length, name, args.threads), root / name)
            shutil.rmtree(root / name)
            if name not in builds or sum(seconds.values()) < sum(builds[name].values()):
                builds[name] = seconds
    best = {name: min(seconds) for name, seconds in forwards.items()}
    work = {name: sum(seconds.get(stage, 0.0) for stage in PASSES) for name, seconds in builds.items()}
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
    rates: dict[str, float] = {}
    if "paper" in work:
        rates["paper_over_body"] = work["paper"] / best["body"]
        rates["paper_over_body_and_tail_head"] = work["paper"] / best["body + head, tail:32"]
    for name in work.keys() - {"paper"}:
        rates[f"{name}_over_body_and_head"] = work[name] / best["body + head, all"]
        scored = builds[name].get("rows scored", 0.0)
        rates[f"{name}_second_loop_over_body_and_head"] = scored / best["body + head, all"]
    return rates


@torch.inference_mode()
def kernels(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a position of one batch, by what they are spent on."""
    settings = settings_of(root, root / "corpus.parquet", args.length, "everything", args.threads)
    model, features = ReferenceModel.load(settings.model), settings.features
    model_pass, generator = ModelPass.choose(model, features), np.random.default_rng(2)
    count = min(BATCH_ROWS, max(1, model.batch_tokens // args.length))
    write_rows(root / "batch.parquet", count, args.length, generator)
    shard = written(root / "batch", root / "batch.parquet", args.length, model, count).shard(0)
    units = [UnitTokens(zipf(generator, 20 + args.unit_tokens).astype(np.int32), 20) for _ in range(args.units)]
    corpus = compute_moments(model_pass, shard, states_every=1)
    every = model_pass.units(units, [str(e) for e in range(len(units))])
    ((_, batch),) = model_pass.batches(shard)
    kernel_set = make_kernels(features.kernels, model, features, corpus)
    for kernel in kernel_set:
        kernel.prepare(every)
    ids, _ = pad_rows([shard.ids(i) for i in range(len(shard))])
    steps: dict[str, Callable[[], Any]] = {
        "body": lambda: model.hidden(ids),
        "body, head and residuals": lambda: list(model_pass.batches(shard)),
        "W^T xi, which several kernels share": lambda: hidden_gradient(model.head, batch.residual),
    }
    steps |= {kernel.name: partial(kernel.score, batch) for kernel in kernel_set}
    microseconds = {name: 1e6 * _seconds(step, args.repeats) / len(batch.row_P) for name, step in steps.items()}
    shared = float(torch.isin(batch.input_P, every.input_P).float().mean())
    return {"units": args.units, "unit_positions": len(every.row_P), "shared": shared, "us": microseconds}


def written(place: Path, corpus: Path, length: int, model: ReferenceModel, shard_rows: int) -> RowStore:
    """Rows of a corpus, on disk."""
    settings = CorpusSettings(path=str(corpus), max_length=length, max_rows_per_document=1)
    return RowStore.write(place, settings, model.tokenizer, shard_rows=shard_rows)


def backward(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure CPU seconds of forward and backward passes, and of the pass of `--train further` with its kernels.

    The plain pass asks for gradients of activations alone, down to the first block, and its head at every position.
    """
    model = ReferenceModel.load(settings_of(root, root / "corpus.parquet", args.length, "new", args.threads).model)
    features = FeatureSettings(kernels=("gradient", "output_layer", "embedding"), gradient_coordinates=args.coordinates)
    model_pass, generator = ModelPass.choose(model, features), np.random.default_rng(2)
    sampled = model_pass.sampled
    assert sampled is not None
    prompts = [zipf(generator, 20 + args.unit_tokens) % model.vocab_size for _ in range(args.units)]
    units = [UnitTokens(ids.astype(np.int32), 20) for ids in prompts]
    rows = written(root / "backward", root / "corpus.parquet", args.length, model, args.rows).shard(0)
    examples, embedding = row_examples(rows, features), model.model.get_input_embeddings()
    few = written(root / "few", root / "corpus.parquet", args.length, model, 8).shard(0)
    corpus = compute_moments(model_pass, few, states_every=1)
    corpus.by_type[Curvature].measure(
        sampled, row_examples(few, features), learning_rate_sum=0.01, batch_rows=16, seed=0, advance=ignore
    )
    kernel_set = make_kernels(features.kernels, model, features, corpus)
    unit_batch = model_pass.units(units, [str(e) for e in range(len(units))])
    for kernel in kernel_set:
        kernel.prepare(unit_batch)

    def plain() -> None:
        for index in sampled.batches(examples):
            ids, _ = pad_rows([examples[int(i)].input_ids for i in index])
            with torch.enable_grad():
                start = embedding(ids).detach().requires_grad_(True)
                hidden = model.body(inputs_embeds=start, use_cache=False).last_hidden_state
                logits = model.head.linear_logits(hidden[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                torch.autograd.grad(loss, start)

    def features_of_rows() -> None:
        for _ in model_pass.batches(rows):
            pass

    def scores_of_rows() -> None:
        for _, batch in model_pass.batches(rows):
            for kernel in kernel_set:
                kernel.score(batch)

    spent: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for run in (plain, features_of_rows, scores_of_rows):
            begun = time.process_time()
            run()
            spent.setdefault(run.__name__, []).append(time.process_time() - begun)
    seconds = {name: min(times) for name, times in spent.items()}
    return {
        "rows": len(rows),
        "units": len(units),
        "coordinates": sampled.sample.size,
        "cpu_seconds": seconds,
        "over_plain": {name: value / seconds["plain"] for name, value in seconds.items()},
    }


def _seconds(step: Callable[[], Any], repeats: int) -> float:
    step()
    records = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        records.append(time.perf_counter() - begun)
    return min(records)


# What the time of a stage is for, by the function that all of it passes through; none of them calls another.
PROFILED = {
    "body": ("models/causal_lm.py", "hidden"),
    "head, products": ("models/head.py", "linear_logits"),
    "probabilities, the largest of them": ("models/residuals.py", "sparse_residual"),
    "sums for moments": ("kernels/whitening.py", "add"),
    "gradients by hidden states": ("models/residuals.py", "hidden_gradient"),
    "output_layer and embedding": ("kernels/output_layer.py", "output_layer_relevance"),
    "knn": ("kernels/knn.py", "knn_relevance"),
    "product sketch": ("kernels/sketch.py", "apply"),
    "pooling": ("models/residuals.py", "pool"),
    "whitening": ("kernels/whitening.py", "whiten"),
    "writing": ("artifact/writer.py", "write_shard"),
}


class Profiler(Clock):
    """CPU seconds of each stage, and of what PROFILED names in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, dict[str, float]] = {}
        self._profile = cProfile.Profile(time.process_time)
        self._profile.enable()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        self._profile.disable()
        entries: Any = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        calls_by_function = self.stages.setdefault(self._name, {})
        for (file, _, function), (_, _, calls, through, _) in entries.items():
            calls_by_function["all"] = calls_by_function.get("all", 0.0) + calls
            for what, (place, called) in PROFILED.items():
                if function == called and file.endswith(f"grasp/{place}"):
                    calls_by_function[what] = calls_by_function.get(what, 0.0) + through
        super().stage(name, rows=rows, tokens=tokens)
        self._profile = cProfile.Profile(time.process_time)
        self._profile.enable()

    def stop(self) -> dict[str, float]:
        super().stop()
        self._profile.disable()
        return self.seconds


def profile(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds by stage and by what they are for, of builds that begin warm."""
    summary = {}
    timed_build(settings_of(root, root / "corpus.parquet", args.length, "paper", args.threads), root / "warm-up")
    for name in args.kernels:
        clock = Profiler()
        build_artifact(
            settings_of(root, root / "corpus.parquet", args.length, name, args.threads), root / name, progress=clock
        )
        clock.stop()
        shutil.rmtree(root / name)
        summary[name] = clock.stages
    return summary


def profile_table(profile: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = ["CPU seconds of a build, and the share of a stage that goes to what:"]
    for name, stages in profile.items():
        for stage, parts in stages.items():
            total = parts.get("all", 0.0)
            if total < 0.01:
                continue
            lines.append(f"  {name:<18} {stage:<16} {total:8.2f} s")
            named = sorted(((seconds, what) for what, seconds in parts.items() if what != "all"), reverse=True)
            rest = total - sum(seconds for seconds, _ in named)
            lines += [f"    {what:<36} {seconds / total:6.1%}" for seconds, what in [*named, (rest, "everything else")]]
    return lines


def _peak(settings: Any, out: Path, queue: Any) -> None:
    build_artifact(settings, out)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    peaks: dict[int, int] = {}
    for rows in args.memory_rows:
        corpus = root / f"corpus-{rows}.parquet"
        write_rows(corpus, rows, args.memory_length, np.random.default_rng(1))
        queue = context.Queue()
        settings = settings_of(root, corpus, args.memory_length, "everything", args.threads)
        child = context.Process(target=_peak, args=(settings, root / f"memory-{rows}", queue))
        child.start()
        peaks[rows] = queue.get()
        child.join()
        shutil.rmtree(root / f"memory-{rows}")
    low, high = min(peaks), max(peaks)
    return {"length": args.memory_length, "peak_bytes": peaks, "growth": peaks[high] / peaks[low] - 1.0}


def table(result: dict[str, Any]) -> str:
    lines = []
    if part := result.get("speed"):
        lines.append(f"{part['rows']:,} rows, {part['tokens']:,} tokens, {part['parameters'] / 1e6:.1f} M parameters")
        lines += [f"  {name:<28} {seconds:8.2f} s" for name, seconds in part["seconds"].items()]
        for build, seconds in part["build_seconds"].items():
            parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            lines.append(f"  build, {build:<20} {sum(seconds.values()):8.2f} s   ({parts})")
        lines += [f"  {name:<40} {part[name]:.3f}" for name in part if "_over_" in name]
    if part := result.get("kernels"):
        lines.append(f"one batch, {part['units']} units of {part['unit_positions']} positions in all,")
        lines.append(f"{part['shared']:.0%} of the rows' input tokens are some unit's:")
        lines += [f"  {name:<40} {value:8.2f} us a position" for name, value in part["us"].items()]
    if part := result.get("profile"):
        lines += profile_table(part)
    if part := result.get("backward"):
        lines.append(
            f"  forward and backward, {part['rows']} rows, {part['units']} units, {part['coordinates']:,} coordinates: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in part["over_plain"].items())
        )
    if part := result.get("memory"):
        for rows, peak in part["peak_bytes"].items():
            lines.append(f"  peak memory at N = {rows:>6,}  {peak / 1e6:8.0f} MB")
        lines.append(f"  growth {part['growth']:+.1%} (target: within 5 %)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--units", type=int, default=640)
    parser.add_argument("--unit-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many is kept")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="builds that are timed")
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--memory-length", type=int, default=32)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--skip-kernels", action="store_true")
    parser.add_argument("--profile", action="store_true", help="say where the time of a build goes")
    parser.add_argument("--backward", action="store_true", help="what --train further costs over a plain pass")
    parser.add_argument("--coordinates", type=int, help="of gradients; none: as a build takes them")
    parser.add_argument("--model", type=Path, help="checkpoint, or recipe whose shape a model has, such as paper-50m")
    parser.add_argument("--corpus", type=Path, help="Parquet with `text`: documents in the place of Zipf tokens")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    steps: dict[str, tuple[bool, Callable[..., Any]]] = {
        "speed": (args.skip_speed, speed),
        "kernels": (args.skip_kernels, kernels),
        "profile": (not args.profile, profile),
        "backward": (not args.backward, backward),
        "memory": (args.skip_memory, memory),
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_world(root, args)
        result = {name: step(root, args) for name, (skip, step) in steps.items() if not skip}
    print(table(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
