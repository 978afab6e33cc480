"""The demo uses retraining runs only of its own rows and units, or prints the command that produces them."""

import shlex
import shutil

import pytest
import typer

import grasp.demo.demo
from grasp.cli import app
from grasp.cli.options import merge_settings, split_names
from grasp.demo.demo import Demo, open_runs, print_answers
from grasp.errors import RunsError
from grasp.retraining.plan import fitted_lengths
from grasp.retraining.settings import retrain_settings
from tests.cli.grasp_command import succeed
from tests.report.world import write_artifact, write_environment


def test_the_suggested_command_retrains_on_the_rows_and_units_of_the_demo(tmp_path):
    demo = Demo(tmp_path)
    command = typer.main.get_command(app).commands["retrain"]
    options = command.make_context("retrain", [*demo.retrain_flags, "--out", str(demo.environment_path)]).params
    flags = {
        "corpus.path": options["corpus"],
        "targets.names": split_names(options["targets"]),
        "family": options["family"],
    }
    settings = fitted_lengths(retrain_settings(merge_settings(None, options["assign"], flags)))
    assert settings.corpus == demo.corpus
    assert settings.targets == demo.targets
    assert settings.family == "mixture:source"
    assert settings.recipe == "tiny"


def test_local_runs_come_first_and_runs_of_other_rows_or_unfinished_ones_are_refused(tmp_path, monkeypatch):
    artifact, other = write_artifact(tmp_path / "art"), write_artifact(tmp_path / "other", corpus="0ther")
    monkeypatch.setattr(grasp.demo.demo, "BUNDLED_RUNS", tmp_path / "nothing")
    with pytest.raises(RunsError, match="no retrained runs"):
        open_runs(Demo(tmp_path), artifact)
    monkeypatch.setattr(grasp.demo.demo, "BUNDLED_RUNS", write_environment(tmp_path / "shipped", other).path)
    with pytest.raises(RunsError, match=r"c0ffee.*shipped.*0ther"):
        open_runs(Demo(tmp_path), artifact)
    write_environment(tmp_path / "environment", artifact, done=3)
    with pytest.raises(RunsError, match="environment: unfinished"):
        open_runs(Demo(tmp_path), artifact)
    monkeypatch.setattr(grasp.demo.demo, "BUNDLED_RUNS", write_environment(tmp_path / "right", artifact).path)
    assert open_runs(Demo(tmp_path / "elsewhere"), artifact).name == "right"
    write_environment(tmp_path / "local" / "environment", artifact)
    assert open_runs(Demo(tmp_path / "local"), artifact).name == "environment"


def test_the_demo_prints_the_output_of_the_commands_that_it_shows(art, tmp_path, monkeypatch):
    for name, value in {"LABEL": "topic", "TARGET": "facts", "TASKS": ("facts",)}.items():
        monkeypatch.setattr(grasp.demo.demo, name, value)
    monkeypatch.setattr(grasp.demo.demo, "BUNDLED_RUNS", tmp_path / "nothing")
    demo, printed_lines = Demo(tmp_path), []
    shutil.copytree(art, demo.artifact_path)
    print_answers(demo, printed_lines.append)
    commands = [shlex.split(line)[2:] for line in printed_lines if line.startswith("$ grasp ")]
    verbs = ["predict", "score", "retrain", "select", "mix", "report", "retrain"]
    assert [argv[0] for argv in commands] == verbs
    text = "\n".join(printed_lines)
    assert "No comparison: " in text
    for argv in commands:
        if argv[0] in ("select", "mix") or (argv[0] in ("predict", "score") and "--out" not in argv):
            printed = succeed(*argv).lines
            written = sum(flag in argv for flag in ("--out", "--weights"))  # one line per written file
            shown_lines = printed[: len(printed) - written]
            assert "\n".join(shown_lines) in text, argv
    assert (demo.out / "report.html").exists()
