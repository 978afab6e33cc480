"""Dataset entries of LLaMA-Factory and Axolotl: the settings they are resolved to, and refusals."""

import json

import pytest

from grasp.corpus.documents import read_documents
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets.load import load_units
from tests.corpus.world import write_jsonl
from tests.formats.test_trainers import CUSTOM, ENTRIES, entry_in, write_data


def llama_factory(place, **entries):
    (place / "dataset_info.json").write_text(json.dumps(entries))
    return place / "dataset_info.json"


def axolotl(place, *entries, **config):
    (place / "axolotl.yaml").write_text(json.dumps({"datasets": list(entries), **config}))
    return place / "axolotl.yaml"


def documents_of(path, **settings):
    return list(read_documents(CorpusSettings(path=str(path), **settings)))


def conversations(path):
    return [document.conversation for document in documents_of(path)]


def test_columns_history_and_system_of_an_entry(tmp_path):
    write_data(tmp_path)
    first, second = conversations(f"{tmp_path}#custom")
    assert [(turn["role"], turn["content"]) for turn in first.turns] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Ho"),
        ("user", "Add.\n1 + 1"),  # LLaMA-Factory joins by one newline
        ("assistant", "2"),
    ]
    assert [turn["content"] for turn in second.turns] == ["Go on.", "3"]
    assert [document.labels for document in documents_of(f"{tmp_path}#custom")] == [
        {"input": "a label"},
        {"input": "b"},
    ]
    llama_factory(tmp_path, only=ENTRIES["custom"])  # needs no name
    assert conversations(tmp_path) == conversations(f"{tmp_path}/dataset_info.json#only") == [first, second]


def test_settings_are_resolved_once(tmp_path):
    """An artifact records the resolved settings, so that later changes of the file have no effect."""
    write_data(tmp_path)
    settings = CorpusSettings(path=f"{tmp_path}#custom", limit=1)
    assert (settings.path, settings.limit) == (f"{tmp_path}/custom.json", 1)
    (tmp_path / "dataset_info.json").unlink()
    assert CorpusSettings.model_validate(settings.model_dump(mode="json")) == settings
    assert hash(settings) == hash(CorpusSettings.model_validate(settings.model_dump()))


def test_prompts_of_axolotl(tmp_path):
    first, second = documents_of(entry_in(tmp_path, "user_defined")[0])
    assert first.text == "<<Be brief.>> [INST] Add. 1 + 1 [/INST]2"
    assert first.answers == ((len(first.text) - 1, len(first.text)),)
    assert second.text == "[INST] Go on. [/INST]3"


def test_turns_that_axolotl_does_not_train(tmp_path):
    (conversation,) = conversations(entry_in(tmp_path, "sharegpt keys")[0])
    assert conversation.untrained == {1}


def test_settings_of_axolotl_that_change_the_tokens_are_noted(tmp_path):
    entry_in(tmp_path, "alpaca")
    entry = {"path": str(tmp_path / "alpaca.json"), "type": "alpaca"}
    config = {"special_tokens": {"eos_token": "<|im_end|>"}, "sequence_len": 24, "tokens": []}
    fields = CorpusSettings(path=str(axolotl(tmp_path, entry, **config))).fields
    assert [note for note in fields.notes if note.startswith("not applied: special_tokens, sequence_len;")]
    assert not CorpusSettings(path=str(axolotl(tmp_path, entry))).fields.notes


def test_llama_factory_leaves_out_conversations_without_a_last_answer(tmp_path):
    turns = [{"from": role, "value": role} for role in ("system", "human", "gpt", "human")]
    write_jsonl(tmp_path / "c.jsonl", [{"conversations": turns[:n]} for n in (3, 4)])
    path = llama_factory(tmp_path, c={"file_name": "c.jsonl", "formatting": "sharegpt"})
    assert [conversation.fault for conversation in conversations(path)] == [None, "no_answer"]
    openai = {"path": str(tmp_path / "c.jsonl"), "type": "sharegpt"}
    assert [conversation.fault for conversation in conversations(axolotl(tmp_path, openai))] == [None, None]


def test_train_on_inputs(tmp_path):
    entry_in(tmp_path, "alpaca")
    entry = {"path": str(tmp_path / "alpaca.json"), "type": "alpaca"}
    assert CorpusSettings(path=str(axolotl(tmp_path, entry, train_on_inputs=True))).loss_on == "all"
    assert CorpusSettings(path=str(axolotl(tmp_path, entry))).loss_on is None


def test_only_marked_turns_are_trained_if_no_role_is(tmp_path):
    turns = []
    for answer, mark in (("a draft", {}), ("no", {"train": False}), ("yes", {"train": True})):
        turns += [{"from": "human", "value": "ask"}, {"from": "gpt", "value": answer} | mark]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"conversations": turns}])
    entry = {"path": str(path), "type": "chat_template", "field_messages": "conversations"}
    entry |= {"message_property_mappings": {"role": "from", "content": "value"}, "message_field_training": "train"}
    for roles_to_train, on_inputs, answers_with_loss in (
        ([], {}, [5]),
        (["assistant"], {}, [1, 5]),
        (None, {}, [1, 5]),
        ([], {"train_on_inputs": True}, [1, 5]),  # all turns but those that are marked otherwise
    ):
        (conversation,) = conversations(axolotl(tmp_path, entry | {"roles_to_train": roles_to_train}, **on_inputs))
        assert conversation.answers == answers_with_loss


@pytest.mark.parametrize("split", ["train", "train[:10%]", "train[2:4]", "train[-5:]", "train[50%:]"])
def test_an_entry_reads_the_same_part_of_a_file_as_datasets(tmp_path, split):
    datasets = pytest.importorskip("datasets")
    file = str(write_jsonl(tmp_path / "c.jsonl", [{"text": f"{k}"} for k in range(25)]))
    expected = datasets.load_dataset("json", data_files=file, split=split, cache_dir=str(tmp_path / "cache"))["text"]
    entries = (
        axolotl(tmp_path, {"path": file, "ds_type": "json", "type": "completion", "split": split}),
        llama_factory(tmp_path, c={"file_name": "c.jsonl", "columns": {"prompt": "text"}, "split": split}),
    )
    for path in entries:
        assert [document.text for document in documents_of(path)] == list(expected)


def test_entries_are_targets(tmp_path):
    write_data(tmp_path)
    units = load_units(TargetSettings(names=(f"{tmp_path}#custom",))).units
    assert [unit.target for unit in units] == ["custom"] * len(CUSTOM)
    assert {unit.completion for unit in units} == {"2", "3"}
    path, _ = entry_in(tmp_path, "user_defined")
    units = load_units(TargetSettings(names=(str(path),))).units
    assert {(unit.prompt, unit.completion) for unit in units} == {
        ("<<Be brief.>> [INST] Add. 1 + 1 [/INST]", "2"),
        ("[INST] Go on. [/INST]", "3"),
    }


TURN = {"from": "human", "value": "water?"}
SIDES = {"chosen": {"from": "gpt", "value": "wet."}, "rejected": {"from": "gpt", "value": "dry."}}
PAIRS = {
    "chats": (
        [{"conversations": [TURN], **SIDES}],
        {"formatting": "sharegpt", "columns": {"messages": "conversations"} | {side: side for side in SIDES}},
    ),
    "instructions": (
        [{"q": "water", "more": "or fire?", "good": "wet.", "bad": "dry.", "output": "x"}],
        {"columns": {"prompt": "q", "query": "more", "chosen": "good", "rejected": "bad"}},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_preference_pairs_of_llama_factory(tmp_path, name):
    records, entry = PAIRS[name]
    (tmp_path / "pairs.json").write_text(json.dumps(records))
    path = llama_factory(tmp_path, pairs={"file_name": "pairs.json", "ranking": True, **entry})
    (document,) = documents_of(path, form="preference")
    question = {"chats": "water?", "instructions": "water\nor fire?"}[name]
    for side, answer in ((document, "wet."), (document.rejected, "dry.")):
        assert [turn["content"] for turn in side.conversation.turns] == [question, answer]
    with pytest.raises(CorpusError, match=r"preference pairs.* --loss dpo"):
        documents_of(path)
    (unit,) = load_units(TargetSettings(names=(str(path),))).units
    assert unit.conversation.turns == document.conversation.turns
    assert [other.conversation.turns for other in unit.others] == [document.rejected.conversation.turns]


A = {"path": "a.json"}
CHAT_TEMPLATE = A | {"type": "chat_template"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"formatting": "x"}, "formatting: got 'x', expected alpaca, sharegpt or openai"),
        ({"columns": {"images": "i"}}, "columns.images: only texts are supported"),
        ({"ranking": True}, "ranking needs columns.chosen and columns.rejected"),
        ({"file_name": None, "script_url": "x"}, "script_url is not supported; download the data"),
        ({"file_name": None, "hf_hub_url": "a/b", "subset": "c"}, "subset is not supported; download the data"),
        ({"file_name": None, "hf_hub_url": "a/b", "folder": "c"}, "folder is not supported; download the data"),
        ({"split": "test"}, "split: got 'test', but the only split of a file is train"),
        ({"formating": "sharegpt"}, "unknown field formating; did you mean formatting?"),
        ({"columns": {"promt": "q"}}, "columns: unknown field promt; did you mean prompt?"),
        ({"columns": "x"}, "columns: got 'x', expected names by role"),
        ({"columns": {}}, "expected prompt and response, or prompt alone"),
        ({"formatting": "sharegpt", "tags": {"role_tag": "role"}}, "tags.content_tag is missing; with `tags`, all of"),
        # of Axolotl
        (A | {"type": "context_qa.load_v2"}, "type: got 'context_qa.load_v2', expected completion, chat_"),
        ({"path": "a/b", "name": "part"}, "name: got 'part', which is not supported"),
        ({"path": "a/b", "revision": "v1"}, "revision: got 'v1', which is not supported"),
        (A | {"shards": 10, "shards_idx": 0}, "shards: got 10, which is not supported"),
        (A | {"skip": 5}, "skip: got 5, which is not supported"),
        (CHAT_TEMPLATE | {"split_thinking": True}, "split_thinking: got True, which is not"),
        (CHAT_TEMPLATE | {"role_to_train": []}, "unknown field role_to_train; did you mean "),
        (A | {"type": {"field_instructions": "q"}}, "did you mean field_instruction?"),
        (A | {"type": "alpaca", "field_chosen": "good"}, "type: got 'alpaca' for preference pairs"),
        (CHAT_TEMPLATE | {"roles_to_train": []}, "roles_to_train: got [], which requires message_field_training"),
        (A | {"data_files": ["a", "b"]}, "data_files: got 2 files, expected one"),
        (CHAT_TEMPLATE | {"roles_to_train": ["user"]}, "roles_to_train: only whole turns of the"),
        (CHAT_TEMPLATE | {"train_on_eos": "all"}, "train_on_eos: only `turn` is supported"),
    ],
)
def test_entries_that_are_refused(tmp_path, entry, message):
    if "path" in entry:
        path, name = axolotl(tmp_path, entry), entry["path"]
    else:
        fields = {"file_name": "a.json"} | entry
        path, name = llama_factory(tmp_path, x={k: v for k, v in fields.items() if v is not None}), "x"
    with pytest.raises(SettingsError) as err:
        CorpusSettings(path=str(path))
    assert str(err.value).startswith(f"{path}#{name}: ")
    assert message in str(err.value)


def test_ambiguous_and_missing_entries_are_refused_with_the_names(tmp_path):
    write_data(tmp_path)
    names = ", ".join(f"{tmp_path}/dataset_info.json#{name}" for name in ENTRIES)
    for path, got in ((tmp_path, "4 entries"), (f"{tmp_path}#x", "no entry 'x'")):
        with pytest.raises(SettingsError) as err:
            CorpusSettings(path=str(path))
        assert str(err.value) == f"{tmp_path}/dataset_info.json: {got}; select one of {names}"
    (tmp_path / "run.yaml").write_text("model: {path: x}\n")
    with pytest.raises(SettingsError, match="no `datasets`"):
        CorpusSettings(path=str(tmp_path / "run.yaml"))


def test_records_that_do_not_match_the_entry_are_named(tmp_path):
    write_data(tmp_path)
    with pytest.raises(CorpusError, match="no preference pairs"):
        documents_of(f"{tmp_path}#custom", form="preference")
    llama_factory(tmp_path, x={"file_name": "custom.json", "columns": {"prompt": "q", "response": "missing"}})
    with pytest.raises(CorpusError, match=r"\bmissing\b.*'x'"):
        conversations(tmp_path)
    messages = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    llama_factory(tmp_path, x={"file_name": "openai.json", **messages})
    with pytest.raises(CorpusError, match=r"turn 0: .*None, .*observation"):
        conversations(tmp_path)
    with pytest.raises(TargetError, match=r"turn 0: .*None"):
        load_units(TargetSettings(names=(f"{tmp_path}#x",)))
