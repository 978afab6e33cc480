"""Margins: signed sums of answer losses to first order, with the values of harness accuracies."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp
from transformers import GPT2Config, GPT2LMHeadModel

from grasp.errors import TargetError
from grasp.models.unit_loss import evaluate_units
from grasp.settings import TargetSettings
from grasp.targets import UnitSet, load_units
from grasp.targets.margins import Answers, split_metric
from grasp.targets.units import UnitTokens
from tests.targets.test_units import CharTokenizer

RECORDS = [
    {"prompt": "water is", "choices": ["wet", "dry", "a metal"], "answer": 0},
    {"question": "hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"},
    {"prompt": "sum:", "choices": ["3", "4"], "answer": "4"},
    {"prompt": "sum:\n", "choices": ["a", "b"], "label": "B", "unit_id": "last"},
]


def units_of(tmp_path, records, suffix=""):
    path = tmp_path / "quiz.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return load_units(TargetSettings(names=(f"{path}{suffix}",))).units


def test_choices_and_answers_of_any_form(tmp_path):
    read = {unit.unit_id: (unit.prompt, unit.completion, unit.choices) for unit in units_of(tmp_path, RECORDS)}
    assert read == {
        "quiz:0": ("water is", " wet", (" wet", " dry", " a metal")),
        "quiz:1": ("Question: hot?\nAnswer:", " fire", (" ice", " fire")),
        "quiz:2": ("sum:", " 4", (" 3", " 4")),
        "last": ("sum:\n", "b", ("a", "b")),
    }


def test_a_margin_has_the_units_of_its_task_with_the_other_choices(tmp_path):
    plain, margins = units_of(tmp_path, RECORDS), units_of(tmp_path, RECORDS, "@margin_per_char")
    assert [unit.unit_id for unit in margins] == [f"{unit.unit_id}@margin_per_char" for unit in plain]
    assert {unit.target for unit in margins} == {"quiz@margin_per_char"}
    for unit in margins:
        assert {unit.completion, *(other.completion for other in unit.others)} == set(unit.choices)
        assert len(unit.others) == len(unit.choices) - 1


def test_choices_that_are_contexts_differ_in_the_prompt(tmp_path):
    line = {"prompt": "A cup", "completion": " fell", "choices": ["A cup", "A table"], "gold": 0}
    (unit,) = units_of(tmp_path, [line], "@margin")
    assert [(other.prompt, other.completion) for other in unit.others] == [("A table", " fell")]


def test_an_excluded_unit_is_excluded_from_every_metric(tmp_path):
    path = tmp_path / "quiz.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    settings = TargetSettings(names=(str(path), f"{path}@margin"), exclude_units=("quiz:0",))
    assert not {"quiz:0", "quiz:0@margin"} & {unit.unit_id for unit in load_units(settings).units}


@pytest.mark.parametrize("metric", ["margin", "margin_per_char", "margin_per_token", "accuracy"])
def test_a_choice_without_text_is_no_answer(tmp_path, metric):
    record = {"question": "what?", "choices": ["sugar", "", "cats"], "answer": 0}
    assert units_of(tmp_path, [record])[0].completion == " sugar"  # the loss needs no other choice
    with pytest.raises(TargetError, match=f"'quiz:0' of quiz: @{metric}: got a choice without text; remove"):
        units_of(tmp_path, [record], f"@{metric}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": " b"}, "'quiz:0'.*@margin needs the wrong answers.*`choices`"),
        ({"prompt": "a", "choices": ["b"], "answer": 0}, r"quiz.jsonl:1: choices: got \['b'\].*at least two"),
        ({"prompt": "a", "choices": ["b", "c"]}, "quiz.jsonl:1: has choices.*gold, answer"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "answer: got 2, expected.*one of the 2 choices"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": "d"}, "answer: got 'd', expected.*one of the 2 choices"),
        ({"choices": ["b", "c"], "answer": 1}, "no text `prompt` or `question`"),
    ],
)
def test_units_without_a_margin_are_refused(tmp_path, record, message):
    with pytest.raises(TargetError, match=message):
        units_of(tmp_path, [record], "@margin")


def test_a_margin_is_of_completions(tmp_path):
    path = tmp_path / "quiz.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    with pytest.raises(TargetError, match=r"@margin .*loss_on all"):
        load_units(TargetSettings(names=(f"{path}@margin",), loss_on="all"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sciq@margin", ("sciq", "margin")),
        ("a/b.jsonl@accuracy_per_char", ("a/b.jsonl", "accuracy_per_char")),
        ("s3://me@host/x.jsonl", ("s3://me@host/x.jsonl", None)),
        ("sciq@all", ("sciq@all", None)),
    ],
)
def test_only_metrics_are_split_off(name, parts):
    assert split_metric(name) == parts


def tokens(generator, n_others, scale=False, **fields):
    def answer():
        count = int(generator.integers(1, 4))
        ids = generator.integers(0, 32, size=4 + count).astype(np.int32)
        return UnitTokens(ids, 4, scale=float(generator.uniform(0.2, 3)) if scale else 1.0)

    first = answer()
    return UnitTokens(first.input_ids, 4, tuple(answer() for _ in range(n_others)), first.scale, **fields)


@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_utilities_equal_the_definition(seed, counts):
    generator = np.random.default_rng(seed)
    units = [
        tokens(generator, n, scale=True, weight=float(generator.normal()), is_accuracy=bool(n) and seed % 3 == 0)
        for n in counts
    ]
    answers = Answers.of(units)
    loss_KA = generator.uniform(0, 5, size=(2, len(answers.tokens)))
    utility_KE = answers.utilities(loss_KA)
    for k in range(2):
        losses = iter(loss_KA[k])
        for e, unit in enumerate(units):
            logp = [-answer.scale * next(losses) for answer in (unit, *unit.others)]
            value = logp[0]
            if unit.others:
                value = float(logp[0] > max(logp[1:])) if unit.is_accuracy else logp[0] - logsumexp(logp[1:])
            assert utility_KE[k, e] == pytest.approx(unit.weight * value, rel=1e-12, abs=1e-12)


def test_a_margin_equals_to_first_order_the_weighted_sum_of_its_answers():
    """Central differences of the true margin against the weights times autograd, in float64."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval().double()
    generator = np.random.default_rng(1)
    units = [tokens(generator, n, scale=True, weight=weight) for n, weight in ((3, 1.0), (0, 1.0), (1, -0.5))]
    answers = Answers.of(units)
    # the tokens of answers are units of their own, whose scales and weights do not count here
    plain = [UnitTokens(answer.input_ids, answer.first) for answer in answers.tokens]
    loss_A = evaluate_units(model, plain)
    weight_A = answers.weights(loss_A)
    parameters = list(model.parameters())
    direction = [torch.randn_like(parameter) for parameter in parameters]

    slope_A = []
    for answer in plain:
        ids = torch.from_numpy(answer.input_ids[None].astype(np.int64))
        labels = ids.clone()
        labels[:, : answer.first] = -100
        gradients = torch.autograd.grad(model(input_ids=ids, labels=labels).loss, parameters)
        slope_A.append(sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True)))
    expected_E = np.bincount(answers.unit_A, weight_A * -np.array(slope_A))

    step, values = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.add_(sign * step * d)
            values.append(-evaluate_units(model, units))
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.sub_(sign * step * d)
    # error of central differences: step^2 times third derivatives, and rounding over the step
    np.testing.assert_allclose((values[0] - values[1]) / (2 * step), expected_E, rtol=1e-6, atol=1e-7)


def test_scales_are_tokens_and_characters(tmp_path):
    for metric, scales in (("margin", [4.0, 4.0, 8.0]), ("margin_per_char", [4 / 3, 4 / 3, 8 / 7])):
        (unit,) = [unit for unit in units_of(tmp_path, RECORDS, f"@{metric}") if unit.unit_id.startswith("quiz:0")]
        (encoded,) = UnitSet((unit,)).tokenize(CharTokenizer(), 64)
        assert [part.scale for part in (encoded, *encoded.others)] == scales
