"""From flags, --set and a settings file to settings. Flags win over --set, --set over the file."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grasp.cli.app import MORE
from grasp.dotted import leaf, put
from grasp.errors import SettingsError
from grasp.settings import parse_yaml, read_yaml

if TYPE_CHECKING:
    from grasp.extract.cluster import ClusterSpec

# What several commands take, declared once: `art: Art`, `runs: RunsDirectory = None`.
Art = Annotated[str, typer.Argument(metavar="ART", help="Directory or URL of the artifact.")]
TargetNames = Annotated[
    str | None, typer.Option("--target", metavar="NAMES", help="Targets, separated by commas. Default: all.")
]
EnvironmentPath = Annotated[
    Path | None,
    typer.Option(
        "--environment", metavar="DIR", help="Runs, retrained or imported: the change in their unit, with an interval."
    ),
]
ProtocolFile = Annotated[
    Path | None,
    typer.Option(
        "--protocol",
        metavar="FILE",
        help="Protocol to predict with. Default: the one that ships.",
        rich_help_panel=MORE,
    ),
]
ResultFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the table there: .parquet or .csv.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Plain lines instead of a progress bar.", rich_help_panel=MORE)]


def merged(config: Path | dict[str, Any] | None, assignments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """One nested mapping; `flags` and `assignments` name leaves by dotted path, and None flags say nothing.

    Args:
        config: a YAML file, or what was read of one.
    Raises:
        SettingsError: the file is not a mapping, or an assignment is not `name=value`.
    """
    data = read_yaml(config) if isinstance(config, Path) else config or {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError(f"--set: got `{assignment}`, expected name=value, e.g. features.tau=0.02")
        put(data, name, parse_yaml(text, f"--set {name}"))
    for name, value in flags.items():
        if value is not None:
            put(data, name, value)
    return data


def require(data: dict[str, Any], flags: Mapping[str, Sequence[str]], where: str) -> None:
    """See that nothing is left out; `flags` maps a flag to the settings of which one must have a value.

    Raises:
        SettingsError: every flag that is missing, with the setting that it stands for.
    """
    missing = [f"{flag} ({paths[0]})" for flag, paths in flags.items() if not any(leaf(data, path) for path in paths)]
    if missing:
        raise SettingsError(
            f"{where}: missing {', '.join(missing)}; give it as a flag, by --set, or in a settings file with --config"
        )


def beside(flag: str, out: Path | None) -> dict[str, Path | None]:
    """What select and mix write with the table of `flag`: its summary and its protocol."""
    if out is None:
        return {}
    if out.suffix != ".parquet":
        raise SettingsError(f"{flag}: got {out}, expected a name that ends in .parquet")
    return {
        flag: out,
        f"the summary of {flag}": out.with_suffix(".json"),
        f"the protocol of {flag}": out.with_suffix(".protocol.yaml"),
    }


def cluster(engine: str, workers: int | None, address: str | None, threads: int | None) -> "ClusterSpec | None":
    """The cluster to work on; none for `local`.

    Raises:
        SettingsError: no such engine, or an address without a cluster.
    """
    if engine not in ("local", "ray"):
        raise SettingsError(f"--engine: got {engine!r}, expected local or ray")
    if engine == "local":
        if address is not None:
            raise SettingsError(f"--address: got {address!r}, which has no meaning without --engine ray; leave it out")
        return None
    from grasp.extract.cluster import ClusterSpec

    return ClusterSpec(address, workers, threads or 1)


def asked_names(flag: str, text: str | None) -> list[str] | None:
    """The methods that a flag names; none where it is not given.

    Raises:
        SettingsError: it is given and names nothing.
    """
    chosen = names(text)
    if chosen == []:
        raise SettingsError(f"{flag}: got {text!r}, expected names separated by commas; see grasp methods")
    return chosen


def distinct_names(flag: str, text: str | None) -> list[str] | None:
    """A comma-separated list in which nothing is named twice.

    Raises:
        SettingsError: something is.
    """
    found = names(text) or []
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise SettingsError(f"{flag}: got {', '.join(twice)} more than once; name each once")
    return names(text)


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; a name with a comma in it stands in double quotes, as in CSV."""
    if text is None:
        return None
    try:
        parts = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error as err:
        raise SettingsError(f"got {text[:200]!r}, expected names separated by commas: {err}") from err
    return [part.strip() for part in parts if part.strip()]
