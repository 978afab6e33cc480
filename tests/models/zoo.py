"""A tiny random model of every causal LM type that the installed transformers registers."""

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, WIDTH, LAYERS, HEADS, HEAD_WIDTH, POSITIONS = 61, 32, 2, 4, 8, 64

# Fields of configurations under the names that the types give them.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "dim_head", "v_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dff", "d_inner", "dim_ff", "feed_forward_size", "mlp_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), POSITIONS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 6),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    # windows, chunks and blocks that the rows are longer than
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "attention_chunk_size", "block_size", "local_attention"), 8),
    **dict.fromkeys(("local_attention_window_len", "keep_window_size", "index_block_size", "rel_extent"), 8),
    **dict.fromkeys(("index_head_dim", "mamba_head_dim", "mamba_d_head"), HEAD_WIDTH),
    "index_n_heads": 16,  # so many that no score is a tie: each is a sum of what is positive of products
    "index_topk": 4,
    "type_vocab_size": 2,
    "first_k_dense_replace": 1,
}
TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_eos_token_id",
    "sep_token_id",
)

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD_WIDTH}  # WIDTH expanded twice
ALL_HEADS = {"num_key_value_heads": HEADS}
INDEXED = {"qk_rope_head_dim": 4, "index_head_dim": HEAD_WIDTH}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
ASSISTANT = {
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS},
    **{"enable_moe_block": False, "use_double_wide_mlp": False},
}

# What the sizes above do not give: fields that must agree with one another, and layers of every kind that a type has.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": INDEXED | ALL_HEADS,
    "blt": {
        "patch_size": 3,
        "patching_mode": "static",
        "encoder_hash_byte_group_size": [2],
        "encoder_hash_byte_group_vocab": 50,
        **{part: {"hidden_size_global": WIDTH} for part in ("encoder_config", "decoder_config")},
    },
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "moe_top_k": 2},
    },
    "deepseek_v32": INDEXED | ALL_HEADS,
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": ALL_HEADS,
        "vision_config": {"mlp_layer_types": ["dense"] * LAYERS, "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "dots3_note_text": ALL_HEADS,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {"text_config": ASSISTANT},
    "glm_moe_dsa": INDEXED | ALL_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "inkling_text": {"vocab_size": VOCAB + 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": ALL_HEADS | {"head_dim": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID | ALL_HEADS,
    "zamba2": HYBRID | ALL_HEADS,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

# Types that cannot be made here.
NOT_BUILT = {"gemma3n": "its vision tower needs timm"}
# Types whose own code mixes float32 into a model of float64 and then fails.
SINGLE = {"inkling2_loop_text", "inkling2_text", "xglm"}


def tiny_fields(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the fields of a configuration, nested ones included, for a tiny model."""
    parameters = signature(kind.__init__).parameters
    fields = {name: value for name, value in SMALL.items() if name in parameters}
    fields |= {name: 0 for name in TOKENS if name in parameters and parameters[name].default is not None}
    for name, config_class in kind.sub_configs.items():
        inner = (
            CONFIG_MAPPING[kind.sub_configs_defaults[name].model_type] if config_class is AutoConfig else config_class
        )
        fields[name] = {"model_type": inner.model_type, **tiny_fields(inner)}
    return fields


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with changes applied, recursively."""
    out = dict(fields)
    for name, value in changes.items():
        old = out.get(name)
        out[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a configuration of the type, or of its decoder if the class takes only that."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**merged(tiny_fields(kind), OVERRIDES.get(model_type, {})))
    for field in ("is_decoder", "causal"):  # required to train it as a causal LM
        if hasattr(config, field):
            setattr(config, field, True)
    config_class = MODEL_FOR_CAUSAL_LM_MAPPING[kind].config_class
    inner = [part for name in kind.sub_configs if isinstance(part := getattr(config, name), config_class)]
    return config if isinstance(config, config_class) or not inner else inner[0]


def tiny_model(model_type: str, seed: int = 0) -> nn.Module:
    """Return a model with random weights, in float64 if its code supports it."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    else:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return (model if model_type in SINGLE else model.double()).eval()
