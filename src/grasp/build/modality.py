"""The door to `grasp.vision`, a room beside the road: rows come from its reader, states from its model.

Nobody on the road imports that room. What the road asks of it stands here, and nothing here loads torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import ShardStore
from grasp.results import Result
from grasp.settings import BuildSettings, ModelSettings
from grasp.targets.units import UnitSet

if TYPE_CHECKING:
    from grasp.models.forward_pass import NonTextReference, Reference


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pictured(Result, ABC):
    """A result with pictures beside its table."""

    @property
    @abstractmethod
    def nearest(self) -> list[tuple[str, str | None]]:
        """What to write below each picture, and the picture as a URL of itself, if there is one."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures, as JSON has it."""


class Vision(Protocol):
    """What the room gives to the road: `grasp.vision.vision_entry` has these functions."""

    def load_model(self, settings: ModelSettings) -> "NonTextReference":
        """The classifier that the settings name."""

    def read(
        self, settings: BuildSettings, model: Any, tokens: Path, *, replace: bool, progress: Callable[[int], None]
    ) -> tuple[UnitSet, Any, ShardStore[Any, Any]]:
        """Units, their pictures in the same order, and the store of rows in the directory `tokens`."""

    def open_rows(self, directory: Path) -> ShardStore[Any, Any]:
        """The store of rows, complete and on disk."""

    def explain(self, artifact: ArtifactReader, target: str | None, rows: Sequence[str], **how: Any) -> list[Pictured]:
        """Why each row counts, from the artifact alone; `how` as `grasp.inspect.explain`: unit, match, protocol."""

    def row_pictures(self, artifact: ArtifactReader, index: NDArray[np.int64], largest: int) -> list[bytes | None]:
        """Rows as PNG, the longer side `largest` pixels at most; None where there is no picture."""

    def picture_url(self, picture: bytes | None) -> str | None:
        """A picture that needs no file."""


def vision() -> Vision:
    """The room, opened when it is needed."""
    return cast(Vision, import_module("grasp.vision.vision_entry"))


def load_reference(settings: ModelSettings) -> "Reference":
    """A causal LM, or an image classifier where the settings have one."""
    if settings.classifier is not None:
        return vision().load_model(settings)
    from grasp.models.causal_lm import ReferenceModel  # noqa: PLC0415 - brings torch

    return ReferenceModel.load(settings)
