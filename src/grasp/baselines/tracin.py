r"""TracIn: cosines of gradients, summed over checkpoints weighted by learning rate.

    a_{i,e} = sum_c w_c <x_i, x_e>        x = g, or g / ||g||, projected or not; `less` has Adam's update for rows

Start with `TracIn`; `CosineMethod` is the computation, which `less` shares. Shape letters: E units, K projected width.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import Field

from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import WeightedSettings
from grasp.baselines.gradients.scorers import (
    checkpoint_note,
    divide_by_norms,
    exact_note,
    exact_scorer,
    feature_scorer,
    gradient_norms,
    mean_row_tokens,
    open_engine,
    projection_note,
    select_checkpoints,
    unit_examples,
)
from grasp.baselines.gradients.whole import Transform, UnitGradients, unit_groups
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradients import PerExample

W = TypeVar("W", bound=WeightedSettings)


class CosineMethod(BlockMethod[W]):
    """Base class; one part per checkpoint, and per group of units if gradients are not projected."""

    requires = frozenset({"tokens", "model", "checkpoints"})
    normalise = True  # whether gradients are divided by their norms

    def uses_update(self, inputs: MethodInputs) -> bool:
        """Return whether rows are represented by the update of an optimizer instead of their gradient."""
        del inputs
        return False

    def update(self, checkpoint: Checkpoint, engine: PerExample) -> Transform | None:
        """Return the function that replaces a row's gradient by the update at a checkpoint; None keeps the gradient."""
        return None

    def parts(self, inputs: MethodInputs) -> int:
        return len(select_checkpoints(inputs, self.settings.checkpoints)) * len(self._groups(inputs)[0])

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work
        settings, normalise, uses_update = self.settings, self.normalise, self.uses_update(inputs)
        checkpoints = select_checkpoints(inputs, settings.checkpoints)
        groups, whole = self._groups(inputs)
        group = groups[part % len(groups)]
        checkpoint = checkpoints[part // len(groups)]
        weights, notes = np.full(len(checkpoints), 1.0 / len(checkpoints)), list[str]()
        if settings.weights == "learning-rate" and len(checkpoints) > 1:
            known = [each.learning_rate for each in checkpoints if each.learning_rate is not None]
            if len(known) == len(checkpoints) and sum(known) > 0:
                weights = np.asarray(known) / sum(known)
            else:
                notes = ["the learning rates of the checkpoints are not recorded: equal weights"]
        weight = float(weights[part // len(groups)])
        engine = open_engine(inputs, checkpoint, settings.layers)
        transform = self.update(checkpoint, engine) if uses_update else None
        unit_group = unit_examples(inputs)[group]
        form_note = exact_note(len(groups))
        if settings.dimension is not None:
            tokens = mean_row_tokens(inputs)
            featurizer = Featurizer.with_projection(engine, settings.dimension, seed=self.seed, tokens=tokens)
            form_note = projection_note(engine.layers.blocks, settings.dimension, tokens)
        update_note = ("rows represented by Adam's update instead of their gradient",) if uses_update else ()
        account = Account(
            features=(settings.dimension or 0) * len(checkpoints),
            covers=(describe_layers(engine.layers),),
            notes=(form_note, checkpoint_note(checkpoints, weights), *notes, *update_note),
        )
        if settings.dimension is not None:
            unit_EK = featurizer.features(unit_group)[0].astype(np.float64)
            unit_EK = weight * (divide_by_norms(unit_EK, "unit") if normalise else unit_EK)
            return feature_scorer(
                inputs, replace(featurizer, transform=transform), unit_EK, account, normalise=normalise
            )
        units = UnitGradients.collect(engine, unit_group, whole=whole)
        weight_E = np.full(len(unit_group), weight)
        if normalise:
            weight_E /= gradient_norms(units.squared_norms(), "unit", group.start)
        return exact_scorer(inputs, units, group, account, weight_E=weight_E, normalise=normalise, transform=transform)

    def _groups(self, inputs: MethodInputs) -> tuple[list[slice], bool]:
        """Return the groups of units that are scored in one pass over the rows, see `unit_groups`."""
        if self.settings.dimension is not None:
            return [slice(0, inputs.n_units)], True
        blocks, whole = choose_layers(inputs.model, self.settings.layers).blocks, self.uses_update(inputs)
        return unit_groups(blocks, unit_examples(inputs), self.settings.memory_mb, whole=whole)


class TracInSettings(WeightedSettings):
    """TracIn as in the GRASP paper; `dimension: null` is the method without projection noise."""

    normalise: bool = Field(
        True, description="Divide gradients by their norms (cosines). Paper: yes; original TracIn: no."
    )


class TracIn(CosineMethod[TracInSettings]):
    """Cosines of gradients, over checkpoints by learning rate.

    Inner products of the gradients of row and unit at checkpoints of the training, weighted by learning rate.

    Source: Pruthi et al. 2020 (TracInCP, arXiv 2002.08484).
    As published: plain inner products, at checkpoints of the training, often of the last layer alone.
    Deviation: normalised, on one block and the final norm, and projected, as in the GRASP paper's appendix; weights are
    divided by their sum; the gradient of a row is that of its mean loss per token.
    """

    settings_type = TracInSettings

    @property
    def normalise(self) -> bool:  # type: ignore[override]
        return self.settings.normalise
