"""The gradient kernel: equal to dense curvature with all coordinates, unbiased with a sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from grasp.baselines.gradients.factors import materialise
from grasp.baselines.gradients.layers import as_matrix
from grasp.errors import ModelError
from grasp.kernels import gradient as gradient_module
from grasp.kernels.coordinates import SampledGradients, Tiles, by_member
from grasp.kernels.gradient import DAMPING, HORIZON, NEGLIGIBLE, BlockGeometry, BlockSums, Curvature, Gradient
from grasp.kernels.kernel import CorpusMoments
from grasp.models.batch import Batch
from grasp.models.gradients import Block, Example, GradientFactors
from grasp.models.residuals import SparseResidual
from grasp.pipeline.model_pass import split_on_oom, unit_gradients
from grasp.progress import ignore
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from tests.baselines.gradient_world import autograd, reference, rows, units
from tests.models.families import EVERY_FAMILY
from tests.rounding import rounding

CLOSE = rounding(5 * 32)  # of float32 norms, as in the tests of the engine
SEED, LEARNING_RATE_SUM, BATCH_ROWS = 5, 0.05, 4  # a training that decays some directions and leaves others


def asked_for(count: int | None = None, seed: int = 0) -> FeatureSettings:
    return FeatureSettings(gradient_coordinates="all" if count is None else count, seed=seed)


# ------------------------------------------------------------------------------------------ a block, by dense matrices


def phi(matrix: np.ndarray) -> np.ndarray:
    """Return (1 - exp(-M)) / M of a matrix, singular or not, as a part of an exponential."""
    size = len(matrix)
    whole = np.block([[-matrix, np.eye(size)], [np.zeros((size, 2 * size))]])
    return expm(whole)[:size, size:]


def whole_tile(left: int, right: int) -> Tiles:
    return Tiles(torch.arange(left)[None], torch.arange(right)[None], 0, torch.arange(left))


def small_block(kind: str) -> tuple[BlockSums, GradientFactors, tuple[torch.Tensor, torch.Tensor], int]:
    """Return sums over a few rows, the factors of two units, and roots of a preconditioner, of a matrix (5, 4)."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tokens = lambda *shape: torch.randint(5, shape, generator=generator)  # noqa: E731
    block = Block("w", (kind,), 5, 4, weight=True, bias=False, parameters=("w",), head=kind == "head")
    sums = BlockSums(block, torch.device("cpu"), torch.float64)
    labels = (3, 6, 4)
    for n in labels:
        factors = tokens(7) if kind == "embedding" else draw(7, 5), draw(7, 4)
        sums.add_gradient(*factors, n)
        sums.add_curvature(*factors, n)
    unit = GradientFactors(tokens(2, 3) if kind == "embedding" else draw(2, 3, 5), draw(2, 3, 4))
    roots = draw(5).abs() + 0.5, draw(4).abs() + 0.5
    return sums, unit, roots, sum(labels)


@pytest.mark.parametrize("kind", ["linear", "head", "embedding"])
@pytest.mark.parametrize("horizon", [1e-9, 0.05, 2.0])
def test_a_block_equals_dense_curvature_and_a_matrix_exponential(kind, horizon, monkeypatch):
    monkeypatch.setattr(gradient_module, "NEGLIGIBLE", 0.0)
    sums, unit, roots, n_labels = small_block(kind)
    left, right = (part.numpy() for part in sums.curvature(n_labels))
    left_X, right_Y = (root.numpy() for root in roots)
    geometry = BlockGeometry.of(sums, n_labels, roots, horizon)
    root = np.kron(left_X, right_Y)
    curvature = root[:, None] * np.kron(np.diag(left) if left.ndim == 1 else left, right) * root
    gradient_UP = materialise(unit, 5).flatten(1).numpy()
    expected = (phi(horizon * curvature) @ (root * gradient_UP).T).T * root
    actual = geometry.sampled(unit, whole_tile(5, 4), horizon).numpy()
    np.testing.assert_allclose(actual, expected, atol=rounding(100, np.abs(expected), np.float64))
    mean_P = sums.mean_XY.flatten().numpy() / n_labels * root
    decayed = phi(horizon * curvature) @ (np.eye(20) - expm(-horizon * curvature)) @ mean_P * root
    x_AB = geometry.exponent(horizon)
    value = -torch.expm1(-x_AB) * gradient_module.decay(x_AB) * geometry.mean_AB
    actual_mean = geometry.from_basis(value[None], whole_tile(5, 4))[0].numpy()
    np.testing.assert_allclose(actual_mean, decayed, atol=rounding(100, max(np.abs(decayed).max(), 1), np.float64))


def test_a_short_training_is_adam_and_a_long_one_inverts_the_curvature():
    sums, unit, roots, n_labels = small_block("linear")
    gradient_UXY = materialise(unit, 5)
    left, right = sums.curvature(n_labels)
    short = BlockGeometry.of(sums, n_labels, roots, 0.0).sampled(unit, whole_tile(5, 4), 0.0).view(2, 5, 4)
    adam = roots[0].square()[:, None] * gradient_UXY * roots[1].square()
    torch.testing.assert_close(short, adam)
    horizon = 1e6  # at h the result is a difference of numbers near 1, so that h eps of it are lost
    long = horizon * BlockGeometry.of(sums, n_labels, roots, horizon).sampled(unit, whole_tile(5, 4), horizon)
    # the preconditioner cancels: H^-1 G, as K-FAC's influence without damping
    torch.testing.assert_close(
        long.view(2, 5, 4), torch.linalg.inv(left) @ gradient_UXY @ torch.linalg.inv(right), rtol=1e-5, atol=1e-7
    )


def test_a_tied_head_keeps_the_trace_of_the_curvature_of_both_uses():
    generator = torch.Generator().manual_seed(4)
    block = Block("w", ("embedding", "linear"), 5, 4, weight=True, bias=False, parameters=("w",))
    sums = BlockSums(block, torch.device("cpu"), torch.float64)
    token_T, delta_TY = torch.randint(5, (7,), generator=generator), torch.randn(7, 4, generator=generator).double()
    residual_TX, hidden_TY = (torch.randn(6, n, generator=generator).double() for n in (5, 4))
    sums.add_curvature(token_T, delta_TY, 6)
    sums.add_curvature(residual_TX, hidden_TY, 6)
    left, right = sums.curvature(6)
    of_head = (6 * residual_TX).square().sum() / 6 * hidden_TY.square().sum() / 6
    of_embedding = (6 * delta_TY).square().sum() / 6  # of one-hot tokens, whose frequencies sum to 1
    assert float(left.sum() * right.trace()) == pytest.approx(float(of_head + of_embedding))


def test_directions_that_are_cut_change_a_unit_by_less_than_the_bound(monkeypatch):
    sums, unit, roots, n_labels = small_block("linear")
    horizon = 2e-5
    cut = BlockGeometry.of(sums, n_labels, roots, horizon)
    monkeypatch.setattr(gradient_module, "NEGLIGIBLE", 0.0)
    whole = BlockGeometry.of(sums, n_labels, roots, horizon)
    assert cut.mean_AB.numel() < whole.mean_AB.numel()
    first, second = (part.sampled(unit, whole_tile(5, 4), horizon).view(2, 5, 4) for part in (cut, whole))
    root = roots[0][:, None] * roots[1]
    norms = ((first - second) / root).flatten(1).norm(dim=1) / (materialise(unit, 5) * root).flatten(1).norm(dim=1)
    assert float(norms.max()) <= NEGLIGIBLE / 2


# ------------------------------------------------------------------------------------------------------- whole models


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


def drawn_objective(logits: torch.Tensor, example: Example, i: int) -> torch.Tensor:
    """Return the sum of losses with labels drawn from the model, by the uniform numbers of row i."""
    at = torch.arange(example.first - 1, len(example.input_ids) - 1)
    uniform = torch.from_numpy(stream(SEED, "curvature", "labels", i).random(example.labels))
    cumulative = logits[at].detach().softmax(dim=1).cumsum(dim=1)
    label = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return -torch.log_softmax(logits[at], dim=1).gather(1, label).sum()


def kronecker_factors(gradients: SampledGradients, examples) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the factors of the curvature of each block, row by row with hooks of torch, in float64.

    Inputs of layers are averaged over positions; gradients of the losses of tokens are summed over positions and
    divided by the number of labels. Sides of the vocabulary are diagonal; those of norms are zero.
    """
    engine = gradients.engine
    root, layers = engine.model.model, engine.layers
    parts = [[] for _ in layers.blocks]  # uses: (side of inputs, side of gradients, is an embedding)
    n_labels = sum(example.labels for example in examples)
    for i, example in enumerate(examples):
        seen = []

        def keep(module, inputs, output, seen=seen):
            output.retain_grad()
            seen.append((module, inputs[0].detach(), output))

        modules = dict(layers.modules)
        handles = [
            module.register_forward_hook(keep)
            for module in modules
            if "vector" not in layers.blocks[modules[module]].kinds
        ]
        for parameter in root.parameters():
            parameter.requires_grad_(True)
        ids = torch.from_numpy(example.input_ids.astype(np.int64))[None]
        drawn_objective(root(input_ids=ids, use_cache=False).logits[0], example, i).backward()
        for module, value, output in seen:
            if output.grad is not None:
                parts[modules[module]].append((module, value[0], output.grad[0]))
        for handle in handles:
            handle.remove()
        root.zero_grad()
        root.requires_grad_(False)
    out = []
    for number, block in enumerate(layers.blocks):
        by_use: dict[bool, list] = {}
        for module, value, grad in parts[number]:
            by_use.setdefault(isinstance(module, torch.nn.Embedding), []).append((module, value, grad))
        terms = []
        for is_embedding, items in by_use.items():
            grad_TX = torch.cat([grad for _, _, grad in items])
            if is_embedding:
                grad_TX = grad_TX * float(getattr(items[0][0], "embed_scale", 1.0))  # Gemma scales its embeddings
                token_T = torch.cat([value.expand(len(grad)) if value.ndim else value for _, value, grad in items])
                left = torch.bincount(token_T, minlength=block.left).double() / len(token_T)
                right = grad_TX.T @ grad_TX / n_labels
            else:
                input_TY = torch.cat([value for _, value, _ in items])
                if items[0][0] is engine.model.head.linear:  # positions without a label have no gradient: left out
                    used_T = grad_TX.any(dim=1)
                    grad_TX, input_TY = grad_TX[used_T], input_TY[used_T]
                if block.bias:
                    input_TY = torch.cat([input_TY, torch.ones(len(input_TY), 1).double()], dim=1)
                wide = block.head or "embedding" in block.kinds
                left = (grad_TX.square().sum(dim=0) if wide else grad_TX.T @ grad_TX) / n_labels
                right = input_TY.T @ input_TY / len(input_TY)
            terms.append((left.numpy(), right.numpy()))
        if not terms:
            out.append((np.zeros(block.left), np.zeros((block.right, block.right))))
            continue
        traces = [((left.sum() if left.ndim == 1 else np.trace(left)), np.trace(right)) for left, right in terms]
        left = sum(t * r * part / t for (part, _), (t, r) in zip(terms, traces, strict=True))
        right = sum(t * r * part / r for (_, part), (t, r) in zip(terms, traces, strict=True))
        out.append((left, right / sum(t * r for t, r in traces)))
    return out


def relevance_by_definition(gradients: SampledGradients, examples, unit_examples) -> torch.Tensor:
    """<g_i, P^(1/2) phi(h H) [P^(1/2) g_e - (1 - exp(-h H)) P^(1/2) gbar]>, block by block in float64."""
    row_NP, unit_EP = (gradients_by_autograd(gradients, part).double().numpy() for part in (examples, unit_examples))
    factors, horizon = kronecker_factors(gradients, examples), HORIZON * LEARNING_RATE_SUM
    labels_N = np.array([example.labels for example in examples])
    out_NE, begin = np.zeros((len(row_NP), len(unit_EP))), 0
    for block, (left, right) in zip(gradients.engine.layers.blocks, factors, strict=True):
        shape, columns = (-1, block.left, block.right), slice(begin, begin + block.size)
        begin += block.size
        row_NXY, unit_EXY = row_NP[:, columns].reshape(shape), unit_EP[:, columns].reshape(shape)
        v_XY = (row_NXY**2).mean(axis=0) / BATCH_ROWS + row_NXY.mean(axis=0) ** 2 * (1 - 1 / BATCH_ROWS)
        mean = v_XY.mean()
        roots = [((side + DAMPING * mean) / mean**0.5) ** -0.25 for side in (v_XY.mean(axis=1), v_XY.mean(axis=0))]
        root_XY = np.outer(*roots)
        mean_XY = root_XY * np.einsum("n,nxy->xy", labels_N, row_NXY) / labels_N.sum()
        if left.ndim == 1:
            value_X, vector_XX = left * roots[0] ** 2, np.eye(block.left)
        else:
            value_X, vector_XX = np.linalg.eigh(roots[0][:, None] * left * roots[0])
        scaled_YY = roots[1][:, None] * right * roots[1]
        unit_EXY = vector_XX.T @ (root_XY * unit_EXY)
        for x, value in enumerate(value_X):  # in eigenvectors of outputs, by exponentials of the side of inputs
            x_YY = horizon * value * scaled_YY
            moved_EY = unit_EXY[:, x] - (np.eye(block.right) - expm(-x_YY)) @ (vector_XX[:, x] @ mean_XY)
            unit_EXY[:, x] = moved_EY @ phi(x_YY)
        unit_EXY = root_XY * (vector_XX @ unit_EXY)
        out_NE += np.einsum("nxy,exy->ne", row_NXY, unit_EXY)
    return torch.from_numpy(out_NE)


def prepared_kernel(gradients: SampledGradients, examples, unit_examples) -> Gradient:
    """Return the kernel as a build prepares it, with the curvature of all examples."""
    model = gradients.engine.model
    kernel = Gradient(model, asked_for(None), CorpusMoments(model.vocab_size))
    for example in examples:
        kernel.corpus.observe(batch_of(gradients, [example]))
    curvature = kernel.moments(Curvature)
    curvature.measure(
        gradients, examples, learning_rate_sum=LEARNING_RATE_SUM, batch_rows=BATCH_ROWS, seed=SEED, advance=ignore
    )
    n = len(unit_examples)
    unit_EK, _ = unit_gradients(gradients, unit_examples, np.arange(n), np.ones(n), n, curvature)
    kernel.prepare(replace(batch_of(gradients, unit_examples), gradient_BK=unit_EK))
    return kernel


def relevance(gradients: SampledGradients, examples, unit_examples) -> torch.Tensor:
    """Compute relevance as in a build."""
    kernel = prepared_kernel(gradients, examples, unit_examples)
    out_NE = torch.zeros(len(examples), len(unit_examples), dtype=torch.float64)
    for index in gradients.batches(examples):
        batch = batch_of(gradients, [examples[int(i)] for i in index])
        out_NE[torch.from_numpy(index)] = kernel.score(batch).double()
    return out_NE


def batch_of(gradients: SampledGradients, examples) -> Batch:
    """What the kernel reads of a pass: the coordinates of its gradients."""
    sampled_BK, _, _ = gradients.compute(examples)
    model, none = gradients.engine.model, torch.zeros(0, dtype=torch.int64)
    residual = SparseResidual(none[:, None], none[:, None].float(), none.float())
    of_positions = torch.zeros(0, model.hidden_size), residual, none, none, len(examples)
    loss_B = torch.zeros(len(examples))
    return Batch(*of_positions, loss_B, model.head, model.vocab_size, sampled_BK, gradients)


@EVERY_FAMILY
def test_with_all_coordinates_it_equals_dense_curvature_of_autograd_gradients(family, monkeypatch):
    monkeypatch.setattr(gradient_module, "NEGLIGIBLE", 0.0)
    gradients, examples, unit_examples = opened(family), rows(8), units()
    expected = relevance_by_definition(gradients, examples, unit_examples)
    actual = relevance(gradients, examples, unit_examples)
    # v divides: an error of a gradient counts up to 1 / sqrt(DAMPING) times in its worst coordinate
    assert float((actual - expected).abs().max()) <= CLOSE / DAMPING**0.5 * float(expected.abs().max())


def test_curvature_does_not_depend_on_batches(monkeypatch):
    examples, unit_examples = rows(8), units()
    first, second = (
        relevance(SampledGradients.choose(reference("llama", batch_tokens=n), asked_for(None)), examples, unit_examples)
        for n in (8 * 16, 8 * 512)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=CLOSE * float(first.abs().max()))


def test_stored_curvature_is_the_same():
    gradients, examples = opened("llama", count=4_000), rows(6)
    measured = prepared_kernel(gradients, examples, units()).moments(Curvature)
    loaded = Curvature(CorpusMoments(97))
    loaded.load(measured.arrays())
    assert torch.equal(measured.decayed_mean(gradients), loaded.decayed_mean(gradients))
    first, second = (gradients.compute(units(), part.precondition)[1] for part in (measured, loaded))
    assert torch.equal(first, second)


@EVERY_FAMILY
def test_the_sample_has_the_coordinates_of_autograd_gradients(family):
    gradients, examples = opened(family, count=4_000), rows()
    assert gradients.sample.size < 2 * 4_000 < gradients.engine.layers.size
    expected = of_sample(gradients, gradients_by_autograd(gradients, examples))
    actual, _, _ = gradients.compute(examples)
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
        left_GR, right_GC = (torch.from_numpy(side) for side in sides)
        tiles = Tiles(left_GR, right_GC, 0, left_GR.flatten().argsort()[:10])
        return tiles.weight * float((sampled_values(tiles, use[0]) * sampled_values(tiles, use[1])).sum())

    result = np.array([estimate(seed) for seed in range(4_000)])
    assert abs(result.mean() - whole) <= 5 * result.std() / len(result) ** 0.5
    assert result.std() > 0.1 * abs(whole)  # it is a sample, not the whole


def test_a_sample_depends_only_on_seed_and_name():
    first, same, other = (opened("llama", count=3_000, seed=seed).sample for seed in (0, 0, 1))
    assert all(torch.equal(a.left_GR, b.left_GR) for a, b in zip(first.tiles, same.tiles, strict=True))
    assert not all(torch.equal(a.left_GR, b.left_GR) for a, b in zip(first.tiles, other.tiles, strict=True))


def test_one_hot_factors_have_the_coordinates_of_dense_ones():
    generator = torch.Generator().manual_seed(0)
    sides = [
        stream(0, "tiles").permutation(np.append(np.arange(n), np.full(-n % 3, n))).reshape(3, -1) for n in (10, 7)
    ]
    left_GR, right_GC = (torch.from_numpy(side) for side in sides)
    tiles = Tiles(left_GR, right_GC, 0, left_GR.flatten().argsort()[:10])
    token_BT, right_BTY = torch.randint(10, (2, 6), generator=generator), torch.randn(2, 6, 7, generator=generator)
    dense = torch.nn.functional.one_hot(token_BT, 10).float()
    expected = tiles.sampled_gradient(by_member(dense), by_member(right_BTY))
    torch.testing.assert_close(tiles.sampled_embedding(token_BT, right_BTY), expected)


def test_bfloat16_units_change_relevance_only_by_rounding():
    """Rounded to bfloat16 a number is off by 2^-9 of itself at most; so is a sum, of its terms' magnitudes."""
    wide, narrow = (opened("llama", dtype=dtype) for dtype in (torch.float64, torch.float32))
    examples, unit_examples = rows(8), units()
    difference = (relevance(narrow, examples, unit_examples) - relevance(wide, examples, unit_examples)).abs()
    row_NK, unit_EK = wide.compute(examples)[0], prepared_kernel(wide, examples, unit_examples).unit_EK
    labels_N1 = torch.tensor([[example.labels] for example in examples])
    assert bool((difference <= 2**-7 * labels_N1 * (row_NK.abs() @ unit_EK.abs().T)).all())


def test_a_row_with_a_gradient_that_is_not_finite_has_relevance_zero():
    gradients = opened("llama", dtype=torch.float32)
    kernel, batch = prepared_kernel(gradients, rows(2), units()[:2]), batch_of(gradients, rows(2))
    assert batch.gradient_BK is not None
    batch.gradient_BK[1, 5] = torch.inf
    result = kernel.score(batch)
    assert bool(result.isfinite().all())
    assert bool(result[0].any())
    assert result[1].tolist() == [0.0, 0.0]


@EVERY_FAMILY
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
