"""Progress of long runs, and printed tables."""

import re
import sys
from types import SimpleNamespace

import pytest

from grasp import progress_display as progress
from grasp.progress import Progress, RetrainStatus
from grasp.progress_display import Watch
from grasp.text import MAX_CELL_CHARS, text_table
from tests.mentions import assert_mentions


@pytest.fixture
def now(monkeypatch):
    """Set the clock: the only entry is its time in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_stages_are_named_with_their_remaining_time(now, capsys):
    watch = Watch()
    watch.stage("moments", rows=100, tokens=1000)
    now[0] = 60.0
    watch.advance(50, 500)
    assert capsys.readouterr().err == "estimating moments: 50 of 100 rows, 1 rows/s, 8 tokens/s, 1 min 00 s left\n"
    now[0] = 290.0
    watch.stage("rows scored", rows=100, tokens=1000)
    now[0] = 296.0
    watch.advance(60, 600)
    assert_mentions(capsys.readouterr().err, "60 of 100 rows", "10 rows/s", "100 tokens/s", " 4 s")
    watch.stage("verifying", rows=2, tokens=None)
    now[0] = 302.0
    watch.advance(1, 0)
    assert_mentions(capsys.readouterr().err, "verifying: 1 of 2 rows", "0 rows/s", " 6 s")


def test_only_truncated_names_are_disambiguated():
    long = "x" * 100
    rows = [(long + "a", "1", "b\t"), (long + "b", "1", "b"), ("b", "2", "b ")]
    _, _, first, second, third = text_table("t", ("name", "n", "note"), rows).splitlines()
    names = [line.split("  ")[0] for line in (first, second)]
    assert names[0] != names[1]
    assert all(len(name) <= MAX_CELL_CHARS for name in names)
    assert third.split() == ["b", "2", "b"]
    assert "#" not in first + third


def test_progress_reports_runs_steps_and_remaining_time(monkeypatch, capsys):
    monkeypatch.setattr(Watch, "line_seconds", 0.0)
    with Watch() as watch:
        watch.runs(RetrainStatus("rows"))
        watch.runs(RetrainStatus("runs", 4, 18, "a-0", 2, 320))
        watch.runs(RetrainStatus("runs", 5, 18, "a-0", 7, 320, 3_725.0))
    first, second, last = capsys.readouterr().err.splitlines()
    assert_mentions(first, "runs: 4 of 18 runs", "step 2 of 320", "a-0")
    assert_mentions(second, "runs: 5 of 18 runs", "step 7 of 320", "a-0", "1 h 02 min")
    assert re.match(r"runs: 1 runs\b.* \d", last)


class Cell:
    """Stands for IPython in a notebook: what a cell shows, the latest text of each display."""

    def __init__(self):
        self.shown = []

    def get_ipython(self):
        return SimpleNamespace(kernel=object())

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.shown.append(content["text/plain"])
        place = len(self.shown) - 1
        return SimpleNamespace(update=lambda new, raw: self.shown.__setitem__(place, new["text/plain"]))


@pytest.fixture
def cell(monkeypatch):
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=cell.get_ipython))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    return cell


@progress.shows_progress
def long_work(*, progress=None):
    if progress is not None:
        progress.stage("rows scored", rows=2, tokens=None)
        progress.note("one row was cut")
        progress.advance(2, 0)
    return progress


def test_a_notebook_has_one_line_per_stage_that_changes_in_place_and_none_elsewhere(cell, monkeypatch):
    assert long_work(progress=Progress()).__class__ is Progress
    assert not cell.shown
    watch = long_work()
    assert isinstance(watch, progress.NotebookWatch)
    assert len(cell.shown) == 2
    assert_mentions(cell.shown[0], "scoring rows: 2 rows in")
    assert cell.shown[1] == "note: one row was cut"
    monkeypatch.delitem(sys.modules, "IPython")
    assert long_work() is None


def test_quiet_prints_nothing(monkeypatch, capsys):
    monkeypatch.setattr(Watch, "line_seconds", 0.0)
    for quiet, texts in ((False, ["note: a :x: b", "tokenizing: 1 of 2 rows", "note: c"]), (True, [])):
        monkeypatch.setattr(Watch, "quiet", quiet)
        with Watch() as watch:
            watch.note("a :x: b")
            watch.stage("rows", rows=2, tokens=None)
            watch.advance(1, 0)
            watch.runs(RetrainStatus("runs", note="c"))
        out, err = capsys.readouterr()
        assert not out
        assert bool(err) != quiet
        assert_mentions(err, *texts)
