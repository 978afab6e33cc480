"""What is planted is what it says, and the table is the double loop's."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.contamination import plant
from experiments.contamination.plant import CLEAN, NATURAL, folded, grams, own_text, passages
from experiments.contamination.readme import lines
from experiments.contamination.run import gram_overlap, make, recall, scores, table
from grasp.targets import Unit
from grasp.training.llama import LlamaShape
from grasp.training.recipe import named_recipe
from tests.build.world import WORDS


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


def test_natural_and_planted_passages_hold_what_they_say(pool):
    rows, asked = passages(pool, units(), 3, 20)
    kinds = [row.kind for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        CLEAN: 20, NATURAL: 1, "verbatim": 3, "shuffled": 3, "masked": 3,
    }  # fmt: skip
    assert len({unit.unit_id for unit in asked}) == len(asked) == 10
    assert all(len(row.text.split()) == plant.WORDS for row in rows)
    words = {unit.unit_id: folded(own_text(unit)) for unit in asked}
    for row in rows:
        plain = folded(row.text)
        whole = [one for one in words.values() if grams(one, len(one)) & grams(plain, len(one))]
        assert bool(whole) == (row.kind in ("verbatim", NATURAL))
        shared = any(grams(one, 8) & grams(plain, 8) for one in words.values())
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
    found = gram_overlap([" ".join(words), f"x b {' '.join(words)}", "nothing"], [long])
    assert found.tolist() == [0.25, 0.5, 0.0]
    assert gram_overlap(["one two three"], [Unit("s", "t", "Question: one?\nAnswer:", " two", "all")]).tolist() == [1.0]


def test_recall_looks_at_one_kind_beside_the_clean_rows():
    kind = np.array(["a"] * 10 + ["b"] * 5 + [CLEAN] * 200)
    score = np.concatenate([np.full(10, 3.0), np.full(5, 9.0), np.linspace(0, 4, 200)])
    found = recall(score, kind, "a")
    assert found["rows"] == 10
    assert found["recall"] == 1.0  # 50 clean rows are above them
    assert recall(-score, kind, "a")["recall"] == 0.0
    even = recall(np.zeros(215), kind, "b")["recall"]
    assert 0.0 <= even <= 1.0  # ties: by a draw, not by the order of the file


def test_everything_from_a_pool_to_a_table(pool, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.contamination.run.load_units", lambda settings: type("S", (), {"units": units()}))
    shape = {"vocab_size": 300, "hidden": 8, "intermediate": 12, "layers": 1, "heads": 1, "context": 96}
    changed = {"shape": LlamaShape(**shape), "steps": 3, "warmup_steps": 1, "batch_rows": 4}
    recipe = named_recipe("tiny").model_copy(update=changed)
    artifact, rows, asked = make(pool, tmp_path / "work", recipe, 2, 12)
    found = table(
        scores(artifact, asked, [row.text for row in rows]), pq.read_table(artifact.rows_path)["kind"].to_pylist()
    )
    assert pq.read_table(artifact.rows_path)["kind"].to_pylist() == [row.kind for row in rows]
    assert set(found["BM25"]) == {NATURAL, "verbatim", "shuffled", "masked"}
    assert found["13-gram overlap"]["verbatim"]["auroc"] == 1.0
    assert len(found) == 9
    kinds = [row.kind for row in rows]
    shown = lines({"rows": {kind: kinds.count(kind) for kind in kinds}, "table": found})
    assert shown[0] == "| method | verbatim (2) | shuffled (2) | masked (2) | natural (1) |"
    assert len(shown) == 2 + len(found)
