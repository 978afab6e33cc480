"""Watch a training: a callback for the trainers of transformers and TRL, and three calls for other loops.

    monitor = grasp.Monitor("source", targets=["exam.jsonl", "sciq"])
    SFTTrainer(..., callbacks=[monitor])            # or monitor.begin(...), monitor.step(batch), monitor.end()

Losses by source are those of the training's own forward pass, which a hook reads. Effects of a step on each source on
the targets (`grasp.monitor.effects`) are measured between steps. Their sum over the steps predicts the change of the
targets' losses until the next measurement, which is measured too. An exception switches the monitor off, not the
training. Start with `Monitor`.
"""

import copy
import functools
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from grasp.arrays import F64
from grasp.errors import GraspError, ModelError, SettingsError
from grasp.monitor import batches
from grasp.monitor.effects import ROWS, Effects, LabelledRow, Measurement, Row, clip_window, load_questions
from grasp.monitor.record import MonitorRecord, summarise
from grasp.results import Result

SHARE_OF_TIME = 0.05  # of the training that measurements take by default
FIRST_STEP = 10  # of a measurement by default: Adam's second moments are means of this many steps
LOGGED_STEPS = 10  # of losses in a loop of your own; a trainer logs every `logging_steps`
CLIPPED_STEPS = 10  # whose mean factor of gradient clipping counts

Sums = dict[tuple[str, str], F64]  # rows or pairs, tokens, loss, loss of pairs, margin; by suffix of measure and value
Values = tuple[str, ...]  # of the labels of a row
Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Switch the monitor off, with one line, if a method raises an exception; with `strict`, raise it."""

    @functools.wraps(method)
    def run(self: "Monitor", *args: Any, **kwargs: Any) -> Any:
        try:
            return None if self.is_off else method(self, *args, **kwargs)
        except Exception as err:  # whatever it is, the training goes on
            if self.strict:
                raise
            self.is_off = True
            self._remove_hooks()
            reason = str(err) if isinstance(err, GraspError) else f"{type(err).__name__}: {err}"
            self._note(f"off from step {self.n_steps}: {' '.join(reason.split())}; the training goes on")
            return None

    return run  # type: ignore[return-value]


class Monitor(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Show while a model is trained which source is learned, and which helps or hurts each target.

    Args:
        label: column of the training dataset, or function of a row, that names the source of each row. Of several, the
            first one does; the losses are shown by the values of each.
        targets: files of questions or names of benchmarks, as for `grasp build`. Default: losses only.
        every: steps between measurements of effects. Default: so that they take at most 5 % of the training's time.
        rows: the dataset before packing, which drops all other columns. Default: that of the trainer.
        out: directory of the stored table. Default: `monitor` in the trainer's output directory.
        strict: whether an exception stops the training, instead of the monitor.
    """

    def __init__(
        self,
        label: batches.Label | Sequence[batches.Label],
        targets: str | Path | Sequence[str | Path] = (),
        *,
        every: int | None = None,
        rows: Any = None,
        out: Path | str | None = None,
        strict: bool = False,
    ) -> None:
        self.labels = (label,) if isinstance(label, str) or callable(label) else tuple(label)
        self.names = ["source" if callable(label) else label for label in self.labels]
        if not self.names or len(set(self.names)) < len(self.names) or (every is not None and every < 1):
            raise SettingsError(f"label, every: got {label!r} and {every}, expected other labels and at least one step")
        self.every, self.rows, self.strict = every, rows, strict
        self.targets = (str(targets),) if isinstance(targets, str | Path) else tuple(map(str, targets))
        self.out = None if out is None else Path(out)
        self.is_off, self.hooks = False, list[Any]()
        self._start(0, self.out)

    def _start(self, n_steps: int, directory: Path | None) -> None:
        """Forget a training before this one, and read its table if it continues."""
        self._remove_hooks()
        self.is_main = not distributed.is_initialized() or distributed.get_rank() == 0
        self.n_steps, self.record = n_steps, MonitorRecord(self.names, directory if self.is_main else None)
        if n_steps:
            self.record.resume(n_steps)
        self.row_of: dict[int, tuple[Values, float]] | None = None  # labels and reference of each row, by its hash
        self.effects: Effects | None = None
        self.beta: float | None = None  # of DPO
        self.awaits_reference = False  # which a forward pass of DPO computes, after that of the model
        self.recent: dict[str, deque[LabelledRow]] = defaultdict(lambda: deque(maxlen=ROWS))
        self.sums: Sums = {}  # since the last log
        self.weights, self.rates = Counter[str](), 0.0  # tokens or pairs, learning rates; since the last measurement
        self.last: tuple[list[str], Measurement] | None = None
        self.new_logs: dict[str, float] = {}
        self.pending: list[Any] = []  # forward passes that await a reference, or their batch
        self.clips: deque[float] = deque(maxlen=CLIPPED_STEPS)
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, 0.0  # the cost is that of a measurement
        self.n_timed, self.n_read = 0, 0  # steps and tokens since the start

    # ------------------------------------------------------------------------------------------- transformers and TRL

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Index the labels of the dataset, load the targets, and attach to the model."""
        trainer = self._frame_of_trainer().f_locals["self"]
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]  # logs first
        self._start(state.global_step, self.out or Path(args.output_dir) / "monitor")
        self.row_of = self._index(trainer)
        if hasattr(trainer, "beta") and hasattr(trainer, "loss_types"):  # DPOTrainer
            self.beta, self.awaits_reference = float(trainer.beta), not trainer.precompute_ref_logps
            if self.awaits_reference and trainer.ref_model is not None:
                self._hook(trainer.ref_model)
        # The inner model, which also computes references of DPO; hooks of a compiled model would be traced.
        self._hook(trainer.model_wrapped if hasattr(trainer.model_wrapped, "_orig_mod") else trainer.model)
        self._prepare_effects(trainer.model, trainer.optimizer, trainer.processing_class, trainer)
        self.seconds = time.perf_counter() - self.started

    def _frame_of_trainer(self) -> FrameType:
        """Return the frame of the trainer that calls this callback: only it knows the dataset with the label."""
        frame: Any = sys._getframe()
        while frame is not None:
            if self in getattr(getattr(frame.f_locals.get("self"), "callback_handler", None), "callbacks", ()):
                return frame  # type: ignore[no-any-return]
            frame = frame.f_back
        raise SettingsError("expected to be called by a Trainer; for other loops use begin, step and end")

    def _index(self, trainer: Any) -> dict[int, tuple[Values, float]]:
        """Return labels and reference of each row that the trainer will pass to the model, by its hash."""
        references = None
        if self.rows is not None:
            if not hasattr(trainer, "_prepare_dataset"):
                raise SettingsError(f"rows: {type(trainer).__name__} does not pack; remove rows")
            args, length = copy.copy(trainer.args), trainer.args.max_length or sys.maxsize
            args.max_length = None
            data = trainer._prepare_dataset(self.rows, trainer.processing_class, args, False, None, "monitor")
            lines = ((ids, range(0, len(ids), length)) for ids in data["input_ids"])
            keys = ([batches.hash_ids(ids[start : start + length]) for start in starts] for ids, starts in lines)
        elif not hasattr(trainer.train_dataset, "__len__"):
            raise SettingsError("label: the training dataset is a stream; pass its rows: Monitor(label, rows=dataset)")
        else:
            data, loader = trainer.train_dataset, trainer.callback_handler.train_dataloader
            parts = (batches.segments(loader.collate_fn([row])) for row in loader.dataset)  # same rows without labels
            keys = ([batches.hash_ids(*(part.ids for part in sides))] for sides in parts)
            if getattr(trainer, "precompute_ref_logps", False):
                references = np.subtract(*(data[f"ref_{side}_logps"][:] for side in ("chosen", "rejected")))
        known = getattr(data, "column_names", None) or list(data[0])
        columns = [label for label in self.labels if not callable(label)]
        if missing := [column for column in columns if column not in known]:
            raise SettingsError(
                f"label: the training dataset has no column {missing[0]!r}, got {', '.join(known)}; packing drops all "
                "columns, so pass the dataset before it: Monitor(label, rows=dataset)"
            )
        if len(columns) == len(self.labels) and hasattr(data, "select_columns"):
            data = data.select_columns(columns)  # others are not decoded
        row_of, n_ambiguous, n_without = dict[int, tuple[Values, float]](), 0, 0
        for k, (row_keys, line) in enumerate(zip(keys, data, strict=True)):
            labels = (label(line) if callable(label) else line[label] for label in self.labels)
            values = tuple(batches.UNLABELLED if label is None else str(label) for label in labels)
            row = values, 0.0 if references is None else float(references[k])
            n_ambiguous += sum(row_of.setdefault(key, row)[0] != values for key in row_keys)
            n_without += batches.UNLABELLED in values
        if n_ambiguous:
            self._note(f"{n_ambiguous:,} rows have the tokens of a row with other labels, which count")
        if n_without:
            self._note(f"{n_without:,} rows lack a label and are listed as {batches.UNLABELLED}")
        return row_of

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the effects, if it is time to."""
        self.n_steps = state.global_step
        norm = self._frame_of_trainer().f_locals.get("grad_norm")
        if norm is not None and args.max_grad_norm:
            self.clips.append(min(1.0, args.max_grad_norm / max(float(norm), 1e-12)))
        self._end_step(state.max_steps - state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add losses and effects to the logs of the training, before other callbacks receive them."""
        if logs is not None and "loss" in logs:
            self._log(logs, self._gather_sums())

    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the table with each checkpoint."""
        self.record.write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure a last time, store the table, and print the summary."""
        self.end()

    # ----------------------------------------------------------------------------------------------- any training loop

    @guarded
    def begin(self, model: nn.Module, tokenizer: Any = None, optimizer: Any = None) -> None:
        """Attach to a model that a loop of your own trains.

        Args:
            model: causal LM of transformers, called with `input_ids`, and with `labels` unless `step` receives them.
            tokenizer: its tokenizer, for targets.
            optimizer: its optimizer, for targets.
        """
        self._start(0, self.out)
        model = getattr(model, "module", model)  # of DistributedDataParallel
        self._hook(model)
        self._prepare_effects(model, optimizer, tokenizer)

    def step(self, batch: Mapping[str, Any], loss: Any = None) -> None:
        """Record one step of the optimizer, after it.

        Args:
            batch: what the model received, and the labels: a list of values, one per row, by the name of the label.
            loss: loss of the step, which is not needed.
        """
        self.n_steps += 1
        self._record_step(batch)
        if self.n_steps % LOGGED_STEPS == 0:
            self._log({}, self._gather_sums())

    @guarded
    def _record_step(self, batch: Mapping[str, Any]) -> None:
        values = list(zip(*(map(str, batch.get(name, ())) for name in self.names), strict=True))
        parts = [part for inputs, outputs in self.pending for part in batches.segments({**batch, **inputs}, outputs)]
        self.pending.clear()
        if len(parts) != len(values):
            raise SettingsError(
                f"label: got {len(values)} values of {self.names[0]!r} for {len(parts)} rows in training mode since "
                "the last `step`; expected one per row in the batch"
            )
        for part, row_values in zip(parts, values, strict=True):
            self._count((part,), row_values)
        self._end_step()

    def end(self) -> Result | None:
        """Measure a last time, store the table, and print and return the summary; None if the monitor is off."""
        return self._finish(self._gather_sums())

    @guarded
    def _finish(self, sums: Sums) -> Result:
        self._log({}, sums)
        is_outdated = self.last is not None and self.record.last_step("effect") < self.n_steps
        if is_outdated and (self.every or self._is_affordable()):
            self._measure()
        if self.effects is not None and self.last is None:
            self._note("effects were not measured, since 5 % of so short a training do not suffice; pass every=N")
        self._remove_hooks()
        spent = time.perf_counter() - self.started
        self.record.notes.append(f"monitoring took {self.seconds:.1f} s of {spent:.1f} s ({self.seconds / spent:.1%})")
        self.record.write()
        summary = summarise(self.record)
        if self.is_main:
            print(summary, flush=True)  # noqa: T201
        return summary

    # ----------------------------------------------------------------------------------------------- losses and effects

    def _hook(self, model: nn.Module) -> None:
        self.hooks.append(model.register_forward_hook(self._after_forward, with_kwargs=True))

    def _remove_hooks(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    @guarded
    def _after_forward(self, module: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """Read a forward pass of the training; measurements and evaluations are in eval mode."""
        is_reference = self.awaits_reference and not (module.training and torch.is_grad_enabled())
        if not (module.training or (is_reference and self.pending)):
            return
        started = time.perf_counter()
        inputs = inputs if "input_ids" in inputs or not args else {**inputs, "input_ids": args[0]}
        if self.row_of is None:
            self.pending.append((inputs, outputs))  # until `step` receives the labels
            return
        parts = batches.segments(inputs, outputs)
        n_rows = len(parts) // (1 if self.beta is None else 2)  # chosen sides of pairs come first
        rows = [tuple(parts[k::n_rows]) for k in range(n_rows)]
        if self.awaits_reference and not is_reference:
            self.pending = rows
        else:
            for row, sides in zip(self.pending if is_reference else rows, rows, strict=True):
                key = batches.hash_ids(*(part.ids for part in row))
                values, reference = self.row_of.get(key, ((batches.UNLABELLED,) * len(self.names), 0.0))
                self._count(row, values, sides[1].loss - sides[0].loss if is_reference else reference)
            self.pending = []
        self.seconds += time.perf_counter() - started

    def _count(self, row: Row, values: Values, reference: float = 0.0) -> None:
        """Add a row or a preference pair to the sums by its labels, and store it for effects."""
        self.n_read += sum(len(part.ids) for part in row)
        if tokens := int(row[0].has_loss.sum()):
            margin = self.beta * (row[1].loss - row[0].loss - reference) if self.beta else 0.0
            numbers = np.array([1.0, tokens, row[0].loss, float(np.logaddexp(0.0, -margin)), margin])
            for key in zip(map(self.record.suffix, self.names), values, strict=True):
                self.sums[key] = self.sums.get(key, np.zeros(5)) + numbers
            self.weights[values[0]] += 1 if self.beta else tokens
            self.recent[values[0]].append((tuple(map(clip_window, row)), reference))

    def _gather_sums(self) -> Sums:
        """Return the sums since the last log over all processes; every process calls this, also if it is off."""
        sums, self.sums = ({} if self.is_off else self.sums), {}
        if not distributed.is_initialized():
            return sums
        parts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, sums)
        keys = {key for part in parts for key in part}
        return {key: np.sum([part[key] for part in parts if key in part], axis=0) for key in keys}

    @guarded
    def _log(self, logs: dict[str, float], sums: Sums) -> None:
        """Record the losses since the last log, and add them and new effects to the logs."""
        for (suffix, value), (rows, tokens, loss, pair_loss, margin) in sorted(sums.items()):
            means = {"loss": loss / tokens}
            if self.beta is not None:
                means |= {"dpo_loss": pair_loss / rows, "margin": margin / rows}
            for measure, mean in means.items():
                self.record.add(self.n_steps, measure + suffix, mean, source=value, rows=rows, tokens=tokens)
                if np.isfinite(mean):
                    logs[f"monitor/{measure}{suffix}/{value}"] = float(mean)
        logs.update(self.new_logs)
        self.new_logs.clear()
        if all(row["value"] is None for row in self.record.rows if row["measure"] == "loss"):
            self._note(
                "losses are off: the model received no labels, or returned neither logits nor log_probs "
                "(label_smoothing_factor, compute_loss_func, or a fused loss such as use_liger_kernel)"
            )

    def _prepare_effects(self, model: nn.Module, optimizer: Any, tokenizer: Any, trainer: Any = None) -> None:
        """Load the targets; if effects cannot be measured, say why, and show losses only."""
        if not self.targets or not self.is_main:
            return
        try:
            is_divided = any(isinstance(parameter, DTensor) for parameter in model.parameters())
            if is_divided or any(getattr(trainer, f"is_{name}_enabled", False) for name in ("fsdp", "deepspeed")):
                raise ModelError("FSDP and DeepSpeed divide parameters among processes; use DDP or a single process")
            if self.beta is not None and (trainer.loss_types, trainer.f_divergence_type) != (["sigmoid"], "reverse_kl"):
                raise ModelError(f"got the DPO loss {'+'.join(trainer.loss_types)}; expected sigmoid with reverse_kl")
            if tokenizer is None or optimizer is None:
                raise ModelError("targets need the tokenizer and the optimizer; pass processing_class to the trainer")
            config: Any = model.config
            questions = load_questions(self.targets, tokenizer, config.get_text_config().vocab_size)
            self.effects = Effects(model, optimizer, questions, self.beta)
            self.rate = self.effects.relative_rate()  # of the next step
        except GraspError as err:
            if self.strict:
                raise
            self._note(f"effects are off: {err}")

    def _end_step(self, n_left: int = 0) -> None:
        """Count a step of the optimizer, and measure after it if it is time to."""
        self.n_timed += 1
        if self.effects is not None:
            self.rates += self.rate
            self.rate = self.effects.relative_rate()
            is_late = self.n_steps >= FIRST_STEP
            if self.n_steps % self.every == 0 if self.every else is_late and self._is_affordable(n_left):
                self._measure()

    def _is_affordable(self, n_left: int = 0) -> bool:
        """Return whether a measurement keeps the share of time; the first one, that of the steps that are left too."""
        elapsed = time.perf_counter() - self.started
        if self.effects is None or not self.n_read:
            return False
        if self.last is None:
            rows = [row for rows in (*self.effects.targets.values(), *self.recent.values()) for row, _ in rows]
            self.cost = elapsed * sum(len(part.ids) for row in rows for part in row) / self.n_read
            elapsed *= 1 + n_left / self.n_timed
        return self.seconds + self.cost <= SHARE_OF_TIME * elapsed

    def _measure(self) -> None:
        """Measure effects and losses of targets, and what the effects before predicted for these losses."""
        assert self.effects is not None
        started, step, sources = time.perf_counter(), self.n_steps, sorted(self.recent)
        now = self.effects.measure([list(self.recent[source]) for source in sources], float(np.mean(self.clips or 1.0)))
        for t, target in enumerate(self.effects.targets):
            if self.last is not None:
                before = self.last[1]
                steps_S = self.rates / max(1, self.weights.total()) * np.array([self.weights[s] for s in self.last[0]])
                half_width_S = np.where(steps_S > 0, before.half_width_TS[t], 0.0)  # unknown ones are infinite
                half_width = float(np.linalg.norm(steps_S * half_width_S))
                self.record.add(step, "predicted", float(steps_S @ before.effect_TS[t]), half_width, target=target)
                self.record.add(step, "measured", now.loss_T[t] - before.loss_T[t], target=target)
            for s, source in enumerate(sources):
                effect, half_width = float(now.effect_TS[t, s]), float(now.half_width_TS[t, s])
                self.record.add(step, "effect", effect, half_width, source=source, target=target)
                self.new_logs[f"monitor/effect/{target}/{source}"] = effect
            self.record.add(step, "target_loss", now.loss_T[t], target=target)
        self.last, self.rates = (sources, now), 0.0
        self.weights.clear()
        self.record.write()
        self.cost = time.perf_counter() - started
        self.seconds += self.cost

    def _note(self, text: str) -> None:
        """Print a note once, and store it."""
        if text not in self.record.notes:
            self.record.notes.append(text)
            if self.is_main:
                print(f"monitor: {text}", flush=True)  # noqa: T201 - a trainer prints its logs too
