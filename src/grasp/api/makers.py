"""The verbs that make or open an artifact; those that ask it are methods of `grasp.Artifact`.

    import grasp
    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")    # or objects in memory
    art = grasp.open("art")                                             # a path or a URL
    art.score("sciq"), art.predict(drop="topic = 'Games'"), art.select("20%", "sciq").export("kept")
    runs = grasp.open_runs("env")
    grasp.evaluate(art, runs), grasp.calibrate(art, runs).save("protocol.yaml")

A verb gives a result with `.to_pandas()`, `.to_arrow()`, `.write(path)`; printing it shows the answer. Rows are named
by their row_id. The verbs of runs (retrain, evaluate) live in `grasp.api`.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec

from grasp.api.artifact import Artifact

P = ParamSpec("P")
MAKERS = ("build", "merge")  # `grasp.build.build.build` and `grasp.build.merge.merge`

open = Artifact.open  # noqa: A001 - the word that everybody looks for


def _opened(verb: Callable[P, Any]) -> Callable[P, Artifact]:
    """A verb that writes an artifact, which gives it into the hand."""

    @wraps(verb)
    def made(*args: P.args, **kwargs: P.kwargs) -> Artifact:
        return Artifact(verb(*args, **kwargs))

    return made


if TYPE_CHECKING:
    from grasp.build.build import build as _build
    from grasp.build.merge import merge as _merge

    build, merge = _opened(_build), _opened(_merge)
else:

    @cache
    def __getattr__(name: str) -> Any:
        """Load what makes an artifact, and torch with it, when it is asked for."""
        if name not in MAKERS:
            raise AttributeError(f"module 'grasp.api.makers' has no attribute {name!r}")
        return _opened(getattr(import_module(f"grasp.build.{name}"), name))
