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
from grasp.retraining.settings import retrain_settings
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import INFO, SUBSETS, UTILITIES
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.settings import BuildSettings, CorpusSettings, TargetSettings, build_settings
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


KEYS = st.sampled_from(("a", "dtype", "shape", "data_offsets", "__metadata__"))
HEADERS = st.recursive(st.sampled_from(HOSTILE), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=6)
CELLS = st.sampled_from(("row-1", "row-2", "sciq", "", None, 0, 1.5, -1, 1e308, float("nan"), [1], {"a": 1}))


def changed_file(draw: Callable, data: bytes, *, columns: bool) -> bytes:
    """The bytes of a file changed, or another header of safetensors, or a table with another of its columns."""
    kind = draw(st.integers(0, 3))
    if data[8:9] == b"{" and not kind:
        header = json.dumps(draw(HEADERS)).encode()
        return len(header).to_bytes(8, "little") + header + bytes(64)
    if columns and not kind:
        table = pq.read_table(pa.BufferReader(data))
        place = draw(st.integers(0, table.num_columns - 1))
        column = pa.array([draw(CELLS)] * len(table))
        return written(table.set_column(place, table.column_names[place], column))
    return changed_bytes(draw, data)


def written(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def ask(path: Path) -> None:
    artifact = grasp.open(path)
    try_each(lambda: len(artifact.score("sciq").to_arrow()), lambda: len(artifact.predict(by="topic").to_arrow()))


def read_environment(path: Path) -> None:
    environment = RetrainedRuns.open(path)
    _ = environment.pending(), environment.utilities().subset_ids, environment.targets


def read_scorer(path: Path) -> None:
    str(Scorer.open(path).score(["one two", ""]))


def read_imported(path: Path) -> None:
    grasp.mix_runs(grasp.open_runs(path))


TABLES = ("moments.safetensors", "rows.parquet", "units.parquet", "shards/00002.parquet")
TABLES += ("arrays/hidden_sketch/00001.npy", "arrays/relevance_output_layer/scale.npy")
# Directories: the signed record that lists the files, the files that are changed, and what reads them.
STORES = {
    "art": (MANIFEST, (MANIFEST, *TABLES), everything),
    "env": ("environment.json", ("environment.json", "subsets.parquet", "utilities.parquet"), read_environment),
    "scorer": (CARD, (CARD, WEIGHTS), read_scorer),
    "runs": (INFO, (INFO, SUBSETS, UTILITIES), read_imported),
}


@pytest.mark.parametrize(
    ("store", "name"), [(store, name) for store, (_, names, _) in STORES.items() for name in names]
)
@given(data=st.data())
@fuzz
def test_a_file_of_a_store(data, store, name, whole, place):
    record, _, read = STORES[store]
    path, original = place / "in" / store, whole / "in" / store
    for file in (record, name):
        shutil.copy(original / file, path / file)
    if name == record:
        (path / name).write_bytes(changed_json(data.draw, (original / name).read_bytes()))
    else:
        (path / name).write_bytes(changed_file(data.draw, (original / name).read_bytes(), columns=store == "runs"))
        entry = entry_of(path / name).model_dump()
        if store == "scorer":
            listed(path / record, lambda _: {"weights": entry})
        elif store != "env":  # whose tables are signed apart
            listed(path / record, lambda raw: {"files": raw["files"] | {name: entry}})
    survives(lambda: read(path), place)
    if name == MANIFEST:
        survives(lambda: ask(path), place)


RUN = BuildSettings.model_validate(
    {"model": {"path": "m"}, "corpus": {"path": "c"}, "targets": {"names": ["sciq"]}}
).model_dump(mode="json")
SUMMARY = {"checksum": UNSIGNED, "kind": "selection", "format_version": 1, "corpus": "c0ffee"}
SUMMARY |= {"headline": "h", "rows": 1, "targets": []}
LINES = [
    {"row_id": f"r{i}", "text": "one two", "topic": "a", "prompt": "p", "completion": " c", "unit_id": f"u{i}"}
    for i in range(3)
]


def protocol_fields(path: Path) -> object:
    save_protocol(DEFAULT_PROTOCOL, path)
    return yaml.safe_load(path.read_text())


def yaml_text(draw: Callable, value: object) -> bytes:
    text = yaml.safe_dump(changed_value(draw, value)).encode()
    return changed_bytes(draw, text) if draw(st.booleans()) else text


def lines_text(draw: Callable, path: Path) -> bytes:
    if path.suffix == ".parquet":
        return changed_bytes(draw, written(pa.Table.from_pylist(LINES)))
    content = b"".join(json.dumps(changed_value(draw, line)).encode() + b"\n" for line in LINES)
    return changed_bytes(draw, content) if draw(st.booleans()) else content


def subsets_text(draw: Callable, path: Path) -> bytes:
    """Columns of one kind of value each, some of them gone or there twice; now and then not even Parquet."""
    chosen = draw(st.lists(st.sampled_from(("subset_id", "row_id", "weight")), min_size=1, max_size=4))
    content = written(pa.table([pa.array([draw(CELLS)] * 2) for _ in chosen], chosen))
    return content if draw(st.integers(0, 3)) else changed_bytes(draw, content)


def read_units(path: Path) -> object:
    return load_units(TargetSettings(names=(str(path),)))


def read_corpus(path: Path) -> object:
    return list(read_documents(CorpusSettings(path=str(path))))


def summary_of(kind: type) -> Callable[[Path], object]:
    return lambda path: read_summary(kind, path, ArtifactReader.open(path.with_name("art")))


def summary_text(draw: Callable, path: Path) -> bytes:
    return changed_json(draw, signed(SUMMARY))


def subsets_of(path: Path) -> object:
    return list(read_subsets(path, RowIndex.from_parquet(path.with_name("art") / "rows.parquet")))


# Single files: what writes a changed one, and what reads it.
FILES = {
    "protocol.yaml": (lambda draw, path: yaml_text(draw, protocol_fields(path)), load_protocol),
    "build.yaml": (lambda draw, path: yaml_text(draw, RUN), lambda path: build_settings(read_yaml(path))),
    "retrain.yaml": (lambda draw, path: yaml_text(draw, RUN), lambda path: retrain_settings(read_yaml(path))),
    "corpus.jsonl": (lines_text, read_corpus),
    "corpus.parquet": (lines_text, read_corpus),
    "units.jsonl": (lines_text, read_units),
    "units.parquet": (lines_text, read_units),
    "subsets.parquet": (subsets_text, subsets_of),
    "selection.json": (summary_text, summary_of(SelectionSummary)),
    "mixture.json": (summary_text, summary_of(MixtureSummary)),
}


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@fuzz
def test_a_file(data, name, place):
    write, read = FILES[name]
    path = place / "in" / name
    path.write_bytes(write(data.draw, path))
    survives(lambda: read(path), place)


@pytest.mark.parametrize("name", ["mixtures.csv", "metrics.csv"])
@given(data=st.data())
@fuzz
def test_tables_of_runs(data, name, whole, place):
    (place / "in" / name).write_bytes(changed_bytes(data.draw, (whole / "in" / name).read_bytes()))
    given_tables = place / "in" / "mixtures.csv", place / "in" / "metrics.csv"
    survives(lambda: grasp.mix_runs(grasp.import_runs(*given_tables, label="topic")), place)
