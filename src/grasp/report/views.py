"""View models of the page: one function per section returns the texts and bar positions that the template shows.

Start with `answers`, the first section. Shape letters: G slices, T targets, C checkpoints, B subsets, K run counts.
"""

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from grasp import text
from grasp.arrays import F64, Integers
from grasp.predict.predictor import EFFECT_SIZE
from grasp.report.findings import Findings, LabelFindings, Missing, PredictedGain, display_unit
from grasp.runs.calibration import N_DRAWS
from grasp.runs.evaluation import MethodResult
from grasp.runs.metrics import Estimate
from grasp.select.summaries import MixtureSummary, SelectionSummary, TargetChange
from grasp.text import MAX_CELL_CHARS, name, plain, unique_names

View = dict[str, Any]

MAX_SLICES_NAMED = 2  # slices to keep that are named in a sentence
BARS_PER_END = 4  # most helpful and most harmful slices in a bar chart
SHARES_SHOWN = 30  # label values in the table of a selection
CURVE_SHOWN = 12  # budgets in the table of a selection
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


def _bars(value: F64, low: F64, high: F64, sign: Integers) -> list[View]:
    """Return centred bars, on one scale, for the changes if slices are dropped.

    A bar to the left (negative) means that the slice helps. It is coloured if the change is significant: `sign` is 1 or
    -1.
    """
    # the value at which a bar has full length: the largest magnitude plus a margin
    scale = max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-9) * 1.15

    def span(start: float, stop: float) -> str:
        if isnan(start) or isnan(stop):
            return ""
        left, right = (50.0 + 50.0 * max(-1.0, min(1.0, end / scale)) for end in (start, stop))
        return f"left:{left:.1f}%;width:{right - left:.1f}%"

    return [
        {
            "data": "" if isnan(change) else f"{change:.6g}",
            "value": signed(change),
            "interval": interval(least, most),
            "kind": ("unsure", "hurts", "helps")[side],  # of sign 0, 1 and -1
            "bar": span(*sorted((0.0, 0.0 if abs(change) < 5e-4 else change))),  # no bar if the value rounds to zero
            "whisker": span(least, most),
        }
        for change, least, most, side in zip(*(part.ravel().tolist() for part in (value, low, high, sign)), strict=True)
    ]


def headline(findings: Findings, targets: Sequence[str]) -> View:
    """Return the headline: slices with opposite effects on targets, slices to keep, and the most harmful slice."""
    subject = targets[0] if len(targets) == 1 else f"{len(targets)} targets"
    if not findings.labels:
        return {"subject": subject, "label": "", "keep": [], "harmful": [], "by_relevance": False, "opposed": []}
    label = findings.labels[0]
    sign_GT, by_relevance = label.signs(range(len(targets)))
    change_GT = (label.by_relevance if by_relevance else label.dropped).value_GT
    mean_G = change_GT.mean(axis=1)
    # Disagreement of targets about a slice: half the distance between its largest significant gain and its largest
    # significant loss; 0 if one side has more than twice as many targets as the other.
    gains_GT, losses_GT = (np.where(sign_GT == side, -side * change_GT, 0.0) for side in (1, -1))
    counts_2G = np.stack([(sign_GT == side).sum(axis=1) for side in (1, -1)])
    is_balanced_G = counts_2G.min(axis=0) * 2 >= np.maximum(counts_2G.max(axis=0), 1)
    disagreement_G = np.where(is_balanced_G, (gains_GT.max(axis=1) + losses_GT.max(axis=1)) / 2, 0.0)
    named = _named_slices(label, np.where(disagreement_G > 0, 0, sign_GT.sum(axis=1)), mean_G)
    named_effects = [abs(mean_G[label.names.index(value)]) for value in (*named["keep"], *named["harmful"])]
    least = min(named_effects, default=0.0)
    by_disagreement = np.argsort(-disagreement_G, kind="stable").tolist()
    opposed = [
        {
            "name": label.names[g],
            "gain": [target for target, sign in zip(targets, sign_GT[g], strict=True) if sign == 1],
            "lose": [target for target, sign in zip(targets, sign_GT[g], strict=True) if sign == -1],
        }
        for g in [g for g in by_disagreement if disagreement_G[g] > least][:MAX_SLICES_NAMED]
    ]
    view = {"subject": subject, "label": plain(label.slices.label, 40), "by_relevance": by_relevance}
    return view | {"opposed": opposed} | named


def _named_slices(label: LabelFindings, votes_G: Integers, change_G: F64) -> View:
    """Return the slices to keep and the most harmful slice; only slices with significant effects are named."""
    order = np.argsort(change_G, kind="stable").tolist()
    keep = [label.names[g] for g in order if votes_G[g] > 0 and change_G[g] < 0][:MAX_SLICES_NAMED]
    return {"keep": keep, "harmful": [label.names[g] for g in order if votes_G[g] < 0 and change_G[g] > 0][-1:]}


def answers(findings: Findings, targets: Sequence[str]) -> list[View]:
    """Return one answer per target: what to keep, the predicted gain, and the agreement with retraining."""
    answers = []
    for t, target in enumerate(targets):
        answer: View = {"target": target, "keep": [], "harmful": [], "bars": [], "by_relevance": False}
        if findings.labels:
            label = findings.labels[0]
            sign_G1, by_relevance = label.signs([t])
            dropped = label.by_relevance if by_relevance else label.dropped
            change_G = dropped.value_GT[:, t]
            order = np.argsort(change_G, kind="stable").tolist()
            # the largest and the smallest changes, most helpful slice first
            shown = order if len(order) <= 2 * BARS_PER_END else order[:BARS_PER_END] + order[-BARS_PER_END:]
            views = _bars(
                change_G[shown], dropped.low_GT[shown, t], dropped.high_GT[shown, t], dropped.sign_GT[shown, t]
            )
            bars = [{"name": label.names[g]} | view for g, view in zip(shown, views, strict=True)]
            answer |= _named_slices(label, sign_G1[:, 0], change_G) | {"bars": bars, "by_relevance": by_relevance}
        answers.append(answer | {"gain": _gain(findings, t), "agreement": _agreement(findings, findings.targets[t])})
    units = {answer["gain"]["unit"] for answer in answers}
    for answer in answers:
        answer["short_unit"] = answer["gain"]["unit"] if len(units) > 1 else ""
    return answers


def _gain(findings: Findings, t: int) -> View:
    """Return the predicted gain from the selection, if there is one, else from the most helpful rows."""
    share, subset, gain, selection = findings.top_share, "", findings.top_gains[t], findings.selection
    if not isinstance(selection, Missing):
        for change in (change for change in selection.targets if change.target == findings.targets[t]):
            share = selection.rows / findings.n_rows
            if selection.documents is not None:
                subset = f"the best {selection.documents:,} documents"
            unit = "effect sizes" if selection.scale == EFFECT_SIZE else plain(selection.scale)
            ends: tuple[float | None, ...] = change.change, None, None
            if change.nats is not None:
                ends = change.nats, change.nats_low, change.nats_high
                unit = display_unit(plain(selection.runs_unit or "nats"))
            elif change.expected is not None:
                ends = change.expected, change.expected_low, change.expected_high
                unit += " on other questions"
            value, low, high = (nan if end is None else end for end in ends)
            gain = PredictedGain(value, unit, low, high, selection.outside)
    return {
        "subset": subset or f"the best {share:{'.0%' if share >= 0.01 else '.2%'}} of rows",
        "value": signed(gain.value, 2),
        "unit": gain.unit,
        "interval": interval(gain.low, gain.high, 2),
        "kind": "helps" if gain.low > 0 else "hurts" if gain.high < 0 else "",
        "outside": plain(gain.outside),
    }


def _agreement(findings: Findings, target: str) -> str:
    """Return a sentence on the agreement of predictions with retraining; empty if it is unknown."""
    if isinstance(findings.agreement, Missing):
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


def slices(label: LabelFindings) -> View:
    """Return the table of a label, one row per slice, the most helpful one first."""
    dropped, n_targets = label.dropped, label.dropped.value_GT.shape[1]
    bars = _bars(dropped.value_GT, dropped.low_GT, dropped.high_GT, dropped.sign_GT)
    lines = [
        {
            "g": g,
            "name": label.names[g],
            "rows": label.slices.slices[g].rows,
            "cells": bars[g * n_targets : (g + 1) * n_targets],
        }
        for g in np.argsort(dropped.value_GT.mean(axis=1), kind="stable").tolist()
    ]
    return {
        "title": plain(label.slices.label, 40),
        "lines": lines,
        "grouped": label.slices.n_grouped and f"{label.slices.n_grouped:,}",
        "last": label.names[-1],
    }


def fidelity(findings: Findings) -> View | None:
    """Return the comparison with retraining: metrics, one scatter plot per target, and learning curves."""
    agreement, runs = findings.agreement, findings.runs
    if isinstance(agreement, Missing) or runs is None:
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
        "draws": N_DRAWS,
        "curves": _curves(findings, default_method),
    }


def _curves(findings: Findings, default_method: MethodResult) -> list[View]:
    """Return one learning curve per target, scaled to the plot area, with the noise ceiling if it is known."""
    curve = findings.curve
    if curve is None or isinstance(findings.outcomes, Missing):
        return []
    low_KT, high_KT = curve.rho_KT - curve.std_KT, curve.rho_KT + curve.std_KT
    least = min(0.0, float(low_KT.min(initial=0.0)))
    left_K = np.linspace(LEFT + 10, RIGHT - 10, len(curve.counts))
    slope = (BOTTOM - TOP) / (1.0 - least)  # pixels per unit of rho; at most 1 is shown
    top_3KT = BOTTOM - slope * (np.minimum(np.stack([curve.rho_KT, low_KT, high_KT]), 1.0) - least)
    views = []
    for target, t in findings.outcomes.task_by_target.items():
        row = next((row for row in default_method.targets if row.target.partition("@")[0] == target), None)
        ceiling = None if row is None else row["task_ceiling"].value
        ends = [f"{number(float(curve.rho_KT[k, t]), 2)} with {curve.counts[k]} runs" for k in (0, -1)]
        views.append(
            {
                "caption": f"{name(target)}: rho " + ", ".join(ends).replace(" with 0 runs", " without runs"),
                "dots": [
                    [f"{x:.1f}", *(f"{pixel:.1f}" for pixel in top_3KT[:, k, t]), count]
                    for k, (x, count) in enumerate(zip(left_K, curve.counts, strict=True))
                ],
                "ceiling": None if ceiling is None else f"{BOTTOM - slope * (min(ceiling, 1.0) - least):.1f}",
                "y0": signed(least, 1) if least else "0",
                "line": [name(target), *(signed(float(rho), 2) for rho in curve.rho_KT[:, t])],
            }
        )
    return views


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


def selection(summary: SelectionSummary) -> View:
    """Return the selection: its predicted value, shares by label value, and the value of other budgets."""
    points = list(zip(summary.curve.rows, summary.curve.value, summary.curve.effect, strict=True))
    step = max(1, len(points) // CURVE_SHOWN)
    # rows per label value, largest first; rare values are summed
    n_rows = max(1, sum(label.pool for label in summary.labels))
    n_selected = max(1, sum(label.selected for label in summary.labels))
    values = unique_names([label.value for label in summary.labels], MAX_CELL_CHARS)
    counts = [(value, label.pool, label.selected) for value, label in zip(values, summary.labels, strict=True)]
    counts.sort(key=lambda count: -count[2])
    counts, tail = counts[:SHARES_SHOWN], counts[SHARES_SHOWN:]
    if tail:
        counts.append((f"{len(tail):,} other values", sum(n for _, n, _ in tail), sum(n for _, _, n in tail)))
    return {
        "title": "The selection",
        "head": plain(summary.headline, 400),
        "facts": [
            ("value", f"{signed(summary.value)} (weighted mean of the targets)"),
            ("guarantee", plain(summary.guarantee)),
            ("protocol", plain(summary.protocol.name)),
        ],
        **_changes(summary.targets, summary.scale),
        "curve": [[f"{rows:,}", signed(value), signed(effect)] for rows, value, effect in points[step - 1 :: step]],
        "label": "value",
        "columns": ["value", "corpus", "selection"],
        "lines": [[value, f"{n / n_rows:.1%}", f"{k / n_selected:.1%}"] for value, n, k in counts],
        "notes": [plain(note) for note in summary.notes],
    }


def mixture(summary: MixtureSummary) -> View:
    """Return the mixture: current and proposed share of every slice, and the predicted changes."""
    values = zip(unique_names([share.value for share in summary.slices], MAX_CELL_CHARS), summary.slices, strict=True)
    return {
        "title": "The mixture",
        "head": plain(f"{summary.headline}; value {signed(summary.value)}, protocol {summary.protocol.name}.", 400),
        "facts": [],
        **_changes(summary.targets, summary.scale),
        "curve": [],
        "label": plain(summary.label, 40),
        "columns": [plain(summary.label, 40), "current", "proposed"],
        "lines": [
            [value, f"{share.now:.1%}", f"{share.proposed:.1%}"]
            for value, share in sorted(values, key=lambda pair: pair[1].now - pair[1].proposed)
        ],
        "notes": [plain(note) for note in summary.notes],
    }


def _changes(targets: Sequence[TargetChange], scale: str) -> View:
    """Return one table row per target: the change expected on other questions, the change, and the change by runs."""
    lines: list[View] = [
        {
            "name": name(change.target),
            "weight": f"{change.weight:.0%}",
            "change": signed(change.change),
            "expected": _with_interval(change.expected, change.expected_low, change.expected_high, 3),
            "nats": _with_interval(change.nats, change.nats_low, change.nats_high, 4),
        }
        for change in targets
    ]
    has = {column: any(line[column] for line in lines) for column in ("expected", "nats")}
    return {"targets": lines, **has, "scale": plain(scale)}


def _with_interval(value: float | None, low: float | None, high: float | None, digits: int) -> View | None:
    """Return a value with its interval as text; None without a value."""
    if value is None:
        return None
    return {"value": signed(value, digits), "interval": f"[{signed(low, digits)}, {signed(high, digits)}]"}
