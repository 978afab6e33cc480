"""What is read from the source of a verb is what the verb takes."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from grasp.report.serve import REPEATABLE, SERVED_VERBS
from grasp.signatures import REQUIRED, parse_signature

VERBS = [
    ("grasp.inspect.detect", "detect"),
    ("grasp.inspect.explain", "explain"),
    ("grasp.select.mixture_model", "mix_runs"),
    ("grasp.select.mixture_model", "predict_runs"),
    ("grasp.select.mixture_model", "propose_runs"),
    ("grasp.distil.apply", "apply"),
    ("grasp.distil.distil", "distil"),
    ("grasp.select.mix", "mix"),
    ("grasp.select.select", "select"),
    ("grasp.build.build", "build"),
    ("grasp.report.serve", "serve"),
    ("grasp.report.build_report", "report"),
    ("grasp.runs.import_runs", "import_runs"),
    ("grasp.api.evaluate", "evaluate"),
    ("grasp.api.predict", "predict"),
    ("grasp.api.retrain", "retrain"),
    ("grasp.api.score", "score"),
]
OF_PYTHON = {"art", "artifact", "cluster", "jobs", "overrides", "on_start", "progress"}  # no text can give them


@pytest.mark.parametrize(("module", "name"), VERBS)
def test_a_verb_is_declared_as_python_sees_it(module, name):
    verb, found = getattr(import_module(module), name), parse_signature(module, name)
    takes = {one.name: one.default for one in inspect.signature(verb).parameters.values()}
    assert list(found.arguments) == [name for name in takes if name not in OF_PYTHON]
    for name, argument in found.arguments.items():
        may_be_left_out = takes[name] is REQUIRED and argument.default is None  # `target: str | None`
        assert argument.default == takes[name] or may_be_left_out
        assert argument.about.endswith((".", "?")), name
    assert found.about.startswith(inspect.getdoc(verb).splitlines()[0])


def test_kinds_are_those_that_can_be_written():
    found = parse_signature("grasp.api.predict", "predict").arguments
    kinds = {name: found[name].annotation for name in ("by", "weight", "subsets", "omitted", "count")}
    assert kinds == {"by": str | None, "weight": list[str], "subsets": Path | None, "omitted": bool, "count": int}
    assert [name for name, argument in found.items() if argument.in_commas] == ["target"]
    assert "In Python" not in found["weight"].about


def test_a_question_of_a_page_or_an_agent_names_no_file():
    for verb, (module, names) in SERVED_VERBS.items():
        asked = [parse_signature(module, verb).arguments[name] for name in names]
        assert all(argument.kind is not Path for argument in asked)
        assert {argument.name for argument in asked if argument.repeatable} <= set(REPEATABLE)
