"""At which state of a training, and with which horizon, the kernel `gradient` predicts its runs best.

    python -m experiments.finetune.states small-12 small-48 small-192 small-48-slow documents lengths \\
        --data ../shared/data --out experiments/finetune/states.json
    python -m experiments.finetune.states contrasts longer-60 --states half \\
        --data ../shared/data --out experiments/finetune/states.json
    python -m experiments.finetune.states documents-lora --states start \\
        --data ../shared/data --out experiments/finetune/states.json
    python -m experiments.finetune.states instructions --data ../shared/data --out experiments/finetune/states-held.json

States: `start`, the model before the training; `half`, after half of the steps of one training by the recipe, on rows
that are drawn from the whole corpus. Horizons: the constant c, by which the sum of the learning rates is multiplied.
Weights: of output_layer and embedding beside gradient, `rule` as built in. Killed, a build goes on; the JSON is written
after each world.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetune.methods import warmed_up
from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import artifact_of, relevance, shares
from experiments.worlds.evaluate import Method, compare, noise
from experiments.worlds.prepare import environments_parser, model_directory, prepared, write_reports
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, Name, open_corpus
from grasp.arrays import F64
from grasp.kernel_table import BuiltRule
from grasp.kernels.gradient import HORIZON
from grasp.models.tokenizer import HfTokenizer
from grasp.runs.retrained import RetrainedRuns

KERNELS = ("gradient", "output_layer", "embedding")
WEIGHTS = (0.0, 0.03, 0.06, 0.125, 0.25, 0.35, 0.5, 0.7, 1.0)  # of output_layer and embedding, beside gradient


def model_at(state: str, name: Name, work: Path, reader: HfTokenizer) -> Path:
    """The checkpoint of a state; that of `half` is trained once."""
    start = model_directory(name, work)
    if state == "start":
        return start
    recipe, corpus = ENVIRONMENTS[name].recipe, open_corpus(name, work, reader)
    half = replace(recipe, stop=(recipe.stop or recipe.steps) // 2)
    return warmed_up(work / f"{name}-half", start, corpus.rows, corpus.first_N, half)


def report(states: list[str], horizons: list[float], name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Every state and horizon against the runs that there are."""
    began = time.process_time()
    _, reader = prepared(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    methods: dict[str, Method] = {}
    recipe = ENVIRONMENTS[name].recipe
    rule = BuiltRule.of(KERNELS, 0.0 if recipe.lora_rank else recipe.learning_rate_sum).weights
    for state in states:
        for horizon in horizons:
            features = {"kernels": KERNELS, "learning_rate_sum": recipe.learning_rate_sum * horizon / HORIZON}
            directory = model_at(state, name, work, reader)
            artifact = artifact_of(name, work, directory, reader, features, 4096, f"{state}-{horizon:g}")
            columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
            assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
            scores: tuple[F64, ...] = tuple(relevance(artifact, kernel, columns) for kernel in KERNELS)
            for label, weight in [
                ("rule", rule.get("embedding", 0.0)),
                *((f"{weight:g}", weight) for weight in WEIGHTS),
            ]:
                method = Method(scores, (1.0, 0.25, 0.25), (1.0, weight, weight)) if weight else Method(scores[:1])
                methods[f"{state}, c = {horizon:g}, weight {label}"] = method
    share_BN = shares(environment, open_corpus(name, work, reader).store, utilities)
    print(f"{name}: {len(share_BN)} subsets", flush=True)
    base = next(iter(methods))
    return {
        "environment": name,
        "role": environment.role,
        "subsets": len(share_BN),
        "noise": noise(environment, utilities),
        "base": base,
        "learning_rate_sum": recipe.learning_rate_sum,
        "weight": rule.get("embedding", 0.0),
        "cpu_seconds": round(time.process_time() - began),
        "methods": compare(methods, utilities, share_BN, base=base),
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, build, compare, write."""
    parser = environments_parser("finetune.states", __doc__)
    parser.add_argument("--states", default="start,half", help="start, half, or both.")
    parser.add_argument("--horizons", default=f"{HORIZON:g}", help="Values of c, separated by commas.")
    args = parser.parse_args(arguments)
    horizons = [float(value) for value in args.horizons.split(",")]
    write_reports(args, partial(report, args.states.split(","), horizons))


if __name__ == "__main__":
    main()
