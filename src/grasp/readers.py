"""Readers of other rows than texts: entry points of `grasp.readers`, each with a kind of model that reads its rows.

The name of an entry point is the group of settings that chooses the reader: a build whose settings have `model.NAME` is
read by the reader NAME. The artifact records the name, so that its rows are opened by the same reader. Without such
settings the model is a causal LM, which reads texts (`grasp.pipeline.inputs`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from grasp.corpus.row_store import RowStore
from grasp.entry_points import load
from grasp.settings import READERS, BuildSettings, ModelSettings, ReaderSettings
from grasp.targets.units import UnitSet


class Reader(Protocol):
    """Loads a model, and reads corpus and targets for it.

    Attributes:
        settings: class of the settings `model.NAME`.
        rows: class of the stored rows.
    """

    settings: type[ReaderSettings]
    rows: type[RowStore]

    def load_model(self, settings: ModelSettings) -> Any:
        """Load the model that the settings name, a `grasp.models.forward_pass.NonTextReference`."""

    def read(
        self, settings: BuildSettings, model: Any, tokens: Path, *, replace: bool, progress: Callable[[int], None]
    ) -> tuple[UnitSet, Any, RowStore]:
        """Read the inputs of a build.

        Args:
            settings: settings of the build.
            model: result of `load_model`.
            tokens: directory of the rows.
            replace: delete rows of another corpus in `tokens`.
            progress: receives the number of rows of each finished shard.
        Returns:
            The units, the same as inputs of the model, and the rows in the directory `tokens`.
        """


def load_reader(name: str) -> Reader:
    """Return the reader with a name.

    Raises:
        SettingsError: there is no such reader.
    """
    return cast(Reader, load(READERS, name))
