"""Text classifier in the manner of DCLM: log-odds that a text is a question of the target and not a row of the corpus.

Start with `Classifier`.

Shape letters: n rows of a block, E units, T targets, G hashed n-grams.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field
from scipy.sparse import csr_matrix, vstack

from grasp.arrays import F64
from grasp.baselines.bm25 import COVERS, query_text
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.extras import require
from grasp.methods.contract import Account, MethodInputs
from grasp.seeds import stream
from grasp.settings import Settings

N_FEATURES = 1 << 20  # columns of the tf-idf matrix
MAX_STEPS = 1_000  # of the solver


class TextClassifierSettings(Settings):
    """Settings of the logistic regression."""

    negatives: int = Field(10_000, ge=1, description="Rows drawn as negative examples. DCLM: 200,000.")
    strength: float = Field(1.0, gt=0, description="Inverse of the L2 penalty (C of scikit-learn).")


class Classifier(BlockMethod[TextClassifierSettings]):
    """Log-odds of a text classifier: questions of the target against rows of the corpus.

    Logistic regression on tf-idf of words and pairs of words, one classifier per target; both classes have the same
    total weight.

    Source: Li et al. 2024 (DataComp-LM), arXiv 2406.11794, section 4.4.
    As published: fastText with bigrams, trained on about 200,000 instruction-like texts against as many web pages;
    the top 10 % of the corpus is kept.
    Deviation: scikit-learn's logistic regression on 2^20 hashed uni- and bigrams in place of fastText, and the
    target's questions in place of instruction data.
    """

    settings_type = TextClassifierSettings
    requires = frozenset({"tokens"})
    required_modules: ClassVar[Mapping[str, str]] = {"sklearn": "baselines"}

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work, part
        order_N = stream(self.seed, "baselines", "classifier").permutation(inputs.n_rows)
        rows = inputs.rows_at(np.sort(order_N[: self.settings.negatives]))
        negatives = inputs.tokenizer.decode([rows.ids(i).tolist() for i in range(len(rows))])
        units = inputs.units.units
        targets, target_E = np.unique([unit.target for unit in units], return_inverse=True)
        questions = [[query_text(unit) for unit in units if unit.target == target] for target in targets]
        odds = TextOdds(negatives, questions, strength=self.settings.strength)
        account = Account(
            covers=COVERS, notes=("one classifier per target: all units of a target have the same score",)
        )
        return RowScorer(lambda start, stop: odds.score(inputs.texts(start, stop))[:, target_E], account)


class TextOdds:
    """Classifiers of targets, each fitted on the questions of a target against the same negatives.

    Args:
        negatives: texts of rows.
        questions: texts of the questions of each target.
        strength: inverse of the L2 penalty (C of scikit-learn).
    """

    def __init__(self, negatives: Sequence[str], questions: Sequence[Sequence[str]], *, strength: float = 1.0) -> None:
        text = require("sklearn.feature_extraction.text", extra="baselines", feature="classifier")
        linear = require("sklearn.linear_model", extra="baselines", feature="classifier")
        self._hashing = text.HashingVectorizer(
            ngram_range=(1, 2), n_features=N_FEATURES, alternate_sign=False, norm=None, dtype=np.float32
        )
        self._tfidf = text.TfidfTransformer(sublinear_tf=True)
        negative_NG = self._tfidf.fit_transform(self._hashing.transform(negatives))
        weights: list[F64] = []
        intercepts: list[float] = []
        for positives in questions:
            text_matrix = vstack([self._matrix(positives), negative_NG]).tocsr()
            is_question = np.arange(text_matrix.shape[0]) < len(positives)
            fit = linear.LogisticRegression(C=strength, class_weight="balanced", max_iter=MAX_STEPS, solver="liblinear")
            fit.fit(text_matrix, is_question)
            weights.append(fit.coef_[0])
            intercepts.append(float(fit.intercept_[0]))
        self._weight_GT, self._intercept_T = np.stack(weights, axis=1), np.array(intercepts)

    def score(self, texts: Sequence[str]) -> F64:
        """Return the log-odds that each text is a question of each target, (n, T)."""
        return np.asarray(self._matrix(texts) @ self._weight_GT + self._intercept_T)

    def _matrix(self, texts: Sequence[str]) -> csr_matrix:
        """Return the tf-idf of the hashed n-grams of each text, (n, G)."""
        return csr_matrix(self._tfidf.transform(self._hashing.transform(texts)))
