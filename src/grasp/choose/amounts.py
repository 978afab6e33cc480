"""What budgets, floors, caps and weighted targets look like, and what they come to in numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grasp.errors import SettingsError
from grasp.text import did_you_mean, several

Unit = Literal["rows", "tokens", "documents"]
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMBT])?\s*(rows?|tokens?|documents?)?")
_UNITS: dict[str, Unit] = {"r": "rows", "t": "tokens", "d": "documents"}
_TIMES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}
BUDGETS = "20%, 5000, 5000rows, 2Mtokens, 20%tokens or 300documents"


@dataclass(frozen=True, slots=True)
class Amount:
    """So many rows, tokens or documents, or a share of a whole."""

    value: float  # a number, or a share between 0 and 1
    is_share: bool
    unit: Unit | None = None  # None: not said

    def resolve(self, whole: int, *, up: bool = False) -> int:
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


def parse_budget(given: str | float) -> Amount:
    """`20%` of the rows, `5000` rows, `2Mtokens`, `300documents`; a float is a share, 1.0 all of it, an int is rows.

    Raises:
        SettingsError: anything else, a share above 100 %, a part of a row, or nothing at all.
    """
    if isinstance(given, float):
        if not 0 < given <= 1:
            raise SettingsError(f"budget: got {given!r}; a float is a share, above 0 and at most 1.0, an int is rows")
        return Amount(given, True)
    amount = _amount(str(given), "budget", BUDGETS)
    if amount.value == 0:
        raise SettingsError(f"budget: got {given!r}, expected more than nothing, e.g. {BUDGETS}")
    return amount


def parse_tokens(given: str | float | None) -> float | None:
    """`100B`: tokens to train on; None: not said.

    Raises:
        SettingsError: anything else, or nothing at all.
    """
    if given is None:
        return None
    text = f"{given:.0f}" if isinstance(given, float) and math.isfinite(given) else str(given)
    amount = _amount(text, "train_tokens", "100B")
    if amount.value == 0 or amount.is_share or amount.unit not in (None, "tokens"):
        raise SettingsError(f"train_tokens: got {given!r}, expected a number of tokens, e.g. 100B")
    return amount.value


def parse_bounds(texts: str | Sequence[str], name: str) -> tuple[Bound, ...]:
    """`Games:5%`, `Games:500`, or `5%` for every value of the label; a value may hold colons, the last one counts.

    A value goes by its name, `(no label)` and `(empty)` among them; `*` is a value as any other.

    Raises:
        SettingsError: not an amount, or the same value twice.
    """
    bounds: list[Bound] = []
    for text in several(texts):
        value, colon, amount = text.rpartition(":")
        bounds.append(
            Bound(value if colon else None, _amount(amount, f"{name} {text}", "5%, 500, Games:5% or Games:500"))
        )
    names = ["every value" if bound.value is None else bound.value.strip() for bound in bounds]
    twice = sorted({one for one in names if names.count(one) > 1})
    if twice:
        raise SettingsError(f"{name}: got {', '.join(twice)} more than once; give every value one {name}")
    return tuple(bounds)


def parse_share(text: str, name: str) -> float:
    """`30%`, a share of the whole.

    Raises:
        SettingsError: anything else.
    """
    amount = _amount(text, name, "30%")
    if not amount.is_share or amount.unit is not None:
        raise SettingsError(f"{name}: got {text!r}, expected a share, e.g. 30%")
    return amount.value


def weighted_targets(
    given: str | Sequence[str] | Mapping[str, float] | None, known: Sequence[str]
) -> Mapping[str, float]:
    """Targets and their weights, which add up to 1.

    Args:
        given: `sciq`, `sciq=2,openbookqa=1`, names, or names and weights; None: the one that there is.
        known: targets of the artifact; names with a comma or `=` in them are found by it.
    Raises:
        SettingsError: none named where there are several, an unknown one, one twice, or a weight that is not a
            positive number.
    """
    has = f"the artifact has {', '.join(known)}"
    if given is None:
        if len(known) != 1:
            raise SettingsError(f"target: got none, and {has}; name one, or weigh several: {known[0]}=2,{known[1]}=1")
        return {known[0]: 1.0}
    if isinstance(given, str):
        pairs = _pairs(given, known, has)
    else:
        weighed = given if isinstance(given, Mapping) else None
        pairs = [(name, 1.0 if weighed is None else float(weighed[name])) for name in given]
    weights: dict[str, float] = {}
    for name, weight in pairs:
        if name not in known:
            raise SettingsError(f"target: got {name!r}{did_you_mean(name, known)}, {has}")
        if name in weights:
            raise SettingsError(f"target: got {name} more than once; give it one weight, e.g. {name}=2")
        if not 0 < weight < math.inf:
            raise SettingsError(f"target: got {name} with the weight {weight:g}, expected a number above 0")
        weights[name] = weight
    if not weights:
        raise SettingsError(f"target: got none; {has}")
    most = max(weights.values())  # sums of the largest numbers there are would overflow
    total = sum(weight / most for weight in weights.values())
    return {name: weight / most / total for name, weight in weights.items()}


def _pairs(text: str, known: Sequence[str], has: str) -> list[tuple[str, float]]:
    """Names and weights of a list; where one name begins another, the longer one is meant."""
    names = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    part = re.compile(rf"\s*(?:({names})|([^,=]+?))\s*(?:=\s*([^,]*))?(?:,|$)")
    pairs: list[tuple[str, float]] = []
    at = 0
    while at < len(text):
        found = part.match(text, at)
        if found is None:
            raise SettingsError(f"target: got {text[at:]!r}, expected target or target=weight; {has}")
        try:
            pairs.append((found[1] or found[2], 1.0 if found[3] is None else float(found[3])))
        except ValueError as err:
            raise SettingsError(
                f"target: got {found[0].strip(' ,')!r}, expected a target, or target=weight with a weight above 0"
            ) from err
        at = found.end()
    return pairs


def _amount(text: str, where: str, expected: str) -> Amount:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"{where}: got {text.strip()!r}, expected e.g. {expected}")
    number, scale, unit_text = float(found[1]), found[2] or "", found[3] or ""
    unit: Unit | None = _UNITS[unit_text[0]] if unit_text else None
    if scale == "%":
        if number > 100:
            raise SettingsError(f"{where}: got {number:g}%, expected at most 100%")
        return Amount(number / 100, True, unit)
    value = number * _TIMES[scale]
    if not math.isfinite(value) or value != int(value):
        raise SettingsError(f"{where}: got {text.strip()!r}; a share is written with a percent sign, e.g. {expected}")
    return Amount(value, False, unit)
