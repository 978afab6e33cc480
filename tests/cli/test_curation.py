"""grasp select, mix and intervals on a small world: numbers equal those of grasp predict, errors are one line."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.files import entry_of
from grasp.results import Result
from grasp.runs.retrained import RetrainedRuns
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from grasp.targets import Unit
from grasp.yaml_files import read_yaml
from tests.cli.grasp_command import cells, refused, succeed
from tests.mentions import assert_mentions
from tests.resigned import resign
from tests.runs.environments import begin_environment

SHARES = re.compile(r"(\d+) of (\d+) rows \((\d+\.\d) %\), ([\d,]+) tokens")


def environment(path, art, family="mixture:topic", role="dev") -> RetrainedRuns:
    """Write retraining runs of `art` with planted utilities: three levels by the size of the subset."""
    artifact = ArtifactReader.open(art)
    lines = artifact.units.select(["unit_id", "target", "prompt", "completion"]).to_pylist()
    units = [Unit(**line, loss_on="completion") for line in lines]
    dataset, blocks = begin_environment(path, artifact, units, family, 20, role=role, seeds=(0, 1))
    sizes = np.concatenate([block.sizes_B for block in blocks])
    rng = np.random.default_rng(0)
    for run in dataset.pending():
        size = sizes[dataset.subset_ids.index(run.subset_id)]
        dataset.write_run(run, -3.0 + 0.01 * size + 0.02 * rng.standard_normal(len(units)))
    dataset.compact()
    return dataset


@pytest.fixture(scope="module")
def env(art, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("curation") / "dev", art).path


def predicted(art, subsets, protocol, tmp_path) -> float:
    """Return the change that grasp predict gives for the only subset of a file."""
    succeed("predict", art, "--subsets", subsets, "--protocol", protocol, "--out", tmp_path / "p.parquet")
    (line,) = pq.read_table(tmp_path / "p.parquet").to_pylist()
    return line["change"]


# select


def test_select_writes_rows_with_the_predicted_change(art, tmp_path):
    out = tmp_path / "kept.parquet"
    outcome = succeed("select", art, "--budget", "25%", "--out", out)  # the only target is not named
    table, summary = pq.read_table(out), json.loads((tmp_path / "kept.json").read_text())
    assert table.column_names == ["subset_id", "row_id", "doc_id", "order", "effect", "n_tokens"]
    artifact = ArtifactReader.open(art)
    assert table.num_rows == artifact.n_rows // 4 == summary["rows"]
    assert table["order"].to_pylist() == list(range(table.num_rows))
    assert len(set(table["row_id"].to_pylist())) == table.num_rows
    assert summary["corpus"] == artifact.manifest.fingerprints["corpus"]
    assert table.schema.metadata[b"corpus"].decode() == summary["corpus"]
    change = predicted(art, out, tmp_path / "kept.protocol.yaml", tmp_path)
    assert summary["targets"][0]["change"] == pytest.approx(change, rel=1e-6)
    assert summary["value"] == pytest.approx(change, rel=1e-6)
    assert f"{change:+.3f}" in next(line for line in outcome.lines if line.startswith("facts "))
    share = SHARES.search(outcome.out)
    assert share is not None
    assert int(share[1]) == table.num_rows
    assert int(share[4].replace(",", "")) == sum(table["n_tokens"].to_pylist())
    assert read_summary(SelectionSummary, tmp_path / "kept.json", artifact).value == summary["value"]


@pytest.fixture(autouse=True)
def first_notes(monkeypatch):
    monkeypatch.setattr(Result, "all_notes", False)


def test_select_prints_few_lines_and_all_of_them_with_notes(art):
    command = ("select", art, "--budget", "25%", "--target", "facts")
    few, notes = succeed(*command).lines, succeed(*command, "--notes").lines
    assert len(few) <= 8
    assert few[-1].endswith("(--notes; in Python .notes)")
    assert {*few[:-1]} < {*notes}
    assert any(line.startswith("other budgets") for line in notes)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_select_exports_selected_and_other_rows_that_build_reads(kind, art, root, tmp_path):
    table, out, gone = tmp_path / "kept.parquet", tmp_path / "kept-v1.2", tmp_path / "gone-v1.2"
    flags = ("--budget", "20%", "--export", out, "--left-out", gone, "--format", kind, "--out", table)
    printed = succeed("select", art, *flags).out
    chosen = pq.read_table(table)
    if kind == "parquet":
        lines, left = (pq.read_table(place / "part-00000.parquet").to_pylist() for place in (out, gone))
    else:
        files = [(place / "part-00000.jsonl").read_text().splitlines() for place in (out, gone)]
        lines, left = ([json.loads(line) for line in file] for file in files)
    by_order = sorted(lines, key=lambda line: line["order"])
    assert [line["row_id"] for line in by_order] == chosen["row_id"].to_pylist()
    artifact = ArtifactReader.open(art)
    every = artifact.rows(np.arange(artifact.n_rows))["row_id"].to_pylist()
    assert [line["row_id"] for line in left] == [name for name in every if name not in chosen["row_id"].to_pylist()]
    assert read_yaml(gone / "_manifest.yaml")["left_out"] is True
    assert f"{out}: {len(lines)} rows, {sum(chosen['n_tokens'].to_pylist()):,} tokens" in printed
    manifest = read_yaml(out / "_manifest.yaml")
    assert (manifest["corpus"], manifest["params"]["budget"]) == (artifact.manifest.fingerprints["corpus"], "20%")
    succeed("build", "--config", root / "settings.yaml", "--set", f"corpus.path={out}", "--out", tmp_path / "again")
    rebuilt = ArtifactReader.open(tmp_path / "again")
    assert rebuilt.rows(np.arange(rebuilt.n_rows))["row_id"].to_pylist() == [line["row_id"] for line in lines]


ODD = ("(no label)", None, "", "*", "a: b", 'it\'s "quoted" $HOME', "L" * 300 + "1", "L" * 300 + "2")


@pytest.fixture(scope="module")
def odd(art, tmp_path_factory):
    """Copy the artifact with unusual label values to a directory with a space in its name."""
    place = shutil.copytree(art, tmp_path_factory.mktemp("odd") / "sp ace" / "art")
    table = pq.read_table(place / "rows.parquet")
    values = pa.array([ODD[i % len(ODD)] for i in range(table.num_rows)], pa.string())
    pq.write_table(table.append_column("odd", values), place / "rows.parquet")
    entry = entry_of(place / "rows.parquet").model_dump()
    resign(place, lambda raw: raw["files"].update({"rows.parquet": entry}))
    return place


def test_label_values_have_one_name_in_tables_floors_and_caps(odd, tmp_path):
    capped = {"*": 3, "a: b": 2, "(no label)": 1, "(no label) #2": 1, "(empty)": 1}
    caps = [part for name, cap in capped.items() for part in ("--cap", f"{name}:{cap}")]
    flags = ("--target", "facts", "--by", "odd")
    select = succeed("select", odd, "--budget", "12", *flags, *caps, "--out", tmp_path / "kept.parquet")
    shown = {cells(line)[0]: cells(line) for line in select.lines}
    values = pq.read_table(tmp_path / "kept.parquet")["odd"].to_pylist()
    for name, cap in capped.items():
        value = {"(no label) #2": None, "(empty)": ""}.get(name, name)
        assert shown[name][-1] == str(cap)
        assert int(shown[name][1]) == values.count(value) <= cap
    mixed = succeed("mix", odd, *flags, "--cap", "50%", "--cap", "*:1%")
    longest = {"L" * 57 + "...", "L" * 54 + " #2"}
    for outcome in (select, mixed, succeed("predict", odd, "--by", "odd")):
        first = {cells(line)[0] for line in outcome.lines if line}
        assert {*capped, 'it\'s "quoted" $HOME', *longest} <= first
    (star,) = [cells(line) for line in mixed.lines if line.startswith("* ")]
    assert float(star[3].rstrip("%")) <= 1


# mix


def test_mix_writes_weights_with_the_predicted_change(art, tmp_path):
    out, weights = tmp_path / "mixture.parquet", tmp_path / "weights.parquet"
    limits = ("--floor", "5%", "--cap", "sky:50%", "--distance", "40%")
    succeed("mix", art, "--by", "topic", *limits, "--out", out, "--weights", weights)
    table, summary = pq.read_table(out).to_pylist(), json.loads((tmp_path / "mixture.json").read_text())
    assert sum(line["proposed"] for line in table) == pytest.approx(1.0)
    assert min(line["proposed"] for line in table) >= 0.05
    assert next(line["proposed"] for line in table if line["value"] == "sky") <= 0.5
    assert sum(abs(line["proposed"] - line["now"]) for line in table) / 2 <= 0.4 + 1e-6
    change = predicted(art, weights, tmp_path / "mixture.protocol.yaml", tmp_path)
    assert summary["targets"][0]["change"] == pytest.approx(change, rel=1e-4, abs=1e-5)
    assert summary["value"] == pytest.approx(change, rel=1e-4, abs=1e-5)
    artifact = ArtifactReader.open(art)
    assert summary["corpus"] == artifact.manifest.fingerprints["corpus"]
    assert read_summary(MixtureSummary, tmp_path / "mixture.json", artifact).value == summary["value"]
    with pytest.raises(SettingsError, match=r"--selection: .*--mixture"):
        read_summary(SelectionSummary, tmp_path / "mixture.json", artifact)


# how far to trust it


@pytest.mark.parametrize("command", ["select", "mix"])
def test_intervals_in_nats_are_columns_next_to_the_change(command, art, env, tmp_path):
    flags = ("--budget", "50%") if command == "select" else ("--by", "topic")
    out = succeed(command, art, *flags, "--runs", env, "--out", tmp_path / "r.parquet").out
    (target,) = json.loads((tmp_path / "r.json").read_text())["targets"]
    assert target["nats_low"] < target["nats"] < target["nats_high"]
    line = cells(next(line for line in out.splitlines() if line.startswith("facts ")))
    assert line[-3:] == [f"{target[end]:+.4f}" for end in ("nats", "nats_low", "nats_high")]
    assert_mentions(" ".join(json.loads((tmp_path / "r.json").read_text())["notes"]), "dev", "recipe tiny", "2 seeds")


def test_held_out_environments_are_refused(art, tmp_path):
    held = environment(tmp_path / "held", art, role="held-out").path
    for command in (
        ["predict", art, "--by", "topic"],
        ["select", art, "--budget", "5", "--target", "facts"],
        ["mix", art, "--by", "topic", "--target", "facts"],
    ):
        assert_mentions(refused(*command, "--runs", held), "held", "held out", "development")
