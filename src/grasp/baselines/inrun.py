"""In-Run Data Shapley: how much each row of a batch lowers the validation loss, summed over one replay of training.

A replay trains a copy of the reference model on the first rows of the corpus (the prefix), one epoch, and values the
rows of each batch while it trains on them. Start with `InRun`; a single step is in `grasp.baselines.replay`.

Shape letters: N rows, P rows of the prefix, B rows of a batch, C columns of values, E units.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from numpy.lib.format import open_memmap
from pydantic import Field

from grasp.arrays import F64, I64
from grasp.baselines.gradients.layers import describe_layers
from grasp.baselines.gradients.method_settings import Patterns
from grasp.baselines.gradients.scorers import unit_examples
from grasp.baselines.replay import Replay
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.errors import ModelError
from grasp.files import atomic_path
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from grasp.seeds import stream
from grasp.settings import Settings

WINDOW_ROWS = 4096  # rows fetched at once, so that a shard is read a few times instead of once per batch
SAVE_SECONDS = 60.0  # between two saved states: the most work that a kill can lose
STATE = "replay.safetensors"
UTILITY_NOTES = {
    "global": "a single validation loss, the mean over all units",
    "target": "one validation loss per target, the mean over its units",
}
VALUES = "values.npy"  # (P, C), rows of the prefix by validation loss


class InRunSettings(Settings):
    """A replay of training from the reference model, and the validation losses that rows are valued by."""

    order: Literal[1, 2] = Field(1, description="1: gradients only; 2: with the Hessian of the validation loss.")
    utility: Literal["global", "target"] = Field(
        "target", description="Validation loss: mean over all units, or over the units of each target."
    )
    prefix_rows: int = Field(
        50_000,
        ge=1,
        description="Number of rows, from the start of the corpus, that are replayed and valued. Paper: 50,000.",
    )
    batch_rows: int = Field(
        16, ge=1, description="Rows per step: the players of its game. Paper: one row per step in its audits."
    )
    learning_rate: float = Field(
        5e-5, gt=0, allow_inf_nan=False, description="Learning rate of AdamW, constant. Paper: 5e-5."
    )
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="Decoupled weight decay of AdamW.")
    validation_units: int | None = Field(
        256,
        ge=1,
        description="Units in the validation losses, drawn evenly over targets; null: all. Every step reads them, so "
        "they determine its cost. Paper: 256.",
    )
    layers: Patterns = Field(
        ("all",),
        min_length=1,
        description="Parameters that the replay trains and values: all, head, embedding, body, blocks, block:N, "
        "final_norm, patterns as for tracin; ! excludes. Paper: embeddings, head and projections, not the norms.",
    )


class InRun(BlockMethod[InRunSettings]):
    """Shapley values of each training step's batch, summed over one replay.

    Each batch is a game: a row's score is its Shapley value in the change of a validation loss at the step that
    trains on it, to first or second order in the learning rate (see `grasp.baselines.replay`).

    Source: Wang et al. 2025 (In-Run Data Shapley, arXiv 2406.11011).
    As published: values are collected while a GPT-2 is pretrained, with a few validation texts. They are derived for
    SGD and applied to a training with AdamW. The second order uses an exact Hessian product.
    Deviation: one epoch over a prefix of the corpus, from the reference model. The Hessian product is a central
    difference along the batch's step. A row is weighted by its share of the batch's labels, as in a training loss that
    is a mean over labels.
    """

    settings_type = InRunSettings
    requires = frozenset({"tokens", "model"})

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        plan = _ReplayPlan.from_settings(self.settings, self.seed, inputs)
        settings, values = self.settings, work / VALUES
        replay = Replay(
            _trainable_copy(inputs.model),
            plan.validation,
            plan.weight_CE,
            layers=settings.layers,
            order=settings.order,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        if not values.exists():
            with atomic_path(values) as unfinished:
                open_memmap(unfinished, mode="w+", dtype=np.float32, shape=(plan.n_prefix, replay.n_columns)).flush()
        state = work / STATE
        if state.exists():
            replay.restore(state)
        done = replay.step * plan.batch_rows
        inputs.progress.stage("replaying training", rows=max(0, plan.n_prefix - done), tokens=None)
        value_PC = np.load(values, mmap_mode="r+")
        last_saved = time.monotonic()
        for row_index_B, rows in plan.batches(inputs, replay.step):  # saved every SAVE_SECONDS and at the end
            where = f"replay: step {replay.step}, among rows {row_index_B.min()} to {row_index_B.max()}"
            try:
                value_BC = replay.advance(rows)
            except ModelError as err:
                raise ModelError(f"{where}: {err}; lower learning_rate") from err
            if not np.isfinite(value_BC).all():
                raise ModelError(f"{where}: a value is not finite; lower learning_rate, or remove the row")
            value_PC[row_index_B] = value_BC
            if replay.step * plan.batch_rows >= plan.n_prefix or time.monotonic() - last_saved >= SAVE_SECONDS:
                value_PC.flush()
                replay.save(state)
                last_saved = time.monotonic()
            inputs.progress.advance(len(rows), sum(row.labels for row in rows))

        def score(start: int, stop: int) -> Scores:
            """Score the prefix by its values, and the other rows 0."""
            value_NC = np.zeros((stop - start, replay.n_columns), dtype=np.float32)
            in_prefix = value_PC[start : min(stop, plan.n_prefix)]
            value_NC[: len(in_prefix)] = in_prefix
            return value_NC if plan.column_E is None else value_NC[:, plan.column_E]

        n_after = inputs.n_rows - plan.n_prefix
        counts = {"rows after the prefix, scored 0": n_after, "units not in the validation loss": plan.n_excluded}
        notes = [
            f"order {settings.order}, {replay.step} steps of {settings.batch_rows} rows, AdamW at "
            f"{settings.learning_rate:g}; {UTILITY_NOTES[settings.utility]}",
            "values are those of an SGD step although the replay uses AdamW, as in the source",
        ]
        if n_after:
            notes.append(
                f"{n_after} of {inputs.n_rows} rows come after the prefix and score 0 (not valued, not neutral)"
            )
        account = Account(
            covers=(describe_layers(replay.engine.layers),),
            notes=tuple(notes),
            counts={reason: number for reason, number in counts.items() if number},
        )
        return RowScorer(score, account)


def _trainable_copy(model: ReferenceModel) -> ReferenceModel:
    """Return a trainable copy in at least float32, since steps of 5e-5 vanish in bfloat16."""
    module = copy.deepcopy(model.model)
    if model.dtype != torch.float64:
        module = module.float()
    return ReferenceModel(module, model.tokenizer, batch_tokens=model.batch_tokens)


@dataclass(frozen=True)
class _ReplayPlan:
    """Order of the rows, and the validation losses."""

    order_P: I64  # index of the row at each place of the epoch
    batch_rows: int
    validation: list[Example]  # the units in the validation losses
    weight_CE: F64  # weight of each of these units in each loss
    column_E: I64 | None  # column of each of the artifact's units; None: a single column for all
    n_excluded: int  # units outside the validation loss

    @classmethod
    def from_settings(cls, settings: InRunSettings, seed: int, inputs: MethodInputs) -> Self:
        """Draw the order of the rows and the units of the validation loss, equal numbers per target up to rounding."""
        order_P = stream(seed, "inrun", "order").permutation(min(settings.prefix_rows, inputs.n_rows))
        targets = [unit.target for unit in inputs.units.units]
        names = list(dict.fromkeys(targets))
        column_E = np.array([names.index(target) for target in targets])
        n_units, selected = settings.validation_units, np.arange(len(targets))
        if n_units is not None and n_units < len(targets):
            drawn: list[int] = []
            for k, name in enumerate(names):
                share = max(1, (n_units - len(drawn)) // (len(names) - k))
                units_of_target = stream(seed, "inrun", "units", name).permutation(np.flatnonzero(column_E == k))
                drawn += units_of_target[:share].tolist()
            selected = np.sort(np.array(drawn))
        units = unit_examples(inputs)
        is_member_CE = column_E[selected] == np.arange(len(names))[:, None]
        if settings.utility == "global":
            is_member_CE = np.ones((1, len(selected)))
        return cls(
            order_P,
            settings.batch_rows,
            [units[e] for e in selected],
            is_member_CE / is_member_CE.sum(axis=1, keepdims=True),
            column_E if settings.utility == "target" else None,
            len(targets) - len(selected),
        )

    @property
    def n_prefix(self) -> int:
        return len(self.order_P)

    def batches(self, inputs: MethodInputs, first_step: int) -> Iterator[tuple[I64, list[Example]]]:
        """Yield the rows of each step from `first_step` on: their indices and their tokens."""
        window = max(1, WINDOW_ROWS // self.batch_rows) * self.batch_rows
        for start in range(first_step * self.batch_rows, self.n_prefix, window):
            index = self.order_P[start : start + window]
            rows = inputs.rows_at(index)
            for offset in range(0, len(index), self.batch_rows):
                batch = range(offset, min(offset + self.batch_rows, len(index)))
                yield index[batch.start : batch.stop], [Example(rows.ids(i), loss_mask=rows.mask(i)) for i in batch]
