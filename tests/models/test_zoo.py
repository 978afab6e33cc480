"""Law: losses and gradients of every registered causal LM type are those of the model itself, row by row."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from grasp.corpus.store import RowShard
from grasp.errors import ModelError
from grasp.extract.backward import backward_passes
from grasp.features.extract import forward_passes
from grasp.features.gradient_match import SampledGradients
from grasp.features.input_match import hidden_gradient
from grasp.models.causal_lm import ReferenceModel
from grasp.models.head import OutputHead, output_layer
from grasp.models.tokenizer import train_tokenizer
from grasp.settings import FeatureSettings, ModelSettings
from tests.models.zoo import TYPES, VOCAB, tiny_model

LENGTHS = (9, 23, 30, 5)
FEATURES = FeatureSettings(top_k=VOCAB, gradient_coordinates="all", token_positions="all")


def rows() -> RowShard:
    """Rows of different lengths: two of them with loss on all tokens, one on the last ones, one on every other."""
    generator = np.random.default_rng(0)
    offsets = np.cumsum([0, *LENGTHS])
    labelled = np.ones(offsets[-1], dtype=np.bool_)
    labelled[offsets[:-1]] = False
    labelled[offsets[1] : offsets[1] + 12] = False
    labelled[offsets[2] : offsets[3] : 2] = False
    ids = generator.integers(1, VOCAB, size=offsets[-1]).astype(np.int32)
    return RowShard(0, ids, offsets, pa.table({"row_id": list(map(str, range(len(LENGTHS))))}), labelled)


@dataclass
class Own:
    """What autograd gives for one row alone, unpadded, of a model that nothing else has used."""

    loss: float
    parameters: dict[str, torch.Tensor]
    hidden_PH: torch.Tensor
    weight: torch.Tensor | None


def own_numbers(model: nn.Module, ids: np.ndarray, mask: np.ndarray, names) -> Own:
    model = copy.deepcopy(model).requires_grad_(False)
    linear = output_layer(model)
    wanted = {name: parameter.requires_grad_(True) for name, parameter in model.named_parameters() if name in names}
    ids_1L, chosen = torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(mask[1:])

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids_1L, use_cache=False).logits[0, :-1]
        return nn.functional.cross_entropy(logits[chosen].double(), ids_1L[0, 1:][chosen])

    by_row = loss()
    parameters = dict(zip(wanted, torch.autograd.grad(by_row, list(wanted.values()), allow_unused=True) if wanted else ()))
    leaf: list[torch.Tensor] = []

    def cut(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        leaf.append(args[0].detach().requires_grad_(True))
        return (leaf[-1], *args[1:])

    weight = linear.weight.requires_grad_(True)
    handle = linear.register_forward_pre_hook(cut)
    value = loss()
    hidden, by_weight = torch.autograd.grad(value, [leaf[-1], weight], allow_unused=True)
    handle.remove()
    return Own(float(by_row), parameters, hidden[0, :-1][chosen], by_weight)
