"""From flags, --set and a settings file to settings. Flags win over --set, --set over the file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grasp.cli.app import option, rare
from grasp.errors import SettingsError
from grasp.text import listed
from grasp.yaml_files import parse_yaml, put, put_all, read_yaml

if TYPE_CHECKING:
    from grasp.extract.cluster import ClusterSpec

# What several commands take, declared once: `art: Art`, `runs: RunsDirectory = None`.
Art = Annotated[str, typer.Argument(metavar="ART", help="Directory or URL of the artifact.")]
TargetNames = Annotated[str | None, option("--target NAMES", "Targets, separated by commas. Default: all.")]
RunsPath = Annotated[
    Path | None,
    option("--runs DIR", "Runs, retrained or imported: the change in their unit, with an interval."),
]
ProtocolFile = Annotated[
    Path | None,
    rare("--protocol FILE", "Protocol to predict with. Default: the one that ships."),
]
ResultFile = Annotated[Path | None, option("--out FILE", "Write the table there: .parquet or .csv.")]
OnlyTarget = Annotated[str | None, option("--target NAME", "Target that is asked about. Default: the only one.")]
Kernel = Annotated[
    str | None,
    rare("--match", "By one kernel: gradient, token, input, neighbour, shift, tilt or pooled."),
]
JsonFile = Annotated[Path | None, option("--json FILE", "Write everything there as JSON.")]
TargetWeights = Annotated[
    str | None,
    option("--target NAMES", "Target, or several with weights: sciq=2,openbookqa=1. Default: the only one."),
]
TrainTokens = Annotated[
    str | None,
    option("--train-tokens N", "Tokens the model will be trained on, e.g. 100B: repeated ones count as worth less."),
]
Diversity = Annotated[
    float | None,
    rare("--diversity X", "Penalty on redundancy in place of the protocol's own geometry, e.g. 0.25. Default: none."),
]
Cautious = Annotated[
    bool,
    rare("--cautious", "Maximise the lower end of what --runs lead to expect."),
]
TextColumn = Annotated[
    str | None,
    option("--text-column COLUMN", "Column of the text, or of turns. Default: text or messages."),
]
IdColumn = Annotated[
    str | None,
    option("--id-column COLUMN", 'Column of the names. Default: row_id or id; "" for none.'),
]
Split = Annotated[str | None, option("--split NAME", "Split of a corpus that has several.")]
Partial = Annotated[bool, rare("--partial", "Use what unfinished runs have.")]
MethodSettings = Annotated[
    Path | None,
    rare("--method-settings FILE", "YAML of settings by method, or by a label of your own; see grasp methods."),
]
Checkpoints = Annotated[
    list[Path],
    rare(
        "--checkpoints DIR",
        "Checkpoint, or training run, for methods that look at several; repeatable. Default: beside the model.",
    ),
]
Cache = Annotated[
    Path | None,
    rare("--cache DIR", "Where scores of methods are kept. Default: in the artifact."),
]
Resamples = Annotated[
    int,
    rare("--resamples N", "Bootstrap resamples of the subsets.", min=10),
]
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
    from grasp.extract.cluster import ClusterSpec

    return ClusterSpec(address, workers, threads or 1)


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; a name with a comma in it stands in double quotes, as in CSV."""
    return None if text is None else list(listed(text))
