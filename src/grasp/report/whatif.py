"""What the page needs to predict by itself: the formula of every label, its slices, and words for a command line."""

import shlex
from dataclasses import asdict
from typing import Any

import numpy as np

from grasp.predict.intervals import Intervals
from grasp.report.findings import Findings, LabelFindings, Missing
from grasp.text import LONGEST_CELL, different, plain


def payload(found: Findings) -> dict[str, Any]:
    """Plain JSON: one entry a label."""
    nats = None if isinstance(found.nats, Missing) else found.nats
    return {
        "labels": [_label(found, label, nats) for label in found.labels],
        "nats": None if nats is None else _nats(found, nats),
    }


def _label(found: Findings, label: LabelFindings, nats: Intervals | None) -> dict[str, Any]:
    formula, slices = label.formula, label.slices
    halves = [*formula.quadratic, *([half for half in formula.gram_GG if half in nats.reach] if nats else [])]
    return {
        "label": slices.label,
        "title": plain(slices.label, 40),
        "targets": different(found.targets, LONGEST_CELL),
        "slices": [
            {"name": name, "expression": one.expression, "rows": one.rows, "tokens": one.tokens}
            for name, one in zip(different(slices.names, LONGEST_CELL), slices.slices, strict=True)
        ],
        "order": _order(label),
        "side": formula.side,
        "weighting": formula.weighting,
        "relevance": formula.relevance_GT.tolist(),
        "taken": formula.taken_T.tolist(),
        "corpus": formula.corpus_T.tolist(),
        "quadratic": {half: asdict(weights) for half, weights in formula.quadratic.items()},
        "gram": {half: formula.gram_GG[half].tolist() for half in dict.fromkeys(halves)},
        "norm": {half: formula.norm_G[half].tolist() for half in formula.quadratic},
        "before": f"grasp predict {shlex.quote(found.artifact_path)}",
        "after": _after(found),
    }


def _order(label: LabelFindings) -> list[int]:
    """The most helpful slice first, on average over the targets."""
    return [int(g) for g in np.argsort(label.effects.dropped_GT.mean(axis=1), kind="stable")]


def _nats(found: Findings, nats: Intervals) -> dict[str, Any]:
    """Coefficients of `grasp.predict.intervals`."""
    lines = [nats.lines.get(target) for target in found.targets]
    return {
        "title": nats.title,
        "lines": [line and asdict(line) for line in lines],
        "reach": {name: asdict(reach) for name, reach in nats.reach.items()},
    }


def _after(found: Findings) -> str:
    """Flags that make the command line say what the page says."""
    question, parts = found.question, []
    if question.targets is not None:
        parts += ["--target", ",".join(found.targets)]
    if question.protocol_path is not None:
        parts += ["--protocol", str(question.protocol_path)]
    return shlex.join(parts)
