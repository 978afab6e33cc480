"""Entries of `dataset_info.json` of LLaMA-Factory: the file, or its directory, with the name of an entry after `#`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grasp.errors import SettingsError
from grasp.formats.dataset_entries import Entry, part_of_file, select_entry, split_address, unused_note

LLAMA_FACTORY = "dataset_info.json"
_SAVED = ("state.json", "dataset_dict.json")  # next to a `dataset_info.json` that `datasets` wrote
_LOCATIONS = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios", "kto_tag")
# Names of LLaMA-Factory (`DatasetAttr`) that are interpreted or refused.
_FIELDS = (*_LOCATIONS, "formatting", "ranking", "columns", "tags", "split", "num_samples", "subset", "folder")
_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", *_MEDIA)
_TAGS = tuple(f"{tag}_tag" for tag in ("role", "content", "user", "assistant", "observation", "function", "system"))


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
    return _settings_of(select_entry(entries, name, file), file)


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


def _settings_of(entry: Entry, file: Path) -> dict[str, Any]:
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
        resolved = {"path": str(file.parent / fields[place]), "split": part_of_file(split, location)}
    notes = ["LLaMA-Factory's own templates are not read: the tokenizer's chat template writes the text"]
    if fields.get("num_samples"):
        notes.append(f"num_samples: {fields['num_samples']} is not applied")
    notes += [f"{other} is not read, but {place}" for other in _LOCATIONS if other in fields and other != place]
    notes += unused_note(fields, _FIELDS, (), location)
    notes += unused_note(columns, _COLUMNS, (), f"{location}: columns")
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
        notes += unused_note(tags, _TAGS, (), f"{location}: tags")
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


def _mapping(fields: Mapping[str, Any], key: str, location: str) -> dict[str, str]:
    value = fields.get(key)
    if not isinstance(value, dict) or not all(isinstance(part, str | None) for part in value.values()):
        raise SettingsError(f"{location}: {key}: got {value!r:.60}, expected names by role")
    return value
