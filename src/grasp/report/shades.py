"""Why the rows at the ends of every target count: words with what each adds, from the model, where it is at hand; of
images the trusted images that they bear on most.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.audit.explanation import STRONG, by_word
from grasp.errors import GraspError
from grasp.extract.pictures import vision
from grasp.extract.reopen import BuildSource
from grasp.predict.protocol import ScoringProtocol
from grasp.report.rows import HeldRows
from grasp.text import LONGEST_CELL, plain, printable, visible

LONGEST = 2_000  # characters of a row
DIGITS = 3
TRUSTED = 4  # images beside a row
PICTURE_BYTES = 2_000_000  # of a page; beyond, images are named

Pictures = dict[int, dict[str, list[tuple[str, str | None]]]]  # the same -> what stands below a picture, and its URL
Shades = dict[int, dict[str, list[tuple[str, float | None]]]]  # place among the held rows -> target -> words


def shaded(
    artifact: ArtifactReader, protocol: ScoringProtocol, targets: tuple[str, ...], held: HeldRows, count: int
) -> tuple[Shades, str]:
    """Shades of the best rows of each target, and of half as many of the worst; and why there are none.

    Args:
        count: how many of the best.
    """
    if BuildSource(artifact).has_images:
        return {}, ""
    model = str(artifact.manifest.settings.get("model", {}).get("path", ""))
    if not Path(model).exists():
        return {}, f"The words of the rows are not shaded: the model {model or 'of the build'} is not where it was."
    shades: Shades = {}
    explainer = import_module("grasp.audit.explain").Explainer(artifact)  # loads torch: not without a model
    try:
        for t, target in enumerate(targets):
            for k in _ends(held, t, count):
                row = explainer.explain(target, held.rows[k]["row_id"], protocol=protocol)
                shades.setdefault(k, {})[f"t{t}"] = list(_words(row.tokens, row.contributions))
    except GraspError as err:
        return {}, f"The words of the rows are not shaded: {err}"
    return shades, ""


def pictured(
    artifact: ArtifactReader, protocol: ScoringProtocol, targets: tuple[str, ...], held: HeldRows, count: int
) -> Pictures:
    """The same rows of an artifact of images, each with the trusted images that it bears on most; else nothing."""
    pictures: Pictures = {}
    room = PICTURE_BYTES
    if not BuildSource(artifact).has_images:
        return pictures
    for t, target in enumerate(targets):
        ends = _ends(held, t, count)
        every = vision().explain(artifact, target, [held.rows[k]["row_id"] for k in ends], protocol=protocol)
        for k, found in zip(ends, every, strict=True):
            shown = [(plain(caption, LONGEST_CELL), url) for caption, url in found.nearest[: 1 + TRUSTED]]
            room -= sum(len(url or "") for _, url in shown)
            pictures.setdefault(k, {})[f"t{t}"] = shown if room > 0 else [(caption, None) for caption, _ in shown]
    return pictures


def _ends(held: HeldRows, t: int, count: int) -> list[int]:
    order = [k for k in np.argsort(held.rank_KT[:, t], kind="stable").tolist() if held.rank_KT[k, t]]
    return list(dict.fromkeys([*order[:count], *order[max(0, len(order) - count // 2) :]]))


def _words(tokens: tuple[str, ...], adds: NDArray[np.float64]) -> Iterator[tuple[str, float | None]]:
    """Words with what each adds; white space that adds much is made visible."""
    joined, adds_W = by_word(tokens, adds)
    much = STRONG * float(np.abs(np.nan_to_num(adds_W)).max(initial=0.0))
    length = 0
    for word, add in zip(joined, adds_W.tolist(), strict=True):
        shown = visible(word) if abs(add) >= much > 0 else word
        yield printable(shown), None if math.isnan(add) else float(f"{add:.{DIGITS}g}")
        length += len(word)
        if length > LONGEST:
            yield " ...", None
            return
