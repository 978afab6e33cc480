"""What the head of a pretrained backbone reads of each image: computed once, kept, everything else runs on it."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.errors import ArtifactError
from grasp.settings import ModelSettings
from grasp.vision.classifier import ImageClassifier
from grasp.yaml_files import read_yaml

SPLITS = {"train": ("train_1k", 1000), "trusted": ("train_pool_5k", 500), "test": ("test_2k", 1000)}
PIECE = 100  # images between two files: what a kill costs


@dataclass(frozen=True, slots=True)
class Split:
    """Features and true classes of one split, in the order of the file."""

    hidden_NH: NDArray[np.float32]
    class_N: NDArray[np.int64]
    names: tuple[str, ...]


def chosen(images: Path, split: str, limit: int) -> list[dict[str, Any]]:
    """The first images of a split, as many of every class."""
    rows = [row for row in pq.read_table(images).to_pylist() if row["split"] == split]
    each = limit // len({row["label"] for row in rows})
    seen: Counter[int] = Counter()
    out = []
    for row in rows:
        if seen[row["label"]] < each:
            seen[row["label"]] += 1
            out.append(row)
    return out


def extract(model: ImageClassifier, rows: Sequence[dict[str, Any]], cache: Path) -> Split:
    """Run the backbone over images, a piece at a time; pieces that are kept are not computed again."""
    parts = []
    for start in range(0, len(rows), PIECE):
        piece = cache.with_name(f"{cache.stem}-{start}.npy")
        if not piece.exists():
            pixels = model.pixels([row["image"] for row in rows[start : start + PIECE]])
            part = piece.with_suffix(".part.npy")
            np.save(part, model.hidden(pixels).float().cpu().numpy())
            part.replace(piece)
        parts.append(np.load(piece))
    labels = np.array([row["label"] for row in rows], np.int64)
    return Split(np.concatenate(parts), labels, tuple(row["image_id"] for row in rows))


def splits(work: Path, images: Path | None = None, settings: Path | None = None) -> dict[str, Split]:
    """The splits of the experiment, from what is kept in `work`, else from the images."""
    out = {}
    model: ImageClassifier | None = None
    for name, (split, limit) in SPLITS.items():
        cache = work / f"{name}.npz"
        if not cache.exists():
            if images is None or settings is None:
                raise ArtifactError(f"{cache}: not there; run experiments.vision.features first")
            model = model or ImageClassifier.load(ModelSettings.model_validate(read_yaml(settings)))
            split_features = extract(model, chosen(images, split, limit), cache)
            part = cache.with_suffix(".part.npz")
            np.savez(
                part,
                hidden=split_features.hidden_NH,
                label=split_features.class_N,
                names=np.array(split_features.names),
            )
            part.replace(cache)
        with np.load(cache) as data:
            out[name] = Split(data["hidden"], data["label"], tuple(data["names"].tolist()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="Parquet of image, label, split, image_id.")
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("efficientnet_lite0.yaml"))
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work"))
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    for name, split in splits(args.work, args.images, args.model).items():
        print(f"{name}: {len(split.class_N)} images, {split.hidden_NH.shape[1]} features")


if __name__ == "__main__":
    main()
