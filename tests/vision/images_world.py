"""A small world of pictures: three colours under noise, a convolutional net with a named head, files on disk."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

COLOURS = ("blue", "green", "red")
SIZE = 12


class TinyNet(nn.Module):
    """Two convolutions, a mean over the picture, a linear head."""

    def __init__(self, width: int = 10, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, width, 3), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def features(self, pixels: Tensor) -> Tensor:
        return self.body(pixels).mean(dim=(2, 3))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.features(pixels))


class Scaled(TinyNet):
    """Its head is not its last layer."""

    def forward(self, pixels: Tensor) -> Tensor:
        return 2 * self.head(self.features(pixels))


class Grid(TinyNet):
    """Its head reads every place of the picture."""

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels).permute(0, 2, 3, 1)).mean(dim=(1, 2))


def make_net(width: int = 10) -> TinyNet:
    return TinyNet(width)


def not_annotated(width: int = 10):
    return TinyNet(width)


def picture(colour: int, generator: np.random.Generator, size: int = SIZE) -> Image.Image:
    values = generator.integers(0, 110, size=(size, size, 3))
    values[..., 2 - colour] += 120
    return Image.fromarray(values.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def pictures(n: int, seed: int = 0) -> tuple[list[bytes], list[int]]:
    generator = np.random.default_rng(seed)
    classes = [i % len(COLOURS) for i in range(n)]
    return [encoded(picture(c, generator)) for c in classes], classes


def write_parquet(path: Path, n: int, seed: int = 0, **columns: list) -> Path:
    images, classes = pictures(n, seed)
    table = {"row_id": [f"{path.stem}-{i}" for i in range(n)], "image": images, "label": classes} | columns
    pq.write_table(pa.table(table), path)
    return path


def write_weights(path: Path, model: nn.Module | None = None) -> Path:
    save_file((model or TinyNet()).state_dict(), path)
    return path


def settings(root: Path, n: int = 30, **changes) -> dict:
    """Settings of a build over a world in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "weights.safetensors").exists():
        write_weights(root / "weights.safetensors")
        write_parquet(root / "train.parquet", n)
        write_parquet(root / "trusted.parquet", 9, seed=1)
    classifier = {
        "head": "head",
        "factory": "tests.vision.images_world:TinyNet",
        "classes": list(COLOURS),
        "images": {"size": 8, "resize": 10},
        "batch_images": 7,
    }
    data = {
        "model": {"path": str(root / "weights.safetensors"), "classifier": classifier, "threads": 1},
        "corpus": {"path": str(root / "train.parquet")},
        "targets": {"names": [str(root / "trusted.parquet")]},
        "features": {"hidden_width": 16, "residual_width": 8},
        "shard_rows": 8,
        "array_dtype": "float32",
    }
    for name, value in changes.items():
        place, *steps = data, *name.split("__")
        for step in steps[:-1]:
            place = place[step]
        place[steps[-1]] = value
    return data
