"""Law: losses and gradients of every causal LM type equal those of the model for each row, or it is refused at load.

The page that lists the types, docs/howto/model_types.md, is written by `python -m tools.model_types`.
"""

import copy
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from torch import nn

from grasp.corpus.row_store import TokenRows
from grasp.errors import ModelError
from grasp.kernels.coordinates import SampledGradients
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import BatchFeatures, forward_passes
from grasp.models.gradients import Block, LayerSet
from grasp.models.head import output_layer
from grasp.models.residuals import hidden_gradient
from grasp.models.tokenizer import train_tokenizer
from grasp.pipeline.model_pass import ModelPass
from grasp.settings import FeatureSettings, ModelSettings
from tests.models.zoo import LAYERS, NOT_BUILT, POSITIONS, TYPES, VOCAB, WIDTH, tiny_model
from tests.rounding import rounding

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "model_types.md"
FEATURES = FeatureSettings(top_k=VOCAB, gradient_coordinates="all", positions="all")
# Layers with four maps of WIDTH and one of 48, attention over all positions, the head. Models of float64 compute parts
# in float32 (norms, states of recurrent layers, routers), so that is the dtype that counts.
TERMS = LAYERS * (4 * WIDTH + 48 + POSITIONS) + WIDTH + VOCAB
LEAST_SHARE = 1e-3  # of the largest gradient: smaller ones are what is left of sums as large as that
ADVICE = r"expected|not a causal LM|token ids alone"


@dataclass(frozen=True)
class Verdict:
    """The outcome for a type: why it is refused, or which parameters with a gradient the gradient kernel excludes."""

    refused: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowNumbers:
    """Results of autograd for one unpadded row, by a model that has seen no other row."""

    loss: float
    by_parameter: Mapping[str, torch.Tensor]  # those that take part
    by_state_PH: torch.Tensor  # by what the output layer receives
    by_weight: torch.Tensor  # by the output layer's weight, as it is used there


def corpus(longest: int) -> TokenRows:
    """Return rows of different lengths: two with loss on all tokens, one on every second, one on its last tokens."""
    lengths = (9, longest, 23, 5)
    offsets = np.cumsum([0, *lengths])
    loss_mask = np.ones(offsets[-1], dtype=np.bool_)
    loss_mask[offsets[1] : offsets[2] : 2] = False
    loss_mask[offsets[2] : offsets[2] + 12] = False
    loss_mask[offsets[:-1]] = False
    ids = np.random.default_rng(0).integers(1, VOCAB, size=offsets[-1]).astype(np.int32)
    return TokenRows(ids, offsets, pa.table({"row_id": [str(i) for i in range(len(lengths))]}), loss_mask)


def numbers_of_row(model: nn.Module, ids: np.ndarray, mask: np.ndarray) -> RowNumbers:
    model = copy.deepcopy(model)
    linear = output_layer(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ids_1L, chosen = torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(mask[1:])
    received: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids_1L, use_cache=False).logits[0, :-1]
        return nn.functional.cross_entropy(logits[chosen].double(), ids_1L[0, 1:][chosen])

    def cut(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        received.append(args[0].detach().requires_grad_())
        return received[-1], *args[1:]

    whole = loss()
    gradients = torch.autograd.grad(whole, list(named.values()), allow_unused=True)
    linear.weight.requires_grad_()
    with linear.register_forward_pre_hook(cut):  # its weight may be tied to the embedding: the body's part is cut off
        of_head = loss()
    by_state, by_weight = torch.autograd.grad(of_head, [received[-1], linear.weight])
    by_parameter = {name: part for name, part in zip(named, gradients, strict=True) if part is not None}
    return RowNumbers(whole.item(), by_parameter, by_state[0, :-1][chosen], by_weight)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, least: float = 0.0, what: str) -> None:
    scale = max(float(expected.abs().max()), least)
    worst = float((actual.double() - expected.double()).abs().max())
    assert worst <= rounding(TERMS, scale), f"{what}: off by {worst:.3g}, numbers up to {scale:.3g}"


def check_row(model: ReferenceModel, features: BatchFeatures, b: int, expected: RowNumbers, loss: torch.Tensor) -> None:
    """Compare the loss, and the gradients by the hidden states and by the output layer's weight."""
    assert_close(loss, torch.tensor(expected.loss), what="loss")
    chosen = features.row_P == b
    residual, hidden_PH = features.residual.select(chosen), features.hidden_PH[chosen]
    assert_close(hidden_gradient(model.head, residual) / len(hidden_PH), expected.by_state_PH, what="by hidden states")
    if model.head.is_weight:
        residual_PV = hidden_PH.new_zeros(len(hidden_PH), model.vocab_size)
        residual_PV.scatter_add_(1, residual.index_PK, residual.value_PK)
        assert_close(residual_PV.T @ hidden_PH / len(hidden_PH), expected.by_weight, what="by the output layer")


def gradient_of_block(block: Block, layers: LayerSet, root: nn.Module, expected: RowNumbers) -> torch.Tensor:
    """Return the gradient (left, right) of the parameters of a block."""
    named = dict(root.named_parameters())
    parts = {name: expected.by_parameter.get(name, torch.zeros_like(named[name])) for name in block.parameters}
    if "vector" in block.kinds:
        return torch.cat([part.flatten() for part in parts.values()])[None]
    module = next(module for module, number in layers.modules if layers.blocks[number] is block)
    roles = {id(parameter): role for role, parameter in module.named_parameters(recurse=False)}
    by_role = {roles[id(named[name])]: part for name, part in parts.items()}
    matrices = [by_role["weight"].T if block.transposed else by_role["weight"]] if block.weight else []
    return torch.cat([*matrices, *([by_role["bias"][:, None]] if block.bias else [])], dim=1)


def compare(model: nn.Module, fresh: nn.Module) -> tuple[SampledGradients, list[RowNumbers]]:
    """Compare GRASP's numbers for a padded batch with those of each row alone, by a copy that has seen no row."""
    reference = ReferenceModel(model, tokenizer=None)
    reference.check()
    rows = corpus(min(reference.context or 30, POSITIONS))
    row_numbers = [numbers_of_row(fresh, rows.ids(i), rows.mask(i)) for i in range(len(rows))]
    for index, features in forward_passes(reference, rows, "all", VOCAB):
        assert len(index) == len(rows)
        losses = features.row_loss(len(index))
        for b, i in enumerate(index):
            check_row(reference, features, b, row_numbers[i], losses[b])
    chosen = SampledGradients.choose(reference, FEATURES)
    gradients = SampledGradients(chosen.engine, chosen.sample, 1024, chosen.skipped_layers)
    layers = gradients.engine.layers
    for index, features, sampled_BK in ModelPass(reference, FEATURES, gradients)._run_model(rows):
        assert len(index) == len(rows)
        losses = features.row_loss(len(index))
        for b, i in enumerate(index):
            check_row(reference, features, b, row_numbers[i], losses[b])
            least = LEAST_SHARE * max(float(part.abs().max()) for part in row_numbers[i].by_parameter.values())
            for block, tile in zip(layers.blocks, gradients.sample.tiles, strict=True):
                actual = sampled_BK[b, tile.start : tile.start + tile.size].view(block.left, block.right)
                expected = gradient_of_block(block, layers, reference.model, row_numbers[i])
                assert_close(actual, expected, least=least, what=f"by {block.name}")
    return gradients, row_numbers


def examine(model_type: str) -> Verdict:
    """Return the verdict on a tiny model of the type."""
    model = tiny_model(model_type)
    fresh = copy.deepcopy(model)
    tokenizer = train_tokenizer(["water is wet"], vocab_size=300)
    try:
        ReferenceModel.from_model(
            copy.deepcopy(model).float(), tokenizer, ModelSettings(path=model_type, device="cpu", dtype="float32")
        )
    except ModelError as err:
        return Verdict(refused=str(err))
    gradients, row_numbers = compare(model, fresh)
    chosen = {name for block in gradients.engine.layers.blocks for name in block.parameters}
    tables = [module for module in fresh.modules() if isinstance(module, nn.Embedding)]
    outside = {id(part) for module in (*tables, output_layer(fresh)) for part in module.parameters()}
    body = {name for name, part in fresh.named_parameters() if id(part) not in outside}
    return Verdict(left_out=tuple(sorted(body & set(row_numbers[0].by_parameter) - chosen)))


def listed() -> dict[str, bool]:
    """Return the types that the page lists, and whether they are supported."""
    text = PAGE.read_text(encoding="utf-8")
    return {
        name: kind == "yes" for name, kind in re.findall(r"^\| `([\w-]+)` \| (yes|refused|not tested) \|", text, re.M)
    }


KNOWN = [name for name in TYPES if name in listed()]
FEW = random.Random(0).sample(KNOWN, len(KNOWN) // 10)


@pytest.mark.filterwarnings("ignore")  # of transformers, about configurations that nobody would train
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in KNOWN]
)
def test_results_of_a_type_equal_those_of_its_model_or_it_is_refused(model_type):
    if model_type in NOT_BUILT:
        pytest.skip(NOT_BUILT[model_type])
    verdict = examine(model_type)
    assert (verdict.refused is None) == listed()[model_type]
    if verdict.refused is not None:
        assert re.search(ADVICE, verdict.refused)
        assert "\n" not in verdict.refused


def test_the_page_lists_the_types_of_its_version_of_transformers():
    version = re.search(r"transformers ([\d.]+)", PAGE.read_text(encoding="utf-8"))
    assert version is not None
    if version[1] == transformers.__version__:  # another version has other types
        assert set(listed()) == set(TYPES)
