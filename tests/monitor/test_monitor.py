"""The callback in real trainings of transformers and TRL: twelve steps each."""

import os
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional as F
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import grasp
from grasp.monitor.record import MonitorRecord
from tests.monitor import world

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers
os.environ.setdefault("TQDM_DISABLE", "1")
SETTINGS = {
    "max_steps": 12,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
    "dataloader_pin_memory": False,
}


def sft(out, monitor, data=None, model=None, **changes):
    lora = changes.pop("peft_config", None)
    config = SFTConfig(output_dir=str(out), **(SETTINGS | {"max_length": 32, "bf16": False} | changes))
    return SFTTrainer(
        model=model or world.model(),
        args=config,
        train_dataset=data if data is not None else world.dataset("text", "source", "length"),
        processing_class=world.tokenizer(),
        callbacks=[monitor] if monitor else [],
        peft_config=lora,
    )


def evaluated_loss(model, label="source", n=48):
    """Return the mean loss per token of each value of a label, by another forward pass row by row."""
    tokenizer, losses = world.tokenizer(), defaultdict(list)
    model.eval()
    for row in world.rows(n):
        ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        losses[row[label]] += F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
    return {source: np.mean(values) for source, values in losses.items()}


def recorded_loss(record, measure="loss"):
    """Return tokens and mean loss over all steps, by source or another label."""
    values = {}
    for row in record.select(measure):
        tokens, total = values.get(row["source"], (0.0, 0.0))
        values[row["source"]] = tokens + row["tokens"], total + row["tokens"] * row["value"]
    return {source: (tokens, total / tokens) for source, (tokens, total) in values.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": True},
        {"packing": True, "packing_strategy": "bfd_split", "max_length": 10},
        {"padding_free": True, "max_length": None},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])},
        {"gradient_checkpointing": True},
        {"stream": True},
    ],
    ids=["plain", "packed", "split", "padding-free", "accumulated", "lora", "checkpointing", "stream"],
)
def test_losses_of_sft_by_label_are_those_of_an_evaluation_of_the_same_rows(tmp_path, changes):
    """With learning rate 0, an epoch of the training has the losses of an evaluation pass, to rounding."""
    data = world.dataset("text", "source", "length")
    is_stream = changes.get("stream")
    rows = data if is_stream or changes.get("packing") else None  # whose other columns the trainer drops
    monitor = grasp.Monitor(["source", "length"], rows=rows, strict=True)
    epoch = {"num_train_epochs": 1, "max_steps": 12 if is_stream else -1}
    changes = {name: value for name, value in changes.items() if name != "stream"} | {"learning_rate": 0.0} | epoch
    model = world.model()
    trainer = sft(tmp_path, monitor, data.to_iterable_dataset() if is_stream else data, model, **changes)
    trainer.train()
    for label, measure, values in (("source", "loss", world.SOURCES), ("length", "loss/length", ("short", "long"))):
        losses = recorded_loss(MonitorRecord.read(tmp_path), measure)
        assert set(losses) == set(values)
        if not changes.get("packing"):  # without kernels for packing, rows see those before them
            expected = evaluated_loss(model, label)
            assert {value: loss for value, (_, loss) in losses.items()} == pytest.approx(expected, abs=2e-6)


def test_a_trainer_of_transformers_with_its_own_columns(tmp_path, capsys):
    tokenizer = world.tokenizer()
    data = world.dataset("text", "source").map(lambda row: tokenizer(row["text"] + " </s>"), remove_columns="text")
    data = data.map(lambda row: {"labels": row["input_ids"]})
    model = world.model()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path), **(SETTINGS | {"learning_rate": 0.0, "num_train_epochs": 1, "max_steps": -1})
        ),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[grasp.Monitor(lambda row: row["source"].upper(), strict=True)],
    )
    trainer.train()
    losses, expected = recorded_loss(MonitorRecord.read(tmp_path)), evaluated_loss(model)
    for source, loss in expected.items():
        assert losses[source.upper()][1] == pytest.approx(loss, abs=2e-6)
    assert "loss by source" in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["model", "lora", "precomputed"])
def test_dpo_shows_losses_and_margins(tmp_path, reference):
    exam = world.write_exam(tmp_path / "exam.jsonl")
    monitor = grasp.Monitor("source", exam, every=4, strict=True)
    config = DPOConfig(
        output_dir=str(tmp_path),
        max_length=32,
        precompute_ref_log_probs=reference == "precomputed",
        **(SETTINGS | {"bf16": False, "gradient_checkpointing": False}),
    )
    trainer = DPOTrainer(
        model=world.model(),
        ref_model=world.model(seed=1) if reference != "lora" else None,
        args=config,
        train_dataset=world.dataset("prompt", "chosen", "rejected", "source"),
        processing_class=world.tokenizer(),
        callbacks=[monitor],
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if reference == "lora" else None,
    )
    trainer.train()
    record = MonitorRecord.read(tmp_path)
    # the mean over sources of each step is what the trainer logs
    for logs in trainer.state.log_history[:12]:
        for measure, name in (("margin", "rewards/margins"), ("dpo_loss", "loss")):
            lines = [row for row in record.select(measure) if row["step"] == logs["step"]]
            assert sum(row["rows"] for row in lines) == 4
            assert sum(row["rows"] * row["value"] for row in lines) / 4 == pytest.approx(logs[name], abs=2e-6)
    assert len(record.select("effect")) == 3 * 3
    assert {row["step"] for row in record.select("effect")} == {4, 8, 12}


def test_weights_and_random_numbers_are_those_of_a_training_without_monitor(tmp_path):
    exam = world.write_exam(tmp_path / "exam.jsonl")
    weights, draws = [], []
    for k, monitor in enumerate((None, grasp.Monitor("source", exam, every=2, strict=True))):
        model = world.model(dropout=0.1)
        sft(tmp_path / str(k), monitor, model=model).train()
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        draws.append(torch.rand(1))
    assert torch.equal(*weights)
    assert torch.equal(*draws)


def test_effects_are_logged_printed_and_stored(tmp_path, capsys):
    exam = world.write_exam(tmp_path / "exam.jsonl")
    monitor = grasp.Monitor("source", exam, every=10, strict=True)
    trainer = sft(tmp_path, monitor, max_steps=60, num_train_epochs=5)
    seen = {}

    class Logs(type(monitor).__mro__[1]):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.update(logs)

    trainer.add_callback(Logs())
    trainer.train()
    output = capsys.readouterr().out
    assert "exam" in output
    assert {"monitor/loss/exam", "monitor/effect/exam/noise"} <= set(seen)
    record = MonitorRecord.read(tmp_path)
    effects = {row["source"]: row for row in record.select("effect") if row["step"] == 20}
    assert effects["exam"]["high"] < 0  # helps
    assert effects["exam"]["value"] < min(effects["noise"]["value"], effects["letters"]["value"])
    assert (tmp_path / "monitor" / "mixture.yaml").exists() == ("mixture for the rest" in output)
    steps = [row["step"] for row in record.select("target_loss")]
    assert steps == [10, 20, 30, 40, 50, 60]
    changes = [b["value"] - a["value"] for a, b in pairwise(record.select("target_loss"))]
    np.testing.assert_allclose([row["value"] for row in record.select("measured")], changes, atol=1e-9)
    predicted = sum(row["value"] for row in record.select("predicted"))
    assert 0.4 < predicted / sum(changes) < 2.5


def test_a_training_goes_on_from_its_checkpoint_with_the_rows_before_it(tmp_path):
    exam = world.write_exam(tmp_path / "exam.jsonl")
    for checkpoint in (None, True):
        monitor = grasp.Monitor("source", exam, every=2, strict=True)
        trainer = sft(
            tmp_path / "out", monitor, save_strategy="steps", save_steps=5, max_steps=7 if not checkpoint else 12
        )
        if checkpoint:
            assert MonitorRecord.read(tmp_path / "out").last_step("loss") == 7
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5") if checkpoint else None)
    record = MonitorRecord.read(tmp_path / "out")
    assert sorted({row["step"] for row in record.select("loss")}) == list(range(1, 13))
    assert [row["step"] for row in record.select("target_loss")] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in record.select("measured")] == [4, 8, 10, 12]  # not over the gap at the checkpoint


def test_an_exception_stops_the_monitor_and_not_the_training(tmp_path, capsys, monkeypatch):
    exam = world.write_exam(tmp_path / "exam.jsonl")
    monkeypatch.setattr("grasp.monitor.effects.interval_of_mean", lambda *_: 1 / 0)
    trainer = sft(tmp_path, grasp.Monitor("source", exam, every=2))
    trainer.train()
    assert trainer.state.global_step == 12
    assert (
        "monitor: off from step 2: ZeroDivisionError: division by zero; the training goes on\n"
        in capsys.readouterr().out
    )
    assert all(module.training for module in trainer.model.modules())
    with pytest.raises(ZeroDivisionError):
        sft(tmp_path, grasp.Monitor("source", exam, every=2, strict=True)).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "topic"}, "label: the training dataset has no column 'topic', got"),
        ({"targets": "absent.jsonl"}, "effects are off: targets.names: absent.jsonl"),
        ({"packing": True}, "packing drops all columns, so pass the dataset before it: Monitor(label, rows=dataset)"),
        ({"optim": "adafactor", "targets": "exam.jsonl"}, "effects are off: the optimizer Adafactor has an unknown"),
    ],
)
def test_bad_input_is_one_line_and_the_training_goes_on(tmp_path, capsys, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    world.write_exam(tmp_path / "exam.jsonl")
    monitor = grasp.Monitor(changes.pop("label", "source"), changes.pop("targets", ()))
    trainer = sft(tmp_path, monitor, **changes)
    trainer.train()
    assert trainer.state.global_step == 12
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("monitor: ")]
    assert message in lines[0]


def test_a_loop_of_its_own(tmp_path, capsys):
    exam, tokenizer, model = world.write_exam(tmp_path / "exam.jsonl"), world.tokenizer(), world.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    monitor = grasp.Monitor(["source", "length"], exam, every=5, out=tmp_path / "seen", strict=True)
    monitor.begin(model, tokenizer, optimizer)
    model.train()
    for k in range(20):
        rows = world.rows()[4 * (k % 12) : 4 * (k % 12) + 4]
        batch = dict(tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True))
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        batch |= {label: [row[label] for row in rows] for label in ("source", "length")}
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(batch, loss)
        if k == 9:
            assert not monitor.sums  # logged just now
    summary = monitor.end()
    assert "effect of one more step" in repr(summary)
    assert "loss by length" in repr(summary)
    assert len(MonitorRecord.read(tmp_path / "seen").select("target_loss")) == 4
    assert repr(summary) in capsys.readouterr().out


def test_losses_are_those_of_tokens_with_loss_in_bfloat16(tmp_path):
    """Prompts have no loss; autocast keeps the losses near those in float32."""
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "source": row["source"]} for row in world.rows()]
    trainer = sft(
        tmp_path,
        grasp.Monitor("source", strict=True),
        Dataset.from_list(rows),
        **{"bf16": True, "max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0},
    )
    trainer.train()
    losses = recorded_loss(MonitorRecord.read(tmp_path))
    for source in world.SOURCES:
        words = [row["completion"].split() for row in rows if row["source"] == source]
        assert losses[source][0] == sum(len(completion) + 1 for completion in words)  # and the end of the text
        assert losses[source][1] == pytest.approx(np.log(63), abs=0.1)


def test_effects_are_refused_where_parameters_are_divided(capsys):
    monitor = grasp.Monitor("source", "exam.jsonl")
    monitor._prepare_effects(world.model(), None, None, SimpleNamespace(is_fsdp_enabled=True))
    assert monitor.effects is None
    assert "effects are off: FSDP and DeepSpeed divide parameters among processes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_model_has_the_losses_of_an_evaluation(tmp_path):
    model = world.model()
    changes = {"torch_compile": True, "learning_rate": 0.0, "num_train_epochs": 1, "max_steps": -1}
    sft(tmp_path, grasp.Monitor("source", strict=True), model=model, **changes).train()
    expected = evaluated_loss(world.model())
    for source, (_, loss) in recorded_loss(MonitorRecord.read(tmp_path)).items():
        assert loss == pytest.approx(expected[source], abs=1e-5)


def test_rows_that_occur_in_two_sources_are_counted(tmp_path, capsys):
    rows = [{"text": "w1 w2 w3", "source": source} for source in "aba"] + [{"text": "w4 w5", "source": None}]
    sft(tmp_path, grasp.Monitor("source", strict=True), Dataset.from_list(rows), max_steps=1).train()
    printed = capsys.readouterr().out
    assert "monitor: 1 rows have the tokens of a row with other labels, which count\n" in printed
    assert "monitor: 1 rows lack a label and are listed as (unlabelled)\n" in printed
    assert {row["source"] for row in MonitorRecord.read(tmp_path).select("loss")} == {"a", "(unlabelled)"}
