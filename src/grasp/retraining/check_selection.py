"""Check a selection by training: models on its rows, on random rows, and on those that BM25 finds.

Models are trained as the artifact predicts: small ones from scratch, or its model further by its recipe. Each model is
evaluated on questions of the targets that the artifact does not know. With d_q the difference of a question between two
sets of rows, averaged over S seeds, and s^2 the variance between seeds, the variance of the mean over Q questions is
var(d_q) / Q + 2 s^2 / S. Intervals are those of Student's distribution, with degrees of freedom by Welch and
Satterthwaite. Start with `check_selection`. Shape letters: B sets of rows, S seeds, Q questions.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import t as student

from grasp.arrays import F64
from grasp.artifact.manifest import ADDED_TARGETS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import indices_of_row_ids, ranked
from grasp.errors import SettingsError, TargetError
from grasp.files import check_outputs, claim_directory
from grasp.methods.registry import configure_methods, score_artifact
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.results import Result
from grasp.retraining.retrain import retrain
from grasp.runs.retrained import MARKER, RetrainedRuns, is_environment
from grasp.seeds import stream
from grasp.select.select import allowed_rows
from grasp.select.summaries import SelectionSummary, read_summary
from grasp.targets.load import target_name

SETS = ("selection", "random", "bm25")
SEEDS = 2  # models per set
QUESTIONS = 256  # other questions per target
LEVEL = 0.95


def check_selection(
    artifact: ArtifactReader,
    selection: Path | str,
    *,
    out: Path | str,
    progress: Callable[[Any], None] | None = None,
) -> Result:
    """Compare models trained on a selection, on random rows and on BM25's.

    The three sets have the same number of rows, and none that --exclude-where or --drop-leaks excluded. The models are
    compared on questions of the targets that the artifact was not built with. They are trained as the artifact
    predicts: from scratch or, with `--train further`, by its recipe. An interrupted check continues with the same
    command.

    Args:
        artifact: artifact of the selection.
        selection: .json or .parquet written by `grasp select --out`.
        out: directory of the runs, with the three sets in sets.parquet.
        progress: callback that receives every stage and step.
    Returns:
        One row per target and set: utility, and the gain over random rows with its 95 % interval, in nats per token.
    Raises:
        SettingsError: the selection is of another artifact, or `out` is not a directory for the runs.
    """
    selection, out = Path(selection), Path(out)
    summary = read_summary(SelectionSummary, selection.with_suffix(".json"), artifact)
    claim_directory(out, MARKER, is_environment, artifact.protected_paths)
    weights = {change.target: change.weight for change in summary.targets}
    row_ids = pq.read_table(selection.with_suffix(".parquet"), columns=["row_id"])["row_id"].to_pylist()
    selected, n_rows = indices_of_row_ids(artifact, row_ids), artifact.n_rows
    (bm25,) = configure_methods("bm25")
    scores = score_artifact(artifact, bm25)
    by_words_N: F64 = np.zeros(n_rows)
    for target, weight in weights.items():
        score_N = np.asarray(scores.means(target), np.float64)
        by_words_N += weight * score_N / (score_N.std() or 1.0)
    params = summary.params
    allowed_N, _ = allowed_rows(artifact, weights, params["exclude_where"], drop_leaks=params["drop_leaks"])
    listed = ["rows that --exclude lists are in the other sets"] * (params["excluded_rows"] > int((~allowed_N).sum()))
    by_words = ranked(by_words_N, among_N=allowed_N, count=len(selected))
    at_random = stream(0, "check selection").permutation(np.flatnonzero(allowed_N))[: len(selected)]
    sets = [WeightedRows(name, np.sort(rows)) for name, rows in zip(SETS, (selected, at_random, by_words), strict=True)]
    corpus, table = artifact.manifest.fingerprints.get("corpus", ""), out / "sets.parquet"
    check_outputs({"out": table}, {"is the selection": selection.with_suffix(".parquet")})
    write_subsets(table, in_blocks(sets, n_rows, len(sets)), RowIndex.from_parquet(artifact.rows_path), corpus=corpus)
    questions = {"exclude_units": artifact.units["unit_id"].to_pylist(), "units_per_target": QUESTIONS}
    manifest = artifact.manifest
    names = [*manifest.settings["targets"]["names"], *manifest.details.get(ADDED_TARGETS, ())]
    if requested := [name for name in names if name in weights or target_name(name) in weights]:
        questions["names"] = requested  # without the other targets of the artifact
    settings: dict[str, Any] = {"subsets": str(table), "targets": questions}
    if manifest.settings.get("train") == "further":
        recipe = manifest.settings.get("recipe") or {}
        # fields of an adapter without a rank would be those of an incomplete one
        fields = {name: recipe[name] for name in recipe if recipe["lora_r"] or not name.startswith("lora_")}
        settings |= {"train": "further", "fine_tuning": fields}
    try:
        runs = retrain(like=artifact.location, out=out, seeds=SEEDS, settings=settings, progress=progress)
    except TargetError as err:
        raise SettingsError(f"check-selection: no questions that the artifact was not built with: {err}") from err
    lines = [line for target in weights for line in _compare(runs, target)]
    return Result(
        pa.Table.from_pylist(lines),
        f"{len(selected):,} of {n_rows:,} rows in each set, {SEEDS} models each, on other questions",
        ("gain: against random rows, in nats per token; 95 % interval over questions and seeds", *listed),
    )


def _compare(runs: RetrainedRuns, target: str) -> Iterator[dict[str, str | int | float | None]]:
    """Yield the results of each set for one target."""
    utilities = runs.utilities(target)
    value_BSQ = utilities.values_BSE[[utilities.subset_ids.index(name) for name in SETS]]
    n_sets, n_seeds, n_questions = value_BSQ.shape
    seed_variance = float(value_BSQ.mean(axis=2).var(axis=1, ddof=1).mean())
    for b, name in enumerate(SETS):
        line = {"target": target, "set": name, "questions": n_questions, "utility": float(value_BSQ[b].mean())}
        line |= dict.fromkeys(("gain", "gain_low", "gain_high"))
        if name != "random":
            gain_Q: F64 = (value_BSQ[b] - value_BSQ[1]).mean(axis=0)
            gain = line["gain"] = float(gain_Q.mean())
            if n_questions > 1:
                parts = np.array([gain_Q.var(ddof=1) / n_questions, 2 * seed_variance / n_seeds])
                freedom = np.array([n_questions - 1, n_sets * (n_seeds - 1)])
                total = parts.sum()
                scale = student.ppf((1 + LEVEL) / 2, total**2 / (parts**2 / freedom).sum()) if total > 0 else 0.0
                line |= {"gain_low": gain - scale * np.sqrt(total), "gain_high": gain + scale * np.sqrt(total)}
        yield line
