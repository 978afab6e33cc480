"""Plan the trainings that a replay differentiates, and forecast their time, memory and disk space.

A replay differentiates a training with respect to the weights of its rows, see `grasp.training.metagradient`. It has
one or several orders: trainings that differ in the order of the rows, and from scratch also in the initial weights.
Start with `plan_replay`.
"""

import copy
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grasp.arrays import I64
from grasp.corpus.row_store import RowStore
from grasp.errors import SettingsError
from grasp.extras import require
from grasp.models.causal_lm import ReferenceModel
from grasp.settings import ReplaySettings
from grasp.text import duration_text, size_text
from grasp.training.adamw import EXACT_DTYPES, AdamWTraining
from grasp.training.adjoint import norm_of
from grasp.training.fine_tuning_recipe import FineTuningRecipe, default_proxy_recipe, default_recipe, proxy_training
from grasp.training.metagradient import MetagradientSettings, middle_steps, replay_trainings
from grasp.training.recipe import OptimizerRecipe
from grasp.training.row_order import token_batches
from grasp.training.train import start_training
from grasp.training.trajectory import TrajectorySize

ORDERS_FROM_SCRATCH = 3  # default number of orders; single trainings from scratch agree badly
ADJOINT_SIZE = 3  # derivatives of a utility per parameter: with respect to the weight and both moments of AdamW
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The trainings of a replay. An order is a training with another order of the rows.

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

    @property
    def n_orders(self) -> int:
        """Return the number of trainings that are differentiated."""
        return self.settings.orders or 1

    def order(self, n_rows: int, k: int) -> list[I64]:
        """Return the indices of the rows of every step, in the k-th order."""
        return self.recipe.order(n_rows, self.settings.seed + k)


def read_recipe(recipe: FineTuningRecipe | Mapping[str, Any] | Path | str | None) -> FineTuningRecipe | None:
    """Return a recipe that is passed as settings by name, or as a YAML or JSON file."""
    if recipe is None or isinstance(recipe, FineTuningRecipe):
        return recipe
    return FineTuningRecipe.from_mapping(recipe) if isinstance(recipe, Mapping) else FineTuningRecipe.read(Path(recipe))


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
    from_scratch = train == "new"
    recipe = recipe or (default_proxy_recipe(n_rows) if from_scratch else default_recipe(n_rows))
    orders = settings.orders or (ORDERS_FROM_SCRATCH if from_scratch else 1)
    settings = settings.model_copy(update={"orders": orders, "probes": 0 if from_scratch else settings.probes})
    optimizer: OptimizerRecipe
    if from_scratch:
        new_model = proxy_training(recipe, n_rows, reference.vocab_size, context)
        optimizer, notes, first_step = new_model, recipe.notes, new_model.steps // 3  # derivatives before it are noise

        def start(k: int) -> AdamWTraining:
            """Return the training before its first step; each order has its own initial weights."""
            return start_training(new_model, settings.seed + k, reference.device)

    else:
        optimizer, first_step = recipe.optimizer(n_rows), 0
        model = copy.deepcopy(reference.model) if copied else reference.model
        model, changes = make_trainable(model, reference.frozen, recipe, settings.seed)
        initial = AdamWTraining(model, optimizer)
        initial_weights = [parameter.detach().clone() for parameter in initial.parameters]
        notes = (*changes, *initial.notes)

        def start(k: int) -> AdamWTraining:
            """Return the training before its first step; all orders train the same model object, one after another."""
            training = AdamWTraining(model, optimizer)
            training.set_weights(initial_weights)
            return training

    if settings.window is not None:
        first_step = max(0, optimizer.steps - settings.window)
    probe_steps = middle_steps(optimizer.steps - first_step, settings.probes)
    differentiation = MetagradientSettings(
        probe_steps=tuple(first_step + step for step in probe_steps),
        batch_tokens=reference.batch_tokens,
        first_step=first_step,
    )
    return ReplayPlan(recipe, settings, optimizer, differentiation, start, from_scratch, notes)


def make_trainable(
    model: nn.Module, frozen: Sequence[str], recipe: FineTuningRecipe, seed: int
) -> tuple[Any, list[str]]:
    """Return a model in an exact dtype with the adapter and trained parameters of a recipe, and notes on changes."""
    notes, dtype = [*recipe.notes], next(model.parameters()).dtype
    if dtype not in EXACT_DTYPES:
        model = model.float()
        notes.append(f"the model is in {str(dtype).removeprefix('torch.')}, its replay in float32")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and name not in frozen)
    if recipe.lora_r is None:
        return model, notes
    peft = require("peft", extra="peft", feature="the recipe's LoRA adapter")
    if any(isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in model.modules()):
        raise SettingsError(
            f"recipe: lora_r: got {recipe.lora_r}, but the model has an adapter already, which peft would replace; "
            "remove lora_r to train that adapter, or build with --set model.adapter=folded to train a new one on top"
        )
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
            model = peft.get_peft_model(model, config).get_base_model()
        except ValueError as err:
            raise SettingsError(f"recipe: lora_target_modules: {' '.join(str(err).split())[:200]}") from err
    return model, notes


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of wall time and space; the time is that of the load of the machine while it was measured."""

    seconds: float
    memory_bytes: int
    disk_bytes: int  # until it is finished

    def __add__(self, other: "Forecast") -> "Forecast":
        """Return the forecast of one after the other."""
        disk_bytes = self.disk_bytes + other.disk_bytes
        return Forecast(self.seconds + other.seconds, max(self.memory_bytes, other.memory_bytes), disk_bytes)

    def __str__(self) -> str:
        return (
            f"about {duration_text(self.seconds)} at the present load of {os.getloadavg()[0]:.1f}, "
            f"{size_text(self.memory_bytes)} of memory, {size_text(self.disk_bytes)} of disk until it is finished"
        )


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forecast_replay(plan: ReplayPlan, rows: RowStore, n_rows: int, n_targets: int) -> tuple[float, Forecast]:
    """Time the gradient of one batch; return the cost in trainings, and the forecast of all of them."""
    training, order = plan.start(0), plan.order(n_rows, 0)
    size = TrajectorySize.of(len(order), training.n_parameters, training.parameter_bytes)
    step_seconds = time_step(training, rows, order[0] % rows.n_rows)  # `rows` may be fewer than the order names
    trainings = plan.n_orders * replay_trainings(order, n_rows, n_targets, plan.differentiation)
    # The adjoint of a target has ADJOINT_SIZE numbers per parameter. On disk there are two versions of it while it is
    # written. In memory there is also a direction per target, at probe steps, and copies of the weights, of a direction
    # and of a product.
    disk_bytes = size.start_bytes + 2 * ADJOINT_SIZE * n_targets * training.parameter_bytes
    memory_bytes = ((ADJOINT_SIZE + 1) * n_targets + 3) * training.parameter_bytes
    is_on_disk = size.segment_bytes > plan.settings.memory_mb * MEGABYTE
    return trainings, Forecast(
        trainings * size.steps * step_seconds,
        peak_memory() + memory_bytes + (0 if is_on_disk else size.segment_bytes),
        disk_bytes + (size.segment_bytes if is_on_disk else 0),
    )


def time_step(training: AdamWTraining, rows: RowStore, row_index_B: I64) -> float:
    """Measure the seconds of the gradient of one batch, of the rows `row_index_B`."""
    (batch,) = token_batches(rows, [row_index_B], context=training.context, vocab_size=training.vocab_size)
    seconds: list[float] = []
    for _ in range(2):  # the first pass is slower
        started = time.perf_counter()
        training.backward(batch.ids_BL, batch.weight_BL)
        norm_of(training.gradients())  # waits for the device
        seconds.append(time.perf_counter() - started)
        training.zero_gradients()
    return min(seconds)
