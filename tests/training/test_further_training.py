"""Further training: the DPO loss equals its formula, and every run starts from the same weights."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from grasp.corpus.row_store import TokenRows
from grasp.seeds import stream
from grasp.training.adamw import AdamWTraining
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.further_training import FurtherTraining, dpo_backward, margins
from grasp.training.row_order import row_order
from tests.training.unrolled import RECIPE, VOCAB, tiny_model


class Rows:
    """Five rows with the interface of a store: pairs with sides of 3 to 7 tokens, or texts; loss is at the end."""

    n_rows = 5

    def __init__(self, *, pairs=True):
        rng = np.random.default_rng(4)
        sides = [[rng.integers(VOCAB, size=rng.integers(3, 8)) for _ in range(1 + pairs)] for _ in range(5)]
        self._ids = [np.concatenate(each).astype(np.int32) for each in sides]
        self._masks = [np.concatenate([np.arange(len(side)) >= 2 for side in each]) for each in sides]
        self._split_N = np.array([len(each[0]) for each in sides]) if pairs else None

    def rows(self, index_B):
        ids, masks = ([parts[i] for i in index_B] for parts in (self._ids, self._masks))
        return TokenRows(
            flat_ids=np.concatenate(ids),
            offsets=np.cumsum([0, *map(len, ids)]),
            table=pa.table({"row_id": [str(i) for i in index_B]}),
            loss_mask=np.concatenate(masks),
            split_N=None if self._split_N is None else self._split_N[index_B],
        )

    def shard(self, k):
        return self.rows(np.arange(self.n_rows))


def margin(model, pairs, i):
    """Return log p(chosen) - log p(rejected) of pair i, summed token by token."""
    ids, mask, split = pairs.ids(i), pairs.mask(i), pairs.split_N[i]
    values = []
    for side in (slice(0, split), slice(split, None)):
        tokens = torch.from_numpy(ids[side].astype(np.int64))
        logp = F.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], dim=-1)
        each = logp[torch.arange(len(tokens) - 1), tokens[1:]]
        values.append(each[torch.from_numpy(mask[side][1:])].sum())
    return values[0] - values[1]


@pytest.mark.parametrize("micro_rows", [None, 2])
@pytest.mark.parametrize("offset", [0.0, 1.5], ids=["at the reference", "away from it"])
def test_the_dpo_loss_and_its_gradient_are_those_of_the_formula(micro_rows, offset):
    model, pairs = tiny_model(), Rows().shard(0)
    training = AdamWTraining(model, RECIPE.model_copy(update={"micro_rows": micro_rows}))
    training.zero_gradients()
    reference_B = margins(training, pairs) - offset * np.arange(len(pairs))
    expected = torch.stack([margin(model, pairs, i) for i in range(len(pairs))])
    np.testing.assert_allclose(margins(training, pairs), expected.detach(), rtol=1e-10)
    loss = -F.logsigmoid(0.3 * (expected - torch.from_numpy(reference_B))).mean()
    gradients = torch.autograd.grad(loss, training.parameters)
    assert dpo_backward(training, pairs, reference_B, 0.3) == pytest.approx(float(loss.detach()), rel=1e-10)
    for got, wanted in zip(training.gradients(), gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(wanted.abs().max() + 1))
    if not offset:  # half of beta times the difference of the sides, the gradient by which a build scores pairs
        expected = torch.stack([margin(model, pairs, i) for i in range(len(pairs))])
        half = torch.autograd.grad(-0.15 * expected.mean(), training.parameters)
        for got, wanted in zip(training.gradients(), half, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(wanted.abs().max() + 1))


RUN = FineTuningRecipe(learning_rate=3e-2, num_train_epochs=2, per_device_train_batch_size=2)


@pytest.mark.parametrize("rows", [Rows(), Rows(pairs=False)], ids=["pairs", "texts"])
def test_every_run_starts_from_the_same_weights(rows):
    further = FurtherTraining(tiny_model(), RUN, rows)
    weights = []
    for mask in (np.ones(5), np.array([1, 1, 0, 1, 1]), np.ones(5)):
        steps = []
        model = further.train(mask, 0, steps.append)
        assert len(steps) == RUN.steps(int(mask.sum()))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone())
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("batch_rows", [2, 8], ids=["a shorter last batch", "fewer rows than a batch"])
def test_a_subset_is_trained_on_as_by_a_plain_loop(batch_rows):
    rows, recipe = Rows(pairs=False), RUN.model_copy(update={"per_device_train_batch_size": batch_rows})
    retained = np.array([True, False, True, False, True])
    trained = FurtherTraining(tiny_model(), recipe, rows).train(retained, 3)
    model, shard = tiny_model(), rows.shard(0)
    n_steps = 2 * -(-3 // batch_rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    step = 0
    for epoch in range(2):
        order = [i for i in stream(3, "order", epoch).permutation(5) if retained[i]]
        for start in range(0, 3, batch_rows):
            losses = []
            for i in order[start : start + batch_rows]:
                ids = torch.from_numpy(shard.ids(i).astype(np.int64))
                logp = F.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1)
                losses.append(-logp[torch.arange(len(ids) - 1), ids[1:]][torch.from_numpy(shard.mask(i)[1:])])
            optimizer.zero_grad()
            torch.cat(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * (n_steps - step) / n_steps
            optimizer.step()
            step += 1
    for (name, value), expected in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6, msg=name)


def test_a_row_of_double_weight_is_seen_twice_as_often():
    recipe = RUN.model_copy(update={"num_train_epochs": 40.0})
    batches = recipe.batches(row_order(np.array([1.0, 0.5, 0.5, 0.0, 1.0]), seed=0), 4)
    assert [len(batch) for batch in batches] == [2] * 80  # as many steps as with a mask of four rows
    counts = np.bincount(np.concatenate(batches), minlength=5)
    np.testing.assert_allclose(counts / counts[0], [1, 0.5, 0.5, 0, 1], atol=0.03)


def test_training_on_pairs_raises_their_margins():
    pairs, model = Rows(), tiny_model()
    before = [float(margin(model, pairs.shard(0), i).detach()) for i in range(5)]
    trained = FurtherTraining(model, RUN.model_copy(update={"num_train_epochs": 20.0}), pairs).train(None, 0)
    after = [float(margin(trained, pairs.shard(0), i).detach()) for i in range(5)]
    assert np.mean(np.array(after) - before) > 1.0
