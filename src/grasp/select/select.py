"""Select the rows that maximise the predicted change of the targets within a budget. Start with `select`.

`SelectionObjective` computes the effect of every row. `select_by_rank` sorts rows, or whole documents, and takes the
best within the budget, floors and caps. The result predicts what the selection changes, and `Selection.export` writes
it as a corpus.

Shape letters: N rows, M items (rows or documents), P items in ranked order, G label values, D documents.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from grasp.api.predict import prediction_notes
from grasp.arrays import I64, Bool
from grasp.artifact.label_table import LabelColumn, LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import count_short_rows, label_column, leak_notes, leaked_rows, length_column, row_documents
from grasp.errors import SettingsError
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.weights import mask_of, single_subset
from grasp.select.budget import Amount, Constraints, load_exclusions, parse_bounds, parse_budget, parse_tokens
from grasp.select.export import parse_document_rule
from grasp.select.items import Items
from grasp.select.objective import SelectionObjective, weighted_targets
from grasp.select.ranking import best_budget, select_by_rank, value_curve
from grasp.select.selection import Selection, SelectionFacts, describe
from grasp.text import as_names

if TYPE_CHECKING:
    from grasp.runs.table import RunTable
    from grasp.runs.training_runs import TrainingRuns

SUBSET = "selection"


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
    cautious: bool = False,
) -> Selection:
    """Select the rows that help the targets most, within a budget.

    The selection can be exported as a corpus to train on. Whole documents are ranked by the mean effect of their rows.

    In Python the result has `.row_ids`, `.save(path)`, `.export(directory)`.

    Args:
        artifact: artifact of the corpus.
        budget: amount to select: 20% or 5000 (rows), 2Mtokens, 20%tokens, 300documents, 67%documents. Percentages refer
            to the whole corpus. Default: the optimum for `train_tokens`. In Python also a float (share of the rows) or
            an int (number of rows).
        target: target, or several with weights, e.g. sciq=2,openbookqa=1. Default: the only target.
        train_tokens: length of the training run in tokens, e.g. 100B; repeated tokens have diminishing value.
        by: label that `floor` and `cap` refer to.
        floor: minimum share of the budget, e.g. Games:5%, or 1% for every value.
        cap: maximum share of the budget, e.g. Games:20%, or 10% for every value.
        runs: retrained or imported runs; rows are selected by the change that a model fitted to the runs predicts, and
            the result has intervals. With `train_tokens`, rows are selected by relevance.
        exclude: file of row_ids or doc_ids to exclude: text or Parquet. In Python also a list.
        exclude_where: condition on labels; matching rows are excluded.
        drop_leaks: exclude rows that contain questions of the targets.
        documents: export whole documents of which any, half or all rows are selected. Default: only the rows. In
            Python pass it to `Selection.export` as well.
        protocol: protocol to predict with; only its additive part. Default: the built-in one.
        cautious: maximise the lower confidence bound instead of the mean (requires `runs`).
    Raises:
        SettingsError: neither budget nor train_tokens is given, or a budget, floor or cap cannot be met.
        ProtocolError: the artifact does not fit the protocol, or lacks a target.
        SubsetError: an expression is not a condition.
    """
    if documents is not None:
        parse_document_rule(documents)
    targets = weighted_targets(target, artifact.targets)
    whole_documents = documents == "all"
    allowed_N, excluded_notes = allowed_rows(artifact, targets, exclude_where, exclude, drop_leaks=drop_leaks)
    labels = None if by is None else label_column(artifact, by, "by")
    tokens = None if train_tokens is None else parse_tokens(train_tokens)
    floors, caps = parse_bounds(floor, "floor"), parse_bounds(cap, "cap")
    amount = None if budget is None else parse_budget(budget)
    if amount is None and tokens is None:
        raise SettingsError("budget: missing; pass one such as 20%, or train_tokens such as 100B to compute one")
    if not allowed_N.any():
        raise SettingsError(f"exclude: no candidates left; all {len(allowed_N):,} rows are excluded")
    whole_documents |= amount is not None and amount.unit == "documents"
    objective = SelectionObjective.from_artifact(artifact, protocol, targets, tokens, runs, cautious=cautious)
    row_document_N = row_documents(artifact)
    items = Items.of_rows(
        objective.effect_N, allowed_N, objective.tokens_N, labels, row_document_N if whole_documents else None
    )
    size = Amount(best_budget(objective, items, floors, caps), False) if amount is None else amount
    constraints = Constraints.from_budget(size, items, floors, caps)
    selected = select_by_rank(objective, items, constraints)
    row_index, selected_N = selected.row_index, mask_of(selected.row_index, artifact.n_rows)
    weights = single_subset(SUBSET, selected_N).weights
    changes = objective.evaluate(SUBSET, weights, "the whole corpus")
    sums = objective.predictor.sums(weights)
    table = _row_table(objective, row_index, selected_N, labels)
    n_rows_D = np.bincount(row_document_N)
    n_selected_D = np.bincount(row_document_N[row_index], minlength=len(n_rows_D))
    facts = SelectionFacts(
        kind=items.kind,
        candidates=int(items.allowed_M.sum()),
        above_average=int((items.effect_M[items.allowed_M] > 0).sum()),
        ranked_by_effect=not objective.by_runs,
        unit=constraints.unit,
        budget=constraints.budget,
        used=int(constraints.cost_M[selected.item_index_P].sum()),
        costs_differ=constraints.costs_differ,
        given_budget=amount,
        rows=len(table),
        corpus_rows=artifact.n_rows,
        mean_left_out=float(objective.effect_N[~selected_N].mean()) if len(table) < artifact.n_rows else nan,
        tokens=int(objective.tokens_N[row_index].sum()),
        train_tokens=tokens,
        repetition=float(sums.repetition_factor(objective.budget_predictor.repetition_law)[0]),
        value=float(objective.value(sums)[0]),
        documents=int((n_selected_D > 0).sum()),
        corpus_documents=len(n_rows_D),
        partial_documents=int(((n_selected_D > 0) & (n_selected_D < n_rows_D)).sum()),
        short_rows=count_short_rows(artifact, row_index),
        length=length_column(artifact),
        exports_documents=documents is not None,
        skipped=artifact.manifest.skipped.get("rows", {}).get("counts", {}),
    )
    headline, first_notes, notes = describe(facts)
    params = {
        "budget": budget,
        "targets": dict(targets),
        "train_tokens": tokens,
        "by": None if labels is None else labels.name,  # as it is spelled in the corpus
        "unit": facts.unit,
        "items": facts.kind,
        "floor": list(as_names(floor)),
        "cap": list(as_names(cap)),
        "exclude_where": exclude_where,
        "drop_leaks": drop_leaks,
        "excluded_rows": int((~allowed_N).sum()),
    } | ({"cautious": True} if cautious else {})
    label_notes = [labels.note] if labels is not None and labels.note else []
    prediction = prediction_notes(objective.predictor, objective.run_model)
    return Selection(
        table,
        changes.verdict + headline,
        (*first_notes, *changes.notes, *excluded_notes, *label_notes, *notes, *prediction),
        **objective.result_fields(changes, facts.value, params),
        curve=value_curve(objective, items, selected.ranked_rows, len(row_index)),
        labels=None if labels is None else _label_table(constraints, selected.item_index_P),
        guarantee=selected.guarantee,
        facts=facts,
        row_index=row_index,
        effect_N=objective.effect_N,
    )


def allowed_rows(
    artifact: ArtifactReader,
    targets: Mapping[str, float],
    exclude_where: str | None,
    exclude: Path | str | Sequence[str] | None = None,
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


def _row_table(objective: SelectionObjective, row_index: I64, selected_N: Bool, labels: LabelColumn | None) -> pa.Table:
    """Return subset_id, row_id, doc_id, order, effect, n_tokens[, label] of the selected rows, best first.

    The artifact is read in batches; only the selected rows are held in memory.
    """
    stored = [] if labels is None or labels.sql else [labels.name]
    start, parts = 0, list[pa.RecordBatch]()
    for batch in objective.artifact.row_batches(["row_id", "doc_id", "n_tokens", *stored]):
        parts.append(batch.filter(pa.array(selected_N[start : start + batch.num_rows])))
        start += batch.num_rows
    rank = np.argsort(np.argsort(row_index))  # position of each selected row, best first, in `parts`, in corpus order
    table = pa.Table.from_batches(parts).take(pa.array(rank)).combine_chunks()
    if labels is not None and labels.sql:
        codes = pa.array(labels.codes_N[row_index])
        table = table.append_column(labels.name, pa.array(labels.values).take(codes))
    table = table.add_column(2, "effect", pa.array(objective.effect_N[row_index]))
    table = table.add_column(2, "order", pa.array(np.arange(len(table))))
    return table.add_column(0, "subset_id", pa.array([SUBSET] * len(table), pa.string()))


def _label_table(constraints: Constraints, selected_P: I64) -> pa.Table:
    """Return the table of value, selected, pool, floor and cap, in the unit of the budget; one row per label value."""
    selected_G, pool_G = (
        np.bincount(constraints.codes_M[items], constraints.cost_M[items], len(constraints.values)).astype(np.int64)
        for items in (selected_P, constraints.allowed_M)
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
