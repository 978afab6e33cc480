"""Rows to train on: the best under a budget, and what they are predicted to bring. The verb `select`.

The road: `SelectionObjective` reads the effect of every row, `ranked` sorts them once, `limits.within` takes what they
allow, `Selection.export` writes them. If the objective is not additive over rows, `grasp.geometry` selects them.
Shape letters: N rows, M rows or documents that a budget counts, P all of them in order, T targets, G values of a label.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from grasp.api.predict import share
from grasp.arrays import F64, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import (
    SHORT,
    label_column,
    leak_notes,
    leaked_rows,
    length_column,
    ranked,
    row_documents,
    short_of,
    short_rows,
)
from grasp.artifact.where import LabelColumn, LabelTable
from grasp.errors import SettingsError
from grasp.predict.scoring_rule import Interaction, ScoringProtocol, geometry
from grasp.predict.slices import suggest_labels
from grasp.predict.weights import Weights, mask_of, single_subset
from grasp.progress import Progress
from grasp.select.budget import (
    OPTIMAL,
    Amount,
    Bounds,
    Constraints,
    SelectedRows,
    load_exclusions,
    parse_bounds,
    parse_budget,
    parse_tokens,
    take_within_budget,
)
from grasp.select.export import checked_rule
from grasp.select.objective import SelectionObjective, resolve_rule, weighted_targets
from grasp.select.selection import Curve, Selection
from grasp.text import several, signed, skipped_text

if TYPE_CHECKING:
    from grasp.runs.retrained import TrainingRuns
    from grasp.runs.table import RunTable

SUBSET = "selection"
ENDS = ("short_end", "cut", "cut_begin")  # of documents
SHORT_SHARE = 0.01  # of short rows: worth a word
VALUES_NAMED, LARGE_SHARE = 3, 0.01  # of what is left out, among values with such a share of the rows
PLACES = 50  # lengths of a choice whose value is shown
SEARCHED = 200  # lengths that are compared at once for the best one
PARTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the rows that are swapped at once where runs say more, besides all
ROUNDS = 20
MISSED = 0.02  # of a budget that may be left over without a word in the headline
FEW = 0.01  # of the corpus: a number of rows so small may be meant as a share
LARGEST_SHARE = 100
ERRORS = 2.0  # standard errors above the share of all rows, from which a value is named
SLOW = 0.01  # of what the rounds before have gained


def select(
    artifact: ArtifactReader,
    budget: str | float | None = None,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    train_tokens: str | float | None = None,
    by: str | None = None,
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    runs: "TrainingRuns | RunTable | Path | str | None" = None,
    exclude: Path | str | Sequence[str] | None = None,
    exclude_where: str | None = None,
    drop_leaks: bool = False,
    documents: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    diversity: float | None = None,
    cautious: bool = False,
    progress: Progress | None = None,
) -> Selection:
    """Select the rows that help the targets most, within a budget.

    The selection can be exported as a corpus to train on. Whole documents are ranked by the mean effect of their rows.

    In Python the result has `.row_ids`, `.save(path)`, `.export(directory)`.

    Args:
        budget: amount to select: 20% or 5000 (rows), 2Mtokens, 20%tokens, 300documents, 67%documents of the whole
            corpus. Default: the optimum for `train_tokens`. In Python also a float (share of the rows) or an int
            (number of rows).
        target: target, or several with weights, e.g. sciq=2,openbookqa=1. Default: the only target.
        train_tokens: length of the training run in tokens, e.g. 100B; repeated tokens have diminishing value.
        by: label that `floor` and `cap` refer to.
        floor: minimum share of the budget, e.g. Games:5%, or 1% for every value.
        cap: maximum share of the budget, e.g. Games:20%, or 10% for every value.
        runs: retrained or imported runs; rows are selected by the change that a model fitted to the runs predicts, and
            the result has intervals. With `train_tokens`, or a protocol with geometry, rows are selected by relevance.
        exclude: file of row_ids or doc_ids to exclude: text or Parquet. In Python also a list.
        exclude_where: condition on labels; matching rows are excluded.
        drop_leaks: exclude rows that contain questions of the targets.
        documents: export whole documents of which any, half or all rows are selected. Default: only the rows. In
            Python pass it to `Selection.export` as well.
        protocol: protocol to predict with. Default: the built-in one.
        diversity: penalty on redundancy that replaces the geometry of the protocol, e.g. 0.25, or 0 for none.
        cautious: maximise the lower confidence bound instead of the mean (requires `runs`).
        progress: receives the number of rows processed.
    Raises:
        SettingsError: neither budget nor train_tokens is given, or a budget, floor or cap cannot be met.
        ProtocolError: the artifact does not fit the protocol, or lacks a target.
        SubsetError: an expression is not a condition.
    """
    if documents is not None:
        checked_rule(documents)
    targets = weighted_targets(target, artifact.targets)
    rule = resolve_rule(artifact, protocol, diversity)
    if documents == "all" and rule.interaction is Interaction.PAIRS:
        raise SettingsError(
            "documents: with geometry rows are chosen one by one, so that hardly a document would be whole; give "
            "any or half, or diversity 0"
        )
    allowed_N, excluded_notes = _allowed(artifact, targets, exclude, exclude_where, drop_leaks=drop_leaks)
    labels = None if by is None else label_column(artifact, by, "by")
    by = None if labels is None else labels.name  # as the corpus spells it
    tokens = None if train_tokens is None else parse_tokens(train_tokens)
    floors, caps = parse_bounds(floor, "floor"), parse_bounds(cap, "cap")
    amount = None if budget is None else parse_budget(budget)
    if amount is None:
        _refuse_no_budget(rule, tokens, allowed_N)
    objective = SelectionObjective.from_artifact(artifact, rule, targets, tokens, runs, cautious=cautious)
    chosen = _choose(objective, amount, allowed_N, labels, floors, caps, whole=documents == "all", progress=progress)
    limits, rows = chosen.limits, chosen.best.row_index
    params = {
        "budget": budget,
        "targets": dict(targets),
        "train_tokens": tokens,
        "by": by,
        "unit": limits.unit,
        "items": chosen.items,
        "floor": list(several(floor)),
        "cap": list(several(cap)),
        "exclude_where": exclude_where,
        "drop_leaks": drop_leaks,
        "excluded_rows": int((~allowed_N).sum()),
    } | ({"cautious": True} if cautious else {})
    selected_N = mask_of(rows, artifact.n_rows)
    weights = single_subset(SUBSET, selected_N).weights
    changes, change_notes = objective.evaluate(SUBSET, weights, "the whole corpus")
    sums = objective.predictor.sums(weights)
    n_tokens, value = int(objective.tokens_N[rows].sum()), float(objective.value(sums)[0])
    table = _row_table(objective, chosen.best, selected_N, by)
    headline = chosen.headline(table, n_tokens)
    value_notes = list[str]()
    if tokens is not None:
        (factor,) = sums.repetition_factor(objective.budget_predictor.exposure)
        headline += f"; in {tokens:,.0f} training tokens each is seen {tokens / n_tokens:.2g} times"
        value_notes.append(
            f"value {value:+z.3f}: the change, less what repetition takes: it leaves "
            f"{float(factor):.0%} of what as many new rows would do"
        )
    few = [] if amount is None else _few_rows(amount, artifact.n_rows)
    choice_notes = _notes(objective, chosen, by, whole=documents is not None)
    notes = (*excluded_notes, *chosen.notes, *few, *chosen.best.notes, *choice_notes, *value_notes, *change_notes)
    best = chosen.best
    return Selection(
        table,
        f"keeps {headline}",
        notes,
        **objective.result_fields(changes, value, params),
        curve=_curve_of(objective, chosen),
        labels=None if labels is None else _label_table(limits, chosen.picked_P),
        bound=best.bound,
        guarantee=best.guarantee if best.bound is None else f"upper bound {best.bound:+.3f}: {best.guarantee}",
        row_index=rows,
        n_tokens=n_tokens,
        effect_N=objective.effect_N,
    )


# ----------------------------------------------------------------------------------------- what there is to choose from


def _allowed(
    artifact: ArtifactReader,
    targets: Mapping[str, float],
    exclude: Path | str | Sequence[str] | None,
    exclude_where: str | None,
    *,
    drop_leaks: bool,
) -> tuple[Bool, list[str]]:
    """Return which rows may be chosen, (N,), and a note for each way in which rows were excluded."""
    allowed_N, notes = np.ones(artifact.n_rows, dtype=np.bool_), list[str]()
    if exclude is not None:
        listed_N, note = load_exclusions(artifact, exclude)
        allowed_N &= ~listed_N
        notes.append(note)
    if exclude_where is not None:
        matching = LabelTable(artifact.rows_path).matching(exclude_where)
        allowed_N &= ~matching.mask_N
        unlabelled = f"; {matching.n_null:,} rows have no label there and stay" if matching.n_null else ""
        notes.append(f"{exclude_where}: excludes {int(matching.mask_N.sum()):,} rows{unlabelled}")
    if not drop_leaks:
        return allowed_N, [*notes, *leak_notes(artifact, targets)]
    leaked = leaked_rows(artifact, targets)
    allowed_N[leaked] = False
    return allowed_N, [*notes, f"leaks: excludes {len(leaked):,} rows that contain questions of {', '.join(targets)}"]


def _refuse_no_budget(rule: ScoringProtocol, tokens: float | None, allowed_N: Bool) -> None:
    """Refuse a question without a budget if none can be proposed."""
    if tokens is None:
        raise SettingsError("budget: got none; give one, e.g. 20%, or train_tokens, e.g. 100B, and it is proposed")
    if rule.interaction is Interaction.PAIRS:
        raise SettingsError(
            "budget: got none; with geometry every budget is a search of its own, so none is proposed: give one, e.g. "
            "20%, or take the geometry away with diversity 0"
        )
    if not allowed_N.any():
        raise SettingsError("exclude: leaves no row; exclude fewer")


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was chosen: items are rows, or whole documents, each worth the mean effect of its rows."""

    limits: Constraints
    effect_M: F64
    document_N: I64 | None  # None: items are rows
    best: SelectedRows
    picked_P: I64  # items
    order_N: I64  # the chosen rows, then those that come next
    notes: tuple[str, ...]

    @property
    def items(self) -> str:
        return "rows" if self.document_N is None else "documents"

    def headline(self, table: pa.Table, n_tokens: int) -> str:
        """Return how many rows, documents and tokens are kept, and whether the budget is used up."""
        limits, used = self.limits, int(self.limits.cost_N[self.picked_P].sum())
        n_rows = len(limits.cost_N) if self.document_N is None else len(self.document_N)
        text = f"{share(len(self.best.row_index), n_rows)}, {n_tokens:,} tokens"
        if self.document_N is not None:
            text = f"{len(table['doc_id'].unique()):,} documents: {text}"
        if used < (1 - MISSED) * limits.budget:
            text += f"; only {used:,} of the {limits.budget:,} {limits.unit} that were asked for"
        return text


def _choose(
    objective: SelectionObjective,
    amount: Amount | None,
    allowed_N: Bool,
    labels: LabelColumn | None,
    floors: Bounds,
    caps: Bounds,
    *,
    whole: bool,
    progress: Progress | None,
) -> _Chosen:
    """Choose the best items within the budget, or within the best budget if none is given.

    Args:
        whole: documents are taken whole or not at all.
    """
    rule = objective.predictor.protocol
    # what runs lead to expect is of means over the retained rows
    by_runs = (
        objective.run_model is not None and objective.train_tokens is None and rule.interaction is Interaction.NONE
    )
    if objective.cautious and not by_runs:
        raise SettingsError(
            f"cautious: protocol {rule.name} has geometry, or counts rows, and then rows are chosen by relevance; "
            "take another protocol, or leave it out"
        )
    effect_M, allowed_M, labels_M, document_N = objective.effect_N, allowed_N, labels, None
    tokens_M, rows_M = objective.tokens_N, None
    if amount is not None and (amount.unit == "documents" or whole):
        if rule.interaction is Interaction.PAIRS:
            raise SettingsError("budget: documents are chosen without geometry; give rows or tokens, or diversity 0")
        document_N = row_documents(objective.artifact)
        effect_M = _mean_by(document_N, objective.effect_N)
        allowed_M = np.bincount(document_N, ~allowed_N) == 0
        rows_M = np.bincount(document_N)
        tokens_M = np.bincount(document_N, objective.tokens_N).astype(np.int64)
        if labels is not None:
            _, first_M = np.unique(document_N, return_index=True)
            labels_M = replace(labels, codes_N=labels.codes_N[first_M])
    limits_of = partial(
        Constraints.from_budget,
        allowed_N=allowed_M,
        tokens_N=tokens_M,
        rows_N=rows_M,
        labels=labels_M,
        floors=floors,
        caps=caps,
    )
    notes: tuple[str, ...] = ()
    if amount is None:
        amount = Amount(_best_budget(objective, allowed_N, limits_of if floors or caps else None), False)
        notes = (f"no budget was given: {amount.value:,.0f} rows have the highest value for the training budget",)
    limits = limits_of(amount)
    if rule.interaction is Interaction.PAIRS:
        if progress is not None:
            progress.stage("selecting", rows=None, tokens=None)
        best = geometry().select_rows(objective.predictor, objective.weights_T, limits, progress)
        order_N = picked_P = best.row_index
    else:
        best, picked_P, order_N = _ranked(objective, effect_M, document_N, limits, by_runs=by_runs)
    return _Chosen(limits, effect_M, document_N, best, picked_P, order_N, notes)


def _curve_of(objective: SelectionObjective, chosen: _Chosen) -> Curve:
    """Return what the beginnings of a choice are worth, at PLACES lengths and at its own."""
    order_N, effect_M = chosen.order_N, chosen.effect_M
    even = np.unique(np.round(np.linspace(0, len(order_N), PLACES + 1)[1:]).astype(np.int64))
    ordered_by_N = effect_M if chosen.document_N is None else effect_M[chosen.document_N]
    return _curve(objective, order_N, sorted({*even.tolist(), len(chosen.best.row_index)} - {0}), ordered_by_N)


# ------------------------------------------------------------------------------------------------- which rows


def _row_table(objective: SelectionObjective, best: SelectedRows, selected_N: Bool, by: str | None) -> pa.Table:
    """subset_id, row_id, doc_id, order, effect[, gain], n_tokens[, label] of the best rows; all rows stream past."""
    start, parts = 0, list[pa.RecordBatch]()
    for batch in objective.artifact.row_batches(["row_id", "doc_id", "n_tokens", *([by] if by else [])]):
        parts.append(batch.filter(pa.array(selected_N[start : start + batch.num_rows])))
        start += batch.num_rows
    rows = best.row_index
    position = np.argsort(np.argsort(rows))  # in corpus order -> in the order taken
    table = pa.Table.from_batches(parts).take(pa.array(position)).combine_chunks()
    if best.gain is not None:
        table = table.add_column(2, "gain", pa.array(best.gain))
    table = table.add_column(2, "effect", pa.array(objective.effect_N[rows]))
    table = table.add_column(2, "order", pa.array(np.arange(len(table))))
    return table.add_column(0, "subset_id", pa.array([SUBSET] * len(table), pa.string()))


def _mean_by(document_N: I64, value_N: F64) -> F64:
    return np.asarray(np.bincount(document_N, value_N) / np.bincount(document_N), np.float64)


def _ranked(
    objective: SelectionObjective, effect_M: F64, document_N: I64 | None, limits: Constraints, *, by_runs: bool
) -> tuple[SelectedRows, I64, I64]:
    """The best rows within the limits, which rows or documents were picked, and these rows with those that come next.

    More follow where no more is asked of them than to be good.
    """
    worth_M = effect_M
    guarantee = OPTIMAL if document_N is None else "whole documents, by the mean effect of their rows"
    if document_N is not None and limits.costs_differ:
        guarantee += ", until no other one fits"
    if limits.unit == "tokens" and document_N is None:
        worth_M = objective.predictor.ranking_effects(worth_M, objective.weights_T, limits.cost_N)
    if by_runs:
        worth_M, guarantee = _worth_by_runs(objective, document_N, limits, worth_M)
    order_P = ranked(worth_M, among_N=limits.allowed_N)
    picked_P = take_within_budget(order_P, limits)
    if limits.unit == "tokens" and document_N is None and not by_runs:
        guarantee = token_guarantee(worth_M, picked_P, limits, alike=worth_M is effect_M)
    next_P = order_P[~mask_of(picked_P, len(worth_M))[order_P]]
    order_P = picked_P if limits.has_label_limits else np.concatenate([picked_P, next_P])
    if document_N is None:
        return SelectedRows(picked_P, guarantee), picked_P, order_P
    place_M = np.full(len(worth_M), len(order_P))
    place_M[order_P] = np.arange(len(order_P))
    place_N = place_M[document_N]
    order_N = np.argsort(place_N, kind="stable")[: int((place_N < len(order_P)).sum())]
    return SelectedRows(order_N[: int((place_N < len(picked_P)).sum())], guarantee), picked_P, order_N


def token_guarantee(worth_N: F64, picked_P: I64, limits: Constraints, *, alike: bool) -> str:
    """What a token of the choice is worth, and what it could be at most if the last row were cut to fit.

    The rows by their worth, as far as the tokens go, have the highest mean worth of a token: a knapsack whose items
    may be cut. A short row counts as its tokens.
    """
    text = "rows by what a token of them is worth, as far as the tokens go"
    text += "; the change counts rows alike, long or short" if alike else ""
    if limits.has_label_limits:
        return f"{text}; within floors and caps"
    used = int(limits.cost_N[picked_P].sum())
    order_N = ranked(worth_N, among_N=limits.allowed_N)
    cost_N = limits.cost_N[order_N]
    whole_N = np.clip(used - (np.cumsum(cost_N) - cost_N), 0, cost_N)
    mean = float(limits.cost_N[picked_P] @ worth_N[picked_P]) / used
    most = float(whole_N @ worth_N[order_N]) / used
    return f"{text}: {signed(mean)} a token, and no choice of as many tokens has more than {signed(most)}"


def _worth_by_runs(
    objective: SelectionObjective, document_N: I64 | None, limits: Constraints, worth_M: F64
) -> tuple[F64, str]:
    """What rows, or documents, are ranked by where runs say what subsets bring, and how much that gains.

    Uphill from the best by relevance: those rows are best next whose taking in makes the value rise fastest, and on the
    way to them some are swapped.
    """
    assert objective.run_model is not None

    def subset_weights(mask_BM: Bool) -> Weights:
        mask_BN = mask_BM if document_N is None else mask_BM[:, document_N]
        at = np.nonzero(mask_BN)
        return Weights(csr_array((np.ones(len(at[0])), at), shape=(len(mask_BN), objective.artifact.n_rows)))

    def masks(by_BM: F64) -> Bool:
        return np.stack(
            [mask_of(take_within_budget(ranked(by_M, among_N=limits.allowed_N), limits), len(by_M)) for by_M in by_BM]
        )

    best_M, selected_1M = worth_M, masks(worth_M[None])
    by_relevance = by_runs = float(objective.predicted_by_runs(subset_weights(selected_1M))[0])
    for _ in range(ROUNDS):
        rise_M = objective.run_model.rise(subset_weights(selected_1M), objective.weights_T, cautious=objective.cautious)
        if document_N is not None:
            rise_M = _mean_by(document_N, rise_M)
        selected_M, corner_M = selected_1M[0], masks(rise_M[None])[0]
        leaving, coming = np.sort(rise_M[selected_M & ~corner_M]), -np.sort(-rise_M[corner_M & ~selected_M])
        n = min(len(leaving), len(coming))
        gain_n = coming[:n] - leaving[:n]  # of each swap towards the corner, best first
        # so much kept rows have to their credit that all, half, ... of the swaps are made
        credit_B = [0.0, *(max(float(gain_n[k]), 0.0) for k in sorted({int(n * part) for part in PARTS}) if k)]
        by_BM = rise_M + np.array(credit_B)[:, None] * selected_1M
        mask_BM = masks(by_BM)
        value_B = objective.predicted_by_runs(subset_weights(mask_BM))
        k = int(np.argmax(value_B))
        if value_B[k] - by_runs <= SLOW * (by_runs - by_relevance):
            break
        best_M, selected_1M, by_runs = by_BM[k], mask_BM[[k]], float(value_B[k])
    end = "lower end of the change" if objective.cautious else "change"
    return best_M, (
        f"rows are ranked by the {end} that the runs predict, {by_runs:+.4f} {objective.run_model.unit}; the best rows "
        f"by relevance alone have {by_relevance:+.4f}"
    )


def _curve(objective: SelectionObjective, order_N: I64, places: Sequence[int], effect_N: F64) -> Curve:
    """The beginnings of a choice that have so many rows; `places` ascend, `effect_N` is what rows are ordered by."""
    cuts = np.concatenate([[0], places])
    parts = [np.sort(order_N[a:b]) for a, b in itertools.pairwise(cuts)]
    indices = np.concatenate(parts)
    rows_BN = csr_array((np.ones(len(indices)), indices, cuts), shape=(len(parts), objective.predictor.n_rows))
    sums = objective.predictor.sums(Weights(rows_BN)).cumulative()
    tokens_B = np.cumsum([int(objective.tokens_N[part].sum()) for part in parts])
    last_B = effect_N[order_N[np.asarray(places) - 1]]
    columns = (np.asarray(places), tokens_B, last_B, objective.value(sums))
    return Curve(*(tuple(column.tolist()) for column in columns))


def _best_budget(
    objective: SelectionObjective, allowed_N: Bool, limits_of: Callable[[Amount], Constraints] | None
) -> int:
    """Rows with the highest value for the training budget, within floors and caps if there are any.

    It is looked for on a grid, then between neighbours: to single rows, or within caps to 0.5 %.

    Raises:
        SettingsError: no budget meets the floors and caps.
    """
    order_P = ranked(objective.effect_N, among_N=allowed_N)
    refused: list[SettingsError] = []

    def value(size: int, limits_of: Callable[[Amount], Constraints]) -> float:
        try:
            rows = take_within_budget(order_P, limits_of(Amount(float(size), False)))
        except SettingsError as err:
            refused.append(err)
            return -np.inf
        weights = single_subset(SUBSET, mask_of(rows, objective.artifact.n_rows)).weights
        return float(objective.value(objective.predictor.sums(weights))[0])

    at_once, near = (SEARCHED, 0.0) if limits_of is None else (16, 0.005)
    places = np.unique(np.geomspace(1, len(order_P), at_once).round().astype(np.int64))
    while True:
        if limits_of is None:
            values: Sequence[float] = _curve(objective, order_P, places.tolist(), objective.effect_N).value
        else:
            values = [value(size, limits_of) for size in places.tolist()]
        at = int(np.argmax(values))
        low, high = int(places[max(at - 1, 0)]), int(places[min(at + 1, len(places) - 1)])
        if len(places) == places[-1] - places[0] + 1 or high - low <= near * places[at]:
            break
        places = np.unique(np.linspace(low, high, at_once).round().astype(np.int64))
    if values[at] == -np.inf:
        raise refused[-1]
    return int(places[at])


# ------------------------------------------------------------------------------------------- notes


def _few_rows(amount: Amount, n_rows: int) -> list[str]:
    """Return a line for a budget such as 20 that may be meant as a share, where so many rows are a tiny part."""
    if amount.is_share or amount.unit is not None or amount.value > min(LARGEST_SHARE, FEW * n_rows):
        return []
    number = f"{amount.value:g}"
    return [f"budget: {number} is a number of rows, {amount.value / n_rows:.2%} of the corpus; a share is {number}%"]


def _notes(objective: SelectionObjective, chosen: _Chosen, by: str | None, *, whole: bool) -> list[str]:
    """What there was to choose from, what goes, how far what stays can be trusted, and what of the corpus is in no row.

    Args:
        whole: documents will be written whole, so it is not worth a word which of them rows cut.
    """
    artifact, limits, items, rows = objective.artifact, chosen.limits, chosen.items, chosen.best.row_index
    above = int((chosen.effect_M[limits.allowed_N] > 0).sum())
    messages = [
        f"{above:,} of the {int(limits.allowed_N.sum()):,} {items} that may be taken are above the corpus average"
    ]
    if (used := int(limits.cost_N[chosen.picked_P].sum())) < limits.budget:
        why = f"no other {items[:-1]} fits" if limits.costs_differ else "the caps leave no more"
        messages.append(f"{used:,} of {limits.budget:,} {limits.unit} were taken: {why}")

    gone_N = ~mask_of(rows, artifact.n_rows)
    if gone_N.any():
        mean = float(objective.effect_N[gone_N].mean())
        line = f"left out: {share(int(gone_N.sum()), len(gone_N))}, their mean effect {mean:+.3f}"
        for label in [by] if by else suggest_labels(artifact)[:1]:
            column = label_column(artifact, label)
            gone_G, names = np.bincount(column.codes_N, gone_N, len(column.values)), column.names()
            # values that lose more than the corpus does, beyond what as many rows drawn at random would
            overall = float(gone_N.mean())
            error_G = np.sqrt(overall * (1 - overall) / np.maximum(column.counts, 1))
            rate_G = gone_G / np.maximum(column.counts, 1)
            excess_G = np.where(column.counts >= LARGE_SHARE * len(gone_N), (rate_G - overall) / (error_G + 1e-12), 0.0)
            worst = [g for g in np.lexsort((-gone_G, -rate_G)).tolist() if excess_G[g] > ERRORS][:VALUES_NAMED]
            shares = ", ".join(f"{names[g]} ({gone_G[g]:,.0f} of {column.counts[g]:,})" for g in worst)
            line += f"; of {label} above all {shares}" * bool(shares)
        messages.append(line)
    if (short := short_rows(artifact, rows)) > SHORT_SHARE * len(rows):
        length = length_column(artifact)
        messages.append(
            f"{short:,} of the rows taken have fewer than {SHORT} {short_of(length)}, and their relevance is noisy: "
            f'--exclude-where "{length} < {SHORT}" leaves such rows out'
        )

    if not whole:
        document_N = row_documents(artifact)
        selected_D, of_D = np.bincount(document_N[rows], minlength=int(document_N.max()) + 1), np.bincount(document_N)
        if cut := int(((selected_D > 0) & (selected_D < of_D)).sum()):
            messages.append(
                f"rows are pieces of documents: {cut:,} of {len(of_D):,} documents are kept in part; a budget such as "
                "20%documents takes whole ones, and --export with --documents half writes whole ones"
            )
    counts = artifact.manifest.skipped.get("rows", {}).get("counts", {})
    if counts := {reason: count for reason, count in counts.items() if not (whole and reason in ENDS)}:
        messages.append(f"not considered, because no row contains them: {skipped_text(counts)}")
    return messages


def _label_table(limits: Constraints, picked_P: I64) -> pa.Table:
    """One line a value of the label: taken, pool, floor and cap."""
    selected_G, pool_G = (
        np.bincount(limits.codes_N[rows], limits.cost_N[rows], len(limits.values)).astype(np.int64)
        for rows in (picked_P, limits.allowed_N)
    )
    return pa.table(
        {
            "value": pa.array(limits.values, pa.string()),
            "taken": selected_G,
            "pool": pool_G,
            "floor": pa.array([int(floor) or None for floor in limits.floor_G], pa.int64()),
            "cap": pa.array([int(cap) if cap < limits.budget else None for cap in limits.cap_G], pa.int64()),
        }
    )
