"""Questions to an artifact as a server takes them: plain arguments in, an answer that JSON can hold out.

The verbs are those of Python and of the command line, without what writes a file or reads one by its name: who asks may
be a page or an agent, and reaches nothing but the artifact.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grasp.artifact.reader import ArtifactReader
from grasp.audit.explain import Explainer
from grasp.audit.explain_images import ImageExplanation
from grasp.choose.select import select
from grasp.results import Result
from grasp.runs.environment import Environment
from grasp.runs.table import RunTable
from grasp.text import json_text, printable
from grasp.verbs.predict import parse_weights, predict
from grasp.verbs.score import score

Answer = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=1000)]

MOST_LINES = 1000  # of an answer
LISTS = ("weight", "floor", "cap")  # arguments that may be given several times


class Ask:
    """An artifact, and its runs if there are any, that answers questions. Every method may raise a GraspError."""

    def __init__(
        self, artifact: ArtifactReader, runs: Environment | RunTable | None = None, model: Path | str | None = None
    ) -> None:
        self.artifact = artifact
        self._runs = runs
        self._explainer = Explainer(artifact, None if model is None else {"model": {"path": str(model)}})
        self.lock = threading.RLock()  # who asks holds it: a model and its caches are for one thread

    def predict(
        self,
        drop: str | None = None,
        keep: str | None = None,
        by: str | None = None,
        weight: list[str] | None = None,
        target: str | None = None,
    ) -> Answer:
        """What happens to the model on a target if part of its training corpus is dropped, kept or re-weighted?

        The change against the whole corpus: 0 is the corpus, higher is better. Ask one of the first four.

        Args:
            drop: condition on labels; these rows are left out, e.g. topic = 'Games' AND source != 'web'.
            keep: condition on labels; only these rows are kept.
            by: a label; what dropping, and doubling, each of its values does.
            weight: a mixture: conditions with weights, e.g. ["topic = 'Games': 0.3"]; other rows weigh 1.
            target: one target, e.g. sciq; none: all.
        """
        weights = parse_weights(weight or [], "weight")
        found = predict(
            self.artifact, drop=drop, keep=keep, by=by, weight=weights or None, target=target, runs=self._runs
        )
        return _table(found)

    def score(
        self,
        target: str | None = None,
        unit: str | None = None,
        where: str | None = None,
        top: Count = 10,
        bottom: Count = 0,
    ) -> Answer:
        """Which rows of the corpus teach a target most, and which least?

        Args:
            target: e.g. sciq; none: the only one.
            unit: unit_id of one question of the target, in the place of all of them.
            where: condition on labels; only these rows are ranked.
            top: so many of the most helpful rows.
            bottom: so many of the most harmful rows.
        """
        return _table(score(self.artifact, target, unit=unit, where=where, top=top, bottom=bottom))

    def explain(self, row: str, target: str | None = None, unit: str | None = None) -> Answer:
        """Why does a row count for a target? What each of its words adds, and the questions it helps and hurts most.

        Args:
            row: row_id, e.g. one that `score` gave.
            target: e.g. sciq; none: the only one.
            unit: unit_id of one question: then which words of its answer received what, and the strongest pairs.
        """
        found = self._explainer.explain(target, row, unit=unit)
        if isinstance(found, ImageExplanation):
            return _table(found, pictures=found.nearest)
        lines = found.questions if found.pairs is None else found.pairs
        said = {} if found.answer is None else {"answer": found.answer_shades}
        return _table(Result(lines, found.headline, found.notes), shades=found.shades, **said)

    def select(
        self,
        budget: str | None = None,
        target: str | None = None,
        by: str | None = None,
        floor: list[str] | None = None,
        cap: list[str] | None = None,
        exclude_where: str | None = None,
        train_tokens: str | None = None,
    ) -> Answer:
        """Which rows should the model be trained on? The best within a budget, and what they are worth.

        Args:
            budget: 20%, 5000 (rows), 2Mtokens or 20%tokens; none: the best for `train_tokens`.
            target: sciq, or several with weights: sciq=2,openbookqa=1; none: the only one.
            by: label that floors and caps speak of, e.g. topic.
            floor: at least so much of the budget, e.g. ["Games:5%"].
            cap: at most so much of it.
            exclude_where: condition on labels; these rows are left out.
            train_tokens: tokens that the model will be trained on, e.g. 100B.
        """
        found = select(
            self.artifact,
            budget,
            target,
            by=by,
            exclude_where=exclude_where,
            train_tokens=train_tokens,
            floor=floor or (),
            cap=cap or (),
            runs=self._runs,
        )
        return _table(found)


VERBS = ("predict", "score", "explain", "select")


def _table(result: Result, **more: Any) -> Answer:
    """A result as headline, notes, columns and lines, and what else there is; `more` lines are left off."""
    names = result.table.column_names
    lines: Sequence[Any] = result.table.slice(0, MOST_LINES).to_pylist()
    answer: Answer = _clean(
        {
            "headline": result.headline,
            "notes": list(result.notes),
            "columns": names,
            "rows": [[line[name] for name in names] for line in lines],
            "more": max(0, result.table.num_rows - MOST_LINES),
        }
        | more
    )
    return answer


def _clean(value: Any) -> Any:
    """As JSON has it, texts made harmless to a terminal."""
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, str):
        return printable(" ".join(value.splitlines()) or " " * bool(value))
    return json.loads(json_text(value, default=str))
