"""Images of every format become rows; unusable images are named and counted, and nothing is read twice."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.errors import CorpusError, TargetError
from grasp.settings import CorpusSettings, TargetSettings
from grasp.vision.image_units import load_image_units
from grasp.vision.images import ImageStore, decode_image, pixel_hash
from grasp.vision.settings import ClassifierSettings
from tests.vision.images_world import COLOURS, encoded, picture, pictures, write_parquet

CLASSIFIER = ClassifierSettings(head="head", classes=COLOURS)


def store(tmp_path, path, name="store", classes=COLOURS, **columns):
    classifier = CLASSIFIER.model_copy(update={"classes": classes} | columns)
    return ImageStore.write_images(tmp_path / name, CorpusSettings(path=str(path)), classifier, 3, shard_rows=4)


def contents(result):
    shards = [result.shard(k) for k in range(result.n_shards)]
    return [image for shard in shards for image in shard.encoded], np.concatenate([shard.class_N for shard in shards])


def test_one_corpus_in_five_forms(tmp_path):
    images, classes = pictures(10)
    names = [COLOURS[c] for c in classes]
    folder = tmp_path / "folder"
    for i, (image, name) in enumerate(zip(images, names, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{i:02d}.png").write_bytes(image)
    pq.write_table(pa.table({"image": images, "label": classes}), tmp_path / "flat.parquet")
    structs = [{"bytes": image, "path": None} for image in images]
    datasets.Dataset.from_dict({"image": structs, "label": names}).save_to_disk(tmp_path / "saved")
    paths = [f"folder/{name}/{i:02d}.png" for i, name in enumerate(names)]
    pq.write_table(pa.table({"image": paths, "label": classes}), tmp_path / "paths.parquet")
    lines = [json.dumps({"file": path, "what": c}) for path, c in zip(paths, classes, strict=True)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))

    for form, options in (
        ("flat.parquet", {}),
        ("saved", {}),
        ("paths.parquet", {}),
        ("lines.jsonl", {"image_column": "file", "class_column": "what"}),
    ):
        found_images, found_classes = contents(store(tmp_path, tmp_path / form, f"store-{form}", **options))
        assert found_images == images, form
        assert found_classes.tolist() == classes
    from_folder = store(tmp_path, folder, "store-folder")
    assert sorted(contents(from_folder)[0]) == sorted(images)
    first = from_folder.shard(0).table.to_pylist()[0]
    assert (first["row_id"], first["image_class"], first["snippet"]) == ("blue/00.png", "blue", "blue, 12 x 12 pixels")


def test_unusable_images_are_named_skipped_and_counted(tmp_path):
    images, classes = pictures(9)
    images[1], images[4], images[6] = b"no image", images[4][:40], None
    labels = [None if i == 7 else c for i, c in enumerate(classes)]
    table = pa.table({"row_id": [f"p{i}" for i in range(9)], "image": images, "label": labels})
    pq.write_table(table, tmp_path / "some.parquet")
    result = store(tmp_path, tmp_path / "some.parquet")
    assert result.n_rows == 5
    assert result.n_documents == 9
    assert result.skipped.counts == {"broken images": 2, "records without an image": 1, "images without a class": 1}
    assert result.skipped.ids == {
        "broken images": ["p1", "p4"],
        "records without an image": ["p6"],
        "images without a class": ["p7"],
    }
    trusted = TargetSettings(names=(str(tmp_path / "some.parquet"),))
    with pytest.raises(TargetError, match=r"4 of 9 .*p1 \(broken images\), p4"):
        load_image_units(trusted, CorpusSettings(path="unused"), CLASSIFIER, 3)


IMAGES = pictures(3)[0]
REFUSED = [
    ({"image": IMAGES, "label": [0, 1, 3]}, (), r"row 2: class 3.*\b0\b.*\b2\b"),
    ({"image": IMAGES, "label": [0, -1, 1]}, COLOURS, r"row 1: class -1.*\b0\b.*\b2\b"),
    ({"image": IMAGES, "label": ["red", "rde", "blue"]}, COLOURS, "row 1: class 'rde'"),
    ({"image": IMAGES, "label": [0.0, 0.5, 1.0]}, COLOURS, r"row 1: class 0\.5"),
    ({"image": IMAGES, "label": [True, False, True]}, COLOURS, "row 0: .*True"),
    ({"picture": [1], "label": [1]}, COLOURS, "'image'.*picture, label"),
    ({"image": [1], "kind": [1]}, COLOURS, "'label'.*image, kind"),
    ({"image": [1], "label": [1]}, COLOURS, r"column 'image'.*int64"),
    ({"image": [b"x", b"y"], "label": [0, 1]}, COLOURS, r"\b2 records.*\(2 broken images\)"),
    (None, COLOURS, "folder"),
]


@pytest.mark.parametrize(("columns", "classes", "pattern"), REFUSED)
def test_a_corpus_without_images_is_refused(tmp_path, columns, classes, pattern):
    path = tmp_path / "corpus"
    if columns is None:
        path.mkdir()
        (path / "a.png").write_bytes(IMAGES[0])
    else:
        path = path.with_suffix(".parquet")
        pq.write_table(pa.table(columns), path)
    with pytest.raises(CorpusError, match=pattern):
        store(tmp_path, path, classes=classes)


def test_an_interrupted_store_resumes_to_the_same_result(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", 11)
    whole = store(tmp_path, tmp_path / "train.parquet", "whole")
    seen = []

    def stop(rows):
        seen.append(rows)
        if len(seen) == 2:
            raise KeyboardInterrupt

    settings = CorpusSettings(path=str(tmp_path / "train.parquet"))
    with pytest.raises(KeyboardInterrupt):
        ImageStore.write_images(tmp_path / "cut", settings, CLASSIFIER, 3, shard_rows=4, progress=stop)
    resumed = store(tmp_path, tmp_path / "train.parquet", "cut")
    assert (resumed.fingerprint, resumed.n_rows, resumed.n_documents) == (whole.fingerprint, 11, 11)
    assert resumed.rows(np.array([7, 2])).encoded == whole.rows(np.array([7, 2])).encoded


def test_the_hash_is_that_of_the_pixels_and_not_of_the_file():
    image = picture(0, np.random.default_rng(3))
    png, bmp = (decode_image(encoded(image, kind)) for kind in ("PNG", "BMP"))
    other = decode_image(encoded(picture(0, np.random.default_rng(4))))
    assert pixel_hash(png) == pixel_hash(bmp) != pixel_hash(other)


def test_units_are_sampled_as_for_texts_and_nested(tmp_path):
    path = str(write_parquet(tmp_path / "trusted.parquet", 12))
    corpus = CorpusSettings(path="unused")
    few, shard = load_image_units(TargetSettings(names=(path,), units_per_target=4), corpus, CLASSIFIER, 3)
    more, _ = load_image_units(TargetSettings(names=(path,), units_per_target=8), corpus, CLASSIFIER, 3)
    assert few.targets == ("trusted",)
    assert few.units == more.units[:4]
    assert [COLOURS[c] for c in shard.class_N] == [unit.completion for unit in few.units]
    left = TargetSettings(names=(path,), exclude_units=(few.units[0].unit_id,))
    assert few.units[0] not in load_image_units(left, corpus, CLASSIFIER, 3)[0].units
