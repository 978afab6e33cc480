"""An n-gram language model of the tokens of a subset: which rows would raise its probability of the units' answers?

The model interpolates: p(y | context) = lambda_0 / V + sum_n lambda_n A_n / B_n, where A_n counts how often the last
n - 1 tokens are followed by y, and B_n how often they are followed by anything. Its logarithm is taken to first order
in a row's counts, so that a row has one number a unit and rows add up.
Shape letters: n rows of a block, N rows, E units, P predicted tokens of units, V vocabulary, C sequences in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.sparse import coo_array, csr_array

from grasp.arrays import F64, I64
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.corpus.row_store import RowShard
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.settings import Settings
from grasp.targets.units import UnitTokens


class NgramSettings(Settings):
    """How long sequences are, and how much is left to chance."""

    order: int = Field(4, ge=1, le=8, description="Tokens of the longest sequence: 4 looks at the last three.")
    uniform: float = Field(
        0.05, gt=0, lt=1, description="Weight of a uniform distribution, for tokens that no row has after a context."
    )


class Ngram(BlockMethod[NgramSettings]):
    """Counts of token sequences, as an n-gram language model refitted on each subset sees them.

    What a row adds to the mean log probability of a unit's answer under an n-gram model of the corpus, to first order.

    Source: interpolated n-gram models (Jelinek and Mercer 1980). Deviation: the orders whose context occurs share the
    weight equally, and a subset's model is linearised at that of the whole corpus.
    """

    settings_type = NgramSettings
    looks_at = frozenset({"tokens"})

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        vocabulary = material.artifact.manifest.detail("vocab_size")
        grams = [_Grams.from_units(material.unit_tokens, n, vocabulary) for n in range(1, self.settings.order + 1)]

        def counted() -> F64:
            total_C = np.zeros(sum(len(each) for each in grams))
            for start, stop in material.blocks():
                total_C += _counts(grams, material.rows(start, stop)).sum(axis=0)
            return total_C

        total_C = np.asarray(work.kept("totals", counted), dtype=np.float64)
        unit_P = np.repeat(
            np.arange(material.n_units), [len(unit.input_ids) - unit.first for unit in material.unit_tokens]
        )
        weight_CE = _weights(grams, total_C / material.n_rows, unit_P, self.settings.uniform)
        return _Counted(material, grams, weight_CE, self.settings.order)


@dataclass(frozen=True, slots=True)
class _Grams:
    """The sequences of one length in units, and the contexts that they begin with, as numbers.

    Attributes:
        keys: for every depth the sorted keys, number of the sequence before times V plus token.
        position, context, whole: of every predicted token of the units that has so long a context.
    """

    n: int
    vocabulary: int
    keys: list[I64]
    position: I64
    context: I64
    whole: I64

    @property
    def n_contexts(self) -> int:
        return len(self.keys[-2]) if self.n > 1 else 1

    @classmethod
    def from_units(cls, units: list[UnitTokens], n: int, vocabulary: int) -> "_Grams":
        """Those of the answers' tokens."""
        predicted = [(unit.input_ids, t) for unit in units for t in range(unit.first, len(unit.input_ids))]
        position = [p for p, (_, t) in enumerate(predicted) if t >= n - 1]
        sequences = [ids[t - n + 1 : t + 1] for ids, t in predicted if t >= n - 1]
        token_Pn = np.array(sequences, dtype=np.int64).reshape(-1, n)
        context, code, keys = np.zeros(len(position), np.int64), np.zeros(len(position), np.int64), []
        for depth in range(n):
            context = code
            known, code = np.unique(code * vocabulary + token_Pn[:, depth], return_inverse=True)
            keys.append(known)
        return cls(n, vocabulary, keys, np.array(position, dtype=np.int64), context, code)

    def __len__(self) -> int:
        return self.n_contexts + len(self.keys[-1])

    def found(self, rows: RowShard) -> tuple[I64, I64]:
        """Where sequences of units occur in rows: the row, and the number of the context or, after those, the whole."""
        flat, row = rows.flat_ids.astype(np.int64), np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
        predicted = np.ones(len(flat), dtype=np.bool_) if rows.labelled is None else rows.labelled.copy()
        predicted[rows.offsets[:-1]] = False  # nothing comes before a row's first token
        end = np.flatnonzero(predicted)
        end = end[end - self.n + 1 >= rows.offsets[row[end]]]
        code = np.zeros(len(end), dtype=np.int64)
        rows_found, codes = [], []
        for depth, known in enumerate(self.keys):
            if depth == self.n - 1:
                rows_found.append(row[end])
                codes.append(code)
            key = code * self.vocabulary + flat[end - self.n + 1 + depth]
            place = np.minimum(np.searchsorted(known, key), max(len(known) - 1, 0))
            same = known[place] == key if len(known) else np.zeros(len(key), dtype=np.bool_)
            end, code = end[same], place[same]
        return np.concatenate([*rows_found, row[end]]), np.concatenate([*codes, code + self.n_contexts])


def _starts(grams: list[_Grams]) -> Iterator[tuple[int, _Grams]]:
    start = 0
    for each in grams:
        yield start, each
        start += len(each)


def _counts(grams: list[_Grams], rows: RowShard) -> csr_array:
    """How often each sequence occurs in each row, (n, C)."""
    found = [(each.found(rows), start) for start, each in _starts(grams)]
    row = np.concatenate([row for (row, _), _ in found])
    code = np.concatenate([code + start for (_, code), start in found])
    shape = (len(rows), sum(len(each) for each in grams))
    return csr_array(coo_array((np.ones(len(row)), (row, code)), shape=shape))


def _weights(grams: list[_Grams], mean_C: F64, unit_P: I64, uniform: float) -> csr_array:
    """What one more of a sequence does to a unit's mean log probability, times the number of rows, (C, E).

    With p = lambda_0 / V + sum_n lambda_n A_n / B_n:  d log p = sum_n lambda_n (dA_n - (A_n / B_n) dB_n) / (B_n p).
    """
    share_P, seen_P = np.zeros(len(unit_P)), np.zeros(len(unit_P))
    parts = []
    for start, each in _starts(grams):
        near, same = mean_C[start + each.context], mean_C[start + each.n_contexts + each.whole]
        share = same / np.where(near > 0, near, np.inf)
        share_P[each.position] += share
        seen_P[each.position] += near > 0
        parts.append((start, each, np.where(near > 0, near, np.inf), share))
    weight_P = (1 - uniform) / np.maximum(seen_P, 1)
    slope_P = weight_P / (uniform / grams[0].vocabulary + weight_P * share_P) / np.bincount(unit_P)[unit_P]
    rows, columns, values = [], [], []
    for start, each, near, share in parts:
        slope = slope_P[each.position] / near
        rows += [start + each.n_contexts + each.whole, start + each.context]
        columns += [unit_P[each.position]] * 2
        values += [slope, -slope * share]
    at = (np.concatenate(rows), np.concatenate(columns))
    return csr_array(coo_array((np.concatenate(values), at), shape=(len(mean_C), int(unit_P.max()) + 1)))


class _Counted(RowScorer):
    def __init__(self, material: MethodInputs, grams: list[_Grams], weight_CE: csr_array, order: int) -> None:
        self._material, self._grams, self._weight_CE, self._order = material, grams, weight_CE, order

    def score(self, start: int, stop: int) -> Scores:
        return np.asarray((_counts(self._grams, self._material.rows(start, stop)) @ self._weight_CE).toarray())

    def account(self) -> Account:
        return Account(
            covers=("tokens of the rows", "tokens of the units' answers"),
            notes=(f"sequences of 1 to {self._order} tokens; the model of a subset linearised at the corpus's",),
        )
