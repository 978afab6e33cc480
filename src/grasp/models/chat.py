"""Conversations as a model's chat template writes them, and where in the text the assistant speaks."""

import re
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from grasp.corpus.conversations import Conversation, Span
from grasp.errors import ModelError
from grasp.extras import require

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what marks the assistant's words in some templates


def written_out(tokenizer: Any, conversation: Conversation, *, last_only: bool) -> tuple[str, list[Span]]:
    """The text of a conversation, and the characters of each turn of the assistant, with the mark at its end.

    A template that marks the assistant's words with `{% generation %}` says itself where they are. Of another one a
    turn is what it adds to the text up to it, the beginning of an answer being the prompt's: so that text must be the
    beginning of the whole, which it is not where a template rewrites turns once others follow.

    Args:
        last_only: only the last turn of the assistant is asked for.
    Raises:
        ModelError: no template; one that refuses the turns, drops the assistant's words, or rewrites earlier turns.
    """
    require("jinja2", extra="chat", feature="a chat template")
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so turns cannot be written out; name one that has with --tokenizer, "
            "or say how with --set corpus.prompt=... and --set corpus.completion=..."
        )
    text, marked = _written(tokenizer, conversation, len(conversation.turns))
    answers = conversation.answers[-1:] if last_only else conversation.answers
    if marked and len(marked) != len(conversation.answers):
        raise ModelError(
            f"the chat template marks {len(marked)} spans of the assistant's words, expected one for each of its "
            f"{len(conversation.answers)} turns"
        )
    spans = marked[-len(answers) :] or [_span_between(tokenizer, conversation, k, text) for k in answers]
    for k, (start, stop) in zip(answers, spans, strict=True):
        words = conversation.turns[k]["content"].strip()
        if words not in text[start:stop]:
            raise ModelError(
                f"turn {k}: the chat template leaves out the assistant's words {words!r:.60}; with loss_on: completion"
                " only the last answer must be whole"
            )
    return text, spans


def _written(tokenizer: Any, conversation: Conversation, turns: int, **how: Any) -> tuple[str, list[Span]]:
    """The first so many turns as text, and what of it the template marks as the assistant's."""
    jinja = require("jinja2", extra="chat", feature="a chat template")
    tools = list(conversation.tools) or None
    try:
        template = tokenizer.get_chat_template(None, tools)
        has_marks = GENERATION.search(template) is not None
        (text,), marked = render_jinja_template(
            [list(conversation.turns[:turns])],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=has_marks,
            **tokenizer.special_tokens_map,
            **how,
        )
    except (jinja.TemplateError, TypeError, ValueError, KeyError) as err:
        raise ModelError(f"the chat template refuses the turns: {' '.join(str(err).split())[:200]}") from err
    return text, [(start, stop) for start, stop in marked[0]] if has_marks else []


def _span_between(tokenizer: Any, conversation: Conversation, k: int, text: str) -> Span:
    """Turn k: what stands between the prompt for it and its end."""
    prompt, _ = _written(tokenizer, conversation, k, add_generation_prompt=True)
    whole = _written(tokenizer, conversation, k + 1)[0].rstrip()
    if text.startswith(prompt) and text.startswith(whole) and len(prompt) < len(whole):
        return len(prompt), len(whole)
    raise ModelError(
        f"turn {k}: the chat template writes it otherwise once others follow, so which words carry loss cannot be told;"
        " with loss_on: completion the last answer alone carries it"
    )
