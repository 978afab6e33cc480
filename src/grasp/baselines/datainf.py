r"""DataInf, adapted: influence by a closed form, layer by layer, that swaps averaging and inversion.

    a_{i,e} = sum_l 1/lambda_l [ <v_e, g_i> - 1/M sum_m <v_e, g_m> <g_m, g_i> / (lambda_l + ||g_m||^2) ]_l
            = sum_l <r_e, g_i>_l,        lambda_l = damping * mean_m ||g_m||^2 / d_l

Here g_i is the gradient of row i and v_e that of unit e, <.,.> and [.]_l are taken within layer l, and d_l is the
number of its parameters. The M Fisher rows, with gradients g_m, are the sample of rows over which the Fisher matrix is
averaged. r_e is computed once per unit, so a row costs one inner product.

Start with `DataInf`; `closed_form` is the formula above for one layer, `precondition` the same over whole gradients.

Shape letters: N rows, E units, M Fisher rows, b a few of them, D numbers of a layer, K projected width.
"""

from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from grasp.arrays import F64
from grasp.baselines.checkpoints import training_checkpoints
from grasp.baselines.gradients.factors import squared_norm
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import NO_PROJECTION_HINT, LayerSettings
from grasp.baselines.gradients.projection import Form
from grasp.baselines.gradients.queries import DenseQuery, Queries
from grasp.baselines.gradients.scorers import exact_note, exact_scorer, projected_scorer, projection_note
from grasp.baselines.gradients.session import (
    ExactPlan,
    exact_plan,
    examples_at,
    mean_row_tokens,
    open_engine,
    sampled_rows,
    unit_examples,
)
from grasp.baselines.gradients.sinks import MatrixSink, UseSink, all_blocks
from grasp.baselines.gradients.store import FeatureSpec, FeatureStore
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradients import Example, GradientFactors, LayerSet, PerExample
from grasp.settings import refuse_idle


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
    projection: Form = Field("auto", description="As for tracin.")

    @model_validator(mode="after")
    def _is_projected(self) -> Self:
        if self.dimension is None:
            refuse_idle(self, ("projection",), NO_PROJECTION_HINT)
        return self


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
        return len(self._plan(inputs).groups)

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        account, checkpoint = self._account(inputs), training_checkpoints(inputs)[-1]
        rows = self._fisher_rows(inputs)
        if self.settings.dimension is not None:
            settings = self.settings
            spec = FeatureSpec(settings.layers, settings.dimension, settings.projection, self.seed, per_block=True)
            store = FeatureStore(inputs, work, checkpoint, spec)
            unit_EK = self._solve_projected(inputs, store, rows)
            return projected_scorer(store, unit_EK, account, work)
        engine = open_engine(inputs, checkpoint, self.settings.layers)
        plan, fisher = self._plan(inputs), examples_at(inputs, rows)
        group = plan.groups[part]
        square_LM = np.asarray(work.load_or_compute("fisher-norms", lambda: layer_norms(engine, fisher)))
        queries = Queries.collect(engine, unit_examples(inputs)[group], plan.dense)
        precondition(queries, fisher, square_LM, self.settings.damping)
        return exact_scorer(inputs, queries, group, account)

    def _solve_projected(self, inputs: MethodInputs, store: FeatureStore, rows: list[int]) -> F64:
        """Return r_e of all layers, concatenated, (E, layers x K)."""
        fisher_rows = np.asarray(rows)
        fisher_parts = []
        for start, stop in inputs.blocks():
            block_rows = fisher_rows[(fisher_rows >= start) & (fisher_rows < stop)]
            if len(block_rows):
                fisher_parts.append(np.asarray(store.rows(start, stop)[0][:, block_rows - start], dtype=np.float64))
        fisher_LMK = np.concatenate(fisher_parts, axis=1)
        unit_LEK = np.asarray(store.units(), dtype=np.float64)
        solved = [  # r_e of each layer
            closed_form(unit_EK, fisher_MK, self.settings.damping, size / fisher_MK.shape[1])
            for unit_EK, fisher_MK, size in zip(unit_LEK, fisher_LMK, store.sizes, strict=True)
        ]
        return np.concatenate(solved, axis=1)

    def _fisher_rows(self, inputs: MethodInputs) -> list[int]:
        settings = self.settings
        pool = min(settings.prefix_rows or inputs.n_rows, inputs.n_rows)
        count = min(settings.fisher_rows, max(1, round(settings.fisher_fraction * pool)))
        return sampled_rows(inputs, count, self.seed, "datainf", prefix=settings.prefix_rows)

    def _plan(self, inputs: MethodInputs) -> ExactPlan:
        if self.settings.dimension is not None:
            return ExactPlan((), (slice(0, inputs.n_units),))
        layers = choose_layers(inputs.model, self.settings.layers)
        tokens, units = mean_row_tokens(inputs), unit_examples(inputs)
        return exact_plan(layers, units, tokens, self.settings.memory_mb, dense=True, copies=2)

    def _account(self, inputs: MethodInputs) -> Account:
        settings, layers = self.settings, choose_layers(inputs.model, self.settings.layers)
        form_note = exact_note(len(self._plan(inputs).groups))
        if settings.dimension is not None:
            form_note = "each layer separately " + projection_note(
                layers.blocks, settings.dimension, settings.projection, mean_row_tokens(inputs)
            )
        fisher = f"{len(self._fisher_rows(inputs))} Fisher rows, damping {settings.damping:g}"
        return Account(self._features(layers), (describe_layers(layers),), (form_note, fisher))

    def _features(self, layers: LayerSet) -> int:
        return (self.settings.dimension or 0) * len(layers.blocks)


def closed_form(unit_ED: F64, fisher_MD: F64, damping: float, spread: float = 1.0) -> F64:
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
    lambda_l = layer_damping(square_M, fisher_MD.shape[1] * spread, damping, "a layer")
    coefficient_EM = (unit_ED @ fisher_MD.T) / (lambda_l + square_M)
    return np.asarray((unit_ED - coefficient_EM @ fisher_MD / len(fisher_MD)) / lambda_l)


def layer_damping(square_M: F64, size: float, damping: float, location: str) -> float:
    """Return lambda of a layer.

    Args:
        square_M: squared norms of the gradients of the Fisher rows in the layer.
        size: number of parameters of the layer.
        damping: lambda in units of the mean squared gradient.
        location: name of the layer, for messages.
    Raises:
        ModelError: all Fisher gradients are zero, or one is not finite.
    """
    lambda_l = damping * float(square_M.mean()) / size
    if not (np.isfinite(lambda_l) and lambda_l > 0):
        raise ModelError(
            f"datainf: the mean squared gradient of the Fisher rows in {location} is {lambda_l / damping}, expected a "
            "positive number; use model.dtype bfloat16 or float32, or leave the layer out"
        )
    return lambda_l


def layer_norms(engine: PerExample, rows: list[Example]) -> F64:
    """Return ||g_m||^2 of each layer, (layers, M)."""
    square_LM = np.zeros((len(engine.layers.blocks), len(rows)))
    for index_B in engine.batches(rows):
        square_LB = torch.zeros(len(engine.layers.blocks), len(index_B), dtype=engine.work, device=engine.model.device)

        def add_norms(number: int, uses: list[GradientFactors], at: slice, square_LB: Tensor = square_LB) -> None:
            square_LB[number, at] += squared_norm(uses, engine.layers.blocks[number].left)

        sink = UseSink(engine, all_blocks(engine), add_norms)
        engine.run([rows[int(i)] for i in index_B], sink)
        sink.finish()
        square_LM[:, index_B] = square_LB.cpu().numpy()
    return square_LM


def precondition(queries: Queries, rows: list[Example], square_LM: F64, damping: float) -> None:
    """Replace the units' gradients by r_e, in place, in one pass over the Fisher rows; see `closed_form`."""
    engine = queries.engine
    blocks = engine.layers.blocks
    units = [query.matrix_ED for query in queries.blocks if isinstance(query, DenseQuery)]
    lambdas = [
        layer_damping(square_M, block.size, damping, block.name)
        for square_M, block in zip(square_LM, blocks, strict=True)
    ]
    solved = [unit_ED.clone() for unit_ED in units]

    def add_correction(number: int, matrix: Tensor, at: slice) -> None:
        del at
        row_bD = matrix.flatten(1)
        coefficient_Eb = (units[number] @ row_bD.T) / (lambdas[number] + row_bD.square().sum(dim=1))
        solved[number].addmm_(coefficient_Eb, row_bD, alpha=-1.0 / len(rows))

    sink = MatrixSink(engine, all_blocks(engine), add_correction)
    for index_B in engine.batches(rows):
        engine.run([rows[int(i)] for i in index_B], sink)
        sink.finish()
    for number, query in enumerate(queries.blocks):
        assert isinstance(query, DenseQuery)
        query.matrix_ED = solved[number] / lambdas[number]
