"""Rows and units on their way through the reference model: which go together, and the features of each batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from grasp.corpus.images import ImageShard
from grasp.corpus.store import RowShard
from grasp.features.extract import BatchFeatures, extract, extract_images
from grasp.models.causal_lm import ReferenceModel, batches, pad_rows
from grasp.models.classifier import ImageClassifier, Reference
from grasp.targets.units import UnitTokens

Rows = RowShard | ImageShard
Units = Sequence[UnitTokens] | ImageShard
Pass = tuple[NDArray[np.int64], BatchFeatures]


def row_passes(model: Reference, rows: Rows, specs: tuple[str, ...], top_k: int) -> Iterator[Pass]:
    """Batches of rows, each with the index of its rows and their features at the positions of `specs`."""
    if isinstance(rows, ImageShard):
        yield from _image_passes(model, rows, specs, top_k)
        return
    assert isinstance(model, ReferenceModel)
    for index in batches(np.diff(rows.offsets), model.batch_tokens):
        padded = pad_rows([rows.ids(int(i)) for i in index], [rows.mask(int(i)) for i in index])
        yield index, extract(model, *padded, specs, top_k)


def unit_passes(model: Reference, units: Units, specs: tuple[str, ...], top_k: int) -> Iterator[Pass]:
    """Batches of units, as those of rows; of a text only what carries loss is supervised."""
    if isinstance(units, ImageShard):
        yield from _image_passes(model, units, specs, top_k)
        return
    assert isinstance(model, ReferenceModel)
    length_E = np.fromiter((len(unit.input_ids) for unit in units), dtype=np.int64, count=len(units))
    for index in batches(length_E, model.batch_tokens):
        padded = pad_rows([units[e].input_ids for e in index], [units[e].first for e in index])
        yield index, extract(model, *padded, specs, top_k)


def _image_passes(model: Reference, images: ImageShard, specs: tuple[str, ...], top_k: int) -> Iterator[Pass]:
    assert isinstance(model, ImageClassifier)
    for start in range(0, len(images), model.batch_images):
        index = np.arange(start, min(start + model.batch_images, len(images)))
        pixels = model.pixels([images.encoded[i] for i in index])
        yield index, extract_images(model, pixels, torch.from_numpy(images.class_N[index]), len(specs), top_k)
