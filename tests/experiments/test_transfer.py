"""Means of the transfer table."""

import pytest

from experiments.transfer.run import mean_without


def test_a_mean_excludes_tasks_used_for_calibration():
    def figures(value):
        return {"task_rho": value, "mean_lds": value / 2, "positive": 1.0, "task_ceiling": None}

    results = {"topic": {"sciq": figures(0.2), "other": figures(0.4)}, "format": {"sciq": figures(0.9)}}
    assert mean_without(results, ()) == pytest.approx({"task_rho": 0.5, "mean_lds": 0.25, "positive": 1.0})
    assert mean_without(results, ("sciq",)) == pytest.approx({"task_rho": 0.4, "mean_lds": 0.2, "positive": 1.0})
    assert mean_without(results, ("other",)) == pytest.approx({"task_rho": 0.55, "mean_lds": 0.275, "positive": 1.0})
