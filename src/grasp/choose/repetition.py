r"""What repeated tokens are worth under a fixed training budget.

A model is trained on T tokens. A corpus of C tokens is cut down to U of them, so each is seen T / U times. The first
time counts whole, repetitions count less and less: U unique tokens seen 1 + R times do as much as

    effective(U, T) = U + U R* (1 - exp(-R / R*)),   R = T / U - 1,   R* = 15.4;   effective(U, T) = T where T <= U

tokens that are all different. The predicted change of a subset, its mean effect, is the update of one effective token
against that of the corpus. So under the budget T it becomes

    value(S) = change(S) x effective(U, T) / effective(C, T) .

Small subsets have a high mean effect and are repeated often, large ones are near the corpus, whose change is 0: the
value is highest in between. Below T = C the factor is 1 as long as nothing is repeated (U >= T). What the formula
leaves out: rows of average effect count 0 however often they are seen, so what a language model loses by repetition in
general is not in it.
In a mixture, every slice is a part of its own: value(p) = sum_g change_g effective(n_g, p_g T) / effective(C, T).
Source: Muennighoff et al. 2023, arXiv 2305.16264, eq. 5 and the fit of R*; the product with the change is ours.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grasp.choose.amounts import parse_tokens
from grasp.errors import SettingsError

F64 = NDArray[np.float64]

REPEAT_WORTH = 15.4  # R*: past so many repetitions, more of them add little


def effective_tokens(unique: Any, trained: Any, repeat_worth: float = REPEAT_WORTH) -> F64:
    """Tokens that are all different and do as much as `trained` tokens drawn from `unique` ones; elementwise."""
    unique, trained = np.broadcast_arrays(np.asarray(unique, dtype=np.float64), np.asarray(trained, dtype=np.float64))
    again = np.divide(trained, unique, out=np.ones_like(trained), where=unique > 0) - 1.0
    seen_again = unique * (1.0 - repeat_worth * np.expm1(-np.maximum(again, 0.0) / repeat_worth))
    return np.asarray(np.where(again <= 0.0, trained, seen_again))


@dataclass(frozen=True, slots=True)
class Training:
    """A training budget, and what repetition is worth."""

    tokens: float | None = None  # None: not said; every row counts as if seen once
    repeat_worth: float = REPEAT_WORTH
    corpus_tokens: int = 1

    @classmethod
    def parsed(cls, train_tokens: str | float | None, repeat_worth: float) -> Self:
        """The budget as it is spelled, e.g. 100B, for a corpus that is not known yet.

        Raises:
            SettingsError: no number of tokens, or no R*.
        """
        if not 0 < repeat_worth < np.inf:
            raise SettingsError(
                f"repeat_worth: got {repeat_worth:g}, expected a number above 0; the published one is 15.4"
            )
        return cls(None if train_tokens is None else parse_tokens(train_tokens), repeat_worth)

    def of_corpus(self, tokens: int) -> Self:
        """For a corpus of so many tokens."""
        return replace(self, corpus_tokens=tokens)

    @property
    def epochs(self) -> float:
        """How often the corpus is seen; 1 where no budget was said."""
        return 1.0 if self.tokens is None else self.tokens / self.corpus_tokens

    def share(self, unique: Any) -> F64:
        """What changes of parts with so many tokens are multiplied by: their effective tokens against the corpus'."""
        if self.tokens is None:
            return np.ones(np.shape(unique))
        whole = effective_tokens(self.corpus_tokens, self.tokens, self.repeat_worth)
        return np.asarray(effective_tokens(unique, self.tokens, self.repeat_worth) / whole)
