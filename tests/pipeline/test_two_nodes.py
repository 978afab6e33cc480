"""Two nodes of a Ray cluster on one machine: builds survive the loss of a node or of the head."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grasp.distil.ngrams import LENGTHS, SLOTS
from grasp.distil.scorer import Scorer
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.progress import Progress
from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import arrays
from tests.corpus.world import write_parquet
from tests.pipeline.test_pipeline import assert_same
from tests.pipeline.world import texts, world
from tests.select.scorers import scorer_of

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")
# Ray leaves sockets and handles to the interpreter's end, in its own process and in ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PATIENCE = 120.0


@pytest.fixture
def nodes():
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def replace_second(nodes) -> None:
    nodes.remove_node(nodes.second, allow_graceful=False)
    nodes.second = nodes.add_node(num_cpus=1)


class Replaces(Progress):
    def __init__(self, nodes) -> None:
        self.nodes, self.forward, self.done = nodes, False, False

    def stage(self, name, *, rows, tokens):
        self.forward = name == "rows scored"

    def advance(self, rows, tokens):
        if self.forward and not self.done:
            self.done = True
            replace_second(self.nodes)


def test_a_build_survives_a_node_that_dies_when_another_joins(nodes, tmp_path):
    expected = build_artifact(world(tmp_path), tmp_path / "local")
    watch = Replaces(nodes)
    spec = ClusterSpec(address=nodes.address, workers=2)
    actual = build_artifact(world(tmp_path), tmp_path / "ray", cluster=spec, progress=watch)
    assert watch.done
    assert_same(arrays(actual), arrays(expected))


STOPS = """
import sys, time
from pathlib import Path
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import Progress
from grasp.settings import BuildSettings
from grasp.yaml_files import read_yaml

class Stops(Progress):
    forward = False
    def stage(self, name, *, rows, tokens):
        self.forward = name == "rows scored"
    def advance(self, rows, tokens):
        if self.forward and len(sys.argv) > 4:
            Path(sys.argv[4]).touch()
            time.sleep(600)  # the head is lost meanwhile

settings = BuildSettings.model_validate(read_yaml(Path(sys.argv[1])))
build_artifact(settings, Path(sys.argv[2]), cluster=ClusterSpec(address=sys.argv[3], workers=2), progress=Stops())
"""


def test_a_build_resumes_under_a_new_head_after_the_old_one_is_lost(nodes, tmp_path):
    expected = build_artifact(world(tmp_path), tmp_path / "local")
    settings, out, mark = tmp_path / "settings.yaml", tmp_path / "ray", tmp_path / "mark"
    write_yaml(world(tmp_path).model_dump(mode="json"), settings)
    command = [sys.executable, "-c", STOPS, str(settings), str(out)]
    with subprocess.Popen([*command, nodes.address, str(mark)], stderr=subprocess.DEVNULL) as child:
        until = time.monotonic() + PATIENCE
        while not mark.exists():
            assert child.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        nodes.shutdown()
        child.kill()
    assert not (out / "manifest.json").exists()
    begun = {path.name: path.stat().st_mtime_ns for path in out.glob("tokens/shard-*")}
    new_cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        subprocess.run([*command, new_cluster.address], check=True, timeout=PATIENCE, stderr=subprocess.DEVNULL)
    finally:
        new_cluster.shutdown()
    assert begun
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("tokens/shard-*")} == begun
    assert_same(arrays(out), arrays(expected))


def scorer() -> Scorer:
    draw = np.random.default_rng(0)
    tables_KV = draw.normal(size=(len(LENGTHS), SLOTS)).astype(np.float32)
    return scorer_of(tables_KV, draw.random(SLOTS).astype(np.float32))


def test_ray_data_scores_every_document_although_a_node_dies(nodes, tmp_path):
    documents = texts(160)
    for k in range(16):
        rows = [{"doc_id": str(i), "text": documents[i]} for i in range(10 * k, 10 * k + 10)]
        write_parquet(Path(tmp_path / "corpus" / f"{k:02d}.parquet"), rows)
    text_scorer = scorer()

    def slowly(table: pa.Table) -> pa.Table:
        time.sleep(0.2)  # so that the node dies before all is done
        return text_scorer.add_scores(table)

    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    data = ray.data.read_parquet(str(tmp_path / "corpus"), override_num_blocks=16)
    scores: dict[str, float] = {}
    scored = data.map_batches(slowly, batch_format="pyarrow")
    for batch in scored.iter_batches(batch_size=10, batch_format="pyarrow"):
        if not scores:
            replace_second(nodes)
        scores |= dict(zip(batch["doc_id"].to_pylist(), batch["score"].to_pylist(), strict=True))
    expected, _ = text_scorer.score(documents)
    assert len(scores) == len(documents)
    np.testing.assert_array_equal([scores[str(i)] for i in range(len(documents))], expected)
