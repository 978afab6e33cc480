"""Find the segments of a training batch, their losses in the training's own forward pass, and their labels.

A segment is one row of the dataset. A batch has one per line, or several in a line without padding, which position ids
separate. The collator drops the label of a row, so a segment is recognised by a hash of its token ids (`RowLabels`).
This changes nothing that the model receives, and is independent of shuffling, padding and the order of packed rows.
Start with `segments`. Shape letters: B lines of a batch, L tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64, I64, Bool
from grasp.errors import SettingsError

IGNORED = -100  # label of a token without loss
COLLATED_ROWS = 64  # rows that the collator receives at a time


@dataclass(frozen=True, slots=True)
class Segment:
    """Token ids of one row in a batch, which of them carry loss, and their losses (None: unknown), each (L,)."""

    ids: I64
    has_loss: Bool
    losses: F64 | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens with loss."""
        return int(self.has_loss.sum())

    @property
    def loss(self) -> float:
        """Return the sum of the losses, NaN if they are unknown."""
        return float("nan") if self.losses is None else float(self.losses[self.has_loss].sum())


def hash_ids(ids: Any) -> int:
    """Return a hash of token ids."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype=np.int64).tobytes())


@torch.no_grad()
def token_losses(inputs: Mapping[str, Any], outputs: Any) -> tuple[Tensor, Tensor | None]:
    """Return which tokens carry loss, (B, L), and the loss of each, (B, L), without another forward pass.

    Losses are those of TRL's fused head (`log_probs`), or are computed from logits, line by line. None: the outputs
    have neither. Without labels no token carries loss.
    """
    ids, labels = inputs["input_ids"], inputs.get("labels")
    has_loss = torch.zeros_like(ids, dtype=torch.bool)
    log_probs, logits = getattr(outputs, "log_probs", None), getattr(outputs, "logits", None)
    if labels is not None:
        has_loss[:, 1:] = labels[:, 1:] != IGNORED  # the first token has no context
    if log_probs is None and logits is None:
        return has_loss, None
    losses = torch.zeros(ids.shape, device=ids.device)
    n_scored = ids.shape[1] - 1
    if log_probs is not None:  # prompt learning adds virtual tokens on the left
        losses[:, 1:] = -log_probs[:, -n_scored:].float()
    elif labels is not None:
        losses = losses.to(torch.promote_types(logits.dtype, torch.float32))
        for b, mask in enumerate(has_loss):
            scored = logits[b, -ids.shape[1] :][:-1][mask[1:]].to(losses.dtype)
            losses[b, mask] = F.cross_entropy(scored, labels[b, mask], reduction="none")
    return has_loss, losses


def segments(inputs: Mapping[str, Any], outputs: Any = None) -> list[Segment]:
    """Return the segments of a batch in order, without padding, on the CPU."""
    has_loss_BL, losses_BL = token_losses(inputs, outputs)
    arrays = [
        array if array is None else array.cpu().numpy() for array in (inputs["input_ids"], has_loss_BL, losses_BL)
    ]
    ids, has_loss, losses = arrays
    parts = []
    for b, (start, stop) in _bounds(inputs, ids.shape):
        losses_L = None if losses is None else losses[b, start:stop].astype(np.float64)
        mask_L = has_loss[b, start:stop] & (np.arange(stop - start) > 0)
        parts.append(Segment(ids[b, start:stop], mask_L, losses_L))
    return parts


def _bounds(inputs: Mapping[str, Any], shape: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield line, start and stop of each segment."""
    mask, positions = (
        array.cpu().numpy() if isinstance(array, Tensor) and array.shape == tuple(shape) else None
        for array in (inputs.get("attention_mask"), inputs.get("position_ids"))
    )
    for b in range(shape[0]):
        present = np.arange(shape[1]) if mask is None else np.flatnonzero(mask[b])
        if len(present):
            first, last = int(present[0]), int(present[-1]) + 1
            cuts = [] if positions is None else first + 1 + np.flatnonzero(positions[b, first + 1 : last] == 0)
            yield from ((b, bounds) for bounds in pairwise([first, *map(int, cuts), last]))


@dataclass(frozen=True, slots=True)
class RowLabels:
    """Labels of the rows of a dataset, found by their token ids.

    Attributes:
        labels_of: the labels of a row, by hash.
        reference_of: difference of the reference's log-probabilities of a preference pair, by hash of its chosen side.
        ambiguous: number of rows whose token ids occur before with other labels; the first ones count.
    """

    labels_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    reference_of: dict[int, float] = field(default_factory=dict)
    ambiguous: list[int] = field(default_factory=list)

    def add(self, ids: Any, labels: tuple[str, ...]) -> int:
        """Record the labels of token ids and return their hash."""
        key = hash_ids(ids)
        if self.labels_of.setdefault(key, labels) != labels:
            self.ambiguous.append(key)
        return key

    def add_dataset(self, rows: Iterable[Mapping[str, Any]], labels: Iterable[tuple[str, ...]], collate: Any) -> None:
        """Record the rows of a dataset as the collator of the trainer returns them, in its order."""
        pairs = zip(rows, labels, strict=True)
        while block := list(islice(pairs, COLLATED_ROWS)):
            batch_rows, batch_labels = zip(*block, strict=True)
            batch = collate(list(batch_rows))
            parts = segments(batch)
            if len(parts) not in (len(batch_rows), 2 * len(batch_rows)):  # twice: chosen sides, then rejected ones
                raise SettingsError(f"label: the collator returns {len(parts)} sequences for {len(batch_rows)} rows")
            references = batch.get("ref_chosen_logps"), batch.get("ref_rejected_logps")
            for k, (part, row_labels) in enumerate(zip(parts, batch_labels, strict=False)):
                key = self.add(part.ids, row_labels)
                if references[0] is not None and references[1] is not None:
                    self.reference_of[key] = float(references[0][k] - references[1][k])

    def add_pieces(self, rows: Iterable[Any], labels: Iterable[tuple[str, ...]], length: int) -> None:
        """Record rows of token ids that are packed: cut to `length` tokens, or split into pieces of this length."""
        for ids, row_labels in zip(rows, labels, strict=True):
            for start in range(0, len(ids), length):
                self.add(ids[start : start + length], row_labels)


def labels_of_rows(dataset: Any, names: Sequence[Any]) -> list[tuple[str, ...]]:
    """Return the labels of each row of a dataset.

    Args:
        dataset: a dataset of mappings with a length.
        names: for each label, a column or a function of a row.
    Raises:
        SettingsError: a column is missing, or has no value in some row.
    """
    columns = []
    for name in names:
        if callable(name):
            values = [name(row) for row in dataset]
        else:
            known = getattr(dataset, "column_names", None) or list(dataset[0])
            if name not in known:
                raise SettingsError(
                    f"label: the training dataset has no column {name!r}, got {', '.join(known)}; packing drops all "
                    "columns, so pass the dataset before it: Monitor(label, rows=dataset)"
                )
            values = list(dataset[name]) if hasattr(dataset, "column_names") else [row[name] for row in dataset]
        if (absent := next((k for k, value in enumerate(values) if value is None), None)) is not None:
            raise SettingsError(f"label: row {absent} has no {name!r}; expected a value in every row")
        columns.append(list(map(str, values)))
    return list(zip(*columns, strict=True))
