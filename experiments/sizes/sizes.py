"""Do small models rank subsets as larger ones do? Every pair of retrained sizes, every reference with every size.

    experiments/sizes/run.sh

Compares the subsets that all runs have; of an unfinished environment those that are there.
Shape letters: B subsets, S seeds, T tasks, E units, R resamples.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.predict.predictor import Predictor
from grasp.predict.subset_tables import RowIndex
from grasp.runs.calibration import SubsetFeaturizer
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.metrics import bootstrap_interval, mean_defined, rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

RESAMPLES = 1_000


@dataclass(frozen=True)
class Ranked:
    """Something that ranks subsets, for every task and unit."""

    name: str
    subset_ids: tuple[str, ...]
    task_BT: F64
    unit_BE: F64

    def select(self, subset_ids: list[str]) -> "Ranked":
        at = [self.subset_ids.index(name) for name in subset_ids]
        return Ranked(self.name, tuple(subset_ids), self.task_BT[at], self.unit_BE[at])


def tasks_of(environment: RetrainedRuns, loss: str) -> dict[str, str]:
    """Its targets of one loss, completion or all, and what an artifact calls them."""
    chosen = [target for target in environment.targets if target.endswith("@all") == (loss == "all")]
    return {target: target.removesuffix("@all") for target in chosen}


def realized(name: str, path: Path, loss: str) -> tuple[Ranked, ...]:
    """What came out: the mean over the seeds, then each seed by itself where there are two."""
    environment = RetrainedRuns.open(path)
    seeds = [
        seed for seed in environment.info.seeds if len(environment.utilities(seeds=[seed], partial=True).subset_ids)
    ]
    choices = [seeds, *([seed] for seed in seeds if len(seeds) > 1)]
    return tuple(_realized(environment, chosen, name, len(seeds), loss) for chosen in choices)


def _realized(environment: RetrainedRuns, seeds: list[int], name: str, of: int, loss: str) -> Ranked:
    targets = list(tasks_of(environment, loss))
    all_units = environment.utilities(seeds=seeds, partial=True)
    unit_BE = all_units.select(*targets).values_BSE.mean(axis=1)
    task_BT = np.stack([all_units.select(target).values_BSE.mean(axis=(1, 2)) for target in targets], axis=1)
    title = name if len(seeds) == of else f"{name}, seed {seeds[0]}"
    return Ranked(title, all_units.subset_ids, task_BT, unit_BE)


def predicted(name: str, artifact: ArtifactReader, environment: RetrainedRuns, loss: str) -> Ranked:
    """The change that the shipped protocol predicts, units in the order of the environment."""
    predictor = Predictor.from_artifact(artifact, per_unit=True)
    blocks = list(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path)))
    lines = artifact.units.take(predictor.units.columns_E).select(["target", "unit_id"]).to_pylist()
    column = {(line["target"], line["unit_id"]): e for e, line in enumerate(lines)}
    tasks = tasks_of(environment, loss)
    units = [(tasks[target], unit) for target, unit in environment.units if target in tasks]
    task_BT = np.concatenate([predictor.change(block.weights) for block in blocks])
    unit_BE = np.concatenate([predictor.unit_change(block.weights, predictor.sums(block.weights)) for block in blocks])
    ids = tuple(subset_id for block in blocks for subset_id in block.subset_ids)
    order_T = [predictor.units.targets.index(target) for target in tasks.values()]
    return Ranked(name, ids, task_BT[:, order_T], unit_BE[:, [column[unit] for unit in units]])


def agreement(first: Ranked, second: Ranked, subset_ids: list[str], *, units: bool = True) -> dict[str, Any]:
    """Spearman's rho over subsets: mean over tasks, over units, over units less the mean of all; 95 % intervals.

    What a run adds to all units alike, a lucky order of rows say, is not in the last of them.
    """
    result: dict[str, Any] = {"one": first.name, "other": second.name, "subsets": len(subset_ids)}
    return result | _compared([first, second], [(0, 1)], [1.0], subset_ids, units)


def beyond_seeds(seeds: list[Ranked], other: Ranked, subset_ids: list[str]) -> dict[str, Any]:
    """How much better a run of two seeds agrees with another size than the seeds with each other; both means of rho."""
    pairs, signs = [(0, 2), (1, 2), (0, 1)], [0.5, 0.5, -1.0]
    return {"other": other.name} | _compared([*seeds, other], pairs, signs, subset_ids, True)


def _compared(
    ranked: list[Ranked], pairs: list[tuple[int, int]], signs: list[float], subset_ids: list[str], units: bool
) -> dict[str, Any]:
    """A sum over pairs of rho by level, with its interval over subsets."""
    ranked, n = [each.select(subset_ids) for each in ranked], len(subset_ids)
    rng = stream(0, "sizes", "resamples")
    weights_RB = np.concatenate([np.ones((1, n)), rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)])
    most = float(np.abs(signs).sum())
    levels = {"task": [each.task_BT for each in ranked]}
    if units:
        levels["unit"] = [each.unit_BE for each in ranked]
        levels["unit, centred"] = [each.unit_BE - each.unit_BE.mean(axis=1, keepdims=True) for each in ranked]
    result = {}
    for level, columns in levels.items():
        rho_R = np.array(signs) @ mean_defined(rank_correlations(columns, pairs, weights_RB), axis=1)
        got = bootstrap_interval(float(rho_R[0]), rho_R[1:], lowest=-most, highest=most, reason="")
        result[level] = [got.value, got.low, got.high]
    return result


def carried_over(
    name: str, artifact: ArtifactReader, small: Path, targets_of: list[Ranked], subset_ids: list[str], loss: str
) -> Any:
    """Learn from the small runs on all other subsets; rank these subsets by relevance and by what was learned."""
    environment = RetrainedRuns.open(small)
    predictor = Predictor.from_artifact(artifact, sketches=("hidden", "residual"))
    assert environment.label is not None
    known = SubsetFeaturizer.from_predictor(predictor, artifact, (environment.label,))
    blocks = environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path))
    features = SubsetFeatures.concatenate([known.features(block.weights) for block in blocks])
    named = {task: target for target, task in tasks_of(environment, loss).items()}
    columns = [environment.utilities(named[task]).values_BSE.mean(axis=2) for task in predictor.units.targets]
    utility_BST = np.stack(columns, axis=2)
    held = np.isin(environment.subset_ids, subset_ids)
    process = GaussianProcess.fit(features.take(np.flatnonzero(~held)), utility_BST[~held])
    order = [environment.subset_ids.index(subset_id) for subset_id in subset_ids]
    held_out = features.take(np.array(order))
    order_T = [predictor.units.targets.index(task) for task in named]
    ways = {"relevance": held_out.relevance_BT, "learned": process.predict(held_out)[0]}
    ranked = [
        Ranked(f"{prediction} ({name})", tuple(subset_ids), value_BT[:, order_T], value_BT[:, order_T])
        for prediction, value_BT in ways.items()
    ]
    lines = [agreement(prediction, target, subset_ids, units=False) for target in targets_of for prediction in ranked]
    return {"learned from": int((~held).sum()), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="append", required=True, metavar="SIZE=ENVIRONMENT")
    parser.add_argument("--art", action="append", required=True, metavar="SIZE=ARTIFACT")
    parser.add_argument("--loss", choices=("completion", "all"), default="completion")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = {name: Path(place) for name, _, place in (run.partition("=") for run in args.runs)}
    arts = {name: ArtifactReader.open(place) for name, _, place in (argument.partition("=") for argument in args.art)}
    came_out = [outcome for name, path in runs.items() for outcome in realized(name, path, args.loss)]
    subset_ids = [
        subset_id for subset_id in came_out[0].subset_ids if all(subset_id in each.subset_ids for each in came_out)
    ]
    whole = [outcome for outcome in came_out if "seed" not in outcome.name]
    small = RetrainedRuns.open(next(iter(runs.values())))
    references = [predicted(f"predicted by {name}", art, small, args.loss) for name, art in arts.items()]
    result = {
        "subsets": len(subset_ids),
        "retrained": [agreement(a, b, subset_ids) for a, b in itertools.combinations(came_out, 2)],
        "beyond seeds": [beyond_seeds(came_out[1:3], outcome, subset_ids) for outcome in whole[1:]],
        "references": [agreement(a, b, subset_ids) for a, b in itertools.combinations(references, 2)],
        "predicted": [agreement(reference, outcome, subset_ids) for reference in references for outcome in came_out],
        "learned": {
            name: carried_over(name, art, small.path, whole, subset_ids, args.loss) for name, art in arts.items()
        },
        "utility": {outcome.name: float(outcome.select(subset_ids).task_BT.mean()) for outcome in whole},
        "spread": {outcome.name: outcome.select(subset_ids).task_BT.std(axis=0).tolist() for outcome in whole},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
