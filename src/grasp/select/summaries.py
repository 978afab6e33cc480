"""Reads what `grasp select` and `grasp mix` left beside their results, for the report; checks whose corpus it is of."""

from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.select.objective import SUMMARY_VERSION
from grasp.store.records import Signed
from grasp.text import parse_json


class Summary(BaseModel):
    """A part of a summary. Fields that the report does not show are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Named(Summary):
    """What a scoring protocol is called."""

    name: str


class CurvePlaces(Summary):
    """What other budgets are worth: the first rows of a choice."""

    rows: tuple[int, ...]
    effect: tuple[float, ...]  # of the last of them
    value: tuple[float, ...]  # of all of them


class ValueShare(Summary):
    """One value of the label that floors and caps speak of, in the unit of the budget."""

    value: str
    pool: int
    taken: int  # stored name


class TargetChange(Summary):
    """Predicted change of one target against the whole corpus; with runs in nats or `runs_unit`, with an interval."""

    target: str
    weight: float
    change: float
    nats: float | None = None
    nats_low: float | None = None
    nats_high: float | None = None


class OptimizationSummary(Summary):
    """What a selection and a mixture have in common."""

    kind: str
    corpus: str
    headline: str
    targets: tuple[TargetChange, ...]
    runs_unit: str | None = None
    value: float
    scale: str
    protocol: Named
    notes: tuple[str, ...]


class SelectionSummary(OptimizationSummary):
    """A selection of rows, without the rows."""

    kind: Literal["selection"]
    rows: int
    documents: int | None = None  # where whole ones were chosen
    bound: float | None
    guarantee: str
    curve: CurvePlaces
    labels: tuple[ValueShare, ...]


class MixedSlice(Summary):
    """Current and proposed share of one slice."""

    value: str
    rows: int
    now: float
    proposed: float


class MixtureSummary(OptimizationSummary):
    """Shares of the values of a label."""

    kind: Literal["mixture"]
    label: str
    slices: tuple[MixedSlice, ...]
    optimum: str


S = TypeVar("S", SelectionSummary, MixtureSummary)
COMMANDS = {"selection": "grasp select", "mixture": "grasp mix"}


def read_summary(kind: type[S], path: Path, artifact: ArtifactReader) -> S:
    """The summary of a selection, or a mixture, of this artifact's corpus.

    Raises:
        SettingsError: not such a file, or one of another corpus.
    """
    (name,) = get_args(kind.model_fields["kind"].annotation)
    flag, expected = f"--{name}", f"expected the .json that {COMMANDS[name]} writes beside its --out"
    try:
        content = path.read_bytes()
        data = parse_json(content)
    except FileNotFoundError as err:
        raise SettingsError(f"{flag}: {path}: no such file; {expected}") from err
    except (IsADirectoryError, ValueError) as err:
        raise SettingsError(f"{flag}: {path} is not JSON; {expected}") from err
    kind_name = data.get("kind") if isinstance(data, dict) else None
    if isinstance(kind_name, str) and kind_name in COMMANDS and kind_name != name:
        raise SettingsError(f"{flag}: {path} is the summary of a {kind_name}, give it with --{kind_name}; {expected}")
    what, recovery_hint = (
        f"the summary of a {name} ({COMMANDS[name]} writes it beside --out)",
        f"run {COMMANDS[name]} again",
    )
    signed = Signed("", kind, what, name, SUMMARY_VERSION, recovery_hint, SettingsError, key="kind")
    summary = signed.parse(f"{flag}: {path}", content)
    corpus = artifact.manifest.fingerprints.get("corpus")
    if summary.corpus != corpus:
        raise SettingsError(
            f"{flag}: {path} was made from another artifact: corpus {summary.corpus!r}, here {corpus!r}; make it from "
            "this one"
        )
    return summary
