"""Laws of the build: every array equals a float64 reference; shards, batches, kills and resumes do not change it."""

import functools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from grasp.api.score import score
from grasp.artifact.inspection import verify
from grasp.artifact.manifest import MARKER, RUN
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, GraspError, ModelError, ProtocolError, SettingsError
from grasp.files import discard
from grasp.kernel_table import KERNELS, BuiltRule
from grasp.kernel_table import SKETCHES as BOTH_SKETCHES
from grasp.kernels import kernel as kernel_module
from grasp.kernels.kernel import make_kernels, needs_backward, relevance_scale
from grasp.kernels.sketch import CountSketch
from grasp.models import forward_pass as extract
from grasp.models.build_source import BuildSource
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.forecast import forecast
from grasp.pipeline.inputs import prepare_inputs
from grasp.pipeline.model_pass import compute_moments
from grasp.pipeline.pipeline import Sample, build_artifact, curvature_rows, resolve_settings, training_notes
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.progress import Progress
from grasp.select.export import corpus_settings
from grasp.settings import BuildSettings, FeatureSettings, build_settings
from tests.cli.grasp_command import arrays
from tests.corpus.world import write_jsonl, write_parquet
from tests.mentions import assert_mentions
from tests.pipeline.world import (
    FORWARD,
    SKETCHES,
    changed,
    more_targets,
    texts,
    world,
    write_checkpoint,
    write_targets,
)
from tests.predict.source import FakeSource
from tests.rules import rule

SLOW = pytest.mark.slow  # second paths of what the fast suite does once


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        assert np.array_equal(array, expected[name]), name


@pytest.fixture(scope="module")
def built(root) -> Path:
    return build_artifact(world(root), root / "artifact")


@pytest.fixture(scope="module")
def every(root) -> Path:
    return build_artifact(world(root, features={"kernels": FORWARD}), root / "every")


class Reference:
    """Slow reference of the whole build in float64, one position at a time, with the formulas of the paper."""

    def __init__(self, settings: BuildSettings) -> None:
        self.features = settings.features
        self.model = AutoModelForCausalLM.from_pretrained(settings.model.path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
        matrix = self.model.get_output_embeddings().weight.detach().double().numpy()
        self.matrix = matrix - matrix.mean(axis=0)  # what top-k cut off is spread evenly

    def positions(self, ids: list[int], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return hidden states, residuals (top-k + label) and input tokens at supervised positions from `first` on."""
        with torch.inference_mode():
            output = self.model(torch.tensor([ids]), output_hidden_states=True)
        hidden = output.hidden_states[-1][0, first:-1].double().numpy()
        probability = output.logits[0, first:-1].double().softmax(-1).numpy()
        residual = np.zeros_like(probability)
        for t, label in enumerate(ids[first + 1 :]):
            stored_tokens = set(np.argsort(-probability[t])[: self.features.top_k]) | {label}
            for v in stored_tokens:
                residual[t, v] = probability[t, v] - (v == label)
        return hidden, residual, np.array(ids[first:-1])

    def rows(self, documents: list[str], max_length: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        ids = [self.tokenizer(text)["input_ids"] + [0] for text in documents]
        cut = [line[k : k + max_length] for line in ids for k in range(0, len(line), max_length)]
        return [self.positions(line, 0) for line in cut if len(line) > 1]

    def whitener(self, hidden: np.ndarray, residual: np.ndarray):
        mean, covariance = hidden.mean(0), np.cov(hidden.T, bias=True)
        ridge = self.features.tau * np.trace(covariance) / len(covariance)
        value, vector = np.linalg.eigh(covariance + ridge * np.eye(len(covariance)))
        gamma = (residual**2).mean(0)
        precondition = 1.0 / (gamma + self.features.epsilon * gamma[gamma > 0].mean())
        return mean, vector @ np.diag(value**-0.5) @ vector.T, precondition

    def summaries(self, rows, last: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean hidden state and residual of the last positions of each row; of all positions if 0."""
        tails = [(hidden[-last:].mean(0), residual[-last:].mean(0)) for hidden, residual, _ in rows]
        hidden, residual = (np.stack(part) for part in zip(*tails, strict=True))
        return hidden, residual

    def pooled(self, rows, units) -> np.ndarray:
        hidden, residual = self.summaries(rows, 32)
        mean, white, precondition = self.whitener(hidden, residual)
        out = np.zeros((len(rows), len(units)))
        for i in range(len(rows)):
            for e, (unit_hidden, unit_residual, _) in enumerate(units):
                h = (white @ (hidden[i] - mean)) @ (white @ (unit_hidden[-32:].mean(0) - mean))
                r = residual[i] @ (precondition * unit_residual[-32:].mean(0))
                out[i, e] = r * np.sign(h) * np.log1p(abs(h))
        return out

    def output_layer(self, rows, units) -> np.ndarray:
        mean, white, precondition = self.whitener(*(np.concatenate(part) for part in list(zip(*rows, strict=True))[:2]))
        out = np.zeros((len(rows), len(units)))
        for i, (hidden, residual, _) in enumerate(rows):
            gradient = np.einsum("th,tv->hv", (hidden - mean) @ white, residual * precondition) / len(hidden)
            for e, (unit_hidden, unit_residual, _) in enumerate(units):
                other = np.einsum("th,tv->hv", (unit_hidden - mean) @ white, unit_residual) / len(unit_hidden)
                out[i, e] = (gradient * other).sum()
        return out

    def knn(self, rows, units) -> np.ndarray:
        """Compute the kernel for a corpus that is its own sample."""
        mean, white, _ = self.whitener(*(np.concatenate(part) for part in list(zip(*rows, strict=True))[:2]))
        of_rows, of_units = ([(hidden - mean) @ white for hidden, *_ in side] for side in (rows, units))
        every = np.concatenate(of_rows)
        width = 0.25 * np.sqrt(2 * every.var(0).sum())
        labels, unit_labels = ([residual.argmin(1) for _, residual, _ in side] for side in (rows, units))
        out = np.zeros((len(rows), len(units)))
        for e, (states, label) in enumerate(zip(of_units, unit_labels, strict=True)):
            near = [np.exp(-((h[:, None] - states) ** 2).sum(-1) / (2 * width**2)) for h in of_rows]
            same = [k * (row_labels[:, None] == label) for k, row_labels in zip(near, labels, strict=True)]
            near_S, same_S = (1 + np.concatenate(near).sum(0)) / len(every), np.concatenate(same).mean(0)
            guess = 1 + units[e][1][np.arange(len(label)), label]  # p of the label
            right = same_S + (0.1 * guess + 1 / len(every)) * near_S
            for i in range(len(rows)):
                out[i, e] = (same[i].mean(0) / right - near[i].mean(0) / (1.1 * near_S)).mean()
        return out

    def embedding(self, rows, units) -> np.ndarray:
        """Use the gradient of the hidden state of position t as that of its embedding."""
        matrix = self.matrix
        delta = np.concatenate([residual @ matrix for _, residual, _ in rows])
        share = np.bincount(np.concatenate([token for *_, token in rows]), minlength=len(matrix)) / len(delta)
        weight = 1.0 / (share + self.features.epsilon * share[share > 0].mean())
        second = delta.T @ delta / len(delta)
        inverse = np.linalg.inv(second + self.features.tau * np.trace(second) / len(second) * np.eye(len(second)))
        out = np.zeros((len(rows), len(units)))
        for i, (_, residual, token) in enumerate(rows):
            for e, (_, unit_residual, unit_token) in enumerate(units):
                product = (residual @ matrix) @ inverse @ (unit_residual @ matrix).T
                out[i, e] = (product * (token[:, None] == unit_token) * weight[token][:, None]).mean()
        return out


def test_relevance_equals_the_float64_reference(root):
    kernels = ("output_layer", "embedding", "knn")
    settings = world(root, features={"kernels": kernels, "sample_positions": 10**6})
    arrays_by_name = arrays(build_artifact(settings, root / "exact"))
    last = {"kernels": ("pooled",), "positions": "tail:32", "summary_positions": "tail:32"}
    arrays_by_name |= arrays(build_artifact(changed(settings, features=last), root / "exact-last"))
    reference = Reference(settings)
    rows = reference.rows(texts(40), settings.corpus.max_length)
    units = []
    for line in lines_of(root / "facts.jsonl"):
        ids = reference.tokenizer(line["prompt"])["input_ids"]
        units.append(reference.positions(ids + reference.tokenizer(line["completion"])["input_ids"], len(ids) - 1))
    order = [int(name.rsplit("-", 1)[1]) for name in ArtifactReader.open(root / "exact").units["unit_id"].to_pylist()]
    for name in (*kernels, "pooled"):
        expected = getattr(reference, name)(rows, units)[:, order]
        np.testing.assert_allclose(arrays_by_name[f"relevance_{name}"], expected, atol=2e-4 * np.abs(expected).max())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("last", [0, 32])
def test_sketches_equal_the_float64_reference(root, tmp_path, last):
    """Whiten means of all positions as positions are, and means of the last 32 as means of rows are."""
    summary = {"positions": f"tail:{last}", "summary_positions": f"tail:{last}"} if last else {}
    settings = world(root, features={"kernels": SKETCHES, "sample_positions": 10**6, "hidden_width": 16} | summary)
    artifact = ArtifactReader.open(build_artifact(settings, tmp_path / "art"))
    results = {name: array / artifact.manifest.arrays[name].gain for name, array in arrays(artifact.path).items()}
    reference = Reference(settings)
    rows = [[part[-last:] for part in row] for row in reference.rows(texts(40), settings.corpus.max_length)]
    positions = tuple(np.concatenate(part) for part in list(zip(*rows, strict=True))[:2])
    hidden, residual = reference.summaries(rows)
    mean, white, precondition = reference.whitener(*((hidden, residual) if last else positions))
    np.testing.assert_allclose(results["hidden_sketch"], (hidden - mean) @ white, atol=2e-4 * np.abs(hidden).max())

    # the residual: inner products by buckets and signs, drawn again
    count = CountSketch.draw(residual.shape[1], 8, settings.features.seed, "residual")
    sketch = np.zeros((len(rows), 8))
    for v in range(residual.shape[1]):
        sketch[:, count.bucket[v]] += count.sign[v] * np.sqrt(precondition[v]) * residual[:, v]
    np.testing.assert_allclose(results["residual_sketch"], sketch, atol=2e-4 * np.abs(sketch).max())

    # the product: a circular convolution of the two sketches at each position, by a double loop, and then the mean
    mean, white, precondition = reference.whitener(*positions)
    of_hidden, of_residual = (
        CountSketch.draw(size, 8, settings.features.seed, f"product-{side}")
        for size, side in ((len(mean), "hidden"), (len(precondition), "residual"))
    )
    for i in (0, 7, 23):
        expected = np.zeros(8)
        for h, xi in zip(*rows[i][:2], strict=True):
            a, b = np.zeros(8), np.zeros(8)
            np.add.at(a, of_hidden.bucket, of_hidden.sign * ((h - mean) @ white))
            np.add.at(b, of_residual.bucket, of_residual.sign * np.sqrt(precondition) * xi)
            for j in range(8):
                for k in range(8):
                    expected[(j + k) % 8] += a[j] * b[k] / len(rows[i][0])
        np.testing.assert_allclose(results["product_sketch"][i], expected, atol=2e-4 * np.abs(expected).max())


def test_sketches_have_mean_squared_norm_one(every):
    arrays_by_name = arrays(every)
    for name in SKETCHES:
        assert (arrays_by_name[name] ** 2).sum(axis=1).mean() == pytest.approx(1.0, rel=1e-5)


def test_results_do_not_depend_on_shard_size(root, every):
    settings = world(root, shard_rows=8, features={"kernels": FORWARD})
    arrays_by_name = arrays(build_artifact(settings, root / "other-shards"))
    for name, expected in arrays(every).items():
        np.testing.assert_allclose(arrays_by_name[name], expected, atol=2e-4 * np.abs(expected).max(), err_msg=name)


def test_moments_of_nearly_all_rows_approximate_those_of_all_rows(root, tmp_path):
    kernels = {"kernels": FORWARD}
    actual, expected = (
        arrays(build_artifact(world(root, features=kernels | {"sample_rows": rows}), tmp_path / str(rows)))
        for rows in (60, 65)
    )
    for name in ("relevance_output_layer", "relevance_embedding", "relevance_knn", "relevance_pooled"):
        assert np.corrcoef(actual[name].ravel(), expected[name].ravel())[0, 1] > 0.95, name
        assert not np.array_equal(actual[name], expected[name]), name


@pytest.fixture
def head_positions(monkeypatch) -> list[int]:
    result, real = [], extract.head_residual

    def head_residual(head, hidden_PH, *rest):
        result.append(len(hidden_PH))
        return real(head, hidden_PH, *rest)

    monkeypatch.setattr(extract, "head_residual", head_residual)
    return result


@pytest.fixture
def text_passes(monkeypatch) -> Counter:
    result, real = Counter(), torch.nn.Embedding.forward

    def forward(module, ids_BL):
        result.update(tuple(np.trim_zeros(ids_L, "b")) for ids_L in ids_BL.tolist())
        return real(module, ids_BL)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    return result


def texts_of(out: Path) -> tuple[list[tuple], list[tuple]]:
    origin = BuildSource(ArtifactReader.open(out))
    rows = origin.rows.rows(np.arange(origin.rows.n_rows))
    of_rows = [rows.ids(i).tolist() for i in range(len(rows))]
    of_units = [unit_token.input_ids.tolist() for unit_token in origin.unit_tokens]
    return tuple([tuple(np.trim_zeros(ids, "b")) for ids in side] for side in (of_rows, of_units))


@pytest.mark.parametrize("train", ["new", "further"])
@pytest.mark.parametrize(
    ("features", "is_whole", "is_kept"),
    [
        ({"sample_positions": 10**6}, True, True),
        ({"sample_positions": 10**6, "max_cache_mb": 0}, True, False),
        ({"sample_positions": 200}, False, False),
    ],
)
def test_sampled_rows_pass_the_model_twice_unless_the_sample_is_the_corpus(
    root, tmp_path, text_passes, train, features, is_whole, is_kept
):
    settings = world(root, train=train, features=features, shard_rows=17)
    out = build_artifact(changed(settings, model={"check": False}), tmp_path / "art")
    actual = Counter(text_passes)
    rows, units = texts_of(out)
    sample = Sample.draw(BuildSource(ArtifactReader.open(out)).rows.loss_counts(), settings.features)
    assert sample.is_whole == is_whole
    reread_rows = [] if is_kept else sample.row_index
    expected = Counter(units) + Counter(rows) + Counter(rows[i] for i in reread_rows)
    if train == "further":  # gradients of units need the curvature, which is measured on some rows
        measured = curvature_rows(BuildSource(ArtifactReader.open(out)).rows, settings.features)
        texts = [tuple(np.trim_zeros(measured.ids(i), "b").tolist()) for i in range(len(measured))]
        expected += Counter(units) + Counter(texts) + Counter(texts)  # with their labels, and with drawn ones
    probe_texts = actual - expected
    assert actual - probe_texts == expected
    # short texts of the loader: one shows where the head is, two which layers have gradients
    assert probe_texts.total() == (3 if train == "further" else 1)
    assert all(text == tuple(range(text[0], text[0] + 6)) for text in probe_texts)


@pytest.mark.parametrize("train", ["new", pytest.param("further", marks=SLOW)])
def test_cached_features_of_the_first_loop_equal_those_of_a_second_pass(root, tmp_path, head_positions, train):
    features = {"sample_positions": 10**6} | ({"kernels": FORWARD} if train == "new" else {})
    built = []
    for size in (8192, 0):
        settings = world(root, train=train, features=features | {"max_cache_mb": size}, shard_rows=17)
        built.append(ArtifactReader.open(build_artifact(settings, tmp_path / str(size))))
    once, twice = built
    assert_same(arrays(once.path), arrays(twice.path))
    assert_same(dict(once.moments), dict(twice.moments))
    positions = int(once.moments["hidden.count"][0])
    of_units = int(sum(once.units["n_positions"].to_pylist()))
    assert sum(head_positions) == 3 * positions + 2 * of_units


@pytest.mark.parametrize(
    "kernels",
    [
        ("pooled",),
        ("output_layer",),
        ("embedding", "knn"),
        ("knn", "hidden_sketch"),
        ("product_sketch", "embedding", "residual_sketch"),
    ],
)
def test_relevance_of_a_kernel_does_not_depend_on_other_kernels(root, every, tmp_path, kernels):
    arrays_by_name = arrays(build_artifact(world(root, features={"kernels": kernels}), tmp_path / "some"))
    assert {name.removeprefix("relevance_") for name in arrays_by_name} == set(kernels)
    expected = arrays(every)
    assert_same(arrays_by_name, {name: expected[name] for name in arrays_by_name})


def test_the_rule_of_the_paper_builds_pooled_and_sketches_from_the_last_positions(root, tmp_path, head_positions):
    settings = world(root).model_dump(mode="json")
    settings["features"] = {"rule": "paper", "positions": "tail:3", "summary_positions": "tail:3"}
    artifact = ArtifactReader.open(build_artifact(build_settings(settings), tmp_path / "paper"))
    assert set(artifact.array_names) == {"relevance_pooled", "hidden_sketch", "residual_sketch"}
    unit_positions = sum(min(3, len(unit.input_ids) - unit.first) for unit in BuildSource(artifact).unit_tokens)
    assert unit_positions > 6
    assert 2.9 * artifact.n_rows < sum(head_positions) - unit_positions <= 3 * artifact.n_rows  # some rows are shorter


def test_a_build_computes_the_kernels_of_the_scoring_rule_and_two_sketches():
    for train, named in KERNELS.items():
        assert FeatureSettings().decided(train).kernels == (*named, *BOTH_SKETCHES)
        assert BuiltRule.of(named, 1e9) == BuiltRule(dict.fromkeys(named, 1.0), train == "new"), train
    assert set(KERNELS) == {"new", "further", None}
    assert [needs_backward(KERNELS[train]) for train in ("new", "further")] == [False, True]


def test_the_settings_of_the_paper_come_with_its_rule():
    paper = FeatureSettings(rule="paper").decided("further")
    assert paper.kernels == ("pooled", *BOTH_SKETCHES)
    assert (paper.positions, paper.summary_positions, paper.sample_rows) == ("tail:32", "tail:32", 65_536)
    assert (paper.top_k, paper.hidden_width, paper.residual_width) == (64, 64, 64)
    assert FeatureSettings(rule="paper", sample_rows=8).sample_rows == 8  # what is said stands
    assert BuiltRule.of(["pooled"]).weights == {"pooled": 1.0}


TOY = """
from grasp.kernels.kernel import Kernel


class Toy(Kernel):
    name = "toy"
    moment_types = ()

    def prepare(self, units):
        self.loss_E = units.loss_B

    def score(self, batch):
        return (batch.loss_B[:, None] * self.loss_E).float()
"""


@pytest.mark.parametrize("other_kernels", [(), ("knn", "hidden_sketch")])
def test_a_kernel_is_an_entry_point_and_the_scoring_rule_that_names_it(root, tmp_path, install, other_kernels):
    install("toy_package", TOY, "[grasp.kernels]\ntoy = toy_package:Toy\n")
    settings = world(root, features={"kernels": ("toy", *other_kernels)})
    artifact = ArtifactReader.open(build_artifact(settings, tmp_path / "art"))
    names = ("relevance_toy", *(n if "sketch" in n else f"relevance_{n}" for n in other_kernels))
    assert set(artifact.array_names) == set(names)
    losses = artifact.rows(np.arange(artifact.n_rows))["loss"].to_numpy(), artifact.units["loss"].to_numpy()
    np.testing.assert_allclose(arrays(artifact.path)["relevance_toy"], np.outer(*losses), rtol=1e-6)

    # a rule that names it counts it, as any other kernel
    ranked = score(artifact, "facts", protocol=rule(name="by the toy", match={"toy": 1.0})).to_pandas()
    by_loss = np.argsort(-losses[0], kind="stable")
    assert ranked["row_id"].tolist()[:5] == artifact.rows(by_loss)["row_id"].to_pylist()[:5]
    with pytest.raises(ProtocolError, match="array 'relevance_toy'"):
        DEFAULT_PROTOCOL.model_copy(update={"match": {"toy": 1.0}}).resolved_for(FakeSource())

    # a target is added to it as to any other
    assert add_targets(artifact.path, more_targets(root)) == "pass"
    grown = ArtifactReader.open(artifact.path)
    expected_NE = np.outer(losses[0], grown.units["loss"].to_numpy())
    np.testing.assert_allclose(arrays(grown.path)["relevance_toy"], expected_NE, rtol=1e-5)


def test_self_relevance_of_units_does_not_depend_on_block_size(root, tmp_path, monkeypatch):
    settings = world(root)
    inputs = prepare_inputs(settings, tmp_path / "tokens", Progress())
    corpus = compute_moments(inputs.model_pass, inputs.store.shard(0), states_every=1)
    self_relevance = {}
    for rows_at_once in (64, 4):
        monkeypatch.setattr(kernel_module, "UNITS_PER_BLOCK", rows_at_once)
        for kernel in make_kernels(("output_layer", "embedding", "knn"), inputs.model, settings.features, corpus):
            kernel.prepare(inputs.units)
            self_relevance.setdefault(kernel.name, []).append(kernel.self_relevance(inputs.units))
    for whole_E, in_blocks_E in self_relevance.values():
        np.testing.assert_allclose(in_blocks_E, whole_E, rtol=1e-4)
        assert (whole_E > 0).all()


def test_float16_keeps_three_digits(root, built):
    actual, expected = arrays(build_artifact(world(root, array_dtype="float16"), root / "half")), arrays(built)
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=6e-4 * np.abs(expected[name]).max())


class Notes(Progress):
    def __init__(self):
        self.lines, self.stages, self.rows, self.planned, self.read = [], [], 0, {}, Counter()

    def note(self, line):
        self.lines.append(line)

    def stage(self, name, *, rows, tokens):
        self.stages.append(name)

    def advance(self, rows, tokens):
        self.rows += rows
        self.read[self.stages[-1]] += tokens

    def plan(self, tokens):
        self.planned = dict(tokens)


@pytest.mark.parametrize("sample_positions", [200, 10**6])
def test_stages_read_about_as_many_tokens_as_planned(root, tmp_path, sample_positions):
    notes = Notes()
    build_artifact(world(root, features={"sample_positions": sample_positions}), tmp_path / "art", progress=notes)
    passes = {"moments", "rows scored"} & {*notes.stages}
    assert len(passes) == (2 if sample_positions == 200 else 1)  # the whole corpus passes once
    assert list(notes.planned) == [stage for stage in notes.stages if stage in passes]
    for stage in passes:
        assert 0.7 * notes.read[stage] < notes.planned[stage] < 1.4 * notes.read[stage], stage


def test_a_finished_build_is_not_repeated_nor_replaced_by_another(root, built, tmp_path):
    assert not (built / "work").exists()
    notes = Notes()
    assert build_artifact(world(root), built, progress=notes) == built
    assert (len(notes.lines), notes.stages) == (1, [])
    assert_mentions(notes.lines, f"{built}: finished")
    path = shutil.copytree(built, tmp_path / "artifact")
    lines = (path / RUN).read_text().splitlines(keepends=True)
    assert "like: null\n" in lines  # a setting that an earlier version did not have
    (path / RUN).write_text("".join(line for line in lines if not line.startswith("like:")))
    assert build_artifact(world(root), path) == path
    (path / RUN).unlink()
    (path / MARKER).unlink()
    every = r"finished artifact.*features\.tau: .*\b0\.01\b.*\b0\.02\b.*shard_rows: .*\b16\b.*\b9\b"
    for place in (built, path):
        with pytest.raises(ArtifactError, match=every):
            build_artifact(world(root, shard_rows=9, features={"tau": 0.02}), place)
    assert build_artifact(world(root), path) == path


def test_stored_rows_are_verified(root, built, tmp_path):
    path = shutil.copytree(built, tmp_path / "artifact")
    assert verify(path).ok
    shard = next(path.glob("tokens/shard-*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert list(verify(path).problems) == [f"tokens/{shard.name}"]
    with pytest.raises(ArtifactError, match=rf"tokens/{shard.name}: damaged"):
        _ = ArtifactReader.open(path).tokens_path
    discard(path / "tokens")  # it may be removed
    assert verify(path).ok


def test_a_build_reports_its_inputs_and_its_progress(root, tmp_path):
    notes, subset_notes, unnamed_notes = Notes(), Notes(), Notes()
    build_artifact(world(root), tmp_path / "art", progress=notes)
    columns, labels, rows, special, questions, which, leaks = notes.lines
    assert leaks.startswith("facts: ")
    assert special.startswith("special tokens: ")
    assert re.match("columns: .*'text'.*'row_id'", columns)
    assert labels == "labels: topic"
    assert re.match(r"65 rows.*40 documents.*[\d,]+ tokens.*\b48\b", rows)
    assert re.fullmatch(r"questions: .*\b6 of facts", questions)
    assert_mentions(which, "new model", "output_layer, embedding, knn", "nats")
    assert notes.stages == ["rows", "model", "units", "moments", "rows scored"]
    prepare_inputs(changed(world(root), targets={"units_per_target": 4}), tmp_path / "tokens", subset_notes)
    assert_mentions(subset_notes.lines, "questions: 4 ", " 6 of facts")
    unnamed = [{"text": line["text"], "topic": line["topic"]} for line in lines_of(root / "corpus.jsonl")]
    path = str(write_jsonl(tmp_path / "unnamed.jsonl", unnamed))
    build_artifact(changed(world(root), corpus={"path": path}), tmp_path / "unnamed", progress=unnamed_notes)
    assert "row names are generated from content and position" in unnamed_notes.lines


def test_progress_counts_rows_per_batch_and_not_per_shard(root, tmp_path):
    notes = Notes()
    seen = []
    notes.advance = lambda rows, tokens: seen.append((notes.stages[-1], rows, tokens))
    settings = changed(world(root, shard_rows=65), model={"batch_tokens": 256})
    build_artifact(settings, tmp_path / "art", progress=notes)
    forward = [(rows, tokens) for stage, rows, tokens in seen if stage == "rows scored"]
    assert len(forward) > 3
    assert sum(rows for rows, _ in forward) == 65
    assert max(tokens for _, tokens in forward) <= settings.model.batch_tokens


@pytest.mark.parametrize("more", [{}, {"train": "further", "keep_features": True}])
def test_a_forecast_counts_the_output_of_a_build_and_writes_nothing(root, tmp_path, more):
    settings, out = world(root, **more), tmp_path / "art"
    counts, total = forecast(out, settings.model_dump(), untrained=True).splitlines()
    assert not out.exists()
    build_artifact(settings, out)
    art = ArtifactReader.open(out)
    rows, questions, kernels = counts.split("; ")
    assert rows.startswith(f"{art.n_rows} rows and ")
    assert (rows.endswith(" of 40 documents"), questions) == (True, "6 questions of facts")
    ranking = {f"relevance_{name}" for name in kernels.removeprefix("rows rank by ").split(", ")}
    assert ranking == {n for n in art.array_names if n.startswith("relevance_")}
    assert ranking < set(art.array_names)  # sketches are built as well, and rank nothing
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    number, unit = re.fullmatch(
        r"about \d+ s at the present load of [\d.]+, [\d,.]+ .B of memory, ([\d.]+) (\w+) of disk until .*", total
    ).groups()
    assert size / 2 < float(number) * {"kB": 1e3, "MB": 1e6}[unit] < 4 * size  # with cached features
    with pytest.raises(ArtifactError, match="is finished"):
        forecast(out, settings.model_dump())
    with pytest.raises(ModelError, match="looks untrained"):
        forecast(tmp_path / "new", settings.model_dump())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_forecast_of_a_large_corpus_reads_only_its_beginning(root, tmp_path, monkeypatch, suffix):
    settings = world(root)
    lines = lines_of(root / "corpus.jsonl")
    lines = [line | {"row_id": f"{line['row_id']}-{k}"} for k in range(20) for line in lines]
    path = (write_parquet if suffix == ".parquet" else write_jsonl)(tmp_path / f"corpus{suffix}", lines)
    settings = changed(settings, corpus={"path": str(path)})
    monkeypatch.setattr(sys.modules["grasp.pipeline.forecast"], "PROBE_DOCUMENTS", 200)
    line = forecast(tmp_path / "art", settings.model_dump(), untrained=True).splitlines()[0]
    rows, documents = (int(number.replace(",", "")) for number in re.findall(r"about ([\d,]+)", line))
    assert documents == 800
    assert rows == round(65 / 40 * documents)


def test_a_model_no_better_than_chance_stops_the_build(root, tmp_path):
    message = r"model: .*untrained: .*\b5\.7\b.*--untrained"
    for _ in range(2):  # the rows that the first attempt left change nothing
        with pytest.raises(ModelError, match=message):
            build_artifact(world(root), tmp_path / "art", must_be_trained=True)
    assert build_artifact(world(root), tmp_path / "art").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": {"names": ["scqi"]}}, "did you mean sciq"),
        ({"corpus": {"path": "nowhere.jsonl"}}, "no such file"),
        ({"corpus": {"text_column": "body"}}, "no text column 'body'"),
        ({"corpus": {"row_id_column": "topic"}}, "row_id 'earth' occurs twice"),
        ({"corpus": {"max_length": 129}}, "rows of 129 tokens, the model has 128 positions"),
        ({"targets": {"max_length": 2}}, "has . tokens, expected at most 1.*; increase targets.max_length"),
        ({"model": {"path": "nowhere"}}, "cannot be downloaded from a hub"),
        *[
            ({"features": {"kernels": ("knn", name)}}, f"kernels: .*'{re.escape(name)}'.*embedding")
            for name in ("nope", "../kernel")
        ],
    ],
)
def test_a_refused_build_does_not_block_the_corrected_one(root, built, tmp_path, change, message):
    good = world(root)
    ((group, values),) = change.items()
    wrong = build_settings(good.model_dump() | {group: getattr(good, group).model_dump() | values})
    with pytest.raises(GraspError, match=message):
        build_artifact(wrong, tmp_path / "art")
    assert_same(arrays(build_artifact(good, tmp_path / "art")), arrays(built))


def with_broken_model(root: Path, place: Path) -> BuildSettings:
    """Write a world whose model computes NaN for rows with the word iron, which its question does not contain."""
    settings = world(root)
    model = AutoModelForCausalLM.from_pretrained(settings.model.path)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("iron")["input_ids"][0]] = float("nan")
    for part in (model, tokenizer):
        part.save_pretrained(place / "model")
    unit = {"task": "facts", "prompt": "a", "completion": " sea", "unit_id": "u"}
    names = (str(write_jsonl(place / "unit.jsonl", [unit])),)
    return changed(settings, model={"path": str(place / "model"), "check": False}, targets={"names": names})


def test_nan_from_the_model_names_the_row(root, tmp_path):
    with pytest.raises(ModelError, match=r"^row 'row-\d+[^\n]*NaN[^\n]*$"):
        build_artifact(with_broken_model(root, tmp_path), tmp_path / "artifact")


def killed_build(settings: BuildSettings, out: Path, seconds: float) -> bool:
    """Build in a child process that is killed after `seconds`, and return whether it was still running."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            build_artifact(settings, out)
        except BaseException:  # noqa: BLE001  (a child must never fall back into the test runner)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@pytest.mark.parametrize(
    ("positions", "train"),
    [(10**6, "new"), *[pytest.param(*how, marks=SLOW) for how in ((2, "new"), (2, "further"), (10**6, "further"))]],
)
def test_a_build_killed_at_random_moments_resumes_to_the_uninterrupted_result(tmp_path, train, positions):
    """Kill also while features of the first loop are cached, with half of them written."""
    features = {"sample_rows": 10, "sample_positions": positions, "gradient_coordinates": 3_000}
    settings = world(tmp_path, n_rows=16, train=train, shard_rows=4, features=features)
    begun = time.monotonic()
    expected = arrays(build_artifact(settings, tmp_path / "whole"))
    whole_seconds = time.monotonic() - begun
    generator, kills, attempt = random.Random(positions), 0, 0
    while kills < 10:
        out = tmp_path / f"attempt-{attempt}"
        while killed_build(settings, out, generator.uniform(0.0, 1.2 * whole_seconds)):
            kills += 1
        assert_same(arrays(out), expected)
        shutil.rmtree(out)
        attempt += 1


def with_paper(train: str) -> dict[str, tuple[str, ...]]:
    return {"kernels": (*KERNELS[train], "pooled", *SKETCHES)}


@pytest.fixture(scope="module")
def joint(root, tmp_path_factory):
    @functools.cache
    def of(train: str) -> dict[str, np.ndarray]:
        names = (str(root / "facts.jsonl"), str(write_targets(root / "more.jsonl", task="more", seed=5)))
        settings = world(root, train=train, targets={"names": names, "max_length": 64}, features=with_paper(train))
        return arrays(build_artifact(settings, tmp_path_factory.mktemp("joint") / "art"))

    return of


@pytest.mark.parametrize(
    ("train", "keep"),
    [("new", False), ("new", True), ("further", True), pytest.param("further", False, marks=SLOW)],
)
def test_an_added_target_has_the_relevance_of_a_joint_build(root, joint, tmp_path, train, keep):
    expected = joint(train)
    settings = world(root, train=train, keep_features=keep, features=with_paper(train))
    out = build_artifact(settings, tmp_path / "grown")
    assert add_targets(out, more_targets(root)) == ("kept features" if keep else "pass")
    assert add_targets(out, more_targets(root)) == "there already"
    assert ArtifactReader.open(out).targets == ("facts", "more")
    grown = arrays(out)
    for name, array in expected.items():
        tolerance = (2e-3 if keep else 1e-5) * np.abs(array).max()
        np.testing.assert_allclose(grown[name], array, atol=tolerance, err_msg=name)


def test_stored_positions_of_a_capped_head_include_the_mass_outside_top_k(root, tmp_path):
    settings = world(root)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, **tokens, final_logit_softcapping=2.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(settings.model.path).save_pretrained(tmp_path / "model")
    settings = changed(settings, model={"path": str(tmp_path / "model")}, keep_features=True)
    grown, more = build_artifact(settings, tmp_path / "grown"), more_targets(root)
    assert add_targets(grown, more) == "kept features"
    names = (*settings.targets.names, *more.names)
    joint = build_artifact(changed(settings, targets={"names": names}), tmp_path / "joint")
    for name, array in arrays(joint).items():
        np.testing.assert_allclose(arrays(grown)[name], array, atol=2e-3 * np.abs(array).max(), err_msg=name)


def test_an_added_target_keeps_its_own_loss_setting(root, tmp_path):
    out = build_artifact(world(root), tmp_path / "art")
    add_targets(out, more_targets(root, loss_on="all"))
    origin = BuildSource(ArtifactReader.open(out))
    first = {unit.target: tokens.first for unit, tokens in zip(origin.units.units, origin.unit_tokens, strict=True)}
    assert first["more"] == 1 < first["facts"]


def test_targets_added_to_an_artifact_without_a_kernel_lack_it_too(root, tmp_path):
    out = build_artifact(world(root, features={"kernels": ("output_layer", "hidden_sketch")}), tmp_path / "artifact")
    before = set(arrays(out))
    assert add_targets(out, more_targets(root)) == "pass"
    artifact = ArtifactReader.open(out)
    assert set(artifact.array_names) == before
    with pytest.raises(ArtifactError, match=r"'embedding'.*output_layer"):
        artifact.relevance_name("embedding")


def test_adding_a_target_over_another_corpus_is_refused(root, tmp_path):
    corpus = Path(shutil.copy(world(root).corpus.path, tmp_path / "corpus.jsonl"))
    moved = changed(world(root), corpus={"path": str(corpus)}, keep_tokens=False)
    out = build_artifact(moved, tmp_path / "artifact")
    corpus.write_text(corpus.read_text().replace("water", "fire"))
    with pytest.raises(ArtifactError, match=r"corpus.*built"):
        add_targets(out, more_targets(root))


def test_a_sample_has_the_requested_positions_and_no_superfluous_rows():
    supervised = np.random.default_rng(0).integers(1, 29, size=200)

    def draw(positions, **features):
        return Sample.draw(supervised, FeatureSettings(sample_positions=positions, seed=3, **features))

    sample = draw(500, sample_rows=2)
    held = supervised[sample.row_index].sum()
    assert sample.n_positions == held >= 500
    assert held - supervised.max() < 500
    assert (np.diff(sample.row_index) > 0).all()
    by_rows = draw(500, sample_rows=100, kernels=("gradient",))
    assert len(by_rows.row_index) == 100
    assert set(by_rows.row_index) > set(sample.row_index)  # of one order
    whole = draw(10**9)
    assert np.array_equal(whole.row_index, np.arange(200))
    assert (sample.is_whole, whole.is_whole) == (False, True)


def test_relevance_scale_is_a_power_of_two_even_for_units_without_relevance():
    scale = relevance_scale(np.array([0.0, 1.0, 400.0, 1e-8]))
    assert np.array_equal(np.exp2(np.round(np.log2(scale))), scale)
    assert np.array_equal(relevance_scale(np.zeros(3)), np.full(3, 2.0**-6))


@pytest.mark.parametrize(("train", "kernel"), [("new", "knn"), ("further", "gradient")])
def test_the_way_to_train_selects_the_additional_kernel(root, tmp_path, train, kernel):
    settings = world(root, train=train)
    artifact = ArtifactReader.open(build_artifact(settings, tmp_path / "artifact"))
    assert set(artifact.kernels) == {"output_layer", "embedding", kernel}
    assert {name for name in artifact.array_names if "sketch" in name} == set(BOTH_SKETCHES)
    assert artifact.manifest.settings["train"] == train
    weights = dict.fromkeys(("output_layer", "embedding", kernel), 1.0)
    if kernel == "gradient":
        moved = artifact.feature_settings["learning_rate_sum"]
        weights |= dict.fromkeys(("output_layer", "embedding"), round(moved / (moved + 0.02), 3))
    assert DEFAULT_PROTOCOL.resolved_for(artifact).match == weights


def test_a_build_without_a_way_to_train_stops_before_any_work(root, tmp_path):
    silent = write_checkpoint(tmp_path / "silent", train=None)
    settings = world(root, train=None)
    assert resolve_settings(settings).train == "new"  # the checkpoint says it
    with pytest.raises(SettingsError, match=r"--train: .*`--train further`"):
        build_artifact(changed(settings, model={"path": str(silent)}), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_a_loss_near_chance_is_reported_if_the_model_is_trained_further(root):
    settings = world(root, train="further")
    assert len(list(training_notes(settings, 0.6 * math.log(300), 300))) == 1
    *_, odd = training_notes(settings, 0.9 * math.log(300), 300)
    assert odd.startswith("warning: that loss is 90% of guessing (5.7)")
    assert len(list(training_notes(world(root), 0.9 * math.log(300), 300))) == 1


def test_relative_paths_are_resolved_from_any_working_directory(root, tmp_path, monkeypatch):
    settings = world(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    settings = changed(settings, model={"path": "model"}, corpus={"path": "corpus.jsonl"})
    build_artifact(settings, tmp_path / "project/out/art")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for place in ("project", "moved"):
        if place == "moved":  # as a whole
            (tmp_path / "project").rename(tmp_path / "moved")
        origin = BuildSource(ArtifactReader.open(tmp_path / place / "out/art"))
        assert origin.model.fingerprint() == origin.artifact.manifest.fingerprints["model"]
        assert origin.tokenizer.fingerprint == origin.artifact.manifest.fingerprints["tokenizer"]
        assert Path(corpus_settings(origin.artifact).path).samefile(tmp_path / place / "corpus.jsonl")
        assert corpus_settings(origin.artifact, "mine.jsonl").path == "mine.jsonl"
