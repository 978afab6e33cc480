"""N-gram model: how much a row raises the probability of the units' answers under an n-gram language model.

Start with `Ngram`. The model interpolates: p(y | context) = lambda_0 / V + sum_n lambda_n A_n / B_n, where A_n counts
how often the last n - 1 tokens are followed by y, and B_n how often they are followed by any token. Its logarithm is
linearised in a row's counts, so that each row has one score per unit and scores are additive.

Shape letters: n rows of a block, N rows, E units, P predicted tokens of units, V vocabulary, C sequences in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field
from scipy.sparse import coo_array, csr_array

from grasp.arrays import F64, I64
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.corpus.row_store import TokenRows
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.settings import Settings
from grasp.targets.units import UnitTokens


class NgramSettings(Settings):
    """Order and smoothing of the model."""

    order: int = Field(4, ge=1, le=8, description="Longest sequence in tokens: 4 conditions on the last three tokens.")
    uniform: float = Field(
        0.05, gt=0, lt=1, description="Weight of the uniform distribution, for tokens that no row has after a context."
    )


class Ngram(BlockMethod[NgramSettings]):
    """First-order effect of a row on an n-gram language model's log probability of the answer.

    Change of the mean log probability of a unit's answer under an n-gram model of the corpus, per row, to first order.

    Source: interpolated n-gram models (Jelinek and Mercer 1980).
    As published: the weights of the orders are estimated on held-out text; the model scores texts, not training rows.
    Deviation: the orders whose context occurs share the weight equally, and the model of a subset is linearised at the
    model of the whole corpus.
    """

    settings_type = NgramSettings
    requires = frozenset({"tokens"})

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        vocabulary = inputs.artifact.manifest.details["vocab_size"]
        grams = [_Sequences.from_units(inputs.unit_tokens, n, vocabulary) for n in range(1, self.settings.order + 1)]

        def count_sequences() -> dict[str, F64]:
            total_C = np.zeros(sum(len(gram) for gram in grams))
            for start, stop in inputs.blocks():
                total_C += _count_sequences(grams, inputs.rows(start, stop)).sum(axis=0)
            return {"total_C": total_C}

        total_C = cached(work / "totals.safetensors", count_sequences)["total_C"]
        unit_P = np.repeat(np.arange(inputs.n_units), [len(unit.input_ids) - unit.first for unit in inputs.unit_tokens])
        weight_CE = _derivatives(grams, total_C / inputs.n_rows, unit_P, self.settings.uniform)
        account = Account(
            covers=("tokens of the rows", "tokens of the units' answers"),
            notes=(
                f"sequences of 1 to {self.settings.order} tokens; the model of a subset linearised at the model of the "
                "corpus",
            ),
        )

        def score(start: int, stop: int) -> Scores:
            return np.asarray((_count_sequences(grams, inputs.rows(start, stop)) @ weight_CE).toarray())

        return RowScorer(score, account)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences of one length in the units, and their contexts, as integer codes.

    Attributes:
        keys: for each depth d = 1 .. n the sorted keys of sequences of d tokens. The key of a sequence is
            (code of its first d - 1 tokens) * V + its last token, and its code is the position of its key. So a
            sequence of any length is found by n binary searches.
        position, context, whole: for each predicted token with a long enough context: its index, the code of its
            context, the code of the whole sequence.
    """

    n: int
    vocabulary: int
    keys: list[I64]
    position: I64
    context: I64
    whole: I64

    @property
    def n_contexts(self) -> int:
        """Number of different contexts; sequences of length 1 have a single one, the empty context."""
        return len(self.keys[-2]) if self.n > 1 else 1

    @classmethod
    def from_units(cls, units: list[UnitTokens], n: int, vocabulary: int) -> "_Sequences":
        """Collect the sequences that end in a token of an answer."""
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

    def find(self, rows: TokenRows) -> tuple[I64, I64]:
        """Return the occurrences of the units' sequences, and of their contexts, in rows.

        Returns:
            Row of each occurrence, and its code: contexts first, then whole sequences, from `n_contexts` on.
        """
        flat, row = rows.flat_ids.astype(np.int64), np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
        predicted = np.ones(len(flat), dtype=np.bool_) if rows.loss_mask is None else rows.loss_mask.copy()
        predicted[rows.offsets[:-1]] = False  # the first token of a row has no context
        end = np.flatnonzero(predicted)
        end = end[end - self.n + 1 >= rows.offsets[row[end]]]
        code = np.zeros(len(end), dtype=np.int64)
        matched_rows, codes = [], []
        for depth, known in enumerate(self.keys):
            if depth == self.n - 1:
                matched_rows.append(row[end])
                codes.append(code)
            key = code * self.vocabulary + flat[end - self.n + 1 + depth]
            position = np.minimum(np.searchsorted(known, key), max(len(known) - 1, 0))
            is_known = known[position] == key if len(known) else np.zeros(len(key), dtype=np.bool_)
            end, code = end[is_known], position[is_known]
        return np.concatenate([*matched_rows, row[end]]), np.concatenate([*codes, code + self.n_contexts])


def _with_offsets(grams: list[_Sequences]) -> Iterator[tuple[int, _Sequences]]:
    """Yield the sequences of each length with the index of their first column among all C."""
    start = 0
    for gram in grams:
        yield start, gram
        start += len(gram)


def _count_sequences(grams: list[_Sequences], rows: TokenRows) -> csr_array:
    """Count each sequence in each row, (n, C)."""
    matches = [(gram.find(rows), start) for start, gram in _with_offsets(grams)]
    row = np.concatenate([row for (row, _), _ in matches])
    code = np.concatenate([code + start for (_, code), start in matches])
    shape = (len(rows), sum(len(gram) for gram in grams))
    return csr_array(coo_array((np.ones(len(row)), (row, code)), shape=shape))


def _derivatives(grams: list[_Sequences], mean_C: F64, unit_P: I64, uniform: float) -> csr_array:
    """Return the derivative of a unit's mean log probability by each sequence's count, times N, (C, E).

    With p = lambda_0 / V + sum_n lambda_n A_n / B_n:  d log p = sum_n lambda_n (dA_n - (A_n / B_n) dB_n) / (B_n p).
    """
    # sum of A_n / B_n over the orders, and number of orders whose context occurs, of each predicted token
    share_P, n_contexts_P = np.zeros(len(unit_P)), np.zeros(len(unit_P))
    parts = []
    for start, gram in _with_offsets(grams):
        context_count, sequence_count = mean_C[start + gram.context], mean_C[start + gram.n_contexts + gram.whole]
        share = sequence_count / np.where(context_count > 0, context_count, np.inf)
        share_P[gram.position] += share
        n_contexts_P[gram.position] += context_count > 0
        parts.append((start, gram, np.where(context_count > 0, context_count, np.inf), share))
    weight_P = (1 - uniform) / np.maximum(n_contexts_P, 1)  # lambda_n: equal for all orders whose context occurs
    # lambda_n / p, divided by the number of predicted tokens of the unit
    slope_P = weight_P / (uniform / grams[0].vocabulary + weight_P * share_P) / np.bincount(unit_P)[unit_P]
    rows, columns, values = [], [], []
    for start, gram, context_count, share in parts:
        slope = slope_P[gram.position] / context_count
        rows += [start + gram.n_contexts + gram.whole, start + gram.context]
        columns += [unit_P[gram.position]] * 2
        values += [slope, -slope * share]
    coordinates = (np.concatenate(rows), np.concatenate(columns))
    return csr_array(coo_array((np.concatenate(values), coordinates), shape=(len(mean_C), int(unit_P.max()) + 1)))
