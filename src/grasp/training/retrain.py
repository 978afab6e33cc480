"""Retraining: corpus, units, family, recipe and seeds -> an environment, one run at a time, by any number of workers.

Everything is decided before the first run and written down; after that a worker leases runs, trains, scores, writes
and leases again until none is left. A kill costs the runs in flight and nothing else.

    <out>/run.yaml       the settings
    <out>/tokenizer/     where it was trained on the corpus
    <out>/tokens/        the rows
    <out>/reference/     the models of the whole corpus, one a seed, with intermediate checkpoints
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from transformers.utils import logging as hf_logging

from grasp.corpus import RowStore
from grasp.errors import GraspError, ModelError, SettingsError
from grasp.extract.cluster import ClusterSpec, connected
from grasp.models.device import device_of
from grasp.models.unit_loss import evaluate_units
from grasp.predict.protocol import geometry
from grasp.runs.environment import FULL, Environment, Run, forget_failures, mark_failed, refuse_all_failed
from grasp.settings import RetrainSettings
from grasp.store.locks import held
from grasp.targets.units import UnitTokens
from grasp.text import duration_text
from grasp.training.command import command_words, job_line, job_of, utility_by_command
from grasp.training.plan import (
    checked_tokens,
    fitted_lengths,
    kept_steps,
    prepare,
    recorded_targets,
    resolved_recipe,
    row_names,
    tokenizer_of,
)
from grasp.training.train import train, train_stacked

POLL_SECONDS = 2.0
TIMED_STEPS = 5


@dataclass(frozen=True, slots=True)
class RetrainStatus:
    """What is known while an environment fills."""

    stage: str  # "rows", "tokenizer", "runs", "cost"
    done: int = 0  # runs with a result
    total: int = 0
    running: tuple[str, ...] = ()  # of this worker
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None  # from the runs that ended since this call began
    cost: "RetrainCost | None" = None  # told once, after the first steps


@dataclass(frozen=True, slots=True)
class RetrainCost:
    """What is left to train, by the first steps of the first run."""

    runs: int  # without a result yet
    steps: int  # of each
    seconds_a_step: float  # of one model
    workers: int
    subsets: int  # of the environment, with those that have results

    @property
    def seconds_a_run(self) -> float:
        """Seconds of training of one run; scoring its units is a forward pass more."""
        return self.steps * self.seconds_a_step

    @property
    def seconds(self) -> float:
        """Of all runs, shared out."""
        return self.runs * self.seconds_a_run / self.workers

    def __str__(self) -> str:
        share = "" if self.workers == 1 else f" with {self.workers} workers"
        run, whole = duration_text(self.seconds_a_run), duration_text(self.seconds)
        return (
            f"{self.runs:,} runs of {self.steps:,} steps; by its first steps {run} a run, {whole} for all{share}; "
            f"stop at any time, the same command goes on\n{geometry().evidence(self.subsets)}"
        )


Progress = Callable[[RetrainStatus], None]


def retrain(
    settings: RetrainSettings,
    out: Path,
    progress: Progress | None = None,
    *,
    cluster: ClusterSpec | None = None,
    jobs: Callable[[str], None] | None = None,
) -> Environment:
    """Make an environment, or go on with one, until all of its runs are there.

    Several calls, from several machines that share `out`, fill it together. Seeds and subsets may be added to what was
    begun; nothing else may change.

    Args:
        progress: told of every stage, and of every step of the runs of this process.
        cluster: spread the runs over a Ray cluster, whose nodes must all reach `out`; none: over processes here.
        jobs: told a shell line for each run of the train command instead, once the checkpoints that such lines have
            left are scored.
    Raises:
        GraspError: bad input, named, before anything is trained; a run that diverged; another environment in `out`;
            a train command of which every run failed. No finished run is lost.
    """
    report = progress or _silent
    if jobs is not None and settings.train_command is None:
        raise SettingsError("print_jobs: only a train command has jobs; give one (--train-command), or leave it out")
    settings = fitted_lengths(settings)
    environment = prepare(settings, out, lambda stage: report(RetrainStatus(stage)))
    forget_failures(out)
    if jobs is not None:
        hand_out(settings, environment, jobs)
    elif cluster is not None:
        _fill_on_cluster(settings, environment, cluster, report)
    elif settings.workers in (None, 1):
        fill(settings, out, report)
    else:
        _fill_with_workers(settings, settings.workers, environment, report)
    refuse_all_failed(out, len(environment.runs()))
    return Environment.open(out)


def fill(settings: RetrainSettings, out: Path, progress: Progress) -> None:
    """Work on the runs of a prepared environment until none is left to try, then merge them if all are there."""
    worker = Worker(settings, Environment.open(out))
    clock, first = _Clock(worker.environment), _FirstSteps(worker, progress)
    while pending := worker.environment.untried():
        claims = worker.environment.claim(settings.stack, ttl=settings.lease_seconds)
        if not claims:
            progress(clock.status(len(pending), (), 0, 0))
            time.sleep(POLL_SECONDS)  # others hold the rest; one of them may die
            continue
        runs = tuple(claims)

        def step_done(step: int, runs: tuple[Run, ...] = runs, left: int = len(pending)) -> None:
            stems = tuple(run.stem for run in runs)
            progress(clock.status(left, stems, step, 0 if settings.train_command else worker.recipe.steps))
            first.step(step, models=len(runs), left=left)

        with held(list(claims.values()), ttl=settings.lease_seconds):
            if settings.train_command is None:
                for run, utility_E in zip(runs, worker.utilities(runs, step_done), strict=True):
                    worker.environment.write_run(run, utility_E)
            else:
                step_done(0)
                worker.by_command(runs[0], settings.train_command)
    left = len(worker.environment.pending())
    if not left:
        worker.environment.compact()
    progress(clock.status(left, (), 0, 0))


def hand_out(settings: RetrainSettings, environment: Environment, jobs: Callable[[str], None]) -> None:
    """Score what earlier jobs have left, and tell the shell lines of the runs without a result."""
    assert settings.train_command is not None
    worker, words = Worker(settings, environment), command_words(settings.train_command)
    for run in environment.pending():
        if (job_of(run, environment.path) / "checkpoint").exists():
            worker.by_command(run, settings.train_command)
    for run in environment.pending():
        jobs(job_line(words, run, worker.weights(run), environment.path))
    if not environment.pending():
        environment.compact()


class Worker:
    """What one process needs to run runs."""

    def __init__(self, settings: RetrainSettings, environment: Environment) -> None:
        self.settings = settings
        self.environment = environment
        self.recipe = resolved_recipe(settings)
        self.device = str(device_of(settings.device))
        hf_logging.disable_progress_bar()
        torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // (settings.workers or 1)))
        self.store = RowStore.open(environment.path / "tokens")
        self.tokenizer = tokenizer_of(settings, self.recipe, environment.path)
        environment.check_corpus(self.store.fingerprint, str(environment.path / "tokens"))

    @cached_property
    def tokens(self) -> list[UnitTokens]:
        """Units of every target and loss, in the order of the environment."""
        return checked_tokens(
            self.settings, self.recipe, self.tokenizer, recorded_targets(self.settings, self.tokenizer)
        )

    @cached_property
    def subsets(self) -> dict[str, csr_array]:
        """Weights of the rows of every subset, (1, N)."""
        return {
            name: block.weights_BN[[b]]
            for block in self.environment.subset_blocks(row_names(self.store))
            for b, name in enumerate(block.subset_ids)
        }

    def weights(self, run: Run) -> NDArray[np.float64]:
        """How often each row is trained on, (N,)."""
        return np.ones(self.store.n_rows) if run.subset_id == FULL else self.subsets[run.subset_id].toarray()[0]

    def utilities(self, runs: Sequence[Run], progress: Callable[[int], None]) -> list[NDArray[np.float64]]:
        """Train the models of `runs` and score them: -loss of every unit, (E,) each.

        Raises:
            ModelError: a run diverged; the message names the runs.
        """
        try:
            if runs[0].subset_id == FULL:
                return [-self._reference_losses(runs[0].seed, progress)]
            trainer = train_stacked(
                self.recipe,
                self.store,
                seeds=[run.seed for run in runs],
                retained=[self.weights(run) for run in runs],
                device=self.device,
                progress=progress,
            )
            return list(-trainer.model.unit_losses(self.tokens))
        except ModelError as err:
            raise ModelError(f"{self.environment.path}: runs {[run.stem for run in runs]}: {err}") from err

    def by_command(self, run: Run, command: str) -> None:
        """Train one run by the user's command and keep its result, or why there is none."""
        try:
            utility_E = utility_by_command(
                command_words(command),
                run,
                self.weights(run),
                self.environment.path,
                self.tokenizer,
                self.tokens,
                self.device,
            )
            self.environment.write_run(run, utility_E)
        except GraspError as err:
            mark_failed(self.environment.path, run, str(err))

    def _reference_losses(self, seed: int, progress: Callable[[int], None]) -> NDArray[np.float64]:
        trained = train(
            self.recipe,
            self.store,
            seed=seed,
            tokenizer=self.tokenizer,
            out=self.environment.path / "reference" / f"seed-{seed}",
            checkpoints=kept_steps(self.settings, self.recipe),
            device=self.device,
            progress=progress,
        )
        return evaluate_units(trained.model.to(self.device), self.tokens)


# ------------------------------------------------------------------------------------------- workers


def _fill_with_workers(settings: RetrainSettings, workers: int, environment: Environment, progress: Progress) -> None:
    """Fill from several processes; the first error of any of them is raised here."""
    clock = _Clock(environment)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(fill, settings, environment.path, _silent) for _ in range(workers)]
        while not all(future.done() for future in futures):
            progress(clock.status(len(environment.pending()), (), 0, 0))
            time.sleep(POLL_SECONDS)
        for future in futures:
            future.result()


def _fill_on_cluster(
    settings: RetrainSettings, environment: Environment, spec: ClusterSpec, progress: Progress
) -> None:
    """Fill from the workers of a cluster. The runs of one that dies are taken over when their leases end."""
    clock = _Clock(environment)
    threads = settings.threads or spec.threads
    spec = replace(spec, workers=spec.workers or settings.workers, threads=threads)
    with connected(spec) as cluster:
        tasks = cluster.tasks(
            fill, settings.model_copy(update={"threads": threads}), environment.path.resolve(), _silent
        )
        while not cluster.done(tasks, POLL_SECONDS):
            progress(clock.status(len(environment.pending()), (), 0, 0))
    progress(clock.status(len(environment.pending()), (), 0, 0))


class _FirstSteps:
    """Tells once what all runs will cost, by the first steps of real work; the very first pays for what comes once."""

    def __init__(self, worker: Worker, progress: Progress) -> None:
        self._worker = worker
        self._progress: Progress | None = None if worker.settings.train_command else progress
        self._begun: tuple[int, float] | None = None

    def step(self, step: int, *, models: int, left: int) -> None:
        """One more step of so many models is done; so many runs have no result."""
        if self._progress is None:
            return
        steps, settings = self._worker.recipe.steps, self._worker.settings
        is_first = self._begun is None or step <= self._begun[0]
        if self._begun is not None and not is_first and step < min(self._begun[0] + TIMED_STEPS, steps):
            return
        if torch.device(self._worker.device).type == "cuda":
            torch.cuda.synchronize()  # a step is queued, not done
        now = time.perf_counter()
        if self._begun is None or is_first:
            self._begun = step, now
        else:
            seconds = (now - self._begun[1]) / (step - self._begun[0]) / models
            subsets = len(self._worker.environment.subset_ids)
            cost = RetrainCost(left, steps, seconds, settings.workers or 1, subsets)
            self._progress(RetrainStatus("cost", cost=cost))
            self._progress = None


class _Clock:
    """Time left, from the runs that ended since it was started."""

    def __init__(self, environment: Environment) -> None:
        self._total = len(environment.runs())
        self._left_before = len(environment.pending())
        self._began = time.monotonic()

    def status(self, left: int, running: tuple[str, ...], step: int, steps: int) -> RetrainStatus:
        # runs under way count by the share of their steps that is done
        partly = len(running) * step / steps if steps else 0.0
        ended = self._left_before - left + partly
        elapsed = time.monotonic() - self._began
        seconds_left = elapsed / ended * (left - partly) if ended > 0 else None
        return RetrainStatus("runs", self._total - left, self._total, running, step, steps, seconds_left)


def _silent(_: RetrainStatus) -> None:
    return
