"""Example rows of a report: the most helpful and most harmful rows of every target, question and slice.

Start with `collect_example_rows`; `explain_rows` adds the words that account for a row's effect.

Shape letters: N rows, L rows long enough to be ranked, K example rows, G slices, T targets, Q questions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from grasp.api.score import distinct_rows
from grasp.arrays import F32, F64, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import ranked
from grasp.errors import GraspError
from grasp.inspect.explanation import MIN_NUMBERED_SHARE, by_word
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import LabelSlices
from grasp.predict.weights import mask_of
from grasp.progress import Progress
from grasp.text import printable, visible

MAX_ROWS = 1_500  # example rows of a page
ROWS_PER_END = 25  # most helpful rows per target, and as many of the most harmful
QUESTIONS = 8  # per target
QUESTION_NUMBERS = 8_000_000  # limit on question effects in memory; large corpora show fewer questions
QUESTION_TOP, QUESTION_BOTTOM = 6, 3  # most helpful and most harmful rows per question
SLICE_TOP, SLICE_BOTTOM = 4, 2  # the same per slice

MAX_SHADED_CHARS = 2_000  # characters of a row with shaded words
DIGITS = 3  # significant digits of a word's contribution

# Index of an example row -> "t" and the number of a target -> its words, each with its contribution.
Shades = dict[int, dict[str, list[tuple[str, float | None]]]]


@dataclass(frozen=True, slots=True)
class Question:
    """One unit of a target: its text, and the rows that help or hurt it most, with their effects."""

    target: int  # index of the target
    unit_id: str
    prompt: str
    completion: str
    rows: I64
    effects: F32


@dataclass(frozen=True, slots=True)
class ExampleRows:
    """Rows with their text, effects and ranks."""

    rows: tuple[dict[str, Any], ...]  # records of the row table
    index: I64  # (K,) row indices in the artifact
    effect_KT: F32
    rank_KT: I64  # 1 is the most helpful row; 0: too short to be ranked
    distinct_KT: Bool  # False: another row of the document, or a near-copy, has a larger effect
    questions: tuple[Question, ...]
    n_ranked: int  # rows of the corpus that are long enough to be ranked

    def most_helpful_first(self, t: int) -> list[int]:
        """Return the distinct example rows that are ranked for target `t`, ordered by rank."""
        is_shown_K = self.distinct_KT[:, t] & (self.rank_KT[:, t] > 0)
        return [k for k in np.argsort(self.rank_KT[:, t], kind="stable").tolist() if is_shown_K[k]]


def collect_example_rows(
    artifact: ArtifactReader,
    predictor: Predictor,
    slices: Sequence[LabelSlices],
    long_N: Bool,
) -> ExampleRows:
    """Collect at most `MAX_ROWS` example rows for a report.

    Rows of targets and questions come first, so these are the last to be cut off.

    Args:
        slices: labels whose most helpful and most harmful rows per slice are included.
        long_N: mask of the rows that are long enough to be ranked.
    """
    effect_NT, rows_L = predictor.effect_NT, np.flatnonzero(long_N)
    questions = _questions(artifact, predictor, rows_L)
    effect_TL, mean_L = np.ascontiguousarray(effect_NT[rows_L].T), effect_NT.mean(axis=1)[rows_L]
    selected = [
        distinct_rows(artifact, sign * effect_N, ROWS_PER_END, long_N) for effect_N in effect_NT.T for sign in (1, -1)
    ]
    selected += [question.rows for question in questions]
    for label in slices:
        selected.append(_top_of_each_slice(label, mean_L, rows_L, SLICE_TOP))
        selected.append(_top_of_each_slice(label, -mean_L, rows_L, SLICE_BOTTOM))
    index = np.array(list(dict.fromkeys(np.concatenate(selected).tolist()))[:MAX_ROWS], dtype=np.int64)
    ranks = [
        1 + len(effect_L) - np.searchsorted(np.sort(effect_L), effect_K, side="right")  # 1 + number of higher effects
        for effect_L, effect_K in zip(effect_TL, effect_NT[index].T, strict=True)
    ]
    rank_KT = np.where(long_N[index, None], np.stack(ranks, axis=1), 0)
    is_example_N = mask_of(index, len(effect_NT))
    distinct = [distinct_rows(artifact, np.abs(effect_N), len(index), is_example_N) for effect_N in effect_NT.T]
    distinct_KT = np.stack([np.isin(index, row_index) for row_index in distinct], axis=1)
    rows = tuple(artifact.rows(index).to_pylist())
    return ExampleRows(rows, index, effect_NT[index], rank_KT, distinct_KT, questions, len(rows_L))


def _questions(artifact: ArtifactReader, predictor: Predictor, rows_L: I64) -> tuple[Question, ...]:
    """Return the first units of every target, each with its most helpful and most harmful rows.

    The effects of single units, (N, Q), are local to this function, so that their memory is freed when it returns.
    """
    targets = predictor.units.targets
    per_target = max(1, min(QUESTIONS, QUESTION_NUMBERS // (predictor.n_rows * len(targets))))
    columns = [artifact.unit_columns(target)[:per_target] for target in targets]
    target_Q = np.repeat(np.arange(len(targets)), [len(part) for part in columns])
    column_Q = np.concatenate(columns)
    units = artifact.units.select(["unit_id", "prompt", "completion"]).take(column_Q).to_pylist()
    single = UnitSelection(tuple(str(e) for e in column_Q), column_Q, np.ones(len(column_Q), dtype=np.int64))
    effect_NQ = Predictor.from_artifact(artifact, predictor.protocol.additive, units=single).effect_NT
    questions = []
    for q, (unit, effect_L) in enumerate(zip(units, np.ascontiguousarray(effect_NQ[rows_L].T), strict=True)):
        ends = [ranked(effect_L, count=QUESTION_TOP), ranked(-effect_L, count=QUESTION_BOTTOM)[::-1]]
        rows = np.array(list(dict.fromkeys(rows_L[np.concatenate(ends)].tolist())), dtype=np.int64)
        questions.append(Question(int(target_Q[q]), rows=rows, effects=effect_NQ[rows, q], **unit))
    return tuple(questions)


def _top_of_each_slice(slices: LabelSlices, values_L: F32, rows_L: I64, count: int) -> I64:
    """Return the `count` rows with the highest values of every slice, in descending order."""
    codes_L, n_slices = slices.codes_N[rows_L], len(slices.slices)
    # numpy sorts 16-bit integers by radix sort, larger ones by timsort
    order_L = np.argsort(codes_L.astype(np.int16) if n_slices < 1 << 15 else codes_L, kind="stable")
    groups = np.split(order_L, np.cumsum(np.bincount(codes_L, minlength=n_slices))[:-1])
    top = [group[ranked(values_L[group], count=count)] for group in groups]
    return np.asarray(rows_L[np.concatenate(top)])


def explain_rows(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    targets: tuple[str, ...],
    examples: ExampleRows,
    count: int,
    progress: Progress,
) -> tuple[Shades, str]:
    """Explain the `count` most helpful rows of each target, and half as many of the most harmful.

    Texts are explained by the contribution of each word, which needs the model; rows of a reader are not explained.

    Returns:
        Words, and the reason why words are missing, or "".
    """
    shades: Shades = {}
    ends = []
    for t in range(len(targets)):
        order = examples.most_helpful_first(t)
        ends.append(list(dict.fromkeys([*order[:count], *order[max(0, len(order) - count // 2) :]])))
    if artifact.reader is not None:
        return {}, ""
    model = str(artifact.manifest.settings.get("model", {}).get("path", ""))
    if not Path(model).exists():
        return {}, f"Words are not shaded: the model {model or 'of the build'} was not found."
    progress.stage("explaining rows", rows=sum(map(len, ends)), tokens=None)
    explainer = import_module("grasp.inspect.explain").Explainer(artifact)  # imports torch, so only if it is needed
    try:
        for t, target in enumerate(targets):
            for k in ends[t]:
                row = explainer.explain(target, examples.rows[k]["row_id"], protocol=protocol)
                shades.setdefault(k, {})[f"t{t}"] = list(_shaded_words(row.tokens, row.contributions))
                progress.advance(1, 0)
    except GraspError as err:
        return {}, f"Words are not shaded: {err}"
    return shades, ""


def _shaded_words(tokens: Sequence[str], contribution_L: F64) -> Iterator[tuple[str, float | None]]:
    """Yield each word with its contribution; white space with a large contribution is made visible."""
    length = 0
    for word, contribution, share in zip(*by_word(tokens, contribution_L), strict=True):
        shown = printable(visible(word) if abs(share) >= MIN_NUMBERED_SHARE else word)
        yield shown, None if isnan(contribution) else float(f"{contribution:.{DIGITS}g}")
        length += len(word)
        if length > MAX_SHADED_CHARS:
            yield " ...", None
            return
