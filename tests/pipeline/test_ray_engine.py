"""Two workers on a local Ray cluster give the same bytes as one process, also if they are killed."""

import os
import signal
from pathlib import Path

import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import lock_artifact
from grasp.errors import EngineError, MissingExtraError, ModelError
from grasp.pipeline import ray_cluster as cluster
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.ray_cluster import ClusterSpec, connected
from grasp.progress import Progress
from tests.cli.grasp_command import arrays
from tests.pipeline.test_chat_build import chat_settings
from tests.pipeline.test_pipeline import assert_same, with_broken_model
from tests.pipeline.world import EVERY, FORWARD, world

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")
# Ray leaves sockets and handles to the interpreter's end, in its own process and in ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def spec():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ClusterSpec(workers=2)
    ray.shutdown()


@pytest.fixture(scope="module")
def built(root) -> Path:
    return build_artifact(world(root), root / "local")


class Stop(Exception):
    pass


class StopsAfter(Progress):
    def __init__(self, shards: int) -> None:
        self.left, self.name, self.stages = shards, "", []

    def stage(self, name, *, rows, tokens):
        self.name = name
        self.stages.append(name)

    def advance(self, rows, tokens):
        self.left -= self.name == "rows scored"
        if self.left == 0:
            raise Stop


@pytest.mark.parametrize(
    "features",
    [{}, {"kernels": FORWARD, "sample_rows": 16}, {"kernels": EVERY, "sample_rows": 16}, {"sample_positions": 10**6}],
)
def test_the_result_is_that_of_the_local_engine_bit_for_bit(spec, root, tmp_path, features):
    expected = build_artifact(world(root, features=features, keep_features=True), tmp_path / "local")
    artifact = build_artifact(world(root, features=features, keep_features=True), tmp_path / "ray", cluster=spec)
    assert_same(arrays(artifact), arrays(expected))
    moments = ArtifactReader.open(expected).moments
    for name, array in ArtifactReader.open(artifact).moments.items():
        assert array.tobytes() == moments[name].tobytes(), name
    theirs = {
        name: entry for name, entry in ArtifactReader.open(expected).manifest.files.items() if "units" not in name
    }
    ours = ArtifactReader.open(artifact).manifest.files
    assert all(ours[name] == entry for name, entry in theirs.items())


def test_conversations_give_the_same_result(spec, tmp_path):
    settings = chat_settings(tmp_path)
    assert_same(
        arrays(build_artifact(settings, tmp_path / "ray", cluster=spec)),
        arrays(build_artifact(settings, tmp_path / "local")),
    )


@pytest.mark.parametrize("order", [("local", "ray"), ("ray", "local")])
def test_a_build_resumes_on_another_engine(spec, root, built, tmp_path, order):
    clusters = {"local": None, "ray": spec}
    out, watch = tmp_path / "artifact", StopsAfter(2)
    with pytest.raises(Stop):
        build_artifact(world(root), out, cluster=clusters[order[0]], progress=watch)
    assert watch.stages.count("rows scored") == 1
    build_artifact(world(root), out, cluster=clusters[order[1]])
    assert_same(arrays(out), arrays(built))


def test_a_killed_worker_loses_only_the_shard_that_it_had(spec, root, built, tmp_path):
    class Killer(Progress):
        def __init__(self):
            self.killed, self.forward = [], False

        def stage(self, name, *, rows, tokens):
            self.forward = name == "rows scored"

        def advance(self, rows, tokens):
            if self.forward and not self.killed:
                below = psutil.Process().children(recursive=True)
                self.killed = [
                    process.pid for process in below if " ".join(process.cmdline()).startswith("ray::ModelActor")
                ]
                for pid in self.killed:
                    os.kill(pid, signal.SIGKILL)

    killer = Killer()
    artifact = build_artifact(world(root), tmp_path / "artifact", cluster=spec, progress=killer)
    assert len(killer.killed) >= 2  # those of the build before may not have ended yet
    assert_same(arrays(artifact), arrays(built))


def test_an_error_of_a_worker_is_raised_by_the_build(spec, root, tmp_path):
    with pytest.raises(ModelError, match=r"^row 'row-\d+[^\n]*NaN[^\n]*$"):
        build_artifact(with_broken_model(root, tmp_path), tmp_path / "artifact", cluster=spec)
    with lock_artifact(tmp_path / "artifact"):
        pass


@pytest.mark.parametrize(
    ("cluster_spec", "message"),
    [
        (ClusterSpec(workers=64), r"--workers: .*\b64\b.*0 GPUs.*2 CPU cores"),
        (ClusterSpec(threads=64), r"^threads: .*\b64\b.*cores"),
    ],
)
def test_more_workers_than_resources_are_refused(spec, cluster_spec, message):
    with pytest.raises(EngineError, match=message), connected(cluster_spec):
        pass


def test_relative_paths_are_relative_to_the_directory_of_the_caller(spec, root, built, tmp_path, monkeypatch):
    monkeypatch.chdir(root)  # the cluster was started elsewhere
    settings = world(root)
    model = settings.model.model_copy(update={"path": "model"})
    artifact = build_artifact(settings.model_copy(update={"model": model}), tmp_path / "artifact", cluster=spec)
    assert_same(arrays(artifact), arrays(built))


def test_a_cluster_without_free_resources_is_reported(spec, monkeypatch):
    monkeypatch.setattr(cluster, "TIMEOUT_SECONDS", 2.0)

    class Holder:
        def ready(self):
            return True

    holder = ray.remote(Holder).options(num_cpus=1).remote()
    assert ray.get(holder.ready.remote())
    with (
        pytest.raises(EngineError, match=r"[01] workers.*\b2\b"),
        connected(spec),
    ):
        pass
    with connected(ClusterSpec()) as some:
        assert some.workers == 1
    ray.kill(holder)


def test_the_error_without_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with (
        pytest.raises(MissingExtraError, match=r"`ray`.*pip install 'ray>="),
        connected(ClusterSpec()),
    ):
        pass
