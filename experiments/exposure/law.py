"""What does a row count that is seen more often than others? Candidates beside retrained subsets.

    python -m experiments.exposure.law --world ART ENVIRONMENT [--world ...] --out experiments/exposure/law.json

A candidate is a concave function f of how often a row is seen, in a training as long as the rows that are kept, and b,
the effects that any new row is worth, which repetition takes its part of:

    change = mean of f(times) (effect + b) - b over the rows kept;    without b: sum of f effect / sum of f

Figures: rank correlation with retraining, of tasks (rho) and of single questions (LDS), mean over them; `gain` is over
weights that count as they are, in LDS, with a 95 % interval over subsets.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.predict.predictor import NEW_ROW_VALUE, Predictor
from grasp.runs.metrics import spearman
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream

DRAWS = 60


def logarithm(c: float) -> Callable[[F64], F64]:
    return lambda times: np.log1p(times / c) / np.log1p(1 / c)


def effective(worth: float) -> Callable[[F64], F64]:
    """Muennighoff et al. 2023: the first time counts whole, and those after it less and less."""
    return lambda times: np.where(times <= 1, times, 1 - worth * np.expm1(-np.maximum(times - 1, 0) / worth))


def linear(times: F64) -> F64:
    return times


LAWS: dict[str, Callable[[F64], F64]] = {
    "linear": linear,
    "w^.8": lambda times: times**0.8,
    "w^.6": lambda times: times**0.6,
    "w^.5": np.sqrt,
    "R* 15.4": effective(15.4),
    "R* 2": effective(2.0),
} | {f"log c={c:g}": logarithm(c) for c in (10.0, 3.0, 1.0, 0.3, 0.1, 0.03)}
BASES: tuple[float | None, ...] = (None, 0.0, 0.2, 0.4, 0.8, 1.2)


def judged(artifact: Path, environment: Path) -> dict[str, object]:
    """All candidates on one world."""
    reader, runs = ArtifactReader.open(artifact), RetrainedRuns.open(environment)
    predictor = Predictor.from_artifact(reader, per_unit=True)
    assert predictor.unit_level is not None
    scored = CandidatePredictor.from_runs(runs, reader)
    utilities = runs.utilities(partial=True)
    order = [runs.subset_ids.index(name) for name in utilities.subset_ids]
    weights_BN = np.concatenate([block.weights_BN.toarray() for block in scored.blocks])[order]
    n_kept_B1 = (weights_BN > 0).sum(axis=1, keepdims=True)
    times_BN = weights_BN * n_kept_B1 / weights_BN.sum(axis=1, keepdims=True)
    unit_NE = np.concatenate([block for _, block in predictor.unit_level.effects.blocks()])
    unit_base_E = predictor.unit_level.new_row_value_C / NEW_ROW_VALUE
    real_BT = np.stack(
        [utilities.select(target).values_BSE.mean(axis=(1, 2)) for target in predictor.units.targets], axis=1
    )
    real_BE = np.concatenate(
        [utilities.select(target).values_BSE.mean(axis=1) for target in predictor.units.targets], axis=1
    )
    rng = stream(0, "exposure", "bootstrap")
    draws = [rng.integers(0, len(order), len(order)) for _ in range(DRAWS)]
    results: dict[str, dict[str, object]] = {}
    base_D: F64 | None = None
    for name, law in LAWS.items():
        x_BN = law(times_BN) / n_kept_B1
        worth_B1 = x_BN.sum(axis=1, keepdims=True)
        task_BT, unit_BE = x_BN @ predictor.effect_NT, (x_BN.astype(np.float32) @ unit_NE).astype(np.float64)
        for b in BASES:
            if b is None:
                guess_BT, guess_BE, called = task_BT / worth_B1, unit_BE / worth_B1, name
            else:
                guess_BT, guess_BE = task_BT + b * worth_B1, unit_BE + b * worth_B1 * unit_base_E
                called = f"{name}, b={b:g}"
            lds_D = np.array([np.nanmean(spearman(guess_BE[draw], real_BE[draw])) for draw in draws])
            base_D = lds_D if base_D is None else base_D
            rhos_T, gain_D = spearman(guess_BT, real_BT), lds_D - base_D
            results[called] = {
                "rho": float(np.mean(rhos_T)),
                "rhos": dict(zip(predictor.units.targets, rhos_T.tolist(), strict=True)),
                "lds": float(np.nanmean(spearman(guess_BE, real_BE))),
                "gain": float(gain_D.mean()),
                "low": float(np.quantile(gain_D, 0.025)),
                "high": float(np.quantile(gain_D, 0.975)),
            }
    seeds = utilities.select(predictor.units.targets[0]).values_BSE.shape[1]
    return {"environment": environment.name, "subsets": len(order), "seeds": seeds, "laws": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", nargs=2, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    worlds = [judged(Path(artifact), Path(environment)) for artifact, environment in args.world]
    args.out.write_text(json.dumps(worlds, indent=1) + "\n")
    for world in worlds:
        print(f"{world['environment']}: {world['subsets']} subsets, {world['seeds']} seeds")
        laws = world["laws"]
        assert isinstance(laws, dict)
        for name, law in laws.items():
            interval = f"[{law['low']:+.3f}, {law['high']:+.3f}]"
            print(f"  {name:28s} rho {law['rho']:.3f}  lds {law['lds']:.3f}  gain {law['gain']:+.3f} {interval}")


if __name__ == "__main__":
    main()
