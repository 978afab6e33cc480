"""Every benchmark starts from its own command, and the one of a GPU runs to its end on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


COMMANDS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "argparse" in path.read_text("utf-8")]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_benchmark_starts_from_the_root_of_a_checkout(path):
    assert "usage:" in run(path, "--help")


def test_the_benchmark_of_a_gpu_runs_on_a_cpu():
    printed = run("benchmarks/gpu.py", "--device", "cpu", "--small")
    for stage in ("profile body", "profile kernel output_layer", "logits  half", "agree   within tolerance"):
        assert stage in printed


def test_the_price_of_a_backward_pass_is_printed():
    skipped = ("--skip-memory", "--skip-speed", "--skip-kernels")
    assert "plain 1.00" in run("benchmarks/build.py", *skipped, "--backward", "--rows", 2, "--length", 16, "--units", 5)
