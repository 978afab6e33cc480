"""Parse a record into a text, a prompt and its completion, or the turns of a conversation.

Reads turns in the form of OpenAI (`role`, `content`) and ShareGPT (`from`, `value`); an instruction with its input,
output and `history`; a prompt and its completion; any columns by two templates, format strings (`{question}`) or Jinja
(`{{ question }}`). Turns are normalised to what chat templates expect, as trainers do: null members are absent,
tool calls are lists, and turns marked `weight: 0` or `train: false` carry no loss. A model's chat template turns them
into text later. Start with `form_of` and `Form.read`.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from string import Formatter
from typing import Any, Final

import pyarrow as pa

from grasp.corpus.values import plain_json
from grasp.errors import CorpusError
from grasp.extras import require
from grasp.file_readers import claimed
from grasp.settings import CorpusSettings, FieldNames

FAILURES = (KeyError, IndexError, AttributeError, TypeError, ValueError)


class Template:
    """A validated template.

    Args:
        text: Jinja if it contains `{{` or `{%`, else a format string.
        setting: name of the setting that holds it, for messages.
    Raises:
        CorpusError: neither is valid.
    """

    def __init__(self, text: str, setting: str) -> None:
        self._setting, self._fill = setting, text.format_map
        self._failures: tuple[type[Exception], ...] = FAILURES
        if "{{" in text or "{%" in text:
            feature = f"{setting}, which is a Jinja template"
            jinja, sandbox, meta = (
                require(module, extra="chat", feature=feature) for module in ("jinja2", "jinja2.sandbox", "jinja2.meta")
            )
            # in a sandbox, since the text may come from a file of somebody else
            environment = sandbox.ImmutableSandboxedEnvironment(
                undefined=jinja.StrictUndefined, keep_trailing_newline=True
            )
            try:
                self._fill = environment.from_string(text).render
                self.columns = frozenset(meta.find_undeclared_variables(environment.parse(text)))
            except jinja.TemplateError as err:
                raise CorpusError(f"{setting}: {text!r} is not a valid Jinja template: {err}") from err
            self._failures = (*FAILURES, jinja.TemplateError)
            return
        try:
            fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
            fault = "has a field without a name, expected columns such as {question}"
        except ValueError as err:
            fields, fault = [""], f"is not a valid format string: {err}"
        self.columns = frozenset(re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields)  # {answers[text][0]}
        if any(name == "" or name.isdigit() for name in self.columns):
            raise CorpusError(f"{setting}: {text!r} {fault}")

    def fill(self, record: Mapping[str, Any]) -> str:
        """Return the text of the template with the values of a record, by column.

        Raises:
            CorpusError: the record does not fit the template.
        """
        try:
            return str(self._fill(record))
        except self._failures as err:
            raise CorpusError(f"does not fit {self._setting}: {err!r}") from err


Span = tuple[int, int]  # range of characters: start, and exclusive end

TEXT: Final = "text"
IDS: Final = "input_ids"  # column of token ids, which are used without tokenizing
TURNS: Final = ("messages", "conversations", "conversation")
JSON_TURNS: Final = re.compile(r"\s*\[\s*[{\]]")  # how JSON text of a list of turns begins
INPUTS: Final = ("input", "context")
OUTPUTS: Final = ("output", "response")
TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"  # a mapping that trainers pass to the chat template (TRL)
EXTRA_COLUMNS: Final = ("system", "tools", TEMPLATE_ARGUMENTS)  # further columns of turns in any form
# arguments of `apply_chat_template` that no record may set
RESERVED_ARGUMENTS: Final = frozenset(
    {"messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "return_assistant_tokens_mask"}
)
HISTORY: Final = "history"  # earlier turns of an instruction, as pairs of texts (LLaMA-Factory)
CALL: Final = "function_call"  # a tool call: role of turns (ShareGPT), member of an answer (OpenAI, before tool_calls)
LOSS_FLAGS: Final = ("weight", "train")  # of a turn: whether it carries loss (OpenAI, Mistral; Axolotl)
ROLES: Final = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    **{name: name for name in ("system", "developer")},
}
ALLOWED_PREDECESSORS: Final = {  # roles that may precede a turn; "" is the beginning
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
FAULTS: Final = {
    "turn_order": "its turns are out of order: expected user and assistant in turn, a system turn first",
    "empty_answer": "an answer of the assistant is empty",
    "no_answer": "the assistant does not answer",
    "untrained": "every answer of the assistant is marked weight: 0 or train: false",
    "trained_user": "a turn of another role than the assistant is marked to be trained; only answers carry loss",
    "bad_call": "a function_call is not JSON with name and arguments",
}
REASONING: Final = ("reasoning_content", "reasoning", "thinking")  # names that templates give to an answer's reasoning


class UnusableConversationError(CorpusError):
    """A chat template cannot render a conversation with a known loss mask; `reason` is a key of `text.SKIPPED`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in the form of chat templates, and the tools of the assistant.

    Attributes:
        untrained: indices of assistant turns that carry no loss: marked ones, and those of a prompt.
        parse_fault: error in loss flags or calls, a key of `FAULTS`, or None.
        template_arguments: further arguments of the chat template, e.g. `enable_thinking`.
    """

    turns: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    untrained: frozenset[int] = frozenset()
    parse_fault: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """Return the indices of assistant turns that carry loss."""
        return [k for k, turn in enumerate(self.turns) if turn["role"] == "assistant" and k not in self.untrained]

    @property
    def fault(self) -> str | None:
        """Return why no model can be trained on it, a key of `FAULTS`, or None."""
        if self.parse_fault is not None:
            return self.parse_fault
        roles = ["", *(turn["role"] for turn in self.turns)]
        if any(before not in ALLOWED_PREDECESSORS[role] for before, role in pairwise(roles)):
            return "turn_order"
        if any(not any(answer_parts(self.turns[k]).values()) for k in self.answers):
            return "empty_answer"
        if not self.answers:
            return "untrained" if self.untrained else "no_answer"
        return None

    def __str__(self) -> str:
        """Return the conversation as readable text, without system turns."""
        return " ".join(f"{turn['role']}: {turn['content']}" for turn in self.turns if turn["role"] != "system")

    @property
    def content(self) -> str:
        """Return all content as one text, which is hashed to name the document."""
        rarely_set = [part for part in (sorted(self.untrained), self.template_arguments) if part]
        parts = [self.turns, self.tools, *rarely_set]
        return json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a record: a text with the spans that carry loss (None: all), or a conversation."""

    text: str | None = None
    answers: tuple[Span, ...] | None = None
    conversation: Conversation | None = None
    rejected: "Content | None" = None  # the other side of a preference pair, whose chosen side this is


@dataclass(frozen=True, slots=True)
class Form:
    """How a record is read, and from which columns."""

    kind: str  # text (or turns), prompt, instruction, template or preference, or a form of `names`
    columns: tuple[str, ...]
    templates: tuple[Template, ...] = ()
    names: FieldNames | None = None  # how the records name their parts; None: as here
    reader: Any = None  # converts records with these names, see `grasp.file_readers`

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the columns as the records name them."""
        return self.columns if self.names is None else tuple(self.names.columns[name] for name in self.columns)

    def usual(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a record in the usual names of columns, and their values as Python objects.

        Raises:
            CorpusError: the content does not fit the names of the corpus.
        """
        named = {}
        for name, source in zip(self.columns, self.sources, strict=True):
            value = values.get(source)
            named[name] = value.to_pylist() if isinstance(value, pa.Array) else value
        return named if self.names is None else self.reader.read(named, self.names)

    def read(self, values: Mapping[str, Any]) -> Content:
        """Parse the content of a record.

        Raises:
            CorpusError: a column has an unexpected type, or a turn an unknown role.
        """
        named = self.usual(values)
        if self.kind == "preference":
            return read_preference_pair(named)
        if self.names is not None:
            return next(iter(forms_in(named).values())).read(named)
        if self.kind == "template":
            prompt, completion = self.templates
            return _with_completion(prompt.fill(named), completion.fill(named))
        if self.kind == "instruction":
            instruction, output, *inputs = (name for name in self.columns if name not in (*EXTRA_COLUMNS, HISTORY))
            for name in (instruction, output, *inputs):
                if not isinstance(named[name], str | None):
                    raise CorpusError(f"column {name!r} holds {type(named[name]).__name__}, expected text")
            separator = "\n" if HISTORY in self.columns else "\n\n"  # LLaMA-Factory; Alpaca
            question = separator.join(text for name in (instruction, *inputs) if (text := named[name] or "").strip())
            exchanges = [*parse_history(named.get(HISTORY)), (question, named[output] or "")]
            turns = [
                {"role": role, "content": words}
                for exchange in exchanges
                for role, words in zip(("user", "assistant"), exchange, strict=True)
            ]
        elif self.kind == "prompt":
            question, answer = named["prompt"], named["completion"]
            if not (isinstance(question, str) and isinstance(answer, str)):
                prompt_turns = parse_turns(question, "prompt")  # without loss, also their answers
                turns = [{**turn, "weight": 0} for turn in prompt_turns]
                turns += parse_turns(answer, "completion")
            elif _are_turns(named):
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            else:
                return _with_completion(question, answer)
        else:
            column = self.columns[0]
            if not holds_turns(named[column], column):
                return Content(text=named[column])
            turns = parse_turns(named[column], column)
        return Content(conversation=_build_conversation(turns, named))


def _with_completion(prompt: str, completion: str) -> Content:
    """Return a prompt and its completion as one text, of which the completion carries loss."""
    text = prompt + completion
    return Content(text, ((len(prompt), len(text)),))


def _are_turns(values: Mapping[str, Any]) -> bool:
    """Return whether a prompt and its answers that are texts are turns, since they have a system text."""
    if values.get("system") is not None:
        return True
    extra = _build_conversation([], values)
    for name, value in (("tools", extra.tools), (TEMPLATE_ARGUMENTS, extra.template_arguments)):
        if value:
            raise CorpusError(
                f"{name}: only a chat template reads it, but the prompt and the answers are texts; write "
                "them as turns, or remove the column"
            )
    return False


def _build_conversation(raw_turns: Sequence[Any], values: Mapping[str, Any]) -> Conversation:
    """Return the conversation of turns without their loss flags, with what further columns add."""
    turns = [_parse_turn(turn, k) for k, turn in enumerate(raw_turns)]
    system = values.get("system")
    if isinstance(system, str) and system.strip() and (not turns or turns[0]["role"] != "system"):
        turns.insert(0, {"role": "system", "content": system})
    # a list, JSON text of a list (LLaMA-Factory), or a list of JSON texts
    descriptions = _parse_list(values.get("tools"), "tools")
    try:
        tools = [json.loads(tool) if isinstance(tool, str) else plain_json(tool, repair=False) for tool in descriptions]
    except (ValueError, RecursionError) as err:
        raise CorpusError(f"tools: got {values['tools']!r:.60}, expected a list of JSON values: {err}") from err
    untrained, fault = set[int](), None
    for k, turn in enumerate(turns):
        is_answer = turn["role"] == "assistant"
        for flag in LOSS_FLAGS:
            value = turn.pop(flag, None)
            if value not in (None, 0, 1):
                raise CorpusError(
                    f"turn {k}: {flag}: got {value!r:.60}, expected 0 or 1 (false or true); other loss "
                    "weights are not supported"
                )
            if value is not None and not value and is_answer:
                untrained.add(k)
            if flag == "train" and value and not is_answer:
                fault = "trained_user"
        if turn.get("tool_calls", ()) is None:
            fault = "bad_call"
    template_arguments = values.get(TEMPLATE_ARGUMENTS)
    try:
        parsed = template_arguments or {}
        if isinstance(parsed, str):
            parsed = json.loads(parsed) if parsed.strip() else {}
        # without null ones, which tables add
        arguments: dict[str, Any] = plain_json(json.loads(json.dumps({**parsed})), repair=False)
        reserved = ", ".join(sorted(RESERVED_ARGUMENTS & arguments.keys()))
        wrong = f"got {reserved}, expected arguments that the template itself defines, such as enable_thinking"
        wrong *= bool(reserved)
    except (TypeError, ValueError, RecursionError) as err:
        wrong = f"got {template_arguments!r:.60}, expected a mapping of JSON values: {err}"
    if wrong:
        raise CorpusError(f"{TEMPLATE_ARGUMENTS}: {wrong}")
    return Conversation(tuple(turns), tuple(tools), frozenset(untrained), fault, arguments)


PAIR: Final = ("chosen", "rejected")  # columns of preference pairs
PAIRS_HINT: Final = "to train on the pairs: --loss dpo (corpus.form=preference)"
PAIR_PROMPTS: Final = ("prompt", *TURNS, "question")  # columns of their prompts; the first one that is present is read


def read_preference_pair(record: Mapping[str, Any]) -> Content:
    """Parse a preference pair, in the forms of TRL's DPOTrainer, LLaMA-Factory and Axolotl.

    Sides are texts or chats; a single turn may stand without its list. The prompt is `prompt`, a list of turns in
    `messages` or `conversations`, or the common beginning of both sides, also if `prompt` repeats it as text, as in
    UltraFeedback. A `question`, or a prompt with a `system` text, is a user turn, also if the sides are texts. Loss is
    on what follows the prompt: a text, or one answer of the assistant. The text is empty if a side is the beginning of
    the other one, or equal to it; such pairs yield no row.

    Returns:
        The chosen side, with the other one in `rejected`.
    Raises:
        CorpusError: a side is missing or empty; the sides have different types or more than one answer; or a column
            of chats, such as `system`, has no turns to precede.
    """
    for name, other in (PAIR, PAIR[::-1]):
        side = record.get(name)
        if side is None or (isinstance(side, str | list) and not (side.strip() if isinstance(side, str) else side)):
            raise CorpusError(
                f"{name}: missing or empty, but {other} is present; a preference pair needs both answers: "
                "complete or remove the record"
            )
    source = next((name for name in PAIR_PROMPTS if record.get(name) is not None), None)
    prompt = None if source is None else record[source]
    chosen, rejected = (record[name] for name in PAIR)
    are_texts = isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None)
    if are_texts and source != "question" and not _are_turns(record):
        # without a prompt, it is the common beginning; as in TRL without the space before the first different word
        common = commonprefix([chosen, rejected]).removesuffix(" ") if prompt is None else ""  # noqa: RUF071 - no paths
        contents = [_with_completion(prompt or common, side[len(common) :]) for side in (chosen, rejected)]
    elif are_texts and source is None:
        raise CorpusError(
            f"system: precedes a prompt, but the pair has none of {', '.join(PAIR_PROMPTS)}; add the "
            "prompt, or remove the column"
        )
    else:
        contents = _chat_sides(record, prompt)
    return replace(contents[0], rejected=contents[1])


def _chat_sides(record: Mapping[str, Any], prompt: Any) -> list[Content]:
    """Return both sides of a pair of chats, each with one answer after the common beginning."""
    sides: list[list[Any]] = []
    for name in PAIR:  # a list of turns, JSON text of one, a single turn, or the text of an answer
        side = record[name]
        if isinstance(side, str) and not JSON_TURNS.match(side):
            sides.append([{"role": "assistant", "content": side}])
        elif isinstance(side, Mapping) and not all(isinstance(part, list) for part in side.values()):
            sides.append([side])
        else:
            sides.append(parse_turns(side, name))
    n_equal = next((k for k, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
    n_common = min(n_equal, *(len(side) - 1 for side in sides))  # the last turn is the answer, even if sides are equal
    if not isinstance(prompt, str):
        prompt_turns: list[Any] = [] if prompt is None else parse_turns(prompt, "prompt")
    else:  # a prompt that is text repeats the common beginning of the sides, if they have one
        prompt_turns = [] if n_common else [{"role": "user", "content": prompt}]
    chats = [_build_conversation([*prompt_turns, *side], record) for side in sides]
    for name, side, chat in zip(PAIR, sides, chats, strict=True):
        fault, n_answers = "", len(side) - n_common
        if n_answers != 1:
            fault = f"has {n_answers} turns after the common beginning of both sides, expected one answer"
        elif chat.fault is not None or chat.turns[-1]["role"] != "assistant":
            fault = FAULTS[chat.fault or "no_answer"]
        if fault:
            raise CorpusError(f"{name}: {fault}; fix or remove the record")
    return [Content(conversation=chat) for chat in chats]


def _parse_list(value: Any, name: str, of: type = object) -> list[Any]:
    """Return a list of items of a type, parsed if it is JSON text; null and white space are an empty list."""
    try:
        parsed = (json.loads(value) if value.strip() else None) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = value
    items = parsed or []
    if not isinstance(items, list | tuple) or not all(isinstance(item, of) for item in items):
        kind = "a list" if of is object else "a list of objects"
        raise CorpusError(f"{name}: got {value!r:.60}, expected {kind}, or JSON of one")
    return list(items)


def parse_history(history: Any) -> list[tuple[str, str]]:
    """Return the earlier questions and answers of an instruction."""
    pairs = [] if history is None else history
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == len(("question", "answer")) and all(isinstance(s, str) for s in pair)
        for pair in pairs
    ):
        raise CorpusError(f"{HISTORY}: got {history!r:.60}, expected a list of [question, answer]")
    return [(question, answer) for question, answer in pairs]


def answer_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an assistant turn by name: content, tool calls, reasoning."""
    return {name: turn.get(name) for name in ("tool_calls", *REASONING)} | {"content": turn["content"].strip()}


def holds_turns(value: Any, column: str) -> bool:
    """Return whether a value is turns: a list, or JSON text of a list in a column with a name of turns."""
    if isinstance(value, str):
        return column in TURNS and JSON_TURNS.match(value) is not None
    return value is not None


def parse_turns(value: Any, column: str) -> list[Any]:
    """Return turns from a list, JSON text of a list, or a struct of lists, as `datasets` stores them."""
    if isinstance(value, str) and JSON_TURNS.match(value):
        try:
            value = plain_json(json.loads(value))
        except (ValueError, RecursionError) as err:
            raise CorpusError(
                f"text column {column!r} begins like a list of turns but is not JSON: {err}; write it as JSON"
            ) from err
    columns = list(value.values()) if isinstance(value, Mapping) else []
    if columns and all(isinstance(part, list) and len(part) == len(columns[0]) for part in columns):
        return [dict(zip(value, line, strict=True)) for line in zip(*columns, strict=True)]
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        kind = f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
        raise CorpusError(
            f"text column {column!r} holds {kind}, expected text or a list of turns with role and content"
        )
    return value


def _parse_turn(turn: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Return turn k in the form of chat templates, with its loss flags; invalid calls are None."""
    members: dict[str, Any] = plain_json(dict(turn), repair=False)  # surrogates are repaired when files are read
    role, content = members.pop("role", members.pop("from", None)), members.pop("content", members.pop("value", ""))
    standard_role, fault = ROLES.get(role.lower()) if isinstance(role, str) else None, ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if standard_role is None:
        fault = f": got the role {role!r:.60}, expected one of {', '.join(ROLES)}"
    elif not isinstance(content, str) and standard_role != "tool":  # templates accept any form of a tool's result
        fault = f" ({standard_role}): got {content!r:.60}, expected text; images and audio are not supported"
    if fault:
        raise CorpusError(f"turn {k}{fault}")
    if role.lower() == CALL and "tool_calls" not in members:  # LLaMA-Factory writes it as a tool call of the model
        members[CALL], content = content, ""
    members["tool_calls"] = _parse_list(members.get("tool_calls"), f"turn {k}: tool_calls", Mapping)
    function_call = members.pop(CALL, None) if standard_role == "assistant" else None
    if function_call and not members["tool_calls"]:  # one or several, or JSON text of them
        try:
            calls = json.loads(function_call) if isinstance(function_call, str) else function_call
            members["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in (calls if isinstance(calls, list) else [calls])
            ]
        except (ValueError, RecursionError, KeyError, TypeError):
            members["tool_calls"] = None  # a fault of the conversation
    if members["tool_calls"] == []:
        del members["tool_calls"]
    return {"role": standard_role, "content": content, **members}


def with_arguments(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    """Apply `change` to the arguments of all tool calls, in OpenAI's form or flat."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)

    turns = (
        {**turn, "tool_calls": [changed(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in conversation.turns
    )
    return replace(conversation, turns=tuple(turns))


def object_arguments(arguments: Any) -> Any:
    """Parse arguments if they are a JSON object; other texts, e.g. code, are unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)  # null members are kept: the author wrote them
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# columns whose content trainers pass to the model
TRAINER_COLUMNS: Final = (*TURNS, *EXTRA_COLUMNS, "chat_template", "image", "images", "position_ids", "seq_lengths")
# options that read the chosen answers of preference pairs as completions
PROMPT_SETTINGS: Final = """--set 'corpus.prompt="{prompt}"' --set 'corpus.completion="{chosen}"\'"""


def column_notes(roles: Mapping[str, str], labels: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """Return notes on the columns of a corpus: their roles, those that cannot be labels, and an unused pair."""
    columns = ", ".join(f"{role} from {column!r}" for role, column in roles.items())
    notes = [f"columns: {columns or 'none'}"]
    if ignored:
        notes.append(
            f"left out: {', '.join(ignored)} (binary, lists of numbers or of records); request a value by its path, "
            f"e.g. --set corpus.label_paths=[{ignored[0]}.0]"
        )
    return notes + unread_notes(roles, [*labels, *ignored])


def unread_notes(roles: Mapping[str, str], other_columns: Collection[str]) -> list[str]:
    """Return notes on columns that are not read although trainers read columns of that name.

    Args:
        roles: columns that are read, by role.
        other_columns: all others: labels, which may be paths such as `images.0`, and ignored ones.
    """
    others = {name.partition(".")[0] for name in other_columns}
    text_column, notes = roles.get("text", roles.get("turns")), list[str]()
    if text_column in PAIR and {*roles.values(), *others}.issuperset(PAIR) and "rejected" not in roles:
        other = PAIR[1 - PAIR.index(text_column)]
        note = f"preference pairs: the answers of {text_column!r} are trained on; {other!r} is not read"
        if "text" in roles:
            note = f"preference pairs: {text_column!r} is read as plain text, all of whose tokens carry loss; {other!r}"
            if "prompt" in others:
                note += f" and the prompt are not read. For loss on the answer after its prompt: {PROMPT_SETTINGS}"
            else:
                note += " is not read"
        notes.append(note)
    # `label` of KTO says whether a completion is desirable; here all are trained on
    trainer_columns = (*TRAINER_COLUMNS, "label") if "completion" in roles else TRAINER_COLUMNS
    if unread_columns := [name for name in trainer_columns if name in others]:
        notes.append(f"not read, although trainers may read columns of that name: {', '.join(unread_columns)}")
    return notes


# Forms of records by the option that selects them: the kind, the columns that a record needs, and those that it may
# have. Of alternative names, separated by |, the first existing one is read.
FORMS: Final[Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    **{f"--text-column {name}": ("text", (name,), EXTRA_COLUMNS) for name in TURNS},
    f"--text-column {TEXT}": ("text", (TEXT,), ()),
    "--set corpus.form=prompt": ("prompt", ("prompt", "completion"), EXTRA_COLUMNS),
    "--set corpus.form=instruction": (
        "instruction",
        ("instruction", "|".join(OUTPUTS)),
        ("|".join(INPUTS), *EXTRA_COLUMNS, HISTORY),
    ),
}


def forms_in(names: Collection[str]) -> dict[str, Form]:
    """Return every form of records with these columns, by the option that selects it."""
    forms = {}
    for option, (kind, needed, further) in FORMS.items():
        columns = [next((name for name in group.split("|") if name in names), "") for group in (*needed, *further)]
        if all(columns[: len(needed)]):
            forms[option] = Form(kind, tuple(filter(None, columns)))
    return forms


@lru_cache(maxsize=256)
def form_of(names: tuple[str, ...], settings: CorpusSettings) -> Form:
    """Return the form in which records with these columns are read.

    Raises:
        CorpusError: no form applies, or several do and the settings select none.
    """
    form = _select_form(names, settings)
    if isinstance(form, str):
        raise CorpusError(f"{form}; columns found: {', '.join(names) or 'none'}")
    return form


def _select_form(names: tuple[str, ...], settings: CorpusSettings) -> Form | str:
    """Return a form, or why there is none: by dataset entry, templates, `corpus.form`, column, or the only one."""
    if (fields := settings.fields) is not None:
        origin = fields.origin or "setting corpus.fields"
        required = {standard: column for standard, column in fields.columns.items() if standard not in OPTIONAL}
        if missing := [column for column in required.values() if column not in names]:
            return f"no column {', '.join(missing)}, which the {origin} names"
        if fields.form == "preference" != settings.form:
            return f"the {origin} has preference pairs; {PAIRS_HINT}"
        if settings.form == "preference" != fields.form:
            return f"the {origin} has no preference pairs; omit --loss dpo"
        claim = claimed("record", fields)
        if claim is None:
            return "corpus.fields: no reader converts records with such names"
        # the first column decides how a record is read
        order = (*TURNS, TEXT, "instruction", "output", *PAIR, "input", *EXTRA_COLUMNS, HISTORY)
        columns = tuple(standard for standard in order if fields.columns.get(standard) in names)
        return Form("text" if fields.form == "messages" else fields.form, columns, names=fields, reader=claim.reader)
    forms = forms_in(names)
    if settings.prompt is not None and settings.completion is not None:
        templates = (Template(settings.prompt, "corpus.prompt"), Template(settings.completion, "corpus.completion"))
        used = sorted(templates[0].columns | templates[1].columns)
        if missing := [name for name in used if name not in names]:
            return f"no column {', '.join(missing)}, which corpus.prompt or completion reads"
        return Form("template", tuple(used), templates)
    if settings.form is not None:
        form = forms.get(f"--set corpus.form={settings.form}")
        if settings.form == "preference" and set(PAIR) & set(names):  # a record may lack a side
            prompts = [name for name in PAIR_PROMPTS if name in names][:1]
            extra = [name for name in EXTRA_COLUMNS if name in names]
            form = Form("preference", (*prompts, *PAIR, *extra))
        _, needed, _ = FORMS.get(f"--set corpus.form={settings.form}", ("", PAIR, ()))
        shown = " and ".join(" or ".join(f"`{name}`" for name in group.split("|")) for group in needed)
        return form or f"corpus.form: got {settings.form}, which takes {shown}"
    if settings.text_column in names:
        return forms.get(f"--text-column {settings.text_column}") or Form("text", (str(settings.text_column),))
    if IDS in names:
        return Form("text", (settings.text_column or TEXT,))
    if settings.text_column is None and not forms and set(PAIR) <= set(names):
        advice = f"; to train on the chosen answers: {PROMPT_SETTINGS}" if "prompt" in names else ""
        return f"contains preference pairs; {PAIRS_HINT}{advice}"
    if settings.text_column is not None or not forms:
        return (
            f"no text column {settings.text_column or TEXT!r} and no ids column {IDS!r}; name the one that holds the "
            "text with --text-column (corpus.text_column)"
        )
    if len(forms) > 1:
        return f"can be read in {len(forms)} ways; select one with {' or '.join(forms)}"
    return next(iter(forms.values()))


OPTIONAL: Final = {"input", *EXTRA_COLUMNS, HISTORY}  # columns that a record may lack


def conversation_in(record: Mapping[str, Any]) -> Conversation | None:
    """Return the conversation of a record in any form, or None.

    Raises:
        CorpusError: its content is invalid.
    """
    forms = forms_in([name for name, value in record.items() if value is not None]).values()
    return next((read for form in forms if (read := form.read(record).conversation) is not None), None)
