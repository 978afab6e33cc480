r"""DataInf, adapted: influence by a closed form, layer by layer, that swaps averaging and inversion.

    a_{i,e} = sum_l 1/lambda_l [ <v_e, g_i> - 1/M sum_m <v_e, g_m> <g_m, g_i> / (lambda_l + ||g_m||^2) ]_l
            = sum_l <r_e, g_i>_l,        lambda_l = damping * mean_m ||g_m||^2 / d_l

over M Fisher rows g_m, with d_l the size of layer l. r_e is made once for every unit, so a row costs one inner product.

Shape letters: N rows, E units, M Fisher rows, b a few of them, D numbers of a layer, K projected width.
"""

from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from grasp.arrays import F64
from grasp.baselines.checkpoints import checkpoints_of
from grasp.baselines.gradients.layers import choose_layers, described
from grasp.baselines.gradients.method_settings import UNPROJECTED, LayerSettings
from grasp.baselines.gradients.projection import Form
from grasp.baselines.gradients.queries import DenseQuery, Queries
from grasp.baselines.gradients.scorers import ExactScorer, ProjectedScorer, exact_note, projection_note
from grasp.baselines.gradients.session import (
    ExactPlan,
    Group,
    exact_plan,
    examples_at,
    open_engine,
    sampled_rows,
    typical_tokens,
    unit_examples,
)
from grasp.baselines.gradients.sinks import MatrixSink, UseSink, everything
from grasp.baselines.gradients.store import FeatureSpec, FeatureStore
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradient_factors import squared_norm
from grasp.models.gradients import Example, LayerSet, PerExample, Use
from grasp.settings import refuse_idle


class DataInfSettings(LayerSettings):
    """DataInf-adapted; what the paper searched over are layers, prefix_rows, fisher_fraction and damping."""

    damping: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="lambda of a layer over its mean squared gradient. DataInf: 0.1."
    )
    prefix_rows: int | None = Field(None, ge=1, description="Fisher rows come from the first so many rows; null: all.")
    fisher_fraction: float = Field(1.0, gt=0, le=1, description="Part of them that is used, drawn for the seed.")
    fisher_rows: int = Field(1024, ge=1, description="At most so many of them.")
    dimension: int | None = Field(
        None,
        ge=1,
        description="Project each layer's gradient to so many numbers; null: exact. DataInf has no projection.",
    )
    projection: Form = Field("auto", description="As for tracin.")

    @model_validator(mode="after")
    def _is_projected(self) -> Self:
        if self.dimension is None:
            refuse_idle(self, ("projection",), UNPROJECTED)
        return self


class DataInf(BlockMethod[DataInfSettings]):
    """Influence by a closed form, layer by layer (adapted).

    Influence with the inverse Fisher matrix of each layer replaced by the mean of rank-one inverses.

    Source: Kwon et al. 2024, equation 5. Deviation: layers of the model itself instead of LoRA's; Fisher rows are a
    sample of the corpus.
    """

    settings_type = DataInfSettings
    looks_at = frozenset({"tokens", "model", "checkpoints"})

    def parts(self, material: MethodInputs) -> int:
        return len(self._plan(material).groups)

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        account, checkpoint = self._account(material), checkpoints_of(material)[-1]
        rows = self._fisher_rows(material)
        if self.settings.dimension is not None:
            own = self.settings
            spec = FeatureSpec(own.layers, own.dimension, own.projection, self.seed, per_block=True)
            store = FeatureStore(material, work, checkpoint, spec)
            unit_EK = self._projected(material, store, rows)
            return ProjectedScorer(store, unit_EK, account, work)
        engine = open_engine(material, checkpoint, self.settings.layers)
        plan, fisher = self._plan(material), examples_at(material, rows)
        group = plan.groups[part]
        square_LM = np.asarray(work.kept("fisher-norms", lambda: layer_norms(engine, fisher)))
        queries = Queries.collect(engine, unit_examples(material)[group.first : group.last], plan.dense)
        precondition(queries, fisher, square_LM, self.settings.damping)
        return ExactScorer(material, queries, group, account)

    def _projected(self, material: MethodInputs, store: FeatureStore, rows: list[int]) -> F64:
        """r_e of all layers side by side, (E, layers x K)."""
        wanted = np.asarray(rows)
        parts = []
        for start, stop in material.blocks():
            inside = wanted[(wanted >= start) & (wanted < stop)]
            if len(inside):
                parts.append(np.asarray(store.rows(start, stop)[0][:, inside - start], dtype=np.float64))
        fisher_LMK = np.concatenate(parts, axis=1)
        unit_LEK = np.asarray(store.units(), dtype=np.float64)
        solved = [
            closed_form(unit_EK, fisher_MK, self.settings.damping, size / fisher_MK.shape[1])
            for unit_EK, fisher_MK, size in zip(unit_LEK, fisher_LMK, store.sizes, strict=True)
        ]
        return np.concatenate(solved, axis=1)

    def _fisher_rows(self, material: MethodInputs) -> list[int]:
        own = self.settings
        pool = min(own.prefix_rows or material.n_rows, material.n_rows)
        count = min(own.fisher_rows, max(1, round(own.fisher_fraction * pool)))
        return sampled_rows(material, count, self.seed, "datainf", prefix=own.prefix_rows)

    def _plan(self, material: MethodInputs) -> ExactPlan:
        if self.settings.dimension is not None:
            return ExactPlan((), (Group(0, material.n_units),))
        layers = choose_layers(material.model, self.settings.layers)
        tokens, units = typical_tokens(material), unit_examples(material)
        return exact_plan(layers, units, tokens, self.settings.memory_mb, dense=True, copies=2)

    def _account(self, material: MethodInputs) -> Account:
        own, layers = self.settings, choose_layers(material.model, self.settings.layers)
        how = exact_note(len(self._plan(material).groups))
        if own.dimension is not None:
            how = "each layer apart " + projection_note(
                layers.blocks, own.dimension, own.projection, typical_tokens(material)
            )
        fisher = f"{len(self._fisher_rows(material))} Fisher rows, damping {own.damping:g}"
        return Account(self._features(layers), (described(layers),), (how, fisher))

    def _features(self, layers: LayerSet) -> int:
        return (self.settings.dimension or 0) * len(layers.blocks)


def closed_form(unit_ED: F64, fisher_MD: F64, damping: float, spread: float = 1.0) -> F64:
    """r_e of one layer, (E, D).

    Args:
        spread: numbers of the layer over D: a projection keeps squared norms, lambda is over the layer's own size.
    """
    square_M = np.einsum("md,md->m", fisher_MD, fisher_MD)
    level = layer_damping(square_M, fisher_MD.shape[1] * spread, damping, "a layer")
    share_EM = (unit_ED @ fisher_MD.T) / (level + square_M)
    return np.asarray((unit_ED - share_EM @ fisher_MD / len(fisher_MD)) / level)


def layer_damping(square_M: F64, size: float, damping: float, where: str) -> float:
    """lambda of a layer.

    Raises:
        ModelError: the gradients of all Fisher rows are zero, or one is not finite.
    """
    level = damping * float(square_M.mean()) / size
    if not (np.isfinite(level) and level > 0):
        raise ModelError(
            f"datainf: the mean squared gradient of the Fisher rows in {where} is {level / damping}, expected a "
            "positive number; use model.dtype bfloat16 or float32, or leave the layer out"
        )
    return level


def layer_norms(engine: PerExample, rows: list[Example]) -> F64:
    """||g_m||^2 of each layer, (layers, M)."""
    square_LM = np.zeros((len(engine.layers.blocks), len(rows)))
    for index_B in engine.batches(rows):
        found = torch.zeros(len(engine.layers.blocks), len(index_B), dtype=engine.work, device=engine.model.device)

        def take(number: int, uses: list[Use], at: slice, found: Tensor = found) -> None:
            found[number, at] += squared_norm(uses, engine.layers.blocks[number].left)

        sink = UseSink(engine, everything(engine), take)
        engine.run([rows[int(i)] for i in index_B], sink)
        sink.finish()
        square_LM[:, index_B] = found.cpu().numpy()
    return square_LM


def precondition(queries: Queries, rows: list[Example], square_LM: F64, damping: float) -> None:
    """Turn the units' gradients into r_e, in place, in one pass over the Fisher rows."""
    engine = queries.engine
    blocks = engine.layers.blocks
    units = [query.matrix_ED for query in queries.blocks if isinstance(query, DenseQuery)]
    levels = [
        layer_damping(square_M, block.size, damping, block.name)
        for square_M, block in zip(square_LM, blocks, strict=True)
    ]
    solved = [unit_ED.clone() for unit_ED in units]

    def take(number: int, matrix: Tensor, at: slice) -> None:
        del at
        row_bD = matrix.flatten(1)
        share_Eb = (units[number] @ row_bD.T) / (levels[number] + row_bD.square().sum(dim=1))
        solved[number].addmm_(share_Eb, row_bD, alpha=-1.0 / len(rows))

    sink = MatrixSink(engine, everything(engine), take)
    for index_B in engine.batches(rows):
        engine.run([rows[int(i)] for i in index_B], sink)
        sink.finish()
    for number, query in enumerate(queries.blocks):
        assert isinstance(query, DenseQuery)
        query.matrix_ED = solved[number] / levels[number]
