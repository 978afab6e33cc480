"""Which rows teach a target most? The verb `score`: rows in the order that `select` takes them.

A row's effect is its relevance to the target as the protocol counts it, mean 0 and standard deviation 1 over the rows:
above 0 it helps more than the corpus does on average. Ordered once, whatever is asked.
Shape letters: N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import (
    SHORT,
    length_column,
    only_target,
    ranked,
    ranked_table,
    row_tokens,
    short_of,
    short_rows,
    write_ranked,
)
from grasp.artifact.where import LabelTable
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.methods.registry import GRASP, configured_methods, method_rows
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.progress import Progress
from grasp.results import Result
from grasp.runs.alignment import runs_beside
from grasp.runs.retrained import Environment
from grasp.runs.table import RunTable
from grasp.text import listed
from grasp.yaml_files import read_yaml

PRINTED = 100


@dataclass(frozen=True, eq=False, repr=False)
class RankedRows(Result):
    """The answer of `score`: rows in order, with their labels and the beginning of their text."""

    most: ClassVar[int] = PRINTED
    by: str = "effect"  # what they are ordered by
    shown: tuple[str, ...] = ()  # columns that are printed, in this order
    lines: int = 0  # rows in all; `table` has none where they were written to a file

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        rows = self.table.slice(0, self.most).to_pylist()
        names = ["text" if name == "snippet" else name for name in self.shown]
        most = max((abs(row[self.by]) for row in rows), default=0.0)
        spelled = "{:+z.3f}" if self.by == "effect" or 0.1 <= most < 1e6 else "{:+.3e}"  # one for the whole column

        def cell(name: str, value: Any) -> str:
            if value is None:
                return "-"
            return spelled.format(value) if name == self.by else str(value)

        return names, [[cell(name, row[name]) for name in self.shown] for row in rows]


def score(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    top: int | None = None,
    bottom: int = 0,
    where: str | None = None,
    min_tokens: int = 0,
    labels: str | Sequence[str] | None = None,
    out: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    unit: str | None = None,
    match: str | None = None,
    method: str | None = None,
    method_settings: Path | str | None = None,
    checkpoints: Sequence[Path | str] = (),
    runs: Environment | RunTable | Path | str | None = None,
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> RankedRows:
    """Which rows teach a target most, and which least?

    A row's effect is its relevance as the protocol counts it: above 0 it helps more than the corpus does on average.

    Args:
        target: target that is asked about. Default: the only one.
        top: so many of the most helpful rows. In Python neither this nor `bottom`: all rows, best first.
        bottom: so many of the most harmful rows.
        where: condition on labels: only these rows are ranked, e.g. "topic = 'Games'".
        min_tokens: pass over shorter rows: their relevance is noisy. Of conversations, tokens with loss.
        labels: label columns to show, separated by commas. Default: the first two.
        out: file that the rows are written to, Parquet in bounded memory; the result then shows none.
        protocol: protocol to predict with. Default: the one that ships.
        unit: rank for one unit of the target, by its unit_id.
        match: by one kernel, e.g. output_layer or gradient.
        method: rank by a published method, e.g. bm25; see `grasp methods`.
        method_settings: YAML of settings by method, or by a label of your own; see `grasp methods`.
        checkpoints: checkpoint, or training run, for methods that look at several. Default: beside the model.
        runs: retrained subsets, for a method that is made from them.
        cache: where scores of methods are kept. Default: in the artifact.
    Raises:
        ProtocolError: no such target, unit or kernel.
        SettingsError: no such label or method, no row that is as long, or what has no meaning beside the rest.
    """
    if out is not None:
        check_outputs({"out": Path(out)}, artifact.reads, tables=["out"])
    if top == bottom == 0:
        raise SettingsError("top: got 0 and no bottom; ask for one row or more")
    of_method = {"runs": runs, "checkpoints": checkpoints, "method_settings": method_settings, "cache": cache}
    named, published = [name for name, given in of_method.items() if given not in (None, (), [])], None
    if method is None and named:
        raise SettingsError(f"{', '.join(named)}: no meaning without method; name one, or leave it out")
    if method == GRASP:
        raise SettingsError("method: got grasp, whose relevance ranks without it; leave method out, see match")
    if method is not None:
        configured = {} if method_settings is None else read_yaml(Path(method_settings))
        origin = "method" if method_settings is None else str(method_settings)
        (published,) = configured_methods([method], configured, origin)
        for name, needed in (("runs", "environment"), ("checkpoints", "checkpoints")):
            if name in named and needed not in published.method.requires:
                raise SettingsError(f"{name}: no meaning with method {method}, which looks at none; leave it out")
    beside = None if runs is None else runs_beside(artifact, runs)
    target = only_target(artifact, target)
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    if idle := [name for name, given in (("match", match), ("unit", unit)) if given is not None and published]:
        raise SettingsError(f"{idle[0]}: no meaning with method; leave one of them out")
    known = LabelTable(artifact.rows_path)
    if labels is None:
        shown = artifact.manifest.details.get("labels", [])[:2]
    else:
        shown = listed(labels, known.columns)
        if unknown := [name for name in shown if name not in known.columns]:
            raise SettingsError(f"labels: got {', '.join(unknown)}; the artifact has {', '.join(known.columns)}")
    among_N = None if where is None else known.matching(where).mask_N
    if min_tokens:
        long_N = row_tokens(artifact, length_column(artifact)) >= min_tokens
        among_N = long_N if among_N is None else among_N & long_N
        if not among_N.any():
            raise SettingsError(f"min_tokens: got {min_tokens}, no row of {artifact.where} is as long")
    values_N: NDArray[np.floating[Any]]
    if published is not None:
        rows = method_rows(
            artifact, published, environment=beside, checkpoints=checkpoints, cache=cache, progress=progress
        )
        by, values_N, said = published.label, rows.means(target), "score of the method, in its own unit"
    else:
        predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
        by, values_N = "effect", predictor.effect_NT[:, 0]
        said = "relevance in standard deviations over the rows, 0 = the corpus average; "
        said += f"protocol {predictor.protocol.name}"
    n_ranked = len(values_N) if among_N is None else int(among_N.sum())
    count = (0 if bottom else n_ranked) if top is None else top
    best, worst = ranked(values_N, among_N=among_N, count=count), ranked(-values_N, among_N=among_N, count=bottom)
    chosen = np.concatenate([best, worst])
    if out is not None:
        write_ranked(artifact, values_N, chosen, Path(out), by)
    kinds = [(len(best), "helpful"), (len(worst), "harmful")]
    asked = " and ".join(f"the {n:,} most {kind}" for n, kind in kinds if n) if top is not None or bottom else "all"
    notes, first = [f"{by}: {said}"], min(PRINTED, len(chosen))
    if short := short_rows(artifact, chosen[:first]):
        these = "these" if first == len(chosen) else f"the first {first:,}"
        noisy = f"{short_of(length_column(artifact))}, and their relevance is noisy: --min-tokens {SHORT} passes over"
        notes.insert(0, f"{short:,} of {these} rows have fewer than {SHORT} {noisy} them")
    return RankedRows(
        ranked_table(artifact, chosen if out is None else chosen[:0], values_N, by),
        f"{asked} of {n_ranked:,} rows for {target if unit is None else f'{unit} of {target}'}, by {by}",
        tuple(notes),
        by=by,
        shown=(by, "row_id", *shown, "snippet"),
        lines=len(chosen),
    )
