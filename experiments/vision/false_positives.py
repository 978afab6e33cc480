"""Share of right rows that the threshold of `grasp detect` flags: simulated scores, CIFAR-10, artifacts of clean texts.

    python -m experiments.vision.false_positives --images cifar10_subset.parquet --artifact art

CIFAR-10 needs what `experiments.vision.features` keeps. With a tenth of the labels wrong: the share of right rows that
is flagged and of wrong ones that is found, by the null fitted to the scores, and by 200 right rows drawn at random.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.contamination.run import unit_scores
from experiments.vision.run import COMMAND, World
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.seeds import stream
from grasp.vision.detect import relevance_array
from grasp.vision.detection import conformal_threshold, estimate_threshold, matching_threshold, mean_ranks

RATES, CHECKED = (0.01, 0.05), 200
SHAPES: dict[str, Callable[[np.random.Generator, int], F64]] = {
    "normal": lambda draw, n: draw.standard_normal(n),
    "gamma(2)": lambda draw, n: draw.gamma(2, size=n),
    "minus gamma(2)": lambda draw, n: -draw.gamma(2, size=n),
    "minus exponential": lambda draw, n: -draw.standard_exponential(n),
    "t, 5 degrees": lambda draw, n: draw.standard_t(5, n),
    "largest of 128 normal": lambda draw, n: draw.standard_normal((n, 128)).max(axis=1),
    "largest of 128 exponential": lambda draw, n: draw.standard_exponential((n, 128)).max(axis=1),
}


def simulated(repeats: int = 50) -> Iterator[tuple[str, dict[str, float]]]:
    """Mean share flagged of right rows, and of fused ranks of which 60 % are tied in one part."""
    for n_rows in (1_000, 10_000):
        for name, draw_score in SHAPES.items():
            draw = stream(0, "false positives", name, n_rows)
            shares = [[_share(draw_score(draw, n_rows), rate) for rate in RATES] for _ in range(repeats)]
            yield f"{name}, {n_rows:,} rows", _named(np.mean(shares, axis=0))
        draw, shares = stream(0, "false positives", "tied", n_rows), []
        for _ in range(repeats):
            score = draw.standard_normal(n_rows)
            other = 0.5 * score + draw.standard_normal(n_rows)
            ranks = mean_ranks([score, np.maximum(other, np.quantile(other, 0.6))])
            shares.append([_share(score, rate, ranks) for rate in RATES])
        yield f"fused, 60 % tied, {n_rows:,} rows", _named(np.mean(shares, axis=0))


def texts(artifact: ArtifactReader, match: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Relevance and contamination of every target."""
    for target in artifact.targets:
        mean_N, largest_N = unit_scores(artifact, relevance_array(artifact, match), target)
        for name, score_N in (("relevance", -mean_N), ("contamination", largest_N)):
            yield f"{target}, {match}, {name}", _named([_share(score_N, rate) for rate in RATES])


def images(world: World, seeds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Labels as they are, then with a tenth of them wrong."""
    for name, score_N, ranks_N in _scores(world, world.label["train"]):
        yield f"CIFAR-10, {name}", _named([_share(score_N, rate, ranks_N) for rate in RATES])
    shares: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        label, wrong_N = world.noisy(seed)
        known_N = np.zeros(len(label), bool)
        known_N[stream(seed, "false positives", "checked").choice(np.flatnonzero(~wrong_N), CHECKED, False)] = True
        for name, score_N, ranks_N in _scores(world, label):
            for rate in RATES:
                fitted = estimate_threshold(score_N, rate)
                cuts = {
                    "fitted": fitted if ranks_N is score_N else matching_threshold(ranks_N, fitted),
                    "checked": conformal_threshold(ranks_N, known_N, rate),
                }
                for null, cut in cuts.items():
                    flagged = ranks_N > cut.value
                    line = [float(flagged[~wrong_N & ~known_N].mean()), float(flagged[wrong_N].mean())]
                    shares.setdefault(f"CIFAR-10, a tenth wrong, {name}, {null}, {rate:.0%}", []).append(line)
    for name, lines in shares.items():
        false, true = np.mean(lines, axis=0)
        yield name, {"of right": float(false), "of wrong": float(true)}


def _scores(world: World, label: NDArray[np.int64]) -> Iterator[tuple[str, F64, F64]]:
    """(name, score of which the null is, score that ranks)."""
    value = world.command(label)
    relevance_N, share_N, ranks_N = (-value[name] for name in COMMAND[1:])
    yield "relevance", relevance_N, relevance_N
    yield "geometry", share_N, share_N
    yield "fused", relevance_N, ranks_N


def _share(score_N: F64, rate: float, ranks_N: F64 | None = None) -> float:
    cut = estimate_threshold(score_N, rate)
    if ranks_N is not None and ranks_N is not score_N:
        cut = matching_threshold(ranks_N, cut)
    return cut.n_flagged / len(score_N)


def _named(shares: Any) -> dict[str, float]:
    return {f"{rate:.0%}": round(float(share), 4) for rate, share in zip(RATES, shares, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="Parquet of image, label, split, image_id.")
    parser.add_argument("--artifact", type=Path, help="Of texts, with the targets and kernels that it has.")
    parser.add_argument("--match", default="output_layer,pooled,embedding")
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("false_positives.json"))
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = dict(simulated())
    if args.artifact is not None:
        for match in args.match.split(","):
            results |= texts(ArtifactReader.open(args.artifact), match)
    results |= images(World(args.work, args.images), args.seeds)
    write_atomically(args.out, (json.dumps(results, indent=1) + "\n").encode())
    for name, shares in results.items():
        print(name, shares)


if __name__ == "__main__":
    main()
