"""Propose the mixtures to train next, from training runs. Start with `propose_runs`.

Random mixtures are drawn, moved within the bounds and near the range of the runs, and selected by the information that
a run is expected to yield. Given the joint posterior of the Gaussian process at the candidates (mean m, covariance S),
observing candidate x changes the posterior means by S_x z / sqrt(S_xx + noise), where S_x is column x of S and z is
standard normal. The acquisition function is the knowledge gradient, by quadrature:

    E max(m + S_x z / sqrt(S_xx + noise)) - max m.

Each further candidate is selected given the posterior after the ones before.

Shape letters: R runs, S seeds, B mixtures, K selected mixtures, G label values, C candidates, x
candidates that are evaluated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader, Opened
from grasp.artifact.rows import label_column, row_amounts, row_tokens
from grasp.errors import SettingsError
from grasp.mixing.metric_quality import assess
from grasp.mixing.mixture_model import TOO_FAR, MixtureModel, Runs, outside_note
from grasp.predict.families import draw_dirichlet_shares
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import Result
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.imported_runs import row_weights
from grasp.runs.subset_features import SubsetFeatures
from grasp.runs.table import MAX_LISTED, WEIGHTS_SCHEMA, RunTable
from grasp.seeds import stream
from grasp.select.budget import check_share_bounds, first_few, parse_shares, parse_tokens
from grasp.select.matched_repetition import PlannedRun, match_repetition
from grasp.select.mix import MAX_REPEAT, check_max_repeat

CANDIDATES = 1_000  # random mixtures
EVALUATED_CANDIDATES = 250  # candidates that are evaluated: the most promising ones and a random sample of the others
MAX_PROPOSALS = EVALUATED_CANDIDATES // 2
QUADRATURE_NODES = 21  # of the Gauss-Hermite quadrature
# A proposal is exploratory if more than this share of the candidates have a higher predicted mean.
EXPLORATION_SHARE = 0.5
BISECTION_STEPS = 80  # of `project_to_bounds`
SHARE_DIGITS = 4  # decimal digits of proposed shares
ROUNDING = 1e-6  # a share that differs from a decimal by no more than this times the last digit is this decimal


@dataclass(frozen=True, eq=False, repr=False)
class Proposal(Result):
    """Mixtures to train; printed with one row per value."""

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        mixtures, gains, *shares = (column.to_pylist() for column in self.table.columns)
        lines = [
            [name, *(f"{share:z.1%}" for share in column)]
            for name, column in zip(self.table.column_names[2:], shares, strict=True)
        ]
        return ["", *mixtures], [["gain", *(f"{value:.2g}" for value in gains)], *lines]

    def _below(self) -> Sequence[str]:
        return self.notes


def propose_runs(
    runs: Runs,
    metric: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    count: int = 4,
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    max_repeat: float = MAX_REPEAT,
    train_tokens: str | float | None = None,
    params: str | float | None = None,
    tokens: str | float | None = None,
    planned_tokens: str | float | None = None,
    source_tokens: Path | str | None = None,
    subsets: Path | str | None = None,
    artifact: Opened | None = None,
) -> Result:
    """Propose the mixtures to train next so that few runs suffice for a decision.

    Proposals lie near the range of the runs, so that their results can be predicted (grasp runs predict). If the bounds
    exclude this range, proposals have no prediction, and a note says so.

    Args:
        runs: imported runs, see `grasp runs import`.
        metric: metrics, separated by commas. Default: all of them. In Python also a mapping of metrics to weights.
        count: number of mixtures to propose.
        floor: minimum share in every proposal, e.g. web:5%, or 1% for every value.
        cap: maximum share in every proposal, e.g. web:40%, or 30% for every value.
        max_repeat: maximum number of times that a row is repeated (requires an artifact or source_tokens).
        train_tokens: length of the proposed runs in tokens, e.g. 100B, for `max_repeat` and `source_tokens`. Default:
            the tokens of the corpus.
        params: number of parameters to decide for, e.g. 7B, if the runs have several. Default: their largest.
        tokens: length of the training to decide for, e.g. 1T, if the runs have several. Default: their largest.
        planned_tokens: length of the final run, e.g. 1T, for `max_repeat`: `subsets` repeat each value as often as it.
        source_tokens: tokens of each value for the final run: CSV of value and tokens, or a mapping in YAML or JSON.
        subsets: file to write the mixtures to as row weights, for `grasp retrain` --set subsets=FILE.
        artifact: artifact of the corpus; required for `subsets` and for `max_repeat`.
    Returns:
        One row per mixture, in the order in which to train them: mixture, gain, and the share of each value.
        Gain is the expected increase of the optimum, in the unit of the metric, or in standard deviations over the runs
        if metrics of different kinds are averaged. Notes name exploratory proposals, i.e. mixtures with a low predicted
        mean or without a prediction.
    Raises:
        SettingsError: no mixture satisfies the floors and caps, one of them is not a share, or the runs are so long
            that some value must be repeated more often than `max_repeat`.
    """
    if not 1 <= count <= MAX_PROPOSALS:
        raise SettingsError(
            f"propose: got {count} runs, expected 1 to {MAX_PROPOSALS}; for more, train these first and import them"
        )
    if artifact is None and subsets is not None:
        raise SettingsError("propose: subsets require the artifact of the corpus; pass --art")
    model = MixtureModel.from_runs(runs, metric, params, tokens)
    label, values, n_runs = model.table.info.label, model.table.values, len(model.table)
    rng = stream(0, "propose", n_runs)
    largest_G = np.ones(len(values))
    notes = ["repetition is not limited, as the sizes of the values are unknown (--art or --source-tokens); see --cap"]
    plan = PlannedRun.parse(planned_tokens, source_tokens)
    if plan is not None:
        if (measure := model.table.info.measure) != "tokens":
            raise SettingsError(f"source_tokens: the mixtures are shares of {measure}; expected shares of tokens")
        largest_G, notes = limit_shares(plan.sizes(values) / plan.tokens, max_repeat, "the planned run")
    elif artifact is not None:
        largest_G, notes = repetition_caps(
            artifact.files, label, values, max_repeat, train_tokens, model.table.info.measure
        )
    floor_G, cap_G = parse_shares(floor, cap, label or "mixture", values)
    low_G, high_G = np.nan_to_num(floor_G), np.minimum(np.nan_to_num(cap_G, nan=1.0), largest_G)
    check_share_bounds(low_G, high_G, values)
    # random mixtures around the mean of the runs, within the bounds and, if possible, with a prediction
    mean_G = model.share_RG.mean(axis=0)
    drawn = [draw_dirichlet_shares(rng, np.maximum(mean_G, 1e-3)) for _ in range(CANDIDATES)]
    share_CG = model.move_into_range(
        project_to_bounds(np.stack(drawn), low_G, high_G), project_to_bounds(mean_G[None], low_G, high_G)[0]
    )
    selected_K, gain_K, noise = most_informative(model.gaussian_process, model.features(share_CG), count, rng)
    share_KG = share_CG[selected_K]
    rounded_KG = np.stack([round_shares(share_G, low_G, high_G) for share_G in share_KG])
    has_prediction_K1 = (model.has_prediction(rounded_KG) >= model.has_prediction(share_KG))[:, None]
    share_KG = np.where(has_prediction_K1, rounded_KG, share_KG)  # one at the end of the range is not rounded
    names = [f"next-{k + 1}" for k in range(len(selected_K))]
    if subsets is not None and artifact is not None:
        notes += write_mixtures(Path(subsets), names, share_KG, model.table, artifact.files, plan, train_tokens)
    gain = f"expected increase of the optimum through this run, in {model.objective_unit}"
    if len(selected_K) < count or not any(gain_K):
        notes.insert(0, "no further run is expected to change the result; train one outside these bounds, or stop here")
    elif max(gain_K) < noise:
        notes.insert(0, f"every gain is below the noise of a run ({noise:.2g}): further runs are not worth it")
    has_prediction_K = model.has_prediction(share_KG)
    lines, weights = assess(model).table.to_pylist(), dict(zip(model.table.metrics, model.weights_T, strict=True))
    if undecided := [line["metric"] for line in lines if line["runs_needed"] is None and weights[line["metric"]]]:
        notes.append(
            f"further runs may not decide {first_few(undecided)}, see grasp runs metrics; omit them with --metric"
        )
    notes += outside_note(model, names, share_KG, ~has_prediction_K, f"exploratory, {TOO_FAR}")
    expected_C = model.predict_objective(share_CG)
    better_K = [float((expected_C > expected).mean()) for expected in model.predict_objective(share_KG)]
    exploratory = [
        f"{name} ({better:.0%})"
        for name, better, has_prediction in zip(names, better_K, has_prediction_K, strict=True)
        if has_prediction and better > EXPLORATION_SHARE
    ]
    if exploratory:
        notes.append(
            f"exploratory, proposed for information rather than for its result: {first_few(exploratory)}; in brackets "
            "the share of mixtures with a higher predicted mean"
        )
    columns = {name: share_KG[:, g] for g, name in enumerate(values)}
    return Proposal(
        pa.table({"mixture": names, "gain": gain_K} | columns),
        f"{len(names)} mixture{'s' * (len(names) != 1)} to train next to find the optimal mixture, in this order, "
        f"given {n_runs:,} runs",
        (f"gain: {gain}", *notes, *model.notes),
        signs=False,
    )


def write_mixtures(
    path: Path,
    names: Sequence[str],
    share_KG: F64,
    table: RunTable,
    artifact: ArtifactReader,
    plan: PlannedRun | None,
    train_tokens: str | float | None,
) -> list[str]:
    """Write mixtures as row weights, which `grasp retrain` trains on; with a plan, values repeat as often as in it.

    Returns:
        Notes on values of which the corpus has too few tokens for the plan.
    """
    k, g = (index.ravel() for index in np.indices(share_KG.shape))
    shares = [np.array(names, object)[k], np.array(table.values, object)[g], share_KG.ravel()]
    trained = pa.table([pa.array(column) for column in shares], WEIGHTS_SCHEMA.names).cast(WEIGHTS_SCHEMA)
    blocks: Iterable[SubsetBlock] = row_weights(replace(table, trained=trained), artifact)[0]
    notes: list[str] = []
    if plan is not None and table.info.label is not None:
        tokens_N = row_tokens(artifact)
        length = tokens_N.sum() if train_tokens is None else parse_tokens(train_tokens)
        blocks, notes = match_repetition(blocks, plan, label_column(artifact, table.info.label), tokens_N, length)
    corpus = artifact.manifest.fingerprints.get("corpus", "")
    write_subsets(path, blocks, RowIndex.from_parquet(artifact.rows_path), weights=True, corpus=corpus)
    return notes


def repetition_caps(
    artifact: ArtifactReader,
    label: str | None,
    values: Sequence[str],
    max_repeat: float,
    train_tokens: str | float | None,
    measure: str,
) -> tuple[F64, list[str]]:
    """Return the largest share of each value that repeats no row more than `max_repeat` times, (G,), and a note.

    A training run of T tokens makes T / C epochs of a corpus of C tokens, whatever shares are shares of.

    Args:
        measure: what shares are shares of: rows, tokens or documents.

    Raises:
        SettingsError: `max_repeat` is below 1, or the runs are so long that no mixture satisfies it.
    """
    assert label is not None
    column = label_column(artifact, label)
    slices = label_slices(column, row_tokens(artifact), most=len(column.values))
    amount_N = row_amounts(artifact, measure, slices.codes_N)
    size_of = dict(zip(slices.names, np.bincount(slices.codes_N, amount_N), strict=True))
    corpus_tokens = sum(entry.tokens for entry in slices.slices)
    epochs = 1.0 if train_tokens is None else parse_tokens(train_tokens) / corpus_tokens
    size_G = np.array([size_of.get(value, 0) for value in values], dtype=np.float64)
    if not size_G.any():
        raise SettingsError(
            f"propose: {artifact.path} has none of the values {', '.join(values[:MAX_LISTED])} ... of {label}"
        )
    length = "one epoch" if train_tokens is None else f"{epochs:.2g} epochs"
    return limit_shares(size_G / sum(size_of.values()) / epochs, max_repeat, length)


def limit_shares(once_G: F64, max_repeat: float, length: str) -> tuple[F64, list[str]]:
    """Return the largest share of each value that repeats no row more than `max_repeat` times, (G,), and a note.

    Args:
        once_G: share at which each row of a value is seen once, (G,).
        length: name of the training, for messages.

    Raises:
        SettingsError: `max_repeat` is below 1, or no mixture satisfies it.
    """
    check_max_repeat(max_repeat)
    largest_G = np.minimum(max_repeat * once_G, 1.0)
    if largest_G.sum() < 1.0:
        raise SettingsError(
            f"max_repeat: {1 / once_G.sum():.3g} epochs of the data repeat some value more than {max_repeat:g} "
            "times, whatever the mixture; raise --max-repeat or train on fewer tokens"
        )
    return largest_G, [f"no value is seen more than {max_repeat:g} times in {length} (--max-repeat)"]


def project_to_bounds(share_BG: F64, low_G: F64, high_G: F64) -> F64:
    """Return clip(m p, low, high) for each mixture p, with the factor m for which it adds up to 1, (B, G).

    The sum is monotone in m, which is found by bisection of log m.
    """
    tiny = np.finfo(np.float64).eps
    share_BG = share_BG + tiny  # a share of 0 must be able to grow, if all others are at their bounds
    high_B1 = np.full((len(share_BG), 1), -2 * np.log(tiny))
    low_B1 = -high_B1
    for _ in range(BISECTION_STEPS):
        middle_B1 = (low_B1 + high_B1) / 2
        is_above_B1 = np.clip(np.exp(middle_B1) * share_BG, low_G, high_G).sum(axis=1, keepdims=True) >= 1.0
        low_B1, high_B1 = np.where(is_above_B1, low_B1, middle_B1), np.where(is_above_B1, middle_B1, high_B1)
    return np.asarray(np.clip(np.exp(high_B1) * share_BG, low_G, high_G))


def round_shares(share_G: F64, low_G: F64, high_G: F64) -> F64:
    """Return decimals of SHARE_DIGITS digits within bounds that add up to 1; the shares themselves if impossible."""
    scale = 10**SHARE_DIGITS
    least_G, most_G = np.ceil(low_G * scale - ROUNDING), np.floor(high_G * scale + ROUNDING)
    rounded_G = np.clip(np.floor(share_G * scale + ROUNDING), least_G, most_G)
    by_remainder = np.argsort(rounded_G - share_G * scale, kind="stable")
    n_missing = max(round(scale - rounded_G.sum()), 0)
    rounded_G[by_remainder[(rounded_G < most_G)[by_remainder]][:n_missing]] += 1
    is_valid = rounded_G.sum() == scale and (least_G <= rounded_G).all()
    return np.asarray(rounded_G / scale if is_valid else share_G)


def most_informative(
    gaussian_process: GaussianProcess, candidates: SubsetFeatures, count: int, rng: np.random.Generator
) -> tuple[list[int], list[float], float]:
    """Select candidates greedily by the knowledge gradient, see the docstring of this module.

    Args:
        candidates: features of the candidate mixtures.

    Returns:
        Indices of the selected candidates, in order, and the value of the acquisition function of each; fewer than
        `count` if no other is above zero. And the standard deviation of the noise of a run.
    """
    n = len(candidates)
    mean_C, covariance_CC, noise = gaussian_process.joint_posterior(candidates, -1)
    std_C = np.sqrt(np.maximum(np.diag(covariance_CC), 0.0))
    promising = np.argsort(-(mean_C + 2 * std_C))[: EVALUATED_CANDIDATES // 2]
    evaluated = np.unique(np.concatenate([promising, rng.permutation(n)[: EVALUATED_CANDIDATES // 2]]))
    selected: list[int] = []
    gains: list[float] = []
    for _ in range(min(count, len(evaluated))):
        # change of the posterior means by one standard deviation of the observation at each candidate
        step_Cx = covariance_CC[:, evaluated] / np.sqrt(np.maximum(np.diag(covariance_CC)[evaluated], 0.0) + noise)
        gain_x = _knowledge_gradient(mean_C, step_Cx)
        gain_x[np.isin(evaluated, selected)] = -np.inf
        x = int(np.lexsort((mean_C[evaluated], gain_x))[-1])  # of equal gains, the one with the best prediction
        if selected and gain_x[x] <= 0:
            break
        selected.append(int(evaluated[x]))
        gains.append(float(gain_x[x]))
        # posterior covariance after observing x: a rank-one update
        covariance_CC = covariance_CC - np.outer(step_Cx[:, x], step_Cx[:, x])
    return selected, gains, float(np.sqrt(noise))


def _knowledge_gradient(mean_C: F64, step_Cx: F64) -> F64:
    """Return E max(m + s z) - max m for every column s of steps, by quadrature, (x,)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
    best_x = sum(
        weight * (mean_C[:, None] + node * step_Cx).max(axis=0)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True)
    )
    gain_x = np.asarray(best_x - mean_C.max())
    # E max - max cancels; differences within rounding error count as 0
    rounding = 4 * QUADRATURE_NODES * np.finfo(float).eps * np.abs(mean_C).max()
    return np.where(gain_x > rounding, gain_x, 0.0)
