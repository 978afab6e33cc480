"""The same laws on public runs without an artifact: 512 mixtures of 17 domains of the Pile, of RegMix, 1 M parameters.

    python -m experiments.exposure.regmix ../shared/data/regmix --out experiments/exposure/regmix.json

Nothing is repeated there: a share is all that a domain gets. A ridge regression learns from 32 runs what each domain's
f(times) is worth to each validation loss, and ranks the 256 test runs: mean rank correlation over losses and 16 draws.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import RidgeCV

from experiments.exposure.law import LAWS
from grasp.runs.metrics import spearman
from grasp.seeds import stream

RUNS, DRAWS = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regmix", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    read = {
        name: pd.read_csv(args.regmix / f"{name}_1m.csv").set_index("index").sort_index().to_numpy()
        for name in ("train_mixture", "train_pile_loss", "test_mixture", "test_pile_loss")
    }
    even_G = read["train_mixture"].mean(axis=0)
    results: dict[str, float] = {}
    for name, law in LAWS.items():
        train_RG, test_RG = (law(read[f"{part}_mixture"] / even_G) for part in ("train", "test"))
        rhos = []
        for draw in range(DRAWS):
            rows = stream(0, "exposure", "regmix", draw).permutation(len(train_RG))[:RUNS]
            scale_G = np.maximum(train_RG[rows].std(axis=0), 1e-9)
            ridge = RidgeCV(np.geomspace(1e-2, 1e3, 11)).fit(train_RG[rows] / scale_G, read["train_pile_loss"][rows])
            rhos.append(spearman(ridge.predict(test_RG / scale_G), read["test_pile_loss"]).mean())
        results[name] = float(np.mean(rhos))
        print(f"{name:10s} {results[name]:.3f}")
    args.out.write_text(json.dumps({"runs": RUNS, "draws": DRAWS, "rho": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
