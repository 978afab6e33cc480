"""What a selection may hold, and the best rows within it where a row is worth the same whatever else is kept.

A budget, floors and caps for the values of a label, rows that are out of the question. Costs are rows (1 each) or
tokens, and so are floors and caps. A ledger keeps what is left while rows are taken. It never lets a floor get out of
reach: what the open floors still need is set aside. Rows that are refused stay refused while rows are taken, but for
what a floor in tokens had set aside and did not need.
Shape letters: N rows, G values of the label, P rows of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.arrays import I64
from grasp.artifact.reader import ArtifactReader
from grasp.choose.amounts import Amount, Bound, Unit
from grasp.errors import SettingsError
from grasp.predict.labels import LabelColumn
from grasp.store.contents import readable_table
from grasp.store.sealed import read_sealed

SHOWN = 5
NAMES = ("row_id", "doc_id")
EXPECTED = "Parquet with a column row_id or doc_id, or text with one name a line"
NAME_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Limits:
    """Checked: a selection within these limits exists, and the ledger finds one."""

    budget: int
    unit: Unit
    allowed_N: NDArray[np.bool_]
    cost_N: I64 | None  # None: every row costs 1
    values: tuple[str, ...]  # of the label; one value, of all rows, where there is none
    codes_N: NDArray[np.int32] | None
    floor_G: I64
    cap_G: I64
    largest_G: I64  # cost of the dearest row of each value

    @classmethod
    def from_budget(
        cls,
        budget: Amount,
        allowed_N: NDArray[np.bool_],
        *,
        tokens_N: I64 | None = None,
        labels: LabelColumn | None = None,
        floors: Sequence[Bound] = (),
        caps: Sequence[Bound] = (),
    ) -> Self:
        """Turn amounts into numbers, and see that they can be met.

        Args:
            allowed_N: rows that may be taken.
            tokens_N: tokens of every row; needed where the budget is in tokens.
        Raises:
            SettingsError: a budget of nothing or beyond the pool, floors or caps without a label, of an unknown
                value or in another unit than the budget, floors that cannot be met (which, and by how much).
        """
        unit: Unit = budget.unit or "rows"
        if unit == "tokens" and tokens_N is None:
            raise SettingsError("budget: a budget in tokens needs the tokens of every row, got none")
        cost_N = tokens_N if unit == "tokens" else None
        size = _checked_budget(budget, unit, allowed_N, cost_N)
        if labels is None and (floors or caps):
            raise SettingsError("floor, cap: need a label; name it with `by`, e.g. topic")
        names = ("all",) if labels is None else labels.names()
        codes_N = None if labels is None else labels.codes_N
        codes_P = np.zeros(int(allowed_N.sum()), np.int32) if codes_N is None else codes_N[allowed_N]
        cost_P = np.ones(len(codes_P), np.int64) if cost_N is None else cost_N[allowed_N]
        held_G, largest_G = np.bincount(codes_P, cost_P, len(names)).astype(np.int64), np.ones(len(names), np.int64)
        np.maximum.at(largest_G, codes_P, cost_P)
        floor_G = _amounts(floors, "floor", labels, names, unit, size, np.zeros(len(names), dtype=np.int64))
        cap_G = _amounts(caps, "cap", labels, names, unit, size, np.full(len(names), size, dtype=np.int64))
        _check_floors(names, unit, size, floor_G, cap_G, held_G, largest_G)
        return cls(size, unit, allowed_N, cost_N, names, codes_N, floor_G, np.minimum(cap_G, size), largest_G)

    def in_rows(self, size: int) -> "Limits":
        """These limits for a fixed number of rows; floors and caps in tokens are left out."""
        if self.cost_N is None:
            return replace(self, budget=size)
        none_G, all_G = np.zeros_like(self.floor_G), np.full_like(self.cap_G, size)
        return replace(self, budget=size, unit="rows", cost_N=None, floor_G=none_G, cap_G=all_G)

    def cost(self, row: int) -> int:
        """What one row costs."""
        return 1 if self.cost_N is None else int(self.cost_N[row])

    def code(self, row: int) -> int:
        """Which value of the label a row has."""
        return 0 if self.codes_N is None else int(self.codes_N[row])

    @property
    def has_label_limits(self) -> bool:
        """Whether any floor or cap binds."""
        return bool(self.floor_G.any() or (self.cap_G < self.budget).any())


class Ledger:
    """What has been taken, and what may be."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._used = 0
        self._used_G = [0] * len(limits.values)
        self._floor_G = limits.floor_G.tolist()
        self._cap_G = limits.cap_G.tolist()
        # taking rows for a floor may overshoot it by all but one token of the dearest row
        self._slack_G = np.where(limits.floor_G > 0, limits.largest_G - 1, 0).tolist()
        self._owed = sum(self._floor_G)
        self._slack = sum(self._slack_G)

    @property
    def used(self) -> int:
        """Cost of what has been taken."""
        return self._used

    def room(self, code: int) -> int:
        """Cost up to which a row of this value may be taken."""
        limits = self._limits
        need = self._need(code)
        own = need + (self._slack_G[code] if need else 0)
        free = limits.budget - self._used - (self._owed + self._slack - own)
        return int(min(self._cap_G[code] - self._used_G[code], free))

    def fits(self, rows: I64) -> NDArray[np.bool_]:
        """Whether there is room for each of these rows."""
        room_G, limits = np.array([self.room(g) for g in range(len(self._cap_G))], dtype=np.int64), self._limits
        room = room_G[0] if limits.codes_N is None else room_G[limits.codes_N[rows]]
        fits = (1 if limits.cost_N is None else limits.cost_N[rows]) <= room
        return np.broadcast_to(np.asarray(fits), rows.shape)

    def take(self, code: int, cost: int) -> None:
        """Take a row that there is room for."""
        need = self._need(code)
        self._used += cost
        self._used_G[code] += cost
        if need:
            left = self._need(code)
            self._owed -= need - left
            if not left:
                self._slack -= self._slack_G[code]

    def _need(self, code: int) -> int:
        return int(max(0, self._floor_G[code] - self._used_G[code]))


def _checked_budget(budget: Amount, unit: Unit, allowed_N: NDArray[np.bool_], cost_N: I64 | None) -> int:
    whole = len(allowed_N) if cost_N is None else int(cost_N.sum())
    pool = int(allowed_N.sum()) if cost_N is None else int(cost_N[allowed_N].sum())
    size = budget.resolve(whole)
    least = 1 if cost_N is None else int(cost_N[allowed_N].min(initial=np.iinfo(np.int64).max))
    if size > pool:
        left = "" if pool == whole else f" of {whole:,}, the others being excluded"
        raise SettingsError(f"budget: got {size:,} {unit}, the pool has {pool:,}{left}; ask for less")
    if size < least:
        raise SettingsError(
            f"budget: comes to {size:,} of {whole:,} {unit}, expected room for one row at least; ask for more"
        )
    return size


def _amounts(
    bounds: Sequence[Bound],
    flag: str,
    labels: LabelColumn | None,
    names: Sequence[str],
    unit: Unit,
    budget: int,
    default_G: I64,
) -> I64:
    """(G,) floors or caps in the unit of the budget; a bound for every value gives way to one for a single value."""
    out_G = default_G
    for bound in sorted(bounds, key=lambda bound: bound.value is not None):
        if bound.amount.unit not in (None, unit):
            of = "of every value" if bound.value is None else bound.value
            raise SettingsError(f"{flag} {of}: is in {bound.amount.unit}, the budget is in {unit}; use one unit")
        amount = bound.amount.resolve(budget, up=flag == "floor")
        if bound.value is None:
            out_G = np.full(len(names), amount, dtype=np.int64)
            continue
        assert labels is not None
        out_G[value_code(bound.value, names, flag, labels.name)] = amount
    return out_G


def value_code(value: str, names: Sequence[str], flag: str, label: str, n_grouped: int = 0) -> int:
    """Position of a value by its name; blanks around it do not count where no value has them.

    Args:
        n_grouped: values that are not named, since they share the last position.
    Raises:
        SettingsError: the label has no such value.
    """
    for spelled in (value, value.strip()):
        if spelled in names:
            return list(names).index(spelled)
    some = ", ".join(_short(name) for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    here, grouped = (" here", f"; its {n_grouped:,} smallest values share one slice") if n_grouped else ("", "")
    raise SettingsError(f"{flag}: {label} has no value {value.strip()!r}{here}; it has {some}{grouped}")


def _short(name: str) -> str:
    return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 3]}..."


def _check_floors(
    names: Sequence[str], unit: Unit, budget: int, floor_G: I64, cap_G: I64, held_G: I64, largest_G: I64
) -> None:
    short = [
        f"{names[g]} needs {int(floor_G[g]):,} {unit}, the pool has {int(held_G[g]):,}"
        for g in np.flatnonzero(floor_G > held_G).tolist()
    ]
    overshoot_G = np.where(floor_G > 0, largest_G - 1, 0)
    short += [
        f"{names[g]} has a floor of {int(floor_G[g]):,} and a cap of {int(cap_G[g]):,} {unit}"
        + (f", closer than its longest row of {int(largest_G[g]):,}" if floor_G[g] <= cap_G[g] else "")
        for g in np.flatnonzero((floor_G > 0) & (cap_G < budget) & (floor_G + overshoot_G > cap_G)).tolist()
    ]
    asked = int(floor_G.sum() + overshoot_G.sum())
    if asked > budget:
        longest = " with its longest row each" if unit == "tokens" else ""
        short.append(f"together they take {asked:,} {unit}{longest}, the budget is {budget:,}")
    if short:
        more = f"; and {len(short) - SHOWN} more" if len(short) > SHOWN else ""
        raise SettingsError(f"floor: cannot be met: {'; '.join(short[:SHOWN])}{more}; lower them, or raise the budget")
    room = int(np.minimum(cap_G, held_G).sum())
    if room < budget:
        raise SettingsError(
            f"cap: leaves room for {room:,} {unit}, the budget is {budget:,}; raise the caps, or lower the budget"
        )


def within(order_P: I64, limits: Limits) -> I64:
    """Go down the rows in the order of their worth and keep those that the limits allow.

    In rows the choice has the largest worth of all that the limits allow. In tokens a row that does not fit any more is
    passed over, until none fits.
    """
    if limits.cost_N is None:
        return _in_rows(order_P, limits)
    if limits.has_label_limits:
        return _by_ledger(order_P, limits)
    return _in_tokens(order_P, limits.cost_N, limits.budget)


def _in_rows(order_P: I64, limits: Limits) -> I64:
    """Floors first, then the best of what the caps leave."""
    if limits.codes_N is None or not limits.has_label_limits:
        return order_P[: limits.budget]
    codes_P = limits.codes_N[order_P]
    rank_P = _rank_within(codes_P)
    owed_P = rank_P < limits.floor_G[codes_P]
    free = np.flatnonzero(~owed_P & (rank_P < limits.cap_G[codes_P]))[: limits.budget - int(owed_P.sum())]
    owed_P[free] = True
    return np.asarray(order_P[owed_P])


def _rank_within(codes_P: NDArray[np.int32]) -> I64:
    """How many earlier entries have the same code."""
    by_code = np.argsort(codes_P, kind="stable")
    counts = np.bincount(codes_P)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rank_P = np.empty(len(codes_P), dtype=np.int64)
    rank_P[by_code] = np.arange(len(codes_P)) - first
    return rank_P


def _in_tokens(order_P: I64, cost_N: I64, budget: int) -> I64:
    """Runs of rows that fit, passing over those that do not."""
    cost_P = cost_N[order_P]
    taken: list[I64] = []
    start, room = 0, budget
    while start < len(order_P):
        fits = cost_P[start:] <= room
        if not fits.any():
            break
        start += int(fits.argmax())
        used = np.cumsum(cost_P[start:])
        stop = start + int(np.searchsorted(used, room, side="right"))
        taken.append(order_P[start:stop])
        room -= int(used[stop - start - 1])
        start = stop
    return np.concatenate(taken) if taken else order_P[:0]


def _by_ledger(order_P: I64, limits: Limits) -> I64:
    """Row by row: what a floor in tokens had set aside and did not need comes free at the end."""
    ledger, taken = Ledger(limits), np.zeros(len(limits.allowed_N), dtype=np.bool_)
    rows: list[int] = []
    while order_P.size:
        for row in order_P.tolist():
            code, cost = limits.code(row), limits.cost(row)
            if cost <= ledger.room(code):
                ledger.take(code, cost)
                taken[row] = True
                rows.append(row)
        order_P = order_P[~taken[order_P] & ledger.fits(order_P)]
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Rows that an exclusion list names, by row_id or doc_id."""

    where: str  # what the list is called
    mask_N: NDArray[np.bool_] = field(repr=False)
    listed: int  # different names in the list
    unknown: int  # of these, names that the corpus does not have


def read_exclusion(artifact: ArtifactReader, given: Path | str | Sequence[str]) -> Exclusion:
    """Rows named in a list, or in a file: Parquet with a column row_id or doc_id, or text with one name a line.

    Raises:
        SettingsError: not such a file, or none of its names, if it has any, is one of the corpus.
    """
    where = str(given) if isinstance(given, Path | str) else "exclude"
    values = pa.array(sorted(set(_file_names(Path(given)) if isinstance(given, Path | str) else given)), pa.string())
    mask_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    seen = np.zeros(len(values), dtype=np.bool_)
    start = 0
    for batch in artifact.row_batches(list(NAMES)):
        for name in NAMES:
            column = batch.column(name).cast(pa.string())
            place = pc.index_in(column, values)
            hit = place.is_valid().to_numpy(zero_copy_only=False)
            mask_N[start : start + batch.num_rows] |= hit
            seen[place.drop_null().to_numpy()] = True
        start += batch.num_rows
    if len(values) and not seen.any():
        example = str(next(artifact.row_batches(["row_id"])).column(0)[0].as_py())
        raise SettingsError(
            f"exclude {where}: none of its {len(values):,} names is a row_id or doc_id of the artifact; "
            f"expected names like {example!r}"
        )
    return Exclusion(where, mask_N, len(values), int((~seen).sum()))


def _file_names(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise SettingsError(f"exclude: {path}: is no file; expected {EXPECTED}")
    with readable_table(f"exclude: {path}", SettingsError, EXPECTED):
        if path.suffix != ".parquet":
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            return [line.rstrip("\r") for line in lines if line.strip()]
        columns = pq.read_schema(path).names
        found = [name for name in NAMES if name in columns]
        if not found:
            raise SettingsError(f"exclude: {path}: has columns {columns}; expected {EXPECTED}")
        names: list[str] = read_sealed(path, found[:1]).column(0).cast(pa.string()).drop_null().to_pylist()
        return names
