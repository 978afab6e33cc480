"""Chosen rows: how they are shown, and how they are written to train on.

Shape letters: N rows.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grasp.arrays import F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.choose.choice import Choice, Curve, text_of
from grasp.choose.export import (
    NOTHING_LEFT,
    Export,
    Format,
    Kept,
    Rule,
    are_records,
    checked_format,
    checked_rule,
    corpus_settings,
    kept_documents,
    proven_rows,
    write_documents,
    write_rows,
)
from grasp.corpus.sources import open_source
from grasp.errors import CorpusError, SettingsError
from grasp.extract.reopen import BuildSource
from grasp.files import check_place, write_whole
from grasp.predict.rows import ranked, write_ranked
from grasp.predict.weights import mask_of
from grasp.results import write_table
from grasp.settings import CorpusSettings
from grasp.text import plain, signed, text_table

CURVE_SHOWN = 8
VALUES_SHOWN = 30


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Selection(Choice):
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
    effect_N: F64

    @property
    def row_ids(self) -> list[str]:
        """Names of the chosen rows, best first."""
        names: list[str] = self.table["row_id"].to_pylist()
        return names

    @property
    def n_tokens(self) -> int:
        return int(np.sum(self.table["n_tokens"].to_numpy()))

    @property
    def n_documents(self) -> int:
        return len(self.table["doc_id"].unique())

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
        artifact, place = self.artifact, Path(out)
        kind, rule, settings = check_export(artifact, place, documents=documents, form=format, corpus=corpus, ids=ids)
        tokenizer = BuildSource(artifact).tokenizer
        rows = proven_rows(artifact, settings, tokenizer)
        asked: dict[str, Any] = {"corpus": artifact.manifest.fingerprints["corpus"], "artifact": artifact.where}
        asked |= {"asked": dict(self.asked)}
        if left_out:
            asked |= {"left_out": True}
        if rule is None and not are_records(artifact):
            index = self._left if left_out else self.row_index
            if not len(index):
                raise SettingsError(NOTHING_LEFT)
            return write_rows(artifact, rows, index, self.effect_N[index], place, kind, asked, tokenizer.decode)
        kept = kept_documents(rows, mask_of(self.row_index, artifact.n_rows), rule or "all", others=left_out)
        if say is not None and rule is not None:
            added = f"; {kept.added:,} of them in rows that were not chosen" if kept.added else ""
            lost = f"; {kept.lost:,} tokens of chosen rows go, as their documents are not kept" if kept.lost else ""
            say(f"whole documents ({rule}): {len(kept.names):,} with {kept.tokens:,} tokens{added}{lost}")
        if ids is not None:
            write_ids(kept, Path(ids))
        asked |= {} if rule is None else {"documents": rule}
        return write_documents(settings, lambda a, b: kept.mask_M[a:b], kept.tokens, place, kind, asked)

    def write_left_out(self, path: Path | str) -> int:
        """Write a table of the rows that were not chosen, worst first, with labels and snippets; returns how many."""
        write_ranked(self.artifact, self.effect_N, self._left, Path(path), "effect")
        return len(self._left)

    @property
    def _left(self) -> I64:
        """The rows that were not chosen, worst first."""
        return ranked(-self.effect_N, among_N=~mask_of(self.row_index, len(self.effect_N)))

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        return super().summary() | {
            "rows": len(self),
            "documents": self.n_documents if self.asked["unit"] == "documents" else None,
            "tokens": self.n_tokens,
            "corpus_rows": self.artifact.n_rows,
            "bound": self.bound,
            "guarantee": self.guarantee,
            "curve": asdict(self.curve),
            "labels": [] if self.labels is None else self.labels.to_pylist(),
        }

    def __repr__(self) -> str:
        tables = self._change_text(), self._curve_text(), self._labels_text()
        return "\n".join(
            part for part in (plain(self.headline), *tables, *map(plain, (self.guarantee, *self.notes))) if part
        )

    def _curve_text(self) -> str:
        rows = self.curve.rows
        step = max(1, len(rows) // CURVE_SHOWN)
        places = sorted(
            {*range(step - 1, len(rows), step), len(rows) - 1} | {k for k, n in enumerate(rows) if n == len(self)}
        )
        lines = [
            (
                f"{rows[k]:,}",
                f"{100 * rows[k] / self.artifact.n_rows:.1f} %",
                f"{self.curve.tokens[k]:,}",
                signed(self.curve.effect[k]),
                signed(self.curve.value[k]),
            )
            for k in places
        ]
        each = "document" if self.asked["unit"] == "documents" else "row"
        return text_table(
            f"other budgets: what the next {each} is worth (0 = the corpus average), and the value of all rows",
            ("rows", "share", "tokens", f"next {each}", "value"),
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
        raise SettingsError("--documents, --ids-out, --corpus: say how documents are written; add --export DIR")
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


def write_ids(kept: Kept, path: Path) -> None:
    """The kept documents: a table of name and record, or names, one a line; the file appears only when whole.

    Raises:
        SettingsError: a name with a line break, in a list.
    """
    if path.suffix in (".csv", ".parquet"):
        write_table(pa.table({"name": pa.array(kept.names, pa.string()), "record": pa.array(kept.records)}), path)
        return
    for name in kept.names:
        if "\n" in name or "\r" in name:
            raise SettingsError(
                f"document {name!r}: a list with one name a line cannot hold it; write a table, .csv or .parquet"
            )
    write_whole(path, ("\n".join(kept.names) + "\n").encode())
