"""A first look, on a few rows before the pass: has the model learned anything, and how long will the build take?"""

import io
import math
import time
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.errors import ModelError
from grasp.extract.backward import square_sums
from grasp.extract.corpus_moments import STATES, Store, reads_once
from grasp.extract.forward import PositionKernels, UnitFeatures, forward_shard, position_sums
from grasp.features.extract import Pass, Reference, Rows
from grasp.features.gradient_match import SampledGradients
from grasp.settings import BuildSettings, FeatureSettings
from grasp.text import duration_text, size_text

TOKENS = 2_048  # of the rows that are looked at
UNTRAINED = 0.95  # of ln V; a model that knows no more than how often words occur is near 0.7
BUSY = 0.5  # of a core: with less, other programs take the time

Spent = NDArray[np.float64]  # seconds: of the clock, of the CPU


def first_rows(store: Store) -> Rows:
    """The first rows of a corpus, at least one."""
    reached = np.cumsum(np.asarray(store.table(0).column("n_tokens"), dtype=np.int64))
    return store.rows(np.arange(max(1, int(np.searchsorted(reached, TOKENS, side="right")))))


def refuse_untrained(model: Reference, rows: Rows, settings: FeatureSettings) -> None:
    """See that the model knows more than chance.

    Raises:
        ModelError: its mean loss is that of a guess among all tokens.
    """
    loss, chance = float(forward_shard(model, rows, settings, None).loss_N.mean()), math.log(model.vocab_size)
    if loss > UNTRAINED * chance:
        raise ModelError(
            f"model: looks untrained: its loss on the first {len(rows)} rows is {loss:.1f} nats a token, "
            f"guessing gives {chance:.1f}. Name a trained checkpoint; for token ids the model whose tokenizer made "
            "them; or go on all the same with --untrained"
        )


def expected_seconds(
    model: Reference, store: Store, rows: Rows, units: UnitFeatures, settings: FeatureSettings, *, given: bool = False
) -> Spent:
    """Time of all passes over the corpus, kernels included, by that of the first rows, which the model must have seen
    before. There and back it counts the gradient kernel without its products, and the questions.

    Args:
        given: moments are another artifact's: no pass is for them.
    """
    kernel, sampled, seconds = None, 0.0, np.zeros(2)
    if settings.gradient:
        begun = _now()
        square_sums(model, rows, settings)
        sample = 0.0 if given else store.n_tokens * min(1.0, settings.gradient_rows / store.n_rows)
        asked = sum(len(example.input_ids) for example in units.examples)
        seconds += (_now() - begun) * (store.n_tokens + sample + asked)
        settings = settings.model_copy(update={"gradient_match": False})
    seen: list[Pass] = []
    if settings.token or settings.product_width > 0:
        begun = _now()
        once = not given and reads_once(model, store, settings)
        sums = position_sums(model, rows, settings, seen=seen if once else None)
        seconds += (_now() - begun) * (0 if given else min(store.n_tokens, settings.moment_positions))
        kernel = PositionKernels.prepare(units, sums.moments(), settings, model)
    if store.n_rows > settings.moment_rows and not given:
        sampled = store.n_tokens * settings.moment_rows / store.n_rows
    forward = pass_seconds(model, store.n_tokens + sampled, rows, settings, kernel, seen)
    return seconds / max(1, rows.n_tokens) + forward


def pass_seconds(
    model: Reference,
    n_tokens: float,
    rows: Rows,
    settings: FeatureSettings,
    kernel: PositionKernels | None,
    seen: list[Pass] | None = None,
) -> Spent:
    """Time of one pass over so many tokens."""
    begun = _now()
    forward_shard(model, rows, settings, kernel, seen=seen)
    return (_now() - begun) * n_tokens / max(1, rows.n_tokens)


def forecast(model: Reference, store: Store, rows: Rows, seconds: Spent) -> str:
    """The time in words; on a machine that others keep busy also what it would be without them, at most."""
    wall, cpu = (float(value) for value in seconds)
    about = f"about {duration_text(wall)}, by the first {len(rows)} rows"
    if model.device.type == "cpu" and cpu < BUSY * wall:
        about += f"; {duration_text(cpu)} of it is computing, the rest waits for other programs on this machine"
    return f"{store.n_tokens:,} tokens on {model.device}: {about}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a build would be: counted, but for the time, which the first rows tell."""

    rows: int
    documents: int
    tokens: int
    questions: dict[str, int]  # by target
    kernels: tuple[str, ...]
    time: str
    disk: int  # bytes of the finished artifact
    beside: int  # bytes more, until it is finished

    def __str__(self) -> str:
        questions = ", ".join(f"{n:,} of {target}" for target, n in self.questions.items())
        return (
            f"rows: {self.rows:,} of {self.documents:,} documents\n"
            f"questions: {questions}\n"
            f"kernels: {', '.join(self.kernels)}\n"
            f"time: {self.time}\n"
            f"disk: about {size_text(self.disk)}, and {size_text(self.beside)} more until it is finished"
        )


def disk_bytes(
    model: Reference, store: Store, kept: int, rows: Rows, n_numbers: int, settings: BuildSettings
) -> tuple[int, int]:
    """Bytes of a finished artifact of so many numbers a row, and those that are there beside it while it is built.

    Args:
        kept: bytes of the rows as they lie on disk already; of what the model gives the first ones tell.
    """
    features = settings.features
    numbers = store.n_rows * n_numbers * np.dtype(settings.array_dtype).itemsize
    moments = 3 * 8 * (model.hidden_size**2 + model.vocab_size)
    if features.neighbour:
        moments += min(store.n_tokens, 2 * STATES) * (4 * model.hidden_size + 8)
    coordinates = SampledGradients.choose(model, features).sample.size if features.gradient else 0
    moments += 4 * coordinates
    table = io.BytesIO()
    pq.write_table(store.table(0), table)
    named = 2 * table.tell() * store.n_shards  # as one table, and shard by shard
    shard = forward_shard(model, rows, features, None, keep_positions=settings.keep_features and features.token)
    of_row = sum(array.nbytes for array in shard.spool(relevance=True).values()) / len(rows)
    finished = numbers + moments + named + kept * settings.keep_tokens
    if settings.keep_features:
        of_token = sum(array.nbytes for array in shard.spool(relevance=False).values()) / max(1, rows.n_tokens)
        finished += round(of_token * store.n_tokens) + 2 * coordinates * store.n_rows
    spooled = round(of_row * min(store.n_rows, features.moment_rows))
    return finished, spooled + kept * (not settings.keep_tokens)


def _now() -> Spent:
    return np.array([time.perf_counter(), time.process_time()])
