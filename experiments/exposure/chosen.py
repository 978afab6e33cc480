"""What `select` and `mix` choose, to be trained on; and what came of it beside what was promised.

    python -m experiments.exposure.chosen propose ART --runs RUNS --by source --out chosen.parquet
    grasp retrain --like ART --set subsets=chosen.parquet --out CHOSEN
    python -m experiments.exposure.chosen judge ART --runs RUNS --chosen CHOSEN --out pairs.json

Choosing leaves the range of the runs, by what looks best. So this is where a promise is broken most easily: of each
subset and target the expected change, its interval of 90 %, and the change that came.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.runs.calibration import fit_outcomes
from grasp.runs.retrained import RetrainedRuns
from grasp.select.mix import mix
from grasp.select.select import select

BUDGETS = ("5%", "10%", "20%", "40%")


def aims(artifact: ArtifactReader) -> dict[str, list[str]]:
    """Every target by itself, and all of them."""
    return {name: [name] for name in artifact.targets} | {"all": list(artifact.targets)}


def chosen(
    artifact: ArtifactReader, runs: RetrainedRuns | None, label: str, budgets: list[str], distance: str | None
) -> Iterator[WeightedRows]:
    """Yield subsets that are selected by relevance alone or, with runs, by the change that the runs predict."""
    by = "relevance" if runs is None else "runs"
    for name, targets in aims(artifact).items():
        for budget in budgets:
            rows = np.sort(select(artifact, budget, targets, runs=runs).row_index)
            yield WeightedRows(f"{by} {name} {budget}", rows)
        mixture = mix(artifact, label, targets, runs=runs, distance=distance)
        (weight_N,) = mixture.slices.weights(mixture.table["times_as_often"].to_numpy()[None]).csr().toarray()
        kept_rows = np.flatnonzero(weight_N)
        yield WeightedRows(f"{by} {name} mixture", kept_rows, weight_N[kept_rows])


def propose(args: argparse.Namespace) -> None:
    artifact = ArtifactReader.open(args.artifact)
    run_sets = [None] if args.runs is None else [None, RetrainedRuns.open(args.runs)]
    subsets = [
        weights
        for runs in run_sets
        for weights in chosen(artifact, runs, args.by, args.budgets, args.distance)
        if not args.only or weights.subset_id.partition(" ")[2] in args.only
    ]
    index = RowIndex.from_parquet(artifact.rows_path)
    write_subsets(args.out, in_blocks(subsets, artifact.n_rows), index, weights=True)
    print("\n".join(f"{subset.subset_id}: {len(subset.row_index):,} rows" for subset in subsets))


def judge(args: argparse.Namespace) -> None:
    artifact, runs = ArtifactReader.open(args.artifact), RetrainedRuns.open(args.runs)
    trained = RetrainedRuns.open(args.chosen)
    predictor = Predictor.from_artifact(artifact, sketches=SIMILARITY_SKETCHES)
    expected, scored = fit_outcomes(predictor, artifact, runs), CandidatePredictor.from_runs(trained, artifact)
    tables = [expected.predict(block.weights) for block in scored.blocks]
    low_BT, change_BT, high_BT = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("low_BT", "change_BT", "high_BT")
    )
    targets = [scored.run_targets[name] for name in predictor.units.targets]
    came_BT = np.nanmean(trained.task_utilities(targets) - trained.task_reference(targets), axis=1)
    pairs = [
        {
            "subset": name,
            "target": target,
            "chosen_for": target in aims(artifact)[name.split()[1]],
            "expected": float(change_BT[b, t]),
            "low": float(low_BT[b, t]),
            "high": float(high_BT[b, t]),
            "came": float(came_BT[b, t]),
        }
        for b, name in enumerate(trained.subset_ids)
        for t, target in enumerate(predictor.units.targets)
    ]
    args.out.write_text(json.dumps({"pairs": pairs}, indent=1) + "\n")
    for only in (True, False):
        print_pairs(
            pairs if not only else [pair for pair in pairs if pair["chosen_for"]],
            "chosen for" if only else "all targets",
        )


def print_pairs(pairs: list[dict[str, object]], what: str) -> None:
    """How many intervals held, and whether the error has a sign."""
    expected, low, high, came = (
        np.array([pair[name] for pair in pairs], dtype=float) for name in ("expected", "low", "high", "came")
    )
    inside, error = (low <= came) & (came <= high), expected - came
    over, under = (came < low).mean(), (came > high).mean()
    print(
        f"{what}: {len(pairs)} pairs, {inside.mean():.0%} inside ({over:.0%} promised too much, {under:.0%} too "
        f"little); expected {expected.mean():+.3f}, came {came.mean():+.3f}, error {error.mean():+.3f} with a standard "
        f"error of {error.std() / np.sqrt(len(error)):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    first = verbs.add_parser("propose")
    first.add_argument("--by", required=True)
    first.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    first.add_argument("--distance", help="of mixtures; none: any")
    first.add_argument("--only", nargs="*", default=[], help="e.g. 'sciq 20%%' 'all mixture'; none: all of them")
    first.set_defaults(do=propose)
    second = verbs.add_parser("judge")
    second.add_argument("--chosen", type=Path, required=True)
    second.set_defaults(do=judge)
    for pair in (first, second):
        pair.add_argument("artifact", type=Path)
        pair.add_argument("--runs", type=Path)
        pair.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
