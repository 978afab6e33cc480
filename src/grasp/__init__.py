"""Predict how a part of a training corpus changes the results of a model, without retraining.

    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")
    art.predict(drop="topic = 'Games'")
    grasp.add_targets("art", "exam.jsonl"), grasp.add_replay("art", recipe="sft.yaml")
    art.score("sciq"), art.select("20%", "sciq").export("kept")
    grasp.evaluate(art, grasp.open_runs("env"))

Results have `.to_pandas()`, `.to_arrow()` and `.write(path)`, and print as tables. Rows are identified by row_id.
`grasp.build` and `grasp.open` return an `Artifact`; `help(grasp.Artifact)` lists its methods.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grasp.errors import GraspError

if TYPE_CHECKING:
    from grasp.api.artifact import Artifact, build, opened
    from grasp.api.artifact import open as open  # noqa: A004 - exported, but not in __all__
    from grasp.api.evaluate import evaluate
    from grasp.merging.merge import merge as _merge
    from grasp.mixing.import_runs import import_runs
    from grasp.monitor.monitor import Monitor
    from grasp.pipeline.add_targets import add_targets
    from grasp.pipeline.build import add_replay
    from grasp.pipeline.proxy import train_proxy
    from grasp.pipeline.warm_up import warm_up
    from grasp.previews.preview import preview_corpus, preview_targets
    from grasp.results import Result
    from grasp.retraining.retrain import retrain
    from grasp.runs.retrained import RetrainedRuns
    from grasp.runs.table import open_runs
    from grasp.serving.serve import serve

    merge = opened(_merge)

__version__ = "0.2.0"

_HOMES = {
    "Artifact": "grasp.api.artifact",
    "Monitor": "grasp.monitor.monitor",
    "RetrainedRuns": "grasp.runs.retrained",
    "Result": "grasp.results",
    "add_replay": "grasp.pipeline.build",
    "add_targets": "grasp.pipeline.add_targets",
    "assess_metrics": "grasp.mixing.metric_quality",
    "build": "grasp.pipeline.build",
    "evaluate": "grasp.api.evaluate",
    "import_runs": "grasp.mixing.import_runs",
    "merge": "grasp.merging.merge",
    "mix_runs": "grasp.mixing.mixture_model",
    "open": "grasp.api.artifact",
    "open_runs": "grasp.runs.table",
    "predict_runs": "grasp.mixing.mixture_model",
    "preview_corpus": "grasp.previews.preview",
    "preview_targets": "grasp.previews.preview",
    "propose_runs": "grasp.mixing.proposals",
    "retrain": "grasp.retraining.retrain",
    "serve": "grasp.serving.serve",
    "train_proxy": "grasp.pipeline.proxy",
    "warm_up": "grasp.pipeline.warm_up",
}
__all__ = [
    "Artifact",
    "GraspError",
    "Monitor",
    "Result",
    "RetrainedRuns",
    "__version__",
    "add_replay",
    "add_targets",
    "assess_metrics",
    "build",
    "evaluate",
    "import_runs",
    "merge",
    "mix_runs",
    "open_runs",
    "predict_runs",
    "preview_corpus",
    "preview_targets",
    "propose_runs",
    "retrain",
    "serve",
    "train_proxy",
    "warm_up",
]  # without `open`, so that `from grasp import *` does not shadow the built-in


def __getattr__(name: str) -> Any:
    """Import a name on first access, so that `import grasp` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grasp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    if not isinstance(value, type):
        value = import_module("grasp.progress_display").shows_progress(value)
    if name in ("build", "merge"):
        value = import_module("grasp.api.artifact").opened(value)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*__all__, "open"})
