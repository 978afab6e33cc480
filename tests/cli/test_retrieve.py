"""grasp retrieve on a small world: what it prints is what it writes, domains that are planted are found."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.verbs.score import score
from tests.cli.grasp_command import cells, refused, succeed
from tests.extract.world import TOPICS


@pytest.fixture(scope="module")
def queries(art, tmp_path_factory):
    """Labels of the artifact's units, as JSONL."""
    path = tmp_path_factory.mktemp("retrieve") / "queries.jsonl"
    names = ArtifactReader.open(art).units["unit_id"].to_pylist()
    lines = [{"unit_id": name, "topic": TOPICS[i % 3], "prompt": "p"} for i, name in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lift(art, unit_id, topic, k, array="relevance_token"):
    """Recall among the best k rows of one unit by that of chance, sorted by hand."""
    artifact = ArtifactReader.open(art)
    column = artifact.units["unit_id"].to_pylist().index(unit_id)
    score = np.concatenate([block[:, column] for _, block in artifact.array_blocks(array)])
    first_out, last_in = np.sort(score)[::-1][[k, k - 1]]
    assert first_out < last_in
    topics = np.array(pq.read_table(artifact.rows_path).column("topic").to_pylist())
    best = np.argsort(-score)[:k]
    return (topics[best] == topic).sum() / (topics == topic).sum() / (k / len(score))


def test_what_is_printed_is_the_mean_of_what_is_written(art, queries, tmp_path):
    out = tmp_path / "lifts.parquet"
    shown = succeed("retrieve", art, "--queries", queries, "--by", "topic", "--k", "5,9", "--quiet", "--out", out)
    table = pq.read_table(out).to_pylist()
    assert {line["score"] for line in table} == {
        "grasp", "bm25", "overlap", "grasp+bm25 (rrf)", "grasp+bm25 (z)", "grasp+overlap (rrf)", "grasp+overlap (z)"
    }  # fmt: skip
    for line in table:
        if line["score"] == "grasp":
            best = score(ArtifactReader.open(art), "facts", unit=line["unit_id"]).to_pandas()["topic"] == line["value"]
            assert line["lift"] == pytest.approx(best[: line["k"]].mean() / best.mean())
    mean = np.mean([line["lift"] for line in table if (line["score"], line["k"]) == ("bm25", 9)])
    assert "Recall of related rows among the best k of" in shown.out
    printed = [cells(line) for line in shown.lines if line.startswith("bm25")]
    assert printed[1][1:3] == ["topic", "9"]
    assert float(printed[1][3]) == pytest.approx(mean, abs=6e-4)


def test_a_parquet_of_labels_says_the_same(art, queries, tmp_path):
    lines = [json.loads(line) for line in queries.read_text().splitlines()]
    table = pa.table({name: [line[name] for line in lines] for name in ("unit_id", "topic")})
    pq.write_table(table, tmp_path / "queries.parquet")
    asked = ("--by", "topic", "--k", "5", "--methods", "token,pooled", "--quiet")
    first = succeed("retrieve", art, "--queries", queries, *asked)
    assert succeed("retrieve", art, "--queries", tmp_path / "queries.parquet", *asked).out == first.out


def test_rows_that_an_expression_selects(art, tmp_path):
    out = tmp_path / "lifts.parquet"
    asked = ("--target", "facts", "--related", "topic = 'sky'", "--k", "4", "--methods", "token", "--out", out)
    succeed("retrieve", art, *asked, "--quiet")
    for line in pq.read_table(out).to_pylist():
        assert line["lift"] == pytest.approx(lift(art, line["unit_id"], "sky", 4))


def test_in_python_it_says_the_same(art, queries):
    found = grasp.open(art).retrieve(queries=queries, by=["topic"], k=[5], methods=["token", "pooled"])
    frame = found.to_pandas()
    assert set(frame["score"]) == {"token", "pooled"}
    (token, pooled) = found.recalls
    assert token.mean.value == pytest.approx(frame[frame["score"] == "token"]["lift"].mean())
    assert token.against is None
    assert pooled.against.value == pytest.approx(pooled.mean.value - token.mean.value)
    shown = succeed("retrieve", art, "--queries", queries, "--by", "topic", "--k", "5", "--methods", "token,pooled")
    assert repr(found) in shown.out


def test_grasp_ranks_as_score_does(art):
    found = grasp.open(art).retrieve(target="facts", related="topic = 'sky'", together=True, k=[4], methods=["grasp"])
    best = score(ArtifactReader.open(art), "facts", top=4).to_pandas()
    assert len(found) == 1
    topics = pq.read_table(ArtifactReader.open(art).rows_path)["topic"].to_pylist()
    chance = topics.count("sky") / len(topics)
    assert found.recalls[0].mean.value == pytest.approx((best["topic"] == "sky").mean() / chance)


def test_units_of_one_value_are_one_query_by_their_mean(art, queries, tmp_path):
    out = tmp_path / "lifts.parquet"
    asked = ("--by", "topic", "--together", "--k", "7", "--methods", "token", "--out", out, "--quiet")
    succeed("retrieve", art, "--queries", queries, *asked)
    artifact = ArtifactReader.open(art)
    score_NE = np.concatenate([block for _, block in artifact.array_blocks("relevance_token")])
    topics = np.array(pq.read_table(artifact.rows_path).column("topic").to_pylist())
    table = {line["value"]: line for line in pq.read_table(out).to_pylist()}
    assert set(table) == set(TOPICS)
    for g, topic in enumerate(TOPICS):
        best = np.argsort(-score_NE[:, g::3].mean(axis=1))[:7]
        share = (topics[best] == topic).sum() / (topics == topic).sum()
        assert table[topic]["lift"] == pytest.approx(share / (7 / len(topics)))
        assert table[topic]["unit_id"] == topic


def test_queries_without_rows_of_their_value_are_counted(art, queries, tmp_path):
    lines = [json.loads(line) for line in queries.read_text().splitlines()]
    lines[0]["topic"] = "nowhere"
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = succeed("retrieve", art, "--queries", path, "--by", "topic", "--k", "5", "--methods", "grasp", "--quiet")
    assert "1 queries are left out: no row has their value of topic" in shown.out
    assert f"{len(lines) - 1} queries of" in shown.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "retrieve: got none of them; expected queries and by, or target and related"),
        (("--queries", "q.jsonl"), "retrieve: got queries; expected queries and by"),
        (("--target", "facts", "--related", "true", "--by", "topic"), "retrieve: got by, target, related"),
        (("--queries", "none.jsonl", "--by", "topic"), "none.jsonl: no such file; expected unit_id and topic"),
        (("--queries", "{queries}", "--by", "format"), "lacks ['format']"),
        (("--queries", "{queries}", "--by", "prompt"), "prompt"),
        (("--queries", "{queries}", "--by", "topic", "--k", "0"), "k: got 0, expected numbers from 1 to the"),
        (("--queries", "{queries}", "--by", "topic", "--k", "many"), "--k: got 'many', expected numbers of rows"),
        (("--queries", "{queries}", "--by", "topic", "--k", "9999"), "k: got 9999, expected numbers from 1 to the"),
        (("--queries", "{queries}", "--by", "topic", "--methods", "bm26"), "methods: got 'bm26'; did you mean bm25?"),
        (("--target", "facts", "--related", "topic = 'x'"), "matches no row"),
        (("--target", "facts", "--related", "topic != 'x'"), "matches every row"),
        (("--target", "fact", "--related", "topic = 'sky'"), "has no target 'fact'"),
        (("--target", "facts", "--related", "topic = 'sky'", "--methods", "token", "--cache", "c"), "cache: no"),
        (("--target", "facts", "--related", "topic = 'sky'", "--methods", "token,bm25", "--fusion", "z"), "fusion: no"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line(arguments, said, art, queries):
    assert said in refused("retrieve", art, *(one.format(queries=queries) for one in arguments), "--quiet")


def test_units_of_another_artifact_are_refused(art, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"unit_id": "elsewhere", "topic": "sky"}\n')
    said = refused("retrieve", art, "--queries", path, "--by", "topic", "--quiet")
    assert "none of its units is one of" in said
    assert "expected names like 'facts-" in said


def test_a_unit_named_twice_is_refused(art, queries, tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text(queries.read_text() * 2)
    assert "occur more than once, expected each once" in refused(
        "retrieve", art, "--queries", path, "--by", "topic", "--quiet"
    )


def test_a_file_that_is_no_table_is_refused(art, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("unit_id,topic\n")
    assert "bad.jsonl: cannot be read:" in refused("retrieve", art, "--queries", path, "--by", "topic", "--quiet")
