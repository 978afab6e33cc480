"""Predictions against what happened, case by case, kept as they are made; then means and standard errors over cases.

Shape letters: P players, B subsets, E units.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from experiments.one_step.game import Expansion, StepUtility
from experiments.one_step.predictors import IN_NATS, predictors
from experiments.one_step.setting import PLAYERS, Case, World, fixed_subsets
from experiments.one_step.shapley import permutation_shapley
from grasp.arrays import F64
from grasp.files import write_atomically

Arrays = dict[str, F64]


@dataclass(frozen=True)
class ResultCache:
    """Arrays by name, in files that are whole or not there."""

    directory: Path

    def get(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """What was kept under this name, else made and kept now."""
        path = self.directory / f"{name}.npz"
        if not path.exists():
            buffer = io.BytesIO()
            np.savez_compressed(buffer, allow_pickle=False, **make())
            write_atomically(path, buffer.getvalue())
        with np.load(path, allow_pickle=False) as file:
            return {key: np.asarray(file[key], dtype=np.float64) for key in file.files}


@dataclass(frozen=True)
class Measured:
    """Predictions and realized values of one case at one learning rate; the last column is the mean over units."""

    case: Case
    rate: float
    realized: F64
    predicted: Mapping[str, F64]
    noise_B: F64 | None = None  # standard errors of sampled Shapley values of the mean


def measure(
    world: World, case: Case, cache: ResultCache, say: Callable[[str], None]
) -> tuple[list[Measured], list[Measured]]:
    """Shapley values and subset utilities of one case, (panel a, panel b)."""
    settings = world.settings
    prepared = _Prepared(world, case, cache)
    games, subsets = [], []
    for rate in settings.shapley_rates if case.steps in settings.shapley_steps else ():
        say(f"{case.name}: Shapley values at learning rate {rate:g}")
        arrays = cache.get(f"{case.name}-shapley-{rate:g}", partial(prepared.shapley, rate))
        games.append(
            Measured(
                case,
                rate,
                arrays["value"],
                {name: _with_mean(expansion.shapley(rate)) for name, expansion in prepared.expansions.items()},
                arrays["standard_error"][:, -1],
            )
        )
    masks_BP = fixed_subsets(case, settings.subsets)
    say(f"{case.name}: utilities of {len(masks_BP)} subsets")
    for rate in settings.rates:
        arrays = cache.get(f"{case.name}-subsets-{rate:g}", partial(prepared.of_subsets, rate, masks_BP))
        predicted = {
            name: _with_mean(expansion.utility(masks_BP, rate)) for name, expansion in prepared.expansions.items()
        }
        subsets.append(Measured(case, rate, _with_mean(arrays["utility"]), predicted))
    return games, subsets


class _Prepared:
    """What a case needs beside its learning rate; models and gradients only where something is left to compute."""

    def __init__(self, world: World, case: Case, cache: ResultCache) -> None:
        self._world, self._case = world, case
        self._gradients: list[dict[str, torch.Tensor]] | None = None
        self.expansions = _expansions(cache.get(f"{case.name}-predictors", self._predict))

    def utility(self, rate: float) -> StepUtility:
        """The realized game."""
        if self._gradients is None:
            self._predict()
        assert self._gradients is not None
        world = self._world
        return StepUtility(world.recipe, world.state(self._case), self._gradients, world.unit_tokens, rate)

    def of_subsets(self, rate: float, masks_BP: NDArray[np.bool_]) -> Arrays:
        """Realized utilities of subsets, (B, E)."""
        return {"utility": self.utility(rate)(masks_BP)}

    def shapley(self, rate: float) -> Arrays:
        """Sampled Shapley values of every unit's game and of their mean, with standard errors over permutations."""
        utility = self.utility(rate)
        estimate = permutation_shapley(
            lambda masks_BP: _with_mean(utility(masks_BP)),
            PLAYERS,
            permutations=self._world.settings.permutations,
            seed=self._case.seed,
        )
        return {
            "value": estimate.value_PE,
            "standard_error": estimate.standard_error_PE,
            "evaluations": np.array(estimate.evaluations, dtype=np.float64),
        }

    def _predict(self) -> Arrays:
        expansions, self._gradients = predictors(self._world, self._case, self._world.reference(self._case))
        arrays = {f"{name}.linear": expansion.linear_PE for name, expansion in expansions.items()}
        for name, predictor in expansions.items():
            if predictor.curvature_PPE is not None:
                arrays[f"{name}.curvature"] = predictor.curvature_PPE
        return arrays


def _expansions(arrays: Arrays) -> dict[str, Expansion]:
    names = [key.removesuffix(".linear") for key in arrays if key.endswith(".linear")]
    return {name: Expansion(arrays[f"{name}.linear"], arrays.get(f"{name}.curvature")) for name in names}


def _with_mean(values_BE: F64) -> F64:
    return np.concatenate([values_BE, values_BE.mean(axis=1, keepdims=True)], axis=1)


def spearman_columns(first_BE: F64, second_BE: F64) -> F64:
    """Rank correlation of each column, (E,); nan where one of them is constant."""
    ranks = [rankdata(values, axis=0) for values in (first_BE, second_BE)]
    centred = [rank - rank.mean(axis=0) for rank in ranks]
    norm_E = np.sqrt((centred[0] ** 2).sum(axis=0) * (centred[1] ** 2).sum(axis=0))
    correlation: F64 = np.divide(
        (centred[0] * centred[1]).sum(axis=0), norm_E, out=np.full(len(norm_E), np.nan), where=norm_E > 0
    )
    return correlation


def summary(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One line a state, rate and predictor: rank correlation over cases, of the mean loss and of single units."""
    lines = []
    for steps, rate in dict.fromkeys((game.case.steps, game.rate) for game in measured):
        chosen = [game for game in measured if (game.case.steps, game.rate) == (steps, rate)]
        for name in chosen[0].predicted:
            rho = np.stack([spearman_columns(game.predicted[name], game.realized) for game in chosen])
            line: dict[str, Any] = {"steps": steps, "rate": rate, "predictor": name}
            line["mean_loss"] = _over_cases(rho[:, -1])
            line["single_units"] = _over_cases(rho[:, :-1].mean(axis=1))
            line["units_positive"] = _rounded(float((rho[:, :-1] > 0).mean()))
            if name in IN_NATS:
                line["relative_error"] = _over_cases(np.array([_relative_error(game, name) for game in chosen]))
            lines.append(line)
    return lines


def sampling_noise(games: Sequence[Measured]) -> list[dict[str, Any]]:
    """How much of the spread of sampled Shapley values is sampling: mean squared standard error over their variance."""
    lines = []
    for steps, rate in dict.fromkeys((game.case.steps, game.rate) for game in games):
        shares = []
        for game in games:
            if (game.case.steps, game.rate) == (steps, rate):
                assert game.noise_B is not None
                shares.append(float((game.noise_B**2).mean() / game.realized[:, -1].var()))
        lines.append({"steps": steps, "rate": rate, "share_of_variance": _rounded(float(np.mean(shares)), 6)})
    return lines


def _relative_error(game: Measured, name: str) -> float:
    """Root mean squared error of the mean loss's predictions, in units of the realized root mean square."""
    error = game.predicted[name][:, -1] - game.realized[:, -1]
    return float(np.sqrt((error**2).mean() / (game.realized[:, -1] ** 2).mean()))


def _over_cases(values: F64) -> dict[str, float | None]:
    count = len(values)
    error = float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return {"mean": _rounded(float(values.mean())), "standard_error": None if error is None else _rounded(error)}


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}") if abs(value) < 1 else round(value, digits)
