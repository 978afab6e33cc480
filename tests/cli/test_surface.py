"""Every command has help, wrong command lines are explained, and help loads no large package.

The public surface, help texts and Python signatures, is one generated page of the documentation, so that the diff of a
commit shows changes. `pytest tests/cli/test_surface.py --rewrite-snapshots` rewrites it.
"""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import grasp
from grasp.cli import app
from grasp.cli.app import GROUPS
from grasp.progress_display import Watch
from tests.cli.grasp_command import refused, run, succeed

SURFACE = Path(__file__).parents[2] / "docs" / "surface.md"
INTRODUCTION = """# Commands and signatures

This page is generated from the help texts and from the signatures of the public Python names."""
HEAVY = ("torch", "transformers", "duckdb", "pyarrow", "scipy", "numpy", "datasets", "pydantic")


def commands():
    """Return every command by name; those of a group have two words."""
    by_name = typer.main.get_command(app).commands
    flat = {name: command for name, command in by_name.items() if not hasattr(command, "commands")}
    groups = {name: command.commands for name, command in by_name.items() if name not in flat}
    return flat | {f"{group} {name}": command for group, held in groups.items() for name, command in held.items()}


def signature(name: str, function) -> str:
    """Return a call with the names and defaults of all arguments."""
    full = inspect.signature(function)
    untyped = [each.replace(annotation=each.empty) for each in full.parameters.values() if each.name != "self"]
    return f"{name}{full.replace(parameters=untyped, return_annotation=full.empty)}"


def signatures() -> list[str]:
    """Return the signatures of all public functions, classes and methods."""
    lines = []
    for name in (*grasp.__all__, "open"):
        member = getattr(grasp, name)
        if not inspect.isclass(member):
            lines += [signature(f"grasp.{name}", member)] if callable(member) else []
        elif not issubclass(member, Exception):
            methods = {each: method for each, method in vars(member).items() if not each.startswith("_")}
            lines += [f"grasp.{name}"] + [
                signature(f"    .{each}", method) if inspect.isfunction(method) else f"    .{each}"
                for each, method in methods.items()
            ]
    return lines


def surface() -> str:
    """Return the page with the whole public surface."""
    helps = {f"grasp {command}".strip(): succeed(*command.split(), "--help").out for command in ["", *commands()]}
    parts = [f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in helps.items()]
    python = "\n".join(signatures())
    return "\n\n".join([INTRODUCTION, *parts, f"## Python\n\n```text\n{python}\n```"]) + "\n"


def test_the_public_surface_is_the_recorded_one(rewrite_snapshots):
    page = surface()
    if rewrite_snapshots:
        SURFACE.write_text(page, encoding="utf-8")
    assert SURFACE.read_text(encoding="utf-8").split() == page.split()  # where lines are broken is up to click


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_is_described_with_an_example(command):
    text = succeed(*command.split(), "--help").out
    assert f"grasp {command}" in text[text.index("Example") :]
    assert commands()[command].help
    assert all(parameter.help for parameter in commands()[command].params)


def test_help_names_every_command_in_a_group():
    text = succeed("--help").out
    assert "grasp demo" in text
    assert all(f"  {command.split()[0]} " in text for command in commands())
    assert all(f"{group}:" in text for group in GROUPS)
    assert "..." not in text.replace("[ARGS]...", "")
    assert run().err.strip() == text.strip()
    page = succeed("report", "--help").out
    assert page.index("\nOptions:") < page.index("--by") < page.index("\nMore options:") < page.index("--explain")
    assert all(len(line) <= 80 for line in page[: page.index("Examples:")].splitlines())


@pytest.mark.parametrize(
    ("arguments", "keyword"),
    [
        (["build"], "--out"),
        (["score"], "ART"),
        (["predict"], "ART"),
        (["predict", "art", "--byy", "topic"], "--byy"),
        (["retrain", "--family", "uniform:0.5", "-B", "0", "--out", "env"], "-B"),
        (["score", "art", "--target", "facts", "--top", "one"], "--top"),
        (["score", "art", "--target", "facts", "--top", "-1"], "--top"),
        (["bild"], "bild"),
    ],
)
def test_a_wrong_command_line_is_explained_with_exit_code_2(arguments, keyword):
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: ")
    assert keyword in outcome.err.splitlines()[-1]


def loaded_after(program: str) -> list[str]:
    """Return the large modules that a new interpreter has loaded after `program`, from its last line of output."""
    code = f"import sys\n{program}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    "program",
    [
        "import grasp.api.artifact",
        "import grasp.cli",
        "from grasp.cli import app\nsys.argv = ['grasp', '--help']\ntry: app()\nexcept SystemExit: pass",
        "from grasp.cli import app\nsys.argv = ['grasp', 'predict', '--help']\ntry: app()\nexcept SystemExit: pass",
    ],
)
def test_import_and_help_load_no_large_package(program):
    assert set(loaded_after(program)) <= ({"pydantic"} if "cli" in program else set())


def test_the_core_and_reading_an_artifact_load_no_torch(art):
    core = ("predict.predictor", "predict.weights", "paper.standardize", "paper.subset_sums")
    command_lines = ["info", str(art)], ["score", str(art), "--target", "facts"], ["predict", str(art), "--by", "topic"]
    program = f"import {', '.join(f'grasp.{module}' for module in core)}\nfrom grasp.cli import app\n" + "\n".join(
        f"sys.argv = {['grasp', *line]}\ntry: app()\nexcept SystemExit as stop: assert not stop.code"
        for line in command_lines
    )
    assert not {"torch", "transformers"} & set(loaded_after(program))


def test_version_of_the_module():
    done = subprocess.run([sys.executable, "-m", "grasp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == grasp.__version__ + "\n"
    assert succeed("--version").out == done.stdout


@pytest.mark.parametrize("arguments", [("info", "ART", "--quiet"), ("predict", "--quiet", "ART", "--by", "topic")])
def test_every_command_accepts_quiet(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(Watch, "quiet", False)
    assert "no such artifact" in refused(*(str(tmp_path / "none") if word == "ART" else word for word in arguments))
    assert Watch.quiet


def test_quiet_commands_print_results_only(art, tmp_path, monkeypatch):
    monkeypatch.setattr(Watch, "quiet", False)
    out = str(tmp_path / "rows.parquet")
    for quiet in ([], ["--quiet"]):
        succeed("score", str(art), "--target", "facts", "--out", out)
        done = succeed("score", str(art), "--target", "facts", "--out", out, *quiet)
        assert done.err == ("" if quiet else f"note: --out: overwriting {out}\n")
        assert done.out.endswith(" rows\n")
