"""Chats become the text and the loss mask of trainers; records that no template can write are skipped and named."""

import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.corpus.conversations import unread_notes
from grasp.errors import CorpusError
from grasp.models.tokenizer import HfTokenizer
from grasp.settings import TargetSettings
from grasp.targets.load import load_units
from grasp.text import skipped_lines
from tests.corpus.chats import CHATML, DROPS, MARKED, REWRITES, chat_tokenizer, turns
from tests.corpus.test_conversations import ANSWER, END, FOLLOW_UP, LAST, QUESTION, TURNS, stored, text_and_loss

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
AS_TEXT = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED = '<call>weather {"city": "Paris"}</call>'
WITH_CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}",
)
JOINS_TEXT = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
PRINTS = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")
REASONS = CHATML.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content }}"
)


def calling(call, content=None, **turn) -> list[dict]:
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": content, "tool_calls": call, **turn},
        {"role": "tool", "content": "wet", "name": "weather"},
        {"role": "assistant", "content": ANSWER},
    ]


def marked(**marks) -> list[dict]:
    """Return the turns with these fields, each a value for every answer."""
    turns_K = [dict(turn) for turn in TURNS]
    for name, values in marks.items():
        for turn, value in zip(turns_K[1::2], values, strict=True):
            turn[name] = value
    return turns_K


UNTRAINED = [("weight", (0, 1)), ("train", (False, True)), ("weight", (0.0, None))]


@pytest.mark.parametrize(("flag", "values"), UNTRAINED)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_marked_untrained_carry_no_loss(tmp_path, flag, values, template):
    store = stored(tmp_path, [{"messages": marked(**{flag: values})}], chat_tokenizer(template))
    whole = stored(tmp_path / "plain", [{"messages": TURNS}], chat_tokenizer(template))
    assert text_and_loss(store) == (text_and_loss(whole)[0], LAST + END)
    last_is_untrained = [{"messages": marked(**{flag: values[::-1]})}]
    assert text_and_loss(stored(tmp_path / "c", last_is_untrained, loss_on="completion"))[1] == ANSWER + END


WATER = {"output": ANSWER, "instruction": "what is", "input": "water?"}
SAME_CHATS = [  # an instruction, and the turns that it stands for
    (
        {"instruction": FOLLOW_UP, "output": LAST, "history": [[QUESTION, ANSWER]], "system": "You help."},
        TURNS,
    ),
    (WATER | {"history": []}, turns("what is\nwater?", ANSWER)),
    (WATER, turns("what is\n\nwater?", ANSWER)),
]


@pytest.mark.parametrize(("record", "messages"), SAME_CHATS)
def test_an_instruction_is_joined_as_in_its_format(tmp_path, record, messages):
    expected = text_and_loss(stored(tmp_path / "turns", [{"messages": messages}]))
    assert text_and_loss(stored(tmp_path, [record])) == expected


def called(turn) -> list[dict]:
    return [{"from": "human", "value": QUESTION}, turn]


STRICT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML
SKIPPED = [  # why a conversation is left out, its turns, and the template
    ("untrained", marked(weight=(0, 0)), CHATML),
    ("trained_user", [TURNS[0] | {"train": True}, *TURNS[1:]], CHATML),
    ("bad_call", called({"from": "function_call", "value": "weather(Paris)"}), CHATML),
    ("bad_call", called({"from": "gpt", "value": "", "function_call": {"name": "weather"}}), CHATML),
    ("bad_call", called({"from": "gpt", "value": "hm", "function_call": "auto"}), CHATML),
    ("refused", [{"role": "system", "content": "be kind"}, *TURNS], STRICT_SYSTEM),
]


@pytest.mark.parametrize(("reason", "messages", "template"), SKIPPED)
def test_conversations_that_cannot_be_trained_on_are_counted_and_named(tmp_path, reason, messages, template):
    store = stored(tmp_path, [{"messages": messages, "id": "odd"}, {"messages": TURNS}], chat_tokenizer(template))
    assert (store.n_rows, store.skipped.ids) == (1, {reason: ["odd"]})
    assert "c.jsonl:1" in store.skipped.examples[reason][0]


@pytest.mark.parametrize("template", [WITH_CALLS, JOINS_TEXT, PRINTS])
@pytest.mark.parametrize(
    "messages",
    [
        calling([CALL]),
        calling([AS_TEXT]),
        calling(json.dumps([CALL])),
        calling(json.dumps([AS_TEXT]), ""),
        calling(None, function_call=CALL["function"]),
        calling("", function_call=json.dumps(CALL["function"])),
        [
            {"from": "human", "value": QUESTION},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
            {"from": "observation", "value": "wet"},
            {"from": "gpt", "value": ANSWER},
        ],
    ],
)
def test_tool_calls_are_rendered_alike_in_every_format(tmp_path, messages, template):
    text, loss = text_and_loss(stored(tmp_path, [{"messages": messages}], chat_tokenizer(template)))
    assert loss == CALLED + END + ANSWER + END
    assert f"tool\nwet{END}" in text


def test_null_members_that_a_table_adds_to_records_are_absent(tmp_path):
    other = {"type": "function", "function": {"name": "send", "arguments": {"to": "Ann", "text": "hi"}}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "send")]
    records = [
        {"messages": calling([CALL]), "tools": tools[:1]},
        {"messages": calling([other], "", tool_call_id="x"), "tools": [tools[1] | {"strict": True}]},
    ]
    template = "{{ tools | tojson }}" + WITH_CALLS
    lines = stored(tmp_path / "lines", records, chat_tokenizer(template))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    table = stored(tmp_path, None, chat_tokenizer(template), name="c.parquet")
    assert [text_and_loss(table, i) for i in (0, 1)] == [text_and_loss(lines, i) for i in (0, 1)]
    assert "null" not in text_and_loss(table)[0]


def test_a_call_that_the_template_does_not_render_is_skipped_and_named(tmp_path):
    records = [
        {"messages": calling([CALL]), "id": "silent"},
        {"messages": calling([CALL], "let me see."), "id": "half"},
        {"messages": TURNS, "id": "whole"},
    ]
    store = stored(tmp_path, records)
    assert store.skipped.ids == {"unwritten": ["silent"], "no_calls": ["half"]}
    assert "c.jsonl:1: turn 1" in store.skipped.examples["unwritten"][0]
    assert "tool_calls" in store.skipped.examples["unwritten"][0]
    assert text_and_loss(store, 0)[1] == "let me see." + END + ANSWER + END
    with pytest.raises(CorpusError, match=r"\b1 records.*c\.jsonl:1: turn 1"):
        stored(tmp_path / "alone", records[:1])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_rendered_by_the_template_or_counted_as_lost(tmp_path, name):
    messages = [TURNS[0], {**TURNS[1], name: "hm"}]
    store = stored(tmp_path / "told", [{"messages": messages, "id": "r"}], chat_tokenizer(REASONS))
    assert text_and_loss(store)[1] == f"<t>hm</t>{ANSWER}{END}"
    assert store.skipped.ids == {}
    silent = stored(tmp_path / "silent", [{"messages": messages, "id": "r"}])
    assert text_and_loss(silent)[1] == ANSWER + END
    assert silent.skipped.ids == {"no_reasoning": ["r"]}


def test_a_template_with_the_date_gives_the_same_rows_on_every_day(tmp_path):
    dated = "{{ strftime_now('%A, %d %b %Y %H:%M') }}\n" + CHATML
    tokenizer = chat_tokenizer(dated)
    text, _ = text_and_loss(stored(tmp_path, [{"messages": TURNS}], tokenizer))
    assert text.startswith("Friday, 26 Jul 2024 00:00\n")
    other = HfTokenizer(tokenizer.tokenizer, vocab_size=320, chat_date=date(2025, 1, 2))
    assert text_and_loss(stored(tmp_path / "other", [{"messages": TURNS}], other))[0].startswith(
        "Thursday, 02 Jan 2025"
    )
    assert (tokenizer.writes_date, chat_tokenizer().writes_date) == (True, False)


def test_preference_pairs_are_refused_with_the_setting_that_reads_them(tmp_path):
    (note,) = unread_notes({"text": "chosen"}, ["prompt", "rejected"])
    assert "'rejected'" in note
    assert """corpus.prompt="{prompt}"' --set 'corpus.completion="{chosen}\"""" in note
    assert "corpus.prompt" not in unread_notes({"text": "chosen"}, ["rejected"])[0]
    assert "'chosen'" in unread_notes({"turns": "chosen"}, ["rejected"])[0]
    assert unread_notes({"text": "text"}, ["chosen", "rejected"]) == unread_notes({"text": "chosen"}, []) == []
    (note,) = unread_notes({"prompt": "prompt", "completion": "completion"}, ["label"])  # KTO
    assert note.endswith("label")
    assert unread_notes({"text": "text"}, ["label"]) == []
    record = {"prompt": QUESTION, "chosen": " wet.", "rejected": " dry."}
    with pytest.raises(CorpusError, match=r"preference pairs.*corpus\.prompt"):
        stored(tmp_path, [record])
    store = stored(tmp_path / "told", [record], prompt="{prompt}", completion="{chosen}")
    assert text_and_loss(store)[1] == " wet.<|endoftext|>"


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_turns_in_json_text_are_parsed(tmp_path, name):
    store = stored(tmp_path, [{name: "\n " + json.dumps(TURNS)}])
    assert text_and_loss(store) == text_and_loss(stored(tmp_path / "turns", [{"messages": TURNS}]))
    assert store.details["columns"]["turns"] == name
    text, _ = text_and_loss(stored(tmp_path / "text", [{"messages": "[sic] a text"}]))
    assert text == "[sic] a text<|endoftext|>"
    with pytest.raises(CorpusError, match=r"c\.jsonl:1: .*'messages'.*turns"):
        stored(tmp_path / "python", [{"messages": str(TURNS)}])


@pytest.mark.parametrize("nothing", ["null", " ", "", "[]", []])
def test_absent_tools_and_calls_may_be_given_as_text(tmp_path, nothing):
    strict = WITH_CALLS.replace("{{ m.content }}", "{{ m.content }}{{ 'called' if 'tool_calls' in m }}")
    marked = [TURNS[0], {**TURNS[1], "tool_calls": nothing}]
    text = text_and_loss(stored(tmp_path, [{"messages": marked, "tools": nothing}], chat_tokenizer(strict)))
    assert text == text_and_loss(stored(tmp_path / "none", [{"messages": TURNS[:2]}]))


AS_GIVEN = '{"city":"Paris",  "day": 1}'  # no JSON that Python writes
TAKES_BOTH = WITH_CALLS.replace(
    "{{ c.function.arguments | tojson }}",
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
)
TAKES_OBJECTS = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments.items() | list }}")


def with_arguments_of(arguments) -> list[dict]:
    return calling([{"type": "function", "function": {"name": "weather", "arguments": arguments}}])


@pytest.mark.parametrize("template", [TAKES_BOTH, JOINS_TEXT, PRINTS])
def test_arguments_that_are_text_are_rendered_verbatim(tmp_path, template):
    store = stored(tmp_path, [{"messages": with_arguments_of(AS_GIVEN)}], chat_tokenizer(template))
    assert text_and_loss(store)[1] == f"<call>weather {AS_GIVEN}</call>{END}{ANSWER}{END}"


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (WITH_CALLS, AS_GIVEN, '{"city": "Paris", "day": 1}'),
        (WITH_CALLS, "print(1)", '"print(1)"'),
        (TAKES_OBJECTS, AS_GIVEN, "[('city', 'Paris'), ('day', 1)]"),
        (TAKES_OBJECTS, "{}", "[]"),
        (JOINS_TEXT, {}, "{}"),
        (WITH_CALLS, "{}", "{}"),
    ],
)
def test_arguments_have_the_type_that_the_template_needs(tmp_path, template, arguments, expected):
    store = stored(tmp_path, [{"messages": with_arguments_of(arguments)}], chat_tokenizer(template))
    assert text_and_loss(store)[1] == f"<call>weather {expected}</call>{END}{ANSWER}{END}"


@pytest.mark.parametrize("words", [str(CALL["function"]["arguments"]), json.dumps(AS_TEXT["function"]["arguments"])])
@pytest.mark.parametrize("call", [CALL, AS_TEXT])
def test_text_that_looks_like_arguments_does_not_change_them(tmp_path, words, call):
    messages = calling([call])
    messages[0]["content"] = words
    assert text_and_loss(stored(tmp_path, [{"messages": messages}], chat_tokenizer(TAKES_BOTH)))[1].startswith(CALLED)
    assert text_and_loss(stored(tmp_path / "json", [{"messages": messages}], chat_tokenizer(WITH_CALLS)))[1].startswith(
        CALLED
    )


STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
CALLS_ALONE = WITH_CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
HIDES = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else ('hidden' if m.content else '') }}")
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}{% generation %}<t>{{ m.reasoning_content }}</t>{% endgeneration %}GAP"
    "{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "turn", "loss"),
    [
        (STRIPS, {"content": f"<think>hm</think>{ANSWER}"}, ANSWER),
        (CHATML.replace("m.content", "m.content[:8]"), {"content": ANSWER}, ANSWER[:8]),
        (CALLS_ALONE, {"content": "let me see", "tool_calls": [CALL]}, CALLED),
    ],
)
def test_a_partly_rendered_answer_is_retained_and_counted(tmp_path, template, turn, loss):
    record = {"messages": [TURNS[0], {"role": "assistant", **turn}], "id": "part"}
    store = stored(tmp_path, [record], chat_tokenizer(template))
    assert text_and_loss(store)[1] == loss + END
    assert store.skipped.ids == {"cut_answer": ["part"]}
    (line,) = skipped_lines(store.skipped.counts, store.skipped.examples)
    assert "c.jsonl:1: turn 1" in line
    assert "--tokenizer" in line


def test_an_answer_whose_beginning_is_in_the_prompt_is_complete(tmp_path):
    thinks = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    messages = turns(QUESTION, f"<think>\nhm</think>{ANSWER}")
    store = stored(tmp_path, [{"messages": messages}], chat_tokenizer(thinks))
    assert text_and_loss(store)[1] == f"hm</think>{ANSWER}{END}"
    assert store.skipped.ids == {}
    records = [{"messages": turns("what is 4?", "4")}]
    with pytest.raises(CorpusError, match="answer"):
        stored(tmp_path / "short", records, chat_tokenizer(DROPS))


TAIL = "<|im_end|>\n{% endfor %}"
LAST_TURN = {  # templates whose last turn differs from the same turn with others after it: template, loss
    "thinks": (  # Qwen 3
        CHATML.replace(
            "{{ m.content }}",
            "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
        ),
        f"{ANSWER}{END}<think>\n\n</think>\n\n{LAST}{END}",
    ),
    "ends": (  # OLMo 3
        CHATML.replace(TAIL, "{% if loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}{% endfor %}"),
        f"{ANSWER}{END}{LAST}<|endoftext|>",
    ),
    "ends twice": (  # Phi 3
        CHATML.replace(TAIL, TAIL + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"),
        f"{ANSWER}{END}{LAST}{END}\n<|endoftext|>",
    ),
    "asked to think": (  # DeepSeek R1
        CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
        f"{ANSWER}{END}{LAST}{END}",
    ),
    "no end": (  # Metharme: the role of the next turn is no end of this one
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>{% else %}{{ eos_token }}{% endif %}",
        f"{ANSWER}{LAST}<|endoftext|>",
    ),
}


@pytest.mark.parametrize("name", LAST_TURN)
def test_every_answer_of_a_template_that_changes_the_last_turn_carries_loss(tmp_path, name):
    template, loss = LAST_TURN[name]
    store = stored(tmp_path, [{"messages": TURNS}], chat_tokenizer(template))
    assert text_and_loss(store)[1] == loss
    assert store.skipped.ids == {}


@pytest.mark.parametrize("name", ["ends", "ends twice"])
def test_an_answer_ends_with_its_token_before_an_empty_turn(tmp_path, name):
    template, loss = LAST_TURN[name]
    chat = turns(QUESTION, ANSWER, "", LAST)
    assert text_and_loss(stored(tmp_path, [{"messages": chat}], chat_tokenizer(template)))[1] == loss


def test_answers_keep_what_the_template_leaves_of_earlier_turns(tmp_path):
    thought = turns(QUESTION, f"<think>hm</think>{ANSWER}", FOLLOW_UP, f"<think>so</think>{LAST}")
    store = stored(tmp_path, [{"messages": thought, "id": "part"}], chat_tokenizer(REWRITES))
    assert text_and_loss(store)[1] == f"{ANSWER}{END}<think>so</think>{LAST}{END}"
    assert store.skipped.ids == {"cut_answer": ["part"]}


@pytest.mark.parametrize(
    "template",
    [
        # the end of the last turn is text that other turns lack, so that it cannot be told where they end
        CHATML.replace(TAIL, "{% if loop.last %}###{% endif %}\n{% endfor %}").replace("<|im_start|>", "# "),
        # the result of a tool is written inside of the turn that called it
        CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}").replace(
            TAIL,
            "{% if m.tool_calls and messages|length > 2 %}<call>{{ messages[2].content }}</call>{% endif %}" + TAIL,
        ),
    ],
    ids=["no mark", "tool"],
)
def test_an_answer_with_unknown_location_is_skipped(tmp_path, template):
    called = calling([CALL], ANSWER)
    called[2]["content"] = "32"
    messages = TURNS if "###" in template else called
    with pytest.raises(CorpusError, match="changes when later turns follow"):
        stored(tmp_path, [{"messages": messages}], chat_tokenizer(template))


@pytest.mark.parametrize("template", [STRIPS, HIDES])
def test_an_answer_that_is_not_rendered_is_skipped(tmp_path, template):
    record = {"messages": turns(QUESTION, "<think>hm</think>")}
    with pytest.raises(CorpusError, match=r"c\.jsonl:1: turn 1: .*'<think>hm"):
        stored(tmp_path, [record], chat_tokenizer(template))


def test_marked_spans_are_assigned_to_their_turns(tmp_path):
    last = {**TURNS[3], "reasoning_content": "hm"}
    messages = [TURNS[0], {**TURNS[1], "reasoning_content": "gone"}, TURNS[2], last]
    store = stored(tmp_path, [{"messages": messages}], chat_tokenizer(THINKS))
    assert text_and_loss(store)[1] == ANSWER + END + "<t>hm</t>" + LAST + END
    last_only = stored(tmp_path / "last", [{"messages": messages}], chat_tokenizer(THINKS), loss_on="completion")
    assert text_and_loss(last_only)[1] == "<t>hm</t>" + LAST + END
    first = [TURNS[0], TURNS[1], TURNS[2], {**last, "weight": 0}]
    assert text_and_loss(stored(tmp_path / "first", [{"messages": first}], chat_tokenizer(THINKS)))[1] == ANSWER + END


def test_conversations_with_ambiguous_marks_are_skipped(tmp_path):
    only_last = MARKED.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
    twice = MARKED.replace("{% for", "{{ messages[0].content }}{% for", 1)
    for name, template in (("one", only_last), ("two", twice)):
        records = [{"messages": TURNS, "id": "odd"}, {"messages": TURNS[:2]}]
        store = stored(tmp_path / name, records, chat_tokenizer(template))
        assert store.skipped.ids == {"unmarked": ["odd"]}
    completion_only = stored(tmp_path / "last", [{"messages": TURNS}], chat_tokenizer(only_last), loss_on="completion")
    assert text_and_loss(completion_only)[1] == LAST + END


@pytest.mark.parametrize("marked", [False, True])
def test_turns_rendered_as_json_are_located_or_skipped(tmp_path, marked):
    quoted = turns(QUESTION, 'water is "wet".\nyes', "and fire?", LAST)
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    if marked:
        template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m | tojson }}{% endgeneration %}"
            "{% else %}{{ m | tojson }}{% endif %}\n{% endfor %}"
        )
    store = stored(tmp_path, [{"messages": quoted}], chat_tokenizer(template), max_length=400)
    assert text_and_loss(store)[1] == "".join(json.dumps(turn) for turn in quoted[1::2])
    assert store.skipped.ids == {}
    with pytest.raises(CorpusError, match=r"c\.jsonl:1: turn 1"):
        stored(tmp_path / "one", [{"messages": quoted}], chat_tokenizer("{{ messages | tojson }}"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_carry_no_loss(tmp_path, template):
    record = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    text, loss = text_and_loss(stored(tmp_path, [record], chat_tokenizer(template)))
    assert loss == LAST + END
    assert text == text_and_loss(stored(tmp_path / "all", [{"messages": TURNS}], chat_tokenizer(template)))[0]
    later = turns(QUESTION, ANSWER, FOLLOW_UP, LAST)[1:]
    both = stored(tmp_path / "both", [{"prompt": TURNS[:1], "completion": later}], chat_tokenizer(template))
    assert text_and_loss(both)[1] == ANSWER + END + LAST + END
    path = tmp_path / "exam.jsonl"
    path.write_text(json.dumps(record))
    units = load_units(TargetSettings(names=(str(path),), loss_on="assistant")).rendered(chat_tokenizer(template)).units
    assert [unit.completion for unit in units] == [LAST + END]


def test_a_system_text_makes_turns_of_prompt_and_completion(tmp_path):
    record = {"system": "Be short.", "prompt": QUESTION, "completion": ANSWER}
    text, loss = text_and_loss(stored(tmp_path, [record]))
    assert text.startswith(f"<|im_start|>system\nBe short.{END}\n<|im_start|>user\n{QUESTION}{END}")
    assert loss == ANSWER + END
    empty = text_and_loss(stored(tmp_path / "empty", [record | {"system": ""}]))
    assert empty == text_and_loss(stored(tmp_path / "chat", [{"messages": TURNS[:2]}]))
    assert text_and_loss(stored(tmp_path / "null", [record | {"system": None}]))[0].startswith(QUESTION + ANSWER)
    path = tmp_path / "exam.jsonl"
    for question_record in (record, {"system": "Be short.", "question": QUESTION, "answer": ANSWER}):
        path.write_text(json.dumps(question_record))
        (unit,) = load_units(TargetSettings(names=(str(path),))).rendered(chat_tokenizer()).units
        assert unit.prompt.startswith(f"<|im_start|>system\nBe short.{END}")
        assert unit.completion == ANSWER + END


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["messages", "prompt", "instruction", "preference"])
def test_the_chat_template_gets_the_arguments_of_a_record(tmp_path, suffix, form):
    template = "{% if mood is defined %}<|im_start|>system\n{{ mood }}{{ level }}<|im_end|>\n{% endif %}" + MARKED
    content = {
        "messages": {"messages": TURNS[:2]},
        "prompt": {"prompt": TURNS[:1], "completion": TURNS[1:2]},
        "instruction": {"instruction": QUESTION, "output": ANSWER},
        "preference": {"prompt": TURNS[:1], "chosen": TURNS[1:2], "rejected": TURNS[3:]},
    }[form]
    arguments = [{"mood": "Be short."}, {"level": 3}, {}, None]
    records = [content | {"chat_template_kwargs": value, "topic": "a"} for value in arguments]
    path = tmp_path / f"c.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    settings = {"form": form} if form == "preference" else {}
    store = stored(tmp_path, None, chat_tokenizer(template), name=path.name, **settings)
    plain = f"<|im_start|>user\n{QUESTION}{END}<|im_start|>assistant\n{ANSWER}{END}"
    texts = [text_and_loss(store, k)[0] for k in range(4)]
    assert texts[0].startswith(f"<|im_start|>system\nBe short.{END}\n{plain}")
    assert all(text.startswith(plain) for text in texts[1:])
    assert store.label_columns == ("topic",)
    assert store.details["columns"]["chat_template_kwargs"] == "chat_template_kwargs"
    assert texts[0].count("Be short.") == (2 if form == "preference" else 1)
    units = load_units(TargetSettings(names=(str(path),))).rendered(chat_tokenizer(template)).units
    assert sum("Be short." in unit.prompt for unit in units) == 1
    assert all("Be short." in other.prompt for unit in units for other in unit.others if "Be short." in unit.prompt)
