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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

import grasp
from grasp.corpus import RowStore, read_documents
from grasp.errors import CorpusError, EnvironmentDataError, ModelError, SettingsError, SubsetError
from grasp.extract.cluster import ClusterSpec, connected
from grasp.files import held, one_at_a_time, own_directory, written_aside
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.predict.blocks import SubsetBlock
from grasp.predict.families import parse_family
from grasp.predict.labels import LabelColumn
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.runs.environment import ALL_SUFFIX, MARKER, Environment, is_environment
from grasp.runs.environment_info import EnvironmentInfo, FamilyInfo, TargetInfo
from grasp.runs.evaluate import target_fingerprint
from grasp.runs.evidence import evidence
from grasp.runs.finished_runs import FULL, Run
from grasp.runs.recipe import TrainingRecipe, named_recipe, train
from grasp.runs.stacked import train_stacked
from grasp.settings import RetrainSettings, describe, write_yaml
from grasp.targets import Unit, UnitSet, load_units
from grasp.targets.units import UnitTokens

PURPOSE = "evaluation"  # the stream of the evaluation family; calibration families have another
SHARD_ROWS = 4096
TOKENIZER_CHARS = 50_000_000  # of the corpus, from its beginning; more teaches a small vocabulary nothing
POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RetrainStatus:
    """What is known while an environment fills."""

    stage: str  # "rows", "tokenizer", "cost", "runs"
    done: int = 0  # runs with a result
    total: int = 0
    running: tuple[str, ...] = ()  # of this worker
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None  # from the runs that ended since this call began
    cost: "Cost | None" = None  # told once, before the first run


@dataclass(frozen=True, slots=True)
class Cost:
    """What is left to train, from one optimizer step that was timed."""

    runs: int  # without a result yet
    steps: int  # of each
    seconds_a_step: float  # of one model
    workers: int
    subsets: int  # of the environment, with those that have results

    @property
    def seconds_a_run(self) -> float:
        """Without the scoring of the units, which is a forward pass."""
        return self.steps * self.seconds_a_step

    @property
    def seconds(self) -> float:
        """Of all runs, shared out."""
        return self.runs * self.seconds_a_run / self.workers

    def __str__(self) -> str:
        share = "" if self.workers == 1 else f" with {self.workers} workers"
        return (
            f"{self.runs:,} runs of {self.steps:,} steps; one step was timed: {span(self.seconds_a_run)} a run, "
            f"{span(self.seconds)} for all{share}; stop at any time, the same command goes on\n{evidence(self.subsets)}"
        )


def span(seconds: float) -> str:
    """A length of time in words, to two figures."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{1 if seconds < 9.95 * size else 0}f} {unit}"
    whole = max(1, round(seconds))
    return f"{whole} second{'s' * (whole > 1)}"


Progress = Callable[[RetrainStatus], None]


def retrain(
    settings: RetrainSettings, out: Path, progress: Progress | None = None, *, cluster: ClusterSpec | None = None
) -> Environment:
    """Make an environment, or go on with one, until all of its runs are there.

    Several calls, from several machines that share `out`, fill it together. Seeds and subsets may be added to what was
    begun; nothing else may change.

    Args:
        progress: told of every stage, and of every step of the runs of this process.
        cluster: spread the runs over a Ray cluster, whose nodes must all reach `out`; none: over processes here.
    Raises:
        GraspError: bad input, named, before anything is trained; a run that diverged; another environment in `out`.
            No finished run is lost.
    """
    report = progress or _silent
    settings = fitted_lengths(settings)
    environment = prepare(settings, out, report)
    if progress is not None and cluster is None and environment.pending():
        progress(RetrainStatus("cost", cost=cost_of(settings, environment)))
    if cluster is not None:
        _fill_on_cluster(settings, environment, cluster, report)
    elif settings.workers in (None, 1):
        fill(settings, out, report)
    else:
        _fill_with_workers(settings, settings.workers, environment, report)
    return Environment.open(out)


def prepare(settings: RetrainSettings, out: Path, progress: Progress) -> Environment:
    """Rows, units and subsets, checked and written down; a second worker waits for the first here."""
    recipe = resolved_recipe(settings)
    own_directory(out, MARKER, is_environment)
    with one_at_a_time(out / MARKER):
        tokenizer = _tokenizer(settings, recipe, out, progress)
        progress(RetrainStatus("rows"))
        store = RowStore.write(out / "tokens", settings.corpus, tokenizer, shard_rows=SHARD_ROWS)
        targets = recorded_targets(settings)
        _checked_tokens(settings, recipe, tokenizer, targets)
        rows = row_index(store)
        blocks = _large_enough(_subsets(settings, store, rows), recipe)
        environment = Environment.create(out, _info(settings, recipe, store, targets), blocks, rows)
        write_yaml(settings.model_dump(mode="json"), out / "run.yaml")
    return environment


def cost_of(settings: RetrainSettings, environment: Environment) -> Cost:
    """Train one step more than one, and time the last: the first pays for what comes only once."""
    worker = Worker(settings, environment)
    recipe = worker.recipe.model_copy(update={"steps": 2, "warmup_steps": 0})
    ends: list[float] = []

    def step_done(_: int) -> None:
        if torch.device(worker.device).type == "cuda":
            torch.cuda.synchronize()  # a step is queued, not done
        ends.append(time.perf_counter())

    seeds = list(range(settings.stack))
    nothing_dropped = [None] * settings.stack
    train_stacked(recipe, worker.store, seeds=seeds, retained=nothing_dropped, device=worker.device, progress=step_done)
    seconds = (ends[1] - ends[0]) / settings.stack
    subsets = len(environment.info.subset_ids)
    return Cost(len(environment.pending()), worker.recipe.steps, seconds, settings.workers or 1, subsets)


def fill(settings: RetrainSettings, out: Path, progress: Progress) -> None:
    """Work on the runs of a prepared environment until none is left, then merge them."""
    worker = Worker(settings, Environment.open(out))
    clock = _Clock(worker.environment)
    while pending := worker.environment.pending():
        claims = worker.environment.claim(settings.stack, ttl=settings.lease_seconds)
        if not claims:
            progress(clock.status(len(pending), (), 0, 0))
            time.sleep(POLL_SECONDS)  # others hold the rest; one of them may die
            continue
        runs = tuple(claims)

        def step_done(step: int, runs: tuple[Run, ...] = runs, left: int = len(pending)) -> None:
            stems = tuple(run.stem for run in runs)
            progress(clock.status(left, stems, step, worker.recipe.steps))

        with held(list(claims.values()), ttl=settings.lease_seconds):
            for run, utility_E in zip(runs, worker.utilities(runs, step_done), strict=True):
                worker.environment.write_run(run, utility_E)
    worker.environment.compact()
    progress(clock.status(0, (), 0, 0))


class Worker:
    """What one process needs to run runs."""

    def __init__(self, settings: RetrainSettings, environment: Environment) -> None:
        self.settings = settings
        self.environment = environment
        self.recipe = resolved_recipe(settings)
        self.device = resolved_device(settings.device)
        hf_logging.disable_progress_bar()
        torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // (settings.workers or 1)))
        self.store = RowStore.open(environment.path / "tokens")
        self.tokenizer = _tokenizer(settings, self.recipe, environment.path, _silent)
        environment.check_corpus(self.store.fingerprint, str(environment.path / "tokens"))

    @cached_property
    def tokens(self) -> list[UnitTokens]:
        """Units of every target and loss, in the order of the environment."""
        return _checked_tokens(self.settings, self.recipe, self.tokenizer, recorded_targets(self.settings))

    @cached_property
    def retained(self) -> dict[str, NDArray[np.int32]]:
        """Rows of every subset."""
        rows = row_index(self.store)
        labels = _labels(parse_family(self.settings.family).label, self.store) if not self.settings.subsets else None
        return {
            name: block.weights_BN[[b]].indices.astype(np.int32)
            for block in self.environment.subset_blocks(rows, labels)
            for b, name in enumerate(block.subset_ids)
        }

    def utilities(self, runs: Sequence[Run], progress: Callable[[int], None]) -> list[NDArray[np.float64]]:
        """Train the models of `runs` and score them: -loss of every unit, (E,) each.

        Raises:
            ModelError: a run diverged; the message names the runs.
        """
        try:
            if runs[0].subset_id == FULL:
                return [-self._reference_losses(runs[0].seed, progress)]
            models = train_stacked(
                self.recipe,
                self.store,
                seeds=[run.seed for run in runs],
                retained=[self._mask(run.subset_id) for run in runs],
                device=self.device,
                progress=progress,
            )
            return list(-models.unit_losses(self.tokens))
        except ModelError as err:
            raise ModelError(f"{self.environment.path}: runs {[run.stem for run in runs]}: {err}") from err

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

    def _mask(self, subset_id: str) -> NDArray[np.bool_]:
        mask_N = np.zeros(self.store.n_rows, dtype=bool)
        mask_N[self.retained[subset_id]] = True
        return mask_N


# ------------------------------------------------------------------------------------- what is trained on


def resolved_recipe(settings: RetrainSettings) -> TrainingRecipe:
    """The recipe with its overrides.

    Raises:
        ModelError: no such recipe.
        SettingsError: an override that does not fit, or rows longer than the recipe reads.
    """
    recipe = _overridden_recipe(settings)
    if (settings.corpus.max_length or 0) > recipe.shape.context:
        raise SettingsError(
            f"corpus.max_length: got {settings.corpus.max_length}, but recipe {recipe.name} reads rows of at most "
            f"{recipe.shape.context} tokens; set corpus.max_length to {recipe.shape.context}"
        )
    return recipe


def fitted_lengths(settings: RetrainSettings) -> RetrainSettings:
    """Rows and units as long as the recipe reads, where the settings do not say how long.

    Raises:
        ModelError: no such recipe.
        SettingsError: an override that does not fit.
    """
    length = {"max_length": _overridden_recipe(settings).shape.context}
    groups = {"corpus": settings.corpus, "targets": settings.targets}
    return settings.model_copy(
        update={
            name: group.model_copy(update=length)
            for name, group in groups.items()
            if "max_length" not in group.model_fields_set or getattr(group, "max_length", None) is None
        }
    )


def _overridden_recipe(settings: RetrainSettings) -> TrainingRecipe:
    named = named_recipe(settings.recipe).model_dump()
    shape = settings.overrides.get("shape", {})
    if not isinstance(shape, dict):
        raise SettingsError(f"overrides.shape: got {shape!r}, expected a group of settings, e.g. {{layers: 2}}")
    try:
        return TrainingRecipe.model_validate(named | settings.overrides | {"shape": named["shape"] | shape})
    except ValidationError as err:
        raise SettingsError(describe(err, "overrides")) from err


def resolved_device(name: str) -> str:
    """`auto` is cuda where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def kept_steps(settings: RetrainSettings, recipe: TrainingRecipe) -> tuple[int, ...]:
    """Steps after which the reference runs are kept."""
    if settings.checkpoints is not None:
        return settings.checkpoints
    return tuple(sorted({step for eighth in (1, 3, 5, 7) if (step := recipe.steps * eighth // 8) >= 1}))


def row_index(store: RowStore) -> RowIndex:
    """Names of the rows of a store."""
    return RowIndex(
        store.n_rows,
        lambda: (store.table(k).column("row_id").combine_chunks() for k in range(store.n_shards)),
    )


def _tokenizer(settings: RetrainSettings, recipe: TrainingRecipe, out: Path, progress: Progress) -> HfTokenizer:
    """The tokenizer that is given, or one trained on the corpus the first time it is asked for."""
    vocab_size = recipe.shape.vocab_size
    directory = Path(settings.tokenizer) if settings.tokenizer else out / "tokenizer"
    if not settings.tokenizer and not directory.exists():
        progress(RetrainStatus("tokenizer"))
        with written_aside(directory) as part:
            train_tokenizer(_texts(settings), vocab_size=vocab_size).save_pretrained(part)
    if not directory.is_dir():
        raise SettingsError(f"tokenizer: got {str(directory)!r}, expected the directory of a tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if len(tokenizer) > vocab_size:
        raise SettingsError(
            f"tokenizer: {directory} has {len(tokenizer)} tokens, recipe {recipe.name} has room for {vocab_size}; "
            f"set overrides.shape.vocab_size to {len(tokenizer)} or more"
        )
    return HfTokenizer(tokenizer, vocab_size=vocab_size)


def _texts(settings: RetrainSettings) -> Iterator[str]:
    chars = 0
    for document in read_documents(settings.corpus):
        if document.text is None:
            raise CorpusError(
                f"{settings.corpus.path}: holds token ids, so no tokenizer can be trained on it; name theirs in "
                "`tokenizer`"
            )
        yield document.text
        chars += len(document.text)
        if chars >= TOKENIZER_CHARS:
            return


# ---------------------------------------------------------------------------------------- what is scored


def recorded_targets(settings: RetrainSettings) -> dict[str, tuple[Unit, ...]]:
    """Units by the name that the environment gives them: `sciq`, and `sciq@all` for the loss on every token."""
    units = load_units(settings.targets).units
    recorded: dict[str, tuple[Unit, ...]] = {}
    for loss_on in settings.recorded_losses:
        for name in dict.fromkeys(unit.target for unit in units):
            own = tuple(replace(unit, loss_on=loss_on) for unit in units if unit.target == name)
            recorded[name + (ALL_SUFFIX if loss_on == "all" else "")] = own
    return recorded


def _checked_tokens(
    settings: RetrainSettings, recipe: TrainingRecipe, tokenizer: HfTokenizer, targets: dict[str, tuple[Unit, ...]]
) -> list[UnitTokens]:
    units = UnitSet(tuple(chain.from_iterable(targets.values())))
    tokens = units.tokenize(tokenizer, settings.targets.max_length)
    long = [k for k, unit in enumerate(tokens) if len(unit.input_ids) > recipe.shape.context]
    if long:
        raise SettingsError(
            f"targets.max_length: {len(long)} units have more than the {recipe.shape.context} tokens that recipe "
            f"{recipe.name} reads, e.g. {units.units[long[0]].unit_id!r} with {len(tokens[long[0]].input_ids)}; "
            f"set targets.max_length to {recipe.shape.context}, here and in the build"
        )
    return tokens


# ------------------------------------------------------------------------------------- what is dropped


def _subsets(settings: RetrainSettings, store: RowStore, rows: RowIndex) -> Iterator[SubsetBlock]:
    if settings.subsets:
        return read_subsets(settings.subsets, rows)
    family = parse_family(settings.family)
    return family.draw(
        settings.n_subsets,
        n_rows=store.n_rows,
        labels=_labels(family.label, store),
        seed=settings.family_seed,
        purpose=PURPOSE,
    )


def _labels(label: str | None, store: RowStore) -> LabelColumn | None:
    if label is None:
        return None
    if label not in store.label_columns:
        raise SubsetError(f"family: the corpus has no label {label!r}, expected one of {list(store.label_columns)}")
    values = [store.table(k).column(label).to_pylist() for k in range(store.n_shards)]
    return LabelColumn.of(list(chain.from_iterable(values)), label)


def _large_enough(blocks: Iterable[SubsetBlock], recipe: TrainingRecipe) -> Iterator[SubsetBlock]:
    """Refuse, before anything is trained, a subset that cannot fill a batch."""
    for block in blocks:
        for name, size in zip(block.subset_ids, block.sizes_B, strict=True):
            if size < recipe.batch_rows:
                raise SubsetError(
                    f"subset {name!r}: retains {size} rows, recipe {recipe.name} needs the {recipe.batch_rows} of one "
                    "batch or more; use a larger corpus, another family, or a smaller overrides.batch_rows"
                )
        yield block


def _info(
    settings: RetrainSettings, recipe: TrainingRecipe, store: RowStore, targets: dict[str, tuple[Unit, ...]]
) -> EnvironmentInfo:
    unknown = [name for name in settings.held_out_targets if name not in targets]
    if unknown:
        raise EnvironmentDataError(f"held_out_targets: got {unknown}, expected some of {list(targets)}")
    family = FamilyInfo(spec=str(parse_family(settings.family)), seed=settings.family_seed, purpose=PURPOSE)
    return EnvironmentInfo(
        role=settings.role,
        held_out_targets=settings.held_out_targets,
        recipe=recipe.name,
        recipe_settings=recipe.model_dump(mode="json"),
        checkpoint=f"reference/seed-{settings.seeds[0]}",
        seeds=settings.seeds,
        corpus_fingerprint=store.fingerprint,
        n_rows=store.n_rows,
        targets={
            name: TargetInfo(
                fingerprint=target_fingerprint(units),
                loss_on=units[0].loss_on,
                unit_ids=tuple(unit.unit_id for unit in units),
            )
            for name, units in targets.items()
        },
        family=None if settings.subsets else family,
        subset_ids=(),
        masks_checksum="",
        made_by={
            "program": f"grasp {grasp.__version__}",
            "torch": torch.__version__,
            "device": resolved_device(settings.device),
            "stack": settings.stack,
            "corpus": settings.corpus.model_dump(mode="json"),
            "targets": settings.targets.model_dump(mode="json"),
        },
    )


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
    own_threads = settings.model_copy(update={"threads": spec.threads})
    with connected(spec) as cluster:
        tasks = cluster.tasks(fill, own_threads, environment.path.resolve(), _silent)
        while not cluster.done(tasks, POLL_SECONDS):
            progress(clock.status(len(environment.pending()), (), 0, 0))
    progress(clock.status(len(environment.pending()), (), 0, 0))


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
