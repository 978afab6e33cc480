"""Settings of builds and retrainings, as immutable pydantic models.

The description of a field is its help text and documentation: meaning, unit, and the value in the paper. Long commands
write their settings to `run.yaml`. Start with `BuildSettings`.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    create_model,
    model_validator,
)

from grasp.entry_points import entries, load
from grasp.errors import SettingsError
from grasp.file_readers import claimed
from grasp.kernel_table import KERNELS, SKETCHES
from grasp.yaml_files import get_setting, set_setting, validated

READERS = "grasp.readers"  # entry points of readers, see `grasp.readers` and `grasp.file_readers`
SHARD_ROWS = 1024  # default of `BuildSettings.shard_rows`
CHAT_DATE = date(2024, 7, 26)  # the default date of Llama 3's chat template


class Settings(BaseModel):
    """Base class of all settings: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse(faults: Mapping[str, Any]) -> None:
    """Check in a validator that no fault is present.

    Args:
        faults: whether a fault is present, by a sentence about it.
    Raises:
        ValueError: faults are present; the message has all of their sentences.
    """
    if present := [sentence for sentence, is_present in faults.items() if is_present]:
        raise ValueError("; ".join(present))


def refuse_idle(settings: Settings, names: Sequence[str], because: str) -> None:
    """Check in a validator that no setting is given that the other settings make ineffective.

    Raises:
        ValueError: such settings are given; the message lists them.
    """
    idle = [name for name in names if name in settings.model_fields_set and getattr(settings, name) is not None]
    if idle:
        raise ValueError(f"{', '.join(idle)}: no effect, since {because}; remove")


S = TypeVar("S", bound=Settings)


class PromptFormats(Settings):
    """Format strings that join an instruction and its input to a prompt without a chat template."""

    with_input: str = Field(description="Prompt with {instruction} and {input}.")
    without_input: str = Field(description="Prompt of a record without input, with {instruction}.")
    system: str = Field("", description="Text in front of the prompt, with {system}, if there is a system prompt.")
    default_system: str = Field("", description="System prompt of records without a column of system prompts.")


class FieldNames(Settings):
    """How the records of a corpus name their parts, if not in the usual way; usually set by a dataset entry."""

    form: Literal["text", "messages", "instruction", "formatted", "preference"] = Field(
        description="Form of records: text, turns (messages), an instruction for the chat template or for `formats` "
        "(formatted), or a preference pair."
    )
    columns: dict[str, str] = Field(
        description="Column of each part: text; messages, system, tools; instruction, input, output, history; chosen, "
        "rejected. Other columns are labels."
    )
    turn_keys: dict[str, str] = Field({}, description="Key of role, content and other parts of a turn.")
    roles: dict[str, str] = Field({}, description="Usual role by the role in the corpus, e.g. user by human.")
    separator: str = Field("\n\n", description="Text between an instruction and its input.")
    drop_system: bool = Field(False, description="Leave out system turns.")
    only_marked: bool = Field(False, description="Only turns marked by `train` carry loss, not all answers.")
    formats: PromptFormats | None = Field(None, description="Formats of the prompt. `formatted` only.")
    origin: str = Field("", description="Dataset entry that the names are from.")
    notes: tuple[str, ...] = Field((), description="Parts of the dataset entry that are not applied.")

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class CorpusSettings(Settings):
    """Location of the corpus, and how its documents are divided into rows."""

    path: str = Field(
        description="File, directory or fsspec URL: Parquet, JSON lines, a JSON array, CSV or TSV, or a `datasets` "
        "directory. Or an entry of a trainer's dataset configuration: FILE#NAME."
    )
    split: str | None = Field(
        None, description="Split to read, if the corpus has several, or a range of one: train[:10%]."
    )
    text_column: str | None = Field(
        None,
        description="Column of texts or conversations. null: text, messages or conversations.",
    )
    form: Literal["prompt", "instruction", "preference"] | None = Field(
        None,
        description="Form of records with several columns: prompt (prompt and completion), instruction (instruction, "
        "input and output) or preference (chosen and rejected, for DPO). null: prompt or instruction, by the columns.",
    )
    prompt: str | None = Field(
        None,
        description="Template of the prompt, a format string over the columns such as 'Question: {question}\nAnswer:', "
        "or Jinja. Requires completion.",
    )
    completion: str | None = Field(None, description="Template of the completion, e.g. ' {answer}'. Requires prompt.")
    fields: FieldNames | None = Field(
        None, description="Names of the parts of a record, if they are not the usual ones. null: the usual ones."
    )
    loss_on: Literal["assistant", "completion", "all"] | None = Field(
        None,
        description="Tokens that carry loss: every turn of the assistant, the last one, or all. null: assistant for "
        "conversations and pairs, all for texts.",
    )
    row_id_column: str | None = Field(
        None, description='Column of row ids. null: row_id or id, if they exist. "": generate ids.'
    )
    label_paths: tuple[str, ...] = Field(
        (),
        description="Nested fields that are labels in addition to the usual ones, as dotted paths with positions in "
        "lists, e.g. turns.0.role.",
    )
    path_labels: bool = Field(
        False, description="Make the labels file and directory, by the place of the file of a record."
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="Maximum length of a row in tokens; longer documents are split. null: the context length of the "
        "model, at most 2,048, or the longest row of a corpus of token ids.",
    )
    max_rows_per_document: int | None = Field(
        None,
        ge=1,
        description="Use only the first rows of each document. null: all rows.",
    )
    shortest_end: int | None = Field(
        None,
        ge=1,
        description="Minimum number of tokens of the last row of a document that is split; shorter ones are left out, "
        "since the relevance of a few tokens is noise. null: max_length / 8.",
    )
    limit: int | None = Field(None, ge=1, description="Maximum number of documents to read.")
    snippet_chars: int = Field(240, ge=0, description="Characters of text stored per row for display; 0: none.")

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        """Replace the address of a dataset entry by the settings that it stands for."""
        if not isinstance(data, Mapping) or data.get("fields") is not None:
            return data
        claim = claimed("corpus", data["path"]) if isinstance(data.get("path"), str) else None
        if claim is None:
            return data
        entry = claim.reader.read(data["path"])
        ours = {name: value for name, value in data.items() if value is not None and name != "path"}
        if data.get("prompt") is not None:  # templates replace the form of the entry
            del entry["fields"]
        return entry | ours

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.fields is not None:
            idle = ("text_column", "prompt") + (() if self.form == "preference" else ("form",))
            refuse_idle(self, idle, "`fields` define how records are read")
        is_half = (self.prompt is None) != (self.completion is None)
        is_dpo = self.form == "preference"
        refuse(
            {
                "prompt, completion: only one is given; expected both templates": is_half,
                f"loss_on: got {self.loss_on}, but DPO compares completions; remove it": is_dpo
                and self.loss_on in ("assistant", "all"),
            }
        )
        if self.prompt is not None:
            refuse_idle(self, ("text_column", "form"), "prompt and completion define how records are read")
        return self


class TargetSettings(Settings):
    """Benchmarks, and the units that are drawn from them."""

    names: tuple[str, ...] = Field(
        (),
        description="Names of tasks (sciq, openbookqa, ...) or paths of JSONL files, with @margin, @margin_per_char or "
        "@margin_per_token for the margins of multiple choice; for a reader, paths like corpus.path.",
    )
    variant: str = Field("rc_0shot", description="Variant of the OLMES request files.")
    loss_on: Literal["completion", "assistant", "all"] = Field(
        "completion",
        description="Tokens of a unit that carry loss. completion: the completion, or the last answer of a "
        "conversation; assistant: every answer of a conversation is a unit; all: every token.",
    )
    units_per_target: int | None = Field(128, ge=1, description="Number of units drawn per target. null: all units.")
    max_length: int = Field(
        512, ge=2, description="Maximum length of a unit in tokens; longer prompts lose their beginning."
    )
    seed: int = Field(0, ge=0, description="Seed of the draw of units.")
    exclude_units: tuple[str, ...] = Field((), description="unit_ids excluded from every target.")


class ReaderSettings(Settings):
    """Base class of the settings of a reader of other rows than texts, see `grasp.readers`."""

    features: ClassVar[Mapping[str, Any]] = {}  # its defaults of `features`
    code: ClassVar[tuple[str, ...]] = ()  # settings that name code to run
    inputs: ClassVar[Mapping[str, str]] = {}  # settings that name files, with a phrase for messages


class ModelSettings(Settings):
    """The reference model: a causal LM, or that of a reader, whose settings are a further field of its name."""

    model_config = ConfigDict(frozen=True, extra="allow")

    path: str = Field(
        description="Directory of a Hugging Face checkpoint, hub name, or a GGUF file; for a reader, what it loads."
    )
    tokenizer: str | None = Field(None, description="Directory of the tokenizer. null: that of the checkpoint.")
    add_bos_token: bool | None = Field(
        None,
        description="Prepend the BOS token to every text. null: the default of the tokenizer. Chats follow their "
        "template instead.",
    )
    chat_date: date | None = Field(
        None,
        description="Date for chat templates that insert the current date, so that rows are reproducible. "
        f"null: {CHAT_DATE}.",
    )
    adapter: Literal["folded", "apart"] | None = Field(
        None,
        description="folded: merge a PEFT adapter into the weights of its model; apart: keep it separate, so that "
        "gradients are those of its own matrices. null: apart if the gradient kernel is built for further training of "
        "the adapter.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU."
    )
    device: str = Field("auto", description="auto: cuda if available, else cpu.")
    batch_tokens: int = Field(8192, ge=1, description="Tokens per forward pass, including padding.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads. null: the default of torch.")
    trust_remote_code: bool = Field(
        False, description="Run Python code of a checkpoint. Never taken from an artifact: it must be set by the user."
    )
    check: bool = Field(True, description="Verify on loading that head(hidden) equals the logits, and causality.")

    @model_validator(mode="wrap")
    @classmethod
    def _validate_reader(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the settings of a reader by its class."""
        others = (
            {name: data[name] for name in data if name not in cls.model_fields} if isinstance(data, Mapping) else {}
        )
        if not others:
            return handler(data)
        fields: dict[str, Any] = {
            name: (load(READERS, name).settings | None, None) for name in others if name in model_readers()
        }
        group: type[Settings] = create_model("ModelSettings", __base__=Settings, **fields)
        reader_fields = {name: value for name, value in group.model_validate(others) if value is not None}
        if len(reader_fields) > 1:
            raise ValueError(
                f"{', '.join(reader_fields)}: expected one of them, since only one reader reads the corpus"
            )
        return handler({name: value for name, value in data.items() if name not in others} | reader_fields)

    @property
    def reader(self) -> str | None:
        """Return the name of the reader; None: the model is a causal LM, which reads texts."""
        return next(iter(self.model_extra or {}), None)


POSITIONS = re.compile(r"all|tail:[1-9]\d*|stride:[1-9]\d*")


def _positions(text: str) -> str:
    if not POSITIONS.fullmatch(text):
        raise ValueError(f"expected all, tail:N or stride:N with N from 1, got {text!r}")
    return text


Positions = Annotated[str, AfterValidator(_positions)]


Train = Literal["further", "new"]
DEFAULT_RULE = "default"  # other rules are registered
PROTOCOLS = "grasp.protocols"  # entry points of registered rules, see `grasp.predict.scoring_rule.RegisteredProtocol`


class FeatureSettings(Settings):
    """Kernels that compare rows with units, the positions that they read, and their preconditioners."""

    rule: str = Field(
        DEFAULT_RULE,
        description="Kernels to build. default: those of the default scoring rule; or a registered rule: paper is that "
        "of the paper.",
    )
    kernels: tuple[str, ...] = Field(
        (), description="Names of kernels and sketches, see docs/how-it-works.md. Empty: by `rule` and `train`."
    )
    positions: Positions = Field(
        "all", description="Positions of a row that kernels read: all, tail:n or stride:n. Paper: tail:32."
    )
    summary_positions: Positions | None = Field(
        None,
        description="The same as `positions`, if units are read there too, and the moments of sketches are those of "
        "averages over each row, as in the paper. null: units are read everywhere. Paper: tail:32.",
    )
    gradient_coordinates: Annotated[int, Field(ge=1)] | Literal["all"] | None = Field(
        None,
        description="Approximate number of coordinates of a row's gradient that the gradient kernel uses, the same "
        "share of every matrix. null: 2,000,000, or all if there are fewer. Memory: 2 bytes per coordinate "
        "and unit, or 4 on a CPU with enough memory.",
    )
    learning_rate_sum: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Sum of the learning rates of all steps of the training that is predicted, from which the gradient "
        "kernel knows how far it goes. null: of --recipe, else of the recipe that is replayed by default; 0: one step.",
    )
    batch_rows: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Rows of a step of that training. null: as for `learning_rate_sum`."
    )
    top_k: int = Field(
        64, ge=1, description="Probabilities stored per residual, in addition to that of the label. Paper: 64."
    )
    alpha: float = Field(1.0, description="Exponent of the residual preconditioner (gamma + eps)^-alpha: 1 or 0.5.")
    epsilon: float = Field(
        0.3,
        gt=0,
        allow_inf_nan=False,
        description="eps of the residual preconditioner, in units of the mean gamma over coordinates that occur.",
    )
    tau: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="Tikhonov term of the whitening, in units of tr(Sigma)/width."
    )
    sample_rows: int = Field(
        256,
        ge=2,
        description="Minimum number of rows of the sample for moments over rows (of `gradient`, and of summaries); a "
        "smaller corpus is used completely. Paper: 65,536.",
    )
    sample_positions: int = Field(
        131_072, ge=2, description="Minimum number of positions of the sample for moments; rows are sampled as a whole."
    )
    max_cache_mb: int = Field(
        8192,
        ge=0,
        description="Disk space in MB for model outputs of a sample that is the whole corpus. A corpus that needs more "
        "is read twice.",
    )
    hidden_width: int = Field(64, ge=1, description="Width of the hidden sketch. Paper: 64.")
    residual_width: int = Field(64, ge=1, description="Width of the residual sketch. Paper: 64.")
    seed: int = Field(0, ge=0, description="Seed of the moment sample and of the projections.")

    @model_validator(mode="before")
    @classmethod
    def _apply_rule_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("rule") in entries(PROTOCOLS):
            return {**load(PROTOCOLS, data["rule"]).feature_defaults, **data}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        known, summary = [DEFAULT_RULE, *entries(PROTOCOLS)], self.summary_positions
        refuse(
            {
                f"rule: expected one of {', '.join(known)}, got {self.rule!r}": self.rule not in known,
                f"alpha: expected 1 or 0.5, got {self.alpha}": self.alpha not in (0.5, 1.0),
                f"summary_positions: expected {self.positions} as `positions`, got {summary}": summary
                not in (None, self.positions),
            }
        )
        return self

    def completed(self, **values: Any) -> Self:
        """Return settings with these values of fields, where they are unset."""
        return self.model_copy(update={name: value for name, value in values.items() if getattr(self, name) is None})

    def decided(self, train: "Train | None") -> Self:
        """Return settings with `kernels` filled in, by the kind of training; None: a reader's model."""
        if self.kernels:
            return self
        kernels = KERNELS[train] if self.rule == DEFAULT_RULE else load(PROTOCOLS, self.rule).kernels
        return self.model_copy(update={"kernels": (*kernels, *SKETCHES)})

    @property
    def unit_positions(self) -> str:
        """Return the positions of a unit that are read."""
        return self.summary_positions or "all"


NO_TARGET = "targets: name at least one, e.g. `sciq`"


class BuildSettings(Settings):
    """Settings of a build: corpus + targets + model -> artifact."""

    model: ModelSettings
    corpus: CorpusSettings
    targets: TargetSettings = TargetSettings()
    train: Train | None = Field(
        None,
        description="Training that is predicted: `further` (fine-tune this model on the corpus) or `new` (train a "
        "model from scratch). It determines the kernels. null: as recorded in the checkpoint, e.g. by `grasp retrain`. "
        "Not for models of readers.",
    )
    features: FeatureSettings = FeatureSettings()
    recipe: dict[str, Any] | None = Field(
        None, description="Fine-tuning recipe of the training that is predicted, from --recipe; null: the default one."
    )
    like: str | None = Field(
        None, description="Artifact whose moments are used instead of estimating them, so that both can be merged."
    )
    shard_rows: int = Field(
        SHARD_ROWS,
        ge=1,
        description="Rows per shard; a build that is interrupted while it scores rows loses at most one shard.",
    )
    array_dtype: Literal["float16", "float32"] = Field("float16", description="Type of the stored arrays.")
    keep_features: bool = Field(
        False,
        description="Store features, so that targets can be added without a pass: about 2 H + 6 K bytes per position. "
        "The gradient kernel adds 2 bytes per coordinate and row, about 4 MB per row.",
    )
    keep_tokens: bool = Field(True, description="Store the token ids of the rows with the artifact.")

    @model_validator(mode="before")
    @classmethod
    def _apply_reader_defaults(cls, data: Any) -> Any:
        model = data.get("model") if isinstance(data, dict) else None
        reader = model.reader if isinstance(model, ModelSettings) else named_reader(model)
        if reader is None:
            return data
        features = data.get("features", {})
        if isinstance(features, FeatureSettings):
            features = features.model_dump(exclude_unset=True)
        defaults = dict(load(READERS, reader).settings.features)
        return {**data, "features": defaults | features} if isinstance(features, dict) else data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        text_kernels, reader = {"embedding", "gradient", "knn"} & set(self.features.kernels), self.model.reader
        shown = ", ".join(sorted(text_kernels))
        refuse(
            {
                NO_TARGET: not self.targets.names,
                f"features.kernels: got {shown}, which require a language model; remove them": reader and text_kernels,
            }
        )
        return self


class ReplaySettings(Settings):
    """How trainings are replayed, with `grasp build --replay`; the training itself is in the file of --recipe."""

    orders: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Trainings, each with another order of the rows and for a new model another initialisation, whose "
        "scores are averaged and compared. Default: 1; for a new model 3.",
    )
    probes: int = Field(
        3, ge=0, description="Steps of a training at which all rows are differentiated; unused for a new model."
    )
    window: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Last steps of a training that are differentiated; the model before them is held fixed. Default: "
        "all steps; for a new model the last two thirds.",
    )
    memory_mb: int = Field(4096, ge=1, description="Memory for the steps of a segment in MB; larger ones are on disk.")
    seed: int = Field(0, ge=0, description="Seed of the orders of the rows, and of new adapters.")


def path_settings(settings_class: type[S], value: S | Mapping[str, Any] | Path | str, location: str) -> S:
    """Return the settings of a corpus or a model that is passed as settings, settings by name, or a path."""
    if isinstance(value, settings_class):
        return value
    return validated(settings_class, value if isinstance(value, Mapping) else {"path": str(value)}, location)


def build_settings(data: dict[str, Any], location: str = "settings") -> BuildSettings:
    """Validate settings of a build; the error message lists every mismatch."""
    return validated(BuildSettings, data, location)


def without_foreign_code(
    stored: Mapping[str, Any], location: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return stored settings, in which code that would be run is replaced by the user's settings.

    Stored settings come with data of unknown origin, so they must not decide which code is run.

    Args:
        stored: settings found with an artifact or with runs.
        overrides: settings of the user.
    Raises:
        SettingsError: the stored settings name code, and the user's settings do not.
    """
    data = deepcopy(dict(stored))
    for path in code_settings(stored):
        stored_code, user_code = get_setting(stored, path), get_setting(overrides or {}, path)
        if user_code:
            set_setting(data, path, user_code)
        elif stored_code:
            raise SettingsError(
                f"{location}: {path} is {stored_code!r}: that is code, and code from an artifact is run only at your "
                f"own request; review it, then repeat it with --set {path}=... or in the file of --config"
            )
    return data


def code_settings(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that name code to run, with those of the reader that the settings choose."""
    reader = named_reader(data.get("model"))
    names = () if reader is None else load(READERS, reader).settings.code
    return ("model.trust_remote_code", *(f"model.{reader}.{name}" for name in names))


def named_reader(model: Any) -> str | None:
    """Return the reader that unvalidated settings of a model name; None: there is none."""
    return next((name for name in model_readers() if get_setting(model, name) is not None), None)


def model_readers() -> list[str]:
    """Return the names of the readers that settings of the model choose; those with a dot read other tools' files."""
    return [name for name in entries(READERS) if "." not in name]


def form_of_loss(loss: str | None) -> str | None:
    """Return the form of the records of a corpus on which a model is trained with this loss; None: any.

    Raises:
        SettingsError: unknown loss.
    """
    if loss not in (None, "tokens", "dpo"):
        raise SettingsError(f"--loss: got {loss!r}, expected tokens or dpo")
    return "preference" if loss == "dpo" else None
