"""The paper's lower bounds on a small network, with the smoothness constant measured along its trajectory.

The Lipschitz constant of the gradient of L on a segment is the largest spectral norm of its Hessian. Relevance,
geometry and surrogate are computed by grasp from the rows' gradients as updates u_i.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.autograd.functional import hessian

from tests.predict.reference import additive, components, interaction_surrogate

ROWS, WIDTH, STEPS, RATE = 24, 3, 15, 0.2


def grad(loss: Callable[..., Tensor], theta: Tensor, *rest: Tensor) -> Tensor:
    leaf = theta.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, *rest), leaf)
    return gradient


class World:
    """A network of 16 weights, rows to train on, a target loss, all in float64."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.theta = torch.randn(5 * WIDTH + 1).double() * 0.7
        self.x, self.target_x = torch.randn(ROWS, 3).double(), torch.randn(6, 3).double()
        truth = torch.randn(3).double()
        self.y, self.target_y = torch.sin(self.x @ truth), torch.sin(self.target_x @ truth)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        first, bias, second, last = theta.split([3 * WIDTH, WIDTH, WIDTH, 1])
        return ((torch.tanh(x @ first.reshape(3, WIDTH) + bias) @ second + last - y) ** 2).mean()

    def target(self, theta: Tensor) -> Tensor:
        return self.loss(theta, self.target_x, self.target_y)

    def row_gradient(self, i: int, theta: Tensor) -> Tensor:
        return grad(self.loss, theta, self.x[i : i + 1], self.y[i : i + 1])

    def smoothness(self, start: Tensor, stop: Tensor) -> float:
        """Return the largest spectral norm of the target's Hessian on a grid of the segment, plus one percent."""
        grid = [start + share * (stop - start) for share in torch.linspace(0, 1, 9).double()]
        norms = [torch.linalg.eigvalsh(hessian(self.target, theta)).abs().max() for theta in grid]
        return 1.01 * float(max(norms))

    def trained(self, rows: list[int]) -> Tensor:
        theta = self.theta
        for _ in range(STEPS):
            theta = theta - RATE / STEPS * grad(self.loss, theta, self.x[rows], self.y[rows])
        return theta


def surrogate(slope: Tensor, update_NW: Tensor, weight_N: Tensor, step: float, beta: float) -> tuple[float, float]:
    """Return eta A - beta eta^2 / 2 K_raw of one subset, and its part eta A, in nats, by the functions of grasp."""
    weights_BN, update = csr_array(weight_N.numpy()[None]), update_NW.numpy()
    relevance_B = additive((update @ slope.numpy())[:, None], weights_BN)[:, 0]
    raw_B = components(weights_BN, update, np.zeros(update.shape[1]))["raw"]
    bound_B = interaction_surrogate(relevance_B, raw_B, step=step, penalty=beta * step**2 / 2)
    return float(bound_B[0]), step * float(relevance_B[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("step", [0.01, 0.1, 0.5])
def test_one_step_lower_bound_on_a_network(seed, step):
    world = World(seed)
    weight = torch.rand(ROWS).double() / ROWS
    updates = torch.stack([world.row_gradient(i, world.theta) for i in range(ROWS)])
    after = world.theta - step * weight @ updates
    gained = float(world.target(world.theta) - world.target(after))
    beta = world.smoothness(world.theta, after)
    bound, first = surrogate(grad(world.target, world.theta), updates, weight, step, beta)
    assert gained >= bound - 1e-12
    assert gained <= 2 * first - bound + 1e-12  # the same constant bounds it from above


def test_a_smoothness_constant_that_is_too_small_breaks_the_bound():
    """Check that the bound above is not vacuous: a tenth of the measured constant fails on some of the same worlds."""
    broken = 0
    for seed in range(4):
        world = World(seed)
        # one row whose update is the target's own gradient, along which the loss bends
        slope = grad(world.target, world.theta)
        after = world.theta - 0.5 * slope
        beta = world.smoothness(world.theta, after)
        gained = float(world.target(world.theta) - world.target(after))
        subset = slope, slope[None], torch.ones(1).double(), 0.5
        assert gained >= surrogate(*subset, beta)[0] - 1e-12
        broken += gained < surrogate(*subset, 0.1 * beta)[0]
    assert broken > 0


def test_the_bound_is_reached_along_the_direction_that_bends_most():
    """For a small step the gain equals the surrogate to third order, so that a wrong scale of A or K is noticed."""
    step = 1e-3
    for seed in range(3):
        world = World(seed)
        value, vector = torch.linalg.eigh(hessian(world.target, world.theta))
        update = vector[:, -1:].T.contiguous()
        after = world.theta - step * update[0]
        gained = float(world.target(world.theta) - world.target(after))
        bound, first = surrogate(
            grad(world.target, world.theta), update, torch.ones(1).double(), step, float(value[-1])
        )
        assert gained - first == pytest.approx(bound - first, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_endpoint_bounds_after_training_with_the_mismatch_of_the_proxy(seed):
    world = World(seed)
    rows = list(range(seed, ROWS, 3))
    end = world.trained(rows)
    moved = world.theta - end
    gained = float(world.target(world.theta) - world.target(end))
    slope = grad(world.target, world.theta)
    beta = world.smoothness(world.theta, end)
    whole = slope, moved[None], torch.ones(1).double(), 1.0
    assert gained >= surrogate(*whole, beta)[0] - 1e-12

    updates = torch.stack([world.row_gradient(i, world.theta) for i in range(ROWS)])
    weight = torch.zeros(ROWS).double()
    weight[rows] = 1.0 / len(rows)
    proxy = RATE * weight @ updates
    mismatch = float((moved - proxy).norm())
    assert mismatch > 0  # training is not one step
    bound, _ = surrogate(slope, updates, weight, RATE, beta)
    bound -= mismatch * float((slope - beta * proxy).norm()) + beta / 2 * mismatch**2
    assert gained >= bound - 1e-12
