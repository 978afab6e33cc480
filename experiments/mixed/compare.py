"""Mixtures proposed in several ways, to be trained; and which of them brought how much to questions nobody chose by.

    python -m experiments.mixed.compare halve RUNS ART --out RUNS-HALF
    python -m experiments.mixed.compare propose ART --runs RUNS-HALF --by source --out mixed.parquet
    grasp retrain --like ART --set subsets=mixed.parquet ... --out MIXED
    python -m experiments.mixed.compare judge ART --mixed MIXED --out mixed.json

An artifact has the first questions of each target only, and the runs are cut to the same. What is proposed is chosen by
these alone, and judged by the others, with seeds that no run had. Shares are of rows.

Shape letters: R runs, B mixtures, G values of the label, T targets, S seeds, E questions.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightgbm import LGBMRegressor
from numpy.typing import NDArray
from scipy.special import stdtrit
from sklearn.linear_model import RidgeCV

from experiments.exposure.repeated import STRENGTH
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_tokens
from grasp.predict.families import draw_dirichlet_shares, parse_family
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.runs.alignment import unit_fingerprints
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import WHOLE_CORPUS_RUN, Run, TargetInfo
from grasp.seeds import stream
from grasp.select.mix import mix

TARGETS = ("sciq", "openbookqa")  # said before anything was trained
SIMULATED, AVERAGED = 100_000, 100  # mixtures that a regression is asked about, and the best of them that are averaged
LOGS = (0.001, 0.003, 0.01, 0.03)  # c of log(share + c): the one that leaves out one run best
RIDGES = np.geomspace(1e-3, 1e3, 13)
METHODS = ("relevance", "relevance and runs", "best run", "log-share regression", "RegMix")
LATER: dict[str, dict[str, Any]] = {  # tried after the others were judged: is it the bounds?
    "runs, 8 times": {"max_repeat": 8.0},
    "runs, 8 times, cautious": {"max_repeat": 8.0, "cautious": True},
}
COVERAGE = 0.95


# ----------------------------------------------------------------------------------------------- ways to propose


def log_shares(share_RG: F64, utility_R: F64) -> Callable[[F64], F64]:
    """Ridge regression on the logarithms of shares."""
    fits = [(c, RidgeCV(RIDGES).fit(np.log(share_RG + c), utility_R)) for c in LOGS]
    c, fit = max(fits, key=lambda pair: pair[1].best_score_)
    return lambda share_BG: np.asarray(fit.predict(np.log(share_BG + c)))


def regmix(share_RG: F64, utility_R: F64) -> Callable[[F64], F64]:
    """Boosted trees with the settings of the RegMix repository, but for leaves: by default they hold 20 runs."""
    fit = LGBMRegressor(
        n_estimators=1000, learning_rate=1e-2, random_state=42, verbosity=-1, min_child_samples=2, min_data_in_bin=1
    ).fit(share_RG, utility_R)
    return lambda share_BG: np.asarray(fit.predict(share_BG))


REGRESSIONS = {"log-share regression": (log_shares, 1), "RegMix": (regmix, AVERAGED)}


def simulated(runs: RetrainedRuns, rows_G: NDArray[np.int64]) -> F64:
    """(B, G) shares drawn as those of the runs were: by the family `dirichlet`, or by `exposure.repeated`."""
    rng = stream(0, "mixed", "simulated")
    if runs.info.family is None:
        return rng.dirichlet(np.full(len(rows_G), STRENGTH), size=SIMULATED)
    assert parse_family(runs.info.family.spec).kind == "dirichlet"
    return np.stack([draw_dirichlet_shares(rng, rows_G / rows_G.sum()) for _ in range(SIMULATED)])


def proposed(artifact: ArtifactReader, runs: RetrainedRuns, label: str) -> Iterator[WeightedRows]:
    """A mixture of each method for each target."""
    slices = label_slices(label_column(artifact, label, "by"), row_tokens(artifact))
    current_G = slices.rows_G / slices.rows_G.sum()
    (block,) = runs.subset_blocks(RowIndex.from_parquet(artifact.rows_path))
    weight_RG = (block.weights_BN @ slices.each.csr().T).toarray()
    share_RG = weight_RG / weight_RG.sum(axis=1, keepdims=True)
    simulated_BG = simulated(runs, slices.rows_G)

    def of_shares(name: str, share_G: F64) -> WeightedRows:
        weight_N = (share_G / current_G)[slices.codes_N]
        kept_rows = np.flatnonzero(weight_N)
        return WeightedRows(name, kept_rows, weight_N[kept_rows])

    for target in TARGETS:
        utility_R = runs.task_utilities([target]).mean(axis=(1, 2))
        for method, run_set in (("relevance", None), ("relevance and runs", runs)):
            mixture = mix(artifact, label, target, runs=run_set)
            yield of_shares(f"{method}: {target}", mixture.table["proposed"].to_numpy())
        for method, (fit, averaged) in REGRESSIONS.items():
            guess_B = fit(share_RG, utility_R)(simulated_BG)
            best_BG = simulated_BG[np.argsort(-guess_B, kind="stable")[:averaged]]
            yield of_shares(f"{method}: {target}", best_BG.mean(axis=0))
    best_T = runs.task_utilities(TARGETS).mean(axis=1).argmax(axis=0)
    for b in dict.fromkeys(best_T.tolist()):
        (best_N,) = block.weights_BN[[b]].toarray()
        same = " and ".join(target for target, best in zip(TARGETS, best_T, strict=True) if best == b)
        yield WeightedRows(f"best run: {same}", np.flatnonzero(best_N), best_N[best_N > 0])
    for method, settings in LATER.items():
        for target in TARGETS:
            mixture = mix(artifact, label, target, runs=runs, **settings)
            yield of_shares(f"{method}: {target}", mixture.table["proposed"].to_numpy())


# ------------------------------------------------------------------------------------------------ halve and judge


def split_on_oom(runs: RetrainedRuns, artifact: ArtifactReader, out: Path) -> RetrainedRuns:
    """The same runs with the units alone that the artifact has."""
    fingerprints = unit_fingerprints(artifact, "completion")
    ids = {
        target: tuple(line["unit_id"] for line in artifact.units.to_pylist() if line["target"] == target)
        for target in artifact.targets
    }
    info = runs.info.model_copy(
        update={
            "targets": {
                t: TargetInfo(fingerprint=fingerprints[t], loss_on="completion", unit_ids=ids[t])
                for t in artifact.targets
            }
        }
    )
    rows = RowIndex.from_parquet(artifact.rows_path)
    fewer = RetrainedRuns.create(out, info, runs.subset_blocks(rows), rows)
    shared_units = [e for e, (target, unit) in enumerate(runs.units) if unit in ids.get(target, ())]
    assert [runs.units[e] for e in shared_units] == list(fewer.units)
    values, whole_SE = runs.utilities(), runs.reference_utilities()
    for s, seed in enumerate(values.seeds):
        for b, name in enumerate(values.subset_ids):
            fewer.write_run(Run(seed, name), values.values_BSE[b, s, shared_units])
        fewer.write_run(Run(seed, WHOLE_CORPUS_RUN), whole_SE[s, shared_units])
    fewer.compact()
    return fewer


def judged(artifact: ArtifactReader, mixed: RetrainedRuns) -> list[dict[str, object]]:
    """Change of each mixture against the corpus and against the regression, by questions that the artifact lacks.

    The interval is of two parts: questions by their spread, and seeds by theirs, pooled over all mixtures and targets.
    """
    known = {(line["target"], line["unit_id"]) for line in artifact.units.to_pylist()}
    values, whole_SE = mixed.utilities(), mixed.reference_utilities()
    change_BSE = values.values_BSE - whole_SE[None]
    new_E = np.array([unit not in known for unit in mixed.units])
    place = {
        (method, target): b
        for b, (method, _, targets) in enumerate(name.partition(": ") for name in values.subset_ids)
        for target in targets.split(" and ")
    }
    n_seeds = len(values.seeds)
    pairs: dict[tuple[str, str, str], F64] = {}
    for target in TARGETS:
        columns = np.flatnonzero(new_E & (np.array(values.targets) == target))
        methods = [*METHODS, *(later for later in LATER if (later, target) in place)]
        change_by_method = {method: change_BSE[place[method, target]][:, columns] for method in methods}
        for method in methods:
            pairs[target, method, "the corpus"] = change_by_method[method]
            for other in ("log-share regression", "RegMix", "best run"):
                if method not in ("best run", *REGRESSIONS):
                    pairs[target, method, other] = change_by_method[method] - change_by_method[other]
    lines: list[dict[str, object]] = []
    for against in ("the corpus", "log-share regression", "RegMix", "best run"):
        selected_pairs = {key: value_SE for key, value_SE in pairs.items() if key[2] == against}
        freedom = len(selected_pairs) * (n_seeds - 1)
        seed_variance = sum(float(value_SE.mean(axis=1).var(ddof=1)) for value_SE in selected_pairs.values()) / len(
            selected_pairs
        )
        for (target, method, _), value_SE in selected_pairs.items():
            of_unit = float(value_SE.mean(axis=0).var(ddof=1)) / value_SE.shape[1]
            half = float(stdtrit(freedom, 0.5 + COVERAGE / 2)) * np.sqrt(of_unit + seed_variance / n_seeds)
            mean = float(value_SE.mean())
            lines.append(
                {
                    "target": target,
                    "method": method,
                    "against": against,
                    "change": mean,
                    "low": mean - half,
                    "high": mean + half,
                }
                | {"seeds": value_SE.mean(axis=1).tolist(), "questions": value_SE.shape[1]}
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("halve")
    first.add_argument("runs", type=Path)
    second = verbs.add_parser("propose")
    third = verbs.add_parser("judge")
    for environment in (first, second, third):
        environment.add_argument("artifact", type=Path)
        environment.add_argument("--out", type=Path, required=True)
    second.add_argument("--runs", type=Path, required=True)
    second.add_argument("--by", required=True)
    third.add_argument("--mixed", type=Path, required=True)
    args = parser.parse_args()
    artifact = ArtifactReader.open(args.artifact)
    if args.verb == "halve":
        print(split_on_oom(RetrainedRuns.open(args.runs), artifact, args.out))
    elif args.verb == "propose":
        subsets = list(proposed(artifact, RetrainedRuns.open(args.runs), args.by))
        index = RowIndex.from_parquet(artifact.rows_path)
        write_subsets(args.out, in_blocks(subsets, artifact.n_rows), index, weights=True)
    else:
        lines = judged(artifact, RetrainedRuns.open(args.mixed))
        args.out.write_text(json.dumps(lines, indent=1) + "\n")
        for line in lines:
            print(
                "{target:12s} {method:22s} against {against:22s} {change:+.3f} [{low:+.3f}, {high:+.3f}]".format(**line)
            )


if __name__ == "__main__":
    main()
