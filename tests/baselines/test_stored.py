"""Stored scores: complete or absent, identified by all inputs, and refused if they are not finite."""

import copy
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from grasp.baselines.stored import BlockMethod, RowScorer, identity
from grasp.errors import ModelError, ShapeError
from grasp.methods.contract import Account, NoSettings
from grasp.methods.registry import load_method
from tests.baselines.world import METHODS, N_ROWS, N_UNITS, Clock, configured_method, matrix
from tests.faults import Killed

NAN, INF = float("nan"), float("inf")


class Fake(BlockMethod[NoSettings]):
    """A method whose scores encode row, unit and part, and which records its calls."""

    n_parts: ClassVar[int] = 1
    spoil: ClassVar[dict[tuple[int, int], float]] = {}
    shape: ClassVar[tuple[int, ...] | None] = None

    def __init__(self, *, seed=0):
        super().__init__(NoSettings(), name="fake", seed=seed)
        self.calls = []

    def parts(self, inputs):
        return self.n_parts

    def prepare(self, inputs, work, part):
        def score(start, stop):
            self.calls.append((part, start, stop))
            out = value(part)[start:stop]
            for (row, unit), bad in self.spoil.items():
                if start <= row < stop:
                    out[row - start, unit] = bad
            return out if self.shape is None else np.zeros(self.shape)

        return RowScorer(score, ACCOUNT)


ACCOUNT = Account(features=7, covers=("everything",), notes=("fake",), counts={"none": 3})


def value(part):
    return (1.0 + part) * (np.arange(N_ROWS)[:, None] + np.arange(N_UNITS) / 16)


def kind(**attributes):
    return type("Fake", (Fake,), attributes)


def test_parts_are_summed(world, tmp_path):
    method, inputs = kind(n_parts=3)(), world.inputs()
    result = method.scores(inputs, tmp_path)
    np.testing.assert_array_equal(matrix(result), value(0) + value(1) + value(2))
    assert result.account == ACCOUNT


@pytest.mark.parametrize("kill", range(1, 10))
def test_a_killed_run_of_many_parts_resumes_without_repeating_finished_blocks(kill, world, tmp_path):
    first, second = kind(n_parts=3)(), kind(n_parts=3)()
    inputs = world.inputs(progress=Clock(left=kill))
    with pytest.raises(Killed):
        first.scores(inputs, tmp_path)
    inputs = world.inputs()
    result = second.scores(inputs, tmp_path)
    np.testing.assert_array_equal(matrix(result), value(0) + value(1) + value(2))
    blocks = [(part, *bounds) for part in range(3) for bounds in inputs.blocks()]
    assert first.calls + second.calls == blocks
    assert len(first.calls) == kill


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        *(({"spoil": {(19, 4): bad}}, ModelError, f"row 19 for unit 'facts-4' is {bad}") for bad in (NAN, INF, -INF)),
        ({"spoil": {(2, 0): 7e4}, "dtype": "float16"}, ModelError, "70000.0 .* expected a finite float16 number"),
        ({"shape": (16, 2)}, ShapeError, r"rows 0 to 16: got shape \(16, 2\)"),
    ],
)
def test_invalid_scores_are_refused_and_not_stored(attributes, error, message, world, tmp_path):
    with pytest.raises(error, match=message):
        kind(**attributes)().scores(world.inputs(), tmp_path)
    assert not list(tmp_path.glob("fake-*/method.json"))


def other(inputs, **changes):
    """The material of an artifact that differs: `fingerprints` of its manifest, or settings of its targets."""
    manifest = inputs.artifact.manifest
    fingerprints = {**manifest.fingerprints, **changes.pop("fingerprints", {})}
    artifact = copy.copy(inputs.artifact)
    artifact.__dict__["manifest"] = manifest.model_copy(update={"fingerprints": fingerprints})
    changed = replace(inputs, artifact=artifact)
    targets = inputs.settings.targets.model_copy(update=changes)
    changed.source.__dict__["settings"] = inputs.settings.model_copy(update={"targets": targets})
    return changed


READERS = [name for name in METHODS if {"tokens", "model"} & load_method(name).requires]


@pytest.mark.parametrize("name", READERS)
def test_names_of_stored_scores_depend_on_the_inputs_of_the_artifact(name, world):
    """Artifacts of one corpus may share a cache: with another model, another tokenizer, units cut elsewhere."""
    inputs, method = world.inputs(), configured_method(name).method
    requires = method.requires
    decides = {
        "corpus": True,
        "model": bool(requires & {"model", "checkpoints"}),
        "tokenizer": "tokens" in requires,
    }
    expected = identity(method, inputs)
    assert identity(method, other(inputs)) == expected
    for what, differs in decides.items():
        assert (identity(method, other(inputs, fingerprints={what: "f" * 32})) != expected) == differs, what
    assert (identity(method, other(inputs, max_length=9)) != expected) == ("tokens" in requires)
