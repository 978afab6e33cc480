"""What a GPU gives: a build, and that its numbers are those of a CPU.

    python benchmarks/gpu.py --out bench-out/gpu.json                    # a few minutes on one GPU
    python benchmarks/gpu.py --device cpu --small                        # a smoke test of this script, no figures

One run measures, each beside the limit of the same run:

    build     a model of the shape of the recipe paper-50m, rows of 2,048 Zipf tokens: tokens a second of the forward
              stage, of the bare body and of body and head over the same batches, and what share of the speed of a large
              matrix product of the same kind (bfloat16) its operations are
    agree     the artifact of a GPU in float32 beside that of a CPU, by array: largest difference over the largest
              entry

Everything runs through the package: nothing here is only for the benchmark. GPU work ends before a clock is read.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from build import Clock, bare
from retrain import finish
from transformers import LlamaForCausalLM

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import RowStore
from grasp.models.causal_lm import ReferenceModel
from grasp.models.tokenizer import train_tokenizer
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import BuildSettings, build_settings
from grasp.training.recipe import named_recipe

UNITS, WIDTH = 640, 129
TOLERANCE = 2e-3  # that of tests/test_gpu.py


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rows: int
    length: int
    units: int
    batch_tokens: int
    subsets: int
    sweep_rows: int
    block: int
    agree_rows: int


FULL = Sizes(4096, 2048, UNITS, 65_536, 100_000, 1_000_000, 1_000, 32)
SMALL = Sizes(6, 64, 8, 256, 40, 5_000, 20, 4)


def write_world(root: Path, sizes: Sizes, *, small: bool) -> None:
    """The model, its rows, and units."""
    torch.manual_seed(0)
    shape = named_recipe("tiny" if small else "paper-50m").shape
    LlamaForCausalLM(shape.config(eos_id=0)).save_pretrained(root / "model")
    train_tokenizer(["a b c"], vocab_size=300).save_pretrained(root / "model")
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
