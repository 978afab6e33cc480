"""Interface to `grasp.vision`, an optional subpackage for images that is imported lazily.

No other module outside `grasp.vision` imports it. This module does not import torch. Start with `vision`.
"""

from collections.abc import Callable, Sequence
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


class Vision(Protocol):
    """Functions of `grasp.vision.vision_entry`."""

    def load_model(self, settings: ModelSettings) -> "NonTextReference":
        """Load the classifier that the settings name."""

    def read(
        self, settings: BuildSettings, model: Any, tokens: Path, *, replace: bool, progress: Callable[[int], None]
    ) -> tuple[UnitSet, Any, ShardStore[Any, Any]]:
        """Read the units, their images in the same order, and the store of rows in the directory `tokens`."""

    def open_rows(self, directory: Path) -> ShardStore[Any, Any]:
        """Open a complete store of rows."""

    def explain(
        self, artifact: ArtifactReader, target: str | None, rows: Sequence[str], **options: Any
    ) -> list[Result]:
        """Explain rows from the artifact alone; options as in `grasp.inspect.explain`: unit, match, protocol."""

    def row_pictures(self, artifact: ArtifactReader, index: NDArray[np.int64], largest: int) -> list[bytes | None]:
        """Return rows as PNG, with at most `largest` pixels on the longer side; None if there is no image."""

    def picture_url(self, picture: bytes | None) -> str | None:
        """Return an image as a data URL."""


def vision() -> Vision:
    """Import `grasp.vision` and return its functions."""
    return cast(Vision, import_module("grasp.vision.vision_entry"))


def load_reference(settings: ModelSettings) -> "Reference":
    """Load a causal LM, or the image classifier that the settings name."""
    if settings.classifier is not None:
        return vision().load_model(settings)
    from grasp.models.causal_lm import ReferenceModel  # noqa: PLC0415 - brings torch

    return ReferenceModel.load(settings)
