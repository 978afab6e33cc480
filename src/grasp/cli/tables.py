"""Numbers and tables as text. Text of the corpus is shown on one line, control characters made visible."""

import shutil
import sys
from collections.abc import Sequence

SIZES = ("bytes", "kB", "MB", "GB", "TB")
WIDTH_OF_FILES = 160  # where output is not a terminal
GAP = "  "
LONGEST_CELL = 60  # of any column but a last one of text, and ids, which are there to be copied
ROOM = 6  # for the number behind a name that would be cut to the same as another
MOST_LINES = 30  # of a label's values that are printed


def size_text(size: float) -> str:
    """Bytes for people."""
    power = 0
    while size >= 1000 and power < len(SIZES) - 1:
        size /= 1000
        power += 1
    return f"{size:,.0f} bytes" if power == 0 else f"{size:,.1f} {SIZES[power]}"


def plain(text: object) -> str:
    """One line, without control or direction-changing characters, so that corpus text cannot rewrite the terminal."""
    return printable(" ".join(str(text).split()))


def printable(text: str) -> str:
    """The same for text of several lines."""
    return "".join(ch if ch.isprintable() or ch == "\n" else "\ufffd" for ch in text)


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> None:
    """Print a table: the first `left` columns and any column `text` to the left, numbers to the right.

    A last column of text is cut to the width of the terminal, other cells at `LONGEST_CELL`; they stay different.
    """
    columns = [
        _column(heading, [row[place] for row in rows], is_name=place < left) for place, heading in enumerate(headings)
    ]
    cells = [list(line) for line in zip(*columns, strict=True)]
    widths = [max(len(line[place]) for line in [list(headings), *cells]) for place in range(len(headings))]
    to_left = [place < left or heading == "text" for place, heading in enumerate(headings)]
    if to_left[-1]:
        used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        widths[-1] = max(20, min(widths[-1], _columns() - used))
    print(plain(title))
    for line in [list(headings), *cells]:
        aligned = [
            _cut(cell, width).ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, to_left, strict=True)
        ]
        print(GAP.join(aligned).rstrip())


def _column(heading: str, cells: Sequence[object], *, is_name: bool) -> list[str]:
    """One column as text; names that are cut stay different."""
    if heading == "text" or heading.endswith("_id"):
        return [plain(cell) for cell in cells]
    if not is_name:
        return [_cut(plain(cell), LONGEST_CELL) for cell in cells]
    from grasp.predict.labels import different

    known = list(dict.fromkeys(map(str, cells)))
    long = [name for name in known if len(plain(name)) > LONGEST_CELL]
    spelled = dict(zip(long, different([_cut(plain(name), LONGEST_CELL - ROOM) for name in long]), strict=True))
    return [spelled.get(str(cell), plain(cell)) for cell in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES
