"""Builds with margins: the relevance of a margin is the weighted sum of the relevance of its answers."""

import shutil

import numpy as np
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError, TargetError
from grasp.inspect.explain import Explainer
from grasp.models.build_source import BuildSource
from grasp.models.unit_loss import evaluate_units
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.pipeline import build_artifact
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import parse_protocol
from grasp.settings import TargetSettings
from grasp.targets import load_units
from grasp.targets.margins import Answers
from tests.corpus.world import write_jsonl
from tests.pipeline.world import relevance, world

KERNELS = ("output_layer", "embedding", "knn", "gradient")
QUIZ = [
    {"prompt": "the river", "choices": ["energy stone", "bird", "metal star ocean"], "answer": 0},
    {"prompt": "the wind and", "choices": ["salt", "iron heart"], "answer": 1},
    {"prompt": "a plant", "choices": ["water", "light cell", "blood", "stone"], "answer": 2},
]


def build_quiz(root, name, names):
    targets = {"names": names, "max_length": 64, "units_per_target": None}
    features = {"kernels": KERNELS, "sample_positions": 10**6}
    settings = world(root, targets=targets, features=features, train="further")
    return ArtifactReader.open(build_artifact(settings, root / f"art-{name}"))


@pytest.fixture(scope="module")
def built(root):
    choices = [
        {"unit_id": f"{k}.{c}", "prompt": line["prompt"], "completion": f" {text}"}
        for k, line in enumerate(QUIZ)
        for c, text in enumerate(line["choices"])
    ]
    files = [
        (write_jsonl(root / "each.jsonl", choices), ""),
        (write_jsonl(root / "quiz.jsonl", QUIZ), "@margin_per_char"),
    ]
    return [build_quiz(root, path.stem, [f"{path}{suffix}"]) for path, suffix in files]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_column_is_the_weighted_sum_of_the_columns_of_the_answers(built, kernel):
    each, quiz = built
    names = each.units["unit_id"].to_pylist()
    each_NA, quiz_NE = relevance(each, kernel), relevance(quiz, kernel)
    losses = dict(zip(names, each.units["loss"].to_pylist(), strict=True))
    tokens = dict(zip(quiz.units["unit_id"].to_pylist(), BuildSource(quiz).unit_tokens, strict=True))
    for e, unit_id in enumerate(quiz.units["unit_id"].to_pylist()):
        k = int(unit_id.partition(":")[2].partition("@")[0])
        gold = QUIZ[k]["answer"]
        order = [gold, *(c for c in range(len(QUIZ[k]["choices"])) if c != gold)]
        answers = Answers.of([tokens[unit_id]])
        loss_A = np.array([losses[f"{k}.{c}"] for c in order])
        expected_N = each_NA[:, [names.index(f"{k}.{c}") for c in order]] @ answers.weights(loss_A)
        # gradients are rounded to bfloat16: 2^-8 of the largest term; the others to float32
        largest = np.abs(each_NA[:, [names.index(f"{k}.{c}") for c in order]]).max() * np.abs(answers.scale_A).max()
        close = largest * (2.0**-6 if kernel == "gradient" else 1e-5)
        np.testing.assert_allclose(quiz_NE[:, e], expected_N, rtol=0, atol=close)
        margin = answers.utilities(loss_A)[0]
        assert quiz.units["loss"][e].as_py() == pytest.approx(-margin, abs=1e-5)


def test_predictions_explanations_and_provenance_of_margins(built):
    _, quiz = built
    assert np.isfinite(Predictor.from_artifact(quiz).effect_NT).all()
    explanation = Explainer(quiz).explain("quiz@margin_per_char", "row-3")
    assert abs(explanation.gap) < 1e-2
    source = BuildSource(quiz)
    assert [len(unit.others) for unit in source.units.units] == [len(unit.others) for unit in source.unit_tokens]
    assert source.units.fingerprint == quiz.manifest.fingerprints["targets"]


def test_a_margin_is_added_to_an_artifact_with_losses(built, root, tmp_path):
    shutil.copytree(root / "art-each", tmp_path / "art")
    add_targets(tmp_path / "art", TargetSettings(names=(str(root / "quiz.jsonl") + "@margin",), max_length=64))
    artifact = ArtifactReader.open(tmp_path / "art")
    assert artifact.targets == ("each", "quiz@margin")
    assert [unit.metric for unit in BuildSource(artifact).units.units[-3:]] == ["margin"] * 3
    assert BuildSource(artifact).units.units[0].metric == "loss"


@pytest.mark.parametrize(
    ("suffix", "kernels", "error", "message"),
    [
        ("@accuracy", KERNELS, TargetError, "quiz@accuracy: an accuracy has no gradient; build for quiz@margin"),
        ("@margin", ("pooled",), SettingsError, "pooled.*not linear.*@margin"),
    ],
)
def test_kernels_that_are_not_linear_are_refused_for_margins(built, root, tmp_path, suffix, kernels, error, message):
    targets = {"names": [str(root / "quiz.jsonl") + suffix]}
    settings = world(root, targets=targets, features={"kernels": kernels}, train="further")
    with pytest.raises(error, match=message):
        build_artifact(settings, tmp_path / "art")


WEIGHTS = [{"unit_id": "0.0", "weight": 2}, {"unit_id": "1.1", "weight": -1.0}, {"unit_id": "quiz:2", "weight": 0.5}]


def with_weights(root, lines, name="mine"):
    path = write_jsonl(root / f"{name}.jsonl", lines)
    return [str(root / "each.jsonl"), str(root / "quiz.jsonl"), str(path)]


@pytest.fixture(scope="module")
def weighted(built, root):
    return build_quiz(root, "weighted", with_weights(root, WEIGHTS))


def test_a_weighted_unit_has_the_sign_in_its_column_and_the_size_in_the_mean(weighted):
    names = weighted.units["unit_id"].to_pylist()
    base = [names.index(line["unit_id"]) for line in WEIGHTS]
    weighted_columns = [names.index(f"{line['unit_id']}@mine") for line in WEIGHTS]
    for kernel in KERNELS:
        all_NE = relevance(weighted, kernel)
        close = (2.0**-6 if kernel == "gradient" else 1e-5) * np.abs(all_NE).max()
        np.testing.assert_allclose(all_NE[:, weighted_columns], all_NE[:, base] * [1, -1, 1], rtol=0, atol=close)
    protocol = parse_protocol({"name": "one kernel", "match": {"output_layer": 1.0}, "task": "mean"}, "test")
    sum_N = relevance(weighted, "output_layer")[:, base] @ [2, -1, 0.5]
    expected_N = (sum_N - sum_N.mean()) / sum_N.std()
    got = Predictor.from_artifact(weighted, protocol, ["mine"]).effect_NT[:, 0]
    np.testing.assert_allclose(got, expected_N, atol=1e-4)
    losses = np.array(weighted.units["loss"].to_pylist())
    np.testing.assert_allclose(losses[weighted_columns], losses[base] * [2, -1, 0.5], rtol=1e-5)


def test_a_metric_is_the_mean_of_weighted_utilities(weighted):
    tokens, names = BuildSource(weighted).unit_tokens, weighted.units["unit_id"].to_pylist()
    model = BuildSource(weighted).model.model
    utility_E = -evaluate_units(model, tokens)
    for line in WEIGHTS:
        weighted_utility, base = (utility_E[names.index(name)] for name in (f"{line['unit_id']}@mine", line["unit_id"]))
        assert weighted_utility == pytest.approx(line["weight"] * base, rel=1e-12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"unit_id": "zz", "weight": 1}, r"bad.jsonl:1: unit_id: 'zz' is not a unit of.*sciq,weights"),
        ({"unit_id": "0.0", "weight": 0}, "weight: got 0, expected a number other than 0"),
        ({"unit_id": "0.0", "weight": "1"}, "weight: got '1'"),
        ({"unit_id": "0.0", "weight": 1, "target": "each"}, "each is named twice"),
    ],
)
def test_invalid_weights_are_refused(built, root, line, message):
    with pytest.raises(TargetError, match=message):
        load_units(TargetSettings(names=tuple(with_weights(root, [line], "bad"))))
