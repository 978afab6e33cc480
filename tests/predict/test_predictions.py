"""Prediction against the slow way; blocks, holding in memory and side tables change nothing."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csr_array
from scipy.stats import spearmanr

from grasp.errors import ProtocolError, ShapeError, SubsetError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.families import parse_family
from grasp.predict.labels import LabelColumn
from grasp.predict.predictions import predict
from grasp.predict.protocol import ScoringProtocol, default_protocol
from grasp.predict.scorer import CalibrationFamily, Scorer
from tests.predict.source import FakeSource, counted, slow_components

TOPICS = LabelColumn.of([["a", "b", "c", None][i % 4] for i in range(40)])
COMPONENTS = {"joint.pair": -0.25, "hidden.cent": 0.5, "product.raw": -0.1, "residual.self": 0.2}


def protocol(**changes):
    settings = {"name": "p", "match": {"token": 1.0, "input": -0.3, "pooled": 0.5}, "components": COMPONENTS}
    settings["negative"] = 0.5
    return ScoringProtocol(**(settings | {"calibration": {"family": "uniform:0.5", "n_subsets": 12}} | changes))


def subsets(n=6, spelling="bernoulli:0.4", block=256):
    return parse_family(spelling).draw(n, n_rows=40, labels=TOPICS, seed=5, purpose="evaluation", block=block)


def slow_prediction(source, chosen, weights_BN, calibration_BN, target):
    """V-hat of the task and of its units, (B,) and (B, E): every equation written out."""

    def table(rows):
        tables = [slow_components(source, chosen, weights, target, chosen.match) for weights in rows]
        return [t[0] for t in tables], [t[1] for t in tables]

    a, k = table(weights_BN)
    a_cal, k_cal = table(calibration_BN)
    task, unit = 0.0, 0.0
    for kernel, weight in chosen.match.items():
        value, sample = (np.array([x[kernel] for x in part]) for part in (a, a_cal))
        unit = unit + weight * (value - sample.mean(axis=0)) / sample.std(axis=0)
        if chosen.standardize.task == "mean_of_standardised":
            value, sample = value / sample.std(axis=0), sample / sample.std(axis=0)
        value, sample = value.mean(axis=1), sample.mean(axis=1)
        task = task + weight * (value - sample.mean()) / sample.std()
    for name, omega in chosen.components.items():
        value, sample = (np.array([x[name] for x in part]) for part in (k, k_cal))
        z = omega * (value - sample.mean()) / sample.std()
        task, unit = task + z, unit + z[:, None]
    return task, unit


@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
def test_predictions_are_the_equations_written_out(side, weighting, task):
    """With a mixture family, whose moments are all sampled."""
    source = FakeSource()
    chosen = protocol(side=side, weighting=weighting, standardize={"task": task})
    family = CalibrationFamily(parse_family("mixture:topic"), 12, 0, TOPICS)
    got = predict(source, chosen, subsets(block=4), per_unit=True, calibration=family).read().to_pylist()
    weights_BN = np.concatenate([block.weights_BN.toarray() for block in subsets()])
    calibration_BN = np.concatenate([block.weights_BN.toarray() for block in family.blocks(40)])
    for target in source.targets:
        want_task, want_unit = slow_prediction(source, chosen, weights_BN, calibration_BN, target)
        lines = [line for line in got if line["target"] == target]
        task_lines = [line["utility"] for line in lines if line["unit_id"] is None]
        np.testing.assert_allclose(task_lines, want_task, rtol=1e-4, atol=1e-4)
        for e, column in enumerate(source.unit_columns(target)):
            unit_lines = [line["utility"] for line in lines if line["unit_id"] == f"u{column}"]
            np.testing.assert_allclose(unit_lines, want_unit[:, e], rtol=1e-4, atol=1e-4)


def test_what_lies_below_0_can_be_left_out():
    """Unit by unit, before a task takes the mean of its units."""
    source, block = FakeSource(), SubsetBlock(("s",), csr_array(np.ones((1, 40))))
    table = predict(source, protocol(match={"token": 1.0}, components={}, negative=0.0), [block]).read().to_pylist()
    for line in table:
        relevance_NE = source.arrays["relevance_token"][:, source.unit_columns(line["target"])].astype(float)
        assert line["additive_token"] == pytest.approx(np.maximum(relevance_NE, 0).mean(), rel=1e-6)


@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_closed_forms_replace_the_sample(weighting):
    """A and K_self of a uniform family: the exact moments are close to those of a large sample."""
    source, chosen = FakeSource(), protocol(components={"hidden.self": -1.0}, weighting=weighting)
    exact = Scorer.prepare(source, chosen).task.moments
    labels = LabelColumn.of([None] * 40)
    sample = CalibrationFamily(parse_family("mixture:none"), 20, 0, labels)
    assert set(exact) == {"token", "input", "pooled", "hidden.self"}
    assert set(Scorer.prepare(source, chosen, calibration=sample).task.moments) == set(exact)
    a_N = counted(source.arrays["relevance_token"][:, source.unit_columns("sciq")], chosen).mean(axis=1)
    scale = 1.0 if weighting == "count" else 1 / 20
    want = scale * np.sqrt(20 * 20 / 39 * a_N.var())  # k (n - k) / (n - 1) times the population variance
    assert exact["token"].std_E[0] == pytest.approx(want, rel=1e-6)


def test_weighted_subsets_use_the_same_weights_for_a_and_k():
    source, chosen = FakeSource(), protocol(components={"joint.self": -0.5, "joint.raw": 0.3})
    rng = np.random.default_rng(0)
    weights_BN = rng.random((3, 40)) * (rng.random((3, 40)) < 0.5) * 3
    block = SubsetBlock(("x", "y", "z"), csr_array(weights_BN))
    table = predict(source, chosen, [block], components=True).read()
    assert table.column("subset_id").to_pylist() == ["x", "x", "y", "y", "z", "z"]
    for b in range(3):
        unit, geometry = slow_components(source, chosen, weights_BN[b], "boolq", chosen.match)
        line = table.to_pylist()[2 * b + 1]
        assert line["target"] == "boolq"
        assert line["additive_token"] == pytest.approx(np.mean(unit["token"]), rel=1e-5)
        for name, value in geometry.items():
            assert line[f"value_{name}"] == pytest.approx(value, rel=1e-5)


def test_parts_add_up_to_the_utility():
    table = predict(FakeSource(), protocol(), subsets(), components=True).read()
    parts = [table.column(name).to_numpy() for name in table.column_names if name.startswith("part_")]
    assert len(parts) == 3 + len(COMPONENTS)
    np.testing.assert_allclose(np.sum(parts, axis=0), table.column("utility").to_numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("block_rows", [1, 13, 40])
def test_neither_blocks_of_subsets_nor_of_rows_matter(block, block_rows):
    whole = predict(FakeSource(), protocol(), subsets(), per_unit=True).read()
    cut = predict(FakeSource(block_rows=block_rows), protocol(), subsets(block=block), per_unit=True).read()
    keys = [("subset_id", "ascending"), ("target", "ascending"), ("unit_id", "ascending")]
    for name in ("utility", "change", "additive_pooled"):
        np.testing.assert_allclose(
            cut.sort_by(keys).column(name), whole.sort_by(keys).column(name), rtol=1e-4, atol=1e-5
        )


def test_arrays_that_do_not_fit_in_memory_are_streamed(monkeypatch):
    held = predict(FakeSource(), protocol(), subsets(), per_unit=True).read()
    monkeypatch.setattr("grasp.predict.source.HELD_BYTES", 0)
    source = FakeSource()
    streamed = predict(source, protocol(), subsets(block=3), per_unit=True).read()
    assert source.passes["hidden_sketch"] > FakeSource().passes["hidden_sketch"] + 2
    keys = [("subset_id", "ascending"), ("target", "ascending"), ("unit_id", "ascending")]
    np.testing.assert_allclose(
        streamed.sort_by(keys).column("utility"), held.sort_by(keys).column("utility"), rtol=1e-4, atol=1e-5
    )


def test_the_additive_core_reads_no_sketch_and_relevance_once():
    source = FakeSource()
    predict(source, default_protocol(), subsets(20, block=2)).read()
    assert source.passes == {name: int(name in ("relevance_token", "relevance_input")) for name in source.arrays}


def test_change_is_against_the_whole_corpus():
    whole = SubsetBlock(("all",), csr_array(np.ones((1, 40))))
    for side in ("retained", "omitted"):
        table = predict(FakeSource(), protocol(side=side), [whole], per_unit=True).read()
        np.testing.assert_allclose(table.column("change"), 0.0, atol=2e-5)


def test_the_order_of_subsets_is_that_of_their_additive_value_without_geometry():
    additive = ScoringProtocol(name="p", match={"token": 1.0})
    table = predict(FakeSource(), additive, subsets(50), targets=["boolq"]).read()
    assert spearmanr(table.column("utility"), table.column("additive_token")).statistic == pytest.approx(1.0)
    assert set(table.column("target").to_pylist()) == {"boolq"}


def test_the_table_says_what_its_numbers_are(tmp_path):
    predictions = predict(FakeSource(), protocol(), subsets(3))
    assert predictions.write(tmp_path / "p.parquet") == 6
    metadata = {k.decode(): v.decode() for k, v in pq.read_schema(tmp_path / "p.parquet").metadata.items()}
    assert metadata["grasp.unit.utility"] == "standard deviations of A over the calibration family; higher is better"
    assert metadata["grasp.calibration"] == "uniform:0.5, 12 subsets, seed 0"
    assert metadata["grasp.provenance"] == "not selected on development environments"
    assert pq.read_table(tmp_path / "p.parquet").column_names == [
        "subset_id",
        "target",
        "utility",
        "change",
        "additive_token",
        "additive_input",
        "additive_pooled",
    ]


def test_components_that_do_not_vary_are_dropped_and_said_so():
    source = FakeSource()
    source.arrays["hidden_sketch"][:] = np.array([1.0, 0, 0, 0])  # every row alike: K_self is a constant
    chosen = protocol(components={"hidden.self": -5.0}, weighting="count", match={"token": 1.0})
    predictions = predict(source, chosen, subsets())
    assert predictions.metadata["grasp.dropped"] == "hidden.self"
    plain = predict(source, chosen.model_copy(update={"components": {}}), subsets()).read()
    assert predictions.read().column("utility").equals(plain.column("utility"))


def test_refusals():
    with pytest.raises(ProtocolError, match=r"targets: got \['sci'\], the artifact has \['sciq', 'boolq'\]"):
        predict(FakeSource(), protocol(), subsets(), targets=["sci"])
    with pytest.raises(SubsetError, match="needs the label 'topic' of every row, got none"):
        predict(FakeSource(), protocol(calibration={"family": "mixture:topic"}), subsets())
    with pytest.raises(ShapeError, match="subsets over 3 rows for an artifact of 40"):
        predict(FakeSource(), protocol(), [SubsetBlock(("s",), csr_array(np.ones((1, 3))))]).read()
    with pytest.raises(ProtocolError, match="requires 'all', the artifact was built with 'tail:32'"):
        predict(FakeSource(), protocol(requires={"pooling": "all"}), subsets())
