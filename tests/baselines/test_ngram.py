"""The n-gram score is the derivative of a model refitted on weighted rows."""

import numpy as np
import pytest

from grasp.methods.registry import score_rows
from tests.baselines.world import N_ROWS, configured_method, matrix


def utility(rows, unit, weight_N, order, uniform, vocabulary):
    """Compute the mean log probability of an answer under the interpolated model of weighted rows, by dictionaries."""
    whole, context = {}, {}
    for ids, weight in zip(rows, weight_N, strict=True):
        for t in range(1, len(ids)):
            for n in range(1, order + 1):
                if t - n + 1 >= 0:
                    gram = tuple(ids[t - n + 1 : t + 1])
                    whole[gram] = whole.get(gram, 0.0) + weight
                    context[gram[:-1], n] = context.get((gram[:-1], n), 0.0) + weight
    result = []
    ids = unit.input_ids.tolist()
    for t in range(unit.first, len(ids)):
        grams = [tuple(ids[t - n + 1 : t + 1]) for n in range(1, order + 1) if t - n + 1 >= 0]
        ratios = [whole.get(g, 0.0) / context[g[:-1], len(g)] for g in grams if context.get((g[:-1], len(g)), 0.0) > 0]
        result.append(np.log(uniform / vocabulary + (1 - uniform) * np.mean(ratios)))
    return np.mean(result)


@pytest.mark.parametrize("order", [1, 3])
def test_scores_are_the_derivative_of_the_refitted_model(order, world, tmp_path):
    inputs = world.inputs()
    result = matrix(score_rows(configured_method("ngram", order=order, uniform=0.1), inputs, tmp_path))
    shard = inputs.rows(0, N_ROWS)
    rows = [shard.ids(i).tolist() for i in range(N_ROWS)]
    vocabulary = inputs.artifact.manifest.details["vocab_size"]
    for e, unit in enumerate(inputs.unit_tokens[:2]):
        for i in (0, 7, 23):
            more, less = np.ones(N_ROWS), np.ones(N_ROWS)
            more[i], less[i] = 1 + 1e-4, 1 - 1e-4
            settings = (order, 0.1, vocabulary)
            slope = (utility(rows, unit, more, *settings) - utility(rows, unit, less, *settings)) / 2e-4
            np.testing.assert_allclose(result[i, e], slope * N_ROWS, rtol=1e-3, atol=1e-5)
