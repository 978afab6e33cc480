"""A row's effect on a target, taken apart by kernel and unit, from what the artifact holds. Shape letter: E units."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grasp.artifact.reader import RELEVANCE, ArtifactReader
from grasp.errors import SettingsError
from grasp.predict.predictor import Predictor, kernel_weights

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EffectParts:
    """effect = the sum over kernels m and units e of weight_me stored_me, plus `average`.

    Attributes:
        effect: of the row, in standard deviations over the rows.
        average: minus what a row adds on average, so that the average row has effect 0.
        stored: relevance to each unit, by kernel, (E,).
        weights: what relevance is multiplied by to be a part of the effect, by kernel, (E,).
    """

    effect: float
    average: float
    stored: Mapping[str, F64]
    weights: Mapping[str, F64]

    @classmethod
    def of(cls, artifact: ArtifactReader, predictor: Predictor, index: int) -> Self:
        """Args: predictor: additive, of one target or of some of its units."""
        level, columns_E = predictor.task, predictor.units.columns_E
        stored, weights = {}, {}
        for kernel in kernel_weights(predictor.protocol):
            here_1E = artifact.array_rows(RELEVANCE[kernel], np.array([index]), columns=columns_E)
            stored[kernel] = np.asarray(here_1E[0], dtype=np.float64)
            counted_E = np.where(stored[kernel] < 0, predictor.protocol.negative, 1.0)
            share = float(level.shares[kernel][0])
            weights[kernel] = np.asarray(counted_E * share * predictor.unit_scales[kernel] / len(columns_E))
        average = -sum(float(level.shares[kernel][0] * level.means[kernel][0]) for kernel in stored)
        return cls(float(predictor.effect_NT[index, 0]), average, stored, weights)

    @property
    def by_kernel(self) -> dict[str, float]:
        """What each kernel adds."""
        return {kernel: float(self.weights[kernel] @ stored_E) for kernel, stored_E in self.stored.items()}

    @property
    def by_unit_E(self) -> F64:  # noqa: N802 - a shape suffix
        """What each unit adds, (E,)."""
        return np.asarray(sum(self.weights[kernel] * stored_E for kernel, stored_E in self.stored.items()))


def row_index(artifact: ArtifactReader, row: str) -> int:
    """Where a row stands.

    Raises:
        SettingsError: there is none of this row_id.
    """
    start = 0
    some: list[str] = []
    for batch in artifact.row_batches(["row_id"]):
        names = batch.column(0)
        place = pc.index(names, pa.scalar(row, names.type)).as_py()
        if place >= 0:
            return start + int(place)
        some = some or names[:3].to_pylist()
        start += batch.num_rows
    raise SettingsError(f"row: got {row!r}, which {artifact.where} does not have; a row_id is e.g. {', '.join(some)}")
