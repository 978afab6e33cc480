"""Cost estimates of a probe: linear in rows and tokens if parts of one row were timed, else proportional."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.pipeline.forecast import _row_and_token_seconds

SECONDS = st.floats(0.001, 100.0)


@given(row=SECONDS, token=SECONDS)
def test_timed_pieces_of_one_row_give_the_cost_of_a_row_and_of_a_token(row, token):
    timed = [(n, row + token * n) for n in (16, 64)]
    assert _row_and_token_seconds(timed, 1) == pytest.approx((row, token), rel=1e-9, abs=1e-9 * (row + 64 * token))


@pytest.mark.parametrize(
    ("timed", "n_rows"),
    [
        ([(16, 0.1), (64, 4.0)], 8),  # whole rows: their own cost is in that of their tokens
        ([(64, 4.0)], 1),  # one slow pass
        ([(64, 3.0), (64, 4.0)], 1),  # the only row is shorter than the second pass
        ([(16, 0.1), (64, 4.0)], 1),  # growth above proportion
        ([(16, 9.0), (64, 4.0)], 1),  # the first pass of a process was slow
    ],
)
def test_other_timed_passes_give_a_proportional_cost(timed, n_rows):
    assert _row_and_token_seconds(timed, n_rows) == (0.0, 4.0 / 64)
