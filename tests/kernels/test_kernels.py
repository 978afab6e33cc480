"""What every kernel of positions promises: a row's relevance depends on its own positions alone, and on no block."""

import pytest
import torch

from grasp.kernels import embedding, hidden_bias, hidden_linear, knn, output_layer
from tests.kernels import test_embedding as of_input
from tests.kernels import test_hidden_bias as of_shift
from tests.kernels import test_hidden_linear as of_tilt
from tests.kernels import test_knn as of_neighbour
from tests.kernels import test_output_layer as of_token
from tests.rounding import rounding

# Of a kernel: the row of every position, and its relevance where some positions are of rows that are given anew.


def token():
    hidden, unit_hidden, residual, unit_residual, whitener, row, unit = of_token.world(3)
    units = output_layer.prepare_targets(unit_hidden, unit_residual, unit, of_token.E, whitener, of_token.N)
    return row, lambda at, *rows: output_layer.token_relevance(units, hidden[at], residual.at(at), *rows)


def input_():
    head, (residual, ids, row), asked, whitener = of_input.world(3)
    units = of_input.prepared(head, asked, whitener)
    return row, lambda at, *rows: embedding.input_relevance(units, head, residual.at(at), ids[at], *rows)


def neighbour():
    (hidden, label, row), asked, whitener, moments = of_neighbour.world(3)
    units = of_neighbour.prepared(asked, whitener, moments)
    return row, lambda at, *rows: knn.neighbour_relevance(units, hidden[at], label[at], *rows)


def shift():
    head, (hidden, label, row), asked = of_shift.world(1)
    delta, unit_delta = of_shift.delta(head, hidden, label), of_shift.delta(head, *asked[:2])
    units = hidden_bias.prepare_shift(unit_delta, asked[2], of_shift.E, of_shift.plain_whitener())
    return row, lambda at, *rows: hidden_bias.shift_relevance(units, delta[at], *rows)


def tilt():
    head, (hidden, label, row), asked = of_shift.world(1)
    delta, unit_delta = of_shift.delta(head, hidden, label), of_shift.delta(head, *asked[:2])
    units = hidden_linear.prepare_tilt(asked[0], unit_delta, asked[2], of_shift.E, *of_tilt.moments_of(hidden, delta))
    return row, lambda at, *rows: hidden_linear.tilt_relevance(units, hidden[at], delta[at], *rows)


KERNELS = pytest.mark.parametrize("kernel", [token, input_, neighbour, shift, tilt])


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(of_input.TERMS + of_neighbour.TERMS, expected))


@KERNELS
def test_a_row_has_the_relevance_of_its_positions_and_none_without(kernel):
    row_P, relevance = kernel()
    every, n_rows = torch.ones_like(row_P, dtype=torch.bool), int(row_P.max()) + 1
    whole_NE = relevance(every, row_P, n_rows)
    alone_E = relevance(row_P == 2, torch.zeros_like(row_P[row_P == 2]), 1)[0]
    assert_close(alone_E, whole_NE[2])
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
