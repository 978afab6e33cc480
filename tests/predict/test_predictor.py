"""The one predictor: the equations written out, the laws of the scale, marginal gains, planted and null worlds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.stats import spearmanr

from grasp.artifact.label_table import LabelColumn
from grasp.errors import ProtocolError, SubsetError
from grasp.paper.protocol import InteractionProtocol
from grasp.paper.subset_sums import WeightSums, subset_relevance
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.families import parse_family
from grasp.predict.predictor import EFFECT_SIZE, NEW_ROW_VALUE, Predictor, RepetitionLaw
from grasp.predict.weights import Weights
from tests.mentions import assert_mentions
from tests.predict.reference import summed
from tests.predict.source import FakeSource, downweight_negative, slow_components
from tests.rounding import rounding
from tests.rules import rule

TOPICS = [["a", "b", "c", None][i % 4] for i in range(40)]
CODES = np.arange(40) % 4
EACH = Weights.from_slices(CODES, 4)
COMPONENTS = {"joint.pair": -0.25, "hidden.cent": 0.5, "product.raw": -0.1, "residual.self": 0.2}
seeds = st.integers(0, 10_000)


def plain_settings(**changes):
    return {"name": "p", "match": {"output_layer": 1.0, "embedding": -0.3, "pooled": 0.5}, "negative": 0.5} | changes


def protocol(**changes):
    return rule(**plain_settings(**changes))


def plain_subsets(n=6):
    (block,) = parse_family("bernoulli:0.4").draw(n, n_rows=40, seed=5, purpose="evaluation")
    return block.weights


def slow_effects(source, chosen, target, task_standard="mean_relevance"):
    """sum over kernels of weight x standardised relevance of every row, standardised again; (N,) and (N, E)."""
    kernels = {
        kernel: downweight_negative(source.arrays[f"relevance_{kernel}"][:, source.unit_columns(target)], chosen)
        for kernel in chosen.match
    }
    task, unit = 0.0, 0.0
    for kernel, weight in chosen.match.items():
        a_NE = kernels[kernel]
        unit = unit + weight * (a_NE - a_NE.mean(axis=0)) / a_NE.std(axis=0)
        if task_standard == "mean_of_standardised":
            a_NE = a_NE / a_NE.std(axis=0)
        a_N = a_NE.mean(axis=1)
        task = task + weight * (a_N - a_N.mean()) / a_N.std()
    return task / task.std(), unit / unit.std(axis=0)


@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
def test_an_effect_equals_the_equation_and_a_change_its_weighted_mean(task):
    source, chosen = FakeSource(), protocol(standardize={"task": task})
    predictor = Predictor.from_artifact(source, chosen, per_unit=True)
    entries_BN = plain_subsets().csr() * 2.0
    entries_BN.data *= np.random.default_rng(0).random(entries_BN.nnz)
    weights = Weights(entries_BN)
    sums = predictor.sums(weights)
    change_BT, change_BE = predictor.change_of(sums), predictor.unit_change(weights, sums)
    first = 0
    for t, target in enumerate(source.targets):
        task_N, unit_NE = slow_effects(source, chosen, target, task)
        np.testing.assert_allclose(predictor.effect_NT[:, t], task_N, rtol=0, atol=rounding(40, task_N))
        dense_BN = entries_BN.toarray()
        size_B1 = (dense_BN > 0).sum(axis=1, keepdims=True)
        effective_BN = RepetitionLaw()(dense_BN * size_B1 / dense_BN.sum(axis=1, keepdims=True)) / size_B1
        lost_B = NEW_ROW_VALUE * (1 - effective_BN.sum(axis=1))
        assert lost_B.min() > 0.001
        actual_BE, close = change_BE[:, first : first + unit_NE.shape[1]], rounding(40, unit_NE)
        np.testing.assert_allclose(change_BT[:, t], effective_BN @ task_N - lost_B, rtol=0, atol=close)
        lost_B1 = lost_B[:, None] * unit_NE.mean(axis=1).std()  # a task's effect in that of its units
        np.testing.assert_allclose(actual_BE, effective_BN @ unit_NE - lost_B1, rtol=0, atol=close)
        first += unit_NE.shape[1]
    assert predictor.unit == EFFECT_SIZE


@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
def test_with_geometry_changes_are_those_of_the_sum_of_z_scores_over_the_family(side, weighting, task):
    """With a mixture family, whose moments are all sampled; for plain subsets, up to the level of the corpus."""
    source = FakeSource(columns={"topic": TOPICS})
    calibration = {"family": "mixture:topic", "n_subsets": 12}
    options = {"side": side, "weighting": weighting, "standardize": {"task": task}}
    chosen = protocol(components=COMPONENTS, calibration=calibration, **options)
    predictor = Predictor.from_artifact(source, chosen, per_unit=True)
    weights = plain_subsets()
    labels = LabelColumn.from_values(TOPICS)
    drawn = parse_family("mixture:topic").draw(12, n_rows=40, labels=labels, seed=0, purpose="calibration")
    family_BN = np.concatenate([block.weights_BN.toarray() for block in drawn])
    sums = predictor.sums(weights)
    task_BT, unit_BE = centred(predictor.change_of(sums)), centred(predictor.unit_change(weights, sums))
    first = 0
    for t, target in enumerate(source.targets):
        want_B, want_BE = slow_levels(source, chosen, weights.csr().toarray(), family_BN, target)
        actual_BE = unit_BE[:, first : first + want_BE.shape[1]]
        np.testing.assert_allclose(task_BT[:, t], centred(want_B), rtol=0, atol=rounding(40, want_BE))
        np.testing.assert_allclose(actual_BE, centred(want_BE), rtol=0, atol=rounding(40, want_BE))
        first += want_BE.shape[1]
    assert_mentions(predictor.unit, "standard deviations", "mixture:topic", "12 subsets", "seed 0")


def centred(level_B):
    """Subtract the mean over the subsets."""
    return level_B - level_B.mean(axis=0)


def slow_levels(source, chosen, weights_BN, family_BN, target):
    """V-hat of the task and of its units, (B,) and (B, E): every equation written out."""

    def table(rows):
        tables = [slow_components(source, chosen, weights, target, chosen.match) for weights in rows]
        return [t[0] for t in tables], [t[1] for t in tables]

    (a, k), (a_family, k_family) = table(weights_BN), table(family_BN)
    task, unit = 0.0, 0.0
    for kernel, weight in chosen.match.items():
        value, sample = (np.array([x[kernel] for x in part]) for part in (a, a_family))
        unit = unit + weight * (value - sample.mean(axis=0)) / sample.std(axis=0)
        if chosen.standardize.task == "mean_of_standardised":
            value, sample = value / sample.std(axis=0), sample / sample.std(axis=0)
        value, sample = value.mean(axis=1), sample.mean(axis=1)
        task = task + weight * (value - sample.mean()) / sample.std()
    for name, omega in chosen.components.items():
        value, sample = (np.array([x[name] for x in part]) for part in (k, k_family))
        z = omega * (value - sample.mean()) / sample.std()
        task, unit = task + z, unit + z[:, None]
    return task, unit


# ------------------------------------------------------------------------------------------------ the scale


@pytest.mark.parametrize("components", [{}, COMPONENTS])
@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_the_whole_corpus_has_change_zero(components, side, weighting):
    chosen = InteractionProtocol(**plain_settings(components=components, side=side, weighting=weighting))
    predictor = Predictor.from_artifact(FakeSource(), chosen, per_unit=True)
    everything = Weights(csr_array(np.ones((1, 40))))
    sums = predictor.sums(everything)
    close = rounding(40, predictor.effect_NT)
    np.testing.assert_allclose(predictor.change_of(sums), 0.0, atol=close)
    np.testing.assert_allclose(predictor.change_of(predictor.reweighted(sums, 1.0)), 0.0, atol=1e-9)
    np.testing.assert_allclose(predictor.unit_change(everything, sums), 0.0, atol=close)


@given(seed=seeds, share=st.floats(0.05, 0.95))
@settings(max_examples=30)
def test_a_slice_is_explained_by_its_mean_effect(seed, share):
    """Dropping a share p of the rows with the mean effect m changes -p / (1 - p) m; doubling it p / (1 + p) m.

    But for what repetition takes of the doubled rows, and of both in a training that reads them often.
    """
    predictor = Predictor.from_artifact(FakeSource(), DEFAULT_PROTOCOL)
    rows = np.random.default_rng(seed).choice(40, max(1, round(share * 40)), replace=False)
    weights_BN = np.ones((2, 40))
    weights_BN[0, rows], weights_BN[1, rows] = 0.0, 2.0
    p, m_T = len(rows) / 40, predictor.effect_NT[rows].mean(axis=0)
    change_BT = predictor.change(Weights(csr_array(weights_BN)))
    close = rounding(40, predictor.effect_NT)
    np.testing.assert_allclose(change_BT[0], -p / (1 - p) * m_T, rtol=0, atol=close * max(1.0, p / (1 - p)))
    once, twice = 1 / (1 + p), float(RepetitionLaw()(2 / (1 + p)))
    want_T = p * twice * (m_T + NEW_ROW_VALUE) + (1 - p) * once * (NEW_ROW_VALUE - p / (1 - p) * m_T) - NEW_ROW_VALUE
    np.testing.assert_allclose(change_BT[1], want_T, rtol=0, atol=2 * close)
    np.testing.assert_allclose(change_BT[1], p / (1 + p) * m_T, rtol=0.1, atol=0.03)
    longer = Predictor.from_artifact(FakeSource(), DEFAULT_PROTOCOL, repetition_law=RepetitionLaw(2.0))
    left = longer.change(Weights(csr_array(weights_BN))) - change_BT
    once = RepetitionLaw(2.0)(1 / (1 - p)) * (1 - p)
    np.testing.assert_allclose(
        left[0], (once - 1) * (change_BT[0] + NEW_ROW_VALUE), rtol=0, atol=close * max(1.0, p / (1 - p))
    )


def test_changes_do_not_depend_on_the_scale_of_relevance():
    source, larger = FakeSource(), FakeSource()
    for name in ("relevance_output_layer", "relevance_embedding"):
        larger.arrays[name] = source.arrays[name] * 1e3
    effects = [Predictor.from_artifact(item, DEFAULT_PROTOCOL).effect_NT for item in (source, larger)]
    close = rounding(40, effects[0])
    np.testing.assert_allclose(effects[0], effects[1], rtol=0, atol=close)
    np.testing.assert_allclose(effects[0].mean(axis=0), 0.0, atol=close)
    np.testing.assert_allclose(effects[0].std(axis=0), 1.0, rtol=0, atol=close)


@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_additive_retained_is_a_constant_minus_omitted(weighting):
    """What the rows kept and the rows left out say of a plain subset: the same for sums, with shares for means."""
    source, weights = FakeSource(), plain_subsets()
    retained, left = (
        Predictor.from_artifact(source, protocol(side=side, weighting=weighting)).change(weights)
        for side in ("retained", "omitted")
    )
    share_B = weights.sums / 40
    ratio_B = np.ones(6) if weighting == "count" else (1 - share_B) / share_B
    np.testing.assert_allclose(retained, ratio_B[:, None] * left, rtol=0, atol=rounding(40, retained))


@pytest.mark.parametrize("block_rows", [1, 13, 40])
@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_predictions_do_not_depend_on_blocks_or_caching(block_rows, held_bytes, monkeypatch):
    chosen, weights = protocol(components=COMPONENTS), plain_subsets()

    def predicted(source):
        predictor = Predictor.from_artifact(source, chosen, per_unit=True)
        sums = predictor.sums(weights)
        return predictor.change_of(sums), predictor.unit_change(weights, sums)

    want = predicted(FakeSource())
    monkeypatch.setattr("grasp.predict.weights.IN_MEMORY_BYTES", held_bytes)
    for item, other in zip(want, predicted(FakeSource(block_rows=block_rows)), strict=True):
        np.testing.assert_allclose(item, other, rtol=0, atol=rounding(40, item))


def test_additive_prediction_reads_relevance_once_and_no_sketch():
    source = FakeSource()
    predictor = Predictor.from_artifact(source, DEFAULT_PROTOCOL)
    for _ in range(3):
        predictor.change(plain_subsets())
    assert source.passes == {
        name: int(name in ("relevance_output_layer", "relevance_embedding")) for name in source.arrays
    }


@pytest.mark.parametrize("components", [{}, COMPONENTS])
def test_shares_of_slices_are_weights_of_their_rows(components):
    predictor = Predictor.from_artifact(FakeSource(), protocol(components=components))
    share_BG = np.random.default_rng(0).random((5, 4)) * 2
    by_slice, close = predictor.change(EACH.mixed(share_BG)), rounding(40, predictor.effect_NT)
    np.testing.assert_allclose(by_slice, predictor.change(Weights(csr_array(share_BG[:, CODES]))), rtol=0, atol=close)
    slices = predictor.sums(EACH)
    dropped = predictor.change_of(predictor.reweighted(slices, 0.0))
    np.testing.assert_allclose(dropped, predictor.change(EACH.mixed(1.0 - np.eye(4))), rtol=0, atol=close)
    doubled = predictor.change_of(predictor.reweighted(slices, 2.0))
    np.testing.assert_allclose(doubled, predictor.change(EACH.mixed(1.0 + np.eye(4))), rtol=0, atol=close)


def test_components_without_variance_contribute_nothing_and_are_named():
    source = FakeSource()
    source.arrays["hidden_sketch"][:] = np.array([1.0, 0, 0, 0])  # every row alike: K_self is a constant
    source.arrays["relevance_embedding"][:] = 2.0
    chosen = protocol(
        components={"hidden.self": -5.0}, match={"output_layer": 1.0, "embedding": 1.0}, weighting="count"
    )
    predictor = Predictor.from_artifact(source, chosen)
    additive = Predictor.from_artifact(source, protocol(match={"output_layer": 1.0}))
    assert predictor.dropped == ("embedding", "hidden.self")
    assert Predictor.from_artifact(source, protocol(match={"output_layer": 1.0, "embedding": 1.0})).dropped == (
        "embedding",
    )
    both = Predictor.from_artifact(source, protocol(match={"output_layer": 1.0, "embedding": 1.0}))
    np.testing.assert_allclose(both.effect_NT, additive.effect_NT, rtol=0, atol=rounding(40, additive.effect_NT))


@pytest.mark.parametrize(
    ("changes", "targets", "error", "message"),
    [
        ({}, ["sci"], ProtocolError, r"target: .*\['sci'\].*'sciq'"),
        (
            {"requires": {"summary_positions": "all"}},
            None,
            ProtocolError,
            "requires 'all'",
        ),
        ({"components": COMPONENTS, "calibration": {"family": "mixture:topic"}}, None, SubsetError, "column 'topic'"),
    ],
)
def test_artifacts_that_cannot_serve_the_rule_are_refused(changes, targets, error, message):
    with pytest.raises(error, match=message):
        Predictor.from_artifact(FakeSource(), protocol(**changes), targets)


# ---------------------------------------------------------------------------------------------------- worlds


class QuadraticWorld(FakeSource):
    """U(S) = <g, x_S> - lambda ||x_S||^2 with x_S the sum of the rows' updates: known, and not additive."""

    penalty = 0.02

    @classmethod
    def build(cls, seed=0, n_rows=60, width=6, *, redundancy=3.0):
        rng = np.random.default_rng(seed)
        centre_GD = rng.standard_normal((4, width)) * redundancy
        update_ND = centre_GD[rng.integers(0, 4, n_rows)] + rng.standard_normal((n_rows, width))
        gradient_D = rng.standard_normal(width)
        arrays = {"relevance_output_layer": (update_ND @ gradient_D)[:, None], "product_sketch": update_ND}
        arrays = {name: array.astype("f4") for name, array in arrays.items()}
        return cls(n_rows=n_rows, arrays=arrays, unit_targets=("t",))

    def utility(self, weights_BN):
        total_BD = weights_BN @ self.arrays["product_sketch"].astype(float)
        return weights_BN @ self.arrays["relevance_output_layer"][:, 0] - self.penalty * (total_BD**2).sum(axis=1)


@pytest.mark.parametrize("spelling", ["uniform:0.5", "bernoulli:0.3"])
def test_planted_world_full_grasp_ranks_perfectly_and_the_additive_core_cannot(spelling):
    world, family = QuadraticWorld.build(), parse_family(spelling)
    options = {"name": "p", "match": {"output_layer": 1.0}, "weighting": "count", "calibration": {"family": spelling}}
    trial = Predictor.from_artifact(world, rule(**options, components={"product.raw": 1.0}))
    # z(A) + omega z(K) is (A - lambda K) / sigma_A up to a constant when omega = -lambda sigma_K / sigma_A
    sigma_a = trial.task.raw_mean_std.std_C[0] ** -1 * world.arrays["relevance_output_layer"].astype(float).std()
    omega = -world.penalty * float(trial.terms.mean_std["product.raw"].std_C[0]) / sigma_a
    full = Predictor.from_artifact(world, rule(**options, components={"product.raw": omega}))
    additive = Predictor.from_artifact(world, rule(**options))
    (block,) = family.draw(128, n_rows=60, seed=0, purpose="evaluation")
    truth_B = world.utility(block.weights_BN)
    assert spearmanr(full.change(block.weights)[:, 0], truth_B).statistic == pytest.approx(1.0, abs=1e-4)
    assert spearmanr(additive.change(block.weights)[:, 0], truth_B).statistic < 0.9


def test_null_world_stays_in_its_band():
    """Relevance that knows nothing: rho of 200 subsets is within 3.5 / sqrt(199) of 0, over 20 worlds its mean too."""
    rhos = []
    family = parse_family("uniform:0.5")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        relevance_N, truth_N = rng.standard_normal((2, 300))
        world = FakeSource(
            n_rows=300, arrays={"relevance_output_layer": relevance_N[:, None].astype("f4")}, unit_targets=("t",)
        )
        (block,) = family.draw(200, n_rows=300, seed=seed, purpose="null")
        change_B = Predictor.from_artifact(world, DEFAULT_PROTOCOL).change(block.weights)[:, 0]
        rhos.append(spearmanr(change_B, block.weights_BN @ truth_N).statistic)
    # predicted and true sums share their subsets, so single worlds scatter as the rows' own correlation does
    assert max(abs(rho) for rho in rhos) < 3.5 * np.sqrt(1 / 199 + 1 / 299)
    assert abs(np.mean(rhos)) < 3.5 * np.sqrt((1 / 199 + 1 / 299) / 20)


@given(seed=seeds, error=st.floats(0.01, 1.0))
def test_pairs_are_ranked_right_where_the_gap_exceeds_the_error(seed, error):
    rng = np.random.default_rng(seed)
    truth_B = rng.standard_normal(12)
    predicted_B = truth_B + rng.uniform(-error, error, 12)
    i, j = np.triu_indices(12, 1)
    gap = abs(truth_B[i] - truth_B[j])
    right = (truth_B[i] - truth_B[j]) * (predicted_B[i] - predicted_B[j]) > 0
    stable = abs((predicted_B - truth_B)[i] - (predicted_B - truth_B)[j]) < gap
    assert right[stable].all()
    assert right.mean() >= (gap > 2 * error).mean()


def test_omitted_scores_rank_as_retained_ones_only_without_geometry():
    rng = np.random.default_rng(3)
    relevance_NE, sketch_ND = rng.standard_normal((40, 1)), rng.standard_normal((40, 3)) + 2
    (block,) = parse_family("bernoulli:0.5").draw(50, n_rows=40, seed=0, purpose="t")
    sums, totals, weight_sums = summed(block.weights_BN, sketch_ND)
    a = {
        side: subset_relevance(
            block.weights_BN @ relevance_NE,
            relevance_NE.sum(axis=0),
            WeightSums.from_weights(block.weights),
            side,
            "count",
        )[:, 0]
        for side in ("retained", "omitted")
    }
    k = {side: sums.geometry(weight_sums, totals, side, "count")["raw"] for side in a}
    assert spearmanr(a["retained"], a["omitted"]).statistic == pytest.approx(1.0)
    assert spearmanr(k["retained"], k["omitted"]).statistic < 0
