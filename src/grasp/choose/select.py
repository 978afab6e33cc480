"""Rows to train on: the best under a budget, and what they are predicted to bring. The verb `select`.

The road: `SelectionObjective` reads the effect of every row, `ranked` sorts them once, `limits.within` takes what they
allow, `Selection.export` writes them. Where rows bear on one another `grasp.geometry` chooses.
Shape letters: N rows, T targets, G values of a label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.arrays import F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.choose.amounts import Amount, parse_bounds, parse_budget, parse_tokens, weighted_targets
from grasp.choose.choice import (
    Chosen,
    Curve,
    SelectionObjective,
    Training,
    curve_of,
    even_places,
    protocol_of,
    searched,
)
from grasp.choose.climb import climb_rows
from grasp.choose.export import checked_rule
from grasp.choose.limits import Limits, read_exclusion, within
from grasp.choose.selection import Selection
from grasp.errors import SettingsError
from grasp.extract.progress import Progress
from grasp.predict.label_slices import sensible_labels
from grasp.predict.labels import LabelColumn, LabelTable
from grasp.predict.protocol import ScoringProtocol, geometry
from grasp.predict.rows import (
    SHORT,
    label_column,
    length_column,
    ranked,
    row_documents,
    row_tokens,
    short_of,
    short_rows,
)
from grasp.predict.weights import Weights, mask_of, one_subset
from grasp.runs.environment import Environment
from grasp.runs.table import RunTable
from grasp.text import several, signed, skipped_text
from grasp.verbs.predict import share

SUBSET = "selection"
OPTIMAL = "optimal: rows are worth what they are worth, whatever else is kept"
ENDS = ("short_end", "cut", "cut_begin")  # of documents
SHORT_SHARE = 0.01  # of short rows: worth a word
VALUES_NAMED, LARGE_SHARE = 3, 0.01  # of what is left out, among values with such a share of the rows


def select(
    artifact: ArtifactReader,
    budget: str | float | None = None,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    train_tokens: str | float | None = None,
    by: str | None = None,
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    runs: Environment | RunTable | Path | str | None = None,
    exclude: Path | str | Sequence[str] | None = None,
    exclude_where: str | None = None,
    documents: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    diversity: float | None = None,
    cautious: bool = False,
    progress: Progress | None = None,
) -> Selection:
    """Choose the rows that help the targets most.

    They can be written as a corpus to train on. Whole documents are chosen by the mean effect of their rows.

    In Python the result has `.row_ids`, `.save(path)`, `.export(directory)`.

    Args:
        budget: 20% or 5000 (rows), 2Mtokens, 20%tokens, 300documents, 67%documents of the whole corpus. Default: the
            best for `train_tokens`. In Python also a float, a share of the rows, or an int, so many rows.
        target: a target, or several with weights: sciq=2,openbookqa=1. Default: the only one.
        train_tokens: tokens the model will be trained on, e.g. 100B: repeated ones count as worth less.
        by: label that floors and caps speak of.
        floor: at least so much of the budget, e.g. Games:5%, or 1% of each value.
        cap: at most so much of the budget, e.g. Games:20%, or 10% of each value.
        runs: runs, retrained or imported: rows are chosen by the change that they lead to expect, with an interval.
            With `train_tokens`, or a protocol with geometry, they are chosen by relevance.
        exclude: row_ids or doc_ids to leave out: text or Parquet. In Python also a list.
        exclude_where: condition on labels: these rows are left out.
        documents: write whole documents, as they came, of which any, half or all was chosen. Default: exactly the rows.
            In Python `Selection.export` is told so as well.
        protocol: protocol to predict with. Default: the one that ships.
        diversity: penalty on redundancy in place of the protocol's own geometry, e.g. 0.25, or 0 for none.
        cautious: maximise the lower end of what `runs` lead to expect: what they know little of counts as worse.
        progress: told of the rows taken, where that takes long.
    Raises:
        SettingsError: a budget, floor or cap that cannot be met; neither budget nor train_tokens.
        ProtocolError: the artifact does not fit the protocol, or lacks a target.
        SubsetError: an expression that is no condition.
    """
    if documents is not None:
        checked_rule(documents)
    targets = weighted_targets(target, artifact.targets)
    chosen = protocol_of(protocol, diversity, artifact.array_names)
    table = LabelTable(artifact.rows_path)
    allowed_N, said = _allowed(artifact, table, exclude, exclude_where)
    labels = None if by is None else label_column(artifact, by, "by")
    training = Training(parse_tokens(train_tokens), int(row_tokens(artifact).sum()))
    floors, caps = parse_bounds(floor, "floor"), parse_bounds(cap, "cap")
    amount = None if budget is None else parse_budget(budget)
    if amount is None:
        _check_proposable(training, chosen, allowed_N)
    aim = SelectionObjective.from_artifact(artifact, chosen, targets, training, runs, cautious=cautious)
    if cautious and not aim.ranks_by_runs:
        raise SettingsError(
            f"cautious: protocol {chosen.name} has geometry, or counts rows, and then rows are chosen by relevance; "
            "take another protocol, or leave it out"
        )
    pool = _Pool.from_objective(aim, allowed_N, labels, documents=amount is not None and amount.unit == "documents")

    def limits_of(amount: Amount) -> Limits:
        return Limits.from_budget(
            amount, pool.allowed_M, tokens_N=aim.tokens_N, labels=pool.labels, floors=floors, caps=caps
        )

    if amount is None:
        amount = Amount(_best_budget(aim, allowed_N, limits_of if floors or caps else None), False)
        said.append(f"no budget was given: {amount.value:,.0f} rows have the highest value for the training budget")
    limits = limits_of(amount)
    asked = {
        "budget": budget,
        "targets": dict(targets),
        "train_tokens": training.tokens,
        "by": by,
        "unit": limits.unit,
        "floor": list(several(floor)),
        "cap": list(several(cap)),
        "exclude_where": exclude_where,
        "excluded_rows": int((~allowed_N).sum()),
    } | ({"cautious": True} if cautious else {})
    return _selection(aim, pool, limits, asked, said, progress, whole=documents is not None)


@dataclass(frozen=True, slots=True)
class _Pool:
    """What a budget counts: rows, or documents, each worth the mean effect of its rows. M: either of them."""

    effect_M: F64
    allowed_M: NDArray[np.bool_]
    labels: LabelColumn | None
    document_N: I64 | None = None

    @classmethod
    def from_objective(
        cls, aim: SelectionObjective, allowed_N: NDArray[np.bool_], labels: LabelColumn | None, *, documents: bool
    ) -> Self:
        """The rows, or the documents; one of which a row is excluded may not be taken."""
        if not documents:
            return cls(aim.effect_N, allowed_N, labels)
        if aim.predictor.protocol.searches:
            raise SettingsError("budget: documents are chosen without geometry; give rows or tokens, or diversity 0")
        document_N = row_documents(aim.artifact)
        _, first_M = np.unique(document_N, return_index=True)
        own = None if labels is None else replace(labels, codes_N=labels.codes_N[first_M])
        effect_M = _mean_by(document_N, aim.effect_N)
        return cls(effect_M, np.bincount(document_N, ~allowed_N) == 0, own, document_N)

    def spread(self, mask_BM: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rows of what masks pick."""
        return mask_BM if self.document_N is None else mask_BM[:, self.document_N]

    def mean(self, value_N: F64) -> F64:
        """From rows to what is picked."""
        return value_N if self.document_N is None else _mean_by(self.document_N, value_N)

    def rows(self, picked_P: I64) -> I64:
        """The rows of what was picked, in its order."""
        if self.document_N is None:
            return picked_P
        place_M = np.full(len(self.effect_M), len(picked_P))
        place_M[picked_P] = np.arange(len(picked_P))
        place_N = place_M[self.document_N]
        return np.argsort(place_N, kind="stable")[: int((place_N < len(picked_P)).sum())]


def _mean_by(document_N: I64, value_N: F64) -> F64:
    return np.asarray(np.bincount(document_N, value_N) / np.bincount(document_N), np.float64)


def _chosen(
    aim: SelectionObjective, pool: _Pool, limits: Limits, progress: Progress | None
) -> tuple[Chosen, I64, Curve]:
    """The best rows within the limits, what of the pool was picked, and what other budgets are worth.

    The curve goes on with the rows that come next, where no more is asked of them than to be good.
    """
    if aim.predictor.protocol.searches:
        if progress is not None:
            progress.stage("selecting", rows=None, tokens=None)
        found = geometry().choose_rows(aim.predictor, aim.weights_T, limits, progress)
        order_P = picked_P = found.row_index
    else:
        worth_M, guarantee = pool.effect_M, OPTIMAL
        if limits.cost_N is not None:
            worth_M = aim.predictor.worth_of_tokens(worth_M, aim.weights_T, limits.cost_N)
        if pool.document_N is not None:
            guarantee = "whole documents, by the mean effect of their rows"
        if aim.ranks_by_runs:
            worth_M, guarantee = _worth_by_runs(aim, pool, limits, worth_M)
        every_P = ranked(worth_M, among_N=limits.allowed_N)
        picked_P = within(every_P, limits)
        if limits.cost_N is not None and not aim.ranks_by_runs:
            guarantee = _of_tokens(worth_M, picked_P, limits, alike=worth_M is pool.effect_M)
        found = Chosen(pool.rows(picked_P), None, None, guarantee, ())
        order_P = found.row_index
        if not limits.has_label_limits:
            next_P = every_P[~mask_of(picked_P, len(pool.effect_M))[every_P]]
            order_P = np.concatenate([order_P, pool.rows(next_P)])
    places = even_places(len(order_P), also=len(found.row_index))
    own_N = None if pool.document_N is None else pool.effect_M[pool.document_N]
    return found, picked_P, curve_of(aim, order_P, places, own_N)


def _of_tokens(worth_N: F64, picked_P: I64, limits: Limits, *, alike: bool) -> str:
    """What a token of the choice is worth, and what it could be at most if the last row were cut to fit.

    The rows by their worth, as far as the tokens go, have the highest mean worth of a token: a knapsack whose items
    may be cut. A short row counts as its tokens.
    """
    assert limits.cost_N is not None
    said = "rows by what a token of them is worth, as far as the tokens go"
    said += "; the change counts rows alike, long or short" if alike else ""
    if limits.has_label_limits:
        return f"{said}; within floors and caps"
    cost_P, used = limits.cost_N[picked_P], int(limits.cost_N[picked_P].sum())
    order_N = ranked(worth_N, among_N=limits.allowed_N)
    cost_N = limits.cost_N[order_N]
    whole_N = np.clip(used - (np.cumsum(cost_N) - cost_N), 0, cost_N)
    mean, most = float(cost_P @ worth_N[picked_P]) / used, float(whole_N @ worth_N[order_N]) / used
    return f"{said}: {signed(mean)} a token, and no choice of as many tokens has more than {signed(most)}"


def _worth_by_runs(aim: SelectionObjective, pool: _Pool, limits: Limits, worth_M: F64) -> tuple[F64, str]:
    """What rows, or documents, are ranked by where runs say what subsets bring, and how much that gains."""
    assert aim.intervals is not None
    intervals, end = aim.intervals, "lower end of the change" if aim.cautious else "change"

    def kept(mask_BM: NDArray[np.bool_]) -> Weights:
        mask_BN = pool.spread(mask_BM)
        at = np.nonzero(mask_BN)
        return Weights(csr_array((np.ones(len(at[0])), at), shape=(len(mask_BN), aim.artifact.n_rows)))

    def value(mask_BM: NDArray[np.bool_]) -> F64:
        return aim.learned(kept(mask_BM))

    def masks(by_BM: F64) -> NDArray[np.bool_]:
        return np.stack([mask_of(within(ranked(by_M, among_N=limits.allowed_N), limits), len(by_M)) for by_M in by_BM])

    def rise(mask_1M: NDArray[np.bool_]) -> F64:
        return pool.mean(intervals.rise(kept(mask_1M), aim.weights_T, cautious=aim.cautious))

    best_M = climb_rows(worth_M, masks, value, rise)
    by_runs, by_relevance = value(masks(np.stack([best_M, worth_M]))).tolist()
    return best_M, (
        f"rows are ranked by the {end} that the runs lead to expect, {by_runs:+.4f} {intervals.unit}; the best by "
        f"relevance alone have {by_relevance:+.4f}"
    )


def _check_proposable(training: Training, protocol: ScoringProtocol, allowed_N: NDArray[np.bool_]) -> None:
    """See that there is something to propose a budget by."""
    if training.tokens is None:
        raise SettingsError("budget: got none; give one, e.g. 20%, or train_tokens, e.g. 100B, and it is proposed")
    if protocol.searches:
        raise SettingsError(
            "budget: got none; with geometry every budget is a search of its own, so none is proposed: give one, e.g. "
            "20%, or take the geometry away with diversity 0"
        )
    if not allowed_N.any():
        raise SettingsError("exclude: leaves no row; exclude fewer")


def _best_budget(
    aim: SelectionObjective, allowed_N: NDArray[np.bool_], limits_of: Callable[[Amount], Limits] | None
) -> int:
    """Rows with the highest value for the training budget, within floors and caps if there are any.

    Raises:
        SettingsError: no budget meets the floors and caps.
    """
    order_P = ranked(aim.effect_N, among_N=allowed_N)
    if limits_of is None:
        return searched(len(order_P), lambda places: curve_of(aim, order_P, places.tolist()).value)
    refused: list[SettingsError] = []

    def value(size: int) -> float:
        try:
            rows = within(order_P, limits_of(Amount(float(size), False)))
        except SettingsError as err:
            refused.append(err)
            return -np.inf
        weights = one_subset(SUBSET, mask_of(rows, aim.artifact.n_rows)).weights
        return float(aim.value(aim.predictor.sums(weights))[0])

    best = searched(len(order_P), lambda places: [value(size) for size in places.tolist()], at_once=16, near=0.005)
    if value(best) == -np.inf:
        raise refused[-1]
    return best


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
    aim: SelectionObjective,
    pool: _Pool,
    limits: Limits,
    asked: Mapping[str, Any],
    said: Sequence[str],
    progress: Progress | None,
    *,
    whole: bool,
) -> Selection:
    """The choice made, and the result in words and tables; of `whole` documents that will be written."""
    found, picked_P, curve = _chosen(aim, pool, limits, progress)
    training, artifact, rows = aim.training, aim.artifact, found.row_index
    weights = one_subset(SUBSET, mask_of(rows, artifact.n_rows)).weights
    sums = aim.predictor.sums(weights)
    targets, notes = aim.judged(SUBSET, weights)
    n_tokens = int(aim.tokens_N[rows].sum())
    value = float(aim.value(sums)[0])
    table = _row_table(aim, found, asked["by"])
    headline = f"keeps {share(len(rows), artifact.n_rows)}, {n_tokens:,} tokens"
    if asked["unit"] == "documents":
        headline = f"keeps {len(table['doc_id'].unique()):,} documents: {headline.removeprefix('keeps ')}"
    more = [*said, *found.notes, *_pool_notes(limits, picked_P, pool), *_row_notes(aim, rows, asked["by"])]
    more += _document_notes(artifact, rows, whole=whole)
    if training.tokens is not None:
        headline += f"; in {training.tokens:,.0f} training tokens each is seen {training.tokens / n_tokens:.2g} times"
    left = float(sums.worth(training.exposure)[0])
    if training.tokens is not None:
        more.append(
            f"value {value:+z.3f}: the change, less what repetition takes: it leaves {left:.0%} of what as many new "
            "rows would do"
        )
    return Selection(
        table,
        headline,
        (*more, *notes),
        targets=targets,
        value=value,
        unit=aim.predictor.unit,
        asked=asked,
        protocol=aim.predictor.protocol,
        artifact=artifact,
        curve=curve,
        labels=None if limits.codes_N is None else _shares(limits, picked_P),
        bound=found.bound,
        guarantee=found.guarantee if found.bound is None else f"upper bound {found.bound:+.3f}: {found.guarantee}",
        row_index=rows,
        effect_N=aim.effect_N,
    )


def _row_table(aim: SelectionObjective, found: Chosen, by: str | None) -> pa.Table:
    """subset_id, row_id, doc_id, order, effect[, gain], n_tokens[, label]"""
    artifact, chosen_N, start = aim.artifact, mask_of(found.row_index, aim.artifact.n_rows), 0
    parts: list[pa.RecordBatch] = []  # the row table streams past
    for batch in artifact.row_batches(["row_id", "doc_id", "n_tokens", *([by] if by else [])]):
        parts.append(batch.filter(pa.array(chosen_N[start : start + batch.num_rows])))
        start += batch.num_rows
    taken = np.argsort(np.argsort(found.row_index))  # in corpus order -> in the order taken
    table = pa.Table.from_batches(parts).take(pa.array(taken)).combine_chunks()
    new = {"order": np.arange(len(table)), "effect": aim.effect_N[found.row_index]}
    if found.gain is not None:
        new["gain"] = found.gain
    for place, (name, values) in enumerate(new.items(), start=2):
        table = table.add_column(place, name, pa.array(values))
    return table.add_column(0, "subset_id", pa.array([SUBSET] * len(table), pa.string()))


def _pool_notes(limits: Limits, picked_P: I64, pool: _Pool) -> list[str]:
    """What there was to choose from, and what of the budget is left."""
    used = len(picked_P) if limits.cost_N is None else int(limits.cost_N[picked_P].sum())
    above, what = int((pool.effect_M[pool.allowed_M] > 0).sum()), "rows" if pool.document_N is None else "documents"
    said = [f"{above:,} of the {int(pool.allowed_M.sum()):,} {what} that may be taken are above the corpus average"]
    if used < limits.budget:
        why = "no row that is left fits" if limits.unit == "tokens" else "the caps leave no more"
        said.append(f"{used:,} of {limits.budget:,} {limits.unit} were taken: {why}")
    return said


def _row_notes(aim: SelectionObjective, row_index: I64, by: str | None) -> list[str]:
    """What goes, and how far the rows that stay can be trusted."""
    gone_N = ~mask_of(row_index, aim.artifact.n_rows)
    said = []
    if gone_N.any():
        mean = float(aim.effect_N[gone_N].mean())
        line = f"left out: {share(int(gone_N.sum()), len(gone_N))}, their mean effect {mean:+.3f}"
        for label in [by] if by else sensible_labels(aim.artifact)[:1]:
            column = label_column(aim.artifact, label)
            gone_G, names = np.bincount(column.codes_N, gone_N, len(column.values)), column.names()
            share_G = np.where(column.counts >= max(2, LARGE_SHARE * len(gone_N)), gone_G / column.counts, 0.0)
            worst = np.argsort(-share_G, kind="stable")[:VALUES_NAMED]
            shares = ", ".join(f"{names[g]} ({gone_G[g]:,.0f} of {column.counts[g]:,})" for g in worst if share_G[g])
            line += f"; most of {label}: {shares}" * bool(shares)
        said.append(line)
    short, length = short_rows(aim.artifact, row_index), length_column(aim.artifact)
    if short > SHORT_SHARE * len(row_index):
        said.append(
            f"{short:,} of the rows taken have fewer than {SHORT} {short_of(length)}, and their relevance is noisy: "
            f'--exclude-where "{length} < {SHORT}" leaves such rows out'
        )
    return said


def _document_notes(artifact: ArtifactReader, row_index: I64, *, whole: bool) -> list[str]:
    """Which documents rows cut, and what of the corpus is in no row; of `whole` ones neither is worth a word."""
    said = []
    if not whole:
        document_N = row_documents(artifact)
        kept_M, of_M = np.bincount(document_N[row_index], minlength=int(document_N.max()) + 1), np.bincount(document_N)
        if cut := int(((kept_M > 0) & (kept_M < of_M)).sum()):
            said.append(
                f"rows are pieces of documents: {cut:,} of {len(of_M):,} documents are kept in part; a budget such as "
                "20%documents takes whole ones, and --export with --documents half writes whole ones"
            )
    counts = artifact.manifest.skipped.get("rows", {}).get("counts", {})
    if counts := {reason: count for reason, count in counts.items() if not (whole and reason in ENDS)}:
        said.append(f"neither chosen nor left out, since no row holds them: {skipped_text(counts)}")
    return said


def _shares(limits: Limits, row_index: I64) -> pa.Table:
    """One line a value of the label."""
    assert limits.codes_N is not None
    cost_N = np.ones(len(limits.codes_N), dtype=np.int64) if limits.cost_N is None else limits.cost_N
    taken_G, pool_G = (
        np.bincount(limits.codes_N[rows], cost_N[rows], len(limits.values)).astype(np.int64)
        for rows in (row_index, limits.allowed_N)
    )
    return pa.table(
        {
            "value": pa.array(limits.values, pa.string()),
            "taken": taken_G,
            "pool": pool_G,
            "floor": pa.array([int(floor) or None for floor in limits.floor_G], pa.int64()),
            "cap": pa.array([int(cap) if cap < limits.budget else None for cap in limits.cap_G], pa.int64()),
        }
    )
