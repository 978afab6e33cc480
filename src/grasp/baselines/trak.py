r"""TRAK: the Newton step of a linearised model in a random projection, over an ensemble of checkpoints.

    a_{i,e} = mean_c [ phi_e^c^T (Phi^c^T Phi^c + lambda I)^{-1} phi_i^c ] * mean_c [ 1 - p_i^c ]

with phi the projected gradient of the model's output (for a language model, the mean over a sequence's labels of
log(p / (1 - p)), with p the probability of the label), Phi the matrix of these gradients of all rows, (N, K), and c the
checkpoint. The factor 1 - p of a row is small if the model already predicts the row; the code calls it doubt.

Start with `Trak`; `newton_map` is the linear algebra.

Shape letters: N rows, n of a block, E units, K projected width, C checkpoints.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load_file

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers, describe_layers
from grasp.baselines.gradients.method_settings import ProjectedSettings
from grasp.baselines.gradients.scorers import (
    checkpoint_note,
    examples_at,
    mean_row_tokens,
    open_engine,
    projection_note,
    select_checkpoints,
    unit_examples,
)
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.errors import ModelError, SettingsError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.gradients import Example

# Size of a zero eigenvalue after rounding of float32 features, relative to the largest eigenvalue.
ZERO_EIGENVALUE = 1e-12
ROWS_FILE = "rows-{}-{}.safetensors"  # features of a block of rows: number of the checkpoint, first row
MAX_WIDTH = 8192  # of the matrix that is inverted: 512 MB


class TrakSettings(ProjectedSettings):
    """TRAK as in the GRASP paper, with the layers, checkpoints and projection of tracin."""

    ridge: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="lambda in units of the mean diagonal of Phi^T Phi; 0: none, as in the original.",
    )


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

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        settings, checkpoints = self.settings, select_checkpoints(inputs, self.settings.checkpoints)
        layers = choose_layers(inputs.model, settings.layers)
        width = settings.dimension or layers.size
        if width > MAX_WIDTH:
            raise SettingsError(
                f"trak.dimension: got {width} features per row, expected at most {MAX_WIDTH}, since a matrix of that "
                "width is inverted; set a dimension, or fewer layers"
            )
        if width > inputs.n_rows and not settings.ridge:
            raise SettingsError(
                f"trak.dimension: got {width} for {inputs.n_rows} rows: Phi^T Phi is singular, so the scores are "
                "undefined; set trak.ridge above 0, e.g. 1e-3, or a smaller dimension"
            )
        members = [self._map(inputs, work, c, checkpoint, width) for c, checkpoint in enumerate(checkpoints)]

        def score(start: int, stop: int) -> Scores:
            """Multiply two means over checkpoints: of the scores, and of the rows' factors 1 - p."""
            scores_NE, doubt_N = np.zeros((stop - start, inputs.n_units)), np.zeros(stop - start)
            for c, map_KE in enumerate(members):
                row = load_file(work / ROWS_FILE.format(c, start))
                scores_NE += row["features"].astype(np.float64) @ map_KE
                doubt_N += row["doubt"]
            return scores_NE / len(members) * (doubt_N / len(members))[:, None]

        form_note = "whole gradients, not projected"
        if settings.dimension is not None:
            form_note = projection_note(layers.blocks, settings.dimension, mean_row_tokens(inputs))
        ridge = f"lambda {settings.ridge:g} of the mean diagonal" if settings.ridge else "lambda 0"
        notes = (form_note, checkpoint_note(checkpoints), ridge)
        return RowScorer(score, Account(width * len(checkpoints), (describe_layers(layers),), notes))

    def _map(self, inputs: MethodInputs, work: Path, number: int, checkpoint: Checkpoint, width: int) -> F64:
        """Return the matrix that maps a row's features at a checkpoint to scores, (K, E); save the rows' features."""
        settings = self.settings

        @cache
        def featurizer() -> Featurizer:
            engine = open_engine(inputs, checkpoint, settings.layers)
            if settings.dimension is None:
                return Featurizer(engine, None)
            tokens = mean_row_tokens(inputs)
            return Featurizer.with_projection(engine, settings.dimension, seed=self.seed, tokens=tokens)

        def features(path: Path, examples: Callable[[], list[Example]]) -> F64:
            def compute() -> dict[str, NDArray[Any]]:
                return dict(zip(("features", "doubt"), featurizer().features(examples(), "margin"), strict=True))

            return cached(path, compute)["features"].astype(np.float64)

        inputs.progress.stage(f"gradients at {checkpoint.name}", rows=inputs.n_rows, tokens=None)
        gram_KK = np.zeros((width, width))
        for start, stop in inputs.blocks():
            row_NK = features(work / ROWS_FILE.format(number, start), partial(examples_at, inputs, range(start, stop)))
            gram_KK += row_NK.T @ row_NK
            inputs.progress.advance(stop - start, 0)
        unit_EK = features(work / f"units-{number}.safetensors", partial(unit_examples, inputs))
        return newton_map(gram_KK, unit_EK, settings.ridge, str(checkpoint.path))


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
