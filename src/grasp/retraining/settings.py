"""Settings of a retraining, in its `run.yaml`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grasp.settings import NO_TARGET, CorpusSettings, ModelSettings, Settings, TargetSettings, Train, refuse
from grasp.yaml_files import validated

BY_VALUE = ("groups", "dirichlet")  # families in which all rows of a label value have the same weight


class RetrainSettings(Settings):
    """Settings of a retraining: a model is trained and scored for every subset of a family and every seed."""

    recipe: str = Field("tiny", description="Training recipe: tiny, small or paper-50m. Paper: 50 M parameters.")
    overrides: dict[str, Any] = Field({}, description="Fields of the recipe to change, e.g. {steps: 500}.")
    train: Train = Field(
        "new",
        description="new: models from scratch, by `recipe`; further: `model`, by `fine_tuning`, on texts or, if "
        "corpus.form is preference, by DPO.",
    )
    model: ModelSettings | None = Field(None, description="Model that is trained further.")
    fine_tuning: dict[str, Any] = Field(
        {},
        description="Recipe of further training, with the names of TrainingArguments, SFTConfig, DPOConfig or Axolotl.",
    )
    corpus: CorpusSettings
    tokenizer: str | None = Field(
        None,
        description="Directory of a tokenizer. null: train byte-level BPE of the recipe's vocabulary on the corpus.",
    )
    targets: TargetSettings
    losses: tuple[Literal["completion", "all"], ...] = Field(
        (),
        description="Losses recorded for every unit, each as a separate target: NAME, and NAME@all for the loss on "
        "every token. Empty: targets.loss_on.",
    )
    family: str = Field("mixture:topic", description="uniform:F, bernoulli:Q; mixture, groups or dirichlet:LABEL.")
    subsets: str | None = Field(None, description="Parquet of subset_id, row_id[, weight] instead of a family.")
    planned_tokens: str | None = Field(
        None,
        description="Length of a planned run, e.g. 1T: subsets of groups or dirichlet repeat each value as often as it "
        "will. Requires source_tokens and train: new.",
    )
    source_tokens: str | None = Field(
        None, description="Tokens of each value for the planned run: CSV of value and tokens, or a mapping in YAML."
    )
    n_subsets: int = Field(
        24, ge=1, description="Number of subsets drawn from the family. A larger number keeps the first subsets."
    )
    family_seed: int = Field(0, ge=0, description="Seed of the draw of subsets.")
    seeds: tuple[int, ...] = Field((0, 1), min_length=1, description="Training seeds; seed 0 is the reference model.")
    role: Literal["dev", "held-out"] = Field(
        "dev", description="dev: the runs may be used to select protocols; held-out: only to evaluate them."
    )
    held_out_targets: tuple[str, ...] = Field(
        (), description="Targets of dev runs that are held out, with all of their losses."
    )
    checkpoints: tuple[int, ...] | None = Field(
        None, description="Steps at which reference runs are saved. null: 1/8, 3/8, 5/8 and 7/8 of the steps."
    )
    device: str = Field("auto", description="auto: cuda if available, else cpu.")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads per worker. null: an equal share of $OMP_NUM_THREADS, or of all cores.",
    )
    workers: int | None = Field(
        None, ge=1, description="Worker processes. null: one; on a cluster, one per GPU, or per core without GPUs."
    )
    lease_seconds: float = Field(300.0, gt=0, description="Seconds without a heartbeat after which a worker is lost.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        is_new = self.train == "new"
        changed = [name for name, usual in (("recipe", "tiny"), ("checkpoints", None)) if getattr(self, name) != usual]
        of_recipe = changed + ["overrides"] * bool(self.overrides)
        bad_seeds = len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0
        refuse(
            {
                NO_TARGET: not self.targets.names,
                f"seeds: expected distinct non-negative integers, got {self.seeds}": bad_seeds,
                "train: further needs a model; add --model or --like": not is_new and self.model is None,
                f"{', '.join(of_recipe)}: no effect with train: further; remove": not is_new and of_recipe,
                "model, fine_tuning: no effect with train: new; add --train further": is_new
                and (self.fine_tuning or self.model),
                "corpus.form: preference pairs train a model further (DPO); add --train further": is_new
                and self.corpus.form == "preference",
                "planned_tokens: mixtures of a new model only; set family to dirichlet:LABEL, train to new": (
                    self.planned_tokens is not None
                    and (not is_new or self.subsets or self.family.split(":")[0] not in BY_VALUE)
                ),
            }
        )
        return self


def retrain_settings(data: dict[str, Any]) -> RetrainSettings:
    """Validate settings of a retraining; the error message lists every mismatch."""
    return validated(RetrainSettings, data, "settings")
