"""The one-step experiment: predictions against enumeration and autograd, utilities against manual steps."""

import copy
import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from experiments.one_step import measure as measuring
from experiments.one_step.game import Expansion, Gradients, StepUtility, sketched
from experiments.one_step.measure import spearman_columns
from experiments.one_step.setting import Settings
from experiments.one_step.shapley import exact_shapley
from grasp.kernels.sketch import CountSketch
from grasp.models.causal_lm import ReferenceModel
from grasp.targets.units import UnitTokens
from grasp.training.llama import LlamaShape, new_llama
from grasp.training.recipe import named_recipe
from tests.baselines.gradient_world import NoTokenizer, autograd, objective, rows, units
from tests.pipeline.world import texts, write_targets

SHAPE = LlamaShape(vocab_size=97, hidden=16, intermediate=24, layers=2, heads=2, context=32)
RECIPE = named_recipe("tiny").model_copy(update={"shape": SHAPE})


@pytest.fixture(scope="module")
def model():
    drawn = new_llama(SHAPE, 3)
    with torch.no_grad():
        for tensor in drawn.parameters():
            tensor.mul_(4.0 if tensor.ndim == 2 else 1.0)  # away from the flat start
    return ReferenceModel(drawn, NoTokenizer(), batch_tokens=256)


@pytest.fixture(scope="module")
def game(model):
    """Return gradients of five rows, and their products with those of four units."""
    gradients = Gradients(model)
    players = gradients.compute(rows())
    return gradients, players, gradients.products(players, units())


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def expansion(seed=0, players=6, games=3):
    generator = np.random.default_rng(seed)
    half = generator.normal(size=(players, players, games))
    return Expansion(generator.normal(size=(players, games)), half + half.transpose(1, 0, 2))


def test_predicted_shapley_values_are_those_of_the_predicted_game():
    predicted = expansion()
    np.testing.assert_allclose(
        predicted.shapley(0.3), exact_shapley(lambda masks: predicted.utility(masks, 0.3), 6), atol=1e-12
    )
    first = Expansion(predicted.linear_PE)
    np.testing.assert_allclose(first.shapley(0.3), exact_shapley(lambda masks: first.utility(masks, 0.3), 6))


def test_a_predicted_utility_is_the_double_sum_over_its_players():
    predicted, mask = expansion(), np.array([1, 0, 1, 1, 0, 0], dtype=bool)
    chosen = np.flatnonzero(mask)
    expected = [
        0.3 * sum(predicted.linear_PE[i, e] for i in chosen)
        - 0.3**2 / 2 * sum(predicted.curvature_PPE[i, j, e] for i in chosen for j in chosen)
        for e in range(3)
    ]
    np.testing.assert_allclose(predicted.utility(mask[None], 0.3)[0], expected)


def test_products_and_curvature_are_those_of_autograd(model, game):
    gradients, players, linear_PE = game
    curvature_PPE = gradients.curvature(players, units())
    wide = ReferenceModel(copy.deepcopy(model.model).double(), NoTokenizer())
    rows_PD = torch.stack([flat(autograd(wide, row)) for row in rows()])
    named = dict(sorted(wide.model.named_parameters()))
    for e, unit in enumerate(units()):
        for parameter in named.values():
            parameter.requires_grad_(True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            ids = torch.from_numpy(unit.input_ids.astype(np.int64))[None]
            loss = objective(wide.model(input_ids=ids, use_cache=False).logits[0], unit)
            first = torch.autograd.grad(loss, list(named.values()), create_graph=True)
            gradient = torch.cat([part.flatten() for part in first])
            expected = torch.stack(
                [
                    rows_PD
                    @ torch.cat(
                        [
                            h.flatten()
                            for h in torch.autograd.grad(gradient @ row, list(named.values()), retain_graph=True)
                        ]
                    )
                    for row in rows_PD
                ]
            )
        np.testing.assert_allclose(linear_PE[:, e], rows_PD @ gradient.detach(), rtol=1e-3, atol=1e-6)
        error = np.abs(curvature_PPE[..., e] - expected.numpy()).max()
        assert error < 1e-3 * np.abs(expected.numpy()).max()


def step_utility(model, game, rate):
    gradients, players, _ = game
    named = [gradients.named([player[i] for player in players]) for i in range(5)]
    tokens = [UnitTokens(unit.input_ids, unit.first) for unit in units()]
    return StepUtility(RECIPE, dict(model.model.state_dict()), named, tokens, rate)


def test_a_realized_utility_equals_a_step_of_the_model(model, game):
    gradients, players, _ = game
    mask, rate = np.array([True, False, True, False, True]), 0.1
    result = step_utility(model, game, rate)(np.stack([mask, np.zeros(5, bool)]))
    state = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}

    def losses():
        with torch.no_grad():
            return np.array(
                [
                    float(objective(model.model(torch.from_numpy(unit.input_ids).long()[None]).logits[0], unit))
                    for unit in units()
                ]
            )

    before = losses()
    with torch.no_grad():
        for i in np.flatnonzero(mask):
            for name, gradient in gradients.named([player[i] for player in players]).items():
                model.model.get_parameter(name).sub_(rate * gradient)
    after = losses()
    model.model.load_state_dict(state)
    np.testing.assert_allclose(result[0], before - after, atol=3e-6)
    np.testing.assert_allclose(result[1], 0.0, atol=1e-6)


def test_the_second_order_is_closer_to_the_realized_utility(model, game):
    gradients, players, linear_PE = game
    curvature_PPE = gradients.curvature(players, units())
    masks, rate = np.random.default_rng(1).random((20, 5)) < 0.6, 0.03
    realized = step_utility(model, game, rate)(masks)
    errors = [
        np.abs(predictor.utility(masks, rate) - realized).max()
        for predictor in (Expansion(linear_PE), Expansion(linear_PE, curvature_PPE))
    ]
    assert errors[1] < 0.25 * errors[0]


def test_the_sketch_is_the_inner_product_of_sketched_gradients(game):
    gradients, players, _ = game
    of_units = gradients.compute(units())
    left, right = (torch.cat([block.flatten(1) for block in side], dim=1).numpy() for side in (players, of_units))
    dense = CountSketch.draw(left.shape[1], 64, 7, "one-step").matrix().toarray()
    np.testing.assert_allclose(
        sketched(players, of_units, 64, 7), (left @ dense) @ (right @ dense).T, rtol=1e-4, atol=1e-6
    )


def test_rank_correlation_equals_that_of_scipy():
    first, second = np.random.default_rng(0).integers(0, 9, size=(2, 30, 4)).astype(float)
    np.testing.assert_allclose(
        spearman_columns(first, second), [spearmanr(first[:, e], second[:, e])[0] for e in range(4)]
    )
    assert np.isnan(spearman_columns(np.ones((5, 1)), np.arange(5.0)[:, None])[0])


def corpus(path, n_rows):
    with path.open("w") as file:
        for i, text in enumerate(texts(n_rows)):
            file.write(json.dumps({"row_id": f"row-{i}", "text": text}) + "\n")
    return path


def small(tmp_path, **changed):
    settings = {
        "corpus": str(corpus(tmp_path / "rows.jsonl", 120)),
        "targets": (str(write_targets(tmp_path / "facts.jsonl")),),
        "documents": 120,
        "units": 2,
        "unit_tokens": 24,
        "steps": (0, 2),
        "seeds": 1,
        "batches": 2,
        "rates": (0.005, 0.05),
        "shapley_rates": (0.05,),
        "shapley_steps": (0,),
        "permutations": 3,
        "subsets": 6,
        "sketch": 64,
    }
    return Settings(**settings | changed)


def test_the_experiment_writes_table_and_figure_and_does_not_recompute(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from experiments.one_step.run import run  # noqa: PLC0415 - draws with an optional library

    out, settings = tmp_path / "result.json", small(tmp_path, steps=(2,), shapley_steps=(2,), batches=1)
    run(settings, out, tmp_path / "work", 0.005)
    first = out.read_bytes()
    result = json.loads(first)
    names = {line["predictor"] for line in result["subsets"]}
    assert {"taylor-1", "taylor-2", "sketch-1", "sketch-2", "grasp-pooled", "grasp-token"} <= names
    assert {(line["steps"], line["rate"]) for line in result["subsets"]} == {(2, 0.005), (2, 0.05)}
    assert {(line["steps"], line["rate"]) for line in result["shapley"]} == {(2, 0.05)}
    best = next(line for line in result["subsets"] if line["predictor"] == "taylor-2" and line["rate"] == 0.005)
    assert best["mean_loss"]["mean"] > 0.9
    assert result["settings"]["corpus"] == "rows.jsonl"
    assert out.with_suffix(".svg").stat().st_size > 1000
    monkeypatch.setattr(measuring, "predictors", None)
    monkeypatch.setattr(measuring, "StepUtility", None)
    run(settings, out, tmp_path / "work", 0.005)
    assert out.read_bytes() == first
