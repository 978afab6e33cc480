"""Which rows each method chooses, and the one table of subsets that models are trained on.

A subset is named by its rows, so what two methods choose alike is trained on once. Subsets are only ever added to the
table: a protocol that changes adds its own, and what was trained on before stays as it is.

Shape letters: N rows, K rows chosen, G values of a label.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.curation.setting import World
from grasp.arrays import I64
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.files import temporary_path, write_atomically
from grasp.methods.registry import configure_methods, score_artifact
from grasp.predict.predictor import UnitSelection
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import label_slices
from grasp.seeds import stream
from grasp.select.mix import mix
from grasp.select.select import select
from grasp.store.locks import locked

RANDOM, BM25, ADDITIVE, GRASP, MIXTURE = "random", "bm25", "additive", "grasp", "mixture"
METHODS = (RANDOM, BM25, ADDITIVE, GRASP, MIXTURE)
REFERENCE = "llama"  # the architecture of the artifact's own reference model


@dataclass(frozen=True)
class SelectionRequest:
    """One selection that is wanted."""

    method: str
    targets: str  # one target, or `all`
    share: float  # of the pool's rows
    draw: int = 0  # of a random selection
    scorer: str = REFERENCE  # architecture of the reference model


@dataclass(frozen=True)
class SelectionRecord:
    """One selection that was made."""

    asked: SelectionRequest  # stored name
    subset_id: str
    rows: int
    tokens: int
    protocol: str  # digest of what chose; empty where no protocol did
    about: Mapping[str, Any]  # worth reading: predicted value, mixture


class Chooser:
    """Makes selections, or finds them among those that were made."""

    def __init__(self, world: World, artifacts: Mapping[str, ArtifactReader] | None = None) -> None:
        self.world = world
        self.artifacts = {REFERENCE: world.artifact} | dict(artifacts or {})
        self._records = world.work / "choices.json"
        self.subsets = world.work / "subsets.parquet"

    def select_all(self, wanted: Sequence[SelectionRequest]) -> list[SelectionRecord]:
        """The selections, in the order wanted; new ones are written down before they are given back."""
        with locked(self.world.work / ".choices.lock", wait=True):
            known = {(record.asked, record.protocol): record for record in self._read()}
            choices = []
            for request in wanted:
                key = (request, self._digest(request))
                if key not in known:
                    known[key] = self._make(request)
                    self._write(list(known.values()))
                choices.append(known[key])
        return choices

    def _make(self, request: SelectionRequest) -> SelectionRecord:
        rows, about = self._chosen(request)
        rows = np.sort(rows)
        subset_id = self._add(rows)
        return SelectionRecord(request, subset_id, len(rows), self.world.tokens_of(rows), self._digest(request), about)

    def _chosen(self, request: SelectionRequest) -> tuple[I64, dict[str, Any]]:
        budget = self.world.budget(request.share)
        if request.method == RANDOM:
            return drawn(self.world.pool_N, budget, request.draw), {}
        if request.method == BM25:
            return self._by_words(request, budget), {}
        if request.method == MIXTURE:
            return self._by_mixture(request, budget)
        return self._by_grasp(request, budget)

    def _by_words(self, request: SelectionRequest, budget: int) -> I64:
        """The rows of the greatest sum of BM25 scores over the targets' units."""
        (method,) = configure_methods([BM25])
        source = score_artifact(self.world.artifact, method)
        units = UnitSelection.from_targets(self.world.artifact, list(self._weights(request)))
        score_N = np.zeros(source.n_rows)
        for start, block in source.array_blocks(f"relevance_{BM25}", columns=units.columns_E):
            score_N[start : start + len(block)] = block.sum(axis=1, dtype=np.float64)
        return best_rows(score_N, self.world.pool_N, budget)

    def _by_grasp(self, request: SelectionRequest, budget: int) -> tuple[I64, dict[str, Any]]:
        """`grasp select`, with the held-out documents excluded."""
        artifact, protocol = self.artifacts[request.scorer], self._protocol(request)
        held_out = self.world.row_ids.filter(pa.array(np.logical_not(self.world.pool_N))).to_pylist()
        chosen = select(artifact, budget, self._weights(request), exclude=held_out, protocol=protocol)
        changes = {line["target"]: line["change"] for line in chosen.targets.to_pylist()}
        return chosen.row_index, {"value": chosen.value, "change": changes}

    def _by_mixture(self, request: SelectionRequest, budget: int) -> tuple[I64, dict[str, Any]]:
        """`grasp mix`, no value asked for more rows than it has; then rows of each value at random."""
        world, protocol = self.world, self._protocol(request)
        artifact = self.artifacts[request.scorer]
        slices = label_slices(LabelTable(artifact.rows_path).column(world.settings.label), row_tokens(artifact))
        held_G = np.bincount(slices.codes_N[world.pool_N], minlength=len(slices.slices))
        shares_G = np.minimum(1.0, held_G / budget)
        caps = [f"{name}:{100 * share:.9f}%" for name, share in zip(slices.names, shares_G.tolist(), strict=True)]
        bounds: dict[str, Any] = {"floor": ["0%"], "cap": caps, "max_repeat": 1e9}
        mixture = mix(artifact, world.settings.label, self._weights(request), protocol=protocol, **bounds)
        counts_G = in_whole_rows(mixture.table["proposed"].to_numpy() * budget, held_G)
        rows = sampled(slices.codes_N, world.pool_N, counts_G, (request.targets, str(budget)))
        shares = dict(zip(slices.names, (counts_G / budget).round(4).tolist(), strict=True))
        return rows, {"value": mixture.value, "shares": {name: share for name, share in shares.items() if share}}

    def _weights(self, request: SelectionRequest) -> dict[str, float]:
        names = self.world.artifact.targets if request.targets == "all" else (request.targets,)
        return {name: 1.0 / len(names) for name in names}

    def _protocol(self, request: SelectionRequest) -> ScoringProtocol:
        """The protocol; for `additive` without its geometry."""
        protocol = self.world.protocol
        if request.method != ADDITIVE:
            return protocol
        return protocol.additive.model_copy(update={"selected_on": None})

    def _digest(self, request: SelectionRequest) -> str:
        """What chose: the protocol's own choices, not its name or where it comes from."""
        if request.method in (RANDOM, BM25):
            return ""
        chosen = self._protocol(request).model_dump(mode="json", exclude={"name", "selected_on"})
        return hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=8).hexdigest()

    # ----------------------------------------------------------------------------------------- what is kept

    def _add(self, rows: I64) -> str:
        """Name of a subset; it is in the table from now on."""
        subset_id = "rows-" + hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=8).hexdigest()
        row_ids = self.world.row_ids.take(pa.array(rows)).combine_chunks()
        append(self.subsets, pa.table({"subset_id": pa.array([subset_id] * len(rows)), "row_id": row_ids}))
        return subset_id

    def _read(self) -> list[SelectionRecord]:
        if not self._records.exists():
            return []
        records = json.loads(self._records.read_text(encoding="utf-8"))
        return [SelectionRecord(**record | {"asked": SelectionRequest(**record["asked"])}) for record in records]

    def _write(self, choices: Sequence[SelectionRecord]) -> None:
        write_atomically(
            self._records, (json.dumps([asdict(candidate) for candidate in choices], indent=1) + "\n").encode()
        )


def append(path: Path, subset: pa.Table) -> None:
    """Add a subset to a table of subsets, unless it is there; the order of the others stays."""
    if path.exists():
        table = pq.read_table(path)
        if subset.column("subset_id")[0].as_py() in table.column("subset_id").unique().to_pylist():
            return
        subset = pa.concat_tables([table, subset])
    part = temporary_path(path)
    pq.write_table(subset, part, compression="zstd")
    part.replace(path)


def copied(source: Path, subset_ids: Sequence[str], out: Path) -> Path:
    """Add some subsets of one table to another."""
    table = pq.read_table(source)
    for subset_id in subset_ids:
        append(out, table.filter(pc.equal(table.column("subset_id"), subset_id)))
    return out


def drawn(pool_N: NDArray[np.bool_], budget: int, draw: int) -> I64:
    """Rows of the pool at random, each once."""
    rows = np.flatnonzero(pool_N)
    return np.asarray(stream(0, "curation", "random", budget, draw).permutation(rows)[:budget])


def best_rows(score_N: NDArray[np.float64], pool_N: NDArray[np.bool_], budget: int) -> I64:
    """Rows of the pool by score, best first; of equal ones the first."""
    rows = np.flatnonzero(pool_N)
    return rows[np.argsort(-score_N[rows], kind="stable")[:budget]]


def in_whole_rows(wanted_G: NDArray[np.float64], held_G: I64) -> I64:
    """Whole numbers near `wanted_G` of the same sum, none above `held_G`; the largest remainders are rounded up."""
    counts_G = np.minimum(np.floor(wanted_G + 1e-9).astype(np.int64), held_G)
    missing = round(float(wanted_G.sum())) - int(counts_G.sum())
    for _ in range(missing):
        remainder_G = np.where(counts_G < held_G, wanted_G - counts_G, -np.inf)
        counts_G[int(np.argmax(remainder_G))] += 1
    return counts_G


def sampled(codes_N: NDArray[np.int32], pool_N: NDArray[np.bool_], counts_G: I64, purpose: tuple[str, ...]) -> I64:
    """So many rows of each value at random, each once."""
    generator = stream(0, "curation", "mixture", *purpose)
    parts = [generator.permutation(np.flatnonzero(pool_N & (codes_N == g)))[:count] for g, count in enumerate(counts_G)]
    return np.concatenate(parts)


def of_methods(targets: str, share: float) -> list[SelectionRequest]:
    """One selection by each method."""
    return [SelectionRequest(method, targets if method != RANDOM else "all", share) for method in METHODS]


def other_draws(share: float, draws: int) -> list[SelectionRequest]:
    """Further random selections of the same size: their spread is part of what random choice does."""
    return [replace(SelectionRequest(RANDOM, "all", share), draw=draw) for draw in range(1, draws)]
