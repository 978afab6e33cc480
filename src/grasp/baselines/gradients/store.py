"""Projected gradients of rows and units on disk, shared by all methods with the same settings.

Start with `FeatureStore`.

Shape letters: N rows, E units, K projected width.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from grasp.arrays import F32, F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.projection import Form
from grasp.baselines.gradients.queries import Transform
from grasp.baselines.gradients.session import mean_row_tokens, open_engine, row_examples, unit_examples
from grasp.baselines.stored import digest
from grasp.baselines.work import WorkArea
from grasp.methods.contract import MethodInputs, Seconds
from grasp.models.gradients import Output, PerExample

READY_PREFIX = "ready-"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Settings that determine projected gradients, besides model, corpus and units."""

    layers: tuple[str, ...]
    dimension: int | None
    projection: Form
    seed: int
    output: Output = "loss"
    per_block: bool = False
    update: str = ""  # name of the optimizer update that replaces row gradients; units keep their gradients


Update = Callable[[PerExample], Transform]


class FeatureStore:
    """Features at one checkpoint. Missing ones are computed; the model is loaded only then."""

    def __init__(
        self,
        inputs: MethodInputs,
        work: WorkArea,
        checkpoint: Checkpoint,
        spec: FeatureSpec,
        update: Update | None = None,
    ) -> None:
        self._material, self._checkpoint, self._spec, self._update = inputs, checkpoint, spec, update
        self._rows = self._area(work, spec)
        self._units = self._area(work, replace(spec, update=""))
        self._record_reused(work)

    def units(self) -> F32:
        """Return the features of all units, (E, K), or (blocks, E, K)."""

        def compute() -> F32:
            with self._units.timed():
                return self._unit_featurizer.features(unit_examples(self._material), self._spec.output).value_NK

        return self._units.load_or_compute("units", compute)

    def rows(self, start: int, stop: int) -> tuple[F32, F64]:
        """Return features of rows [start, stop), (n, K) or (blocks, n, K), and 1 - p of their labels, (n,)."""
        name, doubt = f"rows-{start}-{stop}", f"doubt-{start}-{stop}"
        if self._rows.load(name) is None:
            with self._rows.timed():
                features = self._row_featurizer.features(row_examples(self._material, start, stop), self._spec.output)
                self._rows.save(doubt, features.doubt_N)
                self._rows.save(name, features.value_NK)
        return self._rows.load_required(name), self._rows.load_required(doubt)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each block before projection."""
        return tuple(block.size for block in choose_layers(self._material.model, self._spec.layers).blocks)

    def close(self) -> None:
        """Release the model."""
        for name in ("_engine", "_row_featurizer", "_unit_featurizer"):
            self.__dict__.pop(name, None)

    @cached_property
    def _engine(self) -> PerExample:
        return open_engine(self._material, self._checkpoint, self._spec.layers)

    @cached_property
    def _row_featurizer(self) -> Featurizer:
        if self._update is None:
            return self._unit_featurizer
        return replace(self._unit_featurizer, transform=self._update(self._engine))

    @cached_property
    def _unit_featurizer(self) -> Featurizer:
        spec = self._spec
        if spec.dimension is None:
            return Featurizer(self._engine, None)
        return Featurizer.with_projection(
            self._engine,
            spec.dimension,
            seed=spec.seed,
            tokens=mean_row_tokens(self._material),
            form=spec.projection,
            per_block=spec.per_block,
        )

    def _area(self, work: WorkArea, spec: FeatureSpec) -> WorkArea:
        decided: dict[str, Any] = asdict(spec) | {
            "layers": list(spec.layers),
            "checkpoint": self._checkpoint.fingerprint,
            "units": self._material.units.fingerprint,
            "tokens": self._material.settings.targets.max_length,
            "moments": self._checkpoint.moments_fingerprint if spec.update else "",
        }
        return work.shared(f"gradients-{digest(decided)}")

    def _record_reused(self, work: WorkArea) -> None:
        """Record the seconds that other runs spent here; only once, so that a resumed run does not count its own."""
        name = f"{READY_PREFIX}{self._rows.directory.name}"
        if work.read(name) is None:
            spent = self._rows.seconds
            work.write(name, {"wall": spent.wall, "cpu": spent.cpu})


def ready_seconds(work: WorkArea) -> Seconds:
    """Return the seconds that other runs spent on the features that this run reused."""
    total = Seconds()
    for path in sorted(work.directory.glob(f"{READY_PREFIX}*.json")):
        total += Seconds(**(work.read(path.stem) or {}))
    return total
