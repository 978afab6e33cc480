"""docs/howto/images.md: every block of it, in its order, in an empty directory."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.grasp_command import succeed

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "images.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITHOUT_WEIGHTS = ("torchvision", "timm")  # their weights come from elsewhere


def run_python(text):
    exec(compile(text, str(PAGE), "exec"), {"__name__": "page"})


def run_commands(text):
    for line in text.replace("\\\n", " ").splitlines():
        if not any(package in line for package in WITHOUT_WEIGHTS):
            succeed(*shlex.split(line)[1:])


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    for package in ("datasets", "jinja2", "sklearn"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kinds, texts = zip(*BLOCK.findall(PAGE.read_text(encoding="utf-8")), strict=True)
    assert kinds[:3] == ("python", "python", "yaml")
    Path("net.py").write_text(texts[0])
    Path("images.yaml").write_text(texts[2])
    for kind, text in zip(kinds, texts, strict=True):
        if kind != "yaml":
            {"python": run_python, "bash": run_commands}[kind](text)
    assert {path.name for path in tmp_path.glob("art*")} == {"art", "art-vit", "art-photos", "art-saved", "art-columns"}
    first = pq.read_table("suspects.parquet")["row_id"].to_pylist()[:10]
    rows = pq.read_table("train.parquet").to_pylist()
    planted = {row["row_id"] for row in rows if row["changed"]}
    assert len(planted & set(first)) >= 7, (first, len(planted))
    assert "<img" in Path("suspects.html").read_text()
