"""Why a row counts for a target, as a result: tables, plain text, text in colour, HTML; and what adds up to its effect.

Shape letters: L tokens, E units.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import kernel_weights
from grasp.results import Result, html_table
from grasp.text import ending, plain, printable, signed, text_table, visible

SHOWN_WORDS = 400  # of a row, on a terminal
SHOWN_PAIRS = 10
SHOWN_QUESTIONS = 5  # that are helped most, and hurt most
STRONG = 0.2  # of the strongest word: weaker ones get no number
NUMBER_WIDTH = 7  # columns of a number
DEEPEST = 0.5  # shade of HTML: text stays readable on it, light or dark
CONTEXT = 4  # tokens before the one of a pair
READING_NUMBERS = "a word's number: what the row teaches by saying it there; above 0 it helps"
READING_COLOURS = "blue: the row teaches by saying it there; orange: it harms"
COLUMNS, LEEWAY = 100, 20  # of a line, and what a text without spaces may have more
UNPARTED = "\u2e80"  # where scripts begin that part no words
HELPS, HURTS = (189, 153, 117, 75, 33), (230, 223, 216, 209, 202)  # of 256 terminal colours: blues and oranges


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(Result):
    """What every token of a row adds to the row's effect on a target, or on one unit of it.

    `effect` = the sum of `contributions` + `text` + `average`, all in standard deviations over the rows, as `grasp
    score` prints effects. A token's number belongs to its prediction from what stands before it.

    Attributes:
        table: one line a token of the row: position, text, contribution, and the same by kernel. A token that carries
            no loss has none.
        effect: of the row, from the artifact.
        text: what the row's text adds beside its own relevance: learned from rows of other documents, above or below
            the average row's; 0 where the scoring rule estimates nothing, or of one unit.
        average: minus what the tokens of a row add on average, so that the average row has effect 0.
        gap: what the tokens add up to here, less what the artifact holds: rounding of the stored numbers.
        kernels: kernel, contribution (the sum over tokens), stored (what the relevance in the artifact makes of it).
        answer: with a unit: position, text, received, one line a token of it; the prompt's tokens receive nothing.
        pairs: with a unit: the strongest pairs of words: row_position, row_text, answer_position, answer_text,
            contribution. A word's position is that of its first token.
        questions: without a unit: unit_id, prompt, completion, contribution of every unit, the most helped first.
    """

    row_id: str
    target: str
    unit_id: str | None
    effect: float
    text: float
    average: float
    gap: float
    kernels: pa.Table
    answer: pa.Table | None = None
    pairs: pa.Table | None = None
    questions: pa.Table | None = None
    prompt: str = ""  # of the unit

    @property
    def tokens(self) -> tuple[str, ...]:
        """The row's tokens as text; joined they are its text."""
        return tuple(self.table["text"].to_pylist())

    @property
    def contributions(self) -> F64:
        """What each token adds, (L,); NaN where it carries no loss."""
        return np.asarray(self.table["contribution"].to_pandas(), dtype=np.float64)

    @property
    def answer_tokens(self) -> tuple[str, ...]:
        """The unit's tokens as text; none without a unit."""
        return () if self.answer is None else tuple(self.answer["text"].to_pylist())

    @property
    def received(self) -> F64:
        """What each token of the unit received, (L,); NaN for the prompt's."""
        return np.empty(0) if self.answer is None else np.asarray(self.answer["received"].to_pandas(), dtype=np.float64)

    @property
    def shades(self) -> list[tuple[str, float]]:
        """The row's words, and the share of the strongest that each adds, from -1 to 1; joined they are its text."""
        return _shades(self.tokens, self.contributions)

    @property
    def answer_shades(self) -> list[tuple[str, float]]:
        """The same for the unit's words by what they received; none without a unit."""
        return [] if self.answer is None else _shades(self.answer_tokens, self.received)

    def __repr__(self) -> str:
        return self.as_text()

    def as_text(self, *, colour: bool = False) -> str:
        """The explanation on a terminal: strong words with their numbers, or all on shades of blue and orange."""
        parts = [plain(self.headline), "", *_paragraph(self.tokens, self.contributions, colour=colour)]
        if self.answer is not None:
            parts += ["", "question: " + ending(self.prompt), "", "its answer, by what each word received:"]
            has_loss = ~np.isnan(self.received)
            answer = [token for token, is_scored in zip(self.answer_tokens, has_loss, strict=True) if is_scored]
            parts += _paragraph(answer, self.received[has_loss], colour=colour)
        for title, names, lines in self._tables():
            parts += ["", text_table(title, names, lines, left=0)]
        return "\n".join([*parts, "", READING_COLOURS if colour else READING_NUMBERS, *map(plain, self.notes)])

    def _tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """The strongest pairs, or the questions that are helped and hurt most: title, headings, lines."""
        if self.pairs is not None:
            title = "strongest pairs: a word of the row, and the word of the answer that it bears on"
            lines = [
                [
                    signed(pair["contribution"]),
                    _in_context(self.tokens, pair["row_position"], pair["row_text"]),
                    _in_context(self.answer_tokens, pair["answer_position"], pair["answer_text"]),
                ]
                for pair in self.pairs.slice(0, SHOWN_PAIRS).to_pylist()
            ]
            yield title, ["adds", "row says", "answer says"], lines
        if self.questions is not None:
            questions = self.questions.to_pylist()
            helped = [question for question in questions if question["contribution"] > 0][:SHOWN_QUESTIONS]
            hurt = [question for question in questions[::-1] if question["contribution"] < 0][:SHOWN_QUESTIONS]
            for title, selected in (
                ("questions it helps most: their part of the effect", helped),
                ("questions it hurts most", hurt),
            ):
                lines = [
                    [
                        signed(question["contribution"]),
                        question["unit_id"],
                        plain(f"{ending(question['prompt'], 100)} -> {question['completion'].strip()}"),
                    ]
                    for question in selected
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

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        tables = {name: getattr(self, name) for name in ("kernels", "answer", "pairs", "questions")}
        return {
            "target": self.target,
            "row_id": self.row_id,
            "unit_id": self.unit_id,
            "effect": self.effect,
            "text": self.text,
            "average": self.average,
            "gap": self.gap,
            "tokens": self.table.to_pylist(),
            **{name: table.to_pylist() for name, table in tables.items() if table is not None},
            "notes": list(self.notes),
        }


def join_words(tokens: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Tokens joined to words, and the first token of each.

    A token goes on with a word where a letter or a digit follows another; of scripts that part no words, each is one.
    """
    words: list[str] = []
    starts: list[int] = []
    for place, token in enumerate(tokens):
        if words and (not token or (token[0].isalnum() and words[-1][-1:].isalnum() and token[0] < UNPARTED)):
            words[-1] += token
        else:
            words.append(token)
            starts.append(place)
    return words, np.array(starts, dtype=np.int64)


def by_word(tokens: Sequence[str], adds_L: F64) -> tuple[list[str], list[float], list[float]]:
    """Words, what each adds, and that over the most that any does; NaN and 0 where no token of it carries loss."""
    words, starts = join_words(tokens)
    known_W = np.add.reduceat(~np.isnan(adds_L), starts, dtype=np.int64) > 0
    adds_W = np.add.reduceat(np.nan_to_num(adds_L), starts)
    share_W = adds_W / (np.abs(adds_W).max(initial=0.0) or 1.0)
    return words, np.where(known_W, adds_W, np.nan).tolist(), share_W.tolist()


def shaded_html(shades: Sequence[tuple[str, float]]) -> str:
    """Words as HTML, blue where they help, orange where they hurt."""
    spans = []
    for word, share in shades:
        colour = "31,119,180" if share > 0 else "255,127,14"
        style = f' style="background:rgba({colour},{DEEPEST * abs(share):.2f})"' if abs(share) >= 0.02 else ""
        spans.append(f"<span{style}>{escape(printable(word))}</span>")
    return f'<p dir="auto" style="white-space:pre-wrap">{"".join(spans)}</p>'


def _shades(tokens: Sequence[str], adds_L: F64) -> list[tuple[str, float]]:
    """Words with the share of the strongest that each adds; white space with a share to speak of is made visible."""
    words, _, shares = by_word(tokens, adds_L)
    return [(visible(word) if abs(share) >= STRONG else word, share) for word, share in zip(words, shares, strict=True)]


def _paragraph(tokens: Sequence[str], adds_L: F64, *, colour: bool) -> list[str]:
    """Lines of text with marked words; of a long one the part that adds most, either way.

    Words are on a shade of blue where they help, of orange where they hurt; without colour the strong ones have their
    number behind them.
    """
    words, adds_W, shares = by_word(tokens, adds_L)
    start, stop = 0, len(words)
    if stop > SHOWN_WORDS:
        total = np.concatenate([[0.0], np.cumsum(np.abs(np.nan_to_num(adds_W)))])
        start = int(np.argmax(total[SHOWN_WORDS:] - total[:-SHOWN_WORDS]))
        stop = start + SHOWN_WORDS
    lines, line, used = [], "", 0
    for word, add, share in list(zip(words, adds_W, shares, strict=True))[start:stop]:
        shown = visible(word).strip() if word.isspace() and abs(share) >= STRONG else re.sub(r"\s+", " ", word)
        shown = printable(shown)
        width = len(shown) + (NUMBER_WIDTH if abs(share) >= STRONG else 0)
        if used + width > COLUMNS and (shown.startswith(" ") or used > COLUMNS + LEEWAY):
            lines.append(line.rstrip())
            line, used, shown = "", 0, shown.lstrip(" ")
        used += width
        level = min(int(abs(share) * (len(HELPS) + 1)), len(HELPS)) if colour else 0
        if level:
            shown = f"\x1b[30;48;5;{(HELPS if share > 0 else HURTS)[level - 1]}m{shown}\x1b[0m"
        elif shown.strip() and abs(share) >= STRONG and not colour:
            shown += f"[{add:+z.2g}]"
        line += shown
    lines.append(line)
    for where, part in (("before", adds_W[:start]), ("after", adds_W[stop:])):
        if part:
            lines.append(f"... {len(part):,} words {where} this add {signed(float(np.nansum(part)))}")
    return lines


def _in_context(tokens: Sequence[str], place: int, word: str) -> str:
    """A word that begins at a token, in brackets, behind the few that stand before it."""
    before = "".join(tokens[max(0, place - CONTEXT) : place])
    return plain(f"{before}{' ' * (word.startswith(' ') and not word.isspace())}[{visible(word).strip()}]")


@dataclass(frozen=True, slots=True)
class EffectParts:
    """effect = the sum over kernels m and units e of weight_me stored_me, plus `text`, plus `average`.

    Attributes:
        effect: of the row, in standard deviations over the rows.
        text: what its text adds, above or below the average row's.
        average: minus what a row adds on average, so that the average row has effect 0.
        stored: relevance to each unit, by kernel, (E,).
        weights: what relevance is multiplied by to be a part of the effect, by kernel, (E,).
    """

    effect: float
    text: float
    average: float
    stored: Mapping[str, F64]
    weights: Mapping[str, F64]

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, predictor: Predictor, index: int) -> Self:
        """Args: predictor: additive, of one target or of some of its units."""
        task, columns_E = predictor.task, predictor.units.columns_E
        stored, weights = {}, {}
        for kernel in kernel_weights(predictor.protocol):
            relevance_1E = artifact.array_rows(artifact.relevance_name(kernel), np.array([index]), columns=columns_E)
            stored[kernel] = np.asarray(relevance_1E[0], dtype=np.float64)
            sign_weight_E = np.where(stored[kernel] < 0, predictor.protocol.negative_of(kernel), 1.0)
            weights[kernel] = sign_weight_E * predictor.unit_shares[kernel] / len(columns_E)
        average = -sum(float(task.shares[kernel][0] * task.scales[kernel].mean_E[0]) for kernel in stored)
        return cls(float(predictor.effect_NT[index, 0]), predictor.text_of(index), average, stored, weights)

    @property
    def by_unit_E(self) -> F64:  # noqa: N802 - a shape suffix
        """What each unit adds, (E,)."""
        return np.asarray(sum(self.weights[kernel] * stored_E for kernel, stored_E in self.stored.items()))
