"""The class `Artifact`, an opened artifact with the analysis functions as methods.

Each method is a function of another module, which is imported when the method is first accessed.
"""

from collections.abc import Callable
from functools import wraps
from html import escape
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from grasp.progress_display import shows_progress
from grasp.text import plain, size_text, text_table

P = ParamSpec("P")

if TYPE_CHECKING:
    from grasp.api.predict import predict as _predict
    from grasp.api.score import score as _score
    from grasp.artifact.inspection import ArtifactInfo, VerifyReport
    from grasp.artifact.reader import ArtifactReader
    from grasp.inspect.explain import explain as _explain
    from grasp.pipeline.build import build as _build
    from grasp.report.build_report import report as _report
    from grasp.results import Result
    from grasp.select.mix import mix as _mix
    from grasp.select.select import select as _select

    R = TypeVar("R")

    def _typed(function: Callable[Concatenate[ArtifactReader, P], R]) -> "Callable[Concatenate[Artifact, P], R]": ...


class _LazyMethod:
    """Descriptor that exposes the function of the same name in a lazily imported module as a method.

    The first argument of these functions is the reader of the artifact, `Artifact.files`.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, artifact: "Artifact | None", owner: type) -> Any:
        function = shows_progress(getattr(import_module(self._module), self._name))
        return function if artifact is None else MethodType(function, artifact.files)


class Artifact:
    """The rows of a corpus with their relevance to every target.

    Create it with `grasp.build` or `grasp.open`.
    """

    def __init__(self, files: "ArtifactReader") -> None:
        self.files = files

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an artifact in a directory, or at a URL, whose files are downloaded on demand.

        Raises:
            ArtifactError: not found, unfinished, or damaged.
        """
        from grasp.artifact.reader import ArtifactReader

        return cls(ArtifactReader.open(path))

    @property
    def path(self) -> str:
        """Directory or URL."""
        return self.files.location

    @property
    def targets(self) -> dict[str, int]:
        """Number of units of every target."""
        return dict(self.files.manifest.targets)

    @property
    def labels(self) -> tuple[str, ...]:
        """Label columns of the corpus, by which rows can be filtered and grouped."""
        return tuple(self.files.manifest.details.get("labels", ()))

    @property
    def rows(self) -> "Result":
        """All rows in order: row_id, doc_id, n_tokens, loss, labels, and the beginning of the text."""
        import pyarrow.parquet as pq

        from grasp.results import Result

        table = pq.read_table(self.files.rows_path)
        return Result(table.drop_columns(["row_index"]), f"{len(self):,} rows of {self.path}")

    def __len__(self) -> int:
        """Number of rows."""
        return self.files.n_rows

    def __repr__(self) -> str:
        return "\n".join([plain(self._headline()), text_table("", ("target", "units"), self._target_lines())])

    def _repr_html_(self) -> str:
        from grasp.results import html_table

        table = html_table(("target", "units"), self._target_lines())
        return f"<p><b>{escape(plain(self._headline()))}</b></p>{table}"

    def _headline(self) -> str:
        size = size_text(sum(entry.bytes for entry in self.files.manifest.files.values()))
        labels = ", ".join(self.labels) or "none"
        return f"GRASP artifact {self.path}: {len(self):,} rows, {size}; labels: {labels}"

    def _target_lines(self) -> list[tuple[str, str]]:
        return [(plain(name), f"{units:,}") for name, units in self.targets.items()]

    # ----------------------------------------------------------------------------------------- analysis functions

    if TYPE_CHECKING:  # signatures of the lazy methods below
        score = _typed(_score)
        predict = _typed(_predict)
        explain = _typed(_explain)
        select = _typed(_select)
        mix = _typed(_mix)
        report = _typed(_report)
    else:
        score = _LazyMethod("grasp.api.score")
        predict = _LazyMethod("grasp.api.predict")
        explain = _LazyMethod("grasp.inspect.explain")
        select = _LazyMethod("grasp.select.select")
        mix = _LazyMethod("grasp.select.mix")
        report = _LazyMethod("grasp.report.build_report")

    def info(self) -> "ArtifactInfo":
        """Return arrays and their sizes, settings, fingerprints, and counts of skipped documents."""
        from grasp.artifact.inspection import info

        return info(self.path)

    def verify(self) -> "VerifyReport":
        """Compare every file with its checksum; see `.ok` and `.problems` of the result."""
        from grasp.artifact.inspection import verify

        return verify(self.path)


open = Artifact.open  # noqa: A001 - `grasp.open`, as in other libraries


def opened(function: "Callable[P, ArtifactReader]") -> Callable[P, Artifact]:
    """Wrap a function that writes an artifact so that it returns the opened `Artifact`."""

    @wraps(function)
    def build_and_open(*args: P.args, **kwargs: P.kwargs) -> Artifact:
        return Artifact(function(*args, **kwargs))

    return build_and_open


if TYPE_CHECKING:  # `grasp.build`
    build = opened(_build)
