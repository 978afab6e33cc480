"""Text scorers: the output of `grasp distil`, stored as a directory, and how they score texts.

Start with `Scorer.open` and `Scorer.score`. `card.json` describes a scorer and its accuracy, `weights.safetensors` has
its tables. Scorers are untrusted input: sizes are checked before anything is read, nothing is executed, and all numbers
must be finite.

Shape letters: N texts, K n-gram lengths, V hash buckets per length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from grasp.arrays import F32, Bool
from grasp.distil.ngrams import LENGTHS, SLOTS, as_bytes, mean_over
from grasp.errors import ArtifactError
from grasp.files import UNSIGNED, FileEntry, kind_of
from grasp.store.contents import read_tensors, tensor_bytes
from grasp.store.directory import write_at_once
from grasp.store.records import JsonModel, Signed
from grasp.store.remote import open_store
from grasp.text import plain

CARD = "card.json"
WEIGHTS = "weights.safetensors"
FORMAT = "grasp-scorer"
FORMAT_VERSION = 1
MAX_WEIGHT = 1e9  # largest magnitude of a weight or of the intercept
MAX_FIRST_BYTES = 1 << 30  # limit of `binary_slice` of Arrow
SCORE, UNFAMILIAR = "score", "unfamiliar"
UNFAMILIAR_SHARE = 0.01  # share of held-out rows that count as unfamiliar
SHAPES = {"tables": (len(LENGTHS), SLOTS), "rarity": (SLOTS,)}


class Quality(JsonModel):
    """Accuracy on held-out rows, with 95 % bootstrap intervals over documents: value, low, high."""

    rows: int
    spearman: tuple[float, float, float] = Field(description="Rank correlation of scores with relevance.")
    recall: tuple[float, float, float] = Field(
        description="Share of the 10 % most relevant rows that are in the top 10 % by score."
    )
    gain: tuple[float, float, float] = Field(
        description="Mean relevance of the top 20 % by score, relative to the 20 % most relevant rows."
    )


class Card(JsonModel):
    """Metadata of a scorer."""

    format: Literal["grasp-scorer"] = "grasp-scorer"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Checksum of this file with this field set to zeros.")
    target: str
    scored_by: str = Field(description="Description of the scoring rule it was fitted to.")
    made_by: dict[str, str]
    fingerprints: dict[str, str] = Field(description="Fingerprints of the training artifact.")
    rows: int = Field(ge=1, description="Number of training rows.")
    penalty: float = Field(description="Ridge penalty, chosen on held-out rows.")
    intercept: float = Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)
    first_bytes: int | None = Field(
        None, ge=1, le=MAX_FIRST_BYTES, description="Length of the prefix of a document that is scored. None: no limit."
    )
    rarest: float = Field(description="Rarity threshold of unfamiliar documents; 1 % of held-out rows exceed it.")
    quality: Quality
    weights: FileEntry

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return self.model_dump(mode="json")

    def __str__(self) -> str:
        quality = self.quality
        lines = [
            f"scorer for {self.target}, fitted to {self.rows:,} rows: {self.scored_by}",
            f"accuracy on {quality.rows:,} rows, cross-validated by document (95 % intervals):",
            f"  Spearman correlation with relevance {with_interval(quality.spearman, '.2f')}",
            f"  recall of the top 10 % {with_interval(quality.recall, '.0%')}",
            f"  mean relevance of the top 20 % {with_interval(quality.gain, '.0%')} of the maximum",
        ]
        if self.first_bytes is not None:
            lines.append(f"scores the first {self.first_bytes:,} bytes of a document (the build used its first rows)")
        return "\n".join(plain(line) if not line.startswith(" ") else f"  {plain(line)}" for line in lines)


RECOVERY_HINT = "restore a copy, or distil again"
SIGNED_CARD = Signed(
    CARD,
    Card,
    "the card of a scorer",
    FORMAT,
    FORMAT_VERSION,
    "distil again",
    files=lambda card: {WEIGHTS: card.weights},
    missing_message=f"is not a scorer (no {CARD}); create one with `grasp distil`",
)


def with_interval(value: tuple[float, float, float], number_format: str) -> str:
    """Format a number with its interval."""
    number, low, high = (format(part, number_format) for part in value)
    return f"{number} ({low} to {high})"


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores texts by the predicted benefit of training on them for a target.

    Scores are in standard deviations of relevance; 0 is the mean over the training rows.

    Attributes:
        card: metadata and accuracy.
        tables_KV: value of every n-gram, by its length and hash bucket.
        rarity_V: negative log frequency of the n-grams of 4 bytes in the training rows.
    """

    card: Card
    tables_KV: F32
    rarity_V: F32

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a scorer.

        Raises:
            ArtifactError: there is no scorer, it is damaged, or of an unsupported version.
        """
        card, files = open_store(path, SIGNED_CARD)
        if card.weights.bytes > sum(4 * int(np.prod(shape)) for shape in SHAPES.values()) + 4_096:
            raise ArtifactError(
                f"{path}: {CARD}: the size of {WEIGHTS} is {card.weights.bytes} bytes, which is too large"
            )
        arrays = read_tensors(files.file(WEIGHTS), RECOVERY_HINT)
        actual = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        if actual != (expected := {name: (shape, "float32") for name, shape in SHAPES.items()}):
            raise ArtifactError(f"{path}: {WEIGHTS} holds {actual}, expected {expected}; distil again")
        for name, array in arrays.items():
            if not np.abs(array).max() <= MAX_WEIGHT:  # also true for nan, which compares false
                raise ArtifactError(f"{path}: {WEIGHTS}: {name} has a number that is not finite or over {MAX_WEIGHT:g}")
        return cls(card, arrays["tables"], arrays["rarity"])

    def save(self, path: Path | str) -> Path:
        """Write the scorer to a new directory, atomically.

        Raises:
            SettingsError: the path exists.
        """
        path = Path(path)
        files = {WEIGHTS: tensor_bytes({"tables": self.tables_KV, "rarity": self.rarity_V})}
        write_at_once(
            path, SIGNED_CARD, files, lambda entries: self.card.model_copy(update={"weights": entries[WEIGHTS]})
        )
        return path

    def score(self, texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> tuple[F32, Bool]:
        """Score texts, and mark those that are unlike the training rows.

        A text of less than 3 bytes has no n-gram; its score is the intercept.

        Returns:
            Scores in standard deviations of relevance, and whether each text is unfamiliar; (N,) each.
        """
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        array = texts.cast(pa.large_binary()) if isinstance(texts, pa.Array) else as_bytes(texts)
        array = pc.fill_null(array, b"")
        if self.card.first_bytes is not None:
            array = pc.binary_slice(array, 0, self.card.first_bytes)
        value_N, rarity_N = mean_over(array, self.tables_KV, self.rarity_V)
        return (value_N + self.card.intercept).astype(np.float32), rarity_N > self.card.rarest

    def add_scores(self, table: pa.Table, text_column: str = "text") -> pa.Table:
        """Return the table with two more columns, `score` and `unfamiliar`.

        For Ray Data: `dataset.map_batches(scorer.add_scores, batch_format="pyarrow")`.
        """
        score_N, unfamiliar_N = self.score(table[text_column])
        return table.append_column(SCORE, pa.array(score_N)).append_column(UNFAMILIAR, pa.array(unfamiliar_N))


def claims(path: Path | str) -> str:
    """Return why a directory holds a scorer, complete or not; empty if it does not."""
    return f"has a {CARD}" * (kind_of(Path(path) / CARD) == "file")


def read(path: Path | str) -> Card:
    """Read the metadata of a scorer."""
    return SIGNED_CARD.read(Path(path))


def verify(path: Path | str) -> None:
    """Verify all files of a scorer; raise ArtifactError if one is damaged."""
    Scorer.open(path)
