"""Functions that build, merge, extend and open artifacts; analysis functions are methods of `grasp.Artifact`.

    import grasp
    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")    # or objects in memory
    art = grasp.open("art")                                             # a path or a URL
    grasp.add_targets("art", "exam.jsonl"), grasp.add_replay("art", recipe="sft.yaml")
    art.score("sciq"), art.predict(drop="topic = 'Games'"), art.select("20%", "sciq").export("kept")
    runs = grasp.open_runs("env")
    grasp.evaluate(art, runs), grasp.calibrate(art, runs).save("protocol.yaml")

Results have `.to_pandas()`, `.to_arrow()` and `.write(path)`, and print as tables. Rows are identified by row_id.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec

from grasp.api.artifact import Artifact
from grasp.progress_display import shows_progress

P = ParamSpec("P")
# The modules of functions that write to an artifact; `build` and `merge` return it opened.
MAKERS = {
    "add_replay": "grasp.pipeline.build",
    "add_targets": "grasp.pipeline.add_targets",
    "build": "grasp.pipeline.build",
    "merge": "grasp.pipeline.merge",
    "train_proxy": "grasp.pipeline.proxy",
    "warm_up": "grasp.pipeline.warm_up",
}

open = Artifact.open  # noqa: A001 - `grasp.open`, as in other libraries


def _opened(function: Callable[P, Any]) -> Callable[P, Artifact]:
    """Wrap a function that writes an artifact so that it returns the opened `Artifact`."""

    with_progress = shows_progress(function)

    @wraps(function)
    def build_and_open(*args: P.args, **kwargs: P.kwargs) -> Artifact:
        return Artifact(with_progress(*args, **kwargs))

    return build_and_open


if TYPE_CHECKING:
    from grasp.pipeline.build import build as _build
    from grasp.pipeline.merge import merge as _merge

    build, merge = _opened(_build), _opened(_merge)
else:

    @cache
    def __getattr__(name: str) -> Any:
        """Import the build functions, and with them torch, on first access."""
        if name not in MAKERS:
            raise AttributeError(f"module 'grasp.api.makers' has no attribute {name!r}")
        function = getattr(import_module(MAKERS[name]), name)
        return _opened(function) if name in ("build", "merge") else shows_progress(function)
