"""What is read from the source of a verb is what the verb takes; the public names and signatures are recorded.

`pytest tests/test_signatures.py --rewrite-snapshots` rewrites `python_surface.json`.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest

import grasp
from grasp.report.serve import LISTS, QUESTIONS
from grasp.signatures import REQUIRED, declared

SURFACE = Path(__file__).with_name("python_surface.json")
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
OF_PYTHON = {"art", "artifact", "cluster", "jobs", "own", "on_start", "progress"}  # no text can give them


def signature(value: object) -> list[str]:
    """Parameters with their defaults; annotations are left to the type checker."""
    parameters = inspect.signature(value).parameters.values()
    return [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]


def public_signatures() -> dict[str, list[str]]:
    """Of every public function, and of the public methods of every public class, by dotted name."""
    signatures = {}
    for name in dir(grasp):
        value = getattr(grasp, name)
        if inspect.isclass(value):
            members = [(member, getattr(value, member)) for member in dir(value) if not member.startswith("_")]
            methods = {member: held for member, held in members if inspect.isfunction(held) or inspect.ismethod(held)}
            signatures |= {f"{name}.{member}": signature(method) for member, method in methods.items()}
            signatures[name] = [member for member, _ in members if member not in methods]
        elif callable(value):
            signatures[name] = signature(value)
    return signatures


def test_public_names_and_their_signatures_are_the_recorded_ones(rewrite_snapshots):
    signatures = public_signatures()
    if rewrite_snapshots:
        SURFACE.write_text(json.dumps(signatures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert json.loads(SURFACE.read_text(encoding="utf-8")) == signatures


@pytest.mark.parametrize(("module", "name"), VERBS)
def test_a_verb_is_declared_as_python_sees_it(module, name):
    verb, declaration = getattr(import_module(module), name), declared(module, name)
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(verb).parameters.values()}
    assert list(declaration.arguments) == [name for name in defaults if name not in OF_PYTHON]
    for name, argument in declaration.arguments.items():
        may_be_left_out = defaults[name] is REQUIRED and argument.default is None  # `target: str | None`
        assert argument.default == defaults[name] or may_be_left_out
        assert argument.about.endswith((".", "?")), name
    assert declaration.about.startswith(inspect.getdoc(verb).splitlines()[0])


def test_kinds_are_those_that_can_be_written():
    arguments = declared("grasp.api.predict", "predict").arguments
    kinds = {name: arguments[name].annotation for name in ("by", "weight", "subsets", "omitted", "count")}
    assert kinds == {"by": str | None, "weight": list[str], "subsets": Path | None, "omitted": bool, "count": int}
    assert [name for name, argument in arguments.items() if argument.in_commas] == ["target"]
    assert "In Python" not in arguments["weight"].about


def test_a_question_of_a_page_or_an_agent_names_no_file():
    for verb, (module, names) in QUESTIONS.items():
        arguments = [declared(module, verb).arguments[name] for name in names]
        assert all(argument.kind is not Path for argument in arguments)
        assert {argument.name for argument in arguments if argument.repeatable} <= set(LISTS)
