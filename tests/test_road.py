"""tools/road.py counts what a call passes, by a world whose road is known."""

import sys
import threading

from tools import road

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


def test_functions_modules_depth_and_changes_of_a_known_road(tmp_path, monkeypatch):
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(road, "PACKAGE", f"{tmp_path}/")
    import first  # noqa: PLC0415 - it is made here

    found = road.CallTrace()
    threading.setprofile(found.record)
    sys.setprofile(found.record)
    try:
        first.main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert list(found.functions) == ["first:main", "first:step", "second:leaf", "second:Thing.work", "third:deep"]
    assert found.counts == (5, 3, 5, 2)
