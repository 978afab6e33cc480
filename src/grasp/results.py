"""The base class of results: a table that prints itself and converts to pandas and Arrow."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from grasp.errors import SettingsError
from grasp.files import TABLE_SUFFIXES, atomic_path, write_atomically
from grasp.store.checksummed_parquet import checksummed_writer, write_checksummed
from grasp.text import number, plain, signed, text_table

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS_SHOWN = 20
NOTES_SHOWN = 3  # notes that are printed, the most important first
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?\s?%?|-|nan", re.IGNORECASE)
FORMULA_PREFIX = r"^[=+\-@\t\r]"  # beginning of a cell that a spreadsheet would evaluate


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A table with a headline and notes.

    Attributes:
        table: the numbers; rows are named by their row_id, never by position.
        headline: the answer in one sentence.
        all_notes: print all notes and details; the command line sets it by `--notes`.
        notes: warnings and provenance, one sentence each, the most important first, printed below the table.
        signs: whether its numbers are changes, which are printed with a sign.
        figures: caption and data URL of each figure, which HTML shows above the table; None: it is not available.
        parts: tables that are printed instead of its own.
    """

    max_printed: ClassVar[int] = MAX_ROWS_SHOWN  # rows that are printed
    all_notes: ClassVar[bool] = False
    table: pa.Table
    headline: str = ""
    notes: tuple[str, ...] = ()
    signs: bool = True
    figures: tuple[tuple[str, str | None], ...] = ()
    parts: tuple["Result", ...] = ()

    def to_arrow(self) -> pa.Table:
        """Return the table as an Arrow table."""
        return self.table

    def to_dict(self) -> dict[str, Any]:
        """Return headline, notes and rows as JSON values."""
        return {"headline": self.headline, "notes": list(self.notes), "rows": self.table.to_pylist()}

    def to_pandas(self) -> "pd.DataFrame":
        """Return the table as a pandas DataFrame."""
        return self.table.to_pandas()  # type: ignore[no-any-return]

    def write(self, path: Path | str) -> Path:
        """Write the table as Parquet or CSV, or what a notebook shows as HTML, and return the path.

        The suffix of `path` decides. The write is atomic.
        """
        path = Path(path)
        if path.suffix != ".html":
            return write_table(self.table, path)
        title = escape(plain(self.headline))
        page = f"<!doctype html><meta charset=utf-8><title>{title}</title>{self._repr_html_()}\n"
        write_atomically(path, page.encode())
        return path

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        names, rows = self._printed_cells()
        table = text_table("", names, rows) if rows else ""
        if self.parts:
            table = "\n{}\n".format("\n\n".join(map(repr, self.parts)))
        return "\n".join(line for line in (plain(self.headline), table, *map(plain, self._below())) if line)

    def _repr_html_(self) -> str:
        tables = "".join(part._repr_html_() for part in self.parts) or html_table(*self._printed_cells())
        figures = "".join(
            f'<figure style="display:inline-block;margin:4px;width:120px;font-size:small">'
            f'<img src="{url}" alt=""><figcaption>{escape(plain(caption))}</figcaption></figure>'
            for caption, url in self.figures
            if url is not None
        )
        below = "".join(f"<p>{escape(plain(note))}</p>" for note in self._below())
        return f"{figures}<p><b>{escape(plain(self.headline))}</b></p>{tables}{below}"

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and the first rows as text."""
        names = list(self.table.column_names)
        rows = self.table.slice(0, self.max_printed).to_pylist()
        return names, [[cell_text(row[name], signs=self.signs) for name in names] for row in rows]

    def _below(self) -> Sequence[str]:
        more = 0 if self.parts else len(self) - self.max_printed
        return [*([f"... and {more:,} more"] if more > 0 else []), *self.notes]


def first_notes(notes: Sequence[str]) -> list[str]:
    """Return the first notes and how many more there are, or all of them if the command line requests it."""
    n_more = 0 if Result.all_notes else len(notes) - NOTES_SHOWN
    if n_more <= 0:
        return list(notes)
    return [*notes[:NOTES_SHOWN], f"... and {n_more} more note{'s' * (n_more > 1)} (--notes; in Python .notes)"]


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as HTML: text on the left, numbers on the right; all cells are escaped."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(headings)
    sides = ["right" if all(_NUMBER.fullmatch(cell) for cell in column) else "left" for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(cells, sides, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{escape(plain(cell))}</{tag}>' for cell, side in pairs)

    head = line("th", headings)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a table as Parquet or CSV, atomically.

    Numbers that are not finite become empty cells. In CSV, text that a spreadsheet would evaluate as a formula is
    prefixed with an apostrophe.
    """
    if path.suffix not in TABLE_SUFFIXES:
        raise SettingsError(f"{path}: expected a name that ends in {' or '.join(TABLE_SUFFIXES)}")
    columns = [
        pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
        if pa.types.is_floating(column.type)
        else column
        for column in table.columns
    ]
    with atomic_path(path) as part:
        if path.suffix == ".csv":
            columns = [_no_formula(column) for column in columns]
            names = _no_formula(pa.chunked_array([pa.array(table.column_names, pa.string())])).to_pylist()
            pacsv.write_csv(pa.table(columns, names), part)
        else:
            stored = pa.table(columns, table.column_names).replace_schema_metadata(table.schema.metadata)
            write_checksummed(stored, part)
    return path


def write_tables(schema: pa.Schema, tables: Iterable[pa.Table], path: Path) -> int:
    """Concatenate tables into one file, Parquet as a stream, CSV in memory; return the number of rows."""
    if path.suffix != ".parquet":
        whole = pa.concat_tables([schema.empty_table(), *tables])
        write_table(whole, path)
        return int(whole.num_rows)
    lines = 0
    with atomic_path(path) as part, checksummed_writer(part, schema) as writer:
        for table in tables:
            writer.write(table)
            lines += table.num_rows
    return lines


def _no_formula(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    is_formula = pc.match_substring_regex(column, FORMULA_PREFIX)
    quote, end = pa.scalar("'", column.type), pa.scalar("", column.type)
    return pc.if_else(is_formula, pc.binary_join_element_wise(quote, column, end), column)


def cell_text(value: Any, *, signs: bool) -> str:
    """Format a value of a table."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if not signs:
        return number(value) if abs(value) >= 0.01 or not value else f"{value:.2g}"
    return signed(value) if abs(value) >= 0.01 or not value else f"{value:+.2g}"
