"""Parse records of multiple choice: the prompt, the choices, and which of them is right.

Choices are texts in `choices` or `options`, texts with labels as in ARC, or columns `A`, `B`, `C`. The answer names the
right choice by its label, text, letter or position, which are called encodings here. An answer may fit several
encodings: of the choices 3, 2, 1, 0 the answer "2" is a text or a position. All records of a file use one encoding,
which is therefore inferred from the whole file.

Parse each record with `parse_choices`, then infer the right choices of all records with `right_choices`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_uppercase
from typing import Any

from grasp.errors import TargetError

CHOICES = ("choices", "options")
ANSWERS = ("gold", "answer", "answerKey", "label", "answer_idx", "answer_index", "correct_option")
PASSAGES = ("context", "passage", "article")  # a text that a question is about
ENCODINGS = ("label", "text", "letter", "position")
# Positions that are never 0 are assumed to count from 1 if that is less likely than this under random positions.
MAX_CHANCE = 1e-3
_DECORATED = re.compile(r"^\(?([A-Za-z0-9])[).:]?$")  # a label such as (B), B) or B.


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """A record of multiple choice.

    Attributes:
        location: file and line of the record, for messages.
        prompt: text before the choices.
        texts: the choices.
        answer_field: name of the field that has the answer.
        answer: value of that field.
        right: position of the right choice by each encoding that fits the answer.
    """

    location: str
    prompt: str
    texts: tuple[str, ...]
    answer_field: str
    answer: Any
    right: Mapping[str, int]

    def fields(self, gold: int) -> dict[str, Any]:
        """Return the fields of a unit.

        White space around the choices is that which all of them have. Without any before them, a space separates them
        from the prompt, unless the prompt ends in white space.

        Args:
            gold: position of the right choice.
        """
        before = _common_space(self.texts)
        after = _common_space([text[::-1] for text in self.texts])[::-1]
        texts = [before + text.strip() + after for text in self.texts]
        changed = sum(text != original for text, original in zip(texts, self.texts, strict=True))
        if self.prompt and not before and not self.prompt[-1:].isspace():
            texts = [f" {text}" for text in texts]
        choices = {"choices": texts, "gold": gold, "changed_choices": changed}
        return {"prompt": self.prompt, "completion": texts[gold], **choices}


def _common_space(texts: Sequence[str]) -> str:
    """Return the white space that all texts begin with."""
    shortest = min((text[: len(text) - len(text.lstrip())] for text in texts), key=len)
    return shortest if all(text.startswith(shortest) for text in texts) else ""


def question_prompt(values: Mapping[str, Any]) -> str | None:
    """Return the prompt of a record: `prompt`, or its question after the passage that it is about; None: neither.

    Raises:
        TargetError: the passage is not a text.
    """
    if isinstance(values.get("prompt"), str):
        return str(values["prompt"])
    if "question" not in values:
        return None
    name = next((name for name in PASSAGES if values.get(name)), None)
    passage = "" if name is None else values[name]
    if not isinstance(passage, str):
        raise TargetError(
            f"{name}: got {type(passage).__name__}, expected the text that the question is about; write "
            "the record as `prompt` and `completion`"
        )
    return f"{passage}\n" * bool(passage.strip()) + f"Question: {values['question']}\nAnswer:"


def choices_field(values: Mapping[str, Any]) -> str | None:
    """Return the field with the choices of a record, `A` for columns A, B, C; None: it is not multiple choice.

    Args:
        values: fields of the record that are not null.
    """
    if isinstance(values.get("completion"), str):
        return None
    is_nested = isinstance(values.get("question"), Mapping)  # ARC and CommonsenseQA as they were released
    if CHOICES[0] in values or is_nested:
        return CHOICES[0]
    has_columns = all(isinstance(values.get(letter), str) for letter in "AB")
    # `options` or a column `A` may mean something else in a record that is not multiple choice
    is_question = any(field in values for field in ANSWERS) and question_prompt(values) is not None
    name = CHOICES[1] if CHOICES[1] in values else "A" if has_columns else None
    return name if is_question else None


def parse_choices(values: Mapping[str, Any], location: str) -> MultipleChoice:
    """Parse a record of multiple choice, one with a `choices_field`.

    Raises:
        TargetError: the choices are not texts, the prompt is missing, or the answer is none of them.
    """
    name = choices_field(values)
    if isinstance(values.get("question"), Mapping):
        values = {**values, "question": values["question"].get("stem"), "choices": values["question"].get("choices")}
    letters = [letter for letter in ascii_uppercase if isinstance(values.get(letter), str)]
    choices: Any = values[name] if name in CHOICES else {letter: values[letter] for letter in letters}
    labels: Any = None
    if isinstance(choices, Mapping):
        is_columnar = "text" in choices  # {"text": [...], "label": [...]}, else {"A": ..., "B": ...}
        choices, labels = (choices["text"], choices.get("label")) if is_columnar else ([*choices.values()], [*choices])
    elif isinstance(choices, list) and all(isinstance(entry, Mapping) for entry in choices):
        choices, labels = ([entry.get(member) for entry in choices] for member in ("text", "label"))
    prompt, answer_fields = question_prompt(values), [field for field in ANSWERS if field in values]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) for text in choices):
        fault = f"{name}: got {choices!r:.60}, expected a list of at least two texts"
    elif prompt is None:
        fault = f"has {name}, but no text `prompt` or `question` before them"
    elif not answer_fields:
        fault = f"has {name}, but none of the fields {', '.join(ANSWERS)} says which is right"
    else:
        for field in answer_fields:
            if right := _right_by_encoding(values[field], choices, labels):
                return MultipleChoice(location, prompt, tuple(choices), field, values[field], right)
        fault = (
            f"{answer_fields[0]}: got {values[answer_fields[0]]!r:.60}, expected the label, text, letter or position "
            f"(from 0) of one of the {len(choices)} choices"
        )
    raise TargetError(fault)


def _right_by_encoding(answer: Any, choices: Sequence[str], labels: Any) -> dict[str, int]:
    """Return the position of the right choice by each encoding that fits."""
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    if isinstance(answer, bool) or not isinstance(answer, int | str):
        return {}
    text = str(answer).strip()
    undecorated = _DECORATED.sub(r"\1", text)
    has_labels = isinstance(labels, list) and len(labels) == len(choices)
    names_of_choices = {"label": [str(label).strip() for label in labels] if has_labels else []}
    if isinstance(answer, str):
        names_of_choices |= {
            "text": [option.strip() for option in choices],
            "letter": list(ascii_uppercase[: len(choices)]),
        }
    right = {}
    for encoding, names in names_of_choices.items():
        spellings = (text,) if encoding == "text" else (text, undecorated, undecorated.upper())
        if match := next((spelling for spelling in spellings if spelling in names), None):
            right[encoding] = names.index(match)
    if text.isdecimal() and int(text) < len(choices):
        right["position"] = int(text)
    return right


def right_choices(records: Sequence[MultipleChoice]) -> list[int]:
    """Return the position of the right choice of each record of a file, by the encoding that fits all answers.

    Args:
        records: all multiple-choice records of the file.
    Raises:
        TargetError: the encoding of the answers is ambiguous, or positions seem to count from 1.
    """
    fitting = [encoding for encoding in ENCODINGS if records and all(encoding in r.right for r in records)]
    if not fitting:  # encodings are mixed: the first one that fits each answer, in the order of `ENCODINGS`
        return [
            next(record.right[encoding] for encoding in ENCODINGS if encoding in record.right) for record in records
        ]
    fitting = ["label"] if fitting[0] == "label" else fitting  # explicit, so it is not ambiguous
    gold = [record.right[fitting[0]] for record in records]
    ambiguous = [record for record in records if len({record.right[encoding] for encoding in fitting}) > 1]
    fault = ""
    if ambiguous:
        record = ambiguous[0]
        meanings = [f"the {name} of {record.texts[record.right[name]]!r:.60}" for name in fitting]
        fault = (
            f"got {record.answer!r:.60}, which is {' or '.join(meanings)}, and no other record says which; write "
            "positions as numbers"
        )
    elif fitting == ["position"] and all(gold) and prod(1 - 1 / len(r.texts) for r in records) < MAX_CHANCE:
        fault = (
            f"none of the {len(records)} answers is 0; positions count from 0, and these seem to count from 1: "
            "subtract 1"
        )
    if fault:
        record = (ambiguous or records)[0]
        raise TargetError(f"{record.location}: {record.answer_field}: {fault}, or write the choices with labels")
    return gold
