"""Does what a monitor measures after 20 % of a training agree with trainings without a source? What does it cost?

    python -m experiments.monitor.run --data DATA --model SMOLLM2 --work WORK --out experiments/monitor/results.json

`--data` is the folder of instructions.parquet. Every part is written when it is finished; a second call continues.

SmolLM2-135M is tuned with LoRA by TRL's SFTTrainer on four sources, of which the last is noise: sums of gsm8k, medical
questions, programs, and roleplays whose words are shuffled. Targets are other questions of the first three. The
overhead is measured with a model of 0.4 M parameters, trained in full with the default `every`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from peft import LoraConfig
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

import grasp
from grasp.files import write_atomically
from grasp.models.causal_lm import restored_modes
from grasp.models.tokenizer import train_tokenizer
from grasp.monitor.effects import load_questions
from grasp.monitor.record import MonitorRecord
from grasp.seeds import stream

SOURCES = {"sums": "gsm8k:train", "medicine": "MedQuAD", "programs": "GPTeacher:codegen", "noise": "GPTeacher:roleplay"}
TARGETS = ("sums", "medicine", "programs")
STEPS, BATCH, EARLY = 30, 8, 6  # effects are measured after 20 % of the training, and at its end
MAX_LENGTH = 48  # tokens of a row
PROMPT_CHARS, ANSWER_CHARS = 160, 200  # longer prompts are left out, longer answers are cut
QUESTIONS, ROWS = 32, 160  # of each target; of each source, of which a training draws BATCH * STEPS / 4 at least
REPEATS, SMALL_STEPS = 3, 600
RESAMPLES = 1_000
PLAIN: dict[str, Any] = {  # settings of every training
    "per_device_train_batch_size": BATCH,
    "max_length": MAX_LENGTH,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


class Late(TrainerCallback):
    """Measure at the end only, after the first measurement."""

    def __init__(self, monitor: grasp.Monitor) -> None:
        self.monitor = monitor

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == EARLY:
            self.monitor.every = STEPS


def prepare(data: Path, work: Path) -> dict[str, list[dict[str, str]]]:
    """Write the questions of the targets, and return the rows of the sources."""
    table = pq.read_table(data / "instructions.parquet").to_pylist()
    rows = {}
    for name, source in SOURCES.items():
        pairs = [
            {
                "prompt": f"Question: {row['instruction']}\nAnswer:",
                "completion": f" {row['response'][:ANSWER_CHARS]}",
                "source": name,
            }
            for row in table
            if row["source"] == source and len(row["instruction"]) < PROMPT_CHARS
        ]
        draws = stream(0, "monitor", name)
        pairs = [pairs[k] for k in draws.permutation(len(pairs))]
        if name in TARGETS:
            lines = [{key: row[key] for key in ("prompt", "completion")} for row in pairs[:QUESTIONS]]
            (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            pairs = pairs[QUESTIONS:]
        else:
            for row in pairs:
                row["completion"] = " " + " ".join(draws.permutation(row["completion"].split()))
        rows[name] = pairs[:ROWS]
    return rows


def train(args: argparse.Namespace, rows: dict[str, list[dict[str, str]]], without: str | None) -> dict[str, Any]:
    """Train on all sources with a monitor, or without one of them; return the losses of each question."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    sources = [name for name in SOURCES if name != without]
    share = BATCH * STEPS // len(sources)
    data = [row for name in sources for row in (rows[name] * 2)[: share + 1]]
    targets = [str(args.work / f"{name}.jsonl") for name in TARGETS]
    monitor = grasp.Monitor("source", targets, every=EARLY, strict=True)
    config = SFTConfig(
        output_dir=str(args.work / f"without-{without}"),
        max_steps=STEPS,
        learning_rate=5e-4,
        logging_steps=1,
        bf16=True,
        **PLAIN,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(data).shuffle(seed=0),
        processing_class=tokenizer,
        callbacks=[] if without else [monitor, Late(monitor)],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    return {
        "cpu_seconds": round(seconds, 1),
        "rows": len(data),
        "losses": question_losses(trainer.model, tokenizer, targets),
    } | ({} if without else {"monitor_seconds": round(monitor.seconds, 1)})


def question_losses(model: Any, tokenizer: Any, targets: list[str]) -> dict[str, list[list[float]]]:
    """Return tokens and sum of losses of each question, by target."""
    losses: dict[str, list[list[float]]] = {}
    with restored_modes(model), torch.no_grad():
        model.eval()
        for target, questions in load_questions(targets, tokenizer, model.config.vocab_size).items():
            for (question,), _ in questions:
                ids = torch.from_numpy(question.ids)[None]
                scored = model(input_ids=ids).logits[0, :-1][torch.from_numpy(question.has_loss[1:])].double()
                labels = ids[0][torch.from_numpy(question.has_loss)]
                loss = torch.nn.functional.cross_entropy(scored, labels, reduction="sum")
                losses.setdefault(target, []).append([len(labels), float(loss)])
    return losses


def compare(work: Path, trained: dict[str, Any]) -> dict[str, Any]:
    """Correlate the effects after 20 % of the training with the losses of trainings without a source."""
    record = MonitorRecord.read(work / "without-None")
    draws = np.random.default_rng(0)
    effects = {
        step: {(row["target"], row["source"]): row for row in record.select("effect") if row["step"] == step}
        for step in (EARLY, STEPS)
    }
    pairs = list(effects[EARLY])
    tables = {name: {t: np.array(values) for t, values in run["losses"].items()} for name, run in trained.items()}

    def changes(index: dict[str, np.ndarray]) -> np.ndarray:
        """Return what a source contributes: the loss without it minus that with all, for each pair."""
        means = {
            name: {t: np.divide(*table[t][index[t]].sum(axis=0)[::-1]) for t in table} for name, table in tables.items()
        }
        return np.array([means[source][target] - means["None"][target] for target, source in pairs])

    whole = {t: np.arange(QUESTIONS) for t in TARGETS}
    contribution = changes(whole)
    correlations, result = {}, []
    for step, measured in effects.items():
        helps = np.array([-measured[pair]["value"] for pair in pairs])
        width = np.array([measured[pair]["high"] - measured[pair]["value"] for pair in pairs]) / 3.18  # of t, 3 df
        resampled = [
            spearmanr(
                helps + width * draws.standard_t(3, len(pairs)),
                changes({t: draws.integers(QUESTIONS, size=QUESTIONS) for t in TARGETS}),
            ).statistic
            for _ in range(RESAMPLES)
        ]
        interval = np.quantile(resampled, (0.025, 0.975)).round(2).tolist()
        of_targets = {
            t: round(
                float(
                    spearmanr(
                        *zip(
                            *[(h, c) for (pt, _), h, c in zip(pairs, helps, contribution, strict=True) if pt == t],
                            strict=True,
                        )
                    ).statistic
                ),
                2,
            )
            for t in TARGETS
        }
        correlations[step] = {
            "spearman": round(float(spearmanr(helps, contribution).statistic), 2),
            "interval": interval,
            "by_target": of_targets,
        }
    for pair, value in zip(pairs, contribution.tolist(), strict=True):
        row = effects[EARLY][pair]
        line = {"target": pair[0], "source": pair[1], "contribution": round(value, 4)}
        result.append(line | {name: round(row[name], 6) for name in ("value", "low", "high")})
    checks = {
        target: {
            measure: round(sum(row["value"] for row in record.select(measure, target=target)), 4)
            for measure in ("predicted", "measured")
        }
        for target in TARGETS
    }
    return {"pairs": result, "correlations": correlations, "checks": checks}


def overhead(args: argparse.Namespace, rows: dict[str, list[dict[str, str]]], repeat: int) -> list[dict[str, Any]]:
    """Return CPU seconds of a small training without and with a monitor."""
    every_row, lines = [row for source in rows.values() for row in source], []
    tokenizer = train_tokenizer((row["prompt"] + row["completion"] for row in every_row), vocab_size=2_048)
    data = Dataset.from_list(every_row)
    for name, monitor in (("without", None), ("with", grasp.Monitor("source", [str(args.work / "sums.jsonl")]))):
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
        config = SFTConfig(
            output_dir=str(args.work / f"small-{name}-{repeat}"),
            max_steps=SMALL_STEPS,
            bf16=False,
            **PLAIN,
        )
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[monitor] if monitor else [],
        )
        started = time.process_time()
        trainer.train()
        lines.append({"monitor": name, "cpu_seconds": round(time.process_time() - started, 1)})
        if monitor:
            steps = sorted({row["step"] for row in monitor.record.select("effect")})
            lines[-1] |= {"in_monitor": round(monitor.seconds, 1), "measured_at": steps}
    return lines


def main() -> None:
    """Run the parts that the JSON does not have."""
    parser = argparse.ArgumentParser(prog="python -m experiments.monitor.run", description=__doc__.splitlines()[0])
    for name in ("data", "model", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    rows = prepare(args.data, args.work)
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"trained": {}}

    def save() -> None:
        write_atomically(args.out, (json.dumps(results, indent=1) + "\n").encode())

    for without in (None, *SOURCES):
        if str(without) not in results["trained"]:
            results["trained"][str(without)] = train(args, rows, without)
            save()
    results["comparison"] = compare(args.work, results["trained"])
    save()
    timings = results.setdefault("overhead", [])
    for repeat in range(len(timings) // 2, REPEATS):
        timings += overhead(args, rows, repeat)
        save()
    print(json.dumps(results["comparison"], indent=1))


if __name__ == "__main__":
    main()
