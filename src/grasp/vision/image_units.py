"""Targets of an image classifier: sets of trusted labelled images, each of which is one unit.

Start with `load_image_units`.
"""

import numpy as np
import pyarrow as pa

from grasp.corpus.packing import Skipped
from grasp.errors import TargetError
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets.load import draw, target_name
from grasp.targets.units import Unit, UnitSet
from grasp.vision.images import CLASS_LABEL, HASH_LABEL, ImageRow, ImageRows, image_rows, read_images
from grasp.vision.settings import ClassifierSettings


def load_image_units(
    settings: TargetSettings, corpus: CorpusSettings, classifier: ClassifierSettings, n_classes: int
) -> tuple[UnitSet, ImageRows]:
    """Load the units of all trusted sets, sampled as text units are, and their images in the same order.

    A target is named after its file or directory, without suffix; a unit after its image. The fields of a text unit are
    reused: `prompt` has the hash and size of the image, `completion` the name of its class.

    Args:
        settings: paths of the trusted sets, and how many units are drawn from each.
        corpus: settings of the corpus, with which the trusted sets are read too.
        classifier: columns of images and classes, and the names of the classes; empty if they have no names.
        n_classes: number of the head's outputs.
    Returns:
        The units, and their images in the same order.
    Raises:
        TargetError: no target, duplicate names, an empty target, or unreadable images (all are named).
        CorpusError: nothing to read, or a class that the head does not have.
    """
    rows: list[ImageRow] = []
    units: list[Unit] = []
    for path in settings.names:
        target = target_name(path)
        if any(unit.target == target for unit in units):
            raise TargetError(f"targets.names: two targets are called {target!r}; rename one of the files")
        log, target_corpus = Skipped(), corpus.model_copy(update={"path": path, "limit": None})
        trusted = list(image_rows(read_images(target_corpus, classifier), classifier.classes, n_classes, log))
        unusable = [f"{name} ({reason})" for reason, names in log.ids.items() for name in names]
        if unusable:
            raise TargetError(
                f"{path}: {len(unusable)} of {len(unusable) + len(trusted)} trusted images cannot be used: "
                f"{', '.join(unusable[:5])}; repair or remove them"
            )
        if not trusted:
            raise TargetError(f"{path}: no trusted images, expected at least one")
        if len({row.row_id for row in trusted}) < len(trusted):
            raise TargetError(f"targets: {target} has two images of the same name; use unique names")
        for row in draw(target, trusted, [f"{target}:{row.row_id}" for row in trusted], settings):
            units.append(
                Unit(
                    unit_id=f"{target}:{row.row_id}",
                    target=target,
                    # the snippet is "CLASS, WIDTH x HEIGHT pixels"
                    prompt=f"image {row.labels[HASH_LABEL]}, {row.snippet.rpartition(', ')[2]}",
                    completion=str(row.labels[CLASS_LABEL]),
                )
            )
            rows.append(row)
    table = pa.table({"row_id": pa.array([row.row_id for row in rows], pa.string())})
    class_E = np.concatenate([row.input_ids for row in rows])
    return UnitSet(tuple(units)), ImageRows.from_images([row.encoded for row in rows], class_E, table)
