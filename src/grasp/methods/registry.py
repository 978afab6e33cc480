"""Registry of published attribution methods: load them by name or label, and compute scores, ranks and predictions.

Packages register methods as entry points of the group `grasp.methods`; the name of the entry point is that of the
method. A settings file configures methods under labels of the user:

tracin: {projection: 64}                          # settings of a method under its own name
tracin-all: {method: tracin, layers: all}         # a second configuration of the same method
trak-best: {method: trak, oracle_selected: true}  # selected on the utilities that it is evaluated on

`configure_methods` loads and configures methods. `score_rows` scores rows by one of them, and `method_predictions`
predicts subsets. `score_artifact` returns scores in the form of an artifact's arrays, which commands rank rows by.
A method is one of the classes in `grasp.methods.contract`; units are the scored elements of targets, such as questions.

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from grasp.arrays import F32, F64, I64, Blocks
from grasp.artifact.reader import ArtifactReader
from grasp.entry_points import entries, load
from grasp.errors import SettingsError, ShapeError
from grasp.extras import require
from grasp.methods.contract import Account, AlignedRuns, Method, MethodInputs, MethodScores, RowMethod, SubsetMethod
from grasp.predict.weights import SubsetBlock
from grasp.progress import Progress
from grasp.runs.alignment import Alignment
from grasp.runs.predictions import Cost, MethodRole, Predictions, Weighting, sum_row_scores
from grasp.runs.training_runs import TrainingRuns
from grasp.settings import Settings
from grasp.text import parse_names
from grasp.yaml_files import describe, read_yaml

GROUP = "grasp.methods"
GRASP = "grasp"  # accepted among the names of methods; its predictions are always included
CACHE = "baselines"  # inside the artifact
ANY_UNIT = ("", "any")  # target and unit of the only column of scores that do not depend on the unit
SUM_NOTE = "scores are summed over a subset, not averaged"


def registered_methods() -> dict[str, EntryPoint]:
    """Return all registered methods by name.

    Raises:
        SettingsError: two packages register the same name.
    """
    return entries(GROUP)


def load_method(name: str) -> type[Method[Any]]:
    """Import and return the class of a method.

    Raises:
        SettingsError: unknown name, and the message lists the available ones; or the entry point is not a method.
        MissingExtraError: the module cannot be imported.
    """
    loaded: type[Method[Any]] = load(GROUP, name, Method)
    return loaded


class _CommonOptions(Settings):
    """Options that every configuration accepts, for any method."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str
    seed: int = Field(0, ge=0)
    oracle_selected: bool = False
    weighting: Weighting = "mean"
    negative: float = Field(1.0, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class ConfiguredMethod:
    """A method with its settings and options.

    Attributes:
        label: name of the configuration, in results.
        method: the method with its settings.
        oracle_selected: whether it was selected on the utilities that it is evaluated on.
        weighting: how row scores are aggregated over a subset: their mean, or their sum (`count`).
        negative_scale: factor on negative row scores when subsets are predicted; the option `negative`.
    """

    label: str
    method: Method[Any]
    oracle_selected: bool = False
    weighting: Weighting = "mean"
    negative_scale: float = 1.0


def configure_methods(
    names: str | Sequence[str] | None,
    settings: Mapping[str, Any] | Path | str | None = None,
    error_prefix: str = "methods",
) -> tuple[ConfiguredMethod, ...]:
    """Import methods by name or label and validate their settings.

    Args:
        names: names of methods, or labels of configurations. Default: every configuration.
        settings: configurations by label, or a YAML file with them: settings of a method, and the options `method`,
            `seed`, `oracle_selected`, `weighting` and `negative`.
        error_prefix: begin of error messages about configurations that are not read from a file.
    Raises:
        SettingsError: unknown method (the message lists the available ones), or invalid settings.
        MissingExtraError: a required package is not installed; the message names the extra.
    """
    if settings is not None and not isinstance(settings, Mapping):
        settings, error_prefix = read_yaml(Path(settings)), str(settings)
    configurations = dict(settings or {})
    labels = list(configurations) if names is None else [name for name in parse_names(names) if name != GRASP]
    fault = ""
    if duplicates := sorted({name for name in labels if labels.count(name) > 1}):
        fault = f"{', '.join(duplicates)} given twice; use another label for one in a settings file"
    for label in labels:
        if label not in configurations and label not in registered_methods():
            if not configurations:
                load(GROUP, label, Method, error_prefix)  # raises with the list of available methods
            fault = (
                f"unknown label {label!r}; configured in {error_prefix}: {', '.join(configurations)}; available "
                f"methods: {', '.join(registered_methods())}"
            )
    if fault:
        raise SettingsError(f"methods: {fault}")
    return tuple(_configure(label, configurations.get(label, {}), f"{error_prefix}: {label}") for label in labels)


def _configure(label: str, values: Any, error_prefix: str) -> ConfiguredMethod:
    """Import the method of a configuration, and validate its options and settings."""
    fault, available = "", ", ".join(registered_methods())
    if not isinstance(values, Mapping):
        fault = f": got {values!r}, expected settings by name, or {{}}"
    elif label not in registered_methods() and "method" not in values:
        fault = f" is not a method; add one, as in {label}: {{method: ..., ...}}; expected one of {available}"
    elif not isinstance(values.get("method", label), str):
        fault = f": method: got {values['method']!r}, expected one of {available}"
    if fault:
        raise SettingsError(f"{error_prefix}{fault}")
    setting_values = {str(key): value for key, value in values.items()}
    options = {"method": label} | {
        field: setting_values.pop(field) for field in _CommonOptions.model_fields if field in setting_values
    }
    method_class = load_method(options["method"])
    validated, errors = [], []
    for settings_type, section in ((_CommonOptions, options), (method_class.settings_type, setting_values)):
        try:
            validated.append(settings_type.model_validate(section))
        except ValidationError as err:
            errors.append(describe(err, "", settings_type).removeprefix(": "))
    if errors:
        raise SettingsError(f"{error_prefix}: {'; '.join(errors)}")
    common, settings = validated
    assert isinstance(common, _CommonOptions)
    for module, extra in method_class.required_modules.items():
        require(module, extra=extra, feature=f"method {common.method}")
    if issubclass(method_class, SubsetMethod):
        row_options = {"weighting": common.weighting != "mean", "negative": common.negative != 1.0}
        if unused := [name for name, is_set in row_options.items() if is_set]:
            raise SettingsError(
                f"{error_prefix}: {', '.join(unused)}: not supported by {common.method}, which predicts subsets and "
                "scores no rows; remove it"
            )
    method = method_class(settings, name=common.method, seed=common.seed)
    return ConfiguredMethod(label, method, common.oracle_selected, common.weighting, common.negative)


def method_predictions(
    configured: ConfiguredMethod,
    inputs: MethodInputs,
    subsets: Sequence[SubsetBlock],
    cache: Path | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
) -> Predictions:
    """Predict subsets with a method, under its label; reuse its stored scores if there are any.

    Args:
        configured: the method.
        inputs: the artifact, and what else the method reads.
        subsets: retained rows of each subset, as weights over the artifact's rows.
        cache: directory of stored scores. Default: inside the artifact.
        renamed: target name in the artifact -> name in the predictions; other targets are dropped.
    Raises:
        GraspError: a required input is missing.
    """
    method = configured.method
    if isinstance(method, RowMethod):
        predictions, account = _predict_by_rows(configured, method, inputs, subsets, cache)
    else:
        assert isinstance(method, SubsetMethod)
        method.check(inputs)
        predictions, account = method.predict(inputs, subsets)
        predictions = replace(predictions, cost=None)
    if renamed is not None:
        columns = [e for e, (target, _) in enumerate(predictions.units) if target in renamed]
        predictions = replace(
            predictions,
            units=tuple((renamed[predictions.units[e][0]], predictions.units[e][1]) for e in columns),
            values_BE=predictions.values_BE[:, columns],
            task_B={renamed[name]: values_B for name, values_B in predictions.task_B.items() if name in renamed},
        )
    method_role: MethodRole = "predictor"
    if method.is_oracle:
        method_role = "supervised oracle"
    elif configured.oracle_selected:
        method_role = "oracle-selected"
    notes = [*account.notes, *(f"{reason}: {n:,}" for reason, n in account.counts.items())]
    if account.covers:
        notes.insert(0, f"covers {', '.join(account.covers)}")
    note_line = (f"{configured.label}: {'; '.join(notes)}",) if notes else ()
    return replace(predictions, method=configured.label, method_role=method_role, notes=note_line)


def _predict_by_rows(
    configured: ConfiguredMethod,
    method: RowMethod[Any],
    inputs: MethodInputs,
    subsets: Sequence[SubsetBlock],
    cache: Path | None,
) -> tuple[Predictions, Account]:
    """Predict subsets by the mean or the sum of the scores of their rows."""
    units = tuple((unit.target, unit.unit_id) for unit in inputs.units.units)
    scores = score_rows(configured, inputs, cache)
    account, n_columns = scores.account, scores.shape[1]
    is_broadcast = n_columns == 1 and len(units) != 1  # a score that does not depend on the unit
    weighting = configured.weighting
    predictions = sum_row_scores(
        configured.label,
        (ANY_UNIT,) if is_broadcast else units,
        scores,
        subsets,
        weighting=weighting,
        negative=configured.negative_scale,
    )
    if is_broadcast:
        values_BE = np.repeat(predictions.values_BE, len(units), axis=1)
        predictions = replace(predictions, units=units, values_BE=values_BE)
    wall_and_cpu = (None, None) if scores.seconds is None else (scores.seconds.wall, scores.seconds.cpu)
    predictions = replace(predictions, cost=Cost(account.features, n_columns, *wall_and_cpu))
    if weighting == "count":
        account = replace(account, notes=(*account.notes, SUM_NOTE))
    return predictions, account


def score_rows(configured: ConfiguredMethod, inputs: MethodInputs, cache: Path | None = None) -> MethodScores:
    """Score every row with a method; reuse stored scores if there are any.

    Args:
        configured: the method.
        inputs: the artifact, and what else the method reads.
        cache: directory of stored scores. Default: inside the artifact.
    Raises:
        SettingsError: the method predicts subsets and scores no rows.
        ShapeError: the scores do not have the shape of the artifact's rows and units.
    """
    method = configured.method
    if not isinstance(method, RowMethod):
        raise SettingsError(
            f"method {configured.label}: predicts subsets and scores no rows; use `grasp evaluate` instead"
        )
    method.check(inputs)
    result = method.scores(inputs, cache if cache is not None else inputs.artifact.path / CACHE)
    expected = [(inputs.n_rows, inputs.n_units), (inputs.n_rows, 1)]
    if result.shape not in expected:
        raise ShapeError(
            f"method {configured.label}: got scores of shape {result.shape}, expected {expected[0]} or {expected[1]}"
        )
    return result


@dataclass(frozen=True, slots=True)
class MethodRows:
    """The rows of an artifact with the scores of a method as their only array.

    It has the part of the interface of `ArtifactReader` that ranks rows.
    """

    artifact: ArtifactReader
    label: str
    scores: MethodScores

    @property
    def n_rows(self) -> int:
        return self.artifact.n_rows

    @property
    def array_names(self) -> tuple[str, ...]:
        return (f"relevance_{self.label}",)

    def unit_columns(self, target: str) -> I64:
        """Return the columns of the target's units."""
        return self.artifact.unit_columns(target)

    def array_blocks(self, name: str, *, columns: I64 | None = None, block_rows: int | None = None) -> Blocks:
        """Yield (first row, scores) in blocks of the stored size; `name` and `block_rows` are ignored.

        A score that does not depend on the unit is repeated for every column.
        """
        del name, block_rows
        columns = np.arange(len(self.artifact.units)) if columns is None else columns
        for start, block in self.scores:
            block_NE: F32 = block.astype(np.float32)
            yield start, block_NE[:, columns] if block_NE.shape[1] > 1 else np.repeat(block_NE, len(columns), axis=1)

    def means(self, target: str) -> F64:
        """Return the mean score over the units of a target, (N,)."""
        blocks = self.array_blocks(self.array_names[0], columns=self.unit_columns(target))
        return np.concatenate([block.mean(axis=1, dtype=np.float64) for _, block in blocks])


def score_artifact(
    artifact: ArtifactReader,
    configured: ConfiguredMethod,
    *,
    runs: TrainingRuns | None = None,
    checkpoints: Sequence[Path | str] = (),
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> MethodRows:
    """Score the rows of an artifact with a method; reuse stored scores if there are any.

    Args:
        artifact: the artifact.
        configured: the method.
        runs: retrained runs, for a method that requires them.
        checkpoints: checkpoints, for a method that uses them. Default: the artifact's model.
        cache: directory of stored scores. Default: inside the artifact.
        progress: receives stages, notes and numbers of rows.
    Raises:
        GraspError: a required input is missing, or the method scores no rows.
    """
    retrained = None
    if runs is not None:
        alignment = Alignment.from_runs(runs, artifact)
        retrained = AlignedRuns.from_alignment(alignment, runs.utilities().select(*alignment.run_targets.values()))
    paths, cache_path = tuple(map(Path, checkpoints)), None if cache is None else Path(cache)
    inputs = MethodInputs(artifact, checkpoint_paths=paths, runs=retrained, progress=progress or Progress())
    return MethodRows(artifact, configured.label, score_rows(configured, inputs, cache_path))
