"""Every way to sweep gives the same sums, within the tolerance it states; torch is not loaded for small jobs."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.errors import ShapeError
from grasp.predict import row_sums, sweep_torch
from grasp.predict.row_sums import LARGE, BlockSums, RowSums, plan
from grasp.predict.weights import OmittedRows, PackedMasks, SliceShares, as_csr
from tests.rounding import rounding

# What torch adds up in float32 is 128 numbers at most: equal ones, the worst, lose a quarter of 128 roundings.
CLOSE = sweep_torch.PIECE / 4 * 2**-24 + 2**-24


def over(values_NC, way):
    sums = RowSums.over(values_NC)
    sums.way = way
    return sums


def job(seed, n=300, width=40, b=7, share=0.1, *, plain=True):
    rng = np.random.default_rng(seed)
    weights_BN = (rng.random((b, n)) < share) * (1.0 if plain else rng.random((b, n)) * 2)
    return csr_array(weights_BN), (rng.standard_normal((n, width)) * 10.0 ** rng.integers(-3, 4, width)).astype("f4")


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    way=st.sampled_from(["dense", "sparse", "torch"]),
    plain=st.booleans(),
    width=st.sampled_from([1, 30, 129]),
    share=st.sampled_from([0.005, 0.1]),  # fewer entries than rows, and more
)
def test_all_ways_agree_with_a_loop(seed, way, plain, width, share):
    weights_BN, values_NC = job(seed, width=width, plain=plain, share=share)
    want = np.array([sum(w * values_NC[i].astype(float) for i, w in enumerate(row)) for row in weights_BN.toarray()])
    bound = CLOSE * (abs(weights_BN) @ abs(values_NC.astype(float)))
    got = over(values_NC, way).sums(weights_BN)
    assert got.dtype == np.float64
    assert (abs(got - want) <= bound + 1e-300).all()


def test_panels_cut_columns_and_change_nothing(monkeypatch):
    weights_BN, values_NC = job(0, width=100)
    whole = over(values_NC, "torch").sums(weights_BN)
    monkeypatch.setattr(sweep_torch, "PANEL_BYTES", 40_000)
    packed = sweep_torch.PackedValues.pack(values_NC)
    assert [panel.shape[1] for panel in packed.panels] == [34, 33, 33]
    bound = CLOSE * (abs(weights_BN) @ abs(values_NC.astype(float)))
    assert (abs(sweep_torch.sums(packed, weights_BN) - whole) <= bound).all()
    monkeypatch.setattr(sweep_torch, "PANEL_BYTES", 4_000)  # panels would be narrower than a cache line or two
    assert len(sweep_torch.PackedValues.pack(values_NC).panels) == 1


def test_subsets_without_rows_sum_to_zero():
    values_NC = np.ones((5, 3), dtype=np.float32)
    for way in ("dense", "sparse", "torch"):
        assert not over(values_NC, way).sums(csr_array((2, 5))).any()
        assert over(values_NC, way).sums(csr_array((0, 5))).shape == (0, 3)


@pytest.mark.parametrize("way", ["dense", "sparse", "torch"])
def test_float16_is_widened_before_it_is_added_up(way):
    weights_BN, values_NC = job(0, n=3000, share=0.9)
    half_NC = values_NC.astype(np.float16)
    want = weights_BN @ half_NC.astype(float)
    bound = 2e-6 * (weights_BN @ abs(half_NC.astype(float)))
    assert (abs(over(half_NC, way).sums(weights_BN) - want) <= bound).all()


def test_plan_follows_the_shape():
    assert plan(50_000, 10, 10_000, 129, with_torch=True) == "dense"
    assert plan(100_000, 10, 10_000, 1, with_torch=True) == "sparse"  # a column alone never repays a dense matrix
    assert plan(1000 * 1000, 1000, 100_000, 129, with_torch=True) == "torch"
    assert plan(1000 * 1000, 1000, 100_000, 129, with_torch=False) == "sparse"
    assert plan(LARGE // 129, 100, 10_000_000, 129, with_torch=True) == "sparse"


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match=r"weights of shape \(2, 4\) for values of 5 rows"):
        RowSums.over(np.ones((5, 3), dtype=np.float32)).sums(csr_array((2, 4)))


def test_the_core_loads_no_torch():
    modules = ["predict.predictor", "predict.row_sums", "geometry.standardize", "geometry.sums"]
    code = "import sys; " + "; ".join(f"import grasp.{m}" for m in modules)
    subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], check=True)


def forms(seed, n=1500, b=9):
    """Weights of every form over n rows."""
    rng = np.random.default_rng(seed)
    gone = (rng.random((b, n)) < 0.02) * rng.choice([1.0, 0.5, -1.0], (b, n))
    return {
        "entries": csr_array((rng.random((b, n)) < 0.03) * 1.0),
        "omitted": OmittedRows(csr_array(gone)),
        "masks": PackedMasks(np.packbits(rng.random((b, n)) < 0.5, axis=1), n),
        "shares": SliceShares(rng.random((b, 7)), rng.integers(0, 7, n)),
    }


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000), form=st.sampled_from(["entries", "omitted", "masks", "shares"]), cut=st.integers(1, 900)
)
def test_every_form_sums_to_the_float64_reference(seed, form, cut):
    """In memory, block by block whatever the cuts, and through what prediction uses for both."""
    weights, n = forms(seed)[form], 1500
    rng = np.random.default_rng(seed)
    values_NC = (rng.standard_normal((n, 6)) * 10.0 ** rng.integers(-3, 4, 6) + 1.0).astype(np.float32)
    matrix = as_csr(weights).toarray()
    want, size = matrix @ values_NC.astype(float), abs(matrix) @ abs(values_NC.astype(float))
    if form == "omitted":  # what is taken off the total is rounded as the total is
        size = abs(values_NC.astype(float)).sum(axis=0) + 0 * want
    bound = rounding(n, dtype=np.float32 if form == "masks" else np.float64) * size
    edges = [0, cut, min(cut + 13, n), n]
    blocks = [(start, values_NC[start:stop]) for start, stop in itertools.pairwise(edges) if stop > start]
    streamed = RowSums(lambda: iter(blocks), n, 6, held_NC=None)
    streamed.held_NC = None
    parts = BlockSums(weights)
    found = [
        sum(parts.product(start, block) for start, block in blocks),
        RowSums.over(values_NC).sums(weights),
        streamed.sums(weights),
        streamed.sums(weights),  # slices: what the first call kept
    ]
    for got in found:
        assert got.dtype == np.float64
        assert (abs(got - want) <= bound).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), start=st.integers(0, 700), n=st.integers(1, 800), rows=st.sampled_from([7, 64, 4096]))
def test_masks_unpacked_by_torch_sum_to_the_float64_reference(seed, start, n, rows):
    """What a GPU does with masks, on the CPU: whatever the first row and the cuts."""
    masks, values_nC = forms(seed)["masks"], np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)
    mask_Bn = as_csr(masks).toarray()[:, start : start + n]
    got = sweep_torch.masked_sums(masks, start, values_nC, rows, "cpu")
    bound = rounding(min(rows, n)) * (mask_Bn @ abs(values_nC.astype(float)))
    assert (abs(got - mask_Bn @ values_nC.astype(float)) <= bound).all()


def test_only_large_jobs_ask_for_a_gpu(monkeypatch):
    monkeypatch.setattr(sweep_torch, "device", lambda: "cuda")
    assert row_sums.cuda_backend(row_sums.LARGE_DENSE) is sweep_torch
    assert row_sums.cuda_backend(row_sums.LARGE_DENSE - 1) is None
    monkeypatch.setattr(sweep_torch, "device", lambda: "cpu")
    assert row_sums.cuda_backend(row_sums.LARGE_DENSE) is None


def test_large_masks_go_to_the_gpu_where_there_is_one(monkeypatch):
    """The same numbers through the backend, which here works on the CPU."""
    masks, values = forms(3)["masks"], np.random.default_rng(3).standard_normal((1500, 2)).astype(np.float32)
    want, asked = BlockSums(masks).product(0, values), []
    real = sweep_torch.masked_sums

    def on_cpu(masks, start, values_nC, rows, device):
        asked.append(device)
        return real(masks, start, values_nC, rows, "cpu")

    monkeypatch.setattr(sweep_torch, "masked_sums", on_cpu)
    monkeypatch.setattr(row_sums, "cuda_backend", lambda work: sweep_torch)
    np.testing.assert_allclose(BlockSums(masks).product(0, values), want, rtol=0, atol=rounding(1500, want))
    assert asked == ["cuda"]


def test_long_subsets_keep_their_digits():
    """A float32 sum of a million equal numbers would be off by a tenth of a percent."""
    values_NC = np.full((1 << 20, 1), 0.1, dtype=np.float32)
    weights_BN = csr_array(np.ones((2, 1 << 20)))
    weights_BN[[0], : (1 << 19)] = 0.0
    weights_BN.eliminate_zeros()
    got = over(values_NC, "torch").sums(weights_BN)
    np.testing.assert_allclose(got[:, 0], weights_BN.sum(axis=1) * np.float64(np.float32(0.1)), rtol=CLOSE)


def test_unions_of_slices_read_the_values_once():
    values_NC, codes = np.ones((60, 2), dtype=np.float32), np.arange(60) % 3
    passes = []

    def blocks():
        passes.append(1)
        return iter([(0, values_NC)])

    sums = RowSums(blocks, 60, 2)
    sums.held_NC = None
    passes.clear()
    for _ in range(4):
        np.testing.assert_array_equal(sums.sums(SliceShares(np.eye(3), codes)), np.full((3, 2), 20.0))
    assert len(passes) == 1
    sums.sums(SliceShares(np.eye(3), codes.copy()))
    assert len(passes) == 2
