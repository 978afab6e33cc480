"""Rank rows by their effect on a target: the function `score` behind `Artifact.score`.

The effect of a row is its relevance to the target under the protocol, with mean 0 and standard deviation 1 over the
rows: above 0, it helps more than the average row. The order is that of `select` for additive protocols.
Shape letters: N rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from grasp.arrays import I64, Bool, Floats
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import (
    MIN_RELIABLE_TOKENS,
    count_short_rows,
    length_column,
    length_unit,
    only_target,
    ranked,
    ranked_table,
    row_documents,
    row_lengths,
    write_ranked,
)
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.methods.registry import GRASP, ConfiguredMethod, configure_methods, score_artifact
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.progress import Progress
from grasp.results import Result
from grasp.runs.imported_runs import bind_runs
from grasp.runs.table import RunTable
from grasp.runs.training_runs import TrainingRuns

MAX_ROWS_PRINTED = 100
COMPARED = 1_000  # rows that are compared with each other
SEQUENCE = 3  # words of a sequence; near-copies share
COPY_SHARE = 0.8  # of the sequences at the beginning of their text, and
COPY_DIFFERENCE = 0.5  # differ in their value by at most as many standard deviations


@dataclass(frozen=True, eq=False, repr=False)
class RankedRows(Result):
    """Ranked rows, with their labels and the beginning of their text.

    Attributes:
        max_printed: maximum number of printed rows.
        by: name of the ranking column.
        printed_columns: columns that are printed, in order.
        lines: number of ranked rows; `table` is empty if they were written to a file.
    """

    max_printed: ClassVar[int] = MAX_ROWS_PRINTED
    by: str = "effect"
    printed_columns: tuple[str, ...] = ()
    lines: int = 0

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        rows = self.table.slice(0, self.max_printed).to_pylist()
        names = ["text" if name == "snippet" else name for name in self.printed_columns]
        largest = max((abs(row[self.by]) for row in rows), default=0.0)
        # one format for the whole column
        number_format = "{:+z.3f}" if self.by == "effect" or 0.1 <= largest < 1e6 else "{:+.3e}"

        def cell(name: str, value: Any) -> str:
            if value is None:
                return "-"
            return number_format.format(value) if name == self.by else str(value)

        return names, [[cell(name, row[name]) for name in self.printed_columns] for row in rows]


def score(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    top: int | None = None,
    bottom: int = 0,
    where: str | None = None,
    min_tokens: int = 0,
    out: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    unit: str | None = None,
    match: str | None = None,
    method: str | None = None,
    method_settings: Path | str | None = None,
    checkpoints: Sequence[Path | str] = (),
    runs: TrainingRuns | RunTable | Path | str | None = None,
    progress: Progress | None = None,
) -> RankedRows:
    """Rank the rows that help a target most, and those that harm it most.

    The effect of a row is its relevance under the protocol: above 0, it helps more than the average row of the corpus.
    The most helpful and the most harmful rows are ranked separately, so a row is listed twice if more rows are
    requested than there are. `top` and `bottom` count one row of each document, and near-copies once.

    Args:
        target: target name. Default: the only target.
        top: number of most helpful rows. In Python, the default is all rows, best first, or none with `bottom`.
        bottom: number of most harmful rows.
        where: condition on labels; rank only these rows, e.g. "topic = 'Games'".
        min_tokens: skip shorter rows, whose relevance is noisy. For conversations, tokens with loss.
        out: file for the rows; Parquet is written in bounded memory. The result then contains no rows.
        protocol: protocol to rank with. Default: the built-in protocol.
        unit: rank for a single unit of the target, by its unit_id.
        match: rank by a single kernel, e.g. output_layer or gradient.
        method: rank by a published method, e.g. bm25; see `grasp methods`.
        method_settings: YAML of settings by method, or by a label of your own; see `grasp methods`.
        checkpoints: checkpoint, or training run, for methods that use several. Default: next to the model.
        runs: retrained subsets, for methods that are fitted to them.
        progress: receives the progress of a published method.
    Raises:
        ProtocolError: no such target, unit or kernel.
        SettingsError: no such method, no row has `min_tokens` tokens, or options exclude each other.
    """
    if out is not None:
        check_outputs({"out": Path(out)}, artifact.protected_paths, tables=["out"])
    if top == bottom == 0:
        raise SettingsError("top: got 0 and no bottom; request at least one row")
    if match is not None:
        artifact.relevance_name(match)  # raises with the list of kernels
    method_options = {"runs": runs, "checkpoints": checkpoints, "method_settings": method_settings}
    published = _published_method(method, method_options, {"match": match, "unit": unit})
    target = only_target(artifact, target)
    among_N = None if where is None else LabelTable(artifact.rows_path).matching(where).mask_N
    if min_tokens:
        among_N = _long_rows(artifact, min_tokens, among_N)
    if published is not None:
        bound_runs = None if runs is None else bind_runs(artifact, runs)
        method_scores = score_artifact(artifact, published, runs=bound_runs, checkpoints=checkpoints, progress=progress)
        by = published.label
        values_N: Floats = method_scores.means(target)
        description = "score of the method, on its own scale"
    else:
        predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
        scale = "relevance in standard deviations over the rows, 0 = the corpus average"
        by, values_N = "effect", predictor.effect_NT[:, 0]
        description = f"{scale}; {predictor.protocol_text}"
    n_ranked = len(values_N) if among_N is None else int(among_N.sum())
    n_best = (0 if bottom else n_ranked) if top is None else top
    best, worst = ranked(values_N, among_N=among_N, count=n_best), np.empty(0, np.int64)
    if top is not None or bottom:
        best, worst = (
            distinct_rows(artifact, sign * values_N, count, among_N) for sign, count in ((1, n_best), (-1, bottom))
        )
    ranking = np.concatenate([best, worst])
    if out is not None:
        write_ranked(artifact, values_N, ranking, Path(out), by)
    counts = [(len(best), "helpful"), (len(worst), "harmful")]
    if top is not None or bottom:
        requested = " and ".join(f"the {n:,} most {adjective}" for n, adjective in counts if n)
    else:
        requested = "all"
    notes = [f"{by}: {description}"]
    if not np.array_equal(best, ranked(values_N, among_N=among_N, count=n_best)):
        notes.append("one row of each document, and near-copies once; --out without --top writes all rows")
    n_printed, labels = min(MAX_ROWS_PRINTED, len(ranking)), artifact.manifest.details.get("labels", [])
    if n_short := count_short_rows(artifact, ranking[:n_printed]):
        these = "these" if n_printed == len(ranking) else f"the first {n_printed:,}"
        notes.insert(
            0,
            f"{n_short:,} of {these} rows have fewer than {MIN_RELIABLE_TOKENS} "
            f"{length_unit(length_column(artifact))}, so their relevance is noisy: --min-tokens {MIN_RELIABLE_TOKENS} "
            "skips them",
        )
    return RankedRows(
        ranked_table(artifact, ranking if out is None else ranking[:0], values_N, by),
        f"{requested} of {n_ranked:,} rows for {target if unit is None else f'{unit} of {target}'}, by {by}",
        tuple(notes),
        by=by,
        printed_columns=(by, "row_id", *[label for label in labels if label != by][:2], "snippet"),
        lines=len(ranking),
    )


def distinct_rows(artifact: ArtifactReader, values_N: Floats, count: int, among_N: Bool | None = None) -> I64:
    """Return the `count` rows with the highest values, at most one of each document and of near-copies.

    Near-copies share most of the beginning of their text and have nearly the same value. They are only searched among
    the first COMPARED rows.
    """
    order, largest_gap = ranked(values_N, among_N=among_N), COPY_DIFFERENCE * values_N.std()
    _, first = np.unique(row_documents(artifact)[order], return_index=True)
    order = order[np.sort(first)]
    n_compared = 0 if artifact.reader is not None else min(3 * count + 20, COMPARED)
    snippets = artifact.rows(order[:n_compared])["snippet"].to_pylist()
    owner_of = dict[tuple[str, ...], int]()  # first row that contains these words in sequence
    is_copy = np.zeros(len(order), np.bool_)
    for i, snippet in enumerate(snippets):
        words = (snippet or "").lower().split()
        sequences = {tuple(words[k : k + SEQUENCE]) for k in range(max(1, len(words) - SEQUENCE + 1))} - {()}
        owners = Counter(owner_of[sequence] for sequence in sequences if sequence in owner_of)
        is_copy[i] = any(
            n_shared >= COPY_SHARE * len(sequences) and values_N[order[j]] - values_N[order[i]] <= largest_gap
            for j, n_shared in owners.most_common(1)
        )
        owner_of |= dict.fromkeys(sequences - owner_of.keys(), i)
    return np.asarray(order[~is_copy][:count])


def _published_method(
    name: str | None, options: Mapping[str, Any], excluded: Mapping[str, str | None]
) -> ConfiguredMethod | None:
    """Return a published method with its settings; None: the rows are ranked by a kernel or protocol."""
    published = None
    if name == GRASP:
        raise SettingsError("method: got grasp, which is the default; drop method, or pass match to select a kernel")
    if name is not None:
        (published,) = configure_methods([name], options["method_settings"], "method")
    used = () if published is None else ("method_settings", *published.method.requires)
    if unused := ", ".join(key for key, value in options.items() if value not in (None, (), []) and key not in used):
        reason = "requires method; add it" if published is None else f"not used by method {published.label}"
        raise SettingsError(f"{unused}: {reason}, or drop the option")
    for key, value in excluded.items():
        if published is not None and value is not None:
            raise SettingsError(f"{key}: cannot be combined with method; drop one of them")
    return published


def _long_rows(artifact: ArtifactReader, min_tokens: int, among_N: Bool | None) -> Bool:
    """Return whether each row has `min_tokens` tokens, among the rows of a mask."""
    length_N = row_lengths(artifact)
    if among_N is not None:
        length_N = length_N * among_N
    long_N = np.asarray(length_N >= min_tokens)
    if not long_N.any():
        noun = "row" if among_N is None else "selected row"
        raise SettingsError(
            f"min_tokens: got {min_tokens}; no {noun} of {artifact.location} has as many "
            f"{length_unit(length_column(artifact))}; the longest has {length_N.max():,}"
        )
    return long_N
