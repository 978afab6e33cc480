r"""Sums over checkpoints of inner products of gradients, optionally normalised, projected or replaced by Adam's update.

    a_{i,e} = sum_c w_c <x_i, x_e>        x = g, or g / ||g||; for rows optionally Adam's update in place of g

Start with `CosineMethod`, the base class of `tracin` and `less`. Shape letters: E units, K projected width.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import LayerSettings
from grasp.baselines.gradients.projection import Form
from grasp.baselines.gradients.queries import Queries
from grasp.baselines.gradients.scorers import (
    checkpoint_note,
    divide_by_norms,
    exact_note,
    exact_scorer,
    gradient_norms,
    projected_scorer,
    projection_note,
)
from grasp.baselines.gradients.session import (
    ExactPlan,
    checkpoint_weights,
    exact_plan,
    mean_row_tokens,
    open_engine,
    select_checkpoints,
    unit_examples,
)
from grasp.baselines.gradients.store import FeatureSpec, FeatureStore, Update
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs

S = TypeVar("S", bound=LayerSettings)


@dataclass(frozen=True, slots=True)
class CosineForm:
    """Variant of the sum that a method computes."""

    checkpoints: str  # all or last
    weights: str  # learning-rate or equal
    dimension: int | None
    projection: Form
    rows_normalised: bool
    units_normalised: bool
    update: str = ""  # name of the optimizer's update of rows


class CosineMethod(BlockMethod[S]):
    """Base class; one part per checkpoint, and per group of units if gradients are exact."""

    requires = frozenset({"tokens", "model", "checkpoints"})

    @abstractmethod
    def form(self, inputs: MethodInputs) -> CosineForm:
        """Return the variant of the sum."""

    def update(self, checkpoint: Checkpoint) -> Update | None:
        """Return the optimizer update that replaces a row's gradient at a checkpoint; None: the gradient itself."""
        del checkpoint
        return None

    def parts(self, inputs: MethodInputs) -> int:
        return len(self._checkpoints(inputs)) * len(self._plan(inputs).groups)

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        form, checkpoints = self.form(inputs), self._checkpoints(inputs)
        groups = self._plan(inputs).groups
        checkpoint_index, group = divmod(part, len(groups))
        weights, notes = checkpoint_weights(checkpoints, form.weights)
        account = self._account(inputs, form, weights, notes)
        update = self.update(checkpoints[checkpoint_index]) if form.update else None
        weight = float(weights[checkpoint_index])
        if form.dimension is not None:
            spec = FeatureSpec(self.settings.layers, form.dimension, form.projection, self.seed, update=form.update)
            store = FeatureStore(inputs, work, checkpoints[checkpoint_index], spec, update)
            unit_EK = np.asarray(store.units(), dtype=np.float64)
            unit_EK = weight * (divide_by_norms(unit_EK, "unit") if form.units_normalised else unit_EK)
            return projected_scorer(store, unit_EK, account, work, normalise=form.rows_normalised)
        engine = open_engine(inputs, checkpoints[checkpoint_index], self.settings.layers)
        unit_group = groups[group]
        queries = Queries.collect(engine, unit_examples(inputs)[unit_group], self._plan(inputs).dense)
        weight_E = np.full(queries.n_units, weight)
        if form.units_normalised:
            weight_E /= gradient_norms(queries.squared_norms().cpu().double().numpy(), "unit", unit_group.start)
        transform = None if update is None else update(engine)
        return exact_scorer(
            inputs,
            queries,
            unit_group,
            account,
            weight_E=weight_E,
            normalise=form.rows_normalised,
            transform=transform,
        )

    def _checkpoints(self, inputs: MethodInputs) -> tuple[Checkpoint, ...]:
        return select_checkpoints(inputs, self.form(inputs).checkpoints)

    def _plan(self, inputs: MethodInputs) -> ExactPlan:
        if self.form(inputs).dimension is not None:
            return ExactPlan((), (slice(0, inputs.n_units),))
        return exact_plan(
            choose_layers(inputs.model, self.settings.layers),
            unit_examples(inputs),
            mean_row_tokens(inputs),
            self.settings.memory_mb,
            dense=bool(self.form(inputs).update),
        )

    def _account(self, inputs: MethodInputs, form: CosineForm, weights: F64, notes: tuple[str, ...]) -> Account:
        layers = choose_layers(inputs.model, self.settings.layers)
        checkpoints = self._checkpoints(inputs)
        if form.dimension is None:
            form_note = exact_note(len(self._plan(inputs).groups))
        else:
            form_note = projection_note(layers.blocks, form.dimension, form.projection, mean_row_tokens(inputs))
        updated = ("rows represented by Adam's update instead of their gradient",) if form.update else ()
        return Account(
            features=(form.dimension or 0) * len(checkpoints),
            covers=(describe_layers(layers),),
            notes=(form_note, checkpoint_note(checkpoints, weights), *notes, *updated),
        )
