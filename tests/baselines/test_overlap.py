"""Overlap is the share of the words of a unit in a row, by sets; units without words are refused or counted."""

import numpy as np
import pytest

from grasp.baselines.bm25 import query_text, words
from grasp.errors import TargetError
from grasp.methods.registry import score_rows
from tests.baselines.world import N_ROWS, configured_method, matrix


def test_scores_equal_shares_of_sets(world, tmp_path):
    inputs = world.inputs()
    result = matrix(score_rows(configured_method("overlap"), inputs, tmp_path))
    rows = [set(words(text)) for text in inputs.texts(0, N_ROWS)]
    queries = [set(words(query_text(unit))) for unit in inputs.units.units]
    expected = [[len(row & query) / len(query) for query in queries] for row in rows]
    np.testing.assert_allclose(result, expected, atol=1e-3)  # kept as float16
    assert len(np.unique(result)) > 3


def test_units_without_words_are_refused(world, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.baselines.overlap.words", lambda _: [])
    inputs = world.inputs()
    with pytest.raises(TargetError, match=r"6 units.* query word"):
        score_rows(configured_method("overlap"), inputs, tmp_path)
