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

from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

REPEAT_WORTH = 15.4  # R*: past so many repetitions, more of them add little


def effective_tokens(unique: Any, trained: Any, repeat_worth: float = REPEAT_WORTH) -> F64:
    """Tokens that are all different and do as much as `trained` tokens drawn from `unique` ones; elementwise."""
    unique, trained = np.broadcast_arrays(np.asarray(unique, dtype=np.float64), np.asarray(trained, dtype=np.float64))
    again = np.divide(trained, unique, out=np.ones_like(trained), where=unique > 0) - 1.0
    seen_again = unique * (1.0 - repeat_worth * np.expm1(-np.maximum(again, 0.0) / repeat_worth))
    return np.asarray(np.where(again <= 0.0, trained, seen_again))


def repeated_share(unique: Any, corpus: float, trained: float | None, repeat_worth: float = REPEAT_WORTH) -> F64:
    """What a change is multiplied by: effective tokens of a part against those of the corpus; 1 without a budget."""
    if trained is None:
        return np.ones(np.shape(unique))
    whole = effective_tokens(corpus, trained, repeat_worth)
    return np.asarray(effective_tokens(unique, trained, repeat_worth) / whole)
