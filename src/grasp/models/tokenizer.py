"""Wrap Hugging Face tokenizers: token ids, offsets, special tokens and chat templates; and train byte-level BPE.

`HfTokenizer.render` renders a conversation by the tokenizer's chat template, as trainers do, and locates its answers.
Templates do not report where they write an answer, so it is found by rendering the conversation again with changes: up
to a turn, or with placeholders in its place. Start with `HfTokenizer`.
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
    with_arguments,
)
from grasp.corpus.encoding import RenderedChat
from grasp.errors import ModelError
from grasp.extras import require
from grasp.settings import CHAT_DATE, ModelSettings

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
MAX_CHARACTER_TOKENS = 4  # tokens of a character if each is a byte
# verbose=False: no warning about texts longer than the context, since rows are cut later
PLAIN_ENCODING = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
PLACEHOLDER = "graspstandin"  # a placeholder word that occurs in no conversation
PLACEHOLDER_ANSWERS = (PLACEHOLDER, "otherword")  # without a common first or last character
PLACEHOLDER_ARGUMENTS = {PLACEHOLDER: PLACEHOLDER}
PROBE_TEXT = "a"  # a text that reveals which special tokens a tokenizer adds
CLOCK_FUNCTION = "strftime_now"  # function of templates that returns the current date
DIRECTIVES = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfzZjUWcxXGuVeDFTR"]  # format codes of `strftime`
DIRECTIVES += [f"%-{letter}" for letter in "dmHIMSj"]  # without leading zeros
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins a block that marks the assistant's text


class HfTokenizer:
    """`grasp.corpus.encoding.Tokenizer` over a transformers tokenizer.

    Args:
        tokenizer: any transformers tokenizer.
        vocab_size: size of the *model's* vocabulary, which is often padded beyond the tokenizer's.
        add_bos_token: whether texts begin with BOS; None: the default of the tokenizer.
        chat_date: date for chat templates that insert the current date; None: `CHAT_DATE`.
    Raises:
        ModelError: `add_bos_token` is true and the tokenizer has no BOS token.
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
            raise ModelError("model.add_bos_token: got true, but the tokenizer has no BOS token; remove it")

    @classmethod
    def from_settings(cls, tokenizer: PreTrainedTokenizerBase, settings: ModelSettings, vocab_size: int) -> Self:
        """Wrap a tokenizer according to the settings of its model."""
        return cls(tokenizer, vocab_size=vocab_size, add_bos_token=settings.add_bos_token, chat_date=settings.chat_date)

    @property
    def eos_id(self) -> int | None:
        """Return the id of the end-of-text token; None: there is none."""
        eos_id: int | None = self.tokenizer.eos_token_id
        return eos_id

    @cached_property
    def _added_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the tokenizer adds before and after a text, compared with those of `encode`."""
        plain_ids, all_ids = self.encode([PROBE_TEXT])[0], list(self.tokenizer(PROBE_TEXT)["input_ids"])
        n_plain = len(plain_ids)
        begin = next((k for k in range(len(all_ids)) if plain_ids and all_ids[k : k + n_plain] == plain_ids), None)
        return ((), ()) if begin is None else (tuple(all_ids[:begin]), tuple(all_ids[begin + n_plain :]))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Return the ids at the beginning of every text: those of the tokenizer, and BOS by `add_bos_token`."""
        prefix, bos_id = self._added_ids[0], self.tokenizer.bos_token_id
        if self.add_bos_token is None or (bos_id in prefix) is self.add_bos_token:
            return prefix
        return (bos_id, *prefix) if self.add_bos_token else tuple(token for token in prefix if token != bos_id)

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Return the ids at the end of every document: those of the tokenizer, or else EOS."""
        return self._added_ids[1] or (() if self.eos_id is None else (self.eos_id,))

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Return the ids that replace an empty prompt: BOS, or else EOS, as in lm-evaluation-harness."""
        first = next((i for i in (self.tokenizer.bos_token_id, self.eos_id) if i is not None), None)
        return self.prefix_ids or (() if first is None else (first,))

    def describe(self) -> str:
        """Return one line about the special tokens at the beginning and the end of texts."""
        begin, end = (
            " ".join(repr(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids)))
            for ids in (self.prefix_ids, self.suffix_ids)
        )
        source = "added by the tokenizer" if self.add_bos_token is None else "set by model.add_bos_token"
        first = f"texts begin with {begin} ({source})" if begin else f"texts begin without BOS ({source})"
        if not begin and self.add_bos_token is None:
            first = "texts begin without a special token (the tokenizer adds none)"
        chats = "; chats begin and end as in their template" if self.writes_chats else ""
        return f"special tokens: {first}; documents end with {end or 'none'}{chats}"

    @property
    def writes_chats(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def writes_date(self) -> bool:
        """Return whether the chat template inserts the current date."""
        return CLOCK_FUNCTION in json.dumps(self.tokenizer.chat_template)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the rules that convert text to ids; it does not depend on the path of the tokenizer."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            text = json.dumps([type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())])
        else:
            rules = json.loads(backend.to_str())
            for name in ("padding", "truncation"):  # state of earlier calls
                rules.pop(name, None)
            text = json.dumps(rules, sort_keys=True)
        prefix = f" {self.prefix_ids}" if self.prefix_ids else ""
        return hashlib.blake2b(f"{self.eos_id}{prefix} {text}".encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens and truncation."""
        ids: list[list[int]] = self.tokenizer(list(texts), **PLAIN_ENCODING)["input_ids"] if texts else []
        return ids

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span] | None]]:
        """Return the ids of `encode` and the character span of each token; None: the tokenizer is not a fast one."""
        if not self.tokenizer.is_fast or not texts:
            return [(ids, None) for ids in self.encode(texts)]
        encoded: Any = self.tokenizer(list(texts), return_offsets_mapping=True, **PLAIN_ENCODING)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids, without special tokens and without clean-up of spaces."""
        texts: list[str] = self.tokenizer.batch_decode(
            list(rows), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; joined, they are the whole text, including special tokens.

        A character of several tokens is the text of the last of them, and the others have an empty text.
        """
        # Decoders treat the first token of a text differently, so a token's text is the difference between decoding
        # with and without it after some context: ids[context_start:decoded], whose text is complete.
        texts, context_start, decoded = [], 0, 0
        for stop in range(1, len(ids) + 1):
            before, after = (
                str(self.tokenizer.decode(list(span), skip_special_tokens=False, clean_up_tokenization_spaces=False))
                for span in (ids[context_start:decoded], ids[context_start:stop])
            )
            is_complete = not after.endswith("\ufffd") or stop - decoded >= MAX_CHARACTER_TOKENS or stop == len(ids)
            texts.append(after[len(before) :] if is_complete else "")
            if is_complete:
                context_start, decoded = decoded, stop
        return texts

    def render(self, conversation: Conversation, *, last_only: bool = False) -> RenderedChat:
        """Render a conversation by the chat template, and locate each answer that carries loss, with its end token.

        If the template marks the assistant's text with `{% generation %}`, the marks are used. Otherwise an answer is
        the text that its turn adds after the generation prompt. This requires that the text up to a turn is a prefix of
        the whole text, which fails if the template changes turns when others follow.

        Args:
            conversation: turns and tools.
            last_only: whether only the last answer carries loss.
        Raises:
            UnusableConversationError: the template rejects the turns, omits an answer, or renders it such that it
                cannot be located.
            ModelError: there is no chat template.
        """
        require("jinja2", extra="chat", feature="a chat template")
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so conversations cannot be rendered; add one "
                "(tokenizer.chat_template = ..., save_pretrained) and pass its directory with --tokenizer; or, for "
                "questions and answers in columns, add "
                """--set 'corpus.prompt="Q: {question}"' --set 'corpus.completion=" {answer}"'"""
            )
        conversation, text, marked = self._render_accepted_form(conversation)
        answers = conversation.answers[-1:] if last_only else conversation.answers
        if marked:
            spans_of = self._marked_turns(conversation, text, marked)
        else:
            spans_of = {k: [self._span_of_turn(conversation, k, text)] for k in answers}
        omitted: list[tuple[str, int]] = []
        for k in answers:
            if not spans_of.get(k):
                raise UnusableConversationError("unmarked", f"turn {k}: no part of it is marked")
            answer = spans_of[k][0][0], spans_of[k][-1][1]
            omitted += [(reason, k) for reason in self._omitted_parts(conversation, k, answer, text)]
        return RenderedChat(text, tuple(span for k in answers for span in spans_of[k]), tuple(omitted))

    def _render_accepted_form(self, conversation: Conversation) -> tuple[Conversation, str, list[Span]]:
        """Return a conversation in a form that the template accepts, its text, and the spans marked as the assistant's.

        Arguments of tool calls are passed unchanged. If the template rejects them, quotes JSON text,
        or an object in Python syntax, they are passed as objects, or else as JSON text.
        """
        forms = [conversation]
        if any("tool_calls" in turn for turn in conversation.turns):
            converted = [
                with_arguments(conversation, object_arguments),
                with_arguments(conversation, lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False)),
            ]
            forms += [form for form in converted if form.turns != conversation.turns]

        def placeholder_for(arguments: Any) -> Any:
            """Return arguments that do not occur elsewhere in the conversation."""
            if not isinstance(object_arguments(arguments), dict):
                return arguments
            return json.dumps(PLACEHOLDER_ARGUMENTS) if isinstance(arguments, str) else PLACEHOLDER_ARGUMENTS

        rendered: list[tuple[Conversation, str, list[Span]]] = []
        refusals: list[UnusableConversationError] = []
        for form in forms:
            try:
                rendered.append((form, *self._render(form)))
                if len(forms) == 1:
                    return rendered[-1]
                text, _ = self._render(with_arguments(form, placeholder_for))
                is_quoted = json.dumps(json.dumps(PLACEHOLDER_ARGUMENTS)) in text
                if not is_quoted and str(PLACEHOLDER_ARGUMENTS) not in text:
                    return rendered[-1]
            except UnusableConversationError as err:
                refusals.append(err)
        if not rendered:
            raise refusals[0]
        return rendered[0]

    def _render(self, conversation: Conversation, **options: Any) -> tuple[str, list[Span]]:
        """Render turns as text, and return the spans that the template marks as the assistant's."""
        jinja = require("jinja2", extra="chat", feature="a chat template")
        tools = list(conversation.tools) or None
        template = self.tokenizer.get_chat_template(None, tools)
        if CLOCK_FUNCTION in template:
            # transformers does not pass functions to templates, so a macro gives midnight of a fixed day; Jinja trims
            # the line break at its end
            moment = datetime.combine(self.chat_date, time())
            changes = "".join(f" | replace({name!r}, {moment.strftime(name)!r})" for name in DIRECTIVES)
            template = f"{{%- macro {CLOCK_FUNCTION}(format) -%}}{{{{ format{changes} }}}}{{%- endmacro %}}\n{template}"
        has_marks = GENERATION_BLOCK.search(template) is not None
        try:
            (text,), marked = render_jinja_template(
                [list(conversation.turns)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                **{**self.tokenizer.special_tokens_map, **conversation.template_arguments, **options},
            )
        except (jinja.TemplateError, TypeError, ValueError, KeyError) as err:
            raise UnusableConversationError("refused", " ".join(str(err).split())[:200]) from err
        return text, [(start, stop) for start, stop in marked[0]] if has_marks else []

    def _span_of_turn(self, conversation: Conversation, k: int, text: str) -> Span:
        """Return the character span of turn k, from the generation prompt to the end of the turn.

        Templates may change a turn when others follow: they remove reasoning, or end the last turn with another token
        (Qwen 3, Phi 3, OLMo 3). The span is then that of the content, which differs from the text of other answers, up
        to the token that takes the place of the end of the turn.
        """
        before, up_to_turn = (replace(conversation, turns=conversation.turns[:stop]) for stop in (k, k + 1))
        prompt, _ = self._render(before, add_generation_prompt=True)
        text_up_to_turn = self._render(up_to_turn)[0]
        end_of_turn = len(text_up_to_turn.rstrip())
        if text.startswith(prompt) and text.startswith(text_up_to_turn.rstrip()) and len(prompt) < end_of_turn:
            return len(prompt), end_of_turn
        start, stop = self._span_of_content(conversation, k, text)
        n_shared = _shared_length(prompt, text)
        if n_shared == len(prompt):
            start = n_shared
        elif n_shared >= _shared_length(prompt, self._render(before)[0]):  # a part of the generation prompt
            start = min(start, n_shared)
        ending = text_up_to_turn[self._span_of_content(up_to_turn, k, text_up_to_turn)[1] :].rstrip()
        if text[stop:].startswith(ending):
            return start, stop + len(ending)
        tokens = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        end_token = re.compile(rf"\s*(?:{'|'.join(map(re.escape, tokens)) or '(?!)'})")
        end = end_token.match(text, stop)
        if end is None or not end_token.match(ending):
            raise UnusableConversationError("rewritten", f"turn {k}")
        following = str(conversation.turns[k + 1]["content"]).strip()
        # the role of the next turn; there is no end
        opens_next = following != "" and text[end.end() :].lstrip().startswith(following)
        return start, stop if opens_next else end.end()

    def _span_of_content(self, conversation: Conversation, k: int, text: str) -> Span:
        """Return the span of characters that depend on the answer of turn k."""
        turns = conversation.turns
        other_texts = []
        for word in PLACEHOLDER_ANSWERS:
            turn = {"role": "assistant", "content": word}
            other_texts.append(self._render(replace(conversation, turns=(*turns[:k], turn, *turns[k + 1 :])))[0])
        start = _shared_length(text, *other_texts)
        stop = len(text) - _shared_length(*(rendered[start:][::-1] for rendered in (text, *other_texts)))
        outside = f"{text[:start]}\0{text[stop:]}"
        contents = [str(turn["content"]).strip() for turn in (*turns[:k], *turns[k + 1 :])]
        if start >= stop or any(content in text and content not in outside for content in contents):
            raise UnusableConversationError("rewritten", f"turn {k}")
        return start, stop

    def _marked_turns(self, conversation: Conversation, text: str, marked: list[Span]) -> dict[int, list[Span]]:
        """Return the marked spans of each turn of the assistant; adjacent spans are merged."""
        assistant_turns = [k for k, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
        turn_of = assistant_turns * len(marked)
        if len(assistant_turns) > 1:
            # A unique word is inserted in the turn before each turn of the assistant. Spans between two such words
            # belong to the turn after the first word.
            words = {k - 1: f"{PLACEHOLDER}{k}." for k in assistant_turns}
            turns = list(conversation.turns)
            for k, word in words.items():
                if k >= 0:  # in the middle of the content, since templates inspect both ends of a turn
                    content = turns[k]["content"] if isinstance(turns[k]["content"], str) else ""
                    middle = len(content) // 2
                    turns[k] = {**turns[k], "content": content[:middle] + word + content[middle:]}
            text_with_words, spans = self._render(replace(conversation, turns=tuple(turns)))
            positions = [text_with_words.find(word) for word in words.values()]
            if (
                any(text_with_words.count(word) != 1 for word in words.values())
                or positions != sorted(positions)
                or [text_with_words[slice(*span)] for span in spans] != [text[slice(*span)] for span in marked]
                or any(begin < positions[0] for begin, _ in spans)
            ):
                raise UnusableConversationError("unmarked", f"{len(marked)} marks, {len(assistant_turns)} answers")
            turn_of = [assistant_turns[bisect_right(positions, begin) - 1] for begin, _ in spans]
        spans_of: dict[int, list[Span]] = {}
        for k, (start, stop) in zip(turn_of, marked, strict=True):
            spans = spans_of.setdefault(k, [])
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], stop
            elif start < stop:
                spans.append((start, stop))
        return spans_of

    def _omitted_parts(self, conversation: Conversation, k: int, answer: Span, text: str) -> list[str]:
        """Return the parts of an answer that the template omits completely or partially, as keys of `text.SKIPPED`.

        The beginning of the span of the answer, e.g. `<think>`, may be part of the prompt; a template may render the
        reasoning without marking it. An answer that is omitted completely is an error.
        """
        turn = conversation.turns[k]
        parts = {name: part for name, part in answer_parts(turn).items() if part}
        turn_without_calls = {name: part for name, part in turn.items() if name != "tool_calls"}
        begin = max(0, answer[0] + 1 - len(turn["content"]))
        text_of_part = {"content": text[begin : answer[1]]} | dict.fromkeys(REASONING, text)
        omitted = []
        for name, words in ((name, str(part)) for name, part in parts.items() if name in text_of_part):
            # templates change white space, or write words as JSON
            forms = words, json.dumps(words, ensure_ascii=False)[1:-1]
            if not any("".join(form.split()) in "".join(text_of_part[name].split()) for form in forms):
                omitted.append(name)
        if "tool_calls" in parts and self._renders_same(conversation, k, turn_without_calls, text):
            omitted.append("tool_calls")
        if len(omitted) == len(parts):
            bare_turn = {name: part for name, part in turn_without_calls.items() if name not in REASONING}
            changed_turns = ({**bare_turn, "content": words} for words in ("", PLACEHOLDER))
            if any(self._renders_same(conversation, k, changed, text) for changed in changed_turns):
                missing = "words" if "content" in omitted else " and ".join(omitted)
                shown = parts.get("content") or parts[omitted[0]]
                raise UnusableConversationError("unwritten", f"turn {k}: {missing} {str(shown)!r:.40}")
        return [
            *(["cut_answer"] if "content" in omitted else []),
            *(["no_calls"] if "tool_calls" in omitted else []),
            *(["no_reasoning"] if set(omitted) & set(REASONING) else []),
        ]

    def _renders_same(self, conversation: Conversation, k: int, turn: Mapping[str, Any], text: str) -> bool:
        """Return whether the text is the same with another turn k; a turn that the template rejects is different."""
        turns = (*conversation.turns[:k], dict(turn), *conversation.turns[k + 1 :])
        try:
            return self._render(replace(conversation, turns=turns))[0] == text
        except UnusableConversationError:
            return False

    def save(self, directory: Path) -> None:
        """Save the files that `AutoTokenizer.from_pretrained` reads."""
        self.tokenizer.save_pretrained(directory)


def _shared_length(*texts: str) -> int:
    """Return the number of characters at the beginning that texts have in common."""
    pairs = enumerate(zip(*texts, strict=False))
    return next((k for k, characters in pairs if len(set(characters)) > 1), min(map(len, texts)))


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with at most `vocab_size` tokens, including the end-of-text token (id 0).

    Every byte has a token, so that all texts can be encoded. The same texts give the same tokenizer.

    Raises:
        ModelError: `vocab_size` is too small.
    """
    if vocab_size <= BYTES:
        raise ModelError(f"vocab_size: got {vocab_size}, expected at least {BYTES + 1}: all bytes and end of text")
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
