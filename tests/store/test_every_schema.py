"""Laws of every store: killed at any replace it goes on to the same bytes; a full disk leaves no half part; a flipped
bit is refused or changes nothing; other work is refused, and the field said.
"""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.artifact.manifest import SIGNED_MANIFEST, ArrayFiles
from grasp.artifact.reader import ArtifactReader
from grasp.baselines.stored import LOCK, BlockMethod, RowScorer
from grasp.corpus import RowStore
from grasp.distil.apply import MARKER, apply
from grasp.distil.scorer import SIGNED_CARD, Scorer
from grasp.errors import GraspError
from grasp.methods.contract import Account, NoSettings
from grasp.predict.subset_tables import RowIndex
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import SIGNED_INFO as SIGNED_RUNS
from grasp.store.remote import publish
from tests.artifact.artifact_world import World
from tests.corpus.world import Words, settings_for, write_jsonl
from tests.faults import Killed, raising
from tests.runs.environments import write_artifact, write_environment
from tests.select.scorers import silent_scorer


@dataclass(frozen=True)
class Case:
    """A kind of store: what writes one (again: goes on), what reads it, and what decides its content otherwise."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    other: Callable[[Path], Any] | None = None
    differs: str = ""


TEXTS = [f"water and light {i} of the river" for i in range(12)]


def spool(path: Path, size: int = 4) -> None:
    spool = ArrayFiles(path)
    for k in range(3):
        if not spool.has(k):
            spool.write(k, {"hidden": np.full((size, 3), k, np.float32), "count": np.array(7.5)})


def rows(path: Path, **changes: Any) -> RowStore:
    corpus = path.with_name("corpus.jsonl")
    if not corpus.exists():
        write_jsonl(corpus, [{"text": text, "topic": "ab"[i % 2]} for i, text in enumerate(TEXTS)])
    return RowStore.write(path, settings_for(corpus, **changes), Words(), shard_rows=4)


def read_rows(path: Path) -> Any:
    store = RowStore.open(path)
    shards = [store.shard(k) for k in range(store.n_shards)]
    return store.fingerprint, [(shard.flat_ids.tolist(), shard.table.to_pydict()) for shard in shards]


def read_artifact(path: Path) -> Any:
    artifact = ArtifactReader.open(path)
    blocks = [block.tolist() for name in artifact.array_names for _, block in artifact.array_blocks(name)]
    moments = {name: array.tolist() for name, array in artifact.moments.items()}
    tables = artifact.units, artifact.rows(np.arange(artifact.n_rows)), pa.Table.from_batches(artifact.row_batches())
    return artifact.manifest, blocks, moments, [table.to_pydict() for table in tables]


def extension(path: Path) -> None:
    world = World(n_rows=9)
    if not (path / "manifest.json").exists():
        world.write(path)
    world.extend(path)


def scorer(path: Path) -> None:
    if not path.exists():
        scorer = silent_scorer()
        scorer.tables_KV[:, ::7] = 0.5
        scorer.save(path)


def read_scorer(path: Path) -> Any:
    opened = Scorer.open(path)
    return opened.card, opened.score(TEXTS)[0].tolist()


def scored(path: Path, texts: int = 8) -> None:
    scorer_dir, corpus = path.with_name("learned"), path.with_name("corpus")
    scorer(scorer_dir)
    for name in "ab":
        write_jsonl(corpus / f"{name}.jsonl", [{"text": text} for text in TEXTS[:texts]])
        os.utime(corpus / f"{name}.jsonl", (1, 1))
    apply(scorer_dir, str(corpus), path)


def runs(path: Path) -> None:
    shares = pa.table({"run": ["a", "b", "c"], "x": [0.5, 0.2, 0.7], "y": [0.5, 0.8, 0.3]})
    results = pa.table({"run": ["a", "b", "c"], "size": ["1M"] * 3, "loss": [3.0, 2.5, 2.75]})
    if not path.exists():
        grasp.import_runs(shares, results, label="topic", out=path)


def read_runs(path: Path) -> Any:
    table = grasp.open_runs(path)
    return table.info, table.utility_RST().tolist(), table.weights_RG().tolist()


def environment(path: Path, **changes: Any) -> None:
    place = path.with_name("art")
    artifact = ArtifactReader.open(place) if place.exists() else write_artifact(place, 40)
    write_environment(path, artifact, lambda b, s, _: 0.1 * b + s, n_subsets=3, **changes)


def read_environment(path: Path) -> Any:
    opened = RetrainedRuns.open(path)
    index = RowIndex.from_parquet(path.with_name("art") / "rows.parquet")
    masks = [block.weights_BN.toarray().tolist() for block in opened.subset_blocks(index)]
    return opened.info, opened.utilities().values_BSE.tolist(), masks


class Method(BlockMethod[NoSettings]):
    """Scores that say which row, unit and part they are of."""

    def __init__(self) -> None:
        super().__init__(NoSettings(), name="fake")

    def parts(self, material):
        return 2

    def prepare(self, material, work, part):
        return RowScorer(
            lambda start, stop: np.arange(start, stop)[:, None] + np.arange(2) / 16, Account(covers=("everything",))
        )


def method(path: Path) -> Any:
    material = SimpleNamespace(
        artifact=SimpleNamespace(manifest=SimpleNamespace(fingerprints={})),
        units=SimpleNamespace(fingerprint="u", units=[SimpleNamespace(target="t", unit_id=str(e)) for e in range(2)]),
        progress=SimpleNamespace(stage=lambda *_, **__: None, advance=lambda *_: None),
        blocks=lambda start=0: [block for block in ((0, 4), (4, 6)) if block[0] >= start],
        n_units=2,
        n_rows=6,
    )
    return Method().scores(material, path)


def read_method(path: Path) -> Any:
    opened = method(path)
    return opened.account, [block.tolist() for _, block in opened.blocks]


CASES = {
    "features": Case(spool, lambda path: [str(ArrayFiles(path).read(k)) for k in range(3)]),
    "rows": Case(rows, read_rows, lambda path: rows(path, max_length=5), r"settings\.max_length: was 8, now 5"),
    "artifact": Case(
        World(n_rows=9).write,
        read_artifact,
        lambda path: World(n_rows=9, identity={"seed": 1}).begin(path),
        r"identity\.seed: was 0, now 1",
    ),
    "extension": Case(extension, read_artifact),
    "scorer": Case(scorer, read_scorer),
    "parts of apply": Case(
        scored,
        lambda path: (scored(path), pa.concat_tables(map(pq.read_table, sorted(path.glob("*.parquet")))).to_pydict()),
        lambda path: scored(path, 5),
        r"corpus\.a\.jsonl: was ",
    ),
    "runs": Case(runs, read_runs),
    "environment": Case(
        environment, read_environment, lambda path: environment(path, recipe="other"), 'recipe: was "tiny", now "other"'
    ),
    "scores of a method": Case(method, read_method),
}


def contents(path: Path) -> dict[str, bytes]:
    """Every file but locks, whose text may be a process, and seconds that were spent."""
    opened = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in (LOCK, MARKER, ".grasp-artifact"):
            opened[file.relative_to(path).as_posix()] = file.read_bytes()
    for name in [name for name in opened if name.endswith("method.json")]:
        record = json.loads(opened[name])
        opened[name] = str({key: record[key] for key in ("identity", "account", "files")}).encode()
    return opened


@pytest.mark.parametrize("name", CASES)
def test_a_write_killed_at_any_replace_resumes_to_the_same_bytes(name, monkeypatch, tmp_path):
    case = CASES[name]
    case.write(tmp_path / "store")  # and what lies beside it
    expected, value = contents(tmp_path / "store"), case.read(tmp_path / "store")
    for nth in range(1, 200):
        shutil.rmtree(tmp_path / "store")
        with raising(monkeypatch, "replace", nth, Killed()) as used:
            try:
                case.write(tmp_path / "store")
            except Killed:
                pass
            else:
                break
        case.write(tmp_path / "store")
        assert contents(tmp_path / "store") == expected
        assert str(case.read(tmp_path / "store")) == str(value)
    assert used[0] == nth - 1 > 0


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_is_one_line_and_leaves_no_half_part(name, monkeypatch, tmp_path):
    case = CASES[name]
    case.write(tmp_path / "store")
    expected, messages = contents(tmp_path / "store"), list[str]()
    for nth in range(1, 200):
        shutil.rmtree(tmp_path / "store")
        with raising(monkeypatch, "replace", nth, OSError(errno.ENOSPC, "No space left on device", "x")):
            try:
                case.write(tmp_path / "store")
            except (GraspError, OSError) as err:
                messages.append(str(err))
            else:
                break
        left = contents(tmp_path / "store") if (tmp_path / "store").exists() else {}
        assert not [file for file in left if file.endswith(".part")]
        for mark in [file for file in left if file.endswith(".json")]:
            listed = json.loads(left[mark]).get("files") if b'"files"' in left[mark] else {}
            assert all(any(have.endswith(file) for have in left) for file in listed or {})
        case.write(tmp_path / "store")
        assert contents(tmp_path / "store") == expected
    assert len(messages) == nth - 1 > 0
    assert all("o space left on" in line for line in messages)


@pytest.mark.parametrize("name", CASES)
def test_a_flipped_bit_is_refused_or_changes_nothing(name, tmp_path):
    case, draw, refused = CASES[name], random.Random(0), list[str]()
    case.write(tmp_path / "store")
    before, whole = str(case.read(tmp_path / "store")), contents(tmp_path / "store")
    for file in whole:
        path = tmp_path / "store" / file
        data = path.read_bytes()
        for place in [draw.randrange(len(data)) for _ in range(6)]:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
            try:
                assert str(case.read(tmp_path / "store")) == before, (file, place)
            except GraspError as err:
                refused.append(str(err))
            path.write_bytes(data)
    assert refused
    assert not any("\n" in line for line in refused)
    assert str(case.read(tmp_path / "store")) == before


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.other is not None])
def test_a_directory_of_other_settings_is_refused_with_the_differing_field(name, tmp_path):
    case = CASES[name]
    case.write(tmp_path / "store")
    before = contents(tmp_path / "store")
    assert case.other is not None
    with pytest.raises(GraspError, match=case.differs):
        case.other(tmp_path / "store")
    assert contents(tmp_path / "store") == before


PUBLISHED = {
    "artifact": (SIGNED_MANIFEST, read_artifact),
    "scorer": (SIGNED_CARD, read_scorer),
    "runs": (SIGNED_RUNS, read_runs),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_behind_a_url_it_is_what_it_is_here(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GRASP_CACHE", str(tmp_path / "cache"))
    (signed, read), url = PUBLISHED[name], f"memory://{name}/store"
    CASES[name].write(tmp_path / "store")
    with pytest.raises(GraspError, match=f"^{url}: "):
        read(url)
    publish(tmp_path / "store", url, signed)
    assert str(read(url)) == str(read(tmp_path / "store"))
