"""From a method to predictions of subsets, with what it costs and what must be said of it.

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grasp.baselines.asked import AskedMethod
from grasp.baselines.base import Account, RowMethod, SubsetMethod
from grasp.baselines.material import Material
from grasp.baselines.stored import Cache, StoredScores, stored_scores
from grasp.errors import SettingsError
from grasp.predict.blocks import Side, SubsetBlock
from grasp.runs.predictions import Cost, Predictions, RowScores, Standing, Weighting

ANY = ("", "any")  # the one column of scores that do not depend on the unit
COUNTED = "scores are added up over a subset, not averaged"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions under the label that was asked for, and what a reader must know."""

    predictions: Predictions
    notes: tuple[str, ...]


def predict(
    asked: AskedMethod,
    material: Material,
    subsets: Sequence[SubsetBlock],
    cache: Cache,
    *,
    renamed: Mapping[str, str] | None = None,
    side: Side = "retained",
) -> Predicted:
    """Predict subsets by a method; its scores are computed unless they are stored.

    Args:
        subsets: retained sides over the artifact's rows.
        renamed: the artifact's name of a target -> the name to predict under; targets without one are left out.
        side: which rows' scores are added up, see `RowScores.sum_over`.
    Raises:
        GraspError: what the method needs is not there.
    """
    method = asked.method
    check(asked, material)
    if isinstance(method, RowMethod):
        found = stored_scores(asked.name, method, material, cache)
        weighting = asked.weighting or method.weighting
        predictions = _summed(asked, found, material, subsets, weighting, side)
        cost, account = _cost(found), found.account
        if weighting == "count":
            account = replace(account, notes=(*account.notes, COUNTED))
    else:
        assert isinstance(method, SubsetMethod)
        predictions, account = method.predict(material, subsets)
        cost = None
    standing: Standing = "supervised oracle" if method.supervised else "predictor"
    if asked.oracle_selected and not method.supervised:
        standing = "oracle-selected"
    if renamed is not None:
        predictions = _renamed(predictions, renamed)
    return Predicted(
        replace(predictions, method=asked.label, standing=standing, cost=cost), _notes(asked.label, account)
    )


def scores(asked: AskedMethod, material: Material, cache: Cache) -> StoredScores:
    """Scores of every row by a method that gives them.

    Raises:
        SettingsError: the method predicts subsets, not rows.
    """
    if not isinstance(asked.method, RowMethod):
        raise SettingsError(f"method {asked.label}: predicts subsets and scores no rows; see it in grasp evaluate")
    check(asked, material)
    return stored_scores(asked.name, asked.method, material, cache)


def check(asked: AskedMethod, material: Material) -> None:
    """See that everything a method looks at is there, before any of its work begins.

    Raises:
        GraspError: the artifact keeps no tokens, the model is not its own, a checkpoint is missing, or no environment
            was named.
    """
    looks_at = asked.method.looks_at
    if "environment" in looks_at and material.retrained is None:
        raise SettingsError(
            f"method {asked.label}: is made from retrained subsets; name their directory with --environment"
        )
    if "tokens" in looks_at:
        material.require_tokens()
    if "checkpoints" in looks_at:
        _ = material.checkpoints


def _summed(
    asked: AskedMethod,
    found: StoredScores,
    material: Material,
    subsets: Sequence[SubsetBlock],
    weighting: Weighting,
    side: Side,
) -> Predictions:
    units = tuple((unit.target, unit.unit_id) for unit in material.units.units)
    broadcast = found.n_columns == 1 and len(units) != 1
    columns = (ANY,) if broadcast else units
    by_row = RowScores(asked.label, columns, material.n_rows, found)
    summed = by_row.sum_over(subsets, weighting=weighting, side=side, negative=asked.negative)
    if not broadcast:
        return summed
    return replace(summed, units=units, values_BE=np.repeat(summed.values_BE, len(units), axis=1))


def _cost(found: StoredScores) -> Cost:
    seconds = found.seconds + found.account.ready
    return Cost(found.account.features, found.n_columns, seconds.wall, seconds.cpu)


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
