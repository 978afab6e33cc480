"""The decision itself: conversations chosen by each method, the model tuned on them, new questions asked.

    python -m experiments.finetune.decide chats --data ../shared/data
    cd experiments/worlds/work
    grasp build --train further --recipe recipe.yaml --model model --corpus chats.jsonl \
        --targets sciq,arc_easy,hellaswag,documents-units.jsonl \
        --max-length 128 --set model.dtype=bfloat16 --set targets.units_per_target=32 \
        --set features.sample_positions=32768 --out chats
    grasp score chats --target instructions
    grasp select chats --budget 96 --target sciq=1,arc_easy=1,hellaswag=1,instructions=1 --export chosen --format jsonl
    cd ../../.. && python -m experiments.finetune.decide runs --data ../shared/data

1,000 conversations of one turn, drawn from all but those that are questions here. A tenth, 96 rows, is chosen by the
units of `documents` and trained on as in `run`; what is measured is the loss on the units of `instructions`, by which
nobody has chosen, and in how many of the questions the right choice has the lowest loss a token. A seed is an order,
for `random` also a draw. `grasp` is what `grasp select` takes, with the recipe of the trainings (12 steps of 8 rows at
1e-4). Its six seeds were planned before any was seen. LESS is as published: all layers, 8,192 numbers a row, but of
full gradients where its authors take those of an adapter. Every run is a line of `decision.json`, which also has those
of methods and of defaults that were removed since (commit aad4dd71 and before); killed, the same command goes on.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from experiments.finetune.methods import AS_PUBLISHED, method_scores, warmed_up
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import LENGTH, SUBSET_ROWS, row_order, target_settings, write_corpora
from experiments.worlds.training import load_model, prepare_model, train, unit_losses
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.models.build_source import BuildSource
from grasp.models.tokenizer import HfTokenizer
from grasp.seeds import stream
from grasp.select.select import select
from grasp.targets import UnitSet, load_units

CHATS = 1_000
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)
WARM_UP = "chats-warm-up"
CHOOSERS = ("grasp", "random", "bm25", "LESS")
REMOVED = ("grasp, diagonal gradient", "grasp after a warm-up", "token + input + shift + tilt", "token + input + shift")
WITH_MORE = ("grasp", "random", *REMOVED)
KNOWN = (*CHOOSERS, *REMOVED, "shift", "repsim")


def write_chats(data: Path, work: Path) -> None:
    """Conversations as people have them: a thousand that are units of neither environment, and all that there are."""
    answers = {
        json.loads(line)["unit_id"]
        for name in ("documents", "instructions")
        for line in (work / f"{name}-units.jsonl").read_text(encoding="utf-8").splitlines()
    }
    table = pq.read_table(data / "instructions.parquet").to_pylist()
    rows = [row for row in table if row["id"] not in answers and row["response"].strip()]
    drawn = sorted(stream(0, "finetune", "chats").permutation(len(rows))[:CHATS])
    for name, some in (("chats", [rows[k] for k in drawn]), ("all-chats", table)):
        lines = "".join(json.dumps(conversation(row)) + "\n" for row in some)
        write_atomically(work / f"{name}.jsonl", lines.encode())


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """One question and its answer, as chat data has them."""
    question = "\n".join(part for part in (row["instruction"].strip(), row["input"].strip()) if part)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["response"].strip()}]
    return {"id": row["id"], "messages": turns, "source": row["source"], "kind": row["kind"]}


def chosen_rows(artifact: ArtifactReader, method: str, seed: int, work: Path) -> NDArray[np.int64]:
    """`SUBSET_ROWS` rows for all targets alike, by position; LESS looks at the end of a warm-up on 96 of them."""
    if method == "random":
        return stream(seed, "finetune", "decision").permutation(artifact.n_rows)[:SUBSET_ROWS]
    if method == "grasp":
        wanted = dict.fromkeys(artifact.targets, 1.0)
        picked = select(artifact, SUBSET_ROWS, wanted).table["row_id"].to_pylist()
        known = pq.read_table(artifact.rows_path, columns=["row_id"])["row_id"].to_pylist()
        return np.array([known.index(row_id) for row_id in picked])
    score_NE = method_scores(artifact, method, [work / WARM_UP] if method in AS_PUBLISHED else [])
    task_NT = np.stack([score_NE[:, artifact.unit_columns(target)].mean(axis=1) for target in artifact.targets], axis=1)
    effect_N = ((task_NT - task_NT.mean(axis=0)) / task_NT.std(axis=0)).mean(axis=1)
    return np.argsort(-effect_N, kind="stable")[:SUBSET_ROWS]


def trained_on(artifact: ArtifactReader) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Tokens of every row up to its last that carries loss, and the first of these."""
    store = BuildSource(artifact).rows
    rows = store.rows(np.arange(artifact.n_rows))
    marks = [np.flatnonzero(rows.mask(i)) for i in range(artifact.n_rows)]
    return [rows.ids(i)[: mark[-1] + 1] for i, mark in enumerate(marks)], np.array([mark[0] for mark in marks])


class Exam:
    """The units of `instructions`, and the wrong choices of those that are questions."""

    def __init__(self, work: Path, tokenizer: HfTokenizer) -> None:
        units = load_units(target_settings("instructions", work)).units
        self.targets = [unit.target for unit in units]
        self.units = UnitSet(units).tokenize(tokenizer, LENGTH)
        wrong = [
            (e, replace(unit, completion=answer))
            for e, unit in enumerate(units)
            for k, answer in enumerate(unit.choices)
            if k != unit.gold
        ]
        self.of_W = np.array([e for e, _ in wrong])
        self.wrong = UnitSet(tuple(unit for _, unit in wrong)).tokenize(tokenizer, LENGTH)

    def measure(self, model: LlamaForCausalLM) -> dict[str, dict[str, list[float]]]:
        """Loss of every unit, and whether it is below that of each wrong choice, by target."""
        loss_E = unit_losses(model, self.units)
        least_E = np.full(len(loss_E), np.nan)
        np.fmin.at(least_E, self.of_W, unit_losses(model, self.wrong))
        question_indices = np.unique(self.of_W).tolist()
        return {
            "loss": self._by_target({e: round(float(loss), 5) for e, loss in enumerate(loss_E)}),
            "right": self._by_target({e: float(loss_E[e] < least_E[e]) for e in question_indices}),
        }

    def _by_target(self, value_of: Mapping[int, float]) -> dict[str, list[float]]:
        out: dict[str, list[float]] = {}
        for e, value in value_of.items():
            out.setdefault(self.targets[e], []).append(value)
        return out


def fill(artifact: ArtifactReader, work: Path, out: Path, until: float) -> None:
    """Every run that is missing, or has no right answers, method after method."""
    model = load_model(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    exam = Exam(work, HfTokenizer(tokenizer, vocab_size=model.config.vocab_size))
    rows, first_N = trained_on(artifact)
    base = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
    if all(run["method"] != "before" for run in runs):
        runs.append({"method": "before", "seed": 0, **exam.measure(model)})
    for method in CHOOSERS:
        for seed in (*SEEDS, *MORE_SEEDS) if method in WITH_MORE else SEEDS:
            same = [run for run in runs if (run["method"], run["seed"]) == (method, seed)]
            if any("right" in run for run in same):
                continue
            if time.time() > until:
                return
            chosen = set(chosen_rows(artifact, method, seed, work).tolist())
            model.load_state_dict(base)
            order = [int(i) for i in row_order(seed, artifact.n_rows) if int(i) in chosen]
            train(model, rows, first_N, order)
            tokens = int(sum(len(rows[i]) - first_N[i] for i in chosen))
            runs = [run for run in runs if run not in same]
            runs.append({"method": method, "seed": seed, "tokens": tokens, **exam.measure(model)})
            write_atomically(out, (json.dumps({"summary": summary(runs), "runs": runs}, indent=1) + "\n").encode())
            losses = [np.mean(losses) for losses in runs[-1]["loss"].values()]
            print(f"{method} {seed}: {np.mean(losses):.4f}, {time.process_time():.0f} s of CPU so far", flush=True)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and share of right answers by method, each over the seeds that all methods have."""
    out = {}
    for what in ("loss", "right"):
        done = {(run["method"], run["seed"]) for run in runs if what in run}
        seeds = [seed for seed in SEEDS if all((method, seed) in done for method in CHOOSERS)]
        if seeds:
            out[what] = {"seeds": seeds} | side_by_side(runs, seeds, what)
        more = [*SEEDS, *MORE_SEEDS]
        if all((method, seed) in done for method in WITH_MORE for seed in more):
            out[f"{what}, more seeds"] = {"seeds": more} | side_by_side(runs, more, what)
    return out


def side_by_side(runs: list[dict[str, Any]], seeds: list[int], what: str, resamples: int = 2_000) -> dict[str, Any]:
    """Means by method and target, and that of `grasp` less each other's with 95 % intervals over questions (within
    targets) and seeds.
    """
    value_of = {(run["method"], run["seed"]): run[what] for run in runs if what in run}
    before = {target: float(np.mean(values)) for target, values in value_of["before", 0].items()}
    known = [m for m in KNOWN if all((m, seed) in value_of for seed in seeds)]
    value_SE = {
        method: {target: np.array([value_of[method, seed][target] for seed in seeds]) for target in before}
        for method in known
    }
    generator = stream(0, "finetune", "decision", "resamples")
    draws = [
        (
            generator.integers(len(seeds), size=len(seeds)),
            {
                t: generator.integers(value_SN.shape[1], size=value_SN.shape[1])
                for t, value_SN in value_SE["grasp"].items()
            },
        )
        for _ in range(resamples)
    ]
    out = {"before": _means(before)}
    for method in known:
        out[method] = _means({target: float(value_SN.mean()) for target, value_SN in value_SE[method].items()})
        if method != "grasp":
            apart = {target: value_SE["grasp"][target] - value_SN for target, value_SN in value_SE[method].items()}
            out[method]["grasp_less_this"] = _interval(apart, draws)
    return out


def _means(of_target: Mapping[str, float]) -> dict[str, Any]:
    mean = round(float(np.mean(list(of_target.values()))), 4)
    return {"mean": mean, "of_target": {target: round(value, 4) for target, value in of_target.items()}}


def _interval(apart: Mapping[str, F64], draws: list[Any]) -> list[float]:
    value = float(np.mean([difference.mean() for difference in apart.values()]))
    resampled = [
        np.mean([difference[np.ix_(s, e[target])].mean() for target, difference in apart.items()]) for s, e in draws
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return [round(float(number), 4) for number in (value, low, high)]


def main() -> None:
    """Parse, and one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("chats", "warm-up", "runs"))
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, conversations, artifact.")
    parser.add_argument("--out", type=Path, default=FOLDER / "decision.json", help="What came out.")
    parser.add_argument("--minutes", type=float, default=1e9, help="Begin no run after so long.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    prepare_model(args.work / "model")
    write_corpora(args.data, args.work, AutoTokenizer.from_pretrained(args.work / "model"))
    if args.step == "chats":
        write_chats(args.data, args.work)
        return
    artifact = ArtifactReader.open(args.work / "chats")
    if args.step == "warm-up":
        warmed_up(args.work / WARM_UP, args.work / "model", *trained_on(artifact))
    else:
        fill(artifact, args.work, args.out, time.time() + 60 * args.minutes)


if __name__ == "__main__":
    main()
