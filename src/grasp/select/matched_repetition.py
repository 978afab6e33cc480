"""Proxy runs that repeat each source as often as a planned run will. Start with `PlannedRun` and `match_repetition`.

A run of D tokens, in which a source of S tokens has the share h, sees its tokens h D / S times. A proxy run of d tokens
does the same if it has only S d / D distinct tokens of this source, whatever h is. So a fixed random part of the rows
of each source is retained, with weights that leave the shares of the mixture as they are. Source: arXiv 2606.07597.

Shape letters: N rows, G label values.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import SettingsError
from grasp.predict.weights import SubsetBlock, Weights
from grasp.seeds import stream
from grasp.select.budget import first_few, parse_tokens
from grasp.yaml_files import read_yaml

TOLERANCE = 1.01  # a source that is repeated more often than planned by this factor is reported


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that is planned: its length, and the tokens of each source by label value."""

    tokens: float
    source_tokens: Mapping[str, float]

    @classmethod
    def parse(cls, planned_tokens: str | float | None, source_tokens: Path | str | None) -> Self | None:
        """Read a planned run: its length, e.g. `1T`, and a file of its sources; None if neither is given.

        Args:
            source_tokens: CSV with a first line and the columns value and tokens, or a mapping in YAML or JSON.
        Raises:
            SettingsError: only one is given, the file cannot be read, or a number of tokens is none.
        """
        if planned_tokens is None and source_tokens is None:
            return None
        if planned_tokens is None or source_tokens is None:
            raise SettingsError("planned_tokens, source_tokens: expected both, e.g. 1T and sources.csv")
        path = Path(source_tokens)
        if path.suffix == ".csv":
            try:
                with path.open(encoding="utf-8", newline="") as file:
                    _, *lines = csv.reader(file)
                    sizes = {value: tokens for value, tokens, *_ in lines}
            except (OSError, ValueError, csv.Error) as err:
                raise SettingsError(f"{path}: {err}; expected the columns value and tokens") from err
        else:
            sizes = {str(value): str(tokens) for value, tokens in read_yaml(path).items()}
        parsed = {value: parse_tokens(tokens.strip(), f"{path}: {value}") for value, tokens in sizes.items()}
        return cls(parse_tokens(planned_tokens, "planned_tokens"), parsed)

    def sizes(self, values: Sequence[str]) -> F64:
        """Return the tokens of each value, (G,).

        Raises:
            SettingsError: the file lacks a value.
        """
        if missing := [value for value in values if value not in self.source_tokens]:
            raise SettingsError(f"source_tokens: lacks {first_few(missing)}; has {first_few(list(self.source_tokens))}")
        return np.array([self.source_tokens[value] for value in values])


def match_repetition(
    blocks: Iterable[SubsetBlock], plan: PlannedRun, column: LabelColumn, tokens_N: I64, run_tokens: float
) -> tuple[Iterator[SubsetBlock], list[str]]:
    """Restrict mixtures of label values to as many distinct tokens that each is repeated as often as in a planned run.

    Args:
        blocks: mixtures; all rows of a value have the same weight.
        plan: the planned run.
        column: label value of each row.
        tokens_N: tokens of each row.
        run_tokens: length of the proxy runs in tokens.
    Returns:
        Subsets with the same shares of tokens, and a note on values of which the corpus has too few tokens.
    Raises:
        SettingsError: the plan lacks a label value.
    """
    names = column.names()
    wanted_G = plan.sizes(names) * run_tokens / plan.tokens
    order_N, ends_G = np.argsort(column.codes_N, kind="stable"), np.cumsum(column.counts)
    factor_N, short = np.zeros(len(tokens_N)), []
    for name, wanted, rows in zip(names, wanted_G, np.split(order_N, ends_G[:-1]), strict=True):
        shuffled = stream(0, "repetition", name).permutation(rows)
        until_N = np.cumsum(tokens_N[shuffled])
        n_retained = max(int(np.searchsorted(until_N - tokens_N[shuffled] / 2, wanted)), 1)  # the nearest number
        retained, available = shuffled[:n_retained], until_N[-1]
        factor_N[retained] = available / tokens_N[retained].sum()
        if wanted > TOLERANCE * available:
            short.append(f"{name} {wanted / available:.2g} times as often")
    notes = [f"repeated more often than planned, since the corpus is too small: {first_few(short)}"] if short else []
    retained_weights = ((block.subset_ids, block.weights_BN.multiply(factor_N[None])) for block in blocks)
    return (SubsetBlock(ids, Weights(csr_array(weights_BN))) for ids, weights_BN in retained_weights), notes
