"""What the page needs to predict by itself: the formula of every label, its slices, and words for a command line."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grasp.predict.geometry import QuadraticWeights
from grasp.report.findings import Findings, LabelFindings, Missing, NatsIntervals
from grasp.text import LONGEST_CELL, different, plain

COVERED = ("hidden", "residual")  # sketches by which it is told whether a subset lies outside of an environment's


def payload(found: Findings) -> dict[str, Any]:
    """Plain JSON: one entry a label."""
    return {"labels": [_label(found, label) for label in found.labels]}


def _label(found: Findings, label: LabelFindings) -> dict[str, Any]:
    model, formula = label.model, label.model.formula()
    nats = None if isinstance(label.nats, Missing) else label.nats
    halves = [*formula.quadratic, *([half for half in COVERED if half in model.gram_GG] if nats else [])]
    names = different([one.name for one in label.slices.slices], LONGEST_CELL)
    return {
        "label": model.label,
        "title": plain(model.label, 40),
        "targets": different(model.targets, LONGEST_CELL),
        "slices": [
            {"name": name, "expression": one.expression, "rows": one.rows, "tokens": one.tokens}
            for name, one in zip(names, label.slices.slices, strict=True)
        ],
        "order": _order(label),
        "side": model.side,
        "weighting": model.weighting,
        "relevance": formula.relevance_GT.tolist(),
        "taken": formula.taken_T.tolist(),
        "constant": formula.constant_T.tolist(),
        "whole": model.whole_T.tolist(),
        "quadratic": {half: _quadratic(weights) for half, weights in formula.quadratic.items()},
        "gram": {half: model.gram_GG[half].tolist() for half in dict.fromkeys(halves)},
        "norm": {half: model.norm_G[half].tolist() for half in dict.fromkeys(halves)},
        "nats": None if nats is None else _nats(nats, model.targets),
        "before": f"grasp predict {shlex.quote(found.artifact_path)}",
        "after": _after(found, label),
    }


def _order(label: LabelFindings) -> list[int]:
    """The most helpful slice first, on average over the targets."""
    return [int(g) for g in np.argsort(label.effects.dropped_GT.mean(axis=1), kind="stable")]


def _quadratic(weights: QuadraticWeights) -> dict[str, float]:
    return {"raw": weights.raw, "own": weights.own, "cent": weights.cent}


def _nats(nats: NatsIntervals, targets: Sequence[str]) -> dict[str, Any]:
    lines: list[Mapping[str, list[float]] | None] = []
    for target in targets:
        line = nats.lines.get(target)
        lines.append(
            None
            if line is None
            else {
                "change": line.change_P.tolist(),
                "expected": line.expected_P.tolist(),
                "low": line.low_P.tolist(),
                "high": line.high_P.tolist(),
            }
        )
    return {
        "title": nats.title,
        "lines": lines,
        "least": nats.least_share,
        "most": nats.most_share,
        "distance": {half: value for half, value in nats.distance.items() if half in COVERED},
        "predicted": [nats.predicted.get(target) for target in targets],
    }


def _after(found: Findings, label: LabelFindings) -> str:
    """Flags that make the command line say what the page says."""
    question = found.question
    parts: list[str] = []
    if question.targets is not None:
        parts += ["--targets", ",".join(found.targets)]
    if question.protocol_path is not None:
        parts += ["--protocol", str(question.protocol_path)]
    else:
        parts += ["--calibration", f"mixture:{label.model.label}"]
    return shlex.join(parts)
