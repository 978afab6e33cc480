"""Options that several commands share, and their conversion to settings.

Settings come from a file, `--set` and other options; options override `--set`, which overrides the file. Start with
`merge_settings`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grasp.cli.app import option, rare
from grasp.errors import SettingsError
from grasp.text import parse_names
from grasp.yaml_files import parse_yaml, read_yaml, set_setting, set_settings

if TYPE_CHECKING:
    from grasp.pipeline.ray_cluster import ClusterSpec

# Used as annotations of command parameters, e.g. `art: Art` or `out: ResultFile = None`.
Art = Annotated[str, typer.Argument(metavar="ART", help="Directory or URL of the artifact.")]
ResultFile = Annotated[Path | None, option("--out FILE", "Write the table to a .parquet or .csv file.")]
JsonFile = Annotated[Path | None, option("--json FILE", "Write all results as JSON.")]
ConfigFile = Annotated[
    Path | None,
    rare("--config FILE", "YAML file of settings; the run.yaml of an earlier run repeats it."),
]
Assignments = Annotated[
    list[str],
    rare("--set NAME=VALUE", "Set any setting, e.g. corpus.limit=1000. Repeatable."),
]
ModelOverrides = Annotated[
    list[str],
    rare("--set NAME=VALUE", "Current path of the model (model.path=DIR), or code of it that may be run. Repeatable."),
]
RayHost = Annotated[
    str | None,
    rare("--ray HOST", "Use a Ray cluster: auto, head:6379, or local to start one on this machine."),
]


def merge_settings(
    config: Path | dict[str, Any] | None, assignments: list[str], flags: dict[str, Any]
) -> dict[str, Any]:
    """Merge a settings file, `--set` assignments and options into one nested mapping; later ones override.

    Args:
        config: a YAML file, or its content.
        assignments: values of `--set`, e.g. `corpus.limit=1000`.
        flags: values of other options by the dotted path of the setting; None is ignored.
    Raises:
        SettingsError: the file is not a mapping, or an assignment is not `name=value`.
    """
    data = read_yaml(config) if isinstance(config, Path) else config or {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError(f"--set: got `{assignment}`, expected name=value, e.g. features.tau=0.02")
        set_setting(data, name, parse_yaml(text, f"--set {name}"))
    return set_settings(data, flags)


def table_outputs(out: Path | None) -> dict[str, Path | None]:
    """Return the files that `select` and `mix` write for --out: the table, and its summary and protocol next to it.

    Args:
        out: value of the option; None: it was not given.
    Returns:
        Files by a phrase for messages.
    Raises:
        SettingsError: the name does not end in .parquet.
    """
    if out is None:
        return {}
    if out.suffix != ".parquet":
        raise SettingsError(f"--out: got {out}, expected a name that ends in .parquet")
    protocol = out.with_suffix(".protocol.yaml")
    return {"--out": out, "the summary of --out": out.with_suffix(".json"), "the protocol of --out": protocol}


def cluster_spec(host: str | None, workers: int | None, threads: int | None) -> "ClusterSpec | None":
    """Return the Ray cluster of `--ray`; None without the option.

    Args:
        host: address of a running cluster, or `local`: start one on this machine.
        workers: number of workers; None: one per GPU or core.
        threads: threads of each worker; None: 1.
    """
    if host is None:
        return None
    from grasp.pipeline.ray_cluster import ClusterSpec

    return ClusterSpec(None if host == "local" else host, workers, threads or 1)


def split_names(text: str | None) -> list[str] | None:
    """Split a comma-separated list; names that contain a comma are in double quotes, as in CSV."""
    return None if text is None else list(parse_names(text))
