"""GRASP beside the libraries that people would use instead: one command, one run, the same rows, threads and model.

    python benchmarks/peers.py --rows 64 --out bench-out/peers.json                  # about 15 minutes on one core
    python benchmarks/peers.py --rows 64 --only grasp,forward                        # some of them
    python benchmarks/peers.py --peers-path site --out bench-out/peers.json          # with bergson and dattri-llm

The peers are optional; one that is missing or fails is in the table with its error. bergson's own requirements bring
CUDA builds that it does not need; into a folder of their own, without them:

    pip install --target site --no-deps bergson==2.5.1 dattri-llm==0.1.0 peft jaxtyping wadler-lindig ml_dtypes \
        natsort petname simple-parsing docstring-parser torchopt optree graphviz
    pip install traker==0.3.2 datasets accelerate

The model is a Llama with tied embeddings: 10 M parameters, of them 2 M body, vocabulary 50,304, random weights with a
direction that favours frequent tokens as trained models do. Rows are Zipf tokens. Its context is 8,192 though rows
have 512 tokens, since bergson takes no batch beyond the context. Each contender runs in a process of its own, at one
checkpoint, at the batch of rows that was the fastest over a few rows in a process before it. "Imports" are counted
apart, and so is a first run over the few rows, which warms up; "work" is everything after them, loading the model and
the units included; "a row" is the slope between the few rows and all of them, which no fixed cost is part of; so are
bytes a row on disk. CPU seconds are of all threads and children: what to read where the machine is not idle.

What each gradient method covers is the transformer's body, which is all that bergson ever covers; projections are
16 x 16 numbers a module (bergson build, dattri-llm) or 128 in all (TRAK and TracIn). GRASP samples its moments
from an eighth of the rows, as a corpus of more than a million tokens is sampled; the head is part of what it uses.

The sweep: sums over 100,000 subsets of 1,000 rows at GRASP's 129 floats a row, at the 640 of TRAK with five
checkpoints, at TracIn's scalar, each as a plain NumPy loop and as `Sweep` does it, beside what reading the gathered
numbers once would take at the memory bandwidth of the same run.
"""

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, Contender, Job, bytes_below, settings_of, write_world  # the file beside this one
from memory import peak_bytes

SWEEP_WIDTHS = {"GRASP": 129, "TRAK-5": 640, "TracIn": 1}
PREPARATIONS = ("world", "artifact")
PACKAGES = ("torch", "transformers", "bergson", "dattri-llm", "traker")


# ------------------------------------------------------------------------------------------- children


def child(what: str, text: str, batches: Sequence[int]) -> None:
    job = Job(**json.loads(text))
    if what == "world":
        write_world(job)
    elif what == "artifact":
        grasp_build_for_methods(job)
    elif what == "sweep":
        print("\n" + json.dumps(sweep(job)))
    else:
        print("\n" + json.dumps(contend(CONTENDERS[what], job, batches)))


def grasp_build_for_methods(job: Job) -> None:
    from grasp.pipeline.pipeline import build_artifact  # noqa: PLC0415

    build_artifact(settings_of(job, "paper"), job.artifact)


def contend(contender: Contender, job: Job, batches: Sequence[int]) -> dict[str, Any]:
    """CPU seconds over the few rows at each of `batches`; or of everything at the batch of the job, if there are none.

    Seconds of imports and of work, peak memory, bytes kept; and the same of the few rows.
    """
    begun = stamp()
    for module in contender.imports:
        importlib.import_module(module)
    import torch  # noqa: PLC0415

    torch.set_num_threads(job.threads)
    imports = spent(begun, stamp())
    few = replace(job, rows=job.few)
    if batches:
        once(contender, replace(few, batch=batches[0]))
        return {str(batch): once(contender, replace(few, batch=batch))["work"]["cpu_s"] for batch in batches}
    once(contender, few)
    return {"few": once(contender, few), "imports": imports, **once(contender, job), "peak_bytes": peak_bytes()}


def once(contender: Contender, job: Job) -> dict[str, Any]:
    """One run into an empty directory."""
    job.out.mkdir()
    begun = stamp()
    kept_bytes = contender.run(job)
    work = spent(begun, stamp())
    size = bytes_below(kept_bytes) if isinstance(kept_bytes, Path) else kept_bytes
    shutil.rmtree(job.out)
    return {"work": work, "kept_bytes": size}


def stamp() -> tuple[float, float]:
    """Wall and CPU seconds; of the children too, if there are any."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(process.ru_utime + process.ru_stime for process in usage)


def spent(begun: tuple[float, float], done: tuple[float, float]) -> dict[str, float]:
    return {"wall_s": done[0] - begun[0], "cpu_s": done[1] - begun[1]}


def sweep(job: Job) -> dict[str, Any]:
    """Seconds of 100,000 subsets of 1,000 rows at each width, from a few blocks of them, beside the limits."""
    import numpy as np  # noqa: PLC0415
    import sweep as sums  # noqa: PLC0415 - the script beside this one
    import torch  # noqa: PLC0415

    from grasp.predict.weights import RowSums, Weights  # noqa: PLC0415

    torch.set_num_threads(job.threads)
    n_rows = job.rows
    rng = np.random.default_rng(0)
    shape = argparse.Namespace(rows=n_rows, subsets=100_000, size=1_000, block=1_000, rounds=3, width=129)
    blocks, bandwidth = sums.draw_blocks(rng, shape), sums.stream_bandwidth()
    results: dict[str, Any] = {}
    for name, width in SWEEP_WIDTHS.items():
        values = rng.standard_normal((n_rows, width), dtype=np.float32)
        row_sums, weights = RowSums.over(values), [Weights(block) for block in blocks]
        row_sums.sums(weights[0])
        seconds = min(sums.timed(row_sums.sums, block) for block in weights) * shape.subsets / shape.block
        plain = min(sums.timed(lambda block, values=values: sums.numpy_loop(values, block), block) for block in blocks)
        limit = shape.subsets * shape.size * width * 4 / bandwidth
        results[name] = {
            "floats": width,
            "sweep_s": seconds,
            "numpy_s": plain * shape.subsets / sums.PLAIN_SUBSETS,
            "limit_s": limit,
        }
    return {
        "rows": n_rows,
        "subsets": shape.subsets,
        "size": shape.size,
        "threads": job.threads,
        "widths": results,
        "stream_bytes_per_s": bandwidth,
        "matmul_multiply_adds_per_s": sums.matmul_flops(shape),
    }


# ------------------------------------------------------------------------------------------- parent


def ask(what: str, job: Job, args: argparse.Namespace, batches: Sequence[int] = ()) -> dict[str, Any]:
    """What one child found, or the error that it ended with."""
    command = [sys.executable, __file__, "--child", what, json.dumps(asdict(job)), *map(str, batches)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=environment(args), check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.limit:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {"error": lines[-1][:400] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1]) if what not in PREPARATIONS else {}


def environment(args: argparse.Namespace) -> dict[str, str]:
    paths = [*args.peers_path, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(args.threads)
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return (
        os.environ | variables | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    )


def compare(contender: Contender, name: str, job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """The best batch over a few rows, then all rows at it, or as many as there is time for."""
    batches = [batch for batch in contender.batches if batch <= args.few]
    tried = ask(name, job, args, batches)
    if "error" in tried:
        return {"what": contender.what, "missing": tried["error"]}
    batch = min(batches, key=lambda size: tried[str(size)])
    rows = args.rows
    if not contender.needs_artifact:
        rows = max(2 * args.few, min(rows, int(args.most / tried[str(batch)] * args.few)))
    result = ask(name, replace(job, rows=rows, batch=batch), args)
    if "error" in result:
        return {"what": contender.what, "missing": result["error"]}
    a_row = slope(result["few"], result, rows - args.few)
    return {"what": contender.what, "rows": rows, "batch": batch, **result, "a_row": a_row, "batches_cpu_s": tried}


def slope(few: Mapping[str, Any], many: Mapping[str, Any], rows: int) -> dict[str, float | None]:
    bytes_per_row = None if many["kept_bytes"] is None else (many["kept_bytes"] - few["kept_bytes"]) / rows
    seconds = {name: (many["work"][name] - few["work"][name]) / rows for name in ("cpu_s", "wall_s")}
    return {**seconds, "bytes": bytes_per_row}


def packages(args: argparse.Namespace) -> dict[str, str]:
    sys.path[:0] = args.peers_path
    results = {}
    for name in PACKAGES:
        try:
            results[name] = version(name)
        except PackageNotFoundError:
            results[name] = "missing"
    return results


def run(args: argparse.Namespace, root: Path) -> None:
    job = Job(str(root), args.rows, 4, args.threads, args.length, args.units, args.few)
    result: dict[str, Any] = {
        **{name: value for name, value in vars(args).items() if name not in ("out", "peers_path", "only", "resume")},
        "packages": packages(args),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "contenders": {},
    }
    wanted = {
        name: contender for name, contender in CONTENDERS.items() if not args.only or any(o in name for o in args.only)
    }
    world = ask("world", job, args)
    if any(contender.needs_artifact for contender in wanted.values()):
        world |= ask("artifact", replace(job, rows=args.few), args) | ask("artifact", job, args)
    if "error" in world:
        sys.exit(f"peers: {world['error']}")
    before = earlier(args.out, result) if args.resume else {}
    for name, contender in wanted.items():
        result["contenders"][name] = before.get(name) or compare(contender, name, job, args)
        print(line(name, result["contenders"][name]), flush=True)
        write(result, args.out)
    if not args.only or "sweep" in args.only:
        result["sweep"] = ask("sweep", replace(job, rows=args.sweep_rows), args)
        print(sweep_table(result["sweep"]))
    write(result | {"load_after": os.getloadavg()}, args.out)


def earlier(out: Path | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that was cut off had measured, if it was of the same sizes."""
    if out is None or not out.exists():
        return {}
    then = json.loads(out.read_text(encoding="utf-8"))
    sizes = ("rows", "few", "length", "units", "threads", "most", "packages")
    if not all(then[name] == now[name] for name in sizes):
        return {}
    return {name: result for name, result in then["contenders"].items() if "missing" not in result}


def write(result: Mapping[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


COLUMNS = {"": -22, "rows": 5, "batch": 6, "imports": 9, "work": 8, "wall": 8, "ms a row": 10, "peak MB": 9}
HEADING = "".join(f"{name:{'<' if size < 0 else '>'}{abs(size)}}" for name, size in COLUMNS.items()) + "  bytes a row"


def line(name: str, result: Mapping[str, Any]) -> str:
    if "missing" in result:
        return f"{name:22} missing: {result['missing']}"
    stored = result["a_row"]["bytes"]
    return (
        f"{name:22}{result['rows']:>5}{result['batch']:>6}{result['imports']['cpu_s']:>9.1f}{result['work']['cpu_s']:>8.1f}"
        f"{result['work']['wall_s']:>8.1f}{1000 * result['a_row']['cpu_s']:>10.0f}{result['peak_bytes'] / 1e6:>9.0f}"
        f"{'-' if stored is None else f'{stored:,.0f}':>13}  {result['what']}"
    )


def sweep_table(results: Mapping[str, Any]) -> str:
    if "error" in results:
        return f"sweep: missing: {results['error']}"
    lines = [f"sweep of {results['subsets']:,} subsets of {results['size']:,} rows out of {results['rows']:,}"]
    for name, width in results["widths"].items():
        lines.append(
            f"  {name:8}{width['floats']:>5} floats: "
            f"Sweep {width['sweep_s']:8.2f} s, NumPy loop {width['numpy_s']:8.2f} s, "
            f"limit of the memory {width['limit_s']:8.2f} s"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], [int(text) for text in sys.argv[4:]])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--few", type=int, default=8, help="rows that batch sizes are tried on")
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--units", type=int, default=128, help="units of 20 + 5 tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=120.0, help="CPU seconds after which a contender gets fewer rows")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one process may take")
    parser.add_argument("--sweep-rows", type=int, default=1_000_000, help="rows of the sweep's corpus")
    parser.add_argument("--peers-path", action="append", default=[], help="a folder that peers are installed in")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts of names, or sweep")
    parser.add_argument("--resume", action="store_true", help="keep what --out has of a run of the same sizes")
    parser.add_argument("--out", type=Path, help="JSON of everything measured")
    args = parser.parse_args()
    print(
        f"{args.rows} rows of {args.length} tokens, {args.units} units, {args.threads} thread(s); CPU seconds, but wall"
    )
    print(HEADING)
    with tempfile.TemporaryDirectory() as directory:
        run(args, Path(directory))


if __name__ == "__main__":
    main()
