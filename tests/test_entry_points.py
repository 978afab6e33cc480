"""A package of a stranger adds a kernel, a scoring rule and a command through entry points alone."""

import re
import subprocess
import sys

import numpy as np
import pytest

import grasp
from grasp.entry_points import entries, load
from grasp.errors import MissingExtraError, ProtocolError, SettingsError
from grasp.kernels.kernel import Kernel, kernel_class
from grasp.pipeline.pipeline import build_artifact
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import load_protocol
from grasp.settings import FeatureSettings
from tests.pipeline.world import world

SOURCE = '''
from dataclasses import replace

import torch

from grasp.kernels.kernel import Kernel
from grasp.predict.predictor import assemble_predictor
from grasp.predict.scoring_rule import RegisteredProtocol, ScoringProtocol
from grasp.yaml_files import validated
from grasp.errors import ProtocolError

class Losses(Kernel):
    """The loss of a row, the same for every unit."""

    name = "losses"
    moment_types = ()

    def prepare(self, units):
        self.n_units = units.n_rows

    def score(self, batch):
        return batch.loss_B.float()[:, None].repeat(1, self.n_units)


class Twice(RegisteredProtocol):
    """Predict twice the mean effect."""

    kernels = ("losses",)
    feature_defaults = {"alpha": 0.5}
    factor: float = 2.0

    @classmethod
    def built_in(cls):
        return cls(name="twice", match={"losses": 1.0})

    @classmethod
    def parse(cls, settings, location):
        return validated(cls, settings, location, ProtocolError) if "factor" in settings else None

    def bind(self, artifact, units, *, sketches, per_unit):
        predictor = assemble_predictor(artifact, self, units)
        return replace(predictor, unit=f"{self.factor:g} effect sizes")
'''
COMMANDS = '''
import typer

commands = typer.Typer()


@commands.command()
def shout(text: str) -> None:
    """Print a text in capital letters."""
    print(text.upper())
'''
POINTS = """
[grasp.kernels]
losses = strange:Losses
[grasp.protocols]
twice = strange:Twice
"""


def test_a_kernel_and_a_rule_of_another_package_are_built_and_predict(install, tmp_path):
    install("strange", SOURCE, POINTS)
    settings = world(tmp_path / "world", n_rows=12, features={"rule": "twice"})
    assert settings.features.alpha == 0.5
    art = grasp.open(build_artifact(settings, tmp_path / "art"))
    assert art.files.kernels == ("losses",)
    predictor = Predictor.from_artifact(art.files)
    assert (predictor.protocol.name, predictor.unit) == ("twice", "2 effect sizes")
    losses_N = np.concatenate([batch["loss"].to_numpy() for batch in art.files.row_batches(["loss"])])
    effect_N = (losses_N - losses_N.mean()) / losses_N.std()
    np.testing.assert_allclose(predictor.effect_NT[:, 0], effect_N, atol=2e-3)  # stored as float16
    (tmp_path / "rule.yaml").write_text("{name: mine, match: {losses: 1}, factor: 3}")
    assert art.predict(drop="topic = 'sky'", protocol=tmp_path / "rule.yaml").unit.startswith("3 effect sizes")
    (tmp_path / "rule.yaml").write_text("{name: mine, factor: many}")
    with pytest.raises(ProtocolError, match="factor"):
        load_protocol(tmp_path / "rule.yaml")


def test_a_command_of_another_package_is_listed_and_runs(install, tmp_path):
    site = install("shouting", COMMANDS, "[grasp.commands]\nshouting = shouting:commands\n")
    program = f"import sys; sys.path.insert(0, {str(site)!r}); from grasp.cli import main; main()"
    run = [sys.executable, "-c", program]
    printed = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"Other commands:\n  shout +Print a text in capital letters", printed)
    assert subprocess.run([*run, "shout", "hello"], capture_output=True, text=True, check=True).stdout == "HELLO\n"


def test_a_broken_package_does_not_remove_commands(install):
    site = install("broken", "import no_such_module\n", "[grasp.commands]\nbroken = broken:commands\n")
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); from grasp.cli import main; main()"]
    done = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True)
    assert "command broken: broken:commands of package broken cannot be imported" in done.stderr
    assert re.search(r"\n  retrain +Train a model", done.stdout)


def test_without_the_package_its_names_are_unknown(tmp_path):
    with pytest.raises(SettingsError, match=r"features.kernels: unknown kernel 'losses'.*output_layer"):
        kernel_class("losses")
    with pytest.raises(ValueError, match="expected one of default, paper, got 'twice'"):
        FeatureSettings(rule="twice")
    with pytest.raises(SettingsError, match="did you mean knn"):
        load("grasp.kernels", "kn")
    assert "paper" in entries("grasp.protocols")


def test_what_cannot_be_loaded_is_named(install):
    install("strange", SOURCE, "[grasp.kernels]\nlosses = strange:replace\nnone = strange:Gone\n")
    with pytest.raises(SettingsError, match=r"kernel losses: strange:replace of package strange: got .*Kernel"):
        load("grasp.kernels", "losses", Kernel)
    with pytest.raises(MissingExtraError, match="kernel none: strange:Gone of package strange cannot be imported"):
        load("grasp.kernels", "none")
