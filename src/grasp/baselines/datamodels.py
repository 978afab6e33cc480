"""Datamodels: a sparse linear function of the subset, fitted to measured utilities. A supervised oracle.

Start with `Datamodels`; the regressions are in `grasp.baselines.oracles`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from grasp.artifact.rows import label_column
from grasp.baselines.oracles import FOLDS, fraction_features, mask_features, oracle
from grasp.errors import RunsError
from grasp.extras import require
from grasp.methods.contract import Account, MethodInputs, SubsetMethod
from grasp.predict.weights import SubsetBlock
from grasp.runs.predictions import Predictions
from grasp.settings import Settings

MASKS = "masks"


class DatamodelsSettings(Settings):
    """Penalty, features and folds of the regression."""

    penalty: Literal["lasso", "ridge"] = Field(
        "lasso",
        description="lasso: by scikit-learn, strength chosen by inner folds, as in the source; ridge: closed form.",
    )
    sees: str = Field(
        MASKS,
        description="masks: which rows the subset retains, as in the source; LABEL: shares of the values of a label.",
    )
    folds: int = Field(FOLDS, ge=2, description="Number of cross-validation folds; subsets are predicted out of fold.")


class Datamodels(SubsetMethod[DatamodelsSettings]):
    """Linear functions of the subset fitted to retrained runs: an oracle.

    Cross-validated linear datamodels of each unit, and of the mean of each task.

    Source: Ilyas et al. 2022 (arXiv 2202.00622).
    As published: lasso on masks, fitted to hundreds of thousands of image classifiers that were trained on random
    subsets; predicts new subsets.
    Deviation: each retrained subset is predicted out of fold from the others. The method is therefore an oracle, not a
    competitor of methods that never see retrained runs. With fewer subsets than rows, masks carry little information,
    and label shares carry more.
    """

    settings_type = DatamodelsSettings
    requires = frozenset({"runs"})
    is_oracle = True

    def check(self, inputs: MethodInputs) -> None:
        super().check(inputs)
        if self.settings.penalty == "lasso":
            require("sklearn.linear_model", extra="baselines", feature=f"method {self.name}: lasso")

    def predict(self, inputs: MethodInputs, subsets: Sequence[SubsetBlock]) -> tuple[Predictions, Account]:
        retrained = inputs.required_runs
        unknown = {name for block in subsets for name in block.subset_ids} - set(retrained.runs.subset_ids)
        if unknown:
            raise RunsError(
                f"datamodels: {len(unknown)} subsets are not in {retrained.runs.path}, e.g. "
                f"{sorted(unknown)[0]!r}; only retrained subsets can be predicted, out of fold"
            )
        if self.settings.sees == MASKS:
            features = mask_features(retrained.subsets)
        else:
            features = fraction_features(retrained.subsets, label_column(inputs.artifact, self.settings.sees))
        penalty, folds = self.settings.penalty, self.settings.folds
        predictions = oracle(penalty, features, retrained.utilities, folds=folds, seed=self.seed)
        n_subsets, n_features = len(retrained.utilities.subset_ids), features.values_BF.shape[1]
        covers = f"{n_features:,} {'rows as masks' if self.settings.sees == MASKS else features.name}"
        notes = (f"{penalty} on {n_subsets} subsets, each predicted out of fold",)
        return replace(predictions, method="datamodels"), Account(covers=(covers,), notes=notes)
