"""BM25 equals its formula and bm25s on whole words; units without words are refused or counted."""

import math
from dataclasses import replace

import numpy as np
import pytest
from bm25s import BM25
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.baselines.bm25 import top_rows, words
from grasp.errors import TargetError
from grasp.methods.registry import score_rows
from grasp.targets.units import UnitSet
from tests.baselines.world import N_ROWS, configured_method, matrix, scored


def slow_bm25(rows, queries, k1, b):
    """Compute the formula in loops in float64."""
    mean = sum(map(len, rows)) / len(rows)
    out = np.zeros((len(rows), len(queries)))
    for e, query in enumerate(queries):
        for word in query:
            result = sum(word in row for row in rows)
            for i, row in enumerate(rows):
                tf = row.count(word)
                if tf:
                    saturation = tf / (tf + k1 * (1 - b + b * len(row) / mean))
                    out[i, e] += math.log(1 + (len(rows) - result + 0.5) / (result + 0.5)) * saturation
    return out


def texts_of(inputs):
    rows = [words(text) for text in inputs.texts(0, N_ROWS)]
    return rows, [words(unit.prompt + unit.completion) for unit in inputs.units.units]


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.6, 0.0), (0.6, 0.5)])
def test_scores_equal_the_formula(k1, b, world, tmp_path):
    expected = slow_bm25(*texts_of(world.inputs()), k1, b)
    result = scored(world, tmp_path, "bm25", k1=k1, b=b)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)  # kept as float16


def test_scores_equal_those_of_bm25s_with_every_word_indexed(world, tmp_path):
    rows, queries = texts_of(world.inputs())
    index = BM25(k1=1.2, b=0.75, method="lucene")
    index.index(rows, show_progress=False)
    expected = np.stack([index.get_scores([w for w in query if w in index.vocab_dict]) for query in queries], axis=1)
    np.testing.assert_allclose(scored(world, tmp_path, "bm25"), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the Boiling point, H2O_x?", ["boiling", "point", "h2o_x"]),
        ("Caf\u00e9 cafe\u0301 na\u00efve", ["caf\u00e9", "caf\u00e9", "na\u00efve"]),
        ("\u041a\u043e\u0442 \u0438 \u043f\u0451\u0441", ["\u043a\u043e\u0442", "\u043f\u0451\u0441"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940 one-letter a", ["\u0939\u093f\u0928\u094d\u0926\u0940", "letter"]),
        ("\u6c34\u6cb8\u70b9 100C", ["\u6c34\u6cb8", "\u6cb8\u70b9", "100c"]),
        ("\u4e2d\u6587abc", ["\u4e2d\u6587", "abc"]),
        ("What is the DNA_1 of a Cell? I don't ask: Question, WHO x y2!", ["dna_1", "cell", "ask", "y2"]),
        ("the of which \u00e9 a 7", []),
    ],
)
def test_words_of_every_alphabet_are_recognised(text, expected):
    assert words(text) == expected


def test_rows_beyond_the_top_score_zero(world, tmp_path):
    whole, cut = scored(world, tmp_path / "whole", "bm25"), scored(world, tmp_path / "cut", "bm25", top=5)
    for e in range(whole.shape[1]):
        best = np.argsort(-whole[:, e], kind="stable")[:5]
        np.testing.assert_array_equal(np.flatnonzero(cut[:, e]), np.sort(best))
        np.testing.assert_array_equal(cut[best, e], whole[best, e])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
@settings(max_examples=60)
def test_the_top_equals_a_truncated_stable_sort(values, data):
    n_top = data.draw(st.integers(1, len(values)))
    score = np.array(values, dtype=np.float32)
    np.testing.assert_array_equal(top_rows(score, n_top), np.sort(np.argsort(-score, kind="stable")[:n_top]))


def with_units(inputs, change):
    """Return the material with other texts of its units."""
    units = UnitSet(tuple(change(i, unit) for i, unit in enumerate(inputs.units.units)))
    inputs.source.__dict__["units"] = units  # what the cached property would have read
    return inputs


def test_a_unit_without_words_scores_zero_and_is_counted(world, tmp_path):
    def silence(i, unit):
        return replace(unit, prompt="Which is the", completion=" a") if i == 2 else unit

    inputs = with_units(world.inputs(), silence)
    result = score_rows(configured_method("bm25"), inputs, tmp_path)
    assert (matrix(result)[:, 2] == 0).all()
    assert result.account.counts["units without a query word: 0 for every row"] == 1


def test_units_without_any_word_are_refused(world, tmp_path):
    inputs = with_units(world.inputs(), lambda i, unit: replace(unit, prompt="Who?", completion=f" {i}"))
    with pytest.raises(TargetError, match=r"6 units.* query word"):
        score_rows(configured_method("bm25"), inputs, tmp_path)
