"""The build: rows, moments, shards, artifact. Killed at any moment, it goes on where it was, wherever the model runs.

One process, the one that is called, reads the corpus, merges the moments and writes; the model runs in it or in workers
elsewhere. So a worker that dies takes nothing with it but the shard that it had.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.manifest import BUILD, FEATURES, LOSS_TOKENS, MANIFEST, RUN, SIGNED_MANIFEST, FeatureSpool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact
from grasp.build.inputs import (
    ON_DISK,
    InMemory,
    Inputs,
    describe_build,
    identity,
    leak_arrays,
    prepare,
    unit_table,
)
from grasp.build.moments import (
    Store,
    pooled_moments,
    pooled_sample,
    position_moments,
    reads_once,
    spool_moments,
    tokens_ahead,
    unspool_moments,
    unspool_position_moments,
)
from grasp.build.ray_cluster import ClusterSpec
from grasp.build.score_shard import PositionKernels, ShardForward, Workers, forward_shard
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError, ModelError, SettingsError
from grasp.files import differences
from grasp.kernels.pooled import PooledKernel
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import dtype_name, is_adapter, refuse_unreadable, said_train
from grasp.models.forward_pass import Rows
from grasp.progress import Progress, Silent
from grasp.settings import BuildSettings, FeatureSettings
from grasp.yaml_files import read_yaml, write_yaml

Given = dict[str, NDArray[Any]]  # moments by name, as another artifact has them
FIRST_TOKENS = 2_048  # of the rows that tell whether the model has learned anything
UNTRAINED = 0.95  # of ln V; a model that knows no more than how often words occur is near 0.7
UNSKILLED = 0.8  # of ln V: one that knows how often words occur has some 0.7
GRADIENTS = "inner product of preconditioned gradients; unitless"
NO_GRADIENT = "relevance_gradient.none"  # sum over rows without a finite one
TOKENS_OF_ROW = 256.0
LARGEST = 32_768.0  # that float16 is asked to hold
NEIGHBOURS = "logarithm of a probability, to first order; unitless"


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
        must_be_trained: stop at a language model that predicts the first rows no better than chance.
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
        settings, model, store = inputs.settings, inputs.model, inputs.store
        features = settings.features
        made_of = hashlib.blake2b(json.dumps(identity(inputs), sort_keys=True).encode(), digest_size=8)
        work = out / "work" / made_of.hexdigest()
        if must_be_trained and fresh and isinstance(model, ReferenceModel):
            refuse_untrained(model, store, features)
        given: Given | None = None
        if settings.like is not None:
            spool = FeatureSpool(work / "like")  # copied when the build begins: the other artifact may go
            if not spool.has(0):
                spool.write(0, dict(alike(inputs, settings.like).moments))
            progress.note(f"moments are those of {settings.like}; none are measured")
            given = spool.read(0)
        once = cluster is None and reads_once(model, store, features)
        progress.plan(tokens_ahead(store, features, measured=given is not None, once=once))
        entered: AbstractContextManager[Workers]
        if cluster is None:
            entered = nullcontext(Workers(model, features, keep_passes=once))
        else:
            from grasp.build.engine import ray_workers  # noqa: PLC0415 - most builds need no cluster

            entered = ray_workers(cluster, settings, inputs.units)
        with entered as workers:
            write_artifact(inputs, workers, out, work, given, None if gone_on else begun, progress)
        clean(settings, out)
    return out


def write_artifact(
    inputs: Inputs,
    workers: Workers,
    out: Path,
    work: Path,
    given: Given | None,
    begun: tuple[float, float] | None,
    progress: Progress,
) -> None:
    """Moments, then shard after shard, then the manifest.

    Args:
        given: moments that are taken over; none: they are measured.
        begun: when the build began, by the clock and in seconds of the processor; none: it was cut off since.
    """
    settings, model, store = inputs.settings, inputs.model, inputs.store
    features = settings.features

    # token moments, and what follows from them
    kernels: PositionKernels | None = None
    if "token" in features.kernels or features.product_width:
        if given is None:
            spool = FeatureSpool(work / "token-moments")
            moments = position_moments(model, store, features, spool, workers, progress)
        else:
            moments = unspool_position_moments(given)
        if isinstance(model, ReferenceModel):
            for line in regime(settings, moments.loss, model.vocab_size):
                progress.note(line)
        kernels = PositionKernels.prepare(inputs.units, moments, features, model)
        if kernels.gradient is not None:
            progress.note(kernels.gradient.gradients.describe())

    # A corpus no larger than the moment sample goes through the model at once: its features are spooled, its
    # moments are exact, and shards are read back. Of a larger one only the sample is spooled.
    exact = given is None and store.n_rows <= features.moment_rows
    spool = FeatureSpool(work / ("features" if exact else "pooled-sample"))
    if exact:
        left = [k for k in range(store.n_shards) if not spool.has(k)]
        for k, shard in forward_shards(inputs, kernels, workers, left, out, progress):
            spool.write(k, shard.spool(relevance=True))
        pooled = pooled_moments(spool, store.n_shards, model)
    elif given is None:
        pooled = pooled_moments(spool, pooled_sample(store, features, spool, workers, progress), model)
    else:
        pooled = unspool_moments(given, "pooled.")
    pooled_kernel = PooledKernel.prepare(inputs.units.pooled, pooled, features)

    # shards: sketches and relevance
    width = {
        "hidden_sketch": pooled_kernel.project_HD.shape[1],
        "residual_sketch": pooled_kernel.sketch_VD.shape[1],
        "product_sketch": features.product_width,
    }
    sketches = {name: ArraySpec(size, unit="none", sign="none") for name, size in width.items() if size}
    writer = ArtifactWriter.open(
        out,
        identity=identity(inputs),
        n_rows=store.n_rows,
        shard_rows=settings.shard_rows,
        arrays=sketches | relevance_specs(inputs, kernels, pooled_kernel),
        dtype=settings.array_dtype,
    )
    left = writer.left
    shards: Iterator[tuple[int, ShardForward]]
    if exact:
        shards = ((k, ShardForward.unspool(spool.read(k), model.vocab_size)) for k in left)
    else:
        shards = forward_shards(inputs, kernels, workers, left, out, progress)
    for k, shard in shards:
        _write_shard(inputs, writer, pooled_kernel, k, shard, progress)
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
    writer.finish(
        manifest=manifest,
        moments=spool_moments(None if kernels is None else kernels.moments, pooled) | leak_arrays(inputs),
        units=unit_table(inputs),
        gains={name: sketch_gain(sums[f"{name}.square"], store.n_rows) for name in sketches},
        rows_kept=settings.keep_tokens,
    )


def _write_shard(
    inputs: Inputs,
    writer: ArtifactWriter,
    pooled_kernel: PooledKernel,
    k: int,
    shard: ShardForward,
    progress: Progress,
) -> None:
    """What the model gave of a shard, as its rows of the artifact; its arrays are let go before the next one comes."""
    arrays = pooled_kernel.sketches(shard.pooled) | pooled_kernel.relevance(shard.pooled) | shard.arrays
    table = inputs.store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
    if isinstance(inputs.store, RowStore) and inputs.store.masked:
        table = table.append_column(LOSS_TOKENS, pa.array(inputs.store.supervised(k), pa.int32()))
    sums = column_sums(arrays)
    if "relevance_gradient" in arrays:
        bad = ~arrays["relevance_gradient"].any(axis=1)
        sums[NO_GRADIENT] = np.array([bad.sum()], dtype=np.float64)
        if bad.any():
            named = table["row_id"].filter(pa.array(bad)).to_pylist()
            progress.note(f"{len(named)} rows have no finite gradient, and count 0 by it: {', '.join(named[:5])}")
    writer.write_shard(k, arrays, table, sums)


def decided(settings: BuildSettings, in_memory: InMemory) -> BuildSettings:
    """The settings with what will be trained said, and the kernels that follow."""
    if settings.model.classifier is not None:
        return settings
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
    if reader.adapter is None and is_adapter(reader.path):
        reader = reader.model_copy(update={"adapter": "apart" if "gradient" in features.kernels else "folded"})
    return settings.model_copy(update={"train": train, "features": features, "model": reader})


def alike(inputs: Inputs, like: str) -> ArtifactReader:
    """The artifact whose moments hold for these inputs."""
    artifact = ArtifactReader.open(like)
    reader, reader_fingerprint = inputs.model.reader
    then, now = artifact.manifest, {"model": inputs.model_fingerprint, reader: reader_fingerprint}
    changed = [
        *differences({what: then.fingerprints.get(what) for what in now}, now, "fingerprints"),
        *differences(then.made_by.get("dtype"), dtype_name(inputs.model.dtype), "model.dtype"),
        *differences(artifact.feature_settings, inputs.settings.features.model_dump(mode="json"), "features"),
    ]
    if changed:
        raise ArtifactError(
            f"like: {artifact.where} was built with another model or other features, so its moments do not hold "
            f"here: {'; '.join(changed)}; give this build the same"
        )
    return artifact


def first_rows(store: Store) -> Rows:
    """The first rows of a corpus, at least one."""
    reached = np.cumsum(np.asarray(store.table(0).column("n_tokens"), dtype=np.int64))
    return store.rows(np.arange(max(1, int(np.searchsorted(reached, FIRST_TOKENS, side="right")))))


def refuse_untrained(model: ReferenceModel, store: Store, settings: FeatureSettings) -> None:
    """See that the model knows more than chance."""
    rows = first_rows(store)
    loss, chance = float(forward_shard(model, rows, settings, None).loss_N.mean()), math.log(model.vocab_size)
    if loss > UNTRAINED * chance:
        raise ModelError(
            f"model: looks untrained: its loss on the first {len(rows)} rows is {loss:.1f} nats a token, "
            f"guessing gives {chance:.1f}. Name a trained checkpoint; for token ids the model whose tokenizer made "
            "them; or go on all the same with --untrained"
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
    features, share = settings.features, loss / math.log(vocab)
    kernels = [name for name in features.kernels if name != "pooled"]
    what = "this model, further" if settings.train == "further" else "a new model, from scratch"
    yield f"to be trained: {what}; rows rank by {', '.join(kernels)}; loss on the corpus: {loss:.1f} nats a token"
    if settings.train == "further" and share > UNSKILLED:
        yield (
            f"that loss is {share:.0%} of what guessing gives ({math.log(vocab):.1f}), odd for a model that is trained "
            "further: it hardly knows these texts. If a new one will be trained, say --train new"
        )


def forward_shards(
    inputs: Inputs,
    kernels: PositionKernels | None,
    workers: Workers,
    left: Sequence[int],
    out: Path,
    progress: Progress,
) -> Iterator[tuple[int, ShardForward]]:
    """The forward halves of some shards, as they come; their features are kept where the settings say so."""
    store = inputs.store
    if left:
        share = len(left) / store.n_shards
        progress.stage("forward", rows=round(store.n_rows * share), tokens=round(store.n_tokens * share))
    kept = FeatureSpool(out / FEATURES) if inputs.settings.keep_features else None
    keep = kept is not None and "token" in inputs.settings.features.kernels
    parts = ((k, store.shard(k)) for k in left)
    for k, shard in workers.run(forward_shard, parts, progress.advance, kernel=kernels, keep_positions=keep):
        if kept is not None:
            kept.write(k, shard.spool(relevance=False))
        yield k, shard


def relevance_specs(
    inputs: Inputs, position_kernels: PositionKernels | None, pooled: PooledKernel
) -> dict[str, ArraySpec]:
    """The relevance matrices: one column a unit, stored in units of its own power of two."""
    own: dict[str, NDArray[np.float64]] = {}
    if pooled.units is not None:
        own["relevance_pooled"] = pooled.unit_relevance(inputs.units.pooled)
    if position_kernels is not None:
        own |= position_kernels.unit_relevance(inputs.units)
        if "relevance_gradient" in own:  # a row counts with all of its loss, of some hundred tokens or thousands
            own["relevance_gradient"] = own["relevance_gradient"] * TOKENS_OF_ROW
    sign = "positive: training on the row should lower the unit's loss"
    specs = {
        name: ArraySpec(len(inputs.units.loss_E), GRADIENTS, sign, scale_E=relevance_scale(own_E))
        for name, own_E in own.items()
    }
    if position_kernels is not None and position_kernels.neighbours is not None:
        most_E = position_kernels.neighbours.most_E.double().cpu().numpy()
        scale_E = np.exp2(np.maximum(np.ceil(np.log2(most_E / LARGEST)), 0.0))
        specs["relevance_neighbour"] = ArraySpec(len(inputs.units.loss_E), NEIGHBOURS, sign, scale_E=scale_E)
    return specs


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


def relevance_scale(own_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Power of two per unit that brings its relevance well inside float16, (E,).

    From each unit's relevance to itself: for the token kernel |a_ie|^2 <= a_ii a_ee, and the typical a_ii is taken
    to be that of the units. 2^-6 leaves room for rows a thousand times as strong.
    """
    own_E = np.abs(own_E)
    positive = own_E > 0
    typical = float(np.median(own_E[positive])) if positive.any() else 1.0
    size_E = np.sqrt(np.where(positive, own_E, typical) * typical)
    return np.asarray(np.exp2(np.clip(np.round(np.log2(size_E)) - 6.0, -100, 100)), dtype=np.float64)


def clean(settings: BuildSettings, out: Path) -> None:
    """Remove the work area, and the tokens unless they are kept."""
    unwanted = [out / "work"] if settings.keep_tokens else [out / "work", out / "tokens"]
    for directory in unwanted:
        if directory.exists():
            shutil.rmtree(directory)
