"""A scorer: what `grasp distil` learned, as a directory of two files, and how it scores texts.

`card.json` says what it is and how well it does, `weights.safetensors` holds its tables. It may come from a stranger:
sizes are known before anything is read, nothing in it is run, and every number is finite.
Shape letters: N texts, K lengths, V slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

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
from grasp.text import plain, text_table

CARD = "card.json"
WEIGHTS = "weights.safetensors"
README = "README.md"
FORMAT = "grasp-scorer"
FORMAT_VERSION = 1
LARGEST_CARD = 1 << 20  # bytes
LARGEST = 1e9  # of a weight, and of what is added to them
MOST_FIRST_BYTES = 1 << 30  # Arrow slices no further
SCORE, UNFAMILIAR = "score", "unfamiliar"
UNFAMILIAR_SHARE = 0.01  # of held-out rows
SHAPES = {"tables": (len(LENGTHS), SLOTS), "rarity": (SLOTS,)}


class Quality(JsonModel):
    """How well held-out rows are ranked, with 95 % intervals over documents."""

    rows: int
    spearman: tuple[float, float, float] = Field(description="With their relevance: value, low, high.")
    recall: tuple[float, float, float] = Field(
        description="Share of the best tenth that is in the scorer's best tenth."
    )
    gain: tuple[float, float, float] = Field(
        description="Mean relevance of the scorer's best fifth, as a share of that of the best fifth."
    )


class SliceQuality(JsonModel):
    """The same for the rows with one value of a label."""

    label: str
    value: str
    rows: int
    spearman: tuple[float, float, float]


class Card(JsonModel):
    """What a scorer is, for programs and people."""

    format: Literal["grasp-scorer"] = "grasp-scorer"
    format_version: int = FORMAT_VERSION
    checksum: str = Field(UNSIGNED, description="Of this file, with the checksum itself as zeros.")
    target: str
    scored_by: str = Field(description="What relevance it learned, in words.")
    made_by: dict[str, str]
    fingerprints: dict[str, str] = Field(description="Of the artifact that it learned from.")
    rows: int = Field(ge=1, description="Rows that it learned from.")
    penalty: float = Field(description="Of the ridge regression; chosen on held-out rows.")
    intercept: float = Field(ge=-LARGEST, le=LARGEST)
    first_bytes: int | None = Field(
        None, ge=1, le=MOST_FIRST_BYTES, description="So much of a document is read; none: all of it."
    )
    rarest: float = Field(description="Rarity that one held-out row in a hundred exceeds.")
    quality: Quality
    slices: tuple[SliceQuality, ...] = ()
    weights: FileEntry

    def __str__(self) -> str:
        quality = self.quality
        lines = [
            f"scorer for {self.target}, learned from {self.rows:,} rows: {self.scored_by}",
            f"tried on {quality.rows:,} rows, each by a scorer that had not seen its document (95 % intervals):",
            f"  Spearman with relevance {with_interval(quality.spearman)}",
            f"  of the best 10 % it finds {percents(quality.recall)}",
            f"  its best 20 % have {percents(quality.gain)} of the relevance of the best 20 %",
        ]
        if self.first_bytes is not None:
            lines.append(f"reads the first {self.first_bytes:,} bytes of a document, as the build read its first rows")
        text = "\n".join(plain(line) if not line.startswith(" ") else f"  {plain(line)}" for line in lines)
        if not self.slices:
            return text
        cells = [(f"{one.label} = {one.value}", f"{one.rows:,}", with_interval(one.spearman)) for one in self.slices]
        return f"{text}\n{text_table('', ('slice', 'rows', 'Spearman'), cells)}"


RECOVERY_HINT = "restore a copy, or distil again"
SIGNED_CARD = Signed(
    CARD,
    Card,
    "the card of a scorer",
    FORMAT,
    FORMAT_VERSION,
    "distil again",
    largest=LARGEST_CARD,
    files=lambda card: {WEIGHTS: card.weights},
    none=f"is no scorer (no {CARD}); make one with `grasp distil`",
)


def with_interval(value: tuple[float, float, float]) -> str:
    """A correlation with its interval."""
    return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"


def percents(value: tuple[float, float, float]) -> str:
    """A share with its interval, in percent."""
    return f"{value[0]:.0%} ({value[1]:.0%} to {value[2]:.0%})"


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores texts by what training on them should do for the card's target: 0 is the average row it learned from.

    Attributes:
        tables_KV: the value of every sequence of bytes, by its length and slot.
        rarity_V: minus the logarithm of how often a sequence of 4 bytes was seen.
    """

    card: Card
    tables_KV: F32
    rarity_V: F32

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a scorer.

        Raises:
            ArtifactError: there is none, it is damaged, of another version, or holds what no scorer holds.
        """
        card, files = open_store(path, SIGNED_CARD)
        if card.weights.bytes > sum(4 * int(np.prod(shape)) for shape in SHAPES.values()) + 4_096:
            raise ArtifactError(f"{path}: says that {WEIGHTS} has {card.weights.bytes} bytes, more than any has")
        arrays = read_tensors(files.file(WEIGHTS), RECOVERY_HINT)
        found = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        if found != (wanted := {name: (shape, "float32") for name, shape in SHAPES.items()}):
            raise ArtifactError(f"{path}: {WEIGHTS} holds {found}, expected {wanted}; distil again")
        for name, array in arrays.items():
            if not np.abs(array).max() <= LARGEST:  # nan compares false
                raise ArtifactError(f"{path}: {WEIGHTS}: {name} has a number that is not finite or over {LARGEST:g}")
        return cls(card, arrays["tables"], arrays["rarity"])

    def save(self, path: Path | str) -> Path:
        """Write the directory; it appears only when whole.

        Raises:
            SettingsError: something is there already.
        """
        path = Path(path)
        files = {
            WEIGHTS: tensor_bytes({"tables": self.tables_KV, "rarity": self.rarity_V}),
            README: f"{_readme(self.card)}\n".encode(),
        }
        write_at_once(
            path, SIGNED_CARD, files, lambda entries: self.card.model_copy(update={"weights": entries[WEIGHTS]})
        )
        return path

    def score(self, texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> tuple[F32, Bool]:
        """The score of every text in standard deviations of relevance, and whether it is unlike what was learned from.

        An empty text, or one of less than 3 bytes, is scored 0 sequences: the intercept.

        Returns:
            two of (N,).
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
        """The table with the columns `score` and `unfamiliar`.

        For Ray Data: `dataset.map_batches(scorer.add_scores, batch_format="pyarrow")`.
        """
        score_N, unfamiliar_N = self.score(table[text_column])
        return table.append_column(SCORE, pa.array(score_N)).append_column(UNFAMILIAR, pa.array(unfamiliar_N))


def is_scorer(path: Path | str) -> bool:
    """Whether a directory holds a scorer, whole or not."""
    return kind_of(Path(path) / CARD) == "file"


def _readme(card: Card) -> str:
    return (
        f"# A scorer of documents for {plain(card.target)}\n\n"
        "    grasp apply SCORER --corpus CORPUS --out SCORED\n\n"
        "It guesses from a document's text what GRASP would say after reading it with a model: how much training on\n"
        "it should help the target. 0 is the average row that it learned from, 1 a standard deviation better.\n\n"
        "```\n"
        f"{card}\n"
        "```\n\n"
        "It does not know texts that are unlike these rows: another language, code, markup. `unfamiliar` marks\n"
        f"documents whose sequences of 4 bytes are rarer than in {1 - UNFAMILIAR_SHARE:.0%} of the held-out rows."
    )
