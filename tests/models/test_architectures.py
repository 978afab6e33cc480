"""Tiny random models of common architectures: the head is detected, and relevance equals autograd of the head."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grasp.errors import ModelError, TargetError
from grasp.kernels.output_layer import output_layer_relevance, prepare_targets
from grasp.kernels.whitening import Whitener
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.checkpoint import text_config_of
from grasp.models.forward_pass import extract
from grasp.models.tokenizer import train_tokenizer
from grasp.settings import ModelSettings
from grasp.targets.units import Unit, UnitSet
from tests.rounding import rounding

V, H = 60, 32
SHAPE = {"vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
SHAPE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ARCHITECTURES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "gpt2": {"n_embd": H, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "olmo2": {},
    "smollm3": {},
    "deepseek_v3": {**EXPERTS, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}
ROWS = [np.array(ids, dtype=np.int32) for ids in ([3, 14, 15, 9, 2, 6, 5, 35], [8, 9, 7, 9, 3], [2, 38, 46, 26, 43, 3])]
MASKS = [None, np.array([0, 0, 1, 0, 1], bool), 3]


def model_of(name: str) -> ReferenceModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **ARCHITECTURES.get(name, {})})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return ReferenceModel(model, tokenizer=None)


def gradient(reference: ReferenceModel, row: np.ndarray, loss_mask: np.ndarray) -> torch.Tensor:
    """Return the gradient of the mean loss by the output layer's weight, with the model's own forward pass."""
    weight = reference.head.linear.weight.requires_grad_(True)
    ids = torch.from_numpy(row.astype(np.int64))[None]
    logits = reference.model(input_ids=ids, use_cache=False).logits[0, :-1]
    chosen = torch.from_numpy(loss_mask[1:])
    loss = torch.nn.functional.cross_entropy(logits[chosen].double(), ids[0, 1:][chosen])
    (result,) = torch.autograd.grad(loss, weight)
    weight.requires_grad_(False)
    return result


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_token_relevance_is_the_inner_product_of_gradients_of_the_head(name):
    reference = model_of(name)
    reference.check()
    ids, loss_mask = pad_rows(ROWS, MASKS)
    features = extract(reference, ids, loss_mask, "all", V)
    plain = Whitener(mean_H=np.zeros(H), map_HH=np.eye(H), precondition_V=np.ones(V))
    hidden, residual, row = features.hidden_PH, features.residual, features.row_P
    targets = prepare_targets(hidden, residual, row, len(ROWS), plain, 8)
    relevance = output_layer_relevance(targets, hidden, residual, row, len(ROWS))
    gradients = [gradient(reference, r, loss_mask[b, : len(r)].numpy()).flatten() for b, r in enumerate(ROWS)]
    expected = torch.stack(gradients) @ torch.stack(gradients).T
    # two layers of H to 48, the head, and on either side a gradient of V x H
    terms = 2 * (4 * H + 48) + H + 2 * V * H
    torch.testing.assert_close(relevance, expected, rtol=0, atol=rounding(terms, expected))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    train_tokenizer(["water is wet"] * 3, vocab_size=300).save_pretrained(path)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**SHAPE, "vocab_size": 300})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_directory_is_loaded_with_the_adapter_merged(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    model = ReferenceModel.load(ModelSettings(path=str(tmp_path / "adapter"), device="cpu"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits[0]
        terms = 2 * (4 * H + 48) + H
        torch.testing.assert_close(model.logits(model.hidden(ids)[0]), expected, rtol=0, atol=rounding(terms, expected))
    bare = ReferenceModel.load(ModelSettings(path=str(checkpoint), device="cpu"))
    assert model.fingerprint() != bare.fingerprint()
    assert model.tokenizer.fingerprint == bare.tokenizer.fingerprint


@pytest.mark.filterwarnings("ignore")
def test_merging_an_adapter_of_repeated_layers_keeps_their_difference(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    n_layers = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    options = {"target_modules": ["q_proj"], "layer_replication": [[0, n_layers], [0, n_layers]]}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    model = ReferenceModel.load(ModelSettings(path=str(tmp_path / "adapter"), device="cpu"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits[0]
        terms = 4 * (4 * H + 48) + H
        torch.testing.assert_close(model.logits(model.hidden(ids)[0]), expected, rtol=0, atol=rounding(terms, expected))


BASE = 300  # tokens of `checkpoint`
ADDED_TOKENS = [BASE - 1, BASE, BASE + 1]  # of which the base model lacks the last two


def save_resized(checkpoint, directory, vocab_size, save_embedding_layers="auto", **options):
    """Save a random adapter of a model that was resized to a vocabulary, and return its model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    base.resize_token_embeddings(vocab_size, mean_resizing=False)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options})
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name:
            torch.nn.init.normal_(parameter.data)
    adapted.save_pretrained(directory, save_embedding_layers=save_embedding_layers)
    return adapted.eval()


@pytest.mark.filterwarnings("ignore")  # peft: about resized and tied embeddings
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "options"),
    [
        (BASE + 2, {}),  # peft saves embeddings and output layer of a resized model
        (BASE + 2, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (BASE + 2, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        (BASE + 2, {"trainable_token_indices": ADDED_TOKENS}),
        (BASE + 6, {"trainable_token_indices": ADDED_TOKENS}),  # padded
        (BASE - 4, {"modules_to_save": ["embed_tokens", "lm_head"]}),  # shrunk to the tokenizer
        (BASE, {"trainable_token_indices": [3, 7]}),
    ],
    ids=str,
)
def test_an_adapter_with_another_vocabulary_resizes_its_model(checkpoint, tmp_path, tied, vocab_size, options):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    if tied:
        config = AutoConfig.from_pretrained(base, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    adapted = save_resized(base, tmp_path / "adapter", vocab_size, **options)
    settings = ModelSettings(path=str(tmp_path / "adapter"), device="cpu")
    model = ReferenceModel.load(settings)
    assert model.vocab_size == text_config_of(settings).vocab_size == vocab_size
    ids = torch.arange(vocab_size - 9, vocab_size)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits[0]
        terms = 2 * (4 * H + 48) + H
        torch.testing.assert_close(model.logits(model.hidden(ids)[0]), expected, rtol=0, atol=rounding(terms, expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["embed_tokens"]}, f"has {BASE + 2} tokens, its base model {BASE}.*save_embedding_layers"),
        (
            {"trainable_token_indices": ADDED_TOKENS},
            f"has {BASE + 2} tokens, its base model {BASE}.*save_embedding_layers",
        ),
        ({"target_modules": ["lm_head"]}, r"does not fit its model.*size mismatch.*merge_and_unload\(\)"),
    ],
    ids=str,
)
def test_an_adapter_that_lacks_added_entries_is_refused(checkpoint, tmp_path, options, message):
    save_resized(checkpoint, tmp_path / "adapter", BASE + 2, save_embedding_layers=False, **options)
    with pytest.raises(ModelError, match=message):
        ReferenceModel.load(ModelSettings(path=str(tmp_path / "adapter"), device="cpu"))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised.*bitsandbytes"),
        ("config.json", {"max_position_embeddings": "x"}, "max_position_embeddings.*int.*str"),
        ("adapter_config.json", {"peft_type": "PROMPT_TUNING"}, "adapter.*PROMPT_TUNING"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_by_name(checkpoint, tmp_path, file, changes, message):
    place = shutil.copytree(checkpoint, tmp_path / "odd")
    known = json.loads((place / file).read_text()) if (place / file).exists() else {}
    (place / file).write_text(json.dumps(known | changes))
    with pytest.raises(ModelError, match=message):
        ReferenceModel.load(ModelSettings(path=str(place), device="cpu"))


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [("gpt2", "n_positions", 10**12), ("gpt2", "n_layer", 10**9), ("opt", "max_position_embeddings", 10**9)],
)
def test_sizes_for_which_a_checkpoint_lacks_the_weights_are_refused_at_once(tmp_path, kind, name, size):
    config = AutoConfig.for_model(kind, **{**SHAPE, **ARCHITECTURES.get(kind, {})})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: size}))
    with pytest.raises(ModelError, match=f"{name} 1,000.*weights"):
        ReferenceModel.load(ModelSettings(path=str(tmp_path), device="cpu"))


def test_a_tokenizer_may_have_more_entries_than_the_model(checkpoint, tmp_path):
    """Only token ids beyond the vocabulary that occur in a text or unit are refused."""
    place = shutil.copytree(checkpoint, tmp_path / "model")
    train_tokenizer(["water is wet"] * 3, vocab_size=300).save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens([f"<extra {k}>" for k in range(400)])
    tokenizer.save_pretrained(place)
    model = ReferenceModel.load(ModelSettings(path=str(place), device="cpu"))
    assert len(model.tokenizer.tokenizer) > 300
    assert model.tokenizer.vocab_size == 300
    unit = Unit(target="t", unit_id="u", prompt="water is", completion=" <extra 399>")
    with pytest.raises(TargetError, match=r"token id \d+.*vocabulary of 300"):
        UnitSet((unit,)).tokenize(model.tokenizer, 32)


def test_inconsistent_sizes_are_refused(checkpoint, tmp_path):
    config = AutoConfig.for_model("gptj", **{**SHAPE, "vocab_size": 300})  # rotates 64 dimensions of heads that have 8
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelError, match=r"GPTJForCausalLM.*float32.*size"):
        ReferenceModel.load(ModelSettings(path=str(tmp_path), device="cpu"))
