"""From a method to predictions of subsets, with what it costs and what must be said of it.

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from grasp.errors import SettingsError
from grasp.predict.blocks import Side, SubsetBlock
from grasp.predict.geometry import Weighting
from grasp.runs.configured import ConfiguredMethod
from grasp.runs.contract import Account, MethodScores, RowMethod, SubsetMethod
from grasp.runs.material import Material
from grasp.runs.predictions import Cost, Predictions, RowScores, Standing

CACHE = "baselines"  # inside the artifact
ANY = ("", "any")  # the one column of scores that do not depend on the unit
COUNTED = "scores are added up over a subset, not averaged"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions under the label of the configuration, and what a reader must know."""

    predictions: Predictions
    notes: tuple[str, ...]


def predict(
    configured: ConfiguredMethod,
    material: Material,
    subsets: Sequence[SubsetBlock],
    cache: Path | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
    side: Side = "retained",
) -> Predicted:
    """Predict subsets by a method; its scores are computed unless they are stored.

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
    return Predicted(
        replace(predictions, method=configured.label, standing=standing, cost=cost), _notes(configured.label, account)
    )


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
