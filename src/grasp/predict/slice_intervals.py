"""Standard errors of the change if a slice is dropped, over questions and over documents.

The questions of a target and the documents of a corpus are both samples: other questions of the task and other
documents of the same kind would give another change. For a slice of n of the N rows, p = n / N, the change is

    change = slope sum_d psi_d,     psi_d = p r_d(rest) - (1 - p) r_d(slice)

with r_d(side) the sum, over the rows of document d on this side, of the effect minus its mean over the side; the sum of
psi_d is the sampling error. All rows of a document are in one term, so their correlation counts. With q_ge the
contribution of question e to the change of slice g, and E questions, the variance is

    V_g = D_g + w_g^2 Q_g,     D_g = slope^2 sum_d psi_d^2,     Q_g = var_e(q_ge) / E
    w_g = max(0, 1 - phi D_g / Q_g)

The effect of a document on single questions is noise that both D and Q contain, and must count once (as in two-way
clustering: Cameron, Gelbach and Miller 2011). phi is the ratio of Q to D of random groups of documents, so that w is
the share of Q that is the slice's own, and q_ge shrunk by w the estimate of how question e differs for the slice
(empirical Bayes). For random groups w is near 0, for a slice of many documents near 1. Source: ours.

A slice of few documents does not show how much they differ. Its sum over the m documents is therefore averaged with
PRIOR_DOCUMENTS that differ as the documents of the corpus do, by a model with random effects of documents:

    E r_d^2 = sigma_w^2 n_d + sigma_b^2 n_d^2     for a document of n_d rows

The intervals are those of Student's distribution, with degrees of freedom by Welch and Satterthwaite.
Start with `dropped_errors`.
Shape letters: G slices, N rows, E units, T targets, D documents, H groups of documents, M pairs of a row and a slice
that contains it, P pairs of a document and a slice that have rows in common.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from grasp.arrays import F64, I64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_documents
from grasp.predict.predictor import Predictor, relevance_blocks
from grasp.predict.slices import DROPPED, LabelSlices, SliceEffects
from grasp.predict.weights import Weights, sums_over
from grasp.seeds import stream

LEVEL = 0.95  # of intervals
GROUPS = 256  # random groups of documents that phi is measured on
PRIOR_DOCUMENTS = 4  # documents of the corpus that the spread of a slice is averaged with


@dataclass(frozen=True, slots=True)
class ChangeErrors:
    """Changes with standard errors and degrees of freedom, (G, T) each; nan without an interval."""

    value_GT: F64
    error_GT: F64
    freedom_GT: F64

    def half_widths(self, compared: int = 1) -> F64:
        """Return half the widths of the intervals, (G, T).

        Args:
            compared: number of changes that are compared; all of their intervals hold together with a probability of at
                least LEVEL (Bonferroni).
        """
        return np.asarray(stdtrit(self.freedom_GT, 1.0 - (1.0 - LEVEL) / (2 * compared)) * self.error_GT)

    @property
    def interval(self) -> tuple[F64, F64]:
        """Lower and upper bounds of 95 % intervals, (G, T) each."""
        return self.value_GT - self.half_widths(), self.value_GT + self.half_widths()


def dropped_errors(
    artifact: ArtifactReader, predictor: Predictor, effects: SliceEffects, slices: LabelSlices
) -> ChangeErrors:
    """Compute standard errors of `dropped_GT` over the units of each target and over documents.

    They do not contain the error of the prediction relative to retraining. With a protocol that scores similarity, only
    relevance is regarded as a sample.

    Returns:
        Errors (G, T); nan for a target with a single unit, and for a slice of all rows.
    Cost: one additional pass over the relevance of every kernel. Memory: slices x units, and 8 bytes per pair of a
    document and a slice for a few sums.
    """
    documents_N, retained = row_documents(artifact), predictor.reweighted(effects.sums, DROPPED)
    n_documents = int(documents_N.max()) + 1
    # every document is in one of up to GROUPS equally likely groups
    group_D = stream(0, "slices", "documents").permutation(n_documents) % min(n_documents, GROUPS)
    group_N = np.asarray(group_D[documents_N], np.int64)
    change_GE, group_HE = _dropped_by_unit(artifact, predictor, effects, slices, group_N)
    # the change is linear in the sum of effects
    one_more = replace(retained, effect_BT=retained.effect_BT + 1.0)
    slope_GT = predictor.change_of(one_more) - predictor.change_of(retained)
    pairs = _Pairs.of(slices, documents_N)
    error_GT, freedom_GT = np.full((2, *effects.dropped_GT.shape), np.nan)
    stops = np.cumsum(predictor.units.counts_T)
    for t, (start, stop) in enumerate(zip(stops - predictor.units.counts_T, stops, strict=True)):
        n_units = int(stop - start)
        if n_units == 1:
            continue
        effect_N = predictor.effect_NT[:, t].astype(np.float64)
        by_group_H = np.bincount(group_N, effect_N - effect_N.mean())
        random_units = group_HE[:, start:stop].var(axis=1, ddof=1).sum() / n_units
        shared = random_units / max(float(by_group_H @ by_group_H), np.finfo(np.float64).tiny)  # phi
        variances_2G, freedom_2G = pairs.variances(effect_N)
        variances_2G = variances_2G * slope_GT[:, t] ** 2
        documents_G = variances_2G.sum(axis=0)
        units_G = change_GE[:, start:stop].var(axis=1, ddof=1) / n_units
        unit_share_G = np.maximum(units_G - shared * documents_G, 0.0) * ratio(1.0, units_G)  # w
        parts_3G = np.vstack([variances_2G, unit_share_G**2 * units_G])
        variance_G = parts_3G.sum(axis=0)
        freedom_3G = np.vstack([freedom_2G, np.full(len(units_G), n_units - 1)])
        squares_G = (parts_3G**2 / freedom_3G).sum(axis=0)
        error_GT[:, t] = np.sqrt(variance_G)
        freedom_GT[:, t] = variance_G**2 / np.maximum(squares_G, np.finfo(np.float64).tiny)
    error_GT[effects.sums.n_retained_B == predictor.n_rows] = np.nan
    return ChangeErrors(effects.dropped_GT, error_GT, np.maximum(freedom_GT, 1.0))


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The documents of every slice."""

    documents_N: I64
    rows_D: F64  # n_d
    rows_G: F64
    entry_row_M: I64  # row of each entry; an entry is a row in a slice
    entry_pair_M: I64  # pair of each entry
    slice_P: I64
    document_P: I64
    rows_P: F64  # rows of the document in the slice

    @classmethod
    def of(cls, slices: LabelSlices, documents_N: I64) -> "_Pairs":
        n_slices = len(slices.slices)
        if slices.membership_GN is None:
            entry_slice_M, entry_row_M = slices.codes_N.astype(np.int64), np.arange(len(documents_N))
        else:
            entries = slices.membership_GN.tocoo()
            entry_slice_M, entry_row_M = entries.row.astype(np.int64), entries.col.astype(np.int64)
        code_P, entry_pair_M, rows_P = np.unique(
            documents_N[entry_row_M] * n_slices + entry_slice_M, return_inverse=True, return_counts=True
        )
        document_P, slice_P = np.divmod(code_P, n_slices)
        rows_D = np.bincount(documents_N).astype(np.float64)
        rows_G = slices.rows_G.astype(np.float64)
        return cls(
            documents_N, rows_D, rows_G, entry_row_M, entry_pair_M, slice_P, document_P, rows_P.astype(np.float64)
        )

    def variances(self, effect_N: F64) -> tuple[F64, F64]:
        """Return sum_d psi_d^2 and its degrees of freedom, for the documents of each slice and for all others, (2, G).

        Args:
            effect_N: effects of one target.
        """
        n_rows, n_slices, n_documents = len(effect_N), len(self.rows_G), len(self.rows_D)
        effect_N = effect_N - effect_N.mean()

        def by_slice(values_P: F64) -> F64:
            return np.asarray(np.bincount(self.slice_P, values_P, minlength=n_slices), dtype=np.float64)

        sum_D: F64 = np.bincount(self.documents_N, effect_N).astype(np.float64)
        sum_P: F64 = np.bincount(self.entry_pair_M, effect_N[self.entry_row_M], minlength=len(self.slice_P)).astype(
            np.float64
        )
        # variance of rows within documents and of documents, by the method of moments
        row_variance = (effect_N @ effect_N - (sum_D**2 / self.rows_D).sum()) / max(n_rows - n_documents, 1)
        row_variance = max(float(row_variance), 0.0) if n_rows > n_documents else 0.0
        squares = self.rows_D @ self.rows_D
        between = max(float((sum_D @ sum_D - row_variance * n_rows) / squares), 0.0)

        share_G, rest_rows_G = self.rows_G / n_rows, np.maximum(n_rows - self.rows_G, 1.0)
        total_G = by_slice(sum_P)
        mean_G, rest_mean_G = total_G / self.rows_G, -total_G / rest_rows_G  # effects add up to 0 over the corpus
        share_P = share_G[self.slice_P]
        all_sum_P, all_rows_P = sum_D[self.document_P], self.rows_D[self.document_P]
        rest_rows_P = all_rows_P - self.rows_P
        psi_P = share_P * (all_sum_P - sum_P - rest_mean_G[self.slice_P] * rest_rows_P)
        psi_P -= (1.0 - share_P) * (sum_P - mean_G[self.slice_P] * self.rows_P)
        # documents without a row in the slice: all documents minus those of the slice
        outside_G = sum_D @ sum_D - by_slice(all_sum_P**2)
        outside_G -= 2.0 * rest_mean_G * (sum_D @ self.rows_D - by_slice(all_sum_P * all_rows_P))
        outside_G += rest_mean_G**2 * (squares - by_slice(all_rows_P**2))
        measured_2G = np.stack([by_slice(psi_P**2), share_G**2 * np.maximum(outside_G, 0.0)])
        weight_P = share_P * rest_rows_P - (1.0 - share_P) * self.rows_P
        expected_2G = np.stack(
            [
                row_variance * by_slice(share_P**2 * rest_rows_P + (1.0 - share_P) ** 2 * self.rows_P)
                + between * by_slice(weight_P**2),
                share_G**2
                * (row_variance * (n_rows - by_slice(all_rows_P)) + between * (squares - by_slice(all_rows_P**2))),
            ]
        )
        inside_G = by_slice(np.ones(len(self.slice_P)))
        count_2G = np.stack([inside_G, n_documents - inside_G])
        freedom_2G = np.maximum(count_2G - 1.0, 0.0) + PRIOR_DOCUMENTS
        # m / (m - 1) times the sum over m documents has m - 1 degrees of freedom
        return (count_2G * measured_2G + PRIOR_DOCUMENTS * expected_2G) / freedom_2G, freedom_2G


def _dropped_by_unit(
    artifact: ArtifactReader, predictor: Predictor, effects: SliceEffects, slices: LabelSlices, group_N: I64
) -> tuple[F64, F64]:
    """Return the change of each unit if a slice is dropped, (G, E), and the centred sums of random groups, (H, E).

    With c_ie the contribution of unit e to the effect of row i (`Predictor.change_by_units`) and m_e its mean over the
    N rows, the sum over the rows outside of a slice of n rows is sum_i (c_ie - m_e) = n m_e - sum over the slice of
    c_ie, since c_ie - m_e sums to 0 over the corpus. The mean over the units of a target is the change, up to a
    constant if there is a prior: the prediction from text follows the mean relevance of a slice, so that the deviations
    of units are those of the mean.
    """
    columns_E, protocol = predictor.units.columns_E, predictor.protocol
    groups = Weights.from_slices(group_N, int(group_N.max()) + 1)
    slice_GE = np.zeros((len(slices.slices), len(columns_E)))  # sum of c over the slice
    group_HE = np.zeros((groups.shape[0], len(columns_E)))
    for kernel, factor_E in predictor.unit_relevance_to_effect.items():
        blocks = relevance_blocks(artifact, kernel, columns_E, protocol.negative_factor(kernel))
        sum_GE, sum_HE = sums_over(blocks, [slices.each, groups], len(columns_E))
        slice_GE += sum_GE * factor_E
        group_HE += sum_HE * factor_E
    mean_E = group_HE.sum(axis=0) / predictor.n_rows
    rest_GE = np.outer(effects.sums.n_retained_B, mean_E) - slice_GE
    change_GE = predictor.change_by_units(rest_GE, mean_E, predictor.reweighted(effects.sums, DROPPED))
    return change_GE, group_HE - np.outer(np.bincount(group_N), mean_E)
