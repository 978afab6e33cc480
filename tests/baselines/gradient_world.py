"""Small models and rows for the gradient methods, and slow float64 references by autograd."""

import numpy as np
import torch

from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from tests.models.families import VOCAB, make_model


class NoTokenizer:
    """A tokenizer that is never used by the engine."""


def reference(family: str, dtype: torch.dtype = torch.float64, batch_tokens: int = 64) -> ReferenceModel:
    return ReferenceModel(make_model(family).to(dtype), NoTokenizer(), batch_tokens=batch_tokens)


def rows(n: int = 5, seed: int = 0, longest: int = 14) -> list[Example]:
    generator = np.random.default_rng(seed)
    return [
        Example(generator.integers(1, VOCAB, size=int(generator.integers(2, longest))).astype(np.int32))
        for _ in range(n)
    ]


def units(n: int = 4, seed: int = 1) -> list[Example]:
    generator = np.random.default_rng(seed)
    result = []
    for k in range(n):
        ids = generator.integers(1, VOCAB, size=int(generator.integers(5, 12))).astype(np.int32)
        result.append(Example(ids, first=len(ids) - 1 - k % 3))
    return result


def objective(logits: torch.Tensor, example: Example, output: str = "loss") -> torch.Tensor:
    """Return the mean over labels of the differentiated quantity, from the logits of the model."""
    at = torch.arange(example.first - 1, len(example.input_ids) - 1)
    label = torch.from_numpy(example.input_ids[example.first :].astype(np.int64))
    log_p = torch.log_softmax(logits[at], dim=1).gather(1, label[:, None])[:, 0]
    if output == "loss":
        return -log_p.mean()
    return -(log_p - torch.log1p(-log_p.exp())).mean()


def autograd(model: ReferenceModel, example: Example, output: str = "loss") -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter for one example without a batch."""
    parameters = dict(model.model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    ids = torch.from_numpy(example.input_ids.astype(np.int64))[None]
    loss = objective(model.model(input_ids=ids, use_cache=False).logits[0], example, output)
    result = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    return {
        name: torch.zeros_like(parameter) if grad is None else grad
        for (name, parameter), grad in zip(parameters.items(), result, strict=True)
    }


def flat(gradients: dict[str, torch.Tensor], names: list[str] | None = None) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in names or gradients])
