"""The report file: self-contained, runs only its own scripts, names missing parts, and has bounded size."""

import base64
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.optimize import minimize

from grasp.api.score import distinct_rows
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import MIN_RELIABLE_TOKENS
from grasp.inspect.explain import explain
from grasp.models.build_source import WarmUpRecord
from grasp.pipeline.pipeline import build_artifact
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor
from grasp.report import payload, views
from grasp.report.findings import collect_findings
from grasp.report.page import render
from grasp.runs.calibration import fit_outcomes
from grasp.runs.retrained import RetrainedRuns
from grasp.store.records import dump_json
from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import refused, succeed
from tests.pipeline import world as extract_world
from tests.report.conftest import PROTOCOL
from tests.report.world import HOSTILE, LINE, write_artifact, write_environment
from tests.rules import rule

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Elements with their attributes, and the text of every element that has an id."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.text = ""
        self.data: dict[str, str] = {}
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.inside.append(tag)

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag  # every element is closed by itself

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and self.inside[-1] == "script":
            name = attributes.get("id")
            if name:
                self.data[name] = self.data.get(name, "") + data
            else:
                self.scripts.append(data)
        elif "style" not in self.inside:
            self.text += data


def page_text(artifact, **options) -> str:
    """Return the visible text of a page."""
    return " ".join(Page(render(collect_findings(artifact, DEFAULT_PROTOCOL, **options))).text.split())


def assert_contains(text: str, *parts: str) -> None:
    """Fail with the parts that are missing from a text."""
    assert not [part for part in parts if part not in text], text


@pytest.fixture(scope="module")
def text(page) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(text) -> Page:
    return Page(text)


# the file


def test_nothing_is_loaded_from_anywhere(text, parsed):
    assert text.startswith('<!doctype html>\n<html lang="en">')
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base", "audio", "video"), tag
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in parsed.text


def test_the_policy_allows_our_scripts_and_no_others(parsed):
    (policy,) = [a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    sums = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in parsed.scripts}
    assert set(re.findall(r"'sha256-(.+?)'", rules["script-src"])) == sums


def test_hostile_text_is_text(text, parsed):
    kinds = [attributes.get("type", "code") for tag, attributes in parsed.elements if tag == "script"]
    assert kinds == ["application/json", "code"]
    assert not parsed.inside  # nothing was closed or opened by the text
    assert text.count("<b>bold") == 0
    for hostile in HOSTILE[:3]:
        assert hostile not in text
    assert "<script>window.hacked=1</script>" in parsed.text
    assert "{{ 7*7 }}" in parsed.text
    assert "49" not in parsed.text.split("{{ 7*7 }}")[1][:20]
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert LINE[:2_000] not in parsed.text
    assert "water water" in parsed.text


def test_the_same_findings_give_the_same_bytes(tmp_path):
    artifact = write_artifact(tmp_path / "art", n_rows=70)
    pages = {render(collect_findings(artifact, DEFAULT_PROTOCOL)) for _ in range(2)}
    assert len(pages) == 1


def test_a_hundred_slices_and_ten_targets_stay_under_4_mb(tmp_path):
    topics = [f"a topic with a rather long name, number {i}" for i in range(100)]
    targets = [f"target_{t}" for t in range(10)]
    artifact = write_artifact(tmp_path / "art", n_rows=400, topics=topics, targets=targets)
    components = {"joint.pair": -0.2, "product.cent": 0.1}
    protocol = rule(name="p", components=components, calibration={"family": "mixture:topic", "n_subsets": 8})
    runs = write_environment(tmp_path / "env", artifact)
    page = render(collect_findings(artifact, protocol, by=("topic",), runs=runs))
    assert len(page.encode()) < 4_000_000


# what it says


def test_numbers_are_those_of_the_command(place, parsed):
    artifact = ArtifactReader.open(place / "art")
    arguments = ["predict", artifact.path, "--by", "topic", "--protocol", place / "protocol.yaml"]
    succeed(*arguments, "--runs", place / "env", "--out", place / "by.parquet")
    lines = pq.read_table(place / "by.parquet").to_pylist()
    assert len(lines) == 2 * len(HOSTILE)
    for line in lines:
        shown = f"{-line['nats']:+.3f}".replace("-", "\N{MINUS SIGN}")
        assert shown in parsed.text


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which runs the script of the page, is not installed")
@pytest.mark.parametrize(
    "interactions", [{}, {"components": {"joint.pair": -0.3, "hidden.cent": 0.2}}, {"side": "omitted"}]
)
def test_the_script_of_the_page_computes_what_the_predictor_does(place, interactions):
    """Changes for random weights agree up to rounding; predictions from runs agree at presets and for one slider.

    If rows interact, changes are tabulated in the same way as the predictions from runs.
    """
    artifact, environment = ArtifactReader.open(place / "art"), RetrainedRuns.open(place / "env")
    chosen = rule(name="p", **interactions)
    findings = collect_findings(artifact, chosen, by=("topic",), runs=environment)
    slices = findings.labels[0].slices
    share_BG = (4 * np.random.default_rng(0).random((5, len(slices.names)))).round(2)
    halved = [SimpleNamespace(value=name, now=1.0, proposed=0.5) for name in slices.names]
    data = payload.payload(replace(findings, mixture=SimpleNamespace(label="topic", slices=halved)))
    percent_BG = np.full((40, len(slices.names)), 100)
    percent_BG[np.arange(40), np.random.default_rng(1).integers(len(slices.names), size=40)] = np.arange(0, 400, 10)
    percent_BG[-1] = 50  # the preset
    script = Path(payload.__file__).with_name("templates") / "whatif.js"
    law = "".join(part.split("\n", 1)[1] for part in re.split(r"// -{60,}", script.read_text())[1:3])
    program = (
        f"const DATA = {json.dumps(data)}; const model = DATA.labels[0], targets = DATA.targets, WHOLE = 100;\n{law}\n"
    )
    program += f"const F = {json.dumps(share_BG.tolist())}, P = {json.dumps(percent_BG.tolist())};"
    program += "const E = P.concat([F[0]]).map((p) => lookUp(model, model.expected, p));"
    program += "const C = (f) => changes(model, f.map((x) => 100 * x), f);"
    program += "console.log(JSON.stringify([F.map(C), P.map((p) => C(p.map((x) => x / 100))), E]));"
    out = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout
    changes, moved, (*expected, several) = json.loads(out)
    assert several is None  # the command that the page prints says it
    assert data["labels"][0]["after"].endswith(f"--runs {environment.path}")
    predictor = Predictor.from_artifact(artifact, chosen, sketches=SIMILARITY_SKETCHES)
    if interactions:
        assert changes == [[None, None]] * 5
    else:
        np.testing.assert_allclose(changes, predictor.change(slices.weights(share_BG)), atol=1e-9)
    held_B = np.isin(percent_BG, payload.GRID).all(axis=1)
    held_B[-1] = True
    exact_BT = predictor.change(slices.weights(percent_BG / 100))
    np.testing.assert_allclose(np.array(moved)[held_B], exact_BT[held_B], rtol=1e-3, atol=1e-9)
    nats = fit_outcomes(predictor, artifact, environment).predict(slices.weights(percent_BG / 100))
    half_width_BT = nats.high_BT - nats.change_BT
    held_BG = np.isin(percent_BG, payload.GRID)
    for b, (value, exact) in enumerate(zip(expected, held_BG.all(axis=1), strict=True)):
        near = 1e-3 * np.abs(nats.change_BT[b]) if exact else 0.1 * half_width_BT[b]
        assert (np.abs(value["change"] - nats.change_BT[b]) <= near + 1e-9).all()
        assert (
            np.abs(value["half_width"] - half_width_BT[b]) <= np.where(exact, 1e-3, 0.1) * half_width_BT[b] + 1e-9
        ).all()
        assert (value["beyond"] == nats.outside[b]) or not exact
    assert 10 < held_BG.all(axis=1).sum() < 40


def test_every_input_of_the_report_is_shown(parsed):
    text = " ".join(parsed.text.split())
    assert "features:\n  top_k: 64" in parsed.text  # YAML, with its indentation
    assert "Runs in env (dev): recipe tiny, mixture:topic, 24 subsets, seeds 0, 1" in text
    assert_contains(
        text, "grasp report ", "--by topic,format", "run.yaml of the artifact", "top_k: 64", "with <weights>"
    )
    assert_contains(text, f"rows with at least {MIN_RELIABLE_TOKENS} tokens", "effect size")
    assert re.search(r"targets: \S+ effect sizes on other questions \[\S+, \S+\]; \S+ nats per token \[", text)
    assert_contains(text, "models retrained on 24 subsets", "fitted to retrained models")
    assert_contains(text, "9 sources in 20 steps", "helps since step 10", f"Loss by {HOSTILE[0]}", "--monitor ")


def test_the_command_on_the_page_makes_it_again(page, tmp_path):
    text = page.read_text()
    (line,) = set(re.findall(r"grasp report [^<]* --out [^<]*?report.html", unescape(text)))
    succeed(*shlex.split(line)[1:-1], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text().replace(str(tmp_path / "again.html"), str(page)) == text


def test_a_page_names_missing_inputs_and_the_commands_that_create_them(tmp_path):
    poor = page_text(write_artifact(tmp_path / "poor", labels=False, sketches=False, text=[""]))
    assert_contains(poor, "no label column", "--by LABEL", "no text of its rows", "--set corpus.snippet_chars=240")
    artifact = write_artifact(tmp_path / "art", sketches=False, worth=(4.0, 2.0, 0.0, -2.0, -4.0))
    plain = page_text(artifact)
    assert_contains(plain, "Contribution of each topic to sciq (right: it helps)")
    assert_contains(plain, "Retrain on subsets to validate", "grasp retrain", "Compute mixture weights", "grasp mix")
    assert_contains(
        plain, "60 of 200 rows", " tokens. Expected change of the mean of 2 targets: +", "Not validated by retraining"
    )
    assert not [text for text in ("models retrained", "nats per token") if text in plain]
    held_out = write_environment(tmp_path / "held-out", artifact, role="held-out")
    assert_contains(
        page_text(artifact, runs=held_out),
        "Runs in held-out (held-out)",
        "No intervals in the unit of the runs: ",
    )
    unfinished = page_text(artifact, runs=write_environment(tmp_path / "env", artifact, done=10))
    assert_contains(
        unfinished,
        "unfinished: 10 of 48 runs have a result",
        "Unfinished: 10 of 24 subsets with 1 of 2 seeds are done",
        "the runs: they are unfinished.",
    )
    null = write_artifact(tmp_path / "null", topics=("only", "one"), pull=0.0)
    assert_contains(
        page_text(null, by=("format",)), "No difference between slices by format exceeds that of random groups"
    )


@pytest.mark.parametrize(
    ("count", "by", "is_grouped"),
    [(1, (), False), (150, (), False), (150, ("topic",), True), (10_000, ("topic", "format"), True)],
)
def test_a_label_of_any_number_of_values_gives_a_page_of_bounded_size(tmp_path, count, by, is_grouped):
    """Of a single value, or of too many, a label is not chosen unasked."""
    topics = [f"topic {i}" for i in range(count)]
    artifact = write_artifact(tmp_path / "art", topics=topics, n_rows=max(count, 400), targets=("sciq",))
    page = render(collect_findings(artifact, DEFAULT_PROTOCOL, by=by))
    assert len(page.encode()) < 1_500_000
    assert (f"topic: {count - 99:,} rare values are grouped in the slice" in page) == is_grouped
    assert ("slices by <em>format" in page) == (by == ())


def test_runs_are_drawn_as_points(text):
    trust = text.partition('<section id="trust"')[2].partition("</section>")[0]
    assert (trust.count("<svg"), trust.count("<circle")) == (2, 2 * 24)


def test_the_page_opens_on_the_label_of_its_mixture(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    arguments = ("--by", "format", "--target", "sciq", "--out", tmp_path / "m.parquet")
    succeed("mix", artifact.path, *arguments)
    assert collect_findings(artifact, DEFAULT_PROTOCOL).labels[0].slices.label == "topic"
    findings = collect_findings(artifact, DEFAULT_PROTOCOL, mixture=tmp_path / "m.json")
    assert [label.slices.label for label in findings.labels] == ["format", "topic"]
    shown = payload.payload(findings)["labels"]
    assert [any(preset["fromMixture"] for preset in label["presets"]) for label in shown] == [True, False]


def test_the_guards_of_a_mixture_are_a_table(tmp_path):
    artifact = write_artifact(tmp_path / "art", worth=[(1.0, -1.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 1.0), (0.0, 1.0)])
    guard = ("--not-worse", "boolq", "--within", "0.01")
    succeed("mix", artifact.path, "--by", "topic", "--target", "sciq", *guard, "--out", tmp_path / "m.parquet")
    (outcome,) = json.loads((tmp_path / "m.json").read_text())["guards"]
    assert outcome["low"] >= -0.01 - 1e-4
    change, low, price = (views.signed(outcome[key]) for key in ("change", "low", "price"))
    row = f"boolq{change} \u2265 {low}{views.signed(-0.01)}binds; without it {price} more"
    assert_contains(page_text(artifact, mixture=tmp_path / "m.json"), row)


def test_sliders_of_targets_take_the_least_step(tmp_path):
    """Shares add up to 1, a step has its gain, and no other step with this gain within the bounds is shorter."""
    topics = ("a", "a", "a", "a", "a", "b", "b", "c", "d", "e", "e")  # of unequal shares, so that bounds bind
    worth = 0.5 * np.random.default_rng(0).standard_normal((len(topics), 2))
    artifact = write_artifact(tmp_path / "art", topics=topics, worth=worth.tolist(), n_rows=600, pull=0.3)
    label = collect_findings(artifact, DEFAULT_PROTOCOL, by=("topic",))
    (shown,) = payload.payload(label)["labels"]
    slices = label.labels[0].slices
    share_G = slices.rows_G / slices.rows_G.sum()
    predictor = Predictor.from_artifact(artifact, DEFAULT_PROTOCOL)
    effect_GT = predictor.sums(slices.each, ()).effect_BT / slices.rows_G[:, None]
    low_G, high_G = -share_G, np.minimum(1, payload.MAX_WEIGHT * share_G) - share_G
    n_bound = 0
    for t, steps in enumerate(shown["targetSteps"]):
        for sign, direction in ((1, "up"), (-1, "down")):
            step_G = np.array(steps[direction]) / 100 * share_G * payload.TARGET_STEPS  # to the end of the slider
            gain = sign * steps["gain"] * payload.TARGET_STEPS
            assert step_G.sum() == pytest.approx(0, abs=1e-4)
            assert effect_GT[:, t] @ step_G == pytest.approx(gain, rel=1e-3)
            assert (low_G - 1e-4 <= step_G).all()
            assert (step_G <= high_G + 1e-4).all()
            equations = np.stack([np.ones_like(share_G), effect_GT[:, t]])
            reference = minimize(
                lambda x: x @ x,
                np.zeros_like(share_G),
                jac=lambda x: 2 * x,
                bounds=list(zip(low_G, high_G, strict=True)),
                constraints={
                    "type": "eq",
                    "fun": lambda x, e=equations, g=gain: e @ x - [0, g],
                    "jac": lambda _, e=equations: e,
                },
                options={"ftol": 1e-12},
            )
            assert reference.success
            np.testing.assert_allclose(step_G, reference.x, atol=1e-3)
            # any other step: the difference is in the null space of both equations
            null_GJ = np.linalg.svd(equations)[2][2:].T
            others_BG = step_G + np.random.default_rng(t).normal(0, 0.02, (4_000, null_GJ.shape[1])) @ null_GJ.T
            others_BG = others_BG[((low_G <= others_BG) & (others_BG <= high_G)).all(axis=1)]
            assert len(others_BG) > 10
            assert (np.square(others_BG).sum(axis=1) >= step_G @ step_G - 1e-4).all()
            n_bound += int((np.minimum(step_G - low_G, high_G - step_G) < 1e-4).sum())
            small = predictor.change(slices.weights(1 + np.array(steps[direction])[None] / 100))[0, t]
            assert small == pytest.approx(sign * steps["gain"], rel=0.05)
    assert n_bound > 0


# the first screen


OPPOSITE = {"a": (9.0, -9.0), "b": (-9.0, 9.0)}


@pytest.mark.parametrize(
    ("worth_of", "target", "sentence"),
    [
        ({"a": 5.0, "b": 0.0, "c": -5.0, "d": 3.0}, "sciq", "By topic, a and d help most; c hurts most."),
        (
            OPPOSITE,
            "sciq=3,boolq=1",
            "By topic, a helps most; b hurts most.",
        ),
        (
            OPPOSITE,
            "sciq=1,boolq=3",
            "By topic, b helps most; a hurts most.",
        ),
        (OPPOSITE, "sciq,boolq", "By topic, effects differ between targets."),
    ],
)
def test_the_first_screen_counts_the_weights_of_the_targets(tmp_path, worth_of, target, sentence):
    topics, worth, names = tuple(worth_of), tuple(worth_of.values()), re.findall("[a-z]+", target)
    art = write_artifact(tmp_path / "art", topics=topics, worth=worth, targets=names, pull=0.0, n_rows=400)
    assert sentence in page_text(art, target=target)


def test_the_first_screen_names_slices_for_the_targets_of_the_selection(tmp_path):
    worth = tuple(OPPOSITE.values())
    art = write_artifact(
        tmp_path / "art", topics=("a", "b"), worth=worth, targets=["sciq", "boolq"], pull=0.0, n_rows=400
    )
    succeed("select", art.path, "--budget", "30%", "--target", "boolq", "--out", tmp_path / "kept.parquet")
    text = page_text(art, selection=tmp_path / "kept.json")  # a report of both targets
    assert_contains(text, "For boolq, ", "By topic, b helps most; a hurts most.")


def test_the_page_leads_with_the_label_that_has_evidence(tmp_path):
    """Neither random groups, nor ids or paths that have an effect, nor a label of fewer differences."""
    worth = {f"crawl/part-{g}.warc.gz" if g % 2 else f"0123456789ab{g}": float(g) for g in range(4)}
    art = write_artifact(tmp_path / "places", topics=tuple(worth), worth=tuple(worth.values()), pull=0.0, n_rows=400)
    findings = collect_findings(art, DEFAULT_PROTOCOL)
    assert [(label.slices.label, label.evidence) for label in findings.labels] == [("format", 0.0)]
    text = page_text(art)
    assert_contains(text, "slices by format exceeds that of random groups of rows, so the best rows are shown")
    strong = write_artifact(tmp_path / "art", topics=("a", "b"), worth=(3.0, -3.0), pull=0.0, n_rows=400)
    findings = collect_findings(strong, DEFAULT_PROTOCOL, by=("format", "topic"))
    assert [(label.slices.label, label.evidence > 0) for label in findings.labels] == [
        ("topic", True),
        ("format", False),
    ]


def test_a_selection_that_is_not_better_is_not_recommended(tmp_path):
    art = write_artifact(tmp_path / "null", pull=0.0)
    assert_contains(page_text(art), "the best 30% of the rows cannot be told from the whole corpus")


@pytest.mark.parametrize(
    ("kind", "interval", "heading"),
    [
        ("helps", "[1, 2]", "For 2 targets, keep the best 30% of the rows"),
        ("hurts", "[-2, -1]", "For 2 targets, keep the whole corpus: the best 30% of the rows are worse"),
        ("", "[-1, 2]", "For 2 targets, the best 30% of the rows cannot be told from the whole corpus"),
        ("", "", "For 2 targets, the best 30% of the rows have no interval, so whether they are better is unknown"),
    ],
)
def test_the_heading_is_that_of_the_last_change(tmp_path, monkeypatch, kind, interval, heading):
    """The change that the runs predict comes after that by relevance."""
    part = {"value": "+1", "unit": "nats", "interval": interval, "kind": kind}
    monkeypatch.setattr(views, "_expected", lambda *_: [part | {"kind": "helps", "interval": "[3, 4]"}, part])
    text = page_text(write_artifact(tmp_path / "art"))
    assert_contains(text, heading, f"nats {interval}".strip() + ".")


def test_the_commands_name_the_rule_of_the_selection_and_the_model_before_its_steps(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    write_yaml(PROTOCOL, tmp_path / "rule.yaml")
    for name, options in (("plain", ()), ("ruled", ("--protocol", tmp_path / "rule.yaml"))):
        out = tmp_path / f"{name}.parquet"
        succeed("select", artifact.path, "--budget", "5%", "--target", "sciq", "--out", out, *options)
    (tmp_path / "art" / "model").mkdir()
    record = WarmUpRecord(model="some/checkpoint", fingerprint="f", corpus="c", recipe=None, steps=7, seed=0)
    (tmp_path / "art" / "model" / "warm-up.json").write_bytes(dump_json(record))
    artifact.manifest.settings["model"] = {"path": str(tmp_path / "art" / "model")}
    plain, ruled = (page_text(artifact, selection=tmp_path / f"{name}.json") for name in ("plain", "ruled"))
    assert "--protocol" not in plain
    assert_contains(ruled, f"--protocol {tmp_path / 'ruled.protocol.yaml'} --export kept")
    assert_contains(plain, "grasp build --config run.yaml --warm-up 7 --out", "path: some/checkpoint")


@pytest.mark.parametrize(
    ("arguments", "with_runs", "patterns"),
    [
        (
            ("--budget", "50documents"),
            False,
            [r"best 50 documents.* 50 of 200 rows, [0-9,]+ tokens. Expected change of sciq: [+\u2212][0-9.]+ effect"],
        ),
        (
            ("--budget", "50", "--by", "row_id"),
            False,
            ["50 of 200 rows", r"170 other values ?85\.0% ?40\.0%"],
        ),
        (
            ("--budget", "5%"),
            True,
            [r"This extrapolates beyond the runs \([0-9.]+ times as far from the corpus as any run[;)]"],
        ),
    ],
    ids=["of documents", "by many values", "beyond the runs"],
)
def test_a_selection_is_described(place, tmp_path, arguments, with_runs, patterns):
    """Documents are named, the largest shares shown, and an extrapolation beyond the runs is reported."""
    artifact = ArtifactReader.open(place / "art") if with_runs else write_artifact(tmp_path / "art")
    flags, runs = ("--runs", place / "env") if with_runs else (), RetrainedRuns.open(place / "env")
    succeed("select", artifact.path, *arguments, "--target", "sciq", *flags, "--out", tmp_path / "kept.parquet")
    text = page_text(artifact, selection=tmp_path / "kept.json", **({"runs": runs} if with_runs else {}))
    for pattern in patterns:
        assert re.search(pattern, text), pattern


def test_near_copies_and_rows_of_one_document_are_listed_once(tmp_path):
    words = [f"word{i}" for i in range(30)]
    texts = [" ".join(words), " ".join([*words[:-1], "other"]), " ".join(words[::-1]), "short", "short"]
    artifact = write_artifact(tmp_path / "art", n_rows=5, text=texts, topics=("a", "b"))
    assert distinct_rows(artifact, np.array([5.0, 4.9, 0.0, -4.9, -5.0]), 5).tolist() == [0, 2, 3]
    apart = np.array([9.0, 5.0, 0.8, 0.7, -9.0])
    assert distinct_rows(artifact, apart, 2).tolist() == [0, 1]  # similar text of another value is no copy
    assert distinct_rows(artifact, -apart, 5).tolist() == [4, 3, 2, 1, 0]
    assert distinct_rows(artifact, apart, 5, apart < 5).tolist() == [2, 3, 4]


# shaded words


def test_words_are_shaded_where_the_model_is_at_hand_and_add_up(tmp_path):
    built = build_artifact(extract_world.world(tmp_path / "world"), tmp_path / "art")
    artifact = ArtifactReader.open(built)
    findings = collect_findings(artifact, DEFAULT_PROTOCOL, explain=2)
    held = findings.rows
    best = int(np.argmin(np.where(held.rank_KT[:, 0] > 0, held.rank_KT[:, 0], len(held.rows) + 1)))
    words = payload.payload(findings)["rows"]["rows"][best]["shades"]["t0"]
    row = explain(artifact, None, held.rows[best]["row_id"], protocol=DEFAULT_PROTOCOL)
    assert "".join(word for word, _ in words).replace("\u2423", " ") == "".join(row.tokens)  # a space that counts
    assert sum(share or 0.0 for _, share in words) == pytest.approx(np.nansum(row.contributions), rel=0.01)
    assert sum(len(shades) for shades in findings.shades.values()) == 3  # the two best, and the worst
    shutil.rmtree(artifact.manifest.settings["model"]["path"])
    without = collect_findings(artifact, DEFAULT_PROTOCOL, explain=2)
    assert without.shades == {}
    assert "Words are not shaded: the model" in render(without)


# bad input


@pytest.fixture(scope="module")
def wrong(place, tmp_path_factory) -> Path:
    """Runs of another corpus, runs that have only begun, and what is no mixture."""
    wrong = tmp_path_factory.mktemp("wrong")
    artifact = ArtifactReader.open(place / "art")
    write_environment(wrong / "env", artifact, corpus_fingerprint="other")
    write_environment(wrong / "begun", artifact, done=2)
    write_artifact(wrong / "single", topics=["only"], n_rows=40, sketches=False)
    (wrong / "m.json").write_text('{"label": "topic"}')
    return wrong


REFUSED = [
    ("ART --by topci --out OUT", "--by: unknown column 'topci' (did you mean 'topic'?)"),
    ("ART --selection no.json --out OUT", "--selection: no.json: no such file"),
    ("ART --mixture WRONG/m.json --out OUT", "m.json: not the summary of a mixture"),
    ("ART --monitor WRONG --out OUT", "no monitor.parquet; expected the output directory of a training"),
    ("ART --runs WRONG/env --out OUT", "corpus"),
    ("ART --runs WRONG/begun --out OUT", "fewer than 3 subsets have a result"),
    ("ART --out WRONG", "which is a directory"),
    ("WRONG/single --by topic --out OUT", "--by topic: has the single value 'only'"),
]


@pytest.mark.parametrize(("arguments", "keyword"), REFUSED)
def test_invalid_inputs_of_a_report_are_refused(place, wrong, tmp_path, arguments, keyword):
    places = {"ART": place / "art", "WRONG": wrong, "OUT": tmp_path / "r.html"}
    for name, path in places.items():
        arguments = arguments.replace(name, str(path))
    assert keyword in refused("report", *arguments.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("first", "code", "output"),
    [
        ("sys.modules['jinja2'] = None", 2, r"error: .*`jinja2`.* pip install 'jinja2>=3.1'\n"),
        ("import atexit; atexit.register(lambda: print('torch' in sys.modules))", 0, r"(.*\n)*False\n"),
    ],
)
def test_a_missing_extra_is_named_before_any_work_and_torch_is_not_loaded(place, tmp_path, first, code, output):
    program = f"import sys; {first}; from grasp.cli import main; main()"
    arguments = ["report", str(place / "art"), "--monitor", str(place / "trained"), "--out", str(tmp_path / "r.html")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert re.fullmatch(output, done.stderr if code else done.stdout)


def test_a_protocol_that_standardises_units_first_is_shown_as_well(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    write_yaml({"name": "units first", "standardize": {"task": "mean_of_standardised"}}, tmp_path / "p.yaml")
    succeed("report", artifact.path, "--protocol", tmp_path / "p.yaml", "--out", tmp_path / "r.html")
    assert "units first" in (tmp_path / "r.html").read_text()
