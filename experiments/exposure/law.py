"""Which law says what a row counts that is seen more, or less, often? Candidates beside retrained subsets.

    python -m experiments.exposure.law --world ART ENVIRONMENT LABEL [--world ...] --out experiments/exposure/law.json

A candidate is a concave function f of times: how often a row is seen, against the corpus, when both are read equally
long. `sum` adds f up over the rows and divides by those of the corpus, so that repetition makes every change smaller;
`mean` divides by the sum of f. `by slice` bends what all rows of a value bring together instead of what a row brings.
Figures: rank correlation with retraining, of tasks (rho) and of single questions (LDS), mean over them; `gain` is over
`linear, mean` in LDS, with a 95 % interval over subsets.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.predict.label_slices import label_slices
from grasp.predict.predictor import Predictor
from grasp.predict.row_arrays import F64, row_tokens
from grasp.predict.slices import LabelTable
from grasp.runs.environment import Environment
from grasp.runs.metrics import spearman
from grasp.runs.scored import Scored
from grasp.seeds import stream

DRAWS = 200


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
} | {f"log c={c:g}": logarithm(c) for c in (3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.03)}
FORMS = ("mean", "sum", "mean by slice", "sum by slice")


def counted(times_BN: F64, law: Callable[[F64], F64], form: str, codes_N: np.ndarray) -> F64:
    """What every row counts, (B, N), so that a change is the sum over its effects."""
    n_rows = times_BN.shape[1]
    if form.endswith("by slice"):
        rows_G = np.bincount(codes_N)
        share_BG = np.stack([np.bincount(codes_N, times_N, len(rows_G)) for times_N in times_BN]) / rows_G
        bent_BG = np.divide(law(share_BG), share_BG, out=np.zeros_like(share_BG), where=share_BG > 0)
        out_BN = times_BN * bent_BG[:, codes_N]
    else:
        out_BN = law(times_BN)
    return out_BN / (n_rows if form.startswith("sum") else out_BN.sum(axis=1, keepdims=True))


def ranks(values_BC: F64) -> F64:
    return np.argsort(np.argsort(values_BC, axis=0), axis=0).astype(np.float64)


def judged(artifact: Path, environment: Path, label: str) -> dict[str, object]:
    """All candidates on one world."""
    reader, runs = ArtifactReader.open(artifact), Environment.open(environment)
    predictor = Predictor.of(reader, per_unit=True)
    assert predictor.unit_level is not None
    scored = Scored.of(runs, reader)
    slices = label_slices(LabelTable(reader.rows_path).column(label), row_tokens(reader))
    weights_BN = np.concatenate([block.weights_BN.toarray() for block in scored.blocks])
    utilities = runs.utilities(partial=True)
    order = [runs.subset_ids.index(name) for name in utilities.subset_ids]
    times_BN = weights_BN[order] / weights_BN[order].mean(axis=1, keepdims=True)
    unit_NE = np.concatenate([block for _, block in predictor.unit_level.effects.blocks()])
    real_BT = np.stack([utilities.of(target).values_BSE.mean(axis=(1, 2)) for target in predictor.targets], axis=1)
    real_BE = np.concatenate([utilities.of(target).values_BSE.mean(axis=1) for target in predictor.targets], axis=1)
    rng = stream(0, "exposure", "bootstrap")
    draws = [rng.integers(0, len(order), len(order)) for _ in range(DRAWS)]
    found: dict[str, dict[str, object]] = {}
    base_D: F64 | None = None
    for form in FORMS:
        for name, law in LAWS.items():
            counted_BN = counted(times_BN, law, form, slices.codes_N)
            task_BT, guess_BE = counted_BN @ predictor.effect_NT, counted_BN.astype(np.float32) @ unit_NE
            lds_D = np.array([np.nanmean(spearman(guess_BE[draw], real_BE[draw])) for draw in draws])
            base_D = lds_D if base_D is None else base_D
            gain_D = lds_D - base_D
            found[f"{name}, {form}"] = {
                "rho": float(np.mean(spearman(task_BT, real_BT))),
                "rhos": [float(x) for x in spearman(task_BT, real_BT)],
                "lds": float(np.nanmean(spearman(guess_BE, real_BE))),
                "gain": float(gain_D.mean()),
                "low": float(np.quantile(gain_D, 0.025)),
                "high": float(np.quantile(gain_D, 0.975)),
            }
    return {
        "environment": environment.name,
        "subsets": len(order),
        "seeds": utilities.of(predictor.targets[0]).values_BSE.shape[1],
        "laws": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", nargs=3, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    worlds = [judged(Path(artifact), Path(environment), label) for artifact, environment, label in asked.world]
    asked.out.write_text(json.dumps(worlds, indent=1) + "\n")
    for world in worlds:
        print(f"{world['environment']}: {world['subsets']} subsets, {world['seeds']} seeds")
        laws = world["laws"]
        assert isinstance(laws, dict)
        for name, one in laws.items():
            interval = f"[{one['low']:+.3f}, {one['high']:+.3f}]"
            print(f"  {name:28s} rho {one['rho']:.3f}  lds {one['lds']:.3f}  gain {one['gain']:+.3f} {interval}")


if __name__ == "__main__":
    main()
