"""Scores of a task from some of its questions, in a planted world whose best estimate is known, and invariances."""

from itertools import pairwise

import numpy as np
import pytest

from grasp.corpus.token_regression import SLOTS, TokenFeatures, slots
from grasp.predict import task_scores
from grasp.predict.task_scores import Texts, fit_prior
from grasp.seeds import stream

WORDS, LENGTH = 40, 24


def planted(n_rows, n_questions, *, deviation=1.0, text=1.0, noise=2.0, kinds=0.0, seed=0):
    """q_ie = text effect_i + row effect_i + row x question effect_ie, of known variances.

    Rows have one of two topics, with different words; the text effect is that of the topic. With `kinds`, questions are
    of two kinds, and every row has an effect on each.
    """
    rng = stream(seed, "planted", n_rows, n_questions)
    topic_N = rng.integers(0, 2, n_rows)
    ids = (rng.integers(0, WORDS, (n_rows, LENGTH)) + WORDS * topic_N[:, None]).astype(np.int32)
    prior_N = text * (2.0 * topic_N - 1.0)
    mu_N = prior_N + deviation * rng.standard_normal(n_rows)
    q_NE = mu_N[:, None] + noise * rng.standard_normal((n_rows, n_questions))
    q_NE += kinds * np.outer(rng.standard_normal(n_rows), np.where(np.arange(n_questions) % 2, 1.0, -1.0))
    return ids, prior_N, mu_N, q_NE.astype(np.float32)


def fitted(ids, q_NE, *, order=None, block=64, texts=True, counts=None, labels=()):
    """Return the prior and the estimate, (N, T), in the original order of the rows."""
    n_rows, n_questions = q_NE.shape
    order = np.arange(n_rows) if order is None else order
    q_NE, ids = q_NE[order], ids[order]
    counts_T = np.array([n_questions] if counts is None else counts)

    def blocks():
        return ((start, q_NE[start : start + block]) for start in range(0, n_rows, block))

    def tokens(row_index):
        return ids[row_index].ravel(), np.arange(len(row_index) + 1) * ids.shape[1]

    names = [f"row-{i}" for i in order]
    documents_N = np.arange(n_rows)
    ones = {"kernel": np.ones(n_questions)}
    lengths_N = np.full(n_rows, ids.shape[1])
    row_texts = Texts(lengths_N, tokens) if texts else None
    prior = fit_prior({"kernel": blocks}, ones, counts_T, names, documents_N, row_texts, labels)
    ends = np.cumsum(counts_T)
    means = [q_NE[:, end - n : end].mean(axis=1, dtype=np.float64) for end, n in zip(ends, counts_T, strict=True)]
    base_NT = np.stack(means, axis=1)
    score_NT = prior.rho_T * (base_NT - base_NT.mean(axis=0)) + (1 - prior.rho_T) * prior.prior_NT
    back = np.argsort(order)
    return prior, score_NT[back]


def oracle(prior_N, q_NE, *, deviation, noise):
    """E[mu | the questions, the topic]."""
    n = q_NE.shape[1]
    share = deviation**2 / (deviation**2 + noise**2 / n)
    return prior_N + share * (q_NE.mean(axis=1) - prior_N)


@pytest.mark.parametrize(("n_questions", "noise"), [(4, 4.0), (16, 4.0), (64, 4.0), (64, 16.0)])
def test_error_is_close_to_that_of_the_best_estimate(n_questions, noise):
    ids, prior_N, mu_N, q_NE = planted(6_000, n_questions, noise=noise)
    _, score_NT = fitted(ids, q_NE)
    error = np.mean((score_NT[:, 0] - (mu_N - mu_N.mean())) ** 2)
    best = np.mean((oracle(prior_N, q_NE, deviation=1.0, noise=noise) - mu_N) ** 2)
    plain = np.mean((q_NE.mean(axis=1) - mu_N) ** 2)
    assert error < 1.05 * best
    assert plain > best


def test_questions_that_agree_give_their_mean():
    ids, _, _, q_NE = planted(500, 8, noise=0.0)
    prior, score_NT = fitted(ids, q_NE)
    np.testing.assert_allclose(prior.rho_T, 1.0, atol=1e-6)
    expected = q_NE.mean(axis=1, dtype=np.float64)
    np.testing.assert_allclose(score_NT[:, 0], expected - expected.mean(), atol=1e-5)
    assert prior.reliability[0].ranking == pytest.approx(1.0, abs=1e-3)


def test_single_question_has_weight_1_and_unknown_reliability():
    ids, _, _, q_NE = planted(200, 1)
    prior, score_NT = fitted(ids, q_NE)
    assert prior.rho_T.tolist() == [1.0]
    assert np.isnan(prior.reliability[0].ranking)
    np.testing.assert_allclose(score_NT[:, 0], q_NE[:, 0] - q_NE[:, 0].mean(), atol=1e-5)


def test_without_text_the_ranking_is_that_of_the_mean():
    ids, _, _, q_NE = planted(500, 8)
    prior, score_NT = fitted(ids, q_NE, texts=False)
    assert prior.rho_T.tolist() == [1.0]
    assert not prior.prior_NT.any()
    np.testing.assert_allclose(score_NT[:, 0], q_NE.mean(axis=1) - q_NE.mean(), atol=1e-5)


def test_reliability_of_the_mean_is_that_without_text():
    ids, _, mu_N, q_NE = planted(4_000, 32, noise=4.0)
    names = [f"row-{i}" for i in range(len(q_NE))]
    blocks = {"output_layer": lambda: iter([(0, q_NE[:3_000]), (3_000, q_NE[3_000:])])}
    (known,) = task_scores.mean_reliability(blocks, {"output_layer": np.ones(32)}, np.array([32]), names)
    without_text, _ = fitted(ids, q_NE, texts=False)
    assert known.ranking == pytest.approx(without_text.reliability[0].ranking, abs=1e-6)
    top = np.argsort(-q_NE.mean(axis=1))[:800]
    predicted, realized = q_NE.mean(axis=1)[top].mean() - q_NE.mean(), mu_N[top].mean() - mu_N.mean()
    assert known.transfer_low * predicted < realized < known.transfer_high * predicted


def test_labels_keep_the_mean_of_a_slice():
    ids, _, _, q_NE = planted(4_000, 8, noise=8.0)
    source_N = stream(0, "source").integers(0, 6, 4_000).astype(np.int32)
    q_NE = q_NE + np.array([0.0, 1.0, -1.0, 2.0, -2.0, 0.5], np.float32)[source_N][:, None]  # which text does not tell

    def errors(score_NT):
        base_N = q_NE.mean(axis=1) - q_NE.mean()
        return [abs(score_NT[source_N == g, 0].mean() - base_N[source_N == g].mean()) for g in range(6)]

    _, without_NT = fitted(ids, q_NE)
    _, score_NT = fitted(ids, q_NE, labels=[source_N])
    assert max(errors(score_NT)) < 0.15 < max(errors(without_NT))
    order = stream(1, "order").permutation(4_000)
    _, same_NT = fitted(ids, q_NE, labels=[source_N[order]], order=order)
    np.testing.assert_allclose(same_NT, score_NT, atol=1e-4)


def test_scores_do_not_depend_on_order_and_blocks_up_to_rounding():
    ids, _, _, q_NE = planted(700, 12)
    first, score_NT = fitted(ids, q_NE, block=64)
    other, same_NT = fitted(ids, q_NE, order=stream(1, "order").permutation(700), block=33)
    np.testing.assert_allclose(same_NT, score_NT, atol=1e-4)
    assert other.reliability[0].ranking == pytest.approx(first.reliability[0].ranking, abs=1e-4)


def test_scores_of_a_task_do_not_depend_on_other_tasks():
    ids, _, _, q_NE = planted(600, 12)
    both, score_NT = fitted(ids, q_NE, counts=[4, 8])
    for t, columns in enumerate((slice(0, 4), slice(4, 12))):
        single, single_NT = fitted(ids, q_NE[:, columns])
        np.testing.assert_allclose(score_NT[:, t], single_NT[:, 0], atol=1e-4)
        assert both.rho_T[t] == pytest.approx(single.rho_T[0], abs=1e-5)


def test_reliability_is_the_correlation_between_scores_from_two_samples_of_questions():
    ids, _, _, q_NE = planted(4_000, 128, noise=6.0)
    half, first_NT = fitted(ids, q_NE[:, :64])
    _, second_NT = fitted(ids, q_NE[:, 64:])
    measured = np.corrcoef(first_NT[:, 0], second_NT[:, 0])[0, 1]
    assert half.reliability[0].ranking == pytest.approx(measured, abs=0.04)
    whole, _ = fitted(ids, q_NE)
    assert half.reliability[0].with_questions(128) == pytest.approx(whole.reliability[0].ranking, abs=0.04)


@pytest.mark.parametrize(("n_questions", "noise"), [(16, 4.0), (64, 8.0)])
def test_gain_on_other_questions_lies_in_the_expected_interval(n_questions, noise):
    ids, _, mu_N, q_NE = planted(6_000, n_questions, noise=noise)
    prior, score_NT = fitted(ids, q_NE)
    top = np.argsort(-score_NT[:, 0])[:1_200]
    predicted, realized = score_NT[top, 0].mean(), mu_N[top].mean() - mu_N.mean()
    expected, half_width = prior.reliability[0].expected(predicted)
    assert abs(realized - expected) < max(half_width, 0.05 * realized)
    assert realized < q_NE.mean(axis=1)[top].mean() - q_NE.mean()  # the known questions gain more


def test_few_questions_give_a_warning():
    ids, _, _, q_NE = planted(300, 15)
    prior, _ = fitted(ids, q_NE)
    assert "only 15 questions" in prior.reliability[0].note("sciq")
    prior, _ = fitted(*planted(300, 16)[::3])
    assert "with 16 questions, about" in prior.reliability[0].note("sciq")


def test_questions_of_two_kinds_are_less_reliable_than_of_a_single_kind():
    ids, _, _, q_NE = planted(3_000, 32, noise=2.0)
    single, _ = fitted(ids, q_NE)
    ids, _, _, q_NE = planted(3_000, 32, noise=2.0, kinds=4.0)
    mixed, score_NT = fitted(ids, q_NE)
    assert mixed.rho_T[0] < single.rho_T[0]
    assert mixed.reliability[0].ranking < single.reliability[0].ranking
    assert np.isfinite(score_NT).all()


def test_a_sample_of_rows_is_sufficient_and_limits_memory(monkeypatch):
    ids, prior_N, mu_N, q_NE = planted(6_000, 16, noise=4.0)
    monkeypatch.setattr(task_scores, "SAMPLE_ROWS", 1_500)
    monkeypatch.setattr(task_scores, "BLOCK_TOKENS", 500 * LENGTH)
    prior, score_NT = fitted(ids, q_NE)
    error = np.mean((score_NT[:, 0] - (mu_N - mu_N.mean())) ** 2)
    assert error < 1.1 * np.mean((oracle(prior_N, q_NE, deviation=1.0, noise=4.0) - mu_N) ** 2)
    assert prior.prior_NT.shape == (6_000, 1)


def test_blocks_of_texts_cover_the_rows_and_hold_few_tokens(monkeypatch):
    monkeypatch.setattr(task_scores, "BLOCK_TOKENS", 100)
    lengths_N = np.array([40, 60, 1, 250, 0, 100, 99, 0])
    blocks = list(Texts(lengths_N, lambda row_index: (row_index, row_index)).blocks())
    assert [index for block in blocks for index in range(block.start, block.stop)] == list(range(8))
    assert all(lengths_N[block].sum() <= 100 or block.stop - block.start == 1 for block in blocks)


def test_features_are_tf_idf_and_apply_is_the_matrix_times_the_table():
    rng = stream(0, "features")
    lengths = np.array([0, 1, 7, 0, 30, 12])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 9, offsets[-1]).astype(np.int32)
    features, matrix_NV = TokenFeatures.fit(ids, offsets)
    token_L, pair_L = slots(ids, offsets)
    expected_NV = np.zeros((len(lengths), SLOTS))
    seen_V = np.zeros(SLOTS)
    for i, (start, stop) in enumerate(pairwise(offsets)):
        row_slots = [*token_L[start:stop], *pair_L[start + 1 : stop]]
        seen_V[list(set(row_slots))] += 1
        for slot in row_slots:
            expected_NV[i, slot] += 1
    idf_V = np.log((1 + len(lengths)) / (1 + seen_V)) + 1
    norm_N = np.sqrt(expected_NV @ idf_V**2)
    expected_NV = expected_NV * idf_V / np.where(norm_N > 0, norm_N, np.inf)[:, None]
    np.testing.assert_allclose(matrix_NV.toarray(), expected_NV, rtol=1e-5)
    table_FVC = rng.standard_normal((2, SLOTS, 3)).astype(np.float32)
    table_N = np.array([0, 1, 0, 1, 1, 0])
    expected = np.stack([expected_NV[i] @ table_FVC[table] for i, table in enumerate(table_N)])
    np.testing.assert_allclose(features.apply(ids, offsets, table_FVC, table_N), expected, atol=1e-5)
