"""Methods of other packages are loaded by entry point, and need ten lines."""

import re

import numpy as np
import pytest

from grasp.errors import SettingsError, ShapeError
from grasp.methods.registry import configure_methods, load_method, registered_methods, score_rows
from tests.baselines.test_documentation import TEXT
from tests.baselines.world import matrix
from tests.cli.grasp_command import succeed

# What docs/baselines.md shows is what is installed here.
SOURCE, POINTS = (re.search(rf"```{kind}\n(.*?)```", TEXT, flags=re.DOTALL).group(1) for kind in ("python", "toml"))


@pytest.fixture
def install(install):
    """Return a function that installs a package of one module that registers a method."""
    return lambda module, source, point, package="loudness": install(
        module, source, f"[grasp.methods]\n{point}\n", package
    )


@pytest.fixture
def loud(install):
    """Install the package of the documentation."""
    install("loudness", SOURCE, POINTS.splitlines()[1].replace('"', ""))


def test_a_plugin_is_listed_ranks_rows_and_is_evaluated(loud, world):
    art = world.root / "art"
    assert re.search(r"^loud +Capital letters", succeed("methods").out, flags=re.MULTILINE)
    assert "inputs: rows and units, tokens" in succeed("methods", "loud").out
    printed = succeed("score", art, "--target", "facts", "--method", "loud", "--top", 3)
    assert printed.lines[0] == "the 3 most helpful of 40 rows for facts, by loud"
    command = "evaluate", art, "--runs", world.root / "env", "--methods", "loud,bm25"
    assert re.search(r"^loud +facts", succeed(*command).out, flags=re.MULTILINE)
    inputs = world.inputs()
    shares = [sum(map(str.isupper, text)) / max(1, len(text)) for text in inputs.texts(0, inputs.n_rows)]
    (configured,) = configure_methods(["loud"])
    np.testing.assert_array_equal(matrix(score_rows(configured, inputs))[:, 0], -np.array(shares))


def test_without_the_package_there_is_no_such_method():
    with pytest.raises(SettingsError, match=r"method 'loud'; .*bm25"):
        load_method("loud")


def test_two_packages_with_the_same_method_name_are_refused(loud, install):
    install("other", SOURCE, "loud = other:Loud", package="other")
    with pytest.raises(SettingsError, match=r"(loudness and other|other and loudness)"):
        registered_methods()


def test_scores_of_another_shape_are_refused(install, world):
    install("short", SOURCE.replace("0, inputs.n_rows", "0, 3"), "loud = short:Loud", package="short")
    (configured,) = configure_methods(["loud"])
    with pytest.raises(ShapeError, match=r"loud: .*\(3, 1\), .*\(40, 6\) or \(40, 1\)"):
        score_rows(configured, world.inputs())
