"""Format numbers, names and tables as text.

`plain` reduces untrusted text, such as that of a corpus, to one line without control characters, so that it cannot
steer a terminal. `number`, `size_text` and `duration_text` format values, `text_table` tables, and `skipped_text` what
was left out of a corpus.
"""

import csv
import json
import shutil
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from math import isfinite, isnan
from typing import Any

from grasp.errors import SettingsError

SIZES = ("bytes", "kB", "MB", "GB", "TB")
GAP = "  "
MAX_EXAMPLE_CHARS = 300  # characters of an example of an unusable record
MAX_CELL_CHARS = 60  # characters of a cell, except ids (people copy them) and a last column of text
MIN_CELL_CHARS = 20  # characters to which names, ids and a last column of text are shortened on a narrow terminal
SUFFIX_WIDTH = 6  # characters reserved for ` #2`, if two names are cut to the same text
MAX_SIGNS_SHOWN = 6
# How white space is shown where it matters, e.g. a token that is a line break.
SIGNS = {
    " ": "\N{OPEN BOX}",
    "\t": "\N{RIGHTWARDS ARROW TO BAR}",
    "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    "\r": "\N{SYMBOL FOR CARRIAGE RETURN}",
}
MIN_EXPONENT_VALUE = 1e9  # larger numbers are printed with an exponent
ROUNDING_NOISE = 1e-6  # rounding error of float32 sums; smaller numbers are printed as zero
DEFAULT_WIDTH = 160  # columns, if the output is not a terminal
PRINTED_CONTROLS = "\n\t\u200c\u200d"  # the last two join letters in some scripts and emoji; they reorder nothing
REPLACEMENT = "\ufffd"
# Reasons for which records, or parts of them, are left out of a corpus, as counts of them are printed.
SKIPPED = {
    "empty": "empty documents",
    "whitespace": "documents of white space",
    "one_token": "rows of one token",
    "short_end": "short last rows of long documents",
    "cut": "ends of documents beyond corpus.max_rows_per_document",
    "cut_begin": "conversations or prompts lose their beginning, to fit a row",
    "cut_end": "answers of preference pairs lose their end, to fit a row",
    "long_prompt": "preference pairs whose prompt alone fills a row",
    "turn_order": "conversations whose turns are out of order",
    "empty_answer": "conversations with an empty answer",
    "no_answer": "conversations without an answer",
    "untrained": "conversations without an answer marked for training",
    "trained_user": "conversations with a turn other than the assistant's marked for training",
    "bad_call": "conversations with a function_call that is not JSON with a name and arguments",
    "refused": "conversations rejected by the chat template",
    "unwritten": "conversations with an answer that the chat template omits",
    "rewritten": "conversations with an answer that the chat template changes when later turns follow",
    "cut_answer": "parts of answers that the chat template omits",
    "unmarked": "conversations whose {% generation %} blocks cannot be matched to answers",
    "no_calls": "tool calls that the chat template omits from answers with text",
    "no_reasoning": "reasoning that the chat template omits",
    "no_loss": "rows without a token that carries loss",
    "choice_space": "choices whose surrounding white space differs from that of others",
}

TRUNCATED = ("cut_begin", "cut_end")  # documents that are not left out, but shortened
# What the user can do about it, by the same reasons.
REMEDIES = {
    "unwritten": "use a tokenizer whose template includes it (--tokenizer)",
    "cut_answer": "only the included parts carry loss; use a tokenizer whose template includes them (--tokenizer)",
    "no_calls": "they are ignored; use a tokenizer whose template includes them (--tokenizer)",
    "rewritten": "use a template that marks answers with {% generation %}, or --set corpus.loss_on=completion to train "
    "on the last answer only",
    "unmarked": "use a template that marks every answer with {% generation %} (--tokenizer)",
    "long_prompt": "increase corpus.max_length",
    "choice_space": "it is removed: every choice is separated from its prompt alike",
    "turn_order": "expected alternating user and assistant turns, optionally after a system turn",
}


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or a sequence of names, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def parse_names(names: str | Sequence[str], known: Collection[str] = ()) -> tuple[str, ...]:
    """Parse names that are separated by commas, as commands accept them, to a tuple.

    A name that contains a comma is put in double quotes, as in CSV, unless it is one of the `known` names.

    Raises:
        SettingsError: a quote is not closed.
    """
    if not isinstance(names, str) or names in known:
        return as_names(names)
    try:
        parts = next(csv.reader([names], skipinitialspace=True, strict=True), [])
    except csv.Error as err:
        raise SettingsError(f"got {names[:200]!r}, expected names separated by commas: {err}") from err
    return tuple(part.strip() for part in parts if part.strip())


def size_text(size: float) -> str:
    """Format a number of bytes, e.g. `1.5 MB`."""
    power = 0
    while size >= 1000 and power < len(SIZES) - 1:
        size /= 1000
        power += 1
    return f"{size:,.0f} bytes" if power == 0 else f"{size:,.1f} {SIZES[power]}"


def count_text(count: float) -> str:
    """Return a number of parameters or tokens with three digits, such as `1.2B`."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    scale, unit = next(((scale, unit) for scale, unit in units if count >= 0.9995 * scale), (1.0, ""))
    return f"{count / scale:.3g}{unit}"


def duration_text(seconds: float) -> str:
    """Format a duration in seconds, e.g. `2 h 05 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Format a number; None and NaN become a dash. A number other than zero is never printed as zero."""
    if value is None or isnan(value):
        return "-"
    if abs(value) >= MIN_EXPONENT_VALUE:
        return f"{value:{sign}.3g}"
    shown = f"{value:{sign}z.{digits}f}"
    return f"{value:{sign}.1g}" if abs(value) > ROUNDING_NOISE and not float(shown) else shown


def signed(value: float | None, digits: int = 3) -> str:
    """Format a number with its sign; a number other than zero keeps a digit: -0.0002, never +0.000."""
    return number(value, digits, "+")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'sciq'?)` if a known name is spelled similarly, ignoring case; else an empty text.

    The last part of a nested name, such as `source` of `metadata.source`, is preferred.
    """
    known_by_lower = {candidate.lower(): candidate for candidate in known}
    nested = [candidate for candidate in known_by_lower if candidate.endswith(f".{name.lower()}")]
    close = nested or get_close_matches(name.lower(), known_by_lower, n=1)
    return f" (did you mean {' or '.join(repr(known_by_lower[match]) for match in close)}?)" if close else ""


def skipped_text(counts: Mapping[str, int]) -> str:
    """Format how many records were left out of a corpus, by reason."""
    return ", ".join(f"{count:,} {SKIPPED.get(reason, plain(reason))}" for reason, count in counts.items())


def skipped_lines(
    counts: Mapping[str, int], examples: Mapping[str, Sequence[str]], verb: str = "", of: int | None = None
) -> list[str]:
    """Return one line per reason, with the positions of the first examples and what to do about them.

    Args:
        counts: number of records by reason.
        examples: positions of the first ones by reason.
        verb: begin of a line, such as `skipped`; that of truncated documents is `truncated`.
        of: number of all documents, which is printed for truncated ones.
    """
    lines = []
    for reason, count in counts.items():
        is_truncated = reason in TRUNCATED
        line = f"{count:,}{f' of {of:,}' if of and is_truncated else ''} {SKIPPED.get(reason, plain(reason))}"
        line = f"{'truncated' if is_truncated else verb}: {line}" if verb else line
        if locations := ", ".join(plain(example, MAX_EXAMPLE_CHARS) for example in examples.get(reason, ())):
            line += f": {locations}"
        lines.append(f"{line}; {REMEDIES[reason]}" if reason in REMEDIES else line)
    return lines


def json_text(
    value: Any, indent: int | None = 1, *, only_ascii: bool = True, default: Callable[[Any], Any] | None = None
) -> str:
    """Serialise to JSON with null for numbers that are not finite; `default` converts other types."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=only_ascii, default=default)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def plain(text: object, longest: int | None = None) -> str:
    """Return one line without control or direction-changing characters, so that corpus text cannot steer a terminal."""
    if longest is None:
        return printable(" ".join(str(text).split()))
    return _cut(printable(" ".join(str(text)[: 4 * longest].split())), longest)


def name(text: object) -> str:
    """Shorten the name of a slice, a target or a method for a table."""
    return plain(text, MAX_CELL_CHARS)


def ending(text: object, longest: int = 240) -> str:
    """Return the end of a long text, e.g. the part of a prompt that precedes the completion."""
    line = plain(str(text)[-4 * longest :])
    return line if len(line) <= longest else "..." + line[3 - longest :]


def printable(text: str) -> str:
    """Replace control and direction-changing characters; line breaks and tabs are preserved."""
    # Unicode categories: control, format, surrogate, private use, unassigned, line and paragraph separator
    replaced = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(
        ch if ch in PRINTED_CONTROLS or unicodedata.category(ch) not in replaced else REPLACEMENT for ch in text
    )


def visible(word: str) -> str:
    """Return a word; white space becomes visible signs, at most `MAX_SIGNS_SHOWN`, and a line break is preserved."""
    if not word or not word.isspace():
        return word
    signs = "".join(SIGNS.get(ch, SIGNS[" "]) for ch in word)
    return signs[:MAX_SIGNS_SHOWN] + "..." * (len(signs) > MAX_SIGNS_SHOWN) + "\n" * ("\n" in word)


def unique_names(names: Sequence[object], longest: int | None = None) -> list[str]:
    """Make names unique: append ` #2`, ` #3` to those that equal an earlier name, also after truncation.

    Args:
        names: the names.
        longest: maximum number of characters of a name; None: names are not truncated.
    """
    unique: list[str] = []
    used: set[str] = set()
    counts: dict[str, int] = {}  # number of occurrences by truncated name
    for full_name in names:
        short = str(full_name) if longest is None else plain(full_name, longest)
        candidate = short
        while candidate in used:
            counts[short] = counts.get(short, 1) + 1
            candidate = f"{short if longest is None else short[: longest - SUFFIX_WIDTH]} #{counts[short]}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def text_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1, wrap: bool = True
) -> str:
    """Format a table: the first `left` columns and a column `text` are left-aligned, numbers right-aligned.

    Cells have at most `MAX_CELL_CHARS`; truncated names stay unique. On a narrower terminal, a last column of text is
    truncated, then names and ids are shortened in the middle, and then the last columns continue below.

    Args:
        title: line above the table; empty: none.
        headings: names of the columns.
        rows: values of each row.
        left: number of columns, from the first one, that hold names.
        wrap: whether columns that do not fit continue below, after the names.
    """
    terminal = shutil.get_terminal_size((0, 0)).columns  # 0: the output is not a terminal
    width = terminal or DEFAULT_WIDTH
    headings = [plain(heading) for heading in headings]
    columns: list[list[str]] = []
    for k, heading in enumerate(headings):
        values = [row[k] for row in rows]
        if heading == "text" or heading.endswith("_id"):
            columns.append([plain(value) for value in values])
        elif k >= left:
            columns.append([_cut(plain(value), MAX_CELL_CHARS) for value in values])
        else:  # truncated names stay unique
            names = list(dict.fromkeys(map(str, values)))
            short_name = dict(zip(names, unique_names(names, MAX_CELL_CHARS), strict=True))
            columns.append([short_name[str(value)] for value in values])
    cells = [list(line) for line in zip(*columns, strict=True)]
    widths = [max(len(line[k]) for line in [headings, *cells]) for k in range(len(headings))]
    is_left_aligned = [k < left or heading == "text" for k, heading in enumerate(headings)]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    name_columns = [k for k, heading in enumerate(headings) if k < left or heading.endswith("_id")] if terminal else []
    for k in [len(widths) - 1] * is_left_aligned[-1] + name_columns:  # the last column of text first
        shortest = max(MIN_CELL_CHARS, len(headings[k]))
        shorter = max(min(widths[k], shortest), widths[k] - max(0, excess))
        if k in name_columns and shorter < widths[k]:
            end = (shorter - 3) // 2
            short = {
                cell: cell if len(cell) <= shorter else f"{cell[: shorter - 3 - end]}...{cell[-end:]}"
                for cell in (line[k] for line in cells)
            }
            if len(set(short.values())) < len(short):
                continue  # shortened names would be the same
            for line in cells:
                line[k] = short[line[k]]
        excess, widths[k] = excess - widths[k] + shorter, shorter
    ends = list(accumulate(size + len(GAP) for size in widths))
    n_fitting = max(left + 1, sum(end - len(GAP) <= width for end in ends))
    if terminal and wrap and left and n_fitting < len(headings):
        first_columns, below = range(n_fitting), (*range(left), *range(n_fitting, len(headings)))
        parts = [
            ([headings[k] for k in block], [[line[k] for k in block] for line in rows])
            for block in (first_columns, below)
        ]
        return "\n".join(
            text_table(caption, *part, left=left) for caption, part in zip((title, ""), parts, strict=True)
        )
    lines = [plain(title)] if title else []
    for line in [headings, *cells]:
        aligned = [
            _cut(cell, size).ljust(size) if is_left else cell.rjust(size)
            for cell, size, is_left in zip(line, widths, is_left_aligned, strict=True)
        ]
        lines.append(GAP.join(aligned).rstrip())
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    """Truncate a text to a number of characters; the last three are dots."""
    return text if len(text) <= width else text[: width - 3] + "..."
