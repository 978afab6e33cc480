"""Settings shared by gradient methods: layers, checkpoints, dimension. Start with `LayerSettings`."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from grasp.settings import Settings

PAPER_LAYERS = ("block:-1", "final_norm")
EXPRESSION = re.compile(r"(?:^|,)\s*(!?re:.*)", re.DOTALL)


def _listed(value: object) -> object:
    """Split a string at commas; a regular expression may contain commas, so it extends to the end."""
    if not isinstance(value, str):
        return value
    expression = EXPRESSION.search(value)
    words = value if expression is None else value[: expression.start()]
    last = () if expression is None else (expression[1].strip(),)
    return *(part.strip() for part in words.split(",") if part.strip()), *last


Patterns = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class LayerSettings(Settings):
    """Parameters that gradients cover."""

    layers: Patterns = Field(
        PAPER_LAYERS,
        description="Parameters covered: all, head, embedding, body, blocks, block:N, final_norm, wildcards over names "
        "of parameters or modules, re:EXPRESSION; ! excludes; separated by commas, or a list. In a string, an "
        "expression extends to the end, commas included. Paper: the last block and the final norm.",
    )
    memory_mb: int = Field(
        2048,
        ge=1,
        description="Memory in MB for the units' gradients if they are not projected; if they do not fit, further "
        "passes over the rows are made.",
    )


class ProjectedSettings(LayerSettings):
    """Checkpoints that scores are summed over, and the random projection of gradients."""

    checkpoints: Literal["all", "last"] = Field(
        "all", description="all: every available checkpoint, see --checkpoints; last: only the last. Paper: five."
    )
    dimension: int | None = Field(
        128,
        ge=1,
        description="Features per row and checkpoint; null: no projection, exact inner products. Paper: 128.",
    )


class WeightedSettings(ProjectedSettings):
    """Weights of checkpoints."""

    weights: Literal["learning-rate", "equal"] = Field(
        "learning-rate", description="Weight of a checkpoint, divided by the sum of weights. Paper: learning rate."
    )
