"""Every setting, frozen; one string a field is its help, its unit and the paper's default.

`run.yaml`, which every long command leaves behind, is one of these.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from grasp.errors import SettingsError
from grasp.yaml_files import leaf, put, validated

CHAT_DATE = date(2024, 7, 26)  # the date that Llama 3's template writes if it is told none


class Settings(BaseModel):
    """Base of all settings: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse_idle(settings: Settings, names: Sequence[str], because: str) -> None:
    """In a validator: see that no setting was given that has no effect beside the others.

    Raises:
        ValueError: names those that were.
    """
    given = [name for name in names if name in settings.model_fields_set and getattr(settings, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: of no effect, since {because}; leave out")


class CorpusSettings(Settings):
    """Where the corpus is and how documents become rows."""

    path: str = Field(description="File, directory or fsspec URL: Parquet, JSONL(.gz/.zst), or a `datasets` directory.")
    split: str | None = Field(None, description="Split to read, where the corpus has several.")
    text_column: str | None = Field(
        None,
        description="Column of the text, or of the turns of a conversation; none: text, messages or conversations.",
    )
    form: Literal["prompt", "instruction"] | None = Field(
        None,
        description="Records of several columns: prompt and completion; or instruction, input and output. None: by the "
        "columns that there are.",
    )
    prompt: str | None = Field(
        None,
        description="What is read before the answer, out of any columns: 'Question: {question}\nAnswer:', or Jinja. "
        "Goes with completion.",
    )
    completion: str | None = Field(None, description="The answer, likewise: ' {answer}'.")
    loss_on: Literal["assistant", "completion", "all"] | None = Field(
        None,
        description="Tokens that carry loss: every turn of the assistant, its last one, or all. None: assistant for "
        "conversations and pairs, all for texts.",
    )
    ids_column: str = Field("input_ids", description="Column of token ids; where present it is used as it is.")
    row_id_column: str | None = Field(
        None, description="Column with the stable name of a row; none: row_id or id, if there; empty: names are made."
    )
    doc_id_column: str | None = Field(
        None, description="Column with the stable name of a document; none: doc_id, if there; empty: names are made."
    )
    packing: Literal["document", "concat"] = Field(
        "document",
        description="document: a document is one or more rows; concat: EOS-joined rows of fixed length.",
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="Longest row, in tokens; longer documents become several rows. None: as long as the model reads, "
        "at most 2,048, or the longest row of a corpus of token ids.",
    )
    max_rows_per_document: int | None = Field(
        None,
        ge=1,
        description="Keep only the first rows of a long document; none: keep all. `document` packing only.",
    )
    shortest_end: int | None = Field(
        None,
        ge=1,
        description="Fewest tokens of the last row of a document that is cut into several: shorter ends are left out, "
        "since the relevance of a few tokens is noise. None: an eighth of max_length. `document` packing only.",
    )
    limit: int | None = Field(None, ge=1, description="Read only the first so many documents.")
    snippet_chars: int = Field(240, ge=0, description="Characters of text kept per row for reading; 0 keeps none.")
    image_column: str | None = Field(
        None, description="Column of encoded images, where the model is a classifier; none: image."
    )
    class_column: str | None = Field(
        None, description="Column of the classes of images, numbers from 0 or names; none: label."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt, completion: one is given without the other; give both templates")
        if self.prompt is not None:
            refuse_idle(self, ("text_column", "form"), "prompt and completion say how records are read")
        return self


class TargetSettings(Settings):
    """Which benchmarks, and which of their units."""

    names: tuple[str, ...] = Field(
        (),
        description="Tasks by name (sciq, openbookqa, ...), or paths of JSONL files; for a classifier paths of trusted "
        "images, named as the corpus is.",
    )
    variant: str = Field("rc_0shot", description="Variant of the OLMES request files.")
    loss_on: Literal["completion", "assistant", "all"] = Field(
        "completion",
        description="Tokens of a unit that carry loss: the completion, of a conversation its last answer; assistant: "
        "every answer of a conversation is a unit; all: every token.",
    )
    units_per_target: int | None = Field(128, ge=1, description="Units drawn per target; none: all of them.")
    max_length: int = Field(512, ge=2, description="Longest unit in tokens; longer prompts lose their beginning.")
    seed: int = Field(0, ge=0, description="Seed of the draw of units.")
    datasets: tuple["DatasetTarget", ...] = Field((), description="Targets read from `datasets` directories.")
    exclude_units: tuple[str, ...] = Field((), description="unit_ids left out of every target.")


class DatasetTarget(Settings):
    """A `datasets` directory or hub name seen as a target."""

    name: str = Field(description="Name of the target.")
    path: str = Field(description="`datasets` directory on disk, or hub name.")
    split: str | None = Field(None, description="Split to read; none: the only one.")
    prompt: str = Field(description="Format string over the columns, e.g. 'Question: {question}\\nAnswer:'.")
    completion: str = Field(description="Format string over the columns, e.g. ' {correct_answer}'.")
    unit_id: str | None = Field(None, description="Column with a stable id; none: position.")


class ImageSettings(Settings):
    """How an image becomes the input of a classifier: RGB, resized, cropped, scaled to [0, 1], normalised."""

    size: int = Field(224, ge=1, description="Side of the square that the model sees, in pixels.")
    resize: int | None = Field(
        None, ge=1, description="Shorter side before the centre crop, in pixels; none: `size`, nothing of it is cut."
    )
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = Field(
        "bilinear", description="How it is resized."
    )
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="Taken off each channel of [0, 1].")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="What each channel is divided by.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize: got {self.resize}, expected at least size, {self.size}")
        if min(self.std) <= 0:
            raise ValueError(f"std: got {self.std}, expected positive numbers")
        return self


class ClassifierSettings(Settings):
    """An image classifier as the reference model: any torch module with a linear output layer that has a name."""

    head: str = Field(description="Dotted name of the linear output layer, e.g. fc, classifier, _fc.")
    factory: str | None = Field(
        None,
        description="What makes the module, as package.module:name (installed, or in the current directory) or "
        "FILE.py:name: a class of torch.nn.Module, a class method of one, or a function annotated to return one. Its "
        "code is run. model.path is then its file of weights. None: model.path is a Hugging Face checkpoint.",
    )
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    fitted_head: str | None = Field(None, description="Output layer in the place of the model's: see grasp fit-head.")
    classes: tuple[str, ...] = Field(
        (), description="Names of the classes, in the order of the head; none: the checkpoint's or the fitted head's."
    )
    images: ImageSettings | None = Field(
        None,
        description="Preprocessing; none: a checkpoint's own processor, of a module of timm its data config, of any "
        "other module ImageNet's at 224 pixels.",
    )
    batch_images: int = Field(32, ge=1, description="Images in one forward pass.")


class ModelSettings(Settings):
    """The reference model."""

    path: str = Field(
        description="Directory of a Hugging Face checkpoint, hub name, or a GGUF file; of a classifier that a factory "
        "makes the file of its weights."
    )
    classifier: ClassifierSettings | None = Field(
        None, description="An image classifier; none: the model is a causal LM."
    )
    tokenizer: str | None = Field(None, description="Directory of the tokenizer; none: the checkpoint's own.")
    add_bos_token: bool | None = Field(
        None,
        description="Begin every text with the BOS token. null: as the tokenizer itself does. Chats begin as their "
        "template writes them.",
    )
    chat_date: date | None = Field(
        None,
        description="Date given to chat templates that write today's date, so that rows are the same on every day. "
        f"null: {CHAT_DATE}.",
    )
    adapter: Literal["folded", "apart"] | None = Field(
        None,
        description="An adapter of peft is folded into the weights of its model, or kept apart, so that gradients are "
        "of its own matrices. null: apart where the adapter is trained further, by the gradient kernel.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU."
    )
    device: str = Field("auto", description="auto: cuda where there is one, else cpu.")
    batch_tokens: int = Field(8192, ge=1, description="Tokens in one forward pass, padding included.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; none: torch's own choice.")
    trust_remote_code: bool = Field(
        False, description="Run the Python that a checkpoint brings. Only if you say so: never taken from an artifact."
    )
    check: bool = Field(True, description="Prove at load that head(hidden) equals the logits, and causality.")


POSITIONS = re.compile(r"all|tail:[1-9]\d*|stride:[1-9]\d*")


def _positions(text: str) -> str:
    if not POSITIONS.fullmatch(text):
        raise ValueError(f"expected all, tail:N or stride:N with N from 1, got {text!r}")
    return text


Positions = Annotated[str, AfterValidator(_positions)]


Train = Literal["further", "new"]


class FeatureSettings(Settings):
    """Which kernels compare rows with answers, what they read of a row, and how it is weighed."""

    rule: Literal["default", "forward", "paper"] = Field(
        "default",
        description="Which kernels are built: those that the default scoring rule reads, those of them that need no "
        "backward pass (forward), or the paper's, with its sketches (paper).",
    )
    kernels: tuple[str, ...] = Field(
        (), description="Kernels and sketches by name, see docs/how-it-works.md; none: by `rule` and `train`."
    )
    positions: Positions = Field(
        "all", description="Positions of a row that kernels read: all, tail:n or stride:n. Paper: tail:32."
    )
    summary_positions: Positions | None = Field(
        None,
        description="Positions that summaries average, for `pooled` and the sketches, whose moments are then those of "
        "summaries; null: `positions`. Paper: tail:32.",
    )
    gradient_coordinates: int | Literal["all"] | None = Field(
        None,
        description="Coordinates of a row's gradient that the gradient kernel takes, about, the same share of every "
        "matrix of the body. null: 2,000,000, or all where there are fewer. Memory is 2 bytes for each and each unit, "
        "and 4 on a CPU with room for it.",
    )
    gradient_damping: float = Field(
        0.01,
        gt=0,
        allow_inf_nan=False,
        description="What is added to second moments of gradients, in units of their mean over the parameters.",
    )
    gradient_memory_mb: int = Field(
        4096,
        ge=1,
        description="Memory for the units' gradients; where they need more they lie in a file, which costs time, not "
        "digits.",
    )
    top_k: int = Field(64, ge=1, description="Probabilities kept per residual, beside the label. Paper: 64.")
    alpha: float = Field(1.0, description="Exponent of the residual preconditioner (gamma + eps)^-alpha: 1 or 0.5.")
    epsilon: float = Field(
        0.3, gt=0, allow_inf_nan=False, description="Its eps, in units of the mean gamma over coordinates that occur."
    )
    tau: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="Tikhonov term of the whitening, in units of tr(Sigma)/width."
    )
    sample_rows: int = Field(
        256,
        ge=2,
        description="Rows of the sample for moments, at least, where moments are over rows (of `gradient`, and of "
        "summaries); a smaller corpus is exact. Paper: 65,536.",
    )
    sample_positions: int = Field(
        131_072, ge=2, description="Positions of the sample for moments, in whole rows, at least."
    )
    kept_mb: int = Field(
        8192,
        ge=0,
        description="Disk for what the model gave for the sample, where that is the whole corpus: it need not pass "
        "again. A corpus that needs more passes twice.",
    )
    hidden_width: int = Field(64, ge=1, description="Width of the hidden sketch. Paper: 64.")
    residual_width: int = Field(64, ge=1, description="Width of the residual sketch. Paper: 64.")
    product_width: int = Field(64, ge=1, description="Width of the product sketch, if it is built. Not in the paper.")
    seed: int = Field(0, ge=0, description="Seed of the moment sample and of the projections.")

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_paper(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("rule") == "paper":
            return {"positions": "tail:32", "summary_positions": "tail:32", "sample_rows": 65_536} | data
        return data

    @field_validator("gradient_coordinates")
    @classmethod
    def _some_coordinates(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"expected all, or a number from 1, got {value}")
        return value

    @field_validator("alpha")
    @classmethod
    def _one_or_half(cls, value: float) -> float:
        if value not in (0.5, 1.0):
            raise ValueError(f"expected 1 or 0.5, got {value}")
        return value

    def decided(self, train: "Train | None") -> Self:
        """Return these settings with the kernels named, by what will be trained; None: a classifier."""
        if self.kernels:
            return self
        kernels = ("pooled",) if self.rule == "paper" else KERNELS[self.rule, train]
        return self.model_copy(update={"kernels": (*kernels, *SKETCHES)})

    @property
    def row_positions(self) -> tuple[str, ...]:
        """Return which positions of a row are read: by kernels, then by summaries if these are others."""
        summary = self.summary_positions
        return (self.positions,) if summary in (None, self.positions) else (self.positions, summary)

    @property
    def unit_positions(self) -> tuple[str, ...]:
        """Return the same of a unit, of which kernels read all positions."""
        return ("all",) if self.summary_positions in (None, "all") else ("all", self.summary_positions)


# Kernels that the scoring rule reads, by what will be trained (None: a classifier is at hand).
_NEW = ("output_layer", "embedding", "knn")
KERNELS: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("default", "new"): _NEW,
    ("forward", "new"): _NEW,
    ("default", "further"): ("output_layer", "embedding", "gradient"),
    ("forward", "further"): ("output_layer", "embedding", "hidden_bias", "hidden_linear"),
    ("default", None): ("output_layer",),
    ("forward", None): ("output_layer",),
}
SKETCHES = ("hidden_sketch", "residual_sketch")  # redundancy, maps and intervals read them


class BuildSettings(Settings):
    """One build: corpus + targets + model -> artifact.

    Of a classifier `CLASSIFIER_FEATURES` hold.
    """

    model: ModelSettings
    corpus: CorpusSettings
    targets: TargetSettings = TargetSettings()
    train: Train | None = Field(
        None,
        description="What will be trained on the corpus: this model `further`, or a `new` one from scratch. It decides "
        "which kernels are built. null: what the checkpoint says, as those of `grasp retrain` do. A classifier is of "
        "neither kind.",
    )
    features: FeatureSettings = FeatureSettings()
    like: str | None = Field(
        None, description="Artifact whose moments are taken instead of measuring them, so that the two can be merged."
    )
    shard_rows: int = Field(1024, ge=1, description="Rows in one shard: what a kill can cost at most.")
    array_dtype: Literal["float16", "float32"] = Field("float16", description="Type of the stored arrays.")
    keep_features: bool = Field(
        False,
        description="Keep features, so that a target can be added without a pass: some 2 H + 6 K bytes a position. The "
        "gradient kernel adds 2 a coordinate and row: some 4 MB a row.",
    )
    keep_tokens: bool = Field(True, description="Keep the token ids of the rows beside the artifact.")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_a_classifier(cls, data: Any) -> Any:
        model = data.get("model") if isinstance(data, dict) else None
        if (model.classifier if isinstance(model, ModelSettings) else leaf(model, "classifier")) is None:
            return data
        features = data.get("features", {})
        if isinstance(features, FeatureSettings):
            features = features.model_dump(exclude_unset=True)
        return {**data, "features": CLASSIFIER_FEATURES | features} if isinstance(features, dict) else data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.targets.names and not self.targets.datasets:
            raise ValueError("targets: name at least one, e.g. `sciq`")
        tokens = {"embedding", "gradient", "knn"} & set(self.features.kernels)
        if self.model.classifier is not None and tokens:
            raise ValueError(f"features.kernels: got {', '.join(sorted(tokens))}, which are of texts; leave them out")
        if self.model.classifier is not None and self.targets.datasets:
            raise ValueError(
                "targets.datasets: they are texts, the model is a classifier; name images in targets.names"
            )
        return self


# tau: chosen on development noise seeds (experiments/vision/tau.json), on 1,000 images of up to 1,280 features: with so
# few rows a dimension whitening mostly adds noise. hidden_width: heads up to that width have an exact sketch.
CLASSIFIER_FEATURES: dict[str, Any] = {
    "tau": 100.0,
    "hidden_width": 2048,
}


class FitSettings(Settings):
    """A classifier whose output layer is fitted to a corpus; what else a build has may stand beside it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: ModelSettings
    corpus: CorpusSettings


class RetrainSettings(Settings):
    """One environment: a family of subsets x seeds, each trained on and scored."""

    recipe: str = Field("tiny", description="Training recipe: tiny, small or paper-50m. Paper: 50 M parameters.")
    overrides: dict[str, Any] = Field({}, description="Fields of the recipe to change, e.g. {steps: 500}.")
    train_command: str | None = Field(
        None,
        description="Command that trains instead of the recipe, with {corpus}, {checkpoint} and {seed} filled in. "
        "Never taken from an environment.",
    )
    corpus: CorpusSettings
    tokenizer: str | None = Field(
        None, description="Directory of a tokenizer; none: byte-level BPE of the recipe's size, trained on the corpus."
    )
    targets: TargetSettings
    losses: tuple[Literal["completion", "all"], ...] = Field(
        (),
        description="Losses recorded of every unit, each as a target of its own: NAME, and NAME@all for the loss on "
        "every token. None: targets.loss_on.",
    )
    family: str = Field("mixture:topic", description="uniform:F, bernoulli:Q; mixture, groups or dirichlet:LABEL.")
    subsets: str | None = Field(None, description="Parquet of subset_id, row_id[, weight] instead of a family.")
    n_subsets: int = Field(
        24, ge=1, description="Subsets drawn from the family. More may be added later: the first ones stay."
    )
    family_seed: int = Field(0, ge=0, description="Seed of the draw of subsets.")
    seeds: tuple[int, ...] = Field((0, 1), min_length=1, description="Training seeds; seed 0 is the reference model.")
    role: Literal["dev", "held-out"] = Field("dev", description="Whether protocols may be selected on it.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of a dev environment held out, all losses.")
    checkpoints: tuple[int, ...] | None = Field(
        None, description="Steps of the reference runs that are kept; none: 1/8, 3/8, 5/8 and 7/8 of the budget."
    )
    device: str = Field("auto", description="auto: cuda where there is one, else cpu.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of one worker; none: an even share.")
    workers: int | None = Field(
        None, ge=1, description="Processes that fill it; none: one, or on a cluster one for each GPU, or core."
    )
    stack: int = Field(1, ge=1, description="Models that one worker trains at once as one batched program.")
    lease_seconds: float = Field(300.0, gt=0, description="Silence after which a worker counts as dead.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.targets.names and not self.targets.datasets:
            raise ValueError("targets: name at least one, e.g. `sciq`")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds: expected different numbers from 0, got {self.seeds}")
        if self.train_command is None:
            return self
        fixed = {"recipe": "tiny", "stack": 1, "checkpoints": None}
        given = [name for name, default in fixed.items() if getattr(self, name) != default]
        given += [f"overrides.{name}" for name in self.overrides if name != "shape"]
        if given:
            raise ValueError(f"{', '.join(given)}: no meaning with train_command, which trains as it likes; leave out")
        if not self.tokenizer:
            raise ValueError("train_command: needs the tokenizer of your model; add --set tokenizer=DIR or --like ART")
        return self

    @property
    def recorded_losses(self) -> tuple[Literal["completion", "assistant", "all"], ...]:
        return tuple(dict.fromkeys(self.losses)) or (self.targets.loss_on,)


def build_settings(data: dict[str, Any], where: str = "settings") -> BuildSettings:
    """Check `data` and freeze it; every mismatch is in the message."""
    return validated(BuildSettings, data, where)


def without_foreign_code(found: Mapping[str, Any], where: str, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings that lay beside data, which may come from a stranger: which code is run they do not decide.

    Args:
        own: settings that the user gave.
    Raises:
        SettingsError: code that the user does not name as well.
    """
    data = deepcopy(dict(found))
    for path in CODE:
        theirs, mine = leaf(found, path), leaf(own or {}, path)
        if mine:
            put(data, path, mine)
        elif theirs:
            raise SettingsError(
                f"{where}: {path} is {theirs!r}: that is code, and code is run only if you ask for it yourself; read "
                f"it, then repeat it with --set {path}=... or in the file of --config"
            )
    return data


CODE = ("model.classifier.factory", "model.trust_remote_code", "train_command")


def retrain_settings(data: dict[str, Any]) -> RetrainSettings:
    """Check `data` and freeze it; every mismatch is in the message."""
    return validated(RetrainSettings, data, "settings")
