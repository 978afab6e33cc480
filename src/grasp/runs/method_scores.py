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
from grasp.predict.row_arrays import F32, Blocks
from grasp.runs.configured import ConfiguredMethod
from grasp.runs.contract import Account, MethodScores, RowMethod, SubsetMethod
from grasp.runs.environment import Environment
from grasp.runs.material import Material, Retrained
from grasp.runs.predictions import Cost, Predictions, RowScores, Standing
from grasp.runs.scored import Scored

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

    def means(self, target: str) -> NDArray[np.float64]:
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
        scored = Scored.of(environment, artifact)
        known = Retrained.of(scored, environment.utilities().of(*scored.renamed.values()))
    places, kept = tuple(map(Path, checkpoints)), None if cache is None else Path(cache)
    material = Material(artifact, checkpoint_places=places, retrained=known, progress=progress or Silent())
    return MethodRows(artifact, configured.label, scores(configured, material, kept))
