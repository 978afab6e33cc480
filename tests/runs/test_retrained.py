"""Laws: files that exist are complete; a kill loses one run; damaged files are named and refused."""

import dataclasses
import json
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.environment_files import copy_small_files
from grasp.artifact.label_table import LabelColumn
from grasp.errors import RunsError, SubsetError
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Run
from tests.faults import Killed, raising
from tests.runs.worlds import FAMILY, ROWS, blocks, create, fill, filled, info, result


def rewrite(path, change):
    rows = pq.read_table(path).to_pylist()
    pq.write_table(pa.Table.from_pylist(change(rows)), path)


DIVERGED = np.array([0.0, 1.0, 2.0, np.inf, np.nan])


def masks(env, rows=ROWS, **options):
    return np.concatenate([block.weights_BN.toarray() for block in env.subset_blocks(rows, **options)])


def test_utilities_are_read_in_order_for_any_order_of_lines(tmp_path):
    env = filled(tmp_path / "env")
    rewrite(tmp_path / "env" / "utilities.parquet", lambda rows: rows[::-1])
    got = RetrainedRuns.open(tmp_path / "env").utilities()
    assert (got.subset_ids, got.seeds) == (env.subset_ids, (0, 1))
    assert got.targets == ("sciq",) * 3 + ("sciq@all",) * 2
    assert got.unit_ids == ("u0", "u1", "u2", "u0", "u1")
    for b, subset in enumerate(env.subset_ids):
        for s in range(2):
            np.testing.assert_array_equal(got.values_BSE[b, s], result(env, Run(s, subset)))
    np.testing.assert_array_equal(env.utilities("sciq@all").values_BSE, got.values_BSE[:, :, 3:])
    np.testing.assert_array_equal(env.utilities(seeds=[1]).values_BSE, got.values_BSE[:, 1:])
    np.testing.assert_array_equal(env.reference_utilities()[1], result(env, Run(1, "full")))


def test_runs_are_ordered_by_seed_with_the_whole_corpus_first(tmp_path):
    env = create(tmp_path)
    assert [run.stem for run in env.runs()[:3]] == ["full-0", "evaluation-000000-0", "evaluation-000001-0"]
    assert len(env.runs()) == 10
    assert Run(2, "a/b c").stem == "a%2Fb%20c-2"
    assert [env.claim()[0] for _ in env.runs()] == list(env.runs())
    assert env.claim() is None


def test_masks_can_be_drawn_again(tmp_path):
    env = create(tmp_path / "env")
    expected = np.concatenate([block.weights_BN.toarray() for block in blocks()])
    np.testing.assert_array_equal(masks(env), expected)
    with pytest.raises(RunsError, match="not the subsets trained on"):
        masks(env, RowIndex.from_ids([f"row-{i}" for i in reversed(range(30))]))
    (tmp_path / "env" / "subsets.parquet").unlink()
    np.testing.assert_array_equal(masks(env, block=2), expected)
    options = create(tmp_path / "given", family=None)  # a table of subsets cannot be drawn again
    (tmp_path / "given" / "subsets.parquet").unlink()
    with pytest.raises(SubsetError, match=r"subsets\.parquet: no such file"):
        masks(options)


def test_masks_drawn_again_by_other_labels_are_refused(tmp_path):
    labels = ["a", "b", "c"] * 10
    family = FAMILY.model_copy(update={"spec": "mixture:topic"})
    drawn = parse_family(family.spec).draw(4, n_rows=30, labels=labels, seed=3, purpose="evaluation")
    env = RetrainedRuns.create(tmp_path, info(family=family), drawn, ROWS)
    (tmp_path / "subsets.parquet").unlink()
    assert masks(env, labels=LabelColumn.from_values(labels)).shape == (4, 30)
    with pytest.raises(RunsError, match="not the subsets trained on"):
        masks(env, labels=LabelColumn.from_values(sorted(labels)))


def test_unfinished_runs_report_missing_results(tmp_path):
    env = fill(create(tmp_path), 4)
    with pytest.raises(RunsError, match=r"5 runs .*'evaluation-000003-0'"):
        env.utilities()
    assert env.utilities(seeds=[0], partial=True).subset_ids == env.subset_ids[:3]
    assert env.utilities(partial=True).values_BSE.shape == (0, 2, 5)


@pytest.mark.parametrize("kill_at", range(1, 14))
def test_runs_killed_at_any_rename_resume_to_the_same_bytes(tmp_path, monkeypatch, kill_at):
    filled(tmp_path / "whole")
    with raising(monkeypatch, "replace", kill_at, Killed()), pytest.raises(Killed):
        filled(tmp_path / "env")
    assert len(create(tmp_path / "env").pending()) <= max(10, 12 - kill_at)
    filled(tmp_path / "env")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_file())
    assert names == ["environment.json", "reference.parquet", "subsets.parquet", "utilities.parquet"]
    for name in names:
        assert (tmp_path / "env" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "env").rglob("*.part"))


def test_a_kill_between_merging_and_cleaning_loses_nothing(tmp_path):
    env = fill(create(tmp_path / "env"))
    saved = {path.name: path.read_bytes() for path in (tmp_path / "env" / "runs").iterdir()}
    env.compact()
    before = env.utilities().values_BSE
    for name, data in saved.items():
        (tmp_path / "env" / "runs" / name).write_bytes(data)
    assert env.pending() == ()
    env.compact()
    assert not list((tmp_path / "env" / "runs").iterdir())
    np.testing.assert_array_equal(env.utilities().values_BSE, before)


def test_two_workers_never_lock_the_same_run(tmp_path):
    record, two = create(tmp_path), create(tmp_path)
    (first, lease), (second, _) = record.claim(), two.claim()
    assert (first.stem, second.subset_id) == ("full-0", record.subset_ids[0])
    assert record.claim()[0] not in (first, second)
    os.utime(lease.path, (0, 0))  # a worker that died
    assert two.claim()[0] == first


def test_a_finished_run_is_not_claimed_and_a_superseded_worker_changes_nothing(tmp_path):
    env = create(tmp_path)
    run = env.runs()[1]
    env.write_run(run, result(env, run))
    env.write_run(run, result(env, run) - 1)
    fill(env, 8)
    assert env.claim()[0].stem == "evaluation-000003-1"
    fill(env)
    assert env.claim() is None
    np.testing.assert_array_equal(env.utilities().values_BSE[0, 0], result(env, run))
    env.compact()
    assert env.claim() is None


def test_seeds_and_subsets_can_be_added(tmp_path):
    filled(tmp_path)
    env = create(tmp_path, n_subsets=5, seeds=(0, 1, 2))
    assert len(env.pending()) == 2 + 6
    fill(env).compact()
    got = env.utilities()
    assert got.values_BSE.shape == (5, 3, 5)
    np.testing.assert_array_equal(got.values_BSE[1, 1], result(env, Run(1, env.subset_ids[1])))
    assert len(masks(env)) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "small"}, "recipe: "),
        ({"role": "held-out"}, "role: "),
        ({"corpus_fingerprint": "beef"}, "corpus_fingerprint: was"),
        ({"seeds": (1, 2)}, "seeds: "),
        ({"n_subsets": 3}, r"subsets: .*\b4\b.*checksum"),
    ],
)
def test_other_runs_in_the_same_directory_are_refused(tmp_path, changes, message):
    create(tmp_path)
    with pytest.raises(RunsError, match=message):
        create(tmp_path, **changes)
    assert RetrainedRuns.open(tmp_path).info == create(tmp_path).info


def test_other_versions_of_the_program_may_resume(tmp_path):
    env = create(tmp_path, made_by={"torch": "1"})
    assert create(tmp_path, made_by={"torch": "2"}).info == env.info


def test_subset_names_must_be_unique_and_short(tmp_path):
    first = next(blocks(1))
    for options, message in (
        ([], "of 0 are .* at least one subset"),
        ([first, first], r"'evaluation-000000'.*unique name"),
        ([dataclasses.replace(first, subset_ids=("long " * 50,))], r"'long long .* bytes in the name of a file"),
    ):
        with pytest.raises(RunsError, match=message):
            RetrainedRuns.create(tmp_path, info(), options, ROWS)
        assert list(tmp_path.iterdir()) == []


def test_weights_are_stored_and_part_of_the_checksum(tmp_path):
    weighted = next(blocks(1))
    weighted.weights_BN.data[0] = 2.0
    env = RetrainedRuns.create(tmp_path, info(), [weighted], ROWS)
    (back,) = env.subset_blocks(ROWS)
    np.testing.assert_array_equal(back.weights_BN.toarray(), weighted.weights_BN.toarray())
    with pytest.raises(RunsError, match="other settings: subsets: was 1"):
        RetrainedRuns.create(tmp_path, info(), [next(blocks(1))], ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [r for r in rows if r["subset_id"] != "evaluation-000002"], "evaluation-000002-0'"),
        (lambda rows: [rows[0] | {"unit_id": "u9"}, *rows[1:]], r"units that environment\.json"),
        (lambda rows: [rows[0] | {"seed": 7}, *rows[1:]], r"runs or .*environment\.json"),
        (lambda rows: [{k: v for k, v in r.items() if k != "seed"} for r in rows], r"'.*seed.*'"),
    ],
)
def test_damaged_utilities_are_refused_and_named(tmp_path, change, message):
    env = filled(tmp_path)
    rewrite(tmp_path / "utilities.parquet", change)
    with pytest.raises(RunsError, match=message):
        env.utilities()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda env: env.write_run(env.runs()[0], DIVERGED), r"'u0'.*sciq@all.*inf.*\b2\b"),
        (lambda env: env.check_corpus("beef", "art"), "art: .*beef.*c0ffee"),
        (lambda env: env.role_of("boolq"), "'boolq'"),
        (lambda env: env.utilities(seeds=[5]), r"seeds.*\[5\]"),
    ],
)
def test_inconsistent_results_are_refused_and_named(tmp_path, ask, message):
    env = create(tmp_path)
    env.check_corpus("c0ffee", "artifact")
    with pytest.raises(RunsError, match=message):
        ask(env)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, "environment"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), r"version 9\b"),
        (lambda text: '{"role": "test"}', "not the record of an environment"),
    ],
)
def test_open_refuses_other_directories(tmp_path, change, message):
    create(tmp_path)
    path = tmp_path / "environment.json"
    changed = change(path.read_text())
    path.unlink() if changed is None else path.write_text(changed)
    with pytest.raises(RunsError, match=message):
        RetrainedRuns.open(tmp_path)


@pytest.mark.parametrize("name", ["environment.json", "utilities.parquet", "subsets.parquet"])
def test_a_pipe_is_not_opened(tmp_path, name):
    filled(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunsError, match=f"{name}: is a pipe"):
        RetrainedRuns.open(tmp_path)


def test_a_dev_environment_may_hold_out_targets(tmp_path):
    env = create(tmp_path / "env", held_out_targets=("sciq@all",))
    assert (env.role_of("sciq"), env.role_of("sciq@all")) == ("dev", "held-out")
    task = create(tmp_path / "task", held_out_targets=("sciq",))
    assert (task.role_of("sciq"), task.role_of("sciq@all")) == ("held-out", "held-out")


def test_a_copy_has_small_files_and_draws_masks_again(tmp_path):
    env = filled(tmp_path / "env")
    (tmp_path / "env" / "reference").mkdir()
    sizes = copy_small_files(env, tmp_path / "kept")
    assert sorted(sizes) == ["environment.json", "reference.parquet", "subsets.parquet", "utilities.parquet"]
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "kept").iterdir()}
    lean = copy_small_files(env, tmp_path / "lean", max_subsets_bytes=10)
    assert "subsets.parquet" not in lean
    reopened = RetrainedRuns.open(tmp_path / "lean")
    np.testing.assert_array_equal(reopened.utilities().values_BSE, env.utilities().values_BSE)
    np.testing.assert_array_equal(masks(reopened), masks(env))


def test_merging_removes_only_old_files_of_grasp(tmp_path):
    env = fill(create(tmp_path), 9)
    env.claim()
    old, young = (tmp_path / "runs" / f".x.{digit * 32}.part" for digit in "12")
    for path in (old, young, *(tmp_path / name for name in ("claims/notes.txt", "claims/full-0.old", ".mine.part"))):
        path.write_text("mine")
    os.utime(old, (0, 0))
    fill(env).compact()
    assert not old.exists()
    assert young.exists()
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["full-0.old", "notes.txt"]
    assert (tmp_path / ".mine.part").exists()


def fingerprint(env):
    return env.fingerprint(next(env.subset_blocks(ROWS)))


@pytest.mark.parametrize("family", [FAMILY, None])
def test_runs_are_identified_by_their_training_and_not_by_their_directory(tmp_path, family):
    known = fingerprint(create(tmp_path / "env", family=family))
    more = create(tmp_path / "env", n_subsets=7, seeds=(0, 1, 2), family=family)
    assert fingerprint(more) == fingerprint(create(tmp_path / "other", family=family, role="held-out")) == known
    others = [{"corpus_fingerprint": "beef"}, {"recipe_settings": {"steps": 4}}]
    for i, change in enumerate(others):
        assert fingerprint(create(tmp_path / f"changed-{i}", **{"family": family, **change})) != known
    draw = parse_family(FAMILY.spec).draw(4, n_rows=30, seed=4, purpose=FAMILY.purpose, block=3)
    drawn = info(family=family and FAMILY.model_copy(update={"seed": 4}))
    assert fingerprint(RetrainedRuns.create(tmp_path / "drawn", drawn, draw, ROWS)) != known


def test_the_built_in_rule_names_the_runs_that_it_was_selected_on():
    experiments = Path(__file__).parents[2] / "experiments"
    env = RetrainedRuns.open(experiments / "environments" / "cc-topic")
    protocol = DEFAULT_PROTOCOL
    runs = env.fingerprint(next(blocks()))
    assert protocol.targets_selected_on(runs) == {"sciq", "openbookqa", "sciq@all", "openbookqa@all"}
    assert protocol.targets_selected_on("other") == set()
    other = {name for name, known in protocol.selected_runs.items() if known != runs}
    record = json.loads(files("grasp.predict").joinpath("default.provenance.json").read_text())
    evidence = record["defaults"]["further"]["selection"]["environments"]  # those of `fine-tuned` among them
    tuned = {first["name"]: RetrainedRuns.open(experiments / "worlds" / first["name"]).info for first in evidence}
    assert other == {f"{name}/{target}" for name, info in tuned.items() for target in info.targets}
    for first in evidence:
        info = tuned[first["name"]]
        assert (first["corpus"], first["masks"]) == (info.corpus_fingerprint, info.masks_checksum)
        assert first["targets"] == {name: target.fingerprint for name, target in info.targets.items()}


def test_a_repr_reads_no_run(tmp_path):
    env = filled(tmp_path / "env")
    shown = repr(env)
    assert f"{len(env.subset_ids)} subsets x 2 seeds" in shown
    assert [line.split() for line in shown.splitlines()[2:4]] == [["sciq", "3"], ["sciq@all", "2"]]
    (tmp_path / "env" / "utilities.parquet").write_bytes(b"damaged")
    reopened = RetrainedRuns.open(tmp_path / "env")
    assert repr(reopened) == shown
    assert '>sciq@all</td><td style="text-align:right">2</td>' in reopened._repr_html_()
    with pytest.raises(RunsError, match="cannot be read as Parquet"):
        reopened.summary()


def test_many_runs_are_claimed_with_one_listing_of_the_claims(tmp_path, monkeypatch):
    env, looks = create(tmp_path / "env"), []
    env.write_run(Run(0, "full"), result(env, Run(0, "full")))
    for name in ("scandir", "listdir"):
        look = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, look=look: looks.append(Path(path).name) or look(path))
    assert env.claim() is not None
    assert looks.count("claims") <= 1


def test_a_flipped_bit_of_the_results_is_harmless_or_a_one_line_error(tmp_path):
    env = filled(tmp_path / "env")
    before, path, refused = env.utilities().values_BSE, tmp_path / "env" / "utilities.parquet", 0
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for bit in rng.choice(8 * len(whole), 100, replace=False).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        reopened = RetrainedRuns.open(tmp_path / "env")
        for ask in (reopened.pending, reopened.utilities, reopened.summary):
            try:
                ask()
            except RunsError:
                refused += 1
                continue
            if ask == reopened.utilities:
                np.testing.assert_array_equal(ask().values_BSE, before)
    assert refused > 75


def test_names_that_are_not_text_are_refused(tmp_path):
    env = filled(tmp_path / "env")
    path = tmp_path / "env" / "utilities.parquet"
    table = pq.read_table(path)
    broken = pa.array([b"evaluation-00000\xff"] * len(table), pa.binary()).view(pa.string())
    pq.write_table(table.set_column(0, "subset_id", broken), path)
    with pytest.raises(RunsError, match=r"utilities\.parquet: .*UTF8"):
        env.pending()
