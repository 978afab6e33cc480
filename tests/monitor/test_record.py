"""The stored table: what is printed, the page, the command, and the import as metrics of runs."""

import pytest

import grasp
from grasp.errors import RunsError
from grasp.mixtures import read_mixture
from grasp.monitor.record import MonitorRecord, summarise
from tests.cli.grasp_command import run, succeed
from tests.monitor import world
from tests.monitor.test_monitor import sft

NAMES = ("<b>web</b>", "noise")


def record(directory, better=0.0):
    """Return a record of a hundred steps: the first source helps until step 50, the second one hurts."""
    stored = MonitorRecord(["source"], directory)
    for step in range(10, 101, 10):
        for k, source in enumerate(NAMES):
            sizes = {"rows": 5, "tokens": 100 * (k + 1 + 10 * k * better)}
            stored.add(step, "loss", 3 - step / (100 + 100 * k) - better, source=source, **sizes)
            effect = (-0.002 if step <= 50 else 0.0, 0.001)[k]
            stored.add(step, "effect", effect, 0.0005, source=source, target="exam")
        stored.add(step, "target_loss", 2 - step / 1000, target="exam")
        if step > 10:
            stored.add(step, "predicted", -0.011, 0.002, target="exam")
            stored.add(step, "measured", -0.01, target="exam")
    stored.write()
    return stored


def test_the_summary_has_losses_effects_checks_and_a_mixture(tmp_path):
    summary = summarise(record(tmp_path))
    losses, effects, checks, mixture = (part.table.to_pylist() for part in summary.parts)
    assert list(losses[0].values()) == pytest.approx(["<b>web</b>", 1_000, 2.9, 2.0, -0.9])
    assert effects[0]["verdict"] == "stopped helping after step 50"
    assert list(effects[1].values()) == pytest.approx(["exam", "noise", 1, 1, 0.5, 1.5, "hurts since step 10"])
    expected = ["exam", "10-100", 1.99, 1.9, -0.099, -0.117, -0.081, -0.09]
    assert list(checks[0].values()) == pytest.approx(expected)
    assert [row["now"] for row in mixture] == pytest.approx([1 / 3, 2 / 3])
    assert [row["proposed"] for row in mixture] == pytest.approx([8 / 15, 7 / 15])
    assert summary.notes[:2] == ("hurts: noise (exam)", "stopped helping: <b>web</b> (exam)")
    assert summary.notes[3] == (
        "guard exam: predicted change +0.200, with 90% at least +0.108, above 0 is better; it does not bind"
    )
    written = read_mixture(tmp_path / "mixture.yaml")
    assert written.weight_of == pytest.approx({"<b>web</b>": 8 / 15, "noise": 7 / 15}, abs=0.2)


def test_unknown_intervals_are_dashes_and_leave_the_share_of_their_source(tmp_path):
    stored = record(tmp_path)
    for row in stored.rows:
        if row["measure"] == "predicted" or row["source"] == "noise":
            row |= {"low": None, "high": None}
        if row["source"] == "<b>web</b>" and row["measure"] == "effect":
            row |= {"value": -0.002, "low": -0.003, "high": -0.001}
    _, effects, checks, mixture = (part.table.to_pylist() for part in summarise(stored).parts)
    assert effects[1]["verdict"] == "not distinguishable from zero; no measurement shows help"
    assert checks[0]["low"] is None
    assert mixture[1]["proposed"] == pytest.approx(mixture[1]["now"])


def test_the_page_is_one_file_without_foreign_markup(tmp_path):
    page = summarise(record(tmp_path)).write(tmp_path / "page.html").read_text()
    assert "hurts since step 10" in page
    assert "&lt;b&gt;web&lt;/b&gt;" in page
    assert "<b>web" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_rows_after_a_checkpoint_are_dropped(tmp_path):
    record(tmp_path)
    resumed = MonitorRecord(["source"], tmp_path)
    resumed.resume(45)
    assert resumed.last_step("loss") == 40


def test_the_command_prints_runs_and_their_losses_are_metrics(tmp_path, capsys):
    for k in range(4):
        record(tmp_path / f"run-{k}" / "monitor", better=0.1 * k)
    runs = [str(tmp_path / f"run-{k}") for k in range(4)]
    table, page = tmp_path / "runs.csv", tmp_path / "page.html"
    output = succeed("monitor", *runs, "--out", table).out
    assert succeed("monitor", *runs[:1], "--out", page).out.startswith("2 sources in 100 steps")
    assert output.count("effect of one more step on a source") == 4
    assert page.exists()
    imported = grasp.import_runs(table, label="source", columns=["train/*"], metrics=["*/loss"])
    assert set(imported.metrics) == {"<b>web</b>/loss", "noise/loss", "exam/loss"}
    assert set(imported.values) == set(NAMES)
    utility = imported.utility_RST()[:, 0, imported.metrics.index("noise/loss")]
    assert sorted(-utility) == pytest.approx([2.2, 2.3, 2.4, 2.5])


def test_a_directory_without_a_table_is_refused(tmp_path):
    with pytest.raises(RunsError, match=r"no monitor\.parquet; expected the output directory of a training"):
        MonitorRecord.read(tmp_path)
    (tmp_path / "monitor.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunsError, match="cannot be read as the table of a monitor"):
        MonitorRecord.read(tmp_path)
    outcome = run("monitor", tmp_path / "absent")
    assert outcome.code == 2
    assert "no monitor.parquet" in outcome.err


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_values(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    exam = world.write_exam(tmp_path / "exam.jsonl")
    sft(tmp_path, grasp.Monitor("source", exam, every=4, strict=True), report_to=["tensorboard"]).train()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    stored = reader.EventAccumulator(str(events))
    stored.Reload()
    stored_losses = [event.value for event in stored.Scalars("train/monitor/loss/exam")]
    losses = [row["value"] for row in MonitorRecord.read(tmp_path).select("loss", source="exam")]
    assert stored_losses == pytest.approx(losses, rel=1e-6)
    assert len(stored.Scalars("train/monitor/effect/exam/noise")) == 3
