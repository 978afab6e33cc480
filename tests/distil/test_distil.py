"""Scorers: fitted to a small artifact, evaluated on held-out rows, and applied to any corpus."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grasp
from grasp.distil import apply as applying
from grasp.distil import ngrams
from grasp.distil.distil import distil
from grasp.distil.ngrams import LENGTHS, SLOTS, as_bytes, mean_over, shares
from grasp.distil.scorer import CARD, SIGNED_CARD, WEIGHTS, Scorer
from grasp.errors import ArtifactError, CorpusError, ProtocolError, SettingsError
from grasp.pipeline.pipeline import build_artifact
from tests.cli.grasp_command import run, succeed
from tests.corpus.world import write_jsonl, write_parquet
from tests.pipeline.world import world, write_corpus

TABLES = np.random.default_rng(0).normal(size=(len(LENGTHS), SLOTS)).astype(np.float32)
RARITY = np.random.default_rng(1).normal(size=SLOTS).astype(np.float32)
DOCUMENTS = [f"{word} and salt, {i} birds" for i, word in enumerate(["water", "stone", "iron wind", "", "star"] * 8)]


@pytest.fixture(scope="module")
def art(tmp_path_factory):
    place = tmp_path_factory.mktemp("distil")
    chosen = world(place)
    write_corpus(place / "corpus.jsonl", 120)
    return grasp.open(build_artifact(chosen, place / "art"))


@pytest.fixture(scope="module")
def place(art, tmp_path_factory):
    """A scorer that no test may change."""
    path = tmp_path_factory.mktemp("scorer") / "scorer"
    distil(art.files, "facts", path)
    return path


@pytest.fixture
def scorer_copy(place, tmp_path):
    """A copy of the scorer that a test may damage."""
    return shutil.copytree(place, tmp_path / "copy")


# ------------------------------------------------------------------------------------------------- sequences of bytes


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=12), st.integers(0, 5), st.sampled_from([8, 16, 1 << 14]))
def test_table_lookup_equals_the_product_with_the_matrix_of_shares(texts, first, piece):
    array = as_bytes(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "PIECE_BYTES", piece)  # split texts into pieces, as it happens to very long ones
        value_N, rarity_N = mean_over(array, TABLES, RARITY)
        whole = shares(array)
        np.testing.assert_allclose(value_N, whole @ TABLES.ravel(), atol=1e-5)
        columns = slice(ngrams.FAMILIARITY_LENGTH * SLOTS, (ngrams.FAMILIARITY_LENGTH + 1) * SLOTS)
        np.testing.assert_allclose(rarity_N, whole[:, columns] @ RARITY, atol=1e-5)
        suffix_N, _ = mean_over(array.slice(first), TABLES, RARITY)
    np.testing.assert_allclose(suffix_N, value_N[first:], atol=1e-9)  # independent of the other texts


def test_equal_sequences_share_a_slot_and_shares_of_each_length_sum_to_one():
    counts = shares(as_bytes(["abcabcabc", "ab", "abc"]))
    by_length = counts.toarray().reshape(3, len(LENGTHS), SLOTS).sum(axis=2)
    np.testing.assert_allclose(by_length, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], atol=1e-6)
    assert (counts[[0], :SLOTS] != 0).sum() == 3  # abc, bca, cab


# --------------------------------------------------------------------------------------------------------- the scorer


def test_a_scorer_ranks_held_out_rows(art, place):
    card = Scorer.open(place).card
    assert card.rows == len(art) == card.quality.rows
    assert card.quality.spearman[0] > 0.4
    assert card.quality.spearman[1] < card.quality.spearman[0] < card.quality.spearman[2]


def test_fitting_is_reproducible_and_can_use_a_sample_of_rows(art, place, tmp_path):
    distil(art.files, None, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (place / WEIGHTS).read_bytes()
    assert distil(art.files, "facts", tmp_path / "few", rows=40).scorer.card.rows == 40


def test_invalid_inputs_of_fitting_are_refused(art, place, tmp_path):
    with pytest.raises(SettingsError, match="already exists"):
        distil(art.files, "facts", place)
    with pytest.raises(SettingsError, match="rows: got 3"):
        distil(art.files, "facts", tmp_path / "x", rows=3)
    with pytest.raises(ProtocolError, match=r"target: got \['sky'\]"):
        distil(art.files, "sky", tmp_path / "x")


def test_text_of_another_kind_is_marked(art, place):
    texts = [row["snippet"] for row in art.rows.to_arrow().to_pylist()]
    scorer = Scorer.open(place)
    assert scorer.score(texts)[1].mean() < 0.1
    assert scorer.score(["x = lambda y: {y[0]: 17}", "Größe und Straße"])[1].all()


def damaged_card(path, **changes):
    """Change a card and sign it again, as an attacker can."""
    card = Scorer.open(path).card.model_copy(update=changes)
    SIGNED_CARD.write(path, card)


def foreign_weights(path, dtype, shape):
    """Write 64 bytes with an arbitrary header and a valid checksum."""
    header = json.dumps({"tables": {"dtype": dtype, "shape": shape, "data_offsets": [0, 64]}}).encode()
    (path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    card = SIGNED_CARD.read(path).model_copy(update={"weights": grasp.files.entry_of(path / WEIGHTS)})
    SIGNED_CARD.write(path, card)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / CARD).unlink(), r"is not a scorer \(no card.json\)"),
        (lambda path: ((path / WEIGHTS).rename(path / "w"), (path / WEIGHTS).symlink_to("w")), "is a symbolic link"),
        (lambda path: damaged_card(path, weights=grasp.files.FileEntry(bytes=1 << 40, checksum="")), "too large"),
        (lambda path: damaged_card(path, first_bytes=1 << 62), "first_bytes: Input should be less than or equal to"),
        (lambda path: damaged_card(path, intercept=1e308), "intercept: Input should be less than or equal to"),
        (lambda path: foreign_weights(path, "BF16", [32]), r"weights\.safetensors: damaged: "),
        (lambda path: foreign_weights(path, "F32", [-16]), r"weights\.safetensors: damaged: "),
        (lambda path: foreign_weights(path, "F32", [16]), "holds {'tables'"),
    ],
)
def test_a_damaged_scorer_is_refused(scorer_copy, damage, message):
    damage(scorer_copy)
    with pytest.raises(ArtifactError, match=message):
        Scorer.open(scorer_copy)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (np.full_like(TABLES, np.nan), "tables has a number that is not finite"),
        (np.full_like(TABLES, 1e20), "not finite or over 1e"),
        (TABLES[:, :100], "expected"),
        (TABLES.astype(np.float64)[:, ::2], "expected"),
    ],
)
def test_numbers_that_no_scorer_has_are_refused(place, tmp_path, tables, message):
    replace(Scorer.open(place), tables_KV=tables).save(tmp_path / "bad")
    with pytest.raises(ArtifactError, match=message):
        Scorer.open(tmp_path / "bad")


# ------------------------------------------------------------------------------------------------- over a whole corpus


@pytest.fixture
def corpus(tmp_path):
    """Two Parquet files with names."""
    rows = [{"doc_id": f"d{i}", "text": text, "n": i} for i, text in enumerate(DOCUMENTS)]
    write_parquet(tmp_path / "corpus" / "a.parquet", rows[:25])
    write_parquet(tmp_path / "corpus" / "b.parquet", rows[25:])
    return tmp_path / "corpus"


def scores_of(out) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("scores-*.parquet"))])


def test_every_document_is_scored_by_its_text(place, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(applying, "BATCH_DOCUMENTS", 7)
    result = applying.apply(place, corpus, tmp_path / "out", keep="25%")
    table = scores_of(tmp_path / "out")
    expected, _ = Scorer.open(place).score(DOCUMENTS)
    assert result.documents == len(DOCUMENTS)
    assert table["doc_id"].to_pylist() == [f"d{i}" for i in range(len(DOCUMENTS))]
    assert table["position"].to_pylist() == [*range(25), *range(len(DOCUMENTS) - 25)]
    np.testing.assert_array_equal(table["score"].to_numpy(), expected)
    copied = pq.read_table(next((tmp_path / "out" / "kept").glob("*.parquet")))
    best = np.sort(np.argsort(-expected, kind="stable")[:10])
    assert copied["doc_id"].to_pylist() == [f"d{i}" for i in best]
    assert copied.column_names == ["doc_id", "text", "n"]
    assert applying.apply(place, corpus, tmp_path / "out", keep="25%").documents == len(DOCUMENTS)  # all is there
    with pytest.raises(SettingsError, match="kept: already exists"):
        applying.apply(place, corpus, tmp_path / "out", keep="50%")


def test_json_lines_and_conversations_are_read_like_in_a_build(place, tmp_path):
    write_jsonl(tmp_path / "c.jsonl.gz", [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)])
    applying.apply(place, tmp_path / "c.jsonl.gz", tmp_path / "lines")
    np.testing.assert_array_equal(scores_of(tmp_path / "lines")["score"], Scorer.open(place).score(DOCUMENTS)[0])
    assert scores_of(tmp_path / "lines")["row_id"].to_pylist() == [str(i) for i in range(len(DOCUMENTS))]
    turns = [{"role": "user", "content": "water?"}, {"role": "assistant", "content": "salt"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}])
    applying.apply(place, tmp_path / "chat.jsonl", tmp_path / "chat")
    assert (
        scores_of(tmp_path / "chat")["score"][0].as_py()
        == Scorer.open(place).score(["user: water? assistant: salt"])[0]
    )


def test_a_killed_run_resumes_with_the_unfinished_file(place, tmp_path, monkeypatch):
    monkeypatch.setattr(applying, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(applying, "BATCH_ROWS", 4)
    corpus = tmp_path / "lines"
    for name in "abc":
        write_jsonl(corpus / f"{name}.jsonl", [{"text": text} for text in DOCUMENTS[:20]])
    whole = applying.apply(place, corpus, tmp_path / "whole")
    out, scored, score = tmp_path / "out", [], Scorer.score

    def counting(self, texts):
        if len(scored) == 48 and not out.with_suffix(".dead").exists():
            out.with_suffix(".dead").touch()
            raise KeyboardInterrupt
        scored.extend(texts.to_pylist())
        return score(self, texts)

    monkeypatch.setattr(Scorer, "score", counting)
    with pytest.raises(KeyboardInterrupt):
        applying.apply(place, corpus, out)
    assert [path.name for path in sorted(out.glob("*.parquet"))] == ["scores-00000.parquet", "scores-00001.parquet"]
    assert applying.apply(place, corpus, out).to_arrow().equals(whole.to_arrow())
    assert len(scored) == 48 + 20  # the third file from its beginning, the first two not again
    for path in out.glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert applying.apply(place, corpus, out).documents == 60
    assert len(scored) == 48 + 20


def test_damaged_scores_are_named_and_not_resumed(place, corpus, tmp_path):
    applying.apply(place, str(corpus), tmp_path / "scored")
    part = tmp_path / "scored" / "scores-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-20])
    applying.apply(place, str(corpus), tmp_path / "scored")  # one that is cut is made again
    assert part.read_bytes() == whole
    part.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    with pytest.raises(SettingsError, match=r"scores-00000\.parquet: damaged: .*delete"):
        applying.apply(place, str(corpus), tmp_path / "scored")
    part.unlink()
    assert applying.apply(place, str(corpus), tmp_path / "scored").documents == len(DOCUMENTS)


def test_scores_are_not_written_to_inputs_or_foreign_directories(place, corpus, scorer_copy, tmp_path):
    for out, what in ((corpus / "scored", "is the corpus"), (scorer_copy / "scored", "is the scorer")):
        with pytest.raises(SettingsError, match=f"out: .*, which {what}"):
            applying.apply(scorer_copy, str(corpus), out)
        assert not out.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(SettingsError, match="not empty"):
        applying.apply(place, corpus, tmp_path / "mine")


def test_a_start_that_scored_nothing_binds_nobody(place, tmp_path):
    path, out = tmp_path / "pages.parquet", tmp_path / "out"
    write_parquet(path, [{"doc_id": str(i), "body": text} for i, text in enumerate(DOCUMENTS[:4])])
    with pytest.raises(grasp.GraspError, match="body"):
        applying.apply(place, path, out)
    assert applying.apply(place, path, out, text_column="body").documents == 4


@pytest.mark.parametrize(
    ("row", "options", "error", "keyword"),
    [
        ({"input_ids": [1, 2]}, {}, CorpusError, "has token ids and no text"),
        ({"words": "a"}, {}, CorpusError, r"odd.jsonl:1: no text column"),
        ({"text": "a"}, {"keep": "20%tokens"}, SettingsError, "does not count tokens"),
    ],
)
def test_invalid_documents_and_options_are_refused(place, tmp_path, row, options, error, keyword):
    path = (
        write_parquet(tmp_path / "ids.parquet", [row])
        if "input_ids" in row
        else write_jsonl(tmp_path / "odd.jsonl", [row])
    )
    with pytest.raises(error, match=keyword):
        applying.apply(place, path, tmp_path / "out", **options)


def test_the_commands_report_the_quality_of_the_scorer(art, corpus, tmp_path):
    printed_card = succeed("distil", art.path, "--out", tmp_path / "s").out
    assert "Spearman correlation with relevance" in printed_card
    assert succeed("info", tmp_path / "s").out in printed_card
    assert json.loads(succeed("info", tmp_path / "s", "--json").out)["target"] == "facts"
    printed = succeed("apply", tmp_path / "s", "--corpus", corpus, "--out", tmp_path / "out", "--keep", "5").out
    assert "40 documents scored for facts" in printed
    assert "unlike the training rows" in printed
    failed = run("apply", tmp_path / "nothing", "--corpus", corpus, "--out", tmp_path / "out")
    assert failed.code == 2
    assert "is not a scorer" in failed.err


def test_verify_compares_the_files_of_a_scorer(scorer_copy):
    assert succeed("verify", scorer_copy).out == f"{scorer_copy}: scorer, all files intact\n"
    data = bytearray((scorer_copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (scorer_copy / WEIGHTS).write_bytes(data)
    failed = run("verify", scorer_copy)
    assert failed.code == 1
    assert failed.out.startswith(f"broken: {scorer_copy / WEIGHTS}: ")
    (scorer_copy / WEIGHTS).unlink()
    assert run("verify", scorer_copy).code == 1


def test_a_batch_of_ray_data_gets_two_columns(place):
    table = Scorer.open(place).add_scores(pa.table({"text": DOCUMENTS}))
    assert table.column_names == ["text", "score", "unfamiliar"]
    np.testing.assert_array_equal(table["score"], Scorer.open(place).score(DOCUMENTS)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ray_data_maps_batches_with_a_scorer(place):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    scorer = Scorer.open(place)
    try:
        dataset = ray.data.from_items([{"text": text} for text in DOCUMENTS]).map_batches(
            scorer.add_scores, batch_format="pyarrow"
        )
        scores = sorted(row["score"] for row in dataset.take_all())
    finally:
        ray.shutdown()
    np.testing.assert_allclose(scores, sorted(scorer.score(DOCUMENTS)[0]))
