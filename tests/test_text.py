"""Untrusted text becomes one line without control characters."""

import csv
import json
import re
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grasp
from grasp import text as ascii_text
from grasp.report.views import interval, number, signed
from grasp.results import Result, write_table
from grasp.text import (
    DEFAULT_WIDTH,
    MAX_CELL_CHARS,
    did_you_mean,
    ending,
    json_text,
    name,
    plain,
    skipped_lines,
    text_table,
    unique_names,
)
from tests.report.world import write_artifact


@given(st.text(max_size=80))
def test_control_characters_are_removed(text):
    for shown in (plain(text), name(text), ending(text)):
        assert not any(unicodedata.category(ch) in ("Cc", "Cs") for ch in shown)
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\ufeff")


def test_names_that_could_be_meant():
    known = ("metadata.source", "topic", "Doc.Topic")
    assert did_you_mean("source", known) == " (did you mean 'metadata.source'?)"
    assert did_you_mean("TOPIK", known) == " (did you mean 'topic'?)"
    assert did_you_mean("topic", ("a.topic", "b.topic")) == " (did you mean 'a.topic' or 'b.topic'?)"
    assert did_you_mean("year", known) == ""


def test_truncated_documents_are_counted_of_all_and_not_called_skipped():
    lines = skipped_lines({"empty": 1, "cut_begin": 132}, {"empty": ["a.jsonl:3"]}, "skipped", 280)
    truncated = "truncated: 132 of 280 conversations or prompts lose their beginning, to fit a row"
    assert lines == ["skipped: 1 empty documents: a.jsonl:3", truncated]


@given(st.lists(st.text(max_size=5) | st.just("x" * 70), max_size=8))
def test_truncated_names_stay_different(texts):
    names = unique_names(texts, MAX_CELL_CHARS)
    assert len(set(names)) == len(texts)
    assert all(len(name) <= MAX_CELL_CHARS for name in names)


def test_numbers_have_a_minus_sign_and_missing_ones_a_dash():
    assert signed(-0.12345) == "\N{MINUS SIGN}0.123"
    assert signed(0.5, 1) == "+0.5"
    assert signed(None) == signed(float("nan")) == number(None) == "\N{EN DASH}"
    assert number(-1.0, 1) == "\N{MINUS SIGN}1.0"
    assert interval(-1.0, 2.0) == "[\N{MINUS SIGN}1.000, +2.000]"
    assert interval(float("nan"), 2.0) == ""
    assert ascii_text.signed(-0.12345) == "-0.123"
    assert ascii_text.signed(-0.000175) == "-0.0002"
    assert ascii_text.signed(0.000175, 4) == "+0.0002"
    assert ascii_text.signed(0.0000175) == "+2e-05"
    assert ascii_text.signed(-1e-12) == ascii_text.signed(-0.0) == "+0.000"
    assert ascii_text.number(-0.000175) == "-0.0002"
    assert ascii_text.signed(-1e300) == "-1e+300"
    assert ascii_text.number(123456789.0) == "123456789.000"
    assert interval(-0.000175, 0.0121) == "[\N{MINUS SIGN}0.0002, +0.012]"
    assert ascii_text.signed(None) == ascii_text.number(float("nan")) == "-"


def test_tables_fit_a_terminal(monkeypatch):
    headings = ["effect", "row_id", "topic", *(f"column_{k}" for k in range(4)), "text"]
    rows = [["+1.0", f"cc:{k}{'0123456789' * 4}{k}", "Games", *["0.5"] * 4, "word " * 50] for k in range(3)]
    in_pipe = text_table("", headings, rows)
    assert max(map(len, in_pipe.splitlines())) == DEFAULT_WIDTH
    assert all(row[1] in in_pipe for row in rows)
    monkeypatch.setenv("COLUMNS", "80")
    shown = text_table("", headings, rows).splitlines()
    assert max(map(len, shown)) <= 80
    ids = [line.split()[1] for line in shown[1:4]]
    assert all(re.fullmatch(rf"cc:{k}0123\d*\.\.\.\d*6789{k}", ids[k]) for k in range(3))
    assert len(shown) == 8  # the last columns continue below
    same = [[f"a-{'x' * 50}-{k}-{'x' * 50}-z", *["0.5"] * 3] for k in "12"]
    assert same[0][0][:20] in text_table("", ["row_id", *"abc"], same)
    assert len({line.split()[0] for line in text_table("", ["row_id", *"abc"], same).splitlines()}) == 3


def test_json_has_only_finite_numbers():
    value = {"a": float("nan"), "b": [1.5, float("inf"), (float("-inf"), None)], "c": "nan"}
    assert json.loads(json_text(value)) == {"a": None, "b": [1.5, None, [None, None]], "c": "nan"}


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_table_has_only_finite_numbers_and_no_spreadsheet_formulas(tmp_path, name):
    texts = ["=1+1", "@SUM(A1)", "-2", "+x", "\t=1", "plain", None]
    numbers = [float("nan"), float("inf"), -1.0, 2.5, None, 0.0, 1e308]
    table = pa.table({"row_id": texts, "label": pa.array(texts).dictionary_encode(), "value": numbers, "n": range(7)})
    table = table.append_column("large", pa.array(texts, pa.large_string()))
    path = write_table(table, tmp_path / name)
    finite = [None, None, -1.0, 2.5, None, 0.0, 1e308]
    if name.endswith(".parquet"):
        expected = {"row_id": texts, "label": texts, "value": finite, "n": list(range(7)), "large": texts}
        assert pq.read_table(path).to_pydict() == expected
        return
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [line["row_id"] for line in lines] == ["'=1+1", "'@SUM(A1)", "'-2", "'+x", "'\t=1", "plain", ""]
    assert all(line["label"] == line["large"] == line["row_id"] for line in lines)
    assert [float(line["value"]) if line["value"] else None for line in lines] == finite


STEERS = "a\x1b[2J\x07\u202eb\nc"


def test_reprs_of_results_have_no_control_characters(tmp_path):
    label, target = f"top{STEERS}", f"sci{STEERS}"
    write_artifact(tmp_path / "art", targets=(target, "boolq"), topics=(STEERS, f"{STEERS}2", "games", None))
    art = grasp.open(tmp_path / "art")
    results = [
        art,
        art.rows,
        art.score(target, top=5),
        art.predict(drop=f"topic = '{STEERS}'", target=target),
        art.predict(by="topic"),
        art.select("20%", {target: 1.0, "boolq": 2.0}, by="topic", exclude_where=f"topic = '{STEERS}'"),
        art.mix("topic", target),
        Result(pa.table({label: [STEERS]}), f"headline {STEERS}", (f"note\n{STEERS}",)),
    ]
    for result in results:
        shown = repr(result)
        assert "\ufffd" in shown, shown
        assert not any(unicodedata.category(ch) in ("Cc", "Cf") for ch in shown.replace("\n", "")), shown
        assert not {"\x1b", "\x07", "\u202e"} & set(result._repr_html_())
