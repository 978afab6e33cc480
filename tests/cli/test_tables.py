"""Tables as they are printed."""

from grasp.cli.console import show
from grasp.text import LONGEST_CELL


def test_only_names_that_are_cut_are_told_apart(capsys):
    long = "x" * 100
    show("t", ("name", "n", "note"), [(long + "a", "1", "b\t"), (long + "b", "1", "b"), ("b", "2", "b ")])
    _, _, first, second, third = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in (first, second)]
    assert names[0] != names[1]
    assert all(len(name) <= LONGEST_CELL for name in names)
    assert third.split() == ["b", "2", "b"]
    assert "#" not in first + third
