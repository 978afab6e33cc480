"""Overlap of grams, and recall of one kind of planted passages."""

import numpy as np

from experiments.contamination.plant import CLEAN, own_text
from experiments.contamination.run import gram_overlap, recall
from grasp.targets import Unit
from tests.pipeline.world import WORDS


def units(count=12):
    generator = np.random.default_rng(0)
    questions = [" ".join(generator.choice(WORDS, size=11)) for _ in range(count)]
    return [
        Unit(f"sciq:{i}", "sciq", f"A passage.\nQuestion: What {q}?\nAnswer:", f" {q.split()[0]}", "completion")
        for i, q in enumerate(questions)
    ]


def test_gram_overlap_is_the_share_of_a_units_grams():
    (unit,) = units(1)
    words = own_text(unit).split()
    assert len(words) == 13
    assert own_text(unit, whole=True).split() == ["A", "passage.", *words]
    long = Unit("u", "sciq", f"Question: a b {' '.join(words)}\nAnswer:", " c", "completion")
    overlap = gram_overlap([" ".join(words), f"x b {' '.join(words)}", "nothing"], [long])
    assert overlap.tolist() == [0.25, 0.5, 0.0]
    assert gram_overlap(["one two three"], [Unit("s", "t", "Question: one?\nAnswer:", " two", "all")]).tolist() == [1.0]


def test_recall_compares_one_kind_with_the_clean_rows():
    kind = np.array(["a"] * 10 + ["b"] * 5 + [CLEAN] * 200)
    score = np.concatenate([np.full(10, 3.0), np.full(5, 9.0), np.linspace(0, 4, 200)])
    figures = recall(score, kind, "a")
    assert figures["rows"] == 10
    assert figures["recall"] == 1.0  # 50 clean rows are above them
    assert recall(-score, kind, "a")["recall"] == 0.0
    even = recall(np.zeros(215), kind, "b")["recall"]
    assert 0.0 <= even <= 1.0  # ties are broken at random, not by the order of the file
