r"""Sums over checkpoints of inner products of gradients, with or without norms, projection and an optimizer's update.

    a_{i,e} = sum_c w_c <x_i, x_e>        x = g, or g / ||g||; of rows possibly Adam's update in place of g

What `tracin`, `less` and `grad_cos` have in common. Shape letters: E units, K projected width.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.layers import choose_layers, described
from grasp.baselines.gradients.method_settings import LayerSettings
from grasp.baselines.gradients.projection import Form
from grasp.baselines.gradients.queries import Queries
from grasp.baselines.gradients.scorers import (
    ExactScorer,
    ProjectedScorer,
    checkpoint_note,
    exact_note,
    norms,
    over_norms,
    projection_note,
)
from grasp.baselines.gradients.session import (
    ExactPlan,
    Group,
    checkpoint_weights,
    chosen_checkpoints,
    exact_plan,
    open_engine,
    typical_tokens,
    unit_examples,
)
from grasp.baselines.gradients.store import FeatureSpec, FeatureStore, Update
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs

S = TypeVar("S", bound=LayerSettings)


@dataclass(frozen=True, slots=True)
class CosineForm:
    """Which of the family a method is."""

    checkpoints: str  # all or last
    weights: str  # learning-rate or equal
    dimension: int | None
    projection: Form
    rows_normalised: bool
    units_normalised: bool
    update: str = ""  # name of the optimizer's update of rows


class CosineMethod(BlockMethod[S]):
    """Base of the family; one part a checkpoint, and a group of units where gradients are exact."""

    looks_at = frozenset({"tokens", "model", "checkpoints"})

    @abstractmethod
    def form(self, material: MethodInputs) -> CosineForm:
        """How inner products are taken."""

    def update(self, checkpoint: Checkpoint) -> Update | None:
        """What takes the place of a row's gradient at a checkpoint."""
        del checkpoint
        return None

    def parts(self, material: MethodInputs) -> int:
        return len(self._checkpoints(material)) * len(self._plan(material).groups)

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        form, checkpoints = self.form(material), self._checkpoints(material)
        groups = self._plan(material).groups
        at, group = divmod(part, len(groups))
        weights, notes = checkpoint_weights(checkpoints, form.weights)
        account = self._account(material, form, weights, notes)
        update = self.update(checkpoints[at]) if form.update else None
        weight = float(weights[at])
        if form.dimension is not None:
            spec = FeatureSpec(self.settings.layers, form.dimension, form.projection, self.seed, update=form.update)
            store = FeatureStore(material, work, checkpoints[at], spec, update)
            unit_EK = np.asarray(store.units(), dtype=np.float64)
            unit_EK = weight * (over_norms(unit_EK, "unit") if form.units_normalised else unit_EK)
            return ProjectedScorer(store, unit_EK, account, work, normalise=form.rows_normalised)
        engine = open_engine(material, checkpoints[at], self.settings.layers)
        here = groups[group]
        queries = Queries.collect(engine, unit_examples(material)[here.first : here.last], self._plan(material).dense)
        weight_E = np.full(queries.n_units, weight)
        if form.units_normalised:
            weight_E /= norms(queries.squared_norms().cpu().double().numpy(), "unit", here.first)
        transform = None if update is None else update(engine)
        return ExactScorer(
            material,
            queries,
            here,
            account,
            weight_E=weight_E,
            normalise=form.rows_normalised,
            transform=transform,
        )

    def _checkpoints(self, material: MethodInputs) -> tuple[Checkpoint, ...]:
        return chosen_checkpoints(material, self.form(material).checkpoints)

    def _plan(self, material: MethodInputs) -> ExactPlan:
        if self.form(material).dimension is not None:
            return ExactPlan((), (Group(0, material.n_units),))
        return exact_plan(
            choose_layers(material.model, self.settings.layers),
            unit_examples(material),
            typical_tokens(material),
            self.settings.memory_mb,
            dense=bool(self.form(material).update),
        )

    def _account(self, material: MethodInputs, form: CosineForm, weights: F64, notes: tuple[str, ...]) -> Account:
        layers = choose_layers(material.model, self.settings.layers)
        checkpoints = self._checkpoints(material)
        if form.dimension is None:
            how = exact_note(len(self._plan(material).groups))
        else:
            how = projection_note(layers.blocks, form.dimension, form.projection, typical_tokens(material))
        updated = ("rows by Adam's update instead of their gradient",) if form.update else ()
        return Account(
            features=(form.dimension or 0) * len(checkpoints),
            covers=(described(layers),),
            notes=(how, checkpoint_note(checkpoints, weights), *notes, *updated),
        )
