"""What would a model gain or lose if part of its corpus were kept, dropped or re-weighted?

    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")
    art.predict(drop="topic = 'Games'")

`grasp.build` and `grasp.open` give an Artifact, whose methods answer questions; `help(grasp.Artifact)` lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grasp.errors import GraspError

if TYPE_CHECKING:
    from grasp.api import build, calibrate, evaluate, open, open_runs, retrain  # noqa: A004
    from grasp.handle import Artifact
    from grasp.results import Result
    from grasp.runs.environment import Environment

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "grasp.handle",
    "Environment": "grasp.runs.environment",
    "Result": "grasp.results",
    "build": "grasp.api",
    "calibrate": "grasp.api",
    "evaluate": "grasp.api",
    "open": "grasp.api",
    "open_runs": "grasp.api",
    "retrain": "grasp.api",
}
__all__ = [
    "Artifact",
    "Environment",
    "GraspError",
    "Result",
    "__version__",
    "build",
    "calibrate",
    "evaluate",
    "open",
    "open_runs",
    "retrain",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: `import grasp` alone loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grasp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
