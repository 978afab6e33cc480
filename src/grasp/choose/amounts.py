"""What budgets, floors, caps and weighted targets look like on a command line, and what they come to in numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grasp.errors import SettingsError

Unit = Literal["rows", "tokens"]
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMB])?\s*(rows?|tokens?)?")
_TIMES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000}
BUDGETS = "20%, 5000, 5000rows, 2Mtokens or 20%tokens"


@dataclass(frozen=True, slots=True)
class Amount:
    """So many rows or tokens, or a share of a whole."""

    value: float  # a number, or a share between 0 and 1
    is_share: bool
    unit: Unit | None = None  # None: not said

    def of(self, whole: int, *, up: bool = False) -> int:
        """The amount as a number, a share being taken of `whole`; rounded to the nearest, or up."""
        if not self.is_share:
            return int(self.value)
        exact = self.value * whole
        return math.ceil(exact - 1e-9 * whole) if up else math.floor(exact + 1e-9 * whole)


@dataclass(frozen=True, slots=True)
class Bound:
    """A floor or a cap: for one value of a label, or for each of them."""

    value: str | None  # None: each
    amount: Amount


def parse_budget(text: str, flag: str = "--budget") -> Amount:
    """`20%` of the rows, `5000` rows, `2Mtokens`, `20%tokens`.

    Raises:
        SettingsError: anything else, a share above 100 %, a part of a row, or nothing at all.
    """
    amount = _amount(text, flag, BUDGETS)
    if amount.value == 0:
        raise SettingsError(f"{flag}: got {text!r}, expected more than nothing, e.g. {BUDGETS}")
    return amount


def parse_bounds(texts: Sequence[str], flag: str) -> tuple[Bound, ...]:
    """`Games:5%`, `Games:500`, or `5%` for every value of the label; a value may hold colons, the last one counts.

    A value goes by its name, `(no label)` and `(empty)` among them; `*` is a value as any other.

    Raises:
        SettingsError: not an amount, or the same value twice.
    """
    bounds: list[Bound] = []
    for text in texts:
        name, colon, amount = text.rpartition(":")
        value = name if colon else None
        bounds.append(Bound(value, _amount(amount, f"{flag} {text}", "5%, 500, Games:5% or Games:500")))
    names = ["every value" if bound.value is None else bound.value.strip() for bound in bounds]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"{flag}: got {', '.join(twice)} more than once; give every value one {flag[2:]}")
    return tuple(bounds)


def parse_share(text: str, flag: str) -> Amount:
    """`30%`, a share of the whole.

    Raises:
        SettingsError: anything else.
    """
    amount = _amount(text, flag, "30%")
    if not amount.is_share or amount.unit is not None:
        raise SettingsError(f"{flag}: got {text!r}, expected a share, e.g. 30%")
    return amount


def parse_targets(text: str, flag: str = "--target") -> Mapping[str, float]:
    """`sciq`, or `sciq=2,openbookqa=1`: targets and their weights, in the order given; the weights add up to 1.

    Raises:
        SettingsError: no target, one twice, or a weight that is not a positive number.
    """
    weights: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        weight = _positive(number) if equals else 1.0
        if not name or weight is None:
            raise SettingsError(f"{flag}: got {part!r}, expected a target, or target=weight with a weight above 0")
        if name in weights:
            raise SettingsError(f"{flag}: got {name} more than once; give it one weight, e.g. {name}=2")
        weights[name] = weight
    if not weights:
        raise SettingsError(f"{flag}: got {text!r}, expected targets, e.g. sciq or sciq=2,openbookqa=1")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _amount(text: str, where: str, expected: str) -> Amount:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"{where}: got {text.strip()!r}, expected e.g. {expected}")
    number, scale, unit_text = float(found[1]), found[2] or "", found[3] or ""
    unit: Unit | None = ("tokens" if unit_text.startswith("t") else "rows") if unit_text else None
    if scale == "%":
        if number > 100:
            raise SettingsError(f"{where}: got {number:g}%, expected at most 100%")
        return Amount(number / 100, True, unit)
    value = number * _TIMES[scale]
    if value != int(value):
        raise SettingsError(f"{where}: got {text.strip()!r}; a share is written with a percent sign, e.g. {expected}")
    return Amount(value, False, unit)
