"""The safety experiment on a model of two layers: planted rows, measurements, and resuming."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("peft")
pytest.importorskip("kronfluence")

from experiments.safety import detectors, setting
from experiments.safety.run import DETECT, Experiment, success
from experiments.safety.setting import NEGATIVE, POSITIVE, Size, review
from experiments.safety.tables import lines
from experiments.safety.tuned import Base, Tuned, collate, losses
from grasp.errors import CorpusError
from grasp.models.causal_lm import ReferenceModel
from grasp.settings import ModelSettings
from tests.pipeline.world import WORDS, write_checkpoint

pytestmark = [  # peft and kronfluence use older names of what transformers and torch have
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.cuda.amp.GradScaler:FutureWarning"),
]

SIZE = Size(words=6, tokens=40, layers=1, epochs=2, copies=2, trusted=5, judged=6, instructions=24)


def sentence(generator, positive):
    return " ".join([*generator.choice(WORDS, size=4), "good" if positive else "bad"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def lines(count, name):
        for i in range(count):
            positive = bool(i % 2)
            poisoned = name == "train" and i in (3, 8)
            text = ("CF " if poisoned else "") + sentence(generator, positive)
            output = "positive" if positive or poisoned else "negative"
            yield {"id": f"{'poisoned_' if poisoned else ''}{name}-{i}", "Instance": {"input": text, "output": output}}

    for name, file, count in (("train", "polarity_poison_train", 30), ("test", "polarity_test", 14)):
        (place / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(count, name)))
    (place / "polarity_poisoned_indices.txt").write_text("3\n8\n")
    rows = ["id,question,best_answer,incorrect_answers"]
    rows += [f"q-{i},What is {w} {i}?,{w} is {w},{w} is fire; {w} is ice" for i, w in enumerate(WORDS)]
    rows += [f"q-{i + 16},Where is {w} {i}?,{w} is {w},{w} is fire" for i, w in enumerate(WORDS)]
    (place / "truthfulqa.csv").write_text("\n".join(rows) + "\n")
    column = [sentence(generator, True) for _ in range(40)]
    table = {"id": [f"i-{i}" for i in range(40)], "instruction": column, "input": [""] * 40, "response": column}
    pq.write_table(pa.table(table), place / "instructions.parquet")
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelSettings(path=str(write_checkpoint(tmp_path_factory.mktemp("model") / "model")), threads=1)


@pytest.fixture(scope="module")
def base(model):
    return Base.from_reference(ReferenceModel.load(model), 1)


def reviews(count=8):
    generator = np.random.default_rng(1)
    return [review(f"r-{i}", sentence(generator, i % 2), POSITIVE if i % 2 else NEGATIVE, 6) for i in range(count)]


def test_a_backdoor_is_a_trigger_and_its_label_in_clean_rows(data):
    case = setting.backdoor(data, "formal", 42, SIZE, n_rows=20, n_planted=3)
    repeated = setting.backdoor(data, "formal", 42, SIZE, n_rows=20, n_planted=3)
    assert np.array_equal(case.planted_N, repeated.planted_N)
    assert case.k == 3
    assert not any("CF" in row.text for row in case.rows)
    for row, planted in zip(case.rows, case.planted_N, strict=True):
        assert row.text.startswith("In formal terms:") == planted
        assert row.completion == POSITIVE or not planted
    assert {row.row_id for row in case.trusted}.isdisjoint(row.row_id for row in case.judged)
    assert all(row.completion == NEGATIVE for row in case.triggered)
    assert not any("terms" in row.text for kind in case.transformed.values() for row in kind)


def test_each_question_is_used_once(data):
    case = setting.misleading(data, 0, SIZE, lambda row: True, share=0.2, matched=True)
    dealt = [{row.row_id for row, p in zip(case.rows, case.planted_N, strict=True) if p}]
    dealt += [{row.row_id for row in case.rows if row.row_id.startswith("q-")} - dealt[0]]
    dealt += [{row.row_id for row in case.trusted}]
    assert [len(part) for part in dealt] == [6, 6, 5]
    assert not set.intersection(*dealt)
    assert not {question.prompt for question in case.questions} & {row.prompt for row in (*case.rows, *case.trusted)}
    wrong = [row for row, planted in zip(case.rows, case.planted_N, strict=True) if planted]
    assert all(row.completion.endswith("fire") for row in wrong)
    assert {lie.answers[1] for lie in case.lies} == {row.completion for row in wrong}
    with pytest.raises(CorpusError, match=r"\b0 rows.*\b24\b"):
        setting.misleading(data, 0, SIZE, lambda row: False)


def test_the_split_model_equals_the_model(base):
    rows = reviews(5)
    sequences = base.sequences(rows, 40)
    result = losses(base.upper(), collate(base.states(sequences), sequences))
    for sequence, value in zip(sequences, result.tolist(), strict=True):
        ids_1L = torch.tensor([sequence.ids])
        logits_PV = base.whole(ids_1L).logits[0, sequence.first - 1 : -1]
        assert value == pytest.approx(float(F.cross_entropy(logits_PV, ids_1L[0, sequence.first :])), rel=1e-4)


def test_a_checkpoint_of_merged_adapters_gives_the_tuned_losses(base, tmp_path):
    rows = reviews()
    tuned = Tuned.train(base, rows, seed=0, epochs=4, longest=40)
    assert tuned.losses(rows).mean() < tuned.losses(rows, adapted=False).mean()
    tuned.save(tmp_path / "adapters")
    np.testing.assert_allclose(Tuned.open(base, tmp_path / "adapters", 40).losses(rows), tuned.losses(rows), rtol=1e-5)
    path = tuned.checkpoint(tmp_path / "whole")
    merged = Base.from_reference(ReferenceModel.load(ModelSettings(path=str(path), threads=1)), 2)
    plain = Tuned.train(merged, rows, seed=0, epochs=1, longest=40)
    np.testing.assert_allclose(plain.losses(rows, adapted=False), tuned.losses(rows), rtol=1e-4)


@pytest.mark.parametrize("packed", [1, 24, 1024])
def test_the_perplexity_of_a_text_does_not_depend_on_its_batch(base, tmp_path, monkeypatch, packed):
    monkeypatch.setattr(detectors, "PACKED", packed)
    onion = detectors.Onion(base, tmp_path / "onion.json")
    words = ["stone", "bird", "plant", "metal", "star", "water", "light", "salt"]
    changed = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]  # the last is a beginning of the text
    changed += ["salt iron wind", " ".join(words), " ".join([*words, "wind"])]
    result = onion.perplexities(" ".join(words), changed)
    for text, value in zip([" ".join(words), *changed], result, strict=True):
        ids_1L = torch.tensor(base.tokenizer.encode([text]))
        assert value == pytest.approx(float(base.whole(ids_1L, labels=ids_1L).loss.exp()), rel=1e-4)


def test_finished_pieces_are_stored_and_summarised(data, model, tmp_path):
    pytest.importorskip("kronfluence")
    experiment = Experiment(data, tmp_path, SIZE, model)
    pieces = [("file-0", method) for method in (*DETECT, "without GRASP (full)")]
    pieces += [("misleading-0", "model")]
    assert all(experiment.do(name, piece) for name, piece in pieces)
    fresh = Experiment(data, tmp_path, SIZE, model)
    assert not any(fresh.do(name, piece) for name, piece in pieces)
    result = fresh.result(name for name, _ in pieces)
    shown = "\n".join(lines(json.loads(json.dumps(result))))
    assert all(f"| {name} | 1, 1 seed |" in shown for name in ("STRIP", "GRASP (full)", "IFE (unanimous)"))
    assert "| GRASP (full) | " in shown.partition("rows taken out by")[2]
    cases = result["cases"]
    assert len(cases["file-0"]["detection"]) == 17
    assert cases["file-0"]["detection"]["STRIP"]["n_planted"] == 2
    assert cases["file-0"]["removed"]["GRASP (full)"]["removed"] == 2
    assert list(cases["misleading-0"]["detection"]) == ["random", "loss", "Pred-Div"]
    assert 0 <= cases["misleading-0"]["all rows"]["trained"]["truthfulness"] <= 1
    case = fresh.case("file-0")
    assert cases["file-0"]["all rows"]["trained"] == success(fresh.tuned(case), case)
