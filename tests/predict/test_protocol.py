"""The protocol file: what it says is what is kept; everything that does not fit is named at once."""

import json
from importlib.resources import files

import pytest
from pydantic import ValidationError

from grasp.errors import ProtocolError
from grasp.predict.protocol import ScoringProtocol, default_protocol, load_protocol, save_protocol
from grasp.verbs.evaluate import additive_methods
from tests.predict.source import FakeSource
from tests.rules import rule

FULL = rule(
    name="full",
    side="omitted",
    weighting="count",
    match={"token": 1.0, "pooled": 0.5},
    negative=0.25,
    components={"joint.pair": -0.25, "product.self": 0.1},
    standardize={"task": "mean_of_standardised"},
    calibration={"family": "mixture:topic", "n_subsets": 64, "seed": 3},
    requires={"pooling": "tail:32", "top_k": 64},
    selected_on=("dev-1", "dev-2"),
)


def test_the_default_is_what_its_provenance_says_was_selected():
    """Three defaults, each what a build ranks by, and each with the best bound of what was tried, or level with it."""
    protocol = default_protocol()
    record = json.loads(files("grasp.predict").joinpath("default.provenance.json").read_text())
    scratch, tuned, further = (record["defaults"][name] for name in ("from scratch", "fine-tuned", "further"))
    arrays = [f"relevance_{kernel}" for kernel in ("pooled", "token", "input")]
    for default, last in ((scratch, ("neighbour",)), (tuned, ("shift", "tilt")), (further, ("gradient",))):
        fitted = protocol.fitted([*arrays, *(f"relevance_{kernel}" for kernel in last)], {})
        assert sorted(fitted.match) == sorted(default["match"])
        assert "ln V; measured at" in default["when"]
    best = max(scratch["best"], key=lambda one: one["lcb"])
    assert best["protocol"] == "retained | mean | input+token (negative x 0.25) | no geometry | mean_relevance"
    assert max(tuned["best"], key=lambda one: one["lcb"])["match"] == tuned["match"]
    assert protocol.negative == 0.25
    assert type(protocol) is ScoringProtocol
    assert protocol.match == "auto"
    assert protocol.fitted([*arrays, "relevance_gradient"], {}).match == further["match"]
    assert set(tuned["results"]) <= set(further["results"])
    assert set(protocol.selected_on) == {*best["results"], *further["results"]}
    assert set(protocol.selected_on) == set(protocol.selected_runs)
    assert protocol.provenance == f"selected on {', '.join(protocol.selected_on)}"


def test_a_protocol_says_whether_it_was_selected():
    assert ScoringProtocol(name="p").provenance == "not selected on development environments: additive core"
    assert FULL.provenance == "selected on dev-1, dev-2"
    assert FULL.model_copy(update={"selected_on": None}).provenance == "not selected on development environments"


def test_a_protocol_survives_its_file(tmp_path):
    for protocol in (FULL, default_protocol()):
        save_protocol(protocol, tmp_path / "p.yaml")
        assert load_protocol(tmp_path / "p.yaml") == protocol


def test_what_says_nothing_of_interactions_is_no_interaction(tmp_path):
    """Files that name every setting, as earlier ones do, are read as what they say."""
    same = {"side": "retained", "weighting": "mean", "components": {}, "calibration": {"family": "mixture:topic"}}
    same["standardize"] = {"task": "mean_relevance", "unit": "own_relevance"}
    assert rule(name="p", **same) == ScoringProtocol(name="p")
    assert rule(name="p", **same | {"side": "omitted"}).interacts
    averaged = rule(name="p", **same | {"standardize": {"task": "mean_of_standardised"}})
    assert (averaged.beside, averaged.interacts) == (True, False)


def test_a_protocol_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        FULL.side = "retained"


@pytest.mark.parametrize("negative", [-0.1, 1.5, float("nan")])
def test_a_weight_of_what_lies_below_0_is_between_0_and_1(negative, tmp_path):
    (tmp_path / "p.yaml").write_text(json.dumps({"name": "p", "negative": negative}))
    with pytest.raises(ProtocolError, match=r"negative: "):
        load_protocol(tmp_path / "p.yaml")


def test_auto_takes_token_and_input_where_they_are_there():
    protocol = rule(name="p")
    every = ["relevance_token", "relevance_input", "relevance_pooled"]
    assert protocol.fitted(every, {}).match == {"input": 1.0, "token": 1.0}
    assert protocol.fitted(["relevance_token", "relevance_pooled"], {}).match == {"token": 1.0}
    assert protocol.fitted(["relevance_pooled"], {}).match == {"pooled": 1.0}


def test_kernels_of_weight_zero_are_not_needed():
    protocol = rule(name="p", match={"token": 1.0, "pooled": 0.0})
    assert protocol.fitted(["relevance_token"], {}).match == {"token": 1.0}


def test_an_artifact_from_before_a_kernel_is_told_what_it_lacks():
    protocol = rule(name="p", match={"token": 1.0, "input": 0.5})
    assert protocol.fitted(["relevance_token", "relevance_input"], {}).match == {"token": 1.0, "input": 0.5}
    with pytest.raises(ProtocolError, match=r"needs array 'relevance_input', the artifact has \['relevance_token'\]"):
        protocol.fitted(["relevance_token"], {})
    both = additive_methods(["relevance_token", "relevance_input", "hidden_sketch"])
    assert list(both) == ["token additive", "input additive", "token+input additive"]
    assert both["token+input additive"].match == {"token": 1.0, "input": 1.0}
    assert list(additive_methods(["relevance_token", "relevance_pooled"])) == [
        "token additive",
        "pooled additive",
        "both additive",
    ]


def test_all_mismatches_come_in_one_message():
    source = FakeSource(feature_settings={"pooling": "all"})
    names = [name for name in source.array_names if name not in ("relevance_pooled", "product_sketch")]
    with pytest.raises(ProtocolError) as caught:
        FULL.fitted(names, source.feature_settings)
    message = str(caught.value)
    assert message.startswith("protocol 'full' does not fit the artifact: needs array 'relevance_pooled'")
    for part in (
        "needs array 'product_sketch', the artifact has ['hidden_sketch'",
        "features.pooling: requires 'tail:32', the artifact was built with 'all'",
        "features.top_k: requires 64, the artifact was built with None",
        "build an artifact with these settings, or choose another protocol",
    ):
        assert part in message
    assert "\n" not in message


def test_requirements_that_are_not_named_may_be_anything():
    protocol = rule(name="p", requires={"top_k": 64})
    protocol.fitted(["relevance_token"], {"top_k": 64, "alpha": 0.5, "tau": 7})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("components: {joint.pairs: 1}", r"components: unknown \['joint.pairs'\]; expected one of hidden\|residual"),
        ("components: {joint.pair: .inf}", "components: weights must be finite"),
        ("match: {token: 0}", "match.*expected auto, or at least one kernel"),
        ("match: {words: 1}", "match"),
        ("side: both", "side: Input should be 'retained' or 'omitted', got 'both'"),
        ("weighting: median", "weighting: Input should be 'count' or 'mean'"),
        ("side: omitted\ncalibration: {family: 'halves:1'}", "calibration.family: family 'halves:1': unknown kind"),
        (
            "side: omitted\ncalibration: {n_subsets: 1}",
            "calibration.n_subsets: Input should be greater than or equal to 2",
        ),
        ("requires: {colour: red}", "requires.colour: no such field"),
        ("omega: {a: 1}", "omega: no such field"),
    ],
)
def test_mistakes_in_a_file_name_the_field(tmp_path, change, message):
    path = tmp_path / "p.yaml"
    path.write_text(f"name: p\n{change}\n")
    with pytest.raises(ProtocolError, match=message) as caught:
        load_protocol(path)
    assert str(caught.value).startswith(f"protocol {path}: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_not_protocols(tmp_path):
    with pytest.raises(ProtocolError, match="no such settings file"):
        load_protocol(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ProtocolError, match="got list, expected a mapping"):
        load_protocol(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("name: [")
    with pytest.raises(ProtocolError, match="not YAML"):
        load_protocol(tmp_path / "bad.yaml")
    (tmp_path / "nameless.yaml").write_text("side: retained")
    with pytest.raises(ProtocolError, match="name: missing"):
        load_protocol(tmp_path / "nameless.yaml")


def test_negative_relevance_by_gradients_counts_whole():
    protocol = rule(name="tried", negative=0.25)
    assert [protocol.negative_of(kernel) for kernel in ("token", "tilt", "gradient")] == [0.25, 0.25, 1.0]
