"""Distil the relevance of an artifact into a scorer of text that needs no model.

Start with `distil`. The scorer predicts the relevance of a row as a mean over its byte n-grams of length 3 to 6, each
with a value. The values are the coefficients of a ridge regression whose prior makes about a thousand rows sufficient:
an n-gram has a larger prior variance if it occurs in the answers of the target's units and is rare in the corpus, since
relevance kernels match such text, and its prior mean is a linear combination of a few frequency ratios. The fitted
prior mean and coefficients are added into one table. Accuracy is measured on held-out rows by cross-validation over
documents.

Shape letters: N rows, E units, K lengths, V hash buckets per length, P = K V, A n-grams that occur in some row,
J features of the prior mean, D documents, R bootstrap resamples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, hstack
from scipy.sparse.linalg import LinearOperator, lsmr
from scipy.stats import rankdata

import grasp
from grasp.arrays import F32, F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import only_target, row_documents
from grasp.distil.ngrams import FAMILIARITY_LENGTH, LENGTHS, SLOTS, as_bytes, shares
from grasp.distil.scorer import UNFAMILIAR_SHARE, Card, Quality, Scorer
from grasp.errors import SettingsError
from grasp.files import FileEntry, check_directory
from grasp.methods.contract import MethodInputs
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.progress import Progress
from grasp.progress_display import shows_progress
from grasp.results import Result
from grasp.seeds import bootstrap_weights, stream

FOLDS = 5  # of cross-validation, by document
PENALTIES = (0.1, 0.3, 1.0, 3.0)  # ridge penalties that are tried
MAX_TRAINING_CHARS = 12_000_000  # limit on the training text: its n-gram matrix takes half a GB
MIN_ROWS = 20
RESAMPLES = 200
BATCH_ROWS = 4_096  # rows decoded per batch
RARE, RARER = 1e-4, 1e-5  # additive smoothing of n-gram frequencies
PRIOR_MEAN_VARIANCE = 0.1  # prior variance of the features of the prior mean; that of all n-grams together is 1
SOLVER_STEPS = 30  # iterations of the solver; with twice as many Spearman changes in the fifth digit


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Distilled(Result):
    """Result of `distil`: the scorer and, as a table, its accuracy on held-out rows with 95 % intervals."""

    scorer: Scorer
    path: Path

    def __repr__(self) -> str:
        return f"{self.scorer.card}\n{self.path}: show it with grasp info, apply it with grasp apply"


@shows_progress
def distil(
    artifact: ArtifactReader,
    target: str | None,
    out: Path | str,
    *,
    rows: int | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Distilled:
    """Fit a fast text scorer, for corpora that are too large for a model.

    The scorer predicts relevance from character sequences. Its accuracy is measured on held-out rows.

    Args:
        target: name of the target. Default: the only one.
        out: new directory for the scorer.
        rows: number of training rows, sampled at random; 10,000 take a minute. Default: all, up to 12 MB of text.
        protocol: scoring rule to predict with. Default: the built-in rule.
        seed: random seed of the sample and of the cross-validation folds.

    Raises:
        SettingsError: `out` exists, or there are too few rows.
        ProtocolError: unknown target.
        ArtifactError: the artifact has no tokens, or its tokenizer cannot be loaded.
    """
    out, progress = Path(out), progress or Progress()
    check_directory(out, artifact.protected_paths)
    target = only_target(artifact, target)
    predictor = additive_predictor(artifact, target, protocol=protocol)
    inputs = MethodInputs(artifact)
    n_rows = inputs.n_rows if rows is None else min(rows, inputs.n_rows)
    if n_rows < MIN_ROWS:
        raise SettingsError(f"rows: got {n_rows} of {artifact.location}, expected at least {MIN_ROWS}")
    order = stream(seed, "distil", "rows").permutation(inputs.n_rows)[:n_rows]
    progress.stage("text of rows", rows=n_rows, tokens=None)
    decoded: list[str] = []
    size = 0
    for start in range(0, n_rows, BATCH_ROWS):
        shard = inputs.rows_at(order[start : start + BATCH_ROWS])
        decoded += inputs.tokenizer.decode([shard.ids(i).tolist() for i in range(len(shard))])
        progress.advance(len(shard), shard.n_tokens)
        size += sum(map(len, decoded[start:]))
        if size > MAX_TRAINING_CHARS:
            progress.note(f"fits {len(decoded):,} rows, {size / 1e6:.0f} MB of text: the memory limit is reached")
            break
    by_index = np.argsort(order[: len(decoded)])
    row_index, texts = order[by_index], as_bytes([decoded[i] for i in by_index])
    # If the build used only the first rows of each document, the scorer reads a prefix of about the same length.
    max_rows, first_bytes = (artifact.manifest.settings.get("corpus") or {}).get("max_rows_per_document"), None
    if max_rows is not None:
        length_N = np.diff(np.frombuffer(texts.buffers()[1], np.int64))  # bytes of each text
        first_bytes = int(max_rows) * max(1, int(np.quantile(length_N, 0.99)))
    relevance_N = predictor.effect_NT[row_index, 0].astype(np.float64)
    units = [unit for unit in inputs.units.units if unit.target == target]
    answers = as_bytes([unit.completion for unit in units])
    whole_units = as_bytes([unit.prompt + unit.completion for unit in units])
    regression = _Regression.from_answers(shares(texts), shares(answers), shares(whole_units))
    document_N = row_documents(artifact)[row_index]
    fold_N = stream(seed, "distil", "folds").permutation(np.arange(int(document_N.max()) + 1) % FOLDS)[document_N]
    held_out_N, penalty = _held_out_scores(regression, relevance_N, fold_N, progress)
    progress.stage("fitting all rows", rows=None, tokens=None)
    tables_KV, intercept = regression.fit(relevance_N, np.arange(len(relevance_N)), penalty)
    # bootstrap weights of the rows, (1 + R, N): documents are resampled, and the first resample is the data
    documents, code_N = np.unique(document_N, return_inverse=True)
    weights_RD = bootstrap_weights(len(documents), resamples=RESAMPLES, seed=seed)
    weight_RN = np.concatenate([np.ones((1, len(code_N)), np.float32), weights_RD[:, code_N]])
    card = Card(
        target=target,
        scored_by=predictor.protocol.description,
        made_by={"grasp": grasp.__version__},
        fingerprints=dict(artifact.manifest.fingerprints),
        rows=len(row_index),
        penalty=penalty,
        intercept=intercept,
        first_bytes=first_bytes,
        rarest=regression.rarity_threshold(fold_N),
        quality=_quality(held_out_N, relevance_N, weight_RN),
        weights=FileEntry(bytes=0, checksum=""),
    )
    scorer = Scorer(card, tables_KV.astype(np.float32), regression.rarity_V(regression.share_NP))
    scorer.save(out)
    measures = [(name, *getattr(card.quality, name)) for name in ("spearman", "recall", "gain")]
    table = pa.table([*map(pa.array, zip(*measures, strict=True))], ["measure", "value", "low", "high"])
    return Distilled(table, f"scorer for {target}", scorer=Scorer.open(out), path=out)


@dataclass(frozen=True, eq=False)
class _Regression:
    """Ridge regression of relevance on n-gram frequencies; columns are scaled by their prior standard deviation.

    With f the frequency of an n-gram in the corpus, q in the answers and u in whole units, half of the prior variance
    of its value is proportional to 1 / f and half to q / f^2. The features of the prior mean are the means over a row's
    n-grams of q / f, with two smoothing constants, and of log(u / f), separately for each length.
    """

    share_NP: csr_array
    seen_A: I64  # n-grams that occur in some row; the values of all others equal their prior mean
    scale_A: F64  # prior standard deviations
    prior_NJ: F64  # features of the prior mean
    value_JP: F64  # feature of each n-gram; `prior_NJ` are the means of these over the n-grams of a row
    design: csr_array  # (N, A + J)

    @classmethod
    def from_answers(cls, share_NP: csr_array, answer_EP: csr_array, unit_EP: csr_array) -> "_Regression":
        """Set up the regression from n-gram frequencies in rows, in answers, and in whole units."""
        f_P, q_P, u_P = (np.asarray(share.mean(axis=0), dtype=np.float64) for share in (share_NP, answer_EP, unit_EP))
        rarity_P, answer_P = 1.0 / (f_P + RARER), q_P / (f_P + RARER) / (f_P + RARE)
        # each half is normalised to contribute the same variance to the prediction of a row
        rarity_scale, answer_scale = _mean_square(share_NP, rarity_P), _mean_square(share_NP, answer_P)
        variance_P = 0.5 * rarity_P / rarity_scale + 0.5 * answer_P / answer_scale
        ratios = np.stack([q_P / (f_P + RARE), q_P / (f_P + RARER), np.log((u_P + RARER) / (f_P + RARER))])
        # one feature per ratio and length: block-diagonal in the length, which `eye` selects
        block_JKKV = np.einsum("kl,jlv->jklv", np.eye(len(LENGTHS)), ratios.reshape(3, len(LENGTHS), SLOTS))
        value_JP = block_JKKV.reshape(3 * len(LENGTHS), -1)
        raw_NJ = np.asarray(share_NP @ value_JP.T)
        std_J = raw_NJ.std(axis=0)
        value_JP /= np.where(std_J > 0, std_J, np.inf)[:, None] / np.sqrt(PRIOR_MEAN_VARIANCE / len(value_JP))
        prior_NJ = np.asarray(share_NP @ value_JP.T)
        seen_A = np.flatnonzero(f_P)
        scale_A = np.sqrt(variance_P[seen_A])
        column_P = np.cumsum(f_P > 0) - 1  # column of each n-gram that occurs
        shape = (share_NP.shape[0], len(seen_A))
        share_NA = csr_array((share_NP.data, column_P[share_NP.indices], share_NP.indptr), shape=shape)
        centred_NJ = prior_NJ - prior_NJ.mean(axis=0)
        design = csr_array(hstack([share_NA @ diags_array(scale_A), csr_array(centred_NJ)], dtype=np.float32))
        design.indices, design.indptr = (index.astype(np.int32) for index in (design.indices, design.indptr))
        return cls(share_NP, seen_A, scale_A, prior_NJ, value_JP, design)

    def solve(self, relevance_N: F64, rows: I64, penalty: float) -> tuple[F64, float]:
        """Fit the coefficients of the design, (A + J,), and the intercept to the given rows."""
        mean, design = float(relevance_N[rows].mean()), self.design[rows]
        # Products in float32, for half the memory traffic; the vectors of the solver stay in float64.
        operator = LinearOperator(
            design.shape,
            matvec=lambda x: (design @ x.ravel().astype(np.float32)).astype(np.float64),
            rmatvec=lambda y: (design.T @ y.ravel().astype(np.float32)).astype(np.float64),
            dtype=np.float64,
        )
        coefficients = lsmr(operator, relevance_N[rows] - mean, damp=np.sqrt(penalty), maxiter=SOLVER_STEPS)[0]
        return np.asarray(coefficients, dtype=np.float64), mean

    def fit(self, relevance_N: F64, rows: I64, penalty: float) -> tuple[F64, float]:
        """Return the value of every n-gram, (K, V), and the intercept."""
        coefficients, mean = self.solve(relevance_N, rows, penalty)
        deviation_A, prior_J = np.split(coefficients, [len(self.seen_A)])
        value_P = prior_J @ self.value_JP
        value_P[self.seen_A] += deviation_A * self.scale_A
        # the design has centred features, the table has not: the intercept takes up the difference
        return value_P.reshape(len(LENGTHS), SLOTS), mean - float(prior_J @ self.prior_NJ.mean(axis=0))

    @staticmethod
    def rarity_V(share_NP: csr_array) -> F32:  # noqa: N802 - a shape suffix
        """Return the negative log frequency of each n-gram of 4 bytes in the given rows, (V,)."""
        columns = slice(FAMILIARITY_LENGTH * SLOTS, (FAMILIARITY_LENGTH + 1) * SLOTS)
        return -np.log(np.asarray(share_NP.mean(axis=0), dtype=np.float64)[columns] + RARER / 10).astype(np.float32)

    def rarity_threshold(self, fold_N: I64) -> float:
        """Return the rarity that 1 % of the rows exceed, with frequencies from the other folds."""
        rarities = []
        for fold in range(FOLDS):
            held_out = np.flatnonzero(fold_N == fold)
            rarity_P = np.zeros(self.share_NP.shape[1], dtype=np.float32)
            rarity_P[FAMILIARITY_LENGTH * SLOTS : (FAMILIARITY_LENGTH + 1) * SLOTS] = self.rarity_V(
                self.share_NP[fold_N != fold]
            )
            rarities.append(self.share_NP[held_out] @ rarity_P)
        return float(np.quantile(np.concatenate(rarities), 1 - UNFAMILIAR_SHARE))


def _mean_square(share_NP: csr_array, variance_P: F64) -> float:
    """Return the mean over rows of sum_p share^2 variance, or 1 if it is 0."""
    total = float(np.dot(np.square(share_NP.data, dtype=np.float64), variance_P[share_NP.indices]))
    return total / share_NP.shape[0] if total > 0 else 1.0


def _held_out_scores(regression: _Regression, relevance_N: F64, fold_N: I64, progress: Progress) -> tuple[F64, float]:
    """Return cross-validated scores, by scorers that saw no row of the same document, and the best penalty.

    The penalty with the highest Spearman correlation on the first fold is used for all folds, so the other folds are
    evaluated with a penalty that does not depend on them.
    """
    search_rows = (fold_N == 0).sum() * (len(PENALTIES) - 1)
    progress.stage("cross validation", rows=len(relevance_N) + int(search_rows), tokens=None)
    score_N, penalties = np.zeros(len(relevance_N)), list(PENALTIES)
    for fold in range(FOLDS):
        held_out, train = np.flatnonzero(fold_N == fold), np.flatnonzero(fold_N != fold)
        scores = {}
        for penalty in penalties:
            coefficients, mean = regression.solve(relevance_N, train, penalty)
            scores[penalty] = regression.design[held_out] @ coefficients + mean
            progress.advance(len(held_out), 0)
        equal_weights = np.ones((1, len(held_out)))
        relevance_ranks = rankdata(relevance_N[held_out])
        best_penalty = max(scores, key=lambda p: _correlation(rankdata(scores[p]), relevance_ranks, equal_weights)[0])
        score_N[held_out], penalties = scores[best_penalty], [best_penalty]
    return score_N, best_penalty


def _correlation(x_N: F64, y_N: F64, weight_RN: NDArray[np.floating]) -> F64:
    """Return the Pearson correlation under each set of weights, (R,); 0 if either variable is constant."""
    share_RN = weight_RN / weight_RN.sum(axis=1, keepdims=True)
    x_R, y_R = share_RN @ x_N, share_RN @ y_N
    variances_R = (share_RN @ x_N**2 - x_R**2) * (share_RN @ y_N**2 - y_R**2)
    std_R = np.sqrt(np.maximum(variances_R, 0.0))
    return np.asarray((share_RN @ (x_N * y_N) - x_R * y_R) / np.where(std_R > 0, std_R, np.inf))


def _with_interval(value_R: F64) -> tuple[float, float, float]:
    """Return the value on the data and its 95 % percentile bootstrap interval."""
    low, high = np.quantile(value_R[1:], [0.025, 0.975])
    return float(value_R[0]), float(low), float(high)


def _quality(score_N: F64, relevance_N: F64, weight_RN: F32) -> Quality:
    """Return the accuracy on all rows; the measures are described by the fields of `Quality`."""
    # masks of the top 10 % and of the top 20 % of the rows, by relevance and by score
    true_tenth_N, tenth_N = (values_N >= np.quantile(values_N, 0.9) for values_N in (relevance_N, score_N))
    true_fifth_N, fifth_N = (values_N >= np.quantile(values_N, 0.8) for values_N in (relevance_N, score_N))
    recall_R = (weight_RN @ (true_tenth_N & tenth_N)) / np.maximum(weight_RN @ true_tenth_N, 1)
    mean_R, true_mean_R = (
        weight_RN @ (mask_N * relevance_N) / np.maximum(weight_RN @ mask_N, 1) for mask_N in (fifth_N, true_fifth_N)
    )
    return Quality(
        rows=len(score_N),
        # ranks are those of the data in every resample
        spearman=_with_interval(_correlation(rankdata(score_N), rankdata(relevance_N), weight_RN.astype(np.float64))),
        recall=_with_interval(recall_R),
        gain=_with_interval(mean_R / np.where(true_mean_R > 0, true_mean_R, np.inf)),
    )
