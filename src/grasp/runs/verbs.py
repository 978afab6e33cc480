"""The verbs of the room, which are `grasp.retrain`, `grasp.open_runs`, `grasp.evaluate` and `grasp.calibrate`.

`retrain` gives runs; `evaluate` says how well predictions agree with them; `calibrate` chooses a protocol on them. The
commands of these names parse, call one of them and print what it gives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.extract.cluster import ClusterSpec
from grasp.extract.progress import Progress
from grasp.extract.reopen import Origin
from grasp.predict.families import parse_family
from grasp.predict.protocol import ScoringProtocol, default_protocol, load_protocol, save_protocol
from grasp.results import Result
from grasp.runs.candidates import DELTA, Candidate, ProtocolFamily, default_family, family_for, load_family
from grasp.runs.compare import compare, control_methods
from grasp.runs.environment import Environment
from grasp.runs.evaluate import Evaluation
from grasp.runs.imported import runs_beside
from grasp.runs.methods import configured_methods, published_methods
from grasp.runs.metrics import RESAMPLES
from grasp.runs.selection import (
    Selection,
    developments_of,
    freeze,
    provenance,
    provenance_path,
    select,
    write_provenance,
)
from grasp.runs.table import RunTable, any_runs
from grasp.settings import retrain_settings, without_foreign_code
from grasp.text import several
from grasp.yaml_files import over, plain_settings, put_all, read_yaml, require

if TYPE_CHECKING:
    from grasp.runs.retrain import RetrainStatus

Place = Path | str
Runs = Environment | RunTable | Place
REQUIRED = {"--corpus": ("corpus.path",), "--targets": ("targets.names", "targets.datasets")}
SHOWN = 10  # protocols of a calibration


class Opened(Protocol):
    """An artifact in the hand, a `grasp.Artifact`."""

    @property
    def files(self) -> ArtifactReader: ...


def open_runs(path: Place) -> Environment | RunTable:
    """Open runs: models trained on parts of a corpus, and how well each did; retrained (an environment) or imported.

    Raises:
        EnvironmentDataError: nothing there, or damaged.
    """
    return any_runs(path)


# ------------------------------------------------------------------------------------------------ retrain


def retrain(
    corpus: Place | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    out: Place,
    like: "Opened | Place | None" = None,
    text_column: str | None = None,
    id_column: str | None = None,
    family: str | None = None,
    count: int | None = None,
    seeds: int | None = None,
    recipe: str | None = None,
    train_command: str | None = None,
    jobs: "Callable[[str], None] | None" = None,
    role: str | None = None,
    workers: int | None = None,
    stack: int | None = None,
    settings: Mapping[str, Any] | Place | None = None,
    resume: bool = False,
    cluster: ClusterSpec | None = None,
    progress: "Callable[[RetrainStatus], None] | None" = None,
) -> Environment:
    """Train a model on each of many subsets and score it, or go on with what was begun in `out`.

    Args:
        corpus: file, directory or URL.
        targets: tasks and files of units.
        like: an artifact whose corpus, targets and tokenizer are taken, so that it can be compared with these runs.
        text_column, id_column: columns of the corpus; by default `text`, and `row_id` or `id`.
        family: how subsets are drawn, e.g. mixture:topic; `count` of them, each trained with so many `seeds`.
        recipe: model and training: tiny, small or paper-50m.
        train_command: your own trainer instead, with {corpus}, {checkpoint} and {seed} to be filled in; a run of which
            it fails is marked, and tried again by the next call.
        jobs: told a shell line for each run instead of training it, for a scheduler; the next call scores what the
            lines have left.
        role: dev: protocols may be chosen on it; held-out: only judged.
        workers: processes that train; `stack` models of each as one program.
        settings: any other settings, nested, or the YAML file of them; arguments win.
        resume: take the settings from the `run.yaml` in `out`.
        cluster: Ray workers that train; all must reach `out`.
        progress: told of every stage and step.
    Raises:
        GraspError: bad input, named, before anything is trained. No finished run is lost.
    """
    from grasp.runs.retrain import retrain  # noqa: PLC0415 - brings torch

    data = plain_settings(settings)
    if like is not None:
        data = over(_like(like), data)
    arguments = {
        "corpus.path": None if corpus is None else str(corpus),
        "corpus.text_column": text_column,
        "corpus.row_id_column": id_column,
        "targets.names": [targets] if isinstance(targets, str) else targets and list(targets),
        "family": family,
        "n_subsets": count,
        "seeds": None if seeds is None else list(range(seeds)),
        "recipe": recipe,
        "train_command": train_command,
        "role": role,
        "workers": workers,
        "stack": stack,
    }
    put_all(data, arguments)
    begun = Path(out) / "run.yaml"
    if resume and begun.exists():
        data = over(without_foreign_code(read_yaml(begun), str(begun), data), data)
    fresh = not resume or begun.exists()
    require(data, REQUIRED, "retrain" if fresh else f"retrain --resume: there is no {begun}")
    return retrain(retrain_settings(data), Path(out), progress, cluster=cluster, jobs=jobs)


def _like(art: Opened | Place) -> dict[str, Any]:
    """Settings under which retrained models read the same rows and units as the artifact's model did."""
    files = ArtifactReader.open(art) if isinstance(art, Path | str) else art.files
    origin = Origin(files)
    if origin.has_images:
        raise SettingsError(f"like: {files.where} was built from images, and what is retrained are language models")
    _ = origin.tokenizer  # still there, and its own
    built = origin.settings.model_dump(mode="json", include={"corpus", "targets"})
    shape = {"vocab_size": files.manifest.detail("vocab_size"), "context": origin.settings.corpus.max_length}
    return built | {"tokenizer": origin.settings.model.path, "overrides": {"shape": shape}}


# ------------------------------------------------------------------------------------------------ calibrate


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Calibration(Result):
    """The protocol that was chosen, and what it was chosen from."""

    protocol: ScoringProtocol
    selection: Selection
    record: Mapping[str, Any]

    def save(self, path: Place) -> Path:
        """Write the protocol, and beside it the record of the choice; returns where that lies."""
        out = Path(path)
        save_protocol(self.protocol.model_copy(update={"name": out.stem}), out)
        write_provenance(self.record, provenance_path(out))
        return provenance_path(out)


def calibrate(
    arts: Opened | Sequence[Opened],
    runs: Runs | Sequence[Runs],
    *,
    family: ProtocolFamily | Place | None = None,
    target: str | Sequence[str] | None = None,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
    name: str = "calibrated",
) -> Calibration:
    """Choose a protocol on development runs by the highest lower confidence bound of its mean agreement, and freeze it.

    Args:
        arts: each serves the runs of its corpus.
        family: what is chosen from; None: the list that ships, or the short one where there are few subsets.
        target: one, or several; None: all that are not held out.
        delta: the bounds of all protocols hold with probability 1 - delta.
    Raises:
        ProtocolLeakError: held-out runs.
        ProtocolError: fewer than two results (runs x target).
        EnvironmentDataError: runs without an artifact of their corpus.
    """
    artifacts = [art.files for art in (arts if isinstance(arts, Sequence) else [arts])]
    environments = _opened(runs, artifacts[0])
    if family is None:
        n_subsets = len({(one.path, name) for one in environments for name in one.info.subset_ids})
        chosen_from, why = family_for(n_subsets)
    else:
        chosen_from, why = _family(family), []
    developments = developments_of(
        artifacts,
        environments,
        targets=None if target is None else several(target),
        calibration_subsets=chosen_from.calibration_subsets,
    )
    selection = select(chosen_from, developments, delta=delta, resamples=resamples)
    protocol = freeze(selection, developments, chosen_from, name)
    mean = f"mean {selection.criterion}"
    bounds = [
        {"protocol": score.candidate.name, "bound": score.lcb, mean: score.mean, "se": score.se}
        for score in selection.scores[:SHOWN]
    ]
    return Calibration(
        table=pa.Table.from_pylist(bounds),
        headline=f"protocol {protocol.name}: {selection.best.candidate.name}, {protocol.provenance}",
        notes=(
            _tried(selection),
            *why,
            *(f"{result}: {value:+.3f}" for result, value in selection.best.agreement.items()),
        ),
        protocol=protocol,
        selection=selection,
        record=provenance(selection, developments, chosen_from),
    )


def _opened(runs: Runs | Sequence[Runs], artifact: ArtifactReader) -> list[Environment]:
    return [
        runs_beside(artifact, one)
        for one in (runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs])
    ]


def _family(family: ProtocolFamily | Place) -> ProtocolFamily:
    return family if isinstance(family, ProtocolFamily) else load_family(family)


def _tried(selection: Selection) -> str:
    tried = len(selection.scores) + sum(selection.undefined.values())
    left_out = [f"{n:,} have no rho: {why}" for why, n in selection.undefined.items()]
    left_out += [f"{selection.not_served:,} more need arrays that are not there"] if selection.not_served else []
    bound = f"bound = mean {selection.criterion} - {selection.z:.2f} standard errors"
    return "; ".join([f"{tried:,} protocols on {', '.join(selection.results)}", bound, *left_out])


# ------------------------------------------------------------------------------------------------- evaluate


def evaluate(
    art: Opened,
    runs: Runs,
    *,
    protocol: ScoringProtocol | Place | None = None,
    target: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    method_settings: Mapping[str, Any] | Place | None = None,
    controls: bool = False,
    development: Sequence[Runs] = (),
    family: ProtocolFamily | Place | None = None,
    predictions: Sequence[Place] = (),
    oracles: str | Sequence[str] = (),
    checkpoints: Sequence[Place] = (),
    cache: Place | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare predictions with retraining: the protocol that ships, additive cores, and what is named beside them.

    Figures by which a protocol or a control was chosen are marked `in sample`.

    Args:
        protocol: compared beside the one that ships.
        target: one, or several; None: all that artifact, runs and files have in common.
        methods: published ones by name, see `grasp methods`, or by the labels of `method_settings`; their scores are
            computed once and kept in `cache`.
        method_settings: settings by method, or by a label of your own; or the YAML file of them.
        controls: the paper's controls and ablations; their weights are selected on `development`, else on `runs`.
        family: protocols that the controls restrict; None: those that ship.
        predictions: files of utilities by subset, or of scores by row.
        oracles: datamodels by ridge or lasso, with `:masks` or `:LABEL` for what they see.
        checkpoints: of training, for methods that look at several; None: those beside the artifact's model.
        partial: use what unfinished runs have.
    Raises:
        EnvironmentDataError: artifact and runs are not of the same rows (the command that builds such an artifact is in
            the message), or files and utilities are incomplete.
        ProtocolLeakError: controls without a development environment on held-out runs.
    """
    environment = runs_beside(art.files, runs)
    if not controls and (development or family is not None):
        raise SettingsError("development, family: no meaning without controls; leave them out")
    protocols = _protocols(protocol)
    notes = [f"protocol {name}: {one.provenance}" for name, one in protocols.items()]
    published = published_methods(methods, method_settings, checkpoints=checkpoints, cache=cache)
    published += configured_methods(None, _oracles(several(oracles), environment))
    chosen, chosen_on = dict[str, Candidate](), dict[str, str]()
    if controls:
        chosen, chosen_on, why = _controls(art.files, environment, _opened(development, art.files), family, resamples)
        notes += why
    return compare(
        art.files,
        environment,
        protocols,
        controls=chosen,
        controls_on=chosen_on,
        files=[Path(place) for place in predictions],
        methods=published,
        checkpoints=[Path(place) for place in checkpoints],
        cache=None if cache is None else Path(cache),
        targets=None if target is None else several(target),
        partial=partial,
        resamples=resamples,
        notes=notes,
        progress=progress,
    )


def _oracles(oracles: Sequence[str], runs: Environment) -> dict[str, dict[str, str]]:
    """Configurations of datamodels, by label; they see what the family of the runs draws by, unless told otherwise."""
    found = {}
    for text in oracles:
        kind, _, sees = text.partition(":")
        if kind not in ("ridge", "lasso"):
            raise SettingsError(f"oracle: got {text!r}, expected ridge or lasso, alone or with :masks or :LABEL")
        drawn_by = parse_family(runs.info.family.spec).label if runs.info.family else None
        sees = sees or drawn_by or "masks"
        label = f"oracle-{kind}-{sees}" + ("" if sees == "masks" else "-share-of-subset")
        found[label] = {"method": "datamodels", "penalty": kind, "sees": sees}
    return found


def _protocols(protocol: ScoringProtocol | Place | None) -> dict[str, ScoringProtocol]:
    """The protocol that ships and, beside it, one of the user's; two of one name are told apart by the file's."""
    shipped = default_protocol()
    if protocol is None:
        return {shipped.name: shipped}
    given = protocol if isinstance(protocol, ScoringProtocol) else load_protocol(protocol)
    also = "yours" if isinstance(protocol, ScoringProtocol) else Path(protocol).name
    return {shipped.name: shipped, given.name if given.name != shipped.name else f"{given.name} ({also})": given}


def _controls(
    artifact: ArtifactReader,
    runs: Environment,
    development: Sequence[Environment],
    family: ProtocolFamily | Place | None,
    resamples: int,
) -> tuple[dict[str, Candidate], dict[str, str], list[str]]:
    """Controls with weights selected on development runs; none given: on the evaluated ones, if they are such."""
    if not development and runs.role != "dev":
        raise SettingsError(
            f"controls: {runs.path} is held out, so no weights may be selected on it; name a development environment "
            "(--development)"
        )
    full = default_family() if family is None else _family(family)
    developments = developments_of([artifact], development or [runs], calibration_subsets=full.calibration_subsets)
    chosen, notes = control_methods(full, developments, resamples=resamples)
    return chosen, {name: runs for one in developments for name, runs in one.results.items()}, notes
