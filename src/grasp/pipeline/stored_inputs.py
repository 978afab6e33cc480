"""What an artifact stores of its inputs: the table of units, what the model computed for them, and leaks.

Start with `unit_table`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.manifest import UNITS
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import IDS_COLUMN
from grasp.kernels.kernel import CorpusMoments, Kernel, kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Reference
from grasp.pipeline.inputs import Inputs
from grasp.pipeline.leaks import find_leaks
from grasp.pipeline.model_pass import batch_arrays
from grasp.progress import Progress
from grasp.settings import FeatureSettings
from grasp.targets.units import unit_columns

MAX_TARGET_BYTES = 64 << 20  # of the arrays of a target in `unit_arrays`


def unit_arrays(inputs: Inputs, kernels: Sequence[Kernel], progress: Progress) -> dict[str, NDArray[Any]]:
    """Return the rows that contain questions of each target, and what the model computed for its units.

    The arrays are stored with the moments; both are of texts only. With what the model computed,
    `grasp.inspect.explain` need not run it on the units. Of gradients only the mean over a target is stored. A target
    with more than `MAX_TARGET_BYTES` is left out.
    """
    if not isinstance(inputs.model, ReferenceModel):
        return {}
    arrays: dict[str, NDArray[Any]] = {}
    all_units = inputs.unit_set.pool or inputs.unit_set.units
    for target, leaks in find_leaks(inputs.store, all_units, inputs.model.tokenizer.decode).items():
        progress.note(f"{target}: {leaks}")
        arrays |= leaks.arrays(target)
    target_E = np.array([unit.target for unit in inputs.unit_set.units])
    for target in inputs.unit_set.targets:
        columns_E = np.flatnonzero(target_E == target)  # a unit is a column of the relevance arrays
        target_arrays = batch_arrays(0, np.arange(len(columns_E)), inputs.units.select_rows(columns_E))
        for kernel in kernels:
            target_arrays |= kernel.unit_means(columns_E)
        if sum(array.nbytes for array in target_arrays.values()) <= MAX_TARGET_BYTES:
            arrays |= {f"{UNITS}{target}.{name}": array for name, array in target_arrays.items()}
    return arrays


def unit_table(inputs: Inputs) -> pa.Table:
    """Return the unit table: one row per unit, in the order of the columns of the relevance arrays."""
    units, unit_tokens = inputs.unit_set.units, inputs.unit_tokens
    # of all answers with loss, of which a build may read a part
    n_positions = [sum(len(answer.input_ids) - answer.first for answer in (unit, *unit.others)) for unit in unit_tokens]
    return pa.table(
        {
            "unit_id": [unit.unit_id for unit in units],
            "target": [unit.target for unit in units],
            "n_positions": pa.array(n_positions or [1] * len(units), pa.int32()),  # an image is one position
            "loss": pa.array(inputs.units.loss_B.float().cpu().numpy(), pa.float32()),
            "prompt": [unit.prompt for unit in units],
            "completion": [unit.completion for unit in units],
        }
        | unit_columns(units, unit_tokens)
        | (
            {IDS_COLUMN: pa.array([unit.input_ids for unit in unit_tokens], pa.list_(pa.int32()))}
            if unit_tokens
            else {}
        )
    )


def load_kernels(artifact: ArtifactReader, model: Reference, features: FeatureSettings) -> list[Kernel]:
    """Return the kernels of an artifact without its sketches, with the stored moments."""
    corpus = CorpusMoments(model.vocab_size)
    names = [name for name in features.kernels if not issubclass(kernel_class(name), Sketch)]
    kernels = make_kernels(names, model, features, corpus)
    corpus.load(artifact.moments)
    return kernels
