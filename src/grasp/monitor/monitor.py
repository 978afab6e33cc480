"""Watch a training: a callback for the trainers of transformers and TRL, and three calls for other loops.

    monitor = grasp.Monitor("source", targets=["exam.jsonl", "sciq"])
    SFTTrainer(..., callbacks=[monitor])            # or monitor.begin(...), monitor.step(batch), monitor.end()

Losses by label are those of the training's own forward pass, which a hook reads. Effects of a step on each source on
the targets (`grasp.monitor.effects`) are measured between steps. Their sum over the steps predicts the change of the
targets' losses until the next measurement, which is measured too. An exception switches the monitor off, not the
training. Start with `Monitor`.
"""

import copy
import functools
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed, nn
from transformers import TrainerCallback

from grasp.arrays import F64
from grasp.errors import GraspError, ModelError, SettingsError
from grasp.monitor.batches import RowLabels, Segment, hash_ids, labels_of_rows, segments
from grasp.monitor.effects import ROWS, Effects, LabelledRow, Measurement, clip_window, load_questions
from grasp.monitor.record import Record, Summary

SHARE_OF_TIME = 0.05  # of the training that measurements take by default
FIRST_STEP = 10  # of a measurement by default: Adam's second moments are means of this many steps
LOGGED_STEPS = 10  # of losses in a loop of your own; a trainer logs every `logging_steps`
CLIP_DECAY = 0.9  # of the moving average of the factor of gradient clipping
UNLABELLED = "(unlabelled)"  # tokens of segments that are no row of the dataset

Sums = dict[tuple[str, str], F64]  # by label and value: rows or pairs, tokens, loss, loss of pairs, margin
Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Switch the monitor off, with one line, if a method raises an exception; with `strict`, raise it."""

    @functools.wraps(method)
    def run(self: "Monitor", *args: Any, **kwargs: Any) -> Any:
        if self.is_off:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as err:  # whatever it is, the training goes on
            if self.strict:
                raise
            self.is_off = True
            self._remove_hooks()
            reason = str(err) if isinstance(err, GraspError) else f"{type(err).__name__}: {err}"
            self._print(f"monitor: off from step {self.n_steps}: {' '.join(reason.split())}; the training goes on")
            return None

    return run  # type: ignore[return-value]


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Add sums of several processes."""
    total: Sums = defaultdict(lambda: np.zeros(5))
    for part in parts:
        for key, values in part.items():
            total[key] = total[key] + values
    return dict(total)


class Monitor(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Show while a model is trained which source is learned, and which helps or hurts each target.

    Args:
        label: column of the training dataset, or function of a row, that names the source of each row; several for
            losses by each of them, of which the first is that of effects.
        targets: files of questions or names of benchmarks, as for `grasp build`. Default: losses only.
        every: steps between measurements of effects. Default: so that they take at most 5 % of the training's time.
        rows: the dataset before packing, which drops all other columns. Default: that of the trainer.
        out: directory of the stored table. Default: `monitor` in the trainer's output directory.
        strict: whether an exception stops the training, instead of the monitor.
    """

    def __init__(
        self,
        label: str | Callable[[Any], Any] | Sequence[Any],
        targets: str | Path | Sequence[str | Path] = (),
        *,
        every: int | None = None,
        rows: Any = None,
        out: Path | str | None = None,
        strict: bool = False,
    ) -> None:
        self.labels: tuple[Any, ...] = (label,) if isinstance(label, str) or callable(label) else tuple(label)
        self.names = tuple(name if isinstance(name, str) else f"label-{k + 1}" for k, name in enumerate(self.labels))
        self.targets = (str(targets),) if isinstance(targets, str | Path) else tuple(map(str, targets))
        if not self.labels or (every is not None and every < 1):
            raise SettingsError(f"label, every: got {label!r} and {every}, expected a label and a number of steps > 0")
        self.every, self.rows, self.strict = every, rows, strict
        self.out = None if out is None else Path(out)
        self.is_off, self.n_steps, self.is_main = False, 0, True
        self.row_labels: RowLabels | None = None
        self.record, self.hooks = Record(self.names), list[Any]()
        self.beta: float | None = None
        self._restart()

    def _restart(self) -> None:
        self.effects: Effects | None = None
        self.recent: dict[str, deque[LabelledRow]] = defaultdict(lambda: deque(maxlen=ROWS))
        self.sums: Sums = {}  # since the last log
        self.weights: dict[str, float] = defaultdict(float)  # of each source in this step: tokens, or pairs
        self.steps_on: dict[str, float] = defaultdict(float)  # since the last measurement, weighted by learning rate
        self.last: Measurement | None = None
        self.measured: list[str] = []  # sources of the last measurement
        self.new_logs: dict[str, float] = {}
        self.pending: list[Any] = []  # forward passes that await a reference, or their batch
        self.clip, self.rate = 1.0, 1.0
        self.started, self.seconds, self.cost = time.perf_counter(), 0.0, 0.0  # the cost is that of a measurement
        self.n_timed, self.n_read = 0, 0  # steps and tokens since the start

    # ------------------------------------------------------------------------------------------- transformers and TRL

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Index the labels of the dataset, load the targets, and attach to the model."""
        self._remove_hooks()
        self._restart()
        trainer, _ = self._calling_trainer()
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]  # logs first
        self.n_steps, self.is_main = state.global_step, state.is_world_process_zero
        self.record = Record(self.names, (self.out or Path(args.output_dir) / "monitor") if self.is_main else None)
        if state.global_step:
            self.record.resume(state.global_step)
        self.row_labels = self._index(trainer)
        if self.row_labels.ambiguous:
            self._note(f"{len(self.row_labels.ambiguous):,} rows are also rows of another source, which counts")
        if hasattr(trainer, "beta") and hasattr(trainer, "loss_types"):  # DPOTrainer
            self.beta = float(trainer.beta)
            if getattr(trainer, "ref_model", None) is not None:
                self._hook(trainer.ref_model)
        # The inner model, which also computes references of DPO; hooks of a compiled model would be traced.
        self._hook(trainer.model_wrapped if hasattr(trainer.model_wrapped, "_orig_mod") else trainer.model)
        self._prepare_effects(trainer.model, trainer.optimizer, trainer.processing_class, trainer)
        self.seconds = time.perf_counter() - self.started

    def _calling_trainer(self) -> tuple[Any, Mapping[str, Any]]:
        """Return the trainer that calls this callback, and the variables of its calling method.

        Callbacks do not receive the trainer, which is the only one to know the dataset with the label.
        """
        frame = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if self in getattr(getattr(caller, "callback_handler", None), "callbacks", ()):
                return caller, frame.f_locals
            frame = frame.f_back  # type: ignore[assignment]
        raise SettingsError("expected to be called by a Trainer; for other loops use begin, step and end")

    def _index(self, trainer: Any) -> RowLabels:
        """Return the labels of the rows that the trainer will pass to the model."""
        row_labels = RowLabels()
        if self.rows is not None:
            if not hasattr(trainer, "_prepare_dataset"):
                raise SettingsError(f"rows: {type(trainer).__name__} does not pack; remove rows")
            args = copy.copy(trainer.args)
            args.max_length = None
            prepared = trainer._prepare_dataset(self.rows, trainer.processing_class, args, False, None, "monitor")
            row_labels.add_pieces(prepared["input_ids"], labels_of_rows(prepared, self.labels), trainer.args.max_length)
        elif not hasattr(trainer.train_dataset, "__len__"):
            raise SettingsError("label: the training dataset is a stream; pass its rows: Monitor(label, rows=dataset)")
        else:
            loader = trainer.callback_handler.train_dataloader  # its rows have lost the label, not their order
            row_labels.add_dataset(
                loader.dataset, labels_of_rows(trainer.train_dataset, self.labels), loader.collate_fn
            )
        return row_labels

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the learning rate of the step."""
        group = kwargs["optimizer"].param_groups[0]
        self.rate = float(group["lr"]) / float(group.get("initial_lr", group["lr"]) or 1.0)

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the effects, if it is time to."""
        norm = self._calling_trainer()[1].get("grad_norm")
        if norm is not None and args.max_grad_norm:
            factor = min(1.0, args.max_grad_norm / max(float(norm), 1e-12))
            self.clip = factor if state.global_step == 1 else CLIP_DECAY * self.clip + (1 - CLIP_DECAY) * factor
        self._end_step(state.global_step, state.max_steps)

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
        self._remove_hooks()
        self._restart()
        self.n_steps, self.row_labels, self.record = 0, None, Record(self.names, self.out)
        self._hook(model)
        self._prepare_effects(model, optimizer, tokenizer)

    @guarded
    def step(self, batch: Mapping[str, Any], loss: Any = None) -> None:
        """Record one step of the optimizer, after it.

        Args:
            batch: what the model received, and the labels: a list of values, one per row, by the name of the label.
            loss: loss of the step, which is not needed.
        """
        columns = []
        for name in self.names:
            if name not in batch:
                raise SettingsError(f"label: the batch has no {name!r}, got {', '.join(batch)}")
            columns.append([str(value) for value in batch[name]])
        parts = [part for inputs, outputs in self.pending for part in segments({**batch, **inputs}, outputs)]
        self.pending.clear()
        if len(parts) != len(columns[0]):
            raise SettingsError(
                f"label: got {len(columns[0])} labels for {len(parts)} rows in training mode since `step`"
            )
        for part, labels in zip(parts, zip(*columns, strict=True), strict=True):
            self._count(part, labels)
        self._end_step(self.n_steps + 1)
        if self.n_steps % LOGGED_STEPS == 0:
            self._log({}, self._gather_sums())

    def end(self) -> Summary | None:
        """Measure a last time, store the table, and print and return the summary; None if the monitor is off."""
        return self._finish(self._gather_sums())

    @guarded
    def _finish(self, sums: Sums) -> Summary:
        self._log({}, sums)
        is_outdated = self.last is not None and self.record.last_step("effect") < self.n_steps
        if is_outdated and (self.every or self._is_affordable(None)):
            self._measure()
        if not self.record.select("loss"):
            self._note("losses are off: the model received no labels (label_smoothing_factor or compute_loss_func)")
        if self.effects is not None and self.last is None:
            self._note("effects were not measured, since 5 % of so short a training do not suffice; pass every=N")
        self._remove_hooks()
        spent = time.perf_counter() - self.started
        self.record.notes.append(f"monitoring took {self.seconds:.1f} s of {spent:.1f} s ({self.seconds / spent:.1%})")
        self.record.write()
        summary = Summary.of(self.record)
        self._print(repr(summary))
        return summary

    # ----------------------------------------------------------------------------------------------- losses and effects

    def _hook(self, model: nn.Module) -> None:
        self.hooks.append(model.register_forward_hook(self._after_forward, with_kwargs=True))

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    @guarded
    def _after_forward(self, module: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """Read a forward pass of the training; measurements and evaluations are in eval mode."""
        is_reference = self.beta is not None and not (module.training and torch.is_grad_enabled())
        if not (module.training or (is_reference and self.pending)):
            return
        started = time.perf_counter()
        inputs = inputs if "input_ids" in inputs or not args else {**inputs, "input_ids": args[0]}
        if self.row_labels is None:
            self.pending.append((inputs, outputs))  # until `step` receives the labels
            return
        parts = segments(inputs, outputs)
        if any(part.losses is None for part in parts):
            self._note(
                "losses are off: the forward pass returns neither logits nor log_probs (a fused loss such as "
                "use_liger_kernel=True)"
            )
        if self.beta is None:
            for part in parts:
                self._count(part, self.row_labels.labels_of.get(hash_ids(part.ids)))
        elif not (is_reference or self.row_labels.reference_of):
            self.pending = parts
        else:
            self._count_pairs(self.pending if is_reference else parts, parts if is_reference else None)
            self.pending = []
        self.seconds += time.perf_counter() - started

    def _count(self, part: Segment, labels: tuple[str, ...] | None) -> None:
        """Add a segment to the sums of its labels, and store it for effects."""
        labels = labels or (UNLABELLED,) * len(self.names)
        self.n_read += len(part.ids)
        if part.tokens:
            self._add(labels, [1.0, part.tokens, part.loss, 0.0, 0.0])
            self.weights[labels[0]] += part.tokens
            self.recent[labels[0]].append(((clip_window(part),), 0.0))

    def _count_pairs(self, policy: Sequence[Segment], reference: Sequence[Segment] | None) -> None:
        """Add preference pairs, of which chosen sides come first, to the sums of their labels."""
        assert self.row_labels is not None
        assert self.beta is not None
        n_pairs = len(policy) // 2
        for k, (chosen, rejected) in enumerate(zip(policy[:n_pairs], policy[n_pairs:], strict=True)):
            key = hash_ids(chosen.ids, rejected.ids)
            labels = self.row_labels.labels_of.get(key) or (UNLABELLED,) * len(self.names)
            if reference is None:
                of_reference = self.row_labels.reference_of.get(key, np.nan)
            else:
                of_reference = reference[n_pairs + k].loss - reference[k].loss
            margin = self.beta * (rejected.loss - chosen.loss - of_reference)
            self._add(labels, [1.0, chosen.tokens, chosen.loss, float(np.logaddexp(0.0, -margin)), margin])
            self.n_read += len(chosen.ids) + len(rejected.ids)
            self.weights[labels[0]] += 1.0
            self.recent[labels[0]].append(((clip_window(chosen), clip_window(rejected)), of_reference))

    def _add(self, labels: tuple[str, ...], values: Sequence[float]) -> None:
        for key in zip(self.names, labels, strict=True):
            self.sums[key] = self.sums.get(key, np.zeros(5)) + np.array(values)

    def _gather_sums(self) -> Sums:
        """Return the sums since the last log over all processes; every process calls this, also if it is off."""
        sums, self.sums = ({} if self.is_off else self.sums), {}
        if not (distributed.is_available() and distributed.is_initialized()):
            return sums
        parts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, sums)
        return merge_sums(parts)

    @guarded
    def _log(self, logs: dict[str, float], sums: Sums) -> None:
        """Record the losses since the last log, and add them and new effects to the logs."""
        for (name, value), (rows, tokens, loss, pair_loss, margin) in sorted(sums.items()):
            place = value if name == self.names[0] else f"{name}/{value}"
            means = {"loss": loss / tokens if tokens else np.nan}
            if self.beta is not None:
                means |= {"dpo_loss": pair_loss / rows, "margin": margin / rows}
            for measure, mean in means.items():
                fields = {"label": name, "source": value, "value": mean, "rows": rows, "tokens": tokens}
                self.record.add(self.n_steps, measure, **fields)
                if np.isfinite(mean):
                    logs[f"monitor/{measure}/{place}"] = float(mean)
        logs.update(self.new_logs)
        self.new_logs.clear()

    def _prepare_effects(self, model: nn.Module, optimizer: Any, tokenizer: Any, trainer: Any = None) -> None:
        """Load the targets; if effects cannot be measured, say why, and show losses only."""
        if not self.targets or not self.is_main:
            return
        fault = ""
        if any(getattr(trainer, f"is_{kind}_enabled", False) for kind in ("fsdp", "fsdp_xla", "deepspeed")):
            fault = "FSDP and DeepSpeed divide parameters among processes; use DDP or a single process"
        elif self.beta is not None and (trainer.loss_types != ["sigmoid"] or trainer.f_divergence_type != "reverse_kl"):
            fault = f"got the DPO loss {'+'.join(trainer.loss_types)}; expected sigmoid with reverse_kl"
        elif tokenizer is None or optimizer is None:
            fault = "targets need the tokenizer and the optimizer; pass processing_class to the trainer"
        try:
            if fault:
                raise ModelError(fault)
            config: Any = model.config
            vocab_size = config.get_text_config().vocab_size
            self.effects = Effects(model, optimizer, load_questions(self.targets, tokenizer, vocab_size), self.beta)
        except GraspError as err:
            if self.strict:
                raise
            self._note(f"effects are off: {err}")

    def _end_step(self, n_steps: int, max_steps: int | None = None) -> None:
        """Count a step of the optimizer, and measure after it if it is time to."""
        self.n_steps, self.n_timed = n_steps, self.n_timed + 1
        total = sum(self.weights.values())
        for source, weight in self.weights.items():
            self.steps_on[source] += self.rate * weight / total
        self.weights.clear()
        is_due = n_steps % self.every == 0 if self.every else n_steps >= FIRST_STEP and self._is_affordable(max_steps)
        if self.effects is not None and is_due:
            self._measure()

    def _is_affordable(self, max_steps: int | None) -> bool:
        """Return whether a measurement keeps the share of time; the first one, that of the whole training."""
        elapsed = time.perf_counter() - self.started
        if self.effects is None or not self.n_read:
            return False
        if self.last is not None:
            return self.seconds + self.cost <= SHARE_OF_TIME * elapsed
        rows = [row for rows in (*self.effects.targets.values(), *self.recent.values()) for row, _ in rows]
        self.cost = elapsed * sum(len(part.ids) for row in rows for part in row) / self.n_read
        n_steps = self.n_timed if max_steps is None else self.n_timed + max_steps - self.n_steps
        return self.seconds + self.cost <= SHARE_OF_TIME * elapsed * n_steps / self.n_timed

    def _measure(self) -> None:
        """Measure effects and losses of targets, and what the effects before predicted for these losses."""
        assert self.effects is not None
        started, step = time.perf_counter(), self.n_steps
        sources = sorted(self.recent)
        now = self.effects.measure([list(self.recent[source]) for source in sources], self.clip)
        steps_S = np.array([self.steps_on[source] for source in self.measured])
        for t, target in enumerate(self.effects.targets):
            if self.last is not None:
                predicted = float(np.nansum(steps_S * self.last.effect_TS[t]))
                half_width = float(np.linalg.norm(steps_S * (self.last.high_TS - self.last.effect_TS)[t]))
                bounds = {"value": predicted, "low": predicted - half_width, "high": predicted + half_width}
                self.record.add(step, "predicted", target=target, **bounds)
                self.record.add(step, "measured", target=target, value=now.loss_T[t] - self.last.loss_T[t])
            for s, source in enumerate(sources):
                bounds = {"value": now.effect_TS[t, s], "low": now.low_TS[t, s], "high": now.high_TS[t, s]}
                self.record.add(step, "effect", label=self.names[0], source=source, target=target, **bounds)
                self.new_logs[f"monitor/effect/{target}/{source}"] = float(now.effect_TS[t, s])
            self.record.add(step, "target_loss", target=target, value=now.loss_T[t])
        self.last, self.measured = now, sources
        self.steps_on.clear()
        self.record.write()
        self.cost = time.perf_counter() - started
        self.seconds += self.cost

    def _note(self, text: str) -> None:
        """Print a note once, and store it."""
        if text not in self.record.notes:
            self.record.notes.append(text)
            self._print(f"monitor: {text}")

    def _print(self, text: str) -> None:
        if self.is_main:
            print(text, flush=True)  # noqa: T201 - a trainer prints its logs too
