"""A build: two loops over the rows. Killed at any moment, it goes on where it was, wherever the model runs.

    corpus  -> tokenised once into the row store; its identity is computed on the way          `inputs.prepare`
    units   -> one pass: every kernel takes from it what it needs
    loop 1  -> a sample of rows, one pass each: every kernel observes the batches
               kernel.prepare(units)
    loop 2  -> shard after shard, one pass a row: every kernel scores the batches; the shard is written whole
    finish  -> manifest

Where the sample is the whole corpus, what the model gave in the first loop is kept, and the second loop reads it.
One process, the one that is called, reads the corpus, merges the moments and writes; the model runs in it or in workers
elsewhere. So a worker that dies takes nothing with it but the part that it had.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import I64
from grasp.artifact.manifest import BUILD, FEATURES, LOSS_TOKENS, MANIFEST, RUN, SIGNED_MANIFEST, FeatureSpool
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
    unit_table,
)
from grasp.build.model_pass import Arrays, PassedBatches, ScoredShard, Workers, observe_part, score_shard
from grasp.build.ray_cluster import ClusterSpec
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError, ModelError, SettingsError
from grasp.files import differences
from grasp.kernels.kernel import CorpusMoments, Kernel, counts_rows, kernel_class, make_kernels, needs_backward
from grasp.kernels.sketch import Sketch
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import is_adapter, refuse_unreadable, said_train
from grasp.models.forward_pass import Reference
from grasp.progress import Progress, Silent
from grasp.seeds import stream
from grasp.settings import BuildSettings, FeatureSettings
from grasp.yaml_files import read_yaml, write_yaml

UNTRAINED = 0.95  # of ln V; a model that knows no more than how often words occur is near 0.7
UNSKILLED = 0.8  # of ln V: one that knows how often words occur has some 0.7
PART_ROWS = 64  # of a sample that go through the model at once
MEGABYTE = 1 << 20
THERE_AND_BACK = 3  # forward passes that a forward and a backward pass cost
PASSED = "passed.ends"  # beside the moments of a build that goes on: see `PassedBatches`
NO_GRADIENT = "relevance_gradient.none"  # sum over rows without a finite one


def build_artifact(
    settings: BuildSettings,
    out: Path,
    *,
    progress: Progress | None = None,
    cluster: ClusterSpec | None = None,
    in_memory: InMemory = ON_DISK,
    must_be_trained: bool = False,
) -> Path:
    """Build the artifact `out`, or go on with one that was begun with the same settings.

    Args:
        cluster: where the model runs; none: in this process. It is no setting: a build may go on elsewhere.
        must_be_trained: stop at a language model that predicts the sample no better than chance.
    Raises:
        GraspError: bad input, named; nothing that was finished is lost.
    """
    progress = progress or Silent()
    begun = time.perf_counter(), time.process_time()
    settings = decided(settings, in_memory)
    with lock_artifact(out):
        gone_on = claim_settings(settings, out, progress)
        if (out / MANIFEST).exists():
            clean(settings, out)  # a kill may have come between the manifest and this
            return out
        fresh = not has_work(out)
        inputs = prepare(settings, out / "tokens", progress, in_memory=in_memory, replace=fresh)
        work = out / "work" / inputs.identity.key
        entered: AbstractContextManager[Workers]
        if cluster is None:
            entered = nullcontext(Workers(inputs.ready))
        else:
            from grasp.build.engine import ray_workers  # noqa: PLC0415 - most builds need no cluster

            entered = ray_workers(cluster, inputs.settings, inputs.units)
        with entered as workers:
            kernels, passed = observe(inputs, workers, work, progress, keep=cluster is None, trained=must_be_trained)
            for kernel in kernels:
                kernel.prepare(inputs.units)
            write_shards(inputs, workers, kernels, out, passed, None if gone_on else begun, progress)
        clean(inputs.settings, out)
    return out


@dataclass(frozen=True)
class Sample:
    """Whole rows, drawn uniformly, by which kernels know the corpus.

    Attributes:
        row_index: which rows, ascending.
        n_positions: positions with loss that they hold.
        is_whole: they are all rows; then the parts are the shards.
        states_every: of how many positions the hidden state of one is kept.
    """

    row_index: I64
    n_positions: int
    is_whole: bool
    states_every: int

    @classmethod
    def draw(cls, supervised_N: NDArray[np.int64], settings: FeatureSettings) -> Self:
        """Draw rows until they hold the positions that the settings ask for, and are enough for moments over rows."""
        order_N = stream(settings.seed, "moments", "token").permutation(len(supervised_N))
        reached = np.cumsum(supervised_N[order_N])
        enough = int(np.searchsorted(reached, settings.sample_positions, side="left")) + 1
        least = settings.sample_rows if counts_rows(settings) else 1
        index = np.sort(order_N[: max(enough, least)])
        n_positions = int(supervised_N[index].sum())
        return cls(index, n_positions, len(index) == len(supervised_N), max(1, n_positions // STATES))


def kept_bytes(model: Reference, store: Store, settings: FeatureSettings, coordinates: int) -> int:
    """Return about how much the model gives for all rows, as it is kept between the loops.

    Args:
        coordinates: that are taken of a row's gradient.
    """
    width = 4 * model.hidden_size + 8 * (settings.top_k + 1) + 16
    places = len(settings.row_positions)
    return store.n_supervised * width * places + 2 * coordinates * store.n_rows


def observe(
    inputs: Inputs, workers: Workers, work: Path, progress: Progress, *, keep: bool, trained: bool
) -> tuple[list[Kernel], PassedBatches | None]:
    """Run loop 1. Return the kernels with the moments of a sample of rows, and its batches if they are kept.

    Each part has its own moments, which are merged in the order of the rows: the same digits, however many workers
    there are. They are kept in the work area for a build that goes on.

    Args:
        keep: keep the batches, if the sample is the whole corpus and they fit in `features.kept_mb`.
        trained: stop at a language model that predicts the sample no better than chance.
    """
    settings, store, ready = inputs.settings, inputs.store, inputs.ready
    features, model = settings.features, ready.model
    sample = Sample.draw(store.supervised(), features)
    coordinates = 0 if ready.sampled is None else ready.sampled.sample.size
    fits = kept_bytes(model, store, features, coordinates) <= features.kept_mb * MEGABYTE
    keep = keep and sample.is_whole and fits and settings.like is None
    # tokens that the model reads in each stage, about: all of them again, unless the sample is whole and kept
    passes = 0 if settings.like is not None else sample.n_positions / max(1, store.n_supervised)
    cost = store.n_tokens * (THERE_AND_BACK if needs_backward(features.kernels) else 1)
    ahead = {"moments": round(cost * passes), "rows scored": 0 if keep else cost}
    progress.plan({stage: tokens for stage, tokens in ahead.items() if tokens})
    corpus, saved = CorpusMoments(model, sample.states_every), FeatureSpool(work / "moments")
    passed: PassedBatches | None = None
    kernels = make_kernels(features.kernels, model, features, corpus)
    if settings.like is not None:
        if not saved.has(0):  # copied when the build begins: the other artifact may go
            moments = dict(alike(inputs, settings.like).moments)
            corpus.load(moments)
            if trained and isinstance(model, ReferenceModel):
                refuse_untrained(corpus.loss, model)
            saved.write(0, moments)
        progress.note(f"moments are those of {settings.like}; none are measured")
    if saved.has(0):
        moments = saved.read(0)
        corpus.load(moments)
        if PASSED in moments and keep:
            passed = PassedBatches(work / "passed", moments[PASSED].tolist())
    else:
        passed = PassedBatches(work / "passed") if keep else None
        length_N = store.lengths()
        progress.stage("moments", rows=len(sample.row_index), tokens=int(length_N[sample.row_index].sum()))
        if sample.is_whole:
            parts = ((k, store.shard(k)) for k in range(store.n_shards))
        else:
            starts = range(0, len(sample.row_index), PART_ROWS)
            parts = ((k, store.rows(sample.row_index[at : at + PART_ROWS])) for k, at in enumerate(starts))
        options = {"states_every": sample.states_every, "keep": None if passed is None else passed.write}
        for k, part in workers.run(observe_part, parts, progress.advance, in_order=True, **options):
            corpus.merge(part)
            if k == 0 and trained and isinstance(model, ReferenceModel):
                refuse_untrained(corpus.loss, model)
            if passed is not None:
                passed.end_shard()
        ends = {} if passed is None else {PASSED: np.array(passed.ends)}
        saved.write(0, corpus.arrays() | ends)
    if isinstance(model, ReferenceModel):
        for line in regime(settings, corpus.loss, model.vocab_size):
            progress.note(line)
    if ready.sampled is not None:
        progress.note(ready.sampled.describe())
    return kernels, passed


def write_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    out: Path,
    passed: PassedBatches | None,
    begun: tuple[float, float] | None,
    progress: Progress,
) -> None:
    """Loop 2: shard after shard, scored and written whole; then the manifest.

    Args:
        passed: the batches of loop 1; None: rows pass the model here.
        begun: when the build began, by the clock and in seconds of the processor; None: it was cut off since.
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
    kept = FeatureSpool(out / FEATURES) if settings.keep_features else None
    batches = None if passed is None else passed.read
    for k, shard in scored_shards(inputs, workers, kernels, writer.left, batches, progress):
        if kept is not None and shard.features is not None:
            kept.write(k, shard.features)
        table = store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
        if isinstance(store, RowStore) and store.masked:
            table = table.append_column(LOSS_TOKENS, pa.array(store.supervised(k), pa.int32()))
        sums = column_sums(shard.arrays)
        if "relevance_gradient" in shard.arrays:
            bad = ~shard.arrays["relevance_gradient"].any(axis=1)
            sums[NO_GRADIENT] = np.array([bad.sum()], dtype=np.float64)
            if bad.any():
                named = table["row_id"].filter(pa.array(bad)).to_pylist()
                progress.note(f"{len(named)} rows have no finite gradient, and count 0 by it: {', '.join(named[:5])}")
        writer.write_shard(k, shard.arrays, table, sums)
    if writer.complete:
        return

    # gains of the sketches, and what the artifact says of itself
    sums = writer.sums()
    spent = begun and {"wall": time.perf_counter() - begun[0], "cpu": time.process_time() - begun[1]}
    manifest = describe_build(inputs, spent)
    if NO_GRADIENT in sums:
        manifest["skipped"]["gradients"] = int(sums[NO_GRADIENT][0])
    # relative paths of the settings are meant from here; said relative to the artifact, it holds where both are moved
    manifest["details"]["built_in"] = os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(writer.root))
    sketches = [kernel.array for kernel in kernels if isinstance(kernel, Sketch)]
    writer.finish(
        manifest=manifest,
        moments=(kernels[0].corpus.arrays() if kernels else {}) | leak_arrays(inputs),
        units=unit_table(inputs),
        gains={name: sketch_gain(sums[f"{name}.square"], store.n_rows) for name in sketches},
        rows_kept=settings.keep_tokens,
    )


def scored_shards(
    inputs: Inputs,
    workers: Workers,
    kernels: Sequence[Kernel],
    left: Sequence[int],
    passed: Callable[[int], Iterable[Arrays]] | None,
    progress: Progress,
) -> Iterator[tuple[int, ScoredShard]]:
    """Yield the numbers of some shards, as they come.

    Args:
        passed: gives the batches of a shard that passed the model before; None: its rows pass the model here.
    """
    store, keep = inputs.store, inputs.settings.keep_features
    share = len(left) / store.n_shards
    if passed is not None:
        progress.stage("kept rows scored", rows=round(store.n_rows * share), tokens=None)
        for k in left:
            rows = store.shard(k)
            yield k, score_shard(inputs.ready, rows, kernels=kernels, keep_features=keep, passed=passed(k))
            progress.advance(len(rows), 0)
        return
    if left:
        progress.stage("rows scored", rows=round(store.n_rows * share), tokens=round(store.n_tokens * share))
    parts = ((k, store.shard(k)) for k in left)
    yield from workers.run(score_shard, parts, progress.advance, kernels=kernels, keep_features=keep)


def decided(settings: BuildSettings, in_memory: InMemory) -> BuildSettings:
    """Return the settings with what will be trained, and with the kernels that follow from it.

    Raises:
        SettingsError: nothing says what will be trained, or a kernel does not exist.
    """
    if settings.model.classifier is not None:
        return settings.model_copy(update={"features": settings.features.decided(None)})
    model = None if in_memory.model is None else in_memory.model.model
    train = settings.train or said_train(settings.model, model)
    if train is None:
        if model is None:
            refuse_unreadable(settings.model.path)  # what is no causal LM is told so first
        raise SettingsError(
            "--train: say what will be trained on this corpus: `--train further`, this model itself (fine-tuning), or "
            "`--train new`, another one from scratch. Other rows help in either case, and the checkpoint does not say"
        )
    features, reader = settings.features.decided(train), settings.model
    for name in features.kernels:
        kernel_class(name)
    if reader.adapter is None and is_adapter(reader.path):
        reader = reader.model_copy(update={"adapter": "apart" if "gradient" in features.kernels else "folded"})
    return settings.model_copy(update={"train": train, "features": features, "model": reader})


def alike(inputs: Inputs, like: str) -> ArtifactReader:
    """The artifact whose moments hold for these inputs."""
    artifact = ArtifactReader.open(like)
    names = inputs.identity.fingerprints.keys() - {"corpus", "targets"}
    if changed := inputs.identity.changes(Identity.from_artifact(artifact), names):
        raise ArtifactError(
            f"like: {artifact.where} was built with another model or other features, so its moments do not hold "
            f"here: {'; '.join(changed)}; give this build the same"
        )
    return artifact


def refuse_untrained(loss: float, model: ReferenceModel) -> None:
    """See that the model knows more than chance: `loss` is its own on some rows, nats a token."""
    chance = math.log(model.vocab_size)
    if loss > UNTRAINED * chance:
        raise ModelError(
            f"model: looks untrained: its loss on the first rows of the sample is {loss:.1f} nats a token, guessing "
            f"gives {chance:.1f}. Name a trained checkpoint; for token ids the model whose tokenizer made them; or go "
            "on all the same with --untrained"
        )


def has_work(out: Path) -> bool:
    """Whether the model has run for what lies here: that is kept, whatever is asked for next."""
    return (out / "work").exists() or (out / BUILD).exists()


def claim_settings(settings: BuildSettings, out: Path, progress: Progress) -> bool:
    """Claim `out` for these settings by its run.yaml, or see that it was begun with the same ones.

    A build that was refused, for a misspelt target or a row_id that occurs twice, claims nothing.

    Returns:
        Whether something was begun here.
    """
    path, now = out / RUN, settings.model_dump(mode="json")
    finished = (out / MANIFEST).exists()
    if not has_work(out) and not finished:
        if not path.exists() or read_yaml(path) != now:  # a file with comments stays as it is
            write_yaml(now, path)
        return any(out.glob("tokens/shard-*.json"))
    if path.exists():
        changed = list(differences(read_yaml(path), now))
        changed = [line for line in changed if not line.endswith("was absent, now null")]  # settings that came later
    elif finished:  # a published copy; what is left open follows from model and corpus
        changed = [
            line for line in differences(SIGNED_MANIFEST.read(out).settings, now) if not line.endswith("now null")
        ]
    else:
        raise ArtifactError(f"{out}: has no {RUN} that would say what it was built from; choose another --out")
    if changed:
        state = "a finished artifact, built" if finished else "an unfinished build, begun"
        raise ArtifactError(
            f"{out}: holds {state} with other settings: {'; '.join(changed)}; choose another --out, give the old "
            f"settings, or delete {out}"
        )
    progress.note(
        f"{out}: finished already, with these settings; nothing was read again"
        if finished
        else f"{out}: goes on where it was cut off"
    )
    return True


def regime(settings: BuildSettings, loss: float, vocab: int) -> Iterator[str]:
    """What will be trained and which kernels rank rows for it; and whether the model's loss is odd for that."""
    share = loss / math.log(vocab)
    kernels = [name for name in settings.features.kernels if not issubclass(kernel_class(name), Sketch)]
    what = "this model, further" if settings.train == "further" else "a new model, from scratch"
    known = "" if math.isnan(loss) else f"; loss on the corpus: {loss:.1f} nats a token"
    yield f"to be trained: {what}; rows rank by {', '.join(kernels)}{known}"
    if settings.train == "further" and share > UNSKILLED:
        yield (
            f"that loss is {share:.0%} of what guessing gives ({math.log(vocab):.1f}), odd for a model that is trained "
            "further: it hardly knows these texts. If a new one will be trained, say --train new"
        )


def column_sums(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
    """Sum and sum of squares of every column, for means, gains and closed-form moments."""
    sums: dict[str, NDArray[np.float64]] = {}
    for name, array in arrays.items():
        wide = array.astype(np.float64)
        sums[f"{name}.total"] = wide.sum(axis=0)
        sums[f"{name}.square"] = (wide**2).sum(axis=0)
    return sums


def sketch_gain(square_D: NDArray[np.float64], n_rows: int) -> float:
    """c such that the mean squared norm over the corpus is 1; 1 if every sketch is zero. Source: eq:feature-sketch."""
    mean = float(square_D.sum()) / n_rows
    return 1.0 / float(np.sqrt(mean)) if mean > 0 else 1.0


def clean(settings: BuildSettings, out: Path) -> None:
    """Remove the work area, and the tokens unless they are kept."""
    unwanted = [out / "work"] if settings.keep_tokens else [out / "work", out / "tokens"]
    for directory in unwanted:
        if directory.exists():
            shutil.rmtree(directory)
