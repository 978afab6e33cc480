"""`grasp build --forecast`: estimate size, time and disk of a build in seconds, from its first rows and a timed pass.

The first megabyte of the corpus is divided into rows. The model is run on a few of them, which is timed; everything
else is extrapolated in proportion. `ratio` is the number of documents of the corpus over those that were read. Nothing
is written to the artifact. Start with `forecast`.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import MANIFEST
from grasp.corpus.documents import read_documents
from grasp.corpus.row_store import TokenRows
from grasp.corpus.sources import open_source
from grasp.errors import ArtifactError
from grasp.kernels.gradient import CURVATURE_ROWS
from grasp.kernels.kernel import CorpusMoments, counts_rows, kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Units
from grasp.pipeline.add_replay import forecast_added_replay
from grasp.pipeline.build_plan import output_location, plan_build, split_overrides, with_model
from grasp.pipeline.inputs import Inputs, prepare_inputs
from grasp.pipeline.model_pass import Arrays, compute_moments, score_shard
from grasp.pipeline.pipeline import MEGABYTE, feature_bytes, measure_curvature, open_moment_source, refuse_untrained
from grasp.pipeline.proxy import forecast_proxy
from grasp.pipeline.replay_plan import Forecast, forecast_replay, peak_memory, plan_replay, read_recipe, time_step
from grasp.progress import Progress
from grasp.settings import BuildSettings, ReplaySettings
from grasp.store.contents import parquet_bytes
from grasp.yaml_files import plain_settings, validated

PROBE_CHARS = 1 << 20  # characters of the corpus that are divided into rows
PROBE_DOCUMENTS = 4_096  # maximum number of documents that are read
CHARS_PER_TOKEN = 4  # characters per token, for a corpus of token ids
PROBE_SECONDS = 0.5  # minimum duration of the timed pass, unless it has all rows; each has four times the rows before
SLOW_SECONDS = 4.0  # duration of the pass over the first row after which no longer pass is timed
GRADIENT_BYTES = 4  # at most, of a coordinate of a unit's gradient
PROBE_UNITS = 64  # maximum number of units that rows are scored against
MIN_LOSS_POSITIONS = 64  # positions with loss below which the loss does not show whether the model is trained


def forecast(
    out: Path | str,
    settings: Mapping[str, Any] | Path | str,
    *,
    untrained: bool = False,
    replay: bool = False,
    warm_up: int | None = None,
    recipe: Path | str | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> str:
    """Estimate what `build` would do: a line on rows, questions and kernels, and one on time, memory and disk.

    Rows that contain questions of the targets are not searched for, since that needs all rows; `build` reports them.

    Args:
        out: directory for the artifact; nothing is written to it.
        settings: settings of `build`, which name all inputs.
        untrained: accept a model that predicts the first rows no better than chance.
        replay: also forecast a replay, see `build`.
        warm_up: steps of the training to the state that is read, see `build`; they are part of the time.
        recipe: training that is predicted, see `build`.
        progress: receives stages and notes.
    Raises:
        GraspError: an error that would stop the build before its first pass, or the artifact is finished.
    """
    nested = plain_settings(settings)
    output = output_location(out)
    is_finished = (output.directory / MANIFEST).exists()
    if replay and is_finished and not {"corpus", "targets"} & nested.keys():
        replay_settings = validated(ReplaySettings, nested.pop("replay", {}), "replay")
        overrides, _ = split_overrides(nested)
        return str(forecast_added_replay(output.directory, read_recipe(recipe), replay_settings, overrides))
    build_plan = plan_build(nested, output, recipe=recipe, replay=replay, warm_up=warm_up)
    build_config = build_plan.settings
    if is_finished:
        raise ArtifactError(f"{output.directory}: is finished, so there is nothing to forecast; choose another --out")
    n_read, n_documents = _first_documents(build_config)
    ratio = n_documents / n_read
    if ratio > 1:
        corpus = build_config.corpus.model_copy(update={"limit": n_read})
        build_config = build_config.model_copy(update={"corpus": corpus})
        progress = None  # the notes of `prepare_inputs` would be about the first documents only
    with tempfile.TemporaryDirectory(prefix="grasp-forecast-") as name:
        total = Forecast(0.0, 0, 0)
        if build_plan.trains_proxy:
            proxy, seconds = forecast_proxy(
                Path(name) / "proxy", build_config.corpus, build_config.model.tokenizer, ratio
            )
            build_config, total = with_model(build_config, proxy), Forecast(seconds, 0, 0)
        inputs = prepare_inputs(build_config, Path(name) / "tokens", progress or Progress())
        if inputs.settings.like is not None:
            open_moment_source(inputs, inputs.settings.like)
        tokens_bytes = sum(file.stat().st_size for file in (Path(name) / "tokens").iterdir())
        is_untrained = untrained or build_plan.trains_proxy
        line, price = _estimate(inputs, ratio, round(ratio * tokens_bytes), untrained=is_untrained)
        total += price
        if build_plan.replay is not None or build_plan.warm_up != 0:
            assert isinstance(inputs.model, ReferenceModel)
            n_rows, longest = round(ratio * inputs.store.n_rows), int(inputs.store.lengths().max())
            train, settings_of_replay = str(inputs.settings.train), build_plan.replay or ReplaySettings()
            plan = plan_replay(
                inputs.model, train, build_plan.recipe, settings_of_replay, n_rows=n_rows, context=longest
            )
            if build_plan.warm_up != 0:
                steps = build_plan.warm_up or max(plan.optimizer.steps // 2, 1)
                step_seconds = time_step(plan.start(0), inputs.store, plan.order(n_rows, 0)[0] % inputs.store.n_rows)
                total += Forecast(steps * step_seconds, peak_memory(), 0)
            if build_plan.replay is not None:
                total += forecast_replay(plan, inputs.store, n_rows, len(inputs.unit_set.targets))[1]
    return f"{line}\n{total}"


def _first_documents(settings: BuildSettings) -> tuple[int, int]:
    """Return the number of documents to read, and an estimate of that of the corpus; (1, 1) if all are read."""
    if settings.model.reader is not None:
        return 1, 1
    source, limit = open_source(settings.corpus.path, settings.corpus.split), settings.corpus.limit
    max_documents, n_chars = min(PROBE_DOCUMENTS, limit or PROBE_DOCUMENTS), 0
    for n_read, document in enumerate(read_documents(settings.corpus, source=source), start=1):
        n_chars += len(document.text or "") + CHARS_PER_TOKEN * (
            0 if document.input_ids is None else len(document.input_ids)
        )
        if n_chars >= PROBE_CHARS or n_read >= max_documents:
            total = source.approximate_length(n_read)
            return n_read, total if limit is None else min(limit, total)
    return 1, 1  # the corpus is smaller than a probe


def _time_rows(inputs: Inputs, states_every: int) -> tuple[TokenRows, CorpusMoments, list[Arrays], float]:
    """Run the model on more and more rows until a pass is long enough: rows, moments, batches, and seconds."""
    n_rows, seconds = 0, 0.0
    while n_rows < inputs.store.n_rows and seconds < (SLOW_SECONDS if n_rows == 1 else PROBE_SECONDS):
        n_rows = min(4 * n_rows or 1, inputs.store.n_rows)
        rows = inputs.store.rows(np.arange(n_rows))
        batches: list[Arrays] = []
        started = time.perf_counter()
        corpus = compute_moments(inputs.model_pass, rows, states_every=states_every, on_batch=batches.append)
        seconds = time.perf_counter() - started
    return rows, corpus, batches, seconds


def _estimate(inputs: Inputs, ratio: float, tokens_bytes: int, *, untrained: bool) -> tuple[str, Forecast]:
    """Time the first rows and units, multiply by `ratio` (of all documents to those read), and return the forecast."""
    store, settings, features = inputs.store, inputs.settings, inputs.settings.features
    n_documents, n_rows, n_tokens, n_positions = (
        round(ratio * n) for n in (store.n_documents, store.n_rows, store.n_tokens, store.n_loss_positions)
    )
    # the part of all positions that loop 1 reads; if it is the whole corpus, loop 2 reads stored features if they fit
    min_rows = features.sample_rows if counts_rows(features) else 1
    n_sampled = min(n_positions, max(features.sample_positions, min_rows * n_positions // n_rows))
    sampled_fraction = 0.0 if settings.like is not None else n_sampled / max(1, n_positions)
    cached_bytes = round(ratio * feature_bytes(inputs))
    use_cache = sampled_fraction == 1 and cached_bytes <= features.max_cache_mb * MEGABYTE

    rows, corpus, batches, pass_seconds = _time_rows(inputs, max(1, n_sampled // STATES))
    if not untrained and corpus.n_positions >= MIN_LOSS_POSITIONS:
        refuse_untrained(corpus.loss, inputs.model)
    n_units = len(inputs.unit_set.units)
    n_timed = min(n_units, PROBE_UNITS, len(rows)) if isinstance(rows, TokenRows) else len(rows)
    timed_units: Units = inputs.unit_tokens[:n_timed] if isinstance(rows, TokenRows) else rows
    measured = store.rows(np.arange(min(len(rows), CURVATURE_ROWS)))
    times = [time.perf_counter()]
    measure_curvature(inputs, corpus, measured, Progress())
    times.append(time.perf_counter())
    units = inputs.model_pass.units(timed_units, [f"unit {k}" for k in range(n_timed)])
    kernels = make_kernels(features.kernels, inputs.model, features, corpus)
    for kernel in kernels:
        kernel.prepare(units)
    times.append(time.perf_counter())
    shard = score_shard(
        inputs.model_pass, rows, kernels=kernels, keep_features=settings.keep_features, cached_batches=batches
    )
    times.append(time.perf_counter())
    curvature_seconds, unit_seconds, score_seconds = np.diff(times)
    n_passes = 1.0 if use_cache else 1.0 + sampled_fraction
    seconds = n_tokens / rows.n_tokens * (n_passes * pass_seconds + score_seconds * n_units / units.n_rows)
    seconds += unit_seconds * n_units / units.n_rows
    seconds += curvature_seconds * min(n_rows, CURVATURE_ROWS) / len(measured)

    # Disk: numbers of every row; moments; names and labels, as one table and shard by shard; features; token ids.
    width = sum(n_units if name.startswith("relevance_") else array.shape[1] for name, array in shard.arrays.items())
    disk = n_rows * width * np.dtype(settings.array_dtype).itemsize + tokens_bytes + cached_bytes * use_cache
    states_factor = min(store.n_loss_positions, STATES) / max(1, corpus.n_positions)  # other moments have a fixed size
    for name, array in corpus.arrays().items():
        disk += round(array.nbytes * (states_factor if name.startswith("states.") else 1))
    disk += round(2 * ratio * sum(len(parquet_bytes(store.table(k))) for k in range(store.n_shards)))
    disk += round(sum(array.nbytes for array in (shard.features or {}).values()) * n_tokens / rows.n_tokens)
    sampled = inputs.model_pass.sampled  # the gradients of all units are held in memory
    memory = peak_memory() + (0 if sampled is None else sampled.sample.size * (n_units - n_timed) * GRADIENT_BYTES)

    about = "about " if ratio > 1 else ""
    questions = Counter(unit.target for unit in inputs.unit_set.units)
    ranking = [name for name in features.kernels if not issubclass(kernel_class(name), Sketch)]
    line = (
        f"{about}{n_rows:,} rows and {n_tokens:,} tokens of {about}{n_documents:,} documents; "
        f"{', '.join(f'{n:,} questions of {target}' for target, n in questions.items())}; rows rank by "
        f"{', '.join(ranking)}"
    )
    return line, Forecast(seconds, memory, disk)
