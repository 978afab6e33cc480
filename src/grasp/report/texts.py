"""Untrusted text and numbers as people read them."""

import unicodedata
from collections.abc import Mapping, Sequence
from math import isnan

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
JOINERS = "\u200c\u200d"  # needed to write some languages and emoji; they change no order
LONGEST_NAME = 60
LONGEST_TEXT = 600
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
SKIPPED = {
    "empty": "empty documents",
    "whitespace": "documents of white space",
    "one_token": "rows of one token",
    "cut": "ends of documents that were cut",
    "no_image": "records without an image",
    "no_class": "images without a class",
    "broken_image": "broken images",
}


def plain(text: object, longest: int = LONGEST_TEXT) -> str:
    """One line of at most `longest` characters, without control or direction-changing characters."""
    line = " ".join(str(text)[: 4 * longest].split())
    shown = "".join(ch if _is_shown(ch) else REPLACEMENT for ch in line)
    return shown if len(shown) <= longest else shown[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def name(text: object) -> str:
    """A name of a slice, a target or a method: short enough for a table."""
    return plain(text, LONGEST_NAME)


def unique_names(texts: Sequence[object]) -> list[str]:
    """Names that stay different when they are cut."""
    out: list[str] = []
    for text in texts:
        short = spelled = name(text)
        again = 2
        while spelled in out:
            spelled, again = f"{short[: LONGEST_NAME - 5]} #{again}", again + 1
        out.append(spelled)
    return out


def ending(text: object, longest: int = 240) -> str:
    """The end of a long text: of a prompt what the completion follows."""
    line = plain(str(text)[-4 * longest :], 4 * longest)
    return line if len(line) <= longest else "\N{HORIZONTAL ELLIPSIS}" + line[1 - longest :]


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign; a dash where there is none."""
    return DASH if value is None or isnan(value) else f"{value:+z.{digits}f}".replace("-", MINUS)


def number(value: float | None, digits: int = 3) -> str:
    """Without a sign unless it is negative; a dash where there is none."""
    return DASH if value is None or isnan(value) else f"{value:z.{digits}f}".replace("-", MINUS)


def interval(low: float, high: float) -> str:
    """Both ends; empty where there is none."""
    return "" if isnan(low) or isnan(high) else f"[{signed(low)}, {signed(high)}]"


def plotted(text: object) -> str:
    """For a figure, where a few tags would be read as markup."""
    return name(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _is_shown(ch: str) -> bool:
    return ch in JOINERS or unicodedata.category(ch) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def skipped_text(counts: Mapping[str, int]) -> str:
    """What a corpus lost on the way to rows, by reason."""
    return ", ".join(f"{count:,} {SKIPPED.get(reason, reason)}" for reason, count in counts.items())
