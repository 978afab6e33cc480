"""A detection in the report: its figures, its rows, and nothing of their text that runs."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.errors import GraspError
from grasp.inspect.detect import RECORD, REPORT_ROWS, detect, read_suspects
from grasp.report.views import suspects as suspects_view
from tests.cli.grasp_command import succeed
from tests.report.test_page import Page
from tests.report.world import HOSTILE, write_artifact


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("suspects")
    artifact = write_artifact(place / "art", topics=HOSTILE, text=[text or "" for text in HOSTILE])
    detect(artifact, "sciq", label="format").write(place / "suspects.parquet")
    return place, artifact


def test_the_first_rows_are_those_of_the_table(place):
    root, artifact = place
    suspects = read_suspects(root / "suspects.parquet", artifact, ["topic"])
    lines = pq.read_table(root / "suspects.parquet").slice(0, REPORT_ROWS).to_pylist()
    view = suspects_view(suspects)
    assert [row["row_id"] for row in view["rows"]] == [line["row_id"] for line in lines]
    assert [line["fused"] for line in suspects.lines] == [line["fused"] for line in lines]
    assert view["rows"][0]["scores"][0][0] == suspects.record.ranking == "fused"
    texts = dict(zip(*(artifact.rows(range(200))[name].to_pylist() for name in ("row_id", "snippet")), strict=True))
    assert [row["text"] for row in view["rows"]] == [texts[line["row_id"]] for line in lines]


def test_hostile_rows_are_text(place, tmp_path):
    root, _ = place
    succeed(
        "report", root / "art", "--detect", root / "suspects.parquet", "--by", "format", "--out", tmp_path / "r.html"
    )
    page = (tmp_path / "r.html").read_text()
    section = page.partition('<section id="suspects"')[2].partition("</section>")[0]
    assert section.count("<li class=") == REPORT_ROWS
    assert "<img" not in section
    assert "<script" not in section
    assert "&lt;img src=x" in section  # in the names of the rows
    assert "of 200 rows" in Page(page).text


def test_what_is_no_detection_of_this_artifact_is_refused(place, tmp_path):
    root, artifact = place
    other = write_artifact(tmp_path / "other", corpus="another")
    without = write_artifact(tmp_path / "without", targets=("boolq", "arc"))
    table = pq.read_table(root / "suspects.parquet")
    record = json.loads(table.schema.metadata[RECORD])
    record["source_hashes"]["model"] = "another"
    names = pa.array(["evil", *table["row_id"].to_pylist()[1:]])
    (tmp_path / "text.parquet").write_text("no")
    for name, content in (
        ("plain", pa.table({"row_id": ["a"]})),
        ("unranked", table.drop_columns("rank")),
        ("renamed", table.set_column(1, "row_id", names)),
        ("model", table.replace_schema_metadata({RECORD: json.dumps(record)})),
        ("suspects", table),
    ):
        pq.write_table(content, tmp_path / f"{name}.parquet")
    for name, other_artifact, keyword in (
        ("gone", artifact, "no such file"),
        ("text", artifact, "cannot be read"),
        ("plain", artifact, "not a result of grasp detect"),
        ("unranked", artifact, "not a result of grasp detect"),
        ("renamed", artifact, "'evil' is not a row of the artifact"),
        ("model", artifact, "another artifact: model 'another'"),
        ("suspects", other, "another artifact: corpus 'c0ffee', here 'another'"),
        ("suspects", without, "another artifact: units of sciq .*here 'none'"),
    ):
        with pytest.raises(GraspError, match=rf"{name}\.parquet.*{keyword}"):
            read_suspects(tmp_path / f"{name}.parquet", other_artifact, [])
