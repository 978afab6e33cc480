"""The gradient kernel in a build: layers that it takes, second moments of rows, questions, and rows there and back.

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
from torch import Tensor, nn

from grasp.corpus.store import RowShard
from grasp.errors import ModelError, SettingsError
from grasp.extract.passes import Rows
from grasp.extract.progress import Advance, ignore
from grasp.features.extract import Pass, Reference, extract, position_mask, supervised_positions
from grasp.features.gradient_match import (
    F64,
    CoordinateSample,
    GradientTargets,
    SampledGradients,
    SquareSums,
    example_batches,
    gradient_relevance,
    preconditioner,
    prepare_gradients,
)
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.gradients.layers import UntakenLayerError, choose_layers
from grasp.models.gradients.per_example import Example, PerExample
from grasp.settings import FeatureSettings

COORDINATES = 2_000_000  # of 106 million of SmolLM2-135M give what all give, to .02 of LDS
CPU_SHARE, GPU_SHARE = 8, 2  # of the tokens of a forward batch; a backward pass holds what every layer received
MEGABYTE = 1 << 20
KEPT_ROWS = 16  # of which coordinates are widened at once
PART_ROWS = 64  # of the moments: what a kill can cost


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class GradientReader:
    """The model made ready to give gradients of the coordinates that are taken."""

    gradients: SampledGradients
    batch_tokens: int
    untaken: tuple[str, ...]  # layers of the body that have no gradient a row

    @classmethod
    def of(cls, model: Reference, settings: FeatureSettings) -> Self:
        """Choose layers and coordinates; two short rows go through the model.

        Raises:
            ModelError: no layer of the body can be taken; the model is a classifier.
            SettingsError: more coordinates than there are.
        """
        if not isinstance(model, ReferenceModel):
            raise ModelError("features.gradient_match: got true, but the model is a classifier; expected a causal LM")
        engine, untaken = _engine(model)
        wanted, there = settings.gradient_coordinates, engine.layers.size
        if isinstance(wanted, int) and wanted > there:
            raise SettingsError(f"features.gradient_coordinates: got {wanted:,}, its layers have {there:,}; say all")
        some = there if model.frozen else COORDINATES  # an adapter is small, and all that is trained
        count = min(some if wanted is None else there if wanted == "all" else wanted, there)
        sample = CoordinateSample.draw(engine.layers, count, settings.seed, model.device)
        share = CPU_SHARE if model.device.type == "cpu" else GPU_SHARE
        return cls(SampledGradients(engine, sample), max(1, model.batch_tokens // share), untaken)

    def describe(self) -> str:
        """One line: how much of the model is looked at."""
        layers, size = self.gradients.engine.layers, self.gradients.sample.size
        frozen = ", frozen ones left out" * bool(self.gradients.engine.model.frozen)
        named = f"; no gradient for each row, so left out: {', '.join(self.untaken[:3])} ({len(self.untaken)} in all)"
        taken = f"gradients of {size:,} among {layers.size:,} parameters of {len(layers.blocks)} layers{frozen}"
        return taken + named * bool(self.untaken)


def matrices_and_norms(model: ReferenceModel) -> tuple[str, ...]:
    """Patterns of what is taken: all but embeddings, head and what is frozen.

    They are large, and token and input look at them. Of a small model they hold most of what there is to see.
    """
    tables = [name for name, module in model.model.named_modules() if isinstance(module, nn.Embedding)]
    return "body", *(f"!{name}" for name in (*tables, *model.frozen))


def _engine(model: ReferenceModel) -> tuple[PerExample, tuple[str, ...]]:
    """The body without what is frozen, and without layers that have no gradient a row, which are found one by one."""
    untaken: list[str] = []
    while True:
        try:
            layers = choose_layers(model, (*matrices_and_norms(model), *(f"!{name}" for name in untaken)))
            return PerExample(model, layers), tuple(untaken)
        except UntakenLayerError as err:
            if err.layer in untaken:
                raise
            untaken.append(err.layer)
        except SettingsError as err:
            named = ", ".join(untaken[:3])
            raise ModelError(
                f"{type(model.model).__name__}: no layer has a gradient for each row ({named}); say --match forward"
            ) from err


def examples_of(rows: Rows, settings: FeatureSettings) -> list[Example]:
    """Rows with the tokens that carry loss at the positions of the other kernels."""
    assert isinstance(rows, RowShard)
    found = []
    for i in range(len(rows)):
        ids, mask = rows.ids(i), rows.mask(i)
        labelled = np.ones(len(ids), dtype=np.bool_) if mask is None else mask.copy()
        labelled[0] = False
        if settings.token_positions != "all":
            used_1L = position_mask(settings.token_positions, supervised_positions(torch.from_numpy(labelled)[None]))
            labelled[1:] = used_1L[0, :-1].numpy()
        found.append(Example(ids, labelled=labelled))
    return found


@dataclass(frozen=True, slots=True)
class GradientKernel:
    """The kernel, ready to be applied to rows."""

    reader: GradientReader
    targets: GradientTargets

    @classmethod
    def prepare(cls, model: Reference, units: Sequence[Example], square_K: F64, settings: FeatureSettings) -> Self:
        """Fold the rows' second moments into the units' gradients.

        Raises:
            ModelError: moments of another sample of coordinates.
        """
        reader = GradientReader.of(model, settings)
        sample = reader.gradients.sample
        if len(square_K) != sample.size:
            raise ModelError(
                f"gradients: second moments of {len(square_K):,} coordinates, this model has {sample.size:,} in its "
                "sample; build again"
            )
        factor_K = preconditioner(square_K, sample.weight_K.double().cpu().numpy(), settings.gradient_damping)
        place = _room(len(units), reader, settings.gradient_memory_mb)
        return cls(reader, prepare_gradients(reader.gradients, units, factor_K, reader.batch_tokens, place))

    def relevance(self, taken_BK: Tensor) -> NDArray[np.float32]:
        """Of B rows to all units, (B, E)."""
        return np.asarray(gradient_relevance(self.targets, taken_BK).float().cpu().numpy())

    def kept_relevance(self, gradients_NK: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Of rows whose coordinates were kept, as bits of bfloat16; some rows at a time."""
        device = self.reader.gradients.engine.model.device
        parts = (
            torch.from_numpy(gradients_NK[start : start + KEPT_ROWS])
            for start in range(0, len(gradients_NK), KEPT_ROWS)
        )
        return np.concatenate([self.relevance(part.view(torch.bfloat16).to(device).float()) for part in parts])

    def passes(self, rows: Rows, specs: tuple[str, ...], settings: FeatureSettings) -> Iterator[tuple[Pass, Tensor]]:
        """Batches of rows there and back: features for the other kernels, and the coordinates taken, (B, K), of the
        gradient of each row's whole loss.
        """
        examples = examples_of(rows, settings)
        model = self.reader.gradients.engine.model
        for index in example_batches(examples, self.reader.batch_tokens):
            for part, (taken_BK, hidden_BLH) in halved(index, lambda some: self._run(examples, some)):
                own = [examples[int(i)] for i in part]
                padded = pad_rows([one.input_ids for one in own], [rows.mask(int(i)) for i in part])  # type: ignore[union-attr]
                batch = extract(model, *padded, specs, settings.top_k, hidden_BLH)
                yield (part, batch), taken_BK * taken_BK.new_tensor([one.labels for one in own])[:, None]

    def _run(self, examples: Sequence[Example], index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self.reader.gradients.of([examples[int(i)] for i in index])


def square_sums(
    model: Reference,
    rows: Rows,
    settings: FeatureSettings,
    advance: Advance = ignore,
    reader: GradientReader | None = None,
) -> SquareSums:
    """Sums of squares of the coordinates over rows whose gradient is finite."""
    reader = reader or GradientReader.of(model, settings)
    examples, sums = examples_of(rows, settings), SquareSums(reader.gradients.sample.size)
    for index in example_batches(examples, reader.batch_tokens):
        for part, taken_BK in halved(index, lambda some: reader.gradients.of([examples[int(i)] for i in some])[0]):
            sums.add(taken_BK[taken_BK.isfinite().all(dim=1)])
            advance(len(part), rows.tokens_of(part))
    return sums


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


def _room(n_units: int, reader: GradientReader, memory_mb: int) -> Tensor:
    """Where the units' side goes: memory, or a file that is mapped into it and gone when the process ends."""
    gradients = reader.gradients
    shape, dtype = (n_units, gradients.sample.size), gradients.side_dtype
    size = n_units * gradients.sample.size * dtype.itemsize
    if size <= memory_mb * MEGABYTE:
        return torch.empty(shape, dtype=dtype, device=gradients.engine.model.device)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise SettingsError(
            f"features.gradient_coordinates: {n_units:,} units at {gradients.sample.size:,} coordinates need "
            f"{size / 2**30:.1f} GiB, {tempfile.gettempdir()} has {free / 2**30:.1f} free; take fewer coordinates or "
            "units, or name another place by TMPDIR"
        )
    handle, name = tempfile.mkstemp(prefix="grasp-gradients-")
    try:
        return torch.from_file(name, shared=True, size=n_units * gradients.sample.size, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)  # the mapping keeps it
