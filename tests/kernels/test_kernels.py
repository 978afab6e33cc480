"""Contract tests of position kernels: relevance of a row depends only on its positions, not on blocks."""

import pytest
import torch

from grasp.kernels import embedding, knn, output_layer
from tests.kernels import test_embedding as embedding_tests
from tests.kernels import test_knn as knn_tests
from tests.kernels import test_output_layer as output_layer_tests
from tests.rounding import rounding

# Of a kernel: the row of every position, and its relevance where some positions are of rows that are given anew.


def output_layer_world():
    hidden, unit_hidden, residual, unit_residual, whitener, row, unit = output_layer_tests.world(3)
    units = output_layer.prepare_targets(
        unit_hidden, unit_residual, unit, output_layer_tests.E, whitener, output_layer_tests.N
    )
    return row, lambda at, *rows: output_layer.output_layer_relevance(units, hidden[at], residual.select(at), *rows)


def embedding_world():
    head, (residual, ids, row), unit_inputs, whitener = embedding_tests.world(3)
    units = embedding_tests.prepared(head, unit_inputs, whitener)
    return row, lambda at, *rows: embedding.embedding_relevance(units, head, residual.select(at), ids[at], *rows)


def knn_world():
    (hidden, label, row), unit_inputs, whitener, moments = knn_tests.world(3)
    units = knn_tests.prepared(unit_inputs, whitener, moments)
    return row, lambda at, *rows: knn.knn_relevance(units, hidden[at], label[at], *rows)


KERNELS = pytest.mark.parametrize("kernel", [output_layer_world, embedding_world, knn_world])


def assert_close(result, expected):
    torch.testing.assert_close(
        result, expected, rtol=0, atol=rounding(embedding_tests.TERMS + knn_tests.TERMS, expected)
    )


@KERNELS
def test_a_row_has_the_relevance_of_its_positions_and_none_without(kernel):
    row_P, relevance = kernel()
    every, n_rows = torch.ones_like(row_P, dtype=torch.bool), int(row_P.max()) + 1
    whole_NE = relevance(every, row_P, n_rows)
    single_E = relevance(row_P == 2, torch.zeros_like(row_P[row_P == 2]), 1)[0]
    assert_close(single_E, whole_NE[2])
    spread_NE = relevance(every, 2 * row_P, 2 * n_rows)
    assert not spread_NE[1::2].any()
    assert_close(spread_NE[::2], whole_NE)


@KERNELS
@pytest.mark.parametrize(("elements", "cached"), [(1, 0), (100, 0), (1, 10**9), (10**9, 0)])
def test_blocks_and_caches_do_not_change_the_result(monkeypatch, kernel, elements, cached):
    def whole_NE():
        row_P, relevance = kernel()
        return relevance(torch.ones_like(row_P, dtype=torch.bool), row_P, int(row_P.max()) + 1)

    expected_NE = whole_NE()
    for module in (output_layer, knn):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(output_layer, "CACHED_ELEMENTS", cached)
    assert_close(whole_NE(), expected_NE)
