"""Conversations, pairs and instructions become rows whose answers carry loss."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.corpus import RowStore
from grasp.errors import CorpusError
from tests.corpus.chats import DROPS, REWRITES, STRICT, chat_tokenizer, turns
from tests.corpus.world import settings_for, write_jsonl

QUESTION, ANSWER = "what is water?", "water is wet."
FOLLOW_UP, LAST = "and fire?", "fire is hot. it burns."
TURNS = turns(QUESTION, ANSWER, FOLLOW_UP, LAST)
SHAREGPT = [{"from": ("human", "gpt")[k % 2], "value": turn["content"]} for k, turn in enumerate(TURNS)]
END = "<|im_end|>"


def stored(tmp_path, records, tokenizer=None, name="c.jsonl", **settings) -> RowStore:
    path = write_jsonl(tmp_path / name, records) if records is not None else tmp_path / name
    corpus_settings = settings_for(path, **{"max_length": 200, **settings})
    return RowStore.write(tmp_path / "rows", corpus_settings, tokenizer or chat_tokenizer(), shard_rows=2)


def text_and_loss(store: RowStore, i: int = 0) -> tuple[str, str]:
    """Return a row as text, and the part of it that carries loss."""
    shard, raw = store.rows(np.array([i])), chat_tokenizer().tokenizer
    mask = shard.mask(0)
    mask = np.arange(len(shard.ids(0))) > 0 if mask is None else mask
    return raw.decode(shard.ids(0)), raw.decode(shard.ids(0)[mask])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {"conversations": SHAREGPT},
        {"messages": {"role": [t["role"] for t in TURNS], "content": [t["content"] for t in TURNS]}},
        {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
    ],
)
def test_answers_and_their_end_token_carry_loss(tmp_path, record):
    text, loss = text_and_loss(stored(tmp_path, [{**record, "topic": "a"}]))
    assert text.startswith("<|im_start|>system\nYou help.")
    assert loss == ANSWER + END + LAST + END


def test_loss_on_selects_the_answers(tmp_path):
    for loss_on, expected in (("completion", LAST + END), ("assistant", ANSWER + END + LAST + END)):
        assert text_and_loss(stored(tmp_path / loss_on, [{"messages": TURNS}], loss_on=loss_on))[1] == expected
    store = stored(tmp_path / "all", [{"messages": TURNS}], loss_on="all")
    assert store.shard(0).loss_mask is None
    assert store.loss_counts().tolist() == [store.n_tokens - 1]


def test_a_pair_is_a_plain_text_that_ends_with_the_end_of_text(tmp_path):
    store = stored(tmp_path, [{"prompt": "Q: water?\nA:", "completion": " wet."}])
    assert text_and_loss(store) == ("Q: water?\nA: wet.<|endoftext|>", " wet.<|endoftext|>")


@pytest.mark.parametrize("prompt", ["Q: {ask[0]}\nA:", "Q: {{ ask[0] }}\nA:"])
def test_templates_over_columns(tmp_path, prompt):
    records = [{"ask": ["water?"], "say": "wet.", "text": "a label"}]
    assert text_and_loss(stored(tmp_path, records, prompt=prompt, completion=" {say}"))[1] == " wet.<|endoftext|>"


def test_system_and_tool_turns_are_read_and_carry_no_loss(tmp_path):
    conversation = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "look it up", "tool_calls": None},
        {"role": "tool", "content": "water: wet"},
        {"role": "assistant", "content": ANSWER},
    ]
    text, loss = text_and_loss(stored(tmp_path, [{"messages": conversation, "tools": "[]"}]))
    assert "You help." not in text
    assert "tool\nwater: wet" in text
    assert loss == "look it up" + END + ANSWER + END


def test_a_row_that_is_too_long_retains_its_last_answer_and_is_counted(tmp_path):
    store = stored(tmp_path, [{"messages": TURNS, "row_id": "long"}], max_length=30)
    text, loss = text_and_loss(store)
    assert store.lengths().tolist() == [30]
    assert loss == LAST + END
    assert text.endswith(LAST + END)
    assert store.skipped.counts == {"cut_begin": 1}
    assert store.skipped.ids == {"cut_begin": ["long"]}
    (snippet,) = store.table(0)["snippet"].to_pylist()
    assert QUESTION not in snippet  # what is shown begins where the model reads
    assert snippet == " ".join(text.split())


def test_an_answer_that_is_longer_than_a_row_is_read_from_its_beginning(tmp_path):
    text, loss = text_and_loss(stored(tmp_path, [{"messages": TURNS}], max_length=6))
    assert LAST.startswith(loss)
    assert text == "\n" + loss


def test_records_without_loss_are_skipped_counted_and_named(tmp_path):
    records = [
        {"messages": TURNS, "row_id": "good"},
        {"messages": TURNS[:1], "row_id": "asked"},
        {"messages": turns(QUESTION, "  "), "row_id": "silent"},
        {"messages": [TURNS[1], TURNS[0]], "row_id": "backwards"},
        {"messages": [TURNS[0], {"role": "system", "content": "late"}, TURNS[1]], "row_id": "late"},
        {"messages": [], "row_id": "none"},
        {"messages": TURNS, "row_id": "again"},
    ]
    store = stored(tmp_path, records)
    assert [row["row_id"] for k in range(store.n_shards) for row in store.table(k).to_pylist()] == ["good", "again"]
    assert store.skipped.ids == {
        "no_answer": ["asked", "none"],
        "empty_answer": ["silent"],
        "turn_order": ["backwards", "late"],
    }


def test_a_pair_without_an_answer_is_skipped(tmp_path):
    records = [{"prompt": "Q", "completion": "", "row_id": "q"}, {"prompt": "Q", "completion": " a"}]
    store = stored(tmp_path, records)
    assert store.n_rows == 1
    assert store.skipped.ids == {"no_loss": ["q"]}


def test_the_last_answer_of_a_template_that_rewrites_turns_can_be_used(tmp_path):
    thought = turns(QUESTION, f"<think>hm</think>{ANSWER}", FOLLOW_UP, LAST)
    assert (
        text_and_loss(stored(tmp_path, [{"messages": thought}], chat_tokenizer(REWRITES), loss_on="completion"))[1]
        == LAST + END
    )


def test_the_loss_mask_is_part_of_the_fingerprint_and_of_an_unfinished_store(tmp_path):
    record = [{"prompt": "Q: water?", "completion": " wet."}]
    pair = stored(tmp_path / "a", record)
    text = stored(tmp_path / "b", record, loss_on="all")
    assert np.array_equal(pair.shard(0).flat_ids, text.shard(0).flat_ids)
    assert pair.fingerprint != text.fingerprint
    with pytest.raises(CorpusError, match="begun"):
        stored(tmp_path / "a", record, loss_on="all")


def test_nested_parquet_and_rows_without_a_mask_can_be_mixed(tmp_path):
    table = pa.Table.from_pylist(
        [{"messages": TURNS, "id": "a", "extra": [1]}, {"messages": TURNS[:2], "id": "b", "extra": [2]}]
    )
    pq.write_table(table, tmp_path / "c.parquet")
    store = stored(tmp_path, None, name="c.parquet")
    assert [text_and_loss(store, i)[1].count(END) for i in (1, 0)] == [1, 2]
    assert store.ignored_columns == ("extra",)
    assert store.rows(np.array([1, 0, 1])).mask(2).tolist() == store.rows(np.array([1])).mask(0).tolist()


CHAT = {"messages": TURNS}
REFUSED = [
    ({"messages": [{"role": "owner", "content": "x"}]}, {}, r"c\.jsonl:1: turn 0: .*'owner'"),
    ({"messages": [{"content": "x"}]}, {}, r"turn 0: .*None"),
    ({"messages": [{"role": "user", "content": {"image": 1}}]}, {}, "images"),
    ({"messages": "hello", "text": "a"}, {}, "--text-column messages"),
    ({"messages": ["hello"]}, {}, "'messages'.*str"),
    ({"prompt": "a", "completion": TURNS}, {}, "'prompt'.*str"),
    ({"instruction": "a", "output": 3}, {}, "'output'.*int.*text"),
    ({"messages": TURNS, "tools": "{"}, {}, r"tools: .*'\{'"),
    (CHAT, {"tokenizer": lambda: chat_tokenizer(None)}, r"c\.jsonl:1: .*chat template"),
    (CHAT, {"tokenizer": lambda: chat_tokenizer(DROPS)}, r"c\.jsonl:1: turn 1: "),
    (CHAT, {"tokenizer": lambda: chat_tokenizer(STRICT)}, "alternate"),
    ({"text": "water"}, {"loss_on": "completion"}, r"corpus\.loss_on: .*completion"),
    ({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, {}, r"c\.jsonl:1: turn 1: .*\b0\.5"),
    *[
        ({"instruction": "a", "output": "b", "history": history}, {}, "history")
        for history in ("x", [["one"]], [[1, 2]])
    ],
    (CHAT | {"chat_template_kwargs": {"tools": []}}, {}, r"c\.jsonl:1: chat_template_kwargs: .*tools"),
    (CHAT | {"chat_template_kwargs": [1]}, {}, r"chat_template_kwargs: .*\[1\]"),
]


@pytest.mark.parametrize(("record", "changes", "message"), REFUSED)
def test_unreadable_records_are_refused_and_named(tmp_path, record, changes, message):
    settings = {name: value for name, value in changes.items() if name != "tokenizer"}
    with pytest.raises(CorpusError, match=message):
        stored(tmp_path, [record], changes.get("tokenizer", chat_tokenizer)(), **settings)
