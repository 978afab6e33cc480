"""The derivative of a training equals autograd of the unrolled training, and the differences of retrained models."""

import copy
import dataclasses

import numpy as np
import peft
import pytest
import torch
from scipy.stats import spearmanr

from grasp.errors import ModelError
from grasp.models.gradients import Example
from grasp.training.adamw import AdamWTraining
from grasp.training.adjoint import Adjoint, through_update
from grasp.training.hessian_products import ONE_SIDED_FRACTION, hessian_product
from grasp.training.metagradient import Metagradient, MetagradientSettings, metagradient, replay_trainings, utilities
from grasp.training.replay_checks import agreement, smoothness
from grasp.training.replayed_rows import replay_rows, standardize_scores
from grasp.training.row_derivatives import cheaper_method, row_derivatives
from grasp.training.row_order import batch_order
from grasp.training.train import start_training, train
from grasp.training.trajectory import Trajectory
from tests.faults import Killed, kill_at
from tests.mentions import assert_mentions
from tests.models.toy import RECIPE as SCRATCH
from tests.models.toy import InMemoryRows, corpus, units
from tests.training.unrolled import (
    RECIPE,
    a_batch,
    flat_losses,
    margin_targets,
    some_order,
    some_rows,
    some_targets,
    tiny_model,
    unrolled,
)

pytestmark = [  # what torch uses in forward differentiation, and peft in a model
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
EXACT = MetagradientSettings(relative_step=1e-7, root_share=0.0)  # in float64 its rounding error is below 1e-7


def trajectory(model, recipe=RECIPE, rows=None, **options):
    rows = some_rows() if rows is None else rows
    return Trajectory(AdamWTraining(copy.deepcopy(model), recipe), rows, some_order(recipe.steps), **options)


def product_at(training, ids_BL, weight_BL, direction):
    loss_B = training.backward(ids_BL, weight_BL)
    gradient = [value.clone() for value in training.gradients()]
    training.zero_gradients()
    relative_step = 1e-7 / ONE_SIDED_FRACTION
    return hessian_product(training, ids_BL, weight_BL, direction, gradient, loss_B, relative_step)


def replayed(model, settings=EXACT, recipe=RECIPE, rows=None, targets=None, **options):
    training = trajectory(model, recipe, rows, **options)
    training.train()
    return metagradient(training, targets or some_targets(), settings)


def with_adapter(model):
    torch.manual_seed(7)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, settings).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return adapted.get_base_model()


RECIPES = {
    "plain": {},
    "weight decay": {"weight_decay": 0.3},
    "clipping": {"clip_norm": 0.5},
    "clipping that has no effect": {"clip_norm": 1e3},
    "warm-up from zero": {"warmup_from_zero": True, "schedule": "cosine"},
    "constant rate, other moments": {"schedule": "constant", "betas": (0.7, 0.9), "epsilon": 1e-3},
    "accumulation": {"micro_rows": 2, "clip_norm": 0.5},
}


@pytest.mark.parametrize("changed", RECIPES.values(), ids=RECIPES)
def test_derivatives_equal_those_of_the_unrolled_training(changed):
    recipe = RECIPE.model_copy(update=changed)
    model, rows = tiny_model(), some_rows()
    settings = EXACT.model_copy(update={"probe_steps": (1, 4), "batch_tokens": 20})
    result = replayed(model, settings, recipe, rows)
    drawn_KBT, extra_T, utility_T = unrolled(model, recipe, rows, some_order(), some_targets(), extra=(1, 6))
    scale = np.abs(drawn_KBT).max()
    np.testing.assert_allclose(result.utility_T, utility_T, rtol=1e-9)
    np.testing.assert_allclose(result.drawn_KBT, drawn_KBT, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(result.probe_MNT[0, 6], extra_T, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (lambda: tiny_model(tied=True), some_rows()),
        (tiny_model, some_rows(completion_only=True)),
        (lambda: with_adapter(tiny_model()), some_rows(completion_only=True)),
    ],
    ids=["tied", "completion only", "adapter"],
)
def test_derivatives_of_tied_weights_loss_masks_and_adapters_equal_autograd(model, rows):
    model = model()
    settings = EXACT.model_copy(update={"probe_steps": (2,)})
    recipe = RECIPE.model_copy(update={"clip_norm": 0.5, "weight_decay": 0.1})
    result = replayed(model, settings, recipe, rows)
    drawn_KBT, extra_T, _ = unrolled(model, recipe, rows, some_order(), some_targets(), extra=(2, 3))
    scale = np.abs(drawn_KBT).max()
    np.testing.assert_allclose(result.drawn_KBT, drawn_KBT, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(result.probe_MNT[0, 3], extra_T, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("weight_N", "targets"),
    [(np.ones(8), some_targets()), (np.linspace(0.5, 2.0, 8), some_targets()), (np.ones(8), margin_targets())],
    ids=["plain", "weighted", "margins"],
)
def test_retraining_with_a_changed_row_weight_changes_the_utility_by_the_derivative(weight_N, targets):
    whole = trajectory(tiny_model(), RECIPE.model_copy(update={"clip_norm": 0.5}), weight_N=weight_N)
    whole.train()
    derivative_NT, change = metagradient(whole, targets, EXACT).drawn(8), 2e-7
    for row in range(8):
        moved = []
        for sign in (1, -1):
            whole.retrain(weight_N + sign * change * (np.arange(8) == row))
            moved.append(utilities(whole.training, targets))
        measured_T = (moved[0] - moved[1]) / (2 * change)
        np.testing.assert_allclose(derivative_NT[row], measured_T, rtol=0, atol=1e-6 * np.abs(derivative_NT).max())


def test_a_head_that_runs_on_few_positions_has_the_gradient_of_autograd(monkeypatch):
    training = AdamWTraining(tiny_model(tied=True), RECIPE)
    ids_BL, weight_BL = a_batch()
    logits_PV, labels = training.label_logits(ids_BL, weight_BL)
    expected_B = labels.row_losses(logits_PV)
    expected = torch.autograd.grad(expected_B.sum(), training.parameters)
    monkeypatch.setattr("grasp.training.adamw.CHUNK_POSITIONS", 3)
    loss_B = training.backward(ids_BL, weight_BL)
    np.testing.assert_allclose(loss_B, expected_B.detach(), rtol=1e-12)
    for gradient, wanted in zip(training.gradients(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)


# ------------------------------------------------------------------------------------------------------- curvature


@pytest.mark.parametrize("micro_rows", [None, 2])
def test_products_equal_those_with_dense_matrices(micro_rows):
    training = AdamWTraining(tiny_model(tied=True), RECIPE.model_copy(update={"micro_rows": micro_rows}))
    ids_BL, weight_BL = a_batch()
    losses = flat_losses(training, ids_BL, weight_BL)
    flat_P = torch.cat([parameter.detach().flatten() for parameter in training.parameters])
    dense = torch.autograd.functional.hessian(lambda flat: losses(flat).sum(), flat_P, vectorize=True)
    rows = torch.autograd.functional.jacobian(losses, flat_P, vectorize=True)
    torch.manual_seed(0)
    direction = [torch.randn_like(parameter) for parameter in training.parameters]
    before = [parameter.detach().clone() for parameter in training.parameters]
    product, along_B = product_at(training, ids_BL, weight_BL, direction)
    flat_u = torch.cat([tensor.flatten() for tensor in direction])
    expected = dense @ flat_u
    flat_product = torch.cat([tensor.flatten() for tensor in product])
    torch.testing.assert_close(flat_product, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    np.testing.assert_allclose(along_B, (rows @ flat_u).detach(), rtol=1e-5)
    assert all(
        torch.equal(original, parameter) for original, parameter in zip(before, training.parameters, strict=True)
    )
    assert not any(gradient.any() for gradient in training.gradients())


def test_a_direction_of_zero_gives_zero():
    training = AdamWTraining(tiny_model(), RECIPE)
    zero = [torch.zeros_like(parameter) for parameter in training.parameters]
    product, along_B = hessian_product(training, *a_batch(), zero, zero, np.zeros(3))
    assert not any(tensor.any() for tensor in product)
    np.testing.assert_array_equal(along_B, np.zeros(3))


@pytest.mark.parametrize("method", ["difference", "gradient"])
@pytest.mark.parametrize("tied", [False, True])
def test_derivatives_of_tokens_sum_to_those_of_rows(method, tied):
    training = AdamWTraining(tiny_model(tied=tied), RECIPE)
    ids_BL, weight_BL = a_batch()
    torch.manual_seed(0)
    directions = [[torch.randn_like(parameter) for parameter in training.parameters] for _ in range(3)]
    rows = [Example(ids[: 1 + weight.nonzero()[0].max() + 1]) for ids, weight in zip(ids_BL, weight_BL, strict=True)]
    tokens = [
        Example(row.input_ids, loss_mask=np.arange(len(row.input_ids)) == t)
        for row in rows
        for t in range(1, len(row.input_ids))
    ]
    options = {"method": method, "relative_step": 1e-5, "batch_tokens": 12}
    along_NT = row_derivatives(training, rows, list(directions), **options)
    along_tokens = row_derivatives(training, tokens, list(directions), **options)
    of_row = np.repeat(np.arange(len(rows)), [len(row.input_ids) - 1 for row in rows])
    for n in range(len(rows)):
        np.testing.assert_allclose(along_tokens[of_row == n].sum(axis=0), along_NT[n], atol=1e-7)
    labels = (weight_BL != 0).sum()
    for t, direction in enumerate(directions):
        _, along_B = product_at(training, ids_BL, weight_BL, direction)
        np.testing.assert_allclose(along_NT[:, t] / labels, along_B, rtol=1e-5, atol=1e-7)
    assert all(parameter.requires_grad for parameter in training.parameters)


def test_padding_has_no_derivative():
    training = AdamWTraining(tiny_model(), RECIPE)
    ids_BL, weight_BL = a_batch()
    torch.manual_seed(0)
    direction = [torch.randn_like(parameter) for parameter in training.parameters]
    wider = np.pad(ids_BL, ((0, 0), (0, 4)), constant_values=5), np.pad(weight_BL, ((0, 0), (0, 4)))
    product, padded_B = product_at(training, *wider, direction)
    plain, plain_B = product_at(training, ids_BL, weight_BL, direction)
    np.testing.assert_allclose(padded_B, plain_B, rtol=1e-8)
    for padded, unpadded in zip(product, plain, strict=True):
        torch.testing.assert_close(padded, unpadded, rtol=0, atol=1e-8 * float(unpadded.abs().max()))


# --------------------------------------------------------------------------------------------------- one step


def test_derivatives_through_the_root_equal_autograd():
    generator = torch.Generator().manual_seed(0)
    recipe = RECIPE.model_copy(update={"clip_norm": 0.7, "weight_decay": 0.2})
    theta, m, v, g, a, am, av = torch.randn(7, 20, dtype=torch.float64, generator=generator)
    v = v.square()
    g = g.requires_grad_()
    m, v = m.requires_grad_(), v.requires_grad_()
    clipped = g * torch.clamp(0.7 / (g.norm() + 1e-6), max=1.0)
    b1, b2 = recipe.betas
    m1, v1 = b1 * m + (1 - b1) * clipped, b2 * v + (1 - b2) * clipped**2
    rate = recipe.learning_rate_at(3)
    r = (v1 / (1 - b2**4) + 1e-3).sqrt()
    after = (1 - rate * 0.2) * theta - rate * m1 / (1 - b1**4) / (r + recipe.epsilon)
    expected = torch.autograd.grad((a * after + am * m1 + av * v1).sum(), [g, m, v])
    adjoint = Adjoint([a.clone()], [am.clone()], [av.clone()])
    (u,) = through_update(adjoint, [g.detach()], [m1.detach()], [v1.detach()], recipe=recipe, step=3, root=1e-3)
    for derivative, reference in zip((u, adjoint.first[0], adjoint.second[0]), expected, strict=True):
        torch.testing.assert_close(derivative, reference, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------ laws of a replay


def test_results_of_a_target_do_not_depend_on_other_targets_of_the_replay():
    model, settings = tiny_model(), MetagradientSettings(probe_steps=(3,), relative_step=1e-5)
    together = replayed(model, settings)
    for t, target in enumerate(some_targets()):
        single = replayed(model, settings, targets=[target])
        np.testing.assert_array_equal(single.drawn_KBT[..., 0], together.drawn_KBT[..., t])
        # one is differentiated by differences, several by gradients of rows
        np.testing.assert_allclose(single.probe_MNT[..., 0], together.probe_MNT[..., t], atol=1e-8)


def test_a_short_batch_ends_an_epoch():
    order = [index_B[: 2 + step % 2] for step, index_B in enumerate(some_order())]
    model, rows = tiny_model(), some_rows()
    whole = Trajectory(AdamWTraining(copy.deepcopy(model), RECIPE), rows, order)
    whole.train()
    result = metagradient(whole, some_targets(), MetagradientSettings(relative_step=1e-5, root_share=0.0))
    short = np.isnan(result.drawn_KBT[..., 0])
    assert short.tolist() == (result.order_KB < 0).tolist() == [[False, False, step % 2 == 0] for step in range(5)]
    whole.retrain(np.where(np.arange(8) == order[1][2], 1 + 1e-6, 1.0))
    moved_T = utilities(whole.training, some_targets()) - result.utility_T
    np.testing.assert_allclose(result.drawn(8)[order[1][2]], moved_T / 1e-6, rtol=1e-3)


def test_micro_batches_equal_one_batch():
    model = tiny_model()
    settings = MetagradientSettings(relative_step=1e-5)
    whole = replayed(model, settings)
    pieces = replayed(model, settings, RECIPE.model_copy(update={"micro_rows": 1}))
    np.testing.assert_allclose(pieces.drawn_KBT, whole.drawn_KBT, atol=1e-9 * np.abs(whole.drawn_KBT).max())


def test_a_probe_of_a_drawn_row_equals_its_derivative_at_that_step():
    result = replayed(tiny_model(), EXACT.model_copy(update={"probe_steps": (2,)}))
    np.testing.assert_allclose(
        result.probe_MNT[0, result.order_KB[2]], result.drawn_KBT[2], atol=1e-6 * np.abs(result.drawn_KBT).max()
    )


def test_a_probe_of_a_batch_without_labels_is_finite():
    """As in `token_batches`: at least one label counts."""
    tokens = some_rows(4)
    rows = InMemoryRows.from_rows(
        [tokens.rows(np.array([i])).flat_ids for i in range(4)],
        [np.full(len(tokens.rows(np.array([i])).flat_ids), i > 0) for i in range(4)],
    )
    order = [np.array([1]), np.array([0]), np.array([2])]
    training = Trajectory(AdamWTraining(tiny_model(), RECIPE.model_copy(update={"steps": 3})), rows, order)
    training.train()
    replay = metagradient(training, some_targets(), EXACT.model_copy(update={"probe_steps": (1,)}))
    assert np.isfinite(replay.probed()).all()
    assert replay.probe_MNT[0, 1:].all()


def test_early_steps_can_be_skipped():
    whole = replayed(tiny_model())
    late = replayed(tiny_model(), EXACT.model_copy(update={"first_step": 3}))
    np.testing.assert_array_equal(late.drawn_KBT[3:], whole.drawn_KBT[3:])
    assert np.isnan(late.drawn_KBT[:3]).all()
    np.testing.assert_array_equal(late.drawn(8), whole.drawn(8, first=3))
    np.testing.assert_allclose(whole.drawn(8, last=3) + whole.drawn(8, first=3), whole.drawn(8), atol=1e-12)


def test_probes_have_equal_weight_independently_of_their_scale():
    value_MNT = np.random.default_rng(0).standard_normal((3, 9, 2))
    empty = np.zeros((0, 0, 2))
    rest = [np.zeros(0, np.int64), empty, np.array([4, 7, 9])]
    tail = [np.zeros(2), np.zeros((0, 2))]
    plain = Metagradient(*rest, value_MNT, *tail)
    scaled = Metagradient(*rest, value_MNT * [[[1.0]], [[50.0]], [[1e-3]]] + 5.0, *tail)
    np.testing.assert_allclose(scaled.probed(), plain.probed(), atol=1e-9)
    assert spearmanr(plain.probed([7])[:, 0], value_MNT[1, :, 0]).statistic == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------------------- kept and resumed


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30], ids=["disk", "memory"])
@pytest.mark.parametrize("killed_at", [1, 3, 4])
def test_a_killed_replay_resumes_to_the_same_bytes(tmp_path, killed_at, memory_bytes):
    model, settings = tiny_model(), MetagradientSettings(probe_steps=(1, 3))
    options = {"directory": tmp_path / "run", "memory_bytes": memory_bytes}
    with pytest.raises(Killed):
        trajectory(model, **options).train(kill_at(killed_at))
    training = trajectory(model, **options)
    losses = training.train()
    with pytest.raises(Killed):
        metagradient(training, some_targets(), settings, kill_at(killed_at))
    steps = []
    resumed = trajectory(model, **options)
    np.testing.assert_array_equal(resumed.train(), losses)
    result = metagradient(resumed, some_targets(), settings, steps.append)
    assert steps[0] == {1: 2, 3: 4, 4: 4}[killed_at]
    plain = replayed(model, settings)
    result.save(tmp_path / "resumed.safetensors")
    plain.save(tmp_path / "plain.safetensors")
    assert (tmp_path / "resumed.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    loaded = Metagradient.load(tmp_path / "resumed.safetensors")
    np.testing.assert_array_equal(loaded.drawn_KBT, plain.drawn_KBT)
    steps.clear()
    metagradient(trajectory(model, **options), some_targets(), settings, steps.append)
    assert not steps  # no step is computed a second time


def test_states_of_another_training_are_refused_and_other_targets_start_over(tmp_path):
    model = tiny_model()
    training = trajectory(model, directory=tmp_path)
    training.train()
    first = metagradient(training, some_targets(), EXACT)
    other = metagradient(training, some_targets()[::-1], EXACT)
    np.testing.assert_array_equal(other.drawn_KBT, first.drawn_KBT[..., ::-1])
    with pytest.raises(ModelError, match=r"learning_rate: was 0\.03, now 0\.01"):
        trajectory(model, RECIPE.model_copy(update={"learning_rate": 1e-2}), directory=tmp_path)


def test_a_trajectory_from_scratch_equals_a_retrain_bit_for_bit():
    rows = corpus()
    trained = train(SCRATCH, rows, seed=5)
    order = batch_order(np.ones(40), seed=5, batch_rows=SCRATCH.batch_rows, first_step=0, last_step=SCRATCH.steps)
    training = start_training(SCRATCH, 5)
    whole = Trajectory(training, rows, list(order))
    whole.train()
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, trained.model.state_dict()[name]), name


def test_derivatives_in_float32_equal_those_in_float64():
    rows = corpus()
    settings = MetagradientSettings(probe_steps=(6,))
    order = list(batch_order(np.ones(40), seed=5, batch_rows=6, first_step=0, last_step=12))
    targets = [type(some_targets()[0])("all", units())]
    recipe = SCRATCH.model_copy(update={"micro_rows": 4})
    training = start_training(recipe, 5)
    slow = copy.deepcopy(training.model).double()
    results = []
    for trainer in (training, AdamWTraining(slow, recipe)):
        whole = Trajectory(trainer, rows, order)
        whole.train()
        results.append(metagradient(whole, targets, settings))
    single, exact = results
    scale = np.abs(exact.drawn_KBT).max()
    # float32 and its differences against float64: the error documented at RELATIVE_STEP, over twelve steps
    np.testing.assert_allclose(single.drawn_KBT, exact.drawn_KBT, rtol=0, atol=1e-2 * scale)
    np.testing.assert_allclose(single.probe_MNT, exact.probe_MNT, rtol=0, atol=1e-2 * scale)


# ------------------------------------------------------------------------------------------------------------- guards


def test_what_cannot_be_differentiated_is_refused():
    with pytest.raises(ModelError, match="has weights in bfloat16"):
        AdamWTraining(tiny_model().bfloat16(), RECIPE)
    with pytest.raises(ModelError, match="requires a gradient"):
        AdamWTraining(tiny_model().requires_grad_(False), RECIPE)
    compiled = tiny_model()
    compiled._compiled_call_impl = compiled._call_impl
    with pytest.raises(ModelError, match="is compiled"):
        AdamWTraining(compiled, RECIPE)
    normed = tiny_model()
    normed.transformer.ln_f = torch.nn.BatchNorm1d(8).double()
    with pytest.raises(ModelError, match="has BatchNorm1d"):
        AdamWTraining(normed, RECIPE)


def test_dropout_is_disabled_with_a_note():
    model = tiny_model()
    model.transformer.h[0].attn.attn_dropout.p = 0.5
    (note,) = AdamWTraining(model.train(), RECIPE).notes
    assert note.startswith("dropout is disabled")
    assert not model.training
    np.testing.assert_array_equal(replayed(model).drawn_KBT, replayed(tiny_model()).drawn_KBT)


def test_the_auxiliary_loss_of_routers_is_left_out_with_a_note():
    model = tiny_model()
    model.config.output_router_logits = True
    assert_mentions(AdamWTraining(model, RECIPE).notes, "auxiliary loss")


def test_a_forward_pass_that_is_not_deterministic_is_refused():
    model = tiny_model()
    model.transformer.ln_f.register_forward_hook(lambda _, args, out: out * (1 + torch.rand(())))
    training = Trajectory(AdamWTraining(model, RECIPE), some_rows(), some_order())
    training.train()
    with pytest.raises(ModelError, match="computed again"):
        metagradient(training, some_targets(), MetagradientSettings())


def test_the_cost_of_a_replay_is_forecast():
    training = trajectory(tiny_model())
    settings = MetagradientSettings(probe_steps=(1, 2, 3))
    forecast = replay_trainings(training.order, training.rows.n_rows, 2, settings)
    assert forecast == pytest.approx(1 + 1 + 2 + 3 * 8 / 15)
    assert cheaper_method(1) == ("difference", pytest.approx(2 / 3))
    assert cheaper_method(2)[0] == "gradient"


# --------------------------------------------------------------------------------------------------------------- gate


def made_up(norm_K, drawn_KBT, probe_MNT=None):
    """Return a result with the given derivatives and two rows per step."""
    steps, _, n_targets = drawn_KBT.shape
    return Metagradient(
        np.arange(2 * steps).reshape(steps, 2),
        drawn_KBT,
        np.zeros(0 if probe_MNT is None else len(probe_MNT), np.int64),
        np.zeros((0, 0, n_targets)) if probe_MNT is None else probe_MNT,
        np.zeros(n_targets),
        np.repeat(norm_K[:, None], n_targets, axis=1),
    )


def test_steps_before_derivatives_explode_are_not_counted():
    drawn_KBT = np.random.default_rng(0).standard_normal((24, 2, 2))
    level = smoothness(made_up(np.ones(24), drawn_KBT))
    assert level.is_smooth
    assert level.first_step == 0
    assert str(level).endswith(": smooth")
    norm_K = np.where(np.arange(24) < 7, 50.0, 1.0)
    exploded = smoothness(made_up(norm_K, drawn_KBT))
    assert not exploded.is_smooth
    assert exploded.first_step == 7
    assert str(exploded).endswith(": steps before 7 are left out")
    wild = smoothness(made_up(np.ones(24), drawn_KBT * np.where(np.arange(24) < 8, 30.0, 1.0)[:, None, None]))
    assert wild.first_step == 8
    rate_K = np.geomspace(30.0, 1.0, 24)  # derivatives are proportional to the learning rate, which is no growth
    assert not smoothness(made_up(np.ones(24), drawn_KBT * rate_K[:, None, None])).is_smooth
    assert smoothness(made_up(np.ones(24), drawn_KBT * rate_K[:, None, None]), rate_K=rate_K).is_smooth
    late = made_up(
        np.where(np.arange(24) < 8, np.nan, 1.0), np.where(np.arange(24)[:, None, None] < 8, np.nan, drawn_KBT)
    )
    assert smoothness(late).is_smooth


def test_agreement_of_orders_is_measured_on_their_common_rows():
    rng = np.random.default_rng(0)
    first = made_up(np.ones(10), rng.standard_normal((10, 2, 2)))
    assert agreement(first, first, 20) == pytest.approx([1.0, 1.0])
    opposite = made_up(np.ones(10), -first.drawn_KBT)
    assert agreement(first, opposite, 20) == pytest.approx([-1.0, -1.0])
    probed = made_up(np.ones(10), first.drawn_KBT, rng.standard_normal((1, 20, 2)))
    assert agreement(probed, probed, 20) == pytest.approx([1.0, 1.0])
    apart = made_up(np.ones(1), first.drawn_KBT[:1])
    with pytest.raises(ModelError, match=r"2 rows .*expected at least 3"):
        agreement(first, apart, 20)


def test_small_changes_of_group_weights_change_utilities_as_predicted():
    whole = trajectory(tiny_model())
    whole.train()
    result = metagradient(whole, some_targets(), EXACT)
    derivative_NT = result.drawn(whole.rows.n_rows)
    for sign_G in np.array([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, 1.0]]):
        change_N = 1e-5 * sign_G[np.arange(8) % 4]
        whole.retrain(whole.weight_N + change_N)
        measured_T = utilities(whole.training, some_targets()) - result.utility_T
        np.testing.assert_allclose(measured_T, change_N @ derivative_NT, rtol=1e-3)


def replay(start, place, orders=2):
    place.mkdir()
    return replay_rows(start, some_targets(), MetagradientSettings(probe_steps=(1, 3)), orders, place)


def in_order(recipe=RECIPE):
    """Return a function that starts trajectories of one model with several orders of rows."""

    def start(w):
        order = list(np.random.default_rng(w).integers(7, size=(recipe.steps, 3)))
        return Trajectory(AdamWTraining(tiny_model(), recipe), some_rows(), order)

    return start


def test_orders_are_averaged_and_probes_score_rows_if_there_are_any(monkeypatch, tmp_path):
    monkeypatch.setattr("grasp.training.replayed_rows.smoothness", lambda replay, **how: smoothness(replay, 1e9, **how))
    scores = replay(in_order(), tmp_path / "both")
    first, second = (replay(lambda w, k=k: in_order()(k), tmp_path / f"{k}", orders=1) for k in range(2))
    np.testing.assert_allclose(scores.all_NT, (first.all_NT + second.all_NT) / 2)
    assert np.isnan(scores.drawn_NT[7]).all()
    np.testing.assert_allclose(scores.relevance(), standardize_scores(scores.all_NT))
    drawn_NT = dataclasses.replace(scores, all_NT=None).relevance()
    np.testing.assert_allclose(drawn_NT[:7], standardize_scores(scores.drawn_NT)[:7])
    np.testing.assert_array_equal(drawn_NT[7], 0.0)
    assert len(scores.smooth) == 2
    assert scores.agreements[0].shape == (2,)


def test_a_training_that_is_not_smooth_has_no_scores(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "grasp.training.replayed_rows.smoothness", lambda replay, **how: smoothness(replay, 1e-9, **how)
    )
    scores = replay(in_order(), tmp_path / "one", orders=1)
    assert scores.relevance() is None
    assert_mentions(scores.notes[-1], "no replay is smooth", "lower learning rate")
    assert len(scores.notes) == 2  # the order, and advice
