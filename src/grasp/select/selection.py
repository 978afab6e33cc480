"""The result of `select`: print it, save it, or export it as a corpus to train on. Start with `Selection`.

Shape letter: N rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from grasp.api.predict import share_text
from grasp.arrays import F64, I64
from grasp.artifact.rows import MIN_RELIABLE_TOKENS, length_unit, ranked, write_ranked
from grasp.files import check_directory
from grasp.predict.weights import mask_of
from grasp.results import first_notes
from grasp.select.budget import Amount, Unit
from grasp.select.export import Exporter
from grasp.select.objective import OptimizationResult
from grasp.select.record_files import Export
from grasp.text import plain, signed, skipped_text, text_table

PARTIAL_REASONS = ("short_end", "cut", "cut_begin", "cut_end")  # reasons for skipping a part of a document
SHORT_SHARE = 0.01  # share of short rows above which a note is added
UNUSED_SHARE = 0.02  # share of a budget above which an unused remainder is mentioned in the headline
# A bare number up to this share of the corpus, and at most 100, may have been meant as a percentage.
AMBIGUOUS_SHARE = 0.01
CURVE_SHOWN = 8  # points of the curve that are printed
VALUES_SHOWN = 30  # label values that are printed


@dataclass(frozen=True, slots=True)
class Curve:
    """Value of selections of increasing size: the first rows of the ranking.

    Attributes:
        rows: number of rows of each selection.
        tokens: number of tokens.
        effect: effect of the last row or document that it contains, the worst one.
        value: predicted change, including the effect of repetition.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    effect: tuple[float, ...]
    value: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionFacts:
    """Counts and means of a selection, which `describe` turns into its headline and notes.

    Attributes:
        kind: what is selected one by one.
        candidates: number of items that may be selected.
        above_average: candidates with an effect above 0, the mean over the rows of the corpus.
        ranked_by_effect: whether items are ranked by their effect, not by the change that runs predict.
        unit, budget, used: unit of the budget, its size, and how much of it the selection uses.
        costs_differ: whether items have different costs in this unit.
        given_budget: the budget that was passed; None: it is the optimum for `train_tokens`.
        rows, tokens, documents: size of the selection; `documents` have at least one selected row.
        corpus_rows, corpus_documents: size of the corpus.
        mean_left_out: mean effect of the rows that are not selected; nan if all are.
        train_tokens: length of the training run; None: unknown.
        repetition: effect of the selection relative to as many new rows.
        value: weighted change, reduced by repetition.
        partial_documents: documents with selected and other rows.
        short_rows: selected rows with too few tokens in the column `length` for a reliable relevance.
        exports_documents: whether whole documents will be written.
        skipped: number of parts of the corpus that no row contains, by reason.
    """

    kind: Literal["rows", "documents"]
    candidates: int
    above_average: int
    ranked_by_effect: bool
    unit: Unit
    budget: int
    used: int
    costs_differ: bool
    given_budget: Amount | None
    rows: int
    tokens: int
    documents: int
    corpus_rows: int
    corpus_documents: int
    mean_left_out: float
    train_tokens: float | None
    repetition: float
    value: float
    partial_documents: int
    short_rows: int
    length: str
    exports_documents: bool
    skipped: Mapping[str, int]


def describe(facts: SelectionFacts) -> tuple[str, list[str], list[str]]:
    """Return the headline of a selection, the notes that matter most, and the others."""
    share, kind, given = share_text(facts.rows, facts.corpus_rows), facts.kind, facts.given_budget
    headline = f"keeps {facts.documents:,} documents: {share}" if kind == "documents" else f"keeps {share}"
    headline += f", {facts.tokens:,} tokens"
    if facts.used < (1 - UNUSED_SHARE) * facts.budget:
        headline += f"; only {facts.used:,} of the requested {facts.budget:,} {facts.unit}"
    first: list[str] = []
    notes: list[str] = []
    if facts.train_tokens is not None:
        headline += f"; {facts.train_tokens / facts.tokens:.2g} epochs in {facts.train_tokens:,.0f} training tokens"
        first.append(
            f"value {facts.value:+z.3f}: the change including repetition, which has {facts.repetition:.0%} of the "
            "effect of as many new rows"
        )
    if given is None:
        first.append(f"budget: {facts.budget:,} rows, the optimum for the training budget")
    elif not given.is_share and given.unit is None and given.value <= min(100, AMBIGUOUS_SHARE * facts.corpus_rows):
        number, part = f"{given.value:g}", given.value / facts.corpus_rows
        first.append(f"budget: {number} is read as rows, {part:.2%} of the corpus; for {number} %, pass {number}%")
    above = f"{facts.above_average:,} of the {facts.candidates:,} candidate {kind} are above the corpus average"
    n_selected = facts.documents if kind == "documents" else facts.rows
    if facts.ranked_by_effect and facts.train_tokens is None and 0 < facts.above_average < n_selected:
        above += f", but {n_selected:,} are selected: --budget {facts.above_average}{kind} leaves out the others"
        first.append(f"only {above}")
    else:
        notes.append(above)
    if facts.used < facts.budget:
        reason = f"no further {kind[:-1]} fits" if facts.costs_differ else "the caps allow no more"
        notes.append(f"{facts.used:,} of {facts.budget:,} {facts.unit} are used: {reason}")
    if n_left_out := facts.corpus_rows - facts.rows:
        left_out = share_text(n_left_out, facts.corpus_rows)
        notes.append(f"not selected: {left_out}, mean effect {facts.mean_left_out:+.3f}")
    if facts.short_rows > SHORT_SHARE * facts.rows:
        notes.append(
            f"{facts.short_rows:,} selected rows have fewer than {MIN_RELIABLE_TOKENS} {length_unit(facts.length)}, so "
            f"their relevance is noisy; exclude them with --exclude-where "
            f'"{facts.length} < {MIN_RELIABLE_TOKENS}"'
        )
    if facts.partial_documents and not facts.exports_documents:
        notes.append(
            f"{facts.partial_documents:,} of {facts.corpus_documents:,} documents are selected in part; for whole "
            "documents, pass a budget such as 20%documents, or export with --documents half"
        )
    # the records of partially read documents are exported whole
    reasons = facts.skipped.keys() - (PARTIAL_REASONS if facts.exports_documents else ())
    if reasons:
        counts = {reason: count for reason, count in facts.skipped.items() if reason in reasons}
        notes.append(f"not considered, because no row contains them: {skipped_text(counts)}")
    return headline, first, notes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Selection(OptimizationResult):
    """Selected rows, best first.

    The inherited `table` has one row per selected row, with the columns subset_id, row_id, doc_id, order (rank of the
    row, from 0), effect, n_tokens, and label if the selection has floors or caps. The inherited `params` has the
    arguments of the selection.

    Attributes:
        curve: value of other sizes of the selection.
        labels: columns value, selected, pool, floor and cap, in the unit of the budget; one row per label value.
        guarantee: statement on optimality.
        facts: counts and means, of which headline and notes are made.
        row_index: indices of the selected rows, best first.
        effect_N: effect of every row of the corpus.
    """

    kind = "selection"

    curve: Curve
    labels: pa.Table | None
    guarantee: str
    facts: SelectionFacts
    row_index: I64
    effect_N: F64

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of the selected rows."""
        return self.facts.tokens

    @property
    def row_ids(self) -> list[str]:
        """Return the ids of the selected rows, best first."""
        names: list[str] = self.table["row_id"].to_pylist()
        return names

    @property
    def left_out(self) -> I64:
        """Return the indices of the rows that are not selected, worst first."""
        return ranked(-self.effect_N, among_N=~mask_of(self.row_index, len(self.effect_N)))

    def export(
        self,
        out: Path | str,
        *,
        documents: str | None = None,
        format: str = "parquet",  # noqa: A002 - the name of the command-line option
        corpus: str | None = None,
        ids: Path | str | None = None,
        shard_size: str | int | None = None,
        left_out: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> Export:
        """Write a corpus to train on: the selected rows, or whole documents.

        Conversations, preference pairs and instructions are written as the original records, with all columns.

        Args:
            out: new directory; it is written to a temporary path and renamed when complete.
            documents: "any", "half" or "all": write whole documents of which at least one token, half or all tokens
                are selected. None: only the rows.
            format: parquet, jsonl, json (an array), csv, tsv, datasets, or source: that of the corpus. Text files are
                compressed like those of the corpus.
            corpus: current path of the corpus; None: the path of the build.
            ids: file to write the ids of the whole documents to: .csv or .parquet with columns name and record (the
                position in the corpus, from 0), or text with one name per line.
            shard_size: maximum size of a file, e.g. 256MB before compression, or a number of records. Default: 50,000
                records.
            left_out: write the rows or documents that are not selected instead.
            say: callback that receives a line on what whole documents add and drop, before anything is written.

        Raises:
            SettingsError: `out` exists, the rule or format is unknown, or there is nothing to write.
            CorpusError: the corpus or its tokenizer is not the one that the artifact was built from.
        """
        check_directory(Path(out))
        exporter = Exporter.from_options(
            self.artifact, documents=documents, form=format, corpus=corpus, ids=ids, shard_size=shard_size
        )
        return exporter.write(self, Path(out), left_out=left_out, say=say)

    def write_left_out(self, path: Path | str) -> int:
        """Write a table of the rows that are not selected, worst first, with labels; return their number."""
        rows = self.left_out
        write_ranked(self.artifact, self.effect_N, rows, Path(path), "effect")
        return len(rows)

    def summary(self) -> dict[str, Any]:
        """Return everything but the rows as JSON data."""
        return super().summary() | {
            "rows": len(self),
            "documents": self.facts.documents if self.facts.kind == "documents" else None,
            "tokens": self.facts.tokens,
            "corpus_rows": self.artifact.n_rows,
            "guarantee": self.guarantee,
            "curve": asdict(self.curve),
            "labels": [] if self.labels is None else self.labels.to_pylist(),
        }

    def __repr__(self) -> str:
        parts = [plain(self.headline), self._shown_changes()]
        if self.labels is not None:
            ordered = self.labels.sort_by([("selected", "descending")])
            title = f"selected per value, in {self.facts.unit}"
            parts.append(self._shown_table(title, ordered.slice(0, VALUES_SHOWN)))
            if len(rest := ordered.slice(VALUES_SHOWN)):
                parts.append(f"... and {len(rest):,} more values with {sum(rest['selected'].to_pylist()):,} in total")
        if self.all_notes:
            parts += [self._shown_curve(), plain(self.guarantee)]
        parts += map(plain, first_notes(self.notes))
        return "\n".join(part for part in parts if part)

    def _shown_curve(self) -> str:
        """Format the value of other sizes as text."""
        curve, n = self.curve, len(self.curve.rows)
        step = max(1, n // CURVE_SHOWN)
        selected_point = {k for k, rows in enumerate(curve.rows) if rows == len(self)}
        shown_points = {*range(step - 1, n, step), n - 1} | selected_point
        budgets = [
            (
                f"{curve.rows[k]:,}",
                f"{100 * curve.rows[k] / self.artifact.n_rows:.1f} %",
                f"{curve.tokens[k]:,}",
                signed(curve.effect[k]),
                signed(curve.value[k]),
            )
            for k in sorted(shown_points)
        ]
        item = self.facts.kind[:-1]
        title = f"other budgets: effect of the last {item} (0 = the corpus average), and value of the whole selection"
        return text_table(title, ("rows", "share", "tokens", f"last {item}", "value"), budgets, left=0)
