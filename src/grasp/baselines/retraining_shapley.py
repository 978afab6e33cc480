"""Data Shapley by retraining: train on coalitions of rows, or of groups of rows, and score each.

Start with `RetrainingShapley`; the estimators are in `grasp.baselines.shapley`.

Shape letters: N rows, E units, G players (rows or groups), B coalitions.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator
from torch import nn

from grasp.arrays import F64, I64, Bool
from grasp.artifact.rows import label_column
from grasp.baselines.shapley import SampledShapley, exact_shapley, permutation_shapley
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import RunsError, SettingsError
from grasp.methods.contract import Account, MethodInputs, Seconds
from grasp.models.checkpoint import device_of
from grasp.models.unit_loss import evaluate_units
from grasp.runs.predictions import Weighting
from grasp.settings import Settings, refuse_idle
from grasp.training.llama import new_llama
from grasp.training.recipe import TrainingRecipe
from grasp.training.train import train
from grasp.yaml_files import validated

Masks = Bool
ROWS = "rows"
BLOCK = 64  # coalitions per call of the utility


class RetrainingShapleySettings(Settings):
    """Players of the game, and the number of evaluations."""

    players: str = Field(
        "label",
        description="rows: each row is a player; label: values of the label that the family of subsets samples by, or "
        "of the artifact's first label; or the name of a label.",
    )
    permutations: int = Field(
        8, ge=0, description="Number of sampled permutations; 0: enumerate all coalitions, up to 16 players."
    )
    truncation: float | None = Field(
        None,
        ge=0,
        description="End a permutation once every unit is within this many nats per token of the whole corpus.",
    )
    most_runs: int = Field(2_000, ge=1, description="Maximum number of retrainings; larger games are refused.")

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if not self.permutations:
            refuse_idle(self, ("truncation",), "permutations: 0 enumerates all coalitions")
        return self


class RetrainingShapley(BlockMethod[RetrainingShapleySettings]):
    """Shapley values of rows or groups by retraining on coalitions.

    The utility of a coalition (a set of players: rows, or groups of rows with one label value) is minus the loss of
    each unit after training on its rows with the recipe of the runs.

    Positive: adding the row, or its group, lowers the unit's loss. The value of a group is divided equally among its
    rows, so that the sum over a subset's rows is its predicted utility relative to an untrained model.

    Source: Ghorbani and Zou 2019 (Data Shapley, arXiv 1904.02868), truncated Monte Carlo; groups as in their section 4.
    As published: permutations are sampled until the values converge, with small models that train in seconds.
    Deviation: the number of permutations is fixed; a coalition with fewer rows than one batch of the recipe has the
    utility of an untrained model; the recipe's number of steps does not depend on the coalition; scores are summed over
    a subset, not averaged, unless `weighting: mean` is set.
    """

    settings_type = RetrainingShapleySettings
    requires = frozenset({"tokens", "runs"})
    weighting: ClassVar[Weighting] = "count"

    def extra_identity(self, inputs: MethodInputs) -> Mapping[str, Any]:
        player_N, _ = self._players(inputs)
        return {"players": hashlib.blake2b(player_N.tobytes(), digest_size=16).hexdigest()}

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        player_N, player_note = self._players(inputs)
        n_players = int(player_N.max()) + 1
        self._check_cost(n_players)
        game = RetrainingGame(inputs, work, player_N, seed=self.seed)
        estimate = self._estimate(game, n_players)
        if game.trained or work.read("ready") is None:
            work.write("ready", asdict(game.ready))
        account = self._account(estimate, n_players, player_note)
        # the value of each player is divided equally among its rows
        share_PE = estimate.value_PE * (1.0 / np.bincount(player_N))[:, None]
        ready = Seconds(**(work.read("ready") or {}))
        return RowScorer(lambda start, stop: share_PE[player_N[start:stop]], replace(account, ready=ready))

    def _estimate(self, game: "RetrainingGame", n_players: int) -> SampledShapley:
        """Compute the value of each player for each unit, exactly or from sampled permutations."""
        if not self.settings.permutations:
            value_PE = exact_shapley(game, n_players, block=BLOCK)
            return SampledShapley(value_PE, np.zeros_like(value_PE), 0, 2**n_players, 0)
        return permutation_shapley(
            game,
            n_players,
            permutations=self.settings.permutations,
            seed=self.seed,
            truncation=self.settings.truncation,
            block=BLOCK,
        )

    def _players(self, inputs: MethodInputs) -> tuple[I64, str]:
        """Return the player of each row, (N,), and a description of the players."""
        if self.settings.players == ROWS:
            return np.arange(inputs.n_rows), "rows"
        name = self.settings.players
        if name == "label":
            family = inputs.required_runs.runs.info.family
            labels = list(inputs.artifact.manifest.details.get("labels", []))
            _, _, family_label = (family.spec if family else "").partition(":")  # e.g. mixture:topic
            name = family_label if family_label in labels else next(iter(labels), "")
        if not name:
            raise SettingsError("retraining_shapley: players: the artifact has no labels; expected rows")
        column = label_column(inputs.artifact, name)
        return column.codes_N.astype(np.int64), f"values of {name}"

    def _check_cost(self, n_players: int) -> None:
        """Refuse games that need too many retrainings."""
        permutations = self.settings.permutations
        runs = permutations * (n_players - 1) + 2 if permutations else 2**n_players
        if runs > self.settings.most_runs:
            raise SettingsError(
                f"retraining_shapley: {n_players:,} players need up to {runs:,} retrainings, more than most_runs "
                f"{self.settings.most_runs:,}; group rows by a label, sample fewer permutations, or raise most_runs"
            )

    def _account(self, estimate: SampledShapley, n_players: int, player_note: str) -> Account:
        error = np.nanmean(estimate.standard_error_PE) if estimate.permutations > 1 else 0.0
        sampling = f"{estimate.permutations} permutations" if estimate.permutations else "all coalitions"
        note = (
            f"{n_players:,} players, {sampling}, {estimate.evaluations:,} coalitions, mean standard error "
            f"{error:.2g} nats"
        )
        counts = {"truncated marginal contributions": estimate.truncated} if estimate.truncated else {}
        return Account(covers=(player_note,), notes=(note,), counts=counts)


class RetrainingGame:
    """Utility of coalitions, -loss of each unit in nats per token. Each is retrained once and cached on disk."""

    def __init__(self, inputs: MethodInputs, work: WorkArea, player_N: I64, *, seed: int) -> None:
        """Create a game with the recipe of the retrained runs; reuses cached results of any game over these rows.

        Args:
            player_N: player of each row.
            seed: seed of the training runs.
        Raises:
            RunsError: the runs do not record their recipe.
        """
        runs = inputs.required_runs.runs
        location = f"{runs.path}: recipe_settings"
        self._recipe = validated(TrainingRecipe, runs.info.recipe_settings, location, RunsError)
        units = [inputs.units.fingerprint, inputs.settings.targets.max_length]
        text = json.dumps([self._recipe.model_dump(mode="json"), seed, units], sort_keys=True)
        self._store = work.shared(f"retrained-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}")
        self._inputs, self._player_N, self._seed = inputs, player_N, seed
        self._device = str(device_of(inputs.settings.model.device))
        self.trained = 0  # coalitions that this object trained on
        self.ready = self._store.seconds  # seconds that earlier runs spent

    def __call__(self, masks_BG: Masks) -> F64:
        """Return the utilities (B, E) of coalitions of players, boolean (B, G)."""
        retained_BN = masks_BG[:, self._player_N]
        names = [self._name(retained_N) for retained_N in retained_BN]
        missing = {name: b for b, name in enumerate(names) if self._store.load(name) is None}
        self._inputs.progress.stage("coalitions", rows=len(missing), tokens=None)
        for name, b in missing.items():
            with self._store.timed():
                utility_E = self._utility(retained_BN[b])
            self._store.save(name, utility_E)
            self.trained += 1
            self._inputs.progress.advance(1, 0)
        return np.stack([self._store.load_required(name) for name in names])

    def _name(self, retained_N: Masks) -> str:
        """Return the cache key of a coalition; coalitions too small to train on share the untrained model's key."""
        rows = retained_N if self._trainable(retained_N) else np.zeros_like(retained_N)
        return hashlib.blake2b(np.packbits(rows).tobytes(), digest_size=16).hexdigest()

    def _trainable(self, retained_N: Masks) -> bool:
        """Return whether a coalition has the rows of one batch."""
        return bool(retained_N.sum() >= self._recipe.batch_rows)

    def _utility(self, retained_N: Masks) -> F64:
        """Train on a coalition, given as a mask of rows, and return its utility, (E,)."""
        if not self._trainable(retained_N):
            return self._untrained()
        trained = train(self._recipe, self._inputs.store, seed=self._seed, retained=retained_N, device=self._device)
        return np.asarray(-evaluate_units(trained.model, self._inputs.unit_tokens))

    def _untrained(self) -> F64:
        """Return the utilities of a model at its initialisation, (E,)."""
        model: nn.Module = new_llama(self._recipe.shape, self._seed)
        return np.asarray(-evaluate_units(model.to(self._device), self._inputs.unit_tokens))
