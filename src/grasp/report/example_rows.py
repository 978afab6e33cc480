"""Rows that a report holds: the ends of every target, question and slice, and of the parts of two labels crossed. And
why those at the ends of a target count.

Shape letters: N rows, L rows that are long enough, K rows that are held, G slices, T targets, Q questions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from grasp.arrays import F32, F64, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import ranked
from grasp.build.modality import vision
from grasp.build.provenance import BuildSource
from grasp.errors import GraspError
from grasp.inspect.explanation import STRONG, by_word
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import LabelSlices, Slice
from grasp.predict.weights import grouped
from grasp.text import LONGEST_CELL, plain, printable, visible

MOST_ROWS = 1_500
ENDS = 25  # rows on either side of a target
QUESTIONS = 8  # a target
QUESTION_NUMBERS = 8_000_000  # effects of questions that are held at once; large corpora show fewer questions
QUESTION_TOP, QUESTION_BOTTOM = 6, 3
SLICE_TOP, SLICE_BOTTOM = 4, 2
CELLS = 600  # parts of two labels crossed
COLUMNS, COPIED = 8, 4_096  # columns, and rows of them, that are copied at once

LONGEST = 2_000  # characters of a row whose words are shaded
DIGITS = 3
TRUSTED = 4  # images beside a row
PICTURE_BYTES = 2_000_000  # of a page; beyond, images are named

Shades = dict[int, dict[str, list[tuple[str, float | None]]]]  # place among the held rows -> target -> words
Pictures = dict[int, dict[str, list[tuple[str, str | None]]]]  # the same -> what stands below a picture, and its URL


@dataclass(frozen=True, slots=True)
class Question:
    """One unit of a target: what is asked, and the rows that help it most and least, with their effects."""

    target: int
    unit_id: str
    prompt: str
    completion: str
    rows: I64
    effects: F32


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows with their text, and where each stands among all that are long enough."""

    rows: tuple[dict[str, Any], ...]  # of the row table
    index: I64
    effect_KT: F32
    rank_KT: I64  # 1 is the most helpful; 0: too short to be ranked
    questions: tuple[Question, ...]
    n_ranked: int

    def best_first(self, t: int) -> list[int]:
        """Places of the rows that are ranked for a target."""
        return [k for k in np.argsort(self.rank_KT[:, t], kind="stable").tolist() if self.rank_KT[k, t]]


def held_rows(
    artifact: ArtifactReader,
    predictor: Predictor,
    slices: Sequence[LabelSlices],
    parts: LabelSlices | None,
    long_N: Bool,
) -> HeldRows:
    """The rows of a report, `MOST_ROWS` at most.

    Args:
        slices: whose ends are wanted besides those of targets and questions.
        parts: whose best rows are wanted.
        long_N: rows that are long enough to be ranked.
    """
    effect_NT, rows_L = predictor.effect_NT, np.flatnonzero(long_N)
    questions = _questions(artifact, predictor, rows_L)
    mean_L = effect_NT.mean(axis=1)[rows_L]
    wanted = [_ends(effect_L, rows_L, ENDS, ENDS) for effect_L in by_column(effect_NT, rows_L)]
    wanted += [question.rows for question in questions]
    for one in slices:
        wanted += [_first_of_each(one, mean_L, rows_L, SLICE_TOP), _first_of_each(one, -mean_L, rows_L, SLICE_BOTTOM)]
    if parts is not None:
        wanted.append(_first_of_each(parts, mean_L, rows_L, 1))
    index = np.array(list(dict.fromkeys(np.concatenate(wanted).tolist()))[:MOST_ROWS], dtype=np.int64)
    ranks = [
        1 + len(effect_L) - np.searchsorted(np.sort(effect_L), effect_K, side="right")  # 1, and how many are higher
        for effect_L, effect_K in zip(by_column(effect_NT, rows_L), effect_NT[index].T, strict=True)
    ]
    rank_KT = np.where(long_N[index, None], np.stack(ranks, axis=1), 0)
    return HeldRows(tuple(artifact.rows(index).to_pylist()), index, effect_NT[index], rank_KT, questions, len(rows_L))


def _questions(artifact: ArtifactReader, predictor: Predictor, rows_L: I64) -> tuple[Question, ...]:
    """The first units of every target, each with the rows at its ends. Their effects are let go when it returns."""
    targets = predictor.units.targets
    each = max(1, min(QUESTIONS, QUESTION_NUMBERS // (predictor.n_rows * len(targets))))
    columns = [artifact.unit_columns(target)[:each] for target in targets]
    target_Q = np.repeat(np.arange(len(targets)), [len(part) for part in columns])
    column_Q = np.concatenate(columns)
    units = artifact.units.select(["unit_id", "prompt", "completion"]).take(column_Q).to_pylist()
    single = UnitSelection(tuple(str(e) for e in column_Q), column_Q, np.ones(len(column_Q), dtype=np.int64))
    effect_NQ = Predictor.from_artifact(artifact, predictor.protocol.additive, units=single).effect_NT
    questions = []
    for q, (unit, effect_L) in enumerate(zip(units, by_column(effect_NQ, rows_L), strict=True)):
        ends = _ends(effect_L, rows_L, QUESTION_TOP, QUESTION_BOTTOM)
        rows = np.array(list(dict.fromkeys(ends.tolist())), dtype=np.int64)
        questions.append(Question(int(target_Q[q]), rows=rows, effects=effect_NQ[rows, q], **unit))
    return tuple(questions)


def by_column(values_NT: F32, rows_L: I64) -> Iterator[F32]:
    """One column after the other, of some rows, each in one piece: a few at a time, so that lines are read once."""
    n_rows, n_columns = values_NT.shape
    for first in range(0, n_columns, COLUMNS):
        part_TN = np.empty((min(COLUMNS, n_columns - first), n_rows), dtype=np.float32)
        for start in range(0, n_rows, COPIED):
            part_TN[:, start : start + COPIED] = values_NT[start : start + COPIED, first : first + COLUMNS].T
        yield from part_TN if len(rows_L) == n_rows else part_TN[:, rows_L]


def _ends(values_L: F32, rows_L: I64, top: int, bottom: int) -> I64:
    """The rows with the highest values, best first, and those with the lowest, worst last."""
    ends = [ranked(values_L, count=top), ranked(-values_L, count=bottom)[::-1]]
    return np.asarray(rows_L[np.concatenate(ends)])


def _first_of_each(slices: LabelSlices, values_L: F32, rows_L: I64, count: int) -> I64:
    """Of every slice the rows with the highest values, best first."""
    order_L, rows_G = grouped(slices.codes_N[rows_L], len(slices.slices))
    groups = np.split(order_L, np.cumsum(rows_G)[:-1])
    firsts = [group[ranked(values_L[group], count=count)] for group in groups]
    return np.asarray(rows_L[np.concatenate(firsts)])


def crossed(first: LabelSlices, second: LabelSlices) -> LabelSlices:
    """Two labels crossed: their largest parts, and last, if there is any, a slice of all others."""
    codes_N = first.codes_N.astype(np.int64) * len(second.slices) + second.codes_N
    cells, inverse_N, counts = np.unique(codes_N, return_inverse=True, return_counts=True)
    kept = np.argsort(-counts, kind="stable")[:CELLS]
    place = np.full(len(cells), len(kept), dtype=np.int32)
    place[kept] = np.arange(len(kept))
    slices = []
    for cell in kept:
        i, j = divmod(int(cells[cell]), len(second.slices))
        a, b = first.slices[i], second.slices[j]
        slices.append(Slice(f"{a.name} / {b.name}", f"({a.expression}) AND ({b.expression})", int(counts[cell]), 0))
    n_smaller = len(cells) - len(kept)
    if n_smaller:
        rest = int(counts.sum() - counts[kept].sum())
        slices.append(Slice(f"{n_smaller:,} smaller parts", "", rest, 0))
    return LabelSlices(f"{first.label} x {second.label}", tuple(slices), place[inverse_N], n_smaller)


def explained(
    artifact: ArtifactReader, protocol: ScoringProtocol, targets: tuple[str, ...], held: HeldRows, count: int
) -> tuple[Shades, Pictures, str]:
    """Why the best rows of each target count, and half as many of the worst.

    Of texts the words with what each adds, if the model is where it was, else why not. Of images the trusted images
    that they bear on most.

    Args:
        count: how many of the best.
    """
    shades: Shades = {}
    pictures: Pictures = {}
    ends = []
    for t in range(len(targets)):
        order = held.best_first(t)
        ends.append(list(dict.fromkeys([*order[:count], *order[max(0, len(order) - count // 2) :]])))
    if BuildSource(artifact).has_images:
        room = PICTURE_BYTES
        for t, target in enumerate(targets):
            every = vision().explain(artifact, target, [held.rows[k]["row_id"] for k in ends[t]], protocol=protocol)
            for k, image in zip(ends[t], every, strict=True):
                shown = [(plain(caption, LONGEST_CELL), url) for caption, url in image.nearest[: 1 + TRUSTED]]
                room -= sum(len(url or "") for _, url in shown)
                pictures.setdefault(k, {})[f"t{t}"] = shown if room > 0 else [(caption, None) for caption, _ in shown]
        return {}, pictures, ""
    model = str(artifact.manifest.settings.get("model", {}).get("path", ""))
    if not Path(model).exists():
        return {}, {}, f"The words of the rows are not shaded: the model {model or 'of the build'} is not where it was."
    explainer = import_module("grasp.inspect.explain").Explainer(artifact)  # loads torch: not without a model
    try:
        for t, target in enumerate(targets):
            for k in ends[t]:
                row = explainer.explain(target, held.rows[k]["row_id"], protocol=protocol)
                shades.setdefault(k, {})[f"t{t}"] = list(_shaded_words(row.tokens, row.contributions))
    except GraspError as err:
        return {}, {}, f"The words of the rows are not shaded: {err}"
    return shades, {}, ""


def _shaded_words(tokens: Sequence[str], adds_L: F64) -> Iterator[tuple[str, float | None]]:
    """Words with what each adds; white space that adds much is made visible."""
    length = 0
    for word, add, share in zip(*by_word(tokens, adds_L), strict=True):
        shown = printable(visible(word) if abs(share) >= STRONG else word)
        yield shown, None if isnan(add) else float(f"{add:.{DIGITS}g}")
        length += len(word)
        if length > LONGEST:
            yield " ...", None
            return
