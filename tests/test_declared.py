"""What is read from the source of a verb is what the verb takes."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from grasp.declared import REQUIRED, declared

VERBS = {
    "grasp.audit.explain": "explain",
    "grasp.audit.detect": "detect",
    "grasp.choose.apply": "apply",
    "grasp.choose.distil": "distil",
    "grasp.choose.mixture": "mix",
    "grasp.choose.select": "select",
    "grasp.report.serve": "serve",
    "grasp.report.verb": "report",
    "grasp.verbs.evaluate": "evaluate",
    "grasp.verbs.predict": "predict",
    "grasp.runs.readers": "import_runs",
    "grasp.verbs.retrain": "retrain",
    "grasp.verbs.score": "score",
}
OF_PYTHON = {"art", "artifact", "cluster", "jobs", "own", "progress", "tell"}  # no text can give them


@pytest.mark.parametrize(("module", "name"), VERBS.items())
def test_a_verb_is_declared_as_python_sees_it(module, name):
    verb, found = getattr(import_module(module), name), declared(module, name)
    takes = {one.name: one.default for one in inspect.signature(verb).parameters.values()}
    assert list(found.arguments) == [name for name in takes if name not in OF_PYTHON]
    for name, argument in found.arguments.items():
        may_be_left_out = takes[name] is REQUIRED and argument.default is None  # `target: str | None`
        assert argument.default == takes[name] or may_be_left_out
        assert argument.about.endswith((".", "?")), name
    assert found.about.startswith(inspect.getdoc(verb).splitlines()[0])


def test_kinds_are_those_that_can_be_written():
    found = declared("grasp.verbs.predict", "predict").arguments
    kinds = {name: found[name].annotation for name in ("by", "weight", "subsets", "omitted", "count")}
    assert kinds == {"by": str | None, "weight": list[str], "subsets": Path | None, "omitted": bool, "count": int}
    assert [name for name, argument in found.items() if argument.in_commas] == ["target"]
    assert "In Python" not in found["weight"].about
