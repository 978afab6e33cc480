"""The verbs of the room: retrain, open runs, evaluate, calibrate. They open nothing twice and print nothing.

`retrain` gives runs; `evaluate` says how well predictions agree with them; `calibrate` chooses a protocol on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.protocol import ScoringProtocol, default_protocol, load_protocol, save_protocol
from grasp.results import Result
from grasp.runs.candidates import Candidate, ProtocolFamily, default_family, load_family
from grasp.runs.configured import ConfiguredMethod
from grasp.runs.environment import Environment
from grasp.runs.evaluate import EvaluationReport
from grasp.runs.evidence import evidence, short_family, subsets_for
from grasp.runs.methods import Contenders, compare, control_methods, developments_of
from grasp.runs.metrics import RESAMPLES
from grasp.runs.selection import (
    DELTA,
    Selection,
    freeze,
    provenance,
    provenance_path,
    select,
    write_provenance,
)

SHOWN = 10  # protocols of a calibration


def open_runs(path: Path | str) -> Environment:
    """Runs that were retrained or imported, by their directory.

    Raises:
        EnvironmentDataError: it holds none.
    """
    return Environment.open(Path(path))


# ------------------------------------------------------------------------------------------------ retrain


@dataclass(frozen=True, eq=False, repr=False)
class Retraining(Result):
    """Runs that were trained, and what comes next."""

    runs: Environment | None = None


def retraining(environment: Environment) -> Retraining:
    """What an environment holds, a line a target: its units, and how far the subsets lie apart."""
    info, path = environment.info, environment.path
    utilities = environment.utilities(partial=True)
    lines = []
    for name, target in info.targets.items():
        task_BS = utilities.of(name).values_BSE.mean(axis=2)
        lines.append(
            {
                "target": name,
                "units": len(target.unit_ids),
                "utility": float(task_BS.mean()) if task_BS.size else None,
                "sd over subsets": float(task_BS.mean(axis=1).std(ddof=1)) if len(task_BS) > 1 else None,
            }
        )
    headline = (
        f"{path}: {info.role}, recipe {info.recipe}, {len(info.subset_ids)} subsets x {len(info.seeds)} seeds of "
        f"{info.n_rows:,} rows"
    )
    return Retraining(pa.Table.from_pylist(lines), headline, tuple(_next_steps(environment)), environment)


def _next_steps(environment: Environment) -> list[str]:
    build = environment.info.build_command(environment.path)
    steps = [f"next: {build}", f"then: grasp evaluate art --environment {environment.path}"] if build else []
    return [*steps, evidence(len(environment.info.subset_ids))]


# ------------------------------------------------------------------------------------------------ calibrate


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Result):
    """The protocol that was chosen, and what it was chosen from."""

    protocol: ScoringProtocol | None = None
    selection: Selection | None = None
    record: Mapping[str, Any] | None = None

    def save(self, path: Path | str) -> Path:
        """Write the protocol, and beside it the record of the choice; returns where that lies."""
        assert self.protocol is not None
        assert self.record is not None
        out = Path(path)
        save_protocol(self.protocol.model_copy(update={"name": out.stem}), out)
        write_provenance(self.record, provenance_path(out))
        return provenance_path(out)


def calibrate(
    artifacts: ArtifactReader | Sequence[ArtifactReader],
    runs: Environment | Sequence[Environment],
    *,
    family: ProtocolFamily | Path | None = None,
    targets: Sequence[str] | None = None,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
    name: str = "calibrated",
) -> Calibration:
    """Choose a protocol on development runs by the highest lower confidence bound of its mean agreement, and freeze it.

    Args:
        artifacts: each serves the runs of its corpus.
        family: what is chosen from; None: the list that ships, or the short one where there are few subsets.
        targets: None: all that are not held out.
        delta: the bounds of all protocols hold with probability 1 - delta.
    Raises:
        ProtocolLeakError: held-out runs.
        ProtocolError: fewer than two results (runs x target).
        EnvironmentDataError: runs without an artifact of their corpus.
    """
    artifacts = [artifacts] if isinstance(artifacts, ArtifactReader) else list(artifacts)
    runs = [runs] if isinstance(runs, Environment) else list(runs)
    chosen_from, why = _listed(family, runs)
    developments = developments_of(
        artifacts, runs, targets=targets, calibration_subsets=chosen_from.calibration_subsets
    )
    selection = select(chosen_from, developments, delta=delta, resamples=resamples)
    protocol = freeze(selection, developments, chosen_from, name)
    return Calibration(
        _bounds(selection),
        f"protocol {protocol.name}: {selection.best.candidate.name}, {protocol.provenance}",
        (*_tried(selection), *why, *(f"{result}: {value:+.3f}" for result, value in selection.best.agreement.items())),
        protocol,
        selection,
        provenance(selection, developments, chosen_from),
    )


def _listed(family: ProtocolFamily | Path | None, runs: Sequence[Environment]) -> tuple[ProtocolFamily, list[str]]:
    """What is chosen from, and why it is the short list where it is."""
    if family is not None:
        return (load_family(family) if isinstance(family, Path) else family), []
    n_subsets = len({(one.path, name) for one in runs for name in one.info.subset_ids})
    whole = default_family()
    if n_subsets >= subsets_for(whole.size):
        return whole, []
    short = short_family()
    return short, [
        f"short list of {short.size} protocols without geometry: with {n_subsets} subsets the best of {whole.size:,} "
        f"would be luck; {subsets_for(whole.size)} subsets carry them (--list and --family try them all the same)"
    ]


def _tried(selection: Selection) -> list[str]:
    tried = len(selection.scores) + sum(selection.undefined.values())
    left_out = [f"{n:,} have no rho: {why}" for why, n in selection.undefined.items()]
    left_out += [f"{selection.not_served:,} more need arrays that are not there"] if selection.not_served else []
    bound = f"bound = mean {selection.criterion} - {selection.z:.2f} standard errors"
    return ["; ".join([f"{tried:,} protocols on {', '.join(selection.results)}", bound, *left_out])]


def _bounds(selection: Selection) -> pa.Table:
    lines = [
        {
            "protocol": score.candidate.name,
            "bound": score.lcb,
            f"mean {selection.criterion}": score.mean,
            "se": score.se,
        }
        for score in selection.scores[:SHOWN]
    ]
    return pa.Table.from_pylist(lines)


# ------------------------------------------------------------------------------------------------- evaluate


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Result):
    """How well predictions agree with retraining, method by method: a line a method and target."""

    report: EvaluationReport | None = None

    def __repr__(self) -> str:
        assert self.report is not None
        return self.report.table()


def evaluate(
    artifact: ArtifactReader,
    runs: Environment,
    *,
    protocol: ScoringProtocol | Path | None = None,
    targets: Sequence[str] | None = None,
    methods: Sequence[ConfiguredMethod] = (),
    controls: bool = False,
    development: Sequence[Environment] = (),
    family: ProtocolFamily | Path | None = None,
    predictions: Sequence[Path] = (),
    oracles: Sequence[str] = (),
    checkpoints: Sequence[Path] = (),
    cache: Path | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare predictions with retraining: the protocol that ships, additive cores, and what is named beside them.

    Figures on runs that a protocol or a control was chosen on are marked `in sample`.

    Args:
        protocol: compared beside the one that ships.
        targets: None: all that artifact, runs and files have in common.
        methods: published ones, see `grasp.runs.configured`; their scores are computed once and kept in `cache`.
        controls: the paper's controls and ablations; their weights are selected on `development`, else on `runs`.
        family: protocols that the controls restrict; None: those that ship.
        predictions: files of utilities by subset, or of scores by row.
        oracles: ridge or lasso, with `:masks` or `:LABEL`.
        partial: use what unfinished runs have.
    Raises:
        EnvironmentDataError: artifact and runs are not of the same rows (the command that builds such an artifact is in
            the message), or files and utilities are incomplete.
        ProtocolLeakError: controls without a development environment on held-out runs.
    """
    if not controls and (development or family is not None):
        raise SettingsError("development, family: no meaning without controls; leave them out")
    protocols = _protocols(protocol)
    chosen, notes = _controls(artifact, runs, development, family, resamples) if controls else ({}, [])
    contenders = Contenders(
        protocols=protocols,
        controls=chosen,
        controls_in_sample=not development,
        files=predictions,
        oracles=oracles,
        notes=[*(f"protocol {name}: {one.provenance}" for name, one in protocols.items()), *notes],
        methods=methods,
        checkpoints=checkpoints,
        cache=cache,
        progress=progress or Silent(),
    )
    report = compare(artifact, runs, contenders, targets=targets, partial=partial, resamples=resamples)
    return Evaluation(pa.Table.from_pylist(_same_fields(report.records())), "", report.notes, report)


def _same_fields(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    fields = list(dict.fromkeys(name for record in records for name in record))
    return [{name: record.get(name) for name in fields} for record in records]


def _protocols(protocol: ScoringProtocol | Path | None) -> dict[str, ScoringProtocol]:
    """The protocol that ships and, beside it, one of the user's; two of one name are told apart by the file's."""
    shipped = default_protocol()
    if protocol is None:
        return {shipped.name: shipped}
    own = load_protocol(protocol) if isinstance(protocol, Path) else protocol
    also = protocol.name if isinstance(protocol, Path) else "yours"
    return {shipped.name: shipped, own.name if own.name != shipped.name else f"{own.name} ({also})": own}


def _controls(
    artifact: ArtifactReader,
    runs: Environment,
    development: Sequence[Environment],
    family: ProtocolFamily | Path | None,
    resamples: int,
) -> tuple[dict[str, Candidate], list[str]]:
    """Controls with weights selected on development runs; none given: on the evaluated ones, if they are such."""
    if not development and runs.role != "dev":
        raise SettingsError(
            f"--controls: {runs.path} is held out, so no weights may be selected on it; name a development "
            "environment with --development"
        )
    full, _ = _listed(family if family is not None else default_family(), runs=())
    developments = developments_of(
        [artifact], list(development) or [runs], calibration_subsets=full.calibration_subsets
    )
    chosen, notes = control_methods(full, developments, resamples=resamples)
    own = not development
    return chosen, notes + ["the controls were selected on the results shown: they look better than they are"] * own
