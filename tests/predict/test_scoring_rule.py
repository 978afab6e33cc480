"""The protocol file: settings survive a round trip, and all mismatches are reported at once."""

import json
from importlib.resources import files

import numpy as np
import pytest

from grasp.api.evaluate import additive_methods
from grasp.errors import ProtocolError, SettingsError
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.scoring_rule import RegisteredProtocol, ScoringProtocol, load_protocol, save_protocol
from tests.mentions import assert_mentions
from tests.predict.source import FakeSource
from tests.rules import rule


def artifact_of(arrays, **features):
    """Return an artifact with empty arrays of these names."""
    return FakeSource(arrays=dict.fromkeys(arrays, np.zeros((1, 5))), feature_settings=features)


FULL = rule(
    name="full",
    side="omitted",
    weighting="count",
    match={"output_layer": 1.0, "pooled": 0.5},
    negative=0.25,
    components={"joint.pair": -0.25, "product.self": 0.1},
    standardize={"task": "mean_of_standardised"},
    calibration={"family": "mixture:topic", "n_subsets": 64, "seed": 3},
    requires={"summary_positions": "tail:32", "top_k": 64},
    selected_on=("dev-1", "dev-2"),
)


def test_the_default_is_the_selected_rule_of_its_provenance():
    """Two defaults, each what a build ranks by, and each with the best bound of what was tried, or level with it."""
    protocol = DEFAULT_PROTOCOL
    record = json.loads(files("grasp.predict").joinpath("default.provenance.json").read_text())
    scratch, further = (record["defaults"][name] for name in ("from scratch", "further"))
    arrays = [f"relevance_{kernel}" for kernel in ("pooled", "output_layer", "embedding")]
    for default, last in ((scratch, ("knn",)), (further, ("gradient",))):
        resolved = protocol.resolved_for(artifact_of([*arrays, *(f"relevance_{kernel}" for kernel in last)]))
        assert sorted(resolved.match) == sorted(default["match"])
        assert "ln V; measured at" in default["when"]
    best = max(scratch["best"], key=lambda candidate: candidate["lcb"])
    assert (
        best["protocol"] == "retained | mean | embedding+output_layer (negative x 0.25) | no geometry | mean_relevance"
    )
    assert protocol.negative == 0.25
    assert type(protocol) is ScoringProtocol
    assert protocol.match == "auto"
    assert protocol.resolved_for(artifact_of([*arrays, "relevance_gradient"])).match == further["match"]
    assert set(protocol.selected_on) == {*best["results"], *further["results"]}
    assert set(protocol.selected_on) == set(protocol.selected_runs)
    assert protocol.selection_summary.endswith(", ".join(protocol.selected_on))


def test_a_protocol_records_whether_it_was_selected():
    assert_mentions(ScoringProtocol(name="p").selection_summary, "not selected", "development", "additive")
    assert FULL.selection_summary.endswith("dev-1, dev-2")
    assert "not selected" in FULL.model_copy(update={"selected_on": None}).selection_summary


def test_a_protocol_survives_its_file(tmp_path):
    for protocol in (FULL, DEFAULT_PROTOCOL):
        save_protocol(protocol, tmp_path / "p.yaml")
        assert load_protocol(tmp_path / "p.yaml") == protocol


def test_a_file_without_interactions_has_none(tmp_path):
    """Files that name every setting, as earlier ones do, are read as what they say."""
    same = {"side": "retained", "weighting": "mean", "components": {}, "calibration": {"family": "mixture:topic"}}
    same["standardize"] = {"task": "mean_relevance", "unit": "own_relevance"}
    assert rule(name="p", **same) == ScoringProtocol(name="p")
    assert not rule(name="p", **same | {"side": "omitted"}).is_additive
    averaged = rule(name="p", **same | {"standardize": {"task": "mean_of_standardised"}})
    assert isinstance(averaged, RegisteredProtocol)
    assert averaged.is_additive


@pytest.mark.parametrize(
    ("requested", "kernels", "resolved"),
    [
        ("auto", ("output_layer", "embedding", "pooled"), {"embedding": 1.0, "output_layer": 1.0}),
        ("auto", ("output_layer", "pooled"), {"output_layer": 1.0}),
        ("auto", ("pooled",), {"pooled": 1.0}),
        (
            {"output_layer": 1.0, "pooled": 0.0},
            ("output_layer",),
            {"output_layer": 1.0},
        ),  # of weight 0 it is not needed
        (
            {"output_layer": 1.0, "embedding": 0.5},
            ("output_layer", "embedding"),
            {"output_layer": 1.0, "embedding": 0.5},
        ),
    ],
)
def test_kernels_are_the_requested_or_the_available_default_ones(requested, kernels, resolved):
    chosen = rule(name="p", match=requested, requires={"top_k": 64})
    arrays = [f"relevance_{kernel}" for kernel in kernels]
    assert chosen.resolved_for(artifact_of(arrays, top_k=64, alpha=0.5, tau=7)).match == resolved


def test_additive_methods_are_those_of_the_available_kernels():
    both = additive_methods(["relevance_output_layer", "relevance_embedding", "hidden_sketch"])
    assert list(both) == ["output_layer additive", "embedding additive", "output_layer+embedding additive"]
    assert both["output_layer+embedding additive"].match == {"output_layer": 1.0, "embedding": 1.0}
    assert list(additive_methods(["relevance_pooled", "relevance_knn"])) == ["pooled additive", "knn additive"]


def test_all_mismatches_are_in_one_message():
    names = [name for name in FakeSource().array_names if name not in ("relevance_pooled", "product_sketch")]
    with pytest.raises(ProtocolError) as caught:
        FULL.resolved_for(artifact_of(names, summary_positions="all"))
    assert_mentions(
        str(caught.value),
        "array 'relevance_pooled'",
        "array 'product_sketch'",
        "summary_positions: requires",
        "top_k: requires",
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: p\ncomponents: {joint.pairs: 1}", r"components: unknown \['joint.pairs'\]"),
        ("name: p\ncomponents: {joint.pair: .inf}", "components: .*finite"),
        ("name: p\nmatch: {output_layer: 0}", "match.*auto"),
        ("name: p\nmatch: {output_layer: many}", "match.*output_layer"),
        ("name: p\nmatch: [output_layer]", "match"),
        ("name: p\nside: both", r"side:.*'both'"),
        ("name: p\nweighting: median", "weighting: "),
        ("name: p\nside: omitted\ncalibration: {family: 'halves:1'}", r"calibration\.family: .*unknown"),
        ("name: p\nside: omitted\ncalibration: {n_subsets: 1}", "calibration.n_subsets: "),
        ("name: p\nrequires: {colour: red}", r"requires\.colour: "),
        ("name: p\nomega: {a: 1}", "omega: "),
        ("name: p\nnegative: 1.5", "negative: "),
        ("name: p\nnegative: .nan", "negative: "),
        ("side: retained", "name: missing"),
    ],
)
def test_mistakes_in_a_file_name_the_field(tmp_path, text, message):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ProtocolError, match=message) as caught:
        load_protocol(path)
    assert str(caught.value).startswith(f"protocol {path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_kernel_is_named():
    with pytest.raises(ProtocolError, match=r"'relevance_words'.*'relevance_knn'"):
        rule(name="p", match={"words": 1.0}).resolved_for(artifact_of(["relevance_knn"]))


@pytest.mark.parametrize(("text", "message"), [("- 1", "list.*mapping"), ("name: [", "not YAML"), (None, "no such")])
def test_files_that_are_not_protocols(tmp_path, text, message):
    if text is not None:
        (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_protocol(tmp_path / "p.yaml")


def test_negative_relevance_by_gradients_has_full_weight():
    protocol = rule(name="tried", negative=0.25)
    assert [protocol.negative_factor(kernel) for kernel in ("output_layer", "knn", "gradient")] == [0.25, 0.25, 1.0]
