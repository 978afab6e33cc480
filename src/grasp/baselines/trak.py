r"""TRAK: the Newton step of a linearised model in a random projection, over an ensemble of checkpoints.

    a_{i,e} = mean_c [ phi_e^c^T (Phi^c^T Phi^c + lambda I)^{-1} phi_i^c ] * mean_c [ 1 - p_i^c ]

with phi the projected gradient of the model's output (for a language model, the mean over a sequence's labels of
log(p / (1 - p)), with p the probability of the label), Phi the matrix of these gradients of all rows, (N, K), and c the
checkpoint. The factor 1 - p of a row is small if the model already predicts the row; the code calls it doubt.

Start with `Trak`; `newton_map` is the linear algebra.

Shape letters: N rows, n of a block, E units, K projected width, C checkpoints.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import ProjectedSettings
from grasp.baselines.gradients.scorers import checkpoint_note, projection_note
from grasp.baselines.gradients.session import mean_row_tokens, select_checkpoints
from grasp.baselines.gradients.store import FeatureSpec, FeatureStore, ready_seconds
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError, SettingsError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.gradients import LayerSet

# Size of a zero eigenvalue after rounding of float32 features, relative to the largest eigenvalue.
ZERO_EIGENVALUE = 1e-12
MAX_WIDTH = 8192  # of the matrix that is inverted: 512 MB


class TrakSettings(ProjectedSettings):
    """TRAK as in the GRASP paper, with the layers, checkpoints and projection of tracin."""

    ridge: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="lambda in units of the mean diagonal of Phi^T Phi; 0: none, as in the original.",
    )
    output: Literal["margin", "loss"] = Field(
        "margin", description="Model output that is differentiated: margin: log(p / (1 - p)), as in TRAK; loss: -log p."
    )
    weigh_doubt: bool = Field(True, description="Multiply by 1 - p of the row, as in TRAK.")


class Trak(BlockMethod[TrakSettings]):
    """A Newton step in a random projection, over an ensemble of checkpoints.

    Newton step of the model linearised at each checkpoint, in a random projection.

    Source: Park et al. 2023 (arXiv 2303.14186), equations 12 to 17.
    As published: one label per example; all parameters, projected to thousands of numbers; an ensemble of models, each
    trained on a random half of the corpus.
    Deviation: output and 1 - p are means over a sequence's labels; layers, width and checkpoints of one training are
    those of the GRASP paper. Large layers are projected in two steps.
    """

    settings_type = TrakSettings
    requires = frozenset({"tokens", "model", "checkpoints"})

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        layers = choose_layers(inputs.model, self.settings.layers)
        width = self._check_width(inputs, layers)
        checkpoints = select_checkpoints(inputs, self.settings.checkpoints)
        members = [self._member(inputs, work, checkpoint, width) for checkpoint in checkpoints]

        def score(start: int, stop: int) -> Scores:
            """Multiply two means over checkpoints: of the scores, and of the rows' factors 1 - p."""
            scores_NE, doubt_N = np.zeros((stop - start, inputs.n_units)), np.zeros(stop - start)
            for store, map_KE in members:
                row_NK, member_doubt_N = store.rows(start, stop)
                scores_NE += np.asarray(row_NK, dtype=np.float64) @ map_KE
                doubt_N += member_doubt_N
            scores_NE /= len(members)
            return scores_NE * (doubt_N / len(members))[:, None] if self.settings.weigh_doubt else scores_NE

        account = self._account(inputs, layers, width, checkpoints)
        return RowScorer(score, replace(account, ready=ready_seconds(work)))

    def _member(
        self, inputs: MethodInputs, work: WorkArea, checkpoint: Checkpoint, width: int
    ) -> tuple[FeatureStore, F64]:
        """Compute the features at one checkpoint, and the matrix that maps a row's features to scores, (K, E)."""
        settings = self.settings
        spec = FeatureSpec(settings.layers, settings.dimension, settings.projection, self.seed, settings.output)
        store = FeatureStore(inputs, work, checkpoint, spec)
        gram_KK = np.zeros((width, width))
        name = checkpoint.path.name if checkpoint.step is None else f"step {checkpoint.step}"
        inputs.progress.stage(f"gradients at {name}", rows=inputs.n_rows, tokens=None)
        for start, stop in inputs.blocks():
            row_NK = np.asarray(store.rows(start, stop)[0], dtype=np.float64)
            gram_KK += row_NK.T @ row_NK
            inputs.progress.advance(stop - start, 0)
        map_KE = newton_map(gram_KK, np.asarray(store.units(), dtype=np.float64), settings.ridge, str(checkpoint.path))
        store.close()
        return store, map_KE

    def _check_width(self, inputs: MethodInputs, layers: LayerSet) -> int:
        width = self.settings.dimension or layers.size
        if width > MAX_WIDTH:
            raise SettingsError(
                f"trak.dimension: got {width} features per row, expected at most {MAX_WIDTH}, since a matrix of that "
                "width is inverted; set a dimension, or fewer layers"
            )
        if width > inputs.n_rows and not self.settings.ridge:
            raise SettingsError(
                f"trak.dimension: got {width} for {inputs.n_rows} rows: Phi^T Phi is singular, so the scores are "
                "undefined; set trak.ridge above 0, e.g. 1e-3, or a smaller dimension"
            )
        return width

    def _account(
        self, inputs: MethodInputs, layers: LayerSet, width: int, checkpoints: tuple[Checkpoint, ...]
    ) -> Account:
        settings = self.settings
        form_note = "whole gradients, not projected"
        if settings.dimension is not None:
            form_note = projection_note(layers.blocks, settings.dimension, settings.projection, mean_row_tokens(inputs))
        ridge = f"lambda {settings.ridge:g} of the mean diagonal" if settings.ridge else "lambda 0"
        return Account(
            features=width * len(checkpoints),
            covers=(describe_layers(layers),),
            notes=(
                form_note,
                checkpoint_note(checkpoints),
                ridge,
            ),
        )


def newton_map(gram_KK: F64, unit_EK: F64, ridge: float, location: str) -> F64:
    """Return (Phi^T Phi + lambda I)^{-1} phi_e^T, (K, E), by eigendecomposition in float64.

    Raises:
        ModelError: Phi^T Phi + lambda I is singular: fewer than K independent gradients, and lambda lost in rounding.
    """
    width = len(gram_KK)
    shift = ridge * float(np.trace(gram_KK)) / width
    values, vectors = np.linalg.eigh(gram_KK)
    # Eigenvalues ascend. `not >` instead of `<=`: a NaN compares false, and must be refused.
    if not values[0] + shift > ZERO_EIGENVALUE * values[-1]:
        matrix_name = "Phi^T Phi + lambda I" if shift else "Phi^T Phi"
        raise ModelError(
            f"{location}: {matrix_name} is singular: its eigenvalues range from {values[0] + shift:.3g} to "
            f"{values[-1] + shift:.3g}; set a {'larger ' if shift else ''}trak.ridge, e.g. 1e-3, more layers, or a "
            "smaller dimension"
        )
    return np.asarray(vectors @ ((vectors.T @ unit_EK.T) / (np.maximum(values, 0.0) + shift)[:, None]))
