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


def hash_ids(*sides: Any) -> int:
    """Return a hash of the token ids of a row, or of both sides of a preference pair."""
    digest = xxhash.xxh3_64()
    for ids in sides:
        digest.update(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
        digest.update(b"end")
    return digest.intdigest()


@torch.no_grad()
def token_losses(inputs: Mapping[str, Any], outputs: Any) -> tuple[Tensor, Tensor | None]:
    """Return which tokens carry loss, (B, L), and the loss of each, (B, L), without another forward pass.

    Losses are those of TRL's fused head (`log_probs`), or are computed from logits, line by line. None: the outputs
    have neither. Without labels no token carries loss.
    """
    ids, labels = inputs["input_ids"], inputs.get("labels")
    has_loss = torch.zeros_like(ids, dtype=torch.bool)
    log_probs: Any = getattr(outputs, "log_probs", None)
    logits: Any = getattr(outputs, "logits", None)
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
    ids, has_loss = inputs["input_ids"].cpu().numpy(), has_loss_BL.cpu().numpy()
    losses = None if losses_BL is None else losses_BL.double().cpu().numpy()
    parts = []
    for b, place in _bounds(inputs, ids.shape):
        mask_L = has_loss[b, place] & (np.arange(place.stop - place.start) > 0)
        parts.append(Segment(ids[b, place], mask_L, None if losses is None else losses[b, place]))
    return parts


def _bounds(inputs: Mapping[str, Any], shape: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield the line and the place of each segment."""
    mask, positions = (
        array.cpu().numpy() if isinstance(array, Tensor) and array.shape == shape else None
        for array in (inputs.get("attention_mask"), inputs.get("position_ids"))
    )
    for b in range(shape[0]):
        present = np.arange(shape[1]) if mask is None else np.flatnonzero(mask[b])
        if len(present):
            ends = np.array([present[0], present[-1] + 1])
            if positions is not None:
                ends = np.insert(ends, 1, np.flatnonzero(positions[b, : ends[1]] == 0))
            yield from (
                (b, slice(start, stop)) for start, stop in pairwise(np.unique(ends).tolist()) if start >= present[0]
            )


@dataclass(frozen=True, slots=True)
class RowLabels:
    """Labels of the rows of a dataset, found by their token ids.

    Attributes:
        labels_of: the labels of a row, by hash.
        reference_of: difference of the reference's log-probabilities of a preference pair, by its hash.
        ambiguous: number of rows whose token ids occur before with other labels; the first ones count.
    """

    labels_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    reference_of: dict[int, float] = field(default_factory=dict)
    ambiguous: list[int] = field(default_factory=list)

    def add(self, key: int, labels: tuple[str, ...]) -> None:
        """Record the labels of a row by its hash."""
        if self.labels_of.setdefault(key, labels) != labels:
            self.ambiguous.append(key)

    def add_dataset(self, rows: Iterable[Mapping[str, Any]], labels: Iterable[tuple[str, ...]], collate: Any) -> None:
        """Record the rows of a dataset as the collator of the trainer returns them, in its order."""
        pairs = zip(rows, labels, strict=True)
        while block := list(islice(pairs, COLLATED_ROWS)):
            batch = collate([row for row, _ in block])
            parts = segments(batch)
            if len(parts) not in (len(block), 2 * len(block)):  # twice: chosen sides, then rejected ones
                raise SettingsError(f"label: the collator returns {len(parts)} sequences for {len(block)} rows")
            keys = [hash_ids(*(part.ids for part in parts[k :: len(block)])) for k in range(len(block))]
            for key, (_, row_labels) in zip(keys, block, strict=True):
                self.add(key, row_labels)
            if "ref_chosen_logps" in batch:
                differences = batch["ref_chosen_logps"] - batch["ref_rejected_logps"]
                self.reference_of.update(zip(keys, differences.tolist(), strict=True))

    def add_pieces(self, rows: Iterable[Any], labels: Iterable[tuple[str, ...]], length: int | None) -> None:
        """Record rows of token ids that are packed: cut to `length` tokens, or split into pieces of this length."""
        for ids, row_labels in zip(rows, labels, strict=True):
            for start in range(0, len(ids), length or len(ids) or 1):
                self.add(hash_ids(ids[start : start + length] if length else ids), row_labels)


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
