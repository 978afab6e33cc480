"""`grasp build --forecast`: estimate size, time and disk of a build in seconds, from its first rows and a timed pass.

The first megabyte of the corpus is divided into rows. The model is run on a few rows and units (the probe), which is
timed; everything else is extrapolated in proportion. `ratio` is the number of documents of the corpus over those that
were read. Nothing is written to the artifact. Start with `forecast`.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import MANIFEST
from grasp.corpus.documents import documents_of
from grasp.corpus.row_store import TokenRows
from grasp.corpus.sources import open_source
from grasp.errors import ArtifactError
from grasp.kernels.kernel import counts_rows, kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Units
from grasp.pipeline.add_replay import forecast_added_replay, refuse_replay
from grasp.pipeline.build import (
    REQUIRED,
    complete_proxy_settings,
    needs_proxy,
    output_location,
    pop_overrides,
    split_replay_settings,
)
from grasp.pipeline.inputs import ON_DISK, Inputs, prepare_inputs
from grasp.pipeline.model_pass import Arrays, compute_moments, score_shard
from grasp.pipeline.pipeline import (
    MEGABYTE,
    Sample,
    feature_bytes,
    open_moment_source,
    refuse_untrained,
    resolve_settings,
)
from grasp.pipeline.proxy import forecast_proxy
from grasp.pipeline.replay_plan import ReplayForecast, ReplayPlan, forecast_replay, plan_replay
from grasp.progress import Progress, Silent
from grasp.settings import BuildSettings, ReplaySettings, build_settings
from grasp.store.contents import parquet_bytes
from grasp.text import duration_text, size_text
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.yaml_files import plain_settings, require_flags, set_setting, set_settings

PROBE_CHARS = 1 << 20  # characters of the corpus that are divided into rows
PROBE_DOCUMENTS = 4_096  # maximum number of documents that are read
CHARS_PER_TOKEN = 4  # characters per token, for a corpus of token ids
PROBE_SECONDS = 0.5  # minimum duration of the timed pass, unless it has all rows; each has four times the rows before
SLOW_SECONDS = 4.0  # duration of the pass over the first row after which no longer pass is timed
PROBE_UNITS = 64  # maximum number of units that the probe is scored against
MIN_LOSS_POSITIONS = 64  # positions with loss below which the loss does not show whether the model is trained


def forecast(
    out: Path | str,
    settings: Mapping[str, Any] | Path | str,
    *,
    untrained: bool = False,
    replay: bool = False,
    check: bool = False,
    recipe: Path | str | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> str:
    """Estimate what `build` would do: rows, questions, kernels, time and disk, one line each.

    Args:
        out: directory for the artifact; nothing is written to it.
        settings: settings of `build`, which name all inputs.
        untrained: accept a model that predicts the first rows no better than chance.
        replay: also forecast a replay, see `build`.
        check: include the check of the replay, see `build`.
        recipe: training of the replay, see `build`.
        progress: receives stages and notes.
    Raises:
        GraspError: an error that would stop the build before its first pass, or the artifact is finished.
    """
    raw_settings = set_settings(plain_settings(settings), {"replay.check": 1 if check else None})
    replay_recipe, replay_settings = split_replay_settings(raw_settings, recipe, use_replay=replay)
    directory = output_location(out).directory
    if replay and not {"corpus", "targets"} & raw_settings.keys() and (directory / MANIFEST).exists():
        return _replay_lines(
            *forecast_added_replay(directory, replay_recipe, replay_settings, pop_overrides(raw_settings))
        )
    with tempfile.TemporaryDirectory(prefix="grasp-forecast-") as name:
        temporary, first_line = Path(name), ""
        if needs_proxy(raw_settings, ON_DISK, None):
            first_line, untrained = (
                f"training first: {_forecast_proxy_training(raw_settings, temporary / 'proxy')}\n",
                True,
            )
        require_flags(raw_settings, REQUIRED, "build")
        build_config = resolve_settings(build_settings(raw_settings), ON_DISK)
        if replay:
            refuse_replay(build_config, replay_settings)
        if (directory / MANIFEST).exists():
            raise ArtifactError(f"{directory}: is finished, so there is nothing to forecast; choose another --out")
        n_read, n_documents = _first_documents(build_config)
        if n_read < n_documents:
            corpus = build_config.corpus.model_copy(update={"limit": n_read})
            build_config = build_config.model_copy(update={"corpus": corpus})
            progress = None  # the notes of `prepare_inputs` would be about the first documents only
        inputs = prepare_inputs(build_config, temporary / "tokens", progress or Silent())
        if inputs.settings.like is not None:
            open_moment_source(inputs, inputs.settings.like)
        tokens_bytes = sum(file.stat().st_size for file in (temporary / "tokens").iterdir())
        probe = _timed_probe(inputs, untrained=untrained)
        ratio = n_documents / n_read
        report = first_line + _report(inputs, probe, ratio, tokens_bytes)
        if replay:
            report += "\n" + _replay_lines(*_replay_forecast(inputs, replay_recipe, replay_settings, ratio))
        return report


def _forecast_proxy_training(raw_settings: dict[str, Any], out: Path) -> str:
    """Forecast the training of the model of a build that has none; put an untrained copy of it into `raw_settings`."""
    settings = complete_proxy_settings(raw_settings, out)
    n_read, n_documents = _first_documents(settings)
    is_part = n_read < n_documents
    corpus = settings.corpus.model_copy(update={"limit": n_read}) if is_part else settings.corpus
    model, line = forecast_proxy(out, corpus, settings.model.tokenizer, n_documents / n_read)
    set_setting(raw_settings, "model.path", str(model))
    return line


def _first_documents(settings: BuildSettings) -> tuple[int, int]:
    """Return the number of documents to read, and an estimate of that of the corpus; (1, 1) if all are read."""
    if settings.model.reader is not None:
        return 1, 1
    source, limit = open_source(settings.corpus.path, settings.corpus.split), settings.corpus.limit
    max_documents, n_chars = min(PROBE_DOCUMENTS, limit or PROBE_DOCUMENTS), 0
    for n_read, document in enumerate(documents_of(source, settings.corpus), start=1):
        n_chars += len(document.text or "") + CHARS_PER_TOKEN * (
            0 if document.input_ids is None else len(document.input_ids)
        )
        if n_chars >= PROBE_CHARS or n_read >= max_documents:
            total = source.approximate_length(n_read)
            return n_read, total if limit is None else min(limit, total)
    return 1, 1  # the corpus is smaller than a probe


def _replay_forecast(
    inputs: Inputs, recipe: FineTuningRecipe | None, settings: ReplaySettings, ratio: float
) -> tuple[ReplayPlan, ReplayForecast]:
    """Plan a replay, and forecast it by the gradient of one batch."""
    assert isinstance(inputs.model, ReferenceModel)
    n_rows, longest = round(ratio * inputs.store.n_rows), int(inputs.store.lengths().max())
    plan = plan_replay(inputs.model, str(inputs.settings.train), recipe, settings, n_rows=n_rows, context=longest)
    return plan, forecast_replay(plan, inputs.store, n_rows, len(inputs.unit_set.targets))


def _replay_lines(plan: ReplayPlan, forecast: ReplayForecast) -> str:
    """Return the differences of a replay from its recipe, and its price, one line each."""
    return "\n".join(f"replay: {line}" for line in (*plan.notes, forecast))


@dataclass(frozen=True)
class _Probe:
    """Costs of a pass over a few rows and units, extrapolated to all units but not to all rows.

    Attributes:
        n_tokens: tokens of the rows.
        pass_seconds: time of the model and the moments on these rows.
        unit_seconds: time of the model on all units, and of preparing the kernels for them.
        score_seconds: time to score these rows against all units.
        widths: numbers per row, by array.
        moment_bytes: bytes of the moments of the whole sample.
        feature_bytes: bytes of the features of these rows as an artifact stores them.
    """

    n_tokens: int
    pass_seconds: float
    unit_seconds: float
    score_seconds: float
    widths: Mapping[str, int]
    moment_bytes: int
    feature_bytes: int


def _timed_probe(inputs: Inputs, *, untrained: bool) -> _Probe:
    """Run the model on more and more rows until a pass is long enough to be timed, and score them."""
    model_pass, features = inputs.model_pass, inputs.settings.features
    sample = Sample.draw(inputs.store.loss_counts(), features)
    n_rows, pass_seconds = 0, 0.0
    while n_rows < inputs.store.n_rows and pass_seconds < (SLOW_SECONDS if n_rows == 1 else PROBE_SECONDS):
        n_rows = min(4 * n_rows or 1, inputs.store.n_rows)
        rows = inputs.store.rows(np.arange(n_rows))
        cached_batches: list[Arrays] = []
        started = time.perf_counter()
        corpus = compute_moments(model_pass, rows, states_every=sample.states_every, on_batch=cached_batches.append)
        pass_seconds = time.perf_counter() - started
    if not untrained and corpus.n_positions >= MIN_LOSS_POSITIONS:
        refuse_untrained(corpus.loss, inputs.model)

    # no more tokens of units than of rows; images take equally long, so that rows stand in for units
    n_units, tokens = len(inputs.unit_set.units), inputs.unit_tokens
    lengths = np.cumsum([len(unit.input_ids) for unit in tokens])
    n_timed = int(np.clip(np.searchsorted(lengths, rows.n_tokens), 1, PROBE_UNITS)) if tokens else len(rows)
    started = time.perf_counter()
    timed_units: Units = rows if not isinstance(rows, TokenRows) else tokens[:n_timed]
    units = model_pass.units(timed_units, [f"unit {k}" for k in range(n_timed)])
    kernels = make_kernels(features.kernels, inputs.model, features, corpus)
    for kernel in kernels:
        kernel.prepare(units)
    unit_seconds = time.perf_counter() - started
    started = time.perf_counter()
    shard = score_shard(
        model_pass, rows, kernels=kernels, keep_features=inputs.settings.keep_features, cached_batches=cached_batches
    )
    score_seconds = time.perf_counter() - started
    units_factor = n_units / units.n_rows
    states_factor = min(inputs.store.n_loss_positions, STATES) / max(1, corpus.n_positions)
    return _Probe(
        n_tokens=rows.n_tokens,
        pass_seconds=pass_seconds,
        unit_seconds=unit_seconds * units_factor,
        score_seconds=score_seconds * units_factor,
        widths={
            name: n_units if name.startswith("relevance_") else array.shape[1] for name, array in shard.arrays.items()
        },
        moment_bytes=sum(
            # the number of stored states grows with the sample up to `STATES`; other moments have a fixed size
            round(array.nbytes * (states_factor if name.startswith("states.") else 1))
            for name, array in corpus.arrays().items()
        ),
        feature_bytes=sum(array.nbytes for array in (shard.features or {}).values()),
    )


@dataclass(frozen=True, slots=True)
class _CorpusSize:
    """Estimated size of the whole corpus."""

    n_documents: int
    n_rows: int
    n_tokens: int
    n_loss_positions: int


def _report(inputs: Inputs, probe: _Probe, ratio: float, tokens_bytes: int) -> str:
    """Format the forecast.

    Args:
        inputs: inputs of a build on the first documents.
        probe: costs that were measured.
        ratio: number of documents of the corpus over those that were read.
        tokens_bytes: bytes of the rows of the first documents on disk.
    """
    store, settings = inputs.store, inputs.settings
    size = _CorpusSize(
        *(round(ratio * n) for n in (store.n_documents, store.n_rows, store.n_tokens, store.n_loss_positions))
    )
    sampled_fraction = _sampled_fraction(inputs, size, ratio)
    cached_bytes = round(ratio * feature_bytes(inputs))
    fits = cached_bytes <= settings.features.max_cache_mb * MEGABYTE
    use_cache = sampled_fraction == 1 and fits  # the features of loop 1 are stored, see `pipeline.can_cache`
    passes = 1.0 if use_cache else 1.0 + sampled_fraction
    seconds = (passes * probe.pass_seconds + probe.score_seconds) * size.n_tokens / probe.n_tokens + probe.unit_seconds

    # Disk: numbers of every row, its names and labels (as one table, and shard by shard), moments, stored features.
    finished = size.n_rows * sum(probe.widths.values()) * np.dtype(settings.array_dtype).itemsize + probe.moment_bytes
    finished += round(2 * ratio * sum(len(parquet_bytes(store.table(k))) for k in range(store.n_shards)))
    finished += round(probe.feature_bytes * size.n_tokens / probe.n_tokens)
    temporary, tokens_bytes = cached_bytes if use_cache else 0, round(ratio * tokens_bytes)
    if settings.keep_tokens:
        finished += tokens_bytes
    else:
        temporary += tokens_bytes

    about = "about " if ratio > 1 else ""
    questions = Counter(unit.target for unit in inputs.unit_set.units)
    ranking = [name for name in settings.features.kernels if not issubclass(kernel_class(name), Sketch)]
    more_disk = f", and {size_text(temporary)} more until it is finished" if temporary else ""
    return (
        f"rows: {about}{size.n_rows:,} of {about}{size.n_documents:,} documents\n"
        f"questions: {', '.join(f'{n:,} of {target}' for target, n in questions.items())}\n"
        f"kernels: {', '.join(ranking)}\n"
        f"time: {about}{size.n_tokens:,} tokens on {inputs.model.device}: about {duration_text(seconds)}, timed on "
        f"{probe.n_tokens:,} tokens\n"
        f"disk: about {size_text(finished)}{more_disk}"
    )


def _sampled_fraction(inputs: Inputs, size: _CorpusSize, ratio: float) -> float:
    """Return the fraction of the positions of the corpus that loop 1 reads; 0 if moments are copied."""
    settings, features = inputs.settings, inputs.settings.features
    if settings.like is not None:
        return 0.0
    sample = Sample.draw(inputs.store.loss_counts(), features)
    n_positions = sample.n_positions
    if sample.is_whole and ratio > 1:  # the documents that were read are too few to fill the sample
        min_rows = features.sample_rows if counts_rows(features) else 1
        min_positions = max(features.sample_positions, min_rows * size.n_loss_positions // size.n_rows)
        n_positions = min(size.n_loss_positions, min_positions)
    return n_positions / max(1, size.n_loss_positions)
