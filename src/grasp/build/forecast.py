"""`grasp build --forecast`: what a build would be, by its own functions on the first rows."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import MANIFEST
from grasp.artifact.writer import lock_artifact
from grasp.build.build import REQUIRED, staging_place
from grasp.build.inputs import ON_DISK, Inputs, prepare
from grasp.build.model_pass import Arrays, observe_part, score_shard
from grasp.build.pipeline import (
    MEGABYTE,
    Sample,
    alike,
    claim_settings,
    decided,
    has_work,
    kept_bytes,
    refuse_untrained,
)
from grasp.errors import ArtifactError
from grasp.kernels.kernel import kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.progress import Progress, Silent
from grasp.settings import build_settings
from grasp.store.contents import parquet_bytes
from grasp.text import duration_text, size_text
from grasp.yaml_files import plain_settings, require_flags

FIRST_TOKENS = 2_048  # of the rows by which time is told


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
        if inputs.settings.like is not None:
            alike(inputs, inputs.settings.like)
        kept = sum(file.stat().st_size for file in (place / "tokens").iterdir())
        return _by_first_rows(inputs, kept, untrained=untrained)


def _by_first_rows(inputs: Inputs, kept: int, *, untrained: bool) -> str:
    """The lines, by both loops over the first rows; `kept`: bytes of the rows as they lie on disk already."""
    ready, model, store, settings = inputs.ready, inputs.model, inputs.store, inputs.settings
    features, sample = settings.features, Sample.draw(inputs.store.supervised(), settings.features)
    reached = np.cumsum(np.asarray(store.table(0).column("n_tokens"), dtype=np.int64))
    rows = store.rows(np.arange(max(1, int(np.searchsorted(reached, FIRST_TOKENS, side="right")))))
    share = rows.n_tokens / store.n_tokens
    next(iter(ready.batches(store.rows(np.arange(1)))))  # the first time takes longer

    # Time: of the questions once more, of the sample, and of all rows if these are more or do not fit.
    begun = time.perf_counter()
    passed: list[Arrays] = []
    corpus = observe_part(ready, rows, states_every=sample.states_every, keep=passed.append)
    pass_seconds = (time.perf_counter() - begun) / share
    if not untrained and isinstance(model, ReferenceModel):
        refuse_untrained(corpus.loss, model)
    begun = time.perf_counter()
    kernels = make_kernels(features.kernels, model, features, corpus)
    for kernel in kernels:
        kernel.prepare(inputs.units)
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    shard = score_shard(ready, rows, kernels=kernels, keep_features=settings.keep_features, passed=passed)
    seconds += (time.perf_counter() - begun) / share
    coordinates = 0 if ready.sampled is None else ready.sampled.sample.size
    beside = kept_bytes(model, store, features, coordinates)
    once = sample.is_whole and settings.like is None and beside <= features.kept_mb * MEGABYTE
    if not once:
        beside = 0
    of_sample = 0.0 if settings.like is not None else sample.n_positions / store.n_supervised
    seconds += pass_seconds * (1.0 if once else of_sample + 1.0)

    # Disk: numbers of every row, its names and labels (as one table, and shard by shard), moments, and what is kept.
    n_numbers = sum(array.shape[1] for array in shard.arrays.values())
    finished = store.n_rows * n_numbers * np.dtype(settings.array_dtype).itemsize
    finished += 2 * len(parquet_bytes(store.table(0))) * store.n_shards
    states = min(store.n_supervised, STATES) / max(1, corpus.n_positions)
    for name, array in corpus.arrays().items():
        finished += round(array.nbytes * (states if name.startswith("states.") else 1))
    if shard.features is not None:
        finished += round(sum(array.nbytes for array in shard.features.values()) / share)
    if settings.keep_tokens:
        finished += kept
    else:
        beside += kept

    questions = Counter(unit.target for unit in inputs.unit_set.units)
    ranking = [name for name in features.kernels if not issubclass(kernel_class(name), Sketch)]
    about = f"about {duration_text(seconds)}, by the first {len(rows)} rows"
    return (
        f"rows: {store.n_rows:,} of {store.n_documents:,} documents\n"
        f"questions: {', '.join(f'{n:,} of {target}' for target, n in questions.items())}\n"
        f"kernels: {', '.join(ranking)}\n"
        f"time: {store.n_tokens:,} tokens on {model.device}: {about}\n"
        f"disk: about {size_text(finished)}, and {size_text(beside)} more until it is finished"
    )
