"""Matched repetition: proxies repeat each source as often as the planned run, with the same shares of the mixture."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.artifact.label_table import LabelColumn
from grasp.errors import SettingsError
from grasp.predict.weights import SubsetBlock, Weights
from grasp.select.matched_repetition import PlannedRun, match_repetition

VALUES = ("web", "code", "books")
N = 6_000


def world(seed: int = 0) -> tuple[LabelColumn, np.ndarray, np.ndarray]:
    """Return labels, tokens of each row, and shares of tokens of four mixtures."""
    rng = np.random.default_rng(seed)
    column = LabelColumn.from_values([VALUES[g] for g in rng.choice(3, N, p=[0.6, 0.3, 0.1])], "source")
    return column, rng.integers(1, 100, N), rng.dirichlet(np.ones(3), 4)


def mixtures(column: LabelColumn, tokens_N: np.ndarray, share_BG: np.ndarray) -> SubsetBlock:
    size_G = np.bincount(column.codes_N, tokens_N)
    slices = Weights.from_slices(column.codes_N, 3)
    return SubsetBlock(tuple(f"m{b}" for b in range(len(share_BG))), slices.mixed(share_BG / size_G * size_G.sum()))


def by_source(weights_BN, column: LabelColumn, tokens_N: np.ndarray) -> np.ndarray:
    """Return the tokens seen of each source, (B, G), up to a factor."""
    return weights_BN.multiply(tokens_N[None]) @ np.eye(3)[column.codes_N]


@given(st.integers(0, 20), st.floats(1.0, 100.0), st.floats(0.05, 1.0))
def test_each_source_is_repeated_as_often_as_planned_and_shares_are_unchanged(seed, factor, part):
    """A planned run that is `factor` times as long, with sources of which the proxy has `part` for its length."""
    column, tokens_N, share_BG = world(seed)
    size_G = np.bincount(column.codes_N, tokens_N)
    run_tokens = 0.5 * tokens_N.sum()
    source_G = part * size_G * factor
    plan = PlannedRun(run_tokens * factor, dict(zip(column.names(), source_G.tolist(), strict=True)))
    before = mixtures(column, tokens_N, share_BG)
    (after,), notes = match_repetition([before], plan, column, tokens_N, run_tokens)
    seen_BG = by_source(after.weights_BN, column, tokens_N)
    np.testing.assert_allclose(seen_BG / seen_BG.sum(axis=1, keepdims=True), share_BG, atol=1e-12)
    np.testing.assert_allclose(seen_BG, by_source(before.weights_BN, column, tokens_N))
    distinct_BG = by_source(after.weights_BN.sign(), column, tokens_N)
    planned_BG = share_BG * plan.tokens / source_G
    # as exact as rows allow: half a row of 100 tokens
    assert (np.abs(share_BG * run_tokens / planned_BG - distinct_BG) <= 50).all()
    assert not notes


def test_nothing_changes_if_the_planned_run_is_the_proxy():
    column, tokens_N, share_BG = world()
    sizes = dict(zip(column.names(), np.bincount(column.codes_N, tokens_N).tolist(), strict=True))
    before = mixtures(column, tokens_N, share_BG)
    (after,), notes = match_repetition([before], PlannedRun(1e6, sizes), column, tokens_N, 1e6)
    np.testing.assert_array_equal(after.weights_BN.toarray(), before.weights_BN.toarray())
    assert not notes


def test_distinct_rows_depend_on_neither_the_mixture_nor_other_sources():
    column, tokens_N, share_BG = world()
    sizes = dict(zip(column.names(), (0.2 * np.bincount(column.codes_N, tokens_N)).tolist(), strict=True))
    before = mixtures(column, tokens_N, share_BG)
    (after,), _ = match_repetition([before], PlannedRun(1e6, sizes), column, tokens_N, 1e6)
    rows = after.weights_BN.sign().toarray()
    np.testing.assert_array_equal(rows, np.tile(rows[0], (len(rows), 1)))
    more = {**sizes, "web": 2 * sizes["web"]}
    (other,), _ = match_repetition([before], PlannedRun(1e6, more), column, tokens_N, 1e6)
    other_N, is_web_N = other.weights_BN.sign().toarray()[0], column.codes_N == column.values.index("web")
    np.testing.assert_array_equal(other_N[~is_web_N], rows[0][~is_web_N])
    assert (other_N >= rows[0]).all()  # more rows of web, with the former ones among them


def test_a_source_of_which_the_corpus_has_too_little_is_named():
    column, tokens_N, share_BG = world()
    sizes = dict(zip(column.names(), np.bincount(column.codes_N, tokens_N).tolist(), strict=True))
    plan = PlannedRun(1e6, sizes | {"code": 3 * sizes["code"]})
    _, (note,) = match_repetition([mixtures(column, tokens_N, share_BG)], plan, column, tokens_N, 1e6)
    assert note == "repeated more often than planned, since the corpus is too small: code 3 times as often"


def test_files_of_sources(tmp_path):
    (tmp_path / "sizes.csv").write_text("value,tokens\nweb,2.5T\ncode,300B\n")
    (tmp_path / "sizes.json").write_text('{"web": "2.5T", "code": 300000000000}')
    for name in ("sizes.csv", "sizes.json"):
        plan = PlannedRun.parse("1T", tmp_path / name)
        assert plan == PlannedRun(1e12, {"web": 2.5e12, "code": 3e11})
    with pytest.raises(SettingsError, match=r"lacks books; has web, code$"):
        plan.sizes(VALUES)
    assert PlannedRun.parse(None, None) is None
    with pytest.raises(SettingsError, match="expected both"):
        PlannedRun.parse("1T", None)
    (tmp_path / "bad.csv").write_text("value,tokens\nweb,many\n")
    with pytest.raises(SettingsError, match=r"bad\.csv: web: got 'many', expected"):
        PlannedRun.parse("1T", tmp_path / "bad.csv")
    (tmp_path / "short.csv").write_text("value\nweb\n")
    with pytest.raises(SettingsError, match=r"short\.csv: .*; expected the columns value and tokens"):
        PlannedRun.parse("1T", tmp_path / "short.csv")
    with pytest.raises(SettingsError, match=r"no\.csv: .*No such file"):
        PlannedRun.parse("1T", tmp_path / "no.csv")
