"""Targets from `datasets`: format strings over the columns of a directory on disk or a hub dataset."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from grasp.errors import TargetError
from grasp.extras import require
from grasp.settings import DatasetTarget
from grasp.targets.units import LossOn, Unit


def read_dataset(target: DatasetTarget, loss_on: LossOn) -> list[Unit]:
    """Every row of the split as a unit; unit_id is ``<name>:<id column or position>``.

    Raises:
        MissingExtraError: `datasets` is not installed.
        TargetError: nothing to read, an unknown split or column (with those that there are), an empty
            completion.
    """
    dataset = _split(_open(target), target)
    where = f"targets.datasets.{target.name}"
    used = _columns(target.prompt, f"{where}.prompt") | _columns(target.completion, f"{where}.completion")
    if target.unit_id is not None:
        used.add(target.unit_id)
    missing = sorted(used - set(dataset.column_names))
    if missing:
        raise TargetError(
            f"{where}: no column {', '.join(missing)}; {target.path} has {', '.join(dataset.column_names)}"
        )
    return [_unit(target, k, row, loss_on, where) for k, row in enumerate(_rows(dataset, used))]


def _open(target: DatasetTarget) -> Any:
    datasets = require("datasets", extra="datasets", feature=f"target {target.name!r}")
    try:
        if Path(target.path).is_dir() and not _has_loader_files(Path(target.path)):
            return datasets.load_from_disk(target.path)
        return datasets.load_dataset(target.path)
    except (OSError, ValueError, IndexError) as err:  # IndexError: an empty table on disk
        raise TargetError(f"targets.datasets.{target.name}.path: {target.path}: {' '.join(str(err).split())}") from err


def _has_loader_files(path: Path) -> bool:
    """Whether a directory holds plain data files rather than what `save_to_disk` writes."""
    return not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists()


def _split(loaded: Any, target: DatasetTarget) -> Any:
    if not isinstance(loaded, Mapping):
        if target.split is not None and str(loaded.split) != target.split:
            raise TargetError(
                f"targets.datasets.{target.name}.split: {target.path} has no split {target.split!r}, it is"
                f" one table ({loaded.split}); leave `split` out"
            )
        return loaded
    names = ", ".join(loaded)
    if target.split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if target.split not in loaded:
        raise TargetError(f"targets.datasets.{target.name}.split: got {target.split!r}, {target.path} has {names}")
    return loaded[target.split]


def _columns(template: str, where: str) -> set[str]:
    """Columns that a format string reads: ``{answers[text][0]}`` reads `answers`."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as err:
        raise TargetError(f"{where}: {template!r} is no format string: {err}") from err
    roots = {re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields}
    if "" in roots or any(root.isdigit() for root in roots):
        raise TargetError(f"{where}: {template!r} has a field without a name, expected columns such as {{question}}")
    return roots


def _rows(dataset: Any, used: set[str]) -> Iterable[Mapping[str, Any]]:
    rows: Iterable[Mapping[str, Any]] = dataset.select_columns(sorted(used))
    return rows


def _unit(target: DatasetTarget, position: int, row: Mapping[str, Any], loss_on: LossOn, where: str) -> Unit:
    try:
        prompt, completion = target.prompt.format(**row), target.completion.format(**row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as err:
        raise TargetError(f"{where}: row {position} does not fit the format strings: {err!r}") from err
    if not completion.strip():
        raise TargetError(f"{where}: row {position}: completion: got {completion!r}, expected text to score")
    key = position if target.unit_id is None else row[target.unit_id]
    return Unit(
        unit_id=f"{target.name}:{key}",
        target=target.name,
        prompt=prompt,
        completion=completion,
        loss_on=loss_on,
    )
