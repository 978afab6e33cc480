r"""What a row is worth to a task: an estimate of its mean over the task's questions, of which a sample is known.

For row i and question e, kernels k of weight w_k, relevance r as the scoring rule counts it:

    u_ie^k = (r_ie^k - mean_e) / sd_e                    every question counts alike
    v_ie^k = sgn(u) log(1 + |u|)                         one question does not carry a row
    q_ie   = sum_k w_k v_ie^k / sd_i(mean_e v_ie^k)      kernels of equal spread, added
    b_i    = mean_e q_ie                                 what the questions say of the row itself
    p_i    = ridge regression of b on the row's text, fitted on rows of other documents

b_i has the variance s_i^2 / n over samples of n questions, s_i^2 the variance of q_ie over them. The text's prediction
p_i is the mean beforehand (the prior), and the rest of b_i is believed as far as it is not noise of the sample:

    score_i = p_i + rho (b_i - p_i),     rho = 1 - mean_i s_i^2 / n / var_i(b_i - p_i), at least 0

Questions that agree have s = 0 and rho = 1: the score is their mean. Source: empirical Bayes with a regression as the
prior (Morris 1983); the logarithm is that of eq:grasp-score.

Everything is estimated on at most SAMPLE_ROWS rows, drawn by a hash of their names, so that neither the order of rows
nor shards matter; then all rows are scored in one pass over the stored relevance.

How far to trust it is measured by leaving questions out. They are dealt out to GROUPS groups, and all of the above is
linear in b, so that the score from any groups costs nothing more.
Shape letters: N rows, n rows of a block, S rows of the sample, E units, T targets, J groups of questions of all
targets, V slots, F folds.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import rankdata
from scipy.stats import t as student

from grasp.arrays import F32, F64, I32, I64, Blocks, Bool
from grasp.predict.token_features import SLOTS, TokenFeatures

SAMPLE_ROWS = 16_384
SAMPLE_BYTES = 256 << 20  # of the sample's relevance; fewer rows are drawn where there are many units
FOLDS = 5
PENALTY = 30.0  # of the ridge regression, whose rows have length 1
STEPS = 12  # of conjugate gradients; the penalty makes them converge
GROUPS = 4
FEW = 16  # questions below which a choice is mostly about them
LEVEL = 0.95
RELATIVE_ZERO = 1e-9  # a spread this small against the size of the numbers is rounding
AT_ONCE = 4_096  # rows of the sample

Texts = Callable[[I64], tuple[I32, I64]]  # token ids and offsets of rows by position


@dataclass(frozen=True, slots=True)
class Reliability:
    """How far a task's scores depend on the questions that happen to be known.

    Attributes:
        questions: of the task.
        ranking: rank correlation to expect between these scores and those from as many other questions; nan: a single
            question says nothing of it.
        carried: what other questions gain for each 1 that the scores promise.
        carried_low, carried_high: its 95 % interval, over groups of questions.
    """

    questions: int
    ranking: float
    carried: float
    carried_low: float
    carried_high: float

    def with_questions(self, count: int) -> float:
        """The reliability of the ranking with another number of questions (Spearman-Brown)."""
        factor = count / self.questions
        return factor * self.ranking / (1 + (factor - 1) * self.ranking)


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Scores of all rows for some tasks.

    Attributes:
        score_NT: mean 0 and standard deviation 1 over the rows.
        text_NT: the part of it that is the text's, in the same unit; the rest is the row's own.
        own_T: rho, how far a row's own relevance is believed.
    """

    score_NT: F32
    text_NT: F32
    own_T: F64
    reliability: tuple[Reliability, ...]


def estimate_tasks(
    relevance: Mapping[str, Callable[[], Blocks]],
    weights: Mapping[str, float],
    counts_T: Sequence[int] | I64,
    names: Sequence[str],
    documents_N: I64,
    texts: Texts | None,
) -> TaskScores:
    """Score all rows for the tasks.

    Args:
        relevance: by kernel: blocks of rows from first to last, (n, E), the units task by task.
        weights: of the kernels.
        counts_T: units of each task.
        names: of the rows; the sample and the folds depend on them, not on the order.
        documents_N: the document of every row: rows of one document are in one fold.
        texts: token ids of rows by position; None: no row's text says anything.
    """
    counts_T = np.asarray(counts_T, dtype=np.int64)
    bytes_of_row = 4 * int(counts_T.sum()) * len(relevance)
    draw_N = np.fromiter((_number(name) for name in names), dtype=np.uint64, count=len(names))
    most = min(SAMPLE_ROWS, max(1, SAMPLE_BYTES // bytes_of_row))
    sample = np.sort(np.argsort(draw_N, kind="stable")[:most])
    fold_N = _folds(draw_N, documents_N)
    held = {kernel: _picked(blocks(), sample) for kernel, blocks in relevance.items()}
    kernels = {kernel: _Kernel.fitted(block, weights[kernel], counts_T) for kernel, block in held.items()}
    tasks = [_Task.from_sample(held, kernels, counts_T, t) for t in range(len(counts_T))]
    del held
    text = None
    if texts is not None:
        base_SJ = np.concatenate([task.base_SG for task in tasks], axis=1)
        share_JT = np.zeros((base_SJ.shape[1], len(tasks)))
        at = 0
        for t, task in enumerate(tasks):
            share_JT[at : at + len(task.count_G), t] = task.count_G / task.count_G.sum()
            at += len(task.count_G)
        text, prior_SJ = _TextModel.fit(*texts(sample), base_SJ, fold_N[sample], share_JT)
        for task, part in zip(
            tasks, np.split(prior_SJ, np.cumsum([len(task.count_G) for task in tasks])[:-1], 1), strict=True
        ):
            task.prior_SG[:] = part
    own_T = np.array([task.own(np.ones(len(task.count_G), dtype=np.bool_)) for task in tasks])
    score_NT = np.empty((len(names), len(tasks)), np.float32)
    text_NT = np.zeros_like(score_NT)
    centre_T = np.array([task.centre for task in tasks])
    for start, base_nT in _all_rows(relevance, kernels, counts_T):
        rows = slice(start, start + len(base_nT))
        if text is not None and texts is not None:
            prior_nT = text.apply(*texts(np.arange(rows.start, rows.stop)), fold_N[rows])
            text_NT[rows] = (1 - own_T) * prior_nT
        score_NT[rows] = own_T * (base_nT - centre_T) + text_NT[rows]
    spread_T = score_NT.std(axis=0, dtype=np.float64)
    inverse_T = np.divide(1.0, spread_T, out=np.zeros_like(spread_T), where=spread_T > 0)
    for t in range(len(tasks)):  # a column at a time, in place
        score_NT[:, t] = (score_NT[:, t] - score_NT[:, t].mean(dtype=np.float64)) * inverse_T[t]
        text_NT[:, t] = (text_NT[:, t] - text_NT[:, t].mean(dtype=np.float64)) * inverse_T[t]
    return TaskScores(score_NT, text_NT, own_T, tuple(task.reliability() for task in tasks))


# ---------------------------------------------------------------------------------------------- what the questions say


def damped(value: F32) -> F32:
    """sgn(u) log(1 + |u|)."""
    return np.copysign(np.log1p(np.abs(value)), value)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What brings one kernel's relevance to v, and v to the sum of a task."""

    mean_E: F32
    inverse_E: F32  # 1 / sd; 0 where nothing varies
    slope_T: F64  # w / sd over rows of the mean over questions

    @classmethod
    def fitted(cls, block_SE: F32, weight: float, counts_T: I64) -> "_Kernel":
        """From the rows of the sample."""
        mean_E, sd_E = block_SE.mean(axis=0, dtype=np.float64), block_SE.std(axis=0, dtype=np.float64)
        varies_E = sd_E > RELATIVE_ZERO * np.maximum(np.abs(mean_E), np.finfo(float).tiny)
        inverse_E = np.divide(1.0, sd_E, out=np.zeros_like(sd_E), where=varies_E)
        raw = cls(mean_E.astype(np.float32), inverse_E.astype(np.float32), np.ones(len(counts_T)))
        spread_T = np.concatenate([raw.sums(block, counts_T) for _, block in _in_blocks(block_SE)]).std(axis=0)
        slope_T = np.divide(weight, spread_T, out=np.zeros_like(spread_T), where=spread_T > RELATIVE_ZERO)
        return cls(raw.mean_E, raw.inverse_E, slope_T)

    def values(self, block_nE: F32, columns: slice = slice(None)) -> F32:
        """v of a block of rows, (n, E)."""
        return damped((block_nE - self.mean_E[columns]) * self.inverse_E[columns])

    def sums(self, block_nE: F32, counts_T: I64) -> F64:
        """w times the mean of v over the questions of each task, over its spread, (n, T)."""
        ends_T = np.cumsum(counts_T)
        sum_nT = np.add.reduceat(self.values(block_nE), ends_T - counts_T, axis=1, dtype=np.float64)
        return np.asarray(self.slope_T * (sum_nT / counts_T))


@dataclass(frozen=True, slots=True)
class _Task:
    """One task in the rows of the sample, its questions in groups: means of q, and what the text says of them.

    All is linear in the questions, so that a mean over groups stands for their questions.
    """

    base_SG: F64
    prior_SG: F64
    count_G: I64  # questions
    centre: float  # mean over the rows of the mean of q, which base_SG is without
    noise: float  # mean over rows of the variance of q over questions; nan: a single question

    @classmethod
    def from_sample(cls, held: Mapping[str, F32], kernels: Mapping[str, _Kernel], counts_T: I64, t: int) -> "_Task":
        """Deal the questions out in turn, and take means."""
        count = int(counts_T[t])
        columns = slice(int(counts_T[:t].sum()), int(counts_T[: t + 1].sum()))
        group_E = np.arange(count) % min(GROUPS, count)
        count_G = np.bincount(group_E)
        share_EG = (group_E[:, None] == np.arange(len(count_G))) / count_G
        parts, squares = [], 0.0
        for rows in _row_slices(len(next(iter(held.values())))):
            q_sE = sum(
                kernel.slope_T[t] * kernel.values(held[name][rows, columns], columns).astype(np.float64)
                for name, kernel in kernels.items()
            )
            parts.append(q_sE @ share_EG)
            squares += float(np.square(q_sE - q_sE.mean(axis=1, keepdims=True)).sum())
        base_SG = np.concatenate(parts)
        mean_G = base_SG.mean(axis=0)
        noise = squares / (len(base_SG) * (count - 1)) if count > 1 else np.nan
        centre = float(mean_G @ count_G) / count
        return cls(base_SG - mean_G, np.zeros_like(base_SG), count_G, centre, noise)

    def mean(self, value_SG: F64, groups_G: Bool | None) -> F64:
        """Mean over the questions of some groups, (S,); None: of all."""
        count_G = self.count_G if groups_G is None else self.count_G * groups_G
        return np.asarray(value_SG @ (count_G / count_G.sum()))

    def own(self, groups_G: Bool) -> float:
        """rho where the questions of these groups are known; 1 where a single question says nothing of the noise."""
        rest_S = self.mean(self.base_SG - self.prior_SG, groups_G)
        variance = float(rest_S.var())
        if np.isnan(self.noise) or variance == 0.0 or not self.prior_SG.any():
            return 1.0
        return max(0.0, 1.0 - self.noise / float((self.count_G * groups_G).sum()) / variance)

    def score(self, groups_G: Bool) -> F64:
        """The estimate from the questions of some groups, (S,), not yet of standard deviation 1."""
        prior_S, own = self.mean(self.prior_SG, groups_G), self.own(groups_G)
        return prior_S + own * (self.mean(self.base_SG, groups_G) - prior_S)

    def reliability(self) -> Reliability:
        """What leaving questions out says."""
        n_groups, count = len(self.count_G), int(self.count_G.sum())
        if n_groups < 2:
            return Reliability(count, np.nan, np.nan, np.nan, np.nan)
        all_G = np.arange(n_groups)
        halves = [np.isin(all_G, some) for some in combinations(range(n_groups), n_groups // 2)]
        found = []
        for half_G in halves:
            if half_G[0] or 2 * half_G.sum() < n_groups:  # each split once
                pair = Reliability(count // 2, _rank_correlation(self.score(half_G), self.score(~half_G)), 0, 0, 0)
                found.append(pair.with_questions(count) if pair.ranking > 0 else 0.0)
        carried_G = np.array([self._carried(all_G == g) for g in all_G])
        half = float(student.ppf(0.5 + LEVEL / 2, n_groups - 1) * carried_G.std(ddof=1) / np.sqrt(n_groups))
        carried = float(carried_G.mean())
        return Reliability(count, float(np.mean(found)), carried, carried - half, carried + half)

    def _carried(self, left_G: Bool) -> float:
        """Slope of the mean over the questions left out on the score from the others."""
        score_S, other_S = self.score(~left_G), self.mean(self.base_SG, left_G)
        variance = float(score_S.var())
        return float(np.mean((score_S - score_S.mean()) * other_S)) / variance if variance else 0.0


def _rank_correlation(x_S: F64, y_S: F64) -> float:
    """Spearman's; 0 where one of the two is constant."""
    x_S, y_S = rankdata(x_S), rankdata(y_S)
    spread = x_S.std() * y_S.std()
    return float(np.mean((x_S - x_S.mean()) * (y_S - y_S.mean())) / spread) if spread else 0.0


# ----------------------------------------------------------------------------------------------------- what a text says


@dataclass(frozen=True, slots=True)
class _TextModel:
    """Ridge regression on hashed tf-idf, one a fold: a row is scored by the one that saw no row of its fold."""

    features: TokenFeatures
    table_FVT: F32
    constant_FT: F64

    @classmethod
    def fit(cls, ids: I32, offsets: I64, base_SJ: F64, fold_S: I64, share_JT: F64) -> tuple["_TextModel", F64]:
        """The model of the tasks, and predictions of every group's mean for rows of the folds left out, (S, J)."""
        features = TokenFeatures.from_rows(ids, offsets)
        matrix_SV = features.matrix(ids, offsets)
        prior_SJ = np.zeros_like(base_SJ)
        table_FVT = np.zeros((FOLDS, SLOTS, share_JT.shape[1]), dtype=np.float32)
        constant_FT = np.zeros((FOLDS, share_JT.shape[1]))
        for fold in range(FOLDS):
            rest, held = np.flatnonzero(fold_S != fold), np.flatnonzero(fold_S == fold)
            if not len(rest):
                continue
            some_sV = matrix_SV[rest]
            weight_VJ, constant_J = _ridge(some_sV, base_SJ[rest])
            prior_SJ[held] = matrix_SV[held] @ weight_VJ + constant_J
            table_FVT[fold], constant_FT[fold] = weight_VJ @ share_JT, constant_J @ share_JT
        return cls(features, table_FVT, constant_FT), prior_SJ

    def apply(self, ids: I32, offsets: I64, fold_n: I64) -> F64:
        """Predictions of rows, (n, T)."""
        return self.features.apply(ids, offsets, self.table_FVT, fold_n) + self.constant_FT[fold_n]


def _ridge(x_SV: csr_array, y_SJ: F64) -> tuple[F32, F64]:
    """argmin_W |(X - mean) W - (Y - mean)|^2 + PENALTY |W|^2 by conjugate gradients, and the constant beside it.

    Centring is never done to X, which is sparse: (X - 1 m^T) W = X W - 1 (m^T W).
    """
    m_V = np.asarray(x_SV.mean(axis=0), dtype=np.float32)
    mean_J = y_SJ.mean(axis=0)
    x_VS = csr_array(x_SV.T)

    def transposed(r_SJ: F32) -> F32:
        return x_VS @ r_SJ - np.outer(m_V, r_SJ.sum(axis=0))

    residual_VJ = transposed((y_SJ - mean_J).astype(np.float32))
    weight_VJ, step_VJ = np.zeros_like(residual_VJ), residual_VJ.copy()
    square_J = np.square(residual_VJ, dtype=np.float64).sum(axis=0)
    for _ in range(STEPS):
        image_VJ = transposed(x_SV @ step_VJ - m_V @ step_VJ) + PENALTY * step_VJ
        curvature_J = (step_VJ * image_VJ).sum(axis=0, dtype=np.float64)
        along_J = np.divide(square_J, curvature_J, out=np.zeros_like(square_J), where=curvature_J > 0)
        weight_VJ += (along_J * step_VJ).astype(np.float32)
        residual_VJ -= (along_J * image_VJ).astype(np.float32)
        before_J, square_J = square_J, np.square(residual_VJ, dtype=np.float64).sum(axis=0)
        ratio_J = np.divide(square_J, before_J, out=np.zeros_like(square_J), where=before_J > 0)
        step_VJ = residual_VJ + ratio_J.astype(np.float32) * step_VJ
    return weight_VJ, mean_J - m_V @ weight_VJ


# ------------------------------------------------------------------------------------------------------- rows by blocks


def _number(name: str) -> int:
    """A number that a name decides."""
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "little")


def _folds(draw_N: NDArray[np.uint64], documents_N: I64) -> I64:
    """The fold of every row: of its document, by the smallest number of a row in it."""
    smallest = np.full(int(documents_N.max()) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest, documents_N, draw_N)
    return (smallest[documents_N] % np.uint64(FOLDS)).astype(np.int64)


def _picked(blocks: Blocks, sample: I64) -> F32:
    """The rows of the sample, (S, E)."""
    parts = []
    for start, block in blocks:
        low, high = np.searchsorted(sample, (start, start + len(block)))
        parts.append(block[sample[low:high] - start])
    return np.concatenate(parts)


def _row_slices(n_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + AT_ONCE, n_rows)) for start in range(0, n_rows, AT_ONCE))


def _in_blocks(block_SE: F32) -> Blocks:
    return ((rows.start, block_SE[rows]) for rows in _row_slices(len(block_SE)))


def _all_rows(
    relevance: Mapping[str, Callable[[], Blocks]], kernels: Mapping[str, _Kernel], counts_T: I64
) -> Iterator[tuple[int, F64]]:
    """b of all rows and tasks, in blocks."""
    for parts in zip(*(relevance[name]() for name in kernels), strict=True):
        base_nT = sum(kernel.sums(block, counts_T) for (_, block), kernel in zip(parts, kernels.values(), strict=True))
        yield parts[0][0], np.asarray(base_nT)
