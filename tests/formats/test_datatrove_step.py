"""Filter steps in real datatrove pipelines keep the same documents as `grasp select`."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.distil.distil import distil
from grasp.distil.scorer import Scorer
from grasp.errors import CorpusError
from grasp.pipeline.pipeline import build_artifact
from grasp.select.export import DocumentSelection, select_documents
from tests.corpus.world import write_parquet
from tests.pipeline.world import world
from tests.select.test_export import build, choose, records, rows_of

executors = pytest.importorskip("datatrove.executor")
readers = pytest.importorskip("datatrove.pipeline.readers")
writers = pytest.importorskip("datatrove.pipeline.writers")

from datatrove.data import Document  # noqa: E402

from grasp.formats.datatrove_step import ScoredDocuments, SelectedDocuments  # noqa: E402


def lines_of(out) -> list[dict]:
    return [line for file in sorted(out.glob("*.parquet")) for line in pq.read_table(file).to_pylist()]


def run(reader, step, out) -> list[dict]:
    writer = writers.ParquetWriter(str(out))
    executors.LocalPipelineExecutor(
        pipeline=[reader, step, writer], tasks=2, workers=1, logging_dir=str(out) + "-logs", skip_completed=False
    ).run()
    return lines_of(out)


@pytest.fixture
def selected(tmp_path):
    rows = [row for row in records() if row["text"]]
    path = tmp_path / "corpus"
    write_parquet(path / "a.parquet", rows[:12])
    write_parquet(path / "b.parquet", rows[12:])
    artifact = build(tmp_path, path)
    chosen_N = choose(artifact)
    selection = select_documents(rows_of(artifact), chosen_N, "half")
    selection.write_ids(tmp_path / "kept.txt")
    texts = {row["text"] for row, keep in zip(rows, selection.mask_M, strict=False) if keep}
    assert 3 < len(texts) < len(rows) - 3
    return path, str(tmp_path / "kept.txt"), texts


def test_by_id_and_by_a_field_of_the_metadata(selected, tmp_path):
    path, ids, texts = selected
    by_id = run(readers.ParquetReader(str(path), id_key="row_id"), SelectedDocuments(ids), tmp_path / "by-id")
    assert {line["text"] for line in by_id} == texts
    by_field = run(readers.ParquetReader(str(path)), SelectedDocuments(ids, by="row_id"), tmp_path / "by-field")
    assert {line["text"] for line in by_field} == texts


def test_documents_without_ids_are_matched_by_content(tmp_path):
    rows = [row for row in records(named=False) if row["text"]]
    path = write_parquet(tmp_path / "corpus" / "c.parquet", rows)
    artifact = build(tmp_path, path)
    chosen_N = choose(artifact)
    selection = select_documents(rows_of(artifact), chosen_N, "half")
    selection.write_ids(tmp_path / "kept.txt")
    reader = readers.ParquetReader(str(path.parent))
    documents = run(reader, SelectedDocuments(str(tmp_path / "kept.txt"), by="content"), tmp_path / "out")
    assert {line["text"] for line in documents} == {
        row["text"] for row, keep in zip(rows, selection.mask_M, strict=False) if keep
    }


def test_dropped_documents_are_counted_and_can_be_written(selected, tmp_path):
    path, ids, texts = selected
    step = SelectedDocuments(ids, exclusion_writer=writers.ParquetWriter(str(tmp_path / "dropped")))
    run(readers.ParquetReader(str(path), id_key="row_id"), step, tmp_path / "out")
    dropped = lines_of(tmp_path / "dropped")
    assert {line["metadata"]["filter_reason"] for line in dropped} == {"not_selected"}
    assert not {line["text"] for line in dropped} & texts


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".parquet"])
def test_every_file_of_ids_is_read(tmp_path, suffix):
    names = ("007", "-1", "'a", "b,c", "NA")
    DocumentSelection(np.ones(5, bool), names, 5, 0, 0).write_ids(tmp_path / f"kept{suffix}")
    step = SelectedDocuments(str(tmp_path / f"kept{suffix}"))
    assert [step.filter(Document(text="", id=name)) for name in names] == [True] * 5
    assert step.filter(Document(text="", id="7")) == (False, "not_selected")


def test_a_list_of_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"row_id": ["a"], "doc_id": ["a"]}), tmp_path / "kept.parquet")
    with pytest.raises(CorpusError, match=r"kept\.parquet: got the columns row_id, doc_id, expected `name`.*--ids-out"):
        SelectedDocuments(str(tmp_path / "kept.parquet")).filter(Document(text="", id="a"))
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"kept\.json: expected a list of grasp select --ids-out"):
        SelectedDocuments(str(tmp_path / "kept.json")).filter(Document(text="", id="a"))


def test_documents_are_scored_and_those_below_a_score_are_dropped(tmp_path):
    settings = world(tmp_path)
    scorer = distil(grasp.open(build_artifact(settings, tmp_path / "art")).files, "facts", tmp_path / "scorer").scorer
    texts = ["water and salt", "", "stone, iron, wind", "star"]
    documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    expected, _ = Scorer.open(tmp_path / "scorer").score(texts)
    least = float(np.median(expected))
    step = pickle.loads(pickle.dumps(ScoredDocuments(tmp_path / "scorer", at_least=least)))
    assert [int(doc.id) for doc in step.run(iter(documents))] == np.flatnonzero(expected >= least).tolist()
    assert [doc.metadata["score"] for doc in documents] == scorer.score(texts)[0].tolist()
