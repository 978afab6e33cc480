"""grasp evaluate"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.options import asked_names, names, published_methods
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import STREAMS, Reads, check_outputs, write_whole
from grasp.text import printable

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.predict.protocol import ScoringProtocol
    from grasp.runs.candidates import Candidate
    from grasp.runs.configured import ConfiguredMethod
    from grasp.runs.environment import Environment

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp evaluate art --environment env --protocol protocol.yaml --csv result.csv
  grasp evaluate art --environment test --controls --development dev --oracle ridge
  grasp evaluate art --environment env --methods bm25,loss,datamodels
  grasp evaluate art --environment env --method-settings methods.yaml --checkpoints env/reference/seed-0
  grasp evaluate art --environment env --predictions theirs.parquet --predictions row_scores.npy
"""


@command(EXAMPLES)
def evaluate(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    environment: Path = typer.Option(..., "--environment", help="Directory of retrained subsets; see grasp retrain."),
    protocol: Path | None = typer.Option(None, "--protocol", help="Protocol file, compared beside the one that ships."),
    targets: str | None = typer.Option(None, "--targets", help="Targets, separated by commas; none: all in common."),
    controls: bool = typer.Option(False, "--controls", help="The paper's controls and ablations as well."),
    development: list[Path] = typer.Option(
        [], "--development", help="Environment that the controls' weights are selected on; repeatable."
    ),
    family: Path | None = typer.Option(None, "--family", help="Protocols that the controls restrict."),
    methods: str | None = typer.Option(
        None, "--methods", help="Published methods, separated by commas; see grasp methods."
    ),
    method_settings: Path | None = typer.Option(
        None, "--method-settings", help="YAML of settings by method, or by a label of your own; see grasp methods."
    ),
    checkpoints: list[Path] = typer.Option(
        [], "--checkpoints", help="Checkpoint, or directory of a training run; none: beside the model. Repeatable."
    ),
    cache: Path | None = typer.Option(None, "--cache", help="Where methods' scores are kept; none: in the artifact."),
    predictions: list[Path] = typer.Option(
        [], "--predictions", help="Parquet or .npy of utilities by subset, or of scores by row; repeatable."
    ),
    oracle: list[str] = typer.Option(
        [], "--oracle", help="ridge or lasso, fitted on the retrained subsets; :masks or :LABEL says on what."
    ),
    partial: bool = typer.Option(False, "--partial", help="Use what an unfinished environment has."),
    resamples: int = typer.Option(1_000, "--resamples", min=10, help="Bootstrap resamples of the subsets."),
    json_file: Path | None = typer.Option(None, "--json", help="Everything, as JSON."),
    csv_file: Path | None = typer.Option(None, "--csv", help="A line a method and target, as CSV."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Compare predictions with retraining, method by method.

    Rho is Spearman's, with 95 % intervals, beside the noise ceiling: what a perfect predictor would reach. Scores of
    published methods are computed once and kept; after a kill the same command goes on where it was.
    """
    if not controls and (development or family is not None):
        raise SettingsError("evaluate: --development and --family have no meaning without --controls; leave them out")
    published = _methods(methods, method_settings, checkpoints, cache)
    from grasp.artifact.reader import Artifact
    from grasp.runs.environment import Environment
    from grasp.runs.methods import Asked, compare

    artifact, found = Artifact.open(path), Environment.open(environment)
    read: dict[str, Reads] = {
        "is the environment": environment,
        "--development reads": development,
        "--predictions reads": predictions,
    }
    read |= {"--protocol reads": protocol, "--family reads": family, "--method-settings reads": method_settings}
    read |= {"is a checkpoint": checkpoints}
    check_outputs({"--json": json_file, "--csv": csv_file}, artifact.reads | read, streamed=("--json", "--csv"))
    protocols = _protocols(protocol)
    restricted, notes = _controls(artifact, found, development, family, resamples) if controls else ({}, [])
    with Watch(quiet=quiet) as watch:
        asked = Asked(
            protocols=protocols,
            controls=restricted,
            files=predictions,
            oracles=oracle,
            notes=[*(f"protocol {name}: {one.provenance}" for name, one in protocols.items()), *notes],
            methods=published,
            checkpoints=checkpoints,
            cache=cache,
            progress=watch,
        )
        report = compare(artifact, found, asked, targets=names(targets), partial=partial, resamples=resamples)
    if not {json_file, csv_file} & {*STREAMS}:
        print(printable(report.table()), end="")
    for file, text in ((json_file, report.to_json), (csv_file, report.to_csv)):
        if file in STREAMS:
            print(printable(text()), end="")
        elif file is not None:
            write_whole(file, text().encode())


def _methods(
    text: str | None, method_settings: Path | None, checkpoints: list[Path], cache: Path | None
) -> "tuple[ConfiguredMethod, ...]":
    """The published methods that are asked for.

    Raises:
        SettingsError: no such method, none named where one should be, or a flag that none of them has a use for.
    """
    asked = asked_names("--methods", text)
    found = published_methods(asked, method_settings, {"--checkpoints": checkpoints, "--cache": cache})
    if checkpoints and not any("checkpoints" in one.method.looks_at for one in found):
        raise SettingsError("--checkpoints: no meaning with these methods, none of which looks at any; leave it out")
    return found


def _protocols(path: Path | None) -> "dict[str, ScoringProtocol]":
    """The protocol that ships and, beside it, the one of a file; two of one name are told apart by the file's."""
    from grasp.predict.protocol import default_protocol, load_protocol

    shipped = default_protocol()
    if path is None:
        return {shipped.name: shipped}
    chosen = load_protocol(path)
    name = chosen.name if chosen.name != shipped.name else f"{chosen.name} ({path.name})"
    return {shipped.name: shipped, name: chosen}


def _controls(
    artifact: "Artifact", environment: "Environment", development: list[Path], family: Path | None, resamples: int
) -> "tuple[dict[str, Candidate], list[str]]":
    """Controls with weights selected on development environments; none given: on the evaluated one, if it is one."""
    from grasp.runs.candidates import default_family, load_family
    from grasp.runs.environment import Environment
    from grasp.runs.methods import control_methods, developments_of

    if not development and environment.role != "dev":
        raise SettingsError(
            f"--controls: {environment.path} is held out, so no weights may be selected on it; name a development "
            "environment with --development"
        )
    full = default_family() if family is None else load_family(family)
    developments = developments_of(
        [artifact],
        [Environment.open(path) for path in development] or [environment],
        calibration_subsets=full.calibration_subsets,
    )
    chosen, notes = control_methods(full, developments, resamples=resamples)
    own = not development
    return chosen, notes + ["the controls were selected on the results shown: they look better than they are"] * own
