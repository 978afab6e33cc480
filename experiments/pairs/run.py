r"""Does a second order in the unit's logits predict better than relevance, which is the first?

    python -m experiments.pairs.run ART --runs experiments/environments/cc-topic \
        --held-out experiments/environments/cc-format --out experiments/pairs/cc.json

A step on a subset's mean gradient of the output layer moves the logits at a unit's position t by

    delta_t(S) = -eta D G(S) W^2 (h_t - mean),      G(S) = mean_{i in S} mean_{p in P_i} xi_p (x) (h_p - mean)

whose product with -xi_t is the token kernel. The second order of the unit's loss is a sum over pairs of rows:

    U(S) = sum_i a_ie / |S| - 1/2 mean_t delta_t^T (diag p_t - p_t p_t^T) delta_t

`exact` is the loss of the moved logits, all orders. eta is set so that the first order has a given standard deviation
over subsets, in nats. `alone` is the second order by itself, standardised and added to the built-in rule at several
weights. The weight is chosen on development results, by the lower end of the gain; held-out results are evaluated once.
Shape letters: B subsets, N rows, E units, S unit positions, P row positions, V vocabulary, H hidden width.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.mistakes import in_one_line
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.kernels.whitening import Whitener, second_moments
from grasp.methods.contract import MethodInputs
from grasp.models.forward_pass import forward_passes
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.pipeline.model_pass import ModelPass
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream

SIZES = (0.03, 0.1, 0.3, 1.0)  # nats: standard deviation over subsets of the first order, mean over units
WEIGHTS = (-0.5, -0.25, 0.25, 0.5)  # of the second order relative to the built-in rule, both with standard deviation 1
RESAMPLES = 1_000
SHIPS, TOKEN = "what ships", "token kernel"
AT_ONCE = 64  # rows whose gradients are held together


@dataclass(frozen=True)
class UnitSide:
    """The unit's side of a step: what its positions see of the output layer's change, and what they predicted."""

    v_SH: Tensor  # W^2 (h - mean)
    precondition_V: Tensor
    logits_SV: Tensor
    label_S: Tensor
    unit_S: Tensor
    n_units: int

    def mean(self, value_S: Tensor) -> F64:
        """Mean over the positions of every unit, (E,)."""
        total_E = value_S.new_zeros(self.n_units).index_add_(0, self.unit_S, value_S)
        return (total_E / torch.bincount(self.unit_S, minlength=self.n_units)).double().numpy()

    def change(self, gradient_VH: Tensor) -> Tensor:
        """What a step of size 1 takes away from the logits, (S, V)."""
        return (self.v_SH @ gradient_VH.T) * self.precondition_V

    def first(self, change_SV: Tensor) -> F64:
        """First order of the utility for a step of size 1, (E,)."""
        expected_S = (self.probability_SV * change_SV).sum(dim=1)
        return self.mean(expected_S - change_SV.gather(1, self.label_S[:, None])[:, 0])

    def second(self, change_SV: Tensor) -> F64:
        """Half of the variance of the change under the model's own prediction, (E,)."""
        expected_S = (self.probability_SV * change_SV).sum(dim=1)
        return self.mean(0.5 * ((self.probability_SV * change_SV.square()).sum(dim=1) - expected_S.square()))

    def exact(self, change_SV: Tensor, eta: float) -> F64:
        """Utility after a step, all orders, (E,)."""
        moved_SV = self.logits_SV - eta * change_SV
        return self.mean(moved_SV.gather(1, self.label_S[:, None])[:, 0] - moved_SV.logsumexp(dim=1))

    @property
    def probability_SV(self) -> Tensor:  # noqa: N802 - a shape suffix
        return torch.softmax(self.logits_SV, dim=1)


def unit_side(material: MethodInputs, whitener: Whitener) -> UnitSide:
    """One forward pass over the units, with all of their logits."""
    model, features = material.model, material.settings.features
    names = [unit.unit_id for unit in material.units.units]
    units = ModelPass(model, features).units(material.unit_tokens, names)
    with torch.inference_mode():
        logits_SV = model.head.link(model.head.linear_logits(units.hidden_PH).float())
        square_HH = torch.from_numpy(whitener.map_HH @ whitener.map_HH)
        v_SH = ((units.hidden_PH.double() - torch.from_numpy(whitener.mean_H)) @ square_HH).float()
        label_S = units.residual.label_P
    precondition_V = torch.from_numpy(whitener.precondition_V).float()
    return UnitSide(v_SH, precondition_V, logits_SV, label_S, units.row_P, units.n_rows)


def row_gradients(material: MethodInputs, whitener: Whitener) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """mean_p xi_p (x) (h_p - mean) of every row, (n, V, H), some rows at a time."""
    model, features = material.model, material.settings.features
    mean_H = torch.from_numpy(whitener.mean_H).float()
    for start, stop in material.blocks():
        for index, batch in forward_passes(model, material.rows(start, stop), ("all",), features.top_k):
            for first in range(0, len(index), AT_ONCE):
                rows = torch.nonzero((batch.row_P >= first) & (batch.row_P < first + AT_ONCE))[:, 0]
                row_P = batch.row_P[rows] - first
                n = min(AT_ONCE, len(index) - first)
                sparse, hidden_PH = batch.residual.select(rows), batch.hidden_PH[rows] - mean_H
                gradient = torch.zeros(n, model.vocab_size, model.hidden_size)
                for i in range(n):
                    positions = torch.nonzero(row_P == i)[:, 0]
                    dense_PV = torch.zeros(len(positions), model.vocab_size)
                    dense_PV.scatter_add_(1, sparse.index_PK[positions], sparse.value_PK[positions])
                    gradient[i] = dense_PV.T @ hidden_PH[positions] / max(1, len(positions))
                yield start + index[first : first + n], gradient


def subset_gradients(material: MethodInputs, whitener: Whitener, share_BN: F64) -> Tensor:
    """G of every subset, (B, V, H)."""
    total: Tensor | None = None
    with torch.inference_mode():
        for index, gradient in row_gradients(material, whitener):
            part = torch.from_numpy(share_BN[:, index]).float() @ gradient.flatten(1)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total.view(len(share_BN), material.model.vocab_size, -1)


# -------------------------------------------------------------------------------------------------------- predictions


def predictions(side: UnitSide, gradient_BVH: Tensor, whole_VH: Tensor) -> dict[str, F64]:
    """Utility of every subset and unit, (B, E), by what it is made of; the step starts at the whole corpus."""
    with torch.inference_mode():
        changes = [side.change(gradient_VH - whole_VH) for gradient_VH in gradient_BVH]
        first_BE = np.stack([side.first(change_SV) for change_SV in changes])
        second_BE = np.stack([side.second(change_SV) for change_SV in changes])
        scores = {TOKEN: first_BE, "second order alone": -second_BE}
        for size in SIZES:
            eta = size / float(first_BE.std(axis=0).mean())
            scores[f"token, second order, {size} nats"] = eta * first_BE - eta**2 * second_BE
            scores[f"token, all orders, {size} nats"] = np.stack([side.exact(change, eta) for change in changes])
    return scores


def _standard(values_BE: F64) -> F64:
    spread_E = values_BE.std(axis=0)
    return (values_BE - values_BE.mean(axis=0)) / np.where(spread_E > 0, spread_E, 1.0)


def beside_what_ships(ships_BE: F64, predictions: dict[str, F64]) -> dict[str, F64]:
    """Candidates: the pair terms in the place of the token kernel's order, and added to the built-in rule."""
    out = {SHIPS: ships_BE, **predictions}
    extra = {name: values for name, values in predictions.items() if name != TOKEN}
    for name, values_BE in extra.items():
        if name == "second order alone":
            out |= {f"ships + {w} x {name}": _standard(ships_BE) + w * _standard(values_BE) for w in WEIGHTS}
        else:
            pairs_BE = _standard(values_BE) - _standard(predictions[TOKEN])
            out[f"ships + what '{name}' changes"] = _standard(ships_BE) + pairs_BE
    return out


def gains(candidates: dict[str, F64], against: str, realized_BE: F64, unit_targets: list[str]) -> dict[str, Any]:
    """Mean LDS by candidate (mean over targets of that over units), and its gain with a 95 % interval over subsets."""
    n = len(realized_BE)
    draws_RB = stream(0, "pairs", "resamples").multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    weights_RB = np.concatenate([np.ones((1, n)), draws_RB]).astype(np.float32)
    names = list(candidates)
    columns = [candidates[name] for name in names] + [realized_BE]
    rho_CER = rank_correlations(columns, [(c, len(names)) for c in range(len(names))], weights_RB)
    of_target = np.array(unit_targets)
    lds_CR = np.mean([np.nanmean(rho_CER[:, of_target == t], axis=1) for t in dict.fromkeys(unit_targets)], axis=0)
    base_R = lds_CR[names.index(against)]
    table = {}
    for name, lds_R in zip(names, lds_CR, strict=True):
        gain_R = lds_R - base_R
        spread = gain_R[0] + np.quantile(gain_R[1:] - gain_R[1:].mean(), [0.025, 0.975])
        table[name] = {"lds": float(lds_R[0]), "gain": float(gain_R[0]), "interval": [float(x) for x in spread]}
    return table


def _environment(
    scored: CandidatePredictor, score_by_name: dict[str, F64], targets: list[str]
) -> tuple[dict[str, F64], F64, list[str]]:
    """Candidates and realized utility of the units of some targets."""
    (ships,) = scored.predict({SHIPS: DEFAULT_PROTOCOL}, targets)
    utilities = scored.runs.utilities().select(*targets)
    unit_keys = list(zip(utilities.targets, utilities.unit_ids, strict=True))
    place = {unit: e for e, unit in enumerate(ships.units)}
    ships_BE = ships.values_BE[:, [place[unit] for unit in unit_keys]]
    theirs = {name: mine for mine, name in scored.run_targets.items()}
    table = scored.source.units.select(["target", "unit_id"]).to_pylist()
    column = {(line["target"], line["unit_id"]): e for e, line in enumerate(table)}
    columns = [column[theirs[target], unit] for target, unit in unit_keys]
    candidates = beside_what_ships(ships_BE, {name: values[:, columns] for name, values in score_by_name.items()})
    return candidates, utilities.values_BSE.mean(axis=1), [target for target, _ in unit_keys]


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Predict, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pairs.run", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="A development environment.")
    parser.add_argument("--held-out", type=Path, help="One of the same rows, on which nothing is chosen.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    material = MethodInputs(ArtifactReader.open(args.artifact))
    features = material.settings.features
    whitener = Whitener.from_settings(second_moments(material.artifact.moments, "hidden"), features)
    places = [args.runs, *([args.held_out] if args.held_out else [])]
    worlds = [CandidatePredictor.from_runs(RetrainedRuns.open(place), material.artifact) for place in places]
    shares = [np.concatenate([block.weights_BN.toarray() for block in world.blocks]) for world in worlds]
    share_BN = np.concatenate([*shares, np.ones((1, material.n_rows))])
    share_BN /= share_BN.sum(axis=1, keepdims=True)
    gradient_BVH = subset_gradients(material, whitener, share_BN)
    side = unit_side(material, whitener)
    result: dict[str, Any] = {"rows": material.n_rows, "unit positions": len(side.unit_S)}
    first = 0
    for world, share in zip(worlds, shares, strict=True):
        part = gradient_BVH[first : first + len(share)]
        first += len(share)
        score_by_name = predictions(side, part, gradient_BVH[-1])
        info = world.runs.info
        development = [t for t in world.run_targets.values() if info.role == "dev" and t not in info.held_out_targets]
        rest = [t for t in world.run_targets.values() if t not in development]
        for kind, targets in (("development", development), ("held out", rest)):
            if targets:
                name = f"{world.runs.path.name}, {kind}: {', '.join(targets)}"
                candidates, realized_BE, of_unit = _environment(world, score_by_name, targets)
                result[name] = gains(candidates, SHIPS, realized_BE, of_unit)
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
