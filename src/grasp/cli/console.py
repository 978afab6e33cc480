"""Tables on the terminal."""

import shutil
import sys
from collections.abc import Sequence

from grasp.text import WIDTH, text_table

MOST_LINES = 30  # of a label's values that are printed


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> None:
    """Print a table, as wide as the terminal is."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(text_table(title, headings, rows, left=left, width=width))
