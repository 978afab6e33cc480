"""The verb `report`: everything that is known of an artifact on one page that needs no network."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.files import Reads, check_outputs
from grasp.predict.protocol import ScoringProtocol, as_protocol
from grasp.report import EXPLAINED
from grasp.report.findings import ReportRequest, findings
from grasp.report.page import write_report
from grasp.runs.environment import Environment
from grasp.runs.imported import runs_beside
from grasp.runs.table import RunTable
from grasp.text import listed


def report(
    artifact: ArtifactReader,
    out: Path | str,
    *,
    by: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    runs: Environment | RunTable | Path | str | None = None,
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
        EnvironmentDataError: runs and artifact do not belong together.
        SubsetError: no such label, or one with a single value.
    """
    targets = None if target is None else listed(target, artifact.targets)
    by = listed(by or (), artifact.manifest.details.get("labels", ()))
    for name, values in (("target", targets or ()), ("by", by)):
        if twice := sorted({value for value in values if list(values).count(value) > 1}):
            raise SettingsError(f"{name}: got {', '.join(twice)} more than once; name each once")
    place, environment = Path(out), None if runs is None else runs_beside(artifact, runs)
    files = {"selection": selection, "mixture": mixture, "suspects": suspects}
    paths = {name: None if file is None else Path(file) for name, file in files.items()}
    earlier = [_reader(one) for one in previous]
    reads: dict[str, Reads] = {f"{name} reads": path for name, path in paths.items()}
    reads |= {"holds the runs": None if environment is None else environment.path}
    reads |= {"is an earlier checkpoint's": [one.path for one in earlier]}
    own = Path(protocol) if isinstance(protocol, Path | str) else None
    check_outputs({"out": place}, artifact.reads | reads | {"protocol reads": own})
    request = ReportRequest(
        targets=targets,
        by=by,
        previous=earlier,
        environment=environment,
        partial=partial,
        selection=paths["selection"],
        mixture=paths["mixture"],
        suspects=paths["suspects"],
        protocol_path=own,
        explain=explain,
    )
    request = replace(request, command=_command(artifact, place, request))
    write_report(findings(artifact, as_protocol(protocol), request), place)
    return place


def _reader(artifact: Any) -> ArtifactReader:
    """The files of an artifact: of one in the hand, or by its place."""
    if isinstance(artifact, Path | str):
        return ArtifactReader.open(artifact)
    files: ArtifactReader = getattr(artifact, "files", artifact)
    return files


def _command(artifact: ArtifactReader, out: Path, request: ReportRequest) -> str:
    """The command line that writes the page; it is printed on it."""
    flags = {
        "--by": ",".join(request.by) or None,
        "--target": None if request.targets is None else ",".join(request.targets),
        "--runs": None if request.environment is None else request.environment.path,
        "--protocol": request.protocol_path,
        "--selection": request.selection,
        "--mixture": request.mixture,
        "--detect": request.suspects,
        "--explain": None if request.explain == EXPLAINED else request.explain,
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    given += ["--partial"] if request.partial else []
    given += [part for earlier in request.previous for part in ("--previous", earlier.where)]
    return shlex.join(["grasp", "report", artifact.where, *given, "--out", str(out)])
