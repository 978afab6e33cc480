"""Do the rows that score highest for a unit come from its own domain?

Every unit is a query, or all units of one value together are. Related are the rows that share the value of a label with
it. Scores are kernels of relevance, published methods, and fusions of them.

Shape letters: N rows, Q queries, K rows at the top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow.json as pj
from numpy.typing import NDArray
from scipy.stats import rankdata

from experiments.kernel_names import KERNEL_OF
from grasp.arrays import F32, F64
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.methods.registry import GRASP, MethodRows, configure_methods, score_artifact
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.runs.metrics import Estimate, bootstrap_interval
from grasp.seeds import bootstrap_weights

Fusion = Literal["rrf", "z"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
RRF = 60.0  # of Cormack et al. 2009
KERNELS = ("token", "pooled", "input")  # as the recorded results call them
IN_MEMORY_BYTES = 256 << 20
Part = tuple[ArtifactReader | MethodRows, str | None]


@dataclass(frozen=True, slots=True)
class Domains:
    """Which rows are related to which queries."""

    name: str  # the label
    unit_ids: tuple[str, ...]  # (Q,)
    columns: tuple[NDArray[np.int64], ...]  # Q times the artifact's units whose mean score ranks: one, or some together
    wanted_Q: NDArray[np.int32]  # the query's value
    values: tuple[str, ...]  # (Q,) the same in words
    codes_N: NDArray[np.int32] = field(repr=False)  # value of every row

    def rows_of(self, query: int) -> NDArray[np.bool_]:
        """(N,) rows related to a query."""
        return np.asarray(self.codes_N == self.wanted_Q[query])

    def together(self) -> "Domains":
        """Units of one value as one query, which is named by the value."""
        first = {int(code): q for q, code in reversed(list(enumerate(self.wanted_Q)))}
        codes = sorted(first, key=first.__getitem__)
        members = [np.flatnonzero(self.wanted_Q == code) for code in codes]
        columns = tuple(np.concatenate([self.columns[q] for q in member_queries]) for member_queries in members)
        values = tuple(self.values[first[code]] for code in codes)
        wanted_Q = np.array(codes, dtype=np.int32)
        return Domains(self.name, values, columns, wanted_Q, values, self.codes_N)


@dataclass(frozen=True, slots=True)
class RowScore:
    """What ranks the rows for a query: one score, or several fused."""

    name: str
    parts: tuple[str, ...]
    rule: Fusion | None = None  # None: a single one

    def combine(self, part_scores: Mapping[str, NDArray[np.floating[Any]]]) -> NDArray[np.floating[Any]]:
        """(N,) from the scores of the parts."""
        parts = [part_scores[name] for name in self.parts]
        return parts[0] if self.rule is None else fuse(parts, self.rule)


@dataclass(frozen=True, slots=True)
class Recall:
    """What one score found of one label's domains among the best k rows."""

    score: str
    domains: Domains
    k: int
    lift_Q: F64  # recall by that of chance
    mean: Estimate
    against: Estimate | None  # paired difference to the first score; None: it is the first


def retrieve(
    artifact: ArtifactReader,
    queries: Path,
    *,
    by: Sequence[str],
    k: Sequence[int],
    methods: Sequence[str],
    together: bool = False,
) -> tuple[Recall, ...]:
    """Recall among the best k rows of every query, by every score; the others stand against the first score.

    Args:
        queries, by: JSONL of unit_id and labels, and the labels: rows that share a unit's value are related.
        methods: `grasp` (what `grasp score` ranks by), a kernel or a published method; fused where joined by +.
        together: units of one value are one query, by their mean score.
    Raises:
        SettingsError: more rows asked for than there are; a file or a name that says nothing.
    Memory: the scores of some units for all rows, 256 MB, or one query's where that is more.
    """
    scores = parse_scores(methods)
    questions = _domains_by_label(artifact, queries, by)
    if together:
        questions = [question.together() for question in questions]
    if beyond := [size for size in k if not 1 <= size <= artifact.n_rows]:
        raise SettingsError(f"k: got {beyond[0]}, expected 1 to the {artifact.n_rows:,} rows of {artifact.location}")
    lifts = _lifts(_parts(artifact, scores), scores, questions, k)
    recalls = []
    for (r, size, name), lift_Q in lifts.items():
        against = None if name == scores[0].name else mean_over_queries(lift_Q - lifts[r, size, scores[0].name])
        recalls.append(Recall(name, questions[r], size, lift_Q, mean_over_queries(lift_Q), against))
    return tuple(recalls)


# ------------------------------------------------------------------------------------------------ scores


def parse_scores(names: Sequence[str]) -> tuple[RowScore, ...]:
    """Names of kernels and methods, joined by + where they are fused, once by each rule.

    Raises:
        SettingsError: nothing, one of them twice, or a part twice.
    """
    scores: list[RowScore] = []
    for name in names:
        parts = tuple(part.strip() for part in name.split("+"))
        if not all(parts) or len(set(parts)) < len(parts):
            raise SettingsError(f"methods: got {name!r}, expected different names joined by +, e.g. grasp+bm25")
        if len(parts) == 1:
            scores.append(RowScore(name, parts))
        else:
            scores += [RowScore(f"{'+'.join(parts)} ({rule})", parts, rule) for rule in FUSIONS]
    if not scores or len({score.name for score in scores}) < len(scores):
        raise SettingsError(f"methods: got {', '.join(names) or 'nothing'}, expected each once, e.g. grasp,bm25")
    return tuple(scores)


def fuse(scores_N: Sequence[NDArray[np.floating[Any]]], rule: Fusion) -> F64:
    """Several scores of the same rows for one query as one score, (N,).

    rrf: sum over scores of 1 / (60 + rank), rank 1 the best and equal scores sharing their mean rank; z: sum of scores
    less their mean, by their standard deviation (one that does not vary counts for nothing).
    Source: Cormack, Clarke and Buettcher 2009 for rrf; the paper names no rule.
    """
    return np.asarray(np.sum([_RULES[rule](score) for score in scores_N], axis=0))


def _reciprocal_rank(score_N: NDArray[np.floating[Any]]) -> F64:
    return np.asarray(1.0 / (RRF + rankdata(-score_N, method="average")))


def _standardised(score_N: NDArray[np.floating[Any]]) -> F64:
    wide_N = np.asarray(score_N, dtype=np.float64)
    deviation = float(wide_N.std())
    centred_N = wide_N - wide_N.mean()
    # a constant's own rounding is no variation
    return centred_N / deviation if deviation > 1e-12 * np.abs(wide_N).max(initial=0.0) else np.zeros_like(centred_N)


_RULES = {"rrf": _reciprocal_rank, "z": _standardised}


def _parts(artifact: ArtifactReader, scores: Sequence[RowScore]) -> dict[str, Part]:
    """Where the scores of every part lie: the rows, and the name of their array; of `grasp` none, it is predicted."""
    parts: dict[str, Part] = {}
    for name in dict.fromkeys(part for score in scores for part in score.parts):
        if name in KERNELS:
            parts[name] = artifact, artifact.relevance_name(KERNEL_OF.get(name, name))
        elif name == GRASP:
            parts[name] = artifact, None
        else:
            (method,) = configure_methods([name])
            rows = score_artifact(artifact, method)
            parts[name] = rows, rows.array_names[0]
    return parts


def _scores(part: Part, sets: Sequence[NDArray[np.int64]]) -> F32:
    """Score of every row for every set of units, (N, Q): of `grasp` the effect that `grasp score` ranks by."""
    rows, array = part
    units = UnitSelection(
        tuple(map(str, range(len(sets)))), np.concatenate(sets), np.array([len(columns) for columns in sets])
    )
    if array is None:
        assert isinstance(rows, ArtifactReader)
        return np.asarray(Predictor.from_artifact(rows, units=units).effect_NT, dtype=np.float32)
    out_NQ = np.empty((rows.n_rows, len(sets)), dtype=np.float32, order="F")
    for start, block in rows.array_blocks(array, columns=units.columns_E):
        out_NQ[start : start + len(block)] = units.mean_per_task(block)
    return out_NQ


# ----------------------------------------------------------------------------------------------- domains


def _domains_by_label(artifact: ArtifactReader, queries: Path, labels: Sequence[str]) -> list[Domains]:
    """Rows that have the query's own value of a label, for each label; units that the file lacks are no queries."""
    place = {unit_id: e for e, unit_id in enumerate(artifact.units["unit_id"].to_pylist())}
    table = pj.read_json(queries).select(["unit_id", *labels]).to_pylist()
    lines = [line for line in table if line["unit_id"] in place]
    rows = LabelTable(artifact.rows_path)
    return [_domains_of(rows, label, lines, place, queries) for label in labels]


def _domains_of(
    rows: LabelTable, label: str, lines: Sequence[Mapping[str, Any]], place: Mapping[str, int], queries: Path
) -> Domains:
    column = rows.column(label)
    code_of = {value: code for code, value in enumerate(column.values) if value is not None}
    labelled = [line for line in lines if line[label] in code_of]
    if not labelled:
        raise SettingsError(f"queries: {queries}: no unit of the artifact with a {label} that a row has")
    return Domains(
        label,
        tuple(line["unit_id"] for line in labelled),
        tuple(np.array([place[line["unit_id"]]], dtype=np.int64) for line in labelled),
        np.array([code_of[line[label]] for line in labelled], dtype=np.int32),
        tuple(str(line[label]) for line in labelled),
        column.codes_N,
    )


# ------------------------------------------------------------------------------------------------ recall


def lift(score_N: NDArray[np.floating[Any]], k: int, related: Sequence[NDArray[np.bool_]]) -> list[float]:
    """Recall of related rows among the best k, by what it is by chance, k / N, for each way of being related.

    Rows that tie for the last places share them: expected over all orders of equal scores, so that the order of the
    corpus decides nothing. Source: none in the paper, whose "normalized Recall@1000" of random scores is near 1.
    """
    last = np.partition(score_N, len(score_N) - k)[len(score_N) - k]
    above_N, ties_N = score_N > last, score_N == last
    share = (k - int(above_N.sum())) / int(ties_N.sum())  # the chance of a place among those that tie
    hits = [float(related_N[above_N].sum()) + share * float(related_N[ties_N].sum()) for related_N in related]
    return [hit / float(related_N.sum()) / (k / len(score_N)) for hit, related_N in zip(hits, related, strict=True)]


def _lifts(
    parts: Mapping[str, Part], row_scores: Sequence[RowScore], domains: Sequence[Domains], ks: Sequence[int]
) -> dict[tuple[int, int, str], F64]:
    """Lifts of all queries, (Q,), by place of the domains, k and score; each set of units is ranked by once."""
    lifts = {
        (r, k, row_score.name): np.empty(len(on.unit_ids))
        for r, on in enumerate(domains)
        for k in ks
        for row_score in row_scores
    }
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for r, on in enumerate(domains):
        for q, columns in enumerate(on.columns):
            places.setdefault(tuple(columns.tolist()), []).append((r, q))
    questions = [(np.array(columns), of) for columns, of in sorted(places.items())]
    floats_each = len(domains[0].codes_N) * (len(parts) + 3)  # 3 more while `grasp` adds its kernels up
    most = max(1, IN_MEMORY_BYTES // (4 * floats_each))
    for start in range(0, len(questions), most):
        batch = questions[start : start + most]
        held = {name: _scores(part, [columns for columns, _ in batch]) for name, part in parts.items()}
        for column, (_, of) in enumerate(batch):
            part_scores = {name: scores_NQ[:, column] for name, scores_NQ in held.items()}
            related = [domains[r].rows_of(q) for r, q in of]
            for candidate in row_scores:
                score_N = candidate.combine(part_scores)
                for k in ks:
                    for (r, q), value in zip(of, lift(score_N, k, related), strict=True):
                        lifts[r, k, candidate.name][q] = value
    return lifts


def mean_over_queries(values_Q: F64) -> Estimate:
    """Mean with its 95 % interval, by bootstrap over queries; the same resamples for every score."""
    weight_RQ = bootstrap_weights(len(values_Q))
    resampled_R = np.asarray(weight_RQ @ values_Q / len(values_Q), dtype=np.float64)
    return bootstrap_interval(float(values_Q.mean()), resampled_R, lowest=-np.inf, highest=np.inf, reason="")
