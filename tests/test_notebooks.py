"""Every notebook of docs/notebooks runs from top to bottom, with the files that its first cell names."""

import ast
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import grasp
from tests.corpus.chats import CHATML, turns
from tests.pipeline.test_chat_build import conversations
from tests.pipeline.world import write_checkpoint
from tests.test_readme import TOPICS, needs_tasks, place  # noqa: F401 - a fixture

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


@pytest.fixture
def desk(place, monkeypatch):  # noqa: F811 - the fixture
    """Write the files that notebooks use; the check that the model is trained is disabled for random checkpoints."""
    built = grasp.build
    monkeypatch.setattr(grasp, "build", lambda *args, **named: built(*args, untrained=True, **named), raising=False)
    write_checkpoint(place / "chat-model", context=512)
    config = place / "chat-model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHATML}))
    lines = [json.dumps(record) for record in conversations(12)]
    (place / "chats.jsonl").write_text("\n".join(lines))
    (place / "wanted.jsonl").write_text(json.dumps({"messages": turns("what is water?", "water is wet.")}))
    shares = np.random.default_rng(0).dirichlet(np.ones(3), size=8)
    names = [f"run-{i}" for i in range(8)]
    pd.DataFrame({"run": names, **dict(zip(TOPICS, shares.T, strict=True))}).to_csv(place / "mixtures.csv", index=False)
    pd.DataFrame({"run": names, "sciq/loss": 3.0 - shares[:, 1]}).to_csv(place / "metrics.csv", index=False)
    return place


def play(name: str) -> list[object]:
    """Run the cells of a notebook and return the displayed values."""
    names: dict[str, object] = {}
    shown = []
    for cell in json.loads((NOTEBOOKS / name).read_text())["cells"]:
        if cell["cell_type"] == "code":
            *before, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(before, []), name, "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
            else:
                exec(compile(ast.Module([last], []), name, "exec"), names)
    return [value for value in shown if value is not None]


@needs_tasks
def test_a_corpus_and_a_benchmark_then_ablation_runs(desk):
    shown = play("corpus.ipynb")
    assert all(hasattr(output, "_repr_html_") for output in shown[:4])
    assert set(TOPICS) <= set(shown[2].to_pandas()["value"])
    assert (desk / "kept").is_dir()
    assert (desk / "report.html").is_file()
    _, changes, mixture, *_ = play("runs.ipynb")
    assert {"nats", "nats_low", "nats_high"} <= set(changes.to_pandas().columns)
    assert set(mixture.to_pandas()["value"]) == set(TOPICS)
    assert (desk / "weights.parquet").is_file()


def test_chats(desk):
    play("chats.ipynb")
    records = [json.loads(line) for line in (desk / "chosen" / "part-00000.jsonl").read_text().splitlines()]
    assert 0 < len(records) < 12
    assert all("messages" in record for record in records)


def test_every_notebook_is_run_here_and_stored_without_output():
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == {"chats.ipynb", "corpus.ipynb", "runs.ipynb"}
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert all(not cell.get("outputs") for cell in json.loads(path.read_text())["cells"])
