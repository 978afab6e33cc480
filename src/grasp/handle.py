"""An artifact in the hand: what it holds, and the verbs that ask it.

Nothing here computes: each verb is one function of the room that knows how. Heavy modules are imported inside verbs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from grasp.text import plain, size_text, text_table

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from grasp.artifact.inspection import ArtifactInfo, VerifyReport
    from grasp.artifact.reader import ArtifactReader
    from grasp.audit.detect import detect as _detect
    from grasp.audit.diagnose import diagnose as _diagnose
    from grasp.audit.retrieval import retrieve as _retrieve
    from grasp.choose.mixture import Mixture
    from grasp.choose.select import Selection
    from grasp.extract.progress import Progress
    from grasp.predict.intervals import FitIntervals
    from grasp.predict.protocol import ScoringProtocol
    from grasp.predict.ranking import RankedRows
    from grasp.predict.verb import Prediction
    from grasp.results import Result
    from grasp.runs.environment import Environment

    Place = Path | str
    Protocol = ScoringProtocol | Path | str | None
    Runs = Environment | Path | str | None
    Targets = str | Sequence[str] | Mapping[str, float] | None
    P = ParamSpec("P")
    R = TypeVar("R")

    def _typed(verb: Callable[Concatenate[ArtifactReader, P], R]) -> "Callable[Concatenate[Artifact, P], R]": ...


class _Verb:
    """A function of a room as a method with its documentation; the room is loaded when the method is looked at."""

    def __init__(self, room: str) -> None:
        self._room = room

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, artifact: "Artifact | None", owner: type) -> Any:
        function = getattr(import_module(self._room), self._name)
        return function if artifact is None else MethodType(function, artifact.files)


class Artifact:
    """What one forward pass over a corpus gave: its rows, and what each should teach of every target.

    Made by `grasp.build` or `grasp.open`. All verbs but `verify` leave it as it is.
    """

    def __init__(self, files: "ArtifactReader") -> None:
        self.files = files

    @classmethod
    def open(cls, path: "Place") -> Self:
        """Open a directory, or a URL whose files are fetched as they are needed."""
        from grasp.artifact.reader import ArtifactReader

        return cls(ArtifactReader.open(path))

    @property
    def path(self) -> str:
        """Directory or URL."""
        return self.files.where

    @property
    def targets(self) -> dict[str, int]:
        """Number of units of every target."""
        return dict(self.files.manifest.targets)

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns of the corpus that rows can be chosen and grouped by."""
        return tuple(self.files.manifest.details.get("labels", ()))

    @property
    def rows(self) -> "Result":
        """All rows in order: row_id, doc_id, n_tokens, loss, labels, and the beginning of their text."""
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
        lines = "".join(f"<tr><td>{escape(name)}</td><td>{units}</td></tr>" for name, units in self._target_lines())
        table = f"<table><thead><tr><th>target</th><th>units</th></tr></thead><tbody>{lines}</tbody></table>"
        return f"<p><b>{escape(plain(self._headline()))}</b></p>{table}"

    def _headline(self) -> str:
        size = size_text(sum(entry.bytes for entry in self.files.manifest.files.values()))
        labels = ", ".join(self.labels) or "none"
        return f"GRASP artifact {self.path}: {len(self):,} rows, {size}; labels: {labels}"

    def _target_lines(self) -> list[tuple[str, str]]:
        return [(plain(name), f"{units:,}") for name, units in self.targets.items()]

    # ------------------------------------------------------------------------------- what is it worth

    def score(
        self,
        target: str,
        *,
        top: int | None = None,
        bottom: int = 0,
        where: str | None = None,
        unit: str | None = None,
        min_tokens: int = 0,
        match: str | None = None,
        labels: Sequence[str] | None = None,
        protocol: "Protocol" = None,
        out: "Place | None" = None,
    ) -> "RankedRows":
        """Rows by what they teach a target, best first. See `grasp.predict.ranking.score`."""
        from grasp.predict.ranking import score

        return score(
            self.files,
            target,
            top=top,
            bottom=bottom,
            where=where,
            unit=unit,
            min_tokens=min_tokens,
            match=match,
            labels=labels,
            protocol=protocol,
            out=None if out is None else Path(out),
        )

    def predict(
        self,
        *,
        drop: str | None = None,
        keep: str | None = None,
        weight: Mapping[str, float] | None = None,
        by: str | None = None,
        subsets: "Place | pa.Table | pd.DataFrame | Mapping[str, Sequence[str]] | None" = None,
        omitted: bool = False,
        family: str | None = None,
        count: int = 100,
        seed: int = 0,
        targets: Sequence[str] | None = None,
        protocol: "Protocol" = None,
        runs: "Runs" = None,
        components: bool = False,
        units: bool = False,
        out: "Place | None" = None,
    ) -> "Prediction":
        """What happens to the targets if rows are kept, dropped or re-weighted. See `grasp.predict.verb.predict`."""
        from grasp.predict.verb import predict

        return predict(
            self.files,
            drop=drop,
            keep=keep,
            weight=weight,
            by=by,
            subsets=subsets,
            omitted=omitted,
            family=family,
            count=count,
            seed=seed,
            targets=targets,
            protocol=protocol,
            runs=self._intervals(runs),
            components=components,
            units=units,
            out=None if out is None else Path(out),
        )

    # ------------------------------------------------------------------------------------ what to take

    def select(
        self,
        budget: str | float | None = None,
        target: "Targets" = None,
        *,
        train_tokens: str | float | None = None,
        by: str | None = None,
        floor: Sequence[str] = (),
        cap: Sequence[str] = (),
        exclude: "Place | Sequence[str] | None" = None,
        exclude_where: str | None = None,
        protocol: "Protocol" = None,
        diversity: float | None = None,
        repeat_worth: float = 15.4,
        runs: "Runs" = None,
        progress: "Progress | None" = None,
    ) -> "Selection":
        """Choose rows to train on; the result has `.row_ids`, `.save(path)`, `.export(directory)`.

        See `grasp.choose.select.select`.
        """
        from grasp.choose.select import select

        return select(
            self.files,
            budget,
            target,
            train_tokens=train_tokens,
            by=by,
            floor=floor,
            cap=cap,
            exclude=exclude,
            exclude_where=exclude_where,
            protocol=protocol,
            diversity=diversity,
            repeat_worth=repeat_worth,
            runs=self._intervals(runs),
            progress=progress,
        )

    def mix(
        self,
        by: str,
        target: "Targets" = None,
        *,
        floor: Sequence[str] = (),
        cap: Sequence[str] = (),
        distance: str | None = None,
        max_repeat: float = 4.0,
        train_tokens: str | float | None = None,
        protocol: "Protocol" = None,
        diversity: float | None = None,
        repeat_worth: float = 15.4,
        runs: "Runs" = None,
    ) -> "Mixture":
        """Find the shares of a label's values that help the targets most; see `grasp.choose.mixture.mix`."""
        from grasp.choose.mixture import mix

        return mix(
            self.files,
            by,
            target,
            floor=floor,
            cap=cap,
            distance=distance,
            max_repeat=max_repeat,
            train_tokens=train_tokens,
            protocol=protocol,
            diversity=diversity,
            repeat_worth=repeat_worth,
            runs=self._intervals(runs),
        )

    # ---------------------------------------------------- what should not be there, and how far to trust it

    if TYPE_CHECKING:
        detect = _typed(_detect)
        retrieve = _typed(_retrieve)
        diagnose = _typed(_diagnose)
    else:
        detect = _Verb("grasp.audit.detect")
        retrieve = _Verb("grasp.audit.retrieval")
        diagnose = _Verb("grasp.audit.diagnose")

    def report(
        self,
        out: "Place",
        *,
        by: Sequence[str] = (),
        targets: Sequence[str] | None = None,
        protocol: "Protocol" = None,
        runs: "Runs" = None,
        partial: bool = False,
        selection: "Place | None" = None,
        mixture: "Place | None" = None,
        suspects: "Place | None" = None,
        previous: "Sequence[Artifact | Place]" = (),
        command: str | None = None,
    ) -> Path:
        """Write one HTML page of all of it, with a live what-if; see `grasp.report.verb.report`."""
        from grasp.report.verb import report
        from grasp.runs.environment import as_runs

        return report(
            self.files,
            out,
            by=by,
            targets=targets,
            protocol=protocol,
            runs=None if runs is None else as_runs(runs),
            partial=partial,
            selection=selection,
            mixture=mixture,
            suspects=suspects,
            previous=[(one if isinstance(one, Artifact) else Artifact.open(one)).files for one in previous],
            command=command,
        )

    def info(self) -> "ArtifactInfo":
        """What is in it: arrays and their sizes, settings, fingerprints, what was left out."""
        from grasp.artifact.inspection import info

        return info(self.path)

    def verify(self) -> "VerifyReport":
        """Compare every file with its checksum; `.ok`, or `.problems`."""
        from grasp.artifact.inspection import verify

        return verify(self.path)

    def _intervals(self, runs: "Runs") -> "FitIntervals | None":
        """What fits intervals in nats to retrained subsets; none without them."""
        if runs is None:
            return None
        from grasp.runs.environment import as_runs
        from grasp.runs.trust import fit_intervals

        return partial(fit_intervals, artifact=self.files, environment=as_runs(runs))
