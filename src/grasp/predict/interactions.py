"""The door to `grasp.geometry`, a room beside the road: protocols in which rows bear on one another.

On the road a subset is worth what its rows are worth. Where a protocol says more, that room prices subsets, chooses
rows and mixes values. Nobody on the road imports it; what the road asks of it stands here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from grasp.artifact.reader import ArtifactReader
    from grasp.predict.predictor import Predictor
    from grasp.predict.protocol import ScoringProtocol
    from grasp.predict.relevance import UnitSelection


class InteractionRoom(Protocol):
    """What the room gives to the road: `grasp.geometry.room` has these."""

    protocol_type: "type[ScoringProtocol]"

    def bind(
        self,
        artifact: "ArtifactReader",
        protocol: "ScoringProtocol",
        units: "UnitSelection",
        *,
        sketches: Sequence[str],
        per_unit: bool,
        components: bool,
    ) -> "Predictor":
        """A fitted protocol as something that prices subsets."""

    def choose_rows(self, predictor: "Predictor", weights_T: "NDArray[np.float64]", limits: Any, progress: Any) -> Any:
        """A `grasp.choose.choice.Chosen`: rows of high predicted change under limits, redundancy and all."""

    def mixed(self, aim: Any, slices: Any, programme: Any) -> Any:
        """A `grasp.choose.mixture.Mixed`: the best shares of slices within the bounds of a programme."""

    def predictions(self, joined: Any, protocols: "Mapping[str, ScoringProtocol]", targets: Sequence[str]) -> list[Any]:
        """Of frozen protocols for the subsets of an environment, standardised by a family like its own."""

    def controls(self, artifact: "ArtifactReader", runs: Any, development: Sequence[Any], **how: Any) -> Any:
        """The paper's controls, with weights selected on development runs."""

    def checks(self, subject: Any, protocol: "ScoringProtocol") -> Iterator[Any]:
        """Of an artifact: whether its sketches, and what is pooled, tell what a protocol takes from them."""

    evidence: Callable[[int], str]  # what `calibrate` can choose from with so many subsets


def geometry() -> InteractionRoom:
    """The room, opened when it is needed."""
    return cast(InteractionRoom, import_module("grasp.geometry.room"))
