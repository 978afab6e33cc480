"""The gradient kernel: exact with all coordinates, unbiased with a sample, for every architecture."""

import numpy as np
import pytest
import torch

from grasp.baselines.gradients.factors import materialise
from grasp.baselines.gradients.layers import as_matrix
from grasp.errors import ModelError
from grasp.kernels.gradient import Gradient, SampledGradients, Tiles, by_member, gradient_preconditioner
from grasp.kernels.kernel import Batch, CorpusMoments
from grasp.models.gradients import Example, GradientFactors
from grasp.models.residuals import SparseResidual
from grasp.pipeline.model_pass import split_on_oom
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from tests.baselines.gradient_world import autograd, reference, rows, units
from tests.rounding import rounding

CLOSE = rounding(5 * 32)  # of float32 norms, as in the tests of the engine
DAMPING = 0.01


def asked_for(count: int | None = None, seed: int = 0) -> FeatureSettings:
    return FeatureSettings(gradient_coordinates="all" if count is None else count, seed=seed)


def opened(family: str, count: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64):
    return SampledGradients.choose(reference(family, dtype, batch_tokens=512), asked_for(count, seed))


def gradients_by_autograd(gradients: SampledGradients, examples) -> torch.Tensor:
    """Return whole gradients of the body, (n, all), one row at a time."""
    engine = gradients.engine
    results = [autograd(engine.model, example) for example in examples]
    return torch.stack([torch.cat([as_matrix(b, first).flatten() for b in engine.layers.blocks]) for first in results])


def of_sample(gradients: SampledGradients, whole_NP: torch.Tensor) -> torch.Tensor:
    """The sample's coordinates of whole gradients; 0 where a group has fewer members."""
    columns, begin = [], 0
    for block, tiles in zip(gradients.engine.layers.blocks, gradients.sample.tiles, strict=True):
        matrix = whole_NP[:, begin : begin + block.size].view(-1, block.left, block.right)
        padded = torch.nn.functional.pad(matrix, (0, 1, 0, 1))
        columns += [
            padded[:, left][:, :, right].flatten(1) for left, right in zip(tiles.left_GR, tiles.right_GC, strict=True)
        ]
        begin += block.size
    return torch.cat(columns, dim=1)


def relevance_by_definition(whole_NP: torch.Tensor, units_EP: torch.Tensor, damping: float) -> torch.Tensor:
    """sum_j g_ij g_ej / (v_j + damping mean v), in float64 throughout."""
    v_P = whole_NP.double().square().mean(dim=0)
    return (whole_NP.double() / (v_P + damping * v_P.mean())) @ units_EP.double().T


def relevance(gradients: SampledGradients, examples, unit_examples) -> torch.Tensor:
    """Compute relevance as in a build."""
    model = gradients.engine.model
    kernel = Gradient(model, asked_for(None), CorpusMoments(model.vocab_size))
    for example in examples:
        kernel.observe(batch_of(gradients, [example]))
    kernel.prepare(batch_of(gradients, unit_examples))
    out_NE = torch.zeros(len(examples), len(unit_examples), dtype=torch.float64)
    for index in gradients.batches(examples):
        batch = batch_of(gradients, [examples[int(i)] for i in index])
        out_NE[torch.from_numpy(index)] = kernel.score(batch).double()
    return out_NE


def batch_of(gradients: SampledGradients, examples) -> Batch:
    """What the kernel reads of a pass: the coordinates of its gradients."""
    sampled_BK, hidden_BLH = gradients.compute(examples)
    model, none = gradients.engine.model, torch.zeros(0, dtype=torch.int64)
    residual = SparseResidual(none[:, None], none[:, None].float(), none.float())
    of_positions = hidden_BLH[0, :0], residual, none, none, len(examples)
    loss_B = torch.zeros(len(examples))
    return Batch(*of_positions, loss_B, model.head, model.vocab_size, None, sampled_BK, gradients)


def test_with_all_coordinates_it_equals_the_inner_product_of_autograd_gradients(family):
    gradients, examples, unit_examples = opened(family), rows(), units()
    whole = [gradients_by_autograd(gradients, part) for part in (examples, unit_examples)]
    expected = relevance_by_definition(*whole, DAMPING)
    actual = relevance(gradients, examples, unit_examples)
    spread = float(expected.abs().max())
    # v of the rows themselves divides: an error of a gradient counts up to 1 / damping times in its worst coordinate
    assert float((actual - expected).abs().max()) <= CLOSE / DAMPING * spread


def test_the_sample_has_the_coordinates_of_autograd_gradients(family):
    gradients, examples = opened(family, count=4_000), rows()
    assert gradients.sample.size < 2 * 4_000 < gradients.engine.layers.size
    expected = of_sample(gradients, gradients_by_autograd(gradients, examples))
    actual, _ = gradients.compute(examples)
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def test_every_output_and_every_input_is_in_exactly_one_tile():
    gradients = opened("llama", count=3_000)
    for block, tiles in zip(gradients.engine.layers.blocks, gradients.sample.tiles, strict=True):
        for member, width in ((tiles.left_GR, block.left), (tiles.right_GC, block.right)):
            real = member[member < width]
            assert sorted(real.tolist()) == list(range(width))
        assert tiles.weight == (1 if block.left == 1 else len(tiles.left_GR))


def test_sums_over_the_sample_are_unbiased():
    """Over many draws the mean of weighted products is the whole product, within its own standard error."""
    generator = torch.Generator().manual_seed(0)
    use = [
        GradientFactors(torch.randn(1, 3, 10, generator=generator), torch.randn(1, 3, 7, generator=generator))
        for _ in "ab"
    ]
    whole = float((materialise(use[0], 10) * materialise(use[1], 10)).sum())

    def sampled_values(tiles: Tiles, first: GradientFactors) -> torch.Tensor:
        return tiles.sampled_gradient(by_member(first.left), by_member(first.right))

    def estimate(seed: int) -> float:
        draw = stream(seed, "tiles")
        sides = [draw.permutation(np.append(np.arange(n), np.full(-n % 5, n))).reshape(5, -1) for n in (10, 7)]
        tiles = Tiles(torch.from_numpy(sides[0]), torch.from_numpy(sides[1]), 0)
        return tiles.weight * float((sampled_values(tiles, use[0]) * sampled_values(tiles, use[1])).sum())

    result = np.array([estimate(seed) for seed in range(4_000)])
    assert abs(result.mean() - whole) <= 5 * result.std() / len(result) ** 0.5
    assert result.std() > 0.1 * abs(whole)  # it is a sample, not the whole


def test_a_sample_depends_only_on_seed_and_name():
    first, same, other = (opened("llama", count=3_000, seed=seed).sample for seed in (0, 0, 1))
    assert all(torch.equal(a.left_GR, b.left_GR) for a, b in zip(first.tiles, same.tiles, strict=True))
    assert not all(torch.equal(a.left_GR, b.left_GR) for a, b in zip(first.tiles, other.tiles, strict=True))


def test_bfloat16_units_change_relevance_only_by_rounding():
    """Rounded to bfloat16 a number is off by 2^-9 of itself at most; so is a sum, of its terms' magnitudes."""
    gradients, examples, unit_examples = opened("llama", dtype=torch.float32), rows(), units()
    result = relevance(gradients, examples, unit_examples)
    whole = [gradients_by_autograd(gradients, part) for part in (examples, unit_examples)]
    v_P = whole[0].double().square().mean(dim=0)
    terms = (whole[0].double().abs() / (v_P + DAMPING * v_P.mean())) @ whole[1].double().abs().T
    assert bool(((result - relevance_by_definition(*whole, DAMPING)).abs() <= 2**-8 * terms).all())


def test_a_preconditioner_of_zeros_does_not_change_gradients():
    assert gradient_preconditioner(np.zeros(3), np.array([2.0, 2.0, 1.0]), 0.01).tolist() == [2.0, 2.0, 1.0]


def test_a_row_with_a_gradient_that_is_not_finite_has_relevance_zero():
    gradients = opened("llama", dtype=torch.float32)
    model = gradients.engine.model
    kernel = Gradient(model, asked_for(None), CorpusMoments(model.vocab_size))
    batch = batch_of(gradients, rows(2))
    kernel.observe(batch)
    kernel.prepare(batch_of(gradients, units()[:2]))
    assert batch.gradient_BK is not None
    batch.gradient_BK[1, 5] = torch.inf
    result = kernel.score(batch)
    assert bool(result.isfinite().all())
    assert bool(result[0].any())
    assert result[1].tolist() == [0.0, 0.0]


def test_contributions_of_positions_sum_to_the_relevance(family):
    """Include positions without loss."""
    gradients, unit_examples = opened(family, count=4_000), units()
    unit_EK = torch.cat([gradients.compute([unit])[0] for unit in unit_examples])
    gaps = np.array([False, True, True, False, False, True, False, True])
    for example in (*rows(2), Example(np.arange(1, 9, dtype=np.int32), loss_mask=gaps)):
        whole_E = (gradients.compute([example])[0] @ unit_EK.T)[0].numpy()
        added_LE = gradients.by_position(example, unit_EK)
        assert added_LE.shape == (len(example.input_ids), len(unit_examples))
        np.testing.assert_allclose(added_LE.sum(axis=0), whole_E, atol=CLOSE * np.abs(added_LE).sum(axis=0).max())


def test_a_batch_that_does_not_fit_is_halved_and_a_row_that_does_not_fit_is_an_error():
    requests = []

    def run(index):
        requests.append(len(index))
        if len(index) > 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return index.sum()

    assert [(part.tolist(), pieces) for part, pieces in split_on_oom(np.arange(7), run)] == [
        ([0, 1], 1),
        ([2, 3], 5),
        ([4, 5], 9),
        ([6], 6),
    ]
    assert requests == [7, 4, 2, 2, 3, 2, 1]

    def never(index):
        raise torch.cuda.OutOfMemoryError("no room")

    with pytest.raises(ModelError, match=r"memory.*backward pass"):
        list(split_on_oom(np.arange(3), never))
