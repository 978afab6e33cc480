"""Moments of the training rows: sampled when the corpus is large, exact when it is not.

Token moments are taken in a pass of their own over a few whole rows; pooled moments come from features that the
shards spooled, so a small corpus is read once and exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.manifest import FeatureSpool
from grasp.build.backward import square_sums
from grasp.build.score_shard import PositionSums, ShardForward, Workers, forward_shard, position_sums
from grasp.corpus.row_store import RowStore, ShardStore
from grasp.errors import ModelError
from grasp.kernels.gradient import SquareSums
from grasp.kernels.whitening import LabelledStates, MomentAccumulator, Moments, PositionMoments
from grasp.models.forward_pass import Reference
from grasp.progress import Progress
from grasp.seeds import stream
from grasp.settings import FeatureSettings

Store = RowStore | ShardStore[Any, Any]

PART_ROWS, GRADIENT_ROWS = 256, 64  # of a sample that go through the model at once
SEEN_BYTES = 2**30  # of what the model gave for the moments, kept for the pass that follows
STATES = 8_192  # positions whose hidden states are kept for the neighbour kernel, about


def token_sample(supervised_N: NDArray[np.int64], positions: int, seed: int) -> NDArray[np.int64]:
    """Whole rows, drawn uniformly, until they hold `positions` supervised positions; in row order.

    A corpus that has no more than that is taken whole.
    """
    order = stream(seed, "moments", "token").permutation(len(supervised_N))
    reached = np.cumsum(supervised_N[order])
    count = int(np.searchsorted(reached, positions, side="left")) + 1
    return np.sort(order[:count])


def reads_once(model: Reference, store: Store, settings: FeatureSettings) -> bool:
    """Whether what the model gives for the moments is kept for the shards: of a small corpus, where memory allows.

    Not where rows go there and back: their own forward pass is needed for that.
    """
    size = store.n_supervised * (4 * model.hidden_size + 12 * (settings.top_k + 3))
    all_sampled = store.n_supervised <= settings.moment_positions and store.n_rows <= settings.moment_rows
    return all_sampled and size <= SEEN_BYTES and "gradient" not in settings.kernels


def tokens_ahead(store: Store, settings: FeatureSettings, *, measured: bool, once: bool) -> dict[str, int]:
    """Tokens that the model reads in each stage of a build, about; those there and back count three times.

    Args:
        measured: moments are taken over from another artifact.
        once: `reads_once`, so that rows are scored without the model.
    """
    there_and_back = "gradient" in settings.kernels
    share = {}
    if not measured:
        if "token" in settings.kernels or settings.product_width:
            share["token moments"] = min(1.0, settings.moment_positions / max(1, store.n_supervised))
        if there_and_back:
            share["gradient moments"] = 3 * min(1.0, settings.gradient_rows / store.n_rows)
        if store.n_rows > settings.moment_rows:
            share["pooled moments"] = settings.moment_rows / store.n_rows
    share["forward"] = 3.0 if there_and_back else 0.0 if once else 1.0
    return {name: round(passes * store.n_tokens) for name, passes in share.items()}


def position_moments(
    model: Reference,
    store: Store,
    settings: FeatureSettings,
    spool: FeatureSpool,
    workers: Workers,
    progress: Progress,
) -> PositionMoments:
    """Token-level moments over the sample; computed once, kept in the work area for a resumed build.

    Each part has its own sums, which are merged in the order of the rows: the same digits, however many workers there
    are. A part is some rows of a sample; of a corpus that is taken whole, a shard.
    """
    if spool.has(0):
        return unspool_position_moments(spool.read(0))
    length_N, supervised_N = store.lengths(), store.supervised()
    index = token_sample(supervised_N, settings.moment_positions, settings.seed)
    progress.stage("token moments", rows=len(index), tokens=int(length_N[index].sum()))
    if store.n_supervised <= settings.moment_positions:
        parts = ((k, store.shard(k)) for k in range(store.n_shards))
    else:
        starts = range(0, len(index), PART_ROWS)
        parts = ((k, store.rows(index[start : start + PART_ROWS])) for k, start in enumerate(starts))
    every = max(1, int(supervised_N[index].sum()) // STATES)
    sums = PositionSums(model, settings)
    for _, part in workers.run(position_sums, parts, progress.advance, in_order=True, every=every):
        sums.merge(part)
    moments = sums.moments()
    if "gradient" in settings.kernels:
        count = min(store.n_rows, settings.gradient_rows)
        index = np.sort(stream(settings.seed, "moments", "gradient").choice(store.n_rows, size=count, replace=False))
        progress.stage("gradient moments", rows=count, tokens=int(length_N[index].sum()))
        starts = range(0, count, GRADIENT_ROWS)
        parts = ((k, store.rows(index[start : start + GRADIENT_ROWS])) for k, start in enumerate(starts))
        squares: SquareSums | None = None
        for _, part in workers.run(square_sums, parts, progress.advance, in_order=True):
            if squares is None:
                squares = part
            else:
                squares.merge(part)
        if squares is None or squares.count == 0:
            raise ModelError(
                f"the gradients of all {count:,} rows sampled are not finite; use --dtype bfloat16 or float32, or "
                "--match forward"
            )
        moments = replace(moments, gradient_K=squares.mean())
    spool.write(0, spool_moments(moments))
    return moments


def pooled_sample(
    store: Store, settings: FeatureSettings, spool: FeatureSpool, workers: Workers, progress: Progress
) -> int:
    """Run the model over the sample for the pooled moments; returns the number of parts in the work area."""
    draw = stream(settings.seed, "moments", "pooled")
    index = np.sort(draw.choice(store.n_rows, size=settings.moment_rows, replace=False))
    parts = np.split(index, range(store.shard_rows, len(index), store.shard_rows))
    progress.stage("pooled moments", rows=len(index), tokens=None)
    left = [k for k in range(len(parts)) if not spool.has(k)]
    progress.advance(len(index) - sum(len(parts[k]) for k in left), 0)
    rows = ((k, store.rows(parts[k])) for k in left)
    for k, shard in workers.run(forward_shard, rows, progress.advance, kernel=None):
        spool.write(k, shard.spool(relevance=True))
    return len(parts)


def pooled_moments(spool: FeatureSpool, parts: int, model: Reference) -> Moments:
    """Row-level moments from spooled features, part after part."""
    accumulator = MomentAccumulator(model.hidden_size, model.vocab_size)
    for k in range(parts):
        pooled = ShardForward.unspool(spool.read(k), model.vocab_size).pooled
        accumulator.add(pooled.hidden_NH, pooled.residual_NV.indices, pooled.residual_NV.data)
    return accumulator.moments()


def spool_moments(positions: PositionMoments | None, pooled: Moments | None = None) -> dict[str, NDArray[np.generic]]:
    """As named arrays: `pooled.`, `token.` and, where they are built, `input.`, `gradient.` and `neighbour.`."""
    arrays: dict[str, NDArray[np.generic]] = {}
    of_kernels = {"pooled": pooled}
    if positions is not None:
        of_kernels |= {"token": positions.token, "input": positions.input}
        arrays["token.loss"] = np.array([positions.loss])
        if positions.gradient_K is not None:
            arrays["gradient.square"] = positions.gradient_K.astype(np.float32)
        if positions.states is not None:
            arrays |= {"neighbour.hidden": positions.states.hidden_MH, "neighbour.label": positions.states.label_M}
    for name, moments in of_kernels.items():
        if moments is not None:
            arrays[f"{name}.count"] = np.array([moments.count], dtype=np.int64)
            arrays[f"{name}.mean"] = moments.mean_H
            arrays[f"{name}.covariance"] = moments.covariance_HH
            arrays[f"{name}.gamma"] = moments.gamma_V
    return arrays


def unspool_position_moments(arrays: Mapping[str, NDArray[Any]]) -> PositionMoments:
    """Back from named arrays."""
    of_input = unspool_moments(arrays, "input.") if "input.count" in arrays else None
    states = None
    if "neighbour.label" in arrays:
        states = LabelledStates(arrays["neighbour.hidden"], arrays["neighbour.label"])
    loss = float(arrays["token.loss"][0]) if "token.loss" in arrays else math.nan  # of an older artifact
    gradient_K = np.asarray(arrays["gradient.square"], dtype=np.float64) if "gradient.square" in arrays else None
    return PositionMoments(unspool_moments(arrays, "token."), of_input, states, gradient_K, loss)


def unspool_moments(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Moments:
    """Back from named arrays."""
    return Moments(
        count=int(arrays[f"{prefix}count"][0]),
        mean_H=np.asarray(arrays[f"{prefix}mean"], dtype=np.float64),
        covariance_HH=np.asarray(arrays[f"{prefix}covariance"], dtype=np.float64),
        gamma_V=np.asarray(arrays[f"{prefix}gamma"], dtype=np.float64),
    )
