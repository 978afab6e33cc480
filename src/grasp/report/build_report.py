"""The verb `report`: everything that is known of an artifact on one page that needs no network."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.files import Reads, check_outputs, written_aside
from grasp.predict.scoring_rule import ScoringProtocol, resolve_protocol
from grasp.report.findings import findings
from grasp.report.page import render
from grasp.runs.alignment import bind_runs
from grasp.runs.retrained import TrainingRuns
from grasp.runs.table import RunTable
from grasp.text import listed

EXPLAINED = 8  # best rows of each target whose words are shaded, where the model is at hand


def report(
    artifact: ArtifactReader,
    out: Path | str,
    *,
    by: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    runs: TrainingRuns | RunTable | Path | str | None = None,
    selection: Path | str | None = None,
    mixture: Path | str | None = None,
    suspects: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    explain: int = EXPLAINED,
    partial: bool = False,
    previous: Sequence[str | Any] = (),
) -> Path:
    """Write one HTML page: what to keep, and what it is worth.

    It says how far to trust that, shows the rows that teach each target, and predicts while sliders move.

    Args:
        out: HTML file to write; it needs no network.
        by: labels, separated by commas. Default: those of 2 to 100 values.
        target: targets, separated by commas. Default: all.
        runs: runs, retrained or imported: the change in their unit, with an interval.
        selection: JSON that `grasp select` wrote beside its --out.
        mixture: JSON that `grasp mix` wrote beside its --out.
        suspects: Parquet that `grasp detect` wrote with --out.
        protocol: protocol to predict with. Default: the one that ships.
        explain: best rows of each target whose words are shaded, if the model is at hand; half as many of the worst.
        partial: use what unfinished runs have.
        previous: artifact of an earlier checkpoint on the same corpus, oldest first.
    Returns:
        The file.
    Raises:
        SettingsError: a file that is not of this artifact, or one that cannot be written.
        ProtocolError: the artifact does not fit the protocol, or has no such target.
        RunsError: runs and artifact do not belong together.
        SubsetError: no such label, or one with a single value.
    """
    targets = None if target is None else listed(target, artifact.targets)
    by = listed(by or (), artifact.manifest.details.get("labels", ()))
    for name, values in (("target", targets or ()), ("by", by)):
        if twice := sorted({value for value in values if list(values).count(value) > 1}):
            raise SettingsError(f"{name}: got {', '.join(twice)} more than once; name each once")
    place, environment = Path(out), None if runs is None else bind_runs(artifact, runs)
    files = {"selection": selection, "mixture": mixture, "suspects": suspects}
    paths = {name: None if file is None else Path(file) for name, file in files.items()}
    earlier: list[ArtifactReader] = [
        ArtifactReader.open(one) if isinstance(one, Path | str) else getattr(one, "files", one) for one in previous
    ]
    reads: dict[str, Reads] = {f"{name} reads": path for name, path in paths.items()}
    reads |= {"holds the runs": None if environment is None else environment.path}
    reads |= {"is an earlier checkpoint's": [one.path for one in earlier]}
    own = Path(protocol) if isinstance(protocol, Path | str) else None
    check_outputs({"out": place}, artifact.reads | reads | {"protocol reads": own})
    flags = {  # of the command line that writes the page, which is printed on it
        "--by": ",".join(by) or None,
        "--target": None if targets is None else ",".join(targets),
        "--runs": None if environment is None else environment.path,
        "--protocol": own,
        "--selection": paths["selection"],
        "--mixture": paths["mixture"],
        "--detect": paths["suspects"],
        "--explain": None if explain == EXPLAINED else explain,
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    given += ["--partial"] if partial else []
    given += [part for one in earlier for part in ("--previous", one.where)]
    command = shlex.join(["grasp", "report", artifact.where, *given, "--out", str(place)])
    found = findings(
        artifact,
        resolve_protocol(protocol, artifact, choosing=True),
        target=targets,
        by=by,
        previous=earlier,
        environment=environment,
        partial=partial,
        **paths,
        protocol_path=own,
        explain=explain,
        command=command,
    )
    page = render(found)
    try:
        with written_aside(place) as part:
            part.write_bytes(page.encode())
    except (IsADirectoryError, FileNotFoundError, NotADirectoryError) as err:
        raise SettingsError(f"--out: got {place}, which cannot be written ({err.strerror}); name a file") from err
    return place
