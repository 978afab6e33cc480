"""What a published method gives: scores of rows, ranks of rows, and predictions of subsets with what they cost.

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.blocks import Side, SubsetBlock
from grasp.predict.geometry import Weighting
from grasp.predict.ranking import ScoreRows
from grasp.predict.row_arrays import F32, Blocks
from grasp.runs.configured import GRASP, ConfiguredMethod, configured_methods
from grasp.runs.contract import Account, MethodScores, RowMethod, SubsetMethod
from grasp.runs.environment import Environment
from grasp.runs.imported import runs_beside
from grasp.runs.material import Material, Retrained
from grasp.runs.predictions import Cost, Predictions, RowScores, Standing
from grasp.runs.scored import Scored
from grasp.runs.table import RunTable
from grasp.yaml_files import read_yaml

CACHE = "baselines"  # inside the artifact
ANY = ("", "any")  # the one column of scores that do not depend on the unit
COUNTED = "scores are added up over a subset, not averaged"


def predict(
    configured: ConfiguredMethod,
    material: Material,
    subsets: Sequence[SubsetBlock],
    cache: Path | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
    side: Side = "retained",
) -> Predictions:
    """Predict subsets by a method, under its label; its scores are computed unless they are stored.

    Args:
        subsets: retained sides over the artifact's rows.
        cache: where the method may keep its scores; None: in the artifact.
        renamed: the artifact's name of a target -> the name to predict under; targets without one are left out.
        side: which rows' scores are added up, see `RowScores.sum_over`.
    Raises:
        GraspError: what the method needs is not there.
    """
    method = configured.method
    cost = None
    if isinstance(method, RowMethod):
        found = scores(configured, material, cache)
        weighting = configured.weighting or method.weighting
        predictions = _summed(configured, found, material, subsets, weighting, side)
        cost, account = _cost(found), found.account
        if weighting == "count":
            account = replace(account, notes=(*account.notes, COUNTED))
    else:
        assert isinstance(method, SubsetMethod)
        method.check(material)
        predictions, account = method.predict(material, subsets)
    standing: Standing = "supervised oracle" if method.supervised else "predictor"
    if configured.oracle_selected and not method.supervised:
        standing = "oracle-selected"
    if renamed is not None:
        predictions = _renamed(predictions, renamed)
    notes = _notes(configured.label, account)
    return replace(predictions, method=configured.label, standing=standing, cost=cost, notes=notes)


def scores(configured: ConfiguredMethod, material: Material, cache: Path | None = None) -> MethodScores:
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
    return found.checked(configured.label, material)


def _summed(
    configured: ConfiguredMethod,
    found: MethodScores,
    material: Material,
    subsets: Sequence[SubsetBlock],
    weighting: Weighting,
    side: Side,
) -> Predictions:
    units = tuple((unit.target, unit.unit_id) for unit in material.units.units)
    broadcast = found.shape[1] == 1 and len(units) != 1
    columns = (ANY,) if broadcast else units
    by_row = RowScores(configured.label, columns, material.n_rows, found)
    summed = by_row.sum_over(subsets, weighting=weighting, side=side, negative=configured.negative)
    if not broadcast:
        return summed
    return replace(summed, units=units, values_BE=np.repeat(summed.values_BE, len(units), axis=1))


def _cost(found: MethodScores) -> Cost:
    features, columns = found.account.features, found.shape[1]
    if found.seconds is None:
        return Cost(features, columns, None, None)
    seconds = found.seconds + found.account.ready
    return Cost(features, columns, seconds.wall, seconds.cpu)


def _renamed(predictions: Predictions, names: Mapping[str, str]) -> Predictions:
    kept = [e for e, (target, _) in enumerate(predictions.units) if target in names]
    return replace(
        predictions,
        units=tuple((names[predictions.units[e][0]], predictions.units[e][1]) for e in kept),
        values_BE=predictions.values_BE[:, kept],
        task_B={names[target]: values_B for target, values_B in predictions.task_B.items() if target in names},
    )


def _notes(label: str, account: Account) -> tuple[str, ...]:
    """One line for the report: what was covered, what was passed over, what else must be known."""
    counted = [f"{reason}: {n:,}" for reason, n in account.counts.items()]
    said = "; ".join([*account.notes, *counted])
    covers = f"covers {_shortened(account.covers)}" if account.covers else ""
    line = "; ".join(part for part in (covers, said) if part)
    return (f"{label}: {line}",) if line else ()


def _shortened(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names) if len(names) <= most else ", ".join(names[:most]) + f" and {len(names) - most} more"


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

    def unit_columns(self, target: str) -> NDArray[np.int64]:
        """Columns of the target's units: those of the artifact."""
        return self.artifact.unit_columns(target)

    def array_blocks(
        self, name: str, *, columns: NDArray[np.int64] | None = None, block_rows: int | None = None
    ) -> Blocks:
        """Scores in blocks of the stored size; one that does not depend on the unit is the same in every column."""
        del name, block_rows
        chosen = np.arange(len(self.artifact.units)) if columns is None else columns
        for start, block in self.found:
            own: F32 = block.astype(np.float32)
            yield start, own[:, chosen] if own.shape[1] > 1 else np.repeat(own, len(chosen), axis=1)


def method_rows(
    artifact: ArtifactReader,
    configured: ConfiguredMethod,
    *,
    environment: Environment | None = None,
    checkpoints: Sequence[Path] = (),
    cache: Path | None = None,
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
        scored = Scored.of(environment, artifact)
        known = Retrained.of(scored, environment.utilities().of(*scored.renamed.values()))
    material = Material(artifact, checkpoint_places=tuple(checkpoints), retrained=known, progress=progress or Silent())
    return MethodRows(artifact, configured.label, scores(configured, material, cache))


def method_scorer(
    artifact: ArtifactReader,
    method: str | None,
    *,
    settings: Path | None = None,
    runs: Environment | RunTable | Path | str | None = None,
    checkpoints: Sequence[Path] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
) -> ScoreRows | None:
    """What ranks rows for a target by a published method: the mean of their scores over its units. None without one.

    Args:
        settings: YAML of settings of the method.
    Raises:
        SettingsError: no such method, or something is given that has no meaning with it.
    """
    looked_at = {"environment": runs is not None, "checkpoints": bool(checkpoints)}
    if method is None:
        given = looked_at | {"method_settings": settings is not None, "cache": cache is not None}
        if idle := [name for name, is_given in given.items() if is_given]:
            raise SettingsError(f"{', '.join(idle)}: no meaning without method; name one, or leave it out")
        return None
    if method == GRASP:
        raise SettingsError("method: got grasp, whose relevance ranks without it; leave method out, see match")
    configured = {} if settings is None else read_yaml(settings)
    (chosen,) = configured_methods([method], configured, "method" if settings is None else str(settings))
    for name, is_given in looked_at.items():
        if is_given and name not in chosen.method.looks_at:
            raise SettingsError(f"{name}: no meaning with method {method}, which looks at none; leave it out")

    environment = None if runs is None else runs_beside(artifact, runs)

    def score(target: str) -> tuple[str, NDArray[np.float64]]:
        rows = method_rows(
            artifact, chosen, environment=environment, checkpoints=checkpoints, cache=cache, progress=progress
        )
        blocks = rows.array_blocks(rows.array_names[0], columns=rows.unit_columns(target))
        return chosen.label, np.concatenate([block.mean(axis=1, dtype=np.float64) for _, block in blocks])

    return score
