"""tools/road.py counts the functions and modules of a call, compared with a known call graph."""

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


def test_functions_modules_depth_and_changes_of_a_known_call(tmp_path, monkeypatch):
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(road, "PACKAGE", f"{tmp_path}/")
    import first  # noqa: PLC0415 - the module is written above

    trace = road.CallTrace()
    threading.setprofile(trace.record)
    sys.setprofile(trace.record)
    try:
        first.main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert list(trace.functions) == ["first:main", "first:step", "second:leaf", "second:Thing.work", "third:deep"]
    assert trace.counts == (5, 3, 5, 2)
