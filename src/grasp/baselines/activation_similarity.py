"""Activation similarity: cosine of the pooled final hidden states of row and unit.

Start with `ActivationSimilarity`.

Shape letters: n rows of a block, E units, H hidden width.
"""

from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from grasp.arrays import F32, F64
from grasp.baselines.hidden import pooled_hidden
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.methods.contract import Account, MethodInputs
from grasp.settings import Positions, Settings


class ActivationSimilaritySettings(Settings):
    """Which positions are averaged, and whether states are centred."""

    positions: Positions = Field("all", description="Positions averaged in rows and units: all, tail:n or stride:n.")
    unit_tokens: Literal["all", "supervised"] = Field(
        "all", description="Positions of a unit: all, or those before the tokens that carry its loss."
    )
    centre: bool = Field(
        False, description="Subtract the mean over all rows first, since hidden states share a large common direction."
    )


class ActivationSimilarity(BlockMethod[ActivationSimilaritySettings]):
    """Cosine of mean final hidden states, after the final norm.

    Source: Hanawa et al. 2021 (arXiv 2006.04528), and later work under the name RepSim.
    As published: the input of a classifier's last layer, one vector per example.
    Deviation: a text has a state at every position, so the mean over positions is compared; a row whose mean is zero
    after centring scores 0.
    """

    settings_type = ActivationSimilaritySettings
    requires = frozenset({"tokens", "model"})

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        settings = self.settings

        def compute(start: int, stop: int) -> F32:
            rows = inputs.rows(start, stop)
            sequences = [rows.ids(i) for i in range(len(rows))]
            first = [0 if (mask := rows.mask(i)) is None else mask for i in range(len(rows))]
            return pooled_hidden(inputs.model, sequences, first, settings.positions)

        def states_of(start: int, stop: int) -> F64:
            # Centring reads all rows once for their mean, and again for their scores: only then is a cache of use.
            if settings.centre:
                return work.load_or_compute(f"{start}-{stop}", partial(compute, start, stop)).astype(np.float64)
            return compute(start, stop).astype(np.float64)

        units = inputs.unit_tokens
        # Position t predicts token t + 1, so the loss of a unit starts one position before its first label.
        first = [unit.first - 1 if self.settings.unit_tokens == "supervised" else 0 for unit in units]
        sequences = [unit.input_ids for unit in units]
        unit_EH = pooled_hidden(inputs.model, sequences, first, self.settings.positions).astype(np.float64)
        mean_H = np.zeros(unit_EH.shape[1])
        if settings.centre:
            inputs.progress.stage("hidden states", rows=inputs.n_rows, tokens=None)
            for start, stop in inputs.blocks():
                mean_H += states_of(start, stop).sum(axis=0)
                inputs.progress.advance(stop - start, 0)
            mean_H /= inputs.n_rows
        unit_EH = normalise_rows(unit_EH - mean_H)
        states = f"final hidden states after the final norm, mean over positions {self.settings.positions}"
        return RowScorer(
            lambda start, stop: normalise_rows(states_of(start, stop) - mean_H) @ unit_EH.T,
            Account(features=unit_EH.shape[1], covers=(states,)),
        )


def normalise_rows(values_nH: F64) -> F64:
    """Divide each row by its norm; leave zero rows as they are."""
    norm_n1 = np.linalg.norm(values_nH, axis=1, keepdims=True)
    return np.asarray(np.divide(values_nH, norm_n1, out=np.zeros_like(values_nH), where=norm_n1 > 0))
