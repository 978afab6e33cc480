"""What an artifact is made of, in one record: whoever reads corpus, targets or model puts its fingerprint there.

The manifest takes its fingerprints from the record. `build.json`, by which a build is resumed, holds it, and its hash
names the work directory. Whether two artifacts mean the same (`like`, `merge`) is a comparison of two records.
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
    """All that decides the numbers of an artifact.

    Attributes:
        fingerprints: of the model, of what turns rows into its input (`tokenizer`, say), of corpus and targets.
        dtype: of the model.
        features: settings of the kernels.
        rounding: what else decides the last digits: device, batches, threads.
    """

    fingerprints: dict[str, str]
    dtype: str | None
    features: Mapping[str, Any]
    rounding: Mapping[str, Any]

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader) -> Self:
        """Return the identity that a manifest records; it says nothing of roundings."""
        manifest = artifact.manifest
        return cls(manifest.fingerprints, manifest.made_by.get("dtype"), dict(artifact.feature_settings), {})

    @property
    def record(self) -> dict[str, Any]:
        """The identity as JSON."""
        return asdict(self)

    @property
    def key(self) -> str:
        """A hash of the identity."""
        return hashlib.blake2b(json.dumps(self.record, sort_keys=True).encode(), digest_size=8).hexdigest()

    def changes(self, then: "Identity", fingerprints: Iterable[str]) -> list[str]:
        """Return in what the meaning of numbers differs: dtype, features, and those of the fingerprints.

        Returns:
            Lines `field: was X, now Y`, where X is what `then` has.
        """
        names = list(fingerprints)
        before, now = (
            {
                "fingerprints": {name: one.fingerprints.get(name) for name in names},
                "model.dtype": one.dtype,
                "features": dict(one.features),
            }
            for one in (then, self)
        )
        return list(differences(before, now))
