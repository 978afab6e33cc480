r"""Score of a row for a task: an estimate of its mean over all questions of the task, from a sample of them.

For row i and question e of a task, with r_kie the relevance by kernel k:

    q_ie = sum_k c_ke r_kie,    c_ke = (w_k / sd_k) (v_e / sd_ke)

    w_k     weight of the kernel in the protocol
    v_e     weight of the question in its task, 1 on average
    sd_ke   standard deviation over rows of r_kie; 1 if the protocol scores by the mean (`task: mean`)
    sd_k    standard deviation over rows of the kernel's mean over questions, mean_e (v_e / sd_ke) r_kie

The coefficients c are computed by `grasp.predict.predictor.assemble_predictor`. From the known questions,

    b_i  = mean_e q_ie
    p_i  = g f(text of row i) + g' h(labels of row i)

f is a ridge regression of b on text, and h one of b - g f on the values of the labels, such as topic or source; both
are fitted on rows of other documents. The ridge penalty shrinks f and h, which g and g' undo. They are measured by
holding out groups of questions: with b^G the mean over group G, and f^G the regression that is fitted to it,

    g  = max(0, mean_G slope(b^G on f^-G)),              slope(y on x) = cov_i(x, y) / var_i(x)
    g' = max(0, mean_G slope(b^G - g f^G on h^-G)),      -G: all other groups

g' is large if questions agree about slices. A ridge regression is linear in its outcome, so f^-G is the mean of the
f of the other groups: b and p are kept by group (`_Task`). Over samples of n questions, b_i has the variance
s_i^2 / n, with s_i^2 the variance of q_ie over questions. With p_i as the prior mean, the rest of b_i is shrunk by the
share of its variance that is not sampling noise:

    score_i = p_i + rho (b_i - p_i),     rho = max(0, 1 - mean_i(s_i^2 / n) / var_i(b_i - p_i))

If all questions agree, s = 0 and rho = 1: the score is their mean. Source: parametric empirical Bayes with a regression
as the prior mean (Morris 1983).

f, h and rho are estimated on a sample of rows (SAMPLE_ROWS), drawn by a hash of row names and therefore independent of
the order of rows and of shards. Then p is computed for all rows in one pass over their tokens.

Reliability is measured by holding out questions, in GROUPS groups; the score is linear in b, so that scores from any
groups cost nothing more. Protocols that score by the mean alone (rho = 1) have `mean_reliability`.
Start with `fit_prior`.
Shape letters: N rows, n rows of a block, S rows of the sample, E units (questions) of all tasks, e units of one task,
T targets, G groups of a task's questions, J groups of all tasks, V slots, l labels, L label values, F folds.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import stdtrit

from grasp.arrays import F32, F64, I32, I64, Blocks, Bool
from grasp.corpus.token_regression import PENALTY, TokenFeatures, ridge

SAMPLE_ROWS = 16_384  # rows on which regressions and reliability are estimated
SAMPLE_TOKENS = 1 << 23  # limit for the tokens of the sample
FOLDS = 5
GROUPS = 4
FEW_QUESTIONS = 16  # below this number the ranking depends mostly on the known questions
LEVEL = 0.95  # of intervals
BLOCK_TOKENS = 1 << 21
ALL = np.ones(1, dtype=np.bool_)  # mask of all groups, by broadcasting


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of rows, read on demand."""

    lengths_N: I64
    read: Callable[[I64], tuple[I32, I64]]  # row positions -> flat token ids, offsets

    def blocks(self) -> Iterator[slice]:
        """Split the rows into blocks of about BLOCK_TOKENS tokens, at least one row each."""
        end_N, start = np.cumsum(self.lengths_N), 0
        while start < len(end_N):
            limit = end_N[start] - self.lengths_N[start] + BLOCK_TOKENS
            stop = max(start + 1, int(np.searchsorted(end_N, limit, side="right")))
            yield slice(start, stop)
            start = stop


@dataclass(frozen=True, slots=True)
class Reliability:
    """How far the scores of a task depend on which questions are known.

    Attributes:
        questions: number of known questions.
        ranking: expected correlation with scores from as many other questions; nan for a single question.
        transfer: expected gain on other questions of the task per unit of predicted gain; nan for a single question.
        transfer_low, transfer_high: its 95 % interval over groups of questions.
    """

    questions: int
    ranking: float
    transfer: float
    transfer_low: float
    transfer_high: float

    def with_questions(self, count: int) -> float:
        """Predict the reliability of the ranking with another number of questions (Spearman-Brown formula)."""
        factor = count / self.questions
        return factor * self.ranking / (1 + (factor - 1) * self.ranking)

    def note(self, target: str) -> str:
        """Describe the reliability in one line, or warn if there are few questions."""
        if self.questions < FEW_QUESTIONS:
            count = f"{self.questions} question" + ("s" if self.questions > 1 else "")
            return (
                f"{target}: only {count}; the ranking depends mostly on them: add questions, at least {FEW_QUESTIONS}"
            )
        return (
            f"{target}: reliability of the ranking {self.ranking:.2f} with {self.questions} questions, about "
            f"{self.with_questions(2 * self.questions):.2f} with {2 * self.questions}; expected is "
            f"{self.transfer:.2f} (95% interval {self.transfer_low:.2f} to {self.transfer_high:.2f}) times the change"
        )

    def expected(self, change: float) -> tuple[float, float]:
        """Return the expected change on other questions of the task, and half of its 95 % interval; nan if unknown."""
        return change * self.transfer, abs(change) * (self.transfer_high - self.transfer_low) / 2


@dataclass(frozen=True, slots=True)
class Prior:
    """Predictions of tasks from text and labels, and the weight of the known questions relative to them.

    Attributes:
        prior_NT: p, relative to its mean over the sample.
        rho_T: rho, weight of the part of b that p does not predict; 1: p is not used.
        reliability: reliability of the scores, by task.
    """

    prior_NT: F32
    rho_T: F64
    reliability: tuple[Reliability, ...]


def fit_prior(
    relevance: Mapping[str, Callable[[], Blocks]],
    coefficients: Mapping[str, F64],
    counts_T: I64,
    names: Sequence[str],
    documents_N: I64,
    texts: Texts | None,
    labels: Sequence[I32] = (),
) -> Prior:
    """Fit the regressions on text and labels, and the shrinkage of every task.

    Args:
        relevance: by kernel: function that yields (first row, relevance (n, E)), with the units task by task.
        coefficients: by kernel: c, (E,).
        counts_T: number of units per task.
        names: row_id of every row; sample and folds depend on them, not on the order of rows.
        documents_N: document of every row; rows of a document are in one fold.
        texts: token ids of the rows; None: p = 0 and rho = 1, and labels are not used either.
        labels: by label: code of each row's value, (N,).
    """
    hash_N = _name_hashes(names)
    sample = _draw_sample(hash_N, None if texts is None else texts.lengths_N)
    plain_tasks = _sampled_tasks(relevance, coefficients, counts_T, sample)
    if texts is None:
        prior_NT, tasks = np.zeros((len(names), len(plain_tasks)), dtype=np.float32), plain_tasks
    else:
        # the fold of a row is that of the smallest hash of the rows of its document
        hash_of_document = np.full(int(documents_N.max()) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
        np.minimum.at(hash_of_document, documents_N, hash_N)
        fold_N = (hash_of_document[documents_N] % np.uint64(FOLDS)).astype(np.int64)
        prior_NT, tasks = _predict_rows(plain_tasks, texts, labels, fold_N, sample)
    rho_T = np.array([task.shrinkage(ALL) for task in tasks])
    return Prior(prior_NT, rho_T, tuple(task.reliability() for task in tasks))


def mean_reliability(
    relevance: Mapping[str, Callable[[], Blocks]],
    coefficients: Mapping[str, F64],
    counts_T: I64,
    names: Sequence[str],
) -> tuple[Reliability, ...]:
    """Measure the reliability of the mean over the known questions as the score of a row, for every task.

    Args:
        relevance: by kernel: function that yields (first row, relevance (n, E)), with the units task by task.
        coefficients: by kernel: c, (E,).
        counts_T: number of units per task.
        names: row names; the sample depends on them.
    """
    sample = _draw_sample(_name_hashes(names), None)
    return tuple(task.reliability() for task in _sampled_tasks(relevance, coefficients, counts_T, sample))


@dataclass(frozen=True, slots=True)
class _Task:
    """Means of q over groups of a task's questions, for the rows of the sample.

    Everything is linear in the questions, so that weighted means over groups are means over their questions.
    """

    mean_SG: F64  # b of every group, with the mean over rows subtracted
    prior_SG: F64  # p of every group, as if only its questions were known: needed to predict one group from others
    count_G: I64  # number of questions
    noise: float  # mean over rows of the variance of q over questions; nan for a single question

    def shrinkage(self, groups_G: Bool) -> float:
        """Return rho if the questions of these groups are known; 1 without a prior or an estimate of the noise."""
        residual_S = _mean_of_groups(self.mean_SG - self.prior_SG, self.count_G, groups_G)
        variance = float(residual_S.var())
        if np.isnan(self.noise) or variance == 0.0 or not self.prior_SG.any():
            return 1.0
        return max(0.0, 1.0 - self.noise / float((self.count_G * groups_G).sum()) / variance)

    def score(self, groups_G: Bool, rho: float) -> F64:
        """Return the score from the questions of some groups, (S,)."""
        prior_S = _mean_of_groups(self.prior_SG, self.count_G, groups_G)
        return prior_S + rho * (_mean_of_groups(self.mean_SG, self.count_G, groups_G) - prior_S)

    def reliability(self) -> Reliability:
        """Estimate the reliability by holding out groups of questions.

        Scores from two halves of the questions have independent noise, so that their covariance is the variance of the
        noise-free score, which does not depend on the number of questions if rho is fixed. The rest of the variance of
        the score is noise.
        """
        n_groups, count = len(self.count_G), int(self.count_G.sum())
        if n_groups < 2:
            return Reliability(count, np.nan, np.nan, np.nan, np.nan)
        groups, rho = np.arange(n_groups), self.shrinkage(ALL)
        halves = [np.isin(groups, half) for half in combinations(range(n_groups), n_groups // 2)]
        pairs = [(self.score(half_G, rho), self.score(~half_G, rho)) for half_G in halves]
        covariance = float(np.mean([np.mean(first_S * second_S) for first_S, second_S in pairs]))
        variance = self.score(ALL, rho).var()
        ranking = min(max(covariance / float(variance), 0.0), 1.0) if variance else 0.0
        slopes = [
            _slope(
                self.score(included_G, self.shrinkage(included_G)),
                _mean_of_groups(self.mean_SG, self.count_G, ~included_G),
            )
            for included_G in ~np.eye(n_groups, dtype=np.bool_)  # all groups but one
        ]
        slope_G = np.array(slopes)
        half_width = float(stdtrit(n_groups - 1, 0.5 + LEVEL / 2) * slope_G.std(ddof=1) / np.sqrt(n_groups))
        transfer, error, known_share = float(slope_G.mean()), half_width, 1.0 - 1.0 / n_groups
        if 0.0 < transfer < 1.0:
            # With all questions the score has less noise. The slope is v / (v + s^2 / n) for scores of variance v, so a
            # slope b with a share k of the questions becomes b / (b + (1 - b) k); its derivative by b is
            # k / (b + (1 - b) k)^2, which scales the interval. A slope outside of (0, 1) has no such explanation.
            divisor = transfer + (1.0 - transfer) * known_share
            transfer, error = transfer / divisor, half_width * known_share / divisor**2
        return Reliability(count, ranking, transfer, transfer - error, transfer + error)


def _mean_of_groups(value_SG: F64, count_G: I64, groups_G: Bool) -> F64:
    """Average over the questions of some groups, (S,)."""
    included_G = count_G * groups_G
    return np.asarray(value_SG @ (included_G / included_G.sum()))


def _slope(prediction_S: F64, outcome_S: F64) -> float:
    """Return the slope of an outcome of mean 0 on a prediction of it; 0 for a constant prediction."""
    variance = float(prediction_S.var())
    return float(np.mean((prediction_S - prediction_S.mean()) * outcome_S)) / variance if variance else 0.0


def _predict_rows(
    tasks: Sequence[_Task], texts: Texts, labels: Sequence[I32], fold_N: I64, sample: I64
) -> tuple[F32, list[_Task]]:
    """Fit both regressions; return p of all rows, (N, T), and the tasks with out-of-fold predictions as priors."""
    mean_SJ = np.concatenate([task.mean_SG for task in tasks], axis=1)
    task_J = np.repeat(np.arange(len(tasks)), [len(task.count_G) for task in tasks])
    share_J = np.concatenate([task.count_G / task.count_G.sum() for task in tasks])
    share_JT = share_J[:, None] * (task_J[:, None] == np.arange(len(tasks)))  # groups -> mean of the task
    features, text_SV = TokenFeatures.fit(*texts.read(sample))
    regressions: list[tuple[csr_array, _Solver]] = [(text_SV, ridge)]
    starts = np.cumsum([0, *(int(code_N.max()) + 1 for code_N in labels)])  # first column of every label in L
    if labels:
        # indicators of the values of all labels, (S, L): every row has one value of each label
        column_Sl = np.stack([start + code_N[sample] for code_N, start in zip(labels, starts[:-1], strict=True)], 1)
        indptr, shape = np.arange(len(sample) + 1) * len(labels), (len(sample), int(starts[-1]))
        regressions.append((csr_array((np.ones(column_Sl.size), column_Sl.ravel(), indptr), shape=shape), _exact_ridge))
    prior_SJ, models = np.zeros_like(mean_SJ), []
    for x_SV, solve in regressions:  # on text, and then on labels: the rest b - g f
        residual_SJ = mean_SJ - prior_SJ
        model = _CrossFit.fit(x_SV, residual_SJ, fold_N[sample], share_JT, solve)
        slope_T = np.ones(len(tasks))  # g, and then g': the mean slope of each group on the prediction from the others
        for t, task in enumerate(tasks):
            if len(task.count_G) > 1:
                mean_SG, prior_SG = residual_SJ[:, task_J == t], model.prediction_SJ[:, task_J == t]
                slopes = [
                    _slope(_mean_of_groups(prior_SG, task.count_G, g), _mean_of_groups(mean_SG, task.count_G, ~g))
                    for g in ~np.eye(len(task.count_G), dtype=np.bool_)  # all groups but one
                ]
                slope_T[t] = max(0.0, float(np.mean(slopes)))
        model = replace(model, slope_T=slope_T)
        prior_SJ += model.slope_T[task_J] * model.prediction_SJ
        models.append(model)
    prior_NT = np.zeros((len(fold_N), len(tasks)), dtype=np.float32)
    for rows in texts.blocks():
        fold_n = fold_N[rows]
        effects = [model.constant_FT[fold_n] for model in models]
        effects[0] += features.apply(*texts.read(np.arange(rows.start, rows.stop)), models[0].table_FVT, fold_n)
        for code_N, start in zip(labels, starts[:-1], strict=True):
            effects[1] += models[1].table_FVT[fold_n, start + code_N[rows]]
        prior_NT[rows] = sum(model.slope_T * effect_nT for model, effect_nT in zip(models, effects, strict=True))
    return prior_NT, [replace(task, prior_SG=prior_SJ[:, task_J == t]) for t, task in enumerate(tasks)]


_Solver = Callable[[csr_array, F64], tuple[NDArray[Any], F64]]  # x_SV, y_SJ -> coefficients (V, J), intercepts (J,)


@dataclass(frozen=True, slots=True)
class _CrossFit:
    """Regressions on the columns of a matrix, one per fold; a row is predicted by the one fitted without its fold."""

    table_FVT: NDArray[Any]  # coefficients for the mean over the groups of every task
    constant_FT: F64
    prediction_SJ: F64  # of every group, for the rows of the sample
    slope_T: F64  # g (or g') of every task, by which predictions are multiplied

    @classmethod
    def fit(cls, x_SV: csr_array, y_SJ: F64, fold_S: I64, share_JT: F64, solve: _Solver) -> Self:
        """Fit the regressions of all groups; the slopes are 1."""
        prediction_SJ, tables, constants = np.zeros_like(y_SJ), [], []
        for fold in range(FOLDS):
            train, held_out = np.flatnonzero(fold_S != fold), np.flatnonzero(fold_S == fold)
            if len(train):
                weight_VJ, constant_J = solve(x_SV[train], y_SJ[train])
            else:  # all rows in one fold: they cannot be predicted
                weight_VJ, constant_J = np.zeros((x_SV.shape[1], y_SJ.shape[1]), np.float32), np.zeros(y_SJ.shape[1])
            prediction_SJ[held_out] = x_SV[held_out] @ weight_VJ + constant_J
            tables.append((weight_VJ @ share_JT).astype(weight_VJ.dtype))
            constants.append(constant_J @ share_JT)
        return cls(np.stack(tables), np.stack(constants), prediction_SJ, np.ones(share_JT.shape[1]))


def _exact_ridge(x_SL: csr_array, y_SJ: F64) -> tuple[F64, F64]:
    """Fit a ridge regression by the normal equations: coefficients, (L, J), and intercepts, the means of y, (J,)."""
    mean_J = y_SJ.mean(axis=0)
    normal_LL = (x_SL.T @ x_SL).toarray() + PENALTY * np.eye(x_SL.shape[1])
    return np.linalg.solve(normal_LL, x_SL.T @ (y_SJ - mean_J)), mean_J


def _name_hashes(names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash of 64 bits of each row name, (N,)."""
    digests = (hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), dtype=np.uint64, count=len(names))


def _draw_sample(hash_N: NDArray[np.uint64], lengths_N: I64 | None) -> I64:
    """Draw the rows with the smallest hashes, within the limits of rows and tokens; sorted."""
    sample = np.argsort(hash_N, kind="stable")[:SAMPLE_ROWS]
    if lengths_N is not None:
        sample = sample[: max(1, int(np.searchsorted(np.cumsum(lengths_N[sample]), SAMPLE_TOKENS, side="right")))]
    return np.sort(sample)


def _sampled_tasks(
    relevance: Mapping[str, Callable[[], Blocks]], coefficients: Mapping[str, F64], counts_T: I64, sample: I64
) -> list[_Task]:
    """Sum q over the questions of every task, for the rows of the sample, block by block; return tasks with prior 0.

    The noise comes from the interaction sum of squares, rows x questions: that about the means of rows, minus that of
    the means of questions, which shift all rows alike and are no noise.
    """
    questions = [slice(stop - count, stop) for count, stop in zip(counts_T, np.cumsum(counts_T), strict=True)]
    n_rows, sum_E, squares_T = len(sample), np.zeros(int(counts_T.sum())), np.zeros(len(counts_T))
    # questions are grouped in turn: (e, G), from questions to group means
    in_group = [(np.arange(n)[:, None] % min(GROUPS, n) == np.arange(min(GROUPS, n))) * 1.0 for n in counts_T]
    count_TG = [in_group_eG.sum(axis=0).astype(np.int64) for in_group_eG in in_group]
    means = [list[F64]() for _ in counts_T]  # by task and block, (n, G)
    for kernel_blocks in zip(*(blocks() for blocks in relevance.values()), strict=True):
        start = kernel_blocks[0][0]
        first, stop = np.searchsorted(sample, (start, start + len(kernel_blocks[0][1])))  # the sample is sorted
        if first == stop:
            continue
        rows = sample[first:stop] - start
        terms = zip(relevance, kernel_blocks, strict=True)
        q_nE = np.asarray(sum(coefficients[kernel] * block[rows] for kernel, (_, block) in terms))
        sum_E += q_nE.sum(axis=0)
        for t, columns in enumerate(questions):
            q_ne = q_nE[:, columns]
            means[t].append(q_ne @ (in_group[t] / count_TG[t]))
            squares_T[t] += float(np.square(q_ne - q_ne.mean(axis=1, keepdims=True)).sum())
    tasks = []
    for t, columns in enumerate(questions):
        mean_SG, mean_e, count = np.concatenate(means[t]), sum_E[columns] / n_rows, int(counts_T[t])
        interaction = max(squares_T[t] - n_rows * float(np.square(mean_e - mean_e.mean()).sum()), 0.0)
        noise = interaction / (n_rows * (count - 1)) if count > 1 else np.nan
        tasks.append(_Task(mean_SG - mean_SG.mean(axis=0), np.zeros_like(mean_SG), count_TG[t], noise))
    return tasks
