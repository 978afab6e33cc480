"""Planted passages have the documented form, and the table equals a double loop."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.contamination import plant
from experiments.contamination.plant import CLEAN, NATURAL, folded, grams, own_text, passages
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


@pytest.fixture
def pool(tmp_path):
    generator = np.random.default_rng(1)
    texts = [" ".join(generator.choice(WORDS, size=90)) for _ in range(60)]
    texts[4] = f"{texts[4]} {own_text(units()[2])} {texts[5]}"
    marks = [["basic_skills", "sciq"] if i == 4 else [] for i in range(60)]
    data = {"doc_id": [f"d{i}" for i in range(60)], "text": texts, "eval_overlap": [", ".join(m) for m in marks]}
    pq.write_table(pa.table(data), tmp_path / "pool.parquet")
    return tmp_path / "pool.parquet"


def test_natural_and_planted_passages_contain_their_units(pool):
    rows, used_units = passages(pool, units(), 3, 20)
    kinds = [row.kind for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        CLEAN: 20, NATURAL: 1, "verbatim": 3, "shuffled": 3, "masked": 3,
    }  # fmt: skip
    assert len({unit.unit_id for unit in used_units}) == len(used_units) == 10
    assert all(len(row.text.split()) == plant.WORDS for row in rows)
    words = {unit.unit_id: folded(own_text(unit)) for unit in used_units}
    for row in rows:
        plain = folded(row.text)
        whole = [
            unit_words
            for unit_words in words.values()
            if grams(unit_words, len(unit_words)) & grams(plain, len(unit_words))
        ]
        assert bool(whole) == (row.kind in ("verbatim", NATURAL))
        shared = any(grams(unit_words, 8) & grams(plain, 8) for unit_words in words.values())
        assert shared or row.kind not in ("verbatim", NATURAL)
        assert not (shared and row.kind == CLEAN)
    gaps = [row.text.split().count("_") / len(own_text(units()[0]).split()) for row in rows if row.kind == "masked"]
    assert gaps == pytest.approx([0.3] * 3, abs=0.04)


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
