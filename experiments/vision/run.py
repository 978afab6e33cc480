"""Noisy labels on CIFAR-10: AUROC of detection, accuracy after training on the best part, LDS of the head.

    python -m experiments.vision.features --images cifar10_subset.parquet
    python -m experiments.vision.run --images cifar10_subset.parquet --out experiments/vision/result.json

The backbone is frozen; the model that is retrained is a linear head on 128 principal components of its features.
Killed at any moment, the same command goes on: what is done is kept in --work.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.detection import auroc
from experiments.vision import command, methods
from experiments.vision.command import Pictures
from experiments.vision.features import SPLITS, chosen, splits
from experiments.vision.fit_head import fit_linear
from experiments.vision.methods import Head
from grasp.arrays import F64
from grasp.runs.metrics import spearman
from grasp.seeds import stream

NOISE, COMPONENTS, DECAY, CLASSES = 0.1, 128, 0.05, 10
SHARES = (0.2, 0.4, 0.6, 0.8)
METHODS = {
    "random": methods.random,
    "KNN-Shapley": methods.knn,
    "influence": methods.influence,
    "TRAK": methods.trak,
    "in-run 1": lambda head, seed: methods.in_run(head, seed, 1),
    "in-run 2": lambda head, seed: methods.in_run(head, seed, 2),
}
COMMAND = ("GRASP (pooled)", "GRASP (token)", "detect: geometry", "detect: fused")  # of grasp build and grasp detect


class World:
    """Pictures, their features in principal components, and the labels of each noise seed."""

    def __init__(self, work: Path, images: Path) -> None:
        parts = splits(work)
        self.features = {name: part.hidden_NH for name, part in parts.items()}
        self.encoded = {name: [row["image"] for row in chosen(images, *SPLITS[name])] for name in ("train", "trusted")}
        train = parts["train"].hidden_NH.astype(np.float64)
        mean = train.mean(axis=0)
        basis = np.linalg.svd(train - mean, full_matrices=False)[2][:COMPONENTS]
        scale = float(((train - mean) @ basis.T).std())
        self.hidden = {n: (p.hidden_NH.astype(np.float64) - mean) @ basis.T / scale for n, p in parts.items()}
        self.label = {name: part.class_N for name, part in parts.items()}

    def noisy(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A tenth of the training labels moved to another class, drawn evenly."""
        draw = stream(seed, "vision", "noise")
        label = self.label["train"].copy()
        changed = draw.choice(len(label), size=round(NOISE * len(label)), replace=False)
        label[changed] = (label[changed] + draw.integers(1, CLASSES, size=len(changed))) % CLASSES
        return label, label != self.label["train"]

    def fit(self, label: NDArray[np.int64], rows: NDArray[np.int64] | slice = slice(None)) -> tuple[F64, F64]:
        return fit_linear(self.hidden["train"][rows], label[rows], CLASSES, decay=DECAY, steps=60)

    def head(self, label: NDArray[np.int64]) -> Head:
        weight, bias = self.fit(label)
        hidden, trusted = self.hidden["train"], self.hidden["trusted"]
        return Head(weight, bias, DECAY, hidden, label, trusted, self.label["trusted"])

    def command(self, label: NDArray[np.int64]) -> dict[str, F64]:
        """Values (N,) by `grasp build` and `grasp detect` with the head that is fitted to the labels."""
        return command.values(self.pictures(self.hidden), label, self.fit(label), CLASSES)

    def pictures(self, features: Mapping[str, NDArray[np.floating[Any]]]) -> Pictures:
        train, trusted = self.encoded["train"], self.encoded["trusted"]
        return Pictures(train, trusted, features["train"], features["trusted"], self.label["trusted"])

    def accuracy(self, weight: F64, bias: F64) -> float:
        return float(((self.hidden["test"] @ weight.T + bias).argmax(axis=1) == self.label["test"]).mean())

    def utility(self, weight: F64, bias: F64) -> float:
        """Minus the loss on the trusted images, nats."""
        logits = self.hidden["trusted"] @ weight.T + bias
        label_logits = logits[np.arange(len(logits)), self.label["trusted"]]
        return float((label_logits - np.logaddexp.reduce(logits, axis=1)).mean())


def retrained(world: World, label: NDArray[np.int64], halves: list[NDArray[np.int64]], cache: Path) -> F64:
    """Utilities of heads trained on parts of the rows, (B,); each is kept when it is there."""
    done: list[float] = json.loads(cache.read_text()) if cache.exists() else []
    for rows in halves[len(done) :]:
        done.append(world.utility(*world.fit(label, rows)))
        part = cache.with_suffix(".part")
        part.write_text(json.dumps(done))
        part.replace(cache)
    return np.array(done[: len(halves)])


def random_halves(n_rows: int, n_subsets: int, *name: str | int) -> list[NDArray[np.int64]]:
    return [stream(0, "vision", *name, b).permutation(n_rows)[: n_rows // 2] for b in range(n_subsets)]


def datamodels(world: World, seed: int, n_subsets: int, work: Path) -> F64:
    """Values (N,) fitted on retrained halves of their own, which neither AUROC nor LDS is measured on."""
    label, _ = world.noisy(seed)
    halves = random_halves(len(label), n_subsets, "datamodels", seed)
    realized_B = retrained(world, label, halves, work / f"datamodels-{seed}.json")
    return methods.datamodels(halves, realized_B, len(label))


def one_seed(world: World, seed: int, cache: Path, n_subsets: int) -> dict[str, Any]:
    """AUROC and accuracies of every method; each method is kept when it is done."""
    out: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    label, changed = world.noisy(seed)
    head = world.head(label)
    out["all rows"] = {"accuracy": world.accuracy(head.weight_VH, head.bias_V)}
    values = {name: make(head, seed) for name, make in METHODS.items() if name not in out}
    if not set(COMMAND) <= set(out):
        values |= world.command(label)
    if "datamodels" not in out:
        values["datamodels"] = datamodels(world, seed, n_subsets, cache.parent)
    for name, value in values.items():
        order = np.argsort(-value, kind="stable")
        best = {f"{s:.0%}": world.accuracy(*world.fit(label, order[: round(s * len(order))])) for s in SHARES}
        out[name] = {"auroc": auroc(-value, changed), **best}
        part = cache.with_suffix(".part")
        part.write_text(json.dumps(out))
        part.replace(cache)
    return {name: out[name] for name in ("all rows", *METHODS, *COMMAND, "datamodels")}


def lds(world: World, subsets: int, cache: Path, n_fitted: int) -> dict[str, float]:
    """Spearman of summed values and the trusted utility after retraining on random halves, noise seed 0."""
    label, _ = world.noisy(0)
    halves = random_halves(len(label), subsets, "half")
    realized, head = retrained(world, label, halves, cache), world.head(label)
    draws = stream(0, "vision", "bootstrap").integers(subsets, size=(1000, subsets))
    values = {name: make(head, 0) for name, make in METHODS.items()}
    values |= {name: value for name, value in world.command(label).items() if name.startswith("GRASP")}
    values["datamodels"] = datamodels(world, 0, n_fitted, cache.parent)
    out = {}
    for name, value in values.items():
        sums = np.array([value[rows].sum() for rows in halves])
        resampled = [float(spearman(sums[d, None], realized[d, None])[0]) for d in draws]
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        out[name] = {
            "rho": float(spearman(sums[:, None], realized[:, None])[0]),
            "low": float(low),
            "high": float(high),
        }
    return out


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over noise seeds, with a 95 % interval of Student's t."""
    from scipy.stats import t  # noqa: PLC0415

    wide = float(t.ppf(0.975, len(seeds) - 1)) / np.sqrt(len(seeds)) if len(seeds) > 1 else float("nan")
    out: dict[str, Any] = {}
    for name, figures in seeds[0].items():
        column = {figure: np.array([seed[name][figure] for seed in seeds]) for figure in figures}
        out[name] = {f: {"mean": float(v.mean()), "half": wide * float(v.std(ddof=1))} for f, v in column.items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="Parquet of image, label, split, image_id.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--subsets", type=int, default=200, help="halves that LDS is measured on")
    parser.add_argument("--fitted", type=int, default=500, help="halves that datamodels are fitted on, a noise seed")
    args = parser.parse_args()
    world, began = World(args.work, args.images), time.process_time()
    seeds = []
    for seed in range(args.seeds):
        seeds.append(one_seed(world, seed, args.work / f"noise-{seed}.json", args.fitted))
        print(f"noise seed {seed}: {time.process_time() - began:.0f} CPU s", flush=True)
    results = {"noise_seeds": args.seeds, "datamodels_subsets": args.fitted, "table": summary(seeds)}
    args.out.write_text(json.dumps(results, indent=1))
    if args.subsets:
        results |= {
            "lds_subsets": args.subsets,
            "lds": lds(world, args.subsets, args.work / "halves.json", args.fitted),
        }
        args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
