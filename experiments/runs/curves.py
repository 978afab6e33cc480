"""How much do k runs teach? Relevance alone, regressions on shares alone, and the learned predictor, on runs left out.

    python -m experiments.runs.curves --data ../shared/data/regmix --worlds bench-out --out experiments/runs/curves.json

Draws k runs at random, learns from them, and ranks the runs that were not drawn; again and again. An environment's
artifacts are made by experiments/lds_main/run.sh and experiments/lds_pool/run.sh.
Shape letters: R runs, S seeds, T tasks, F features.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from grasp.arrays import F64
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import suggest_labels
from grasp.baselines.oracles import ridge_out
from grasp.mixing.import_runs import import_runs
from grasp.mixing.mixture_law import fit_process
from grasp.predict.predictor import Predictor
from grasp.predict.subset_tables import RowIndex
from grasp.runs.calibration import SubsetFeaturizer
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

Method = Callable[[NDArray[np.int64], NDArray[np.int64]], F64]

WORLDS = (
    ("cc-topic", "cc-completion"),
    ("cc-topic", "cc-all"),
    ("cc-format", "cc-completion"),
    ("cc-format", "cc-all"),
    ("pool-source", "pool-completion"),
)
CROSSED = (("cc-topic", "cc-format"), ("cc-format", "cc-topic"))  # both beside cc-completion
KS = (4, 8, 16, 32, 48)
REGMIX_KS = (4, 8, 16, 32, 64, 128, 256, 512)
COVERAGE = 0.9
EDGE = 0.25  # of the runs left out: those whose shares are farthest from the mean of the runs learned from
SATURATION = 0.003  # of the logarithm of shares, as RegMix's shares need it


@dataclass(frozen=True)
class World:
    """Runs with what is known of each, and what came out."""

    name: str
    features: SubsetFeatures
    utility_RST: F64
    held: SubsetFeatures | None = None  # other runs that are always left out
    held_RT: F64 | None = None


def of_environment(name: str, art: str, worlds: Path) -> World:
    """An environment beside the artifact built for it; the tasks of the artifact's losses."""
    environment = RetrainedRuns.open(Path("experiments/environments") / name)
    artifact = ArtifactReader.open(worlds / art)
    predictor = Predictor.from_artifact(artifact, sketches=("hidden", "residual"))
    family = environment.info.family
    label = None if family is None else family.spec.partition(":")[2]
    column = None if label is None else LabelTable(artifact.rows_path).column(label)
    blocks = list(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), column))
    labels = {*([label] if label else []), *suggest_labels(artifact)}
    known = SubsetFeaturizer.from_predictor(predictor, artifact, sorted(labels))
    utilities = environment.utilities()
    assert tuple(subset_id for block in blocks for subset_id in block.subset_ids) == utilities.subset_ids
    suffix = "@all" if art.endswith("-all") else ""
    columns = [utilities.select(f"{target}{suffix}").values_BSE.mean(axis=2) for target in predictor.units.targets]
    return World(
        f"{name}{suffix}",
        SubsetFeatures.concatenate([known.features(block.weights) for block in blocks]),
        np.stack(columns, axis=2),
    )


def crossed(train_name: str, test_name: str, worlds: Path) -> World:
    """Learn from mixtures of one label, rank those of another label of the same corpus."""
    runs, held = (of_environment(name, "cc-completion", worlds) for name in (train_name, test_name))
    return World(
        f"{train_name} to {test_name}", runs.features, runs.utility_RST, held.features, held.utility_RST.mean(axis=1)
    )


def of_regmix(data: Path) -> World:
    """The public runs of 1 M parameters: 512 to learn from, 256 that are always left out."""
    train, test = (
        import_runs(data / f"{part}_mixture_1m.csv", data / f"{part}_pile_loss_1m.csv", label="source")
        for part in ("train", "test")
    )
    assert train.metrics == test.metrics
    n_tasks = len(train.metrics)
    columns = [test.values.index(value) for value in train.values]
    features = SubsetFeatures.from_shares(train.weights_RG(), n_tasks)
    held = SubsetFeatures.from_shares(test.weights_RG()[:, columns], n_tasks)
    return World("regmix 1M", features, train.utility_RST(), held, test.utility_RST().mean(axis=1))


def rho(predicted_RT: F64, realized_RT: F64) -> tuple[float, float]:
    """Spearman's: mean over the tasks, and of the mean over the tasks."""
    pairs = zip(predicted_RT.T, realized_RT.T, strict=True)
    by_task = [float(spearmanr(pair, other).statistic) if np.ptp(pair) else 0.0 for pair, other in pairs]
    return float(np.mean(by_task)), float(spearmanr(predicted_RT.mean(axis=1), realized_RT.mean(axis=1)).statistic)


def ceiling(utility_RST: F64) -> float | None:
    """What the mean over seeds correlates with the truth, by Spearman-Brown; mean over the tasks."""
    if utility_RST.shape[1] < 2:
        return None
    by_task = [np.corrcoef(utility_RST[:, :, t].T)[0, 1] for t in range(utility_RST.shape[2])]
    return float(np.mean([np.sqrt(max(2 * r / (1 + r), 0.0)) for r in by_task]))


def draw(world: World, k: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """One draw: by method rho by task, rho of the mean, and how often the interval covers: all, middle, edge."""
    n_runs, features = len(world.features), world.features
    order = rng.permutation(n_runs)
    chosen, rest = order[:k], order[k:]
    held = features.take(rest) if world.held is None else world.held
    truth_RT = world.utility_RST[rest].mean(axis=1) if world.held_RT is None else world.held_RT
    runs, utility_RST = features.take(chosen), world.utility_RST[chosen]
    known_RT = utility_RST.mean(axis=1)
    out = {
        "shares": list(rho(ridge_out(runs.share_BG, known_RT, held.share_BG), truth_RT)),
        "log shares": list(
            rho(
                ridge_out(np.log(runs.share_BG + SATURATION), known_RT, np.log(held.share_BG + SATURATION)),
                truth_RT,
            )
        ),
    }
    n_tasks, seeds = truth_RT.shape[1], world.utility_RST.shape[1]
    law, process = fit_process(runs.share_BG, utility_RST)
    shares = SubsetFeatures.from_shares(held.share_BG, n_tasks)
    with_law = shares if law is None else replace(shares, relevance_BT=law.predict(held.share_BG))
    fits = {"learned, runs alone": (process, with_law)}
    if np.ptp(features.relevance_BT):
        out["relevance"] = list(rho(held.relevance_BT, truth_RT))
        fits["learned, both"] = (GaussianProcess.fit(runs, utility_RST), held)
    else:
        without_law = GaussianProcess.fit(SubsetFeatures.from_shares(runs.share_BG, n_tasks), utility_RST)
        fits["process without the law"] = (without_law, shares)
    far_R = np.linalg.norm(held.share_BG - runs.share_BG.mean(axis=0), axis=1)
    edge_R = far_R > np.quantile(far_R, 1 - EDGE)
    for name, (fitted, held_out) in fits.items():
        mean_RT, spread_RT = fitted.predict(held_out)
        covered_RT = _covered(fitted, mean_RT, spread_RT, truth_RT, seeds)
        out[name] = [
            *rho(mean_RT, truth_RT),
            *(float(covered.mean()) for covered in (covered_RT, covered_RT[~edge_R], covered_RT[edge_R])),
            100 * float(np.abs((mean_RT - truth_RT) / truth_RT).mean()),
        ]
    return out


def _covered(process: GaussianProcess, mean_RT: F64, spread_RT: F64, truth_RT: F64, seeds: int) -> NDArray[np.bool_]:
    """Which intervals hold the mean over so many seeds."""
    of_seeds_T = process.scale_T**2 * process.hyperparameters["seed noise"] / seeds
    half_RT = process.quantile(COVERAGE) * np.sqrt(spread_RT**2 + of_seeds_T)
    return np.asarray(np.abs(mean_RT - truth_RT) <= half_RT)


def curve(world: World, ks: tuple[int, ...], draws: int) -> list[dict[str, object]]:
    """One line a number of runs and method."""
    lines: list[dict[str, object]] = []
    for k in ks:
        times = 1 if k == len(world.features) and world.held is not None else max(draws * 32 // max(k, 32), 3)
        results = [draw(world, k, stream(0, "curves", world.name, k, at)) for at in range(times)]
        for method in results[0]:
            values = np.array([result[method] for result in results])
            error = values.std(axis=0, ddof=1) / np.sqrt(times) if times > 1 else np.full(values.shape[1], np.nan)
            line = {"world": world.name, "runs": k, "method": method, "draws": times}
            line |= {"rho": round(float(values[:, 0].mean()), 4), "rho_of_mean": round(float(values[:, 1].mean()), 4)}
            if times > 1:
                line["rho_interval"] = [round(float(values[:, 0].mean() + z * error[0]), 4) for z in (-1.96, 1.96)]
            if method != "relevance" and "relevance" in results[0]:
                gain = values[:, 0] - np.array([result["relevance"][0] for result in results])
                wide = 1.96 * gain.std(ddof=1) / np.sqrt(times)
                line |= {"gain": round(float(gain.mean()), 4)}
                line |= {"gain_interval": [round(float(gain.mean() + z * wide), 4) for z in (-1, 1)]}
            if values.shape[1] > 2:
                names = ("coverage", "coverage_middle", "coverage_edge", "percent_error")
                line |= {name: round(float(values[:, 2 + k].mean()), 4) for k, name in enumerate(names)}
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of RegMix's runs")
    parser.add_argument("--worlds", type=Path, required=True, help="directory of the artifacts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=16, help="random choices of up to 32 runs; fewer of more")
    parser.add_argument("--only", default="", help="worlds whose name begins so; the others stay as they are in --out")
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {"ceilings": {}, "curves": []}
    makers: list[tuple[str, tuple[int, ...], Callable[[], World]]] = [
        (name, KS, lambda name=name, art=art: of_environment(name, art, args.worlds)) for name, art in WORLDS
    ]
    for first, second in CROSSED:
        makers.append(
            (f"{first} to {second}", KS, lambda first=first, second=second: crossed(first, second, args.worlds))
        )
    makers.append(("regmix", REGMIX_KS, lambda: of_regmix(args.data)))
    for name, ks, make in makers:
        if name.startswith(args.only):
            world = make()
            known["ceilings"][world.name] = ceiling(world.utility_RST)
            others = [line for line in known["curves"] if line["world"] != world.name]
            known["curves"] = others + curve(world, ks, args.draws)
            args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
