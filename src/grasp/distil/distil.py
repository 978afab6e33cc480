"""Learn from an artifact to guess relevance from text alone, for corpora that never pass through the model.

A row's relevance becomes a mean over its sequences of 3 to 6 bytes, each with a value of its own. What makes a thousand
rows enough: the values are not learned from nothing. A sequence counts for more beforehand if it is in the answers of
the target's units and rare in the corpus, since that is what the kernels of relevance see. Ridge regression then says
how much of this holds, and what else does. All of it folds into one table.
Shape letters: N rows, K lengths, V slots, P = K V, J columns of what is expected beforehand, R resamples.
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
from grasp.artifact.rows import label_column, only_target, row_documents
from grasp.distil.ngrams import FAMILIAR, LENGTHS, SLOTS, as_bytes, shares
from grasp.distil.scorer import UNFAMILIAR_SHARE, Card, Quality, Scorer, SliceQuality
from grasp.errors import SettingsError
from grasp.files import FileEntry, check_place
from grasp.methods.contract import MethodInputs
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import label_slices, suggest_labels
from grasp.progress import Progress, Silent
from grasp.results import Result
from grasp.seeds import stream

FOLDS = 5
PENALTIES = (0.1, 0.3, 1.0, 3.0)
MOST_BYTES = 12_000_000  # of text that is learned from: a matrix of half a GB
FEWEST_ROWS = 20
FEWEST_IN_SLICE = 50
MOST_SLICES = 10
RESAMPLES = 200
AT_ONCE = 4_096  # rows that are decoded together
RARE, RARER = 1e-4, 1e-5  # shares of sequences below which all are equally rare
EXPECTED_SHARE = 0.1  # of what is expected beforehand in the variance, the sequences' own being 1
STEPS = 30  # of the solver; twice as many change Spearman in the fifth digit


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Distilled(Result):
    """A scorer that was written, and how well it does, slice by slice."""

    scorer: Scorer
    path: Path

    def __repr__(self) -> str:
        return f"{self.scorer.card}\n{self.path}: read it with grasp info, use it with grasp apply"


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
    """Learn to score text alone, for corpora that no model reads.

    The scorer guesses a row's relevance from its spelling. It says how well it does on rows that it has not seen.

    Args:
        target: target that is asked about. Default: the only one.
        out: new directory for the scorer.
        rows: learn from so many rows, drawn at random: 10,000 take a minute. Default: all, up to 12 MB of text.
        protocol: protocol to predict with. Default: the one that ships.
        seed: of the draw and of the folds.
    Raises:
        SettingsError: something is at `out`, or too few rows.
        ProtocolError: no such target.
        ArtifactError: the artifact keeps no tokens, or its tokenizer is gone.
    """
    out, progress = Path(out), progress or Silent()
    check_place(out, artifact.reads)
    target = only_target(artifact, target)
    predictor = additive_predictor(artifact, target, protocol=protocol)
    material = MethodInputs(artifact)
    if rows is not None and rows < FEWEST_ROWS:
        raise SettingsError(f"rows: got {rows}, expected at least {FEWEST_ROWS}")
    order = stream(seed, "distil", "rows").permutation(material.n_rows)[:rows]
    if len(order) < FEWEST_ROWS:
        raise SettingsError(f"{artifact.where}: has {len(order)} rows, expected at least {FEWEST_ROWS} to learn from")
    progress.stage("text of rows", rows=len(order), tokens=None)
    read: list[str] = []
    size = 0
    for start in range(0, len(order), AT_ONCE):
        shard = material.rows_at(order[start : start + AT_ONCE])
        read += material.tokenizer.decode([shard.ids(i).tolist() for i in range(len(shard))])
        progress.advance(len(shard), shard.n_tokens)
        size += sum(map(len, read[start:]))
        if size > MOST_BYTES:
            progress.note(f"learns from {len(read):,} rows, {size / 1e6:.0f} MB of text: more would not fit in memory")
            break
    place = np.argsort(order[: len(read)])
    row_index, texts = order[place], as_bytes([read[i] for i in place])
    # a build with the artifact's settings reads so much of a document: its first rows, if these are limited
    most_rows, first_bytes = (artifact.manifest.settings.get("corpus") or {}).get("max_rows_per_document"), None
    if most_rows is not None:
        length_N = np.diff(np.frombuffer(texts.buffers()[1], np.int64))
        first_bytes = int(most_rows) * max(1, int(np.quantile(length_N, 0.99)))
    relevance_N = predictor.effect_NT[row_index, 0].astype(np.float64)
    units = [unit for unit in material.units.units if unit.target == target]
    answers = as_bytes([unit.completion for unit in units])
    both = as_bytes([unit.prompt + unit.completion for unit in units])
    problem = _Problem.from_answers(shares(texts), shares(answers), shares(both))
    document_N = row_documents(artifact)[row_index]
    fold_N = stream(seed, "distil", "folds").permutation(np.arange(int(document_N.max()) + 1) % FOLDS)[document_N]
    held_N, penalty = _held_out(problem, relevance_N, fold_N, progress)
    progress.stage("learning from all rows", rows=None, tokens=None)
    tables_KV, intercept = problem.fit(relevance_N, np.arange(len(relevance_N)), penalty)
    weight_RN = _resampled(document_N, seed)
    slices: list[SliceQuality] = []  # the largest of the first label that has any
    for label in suggest_labels(artifact)[:1]:
        found = label_slices(label_column(artifact, label), np.ones(artifact.n_rows, dtype=np.int64))
        for g, name in enumerate(found.names[:MOST_SLICES]):
            own = np.flatnonzero(found.codes_N[row_index] == g)
            if len(own) >= FEWEST_IN_SLICE:
                spearman = _spearman(held_N[own], relevance_N[own], weight_RN[:, own])
                slices.append(SliceQuality(label=label, value=str(name), rows=len(own), spearman=spearman))
    card = Card(
        target=target,
        scored_by=predictor.protocol.description,
        made_by={"grasp": grasp.__version__},
        fingerprints=dict(artifact.manifest.fingerprints),
        rows=len(row_index),
        penalty=penalty,
        intercept=intercept,
        first_bytes=first_bytes,
        rarest=problem.rarest(fold_N),
        quality=_quality(held_N, relevance_N, weight_RN),
        slices=tuple(slices),
        weights=FileEntry(bytes=0, checksum=""),
    )
    scorer = Scorer(card, tables_KV.astype(np.float32), problem.rarity_V(problem.share_NP))
    scorer.save(out)
    table = pa.Table.from_pylist([line.model_dump() for line in slices], _SLICES)
    return Distilled(table, f"scorer for {target}", scorer=Scorer.open(out), path=out)


_SLICES = pa.schema(
    [("label", pa.string()), ("value", pa.string()), ("rows", pa.int64()), ("spearman", pa.list_(pa.float64()))]
)


# ------------------------------------------------------------------------------------------------------- the regression


@dataclass(frozen=True, eq=False)
class _Problem:
    """Ridge regression of relevance on shares of sequences, in columns of equal variance beforehand.

    The variance of a sequence's value is 1 / f, f its share in the corpus, and as much again in proportion to q / f,
    q its share in the answers; the columns of what is expected are the rows' means of q / f and log(u / f), u the share
    in whole units, by length.
    """

    share_NP: csr_array
    seen_A: I64  # sequences that some row has: the others keep what is expected beforehand
    scale_A: F64
    expected_NJ: F64
    value_JP: F64  # values of sequences of which the columns of `expected_NJ` are means, each of one length
    design: csr_array

    @classmethod
    def from_answers(cls, share_NP: csr_array, answer_EP: csr_array, unit_EP: csr_array) -> "_Problem":
        """From shares of sequences in rows, in answers, and in whole units."""
        f_P, q_P, u_P = (np.asarray(each.mean(axis=0), dtype=np.float64) for each in (share_NP, answer_EP, unit_EP))
        plain_P, asked_P = 1.0 / (f_P + RARER), q_P / (f_P + RARER) / (f_P + RARE)
        variance_P = 0.5 * plain_P / _mean_square(share_NP, plain_P) + 0.5 * asked_P / _mean_square(share_NP, asked_P)
        kinds = np.stack([q_P / (f_P + RARE), q_P / (f_P + RARER), np.log((u_P + RARER) / (f_P + RARER))])
        own_JP = np.einsum("kl,jlv->jklv", np.eye(len(LENGTHS)), kinds.reshape(3, len(LENGTHS), SLOTS))
        value_JP = own_JP.reshape(3 * len(LENGTHS), -1)
        raw_NJ = np.asarray(share_NP @ value_JP.T)
        spread_J = raw_NJ.std(axis=0)
        value_JP /= np.where(spread_J > 0, spread_J, np.inf)[:, None] / np.sqrt(EXPECTED_SHARE / len(value_JP))
        expected_NJ = np.asarray(share_NP @ value_JP.T)
        seen_A = np.flatnonzero(f_P)
        scale_A = np.sqrt(variance_P[seen_A])
        place_P = np.cumsum(f_P > 0) - 1
        shape = (share_NP.shape[0], len(seen_A))
        own_NA = csr_array((share_NP.data, place_P[share_NP.indices], share_NP.indptr), shape=shape)
        centred_NJ = expected_NJ - expected_NJ.mean(axis=0)
        design = csr_array(hstack([own_NA @ diags_array(scale_A), csr_array(centred_NJ)], dtype=np.float32))
        design.indices, design.indptr = (each.astype(np.int32) for each in (design.indices, design.indptr))
        return cls(share_NP, seen_A, scale_A, expected_NJ, value_JP, design)

    def solve(self, relevance_N: F64, rows: I64, penalty: float) -> tuple[F64, float]:
        """Coefficients of the design and the intercept, from some rows."""
        mean, some = float(relevance_N[rows].mean()), self.design[rows]
        single = LinearOperator(  # numbers of half the size; the solver's own are whole
            some.shape,
            matvec=lambda x: (some @ x.ravel().astype(np.float32)).astype(np.float64),
            rmatvec=lambda y: (some.T @ y.ravel().astype(np.float32)).astype(np.float64),
            dtype=np.float64,
        )
        found = lsmr(single, relevance_N[rows] - mean, damp=np.sqrt(penalty), maxiter=STEPS)[0]
        return np.asarray(found, dtype=np.float64), mean

    def fit(self, relevance_N: F64, rows: I64, penalty: float) -> tuple[F64, float]:
        """A value for every sequence, (K, V), and the intercept."""
        found, mean = self.solve(relevance_N, rows, penalty)
        own_A, expected_J = np.split(found, [len(self.seen_A)])
        value_P = expected_J @ self.value_JP
        value_P[self.seen_A] += own_A * self.scale_A
        return value_P.reshape(len(LENGTHS), SLOTS), mean - float(expected_J @ self.expected_NJ.mean(axis=0))

    @staticmethod
    def rarity_V(share_NP: csr_array) -> F32:  # noqa: N802 - a shape suffix
        """Minus the logarithm of the share of each sequence of 4 bytes in some rows, (V,)."""
        here = slice(FAMILIAR * SLOTS, (FAMILIAR + 1) * SLOTS)
        return -np.log(np.asarray(share_NP.mean(axis=0), dtype=np.float64)[here] + RARER / 10).astype(np.float32)

    def rarest(self, fold_N: I64) -> float:
        """The rarity that one row in a hundred exceeds, as the rows of the other folds see it."""
        seen = []
        for fold in range(FOLDS):
            held = np.flatnonzero(fold_N == fold)
            rarity_P = np.zeros(self.share_NP.shape[1], dtype=np.float32)
            rarity_P[FAMILIAR * SLOTS : (FAMILIAR + 1) * SLOTS] = self.rarity_V(self.share_NP[fold_N != fold])
            seen.append(self.share_NP[held] @ rarity_P)
        return float(np.quantile(np.concatenate(seen), 1 - UNFAMILIAR_SHARE))


def _mean_square(share_NP: csr_array, variance_P: F64) -> float:
    """Mean over rows of sum_p share^2 variance; 1 where there is none."""
    total = float(np.dot(np.square(share_NP.data, dtype=np.float64), variance_P[share_NP.indices]))
    return total / share_NP.shape[0] if total > 0 else 1.0


def _held_out(problem: _Problem, relevance_N: F64, fold_N: I64, progress: Progress) -> tuple[F64, float]:
    """Scores of rows by scorers that saw no row of their documents, and the penalty.

    Penalties are tried on the first fold, and the one with the best Spearman there is used for all: of one number
    among four, a fifth of the rows chooses well enough, and every other fold is judged by what it had no say in.
    """
    tried = (fold_N == 0).sum() * (len(PENALTIES) - 1)
    progress.stage("trying on other rows", rows=len(relevance_N) + int(tried), tokens=None)
    score_N, chosen = np.zeros(len(relevance_N)), list(PENALTIES)
    for fold in range(FOLDS):
        held, rest = np.flatnonzero(fold_N == fold), np.flatnonzero(fold_N != fold)
        found = {}
        for penalty in chosen:
            value_A, mean = problem.solve(relevance_N, rest, penalty)
            found[penalty] = problem.design[held] @ value_A + mean
            progress.advance(len(held), 0)
        once = np.ones((1, len(held)))
        best = max(found, key=lambda p: _correlation(rankdata(found[p]), rankdata(relevance_N[held]), once)[0])
        score_N[held], chosen = found[best], [best]
    return score_N, best


# ---------------------------------------------------------------------------------------------------- how well it ranks


def _resampled(document_N: I64, seed: int) -> F32:
    """How often each row is drawn where documents are drawn with replacement, (1 + R, N); the first: once each."""
    _, own_N = np.unique(document_N, return_inverse=True)
    count = int(own_N.max()) + 1
    draws = stream(seed, "distil", "resamples").multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.concatenate([np.ones((1, len(own_N)), np.float32), draws.astype(np.float32)[:, own_N]])


def _correlation(x_N: F64, y_N: F64, weight_RN: NDArray[np.floating]) -> F64:
    """Pearson's correlation under every set of weights, (R,); 0 where one of the two is constant."""
    share_RN = weight_RN / weight_RN.sum(axis=1, keepdims=True)
    x_R, y_R = share_RN @ x_N, share_RN @ y_N
    variances_R = (share_RN @ x_N**2 - x_R**2) * (share_RN @ y_N**2 - y_R**2)
    spread_R = np.sqrt(np.maximum(variances_R, 0.0))
    return np.asarray((share_RN @ (x_N * y_N) - x_R * y_R) / np.where(spread_R > 0, spread_R, np.inf))


def _with_interval(value_R: F64) -> tuple[float, float, float]:
    """The value of all rows, and what 95 % of the resamples lie between."""
    low, high = np.quantile(value_R[1:], [0.025, 0.975])
    return float(value_R[0]), float(low), float(high)


def _spearman(score_N: F64, relevance_N: F64, weight_RN: F32) -> tuple[float, float, float]:
    return _with_interval(_correlation(rankdata(score_N), rankdata(relevance_N), weight_RN.astype(np.float64)))


def _quality(score_N: F64, relevance_N: F64, weight_RN: F32) -> Quality:
    best_N, taken_N = (values_N >= np.quantile(values_N, 0.9) for values_N in (relevance_N, score_N))
    fifth_N, chosen_N = (values_N >= np.quantile(values_N, 0.8) for values_N in (relevance_N, score_N))
    recall_R = (weight_RN @ (best_N & taken_N)) / np.maximum(weight_RN @ best_N, 1)
    chosen_R, fifth_R = (
        weight_RN @ (one * relevance_N) / np.maximum(weight_RN @ one, 1) for one in (chosen_N, fifth_N)
    )
    return Quality(
        rows=len(score_N),
        spearman=_spearman(score_N, relevance_N, weight_RN),
        recall=_with_interval(recall_R),
        gain=_with_interval(chosen_R / np.where(fifth_R > 0, fifth_R, np.inf)),
    )
