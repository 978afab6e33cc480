"""Methods of the vision experiment on a head small enough to be retrained."""

import numpy as np
import pytest

from experiments.vision import methods
from experiments.vision.methods import Head
from grasp.audit.detection import auroc
from grasp.models.fitted_head import fit_linear


def world(noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    centres = 1.5 * generator.normal(size=(3, 5))
    label, trusted = generator.integers(0, 3, size=60), generator.integers(0, 3, size=30)
    changed = generator.random(60) < noise
    hidden = centres[label] + generator.normal(size=(60, 5))
    label = np.where(changed, (label + 1) % 3, label)
    weight, bias = fit_linear(hidden, label, 3, decay=0.1)
    return Head(weight, bias, 0.1, hidden, label, centres[trusted] + generator.normal(size=(30, 5)), trusted), changed


def loss(head, weight, bias):
    logits = head.trusted_EH @ weight.T + bias
    own = logits[np.arange(len(logits)), head.trusted_label_E]
    return float((np.logaddexp.reduce(logits, axis=1) - own).mean())


def test_influence_is_the_change_of_the_trusted_loss_when_a_row_weighs_a_little_more():
    head, _ = world()
    found = methods.influence(head, 0)
    true = np.empty(60)
    for i in range(60):
        ends = []
        for change in (0.05, -0.05):
            weight = np.ones(60)
            weight[i] += change
            # the objective divides by the sum of weights, the definition by N: the decay follows it
            scale = weight.sum() / 60
            fitted = fit_linear(head.hidden_NH, head.label_N, 3, decay=0.1 / scale, weight_N=weight)
            ends.append(loss(head, *fitted))
        true[i] = -(ends[0] - ends[1]) / 0.1 * 60
    assert np.corrcoef(found, true)[0, 1] > 0.99


def test_values_of_a_run_add_up_to_what_the_run_gained():
    head, _ = world()
    start, end = loss(head, np.zeros((3, 5)), np.zeros(3)), None
    gained = {order: methods.in_run(head, 0, order).sum() for order in (1, 2)}
    weight, bias = np.zeros((3, 5)), np.zeros(3)
    draw = methods.stream(0, "vision", "in-run")
    for _ in range(methods.PASSES):
        for batch in np.array_split(draw.permutation(60), -(-60 // methods.BATCH)):
            xi = head.residual(head.hidden_NH[batch], head.label_N[batch], weight, bias) / len(batch)
            weight, bias = weight - methods.RATE * xi.T @ head.hidden_NH[batch], bias - methods.RATE * xi.sum(axis=0)
    end = loss(head, weight, bias)
    assert gained[2] == pytest.approx(start - end, rel=1e-2)
    assert abs(gained[2] - (start - end)) < abs(gained[1] - (start - end))


@pytest.mark.parametrize("kernel", ["pooled", "token"])
def test_wrong_labels_have_low_relevance(kernel):
    head, changed = world(noise=0.15, seed=3)
    assert auroc(-methods.grasp_relevance(head, 0, kernel), changed) > 0.9


def test_datamodels_find_planted_values():
    draw = np.random.default_rng(0)
    value, halves = draw.standard_normal(40), [draw.permutation(40)[:20] for _ in range(200)]
    realized = np.array([value[rows].sum() for rows in halves])
    found = methods.datamodels(halves, realized, 40)
    np.testing.assert_allclose(found - found.mean(), value - value.mean(), atol=0.1)
