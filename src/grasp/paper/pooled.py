"""The kernel of the paper: relevance from summaries of rows and units, as hidden match times residual match.

The summary of a row is the average of its hidden states and of its residuals over the positions of the setting
`features.summary_positions`, with `rule: paper` the last 32 tokens with a loss. h~ is a whitened average of hidden
states. xi is an average of residuals, a sparse vector over the vocabulary: predicted probabilities minus the one-hot
vector of the next token. D is a diagonal matrix that weights rare tokens up.

Start with `prepare_units` and `pooled_relevance`. Labels `eq:` in "Source" are those of the paper; docs/paper_map.md
lists them.

Shape letters: N rows, B rows of a batch, E units, H hidden width, V vocabulary, C tokens of the vocabulary that many
units share.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array, diags_array
from torch import Tensor

from grasp.arrays import F64, I64, Floats
from grasp.kernels.kernel import Kernel
from grasp.kernels.whitening import SummaryMoments, Whitener
from grasp.models.batch import Batch

# The residuals of a vocabulary token that occurs in at least this share of the units are stored as a dense row of E
# numbers, which is then faster than scattered entries.
MIN_SHARED_UNITS = 1 / 8


def damp(match: Floats) -> Floats:
    """Return sgn(x) log(1 + |x|): odd, strictly increasing, unitless. Source: eq:grasp-score."""
    # log1p: log(1 + x) loses the digits of small matches
    return np.asarray(np.copysign(np.log1p(np.abs(match)), match))


@dataclass(frozen=True, slots=True)
class PreparedUnits:
    """The units' side of the kernel, computed once per build: h~_e, and D xi_e split by how many units have a token."""

    hidden_EH: Floats
    shared_C: I64  # tokens that many units have
    shared_CE: Floats  # D xi_e of these tokens, dense
    rare_VE: csr_array  # D xi_e of the other tokens, sparse


def prepare_units(unit_hidden_EH: Floats, unit_residual_EV: csr_array, precondition_V: Floats) -> PreparedUnits:
    """Fold the preconditioner D into the units and split their residuals.

    Args:
        unit_hidden_EH: whitened unit summaries.
        unit_residual_EV: pooled sparse residuals, not scaled.
        precondition_V: the diagonal of D.
    """
    n_units, vocab = unit_residual_EV.shape
    scaled_VE = csr_array((unit_residual_EV @ diags_array(precondition_V)).T)
    n_units_V = np.diff(scaled_VE.indptr)
    shared_C = np.flatnonzero(n_units_V >= max(1.0, MIN_SHARED_UNITS * n_units))
    is_rare_V = np.ones(vocab)
    is_rare_V[shared_C] = 0.0
    rare_VE = csr_array(diags_array(is_rare_V) @ scaled_VE)
    rare_VE.eliminate_zeros()
    dtype = np.result_type(unit_residual_EV.dtype, unit_hidden_EH.dtype)
    return PreparedUnits(
        hidden_EH=unit_hidden_EH,
        shared_C=shared_C,
        shared_CE=np.ascontiguousarray(scaled_VE[shared_C].toarray(), dtype=dtype),
        rare_VE=rare_VE.astype(dtype),
    )


def pooled_relevance(hidden_NH: Floats, residual_NV: csr_array, units: PreparedUnits) -> Floats:
    r"""Predict how much each row of a block helps each unit, first order only.

    The hidden match is H = <h~_i, h~_e>, the residual match R = xi_i^T D xi_e, exact on sparse residuals.

    Args:
        hidden_NH: whitened row summaries.
        residual_NV: pooled sparse row residuals, not scaled.
        units: the units' side, from `prepare_units`.
    Returns:
        (N, E), unitless, in the precision of the inputs. Positive: training on the row should lower the unit's loss.
    Source: eq:grasp-components; eq:grasp-score, a = R sgn(H) log(1 + |H|). Deviation: none.
    Cost: O(N E H) and the entries that rows and units share; memory: one block of rows.
    """
    hidden_match_NE = np.asarray(hidden_NH @ units.hidden_EH.T)
    residual_match_NE = np.asarray((residual_NV @ units.rare_VE).toarray())
    if len(units.shared_C):
        residual_match_NE += residual_NV[:, units.shared_C] @ units.shared_CE
    return np.asarray(residual_match_NE * damp(hidden_match_NE))


class Pooled(Kernel):
    """The kernel of the paper, with moments of the summaries of the corpus."""

    name = "pooled"
    moment_types = (SummaryMoments,)
    is_linear = False  # the hidden match is damped

    def prepare(self, units: Batch) -> None:
        self._whitener = Whitener.from_settings(self.moments(SummaryMoments).value, self.settings)
        self._units = prepare_units(*self._whitened(units), self._whitener.precondition_V)

    def score(self, batch: Batch) -> Tensor:
        return torch.from_numpy(self._relevance(batch).astype(np.float32))

    def self_relevance(self, units: Batch) -> F64:
        """Return the relevance of each unit to itself, (E,); `units` are those of `prepare`."""
        return np.asarray(self._relevance(units), dtype=np.float64).diagonal().copy()

    def _relevance(self, batch: Batch) -> Floats:
        return pooled_relevance(*self._whitened(batch), self._units)

    def _whitened(self, batch: Batch) -> tuple[Floats, csr_array]:
        """Return the summaries of a batch: whitened hidden states, (B, H), and residuals, (B, V)."""
        return self._whitener.whiten(batch.summary.hidden_NH), batch.summary.residual_NV
