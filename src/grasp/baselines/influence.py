"""Influence functions with a Kronecker-factored Fisher matrix, for the last layer or for all layers.

    a_{i,e} = sum_l <F_l^{-1} g_e, g_i>_l

Here g_i and g_e are the gradients of row i and unit e, <.,.>_l is taken within layer l, and F_l is the Fisher matrix of
the layer, an average over the Fisher rows, a sample of rows. K-FAC approximates F_l by a Kronecker product of two small
factors; EK-FAC keeps the eigenvectors of these factors and corrects the eigenvalues.

Start with `Influence`; the Fisher factors are in `grasp.baselines.gradients.curvature`.

Shape letters: E units, M Fisher rows.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

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
from grasp.baselines.gradients.scorers import (
    exact_note,
    exact_scorer,
    examples_at,
    open_engine,
    sampled_rows,
    unit_examples,
)
from grasp.baselines.gradients.whole import UnitGradients, unit_groups
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.methods.contract import Account, MethodInputs
from grasp.seeds import stream


class InfluenceSettings(LayerSettings):
    """K-FAC influence of the last layer; `layers: all` with `curvature: ekfac` covers Grosse et al. 2023."""

    layers: Patterns = Field(
        ("head",), description="Parameters covered, as for tracin; the default is last-layer influence."
    )
    curvature: Literal["kfac", "ekfac"] = Field(
        "kfac", description="kfac: Kronecker factors; ekfac: with corrected eigenvalues."
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
        return len(self._groups(inputs)[0])

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        settings, (groups, whole) = self.settings, self._groups(inputs)
        engine = open_engine(inputs, training_checkpoints(inputs)[-1], settings.layers)
        is_ekfac = settings.curvature == "ekfac"
        rows = sampled_rows(inputs, settings.fisher_rows, self.seed, "fisher")
        examples, uniforms = examples_at(inputs, rows), None
        if settings.labels == "sampled":
            uniforms = [
                stream(self.seed, "baselines", "fisher labels", row).random(example.labels)
                for row, example in zip(rows, examples, strict=True)
            ]
        fisher = Fisher(examples, uniforms)

        def compute() -> dict[str, NDArray[Any]]:
            """Compute the factors of each block, for ekfac their eigenvectors and corrected eigenvalues."""
            factors = second_moments(engine, fisher, settings.full_width)
            sides: dict[str, list[Tensor]] = {
                "left": [factor.left for factor in factors],
                "right": [factor.right_YY for factor in factors],
            }
            if is_ekfac:
                bases = [Basis.from_factors(factor) for factor in factors]
                no_rotation = torch.zeros(0)  # of a diagonal factor
                sides = {
                    "left": [no_rotation if basis.left_XX is None else basis.left_XX for basis in bases],
                    "right": [basis.right_YY for basis in bases],
                    "values": corrected_eigenvalues(engine, fisher, bases),
                }
            return {f"{side}-{k}": t.cpu().numpy() for side, tensors in sides.items() for k, t in enumerate(tensors)}

        arrays = cached(work / "fisher.safetensors", compute)
        left, right, values = (
            [torch.from_numpy(arrays[f"{side}-{k}"]).to(engine.model.device) for k in range(len(engine.layers.blocks))]
            for side in ("left", "right", "values" if is_ekfac else "right")
        )
        units = UnitGradients.collect(engine, unit_examples(inputs)[groups[part]], whole=whole)
        if is_ekfac:
            bases = [Basis(a if len(a) else None, b) for a, b in zip(left, right, strict=True)]
            apply_ekfac(units, bases, values, settings.damping)
        else:
            apply_kfac(units, [Factors(a, b) for a, b in zip(left, right, strict=True)], settings.damping)
        fisher_note = (
            f"{settings.curvature} over {len(rows)} rows with {settings.labels} labels, damping {settings.damping:g}"
        )
        notes = [exact_note(len(groups)), fisher_note]
        blocks = engine.layers.blocks
        if wide := [b.name for b in blocks if b.left > settings.full_width and "embedding" not in b.kinds]:
            notes.append(f"diagonal on the output side of {', '.join(wide)}")
        account = Account(covers=(describe_layers(engine.layers),), notes=tuple(notes))
        return exact_scorer(inputs, units, groups[part], account)

    def _groups(self, inputs: MethodInputs) -> tuple[list[slice], bool]:
        """Return the groups of units that are scored in one pass over the rows, see `unit_groups`."""
        blocks, is_ekfac = choose_layers(inputs.model, self.settings.layers).blocks, self.settings.curvature == "ekfac"
        if not is_ekfac:
            check_untied(blocks)
        copies = 1 if is_ekfac else 2
        return unit_groups(blocks, unit_examples(inputs), self.settings.memory_mb, whole=is_ekfac, copies=copies)
