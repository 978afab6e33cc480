"""Influence functions with a Kronecker-factored Fisher matrix: of the last layer, or of all of them.

    a_{i,e} = sum_l <F_l^{-1} g_e, g_i>_l

Shape letters: E units, M Fisher rows.
"""

from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from grasp.baselines.checkpoints import checkpoints_of
from grasp.baselines.gradients.curvature import (
    Basis,
    Factors,
    Fisher,
    apply_ekfac,
    apply_kfac,
    corrected_eigenvalues,
    refuse_tied,
    second_moments,
)
from grasp.baselines.gradients.layers import choose_layers, described
from grasp.baselines.gradients.method_settings import LayerSettings, Patterns
from grasp.baselines.gradients.queries import Queries
from grasp.baselines.gradients.scorers import ExactScorer, exact_note
from grasp.baselines.gradients.session import (
    ExactPlan,
    exact_plan,
    examples_at,
    open_engine,
    sampled_rows,
    typical_tokens,
    unit_examples,
)
from grasp.baselines.stored import BlockMethod, RowScorer, digest
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradients import PerExample
from grasp.seeds import stream
from grasp.settings import refuse_idle


class InfluenceSettings(LayerSettings):
    """Influence of the last layer by K-FAC; layers: all with curvature: ekfac is Grosse et al. 2023 and more."""

    layers: Patterns = Field(
        ("head",), description="Parameters covered, as for tracin; the default is last-layer influence."
    )
    curvature: Literal["kfac", "ekfac", "none"] = Field(
        "kfac", description="kfac: Kronecker factors; ekfac: with corrected eigenvalues; none: plain inner products."
    )
    damping: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="Added to the eigenvalues, in units of their mean in the layer; kfac adds its root to each factor.",
    )
    labels: Literal["sampled", "true"] = Field(
        "sampled", description="Of the Fisher matrix: drawn from the model, or the corpus' own (the empirical Fisher)."
    )
    fisher_rows: int = Field(
        1024, ge=1, description="Rows that the Fisher matrix is the mean over, drawn for the seed."
    )
    full_width: int = Field(
        2048,
        ge=1,
        description="A layer with more outputs than this has a diagonal factor on their side: a head, mostly.",
    )

    @model_validator(mode="after")
    def _has_a_fisher_matrix(self) -> Self:
        if self.curvature == "none":
            idle = ("damping", "labels", "fisher_rows", "full_width")
            refuse_idle(self, idle, "curvature: none has no Fisher matrix")
        return self


class Influence(BlockMethod[InfluenceSettings]):
    """Inverse Fisher matrix by K-FAC or EK-FAC: last layer or all.

    Inverse Fisher matrix times the unit's gradient, times the gradient of the row.

    Source: Koh and Liang 2017; Grosse et al. 2023 for K-FAC and EK-FAC in language models. Deviation: embeddings and
    heads may be covered, the output side of a wide head by a diagonal factor; norms by their full Fisher matrix.
    """

    settings_type = InfluenceSettings
    looks_at = frozenset({"tokens", "model", "checkpoints"})

    def parts(self, material: MethodInputs) -> int:
        return len(self._plan(material).groups)

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        engine = open_engine(material, checkpoints_of(material)[-1], self.settings.layers)
        plan = self._plan(material)
        group = plan.groups[part]
        queries = Queries.collect(engine, unit_examples(material)[group.first : group.last], plan.dense)
        if self.settings.curvature != "none":
            self._precondition(material, work, queries)
        return ExactScorer(material, queries, group, self._account(material))

    def _precondition(self, material: MethodInputs, work: WorkArea, queries: Queries) -> None:
        own, engine = self.settings, queries.engine
        area = work.shared(f"fisher-{digest(self._fisher_identity(material))}")
        fisher = self._fisher(material)
        factors = _kept_factors(area, engine, fisher, own.full_width)
        if own.curvature == "kfac":
            apply_kfac(queries, factors, own.damping)
            return
        bases = [Basis.from_factors(one) for one in factors]
        names = [f"eigenvalues-{k}" for k in range(len(bases))]
        if any(area.load(name) is None for name in names):
            for name, found in zip(names, corrected_eigenvalues(engine, fisher, bases), strict=True):
                area.save(name, found.cpu().numpy())
        values = [torch.from_numpy(np.array(area.loaded(name))).to(engine.model.device) for name in names]
        apply_ekfac(queries, bases, values, own.damping)

    def _fisher(self, material: MethodInputs) -> Fisher:
        rows = sampled_rows(material, self.settings.fisher_rows, self.seed, "fisher")
        examples = examples_at(material, rows)
        if self.settings.labels == "true":
            return Fisher(examples, None)
        return Fisher(
            examples,
            [
                stream(self.seed, "baselines", "fisher labels", row).random(example.labels)
                for row, example in zip(rows, examples, strict=True)
            ],
        )

    def _fisher_identity(self, material: MethodInputs) -> dict[str, object]:
        own = self.settings
        return {
            "layers": list(own.layers),
            "labels": own.labels,
            "rows": own.fisher_rows,
            "width": own.full_width,
            "seed": self.seed,
            "checkpoint": checkpoints_of(material)[-1].fingerprint,
        }

    def _plan(self, material: MethodInputs) -> ExactPlan:
        layers = choose_layers(material.model, self.settings.layers)
        if self.settings.curvature == "kfac":
            refuse_tied(layers.blocks)
        return exact_plan(
            layers,
            unit_examples(material),
            typical_tokens(material),
            self.settings.memory_mb,
            dense=self.settings.curvature == "ekfac",
            copies=2 if self.settings.curvature == "kfac" else 1,
        )

    def _account(self, material: MethodInputs) -> Account:
        own, layers = self.settings, choose_layers(material.model, self.settings.layers)
        wide = [b.name for b in layers.blocks if b.left > own.full_width and "embedding" not in b.kinds]
        notes = [exact_note(len(self._plan(material).groups))]
        if own.curvature != "none":
            rows = min(own.fisher_rows, material.n_rows)
            notes.append(f"{own.curvature} over {rows} rows with {own.labels} labels, damping {own.damping:g}")
            if wide:
                notes.append(f"diagonal on the output side of {', '.join(wide)}")
        return Account(covers=(described(layers),), notes=tuple(notes))


def _kept_factors(area: WorkArea, engine: PerExample, fisher: Fisher, full_width: int) -> list[Factors]:
    """Factors from disk, or made and kept there."""
    count = len(engine.layers.blocks)
    names = [(f"left-{k}", f"right-{k}") for k in range(count)]
    if any(area.load(name) is None for pair in names for name in pair):
        with area.timed():
            for (left, right), made in zip(names, second_moments(engine, fisher, full_width), strict=True):
                area.save(left, made.left.cpu().numpy())
                area.save(right, made.right_YY.cpu().numpy())
    device = engine.model.device
    return [Factors(*(torch.from_numpy(np.array(area.loaded(name))).to(device) for name in pair)) for pair in names]
