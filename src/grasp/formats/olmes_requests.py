"""Logs of requests of OLMES, the evaluation harness of AI2: `task-*-requests.jsonl` of `--save-raw-requests true`.

A record is a request: the likelihood of a continuation after a context. A document, with its `doc_id`, is a question;
it has one request per candidate answer, numbered by `idx`. A unit is the context and the gold continuation of a
document: the request whose `idx` equals its `label`, or the only request if a single reference answer is scored.

Documents numbered from 1,000,000 have the same answers after a bare "Answer:"; OLMES uses them to normalise accuracy by
unconditional likelihood. They are skipped. The requests of tasks are read by `olmes_tasks`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grasp.errors import TargetError
from grasp.targets.units import LossOn, Unit

UNCONDITIONAL = 1_000_000  # `uncond_docid_offset` of the OLMES task configurations
LOG_NAME = re.compile(r"task-\d+-(?P<task>.+)-requests")


def claims(record: Mapping[str, Any]) -> str:
    """Return why a record is a request."""
    is_request = isinstance(record.get("request"), Mapping) and record.keys() >= {"doc_id", "doc", "idx", "label"}
    return "it has `request`, `doc_id`, `doc`, `idx` and `label`, as requests of olmes" if is_request else ""


def read(records: Iterable[tuple[str, Mapping[str, Any]]], task: str, loss_on: LossOn) -> list[Unit]:
    """Convert the documents of request files to units of their `task_name`; unit_id is ``<task_name>:<doc_id>``.

    Args:
        records: locations and fields of the records.
        task: target of records without `task_name`.
        loss_on: tokens of the units that carry loss.
    Raises:
        TargetError: a record is not a request, or the gold answer of a document is not defined.
    """
    requests_by_task: dict[str, list[Request]] = {}
    for location, record in records:
        if not claims(record):
            raise TargetError(
                f"{location}: expected a request of olmes, with `doc_id`, `doc`, `request`, `idx` and `label`"
            )
        name = str(record.get("task_name") or task)
        requests_by_task.setdefault(name, []).append(Request.parse(record, location))
    return [
        gold_unit(requests, f"{name}:{doc_id}", name, loss_on)
        for name, task_requests in requests_by_task.items()
        for doc_id, requests in group_by_document(task_requests).items()
    ]


@dataclass(frozen=True, slots=True)
class Request:
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
    def parse(cls, record: Mapping[str, Any], location: str) -> "Request":
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
        if not isinstance(continuation, str) or not continuation.strip():
            raise TargetError(
                f"{location}: {request_type}: no continuation is scored; use the requests of a variant that "
                "scores one, e.g. rc or gold_bpb"
            )
        if not isinstance(context, str):
            raise TargetError(
                f"{location}: the context is a list of messages, whose text depends on a chat template; use the "
                "requests of a run without --use-chat-format"
            )
        try:
            doc_id, idx = int(record["doc_id"]), int(record["idx"])
        except (TypeError, ValueError) as err:
            raise TargetError(f"{location}: doc_id, idx: expected integers: {err}") from err
        doc = record["doc"] if isinstance(record["doc"], Mapping) else {}
        return cls(location, doc_id, doc, idx, record["label"], context, continuation)


def group_by_document(requests: Iterable[Request]) -> dict[int, list[Request]]:
    """Group requests by document, in the order of `idx`, without those of unconditional likelihoods."""
    documents: dict[int, list[Request]] = {}
    for request in requests:
        if request.doc_id < UNCONDITIONAL:
            documents.setdefault(request.doc_id, []).append(request)
    return {doc_id: sorted(group, key=lambda request: request.idx) for doc_id, group in documents.items()}


def gold_unit(requests: Sequence[Request], unit_id: str, target: str, loss_on: LossOn) -> Unit:
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
