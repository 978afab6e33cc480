"""Truth at the paper's size: subsets of 12 M tokens trained from scratch, an artifact, and long fine-tunings, on a GPU.

    python -m experiments.large.run prepare --data ../shared/data --work bench-out/large     # CPU, some minutes
    python -m experiments.large.run train --work bench-out/large --minutes 14 --out OUT      # GPU; again to go on
    python -m experiments.large.run prepare --data ../shared/data --work bench-out/cpu --size cpu
    python -m experiments.large.run train --work bench-out/cpu --minutes 240 --out OUT --size cpu      # 5 M, on a CPU
    python -m experiments.large.run prepare --data ../shared/data --work bench-out/proof --size proof
    python -m experiments.large.run train --work bench-out/proof --minutes 30 --out OUT --size proof    # of the script

`prepare` writes token ids (uint16, under 30 MB) and a tokenizer of 16,384 tokens. `train` prints its plan and works
until the time is up, in the order in which results are useful: the reference and one seed of every subset, the artifact
and its evaluation, fine-tunings of 60, 192 and 600 steps, second seeds. Every run is written at once; the same command
goes on after an interruption. OUT receives the environments and the evaluation, without models.

The model of `--size gpu`, the default, has 20 M parameters: ten blocks as in the paper, but 384 wide, so that a run
reads a fifth of its parameters in tokens and 25 runs fit a lease. That of `--size cpu` has 5 M: the largest of which a
core with bfloat16 products trains a run in some five minutes.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from experiments.one_line_errors import in_one_line
from grasp.models.tokenizer import train_tokenizer
from grasp.runs.retrained import MARKER, RUNS_DIRECTORY
from grasp.seeds import stream
from grasp.training.recipe import named_recipe

TASKS = ["sciq", "openbookqa", "commonsense_qa", "basic_skills_common_knowledge", "basic_skills_logical_reasoning"]
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "tokens": 12_000_000, "vocabulary": 16_384, "length": 256, "units": 128, "subsets": 24, "tuning_subsets": 24,
        "tuning_steps": (60, 192, 600), "tuning_rows": 3_000, "recipe": "paper-50m",
        "shape": {"vocab_size": 16_384, "hidden": 384, "intermediate": 768, "layers": 10, "heads": 6, "tied": True},
        "overrides": {"steps": 256, "batch_rows": 64, "micro_rows": 64, "learning_rate": 1.5e-3, "warmup_steps": 20},
    },
    "cpu": {
        "tokens": 2_200_000, "vocabulary": 4_096, "length": 256, "units": 128, "subsets": 24, "tuning_subsets": 0,
        "tuning_steps": (), "tuning_rows": 0, "recipe": "paper-50m",
        "shape": {"vocab_size": 4_096, "hidden": 256, "intermediate": 768, "layers": 5, "heads": 4, "tied": True},
        "overrides": {"steps": 145, "batch_rows": 32, "micro_rows": 32, "learning_rate": 2e-3, "warmup_steps": 15,
                      "cpu_autocast": True},
    },
    "proof": {
        "tokens": 120_000, "vocabulary": 1_024, "length": 64, "units": 8, "subsets": 4, "tuning_subsets": 2,
        "tuning_steps": (3,), "tuning_rows": 200, "recipe": "tiny",
        "shape": {"vocab_size": 1_024, "hidden": 48, "intermediate": 96, "layers": 2, "heads": 2},
        "overrides": {"steps": 12, "batch_rows": 16, "warmup_steps": 2},
    },
}  # fmt: skip


def prepare(data: Path, work: Path, sizes: dict[str, Any]) -> None:
    """Write the corpus as token ids with its labels, the tokenizer, and the results of runs that are stored here."""
    work.mkdir(parents=True, exist_ok=True)
    tables = [pq.read_table(data / f"{name}.parquet") for name in ("pool", "cc_weborganizer")]
    texts = [text or "" for table in tables for text in table["text"].to_pylist()]
    sources = [
        value if name == "source" else f"web: {value}"
        for table, name in zip(tables, ("source", "topic"), strict=True)
        for value in table[name].to_pylist()
    ]
    order = stream(0, "large", "documents").permutation(len(texts))
    tokenizer = train_tokenizer((texts[i] for i in order), vocab_size=sizes["vocabulary"])
    tokenizer.save_pretrained(work / "tokenizer")
    ids, labels, count = [], [], 0
    for i in order:
        if count >= sizes["tokens"]:
            break
        document = tokenizer(texts[i])["input_ids"]
        ids.append(np.array(document, dtype=np.uint16))
        labels.append(sources[i])
        count += len(document)
    table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.uint16())), "source": labels})
    pq.write_table(table, work / "corpus.parquet", compression="zstd", compression_level=9)
    pq.write_table(table.slice(0, sizes["tuning_rows"]), work / "tuning.parquet", compression="zstd")
    size = (work / "corpus.parquet").stat().st_size / 1e6
    digest = hashlib.blake2b(json.dumps(sizes, sort_keys=True).encode(), digest_size=4)  # of what the runs depend on
    for document, label in zip(ids, labels, strict=True):
        digest.update(document.tobytes() + label.encode())
    stored = sorted((Path(__file__).parent / f"runs-{digest.hexdigest()}").glob("*.parquet"))
    if stored and not (work / "scratch").exists():  # retraining goes on after them
        (work / "scratch" / RUNS_DIRECTORY).mkdir(parents=True)
        (work / "scratch" / MARKER).touch()
        for path in stored:
            shutil.copy2(path, work / "scratch" / RUNS_DIRECTORY)
    print(
        f"{work}: {len(ids):,} documents, {count:,} tokens, {size:.1f} MB; {len(stored)} runs are trained already",
        flush=True,
    )


def plan(work: Path, sizes: dict[str, Any]) -> list[tuple[str, float, list[str]]]:
    """Return the steps: name, the part of the time after which it is interrupted, and the command."""
    corpus = {"path": str(work / "corpus.parquet"), "max_length": sizes["length"]}
    targets = {"names": TASKS, "units_per_target": sizes["units"], "max_length": sizes["length"]}
    shape = named_recipe(sizes["recipe"]).shape.model_dump() | sizes["shape"] | {"context": sizes["length"]}
    common = {"corpus": corpus, "targets": targets, "tokenizer": str(work / "tokenizer"), "losses": ["completion"]}
    scratch = common | {"recipe": sizes["recipe"], "overrides": sizes["overrides"] | {"shape": shape}}
    scratch |= {"family": "mixture:source", "n_subsets": sizes["subsets"], "role": "held-out"}
    reference = work / "scratch/reference/seed-0"
    art = work / "art"
    building = ["build", "--train", "new", "--model", str(reference), "--corpus", corpus["path"], "--untrained"]
    building += ["--targets", ",".join(TASKS), "--max-length", str(sizes["length"]), "--out", str(art)]
    building += ["--set", f"targets.units_per_target={sizes['units']}"]
    evaluating = ["evaluate", str(art), "--runs", str(work / "scratch"), "--json", str(work / "evaluation.json")]
    steps: list[tuple[str, float, list[str]]] = [
        ("one seed of every subset", 0.55, retraining(work, "scratch", scratch | {"seeds": [0]})),
        ("the artifact", 0.65, building),
        ("its evaluation", 0.68, evaluating),
    ]
    for k, n in enumerate(sizes["tuning_steps"]):
        tuning = common | {"train": "further", "model": {"path": str(reference)}, "family": "mixture:source"}
        tuning |= {"corpus": corpus | {"path": str(work / "tuning.parquet")}, "n_subsets": sizes["tuning_subsets"]}
        tuning |= {"fine_tuning": {"max_steps": n, "per_device_train_batch_size": 16, "learning_rate": 1e-4}}
        tuning = {key: value for key, value in tuning.items() if key != "tokenizer"} | {
            "seeds": [0],
            "role": "held-out",
        }
        end = 0.68 + 0.2 * (k + 1) / len(sizes["tuning_steps"])
        steps.append((f"fine-tunings of {n} steps", end, retraining(work, f"tuning-{n}", tuning)))
    return [*steps, ("second seeds", 1.0, retraining(work, "scratch", scratch | {"seeds": [0, 1]}))]


def retraining(work: Path, name: str, settings: dict[str, Any]) -> list[str]:
    """Write the settings of an environment and return the command that trains it."""
    seeds = len(settings["seeds"])
    path = work / f"{name}-{seeds}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return ["retrain", "--config", str(path), "--out", str(work / name)]


def train(work: Path, minutes: float, out: Path, sizes: dict[str, Any]) -> None:
    """Work through the plan until the time is up, and copy what comes back."""
    began, seconds = time.monotonic(), 60 * minutes
    steps = plan(work, sizes)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{device}, {minutes:g} minutes: " + "; ".join(f"{name} until {end:.0%}" for name, end, _ in steps), flush=True
    )
    log = {}
    for name, end, command in steps:
        left = began + end * seconds - time.monotonic()
        if left < min(10.0, 0.01 * seconds):
            continue
        print(f"--- {name}: at most {left / 60:.1f} minutes", flush=True)
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "grasp", *command])
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # resumable; an interrupt is ignored by what a shell starts in the background
            process.wait()
        log[name] = {"seconds": round(time.monotonic() - started, 1), "exit": process.returncode}
        keep(work, out, {"device": device, "steps": log})
    print(json.dumps(log, indent=1), flush=True)


def keep(work: Path, out: Path, log: dict[str, Any]) -> None:
    """Copy environments without models, and the evaluation."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    for path in [*work.glob("tuning-*/"), work / "scratch"]:
        for file in path.glob("**/*") if path.is_dir() else ():
            parts = file.relative_to(work).parts
            if file.suffix in (".json", ".parquet", ".yaml") and not {"reference", "work", "tokens"} & {*parts}:
                target = out / file.relative_to(work)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
    if (work / "evaluation.json").exists():
        shutil.copy2(work / "evaluation.json", out)


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, prepare or train."""
    parser = argparse.ArgumentParser(prog="python -m experiments.large.run", description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("prepare", "train"))
    parser.add_argument("--data", type=Path, help="Folder of pool.parquet and cc_weborganizer.parquet; to prepare.")
    parser.add_argument("--work", type=Path, required=True, help="Corpus, models and runs.")
    parser.add_argument("--out", type=Path, help="What comes back; to train.")
    parser.add_argument("--minutes", type=float, default=14.0, help="Time for all steps.")
    parser.add_argument("--size", choices=SIZES, default="gpu", help="`proof` proves the script on a CPU in minutes.")
    args = parser.parse_args(arguments)
    if args.step == "prepare":
        prepare(args.data, args.work, SIZES[args.size])
    else:
        train(args.work, args.minutes, args.out, SIZES[args.size])


if __name__ == "__main__":
    main()
