"""Splits of a task's questions, and the rows that each method selects from the known ones.

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
from grasp.methods.contract import MethodInputs
from grasp.methods.registry import configure_methods, score_artifact
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.seeds import stream

NEGATIVES = 10_000  # of the classifier


@dataclass(frozen=True)
class Request:
    """A selection: its target, method, number of known questions, and size."""

    target: str
    method: str
    questions: int
    share: float  # of the rows of the corpus
    draw: int = 0  # split of the questions


@dataclass(frozen=True, eq=False)
class World:
    """An artifact with many questions per task, of which a method knows a part."""

    artifact: ArtifactReader

    @cached_property
    def inputs(self) -> MethodInputs:
        return MethodInputs(self.artifact)

    @cached_property
    def texts(self) -> list[str]:
        return [text for start, stop in self.inputs.blocks() for text in self.inputs.texts(start, stop)]

    def questions(self, target: str, draw: int = 0) -> tuple[I64, I64]:
        """Return the columns of the questions that may be known, in random order, and of the other half."""
        columns = self.artifact.unit_columns(target)
        order = stream(draw, "selection", "questions", target).permutation(len(columns))
        return columns[order[: len(columns) // 2]], np.sort(columns[order[len(columns) // 2 :]])

    def rows(self, request: Request) -> I64:
        """Return the selected rows in corpus order; ties go to the first rows."""
        known, _ = self.questions(request.target, request.draw)
        score_N = METHODS[request.method](self, request.target, np.sort(known[: request.questions]), request.draw)
        count = round(request.share * self.artifact.n_rows)
        return np.sort(np.argsort(-score_N, kind="stable")[:count])


def _random(world: World, target: str, known: I64, draw: int) -> F64:
    """Draw random scores, the same for all targets."""
    del target, known
    return stream(draw, "selection", "random").random(world.artifact.n_rows)


def _of_units(name: str) -> Callable[[World, str, I64, int], F64]:
    """Return a function that sums the scores of a published method over the known questions."""

    def scores(world: World, target: str, known: I64, draw: int) -> F64:
        del target, draw
        (method,) = configure_methods([name])
        source = score_artifact(world.artifact, method)
        blocks = source.array_blocks(source.array_names[0], columns=known)
        return np.concatenate([block.sum(axis=1, dtype=np.float64) for _, block in blocks])

    return scores


def _perplexity(world: World, target: str, known: I64, draw: int) -> F64:
    """Score by low loss of the reference model, the same for all targets."""
    del target, known, draw
    return -np.asarray(world.inputs.column("loss"), dtype=np.float64)


def _question_texts(world: World, known: I64) -> list[str]:
    units = world.inputs.units.units
    return [query_text(units[e]) for e in known.tolist()]


def _classifier(world: World, target: str, known: I64, draw: int) -> F64:
    """Score like `grasp.baselines.classifier`, from the known questions."""
    negatives = stream(draw, "selection", "negatives", target).permutation(len(world.texts))[:NEGATIVES]
    odds = TextOdds([world.texts[i] for i in negatives.tolist()], [_question_texts(world, known)])
    return odds.score(world.texts)[:, 0]


def predictor_of(world: World, target: str, known: I64, task: Literal["mean", "estimate"]) -> Predictor:
    """Bind the built-in scoring rule to the known questions."""
    units = UnitSelection((target,), known, np.array([len(known)]))
    rule = DEFAULT_PROTOCOL.model_copy(update={"task": task})
    return Predictor.from_artifact(world.artifact, rule, [target], units=units)


def _mean(world: World, target: str, known: I64, draw: int) -> F64:
    """Score by the mean relevance to the known questions."""
    del draw
    return predictor_of(world, target, known, "mean").effect_NT[:, 0].astype(np.float64)


def _estimate(world: World, target: str, known: I64, draw: int) -> F64:
    """Score by the estimate of a row's mean relevance to all questions of the task."""
    del draw
    return predictor_of(world, target, known, "estimate").effect_NT[:, 0].astype(np.float64)


def _both(world: World, target: str, known: I64, draw: int) -> F64:
    """Add the estimate and the classifier, each divided by its standard deviation."""
    scores = [method(world, target, known, draw) for method in (_estimate, _classifier)]
    return np.asarray(sum((score_N - score_N.mean()) / score_N.std() for score_N in scores))


METHODS: dict[str, Any] = {
    "random": _random,
    "bm25": _of_units("bm25"),
    "perplexity": _perplexity,
    "classifier": _classifier,
    "mean": _mean,
    "estimate": _estimate,
    "estimate + classifier": _both,
}
