"""Connect to a Ray cluster or start one, and run jobs on stateful workers, with retries if a worker dies.

No other module imports ray, and this one imports it only in `connected`. Start with `connected`.
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

JOBS_PER_WORKER = 2  # one runs, one is queued: no worker is idle while its next shard is transferred
TIMEOUT_SECONDS, POLL_SECONDS = 60.0, 0.5  # while waiting for free resources on a shared cluster
RETRIES = 3  # of one job whose worker died: a shard that kills every worker it meets must end the run


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Address of the cluster, and number and size of workers.

    Attributes:
        address: address for `ray.init`, e.g. `auto`, `head:6379`, `ray://head:10001`. Default: start a cluster on this
            machine, which ends with the run.
        workers: number of workers. Default: one per GPU of the cluster, or one per CPU core if it has no GPU.
        threads: CPU cores per worker.
    """

    address: str | None = None
    workers: int | None = None
    threads: int = 1


class Cluster:
    """A connection to a Ray cluster."""

    def __init__(self, ray: ModuleType, spec: ClusterSpec) -> None:
        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        cores = sum(int(node.get("CPU", 0)) for node in nodes)
        capacity = gpus or sum(int(node.get("CPU", 0)) // spec.threads for node in nodes)
        n_requested = capacity if spec.workers is None else spec.workers
        if capacity < 1 or n_requested > capacity:
            raise EngineError(
                f"threads: got {spec.threads}, but no node has that many cores; use fewer threads"
                if capacity < 1
                else f"--workers: got {n_requested}, but the cluster has {gpus} GPUs and {cores} CPU cores, room for "
                f"{capacity} workers of {spec.threads} threads; use {capacity} or fewer, or fewer threads"
            )
        self._worker_resources = {"num_cpus": spec.threads} | ({"num_gpus": 1} if gpus else {})
        n_minimum = 1 if spec.workers is None else spec.workers
        deadline = time.monotonic() + TIMEOUT_SECONDS  # other users may release resources
        while True:
            resources: dict[str, float] = ray.available_resources()
            free = int(resources.get("CPU", 0)) // spec.threads
            if gpus:
                free = min(free, int(resources.get("GPU", 0)))
            if free >= n_minimum:
                break
            if time.monotonic() > deadline:
                raise EngineError(
                    f"--ray: the cluster has room for {free} workers now, expected {n_minimum}; its cores or "
                    "GPUs are in use: reduce --workers, or retry later with --resume"
                )
            time.sleep(POLL_SECONDS)
        self.workers = min(n_requested, free)

    def put(self, value: Any) -> Any:
        """Put a value into the object store, and return the reference."""
        return self._ray.put(value)

    def actors(self, actor_class: type, *arguments: Any) -> list[Any]:
        """Create one actor per worker; a dead one is restarted with the same arguments."""
        remote = self._ray.remote(actor_class).options(
            **self._worker_resources, max_restarts=-1, max_task_retries=RETRIES
        )
        return [remote.remote(*arguments) for _ in range(self.workers)]

    def tasks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Submit the same call once per worker, and return references; a call whose worker dies is retried."""
        remote = self._ray.remote(_from_directory).options(**self._worker_resources, max_retries=RETRIES)
        return [remote.remote(os.getcwd(), function, *arguments) for _ in range(self.workers)]

    def done(self, references: Sequence[Any], seconds: float) -> bool:
        """Wait up to `seconds` for all references, raise the first error, and return whether all have ended."""
        ended, left = self._ray.wait(list(references), num_returns=len(references), timeout=seconds)
        for reference in ended:
            self.result(reference)
        return not left

    def result(self, reference: Any) -> Any:
        """Return the result of a job, and raise its error."""
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
                f"--ray: workers died {RETRIES + 1} times on the same job: {reason}; if memory ran out, lower "
                "model.batch_tokens or shard_rows, then resume with --resume; finished shards are kept"
            ) from err

    def distribute(
        self,
        actors: Sequence[Any],
        jobs: Iterable[tuple[int, Any]],
        call: Callable[[Any, Any], Any],
        wait: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield results of numbered jobs as they finish; at most `JOBS_PER_WORKER` per actor are in flight.

        Args:
            call: submits a job to an actor, and returns the reference.
            wait: no further job is submitted while this returns True and another is in flight.
        """
        free = deque(actor for _ in range(JOBS_PER_WORKER) for actor in actors)  # free slots of actors
        running: dict[Any, _Run] = {}

        def ended() -> Iterator[tuple[int, Any]]:
            """Wait for a job, and yield its result; if its node was lost, resubmit it to another worker."""
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
    """A job in flight."""

    k: int
    job: Any
    actor: Any  # whose slot it has; after a loss another actor runs it
    losses: int = 0


@contextmanager
def connected(spec: ClusterSpec) -> Iterator[Cluster]:
    """Connect to the cluster of `spec`, or start one that ends with the block."""
    ray = require("ray", extra="ray", feature="--ray")
    is_own_cluster = not ray.is_initialized()
    if is_own_cluster:
        init_options: dict[str, Any] = {"address": spec.address}
        if spec.address is None:  # a local cluster; allow two workers on any machine
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
            problem, reason = "--ray: no cluster could be started on this machine", " ".join(str(err).split())
            hint = ""
            if spec.address is not None:
                problem = f"--ray: no Ray cluster at {spec.address!r}"
                hint = "; start one with `ray start --head`, or use --ray local for this machine"
            raise EngineError(f"{problem}: {reason[:200]}{hint}") from err
    try:
        yield Cluster(ray, spec)
    finally:
        if is_own_cluster:
            ray.shutdown()


def _from_directory(directory: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in the user's working directory."""
    enter(directory)
    return function(*arguments)


def enter(directory: str) -> None:
    """Change to the user's working directory, if this node has it, so that relative paths resolve alike."""
    if os.path.isdir(directory):
        os.chdir(directory)
