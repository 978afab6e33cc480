"""Other tools read what GRASP reads: LLaMA-Factory, Axolotl, TRL and datatrove themselves, where they are installed."""

import importlib.machinery
import json
import sys
import types
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from grasp.corpus import RowStore
from grasp.corpus.conversations import conversation_in
from grasp.corpus.documents import read_documents
from grasp.corpus.encoding import ModelText, encode_texts
from grasp.select.export import iter_records
from grasp.select.record_files import FileFormat, ShardSize, write_corpus
from grasp.settings import CorpusSettings
from tests.corpus.chats import MARKED, chat_tokenizer
from tests.corpus.world import write_jsonl

WEATHER = {"name": "weather", "description": "Weather of a city.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
ALPACA = [
    {"instruction": "Add.", "input": "1 + 1", "output": "2"},
    {"instruction": "Say hello.", "input": "", "output": "Hello!"},
]
CUSTOM = [
    {"q": "Add.", "ctx": "1 + 1", "a": "2", "sys": "Be brief.", "hist": [["Hi", "Ho"]], "input": "a label"},
    {"q": "Go on.", "ctx": None, "a": "3", "sys": "", "hist": [], "input": "b"},
]


def sharegpt_turns(**by_role):
    return [{"from": role, "value": text} for role, text in by_role.items()]


SHAREGPT = [
    {
        "conversations": sharegpt_turns(
            human="What is the weather?", function_call=json.dumps(CALL), observation="20 degrees", gpt="It is warm."
        ),
        "system": "You help.",
        "tools": json.dumps([WEATHER]),
    },
    {
        "conversations": sharegpt_turns(system="Be kind.", human="water?", gpt="water is wet."),
        "system": "",
        "tools": "",
    },
]
OPENAI = [
    {"messages": [{"role": "user", "content": "water?"}, {"role": "assistant", "content": "wet."}]},
    {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]},
]
ENTRIES = {
    "alpaca": {"file_name": "alpaca.json"},
    "custom": {
        "file_name": "custom.json",
        "columns": {"prompt": "q", "query": "ctx", "response": "a", "system": "sys", "history": "hist"},
    },
    "sharegpt": {
        "file_name": "sharegpt.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "system", "tools": "tools"},
    },
    "openai": {
        "file_name": "openai.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content"}
        | {f"{role}_tag": role for role in ("user", "assistant", "system")},
    },
}


def write_data(place):
    for name, records in (("alpaca", ALPACA), ("custom", CUSTOM), ("sharegpt", SHAREGPT), ("openai", OPENAI)):
        (place / f"{name}.json").write_text(json.dumps(records, indent=1))
    (place / "dataset_info.json").write_text(json.dumps(ENTRIES))


@pytest.mark.parametrize("name", ENTRIES)
def test_llama_factory_reads_the_same_turns(tmp_path, name, monkeypatch):
    pytest.importorskip("llamafactory")
    if "torchaudio" not in sys.modules:  # imported, not used
        stub = types.ModuleType("torchaudio")
        stub.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        monkeypatch.setitem(sys.modules, "torchaudio", stub)
    converters = pytest.importorskip("llamafactory.data.converter")
    parser = pytest.importorskip("llamafactory.data.parser")
    write_data(tmp_path)
    (attributes,) = parser.get_dataset_list([name], str(tmp_path))
    convert = converters.DATASET_CONVERTERS[attributes.formatting](attributes, None)
    records = json.loads((tmp_path / attributes.dataset_name).read_text())
    documents = list(read_documents(CorpusSettings(path=f"{tmp_path}/dataset_info.json#{name}")))
    for record, document in zip(records, documents, strict=True):
        theirs = convert(record)
        expected = [{"role": "system", "content": theirs["_system"]}] if theirs["_system"] else []
        expected += [*theirs["_prompt"], *theirs["_response"]]
        ours = []
        for turn in document.conversation.turns:
            role, content = turn["role"], turn["content"]
            if "tool_calls" in turn:
                (call,) = turn["tool_calls"]
                role, content = "function", json.dumps(call["function"])
            ours.append({"role": "observation" if role == "tool" else role, "content": content})
        assert ours == expected
        assert list(document.conversation.tools) == json.loads(theirs["_tools"] or "[]")


AXOLOTL = {
    "alpaca": ("alpaca", {"type": "alpaca"}),
    "user_defined": (
        "custom",
        {
            "type": {
                "field_instruction": "q",
                "field_input": "ctx",
                "field_output": "a",
                "field_system": "sys",
                "format": "[INST] {instruction} {input} [/INST]",
                "no_input_format": "[INST] {instruction} [/INST]",
                "system_format": "<<{system}>> ",
            }
        },
    ),
    "completion": ("alpaca", {"type": "completion", "field": "output"}),
    "chat_template": ("openai", {"type": "chat_template"}),
    "sharegpt keys": (
        "sharegpt2",
        {
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "message_field_training": "use",
        },
    ),
}
DRAFTED = [("water?", "A draft.", False, False), ("and fire?", "fire is hot.", False, True)]
SHAREGPT2 = [
    {
        "conversations": [
            {"from": role, "value": text, "use": use}
            for question, answer, trains_question, trains_answer in DRAFTED
            for role, text, use in (("human", question, trains_question), ("gpt", answer, trains_answer))
        ]
    }
]


def entry_in(place, name):
    file, fields = AXOLOTL[name]
    write_data(place)
    (place / "sharegpt2.json").write_text(json.dumps(SHAREGPT2))
    fields = {"path": str(place / f"{file}.json"), **fields}
    (place / "axolotl.yaml").write_text(json.dumps({"base_model": "x", "datasets": [fields]}))
    return place / "axolotl.yaml", fields


def store_of(place, path, template=MARKED, **changes):
    settings = CorpusSettings(path=str(path), **{"max_length": 512} | changes)
    return RowStore.write(place, settings, chat_tokenizer(template), shard_rows=64)


def rows_of(place, path, template=MARKED):
    shard = store_of(place, path, template).shard(0)
    return [(shard.ids(k).tolist(), shard.mask(k)) for k in range(len(shard))]


@pytest.mark.parametrize("name", AXOLOTL)
def test_axolotl_reads_the_same_tokens(tmp_path, name):
    strategies = pytest.importorskip("axolotl.prompt_strategies")
    dicts = pytest.importorskip("axolotl.utils.dict")
    pytest.importorskip("axolotl.prompt_strategies.chat_template")
    config, fields = entry_in(tmp_path, name)
    tokenizer = chat_tokenizer(MARKED).tokenizer
    # Axolotl trains the end of a turn if it is the EOS token of the tokenizer, or named
    cfg = {"sequence_len": 512, "train_on_inputs": False, "chat_template": "tokenizer_default"}
    cfg = dicts.DictDefault(cfg | {"eot_tokens": ["<|im_end|>"]})
    kind = "user_defined" if isinstance(fields["type"], dict) else fields["type"]
    options = fields["type"] if isinstance(fields["type"], dict) else fields
    if kind == "alpaca":
        prompters = pytest.importorskip("axolotl.prompters")
        strategy = pytest.importorskip("axolotl.prompt_tokenizers").AlpacaPromptTokenizingStrategy(
            prompters.AlpacaPrompter(), tokenizer, cfg.train_on_inputs, cfg.sequence_len
        )
    else:
        strategy = strategies.load(kind, tokenizer, cfg, dicts.DictDefault(options))
    records = json.loads(Path(fields["path"]).read_text())
    for record, (ids, mask) in zip(records, rows_of(tmp_path / "rows", config), strict=True):
        if kind == "completion":
            batch = strategy.tokenize_prompt({k: [v] for k, v in record.items()})
            theirs = {key: value[0] for key, value in batch.items()}
        else:
            theirs = strategy.tokenize_prompt({key: "" if value is None else value for key, value in record.items()})
        assert tokenizer.decode(ids) == tokenizer.decode(theirs["input_ids"])
        scored = np.ones(len(ids), bool) if mask is None else mask
        trained = np.array(theirs["labels"]) != -100
        assert tokenizer.decode(np.array(ids)[scored]) == tokenizer.decode(np.array(theirs["input_ids"])[trained])


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("phi_35", "<|end|>"), ("qwen3", "<|im_end|>"), ("gemma4", "<turn|>")]
)
def test_axolotl_has_the_same_loss_by_templates_that_change_the_last_turn(tmp_path, name, end):
    dicts = pytest.importorskip("axolotl.utils.dict")
    strategies = pytest.importorskip("axolotl.prompt_strategies.chat_template")
    templates = pytest.importorskip("axolotl.utils.chat_templates")
    wrapped = chat_tokenizer(templates.get_chat_template(name))
    wrapped.tokenizer.add_special_tokens({"extra_special_tokens": [end, "<|user|>", "<|assistant|>", "<|turn>"]})
    cfg = {"sequence_len": 512, "train_on_inputs": False, "chat_template": "tokenizer_default", "eot_tokens": [end]}
    entry = dicts.DictDefault({"type": "chat_template", "path": "x"})
    strategy = strategies.load(wrapped.tokenizer, dicts.DictDefault(cfg), entry)
    words = ["what is water?", "<think>\nhm\n</think>\n\nwater is wet.", "and?", "<think>\nso\n</think>\n\nit burns. "]
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(words)]
    theirs = strategy.tokenize_prompt({"messages": messages})
    chat = wrapped.render(conversation_in({"messages": messages}))
    (ours,) = encode_texts([ModelText(chat.text, chat.spans, "chat")], wrapped)
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.loss_mask.tolist() == [label != -100 for label in theirs["labels"]]


FORMATS = [FileFormat(kind) for kind in ("parquet", "jsonl", "json", "datasets")]
FORMATS += [FileFormat("jsonl", suffix) for suffix in (".gz", ".zst", ".bz2", ".xz")]


def exported(place, records, file_format, **changes):
    datasets = pytest.importorskip("datasets")
    settings = CorpusSettings(path=str(write_jsonl(place / "source.jsonl", records)), **changes)
    items = iter_records(settings, np.ones(len(records), dtype=bool))
    out = place / "out"
    write_corpus(out, file_format, "documents", items, 0, {}, ShardSize(2))
    if file_format.kind == "datasets":
        return out, datasets.load_from_disk(str(out))
    if file_format.kind == "csv":
        return out, None
    builder = "parquet" if file_format.kind == "parquet" else "json"
    files = sorted(str(file) for file in out.glob("part-*"))
    return out, datasets.load_dataset(builder, data_files=files, split="train", cache_dir=str(place / "cache"))


def arguments(place):
    """What every trainer of TRL is told here."""
    quiet = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return quiet | {"output_dir": str(place / "run")}


def dpo_trainer(place, data, **options):
    trl = pytest.importorskip("trl")
    tokenizer = chat_tokenizer(MARKED).tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    models = {"model": tiny_model(), "ref_model": tiny_model()}
    args = trl.DPOConfig(**arguments(place), **options)
    return trl.DPOTrainer(**models, args=args, train_dataset=data, processing_class=tokenizer)


def tiny_model():
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, **shape))


PROMPTS = [{"prompt": f"question {k}?", "completion": f" answer {k}."} for k in range(5)]
CHATS = [{"messages": OPENAI[k % 2]["messages"]} for k in range(5)]
TEXTS = [{"text": f"A text, number {k}."} for k in range(5)]
LONG_CHAT = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(["a", "b", "c", "d"])]
PROMPT_CHATS = [{"prompt": LONG_CHAT[:3], "completion": LONG_CHAT[3:]}] * 5
ARGUMENTS = [CHATS[0] | {"chat_template_kwargs": {"mood": ("short", "long")[k % 2]}} for k in range(5)]
MOODY = "{% if mood is defined %}<|im_start|>system\n{{ mood }}<|im_end|>\n{% endif %}" + MARKED


@pytest.mark.parametrize(
    ("form", "records"),  # every format, and every kind of records in two of them
    [(form, CHATS) for form in FORMATS] + list(product(FORMATS[:2], [PROMPTS, TEXTS, PROMPT_CHATS, ARGUMENTS])),
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_trl_trains_on_the_tokens_that_grasp_reads(tmp_path, records, form):
    trl = pytest.importorskip("trl")
    out, data = exported(tmp_path, records, form)
    tokenizer = chat_tokenizer(MOODY).tokenizer
    options = {"max_steps": 1, "max_length": None, "eos_token": tokenizer.eos_token}
    options |= {"assistant_only_loss": records in (CHATS, PROMPT_CHATS, ARGUMENTS)}
    args = trl.SFTConfig(**arguments(tmp_path), **options)
    trainer = trl.SFTTrainer(model=tiny_model(), args=args, train_dataset=data, processing_class=tokenizer)
    rows = rows_of(tmp_path / "rows", out, MOODY)
    assert len(rows) == len(records)
    for theirs, (ids, mask) in zip(trainer.train_dataset, rows, strict=True):
        assert ids == theirs["input_ids"]
        trained = [label != -100 for label in theirs.get("labels", ids)]
        assert (mask is None and all(trained)) or mask.tolist() == trained
    trainer.train()


TURNS = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(["what is water?", "wet."])]
DRY = [{"role": "assistant", "content": "water is dry."}]
PAIRS = {
    "prompt": {"prompt": "question?", "chosen": " water is wet.", "rejected": " fire."},
    "common beginning": {"chosen": "question? water is wet.", "rejected": "question? fire."},
    "chats": {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": DRY},
    "chats with prompt": {"chosen": TURNS, "rejected": TURNS[:1] + DRY},
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_trl_trains_on_the_pairs_that_grasp_reads(tmp_path, pair, kind):
    pytest.importorskip("trl")
    records = [pair | {"id": f"p{k}"} for k in range(5)]
    out, data = exported(tmp_path, records, FileFormat(kind), form="preference")
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    trainer = dpo_trainer(tmp_path, data, **options)
    shard = store_of(tmp_path / "rows", out, form="preference").shard(0)
    assert len(shard) == len(trainer.train_dataset) == 5
    for k, theirs in enumerate(trainer.train_dataset):
        sides = [theirs["prompt_ids"] + theirs[f"{side}_ids"] for side in ("chosen", "rejected")]
        assert shard.ids(k).tolist() == sides[0] + sides[1]
        starts = [int(np.argmax(mask)) for mask in np.split(shard.mask(k), [len(sides[0])])]
        assert starts == [len(theirs["prompt_ids"])] * 2
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)  # the model is its own reference
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["prompt", "chats"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_trl_truncates_pairs_as_grasp_does(tmp_path, kind):
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    words = {"short": 1, "long": 60}
    records = [
        {"prompt": "question? " * words[a], "chosen": " water" * words[b], "rejected": " fire" * words[c]}
        for a, b, c in product(words, repeat=3)
    ]
    if kind == "chats":
        role_of = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        records = [
            {name: [{"role": role_of[name], "content": text}] for name, text in record.items()} for record in records
        ]
    trainer = dpo_trainer(tmp_path, datasets.Dataset.from_list(records), max_length=40)
    path = write_jsonl(tmp_path / "pairs.jsonl", records)
    store = store_of(tmp_path / "rows", path, max_length=40, form="preference")
    assert store.n_rows == len(trainer.train_dataset) == 4
    assert store.skipped.counts == {"cut_end": 4, "long_prompt": 4}
    batch = trainer.data_collator(list(trainer.train_dataset))
    sides = store.shard(0).sides()
    for k in range(8):  # TRL has all chosen sides first
        theirs = (k // 2) + 4 * (k % 2)
        length = int(batch["attention_mask"][theirs].sum())
        assert sides.ids(k).tolist() == batch["input_ids"][theirs][:length].tolist()
        assert int(np.argmax(sides.mask(k))) == int(batch["completion_mask"][theirs].argmax())


@pytest.mark.parametrize(
    "form",
    [
        FileFormat("parquet"),
        FileFormat("jsonl"),
        FileFormat("jsonl", ".gz"),
        FileFormat("jsonl", ".zst"),
        FileFormat("csv"),
    ],
    ids=lambda form: f"{form.kind}{form.compression}",
)
def test_datatrove_reads_the_texts(tmp_path, form):
    pytest.importorskip("datatrove")
    pytest.importorskip("orjson")
    from datatrove.pipeline.readers import JsonlReader, ParquetReader  # noqa: PLC0415
    from datatrove.pipeline.readers.csv import CsvReader  # noqa: PLC0415

    records = [{"id": f"d{k}", "text": f'Line one, "{k}".\nLine two.', "topic": "ab"[k % 2]} for k in range(5)]
    out, _ = exported(tmp_path, records, form)
    reader = {"parquet": ParquetReader, "csv": CsvReader}.get(form.kind, JsonlReader)
    options = {"compression": {".gz": "gzip", ".zst": "zstd"}.get(form.compression)} if form.compression else {}
    documents = reader(str(out), glob_pattern="part-*", **options).run()
    read = [{"id": each.id, "text": each.text, "topic": each.metadata["topic"]} for each in documents]
    assert read == records
