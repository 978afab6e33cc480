"""Laws: the planted protocol wins, ties go to the simpler one, held-out results cannot come in, the file says all."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from grasp.errors import ProtocolError, ProtocolLeakError
from grasp.paper.agreement import standard_errors
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.paper.candidates import (
    CONTROLS,
    Candidate,
    ComponentSettings,
    ProtocolFamily,
    default_family,
    load_family,
)
from grasp.paper.development_runs import Development
from grasp.paper.protocol import CalibrationSettings
from grasp.paper.protocol_selection import (
    freeze,
    provenance_path,
    select_protocol,
    selection_provenance,
    write_provenance,
)
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import load_protocol, save_protocol
from grasp.predict.subset_tables import RowIndex
from grasp.runs.evaluation import evaluate_predictions
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import FamilyInfo, TargetInfo
from tests.predict.source import FakeSource
from tests.rounding import rounding
from tests.rules import candidate_of
from tests.runs.worlds import info

N_ROWS = 40
ROWS = RowIndex.from_ids([f"r{i}" for i in range(N_ROWS)])
FAMILY = parse_family("bernoulli:0.6")
TRUE = Candidate(
    ComponentSettings("retained", "mean", "mean_relevance"), (("output_layer", 1.0),), (("joint.pair", -0.5),)
)
SMALL = ProtocolFamily(components=((), ("joint.pair",), ("joint.self",)), omegas=(-0.5, 0.5))


def blocks(n_subsets=40):
    return tuple(FAMILY.draw(n_subsets, n_rows=N_ROWS, seed=0, purpose="evaluation", block=16))


def candidate_predictor(environment, source):
    return CandidatePredictor(
        runs=environment,
        source=source,
        run_targets={"sciq": "sciq", "boolq": "boolq"},
        blocks=blocks(len(environment.subset_ids)),
        calibration=CalibrationSettings(family=str(FAMILY), n_subsets=64),
    )


def make_environment(path, source, *, truth=TRUE, noise=0.05, n_subsets=40, role="dev", held_out=()):
    """Write runs whose utilities are the predictions of `truth` for every unit, plus noise."""
    targets = {
        name: TargetInfo(
            fingerprint=name, loss_on="completion", unit_ids=tuple(f"u{e}" for e in source.unit_columns(name))
        )
        for name in ("sciq", "boolq")
    }
    family = FamilyInfo(spec=str(FAMILY), seed=0, purpose="evaluation")
    fields = {"role": role, "held_out_targets": held_out, "n_rows": N_ROWS, "targets": targets, "family": family}
    environment = RetrainedRuns.create(path, info(**fields, reference=False), blocks(n_subsets), ROWS)
    parts = candidate_predictor(environment, source).component_values([truth], ("sciq", "boolq"), per_unit=True)[
        truth.settings
    ]
    task_BT = parts.predict_tasks(truth)
    rng = np.random.default_rng(1)
    for run in environment.pending():
        b = environment.subset_ids.index(run.subset_id)
        utility = np.concatenate(
            [np.full(len(item.unit_ids), task_BT[b, t]) for t, item in enumerate(targets.values())]
        )
        environment.write_run(run, utility + noise * rng.normal(size=len(utility)))
    environment.compact()
    return environment


@pytest.fixture
def source():
    source = FakeSource(N_ROWS)
    widths = {name: SimpleNamespace(width=array.shape[1]) for name, array in source.arrays.items()}
    source.manifest = SimpleNamespace(fingerprints={"model": "m"}, arrays=widths, details={})
    return source


@pytest.fixture
def development(tmp_path, source):
    environment = make_environment(tmp_path / "dev", source)
    return Development(environment, ("sciq", "boolq"), candidate_predictor(environment, source))


def test_the_planted_protocol_wins(development):
    result = select_protocol(SMALL, [development], resamples=100)
    assert result.best.candidate == TRUE
    assert result.best.mean > 0.98
    additive = dataclasses.replace(TRUE, components=())
    assert next(s for s in result.scores if s.candidate == additive).mean < result.best.mean - 0.02
    assert result.results == ("dev/sciq", "dev/boolq")


def test_every_score_is_rho_and_the_bound_is_the_formula(development):
    actual = select_protocol(SMALL, [development], resamples=200)
    members, skipped = SMALL.members(FakeSource().array_names)
    assert (len(actual.scores), len(members), skipped) == (15, 15, 0)
    assert actual.z == pytest.approx(stats.norm.ppf(1 - 0.05 / 15))
    scorer = development.predictor
    realized = development.runs.utilities()
    for score in actual.scores:
        assert score.lcb == pytest.approx(score.mean - actual.z * score.se)
        assert score.mean == pytest.approx(np.mean(list(score.agreement.values())))
        parts = scorer.component_values([score.candidate], ("sciq", "boolq"))[score.candidate.settings]
        for t, target in enumerate(("sciq", "boolq")):
            utility = realized.select(target).values_BSE.mean(axis=(1, 2))
            expected = stats.spearmanr(parts.predict_tasks(score.candidate)[:, t], utility).statistic
            assert score.agreement[f"dev/{target}"] == pytest.approx(expected, abs=1e-6)
    assert [s.lcb for s in actual.scores] == sorted((s.lcb for s in actual.scores), reverse=True)


def test_the_criterion_may_be_the_mean_over_units(development):
    family = SMALL.model_copy(update={"criterion": "mean_lds", "components": ((), ("joint.pair",))})
    actual = select_protocol(family, [development], resamples=50)
    assert actual.best.candidate == TRUE
    realized = development.runs.utilities()
    for score in actual.scores:
        parts = development.predictor.component_values([score.candidate], ("sciq", "boolq"), per_unit=True)
        predicted_BE = parts[score.candidate.settings].predict_units(score.candidate)
        first = 0
        for target in ("sciq", "boolq"):
            unit_BE = realized.select(target).values_BSE.mean(axis=1)
            pairs = zip(predicted_BE[:, first : first + unit_BE.shape[1]].T, unit_BE.T, strict=True)
            expected = np.mean([stats.spearmanr(x, y).statistic for x, y in pairs])
            assert score.agreement[f"dev/{target}"] == pytest.approx(expected, abs=1e-6)
            first += unit_BE.shape[1]
    single = select_protocol(family.model_copy(update={"criterion": "task_rho"}), [development], resamples=50)
    assert (
        selection_provenance(actual, [development], family)["rule"]
        != selection_provenance(single, [development], family)["rule"]
    )


def test_targets_of_the_same_runs_share_resamples(development):
    together = select_protocol(SMALL, [development], resamples=100)
    apart = [dataclasses.replace(development, targets=(name,)) for name in ("sciq", "boolq")]
    result = select_protocol(SMALL, apart, resamples=100)
    assert result.results == together.results
    assert [(s.candidate, s.lcb) for s in result.scores] == [(s.candidate, s.lcb) for s in together.scores]


def test_the_standard_error_is_that_of_resampled_subsets():
    rng = np.random.default_rng(0)
    rho = rng.normal(size=(3, 2, 4_000)) * 0.1
    item = standard_errors([rho])
    np.testing.assert_allclose(item, rho.mean(axis=1).std(axis=1, ddof=1))
    # two environments that differ by 2d: the place draws add d^2 / 2 to the variance of the mean
    two = standard_errors([rho + 0.3, rho - 0.3])
    np.testing.assert_allclose(two**2, item**2 / 2 + 0.3**2 / 2, rtol=0.1)


def test_ties_go_to_fewer_components_then_to_the_first_listed(tmp_path, source):
    source.arrays["product_sketch"][:] = 0.0
    environment = make_environment(tmp_path / "dev", source, truth=dataclasses.replace(TRUE, components=()))
    development = Development(environment, ("sciq", "boolq"), candidate_predictor(environment, source))
    family = ProtocolFamily(
        matches=({"output_layer": 1.0},), components=(("product.raw",), ("product.self",), ()), omegas=(-1.0,)
    )
    result = select_protocol(family, [development], resamples=50)
    assert [score.candidate.components for score in result.scores] == [
        (),
        (("product.raw", -1.0),),
        (("product.self", -1.0),),
    ]
    assert len({score.lcb for score in result.scores}) == 1


def test_a_held_out_environment_or_target_is_refused(tmp_path, source):
    held_out = make_environment(tmp_path / "test", source, role="held-out")
    with pytest.raises(ProtocolLeakError, match=r"selection.*\['sciq'\]"):
        Development(held_out, ("sciq",), candidate_predictor(held_out, source))
    with pytest.raises(ProtocolLeakError, match=r"selection.*held-out"):
        Development.from_runs(held_out, source)
    mixed = make_environment(tmp_path / "mixed", source, held_out=("boolq",))
    with pytest.raises(ProtocolLeakError, match=r"\['boolq'\].*held out"):
        Development(mixed, ("sciq", "boolq"), candidate_predictor(mixed, source))


def test_fewer_than_two_results_are_refused(development):
    single = dataclasses.replace(development, targets=("sciq",))
    with pytest.raises(ProtocolError, match=r"\b1 development results"):
        select_protocol(SMALL, [single])
    with pytest.raises(ProtocolError, match=r"\b0 development results"):
        select_protocol(SMALL, [])
    with pytest.raises(ProtocolError, match="duplicates"):
        select_protocol(SMALL, [development, development])


def test_constant_predictions_and_utilities_are_reported(tmp_path, development):
    def level(*kernels):
        """Return an artifact whose relevance by these kernels is 1 everywhere."""
        other = FakeSource(N_ROWS)
        for kernel in kernels:
            other.arrays[f"relevance_{kernel}"][:] = 1.0
        return other

    def chosen(level_source):
        predictor = candidate_predictor(development.runs, level_source)
        additive = SMALL.model_copy(update={"components": ((),)})
        return select_protocol(additive, [dataclasses.replace(development, predictor=predictor)], resamples=20)

    selected = chosen(level("pooled"))
    assert list(selected.undefined.values()) == [1]
    assert len(selected.scores) == 2
    nowhere = level("pooled", "output_layer")
    with pytest.raises(ProtocolError, match=r"rho.*development"):
        chosen(nowhere)
    flat = make_environment(tmp_path / "flat", nowhere, truth=dataclasses.replace(TRUE, components=()), noise=0.0)
    nothing = Development(flat, ("sciq", "boolq"), candidate_predictor(flat, FakeSource(N_ROWS, seed=3)))
    with pytest.raises(ProtocolError, match=r"utilities.*\['sciq', 'boolq'\]"):
        select_protocol(SMALL, [nothing], resamples=20)


def test_protocols_that_an_artifact_cannot_serve_are_counted(development, source):
    del source.arrays["relevance_output_layer"]
    result = select_protocol(SMALL, [development], resamples=20)
    assert (len(result.scores), result.not_served) == (5, 10)
    with pytest.raises(ProtocolError, match="1 protocols"):
        select_protocol(ProtocolFamily(matches=({"output_layer": 1.0},)), [development])


def test_the_frozen_protocol_predicts_what_was_selected(development, source, tmp_path):
    result = select_protocol(SMALL, [development], resamples=50)
    frozen = freeze(result, [development], SMALL, "chosen")
    assert (frozen.match, frozen.components) == ({"output_layer": 1.0}, {"joint.pair": -0.5})
    assert frozen.calibration.family == str(FAMILY)
    save_protocol(frozen, tmp_path / "chosen.yaml")
    loaded = load_protocol(tmp_path / "chosen.yaml")
    assert loaded == frozen
    assert loaded.selection_summary == "selected on dev/sciq, dev/boolq"
    predictor = Predictor.from_artifact(source, loaded)
    change_B = np.concatenate([predictor.change(block.weights)[:, 0] for block in blocks()])
    parts = development.predictor.component_values([TRUE], ("sciq", "boolq"))[TRUE.settings]
    for actual_B in (
        parts.predict_tasks(TRUE)[:, 0],
        development.predictor.predict({"chosen": loaded}, ("sciq", "boolq"))[0].task_B["sciq"],
    ):
        apart_B = actual_B - change_B  # against the corpus or a mean
        np.testing.assert_allclose(apart_B, apart_B[0], rtol=0, atol=rounding(40, actual_B))
    record = selection_provenance(result, [development], SMALL)
    path = provenance_path(tmp_path / "chosen.yaml")
    write_provenance(record, path)
    assert path.name == "chosen.provenance.json"
    read = json.loads(path.read_text())
    assert (
        read["best"][0]["protocol"] == TRUE.name == "retained | mean | output_layer | -0.5 joint.pair | mean_relevance"
    )
    assert (read["candidates"], read["environments"][0]["name"]) == (15, "dev")


def test_units_and_tasks_of_a_candidate_are_evaluated_like_any_prediction(development):
    predictions = development.predictor.predict_candidates({"full": TRUE}, ("sciq", "boolq"))
    report = evaluate_predictions(development.runs, predictions, resamples=20)
    rows = report.methods[0].targets
    assert [row.target for row in rows] == ["sciq", "boolq"]
    assert all(row["task_rho"].value > 0.98 for row in rows)
    assert all(row["mean_lds"].value is not None for row in rows)


@pytest.mark.parametrize("side", ["retained", "omitted"])
def test_shuffled_pairs_are_standardised_and_lose_the_planted_signal(tmp_path, source, side):
    truth = Candidate(ComponentSettings(side, "mean", "mean_relevance"), (), (("joint.pair", -1.0),))
    environment = make_environment(tmp_path / "dev", source, truth=truth, noise=0.01)
    shuffled = dataclasses.replace(truth, shuffled=True)
    item = candidate_predictor(environment, source)
    plain, moved = (
        item.component_values([c], ("sciq", "boolq"))[c.settings].predict_tasks(c)[:, 0] for c in (truth, shuffled)
    )
    realized = environment.utilities("sciq").values_BSE.mean(axis=(1, 2))
    assert stats.spearmanr(plain, realized).statistic > 0.95
    assert stats.spearmanr(moved, realized).statistic < 0.9
    assert 0.3 < moved.std() < 3
    assert abs(moved.mean()) < 1


def test_controls_restrict_the_family():
    family = ProtocolFamily(components=((), ("joint.self", "joint.pair"), ("hidden.raw",)), omegas=(-0.5, 0.5))
    controls = {control.name: control for control in CONTROLS}
    assert family.restricted(controls["additive"]).components == ((),)
    assert family.restricted(controls["pair-only"]).components == ((), ("joint.pair",), ("hidden.pair",))
    only = family.restricted(controls["pair-only"]).members(FakeSource().array_names)[0]
    assert {candidate.match for candidate in only} == {()}
    assert {candidate.components for candidate in only} == {
        ((name, omega),) for name in ("joint.pair", "hidden.pair") for omega in (-0.5, 0.5)
    }
    shuffled = family.restricted(controls["pair-shuffled"]).members(FakeSource().array_names)[0]
    assert all(candidate.shuffled for candidate in shuffled)


def test_controls_are_selected_but_never_frozen(development):
    family = SMALL.restricted(next(item for item in CONTROLS if item.name == "pair-only"))
    result = select_protocol(family, [development], resamples=20)
    assert result.best.candidate.components == (("joint.pair", -0.5),)
    with pytest.raises(ProtocolError, match="control"):
        freeze(result, [development], family, "no")


def test_the_default_family_is_finite_and_listed():
    members, skipped = default_family().members(FakeSource().array_names)
    assert skipped == 0
    assert 5_000 < len(members) < 10_000
    shipped = candidate_of(DEFAULT_PROTOCOL, FakeSource())
    assert any(member.settings == shipped.settings and dict(member.match) == dict(shipped.match) for member in members)
    assert len({candidate.name for candidate in members}) == len(members)
    without = [name for name in FakeSource().array_names if name != "relevance_embedding"]
    left, skipped = default_family().members(without)
    assert len(left) == skipped == len(members) / 2
    assert set(left) == {candidate for candidate in members if "embedding" not in dict(candidate.match)}


@pytest.mark.parametrize(
    ("components", "omegas", "message"),
    [
        (["joint.norm"], [0.1], r"components: unknown \['joint.norm'\]"),
        ([f"joint.{kind}" for kind in ("self", "pair", "raw", "cent")] * 2, [0.1] * 4, "protocols.*at most"),
        (None, None, "no such"),
    ],
)
def test_an_invalid_family_is_refused(tmp_path, components, omegas, message):
    if components is not None:
        (tmp_path / "family.yaml").write_text(json.dumps({"components": [components], "omegas": omegas}))
    with pytest.raises(ProtocolError, match=message):
        load_family(tmp_path / "family.yaml").members(FakeSource().array_names)
