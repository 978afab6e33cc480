"""Rewrite manifests as the owner of an artifact could."""

import json
from pathlib import Path

from grasp.artifact.manifest import MANIFEST
from grasp.files import checksum


def resign(path: Path, change, name: str = MANIFEST) -> None:
    """Apply `change` to a record, the manifest of an artifact by default, and renew its checksum."""
    raw = json.loads((path / name).read_text())
    change(raw)
    raw["checksum"] = "0" * 32
    data = json.dumps(raw, indent=1) + "\n"
    (path / name).write_text(data.replace("0" * 32, checksum(data.encode()), 1))
