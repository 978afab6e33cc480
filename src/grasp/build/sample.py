"""The sample of rows that the first loop of a build reads, and how much of a build is ahead.

Shape letters: N rows.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import I64
from grasp.build.inputs import Store
from grasp.kernels.kernel import counts_rows, needs_backward
from grasp.kernels.whitening import STATES
from grasp.models.forward_pass import Reference
from grasp.seeds import stream
from grasp.settings import FeatureSettings

PART_ROWS = 64  # of a sample that go through the model at once
MEGABYTE = 1 << 20
THERE_AND_BACK = 3  # forward passes that a forward and a backward pass cost


@dataclass(frozen=True)
class Sample:
    """Whole rows, drawn uniformly, by which kernels know the corpus.

    Attributes:
        row_index: which rows, ascending.
        n_positions: positions with loss that they hold.
        is_whole: they are all rows; then the parts are the shards.
    """

    row_index: I64
    n_positions: int
    is_whole: bool

    @classmethod
    def draw(cls, supervised_N: NDArray[np.int64], settings: FeatureSettings) -> Self:
        """Draw rows until they hold the positions that the settings ask for, and are enough for moments over rows."""
        order_N = stream(settings.seed, "moments", "token").permutation(len(supervised_N))
        reached = np.cumsum(supervised_N[order_N])
        enough = int(np.searchsorted(reached, settings.sample_positions, side="left")) + 1
        least = settings.sample_rows if counts_rows(settings) else 1
        index = np.sort(order_N[: max(enough, least)])
        return cls(index, int(supervised_N[index].sum()), len(index) == len(supervised_N))

    @property
    def states_every(self) -> int:
        """Of how many positions the state of one is kept."""
        return max(1, self.n_positions // STATES)


def kept_bytes(model: Reference, store: Store, settings: FeatureSettings, coordinates: int) -> int:
    """Return about how much the model gives for all rows, as it is kept between the loops.

    Args:
        coordinates: that are taken of a row's gradient.
    """
    width = 4 * model.hidden_size + 8 * (settings.top_k + 1) + 16
    places = len(settings.row_positions)
    return store.n_supervised * width * places + 2 * coordinates * store.n_rows


def tokens_ahead(
    store: Store, settings: FeatureSettings, sample: Sample, *, measured: bool, once: bool
) -> dict[str, int]:
    """Return tokens that the model reads in each stage of a build, about; those there and back count three times.

    Args:
        measured: moments are taken over from another artifact.
        once: rows of the sample are all rows, and need not pass again.
    """
    cost = THERE_AND_BACK if needs_backward(settings.kernels) else 1
    share = sample.n_positions / max(1, store.n_supervised)
    passes = {"moments": 0.0 if measured else share, "rows scored": 0.0 if once else 1.0}
    return {name: round(cost * part * store.n_tokens) for name, part in passes.items() if part}
