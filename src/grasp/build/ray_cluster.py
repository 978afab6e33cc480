"""A Ray cluster as GRASP uses it: connected to by address or started here, stateful workers, jobs that survive them.

Only this module imports ray, and only when it is asked for.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from grasp.errors import EngineError, GraspError
from grasp.extras import require

JOBS_A_WORKER = 2  # one that runs, one that waits: no worker is idle while its next shard travels
PATIENCE_SECONDS, POLL_SECONDS = 60.0, 0.5  # for room on a cluster that others use too
RETRIES = 3  # of one job whose worker died: a shard that kills every worker it meets must end the run


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Which cluster, and how many workers on it.

    Attributes:
        address: as `ray.init` takes it, e.g. `auto`, `head:6379`, `ray://head:10001`; none: one is started here, on
            this machine alone, and ends with the run.
        workers: none: one for each GPU of the cluster, or where it has none one for each CPU core.
        threads: CPU cores that one worker is given.
    """

    address: str | None = None
    workers: int | None = None
    threads: int = 1


class Cluster:
    """A connection, for as long as its `with` block lasts."""

    def __init__(self, ray: ModuleType, spec: ClusterSpec) -> None:
        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        cores = sum(int(node.get("CPU", 0)) for node in nodes)
        capacity = gpus or sum(int(node.get("CPU", 0)) // spec.threads for node in nodes)
        n_requested = capacity if spec.workers is None else spec.workers
        if capacity < 1:
            raise EngineError(f"threads: got {spec.threads}, but no node has so many cores; ask for fewer threads")
        if n_requested > capacity:
            raise EngineError(
                f"--workers: got {n_requested}, but the cluster has {gpus} GPUs and {cores} CPU cores, room for "
                f"{capacity} workers of {spec.threads} threads; use {capacity} or fewer, or fewer threads"
            )
        self._room = {"num_cpus": spec.threads} | ({"num_gpus": 1} if gpus else {})  # that a worker takes
        wanted = 1 if spec.workers is None else spec.workers
        deadline = time.monotonic() + PATIENCE_SECONDS  # others may be about to give theirs back
        while True:
            resources: dict[str, float] = ray.available_resources()
            free = int(resources.get("CPU", 0)) // spec.threads
            if gpus:
                free = min(free, int(resources.get("GPU", 0)))
            if free >= wanted:
                break
            if time.monotonic() > deadline:
                raise EngineError(
                    f"--engine ray: the cluster has room for {free} workers now, expected {wanted}; its cores or GPUs "
                    "are taken by others: ask for fewer --workers, or come back later with --resume"
                )
            time.sleep(POLL_SECONDS)
        self.workers = min(n_requested, free)

    def put(self, value: Any) -> Any:
        """A reference to a value that every worker may read."""
        return self._ray.put(value)

    def actors(self, kind: type, *arguments: Any) -> list[Any]:
        """One actor a worker; a dead one is started again, with the same arguments."""
        remote = self._ray.remote(kind).options(**self._room, max_restarts=-1, max_task_retries=RETRIES)
        return [remote.remote(*arguments) for _ in range(self.workers)]

    def tasks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same call once a worker, as references; a call whose worker dies is made again."""
        remote = self._ray.remote(_from_directory).options(**self._room, max_retries=RETRIES)
        return [remote.remote(os.getcwd(), function, *arguments) for _ in range(self.workers)]

    def done(self, references: Sequence[Any], seconds: float) -> bool:
        """Wait so long for all of them; whether they have ended. The first error of any of them is raised here."""
        ended, left = self._ray.wait(list(references), num_returns=len(references), timeout=seconds)
        for reference in ended:
            self.result(reference)
        return not left

    def result(self, reference: Any) -> Any:
        """What a job gave."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as err:
            if isinstance(err.cause, GraspError):
                raise err.cause from None
            raise
        except (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError) as err:
            reason = " ".join(str(err).split())[:300]
            raise EngineError(
                f"--engine ray: workers died again and again on the same job: {reason}; if memory ran out, lower "
                "model.batch_tokens or shard_rows, then run again with --resume: what is finished is kept"
            ) from err

    def spread(
        self,
        actors: Sequence[Any],
        jobs: Iterable[tuple[int, Any]],
        call: Callable[[Any, Any], Any],
        wait: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Results of numbered jobs as they come; few are under way at a time, whatever their number.

        Args:
            call: makes a reference of an actor and a job.
            wait: no job is begun while this is true and another is under way.
        """
        free = deque(actor for _ in range(JOBS_A_WORKER) for actor in actors)  # places at actors
        running: dict[Any, _Run] = {}

        def ended() -> Iterator[tuple[int, Any]]:
            """Wait until a job ends; what it gave, or nothing where its node was lost: another worker has it then."""
            (reference, *_), _ = self._ray.wait(list(running), num_returns=1)
            run = running.pop(reference)
            try:
                result = self.result(reference)
            except EngineError:
                if run.losses == RETRIES:
                    raise
                others = [actor for actor in actors if actor is not run.actor] or [run.actor]
                retried = call(others[run.losses % len(others)], run.job)
                running[retried] = replace(run, losses=run.losses + 1)
                return
            free.append(run.actor)
            yield run.k, result

        for k, job in jobs:
            while not free or (running and wait is not None and wait()):
                yield from ended()
            actor = free.popleft()
            running[call(actor, job)] = _Run(k, job, actor)
        while running:
            yield from ended()


@dataclass(frozen=True, slots=True)
class _Run:
    """A job under way."""

    k: int
    job: Any
    actor: Any  # whose place it has, though after a loss another one does it
    losses: int = 0


@contextmanager
def connected(spec: ClusterSpec) -> Iterator[Cluster]:
    """Connect to the cluster of `spec`, or start one; what was started is stopped at the end."""
    ray = require("ray", extra="ray", feature="--engine ray")
    is_own_cluster = not ray.is_initialized()
    if is_own_cluster:
        init_options: dict[str, Any] = {"address": spec.address}
        if spec.address is None:  # of this machine alone; two workers can be tried on any
            cores = max(os.cpu_count() or 1, 2 * spec.threads)
            init_options = {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": cores,
                "configure_logging": False,
            }
        try:
            ray.init(log_to_driver=False, logging_level="error", **init_options)
        except (ConnectionError, ValueError, RuntimeError) as err:
            reason = " ".join(str(err).split())[:200]
            if spec.address is None:
                raise EngineError(f"--engine ray: no cluster could be started on this machine: {reason}") from err
            raise EngineError(
                f"--address: no Ray cluster at {spec.address!r}: {reason}; start one with `ray start --head`, or omit the "
                "option to use this machine"
            ) from err
    try:
        yield Cluster(ray, spec)
    finally:
        if is_own_cluster:
            ray.shutdown()


def _from_directory(directory: str, function: Callable[..., Any], *arguments: Any) -> Any:
    enter(directory)
    return function(*arguments)


def enter(directory: str) -> None:
    """Where the user's relative paths mean what they mean to the user, if this node has that directory."""
    if os.path.isdir(directory):
        os.chdir(directory)
