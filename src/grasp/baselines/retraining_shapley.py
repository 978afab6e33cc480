"""Data Shapley by retraining: permutations of rows, or of groups of rows, each prefix trained on and scored.

Shape letters: N rows, E units, G players (rows or groups), B coalitions.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator

from grasp.arrays import F64, I64, Bool
from grasp.artifact.rows import label_column
from grasp.baselines.shapley import MAX_EXACT_PLAYERS, SampledShapley, exact_shapley, permutation_shapley
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import EnvironmentDataError, SettingsError
from grasp.methods.contract import Account, MethodInputs, Scores, Seconds
from grasp.models.checkpoint import device_of
from grasp.models.unit_loss import evaluate_units
from grasp.runs.predictions import Weighting
from grasp.settings import Settings, refuse_idle
from grasp.training.recipe import TrainingRecipe
from grasp.training.train import Trainer, train_stacked
from grasp.yaml_files import describe

Masks = Bool
T = TypeVar("T")
ROWS = "rows"
BLOCK = 64  # coalitions asked about at once


class RetrainingShapleySettings(Settings):
    """The game, and how much of it is played."""

    players: str = Field(
        "label",
        description="rows: every row is a player; label: the values of the label that the family draws by, or "
        "of the artifact's first label; or the name of a label.",
    )
    permutations: int = Field(
        8, ge=0, description="Permutations sampled; 0: enumerate all coalitions, up to 16 players."
    )
    truncation: float | None = Field(
        None,
        ge=0,
        description="A permutation ends when every unit is within so many nats a token of the whole corpus.",
    )
    most_runs: int = Field(2_000, ge=1, description="Refuse a game that may need more retrainings than this.")
    stack: int = Field(1, ge=1, description="Models trained at once as one batched program; for a GPU.")

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if not self.permutations:
            refuse_idle(self, ("truncation",), "permutations: 0 enumerates all coalitions")
        return self


class RetrainingShapley(BlockMethod[RetrainingShapleySettings]):
    """Shapley values of rows or groups by retraining on coalitions.

    Shapley values over utilities of retraining with the environment's recipe.

    Positive: adding the row, or its group, lowers the unit's loss. The value of a group is shared equally by its rows,
    so that the sum over a subset's rows is the subset's predicted utility over that of an untrained model.
    Source: Ghorbani and Zou 2019, truncated Monte Carlo; groups as in their section 4. Deviation: a coalition with
    fewer rows than one batch of the recipe cannot be trained on and is worth what an untrained model is; the budget of
    the recipe does not grow with the coalition; scores are added up over a subset, not averaged, unless `weighting:
    mean` is set.
    """

    settings_type = RetrainingShapleySettings
    looks_at = frozenset({"tokens", "environment"})
    weighting: ClassVar[Weighting] = "count"

    def decided_by(self, material: MethodInputs) -> Mapping[str, Any]:
        player_N, _ = self._players(material)
        return {"players": hashlib.blake2b(player_N.tobytes(), digest_size=16).hexdigest()}

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        player_N, what = self._players(material)
        n_players = int(player_N.max()) + 1
        self._refuse_long(n_players)
        game = RetrainingGame.from_inputs(material, work, player_N, seed=self.seed)
        game.stack = self.settings.stack
        found = self._play(game, n_players)
        if game.trained or work.read("ready") is None:
            work.write("ready", asdict(game.ready))
        account = self._account(found, n_players, what)
        return _Shared(found.value_PE, player_N, replace(account, ready=Seconds(**(work.read("ready") or {}))))

    def _play(self, game: "RetrainingGame", n_players: int) -> SampledShapley:
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

    def _players(self, material: MethodInputs) -> tuple[I64, str]:
        """Player of every row, (N,), and what players are."""
        if self.settings.players == ROWS:
            return np.arange(material.n_rows), "rows"
        name = self.settings.players
        if name == "label":
            family = material.environment.environment.info.family
            labels = list(material.artifact.manifest.details.get("labels", []))
            _, _, of_family = (family.spec if family else "").partition(":")
            name = of_family if of_family in labels else next(iter(labels), "")
        if not name:
            raise SettingsError("retraining_shapley: players: the artifact has no label; expected rows, or a label")
        column = label_column(material.artifact, name)
        return column.codes_N.astype(np.int64), f"values of {name}"

    def _refuse_long(self, n_players: int) -> None:
        exact = not self.settings.permutations
        if exact and n_players > MAX_EXACT_PLAYERS:
            raise SettingsError(
                f"retraining_shapley: permutations: got 0, which enumerates the coalitions of at most "
                f"{MAX_EXACT_PLAYERS} players, but there are {n_players}; sample permutations"
            )
        runs = 2**n_players if exact else self.settings.permutations * (n_players - 1) + 2
        if runs > self.settings.most_runs:
            raise SettingsError(
                f"retraining_shapley: {n_players:,} players need up to {runs:,} retrainings, more than most_runs "
                f"{self.settings.most_runs:,}; group rows by a label, sample fewer permutations, or raise most_runs"
            )

    def _account(self, found: SampledShapley, n_players: int, what: str) -> Account:
        error = np.nanmean(found.standard_error_PE) if found.permutations > 1 else 0.0
        how = f"{found.permutations} permutations" if found.permutations else "all coalitions"
        note = f"{n_players:,} players, {how}, {found.evaluations:,} coalitions, mean standard error {error:.2g} nats"
        counts = {"marginal contributions cut short": found.truncated} if found.truncated else {}
        return Account(covers=(what,), notes=(note,), counts=counts)


class RetrainingGame:
    """Utility of coalitions, retrained once each and remembered on disk: -loss of every unit, nats a token."""

    def __init__(
        self, material: MethodInputs, store: WorkArea, player_N: I64, recipe: TrainingRecipe, *, seed: int
    ) -> None:
        self._material, self._store, self._player_N = material, store, player_N
        self._recipe, self._seed = recipe, seed
        self._device = str(device_of(material.settings.model.device))
        self.stack = 1
        self.trained = 0  # by this object
        self.ready = store.seconds  # spent before it

    @classmethod
    def from_inputs(cls, material: MethodInputs, work: WorkArea, player_N: I64, *, seed: int) -> "RetrainingGame":
        """The game of the environment's recipe; what was retrained before, for any game over these rows, is known.

        Args:
            player_N: the player that each row belongs to.
            seed: of the training runs.
        Raises:
            EnvironmentDataError: the environment does not hold its recipe.
        """
        known = material.environment.environment
        try:
            recipe = TrainingRecipe.model_validate(known.info.recipe_settings)
        except ValidationError as err:
            raise EnvironmentDataError(
                describe(err, f"{known.path}: recipe_settings", TrainingRecipe) + "; make the environment again"
            ) from err
        units = [material.units.fingerprint, material.settings.targets.max_length]
        text = json.dumps([recipe.model_dump(mode="json"), seed, units], sort_keys=True)
        name = f"retrained-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        return cls(material, work.shared(name), player_N, recipe, seed=seed)

    def __call__(self, masks_BG: Masks) -> F64:
        """(B, E) utilities of coalitions of players, boolean (B, G)."""
        kept_BN = masks_BG[:, self._player_N]
        names = [self._name(kept_N) for kept_N in kept_BN]
        missing = {name: b for b, name in enumerate(names) if self._store.load(name) is None}
        self._material.progress.stage("coalitions", rows=len(missing), tokens=None)
        for chosen in batched(missing.items(), self.stack):
            with self._store.timed():
                utilities = self._train([kept_BN[b] for _, b in chosen])
            for (name, _), utility_E in zip(chosen, utilities, strict=True):
                self._store.save(name, utility_E)
            self.trained += len(chosen)
            self._material.progress.advance(len(chosen), 0)
        return np.stack([self._store.loaded(name) for name in names])

    def _name(self, kept_N: Masks) -> str:
        """All coalitions that are too small to be trained on are one: the untrained model."""
        rows = kept_N if self._trainable(kept_N) else np.zeros_like(kept_N)
        return hashlib.blake2b(np.packbits(rows).tobytes(), digest_size=16).hexdigest()

    def _trainable(self, kept_N: Masks) -> bool:
        return bool(kept_N.sum() >= self._recipe.batch_rows)

    def _train(self, kept: Sequence[Masks]) -> list[F64]:
        tokens, large = self._material.unit_tokens, [kept_N for kept_N in kept if self._trainable(kept_N)]
        trained: list[F64] = []
        if large:
            trainer = train_stacked(
                self._recipe, self._material.store, seeds=[self._seed] * len(large), retained=large, device=self._device
            )
            trained = list(-trainer.model.unit_losses(tokens))
        rest = iter(trained)
        return [next(rest) if self._trainable(kept_N) else self._untrained() for kept_N in kept]

    def _untrained(self) -> F64:
        model = Trainer(self._recipe, [self._seed], self._device).model.to_hf(0)
        return np.asarray(-evaluate_units(model.to(torch.device(self._device)), self._material.unit_tokens))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


class _Shared(RowScorer):
    """Every row has an equal share of its player's value."""

    def __init__(self, value_GE: F64, player_N: I64, account: Account) -> None:
        share_G = 1.0 / np.bincount(player_N)
        self._value_GE, self._player_N, self._account = value_GE * share_G[:, None], player_N, account

    def score(self, start: int, stop: int) -> Scores:
        return self._value_GE[self._player_N[start:stop]]

    def account(self) -> Account:
        return self._account
