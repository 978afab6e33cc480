"""Effects against a slow reference in float64 and against steps of the optimizer; segments of batches; ranks."""

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn import functional as F

from grasp.errors import ModelError
from grasp.monitor.batches import Segment, segments
from grasp.monitor.effects import GROUPS, Effects, clip_window, interval_of_mean, load_questions
from grasp.monitor.monitor import Monitor
from tests.monitor import world


def labelled_rows(source, n=8):
    tokenizer = world.tokenizer()
    texts = [row["text"] for row in world.rows(60) if row["source"] == source][:n]
    ids = [np.array(tokenizer(text)["input_ids"]) for text in texts]
    return [((Segment(row, np.arange(len(row)) > 1),), 0.0) for row in ids]


def trained(model, optimizer, steps=5):
    """Train for a few steps, with gradients of very different sizes."""
    for k in range(steps):
        optimizer.zero_grad()
        mean_loss(model, labelled_rows(world.SOURCES[k % 3])[k : k + 3]).backward()
        optimizer.step()
    optimizer.zero_grad()


def mean_loss(model, rows):
    """Return the mean loss per token, row by row."""
    losses = []
    for (row,), _ in rows:
        ids = torch.from_numpy(row.ids)[None]
        scored = model(ids).logits[0, :-1][torch.from_numpy(row.has_loss[1:])]
        losses.append(F.cross_entropy(scored, ids[0][torch.from_numpy(row.has_loss)], reduction="none"))
    return torch.cat(losses).mean()


def split_groups(rows):
    return [rows[k::GROUPS] for k in range(GROUPS)]


def slow_effect(model, optimizer, rows, questions, rate):
    """Return the table of effects of groups of rows on groups of questions, parameter by parameter."""
    table = np.zeros((GROUPS, GROUPS))
    parameters = list(model.parameters())
    for r, row_group in enumerate(split_groups(rows)):
        for q, question_group in enumerate(split_groups(questions)):
            of_rows = torch.autograd.grad(mean_loss(model, row_group), parameters)
            of_questions = torch.autograd.grad(mean_loss(model, question_group), parameters)
            for parameter, a, b in zip(parameters, of_rows, of_questions, strict=True):
                state = optimizer.state[parameter]
                second = state["exp_avg_sq"] / (1 - 0.99 ** state["step"].item())
                table[r, q] -= rate * float((a / (second.sqrt() + 1e-8) * b).sum())
    return table


@pytest.fixture
def measured(tmp_path):
    model = world.model(dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    trained(model, optimizer)
    model.eval()
    questions = load_questions([world.write_exam(tmp_path / "exam.jsonl")], world.tokenizer(), 63)
    return model, optimizer, questions


def test_effects_are_those_of_a_slow_reference(measured):
    model, optimizer, questions = measured
    rows_of = [labelled_rows(source) for source in world.SOURCES]
    result = Effects(model, optimizer, questions).measure(rows_of, clip=0.5)
    for s, rows in enumerate(rows_of):
        table = 0.5 * slow_effect(model, optimizer, rows, questions["exam"], 2e-3)
        mean, half_width = interval_of_mean(table)
        assert result.effect_TS[0, s] == pytest.approx(mean, rel=1e-6)
        assert result.half_width_TS[0, s] == pytest.approx(half_width, rel=1e-5)
    expected = np.mean([mean_loss(model, group).item() for group in split_groups(questions["exam"])])
    assert result.loss_T[0] == pytest.approx(expected, rel=1e-9)


def test_a_small_step_changes_the_loss_as_predicted(measured):
    """A step along P g_s of 1/1000 of the learning rate, from the optimizer's own state."""
    model, optimizer, questions = measured
    effects = Effects(model, optimizer, questions)
    rows = labelled_rows("exam")
    before = effects.measure([rows])
    step = 1e-3 * effects.preconditioner() * effects.gradients(rows)[1].mean(dim=0)
    with torch.no_grad():
        for parameter, part in zip(
            model.parameters(), step.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.sub_(part.view_as(parameter))
    after = effects.measure([rows])
    assert after.loss_T[0] - before.loss_T[0] == pytest.approx(1e-3 * before.effect_TS[0, 0], rel=0.01)


def test_a_sample_of_coordinates_has_the_effect_within_its_interval(measured, monkeypatch):
    model, optimizer, questions = measured
    rows_of = [labelled_rows(source) for source in world.SOURCES]
    whole = Effects(model, optimizer, questions).measure(rows_of)
    monkeypatch.setattr("grasp.monitor.effects.MAX_COORDINATES", 4 * sum(p.numel() for p in model.parameters()) // 10)
    effects = Effects(model, optimizer, questions)
    assert effects.stride == 11
    sampled = effects.measure(rows_of)
    assert (abs(sampled.effect_TS - whole.effect_TS) < sampled.half_width_TS).all()
    assert (sampled.half_width_TS > whole.half_width_TS).any()


def test_sgd_has_a_constant_preconditioner_and_frozen_models_are_refused(measured):
    model, _, questions = measured
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert Effects(model, sgd, questions).preconditioner().unique().tolist() == pytest.approx([1.0])
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter of the model has a gradient"):
        Effects(model, sgd, questions)


def test_the_interval_of_a_two_way_table_covers_its_mean():
    """Rows and columns with random effects: at least 93 % of 95 % intervals cover."""
    draws = np.random.default_rng(0)
    covered = []
    for _ in range(1_000):
        table = draws.normal(size=(4, 1)) + draws.normal(size=(1, 4)) + 0.3 * draws.normal(size=(4, 4))
        mean, half_width = interval_of_mean(table)
        covered.append(abs(mean) < half_width)
    assert np.mean(covered) > 0.93
    assert interval_of_mean(np.ones((1, 4)))[1] == np.inf


def test_segments_of_padded_and_of_packed_batches():
    ids = torch.tensor([[5, 6, 7, 0], [0, 8, 9, 4]])
    labels = torch.tensor([[-100, 6, 7, -100], [-100, 8, 9, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    padded = segments({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert [part.ids.tolist() for part in padded] == [[5, 6, 7], [8, 9, 4]]
    assert [part.has_loss.tolist() for part in padded] == [[False, True, True]] * 2
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    packed = segments({"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6]]), "position_ids": positions})
    assert [part.ids.tolist() for part in packed] == [[1, 2], [3, 4, 5], [6]]
    long = Segment(np.arange(2_000), np.arange(2_000) > 1_500)
    assert clip_window(long).ids[[0, -1]].tolist() == [1_501 - 256, 1_501 + 255]


def _rank(rank, directory):
    distributed.init_process_group("gloo", f"file://{directory}/init", rank=rank, world_size=2)
    monitor = Monitor("source")
    for k, row in enumerate(world.rows(12)):
        if k % 2 == rank:
            monitor.sums[row["source"]] = monitor.sums.get(row["source"], 0.0) + np.array([1.0, k, 2.0 * k, 0.0, 0.0])
    torch.save(monitor._gather_sums(), f"{directory}/{rank}.pt")
    distributed.destroy_process_group()


def test_sums_of_two_processes_are_those_of_one(tmp_path):
    monitor = Monitor("source")
    for k, row in enumerate(world.rows(12)):
        monitor.sums[row["source"]] = monitor.sums.get(row["source"], 0.0) + np.array([1.0, k, 2.0 * k, 0.0, 0.0])
    expected = monitor._gather_sums()
    multiprocessing.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    for rank in range(2):
        sums = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert sums.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(sums[key], values)
