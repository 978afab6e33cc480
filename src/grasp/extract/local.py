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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.layout import BUILD, FEATURES, MANIFEST, RUN
from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.shards import ArraySpec
from grasp.artifact.spool import FeatureSpool
from grasp.artifact.tables import LOSS_TOKENS
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.corpus.store import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.extract.cluster import ClusterSpec
from grasp.extract.corpus_moments import (
    Store,
    build_token_moments,
    pooled_moments,
    reads_once,
    spool_moments,
    spool_pooled_sample,
    spool_position_moments,
    unspool_moments,
    unspool_position_moments,
)
from grasp.extract.engine import Workers, connected_workers
from grasp.extract.forecast import Forecast, disk_bytes, expected_seconds, first_rows, forecast, refuse_untrained
from grasp.extract.forward import PositionKernels, ShardForward, forward_shard
from grasp.extract.inputs import (
    ON_DISK,
    InMemory,
    Inputs,
    describe_build,
    identity,
    prepare,
    unit_table,
)
from grasp.extract.progress import Progress, Silent
from grasp.features.moments import Moments
from grasp.features.pooled_match import PooledKernel
from grasp.files import differences
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import is_adapter, refuse_unreadable, said_train
from grasp.settings import BuildSettings
from grasp.yaml_files import read_yaml, write_yaml

Given = dict[str, NDArray[Any]]  # moments by name, as another artifact has them
KERNELS = ("token", "input", "neighbour", "shift", "tilt", "gradient")
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
    wall, cpu = time.perf_counter(), time.process_time()
    settings = decided(settings, in_memory)
    with lock_artifact(out) as lock:
        gone_on = claim_settings(settings, out, progress)
        if (out / MANIFEST).exists():
            clean(settings, out)  # a kill may have come between the manifest and this
            return out
        fresh = not has_work(out)
        inputs = prepare(settings, out / "tokens", progress, in_memory=in_memory, replace=fresh)
        settings, model = inputs.settings, inputs.model
        made_of = identity(inputs)
        work = out / "work" / hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=8).hexdigest()
        if isinstance(model, ReferenceModel) and fresh:
            look_ahead(inputs, progress, must_be_trained=must_be_trained, alone=cluster is None)
        given = given_moments(inputs, work, progress)  # from here on there is work
        once = reads_once(model, inputs.store, settings.features)
        with connected_workers(cluster, model, settings, inputs.units, keep_passes=once) as workers:
            position_kernels = build_position_kernels(inputs, workers, work, progress, given)
            shards, pooled = run_model(inputs, position_kernels, workers, out, work, progress, given)
            kernel = PooledKernel.prepare(inputs.units.pooled, pooled, settings.features)
            writer = ArtifactWriter.open(
                out,
                identity=made_of,
                n_rows=inputs.store.n_rows,
                shard_rows=settings.shard_rows,
                arrays=array_specs(inputs, position_kernels, kernel),
                dtype=settings.array_dtype,
                lock=lock,
            )
            for k, shard in shards([k for k in range(writer.grid.n_shards) if k not in writer.finished]):
                finish_shard(inputs, kernel, writer, k, shard, progress)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        close(inputs, position_kernels, pooled, writer, None if gone_on else spent)
        clean(settings, out)
    return out


def decided(settings: BuildSettings, in_memory: InMemory) -> BuildSettings:
    """The settings with what will be trained said, and the kernels that follow.

    Raises:
        SettingsError: neither the user nor the checkpoint says it.
    """
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
        reader = reader.model_copy(update={"adapter": "apart" if features.gradient else "folded"})
    return settings.model_copy(update={"train": train, "features": features, "model": reader})


def given_moments(inputs: Inputs, work: Path, progress: Progress) -> Given | None:
    """Moments of the artifact that `like` names, copied when the build begins; None: they are measured.

    Raises:
        ArtifactError: see `alike`.
    """
    if inputs.settings.like is None:
        return None
    spool = FeatureSpool(work / "like")
    if not spool.has(0):
        spool.write(0, dict(alike(inputs, inputs.settings.like).moments))
    progress.note(f"moments are those of {inputs.settings.like}; none are measured")
    return spool.read(0)


def alike(inputs: Inputs, like: str) -> ArtifactReader:
    """The artifact whose moments hold for these inputs.

    Raises:
        ArtifactError: it is none, or another model or other feature settings made it; every difference is named.
    """
    artifact = ArtifactReader.open(like)
    now, then = describe_build(inputs, None), artifact.manifest
    reader, _ = inputs.model.reader
    changed = [
        *differences(
            {what: then.fingerprints.get(what) for what in ("model", reader)},
            {what: now["fingerprints"][what] for what in ("model", reader)},
            "fingerprints",
        ),
        *differences(then.made_by.get("dtype"), now["made_by"]["dtype"], "model.dtype"),
        *differences(artifact.feature_settings, now["settings"]["features"], "features"),
    ]
    if changed:
        raise ArtifactError(
            f"like: {artifact.where} was built with another model or other features, so its moments do not hold "
            f"here: {'; '.join(changed)}; give this build the same"
        )
    return artifact


def look_ahead(inputs: Inputs, progress: Progress, *, must_be_trained: bool, alone: bool) -> None:
    """Tell how long it will take, unless others help; stop at a model that has learned nothing."""
    rows, features = first_rows(inputs.store), inputs.settings.features
    if must_be_trained:
        refuse_untrained(inputs.model, rows, features)
    if alone:
        given = inputs.settings.like is not None
        seconds = expected_seconds(inputs.model, inputs.store, rows, inputs.units, features, given=given)
        progress.note(forecast(inputs.model, inputs.store, rows, seconds))
        progress.expect(float(seconds[0]))


def foretell(
    settings: BuildSettings, out: Path, *, progress: Progress | None = None, must_be_trained: bool = False
) -> Forecast:
    """What `build` with these settings would be. The rows that it reads are kept for the build.

    Raises:
        GraspError: what would stop the build before its pass; or it is finished.
    """
    progress = progress or Silent()
    settings = decided(settings, ON_DISK)
    with lock_artifact(out):
        if (out / MANIFEST).exists():
            raise ArtifactError(f"{out}: is finished, so there is nothing to foretell; choose another --out")
        claim_settings(settings, out, progress)
        inputs = prepare(settings, out / "tokens", progress, replace=not has_work(out))
        model, store, features = inputs.model, inputs.store, inputs.settings.features
        rows = first_rows(store)
        if must_be_trained and isinstance(model, ReferenceModel):
            refuse_untrained(model, rows, features)
        forward_shard(model, rows, features, None)  # the first time takes longer
        given = inputs.settings.like is not None and alike(inputs, inputs.settings.like)
        seconds = expected_seconds(model, store, rows, inputs.units, features, given=bool(given))
        kernels = [name for name in KERNELS if getattr(features, name)]
        widths = features.hidden_width + features.residual_width + features.product_width
        on_disk = sum(file.stat().st_size for file in (out / "tokens").iterdir())
        numbers = widths + (len(kernels) + features.pooled) * inputs.units.n_units
        disk, beside = disk_bytes(model, store, on_disk, rows, numbers, inputs.settings)
    return Forecast(
        rows=store.n_rows,
        documents=store.n_documents,
        tokens=store.n_tokens,
        questions=dict(Counter(unit.target for unit in inputs.unit_set.units)),
        kernels=tuple(kernels or ["pooled"]),  # which ranks only where nothing else does
        time=forecast(model, store, rows, seconds),
        disk=disk,
        beside=beside,
    )


def has_work(out: Path) -> bool:
    """Whether the model has run for what lies here: that is kept, whatever is asked for next."""
    return (out / "work").exists() or (out / BUILD).exists()


def claim_settings(settings: BuildSettings, out: Path, progress: Progress) -> bool:
    """Claim `out` for these settings by its run.yaml, or see that it was begun with the same ones.

    A build that was refused, for a misspelt target or a row_id that occurs twice, claims nothing.

    Returns:
        Whether something was begun here.
    Raises:
        ArtifactError: it was begun with other settings (all named), and the model has run.
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


def build_position_kernels(
    inputs: Inputs, workers: Workers, work: Path, progress: Progress, given: Given | None = None
) -> PositionKernels | None:
    """Token moments and what follows from them; none where the settings ask for no kernel or sketch of it."""
    features = inputs.settings.features
    if not features.token and not features.product_width:
        return None
    if given is not None:
        moments = unspool_position_moments(given)
    else:
        spool = FeatureSpool(work / "token-moments")
        moments = build_token_moments(inputs.model, inputs.store, features, spool, workers, progress)
    if isinstance(inputs.model, ReferenceModel):
        for line in regime(inputs.settings, moments.loss, inputs.model.vocab_size):
            progress.note(line)
    kernel = PositionKernels.prepare(inputs.units, moments, features, inputs.model)
    if kernel.gradient is not None:
        progress.note(kernel.gradient.gradients.describe())
    return kernel


def regime(settings: BuildSettings, loss: float, vocab: int) -> Iterator[str]:
    """What will be trained and which kernels rank rows for it; and whether the model's loss is odd for that."""
    features, share = settings.features, loss / math.log(vocab)
    kernels = [name for name in KERNELS if getattr(features, name)]
    what = "this model, further" if settings.train == "further" else "a new model, from scratch"
    yield f"to be trained: {what}; rows rank by {', '.join(kernels)}; loss on the corpus: {loss:.1f} nats a token"
    if settings.train == "further" and share > UNSKILLED:
        yield (
            f"that loss is {share:.0%} of what guessing gives ({math.log(vocab):.1f}), odd for a model that is trained "
            "further: it hardly knows these texts. If a new one will be trained, say --train new"
        )


Shards = Callable[[Sequence[int]], Iterator[tuple[int, ShardForward]]]


def run_model(
    inputs: Inputs,
    position_kernels: PositionKernels | None,
    workers: Workers,
    out: Path,
    work: Path,
    progress: Progress,
    given: Given | None = None,
) -> tuple[Shards, Moments]:
    """What gives the forward halves of the shards that are asked for, in any order, and the pooled moments.

    A corpus no larger than the moment sample goes through the model at once: its features are spooled, its moments
    are exact, and shards are read back. Of a larger one only the sample is spooled, and shards run when asked for.
    Nothing is spooled where the moments are given.
    """
    model, store, features = inputs.model, inputs.store, inputs.settings.features
    kept = FeatureSpool(out / FEATURES) if inputs.settings.keep_features else None
    exact = given is None and store.n_rows <= features.moment_rows
    spool = FeatureSpool(work / "features") if exact else None

    def run(wanted: Sequence[int]) -> Iterator[tuple[int, ShardForward]]:
        there = [k for k in wanted if spool is not None and spool.has(k)]
        for k in there:
            assert spool is not None
            yield k, ShardForward.unspool(spool.read(k), model.vocab_size)
        left = sorted(set(wanted) - set(there))
        if left:
            announce(progress, store, len(left))
        keep = kept is not None and features.token
        rows = ((k, store.shard(k)) for k in left)
        for k, shard in workers.forward(rows, position_kernels, progress.advance, keep_positions=keep):
            if kept is not None:
                kept.write(k, shard.arrays_to_keep())
            if spool is not None:
                spool.write(k, shard.spool())
            yield k, shard

    if spool is not None:
        for _ in run([k for k in range(store.n_shards) if not spool.has(k)]):
            pass
        return run, pooled_moments(spool, store.n_shards, model.hidden_size, model.vocab_size)
    if given is not None:
        return run, unspool_moments(given, "pooled.")
    sample = FeatureSpool(work / "pooled-sample")
    parts = spool_pooled_sample(store, features, sample, workers, progress)
    return run, pooled_moments(sample, parts, model.hidden_size, model.vocab_size)


def array_specs(inputs: Inputs, position_kernels: PositionKernels | None, pooled: PooledKernel) -> dict[str, ArraySpec]:
    """Width, unit, sign and stored scale of every array of the artifact."""
    width = {"hidden_sketch": pooled.project_HD.shape[1], "residual_sketch": pooled.sketch_VD.shape[1]}
    if inputs.settings.features.product_width:
        width["product_sketch"] = inputs.settings.features.product_width
    sketches = {name: ArraySpec(size, unit="none", sign="none") for name, size in width.items()}
    return sketches | relevance_specs(inputs, position_kernels, pooled)


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
        name: ArraySpec(inputs.units.n_units, GRADIENTS, sign, scale_E=relevance_scale(own_E))
        for name, own_E in own.items()
    }
    if position_kernels is not None and position_kernels.neighbours is not None:
        most_E = position_kernels.neighbours.most_E.double().cpu().numpy()
        scale_E = np.exp2(np.maximum(np.ceil(np.log2(most_E / LARGEST)), 0.0))
        specs["relevance_neighbour"] = ArraySpec(inputs.units.n_units, NEIGHBOURS, sign, scale_E=scale_E)
    return specs


def finish_shard(
    inputs: Inputs, kernel: PooledKernel, writer: ArtifactWriter, k: int, shard: ShardForward, progress: Progress
) -> None:
    """Sketches and pooled relevance of one shard, and the shard into the artifact.

    A row whose gradient was not finite is worth 0 to every question by that kernel: it is named here, and counted.
    """
    arrays = kernel.sketches(shard.pooled) | kernel.relevance(shard.pooled) | shard.arrays
    table = inputs.store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
    if isinstance(inputs.store, RowStore) and inputs.store.masked:
        table = table.append_column(LOSS_TOKENS, pa.array(inputs.store.supervised_of(k), pa.int32()))
    sums = column_sums(arrays)
    if "relevance_gradient" in arrays:
        bad = ~arrays["relevance_gradient"].any(axis=1)
        sums[NO_GRADIENT] = np.array([bad.sum()], dtype=np.float64)
        if bad.any():
            named = table["row_id"].filter(pa.array(bad)).to_pylist()
            progress.note(f"{len(named)} rows have no finite gradient, and count 0 by it: {', '.join(named[:5])}")
    writer.write_shard(k, arrays, table, sums)


def column_sums(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
    """Sum and sum of squares of every column, for means, gains and closed-form moments."""
    sums: dict[str, NDArray[np.float64]] = {}
    for name, array in arrays.items():
        wide = array.astype(np.float64)
        sums[f"{name}.total"] = wide.sum(axis=0)
        sums[f"{name}.square"] = (wide**2).sum(axis=0)
    return sums


def close(
    inputs: Inputs,
    position_kernels: PositionKernels | None,
    pooled: Moments,
    writer: ArtifactWriter,
    build_seconds: dict[str, float] | None,
) -> None:
    """Gains of the sketches, moments, units, manifest: the artifact is complete."""
    if writer.complete:
        return
    sums, n_rows = writer.sums(), inputs.store.n_rows
    moments = spool_moments(pooled, "pooled.")
    if position_kernels is not None:
        moments |= spool_position_moments(position_kernels.moments)
    gains = {
        name: sketch_gain(sums[f"{name}.square"], n_rows)
        for name in ("hidden_sketch", "residual_sketch", "product_sketch")
        if f"{name}.square" in sums
    }
    given = describe_build(inputs, build_seconds)
    if NO_GRADIENT in sums:
        given["skipped"]["gradients"] = int(sums[NO_GRADIENT][0])
    # relative paths of the settings are meant from here; said relative to the artifact, it holds where both are moved
    given["details"]["built_in"] = os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(writer.root))
    writer.finish(
        manifest=given,
        moments=moments,
        units=unit_table(inputs),
        gains=gains,
        rows_kept=inputs.settings.keep_tokens,
    )


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


def announce(progress: Progress, store: Store, shards: int) -> None:
    """The forward pass over so many shards begins."""
    share = shards / store.n_shards
    progress.stage("forward", rows=round(store.n_rows * share), tokens=round(store.n_tokens * share))
