"""Do intervals hold for mixtures beyond those that were run? The most extreme runs are left out, others learned from.

    python -m experiments.extrapolation.extreme --data ../shared/data --name after \\
        --out experiments/extrapolation/extreme.json

Runs alone, without an artifact: shares of a label and results. Three ways to leave out a fifth:

    distance    the runs whose shares are farthest from the mean of all runs
    value       the runs with the largest share of one value; once for every value that enough runs differ in
    inside      runs at random, for comparison

k runs are drawn from those that are left, or from their central half (far), and the fifth is predicted. An interval
covers where it holds the mean over the seeds of the run. Intervals of coverage are over the draws and values.
Shape letters: R runs, S seeds, T tasks, G values.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import spearmanr

from grasp.arrays import F64, I64
from grasp.mixing.import_runs import import_runs
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

COVERAGE = 0.9
EXTREME = 0.2  # of the runs are left out
SPLITS = ("distance", "far", "value", "inside")
KS = (8, 12, 32, 128)
LEAST_LEFT_OUT = 5
DRAWS = 6
MOST_VALUES = 4
ENVIRONMENTS = ("cc-topic", "cc-topic-2m", "cc-format", "cc-format-1m")


@dataclass(frozen=True)
class World:
    name: str
    share_RG: F64
    utility_RST: F64


def of_regmix(data: Path, part: str) -> World:
    """The public runs of 1 M parameters."""
    runs = import_runs(data / f"{part}_mixture_1m.csv", data / f"{part}_pile_loss_1m.csv", label="source")
    return World(f"regmix {part}", runs.weights_RG(), runs.utility_RST())


def of_environment(name: str, data: Path) -> World:
    """Retrained subsets of the pages of cc_weborganizer, a row each, by the label that they were drawn by."""
    environment = RetrainedRuns.open(Path("experiments/environments") / name)
    family = environment.info.family
    assert family is not None
    label = family.spec.partition(":")[2]
    pages = pq.read_table(data / "cc_weborganizer.parquet", columns=["doc_id", label]).to_pydict()
    values = sorted(set(pages[label]))
    code_of = {page: values.index(value) for page, value in zip(pages["doc_id"], pages[label], strict=True)}
    rows = pq.read_table(environment.path / "subsets.parquet")
    weights = rows["weight"].to_numpy() if "weight" in rows.column_names else np.ones(len(rows))
    run_of = {run: r for r, run in enumerate(environment.subset_ids)}
    share_RG = np.zeros((len(run_of), len(values)))
    r = [run_of[run] for run in rows["subset_id"].to_pylist()]
    np.add.at(share_RG, (r, [code_of[page] for page in rows["row_id"].to_pylist()]), weights)
    targets = [target for target in environment.targets if not target.endswith("@all")]
    return World(name, share_RG / share_RG.sum(axis=1, keepdims=True), environment.task_utilities(targets))


def splits(world: World) -> Iterator[tuple[str, I64, I64]]:
    """How the fifth is chosen; the runs left, the most central first; the runs left out."""
    n_out = max(round(EXTREME * len(world.share_RG)), 1)
    mean_G = world.share_RG.mean(axis=0)
    order = np.argsort(np.linalg.norm(world.share_RG - mean_G, axis=1), kind="stable")
    yield "distance", order[:-n_out], order[-n_out:]
    widest = np.argsort(-world.share_RG.std(axis=0), kind="stable")[:MOST_VALUES]
    for g in widest.tolist():
        order = np.argsort(world.share_RG[:, g], kind="stable")
        yield "value", order[:-n_out], order[-n_out:]
    shuffled = stream(0, "extreme", world.name).permutation(len(order))
    yield "inside", shuffled[:-n_out], shuffled[-n_out:]


def measured(world: World, train: I64, out: I64) -> dict[str, float]:
    """One draw: coverage and how good predictions are, mean over runs left out and tasks."""
    n_tasks, seeds = world.utility_RST.shape[2], world.utility_RST.shape[1]
    process = GaussianProcess.fit(SubsetFeatures.from_shares(world.share_RG[train], n_tasks), world.utility_RST[train])
    features = SubsetFeatures.from_shares(world.share_RG[out], n_tasks)
    mean_RT, spread_RT = process.predict(features)
    truth_RT, known_RT = world.utility_RST[out].mean(axis=1), world.utility_RST[train].mean(axis=1)
    of_seeds_T = process.scale_T**2 * process.hyperparameters["seed noise"] / seeds
    half_width_RT = process.quantile(COVERAGE) * np.sqrt(spread_RT**2 + of_seeds_T)
    covered_RT = np.abs(mean_RT - truth_RT) <= half_width_RT
    refused_RT = (
        process.relative_uncertainty(features, COVERAGE) > 1 if hasattr(process, "ignorance") else covered_RT & False
    )
    answered = float((~refused_RT).mean())
    moved_RT = truth_RT - known_RT.mean(axis=0)
    sd_T = known_RT.std(axis=0)
    return {
        "coverage": float(covered_RT.mean()),
        "coverage_answered": float(covered_RT[~refused_RT].mean()) if answered else np.nan,
        "answered": answered,
        "direction": float(((mean_RT - known_RT.mean(axis=0)) * moved_RT > 0)[np.abs(moved_RT) > sd_T].mean()),
        "error": float(np.sqrt((((mean_RT - truth_RT) / sd_T) ** 2).mean())),
        "half_width": float((half_width_RT / sd_T).mean()),
        "rho": float(np.mean([spearmanr(*pair).statistic for pair in zip(mean_RT.T, truth_RT.T, strict=True)])),
    }


def lines_of(world: World, names: Sequence[str]) -> Iterator[dict[str, object]]:
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    for at, (how, left, out) in enumerate(splits(world)):
        if len(out) < LEAST_LEFT_OUT and how == "value":
            continue
        pools = {how: left} | ({"far": left[: len(left) // 2]} if how == "distance" else {})
        for name, pool in pools.items():
            if name not in names:
                continue
            for k in KS:
                if k > len(pool):
                    continue
                for draw in range(DRAWS if how != "value" else 2):
                    rng = stream(0, "extreme", world.name, at, name, k, draw)
                    results.setdefault((name, k), []).append(measured(world, rng.permutation(pool)[:k], out))
    for (name, k), draws in results.items():
        line: dict[str, object] = {"world": world.name, "split": name, "runs": k, "draws": len(draws)}
        for key in draws[0]:
            values = np.array([draw[key] for draw in draws])
            line[key] = round(float(np.nanmean(values)), 4)
            if key.startswith("coverage"):
                error = 1.96 * np.nanstd(values, ddof=1) / np.sqrt(len(values))
                line[f"{key}_interval"] = [round(float(np.nanmean(values) + z * error), 4) for z in (-1, 1)]
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of these lines, e.g. before or after")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="worlds whose name begins so; the others stay as they are in --out")
    parser.add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else []
    makers = {f"regmix {part}": lambda part=part: of_regmix(args.data / "regmix", part) for part in ("train", "test")}
    makers |= {name: lambda name=name: of_environment(name, args.data) for name in ENVIRONMENTS}
    for name, make in makers.items():
        if args.only and not name.startswith(args.only):
            continue
        known = [
            line
            for line in known
            if (line["name"], line["world"]) != (args.name, name) or line["split"] not in args.splits
        ]
        for line in lines_of(make(), args.splits):
            known.append({"name": args.name} | line)
            print(json.dumps(known[-1]), flush=True)
        args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
