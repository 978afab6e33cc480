"""The gradient kernel in a build: second moments of rows, questions, and rows there and back.

A row goes through the model once: the hidden states of its forward pass are those that the other kernels read.
Shape letters: B rows of a batch, L tokens, K coordinates, E units.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F64
from grasp.corpus.store import RowShard
from grasp.errors import ModelError, SettingsError
from grasp.extract.progress import Advance, ignore
from grasp.features.extract import Pass, Reference, Rows, extract, position_mask
from grasp.features.gradient_match import SampledGradients, SquareSums, gradient_preconditioner
from grasp.models.causal_lm import pad_rows
from grasp.models.gradients import Example
from grasp.settings import FeatureSettings

MEGABYTE = 1 << 20
CHUNK = 1 << 17  # coordinates that are multiplied at once, of units' sides that are widened as they are used
KEPT_ROWS = 16  # of which coordinates are widened at once


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


@dataclass(frozen=True, slots=True)
class GradientKernel:
    """The kernel with the units' side of it, ready to be applied to rows."""

    gradients: SampledGradients
    side_EK: Tensor  # preconditioned coordinates of each unit's gradient, rounded to bfloat16
    own_E: F64  # relevance of each unit to itself

    @classmethod
    def prepare(cls, model: Reference, units: Sequence[Example], square_K: F64, settings: FeatureSettings) -> Self:
        """Run the model over the units, there and back, and fold the rows' second moments into their gradients.

        bfloat16 keeps 8 digits (binary) of each of some 10^6 terms whose errors are independent: the sum is off by
        less than 2^-8 of the root of its terms' squares, far under what another sample of coordinates moves.

        Raises:
            ModelError: moments of another sample of coordinates.
            SettingsError: no room for the units' side, in memory or in a file.
        """
        gradients = SampledGradients.choose(model, settings)
        engine, sample = gradients.engine, gradients.sample
        if len(square_K) != sample.size:
            raise ModelError(
                f"gradients: second moments of {len(square_K):,} coordinates, this model has {sample.size:,} in its "
                "sample; build again"
            )
        precondition_K = gradient_preconditioner(
            square_K, sample.weight_K.double().cpu().numpy(), settings.gradient_damping
        )
        factor_K = torch.from_numpy(precondition_K).to(engine.model.device, engine.work)
        side_EK, own_E = _room(len(units), gradients, settings.gradient_memory_mb), np.zeros(len(units))
        for index_B in gradients.batches(units):
            taken_BK, _ = gradients.compute([units[int(e)] for e in index_B])
            side_BK = taken_BK * factor_K
            own_E[index_B] = (taken_BK.double() * side_BK.double()).sum(dim=1).cpu().numpy()
            rounded_BK = side_BK if engine.work == torch.float64 else side_BK.bfloat16()
            side_EK[torch.from_numpy(index_B).to(side_EK.device)] = rounded_BK.to(side_EK.device, side_EK.dtype)
        return cls(gradients, side_EK, own_E)

    def relevance(self, taken_BK: Tensor) -> NDArray[np.float32]:
        """Of B rows to all units, (B, E). A row whose gradient is not finite gets 0 for every unit."""
        product_BE = taken_BK.new_zeros(len(taken_BK), len(self.side_EK))
        for start in range(0, taken_BK.shape[1], CHUNK):
            some = slice(start, start + CHUNK)
            product_BE += taken_BK[:, some] @ self.side_EK[:, some].to(taken_BK.device, taken_BK.dtype).T
        finite_B1 = product_BE.isfinite().all(dim=1, keepdim=True)
        return np.asarray(torch.where(finite_B1, product_BE, 0.0).float().cpu().numpy())

    def kept_relevance(self, gradients_NK: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Of rows whose coordinates were kept, as bits of bfloat16; some rows at a time."""
        device = self.gradients.engine.model.device
        parts = (
            torch.from_numpy(gradients_NK[start : start + KEPT_ROWS])
            for start in range(0, len(gradients_NK), KEPT_ROWS)
        )
        return np.concatenate([self.relevance(part.view(torch.bfloat16).to(device).float()) for part in parts])

    def passes(self, rows: Rows, specs: tuple[str, ...], settings: FeatureSettings) -> Iterator[tuple[Pass, Tensor]]:
        """Batches of rows there and back: features for the other kernels, and the coordinates taken, (B, K), of the
        gradient of each row's whole loss.
        """
        for part, examples, (taken_BK, hidden_BLH) in _there_and_back(self.gradients, rows, settings):
            padded = pad_rows([one.input_ids for one in examples], [rows.mask(int(i)) for i in part])  # type: ignore[union-attr]
            batch = extract(self.gradients.engine.model, *padded, specs, settings.top_k, hidden_BLH)
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
    """Run a batch; where a GPU has no room for it, its halves.

    Raises:
        ModelError: there is no room for a single row.
    """
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


def _room(n_units: int, gradients: SampledGradients, memory_mb: int) -> Tensor:
    """Where the units' side goes: memory, or a file that is mapped into it and gone when the process ends.

    In memory it is as wide as the rows' side, if there is room for that: then nothing is widened batch by batch.
    """
    shape, work = (n_units, gradients.sample.size), gradients.engine.work
    narrow, device = work if work == torch.float64 else torch.bfloat16, gradients.engine.model.device
    count = n_units * gradients.sample.size
    for dtype in (work, narrow) if device.type == "cpu" else (narrow,):
        if count * dtype.itemsize <= memory_mb * MEGABYTE:
            return torch.empty(shape, dtype=dtype, device=device)
    size, free = count * narrow.itemsize, shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise SettingsError(
            f"features.gradient_coordinates: {n_units:,} units at {gradients.sample.size:,} coordinates need "
            f"{size / 2**30:.1f} GiB, {tempfile.gettempdir()} has {free / 2**30:.1f} free; take fewer coordinates or "
            "units, or name another place by TMPDIR"
        )
    handle, name = tempfile.mkstemp(prefix="grasp-gradients-")
    try:
        return torch.from_file(name, shared=True, size=count, dtype=narrow).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)  # the mapping keeps it
