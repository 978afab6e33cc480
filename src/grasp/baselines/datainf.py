r"""DataInf, adapted: influence by a closed form, layer by layer, that swaps averaging and inversion.

    a_{i,e} = sum_l 1/lambda_l [ <v_e, g_i> - 1/M sum_m <v_e, g_m> <g_m, g_i> / (lambda_l + ||g_m||^2) ]_l
            = sum_l <r_e, g_i>_l,        lambda_l = damping * mean_m ||g_m||^2 / d_l

Here g_i is the gradient of row i and v_e that of unit e, <.,.> and [.]_l are taken within layer l, and d_l is the
number of its parameters. The M Fisher rows, with gradients g_m, are the sample of rows over which the Fisher matrix is
averaged. r_e is computed once per unit, so a row costs one inner product.

Start with `DataInf`; `closed_form` is the formula above for one layer, `precondition` the same over whole gradients.

Shape letters: N rows, E units, M Fisher rows, b a few of them, D numbers of a layer, K projected width.
"""

from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from grasp.arrays import F64
from grasp.baselines.checkpoints import training_checkpoints
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import LayerSettings
from grasp.baselines.gradients.scorers import (
    exact_note,
    exact_scorer,
    examples_at,
    feature_scorer,
    mean_row_tokens,
    open_engine,
    projection_note,
    sampled_rows,
    unit_examples,
)
from grasp.baselines.gradients.whole import UnitGradients, run_whole, unit_groups
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradients import Example


class DataInfSettings(LayerSettings):
    """DataInf, adapted; the paper tunes layers, prefix_rows, fisher_fraction and damping."""

    damping: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="lambda of a layer in units of its mean squared gradient. DataInf: 0.1.",
    )
    prefix_rows: int | None = Field(None, ge=1, description="Draw Fisher rows from the first N rows; null: all rows.")
    fisher_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of those rows that is used, drawn with the seed."
    )
    fisher_rows: int = Field(1024, ge=1, description="Maximum number of Fisher rows.")
    dimension: int | None = Field(
        None,
        ge=1,
        description="Width of the projection of each layer's gradient; null: exact. DataInf has no projection.",
    )


class DataInf(BlockMethod[DataInfSettings]):
    """Influence by a closed form, layer by layer (adapted).

    Influence with the inverse Fisher matrix of each layer replaced by the mean of rank-one inverses.

    Source: Kwon et al. 2024 (arXiv 2310.00902), equation 5.
    As published: gradients of LoRA's matrices in a fine-tuned model, a Fisher matrix over all training examples,
    and lambda_l = 0.1 times the mean squared gradient of the layer.
    Deviation: layers of the model itself instead of LoRA's; Fisher rows are a sample of the corpus.
    """

    settings_type = DataInfSettings
    requires = frozenset({"tokens", "model", "checkpoints"})

    def parts(self, inputs: MethodInputs) -> int:
        return len(self._groups(inputs))

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work
        settings, groups = self.settings, self._groups(inputs)
        engine = open_engine(inputs, training_checkpoints(inputs)[-1], settings.layers)
        blocks, unit_group = engine.layers.blocks, unit_examples(inputs)[groups[part]]
        pool = min(settings.prefix_rows or inputs.n_rows, inputs.n_rows)
        count = min(settings.fisher_rows, max(1, round(settings.fisher_fraction * pool)))
        fisher = examples_at(inputs, sampled_rows(inputs, count, self.seed, "datainf", prefix=settings.prefix_rows))
        covers = (describe_layers(engine.layers),)
        fisher_note = f"{len(fisher)} Fisher rows, damping {settings.damping:g}"
        if settings.dimension is None:
            units = UnitGradients.collect(engine, unit_group)
            precondition(units, fisher, settings.damping)
            account = Account(0, covers, (exact_note(len(groups)), fisher_note))
            return exact_scorer(inputs, units, groups[part], account)
        tokens = mean_row_tokens(inputs)
        featurizer = Featurizer.with_projection(
            engine, settings.dimension, seed=self.seed, tokens=tokens, per_block=True
        )
        fisher_LMK, unit_LEK = (
            featurizer.features(examples)[0].astype(np.float64) for examples in (fisher, unit_group)
        )
        solved = [  # r_e of each layer
            closed_form(unit_EK, fisher_MK, settings.damping, block.size / settings.dimension)
            for unit_EK, fisher_MK, block in zip(unit_LEK, fisher_LMK, blocks, strict=True)
        ]
        note = projection_note(blocks, settings.dimension, tokens)
        account = Account(settings.dimension * len(blocks), covers, (f"each layer separately {note}", fisher_note))
        return feature_scorer(inputs, featurizer, np.concatenate(solved, axis=1), account)

    def _groups(self, inputs: MethodInputs) -> list[slice]:
        """Return the groups of units that are scored in one pass over the rows."""
        if self.settings.dimension is not None:
            return [slice(0, inputs.n_units)]
        blocks = choose_layers(inputs.model, self.settings.layers).blocks
        return unit_groups(blocks, unit_examples(inputs), self.settings.memory_mb, whole=True, copies=2)[0]


def closed_form(unit_ED: F64, fisher_MD: F64, damping: float, spread: float) -> F64:
    """Return r_e of one layer, (E, D).

    Args:
        unit_ED: gradients of the units in this layer.
        fisher_MD: gradients of the Fisher rows in this layer.
        damping: lambda_l in units of the mean squared gradient.
        spread: size of the layer / D. A projection preserves squared norms, but lambda is defined with the size of the
            unprojected layer.
    """
    # Sherman-Morrison for each rank-one term: (lambda I + g g^T)^{-1} v = (v - <v, g> g / (lambda + ||g||^2)) / lambda.
    square_M = np.einsum("md,md->m", fisher_MD, fisher_MD)
    lambda_l = layer_damping(float(square_M.mean()), fisher_MD.shape[1] * spread, damping, "a layer")
    coefficient_EM = (unit_ED @ fisher_MD.T) / (lambda_l + square_M)
    return np.asarray((unit_ED - coefficient_EM @ fisher_MD / len(fisher_MD)) / lambda_l)


def layer_damping(mean_square: float, size: float, damping: float, location: str) -> float:
    """Return lambda of a layer.

    Args:
        mean_square: mean squared norm of the gradients of the Fisher rows in the layer.
        size: number of parameters of the layer.
        damping: lambda in units of the mean squared gradient.
        location: name of the layer, for messages.
    Raises:
        ModelError: all Fisher gradients are zero, or one is not finite.
    """
    lambda_l = damping * mean_square / size
    if not (np.isfinite(lambda_l) and lambda_l > 0):
        raise ModelError(
            f"datainf: the mean squared gradient of the Fisher rows in {location} is {lambda_l / damping}, expected a "
            "positive number; use model.dtype bfloat16 or float32, or leave the layer out"
        )
    return lambda_l


def precondition(units: UnitGradients, rows: list[Example], damping: float) -> None:
    """Replace the units' gradients by r_e, in place, in two passes over the Fisher rows; see `closed_form`.

    Args:
        units: whole gradients of the units.
        rows: the Fisher rows.
        damping: lambda_l in units of the mean squared gradient.
    """
    engine = units.engine
    square_L = torch.zeros(len(units.matrices), dtype=torch.float64)  # ||g_m||^2 of each layer, summed over the rows

    def add_norms(number: int, matrix: Tensor, at: slice) -> None:
        del at
        square_L[number] += float(matrix.square().sum(dtype=torch.float64))

    def add_correction(number: int, matrix: Tensor, at: slice) -> None:
        del at
        row_bD, unit_ED = matrix.flatten(1), units.matrices[number].flatten(1)
        coefficient_Eb = (unit_ED @ row_bD.T) / (lambdas[number] + row_bD.square().sum(dim=1))
        solved[number].flatten(1).addmm_(coefficient_Eb, row_bD, alpha=-1.0 / len(rows))

    batches = [[rows[int(i)] for i in index_B] for index_B in engine.batches(rows)]
    for batch in batches:
        run_whole(engine, batch, add_norms)
    lambdas = [
        layer_damping(float(square) / len(rows), block.size, damping, block.name)
        for square, block in zip(square_L, engine.layers.blocks, strict=True)
    ]
    solved = [matrix.clone() for matrix in units.matrices]
    for batch in batches:
        run_whole(engine, batch, add_correction)
    units.matrices = [matrix / lambda_l for matrix, lambda_l in zip(solved, lambdas, strict=True)]
