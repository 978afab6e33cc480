"""Train and score the runs of a retraining with any number of workers.

`plan.prepare` writes all inputs before the first run. A worker then repeats: lease a run, train, score, write the
result, until no run is left. If a worker is killed, only its current runs are lost.

    <out>/run.yaml       settings
    <out>/tokenizer/     the tokenizer, if it was trained on the corpus
    <out>/tokens/        rows
    <out>/reference/     models trained on the whole corpus, one per seed, with intermediate checkpoints

Start with `retrain`.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_array
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from grasp.arrays import F64
from grasp.corpus import RowStore
from grasp.errors import ModelError
from grasp.files import atomic_path, discard
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import device_of
from grasp.models.unit_loss import evaluate_units
from grasp.pipeline.ray_cluster import ClusterSpec, connected
from grasp.pipeline.replay_plan import make_trainable
from grasp.progress import RetrainStatus
from grasp.retraining.plan import (
    Report,
    fine_tuning_recipe,
    fitted_lengths,
    prepare,
    recorded_units,
    resolved_recipe,
    row_names,
    tokenizer_of,
)
from grasp.retraining.settings import RetrainSettings
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import WHOLE_CORPUS_RUN, Run
from grasp.store.locks import keep_renewed
from grasp.targets.units import UnitTokens
from grasp.text import duration_text
from grasp.training.further_training import FurtherTraining
from grasp.training.train import train

POLL_SECONDS = 2.0  # between checks whether other workers have finished
TIMED_STEPS = 5  # number of steps whose time gives the estimate of the cost


def retrain(
    settings: RetrainSettings,
    out: Path,
    progress: Report | None = None,
    *,
    cluster: ClusterSpec | None = None,
) -> RetrainedRuns:
    """Train and score all runs, or resume a retraining, and return its runs.

    Several calls, also on different machines that share `out`, divide the runs among them. A retraining can be resumed
    with more seeds or subsets; other settings must be the same.

    Args:
        progress: callback that receives the status at every stage and every step of this process.
        cluster: Ray cluster whose nodes share `out`. Default: processes on this machine.
    Raises:
        GraspError: settings are invalid (before any training); a run diverged; or `out` has a retraining with other
            settings. Finished runs are never lost.
    """
    report = progress or (lambda _: None)
    settings = fitted_lengths(settings)
    if settings.train == "further" and (notes := fine_tuning_recipe(settings).notes):
        report(RetrainStatus("recipe", note="\n".join(notes)))
    retrained = prepare(settings, out, report)
    clock = _Clock(retrained)
    if cluster is not None:  # runs of a worker that dies are taken over when their leases expire
        threads = settings.threads or cluster.threads
        cluster = replace(cluster, workers=cluster.workers or settings.workers, threads=threads)
        settings = settings.model_copy(update={"threads": threads})
        with connected(cluster) as connection:
            tasks = connection.tasks(fill, settings, retrained.path.resolve())
            while not connection.done(tasks, POLL_SECONDS):
                report(clock.status(len(retrained.pending())))
        report(clock.status(len(retrained.pending())))
    elif (workers := settings.workers or 1) == 1:
        fill(settings, out, report)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(fill, settings, retrained.path) for _ in range(workers)]
            while not all(future.done() for future in futures):
                report(clock.status(len(retrained.pending())))
                time.sleep(POLL_SECONDS)
            for future in futures:
                future.result()  # raises the first error of a worker
    return RetrainedRuns.open(out)


def fill(settings: RetrainSettings, out: Path, progress: Report | None = None) -> None:
    """Train and score runs of a prepared directory until none is left, then merge the results if all are complete."""
    report = progress or (lambda _: None)
    worker = Worker(settings, RetrainedRuns.open(out))
    retrained = worker.retrained
    if settings.train == "further":
        steps = fine_tuning_recipe(settings).steps(worker.store.n_rows)
    else:
        steps = worker.recipe.steps
    clock = _Clock(retrained)
    times: list[float] = []  # ends of the first steps, the first of which includes one-time costs

    def step_done(step: int, run: Run, left: int) -> None:
        report(clock.status(left, run.stem, step, steps))
        if len(times) > min(TIMED_STEPS, steps - 1):
            return
        if torch.device(worker.device).type == "cuda":
            torch.cuda.synchronize()  # kernels are asynchronous
        times.append(time.perf_counter())
        if len(times) < 2 or len(times) <= min(TIMED_STEPS, steps - 1):
            return
        run_seconds = steps * (times[-1] - times[0]) / (len(times) - 1)
        workers = settings.workers or 1
        with_workers = "" if workers == 1 else f" with {workers} workers"
        cost = (
            f"{left:,} runs of {steps:,} steps; estimated from the first steps: {duration_text(run_seconds)} per run, "
            f"{duration_text(left * run_seconds / workers)} in total{with_workers}; run the same command to resume"
        )
        report(RetrainStatus("cost", note=cost))

    while pending := retrained.pending():
        claim = retrained.claim(ttl=settings.lease_seconds)
        if claim is None:
            report(clock.status(len(pending)))
            time.sleep(POLL_SECONDS)  # other workers hold the remaining runs; one of them may die
            continue
        run, lease = claim
        with keep_renewed([lease], ttl=settings.lease_seconds):
            retrained.write_run(run, worker.utility(run, partial(step_done, run=run, left=len(pending))))
    left = len(retrained.pending())
    if not left:
        retrained.compact()
    report(clock.status(left))


class Worker:
    """The model, rows and units with which one process trains and scores runs."""

    def __init__(self, settings: RetrainSettings, retrained: RetrainedRuns) -> None:
        self.settings = settings
        self.retrained = retrained
        self.recipe = resolved_recipe(settings)
        self.device = str(device_of(settings.device))
        hf_logging.disable_progress_bar()
        cores = int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1
        torch.set_num_threads(settings.threads or max(1, cores // (settings.workers or 1)))
        self.store = RowStore.open(retrained.path / "tokens")
        self.tokenizer = tokenizer_of(settings, self.recipe, retrained.path)
        retrained.check_corpus(self.store.fingerprint, str(retrained.path / "tokens"))

    @cached_property
    def tokens(self) -> list[UnitTokens]:
        """Return the tokens of the units of every target and loss, in the order of the results."""
        return recorded_units(self.settings, self.recipe, self.tokenizer)[1]

    @cached_property
    def subsets(self) -> dict[str, csr_array]:
        """Return the row weights of every subset, (1, N), by name."""
        return {
            name: block.weights_BN[[b]]
            for block in self.retrained.subset_blocks(row_names(self.store))
            for b, name in enumerate(block.subset_ids)
        }

    def utility(self, run: Run, progress: Callable[[int], None]) -> F64:
        """Train the model of a run, and return the utility (-loss, nats per token) of every unit, (E,).

        The model of the whole corpus is saved, with intermediate checkpoints.

        Raises:
            ModelError: the run diverged.
        """
        is_whole, is_further = run.subset_id == WHOLE_CORPUS_RUN, self.settings.train == "further"
        reference = self.retrained.path / "reference" / f"seed-{run.seed}"
        weight_N = np.ones(self.store.n_rows) if is_whole else self.subsets[run.subset_id].toarray()[0]
        model: PreTrainedModel
        try:
            if is_further:
                model = self._further.train(weight_N, run.seed, progress)
            else:
                checkpoints = self.settings.checkpoints
                if checkpoints is None:
                    checkpoints = tuple(sorted({self.recipe.steps * eighth // 8 for eighth in (1, 3, 5, 7)} - {0}))
                model = train(
                    self.recipe,
                    self.store,
                    seed=run.seed,
                    retained=None if is_whole else weight_N,
                    tokenizer=self.tokenizer,
                    out=reference if is_whole else None,
                    checkpoints=checkpoints if is_whole else (),
                    device=self.device,
                    progress=progress,
                ).model
            utility_E: F64 = -evaluate_units(model, self.tokens)
        except ModelError as err:
            raise ModelError(f"{self.retrained.path}: run {run.stem}: {err}") from err
        if is_whole and is_further:
            discard(reference)
            reference.parent.mkdir(exist_ok=True)
            with atomic_path(reference) as part:
                model.save_pretrained(part)
                self.tokenizer.tokenizer.save_pretrained(part)
        return utility_E

    @cached_property
    def _further(self) -> FurtherTraining:
        """Return the training from the model of the settings."""
        assert self.settings.model is not None
        overrides = {"device": self.device, "dtype": "float32", "check": False}
        reader = ReferenceModel.load(self.settings.model.model_copy(update=overrides))
        recipe = fine_tuning_recipe(self.settings)
        model, _ = make_trainable(reader.model, reader.frozen, recipe, seed=0)
        return FurtherTraining(model, recipe, self.store)


class _Clock:
    """Estimate of the time left, from the runs that finished since the clock was started."""

    def __init__(self, retrained: RetrainedRuns) -> None:
        self._total = len(retrained.runs())
        self._left_before = len(retrained.pending())
        self._started_at = time.monotonic()

    def status(self, left: int, running: str = "", step: int = 0, steps: int = 0) -> RetrainStatus:
        # the current run counts by its share of finished steps
        partial = step / steps if running and steps else 0.0
        finished = self._left_before - left + partial
        elapsed = time.monotonic() - self._started_at
        seconds_left = elapsed / finished * (left - partial) if finished > 0 else None
        return RetrainStatus("runs", self._total - left, self._total, running, step, steps, seconds_left)
