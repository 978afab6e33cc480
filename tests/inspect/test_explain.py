"""Contributions of words sum to the effect of a row for each kernel; hostile text; missing rows and models."""

import io
import json
import re
import shutil
import unicodedata
from contextlib import redirect_stdout
from math import nan

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import grasp
from grasp.api.score import score
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import indices_of_row_ids
from grasp.errors import ArtifactError, ModelError, ProtocolError, SettingsError
from grasp.inspect.explain import Explainer, _PreparedUnits, explain
from grasp.inspect.explanation import Explanation, dominant_word_notes, join_words
from grasp.kernels.whitening import Whitener, second_moments
from grasp.models.causal_lm import pad_rows
from grasp.models.forward_pass import extract
from grasp.models.tokenizer import HfTokenizer
from grasp.pipeline.model_pass import ModelPass
from grasp.pipeline.pipeline import build_artifact
from grasp.report.example_rows import _shaded_words
from grasp.text import visible
from tests.cli.grasp_command import refused, run, succeed
from tests.mentions import assert_mentions
from tests.pipeline.world import EVERY, world, write_checkpoint
from tests.rules import rule

KERNELS = tuple(name for name in EVERY if "sketch" not in name)
UNIT = "facts-2"  # its answer has several tokens
BOTH_SIGNS = rule(name="both signs count alike")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("explain")


@pytest.fixture(scope="module")
def art(root):
    """Build with every kernel, stored in float32."""
    settings = world(root / "world", features={"kernels": EVERY})
    return ArtifactReader.open(build_artifact(settings, root / "art"))


@pytest.fixture(scope="module")
def explainer(art):
    return Explainer(art)


def unit_of(art):
    return next(unit for unit in art.units.to_pylist() if unit["unit_id"] == UNIT)


def stored(art, kernel, unit=None):
    """Return the stored relevance (N,) to a target, or to one of its units."""
    names = art.units["unit_id"].to_pylist()
    matrix = np.concatenate([block for _, block in art.array_blocks(f"relevance_{kernel}")]).astype(np.float64)
    return matrix.mean(axis=1) if unit is None else matrix[:, names.index(unit)]


@pytest.mark.parametrize("unit", [None, UNIT])
@pytest.mark.parametrize("kernel", KERNELS)
def test_contributions_of_tokens_sum_to_the_stored_relevance(art, explainer, kernel, unit):
    relevance_N = stored(art, kernel, unit)
    # the gradients of a row, a unit and each of its words are rounded to bfloat16 apart
    rounded = 2**-8 * np.abs(relevance_N).max() if kernel == "gradient" else 0.0
    for index in (0, 7, 23):
        row = art.rows(np.array([index]))["row_id"][0].as_py()
        explanation = explainer.explain("facts", row, unit=unit, match=kernel, protocol=BOTH_SIGNS)
        added = np.nansum(explanation.contributions)
        assert added * relevance_N.std() == pytest.approx(
            relevance_N[index], rel=2e-4, abs=1e-6 * relevance_N.std() + rounded
        )
        assert explanation.average == pytest.approx(-relevance_N.mean() / relevance_N.std(), rel=1e-4)
        assert added + explanation.average == pytest.approx(explanation.effect, abs=1e-3 + rounded / relevance_N.std())
        assert explanation.kernels["kernel"].to_pylist() == [kernel]


@pytest.mark.parametrize("unit", [None, UNIT])
@pytest.mark.parametrize(
    "rule_fields",
    [
        {},
        {"match": {"output_layer": 1.0, "embedding": 0.5, "pooled": -0.3}, "negative": 0.25},
        {"match": {"output_layer": 1.0, "knn": 0.5}, "negative": 0.25, "task": "estimate"},
        {"match": {"knn": 1.0, "embedding": 2.0}, "negative": 0.0},
        {
            "match": {"output_layer": 1.0, "pooled": 1.0},
            "standardize": {"task": "mean_of_standardised"},
            "weighting": "count",
        },
    ],
)
def test_contributions_of_tokens_sum_to_the_effect_that_ranks_rows(art, explainer, rule_fields, unit):
    protocol = rule(**({"name": "tried"} | rule_fields)) if rule_fields else None
    ordered = score(art, "facts", protocol=protocol, unit=unit).to_pandas().set_index("row_id")["effect"]
    for row in ("row-0", "row-31"):
        explanation = explainer.explain("facts", row, unit=unit, protocol=protocol)
        assert explanation.effect == pytest.approx(ordered[row])
        rounded = 0.0 if rule_fields else 2**-8 * ordered.abs().max()  # gradients, as above
        added = np.nansum(explanation.contributions) + explanation.text + explanation.average
        assert added == pytest.approx(explanation.effect, abs=1e-3 + rounded)
        assert (explanation.text != 0.0) == (rule_fields.get("task") == "estimate" and unit is None)
        by_kernel = explanation.to_pandas()[explanation.kernels["kernel"].to_pylist()].sum(axis=1)
        np.testing.assert_allclose(by_kernel, np.nan_to_num(explanation.contributions), atol=1e-12)


@pytest.mark.parametrize("positions", ["tail:7", "stride:3"])
def test_positions_that_no_kernel_uses_contribute_nothing(root, positions):
    features = {"positions": positions, "summary_positions": positions, "kernels": ("output_layer", "pooled")}
    art = ArtifactReader.open(
        build_artifact(world(root / "world", features=features), root / positions.replace(":", "-"))
    )
    for kernel in ("output_layer", "pooled"):
        explanation = explain(art, "facts", "row-3", unit=UNIT, match=kernel)
        assert np.nansum(explanation.contributions) + explanation.average == pytest.approx(explanation.effect, abs=1e-3)
    n_predicted = len(explanation.contributions) - 1
    n_used = np.count_nonzero(~np.isnan(explanation.contributions))
    assert n_used == (min(7, n_predicted) if positions == "tail:7" else -(-n_predicted // 3))


def test_contributions_of_questions_words_and_pairs_sum_to_the_effect(art, explainer):
    every = explainer.explain("facts", "row-5")
    total = np.nansum(every.contributions)
    # the gradient's part of a question is the stored one, in float16; words use a mean over questions in bfloat16
    assert sum(every.questions["contribution"].to_pylist()) == pytest.approx(total, rel=2**-8)
    assert every.questions["contribution"].to_pylist() == sorted(every.questions["contribution"].to_pylist())[::-1]
    explanation = explainer.explain("facts", "row-5", unit=UNIT)
    assert np.nansum(explanation.received) == pytest.approx(np.nansum(explanation.contributions))
    assert sum(explanation.pairs["contribution"].to_pylist()) == pytest.approx(
        np.nansum(explanation.received), rel=0.05
    )
    assert np.count_nonzero(~np.isnan(explanation.received)) == unit_of(art)["n_positions"]
    text = "".join(explanation.tokens)
    for pair in explanation.pairs.to_pylist():
        assert pair["row_text"] in text
        assert "".join(explanation.answer_tokens[pair["answer_position"] :]).startswith(pair["answer_text"])


def test_a_row_that_mostly_helps_one_question_is_reported(explainer):
    noted = []
    for explanation in (explainer.explain("facts", f"row-{k}") for k in range(12)):
        adds = [max(0.0, added) for added in explanation.questions["contribution"].to_pylist()]
        parts = (
            (str(explanation.questions["unit_id"][0]), f" {adds[0] / sum(adds):.0%} ") if adds[0] else ("no such unit",)
        )
        noted.append(any(all(part in note for part in parts) for note in explanation.notes))
        assert noted[-1] == (adds[0] > sum(adds) / 2)
    assert len(set(noted)) == 2


def test_token_contributions_equal_a_loop_over_pairs(art, explainer):
    """Compare with the definition of the kernel in float64, one pair of positions at a time."""
    explanation = explainer.explain("facts", "row-5", unit=UNIT, match="output_layer", protocol=BOTH_SIGNS)
    origin, unit = explainer._source, unit_of(art)
    whitener = Whitener.fit(second_moments(art.moments, "hidden"), tau=0.01, alpha=1.0, epsilon=0.3)
    prompt, answer = origin.model.tokenizer.encode([unit["prompt"], unit["completion"]])
    row = each_position(origin, whitener, origin.rows.rows(indices_of_row_ids(art, ["row-5"])).ids(0), first=1)
    answer_positions = each_position(origin, whitener, np.array([*prompt, *answer], dtype=np.int32), first=len(prompt))
    pair = [[float(h @ g) * float(x @ (whitener.precondition_V * y)) for g, y in answer_positions] for h, x in row]
    pair_LS = np.array(pair) / (len(row) * len(answer_positions) * stored(art, "output_layer", UNIT).std())
    np.testing.assert_allclose(explanation.contributions[1:], pair_LS.sum(axis=1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(explanation.received[len(prompt) :], pair_LS.sum(axis=0), rtol=1e-3, atol=1e-5)


def each_position(origin, whitener, ids, first):
    """Return the whitened hidden state and dense residual of every position that predicts a token from `first` on."""
    batch = extract(origin.model, *pad_rows([ids], [first]), "all", origin.settings.features.top_k)
    results = []
    for place in range(len(batch.hidden_PH)):
        dense_V = np.zeros(origin.model.vocab_size)
        np.add.at(dense_V, batch.residual.index_PK[place].numpy(), batch.residual.value_PK[place].numpy())
        results.append(((batch.hidden_PH[place].double().numpy() - whitener.mean_H) @ whitener.map_HH, dense_V))
    return results


# ------------------------------------------------------------------------------------------ as it is shown


def test_tokens_are_joined_into_words():
    words, starts = join_words(["The", " nuc", "le", "ic", " ac", "", "id", ".", "\u6c34", "\u706b", " 12", "3"])
    assert words == ["The", " nucleic", " acid", ".", "\u6c34", "\u706b", " 123"]
    assert starts.tolist() == [0, 1, 4, 7, 8, 9, 10]


def test_an_explanation_is_printed_as_text_in_colour_and_as_html(explainer):
    explanation = explainer.explain("facts", "row-5", unit=UNIT)
    text, colour, html = repr(explanation), explanation.as_text(colour=True), explanation._repr_html_()
    assert text.startswith("row row-5: effect ")
    assert_mentions(text, "answer", "pairs", "above 0")
    assert "blue: " in colour
    assert "\x1b[30;48;5;" in colour
    assert "<span style=" in html
    every = repr(explainer.explain("facts", "row-5"))
    assert "questions" in every


HOSTILE = (
    "water \u202e\u0631\u062d\u0644\u0629 \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f52c cell\u200b\u200d light "
    "\x1b[31mred\x1b[0m \x07\x08 <script>alert(1)</script> {{7*7}} stone\u2066 \ud7ff end \U0001f600"
)


@pytest.fixture(scope="module")
def hostile(root):
    settings = world(root / "hostile", n_rows=12)
    corpus = root / "hostile.jsonl"
    lines = [json.dumps({"row_id": f"r{i}", "text": f"{HOSTILE} {i}"}) for i in range(12)]
    corpus.write_text("\n".join(lines))
    settings = world(root / "hostile", corpus={"path": str(corpus), "max_length": 128})
    return ArtifactReader.open(build_artifact(settings, root / "hostile-art"))


def test_control_characters_and_markup_are_escaped(hostile):
    explanation = explain(hostile, "facts", "r3", unit=UNIT)
    assert "\U0001f469" in "".join(explanation.tokens)
    assert "\u05e9\u05dc\u05d5\u05dd" in "".join(explanation.tokens)
    for text in (repr(explanation), explanation._repr_html_()):
        assert not [ch for ch in text if ch not in "\n\u200d" and unicodedata.category(ch) in ("Cc", "Cf")]
    assert "\x1b[31m" not in explanation.as_text(colour=True)
    assert "<script>" not in explanation._repr_html_()
    with redirect_stdout(io.StringIO()) as out:
        print(explanation)
    assert "{{7*7}}" in out.getvalue()


def test_pieces_of_a_text_concatenate_to_the_text(root):
    tokenizer = HfTokenizer(AutoTokenizer.from_pretrained(root / "world" / "model"), vocab_size=300)
    (ids,) = tokenizer.encode([HOSTILE])
    assert "".join(tokenizer.token_texts(ids)) == HOSTILE
    assert len(tokenizer.token_texts(ids)) == len(ids)
    broken = tokenizer.encode(["\U0001f600"])[0][:2]
    assert "".join(tokenizer.token_texts([*broken, *tokenizer.encode([" water"])[0]])).endswith(" water")


def test_a_long_row_is_abbreviated(root):
    write_checkpoint(root / "long" / "model", context=6_001)
    settings = world(root / "long-world", n_rows=2)
    lines = [
        json.dumps({"row_id": name, "text": text}) for name, text in (("long", "river stone " * 4_000), ("b", "a b"))
    ]
    (root / "long.jsonl").write_text("\n".join(lines))
    settings = world(
        root / "long-world",
        model={"path": str(root / "long" / "model"), "threads": 1},
        corpus={"path": str(root / "long.jsonl"), "max_length": 6_000, "max_rows_per_document": 1},
        features={"kernels": ("output_layer",)},
    )
    art = ArtifactReader.open(build_artifact(settings, root / "long-art"))
    explanation = explain(art, "facts", "long")
    assert len(explanation.tokens) == 6_000
    assert abs(explanation.gap) < 1e-3
    shown = repr(explanation)
    assert re.search("words (before|after)", shown)
    assert len(shown) < 6_000


# ------------------------------------------------------------------------------------------ what is not there


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"row": "nope"}, SettingsError, r"row:.*'nope', .*row-0"),
        ({"unit": "facts-99"}, ProtocolError, "'facts-99'"),
        ({"target": "nope"}, ProtocolError, r"target:.*\['nope'\]"),
        ({"match": "nope"}, ArtifactError, "'nope'.*output_layer"),
    ],
)
def test_errors_name_the_missing_row_unit_or_kernel(art, arguments, error, message):
    with pytest.raises(error, match=message):
        explain(art, **({"target": "facts", "row": "row-1"} | arguments))


def test_an_artifact_without_tokens(art, tmp_path):
    shutil.copytree(art.path, tmp_path / "art")
    shutil.rmtree(tmp_path / "art" / "tokens")
    with pytest.raises(ArtifactError, match="keep_tokens: true"):
        explain(ArtifactReader.open(tmp_path / "art"), "facts", "row-1")


def test_a_missing_model_is_named_and_can_be_replaced_by_a_setting(tmp_path):
    settings = world(tmp_path / "world", n_rows=12)
    art = ArtifactReader.open(build_artifact(settings, tmp_path / "art"))
    before = explain(art, "facts", "row-1")
    place = shutil.move(settings.model.path, tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"no such .*--set model\.path="):
        explain(art, "facts", "row-1")
    moved = explain(art, "facts", "row-1", overrides={"model": {"path": place}})
    np.testing.assert_array_equal(moved.contributions, before.contributions)
    other = write_checkpoint(tmp_path / "other", vocab=301)
    with pytest.raises(ArtifactError, match="model and tokenizer changed"):
        explain(art, "facts", "row-1", overrides={"model": {"path": str(other)}})


# ------------------------------------------------------------------------------------------ the command


def test_the_command_prints_writes_and_refuses(art, tmp_path, monkeypatch):
    place = art.path
    shown = succeed("explain", place, "--target", "facts", "--row", "row-5").out
    assert shown.strip() == repr(grasp.open(place).explain("facts", "row-5"))
    files = "--json", tmp_path / "why.json", "--out", tmp_path / "why.html"
    succeed("explain", place, "--target", "facts", "--row", "row-5", "--unit", UNIT, *files)
    record = json.loads((tmp_path / "why.json").read_text())
    assert (record["row_id"], record["unit_id"], record["tokens"][0]["contribution"]) == ("row-5", UNIT, None)
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>")
    succeed("explain", place, "--target", "facts", "--row", "row-5", "--out", tmp_path / "why.parquet")
    assert pq.read_table(tmp_path / "why.parquet").column_names[:3] == ["position", "text", "contribution"]
    best = succeed("explain", place, "--target", "facts", "--unit", UNIT).out
    assert best.startswith(f"the 5 most helpful and the 5 most harmful of 65 rows for {UNIT} of facts, by effect")
    assert "missing --row or --unit" in refused("explain", place, "--target", "facts")
    assert "requires --row" in refused(
        "explain", place, "--target", "facts", "--unit", UNIT, "--json", tmp_path / "x.json"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[30;48;5;" in run("explain", place, "--target", "facts", "--row", "row-5").out


TAB, BREAK, SPACE = "\u21e5", "\u21b5", "\u2423"


def test_white_space_with_contributions_is_visible():
    tokens, adds = (
        ("def", " f", ":", "\n", "\t\t", "x", " ", "\t", "\n"),
        (0.1, 0.1, 0.0, 1.0, -0.9, 0.3, 0.5, 0.0, 0.01),
    )
    result = Explanation(
        table=pa.table({"text": tokens, "contribution": adds}),
        **{"row_id": "r", "target": "t", "unit_id": "u", "effect": 0.0, "text": 0.0, "average": 0.0, "gap": 0.0},
        kernels=pa.table({}),
        answer=pa.table({"text": (" [", "\n"), "received": (0.5, 0.6)}),
        pairs=pa.table(
            {
                "contribution": [0.5],
                "row_position": [4],
                "row_text": ["\t\t"],
                "answer_position": [1],
                "answer_text": ["\n"],
            }
        ),
    )
    shown = repr(result)
    assert f"def f:{BREAK}[+1]{TAB}{TAB}[-0.9]x[+0.3]{SPACE}[+0.5]  " in shown + "  "
    assert f"def f: [{TAB}{TAB}]" in shown
    assert f"[[{BREAK}]" in shown
    assert "\ufffd" not in shown + result._repr_html_()
    assert f"{BREAK}\n</span>" in result._repr_html_()  # where the line breaks it goes on breaking
    in_report = list(_shaded_words(tokens, np.array(adds)))
    assert "".join(word for word, _ in in_report) == f"def f:{BREAK}\n{TAB}{TAB}x{SPACE}\t\n"


def test_a_long_run_of_white_space_is_truncated():
    assert visible(" " * 24) == SPACE * 6 + "..."
    assert visible("\r\n") == "\u240d" + BREAK + "\n"
    assert [visible(word) for word in ("", " a", "a\n")] == ["", " a", "a\n"]


def test_stored_units_do_not_pass_the_model_again(art, explainer, monkeypatch):
    plain = Explainer(art)
    monkeypatch.setattr(_PreparedUnits, "_prepare_from_artifact", lambda self: False)
    passed = plain.explain("facts", "row-5")
    monkeypatch.undo()
    monkeypatch.setattr(ModelPass, "units", lambda *_: pytest.fail("units passed the model"))
    stored = Explainer(art).explain("facts", "row-5")
    # coordinates of gradients are rounded to bfloat16 once more: 2^-9 each, of independent sign
    scale = np.nanmax(np.abs(passed.contributions))
    np.testing.assert_allclose(stored.contributions, passed.contributions, atol=2**-8 * scale)


def test_a_word_that_carries_most_of_the_effect_is_named():
    words, contributions = [" cell", " the", " Cell", " wall", " of"], [0.5, -0.3, 0.4, 0.6, nan]
    assert dominant_word_notes(words, contributions) == [
        "the word 'cell' alone has 60% of the positive contributions of words"
    ]
    assert dominant_word_notes(words, [0.3, 0.1, 0.2, 0.6, 0.1]) == []
