"""Replays of trainings against retraining: task rho of every way to score rows by them.

    python -m experiments.replay.run small-192 small-48 --data ../shared/data --work WORK \\
        --out experiments/replay/result.json

Killed, the same command goes on: a replay lies in WORK/replay, states and all, until it is done. Predictions of a
subset are means of its rows' scores. Scores of drawn rows are sums over the steps where a row was in the batch, and a
subset's is the mean over those of its rows that were drawn.

Shape letters: N rows, T targets, B subsets, R resamples, M probe steps, K steps, W orders.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers.utils import logging as hf_logging

from experiments.finetune.further import forms
from experiments.one_line_errors import in_one_line
from experiments.replay.setting import World
from experiments.worlds.artifacts import FEATURES, FORWARD, artifact_of, relevance, shares
from experiments.worlds.evaluate import noise
from experiments.worlds.prepare import model_directory
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import NAMES, Name
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Utilities
from grasp.seeds import bootstrap_weights, stream
from grasp.training.metagradient import (
    BATCH_TOKENS,
    Metagradient,
    MetagradientSettings,
    metagradient,
    middle_steps,
    replay_trainings,
    utilities,
)
from grasp.training.replay_checks import smoothness
from grasp.training.replayed_rows import drawn_scores, probed_scores, standardize_scores
from grasp.training.trajectory import Trajectory

PROBES = 5
LARGE_MODEL_TOKENS = 1024  # of a forward pass of SmolLM2, whose logits take 200 kB a token
RESAMPLES = 1000
SHIFT = 0.2  # of the weights of groups, in a check
WEIGHTS = (0.5, 1, 2, 4, 8)  # of a replay in the default rule
DEFAULT = "gradient + .25 of token + input"
SHIPPED_PROBES = (0, 2, 4)  # of the five probe steps: at 10, 50 and 90 % of the training
THIRDS = ("first", "second", "last")


# ------------------------------------------------------------------------------------------------------------ replays


def replay(world: World, seed: int, settings: MetagradientSettings, place: Path) -> tuple[Metagradient, dict[str, Any]]:
    """Train and differentiate by one order, or read what is there; with what it cost."""
    arrays, record = place / "metagradient.safetensors", place / "record.json"
    if record.exists():
        return Metagradient.load(arrays), json.loads(record.read_text(encoding="utf-8"))
    resumed = (place / "states").exists()
    place.mkdir(parents=True, exist_ok=True)
    used = time.process_time()
    trajectory = Trajectory(world.training(), world.rows, world.order(seed), directory=place / "states")
    forecast = replay_trainings(trajectory.order, world.rows.n_rows, len(world.targets), settings)
    print(f"{world.name}, order {seed}: {trajectory.size}; {forecast:.1f} trainings", flush=True)
    losses = trajectory.train()
    trained = time.process_time() - used
    replayed = metagradient(trajectory, world.targets, settings, lambda left: _progress(left, used))
    replayed.save(arrays)
    shutil.rmtree(place / "states")
    cost: dict[str, Any] = {
        "trainings_forecast": round(forecast, 2),
        "loss_first_last": [round(float(losses[0]), 3), round(float(losses[-1]), 3)],
    }
    if not resumed:  # else what was spent before is not known
        spent = time.process_time() - used
        cost |= {
            "cpu_seconds": round(spent),
            "cpu_seconds_of_training": round(trained, 1),
            "trainings": round(spent / trained, 2),
        }
    write_atomically(record, (json.dumps(cost, indent=1) + "\n").encode())
    return replayed, cost


def _progress(left: int, used: float) -> None:
    if left % 16 == 0:
        print(f"  {left} steps left, {time.process_time() - used:.0f} s of CPU", flush=True)


def group_check(world: World, replayed: Metagradient, place: Path, retrainings: int) -> dict[str, Any]:
    """Retrain order 0 with the weights of groups of rows moved at random, or read what is there."""
    record = place / f"check-{retrainings}.json"
    if record.exists():
        return dict(json.loads(record.read_text(encoding="utf-8")))
    trajectory = Trajectory(world.training(), world.rows, world.order(0))
    trajectory.train()
    group_N = np.asarray(world.corpus.label.codes_N, dtype=np.int64)
    derivative_NT, measured, predicted = replayed.drawn(world.rows.n_rows), [], []
    for r in range(retrainings):
        sign_G = stream(0, "replay", "groups", r).choice([-1.0, 1.0], size=int(group_N.max()) + 1)
        change_N = SHIFT * sign_G[group_N]
        trajectory.retrain(trajectory.weight_N + change_N)
        measured.append(utilities(trajectory.training, world.targets) - replayed.utility_T)
        predicted.append(change_N @ derivative_NT)
    measured_RT, predicted_RT = np.array(measured), np.array(predicted)
    inner = float((measured_RT * predicted_RT).sum())
    result = {
        "groups": int(group_N.max()) + 1,
        "shift": SHIFT,
        "slope": round(inner / float((predicted_RT**2).sum()), 3),  # least squares through 0; 1 for exact derivatives
        "correlation": round(inner / float(np.linalg.norm(measured_RT) * np.linalg.norm(predicted_RT)), 3),
        "measured": measured_RT.round(5).tolist(),
        "predicted": predicted_RT.round(5).tolist(),
    }
    print(f"{world.name}: slope {result['slope']}, correlation {result['correlation']}", flush=True)
    write_atomically(record, (json.dumps(result, indent=1) + "\n").encode())
    return result


# --------------------------------------------------------------------------------------------------------------- scores


def drawn(replays: Sequence[Metagradient], n_rows: int, first: float = 0.0, last: float = 1.0) -> F64:
    """See `drawn_scores`; `first` and `last`: shares of the steps between which derivatives are summed."""
    steps = [len(replayed.order_KB) for replayed in replays]
    return drawn_scores(replays, n_rows, [(round(first * count), round(last * count)) for count in steps])


def probed(replays: Sequence[Metagradient], steps: Sequence[int] | None = None) -> F64:
    """See `probed_scores`; `steps`: the probe steps of every order that count, None: all."""
    return probed_scores(replays, [list(each.probe_steps_M) if steps is None else steps for each in replays])


def filled(score_NT: F64) -> F64:
    """Give rows without a score the mean of the others."""
    return np.where(np.isfinite(score_NT), score_NT, np.nanmean(score_NT, axis=0))


def added(*scores: F64) -> F64:
    """Add scores of equal spread."""
    return np.sum([standardize_scores(filled(score_NT)) for score_NT in scores], axis=0)


def predicted(score_NT: F64, share_BN: F64) -> F64:
    """Mean score of the rows of every subset that have one, (B, T)."""
    has_NT = np.isfinite(score_NT)
    mean_BT: F64 = share_BN @ np.where(has_NT, score_NT, 0.0) / (share_BN @ has_NT)
    return mean_BT


# ----------------------------------------------------------------------------------------------------------- comparison


class Comparison:
    """Task rho of scores against the runs of an environment, by the same resamples of subsets."""

    def __init__(self, utilities: Utilities, share_BN: F64, base_NT: F64) -> None:
        self.share_BN, targets = share_BN, list(utilities.targets)
        realized_BE = utilities.values_BSE.mean(axis=1)
        self.names = list(dict.fromkeys(targets))
        member_TE = [[target == name for target in targets] for name in self.names]
        self.task_BT = np.stack([realized_BE[:, of_target_E].mean(axis=1) for of_target_E in member_TE], axis=1)
        count = len(share_BN)
        self.weights_RB = np.concatenate([np.ones((1, count)), bootstrap_weights(count, resamples=RESAMPLES)])
        self.base_R = self._rho(base_NT).mean(axis=0)

    def _rho(self, score_NT: F64) -> F64:
        pairs = [predicted(score_NT, self.share_BN), self.task_BT]
        rho_TR: F64 = np.nan_to_num(rank_correlations(pairs, [(0, 1)], self.weights_RB)[0])
        return rho_TR

    def record(self, score_NT: F64) -> dict[str, Any]:
        """Task rho, of each target, and its difference to the default rule, with 95 % intervals over subsets."""
        rho_TR = self._rho(score_NT)
        rho_R = rho_TR.mean(axis=0)
        return {
            "task_rho": interval(rho_R),
            "difference": interval(rho_R - self.base_R),
            "of_target": {name: round(float(rho), 3) for name, rho in zip(self.names, rho_TR[:, 0], strict=True)},
        }


def interval(value_R: F64) -> list[float]:
    low, high = np.percentile(value_R[1:] - value_R[1:].mean(), [2.5, 97.5])
    return [round(float(np.clip(v, -1.0, 1.0)), 3) for v in (value_R[0], value_R[0] + low, value_R[0] + high)]


def ways(orders: Sequence[Metagradient], default_NT: F64) -> dict[str, F64]:
    """Every way to score rows that is compared: alone, and added to the default rule."""
    n_rows = len(default_NT)
    out: dict[str, F64] = {"default": default_NT}

    def add(name: str, score_NT: F64) -> None:
        out[name] = score_NT
        out[f"{name}, with default"] = added(score_NT, default_NT)

    groups = {f"order {w}": [replayed] for w, replayed in enumerate(orders)}
    if len(orders) > 1:
        groups["all orders"] = list(orders)
    for label, some in groups.items():
        probed_NT, drawn_NT = probed(some), drawn(some, n_rows)
        add(f"all rows, {label}", probed_NT)
        add(f"drawn rows, {label}", drawn_NT)
        add(f"both, {label}", added(probed_NT, drawn_NT))
    for weight in WEIGHTS:
        out[f"default + {weight:g} replay"] = default_NT + weight * standardize_scores(probed(orders))
    probe_steps = [int(step) for step in orders[0].probe_steps_M]
    for step in probe_steps:
        out[f"all rows, step {step} alone, all orders"] = probed(orders, [step])
    for chosen in ([2], [1, 3], SHIPPED_PROBES) if len(probe_steps) == PROBES else ():
        out[f"all rows, {len(chosen)} probe steps, all orders"] = probed(orders, [probe_steps[m] for m in chosen])
    for w, of_order in enumerate(orders):
        shipped_NT = standardize_scores(probed([of_order], shipped_probes(of_order)))
        out[f"all rows, 3 probe steps, order {w}"] = shipped_NT
        out[f"default + 4 replay, 3 probe steps, order {w}"] = default_NT + 4 * shipped_NT
    for k, third in enumerate(THIRDS):
        out[f"drawn rows, {third} third, all orders"] = drawn(orders, n_rows, k / 3, (k + 1) / 3)
    out["drawn rows, last two thirds, all orders"] = drawn(orders, n_rows, 1 / 3)
    return out


def shipped_probes(replayed: Metagradient) -> list[int]:
    """Return the probe steps that a build takes: all of three, or three of five."""
    steps = [int(step) for step in replayed.probe_steps_M]
    return [steps[m] for m in SHIPPED_PROBES] if len(steps) == PROBES else steps


def gate(replays: Sequence[Metagradient]) -> dict[str, Any]:
    """Measure whether replays are smooth: growth of the adjoint, spread of derivatives, agreement of two orders."""
    records = []
    for replayed in replays:
        smooth = smoothness(replayed)
        records.append(
            {
                "growth_by_twelfth": [round(float(part.mean()), 2) for part in np.array_split(smooth.growth_K, 12)],
                "spread_by_twelfth": [round(float(part.mean()), 2) for part in np.array_split(smooth.std_growth_K, 12)],
                "first_step": smooth.first_step,
                "line": str(smooth),
            }
        )
    n_rows = replays[0].probe_MNT.shape[1]
    agreements = []
    for first, second in combinations(replays, 2):
        scores = [drawn([each], n_rows) for each in (first, second)]
        both_N = np.isfinite(scores).all(axis=(0, 2))
        agreements.append(
            {
                "all_rows": _agreement(first.probed(), second.probed()),
                "drawn_rows": _agreement(*(score_NT[both_N] for score_NT in scores)),
            }
        )
    return {"orders": records, "agreement_of_two_orders": agreements}


def _agreement(first_NT: F64, second_NT: F64) -> list[float]:
    return [round(float(spearmanr(a, b).statistic), 3) for a, b in zip(first_NT.T, second_NT.T, strict=True)]


# --------------------------------------------------------------------------------------------------------------- report


def shipped_replay(name: str, work: Path) -> F64:
    """Return the scores of rows by the first order and three probe steps, as a build replays by default, (N, T)."""
    replayed = Metagradient.load(work / "replay" / f"{name}-{PROBES}-probes-0" / "metagradient.safetensors")
    return standardize_scores(probed([replayed], shipped_probes(replayed)))


def parse_options(description: str) -> argparse.Namespace:
    """Parse the options of an experiment on worlds: names, data, work, out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def further_artifact(world: World, work: Path) -> ArtifactReader:
    """Build the artifact for a model that is trained further, or open it."""
    start = model_directory(world.name, work)
    return artifact_of(world.name, work, start, world.tokenizer, FEATURES, 8192, "further")


def default_scores(world: World, work: Path, utilities: Utilities) -> F64:
    """Score every row for every target by the build for a model that is trained further, (N, T)."""
    artifact = further_artifact(world, work)
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
    kernel_of = {kernel: relevance(artifact, kernel, columns) for kernel in ("gradient", *FORWARD)}
    method = forms(kernel_of, np.ones(artifact.n_rows))[DEFAULT]
    _, score_NT = method.predict(np.eye(artifact.n_rows), list(utilities.targets))
    return score_NT


def report(name: Name, options: argparse.Namespace) -> dict[str, Any]:
    """Replay an environment's training in several orders, and compare."""
    world = World.open(name, options.data, options.work)
    probes = len(SHIPPED_PROBES) if options.as_built else PROBES
    settings = MetagradientSettings(
        probe_steps=middle_steps(world.kind.recipe.steps, probes),
        batch_tokens=BATCH_TOKENS if world.kind.rows == "small" else LARGE_MODEL_TOKENS,
    )
    orders, costs, folder = [], {}, options.work / "replay"
    for seed in range(options.orders):
        replayed, cost = replay(world, seed, settings, folder / f"{name}-{probes}-probes-{seed}")
        orders.append(replayed)
        costs[f"order {seed}"] = cost
    check = {}
    if options.check:
        check["check_by_groups"] = group_check(world, orders[0], folder / f"{name}-{probes}-probes-0", options.check)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    assert tuple(dict.fromkeys(utilities.targets)) == tuple(target.name for target in world.targets)
    share_BN = shares(environment, world.corpus.store, utilities)
    default_NT = default_scores(world, options.work, utilities)
    comparison = Comparison(utilities, share_BN, default_NT)
    return {
        "environment": name,
        "subsets": len(share_BN),
        "steps": world.kind.recipe.steps,
        "probe_steps": list(settings.probe_steps),
        "settings": settings.model_dump(mode="json"),
        "noise": noise(environment, utilities),
        "cost": costs,
        "gate": gate(orders) | check,
        "scores": {label: comparison.record(score_NT) for label, score_NT in ways(orders, default_NT).items()},
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, replay, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.replay.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, required=True, help="Model, rows, artifacts and replays.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--orders", type=int, default=2, help="Orders of rows that are replayed.")
    parser.add_argument(
        "--check", type=int, default=8, help="Retrainings with moved weights of groups of rows; 0: none."
    )
    parser.add_argument(
        "--as-built", action="store_true", help="Replay as grasp build does: three probe steps in the place of five."
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    reports = json.loads(options.out.read_text(encoding="utf-8"))["environments"] if options.out.exists() else []
    done = {entry["environment"]: entry for entry in reports}
    for name in options.names:
        done[name] = report(name, options)
        write_atomically(options.out, (json.dumps({"environments": list(done.values())}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
