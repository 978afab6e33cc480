"""Format numbers, names and tables as text.

Untrusted text is reduced to one line without control characters, so that it cannot steer a terminal (`plain`).
"""

import csv
import json
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite, isnan
from typing import Any

from grasp.errors import SettingsError

SIZES = ("bytes", "kB", "MB", "GB", "TB")
GAP = "  "
MAX_EXAMPLE_CHARS = 300  # characters of an example of an unusable record
MAX_CELL_CHARS = 60  # characters of a cell, except ids (people copy them) and a last column of text
SUFFIX_WIDTH = 6  # characters reserved for ` #2`, if two names are cut to the same text
MAX_SIGNS_SHOWN = 6
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
SKIPPED = {
    "empty": "empty documents",
    "whitespace": "documents of white space",
    "one_token": "rows of one token",
    "short_end": "short last rows of long documents",
    "cut": "ends of documents beyond corpus.max_rows_per_document",
    "cut_begin": "beginnings of conversations or prompts that exceed a row",
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
    "no_image": "records without an image",
    "no_class": "images without a class",
    "broken_image": "broken images",
}

REMEDIES = {
    "unwritten": "use a tokenizer whose template includes it (--tokenizer)",
    "cut_answer": "only the included parts carry loss; use a tokenizer whose template includes them (--tokenizer)",
    "no_calls": "they are ignored; use a tokenizer whose template includes them (--tokenizer)",
    "rewritten": "use a template that marks answers with {% generation %}, or --set corpus.loss_on=completion to train "
    "on the last answer only",
    "unmarked": "use a template that marks every answer with {% generation %} (--tokenizer)",
    "turn_order": "expected alternating user and assistant turns, optionally after a system turn",
}


def several(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several names as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def listed(names: str | Sequence[str], known: Collection[str] = ()) -> tuple[str, ...]:
    """Split names that are separated by commas, as commands accept them, into a tuple.

    A name that contains a comma is put in double quotes, as in CSV, unless it is one of the `known` names.

    Raises:
        SettingsError: a quote is not closed.
    """
    if not isinstance(names, str) or names in known:
        return several(names)
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
    spelled = {candidate.lower(): candidate for candidate in known}
    nested = [candidate for candidate in spelled if candidate.endswith(f".{name.lower()}")]
    close = nested or get_close_matches(name.lower(), spelled, n=1)
    return f" (did you mean {' or '.join(repr(spelled[candidate]) for candidate in close)}?)" if close else ""


def skipped_text(counts: Mapping[str, int]) -> str:
    """Format how many records were left out of a corpus, by reason."""
    return ", ".join(f"{count:,} {SKIPPED.get(reason, plain(reason))}" for reason, count in counts.items())


def skipped_lines(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one line per reason, with the positions of the first examples and what to do about them."""
    lines = []
    for reason, count in counts.items():
        places = ", ".join(plain(example, MAX_EXAMPLE_CHARS) for example in examples.get(reason, ()))
        remedy = REMEDIES.get(reason, "")
        lines.append(skipped_text({reason: count}) + f": {places}" * bool(places) + f"; {remedy}" * bool(remedy))
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
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


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
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(
        ch if ch in PRINTED_CONTROLS or unicodedata.category(ch) not in hidden else REPLACEMENT for ch in text
    )


def visible(word: str) -> str:
    """Return a word; white space becomes visible signs, at most `MAX_SIGNS_SHOWN`, and a line break is preserved."""
    if not word or not word.isspace():
        return word
    signs = "".join(SIGNS.get(ch, SIGNS[" "]) for ch in word)
    return signs[:MAX_SIGNS_SHOWN] + "..." * (len(signs) > MAX_SIGNS_SHOWN) + "\n" * ("\n" in word)


def different(names: Sequence[object], longest: int | None = None) -> list[str]:
    """Make names unique: append ` #2`, ` #3` to those that equal an earlier name, also after truncation."""
    shown = [str(label) if longest is None else plain(label, longest) for label in names]
    used: set[str] = set()
    counts: dict[str, int] = {}
    for place, short in enumerate(shown):
        spelled = short
        while spelled in used:
            counts[short] = counts.get(short, 1) + 1
            spelled = f"{short if longest is None else short[: longest - SUFFIX_WIDTH]} #{counts[short]}"
        used.add(spelled)
        shown[place] = spelled
    return shown


def text_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1, width: int = DEFAULT_WIDTH
) -> str:
    """Format a table: the first `left` columns and a column `text` are left-aligned, numbers right-aligned.

    A last column of text is truncated to `width`, other cells to `MAX_CELL_CHARS`; truncated names stay unique.
    """
    headings = [plain(heading) for heading in headings]
    columns = [
        _column(heading, [row[place] for row in rows], is_name=place < left) for place, heading in enumerate(headings)
    ]
    cells = [list(line) for line in zip(*columns, strict=True)]
    widths = [max(len(line[place]) for line in [headings, *cells]) for place in range(len(headings))]
    to_left = [place < left or heading == "text" for place, heading in enumerate(headings)]
    if to_left[-1]:
        used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        widths[-1] = max(20, min(widths[-1], width - used))
    lines = [plain(title)] if title else []
    for line in [headings, *cells]:
        aligned = [
            _cut(cell, size).ljust(size) if is_left else cell.rjust(size)
            for cell, size, is_left in zip(line, widths, to_left, strict=True)
        ]
        lines.append(GAP.join(aligned).rstrip())
    return "\n".join(lines)


def _column(heading: str, cells: Sequence[object], *, is_name: bool) -> list[str]:
    """Format one column; truncated names stay unique."""
    if heading == "text" or heading.endswith("_id"):
        return [plain(cell) for cell in cells]
    if not is_name:
        return [_cut(plain(cell), MAX_CELL_CHARS) for cell in cells]
    known = list(dict.fromkeys(map(str, cells)))
    spelled = dict(zip(known, different(known, MAX_CELL_CHARS), strict=True))
    return [spelled[str(cell)] for cell in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
