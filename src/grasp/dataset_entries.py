"""Resolve entries of dataset configurations: `dataset_info.json` of LLaMA-Factory, `datasets:` of Axolotl.

An entry names a data set, and the columns, keys and roles of its records. It is addressed as `FILE#NAME`, or as `FILE`
if it is the only one. Start with `resolve_entry`.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grasp.errors import SettingsError
from grasp.field_names import unknown_names
from grasp.yaml_files import read_yaml

LLAMA_FACTORY = "dataset_info.json"
_SAVED = ("state.json", "dataset_dict.json")  # next to a `dataset_info.json` that `datasets` wrote
_YAML = (".yaml", ".yml")
_LOCATIONS = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios", "kto_tag")
# Names of LLaMA-Factory (`DatasetAttr`) that are interpreted or refused.
_FIELDS = (*_LOCATIONS, "formatting", "ranking", "columns", "tags", "split", "num_samples", "subset", "folder")
_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", *_MEDIA)
_TAGS = tuple(f"{tag}_tag" for tag in ("role", "content", "user", "assistant", "observation", "function", "system"))
# Names of Axolotl (`SFTDataset`, `PretrainingDataset`, `DPODataset`) that are interpreted.
_DATA = ("path", "data_files", "split", "type", "field", "text_column", "chat_template", "chat_template_jinja")
_MESSAGES = ("roles", "message_property_mappings", "message_field_role", "message_field_content", "drop_system_message")
_LOSS = ("roles_to_train", "message_field_training", "message_field_training_detail", "train_on_eos", "train_on_eot")
_FIELDS_OF = tuple(f"field_{part}" for part in ("messages", "tools", "system", "thinking", "chosen", "rejected"))
_TYPE_FIELDS = tuple(f"field_{column}" for column in ("instruction", "input", "output", "system"))
_TYPE_FORMATS = ("format", "no_input_format", "system_format", "system_prompt")
_REFUSED = ("shards", "skip", "name", "revision", "split_thinking", "template_thinking_key")  # change data or text
# Names that change nothing: `shards_idx` does with `shards`, the last two for types that are refused.
_NEUTRAL = ("ds_type", "trust_remote_code", "preprocess_shards", "shards_idx", "input_transform", "temperature")
_TEXT_TYPES = ("completion", "pretrain")
_CHAT_TYPES = ("chat_template", "chat_template.default", "chat_template.load")
_TOKENIZER_TEMPLATES = (None, "tokenizer_default")
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


def resolve_entry(path: str) -> dict[str, Any] | None:
    """Return the settings of a corpus, see `CorpusSettings`, if a path addresses an entry; None: it does not.

    Raises:
        SettingsError: the configuration has no entry of that name, several and none is named, or an unsupported one.
    """
    location, _, name = path.partition("#") if "#" in path and not os.path.lexists(path) else (path, "", "")
    file = Path(location)
    if file.is_dir():
        if any((file / saved).exists() for saved in _SAVED) or not (file / LLAMA_FACTORY).is_file():
            return None
        file /= LLAMA_FACTORY
    if not file.is_file():
        return None
    if file.name == LLAMA_FACTORY:
        entries = _llama_factory_entries(file)
        if entries is None:
            return None
        return _llama_factory(_chosen(entries, name, file), file)
    if file.suffix not in _YAML:
        return None
    config = read_yaml(file)
    entries = _axolotl_entries(config, file)
    return _axolotl(_chosen(entries, name, file), config, file)


Entry = tuple[str, Mapping[str, Any]]  # name, and fields


def _chosen(entries: Mapping[str, Mapping[str, Any]], name: str, file: Path) -> Entry:
    if not name and len(entries) == 1:
        return next(iter(entries.items()))
    if name in entries:
        return name, entries[name]
    got = f"no entry {name!r}" if name else f"{len(entries)} entries"
    raise SettingsError(f"{file}: {got}; select one of {', '.join(f'{file}#{known}' for known in entries)}")


# ------------------------------------------------------------------------------------------------ LLaMA-Factory


def _llama_factory_entries(file: Path) -> dict[str, Mapping[str, Any]] | None:
    try:
        entries = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as err:
        raise SettingsError(f"{file}: not JSON: {err}; fix the file") from err
    if not isinstance(entries, dict) or not entries or not all(isinstance(entry, dict) for entry in entries.values()):
        return None
    described = {name: entry for name, entry in entries.items() if any(place in entry for place in _LOCATIONS)}
    return described or None  # `datasets` writes a file of this name, with other content


def _llama_factory(entry: Entry, file: Path) -> dict[str, Any]:
    """Return the settings of an entry; defaults are those of `DatasetAttr` of LLaMA-Factory 0.9."""
    name, fields = entry
    location = f"{file}#{name}"
    formatting, ranking = fields.get("formatting", "alpaca"), bool(fields.get("ranking"))
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise SettingsError(f"{location}: formatting: got {formatting!r}, expected alpaca, sharegpt or openai")
    defaults = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
    columns = _mapping(fields, "columns", location) if "columns" in fields else defaults
    if media := [column for column in _MEDIA if columns.get(column)]:
        raise SettingsError(f"{location}: columns.{media[0]}: only texts are supported, without media or KTO tags")
    place = next((place for place in _LOCATIONS[:2] if place in fields), None)
    unsupported = [name for name in ("subset", "folder") if fields.get(name) and place != "file_name"]
    if place is None or unsupported:
        first = next(name for name in (*unsupported, *_LOCATIONS) if name in fields)
        raise SettingsError(f"{location}: {first} is not supported; download the data, and name it by file_name")
    split = fields.get("split") or "train"
    resolved: dict[str, Any] = {"path": fields[place], "split": split}
    if place == "file_name":
        resolved = {"path": str(file.parent / fields[place]), "split": _part_of_file(split, location)}
    notes = ["LLaMA-Factory's own templates are not read: the tokenizer's chat template writes the text"]
    if fields.get("num_samples"):
        notes.append(f"num_samples: {fields['num_samples']} is not applied")
    notes += [f"{other} is not read, but {place}" for other in _LOCATIONS if other in fields and other != place]
    notes += _unused(fields, _FIELDS, (), location)
    notes += _unused(columns, _COLUMNS, (), f"{location}: columns")
    names: dict[str, Any] = {"origin": f"LLaMA-Factory entry {name!r} of {file}", "separator": "\n"}
    shared = {usual: columns[usual] for usual in ("system", "tools", "history") if columns.get(usual)}
    pair = {usual: columns.get(usual) for usual in ("chosen", "rejected")} if ranking else {}
    if not all(pair.values()):
        raise SettingsError(f"{location}: ranking needs columns.chosen and columns.rejected")
    if formatting == "alpaca":
        usual = {"instruction": columns.get("prompt"), "input": columns.get("query"), "output": columns.get("response")}
        named = {key: column for key, column in usual.items() if column}
        if "output" not in named and not ranking:  # as in pretraining
            if "instruction" not in named:
                raise SettingsError(
                    f"{location}: columns: expected prompt and response, or prompt alone for plain text"
                )
            names |= {"form": "text", "columns": {"text": named["instruction"]}}
            notes = notes[1:]
        elif ranking:
            names |= {"form": "preference", "columns": {**named, **pair, **shared}}
        else:
            names |= {"form": "instruction", "columns": {**named, **shared}}
    else:
        tags = {
            "role_tag": "from",
            "content_tag": "value",
            "user_tag": "human",
            "assistant_tag": "gpt",
            "observation_tag": "observation",
            "function_tag": "function_call",
            "system_tag": "system",
        }
        tags = _mapping(fields, "tags", location) if "tags" in fields else tags
        notes += _unused(tags, _TAGS, (), f"{location}: tags")
        if missing := [tag for tag in ("role_tag", "content_tag") if not tags.get(tag)]:
            raise SettingsError(f"{location}: tags.{missing[0]} is missing; with `tags`, all of them must be given")
        roles = {
            tags.get(f"{tag}_tag"): role
            for tag, role in (
                ("system", "system"),
                ("observation", "tool"),
                ("function", "function_call"),
                ("assistant", "assistant"),
                ("user", "user"),
            )
        }
        names |= {
            "form": "preference" if ranking else "messages",
            "columns": {"messages": columns.get("messages") or "conversations", **shared, **pair},
            "turn_keys": {"role": tags["role_tag"], "content": tags["content_tag"]},
            "roles": {tag: role for tag, role in roles.items() if tag},
        }
    return resolved | {"fields": names | {"notes": notes}}


def _part_of_file(split: str, location: str) -> str | None:
    """Return the range of the only split of a file, such as [:10%]; None: all of it."""
    name, bracket, end = split.partition("[")
    if name != "train":
        raise SettingsError(f"{location}: split: got {split!r}, but the only split of a file is train")
    return bracket + end or None


def _unused(fields: Mapping[str, Any], used: Collection[str], neutral: Collection[str], location: str) -> list[str]:
    """Return a note on the fields with a value that are unknown; empty if there are none."""
    unknown = unknown_names((name for name, value in fields.items() if value is not None), used, neutral, location)
    return [f"not used: {', '.join(unknown)}"] if unknown else []


def _mapping(fields: Mapping[str, Any], key: str, location: str) -> dict[str, str]:
    value = fields.get(key)
    if not isinstance(value, dict) or not all(isinstance(part, str | None) for part in value.values()):
        raise SettingsError(f"{location}: {key}: got {value!r:.60}, expected names by role")
    return value


# ------------------------------------------------------------------------------------------------------ Axolotl


def _axolotl_entries(config: Mapping[str, Any], file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the entries of a configuration by path; by path and number if a path occurs several times."""
    key = next((key for key in ("datasets", "pretraining_dataset") if config.get(key)), None)
    if key is None:
        raise SettingsError(f"{file}: not an Axolotl configuration: no `datasets`; expected a file of records")
    entries = config[key] if isinstance(config[key], list) else [config[key]]
    named: dict[str, Mapping[str, Any]] = {}
    for number, entry in enumerate(entries):
        fields = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, dict) or not isinstance(fields.get("path"), str):
            raise SettingsError(f"{file}: {key}[{number}]: got {entry!r:.60}, expected an entry with a path")
        if key == "pretraining_dataset":
            fields = {"type": "pretrain", "field": fields.get("text_column"), **fields}
        named[f"{fields['path']}:{number}" if fields["path"] in named else fields["path"]] = fields
    return named


def _axolotl(entry: Entry, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings of an entry; defaults are those of Axolotl 0.19."""
    name, fields = entry
    location, kind = f"{file}#{name}", fields.get("type")
    resolved: dict[str, Any] = {"path": _axolotl_path(fields, location)}
    if unsupported := [f"{setting}: got {fields[setting]!r}" for setting in _REFUSED if fields.get(setting)]:
        raise SettingsError(f"{location}: {unsupported[0]}, which is not supported; save such data as a file")
    if fields.get("split"):
        is_file = Path(resolved["path"]).is_file()
        resolved["split"] = _part_of_file(fields["split"], location) if is_file else fields["split"]
    if config.get("train_on_inputs"):
        resolved["loss_on"] = "all"
    notes = _unused(fields, (*_DATA, *_MESSAGES, *_LOSS, *_FIELDS_OF, *_REFUSED), _NEUTRAL, location)
    names: dict[str, Any] = {"origin": f"Axolotl entry {name!r} of {file}"}
    is_pair = fields.get("field_chosen") or config.get("rl")
    base = kind.partition(":")[0] if isinstance(kind, str) else kind
    if is_pair and base not in (*_CHAT_TYPES, "sharegpt"):
        raise SettingsError(f"{location}: type: got {kind!r:.60} for preference pairs, expected chat_template.default")
    if kind is None or base in _TEXT_TYPES:
        names |= {"form": "text", "columns": {"text": fields.get("field") or "text"}}
    elif base in _CHAT_TYPES or base == "sharegpt":
        names |= _axolotl_chat(fields, location, is_sharegpt=base == "sharegpt")
        if is_pair:
            names["form"] = "preference"
            pair = {usual: fields.get(f"field_{usual}") or usual for usual in ("chosen", "rejected")}
            names["columns"] = {key: value for key, value in names["columns"].items() if key != "tools"} | pair
        elif fields.get("roles_to_train") == [] and not config.get("train_on_inputs"):
            if not fields.get("message_field_training"):
                raise SettingsError(f"{location}: roles_to_train: got [], which requires message_field_training")
            names["only_marked"] = True
        jinja = "jinja" if fields.get("chat_template_jinja") else None
        template = fields.get("chat_template") or jinja or config.get("chat_template")
        if template not in _TOKENIZER_TEMPLATES and base != "sharegpt":
            notes.append(f"chat_template: {template} is not read: the tokenizer's chat template writes the text")
    elif base == "alpaca" and kind == base:
        columns = {usual: usual for usual in ("instruction", "input", "output")}
        formats = {"with_input": _ALPACA_WITH_INPUT, "without_input": _ALPACA}
        names |= {"form": "formatted", "columns": columns, "formats": formats}
    elif isinstance(kind, dict):
        notes += _unused(kind, (*_TYPE_FIELDS, *_TYPE_FORMATS), (), f"{location}: type")
        usual = ("instruction", "input", "output", "system")
        names |= {
            "form": "formatted",
            "columns": {column: kind.get(f"field_{column}") or column for column in usual},
            "formats": {
                "with_input": kind.get("format") or "{instruction} {input} ",
                "without_input": kind.get("no_input_format") or "{instruction} ",
                "system": kind.get("system_format") or "{system}",
                "default_system": kind.get("system_prompt") or "",
            },
        }
    else:
        raise SettingsError(
            f"{location}: type: got {kind!r}, expected completion, chat_template, sharegpt, alpaca, or a mapping with "
            "field_instruction; pass the data file, and templates with --set corpus.prompt and corpus.completion"
        )
    return resolved | {"fields": names | {"notes": notes}}


def _axolotl_path(fields: Mapping[str, Any], location: str) -> str:
    path, files = fields["path"], fields.get("data_files")
    if not files:
        return str(path)
    names = files if isinstance(files, list) else [files]
    if len(names) > 1:
        raise SettingsError(f"{location}: data_files: got {len(names)} files, expected one; pass a directory of them")
    local = Path(path) / names[0]
    return str(local if local.is_file() else names[0])


def _axolotl_chat(fields: Mapping[str, Any], location: str, *, is_sharegpt: bool) -> dict[str, Any]:
    """Return names of a chat entry, of type chat_template or of the former type sharegpt."""
    mappings = fields.get("message_property_mappings") or {
        "role": fields.get("message_field_role") or ("from" if is_sharegpt else "role"),
        "content": fields.get("message_field_content") or ("value" if is_sharegpt else "content"),
    }
    keys = {"role": "role", "content": "content", **mappings}
    if fields.get("field_thinking"):
        keys["reasoning_content"] = fields["field_thinking"]
    if fields.get("message_field_training"):
        keys["train"] = fields["message_field_training"]
    sources: Mapping[str, list[str]] = fields.get("roles") or {
        "user": ["human", "user"],
        "assistant": ["gpt", "assistant"],
        "system": ["system"],
        "tool": ["tool"],
    }
    roles = {source: role for role, group in sources.items() for source in group}
    trained = [roles.get(role, role) for role in fields.get("roles_to_train") or ["assistant"]]
    if trained != ["assistant"] or fields.get("message_field_training_detail"):
        unsupported = "roles_to_train" if trained != ["assistant"] else "message_field_training_detail"
        raise SettingsError(f"{location}: {unsupported}: only whole turns of the assistant can carry loss; remove it")
    if fields.get("train_on_eos") not in (None, "turn") or fields.get("train_on_eot") not in (None, "turn"):
        raise SettingsError(f"{location}: train_on_eos: only `turn` is supported: each answer with its end of turn")
    messages = fields.get("field_messages") or ("conversations" if is_sharegpt else "messages")
    columns = {"messages": messages, "tools": fields.get("field_tools") or "tools"}
    if not fields.get("drop_system_message"):
        columns["system"] = fields.get("field_system") or "system"
    return {
        "form": "messages",
        "columns": columns,
        "turn_keys": keys,
        "roles": roles,
        "drop_system": bool(fields.get("drop_system_message")),
    }
