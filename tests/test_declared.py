"""What is read from the source of a verb is what the verb takes."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from grasp.declared import REQUIRED, declared
from grasp.report.serve import LISTS, QUESTIONS

VERBS = [
    ("grasp.audit.detect", "detect"),
    ("grasp.audit.explain", "explain"),
    ("grasp.choose.alone", "mix_runs"),
    ("grasp.choose.alone", "predict_runs"),
    ("grasp.choose.alone", "propose_runs"),
    ("grasp.choose.apply", "apply"),
    ("grasp.choose.distil", "distil"),
    ("grasp.choose.mixture", "mix"),
    ("grasp.choose.select", "select"),
    ("grasp.extract.build", "build"),
    ("grasp.report.serve", "serve"),
    ("grasp.report.verb", "report"),
    ("grasp.runs.readers", "import_runs"),
    ("grasp.verbs.evaluate", "evaluate"),
    ("grasp.verbs.predict", "predict"),
    ("grasp.verbs.retrain", "retrain"),
    ("grasp.verbs.score", "score"),
]
OF_PYTHON = {"art", "artifact", "cluster", "jobs", "own", "progress", "tell"}  # no text can give them


@pytest.mark.parametrize(("module", "name"), VERBS)
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


def test_a_question_of_a_page_or_an_agent_names_no_file():
    for verb, (module, names) in QUESTIONS.items():
        asked = [declared(module, verb).arguments[name] for name in names]
        assert all(argument.kind is not Path for argument in asked)
        assert {argument.name for argument in asked if argument.repeatable} <= set(LISTS)
