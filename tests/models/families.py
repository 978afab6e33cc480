"""Small real models of several families, made from configurations: no download."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    return Gemma2ForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "gpt2-tied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "gemma2-soft-cap": _gemma2,
    "cohere-logit-scale": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite-logits-scaling": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "phi-head-bias": lambda: PhiForCausalLM(PhiConfig(**{**SHAPE, "num_key_value_heads": 4})),
}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a small model with weights large enough that its logits differ."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


EVERY_FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
