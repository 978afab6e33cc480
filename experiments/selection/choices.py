"""Questions of a task, split in two; and which rows each method chooses from those that it is shown.

Shape letters: N rows, E units, K rows chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from grasp.arrays import F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.baselines.bm25 import query_text
from grasp.baselines.classifier import TextOdds
from grasp.baselines.dsir import bucket_counts, log_ratio
from grasp.methods.contract import MethodInputs
from grasp.methods.registry import configured_methods, method_rows
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.scoring_rule import DEFAULT_PROTOCOL
from grasp.seeds import stream

BUCKETS = 10_000  # of DSIR
NEGATIVES = 10_000  # of the classifier


@dataclass(frozen=True)
class Request:
    """What is chosen: for which task, by which method, on how many of its questions, and how much."""

    target: str
    method: str
    questions: int
    share: float  # of the corpus's rows
    draw: int = 0  # of the split of the questions


@dataclass(frozen=True, eq=False)
class World:
    """An artifact with many questions a task, of which a method sees a part."""

    artifact: ArtifactReader

    @cached_property
    def inputs(self) -> MethodInputs:
        return MethodInputs(self.artifact)

    @cached_property
    def texts(self) -> list[str]:
        return [text for start, stop in self.inputs.blocks() for text in self.inputs.texts(start, stop)]

    def questions(self, target: str, draw: int = 0) -> tuple[I64, I64]:
        """Columns of the questions that may be shown, in the order in which they are, and of the others."""
        columns = self.artifact.unit_columns(target)
        order = stream(draw, "selection", "questions", target).permutation(len(columns))
        return columns[order[: len(columns) // 2]], np.sort(columns[order[len(columns) // 2 :]])

    def rows(self, request: Request) -> I64:
        """The rows that are chosen, in corpus order; of equal ones the first."""
        shown, _ = self.questions(request.target, request.draw)
        score_N = METHODS[request.method](self, request.target, np.sort(shown[: request.questions]), request.draw)
        count = round(request.share * self.artifact.n_rows)
        return np.sort(np.argsort(-score_N, kind="stable")[:count])


def _random(world: World, target: str, shown: I64, draw: int) -> F64:
    """One draw of rows for all tasks."""
    del target, shown
    return stream(draw, "selection", "random").random(world.artifact.n_rows)


def _of_units(name: str) -> Callable[[World, str, I64, int], F64]:
    """Sum over the questions of a published method's scores."""

    def scores(world: World, target: str, shown: I64, draw: int) -> F64:
        del target, draw
        (method,) = configured_methods([name])
        source = method_rows(world.artifact, method)
        blocks = source.array_blocks(source.array_names[0], columns=shown)
        return np.concatenate([block.sum(axis=1, dtype=np.float64) for _, block in blocks])

    return scores


def _question_texts(world: World, shown: I64) -> list[str]:
    units = world.inputs.units.units
    return [query_text(units[e], "both") for e in shown.tolist()]


def _dsir(world: World, target: str, shown: I64, draw: int) -> F64:
    """As `grasp.baselines.dsir`, from the questions that are shown."""
    counts_NH = bucket_counts(world.texts, BUCKETS)
    weight_H = log_ratio(_question_texts(world, shown), np.asarray(counts_NH.sum(axis=0), dtype=np.float64))
    return np.asarray(counts_NH @ weight_H) + stream(draw, "selection", "dsir", target).gumbel(size=len(world.texts))


def _classifier(world: World, target: str, shown: I64, draw: int) -> F64:
    """As `grasp.baselines.classifier`, from the questions that are shown."""
    drawn = stream(draw, "selection", "negatives", target).permutation(len(world.texts))[:NEGATIVES]
    odds = TextOdds([world.texts[i] for i in drawn.tolist()], [_question_texts(world, shown)])
    return odds.score(world.texts)[:, 0]


def predictor_of(world: World, target: str, shown: I64, task: Literal["mean", "estimate"]) -> Predictor:
    """The built-in scoring rule on the questions that are shown."""
    units = UnitSelection((target,), shown, np.array([len(shown)]))
    rule = DEFAULT_PROTOCOL.model_copy(update={"task": task})
    return Predictor.from_artifact(world.artifact, rule, [target], units=units)


def _mean(world: World, target: str, shown: I64, draw: int) -> F64:
    """The mean relevance to the questions that are shown: kernels of equal spread, added."""
    del draw
    return predictor_of(world, target, shown, "mean").effect_NT[:, 0].astype(np.float64)


def _estimate(world: World, target: str, shown: I64, draw: int) -> F64:
    """The estimate of a row's mean over the questions of the task."""
    del draw
    return predictor_of(world, target, shown, "estimate").effect_NT[:, 0].astype(np.float64)


def _both(world: World, target: str, shown: I64, draw: int) -> F64:
    """The estimate and the classifier, of equal spread."""
    scores = [method(world, target, shown, draw) for method in (_estimate, _classifier)]
    return np.asarray(sum((score_N - score_N.mean()) / score_N.std() for score_N in scores))


METHODS: dict[str, Any] = {
    "random": _random,
    "bm25": _of_units("bm25"),
    "dsir": _dsir,
    "classifier": _classifier,
    "mean": _mean,
    "estimate": _estimate,
    "estimate + classifier": _both,
}
