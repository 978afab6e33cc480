"""Numbers, names and tables as text. Untrusted text becomes one line that steers no terminal."""

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
LONGEST_EXAMPLE = 300  # of what is wrong with a record
LONGEST_CELL = 60  # of any column but a last one of text, and ids, which are there to be copied
ROOM = 6  # for the number behind a name that would be cut to the same as another
SIGNS_SHOWN = 6
SIGNS = {
    " ": "\N{OPEN BOX}",
    "\t": "\N{RIGHTWARDS ARROW TO BAR}",
    "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    "\r": "\N{SYMBOL FOR CARRIAGE RETURN}",
}
HUGE = 1e9  # from here on with an exponent
NOISE = 1e-6  # what adding up float32 in another order may leave of zero
WIDTH = 160  # where output is not a terminal
KEPT = "\n\t\u200c\u200d"  # the last two join letters in some languages and emoji; they change no order
REPLACEMENT = "\ufffd"
SKIPPED = {
    "empty": "empty documents",
    "whitespace": "documents of white space",
    "one_token": "rows of one token",
    "short_end": "short ends of documents that were cut into rows",
    "cut": "ends of documents that were cut",
    "cut_begin": "beginnings of conversations too long for a row",
    "turn_order": "conversations whose turns are out of order",
    "empty_answer": "conversations with an empty answer",
    "no_answer": "conversations without an answer",
    "untrained": "conversations of which no answer is marked to be trained",
    "trained_user": "conversations that train another turn than the assistant's",
    "bad_call": "conversations with a function_call that is no JSON of name and arguments",
    "refused": "conversations that the chat template refuses",
    "unwritten": "conversations of which the chat template does not write an answer",
    "rewritten": "conversations of which the chat template writes an answer otherwise once turns follow",
    "cut_answer": "parts of answers that the chat template does not write",
    "unmarked": "conversations of which the chat template does not say which {% generation %} is which answer's",
    "no_calls": "tool calls that the chat template does not write, of answers with words",
    "no_reasoning": "reasoning that the chat template does not write",
    "no_loss": "rows without a token that carries loss",
    "no_image": "records without an image",
    "no_class": "images without a class",
    "broken_image": "broken images",
}

REMEDIES = {
    "unwritten": "use a tokenizer whose template writes it (--tokenizer)",
    "cut_answer": "what it writes of them carries loss; use a tokenizer whose template writes them whole (--tokenizer)",
    "no_calls": "they are not read; use a tokenizer whose template writes them (--tokenizer)",
    "rewritten": "use a template that marks answers with {% generation %}, or --set corpus.loss_on=completion, so that "
    "the last answer alone carries loss",
    "unmarked": "use a template that marks every answer with {% generation %} (--tokenizer)",
    "turn_order": "expected user and assistant in turn, a system turn first",
}


def several(given: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several, as people give them."""
    return (given,) if isinstance(given, str) else tuple(given)


def listed(given: str | Sequence[str], known: Collection[str] = ()) -> tuple[str, ...]:
    """Names: one, several, or several in one text with commas between them, as commands take them.

    A name with a comma in it stands in double quotes, as in CSV; one that is among the known needs none.

    Raises:
        SettingsError: quotes that do not close.
    """
    if not isinstance(given, str) or given in known:
        return several(given)
    try:
        parts = next(csv.reader([given], skipinitialspace=True, strict=True), [])
    except csv.Error as err:
        raise SettingsError(f"got {given[:200]!r}, expected names separated by commas: {err}") from err
    return tuple(part.strip() for part in parts if part.strip())


def size_text(size: float) -> str:
    """Bytes for people."""
    power = 0
    while size >= 1000 and power < len(SIZES) - 1:
        size /= 1000
        power += 1
    return f"{size:,.0f} bytes" if power == 0 else f"{size:,.1f} {SIZES[power]}"


def duration_text(seconds: float) -> str:
    """A time for people."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Without a sign unless it is negative; a dash where there is none. What is not zero is never shown as zero."""
    if value is None or isnan(value):
        return "-"
    if abs(value) >= HUGE:
        return f"{value:{sign}.3g}"
    shown = f"{value:{sign}z.{digits}f}"
    return f"{value:{sign}.1g}" if abs(value) > NOISE and not float(shown) else shown


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign, of what is not zero one that shows: -0.0002, never +0.000."""
    return number(value, digits, "+")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'sciq'?)`, where a name that is there is spelled like it; case does not matter."""
    spelled = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), spelled, n=1)
    return f" (did you mean {spelled[close[0]]!r}?)" if close else ""


def skipped_text(counts: Mapping[str, int]) -> str:
    """Return what a corpus lost on the way to rows, by reason."""
    return ", ".join(f"{count:,} {SKIPPED.get(reason, plain(reason))}" for reason, count in counts.items())


def skipped_lines(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the same a line each, with the places of the first of each and what to do about it."""
    lines = []
    for reason, count in counts.items():
        places = ", ".join(plain(example, LONGEST_EXAMPLE) for example in examples.get(reason, ()))
        remedy = REMEDIES.get(reason, "")
        lines.append(skipped_text({reason: count}) + f": {places}" * bool(places) + f"; {remedy}" * bool(remedy))
    return lines


def json_text(
    value: Any, indent: int | None = 1, *, only_ascii: bool = True, default: Callable[[Any], Any] | None = None
) -> str:
    """JSON in which a number that is not finite is null; `default` gives values that JSON has for others."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=only_ascii, default=default)


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: not JSON, or nested deeper than anybody writes it.
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
    """One line, without control or direction-changing characters, so that corpus text cannot rewrite the terminal."""
    if longest is None:
        return printable(" ".join(str(text).split()))
    return _cut(printable(" ".join(str(text)[: 4 * longest].split())), longest)


def name(text: object) -> str:
    """A name of a slice, a target or a method: short enough for a table."""
    return plain(text, LONGEST_CELL)


def ending(text: object, longest: int = 240) -> str:
    """The end of a long text: of a prompt what the completion follows."""
    line = plain(str(text)[-4 * longest :])
    return line if len(line) <= longest else "..." + line[3 - longest :]


def printable(text: str) -> str:
    """The same for text of several lines, tabs and all."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(ch if ch in KEPT or unicodedata.category(ch) not in hidden else REPLACEMENT for ch in text)


def visible(word: str) -> str:
    """A word; white space that stands for itself gets signs, of a long run the first few, and keeps a line break."""
    if not word or not word.isspace():
        return word
    signs = "".join(SIGNS.get(ch, SIGNS[" "]) for ch in word)
    return signs[:SIGNS_SHOWN] + "..." * (len(signs) > SIGNS_SHOWN) + "\n" * ("\n" in word)


def different(names: Sequence[object], longest: int | None = None) -> list[str]:
    """The names, with ` #2`, ` #3` behind those that are, or are cut to, the same as one before."""
    shown = [str(one) if longest is None else plain(one, longest) for one in names]
    taken: set[str] = set()
    again: dict[str, int] = {}
    for place, short in enumerate(shown):
        spelled = short
        while spelled in taken:
            again[short] = again.get(short, 1) + 1
            spelled = f"{short if longest is None else short[: longest - ROOM]} #{again[short]}"
        taken.add(spelled)
        shown[place] = spelled
    return shown


def text_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1, width: int = WIDTH
) -> str:
    """A table as text: the first `left` columns and any column `text` to the left, numbers to the right.

    A last column of text is cut to `width`, other cells at `LONGEST_CELL`; names that are cut stay different.
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
    """One column as text; names that are cut stay different."""
    if heading == "text" or heading.endswith("_id"):
        return [plain(cell) for cell in cells]
    if not is_name:
        return [_cut(plain(cell), LONGEST_CELL) for cell in cells]
    known = list(dict.fromkeys(map(str, cells)))
    spelled = dict(zip(known, different(known, LONGEST_CELL), strict=True))
    return [spelled[str(cell)] for cell in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
