"""The build: rows, moments, shards, artifact. Killed at any moment, it goes on where it was, with any engine.

One process, the one that is called, reads the corpus, merges the moments and writes; where the model runs is the
engine's business. So a worker that dies takes nothing with it but the shard that it had.
"""

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

import grasp
from grasp.artifact.features import FeatureSpool
from grasp.artifact.layout import BUILD, MANIFEST, RUN
from grasp.artifact.manifest import read_manifest
from grasp.artifact.shards import ArraySpec
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.corpus.documents import documents_of
from grasp.corpus.image_store import HASH_LABEL, ImageStore
from grasp.corpus.sources import Source, open_source
from grasp.corpus.store import RowStore
from grasp.errors import ArtifactError, ModelError
from grasp.extract.engine import Engine, LocalEngine, Workers
from grasp.extract.finish import PooledKernel
from grasp.extract.forecast import expected_seconds, first_rows, refuse_untrained
from grasp.extract.forward import ShardForward, TokenKernel, UnitFeatures, forward_units
from grasp.extract.moments import (
    Store,
    build_token_moments,
    pooled_moments,
    spool_moments,
    spool_pooled_sample,
    spool_position_moments,
)
from grasp.extract.passes import Units
from grasp.extract.progress import Progress, Silent
from grasp.features.moments import Moments
from grasp.files import differences
from grasp.models.causal_lm import ReferenceModel, refuse_classifier
from grasp.models.classifier import ImageClassifier
from grasp.models.reference import Reference, load_reference
from grasp.settings import BuildSettings, read_yaml, write_yaml
from grasp.targets import Unit, UnitSet, UnitTokens, load_units
from grasp.targets.images import load_image_units
from grasp.text import duration_text


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a build reads, ready."""

    settings: BuildSettings
    model: Reference
    store: Store
    unit_set: UnitSet
    units: UnitFeatures
    positions_E: list[int]  # tokens that carry loss, per unit
    model_fingerprint: str

    @property
    def n_units(self) -> int:
        return len(self.unit_set.units)


@dataclass(frozen=True, slots=True)
class InMemory:
    """What the caller has at hand already; the settings name it by its fingerprint."""

    model: ReferenceModel | None = None
    source: Source | None = None
    units: Sequence[Unit] = ()


def build(
    settings: BuildSettings,
    out: Path,
    *,
    progress: Progress | None = None,
    engine: Engine | None = None,
    in_memory: InMemory = InMemory(),
    must_be_trained: bool = False,
) -> Path:
    """Build the artifact `out`, or go on with one that was begun with the same settings.

    Args:
        engine: where the model runs; none: in this process. It is no setting: a build may go on with another one.
        must_be_trained: stop at a language model that predicts the first rows no better than chance.
    Raises:
        GraspError: bad input, named; nothing that was finished is lost.
    """
    progress = progress or Silent()
    began = Clock()
    with lock_artifact(out) as lock:
        gone_on = begin(settings, out, progress)
        if (out / MANIFEST).exists():
            clean(settings, out)  # a kill may have come between the manifest and this
            return out
        model, fresh = _loaded(settings, in_memory), not has_work(out)
        inputs = prepare(settings, model, out / "tokens", progress, in_memory=in_memory, replace=fresh)
        settings = inputs.settings
        if isinstance(model, ReferenceModel) and fresh:
            look_ahead(inputs, progress, must_be_trained=must_be_trained, alone=engine is None)
        work = out / "work" / _digest(identity(inputs))
        with (engine or LocalEngine()).start(inputs.model, settings.model, settings.features, inputs.units) as workers:
            token = build_token_kernel(inputs, workers, work, progress)
            shards, pooled = run_model(inputs, token, workers, out, work, progress)
            kernel = PooledKernel.prepare(inputs.units.pooled, pooled, settings.features)
            writer = ArtifactWriter.open(
                out,
                identity=identity(inputs),
                n_rows=inputs.store.n_rows,
                shard_rows=settings.shard_rows,
                arrays=array_specs(inputs, token, kernel),
                dtype=settings.array_dtype,
                lock=lock,
            )
            for k, shard in shards([k for k in range(writer.n_shards) if k not in writer.finished]):
                finish_shard(inputs, kernel, writer, k, shard)
        close(inputs, token, pooled, writer, None if gone_on else began)
        clean(settings, out)
    return out


def _loaded(settings: BuildSettings, in_memory: InMemory) -> Reference:
    """The model, once what is cheap to read has been seen to be there."""
    if settings.model.classifier is None:
        if in_memory.model is None:
            refuse_classifier(settings.model.path)
        load_units(settings.targets, in_memory.units)
        source = in_memory.source or open_source(settings.corpus.path, settings.corpus.split)
        next(documents_of(source, settings.corpus), None)
    return in_memory.model or load_reference(settings.model)


def look_ahead(inputs: Inputs, progress: Progress, *, must_be_trained: bool, alone: bool) -> None:
    """Tell how long it will take, unless others help; stop at a model that has learned nothing."""
    rows, features = first_rows(inputs.store), inputs.settings.features
    if must_be_trained:
        refuse_untrained(inputs.model, rows, features)
    if alone:
        seconds = expected_seconds(inputs.model, inputs.store, rows, features)
        progress.note(
            f"{inputs.store.n_tokens:,} tokens on {inputs.model.device}: about {duration_text(seconds)}, by the first "
            f"{len(rows)} rows"
        )


@dataclass(frozen=True)
class Clock:
    """Time since it was made; CPU seconds are of all threads of this process."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def seconds(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}


def has_work(out: Path) -> bool:
    """Whether the model has run for what lies here: that is kept, whatever is asked for next."""
    return (out / "work").exists() or (out / BUILD).exists()


def begin(settings: BuildSettings, out: Path, progress: Progress) -> bool:
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
    elif finished:  # a published copy; what is left open follows from model and corpus
        changed = [line for line in differences(read_manifest(out).settings, now) if not line.endswith("now null")]
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


def prepare(
    settings: BuildSettings,
    model: Reference,
    tokens: Path,
    progress: Progress,
    *,
    in_memory: InMemory = InMemory(),
    replace: bool = False,
) -> Inputs:
    """Rows on disk, units through the model; the settings get what follows from model and corpus.

    Args:
        replace: rows of another corpus that lie in `tokens` are thrown away.
    """
    progress.stage("rows", rows=None, tokens=None)
    store: Store
    units: Units
    if isinstance(model, ImageClassifier):
        classes, n_classes = model.classes, model.vocab_size
        unit_set, units = load_image_units(settings.targets, settings.corpus, classes, n_classes)
        store = ImageStore.write(
            tokens,
            settings.corpus,
            classes,
            n_classes,
            shard_rows=settings.shard_rows,
            replace=replace,
            progress=_difference(progress),
        )
        positions_E = [1] * len(unit_set.units)
    else:
        unit_set, units, store, settings = _texts(settings, model, tokens, progress, in_memory, replace)
        positions_E = [len(unit.input_ids) - unit.first for unit in units]
        tell_rows(store, model, progress)
    progress.stage("units", rows=None, tokens=None)
    return Inputs(
        settings=settings,
        model=model,
        store=store,
        unit_set=unit_set,
        units=forward_units(model, units, [unit.unit_id for unit in unit_set.units], settings.features),
        positions_E=positions_E,
        model_fingerprint=model.fingerprint(),
    )


def _texts(
    settings: BuildSettings, model: ReferenceModel, tokens: Path, progress: Progress, in_memory: InMemory, replace: bool
) -> tuple[UnitSet, list[UnitTokens], RowStore, BuildSettings]:
    """Units and rows as tokens, and the settings with the lengths that they have."""
    context = model.context
    if context is not None and (settings.corpus.max_length or 0) > context:
        raise ModelError(
            f"corpus.max_length: rows of {settings.corpus.max_length} tokens, the model has {context} positions; set "
            f"{context} or less"
        )
    longest = min(settings.targets.max_length, context or settings.targets.max_length)
    unit_set = load_units(settings.targets, in_memory.units)
    unit_tokens = unit_set.tokenize(model.tokenizer, longest)
    store = RowStore.write(
        tokens,
        settings.corpus,
        model.tokenizer,
        shard_rows=settings.shard_rows,
        context=context,
        source=in_memory.source,
        replace=replace,
        progress=_difference(progress),
    )
    corpus = settings.corpus.model_copy(update={"max_length": store.details["max_length"]})
    targets = settings.targets.model_copy(update={"max_length": longest})
    return unit_set, unit_tokens, store, settings.model_copy(update={"corpus": corpus, "targets": targets})


def tell_rows(store: RowStore, model: ReferenceModel, progress: Progress) -> None:
    """Which column became what, and how long rows are."""
    roles = store.details["columns"]
    names = {"text": "text", "input_ids": "token ids", "row_id": "names of rows", "doc_id": "names of documents"}
    progress.note("columns: " + ", ".join(f"{names[role]} from {column!r}" for role, column in roles.items()))
    labels = ", ".join(store.label_columns) or "none, so no question can be asked by slice"
    left_out = f"; columns left out, nested or binary: {', '.join(store.ignored_columns)}" * bool(store.ignored_columns)
    progress.note(f"labels: {labels}{left_out}")
    reads = f"the model reads {model.context:,}" if model.context else "the model names no limit"
    progress.note(
        f"{store.n_rows:,} rows of {store.n_documents:,} documents, {store.n_tokens:,} tokens, at most "
        f"{store.details['max_length']:,} in a row ({reads})"
    )


def build_token_kernel(inputs: Inputs, workers: Workers, work: Path, progress: Progress) -> TokenKernel | None:
    """Token moments and what follows from them; none where the settings ask for no kernel or sketch of it."""
    features = inputs.settings.features
    if not features.token and not features.product_width:
        return None
    spool = FeatureSpool(work / "token-moments")
    moments = build_token_moments(inputs.model, inputs.store, features, spool, workers, progress)
    return TokenKernel.prepare(inputs.units, moments, features, inputs.model)


Shards = Callable[[Sequence[int]], Iterator[tuple[int, ShardForward]]]


def run_model(
    inputs: Inputs, token: TokenKernel | None, workers: Workers, out: Path, work: Path, progress: Progress
) -> tuple[Shards, Moments]:
    """What gives the forward halves of the shards that are asked for, in any order, and the pooled moments.

    A corpus no larger than the moment sample goes through the model at once: its features are spooled, its moments
    are exact, and shards are read back. Of a larger one only the sample is spooled, and shards run when asked for.
    """
    model, store, features = inputs.model, inputs.store, inputs.settings.features
    kept = FeatureSpool(out / "features") if inputs.settings.keep_features else None
    exact = store.n_rows <= features.moment_rows
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
        for k, shard in workers.forward(rows, token, progress.advance, keep_positions=keep):
            if kept is not None:
                kept.write(k, shard.kept())
            if spool is not None:
                spool.write(k, shard.spool())
            yield k, shard

    if spool is not None:
        for _ in run([k for k in range(store.n_shards) if not spool.has(k)]):
            pass
        return run, pooled_moments(spool, store.n_shards, model.hidden_size, model.vocab_size)
    sample = FeatureSpool(work / "pooled-sample")
    parts = spool_pooled_sample(store, features, sample, workers, progress)
    return run, pooled_moments(sample, parts, model.hidden_size, model.vocab_size)


def array_specs(inputs: Inputs, token: TokenKernel | None, pooled: PooledKernel) -> dict[str, ArraySpec]:
    """Width, unit, sign and stored scale of every array of the artifact."""
    width = {"hidden_sketch": pooled.project_HD.shape[1], "residual_sketch": pooled.sketch_VD.shape[1]}
    if inputs.settings.features.product_width:
        width["product_sketch"] = inputs.settings.features.product_width
    sketches = {name: ArraySpec(size, unit="none", sign="none") for name, size in width.items()}
    return sketches | relevance_specs(inputs, token, pooled)


def relevance_specs(inputs: Inputs, token: TokenKernel | None, pooled: PooledKernel) -> dict[str, ArraySpec]:
    """The relevance matrices: one column a unit, stored in units of its own power of two."""
    own: dict[str, NDArray[np.float64]] = {}
    if pooled.units is not None:
        own["relevance_pooled"] = pooled.unit_relevance(inputs.units.pooled)
    if token is not None:
        own |= token.unit_relevance(inputs.units)
    return {
        name: ArraySpec(
            inputs.n_units,
            unit="inner product of preconditioned gradients; unitless",
            sign="positive: training on the row should lower the unit's loss",
            scale_E=relevance_scale(own_E),
        )
        for name, own_E in own.items()
    }


def finish_shard(inputs: Inputs, kernel: PooledKernel, writer: ArtifactWriter, k: int, shard: ShardForward) -> None:
    """Sketches and pooled relevance of one shard, and the shard into the artifact."""
    arrays = kernel.sketches(shard.pooled) | kernel.relevance(shard.pooled) | shard.token
    table = inputs.store.table(k).append_column("loss", pa.array(shard.loss_N, pa.float32()))
    writer.write_shard(k, arrays, table, column_sums(arrays))


def column_sums(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
    """Sum and sum of squares of every column, for means, gains and closed-form moments."""
    sums: dict[str, NDArray[np.float64]] = {}
    for name, array in arrays.items():
        wide = array.astype(np.float64)
        sums[f"{name}.total"] = wide.sum(axis=0)
        sums[f"{name}.square"] = (wide**2).sum(axis=0)
    return sums


def close(
    inputs: Inputs, token: TokenKernel | None, pooled: Moments, writer: ArtifactWriter, began: Clock | None
) -> None:
    """Gains of the sketches, moments, units, manifest: the artifact is complete."""
    if writer.complete:
        return
    sums, n_rows = writer.sums(), inputs.store.n_rows
    moments = spool_moments(pooled, "pooled.")
    if token is not None:
        moments |= spool_position_moments(token.moments)
    gains = {
        name: sketch_gain(sums[f"{name}.square"], n_rows)
        for name in ("hidden_sketch", "residual_sketch", "product_sketch")
        if f"{name}.square" in sums
    }
    writer.finish(
        manifest=manifest(inputs, began),
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


def unit_table(inputs: Inputs) -> pa.Table:
    """One row a unit, in the order of the columns of the relevance arrays."""
    units = inputs.unit_set.units
    hashes = [unit.image_hash for unit in units]
    return pa.table(
        {
            "unit_id": [unit.unit_id for unit in units],
            "target": [unit.target for unit in units],
            "n_positions": pa.array(inputs.positions_E, pa.int32()),
            "loss": pa.array(inputs.units.loss_E, pa.float32()),
            "prompt": [unit.prompt for unit in units],
            "completion": [unit.completion for unit in units],
        }
        | ({HASH_LABEL: pa.array(hashes, pa.string())} if any(hashes) else {})
    )


def identity(inputs: Inputs) -> dict[str, Any]:
    """All that decides the numbers."""
    model = inputs.model
    return {
        "model": inputs.model_fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        **model.batching,
        "corpus": inputs.store.fingerprint,
        "targets": inputs.unit_set.fingerprint,
        "features": inputs.settings.features.model_dump(mode="json"),
    }


def manifest(inputs: Inputs, began: Clock | None) -> dict[str, Any]:
    """Where the artifact comes from, what was left out, and the time it took; None: it was killed in between."""
    store, model = inputs.store, inputs.model
    reader, reader_fingerprint = model.reader
    return {
        "made_by": {
            "program": f"grasp {grasp.__version__}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "fingerprints": {
            "model": inputs.model_fingerprint,
            reader: reader_fingerprint,
            "corpus": store.fingerprint,
            "targets": inputs.unit_set.fingerprint,
        },
        "settings": inputs.settings.model_dump(mode="json"),
        "skipped": {"rows": asdict(store.skipped), "columns": list(store.ignored_columns)},
        "details": {
            "model": type(model.model).__name__,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "n_tokens": store.n_tokens,
            "n_documents": store.n_documents,
            "labels": list(store.label_columns),
            "columns": store.details.get("columns"),
            "classes": list(model.classes) if isinstance(model, ImageClassifier) else None,
            "loss": "nats a token, mean over the positions that the head was applied to",
            "build_seconds": None if began is None else began.seconds(),
        },
    }


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


def _difference(progress: Progress) -> Callable[[int], None]:
    """Rows so far -> rows more."""
    done = 0

    def advance(so_far: int) -> None:
        nonlocal done
        progress.advance(so_far - done, 0)
        done = so_far

    return advance


def _digest(data: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()
