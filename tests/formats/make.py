"""Writes what a release keeps of its own files: python -m tests.formats.make tests/formats/0.2.0

Once a release, when a format changed. `numbers.json` has what they said that day.
"""

import gzip
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

import grasp
from grasp.distil.scorer import Scorer
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.retrained import RetrainedRuns
from tests.pipeline.world import texts, world
from tests.runs.environments import write_artifact, write_environment

QUESTIONS = texts(4, seed=9)


def numbers(directory: Path) -> dict[str, object]:
    """What the files of a directory say, whichever protocol ships."""
    best = grasp.open(directory / "artifact").score("facts", match="output_layer", top=5).to_arrow()
    runs, retrained = grasp.open_runs(directory / "runs"), RetrainedRuns.open(directory / "retrained")
    return {
        "best": best["row_id"].to_pylist(),
        "effects": best["effect"].to_pylist(),
        "runs": np.asarray(runs.utility_RST()).ravel().tolist(),
        "retrained": np.asarray(retrained.task_utilities(("sciq",))).ravel().tolist(),
        "scores": Scorer.open(directory / "scorer").score(QUESTIONS)[0].tolist(),
    }


def make(directory: Path) -> None:
    """One of each, small, without a path of this machine in it."""
    start, out = Path.cwd(), directory.absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            build_artifact(world(Path("world"), n_rows=24, shard_rows=24), Path("artifact"))
            art = grasp.open("artifact")
            art.distil("facts", "scorer")
            art.select("50%", "facts", by="topic").save("kept.parquet")
            art.mix("topic", "facts").save("mixture.parquet")
            write_environment(
                Path("retrained"), write_artifact(Path("other")), lambda b, s, _: 0.1 * b + s, n_subsets=4
            )
            runs = ["a", "b", "c"]
            shares = pa.table({"run": runs, "earth": [0.5, 0.2, 0.3], "life": [0.3, 0.6, 0.3], "sky": [0.2, 0.2, 0.4]})
            grasp.import_runs(
                shares, pa.table({"run": runs, "facts/loss": [3.0, 2.5, 2.75]}), label="topic", out="runs"
            )
        finally:
            os.chdir(start)
        for name in ("artifact", "scorer", "retrained", "runs"):
            shutil.copytree(Path(place, name), out / name)
        for file in Path(place).glob("*.*"):
            shutil.copy(file, out)
    (out / "numbers.json").write_text(json.dumps(numbers(out), indent=1) + "\n")
    for large in out.glob("scorer/*.safetensors"):  # nearly all zeros
        Path(f"{large}.gz").write_bytes(gzip.compress(large.read_bytes(), mtime=0))
        large.unlink()


def unpacked(archive: Path, place: Path) -> Path:
    """A copy of what a release kept, as it was written."""
    shutil.copytree(archive, place)
    for packed in place.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return place


if __name__ == "__main__":
    make(Path(sys.argv[1]))
