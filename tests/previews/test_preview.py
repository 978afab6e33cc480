"""Preview of a build: labels and the flags that select them, tokens with loss, examples; nothing is written."""

import json

import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import CorpusError, TargetError
from grasp.pipeline.build import build
from grasp.previews.preview import preview_corpus, preview_targets
from tests.cli.grasp_command import refused, succeed
from tests.pipeline.world import texts, write_checkpoint, write_targets


@pytest.fixture
def place(tmp_path):
    lines = [
        {
            "text": text,
            "url": f"https://h{i % 3}.org/{i}",
            "score": i / 7,
            "meta": {"source": "ab"[i % 2], "parts": [{"n": 1}]},
            "date": f"20{i % 100:02}-0{1 + i % 9}-01",
            "doc type": "x" if i % 4 else None,
        }
        for i, text in enumerate(texts(120))
    ]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_checkpoint(tmp_path / "model")
    write_targets(tmp_path / "facts.jsonl")
    return tmp_path


def test_listed_labels_can_be_selected_by_the_flags_that_are_shown(place):
    preview = preview_corpus(str(place / "c.jsonl"))
    lines = {line["label"]: line for line in preview.table.to_pylist()}
    assert {name: line["select with"] for name, line in lines.items()} == {
        "url": "--by url",
        "score": "--by 'bins(score, 5)'",
        "meta.source": "--by meta.source",
        "date": "--by date",
        "doc type": "--by '\"doc type\"'",
    }
    assert (lines["doc type"]["values"], lines["doc type"]["missing"]) == (1, 30)
    assert "left out: meta.parts" in str(preview)
    assert preview.headline.endswith("c.jsonl: 120 records")
    assert preview_corpus(str(place / "c.jsonl"), limit=10).headline.endswith("10 records (the first 10)")


def test_values_that_are_equal_as_text_are_one_label(place):
    values = ["1", 1, 1.0, True, "true", 2]
    records = [{"text": "water", "label": value} for value in values]
    (place / "mixed.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (line,) = preview_corpus(str(place / "mixed.jsonl")).table.to_pylist()
    assert (line["values"], line["most frequent"]) == (3, "1, true, 2")


def test_a_tokenizer_suffices_and_columns_are_named(place):
    model = str(place / "model")
    (place / "b.jsonl").write_text('{"body": "some words here", "key": "a"}\n')
    path = str(place / "b.jsonl")
    with pytest.raises(CorpusError, match="--text-column"):
        preview_corpus(path)
    columns = {"text_column": "body", "id_column": "key"}
    by_tokenizer = preview_corpus(path, tokenizer=model, **columns)
    assert by_tokenizer.headline == preview_corpus(path, model=model, **columns).headline
    assert "1 rows" in by_tokenizer.headline
    assert "columns: text from 'body', row_id from 'key'" in str(by_tokenizer)
    facts = str(place / "facts.jsonl")
    assert preview_targets(facts, tokenizer=model).table == preview_targets(facts, model=model).table
    flags = ["--text-column", "body", "--id-column", "key"]
    expected = succeed("corpus", path, *flags, "--model", model).out
    options = ["--set", f"model.tokenizer={model}"]
    assert succeed("corpus", path, *flags, *options).lines[0] == expected.splitlines()[0]
    assert "tokens with loss" in succeed("targets", facts, *options).out
    assert "--set features: no effect on a preview" in refused("corpus", path, "--set", "features.tau=1")
    assert "--model (model.path)" in refused("targets", facts, "--set", "model.dtype=float16")


def test_empty_records_are_listed_by_line(place):
    (place / "e.jsonl").write_text('{"text": ""}\n{"text": "some words here"}\n{"text": " "}\n')
    for model in (None, place / "model"):
        shown = str(preview_corpus(str(place / "e.jsonl"), model=model))
        assert f"skipped: 1 empty documents: {place / 'e.jsonl'}:1" in shown
        assert f"skipped: 1 documents of white space: {place / 'e.jsonl'}:3" in shown


def test_rows_and_tokens_are_those_of_the_build(place):
    corpus, model = str(place / "c.jsonl"), str(place / "model")
    art = build(model, corpus, [str(place / "facts.jsonl")], out=place / "art", untrained=True)
    details = ArtifactReader.open(art.path).manifest.details
    preview = preview_corpus(corpus, model=model)
    assert f"120 records, 120 rows, {details['n_tokens']:,} tokens" in preview.headline
    assert sorted(path.name for path in place.iterdir()) == ["art", "c.jsonl", "facts.jsonl", "model"]


def test_targets_are_shown_as_the_model_sees_them(place):
    (place / "exam.csv").write_text("question,answer,unit_id\nWhat is salt?,iron,a\nWhat is bird?,wind,b\n")
    files = [str(place / "facts.jsonl"), str(place / "exam.csv")]
    bare, full = preview_targets(files), preview_targets(files, model=str(place / "model"))
    assert bare.table.to_pylist() == [
        {"target": "facts", "units": 6, "of": 6, "read as": "prompt and completion"},
        {"target": "exam", "units": 2, "of": 2, "read as": "prompt and completion"},
    ]
    (example,) = (text for text in full.examples if text.startswith(("a:", "b:")))
    assert example.removeprefix(example[:3]) in (
        "Question: What is salt? Answer:[loss: iron]",
        "Question: What is bird? Answer:[loss: wind]",
    )
    assert len(full.examples) == 3
    assert full.table["most"].to_pylist()[0] >= full.table["tokens with loss, mean"].to_pylist()[0] > 0


def test_unreadable_inputs_are_refused_in_one_line(place):
    with pytest.raises(CorpusError, match=r"nope\.csv: no such file"):
        preview_corpus(str(place / "nope.csv"))
    with pytest.raises(TargetError, match=r"^[^\n]*`prompt` and `completion`[^\n]*$"):
        preview_targets([str(place / "c.jsonl")])
