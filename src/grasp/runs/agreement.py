"""Predictions beside retraining, subset by subset: what a scatter shows, and the metrics that go with it.

Shape letters: B subsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.row_arrays import F64
from grasp.runs.development import Scored
from grasp.runs.environment import Environment, Utilities
from grasp.runs.environment_info import Role
from grasp.runs.evaluate import EvaluationReport, artifact_targets
from grasp.runs.methods import Contenders, compare
from grasp.runs.metrics import MIN_SUBSETS


@dataclass(frozen=True, slots=True)
class TargetPoints:
    """One target: a point a subset."""

    target: str  # the environment's name
    role: Role
    subset_ids: tuple[str, ...]
    predicted_B: F64  # change, but for a constant; in effect sizes where the protocol has no geometry
    realized_B: F64  # mean over seeds and units, nats a token; higher is better
    spread_B: F64  # standard deviation over seeds; nan for one seed


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a protocol reaches in an environment."""

    protocol: str
    report: EvaluationReport
    points: tuple[TargetPoints, ...]
    n_planned: int  # subsets that the environment is meant to have
    seeds_planned: int


def agreement(
    artifact: ArtifactReader,
    environment: Environment,
    protocol: ScoringProtocol,
    *,
    targets: Sequence[str] | None = None,
    partial: bool = False,
) -> Agreement:
    """Compare a protocol, and the additive cores beside it, with an environment.

    Args:
        targets: by the artifact's names; None: all that both have.
        partial: of an unfinished environment use the subsets that have a result for every seed; where these are fewer
            than three, leave out the last seeds.
    Raises:
        EnvironmentDataError: artifact and environment do not belong together, or results are missing.
        ProtocolError: the artifact does not fit the protocol.
    """
    renamed = artifact_targets(environment, artifact)
    chosen = [theirs for theirs, own in renamed.items() if targets is None or own in targets]
    if not chosen:
        raise EnvironmentDataError(
            f"{environment.path}: has targets {list(environment.targets)}, asked are {list(targets or ())}; none is "
            "common to both"
        )
    utilities = (_what_is_there(environment) if partial else environment.utilities()).of(*chosen)
    contenders = Contenders({protocol.name: protocol})
    report = compare(artifact, environment, contenders, targets=chosen, seeds=utilities.seeds, partial=partial)
    (predicted,) = Scored.of(environment, artifact).predict({protocol.name: protocol}, chosen)
    points = [
        _points(
            name, environment.role_of(name), utilities.of(name), dict(zip(predicted.subset_ids, values, strict=True))
        )
        for name, values in predicted.task_B.items()
    ]
    return Agreement(protocol.name, report, tuple(points), len(environment.subset_ids), len(environment.info.seeds))


def _what_is_there(environment: Environment) -> Utilities:
    """Of an unfinished environment, as many seeds as leave enough subsets; seeds are trained one after the other."""
    for count in range(len(environment.info.seeds), 0, -1):
        found = environment.utilities(seeds=environment.info.seeds[:count], partial=True)
        if len(found.subset_ids) >= MIN_SUBSETS:
            return found
    raise EnvironmentDataError(
        f"{environment.path}: fewer than {MIN_SUBSETS} subsets have a result yet; wait for some, or leave it out"
    )


def _points(target: str, role: Role, utilities: Utilities, predicted: dict[str, float]) -> TargetPoints:
    realized_BS = utilities.values_BSE.mean(axis=2)
    spread_B = realized_BS.std(axis=1, ddof=1) if realized_BS.shape[1] > 1 else np.full(len(realized_BS), np.nan)
    return TargetPoints(
        target=target,
        role=role,
        subset_ids=utilities.subset_ids,
        predicted_B=np.array([predicted[name] for name in utilities.subset_ids]),
        realized_B=realized_BS.mean(axis=1),
        spread_B=spread_B,
    )
