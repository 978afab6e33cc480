"""A training run whose states can be visited again, forward and backward. Start with `Trajectory`.

The replay of a training visits its states in reverse order, but storing all of them would take too much memory. States
are stored at the beginning of every segment of about sqrt(K) steps; the states within a segment are recomputed when it
is visited (checkpointing). They are stored in memory or in a directory. With a directory, an interrupted run is resumed
by the same call, with bitwise identical results on a CPU.

Shape letters: K steps, B rows of a batch, L tokens, N rows.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.models.causal_lm import weights_fingerprint
from grasp.store.directory import Schema, Store
from grasp.store.records import Mark
from grasp.training.adamw import STATE, AdamWTraining
from grasp.training.row_order import TokenBatch, token_batches

STATES = Schema(
    mark=Mark,
    marks="states/*.json",
    plan="trajectory.json",
    other_files=("states",),
    recovery_hint="remove it and train again",
    error_type=ModelError,
)
MEMORY_BYTES = 4 << 30  # default limit of the states in memory
RERUN_TOLERANCE = 1e-3  # nats per token: above differences in summation order on a GPU, below the effect of dropout


class TensorSets:
    """Sets of tensors, one per step, in memory or as safetensors files of a store; a set is written atomically."""

    def __init__(self, prefix: str, store: Store[Mark] | None) -> None:
        """Create no set; `prefix` begins the names of files."""
        self._name, self._store = f"{prefix}-{{:06d}}", store
        self._memory: dict[str, dict[str, Tensor]] = {}

    def __contains__(self, step: int) -> bool:
        return self._name.format(step) in (self._memory if self._store is None else self._store.parts)

    def put(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Store a copy of a set."""
        name = self._name.format(step)
        if self._store is None:
            self._memory[name] = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        else:
            content = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            self._store.put(name, {f"states/{name}.safetensors": lambda path: save_file(content, path)})

    def get(self, step: int) -> Mapping[str, Tensor]:
        """Return a set, which must not be modified; a file is mapped into memory, and read on access."""
        name = self._name.format(step)
        return self._memory[name] if self._store is None else load_file(self._store.file(name))

    def drop(self, step: int) -> None:
        """Remove a set."""
        name = self._name.format(step)
        if self._store is None:
            self._memory.pop(name, None)
        else:
            self._store.drop(name)


class ParameterTensors(Sequence[Tensor]):
    """One tensor per parameter from a set, e.g. ``<k>.exp_avg`` of parameter k, read on access."""

    def __init__(self, tensors: Mapping[str, Tensor], suffix: str, count: int, device: torch.device) -> None:
        self._tensors, self._suffix, self._count, self._device = tensors, suffix, count, device

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: Any) -> Any:
        number = range(self._count)[k]  # an IndexError beyond the last ends an iteration
        return self._tensors[f"{number}.{self._suffix}"].to(self._device)


@dataclass(frozen=True, slots=True)
class TrajectorySize:
    """Size of the states of a trajectory."""

    steps: int
    segment_steps: int
    parameters: int
    start_bytes: int  # weights and moments at the beginning of all segments, and at the end
    segment_bytes: int  # weights, moments and gradient of every step of one segment

    @classmethod
    def of(cls, steps: int, parameters: int, parameter_bytes: int) -> Self:
        """Return the size for a number of steps and of parameters; `parameter_bytes` is the size of all parameters."""
        segment_steps = math.ceil(math.sqrt(steps))
        n_states = math.ceil(steps / segment_steps) + 1
        return cls(
            steps=steps,
            segment_steps=segment_steps,
            parameters=parameters,
            start_bytes=len(STATE) * parameter_bytes * n_states,
            segment_bytes=(len(STATE) + 1) * parameter_bytes * segment_steps,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a training run: its batch, the loss of its rows, its gradient, and the moments after it."""

    step: int
    batch: TokenBatch
    loss_B: F64  # contribution of each row to the loss
    gradient: Sequence[Tensor]  # before clipping
    first_after: Sequence[Tensor]
    second_after: Sequence[Tensor]


class Trajectory:
    """A training run with a given order of rows."""

    def __init__(
        self,
        training: AdamWTraining,
        rows: RowStore,
        order: Sequence[I64],
        *,
        weight_N: F64 | None = None,
        directory: Path | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Prepare the run without computing anything.

        Args:
            training: weights and optimizer before the first step.
            rows: the corpus.
            order: positions of the rows of each step, (B,) each.
            weight_N: factor of the loss of each row; it does not change the number of labels in a batch.
            directory: where to store states. Default: in memory.
            memory_bytes: maximum size of the states in memory.
        """
        self.training, self.rows = training, rows
        self.order = [np.asarray(index_B, dtype=np.int64) for index_B in order]
        self.weight_N = np.ones(rows.n_rows) if weight_N is None else np.asarray(weight_N, dtype=np.float64)
        steps = len(self.order)
        assert steps <= training.recipe.steps
        assert self.weight_N.shape == (rows.n_rows,)
        assert not training.step
        assert not training.bfloat16, "its rounding error exceeds the finite differences"
        self.size = TrajectorySize.of(steps, training.n_parameters, training.parameter_bytes)
        self.segment_bounds = [*range(0, steps, self.size.segment_steps), steps]
        self.segments = list(pairwise(self.segment_bounds))  # first step and end of each, in order
        self.directory = directory
        needed = self.size.segment_bytes + (self.size.start_bytes if directory is None else 0)
        assert directory is not None or needed <= memory_bytes
        digest = hashlib.blake2b(self.weight_N.tobytes(), digest_size=16)
        for index_B in self.order:
            digest.update(index_B.tobytes() + b"|")
        self.identity: dict[str, Any] = {  # what determines the training run, as JSON data
            "recipe": training.recipe.model_dump(mode="json"),
            "weights": weights_fingerprint(training.model, b""),
            "rows": rows.fingerprint,
            "order": digest.hexdigest(),
        }
        store = None
        if directory is not None:
            store = Store(directory, STATES)
            store.begin(self.identity)
        self._segment_states = TensorSets("state", store)
        self._step_states = TensorSets("step", store if needed > memory_bytes else None)
        if 0 not in self._segment_states:
            self._store_state(0, [])

    # ---------------------------------------------------------------------------------------------------------- forward

    def train(self, progress: Callable[[int], None] | None = None) -> F64:
        """Train to the end, starting from the last stored state.

        Args:
            progress: callback that receives the number of finished steps.

        Returns:
            Loss of every step, (K,), nats.
        """
        first = max(bound for bound in self.segment_bounds if bound in self._segment_states)
        losses = self.restore(first)
        for batch in self.batches(first, self.segment_bounds[-1]):
            losses.append(float(self.training.backward(batch.ids_BL, batch.weight_BL).sum()))
            self.training.check_loss(losses[-1])
            self.training.update()
            if self.training.step in self.segment_bounds:
                self._store_state(self.training.step, losses)
            if progress is not None:
                progress(self.training.step)
        return np.array(losses)

    def batches(self, first: int, last: int, weight_N: F64 | None = None) -> Iterator[TokenBatch]:
        """Yield the batches of the steps in [`first`, `last`); `weight_N` replaces the weights of the rows."""
        return token_batches(
            self.rows,
            self.order[first:last],
            context=self.training.context,
            vocab_size=self.training.vocab_size,
            weight_N=self.weight_N if weight_N is None else weight_N,
        )

    def retrain(self, weight_N: F64) -> None:
        """Train again from the start with other weights of the rows, without storing states."""
        self.restore(0)
        for batch in self.batches(0, self.segment_bounds[-1], weight_N):
            self.training.backward(batch.ids_BL, batch.weight_BL)
            self.training.update()

    def _store_state(self, step: int, losses: Sequence[float]) -> None:
        past_losses = {"losses": torch.tensor(losses, dtype=torch.float64)}
        self._segment_states.put(step, self.training.state() | past_losses)

    # --------------------------------------------------------------------------------------------------------- backward

    def restore(self, step: int) -> list[float]:
        """Restore the state at the beginning of a segment, or the final state.

        Args:
            step: a bound of a segment.

        Returns:
            Losses of the steps before it, nats.
        """
        assert step in self._segment_states, "call train first"
        state = self._segment_states.get(step)
        losses: list[float] = state["losses"].tolist()
        self.training.set_state(step, state)
        return losses

    def backward_through(self, segment: tuple[int, int]) -> Iterator[Step]:
        """Recompute the steps of a segment, then yield them in reverse order.

        When a step is yielded, the parameters have the weights before it.

        Args:
            segment: first step and end.

        Raises:
            ModelError: a recomputed loss differs from the recorded one, e.g. because of dropout.
        """
        (first, last), training = segment, self.training
        end = self._segment_states.get(last)
        forward_losses = end["losses"].tolist()
        self.restore(first)
        batches: list[tuple[TokenBatch, F64]] = []
        for batch in self.batches(first, last):
            step, loss_B = training.step, training.backward(batch.ids_BL, batch.weight_BL)
            loss = float(loss_B.sum())
            if abs(loss - forward_losses[step]) > RERUN_TOLERANCE:
                raise ModelError(
                    f"trajectory: step {step} had loss {forward_losses[step]:.6f}, and {loss:.6f} when it was computed "
                    "again; the model is not deterministic, disable dropout"
                )
            gradients = {f"{k}.gradient": gradient for k, gradient in enumerate(training.gradients())}
            self._step_states.put(step, training.state() | gradients)
            training.update()
            batches.append((batch, loss_B))
        training.optimizer.state.clear()  # free the moments; those of each step are stored
        count, device = len(training.parameters), training.device
        for step in reversed(range(first, last)):
            before = self._step_states.get(step)
            after = end if step + 1 == last else self._step_states.get(step + 1)
            training.set_weights(ParameterTensors(before, "weight", count, device))
            moments_after = [ParameterTensors(after, moment, count, device) for moment in STATE[1:]]
            gradient = ParameterTensors(before, "gradient", count, device)
            yield Step(step, *batches[step - first], gradient, *moments_after)
            self._step_states.drop(step + 1)
        self._step_states.drop(first)
