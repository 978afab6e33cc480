"""Two processes on the CPU: losses are those of one process, and effects are refused where parameters are divided."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard

import grasp
from grasp.monitor.record import MonitorRecord
from tests.monitor import world
from tests.monitor.test_monitor import evaluated_loss, recorded_loss, sft

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _train(rank: int, place: str, port: int) -> None:
    """Train one of two ranks: by a trainer, whose model is copied, and by a loop, whose parameters are divided."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TQDM_DISABLE": "1"}
    torch.set_num_threads(1)
    exam, tokenizer = f"{place}/exam.jsonl", world.tokenizer()
    epoch = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "ddp_backend": "gloo"}
    sft(f"{place}/copied", grasp.Monitor(["source", "length"], exam, every=6, strict=True), **epoch).train()

    model = world.model()
    fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)))
    monitor = grasp.Monitor(["source", "length"], exam, out=f"{place}/divided")
    monitor.begin(model, tokenizer, torch.optim.AdamW(model.parameters()))
    for k in range(12):
        rows = world.rows()[4 * k + 2 * rank : 4 * k + 2 * rank + 2]
        batch = dict(tokenizer([row["text"] + " </s>" for row in rows], return_tensors="pt", padding=True))
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch).loss.backward()
        monitor.step(batch | {label: [row[label] for row in rows] for label in ("source", "length")})
    monitor.end()


def test_two_processes_have_the_losses_of_one(tmp_path, capfd):
    world.write_exam(tmp_path / "exam.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_train, (str(tmp_path), port), nprocs=2, start_method="spawn")
    sizes = {"source": {}, "length": {}}
    for row in world.rows():
        for label, tokens in sizes.items():
            tokens[row[label]] = tokens.get(row[label], 0) + len(row["text"].split())
    for run in ("copied", "divided"):
        record = MonitorRecord.read(Path(tmp_path / run))
        for label, measure in (("source", "loss"), ("length", "loss/length")):
            losses, expected = recorded_loss(record, measure), evaluated_loss(world.model(), label)
            assert {value: tokens for value, (tokens, _) in losses.items()} == sizes[label]
            assert {value: loss for value, (_, loss) in losses.items()} == pytest.approx(expected, abs=2e-6)
    effects = MonitorRecord.read(tmp_path / "copied").select("effect")
    assert {row["step"] for row in effects} == {6, 12}
    assert np.isfinite([row["value"] for row in effects]).all()
    assert not record.select("effect")
    line = "monitor: effects are off: FSDP and DeepSpeed divide parameters among processes; use DDP or a single process"
    assert capfd.readouterr().out.count(line) == 1  # by the first process
