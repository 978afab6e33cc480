"""tools/size.py counts modules and executed functions, compared with known ones; the package is below its limits."""

import sys
import threading
import tomllib

import pytest

from tools import size

MODULE = '''"""Docstring
of two lines."""

# a comment
TEXT = """two
lines"""  # of code


class Thing:
    """Docstring."""

    async def work(self):
        """Docstring."""

        def inner():
            raise ValueError(
                # a comment

                TEXT
            )
'''

FIRST = """
import second
def main():
    [step(i) for i in range(3)]
    second.Thing().work()
    step(1)
def step(i):
    return (lambda: second.leaf())()
"""
SECOND = """
def leaf():
    return 1
leaf()
class Thing:
    def work(self):
        import third
        thread = threading.Thread(target=third.deep, args=(4,))
        thread.start()
        thread.join()
import threading
"""
THIRD = """
def at_import():
    return 2
at_import()
def deep(n):
    return n and deep(n - 1)
"""


def test_functions_modules_depth_and_changes_of_a_known_call(tmp_path, monkeypatch):
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(size, "PACKAGE", f"{tmp_path}/")
    import first  # noqa: PLC0415 - the module is written above

    trace = size.CallTrace()
    threading.setprofile(trace.record)
    sys.setprofile(trace.record)
    try:
        first.main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert list(trace.functions) == ["first:main", "first:step", "second:leaf", "second:Thing.work", "third:deep"]
    assert trace.counts == (5, 3, 5, 2)


def test_lines_of_code_functions_and_raises_of_a_module():
    assert size.size_of(MODULE) == {"lines": 20, "code": 8, "functions": 2, "raise": 1}


def test_packages_and_the_core(tmp_path):
    for name in ("a.py", "baselines/b.py", "models/c.py", "models/deep/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    sizes = size.sizes_by_package(tmp_path)
    assert {package: counts["code"] for package, counts in sizes.items()} == {".": 1, "baselines": 1, "models": 2}
    numbers = size.totals(sizes)
    assert (numbers["whole"]["code"], numbers["core"]["code"]) == (4, 3)


def test_limits_are_only_lowered(tmp_path):
    limits, numbers = {"whole": {"code": 10, "raise": 3}}, {"whole": {"code": 12, "raise": 2.5}, "roads": {"a b": 4}}
    assert size.above(numbers, limits) == ["whole: code: 12, limit 10", "roads: a b: 4, limit None"]
    size.write_limits(size.lowered(limits, numbers), tmp_path / "size.toml")
    written = tomllib.loads((tmp_path / "size.toml").read_text())
    assert written == {"whole": {"code": 10, "raise": 2.5}, "roads": {"a b": 4}}
    assert size.lowered(written, {}) == written


@pytest.mark.slow
def test_executed_functions_are_below_their_limits():
    roads = size.trace_commands()
    numbers = {name: len(functions) for name, (_, functions) in roads.items()}
    numbers["first row"] = size.first_row(roads["grasp build"][1])
    limits = tomllib.loads(size.LIMITS.read_text(encoding="utf-8"))
    assert size.above({"roads": numbers}, {"roads": limits["roads"]}) == []
