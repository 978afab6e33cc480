"""Log-odds of the text classifier, on texts by topic."""

import numpy as np
import pytest

from grasp.baselines.classifier import TextOdds

GAMES = ["the goalkeeper saved the ball", "a striker kicked the ball far", "the team won by two goals"]
STARS = ["the telescope saw a distant star", "a planet circles the bright star", "light from the galaxy"]


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_classifier_separates_texts_by_topic(strength):
    odds = TextOdds(GAMES + STARS, [["which star does the planet circle"], ["who kicked the ball"]], strength=strength)
    games, stars = odds.score(GAMES), odds.score(STARS)
    assert stars[:2, 0].mean() > games[:, 0].mean()
    assert games[:2, 1].mean() > stars[:, 1].mean()
    np.testing.assert_allclose(odds.score([GAMES[1]])[0], games[1])
