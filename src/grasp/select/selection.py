"""The result of `select`: print it, save it, or export it as a corpus to train on. Start with `Selection`.

Shape letter: N rows.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grasp.arrays import F64, I64
from grasp.artifact.rows import ranked, write_ranked
from grasp.files import check_directory
from grasp.predict.weights import mask_of
from grasp.results import first_notes
from grasp.select.export import Exporter
from grasp.select.objective import OptimizationResult
from grasp.select.record_files import Export
from grasp.text import plain, signed, text_table

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
        row_index: indices of the selected rows, best first.
        n_tokens: tokens of the selected rows.
        effect_N: effect of every row of the corpus.
    """

    kind = "selection"

    curve: Curve
    labels: pa.Table | None
    guarantee: str
    row_index: I64
    n_tokens: int
    effect_N: F64

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
            "documents": len(self.table["doc_id"].unique()) if self.params["items"] == "documents" else None,
            "tokens": self.n_tokens,
            "corpus_rows": self.artifact.n_rows,
            "guarantee": self.guarantee,
            "curve": asdict(self.curve),
            "labels": [] if self.labels is None else self.labels.to_pylist(),
        }

    def __repr__(self) -> str:
        parts = [plain(self.headline), self._shown_changes()]
        if self.labels is not None:
            ordered = self.labels.sort_by([("selected", "descending")])
            title = f"selected per value, in {self.params['unit']}"
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
        item = "document" if self.params["items"] == "documents" else "row"
        title = f"other budgets: effect of the last {item} (0 = the corpus average), and value of the whole selection"
        return text_table(title, ("rows", "share", "tokens", f"last {item}", "value"), budgets, left=0)
