"""The result of `explain`, as tables, plain text, text in colour and HTML; and the terms of an effect.

The effect of a row is the predicted change of a target's utility from training on it, in standard deviations over the
rows. An `Explanation` has the contribution of every token of the row to it; `EffectTerms` reads from the artifact the
terms that the effect is the sum of. Start with `Explanation`.

Shape letters: L tokens, W words, E units.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import kernel_weights
from grasp.results import Result, html_table
from grasp.text import ending, plain, printable, signed, text_table, visible

SHOWN_WORDS = 400  # words of a row on a terminal
SHOWN_PAIRS = 10
SHOWN_QUESTIONS = 5  # questions that are helped most, and hurt most
MIN_NUMBERED_SHARE = 0.2  # contribution, relative to the strongest word, below which a word gets no number
NUMBER_WIDTH = 7  # width of a number in columns
MAX_OPACITY = 0.5  # opacity of the strongest HTML shade, so that text stays readable
CONTEXT_TOKENS = 4  # tokens before a word of a pair
LEGEND = "numbers: contribution of a word to the effect; above 0 it helps"
LINE_WIDTH, MAX_EXCESS = 100, 20  # columns of a line, and excess for text without spaces
FIRST_UNSPACED = "\u2e80"  # first character of scripts without spaces between words
# blues and oranges among the 256 colours of a terminal, by increasing strength


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(Result):
    """Contributions of the tokens of a row to its effect on a target, or on one unit of it.

    `effect` = the sum of `contributions` + `text` + `replay` + `average`, all in standard deviations over the rows, as
    `grasp score` prints effects. The contribution of a token is that of its prediction from the tokens before it.

    Attributes:
        table: one row per token: position, text, contribution, and contributions by kernel; null for tokens without
            loss.
        effect: effect of the row, from the artifact.
        text: part of the effect that regressions on rows of other documents predict from the row's text and labels,
            relative to the mean over all rows; 0 for a single unit, and for protocols with `task: mean`.
        average: minus the mean sum of contributions over all rows, so that the average row has effect 0.
        replay: contribution of the replayed training, which belongs to the row as a whole; 0 without a replay.
        gap: recomputed minus stored effect, due to rounding of the stored numbers.
        kernels: kernel, contribution (sum over tokens), stored (from the artifact's relevance).
        answer: with a unit, one row per token: position, text, received; null for the prompt.
        pairs: with a unit, the strongest pairs of words: row_position, row_text, answer_position, answer_text,
            contribution. The position of a word is that of its first token.
        questions: without a unit: unit_id, prompt, completion, contribution of every unit, in descending order.
    """

    row_id: str
    target: str
    unit_id: str | None
    effect: float
    text: float
    average: float
    gap: float
    replay: float = 0.0
    kernels: pa.Table
    answer: pa.Table | None = None
    pairs: pa.Table | None = None
    questions: pa.Table | None = None
    prompt: str = ""  # prompt of the unit

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the row's tokens as text; concatenated they are its text."""
        return tuple(self.table["text"].to_pylist())

    @property
    def contributions(self) -> F64:
        """Return the contribution of each token, (L,); NaN without loss."""
        return np.asarray(self.table["contribution"].to_pandas(), dtype=np.float64)

    @property
    def answer_tokens(self) -> tuple[str, ...]:
        """Return the unit's tokens as text; empty without a unit."""
        return () if self.answer is None else tuple(self.answer["text"].to_pylist())

    @property
    def received(self) -> F64:
        """Return the contribution received by each token of the unit, (L,); NaN for the prompt."""
        return np.empty(0) if self.answer is None else np.asarray(self.answer["received"].to_pandas(), dtype=np.float64)

    @property
    def shades(self) -> list[tuple[str, float]]:
        """Return the row's words with their contributions relative to the largest, from -1 to 1."""
        return _shades(self.tokens, self.contributions)

    @property
    def answer_shades(self) -> list[tuple[str, float]]:
        """Return the unit's words with their relative contributions, from -1 to 1; empty without a unit."""
        return [] if self.answer is None else _shades(self.answer_tokens, self.received)

    def __repr__(self) -> str:
        parts = [plain(self.headline), "", *_format_paragraph(self.tokens, self.contributions)]
        if self.answer is not None:
            parts += ["", "question: " + ending(self.prompt), "", "answer, by the contribution to each word:"]
            has_loss = ~np.isnan(self.received)
            answer = [token for token, is_scored in zip(self.answer_tokens, has_loss, strict=True) if is_scored]
            parts += _format_paragraph(answer, self.received[has_loss])
        for title, names, lines in self._tables():
            parts += ["", text_table(title, names, lines, left=0)]
        return "\n".join([*parts, "", LEGEND, *map(plain, self.notes)])

    def _tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield the tables below the text: title, headings, lines."""
        if self.pairs is not None:
            title = "strongest pairs: a word of the row and a word of the answer"
            lines = [
                [
                    signed(pair["contribution"]),
                    _in_context(self.tokens, pair["row_position"], pair["row_text"]),
                    _in_context(self.answer_tokens, pair["answer_position"], pair["answer_text"]),
                ]
                for pair in self.pairs.slice(0, SHOWN_PAIRS).to_pylist()
            ]
            yield title, ["adds", "row", "answer"], lines
        if self.questions is not None:
            questions = self.questions.to_pylist()
            helped = [question for question in questions if question["contribution"] > 0][:SHOWN_QUESTIONS]
            hurt = [question for question in questions[::-1] if question["contribution"] < 0][:SHOWN_QUESTIONS]
            titles = "questions it helps most, by contribution to the effect", "questions it harms most"
            for title, selected in zip(titles, (helped, hurt), strict=True):
                texts = [f"{ending(each['prompt'], 100)} -> {each['completion'].strip()}" for each in selected]
                lines = [
                    [signed(question["contribution"]), question["unit_id"], plain(text)]
                    for question, text in zip(selected, texts, strict=True)
                ]
                if lines:
                    yield title, ["adds", "unit_id", "text"], lines

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(plain(self.headline))}</b></p>", shaded_html(self.shades)]
        if self.answer is not None:
            parts += ["<p><b>question and answer</b></p>", shaded_html(self.answer_shades)]
        for title, names, lines in self._tables():
            parts.append(f"<p><b>{escape(title)}</b></p>{html_table(names, lines)}")
        return "".join([*parts, *(f"<p>{escape(plain(note))}</p>" for note in self.notes)])


def join_words(tokens: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Join tokens to words, and return the first token of each.

    A token continues a word if a letter or digit follows another; in scripts without spaces each token is a word.
    """
    words: list[str] = []
    starts: list[int] = []
    for t, token in enumerate(tokens):
        if words and (not token or (token[0].isalnum() and words[-1][-1:].isalnum() and token[0] < FIRST_UNSPACED)):
            words[-1] += token
        else:
            words.append(token)
            starts.append(t)
    return words, np.array(starts, dtype=np.int64)


def by_word(tokens: Sequence[str], contribution_L: F64) -> tuple[list[str], list[float], list[float]]:
    """Return words, contributions, and contributions relative to the largest; NaN and 0 for words without loss."""
    words, starts = join_words(tokens)
    has_loss_W = np.add.reduceat(~np.isnan(contribution_L), starts, dtype=np.int64) > 0
    contribution_W = np.add.reduceat(np.nan_to_num(contribution_L), starts)
    share_W = contribution_W / (np.abs(contribution_W).max(initial=0.0) or 1.0)
    return words, np.where(has_loss_W, contribution_W, np.nan).tolist(), share_W.tolist()


def dominant_word_notes(words: Sequence[str], contributions: Sequence[float | None]) -> list[str]:
    """Return a note if one word has more than half of all positive contributions, all of its occurrences together."""
    total_by_word: dict[str, float] = defaultdict(float)
    for word, contribution in zip(words, contributions, strict=True):
        if contribution is not None and not isnan(contribution):
            total_by_word[word.strip().casefold()] += contribution
    word, largest = max(total_by_word.items(), key=lambda item: item[1], default=("", 0.0))
    total = sum(contribution for contribution in total_by_word.values() if contribution > 0)
    if len(total_by_word) <= 2 or not word or largest <= total / 2:
        return []
    return [f"the word {word!r} alone has {largest / total:.0%} of the positive contributions of words"]


def shaded_html(shades: Sequence[tuple[str, float]]) -> str:
    """Format words as HTML, blue if they help, orange if they harm."""
    spans = []
    for word, share in shades:
        colour = "31,119,180" if share > 0 else "255,127,14"
        style = f' style="background:rgba({colour},{MAX_OPACITY * abs(share):.2f})"' if abs(share) >= 0.02 else ""
        spans.append(f"<span{style}>{escape(printable(word))}</span>")
    return f'<p dir="auto" style="white-space:pre-wrap">{"".join(spans)}</p>'


def _shades(tokens: Sequence[str], contribution_L: F64) -> list[tuple[str, float]]:
    """Return words with relative contributions; strong white space is made visible."""
    words, _, shares = by_word(tokens, contribution_L)
    return [
        (visible(word) if abs(share) >= MIN_NUMBERED_SHARE else word, share)
        for word, share in zip(words, shares, strict=True)
    ]


def _format_paragraph(tokens: Sequence[str], contribution_L: F64) -> list[str]:
    """Format text as lines, with numbers behind strong words; a long text is cut to the window with the largest sum."""
    words, contribution_W, shares = by_word(tokens, contribution_L)
    start, stop = 0, len(words)
    if stop > SHOWN_WORDS:
        # the window of SHOWN_WORDS words with the largest sum of absolute contributions, by differences of totals
        total = np.concatenate([[0.0], np.cumsum(np.abs(np.nan_to_num(contribution_W)))])
        start = int(np.argmax(total[SHOWN_WORDS:] - total[:-SHOWN_WORDS]))
        stop = start + SHOWN_WORDS
    lines, line, used = [], "", 0
    for word, contribution, share in list(zip(words, contribution_W, shares, strict=True))[start:stop]:
        shown = (
            visible(word).strip() if word.isspace() and abs(share) >= MIN_NUMBERED_SHARE else re.sub(r"\s+", " ", word)
        )
        shown = printable(shown)
        width = len(shown) + (NUMBER_WIDTH if abs(share) >= MIN_NUMBERED_SHARE else 0)
        if used + width > LINE_WIDTH and (shown.startswith(" ") or used > LINE_WIDTH + MAX_EXCESS):
            lines.append(line.rstrip())
            line, used, shown = "", 0, shown.lstrip(" ")
        used += width
        if shown.strip() and abs(share) >= MIN_NUMBERED_SHARE:
            shown += f"[{contribution:+z.2g}]"
        line += shown
    lines.append(line)
    for direction, omitted in (("before", contribution_W[:start]), ("after", contribution_W[stop:])):
        if omitted:
            lines.append(f"... {len(omitted):,} words {direction} this contribute {signed(float(np.nansum(omitted)))}")
    return lines


def _in_context(tokens: Sequence[str], start: int, word: str) -> str:
    """Format a word in brackets after the few tokens before it."""
    before = "".join(tokens[max(0, start - CONTEXT_TOKENS) : start])
    return plain(f"{before}{' ' * (word.startswith(' ') and not word.isspace())}[{visible(word).strip()}]")


@dataclass(frozen=True, slots=True)
class EffectTerms:
    """Terms of an effect: the sum over kernels m and units e of weight_me stored_me, plus `text`, plus `average`.

    Attributes:
        effect: effect of the row, in standard deviations over the rows.
        text: part that is predicted from the row's text and labels, relative to the mean over rows.
        average: minus the mean over rows, so that the average row has effect 0.
        stored: relevance to each unit by kernel, (E,).
        weights: factors of the relevance in the effect by kernel, (E,).
    """

    effect: float
    text: float
    average: float
    stored: Mapping[str, F64]
    weights: Mapping[str, F64]

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, predictor: Predictor, index: int) -> Self:
        """Decompose the effect of a row; `predictor` is additive, for one target or some of its units."""
        columns_E = predictor.units.columns_E
        stored, weights = {}, {}
        # With a prediction from text and labels (`prior`), relevance has the weight rho, and the prediction the rest.
        rho = 1.0 if predictor.prior is None else float(predictor.prior.rho_T[0])
        for kernel in kernel_weights(predictor.protocol):
            relevance_1E = artifact.array_rows(artifact.relevance_name(kernel), np.array([index]), columns=columns_E)
            stored[kernel] = np.asarray(relevance_1E[0], dtype=np.float64)
            sign_weight_E = np.where(stored[kernel] < 0, predictor.protocol.negative_factor(kernel), 1.0)
            weights[kernel] = rho * sign_weight_E * predictor.unit_relevance_to_effect[kernel] / len(columns_E)
        effect, text = float(predictor.effect_NT[index, 0]), predictor.prior_effect(index)
        from_units = sum(float(weights[kernel] @ stored_E) for kernel, stored_E in stored.items())
        return cls(effect, text, effect - text - from_units, stored, weights)
