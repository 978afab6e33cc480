"""Laws of merging: parts give the numbers of one build of all rows; incompatible parts are refused by name."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter
from grasp.distil.distil import distil
from grasp.errors import ArtifactError, ModelError, SettingsError
from grasp.merging.merge import merge
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.forecast import forecast
from grasp.pipeline.pipeline import build_artifact
from grasp.vision.detect import detect
from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import arrays, refused, succeed
from tests.corpus.world import write_jsonl
from tests.pipeline.world import changed, texts, world, write_targets

DOCUMENTS = 20, 14  # of each part; some become two rows


def write_lines(path: Path, first: int, lines: list[str], **labels: object) -> str:
    return str(
        write_jsonl(path, [{"row_id": f"row-{first + i}", "text": text, **labels} for i, text in enumerate(lines)])
    )


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-4, atol=1e-5 * np.abs(expected[name]).max())


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("parts")
    settings = world(root, train="further")
    lines = texts(sum(DOCUMENTS), seed=5)
    first_path = write_lines(root / "one.jsonl", 0, lines[: DOCUMENTS[0]], source="news", year=1999)
    second_path = write_lines(root / "two.jsonl", DOCUMENTS[0], lines[DOCUMENTS[0] :], source="code")
    (root / "all.jsonl").write_text(Path(first_path).read_text() + Path(second_path).read_text())

    def built(name: str, corpus: str, like: str | None = None, **changes: object) -> str:
        return str(build_artifact(changed(settings, corpus={"path": corpus}, like=like, **changes), root / name))

    first = built("first", first_path)
    second = built("second", second_path, like=first, shard_rows=5)
    together = built("together", str(root / "all.jsonl"), like=first)
    merged = merge([first, second], root / "merged").path
    sizes = [ArtifactReader.open(path).n_rows for path in (first, second)]
    assert sizes[0] % settings.shard_rows  # so that a shard holds rows of both
    return SimpleNamespace(**locals())


def test_merged_parts_have_the_numbers_of_one_build(parts):
    assert_close(arrays(parts.merged), arrays(parts.together))
    ours, theirs = ArtifactReader.open(parts.merged), ArtifactReader.open(parts.together)
    for name in theirs.moments:
        tolerance = 1e-4 if name.startswith("sum.") else 0.0
        np.testing.assert_allclose(ours.moments[name], theirs.moments[name], rtol=tolerance, atol=tolerance)


def test_merging_keeps_relevance_bit_for_bit(parts):
    merged, first, second = (arrays(path) for path in (parts.merged, parts.first, parts.second))
    for name in merged:
        if name.startswith("relevance_"):
            assert np.array_equal(merged[name], np.concatenate([first[name], second[name]])), name


def test_a_label_that_a_part_lacks_is_null_there(parts):
    merged, together = (pq.read_table(Path(path) / "rows.parquet") for path in (parts.merged, parts.together))
    assert merged["year"].to_pylist() == [1999] * parts.sizes[0] + [None] * parts.sizes[1]
    other = ["loss", "doc_id"]  # made names of documents hold their place in their own corpus
    assert merged.drop_columns(other).to_pylist() == together.drop_columns(other).to_pylist()
    np.testing.assert_allclose(merged["loss"], together["loss"], rtol=1e-5)
    assert grasp.open(parts.merged).labels == ("source", "year")


def test_questions_have_the_answers_of_one_build(parts):
    ours, theirs = grasp.open(parts.merged), grasp.open(parts.together)
    assert ours.score("facts").to_arrow()["row_id"] == theirs.score("facts").to_arrow()["row_id"]
    assert ours.select("30%", "facts").row_ids == theirs.select("30%", "facts").row_ids
    for name, column in theirs.predict(by="source").to_arrow().to_pydict().items():
        result = ours.predict(by="source").to_arrow()[name].to_pylist()
        if all(isinstance(value, float) for value in column):
            np.testing.assert_allclose(result, column, rtol=1e-3, atol=1e-4)
        else:
            assert result == column


def test_other_functions_work_on_a_merged_artifact_and_its_files_are_valid(parts, tmp_path):
    pytest.importorskip("jinja2")
    merged = grasp.open(parts.merged)
    assert merged.verify().ok
    assert merged.mix("source", "facts").to_arrow().num_rows >= 2
    with pytest.raises(ArtifactError, match="its rows are texts, expected images"):
        detect(merged.files, "facts")
    assert merged.report(tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "ask",
    [
        lambda merged, place: merged.select("30%", "facts").export(place / "kept"),
        lambda merged, place: merged.explain("facts", "row-3"),
        lambda merged, place: distil(merged.files, "facts", place / "scorer"),
        lambda merged, place: add_targets(merged.path, str(write_targets(place.parent / "more.jsonl", "more"))),
    ],
)
def test_functions_that_need_texts_refer_to_the_parts(parts, tmp_path, ask):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=f"{parts.first}, {parts.second}"):
        ask(grasp.open(parts.merged), tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_parts_are_named_in_the_manifest_and_the_fingerprint_follows_from_theirs(parts, tmp_path):
    merged = ArtifactReader.open(parts.merged).manifest
    assert [(part["path"], part["rows"]) for part in merged.details["parts"]] == [
        (parts.first, parts.sizes[0]),
        (parts.second, parts.sizes[1]),
    ]
    turned = merge([parts.second, parts.first], tmp_path / "turned").manifest
    assert turned.fingerprints["corpus"] != merged.fingerprints["corpus"]
    assert turned.fingerprints["model"] == merged.fingerprints["model"]


def another_model(parts, place):
    damaged = Path(shutil.copytree(parts.second, place / "other"))
    manifest = SIGNED_MANIFEST.read(damaged)
    changed = {"fingerprints": manifest.fingerprints | {"model": "another", "tokenizer": "strange"}}
    SIGNED_MANIFEST.write(damaged, manifest.model_copy(update=changed))
    return damaged


def fewer_units(parts, place):
    (place / "facts.jsonl").write_text("".join((parts.root / "facts.jsonl").read_text().splitlines(True)[:4]))
    names = (str(place / "facts.jsonl"),)
    return parts.built("fewer-units", parts.second_path, like=parts.first, targets={"names": names})


def another_type(parts, place):
    corpus = write_lines(place / "typed.jsonl", 100, parts.lines[:9], year="nineteen")
    return parts.built("typed", corpus, like=parts.first)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda parts, _: parts.first, r"row_id 'row-0' .*first.*first.*\(\d+ "),
        (lambda parts, _: parts.built("own-moments", parts.second_path), r"moments\.hidden\.mean: "),
        (another_model, r"fingerprints\.model: .*\"another\".*fingerprints\.tokenizer"),
        (fewer_units, r"targets\.facts: .*\b6\b.*\b4\b.*units\.unit_id: "),
        (another_type, "typed: a label .*year.*int64.*string"),
    ],
)
def test_parts_with_incomparable_numbers_are_refused(parts, tmp_path, other, message):
    part = other(parts, tmp_path)
    with pytest.raises(ArtifactError, match=message):
        merge([parts.first, part], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_untrained_model_and_other_features_are_refused_with_moments_of_another_artifact_too(parts, tmp_path):
    settings = changed(parts.settings, corpus={"path": parts.second_path}, like=parts.first)
    for _ in range(2):  # the first attempt leaves nothing that the second takes for work
        with pytest.raises(ModelError, match="untrained"):
            build_artifact(settings, tmp_path / "art", must_be_trained=True)
    other = changed(settings, features={"tau": 0.5})
    for ask in (build_artifact, lambda *_: forecast(tmp_path / "art", other.model_dump(), untrained=True)):
        with pytest.raises(ArtifactError, match=r"like: .*first.* model .*features\.tau"):
            ask(other, tmp_path / "art")
    assert not (tmp_path / "art" / "work").exists()


def test_invalid_inputs_and_outputs_are_refused(parts, tmp_path):
    both = [parts.first, parts.second]
    for sources, out, message in (
        ([parts.first], tmp_path / "out", r"parts:.*\b1\b"),
        (both, parts.second, "--out: .*second"),
        (both, Path(parts.first) / "inside", "part"),
        (both, "s3://bucket/art", "directory"),
    ):
        with pytest.raises(SettingsError, match=message):
            merge(sources, out)


def test_no_output_exists_before_it_is_complete(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(ArtifactWriter, "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge([parts.first, parts.second], tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("after", [0, 5, 40])
def test_a_full_disk_is_reported_with_the_path_and_without_advice_to_resume(parts, tmp_path, monkeypatch, after):
    fsync, left = os.fsync, [after]

    def full(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    message = refused("merge", parts.first, parts.second, "--out", tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'out'}: ")
    assert "No space left on device" in message
    assert "--resume" not in message
    assert list(tmp_path.iterdir()) == []


def test_the_commands_build_and_merge_parts(parts, tmp_path):
    write_yaml(parts.settings.model_dump(mode="json"), tmp_path / "settings.yaml")
    flags = ("--config", tmp_path / "settings.yaml", "--corpus", parts.second_path, "--like", parts.first)
    succeed("build", *flags, "--out", tmp_path / "part")
    done = succeed("merge", parts.first, tmp_path / "part", "--out", tmp_path / "art")
    assert done.lines == [f"{tmp_path / 'art'}: {sum(parts.sizes)} rows of 2 artifacts, targets: facts"]
    assert_close(arrays(tmp_path / "art"), arrays(parts.merged))
    assert "already" in refused("merge", parts.first, tmp_path / "part", "--out", tmp_path / "art")


def test_an_interrupted_build_keeps_the_moments_that_it_copied(parts, tmp_path, monkeypatch):
    like = Path(shutil.copytree(parts.first, tmp_path / "like"))
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "write_shard", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            parts.built("cut-off", parts.second_path, like=str(like))
    shutil.rmtree(like)
    assert_close(arrays(parts.built("cut-off", parts.second_path, like=str(like))), arrays(parts.second))
