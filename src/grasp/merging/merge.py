"""Merge artifacts that were built on several machines, each from its own source, into one artifact.

Numbers of different artifacts are comparable only if model, features, moments and units are equal, which is checked.
Stored numbers are copied bit for bit into new shards. Quantities that depend on the whole corpus (gains of the
sketches, totals, skipped rows) are recomputed. Replays are left out, since each is of a training on one part. Texts,
tokens and stored features stay with the artifacts that are merged (the parts). Start with `merge`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import grasp
from grasp.artifact.manifest import LEAKS, LOSS_TOKENS, PER_UNIT, ROW_COLUMNS, SUM, UNITS
from grasp.artifact.reader import ArtifactReader, Leaks
from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact
from grasp.corpus.packing import Skipped
from grasp.corpus.row_store import first_duplicate
from grasp.errors import ArtifactError, SettingsError
from grasp.files import DISK_FULL_ERRORS, atomic_path, check_outputs, differences
from grasp.pipeline.inputs import identity_changes, identity_of
from grasp.pipeline.pipeline import sketch_gain
from grasp.progress import Progress
from grasp.store.remote import remote_url

REMEDY = "build the later part with --like and the first one, and with its model, features and targets"


def merge(parts: Sequence[Path | str], out: Path | str, *, progress: Progress | None = None) -> ArtifactReader:
    """Write the rows of several artifacts, in the given order, as one artifact.

    Args:
        parts: artifacts of the same model, features, moments and units, with distinct row names.
        out: new directory; it appears once it is complete.
        progress: receives stages, notes and numbers of rows.
    Raises:
        ArtifactError: parts differ (every difference is named), a row_id is in two of them, or types of a label differ.
        SettingsError: fewer than two parts, or `out` exists.
    """
    progress, directory, problem = progress or Progress(), Path(out), ""
    if len(parts) < 2:
        problem = f"parts: got {len(parts)}, expected at least two artifacts"
    elif remote_url(out) is not None:
        problem = f"--out: got {out}, expected a directory on this machine"
    elif directory.exists():
        problem = f"--out: {directory} exists already; choose another name, or remove it"
    if problem:
        raise SettingsError(problem)
    opened = [ArtifactReader.open(part) for part in parts]
    check_outputs({"--out": directory}, {"is a part": [part.path for part in opened]})
    for part in opened[1:]:
        _require_compatible(opened[0], part)
    if duplicate := first_duplicate([([part.rows_path], str(k)) for k, part in enumerate(opened)]):
        name, first, last, count = duplicate
        raise ArtifactError(
            f"row_id {name!r} is in {opened[first].location} and in {opened[last].location} ({count:,} such rows in "
            "total); use distinct names (corpus.row_id_column), or remove the documents that are in both"
        )
    schema = pa.schema([])  # columns of all parts; a label that is absent in a part is null there
    for part in opened:
        try:
            schema = pa.unify_schemas([schema, pq.read_schema(part.rows_path)])
        except pa.ArrowTypeError as err:
            raise ArtifactError(
                f"{part.location}: a label has another type than in earlier parts: {err}; rebuild it with their type"
            ) from err
    schema = pa.schema([field for field in schema if field.name != "row_index"])
    try:
        with atomic_path(directory) as temporary:
            _write(opened, schema, temporary, progress)
    except ArtifactError as err:
        # the writer advises to resume, which merge cannot
        if isinstance(err.__cause__, OSError) and err.__cause__.errno in DISK_FULL_ERRORS:
            raise ArtifactError(
                f"{directory}: {err.__cause__.strerror}; nothing was written: free space and run the same command again"
            ) from err
        raise
    return ArtifactReader.open(directory)


def _require_compatible(first: ArtifactReader, part: ArtifactReader) -> None:
    """Check that the numbers of two parts are comparable."""
    names = {*first.manifest.fingerprints, *part.manifest.fingerprints} - {"corpus"}
    mismatches = identity_changes(identity_of(first), identity_of(part), names)
    before, after = (
        {
            "targets": artifact.manifest.targets,
            "arrays": {
                name: {"width": entry.width, "unit": entry.unit, "sign": entry.sign}
                for name, entry in artifact.manifest.arrays.items()
                if not entry.targets
            },
        }
        for artifact in (first, part)
    )
    mismatches += differences(before, after)
    for name in sorted(name for name in {*first.moments, *part.moments} if not name.startswith((LEAKS, UNITS, SUM))):
        both = name in first.moments and name in part.moments
        if not both or not np.array_equal(first.moments[name], part.moments[name]):
            mismatches.append(f"moments.{name}: other numbers")
    for name in dict.fromkeys([*first.units.column_names, *part.units.column_names]):
        values = [
            artifact.units[name].to_pylist() if name in artifact.units.column_names else None
            for artifact in (first, part)
        ]
        if name != "loss" and values[0] != values[1]:  # losses may differ by rounding between machines
            mismatches.append(f"units.{name}: other values")
    if mismatches:
        raise ArtifactError(
            f"{part.location} cannot be merged with {first.location} (`was` is the latter): "
            f"{'; '.join(mismatches)}; {REMEDY}"
        )


def _write(parts: Sequence[ArtifactReader], schema: pa.Schema, out: Path, progress: Progress) -> None:
    """Write the merged artifact, shard after shard."""
    first = parts[0].manifest
    n_rows = sum(part.n_rows for part in parts)
    sums = {
        name: np.sum([part.moments[name] for part in parts], axis=0)
        for name in parts[0].moments
        if name.startswith(SUM)
    }
    gains = {
        name: sketch_gain(sums[f"{SUM}{name}.square"], n_rows) for name in first.arrays if not name.startswith(PER_UNIT)
    }
    dtypes = {group.dtype for part in parts for entry in part.manifest.arrays.values() for group in entry.groups}
    arrays = {
        name: ArraySpec(
            entry.width, entry.unit, entry.sign, scale_E=np.maximum.reduce([part.array_scale(name) for part in parts])
        )
        for name, entry in first.arrays.items()
        if not entry.targets  # a replay is of one corpus: scores of two are not comparable
    }
    if any(entry.targets for part in parts for entry in part.manifest.arrays.values()):
        progress.note("replays of the parts are left out, since each is of a training on its part alone")
    manifest = _manifest(parts, [name for name in schema.names if name not in (*ROW_COLUMNS, LOSS_TOKENS)])
    unscaled_parts = []  # the parts without their gains: the merged artifact has gains of its own
    for part in parts:
        unscaled = ArtifactReader.open(part.location)
        entries = {name: entry.model_copy(update={"gain": 1.0}) for name, entry in part.manifest.arrays.items()}
        unscaled.manifest = part.manifest.model_copy(update={"arrays": entries})
        unscaled_parts.append(unscaled)
    first_rows = np.cumsum([0, *(part.n_rows for part in parts)])
    with lock_artifact(out):
        writer = ArtifactWriter.open(
            out,
            identity={"parts": manifest["details"]["parts"]},
            n_rows=n_rows,
            shard_rows=first.shard_rows,
            arrays=arrays,
            dtype="float16" if dtypes == {"float16"} else "float32",
        )
        progress.stage("merge", rows=n_rows, tokens=None)
        for k in range(writer.grid.n_shards):
            start, stop = writer.grid.bounds(k)
            spans = [
                (part, np.arange(max(start - first_row, 0), min(stop - first_row, part.n_rows)))
                for part, first_row in zip(unscaled_parts, first_rows[:-1], strict=True)
            ]
            spans = [(part, rows) for part, rows in spans if len(rows)]
            tables = [part.rows(rows) for part, rows in spans]
            if LOSS_TOKENS in schema.names:
                for i, table in enumerate(tables):
                    if LOSS_TOKENS not in table.column_names:  # plain text: all but the first token
                        n_loss = pc.subtract(table["n_tokens"], 1).cast(schema.field(LOSS_TOKENS).type)
                        tables[i] = table.append_column(LOSS_TOKENS, n_loss)
            table = pa.concat_tables([schema.empty_table(), *tables], promote_options="permissive").select(schema.names)
            shard = {name: np.concatenate([part.array_rows(name, rows) for part, rows in spans]) for name in arrays}
            writer.write_shard(k, shard, table, {})
            progress.advance(table.num_rows, 0)
        moments = {name: array for name, array in parts[0].moments.items() if not name.startswith(LEAKS)} | sums
        for target in parts[0].targets:
            leaks = [part_leaks for part in parts if (part_leaks := part.leaks(target)) is not None]
            if len(leaks) == len(parts):
                rows = [row + of_part.row_index for row, of_part in zip(first_rows[:-1], leaks, strict=True)]
                moments |= Leaks(np.concatenate(rows), leaks[0].n_compared, leaks[0].n_questions).arrays(target)
        writer.finish(manifest=manifest, moments=moments, units=parts[0].units, gains=gains)


def _manifest(parts: Sequence[ArtifactReader], labels: Sequence[str]) -> dict[str, Any]:
    """Return the provenance fields of the merged manifest."""
    manifests = [part.manifest for part in parts]
    first = manifests[0]
    origins = [
        {"path": part.location, "rows": part.n_rows, "corpus": part.manifest.fingerprints.get("corpus")}
        for part in parts
    ]
    corpora_of_parts = repr([(origin["corpus"], origin["rows"]) for origin in origins]).encode()
    corpora = [manifest.settings.get("corpus") or {} for manifest in manifests]
    shared = {name: value for name, value in corpora[0].items() if all(corpus.get(name) == value for corpus in corpora)}
    skipped = Skipped()
    columns: dict[str, None] = {}
    for manifest in manifests:
        rows = manifest.skipped.get("rows", {})
        skipped.extend(*(rows.get(part, {}) for part in ("counts", "ids", "examples")))
        columns |= dict.fromkeys(manifest.skipped.get("columns", ()))
    part_seconds: list[Any] = [manifest.details.get("build_seconds") for manifest in manifests]  # None: interrupted
    seconds = None
    if None not in part_seconds:
        seconds = {name: sum(times[name] for times in part_seconds) for name in ("wall", "cpu")}
    return {
        "made_by": first.made_by | {"program": f"grasp {grasp.__version__}"},
        "fingerprints": first.fingerprints | {"corpus": hashlib.blake2b(corpora_of_parts, digest_size=16).hexdigest()},
        "settings": first.settings | {"like": None, "keep_tokens": False, "keep_features": False, "corpus": shared},
        "skipped": {"rows": asdict(skipped), "columns": list(columns)},
        "details": {
            **{name: value for name, value in first.details.items() if name != "replays"},
            **{name: sum(manifest.details[name] for manifest in manifests) for name in ("n_tokens", "n_documents")},
            "labels": list(labels),
            "build_seconds": seconds,
            "parts": origins,
        },
    }
