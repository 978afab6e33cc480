"""Selection for some questions, evaluated on others: split of questions, training, intervals, summary."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from experiments.selection.choices import World
from experiments.selection.run import interval, summary

N_ROWS, N_UNITS = 50, 12


@pytest.fixture
def world():
    artifact = SimpleNamespace(n_rows=N_ROWS, unit_columns=lambda target: np.arange(N_UNITS))
    return World(artifact)


def line(method="mean", target="sciq", others=1.0, known=2.0, seed=0):
    request = {"method": method, "target": target, "questions": 4, "share": 0.2, "draw": 0, "seed": seed}
    return request | {"others": [others], "known": [known]}


def test_questions_are_split_in_halves_at_random(world):
    known, others = world.questions("sciq")
    assert sorted([*known, *others]) == list(range(N_UNITS))
    assert len(known) == N_UNITS // 2
    assert set(known) != set(world.questions("sciq", draw=1)[0])


def test_the_interval_equals_student_t():
    values = [0.1, 0.4, 0.3, 0.7]
    ends = ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(values), [np.mean(values), *ends], atol=5e-4)
    assert interval([0.25]) == [0.25]


def test_summary_averages_seeds_before_tasks():
    lines = [line(others=1.0), line(others=3.0, seed=1), line(target="piqa", others=5.0, known=8.0)]
    (cell,) = summary(lines)
    assert cell["tasks"] == {"piqa": 5.0, "sciq": 2.0}
    assert cell["others"][0] == 3.5
    assert cell["carried"] == pytest.approx(3.5 / 5.0)
    assert cell["seeds"] == 2
