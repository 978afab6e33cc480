"""`grasp build --forecast`: what a build would be, by its own functions on the first rows."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import MANIFEST
from grasp.artifact.writer import lock_artifact
from grasp.build.backward import square_sums
from grasp.build.build import REQUIRED, staging_place
from grasp.build.inputs import ON_DISK, Inputs, prepare
from grasp.build.moments import STATES, reads_once, spool_moments
from grasp.build.pipeline import alike, claim_settings, decided, first_rows, has_work, refuse_untrained
from grasp.build.score_shard import PositionKernels, forward_shard, position_sums
from grasp.errors import ArtifactError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Pass
from grasp.progress import Progress, Silent
from grasp.settings import build_settings
from grasp.store.contents import parquet_bytes
from grasp.text import duration_text, size_text
from grasp.yaml_files import plain_settings, require_flags


def foretell(
    out: Path | str,
    settings: Mapping[str, Any] | Path | str,
    *,
    untrained: bool = False,
    progress: Progress | None = None,
) -> str:
    """What `build` would be: rows, questions, kernels, time and disk, a line each. Its rows are kept for the build.

    Args:
        settings: as of `build`; all that it reads is named in them.
    Raises:
        GraspError: what would stop the build before its pass; or it is finished.
    """
    data = plain_settings(settings)
    require_flags(data, REQUIRED, "build")
    asked, place, progress = decided(build_settings(data), ON_DISK), staging_place(out)[2], progress or Silent()
    with lock_artifact(place):
        if (place / MANIFEST).exists():
            raise ArtifactError(f"{place}: is finished, so there is nothing to foretell; choose another --out")
        claim_settings(asked, place, progress)
        inputs = prepare(asked, place / "tokens", progress, replace=not has_work(place))
        if not untrained and isinstance(inputs.model, ReferenceModel):
            refuse_untrained(inputs.model, inputs.store, inputs.settings.features)
        if inputs.settings.like is not None:
            alike(inputs, inputs.settings.like)
        return _by_first_rows(inputs, sum(file.stat().st_size for file in (place / "tokens").iterdir()))


def _by_first_rows(inputs: Inputs, kept: int) -> str:
    """The lines; `kept`: bytes of the rows as they lie on disk already."""
    model, store, settings, units = inputs.model, inputs.store, inputs.settings, inputs.units
    features, given = settings.features, settings.like is not None

    # Time: of the passes for moments over their samples, of the questions once, and of the pass over all rows.
    rows, kernels, seconds = first_rows(store), None, 0.0
    per_row_token = 1 / max(1, rows.n_tokens)
    forward_shard(model, rows, features, None)  # the first time takes longer
    seen: list[Pass] | None = [] if not given and reads_once(model, store, features) else None
    if "token" in features.kernels or features.product_width:
        begun = time.perf_counter()
        moments = position_sums(model, rows, features, seen=seen).moments()
        if not given:
            seconds += (time.perf_counter() - begun) * min(store.n_tokens, features.moment_positions) * per_row_token
        if "gradient" in features.kernels:
            begun = time.perf_counter()
            squares = square_sums(model, rows, features)
            if squares.count:
                moments = replace(moments, gradient_K=squares.mean())
            if not given:
                sampled = min(1.0, features.gradient_rows / store.n_rows)
                seconds += (time.perf_counter() - begun) * sampled * store.n_tokens * per_row_token
        begun = time.perf_counter()
        kernels = PositionKernels.prepare(units, moments, features, model)
        seconds += time.perf_counter() - begun
    keep = settings.keep_features and "token" in features.kernels
    begun = time.perf_counter()
    shard = forward_shard(model, rows, features, kernels, keep_positions=keep, seen=seen)
    passes = 1.0 if given or store.n_rows <= features.moment_rows else 1.0 + features.moment_rows / store.n_rows
    seconds += (time.perf_counter() - begun) * passes * store.n_tokens * per_row_token

    # Disk: numbers of every row, its names and labels (as one table, and shard by shard), moments, and what is kept.
    n_numbers = sum(array.shape[1] for array in shard.arrays.values()) + features.hidden_width + features.residual_width
    if "pooled" in features.kernels:
        n_numbers += len(units.loss_E)
    finished = store.n_rows * n_numbers * np.dtype(settings.array_dtype).itemsize
    finished += 2 * len(parquet_bytes(store.table(0))) * store.n_shards
    finished += 8 * (model.hidden_size**2 + model.vocab_size)
    if kernels is not None:
        states = min(store.n_supervised, STATES) / max(1, int(store.supervised()[: len(rows)].sum()))
        for name, array in spool_moments(kernels.moments).items():
            finished += round(array.nbytes * (states if name.startswith("neighbour.") else 1))
    if settings.keep_features:
        features_bytes = sum(array.nbytes for array in shard.spool(relevance=False).values())
        finished += round(features_bytes * store.n_tokens * per_row_token)
    spooled = sum(array.nbytes for array in shard.spool(relevance=True).values()) / len(rows)
    beside = round(spooled * min(store.n_rows, features.moment_rows))
    if settings.keep_tokens:
        finished += kept
    else:
        beside += kept

    questions = Counter(unit.target for unit in inputs.unit_set.units)
    ranking = [name for name in features.kernels if name != "pooled"] or ["pooled"]  # ranks where nothing else does
    about = f"about {duration_text(seconds)}, by the first {len(rows)} rows"
    return (
        f"rows: {store.n_rows:,} of {store.n_documents:,} documents\n"
        f"questions: {', '.join(f'{n:,} of {target}' for target, n in questions.items())}\n"
        f"kernels: {', '.join(ranking)}\n"
        f"time: {store.n_tokens:,} tokens on {model.device}: {about}\n"
        f"disk: about {size_text(finished)}, and {size_text(beside)} more until it is finished"
    )
