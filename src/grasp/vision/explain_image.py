"""Why does an image count for a target? The trusted images that it bears on most, beside it.

An image has no words to shade: its effect is a sum over the trusted images, and the artifact holds each part. The
pictures come from the artifact's rows, and from where the build read the trusted ones, if they are still there.
Shape letter: E units.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import only_target, row_index
from grasp.build.modality import Pictured
from grasp.corpus.labels import CLASS_LABEL
from grasp.errors import CorpusError
from grasp.inspect.explanation import EffectParts
from grasp.predict.predictor import additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.settings import CorpusSettings
from grasp.targets.load import target_name
from grasp.text import plain, signed
from grasp.vision.images import ImageStore, decode_image, pixel_hash, png, read_images

NEAREST = 8  # trusted images that are shown
LARGEST = 96  # pixels of a picture's longer side
READING = "adds: what the trusted image adds to the row's effect; below 0: mostly alike, and labelled otherwise"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ImageExplanation(Pictured):
    """The trusted images that a row bears on, those that it bears on most, either way, first.

    `effect` = the sum of the column `contribution` + `average`, in standard deviations over the rows.

    Attributes:
        table: unit_id, image_class, contribution: one line a trusted image.
        row_class: what the row is labelled as.
        effect: of the row.
        average: minus what a row adds on average, so that the average row has effect 0.
        pictures: PNG of the row, by its row_id, and of the nearest trusted images, by unit_id, as far as they are
            at hand.
    """

    row_id: str
    row_class: str
    target: str
    effect: float
    average: float
    pictures: Mapping[str, bytes]

    @property
    def nearest(self) -> list[tuple[str, str | None]]:
        """What to write below each picture, the row first, and the picture as a URL of itself, if there is one."""
        own = f"{self.row_id}: {self.row_class}", picture_url(self.pictures.get(self.row_id))
        trusted = self.table.slice(0, NEAREST).to_pylist()
        return [
            own,
            *(
                (
                    f"{signed(one['contribution'])} {one['unit_id']}: {one['image_class']}",
                    picture_url(self.pictures.get(one["unit_id"])),
                )
                for one in trusted
            ),
        ]

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        lines = self.table.slice(0, NEAREST).to_pylist()
        shown = [[signed(one["contribution"]), one["unit_id"], one["image_class"]] for one in lines]
        return ["adds", "trusted image", "its class"], shown

    def _below(self) -> Sequence[str]:
        more = len(self) - NEAREST
        return [*([f"... and {more:,} more"] if more > 0 else []), READING, *self.notes]

    def _repr_html_(self) -> str:
        figures = [
            f'<figure style="display:inline-block;margin:4px;width:{LARGEST + 24}px;font-size:small">'
            f'<img src="{url}" alt=""><figcaption>{escape(plain(caption))}</figcaption></figure>'
            for caption, url in self.nearest
            if url is not None
        ]
        return "".join(figures) + super()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures, as JSON has it."""
        names = ("target", "row_id", "row_class", "effect", "average")
        told = {name: getattr(self, name) for name in names}
        return told | {"trusted": self.table.to_pylist(), "notes": list(self.notes)}


def explain_images(
    artifact: ArtifactReader,
    target: str | None,
    rows: Sequence[str],
    *,
    unit: str | None = None,
    match: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
) -> list[ImageExplanation]:
    """The trusted images beside each of some rows, from the artifact alone; see `grasp.inspect.explain`."""
    target = only_target(artifact, target)
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    index = row_index(artifact, rows)
    predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
    units = artifact.units.take(pa.array(predictor.units.columns_E))
    parts = [EffectParts.from_artifact(artifact, predictor, int(i)) for i in index]
    tables = [_table(units, one.by_unit_E) for one in parts]
    nearest = dict.fromkeys(name for table in tables for name in table["unit_id"].to_pylist()[:NEAREST])
    trusted, why = _trusted_pictures(artifact, target, units, list(nearest))
    own = row_pictures(artifact, index, LARGEST)
    classes = artifact.rows(index)[CLASS_LABEL].to_pylist()
    return [
        ImageExplanation(
            table,
            f"row {row}: effect {one.effect:+z.3f} on {target}. The trusted images add "
            f"{one.effect - one.average:+z.3f}; the average row's {-one.average:+z.3f} is taken off",
            (*why, f"protocol {predictor.protocol.name}"),
            row_id=row,
            row_class=str(row_class),
            target=target,
            effect=one.effect,
            average=one.average,
            pictures=trusted | ({} if picture is None else {row: picture}),
        )
        for row, one, table, picture, row_class in zip(rows, parts, tables, own, classes, strict=True)
    ]


def _table(units: pa.Table, adds_E: NDArray[np.float64]) -> pa.Table:
    """Units with what each adds, that which weighs most first."""
    table = units.select(["unit_id", "completion"]).rename_columns(["unit_id", "image_class"])
    order_E = np.argsort(-np.abs(adds_E), kind="stable")
    return table.append_column("contribution", pa.array(adds_E)).take(pa.array(order_E))


def row_pictures(artifact: ArtifactReader, index: NDArray[np.int64], largest: int) -> list[bytes | None]:
    """Rows as PNG, the longer side `largest` pixels at most; none where the artifact keeps no images."""
    try:
        store = ImageStore.open(artifact.tokens_path)
    except CorpusError:
        return [None] * len(index)  # built with keep_tokens: false
    images = [decode_image(encoded) for encoded in store.rows(index).encoded]
    return [None if image is None else png(image, largest) for image in images]


def _trusted_pictures(
    artifact: ArtifactReader, target: str, units: pa.Table, names: Sequence[str]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """PNG by unit_id, each proved by the hash of its pixels; and what to say where one is missing."""
    prompts = dict(zip(units["unit_id"].to_pylist(), units["prompt"].to_pylist(), strict=True))
    hashes = {name: prompts[name].split()[1].rstrip(",") for name in names}  # "image HASH, SIZE"
    settings, wanted, found = artifact.manifest.settings, set(hashes.values()), dict[str, bytes]()
    names_there = [str(name) for name in settings.get("targets", {}).get("names", ())]
    places = [name for name in names_there if target_name(name) == target]
    for place in places:
        if not os.path.exists(place):
            continue
        try:
            corpus = CorpusSettings.model_validate(settings["corpus"] | {"path": place, "limit": None})
            for record in read_images(corpus, fetch=False):
                image = None if record.encoded is None else decode_image(record.encoded)
                if image is not None and (digest := pixel_hash(image)) in wanted:
                    found[digest] = png(image, LARGEST)
                if len(found) == len(wanted):
                    break
        except (CorpusError, ValidationError):  # settings of a stranger
            continue
    pictures = {name: found[digest] for name, digest in hashes.items() if digest in found}
    if len(pictures) == len(hashes):
        return pictures, ()
    where = f"the build read them from {', '.join(places)}" if places else "where the build read them is not known"
    return pictures, (f"{len(hashes) - len(pictures)} of these trusted images are not at hand: {where}",)


def picture_url(picture: bytes | None) -> str | None:
    """A picture that needs no file."""
    return None if picture is None else f"data:image/png;base64,{base64.b64encode(picture).decode()}"
