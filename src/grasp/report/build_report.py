"""The `report` command: write everything that is known about an artifact to one self-contained HTML page.

Start with `report`.
"""

import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grasp.artifact.reader import ArtifactReader
from grasp.entry_points import load
from grasp.file_readers import GROUP
from grasp.files import check_outputs, write_atomically
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.progress import Progress
from grasp.report.findings import collect_findings
from grasp.report.page import render
from grasp.runs.imported_runs import bind_runs
from grasp.runs.table import RunTable
from grasp.runs.training_runs import TrainingRuns
from grasp.select.objective import format_targets, weighted_targets
from grasp.text import parse_names

DEFAULT_EXPLAINED = 8  # most helpful rows per target whose words are shaded by their contribution, given the model
FRAME_HEIGHT = 900  # pixels, in a notebook

if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12, only the class of the system can be subclassed


class ReportFile(_Path):
    """The path of an HTML page; a notebook shows the page."""

    def _repr_html_(self) -> str:
        # not srcdoc, in which links to parts of the page would lead to the notebook
        page = f"data:text/html;charset=utf-8;base64,{b64encode(self.read_bytes()).decode()}"
        frame = f'width="100%" height="{FRAME_HEIGHT}" style="border: 0"'
        return f'<iframe {frame} sandbox="allow-scripts" src="{page}"></iframe>'


def report(
    artifact: ArtifactReader,
    out: Path | str,
    *,
    by: str | Sequence[str] | None = None,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    runs: TrainingRuns | RunTable | Path | str | None = None,
    selection: Path | str | None = None,
    mixture: Path | str | None = None,
    monitor: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    explain: int = DEFAULT_EXPLAINED,
    progress: Progress | None = None,
) -> ReportFile:
    """Write a self-contained HTML report on which data to keep, and why.

    The page shows the agreement with retrained models, the rows that help or hurt each target, and sliders that
    predict the effect of any mixture.

    Args:
        out: HTML file to write; opens without a network connection.
        by: labels to slice by, separated by commas. Default: all labels with 2 to 100 values.
        target: targets, or several with weights, e.g. sciq=2,openbookqa=1. Default: all.
        runs: retrained or imported runs; changes are then in the unit of the runs, with confidence intervals if all
            runs are finished.
        selection: JSON summary written by `grasp select` next to its --out. Default: the best 30 % of the rows.
        mixture: JSON summary written by `grasp mix` next to its --out.
        monitor: output directory of a training with grasp.Monitor, whose tables the page shows.
        protocol: protocol to predict with. Default: the built-in one.
        explain: number of most helpful rows per target whose words are shaded, and half as many of the most harmful;
            requires the model.
        progress: receives the rows that are explained.

    Returns:
        Path of the HTML file; a notebook shows the page.

    Raises:
        SettingsError: a file belongs to another artifact, or the output cannot be written.
        ProtocolError: the artifact does not fit the scoring rule, or has no such target.
        RunsError: the runs do not belong to the artifact, or the training has no table.
        SubsetError: unknown label, or a label with a single value.
    """
    by = tuple(dict.fromkeys(parse_names(by or (), artifact.manifest.details.get("labels", ()))))
    targets = None if target is None else weighted_targets(target, artifact.targets)
    out = Path(out)
    bound_runs = None if runs is None else bind_runs(artifact, runs)
    protocol_path = Path(protocol) if isinstance(protocol, Path | str) else None
    files = {"protocol": protocol_path, "selection": selection, "mixture": mixture, "monitor": monitor}
    paths = {name: None if file is None else Path(file) for name, file in files.items()}
    paths["runs"] = None if bound_runs is None else bound_runs.path
    check_outputs({"out": out}, {**artifact.protected_paths, **{f"is read as {name}": paths[name] for name in paths}})
    training = None if monitor is None else load(GROUP, "report.monitor").read(paths["monitor"])
    flags = {
        "--by": ",".join(by) or None,
        "--target": None if targets is None else format_targets(targets),
        **{f"--{name}": path for name, path in paths.items()},
        "--explain": None if explain == DEFAULT_EXPLAINED else explain,
    }
    options = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    # the command line that reproduces the page, which the page shows
    command = shlex.join(["grasp", "report", artifact.location, *options, "--out", str(out)])
    findings = collect_findings(
        artifact,
        resolve_protocol(protocol, artifact),
        target=targets,
        by=by,
        runs=bound_runs,
        selection=paths["selection"],
        mixture=paths["mixture"],
        protocol_path=protocol_path,
        explain=explain,
        command=command,
        progress=progress,
    )
    write_atomically(out, render(findings, training=training).encode())
    return ReportFile(out)
