"""Numbers and names as the page sets them: a true minus, a dash where there is none."""

from math import isnan

from grasp import text

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign."""
    return _set(text.signed(value, digits))


def number(value: float | None, digits: int = 3) -> str:
    """Without a sign unless it is negative."""
    return _set(text.number(value, digits))


def interval(low: float, high: float, digits: int = 3) -> str:
    """Both ends; empty where there is none."""
    return "" if isnan(low) or isnan(high) else f"[{signed(low, digits)}, {signed(high, digits)}]"


def _set(spelled: str) -> str:
    return DASH if spelled == "-" else spelled.replace("-", MINUS)
