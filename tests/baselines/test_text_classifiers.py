"""Log-odds of the classifier and importance weights of DSIR, against counts in plain Python and on texts by topic."""

import math
from collections import Counter
from itertools import pairwise
from zlib import crc32

import numpy as np
import pytest

from grasp.baselines.classifier import TextOdds
from grasp.baselines.dsir import MIN_PROBABILITY, WORD, bucket_counts, log_ratio
from grasp.methods.registry import score_rows
from tests.baselines.world import N_ROWS, configured_method, matrix

GAMES = ["the goalkeeper saved the ball", "a striker kicked the ball far", "the team won by two goals"]
STARS = ["the telescope saw a distant star", "a planet circles the bright star", "light from the galaxy"]
BUCKETS = 50


def buckets_of(text):
    words = WORD.findall(text.lower())
    grams = [*words, *(f"{first} {second}" for first, second in pairwise(words))]
    return Counter(crc32(gram.encode()) % BUCKETS for gram in grams)


def test_the_log_ratio_equals_that_of_smoothed_shares():
    corpus, target = [sum(map(buckets_of, texts), Counter()) for texts in (GAMES + STARS, STARS)]
    corpus_H = np.array([corpus[h] for h in range(BUCKETS)], dtype=np.float64)
    expected = [
        math.log(target[h] / target.total() + MIN_PROBABILITY) - math.log(corpus[h] / corpus.total() + MIN_PROBABILITY)
        for h in range(BUCKETS)
    ]
    np.testing.assert_allclose(log_ratio(STARS, corpus_H), expected)


def test_words_and_pairs_of_words_are_counted():
    counts_NH = bucket_counts(["", *GAMES], BUCKETS).toarray()
    expected = [[buckets_of(text)[h] for h in range(BUCKETS)] for text in ["", *GAMES]]
    np.testing.assert_array_equal(counts_NH, expected)


def test_dsir_equals_the_weight_plus_seeded_noise(world, tmp_path):
    inputs = world.inputs()
    plain, first, repeated, other = (
        matrix(score_rows(configured_method("dsir", resample=resample, seed=seed), inputs, tmp_path / name))
        for name, resample, seed in (("plain", False, 0), ("a", True, 0), ("b", True, 0), ("c", True, 1))
    )
    np.testing.assert_array_equal(first, repeated)
    assert not np.allclose(first, other)
    counts_NH = bucket_counts(inputs.texts(0, N_ROWS), 10_000)
    questions = [unit.prompt + unit.completion for unit in inputs.units.units]
    expected = counts_NH @ log_ratio(questions, np.asarray(counts_NH.sum(axis=0), dtype=np.float64))
    np.testing.assert_allclose(plain, np.repeat(expected[:, None], plain.shape[1], axis=1), rtol=1e-5)


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_classifier_separates_texts_by_topic(strength):
    odds = TextOdds(GAMES + STARS, [["which star does the planet circle"], ["who kicked the ball"]], strength=strength)
    games, stars = odds.score(GAMES), odds.score(STARS)
    assert stars[:2, 0].mean() > games[:, 0].mean()
    assert games[:2, 1].mean() > stars[:, 1].mean()
    np.testing.assert_allclose(odds.score([GAMES[1]])[0], games[1])
