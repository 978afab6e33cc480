"""What every verb gives back: a table that prints itself, and the way to pandas and Arrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from grasp.errors import SettingsError
from grasp.files import written_aside
from grasp.text import plain, text_table

if TYPE_CHECKING:
    import pandas as pd

ROWS_SHOWN = 20


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A table, a line that says what it shows, and what is worth knowing of it.

    Attributes:
        table: the numbers; rows are named by their row_id, never by position.
        headline: the answer in one sentence.
        notes: provenance and cautions, a sentence each; they stand under the table.
    """

    table: pa.Table
    headline: str = ""
    notes: tuple[str, ...] = ()

    def to_arrow(self) -> pa.Table:
        """The numbers as an Arrow table."""
        return self.table

    def to_pandas(self) -> "pd.DataFrame":
        """The numbers as a pandas DataFrame."""
        frame: pd.DataFrame = self.table.to_pandas()
        return frame

    def write(self, path: Path | str) -> Path:
        """Write the numbers as Parquet or CSV, by the name's ending; the file appears only when whole."""
        out = Path(path)
        if out.suffix not in (".parquet", ".csv"):
            raise SettingsError(f"{out}: expected a name that ends in .parquet or .csv")
        with written_aside(out) as part:
            (pq.write_table if out.suffix == ".parquet" else pacsv.write_csv)(self.table, part)
        return out

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        names, rows = self._shown()
        lines = [self.headline, text_table("", names, rows) if rows else "", *self._below()]
        return "\n".join(line if "\n" in line else plain(line) for line in lines if line)

    def _repr_html_(self) -> str:
        names, rows = self._shown()
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{escape(plain(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        below = "".join(f"<p>{escape(plain(note))}</p>" for note in self._below())
        return (
            f"<p><b>{escape(plain(self.headline))}</b></p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
        )

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Headings and the first rows as text."""
        names = list(self.table.column_names)
        rows = self.table.slice(0, ROWS_SHOWN).to_pylist()
        return names, [[_cell(row[name]) for name in names] for row in rows]

    def _below(self) -> Sequence[str]:
        more = len(self) - ROWS_SHOWN
        return [*([f"... and {more:,} more"] if more > 0 else []), *self.notes]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" if isinstance(value, float) else str(value)
