"""Selection budgets and constraints, and the exact optimum for additive objectives.

Parse budgets (`20%`, `2Mtokens`), floors and caps per label value, and exclusion lists. Budgets, floors and caps are in
the same unit: rows, tokens or documents. Start with `take_within_budget`.
Shape letters: N rows, M items (rows or documents), P items in ranked order, G label values.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.arrays import F64, I32, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import label_text
from grasp.corpus.values import plain_values
from grasp.errors import SettingsError
from grasp.select.items import Items
from grasp.store.checksummed_parquet import read_checksummed
from grasp.store.contents import readable_table
from grasp.text import as_names, did_you_mean, plain

Unit = Literal["rows", "tokens", "documents"]
BUDGET_EXAMPLES = "20%, 5000, 5000rows, 2Mtokens, 20%tokens or 300documents"
OPTIMAL_NOTE = "optimal: rows are scored one by one, so no other rows within the budget and bounds have a higher value"
MAX_LISTED = 5  # label values, or unmet constraints, listed in a message
MAX_NAME_CHARS = 60  # characters of a label value in a message
ROUNDING = 1e-12  # tolerance of sums of shares
NAME_COLUMNS = ("row_id", "doc_id")
EXPECTED_FILE = "Parquet with a column row_id or doc_id, or text with one name per line"

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMBT])?\s*(rows?|tokens?|documents?)?")
_UNITS: dict[str, Unit] = {"r": "rows", "t": "tokens", "d": "documents"}
_TIMES = {"": 1, "k": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of rows, tokens or documents, or a share of a total."""

    value: float  # a number, or a share between 0 and 1
    is_share: bool
    unit: Unit | None = None  # None: not specified

    def resolve(self, total: int, *, up: bool = False) -> int:
        """Return the amount as a number; a share of `total` is rounded down, or up."""
        if not self.is_share:
            return int(self.value)
        exact = self.value * total
        # the tolerance keeps a share such as 0.1 of 50 from being off by one through its rounding error
        return math.ceil(exact - 1e-9 * total) if up else math.floor(exact + 1e-9 * total)


Bounds: TypeAlias = Mapping[str | None, Amount]  # floor or cap per label value; None: of every value not listed


def parse_amount(text: str, location: str, expected: str) -> Amount:
    """Parse an amount such as `20%`, `5000`, `2Mtokens` or `300documents`.

    Args:
        location: name of the option, for messages.
        expected: examples of what is expected, for messages.

    Raises:
        SettingsError: the text is not an amount, the share is above 100 %, or the number is not whole.
    """
    if match := _AMOUNT.fullmatch(text.strip()):
        number, scale, unit_text = float(match[1]), match[2] or "", match[3] or ""
        unit: Unit | None = _UNITS[unit_text[0]] if unit_text else None
        if scale == "%" and number <= 100:
            return Amount(number / 100, True, unit)
        if scale != "%" and (value := number * _TIMES[scale]).is_integer():
            return Amount(value, False, unit)
    raise SettingsError(
        f"{location}: got {text.strip()!r}, expected a whole number or a share of at most 100%, e.g. {expected}"
    )


def parse_budget(budget: str | float) -> Amount:
    """Parse a budget. A float is a share of the rows, an int a number of rows, a text as `parse_amount` reads it.

    Raises:
        SettingsError: as `parse_amount`, or the budget is 0.
    """
    is_share = isinstance(budget, float)
    amount = Amount(float(budget), True) if is_share else parse_amount(str(budget), "budget", BUDGET_EXAMPLES)
    if not 0 < amount.value <= (1 if amount.is_share else math.inf):
        raise SettingsError(
            f"budget: got {budget!r}, expected more than 0, e.g. {BUDGET_EXAMPLES}; a float is a share of at most 1.0, "
            "an int a number of rows"
        )
    return amount


def parse_tokens(train_tokens: str | float, name: str = "train_tokens") -> float:
    """Parse the length of a training run in tokens, e.g. `100B`; or what else is counted so, by its name.

    Raises:
        SettingsError: the text is not a number of tokens, or 0.
    """
    text = (
        f"{train_tokens:.0f}" if isinstance(train_tokens, float) and math.isfinite(train_tokens) else str(train_tokens)
    )
    amount = parse_amount(text, name, "100B")
    if amount.value == 0 or amount.is_share or amount.unit not in (None, "tokens"):
        raise SettingsError(f"{name}: got {train_tokens!r}, expected a number, e.g. 100B")
    return amount.value


def parse_bounds(texts: str | Sequence[str], flag: str) -> Bounds:
    """Parse floors or caps: `Games:5%`, `Games:500`, or `5%` for every value of the label.

    The text is split at the last colon, as a label value may contain colons. Values are referred to by name, including
    `(no label)` and `(empty)`; `*` is not a wildcard.

    Raises:
        SettingsError: an amount cannot be parsed, or a value occurs more than once.
    """
    bounds: dict[str | None, Amount] = {}
    names: list[str] = []
    for text in as_names(texts):
        value, colon, amount = text.rpartition(":")
        bounds[value if colon else None] = parse_amount(amount, f"{flag} {text}", "5%, 500, Games:5% or Games:500")
        names.append(value.strip() if colon else "every value")
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"{flag}: got {', '.join(duplicates)} more than once; pass one {flag} per value")
    return bounds


def amounts_by_value(
    bounds: Bounds, flag: str, label: str, names: Sequence[str], unit: Unit | None = None, n_grouped: int = 0
) -> list[Amount | None]:
    """Return the floor or cap of each value of a label, or None if it has none.

    Args:
        label: name of the label, for messages.
        names: label values. Blanks around a value of `bounds` are ignored unless a label value has them.
        unit: unit of the budget; None: bounds are shares of a mixture.
        n_grouped: number of small values that share the last slice and have no name of their own.

    Raises:
        SettingsError: a bound has another unit than the budget or is not a share, or the label has no such value.
    """
    amounts = [bounds.get(None)] * len(names)
    for value, amount in bounds.items():
        location = f"{flag} {'for every value' if value is None else value}"
        if unit is None and not (amount.is_share and amount.unit is None):
            raise SettingsError(f"{location}: got a number, expected a share of the mixture such as Games:5%")
        if unit is not None and amount.unit not in (None, unit):
            raise SettingsError(f"{location}: is in {amount.unit}, the budget is in {unit}; use the same unit")
        if value is None:
            continue
        name = value if value in names else value.strip()
        if name not in names:
            shown = first_few([plain(value_name, MAX_NAME_CHARS) for value_name in names])
            qualifier, grouped = (
                (" in this artifact", f"; its {n_grouped:,} smallest values share one slice") if n_grouped else ("", "")
            )
            hint = did_you_mean(name, map(str, names))
            raise SettingsError(f"{flag}: {label} has no value {name!r}{qualifier}{hint}; it has {shown}{grouped}")
        amounts[list(names).index(name)] = amount
    return amounts


def parse_shares(
    floor: str | Sequence[str], cap: str | Sequence[str], label: str, names: Sequence[str], n_grouped: int = 0
) -> tuple[F64, F64]:
    """Parse the floors and caps of a mixture as shares, (G,) each; nan for a value that has none. See `parse_bounds`.

    Raises:
        SettingsError: a bound is not a share, or the label has no such value.
    """
    floor_G, cap_G = (
        np.array([np.nan if amount is None else amount.value for amount in amounts])
        for amounts in (
            amounts_by_value(parse_bounds(texts, flag), flag, label, names, n_grouped=n_grouped)
            for flag, texts in (("floor", floor), ("cap", cap))
        )
    )
    return floor_G, cap_G


def check_share_bounds(low_G: F64, high_G: F64, names: Sequence[str], problems: Sequence[str] = ()) -> None:
    """Check that a mixture lies within bounds.

    Args:
        low_G: lower bound of each share.
        high_G: upper bound of each share, due to caps and repetition.
        names: label values.
        problems: further reasons why no mixture does.

    Raises:
        SettingsError: no mixture lies within the bounds, or there are further reasons.
    """
    reasons = [
        f"{names[g]} has a floor of {low_G[g]:.1%} and at most {high_G[g]:.1%} (--cap, --max-repeat)"
        for g in np.flatnonzero(low_G > high_G + ROUNDING).tolist()
    ]
    if low_G.sum() > 1.0 + ROUNDING or high_G.sum() < 1.0 - ROUNDING:
        reasons.append(f"the floors add up to {low_G.sum():.1%}, the caps (with --max-repeat) to {high_G.sum():.1%}")
    if reasons or problems:
        raise SettingsError(f"floor, cap: cannot be met: {first_few([*reasons, *problems], '; ')}")


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first texts, and count the others."""
    more = f" and {len(texts) - MAX_LISTED:,} more" if len(texts) > MAX_LISTED else ""
    return f"{separator.join(texts[:MAX_LISTED])}{more}"


@dataclass(frozen=True, slots=True)
class Constraints:
    """Validated constraints of a selection: a feasible selection exists, and `take_within_budget` finds one.

    Attributes:
        budget: maximum total cost, in `unit`.
        allowed_M: whether an item (a row or a document) may be selected.
        cost_M: cost of each item: its tokens, its rows, or 1.
        values: label values; without a label a single value for all items.
        codes_M: index into `values` of each item.
        floor_G: minimum total cost per label value.
        cap_G: maximum total cost per label value.
        overshoot_G: by how much meeting a floor may exceed it: up to the largest item less 1, as none is cut.
    """

    budget: int
    unit: Unit
    allowed_M: Bool
    cost_M: I64
    values: tuple[str, ...]
    codes_M: I32
    floor_G: I64
    cap_G: I64
    overshoot_G: I64

    @classmethod
    def from_budget(cls, budget: Amount, items: Items, floors: Bounds, caps: Bounds) -> Self:
        """Resolve amounts to numbers and check that they are feasible.

        Raises:
            SettingsError: the budget is less than any candidate costs, or more than all of them; floors or caps have no
                label, an unknown value or another unit than the budget; or they cannot be met (the message lists which,
                and by how much).
        """
        unit: Unit = budget.unit or "rows"
        allowed_M, labels = items.allowed_M, items.labels
        cost_M = items.rows_M if unit == "rows" else items.tokens_M
        if unit == "documents":
            cost_M = np.broadcast_to(np.int64(1), len(allowed_M))  # needs no memory
        pool_cost = cost_M[allowed_M]
        total, pool_total = int(cost_M.sum()), int(pool_cost.sum())
        size = budget.resolve(total)
        if size > pool_total:
            remainder = "" if pool_total == total else f" of {total:,}, as the others are excluded"
            raise SettingsError(
                f"budget: got {size:,} {unit}, the pool has {pool_total:,}{remainder}; lower the budget"
            )
        if size < pool_cost.min(initial=np.iinfo(np.int64).max):
            raise SettingsError(
                f"budget: resolves to {size:,} of {total:,} {unit}, expected at least one {items.kind[:-1]}; raise the "
                "budget"
            )
        names: tuple[str, ...] = ("all",)
        codes_M = np.broadcast_to(np.int32(0), len(allowed_M))
        floor_G, cap_G = np.zeros(1, np.int64), np.full(1, size)
        if labels is not None:
            names, codes_M = labels.names(), labels.codes_N
            lowest = amounts_by_value(floors, "floor", labels.name, names, unit)
            highest = amounts_by_value(caps, "cap", labels.name, names, unit)
            floor_G = np.array([0 if floor is None else floor.resolve(size, up=True) for floor in lowest])
            cap_G = np.array([size if cap is None else cap.resolve(size) for cap in highest])
        elif floors or caps:
            raise SettingsError("floor, cap: require a label; pass it with `by`, e.g. topic")
        pool_codes = codes_M[allowed_M]
        pool_G = np.bincount(pool_codes, pool_cost, len(names)).astype(np.int64)
        largest_G = np.ones(len(names), np.int64)
        np.maximum.at(largest_G, pool_codes, pool_cost)
        overshoot_G = np.where(floor_G > 0, largest_G - 1, 0)
        constraints = cls(size, unit, allowed_M, cost_M, names, codes_M, floor_G, np.minimum(cap_G, size), overshoot_G)
        constraints._check_feasible(pool_G, cap_G, items.kind[:-1])
        return constraints

    def _check_feasible(self, pool_G: I64, cap_G: I64, item_name: str) -> None:
        """Check that a selection exists that meets the floors, within the caps and the budget."""
        names, unit, size, floor_G, overshoot_G = self.values, self.unit, self.budget, self.floor_G, self.overshoot_G
        problems = [
            f"{names[g]} needs {int(floor_G[g]):,} {unit}, the pool has {int(pool_G[g]):,}"
            for g in np.flatnonzero(floor_G > pool_G).tolist()
        ]
        # The last item that meets a floor may exceed it, but not the cap.
        for g in np.flatnonzero((floor_G > 0) & (cap_G < size) & (floor_G + overshoot_G > cap_G)).tolist():
            problem = f"{names[g]} has a floor of {int(floor_G[g]):,} and a cap of {int(cap_G[g]):,} {unit}"
            if floor_G[g] <= cap_G[g]:
                problem += f", which differ by less than its longest {item_name} of {int(overshoot_G[g]) + 1:,}"
            problems.append(problem)
        if (needed := int(floor_G.sum() + overshoot_G.sum())) > size:
            longest = f" including the longest {item_name} of each value" if overshoot_G.any() else ""
            problems.append(f"together they need {needed:,} {unit}{longest}, the budget is {size:,}")
        flag, remedy = "floor", "lower the floors, or raise the budget"
        if not problems and (available := int(np.minimum(cap_G, pool_G).sum())) < size:
            flag, remedy = "cap", "raise the caps, or lower the budget"
            problems.append(f"it allows {available:,} {unit}, the budget is {size:,}")
        if problems:
            raise SettingsError(f"{flag}: cannot be met: {first_few(problems, '; ')}; {remedy}")

    @property
    def costs_differ(self) -> bool:
        """Return whether items have different costs, so that a selection may not use up the budget exactly."""
        return bool(self.cost_M.max(initial=1) > 1)

    @property
    def has_label_constraints(self) -> bool:
        """Return whether there is any floor or cap."""
        return bool(self.floor_G.any() or (self.cap_G < self.budget).any())


def take_within_budget(order_P: I64, constraints: Constraints) -> I64:
    """Select items greedily in the given order, subject to the constraints.

    If all items cost 1, the selection maximises the sum of any additive objective that is sorted in this order: the
    constraints form a matroid, on which the greedy algorithm is exact. With other costs, e.g. tokens, an item that does
    not fit is skipped, until none fits.

    Args:
        order_P: indices of candidates, best first.
        constraints: constraints of the selection.

    Returns:
        Indices of the selected items, best first.
    """
    if not constraints.costs_differ:
        if not constraints.has_label_constraints:
            return order_P[: constraints.budget]
        # the best of each label value up to its floor, then the best others up to the caps
        codes_P = constraints.codes_M[order_P]
        by_code, counts = np.argsort(codes_P, kind="stable"), np.bincount(codes_P)
        rank_P = np.empty(len(codes_P), dtype=np.int64)  # number of better items with the same label value
        rank_P[by_code] = np.arange(len(codes_P)) - np.repeat(np.cumsum(counts) - counts, counts)
        selected_P = rank_P < constraints.floor_G[codes_P]
        free = np.flatnonzero(~selected_P & (rank_P < constraints.cap_G[codes_P]))
        selected_P[free[: constraints.budget - int(selected_P.sum())]] = True
        return np.asarray(order_P[selected_P])
    if constraints.has_label_constraints:
        return _take_with_reserves(order_P, constraints)
    # append runs of consecutive items that fit, and skip items that do not
    cost_P = constraints.cost_M[order_P]
    segments = [order_P[:0]]
    start, remaining = 0, constraints.budget
    while (fits := cost_P[start:] <= remaining).any():
        start += int(fits.argmax())
        total_cost = np.cumsum(cost_P[start:])
        stop = start + int(np.searchsorted(total_cost, remaining, side="right"))
        segments.append(order_P[start:stop])
        remaining -= int(total_cost[stop - start - 1])
        start = stop
    return np.concatenate(segments)


def _take_with_reserves(order_P: I64, constraints: Constraints) -> I64:
    """Select item by item; budget that unmet floors still require is reserved, so that none becomes infeasible.

    When a floor is met, the rest of its reserve is released, and rejected items are tried again.
    """
    floors, caps = constraints.floor_G.tolist(), constraints.cap_G.tolist()
    overshoots, used = constraints.overshoot_G.tolist(), [0] * len(constraints.values)

    def reserve(code: int) -> int:
        need = max(0, floors[code] - used[code])
        return int(need + overshoots[code] if need else 0)

    free = constraints.budget - sum(map(reserve, range(len(used))))  # neither used nor reserved
    selected_M = np.zeros(len(constraints.allowed_M), dtype=np.bool_)
    items: list[int] = []
    while order_P.size:
        for item in order_P.tolist():
            code, cost = int(constraints.codes_M[item]), int(constraints.cost_M[item])
            reserved = reserve(code)
            if cost <= min(caps[code] - used[code], free + reserved):
                used[code] += cost
                free += reserved - cost - reserve(code)
                selected_M[item] = True
                items.append(item)
        remaining_G = np.array([min(caps[g] - used[g], free + reserve(g)) for g in range(len(used))], dtype=np.int64)
        fits_P = constraints.cost_M[order_P] <= remaining_G[constraints.codes_M[order_P]]
        order_P = order_P[~selected_M[order_P] & fits_P]
    return np.array(items, dtype=np.int64)


def load_exclusions(artifact: ArtifactReader, exclude: Path | str | Sequence[str]) -> tuple[Bool, str]:
    """Load a list of rows to exclude: names, or a file that is Parquet with a column row_id or doc_id, or text.

    A name in a column row_id excludes a row. All others exclude a row or the rows of a document; the first row of a
    document that is split has the same name, so that the whole document is excluded.

    Args:
        exclude: row_ids or doc_ids, or a file of them; a text file has one name per line.

    Returns:
        Mask of the excluded rows, (N,), and a note that counts names and rows.

    Raises:
        SettingsError: the file cannot be read, or none of its names occurs in the artifact.
    """
    location = f"exclude {exclude}" if isinstance(exclude, Path | str) else "exclude"
    columns: tuple[str, ...] = NAME_COLUMNS
    if isinstance(exclude, Path | str):
        path = Path(exclude)
        with readable_table(f"exclude: {path}", SettingsError, EXPECTED_FILE):
            if path.suffix != ".parquet":
                lines = path.read_text(encoding="utf-8-sig").split("\n")
                exclude = [line.rstrip("\r") for line in lines if line.strip()]
            else:
                in_file = pq.read_schema(path).names
                columns = tuple(name for name in NAME_COLUMNS if name in in_file)[:1]
                if not columns:
                    raise SettingsError(f"exclude: {path}: has columns {in_file}; expected {EXPECTED_FILE}")
                names = plain_values(read_checksummed(path, columns).column(0))
                exclude = [str(label_text(name)) for name in names if name is not None]
    values = pa.array(sorted(set(exclude)), pa.string())
    mask_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    is_known = np.zeros(len(values), dtype=np.bool_)
    start = 0
    for batch in artifact.row_batches(list(columns)):
        for name in columns:
            position = pc.index_in(batch.column(name).cast(pa.string()), values)
            mask_N[start : start + batch.num_rows] |= position.is_valid().to_numpy(zero_copy_only=False)
            is_known[position.drop_null().to_numpy()] = True
        start += batch.num_rows
    if not len(values):
        return mask_N, f"{location}: is empty and excludes no rows"
    if not is_known.any():
        example = str(next(artifact.row_batches(list(columns[:1]))).column(0)[0].as_py())
        raise SettingsError(
            f"{location}: none of its {len(values):,} names is a {' or '.join(columns)} of the artifact; "
            f"expected names like {example!r}"
        )
    n_unknown = int((~is_known).sum())
    return mask_N, f"{location}: {len(values):,} names exclude {int(mask_N.sum()):,} rows; {n_unknown:,} are unknown"
