"""From flags, --set and a settings file to settings. Flags win over --set, --set over the file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grasp.cli.app import option, rare
from grasp.errors import SettingsError
from grasp.text import listed
from grasp.yaml_files import parse_yaml, put, put_all, read_yaml

if TYPE_CHECKING:
    from grasp.build.ray_cluster import ClusterSpec

# What several commands take, declared once: `art: Art`, `runs: RunsDirectory = None`.
Art = Annotated[str, typer.Argument(metavar="ART", help="Directory or URL of the artifact.")]
ResultFile = Annotated[Path | None, option("--out FILE", "Write the table there: .parquet or .csv.")]
JsonFile = Annotated[Path | None, option("--json FILE", "Write everything there as JSON.")]
ConfigFile = Annotated[
    Path | None,
    rare("--config FILE", "YAML of settings; a run.yaml repeats what wrote it."),
]
Assignments = Annotated[
    list[str],
    rare("--set NAME=VALUE", "Any setting, e.g. corpus.limit=1000; repeatable."),
]
OwnSettings = Annotated[
    list[str],
    rare("--set NAME=VALUE", "Where the model is now (model.path=DIR), or code of it that may be run; repeatable."),
]
Address = Annotated[
    str | None,
    rare("--address HOST", "Ray cluster, e.g. auto or head:6379. Default: one is started on this machine."),
]
Quiet = Annotated[bool, rare("--quiet", "Plain lines instead of a progress bar.")]


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
    return put_all(data, flags)


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
    from grasp.build.ray_cluster import ClusterSpec

    return ClusterSpec(address, workers, threads or 1)


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; a name with a comma in it stands in double quotes, as in CSV."""
    return None if text is None else list(listed(text))
