"""Make a pool of preference pairs and held-out questions from multiple-choice tasks.

    python -m experiments.preference.prepare --out bench-out/preference

A pair is the right answer against a wrong one, which is drawn. Questions of the pool and of the targets are disjoint.
"""

import argparse
import json
from pathlib import Path

from grasp.seeds import stream
from grasp.settings import TargetSettings
from grasp.targets import load_units

TASKS = ("arc_easy", "openbookqa", "commonsense_qa", "piqa", "socialiqa", "hellaswag")
PAIRS, QUESTIONS = 80, 96  # of each task
LONGEST = 320  # characters of a prompt and its longest answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    pairs = []
    for task in TASKS:
        units = load_units(TargetSettings(names=(task,), units_per_target=None)).units
        short = [unit for unit in units if len(unit.prompt) + max(map(len, unit.choices)) <= LONGEST]
        for unit in short[:PAIRS]:
            assert unit.gold is not None
            wrong = [text for k, text in enumerate(unit.choices) if k != unit.gold and text != unit.completion]
            rejected = wrong[stream(0, "preference", unit.unit_id).integers(len(wrong))]
            record = {"row_id": unit.unit_id, "task": task, "prompt": unit.prompt}
            pairs.append(record | {"chosen": unit.completion, "rejected": rejected})
        held_out = [
            {"task": task, "unit_id": unit.unit_id, "prompt": unit.prompt, "completion": unit.completion}
            | {"choices": list(unit.choices), "gold": unit.gold}
            for unit in short[PAIRS : PAIRS + QUESTIONS]
        ]
        (out / f"{task}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in held_out))
    (out / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


if __name__ == "__main__":
    main()
