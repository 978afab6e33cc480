"""A build: two loops over the rows, resumable at any moment. Start with `build_artifact`.

    corpus  -> tokenised once into the row store; its identity is computed on the way          `inputs.prepare`
    units   -> one pass
    loop 1  -> a sample of rows, one pass each: every kernel observes the batches
               kernel.prepare(units)
    loop 2  -> shard after shard, one pass a row: every kernel scores the batches; shards are written atomically
    finish  -> manifest

If the sample is the whole corpus, loop 1 stores its features, and loop 2 reads them instead of running the model.

The calling process reads the corpus, merges the moments and writes; the model runs in it or in workers, so that a
worker that dies loses only the part that it was working on.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import I64
from grasp.artifact.manifest import BUILD, FEATURES, LOSS_TOKENS, MANIFEST, RUN, SIGNED_MANIFEST, ArrayFiles
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.build.identity import Identity
from grasp.build.inputs import (
    ON_DISK,
    InMemory,
    Inputs,
    Store,
    describe_build,
    leak_arrays,
    prepare,
    unit_arrays,
    unit_table,
)
from grasp.build.model_pass import Arrays, BatchCache, ScoredShard, Workers, observe_part, score_shard
from grasp.build.ray_cluster import ClusterSpec
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError, ModelError, SettingsError
from grasp.files import differences
from grasp.kernels.kernel import CorpusMoments, Kernel, counts_rows, kernel_class, make_kernels, needs_backward
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import is_adapter, recorded_train, refuse_unreadable
from grasp.models.forward_pass import Reference
from grasp.progress import Progress, Silent
from grasp.seeds import stream
from grasp.settings import BuildSettings, FeatureSettings, build_settings
from grasp.yaml_files import read_yaml, write_yaml

# Losses as a share of ln V, the loss of guessing; that of a unigram model is near 0.7.
UNTRAINED_SHARE = 0.95  # above it a model counts as untrained, and the build is refused
UNSKILLED_SHARE = 0.8  # above it a warning is printed if the model is to be trained further
PART_ROWS = 64  # rows of a part of the sample, whose moments are accumulated together
MEGABYTE = 1 << 20
BACKWARD_COST = 3  # cost of a forward and a backward pass, in forward passes
BATCH_ENDS = "passed.ends"  # stored with the moments of a resumable build, see `BatchCache`
NO_GRADIENT_COUNT = "relevance_gradient.none"  # number of rows without a finite gradient


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
        progress: receives stages, notes and numbers of rows.
        cluster: Ray workers that run the model. Default: this process. A build may be resumed elsewhere.
        in_memory: model, corpus and targets that are passed as objects instead of paths.
        must_be_trained: refuse a language model that predicts the sample no better than chance.
    Returns:
        `out`.
    Raises:
        GraspError: invalid input; finished work is kept.
    """
    progress = progress or Silent()
    started = time.perf_counter(), time.process_time()
    settings = resolve_settings(settings, in_memory)
    with lock_artifact(out):
        resumed = claim_settings(settings, out, progress)
        if (out / MANIFEST).exists():
            clean(settings, out)  # the process may have been killed after the manifest was written
            return out
        fresh = not has_work(out)
        inputs = prepare(settings, out / "tokens", progress, in_memory=in_memory, replace=fresh)
        work = out / "work" / inputs.identity.key
        open_workers: AbstractContextManager[Workers]
        if cluster is None:
            open_workers = nullcontext(Workers(inputs.model_pass))
        else:
            from grasp.build.engine import ray_workers  # noqa: PLC0415 - most builds need no cluster

            open_workers = ray_workers(cluster, inputs.settings, inputs.units)
        with open_workers as workers:
            kernels, batch_cache = observe(
                inputs, workers, work, progress, use_cache=cluster is None, must_be_trained=must_be_trained
            )
            for kernel in kernels:
                kernel.prepare(inputs.units)
            write_shards(inputs, workers, kernels, out, batch_cache, None if resumed else started, progress)
        clean(inputs.settings, out)
    return out


@dataclass(frozen=True)
class Sample:
    """A uniform sample of whole rows, from which the moments are estimated.

    Attributes:
        row_index: indices of the rows, ascending.
        n_positions: number of their positions with loss.
        is_whole: whether the sample has all rows; its parts are then the shards.
        states_every: one in `states_every` hidden states is stored.
    """

    row_index: I64
    n_positions: int
    is_whole: bool
    states_every: int

    @classmethod
    def draw(cls, loss_counts_N: NDArray[np.int64], settings: FeatureSettings) -> Self:
        """Draw rows until they have `sample_positions` positions, and `sample_rows` rows if moments are over rows."""
        order_N = stream(settings.seed, "moments", "token").permutation(len(loss_counts_N))
        n_positions_N = np.cumsum(loss_counts_N[order_N])  # of the first rows of the order
        n_rows = int(np.searchsorted(n_positions_N, settings.sample_positions, side="left")) + 1
        min_rows = settings.sample_rows if counts_rows(settings) else 1
        index = np.sort(order_N[: max(n_rows, min_rows)])
        n_positions = int(loss_counts_N[index].sum())
        return cls(index, n_positions, len(index) == len(loss_counts_N), max(1, n_positions // STATES))


def stored_bytes(model: Reference, store: Store, settings: FeatureSettings, coordinates: int) -> int:
    """Estimate the bytes of the model's features for all rows, as they are stored between the loops.

    Args:
        model: its hidden width.
        store: its numbers of rows and of positions with loss.
        settings: positions, and number of probabilities per position.
        coordinates: number of sampled coordinates of a row's gradient.
    """
    # hidden state in float32; index and probability of each coordinate; label, row, token and loss
    position_bytes = 4 * model.hidden_size + 8 * (settings.top_k + 1) + 16
    n_position_sets = len(settings.row_positions)
    return store.n_loss_positions * position_bytes * n_position_sets + 2 * coordinates * store.n_rows  # bfloat16


def observe(
    inputs: Inputs, workers: Workers, work: Path, progress: Progress, *, use_cache: bool, must_be_trained: bool
) -> tuple[list[Kernel], BatchCache | None]:
    """Run loop 1: return the kernels with the moments of a sample of rows, and its batches if they are stored.

    Moments are accumulated per part and merged in the order of the rows, so that their last digits do not depend on the
    number of workers. They are stored in the work directory, for a build that is resumed.

    Args:
        inputs: model, rows and units.
        workers: run the model.
        work: directory of intermediate files.
        progress: receives stages, notes and numbers of rows.
        use_cache: store the batches, if the sample is the whole corpus and they fit in `features.max_cache_mb`.
        must_be_trained: refuse a language model that predicts the sample no better than chance.
    """
    settings, store, model_pass = inputs.settings, inputs.store, inputs.model_pass
    features, model = settings.features, model_pass.model
    sample = Sample.draw(store.loss_counts(), features)
    coordinates = 0 if model_pass.sampled is None else model_pass.sampled.sample.size
    fits = stored_bytes(model, store, features, coordinates) <= features.max_cache_mb * MEGABYTE
    use_cache = use_cache and sample.is_whole and fits and settings.like is None
    # For the progress bar: about how many tokens pass in each stage; rows are not passed twice if batches are stored.
    passes = 0 if settings.like is not None else sample.n_positions / max(1, store.n_loss_positions)
    cost = store.n_tokens * (BACKWARD_COST if needs_backward(features.kernels) else 1)
    planned_tokens = {"moments": round(cost * passes), "rows scored": 0 if use_cache else cost}
    progress.plan({stage: tokens for stage, tokens in planned_tokens.items() if tokens})
    corpus, moment_spool = CorpusMoments(model, sample.states_every), ArrayFiles(work / "moments")
    batch_cache: BatchCache | None = None
    kernels = make_kernels(features.kernels, model, features, corpus)
    if settings.like is not None:
        if not moment_spool.has(0):  # copied when the build begins, since the other artifact may be deleted
            moments = dict(open_moment_source(inputs, settings.like).moments)
            corpus.load(moments)
            if must_be_trained and isinstance(model, ReferenceModel):
                refuse_untrained(corpus.loss, model)
            moment_spool.write(0, moments)
        progress.note(f"moments are copied from {settings.like}")
    if moment_spool.has(0):
        moments = moment_spool.read(0)
        corpus.load(moments)
        if BATCH_ENDS in moments and use_cache:
            batch_cache = BatchCache(work / "passed", moments[BATCH_ENDS].tolist())
    else:
        batch_cache = BatchCache(work / "passed") if use_cache else None
        length_N = store.lengths()
        progress.stage("moments", rows=len(sample.row_index), tokens=int(length_N[sample.row_index].sum()))
        if sample.is_whole:
            parts = ((k, store.shard(k)) for k in range(store.n_shards))
        else:
            starts = range(0, len(sample.row_index), PART_ROWS)
            parts = ((k, store.rows(sample.row_index[start : start + PART_ROWS])) for k, start in enumerate(starts))
        options = {"states_every": sample.states_every, "on_batch": None if batch_cache is None else batch_cache.write}
        for k, part in workers.run(observe_part, parts, progress.advance, in_order=True, **options):
            corpus.merge(part)
            if k == 0 and must_be_trained and isinstance(model, ReferenceModel):
                refuse_untrained(corpus.loss, model)
            if batch_cache is not None:
                batch_cache.end_shard()
        ends = {} if batch_cache is None else {BATCH_ENDS: np.array(batch_cache.ends)}
        moment_spool.write(0, corpus.arrays() | ends)
    if isinstance(model, ReferenceModel):
        for line in training_notes(settings, corpus.loss, model.vocab_size):
            progress.note(line)
    if model_pass.sampled is not None:
        progress.note(model_pass.sampled.describe())
    return kernels, batch_cache


def write_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    out: Path,
    batch_cache: BatchCache | None,
    started: tuple[float, float] | None,
    progress: Progress,
) -> None:
    """Run loop 2: score and write shard after shard, then write the manifest.

    Args:
        inputs: model, rows and units.
        workers: run the model.
        kernels: prepared kernels.
        out: directory of the artifact.
        batch_cache: batches of loop 1; None: run the model.
        started: wall-clock and CPU time at which the build began; None if it was interrupted since.
        progress: receives stages, notes and numbers of rows.
    """
    settings, store = inputs.settings, inputs.store
    writer = ArtifactWriter.open(
        out,
        identity=inputs.identity.record,
        n_rows=store.n_rows,
        shard_rows=settings.shard_rows,
        arrays={kernel.array: kernel.spec(inputs.units) for kernel in kernels},
        dtype=settings.array_dtype,
    )
    feature_spool = ArrayFiles(out / FEATURES) if settings.keep_features else None
    read_cached = None if batch_cache is None else batch_cache.read
    for k, shard in scored_shards(inputs, workers, kernels, writer.left, read_cached, progress):
        if feature_spool is not None and shard.features is not None:
            feature_spool.write(k, shard.features)
        table = store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
        if isinstance(store, RowStore) and store.masked:
            table = table.append_column(LOSS_TOKENS, pa.array(store.loss_counts(k), pa.int32()))
        sums = column_sums(shard.arrays)
        if "relevance_gradient" in shard.arrays:
            no_gradient_N = ~shard.arrays["relevance_gradient"].any(axis=1)
            sums[NO_GRADIENT_COUNT] = np.array([no_gradient_N.sum()], dtype=np.float64)
            if no_gradient_N.any():
                named = table["row_id"].filter(pa.array(no_gradient_N)).to_pylist()
                progress.note(
                    f"{len(named)} rows have no finite gradient; their relevance by gradient is 0: "
                    f"{', '.join(named[:5])}"
                )
        writer.write_shard(k, shard.arrays, table, sums)
    if writer.complete:
        return

    # Gains of the sketches need the sums over all rows.
    sums = writer.sums()
    seconds = started and {"wall": time.perf_counter() - started[0], "cpu": time.process_time() - started[1]}
    manifest = describe_build(inputs, seconds)
    if NO_GRADIENT_COUNT in sums:
        manifest["skipped"]["gradients"] = int(sums[NO_GRADIENT_COUNT][0])
    # Relative paths in the settings are relative to the current directory, which is stored relative to the artifact, so
    # that both can be moved together.
    manifest["details"]["built_in"] = os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(writer.root))
    sketches = [kernel.array for kernel in kernels if isinstance(kernel, Sketch)]
    writer.finish(
        manifest=manifest,
        moments=(kernels[0].corpus.arrays() if kernels else {}) | leak_arrays(inputs) | unit_arrays(inputs, kernels),
        units=unit_table(inputs),
        gains={name: sketch_gain(sums[f"{name}.square"], store.n_rows) for name in sketches},
        rows_kept=settings.keep_tokens,
    )


def scored_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    shards: Sequence[int],
    read_cached: Callable[[int], Iterable[Arrays]] | None,
    progress: Progress,
) -> Iterator[tuple[int, ScoredShard]]:
    """Yield the scores of shards, as they finish, each with its number.

    Args:
        inputs: model, rows and units.
        workers: run the model.
        kernels: prepared kernels.
        shards: numbers of the shards to score.
        read_cached: returns the stored batches of a shard; None: run the model.
        progress: receives stages and numbers of rows.
    """
    store, keep_features = inputs.store, inputs.settings.keep_features
    share = len(shards) / store.n_shards
    if read_cached is not None:
        progress.stage("stored rows scored", rows=round(store.n_rows * share), tokens=None)
        for k in shards:
            rows = store.shard(k)
            yield (
                k,
                score_shard(
                    inputs.model_pass,
                    rows,
                    kernels=kernels,
                    keep_features=keep_features,
                    cached_batches=read_cached(k),
                ),
            )
            progress.advance(len(rows), 0)
        return
    if shards:
        progress.stage("rows scored", rows=round(store.n_rows * share), tokens=round(store.n_tokens * share))
    parts = ((k, store.shard(k)) for k in shards)
    yield from workers.run(score_shard, parts, progress.advance, kernels=kernels, keep_features=keep_features)


def resolve_settings(settings: BuildSettings, in_memory: InMemory) -> BuildSettings:
    """Resolve `train` (further or new), and the kernels that follow from it.

    Raises:
        SettingsError: `train` cannot be inferred from the checkpoint, or a kernel does not exist.
    """
    if settings.model.classifier is not None:
        return settings.model_copy(update={"features": settings.features.decided(None)})
    model = None if in_memory.model is None else in_memory.model.model
    train = settings.train or recorded_train(settings.model, model)
    if train is None:
        if model is None:
            refuse_unreadable(settings.model.path)  # report first that it is not a causal LM
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


def open_moment_source(inputs: Inputs, like: str) -> ArtifactReader:
    """Open the artifact `like`, and check that its moments are valid for these inputs."""
    artifact = ArtifactReader.open(like)
    names = inputs.identity.fingerprints.keys() - {"corpus", "targets"}
    if changed := inputs.identity.changes(Identity.from_artifact(artifact), names):
        raise ArtifactError(
            f"like: {artifact.location} was built with another model or other features, so its moments are not valid "
            f"here: {'; '.join(changed)}; use the same model and features"
        )
    return artifact


def refuse_untrained(loss: float, model: ReferenceModel) -> None:
    """Raise an error if the loss of the model on some rows, in nats per token, is no better than chance."""
    chance = math.log(model.vocab_size)
    if loss > UNTRAINED_SHARE * chance:
        raise ModelError(
            f"model: looks untrained: its loss on the first rows of the sample is {loss:.1f} nats per token; guessing "
            f"gives {chance:.1f}. Use a trained checkpoint (for token ids, the model whose tokenizer produced them), "
            "or continue with --untrained"
        )


def has_work(out: Path) -> bool:
    """Return whether the model has run for this directory; such work is never overwritten by another build."""
    return (out / "work").exists() or (out / BUILD).exists()


def claim_settings(settings: BuildSettings, out: Path, progress: Progress) -> bool:
    """Write run.yaml to `out`, or check that its build has the same settings.

    A build that failed before the model ran, e.g. for a misspelt target, does not claim the directory.

    Returns:
        Whether a build was begun here.
    """
    path, now = out / RUN, settings.model_dump(mode="json")
    finished = (out / MANIFEST).exists()
    if not has_work(out) and not finished:
        if not path.exists() or read_yaml(path) != now:  # do not overwrite equal settings: the file may have comments
            write_yaml(now, path)
        return any(out.glob("tokens/shard-*.json"))
    if path.exists():
        changed = list(differences(_with_defaults(read_yaml(path)), now))
    elif finished:  # a published copy has no run.yaml; unset values were resolved from model and corpus
        recorded = _with_defaults(SIGNED_MANIFEST.read(out).settings)
        changed = [line for line in differences(recorded, now) if not line.endswith("now null")]
    else:
        raise ArtifactError(f"{out}: has no {RUN}, so its settings are unknown; choose another --out")
    if changed:
        state = "a finished artifact, built" if finished else "an unfinished build, begun"
        raise ArtifactError(
            f"{out}: holds {state} with other settings: {'; '.join(changed)}; choose another --out, use the old "
            f"settings, or delete {out}"
        )
    progress.note(f"{out}: finished with these settings; nothing to do" if finished else f"{out}: resuming")
    return True


def _with_defaults(recorded: Any) -> Any:
    """Return recorded settings with the defaults of settings that a later version has added."""
    try:
        return build_settings(recorded).model_dump(mode="json")
    except SettingsError:
        return recorded  # of a version with other names: compared as they are


def training_notes(settings: BuildSettings, loss: float, vocab: int) -> Iterator[str]:
    """Yield notes: what will be trained, which kernels rank rows, and a warning if the model's loss contradicts it."""
    share = loss / math.log(vocab)
    kernels = [name for name in settings.features.kernels if not issubclass(kernel_class(name), Sketch)]
    what = "this model, further" if settings.train == "further" else "a new model, from scratch"
    loss_text = "" if math.isnan(loss) else f"; loss on the corpus: {loss:.1f} nats per token"
    yield f"to be trained: {what}; rows rank by {', '.join(kernels)}{loss_text}"
    if settings.train == "further" and share > UNSKILLED_SHARE:
        yield (
            f"warning: that loss is {share:.0%} of guessing ({math.log(vocab):.1f}), which is high for a model that is "
            "trained further. If a new model will be trained, use --train new"
        )


def column_sums(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
    """Sum and square-sum every column, for means, gains and closed-form moments."""
    sums: dict[str, NDArray[np.float64]] = {}
    for name, array in arrays.items():
        wide = array.astype(np.float64)
        sums[f"{name}.total"] = wide.sum(axis=0)
        sums[f"{name}.square"] = (wide**2).sum(axis=0)
    return sums


def sketch_gain(square_D: NDArray[np.float64], n_rows: int) -> float:
    """Return c such that the mean squared norm over the corpus is 1; 1 if every sketch is zero.

    Source: eq:feature-sketch.
    """
    mean = float(square_D.sum()) / n_rows
    return 1.0 / float(np.sqrt(mean)) if mean > 0 else 1.0


def clean(settings: BuildSettings, out: Path) -> None:
    """Remove the work directory, and the tokens unless the settings keep them."""
    unwanted = [out / "work"] if settings.keep_tokens else [out / "work", out / "tokens"]
    for directory in unwanted:
        if directory.exists():
            shutil.rmtree(directory)
