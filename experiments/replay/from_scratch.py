"""Replays of small models from scratch against retraining: task rho of drawn rows, and of scores by their text.

    python -m experiments.replay.from_scratch ARTIFACT cc-topic cc-format --orders 1 --work WORK \\
        --out experiments/replay/from_scratch.json

ARTIFACT is a default build for a new model (`experiments.sample.run` makes those of cc and pool). Interrupted, the same
command continues; finished replays stay in WORK.

Shape letters: N rows, T targets, B subsets, R resamples.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.replay.run import Comparison
from experiments.worlds.artifacts import shares
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_documents
from grasp.files import discard, write_atomically
from grasp.models.build_source import BuildSource
from grasp.models.causal_lm import ReferenceModel
from grasp.pipeline.replay_plan import plan_replay
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.predictor import Predictor
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import ReplaySettings
from grasp.training.metagradient import Metagradient, Target, metagradient
from grasp.training.replay_checks import smoothness
from grasp.training.replayed_rows import drawn_scores, scores_from_text, standardize_scores
from grasp.training.trajectory import Trajectory

ENVIRONMENTS = Path(__file__).parents[1] / "environments"
WEIGHTS = (0.5, 1, 2, 4)


def main() -> None:
    """Replay, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("environments", nargs="+")
    parser.add_argument("--model", type=Path, help="Reference model. Default: where the artifact was built with it.")
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    artifact = ArtifactReader.open(options.artifact)
    origin = BuildSource(artifact, {"model": {"path": str(options.model)}} if options.model else None)
    rows: Any = origin.rows
    assert isinstance(origin.model, ReferenceModel)
    plan = plan_replay(
        origin.model, "new", None, ReplaySettings(), n_rows=rows.n_rows, context=int(rows.lengths().max())
    )
    tokens = origin.unit_tokens
    targets = [Target(name, [tokens[int(e)] for e in artifact.unit_columns(name)]) for name in artifact.targets]
    replays = []
    for w in range(options.orders):
        place = options.work / f"order-{w}.safetensors"
        if not place.exists():
            states, used = options.work / f"states-{w}", time.process_time()
            trajectory = Trajectory(plan.start(w), rows, plan.order(rows.n_rows, w), directory=states)
            trajectory.train()
            trained = time.process_time() - used
            metagradient(trajectory, targets, plan.differentiation).save(place)
            print(f"order {w}: training {trained:.0f} s, all {time.process_time() - used:.0f} s of CPU", flush=True)
            discard(states)
        replays.append(Metagradient.load(place))
    rate_K = np.array([plan.optimizer.learning_rate_at(step) for step in range(plan.optimizer.steps)])
    smooth = [smoothness(replay, rate_K=rate_K) for replay in replays]
    raw_NT = drawn_scores(replays, rows.n_rows, [(each.first_step, plan.optimizer.steps) for each in smooth])
    text_NT = scores_from_text(raw_NT, rows, row_documents(artifact), plan.settings.seed)
    predictor = Predictor.from_artifact(artifact, DEFAULT_PROTOCOL)
    default_NT = predictor.effect_NT * predictor.task.raw_mean_std.std_C
    scores = {"default": default_NT, "drawn rows": raw_NT, "replay": text_NT}
    scores |= {f"default + {w:g} replay": default_NT + w * standardize_scores(text_NT) for w in WEIGHTS}
    reports = {}
    for name in options.environments:
        environment = RetrainedRuns.open(ENVIRONMENTS / name)
        utilities = environment.utilities()
        chosen = [k for k, target in enumerate(utilities.targets) if target in artifact.targets]
        utilities = replace(
            utilities,
            values_BSE=utilities.values_BSE[:, :, chosen],
            targets=tuple(utilities.targets[k] for k in chosen),
            unit_ids=tuple(utilities.unit_ids[k] for k in chosen),
        )
        comparison = Comparison(utilities, shares(environment, rows, utilities), default_NT)
        reports[name] = {label: comparison.record(score_NT) for label, score_NT in scores.items()}
    result = {"orders": options.orders, "gate": [str(each) for each in smooth], "environments": reports}
    write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
