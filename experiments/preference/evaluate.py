"""Compare predictions with models that DPO trained on subsets of the pool.

    python -m experiments.preference.evaluate --work bench-out/preference --out experiments/preference/result.json \
        --margin experiments/margin/result.json

All methods predict a subset by the mean score of its pairs. For `experiments/margin` predictions by the loss and by the
margin are compared with the accuracy of the same models.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import grasp
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import RowStore
from grasp.files import write_atomically
from grasp.models.build_source import BuildSource
from grasp.predict.predictor import Predictor
from grasp.runs.alignment import Alignment
from grasp.runs.metrics import Estimate, noise_ceilings, rank_correlations, target_metrics
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import bootstrap_weights

TASKS = ("arc_easy", "openbookqa", "commonsense_qa", "socialiqa")
SHOWN = ("mean_lds", "task_rho")


def numbers(estimate: Estimate) -> list[float | None]:
    return [None if end is None else round(float(end), 3) for end in (estimate.value, estimate.low, estimate.high)]


def mean_of(rows: Mapping[str, F64], value: Mapping[str, float]) -> list[float]:
    """Return the mean over tasks and its interval, from resamples of the subsets that tasks share."""
    mean_R = np.mean(list(rows.values()), axis=0)
    low, high = np.nanpercentile(mean_R, (2.5, 97.5))
    return [round(float(x), 3) for x in (np.mean(list(value.values())), low, high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("work", "out", "margin"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    runs = RetrainedRuns.open(args.work / "env")
    pairs, chosen = (ArtifactReader.open(args.work / f"{name}-art") for name in ("pairs", "chosen"))
    alignment = Alignment.from_runs(runs, pairs)
    weights_RB = bootstrap_weights(len(runs.subset_ids))
    store = BuildSource(pairs).rows
    assert isinstance(store, RowStore)
    split = store.rows(np.arange(store.n_rows)).split_N
    assert split is not None
    lengths = {"length": store.lengths(), "chosen longer than rejected": 2 * split - store.lengths()}
    by_block = [block.weights for block in alignment.blocks]

    def mean_score(score_N: F64) -> F64:
        total_B = np.concatenate([weights.csr() @ score_N for weights in by_block])
        return np.asarray(total_B / np.concatenate([weights.sums for weights in by_block]))

    # ------------------------------------------------------------------------------------ preference: margins of tasks
    margins = [f"{task}@margin" for task in TASKS]
    evaluated = grasp.evaluate(grasp.open(args.work / "pairs-art"), runs=runs, methods="bm25", target=margins)
    lines, shared = [], {}
    for method in evaluated.methods:
        for row in method.targets:
            shared.setdefault(method.method, {})[row.target] = row
    predictor = Predictor.from_artifact(chosen, None, margins, per_unit=True)
    task_BT, unit_BE = Alignment(runs, chosen, alignment.run_targets, alignment.blocks).changes(predictor)
    columns = np.repeat(np.arange(len(margins)), predictor.units.counts_T)
    for t, target in enumerate(margins):
        realized_BSE = runs.utilities(target).values_BSE
        ceilings = noise_ceilings(realized_BSE, weights_RB)
        of_method = {"gradients of the chosen answers": (unit_BE[:, columns == t], task_BT[:, t])}
        for name, length_N in lengths.items():
            score_B = mean_score(length_N.astype(np.float64))
            of_method[name] = (np.tile(score_B[:, None], (1, realized_BSE.shape[2])), score_B)
        for name, (unit, task) in of_method.items():
            row = target_metrics(target, unit, realized_BSE, weights_RB, task_predicted_B=task, ceilings=ceilings)
            shared.setdefault(name, {})[target] = row
        lines.append({"target": target, "ceiling": {name: numbers(value) for name, value in ceilings.items()}})
    results = {
        method: {
            metric: {
                **{target: numbers(row[metric]) for target, row in rows.items()},
                "mean": mean_of(
                    {target: row.resamples[metric] for target, row in rows.items()},
                    {target: float(row[metric].value or 0.0) for target, row in rows.items()},
                ),
            }
            for metric in SHOWN
        }
        for method, rows in shared.items()
    }
    write(
        args.out, {"subsets": len(runs.subset_ids), "seeds": len(runs.info.seeds), "targets": lines, "methods": results}
    )

    # ---------------------------------------------------------------------------------- margin: accuracies of tasks
    pairs_predictor = Predictor.from_artifact(pairs, None, [*TASKS, *margins])
    change_BT = np.concatenate([pairs_predictor.change(weights) for weights in by_block])
    table = {}
    for t, task in enumerate(TASKS):
        accuracy_B = runs.utilities(f"{task}@accuracy").values_BSE.mean(axis=(1, 2))
        realized = [runs.utilities(name).values_BSE.mean(axis=(1, 2)) for name in (task, f"{task}@margin")]
        columns_B4 = np.stack([change_BT[:, t], change_BT[:, len(TASKS) + t], *realized], axis=1)
        truth_B4 = np.tile(accuracy_B[:, None], (1, 4))
        rho_4R = rank_correlations([columns_B4, truth_B4], [(0, 1)], weights_RB)[0]
        plain_4 = rank_correlations([columns_B4, truth_B4], [(0, 1)], np.ones((1, len(accuracy_B))))[0][:, 0]
        names = ("predicted loss", "predicted margin", "realized loss", "realized margin")
        table[task] = {
            "rho": dict(zip(names, plain_4, strict=True)),
            "resamples": dict(zip(names, rho_4R, strict=True)),
        }
        table[task]["accuracy"] = [round(float(x), 3) for x in (accuracy_B.mean(), accuracy_B.min(), accuracy_B.max())]
    names = tuple(table[TASKS[0]]["rho"])
    pooled = {
        name: mean_of({t: table[t]["resamples"][name] for t in TASKS}, {t: table[t]["rho"][name] for t in TASKS})
        for name in names
    }
    for which in ("predicted", "realized"):
        better, worse = f"{which} margin", f"{which} loss"
        differences = {t: table[t]["resamples"][better] - table[t]["resamples"][worse] for t in TASKS}
        values = {t: table[t]["rho"][better] - table[t]["rho"][worse] for t in TASKS}
        pooled[f"{which}: margin - loss"] = mean_of(differences, values)
    by_task = {
        task: {name: interval(table[task]["rho"][name], table[task]["resamples"][name]) for name in names}
        | {"accuracy: mean, lowest, highest": table[task]["accuracy"]}
        for task in TASKS
    }
    write(args.margin, {"rho with accuracy": by_task, "mean over tasks": pooled})


def interval(value: float, resampled_R: F64) -> list[float]:
    low, high = np.nanpercentile(resampled_R, (2.5, 97.5))
    return [round(float(x), 3) for x in (value, low, high)]


def write(path: Path, content: object) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
