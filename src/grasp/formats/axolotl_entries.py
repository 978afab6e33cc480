"""Entries of `datasets:` of an Axolotl configuration: its file, with the path of an entry after `#`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grasp.errors import SettingsError, at
from grasp.formats.dataset_entries import part_of_file, select_entry, split_address, unused_note
from grasp.yaml_files import read_yaml

_YAML = (".yaml", ".yml")
_OF_TOKENIZER = ("special_tokens", "tokens", "added_tokens_overrides", "eot_tokens", "default_system_message")
# Names of Axolotl (`SFTDataset`, `PretrainingDataset`, `DPODataset`) that are interpreted.
_USED = (
    *("path", "data_files", "split", "type", "field", "text_column", "chat_template", "chat_template_jinja"),
    *("roles", "message_property_mappings", "message_field_role", "message_field_content", "drop_system_message"),
    *("roles_to_train", "message_field_training", "message_field_training_detail", "train_on_eos", "train_on_eot"),
    *("field_messages", "field_tools", "field_system", "field_thinking", "field_chosen", "field_rejected"),
)
_INSTRUCTION = ("instruction", "input", "output", "system")  # parts of records of a type that is a mapping
_TYPE_FORMATS = ("format", "no_input_format", "system_format", "system_prompt")
_REFUSED = ("shards", "skip", "name", "revision", "split_thinking", "template_thinking_key")  # change data or text
# Names that change nothing: `shards_idx` does with `shards`, the last two for types that are refused.
_NEUTRAL = ("ds_type", "trust_remote_code", "preprocess_shards", "shards_idx", "input_transform", "temperature")
_TEXT_TYPES = ("completion", "pretrain")
_CHAT_TYPES = ("chat_template", "chat_template.default", "chat_template.load")
_ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"], "tool": ["tool"]}
# Axolotl's AlpacaPrompter
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def claims(path: str) -> str:
    """Return why a path addresses an entry: a corpus is never YAML, so that such a file is a configuration."""
    file, _ = split_address(path)
    return f"{file} is YAML, as configurations of Axolotl are" if file.suffix in _YAML and file.is_file() else ""


def read(path: str) -> dict[str, Any]:
    """Return the settings of a corpus that an entry stands for.

    Raises:
        SettingsError: there is no entry of that name, several and none is named, or it is not supported.
    """
    file, name = split_address(path)
    config = read_yaml(file)
    key = next((key for key in ("datasets", "pretraining_dataset") if config.get(key)), None)
    if key is None:
        raise SettingsError(f"{file}: not an Axolotl configuration: no `datasets`; expected a file of records")
    # entries by path; by path and number if a path occurs several times
    entries: dict[str, Mapping[str, Any]] = {}
    for number, entry in enumerate(config[key] if isinstance(config[key], list) else [config[key]]):
        fields = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, dict) or not isinstance(fields.get("path"), str):
            raise SettingsError(f"{file}: {key}[{number}]: got {entry!r:.60}, expected an entry with a path")
        if key == "pretraining_dataset":
            fields = {"type": "pretrain", "field": fields.get("text_column"), **fields}
        entries[f"{fields['path']}:{number}" if fields["path"] in entries else fields["path"]] = fields
    name, fields = select_entry(entries, name, file)
    with at(f"{file}#{name}"):
        names, notes = _names_of(fields, config)
        if set_names := [name for name in (*_OF_TOKENIZER, "sequence_len") if config.get(name)]:
            notes.append(
                f"not applied: {', '.join(set_names)}; pass Axolotl's tokenizer (--tokenizer), and --max-length"
            )
        data_files = fields.get("data_files") or []
        data_files = data_files if isinstance(data_files, list) else [data_files]
        if len(data_files) > 1:
            raise SettingsError(f"data_files: got {len(data_files)} files, expected one; pass a directory of them")
        if unsupported := [f"{setting}: got {fields[setting]!r}" for setting in _REFUSED if fields.get(setting)]:
            raise SettingsError(f"{unsupported[0]}, which is not supported; save such data as a file")
        resolved: dict[str, Any] = {"path": fields["path"]}
        if data_files:
            local = Path(fields["path"]) / data_files[0]
            resolved["path"] = str(local if local.is_file() else data_files[0])
        if fields.get("split"):
            is_file = Path(resolved["path"]).is_file()
            resolved["split"] = part_of_file(fields["split"]) if is_file else fields["split"]
        if config.get("train_on_inputs"):
            resolved["loss_on"] = "all"
    origin = f"Axolotl entry {name!r} of {file}"
    return resolved | {"fields": names | {"origin": origin, "notes": notes}}


def _names_of(fields: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the names of the parts of records, and notes on what is not read; defaults are those of Axolotl 0.19."""
    notes, kind = unused_note(fields, (*_USED, *_REFUSED), _NEUTRAL), fields.get("type")
    is_pair = fields.get("field_chosen") or config.get("rl")
    base = kind.partition(":")[0] if isinstance(kind, str) else kind
    is_chat = base in _CHAT_TYPES or base == "sharegpt"
    if is_pair and not is_chat:
        raise SettingsError(f"type: got {kind!r:.60} for preference pairs, expected chat_template.default")
    if kind is None or base in _TEXT_TYPES:
        return {"form": "text", "columns": {"text": fields.get("field") or "text"}}, notes
    if is_chat:
        names = _chat_names(fields, is_sharegpt=base == "sharegpt")
        if is_pair:
            pair = {usual: fields.get(f"field_{usual}") or usual for usual in ("chosen", "rejected")}
            columns = {key: value for key, value in names["columns"].items() if key != "tools"}
            names |= {"form": "preference", "columns": columns | pair}
        elif fields.get("roles_to_train") == [] and not config.get("train_on_inputs"):
            if not fields.get("message_field_training"):
                raise SettingsError("roles_to_train: got [], which requires message_field_training")
            names["only_marked"] = True
        jinja = "jinja" if fields.get("chat_template_jinja") else None
        template = fields.get("chat_template") or jinja or config.get("chat_template")
        if template not in (None, "tokenizer_default") and base != "sharegpt":
            notes.append(f"chat_template: {template} is not read: the tokenizer's chat template writes the text")
        return names, notes
    if kind == "alpaca":
        kind = {"format": _ALPACA_WITH_INPUT, "no_input_format": _ALPACA}
        parts: tuple[str, ...] = _INSTRUCTION[:3]
    elif isinstance(kind, dict):
        parts = _INSTRUCTION
        with at("type"):
            notes += unused_note(kind, (*(f"field_{part}" for part in parts), *_TYPE_FORMATS))
    else:
        raise SettingsError(
            f"type: got {kind!r}, expected completion, chat_template, sharegpt, alpaca, or a mapping with "
            "field_instruction; pass the data file, and templates with --set corpus.prompt and corpus.completion"
        )
    names = {
        "form": "formatted",
        "columns": {part: kind.get(f"field_{part}") or part for part in parts},
        "formats": {
            "with_input": kind.get("format") or "{instruction} {input} ",
            "without_input": kind.get("no_input_format") or "{instruction} ",
            "system": kind.get("system_format") or ("{system}" if "system" in parts else ""),
            "default_system": kind.get("system_prompt") or "",
        },
    }
    return names, notes


def _chat_names(fields: Mapping[str, Any], *, is_sharegpt: bool) -> dict[str, Any]:
    """Return names of a chat entry, of type chat_template or of the former type sharegpt."""
    keys = fields.get("message_property_mappings") or {
        "role": fields.get("message_field_role") or ("from" if is_sharegpt else "role"),
        "content": fields.get("message_field_content") or ("value" if is_sharegpt else "content"),
    }
    keys = {"role": "role", "content": "content", **keys}
    for key, field in (("reasoning_content", "field_thinking"), ("train", "message_field_training")):
        if fields.get(field):
            keys[key] = fields[field]
    sources: Mapping[str, list[str]] = fields.get("roles") or _ROLES
    roles = {source: role for role, group in sources.items() for source in group}
    trained = [roles.get(role, role) for role in fields.get("roles_to_train") or ["assistant"]]
    if trained != ["assistant"] or fields.get("message_field_training_detail"):
        unsupported = "roles_to_train" if trained != ["assistant"] else "message_field_training_detail"
        raise SettingsError(f"{unsupported}: only whole turns of the assistant can carry loss; remove it")
    if fields.get("train_on_eos") not in (None, "turn") or fields.get("train_on_eot") not in (None, "turn"):
        raise SettingsError("train_on_eos: only `turn` is supported: each answer with its end of turn")
    messages = fields.get("field_messages") or ("conversations" if is_sharegpt else "messages")
    columns = {"messages": messages, "tools": fields.get("field_tools") or "tools"}
    if not fields.get("drop_system_message"):
        columns["system"] = fields.get("field_system") or "system"
    drop_system = bool(fields.get("drop_system_message"))
    return {"form": "messages", "columns": columns, "turn_keys": keys, "roles": roles, "drop_system": drop_system}
