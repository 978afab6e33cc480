"""A small world, what every command that writes gives in it undisturbed, and the processes that faults happen to."""

import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import format_exc

import numpy as np

from grasp.artifact.inspection import verify
from grasp.artifact.reader import ArtifactReader
from grasp.cli import SYSTEM_ERRORS
from grasp.distil.apply import apply
from grasp.distil.distil import distil
from grasp.errors import GraspError
from grasp.merging.merge import merge
from grasp.mixing.import_runs import import_runs
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.retraining.settings import retrain_settings
from grasp.retraining.worker import retrain
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import build_settings
from grasp.yaml_files import read_yaml, write_yaml
from tests.pipeline.world import world, write_corpus

STEPS = {"steps": 4, "warmup_steps": 1, "batch_rows": 8}
SHAPE = {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "context": 64}
LONGEST = 300.0
FAILING_DISK = Path(__file__).with_name("failing_disk.c")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, "transformers.models.llama"])


class FaultError(Exception):
    """A fault that was not mended; the message says how."""


@dataclass(frozen=True)
class Bench:
    """The world, what its commands give undisturbed, and the time that takes."""

    root: Path
    seconds: dict[str, float]
    draw: random.Random

    @property
    def artifact(self) -> Path:
        return self.root / "whole-build"

    @property
    def environment(self) -> Path:
        return self.root / "whole-retrain"

    def whole(self, verb: str) -> Path:
        """What a verb gives undisturbed."""
        return self.root / f"whole-{verb}"

    def fresh(self, name: str) -> Path:
        """A place without anything."""
        path = self.root / "faults" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(exist_ok=True)
        return path

    def copy(self, source: Path, name: str) -> Path:
        """Something to be harmed."""
        return Path(shutil.copytree(source, self.fresh(name)))


# ------------------------------------------------------------------------------------------------- commands that write


def _build(root: Path, out: Path) -> None:
    build_artifact(build_settings(read_yaml(root / "build.yaml")), out)


def _build_on_ray(root: Path, out: Path) -> None:
    build_artifact(build_settings(read_yaml(root / "build.yaml")), out, cluster=ClusterSpec(workers=2))


def _build_other(root: Path, out: Path) -> None:
    build_artifact(build_settings(read_yaml(root / "other.yaml")), out)


def _retrain(root: Path, out: Path) -> None:
    retrain(retrain_settings(read_yaml(root / "retrain.yaml")), out)


def _train_command(root: Path, out: Path) -> None:
    command = f"sh -c 'cp -r {root}/model {{checkpoint}}' {{corpus}}"
    settings = read_yaml(root / "retrain.yaml") | {"train_command": command, "tokenizer": str(root / "model")}
    retrain(retrain_settings({name: value for name, value in settings.items() if name != "overrides"}), out)


def _distil(root: Path, out: Path) -> None:
    distil(ArtifactReader.open(root / "whole-build"), "facts", out)


def _apply(root: Path, out: Path) -> None:
    apply(root / "whole-distil", str(root / "many.jsonl"), out, keep="30%")


def _merge(root: Path, out: Path) -> None:
    merge([root / "whole-build", root / "whole-other"], out)


def _import_runs(root: Path, out: Path) -> None:
    import_runs(root / "mixtures.csv", root / "metrics.csv", label="topic", out=out)


VERBS: dict[str, Callable[[Path, Path], None]] = {
    "build": _build,
    "retrain": _retrain,
    "train-command": _train_command,
    "distil": _distil,
    "apply": _apply,
    "other": _build_other,
    "merge": _merge,
    "runs-import": _import_runs,
    "ray": _build_on_ray,
}
WRITERS = tuple(verb for verb in VERBS if verb not in ("other", "ray"))


def prepare(root: Path, seed: int) -> Bench:
    """Run every command once without a fault."""
    settings = world(root, 64)
    write_yaml(settings.model_dump(mode="json"), root / "build.yaml")
    write_corpus(root / "many.jsonl", 400)
    lines = [json.loads(line) for line in (root / "many.jsonl").read_text(encoding="utf-8").splitlines()[:40]]
    renamed = [line | {"row_id": f"other-{line['row_id']}"} for line in lines]
    (root / "other.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in renamed), encoding="utf-8")
    corpus = settings.corpus.model_copy(update={"path": str(root / "other.jsonl")})
    other = settings.model_copy(update={"corpus": corpus, "like": str(root / "whole-build")})
    write_yaml(other.model_dump(mode="json"), root / "other.yaml")
    retraining = {
        "overrides": {**STEPS, "shape": SHAPE},
        "corpus": {"path": str(root / "corpus.jsonl"), "max_length": 48},
        "targets": {"names": [str(root / "facts.jsonl")], "max_length": 64},
        "family": "uniform:0.5",
        "n_subsets": 4,
        "seeds": [0],
        "threads": 1,
        "device": "cpu",
        "lease_seconds": 0.5,
    }
    write_yaml(retraining, root / "retrain.yaml")
    shares = random.Random(seed)
    draws = [[shares.random() for _ in range(3)] for _ in range(6)]
    mixtures = [",".join([f"run-{i}", *(str(part / sum(draw)) for part in draw)]) for i, draw in enumerate(draws)]
    (root / "mixtures.csv").write_text("\n".join(["run,earth,life,sky", *mixtures, ""]), encoding="utf-8")
    metrics = [f"run-{i},{2 + shares.random()}" for i in range(len(draws))]
    (root / "metrics.csv").write_text("\n".join(["run,facts/loss", *metrics, ""]), encoding="utf-8")
    go_on("build", root, root / "first")  # imports, before anything is timed
    seconds = {}
    for verb in VERBS:
        if verb != "ray":
            begun = time.monotonic()
            go_on(verb, root, root / f"whole-{verb}")
            seconds[verb] = time.monotonic() - begun
    return Bench(root, seconds, random.Random(seed))


# ----------------------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def failing_disk_at_hand(directory: Path) -> Iterator[bool]:
    """Have the library of `failing_disk.c` in all children from now on; false where there is no compiler."""
    library = directory / "failing_disk.so"
    compiler = shutil.which("cc")
    if compiler is None:
        yield False
        return
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, FAILING_DISK, "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield True
    finally:
        del os.environ["LD_PRELOAD"]


@dataclass(frozen=True)
class Constraints:
    """How the disk of a child fails.

    Attributes:
        file_bytes: no file may grow beyond; 0: as it likes.
        calls: so many changes of files below the output are made, the next ones give `error`; 0: all of them.
    """

    file_bytes: int = 0
    calls: int = 0
    error: int = errno.EIO


class Child:
    """A process of its own that a fault happens to; forked where all is imported, so that kills hit work."""

    def __init__(self, verb: str, root: Path, out: Path, limits: Constraints | None = None) -> None:
        self._reader, writer = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=run_child, args=(verb, root, out, limits or Constraints(), writer))
        self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, seconds: float = LONGEST) -> bool:
        """Whether it ended by itself."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def kill(self) -> None:
        """It, and what it began."""
        for how in (os.killpg, os.kill):  # the group is its own a moment after its start
            with contextlib.suppress(ProcessLookupError):
                how(self.pid, signal.SIGKILL)
        self._process.join()

    def refusal(self) -> str | None:
        """The line that it refused with, none if it did its work."""
        if not self.wait():
            self.kill()
            raise FaultError(f"not done after {LONGEST:.0f} s")
        try:
            line, traceback = self._reader.recv()
        except EOFError as err:
            raise FaultError(f"ended with exit code {self._process.exitcode} and no word") from err
        if traceback:
            raise FaultError(f"a traceback: {traceback[-700:]}")
        if "\n" in line:
            raise FaultError(f"more than one line: {line}")
        return str(line) if line else None


def run_child(verb: str, root: Path, out: Path, limits: Constraints, writer: Connection) -> None:
    """Sends the one line of a refusal and the traceback of a bug, each empty if there is none."""
    os.setsid()
    if limits.file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG instead of ending the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    if limits.calls:
        below = ctypes.c_char_p(str(out).encode())
        ctypes.CDLL(None).fail_below(below, ctypes.c_long(limits.calls), ctypes.c_int(limits.error))
    try:
        VERBS[verb](root, out)
        writer.send(("", ""))
    except GraspError as err:
        writer.send((str(err), ""))
    except OSError as err:
        writer.send((str(err), "" if err.errno in SYSTEM_ERRORS else format_exc()))
    except BaseException:
        writer.send(("", format_exc()))
        raise


def go_on(verb: str, root: Path, out: Path) -> None:
    """Run a command that must do its work."""
    if line := Child(verb, root, out).refusal():
        raise FaultError(f"going on failed: {line}")


# ------------------------------------------------------------------------------------------------------ what came of it


def arrays_of(path: Path) -> dict[str, bytes]:
    """Everything of an artifact that is a number."""
    artifact = ArtifactReader.open(path)
    arrays = {name: b"".join(b.tobytes() for _, b in artifact.array_blocks(name)) for name in artifact.array_names}
    return arrays | {f"moments {name}": array.tobytes() for name, array in artifact.moments.items()}


def contents(path: Path) -> dict[str, bytes]:
    """Every file but marks and locks."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def same(bench: Bench, verb: str, path: Path) -> None:
    """See that a place holds what the undisturbed command gave, to the bit."""
    whole = bench.whole("build" if verb == "ray" else verb)
    if verb in ("build", "ray", "merge"):
        if arrays_of(path) != arrays_of(whole):
            raise FaultError(f"the arrays are not those of the undisturbed {verb}")
        if problems := verify(path).problems:
            raise FaultError(f"verify names {next(iter(problems))}")
    elif verb in ("retrain", "train-command"):
        ours, theirs = RetrainedRuns.open(path), RetrainedRuns.open(whole)
        if not np.array_equal(ours.utilities().values_BSE, theirs.utilities().values_BSE):
            raise FaultError("the utilities are not those of the undisturbed retrain")
    else:
        ours, theirs = contents(path), contents(whole)
        names = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if names:
            raise FaultError(f"{sorted(names)[0]} is not that of the undisturbed {verb}")
