"""From target settings to the units of a run: read, left out, drawn."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from grasp.corpus.passages import task_root
from grasp.corpus.sources import IN_MEMORY
from grasp.errors import TargetError
from grasp.seeds import stream
from grasp.settings import TargetSettings
from grasp.targets.olmes import ALIASES, read_task
from grasp.targets.records import is_path, read_mapped, read_units
from grasp.targets.units import Unit, UnitSet

T = TypeVar("T")


def load_units(settings: TargetSettings, in_memory: Sequence[Unit] = ()) -> UnitSet:
    """Units of every target named, in the order named; within a target in the order drawn.

    `units_per_target` units are drawn without replacement. The draw depends on the seed, the target's name
    and the number of its units alone, and draws are nested: the first 64 of 128 are the 64. Leaving a unit
    out moves no other one, except that later ones take the places that come free.

    Args:
        in_memory: the units that a name beginning with `sources.IN_MEMORY` stands for.
    Raises:
        TargetError: no target, an unknown or empty one, two targets of one name, a unit_id that occurs twice.
        MissingExtraError: what a target is read with is not installed.
    """
    pools: dict[str, list[Unit]] = {}
    for name in settings.names:
        if in_memory and name.startswith(IN_MEMORY):
            _add(pools, in_memory)
        elif is_path(name):
            _add(pools, read_units(name, settings.loss_on))
        else:
            _add(pools, read_task(name, settings.variant, settings.loss_on, task_root()))
    for target in settings.datasets:
        _add(pools, read_mapped(target, settings.loss_on))
    if not pools:
        raise TargetError("targets.names: got none, expected at least one task or file of units")
    target_of: dict[str, str] = {}
    for unit in chain.from_iterable(pools.values()):
        for name in ("target", "unit_id", "prompt", "completion"):
            text: str = getattr(unit, name)  # of a conversation the prompt is all that is said
            try:
                text.encode()
            except UnicodeEncodeError as err:  # JSON may spell halves of pairs, which no tokenizer and no table takes
                raise TargetError(
                    f"unit {unit.unit_id!a} of {unit.target!a}: {name}: half of a surrogate pair at character "
                    f"{err.start}, which is no text; mend it"
                ) from err
        if other := target_of.get(unit.unit_id):
            raise TargetError(
                f"targets: unit_id {unit.unit_id!r} occurs twice (in {other} and {unit.target}), expected each once"
            )
        target_of[unit.unit_id] = unit.target
    drawn = [draw(target, pool, [unit.unit_id for unit in pool], settings) for target, pool in pools.items()]
    excluded = frozenset(settings.exclude_units)
    found = tuple(unit.unit_id for unit in chain.from_iterable(pools.values()) if unit.unit_id in excluded)
    sizes = {target: len(pool) for target, pool in pools.items()}
    return UnitSet(tuple(chain.from_iterable(drawn)), found, sizes)


def _add(pools: dict[str, list[Unit]], units: Sequence[Unit]) -> None:
    fresh: dict[str, list[Unit]] = {}
    for unit in units:
        fresh.setdefault(unit.target, []).append(unit)
    clash = sorted(fresh.keys() & pools.keys())
    if clash:
        raise TargetError(f"targets: {', '.join(clash)} is named twice, expected each target once")
    pools.update(fresh)


def draw(target: str, pool: Sequence[T], unit_ids: Sequence[str], settings: TargetSettings) -> list[T]:
    """What is scored of a target, in the order drawn.

    Raises:
        TargetError: all of it is left out.
    """
    # An alias draws what its task draws: the stream is named by the task that stands behind it.
    order = stream(settings.seed, "units", ALIASES.get(target, target)).permutation(len(pool))
    excluded = frozenset(settings.exclude_units)
    kept = [pool[k] for k in order if unit_ids[k] not in excluded]
    if not kept:
        raise TargetError(f"targets: {target} has {len(pool)} units and all are in exclude_units, expected one or more")
    return kept[: settings.units_per_target]
