"""Ways to draw subsets at random, e.g. random halves, or random shares of every topic.

They are drawn when they are needed: subset b depends on (seed, purpose, b) alone, never on how many are drawn at once.

`uniform:F`     a fraction F of the rows, every such set equally likely; its size is round(F N), at least 1.
`bernoulli:Q`   each row is RETAINED independently with probability Q. (In eq:ratio-scaling q is the
                probability of being omitted, so Q = 1 - q.)
`mixture:LABEL` each value of the label keeps a fraction drawn from Beta(1/2, 1/2); within the value the
                rows are drawn uniformly. Rows without the label form a value of their own.
`groups:LABEL`  each value of the label is kept or dropped whole with probability 1/2; never none, never all.
`dirichlet:LABEL` shares of the values over decades, some of them 0, from a Dirichlet distribution around those of the
                corpus; rows of a value that gets twice its share have the weight 2, so they are seen twice as often.

A draw that comes out empty (for groups: or whole) is made again from the same stream.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from grasp.arrays import F64, I64
from grasp.artifact.where import Label, LabelColumn
from grasp.errors import SubsetError
from grasp.predict.weights import SubsetBlock, WeightedRows, Weights, in_blocks
from grasp.seeds import stream

FamilyKind = Literal["uniform", "bernoulli", "mixture", "groups", "dirichlet"]
MAX_REDRAWS = 10_000
MANY_VALUES = 1_000  # of a mixture's label: more are drawn all at once, other subsets of the same distribution
SPELLINGS = "uniform:0.5, bernoulli:0.5, mixture:LABEL, groups:LABEL or dirichlet:LABEL"
LABELLED: tuple[FamilyKind, ...] = ("mixture", "groups", "dirichlet")
STRENGTH = (0.1, 10.0)  # of a Dirichlet draw, times the number of values: from a few values alone to nearly the corpus
LEAST_SHARE = 1e-3  # what is less counts as 0


@dataclass(frozen=True, slots=True)
class Family:
    """A way to draw subsets; `fraction` for uniform and bernoulli, `label` for the others."""

    kind: FamilyKind
    fraction: float | None = None
    label: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.fraction if self.label is None else self.label}"

    def draw(
        self,
        n_subsets: int,
        *,
        n_rows: int,
        labels: LabelColumn | Sequence[Label] | None = None,
        seed: int,
        purpose: str,
        block: int = 256,
    ) -> Iterator[SubsetBlock]:
        """Draw `n_subsets` subsets of `n_rows` rows, in blocks of at most `block`.

        Args:
            labels: the label of every row, for families of a label.
            purpose: what the family is for, e.g. "calibration" or "evaluation"; families with different
                purposes are disjoint streams.
        Raises:
            SubsetError: no rows, labels missing or of another length, a single value under groups or
                dirichlet.
        """
        if n_rows < 1:
            raise SubsetError(f"family {self}: the corpus has {n_rows} rows; there is nothing to draw from")
        if self.label is None:
            return in_blocks(self._of_rows(n_subsets, n_rows, None, seed, purpose), n_rows, block)
        if labels is None:
            raise SubsetError(f"family {self}: needs the label {self.label!r} of every row, got none")
        column = labels if isinstance(labels, LabelColumn) else LabelColumn.from_values(labels, self.label)
        if len(column.codes_N) != n_rows:
            raise SubsetError(f"family {self}: got {len(column.codes_N)} labels for {n_rows} rows; expected one a row")
        if self.kind == "mixture":
            return in_blocks(self._of_rows(n_subsets, n_rows, column, seed, purpose), n_rows, block)
        if len(column.values) < 2:
            raise SubsetError(
                f"family {self}: label {self.label!r} has the single value {column.values[0]!r}; "
                f"{self.kind} needs two or more, or every subset would be empty or whole"
            )
        return self._of_values(n_subsets, column, seed, purpose, block)

    def _of_values(
        self, n_subsets: int, column: LabelColumn, seed: int, purpose: str, block: int
    ) -> Iterator[SubsetBlock]:
        """Groups and dirichlet: whole values; a weight for each of them is all that a subset takes."""
        values = Weights.from_slices(column.codes_N, len(column.values))
        even_G = column.counts / column.counts.sum()
        for first in range(0, n_subsets, block):
            names, drawn = [], []
            for b in range(first, min(first + block, n_subsets)):
                rng = stream(seed, "family", purpose, b)
                if self.kind == "dirichlet":
                    weight_G = draw_dirichlet_shares(rng, even_G) / even_G  # of mean 1 over the corpus
                else:
                    while (keep_G := rng.random(len(even_G)) < 0.5).all() or not keep_G.any():
                        pass
                    weight_G = keep_G.astype(np.float64)
                names.append(f"{purpose}-{b:06d}")
                drawn.append(weight_G)
            yield SubsetBlock(tuple(names), values.mixed(np.stack(drawn)))

    def _of_rows(
        self, n_subsets: int, n_rows: int, column: LabelColumn | None, seed: int, purpose: str
    ) -> Iterator[WeightedRows]:
        """Uniform, bernoulli and mixture: rows one by one."""
        fraction = self.fraction or 0.0
        if column is not None:
            rows_N = np.argsort(column.codes_N, kind="stable")  # those of the first value, then of the second, ...
            by_value = column.counts, rows_N, column.codes_N[rows_N].astype(np.int64)

        def draw(rng: np.random.Generator) -> I64:
            if column is not None:
                return _some_of_each(rng, *by_value)
            if self.kind == "uniform":
                return _choose(rng, n_rows, max(1, round(fraction * n_rows)))
            return np.flatnonzero(rng.random(n_rows) < fraction)

        for b in range(n_subsets):
            rng = stream(seed, "family", purpose, b)
            redrawn = 0
            while (rows := draw(rng)).size == 0:
                redrawn += 1
                if redrawn == MAX_REDRAWS:
                    raise SubsetError(
                        f"family {self}: {MAX_REDRAWS} draws in a row left none of the {n_rows} rows; "
                        "ask for a larger fraction"
                    )
            yield WeightedRows(f"{purpose}-{b:06d}", rows)


def _some_of_each(rng: np.random.Generator, counts_G: I64, rows_N: I64, code_N: I64) -> I64:
    """Of each value a fraction drawn from Beta(1/2, 1/2); ascending. Shape letters: G values, N rows by value."""
    kept_G = np.rint(rng.beta(0.5, 0.5, size=len(counts_G)) * counts_G).astype(np.int64)
    first_G = np.cumsum(counts_G) - counts_G
    if len(kept_G) > MANY_VALUES:  # shuffle within all values by one sort, and take the first of each
        shuffled_N = rows_N[np.argsort(code_N + rng.random(len(rows_N)), kind="stable")]
        place_N = np.arange(len(shuffled_N)) - first_G[code_N]
        return np.sort(shuffled_N[place_N < kept_G[code_N]])
    picks = [
        rows_N[first + _choose(rng, int(n), int(kept))]
        for first, n, kept in zip(first_G, counts_G, kept_G, strict=True)
    ]
    return np.sort(np.concatenate(picks))


def draw_dirichlet_shares(rng: np.random.Generator, around_G: F64) -> F64:
    """(G,) shares over decades, some of them 0, around those given."""
    strength = np.exp(rng.uniform(*np.log(STRENGTH))) * len(around_G)
    share_G = rng.dirichlet(np.maximum(strength * around_G / around_G.sum(), 1e-3))
    share_G[share_G < min(LEAST_SHARE, share_G.max())] = 0.0
    return np.asarray(share_G / share_G.sum())


def parse_family(text: str) -> Family:
    """Read `uniform:0.5`, `bernoulli:0.5`, `mixture:topic`, `groups:topic`; `uniform(0.5)` means the same."""
    spelled = text.strip()
    if spelled.endswith(")") and "(" in spelled:
        spelled = spelled[:-1].replace("(", ":", 1)
    kind, _, argument = (part.strip() for part in spelled.partition(":"))
    if kind in ("uniform", "bernoulli"):
        try:
            fraction = float(argument)
        except ValueError:
            fraction = math.nan
        if not 0.0 < fraction < 1.0:
            raise SubsetError(f"family {text!r}: got {argument!r}, expected a fraction between 0 and 1, both excluded")
        return Family("uniform" if kind == "uniform" else "bernoulli", fraction=fraction)
    for labelled in LABELLED:
        if kind == labelled:
            if not argument:
                raise SubsetError(f"family {text!r}: names no label; expected {kind}:LABEL, e.g. {kind}:topic")
            return Family(labelled, label=argument)
    raise SubsetError(f"family {text!r}: unknown kind {kind!r}; expected {SPELLINGS}")


def _choose(rng: np.random.Generator, n: int, size: int) -> I64:
    return np.sort(rng.choice(n, size=size, replace=False, shuffle=False)).astype(np.int64, copy=False)
