"""Rows that a report holds: the ends of every target, question and slice, and the parts of two labels crossed.

Shape letters: N rows, L rows that are long enough, G slices, T targets, Q questions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.predict.label_slices import LabelSlices, Slice
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.rows import ranked
from grasp.predict.weights import grouped

MOST_ROWS = 1_500
ENDS = 25  # rows on either side of a target
QUESTIONS = 8  # a target
QUESTION_NUMBERS = 8_000_000  # effects of questions that are held at once; large corpora show fewer questions
QUESTION_TOP, QUESTION_BOTTOM = 6, 3
SLICE_TOP, SLICE_BOTTOM = 4, 2
CELLS = 600  # parts of two labels crossed
COLUMNS, COPIED = 8, 4_096  # columns, and rows of them, that are copied at once

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Question:
    """One unit of a target: what is asked, and the rows that help it most and least, with their effects."""

    target: int
    unit_id: str
    prompt: str
    completion: str
    rows: Rows
    effects: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows with their text, the best first, and where each stands among all that are long enough."""

    rows: tuple[dict[str, Any], ...]  # of the row table
    index: Rows
    effect_KT: NDArray[np.float32]
    rank_KT: Rows  # 1 is the most helpful; 0: too short to be ranked
    questions: tuple[Question, ...]
    n_ranked: int


def held_rows(
    artifact: ArtifactReader,
    predictor: Predictor,
    slices: Sequence[LabelSlices],
    parts: LabelSlices | None,
    long_N: NDArray[np.bool_],
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
    rows = tuple(artifact.rows(index).to_pylist())
    return HeldRows(rows, index, effect_NT[index], rank_KT, questions, len(rows_L))


def _questions(artifact: ArtifactReader, predictor: Predictor, rows_L: Rows) -> tuple[Question, ...]:
    """The first units of every target, each with the rows at its ends."""
    targets, n_rows = predictor.targets, predictor.n_rows
    each = max(1, min(QUESTIONS, QUESTION_NUMBERS // (n_rows * len(targets))))
    columns = [artifact.unit_columns(target)[:each] for target in targets]
    of_target = np.repeat(np.arange(len(targets)), [len(part) for part in columns])
    chosen_Q = np.concatenate(columns)
    units = artifact.units.select(["unit_id", "prompt", "completion"]).take(chosen_Q).to_pylist()
    single = UnitSelection(tuple(str(e) for e in chosen_Q), chosen_Q, np.ones(len(chosen_Q), dtype=np.int64))
    effect_NQ = Predictor.from_artifact(artifact, predictor.protocol.additive, units=single).effect_NT
    found = []
    for q, (unit, effect_L) in enumerate(zip(units, by_column(effect_NQ, rows_L), strict=True)):
        ends = _ends(effect_L, rows_L, QUESTION_TOP, QUESTION_BOTTOM)
        rows = np.array(list(dict.fromkeys(ends.tolist())), dtype=np.int64)
        found.append(Question(int(of_target[q]), rows=rows, effects=effect_NQ[rows, q], **unit))
    return tuple(found)


def by_column(values_NT: NDArray[np.float32], rows_L: Rows) -> Iterator[NDArray[np.float32]]:
    """One column after the other, of some rows, each in one piece: a few at a time, so that lines are read once."""
    n_rows, n_columns = values_NT.shape
    for first in range(0, n_columns, COLUMNS):
        part_TN = np.empty((min(COLUMNS, n_columns - first), n_rows), dtype=np.float32)
        for start in range(0, n_rows, COPIED):
            part_TN[:, start : start + COPIED] = values_NT[start : start + COPIED, first : first + COLUMNS].T
        yield from part_TN if len(rows_L) == n_rows else part_TN[:, rows_L]


def _ends(values_L: NDArray[np.float32], rows_L: Rows, top: int, bottom: int) -> Rows:
    """The rows with the highest values, best first, and those with the lowest, worst last."""
    ends = [ranked(values_L, count=top), ranked(-values_L, count=bottom)[::-1]]
    return np.asarray(rows_L[np.concatenate(ends)])


def _first_of_each(slices: LabelSlices, values_L: NDArray[np.float32], rows_L: Rows, count: int) -> Rows:
    """Of every slice the rows with the highest values, best first."""
    order_L, rows_G = grouped(slices.codes_N[rows_L], len(slices.slices))
    groups = np.split(order_L, np.cumsum(rows_G)[:-1])
    firsts = [group[ranked(values_L[group], count=count)] for group in groups]
    return np.asarray(rows_L[np.concatenate(firsts)])


def crossed(first: LabelSlices, second: LabelSlices) -> LabelSlices:
    """Two labels crossed: their largest parts, and last, if there is any, a slice of all others."""
    codes_N = first.codes_N.astype(np.int64) * len(second.slices) + second.codes_N
    found, inverse_N, counts = np.unique(codes_N, return_inverse=True, return_counts=True)
    kept = np.argsort(-counts, kind="stable")[:CELLS]
    place = np.full(len(found), len(kept), dtype=np.int32)
    place[kept] = np.arange(len(kept))
    parts = [divmod(int(found[one]), len(second.slices)) for one in kept]
    cells = [
        Slice(
            f"{first.slices[a].name} / {second.slices[b].name}",
            f"({first.slices[a].expression}) AND ({second.slices[b].expression})",
            int(counts[one]),
            0,
        )
        for one, (a, b) in zip(kept, parts, strict=True)
    ]
    rest = int(counts.sum() - counts[kept].sum())
    if rest:
        cells.append(Slice(f"{len(found) - len(kept):,} smaller parts", "", rest, 0))
    return LabelSlices(f"{first.label} x {second.label}", tuple(cells), place[inverse_N], len(found) - len(kept))
