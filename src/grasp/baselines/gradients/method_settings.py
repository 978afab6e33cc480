"""Settings that gradient methods have in common."""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from grasp.baselines.gradients.projection import Form
from grasp.settings import Settings, refuse_idle

PAPER_LAYERS = ("block:-1", "final_norm")
UNPROJECTED = "dimension: null projects nothing"


EXPRESSION = re.compile(r"(?:^|,)\s*(!?re:.*)", re.DOTALL)


def _listed(value: object) -> object:
    """A string in its parts; a regular expression may hold commas, so it reaches to the end."""
    if not isinstance(value, str):
        return value
    expression = EXPRESSION.search(value)
    words = value if expression is None else value[: expression.start()]
    last = () if expression is None else (expression[1].strip(),)
    return *(part.strip() for part in words.split(",") if part.strip()), *last


Patterns = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class LayerSettings(Settings):
    """Which parameters the gradients are of."""

    layers: Patterns = Field(
        PAPER_LAYERS,
        description="Parameters covered: all, head, embedding, body, blocks, block:N, final_norm, wildcards over names "
        "of parameters or modules, re:EXPRESSION; ! takes away; separated by commas, or a list. An expression in a "
        "string reaches to its end, commas included. Paper: the last block and the final norm.",
    )
    memory_mb: int = Field(
        2048,
        ge=1,
        description="Memory for the units' gradients where they are not projected; more units than fit cost a further "
        "pass over the rows.",
    )


class CheckpointSettings(LayerSettings):
    """Which checkpoints are added up."""

    checkpoints: Literal["all", "last"] = Field(
        "all", description="all: those that are there, see --checkpoints; last: one. Paper: five."
    )


class ProjectedSettings(CheckpointSettings):
    """Gradients projected to a few numbers, or not."""

    dimension: int | None = Field(
        128,
        ge=1,
        description="Numbers kept a row and checkpoint; null: no projection, exact inner products. Paper: 128.",
    )
    projection: Form = Field(
        "auto",
        description="dense: a matrix of signs, as TRAK; two-sided: signs for inputs and outputs of each layer first; "
        "auto: dense unless it costs more than twice as much.",
    )

    @model_validator(mode="after")
    def _is_projected(self) -> Self:
        if self.dimension is None:
            refuse_idle(self, ("projection",), UNPROJECTED)
        return self


class WeightedSettings(ProjectedSettings):
    """Checkpoints weighed by their learning rates."""

    weights: Literal["learning-rate", "equal"] = Field(
        "learning-rate", description="What a checkpoint counts for; weights are divided by their sum. Paper: its rate."
    )
