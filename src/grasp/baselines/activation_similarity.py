"""Activation similarity: cosine of the pooled final hidden states of row and unit.

Start with `ActivationSimilarity`.

Shape letters: n rows of a block, E units, H hidden width.
"""

from pathlib import Path

import numpy as np
from pydantic import Field

from grasp.arrays import F32, F64, ratio
from grasp.baselines.hidden import pooled_hidden, row_sequences
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.methods.contract import Account, MethodInputs
from grasp.settings import Settings


class ActivationSimilaritySettings(Settings):
    """Whether states are centred."""

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

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part

        def states_of(start: int, stop: int) -> F64:
            def compute() -> dict[str, F32]:
                return {"states": pooled_hidden(inputs.model, *row_sequences(inputs, start, stop))}

            # Centring reads all rows once for their mean, and again for their scores: only then is a cache of use.
            stored = cached(work / f"{start}.safetensors", compute) if self.settings.centre else compute()
            return stored["states"].astype(np.float64)

        unit_ids = [unit.input_ids for unit in inputs.unit_tokens]
        unit_EH = pooled_hidden(inputs.model, unit_ids, [0] * len(unit_ids)).astype(np.float64)
        mean_H = np.zeros(unit_EH.shape[1])
        if self.settings.centre:
            inputs.progress.stage("hidden states", rows=inputs.n_rows, tokens=None)
            for start, stop in inputs.blocks():
                mean_H += states_of(start, stop).sum(axis=0)
                inputs.progress.advance(stop - start, 0)
            mean_H /= inputs.n_rows
        unit_EH = normalise_rows(unit_EH - mean_H)
        return RowScorer(
            lambda start, stop: normalise_rows(states_of(start, stop) - mean_H) @ unit_EH.T,
            Account(
                features=unit_EH.shape[1],
                covers=("final hidden states after the final norm, mean over positions",),
            ),
        )


def normalise_rows(values_nH: F64) -> F64:
    """Divide each row by its norm; leave zero rows as they are."""
    return ratio(values_nH, np.linalg.norm(values_nH, axis=1, keepdims=True))
