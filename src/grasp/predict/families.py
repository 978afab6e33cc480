"""Families of random subsets, e.g. random halves, or random shares of every topic.

Start with `parse_family` and `Family.draw`. Subsets are drawn lazily: subset b depends only on (seed, purpose, b), not
on the number of subsets or the block size.

`uniform:F`     a fraction F of the rows, every such set equally likely; its size is round(F N), at least 1.
`bernoulli:Q`   each row is retained independently with probability Q. (In eq:ratio-scaling q is the
                probability of being omitted, so Q = 1 - q.)
`mixture:LABEL` each value of the label keeps a fraction drawn from Beta(1/2, 1/2); within the value the
                rows are drawn uniformly. Rows without the label form a value of their own.
`groups:LABEL`  each value of the label is kept or dropped whole with probability 1/2; never none, never all.
`dirichlet:LABEL` the shares of the values are drawn from a Dirichlet distribution around the shares in the corpus,
                with a random concentration (log-uniform, 0.1 to 10 per value); shares below 0.001 are set to 0. A value
                with twice its share in the corpus has weight 2: its rows are seen twice as often.

After an empty draw (for groups: also one that keeps everything) the next draw of the same random stream is taken.
Equations are those of the paper, see docs/paper_map.md. Shape letters: G label values, N rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from grasp.arrays import F64, I64
from grasp.artifact.label_table import Label, LabelColumn
from grasp.errors import SubsetError
from grasp.predict.weights import SubsetBlock, WeightedRows, Weights, in_blocks
from grasp.seeds import stream

FamilyKind = Literal["uniform", "bernoulli", "mixture", "groups", "dirichlet"]
MAX_REDRAWS = 10_000
MANY_VALUES = 1_000  # above this number of label values, `mixture` draws by one sort (other draws, same distribution)
# Range of the Dirichlet concentration per label value, drawn log-uniformly: at 0.1 a few values dominate, at 10 the
# shares are close to those of the corpus.
CONCENTRATION_RANGE = (0.1, 10.0)
MIN_CONCENTRATION = 1e-3  # NumPy requires positive parameters
MIN_SHARE = 1e-3  # smaller shares are set to 0


@dataclass(frozen=True, slots=True)
class Family:
    """A distribution of subsets; `fraction` is set for uniform and bernoulli, `label` for the others."""

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
            n_subsets: number of subsets.
            n_rows: number of rows of the corpus.
            labels: the label of every row; required by families that draw by a label.
            seed: seed of the random stream.
            purpose: name of the random stream, e.g. "calibration" or "evaluation"; different purposes give
                independent draws.
            block: maximum number of subsets per block.
        Raises:
            SubsetError: the label of `groups` or `dirichlet` has a single value.
        """
        column = None
        if self.label is not None:
            assert labels is not None
            column = labels if isinstance(labels, LabelColumn) else LabelColumn.from_values(labels, self.label)
            assert len(column.codes_N) == n_rows
        if column is None or self.kind == "mixture":
            return in_blocks(self._draw_rows(n_subsets, n_rows, column, seed, purpose), n_rows, block)
        if len(column.values) < 2:
            raise SubsetError(
                f"family {self}: label {self.label!r} has the single value {column.values[0]!r}; "
                f"{self.kind} requires at least two values, otherwise every subset is empty or the whole corpus"
            )
        return self._draw_by_value(n_subsets, column, seed, purpose, block)

    def _draw_by_value(
        self, n_subsets: int, column: LabelColumn, seed: int, purpose: str, block: int
    ) -> Iterator[SubsetBlock]:
        """Draw for groups and dirichlet, where all rows of a label value have the same weight."""
        slices = Weights.from_slices(column.codes_N, len(column.values))
        corpus_share_G = column.counts / column.counts.sum()
        for first in range(0, n_subsets, block):
            names, weights = [], []
            for b in range(first, min(first + block, n_subsets)):
                rng = stream(seed, "family", purpose, b)
                if self.kind == "dirichlet":
                    weight_G = draw_dirichlet_shares(rng, corpus_share_G) / corpus_share_G  # of mean 1 over the corpus
                else:
                    keep_G = np.zeros(len(corpus_share_G), dtype=np.bool_)
                    while not keep_G.any() or keep_G.all():
                        keep_G = rng.random(len(corpus_share_G)) < 0.5
                    weight_G = keep_G.astype(np.float64)
                names.append(f"{purpose}-{b:06d}")
                weights.append(weight_G)
            # weights of label values, as weights of their rows
            yield SubsetBlock(tuple(names), slices.mixed(np.stack(weights)))

    def _draw_rows(
        self, n_subsets: int, n_rows: int, column: LabelColumn | None, seed: int, purpose: str
    ) -> Iterator[WeightedRows]:
        """Draw for uniform, bernoulli and mixture, which sample individual rows."""
        if column is not None:
            sorted_rows_N = np.argsort(column.codes_N, kind="stable")  # by label value
            sorted_codes_N = column.codes_N[sorted_rows_N].astype(np.int64)

        def draw(rng: np.random.Generator) -> I64:
            """Return ascending row positions, possibly none."""
            if column is not None:  # mixture: keep a Beta(1/2, 1/2) fraction of the rows of each label value
                counts_G = column.counts
                drawn_G = np.rint(rng.beta(0.5, 0.5, size=len(counts_G)) * counts_G).astype(np.int64)
                first_G = np.cumsum(counts_G) - counts_G
                if len(drawn_G) > MANY_VALUES:
                    # A single sort, which shuffles the rows within every value, is faster than many draws. It consumes
                    # other random numbers, so the draws of a seed change at MANY_VALUES.
                    random_order = np.argsort(sorted_codes_N + rng.random(n_rows), kind="stable")
                    rank_N = np.arange(n_rows) - first_G[sorted_codes_N]
                    return np.sort(sorted_rows_N[random_order][rank_N < drawn_G[sorted_codes_N]])
                picks = [
                    sorted_rows_N[first + _draw_without_replacement(rng, int(n), int(n_drawn))]
                    for first, n, n_drawn in zip(first_G, counts_G, drawn_G, strict=True)
                ]
                return np.sort(np.concatenate(picks))
            fraction = self.fraction or 0.0
            if self.kind == "uniform":
                return _draw_without_replacement(rng, n_rows, max(1, round(fraction * n_rows)))
            return np.flatnonzero(rng.random(n_rows) < fraction)

        for b in range(n_subsets):
            rng = stream(seed, "family", purpose, b)
            rows = next((rows for _ in range(MAX_REDRAWS) if (rows := draw(rng)).size), None)
            if rows is None:
                raise SubsetError(
                    f"family {self}: {MAX_REDRAWS} draws from {n_rows} rows were empty; use a larger fraction"
                )
            yield WeightedRows(f"{purpose}-{b:06d}", rows)


def draw_dirichlet_shares(rng: np.random.Generator, around_G: F64) -> F64:
    """Draw shares (G,) that add up to 1 from a Dirichlet distribution around `around_G`; small shares become 0."""
    concentration = np.exp(rng.uniform(*np.log(CONCENTRATION_RANGE))) * len(around_G)
    share_G = rng.dirichlet(np.maximum(concentration * around_G / around_G.sum(), MIN_CONCENTRATION))
    share_G[share_G < min(MIN_SHARE, share_G.max())] = 0.0  # keeps at least the largest
    return np.asarray(share_G / share_G.sum())


def parse_family(text: str) -> Family:
    """Parse `uniform:0.5`, `bernoulli:0.5`, `mixture:topic`, `groups:topic` or `dirichlet:topic`.

    Raises:
        SubsetError: unknown kind, a fraction outside (0, 1), or no label.
    """
    kind, _, argument = (part.strip() for part in text.partition(":"))
    with suppress(ValueError):
        if kind in ("uniform", "bernoulli") and 0.0 < (fraction := float(argument)) < 1.0:
            return Family(cast(FamilyKind, kind), fraction=fraction)
    if kind in ("mixture", "groups", "dirichlet") and argument:
        return Family(cast(FamilyKind, kind), label=argument)
    raise SubsetError(
        f"family {text!r}: unknown {kind!r} with {argument!r}; expected a fraction between 0 and 1, or a label: "
        "uniform:0.5, bernoulli:0.5, mixture:LABEL, groups:LABEL or dirichlet:LABEL"
    )


def _draw_without_replacement(rng: np.random.Generator, n: int, size: int) -> I64:
    """Draw `size` of `n` positions without replacement, in ascending order."""
    return np.sort(rng.choice(n, size=size, replace=False, shuffle=False)).astype(np.int64, copy=False)
