"""Time and memory of predict, slices, select, score, mix and report as the corpus, the units and the subsets grow.

    python benchmarks/growth.py --out bench-out/growth.json

Synthetic artifacts are written through the package's own writer, float16 on disk, up to 5 M rows: numbers drawn at
random, which cost what real ones cost. Each question is asked in a process of its own, so that its peak memory is its
own; the process opens the artifact as the command line does. With `--again` it asks once more, as who holds an opened
artifact does: `again_cpu_s` is what that takes. One of N, E, B grows at a time over two decades. Slopes
are of log CPU seconds against log size, beyond what the same question takes where there is next to nothing to do
(START_ROWS rows, 8 units, 4 subsets): imports do not grow. Where subsets grow it is what four subsets of the same
artifact take: reading it does not grow either.
Shape letters: B subsets, N rows, E units.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from memory import peak_bytes  # the file beside this one

from grasp.api.predict import prediction_table
from grasp.api.score import score
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol, parse_protocol
from grasp.predict.slices import label_slices, slice_effects
from grasp.report.build_report import report
from grasp.select.mix import mix
from grasp.select.select import select

SHARD_ROWS, LABELS = 16_384, 24
SUBSET_ROWS = 1_000
START_ROWS, START_UNITS, START_SUBSETS = 2_000, 8, 4


def write_artifact(path: Path, n_rows: int, n_units: int, n_targets: int = 5) -> Path:
    """An artifact of random numbers; the same shard of them over and over, which no reader can tell."""
    rng = np.random.default_rng(0)
    widths = {
        "hidden_sketch": 64,
        "residual_sketch": 64,
        "relevance_output_layer": n_units,
        "relevance_embedding": n_units,
    }
    shard = {name: (rng.standard_normal((SHARD_ROWS, width)) / 8).astype(np.float32) for name, width in widths.items()}
    specs = {name: ArraySpec(width, "none", "none") for name, width in widths.items()}
    with lock_artifact(path):
        writer = ArtifactWriter.open(
            path, identity={"seed": 0}, n_rows=n_rows, shard_rows=SHARD_ROWS, arrays=specs, dtype="float16"
        )
        for k in range(writer.grid.n_shards):
            start, stop = writer.grid.bounds(k)
            arrays = {name: values[: stop - start] for name, values in shard.items()}
            sums = {f"{name}.total": values.sum(axis=0, dtype=np.float64) for name, values in arrays.items()}
            writer.write_shard(k, arrays, rows_table(start, stop), sums)
        units = pa.table(
            {
                "unit_id": [str(e) for e in range(n_units)],
                "target": [f"task{e * n_targets // n_units}" for e in range(n_units)],
                "prompt": ["A question?"] * n_units,
                "completion": [" An answer."] * n_units,
            }
        )
        settings = {"features": {"kernels": ["output_layer", "embedding"]}}
        writer.finish(manifest={"settings": settings}, moments={}, units=units)
    return path


def rows_table(start: int, stop: int) -> pa.Table:
    index = np.arange(start, stop)
    return pa.table(
        {
            "row_id": [f"row-{i}" for i in index],
            "doc_id": [f"doc-{i}" for i in index],
            "n_tokens": pa.array(np.full(len(index), 2048), pa.int32()),
            "loss": pa.array(np.zeros(len(index)), pa.float32()),
            "snippet": [""] * len(index),
            "topic": [f"topic {i % LABELS}" for i in index],
        }
    )


def geometric() -> ScoringProtocol:
    """The protocol that ships with a penalty on redundancy, so that sketches are read."""
    return parse_protocol(DEFAULT_PROTOCOL.model_dump() | {"components": {"joint.pair": -0.1}}, "growth")


def ask_predict(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    family = parse_family(f"uniform:{SUBSET_ROWS / artifact.n_rows}")
    blocks = family.draw(n_subsets, n_rows=artifact.n_rows, seed=0, purpose="growth")
    for batch in prediction_table(Predictor.from_artifact(artifact, protocol), artifact, blocks):
        assert batch.num_rows


def ask_halves(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    blocks = parse_family("uniform:0.5").draw(n_subsets, n_rows=artifact.n_rows, seed=0, purpose="growth")
    for batch in prediction_table(Predictor.from_artifact(artifact, protocol), artifact, blocks):
        assert batch.num_rows


def ask_slices(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    labels = LabelTable(artifact.rows_path).column("topic")
    slice_effects(Predictor.from_artifact(artifact, protocol), label_slices(labels, row_tokens(artifact)))
    blocks = parse_family("groups:topic").draw(
        n_subsets, n_rows=artifact.n_rows, labels=labels, seed=0, purpose="growth"
    )
    for batch in prediction_table(Predictor.from_artifact(artifact, protocol), artifact, blocks):
        assert batch.num_rows


def ask_select(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    select(artifact, "10%", "task0", protocol=protocol)


def ask_select_all(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    select(artifact, "10%", list(artifact.targets), protocol=protocol)


def ask_score(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    score(artifact, "task0", protocol=protocol, out=artifact.path.with_name("rows.parquet"))


def ask_mix(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    mix(artifact, "topic", list(artifact.targets), protocol=protocol)


def ask_report(artifact: ArtifactReader, n_subsets: int, protocol: ScoringProtocol) -> None:
    report(artifact, artifact.path.with_name("report.html"), by="topic", protocol=protocol, explain=0)


QUESTIONS: dict[str, Callable[[ArtifactReader, int, ScoringProtocol], None]] = {
    "predict": ask_predict,
    "predict halves": ask_halves,
    "slices": ask_slices,
    "select": ask_select,
    "select for all targets": ask_select_all,
    "score": ask_score,
    "mix": ask_mix,
    "report": ask_report,
}


def _measured(question: str, path: Path, n_subsets: int, geometry: bool, repeat: bool, queue: Any) -> None:
    before, protocol = peak_bytes(), geometric() if geometry else DEFAULT_PROTOCOL
    begun, cpu = time.perf_counter(), time.process_time()
    artifact = ArtifactReader.open(path)
    QUESTIONS[question](artifact, n_subsets, protocol)
    result = {"wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
    if repeat:
        cpu = time.process_time()
        QUESTIONS[question](artifact, n_subsets, protocol)
        result["again_cpu_s"] = time.process_time() - cpu
    queue.put(result | {"peak_bytes": peak_bytes(), "start_bytes": before})


def ask(question: str, path: Path, n_subsets: int, *, geometry: bool = False, repeat: bool = False) -> dict[str, float]:
    """Seconds and peak memory of one question, asked in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(question, path, n_subsets, geometry, repeat, queue))
    process.start()
    while queue.empty():
        process.join(0.2)
        if process.exitcode:
            sys.exit(f"growth: {question} ended with exit code {process.exitcode}")
    result: dict[str, float] = queue.get()
    process.join()
    return result


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Least-squares slope of log seconds against log size; none where a size takes no longer than the start."""
    if min(seconds) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def summed_up(
    name: str, question: str, sizes: Sequence[int], measurements: Sequence[dict[str, float]], start: float
) -> Any:
    """The points with their slope beyond the start, over both decades and over the larger one."""
    beyond = [measurement["cpu_s"] - start for measurement in measurements]
    whole, last = slope(sizes, beyond), slope(sizes[-2:], beyond[-2:])
    shown = ["hidden by the start" if slope is None else f"{slope:.2f}" for slope in (whole, last)]
    print(f"{name}, {question}: start {start:.2f} CPU s, slope {shown[0]}, over the larger decade {shown[1]}")
    points = [{"size": size, **measurement} for size, measurement in zip(sizes, measurements, strict=True)]
    return {
        "over": name,
        "question": question,
        "start_cpu_s": start,
        "points": points,
        "slope": whole,
        "slope_last": last,
    }


def sweep(
    name: str,
    sizes: Sequence[int],
    question: str,
    point: Callable[[int], tuple[Path, int]],
    start: float,
    *,
    geometry: bool,
) -> dict[str, Any]:
    measurements = []
    for size in sizes:
        path, n_subsets = point(size)
        measurements.append(ask(question, path, n_subsets, geometry=geometry))
        say(name, question, size, measurements[-1])
    return summed_up(name, question, sizes, measurements, start)


def say(name: str, question: str, size: int, result: dict[str, float]) -> None:
    repeated = f" {result['again_cpu_s']:8.2f} again" if "again_cpu_s" in result else ""
    peak = f"{result['peak_bytes'] / 1e6:8.0f} MB"
    print(f"{name}, {question}: {size:>10,}  {result['cpu_s']:8.2f} CPU s{repeated}  {peak}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 500_000, 5_000_000])
    parser.add_argument("--units", type=int, nargs="*", default=[64, 640, 6_400], help="at --few-rows rows")
    parser.add_argument("--subsets", type=int, nargs="*", default=[1_000, 10_000, 100_000], help="at --few-rows rows")
    parser.add_argument("--few-rows", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=256, help="units while rows grow")
    parser.add_argument("--targets", type=int, default=5, help="that the units belong to while rows grow")
    parser.add_argument("--few-subsets", type=int, default=256, help="subsets while rows and units grow")
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--again", action="store_true", help="ask once more of the opened artifact, while rows grow")
    parser.add_argument("--geometry", action="store_true", help="score by sketches as well")
    parser.add_argument("--scratch", type=Path, help="where artifacts are written; none: a temporary directory")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        result = measure(Path(directory), args)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"geometry": args.geometry, "results": result}, indent=1) + "\n", encoding="utf-8"
        )


def measure(root: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows, then units, then subsets; one artifact on the disk at a time where it is large."""
    results: list[dict[str, Any]] = []
    few = {"geometry": args.geometry}
    path = write_artifact(root / "start", START_ROWS, START_UNITS)
    start = {question: ask(question, path, START_SUBSETS, **few)["cpu_s"] for question in args.questions}
    points: dict[str, list[dict[str, float]]] = {question: [] for question in args.questions}
    for n_rows in args.rows:
        path = write_artifact(root / "rows", n_rows, args.width, args.targets)
        for question in args.questions:
            points[question].append(ask(question, path, args.few_subsets, repeat=args.again, **few))
            say("rows", question, n_rows, points[question][-1])
        shutil.rmtree(path)
    results += [
        summed_up("rows", question, args.rows, measurements, start[question])
        for question, measurements in points.items()
    ]
    if args.units:

        def by_units(size: int) -> tuple[Path, int]:
            shutil.rmtree(root / "units", ignore_errors=True)
            return write_artifact(root / "units", args.few_rows, size), args.few_subsets

        results.append(sweep("units", args.units, "predict", by_units, start["predict"], **few))
    if args.subsets:
        path = write_artifact(root / "subsets", args.few_rows, args.width)
        for question in ("predict", "slices"):
            bound = ask(question, path, START_SUBSETS, **few)["cpu_s"]  # reading the artifact does not grow with B
            results.append(sweep("subsets", args.subsets, question, lambda size: (path, size), bound, **few))
    return results


if __name__ == "__main__":
    main()
