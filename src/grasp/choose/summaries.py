"""What `grasp select` and `grasp mix` leave beside their results, read back and checked."""

import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from grasp.errors import SettingsError
from grasp.settings import describe


class Summary(BaseModel):
    """Base of what is read: fields that are not shown may be there."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Named(Summary):
    """What a scoring protocol is called."""

    name: str


class CurvePlaces(Summary):
    """Value of the first rows of a selection."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    value: tuple[float, ...]


class ValueShare(Summary):
    """One value of the label that floors and caps speak of, in the unit of the budget."""

    value: str
    pool: int
    taken: int


class Realized(Summary):
    """Realized utility, or its change, in nats a token."""

    expected: float
    low: float
    high: float


class TrustSummary(Summary):
    """What an environment says of it."""

    what: str
    change: dict[str, Realized]  # against the whole corpus, by target
    warnings: tuple[str, ...]


class SelectionSummary(Summary):
    """A selection of rows, without the rows."""

    kind: Literal["selection"]
    rows: int
    tokens: int
    corpus_rows: int
    budget: int
    unit: str
    targets: dict[str, float]
    value: float
    utility: dict[str, float]
    utility_of_the_corpus: dict[str, float]
    bound: float | None
    guarantee: str
    curve: CurvePlaces
    labels: tuple[ValueShare, ...]
    protocol: Named
    calibration: str
    notes: tuple[str, ...]
    trust: TrustSummary | None = None


class MixedSlice(Summary):
    """Current and proposed weight of one slice."""

    value: str
    rows: int
    current: float
    proposed: float


class MixtureSummary(Summary):
    """Weights of the values of a label."""

    kind: Literal["mixture"]
    label: str
    slices: tuple[MixedSlice, ...]
    targets: dict[str, float]
    utility: dict[str, float]
    current_utility: dict[str, float]
    gain: float
    optimum: str
    protocol: Named
    calibration: str
    notes: tuple[str, ...]
    trust: TrustSummary | None = None


S = TypeVar("S", bound=Summary)
FLAGS = {"selection": "--selection", "mixture": "--mixture"}


def read_selection(path: Path, n_rows: int, flag: str = "--selection") -> SelectionSummary:
    """The summary of a selection from a corpus of `n_rows` rows.

    Raises:
        SettingsError: not such a file, or one of another corpus.
    """
    found = _read(path, flag, SelectionSummary, "grasp select")
    _check_rows(path, flag, found.corpus_rows, n_rows)
    return found


def read_mixture(path: Path, n_rows: int, flag: str = "--mixture") -> MixtureSummary:
    """The summary of a mixture over a corpus of `n_rows` rows.

    Raises:
        SettingsError: not such a file, or one of another corpus.
    """
    found = _read(path, flag, MixtureSummary, "grasp mix")
    _check_rows(path, flag, sum(one.rows for one in found.slices), n_rows)
    return found


def _read(path: Path, flag: str, kind: type[S], command: str) -> S:
    expected = f"expected the .json that {command} writes beside its --out"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise SettingsError(f"{flag}: {path}: no such file; {expected}") from err
    except (IsADirectoryError, UnicodeDecodeError, json.JSONDecodeError) as err:
        raise SettingsError(f"{flag}: {path} is not JSON; {expected}") from err
    found = data.get("kind") if isinstance(data, dict) else None
    if isinstance(found, str) and found in FLAGS and FLAGS[found] != flag:
        raise SettingsError(f"{flag}: {path} is the summary of a {found}, give it with {FLAGS[found]}; {expected}")
    try:
        return kind.model_validate(data)
    except ValidationError as err:
        raise SettingsError(f"{describe(err, f'{flag}: {path}')}; {expected}") from err


def _check_rows(path: Path, flag: str, found: int, n_rows: int) -> None:
    if found != n_rows:
        raise SettingsError(
            f"{flag}: {path} was made from {found:,} rows, the artifact has {n_rows:,}; make it from this artifact"
        )
