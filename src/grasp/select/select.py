"""Select the rows that maximise the predicted change of the targets within a budget. Start with `select`.

`SelectionObjective` computes the effect of every row, `ranked` sorts the rows once, `take_within_budget` selects them
subject to the constraints, and `Selection.export` writes them. If the objective is not additive over rows,
`grasp.geometry` selects them.
Shape letters: N rows, M items (rows or documents), P items in ranked order, T targets, G label values, D documents.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from grasp.api.predict import share
from grasp.arrays import F64, I64, Bool
from grasp.artifact.label_table import LabelColumn, LabelTable
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
    suggest_labels,
)
from grasp.errors import SettingsError
from grasp.predict.scoring_rule import Interaction, ScoringProtocol, geometry
from grasp.predict.weights import Weights, mask_of, single_subset
from grasp.progress import Progress
from grasp.select.budget import (
    OPTIMAL_NOTE,
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
from grasp.select.export import parse_rule
from grasp.select.objective import SelectionObjective, resolve_rule, weighted_targets
from grasp.select.selection import Curve, Selection
from grasp.text import several, signed, skipped_text

if TYPE_CHECKING:
    from grasp.runs.retrained import TrainingRuns
    from grasp.runs.table import RunTable

SUBSET = "selection"
PARTIAL_REASONS = ("short_end", "cut", "cut_begin")  # reasons for skipping the beginning or the end of a document
SHORT_SHARE = 0.01  # share of short rows above which a note is added
# Label values that lose more rows than the corpus does: maximum number that are named, their minimum share of the rows,
# and the number of standard errors by which their loss must exceed that of the corpus.
MAX_VALUES_NAMED, MIN_VALUE_SHARE, MIN_STANDARD_ERRORS = 3, 0.01, 2.0
MIN_CURVE_STEP = 0.002  # share of the rows; points nearer to the selected size would repeat it
CURVE_POINTS = 50  # points of the curve of value against budget
BUDGETS_PER_ROUND = 200  # budgets per round of the search for the optimal budget
SWAP_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # step sizes of the line search: shares of the possible swaps
MAX_ASCENT_STEPS = 20  # maximum number of ascent steps
UNUSED_SHARE = 0.02  # share of a budget above which an unused remainder is mentioned in the headline
# A bare number up to this share of the corpus, and at most 100, may have been meant as a percentage.
AMBIGUOUS_SHARE, MAX_PERCENTAGE = 0.01, 100
MIN_RELATIVE_GAIN = 0.01  # stop the ascent if a step gains less than this part of the gain so far


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
        artifact: artifact of the corpus.
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
        parse_rule(documents)
    targets = weighted_targets(target, artifact.targets)
    rule = resolve_rule(artifact, protocol, diversity)
    if documents == "all" and rule.interaction is Interaction.PAIRS:
        raise SettingsError(
            "documents: all cannot be combined with geometry, which selects single rows; pass any or half, or "
            "diversity 0"
        )
    allowed_N, excluded_notes = _allowed_rows(artifact, targets, exclude, exclude_where, drop_leaks=drop_leaks)
    labels = None if by is None else label_column(artifact, by, "by")
    by = None if labels is None else labels.name  # as it is spelled in the corpus
    tokens = None if train_tokens is None else parse_tokens(train_tokens)
    floors, caps = parse_bounds(floor, "floor"), parse_bounds(cap, "cap")
    amount = None if budget is None else parse_budget(budget)
    if amount is None:
        _check_budget_is_optional(rule, tokens, allowed_N)
    objective = SelectionObjective.from_artifact(artifact, rule, targets, tokens, runs, cautious=cautious)
    items = _select_items(
        objective, amount, allowed_N, labels, floors, caps, whole=documents == "all", progress=progress
    )
    params = {
        "budget": budget,
        "targets": dict(targets),
        "train_tokens": tokens,
        "by": by,
        "unit": items.constraints.unit,
        "items": items.kind,
        "floor": list(several(floor)),
        "cap": list(several(cap)),
        "exclude_where": exclude_where,
        "drop_leaks": drop_leaks,
        "excluded_rows": int((~allowed_N).sum()),
    } | ({"cautious": True} if cautious else {})
    notes = [*excluded_notes, *items.notes]
    notes += [] if amount is None else _percentage_note(amount, artifact.n_rows)
    notes += [labels.note] if labels is not None and labels.note else []
    return _build_selection(objective, items, labels, params, notes, whole=documents is not None)


def _build_selection(
    objective: SelectionObjective,
    items: "_SelectedItems",
    labels: LabelColumn | None,
    params: Mapping[str, Any],
    notes: Sequence[str],
    *,
    whole: bool,
) -> Selection:
    """Predict the change of the selected items, and return the result with its tables and notes.

    Args:
        objective: objective of the selection.
        items: selected rows or documents.
        labels: label that floors and caps refer to.
        params: arguments of the call.
        notes: notes on candidates and budget.
        whole: documents are exported whole.
    """
    artifact, tokens, selected = objective.artifact, objective.train_tokens, items.selected
    rows = selected.row_index
    selected_N = mask_of(rows, artifact.n_rows)
    weights = single_subset(SUBSET, selected_N).weights
    changes, change_notes = objective.evaluate(SUBSET, weights, "the whole corpus")
    sums = objective.predictor.sums(weights)
    n_tokens, value = int(objective.tokens_N[rows].sum()), float(objective.value(sums)[0])
    table = _row_table(objective, selected, selected_N, labels)
    headline = items.headline(table, n_tokens)
    value_notes: list[str] = []
    if tokens is not None:
        (factor,) = sums.repetition_factor(objective.budget_predictor.repetition_law)
        headline += f"; {tokens / n_tokens:.2g} epochs in {tokens:,.0f} training tokens"
        value_notes.append(
            f"value {value:+z.3f}: the change including repetition, which has {float(factor):.0%} of the effect of as "
            "many new rows"
        )
    choice_notes = _choice_notes(objective, items, None if labels is None else labels.name, whole=whole)
    bound, guarantee = selected.bound, selected.guarantee
    return Selection(
        table,
        f"keeps {headline}",
        (*notes, *selected.notes, *choice_notes, *value_notes, *change_notes),
        **objective.result_fields(changes, value, params),
        curve=_curve_of(objective, items),
        labels=None if labels is None else _label_table(items.constraints, items.item_index_P),
        bound=bound,
        guarantee=guarantee if bound is None else f"upper bound {bound:+.3f}: {guarantee}",
        row_index=rows,
        n_tokens=n_tokens,
        effect_N=objective.effect_N,
    )


# -------------------------------------------------------------------------------------------------- candidates


def _allowed_rows(
    artifact: ArtifactReader,
    targets: Mapping[str, float],
    exclude: Path | str | Sequence[str] | None,
    exclude_where: str | None,
    *,
    drop_leaks: bool,
) -> tuple[Bool, list[str]]:
    """Return which rows may be selected, (N,), and a note for each kind of exclusion."""
    allowed_N = np.ones(artifact.n_rows, dtype=np.bool_)
    notes: list[str] = []
    if exclude is not None:
        listed_N, note = load_exclusions(artifact, exclude)
        allowed_N &= ~listed_N
        notes.append(note)
    if exclude_where is not None:
        matching = LabelTable(artifact.rows_path).matching(exclude_where)
        allowed_N &= ~matching.mask_N
        unlabelled = f"; {matching.n_null:,} rows without a value are kept" if matching.n_null else ""
        notes.append(f"{exclude_where}: excludes {int(matching.mask_N.sum()):,} rows{unlabelled}")
    if not drop_leaks:
        return allowed_N, [*notes, *leak_notes(artifact, targets)]
    leaked = leaked_rows(artifact, targets)
    allowed_N[leaked] = False
    return allowed_N, [*notes, f"leaks: excludes {len(leaked):,} rows that contain questions of {', '.join(targets)}"]


def _check_budget_is_optional(rule: ScoringProtocol, tokens: float | None, allowed_N: Bool) -> None:
    """Check that the optimal budget can be computed.

    Raises:
        SettingsError: there is no training budget, the protocol has geometry, or no row may be selected.
    """
    if tokens is None:
        raise SettingsError("budget: missing; pass one such as 20%, or train_tokens such as 100B to compute one")
    if rule.interaction is Interaction.PAIRS:
        raise SettingsError(
            "budget: missing; it cannot be computed with geometry, because every budget needs its own search; pass one "
            "such as 20%, or diversity 0"
        )
    if not allowed_N.any():
        raise SettingsError(f"exclude: no candidates left; all {len(allowed_N):,} rows are excluded")


@dataclass(frozen=True, slots=True)
class _SelectedItems:
    """Selected items, which are rows or whole documents.

    Attributes:
        effect_M: effect of each item; that of a document is the mean over its rows.
        document_N: document of each row; None: items are rows.
        selected: the selected rows.
        item_index_P: indices of the selected items, best first.
        order_N: the selected rows, followed by those that a larger budget would add.
        notes: notes on the budget.
    """

    constraints: Constraints
    effect_M: F64
    document_N: I64 | None
    selected: SelectedRows
    item_index_P: I64
    order_N: I64
    notes: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Return what the items are: rows or documents."""
        return "rows" if self.document_N is None else "documents"

    def headline(self, table: pa.Table, n_tokens: int) -> str:
        """Return how many rows, documents and tokens are selected, and whether the budget is used up."""
        constraints, used = self.constraints, int(self.constraints.cost_N[self.item_index_P].sum())
        n_rows = len(constraints.cost_N) if self.document_N is None else len(self.document_N)
        text = f"{share(len(self.selected.row_index), n_rows)}, {n_tokens:,} tokens"
        if self.document_N is not None:
            text = f"{len(table['doc_id'].unique()):,} documents: {text}"
        if used < (1 - UNUSED_SHARE) * constraints.budget:
            text += f"; only {used:,} of the requested {constraints.budget:,} {constraints.unit}"
        return text


def _select_items(
    objective: SelectionObjective,
    amount: Amount | None,
    allowed_N: Bool,
    labels: LabelColumn | None,
    floors: Bounds,
    caps: Bounds,
    *,
    whole: bool,
    progress: Progress | None,
) -> _SelectedItems:
    """Select the best items within the budget, or within the optimal budget if none is given.

    Args:
        objective: objective of the selection.
        amount: budget; None: the optimum for the training budget.
        allowed_N: rows that may be selected.
        labels: label that floors and caps refer to.
        floors: minimum amount of each label value.
        caps: maximum amount of each label value.
        whole: items are whole documents.
        progress: receives stages and numbers of rows.
    Raises:
        SettingsError: the budget cannot be met, or options contradict each other.
    """
    rule = objective.predictor.protocol
    # The model fitted to runs is a function of means over the selected rows, so it says nothing of repetition.
    by_runs = (
        objective.run_model is not None and objective.train_tokens is None and rule.interaction is Interaction.NONE
    )
    if objective.cautious and not by_runs:
        raise SettingsError(
            f"cautious: requires an additive protocol of means over rows; {rule.name} has geometry or uses sums. Pass "
            "another protocol, or drop cautious"
        )
    effect_M, allowed_M, labels_M, document_N = objective.effect_N, allowed_N, labels, None
    tokens_M, rows_M = objective.tokens_N, None
    if amount is not None and (amount.unit == "documents" or whole):
        if rule.interaction is Interaction.PAIRS:
            raise SettingsError(
                "budget: documents cannot be selected with geometry; pass a budget in rows or tokens, or diversity 0"
            )
        document_N = row_documents(objective.artifact)
        effect_M = _mean_by(document_N, objective.effect_N)
        allowed_M = np.bincount(document_N, ~allowed_N) == 0
        rows_M = np.bincount(document_N)
        tokens_M = np.bincount(document_N, objective.tokens_N).astype(np.int64)
        if labels is not None:
            _, first_M = np.unique(document_N, return_index=True)
            labels_M = replace(labels, codes_N=labels.codes_N[first_M])
    build_constraints = partial(
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
        amount = Amount(_best_budget(objective, allowed_N, build_constraints if floors or caps else None), False)
        notes = (f"budget: {amount.value:,.0f} rows, the optimum for the training budget",)
    constraints = build_constraints(amount)
    if rule.interaction is Interaction.PAIRS:
        if progress is not None:
            progress.stage("selecting", rows=None, tokens=None)
        selected = geometry().select_rows(objective.predictor, objective.weights_T, constraints, progress)
        order_N = item_index_P = selected.row_index
    else:
        selected, item_index_P, order_N = _select_by_rank(objective, effect_M, document_N, constraints, by_runs=by_runs)
    return _SelectedItems(constraints, effect_M, document_N, selected, item_index_P, order_N, notes)


def _curve_of(objective: SelectionObjective, selected: _SelectedItems) -> Curve:
    """Return the value of selections of CURVE_POINTS sizes, and of the selected size."""
    order_N, effect_M = selected.order_N, selected.effect_M
    n_selected = len(selected.selected.row_index)
    even = np.unique(np.round(np.linspace(0, len(order_N), CURVE_POINTS + 1)[1:]).astype(np.int64))
    even = even[(np.abs(even - n_selected) > MIN_CURVE_STEP * len(order_N)) | (even == len(order_N))]
    ordered_by_N = effect_M if selected.document_N is None else effect_M[selected.document_N]
    return _curve(objective, order_N, sorted({*even.tolist(), n_selected} - {0}), ordered_by_N)


# --------------------------------------------------------------------------------------------------- selection


def _row_table(
    objective: SelectionObjective, selected: SelectedRows, selected_N: Bool, labels: LabelColumn | None
) -> pa.Table:
    """Return subset_id, row_id, doc_id, order, effect[, gain], n_tokens[, label] of the selected rows, best first.

    The artifact is read in batches; only the selected rows are held in memory.
    """
    stored = [] if labels is None or labels.sql else [labels.name]
    start, parts = 0, list[pa.RecordBatch]()
    for batch in objective.artifact.row_batches(["row_id", "doc_id", "n_tokens", *stored]):
        parts.append(batch.filter(pa.array(selected_N[start : start + batch.num_rows])))
        start += batch.num_rows
    rows = selected.row_index
    position = np.argsort(np.argsort(rows))  # place in corpus order of each selected row, best first
    table = pa.Table.from_batches(parts).take(pa.array(position)).combine_chunks()
    if labels is not None and labels.sql:
        codes = pa.array(labels.codes_N[rows])
        table = table.append_column(labels.name, pa.array(labels.values).take(codes))
    if selected.gain is not None:
        table = table.add_column(2, "gain", pa.array(selected.gain))
    table = table.add_column(2, "effect", pa.array(objective.effect_N[rows]))
    table = table.add_column(2, "order", pa.array(np.arange(len(table))))
    return table.add_column(0, "subset_id", pa.array([SUBSET] * len(table), pa.string()))


def _mean_by(document_N: I64, value_N: F64) -> F64:
    """Return the mean of a value over the rows of each document."""
    return np.asarray(np.bincount(document_N, value_N) / np.bincount(document_N), np.float64)


def _select_by_rank(
    objective: SelectionObjective, effect_M: F64, document_N: I64 | None, constraints: Constraints, *, by_runs: bool
) -> tuple[SelectedRows, I64, I64]:
    """Select the best items by rank, subject to the constraints.

    Returns:
        The selected rows; the selected items; and the selected rows followed by those that a larger budget would add
        (none with floors or caps, because a larger budget would change the earlier ones).
    """
    score_M = effect_M
    guarantee = OPTIMAL_NOTE if document_N is None else "whole documents, by the mean effect of their rows"
    if document_N is not None and constraints.costs_differ:
        guarantee += ", until no further one fits"
    if constraints.unit == "tokens" and document_N is None:
        score_M = objective.predictor.ranking_effects(score_M, objective.weights_T, constraints.cost_N)
    if by_runs:
        score_M, guarantee = _scores_by_runs(objective, document_N, constraints, score_M)
    order_P = ranked(score_M, among_N=constraints.allowed_N)
    selected_P = take_within_budget(order_P, constraints)
    if constraints.unit == "tokens" and document_N is None and not by_runs:
        guarantee = token_guarantee(score_M, selected_P, constraints, by_effect=score_M is effect_M)
    next_P = order_P[~mask_of(selected_P, len(score_M))[order_P]]
    order_P = selected_P if constraints.has_label_constraints else np.concatenate([selected_P, next_P])
    if document_N is None:
        return SelectedRows(selected_P, guarantee), selected_P, order_P
    rank_M = np.full(len(score_M), len(order_P))
    rank_M[order_P] = np.arange(len(order_P))
    rank_N = rank_M[document_N]
    order_N = np.argsort(rank_N, kind="stable")[: int((rank_N < len(order_P)).sum())]
    return SelectedRows(order_N[: int((rank_N < len(selected_P)).sum())], guarantee), selected_P, order_N


def token_guarantee(score_N: F64, selected_P: I64, constraints: Constraints, *, by_effect: bool) -> str:
    """Return the mean effect per token of a selection, and its upper bound for as many tokens.

    The bound is the fractional knapsack: rows sorted by effect per token, the last one cut to fit, have the highest
    mean effect per token.

    Args:
        score_N: effect per token of each row.
        by_effect: rows are ranked by their effect, because the predicted change weighs all rows alike.
    """
    text = "greedy by effect per token until no row fits the remaining tokens"
    text += "; the predicted change weighs all rows alike, whatever their length" if by_effect else ""
    if constraints.has_label_constraints:
        return f"{text}; within floors and caps"
    used = int(constraints.cost_N[selected_P].sum())
    order_N = ranked(score_N, among_N=constraints.allowed_N)
    cost_N = constraints.cost_N[order_N]
    used_N = np.clip(used - (np.cumsum(cost_N) - cost_N), 0, cost_N)  # tokens of each row that fit; the last is cut
    mean = float(constraints.cost_N[selected_P] @ score_N[selected_P]) / used
    bound = float(used_N @ score_N[order_N]) / used
    return f"{text}: {signed(mean)} per token; at most {signed(bound)} for any selection of as many tokens"


def _scores_by_runs(
    objective: SelectionObjective, document_N: I64 | None, constraints: Constraints, score_M: F64
) -> tuple[F64, str]:
    """Score items by the change that a model fitted to runs predicts, and describe the gain over relevance.

    The predicted change is not additive over rows, so this is a local search that starts from the best items by
    relevance (Frank and Wolfe). Each step linearises the objective at the current selection, takes the best items of
    the linearisation as a corner, and searches along the line to it, i.e. for the number of swaps to make.

    Returns:
        Score of each item, (M,), to rank them by, and a statement for the output.
    """
    assert objective.run_model is not None

    def subset_weights(mask_BM: Bool) -> Weights:
        """Return the selected items as subsets of rows."""
        mask_BN = mask_BM if document_N is None else mask_BM[:, document_N]
        indices = np.nonzero(mask_BN)
        return Weights(csr_array((np.ones(len(indices[0])), indices), shape=(len(mask_BN), objective.artifact.n_rows)))

    def select_masks(score_BM: F64) -> Bool:
        """Return the best items by each score that satisfy the constraints."""
        return np.stack(
            [
                mask_of(take_within_budget(ranked(score_M, among_N=constraints.allowed_N), constraints), len(score_M))
                for score_M in score_BM
            ]
        )

    best_M, selected_1M = score_M, select_masks(score_M[None])
    by_relevance = by_runs = float(objective.predicted_by_runs(subset_weights(selected_1M))[0])
    for _ in range(MAX_ASCENT_STEPS):
        gradient_M = objective.run_model.row_gradients(
            subset_weights(selected_1M), objective.weights_T, cautious=objective.cautious
        )
        if document_N is not None:
            gradient_M = _mean_by(document_N, gradient_M)
        selected_M, corner_M = selected_1M[0], select_masks(gradient_M[None])[0]
        removed, added = np.sort(gradient_M[selected_M & ~corner_M]), -np.sort(-gradient_M[corner_M & ~selected_M])
        n = min(len(removed), len(added))
        gain_n = added[:n] - removed[:n]  # of each swap towards the corner, best first
        # a bonus for the current items, just large enough that all, half, ... of the swaps are made
        n_swaps = sorted({int(n * share_of_swaps) for share_of_swaps in SWAP_SHARES})
        bonus_B = [0.0, *(max(float(gain_n[k]), 0.0) for k in n_swaps if k)]
        score_BM = gradient_M + np.array(bonus_B)[:, None] * selected_1M
        mask_BM = select_masks(score_BM)
        value_B = objective.predicted_by_runs(subset_weights(mask_BM))
        k = int(np.argmax(value_B))
        if value_B[k] - by_runs <= MIN_RELATIVE_GAIN * (by_runs - by_relevance):
            break
        best_M, selected_1M, by_runs = score_BM[k], mask_BM[[k]], float(value_B[k])
    bound = "lower bound of the change" if objective.cautious else "change"
    return best_M, (
        f"rows are ranked by the {bound} predicted by the runs: {by_runs:+.4f} {objective.run_model.unit}, "
        f"{by_relevance:+.4f} for the best rows by relevance alone"
    )


def _curve(objective: SelectionObjective, order_N: I64, sizes: Sequence[int], effect_N: F64) -> Curve:
    """Return the value of the first rows of a ranking, for several sizes.

    Args:
        order_N: rows, best first.
        sizes: numbers of rows, ascending.
        effect_N: effect by which the rows are ranked.
    """
    start_B = np.concatenate([[0], sizes])
    parts = [np.sort(order_N[a:b]) for a, b in itertools.pairwise(start_B)]
    indices = np.concatenate(parts)
    rows_BN = csr_array((np.ones(len(indices)), indices, start_B), shape=(len(parts), objective.predictor.n_rows))
    sums = objective.predictor.sums(Weights(rows_BN)).cumulative()
    tokens_B = np.cumsum([int(objective.tokens_N[part].sum()) for part in parts])
    last_B = effect_N[order_N[np.asarray(sizes) - 1]]
    columns = (np.asarray(sizes), tokens_B, last_B, objective.value(sums))
    return Curve(*(tuple(column.tolist()) for column in columns))


def _best_budget(
    objective: SelectionObjective, allowed_N: Bool, build_constraints: Callable[[Amount], Constraints] | None
) -> int:
    """Return the number of rows with the highest value for the training budget.

    The search refines a grid around its best point until it is exact, or accurate to 0.5 % with floors and caps.

    Args:
        build_constraints: constraints for a budget; None: there are no floors and caps.

    Raises:
        SettingsError: no budget satisfies the floors and caps.
    """
    order_P = ranked(objective.effect_N, among_N=allowed_N)
    errors: list[SettingsError] = []

    def value(size: int, build_constraints: Callable[[Amount], Constraints]) -> float:
        try:
            rows = take_within_budget(order_P, build_constraints(Amount(float(size), False)))
        except SettingsError as err:
            errors.append(err)
            return -np.inf
        weights = single_subset(SUBSET, mask_of(rows, objective.artifact.n_rows)).weights
        return float(objective.value(objective.predictor.sums(weights))[0])

    n_sizes, tolerance = (BUDGETS_PER_ROUND, 0.0) if build_constraints is None else (16, 0.005)
    sizes = np.unique(np.geomspace(1, len(order_P), n_sizes).round().astype(np.int64))
    while True:
        if build_constraints is None:
            values: Sequence[float] = _curve(objective, order_P, sizes.tolist(), objective.effect_N).value
        else:
            values = [value(size, build_constraints) for size in sizes.tolist()]
        best = int(np.argmax(values))
        low, high = int(sizes[max(best - 1, 0)]), int(sizes[min(best + 1, len(sizes) - 1)])
        if len(sizes) == sizes[-1] - sizes[0] + 1 or high - low <= tolerance * sizes[best]:
            break
        sizes = np.unique(np.linspace(low, high, n_sizes).round().astype(np.int64))
    if values[best] == -np.inf:
        raise errors[-1]
    return int(sizes[best])


# ------------------------------------------------------------------------------------------------------- notes


def _percentage_note(amount: Amount, n_rows: int) -> list[str]:
    """Return a note if a budget such as 20 may have been meant as a percentage."""
    if amount.is_share or amount.unit is not None or amount.value > min(MAX_PERCENTAGE, AMBIGUOUS_SHARE * n_rows):
        return []
    number = f"{amount.value:g}"
    return [f"budget: {number} is a number of rows, {amount.value / n_rows:.2%} of the corpus; a share is {number}%"]


def _choice_notes(objective: SelectionObjective, items: _SelectedItems, by: str | None, *, whole: bool) -> list[str]:
    """Return notes on the candidates, the rows that are not selected, short rows, partial documents and skipped text.

    Args:
        whole: documents are exported whole, so partially selected ones need no note.
    """
    artifact, constraints, kind, rows = (
        objective.artifact,
        items.constraints,
        items.kind,
        items.selected.row_index,
    )
    n_above = int((items.effect_M[constraints.allowed_N] > 0).sum())
    n_allowed = int(constraints.allowed_N.sum())
    messages = [f"{n_above:,} of the {n_allowed:,} candidate {kind} are above the corpus average"]
    if (used := int(constraints.cost_N[items.item_index_P].sum())) < constraints.budget:
        reason = f"no further {kind[:-1]} fits" if constraints.costs_differ else "the caps allow no more"
        messages.append(f"{used:,} of {constraints.budget:,} {constraints.unit} are used: {reason}")

    dropped_N = ~mask_of(rows, artifact.n_rows)
    if dropped_N.any():
        mean = float(objective.effect_N[dropped_N].mean())
        line = f"not selected: {share(int(dropped_N.sum()), len(dropped_N))}, mean effect {mean:+.3f}"
        for label in [by] if by else suggest_labels(artifact)[:1]:
            column = label_column(artifact, label)
            dropped_G, names = np.bincount(column.codes_N, dropped_N, len(column.values)), column.names()
            # label values that lose a larger share than the corpus, by more than the error of a random draw
            overall = float(dropped_N.mean())
            error_G = np.sqrt(overall * (1 - overall) / np.maximum(column.counts, 1))
            rate_G = dropped_G / np.maximum(column.counts, 1)
            is_large_G = column.counts >= MIN_VALUE_SHARE * len(dropped_N)
            excess_G = np.where(is_large_G, (rate_G - overall) / (error_G + 1e-12), 0.0)  # in standard errors
            worst = [g for g in np.lexsort((-dropped_G, -rate_G)).tolist() if excess_G[g] > MIN_STANDARD_ERRORS]
            worst = worst[:MAX_VALUES_NAMED]
            shares = ", ".join(f"{names[g]} ({dropped_G[g]:,.0f} of {column.counts[g]:,})" for g in worst)
            line += f"; mainly {label} {shares}" if shares else ""
        messages.append(line)
    if (n_short := short_rows(artifact, rows)) > SHORT_SHARE * len(rows):
        length = length_column(artifact)
        messages.append(
            f"{n_short:,} selected rows have fewer than {SHORT} {short_of(length)}, so their relevance is noisy; "
            f'exclude them with --exclude-where "{length} < {SHORT}"'
        )

    if not whole:
        document_N = row_documents(artifact)
        n_rows_D = np.bincount(document_N)
        n_selected_D = np.bincount(document_N[rows], minlength=len(n_rows_D))
        if n_partial := int(((n_selected_D > 0) & (n_selected_D < n_rows_D)).sum()):
            messages.append(
                f"{n_partial:,} of {len(n_rows_D):,} documents are selected in part; for whole documents, pass a "
                "budget such as 20%documents, or export with --documents half"
            )
    counts = artifact.manifest.skipped.get("rows", {}).get("counts", {})
    if counts := {reason: count for reason, count in counts.items() if not (whole and reason in PARTIAL_REASONS)}:
        messages.append(f"not considered, because no row contains them: {skipped_text(counts)}")
    return messages


def _label_table(constraints: Constraints, selected_P: I64) -> pa.Table:
    """Return the table of value, selected, pool, floor and cap, in the unit of the budget; one row per label value."""
    selected_G, pool_G = (
        np.bincount(constraints.codes_N[rows], constraints.cost_N[rows], len(constraints.values)).astype(np.int64)
        for rows in (selected_P, constraints.allowed_N)
    )
    return pa.table(
        {
            "value": pa.array(constraints.values, pa.string()),
            "selected": selected_G,
            "pool": pool_G,
            "floor": pa.array([int(floor) or None for floor in constraints.floor_G], pa.int64()),
            "cap": pa.array([int(cap) if cap < constraints.budget else None for cap in constraints.cap_G], pa.int64()),
        }
    )
