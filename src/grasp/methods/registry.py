"""Published methods by name or label, and what they give: scores of rows, ranks of rows, predictions of subsets.

The names are those that installed packages put under the entry point group `grasp.methods`. A settings file:

tracin: {projection: 64}                          # settings of a method under its own name
tracin-all: {method: tracin, layers: all}         # another configuration beside it
trak-best: {method: trak, oracle_selected: true}  # chosen on the utilities that it will be judged by

Shape letters: N rows, E units, B subsets.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from grasp.arrays import F32, F64, I64, Blocks
from grasp.artifact.reader import ArtifactReader
from grasp.errors import MissingExtraError, SettingsError, ShapeError
from grasp.extras import require
from grasp.methods.contract import Method, MethodInputs, MethodScores, Retrained, RowMethod, SubsetMethod
from grasp.predict.weights import SubsetBlock
from grasp.progress import Progress, Silent
from grasp.runs.alignment import Joined
from grasp.runs.predictions import Cost, MethodRole, Predictions, RowScores, Weighting
from grasp.runs.retrained import Environment
from grasp.settings import Settings
from grasp.text import listed
from grasp.yaml_files import describe, read_yaml

GROUP = "grasp.methods"
GRASP = "grasp"  # may be named among the methods; its own predictions are always there
CACHE = "baselines"  # inside the artifact
ANY = ("", "any")  # the one column of scores that do not depend on the unit
COVERED = 6  # names of what a method looked at, in a note
COUNTED = "scores are added up over a subset, not averaged"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method by name."""

    point: EntryPoint

    @property
    def name(self) -> str:
        """The name that `--methods` takes."""
        return self.point.name

    @property
    def package(self) -> str:
        """The package that brings it."""
        return self.point.dist.name if self.point.dist is not None else "?"

    def says(self) -> str:
        """First line of its docstring; read from the source, since a list of methods must not wait for torch."""
        spec = find_spec(self.point.module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return ""
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == self.point.attr:
                return (ast.get_docstring(node) or "").partition("\n")[0]
        return ""

    def load(self) -> type[Method[Any]]:
        """The class; its module is imported here, and torch only with those that need it.

        Raises:
            MissingExtraError: it cannot be imported.
            SettingsError: it is no method.
        """
        where = f"method {self.name}: {self.point.value} of package {self.package}"
        try:
            kind = self.point.load()
        except (ImportError, AttributeError) as err:
            raise MissingExtraError(f"{where} cannot be imported: {err}; repair the package or uninstall it") from err
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise SettingsError(f"{where}: got {kind!r}, expected a class derived from grasp.methods.contract.Method")
        return kind


def methods() -> dict[str, Entry]:
    """All methods by name.

    Raises:
        SettingsError: two packages have a method of one name.
    """
    return _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> dict[str, Entry]:
    del path  # what is installed is looked for along it
    found: dict[str, Entry] = {}
    for entry in map(Entry, sorted(entry_points(group=GROUP), key=lambda point: point.name)):
        if other := found.get(entry.name):
            raise SettingsError(
                f"method {entry.name}: packages {other.package} and {entry.package} both have one; uninstall either"
            )
        found[entry.name] = entry
    return found


def method_named(name: str, where: str = "method") -> Entry:
    """A method by name.

    Args:
        where: what a message names.
    Raises:
        SettingsError: no such method; the message lists those there are.
    """
    known = methods()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        there = ", ".join(known) or "none: install grasp-attribution with pip, which makes its methods known"
        raise SettingsError(f"{where}: got {name!r}; {hint}there are {there}")
    return known[name]


# --------------------------------------------------------------------------------------------------- configurations


class _Beside(Settings):
    """What every configuration may say, whatever the method: method, seed, weighting, negative, oracle_selected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str
    seed: int = Field(0, ge=0)
    oracle_selected: bool = False
    weighting: Weighting | None = None
    negative: float = Field(1.0, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class ConfiguredMethod:
    """One configuration of one method."""

    label: str
    method: Method[Any]
    oracle_selected: bool = False
    weighting: Weighting | None = None  # None: the method's own
    negative: float = 1.0  # what negative scores of rows are multiplied by, where subsets are predicted


def configured_methods(
    names: str | Sequence[str] | None, configured: Mapping[str, Any] | None = None, where: str = "methods"
) -> tuple[ConfiguredMethod, ...]:
    """Methods by name or label, ready to run; their modules are imported here.

    Args:
        names: None: every configuration of the file.
        configured: by label: settings of the method, and `method`, `seed`, `oracle_selected`, `weighting`, `negative`.
        where: what a message about the configurations names.
    Raises:
        SettingsError: no such method (those there are are listed), settings that it does not have, or of a wrong kind.
        MissingExtraError: what a method needs is not installed; the message names the extra.
    """
    given = dict(configured or {})
    chosen = list(given) if names is None else [name for name in listed(names) if name != GRASP]
    twice = sorted({name for name in chosen if chosen.count(name) > 1})
    if twice:
        raise SettingsError(f"methods: got {', '.join(twice)} twice; give one of them another label in a settings file")
    for label, values in given.items():
        said, _ = _split(label, values, where)
        if label not in chosen:  # a mistake in what is not asked for is a mistake all the same
            _valid(where, label, (_Beside, said))
    found = list[ConfiguredMethod]()
    for label in chosen:
        if label not in given and label not in methods():
            if not given:
                method_named(label, where)  # says which there are
            raise SettingsError(
                f"methods: got {label!r}; {where} has {', '.join(given)}, and there are {', '.join(methods())}"
            )
        said, own = _split(label, given.get(label, {}), where)
        kind = method_named(said["method"]).load()
        beside, settings = _valid(where, label, (_Beside, said), (kind.settings_type, own))
        assert isinstance(beside, _Beside)
        for module, extra in kind.needs_modules.items():
            require(module, extra=extra, feature=f"method {beside.method}")
        if issubclass(kind, SubsetMethod):
            of_rows = {"weighting": beside.weighting is not None, "negative": beside.negative != 1.0}
            if idle := [name for name, is_given in of_rows.items() if is_given]:
                raise SettingsError(
                    f"{where}: {label}: {', '.join(idle)}: {beside.method} predicts subsets and scores no rows; leave "
                    "out"
                )
        method = kind(settings, name=beside.method, seed=beside.seed)
        found.append(ConfiguredMethod(label, method, beside.oracle_selected, beside.weighting, beside.negative))
    return tuple(found)


def published_methods(
    names: str | Sequence[str] | None,
    settings: Mapping[str, Any] | Path | str | None,
    *,
    checkpoints: Sequence[Path | str] = (),
    cache: Path | str | None = None,
) -> tuple[ConfiguredMethod, ...]:
    """Methods by name, by the labels of a settings file, or by both; none where neither is given.

    Raises:
        SettingsError: as `configured_methods`; or checkpoints or a cache for which none of them has a use.
    """
    if names is None and settings is None:
        idle = [name for name, value in {"checkpoints": checkpoints, "cache": cache}.items() if value]
        if idle:
            raise SettingsError(f"{', '.join(idle)}: no meaning without methods; name a method, or leave it out")
        return ()
    is_file = settings is not None and not isinstance(settings, Mapping)
    given = read_yaml(Path(str(settings))) if is_file else settings
    assert given is None or isinstance(given, Mapping)
    found = configured_methods(names, given, str(settings) if is_file else "methods")
    if checkpoints and not any("checkpoints" in one.method.looks_at for one in found):
        raise SettingsError("checkpoints: no meaning with these methods, none of which looks at any; leave it out")
    return found


def _split(label: str, values: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stands beside the settings of a configuration, its method among it, and the settings."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where}: {label}: got {values!r}, expected settings by name, or {{}}")
    if label not in methods() and "method" not in values:
        raise SettingsError(
            f"{where}: {label} is no method; name its method: {label}: {{method: ..., ...}}, one of "
            f"{', '.join(methods())}"
        )
    own = {str(key): value for key, value in values.items()}
    beside = {"method": label} | {field: own.pop(field) for field in _Beside.model_fields if field in own}
    if not isinstance(beside["method"], str):
        raise SettingsError(
            f"{where}: {label}: method: got {beside['method']!r}, expected one of {', '.join(methods())}"
        )
    method_named(beside["method"])
    return beside, own


def _valid(where: str, label: str, *halves: tuple[type[Settings], Mapping[str, Any]]) -> list[Settings]:
    """The halves of a configuration as settings; their mistakes in one message."""
    found, mistakes = [], []
    for kind, values in halves:
        try:
            found.append(kind.model_validate(values))
        except ValidationError as err:
            mistakes.append(describe(err, "", kind).removeprefix(": "))
    if mistakes:
        raise SettingsError(f"{where}: {label}: {'; '.join(mistakes)}")
    return found


# ------------------------------------------------------------------------------------------------------- what they give


def method_predictions(
    configured: ConfiguredMethod,
    material: MethodInputs,
    subsets: Sequence[SubsetBlock],
    cache: Path | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
) -> Predictions:
    """Predict subsets by a method, under its label; its scores are computed unless they are stored.

    Args:
        subsets: retained sides over the artifact's rows.
        cache: where the method may keep its scores; None: in the artifact.
        renamed: the artifact's name of a target -> the name to predict under; targets without one are left out.
    Raises:
        GraspError: what the method needs is not there.
    """
    method, label = configured.method, configured.label
    if isinstance(method, RowMethod):
        units = tuple((unit.target, unit.unit_id) for unit in material.units.units)
        found = scores(configured, material, cache)
        account, n_columns = found.account, found.shape[1]
        is_broadcast = n_columns == 1 and len(units) != 1  # a score that does not depend on the unit
        weighting = configured.weighting or method.weighting
        by_row = RowScores(label, (ANY,) if is_broadcast else units, material.n_rows, found)
        predictions = by_row.sum_over(subsets, weighting=weighting, negative=configured.negative)
        if is_broadcast:
            values_BE = np.repeat(predictions.values_BE, len(units), axis=1)
            predictions = replace(predictions, units=units, values_BE=values_BE)
        seconds = None if found.seconds is None else found.seconds + account.ready
        spent = (None, None) if seconds is None else (seconds.wall, seconds.cpu)
        predictions = replace(predictions, cost=Cost(account.features, n_columns, *spent))
        said = [*account.notes, *([COUNTED] if weighting == "count" else [])]
    else:
        assert isinstance(method, SubsetMethod)
        method.check(material)
        predictions, account = method.predict(material, subsets)
        predictions, said = replace(predictions, cost=None), [*account.notes]
    if renamed is not None:
        kept = [e for e, (target, _) in enumerate(predictions.units) if target in renamed]
        predictions = replace(
            predictions,
            units=tuple((renamed[predictions.units[e][0]], predictions.units[e][1]) for e in kept),
            values_BE=predictions.values_BE[:, kept],
            task_B={renamed[name]: values_B for name, values_B in predictions.task_B.items() if name in renamed},
        )
    # one line for the report: what was covered, what else must be known, what was passed over
    said += [f"{reason}: {n:,}" for reason, n in account.counts.items()]
    if account.covers:
        more = len(account.covers) - COVERED
        said.insert(0, f"covers {', '.join(account.covers[:COVERED])}" + (f" and {more} more" if more > 0 else ""))
    standing: MethodRole = "supervised oracle" if method.supervised else "predictor"
    if configured.oracle_selected and not method.supervised:
        standing = "oracle-selected"
    notes = (f"{label}: {'; '.join(said)}",) if said else ()
    return replace(predictions, method=label, standing=standing, notes=notes)


def scores(configured: ConfiguredMethod, material: MethodInputs, cache: Path | None = None) -> MethodScores:
    """Scores of every row by a method that gives them.

    Args:
        cache: where the method may keep them; None: in the artifact.
    Raises:
        SettingsError: the method predicts subsets, not rows.
        ShapeError: its scores are not those of the artifact's rows and units.
    """
    method = configured.method
    if not isinstance(method, RowMethod):
        raise SettingsError(f"method {configured.label}: predicts subsets and scores no rows; see it in grasp evaluate")
    method.check(material)
    found = method.scores(material, cache if cache is not None else material.artifact.path / CACHE)
    expected = [(material.n_rows, material.n_units), (material.n_rows, 1)]
    if found.shape not in expected:
        raise ShapeError(
            f"method {configured.label}: got scores of shape {found.shape}, expected {expected[0]} or {expected[1]}"
        )
    return found


# ------------------------------------------------------------------------------------------------------ rows by rank


@dataclass(frozen=True, slots=True)
class MethodRows:
    """The rows of an artifact under the scores of a method, which are its one array."""

    artifact: ArtifactReader
    label: str
    found: MethodScores

    @property
    def n_rows(self) -> int:
        return self.artifact.n_rows

    @property
    def array_names(self) -> tuple[str, ...]:
        return (f"relevance_{self.label}",)

    def unit_columns(self, target: str) -> I64:
        """Columns of the target's units: those of the artifact."""
        return self.artifact.unit_columns(target)

    def array_blocks(self, name: str, *, columns: I64 | None = None, block_rows: int | None = None) -> Blocks:
        """Scores in blocks of the stored size; one that does not depend on the unit is the same in every column."""
        del name, block_rows
        chosen = np.arange(len(self.artifact.units)) if columns is None else columns
        for start, block in self.found:
            own: F32 = block.astype(np.float32)
            yield start, own[:, chosen] if own.shape[1] > 1 else np.repeat(own, len(chosen), axis=1)

    def means(self, target: str) -> F64:
        """Mean of the scores over the units of a target, (N,)."""
        blocks = self.array_blocks(self.array_names[0], columns=self.unit_columns(target))
        return np.concatenate([block.mean(axis=1, dtype=np.float64) for _, block in blocks])


def method_rows(
    artifact: ArtifactReader,
    configured: ConfiguredMethod,
    *,
    environment: Environment | None = None,
    checkpoints: Sequence[Path | str] = (),
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> MethodRows:
    """Score the rows by a method, unless that was done before.

    Args:
        environment: for a method that is made from retrained subsets.
    Raises:
        GraspError: what the method needs is not there, or it scores no rows.
    """
    known = None
    if environment is not None:
        joined = Joined.from_environment(environment, artifact)
        known = Retrained.from_joined(joined, environment.utilities().select(*joined.renamed.values()))
    places, kept = tuple(map(Path, checkpoints)), None if cache is None else Path(cache)
    material = MethodInputs(artifact, checkpoint_places=places, retrained=known, progress=progress or Silent())
    return MethodRows(artifact, configured.label, scores(configured, material, kept))
