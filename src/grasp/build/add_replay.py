"""Replay trainings on the rows of a finished artifact, and add a column of relevance for each target.

The training is a fine-tuning of the artifact's model by a recipe. Its derivative by the weight of every row is the
relevance of the array `relevance_replay`, if the gate of `grasp.training.replay_gate` trusts it; otherwise the artifact
keeps its other kernels, and its manifest says so. Start with `add_replay`.
"""

import copy
import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from grasp.arrays import I64
from grasp.artifact.manifest import ReplayRecord
from grasp.artifact.reader import ArtifactReader
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
from grasp.training.metagradient import MetagradientSettings, Price, Target, middle_steps, price
from grasp.training.recipe_files import FineTuningRecipe, default_recipe
from grasp.training.replayed_rows import replay_rows
from grasp.training.train import label_weights, token_batches
from grasp.training.trajectory import Trajectory, TrajectorySize

ARRAY = "relevance_replay"
SPEC = ArraySpec(
    1,
    "derivative of the target's utility after a training by the weight of a row; standard deviations over the rows",
    "positive: more weight of the row in training should lower the target's loss",
)
DIRECTORY = "replay"  # in the artifact, while a replay is in progress
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayForecast:
    """What a replay of several orders takes."""

    orders: int
    size: TrajectorySize
    price: Price
    seconds: float
    disk_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.orders} trainings of {self.size.steps:,} steps ({self.size.parameters:,} parameters), each "
            f"differentiated at the price of {self.price}; about {duration_text(self.seconds)}, and "
            f"{size_text(self.disk_bytes)} of disk until it is finished"
        )


def add_replay(
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
        recipe: training that is replayed. Default: that of an earlier replay of the artifact, else `default_recipe`.
        overrides: settings of the user, see `BuildSource`.
        model: the loaded model of the build. Default: load it.
    Raises:
        ArtifactError: the artifact has a replay by another recipe; or its inputs changed.
        SettingsError: the artifact is not for a model that is trained further, or rows are longer than the recipe's.
        ModelError: the training cannot be differentiated, or diverges.
    """
    progress = progress or Silent()
    ArtifactReader.open(out)  # before the lock, which would create the directory
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, overrides)
        refuse_replay(origin.settings)
        requested, targets = _request(artifact, recipe, settings)
        if not targets:
            return artifact.manifest.replays[-1]
        reference = model or origin.model
        assert isinstance(reference, ReferenceModel)
        assert isinstance(origin.rows, RowStore)
        rows, key = origin.rows, _key(artifact, requested, settings, targets)
        (longest, most), optimizer = (int(rows.lengths().max()), requested.max_length), requested.optimizer(rows.n_rows)
        if most is not None and most < longest:
            raise SettingsError(
                f"recipe: max_length: got {most}, but a row of {out} has {longest} tokens; build it with --max-length "
                f"{most}"
            )
        working = reference.model if model is None else copy.deepcopy(reference.model)  # of the caller
        working, notes = trainable(working, reference.frozen, requested, settings.seed)
        training = FineTuning(working, optimizer)
        start = [parameter.detach().clone() for parameter in training.parameters]
        orders = [requested.order(rows.n_rows, settings.seed + w) for w in range(settings.orders)]
        forecast = forecast_replay(training, rows, orders[0], rows.n_rows, len(targets), settings)
        for line in (*notes, *training.notes, f"replay: {forecast}"):
            progress.note(line)
        discard_others(out / DIRECTORY, key)

        def trajectory(w: int) -> Trajectory:
            training = FineTuning(working, optimizer)
            training.set_weights(start)
            directory, memory = out / DIRECTORY / key / f"order-{w}", settings.memory_mb * MEGABYTE
            return Trajectory(training, rows, orders[w], directory=directory, memory_bytes=memory)

        result = replay_rows(
            trajectory,
            _units_of(artifact, origin, targets),
            metagradient_settings(settings, optimizer.steps, reference.batch_tokens),
            settings.orders,
            directory=out / DIRECTORY / key,
            progress=progress,
        )
        relevance_NT = result.relevance()
        record = ReplayRecord(
            recipe=requested.model_dump(mode="json"),
            settings=settings.model_dump(mode="json"),
            targets=targets,
            passed=relevance_NT is not None,
            steps=optimizer.steps,
            trainings=round(settings.orders * forecast.price.total, 2),
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


def refuse_replay(settings: BuildSettings) -> None:
    """Check that the training of a build can be replayed.

    Raises:
        SettingsError: a new model, a classifier, or preference pairs.
    """
    if settings.model.classifier is not None:
        raise SettingsError("--replay: got a classifier, expected a causal LM that is trained further")
    if settings.corpus.form == "preference":
        raise SettingsError("--replay: got preference pairs (--loss dpo), whose training is not replayed yet; omit it")
    if settings.train != "further":
        raise SettingsError(
            "--replay: got --train new, expected --train further: a new model's training from its initialisation is "
            "not replayed yet"
        )


def _request(
    artifact: ArtifactReader, recipe: FineTuningRecipe | None, settings: ReplaySettings
) -> tuple[FineTuningRecipe, tuple[str, ...]]:
    """Return the recipe to replay, and the targets that have no replay by it."""
    past = artifact.manifest.replays
    passed = [record for record in past if record.passed]
    if recipe is None:
        recipe = FineTuningRecipe.model_validate(passed[-1].recipe) if passed else default_recipe(artifact.n_rows)
    now = {"recipe": recipe.model_dump(mode="json"), "settings": settings.model_dump(mode="json")}
    done = set[str]()
    for record in past:
        changed = list(differences({"recipe": record.recipe, "settings": record.settings}, now))
        if changed and record.passed:
            raise ArtifactError(
                f"{artifact.where}: has a replay with other settings: {'; '.join(changed)}; use the same, or build "
                "another artifact"
            )
        done |= set() if changed else set(record.targets)
    return recipe, tuple(target for target in artifact.targets if target not in done)


def _key(artifact: ArtifactReader, recipe: FineTuningRecipe, settings: ReplaySettings, targets: Sequence[str]) -> str:
    """Return a name for the intermediate results of a replay of some targets by a recipe."""
    how = settings.model_dump(mode="json", exclude={"orders", "memory_mb"})
    content = [recipe.model_dump(mode="json"), how, list(targets), artifact.manifest.fingerprints]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def discard_others(directory: Path, key: str) -> None:
    """Delete intermediate results of other replays."""
    for other in directory.glob("*") if directory.exists() else ():
        if other.name != key:
            discard(other)
    (directory / key).mkdir(parents=True, exist_ok=True)


def _units_of(artifact: ArtifactReader, origin: BuildSource, targets: Sequence[str]) -> list[Target]:
    tokens = origin.unit_tokens
    return [Target(name, [tokens[int(e)] for e in artifact.unit_columns(name)]) for name in targets]


def metagradient_settings(settings: ReplaySettings, steps: int, batch_tokens: int) -> MetagradientSettings:
    """Return how a training of so many steps is differentiated."""
    return MetagradientSettings(
        curvature=settings.curvature, probe_steps=middle_steps(steps, settings.probes), batch_tokens=batch_tokens
    )


def trainable(model: nn.Module, frozen: Sequence[str], recipe: FineTuningRecipe, seed: int) -> tuple[Any, list[str]]:
    """Make the trained parameters of a model ask for a gradient, and add an adapter if the recipe has one.

    Args:
        frozen: names of parameters that are not trained.
    Returns:
        The model in float32 or float64, and what differs from the recipe, a sentence each.
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


def forecast_replay(
    training: AdamWTraining,
    rows: RowStore,
    order: Sequence[I64],
    n_rows: int,
    n_targets: int,
    settings: ReplaySettings,
) -> ReplayForecast:
    """Time the gradient of one batch, and forecast what a replay takes.

    Args:
        rows: some of the corpus; `n_rows` are all of it.
    """
    size = TrajectorySize.of(len(order), training.n_parameters, training.parameter_bytes)
    how = metagradient_settings(settings, len(order), 1)
    total = price(order, n_rows, n_targets, how)
    (batch,) = token_batches(
        rows,
        [iter([order[0] % rows.n_rows])],
        steps=1,
        context=training.context,
        vocab_size=training.vocab_size,
    )
    weight_BL, seconds = label_weights(batch)[0].astype(np.float64), []
    for _ in range(2):  # the first pass is slower
        begun = time.perf_counter()
        training.backward(batch.ids_KBL[0], weight_BL)
        norm_of(training.gradients())  # waits for the device
        seconds.append(time.perf_counter() - begun)
        training.zero_gradients()
    disk = size.start_bytes + 2 * 3 * n_targets * training.parameter_bytes
    disk += size.segment_bytes if size.segment_bytes > settings.memory_mb * MEGABYTE else 0
    return ReplayForecast(settings.orders, size, total, settings.orders * total.total * len(order) * min(seconds), disk)
