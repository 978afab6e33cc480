"""The gradient kernel in a build: second moments of rows, questions, and rows there and back.

A row goes through the model once: the hidden states of its forward pass are those that the other kernels read.
Shape letters: B rows of a batch, L tokens, K coordinates, E units.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.corpus.row_store import RowShard
from grasp.errors import ModelError
from grasp.kernels.gradient import SampledGradients, SquareSums
from grasp.models.causal_lm import pad_rows
from grasp.models.forward_pass import Pass, Reference, Rows, extract, position_mask
from grasp.models.sampled_gradients import Example
from grasp.progress import Advance, ignore
from grasp.settings import FeatureSettings

Found = TypeVar("Found")


def examples_of(rows: Rows, settings: FeatureSettings) -> list[Example]:
    """Rows with the tokens that carry loss at the positions of the other kernels."""
    assert isinstance(rows, RowShard)
    found = []
    for i in range(len(rows)):
        ids, mask = rows.ids(i), rows.mask(i)
        labelled = np.ones(len(ids), dtype=np.bool_) if mask is None else mask.copy()
        labelled[0] = False
        if settings.token_positions != "all":
            used_1L = position_mask(settings.token_positions, torch.from_numpy(labelled)[None])
            labelled[1:] = used_1L[0, :-1].numpy()
        found.append(Example(ids, labelled=labelled))
    return found


def backward_passes(
    gradients: SampledGradients, rows: Rows, specs: tuple[str, ...], settings: FeatureSettings
) -> Iterator[tuple[Pass, Tensor]]:
    """Batches of rows there and back: features for the other kernels, and the coordinates taken, (B, K), of the
    gradient of each row's whole loss.
    """
    for part, examples, (taken_BK, hidden_BLH) in _there_and_back(gradients, rows, settings):
        padded = pad_rows([one.input_ids for one in examples], [rows.mask(int(i)) for i in part])  # type: ignore[union-attr]
        batch = extract(gradients.engine.model, *padded, specs, settings.top_k, hidden_BLH)
        yield (part, batch), taken_BK * taken_BK.new_tensor([one.labels for one in examples])[:, None]


def square_sums(model: Reference, rows: Rows, settings: FeatureSettings, *, advance: Advance = ignore) -> SquareSums:
    """Sums of squares of the coordinates over rows whose gradient is finite."""
    gradients = SampledGradients.choose(model, settings)
    sums = SquareSums(gradients.sample.size)
    for part, _, (taken_BK, _) in _there_and_back(gradients, rows, settings):
        sums.add(taken_BK[taken_BK.isfinite().all(dim=1)])
        advance(len(part), rows.tokens_of(part))
    return sums


def _there_and_back(
    gradients: SampledGradients, rows: Rows, settings: FeatureSettings
) -> Iterator[tuple[NDArray[np.int64], list[Example], tuple[Tensor, Tensor]]]:
    """A few rows at a time, alike in length: which they are, and what `SampledGradients.compute` gives."""
    examples = examples_of(rows, settings)
    for index in gradients.batches(examples):
        for part, found in halved(index, lambda some: gradients.compute([examples[int(i)] for i in some])):
            yield part, [examples[int(i)] for i in part], found


def halved(
    index: NDArray[np.int64], run: Callable[[NDArray[np.int64]], Found]
) -> Iterator[tuple[NDArray[np.int64], Found]]:
    """Run a batch; where a GPU has no room for it, its halves."""
    try:
        found = run(index)
    except torch.cuda.OutOfMemoryError as err:
        if len(index) == 1:
            raise ModelError(
                "the GPU has no memory for a backward pass over one row; use --dtype bfloat16, a smaller "
                "--max-length, or --match forward"
            ) from err
    else:
        yield index, found
        return
    torch.cuda.empty_cache()  # only here: the error holds what the batch had computed
    for half in np.array_split(index, 2):
        yield from halved(half, run)
