"""A detection in the report: its figures, its rows, and nothing of their text that runs."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.audit.detect import RECORD, detect
from grasp.report.suspects import SHOWN, read_suspects, suspects_view
from tests.cli.grasp_command import refused, succeed
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
    found = read_suspects(root / "suspects.parquet", artifact, ["topic"])
    lines = pq.read_table(root / "suspects.parquet").slice(0, SHOWN).to_pylist()
    view = suspects_view(found)
    assert [row["row_id"] for row in view["rows"]] == [line["row_id"] for line in lines]
    assert [line["fused"] for line in found.lines] == [line["fused"] for line in lines]
    assert view["rows"][0]["scores"][0][0] == found.record.ranking == "fused"
    texts = dict(zip(*(artifact.rows(range(200))[name].to_pylist() for name in ("row_id", "snippet")), strict=True))
    assert [row["text"] for row in view["rows"]] == [texts[line["row_id"]] for line in lines]


def test_hostile_rows_are_text(place, tmp_path):
    root, _ = place
    succeed(
        "report", root / "art", "--detect", root / "suspects.parquet", "--by", "format", "--out", tmp_path / "r.html"
    )
    page = (tmp_path / "r.html").read_text()
    section = page.partition('<section id="suspects"')[2].partition("</section>")[0]
    assert section.count("<li class=") == SHOWN
    assert "<img" not in section
    assert "<script" not in section
    assert "&lt;img src=x" in section  # in the names of the rows
    assert "of 200 rows" in Page(page).text


def test_what_is_no_detection_of_this_corpus_is_refused(place, tmp_path):
    root, _ = place
    write_artifact(tmp_path / "other", corpus="another")
    pq.write_table(pa.table({"row_id": ["a"]}), tmp_path / "plain.parquet")
    (tmp_path / "text.parquet").write_text("no")
    table = pq.read_table(root / "suspects.parquet")
    pq.write_table(table.drop_columns("rank"), tmp_path / "unranked.parquet")
    renamed = table.set_column(1, "row_id", pa.array(["evil", *table["row_id"].to_pylist()[1:]]))
    pq.write_table(renamed, tmp_path / "renamed.parquet")
    for path, said in (
        (tmp_path / "gone.parquet", "gone.parquet: no such file; expected the .parquet that grasp detect --out writes"),
        (tmp_path / "text.parquet", "text.parquet: cannot be read: "),
        (tmp_path / "plain.parquet", "plain.parquet does not say what was detected"),
        (tmp_path / "unranked.parquet", "unranked.parquet does not say what was detected"),
        (tmp_path / "renamed.parquet", "renamed.parquet: 'evil' is no row of the artifact"),
    ):
        assert said in refused("report", root / "art", "--detect", path, "--out", tmp_path / "r.html")
    said = json.loads(table.schema.metadata[RECORD])
    said["made_from"]["model"] = "another"
    pq.write_table(table.replace_schema_metadata({RECORD: json.dumps(said)}), tmp_path / "model.parquet")
    asked = ["report", root / "art", "--detect", tmp_path / "model.parquet", "--out", tmp_path / "r.html"]
    assert "was made from another artifact: model 'another', here ''; run grasp detect on this one" in refused(*asked)
    write_artifact(tmp_path / "without", targets=("boolq", "arc"))
    asked = ["report", tmp_path / "without", "--detect", root / "suspects.parquet", "--out", tmp_path / "r.html"]
    assert "here 'none'; run grasp detect on this one" in (told := refused(*asked))
    assert "was made from another artifact: units of sciq '" in told
    asked = ["report", tmp_path / "other", "--detect", root / "suspects.parquet", "--out", tmp_path / "r.html"]
    assert "was made from another artifact: corpus 'c0ffee', here 'another'; run grasp detect on this one" in refused(
        *asked
    )
