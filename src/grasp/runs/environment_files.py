"""The files of an environment: environment.json, results line by line, the subsets trained on, and runs that failed.

environment.json says what was trained on what, and what may change when an environment is gone on with. Results are
`subset_id, seed, target, unit_id, utility` in any order, checked on reading; subsets `subset_id, row_id, weight`. Of
runs that failed since `grasp retrain` was last called, `failed/<run>.txt` says why in a line.

Shape letters: R runs, E units.
"""

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field
from pydantic_core import to_jsonable_python

from grasp.arrays import F64
from grasp.errors import EnvironmentDataError, ModelError
from grasp.files import differences, discard, write_whole
from grasp.predict.weights import SubsetBlock
from grasp.settings import CorpusSettings, Settings, TargetSettings
from grasp.store.records import Signed
from grasp.store.sealed import SealedWriter, read_sealed
from grasp.targets.units import LossOn

Role = Literal["dev", "held-out"]

FORMAT_VERSION = 1
INFO = "environment.json"
FULL = "full"  # the run on the whole corpus
EXAMPLES = 3
STEM_BYTES = 200  # of the file names of a run; file systems take 255, endings included
SCHEMA = pa.schema(
    [
        ("subset_id", pa.string()),
        ("seed", pa.int64()),
        ("target", pa.string()),
        ("unit_id", pa.string()),
        ("utility", pa.float32()),
    ]
)
COLUMNS = tuple(SCHEMA.names)
LARGEST = 1e30  # of a utility: sums of squares stay finite
DIRECTORY = "failed"


class TargetInfo(Settings):
    """One target as it was scored."""

    fingerprint: str = Field(description="Of its units: ids, prompts, completions, tokens that carry loss.")
    loss_on: LossOn
    unit_ids: tuple[str, ...]


class FamilyInfo(Settings):
    """How the subsets were drawn, so that they can be drawn again."""

    spec: str = Field(description="E.g. mixture:topic.")
    seed: int
    purpose: str


class EnvironmentInfo(Settings):
    """environment.json."""

    format: Literal["grasp-environment"] = "grasp-environment"
    format_version: int = FORMAT_VERSION
    role: Role = Field(description="Whether protocols may be selected on it.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of a dev environment that are held out.")
    recipe: str = Field(description="Name of the recipe.")
    recipe_settings: dict[str, Any] = Field({}, description="The recipe in full.")
    checkpoint: str = Field("reference/seed-0", description="The reference model, relative to the environment.")
    seeds: tuple[int, ...]
    corpus_fingerprint: str
    n_rows: int
    targets: dict[str, TargetInfo]
    side: Literal["retained"] = "retained"
    family: FamilyInfo | None = Field(None, description="None: the subsets were given as a table.")
    subset_ids: tuple[str, ...]
    masks_checksum: str = Field(description="Over subset ids, row positions and weights, in order.")
    reference: bool = Field(True, description="Whether the whole corpus is trained on as well, once a seed.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and settings; not compared on resume.")
    checksum: str = Field("", description="Of this file, with the checksum itself as zeros; empty: written by hand.")

    def build_command(self, path: Path) -> str | None:
        """The `grasp build` that gives an artifact of the same rows and units; None: it is not known how they came.

        Args:
            path: directory of the environment.
        """
        corpus, targets = (self.made_by.get(group) for group in ("corpus", "targets"))
        if not isinstance(corpus, dict) or not isinstance(targets, dict) or not self.reference:
            return None
        words = ["--model", str(path / self.checkpoint), "--corpus", str(corpus["path"])]
        words += ["--targets", ",".join(targets["names"])] if targets.get("names") else []
        words += [*_changed("corpus", corpus, CorpusSettings), *_changed("targets", targets, TargetSettings)]
        return f"grasp build {shlex.join([*words, '--out', 'art'])}"


def _changed(group: str, given: dict[str, Any], kind: type[Settings]) -> list[str]:
    """What a build must be told beside path and names: settings that are not the default."""
    fields = {name: field for name, field in kind.model_fields.items() if name not in ("path", "names")}
    plain = {name: to_jsonable_python(field.get_default(call_default_factory=True)) for name, field in fields.items()}
    other = [name for name in given if name in plain and given[name] != plain[name]]
    return [part for name in other for part in ("--set", f"{group}.{name}={json.dumps(given[name])}")]


def check_growth(path: Path, begun: EnvironmentInfo, now: EnvironmentInfo, checksums: list[str]) -> None:
    """Allow more seeds and more subsets of the same family; name every other difference."""
    fixed = set(EnvironmentInfo.model_fields) - {"seeds", "subset_ids", "masks_checksum", "made_by", "checksum"}
    differs = list(
        differences(begun.model_dump(mode="json", include=fixed), now.model_dump(mode="json", include=fixed))
    )
    if now.seeds[: len(begun.seeds)] != begun.seeds:
        differs.append(f"seeds: was {begun.seeds}, is {now.seeds}")
    n_begun = len(begun.subset_ids)
    if len(checksums) < n_begun or checksums[n_begun - 1] != begun.masks_checksum:
        differs.append(
            f"subsets: was {n_begun} with checksum {begun.masks_checksum}, is {len(checksums)} with {checksums[-1]}"
        )
    if differs:
        shortened = [text if len(text) < 400 else text[:400] + " ..." for text in differs]
        raise EnvironmentDataError(
            f"{path}: another environment was begun here: {'; '.join(shortened)}; "
            "go on with the old settings, or choose another directory"
        )


SIGNED_INFO = Signed(
    INFO,
    EnvironmentInfo,
    "the record of an environment",
    "grasp-environment",
    FORMAT_VERSION,
    "restore it from a copy",
    EnvironmentDataError,
    none=f"is not an environment (no {INFO}); name what grasp retrain or grasp runs import wrote",
    unsigned=True,
)


# ------------------------------------------------------------------------------------------------ results, line by line


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One training run: the unit of work, of claims, and of what a kill can cost."""

    seed: int
    subset_id: str

    @property
    def stem(self) -> str:
        """File name without suffix; safe for any subset id."""
        return f"{quote(self.subset_id, safe='')}-{self.seed}"


def run_bytes(runs: Sequence[Run], units: Sequence[tuple[str, str]], utility_RE: F64) -> bytes:
    """A Parquet file of the utilities of `runs`; float32, 3 to 4 bytes a line.

    Args:
        units: (target, unit_id) of each column.
        utility_RE: -loss, nats a token.
    """
    n_runs, n_units = utility_RE.shape
    unit_of = pa.array(np.tile(np.arange(n_units), n_runs))
    run_of = pa.array(np.repeat(np.arange(n_runs), n_units))
    table = pa.table(
        {
            "subset_id": pa.array([run.subset_id for run in runs], pa.string()).take(run_of),
            "seed": pa.array([run.seed for run in runs], pa.int64()).take(run_of),
            "target": pa.array([name for name, _ in units], pa.string()).take(unit_of),
            "unit_id": pa.array([unit for _, unit in units], pa.string()).take(unit_of),
            "utility": pa.array(utility_RE.ravel(), pa.float32()),
        }
    )
    sink = pa.BufferOutputStream()
    how: dict[str, Any] = {"use_dictionary": list(COLUMNS[:-1]), "column_encoding": {"utility": "BYTE_STREAM_SPLIT"}}
    with SealedWriter(sink, table.schema, compression_level=19, **how) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def runs_in(path: Path) -> set[Run]:
    """Which runs a table has lines of; the lines themselves are not checked."""
    pairs = _read(path, ["subset_id", "seed"]).group_by(["subset_id", "seed"]).aggregate([])
    return {Run(row["seed"], row["subset_id"]) for row in pairs.to_pylist()}


def read_runs(path: Path, runs: Sequence[Run], units: Sequence[tuple[str, str]]) -> dict[Run, F64]:
    """Utilities (E,) of every run that the table has lines of.

    Args:
        runs: all runs that may occur.
        units: (target, unit_id) of each unit; every run must have every one.
    Raises:
        EnvironmentDataError: not Parquet, a column is missing, an empty cell, a name that may not occur, a
            utility that is not finite, a line twice, a run that lacks units. The message names the first.
        FileNotFoundError: no such file; where runs are merged while they are read this is no mistake.
    """
    table = _read(path, list(COLUMNS))
    r = _codes(table, ("subset_id", "seed"), {(run.subset_id, run.seed): i for i, run in enumerate(runs)}, path)
    e = _codes(table, ("target", "unit_id"), {unit: i for i, unit in enumerate(units)}, path)
    utility = table.column("utility").to_numpy().astype(np.float64)

    def cell(r: int, e: int) -> str:
        return f"{path}: subset {runs[r].subset_id!r}, seed {runs[r].seed}, {units[e][0]} unit {units[e][1]!r}"

    bad = np.flatnonzero(~(np.abs(utility) <= LARGEST))  # nan compares false
    if bad.size:
        raise EnvironmentDataError(
            f"{cell(r[bad[0]], e[bad[0]])}: utility is {utility[bad[0]]} ({bad.size} such); delete that run and "
            "retrain it"
        )
    counts_RE = np.bincount(r * len(units) + e, minlength=len(runs) * len(units)).reshape(len(runs), len(units))
    for wrong, what, expected in (
        (counts_RE > 1, f"occurs {counts_RE.max()} times", "each once"),
        ((counts_RE == 0) & counts_RE.any(axis=1, keepdims=True), "is missing", "every unit of a run"),
    ):
        if wrong.any():
            r0, e0 = np.argwhere(wrong)[0]
            raise EnvironmentDataError(f"{cell(r0, e0)} {what} ({wrong.sum()} such); expected {expected}")
    values_RE = np.zeros((len(runs), len(units)))
    values_RE[r, e] = utility
    return {run: values_RE[i] for i, run in enumerate(runs) if counts_RE[i].any()}


def _read(path: Path, columns: list[str]) -> pa.Table:
    try:
        names = list(pq.read_schema(path).names)
        if missing := [name for name in COLUMNS if name not in names]:
            raise EnvironmentDataError(f"{path}: has columns {names}, lacks {missing}")
        table = read_sealed(path, columns)
        table.validate(full=True)  # a flipped bit may leave names that are no text
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise EnvironmentDataError(
            f"{path}: cannot be read as Parquet: {' '.join(str(err).split())}; delete it and retrain, or restore it"
        ) from err
    for name in columns:
        empty = table.column(name).null_count
        if empty:
            raise EnvironmentDataError(f"{path}: column {name} has {empty} empty cells, expected none")
    return table


def _codes(table: pa.Table, columns: tuple[str, str], code_of: Mapping[Any, int], path: Path) -> NDArray[np.int64]:
    """Position of each line's pair of names; a pair that the environment does not have is refused."""
    first, second = (table.column(name).combine_chunks().dictionary_encode() for name in columns)
    a_names, b_names = first.dictionary.to_pylist(), second.dictionary.to_pylist()
    grid = np.array([[code_of.get((a, b), -1) for b in b_names] for a in a_names], dtype=np.int64)
    a = first.indices.to_numpy(zero_copy_only=False)
    b = second.indices.to_numpy(zero_copy_only=False)
    codes = grid.reshape(len(a_names), len(b_names))[a, b]
    unknown = np.flatnonzero(codes < 0)
    if unknown.size:
        line = unknown[0]
        raise EnvironmentDataError(
            f"{path}: line {line} has {columns[0]} {a_names[a[line]]!r}, {columns[1]} {b_names[b[line]]!r}, which "
            f"environment.json does not list ({unknown.size} such lines)"
        )
    return np.asarray(codes, dtype=np.int64)


# ---------------------------------------------------------------------------------------------------------- subsets


class MaskDigest:
    """Running checksum over the ids and rows of subsets, and weights other than 1, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.ids: list[str] = []
        self.checksums: list[str] = []  # after each subset

    def seen(self, blocks: Iterable[SubsetBlock]) -> Iterator[SubsetBlock]:
        """The same blocks, each of which is added as it passes."""
        for block in blocks:
            self._add(block)
            yield block

    def check_names(self, where: Path) -> None:
        """See that runs can be called by the ids; `where` begins the message.

        Raises:
            EnvironmentDataError: there are no subsets, or some are repeated, reserved, or too long for a file.
        """
        if not self.ids:
            raise EnvironmentDataError(f"{where}: got no subsets, expected at least one")
        wrong = sorted({name for name, count in Counter(self.ids).items() if count > 1} | ({FULL} & set(self.ids)))
        if wrong:
            raise EnvironmentDataError(
                f"{where}: subset ids {wrong[:EXAMPLES]} are repeated or reserved; name every subset once"
            )
        long = [name for name in self.ids if len(Run(0, name).stem) > STEM_BYTES]
        if long:
            raise EnvironmentDataError(
                f"{where}: subset id {long[0][:40]!r}... takes {len(Run(0, long[0]).stem)} bytes in the name of a file "
                f"({len(long)} such), expected at most {STEM_BYTES}; shorten it"
            )

    def _add(self, block: SubsetBlock) -> None:
        matrix = block.weights_BN
        for b, subset_id in enumerate(block.subset_ids):
            own = slice(matrix.indptr[b], matrix.indptr[b + 1])
            order = np.argsort(matrix.indices[own])
            rows, weights = matrix.indices[own][order], matrix.data[own][order]
            self._digest.update(subset_id.encode() + b"\0" + rows.astype("<i8").tobytes())
            if (weights != 1.0).any():
                self._digest.update(weights.astype("<f8").tobytes())
            self.ids.append(subset_id)
            self.checksums.append(self._digest.hexdigest())


def mark_failed(environment: Path, run: Run, why: str) -> None:
    """Keep why a run failed."""
    (environment / DIRECTORY).mkdir(exist_ok=True)
    write_whole(environment / DIRECTORY / f"{run.stem}.txt", " ".join(why.split()).encode())


def failures(environment: Path) -> dict[str, str]:
    """Why each run failed, by its stem."""
    files = sorted((environment / DIRECTORY).glob("[!.]*.txt"))
    return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}


def forget_failures(environment: Path) -> None:
    """What failed is tried again."""
    discard(environment / DIRECTORY)


def failed_line(environment: Path, total: int) -> str | None:
    """How many runs failed, and why the first of them did; none: no run failed."""
    failed = failures(environment)
    if not failed:
        return None
    stem, why = next(iter(failed.items()))
    again = f"the same command tries {'it' if len(failed) == 1 else 'them'} again"
    return f"{len(failed)} of {total} runs failed, e.g. {stem}: {why}; {again}"


def refuse_all_failed(environment: Path, total: int) -> None:
    """See that not every run failed.

    Raises:
        ModelError: every one did.
    """
    line = failed_line(environment, total)
    if line is not None and len(failures(environment)) == total:
        raise ModelError(f"{environment}: {line}")
