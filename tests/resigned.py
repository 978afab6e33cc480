"""Rewrite manifests as the owner of an artifact could."""

import json
from pathlib import Path

from grasp.artifact.manifest import MANIFEST
from grasp.files import checksum


def resign(path: Path, change) -> None:
    """Apply `change` to a manifest and renew its checksum."""
    raw = json.loads((path / MANIFEST).read_text())
    change(raw)
    raw["checksum"] = "0" * 32
    data = json.dumps(raw, indent=1) + "\n"
    (path / MANIFEST).write_text(data.replace("0" * 32, checksum(data.encode()), 1))
