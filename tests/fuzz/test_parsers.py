"""What comes from a stranger gives a result or an error of ours, no traceback; nothing outside; in time and in memory.

Every parser is given files of ours that were changed: bytes flipped, cut out, put in or moved, and values of JSON put
in the place of others; what the artifact lists is signed again, so that the parser is reached and not its checksum.
`GRASP_FUZZ=1000` gives every parser so many files in the place of a few.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grasp
from grasp.artifact.inspection import info, verify
from grasp.artifact.label_table import LabelTable
from grasp.artifact.manifest import MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import read_documents
from grasp.distil.scorer import CARD, WEIGHTS, Scorer
from grasp.errors import GraspError
from grasp.files import UNSIGNED, entry_of, with_checksum
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.scoring_rule import load_protocol, save_protocol
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import INFO, SUBSETS, UTILITIES
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.settings import BuildSettings, CorpusSettings, TargetSettings, build_settings, retrain_settings
from grasp.targets import load_units
from grasp.yaml_files import read_yaml
from tests.runs.environments import TOPICS, write_artifact, write_environment
from tests.select.scorers import silent_scorer

# a stranger's numbers may be too large to scale: they are theirs, and numpy says so
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EXAMPLES = int(os.environ.get("GRASP_FUZZ", "6"))
LONGEST_S = 20.0
MOST_BYTES = 512 << 20
PIECES = (b"\x00", b"\xff\xfe", b"../../victim", b"[" * 2000, b"{" * 50, b"9" * 400, b"NaN", b"null", b'"', b"\n")
PIECES += (b"-1", b"1e308")
HOSTILE = ("../../victim", "/etc/passwd", "", "\x00", "\x1b[2J", "x" * 5000, -1, 0, 10**30, 1e308, 2.5, True, None)
HOSTILE += ([], {}, ["a"], {"a": 1})

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def changed_bytes(draw: Callable, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "put", "end", "move")))
        if kind == "flip" and out:
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del out[at : at + draw(st.integers(1, 64))]
        elif kind == "put":
            out[at:at] = draw(st.sampled_from(PIECES))
        elif kind == "end":
            del out[at:]
        else:
            out[at:at] = out[-draw(st.integers(1, 64)) :]
    return bytes(out)


def changed_value(draw: Callable, value: object) -> object:
    """JSON in which one value somewhere is another, is gone, or is there under another name."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        kind = draw(st.integers(0, 5))
        rest = {name: part for name, part in value.items() if name != key}
        if kind == 0:
            return rest
        if kind == 1:
            return rest | {str(draw(st.sampled_from(HOSTILE)))[:50]: value[key]}
        return value | {key: changed_value(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed_value(draw, value[place]), *value[place + 1 :]]
    return draw(st.sampled_from(HOSTILE))


def signed(raw: object) -> bytes:
    """JSON with the checksum that its owner would write."""
    if isinstance(raw, dict) and "checksum" in raw:
        raw = raw | {"checksum": UNSIGNED}
    return with_checksum((json.dumps(raw, indent=1) + "\n").encode())


def changed_json(draw: Callable, data: bytes) -> bytes:
    """A JSON file changed as text, or as values and signed again."""
    if not draw(st.integers(0, 2)):
        return changed_bytes(draw, data)
    return signed(changed_value(draw, json.loads(data)))


def listed(record: Path, change: Callable[[dict], dict]) -> None:
    """Sign a record with other entries of files, as they are now."""
    raw = json.loads(record.read_text())
    record.write_bytes(signed(raw | change(raw)))


def survives(read: Callable[[], object], outside: Path) -> None:
    """A result, or an error of ours in one line; in time, in memory, and `outside` as it was."""
    before, began, most = listing(outside), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
    except GraspError as err:
        outcome = str(err)
    else:
        outcome = "a result"
    assert 0 < len(outcome) < 20_000
    assert time.process_time() - began < LONGEST_S  # of a core: a machine that others use as well proves nothing
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert used * (1 if sys.platform == "darwin" else 1024) < MOST_BYTES
    assert listing(outside) == before


def listing(place: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in place.rglob("*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An artifact and an environment of it, and beside them what nobody may touch."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "victim").write_text("mine")
    artifact = write_artifact(place / "in" / "art")
    write_environment(place / "in" / "env", artifact, lambda b, seed, target: float(b), n_subsets=6)
    share_RG = np.random.default_rng(0).dirichlet(np.ones(3), 6)
    run = pa.table({"run": [f"run-{r}" for r in range(6)]})
    mixtures = pa.table(run.columns + [pa.array(column) for column in share_RG.T], ["run", *TOPICS])
    metrics = run.append_column("sciq/loss", pa.array(3 + share_RG[:, 0]))
    pacsv.write_csv(mixtures, place / "in" / "mixtures.csv")
    pacsv.write_csv(metrics, place / "in" / "metrics.csv")
    grasp.import_runs(mixtures, metrics, label="topic").save(place / "in" / "runs")
    silent_scorer().save(place / "in" / "scorer")
    return place


@pytest.fixture
def place(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "all"))


def try_each(*reads: Callable[[], object]) -> None:
    """What one refuses the others are asked all the same."""
    for read in reads:
        with contextlib.suppress(GraspError):
            read()


def everything(path: Path) -> None:
    """All that readers of an artifact ask for."""
    try_each(lambda: info(path), lambda: verify(path))
    artifact = ArtifactReader.open(path)
    _ = artifact.units, dict(artifact.moments), artifact.protected_paths, artifact.tokens_path
    for name in artifact.array_names:
        for _, block in artifact.array_blocks(name):
            assert block.dtype == np.float32
    artifact.rows(np.arange(artifact.n_rows))
    LabelTable(artifact.rows_path).matching("topic = 'games'")


def check_file(whole: Path, place: Path, name: str, content: bytes) -> None:
    art = place / "in" / "art"
    shutil.copy(whole / "in" / "art" / MANIFEST, art / MANIFEST)
    (art / name).write_bytes(content)
    listed(art / MANIFEST, lambda raw: {"files": raw["files"] | {name: entry_of(art / name).model_dump()}})
    survives(lambda: everything(art), place)


@given(data=st.data())
@fuzz
def test_a_manifest(data, whole, place):
    text = (whole / "in" / "art" / MANIFEST).read_bytes()
    (place / "in" / "art" / MANIFEST).write_bytes(changed_json(data.draw, text))
    survives(lambda: everything(place / "in" / "art"), place)


def ask(path: Path) -> None:
    artifact = grasp.open(path)
    try_each(lambda: len(artifact.score("sciq").to_arrow()), lambda: len(artifact.predict(by="topic").to_arrow()))


@given(data=st.data())
@fuzz
def test_verbs_on_a_manifest(data, whole, place):
    raw = changed_value(data.draw, json.loads((whole / "in" / "art" / MANIFEST).read_text()))
    (place / "in" / "art" / MANIFEST).write_bytes(signed(raw))
    survives(lambda: ask(place / "in" / "art"), place)


TABLES = ("moments.safetensors", "rows.parquet", "units.parquet", "shards/00002.parquet")
TABLES += ("arrays/hidden_sketch/00001.npy", "arrays/relevance_output_layer/scale.npy")


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@fuzz
def test_a_file_of_an_artifact(data, name, whole, place):
    check_file(whole, place, name, changed_bytes(data.draw, (whole / "in" / "art" / name).read_bytes()))


KEYS = st.sampled_from(("a", "dtype", "shape", "data_offsets", "__metadata__"))


@given(header=st.recursive(st.sampled_from(HOSTILE), lambda x: st.dictionaries(KEYS, x, max_size=3), max_leaves=6))
@fuzz
def test_a_header_of_safetensors(header, whole, place):
    text = json.dumps(header).encode()
    check_file(whole, place, "moments.safetensors", len(text).to_bytes(8, "little") + text + b"\0" * 64)


def read_environment(path: Path) -> None:
    environment = RetrainedRuns.open(path)
    _ = environment.pending(), environment.utilities().subset_ids, environment.targets


@pytest.mark.parametrize("name", ["environment.json", "subsets.parquet", "utilities.parquet"])
@given(data=st.data())
@fuzz
def test_an_environment(data, name, whole, place):
    env, original = place / "in" / "env", (whole / "in" / "env" / name).read_bytes()
    change = changed_json if name.endswith(".json") else changed_bytes
    (env / name).write_bytes(change(data.draw, original))
    survives(lambda: read_environment(env), place)
    (env / name).write_bytes(original)


RUN = BuildSettings.model_validate(
    {"model": {"path": "m"}, "corpus": {"path": "c"}, "targets": {"names": ["sciq"]}}
).model_dump(mode="json")


@pytest.mark.parametrize("kind", ["protocol", "build", "retrain"])
@given(data=st.data())
@fuzz
def test_yaml(data, kind, place):
    path = place / "in" / "given.yaml"
    if kind == "protocol":
        save_protocol(DEFAULT_PROTOCOL, path)
        value = yaml.safe_load(path.read_text())
    else:
        value = RUN
    text = yaml.safe_dump(changed_value(data.draw, value)).encode()
    path.write_bytes(changed_bytes(data.draw, text) if data.draw(st.booleans()) else text)
    parse = {"build": build_settings, "retrain": retrain_settings}
    survives(lambda: load_protocol(path) if kind == "protocol" else parse[kind](read_yaml(path)), place)


LINES = [
    {"row_id": f"r{i}", "text": "one two", "topic": "a", "prompt": "p", "completion": " c", "unit_id": f"u{i}"}
    for i in range(3)
]


@pytest.mark.parametrize("of", ["corpus", "units"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(data=st.data())
@fuzz
def test_rows_and_units(data, suffix, of, place):
    path = place / "in" / f"given{suffix}"
    if suffix == ".parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(LINES), sink)
        content = changed_bytes(data.draw, sink.getvalue().to_pybytes())
    else:
        content = b"".join(json.dumps(changed_value(data.draw, line)).encode() + b"\n" for line in LINES)
        content = changed_bytes(data.draw, content) if data.draw(st.booleans()) else content
    path.write_bytes(content)
    if of == "corpus":
        survives(lambda: list(read_documents(CorpusSettings(path=str(path)))), place)
    else:
        survives(lambda: load_units(TargetSettings(names=(str(path),))), place)


CELLS = st.sampled_from(("row-1", "row-2", "sciq", "", None, 0, 1.5, -1, 1e308, float("nan"), [1], {"a": 1}))


def table_of(draw: Callable, names: tuple[str, ...], path: Path) -> None:
    """Columns of one kind of value each, some of them gone or there twice; now and then not even Parquet."""
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names) + 1))
    columns = [pa.array([draw(CELLS)] * draw(st.just(2))) for _ in chosen]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, chosen), sink)
    content = sink.getvalue().to_pybytes()
    path.write_bytes(content if draw(st.integers(0, 3)) else changed_bytes(draw, content))


@given(data=st.data())
@fuzz
def test_subsets(data, place):
    path = place / "in" / "given.parquet"
    rows = RowIndex.from_parquet(place / "in" / "art" / "rows.parquet")
    table_of(data.draw, ("subset_id", "row_id", "weight"), path)
    survives(lambda: list(read_subsets(path, rows)), place)


@pytest.mark.parametrize("kind", [SelectionSummary, MixtureSummary])
@given(data=st.data())
@fuzz
def test_summaries(data, kind, place):
    path, art = place / "in" / "given.json", ArtifactReader.open(place / "in" / "art")
    value = {"checksum": UNSIGNED, "kind": "selection", "format_version": 1, "corpus": "c0ffee"}
    path.write_bytes(changed_json(data.draw, signed(value | {"headline": "h", "rows": 1, "targets": []})))
    survives(lambda: read_summary(kind, path, art), place)


@pytest.mark.parametrize("name", [CARD, WEIGHTS])
@given(data=st.data())
@fuzz
def test_a_scorer(data, name, whole, place):
    scorer = place / "in" / "scorer"
    shutil.copy(whole / "in" / "scorer" / CARD, scorer / CARD)
    original = (whole / "in" / "scorer" / name).read_bytes()
    if name == CARD:
        (scorer / CARD).write_bytes(changed_json(data.draw, original))
    else:
        (scorer / WEIGHTS).write_bytes(changed_bytes(data.draw, original[:200]) + original[200:])
        listed(scorer / CARD, lambda _: {"weights": entry_of(scorer / WEIGHTS).model_dump()})
    survives(lambda: str(Scorer.open(scorer).score(["one two", ""])), place)


@pytest.mark.parametrize("name", [INFO, SUBSETS, UTILITIES])
@given(data=st.data())
@fuzz
def test_imported_runs(data, name, whole, place):
    runs, original = place / "in" / "runs", whole / "in" / "runs"
    for file in (INFO, SUBSETS, UTILITIES):
        shutil.copy(original / file, runs / file)
    if name == INFO:
        (runs / INFO).write_bytes(changed_json(data.draw, (original / INFO).read_bytes()))
    else:
        table = pq.read_table(original / name)
        if data.draw(st.booleans()):
            at, value = data.draw(st.integers(0, table.num_columns - 1)), data.draw(CELLS)
            pq.write_table(table.set_column(at, table.column_names[at], pa.array([value] * len(table))), runs / name)
        else:
            (runs / name).write_bytes(changed_bytes(data.draw, (original / name).read_bytes()))
        listed(runs / INFO, lambda raw: {"files": raw["files"] | {name: entry_of(runs / name).model_dump()}})
    survives(lambda: grasp.mix_runs(grasp.open_runs(runs)), place)


@pytest.mark.parametrize("name", ["mixtures.csv", "metrics.csv"])
@given(data=st.data())
@fuzz
def test_tables_of_runs(data, name, whole, place):
    (place / "in" / name).write_bytes(changed_bytes(data.draw, (whole / "in" / name).read_bytes()))
    given_tables = place / "in" / "mixtures.csv", place / "in" / "metrics.csv"
    survives(lambda: grasp.mix_runs(grasp.import_runs(*given_tables, label="topic")), place)
