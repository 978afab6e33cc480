"""A manifest as its owner could rewrite it."""

import json
from pathlib import Path

from grasp.artifact.manifest import MANIFEST
from grasp.files import checksum


def resign(path: Path, change) -> None:
    """Rewrite a manifest as its owner could: changed, and signed again."""
    raw = json.loads((path / MANIFEST).read_text())
    change(raw)
    raw["checksum"] = "0" * 32
    data = json.dumps(raw, indent=1) + "\n"
    (path / MANIFEST).write_text(data.replace("0" * 32, checksum(data.encode()), 1))
