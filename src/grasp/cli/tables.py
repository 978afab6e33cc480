"""Numbers and tables as text. Text of the corpus is shown as it is, control characters made visible."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError


def plain(text: object) -> str:
    """One line, without control or direction-changing characters, so that corpus text cannot rewrite the terminal."""
    line = " ".join(str(text).split())
    return "".join(ch if ch.isprintable() else "\ufffd" for ch in line)


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> None:
    """Print a table; the first `left` columns are text, the others numbers."""
    console = Console(highlight=False, soft_wrap=False)
    table = Table(title=plain(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left or heading == "text" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(plain(cell), overflow="ellipsis") for cell in row))
    console.print(table)
