"""Retrieval and category shares on small worlds: query pages are never ranked, shares equal a double loop."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.curation.setting import held_out_documents
from experiments.weborganizer import related, shares
from grasp.artifact.reader import ArtifactReader
from grasp.pipeline.pipeline import build_artifact
from tests.pipeline.world import TOPICS, texts, world, write_checkpoint

N = 40


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write pages whose topics have separate vocabularies."""
    place = tmp_path_factory.mktemp("pages")
    table = {
        "doc_id": [f"page-{i}" for i in range(N)],
        "text": [f"{text} {' '.join([TOPICS[i % 3]] * 9)} and more" for i, text in enumerate(texts(N))],
        "topic": [TOPICS[i % 3] for i in range(N)],
        "format": ["list" if i % 2 else "essay" for i in range(N)],
    }
    pq.write_table(pa.table(table), place / "corpus.parquet")
    model = write_checkpoint(place / "model")
    return related.Pages(place / "corpus.parquet", place / "work", held_out=12, queries=9, model=model)


@pytest.fixture(scope="module")
def results(pages):
    return related.run(pages, [6], "bm25,grasp,grasp+bm25", pages.work / "related.json")


def test_query_pages_are_not_ranked_and_have_their_labels(pages, results):
    ranked = set(pq.read_table(pages.artifact().rows_path).column("doc_id").to_pylist())
    apart = [f"page-{i}" for i in held_out_documents(N, 12)]
    assert ranked == {f"page-{i}" for i in range(N)} - set(apart)
    lines = [json.loads(line) for line in pages.queries().read_text().splitlines()]
    assert {line["unit_id"] for line in lines} <= set(apart[:9])
    for line in lines:
        assert line["topic"] == TOPICS[int(line["unit_id"].removeprefix("page-")) % 3]
    assert {result.domains.name for result in results} == {"topic", "format"}


def test_separate_vocabularies_retrieve_their_topic(pages, results):
    (bm25,) = [result for result in results if (result.score, result.domains.name) == ("bm25", "topic")]
    assert bm25.mean.value > 2.0
    written = json.loads((pages.work / "related.json").read_text())
    lines = {
        key: next(record for record in written[key] if (record["score"], record["label"]) == ("bm25", "topic"))
        for key in ("every_page_a_query", "pages_of_one_value_together")
    }
    assert lines["every_page_a_query"]["lift"]["mean"] == bm25.mean.value
    assert lines["pages_of_one_value_together"]["lift"]["mean"] > 2.0
    assert f"{bm25.mean.value:.2f} ({bm25.mean.low:.2f} to" in (pages.work / "related.md").read_text()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Build two artifacts of one corpus, with exact and truncated residuals instead of two checkpoints."""
    place = tmp_path_factory.mktemp("shares")
    first = build_artifact(world(place), place / "art-1")
    return [first, build_artifact(world(place, features={"top_k": 2}), place / "art-2")]


def test_shares_equal_a_double_loop(checkpoints):
    (trend,), (names,) = shares.measured(checkpoints, ["topic"], "facts")
    for c, path in enumerate(checkpoints):
        artifact = ArtifactReader.open(path)
        topics = pq.read_table(artifact.rows_path).column("topic").to_pylist()
        values_NE = np.concatenate([block for _, block in artifact.array_blocks("relevance_output_layer")])
        mean = {
            t: np.mean([row.mean() for row, row_topic in zip(values_NE, topics, strict=True) if row_topic == t])
            for t in names
        }
        up, down = sum(max(value, 0) for value in mean.values()), -sum(min(value, 0) for value in mean.values())
        expected = [mean[t] / up if mean[t] > 0 else mean[t] / down for t in names]
        np.testing.assert_allclose(trend.share_CGT[c, :, 0], expected, rtol=1e-4)
        np.testing.assert_allclose(trend.mean_CGT[c, :, 0], [mean[t] for t in names], rtol=1e-4)
