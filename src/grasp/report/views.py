"""View models of the page: one function per section returns the texts and bar positions that the template shows.

Start with `decision`, the first section. Shape letters: G slices, T targets, C checkpoints, B subsets, K run counts.
"""

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from grasp import text
from grasp.arrays import F64
from grasp.predict.predictor import EFFECT_SIZE
from grasp.report.findings import Contribution, Findings, LabelFindings, display_unit
from grasp.runs.evaluation import MethodResult
from grasp.runs.metrics import Estimate
from grasp.select.guards import CONFIDENCE
from grasp.select.summaries import MixtureSummary, SelectionSummary, TargetChange
from grasp.text import MAX_CELL_CHARS, name, plain, unique_names

View = dict[str, Any]

MAX_SLICES_NAMED = 2  # slices to keep that are named in a sentence
ROWS_ON_FIRST_SCREEN = 3  # most helpful rows, if no label stands out
BARS_PER_END = 4  # most helpful and most harmful slices in a bar chart
SHARES_SHOWN = 30  # label values in the table of a selection or mixture
POINTS_SHOWN = 400  # points of a scatter plot
LEFT, RIGHT, TOP, BOTTOM = 40.0, 290.0, 12.0, 154.0  # plot area of a figure, in SVG units
METRICS = {
    "ceiling": "task_ceiling",
    "rho": "task_rho",
    "lds": "mean_lds",
    "positive": "positive",
    "pairwise": "pairwise",
}
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def signed(value: float | None, digits: int = 3) -> str:
    """Format a number with its sign, using the minus character; a dash if it is None or nan."""
    return number(value, digits, "+")


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Format a number, by default with a sign only if it is negative; a dash if it is None or nan."""
    formatted = text.number(value, digits, sign)
    return DASH if formatted == "-" else formatted.replace("-", MINUS)


def interval(low: float, high: float, digits: int = 3) -> str:
    """Format an interval; empty if either end is nan."""
    return "" if isnan(low) or isnan(high) else f"[{signed(low, digits)}, {signed(high, digits)}]"


def _bars(part: Contribution, slices: Any, targets: Any) -> list[View]:
    """Return centred bars, on one scale, for the contributions of slices to targets; a bar to the right helps.

    A bar is coloured if the contribution is significant.
    """
    value, low, high, sign = (
        array_GT[slices, targets] for array_GT in (part.value_GT, part.low_GT, part.high_GT, part.sign_GT)
    )
    # the value at which a bar has full length: the largest magnitude plus a margin
    scale = max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-9) * 1.15

    def span(start: float, stop: float) -> str:
        if isnan(start) or isnan(stop):
            return ""
        left, right = (50.0 + 50.0 * max(-1.0, min(1.0, end / scale)) for end in (start, stop))
        return f"left:{left:.1f}%;width:{right - left:.1f}%"

    return [
        {
            "data": "" if isnan(x) else f"{x:.6g}",
            "value": signed(x),
            "interval": interval(least, most),
            "kind": ("unsure", "helps", "hurts")[side],  # of sign 0, 1 and -1
            "bar": span(*sorted((0.0, 0.0 if abs(x) < 5e-4 else x))),  # no bar if the value rounds to zero
            "whisker": span(least, most),
        }
        for x, least, most, side in zip(*(array.ravel().tolist() for array in (value, low, high, sign)), strict=True)
    ]


def decision(findings: Findings) -> View:
    """Return the first screen: what to keep, the change to expect with its interval, and slices that stand out."""
    summary, share = findings.selection, findings.selection.rows / findings.n_rows
    weight_of = {change.target: change.weight for change in summary.targets}
    weights = list(weight_of.values())
    subject = of = name(summary.targets[0].target)
    if len(weights) > 1:
        subject = f"{len(weights)} targets"
        of = f"the {'weighted ' if len(set(weights)) > 1 else ''}mean of {subject}"
    part_name = f"the best {share:{'.0%' if share >= 0.01 else '.2%'}} of the rows"
    if summary.documents is not None:
        part_name = f"the best {summary.documents:,} documents"
    compared = [plain(label.slices.label, 40) for label in findings.labels]
    changes = _expected(summary.targets, np.array(weights), summary)
    verdicts = {
        "helps": f"keep {part_name}",
        "hurts": f"keep the whole corpus: {part_name} are worse",
        "unsure": f"{part_name} cannot be told from the whole corpus",
        "": f"{part_name} have no interval, so whether they are better is unknown",
    }
    last = changes[-1]  # by the runs, if there are any
    view: View = {
        "heading": f"For {subject}, {verdicts[last['kind'] or ('unsure' if last['interval'] else '')]}",
        "rows": f"{summary.rows:,}",
        "tokens": f"{summary.tokens:,}",
        "of": of,
        "changes": changes,
        "outside": plain(summary.outside),
        "compared": compared,
        "label": "",
    }
    if findings.labels and findings.labels[0].evidence:
        label = findings.labels[0]
        named = [target for target in findings.targets if target in weight_of] or findings.targets
        weights_T = np.array([weight_of.get(target, 1.0) for target in named])
        selected = [findings.targets.index(target) for target in named]
        sign_GT, by_relevance = label.signs(selected)
        part = label.by_relevance if by_relevance else label.contribution
        view["label"] = compared[0]
        # weight of the targets that a slice helps minus that of those that it hurts, and its weighted contribution
        votes_G, value_G = sign_GT @ weights_T, part.value_GT[:, selected] @ weights_T
        order = np.argsort(-value_G, kind="stable").tolist()
        view["keep"] = [label.names[g] for g in order if votes_G[g] > 0 and value_G[g] > 0][:MAX_SLICES_NAMED]
        view["harmful"] = [label.names[g] for g in order if votes_G[g] < 0 and value_G[g] < 0][-1:]
    return view


def _expected(changes: Sequence[TargetChange], weights_T: F64, summary: SelectionSummary) -> list[View]:
    """Return the weighted change that a selection should cause, on other questions and by the runs, with intervals.

    Targets are independent samples of questions. The errors of a model fitted to runs may be correlated, so that
    half-widths add up. Without either, the change is that on the known questions.
    """
    unit = "effect sizes" if summary.scale == EFFECT_SIZE else plain(summary.scale)
    runs_unit = display_unit(plain(summary.runs_unit or ""))
    ends_T33 = np.array(
        [
            [
                [part.expected, part.expected_low, part.expected_high],
                [part.nats, part.nats_low, part.nats_high],
                [part.change, None, None],
            ]
            for part in changes
        ],
        dtype=np.float64,
    )
    value_3, (low_T3, high_T3) = weights_T @ ends_T33[..., 0], (ends_T33[..., 1], ends_T33[..., 2])
    half_T3 = weights_T[:, None] * (high_T3 - low_T3) / 2
    error_3 = np.linalg.norm(half_T3[:, 0]), half_T3[:, 1].sum(), nan
    units = f"{unit} on other questions", runs_unit, f"{unit} on the known questions"
    views: list[View] = []
    for value, error, shown_unit in zip(value_3.tolist(), error_3, units, strict=True):
        if not isnan(value) and (not views or shown_unit == runs_unit):
            kind = "helps" if value > error else "hurts" if value < -error else ""
            ends = interval(value - error, value + error, 2)
            views.append({"value": signed(value, 2), "unit": shown_unit, "interval": ends, "kind": kind})
    return views


def answers(findings: Findings, targets: Sequence[str]) -> list[View]:
    """Return one answer per target: the change to expect, the agreement with retraining, and slices or rows."""
    changes = {change.target: change for change in findings.selection.targets}
    answers = []
    for t, target in enumerate(targets):
        answer: View = {"target": target, "changes": [], "bars": [], "rows": [], "by_relevance": False}
        if findings.targets[t] in changes:
            answer["changes"] = _expected([changes[findings.targets[t]]], np.ones(1), findings.selection)
        answer["weight"] = f"{findings.weights_T[t]:.0%}" if len(set(findings.weights_T.tolist())) > 1 else ""
        if findings.labels and findings.labels[0].evidence:
            label = findings.labels[0]
            by_relevance = label.signs([t])[1]
            part = label.by_relevance if by_relevance else label.contribution
            order = np.argsort(-part.value_GT[:, t], kind="stable").tolist()
            # the largest and the smallest contributions, most helpful slice first
            shown = order if len(order) <= 2 * BARS_PER_END else order[:BARS_PER_END] + order[-BARS_PER_END:]
            bars = zip(shown, _bars(part, shown, [t]), strict=True)
            answer |= {"bars": [{"name": label.names[g]} | bar for g, bar in bars], "by_relevance": by_relevance}
        else:
            answer["rows"] = row_views(findings, t, findings.rows.most_helpful_first(t)[:ROWS_ON_FIRST_SCREEN], "helps")
        answers.append(answer | {"agreement": _agreement(findings, findings.targets[t])})
    return answers


def row_views(findings: Findings, t: int, order: Sequence[int], kind: str) -> list[View]:
    """Return example rows with their effects on target `t`."""
    examples = findings.rows
    return [
        {
            "id": name(examples.rows[k]["row_id"]),
            "effect": signed(float(examples.effect_KT[k, t]), 2),
            "text": plain(examples.rows[k]["snippet"] or "", 600),
            "kind": kind,
        }
        for k in order
    ]


def _agreement(findings: Findings, target: str) -> str:
    """Return a sentence on the agreement of predictions with retraining; empty if it is unknown."""
    if findings.agreement is None:
        return ""
    agreement = findings.agreement
    (result,) = [method for method in agreement.report.methods if method.method == agreement.protocol]
    rows = [row for row in result.targets if row.target.partition("@")[0] == target]
    if not rows or rows[0]["task_rho"].value is None:
        return ""
    rho, ceiling = rows[0]["task_rho"].value, rows[0]["task_ceiling"].value
    caveat = "; the protocol was selected on these models" if target in result.selected_on else ""
    relative = ""
    if rho <= 0:
        relative = " (no agreement)"
    elif ceiling is not None and ceiling > 0:
        relative = ", at the noise ceiling" if rho >= ceiling else f", {number(rho / ceiling, 2)} of the noise ceiling"
    models = f"models retrained on {agreement.report.n_subsets} subsets"
    return f"Rank correlation with {models}: {number(rho, 2)}{relative}{caveat}."


def slices(label: LabelFindings, weights_T: F64) -> View:
    """Return the table of a label, one row per slice, the most helpful one first."""
    part = label.contribution
    n_targets = len(weights_T)
    bars = _bars(part, slice(None), slice(None))
    lines = [
        {
            "g": g,
            "name": label.names[g],
            "rows": label.slices.slices[g].rows,
            "cells": bars[g * n_targets : (g + 1) * n_targets],
        }
        for g in np.argsort(-(part.value_GT @ weights_T), kind="stable").tolist()
    ]
    return {
        "title": plain(label.slices.label, 40),
        "lines": lines,
        "grouped": label.slices.n_grouped and f"{label.slices.n_grouped:,}",
        "last": label.names[-1],
    }


def fidelity(findings: Findings) -> View | None:
    """Return the comparison with retraining: metrics, and one scatter plot per target."""
    agreement, runs = findings.agreement, findings.runs
    if agreement is None or runs is None:
        return None
    report = agreement.report
    (default_method,) = [method for method in report.methods if method.method == agreement.protocol]
    others = [method for method in report.methods if method is not default_method]
    metrics = {row.target: row for row in default_method.targets}
    subsets, seeds = report.n_subsets, len(report.seeds)
    unfinished = ""
    if (subsets, seeds) != (agreement.n_planned, agreement.seeds_planned):
        unfinished = (
            f"Unfinished: {subsets} of {agreement.n_planned} subsets with {seeds} of {agreement.seeds_planned} seeds "
            "are done; the numbers will change."
        )

    # realized against predicted utility, scaled to the plot area; the vertical axis of an SVG points down
    scatters = []
    for points in agreement.points:
        x_B, y_B = points.predicted_B[:POINTS_SHOWN], points.realized_B[:POINTS_SHOWN]
        spread_B = np.nan_to_num(points.spread_B[:POINTS_SHOWN])
        left_B = LEFT + (RIGHT - LEFT) * (x_B - x_B.min()) / (np.ptp(x_B) or 1.0)
        low, extent = (y_B - spread_B).min(), np.ptp(np.concatenate([y_B - spread_B, y_B + spread_B])) or 1.0
        top_3B = BOTTOM - (BOTTOM - TOP) * (np.stack([y_B, y_B - spread_B, y_B + spread_B]) - low) / extent
        target = f"{name(points.target)}{' (held-out)' if points.role == 'held-out' else ''}"
        row = metrics[points.target]
        ceiling = "" if row["task_ceiling"].value is None else f", ceiling {_estimate(row['task_ceiling'])}"
        scatters.append(
            {
                "caption": f"{target}: rho {_estimate(row['task_rho'])}{ceiling}",
                "about": f"Scatter plot of realized against predicted utility of {target}, one point per subset",
                "dots": [[f"{pixel:.1f}" for pixel in dot] for dot in zip(left_B, *top_3B, strict=True)],
                "x0": signed(float(x_B.min()), 1),
                "x1": signed(float(x_B.max()), 1),
                "y0": signed(float(low), 2),
                "y1": signed(float(low + extent), 2),
            }
        )
    return {
        "head": plain(
            f"Runs in {report.environment} ({runs.role}): recipe {report.recipe}, {report.family}, "
            f"{subsets} subsets, seeds {', '.join(map(str, report.seeds))}."
        ),
        "unfinished": unfinished,
        "protocol": name(agreement.protocol),
        "default": _fidelity_lines(default_method),
        "others": [line for method in others for line in _fidelity_lines(method)],
        "notes": [plain(note) for note in (*report.marks(), *report.notes)],
        "points": scatters,
    }


def _fidelity_lines(result: MethodResult) -> list[View]:
    """Return one table row per target, and their mean if there are several."""
    rows = [(name(result.marked(row.target)), row) for row in result.targets]
    if len(rows) > 1:
        rows.append((result.mean.target, result.mean))
    return [
        {"method": name(result.method), "target": target, "units": row.n_units}
        | {key: _cell(row[metric]) for key, metric in METRICS.items()}
        for target, row in rows
    ]


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    return " ".join(_cell(estimate).values()).rstrip()


def _cell(estimate: Estimate) -> View:
    ends = "" if estimate.low is None or estimate.high is None else f"[{number(estimate.low)}, {number(estimate.high)}]"
    return {"value": "undefined" if estimate.value is None else number(estimate.value), "interval": ends}


def optimized(title: str, summary: SelectionSummary | MixtureSummary) -> View:
    """Return a selection or a mixture: the predicted changes, and the shares of the label values before and after."""
    if isinstance(summary, MixtureSummary):
        label, shares = plain(summary.label, 40), [(part.value, part.now, part.proposed) for part in summary.slices]
    else:
        pool, selected = (max(1, sum(getattr(part, key) for part in summary.labels)) for key in ("pool", "selected"))
        label, shares = "value", [(part.value, part.pool / pool, part.selected / selected) for part in summary.labels]
    names = unique_names([value for value, _, _ in shares], MAX_CELL_CHARS)
    named = [(name, now, then) for name, (_, now, then) in zip(names, shares, strict=True)]
    lines = sorted(named, key=lambda line: -line[2])
    lines, tail = lines[:SHARES_SHOWN], lines[SHARES_SHOWN:]
    if tail:
        lines.append((f"{len(tail):,} other values", sum(line[1] for line in tail), sum(line[2] for line in tail)))
    guards = [
        {
            "name": name(guard.target),
            "change": {"value": signed(guard.change), "interval": f"\u2265 {signed(guard.low)}"},
            "limit": signed(guard.limit) + " (relaxed)" * guard.is_relaxed,
            "price": f"binds; without it {signed(guard.price)} more" if guard.price else "does not bind",
        }
        for guard in (summary.guards if isinstance(summary, MixtureSummary) else ())
    ]
    targets: list[View] = []  # the change expected on other questions, the change, and the change by runs
    for change in summary.targets:
        row: View = {"name": name(change.target), "weight": f"{change.weight:.0%}", "change": signed(change.change)}
        for column, digits in (("expected", 3), ("nats", 4)):
            value, low, high = (getattr(change, column + end) for end in ("", "_low", "_high"))
            ends = f"[{signed(low, digits)}, {signed(high, digits)}]"
            row[column] = None if value is None else {"value": signed(value, digits), "interval": ends}
        targets.append(row)
    return {
        "title": title,
        "head": plain(f"{summary.headline}; value {signed(summary.value)}, protocol {summary.protocol['name']}.", 400),
        "targets": targets,
        **{column: any(row[column] for row in targets) for column in ("expected", "nats")},
        "scale": plain(summary.scale),
        "confidence": f"{CONFIDENCE:.0%}",
        "label": label,
        "lines": [[value, f"{now:.1%}", f"{then:.1%}"] for value, now, then in lines],
        "guards": guards,
        "notes": [plain(note) for note in summary.notes],
    }
