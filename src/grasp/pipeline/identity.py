"""The identity of an artifact: fingerprints of model, tokenizer, corpus and targets, and the settings of the kernels.

The manifest takes its fingerprints from this record, and `build.json` holds it, so that a build is resumed only with
the same inputs; its hash names the work directory. `like` and `merge` compare the identities of two artifacts.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from grasp.artifact.reader import ArtifactReader
from grasp.files import differences


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that determines the numbers of an artifact.

    Attributes:
        fingerprints: hashes of the model, its input encoding (e.g. `tokenizer`), the corpus and the targets.
        dtype: dtype of the model.
        features: settings of the kernels.
        rounding: what determines the last digits: device, batch sizes, threads.
    """

    fingerprints: dict[str, str]
    dtype: str | None
    features: Mapping[str, Any]
    rounding: Mapping[str, Any]

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader) -> Self:
        """Return the identity that a manifest records; `rounding` is empty."""
        manifest = artifact.manifest
        return cls(manifest.fingerprints, manifest.made_by.get("dtype"), dict(artifact.feature_settings), {})

    @property
    def record(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

    @property
    def key(self) -> str:
        """Return a hash of the identity."""
        return hashlib.blake2b(json.dumps(self.record, sort_keys=True).encode(), digest_size=8).hexdigest()

    def changes(self, earlier: "Identity", fingerprints: Iterable[str]) -> list[str]:
        """Return differences that change the meaning of numbers: dtype, features, and the named fingerprints.

        Returns:
            Lines `field: was X, now Y`, with X from `earlier`.
        """
        names = list(fingerprints)
        before, now = (
            {
                "fingerprints": {name: identity.fingerprints.get(name) for name in names},
                "model.dtype": identity.dtype,
                "features": dict(identity.features),
            }
            for identity in (earlier, self)
        )
        return list(differences(before, now))
