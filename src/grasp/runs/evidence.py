"""How many retrained subsets it takes to choose among how many protocols."""

import math

from scipy.stats import norm

from grasp.runs.candidates import ProtocolFamily, default_family
from grasp.runs.selection import DELTA

# How far below its mean rho the bound of a protocol may lie by the length of the list alone, before luck decides.
WIDEST = 0.6


def evidence(n_subsets: int) -> str:
    """What `calibrate` can choose from with so many subsets, and what it takes to choose from more."""
    lists = {"short list": short_family().size, "whole list": default_family().size}
    for name, size in reversed(lists.items()):
        if n_subsets >= subsets_for(size):
            carried = f"{n_subsets} subsets carry its {name} of {size:,} protocols, on two tasks or more"
            break
    else:
        carried = f"{n_subsets} subsets are too few to choose by"
    short_of = {name: size for name, size in lists.items() if n_subsets < subsets_for(size)}
    wanting = [f"{subsets_for(size)} carry its {name} of {size:,}" for name, size in short_of.items()]
    more = f"; {', '.join(wanting)}: the same command with a larger -B goes on from here" if wanting else ""
    return f"for grasp calibrate: {carried}{more}"


def short_family() -> ProtocolFamily:
    """What few subsets can tell apart: the kernels and their sums, on the side and scale of the protocol that ships."""
    few = {"sides": ("retained",), "standardize": ("mean_relevance",), "components": ((),)}
    return default_family().model_copy(update=few)


def subsets_for(n_protocols: int, delta: float = DELTA) -> int:
    """How many subsets can choose among so many protocols.

    The rho of a predictor that knows nothing has a standard error of 1 / sqrt(B - 1) on B subsets, and the bound of
    one of K protocols lies z_(1 - delta/K) of them below its mean: at most WIDEST.
    """
    return 1 + math.ceil((float(norm.ppf(1 - delta / n_protocols)) / WIDEST) ** 2)
