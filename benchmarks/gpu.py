"""What a GPU gives: a build, and that its numbers are those of a CPU.

    python benchmarks/gpu.py --out bench-out/gpu.json                    # a few minutes on one GPU
    python benchmarks/gpu.py --device cpu --small                        # a smoke test of this script, no figures

One run measures, each beside the limit of the same run:

    build     a model of the shape of the recipe paper-50m, rows of 2,048 Zipf tokens: tokens a second of the forward
              stage, of the bare body and of body and head over the same batches, and what share of the speed of a large
              matrix product of the same kind (bfloat16) its operations are
    profile   where the time of a pass over the same rows goes, by stage: body, head, softmax and top k, each kernel,
              padding, copies; beside the time that the operations of a stage need at the speed of a large product, or
              its bytes at that of a large copy
    logits    softmax and top k of one chunk of logits: from half precision, as in a build, and from a float32 copy
    agree     the artifact of a GPU in float32 beside that of a CPU, by array: largest difference over the largest
              entry

Everything runs through the package: nothing here is only for the benchmark. GPU work ends before a clock is read.
"""

import argparse
import functools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from build import Clock, bare, write_recipe_model
from retrain import finish
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import RowStore
from grasp.entry_points import entries
from grasp.kernels.kernel import kernel_class
from grasp.models import forward_pass, residuals
from grasp.models.causal_lm import ReferenceModel
from grasp.models.head import OutputHead
from grasp.pipeline import model_pass
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import BuildSettings, build_settings
from grasp.training.recipe import named_recipe

UNITS, WIDTH = 640, 129
TOLERANCE = 2e-3  # that of tests/test_gpu.py
ACTIVITIES = {"cpu": [ProfilerActivity.CPU], "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rows: int
    length: int
    units: int
    batch_tokens: int
    agree_rows: int
    features: dict[str, Any]


FULL = Sizes(4096, 2048, UNITS, 65_536, 32, {})
SMALL = Sizes(6, 64, 8, 256, 4, {"sample_positions": 100})  # a sample, as of large corpora


def write_world(root: Path, sizes: Sizes, *, small: bool) -> None:
    """The model, its rows, and units."""
    recipe = "tiny" if small else "paper-50m"
    write_recipe_model(root / "model", recipe)
    shape = named_recipe(recipe).shape
    generator = np.random.default_rng(0)
    ids = [
        (np.minimum(generator.zipf(1.2, sizes.length), shape.vocab_size) - 1).astype(np.int32)
        for _ in range(sizes.rows)
    ]
    pq.write_table(
        pa.table({"row_id": [f"r{i}" for i in range(sizes.rows)], "input_ids": ids}), root / "corpus.parquet"
    )
    with (root / "target.jsonl").open("w") as file:
        for e in range(sizes.units):
            text = "".join(generator.choice(list("abcdefghij"), size=45))
            file.write(json.dumps({"task": "target", "unit_id": str(e), "prompt": text[:40], "completion": text[40:]}))
            file.write("\n")


def settings_of(root: Path, sizes: Sizes, device: str, dtype: str, rows: int, train: str = "new") -> BuildSettings:
    return build_settings(
        {
            "model": {
                "path": str(root / "model"),
                "device": device,
                "dtype": dtype,
                "batch_tokens": sizes.batch_tokens,
            },
            "corpus": {"path": str(root / "corpus.parquet"), "max_length": sizes.length, "limit": rows},
            "targets": {"names": [str(root / "target.jsonl")], "units_per_target": None},
            "train": train,
            "features": sizes.features,
            "shard_rows": 256,
        }
    )


class DeviceClock(Clock):
    """Seconds of each stage; what a GPU was given in a stage is done when the next begins."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        finish(self._device)
        super().stage(name, rows=rows, tokens=tokens)


def best(run: Callable[[], object], device: str, times: int = 3) -> float:
    """Seconds of the fastest of so many calls after one that warms up."""
    run()
    differences = []
    for _ in range(times):
        finish(device)
        begun = time.perf_counter()
        run()
        finish(device)
        differences.append(time.perf_counter() - begun)
    return min(differences)


def matmul_rate(model: ReferenceModel, positions: int) -> dict[str, float]:
    """Operations a second of products of the model's shapes: hidden x intermediate, and hidden x vocabulary."""
    hidden, config = model.hidden_size, model.model.config
    rate = {}
    for name, width in (("body", config.intermediate_size), ("head", model.vocab_size)):
        left = torch.randn(positions, hidden, dtype=model.dtype, device=model.device)
        right = torch.randn(hidden, width, dtype=model.dtype, device=model.device)
        seconds = best(lambda left=left, right=right: left @ right, model.device.type)
        rate[name] = 2.0 * positions * hidden * width / seconds
    square = 8192 if model.device.type == "cuda" else 512
    matrix = torch.randn(square, square, dtype=model.dtype, device=model.device)
    rate["peak"] = 2.0 * square**3 / best(lambda: matrix @ matrix, model.device.type)
    return rate


def time_build(root: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """Tokens a second of a build and of the bare forward pass, and the shares of what products allow."""
    settings = settings_of(root, sizes, device, "auto", sizes.rows)
    clock = DeviceClock(device)
    build_artifact(settings, root / "artifact", progress=clock)
    stages = clock.stop()
    model, store = ReferenceModel.load(settings.model), RowStore.open(root / "artifact" / "tokens")
    result: dict[str, Any] = {"stages_s": stages, "tokens": store.n_tokens, "dtype": str(model.dtype)}
    for name, spec in (("body", None), ("body and head", "all")):
        result[f"{name} tokens_per_s"] = store.n_tokens / best(lambda spec=spec: bare(model, store, spec), device, 1)
    result["build tokens_per_s"] = store.n_tokens / stages["rows scored"]
    result["operations_a_token"] = operations(model, sizes.length)
    result["matmul_per_s"] = matmul_rate(model, min(sizes.batch_tokens, 16_384))
    result["share_of_peak"] = (
        result["operations_a_token"] * result["build tokens_per_s"] / result["matmul_per_s"]["peak"]
    )
    return result


@contextmanager
def stages() -> Iterator[None]:
    """Name the stages of a pass over rows in a profile."""
    places: list[tuple[Any, str, str]] = [
        (forward_pass, "pad_rows", "padding"),
        (ReferenceModel, "hidden", "body"),
        (OutputHead, "linear_logits", "head"),
        (residuals, "sparse_residual", "softmax and top k"),
        (model_pass, "refuse_non_finite", "search for NaN"),
    ]
    places += [(kernel_class(name), "score", f"kernel {name}") for name in entries("grasp.kernels")]

    def named(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"stage: {stage}"):
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(mock.patch.object(owner, name, named(getattr(owner, name), stage)))
        yield


def profile_build(root: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds of the device, or of a CPU, in each stage of a build, and the least that one pass needs."""
    settings = settings_of(root, sizes, device, "auto", sizes.rows)
    with stages(), profile(activities=ACTIVITIES[device]) as profiled:
        clock = DeviceClock(device)
        build_artifact(settings, root / "profiled", progress=clock)
        wall = clock.stop()
    model, tokens = ReferenceModel.load(settings.model), RowStore.open(root / "profiled" / "tokens").n_tokens
    events = profiled.key_averages()
    micros = "device_time_total" if device == "cuda" else "cpu_time_total"
    seconds = {
        event.key.removeprefix("stage: "): getattr(event, micros) / 1e6
        for event in events
        if event.key.startswith("stage: ") and "CUDA" not in str(event.device_type)  # once, not also as the GPU's range
    }
    # A product's time is also that of the operator that started it: on a GPU only its own events count.
    device_seconds = {
        event.key: event.self_device_time_total / 1e6
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    }
    copies = sum(time for key, time in device_seconds.items() if "Memcpy" in key)
    busy = sum(device_seconds.values()) if device == "cuda" else None
    rate, width = matmul_rate(model, min(sizes.batch_tokens, 16_384)), 2 if model.dtype.itemsize == 2 else 4
    # The limits are those of one pass over all rows; loop 1 reads a sample of them before.
    block = torch.empty(2**28 if device == "cuda" else 2**22, dtype=torch.float32, device=model.device)
    copied_per_s = 2 * 4 * block.numel() / best(block.clone, device)  # read and written
    logit_bytes = tokens * model.vocab_size * (3 * width + 4)  # maxima and softmax read them, probabilities are written
    head = 2.0 * tokens * model.vocab_size * model.hidden_size
    body = operations(model, sizes.length) * tokens - head
    limits = {"body": body / rate["peak"], "head": head / rate["peak"], "softmax and top k": logit_bytes / copied_per_s}
    return {
        "stages_s": seconds,
        "limits_s": limits,
        "copies_s": copies,
        "busy_s": busy,
        "wall_s": wall,
        "copied_bytes_per_s": copied_per_s,
    }


def time_logits(root: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds of the residuals of a chunk of half-precision logits, and of their float32 copy, as of a capped head."""
    vocab = named_recipe("tiny" if sizes is SMALL else "paper-50m").shape.vocab_size
    n = max(1, (residuals.GPU_LOGIT_ELEMENTS if device == "cuda" else residuals.LOGIT_ELEMENTS // 8) // vocab)
    logits, label = torch.randn(n, vocab, device=device).bfloat16(), torch.randint(0, vocab, (n,), device=device)
    scratch = torch.empty(n, vocab, device=device)
    forms = {"half": lambda: logits, "float32 copy": logits.float}

    def run(form: Callable[[], torch.Tensor]) -> None:
        values = form()
        probability = torch.softmax(values, dim=1, dtype=torch.float32, out=scratch)
        residuals.sparse_residual(values, label, 64, probability_PV=probability)

    return {f"{name} s": best(lambda form=form: run(form), device) for name, form in forms.items()} | {"positions": n}


def operations(model: ReferenceModel, length: int) -> float:
    """Multiplications and additions a token: body, causal attention, head at every position (docs/scale.md)."""
    embedding = model.vocab_size * model.hidden_size
    tied = model.model.config.tie_word_embeddings
    body = sum(parameter.numel() for parameter in model.model.parameters()) - embedding * (1 if tied else 2)
    attention = 2.0 * length * model.hidden_size * model.model.config.num_hidden_layers
    return 2.0 * body + attention + 2.0 * embedding


def agreement(root: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """Largest difference of every array over its largest entry; float32 on both."""
    result = {}
    artifacts = [
        ArtifactReader.open(
            build_artifact(settings_of(root, sizes, place, "float32", sizes.agree_rows, "further"), root / f"agree-{k}")
        )
        for k, place in enumerate((device, "cpu"))
    ]
    rows = np.arange(sizes.agree_rows)
    for name in artifacts[0].array_names:
        got, want = (artifact.array_rows(name, rows) for artifact in artifacts)
        result[name] = float(np.abs(got - want).max() / np.abs(want).max())
    return {"arrays": result, "tolerance": TOLERANCE, "within": max(result.values()) <= TOLERANCE}


PARTS: dict[str, Callable[[Path, Sizes, str], dict[str, Any]]] = {
    "build": time_build,
    "profile": profile_build,
    "logits": time_logits,
    "agree": agreement,
}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, torch {result['torch']}" + (" (small: no figures)" if result["small"] else "")]
    if part := result.get("build"):
        rates = (f"{name.removesuffix(' tokens_per_s')} {part[name]:,.0f}" for name in part if "tokens_per_s" in name)
        lines.append(f"build   tokens a second: {', '.join(rates)}; {part['dtype']}")
        lines.append(
            f"        {part['share_of_peak']:.1%} of a square product's {part['matmul_per_s']['peak']:.2e} a second; "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in part["stages_s"].items())
        )
    if part := result.get("profile"):
        for name, seconds in sorted(part["stages_s"].items(), key=lambda item: -item[1]):
            limit = part["limits_s"].get(name)
            lines.append(f"profile {name:<22} {seconds:8.2f} s" + (f", limit {limit:.2f} s" if limit else ""))
        wall = sum(part["wall_s"].values())
        busy = "" if part["busy_s"] is None else f"the device is busy {part['busy_s']:.2f} s, "
        lines.append(f"profile {busy}copies {part['copies_s']:.2f} s, wall {wall:.2f} s")
    if part := result.get("logits"):
        lines.append("logits  " + ", ".join(f"{name} {part[name]:.4f}" for name in part if name != "positions"))
    if part := result.get("agree"):
        worst = max(part["arrays"], key=part["arrays"].get)
        verdict = "within" if part["within"] else "NOT within"
        lines.append(f"agree   {verdict} tolerance: {worst} {part['arrays'][worst]:.1e} (of {TOLERANCE:.0e})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes: that the script runs, not how fast")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="JSON of everything measured")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu: torch sees no CUDA device; run on a machine with one, or --device cpu --small to try the script")
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu: its figures would mean nothing; add --small to try the script")
    sizes = SMALL if args.small else FULL
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "small": args.small,
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_world(root, sizes, small=args.small)
        for name in args.only:
            result[name] = PARTS[name](root, sizes, args.device)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
