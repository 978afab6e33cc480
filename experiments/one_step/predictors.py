"""What is predicted for a case, and by what: expansions of the loss, a sketch of them, and GRASP's relevance.

Shape letters: P players, E units.
"""

import numpy as np
import torch

from experiments.one_step.game import Expansion, Gradients, sketched
from experiments.one_step.setting import Case, World
from grasp.models.causal_lm import ReferenceModel

LABELS = {
    "taylor-1": "full gradient, first order",
    "taylor-2": "full gradient, second order (Hessian by differences)",
    "sketch-1": "64-d CountSketch of gradients, first order",
    "sketch-2": "64-d CountSketch of gradients, with the same second-order correction",
    "head-1": "gradient of the output head alone, first order",
    "grasp-pooled": "GRASP, pooled relevance (the paper's core)",
    "grasp-token": "GRASP, token relevance",
}


IN_NATS = ("taylor-1", "taylor-2", "sketch-1", "sketch-2")  # what predicts utilities in their own unit


def label(name: str) -> str:
    """What a predictor is, for a reader."""
    return LABELS.get(name, name.replace("grasp-", "GRASP, relevance: "))


def predictors(
    world: World, case: Case, reference: ReferenceModel
) -> tuple[dict[str, Expansion], list[dict[str, torch.Tensor]]]:
    """All predictors of a case by name, and the players' gradients by name of the parameter."""
    rows, units = world.players(case), world.units
    gradients = Gradients(reference)
    players = gradients.compute(rows)
    linear_PE, curvature_PPE = gradients.products(players, units), gradients.curvature(players, units)
    sketch_PE = sketched(players, gradients.compute(units), world.settings.sketch, case.seed)
    head = Gradients(reference, ("head",))
    expansions = {
        "taylor-1": Expansion(linear_PE),
        "taylor-2": Expansion(linear_PE, curvature_PPE),
        "sketch-1": Expansion(sketch_PE),
        "sketch-2": Expansion(sketch_PE, curvature_PPE),
        "head-1": Expansion(head.products(head.compute(rows), units)),
    }
    expansions |= grasp_relevance(world, case)
    return expansions, [gradients.named([player[i] for player in players]) for i in range(len(rows))]


def grasp_relevance(world: World, case: Case) -> dict[str, Expansion]:
    """Every relevance kernel that an artifact of this model and corpus has, with the default settings of a build."""
    artifact = world.artifact(case)
    expansions = {}
    for array in artifact.array_names:
        kind, _, kernel = array.partition("_")
        if kind == "relevance":
            expansions[f"grasp-{kernel}"] = Expansion(artifact.array_rows(array, case.row_index).astype(np.float64))
    return expansions
