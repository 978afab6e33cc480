"""Influence functions with a Kronecker-factored Fisher matrix, for the last layer or for all layers.

    a_{i,e} = sum_l <F_l^{-1} g_e, g_i>_l

Here g_i and g_e are the gradients of row i and unit e, <.,.>_l is taken within layer l, and F_l is the Fisher matrix of
the layer, an average over the Fisher rows, a sample of rows. K-FAC approximates F_l by a Kronecker product of two small
factors; EK-FAC keeps the eigenvectors of these factors and corrects the eigenvalues.

Start with `Influence`; the Fisher factors are in `grasp.baselines.gradients.curvature`.

Shape letters: E units, M Fisher rows.
"""

from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from grasp.baselines.checkpoints import training_checkpoints
from grasp.baselines.gradients.curvature import (
    Basis,
    Factors,
    Fisher,
    apply_ekfac,
    apply_kfac,
    check_untied,
    corrected_eigenvalues,
    second_moments,
)
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import LayerSettings, Patterns
from grasp.baselines.gradients.queries import Queries
from grasp.baselines.gradients.scorers import exact_note, exact_scorer
from grasp.baselines.gradients.session import (
    ExactPlan,
    exact_plan,
    examples_at,
    mean_row_tokens,
    open_engine,
    sampled_rows,
    unit_examples,
)
from grasp.baselines.stored import BlockMethod, RowScorer, digest
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs
from grasp.models.gradients import PerExample
from grasp.seeds import stream
from grasp.settings import refuse_idle


class InfluenceSettings(LayerSettings):
    """K-FAC influence of the last layer; `layers: all` with `curvature: ekfac` covers Grosse et al. 2023."""

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
        "sampled",
        description="Labels of the Fisher matrix: drawn from the model, or those of the corpus (empirical Fisher).",
    )
    fisher_rows: int = Field(
        1024, ge=1, description="Number of rows that the Fisher matrix is averaged over, drawn with the seed."
    )
    full_width: int = Field(
        2048,
        ge=1,
        description="A layer with more outputs than this, usually the head, has a diagonal factor on the output side.",
    )

    @model_validator(mode="after")
    def _has_a_fisher_matrix(self) -> Self:
        if self.curvature == "none":
            idle = ("damping", "labels", "fisher_rows", "full_width")
            refuse_idle(self, idle, "curvature: none has no Fisher matrix")
        return self


class Influence(BlockMethod[InfluenceSettings]):
    """Inverse Fisher matrix by K-FAC or EK-FAC: last layer or all.

    Inner product of the row's gradient with the inverse Fisher matrix times the unit's gradient.

    Source: Koh and Liang 2017 (arXiv 1703.04730); Grosse et al. 2023 (arXiv 2308.03296) for language models.
    As published: Koh and Liang estimate the inverse Hessian iteratively; Grosse et al. use EK-FAC on the MLP layers,
    with labels sampled from the model and a damping of 0.1 times the mean eigenvalue.
    Deviation: embeddings and heads may be covered, the output side of a wide head with a diagonal factor; norms with
    their full Fisher matrix.
    """

    settings_type = InfluenceSettings
    requires = frozenset({"tokens", "model", "checkpoints"})

    def parts(self, inputs: MethodInputs) -> int:
        return len(self._plan(inputs).groups)

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        engine = open_engine(inputs, training_checkpoints(inputs)[-1], self.settings.layers)
        plan = self._plan(inputs)
        group = plan.groups[part]
        queries = Queries.collect(engine, unit_examples(inputs)[group], plan.dense)
        if self.settings.curvature != "none":
            self._precondition(inputs, work, queries)
        return exact_scorer(inputs, queries, group, self._account(inputs))

    def _precondition(self, inputs: MethodInputs, work: WorkArea, queries: Queries) -> None:
        """Replace the units' gradients by F^{-1} g_e, in place; the Fisher factors are cached on disk."""
        settings, engine = self.settings, queries.engine
        area = work.shared(f"fisher-{digest(self._fisher_identity(inputs))}")
        fisher = self._fisher(inputs)
        factors = _load_factors(area, engine, fisher, settings.full_width)
        if settings.curvature == "kfac":
            apply_kfac(queries, factors, settings.damping)
            return
        bases = [Basis.from_factors(factor) for factor in factors]
        names = [f"eigenvalues-{k}" for k in range(len(bases))]
        if any(area.load(name) is None for name in names):
            for name, eigenvalues in zip(names, corrected_eigenvalues(engine, fisher, bases), strict=True):
                area.save(name, eigenvalues.cpu().numpy())
        eigenvalues_by_block = [
            torch.from_numpy(np.array(area.load_required(name))).to(engine.model.device) for name in names
        ]
        apply_ekfac(queries, bases, eigenvalues_by_block, settings.damping)

    def _fisher(self, inputs: MethodInputs) -> Fisher:
        """Return the Fisher rows and, if labels are sampled, a uniform number for each label to draw it with."""
        rows = sampled_rows(inputs, self.settings.fisher_rows, self.seed, "fisher")
        examples = examples_at(inputs, rows)
        if self.settings.labels == "true":
            return Fisher(examples, None)
        return Fisher(
            examples,
            [
                stream(self.seed, "baselines", "fisher labels", row).random(example.labels)
                for row, example in zip(rows, examples, strict=True)
            ],
        )

    def _fisher_identity(self, inputs: MethodInputs) -> dict[str, object]:
        """Return everything that determines the Fisher matrix, for its directory in the cache."""
        settings = self.settings
        return {
            "layers": list(settings.layers),
            "labels": settings.labels,
            "rows": settings.fisher_rows,
            "width": settings.full_width,
            "seed": self.seed,
            "checkpoint": training_checkpoints(inputs)[-1].fingerprint,
        }

    def _plan(self, inputs: MethodInputs) -> ExactPlan:
        layers = choose_layers(inputs.model, self.settings.layers)
        if self.settings.curvature == "kfac":
            check_untied(layers.blocks)
        return exact_plan(
            layers,
            unit_examples(inputs),
            mean_row_tokens(inputs),
            self.settings.memory_mb,
            dense=self.settings.curvature == "ekfac",
            copies=2 if self.settings.curvature == "kfac" else 1,
        )

    def _account(self, inputs: MethodInputs) -> Account:
        settings, layers = self.settings, choose_layers(inputs.model, self.settings.layers)
        wide = [b.name for b in layers.blocks if b.left > settings.full_width and "embedding" not in b.kinds]
        notes = [exact_note(len(self._plan(inputs).groups))]
        if settings.curvature != "none":
            rows = min(settings.fisher_rows, inputs.n_rows)
            notes.append(
                f"{settings.curvature} over {rows} rows with {settings.labels} labels, damping {settings.damping:g}"
            )
            if wide:
                notes.append(f"diagonal on the output side of {', '.join(wide)}")
        return Account(covers=(describe_layers(layers),), notes=tuple(notes))


def _load_factors(area: WorkArea, engine: PerExample, fisher: Fisher, full_width: int) -> list[Factors]:
    """Load the factors from disk; compute and save them if they are missing."""
    count = len(engine.layers.blocks)
    names = [(f"left-{k}", f"right-{k}") for k in range(count)]
    if any(area.load(name) is None for pair in names for name in pair):
        with area.timed():
            for (left, right), factor in zip(names, second_moments(engine, fisher, full_width), strict=True):
                area.save(left, factor.left.cpu().numpy())
                area.save(right, factor.right_YY.cpu().numpy())
    device = engine.model.device
    return [
        Factors(*(torch.from_numpy(np.array(area.load_required(name))).to(device) for name in pair)) for pair in names
    ]
