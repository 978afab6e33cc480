"""Tokenizers: a Hugging Face one as the corpus wants it, and a byte-level BPE trained on the spot.

A conversation is written out by the tokenizer's own chat template, and where each answer stands in it is told.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from grasp.corpus.conversations import Conversation, Span
from grasp.errors import ModelError
from grasp.extras import require

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
LONGEST_CHARACTER = 4  # tokens, where each is a byte
# verbose: a text longer than the context is no mistake here, rows are cut later
PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what marks the assistant's words in some templates


class HfTokenizer:
    """`grasp.corpus.documents.Tokenizer` over a transformers tokenizer.

    Args:
        tokenizer: any transformers tokenizer.
        vocab_size: ids of the *model's* vocabulary, which is often padded beyond the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    @property
    def eos_id(self) -> int | None:
        eos_id: int | None = self.tokenizer.eos_token_id
        return eos_id

    @property
    def writes_chats(self) -> bool:
        """Whether it has a chat template."""
        return bool(self.tokenizer.chat_template)

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
        return hashlib.blake2b(f"{self.eos_id} {text}".encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, no special tokens added, nothing cut."""
        ids: list[list[int]] = self.tokenizer(list(texts), **PLAIN)["input_ids"] if texts else []
        return ids

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int] | None]]:
        """The ids of `encode`, and the character after each token; None for a tokenizer that is not a fast one."""
        if not self.tokenizer.is_fast or not texts:
            return [(ids, None) for ids in self.encode(texts)]
        encoded: Any = self.tokenizer(list(texts), return_offsets_mapping=True, **PLAIN)
        spans: list[list[tuple[int, int]]] = encoded["offset_mapping"]
        return [(ids, [end for _, end in span]) for ids, span in zip(encoded["input_ids"], spans, strict=True)]

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

    def chat(self, conversation: Conversation, *, last_only: bool = False) -> tuple[str, list[Span]]:
        """The text of a conversation, and the characters of each turn of the assistant, with the mark at its end.

        A template that marks the assistant's words with `{% generation %}` says itself where they are. Of another one
        a turn is what it adds to the text up to it, the beginning of an answer being the prompt's: so that text must be
        the beginning of the whole, which it is not where a template rewrites turns once others follow.

        Args:
            last_only: only the last turn of the assistant is asked for.
        """
        require("jinja2", extra="chat", feature="a chat template")
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so turns cannot be written out; give it one "
                "(tokenizer.chat_template = ..., save_pretrained) and name its directory with --tokenizer; or, of "
                "questions and answers in columns, "
                """say how: --set 'corpus.prompt="Q: {question}"' --set 'corpus.completion=" {answer}"'"""
            )
        text, marked = self._written(conversation, len(conversation.turns))
        answers = conversation.answers[-1:] if last_only else conversation.answers
        if marked and len(marked) != len(conversation.answers):
            raise ModelError(
                f"the chat template marks {len(marked)} spans of the assistant's words, expected one for each of its "
                f"{len(conversation.answers)} turns"
            )
        spans = marked[-len(answers) :] or [self._span_of_turn(conversation, k, text) for k in answers]
        for k, (start, stop) in zip(answers, spans, strict=True):
            words = conversation.turns[k]["content"].strip()
            if words not in text[start:stop]:
                raise ModelError(
                    f"turn {k}: the chat template leaves out the assistant's words {words!r:.60}; with loss_on: "
                    "completion only the last answer must be whole"
                )
        return text, spans

    def _written(self, conversation: Conversation, turns: int, **how: Any) -> tuple[str, list[Span]]:
        """The first so many turns as text, and what of it the template marks as the assistant's."""
        jinja = require("jinja2", extra="chat", feature="a chat template")
        tools = list(conversation.tools) or None
        try:
            template = self.tokenizer.get_chat_template(None, tools)
            has_marks = GENERATION.search(template) is not None
            (text,), marked = render_jinja_template(
                [list(conversation.turns[:turns])],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                **self.tokenizer.special_tokens_map,
                **how,
            )
        except (jinja.TemplateError, TypeError, ValueError, KeyError) as err:
            raise ModelError(f"the chat template refuses the turns: {' '.join(str(err).split())[:200]}") from err
        return text, [(start, stop) for start, stop in marked[0]] if has_marks else []

    def _span_of_turn(self, conversation: Conversation, k: int, text: str) -> Span:
        """Turn k: what stands between the prompt for it and its end."""
        prompt, _ = self._written(conversation, k, add_generation_prompt=True)
        whole = self._written(conversation, k + 1)[0].rstrip()
        if text.startswith(prompt) and text.startswith(whole) and len(prompt) < len(whole):
            return len(prompt), len(whole)
        raise ModelError(
            f"turn {k}: the chat template writes it otherwise once others follow, so which words carry loss cannot be "
            "told; with loss_on: completion the last answer alone carries it"
        )

    def save(self, directory: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads."""
        self.tokenizer.save_pretrained(directory)


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
