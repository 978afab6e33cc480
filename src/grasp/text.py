"""Numbers, names and tables as text. Untrusted text becomes one line that steers no terminal."""

import unicodedata
from collections.abc import Sequence

SIZES = ("bytes", "kB", "MB", "GB", "TB")
GAP = "  "
LONGEST_CELL = 60  # of any column but a last one of text, and ids, which are there to be copied
ROOM = 6  # for the number behind a name that would be cut to the same as another
WIDTH = 160  # where output is not a terminal
JOINERS = "\u200c\u200d"  # needed to write some languages and emoji; they change no order
REPLACEMENT = "\ufffd"


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
    return "".join(ch if ch == "\n" or _is_shown(ch) else REPLACEMENT for ch in text)


def _is_shown(ch: str) -> bool:
    return ch in JOINERS or unicodedata.category(ch) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def different(names: Sequence[str]) -> list[str]:
    """The names, with ` #2`, ` #3` behind those that would be the same as one before."""
    taken: set[str] = set()
    out = []
    for name in names:
        spelled, again = name, 2
        while spelled in taken:
            spelled, again = f"{name} #{again}", again + 1
        taken.add(spelled)
        out.append(spelled)
    return out


def text_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1, width: int = WIDTH
) -> str:
    """A table as text: the first `left` columns and any column `text` to the left, numbers to the right.

    A last column of text is cut to `width`, other cells at `LONGEST_CELL`; names that are cut stay different.
    """
    columns = [
        _column(heading, [row[place] for row in rows], is_name=place < left) for place, heading in enumerate(headings)
    ]
    cells = [list(line) for line in zip(*columns, strict=True)]
    widths = [max(len(line[place]) for line in [list(headings), *cells]) for place in range(len(headings))]
    to_left = [place < left or heading == "text" for place, heading in enumerate(headings)]
    if to_left[-1]:
        used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        widths[-1] = max(20, min(widths[-1], width - used))
    lines = [plain(title)] if title else []
    for line in [list(headings), *cells]:
        aligned = [
            _cut(cell, size).ljust(size) if is_left else cell.rjust(size)
            for cell, size, is_left in zip(line, widths, to_left, strict=True)
        ]
        lines.append(GAP.join(aligned).rstrip())
    return "\n".join(lines)


def _column(heading: str, cells: Sequence[object], *, is_name: bool) -> list[str]:
    """One column as text; names that are cut stay different."""
    if heading == "text" or heading.endswith("_id"):
        return [plain(cell) for cell in cells]
    if not is_name:
        return [_cut(plain(cell), LONGEST_CELL) for cell in cells]
    known = list(dict.fromkeys(map(str, cells)))
    long = [name for name in known if len(plain(name)) > LONGEST_CELL]
    spelled = dict(zip(long, different([_cut(plain(name), LONGEST_CELL - ROOM) for name in long]), strict=True))
    return [spelled.get(str(cell), plain(cell)) for cell in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
