"""Chosen rows: how they are shown, and how they are written to train on.

Shape letters: N rows.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grasp.arrays import F64, I64
from grasp.artifact.rows import ranked, write_ranked
from grasp.files import check_place
from grasp.predict.weights import mask_of
from grasp.select.export import Export, Exporter
from grasp.select.objective import OptimizationResult
from grasp.text import plain, signed, text_table

CURVE_SHOWN = 8
VALUES_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Curve:
    """The first rows of a choice."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    effect: tuple[float, ...]  # of the last row, or document, of each beginning
    value: tuple[float, ...]  # of all its rows: change against the corpus, repetition counted


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Selection(OptimizationResult):
    """Chosen rows, best first; `table` names them: subset_id, row_id, doc_id, order, effect, n_tokens[, label].

    Attributes:
        curve: what the first so many rows are worth.
        labels: of each value of the label: pool, taken, floor and cap, in the unit of the budget.
        effect_N: of all rows.
    """

    kind = "selection"

    curve: Curve
    labels: pa.Table | None
    bound: float | None
    guarantee: str
    row_index: I64
    n_tokens: int
    effect_N: F64

    @property
    def row_ids(self) -> list[str]:
        """Names of the chosen rows, best first."""
        names: list[str] = self.table["row_id"].to_pylist()
        return names

    @property
    def left_out(self) -> I64:
        """The rows that were not chosen, worst first."""
        return ranked(-self.effect_N, among_N=~mask_of(self.row_index, len(self.effect_N)))

    def export(
        self,
        out: Path | str,
        *,
        documents: str | None = None,
        format: str = "parquet",  # noqa: A002 - what it is called everywhere
        corpus: str | None = None,
        ids: Path | str | None = None,
        left_out: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> Export:
        """Write a corpus to train on: exactly the chosen rows, or whole documents.

        Conversations, pairs and instructions are written as the user's own records, all columns as they are.

        Args:
            out: new directory; it appears when it is whole.
            documents: whole documents of which any, half or all tokens were chosen; None: exactly the rows.
            format: parquet, jsonl or datasets.
            corpus: where the corpus lies now; None: where it was built from.
            ids: file for the whole documents: .csv or .parquet of name and record, which is their place in the corpus
                from 0; else their names, one a line.
            left_out: write what is not kept, rows or documents, in the place of what is.
            say: told, before anything is written, what whole documents add and drop.
        Raises:
            SettingsError: `out` is there already, no such rule or format, or nothing to write.
            CorpusError: the corpus, or its tokenizer, is not the one that the artifact was built from.
        """
        check_place(Path(out))
        exporter = Exporter.from_options(self.artifact, documents=documents, form=format, corpus=corpus, ids=ids)
        return exporter.write(self, Path(out), left_out=left_out, say=say)

    def write_left_out(self, path: Path | str) -> int:
        """Write a table of the rows that were not chosen, worst first, with labels and snippets; returns how many."""
        rows = self.left_out
        write_ranked(self.artifact, self.effect_N, rows, Path(path), "effect")
        return len(rows)

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        return super().summary() | {
            "rows": len(self),
            "documents": len(self.table["doc_id"].unique()) if self.params["items"] == "documents" else None,
            "tokens": self.n_tokens,
            "corpus_rows": self.artifact.n_rows,
            "bound": self.bound,
            "guarantee": self.guarantee,
            "curve": asdict(self.curve),
            "labels": [] if self.labels is None else self.labels.to_pylist(),
        }

    def __repr__(self) -> str:
        curve, n = self.curve, len(self.curve.rows)
        step = max(1, n // CURVE_SHOWN)
        places = {*range(step - 1, n, step), n - 1} | {k for k, rows in enumerate(curve.rows) if rows == len(self)}
        budgets = [
            (
                f"{curve.rows[k]:,}",
                f"{100 * curve.rows[k] / self.artifact.n_rows:.1f} %",
                f"{curve.tokens[k]:,}",
                signed(curve.effect[k]),
                signed(curve.value[k]),
            )
            for k in sorted(places)
        ]
        each = "document" if self.params["items"] == "documents" else "row"
        title = f"other budgets: what the next {each} is worth (0 = the corpus average), and the value of all rows"
        headings = ("rows", "share", "tokens", f"next {each}", "value")
        parts = [plain(self.headline), self._shown_changes(), text_table(title, headings, budgets, left=0)]
        if self.labels is not None:
            ordered = self.labels.sort_by([("taken", "descending")])
            title = f"what is taken of each value, in {self.params['unit']}"
            parts.append(self._shown_table(title, ordered.slice(0, VALUES_SHOWN)))
            if len(rest := ordered.slice(VALUES_SHOWN)):
                parts.append(f"... and {len(rest):,} more values with {sum(rest['taken'].to_pylist()):,} in all")
        return "\n".join(part for part in (*parts, *map(plain, (self.guarantee, *self.notes))) if part)
