"""Rows to train on: the best under a budget, and what they are predicted to bring. The verb `select`.

The road: `Predictor` gives the effect of every row, `additive.best_rows` sorts them once and takes what the limits
allow, `Selection.export` writes them. Protocols with geometry take `geometric.choose_rows` instead.
Shape letters: N rows, T targets, G values of a label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.choose.additive import F64, best_rows
from grasp.choose.amounts import Amount, parse_bounds, parse_budget, parse_tokens, weighted_targets
from grasp.choose.corpus_rows import Rule, are_records, checked_rule, corpus_settings, kept_documents, proven_rows
from grasp.choose.curve import Curve, Training, best_length, curve_of, even_places
from grasp.choose.export import Export, Format, check_place, checked_format, write_documents, write_rows
from grasp.choose.geometric import OPTIMAL, Chosen, choose_rows
from grasp.choose.limits import I64, Limits
from grasp.choose.records import read_exclusion, rows_in_order, write_with_summary
from grasp.choose.repetition import REPEAT_WORTH
from grasp.corpus.sources import open_source
from grasp.errors import CorpusError, SettingsError
from grasp.extract.progress import Progress
from grasp.extract.reopen import Origin
from grasp.files import write_whole
from grasp.predict.blocks import one_subset
from grasp.predict.intervals import FitIntervals, Intervals, NatsTable, measures
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.ranking import ranked
from grasp.predict.row_arrays import row_tokens
from grasp.predict.slices import LabelTable
from grasp.predict.verb import as_protocol, notes, share
from grasp.results import Result
from grasp.settings import CorpusSettings
from grasp.text import text_table

SUBSET = "selection"
CURVE_SHOWN = 8
VALUES_SHOWN = 30
NATS = ("expected", "low", "high")
# Changes have a sign; shares, weights and factors have none.
FORMATS = dict.fromkeys(NATS, "{:+z.4f}") | {
    "weight": "{:.2f}",
    "now": "{:.1%}",
    "proposed": "{:.1%}",
    "times_as_often": "{:.2f}",
}
NO_CURVE = Curve((), (), (), ())


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Result):
    """Chosen rows, best first; `table` names them: subset_id, row_id, doc_id, order, effect, n_tokens[, label].

    Attributes:
        targets: target, weight, change (against the whole corpus), and, with runs, expected, low and high in nats.
        value: weighted mean of the changes, repetition counted if the training budget is known.
        curve: what the first so many rows are worth.
        labels: of each value of the label: pool, taken, floor and cap, in the unit of the budget.
        asked: the question.
    """

    targets: pa.Table = None
    value: float = 0.0
    curve: Curve = NO_CURVE
    labels: pa.Table | None = None
    bound: float | None = None
    guarantee: str = ""
    unit: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    protocol: ScoringProtocol | None = None
    artifact: ArtifactReader | None = None
    row_index: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def row_ids(self) -> list[str]:
        """Names of the chosen rows, best first."""
        names: list[str] = self.table["row_id"].to_pylist()
        return names

    @property
    def n_tokens(self) -> int:
        return int(np.sum(self.table["n_tokens"].to_numpy()))

    def save(self, path: Path | str) -> Path:
        """Write the rows as Parquet, with a summary (.json) and the protocol (.protocol.yaml) beside it.

        `predict --subsets` and `report --selection` take them.
        """
        assert self.artifact is not None
        assert self.protocol is not None
        return write_with_summary(self.table, self.summary(), self.protocol, self.artifact, Path(path))

    def export(
        self,
        out: Path | str,
        *,
        documents: str | None = None,
        format: str = "parquet",  # noqa: A002 - what it is called everywhere
        corpus: str | None = None,
        ids: Path | str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Export:
        """Write a corpus to train on: exactly the chosen rows, or whole documents.

        Conversations, pairs and instructions are written as the user's own records, all columns as they are.

        Args:
            out: new directory; it appears when it is whole.
            documents: whole documents of which any, half or all tokens were chosen; None: exactly the rows.
            format: parquet, jsonl or datasets.
            corpus: where the corpus lies now; None: where it was built from.
            ids: file for the names of the whole documents, one a line.
            say: told, before anything is written, what whole documents add and drop.
        Raises:
            SettingsError: `out` is there already, or no such rule or format.
            CorpusError: the corpus, or its tokenizer, is not the one that the artifact was built from.
        """
        assert self.artifact is not None
        artifact, place = self.artifact, Path(out)
        kind, rule, settings = check_export(artifact, place, documents=documents, form=format, corpus=corpus, ids=ids)
        tokenizer = Origin(artifact).tokenizer
        rows = proven_rows(artifact, settings, tokenizer)
        asked: dict[str, Any] = {"corpus": artifact.manifest.fingerprints["corpus"], "artifact": artifact.where}
        asked |= {"asked": dict(self.asked)}
        if rule is None and not are_records(artifact):
            effect = self.table["effect"].to_numpy()
            return write_rows(artifact, rows, self.row_index, effect, place, kind, asked, tokenizer.decode)
        kept = kept_documents(rows, self._mask(), rule or "all")
        if say is not None and rule is not None:
            say(
                f"whole documents ({rule}): {len(kept.names):,} with {kept.tokens:,} tokens; {kept.added:,} of these "
                f"were not chosen, {kept.lost:,} chosen ones are dropped"
            )
        if ids is not None:
            write_ids(kept.names, Path(ids))
        return write_documents(settings, kept, place, kind, asked | ({} if rule is None else {"documents": rule}))

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        assert self.protocol is not None
        assert self.artifact is not None
        return {
            "kind": "selection",
            "headline": self.headline,
            "rows": len(self),
            "tokens": self.n_tokens,
            "corpus_rows": self.artifact.n_rows,
            "asked": dict(self.asked),
            "targets": self.targets.to_pylist(),
            "value": self.value,
            "scale": self.unit,
            "bound": self.bound,
            "guarantee": self.guarantee,
            "curve": {name: list(getattr(self.curve, name)) for name in ("rows", "tokens", "effect", "value")},
            "labels": [] if self.labels is None else self.labels.to_pylist(),
            "protocol": self.protocol.model_dump(mode="json"),
            "notes": list(self.notes),
        }

    def _mask(self) -> NDArray[np.bool_]:
        assert self.artifact is not None
        chosen_N = np.zeros(self.artifact.n_rows, dtype=np.bool_)
        chosen_N[self.row_index] = True
        return chosen_N

    def __repr__(self) -> str:
        parts = [self.headline, text_of(f"predicted change against the whole corpus, {self.unit}", self.targets)]
        parts += [self._curve_text(), self._labels_text(), self.guarantee, *self.notes]
        return "\n".join(part for part in parts if part)

    def _curve_text(self) -> str:
        rows = self.curve.rows
        step = max(1, len(rows) // CURVE_SHOWN)
        places = sorted(
            {*range(step - 1, len(rows), step), len(rows) - 1} | {k for k, n in enumerate(rows) if n == len(self)}
        )
        assert self.artifact is not None
        lines = [
            (
                f"{rows[k]:,}",
                f"{100 * rows[k] / self.artifact.n_rows:.1f} %",
                f"{self.curve.tokens[k]:,}",
                f"{self.curve.effect[k]:+z.3f}",
                f"{self.curve.value[k]:+z.3f}",
            )
            for k in places
        ]
        return text_table(
            "other budgets: what the next row is worth (0 = the corpus average), and all rows together",
            ("rows", "share", "tokens", "next row", "all rows"),
            lines,
            left=0,
        )

    def _labels_text(self) -> str:
        if self.labels is None:
            return ""
        shown = self.labels.sort_by([("taken", "descending")])
        text = text_of(f"what is taken of each value, in {self.asked['unit']}", shown.slice(0, VALUES_SHOWN))
        rest = shown.slice(VALUES_SHOWN)
        if not len(rest):
            return text
        return f"{text}\n... and {len(rest):,} more values with {sum(rest['taken'].to_pylist()):,} in all"


def select(
    artifact: ArtifactReader,
    budget: str | float | None = None,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    train_tokens: str | float | None = None,
    by: str | None = None,
    floor: Sequence[str] = (),
    cap: Sequence[str] = (),
    exclude: Path | str | Sequence[str] | None = None,
    exclude_where: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    diversity: float | None = None,
    repeat_worth: float = REPEAT_WORTH,
    runs: FitIntervals | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Choose the rows that help the targets most.

    Args:
        budget: 20%, 5000 (rows), 2Mtokens or 20%tokens of the whole corpus; None: the best for `train_tokens`.
        target: a target, several, or targets and weights; None: the one that there is.
        train_tokens: tokens that the model will be trained on, e.g. 100B: repetition then counts as worth less, see
            `repetition`.
        by: label that floors and caps speak of, e.g. topic.
        floor: at least so much of the budget, e.g. Games:5%; for every value: 1%.
        cap: at most so much of it.
        exclude: row_ids or doc_ids, or a file with them.
        exclude_where: rows for which a label expression is true.
        protocol: None: the one that ships.
        diversity: penalty on redundancy in place of the protocol's own geometry; 0: none.
        repeat_worth: R* of `repetition`.
        runs: fits intervals in nats a token to retrained subsets.
        progress: told of the rows taken, where that takes long.
    Raises:
        SettingsError: a budget, floor or cap that cannot be met; neither budget nor train_tokens.
        ProtocolError: the artifact does not fit the protocol, or lacks a target.
        SubsetError: an expression that is no condition.
    """
    targets = weighted_targets(target, artifact.targets)
    chosen = as_protocol(protocol)
    if diversity is not None:
        chosen = with_diversity(chosen, diversity, artifact.array_names)
    table = LabelTable(artifact.rows_path)
    allowed_N, said = _allowed(artifact, table, exclude, exclude_where)
    labels = None if by is None else table.column(by, "by")
    trained = None if train_tokens is None else parse_tokens(train_tokens)
    floors, caps = parse_bounds(floor, "floor"), parse_bounds(cap, "cap")
    amount = None if budget is None else parse_budget(budget)
    pool = Pool.of(artifact, chosen, targets, allowed_N, trained, repeat_worth, with_runs=runs is not None)
    if amount is None:
        amount = Amount(pool.best_budget(limited=bool(floors or caps)), False)
        said.append(f"no budget was given: {amount.value:,.0f} rows have the highest value for the training budget")
    limits = Limits.of(amount, allowed_N, tokens_N=pool.tokens_N, labels=labels, floors=floors, caps=caps)
    found = pool.choose(limits, progress)
    asked: dict[str, Any] = {"budget": budget, "targets": dict(targets), "train_tokens": trained, "by": by}
    asked |= {"unit": limits.unit, "floor": list(floor), "cap": list(cap), "exclude_where": exclude_where}
    asked["excluded_rows"] = int((~allowed_N).sum())
    return _selection(pool, limits, found, asked, (*said, *found.notes), None if runs is None else runs(pool.predictor))


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows with what they are worth to the targets that are asked for."""

    artifact: ArtifactReader
    predictor: Predictor
    weights_T: F64
    effect_N: F64
    tokens_N: I64
    allowed_N: NDArray[np.bool_]
    training: Training

    @classmethod
    def of(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol,
        targets: Mapping[str, float],
        allowed_N: NDArray[np.bool_],
        trained: float | None,
        repeat_worth: float,
        *,
        with_runs: bool,
    ) -> Self:
        """Bind a protocol to the targets of an artifact."""
        sketches = measures(artifact.array_names) if with_runs else ()
        predictor = Predictor.of(artifact, protocol, list(targets), sketches=sketches)
        weights_T, tokens_N = np.array(list(targets.values())), row_tokens(artifact)
        effect_N = np.asarray(predictor.effect_NT @ weights_T, dtype=np.float64)
        training = Training(trained, checked_worth(repeat_worth), int(tokens_N.sum()))
        return cls(artifact, predictor, weights_T, effect_N, tokens_N, allowed_N, training)

    def best_budget(self, *, limited: bool) -> int:
        """Rows with the highest value for the training budget.

        Raises:
            SettingsError: nothing to propose a budget by.
        """
        if self.training.tokens is None:
            raise SettingsError("budget: got none; give one, e.g. 20%, or train_tokens, e.g. 100B, and it is proposed")
        if limited or not self.predictor.additive:
            raise SettingsError("budget: got none; floors, caps and geometry need one, e.g. 20%")
        order_P = ranked(self.effect_N, among_N=self.allowed_N)
        if not len(order_P):
            raise SettingsError("exclude: leaves no row; exclude fewer")
        return best_length(self.predictor, self.weights_T, order_P, self.effect_N, self.tokens_N, self.training)

    def choose(self, limits: Limits, progress: Progress | None) -> Chosen:
        """The best rows within the limits."""
        if not self.predictor.additive:
            if progress is not None:
                progress.stage("selecting", rows=None, tokens=None)
            return choose_rows(self.artifact, self.predictor, self.weights_T, limits, progress)
        return Chosen(best_rows(self.worth(limits), limits), None, None, OPTIMAL, ())

    def worth(self, limits: Limits) -> F64:
        """What rows are ranked by: their effect; where rows add up and tokens are spent, that of a token."""
        if self.predictor.protocol.weighting == "count" and limits.cost_N is not None:
            return (self.effect_N + float(self.predictor.task.offset_C @ self.weights_T)) / self.tokens_N
        return self.effect_N

    def curve(self, limits: Limits, row_index: I64) -> Curve:
        """What other budgets are worth: these rows, and beyond them those that come next, where no more is asked."""
        order_P = row_index
        if self.predictor.additive and not limits.has_label_limits:
            left_N = self.allowed_N.copy()
            left_N[row_index] = False
            order_P = np.concatenate([row_index, ranked(self.worth(limits), among_N=left_N)])
        places = even_places(len(order_P), also=len(row_index))
        return curve_of(self.predictor, self.weights_T, order_P, self.effect_N, self.tokens_N, self.training, places)


def with_diversity(protocol: ScoringProtocol, weight: float, array_names: Sequence[str]) -> ScoringProtocol:
    """The protocol with a penalty on K_raw as its only geometry; weight 0 takes its geometry away.

    The penalty is on the joint sketch where the artifact has both halves, else on the sketch that it has.

    Raises:
        SettingsError: a negative weight, or no sketch to measure diversity by.
    """
    if not 0 <= weight < np.inf:
        raise SettingsError(f"diversity: got {weight:g}, expected 0 or more: the weight of the penalty on redundancy")
    built = [half for half in ("hidden", "residual", "product") if f"{half}_sketch" in array_names]
    if weight and not built:
        raise SettingsError("diversity: the artifact has no sketch to measure it by; leave it out, or build sketches")
    half = "joint" if {"hidden", "residual"} <= set(built) else (built[-1] if built else "")
    components = {f"{half}.raw": -weight} if weight else {}
    name = f"{protocol.name}, diversity {weight:g}"
    return protocol.model_copy(update={"name": name, "components": components, "selected_on": None})


def check_export(
    artifact: ArtifactReader,
    out: Path | None,
    *,
    documents: str | None = None,
    form: str = "parquet",
    corpus: str | None = None,
    ids: Path | str | None = None,
) -> tuple[Format, Rule | None, CorpusSettings]:
    """See that an export can be made, before the work begins; arguments as in `Selection.export`."""
    kind, rule = checked_format(form), None if documents is None else checked_rule(documents)
    if out is None and (documents or corpus or ids):
        raise SettingsError("export: documents, corpus and ids say how; name the directory that is written")
    if ids is not None and rule is None:
        raise SettingsError("ids: lists whole documents; say with `documents` which: any, half or all")
    settings = corpus_settings(artifact, corpus)
    if out is not None:
        check_place(out)
        try:
            open_source(settings.path, settings.split)
        except CorpusError as err:
            raise SettingsError(f"{err}; say with `corpus` where it lies now") from err
    return kind, rule, settings


def write_ids(names: Sequence[str], path: Path) -> None:
    """Names of documents, one a line; the file appears only when whole.

    Raises:
        SettingsError: a name with a line break.
    """
    for name in names:
        if "\n" in name or "\r" in name:
            raise SettingsError(
                f"document {name!r}: a list with one name a line cannot hold it; give names without breaks"
            )
    write_whole(path, ("\n".join(names) + "\n").encode())


def checked_worth(repeat_worth: float) -> float:
    if not 0 < repeat_worth < np.inf:
        raise SettingsError(f"repeat_worth: got {repeat_worth:g}, expected a number above 0; the published one is 15.4")
    return repeat_worth


def _allowed(
    artifact: ArtifactReader, table: LabelTable, exclude: Path | str | Sequence[str] | None, exclude_where: str | None
) -> tuple[NDArray[np.bool_], list[str]]:
    """Rows that may be taken, and what is worth saying of the others."""
    said: list[str] = []
    allowed_N = np.ones(artifact.n_rows, dtype=np.bool_)
    if exclude is not None:
        found = read_exclusion(artifact, exclude)
        allowed_N &= ~found.mask_N
        listed = f"{found.listed:,} names exclude {int(found.mask_N.sum()):,} rows; {found.unknown:,} are unknown"
        said.append(f"{found.where}: {listed if found.listed else 'is empty, and excludes nothing'}")
    if exclude_where is not None:
        chosen = table.matching(exclude_where)
        allowed_N &= ~chosen.mask_N
        unlabelled = f"; {chosen.n_null:,} rows have no label there and stay" if chosen.n_null else ""
        said.append(f"{exclude_where}: excludes {int(chosen.mask_N.sum()):,} rows{unlabelled}")
    return allowed_N, said


def _selection(
    pool: Pool,
    limits: Limits,
    found: Chosen,
    asked: Mapping[str, Any],
    said: tuple[str, ...],
    intervals: Intervals | None,
) -> Selection:
    """The result in words and tables."""
    predictor, training, artifact = pool.predictor, pool.training, pool.artifact
    chosen_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    chosen_N[found.row_index] = True
    sums = predictor.sums(one_subset(SUBSET, chosen_N).weights)
    change_1T = predictor.change_of(sums)
    nats = None if intervals is None else intervals.of(predictor, sums, change_1T)
    table = _row_table(pool, found, asked["by"])
    n_tokens = int(np.sum(table["n_tokens"].to_numpy()))
    worth = float(training.share(np.array([n_tokens]))[0])
    value = worth * float(change_1T[0] @ pool.weights_T)
    headline = f"keeps {share(len(table), artifact.n_rows)}, {n_tokens:,} tokens"
    more = list(said) + _more_notes(limits, found.row_index, pool.effect_N)
    if training.tokens is not None:
        headline += f"; in {training.tokens:,.0f} training tokens each is seen {training.tokens / n_tokens:.2g} times"
        more.append(
            f"value {value:+.3f}: the change times {worth:.3f}, what repetition leaves of the tokens against the whole "
            f"corpus, seen {training.tokens / training.corpus_tokens:.2g} times (R* = {training.repeat_worth:g})"
        )
    return Selection(
        table,
        headline,
        (*more, *outside(nats), *notes(predictor, intervals)),
        targets=target_table(predictor, pool.weights_T, change_1T, nats),
        value=value,
        curve=pool.curve(limits, found.row_index),
        labels=None if limits.codes_N is None else _shares(limits, found.row_index),
        bound=found.bound,
        guarantee=found.guarantee if found.bound is None else f"upper bound {found.bound:+.3f}: {found.guarantee}",
        unit=predictor.unit,
        asked=asked,
        protocol=predictor.protocol,
        artifact=artifact,
        row_index=found.row_index,
    )


def target_table(predictor: Predictor, weights_T: F64, change_1T: F64, nats: NatsTable | None) -> pa.Table:
    """target, weight, change[, expected, low, high] of one subset."""
    columns = {"target": pa.array(predictor.targets, pa.string()), "weight": pa.array(weights_T)}
    columns["change"] = pa.array(change_1T[0])
    if nats is not None:
        values = zip(NATS, (nats.expected_BT, nats.low_BT, nats.high_BT), strict=True)
        columns |= {name: pa.array(value_BT[0], from_pandas=True) for name, value_BT in values}
    return pa.table(columns)


def outside(nats: NatsTable | None) -> list[str]:
    """What is said of a subset beyond the runs."""
    found = () if nats is None else nats.outside
    return [f"outside of what the runs covered, so the interval is wider: {words}" for words in found if words]


def _row_table(pool: Pool, found: Chosen, by: str | None) -> pa.Table:
    """subset_id, row_id, doc_id, order, effect[, gain], n_tokens[, label]"""
    table = rows_in_order(pool.artifact, found.row_index, ["row_id", "doc_id", "n_tokens", *([by] if by else [])])
    new = {"order": np.arange(len(table)), "effect": pool.effect_N[found.row_index]}
    if found.gain is not None:
        new["gain"] = found.gain
    for place, (name, values) in enumerate(new.items(), start=2):
        table = table.add_column(place, name, pa.array(values))
    return table.add_column(0, "subset_id", pa.array([SUBSET] * len(table), pa.string()))


def _more_notes(limits: Limits, row_index: I64, effect_N: F64) -> list[str]:
    used = len(row_index) if limits.cost_N is None else int(limits.cost_N[row_index].sum())
    above = int((effect_N[limits.allowed_N] > 0).sum())
    said = [f"{above:,} of the {int(limits.allowed_N.sum()):,} rows that may be taken are above the corpus average"]
    if used < limits.budget:
        why = "no row that is left fits" if limits.unit == "tokens" else "the caps leave no more"
        said.append(f"{used:,} of {limits.budget:,} {limits.unit} were taken: {why}")
    return said


def _shares(limits: Limits, row_index: I64) -> pa.Table:
    """One line a value of the label."""
    assert limits.codes_N is not None
    cost_N = np.ones(len(limits.codes_N), dtype=np.int64) if limits.cost_N is None else limits.cost_N
    pool_G, taken_G = np.zeros(len(limits.values), dtype=np.int64), np.zeros(len(limits.values), dtype=np.int64)
    np.add.at(pool_G, limits.codes_N[limits.allowed_N], cost_N[limits.allowed_N])
    np.add.at(taken_G, limits.codes_N[row_index], cost_N[row_index])
    caps = [int(cap) if cap < limits.budget else None for cap in limits.cap_G]
    floors = [int(floor) or None for floor in limits.floor_G]
    columns = {
        "taken": taken_G,
        "pool": pool_G,
        "floor": pa.array(floors, pa.int64()),
        "cap": pa.array(caps, pa.int64()),
    }
    return pa.table({"value": pa.array(limits.values, pa.string()), **columns})


def text_of(title: str, table: pa.Table) -> str:
    rows = [[_cell(name, value) for name, value in row.items()] for row in table.to_pylist()]
    return text_table(title, table.column_names, rows)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return FORMATS.get(name, "{:+z.3f}").format(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
