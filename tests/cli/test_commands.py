"""build -> info -> verify -> score -> predict on a small world: numbers equal those of the library and a reference."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter
from grasp.predict.predictor import Predictor
from grasp.retraining.retrain import _settings_of_artifact
from grasp.store import remote
from tests.cli.grasp_command import arrays, assert_same_arrays, cells, refused, run, succeed
from tests.mentions import assert_mentions
from tests.pipeline.world import write_targets

KERNELS = ("output_layer", "embedding", "knn")


def effects(art: Path, kernels=KERNELS, columns=slice(None), target="facts") -> np.ndarray:
    """Compute the effect (N,) of every row on a target by the built-in rule, without the prediction from text.

    A single kernel or a single unit is not estimated.
    """
    total_N, prior = 0.0, None
    if kernels == KERNELS and isinstance(columns, slice):
        prior = Predictor.from_artifact(ArtifactReader.open(art), targets=[target]).prior
    for kernel in kernels:
        relevance_NE = arrays(art)[f"relevance_{kernel}"].astype(np.float64)[:, columns]
        relevance_NE = np.where(relevance_NE < 0, 0.25 * relevance_NE, relevance_NE)
        if prior is not None:
            spread_E = relevance_NE.std(axis=0)
            relevance_NE = relevance_NE / np.where(spread_E > 0, spread_E, np.inf)
        mean_N = relevance_NE.mean(axis=1)
        if mean_N.std():
            total_N = total_N + (mean_N - mean_N.mean()) / mean_N.std()
    if prior is not None:
        total_N = prior.rho_T[0] * total_N + (1 - prior.rho_T[0]) * prior.prior_NT[:, 0]
    return (total_N - np.mean(total_N)) / np.std(total_N)


def topics(art: Path) -> np.ndarray:
    return np.array(pq.read_table(art / "rows.parquet")["topic"].to_pylist())


def table(out: str, title: str) -> list[dict[str, str]]:
    """Return a printed table below its title, as one dictionary per line."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    headings = cells(lines[start])
    rows = []
    for line in lines[start + 1 :]:
        values = cells(line)
        mark = values.pop() if values[-1:] == ["*"] else ""
        if len(values) != len(headings):
            break
        rows.append(dict(zip(headings, values, strict=True)) | ({"": mark} if mark else {}))
    return rows


def lines_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


# build, info, verify


def test_a_forecast_estimates_a_build_and_writes_nothing(root, tmp_path):
    command = ("build", "--config", root / "settings.yaml", "--out", tmp_path / "new")
    estimate = succeed(*command, "--forecast")
    assert_mentions(estimate.lines[0], "rows and", "documents", "questions of", "rows rank by")
    assert_mentions(estimate.lines[1], "at the present load of", "of memory", "of disk")
    assert not (tmp_path / "new").exists()
    assert "--workers: no effect with --forecast" in refused(*command, "--forecast", "--workers", 2)


def test_a_build_from_flags_reports_its_result_and_the_next_command(root, tmp_path):
    outcome = succeed(
        *("build", "--model", root / "model", "--corpus", root / "corpus.jsonl", "--targets", root / "facts.jsonl"),
        *(
            "--max-length",
            48,
            "--set",
            "features.kernels=[output_layer,embedding]",
            "--set",
            "model.dtype=float32",
            "--keep-features",
        ),
        *("--set", "targets.units_per_target=5", "--out", f"file://{tmp_path}/art"),  # a file URL is a path
    )
    artifact = ArtifactReader.open(tmp_path / "art")
    where = f"file://{tmp_path / 'art'}"
    assert outcome.lines[0].startswith(f"{where}: {artifact.n_rows} rows x 5 units (facts), ")
    assert outcome.lines[-1] == f"next: grasp score {where} --target facts --top 10 --min-tokens 32"
    assert succeed("info", where).lines[0].startswith(f"{tmp_path / 'art'}: format 2, ")
    assert "relevance_pooled" not in artifact.array_names
    assert artifact.keeps_features
    settings = yaml.safe_load((tmp_path / "art/run.yaml").read_text())
    assert settings["targets"].pop("max_length") == 512
    assert artifact.manifest.settings["targets"].pop("max_length") == 128  # the model reads no more
    assert settings == artifact.manifest.settings
    assert settings["corpus"]["max_length"] == 48
    assert "scoring rows: " in outcome.err


def test_run_yaml_replays_a_build_to_equal_arrays(art, tmp_path):
    succeed("build", "--config", art / "run.yaml", "--out", tmp_path / "again")
    assert_same_arrays(tmp_path / "again", art)


def test_a_settings_file_in_the_output_directory_is_not_changed(art, tmp_path):
    (tmp_path / "art").mkdir()
    mine = tmp_path / "art" / "run.yaml"
    text = "# my notes\n" + (art / "run.yaml").read_text()
    mine.write_text(text)
    assert "was not written by grasp" in refused("build", "--config", mine, "--out", tmp_path / "art")
    assert mine.read_text() == text
    assert list((tmp_path / "art").iterdir()) == [mine]


def test_flags_override_set_and_set_overrides_the_file(art, tmp_path):
    flags = ["--max-length", 24, "--rule", "paper", "--no-keep-features"]
    assigned = ["corpus.max_length=12", "corpus.limit=9", "features.tau=0.5", "keep_features=true"]
    set_flags = [part for assignment in assigned for part in ("--set", assignment)]
    succeed("build", "--config", art / "run.yaml", *set_flags, *flags, "--out", tmp_path / "art")
    settings = ArtifactReader.open(tmp_path / "art").manifest.settings
    assert (settings["corpus"]["max_length"], settings["corpus"]["limit"]) == (24, 9)
    features = {name: settings["features"][name] for name in ("tau", "rule", "top_k")}
    assert features == {"tau": 0.5, "rule": "paper", "top_k": 12}  # top_k is that of the file
    assert settings["features"]["kernels"] == ["pooled", "hidden_sketch", "residual_sketch"]  # not those of the file
    assert settings["keep_features"] is False


def test_resume_reads_run_yaml_and_finishes_with_equal_arrays(root, art, tmp_path, monkeypatch):
    out, write_shard = tmp_path / "art", ArtifactWriter.write_shard

    def interrupted(self, k, *arguments):
        if k == 2:
            raise KeyboardInterrupt
        write_shard(self, k, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "write_shard", interrupted)
        assert run("build", "--config", root / "settings.yaml", "--out", out).code == 130
    assert_mentions(refused("info", out), f"{out}: not finished: 2 of 5 shards", "--resume")
    assert_mentions(refused("score", out, "--target", "facts"), f"{out}: not finished: 2 of 5 shards", "--resume")
    assert ": resuming" in succeed("build", "--resume", "--out", out).err
    assert_same_arrays(out, art)
    for flags in (["--resume"], ["--config", root / "settings.yaml"]):
        done = succeed("build", *flags, "--out", out)
        assert done.err.startswith(f"note: {out}: finished ")
        assert done.out.startswith(f"{out}: 65 rows x 6 units (facts)")


def test_a_build_that_fails_before_it_writes_leaves_nothing(root, art, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"body": "a text"}\n')
    config = ("--config", art / "run.yaml", "--corpus", tmp_path / "empty.jsonl")
    assert "text column" in refused("build", *config, "--out", tmp_path / "art")
    assert not (tmp_path / "art").exists()
    assert "grasp build --add-target" in run("add-target", "art").err


@pytest.mark.parametrize(("keep", "how"), [(True, "from the stored features"), (False, "by a pass over")])
def test_an_added_target_is_stored_and_the_old_one_is_unchanged(root, art, tmp_path, keep, how):
    write_targets(tmp_path / "more.jsonl", task="more", n_units=4, seed=5)
    out = tmp_path / "art"
    succeed("build", "--config", art / "run.yaml", "--set", f"keep_features={keep}", "--out", out)
    added = succeed("build", "--out", out, "--add-target", tmp_path / "more.jsonl", "--set", "targets.seed=3")
    assert how in added.out
    advice = re.search(r"tokens on cpu; .*--keep-features", added.err)
    assert (advice is None) is keep
    assert added.lines[-1].endswith("targets: facts, more")
    assert "targets: facts (6 units), more (4 units)" in succeed("info", out).out
    assert succeed("verify", out).lines[-1].endswith("all files intact")
    for name, array in arrays(art).items():
        np.testing.assert_array_equal(arrays(out)[name][:, : array.shape[1]], array, err_msg=name)
    best = table(succeed("score", out, "--target", "more", "--top", 1).out, "the 1 most helpful")[0]
    effect_N = effects(out, columns=slice(6, None), target="more")
    assert float(best["effect"]) == pytest.approx(effect_N.max(), rel=1e-3)
    assert "more" in refused("build", "--out", out, "--add-target", tmp_path / "more.jsonl")
    like = _settings_of_artifact(out, {"family": "uniform:0.5"})  # of `retrain --like`
    assert like["targets"]["names"][1:] == [str(tmp_path / "more.jsonl")]


# score


def test_score_prints_one_row_of_each_document_by_effect(art):
    effect_N = effects(art)
    rows = pq.read_table(art / "rows.parquet").to_pylist()
    printed = table(succeed("score", art, "--target", "facts", "--top", 5, "--bottom", 1).out, "the 5 most helpful")
    order = []
    for sign, count in ((-1, 5), (1, 1)):
        of_document = {}
        for i in np.argsort(sign * effect_N):
            of_document.setdefault(rows[i]["doc_id"], i)
        order += list(of_document.values())[:count]
    assert [line["row_id"] for line in printed] == [rows[i]["row_id"] for i in order]
    assert [line["topic"] for line in printed] == [rows[i]["topic"] for i in order]
    np.testing.assert_allclose([float(line["effect"]) for line in printed], effect_N[order], atol=6e-4)
    assert all(rows[i]["snippet"].startswith(line["text"][:20]) for i, line in zip(order, printed, strict=True))


def test_a_missing_kernel_is_refused_by_score_and_predict(art, tmp_path):
    out = tmp_path / "art"
    kernels = "features.kernels=[output_layer, hidden_sketch]"
    succeed("build", "--config", art / "run.yaml", "--set", kernels, "--out", out)
    assert f"{out}: has no relevance by 'embedding', only by output_layer" in refused(
        "score", out, "--target", "facts", "--match", "embedding"
    )
    (tmp_path / "p.yaml").write_text("name: three\nmatch: {output_layer: 1, embedding: 1}\n")
    message = refused("predict", out, "--keep", "topic = 'sky'", "--protocol", tmp_path / "p.yaml")
    assert "'relevance_embedding'" in message


def test_score_writes_all_rows_or_the_requested_number(art, tmp_path):
    lines = succeed("score", art, "--target", "facts", "--out", tmp_path / "all.parquet").lines
    n_rows = ArtifactReader.open(art).n_rows
    assert lines[0] == f"all of {n_rows} rows for facts, by effect"
    assert lines[-1] == f"{tmp_path / 'all.parquet'}: {n_rows} rows"
    written = pq.read_table(tmp_path / "all.parquet")
    np.testing.assert_allclose(written["effect"], -np.sort(-effects(art)), rtol=1e-4, atol=1e-6)
    assert {"row_id", "topic", "snippet"} <= set(written.column_names)
    assert len(table(succeed("score", art, "--target", "facts").out, "the 10 most helpful")) == 10
    succeed("score", art, "--target", "facts", "--top", 3, "--bottom", 2, "--out", tmp_path / "some.csv")
    assert len((tmp_path / "some.csv").read_text().splitlines()) == 6


def test_text_of_the_corpus_is_escaped_in_the_terminal(root, art, tmp_path):
    lines = (root / "corpus.jsonl").read_text().splitlines()
    hostile = {"row_id": "evil", "text": "blood \x1b[2J\u202e salt\tiron\nwind", "topic": "sky\x1b[31m"}
    (tmp_path / "corpus.jsonl").write_text("\n".join([*lines, json.dumps(hostile)]) + "\n")
    out = tmp_path / "art"
    succeed("build", "--config", art / "run.yaml", "--corpus", tmp_path / "corpus.jsonl", "--out", out)
    printed = (
        succeed("score", out, "--target", "facts", "--top", 100).out + succeed("predict", out, "--by", "topic").out
    )
    assert "blood \ufffd[2J\ufffd salt iron wind" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)


# predict


def test_the_change_of_a_retained_slice_is_its_mean_effect(art, tmp_path):
    retained_N = topics(art) == "sky"
    expected, n = effects(art)[retained_N].mean(), len(retained_N)
    title = f"keeps {retained_N.sum()} of {n} rows ({100 * retained_N.mean():.1f} %)"
    lines = succeed("predict", art, "--keep", "topic = 'sky'", "--out", tmp_path / "p.parquet").lines
    assert (lines[0], lines[-1]) == (title, f"{tmp_path / 'p.parquet'}: 1 rows")
    assert_mentions(lines[-2], "effect size", "higher is better", "protocol default")
    (line,) = lines_of(tmp_path / "p.parquet")
    assert line == {"subset_id": "keep topic = 'sky'", "target": "facts", "change": pytest.approx(expected, abs=1e-6)}
    (shown,) = table(succeed("predict", art, "--keep", "topic = 'sky'").out, title)
    assert shown["change"] == f"{line['change']:+.3f}"


def weighted_change(weight_N: np.ndarray, effect_N: np.ndarray) -> float:
    """Compute the change by the law of exposure: a row of mean weight is seen once, and repetition is discounted.

    Every new row adds 0.4 effects to its own effect.
    """
    seen_N = weight_N * (weight_N > 0).sum() / weight_N.sum()
    exposure_N = np.where(seen_N <= 1, seen_N, 1 + 15.4 * (1 - np.exp(-(seen_N - 1) / 15.4)))
    return (exposure_N @ (effect_N + 0.4)) / (weight_N > 0).sum() - 0.4


def test_by_reports_the_effect_of_every_value(art, tmp_path):
    effect_N, topic_N = effects(art), topics(art)
    printed = table(succeed("predict", art, "--by", "topic").out, "facts: effect of each topic")
    assert {line["topic"] for line in printed} == {"earth", "life", "sky"}
    drops = [float(line["if_dropped"]) for line in printed]
    assert drops == sorted(drops)
    for line in printed:
        contains_0 = float(line["if_dropped_low"]) <= 0 <= float(line["if_dropped_high"])
        assert ("" in line) == contains_0
    lines = succeed("predict", art, "--by", "topic", "--out", tmp_path / "slices.parquet").lines
    assert lines[-1] == f"{tmp_path / 'slices.parquet'}: 3 rows"
    metadata = pq.read_schema(tmp_path / "slices.parquet").metadata
    assert metadata[b"grasp.protocol"] == b"default"
    assert b"higher is better" in metadata[b"grasp.provenance"]
    for line, written in zip(printed, lines_of(tmp_path / "slices.parquet"), strict=True):
        mine_N = topic_N == line["topic"]
        share, mean = mine_N.mean(), effect_N[mine_N].mean()
        assert (written["value"], written["rows"], int(line["rows"])) == (line["topic"], mine_N.sum(), mine_N.sum())
        assert written["effect"] == pytest.approx(mean, abs=1e-5)
        assert written["if_dropped"] == pytest.approx(-share / (1 - share) * mean, abs=1e-5)
        assert written["if_doubled"] == pytest.approx(weighted_change(1.0 + mine_N, effect_N), abs=1e-5)
        assert written["if_dropped_low"] <= written["if_dropped"] <= written["if_dropped_high"]
        for name in ("effect", "if_dropped", "if_dropped_low", "if_dropped_high", "if_doubled", "redundancy"):
            assert line[name] == f"{written[name]:+.3f}"


def test_an_artifact_at_a_url_is_named_by_its_url(root, tmp_path, monkeypatch):
    """Messages name neither the build directory nor the cache directory."""
    settings = root / "settings.yaml"
    monkeypatch.setenv("GRASP_CACHE", str(tmp_path / "cache"))
    url = "memory://cli/art"
    assert "memory://cli/art, which is lost" in refused("build", "--config", settings, "--out", url)
    monkeypatch.setattr(remote, "IN_PROCESS", ())  # here all commands are one process
    outcome = succeed("build", "--config", settings, "--out", url)
    assert outcome.lines[0].startswith(f"{url}: ")
    assert outcome.lines[-1] == f"next: grasp score {url} --target facts --top 10 --min-tokens 32"
    assert list((tmp_path / "cache/building").iterdir()) == []
    assert "a complete artifact exists at" in refused("build", "--config", settings, "--out", url)
    assert succeed("info", url).lines[0].startswith(f"{url}: format 2, ")
    assert succeed("verify", url).lines[-1].startswith(f"{url}: artifact")
    succeed("select", url, "--budget", "20%", "--target", "facts", "--out", tmp_path / "kept.parquet")
    assert f"no row of {url} has" in refused("score", url, "--target", "facts", "--min-tokens", 10**6)
