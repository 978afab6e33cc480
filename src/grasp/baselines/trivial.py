"""What users try first, and what no information gives. Peers' leaderboards show that they are hard to beat.

None of them looks at the target: one score a row for all units.
"""

from typing import Literal

from pydantic import Field

from grasp.arrays import F64
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs, NoSettings, Scores
from grasp.seeds import stream
from grasp.settings import Settings


class _Column(RowScorer):
    """One number a row, known beforehand."""

    def __init__(self, values_N: F64, account: Account) -> None:
        self._values_N, self._account = values_N, account

    def score(self, start: int, stop: int) -> Scores:
        return self._values_N[start:stop, None]

    def account(self) -> Account:
        return self._account


class Random(BlockMethod[NoSettings]):
    """A random number a row: what no information gives.

    Standard normal, from the seed alone.
    """

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del work, part
        values_N = stream(self.seed, "baselines", "random").standard_normal(material.n_rows)
        return _Column(values_N, Account(covers=("nothing",), notes=("knows nothing of rows or units",)))


class LengthSettings(Settings):
    """Length of a row as its score."""

    prefer: Literal["long", "short"] = Field("long", description="Which rows score high.")


class Length(BlockMethod[LengthSettings]):
    """Tokens of the row."""

    settings_type = LengthSettings

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del work, part
        sign = 1.0 if self.settings.prefer == "long" else -1.0
        return _Column(sign * material.column("n_tokens"), Account(covers=("number of tokens",)))


class LossSettings(Settings):
    """Loss of the reference model as a score."""

    prefer: Literal["low", "high"] = Field(
        "low", description="Which rows score high: low keeps fluent text, as perplexity filters do; high, hard text."
    )


class Loss(BlockMethod[LossSettings]):
    """Loss of the reference model on the row: low first, as perplexity filters do.

    Mean loss of the reference model on the row, which the artifact has.
    """

    settings_type = LossSettings
    looks_at = frozenset({"model"})

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del work, part
        sign = -1.0 if self.settings.prefer == "low" else 1.0
        return _Column(sign * material.column("loss"), Account(covers=("loss of the row",)))
