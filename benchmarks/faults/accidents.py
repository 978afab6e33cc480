"""Accidents: kills, full and failing disks, flipped bits, cut files, slow and failing reads.

    kill             SIGKILL at a random moment of what writes (build, retrain, distil, apply, merge, runs
                     import); then the same again; what comes is equal, bit for bit
    kill worker      SIGKILL of an actor of the Ray engine at a random moment (only with --ray)
    full disk        no file may grow beyond a random size (RLIMIT_FSIZE: the error comes in the middle of a write); the
                     command ends with one line, leaves nothing half, and goes on without the limit
    failing disk     from the n-th on every write, flush and rename below the output gives EIO or ENOSPC, whichever
                     library asks; as with a full disk
    full tmpfs       the artifact lies on a tmpfs of a random size that is too small (only with --tmpfs, and with the
                     right to mount: `unshare -rm python -m benchmarks.faults ...` where it is not root's); it ends with
                     one line and exit code 2, and goes on once there is room
    flip             one random bit of one random file of an artifact; `verify` names that file and no other
    cut              one random file of an artifact is cut at a random byte; `verify` names it
    flip, then read  one random bit of one random file of an artifact, a merged one, an environment, imported runs, a
                     scorer or scores; whoever reads it says so, or gives the same numbers
    slow read        every read of the corpus waits; the arrays are the same
    failing read     the n-th read of a chunk fails; the reader says which file, and the next read is right

After every kill what was finished before it must still be there: finished shards keep their bytes and their times.
"""

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq

from benchmarks.faults.bench import LONGEST, WRITERS, Bench, Child, Constraints, FaultError, arrays_of, go_on, same
from grasp.artifact.inspection import verify
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import RowStore
from grasp.distil.apply import apply
from grasp.distil.scorer import Scorer
from grasp.errors import ArtifactError, GraspError
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.table import RunTable
from grasp.settings import build_settings
from grasp.yaml_files import read_yaml

TEXTS = ["water and salt", "a star over the ocean", ""]


def finished(path: Path) -> dict[str, tuple[int, int]]:
    """Marks of finished shards, results of finished runs, parts of scores: with size and time of writing."""
    patterns = ("tokens/shard-*.json", "shards/*.json", "work/*/features/*.json", "runs/*.parquet", "scores-*.parquet")
    files = [file for pattern in patterns for file in path.glob(pattern)]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def not_again(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    redone = [name for name, stamp in before.items() if name in after and after[name] != stamp]
    if redone:
        raise FaultError(f"made again although it was finished: {redone[0]}")


def killed(bench: Bench, verb: str) -> None:
    """Kill once at a random moment, go on, and see that what was finished was not made again."""
    out = bench.fresh("killed")
    process = Child(verb, bench.root, out)
    process.wait(bench.draw.uniform(0.0, 1.0) * bench.seconds[verb])
    process.kill()
    rerun(bench, verb, out)


def rerun(bench: Bench, verb: str, out: Path) -> None:
    """The same command again; what makes a new directory is done where there is one."""
    before = finished(out)
    if not (verb in ("distil", "merge", "runs-import") and out.exists()):
        go_on(verb, bench.root, out)
    not_again(before, finished(out))
    same(bench, verb, out)


def kill_build(bench: Bench) -> None:
    killed(bench, "build")


def kill_retrain(bench: Bench) -> None:
    killed(bench, "retrain")


def kill_writer(bench: Bench) -> None:
    killed(bench, bench.draw.choice(("distil", "apply", "apply", "merge", "runs-import")))


def kill_worker(bench: Bench) -> None:
    """SIGKILL of one actor; the build itself goes on."""
    out = bench.fresh("killed")
    process = Child("ray", bench.root, out)
    deadline = time.monotonic() + LONGEST
    while not process.wait(0.05) and time.monotonic() < deadline:
        below = psutil.Process(process.pid).children(recursive=True)
        pids = [process.pid for process in below if " ".join(process.cmdline()).startswith("ray::ModelActor")]
        if pids:
            time.sleep(bench.draw.uniform(0, 2))
            with contextlib.suppress(ProcessLookupError):
                os.kill(bench.draw.choice(pids), signal.SIGKILL)
            break
    if line := process.refusal():
        raise FaultError(f"the build did not survive its worker: {line}")
    same(bench, "ray", out)


# ---------------------------------------------------------------------------------------------------------------- disks


def starved(bench: Bench, limits: Constraints, wording: str) -> None:
    """Run a command on a disk that fails, and again on one that does not."""
    verb, out = bench.draw.choice(WRITERS), bench.fresh("starved")
    try:
        line = Child(verb, bench.root, out, limits).refusal()
    except FaultError as err:
        raise FaultError(f"{verb}: {err}") from err
    if line and wording not in line.lower():
        raise FaultError(f"{verb}: does not say what the disk said: {line}")
    rerun(bench, verb, out)


def full_disk(bench: Bench) -> None:
    starved(bench, Constraints(file_bytes=int(300 * 100 ** bench.draw.random())), "file too large")


def failing_disk(bench: Bench) -> None:
    code = bench.draw.choice((errno.EIO, errno.ENOSPC))
    starved(
        bench,
        Constraints(calls=int(300 ** bench.draw.random()), error=code),
        os.strerror(code).split(" left")[0].lower(),
    )


def full_tmpfs(bench: Bench) -> None:
    """ENOSPC as a user meets it: from the command line, in whatever write is the first that finds no room."""
    out = bench.fresh("tmpfs")
    out.mkdir()
    need = sum(file.stat().st_size for file in bench.artifact.rglob("*") if file.is_file())
    settings = ("--config", str(bench.root / "build.yaml"), "--resume")
    command = [sys.executable, "-m", "grasp", "build", *settings, "--out", str(out / "art")]
    mount("-t", "tmpfs", "-o", f"size={bench.draw.randrange(4096, need)}", "tmpfs", str(out))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if done.returncode != 2 or "no space left" not in last.lower() or "Traceback" in done.stderr:
            raise FaultError(f"exit code {done.returncode}, not one line about the disk: {done.stderr[-400:]}")
        before = finished(out / "art")
        mount("-o", f"remount,size={100 * need}", str(out))
        subprocess.run(command, capture_output=True, timeout=LONGEST, check=True)
        not_again(before, finished(out / "art"))
        same(bench, "build", out / "art")
    except subprocess.CalledProcessError as err:
        raise FaultError(f"going on failed: {err.stderr.decode()[-400:]}") from err
    finally:
        subprocess.run(["umount", str(out)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


# ------------------------------------------------------------------------------------------------------------- harm


def damaged(bench: Bench, harm: Callable[[bytearray], bytearray]) -> None:
    path = bench.copy(bench.artifact, "damaged")
    manifest = ArtifactReader.open(path).manifest
    name = bench.draw.choice(sorted(manifest.files | manifest.rows_kept))
    data = bytearray((path / name).read_bytes())
    (path / name).write_bytes(harm(data))
    named = list(verify(path).problems)
    if named != [name]:
        raise FaultError(f"{name} was harmed, verify named {named}")


def flip(bench: Bench) -> None:
    damaged(bench, lambda data: flipped(bench, data))


def cut(bench: Bench) -> None:
    damaged(bench, lambda data: data[: bench.draw.randrange(len(data))])


def flipped(bench: Bench, data: bytearray) -> bytearray:
    data[bench.draw.randrange(len(data))] ^= 1 << bench.draw.randrange(8)
    return data


def read_artifact(bench: Bench, path: Path) -> dict[str, bytes]:
    """All that can be asked of an artifact."""
    artifact = ArtifactReader.open(path)
    contents = arrays_of(path) | {"units": str(artifact.units.to_pylist()).encode()}
    contents["rows"] = str(pq.read_table(artifact.rows_path).to_pylist()).encode()
    contents["shards"] = str(artifact.rows(np.arange(artifact.n_rows)).to_pylist()).encode()
    if artifact.tokens_path.exists():
        contents["tokens"] = RowStore.open(artifact.tokens_path).shard(0).flat_ids.tobytes()
    return contents | {"manifest": artifact.manifest.model_dump_json().encode()}


def read_environment(bench: Bench, path: Path) -> dict[str, bytes]:
    environment = RetrainedRuns.open(path)
    contents = {"info": environment.info.model_dump_json().encode()}
    contents["utilities"] = environment.utilities().values_BSE.tobytes()
    return contents | {"reference": environment.reference_utilities().tobytes()}


def read_runs(bench: Bench, path: Path) -> dict[str, bytes]:
    runs = RunTable.open(path)
    contents = {"info": runs.info.model_dump_json().encode()}
    return contents | {"weights": runs.weights_RG().tobytes(), "utilities": runs.utility_RST().tobytes()}


def read_scorer(bench: Bench, path: Path) -> dict[str, bytes]:
    scorer = Scorer.open(path)
    score_N, unfamiliar_N = scorer.score(TEXTS)
    return {"card": str(scorer.card).encode(), "scores": score_N.tobytes(), "marks": unfamiliar_N.tobytes()}


def read_scores(bench: Bench, path: Path) -> dict[str, bytes]:
    """What going on makes of it."""
    applied = apply(bench.whole("distil"), str(bench.root / "many.jsonl"), path)
    return {"table": str(applied.to_arrow().to_pylist()).encode(), "documents": str(applied.documents).encode()}


READ: dict[str, tuple[Callable[[Bench, Path], dict[str, bytes]], int]] = {  # and how often of 20
    "build": (read_artifact, 6),
    "merge": (read_artifact, 3),
    "retrain": (read_environment, 4),
    "runs-import": (read_runs, 3),
    "distil": (read_scorer, 2),
    "apply": (read_scores, 2),
}
UNREAD = ("subsets.parquet", "README.md", "reference/", "kept/")  # by `read_...`, in the place of their file


def flip_read(bench: Bench) -> None:
    """What is read after a flip is what was written, or a refusal."""
    verb = bench.draw.choice([verb for verb, (_, often) in READ.items() for _ in range(often)])
    read, source = READ[verb][0], bench.whole(verb)
    path = bench.copy(source, "flipped")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    names = [name for file in files if not (name := file.relative_to(path).as_posix()).startswith((*UNREAD, "."))]
    name = bench.draw.choice([name for name in names if name != "lock"])
    (path / name).write_bytes(flipped(bench, bytearray((path / name).read_bytes())))
    try:
        contents = read(bench, path)
    except GraspError as err:
        one_line(err)
        return
    if changed := [what for what, data in read(bench, source).items() if contents[what] != data]:
        raise FaultError(f"{verb}: a bit of {name} was flipped: {changed[0]} changed without a word")


def one_line(err: Exception) -> None:
    if "\n" in str(err):
        raise FaultError(f"more than one line: {err}") from err


# ---------------------------------------------------------------------------------------------------------------- reads


def slow_read(bench: Bench) -> None:
    """The corpus behind a pipe-like file system: every read takes a while."""
    real = io.open
    waits: list[float] = []

    def opened(file: object, *args: object, **options: object) -> object:
        if str(file).startswith(str(bench.root)):
            waits.append(bench.draw.uniform(0, 0.01))
            time.sleep(waits[-1])
        return real(file, *args, **options)  # type: ignore[call-overload]

    io.open = opened  # type: ignore[assignment]
    try:
        out = build_artifact(build_settings(read_yaml(bench.root / "build.yaml")), bench.fresh("slow"))
    finally:
        io.open = real
    if not waits:
        raise FaultError("no read was slowed")
    same(bench, "build", out)


def failing_read(bench: Bench) -> None:
    """One chunk file fails once; the error has one line with its name, and reading again gives the numbers."""
    artifact, real, calls = ArtifactReader.open(bench.artifact), np.memmap, [0]
    nth = bench.draw.randrange(1, 1 + artifact.grid.n_shards)

    def mapped(path: Path, *args: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(5, "Input/output error", str(path))
        return real(path, *args, **options)  # type: ignore[call-overload]

    np.memmap = mapped  # type: ignore[misc, assignment]
    try:
        list(artifact.array_blocks("hidden_sketch"))
    except (ArtifactError, OSError) as err:
        if ".npy" not in str(err) or "\n" in str(err):
            raise FaultError(f"the error does not name the file in one line: {err}") from err
    else:
        raise FaultError("a failing read went unnoticed")
    finally:
        np.memmap = real  # type: ignore[misc]
    same(bench, "build", bench.artifact)
