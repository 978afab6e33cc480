"""Who runs the reference model over rows: this process, or workers elsewhere. What comes out is the same."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from grasp.extract.forward import (
    PositionSums,
    ShardForward,
    TokenKernel,
    forward_shard,
    position_sums,
)
from grasp.extract.passes import Pass, Rows
from grasp.extract.progress import Advance, ignore
from grasp.models.classifier import Reference
from grasp.settings import FeatureSettings


class Workers(Protocol):
    """Who runs the model: gets rows, gives back features. The caller alone reads and writes files."""

    def position_sums(self, parts: Iterable[Rows], every: int, advance: Advance) -> Iterator[PositionSums]:
        """Sums for the token-level moments of each part, in the order of the parts, whoever is done first."""

    def forward(
        self, shards: Iterable[tuple[int, Rows]], kernel: TokenKernel | None, advance: Advance, *, keep_positions: bool
    ) -> Iterator[tuple[int, ShardForward]]:
        """The forward half of each shard with its number, as they are done."""


@dataclass(frozen=True, slots=True)
class InProcess:
    """The model of this process, one shard after the other.

    `seen` is filled where the parts of the moments are the shards: what the model gave is then used again.
    """

    model: Reference
    features: FeatureSettings
    seen: dict[int, list[Pass]] | None = None

    def position_sums(self, parts: Iterable[Rows], every: int, advance: Advance = ignore) -> Iterator[PositionSums]:
        for k, rows in enumerate(parts):
            keep = None if self.seen is None else self.seen.setdefault(k, [])
            yield position_sums(self.model, rows, self.features, every, advance, keep)

    def forward(
        self,
        shards: Iterable[tuple[int, Rows]],
        kernel: TokenKernel | None,
        advance: Advance = ignore,
        *,
        keep_positions: bool = False,
    ) -> Iterator[tuple[int, ShardForward]]:
        for k, rows in shards:
            seen = [] if self.seen is None else self.seen.pop(k, [])
            shard = forward_shard(
                self.model, rows, self.features, kernel, keep_positions=keep_positions, advance=advance, seen=seen
            )
            yield k, shard
