"""Health checks of the pooled kernel and of the sketches for `grasp info --check`, on a sample of the rows.

Start with `check_sketches`. The geometry of a subset with weights w is ``K_raw = sum_ij w_i w_j k_ij``, with an inner
product k_ij of rows i and j. A sketch estimates it by ``|sum_i w_i phi_i|^2`` (`subset_sums`). The checks compare it
with the exact k_ij of the sampled rows. h~ are whitened hidden states, xi residuals (predicted probabilities minus the
one-hot vector of the next token), D a diagonal matrix that weights rare tokens up, and (x) is the outer product:

    sketch      k_ij
    hidden      <h~_i, h~_j>, averages over positions
    residual    <D^1/2 xi_i, D^1/2 xi_j>, averages over positions
    product     <G_i, G_j>, G_i the average of h~_t (x) D^1/2 xi_t: the preconditioned gradient of the output layer

The pooled kernel replaces G_i by the outer product of the averages, so that k_ij is that of hidden times residual.
Shape letters: N rows of the sample, P positions, B subsets, E units, H hidden width, V vocabulary, D sketch width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from grasp.arrays import F64, Floats
from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError, RunsError
from grasp.inspect.health import SampledArtifact
from grasp.inspect.health_metrics import Check, judge_check, unmeasured_check
from grasp.inspect.rescoring import SampleFeatures
from grasp.kernels.whitening import Whitener, second_moments
from grasp.models.batch import Batch
from grasp.paper.protocol import InteractionProtocol
from grasp.predict.scoring_rule import ScoringProtocol, kernel_weights
from grasp.runs.alignment import Alignment
from grasp.runs.metrics import MIN_SUBSETS, spearman
from grasp.seeds import stream
from grasp.settings import FeatureSettings

# The stored sketches, with the setting of `features` that is the width of each.
WIDTH_SETTINGS = {"hidden": "hidden_width", "residual": "residual_width", "product": "residual_width"}
MIN_RANK_CORRELATION = 0.8  # rank correlation from which a sketch is healthy
MIN_SUMMARY_SHARE = 0.5
MIN_KERNEL_RANKS = 0.5
BLOCK_ELEMENTS = 4 * 1024 * 1024  # elements of the gradients held in memory at once
HEALTHY_SKETCH = (
    f"error at most twice that of a Gaussian sketch of this width, and ranks {MIN_RANK_CORRELATION} or more"
)
HEALTHY_SUMMARY = f"{MIN_SUMMARY_SHARE} or more: the summary retains more of the gradient than it loses"


@dataclass(frozen=True, slots=True)
class ExactKernels:
    """Exact inner products of the sampled rows, whitened and scaled as in the build.

    Attributes:
        gram_NN: by the name of the sketch that estimates it, (N, N) float64 each.
        summary_share: share of |G_i|^2 that the outer product of the row's averages retains: their mean squared cosine.
    """

    gram_NN: Mapping[str, F64]
    summary_share: float

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, features: SampleFeatures) -> "ExactKernels":
        """Compute the inner products from the features of the sampled rows."""
        settings = FeatureSettings.model_validate(artifact.feature_settings)
        # "summary" are moments of averages over positions, "hidden" of single positions; one of them may be missing
        has_summary, has_positions = (f"{prefix}.count" in artifact.moments for prefix in ("summary", "hidden"))
        of_averages = second_moments(artifact.moments, "summary" if has_summary else "hidden")
        of_positions = second_moments(artifact.moments, "hidden" if has_positions else "summary")
        batch, row_P = features.batch, features.batch.row_P.cpu().numpy()
        averages = batch.summary.hidden_NH, batch.summary.residual_NV
        summary = _scaled(Whitener.from_settings(of_averages, settings), *averages)
        whitener = Whitener.from_settings(of_positions, settings)
        positions = _scaled(whitener, batch.hidden_PH.float().cpu().numpy(), residuals_of(batch))
        summary_of_positions = _scaled(whitener, *averages)
        hidden_NN, residual_NN = gram_matrices(*summary)
        product_NN = position_gram(*positions, row_P, features.batch.n_rows)
        gram_NN = {"hidden": hidden_NN, "residual": residual_NN, "product": product_NN}
        return cls(gram_NN, rank_one_share(*positions, row_P, *summary_of_positions))


def check_sketches(sample: SampledArtifact, protocol: ScoringProtocol) -> Iterator[Check]:
    """Yield checks of the pooled kernel if the protocol uses it, and of sketches if it has components."""
    artifact, features = sample.artifact, sample.features
    weight_BN = sample_weights(sample)
    resolved = protocol.resolved_for(artifact)
    # if the model cannot be run on the sample, `features` is the error; checks that need them report its text
    kernels = features if isinstance(features, GraspError) else ExactKernels.from_artifact(artifact, features)
    if "pooled" in kernel_weights(resolved):
        yield _check_summary(weight_BN, kernels)
        if {"pooled", "output_layer"} <= set(artifact.kernels):
            rho_E = spearman(*(_array(sample, f"relevance_{kernel}") for kernel in ("pooled", "output_layer")))
            rho = float(np.nanmean(rho_E)) if not np.isnan(rho_E).all() else float("nan")
            yield judge_check(
                "pooled and output_layer",
                f"rank correlation of their relevance over rows {rho:+.2f}, mean over units",
                f"{MIN_KERNEL_RANKS} or more",
                rho >= MIN_KERNEL_RANKS,
                "the kernels rank rows differently: prefer output_layer, or let `grasp calibrate` select",
                {"ranks": rho},
            )
    if isinstance(resolved, InteractionProtocol) and resolved.components:
        for name in WIDTH_SETTINGS:
            yield _check_sketch(sample, weight_BN, kernels, name)


def _check_summary(weight_BN: F64, kernels: ExactKernels | GraspError) -> Check:
    """Check what is lost by averaging hidden states and residuals over positions before taking their product."""
    name = "pooled summaries"
    if isinstance(kernels, GraspError):
        return unmeasured_check(name, HEALTHY_SUMMARY, str(kernels))
    pooled_NN, product_NN = kernels.gram_NN["hidden"] * kernels.gram_NN["residual"], kernels.gram_NN["product"]
    ranks = float(spearman(*(raw_geometry(weight_BN, gram_NN) for gram_NN in (pooled_NN, product_NN))))
    return judge_check(
        name,
        f"{kernels.summary_share:.2f} of the squared norm of a row's output-layer gradient is in its summary; rank "
        f"correlation of K_raw over subsets {ranks:+.2f}",
        HEALTHY_SUMMARY,
        kernels.summary_share >= MIN_SUMMARY_SHARE,
        "rank by the kernel output_layer (without --rule paper), and take geometry, if any, from product.*; the pooled "
        "kernel has lost most of the gradient",
        {"share": kernels.summary_share, "ranks": ranks},
    )


def _check_sketch(sample: SampledArtifact, weight_BN: F64, kernels: ExactKernels | GraspError, name: str) -> Check:
    """Check whether K of subsets by a stored sketch is K by the exact inner products."""
    artifact, array = sample.artifact, f"{name}_sketch"
    if array not in artifact.array_names:
        reason = f"not built: features.kernels does not contain {array}"
        return unmeasured_check(f"{name} sketch", HEALTHY_SKETCH, reason)
    if isinstance(kernels, GraspError):
        return unmeasured_check(f"{name} sketch", HEALTHY_SKETCH, str(kernels))
    # a stored sketch is scaled so that its mean squared norm over the corpus is 1
    sketch_ND = _array(sample, array) / (float(artifact.manifest.arrays[array].gain) or 1.0)
    estimate_B = ((weight_BN @ sketch_ND) ** 2).sum(axis=1)
    true_B = raw_geometry(weight_BN, kernels.gram_NN[name])
    error, ranks = relative_error(estimate_B, true_B), float(spearman(estimate_B, true_B))
    width = sketch_ND.shape[1]
    variation = float(true_B.std() / true_B.mean()) if true_B.any() else 0.0
    allowed = 2 * sqrt(2 / width)  # twice the relative standard deviation of a squared norm by a Gaussian sketch
    components = f"{name}.*" if name == "product" else f"{name}.* and joint.*"
    return judge_check(
        f"{name} sketch",
        f"K {error:.1%} off, ranks agree {ranks:+.2f} (width {width}; K of subsets varies by {variation:.1%})",
        f"at most {allowed:.0%} off, twice the error of a Gaussian sketch, and ranks {MIN_RANK_CORRELATION} or more",
        error <= allowed and ranks >= MIN_RANK_CORRELATION,
        f"build with a larger features.{WIDTH_SETTINGS[name]}, or drop {components} from the protocol",
        {"error": error, "ranks": ranks, "width": float(width), "variation": variation},
    )


def sample_weights(sample: SampledArtifact) -> F64:
    """Return the weights of subsets of the sample, normalised to sum 1, (B, N).

    They are the first subsets of the runs, restricted to the sample, without those that have no row in it; or, without
    runs, random halves of the sample.

    Raises:
        RunsError: fewer than `MIN_SUBSETS` subsets have rows in the sample.
    """
    runs, n_rows = sample.runs, len(sample.index)
    if runs is None:
        generator, half = stream(sample.seed, "audit", "subsets"), n_rows // 2
        weight_BN = np.zeros((sample.subsets, n_rows))
        for weight_N in weight_BN:
            weight_N[generator.choice(n_rows, size=half, replace=False)] = 1.0 / half
        return weight_BN
    blocks = Alignment.from_runs(runs, sample.artifact).blocks
    weight_BN = np.concatenate([block.weights_BN[:, sample.index].toarray() for block in blocks])[: sample.subsets]
    total_B = weight_BN.sum(axis=1)
    if (total_B > 0).sum() < MIN_SUBSETS:
        raise RunsError(
            f"{runs.path}: {int((total_B > 0).sum())} of its subsets have rows among the {n_rows} of the sample, "
            f"expected at least {MIN_SUBSETS}; take more rows"
        )
    return np.asarray(weight_BN[total_B > 0] / total_B[total_B > 0, None])


def _array(sample: SampledArtifact, name: str) -> F64:
    """Return the rows of the sample of an array, (N, width)."""
    return np.asarray(sample.artifact.array_rows(name, sample.index), dtype=np.float64)


def residuals_of(batch: Batch) -> csr_array:
    """Return the residuals at the positions of a batch, (P, V); duplicate coordinates are summed."""
    index_PK, value_PK = batch.residual.index_PK.cpu().numpy(), batch.residual.value_PK.float().cpu().numpy()
    starts, shape = np.arange(len(index_PK) + 1) * index_PK.shape[1], (len(index_PK), batch.vocab_size)
    residual_PV = csr_array((value_PK.ravel(), index_PK.ravel(), starts), shape=shape, copy=True)
    residual_PV.sum_duplicates()  # in place, on the copy of the batch's arrays
    residual_PV.eliminate_zeros()
    return residual_PV


def _scaled(whitener: Whitener, hidden_NH: Floats, residual_NV: csr_array) -> tuple[Floats, csr_array]:
    """Return h~ and D^1/2 xi of every row or position."""
    scale_VV = diags_array(np.sqrt(whitener.precondition_V))
    return whitener.whiten(hidden_NH), csr_array(residual_NV.astype(np.float64) @ scale_VV)


def gram_matrices(hidden_NH: Floats, residual_NV: csr_array) -> tuple[F64, F64]:
    """Return the inner products of all pairs of hidden states and of residuals, (N, N) float64 each."""
    hidden = np.asarray(hidden_NH, dtype=np.float64)
    return hidden @ hidden.T, np.asarray((residual_NV @ residual_NV.T).toarray(), dtype=np.float64)


def position_gram(hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], n_rows: int) -> F64:
    """Return exact <G_i, G_j>, (N, N), for G_i = mean over the positions of row i of h_t (x) xi_t.

    Coordinates of the vocabulary are processed in blocks, so that the gradients are never held in memory.

    Args:
        hidden_PH: hidden states of all positions.
        residual_PV: residuals of all positions.
        row_P: row of each position, ascending; a row without positions has G = 0.
        n_rows: number of rows, N.
    Cost: N^2 H for each coordinate that occurs; memory: BLOCK_ELEMENTS.
    """
    offsets = np.searchsorted(row_P, np.arange(n_rows + 1))  # positions of row i: offsets[i] to offsets[i + 1]
    by_coordinate = residual_PV.astype(np.float64).tocsc()
    used_coordinates = np.flatnonzero(np.diff(by_coordinate.indptr))
    step = max(1, BLOCK_ELEMENTS // (n_rows * hidden_PH.shape[1]))
    gram_NN = np.zeros((n_rows, n_rows))
    for first in range(0, len(used_coordinates), step):
        block = by_coordinate[:, used_coordinates[first : first + step]].tocsr()
        gradients = [
            (block[start:stop].T @ hidden_PH[start:stop]).ravel() / max(1, stop - start)
            for start, stop in pairwise(offsets)
        ]
        gradient_NX = np.stack(gradients)  # X = step * H elements of the gradient
        gram_NN += gradient_NX @ gradient_NX.T
    return gram_NN


def raw_geometry(weight_BN: F64, gram_NN: F64) -> F64:
    """Return K_raw = w^T G w of B subsets from inner products of rows, (B,). Source: eq:ia-components."""
    return np.asarray(np.einsum("bn,nm,bm->b", weight_BN, gram_NN, weight_BN))


def relative_error(estimate_B: F64, true_B: F64) -> float:
    """Return the median of |estimate - true| / true over subsets with nonzero K."""
    nonzero = true_B > 0
    return float(np.median(np.abs(estimate_B - true_B)[nonzero] / true_B[nonzero])) if nonzero.any() else 0.0


def rank_one_share(
    hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], hidden_NH: Floats, residual_NV: csr_array
) -> float:
    r"""Return the mean squared cosine between G_i = mean_t h_t (x) xi_t and the rank-1 summary h_i (x) xi_i, over rows.

    Measures how much of the output layer gradient the summary keeps: 1 for a row with a single position that is its own
    summary. All arguments are in the same coordinates; rows without positions or with a zero gradient are ignored.
    """
    offsets = np.searchsorted(row_P, np.arange(len(hidden_NH) + 1))  # of row i: offsets[i] to offsets[i + 1]
    shares = []
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop == start:
            continue
        hidden_TT, residual_TT = gram_matrices(hidden_PH[start:stop], residual_PV[start:stop])
        gradient_norm2 = float((hidden_TT * residual_TT).mean())
        summary_H, summary_V = np.asarray(hidden_NH[i], np.float64), residual_NV[[i]].astype(np.float64)
        residual_match_T = (residual_PV[start:stop] @ summary_V.T).toarray().ravel()
        cross = float(((hidden_PH[start:stop] @ summary_H) * residual_match_T).mean())
        summary_norm2 = float(summary_H @ summary_H) * float(summary_V.power(2).sum())
        if gradient_norm2 > 0 and summary_norm2 > 0:
            shares.append(cross**2 / (gradient_norm2 * summary_norm2))
    return float(np.mean(shares)) if shares else float("nan")
