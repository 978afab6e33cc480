"""Wrap a Hugging Face tokenizer as the corpus wants it: token ids, offsets, special tokens, chats; and train a BPE.

`HfTokenizer.render` writes a conversation by the tokenizer's chat template, as trainers do, and finds its answers.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from grasp.corpus.conversations import (
    REASONING,
    Conversation,
    Span,
    UnusableConversationError,
    answer_parts,
    object_arguments,
    text_arguments,
    with_arguments,
)
from grasp.corpus.encoding import RenderedChat
from grasp.errors import ModelError
from grasp.extras import require
from grasp.settings import CHAT_DATE, ModelSettings

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
LONGEST_CHARACTER = 4  # tokens, where each is a byte
# verbose: a text longer than the context is no mistake here, rows are cut later
PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
STAND_IN = "graspstandin"  # a word that no conversation holds
STAND_IN_ARGUMENTS = {STAND_IN: STAND_IN}
PROBE = "a"  # a text that shows what a tokenizer puts around it
CLOCK = "strftime_now"  # the function by which templates write today's date
DIRECTIVES = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfzZjUWcxXGuVeDFTR"]  # of `strftime`
DIRECTIVES += [f"%-{letter}" for letter in "dmHIMSj"]  # without leading zeros
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what marks the assistant's words in some templates


class HfTokenizer:
    """`grasp.corpus.encoding.Tokenizer` over a transformers tokenizer.

    Args:
        tokenizer: any transformers tokenizer.
        vocab_size: ids of the *model's* vocabulary, which is often padded beyond the tokenizer's.
        add_bos_token: whether texts begin with BOS; None: as the tokenizer itself does.
        chat_date: date given to chat templates that write today's date; None: `CHAT_DATE`.
    Raises:
        ModelError: BOS is asked for, and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        add_bos_token: bool | None = None,
        chat_date: date | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.add_bos_token = add_bos_token
        self.chat_date = chat_date or CHAT_DATE
        if add_bos_token and tokenizer.bos_token_id is None:
            raise ModelError("model.add_bos_token: got true, but the tokenizer has no BOS token; leave it out")

    @classmethod
    def from_settings(cls, tokenizer: PreTrainedTokenizerBase, settings: ModelSettings, vocab_size: int) -> Self:
        """Wrap the tokenizer of a model as its settings say."""
        return cls(tokenizer, vocab_size=vocab_size, add_bos_token=settings.add_bos_token, chat_date=settings.chat_date)

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-text token; none: there is none."""
        eos_id: int | None = self.tokenizer.eos_token_id
        return eos_id

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer puts before and after a text: what a call adds to the ids of `encode`."""
        bare, whole = self.encode([PROBE])[0], list(self.tokenizer(PROBE)["input_ids"])
        begin = next((k for k in range(len(whole)) if bare and whole[k : k + len(bare)] == bare), None)
        return ((), ()) if begin is None else (tuple(whole[:begin]), tuple(whole[begin + len(bare) :]))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that begin every text: those that the tokenizer adds itself, with or without BOS as the settings say."""
        prefix, bos_id = self._around[0], self.tokenizer.bos_token_id
        if self.add_bos_token is None or (bos_id in prefix) is self.add_bos_token:
            return prefix
        return (bos_id, *prefix) if self.add_bos_token else tuple(token for token in prefix if token != bos_id)

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Ids that end every document: those that the tokenizer adds itself, else EOS."""
        return self._around[1] or (() if self.eos_id is None else (self.eos_id,))

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Ids that stand in for an empty prompt: BOS, else EOS, as in lm-evaluation-harness."""
        first = next((i for i in (self.tokenizer.bos_token_id, self.eos_id) if i is not None), None)
        return self.prefix_ids or (() if first is None else (first,))

    def describe(self) -> str:
        """Return which special tokens texts begin and end with, in a line."""
        begin, end = (
            " ".join(repr(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids)))
            for ids in (self.prefix_ids, self.suffix_ids)
        )
        why = "the tokenizer adds" if self.add_bos_token is None else "model.add_bos_token says"
        first = f"texts begin with {begin}, as {why}" if begin else f"texts begin without BOS, as {why}"
        if not begin and self.add_bos_token is None:
            first = "texts begin without a special token, as the tokenizer adds none"
        chats = "; chats begin and end as their template writes them" if self.writes_chats else ""
        return f"special tokens: {first}; documents end with {end or 'none'}{chats}"

    @property
    def writes_chats(self) -> bool:
        """Return whether it has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def writes_date(self) -> bool:
        """Return whether its chat template writes today's date."""
        return CLOCK in json.dumps(self.tokenizer.chat_template)

    @property
    def fingerprint(self) -> str:
        """Hash of what turns text into ids; it does not depend on where the tokenizer was loaded from."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            text = json.dumps([type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())])
        else:
            rules = json.loads(backend.to_str())
            for name in ("padding", "truncation"):  # which a call may have left in it
                rules.pop(name, None)
            text = json.dumps(rules, sort_keys=True)
        prefix = f" {self.prefix_ids}" if self.prefix_ids else ""
        return hashlib.blake2b(f"{self.eos_id}{prefix} {text}".encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, no special tokens added, nothing cut."""
        ids: list[list[int]] = self.tokenizer(list(texts), **PLAIN)["input_ids"] if texts else []
        return ids

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span] | None]]:
        """Return the ids of `encode` and the characters of each token; None for a tokenizer that is not a fast one."""
        if not self.tokenizer.is_fast or not texts:
            return [(ids, None) for ids in self.encode(texts)]
        encoded: Any = self.tokenizer(list(texts), return_offsets_mapping=True, **PLAIN)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of token ids, without special tokens and without tidying up spaces."""
        texts: list[str] = self.tokenizer.batch_decode(
            list(rows), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; joined they are the text, special tokens included.

        A character that takes several tokens stands at the last of them, and the others are empty.
        """
        found, begin, told = [], 0, 0  # the text of ids[begin:told] is told: a decoder treats the first token otherwise
        for stop in range(1, len(ids) + 1):
            before, now = (
                str(self.tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False))
                for some in (ids[begin:told], ids[begin:stop])
            )
            whole = not now.endswith("\ufffd") or stop - told >= LONGEST_CHARACTER or stop == len(ids)
            found.append(now[len(before) :] if whole else "")
            if whole:
                begin, told = told, stop
        return found

    def render(self, conversation: Conversation, *, last_only: bool = False) -> RenderedChat:
        """Write a conversation by the chat template, and find each answer that carries loss, with the mark at its end.

        A template that marks the assistant's words with `{% generation %}` says itself where they are. Otherwise an
        answer is what its turn adds to the text up to it; the beginning of the turn belongs to the prompt. So the text
        up to a turn must be the beginning of the whole, which fails if a template rewrites turns once others follow.

        Args:
            last_only: only the last answer carries loss.
        Raises:
            UnusableConversationError: the template refuses the turns, writes nothing of an answer, or writes it in a
                way that its place cannot be told.
            ModelError: there is no chat template.
        """
        require("jinja2", extra="chat", feature="a chat template")
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so turns cannot be written out; give it one "
                "(tokenizer.chat_template = ..., save_pretrained) and name its directory with --tokenizer; or, of "
                "questions and answers in columns, "
                """say how: --set 'corpus.prompt="Q: {question}"' --set 'corpus.completion=" {answer}"'"""
            )
        conversation, text, marked = self._written(conversation)
        answers = conversation.answers[-1:] if last_only else conversation.answers
        if marked:
            spans_of = self._marked_turns(conversation, text, marked)
        else:
            spans_of = {k: [self._span_of_turn(conversation, k, text)] for k in answers}
        unwritten: list[tuple[str, int]] = []
        for k in answers:
            if not spans_of.get(k):
                raise UnusableConversationError("unmarked", f"turn {k}: nothing of it is marked")
            answer = spans_of[k][0][0], spans_of[k][-1][1]
            unwritten += [(reason, k) for reason in self._unwritten(conversation, k, answer, text)]
        return RenderedChat(text, tuple(span for k in answers for span in spans_of[k]), tuple(unwritten))

    def _written(self, conversation: Conversation) -> tuple[Conversation, str, list[Span]]:
        """Return a conversation as the template can take it, its text, and what of that is marked as the assistant's.

        Arguments of tool calls are given as they come. If the template refuses them, writes JSON text as a quoted
        string or an object as Python does, they are given as objects, or else as JSON texts.
        """
        forms = [conversation]
        if any("tool_calls" in turn for turn in conversation.turns):
            others = [with_arguments(conversation, change) for change in (object_arguments, text_arguments)]
            forms += [other for other in others if other.turns != conversation.turns]
        rendered: list[tuple[Conversation, str, list[Span]]] = []
        refusals: list[UnusableConversationError] = []
        for form in forms:
            try:
                rendered.append((form, *self._render(form)))
                if len(forms) == 1 or not self._garbles_arguments(form):
                    return rendered[-1]
            except UnusableConversationError as err:
                refusals.append(err)
        if not rendered:
            raise refusals[0]
        return rendered[0]

    def _garbles_arguments(self, conversation: Conversation) -> bool:
        """Return whether the template quotes arguments that are JSON text, or writes objects as Python does.

        Other arguments take their place, which do not stand elsewhere in the conversation.
        """

        def probe(arguments: Any) -> Any:
            if not isinstance(object_arguments(arguments), dict):
                return arguments
            return json.dumps(STAND_IN_ARGUMENTS) if isinstance(arguments, str) else STAND_IN_ARGUMENTS

        text, _ = self._render(with_arguments(conversation, probe))
        return str(STAND_IN_ARGUMENTS) in text or json.dumps(json.dumps(STAND_IN_ARGUMENTS)) in text

    def _render(self, conversation: Conversation, **how: Any) -> tuple[str, list[Span]]:
        """Return turns as text, and what of it the template marks as the assistant's.

        Raises:
            UnusableConversationError: the template refuses the turns.
        """
        jinja = require("jinja2", extra="chat", feature="a chat template")
        tools = list(conversation.tools) or None
        template = self.tokenizer.get_chat_template(None, tools)
        if CLOCK in template:
            template = _clock_macro(self.chat_date) + template
        has_marks = GENERATION.search(template) is not None
        try:
            (text,), marked = render_jinja_template(
                [list(conversation.turns)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                **self.tokenizer.special_tokens_map,
                **how,
            )
        except (jinja.TemplateError, TypeError, ValueError, KeyError) as err:
            raise UnusableConversationError("refused", " ".join(str(err).split())[:200]) from err
        return text, [(start, stop) for start, stop in marked[0]] if has_marks else []

    def _span_of_turn(self, conversation: Conversation, k: int, text: str) -> Span:
        """Return the characters of turn k: what stands between the prompt for it and its end."""
        prompt, _ = self._render(replace(conversation, turns=conversation.turns[:k]), add_generation_prompt=True)
        whole = self._render(replace(conversation, turns=conversation.turns[: k + 1]))[0].rstrip()
        if text.startswith(prompt) and text.startswith(whole) and len(prompt) < len(whole):
            return len(prompt), len(whole)
        raise UnusableConversationError("rewritten", f"turn {k}")

    def _marked_turns(self, conversation: Conversation, text: str, marked: list[Span]) -> dict[int, list[Span]]:
        """Return the spans that are marked of each turn of the assistant; those that touch are one."""
        spoken = [k for k, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
        turn_of = spoken * len(marked) if len(spoken) == 1 else self._turns_of_marks(conversation, spoken, text, marked)
        spans_of: dict[int, list[Span]] = {}
        for k, (start, stop) in zip(turn_of, marked, strict=True):
            spans = spans_of.setdefault(k, [])
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], stop
            elif start < stop:
                spans.append((start, stop))
        return spans_of

    def _turns_of_marks(
        self, conversation: Conversation, spoken: list[int], text: str, marked: list[Span]
    ) -> list[int]:
        """Return of which of the assistant's turns, `spoken`, each marked span is.

        The turn before each of them gets a word that stands nowhere else. Spans between two such words are of the turn
        after the first.
        """
        words = {k - 1: f"{STAND_IN}{k}." for k in spoken}
        turns = [
            {**turn, "content": _with_word(turn["content"], words[k])} if k in words else turn
            for k, turn in enumerate(conversation.turns)
        ]
        probed, spans = self._render(replace(conversation, turns=tuple(turns)))
        places = [probed.find(word) for word in words.values()]
        if (
            any(probed.count(word) != 1 for word in words.values())
            or places != sorted(places)
            or [probed[slice(*span)] for span in spans] != [text[slice(*span)] for span in marked]
            or any(begin < places[0] for begin, _ in spans)
        ):
            raise UnusableConversationError("unmarked", f"{len(marked)} marks, {len(spoken)} answers")
        return [spoken[bisect_right(places, begin) - 1] for begin, _ in spans]

    def _unwritten(self, conversation: Conversation, k: int, answer: Span, text: str) -> list[str]:
        """Return what the template leaves out of an answer, whole or in part, as keys of `text.SKIPPED`.

        Args:
            answer: where it stands; the prompt may hold its beginning, `<think>` say.
            text: the whole conversation; a template may write the reasoning and not mark it.
        Raises:
            UnusableConversationError: it writes nothing of the answer.
        """
        turn = conversation.turns[k]
        parts = {name: part for name, part in answer_parts(turn).items() if part}
        no_calls = {name: part for name, part in turn.items() if name != "tool_calls"}
        begin = max(0, answer[0] + 1 - len(turn["content"]))
        place_of = {"content": text[begin : answer[1]]} | dict.fromkeys(REASONING, text)
        lacking = [name for name, part in parts.items() if name in place_of and not _holds(place_of[name], part)]
        if "tool_calls" in parts and self._writes_same(conversation, k, no_calls, text):
            lacking.append("tool_calls")
        if len(lacking) == len(parts):
            bare = {name: part for name, part in no_calls.items() if name not in REASONING}
            if any(self._writes_same(conversation, k, {**bare, "content": words}, text) for words in ("", STAND_IN)):
                what = "words" if "content" in lacking else " and ".join(lacking)
                shown = parts.get("content") or parts[lacking[0]]
                raise UnusableConversationError("unwritten", f"turn {k}: {what} {str(shown)!r:.40}")
        return [
            *(["cut_answer"] if "content" in lacking else []),
            *(["no_calls"] if "tool_calls" in lacking else []),
            *(["no_reasoning"] if set(lacking) & set(REASONING) else []),
        ]

    def _writes_same(self, conversation: Conversation, k: int, turn: Mapping[str, Any], text: str) -> bool:
        """Return whether the template writes the same text with another turn k; one that it refuses is not the same."""
        turns = (*conversation.turns[:k], dict(turn), *conversation.turns[k + 1 :])
        try:
            return self._render(replace(conversation, turns=turns))[0] == text
        except UnusableConversationError:
            return False

    def save(self, directory: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads."""
        self.tokenizer.save_pretrained(directory)


def _clock_macro(today: date) -> str:
    """Return a Jinja macro that takes the place of `strftime_now` on one day, at midnight.

    transformers passes no functions on to templates. The line break at the end is trimmed with the block.
    """
    moment = datetime.combine(today, time())
    changes = "".join(f" | replace({name!r}, {moment.strftime(name)!r})" for name in DIRECTIVES)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ format{changes} }}}}{{%- endmacro %}}\n"


def _holds(written: str, part: object) -> bool:
    """Return whether a text holds some words, as they are or in JSON; templates strip and add white space."""
    words = str(part)
    squeezed = "".join(written.split())
    return any("".join(one.split()) in squeezed for one in (words, json.dumps(words, ensure_ascii=False)[1:-1]))


def _with_word(content: Any, word: str) -> str:
    """Return content with a word in its middle, since templates look at how a turn begins and ends."""
    if not isinstance(content, str):
        return word
    half = len(content) // 2
    return content[:half] + word + content[half:]


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens, end-of-text token (id 0) included.

    Every byte has a token, so no text is out of vocabulary. The same texts give the same tokenizer.
    """
    if vocab_size <= BYTES:
        raise ModelError(f"vocab_size: got {vocab_size}, expected at least {BYTES + 1}: one a byte and end of text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
