"""Faults: builds and retrains that are killed, starved of disk, or handed broken files; what is lost is counted.

    nice -n 5 python benchmarks/faults.py --faults 500 --out bench-out/faults.json

Each fault is one child process and one check. Kinds:

    kill build      SIGKILL at a random moment of a build; then --resume; arrays equal, bit for bit
    kill retrain    SIGKILL at a random moment of a retrain; then the same call; utilities equal, bit for bit
    kill worker     SIGKILL of an actor of the Ray engine at a random moment (only with --ray)
    full disk       no file may grow beyond a random size (RLIMIT_FSIZE: the error comes in the middle of a write);
                    the build ends with one line, leaves no half shard, and goes on without the limit
    full tmpfs      the artifact lies on a tmpfs of a random size that is too small (only with --tmpfs, and with the
                    right to mount: `unshare -rm python benchmarks/faults.py ...` where it is not root's); `grasp build`
                    ends with one line and exit code 2, and goes on once there is room
    flip            one random bit of one random file of an artifact; `verify` names that file and no other
    cut             one random file of an artifact is cut at a random byte; `verify` names it
    slow read       every read of the corpus waits; the arrays are the same
    flip, then read one random bit of one random file of an artifact or an environment; whoever reads it says so, or
                    gives the same numbers
    hostile manifest a manifest signed again by a stranger: names that lead elsewhere, numbers that cannot be; all who
                    open it refuse it in one line
    output on input a command is told to write over something that it reads, or over no regular file; it refuses, and
                    nothing has changed
    failing read    the n-th read of a chunk fails; the reader says which file, and the next read is right

After every kill what was finished before it must still be there: finished shards keep their bytes and their times.
The numbers of each kind, and every fault that was not mended, are written as JSON after each fault, so that the
harness itself may be killed: the same command goes on after the last fault that it counted. What is drawn for a fault
follows from the seed and its number.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import format_exc
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from grasp.artifact.inspection import info, verify
from grasp.artifact.layout import MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.cli import REFUSALS
from grasp.corpus.store import RowStore
from grasp.errors import ArtifactError, GraspError
from grasp.extract.local import build
from grasp.files import checksum, write_whole
from grasp.runs.environment import Environment
from grasp.runs.retrain import retrain
from grasp.settings import build_settings, retrain_settings
from grasp.yaml_files import read_yaml, write_yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cli.grasp_command import run as grasp_command
from tests.extract.world import world

STEPS = {"steps": 4, "warmup_steps": 1, "batch_rows": 8}
SHAPE = {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "context": 64}
LONGEST = 300.0
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["grasp.extract.local", "grasp.runs.retrain", "transformers.models.llama"])


class FaultError(Exception):
    """A fault that was not mended; the message says how."""


@dataclass(frozen=True)
class Bench:
    """A world, what it gives undisturbed, and the time that takes."""

    root: Path
    artifact: Path
    environment: Path
    build_s: float
    retrain_s: float
    draw: random.Random

    def fresh(self, name: str) -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        return path


def prepare(root: Path, seed: int) -> Bench:
    """Build and retrain once without a fault."""
    write_yaml(world(root, 64).model_dump(mode="json"), root / "build.yaml")
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
    going_on("build", root, root / "first")  # imports, before anything is timed
    seconds = []
    for verb in ("build", "retrain"):
        begun = time.monotonic()
        going_on(verb, root, root / f"whole-{verb}")
        seconds.append(time.monotonic() - begun)
    build_s, retrain_s = seconds
    return Bench(root, root / "whole-build", root / "whole-retrain", build_s, retrain_s, random.Random(seed))


class Child:
    """A process of its own that a fault happens to; forked where all is imported, so that kills hit work."""

    def __init__(self, verb: str, root: Path, out: Path, limit: int = 0) -> None:
        self._said, says = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=run_child, args=(verb, root, out, limit, says))
        self._process.start()
        says.close()
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
            line, traceback = self._said.recv()
        except EOFError as err:
            raise FaultError(f"ended with exit code {self._process.exitcode} and no word") from err
        if traceback:
            raise FaultError(f"a traceback: {traceback[-400:]}")
        return str(line) if line else None


def run_child(verb: str, root: Path, out: Path, limit: int, says: Connection) -> None:
    """Sends the one line of a refusal and the traceback of a bug, each empty if there is none."""
    os.setsid()
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG instead of ending the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        work(verb, root, out)
        says.send(("", ""))
    except GraspError as err:
        says.send((str(err), ""))
    except OSError as err:
        says.send((str(err), "" if err.errno in REFUSALS else format_exc()))
    except BaseException:
        says.send(("", format_exc()))
        raise


def work(verb: str, root: Path, out: Path) -> None:
    if verb == "retrain":
        retrain(retrain_settings(read_yaml(root / "retrain.yaml")), out)
        return
    cluster = None
    if verb == "ray":
        from grasp.extract.cluster import ClusterSpec  # noqa: PLC0415

        cluster = ClusterSpec(workers=2)
    build(build_settings(read_yaml(root / "build.yaml")), out, cluster=cluster)


def arrays_of(path: Path) -> dict[str, bytes]:
    artifact = ArtifactReader.open(path)
    found = {name: b"".join(b.tobytes() for _, b in artifact.array_blocks(name)) for name in artifact.array_names}
    return found | {f"moments {name}": array.tobytes() for name, array in artifact.moments.items()}


def same_artifact(bench: Bench, path: Path) -> None:
    if arrays_of(path) != arrays_of(bench.artifact):
        raise FaultError("the arrays are not those of the undisturbed build")
    if problems := verify(path).problems:
        raise FaultError(f"verify names {problems[0]}")


def same_environment(bench: Bench, path: Path) -> None:
    ours, theirs = Environment.open(path), Environment.open(bench.environment)
    if not np.array_equal(ours.utilities().values_BSE, theirs.utilities().values_BSE):
        raise FaultError("the utilities are not those of the undisturbed retrain")


def finished(path: Path) -> dict[str, tuple[int, int]]:
    """Marks of finished shards and results of finished runs, with size and time of writing."""
    patterns = ("tokens/shard-*.json", "shards/*.json", "work/*/features/*.json", "runs/*.parquet")
    files = [file for pattern in patterns for file in path.glob(pattern)]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def killed(bench: Bench, verb: str, seconds: float, check: Callable[[Bench, Path], None]) -> None:
    """Kill once at a random moment, go on, and see that what was finished was not made again."""
    out = bench.fresh("killed")
    process = Child(verb, bench.root, out)
    process.wait(bench.draw.uniform(0.0, 1.0) * seconds)
    process.kill()
    before = finished(out)
    going_on(verb, bench.root, out)
    not_again(before, finished(out))
    check(bench, out)


def not_again(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    redone = [name for name, stamp in before.items() if name in after and after[name] != stamp]
    if redone:
        raise FaultError(f"made again although it was finished: {redone[0]}")


def going_on(verb: str, root: Path, out: Path) -> None:
    if line := Child(verb, root, out).refusal():
        raise FaultError(f"going on failed: {line}")


def kill_build(bench: Bench) -> None:
    killed(bench, "build", bench.build_s, same_artifact)


def kill_retrain(bench: Bench) -> None:
    killed(bench, "retrain", bench.retrain_s, same_environment)


def kill_worker(bench: Bench) -> None:
    """SIGKILL of one actor; the build itself goes on."""
    out = bench.fresh("killed")
    process = Child("ray", bench.root, out)
    deadline = time.monotonic() + LONGEST
    while not process.wait(0.05) and time.monotonic() < deadline:
        below = psutil.Process(process.pid).children(recursive=True)
        pids = [one.pid for one in below if " ".join(one.cmdline()).startswith("ray::ModelActor")]
        if pids:
            time.sleep(bench.draw.uniform(0, 2))
            with contextlib.suppress(ProcessLookupError):
                os.kill(bench.draw.choice(pids), signal.SIGKILL)
            break
    if line := process.refusal():
        raise FaultError(f"the build did not survive its worker: {line}")
    same_artifact(bench, out)


def full_disk(bench: Bench) -> None:
    out = bench.fresh("full")
    line = Child("build", bench.root, out, bench.draw.randrange(300, 20_000)).refusal()
    if line and ("\n" in line or "file too large" not in line.lower()):
        raise FaultError(f"not one line about the disk: {line}")
    if (out / "build.json").exists() and not verify(out).ok:
        raise FaultError("a half shard was left")
    going_on("build", bench.root, out)
    same_artifact(bench, out)


def full_tmpfs(bench: Bench) -> None:
    """ENOSPC as a user meets it: from the command line, in whatever write is the first that finds no room."""
    out = bench.fresh("tmpfs")
    out.mkdir()
    need = sum(file.stat().st_size for file in bench.artifact.rglob("*") if file.is_file())
    settings = ("--config", str(bench.root / "build.yaml"), "--resume", "--quiet")
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
        same_artifact(bench, out / "art")
    except subprocess.CalledProcessError as err:
        raise FaultError(f"going on failed: {err.stderr.decode()[-400:]}") from err
    finally:
        subprocess.run(["umount", str(out)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def damaged(bench: Bench, harm: Callable[[bytearray], bytearray]) -> None:
    path = bench.fresh("damaged")
    shutil.copytree(bench.artifact, path)
    manifest = ArtifactReader.open(path).manifest
    name = bench.draw.choice(sorted(manifest.files | manifest.rows_kept))
    data = bytearray((path / name).read_bytes())
    (path / name).write_bytes(harm(data))
    named = [problem.file for problem in verify(path).problems]
    if named != [name]:
        raise FaultError(f"{name} was harmed, verify named {named}")


def flip(bench: Bench) -> None:
    damaged(bench, lambda data: flipped(bench, data))


def flipped(bench: Bench, data: bytearray) -> bytearray:
    data[bench.draw.randrange(len(data))] ^= 1 << bench.draw.randrange(8)
    return data


def read_artifact(path: Path) -> dict[str, bytes]:
    """All that can be asked of an artifact."""
    artifact = ArtifactReader.open(path)
    found = arrays_of(path) | {"units": str(artifact.units.to_pylist()).encode()}
    found["rows"] = str(pq.read_table(artifact.rows_path).to_pylist()).encode()
    found["shards"] = str(artifact.rows(np.arange(artifact.n_rows)).to_pylist()).encode()
    found["tokens"] = RowStore.open(artifact.tokens_path).shard(0).flat_ids.tobytes()
    return found | {"manifest": artifact.manifest.model_dump_json().encode()}


def read_environment(path: Path) -> dict[str, bytes]:
    environment = Environment.open(path)
    found = {"info": environment.info.model_dump_json().encode()}
    found["utilities"] = environment.utilities().values_BSE.tobytes()
    return found | {"reference": environment.reference_utilities().tobytes()}


def flip_read(bench: Bench) -> None:
    """What is read after a flip is what was written, or a refusal."""
    of_artifact = bench.draw.random() < 0.7
    source, read = (bench.artifact, read_artifact) if of_artifact else (bench.environment, read_environment)
    path = bench.fresh("flipped")
    shutil.copytree(source, path)
    unread = {"lock", "subsets.parquet"}
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    files = [file for file in files if file.name not in unread and "reference/" not in file.as_posix()]
    file = bench.draw.choice(files)
    file.write_bytes(flipped(bench, bytearray(file.read_bytes())))
    try:
        found = read(path)
    except GraspError as err:
        one_line(err)
        return
    if changed := [name for name, data in read(source).items() if found[name] != data]:
        raise FaultError(f"a bit of {file.relative_to(path)} was flipped: {changed[0]} changed without a word")


def one_line(err: Exception) -> None:
    if "\n" in str(err):
        raise FaultError(f"more than one line: {err}") from err


PIECES = ("..", "/", "etc", "\\", "C:", "\0", "\n", "\x1b[2J", "~", " ", ".", "a", "rows.parquet", "\u202e", "x" * 200)


def hostile_manifest(bench: Bench) -> None:
    """A stranger's manifest, with a signature that is right."""
    path, draw = bench.fresh("hostile"), bench.draw
    shutil.copytree(bench.artifact, path)
    raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    middle = "".join(draw.choices(PIECES, k=draw.randrange(1, 4)))
    name = "/" * draw.randrange(2) + middle + draw.choice(["/..", "\t", "//"])
    array = raw["arrays"][draw.choice(sorted(raw["arrays"]))]
    wrong = draw.choice([-1, 0, 1e308, "1", None, [], {}, 10**30, "../x"])
    changes: list[Callable[[], object]] = [
        lambda: raw["files"].update({name: {"bytes": draw.randrange(99), "checksum": "0" * 32}}),
        lambda: raw.update({draw.choice(["units", "moments"]): [name]}),
        lambda: array["groups"][0].update(name=name),
        lambda: raw["arrays"].update({name: array}),
        lambda: array.update({draw.choice(["width", "gain", "groups"]): wrong}),
        lambda: array["groups"][0].update({draw.choice(["start", "stop", "dtype"]): draw.choice([-1, 99, "object"])}),
        lambda: raw.update({draw.choice(["n_rows", "shard_rows", "targets", "files", "arrays"]): wrong or -1}),
        lambda: raw["files"].pop(draw.choice([file for file in raw["files"] if file.startswith("arrays/")])),
    ]
    draw.choice(changes)()
    (path / MANIFEST).write_bytes(signed_again(raw))
    before = {file: file.stat().st_mtime_ns for file in bench.root.rglob("*")}
    for look in (ArtifactReader.open, info, verify):
        try:
            look(path)
        except ArtifactError as err:
            one_line(err)
        else:
            raise FaultError(f"{look.__name__} believes {raw['arrays']}")
    if {file: file.stat().st_mtime_ns for file in bench.root.rglob("*")} != before:
        raise FaultError("something was written")


def signed_again(raw: dict[str, Any]) -> bytes:
    zeros = "0" * 32
    text = json.dumps({**raw, "checksum": zeros}, indent=1) + "\n"
    return text.replace(f'"checksum": "{zeros}"', f'"checksum": "{checksum(text.encode())}"', 1).encode()


COMMANDS = (
    ("score", "ART", "--target", "facts", "--out"),
    ("predict", "ART", "--by", "topic", "--out"),
    ("predict", "ART", "--drop", "topic = 'games'", "--out"),
    ("report", "ART", "--out"),
    ("detect", "ART", "--target", "facts", "--label", "topic", "--out"),
    ("evaluate", "ART", "--environment", "ENV", "--json"),
    ("calibrate", "ART", "--environment", "ENV", "--out"),
)


def output_on_input(bench: Bench) -> None:
    words = list(bench.draw.choice(COMMANDS))
    places = {"ART": bench.artifact, "ENV": bench.environment}
    inputs = [bench.root / "corpus.jsonl", bench.root / "facts.jsonl", *bench.artifact.rglob("*")]
    inputs += [*(bench.root / "model").glob("*"), Path("/dev/null"), bench.root]
    inputs += bench.environment.glob("*.*") if "ENV" in words else []
    before = {file: file.stat().st_mtime_ns for file in bench.root.rglob("*") if file.is_file()}
    out = bench.draw.choice(sorted(inputs))
    done = grasp_command(*(str(places.get(word, word)) for word in words), out)
    last = (done.err.splitlines() or [""])[-1]
    if done.code != 2 or not last.startswith("error: ") or "Traceback" in done.err:
        raise FaultError(f"{words} {out}: exit code {done.code}: {done.err[-300:]}")
    if {file: file.stat().st_mtime_ns for file in bench.root.rglob("*") if file.is_file()} != before:
        raise FaultError(f"{words} {out}: something changed")


def cut(bench: Bench) -> None:
    damaged(bench, lambda data: data[: bench.draw.randrange(len(data))])


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
        out = build(build_settings(read_yaml(bench.root / "build.yaml")), bench.fresh("slow"))
    finally:
        io.open = real
    if not waits:
        raise FaultError("no read was slowed")
    same_artifact(bench, out)


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
    same_artifact(bench, bench.artifact)


KINDS: dict[str, tuple[Callable[[Bench], None], int]] = {  # and how often of 25
    "kill build": (kill_build, 4),
    "kill retrain": (kill_retrain, 2),
    "full disk": (full_disk, 2),
    "flip": (flip, 3),
    "flip, then read": (flip_read, 5),
    "hostile manifest": (hostile_manifest, 3),
    "output on input": (output_on_input, 2),
    "cut": (cut, 2),
    "slow read": (slow_read, 1),
    "failing read": (failing_read, 1),
}


def counted(out: Path, of: dict[str, Any], kinds: Iterable[str]) -> dict[str, Any]:
    """What --out has counted with the same seed and kinds, or nothing yet."""
    if out.exists():
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if of.items() <= report.items():
            return report
        sys.exit(f"faults: {out} counts faults of another run; delete it, or name another file with --out")
    empty = {kind: {"faults": 0, "mended": 0} for kind in kinds}
    return {**of, "faults": 0, "mended": 0, "kinds": empty, "failures": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds, separated by commas; those with a comma in their name by its beginning")
    parser.add_argument("--ray", action="store_true", help="kill workers of the Ray engine as well")
    parser.add_argument("--tmpfs", action="store_true", help="fill a small tmpfs as well; needs the right to mount")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the counts")
    args = parser.parse_args()
    kinds = KINDS | ({"kill worker": (kill_worker, 2)} if args.ray else {})
    kinds |= {"full tmpfs": (full_tmpfs, 2)} if args.tmpfs else {}
    if args.only:
        chosen = tuple(part.strip() for part in args.only.split(","))
        kinds = {kind: known for kind, known in kinds.items() if kind.startswith(chosen)}
    wheel = [kind for kind, (_, often) in kinds.items() for _ in range(often)]
    random.Random(args.seed).shuffle(wheel)
    report = counted(args.out, {"seed": args.seed, "ray": args.ray, "tmpfs": args.tmpfs, "only": args.only}, kinds)
    failures = report["failures"]
    with tempfile.TemporaryDirectory() as directory:
        bench = prepare(Path(directory), args.seed) if report["faults"] < args.faults else None
        for i in range(report["faults"], args.faults):
            assert bench is not None
            kind = wheel[i % len(wheel)]
            bench.draw.seed(f"{args.seed} {i}")
            report["kinds"][kind]["faults"] += 1
            try:
                kinds[kind][0](bench)
                report["kinds"][kind]["mended"] += 1
            except (FaultError, GraspError, subprocess.TimeoutExpired) as err:
                failures.append({"fault": i, "kind": kind, "what": str(err)})
            report |= {"faults": i + 1, "mended": i + 1 - len(failures)}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(args.out, (json.dumps(report, indent=1) + "\n").encode())
    print(f"{args.faults - len(failures)} of {args.faults} faults did no harm; see {args.out}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
