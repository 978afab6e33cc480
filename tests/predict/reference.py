"""Slow double-loop float64 versions of the kernels, for comparison only."""

import math

import numpy as np
from scipy.sparse import csr_array

from grasp.paper.subset_sums import SketchSums, SketchTotals, WeightSums, subset_relevance
from grasp.predict.weights import Weights


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def relevance(hidden_NH, unit_hidden_EH, residual_NV, unit_residual_EV, precondition_V):
    out = np.zeros((len(hidden_NH), len(unit_hidden_EH)))
    for i in range(out.shape[0]):
        for e in range(out.shape[1]):
            match = dot(hidden_NH[i], unit_hidden_EH[e])
            residual = sum(
                float(x) * float(d) * float(y)
                for x, d, y in zip(residual_NV[i], precondition_V, unit_residual_EV[e], strict=True)
            )
            out[i, e] = residual * math.copysign(math.log(1 + abs(match)), match)
    return out


def geometry(weights, sketch, mean):
    """raw, self, pair, cent of one subset, each as its own sum over rows or pairs of rows that have a weight."""
    rows = [i for i in range(len(weights)) if weights[i]]

    def pairs(vectors, chosen):
        return sum(weights[i] * weights[j] * float(vectors[i] @ vectors[j]) for i, j in chosen)

    return {
        "raw": pairs(sketch, [(i, j) for i in rows for j in rows]),
        "self": pairs(sketch, [(i, i) for i in rows]),
        "pair": 2 * pairs(sketch, [(i, j) for i in rows for j in rows if j < i]),
        "cent": pairs(sketch - mean, [(i, j) for i in rows for j in rows]),
    }


def side_weights(weights, side, weighting):
    """The weights that a side and a weighting give to every row of the corpus."""
    chosen = list(weights) if side == "retained" else [1.0 - w for w in weights]
    total = sum(abs(w) for w in chosen)
    return [w / total if total else 0.0 for w in chosen] if weighting == "mean" else chosen


def summed(weights_BN, sketch_ND):
    """Sums of B subsets, totals of the corpus and sums of weights, for dense or sparse weights, all in memory."""
    dense_BN = weights_BN.toarray() if hasattr(weights_BN, "toarray") else np.asarray(weights_BN)
    norm_N = (sketch_ND**2).sum(axis=1)
    sums = SketchSums(dense_BN @ sketch_ND, dense_BN @ norm_N, dense_BN**2 @ norm_N)
    totals = SketchTotals(sketch_ND.sum(axis=0), norm_N.sum(), len(sketch_ND))
    return sums, totals, WeightSums.from_weights(Weights(csr_array(dense_BN)))


def components(weights_BN, sketch_ND, mean_D):
    """The package's geometry of subsets with their weights as they are, centred on any mean."""
    sketch_ND = np.asarray(sketch_ND, dtype=np.float64)
    sums, totals, weight_sums = summed(weights_BN, sketch_ND)
    about = SketchTotals(np.asarray(mean_D) * totals.n_rows, totals.sum_norm2, totals.n_rows)
    return sums.geometry(weight_sums, about, "retained", "count")


def additive(relevance_NE, weights_BN):
    """The package's A: sum_{i in S} w_i a_ie, (B, E). Source: eq:additive-utility, eq:method-additive."""
    relevance_NE = np.asarray(relevance_NE, dtype=np.float64)
    return subset_relevance(
        weights_BN @ relevance_NE,
        relevance_NE.sum(axis=0),
        WeightSums.from_weights(Weights(weights_BN)),
        "retained",
        "count",
    )


def interaction_surrogate(relevance_B, raw_B, *, step, penalty):
    """eta A(T) - lambda K_raw(T), (B,). Source: eq:ideal-interaction-surrogate, eq:sketched-surrogate."""
    return step * relevance_B - penalty * raw_B
