"""Values of one training step against explicit gradients, exact Hessians, enumeration of the game and real steps."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.one_step.shapley import exact_shapley
from grasp.baselines.replay import Replay
from tests.baselines.gradient_world import autograd, objective, reference, rows, units
from tests.models.families import EVERY_FAMILY
from tests.rounding import rounding

RATE = 0.02
# Hugging Face computes the norms of some families in float32 always: five of them, over 32 numbers each.
CLOSE = rounding(5 * 32)
MEAN = np.full((1, 4), 0.25)
TWO = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75]])


def close(result, expected, tolerance=CLOSE):
    """Compare with a tolerance relative to the largest entry."""
    assert np.abs(np.asarray(result) - np.asarray(expected)).max() <= tolerance * np.abs(np.asarray(expected)).max()


def of_differences(gradient, product):
    """What second-order values may be off by: H d comes from differences, and is within 2e-4 of the exact product."""
    return 2e-4 * RATE**2 / 2 * float(gradient.norm(dim=-1).max() * product.norm())


def replayed(family="llama", weight=MEAN, dtype=torch.float64, **changed):
    settings = {"layers": ("all",), "order": 1, "learning_rate": RATE, "weight_decay": 0.01} | changed
    return Replay(reference(family, dtype), units(), weight, **settings)


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


class Slow:
    """The same quantities by autograd of whole models in float64, one example at a time."""

    def __init__(self, family):
        self.model = reference(family)
        self.batch = rows()
        self.share = np.array([row.labels for row in self.batch]) / sum(row.labels for row in self.batch)

    def row_gradients(self):
        return torch.stack([c * flat(autograd(self.model, row)) for c, row in zip(self.share, self.batch, strict=True)])

    def loss(self, weight_E):
        return sum(w * objective(self.logits(unit), unit) for w, unit in zip(weight_E, units(), strict=True) if w)

    def logits(self, example):
        ids = torch.from_numpy(example.input_ids.astype(np.int64))[None]
        return self.model.model(input_ids=ids, use_cache=False).logits[0]

    def gradient_and_hessian_product(self, weight_E, direction):
        """Return gradient and exact Hessian product by differentiating the gradient."""
        named = dict(sorted(self.model.model.named_parameters()))
        for parameter in named.values():
            parameter.requires_grad_(True)
        with sdpa_kernel(SDPBackend.MATH):
            loss = self.loss(weight_E)
            first = torch.autograd.grad(loss, list(named.values()), create_graph=True, materialize_grads=True)
            gradient = torch.cat([tensor.flatten() for tensor in first])
            product = torch.autograd.grad(gradient @ direction, list(named.values()), materialize_grads=True)
        for parameter in named.values():
            parameter.requires_grad_(False)
        return gradient.detach(), torch.cat([tensor.flatten() for tensor in product])

    def loss_at(self, weight_E, step):
        """Return the validation loss after a change of the weights by `step`."""
        moved = copy.deepcopy(self.model.model)
        begin = 0
        with torch.no_grad():
            for _, parameter in sorted(moved.named_parameters()):
                parameter.add_(step[begin : begin + parameter.numel()].view(parameter.shape))
                begin += parameter.numel()
            original, self.model.model = self.model.model, moved
            loss = float(self.loss(weight_E))
            self.model.model = original
        return loss


@EVERY_FAMILY
def test_first_order_equals_the_explicit_inner_product(family):
    slow = Slow(family)
    gradient = slow.row_gradients()
    expected = []
    for weight_E in TWO:
        validation, _ = slow.gradient_and_hessian_product(weight_E, torch.zeros(gradient.shape[1], dtype=torch.float64))
        expected.append((RATE * gradient @ validation).numpy())
    close(replayed(family, TWO).advance(rows()), np.stack(expected, axis=1))


@pytest.mark.parametrize("family", ["llama-tied", "gpt2-tied", "gemma2-soft-cap", "phi-head-bias"])
def test_second_order_equals_that_of_the_exact_hessian(family):
    slow = Slow(family)
    gradient = slow.row_gradients()
    expected, allowed = [], []
    for weight_E in TWO:
        validation, product = slow.gradient_and_hessian_product(weight_E, gradient.sum(dim=0))
        expected.append((RATE * gradient @ validation - RATE**2 / 2 * gradient @ product).numpy())
        allowed.append(of_differences(gradient, product))
    first = replayed(family, TWO).advance(rows())
    second = replayed(family, TWO, order=2).advance(rows())
    correction = np.stack(expected, axis=1) - first
    assert (np.abs(second - first - correction).max(axis=0) <= allowed).all()
    assert (np.abs(correction).max(axis=0) > 100 * np.array(allowed)).all()


def test_both_orders_equal_the_shapley_values_of_the_taylor_game():
    slow = Slow("llama")
    gradient = slow.row_gradients()
    result = [slow.gradient_and_hessian_product(MEAN[0], direction) for direction in gradient]
    linear = RATE * (gradient @ result[0][0]).numpy()
    curvature = RATE**2 * (gradient @ torch.stack([product for _, product in result]).T).numpy()

    def utility(masks):
        first = masks @ linear
        return np.stack([first, first - np.einsum("bi,ij,bj->b", masks, curvature, masks) / 2], axis=1)

    expected = exact_shapley(utility, 5)
    close(replayed(order=1).advance(rows())[:, 0], expected[:, 0])
    allowed = of_differences(gradient, torch.stack([product for _, product in result]).sum(dim=0))
    np.testing.assert_allclose(replayed(order=2).advance(rows())[:, 0], expected[:, 1], rtol=0, atol=allowed)


def test_values_of_a_batch_sum_to_the_change_of_the_loss_more_nearly_in_second_order():
    slow, rate = Slow("llama"), 0.004
    step = -rate * slow.row_gradients().sum(dim=0)
    change = slow.loss_at(MEAN[0], torch.zeros_like(step)) - slow.loss_at(MEAN[0], step)
    validation, _ = slow.gradient_and_hessian_product(MEAN[0], step)
    first, second = (replayed(order=order, learning_rate=rate).advance(rows()).sum() for order in (1, 2))
    assert first == pytest.approx(float(-validation @ step), rel=1e-9)
    assert abs(second - change) < 0.1 * abs(first - change)


@pytest.mark.parametrize("order", [1, 2])
def test_values_are_linear_in_the_weights_of_units(order):
    by_unit, together = replayed(weight=np.eye(4), order=order), replayed(weight=TWO, order=order)
    for _ in range(2):
        np.testing.assert_allclose(by_unit.advance(rows()) @ TWO.T, together.advance(rows()), rtol=1e-6, atol=1e-12)


def test_a_row_with_the_text_of_a_unit_is_worth_most_to_it():
    labels_B = np.array([unit.labels for unit in units()])
    value_BE = replayed(weight=np.eye(4)).advance(units()) / labels_B[:, None]
    np.testing.assert_array_equal(value_BE.argmax(axis=0), range(4))


def test_a_row_belongs_to_the_game_of_its_own_batch():
    """In second order a row's value depends on who else is in the batch, in first order on its share alone."""
    some, others = [rows()[0], *rows(3, seed=5)], [rows()[0], *rows(3, seed=6)]
    for order, depends in ((1, False), (2, True)):
        values = [
            replayed(order=order).advance(batch)[0, 0] * sum(row.labels for row in batch) for batch in (some, others)
        ]
        assert (abs(values[0] / values[1] - 1) > 1e-6) == depends


@pytest.mark.parametrize("family", ["llama-tied", "gpt2-tied"])
def test_the_replay_trains_as_adamw_does(family):
    replay = replayed(family, weight_decay=0.1)
    slow = reference(family).model.requires_grad_(True)
    optimizer = torch.optim.AdamW(slow.parameters(), lr=RATE, weight_decay=0.1)
    for seed in range(3):
        batch = rows(4, seed=seed)
        replay.advance(batch)
        total = sum(row.labels for row in batch)
        loss = sum(
            row.labels / total * objective(slow(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits[0], row)
            for row in batch
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ours = dict(replay.engine.model.model.named_parameters())
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_only_requested_layers_are_trained_and_valued():
    replay = replayed(layers=("block:0", "!*.mlp.*"), order=2)
    before = {name: tensor.clone() for name, tensor in replay.engine.model.model.named_parameters()}
    values = replay.advance(rows())
    slow = Slow("llama")
    parts = [autograd(slow.model, row) for row in slow.batch]
    validation = [autograd(slow.model, unit) for unit in units()]
    trained = {name for name in before if ".layers.0." in name and ".mlp." not in name}
    first = [
        RATE
        * c
        * sum(float((part[name] * sum(gradients[name] for gradients in validation)).sum()) / 4 for name in trained)
        for c, part in zip(slow.share, parts, strict=True)
    ]
    np.testing.assert_allclose(replayed(layers=("block:0", "!*.mlp.*")).advance(rows())[:, 0], first, rtol=1e-8)
    assert np.abs(values[:, 0] - first).max() > 1e-9
    changed = {
        name for name, tensor in replay.engine.model.model.named_parameters() if not torch.equal(tensor, before[name])
    }
    assert changed == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stored_state_resumes_bit_for_bit(tmp_path, dtype):
    whole, first, second = (replayed("gpt2-tied", TWO, dtype, order=2) for _ in range(3))
    batches = [rows(4, seed=seed) for seed in range(4)]
    expected = [whole.advance(batch) for batch in batches]
    for batch in batches[:2]:
        first.advance(batch)
    first.save(tmp_path / "state")
    second.restore(tmp_path / "state")
    assert second.step == 2
    for batch, values in zip(batches[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(second.advance(batch), values)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_values_do_not_depend_on_the_order_of_rows_in_a_batch():
    forward, backward = replayed(order=2).advance(rows()), replayed(order=2).advance(rows()[::-1])
    np.testing.assert_allclose(forward, backward[::-1], rtol=1e-7, atol=1e-14)
