"""Related-domain retrieval: do the rows that score highest for a unit come from its own domain?

Every unit is a query, or all units of one value together are. Related are the rows that share the value of a label with
it, or those that an expression selects. Scores are kernels of relevance, published methods, and fusions of them.

Shape letters: N rows, E units of the artifact, Q queries, G values of a label.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import Artifact
from grasp.audit.ranking import rows_by_method
from grasp.audit.recall import F64, FUSIONS, Fusion, Span, TopRows, fused, span
from grasp.errors import SettingsError
from grasp.extract.progress import Progress
from grasp.predict.row_tables import kernel_array
from grasp.predict.slices import LabelTable
from grasp.predict.source import F32, FeatureSource
from grasp.runs.configured import GRASP, ConfiguredMethod

KERNELS = ("token", "pooled", "input")
METHODS = "grasp,bm25,overlap,grasp+bm25,grasp+overlap"
HELD_BYTES = 256 << 20
RESAMPLES = 2000
EXAMPLES = 3
Question = tuple[NDArray[np.int64], list[tuple[int, int]]]  # units that rank together; places of label and query


@dataclass(frozen=True, slots=True)
class Related:
    """Which rows are related to which queries."""

    name: str  # of the label, or the expression
    unit_ids: tuple[str, ...]  # (Q,)
    columns: tuple[NDArray[np.int64], ...]  # Q times the artifact's units whose mean score ranks: one, or some together
    wanted_Q: NDArray[np.int32]  # the query's value
    values: tuple[str, ...]  # (Q,) the same in words
    codes_N: NDArray[np.int32] = field(repr=False)  # value of every row
    n_without_rows: int = 0  # queries left out: no row has their value

    def rows_of(self, query: int) -> NDArray[np.bool_]:
        """(N,) rows related to a query."""
        return np.asarray(self.codes_N == self.wanted_Q[query])

    def together(self) -> "Related":
        """Units of one value as one query, which is named by the value."""
        first = {int(code): q for q, code in reversed(list(enumerate(self.wanted_Q)))}
        codes = sorted(first, key=first.__getitem__)
        members = [np.flatnonzero(self.wanted_Q == code) for code in codes]
        return replace(
            self,
            unit_ids=tuple(self.values[first[code]] for code in codes),
            columns=tuple(np.concatenate([self.columns[q] for q in own]) for own in members),
            wanted_Q=np.array(codes, dtype=np.int32),
            values=tuple(self.values[first[code]] for code in codes),
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """One score of rows, or several fused."""

    name: str
    parts: tuple[str, ...]
    rule: Fusion | None  # None: a single one


@dataclass(frozen=True, slots=True)
class Found:
    """What one score found of one label's domains."""

    score: str
    related: Related
    k: int
    lift_Q: F64  # recall by that of chance
    mean: Span
    against: Span | None  # paired difference to the first score; None: it is the first


def parse_scores(text: str, fusions: Sequence[str]) -> tuple[Asked, ...]:
    """`grasp,bm25,grasp+bm25`: names of kernels and methods, joined by + where they are fused, once by each rule.

    Raises:
        SettingsError: nothing, one of them twice, a part twice, or an unknown rule.
    """
    rules = [rule for rule in FUSIONS if rule in fusions]
    unknown = [rule for rule in fusions if rule not in FUSIONS]
    if unknown or not rules:
        raise SettingsError(f"--fusion: got {', '.join(unknown) or 'nothing'}, expected {' or '.join(FUSIONS)}")
    found: list[Asked] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        parts = tuple(part.strip() for part in name.split("+"))
        if not all(parts) or len(set(parts)) < len(parts):
            raise SettingsError(f"--methods: got {name!r}, expected different names joined by +, e.g. grasp+bm25")
        if len(parts) == 1:
            found.append(Asked(name, parts, None))
        else:
            found += [Asked(f"{'+'.join(parts)} ({rule})", parts, rule) for rule in rules]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not found:
        raise SettingsError(f"--methods: got {', '.join(twice) + ' twice' if twice else 'nothing'}; e.g. {METHODS}")
    return tuple(found)


def method_names(asked: Sequence[Asked]) -> list[str]:
    """Published methods among the parts: all but the artifact's own kernels."""
    return [
        name for name in dict.fromkeys(part for one in asked for part in one.parts) if name not in (GRASP, *KERNELS)
    ]


def related_by_label(artifact: Artifact, queries: Path, labels: Sequence[str]) -> tuple[Related, ...]:
    """Rows that have the query's own value of a label, for each label.

    Args:
        queries: JSONL or Parquet with `unit_id` and the labels as columns; the file that the target was read from may
            hold them. Units that it does not name are no queries.
    Raises:
        SettingsError: not such a file, a unit twice, a label that file or artifact lacks, no unit of the artifact.
        SubsetError: a label that the artifact lacks.
    """
    table = _read_queries(queries, labels)
    place = {unit_id: e for e, unit_id in enumerate(artifact.units["unit_id"].to_pylist())}
    lines = [line for line in table.to_pylist() if line["unit_id"] in place]
    if not lines:
        example = next(iter(place))
        raise SettingsError(f"{queries}: none of its units is one of {artifact.where}; expected names like {example!r}")
    rows = LabelTable(artifact.rows_path)
    return tuple(_related(rows, label, lines, place, queries) for label in labels)


def related_by_expression(artifact: Artifact, target: str, expression: str) -> Related:
    """Rows that a label expression selects, for every unit of a target.

    Raises:
        SettingsError: it selects no row, or all of them.
        ArtifactError, SubsetError: no such target; a bad expression.
    """
    columns_Q = artifact.unit_columns(target)
    mask_N = LabelTable(artifact.rows_path).select(expression)
    if mask_N.all() or not mask_N.any():
        some = "every row" if mask_N.all() else "no row"
        raise SettingsError(f"--related: {expression} selects {some} of {artifact.where}; expected some of them")
    unit_ids = tuple(artifact.units["unit_id"].take(pa.array(columns_Q)).to_pylist())
    wanted_Q = np.ones(len(columns_Q), dtype=np.int32)
    return Related(
        expression,
        unit_ids,
        tuple(columns_Q[:, None]),
        wanted_Q,
        (expression,) * len(columns_Q),
        mask_N.astype(np.int32),
    )


def retrieve(
    artifact: Artifact,
    related: Sequence[Related],
    ks: Sequence[int],
    asked: Sequence[Asked],
    methods: Sequence[ConfiguredMethod] = (),
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    resamples: int = RESAMPLES,
) -> tuple[Found, ...]:
    """Recall among the best k rows of every query, by every score; the first score is what the others stand against.

    Args:
        methods: those that `method_names` asks for.
        cache: where scores of methods are kept; none: in the artifact.
    Raises:
        SettingsError: more rows asked for than there are.
        GraspError: a kernel or what a method needs is not there.
    Memory: the scores of some units for all rows, 256 MB, or one query's where that is more.
    """
    beyond = [k for k in ks if not 1 <= k <= artifact.n_rows]
    if beyond or not ks:
        got = beyond[0] if beyond else "none"
        raise SettingsError(
            f"--k: got {got}, expected numbers from 1 to the {artifact.n_rows:,} rows of {artifact.where}"
        )
    sources = _sources(artifact, asked, methods, cache, progress)
    lifts = {(one.name, r, k): np.empty(len(on.unit_ids)) for one in asked for r, on in enumerate(related) for k in ks}
    for batch in _few(_questions(related), artifact.n_rows * len(sources)):
        columns = np.unique(np.concatenate([columns for columns, _ in batch]))
        held = {name: _scores(source, array, columns) for name, (source, array) in sources.items()}
        for of_units, places in batch:
            at = np.searchsorted(columns, of_units)
            own = {name: scores_NQ[:, at].mean(axis=1) for name, scores_NQ in held.items()}
            for one in asked:
                score_N = _score(one, own)
                for k in ks:
                    top = TopRows.of(score_N, k)
                    for r, q in places:
                        lifts[one.name, r, k][q] = top.lift(related[r].rows_of(q))
    return tuple(
        _found(one, on, k, lifts, r, asked[0], resamples) for r, on in enumerate(related) for k in ks for one in asked
    )


def per_query(found: Sequence[Found]) -> pa.Table:
    """One line a label, k, score and query: related, k, score, unit_id, value, lift."""
    return pa.table(
        {
            "related": [one.related.name for one in found for _ in one.lift_Q],
            "k": pa.array([one.k for one in found for _ in one.lift_Q], pa.int64()),
            "score": [one.score for one in found for _ in one.lift_Q],
            "unit_id": [unit_id for one in found for unit_id in one.related.unit_ids],
            "value": [value for one in found for value in one.related.values],
            "lift": np.concatenate([one.lift_Q for one in found]),
        }
    )


# ---------------------------------------------------------------------------------------------------- inside


def _read_queries(path: Path, labels: Sequence[str]) -> pa.Table:
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else pj.read_json(path)
    except FileNotFoundError as err:
        raise SettingsError(f"--queries: {path}: no such file; expected unit_id and {', '.join(labels)}") from err
    except (pa.ArrowException, OSError) as err:
        raise SettingsError(
            f"--queries: {path}: cannot be read: {' '.join(str(err).split())}; expected Parquet, or one JSON object a "
            "line"
        ) from err
    missing = [name for name in ("unit_id", *labels) if name not in table.column_names]
    if missing:
        raise SettingsError(f"--queries: {path}: has columns {table.column_names}, lacks {missing}")
    table = table.select(["unit_id", *labels]).set_column(0, "unit_id", table.column("unit_id").cast(pa.string()))
    names = table.column("unit_id").to_pylist()
    twice = sorted(name for name, times in Counter(names).items() if name is not None and times > 1)
    if twice:
        raise SettingsError(f"--queries: {path}: units {twice[:EXAMPLES]} occur more than once, expected each once")
    return table


def _related(
    rows: LabelTable, label: str, lines: Sequence[Mapping[str, Any]], place: Mapping[str, int], queries: Path
) -> Related:
    column = rows.column(label)
    code_of = {value: code for code, value in enumerate(column.values) if value is not None}
    kept = [line for line in lines if line[label] in code_of]
    if not kept:
        raise SettingsError(
            f"--queries: {queries}: no row has a value of {label} that a query has, e.g. {lines[0][label]!r}; the rows "
            f"have {[str(value) for value in list(code_of)[:EXAMPLES]]}"
        )
    return Related(
        label,
        tuple(line["unit_id"] for line in kept),
        tuple(np.array([place[line["unit_id"]]], dtype=np.int64) for line in kept),
        np.array([code_of[line[label]] for line in kept], dtype=np.int32),
        tuple(str(line[label]) for line in kept),
        column.codes_N,
        len(lines) - len(kept),
    )


def _sources(
    artifact: Artifact,
    asked: Sequence[Asked],
    methods: Sequence[ConfiguredMethod],
    cache: Path | None,
    progress: Progress | None,
) -> dict[str, tuple[FeatureSource, str]]:
    """Where the scores of every part lie: a source and the name of its array."""
    found: dict[str, tuple[FeatureSource, str]] = {}
    by_label = {method.label: method for method in methods}
    for name in dict.fromkeys(part for one in asked for part in one.parts):
        if name in by_label:
            rows = rows_by_method(artifact, by_label[name], cache=cache, progress=progress)
            found[name] = (rows, f"relevance_{name}")
        else:
            found[name] = (artifact, kernel_array(artifact) if name == GRASP else artifact.relevance_name(name))
    return found


def _questions(related: Sequence[Related]) -> list[Question]:
    """Every set of units that is ranked by, once, with the label's and the query's places that it has."""
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for r, one in enumerate(related):
        for q, columns in enumerate(one.columns):
            places.setdefault(tuple(columns.tolist()), []).append((r, q))
    return [(np.array(columns), of) for columns, of in sorted(places.items())]


def _few(questions: Sequence[Question], floats_each: int) -> Iterator[list[Question]]:
    """As many questions at a time as have units that fit in memory, one at least."""
    most = max(1, HELD_BYTES // (4 * floats_each))
    batch: list[Question] = []
    for question in questions:
        if batch and sum(len(columns) for columns, _ in batch) + len(question[0]) > most:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _scores(source: FeatureSource, array: str, columns: NDArray[np.int64]) -> F32:
    out_NQ = np.empty((source.n_rows, len(columns)), dtype=np.float32, order="F")
    for start, block in source.array_blocks(array, columns=columns):
        out_NQ[start : start + len(block)] = block
    return out_NQ


def _score(asked: Asked, own: Mapping[str, F32]) -> NDArray[np.floating[Any]]:
    parts = [own[name] for name in asked.parts]
    return parts[0] if asked.rule is None else fused(parts, asked.rule)


def _found(
    one: Asked,
    on: Related,
    k: int,
    lifts: Mapping[tuple[str, int, int], F64],
    r: int,
    first: Asked,
    resamples: int,
) -> Found:
    lift_Q = lifts[one.name, r, k]
    against = None if one is first else span(lift_Q - lifts[first.name, r, k], resamples=resamples)
    return Found(one.name, on, k, lift_Q, span(lift_Q, resamples=resamples), against)
