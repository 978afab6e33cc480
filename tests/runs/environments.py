"""An artifact on disk, and retraining runs with planted utilities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact
from grasp.kernel_table import BuiltRule
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import FamilyInfo, RunsInfo, TargetInfo
from grasp.targets import Unit
from grasp.targets.units import UnitSet

N_ROWS = 120
TOPICS = ("games", "science", "travel")
UNITS = {"sciq": ("u0", "u1"), "boolq": ("u2",)}
FINGERPRINT = "c0ffee"


def units() -> list[Unit]:
    return [
        Unit(unit_id=name, target=target, prompt=f"Question {name}:", completion=" yes", loss_on="completion")
        for target, names in UNITS.items()
        for name in names
    ]


def write_artifact(path: Path, n_rows: int = N_ROWS, kernel: str = "output_layer", **settings) -> ArtifactReader:
    """Sketches, a kernel (or several: output_layer+embedding) and a topic for every row; seven rows to a shard."""
    rng = np.random.default_rng(0)
    topic = rng.integers(0, 3, n_rows)
    arrays = {
        "hidden_sketch": (rng.standard_normal((n_rows, 4)) + np.eye(3, 4)[topic]).astype("f4"),
        "residual_sketch": (rng.standard_normal((n_rows, 3)) + 0.5).astype("f4"),
    }
    for name in kernel.split("+"):
        arrays[f"relevance_{name}"] = (rng.standard_normal((n_rows, 3)) + 2.0 * np.eye(3)[topic]).astype("f4")
    rows = pa.table(
        {
            "row_id": [f"row-{i}" for i in range(n_rows)],
            "doc_id": [f"doc-{i}" for i in range(n_rows)],
            "loss": np.ones(n_rows, dtype=np.float32),
            "snippet": [f"text {i}" for i in range(n_rows)],
            "n_tokens": pa.array(rng.integers(5, 60, n_rows), pa.int32()),
            "topic": [TOPICS[i] for i in topic],
        }
    )
    return write_arrays(path, arrays, rows, units(), 7, settings=settings, fingerprints={"corpus": FINGERPRINT})


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], rows: pa.Table, units: Sequence[Unit], shard_rows: int, **manifest
) -> ArtifactReader:
    """Write an artifact of these arrays in float32 and these rows."""
    specs = {name: ArraySpec(array.shape[1], "1", "none") for name, array in arrays.items()}
    kernels = [name.removeprefix("relevance_") for name in arrays if name.startswith("relevance_")]
    manifest["details"] = {"rule": asdict(BuiltRule.of(kernels))} | manifest.get("details", {})
    fields = {"identity": {}, "n_rows": rows.num_rows, "shard_rows": shard_rows, "dtype": "float32"}
    with lock_artifact(path):
        writer = ArtifactWriter.open(path, arrays=specs, **fields)
        for k in range(writer.grid.n_shards):
            start, stop = writer.grid.bounds(k)
            part = {name: array[start:stop] for name, array in arrays.items()}
            writer.write_shard(k, part, rows.slice(start, stop - start), {})
        names = ("unit_id", "target", "prompt", "completion")
        table = pa.table({name: [getattr(unit, name) for unit in units] for name in names})
        writer.finish(manifest=manifest, moments={}, units=table)
    return ArtifactReader.open(path)


def begin_environment(
    path: Path, artifact: ArtifactReader, units: Sequence[Unit], family: str, n_subsets: int, **info
) -> tuple[RetrainedRuns, list[SubsetBlock]]:
    """Write subsets of the family without results, and return their weights."""
    rows, parsed = RowIndex.from_parquet(artifact.rows_path), parse_family(family)
    labels = None if parsed.label is None else LabelTable(artifact.rows_path).column(parsed.label)
    spec = FamilyInfo(spec=family, seed=3, purpose="evaluation")
    blocks = list(parsed.draw(n_subsets, n_rows=rows.n_rows, labels=labels, seed=spec.seed, purpose=spec.purpose))
    of_target = {target: [unit for unit in units if unit.target == target] for target in artifact.targets}
    targets = {
        target: TargetInfo(
            fingerprint=UnitSet(tuple(names)).fingerprint,
            loss_on="completion",
            unit_ids=tuple(unit.unit_id for unit in names),
        )
        for target, names in of_target.items()
    }
    fingerprint = artifact.manifest.fingerprints["corpus"]
    fields = {"role": "dev", "recipe": "tiny", "family": spec, "targets": targets, "corpus_fingerprint": fingerprint}
    record = RunsInfo(**fields | info, n_rows=rows.n_rows, subset_ids=(), masks_checksum="", reference=False)
    return RetrainedRuns.create(path, record, blocks, rows), blocks


def write_environment(
    path: Path,
    artifact: ArtifactReader,
    utility: Callable[[int, int, str], float],
    *,
    family: str = "mixture:topic",
    n_subsets: int = 40,
    seeds: tuple[int, ...] = (0, 1),
    **info,
) -> RetrainedRuns:
    """Write runs with `utility(subset, seed, target)` for all units of a target."""
    environment, _ = begin_environment(path, artifact, units(), family, n_subsets, seeds=seeds, **info)
    for run in environment.pending():
        b = environment.subset_ids.index(run.subset_id)
        environment.write_run(run, np.array([utility(b, run.seed, target) for target, _ in environment.units]))
    environment.compact()
    return environment
