"""Configurations of trainers: unknown fields, and entries of data sets, which the readers of `corpus` share.

An entry names a data set, and the columns, keys and roles of its records. It is addressed as `FILE#NAME`, or as `FILE`
if it is the only one. The readers are `llama_factory_entries` and `axolotl_entries`.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grasp.errors import SettingsError

MIN_SIMILARITY = 0.8  # of an unknown name to a used one, in `difflib`: from there on it is a typing error


def split_address(path: str) -> tuple[Path, str]:
    """Return file and name of an entry that a path may address; the name is empty if the path has none."""
    location, _, name = path.partition("#") if "#" in path and not os.path.lexists(path) else (path, "", "")
    return Path(location), name


def select_entry(entries: Mapping[str, Mapping[str, Any]], name: str, file: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and fields of the named entry, or of the only one.

    Raises:
        SettingsError: there is no entry of that name, or several and none is named.
    """
    if not name and len(entries) == 1:
        return next(iter(entries.items()))
    if name in entries:
        return name, entries[name]
    got = f"no entry {name!r}" if name else f"{len(entries)} entries"
    raise SettingsError(f"{file}: {got}; select one of {', '.join(f'{file}#{known}' for known in entries)}")


def part_of_file(split: str) -> str | None:
    """Return the range of the only split of a file, such as [:10%]; None: all of it."""
    name, bracket, end = split.partition("[")
    if name != "train":
        raise SettingsError(f"split: got {split!r}, but the only split of a file is train")
    return bracket + end or None


def unused_note(fields: Mapping[str, Any], used: Collection[str], neutral: Collection[str] = ()) -> list[str]:
    """Return a note on the fields with a value that are unknown; empty if there are none."""
    unknown = unknown_names((name for name, value in fields.items() if value is not None), used, neutral)
    return [f"not used: {', '.join(unknown)}"] if unknown else []


def unknown_names(
    names: Iterable[str], used: Collection[str], neutral: Collection[str], mistaken: Mapping[str, str] | None = None
) -> list[str]:
    """Return the names that are neither used nor known to change nothing, in their order.

    Args:
        names: the fields of a file that have a value.
        used: names that the reader interprets or refuses.
        neutral: names that change neither the training nor the data.
        mistaken: right name by a wrong one that is too different for `difflib`.

    Raises:
        SettingsError: an unknown name resembles a used one.
    """
    unknown = [name for name in names if name not in used and name not in neutral]
    for name in unknown:
        right = (mistaken or {}).get(name)
        if close := [right] if right else get_close_matches(name, used, 1, MIN_SIMILARITY):
            raise SettingsError(f"unknown field {name}; did you mean {close[0]}?")
    return unknown
