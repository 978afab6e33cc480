"""In-Run Data Shapley: what each row of a batch took off the validation loss, added up over one replay.

Shape letters: N rows, P rows of the prefix, B rows of a batch, C columns of values, E units.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from numpy.lib.format import open_memmap
from pydantic import Field, model_validator

from grasp.arrays import F32, F64, I64
from grasp.baselines.gradients.layers import described
from grasp.baselines.gradients.method_settings import Patterns
from grasp.baselines.replay import Replay, ReplaySettings, refuse_non_finite, steps_of
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from grasp.seeds import stream
from grasp.settings import Settings

WINDOW_ROWS = 4096  # rows fetched at once: a shard on disk is read a few times, not once a batch
KEEP_SECONDS = 60.0  # between two states kept; what a kill costs
STATE = "replay.safetensors"
VALUES = "values.npy"


class InRunSettings(Settings):
    """A replay of training from the reference model, and the validation loss that it is judged by."""

    order: Literal[1, 2] = Field(1, description="1: gradients alone; 2: with the Hessian of the validation loss.")
    utility: Literal["global", "target", "unit"] = Field(
        "target",
        description="Validation loss: the mean over all units, over those of each target, or each unit's own. Paper: "
        "global, and unit for 64 and 256 units.",
    )
    update: Literal["sgd", "adam"] = Field(
        "sgd",
        description="What a row's gradient is taken to do to the weights: sgd, as the source and the paper do though "
        "the replay runs AdamW; adam: scaled by the second moment, held fixed within a step.",
    )
    prefix_rows: int = Field(50_000, ge=1, description="First rows of the corpus, replayed and valued. Paper: 50,000.")
    batch_rows: int = Field(
        16, ge=1, description="Rows of one step, the players of its game. Paper: its audits speak of a step a row."
    )
    shuffle: bool = Field(True, description="Draw the order of the prefix from the seed; else corpus order.")
    learning_rate: float = Field(5e-5, gt=0, allow_inf_nan=False, description="Of AdamW, constant. Paper: 5e-5.")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="Of AdamW, decoupled.")
    validation_units: int | None = Field(
        256,
        ge=1,
        description="Units in the validation loss of `global` and `target`, drawn evenly over targets; none: all. They "
        "are read in every step and decide what it costs. Paper: 256.",
    )
    layers: Patterns = Field(
        ("all",),
        min_length=1,
        description="Parameters that the replay trains and values: all, head, embedding, body, blocks, block:N, "
        "final_norm, patterns as for tracin; ! takes away. Paper: embeddings, head and projections, not the norms.",
    )

    @model_validator(mode="after")
    def _units_fit(self) -> Self:
        asked = "validation_units" in self.model_fields_set and self.validation_units is not None
        if self.utility == "unit" and asked:
            raise ValueError("validation_units: utility `unit` values rows for every unit; leave it out")
        return self


class InRun(BlockMethod[InRunSettings]):
    """Shapley values of each training step's batch, added up over one replay.

    In-Run Data Shapley (Wang et al. 2025), first and second order, of one epoch over a prefix of the corpus.

    Each batch is a game: its rows' Shapley values in the change of a validation loss, to first or second order in the
    learning rate (see `grasp.baselines.replay`). A row's score is its value in the step that it was in.

    Deviations: the source derives its values for SGD and uses them where AdamW trains, which is `update: sgd` here;
    `adam` holds the optimizer's state fixed within a step, as Ding et al. 2026 do, its details are ours. The source's
    second order has an exact Hessian product; here it is a central difference along the batch's step. A row counts by
    its share of the batch's labels, as it does in a training loss that is a mean over labels.
    """

    settings_type = InRunSettings
    looks_at = frozenset({"tokens", "model"})

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        plan = _Plan.from_settings(self.settings, self.seed, material)
        values = work.directory / VALUES
        replay = Replay(_trainable(material.model), plan.validation, plan.weight_CE, _replay_settings(self.settings))
        if not values.exists():
            fresh = values.with_suffix(".new")
            open_memmap(fresh, mode="w+", dtype=np.float32, shape=(plan.n_prefix, replay.n_columns)).flush()
            fresh.replace(values)
        _run(replay, plan, material, work.directory)
        return _Replayed(np.load(values, mmap_mode="r"), plan, replay, material.n_rows, self.settings)


def _replay_settings(settings: InRunSettings) -> ReplaySettings:
    return ReplaySettings(
        layers=settings.layers,
        order=settings.order,
        update=settings.update,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )


def _trainable(model: ReferenceModel) -> ReferenceModel:
    """A copy whose weights may change, at least float32: steps of 5e-5 vanish in bfloat16."""
    own = copy.deepcopy(model.model)
    if model.dtype != torch.float64:
        own = own.float()
    return ReferenceModel(own, model.tokenizer, batch_tokens=model.batch_tokens)


@dataclass(frozen=True)
class _Plan:
    """Which rows come when, and the validation losses."""

    order_P: I64
    batch_rows: int
    validation: list[Example]
    weight_CE: F64 | None
    column_E: I64 | None  # column of each of the artifact's units; none: one column for all
    left_out: int = field(default=0)  # units that are not in the validation loss

    @classmethod
    def from_settings(cls, settings: InRunSettings, seed: int, material: MethodInputs) -> Self:
        n_prefix = min(settings.prefix_rows, material.n_rows)
        order_P = np.arange(n_prefix)
        if settings.shuffle:
            order_P = stream(seed, "inrun", "order").permutation(n_prefix)
        target_E = [unit.target for unit in material.units.units]
        chosen = _drawn(target_E, None if settings.utility == "unit" else settings.validation_units, seed)
        examples = [Example(material.unit_tokens[e].input_ids, material.unit_tokens[e].first) for e in chosen]
        weight_CE, column_E = _columns(settings.utility, target_E, chosen)
        return cls(order_P, settings.batch_rows, examples, weight_CE, column_E, len(target_E) - len(chosen))

    @property
    def n_prefix(self) -> int:
        return len(self.order_P)

    @property
    def n_steps(self) -> int:
        return steps_of(self.n_prefix, self.batch_rows)

    def batches(self, material: MethodInputs, first_step: int) -> Iterator[tuple[I64, list[Example]]]:
        """Rows of each step from `first_step` on: their indices, and their tokens."""
        window = max(1, WINDOW_ROWS // self.batch_rows) * self.batch_rows
        for start in range(first_step * self.batch_rows, self.n_prefix, window):
            index = self.order_P[start : start + window]
            rows = material.rows_at(index)
            for at in range(0, len(index), self.batch_rows):
                here = range(at, min(at + self.batch_rows, len(index)))
                yield index[here.start : here.stop], [Example(rows.ids(i), labelled=rows.mask(i)) for i in here]


def _drawn(target_E: list[str], wanted: int | None, seed: int) -> I64:
    """Units of the validation loss: as many of each target, up to one, and at least one."""
    if wanted is None or wanted >= len(target_E):
        return np.arange(len(target_E))
    names = list(dict.fromkeys(target_E))
    chosen: list[int] = []
    for k, name in enumerate(names):
        own = np.array([e for e, target in enumerate(target_E) if target == name])
        share = max(1, (wanted - len(chosen)) // (len(names) - k))
        chosen += stream(seed, "inrun", "units", name).permutation(own)[:share].tolist()
    return np.sort(np.array(chosen))


def _columns(utility: str, target_E: list[str], chosen: I64) -> tuple[F64 | None, I64 | None]:
    """Weights of the chosen units in each validation loss, and the column of every unit."""
    if utility == "unit":
        return None, np.arange(len(target_E))
    if utility == "global":
        return np.full((1, len(chosen)), 1.0 / len(chosen)), None
    names = list(dict.fromkeys(target_E))
    column_E = np.array([names.index(target) for target in target_E])
    member_CE = column_E[chosen] == np.arange(len(names))[:, None]
    return member_CE / member_CE.sum(axis=1, keepdims=True), column_E


def _run(replay: Replay, plan: _Plan, material: MethodInputs, directory: Path) -> None:
    """Replay what is left; state and values of finished steps are kept from time to time, and at the end."""
    state = directory / STATE
    if state.exists():
        replay.restore(state)
    done = replay.step * plan.batch_rows
    material.progress.stage("replaying training", rows=max(0, plan.n_prefix - done), tokens=None)
    values = np.load(directory / VALUES, mmap_mode="r+")
    kept = time.monotonic()
    for row_index_B, rows in plan.batches(material, replay.step):
        values[row_index_B] = _advanced(replay, row_index_B, rows)
        if replay.step == plan.n_steps or time.monotonic() - kept >= KEEP_SECONDS:
            values.flush()
            replay.save(state)
            kept = time.monotonic()
        material.progress.advance(len(rows), sum(row.labels for row in rows))


def _advanced(replay: Replay, row_index_B: I64, rows: list[Example]) -> F64:
    step = replay.step
    try:
        value_BC = replay.advance(rows)
    except ModelError as err:
        raise ModelError(
            f"replay: step {step}, among rows {row_index_B.min()} to {row_index_B.max()}: {err}; lower learning_rate"
        ) from err
    refuse_non_finite(value_BC, row_index_B, step)
    return value_BC


class _Replayed(RowScorer):
    """Values of the prefix; 0 after it."""

    def __init__(self, value_PC: F32, plan: _Plan, replay: Replay, n_rows: int, settings: InRunSettings) -> None:
        self._value_PC, self._plan, self._n_rows, self._settings = value_PC, plan, n_rows, settings
        self._layers, self._steps = replay.engine.layers, replay.step

    def score(self, start: int, stop: int) -> Scores:
        value_NC = np.zeros((stop - start, self._value_PC.shape[1]), dtype=np.float32)
        inside = self._value_PC[start : min(stop, self._plan.n_prefix)]
        value_NC[: len(inside)] = inside
        return value_NC if self._plan.column_E is None else value_NC[:, self._plan.column_E]

    def account(self) -> Account:
        after = self._n_rows - self._plan.n_prefix
        counts = {"rows after the prefix, scored 0": after, "units not in the validation loss": self._plan.left_out}
        return Account(
            covers=(described(self._layers),),
            notes=tuple(self._notes(after)),
            counts={reason: number for reason, number in counts.items() if number},
        )

    def _notes(self, after: int) -> Iterator[str]:
        what = {
            "global": "one validation loss, the mean over all units, for every unit",
            "target": "one validation loss a target, the mean over its units",
            "unit": "each unit's own loss",
        }[self._settings.utility]
        yield (
            f"order {self._settings.order}, {self._steps} steps of {self._plan.batch_rows} rows, AdamW at "
            f"{self._settings.learning_rate:g}; {what}"
        )
        if self._settings.update == "sgd":
            yield "values are of an SGD step though AdamW trains, as in the source"
        if after:
            yield f"{after} of {self._n_rows} rows come after the prefix and score 0: not valued, not neutral"
