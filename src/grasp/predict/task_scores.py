r"""What a row is worth to a task: an estimate of its mean over the task's questions, of which a sample is known.

For row i and question e, kernels k of weight w_k, relevance r as the scoring rule counts it:

    q_ie   = sum_k c_e^k r_ie^k      every question of unit spread over the rows, then every kernel's mean over them
    b_i    = mean_e q_ie             what the questions say of the row itself
    p_i    = g times a ridge regression of b on the row's text, fitted on rows of other documents; g, the slope of the
             mean over questions left out on that of the others, undoes what the penalty shrinks too far

b_i has the variance s_i^2 / n over samples of n questions, s_i^2 the variance of q_ie over them. The text's prediction
p_i is the mean beforehand (the prior), and the rest of b_i counts as far as it is not noise of the sample:

    score_i = p_i + rho (b_i - p_i),     rho = 1 - mean_i s_i^2 / n / var_i(b_i - p_i), at least 0

Questions that agree have s = 0 and rho = 1: the score is their mean. Source: empirical Bayes with a regression as the
prior (Morris 1983).

p and rho are estimated on at most SAMPLE_ROWS rows, drawn by a hash of their names, so that neither the order of rows
nor shards matter; then p of all rows takes one reading of their tokens.

How far to trust a score is measured by leaving questions out. They are dealt out to GROUPS groups, and all of the above
is linear in b, so that the score from any groups costs nothing more.
Shape letters: N rows, n rows of a block, S rows of the sample, E units, T targets, G groups of a task's questions, J
those of all tasks, V slots, F folds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.sparse import csr_array
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
AT_ONCE = 4_096  # rows of the sample
TEXT_ROWS = 65_536  # rows whose tokens are in memory together

Texts = Callable[[I64], tuple[I32, I64]]  # token ids and offsets of rows by position


@dataclass(frozen=True, slots=True)
class Reliability:
    """How far a task's scores depend on the questions that happen to be known.

    Attributes:
        questions: of the task.
        ranking: correlation to expect between these scores and those from as many other questions of the task; nan: a
            single question says nothing of it.
        carried: what other questions gain for each 1 that the scores promise.
        carried_low, carried_high: its 95 % interval, over groups of questions.
    """

    questions: int
    ranking: float
    carried: float
    carried_low: float
    carried_high: float

    def with_questions(self, count: int) -> float:
        """Return the reliability of the ranking with another number of questions (Spearman-Brown)."""
        factor = count / self.questions
        return factor * self.ranking / (1 + (factor - 1) * self.ranking)

    def note(self, target: str) -> str:
        """Describe the reliability in one line; of few questions say what to do."""
        if self.questions < FEW:
            known = f"{self.questions} question" + ("s" if self.questions > 1 else "")
            return f"{target}: {known}: the ranking is mostly about them; add questions, {FEW} or more"
        return (
            f"{target}: reliability of the ranking {self.ranking:.2f} with {self.questions} questions; about "
            f"{self.with_questions(2 * self.questions):.2f} with {2 * self.questions}"
        )

    def on_others(self, target: str, change: float) -> str | None:
        """Describe a change on other questions of the task; None where nothing is known of it."""
        if not np.isfinite(self.carried):
            return None
        low, high = sorted((change * self.carried_low, change * self.carried_high))
        return f"{target}: expected on other questions {change * self.carried:+.2f} ({low:+.2f} to {high:+.2f})"


@dataclass(frozen=True, slots=True)
class Prior:
    """What the text of rows says of some tasks, and how far to go by it.

    Attributes:
        text_NT: p, less its mean over the sample.
        rho_T: rho: weight of what the questions say of a row beyond its text; 1: the text is not used.
    """

    text_NT: F32
    rho_T: F64
    reliability: tuple[Reliability, ...]


def fit_prior(
    relevance: Mapping[str, Callable[[], Blocks]],
    coefficients: Mapping[str, F64],
    counts_T: I64,
    names: Sequence[str],
    documents_N: I64,
    texts: Texts | None,
) -> Prior:
    """Learn what text says of the tasks.

    Args:
        relevance: by kernel: blocks of rows from first to last, (n, E), the units task by task.
        coefficients: by kernel: c of every unit.
        counts_T: units of each task.
        names: of the rows; the sample and the folds depend on them, not on the order.
        documents_N: the document of every row: rows of one document are in one fold.
        texts: token ids of rows by position; None: no row's text says anything.
    """
    draw_N = np.fromiter((_number(name) for name in names), dtype=np.uint64, count=len(names))
    most = min(SAMPLE_ROWS, max(1, SAMPLE_BYTES // (4 * int(counts_T.sum()))))
    sample = np.sort(np.argsort(draw_N, kind="stable")[:most])
    fold_N = _folds(draw_N, documents_N)
    q_SE = np.zeros((len(sample), int(counts_T.sum())), dtype=np.float32)
    for kernel, blocks in relevance.items():
        _add_rows(q_SE, blocks(), sample, coefficients[kernel].astype(np.float32))
    ends_T = np.cumsum(counts_T)
    tasks = [_Task.from_questions(q_SE[:, end - count : end]) for end, count in zip(ends_T, counts_T, strict=True)]
    del q_SE
    text_NT = np.zeros((len(names), len(tasks)), dtype=np.float32)
    if texts is not None:
        base_SJ = np.concatenate([task.base_SG for task in tasks], axis=1)
        shares = [task.count_G / task.count_G.sum() for task in tasks]
        text, prior_SJ = _TextModel.fit(*texts(sample), base_SJ, fold_N[sample], block_diag(*shares).T)
        ends = np.cumsum([len(share) for share in shares])
        tasks = [
            replace(task, prior_SG=prior_SJ[:, end - len(share) : end])
            for task, share, end in zip(tasks, shares, ends, strict=True)
        ]
        slope_T = np.array([task.prior_slope() for task in tasks])
        tasks = [replace(task, prior_SG=slope * task.prior_SG) for task, slope in zip(tasks, slope_T, strict=True)]
        for start in range(0, len(names), TEXT_ROWS):
            rows = np.arange(start, min(start + TEXT_ROWS, len(names)))
            text_NT[rows] = slope_T * text.apply(*texts(rows), fold_N[rows])
    rho_T = np.array([task.shrinkage(np.ones(len(task.count_G), dtype=np.bool_)) for task in tasks])
    return Prior(text_NT, rho_T, tuple(task.reliability() for task in tasks))


# ---------------------------------------------------------------------------------------------- what the questions say


@dataclass(frozen=True, slots=True)
class _Task:
    """One task in the rows of the sample, its questions in groups: means of q, and what the text says of them.

    All is linear in the questions, so that a mean over groups stands for their questions.
    """

    base_SG: F64  # less its mean over the rows
    prior_SG: F64
    count_G: I64  # questions
    noise: float  # mean over rows of the variance of q over questions; nan: a single question

    @classmethod
    def from_questions(cls, q_SE: F32) -> "_Task":
        """Deal the questions out in turn, and take means; the text says nothing yet."""
        n_rows, count = q_SE.shape
        group_E = np.arange(count) % min(GROUPS, count)
        count_G = np.bincount(group_E)
        share_EG = (group_E[:, None] == np.arange(len(count_G))) / count_G
        parts, squares = [], 0.0
        centre_E = q_SE.mean(axis=0, dtype=np.float64)
        for start in range(0, n_rows, AT_ONCE):
            q_sE = q_SE[start : start + AT_ONCE] - centre_E
            parts.append(q_sE @ share_EG)
            squares += float(np.square(q_sE - q_sE.mean(axis=1, keepdims=True)).sum())
        base_SG = np.concatenate(parts)
        noise = squares / (n_rows * (count - 1)) if count > 1 else np.nan
        return cls(base_SG, np.zeros_like(base_SG), count_G, noise)

    def mean(self, value_SG: F64, groups_G: Bool | None) -> F64:
        """Mean over the questions of some groups, (S,); None: of all."""
        count_G = self.count_G if groups_G is None else self.count_G * groups_G
        return np.asarray(value_SG @ (count_G / count_G.sum()))

    def shrinkage(self, groups_G: Bool) -> float:
        """rho where the questions of these groups are known; 1 where a single question says nothing of the noise."""
        rest_S = self.mean(self.base_SG - self.prior_SG, groups_G)
        variance = float(rest_S.var())
        if np.isnan(self.noise) or variance == 0.0 or not self.prior_SG.any():
            return 1.0
        return max(0.0, 1.0 - self.noise / float((self.count_G * groups_G).sum()) / variance)

    def score(self, groups_G: Bool, rho: float | None = None) -> F64:
        """The estimate from the questions of some groups, (S,), not yet of standard deviation 1.

        Args:
            rho: None: what follows from these questions.
        """
        prior_S, rho = self.mean(self.prior_SG, groups_G), self.shrinkage(groups_G) if rho is None else rho
        return prior_S + rho * (self.mean(self.base_SG, groups_G) - prior_S)

    def reliability(self) -> Reliability:
        """What leaving questions out says.

        With one rho, scores from two halves of the questions have their covariance in common with those from two
        other samples of any size; what is left of the variance of the scores is noise.
        """
        n_groups, count = len(self.count_G), int(self.count_G.sum())
        if n_groups < 2:
            return Reliability(count, np.nan, np.nan, np.nan, np.nan)
        all_G = np.arange(n_groups)
        every_G = all_G >= 0
        rho = self.shrinkage(every_G)
        halves = [np.isin(all_G, some) for some in combinations(range(n_groups), n_groups // 2)]
        pairs = [(self.score(half_G, rho), self.score(~half_G, rho)) for half_G in halves]
        signal, whole = float(np.mean([np.mean(a_S * b_S) for a_S, b_S in pairs])), self.score(every_G).var()
        ranking = min(max(signal / float(whole), 0.0), 1.0) if whole else 0.0
        carried_G = np.array([self._slope(self.score(all_G != g), all_G == g) for g in all_G])
        half = float(student.ppf(0.5 + LEVEL / 2, n_groups - 1) * carried_G.std(ddof=1) / np.sqrt(n_groups))
        carried = float(carried_G.mean())
        return Reliability(count, ranking, carried, carried - half, carried + half)

    def prior_slope(self) -> float:
        """g, from questions left out; 1 where there is a single one."""
        all_G = np.arange(len(self.count_G))
        if len(all_G) < 2:
            return 1.0
        slopes = [self._slope(self.mean(self.prior_SG, all_G != g), all_G == g) for g in all_G]
        return max(0.0, float(np.mean(slopes)))

    def _slope(self, value_S: F64, left_G: Bool) -> float:
        """Slope of the mean over the questions left out on a prediction of it; 0 where that is constant."""
        other_S, variance = self.mean(self.base_SG, left_G), float(value_S.var())
        return float(np.mean((value_S - value_S.mean()) * other_S)) / variance if variance else 0.0


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


def _add_rows(sum_SE: F32, blocks: Blocks, sample: I64, factor_E: F32) -> None:
    """Add the rows of the sample, times a factor a unit."""
    for start, block in blocks:
        low, high = np.searchsorted(sample, (start, start + len(block)))
        sum_SE[low:high] += factor_E * block[sample[low:high] - start]
