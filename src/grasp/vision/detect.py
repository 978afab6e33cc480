"""Detect images that look mislabelled to a trusted target. Start with `detect`.

A row is a labelled image, a unit a trusted one; relevance is the predicted decrease of a unit's loss from training on a
row. The statistics of thresholds are in `grasp.vision.detection`.

Shape letters: N rows, E units.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from grasp.arrays import F64, I64, Bool
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, leak_notes, only_target
from grasp.errors import ArtifactError, CorpusError, SettingsError
from grasp.moments import StreamingMoments
from grasp.progress import Progress
from grasp.results import Result
from grasp.vision.detection import (
    Threshold,
    conformal_threshold,
    estimate_threshold,
    matching_threshold,
    mean_ranks,
)
from grasp.vision.images import (
    CLASS_LABEL,
    HASH_LABEL,
    ImageRows,
    ImageStore,
    decode_image,
)
from grasp.vision.neighbours import MAX_CANDIDATES, disagreement
from grasp.vision.reader import ImageReader

NEIGHBOURS = 10  # nearest rows whose labels are compared
FALSE_POSITIVES = 0.01  # default share of correct rows that may be flagged
DEFAULT_TOP = 10
MIN_ROWS = 10  # fewer rows have no meaningful distribution
PICTURE_PIXELS = 96  # pixels of the longer side of an image


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Suspects(Result):
    """All rows, the most suspicious first.

    Attributes:
        table: rank, row_id, flagged, and the scores (higher is more suspicious; rows are ranked by the last one).
        target: trusted target.
        ranking: score by which rows are ranked.
        threshold: threshold of the ranking, or of the score that determines how many rows are flagged.
        shown: the first rows with class and description.
        scores: scores by name, (N,), in the order of the artifact's rows.
        figures: the first images.
    """

    target: str
    ranking: str
    threshold: Threshold
    shown: pa.Table
    scores: Mapping[str, F64]

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in self.shown.to_pylist()
        ]
        return list(self.shown.column_names), rows

    def _below(self) -> Sequence[str]:
        return self.notes


def detect(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    top: int = DEFAULT_TOP,
    false_positives: float = FALSE_POSITIVES,
    clean: str | None = None,
    match: str | None = None,
    progress: Progress | None = None,
) -> Suspects:
    """Find images that look wrong to a trusted target.

    Mislabelled images have low relevance to a trusted target, and resemble images of another class.

    In Python the result has up to three scores. `low_relevance` is minus the mean relevance to the units, each
    standardised over the rows. `neighbour_disagreement` is the share of a row's nearest neighbours in the hidden sketch
    with another class, and `fused` the mean of the two ranks. A trusted image that is also a row is an error.

    Args:
        artifact: artifact of the corpus and the trusted target.
        target: trusted target. Default: the only one.
        top: rows to show.
        false_positives: share of correct rows that may be flagged.
        clean: column that is true for rows verified to be correct, which determine the threshold.
        match: one kernel, e.g. gradient or output_layer. Default: output_layer if it was built, else the first kernel.
        progress: receives stages and numbers of rows.
    Raises:
        ArtifactError: the rows are not images, no such target, column or kernel, or a trusted image is also a row.
        SettingsError: a number out of range, or too few rows.
    Memory: a few numbers per row, the hidden sketch, and a block of relevance.
    """
    if not isinstance(artifact.reader, ImageReader):
        raise ArtifactError(
            f"{artifact.location}: its rows are texts, expected images; wrong texts are not found by these scores "
            "(experiments/safety)"
        )
    target = only_target(artifact, target)
    n_rows = artifact.n_rows
    if top < 0:
        raise SettingsError(f"top: got {top}, expected 0 or more")
    if n_rows < MIN_ROWS:
        raise SettingsError(
            f"{artifact.location}: has {n_rows} rows, expected at least {MIN_ROWS}; read them instead, or build the "
            "artifact on more rows"
        )
    array = relevance_array(artifact, match)
    correct_N = None if clean is None else _boolean_column(artifact, clean)
    progress = progress or Progress()
    _refuse_copies(artifact, target)
    low_relevance_N = low_relevance(artifact, array, target, progress)
    class_scores, class_notes = _class_scores(artifact, low_relevance_N, progress)
    scores = {"low_relevance": low_relevance_N} | class_scores
    ranking, ranking_N = list(scores.items())[-1]  # `fused` if the classes are informative, else `low_relevance`
    if correct_N is not None:
        try:
            threshold = conformal_threshold(ranking_N, correct_N, false_positives)
        except SettingsError as err:
            raise SettingsError(f"clean {clean}: {err}") from err
    else:
        # Ranks have no null distribution: the threshold of `low_relevance` determines how many rows are flagged.
        threshold = estimate_threshold(low_relevance_N, false_positives)
        if ranking != "low_relevance":
            threshold = matching_threshold(ranking_N, threshold)
    notes = (
        *leak_notes(artifact, [target]),
        *class_notes,
        "higher scores are more suspicious",
        f"low_relevance: minus the relevance of kernel {array.removeprefix('relevance_')}, without the protocol; "
        "--match selects another kernel",
        *threshold.notes,
    )
    order_N = np.argsort(-ranking_N, kind="stable")
    row_ids = pa.chunked_array([batch.column(0) for batch in artifact.row_batches(["row_id"])])
    table = pa.table(
        {
            "rank": np.arange(1, n_rows + 1),
            "row_id": row_ids.take(pa.array(order_N)),
            "flagged": (ranking_N > threshold.value)[order_N],
            **{name: score_N[order_N] for name, score_N in scores.items()},
        }
    )
    head, first_rows = table.slice(0, top), artifact.rows(order_N[:top])
    flagged, chance = "not significant", f"about {threshold.expected_false:,.0f} of {n_rows:,} rows"
    headline = (
        f"No suspects by {ranking}: {threshold.n_flagged:,} flagged, not significantly more than expected by "
        f"chance ({chance})."
    )
    if threshold.beyond_chance:
        flagged, headline = "yes", f"{threshold.n_flagged:,} suspects by {ranking}; expected by chance: {chance}."
    shown = pa.table(
        {
            "rank": head["rank"],
            ranking: head[ranking],
            "flagged": [flagged if is_flagged else "no" for is_flagged in head["flagged"].to_pylist()],
            "row_id": head["row_id"],
            CLASS_LABEL: first_rows[CLASS_LABEL],
            "image": first_rows["snippet"],
        }
    )
    return Suspects(
        table,
        headline,
        notes,
        target=target,
        ranking=ranking,
        threshold=threshold,
        shown=shown,
        scores=scores,
        figures=tuple(zip(head["row_id"].to_pylist(), _picture_urls(artifact, order_N[:top]), strict=True)),
    )


def _picture_urls(artifact: ArtifactReader, index: I64) -> list[str | None]:
    """Return rows as data URLs of PNG; None if the image cannot be read or the artifact stores no images."""
    try:
        store = ImageStore.open(artifact.tokens_path)
    except CorpusError:
        return [None] * len(index)  # built with keep_tokens: false
    rows = store.rows(index)
    assert isinstance(rows, ImageRows)
    urls: list[str | None] = []
    for image in map(decode_image, rows.encoded):
        if image is None:
            urls.append(None)
            continue
        png = io.BytesIO()
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        image.save(png, "PNG")  # without the metadata of the file
        urls.append(f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}")
    return urls


def _refuse_copies(artifact: ArtifactReader, target: str) -> None:
    """Raise an error if trusted images have the pixels of rows, which would make any score against them meaningless."""
    units = artifact.units.take(pa.array(artifact.unit_columns(target))).to_pylist()
    # the prompt of a trusted image is "image HASH, SIZE"
    unit_of = {unit["prompt"].split()[1].rstrip(","): unit["unit_id"] for unit in units}
    copies = [
        (unit_of[digest], i) for i, digest in enumerate(_column_values(artifact, HASH_LABEL)) if digest in unit_of
    ]
    if copies:
        first_rows = np.array([row for _, row in copies[:DEFAULT_TOP]], dtype=np.int64)
        names = artifact.rows(first_rows)["row_id"].to_pylist()
        listed = ", ".join(f"{unit} = {name}" for (unit, _), name in zip(copies, names, strict=False))
        more = f" and {len(copies) - DEFAULT_TOP} more" if len(copies) > DEFAULT_TOP else ""
        raise ArtifactError(
            f"{artifact.location}: {len({unit for unit, _ in copies})} of {len(units)} trusted units of {target} are "
            f"rows of the corpus: {listed}{more}; remove them from one of the two and rebuild"
        )


def _class_scores(
    artifact: ArtifactReader, low_relevance_N: F64, progress: Progress
) -> tuple[dict[str, F64], list[str]]:
    """Return the scores `neighbour_disagreement` and `fused`, or none if the former is constant; and notes."""
    class_N = label_column(artifact, CLASS_LABEL).codes_N.astype(np.int64)
    _, sketch_ND = next(artifact.array_blocks("hidden_sketch", block_rows=artifact.n_rows))
    disagreements = disagreement(sketch_ND, class_N, NEIGHBOURS, progress)
    n_singletons = int(disagreements.is_singleton_N.sum())
    if disagreements.share_N.min() == disagreements.share_N.max():
        reason = "every row has a class of its own" if n_singletons else "the class is the same for all neighbours"
        return {}, [f"{reason}: rows are ranked by low_relevance alone"]
    notes = [f"{n_singletons} rows have a unique class: their disagreement is the median"] if n_singletons else []
    if disagreements.recall < 1:
        notes.append(
            f"neighbours were searched for among {MAX_CANDIDATES:,} rows with similar hidden sketches: "
            f"{disagreements.recall:.0%} of the {NEIGHBOURS} nearest were found"
        )
    return {
        "neighbour_disagreement": disagreements.share_N,
        "fused": mean_ranks([low_relevance_N, disagreements.share_N]),
    }, notes


def relevance_array(artifact: ArtifactReader, match: str | None) -> str:
    """Return the relevance array of a kernel. Default: output_layer if it was built, else the first kernel."""
    default = "output_layer" if "output_layer" in artifact.kernels else artifact.kernels[0]
    return artifact.relevance_name(match or default)


def low_relevance(artifact: ArtifactReader, array: str, target: str, progress: Progress | None = None) -> F64:
    """Return minus the mean relevance to the units of a target, each standardised over all rows, (N,)."""
    blocks = standardised_blocks(artifact, array, target, progress or Progress())
    return np.concatenate([-score_NE.mean(axis=1) for _, score_NE in blocks])


def standardised_blocks(
    artifact: ArtifactReader, array: str, target: str, progress: Progress
) -> Iterator[tuple[int, F64]]:
    """Yield the first row of each block, and relevance to the units of a target, (n, E), standardised over all rows.

    Two passes over the blocks: moments of every unit, then standardised scores. Memory: one block.
    """
    columns, n_rows = artifact.unit_columns(target), artifact.n_rows
    name = array.replace("_", " ")
    progress.stage(f"moments of {name}", rows=n_rows, tokens=None)
    moments = StreamingMoments()
    for _, block in artifact.array_blocks(array, columns=columns):
        moments.add(block)
        progress.advance(len(block), 0)
    scale_E = moments.mean_std.inverse_std_C
    progress.stage(name, rows=n_rows, tokens=None)
    for start, block in artifact.array_blocks(array, columns=columns):
        yield start, (block - moments.mean_C) * scale_E
        progress.advance(len(block), 0)


def _column_values(artifact: ArtifactReader, name: str) -> Iterator[Any]:
    """Yield the values of a column of the row table."""
    for batch in artifact.row_batches([name]):
        yield from batch.column(0).to_pylist()


def _boolean_column(artifact: ArtifactReader, name: str) -> Bool:
    """Read a column of true and false, or 1 and 0."""
    values = list(_column_values(artifact, name))
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            row = artifact.rows(np.array([i]))["row_id"][0].as_py()
            raise SettingsError(
                f"clean {name}: row {row} has {'no value' if value is None else repr(value)}, expected true or "
                "false, or 1 or 0, in every row; complete the column and rebuild"
            )
    return np.array(values, dtype=np.bool_)
