"""Datamodels: a sparse linear function of the subset itself, fitted on realized utilities. A supervised oracle."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from grasp.artifact.rows import label_column
from grasp.baselines.oracles import (
    FOLDS,
    OracleFeatures,
    fraction_features,
    lasso_oracle,
    mask_features,
    ridge_oracle,
)
from grasp.errors import EnvironmentDataError
from grasp.extras import require
from grasp.methods.contract import Account, MethodInputs, SubsetMethod
from grasp.predict.weights import SubsetBlock
from grasp.runs.predictions import Predictions
from grasp.settings import Settings

MASKS = "masks"


class DatamodelsSettings(Settings):
    """What is fitted on what."""

    penalty: Literal["lasso", "ridge"] = Field(
        "lasso",
        description="lasso: by scikit-learn, strength chosen by inner folds, as the source; ridge: closed form.",
    )
    sees: str = Field(
        MASKS, description="masks: which rows the subset retains, as the source; LABEL: its shares of a label's values."
    )
    folds: int = Field(FOLDS, ge=2, description="Subsets are predicted by fits that did not see them; so many folds.")


class Datamodels(SubsetMethod[DatamodelsSettings]):
    """Linear functions of the subset fitted on retraining: an oracle.

    Cross-validated linear datamodels of every unit, and of every task's mean.

    Source: Ilyas et al. 2022 (arXiv 2202.00622). Deviation: they fit on hundreds of thousands of subsets and predict
    fresh ones; here every subset of the environment is predicted out of fold from the others, so it is an oracle for
    this environment and no competitor of methods that never saw a retrain. With fewer subsets than rows masks hold
    little, and label shares more.
    """

    settings_type = DatamodelsSettings
    looks_at = frozenset({"environment"})
    supervised = True

    def check(self, material: MethodInputs) -> None:
        super().check(material)
        if self.settings.penalty == "lasso":
            require("sklearn.linear_model", extra="baselines", feature=f"method {self.name}: lasso")

    def predict(self, material: MethodInputs, subsets: Sequence[SubsetBlock]) -> tuple[Predictions, Account]:
        known = material.environment
        unknown = {name for block in subsets for name in block.subset_ids} - set(known.environment.subset_ids)
        if unknown:
            raise EnvironmentDataError(
                f"datamodels: {len(unknown)} subsets are not of {known.environment.path}, e.g. {sorted(unknown)[0]!r}; "
                "it predicts retrained subsets only, out of fold"
            )
        oracle = lasso_oracle if self.settings.penalty == "lasso" else ridge_oracle
        features = self._features(material)
        found = oracle(features, known.utilities, folds=self.settings.folds, seed=self.seed)
        n_subsets, n_features = len(known.utilities.subset_ids), features.values_BF.shape[1]
        covers = f"{n_features:,} {'rows as masks' if self.settings.sees == MASKS else features.name}"
        notes = (f"{self.settings.penalty} on {n_subsets} subsets, each predicted by a fit that did not see it",)
        return replace(found, method="datamodels"), Account(covers=(covers,), notes=notes)

    def _features(self, material: MethodInputs) -> OracleFeatures:
        subsets = material.environment.subsets
        if self.settings.sees == MASKS:
            return mask_features(subsets)
        return fraction_features(subsets, label_column(material.artifact, self.settings.sees))
