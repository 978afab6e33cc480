"""`grasp build` and `grasp detect` on the pictures of the experiment: a module whose features were computed before.

The backbone is frozen, so that what its head reads of a picture is the same in every build: `KeptFeatures` looks it up
by the picture. All that comes after is the command's own: store, moments, whitening, relevance, sketches, detection.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.vision.fit_head import fit_head
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import build_settings
from grasp.vision.detect import detect
from grasp.vision.images import decode_image

SIDE = 32
KERNELS = {"kernels": ["output_layer", "pooled", "hidden_sketch", "residual_sketch"]}
IMAGES = {"size": SIDE, "interpolation": "nearest", "mean": [0.0] * 3, "std": [1.0] * 3}  # pixels as they are


def key(pixels_HWC: NDArray[np.uint8]) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(pixels_HWC).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class KeptFeatures(nn.Module):
    """Features by picture, (P, H), and the output layer that reads them; a picture that is not kept is refused."""

    def __init__(self, pictures: int, width: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("key_P", torch.zeros(pictures, dtype=torch.int64))  # in order
        self.register_buffer("feature_PH", torch.zeros(pictures, width))
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        whole = (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        keys = torch.tensor([key(image) for image in whole])
        place = torch.searchsorted(self.key_P, keys).clamp(max=len(self.key_P) - 1)
        if not torch.equal(self.key_P[place], keys):
            raise ValueError("a picture without kept features")
        return self.head(self.feature_PH[place])


@dataclass(frozen=True, slots=True)
class Pictures:
    """Encoded pictures of the corpus and of the trusted set, with what the head reads of each."""

    train: Sequence[bytes]
    trusted: Sequence[bytes]
    train_NH: NDArray[np.floating[Any]]
    trusted_EH: NDArray[np.floating[Any]]
    trusted_label_E: NDArray[np.int64]


def values(
    pictures: Pictures,
    label_N: NDArray[np.int64],
    head: tuple[F64, F64] | None,
    n_classes: int,
    features: dict[str, Any] | None = None,
) -> dict[str, F64]:
    """What `grasp detect` says of every row, (N,) each, negated: higher is better for the trusted pictures.

    Args:
        label_N: classes of the corpus as given.
        head: weights (V, H) and bias (V,); none: as `fit_head` fits it to the labels.
        features: settings of the build; none: its defaults.
    """
    with TemporaryDirectory() as place:
        root = Path(place)
        _write(root, pictures, label_N, head, n_classes)
        settings = _settings(root, pictures, n_classes, KERNELS | (features or {}))
        if head is None:
            fitting = build_settings(settings)
            fit_head(fitting.model, fitting.corpus, root / "head.safetensors")
            settings["model"]["classifier"]["fitted_head"] = str(root / "head.safetensors")
        artifact = ArtifactReader.open(build_artifact(build_settings(settings), root / "art"))
        token, pooled = detect(artifact, "trusted"), detect(artifact, "trusted", match="pooled")
        score_by_method = {"GRASP (pooled)": pooled.scores["low_relevance"]}
        score_by_method |= {"GRASP (token)": token.scores["low_relevance"]}
        score_by_method |= {"detect: geometry": token.scores["neighbour_disagreement"]}  # name in stored results
        score_by_method |= {"detect: fused": token.scores["fused"]}
        return {name: -np.asarray(score_N) for name, score_N in score_by_method.items()}


def _write(
    root: Path, pictures: Pictures, label_N: NDArray[np.int64], head: tuple[F64, F64] | None, n_classes: int
) -> None:
    """Corpus, trusted set and weights."""
    for name, images, labels in (
        ("train", pictures.train, label_N),
        ("trusted", pictures.trusted, pictures.trusted_label_E),
    ):
        rows = {"row_id": [f"{name}-{i}" for i in range(len(images))], "image": list(images), "label": labels}
        pq.write_table(pa.table(rows), root / f"{name}.parquet")
    keys = np.array([key(np.asarray(decode_image(image))) for image in [*pictures.train, *pictures.trusted]])
    feature = np.concatenate([pictures.train_NH, pictures.trusted_EH]).astype(np.float32)
    first = np.unique(keys, return_index=True)[1]
    weight, bias = head or (np.zeros((n_classes, feature.shape[1])), np.zeros(n_classes))
    tensors = {
        "key_P": torch.from_numpy(keys[first]),
        "feature_PH": torch.from_numpy(feature[first]),
        "head.weight": torch.from_numpy(weight.astype(np.float32)),
        "head.bias": torch.from_numpy(bias.astype(np.float32)),
    }
    save_file(tensors, root / "weights.safetensors")


def _settings(root: Path, pictures: Pictures, n_classes: int, features: dict[str, Any]) -> dict[str, Any]:
    image_keys = {key(np.asarray(decode_image(image))) for image in [*pictures.train, *pictures.trusted]}
    arguments = {"pictures": len(image_keys), "width": pictures.train_NH.shape[1], "classes": n_classes}
    classifier = {
        "factory": "experiments.vision.command:KeptFeatures",
        "arguments": arguments,
        "head": "head",
        "classes": [str(k) for k in range(n_classes)],
        "images": IMAGES,
    }
    return {
        # a picture of noise, which the check would show it, has no kept features
        "model": {
            "path": str(root / "weights.safetensors"),
            "classifier": classifier,
            "dtype": "float32",
            "check": False,
        },
        "corpus": {"path": str(root / "train.parquet")},
        "targets": {"names": [str(root / "trusted.parquet")], "units_per_target": None},
        "features": features,
    }
