"""Targets from JSONL: one unit a line, `task`, `prompt`, `completion`, and what else a unit may carry."""

import json
from pathlib import PurePosixPath
from typing import Annotated

import fsspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grasp.errors import TargetError
from grasp.settings import describe
from grasp.targets.units import LossOn, Unit


class UnitLine(BaseModel):
    """What a line may hold; other fields are left alone."""

    model_config = ConfigDict(strict=True, frozen=True)

    task: Annotated[str, Field(min_length=1)]
    prompt: str
    completion: str
    unit_id: str | int | None = None
    loss_on: LossOn | None = None
    choices: list[str] = []
    gold: int | None = None
    support: str | None = None


def is_path(name: str) -> bool:
    """Whether a target's name means a file: it has a folder, a scheme or the ending of a JSONL file."""
    suffixes = PurePosixPath(name).suffixes
    return "/" in name or "\\" in name or ".jsonl" in suffixes or ".json" in suffixes


def read_jsonl(path: str, loss_on: LossOn) -> list[Unit]:
    """Units of a file (.jsonl, also .gz or .zst; path or fsspec URL), in the order of its lines.

    Args:
        loss_on: tokens that carry loss where a line does not say.
    Returns:
        Units; unit_id is the line's own, else ``<task>:<position among the lines of that task, from 0>``.
    Raises:
        TargetError: no such file, a bad line (file:line and every mismatch), an empty completion, no lines.
    """
    units: list[Unit] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        record = _parse(line, f"{path}:{number}")
        position = seen[record.task] = seen.get(record.task, -1) + 1
        units.append(
            Unit(
                unit_id=f"{record.task}:{position}" if record.unit_id is None else str(record.unit_id),
                target=record.task,
                prompt=record.prompt,
                completion=record.completion,
                loss_on=record.loss_on or loss_on,
                choices=tuple(record.choices),
                gold=record.gold,
                support=record.support,
            )
        )
    if not units:
        raise TargetError(f"{path}: no units, expected one JSON object a line with task, prompt, completion")
    return units


def _lines(path: str) -> list[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            content: bytes = file.read()
    except FileNotFoundError as err:
        raise TargetError(f"targets.names: {path}: no such file") from err
    except (OSError, EOFError, ValueError) as err:
        raise TargetError(f"{path}: cannot be read: {err}") from err
    lines = enumerate(content.split(b"\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def _parse(line: bytes, where: str) -> UnitLine:
    try:
        record = UnitLine.model_validate(json.loads(line))
    except ValidationError as err:
        raise TargetError(describe(err, where)) from err
    except ValueError as err:  # not JSON, or not UTF-8
        raise TargetError(f"{where}: not JSON: {err}") from err
    if not record.completion.strip():
        raise TargetError(f"{where}: completion: got {record.completion!r}, expected text to score")
    if record.gold is not None and not 0 <= record.gold < len(record.choices):
        raise TargetError(
            f"{where}: gold: got {record.gold}, expected the position of one of {len(record.choices)} choices"
        )
    return record
