"""Every gradient method equals its formula on gradients by autograd, one example at a time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grasp.baselines.checkpoints import training_checkpoints
from grasp.baselines.gradients.curvature import (
    Basis,
    Fisher,
    apply_ekfac,
    apply_kfac,
    corrected_eigenvalues,
    second_moments,
)
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.scorers import examples_at, mean_row_tokens, open_engine, unit_examples
from grasp.baselines.gradients.whole import UnitGradients
from grasp.baselines.less import adam_update
from grasp.errors import ModelError, SettingsError
from grasp.methods.registry import score_rows
from grasp.models.gradients import Example, PerExample
from tests.baselines.gradient_world import autograd, objective, reference, rows, units
from tests.baselines.world import N_ROWS, N_UNITS, configured_method, scored
from tests.rounding import rounding

CLOSE = 2e-4  # float32 models: of the largest number


def account(world, place: Path, name: str, **settings):
    inputs = world.inputs()
    return score_rows(configured_method(name, **settings), inputs, place).account


@pytest.fixture(scope="module")
def gradients(world):
    """By autograd: of rows and units at every checkpoint, parameter by parameter; of the loss or the margin."""
    known = {}

    def of(checkpoint: int, output: str = "loss"):
        key = (checkpoint, output)
        if key not in known:
            inputs = world.inputs()
            model = training_checkpoints(inputs)[checkpoint].load(inputs)
            examples = examples_at(inputs, range(N_ROWS)) + unit_examples(inputs)
            result = [autograd(model, example, output) for example in examples]
            known[key] = {name: torch.stack([g[name].flatten() for g in result]).double().numpy() for name in result[0]}
        return known[key]

    return of


def concatenated(gradients: dict[str, np.ndarray], *parts: str) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate gradients of rows and units over the parameters with one of `parts` in their names."""
    wanted = [value for name, value in gradients.items() if any(part in name for part in parts)]
    both = np.concatenate(wanted, axis=1)
    return both[:N_ROWS], both[N_ROWS:]


def unit_length(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def assert_close(result: np.ndarray, expected: np.ndarray, tolerance: float = CLOSE) -> None:
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= tolerance * np.abs(expected).max()


def rates(world) -> np.ndarray:
    rate = np.array([factors_of_block.learning_rate for factors_of_block in training_checkpoints(world.inputs())])
    return rate / rate.sum()


# ---------------------------------------------------------------------------------------- tracin


@pytest.mark.parametrize("normalise", [True, False])
def test_tracin_without_projection_is_the_weighted_sum_over_checkpoints(normalise, world, tmp_path, gradients):
    expected = np.zeros((N_ROWS, N_UNITS))
    for c, weight in enumerate(rates(world)):
        row_NP, unit_EP = concatenated(gradients(c), "layers.1.", "model.norm")
        if normalise:
            row_NP, unit_EP = unit_length(row_NP), unit_length(unit_EP)
        expected += weight * row_NP @ unit_EP.T
    assert_close(scored(world, tmp_path, "tracin", dimension=None, normalise=normalise), expected)


@pytest.mark.parametrize("dense", [1 << 27, 0])
def test_projected_tracin_converges_to_the_exact_one_with_the_dimension(dense, world, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.baselines.gradients.projection.DENSE_ELEMENTS", dense)
    exact = scored(world, tmp_path, "tracin", dimension=None, checkpoints="last")
    far = [
        np.abs(scored(world, tmp_path, "tracin", dimension=width, checkpoints="last") - exact).mean()
        for width in (64, 2048)
    ]
    assert far[1] < 0.4 * far[0]
    assert far[1] < 0.05


@pytest.mark.parametrize(("part", "parts"), [("all", [""]), ("body", ["layers.", "norm"]), ("embedding", ["embed"])])
def test_tracin_of_the_last_checkpoint_is_the_cosine_of_the_selected_parameters(
    part, parts, world, tmp_path, gradients
):
    row_NP, unit_EP = concatenated(gradients(2), *parts)
    expected = unit_length(row_NP) @ unit_length(unit_EP).T
    settings = {"dimension": None, "checkpoints": "last"}
    assert_close(scored(world, tmp_path, "tracin", layers=part, **settings), expected)


@pytest.mark.parametrize("name", ["tracin", "datainf", "influence"])
def test_units_that_do_not_fit_in_memory_need_further_passes_with_the_same_result(name, world, tmp_path, monkeypatch):
    settings = {"tracin": {"dimension": None}}.get(name, {})
    expected = scored(world, tmp_path / "one", name, **settings)
    monkeypatch.setattr(f"grasp.baselines.{name}.unit_groups", lambda *_, **__: ([slice(0, 4), slice(4, 6)], True))
    message = account(world, tmp_path / "more", name, memory_mb=1, **settings).notes[0]
    assert message == "exact, not projected, in 2 passes over the rows per checkpoint"
    # inner products over matrices of 16 x 32, in other blocks
    assert_close(scored(world, tmp_path / "more", name, memory_mb=1, **settings), expected, rounding(16 * 32))


# ------------------------------------------------------------------------------------------------- trak


def trak_formula(rows: list[np.ndarray], units: list[np.ndarray], doubts: list[np.ndarray], ridge: float) -> np.ndarray:
    total = 0.0
    for row_NK, unit_EK in zip(rows, units, strict=True):
        gram = row_NK.T @ row_NK
        inverse = np.linalg.inv(gram + ridge * np.trace(gram) / len(gram) * np.eye(len(gram)))
        total = total + row_NK @ inverse @ unit_EK.T / len(rows)
    return total * np.mean(doubts, axis=0)[:, None]


def doubts(world, checkpoint: int) -> np.ndarray:
    """Return the mean of 1 - p over the labels of each row."""
    inputs = world.inputs()
    model = training_checkpoints(inputs)[checkpoint].load(inputs).model
    result = []
    for row in examples_at(inputs, range(N_ROWS)):
        ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
        p = torch.softmax(model(ids).logits[0, :-1].double(), dim=1).gather(1, ids[0, 1:, None])
        result.append(1.0 - float(p.mean()))
    return np.array(result)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_trak_equals_the_dense_formula_on_whole_gradients(ridge, world, tmp_path, gradients):
    parts = [concatenated(gradients(c, "margin"), "model.norm") for c in range(3)]
    expected = trak_formula(*zip(*parts, strict=True), [doubts(world, c) for c in range(3)], ridge)
    assert_close(scored(world, tmp_path, "trak", dimension=None, layers="final_norm", ridge=ridge), expected, 2e-3)


def projected(world, checkpoint, width, layers=("block:-1", "final_norm"), output="loss", *, per_block=False):
    """Project the gradients of rows and units, as methods with these settings do."""
    inputs = world.inputs()
    engine = open_engine(inputs, training_checkpoints(inputs)[checkpoint], layers)
    tokens = mean_row_tokens(inputs)
    featurizer = Featurizer.with_projection(engine, width, seed=0, tokens=tokens, per_block=per_block)
    both = examples_at(inputs, range(N_ROWS)), unit_examples(inputs)
    return [featurizer.features(examples, output)[0].astype(np.float64) for examples in both]


def test_trak_equals_the_dense_formula_on_projected_gradients(world, tmp_path):
    rows, units = zip(*(projected(world, c, 16, output="margin") for c in range(3)), strict=True)
    result = scored(world, tmp_path, "trak", dimension=16)
    assert_close(result, trak_formula(rows, units, [doubts(world, c) for c in range(3)], 0.0))
    assert account(world, tmp_path, "trak", dimension=16).features == 3 * 16


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, SettingsError, r"trak.dimension: got 128 for 40 rows"),
        ({"dimension": None, "layers": "all"}, SettingsError, r"14800 features per row, .* at most 8192"),
        ({"dimension": 20, "layers": "final_norm"}, ModelError, r"is singular: its eigenvalues .*trak.ridge"),
        ({"dimension": 20, "layers": "final_norm", "ridge": 1e-300}, ModelError, r"is singular: .*; set a larger"),
    ],
)
def test_trak_refuses_a_matrix_without_an_inverse(settings, error, message, world, tmp_path):
    with pytest.raises(error, match=message):
        scored(world, tmp_path, "trak", **settings)


# ------------------------------------------------------------------------------------------------- less


def test_less_uses_the_adam_update_of_the_row_and_the_gradient_of_the_unit(world, tmp_path, gradients):
    inputs = world.inputs()
    expected = np.zeros((N_ROWS, N_UNITS))
    for c, weight in enumerate(rates(world)):
        steps, units = [], []
        for name, (mean, square) in training_checkpoints(inputs)[c].moments().items():
            if "layers.1." in name or name == "model.norm.weight":
                g = gradients(c)[name]
                m = 0.9 * mean.double().flatten().numpy() + 0.1 * g[:N_ROWS]
                v = 0.99 * square.double().flatten().numpy() + 0.01 * g[:N_ROWS] ** 2
                steps.append(m / np.sqrt(v + 1e-8))
                units.append(g[N_ROWS:])
        expected += weight * unit_length(np.concatenate(steps, 1)) @ unit_length(np.concatenate(units, 1)).T
    assert_close(scored(world, tmp_path, "less", dimension=None), expected)
    notes = account(world, tmp_path, "less", dimension=None).notes
    assert any("Adam's update" in note for note in notes)


def test_less_without_moments_equals_tracin(world, tmp_path):
    assert np.array_equal(scored(world, tmp_path, "less", adam="never"), scored(world, tmp_path, "tracin"))


def test_the_adam_step_equals_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(0.8, 0.9), eps=0.0)
    for _ in range(5):
        weight.grad = torch.randn(3, 4, generator=generator)
        optimizer.step()
    state = {key: value.clone() for key, value in optimizer.state[weight].items()}
    before, gradient = weight.detach().clone(), torch.randn(3, 4, generator=generator)
    weight.grad = gradient
    optimizer.step()
    update = adam_update([state["exp_avg"]], [state["exp_avg_sq"]], (0.8, 0.9))(0, gradient[None])[0]
    corrected = update / (1 - 0.8**6) * (1 - 0.9**6) ** 0.5
    torch.testing.assert_close(before - weight.detach(), corrected, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------- datainf


def datainf_by_inversion(row_ND, unit_ED, fisher_MD, damping: float) -> np.ndarray:
    """Return the mean of explicit inverses of (lambda I + g g^T)."""
    size = row_ND.shape[1]
    level = damping * (fisher_MD**2).sum(axis=1).mean() / size
    inverse = sum(np.linalg.inv(level * np.eye(size) + np.outer(g, g)) for g in fisher_MD) / len(fisher_MD)
    return row_ND @ inverse @ unit_ED.T


def test_datainf_equals_the_mean_of_explicit_inverses_for_each_layer(world, tmp_path, gradients):
    expected = 0.0
    for part in ("layers.1.self_attn.q_proj", "model.norm"):
        row_ND, unit_ED = concatenated(gradients(2), part)
        expected = expected + datainf_by_inversion(row_ND, unit_ED, row_ND[:25], 0.3)
    result = scored(world, tmp_path, "datainf", layers="*layers.1*q_proj,final_norm", damping=0.3, prefix_rows=25)
    assert_close(result, expected, 1e-3)


def test_datainf_with_projections_equals_the_closed_form_on_them(world, tmp_path):
    layers = ("*layers.1*q_proj", "final_norm")
    result = scored(world, tmp_path, "datainf", dimension=8, layers=layers)
    row_LNK, unit_LEK = projected(world, -1, 8, layers, per_block=True)
    assert row_LNK.shape == (2, N_ROWS, 8)
    expected = 0.0
    for row_NK, unit_EK, size in zip(row_LNK, unit_LEK, (256, 16), strict=True):
        expected = expected + datainf_by_inversion(row_NK, unit_EK, row_NK, 0.1 * 8 / size)
    assert_close(result, expected, 1e-3)
    assert account(world, tmp_path, "datainf", dimension=8, layers=layers).features == 16


# --------------------------------------------------------------------------------------------- influence


@pytest.fixture(scope="module")
def opened(world):
    """Return an engine over an attention layer, a norm and the head, and rows of many lengths."""
    inputs = world.inputs()
    model = training_checkpoints(inputs)[-1].load(inputs)
    model.batch_tokens = 150
    engine = PerExample(model, choose_layers(model, ["*layers.1*v_proj", "model.embed_tokens", "final_norm"]))
    return engine, examples_at(inputs, range(12))


def label_gradients(engine, row: Example, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Of one row alone: inputs of a layer and gradients at its output, a label's loss each, summed by autograd."""
    module = engine.model.model.get_submodule(name)
    seen = {}

    def keep(_, args, out):
        seen["in"], seen["out"] = args[0].detach(), out.detach().requires_grad_()
        return seen["out"]

    handle = module.register_forward_hook(keep)
    logits = engine.model.model(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0]
    (back,) = torch.autograd.grad(objective(logits, row) * row.labels, seen["out"])
    handle.remove()
    before_the_last = slice(len(row.input_ids) - 1)
    return seen["in"][0, before_the_last].double().numpy(), back[0, before_the_last].double().numpy()


@pytest.mark.parametrize("labels", ["every token", "answers"])
def test_kfac_factors_equal_their_definition_as_means_over_positions(labels, opened):
    engine, examples = opened
    if labels == "answers":
        examples = [replace(row, first=len(row.input_ids) - 1 - i % 2) for i, row in enumerate(examples)]
    result = second_moments(engine, Fisher(examples, None), full_width=64)
    by_name = dict(zip([b.name for b in engine.layers.blocks], result, strict=True))
    pairs = [label_gradients(engine, row, "model.layers.1.self_attn.v_proj") for row in examples]
    received, back = (np.concatenate([pair[k] for pair in pairs]) for k in (0, 1))
    layer = by_name["model.layers.1.self_attn.v_proj"]
    assert_close(layer.right_YY.numpy(), received.T @ received / len(received))
    assert_close(layer.left.numpy(), back.T @ back / len(back))
    pairs = [label_gradients(engine, row, "model.embed_tokens") for row in examples]
    ids, back = (np.concatenate([pair[k] for pair in pairs]) for k in (0, 1))
    table = by_name["model.embed_tokens"]
    assert_close(table.left.numpy(), np.bincount(ids.astype(int), minlength=300) / len(ids))
    assert_close(table.right_YY.numpy(), back.T @ back / len(back))
    norm = np.stack([autograd(engine.model, row)["model.norm.weight"].numpy() for row in examples])
    labels = np.array([row.labels for row in examples])
    assert_close(by_name["model.norm"].right_YY.numpy(), (norm.T * labels) @ norm / len(examples))


def test_a_wide_output_has_the_diagonal_of_its_factor(opened):
    engine, examples = opened
    full = second_moments(engine, Fisher(examples, None), full_width=64)
    diagonal = second_moments(engine, Fisher(examples, None), full_width=4)
    number = [b.name for b in engine.layers.blocks].index("model.layers.1.self_attn.v_proj")
    assert_close(diagonal[number].left.numpy(), full[number].left.diagonal().numpy())


def test_ekfac_corrects_eigenvalues_by_second_moments_in_the_basis(opened):
    engine, examples = opened
    fisher = Fisher(examples, None)
    bases = [Basis.from_factors(factors_of_block) for factors_of_block in second_moments(engine, fisher, full_width=64)]
    result = corrected_eigenvalues(engine, fisher, bases)
    number = [b.name for b in engine.layers.blocks].index("model.layers.1.self_attn.v_proj")
    basis, expected = bases[number], 0.0
    for row in examples:
        gradient = autograd(engine.model, row)["model.layers.1.self_attn.v_proj.weight"].numpy()
        rotated = basis.left_XX.numpy().T @ gradient @ basis.right_YY.numpy()
        expected = expected + row.labels * rotated**2 / len(examples)
    assert_close(result[number].numpy(), expected)


def fisher_of(gradient_ND: np.ndarray) -> np.ndarray:
    return gradient_ND.T @ gradient_ND / len(gradient_ND)


def test_kfac_influence_equals_the_explicit_inverse_of_the_kronecker_product(world, tmp_path, gradients):
    inputs = world.inputs()
    model = training_checkpoints(inputs)[-1].load(inputs)
    engine = PerExample(model, choose_layers(model, ["*layers.1*v_proj"]))
    (factors,) = second_moments(engine, Fisher(examples_at(inputs, range(N_ROWS)), None), full_width=64)
    left, right = factors.left.double().numpy(), factors.right_YY.double().numpy()
    damped = [m + 0.2 * np.trace(m) / len(m) * np.eye(len(m)) for m in (left, right)]
    row_ND, unit_ED = concatenated(gradients(2), "layers.1.self_attn.v_proj")
    expected = row_ND @ np.linalg.inv(np.kron(*damped)) @ unit_ED.T
    result = scored(world, tmp_path, "influence", layers="*layers.1*v_proj", labels="true", damping=0.04)
    assert_close(result, expected, 1e-3)


def test_ekfac_influence_equals_the_explicit_inverse_in_its_basis(world, tmp_path, gradients):
    inputs = world.inputs()
    model = training_checkpoints(inputs)[-1].load(inputs)
    engine = PerExample(model, choose_layers(model, ["*layers.1*v_proj"]))
    fisher = Fisher(examples_at(inputs, range(N_ROWS)), None)
    (basis,) = [
        Basis.from_factors(factors_of_block) for factors_of_block in second_moments(engine, fisher, full_width=64)
    ]
    (value,) = corrected_eigenvalues(engine, fisher, [basis])
    vectors = np.kron(basis.left_XX.double().numpy(), basis.right_YY.double().numpy())
    spectrum = value.double().numpy().flatten()
    fisher_DD = vectors @ np.diag(spectrum + 0.1 * spectrum.mean()) @ vectors.T
    row_ND, unit_ED = concatenated(gradients(2), "layers.1.self_attn.v_proj")
    expected = row_ND @ np.linalg.inv(fisher_DD) @ unit_ED.T
    settings = {"layers": "*layers.1*v_proj", "labels": "true", "curvature": "ekfac"}
    assert_close(scored(world, tmp_path, "influence", **settings), expected, 1e-3)


def test_the_influence_of_a_norm_has_its_exact_fisher_matrix(world, tmp_path, gradients):
    row_ND, unit_ED = concatenated(gradients(2), "model.norm")
    labels = np.array([row.labels for row in examples_at(world.inputs(), range(N_ROWS))])
    fisher_DD = fisher_of(row_ND * np.sqrt(labels)[:, None])
    shift = 0.1 * np.trace(fisher_DD) / len(fisher_DD)
    expected = row_ND @ np.linalg.inv(fisher_DD + shift * np.eye(16)) @ unit_ED.T
    settings = {"layers": "final_norm", "labels": "true", "curvature": "ekfac"}
    # in its own eigenbasis the corrected eigenvalues are the exact ones
    assert_close(scored(world, tmp_path, "influence", **settings), expected, 5e-3)


# --------------------------------------------------------------------------------------------- bad input


def test_kfac_of_a_tied_head_is_refused_and_ekfac_is_not():
    model = reference("llama-tied")
    engine = PerExample(model, choose_layers(model, ["head"]))
    fisher = Fisher(rows(), None)
    factors = second_moments(engine, fisher, full_width=64)
    gradients = UnitGradients.collect(engine, units())
    with pytest.raises(SettingsError, match=r"model.embed_tokens is both .*ekfac"):
        apply_kfac(gradients, factors, 0.1)
    bases = [Basis.from_factors(factors_of_block) for factors_of_block in factors]
    before = gradients.matrices[0].clone()
    (value,) = corrected_eigenvalues(engine, fisher, bases)
    apply_ekfac(gradients, bases, [value], 0.1)
    vectors = bases[0].right_YY
    rotated = (before @ vectors) / (value + 0.1 * value.mean())
    torch.testing.assert_close(gradients.matrices[0], rotated @ vectors.T)
