"""Projected gradients of rows and units on disk, block by block, for every method that asks for the same.

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
from grasp.baselines.gradients.session import open_engine, row_examples, typical_tokens, unit_examples
from grasp.baselines.stored import digest
from grasp.baselines.work import WorkArea
from grasp.methods.contract import MethodInputs, Seconds
from grasp.models.gradients import Output, PerExample

READY = "ready-"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """All that decides projected gradients, beside model, corpus and units."""

    layers: tuple[str, ...]
    dimension: int | None
    projection: Form
    seed: int
    output: Output = "loss"
    per_block: bool = False
    update: str = ""  # what an optimizer makes of the gradient of a row; units keep theirs


Update = Callable[[PerExample], Transform]


class FeatureStore:
    """Features of one checkpoint, made when they are missing; only then is its model loaded."""

    def __init__(
        self,
        material: MethodInputs,
        work: WorkArea,
        checkpoint: Checkpoint,
        spec: FeatureSpec,
        update: Update | None = None,
    ) -> None:
        self._material, self._checkpoint, self._spec, self._update = material, checkpoint, spec, update
        self._rows = self._area(work, spec)
        self._units = self._area(work, replace(spec, update=""))
        self._note_ready(work)

    def units(self) -> F32:
        """Features of all units, (E, K), or (blocks, E, K)."""
        found = self._units.load("units")
        if found is None:
            with self._units.timed():
                made = self._of_units.features(unit_examples(self._material), self._spec.output)
                self._units.save("units", made.value_NK)
            found = self._units.load("units")
        assert found is not None
        return found

    def rows(self, start: int, stop: int) -> tuple[F32, F64]:
        """Features of rows [start, stop), (n, K) or (blocks, n, K), and 1 - p of their labels, (n,)."""
        name, doubt = f"rows-{start}-{stop}", f"doubt-{start}-{stop}"
        if self._rows.load(name) is None:
            with self._rows.timed():
                made = self._of_rows.features(row_examples(self._material, start, stop), self._spec.output)
                self._rows.save(doubt, made.doubt_N)
                self._rows.save(name, made.value_NK)
        value, doubt_N = self._rows.load(name), self._rows.load(doubt)
        assert value is not None
        assert doubt_N is not None
        return value, doubt_N

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of each block before projection."""
        return tuple(block.size for block in choose_layers(self._material.model, self._spec.layers).blocks)

    def close(self) -> None:
        """Let the model go."""
        for name in ("_engine", "_of_rows", "_of_units"):
            self.__dict__.pop(name, None)

    @cached_property
    def _engine(self) -> PerExample:
        return open_engine(self._material, self._checkpoint, self._spec.layers)

    @cached_property
    def _of_rows(self) -> Featurizer:
        if self._update is None:
            return self._of_units
        return replace(self._of_units, transform=self._update(self._engine))

    @cached_property
    def _of_units(self) -> Featurizer:
        spec = self._spec
        if spec.dimension is None:
            return Featurizer(self._engine, None)
        return Featurizer.projecting(
            self._engine,
            spec.dimension,
            seed=spec.seed,
            tokens=typical_tokens(self._material),
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

    def _note_ready(self, work: WorkArea) -> None:
        """Keep the seconds that others had spent here when this run began: one that goes on does not count its own."""
        name = f"{READY}{self._rows.directory.name}"
        if work.read(name) is None:
            spent = self._rows.seconds
            work.write(name, {"wall": spent.wall, "cpu": spent.cpu})


def ready_seconds(work: WorkArea) -> Seconds:
    """What others had spent on all the features that a run found ready."""
    total = Seconds()
    for path in sorted(work.directory.glob(f"{READY}*.json")):
        total += Seconds(**(work.read(path.stem) or {}))
    return total
