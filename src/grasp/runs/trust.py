"""What predictions are worth in an environment: nats a token, with an interval, from the subsets that were retrained.

The line and its interval are those of `grasp.predict.intervals`; here they are fitted: realized utility against the
predicted change, a point a run, a line a target. A held-out environment is refused: once it has been fitted to,
nothing is left to test the intervals on.
Shape letters: B subsets of the environment, T targets.
"""

from collections.abc import Mapping

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.predict.intervals import COVERAGE, Intervals, NatsLine, Reach, distances, relative
from grasp.predict.predictor import Predictor
from grasp.runs.environment import Environment
from grasp.runs.learning import development_targets


def fit_intervals(predictor: Predictor, artifact: ArtifactReader, environment: Environment) -> Intervals:
    """Fit the targets of a predictor that the environment has.

    Args:
        predictor: bound to `artifact`; `grasp.predict.intervals.measures` names the sketches it should be made with.
    Raises:
        ProtocolLeakError: the environment is held out, or all of the targets are.
        EnvironmentDataError: artifact and environment do not belong together, share no target, or have too few
            subsets.
    """
    scored, targets = development_targets(predictor, artifact, environment)
    sums = [predictor.sums(block.weights) for block in scored.blocks]
    subset_ids = [name for block in scored.blocks for name in block.subset_ids]
    utilities = environment.utilities()
    order = [subset_ids.index(name) for name in utilities.subset_ids]
    change_BT = np.concatenate([predictor.change_of(part) for part in sums])[order]
    parts = [distances(predictor, part) for part in sums]
    each = {measure: np.concatenate([part[measure] for part in parts])[order] for measure in parts[0]}
    reach = {measure: Reach(float(d_B.mean()), float(d_B.max())) for measure, d_B in each.items()}
    lines: dict[str, NatsLine] = {}
    for name, theirs in targets.items():
        change_B = change_BT[:, predictor.targets.index(name)]
        realized_B = utilities.of(theirs).values_BSE.mean(axis=(1, 2))
        lines[name] = NatsLine.fit(name, change_B, realized_B, relative(each, reach), COVERAGE)
    seeds = f"{len(utilities.seeds)} seed" + ("s" if len(utilities.seeds) > 1 else "")
    return Intervals(
        title=f"nats, nats_low, nats_high: change in nats a token, {COVERAGE:.0%} interval, for a model retrained as "
        f"in {environment.name} (recipe {environment.info.recipe}, mean of {seeds}); by a straight line through the "
        "runs, so grasp predict, which learns a curve, differs a little",
        lines=lines,
        reach=reach,
        notes=tuple(_notes(predictor, environment, lines, scored.runs_fingerprint)),
    )


def _notes(
    predictor: Predictor, environment: Environment, lines: Mapping[str, NatsLine], fingerprint: str
) -> list[str]:
    notes = [
        f"{name}: realized utility does not rise with the prediction in {environment.name}: trust the interval alone"
        for name, line in lines.items()
        if line.slope <= 0
    ]
    missing = [name for name in predictor.targets if name not in lines]
    if missing:
        notes.append(f"no interval for {', '.join(missing)}: no development target of {environment.name}")
    if predictor.protocol.chosen_on(fingerprint):
        notes.append(f"the protocol was selected on {environment.name}: its intervals are somewhat too narrow")
    return notes
