"""The architecture of models that are trained from scratch: sizes, and a new model of `transformers`."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.models.checkpoint import TRAIN_FIELD
from grasp.seeds import stream
from grasp.settings import Settings

Size = Annotated[int, Field(ge=1)]


class LlamaShape(Settings):
    """Sizes of a Llama model with as many key and value heads as query heads."""

    vocab_size: Size
    hidden: Size
    intermediate: Size
    layers: Size
    heads: Size
    context: Annotated[int, Field(ge=2)]
    tied: bool = False

    @property
    def n_parameters(self) -> int:
        """Return the number of parameters."""
        embeddings = self.vocab_size * self.hidden * (1 if self.tied else 2)
        layer = self.hidden * (4 * self.hidden + 3 * self.intermediate + 2)  # attention, feed-forward, two norms
        return embeddings + self.layers * layer + self.hidden

    def config(self, eos_id: int | None = None) -> LlamaConfig:
        """Return the Hugging Face configuration of the model."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=eos_id,
            **{TRAIN_FIELD: "new"},
        )


def new_llama(shape: LlamaShape, seed: int, eos_id: int | None = None) -> LlamaForCausalLM:
    """Return a new model in float32 on the CPU.

    Matrices are normal with standard deviation 0.02, as in Transformers, but each has a random stream of its own, so
    that its values depend on the seed, its name and its size only. Gains are 1.
    """
    with torch.random.fork_rng(devices=[]):  # its own initialisation must not advance the caller's generator
        model = LlamaForCausalLM(shape.config(eos_id))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                values = stream(seed, "init", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(values).mul_(0.02))
    return model.eval()
