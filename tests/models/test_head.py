"""Law: gradients flow through the output layer as the model applies it, also if that is not W h + b."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from grasp.errors import ModelError
from grasp.kernels.embedding import hidden_gradient
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import extract
from grasp.models.gradients import Example, PerExample, UnsupportedLayerError, layers_of
from grasp.models.head import OutputHead, output_head
from grasp.models.residuals import sparse_residual
from tests.models.families import make_model
from tests.models.test_zoo import compare
from tests.models.zoo import VOCAB, WIDTH, tiny_model
from tests.rounding import rounding


class NormedLinear(nn.Linear):
    """A head with rows normalised to length 1, as in Baichuan: no row is a fixed multiple of its weight."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, nn.functional.normalize(self.weight), self.bias)


class ScaledLinear(nn.Linear):
    """A head with a separate factor for each logit."""

    least = -1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor_V = torch.linspace(self.least, 2, self.out_features, dtype=hidden.dtype)
        return nn.functional.linear(hidden, self.weight) * factor_V + self.bias


class DeadLinear(ScaledLinear):
    """A head with a factor of 0, through which no gradient shows the weight."""

    least = 0.0


class BentLinear(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.relu())


def with_head(kind: type[nn.Linear], *, bias: bool) -> nn.Module:
    model = tiny_model("llama")
    torch.manual_seed(1)
    model.lm_head = kind(WIDTH, VOCAB, bias=bias).double()
    return model


def adapted(**options: object) -> nn.Module:
    """Return a model with an unmerged adapter that changes its output layer and its body considerably."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny_model("llama"), config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lm_head" in name and parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.get_base_model()


@pytest.mark.parametrize(
    ("kind", "bias", "is_weight"),
    [
        (nn.Linear, True, True),
        (ScaledLinear, True, True),
        (DeadLinear, True, False),
        (NormedLinear, False, False),
        (NormedLinear, True, False),
    ],
)
def test_gradients_flow_through_the_matrix_that_is_applied(kind, bias, is_weight):
    model = with_head(kind, bias=bias)
    compare(model, copy.deepcopy(model))
    assert output_head(model).is_weight == is_weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_factors_of_a_module_are_detected_in_any_dtype(dtype):
    model = tiny_model("dory").to(dtype)
    head = ReferenceModel(model, tokenizer=None).head
    assert head.is_weight
    factor_V = model.lm_head.logit_scale.float() * model.lm_head.logit_scale_factor
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(head.factor_V.float(), factor_V, rtol=4 * eps, atol=0)
    assert torch.equal(head.matrix(), model.lm_head.weight)


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "up_proj", "lm_head"]},
        {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["lora", "saved", "elsewhere"],
)
def test_an_adapter_of_the_output_layer_is_part_of_it(options):
    model = adapted(**options)
    fresh = copy.deepcopy(model)
    gradients, _ = compare(model, fresh)
    names = [name for block in gradients.engine.layers.blocks for name in block.parameters]
    assert names
    assert all("lora_" in name and "lm_head" not in name for name in names)


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_parameters_inside_an_output_layer_are_not_separate_layers():
    reference = ReferenceModel(adapted(target_modules=["q_proj", "lm_head"]), tokenizer=None)
    for name in ("lm_head.base_layer.weight", "lm_head.lora_A.default.weight"):
        with pytest.raises(UnsupportedLayerError, match=f"{name} .*output layer"):
            layers_of(reference, [name])
    reference = ReferenceModel(with_head(NormedLinear, bias=False), tokenizer=None)
    with pytest.raises(UnsupportedLayerError, match=r"lm_head\.weight: .*NormedLinear"):
        layers_of(reference, ["lm_head.weight"])


def test_an_output_layer_that_is_not_linear_is_refused():
    with pytest.raises(ModelError, match=r"BentLinear: .*linear"):
        ReferenceModel(with_head(BentLinear, bias=False), tokenizer=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.37, 1 / 6, 24.0])
def test_a_scale_missing_from_the_configuration_is_detected(scale, dtype):
    head = output_head(Changed(lambda logits: logits * scale).to(dtype))
    terms = VOCAB if dtype == torch.bfloat16 else 1
    assert head.scale == pytest.approx(scale, rel=torch.finfo(dtype).eps / terms**0.5)
    assert head.cap is None


@pytest.mark.parametrize(
    ("changes", "done", "expected"),
    [
        ({"final_logit_softcapping": 3.0}, lambda z: z, (1.0, None)),  # named, and not applied
        ({"logits_soft_cap": 3.0}, lambda z: 3 * torch.tanh(z / 3), (1.0, 3.0)),
        ({"logits_scaling": 4.0}, lambda z: z / 4, (0.25, None)),
        ({"logits_scaling": 4.0}, lambda z: z * 4, (4.0, None)),
        ({"logit_scale": 0.5, "output_logit_soft_cap": 9.0}, lambda z: 9 * torch.tanh(z / 2 / 9), (0.5, 9.0)),
    ],
)
def test_scale_and_cap_are_measured_and_not_read_from_the_configuration(changes, done, expected):
    model = Changed(done)
    for name, value in changes.items():
        setattr(model.config, name, value)
    head = output_head(model)
    assert (head.scale, head.cap) == expected


@pytest.mark.parametrize(
    "done", [lambda z: z + torch.arange(z.shape[-1]), lambda z: 3 * torch.tanh(z / 3), lambda z: z.relu()]
)
def test_other_changes_of_logits_are_refused(done):
    with pytest.raises(ModelError, match=r"Changed: .*logits.*scale"):
        output_head(Changed(done))


class Changed(LlamaForCausalLM):
    """A model that applies a function to its logits."""

    def __init__(self, done):
        super().__init__(make_model("llama").config)
        self.done = done
        self.eval()

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = self.done(output.logits)
        return output


@pytest.mark.parametrize(("kind", "cap"), [(ScaledLinear, None), (nn.Linear, 2.0), (ScaledLinear, 2.0)])
def test_mass_outside_top_k_is_spread_evenly_if_slopes_differ_by_logit(kind, cap):
    torch.manual_seed(2)
    head = OutputHead(kind(WIDTH, VOCAB).requires_grad_(False), scale=1.5, cap=cap)
    hidden, label = 3 * torch.randn(9, WIDTH), torch.randint(0, VOCAB, (9,))
    logits = head.link(head.linear_logits(hidden))
    residual = sparse_residual(logits, label, 6, head.slope(logits))
    weight_VH, factor_V = head.linear.weight.double(), 1.0 if head.factor_V is None else head.factor_V.double()
    expected = []
    for z, y, top_k in zip(logits.double(), label, residual.index_PK, strict=True):
        slope = 1.5 * factor_V * (1.0 if cap is None else 1 - (z / cap) ** 2)
        gradient = (z.softmax(0) - nn.functional.one_hot(y, VOCAB)) * slope
        mask = torch.zeros(VOCAB).double().index_fill(0, top_k, 1.0)
        rest = (gradient * (1 - mask)).sum() / VOCAB
        expected.append(weight_VH.T @ (gradient * mask + rest))
    actual = hidden_gradient(head, residual).double()
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=rounding(WIDTH + VOCAB, weight_VH))


@pytest.mark.parametrize("name", ["plain", "factor", "cap"])
def test_features_of_a_backward_pass_are_those_of_a_forward_pass(name):
    model = (
        with_head(ScaledLinear, bias=True) if name == "factor" else tiny_model("gemma2" if name == "cap" else "llama")
    )
    reference = ReferenceModel(model.double(), tokenizer=None)
    assert (reference.head.cap is not None) == (name == "cap")
    rng = np.random.default_rng(0)
    ids = [rng.integers(VOCAB, size=n).astype(np.int32) for n in (7, 3, 9)]
    masks = [np.arange(len(row)) % 3 > 0 for row in ids]
    expected = extract(reference, *pad_rows(ids, masks), "all", 6)
    parameters = {name for name, _ in model.named_parameters() if "lm_head" not in name}
    engine = PerExample(reference, layers_of(reference, parameters))
    examples = [Example(row, loss_mask=mask) for row, mask in zip(ids, masks, strict=True)]
    actual = engine.run(examples, lambda *_: None, top_k=6).features
    for field in ("hidden_PH", "row_P", "input_P", "loss_B"):
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field), rtol=1e-12, atol=1e-12)
    dense = [torch.zeros(len(batch.row_P), VOCAB).double() for batch in (actual, expected)]
    for total_PV, batch in zip(dense, (actual, expected), strict=True):  # the top k are in no particular order
        total_PV.scatter_add_(1, batch.residual.index_PK, batch.residual.value_PK)
    torch.testing.assert_close(*dense, rtol=1e-12, atol=1e-12)
    assert (actual.residual.truncated_P is None) == (name == "plain")


def test_a_factor_of_one_equals_a_plain_linear_head():
    """Compare a subclass without changes with `nn.Linear`."""

    class Same(nn.Linear):
        pass

    torch.manual_seed(3)
    plain = nn.Linear(WIDTH, VOCAB).requires_grad_(False)
    same = Same(WIDTH, VOCAB).requires_grad_(False)
    same.load_state_dict(plain.state_dict())
    hidden, label = torch.randn(9, WIDTH), torch.randint(0, VOCAB, (9,))
    results = []
    for head in (OutputHead(plain), OutputHead(same)):
        logits = head.linear_logits(hidden)
        results.append(hidden_gradient(head, sparse_residual(logits, label, 6, head.slope(logits))))
    np.testing.assert_array_equal(results[0], results[1])
    assert replace(OutputHead(same), cap=2.0).slope(logits).shape == logits.shape
