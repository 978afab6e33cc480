"""Parameters parsed from the source of a function equal its signature."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from grasp.serving.serve import REPEATABLE, SERVED_VERBS
from grasp.signatures import REQUIRED, parse_signature

VERBS = [
    ("grasp.vision.detect", "detect"),
    ("grasp.inspect.explain", "explain"),
    ("grasp.mixing.mixture_model", "mix_runs"),
    ("grasp.mixing.mixture_model", "predict_runs"),
    ("grasp.mixing.proposals", "propose_runs"),
    ("grasp.distil.apply", "apply"),
    ("grasp.distil.distil", "distil"),
    ("grasp.select.mix", "mix"),
    ("grasp.select.select", "select"),
    ("grasp.pipeline.build", "build"),
    ("grasp.serving.serve", "serve"),
    ("grasp.report.build_report", "report"),
    ("grasp.mixing.import_runs", "import_runs"),
    ("grasp.api.evaluate", "evaluate"),
    ("grasp.api.predict", "predict"),
    ("grasp.retraining.retrain", "retrain"),
    ("grasp.api.score", "score"),
]
OF_PYTHON = {"art", "artifact", "cluster", "jobs", "overrides", "on_start", "progress"}  # these have no text form


@pytest.mark.parametrize(("module", "name"), VERBS)
def test_parsed_parameters_equal_the_signature(module, name):
    verb, signature = getattr(import_module(module), name), parse_signature(module, name)
    takes = {parameter.name: parameter.default for parameter in inspect.signature(verb).parameters.values()}
    assert list(signature.arguments) == [name for name in takes if name not in OF_PYTHON]
    for name, argument in signature.arguments.items():
        may_be_left_out = takes[name] is REQUIRED and argument.default is None  # `target: str | None`
        assert argument.default == takes[name] or may_be_left_out
        assert argument.about.endswith((".", "?")), name
    assert signature.about.startswith(inspect.getdoc(verb).splitlines()[0])


def test_requests_to_the_server_cannot_name_files():
    for verb, (module, names) in SERVED_VERBS.items():
        arguments = [parse_signature(module, verb).arguments[name] for name in names]
        assert all(argument.kind is not Path for argument in arguments)
        assert {argument.name for argument in arguments if argument.repeatable} <= set(REPEATABLE)
