"""Trivial baselines: a random score, the length of a row, the loss of a row.

A method that does not beat them has learned nothing about the target. None of them depends on the target: one score per
row for all units. Start with `Random`, `Length` or `Loss`.
"""

from pathlib import Path

from grasp.arrays import F64
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.methods.contract import Account, MethodInputs, NoSettings
from grasp.seeds import stream


def _score_by_column(values_N: F64, account: Account) -> RowScorer:
    """Return a scorer by a precomputed column of the rows."""
    return RowScorer(lambda start, stop: values_N[start:stop, None], account)


class Random(BlockMethod[NoSettings]):
    """A random score per row: the level of chance.

    Standard normal, determined by the seed. No source: the level that every method must exceed.
    """

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work, part
        values_N = stream(self.seed, "baselines", "random").standard_normal(inputs.n_rows)
        return _score_by_column(values_N, Account(covers=("nothing",), notes=("independent of rows and units",)))


class Length(BlockMethod[NoSettings]):
    """Number of tokens of the row.

    No source: a control for methods whose scores grow with the length of a row.
    """

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work, part
        return _score_by_column(inputs.column("n_tokens"), Account(covers=("number of tokens",)))


class Loss(BlockMethod[NoSettings]):
    """Loss of the reference model on the row: low first, as in perplexity filters.

    Minus the mean loss of the reference model on the row, as stored in the artifact.

    Source: perplexity filters, e.g. CCNet (Wenzek et al. 2020) and Marion et al. 2023 (arXiv 2309.04564).
    As published: perplexity under an n-gram model of Wikipedia, or under a small language model, by which the corpus is
    cut into low, middle and high.
    Deviation: the loss itself is the score, under the reference model.
    """

    requires = frozenset({"model"})

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del work, part
        return _score_by_column(-inputs.column("loss"), Account(covers=("loss of the row",)))
