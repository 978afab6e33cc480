"""Replay trainings on the rows of a finished artifact, and add a column of relevance for each target.

For further training, a fine-tuning of the artifact's model is replayed; for a new model, several trainings of a small
model from scratch. The derivative by the weight of every row is the relevance of the array `relevance_replay`, if the
gate of `grasp.training.replay_checks` trusts it; otherwise the artifact keeps its other kernels, and its manifest says
so. Start with `replay_targets`; `plan_replay` has what differs between the two.
"""

import copy
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from grasp.arrays import I64
from grasp.artifact.manifest import ReplayRecord
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_documents
from grasp.artifact.writer import ArraySpec, add_target_columns, lock_artifact
from grasp.build.provenance import BuildSource
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.extras import require
from grasp.files import differences, discard
from grasp.models.causal_lm import ReferenceModel
from grasp.progress import Progress, Silent
from grasp.settings import BuildSettings, ReplaySettings
from grasp.text import duration_text, size_text
from grasp.training.adamw import AdamWTraining
from grasp.training.adjoint import norm_of
from grasp.training.fine_tuning import EXACT_DTYPES, FineTuning
from grasp.training.fine_tuning_recipe import FineTuningRecipe, default_proxy_recipe, default_recipe, proxy_training
from grasp.training.metagradient import MetagradientSettings, ReplayCost, Target, middle_steps, replay_cost
from grasp.training.recipe import OptimizerRecipe
from grasp.training.replayed_rows import replay_rows, scores_from_text
from grasp.training.row_order import label_weights, token_batches
from grasp.training.train import Trainer
from grasp.training.trajectory import Trajectory, TrajectorySize

ARRAY = "relevance_replay"
SPEC = ArraySpec(
    1,
    "derivative of the target's utility after a training by the weight of a row; standard deviations over the rows",
    "positive: more weight of the row in training should lower the target's loss",
)
ORDERS_FROM_SCRATCH = 3
WARM_UP = "warm-up.json"  # in the directory of a model that was trained by `grasp.build.warm_up`
DIRECTORY = "replay"  # in the artifact, while a replay is in progress
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayForecast:
    """Time, memory and number of trainings that a replay of several orders takes."""

    orders: int
    size: TrajectorySize
    price: ReplayCost
    retrainings: int  # to check the derivatives
    seconds: float
    disk_bytes: int
    memory_bytes: int  # in addition to that of the training

    @property
    def trainings(self) -> float:
        """Return the price of all orders and of the check, in trainings."""
        return self.orders * self.price.total + self.retrainings

    def __str__(self) -> str:
        count, each = (f"{self.orders} trainings", ", each") if self.orders > 1 else ("a training", ",")
        check = f"; {self.retrainings} more to check it" if self.retrainings else ""
        total = f"; {self.trainings:.1f} in all" if self.orders > 1 or self.retrainings else ""
        return (
            f"{count} of {self.size.steps:,} steps ({self.size.parameters:,} parameters){each} differentiated at the "
            f"price of {self.price}{check}{total}; about {duration_text(self.seconds)}, "
            f"{size_text(self.memory_bytes)} more memory than the training alone, and {size_text(self.disk_bytes)} of "
            "disk until it is finished"
        )


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The trainings of a replay.

    Attributes:
        recipe: training that is replayed, with all defaults resolved.
        settings: settings of the replay, with all defaults resolved.
        optimizer: budget and optimizer of each training.
        differentiation: how each training is differentiated.
        start: returns the training of an order, by its number, before its first step.
        from_scratch: whether the scores of rows that were not drawn are predicted from their text.
        notes: differences from the recipe, a sentence each.
    """

    recipe: FineTuningRecipe
    settings: ReplaySettings
    optimizer: OptimizerRecipe
    differentiation: MetagradientSettings
    start: Callable[[int], AdamWTraining]
    from_scratch: bool
    notes: tuple[str, ...]

    def order(self, n_rows: int, k: int) -> list[I64]:
        """Return the rows of every step of the k-th order of the corpus."""
        return self.recipe.order(n_rows, self.settings.seed + k)


def plan_replay(
    reference: ReferenceModel,
    train: str,
    recipe: FineTuningRecipe | None,
    settings: ReplaySettings,
    *,
    n_rows: int,
    context: int,
    copied: bool = False,
) -> ReplayPlan:
    """Plan the replay of a model that is trained further, or of small new models with the vocabulary of the reference.

    From scratch, the derivatives at the first third of the steps are noise and are left out.

    Args:
        reference: model of the artifact.
        train: further or new.
        recipe: training that is replayed. Default: `default_recipe` or `default_proxy_recipe`.
        settings: number of orders, probes and memory of the replay.
        n_rows: number of rows of the corpus.
        context: tokens of its longest row.
        copied: leave the reference model as it is, and train a copy of it.
    Raises:
        SettingsError, ModelError, MissingExtraError: the recipe does not fit the model.
    """
    if train == "new":
        recipe = recipe or default_proxy_recipe(n_rows)
        settings = settings.model_copy(update={"orders": settings.orders or ORDERS_FROM_SCRATCH, "probes": 0})
        proxy = proxy_training(recipe, n_rows, reference.vocab_size, context)
        differentiation = metagradient_settings(settings, proxy.steps, reference.batch_tokens)
        differentiation = differentiation.model_copy(update={"first_step": proxy.steps // 3})
        seed, device = settings.seed, reference.device
        return ReplayPlan(
            recipe,
            settings,
            proxy,
            differentiation,
            lambda k: Trainer(proxy, [seed + k], device),
            True,
            tuple(recipe.notes),
        )
    recipe = recipe or default_recipe(n_rows)
    settings = settings.model_copy(update={"orders": settings.orders or 1})
    optimizer = recipe.optimizer(n_rows)
    model = copy.deepcopy(reference.model) if copied else reference.model
    model, notes = trainable(model, reference.frozen, recipe, settings.seed)
    initial = FineTuning(model, optimizer)
    weights = [parameter.detach().clone() for parameter in initial.parameters]

    def start(_: int) -> AdamWTraining:
        """Return the training before its first step; orders differ only in the order of rows."""
        training = FineTuning(model, optimizer)
        training.set_weights(weights)
        return training

    differentiation = metagradient_settings(settings, optimizer.steps, reference.batch_tokens)
    return ReplayPlan(recipe, settings, optimizer, differentiation, start, False, (*notes, *initial.notes))


def replay_targets(
    out: Path,
    recipe: FineTuningRecipe | None,
    settings: ReplaySettings,
    *,
    overrides: Mapping[str, Any] | None = None,
    model: ReferenceModel | None = None,
    progress: Progress | None = None,
) -> ReplayRecord:
    """Replay the targets of the artifact `out` that have no replay, and return the record of the last replay.

    A call that was killed is resumed by the same call, to the same bytes on a CPU.

    Args:
        out: directory of the artifact.
        recipe: training that is replayed. Default: that of an earlier replay of the artifact, else see `plan_replay`.
        settings: number of orders, probes and memory of the replay.
        overrides: settings of the user, see `BuildSource`.
        model: the loaded model of the build. Default: load it.
        progress: receives stages, notes and numbers of rows.
    Raises:
        ArtifactError: the artifact has a replay by another recipe; or its inputs changed.
        SettingsError: the model of the artifact is a classifier, or rows are longer than the recipe's.
        ModelError: the training cannot be differentiated, or diverges.
    """
    progress = progress or Silent()
    ArtifactReader.open(out)  # before the lock, which would create the directory
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, overrides)
        refuse_replay(origin.settings, settings)
        trusted = [record for record in artifact.manifest.replays if record.passed]
        if recipe is None and trusted:
            recipe = FineTuningRecipe.model_validate(trusted[-1].recipe)
        reference = model or origin.model
        assert isinstance(reference, ReferenceModel)
        assert isinstance(origin.rows, RowStore)
        rows, longest = origin.rows, int(origin.rows.lengths().max())
        if recipe is not None:
            refuse_longer_rows(recipe, rows, out)
        train = str(origin.settings.train)
        plan = plan_replay(
            reference, train, recipe, settings, n_rows=rows.n_rows, context=longest, copied=model is not None
        )
        targets = _targets_without_replay(artifact, plan)
        if not targets:
            return artifact.manifest.replays[-1]
        forecast = forecast_replay(plan, rows, rows.n_rows, len(targets))
        for line in (*plan.notes, f"replay: {forecast}"):
            progress.note(line)
        directory = out / DIRECTORY / _work_key(artifact, plan, targets)
        discard_others(directory)

        def trajectory(k: int) -> Trajectory:
            """Return the training of the k-th order, which is run or resumed when it is differentiated."""
            memory = plan.settings.memory_mb * MEGABYTE
            order = plan.order(rows.n_rows, k)
            return Trajectory(plan.start(k), rows, order, directory=directory / f"order-{k}", memory_bytes=memory)

        documents_N = row_documents(artifact)
        result = replay_rows(
            trajectory,
            _units_of(artifact, origin, targets),
            plan.differentiation,
            forecast.orders,
            rate_K=np.array([plan.optimizer.learning_rate_at(step) for step in range(plan.optimizer.steps)]),
            predict_all_rows=partial(scores_from_text, rows=rows, document_N=documents_N, seed=plan.settings.seed)
            if plan.from_scratch
            else None,
            retrainings=plan.settings.check,
            directory=directory,
            progress=progress,
        )
        relevance_NT = result.relevance()
        record = ReplayRecord(
            recipe=plan.recipe.model_dump(mode="json"),
            settings=plan.settings.model_dump(mode="json"),
            targets=targets,
            passed=relevance_NT is not None,
            steps=plan.optimizer.steps,
            trainings=round(forecast.trainings, 2),
            agreement=dict(zip(targets, np.mean(result.agreements, axis=0).round(3).tolist(), strict=True))
            if result.agreements
            else {},
            notes=result.notes,
        )
        add_target_columns(
            out,
            ARRAY,
            {} if relevance_NT is None else dict(zip(targets, relevance_NT.T, strict=True)),
            spec=SPEC,
            dtype=origin.settings.array_dtype,
            details={"replays": [*artifact.manifest.details.get("replays", ()), record.model_dump(mode="json")]},
        )
        discard(out / DIRECTORY)
        return record


def refuse_longer_rows(recipe: FineTuningRecipe, rows: RowStore, out: Path) -> None:
    """Check that a recipe does not truncate the rows of the artifact `out`."""
    longest = int(rows.lengths().max())
    if recipe.max_length is not None and recipe.max_length < longest:
        raise SettingsError(
            f"recipe: max_length: got {recipe.max_length}, but a row of {out} has {longest} tokens; build it with "
            f"--max-length {recipe.max_length}"
        )


def refuse_replay(settings: BuildSettings, replay: ReplaySettings) -> None:
    """Check that the training of a build can be replayed; see also `refuse_untrainable`.

    Raises:
        SettingsError: the model is the result of a warm-up; or a check of a new model.
    """
    if replay.check and settings.train == "new":
        raise SettingsError(
            "--check: needs derivatives of all steps, but those of the first third of a new model's training are noise "
            "and left out; omit it, the agreement of orders is measured instead"
        )
    if (Path(settings.model.path) / WARM_UP).exists():
        raise SettingsError(
            f"--replay: got {settings.model.path}, a model after --warm-up, but a replay differentiates the whole "
            "training; build without --warm-up"
        )
    refuse_untrainable(settings, "--replay")


def refuse_untrainable(settings: BuildSettings, option: str) -> None:
    """Check that the model of a build can be trained on its corpus by a recipe.

    Raises:
        SettingsError: a classifier, or preference pairs; the message names `option`.
    """
    if settings.model.classifier is not None:
        raise SettingsError(f"{option}: got a classifier, expected a causal LM")
    if settings.corpus.form == "preference":
        raise SettingsError(f"{option}: got preference pairs (--loss dpo), which it does not support yet; omit it")


def _targets_without_replay(artifact: ArtifactReader, plan: ReplayPlan) -> tuple[str, ...]:
    """Return the targets that have no replay by this recipe and these settings."""
    current = {"recipe": plan.recipe.model_dump(mode="json"), "settings": plan.settings.model_dump(mode="json")}
    done: set[str] = set()
    for record in artifact.manifest.replays:
        settings = dict(record.settings)
        if not plan.settings.check:
            settings.pop("check", None)  # more targets need no other check
        changed = list(differences({"recipe": record.recipe, "settings": settings}, current))
        if changed and record.passed:
            raise ArtifactError(
                f"{artifact.location}: has a replay with other settings: {'; '.join(changed)}; use the same, or build "
                "another artifact"
            )
        if not changed:
            done |= set(record.targets)
    return tuple(target for target in artifact.targets if target not in done)


def _work_key(artifact: ArtifactReader, plan: ReplayPlan, targets: Sequence[str]) -> str:
    """Return the name of the directory for intermediate results of a replay: a hash of all that determines them."""
    replay_settings = plan.settings.model_dump(mode="json", exclude={"orders", "memory_mb", "check"})
    content = [plan.recipe.model_dump(mode="json"), replay_settings, list(targets), artifact.manifest.fingerprints]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def discard_others(directory: Path) -> None:
    """Create the directory of a replay, and delete intermediate results of other replays next to it."""
    for other in directory.parent.glob("*") if directory.parent.exists() else ():
        if other != directory:
            discard(other)
    directory.mkdir(parents=True, exist_ok=True)


def _units_of(artifact: ArtifactReader, origin: BuildSource, targets: Sequence[str]) -> list[Target]:
    """Return the targets with the token ids of their units."""
    tokens = origin.unit_tokens
    return [Target(name, [tokens[int(e)] for e in artifact.unit_columns(name)]) for name in targets]


def metagradient_settings(settings: ReplaySettings, steps: int, batch_tokens: int) -> MetagradientSettings:
    """Return the settings by which a training of `steps` steps is differentiated."""
    return MetagradientSettings(
        curvature=settings.curvature, probe_steps=middle_steps(steps, settings.probes), batch_tokens=batch_tokens
    )


def trainable(model: nn.Module, frozen: Sequence[str], recipe: FineTuningRecipe, seed: int) -> tuple[Any, list[str]]:
    """Set `requires_grad` of the parameters that are trained, and add an adapter if the recipe has one.

    Args:
        model: model to train, which is changed.
        frozen: names of parameters that are not trained.
        recipe: training of the model.
        seed: seed of the initial weights of the adapter.
    Returns:
        The model in float32 or float64, and notes on differences from the recipe.
    Raises:
        MissingExtraError: the recipe has an adapter, and peft is not installed.
        SettingsError: the recipe's adapter does not fit the model.
    """
    notes, dtype = recipe.notes, next(model.parameters()).dtype
    if dtype not in EXACT_DTYPES:
        model = model.float()
        notes.append(f"the model is in {str(dtype).removeprefix('torch.')}, its replay in float32")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and name not in frozen)
    return (model if recipe.lora_r is None else _with_adapter(model, recipe, seed)), notes


def _with_adapter(model: nn.Module, recipe: FineTuningRecipe, seed: int) -> nn.Module:
    """Return the model with the LoRA adapter of a recipe."""
    peft = require("peft", extra="peft", feature="the recipe's LoRA adapter")
    modules = recipe.lora_target_modules
    config = peft.LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha or recipe.lora_r,
        target_modules=modules if isinstance(modules, str) else list(modules),
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
        torch.manual_seed(seed)
        try:
            adapted: nn.Module = peft.get_peft_model(model, config).get_base_model()
        except ValueError as err:
            raise SettingsError(f"recipe: lora_target_modules: {' '.join(str(err).split())[:200]}") from err
    return adapted


def forecast_replay(plan: ReplayPlan, rows: RowStore, n_rows: int, n_targets: int) -> ReplayForecast:
    """Time the gradient of one batch, and forecast time and disk space of a replay.

    Args:
        plan: trainings of the replay.
        rows: rows of the corpus, or some of them.
        n_rows: number of rows of the whole corpus.
        n_targets: number of targets.
    """
    training, order = plan.start(0), plan.order(n_rows, 0)
    size = TrajectorySize.of(len(order), training.n_parameters, training.parameter_bytes)
    total = replay_cost(order, n_rows, n_targets, plan.differentiation)
    step_seconds = time_step(training, rows, order[0] % rows.n_rows)
    disk = size.start_bytes + 2 * 3 * n_targets * training.parameter_bytes
    # The adjoint of a target is 3 floats per parameter; at a probe step there is a direction per target. The weights, a
    # direction and a product are copied.
    memory = (4 * n_targets + 3) * training.parameter_bytes
    if size.segment_bytes > plan.settings.memory_mb * MEGABYTE:
        disk += size.segment_bytes
    else:
        memory += size.segment_bytes
    orders, check = plan.settings.orders or 1, plan.settings.check
    forecast = ReplayForecast(orders, size, total, check, 0.0, disk, memory)
    return replace(forecast, seconds=forecast.trainings * len(order) * step_seconds)


def time_step(training: AdamWTraining, rows: RowStore, row_index_B: I64) -> float:
    """Return the seconds of the gradient of one batch."""
    batches = token_batches(
        rows, [iter([row_index_B])], steps=1, context=training.context, vocab_size=training.vocab_size
    )
    (batch,) = batches
    weight_BL, seconds = label_weights(batch)[0].astype(np.float64), []
    for _ in range(2):  # the first pass is slower
        started = time.perf_counter()
        training.backward(batch.ids_KBL[0], weight_BL)
        norm_of(training.gradients())  # waits for the device
        seconds.append(time.perf_counter() - started)
        training.zero_gradients()
    return min(seconds)


def forecast_added_replay(
    out: Path, recipe: FineTuningRecipe | None, settings: ReplaySettings, overrides: Mapping[str, Any]
) -> ReplayForecast:
    """Forecast a replay of the targets of a finished artifact that have none.

    Args:
        out: directory of the artifact.
        recipe: as of `replay_targets`.
        settings: as of `replay_targets`.
        overrides: as of `replay_targets`.
    Raises:
        ArtifactError, SettingsError, ModelError: as `replay_targets`; or all targets have a replay.
    """
    artifact = ArtifactReader.open(out)
    origin = BuildSource(artifact, overrides)
    refuse_replay(origin.settings, settings)
    reference, rows = origin.model, origin.rows
    assert isinstance(reference, ReferenceModel)
    assert isinstance(rows, RowStore)
    longest = int(rows.lengths().max())
    plan = plan_replay(
        reference, str(origin.settings.train), recipe, settings, n_rows=rows.n_rows, context=longest, copied=False
    )
    if not (targets := _targets_without_replay(artifact, plan)):
        raise ArtifactError(f"{artifact.location}: all targets have a replay by this recipe; nothing to forecast")
    return forecast_replay(plan, rows, rows.n_rows, len(targets))
