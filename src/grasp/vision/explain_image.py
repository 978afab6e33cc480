"""Explanations of image rows: the trusted images that contribute most to the effect of a row.

A row is a training image, and a unit is a trusted image of the target. The effect of a row on the target is a sum over
the units, and the artifact stores each term, so no model is needed. Pictures of rows come from the artifact, those of
trusted images from the files that the build read, if they still exist. Start with `explain_images`.

Shape letter: E units.
"""

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import indices_of_row_ids, only_target
from grasp.errors import CorpusError
from grasp.inspect.explanation import EffectTerms
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.results import Result
from grasp.settings import CorpusSettings
from grasp.targets.load import target_name
from grasp.text import signed
from grasp.vision.images import (
    CLASS_LABEL,
    ImageRows,
    ImageStore,
    decode_image,
    encode_png,
    hash_of_unit,
    pixel_hash,
    read_images,
)
from grasp.vision.settings import ClassifierSettings
from grasp.yaml_files import get_setting

MAX_NEAREST = 8  # trusted images that are shown
PICTURE_PIXELS = 96  # longer side of a picture, in pixels
ADDS_NOTE = "adds: contribution to the effect of the row; below 0: mostly similar images with another label"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ImageExplanation(Result):
    """Contributions of the trusted images to the effect of a row, largest absolute value first.

    `effect` = the sum of the column `contribution` + `average`, in standard deviations over the rows.

    Attributes:
        table: unit_id, image_class, contribution; one row per trusted image.
        row_class: label of the row.
        effect: effect of the row.
        average: minus the mean contribution of a row, so that the average row has effect 0.
        figures: the row, then the nearest trusted images.
    """

    row_id: str
    row_class: str
    target: str
    effect: float
    average: float

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        lines = self.table.slice(0, MAX_NEAREST).to_pylist()
        shown = [[signed(line["contribution"]), line["unit_id"], line["image_class"]] for line in lines]
        return ["adds", "trusted image", "its class"], shown

    def _below(self) -> Sequence[str]:
        more = len(self) - MAX_NEAREST
        return [*([f"... and {more:,} more"] if more > 0 else []), ADDS_NOTE, *self.notes]


def explain_images(
    artifact: ArtifactReader,
    target: str | None,
    rows: Sequence[str],
    *,
    unit: str | None = None,
    match: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
) -> list[ImageExplanation]:
    """Explain the effects of rows by trusted images; arguments as for `grasp.inspect.explain.explain`."""
    target = only_target(artifact, target)
    if match is not None:
        artifact.relevance_name(match)  # raises with the available names
    index = indices_of_row_ids(artifact, rows)
    predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
    units = artifact.units.take(pa.array(predictor.units.columns_E))
    terms_by_row = [EffectTerms.from_artifact(artifact, predictor, int(i)) for i in index]
    by_unit = [sum(terms.weights[kernel] * part_E for kernel, part_E in terms.stored.items()) for terms in terms_by_row]
    tables = [_table(units, np.asarray(contribution_E)) for contribution_E in by_unit]
    nearest = dict.fromkeys(name for table in tables for name in table["unit_id"].to_pylist()[:MAX_NEAREST])
    trusted, picture_notes = _trusted_pictures(artifact, target, units, list(nearest))
    row_images = row_pictures(artifact, index, PICTURE_PIXELS)
    classes = artifact.rows(index)[CLASS_LABEL].to_pylist()
    return [
        ImageExplanation(
            table,
            f"row {row}: effect {terms.effect:+z.3f} on {target} = trusted images "
            f"{terms.effect - terms.average:+z.3f}, minus the average row {-terms.average:+z.3f}",
            (*picture_notes, f"protocol {predictor.protocol.name}"),
            row_id=row,
            row_class=str(row_class),
            target=target,
            effect=terms.effect,
            average=terms.average,
            figures=(
                (f"{row}: {row_class}", picture_url(picture)),
                *(
                    (
                        f"{signed(unit['contribution'])} {unit['unit_id']}: {unit['image_class']}",
                        picture_url(trusted.get(unit["unit_id"])),
                    )
                    for unit in table.slice(0, MAX_NEAREST).to_pylist()
                ),
            ),
        )
        for row, terms, table, picture, row_class in zip(rows, terms_by_row, tables, row_images, classes, strict=True)
    ]


def _table(units: pa.Table, contribution_E: NDArray[np.float64]) -> pa.Table:
    """Return units with their contributions, largest absolute value first."""
    table = units.select(["unit_id", "completion"]).rename_columns(["unit_id", "image_class"])
    order_E = np.argsort(-np.abs(contribution_E), kind="stable")
    return table.append_column("contribution", pa.array(contribution_E)).take(pa.array(order_E))


def row_pictures(artifact: ArtifactReader, index: NDArray[np.int64], largest: int) -> list[bytes | None]:
    """Return rows as PNG, longer side at most `largest` pixels; None if the artifact stores no images."""
    try:
        store = ImageStore.open(artifact.tokens_path)
    except CorpusError:
        return [None] * len(index)  # built with keep_tokens: false
    rows = store.rows(index)
    assert isinstance(rows, ImageRows)
    images = [decode_image(encoded) for encoded in rows.encoded]
    return [None if image is None else encode_png(image, largest) for image in images]


def _trusted_pictures(
    artifact: ArtifactReader, target: str, units: pa.Table, names: Sequence[str]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return PNG by unit_id, and a note if some are missing.

    The files of the target are read again. They may have changed since the build, so an image is identified by the hash
    of its pixels.
    """
    prompts = dict(zip(units["unit_id"].to_pylist(), units["prompt"].to_pylist(), strict=True))
    hashes = {name: hash_of_unit(prompts[name]) for name in names}
    settings, requested_hashes = artifact.manifest.settings, set(hashes.values())
    reader = artifact.manifest.details["reader"]
    picture_by_hash: dict[str, bytes] = {}
    target_paths = [str(name) for name in settings.get("targets", {}).get("names", ())]
    paths = [name for name in target_paths if target_name(name) == target]
    for path in paths:
        if not os.path.exists(path):
            continue
        try:
            corpus = CorpusSettings.model_validate(settings["corpus"] | {"path": path, "limit": None})
            classifier = ClassifierSettings.model_validate(get_setting(settings, f"model.{reader}"))
            for record in read_images(corpus, classifier, fetch=False):
                image = None if record.encoded is None else decode_image(record.encoded)
                if image is not None and (digest := pixel_hash(image)) in requested_hashes:
                    picture_by_hash[digest] = encode_png(image, PICTURE_PIXELS)
                if len(picture_by_hash) == len(requested_hashes):
                    break
        except (CorpusError, ValidationError):  # the settings of an artifact are untrusted
            continue
    pictures = {name: picture_by_hash[digest] for name, digest in hashes.items() if digest in picture_by_hash}
    if len(pictures) == len(hashes):
        return pictures, ()
    location = f"the build read them from {', '.join(paths)}" if paths else "the artifact does not record their files"
    return pictures, (f"{len(hashes) - len(pictures)} of these trusted images are not available: {location}",)


def picture_url(picture: bytes | None) -> str | None:
    """Return a PNG as a data URL."""
    return None if picture is None else f"data:image/png;base64,{base64.b64encode(picture).decode()}"
