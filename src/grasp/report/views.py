"""Parts of the page as the template reads them: bars, trust, a selection, a mixture, checkpoints.

Shape letters: G slices, T targets, C checkpoints, B subsets.
"""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np

from grasp.arrays import F64
from grasp.choose.summaries import MixtureSummary, SelectionSummary, TargetChange
from grasp.report.findings import Missing, Retraining
from grasp.report.texts import interval, number, signed
from grasp.report.trends import LabelTrend
from grasp.runs.evaluate import Evaluation, MethodResult
from grasp.runs.learning import DRAWS, LearningCurve, OutcomePredictor
from grasp.runs.metrics import Estimate, TargetMetrics
from grasp.text import LONGEST_CELL, different, name, plain
from grasp.verbs.evaluate import Agreement, TargetPoints

View = dict[str, Any]

SHARES_SHOWN = 30  # values of a label in a selection
CURVE_SHOWN = 12  # budgets in a table
POINTS_SHOWN = 400  # in a scatter
LEFT, RIGHT, TOP, BOTTOM = 40.0, 290.0, 12.0, 154.0  # of a scatter's points, in its own pixels
METRICS = {"rho": "task_rho", "lds": "mean_lds", "positive": "positive", "pairwise": "pairwise"}


# --------------------------------------------------------------------------------------------------- bars


def scale(value: F64) -> float:
    """Where a bar is as long as it gets."""
    return max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-9) * 1.15


def bar(value: float, low: float, high: float, most: float) -> View:
    """What changes without a slice: a bar from the middle, to the left a loss, which says that the slice helps.

    Coloured where the interval leaves zero out.
    """
    start, stop = sorted((0.0, value if abs(value) >= 5e-4 else 0.0))  # what prints as zero has no bar
    return {
        "data": "" if isnan(value) else f"{value:.6g}",
        "value": signed(value),
        "interval": interval(low, high),
        "kind": "helps" if high < 0 else "hurts" if low > 0 else "unsure",
        "bar": "" if isnan(value) else _span(start, stop, most),
        "whisker": "" if isnan(low) or isnan(high) else _span(low, high, most),
    }


def _span(low: float, high: float, most: float) -> str:
    left, right = (50.0 + 50.0 * max(-1.0, min(1.0, end / most)) for end in (low, high))
    return f"left:{left:.1f}%;width:{right - left:.1f}%"


# ------------------------------------------------------------------------------------------ checkpoints


def trends(trend: LabelTrend, names: Sequence[str], targets: Sequence[str]) -> list[View]:
    """A table a target: what each slice adds to what helps, and to what hurts, at each checkpoint."""
    checkpoints = different(trend.checkpoints, LONGEST_CELL)
    return [
        {
            "target": target,
            "checkpoints": checkpoints,
            "lines": [
                [names[g], *(f"{share:+.1%}" for share in trend.share_CGT[:, g, t])]
                for g in np.argsort(-trend.share_CGT[-1, :, t], kind="stable").tolist()
            ],
        }
        for t, target in enumerate(targets)
    ]


# ------------------------------------------------------------------------------------------------- trust


def fidelity(retraining: Retraining, nats: OutcomePredictor | Missing, curve: LearningCurve | None) -> View:
    """What ships beside retraining, a scatter a target, what more runs teach, and other methods."""
    known = retraining.agreement
    report = known.report
    (own,) = [one for one in report.methods if one.method == known.protocol]
    metrics = {row.target: row for row in own.targets}
    return {
        "head": plain(
            f"Runs in {report.environment} ({retraining.role}): recipe {report.recipe}, {report.family}, "
            f"{report.n_subsets} subsets, seeds {', '.join(map(str, report.seeds))}. Geometry, if the "
            "protocol has any, is standardised by the runs' own family."
        ),
        "unfinished": _unfinished(known),
        "protocol": name(known.protocol),
        "own": _fidelity_lines(own, report),
        "others": [line for one in report.methods if one is not own for line in _fidelity_lines(one, report)],
        "notes": [plain(note) for note in (*report.marks(), *report.notes)],
        "points": [_scatter(points, metrics[points.target]) for points in known.points],
        "settings": retraining.settings,
        "draws": DRAWS,
        "curves": [] if curve is None or isinstance(nats, Missing) else _curves(curve, nats.columns, metrics),
    }


def _curves(curve: LearningCurve, columns: Mapping[str, int], metrics: Mapping[str, TargetMetrics]) -> list[View]:
    """A learning curve a target, in the pixels of a figure, with the ceiling where there is one."""
    low_KT, high_KT = curve.rho_KT - curve.spread_KT, curve.rho_KT + curve.spread_KT
    least = min(0.0, float(low_KT.min(initial=0.0)))
    left_K = np.linspace(LEFT + 10, RIGHT - 10, len(curve.counts))

    def up(rho: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (min(rho, 1.0) - least) / (1.0 - least)

    views = []
    for target, t in columns.items():
        row = next((row for theirs, row in metrics.items() if theirs.partition("@")[0] == target), None)
        ceiling = None if row is None else row["task_ceiling"].value
        ends = [f"{number(float(curve.rho_KT[k, t]), 2)} with {curve.counts[k]} runs" for k in (0, -1)]
        views.append(
            {
                "caption": f"{name(target)}: rho " + ", ".join(ends).replace(" with 0 runs", " without runs"),
                "dots": [
                    [f"{x:.1f}", *(f"{up(float(y)):.1f}" for y in ends), count]
                    for x, count, *ends in zip(
                        left_K, curve.counts, curve.rho_KT[:, t], low_KT[:, t], high_KT[:, t], strict=True
                    )
                ],
                "ceiling": None if ceiling is None else f"{up(ceiling):.1f}",
                "y0": signed(least, 1) if least else "0",
                "line": [name(target), *(signed(float(rho), 2) for rho in curve.rho_KT[:, t])],
            }
        )
    return views


def _unfinished(known: Agreement) -> str:
    subsets, seeds = known.report.n_subsets, len(known.report.seeds)
    if (subsets, seeds) == (known.n_planned, known.seeds_planned):
        return ""
    return (
        f"Unfinished: {subsets} of {known.n_planned} subsets with {seeds} of {known.seeds_planned} seeds are there; "
        "the figures will move."
    )


def _scatter(points: TargetPoints, row: TargetMetrics) -> View:
    """Predicted against realized, in the pixels of the figure."""
    x_B, y_B = points.predicted_B[:POINTS_SHOWN], points.realized_B[:POINTS_SHOWN]
    spread_B = np.nan_to_num(points.spread_B[:POINTS_SHOWN])
    left_B = LEFT + (RIGHT - LEFT) * (x_B - x_B.min()) / (np.ptp(x_B) or 1.0)
    low, tall = (y_B - spread_B).min(), np.ptp(np.concatenate([y_B - spread_B, y_B + spread_B])) or 1.0
    up_3B = BOTTOM - (BOTTOM - TOP) * (np.stack([y_B, y_B - spread_B, y_B + spread_B]) - low) / tall
    ceiling, held_out = row["task_ceiling"], " (held-out)" if points.role == "held-out" else ""
    target = f"{name(points.target)}{held_out}"
    limit = "" if ceiling.value is None else f", ceiling {_estimate(ceiling)}"
    return {
        "caption": f"{target}: rho {_estimate(row['task_rho'])}{limit}",
        "about": f"Scatter of predicted against realized utility of {target}, a point a subset",
        "dots": [[f"{number:.1f}" for number in dot] for dot in zip(left_B, *up_3B, strict=True)],
        "x0": signed(float(x_B.min()), 1),
        "x1": signed(float(x_B.max()), 1),
        "y0": signed(float(low), 2),
        "y1": signed(float(low + tall), 2),
    }


def _fidelity_lines(result: MethodResult, report: Evaluation) -> list[View]:
    def line(target: str, units: int, of: Any) -> View:
        shown = {key: _cell(of(metric)) for key, metric in METRICS.items()}
        named = {"method": name(result.method), "target": target, "units": units}
        return named | {"ceiling": _cell(of("task_ceiling"))} | shown

    lines = [line(name(report.marked(row.target, result)), row.n_units, row.__getitem__) for row in result.targets]
    if len(result.targets) > 1:
        lines.append(line(result.average_name, result.n_units, result.average))
    return lines


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    cell = _cell(estimate)
    return f"{cell['value']} {cell['interval']}".rstrip()


def _cell(estimate: Estimate) -> View:
    ends = "" if estimate.low is None or estimate.high is None else f"[{number(estimate.low)}, {number(estimate.high)}]"
    return {"value": "undefined" if estimate.value is None else number(estimate.value), "interval": ends}


# ---------------------------------------------------------------------------------- selection and mixture


def selection(found: SelectionSummary) -> View:
    """What was selected, what it is worth, and what other budgets are worth."""
    points = list(zip(found.curve.rows, found.curve.value, found.curve.effect, strict=True))
    step = max(1, len(points) // CURVE_SHOWN)
    return {
        "title": "The selection",
        "head": plain(found.headline, 400),
        "facts": [
            ("value", f"{signed(found.value)} (weighted mean of the targets)"),
            ("what is guaranteed", plain(found.guarantee)),
            ("scored by", plain(f"protocol {found.protocol.name}")),
        ],
        **_changes(found.targets, found.scale),
        "curve": [[f"{rows:,}", signed(value), signed(effect)] for rows, value, effect in points[step - 1 :: step]],
        "label": "value",
        "columns": ["value", "corpus", "selection"],
        "lines": _shares(found),
        "notes": [plain(note) for note in found.notes],
    }


def _shares(found: SelectionSummary) -> list[list[str]]:
    """What is taken of each value, the most first, the tail as one."""
    pool, taken = sum(one.pool for one in found.labels), sum(one.taken for one in found.labels)
    named = list(zip(different([one.value for one in found.labels], LONGEST_CELL), found.labels, strict=True))
    named.sort(key=lambda pair: -pair[1].taken)
    lines = [(one_name, one.pool, one.taken) for one_name, one in named[:SHARES_SHOWN]]
    rest = [one for _, one in named[SHARES_SHOWN:]]
    if rest:
        lines.append((f"{len(rest):,} other values", sum(one.pool for one in rest), sum(one.taken for one in rest)))
    return [[line[0], _percent(line[1], pool), _percent(line[2], taken)] for line in lines]


def mixture(found: MixtureSummary) -> View:
    """Current and proposed share of every slice, and what the change is worth."""
    slices = zip(different([one.value for one in found.slices], LONGEST_CELL), found.slices, strict=True)
    return {
        "title": "The mixture",
        "head": plain(f"{found.headline}; value {signed(found.value)}, protocol {found.protocol.name}.", 400),
        "facts": [],
        **_changes(found.targets, found.scale),
        "curve": [],
        "label": plain(found.label, 40),
        "columns": [plain(found.label, 40), "now", "proposed"],
        "lines": [
            [one_name, f"{one.now:.1%}", f"{one.proposed:.1%}"]
            for one_name, one in sorted(slices, key=lambda pair: pair[1].now - pair[1].proposed)
        ],
        "notes": [plain(note) for note in found.notes],
    }


def _changes(targets: Sequence[TargetChange], scale: str) -> View:
    """One line a target: the predicted change, and what it is in nats where runs are known."""
    lines = [
        {
            "name": name(one.target),
            "weight": f"{one.weight:.0%}",
            "change": signed(one.change),
            "nats": None if one.nats is None else _nats(one),
        }
        for one in targets
    ]
    return {"targets": lines, "nats": any(line["nats"] for line in lines), "scale": plain(scale)}


def _nats(one: TargetChange) -> View:
    return {"value": signed(one.nats, 4), "interval": f"[{signed(one.nats_low, 4)}, {signed(one.nats_high, 4)}]"}


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
