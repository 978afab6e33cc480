"""Selection budgets and constraints, and the exact optimum for additive objectives.

A budget, floors and caps for the values of a label, rows that are out of the question. Costs are rows (1 each) or
tokens, and so are floors and caps. A ledger keeps what is left while rows are taken. It never lets a floor get out of
reach: what the open floors still need is set aside. Rows that are refused stay refused while rows are taken, but for
what a floor in tokens had set aside and did not need.
Shape letters: N rows, G values of the label, P rows of the pool.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.arrays import F64, I32, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.where import LabelColumn
from grasp.corpus.labels import label_text
from grasp.corpus.values import plain_values
from grasp.errors import SettingsError
from grasp.store.checksummed_parquet import read_checksummed
from grasp.store.contents import readable_table
from grasp.text import several

Unit = Literal["rows", "tokens", "documents"]
BUDGETS = "20%, 5000, 5000rows, 2Mtokens, 20%tokens or 300documents"
OPTIMAL = "optimal: the objective is additive over rows"
SHOWN = 5
NAME_SHOWN = 60
NAMES = ("row_id", "doc_id")
EXPECTED = "Parquet with a column row_id or doc_id, or text with one name a line"

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMBT])?\s*(rows?|tokens?|documents?)?")
_UNITS: dict[str, Unit] = {"r": "rows", "t": "tokens", "d": "documents"}
_TIMES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}


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


Bounds: TypeAlias = Mapping[str | None, Amount]  # floors or caps, by value of a label; None: of every other value


def parse_amount(text: str, where: str, expected: str) -> Amount:
    """`20%`, `5000`, `2Mtokens`, `300documents`: a number or a share, and of what.

    Raises:
        SettingsError: anything else, a share above 100 %, or a part of a row.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{where}: got {text.strip()!r}, expected e.g. {expected}")
    number, scale, unit_text = float(match[1]), match[2] or "", match[3] or ""
    unit: Unit | None = _UNITS[unit_text[0]] if unit_text else None
    if scale == "%":
        if number > 100:
            raise SettingsError(f"{where}: got {number:g}%, expected at most 100%")
        return Amount(number / 100, True, unit)
    value = number * _TIMES[scale]
    if not math.isfinite(value) or value != int(value):
        raise SettingsError(f"{where}: got {text.strip()!r}; a share is written with a percent sign, e.g. {expected}")
    return Amount(value, False, unit)


def parse_budget(budget: str | float) -> Amount:
    """An amount; a float is a share, 1.0 all of it, an int is rows.

    Raises:
        SettingsError: as `parse_amount`, or nothing at all.
    """
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise SettingsError(f"budget: got {budget!r}; a float is a share, above 0 and at most 1.0, an int is rows")
        return Amount(budget, True)
    amount = parse_amount(str(budget), "budget", BUDGETS)
    if amount.value == 0:
        raise SettingsError(f"budget: got {budget!r}, expected more than nothing, e.g. {BUDGETS}")
    return amount


def parse_tokens(train_tokens: str | float) -> float:
    """`100B`: tokens to train on.

    Raises:
        SettingsError: anything else, or nothing at all.
    """
    text = (
        f"{train_tokens:.0f}" if isinstance(train_tokens, float) and math.isfinite(train_tokens) else str(train_tokens)
    )
    amount = parse_amount(text, "train_tokens", "100B")
    if amount.value == 0 or amount.is_share or amount.unit not in (None, "tokens"):
        raise SettingsError(f"train_tokens: got {train_tokens!r}, expected a number of tokens, e.g. 100B")
    return amount.value


def parse_bounds(texts: str | Sequence[str], flag: str) -> Bounds:
    """`Games:5%`, `Games:500`, or `5%` for every value of the label; a value may hold colons, the last one counts.

    A value goes by its name, `(no label)` and `(empty)` among them; `*` is a value as any other.

    Raises:
        SettingsError: not an amount, or the same value twice.
    """
    bounds: dict[str | None, Amount] = {}
    names: list[str] = []
    for text in several(texts):
        value, colon, amount = text.rpartition(":")
        bounds[value if colon else None] = parse_amount(amount, f"{flag} {text}", "5%, 500, Games:5% or Games:500")
        names.append(value.strip() if colon else "every value")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"{flag}: got {', '.join(twice)} more than once; give every value one {flag}")
    return bounds


def by_value(bounds: Bounds, flag: str, label: str, names: Sequence[str], n_grouped: int = 0) -> list[Amount | None]:
    """The floor or cap of each value of a label: its own, or that of every value, or none.

    Args:
        names: of the values; blanks around a value do not count where none has them.
        n_grouped: values that are not named, since they share the last position.
    Raises:
        SettingsError: the label has no such value.
    """
    amounts = [bounds.get(None)] * len(names)
    for value, amount in bounds.items():
        if value is None:
            continue
        name = value if value in names else value.strip()
        if name not in names:
            shown = ", ".join(
                value_name if len(value_name) <= NAME_SHOWN else f"{value_name[: NAME_SHOWN - 3]}..."
                for value_name in names[:SHOWN]
            )
            more = ", ..." if len(names) > SHOWN else ""
            suffix, grouped = (
                (" here", f"; its {n_grouped:,} smallest values share one slice") if n_grouped else ("", "")
            )
            raise SettingsError(f"{flag}: {label} has no value {name!r}{suffix}; it has {shown}{more}{grouped}")
        amounts[list(names).index(name)] = amount
    return amounts


def describe_value(value: str | None) -> str:
    """Whose floor or cap it is, for a message."""
    return "of every value" if value is None else value


@dataclass(frozen=True, slots=True)
class Constraints:
    """Checked: a selection within these limits exists, and the ledger finds one."""

    budget: int
    unit: Unit
    allowed_N: Bool
    cost_N: I64  # of an item, a row or a document: its tokens or rows, or 1 each
    values: tuple[str, ...]  # of the label; one value, of all rows, where there is none
    codes_N: I32
    floor_G: I64
    cap_G: I64
    largest_G: I64  # cost of the dearest row of each value

    @classmethod
    def from_budget(
        cls,
        budget: Amount,
        allowed_N: Bool,
        *,
        tokens_N: I64 | None = None,
        rows_N: I64 | None = None,
        labels: LabelColumn | None = None,
        floors: Bounds = MappingProxyType({}),
        caps: Bounds = MappingProxyType({}),
    ) -> Self:
        """Turn amounts into numbers, and see that they can be met.

        Args:
            allowed_N: items, rows or documents, that may be taken.
            tokens_N: tokens of every item; needed where the budget is in tokens.
            rows_N: rows of every item; None: items are rows.
        Raises:
            SettingsError: a budget of nothing or beyond the pool, floors or caps without a label, of an unknown
                value or in another unit than the budget, floors that cannot be met (which, and by how much).
        """
        unit: Unit = budget.unit or "rows"
        n_rows = len(allowed_N)
        cost_N = np.broadcast_to(np.int64(1), n_rows)  # takes no memory
        if unit == "tokens":
            assert tokens_N is not None
            cost_N = tokens_N
        elif unit == "rows" and rows_N is not None:
            cost_N = rows_N
        cost_P = cost_N[allowed_N]
        total, pool_total = int(cost_N.sum()), int(cost_P.sum())
        size = budget.resolve(total)
        if size > pool_total:
            remainder = "" if pool_total == total else f" of {total:,}, the others being excluded"
            raise SettingsError(f"budget: got {size:,} {unit}, the pool has {pool_total:,}{remainder}; ask for less")
        item = "row" if rows_N is None else "document"
        if size < cost_P.min(initial=np.iinfo(np.int64).max):
            raise SettingsError(
                f"budget: comes to {size:,} of {total:,} {unit}, expected room for one {item} at least; ask for more"
            )
        names: tuple[str, ...] = ("all",)
        codes_N = np.broadcast_to(np.int32(0), n_rows)
        floor_G, cap_G = np.zeros(1, np.int64), np.full(1, size)
        if labels is not None:
            for flag, bounds in (("floor", floors), ("cap", caps)):
                for value, amount in bounds.items():
                    if amount.unit not in (None, unit):
                        where = f"{flag} {describe_value(value)}"
                        raise SettingsError(f"{where}: is in {amount.unit}, the budget is in {unit}; use one unit")
            names, codes_N = labels.names(), labels.codes_N
            low_G = by_value(floors, "floor", labels.name, names)
            high_G = by_value(caps, "cap", labels.name, names)
            floor_G = np.array([0 if low is None else low.resolve(size, up=True) for low in low_G])
            cap_G = np.array([size if high is None else high.resolve(size) for high in high_G])
        elif floors or caps:
            raise SettingsError("floor, cap: need a label; name it with `by`, e.g. topic")
        codes_P = codes_N[allowed_N]
        held_G, largest_G = np.bincount(codes_P, cost_P, len(names)).astype(np.int64), np.ones(len(names), np.int64)
        np.maximum.at(largest_G, codes_P, cost_P)
        overshoot_G = np.where(floor_G > 0, largest_G - 1, 0)

        problems = [
            f"{names[g]} needs {int(floor_G[g]):,} {unit}, the pool has {int(held_G[g]):,}"
            for g in np.flatnonzero(floor_G > held_G).tolist()
        ]
        problems += [
            f"{names[g]} has a floor of {int(floor_G[g]):,} and a cap of {int(cap_G[g]):,} {unit}"
            + (f", closer than its longest {item} of {int(largest_G[g]):,}" if floor_G[g] <= cap_G[g] else "")
            for g in np.flatnonzero((floor_G > 0) & (cap_G < size) & (floor_G + overshoot_G > cap_G)).tolist()
        ]
        if (needed := int(floor_G.sum() + overshoot_G.sum())) > size:
            longest = f" with its longest {item} each" if unit == "tokens" else ""
            problems.append(f"together they take {needed:,} {unit}{longest}, the budget is {size:,}")
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise SettingsError(
                f"floor: cannot be met: {'; '.join(problems[:SHOWN])}{more}; lower them, or raise the budget"
            )
        if (available := int(np.minimum(cap_G, held_G).sum())) < size:
            raise SettingsError(
                f"cap: allows {available:,} {unit}, the budget is {size:,}; raise the caps, or lower the budget"
            )
        return cls(size, unit, allowed_N, cost_N, names, codes_N, floor_G, np.minimum(cap_G, size), largest_G)

    def in_rows(self, size: int) -> "Constraints":
        """These limits for a fixed number of rows; floors and caps in tokens are left out."""
        if self.unit != "tokens":
            return replace(self, budget=size)
        none_G, all_G = np.zeros_like(self.floor_G), np.full_like(self.cap_G, size)
        ones_N = np.broadcast_to(np.int64(1), len(self.cost_N))
        return replace(self, budget=size, unit="rows", cost_N=ones_N, floor_G=none_G, cap_G=all_G)

    @property
    def costs_differ(self) -> bool:
        """Return whether items cost more than 1 each, so that a budget may not come out even."""
        return bool(self.cost_N.max(initial=1) > 1)

    @property
    def has_label_limits(self) -> bool:
        """Whether any floor or cap binds."""
        return bool(self.floor_G.any() or (self.cap_G < self.budget).any())


class Ledger:
    """What has been taken, and what may be."""

    def __init__(self, limits: Constraints) -> None:
        self.used = 0  # cost of what has been taken
        self._limits = limits
        self._used_G = [0] * len(limits.values)
        self._floor_G = limits.floor_G.tolist()
        self._cap_G = limits.cap_G.tolist()
        # taking rows for a floor may overshoot it by all but one token of the dearest row
        self._slack_G = np.where(limits.floor_G > 0, limits.largest_G - 1, 0).tolist()
        self._owed = sum(self._floor_G)
        self._slack = sum(self._slack_G)

    def remaining(self, code: int) -> int:
        """Cost up to which a row of this value may be taken."""
        need = self._need(code)
        reserved = need + (self._slack_G[code] if need else 0)
        free = self._limits.budget - self.used - (self._owed + self._slack - reserved)
        return int(min(self._cap_G[code] - self._used_G[code], free))

    def fits(self, rows: I64) -> Bool:
        """Whether there is room for each of these rows."""
        remaining_G, limits = (
            np.array([self.remaining(g) for g in range(len(self._cap_G))], dtype=np.int64),
            self._limits,
        )
        return np.asarray(limits.cost_N[rows] <= remaining_G[limits.codes_N[rows]])

    def take(self, code: int, cost: int) -> None:
        """Take a row that there is room for."""
        need = self._need(code)
        self.used += cost
        self._used_G[code] += cost
        if need:
            left = self._need(code)
            self._owed -= need - left
            if not left:
                self._slack -= self._slack_G[code]

    def _need(self, code: int) -> int:
        return int(max(0, self._floor_G[code] - self._used_G[code]))


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows in the order in which they were taken, and what is proven of them."""

    row_index: I64
    guarantee: str
    gain: F64 | None = None  # exact marginal gain of each when it was taken; None: its effect
    bound: float | None = None  # no selection of as many rows within the limits has a higher change
    notes: tuple[str, ...] = ()


def take_within_budget(order_P: I64, limits: Constraints) -> I64:
    """Go down the rows in the order of their worth and keep those that the limits allow.

    If all cost 1, the choice has the largest worth of all that the limits allow. Otherwise, in tokens say, an item that
    does not fit any more is passed over, until none fits.
    """
    if not limits.costs_differ and not limits.has_label_limits:
        return order_P[: limits.budget]
    if not limits.costs_differ:
        codes_P = limits.codes_N[order_P]
        by_code, counts = np.argsort(codes_P, kind="stable"), np.bincount(codes_P)
        rank_P = np.empty(len(codes_P), dtype=np.int64)  # how many better rows have the same value
        rank_P[by_code] = np.arange(len(codes_P)) - np.repeat(np.cumsum(counts) - counts, counts)
        # floors first, then the best of what the caps leave
        selected_P = rank_P < limits.floor_G[codes_P]
        free = np.flatnonzero(~selected_P & (rank_P < limits.cap_G[codes_P]))
        selected_P[free[: limits.budget - int(selected_P.sum())]] = True
        return np.asarray(order_P[selected_P])
    if not limits.has_label_limits:  # runs of rows that fit
        cost_P = limits.cost_N[order_P]
        runs = [order_P[:0]]
        start, remaining = 0, limits.budget
        while (fits := cost_P[start:] <= remaining).any():
            start += int(fits.argmax())
            used = np.cumsum(cost_P[start:])
            stop = start + int(np.searchsorted(used, remaining, side="right"))
            runs.append(order_P[start:stop])
            remaining -= int(used[stop - start - 1])
            start = stop
        return np.concatenate(runs)
    # row by row: what a floor had set aside and did not need comes free at the end
    ledger, selected_N = Ledger(limits), np.zeros(len(limits.allowed_N), dtype=np.bool_)
    rows: list[int] = []
    while order_P.size:
        for row in order_P.tolist():
            code, cost = int(limits.codes_N[row]), int(limits.cost_N[row])
            if cost <= ledger.remaining(code):
                ledger.take(code, cost)
                selected_N[row] = True
                rows.append(row)
        order_P = order_P[~selected_N[order_P] & ledger.fits(order_P)]
    return np.array(rows, dtype=np.int64)


def load_exclusions(artifact: ArtifactReader, exclude: Path | str | Sequence[str]) -> tuple[Bool, str]:
    """Rows named in a list, or in a file: Parquet with a column row_id or doc_id, or text with one name a line.

    Returns:
        (N,), and what is worth saying of the list.
    Raises:
        SettingsError: not such a file, or none of its names, if it has any, is one of the corpus.
    """
    where = str(exclude) if isinstance(exclude, Path | str) else "exclude"
    values = pa.array(
        sorted(set(_read_names(Path(exclude)) if isinstance(exclude, Path | str) else exclude)), pa.string()
    )
    mask_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    seen = np.zeros(len(values), dtype=np.bool_)
    start = 0
    for batch in artifact.row_batches(list(NAMES)):
        for name in NAMES:
            place = pc.index_in(batch.column(name).cast(pa.string()), values)
            mask_N[start : start + batch.num_rows] |= place.is_valid().to_numpy(zero_copy_only=False)
            seen[place.drop_null().to_numpy()] = True
        start += batch.num_rows
    if not len(values):
        return mask_N, f"{where}: is empty, and excludes nothing"
    if not seen.any():
        example = str(next(artifact.row_batches(["row_id"])).column(0)[0].as_py())
        raise SettingsError(
            f"exclude {where}: none of its {len(values):,} names is a row_id or doc_id of the artifact; "
            f"expected names like {example!r}"
        )
    unknown = int((~seen).sum())
    return mask_N, f"{where}: {len(values):,} names exclude {int(mask_N.sum()):,} rows; {unknown:,} are unknown"


def _read_names(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise SettingsError(f"exclude: {path}: is no file; expected {EXPECTED}")
    with readable_table(f"exclude: {path}", SettingsError, EXPECTED):
        if path.suffix != ".parquet":
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            return [line.rstrip("\r") for line in lines if line.strip()]
        columns = pq.read_schema(path).names
        columns_found = [name for name in NAMES if name in columns]
        if not columns_found:
            raise SettingsError(f"exclude: {path}: has columns {columns}; expected {EXPECTED}")
        names = plain_values(read_checksummed(path, columns_found[:1]).column(0))
        return [str(label_text(name)) for name in names if name is not None]
