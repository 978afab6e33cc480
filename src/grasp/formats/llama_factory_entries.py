"""Entries of `dataset_info.json` of LLaMA-Factory: the file, or its directory, with the name of an entry after `#`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grasp.errors import SettingsError, at
from grasp.formats.dataset_entries import part_of_file, select_entry, split_address, unused_note

LLAMA_FACTORY = "dataset_info.json"
_SAVED = ("state.json", "dataset_dict.json")  # next to a `dataset_info.json` that `datasets` wrote
_LOCATIONS = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios", "kto_tag")
# Names of LLaMA-Factory (`DatasetAttr`) that are interpreted or refused.
_FIELDS = (*_LOCATIONS, "formatting", "ranking", "columns", "tags", "split", "num_samples", "subset", "folder")
_COLUMNS = {  # of records by ours; and their names in LLaMA-Factory if an entry has no `columns`
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
    **dict.fromkeys(("history", "system", "tools", "chosen", "rejected", *_MEDIA)),
}
_TURN_TAGS = {"role_tag": "from", "content_tag": "value"}  # keys of a turn, and their defaults
_ROLE_TAGS = {  # roles: the default of each tag, and what it means
    "system_tag": ("system", "system"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "assistant_tag": ("gpt", "assistant"),
    "user_tag": ("human", "user"),
}


def claims(path: str) -> str:
    """Return why a path addresses an entry; `datasets` writes files of the same name, with other content."""
    entries, file, _ = _entries_at(path)
    return f"{file} has entries of LLaMA-Factory" if entries else ""


def read(path: str) -> dict[str, Any]:
    """Return the settings of a corpus that an entry stands for.

    Raises:
        SettingsError: there is no entry of that name, several and none is named, or it is not supported.
    """
    entries, file, name = _entries_at(path)
    name, fields = select_entry(entries, name, file)
    with at(f"{file}#{name}"):
        return _settings_of(name, fields, file)


def _entries_at(path: str) -> tuple[dict[str, Mapping[str, Any]], Path, str]:
    """Return the entries that describe data, their file, and the name that the path selects."""
    file, name = split_address(path)
    if file.is_dir() and not any((file / saved).exists() for saved in _SAVED):
        file /= LLAMA_FACTORY
    if file.name != LLAMA_FACTORY or not file.is_file():
        return {}, file, name
    try:
        entries = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as err:
        raise SettingsError(f"{file}: not JSON: {err}; fix the file") from err
    if not isinstance(entries, dict) or not entries or not all(isinstance(entry, dict) for entry in entries.values()):
        return {}, file, name
    described = {key: entry for key, entry in entries.items() if any(place in entry for place in _LOCATIONS)}
    return described, file, name


def _settings_of(name: str, fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings of an entry; defaults are those of `DatasetAttr` of LLaMA-Factory 0.9."""
    formatting, ranking = fields.get("formatting", "alpaca"), bool(fields.get("ranking"))
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise SettingsError(f"formatting: got {formatting!r}, expected alpaca, sharegpt or openai")
    columns = _names(fields, "columns", _COLUMNS)
    if media := [column for column in _MEDIA if columns.get(column)]:
        raise SettingsError(f"columns.{media[0]}: only texts are supported, without media or KTO tags")
    place = next((place for place in _LOCATIONS[:2] if place in fields), None)
    unsupported = [name for name in ("subset", "folder") if fields.get(name) and place != "file_name"]
    if place is None or unsupported:
        first = next(name for name in (*unsupported, *_LOCATIONS) if name in fields)
        raise SettingsError(f"{first} is not supported; download the data, and name it by file_name")
    split = fields.get("split") or "train"
    resolved: dict[str, Any] = {"path": fields[place], "split": split}
    if place == "file_name":
        resolved = {"path": str(file.parent / fields[place]), "split": part_of_file(split)}
    notes = ["LLaMA-Factory's own templates are not read: the tokenizer's chat template writes the text"]
    if fields.get("num_samples"):
        notes.append(f"num_samples: {fields['num_samples']} is not applied")
    notes += [f"{other} is not read, but {place}" for other in _LOCATIONS if other in fields and other != place]
    notes += unused_note(fields, _FIELDS)
    with at("columns"):
        notes += unused_note(columns, _COLUMNS)
    names: dict[str, Any] = {"origin": f"LLaMA-Factory entry {name!r} of {file}", "separator": "\n"}
    shared = {usual: columns[usual] for usual in ("system", "tools", "history") if columns.get(usual)}
    pair = {usual: columns.get(usual) for usual in ("chosen", "rejected")} if ranking else {}
    if not all(pair.values()):
        raise SettingsError("ranking needs columns.chosen and columns.rejected")
    if formatting == "alpaca":
        usual = {"instruction": columns.get("prompt"), "input": columns.get("query"), "output": columns.get("response")}
        named = {key: column for key, column in usual.items() if column}
        is_text = "output" not in named and not ranking  # as in pretraining
        if is_text and "instruction" not in named:
            raise SettingsError("columns: expected prompt and response, or prompt alone for plain text")
        if is_text:
            names |= {"form": "text", "columns": {"text": named["instruction"]}}
            notes = notes[1:]
        else:
            names |= {"form": "preference" if ranking else "instruction", "columns": {**named, **pair, **shared}}
    else:
        defaults = _TURN_TAGS | {tag: source for tag, (source, _) in _ROLE_TAGS.items()}
        tags = _names(fields, "tags", defaults)
        with at("tags"):
            notes += unused_note(tags, defaults)
        if missing := [tag for tag in _TURN_TAGS if not tags.get(tag)]:
            raise SettingsError(f"tags.{missing[0]} is missing; with `tags`, all of them must be given")
        names |= {
            "form": "preference" if ranking else "messages",
            "columns": {"messages": columns.get("messages") or "conversations", **shared, **pair},
            "turn_keys": {"role": tags["role_tag"], "content": tags["content_tag"]},
            "roles": {tags[tag]: role for tag, (_, role) in _ROLE_TAGS.items() if tags.get(tag)},
        }
    return resolved | {"fields": names | {"notes": notes}}


def _names(fields: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the names that an entry gives for columns or tags; the defaults if it gives none."""
    names = fields.get(key, defaults)
    if not isinstance(names, dict) or not all(isinstance(name, str | None) for name in names.values()):
        raise SettingsError(f"{key}: got {names!r:.60}, expected names by role")
    return names
