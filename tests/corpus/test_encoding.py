"""Laws: a text is encoded once, by its tokenizer; loss masks are those of evaluation harnesses and trainers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grasp.corpus.conversations import Conversation
from grasp.corpus.encoding import ModelText, encode_texts
from grasp.corpus.packing import pack
from grasp.errors import CorpusError
from grasp.models.tokenizer import HfTokenizer
from grasp.targets import Unit, UnitSet
from tests.corpus.tokenizers import BOS, EOS, KINDS, MARKS, WithoutOffsets, tiny
from tests.corpus.world import document, settings_for

PARTS = ("un", "likely", " likely", "Answer:", " ", "\n", "\n\n", "12", "345", ".", ":", "it is", "words", "é", "東")
WORDS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}\n{% else %}<|assistant|>\n"
    "{% generation %}{{ m.content }}{% endgeneration %}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def turns(*words):
    return tuple({"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(words))


def plain_ids(tokenizer: HfTokenizer, text: str) -> list[int]:
    """Return the ids of the tokenizer itself, without special tokens at the end."""
    ids = tokenizer.tokenizer(text)["input_ids"]
    suffix = tokenizer._added_ids[1]
    return ids[: len(ids) - len(suffix)]


def harness_context(tokenizer: HfTokenizer, prompt: str, whole: list[int]) -> int:
    """Return the context length of lm-evaluation-harness, which moves white space to the continuation."""
    return min(len(plain_ids(tokenizer, prompt)), len(whole) - 1)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(prompt=WORDS, completion=WORDS)
def test_a_pair_is_encoded_as_one_text_with_the_context_length_of_the_harness(kind, bos, prompt, completion):
    tokenizer = tiny(kind, bos=bos)
    assume(prompt.strip() and completion.strip())
    text = ModelText(prompt + completion, ((len(prompt), len(prompt + completion)),), "pair")
    (tokens,) = encode_texts([text], tokenizer)
    assert tokens.ids.tolist() == plain_ids(tokenizer, text.text)
    assert tokens.loss_mask is not None
    first = int(np.flatnonzero(tokens.loss_mask)[0])
    assert tokens.loss_mask[first:].all()
    if prompt == prompt.rstrip():
        assert first == harness_context(tokenizer, prompt, tokens.ids.tolist())
        return
    spans = tokenizer.encode_with_spans([text.text])[0][1]
    straddles = [k for k, (start, end) in enumerate(spans, start=tokens.n_prefix) if start < len(prompt) < end]
    if straddles and prompt[spans[straddles[0] - tokens.n_prefix][0] :].isspace():
        assert first == straddles[0]  # as if that white space had been moved to the completion
    elif not straddles:
        assert first == tokens.n_prefix + sum(end <= len(prompt) for _, end in spans)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(words=st.lists(WORDS, min_size=2, max_size=4).filter(lambda words: len(words) % 2 == 0))
def test_the_loss_mask_of_a_chat_is_that_of_transformers(kind, bos, words):
    assume(all(text.strip() for text in words))
    if kind == "byte_trim":  # offsets without white space: transformers finds no token for an answer that ends in it
        words = [text.strip() for text in words]
    tokenizer = tiny(kind, bos=bos, template=GENERATION)
    expected = tokenizer.tokenizer.apply_chat_template(
        list(turns(*words)), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    chat = tokenizer.render(Conversation(turns(*words)))
    (tokens,) = encode_texts([ModelText(chat.text, chat.spans, "chat")], tokenizer)
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokens.loss_mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [GENERATION, PLAIN])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(question=WORDS, answer=WORDS)
def test_an_answer_has_the_same_tokens_and_loss_as_a_row_and_as_a_unit(kind, bos, template, question, answer):
    assume(question.strip() and answer.strip())
    tokenizer = tiny(kind, bos=bos, template=template)
    record = {"conversation": Conversation(turns(question, answer))}
    pair = {"text": question + answer, "answers": ((len(question), len(question + answer)),)}
    unit = Unit("u", "t", question, answer)
    chat_unit = Unit("c", "t", "", "", conversation=record["conversation"])
    for fields, scored in ((record, chat_unit), (pair, unit)):
        corpus_settings = settings_for("none", max_length=400)
        rows = list(pack([_document(**fields)], corpus_settings, tokenizer))
        assume(rows)
        (unit_tokens,) = UnitSet((scored,)).rendered(tokenizer).tokenize(tokenizer, 400)
        (row,) = rows
        loss = np.arange(row.n_tokens) > 0 if row.loss_mask is None else row.loss_mask
        n = len(unit_tokens.input_ids)
        if unit_tokens.input_ids[:1].tolist() != row.input_ids[:1].tolist():
            assume(False)  # an empty prompt, for which a unit has a token to stand in
        assert row.input_ids[:n].tolist() == unit_tokens.input_ids.tolist()
        assert np.flatnonzero(loss[:n]).tolist() == list(range(unit_tokens.first, n))
        assert not loss[n:].any() or fields is pair  # the pair's end of text, which is trained and not evaluated


def _document(**fields):
    return replace(document(0, "x"), **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_those_of_the_tokenizer_and_never_doubled(kind):
    tokenizer = tiny(kind, bos=True)
    (bos_id,) = tokenizer.prefix_ids
    text, text_with_bos = encode_texts([ModelText("it is"), ModelText(f"{BOS}it is")], tokenizer)
    assert text.ids.tolist() == plain_ids(tokenizer, "it is")
    assert text_with_bos.ids.tolist().count(bos_id) == 1
    (chat,) = encode_texts([ModelText("it is", kind="chat")], tokenizer)
    assert bos_id not in chat.ids
    off = HfTokenizer(tokenizer.tokenizer, vocab_size=400, add_bos_token=False)
    on = HfTokenizer(tiny(kind).tokenizer, vocab_size=400, add_bos_token=True)
    assert (off.prefix_ids, on.prefix_ids, tiny(kind).prefix_ids) == ((), (bos_id,), ())
    assert len({off.fingerprint, on.fingerprint, tokenizer.fingerprint, tiny(kind).fingerprint}) == 4
    assert BOS in tokenizer.describe()
    assert "without" in off.describe()
    assert "chats" not in off.describe()
    assert "template" in tiny(kind, template=PLAIN).describe()


@pytest.mark.parametrize("kind", ["byte", "first", "never"])
@settings(max_examples=40)
@given(prompt=WORDS, completion=WORDS)
def test_the_context_length_without_offsets_is_the_same_or_refused(kind, prompt, completion):
    assume(prompt.strip() and completion.strip())
    tokenizer = tiny(kind)
    for text in (
        ModelText(prompt + completion, ((len(prompt), len(prompt + completion)),), "pair"),
        ModelText(prompt + completion + "\n", ((len(prompt), len(prompt + completion)),), "chat"),
    ):
        (expected,) = encode_texts([text], tokenizer)
        try:
            (actual,) = encode_texts([text], WithoutOffsets(tokenizer))
        except CorpusError:
            assert text.kind == "chat"
            continue
        assert actual.ids.tolist() == expected.ids.tolist()
        if prompt == prompt.rstrip() or text.kind == "chat":
            assert actual.loss_mask.tolist() == expected.loss_mask.tolist()


@given(st.integers(3, 9), st.lists(WORDS, min_size=1, max_size=4))
def test_every_row_begins_with_bos_and_texts_are_complete(length, texts):
    tokenizer = tiny("byte", bos=True)
    (bos_id,), (eos_id,) = tokenizer.prefix_ids, tokenizer.suffix_ids
    documents = [document(i, text) for i, text in enumerate(texts)]
    rows = list(pack(documents, settings_for("none", max_length=length, shortest_end=1), tokenizer))
    assert all(row.input_ids[0] == bos_id and len(row.input_ids) <= length for row in rows)
    results = [token for row in rows for token in row.input_ids.tolist() if token != bos_id]
    texts = [text for text in texts if text and not text.isspace()]
    assert results == [token for ids in tokenizer.encode(texts) for token in (*ids, eos_id)]


def test_truncated_rows_retain_their_bos():
    template = f"{BOS}{PLAIN}"
    tokenizer = tiny("byte", bos=True, template=template)
    chat = _document(conversation=Conversation(turns("words " * 30, "it is")))
    (row,) = pack([chat], settings_for("none", max_length=12), tokenizer)
    assert row.input_ids[0] == tokenizer.prefix_ids[0]
    assert len(row.input_ids) <= 12
    assert tokenizer.tokenizer.decode(row.input_ids[row.loss_mask]) == "it is"
    (unit,) = UnitSet((Unit("u", "t", "words " * 30, " it is"),)).tokenize(tokenizer, 12)
    assert unit.input_ids[0] == tokenizer.prefix_ids[0]
    assert tokenizer.tokenizer.decode(unit.input_ids[unit.first :]) == " it is"
    assert MARKS[1] in tokenizer.tokenizer.decode(row.input_ids)
    units = Unit("c", "t", "", "", conversation=chat.conversation), Unit("p", "t", BOS + "words " * 30, " it is")
    scored = UnitSet(units).rendered(tokenizer).tokenize(tokenizer, 12)
    for unit in scored:
        assert (len(unit.input_ids), unit.input_ids[0]) == (12, tokenizer.prefix_ids[0])
        assert tokenizer.tokenizer.decode(unit.input_ids[unit.first :]).strip() == "it is"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_ends_with_eos_gets_no_second_one(kind):
    tokenizer = tiny(kind)
    (eos_id,) = tokenizer.suffix_ids
    pair = {"text": f"it is{EOS}", "answers": ((0, 5 + len(EOS)),)}
    for fields in ({"text": f"it is{EOS}"}, {"text": "it is"}, pair):
        (row,) = pack([_document(**fields)], settings_for("none", max_length=40), tokenizer)
        assert row.input_ids.tolist().count(eos_id) == 1
        assert row.input_ids[-1] == eos_id
        assert row.span == (0, 0, len(fields["text"]))
