"""Do the rows that score highest for a unit come from its own domain?

Every unit is a query, or all units of one value together are. Related are the rows that share the value of a label with
it, or those that an expression selects. Scores are kernels of relevance, published methods, and fusions of them.

Shape letters: N rows, Q queries, K rows at the top.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import rankdata

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.tables import readable
from grasp.errors import SettingsError
from grasp.extract.progress import Progress
from grasp.predict.predictor import Predictor
from grasp.predict.relevance import UnitSelection
from grasp.predict.row_arrays import F32, F64
from grasp.predict.slices import LabelTable
from grasp.results import Result
from grasp.runs.methods import GRASP, ConfiguredMethod, MethodRows, configured_methods, method_rows
from grasp.runs.metrics import Estimate, bootstrap_interval
from grasp.seeds import bootstrap_weights
from grasp.text import several
from grasp.yaml_files import read_yaml

Fusion = Literal["rrf", "z"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
RRF = 60.0  # of Cormack et al. 2009
KERNELS = ("token", "pooled", "input")
SCORES = ("grasp", "bm25", "overlap", "grasp+bm25", "grasp+overlap")
HELD_BYTES = 256 << 20
EXAMPLES = 3
Part = tuple[ArtifactReader | MethodRows, str | None]


@dataclass(frozen=True, slots=True)
class Domains:
    """Which rows are related to which queries."""

    name: str  # the label, or the expression
    unit_ids: tuple[str, ...]  # (Q,)
    columns: tuple[NDArray[np.int64], ...]  # Q times the artifact's units whose mean score ranks: one, or some together
    wanted_Q: NDArray[np.int32]  # the query's value
    values: tuple[str, ...]  # (Q,) the same in words
    codes_N: NDArray[np.int32] = field(repr=False)  # value of every row
    n_without_rows: int = 0  # queries left out: no row has their value

    def rows_of(self, query: int) -> NDArray[np.bool_]:
        """(N,) rows related to a query."""
        return np.asarray(self.codes_N == self.wanted_Q[query])

    def together(self) -> "Domains":
        """Units of one value as one query, which is named by the value."""
        first = {int(code): q for q, code in reversed(list(enumerate(self.wanted_Q)))}
        codes = sorted(first, key=first.__getitem__)
        members = [np.flatnonzero(self.wanted_Q == code) for code in codes]
        columns = tuple(np.concatenate([self.columns[q] for q in own]) for own in members)
        values = tuple(self.values[first[code]] for code in codes)
        wanted_Q = np.array(codes, dtype=np.int32)
        return Domains(self.name, values, columns, wanted_Q, values, self.codes_N, self.n_without_rows)


@dataclass(frozen=True, slots=True)
class RowScore:
    """What ranks the rows for a query: one score, or several fused."""

    name: str
    parts: tuple[str, ...]
    rule: Fusion | None = None  # None: a single one

    def of(self, part_scores: Mapping[str, NDArray[np.floating[Any]]]) -> NDArray[np.floating[Any]]:
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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Retrieval(Result):
    """Recall of related rows among the best k, by every score.

    Attributes:
        table: one line a label, k, score and query: related, k, score, unit_id, value, lift. What is printed are their
            means over queries, with 95 % intervals, and the paired differences to the first score.
        recalls: the same by label, k and score.
    """

    recalls: tuple[Recall, ...]

    @classmethod
    def of(cls, recalls: Sequence[Recall], n_rows: int) -> "Retrieval":
        """Recalls as a table."""
        lines = [(one, q) for one in recalls for q in range(len(one.lift_Q))]
        table = pa.table(
            {
                "related": [one.domains.name for one, _ in lines],
                "k": pa.array([one.k for one, _ in lines], pa.int64()),
                "score": [one.score for one, _ in lines],
                "unit_id": [one.domains.unit_ids[q] for one, q in lines],
                "value": [one.domains.values[q] for one, q in lines],
                "lift": pa.array([one.lift_Q[q] for one, q in lines], pa.float64()),
            }
        )
        notes = []
        for on in {id(one.domains): one.domains for one in recalls}.values():
            notes.append(f"{on.name}: {len(on.unit_ids):,} queries of {len(set(on.values)):,} values")
            if on.n_without_rows:
                notes.append(f"{on.n_without_rows:,} queries are left out: no row has their value of {on.name}")
        headline = f"Recall of related rows among the best k of {n_rows:,}, by that of chance: 1 is chance."
        return cls(table, headline, tuple(notes), recalls=tuple(recalls))

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        headings = ["score", "related", "k", "recall", "low", "high", f"against {self.recalls[0].score}", "low", "high"]
        return headings, [
            [one.score, one.domains.name, f"{one.k:,}", *_cells(one.mean, ".3f"), *_cells(one.against, "+z.3f")]
            for one in self.recalls
        ]

    def _below(self) -> Sequence[str]:
        return self.notes


def _cells(estimate: Estimate | None, form: str) -> list[str]:
    if estimate is None:
        return ["", "", ""]
    return ["" if value is None else format(value, form) for value in (estimate.value, estimate.low, estimate.high)]


def retrieve(
    artifact: ArtifactReader,
    *,
    queries: Path | str | None = None,
    by: str | Sequence[str] = (),
    target: str | None = None,
    related: str | None = None,
    together: bool = False,
    k: Sequence[int] = (1000,),
    methods: str | Sequence[str] = SCORES,
    fusion: Sequence[str] | None = None,
    method_settings: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> Retrieval:
    """Recall among the best k rows of every query, by every score; the others stand against the first score.

    Args:
        queries, by: JSONL or Parquet of unit_id and labels, and the labels: rows that share a unit's value are related.
        target, related: a target whose units are the queries, and an expression that selects the rows related to it.
        together: units of one value are one query, by their mean score.
        methods: `grasp` (what `grasp score` ranks by), a kernel or a published method; fused where joined by +.
        fusion: `rrf` (reciprocal ranks), `z` (z-scores); None: both.
        method_settings: YAML of settings of methods by label; `cache` keeps their scores (None: the artifact).
    Raises:
        SettingsError: not one of the two kinds of question; more rows asked for than there are; an argument without
            effect; a file or a name that says nothing.
        GraspError: a kernel, a label, or what a method needs is not there.
    Memory: the scores of some units for all rows, 256 MB, or one query's where that is more.
    """
    asked = parse_scores(several(methods), fusion)
    published = _methods(asked, method_settings, cache)
    questions = _domains(artifact, queries, several(by), target, related)
    if together:
        questions = [one.together() for one in questions]
    beyond = [size for size in k if not 1 <= size <= artifact.n_rows]
    if beyond or not k:
        raise SettingsError(
            f"k: got {beyond[0] if beyond else 'none'}, expected numbers from 1 to the {artifact.n_rows:,} rows of "
            f"{artifact.where}"
        )
    parts = _parts(artifact, asked, published, None if cache is None else Path(cache), progress)
    lifts = _lifts(parts, asked, questions, k)
    recalls = []
    for (r, size, name), lift_Q in lifts.items():
        against = None if name == asked[0].name else mean_over_queries(lift_Q - lifts[r, size, asked[0].name])
        recalls.append(Recall(name, questions[r], size, lift_Q, mean_over_queries(lift_Q), against))
    return Retrieval.of(recalls, artifact.n_rows)


# ------------------------------------------------------------------------------------------------ scores


def parse_scores(names: Sequence[str], fusion: Sequence[str] | None = None) -> tuple[RowScore, ...]:
    """Names of kernels and methods, joined by + where they are fused, once by each rule.

    Raises:
        SettingsError: nothing, one of them twice, a part twice, an unknown rule, or a rule and nothing to fuse.
    """
    rules = [rule for rule in FUSIONS if fusion is None or rule in fusion]
    unknown = [rule for rule in fusion or () if rule not in FUSIONS]
    if unknown or not rules:
        raise SettingsError(f"fusion: got {', '.join(unknown) or 'nothing'}, expected {' or '.join(FUSIONS)}")
    found: list[RowScore] = []
    for name in names:
        parts = tuple(part.strip() for part in name.split("+"))
        if not all(parts) or len(set(parts)) < len(parts):
            raise SettingsError(f"methods: got {name!r}, expected different names joined by +, e.g. grasp+bm25")
        if len(parts) == 1:
            found.append(RowScore(name, parts))
        else:
            found += [RowScore(f"{'+'.join(parts)} ({rule})", parts, rule) for rule in rules]
    twice = sorted(name for name, times in Counter(one.name for one in found).items() if times > 1)
    if twice or not found:
        got = ", ".join(twice) + " twice" if twice else "nothing"
        raise SettingsError(f"methods: got {got}; e.g. {','.join(SCORES)}")
    if fusion is not None and all(one.rule is None for one in found):
        raise SettingsError("fusion: no meaning where no methods are joined by +; leave it out")
    return tuple(found)


def _methods(
    asked: Sequence[RowScore], settings: Path | str | None, cache: Path | str | None
) -> tuple[ConfiguredMethod, ...]:
    """Published methods among the parts: all but the artifact's own kernels."""
    parts = dict.fromkeys(part for one in asked for part in one.parts)
    names = [name for name in parts if name not in (GRASP, *KERNELS)]
    if not names:
        for argument, value in (("method_settings", settings), ("cache", cache)):
            if value is not None:
                raise SettingsError(f"{argument}: no meaning without a published method; leave it out")
        return ()
    return configured_methods(
        names, None if settings is None else read_yaml(Path(settings)), str(settings or "methods")
    )


def fuse(scores_N: Sequence[NDArray[np.floating[Any]]], rule: Fusion) -> F64:
    """Several scores of the same rows for one query as one score, (N,).

    rrf: sum over scores of 1 / (60 + rank), rank 1 the best and equal scores sharing their mean rank; z: sum of scores
    less their mean, by their standard deviation (one that does not vary counts for nothing).
    Source: Cormack, Clarke and Buettcher 2009 for rrf; the paper names no rule.
    """
    return np.asarray(np.sum([_RULES[rule](one) for one in scores_N], axis=0))


def _reciprocal_rank(score_N: NDArray[np.floating[Any]]) -> F64:
    return np.asarray(1.0 / (RRF + rankdata(-score_N, method="average")))


def _standardised(score_N: NDArray[np.floating[Any]]) -> F64:
    wide_N = np.asarray(score_N, dtype=np.float64)
    deviation = float(wide_N.std())
    centred_N = wide_N - wide_N.mean()
    # a constant's own rounding is no variation
    return centred_N / deviation if deviation > 1e-12 * np.abs(wide_N).max(initial=0.0) else np.zeros_like(centred_N)


_RULES = {"rrf": _reciprocal_rank, "z": _standardised}


def _parts(
    artifact: ArtifactReader,
    asked: Sequence[RowScore],
    methods: Sequence[ConfiguredMethod],
    cache: Path | None,
    progress: Progress | None,
) -> dict[str, Part]:
    """Where the scores of every part lie: the rows, and the name of their array; of `grasp` none, it is predicted."""
    by_label = {method.label: method for method in methods}
    parts: dict[str, Part] = {}
    for name in dict.fromkeys(part for one in asked for part in one.parts):
        if name in by_label:
            rows = method_rows(artifact, by_label[name], cache=cache, progress=progress)
            parts[name] = rows, rows.array_names[0]
        else:
            parts[name] = artifact, None if name == GRASP else artifact.relevance_name(name)
    return parts


def _scores(part: Part, sets: Sequence[NDArray[np.int64]]) -> F32:
    """Score of every row for every set of units, (N, Q): of `grasp` the effect that `grasp score` ranks by."""
    rows, array = part
    units = UnitSelection(
        tuple(map(str, range(len(sets)))), np.concatenate(sets), np.array([len(columns) for columns in sets])
    )
    if array is None:
        assert isinstance(rows, ArtifactReader)
        return np.asarray(Predictor.of(rows, units=units).effect_NT, dtype=np.float32)
    out_NQ = np.empty((rows.n_rows, len(sets)), dtype=np.float32, order="F")
    for start, block in rows.array_blocks(array, columns=units.columns_E):
        out_NQ[start : start + len(block)] = units.mean_per_task(block)
    return out_NQ


# ----------------------------------------------------------------------------------------------- domains


def _domains(
    artifact: ArtifactReader, queries: Path | str | None, by: Sequence[str], target: str | None, related: str | None
) -> list[Domains]:
    """By queries and labels, or by a target and an expression."""
    given = {"queries": queries, "by": by or None, "target": target, "related": related}
    got = [name for name, value in given.items() if value is not None]
    if queries is not None and got == ["queries", "by"]:
        return _domains_by_label(artifact, Path(queries), by)
    if target is not None and related is not None and len(got) == 2:
        return [_domain_by_expression(artifact, target, related)]
    raise SettingsError(
        f"retrieve: got {', '.join(got) or 'none of them'}; expected queries and by, or target and related"
    )


def _domains_by_label(artifact: ArtifactReader, queries: Path, labels: Sequence[str]) -> list[Domains]:
    """Rows that have the query's own value of a label, for each label; units that the file lacks are no queries.

    Raises:
        SettingsError: not such a file, a unit twice, a label that file or artifact lacks, no unit of the artifact.
        SubsetError: a label that the artifact lacks.
    """
    if "unit_id" in labels:
        raise SettingsError("by: got unit_id, expected labels, e.g. topic or topic,format")
    place = {unit_id: e for e, unit_id in enumerate(artifact.units["unit_id"].to_pylist())}
    lines = [line for line in _read_queries(queries, labels).to_pylist() if line["unit_id"] in place]
    if not lines:
        raise SettingsError(
            f"queries: {queries}: none of its units is one of {artifact.where}; expected names like "
            f"{next(iter(place))!r}"
        )
    rows = LabelTable(artifact.rows_path)
    return [_domains_of(rows, label, lines, place, queries) for label in labels]


def _domain_by_expression(artifact: ArtifactReader, target: str, expression: str) -> Domains:
    """Rows that a label expression selects, for every unit of a target."""
    columns_Q = artifact.unit_columns(target)
    mask_N = LabelTable(artifact.rows_path).matching(expression).mask_N
    unit_ids = tuple(artifact.units["unit_id"].take(pa.array(columns_Q)).to_pylist())
    n = len(unit_ids)
    wanted_Q = np.ones(n, dtype=np.int32)
    return Domains(
        expression, unit_ids, tuple(columns_Q[:, None]), wanted_Q, (expression,) * n, mask_N.astype(np.int32)
    )


def _read_queries(path: Path, labels: Sequence[str]) -> pa.Table:
    with readable(f"queries: {path}", SettingsError, f"unit_id and {', '.join(labels)} in Parquet, or JSON by line"):
        table = pq.read_table(path) if path.suffix == ".parquet" else pj.read_json(path)
    missing = [name for name in ("unit_id", *labels) if name not in table.column_names]
    if missing:
        raise SettingsError(f"queries: {path}: has columns {table.column_names}, lacks {missing}")
    table = table.select(["unit_id", *labels]).set_column(0, "unit_id", table.column("unit_id").cast(pa.string()))
    counts = Counter(table.column("unit_id").to_pylist())
    if twice := sorted(name for name, times in counts.items() if name is not None and times > 1):
        raise SettingsError(f"queries: {path}: units {twice[:EXAMPLES]} occur more than once, expected each once")
    return table


def _domains_of(
    rows: LabelTable, label: str, lines: Sequence[Mapping[str, Any]], place: Mapping[str, int], queries: Path
) -> Domains:
    column = rows.column(label)
    code_of = {value: code for code, value in enumerate(column.values) if value is not None}
    kept = [line for line in lines if line[label] in code_of]
    if not kept:
        raise SettingsError(
            f"queries: {queries}: no row has a value of {label} that a query has, e.g. {lines[0][label]!r}; the rows "
            f"have {[str(value) for value in list(code_of)[:EXAMPLES]]}"
        )
    return Domains(
        label,
        tuple(line["unit_id"] for line in kept),
        tuple(np.array([place[line["unit_id"]]], dtype=np.int64) for line in kept),
        np.array([code_of[line[label]] for line in kept], dtype=np.int32),
        tuple(str(line[label]) for line in kept),
        column.codes_N,
        len(lines) - len(kept),
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
    hits = [float(one_N[above_N].sum()) + share * float(one_N[ties_N].sum()) for one_N in related]
    return [hit / float(one_N.sum()) / (k / len(score_N)) for hit, one_N in zip(hits, related, strict=True)]


def _lifts(
    parts: Mapping[str, Part], asked: Sequence[RowScore], domains: Sequence[Domains], ks: Sequence[int]
) -> dict[tuple[int, int, str], F64]:
    """Lifts of all queries, (Q,), by place of the domains, k and score; each set of units is ranked by once."""
    lifts = {(r, k, one.name): np.empty(len(on.unit_ids)) for r, on in enumerate(domains) for k in ks for one in asked}
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for r, on in enumerate(domains):
        for q, columns in enumerate(on.columns):
            places.setdefault(tuple(columns.tolist()), []).append((r, q))
    questions = [(np.array(columns), of) for columns, of in sorted(places.items())]
    floats_each = len(domains[0].codes_N) * (len(parts) + 3)  # 3 more while `grasp` adds its kernels up
    most = max(1, HELD_BYTES // (4 * floats_each))
    for start in range(0, len(questions), most):
        batch = questions[start : start + most]
        held = {name: _scores(part, [columns for columns, _ in batch]) for name, part in parts.items()}
        for column, (_, of) in enumerate(batch):
            part_scores = {name: scores_NQ[:, column] for name, scores_NQ in held.items()}
            related = [domains[r].rows_of(q) for r, q in of]
            for one in asked:
                score_N = one.of(part_scores)
                for k in ks:
                    for (r, q), value in zip(of, lift(score_N, k, related), strict=True):
                        lifts[r, k, one.name][q] = value
    return lifts


def mean_over_queries(values_Q: F64) -> Estimate:
    """Mean with its 95 % interval, by bootstrap over queries; the same resamples for every score."""
    weight_RQ = bootstrap_weights(len(values_Q))
    resampled_R = np.asarray(weight_RQ @ values_Q / len(values_Q), dtype=np.float64)
    return bootstrap_interval(float(values_Q.mean()), resampled_R, lowest=-np.inf, highest=np.inf, reason="")
