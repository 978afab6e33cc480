"""A small artifact in memory, and the slow way to predict from it."""

import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.kernel_table import BuiltRule
from tests.predict import reference


@dataclass(eq=False)  # one is another than any other, as readers of artifacts are
class FakeSource:
    """Two targets of 3 and 2 units whose columns are interleaved; rows arrive in blocks of `block_rows`."""

    n_rows: int = 40
    block_rows: int = 7
    seed: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    feature_settings: dict[str, Any] = field(
        default_factory=lambda: {"summary_positions": "tail:32", "top_k": 64, "alpha": 1.0}
    )
    unit_targets: tuple[str, ...] = ("sciq", "boolq", "sciq", "boolq", "sciq")
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.arrays:
            rng = np.random.default_rng(self.seed)
            n, e = self.n_rows, len(self.unit_targets)
            self.arrays = {
                "hidden_sketch": rng.standard_normal((n, 4)).astype("f4"),
                "residual_sketch": (rng.standard_normal((n, 3)) + 0.5).astype("f4"),
                "product_sketch": rng.standard_normal((n, 2)).astype("f4"),
                "relevance_output_layer": (rng.standard_normal((n, e)) * 10.0 ** np.arange(-2, e - 2)).astype("f4"),
                "relevance_pooled": (rng.standard_normal((n, e)) + 1).astype("f4"),
                "relevance_embedding": (rng.standard_normal((n, e)) - 0.5).astype("f4"),
            }
        self.passes = dict.fromkeys(self.arrays, 0)

    @property
    def targets(self):
        return tuple(dict.fromkeys(self.unit_targets))

    @property
    def array_names(self):
        return tuple(self.arrays)

    @property
    def rule(self):
        kernels = [name.removeprefix("relevance_") for name in self.arrays if name.startswith("relevance_")]
        return BuiltRule.of(kernels, learning_rate_sum=0.02)

    @property
    def units(self):
        ids = [f"u{i}" for i in range(len(self.unit_targets))]
        return pa.table({"unit_id": ids, "target": list(self.unit_targets)})

    def unit_columns(self, target):
        return np.flatnonzero(np.array(self.unit_targets) == target)

    def leaks(self, target):
        return None

    def array_blocks(self, name, *, columns=None, block_rows=None):
        values = self.arrays[name] if columns is None else self.arrays[name][:, columns]
        self.passes[name] += 1
        size = block_rows or self.block_rows
        for start in range(0, self.n_rows, size):
            yield start, values[start : start + size]

    def array_rows(self, name, row_index):
        return self.arrays[name][row_index]

    @property
    def table(self):
        n = range(self.n_rows)
        columns = {"row_id": [f"r{i}" for i in n], "doc_id": [f"d{i // 2}" for i in n], "n_tokens": [2 + i for i in n]}
        return pa.table(columns | {"snippet": [f"text {i}" for i in n]} | self.columns)

    @cached_property
    def directory(self) -> Path:
        directory = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, directory)
        return directory

    @property
    def rows_path(self) -> Path:
        """The row table on disk, for labels and conditions."""
        pq.write_table(self.table, self.directory / "rows.parquet")
        return self.directory / "rows.parquet"

    def rows(self, row_index):
        return self.table.take(row_index)

    def row_batches(self, columns=None):
        return iter(self.table.select(columns or self.table.column_names).to_batches())


def downweight_negative(relevance, protocol):
    """Relevance as a protocol counts it, float64."""
    exact = relevance.astype(float)
    return np.maximum(exact, 0.0) + protocol.negative * np.minimum(exact, 0.0)


def slow_components(source, protocol, weights, target, match):
    """A of the task, A of its units and K by name for one subset, row by row in float64."""
    side, weighting = getattr(protocol, "side", "retained"), getattr(protocol, "weighting", "mean")
    effective = reference.side_weights(weights, side, weighting)
    sign = 1.0 if side == "retained" else -1.0
    columns = source.unit_columns(target)
    unit = {
        kernel: [
            sign * reference.dot(effective, downweight_negative(source.arrays[f"relevance_{kernel}"][:, e], protocol))
            for e in columns
        ]
        for kernel in match
    }
    geometry = {}
    for name in getattr(protocol, "components", ()):
        half, kind = name.split(".")
        parts = ["hidden", "residual"] if half == "joint" else [half]
        sketch = np.concatenate([source.arrays[f"{part}_sketch"] for part in parts], axis=1).astype(float)
        geometry[name] = reference.geometry(effective, sketch, sketch.mean(axis=0))[kind]
    return unit, geometry
