"""Parse records of multiple choice: the prompt, the choices, and which of them is right.

Choices are texts in `choices` or `options`, texts with labels as in ARC, or columns `A`, `B`, `C`. The right one is
given by its label, its text, its letter or its position. An answer may fit several: of the choices 3, 2, 1, 0 the
answer "2" is a text or a position. All records of a file use one encoding, which is therefore inferred from the whole
file. Start with `parse_choices` and `right_choices`.
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
MAX_CHANCE = 1e-3  # of positions without 0, below which they are assumed to count from 1
_DECORATED = re.compile(r"^\(?([A-Za-z0-9])[).:]?$")  # a label such as (B), B) or B.


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """A record of multiple choice.

    Attributes:
        name: field of the answer.
        right: position of the right choice, by the encodings that fit the answer.
    """

    location: str
    prompt: str
    texts: tuple[str, ...]
    name: str
    answer: Any
    right: Mapping[str, int]

    def fields(self, gold: int) -> dict[str, Any]:
        """Return the fields of a unit; a space separates choices from a prompt that they would touch."""
        is_apart = self.prompt[-1:].isspace() or any(text[:1].isspace() for text in self.texts)
        space = " " if self.prompt and not is_apart else ""
        texts = [space + text for text in self.texts]
        return {"prompt": self.prompt, "completion": texts[gold], "choices": texts, "gold": gold}


def question_prompt(values: Mapping[str, Any], location: str) -> str | None:
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
            f"{location}: {name}: got {type(passage).__name__}, expected the text that the question is about; write "
            "the record as `prompt` and `completion`"
        )
    return f"{passage}\n" * bool(passage.strip()) + f"Question: {values['question']}\nAnswer:"


def parse_choices(record: Mapping[str, Any], location: str) -> MultipleChoice | None:
    """Parse a record of multiple choice; None: it has no choices, or a completion of its own.

    Raises:
        TargetError: the choices are not texts, the prompt is missing, or the answer is none of them.
    """
    values = {name: value for name, value in record.items() if value is not None}
    if isinstance(values.get("question"), Mapping):  # ARC and CommonsenseQA as they were released
        values |= {"question": values["question"].get("stem"), "choices": values["question"].get("choices")}
    columns = [letter for letter in ascii_uppercase if isinstance(values.get(letter), str)]
    name = next((name for name in CHOICES if name in values), "A" if {"A", "B"} <= {*columns} else None)
    if name is None or isinstance(values.get("completion"), str):
        return None
    choices: Any = values[name] if name in CHOICES else {letter: values[letter] for letter in columns}
    labels: Any = None
    if isinstance(choices, Mapping):
        is_table = "text" in choices
        choices, labels = (choices["text"], choices.get("label")) if is_table else ([*choices.values()], [*choices])
    elif isinstance(choices, list) and all(isinstance(part, Mapping) for part in choices):
        choices, labels = ([entry.get(member) for entry in choices] for member in ("text", "label"))
    prompt, answers = question_prompt(values, location), [field for field in ANSWERS if field in values]
    if name != CHOICES[0] and (prompt is None or not answers):  # columns of another meaning
        return None
    if prompt is None:
        raise TargetError(f"{location}: has {name}, but no text `prompt` or `question` before them")
    if not answers:
        raise TargetError(f"{location}: has {name}, but none of the fields {', '.join(ANSWERS)} says which is right")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) for text in choices):
        raise TargetError(f"{location}: {name}: got {choices!r:.60}, expected a list of at least two texts")
    for field in answers:
        if right := _right(values[field], choices, labels):
            return MultipleChoice(location, prompt, tuple(choices), field, values[field], right)
    raise TargetError(
        f"{location}: {answers[0]}: got {values[answers[0]]!r:.60}, expected the label, text, letter or position (from "
        f"0) of one of the {len(choices)} choices"
    )


def _right(answer: Any, choices: Sequence[str], labels: Any) -> dict[str, int]:
    """Return the position of the right choice by each encoding that fits."""
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, int | str):
        return {}
    text = str(answer).strip()
    bare = _DECORATED.sub(r"\1", text)
    has_labels = isinstance(labels, list) and len(labels) == len(choices)
    names = {"label": [str(label).strip() for label in labels] if has_labels else []}
    if isinstance(answer, str):
        names |= {"text": [option.strip() for option in choices], "letter": list(ascii_uppercase[: len(choices)])}
    right = {}
    for encoding, known in names.items():
        spellings = (text,) if encoding == "text" else (text, bare, bare.upper())
        if match := next((spelling for spelling in spellings if spelling in known), None):
            right[encoding] = known.index(match)
    if text.isdecimal() and int(text) < len(choices):
        right["position"] = int(text)
    return right


def right_choices(records: Sequence[MultipleChoice]) -> list[int]:
    """Return the position of the right choice of each record of a file.

    Raises:
        TargetError: the encoding of the answers is ambiguous, or positions seem to count from 1.
    """
    fitting = [encoding for encoding in ENCODINGS if all(encoding in quiz.right for quiz in records)]
    if not fitting:  # encodings are mixed
        return [next(quiz.right[encoding] for encoding in ENCODINGS if encoding in quiz.right) for quiz in records]
    if fitting[0] == "label":
        fitting = ["label"]
    for quiz in records:
        if len({quiz.right[encoding] for encoding in fitting}) > 1:
            meanings = " or ".join(f"the {name} of {quiz.texts[quiz.right[name]]!r:.60}" for name in fitting)
            raise TargetError(
                f"{quiz.location}: {quiz.name}: got {quiz.answer!r:.60}, which is {meanings}, and no other record says "
                "which; write positions as numbers, or the choices with labels"
            )
    gold = [quiz.right[fitting[0]] for quiz in records]
    if fitting == ["position"] and all(gold) and prod(1 - 1 / len(quiz.texts) for quiz in records) < MAX_CHANCE:
        raise TargetError(
            f"{records[0].location}: {records[0].name}: none of the {len(records)} answers is 0; positions count from "
            "0, and these seem to count from 1: subtract 1, or write the choices with labels"
        )
    return gold
