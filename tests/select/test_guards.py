"""Guards: planted linear problems with a known optimum, and mixtures of an artifact against many others."""

import numpy as np
import pytest

from grasp.errors import SettingsError
from grasp.predict.slices import label_slices
from grasp.select.guards import Guards
from grasp.select.linear_program import MixtureProblem
from grasp.select.mix import mix
from tests.select.test_mix import proposed
from tests.select.world import World, protocol

PROBLEM = MixtureProblem(np.zeros(3), np.ones(3), np.full(3, 1 / 3))


def guards(slope_GK, tolerance, error=0.0):
    """Linear changes, with lower bounds that are `error` below them."""

    def changes(p_BG):
        change_BK = (p_BG - 1 / 3) @ np.asarray(slope_GK)
        return change_BK, change_BK - error

    return Guards(tuple(f"guard-{k}" for k in range(np.shape(slope_GK)[1])), tolerance, changes)


def test_a_linear_problem_has_its_optimum_on_the_guard_and_the_price_of_its_multiplier():
    """Maximise p_0 with p_1 >= 1/3 - .1: p = (.767, .233, 0), and without the guard p_0 = 1."""
    share_G, (guard,) = guards([[0.0], [1.0], [0.0]], 0.1).optimize(
        PROBLEM, lambda p_BG: p_BG[:, 0], [PROBLEM.current_G]
    )
    np.testing.assert_allclose(share_G, [23 / 30, 7 / 30, 0], atol=0.01)
    assert "guard guard-0: predicted change -0.1" in guard.note
    assert "without it the objective gains 0.23" in guard.note
    assert (guard.change, guard.low, guard.price) == pytest.approx((-0.1, -0.1, 7 / 30), abs=1e-4)
    assert (guard.limit, guard.is_relaxed) == (-0.1, False)


def test_guards_that_contradict_each_other_are_relaxed_by_the_least_sum():
    """p_0 and p_1 and p_2 cannot all rise by .05: the sum of the three changes is 0."""
    share_G, outcomes = guards(np.eye(3), 0.0, error=0.05).optimize(
        PROBLEM, lambda p_BG: p_BG[:, 0], [PROBLEM.current_G]
    )
    violation_K = np.maximum(1 / 3 + 0.05 - share_G, 0)
    assert violation_K.sum() == pytest.approx(0.15, abs=0.01)
    for guard in outcomes:
        assert guard.is_relaxed == ("no mixture within the bounds keeps every guard: relaxed to 0." in guard.note)
        assert guard.low >= guard.limit - 1e-5
    assert -sum(guard.limit for guard in outcomes) == pytest.approx(0.15, abs=0.01)


def test_without_guards_the_nearest_mixture_to_a_point_is_its_projection():
    """Of all mixtures with p <= .5, that nearest to (.9, .4, -.2) is (.5, .5, 0); a start outside is ignored."""
    problem = MixtureProblem(np.zeros(3), np.full(3, 0.5), np.full(3, 1 / 3))
    starts = [np.array([1.0, 0.0, 0.0]), problem.current_G]
    point_G = np.array([0.9, 0.4, -0.2])
    share_G, outcomes = Guards().optimize(problem, lambda p_BG: -np.square(p_BG - point_G).sum(axis=1), starts)
    np.testing.assert_allclose(share_G, [0.5, 0.5, 0.0], atol=1e-4)
    assert outcomes == []


@pytest.mark.parametrize("distance", [0.0, 0.2])
def test_a_guarded_mixture_stays_within_the_distance(distance):
    problem = MixtureProblem(np.zeros(3), np.ones(3), np.full(3, 1 / 3), distance)
    share_G, _ = guards([[0.0], [1.0], [0.0]], 0.1).optimize(problem, lambda p_BG: p_BG[:, 0], [PROBLEM.current_G])
    assert share_G.sum() == pytest.approx(1.0, abs=1e-5)
    assert 0.5 * np.abs(share_G - 1 / 3).sum() <= distance + 1e-5
    assert share_G[0] == pytest.approx(1 / 3 + distance, abs=1e-4)
    assert share_G[1] >= 1 / 3 - 0.1 - 1e-5


def test_a_guard_that_does_not_bind_changes_nothing():
    share_G, (guard,) = guards([[1.0], [0.0], [0.0]], 0.0).optimize(
        PROBLEM, lambda p_BG: p_BG[:, 0], [PROBLEM.current_G]
    )
    np.testing.assert_allclose(share_G, [1, 0, 0], atol=1e-6)
    assert guard.note.endswith("it does not bind")
    assert guard.price == 0.0


def test_a_mixture_of_an_artifact_meets_its_guard_and_no_other_one_that_does_is_better():
    source = World()
    options = {"protocol": protocol(), "floor": ["5%"], "max_repeat": 1e6}
    free = mix(source, "topic", "sciq", **options)
    guarded = mix(source, "topic", "sciq", not_worse="boolq", tolerance=0.02, **options)
    change = dict(zip(guarded.targets["target"].to_pylist(), guarded.targets["change"].to_pylist(), strict=True))
    assert change["boolq"] >= -0.02
    assert change["sciq"] <= free.targets["change"][0].as_py() + 1e-6
    (guard,) = guarded.summary()["guards"]
    assert guard["target"] == "boolq"
    assert guard["change"] == pytest.approx(change["boolq"])
    assert guard["low"] >= guard["limit"] - 1e-4 == -0.02 - 1e-4
    assert guarded.notes[0].startswith(f"guard boolq: predicted change {guard['change']:+z.3f}")
    assert guarded.targets["weight"].to_pylist() == [1.0, 0.0]
    slices = label_slices(source.labels, source.tokens)
    assert proposed(guarded).sum() == pytest.approx(1.0)
    assert len(slices.names) == len(proposed(guarded))
    with pytest.raises(SettingsError, match="not_worse: got 'nothing'"):
        mix(source, "topic", "sciq", not_worse="nothing", **options)
