"""The surface of the command line is frozen here, and asking for help loads nothing heavy."""

import subprocess
import sys

import pytest
import typer

import grasp
from grasp.cli import app
from tests.cli.grasp_command import run, succeed

SURFACE = {
    "apply": [
        "SCORER",
        "--corpus",
        "--out",
        "--keep",
        "--text-column",
        "--id-column",
        "--split",
        "--quiet",
    ],
    "build": [
        "--out",
        "--model",
        "--corpus",
        "--targets",
        "--text-column",
        "--id-column",
        "--split",
        "--max-length",
        "--limit",
        "--resume",
        "--untrained",
        "--tokenizer",
        "--add-target",
        "--keep-features",
        "--no-keep-features",
        "--like",
        "--match",
        "--dtype",
        "--config",
        "--set",
        "--engine",
        "--workers",
        "--address",
        "--quiet",
    ],
    "calibrate": [
        "[ART]...",
        "--environment",
        "--out",
        "--target",
        "--family",
        "--list",
        "--delta",
        "--resamples",
    ],
    "demo": [
        "--out",
        "--quiet",
    ],
    "detect": [
        "ART",
        "--target",
        "--label",
        "--top",
        "--out",
        "--false-positives",
        "--clean",
        "--truth",
        "-k",
        "--neighbours",
        "--match",
        "--quiet",
    ],
    "distil": [
        "ART",
        "--target",
        "--out",
        "--rows",
        "--protocol",
        "--seed",
        "--quiet",
    ],
    "explain": [
        "ART",
        "--target",
        "--row",
        "--unit",
        "--out",
        "--json",
        "--match",
        "--protocol",
        "--set",
    ],
    "evaluate": [
        "ART",
        "--environment",
        "--protocol",
        "--target",
        "--methods",
        "--predictions",
        "--csv",
        "--json",
        "--partial",
        "--controls",
        "--development",
        "--family",
        "--method-settings",
        "--checkpoints",
        "--cache",
        "--oracle",
        "--resamples",
        "--quiet",
    ],
    "fit-head": [
        "--out",
        "--model",
        "--factory",
        "--head",
        "--corpus",
        "--decay",
        "--config",
        "--set",
        "--quiet",
    ],
    "info": ["ART", "--json", "--check", "--environment", "--protocol", "--set"],
    "merge": ["ART", "--out", "--quiet"],
    "methods": [
        "[METHOD]",
    ],
    "mix": [
        "ART",
        "--by",
        "--target",
        "--floor",
        "--cap",
        "--max-repeat",
        "--train-tokens",
        "--environment",
        "--out",
        "--distance",
        "--weights",
        "--protocol",
        "--diversity",
        "--cautious",
    ],
    "predict": [
        "ART",
        "--by",
        "--drop",
        "--keep",
        "--weight",
        "--subsets",
        "--target",
        "--environment",
        "--out",
        "--protocol",
        "--omitted",
        "--family",
        "-B",
        "--seed",
        "--units",
        "--components",
    ],
    "report": [
        "ART",
        "--out",
        "--by",
        "--target",
        "--environment",
        "--selection",
        "--mixture",
        "--detect",
        "--atlas",
        "--protocol",
        "--explain",
        "--partial",
        "--previous",
    ],
    "retrain": [
        "--out",
        "--corpus",
        "--targets",
        "--like",
        "--recipe",
        "--family",
        "-B",
        "--seeds",
        "--role",
        "--resume",
        "--config",
        "--text-column",
        "--id-column",
        "--set",
        "--workers",
        "--train-command",
        "--print-jobs",
        "--stack",
        "--engine",
        "--address",
        "--quiet",
    ],
    "runs mix": ["RUNS", "--metric", "--cautious", "--out"],
    "runs predict": ["RUNS", "MIXTURES", "--metric", "--out"],
    "runs propose": ["RUNS", "--metric", "--count", "--decide", "--art", "--subsets", "--seed", "--out"],
    "runs import": [
        "FILE",
        "[RESULTS]",
        "--out",
        "--label",
        "--times",
        "--weights",
        "--metrics",
        "--higher",
        "--lower",
        "--size",
        "--skip-failed",
    ],
    "score": [
        "ART",
        "--target",
        "--top",
        "--bottom",
        "--where",
        "--min-tokens",
        "--labels",
        "--out",
        "--protocol",
        "--unit",
        "--match",
        "--method",
        "--method-settings",
        "--checkpoints",
        "--environment",
        "--cache",
        "--quiet",
    ],
    "select": [
        "ART",
        "--budget",
        "--target",
        "--train-tokens",
        "--export",
        "--out",
        "--left-out",
        "--by",
        "--floor",
        "--cap",
        "--environment",
        "--exclude",
        "--exclude-where",
        "--format",
        "--documents",
        "--ids-out",
        "--corpus",
        "--protocol",
        "--diversity",
        "--cautious",
        "--quiet",
    ],
    "serve": [
        "ART",
        "--port",
        "--environment",
        "--model",
        "--mcp",
    ],
    "verify": [
        "ART",
    ],
}
HEAVY = ("torch", "transformers", "duckdb", "pyarrow", "scipy", "numpy", "datasets")


def commands():
    """Every command, those of a group by two words."""
    found = typer.main.get_command(app).commands
    flat = {name: command for name, command in found.items() if not hasattr(command, "commands")}
    groups = {name: command.commands for name, command in found.items() if name not in flat}
    return flat | {f"{group} {name}": one for group, held in groups.items() for name, one in held.items()}


def names(parameter) -> list[str]:
    if parameter.param_type_name == "argument":
        return [parameter.metavar]
    return [*parameter.opts, *parameter.secondary_opts]


def test_commands_and_options_are_those_that_were_agreed():
    found = {
        name: [option for parameter in command.params for option in names(parameter)]
        for name, command in commands().items()
    }
    assert found == SURFACE


@pytest.mark.parametrize("command", SURFACE)
def test_help_of_every_command_explains_its_options_and_ends_with_an_example(command):
    text = succeed(*command.split(), "--help").out
    assert f"grasp {command}" in text[text.index("Example") :]
    assert commands()[command].help
    for parameter in commands()[command].params:
        assert parameter.help, parameter.name


def test_help_names_every_command():
    text = succeed("--help").out
    assert "Start with: grasp demo" in text
    assert all(f"  {command.split()[0]} " in text for command in SURFACE)
    assert "..." not in text.replace("[ARGS]...", "")
    assert run().err.strip() == text.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build"], "--out"),
        (["score"], "ART"),
        (["predict"], "ART"),
        (["predict", "art", "--byy", "topic"], "--byy"),
        (["predict", "art", "--family", "uniform:0.5", "-B", "0"], "-B"),
        (["predict", "art", "--seed", "one"], "--seed"),
        (["score", "art", "--target", "facts", "--top", "-1"], "--top"),
        (["bild"], "bild"),
    ],
)
def test_a_wrong_command_line_is_explained_with_exit_code_2(arguments, said):
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: ")
    assert said in outcome.err.splitlines()[-1]


def loaded_after(program: str) -> list[str]:
    """Heavy modules that a fresh interpreter has loaded after `program`; last line of its output."""
    code = f"import sys\n{program}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    "program",
    [
        "import grasp",
        "import grasp.cli",
        "from grasp.cli import app\nsys.argv = ['grasp', '--help']\ntry: app()\nexcept SystemExit: pass",
        "from grasp.cli import app\nsys.argv = ['grasp', 'predict', '--help']\ntry: app()\nexcept SystemExit: pass",
    ],
)
def test_importing_and_asking_for_help_load_nothing_heavy(program):
    assert loaded_after(program) == []


def test_reading_an_artifact_loads_no_torch(art):
    asked = ["info", str(art)], ["score", str(art), "--target", "facts"], ["predict", str(art), "--by", "topic"]
    program = "from grasp.cli import app\n" + "\n".join(
        f"sys.argv = {['grasp', *line]}\ntry: app()\nexcept SystemExit as stop: assert not stop.code" for line in asked
    )
    assert not {"torch", "transformers"} & set(loaded_after(program))


def test_version_of_the_module():
    done = subprocess.run([sys.executable, "-m", "grasp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == grasp.__version__ + "\n"
    assert succeed("--version").out == done.stdout
