"""The engine: per-example gradients, inner products and projections equal those by autograd for single examples."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.baselines.gradients.factors import materialise, squared_norm
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import as_matrix, choose_layers
from grasp.baselines.gradients.projection import Projection
from grasp.baselines.gradients.whole import UnitGradients, inner_products, run_whole
from grasp.errors import ModelError, SettingsError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Block, Example, GradientFactors, PerExample
from tests.baselines.gradient_world import NoTokenizer, autograd, flat, objective, reference, rows, units
from tests.models.families import EVERY_FAMILY, VOCAB
from tests.rounding import rounding

# RMSNorm of transformers goes through float32 whatever the model's type is, so a row alone and in a batch differ.
CLOSE = rounding(5 * 32)  # five norms over 32 numbers


def engine_of(family="llama", patterns=("all",), **how) -> PerExample:
    model = reference(family, **how)
    return PerExample(model, choose_layers(model, patterns))


def held(engine: PerExample, examples, output="loss") -> list[torch.Tensor]:
    matrices = [torch.zeros(len(examples), b.left, b.right, dtype=engine.work) for b in engine.layers.blocks]
    run_whole(engine, examples, lambda number, matrix, part: matrices[number][part].copy_(matrix), output)
    return matrices


def references(engine: PerExample, examples, output="loss") -> list[dict[str, torch.Tensor]]:
    return [autograd(engine.model, example, output) for example in examples]


def covered(engine: PerExample, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the reference gradient on the blocks of the engine, in its order."""
    return torch.cat([as_matrix(block, gradients).flatten() for block in engine.layers.blocks])


@EVERY_FAMILY
@pytest.mark.parametrize("output", ["loss", "margin"])
def test_every_parameter_has_the_gradient_of_autograd_for_a_single_row(family, output):
    engine, examples = engine_of(family), rows()
    matrices = held(engine, examples, output)
    for i, expected in enumerate(references(engine, examples, output)):
        result = torch.cat([matrix[i].flatten() for matrix in matrices])
        wanted = covered(engine, expected)
        assert engine.layers.size == len(wanted) == sum(g.numel() for g in expected.values())
        assert float((result - wanted).abs().max()) <= CLOSE * float(wanted.abs().max())


def test_outcome_is_the_mean_loss_and_the_mean_of_one_minus_p():
    engine = engine_of("gpt-neox", ["head"])
    outcome = engine.run(units(), lambda *_: None)
    for i, unit in enumerate(units()):
        ids = torch.from_numpy(unit.input_ids.astype(np.int64))[None]
        logits = engine.model.model(ids).logits[0]
        p = torch.softmax(logits, 1)[torch.arange(unit.first - 1, len(unit.input_ids) - 1), ids[0, unit.first :]]
        assert float(outcome.loss_B[i]) == pytest.approx(float(objective(logits, unit)))
        assert float(outcome.miss_probability_B[i]) == pytest.approx(float(1 - p.mean()))


@EVERY_FAMILY
@pytest.mark.parametrize("whole", [True, False])
def test_inner_products_and_norms_without_projection_are_exact(family, whole):
    engine = engine_of(family)
    gradients = UnitGradients.collect(engine, units(), whole=whole)
    assert (gradients.head is None) == (whole or any(len(block.kinds) == 2 for block in engine.layers.blocks))
    product_NE, square_N = inner_products(gradients, rows(9), norms=True)
    row_NP = torch.stack([flat(g) for g in references(engine, rows(9))])
    unit_EP = torch.stack([flat(g) for g in references(engine, units())])
    expected_NE = (row_NP @ unit_EP.T).numpy()
    assert np.abs(product_NE - expected_NE).max() <= CLOSE * np.abs(expected_NE).max()
    np.testing.assert_allclose(square_N, row_NP.square().sum(1), rtol=CLOSE)
    np.testing.assert_allclose(gradients.squared_norms(), unit_EP.square().sum(1), rtol=CLOSE)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2-tied"])
def test_a_tied_weight_has_the_sum_of_both_uses_under_either_name(family):
    engine = engine_of(family, ["head"])
    (block,) = engine.layers.blocks
    assert block.kinds == ("embedding", "linear")
    assert engine.calls == (2,)
    assert len(block.kinds) == 2
    other = engine_of(family, ["embedding"])
    assert other.layers.blocks == engine.layers.blocks
    assert torch.equal(held(engine, rows())[0], held(other, rows())[0])


def test_gradients_do_not_depend_on_batches_and_padding():
    whole = held(engine_of("gpt-neox", batch_tokens=10_000), rows(7))
    for i, row in enumerate(rows(7)):
        single = held(engine_of("gpt-neox"), [row])
        for actual, other in zip(whole, single, strict=True):
            torch.testing.assert_close(actual[i], other[0], rtol=0, atol=1e-12)


def test_the_head_in_parts_of_the_batch_gives_the_same_gradients(monkeypatch):
    expected = held(engine_of("llama-tied"), rows())
    monkeypatch.setattr("grasp.models.gradients.CPU_CHUNK_ELEMENTS", 2 * 13 * VOCAB)
    result = held(engine_of("llama-tied"), rows())
    for actual, other in zip(result, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 500])
def test_memory_limits_do_not_change_results(monkeypatch, elements):
    for module in (
        "models.gradient_sums",
        *(f"baselines.gradients.{m}" for m in ("factors", "whole", "projection")),
    ):
        monkeypatch.setattr(f"grasp.{module}.BLOCK_ELEMENTS", elements)
    for family in ("llama", "llama-tied"):
        test_inner_products_and_norms_without_projection_are_exact(family, whole=False)


def test_labels_sampled_from_the_model_give_its_fisher_matrix():
    engine = engine_of("gpt-neox", ["head"])
    row = Example(np.array([3, 5], dtype=np.int32))
    numbers = (np.arange(4000) + 0.5) / 4000
    mean = torch.zeros(1)
    drawn = []

    def consume(_, use, at):
        drawn.append(use.left[:, 0])

    for part in np.split(numbers, 40):
        engine.run([row] * len(part), consume, "sampled", [np.array([u]) for u in part])
    residual = torch.cat(drawn)
    mean = residual.mean(0)
    # E over labels of p - onehot is zero; of evenly spaced numbers a label has its share to one of them
    assert float(mean.abs().max()) <= 1 / len(numbers) + CLOSE
    p = residual[0] + torch.nn.functional.one_hot(residual[0].argmin(), VOCAB)
    fisher = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(residual.T @ residual / len(residual), fisher, rtol=0, atol=3 / len(numbers) + CLOSE)


# ------------------------------------------------------------------------------------------- projection


@pytest.fixture
def of_form(monkeypatch):
    """Return a function that makes projections have a form where layers allow it."""

    def choose(form):
        limit = 0 if form == "two-sided" else 1 << 27
        monkeypatch.setattr("grasp.baselines.gradients.projection.DENSE_ELEMENTS", limit)

    return choose


@pytest.mark.parametrize("form", ["dense", "two-sided"])
@pytest.mark.parametrize("family", ["gpt2-tied", "llama"])
def test_projected_factors_equal_projected_gradients(family, form, of_form):
    of_form(form)
    engine = engine_of(family)
    featurizer = Featurizer.with_projection(engine, 8, seed=3, tokens=10)
    assert (form == "dense") == ("dense" in featurizer.projection.forms)
    expected = torch.zeros(len(rows()), 8, dtype=torch.float64)
    for number, matrix in enumerate(held(engine, rows())):
        expected += featurizer.projection.of_matrix(number, matrix)
    np.testing.assert_allclose(featurizer.features(rows())[0], expected, rtol=0, atol=1e-5)


def projection_of(left: int, right: int, *, width: int = 16, seed: int = 0) -> Projection:
    block = Block("x", ("linear",), left, right, True, False, ("x.weight",))
    return Projection([block], width, seed=seed, tokens=10, dtype=torch.float64)


@pytest.mark.parametrize(("form", "spread"), [("dense", 2 / 16), ("two-sided", 2 / 16 + 4 / 32)])
def test_projection_keeps_norms_without_bias_and_with_the_variance_it_states(form, spread, of_form):
    of_form(form)
    generator = torch.Generator().manual_seed(0)
    use = GradientFactors(*(torch.randn(1, 1, size, generator=generator, dtype=torch.float64) for size in (40, 50)))
    size = float(squared_norm([use], 40)[0])
    result = []
    for seed in range(600):
        out = torch.zeros(1, 16, dtype=torch.float64)
        projection_of(40, 50, seed=seed).add(0, use, out)
        result.append(float(out.square().sum()) / size)
    assert np.mean(result) == pytest.approx(1.0, abs=4 * np.std(result) / 600**0.5)
    assert 0.6 * spread < np.var(result) < 1.4 * spread


def test_projections_of_blocks_are_independent():
    engine = engine_of("llama", ["*layers.1.self_attn*"])
    value = Featurizer.with_projection(engine, 1024, seed=0, tokens=10).features(rows())[0]
    expected = np.stack([covered(engine, g).numpy() for g in references(engine, rows())])
    expected = expected @ expected.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((value @ value.T - expected) / scale).max() < 4 * np.sqrt(2 / 1024)


# ------------------------------------------------------------------------------------------- factors


def test_norms_by_pairs_and_by_matrices_agree():
    generator = torch.Generator().manual_seed(0)
    for positions, left, right in ((3, 40, 50), (30, 2, 3)):
        dense = GradientFactors(
            torch.randn(4, positions, left, generator=generator), torch.randn(4, positions, right, generator=generator)
        )
        ids = GradientFactors(
            torch.randint(left, (4, positions), generator=generator),
            torch.randn(4, positions, right, generator=generator),
        )
        expected = (materialise(dense, left) + materialise(ids, left)).flatten(1).square().sum(1)
        close = rounding(left * right + positions, expected)
        torch.testing.assert_close(squared_norm([dense, ids], left), expected, rtol=0, atol=close)


# ------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("family_", ["llama", "gpt2-tied", "gpt-neox", "phi-head-bias", "qwen3"])
def test_keywords_select_parts_of_a_model(family_):
    model = reference(family_)
    parts = [choose_layers(model, [word]).size for word in ("embedding", "body", "head")]
    tied = family_ == "gpt2-tied"
    assert parts[0] + parts[1] + (0 if tied else parts[2]) == choose_layers(model, ["all"]).size
    assert choose_layers(model, ["block:-1"]).blocks == choose_layers(model, ["block:1"]).blocks
    blocks = choose_layers(model, ["blocks"]).size
    assert blocks == sum(choose_layers(model, [f"block:{k}"]).size for k in (0, 1))
    (norm,) = choose_layers(model, ["final_norm"]).blocks
    assert "norm" in norm.name or norm.name.endswith("ln_f")


@pytest.mark.parametrize("family_", ["gpt-neox", "gpt2-tied", "phi-head-bias"])
def test_a_bias_or_a_weight_can_be_selected_alone(family_):
    for pattern in ("*.bias", "*.weight"):
        engine = engine_of(family_, [pattern])
        result = torch.cat([matrix[0].flatten() for matrix in held(engine, rows())])
        wanted = covered(engine, references(engine, rows()[:1])[0])
        torch.testing.assert_close(result, wanted, rtol=0, atol=CLOSE * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["modle.norm"], "'modle.norm' matches no parameter .* such as model.norm"),
        (["nothing*"], "expected all, head, .* model.embed_tokens.weight"),
        (["block:2"], "the model has blocks 0 to 1"),
        (["head", "!head"], "selects no parameters"),
        ([], "selects no parameters"),
        (["re:("], "is not a valid regular expression"),
    ],
)
def test_missing_layers_are_refused(patterns, message):
    with pytest.raises(SettingsError, match=message):
        choose_layers(reference("llama"), patterns)


class _Doubled(nn.Linear):
    def forward(self, received):
        return 2 * super().forward(received)


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2000, 2000))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=None, eos_token_id=0, pad_token_id=7,
        )
    )  # fmt: skip


def test_the_padding_token_of_an_embedding_is_not_trained():
    model = ReferenceModel(llama().double(), NoTokenizer())
    engine = PerExample(model, choose_layers(model, ["embedding"]))
    row = Example(np.array([7, 3, 7, 4], dtype=np.int32))
    expected = autograd(model, row)["model.embed_tokens.weight"]
    (result,) = held(engine, [row])
    assert not expected[7].any()
    torch.testing.assert_close(result[0], expected, rtol=0, atol=CLOSE)


def test_a_module_with_behaviour_beyond_its_type_is_refused():
    network = llama()
    network.model.layers[0].mlp.up_proj = _Doubled(32, 48, bias=False)
    model = ReferenceModel(network, NoTokenizer())
    with pytest.raises(ModelError, match=r"up_proj \(_Doubled\) .*weight"):
        PerExample(model, choose_layers(model, ["all"]))
    assert PerExample(model, choose_layers(model, ["all", "!*.up_proj"])).calls


def test_parameters_without_per_example_gradients_are_refused():
    network = llama()
    network.model.table = _Table()
    model = ReferenceModel(network, NoTokenizer())
    with pytest.raises(ModelError, match=r"model.table \(_Table, 4,000,000 "):
        choose_layers(model, ["all"])
    network.model.table = nn.Linear(3, 4)
    with pytest.raises(ModelError, match=r"model.table .*loss of a row"):
        PerExample(model, choose_layers(model, ["all"]))


@pytest.mark.gpu
def test_results_on_a_gpu_equal_those_on_a_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = []
    for device in ("cpu", "cuda"):
        model = reference("llama-tied", torch.float32)
        model = ReferenceModel(model.model.to(device), NoTokenizer(), batch_tokens=64)
        engine = PerExample(model, choose_layers(model, ["all"]))
        values.append(Featurizer.with_projection(engine, 32, seed=0, tokens=10).features(rows())[0])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-3, atol=1e-4)
