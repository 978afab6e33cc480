"""Records whose parts have other names than the usual ones, converted to records that have them.

The names are those of a dataset entry, or of the setting `corpus.fields`. Start with `read`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grasp.corpus.conversations import FAILURES, HISTORY, PAIR, TURNS, holds_turns, parse_history, parse_turns
from grasp.errors import CorpusError
from grasp.settings import FieldNames


def claims(names: FieldNames) -> str:
    """Claim all names that no other package claims."""
    return "its columns, keys or roles have other names"


def read(values: Mapping[str, Any], names: FieldNames) -> dict[str, Any]:
    """Return a record with the usual names: text, turns, prompt and completion, an instruction, or a pair.

    Args:
        values: content of the record, by the usual name of its column.
        names: names of the parts of records.
    Raises:
        CorpusError: a turn has an unknown role, or a value another type.
    """
    record = dict(values)
    if names.form == "preference":
        if "instruction" in record:  # LLaMA-Factory's form of instructions
            parts = [record.pop(name, None) for name in ("instruction", "input")]
            question = names.separator.join(part for part in parts if part)
            pairs = [*parse_history(record.pop(HISTORY, None)), (question, None)]
            turns = [(role, words) for pair in pairs for role, words in zip(("user", "assistant"), pair, strict=True)]
            record["prompt"] = [{"role": role, "content": words} for role, words in turns if words is not None]
        for name in ("messages", *PAIR):
            side = record.get(name)
            if isinstance(side, Mapping):
                record[name] = _usual_turns([side], names)
            elif isinstance(side, list):
                record[name] = _usual_turns(parse_turns(side, name), names)
        return record
    if names.form == "formatted":
        assert names.formats is not None
        texts = {name: "" if value is None else value for name, value in values.items()}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise CorpusError(f"column {names.columns[name]!r} holds {type(value).__name__}, expected text")
        formats, system = names.formats, texts.get("system") or names.formats.default_system
        try:
            front = formats.system.format(system=system) if system else ""
            prompt = (formats.with_input if texts.get("input") else formats.without_input).format(
                instruction=texts["instruction"], input=texts.get("input", "")
            )
        except FAILURES as err:
            raise CorpusError(f"does not fit the formats of the {names.origin}: {err!r}") from err
        return {"prompt": front + prompt, "completion": texts["output"]}
    if names.form == "instruction":
        parts = [record["instruction"], record.pop("input", None)]
        if all(isinstance(part, str | None) for part in parts):  # other types are refused with all records
            record["instruction"] = names.separator.join(part for part in parts if (part or "").strip())
        return record
    for column in TURNS:
        if holds_turns(record.get(column), column):
            record[column] = _usual_turns(parse_turns(record[column], column), names)
    return record


def _usual_turns(turns: Sequence[Mapping[str, Any]], names: FieldNames) -> list[dict[str, Any]]:
    """Return turns with the usual keys and roles."""
    keys = {source: standard for standard, source in names.turn_keys.items()}
    standard_turns = []
    for k, turn in enumerate(turns):
        standard = {
            keys.get(key, key): value for key, value in turn.items() if key in keys or key not in names.turn_keys
        }
        role = standard.get("role")
        if names.roles and role not in names.roles:
            raise CorpusError(
                f"turn {k}: got the role {role!r:.60}, expected one of {', '.join(names.roles)}, the roles "
                f"of the {names.origin}"
            )
        standard["role"] = names.roles.get(str(role), role)
        if names.only_marked and standard.get("train") is None:
            standard["train"] = False
        if not (names.drop_system and standard["role"] == "system"):
            standard_turns.append(standard)
    # LLaMA-Factory leaves out conversations that do not end with an answer
    leaves_out = names.origin.startswith("LLaMA-Factory") and names.form == "messages"
    has_answer = bool(standard_turns) and standard_turns[-1]["role"] in ("assistant", "function_call")
    return [] if leaves_out and not has_answer else standard_turns
