"""Read the summaries that `grasp select` and `grasp mix` save next to their results. Start with `read_summary`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.select.guards import GuardOutcome
from grasp.select.objective import SUMMARY_VERSION
from grasp.store.records import Signed


class Summary(BaseModel):
    """A part of a summary; fields that the report does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ValueShare(Summary):
    """One value of the label that floors and caps refer to, in the unit of the budget."""

    value: str
    pool: int
    selected: int


class TargetChange(Summary):
    """Predicted change of one target relative to the whole corpus; with runs also in `runs_unit`, with an interval.

    `expected` is the change on other questions of the target, if the protocol estimates tasks.
    """

    target: str
    weight: float
    expected: float | None = None
    expected_low: float | None = None
    expected_high: float | None = None
    change: float
    nats: float | None = None
    nats_low: float | None = None
    nats_high: float | None = None


class OptimizationSummary(Summary):
    """The fields that the summaries of selections and of mixtures have in common."""

    kind: str
    corpus: str
    headline: str
    params: Mapping[str, Any]  # arguments of the command
    targets: tuple[TargetChange, ...]
    runs_unit: str | None = None
    value: float
    scale: str
    protocol: Mapping[str, Any]  # by name of setting
    outside: str = ""
    notes: tuple[str, ...]


class SelectionSummary(OptimizationSummary):
    """A selection of rows, without the rows."""

    kind: Literal["selection"]
    rows: int
    tokens: int
    documents: int | None = None  # number of documents, if whole documents were selected
    labels: tuple[ValueShare, ...]


class SliceShares(Summary):
    """Current and proposed share of one slice."""

    value: str
    now: float
    proposed: float


class MixtureSummary(OptimizationSummary):
    """Shares of the values of a label."""

    kind: Literal["mixture"]
    label: str
    slices: tuple[SliceShares, ...]
    guards: tuple[GuardOutcome, ...] = ()


S = TypeVar("S", SelectionSummary, MixtureSummary)
COMMANDS = {"selection": "grasp select", "mixture": "grasp mix"}


def read_summary(kind: type[S], path: Path, artifact: ArtifactReader) -> S:
    """Read the summary of a selection or of a mixture, and check that it is of the same corpus.

    Args:
        kind: class of the summary.
        path: file that `save` wrote.
        artifact: artifact of the corpus.
    Raises:
        SettingsError: the file is not such a summary, is damaged, or is of another corpus.
    """
    (name,) = get_args(kind.model_fields["kind"].annotation)
    (other,) = COMMANDS.keys() - {name}
    flag = f"--{name}"
    try:
        content = path.read_bytes()
    except OSError as err:
        raise SettingsError(
            f"{flag}: {path}: {str(err.strerror).lower()}; expected the .json that {COMMANDS[name]} writes beside --out"
        ) from err
    signed = Signed(
        name="",
        model=kind,
        description=f"the summary of a {name} ({COMMANDS[name]} writes it next to --out; for a {other}: --{other})",
        format=name,
        version=SUMMARY_VERSION,
        recovery_hint=f"run {COMMANDS[name]} again",
        error_type=SettingsError,
        format_field="kind",
    )
    summary = signed.parse(f"{flag}: {path}", content)
    fingerprint = artifact.manifest.fingerprints.get("corpus")
    if summary.corpus != fingerprint:
        raise SettingsError(
            f"{flag}: {path} belongs to another corpus: {summary.corpus!r}, this artifact has {fingerprint!r}; run "
            f"{COMMANDS[name]} on this artifact"
        )
    return summary
