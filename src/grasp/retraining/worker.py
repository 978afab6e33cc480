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
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_array
from transformers.utils import logging as hf_logging

from grasp.arrays import F64
from grasp.build.ray_cluster import ClusterSpec, connected
from grasp.corpus import RowStore
from grasp.errors import GraspError, ModelError, SettingsError
from grasp.models.checkpoint import device_of
from grasp.models.unit_loss import evaluate_units
from grasp.predict.scoring_rule import geometry
from grasp.retraining.plan import (
    fitted_lengths,
    prepare,
    recorded_units,
    resolved_recipe,
    row_names,
    tokenizer_of,
)
from grasp.retraining.train_command import command_words, job_line, job_of, utility_by_command
from grasp.runs.retrained import FULL, RetrainedRuns, Run
from grasp.settings import RetrainSettings
from grasp.store.locks import held
from grasp.targets.units import UnitTokens
from grasp.text import duration_text
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
    cost: str | None = None  # what is left to train, told once, after the first steps


Progress = Callable[[RetrainStatus], None]


def retrain(
    settings: RetrainSettings,
    out: Path,
    progress: Progress | None = None,
    *,
    cluster: ClusterSpec | None = None,
    jobs: Callable[[str], None] | None = None,
) -> RetrainedRuns:
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
    environment.forget_failures()
    clock = _Clock(environment)
    if jobs is not None:
        assert settings.train_command is not None
        worker, words = Worker(settings, environment), command_words(settings.train_command)
        for run in environment.pending():
            if (job_of(run, environment.path) / "checkpoint").exists():
                worker.by_command(run, words)
        for run in environment.pending():
            jobs(job_line(words, run, worker.weights(run), environment.path))
        if not environment.pending():
            environment.compact()
    elif cluster is not None:  # the runs of a worker that dies are taken over when their leases end
        threads = settings.threads or cluster.threads
        cluster = replace(cluster, workers=cluster.workers or settings.workers, threads=threads)
        settings = settings.model_copy(update={"threads": threads})
        with connected(cluster) as connection:
            tasks = connection.tasks(fill, settings, environment.path.resolve(), _silent)
            while not connection.done(tasks, POLL_SECONDS):
                report(clock.status(len(environment.pending())))
        report(clock.status(len(environment.pending())))
    elif (workers := settings.workers or 1) == 1:
        fill(settings, out, report)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(fill, settings, environment.path, _silent) for _ in range(workers)]
            while not all(future.done() for future in futures):
                report(clock.status(len(environment.pending())))
                time.sleep(POLL_SECONDS)
            for future in futures:
                future.result()  # the first error of any of them is raised here
    environment.refuse_all_failed()
    return RetrainedRuns.open(out)


def fill(settings: RetrainSettings, out: Path, progress: Progress) -> None:
    """Work on the runs of a prepared environment until none is left to try, then merge them if all are there."""
    worker = Worker(settings, RetrainedRuns.open(out))
    environment, steps = worker.environment, 0 if settings.train_command else worker.recipe.steps
    words = command_words(settings.train_command) if settings.train_command else None
    clock = _Clock(environment)
    begun: tuple[int, float] | None = None  # step and time from which the cost of all runs is taken
    is_told = words is not None

    def step_done(step: int, runs: tuple[Run, ...], left: int) -> None:
        nonlocal begun, is_told
        progress(clock.status(left, tuple(run.stem for run in runs), step, steps))
        if is_told or (begun is not None and begun[0] < step < min(begun[0] + TIMED_STEPS, steps)):
            return
        if torch.device(worker.device).type == "cuda":
            torch.cuda.synchronize()  # a step is queued, not done
        if begun is None or step <= begun[0]:
            begun = step, time.perf_counter()  # the very first step pays for what comes once
            return
        of_run = steps * ((time.perf_counter() - begun[1]) / (step - begun[0]) / len(runs))
        workers = settings.workers or 1
        together = "" if workers == 1 else f" with {workers} workers"
        said = (
            f"{left:,} runs of {steps:,} steps; by its first steps {duration_text(of_run)} a run, "
            f"{duration_text(left * of_run / workers)} for all{together}; stop at any time, the same command goes on\n"
            f"{geometry().calibration_evidence(len(environment.subset_ids))}"
        )
        progress(RetrainStatus("cost", cost=said))
        is_told = True

    while pending := environment.untried():
        claims = environment.claim(settings.stack, ttl=settings.lease_seconds)
        if not claims:
            progress(clock.status(len(pending)))
            time.sleep(POLL_SECONDS)  # others hold the rest; one of them may die
            continue
        runs = tuple(claims)
        with held(list(claims.values()), ttl=settings.lease_seconds):
            if words is None:
                utilities = worker.utilities(runs, partial(step_done, runs=runs, left=len(pending)))
                for run, utility_E in zip(runs, utilities, strict=True):
                    environment.write_run(run, utility_E)
            else:
                step_done(0, runs, len(pending))
                worker.by_command(runs[0], words)
    left = len(environment.pending())
    if not left:
        environment.compact()
    progress(clock.status(left))


class Worker:
    """What one process needs to run runs."""

    def __init__(self, settings: RetrainSettings, environment: RetrainedRuns) -> None:
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
        return recorded_units(self.settings, self.recipe, self.tokenizer)[1]

    @cached_property
    def subsets(self) -> dict[str, csr_array]:
        """Weights of the rows of every subset, (1, N)."""
        return {
            name: block.weights_BN[[b]]
            for block in self.environment.subset_blocks(row_names(self.store))
            for b, name in enumerate(block.subset_ids)
        }

    def weights(self, run: Run) -> F64:
        """How often each row is trained on, (N,)."""
        return np.ones(self.store.n_rows) if run.subset_id == FULL else self.subsets[run.subset_id].toarray()[0]

    def utilities(self, runs: Sequence[Run], progress: Callable[[int], None]) -> list[F64]:
        """Train the models of `runs` and score them: -loss of every unit, (E,) each.

        The model of the whole corpus is kept, with checkpoints. A run that diverged is an error that names the runs.
        """
        seeds, kept = [run.seed for run in runs], self.settings.checkpoints
        if kept is None:
            kept = tuple(sorted({step for eighth in (1, 3, 5, 7) if (step := self.recipe.steps * eighth // 8) >= 1}))
        try:
            if runs[0].subset_id == FULL:
                trained = train(
                    self.recipe,
                    self.store,
                    seed=seeds[0],
                    tokenizer=self.tokenizer,
                    out=self.environment.path / "reference" / f"seed-{seeds[0]}",
                    checkpoints=kept,
                    device=self.device,
                    progress=progress,
                )
                return [-evaluate_units(trained.model.to(self.device), self.tokens)]
            trainer = train_stacked(
                self.recipe,
                self.store,
                seeds=seeds,
                retained=[self.weights(run) for run in runs],
                device=self.device,
                progress=progress,
            )
            return list(-trainer.model.unit_losses(self.tokens))
        except ModelError as err:
            raise ModelError(f"{self.environment.path}: runs {[run.stem for run in runs]}: {err}") from err

    def by_command(self, run: Run, words: Sequence[str]) -> None:
        """Train one run by the user's command and keep its result, or why there is none."""
        place = self.environment.path
        try:
            weight_N = self.weights(run)
            utility_E = utility_by_command(words, run, weight_N, place, self.tokenizer, self.tokens, self.device)
            self.environment.write_run(run, utility_E)
        except GraspError as err:
            self.environment.mark_failed(run, str(err))


class _Clock:
    """Time left, from the runs that ended since it was started."""

    def __init__(self, environment: RetrainedRuns) -> None:
        self._total = len(environment.runs())
        self._left_before = len(environment.pending())
        self._began = time.monotonic()

    def status(self, left: int, running: tuple[str, ...] = (), step: int = 0, steps: int = 0) -> RetrainStatus:
        # runs under way count by the share of their steps that is done
        partly = len(running) * step / steps if steps else 0.0
        ended = self._left_before - left + partly
        elapsed = time.monotonic() - self._began
        seconds_left = elapsed / ended * (left - partly) if ended > 0 else None
        return RetrainStatus("runs", self._total - left, self._total, running, step, steps, seconds_left)


def _silent(_: RetrainStatus) -> None:
    return
