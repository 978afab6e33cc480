"""Build an artifact: run the reference model over the corpus, and store a score of each row for each unit.

A row is a training sequence of the corpus; a unit is one scored element of a target, such as a question. A kernel
computes the scores ("relevance") from features that the model computes for rows and units. It needs moments (means and
covariances) of these features over the corpus. They are estimated first, so a build has two loops over the rows:

    corpus  -> tokenised once into the row store, in shards                                    `inputs.prepare_inputs`
    loop 1  -> a sample of rows: update the moments of every kernel                            `estimate_moments`
    units   -> passes of the model over the questions; kernel.prepare(units)
    loop 2  -> all rows, shard after shard: score the rows by every kernel, write the shard    `write_shards`
    finish  -> manifest                                                                        `finish_artifact`

If the sample is the whole corpus, loop 1 stores the features of its batches, and loop 2 reads them instead of running
the model. An interrupted build is resumed by the same call: the moments are in the work directory once loop 1 is
finished, and finished shards in the artifact.

The calling process reads the corpus, merges the moments and writes. The model runs in it or in Ray workers; a worker
that dies loses only the rows that it was working on. Start with `build_artifact`.

Shape letters: N rows, D columns of a sketch. Labels such as eq:feature-sketch are those of the paper, see
docs/paper_map.md.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

import grasp
from grasp.arrays import I64
from grasp.artifact.manifest import BUILD, FEATURES, LOSS_TOKENS, MANIFEST, RUN, SIGNED_MANIFEST, TOKENS, ArrayFiles
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.corpus.row_store import RowStore, TokenRows
from grasp.errors import ArtifactError, ModelError, SettingsError
from grasp.files import differences, discard
from grasp.kernel_table import BuiltRule
from grasp.kernels.gradient import CURVATURE_ROWS, HORIZON, Curvature
from grasp.kernels.kernel import CorpusMoments, Kernel, counts_rows, kernel_class, make_kernels, needs_backward
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import check_readable, is_adapter, recorded_train
from grasp.models.forward_pass import Reference
from grasp.pipeline.inputs import ON_DISK, InMemory, Inputs, identity_changes, identity_of, prepare_inputs
from grasp.pipeline.model_pass import (
    Arrays,
    BatchCache,
    ScoredShard,
    Workers,
    compute_moments,
    row_examples,
    score_shard,
)
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.pipeline.stored_inputs import unit_arrays, unit_table
from grasp.progress import Progress
from grasp.seeds import stream
from grasp.settings import BuildSettings, FeatureSettings
from grasp.yaml_files import read_yaml, write_yaml

# Losses as a fraction of ln V, the loss of guessing; that of a unigram model is near 0.7.
UNTRAINED_FRACTION = 0.95  # above it a model counts as untrained, and the build is refused
UNSKILLED_FRACTION = 0.8  # above it a warning is printed if the model is to be trained further
CHUNK_ROWS = 64  # rows of the sample whose moments are accumulated by one job
MEGABYTE = 1 << 20
FORWARD_BACKWARD_COST = 3  # of a forward and a backward pass, in forward passes
BATCH_ENDS = "batch_cache.ends"  # `BatchCache.ends`, stored with the moments of an unfinished build
NO_GRADIENT_COUNT = "relevance_gradient.none"  # sum over all rows: number of rows without a finite gradient

StartTimes = tuple[float, float]  # wall-clock and CPU time in seconds


def build_artifact(
    settings: BuildSettings,
    out: Path,
    *,
    progress: Progress | None = None,
    cluster: ClusterSpec | None = None,
    in_memory: InMemory = ON_DISK,
    must_be_trained: bool = False,
) -> Path:
    """Build the artifact `out`, or resume a build with the same settings.

    Args:
        settings: settings of the build.
        out: directory of the artifact.
        progress: receives stages, notes and numbers of rows. Default: none.
        cluster: Ray workers that run the model. Default: this process. A build may be resumed elsewhere.
        in_memory: model, corpus and targets that are passed as objects instead of paths.
        must_be_trained: refuse a language model that predicts the sample no better than chance.
    Returns:
        `out`.
    Raises:
        GraspError: invalid input; finished shards remain, and the same call resumes the build.
    """
    if cluster is not None and in_memory.model is not None:
        raise SettingsError("model: got an object, but workers load it from disk; save it and pass its directory")
    progress = progress or Progress()
    start_times = time.perf_counter(), time.process_time()
    settings = resolve_settings(settings, in_memory.model)
    with lock_artifact(out):
        # whether moments or shards exist, which are never overwritten by another build
        has_work = (out / "work").exists() or (out / BUILD).exists()
        is_resumed = claim_settings(settings, out, progress, has_work=has_work)
        if (out / MANIFEST).exists():
            clean(settings, out)  # the process may have been killed after the manifest was written
            return out
        inputs = prepare_inputs(settings, out / TOKENS, progress, in_memory=in_memory, replace=not has_work)
        identity_json = json.dumps(inputs.identity, sort_keys=True).encode()
        work = out / "work" / hashlib.blake2b(identity_json, digest_size=8).hexdigest()
        workers_context: AbstractContextManager[Workers] = nullcontext(Workers(inputs.model_pass))
        if cluster is not None:
            from grasp.pipeline.engine import ray_workers  # noqa: PLC0415 - most builds need no cluster

            workers_context = ray_workers(cluster, inputs.settings, inputs.units)
        with workers_context as workers:
            kernels, batch_cache = estimate_moments(
                inputs, workers, work, progress, may_cache=cluster is None, must_be_trained=must_be_trained
            )
            for kernel in kernels:
                kernel.prepare(inputs.units)
            writer = write_shards(inputs, workers, kernels, out, batch_cache, progress)
        finish_artifact(inputs, kernels, writer, None if is_resumed else start_times, progress)
        clean(inputs.settings, out)
    return out


# -------------------------------------------------------------------- loop 1: moments


@dataclass(frozen=True)
class Sample:
    """A uniform sample of whole rows, from which the moments are estimated.

    Attributes:
        row_index: indices of the rows, ascending.
        n_positions: number of positions of these rows that carry loss.
        is_whole: whether the sample has all rows.
        states_every: every `states_every`-th hidden state is stored, so that about `STATES` of them are.
    """

    row_index: I64
    n_positions: int
    is_whole: bool
    states_every: int

    @classmethod
    def draw(cls, loss_counts_N: NDArray[np.int64], settings: FeatureSettings) -> Self:
        """Draw rows until they have `sample_positions` positions, and `sample_rows` rows if moments are over rows."""
        order_N = stream(settings.seed, "moments", "token").permutation(len(loss_counts_N))
        total_N = np.cumsum(loss_counts_N[order_N])  # positions of the first rows of the order
        n_rows = int(np.searchsorted(total_N, settings.sample_positions, side="left")) + 1
        min_rows = settings.sample_rows if counts_rows(settings) else 1
        index = np.sort(order_N[: max(n_rows, min_rows)])
        n_positions = int(loss_counts_N[index].sum())
        return cls(index, n_positions, len(index) == len(loss_counts_N), max(1, n_positions // STATES))


def estimate_moments(
    inputs: Inputs, workers: Workers, work: Path, progress: Progress, *, may_cache: bool, must_be_trained: bool
) -> tuple[list[Kernel], BatchCache | None]:
    """Run loop 1: return the kernels with the moments of a sample of rows, and its batches if they are cached.

    The moments are written to the work directory, from which a resumed build reads them. With the setting `like` they
    are copied from another artifact instead of being estimated, so that both artifacts can be merged.

    Args:
        may_cache: cache the batches, if loop 1 reads every row and its features fit in `features.max_cache_mb`.
    """
    settings, store, model = inputs.settings, inputs.store, inputs.model
    sample = Sample.draw(store.loss_counts(), settings.features)
    fits = feature_bytes(inputs) <= settings.features.max_cache_mb * MEGABYTE
    use_cache = may_cache and sample.is_whole and fits and settings.like is None
    # tokens that the model reads in each stage, to estimate the remaining time
    n_tokens = store.n_tokens * (FORWARD_BACKWARD_COST if needs_backward(settings.features.kernels) else 1)
    sampled_fraction = 0 if settings.like is not None else sample.n_positions / max(1, store.n_loss_positions)
    stages = {"moments": round(n_tokens * sampled_fraction), "rows scored": 0 if use_cache else n_tokens}
    progress.plan({stage: n for stage, n in stages.items() if n})
    corpus = CorpusMoments(model.vocab_size, sample.states_every)
    kernels = make_kernels(settings.features.kernels, model, settings.features, corpus)
    moment_file = ArrayFiles(work / "moments")  # one file, with number 0
    if settings.like is not None:
        if not moment_file.has(0):  # copied when the build begins, since the other artifact may be deleted later
            moments = dict(open_moment_source(inputs, settings.like).moments)
            corpus.load(moments)
            if must_be_trained:
                refuse_untrained(corpus.loss, model)
            moment_file.write(0, moments)
        progress.note(f"moments are copied from {settings.like}")
    batch_cache: BatchCache | None = None
    if moment_file.has(0):
        moments = moment_file.read(0)
        corpus.load(moments)
        if use_cache and BATCH_ENDS in moments:
            batch_cache = BatchCache(work / "batches", moments[BATCH_ENDS].tolist())
    else:
        batch_cache = BatchCache(work / "batches") if use_cache else None
        accumulate_moments(inputs, workers, sample, corpus, batch_cache, progress, must_be_trained=must_be_trained)
        measure_curvature(inputs, corpus, curvature_rows(store, settings.features), progress)
        ends = {} if batch_cache is None else {BATCH_ENDS: np.array(batch_cache.ends)}
        moment_file.write(0, corpus.arrays() | ends)
    if isinstance(model, ReferenceModel):
        for line in training_notes(settings, corpus.loss, model.vocab_size):
            progress.note(line)
    if inputs.model_pass.sampled is not None:
        progress.note(inputs.model_pass.sampled.describe())
    return kernels, batch_cache


def accumulate_moments(
    inputs: Inputs,
    workers: Workers,
    sample: Sample,
    corpus: CorpusMoments,
    batch_cache: BatchCache | None,
    progress: Progress,
    *,
    must_be_trained: bool,
) -> None:
    """Run the model on the sample, and add its moments to `corpus`.

    Moments are accumulated per chunk of rows and merged in the order of the rows, so that their last digits do not
    depend on the number of workers.

    Args:
        batch_cache: receives the batches; the chunks are then the shards. None: batches are not stored.
        must_be_trained: refuse a language model by its loss on the first chunk.
    """
    store = inputs.store
    progress.stage("moments", rows=len(sample.row_index), tokens=int(store.lengths()[sample.row_index].sum()))
    if sample.is_whole:
        chunks = ((k, store.shard(k)) for k in range(store.n_shards))
    else:
        starts = range(0, len(sample.row_index), CHUNK_ROWS)
        chunks = ((k, store.rows(sample.row_index[start : start + CHUNK_ROWS])) for k, start in enumerate(starts))
    options = {"states_every": sample.states_every, "on_batch": None if batch_cache is None else batch_cache.write}
    for k, moments in workers.run(compute_moments, chunks, progress.advance, in_order=True, **options):
        corpus.merge(moments)
        if k == 0 and must_be_trained:
            refuse_untrained(corpus.loss, inputs.model)
        if batch_cache is not None:
            batch_cache.ends.append(batch_cache.n_batches)


def curvature_rows(store: RowStore, settings: FeatureSettings) -> TokenRows:
    """Return the rows that the curvature is measured on, drawn with the seed of the settings."""
    order_N = stream(settings.seed, "curvature").permutation(store.n_rows)
    return store.rows(np.sort(order_N[:CURVATURE_ROWS]))


def measure_curvature(inputs: Inputs, corpus: CorpusMoments, rows: TokenRows, progress: Progress) -> None:
    """Measure the geometry of the training, and the curvature at some rows, if a kernel needs them."""
    curvature, settings, sampled = corpus.by_type.get(Curvature), inputs.settings.features, inputs.model_pass.sampled
    if not isinstance(curvature, Curvature):
        return
    assert sampled is not None
    assert settings.learning_rate_sum is not None
    assert settings.batch_rows is not None
    learning_rate_sum = settings.learning_rate_sum
    if rows.split_N is not None:
        # The curvature of the DPO loss of a pair is beta^2 / 4 times that of a difference of log-likelihoods, so that
        # in Adam's coordinates x is beta / 2 times that of a fine-tuning, and counts as 0.
        rows, learning_rate_sum = rows.sides(), 0.0
    progress.stage("curvature", rows=len(rows), tokens=rows.n_tokens)
    examples = row_examples(rows, settings)
    training: dict[str, Any] = {"learning_rate_sum": learning_rate_sum, "batch_rows": settings.batch_rows}
    curvature.measure(sampled, examples, **training, seed=settings.seed, advance=progress.advance)


def feature_bytes(inputs: Inputs) -> int:
    """Estimate the bytes of the features of all rows, as `BatchCache` stores them."""
    store, model_pass = inputs.store, inputs.model_pass
    settings = model_pass.settings
    # hidden state in float32; index and probability of each coordinate; label, row, token and loss
    position_bytes = 4 * model_pass.model.hidden_size + 8 * (settings.top_k + 1) + 16
    n_coordinates = 0 if model_pass.sampled is None else model_pass.sampled.sample.size
    return store.n_loss_positions * position_bytes + 2 * n_coordinates * store.n_rows  # bfloat16


def open_moment_source(inputs: Inputs, like: str) -> ArtifactReader:
    """Open the artifact `like`, whose moments are to be copied, and check that they are valid for these inputs."""
    artifact = ArtifactReader.open(like)
    names = inputs.identity["fingerprints"].keys() - {"corpus", "targets"}
    if changed := identity_changes(identity_of(artifact), inputs.identity, names):
        raise ArtifactError(
            f"like: {artifact.location} was built with another model or other features, so its moments are not valid "
            f"here: {'; '.join(changed)}; use the same model and features"
        )
    return artifact


def refuse_untrained(loss: float, model: Reference) -> None:
    """Refuse a language model whose mean loss, in nats per token, is no better than chance."""
    if not isinstance(model, ReferenceModel):
        return
    chance = math.log(model.vocab_size)
    if loss > UNTRAINED_FRACTION * chance:
        raise ModelError(
            f"model: looks untrained: its loss on the first rows of the sample is {loss:.1f} nats per token; guessing "
            f"gives {chance:.1f}. Use a trained checkpoint (for token ids, the model whose tokenizer produced them), "
            "or continue with --untrained"
        )


def training_notes(settings: BuildSettings, loss: float, vocab_size: int) -> Iterator[str]:
    """Yield what will be trained and which kernels rank rows, and a warning if the loss of the model contradicts it."""
    chance = math.log(vocab_size)
    kernels = [name for name in settings.features.kernels if not issubclass(kernel_class(name), Sketch)]
    model = "this model, further" if settings.train == "further" else "a new model, from scratch"
    yield (f"to be trained: {model}; rows rank by {', '.join(kernels)}; loss on the corpus: {loss:.1f} nats per token")
    if settings.train == "further" and loss / chance > UNSKILLED_FRACTION:
        yield (
            f"warning: that loss is {loss / chance:.0%} of guessing ({chance:.1f}), which is high for a model that is "
            "trained further. If a new model will be trained, use --train new"
        )


# -------------------------------------------------------------------- loop 2: scores


def write_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    out: Path,
    batch_cache: BatchCache | None,
    progress: Progress,
) -> ArtifactWriter:
    """Run loop 2: score and write the shards that are left, from cached batches if there are; return the writer."""
    settings, store = inputs.settings, inputs.store
    writer = ArtifactWriter.open(
        out,
        identity=inputs.identity,
        n_rows=store.n_rows,
        shard_rows=settings.shard_rows,
        arrays={kernel.array: kernel.spec(inputs.units) for kernel in kernels},
        dtype=settings.array_dtype,
    )
    sketches = [kernel.array for kernel in kernels if isinstance(kernel, Sketch)]
    feature_files = ArrayFiles(out / FEATURES) if settings.keep_features else None
    read_cached = None if batch_cache is None else batch_cache.read
    for k, shard in scored_shards(inputs, workers, kernels, writer.left, read_cached, progress):
        if feature_files is not None and shard.features is not None:
            feature_files.write(k, shard.features)
        table = store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
        if store.masked:
            table = table.append_column(LOSS_TOKENS, pa.array(store.loss_counts(k), pa.int32()))
        sums = {f"{name}.square": (shard.arrays[name].astype(np.float64) ** 2).sum(axis=0) for name in sketches}
        if "relevance_gradient" in shard.arrays:
            no_gradient_N = ~shard.arrays["relevance_gradient"].any(axis=1)
            sums[NO_GRADIENT_COUNT] = np.array([no_gradient_N.sum()], dtype=np.float64)
            if no_gradient_N.any():
                row_ids = table["row_id"].filter(pa.array(no_gradient_N)).to_pylist()
                progress.note(
                    f"{len(row_ids)} rows have no finite gradient; their relevance by gradient is 0: "
                    f"{', '.join(row_ids[:5])}"
                )
        writer.write_shard(k, shard.arrays, table, sums)
    return writer


def finish_artifact(
    inputs: Inputs,
    kernels: Sequence[Kernel],
    writer: ArtifactWriter,
    start_times: StartTimes | None,
    progress: Progress,
) -> None:
    """Write units, moments and the manifest, which complete the artifact; an interrupted build has no times."""
    sums = writer.sums()
    seconds = None
    if start_times is not None:
        seconds = {"wall": time.perf_counter() - start_times[0], "cpu": time.process_time() - start_times[1]}
    store, model = inputs.store, inputs.model
    sketches = [kernel.array for kernel in kernels if isinstance(kernel, Sketch)]
    made_by = {
        "program": f"grasp {grasp.__version__}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(model.device),
        "dtype": inputs.identity["dtype"],
    }
    skipped: dict[str, Any] = {"rows": asdict(store.skipped), "columns": list(store.ignored_columns)}
    if NO_GRADIENT_COUNT in sums:
        skipped["gradients"] = int(sums[NO_GRADIENT_COUNT][0])
    details = {
        "model": type(model.model).__name__,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "n_tokens": store.n_tokens,
        "n_documents": store.n_documents,
        "labels": list(store.label_columns),
        "columns": store.details.get("columns"),
        "reader": inputs.settings.model.reader,
        **({} if isinstance(model, ReferenceModel) else model.details),
        "loss": "nats per token, mean over the positions that the head was applied to",
        "build_seconds": seconds,
        # Relative paths in the settings are relative to the current directory, which is stored relative to the
        # artifact, so that both can be moved together.
        "built_in": os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(writer.root)),
        "rule": asdict(built_rule(inputs.settings, kernels)),
    }
    writer.finish(
        manifest={
            "made_by": made_by,
            "fingerprints": inputs.identity["fingerprints"],
            "settings": inputs.settings.model_dump(mode="json"),
            "skipped": skipped,
            "details": details,
        },
        moments=(kernels[0].corpus.arrays() if kernels else {}) | unit_arrays(inputs, kernels, progress),
        units=unit_table(inputs),
        gains={name: sketch_gain(sums[f"{name}.square"], store.n_rows) for name in sketches},
        rows_kept=inputs.settings.keep_tokens,
    )


def built_rule(settings: BuildSettings, kernels: Sequence[Kernel]) -> BuiltRule:
    """Return how predictions combine the kernels of a build; `ArtifactReader.rule` reads it from the manifest."""
    ranking = [name for name in settings.features.kernels if not issubclass(kernel_class(name), Sketch)]
    learning_rate_sum = settings.features.learning_rate_sum or 0.0
    curvature = kernels[0].corpus.by_type.get(Curvature) if kernels else None
    if isinstance(curvature, Curvature) and settings.like is not None:
        learning_rate_sum = curvature.horizon / HORIZON  # with `like` that of the other artifact
    if is_adapter(settings.model.path) or (settings.recipe or {}).get("lora_r") is not None:
        learning_rate_sum = 0.0
    return BuiltRule.of(ranking, learning_rate_sum)


def scored_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    shards: Sequence[int],
    read_cached: Callable[[int], Iterable[Arrays]] | None,
    progress: Progress,
) -> Iterator[tuple[int, ScoredShard]]:
    """Yield the number and the scores of shards as they finish; without `read_cached` the model is run."""
    store, keep_features = inputs.store, inputs.settings.keep_features
    n_rows = round(store.n_rows * len(shards) / store.n_shards)
    if read_cached is not None:
        progress.stage("stored rows scored", rows=n_rows, tokens=None)
        for k in shards:
            rows, cached_batches = store.shard(k), read_cached(k)
            shard = score_shard(
                inputs.model_pass, rows, kernels=kernels, keep_features=keep_features, cached_batches=cached_batches
            )
            yield k, shard
            progress.advance(len(rows), 0)
        return
    if shards:
        n_tokens = round(store.n_tokens * len(shards) / store.n_shards)
        progress.stage("rows scored", rows=n_rows, tokens=n_tokens)
    chunks = ((k, store.shard(k)) for k in shards)
    yield from workers.run(score_shard, chunks, progress.advance, kernels=kernels, keep_features=keep_features)


def sketch_gain(square_D: NDArray[np.float64], n_rows: int) -> float:
    """Return the factor of a sketch (c_h, c_r of the paper) that makes its mean squared norm over the corpus 1.

    It is 1 if the sketch of every row is zero. Source: eq:feature-sketch.

    Args:
        square_D: sum of squares of each column of the sketch over all rows.
        n_rows: number of rows of the corpus.
    """
    mean = float(square_D.sum()) / n_rows
    return 1.0 / float(np.sqrt(mean)) if mean > 0 else 1.0


# -------------------------------------------------------------------- settings, and the directory of a build


def resolve_settings(settings: BuildSettings, model: Reference | None = None) -> BuildSettings:
    """Resolve `train` (further or new), and the kernels that follow from it.

    Args:
        model: a model that is passed as an object; None: that at `settings.model.path`.
    Raises:
        SettingsError: `train` cannot be inferred from the checkpoint, or a kernel does not exist.
    """
    if settings.model.reader is not None:
        return settings.model_copy(update={"features": settings.features.decided(None)})
    train = settings.train or recorded_train(settings.model, None if model is None else model.model)
    if train is None:
        if model is None:
            check_readable(settings.model.path)  # report first that it is not a causal LM
        raise SettingsError(
            "--train: missing; pass `--train further` if this model will be trained on the corpus (fine-tuning), or "
            "`--train new` for a new model from scratch. Which rows help depends on this, and the checkpoint does not "
            "record it"
        )
    if settings.corpus.form == "preference" and train == "new":
        raise SettingsError(
            "--loss dpo: trains a model further on preference pairs, but --train is new; pass --train further"
        )
    features, model_settings = settings.features.decided(train), settings.model
    for name in features.kernels:
        kernel_class(name)  # raises an error if there is no such kernel
    if model_settings.adapter is None and is_adapter(model_settings.path):
        adapter = "apart" if "gradient" in features.kernels else "folded"
        model_settings = model_settings.model_copy(update={"adapter": adapter})
    return settings.model_copy(update={"train": train, "features": features, "model": model_settings})


def claim_settings(settings: BuildSettings, out: Path, progress: Progress, *, has_work: bool) -> bool:
    """Write the settings to run.yaml, or check that the build that was begun in `out` has the same settings.

    Settings of a build that failed before the model ran, e.g. because of a misspelt target, are replaced.

    Returns:
        Whether a build was begun here before.
    """
    path, current, problem = out / RUN, settings.model_dump(mode="json"), ""
    was_begun = path.exists() and any(out.glob(f"{TOKENS}/shard-*.json"))  # a warm-up writes rows, but no run.yaml
    finished = (out / MANIFEST).exists()
    if not has_work and not finished:
        if not path.exists() or read_yaml(path) != current:  # equal settings remain: the file may have comments
            write_yaml(current, path)
        return was_begun
    changed: list[str] = []
    if path.exists():
        changed = list(differences(read_yaml(path), current))
    elif finished:  # a published copy has no run.yaml; unset values were resolved from model and corpus
        changed = list(differences(SIGNED_MANIFEST.read(out).settings, current, ignore_unset=True))
    else:
        problem = f"has no {RUN}, so its settings are unknown; choose another --out"
    if changed:
        state = "a finished artifact, built" if finished else "an unfinished build, begun"
        problem = (
            f"holds {state} with other settings: {'; '.join(changed)}; choose another --out, use the old settings, or "
            f"delete {out}"
        )
    if problem:
        raise ArtifactError(f"{out}: {problem}")
    progress.note(f"{out}: finished with these settings; nothing to do" if finished else f"{out}: resuming")
    return True


def clean(settings: BuildSettings, out: Path) -> None:
    """Remove the work directory, and the tokens unless the settings keep them."""
    for name in ("work",) if settings.keep_tokens else ("work", "tokens"):
        discard(out / name)
