"""The paper's lower bounds on a small network, with the smoothness constant measured along the way that it takes.

The gradient of L is Lipschitz on a segment with the largest spectral norm of its Hessian there.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian

ROWS, WIDTH, STEPS, RATE = 24, 3, 15, 0.2


def grad(loss: Callable[..., Tensor], theta: Tensor, *rest: Tensor) -> Tensor:
    leaf = theta.detach().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf, *rest), leaf)
    return found


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
        """Largest spectral norm of the target's Hessian on a fine grid of the segment, and a percent for the grid."""
        grid = [start + share * (stop - start) for share in torch.linspace(0, 1, 9).double()]
        norms = [torch.linalg.eigvalsh(hessian(self.target, theta)).abs().max() for theta in grid]
        return 1.01 * float(max(norms))

    def trained(self, rows: list[int]) -> Tensor:
        theta = self.theta
        for _ in range(STEPS):
            theta = theta - RATE / STEPS * grad(self.loss, theta, self.x[rows], self.y[rows])
        return theta


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("step", [0.01, 0.1, 0.5])
def test_one_step_lower_bound_on_a_network(seed, step):
    world = World(seed)
    weight = torch.rand(ROWS).double() / ROWS
    direction = sum(w * world.row_gradient(i, world.theta) for i, w in enumerate(weight))
    after = world.theta - step * direction
    gained = float(world.target(world.theta) - world.target(after))
    slope = float(grad(world.target, world.theta) @ direction)
    square = float(direction @ direction)
    beta = world.smoothness(world.theta, after)
    assert gained >= step * slope - beta * step**2 / 2 * square - 1e-12
    assert gained <= step * slope + beta * step**2 / 2 * square + 1e-12  # the same constant bounds it from above
    # the first order alone is off by what the second order is for: of the square of the step
    assert abs(gained - step * slope) <= beta * step**2 / 2 * square + 1e-12


def test_a_smoothness_constant_that_is_too_small_breaks_the_bound():
    """So the bound above is no empty statement: a tenth of the measured constant fails on some of the same worlds."""
    broken = 0
    for seed in range(4):
        world = World(seed)
        # along the target's own gradient, in which the loss bends
        direction = grad(world.target, world.theta)
        after = world.theta - 0.5 * direction
        square, beta = float(direction @ direction), world.smoothness(world.theta, after)
        gained = float(world.target(world.theta) - world.target(after))
        assert gained >= 0.5 * square - beta * 0.125 * square - 1e-12
        broken += gained < 0.5 * square - 0.1 * beta * 0.125 * square
    assert broken > 0


@pytest.mark.parametrize("seed", range(3))
def test_endpoint_bounds_after_training_with_the_mismatch_of_the_proxy(seed):
    world = World(seed)
    rows = list(range(seed, ROWS, 3))
    end = world.trained(rows)
    moved = world.theta - end
    gained = float(world.target(world.theta) - world.target(end))
    slope = grad(world.target, world.theta)
    beta = world.smoothness(world.theta, end)
    assert gained >= float(slope @ moved) - beta / 2 * float(moved @ moved) - 1e-12

    proxy = RATE * torch.stack([world.row_gradient(i, world.theta) for i in rows]).mean(dim=0)
    mismatch = float((moved - proxy).norm())
    assert mismatch > 0  # training is not one step
    bound = float(slope @ proxy) - beta / 2 * float(proxy @ proxy)
    bound -= mismatch * float((slope - beta * proxy).norm()) + beta / 2 * mismatch**2
    assert gained >= bound - 1e-12
