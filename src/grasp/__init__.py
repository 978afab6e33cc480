"""What would a model gain or lose if part of its corpus were kept, dropped or re-weighted?

    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")
    art.predict(drop="topic = 'Games'")

`grasp.build` and `grasp.open` give an Artifact, whose methods answer questions; `help(grasp.Artifact)` lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grasp.errors import GraspError

if TYPE_CHECKING:
    from grasp.api import build, merge
    from grasp.api import open as open  # noqa: A004 - found here, though not in __all__
    from grasp.choose.apply import apply
    from grasp.choose.scorer import Scorer
    from grasp.geometry.calibrate import calibrate
    from grasp.handle import Artifact
    from grasp.results import Result
    from grasp.runs.environment import Environment
    from grasp.runs.readers import import_runs
    from grasp.runs.table import open_runs
    from grasp.verbs.evaluate import evaluate
    from grasp.verbs.retrain import retrain

__version__ = "0.2.0"

_HOMES = {
    "Artifact": "grasp.handle",
    "Environment": "grasp.runs.environment",
    "Result": "grasp.results",
    "Scorer": "grasp.choose.scorer",
    "apply": "grasp.choose.apply",
    "build": "grasp.api",
    "calibrate": "grasp.geometry.calibrate",
    "evaluate": "grasp.verbs.evaluate",
    "import_runs": "grasp.runs.readers",
    "merge": "grasp.api",
    "mix_runs": "grasp.choose.alone",
    "open": "grasp.api",
    "open_runs": "grasp.runs.table",
    "predict_runs": "grasp.choose.alone",
    "propose_runs": "grasp.choose.alone",
    "retrain": "grasp.verbs.retrain",
}
__all__ = [
    "Artifact",
    "Environment",
    "GraspError",
    "Result",
    "Scorer",
    "__version__",
    "apply",
    "build",
    "calibrate",
    "evaluate",
    "import_runs",
    "merge",
    "mix_runs",
    "open_runs",
    "predict_runs",
    "propose_runs",
    "retrain",
]  # without `open`: who imports all of them keeps the one of Python


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: `import grasp` alone loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grasp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "open"})
