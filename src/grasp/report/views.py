"""Parts of the page as the template reads them: the first screen, slices, trust, a selection, a mixture, suspects.

Shape letters: G slices, T targets, C checkpoints, B subsets, K numbers of runs.
"""

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from grasp import text
from grasp.arrays import F64, Integers
from grasp.build.modality import vision
from grasp.inspect.detect import ShownSuspects
from grasp.predict.predictor import EFFECT_SIZE
from grasp.report.findings import NATS, Findings, LabelFindings, Missing, Worth
from grasp.report.trends import LabelTrend
from grasp.runs.calibration import DRAWS, OUTSIDE
from grasp.runs.evaluation import Evaluation, MethodResult
from grasp.runs.metrics import Estimate, TargetMetrics
from grasp.select.summaries import MixtureSummary, SelectionSummary, TargetChange
from grasp.text import LONGEST_CELL, different, name, plain

View = dict[str, Any]

NAMED = 2  # slices to keep
BARS = 4  # slices on either side of the picture
PAIRS_SHOWN = 6
SHARES_SHOWN = 30  # values of a label in a selection
CURVE_SHOWN = 12  # budgets in a table
POINTS_SHOWN = 400  # in a scatter
LEFT, RIGHT, TOP, BOTTOM = 40.0, 290.0, 12.0, 154.0  # of a scatter's points, in its own pixels
METRICS = {
    "ceiling": "task_ceiling",
    "rho": "task_rho",
    "lds": "mean_lds",
    "positive": "positive",
    "pairwise": "pairwise",
}
OWN_COLUMNS = ("rank", "row_id", "flagged")  # of a table of suspects; the others are scores
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


# ---------------------------------------------------------------------------------------- numbers and bars


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign, a true minus; a dash where there is none."""
    return number(value, digits, "+")


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Without a sign unless it is negative."""
    spelled = text.number(value, digits, sign)
    return DASH if spelled == "-" else spelled.replace("-", MINUS)


def interval(low: float, high: float, digits: int = 3) -> str:
    """Both ends; empty where there is none."""
    return "" if isnan(low) or isnan(high) else f"[{signed(low, digits)}, {signed(high, digits)}]"


def _longest(value: F64) -> float:
    """Where a bar is as long as it gets."""
    return max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-9) * 1.15


def _bar(value: float, low: float, high: float, most: float) -> View:
    """What changes without a slice: a bar from the middle, to the left a loss, which says that the slice helps.

    Coloured where the interval leaves zero out.
    """

    def span(start: float, stop: float) -> str:
        if isnan(start) or isnan(stop):
            return ""
        left, right = (50.0 + 50.0 * max(-1.0, min(1.0, end / most)) for end in (start, stop))
        return f"left:{left:.1f}%;width:{right - left:.1f}%"

    return {
        "data": "" if isnan(value) else f"{value:.6g}",
        "value": signed(value),
        "interval": interval(low, high),
        "kind": "helps" if high < 0 else "hurts" if low > 0 else "unsure",
        "bar": span(*sorted((0.0, 0.0 if abs(value) < 5e-4 else value))),  # what prints as zero has no bar
        "whisker": span(low, high),
    }


# ---------------------------------------------------------------------------------------- the first screen


def headline(found: Findings, targets: Sequence[str]) -> View:
    """The sentence of the page: what divides the targets, then what helps most of them, and what costs them most."""
    whom = targets[0] if len(targets) == 1 else f"{len(targets)} targets"
    if not found.labels:
        return {"whom": whom, "label": "", "keep": [], "cost": [], "alone": False, "divided": []}
    label = found.labels[0]
    sign_GT, alone = label.signs(range(len(targets)))
    change_GT = (label.by_relevance if alone else label.dropped).value_GT
    mean_G = change_GT.mean(axis=1)
    # how far targets want opposite things of a slice: half of the way from its largest sure loss to its largest sure
    # gain; 0 where one side has more than twice as many targets as the other
    gains_GT, losses_GT = (np.where(sign_GT == side, -side * change_GT, 0.0) for side in (1, -1))
    counts_2G = np.stack([(sign_GT == side).sum(axis=1) for side in (1, -1)])
    is_apart_G = counts_2G.min(axis=0) * 2 >= np.maximum(counts_2G.max(axis=0), 1)
    apart_G = np.where(is_apart_G, (gains_GT.max(axis=1) + losses_GT.max(axis=1)) / 2, 0.0)
    named = _named(label, np.where(apart_G > 0, 0, sign_GT.sum(axis=1)), mean_G)
    least = min((abs(mean_G[label.names.index(one)]) for one in (*named["keep"], *named["cost"])), default=0.0)
    divided = [
        {
            "name": label.names[g],
            "gain": [target for target, sign in zip(targets, sign_GT[g], strict=True) if sign == 1],
            "lose": [target for target, sign in zip(targets, sign_GT[g], strict=True) if sign == -1],
        }
        for g in [g for g in np.argsort(-apart_G, kind="stable").tolist() if apart_G[g] > least][:NAMED]
    ]
    return {"whom": whom, "label": plain(label.slices.label, 40), "alone": alone, "divided": divided} | named


def _named(label: LabelFindings, votes_G: Integers, change_G: F64) -> View:
    """Slices to keep, and the one that costs most; none whose interval holds zero."""
    order = np.argsort(change_G, kind="stable").tolist()
    keep = [label.names[g] for g in order if votes_G[g] > 0 and change_G[g] < 0][:NAMED]
    return {"keep": keep, "cost": [label.names[g] for g in order if votes_G[g] < 0 and change_G[g] > 0][-1:]}


def answers(found: Findings, targets: Sequence[str]) -> list[View]:
    """One a target: what to keep, what that is worth, and how far to trust it."""
    answers = []
    for t, target in enumerate(targets):
        answer: View = {"target": target, "keep": [], "cost": [], "bars": [], "alone": False}
        if found.labels:
            label = found.labels[0]
            sign_G1, alone = label.signs([t])
            dropped = label.by_relevance if alone else label.dropped
            change_G, low_G, high_G = dropped.value_GT[:, t], dropped.low_GT[:, t], dropped.high_GT[:, t]
            order = np.argsort(change_G, kind="stable").tolist()
            shown = order if len(order) <= 2 * BARS else order[:BARS] + order[-BARS:]  # those at the ends, best first
            most = _longest(change_G[shown])
            bars = [{"name": label.names[g]} | _bar(change_G[g], low_G[g], high_G[g], most) for g in shown]
            answer |= _named(label, sign_G1[:, 0], change_G) | {"bars": bars, "alone": alone}
        answers.append(answer | {"best": _best(found, t), "trust": _trust(found, found.targets[t])})
    units = {answer["best"]["unit"] for answer in answers}
    for answer in answers:
        answer["short_unit"] = answer["best"]["unit"] if len(units) > 1 else ""
    return answers


def _best(found: Findings, t: int) -> View:
    """What a choice of rows is worth: the one that was given, else the best part of them."""
    share, what, worth, selection = found.best_share, "", found.best[t], found.selection
    if not isinstance(selection, Missing):
        for one in (one for one in selection.targets if one.target == found.targets[t]):
            share = selection.rows / found.n_rows
            if selection.documents is not None:
                what = f"the best {selection.documents:,} documents"
            said = next((note for note in selection.notes if note.startswith(OUTSIDE)), "")
            outside = said.partition(" (")[2].removesuffix(")")
            if one.nats is None:
                unit = "effect sizes" if selection.scale == EFFECT_SIZE else plain(selection.scale)
                worth = Worth(nan if one.change is None else one.change, unit, outside=outside)
            else:
                runs_unit = selection.runs_unit or "nats"
                low, high = (nan if end is None else end for end in (one.nats_low, one.nats_high))
                worth = Worth(one.nats, NATS.get(runs_unit, plain(runs_unit)), low, high, outside)
    return {
        "what": what or f"the best {share:{'.0%' if share >= 0.01 else '.2%'}} of rows",
        "value": signed(worth.value, 2),
        "unit": worth.unit,
        "interval": interval(worth.low, worth.high, 2),
        "kind": "helps" if worth.low > 0 else "hurts" if worth.high < 0 else "",
        "outside": plain(worth.outside),
    }


def _trust(found: Findings, target: str) -> str:
    """How far predictions agree with retraining; empty where nobody knows."""
    if isinstance(found.agreement, Missing):
        return ""
    known = found.agreement
    (result,) = [one for one in known.report.methods if one.method == known.protocol]
    rows = [row for row in result.targets if row.target.partition("@")[0] == target]
    if not rows or rows[0]["task_rho"].value is None:
        return ""
    rho, ceiling = rows[0]["task_rho"].value, rows[0]["task_ceiling"].value
    seen = ", though the rule was chosen on these very models" if target in result.chosen_on else ""
    models = f"Models retrained on {known.report.n_subsets} subsets"
    if rho <= 0:
        return f"{models} do not agree with these predictions: rho {number(rho, 2)}{seen}."
    if ceiling is None or ceiling <= 0:
        return f"{models} agree with these predictions: rho {number(rho, 2)}{seen}."
    if rho >= ceiling:
        return f"{models} agree with these predictions as far as noise allows to see: rho {number(rho, 2)}{seen}."
    return f"{models} agree with these predictions at {number(rho / ceiling, 2)} of what noise allows{seen}."


# -------------------------------------------------------------------------------------------------- slices


def slices(label: LabelFindings, trend: LabelTrend | None, targets: Sequence[str]) -> View:
    """A label: a line a slice, slices that are alike and unlike, and what each added at earlier checkpoints."""
    names, dropped = label.names, label.dropped
    mean_G, most, nothing = dropped.value_GT.mean(axis=1), _longest(dropped.value_GT), float("nan")
    lines = []
    for g in np.argsort(mean_G, kind="stable").tolist():
        ends = zip(dropped.value_GT[g], dropped.low_GT[g], dropped.high_GT[g], strict=True)
        cells = [_bar(*end, most) for end in ends]
        if len(targets) > 1:
            cells.append(_bar(mean_G[g], nothing, nothing, most))
        lines.append({"g": g, "name": names[g], "rows": label.slices.slices[g].rows, "cells": cells})
    # slices whose mean sketches point the same way, and those that point apart. Source: eq:ia-discrete-curvature
    cosine_GG = np.empty((0, 0)) if label.cosine_GG is None else label.cosine_GG
    pairs = [(i, j) for i, j in zip(*np.triu_indices(len(cosine_GG), 1), strict=True) if np.isfinite(cosine_GG[i, j])]
    pairs.sort(key=lambda pair: -cosine_GG[pair])
    alike, unlike = (
        [[names[i], names[j], signed(float(cosine_GG[i, j]), 2)] for i, j in ends if sign * cosine_GG[i, j] > 0]
        for sign, ends in ((1, pairs[:PAIRS_SHOWN]), (-1, pairs[::-1][:PAIRS_SHOWN]))
    )
    trends = []
    if trend is not None:
        checkpoints = different(trend.checkpoints, LONGEST_CELL)
        for t, target in enumerate(targets):
            shares = [
                [names[g], *(f"{share:+.1%}" for share in trend.share_CGT[:, g, t])]
                for g in np.argsort(-trend.share_CGT[-1, :, t], kind="stable").tolist()
            ]
            trends.append({"target": target, "checkpoints": checkpoints, "lines": shares})
    return {
        "title": plain(label.slices.label, 40),
        "lines": lines,
        "grouped": label.slices.n_grouped and f"{label.slices.n_grouped:,}",
        "last": names[-1],
        "trends": trends,
        "redundant": alike,
        "completing": unlike,
    }


# --------------------------------------------------------------------------------------------------- trust


def fidelity(found: Findings) -> View | None:
    """What ships beside retraining, a scatter a target, what more runs teach, and other methods."""
    known, environment = found.agreement, found.environment
    if isinstance(known, Missing) or environment is None:
        return None
    report = known.report
    (own,) = [one for one in report.methods if one.method == known.protocol]
    metrics = {row.target: row for row in own.targets}
    subsets, seeds = report.n_subsets, len(report.seeds)
    unfinished = ""
    if (subsets, seeds) != (known.n_planned, known.seeds_planned):
        unfinished = (
            f"Unfinished: {subsets} of {known.n_planned} subsets with {seeds} of {known.seeds_planned} seeds are "
            "there; the figures will move."
        )

    # predicted against realized, in the pixels of the figure
    scatters = []
    for points in known.points:
        x_B, y_B = points.predicted_B[:POINTS_SHOWN], points.realized_B[:POINTS_SHOWN]
        spread_B = np.nan_to_num(points.spread_B[:POINTS_SHOWN])
        left_B = LEFT + (RIGHT - LEFT) * (x_B - x_B.min()) / (np.ptp(x_B) or 1.0)
        low, tall = (y_B - spread_B).min(), np.ptp(np.concatenate([y_B - spread_B, y_B + spread_B])) or 1.0
        up_3B = BOTTOM - (BOTTOM - TOP) * (np.stack([y_B, y_B - spread_B, y_B + spread_B]) - low) / tall
        target = f"{name(points.target)}{' (held-out)' if points.role == 'held-out' else ''}"
        row = metrics[points.target]
        limit = "" if row["task_ceiling"].value is None else f", ceiling {_estimate(row['task_ceiling'])}"
        scatters.append(
            {
                "caption": f"{target}: rho {_estimate(row['task_rho'])}{limit}",
                "about": f"Scatter of predicted against realized utility of {target}, a point a subset",
                "dots": [[f"{pixel:.1f}" for pixel in dot] for dot in zip(left_B, *up_3B, strict=True)],
                "x0": signed(float(x_B.min()), 1),
                "x1": signed(float(x_B.max()), 1),
                "y0": signed(float(low), 2),
                "y1": signed(float(low + tall), 2),
            }
        )
    return {
        "head": plain(
            f"Runs in {report.environment} ({environment.role}): recipe {report.recipe}, {report.family}, "
            f"{subsets} subsets, seeds {', '.join(map(str, report.seeds))}. Geometry, if the "
            "protocol has any, is standardised by the runs' own family."
        ),
        "unfinished": unfinished,
        "protocol": name(known.protocol),
        "own": _fidelity_lines(own, report),
        "others": [line for one in report.methods if one is not own for line in _fidelity_lines(one, report)],
        "notes": [plain(note) for note in (*report.marks(), *report.notes)],
        "points": scatters,
        "draws": DRAWS,
        "curves": _curves(found, own),
    }


def _curves(found: Findings, own: MethodResult) -> list[View]:
    """A learning curve a target, in the pixels of a figure, with the ceiling where there is one."""
    curve = found.curve
    if curve is None or isinstance(found.nats, Missing):
        return []
    low_KT, high_KT = curve.rho_KT - curve.spread_KT, curve.rho_KT + curve.spread_KT
    least = min(0.0, float(low_KT.min(initial=0.0)))
    left_K = np.linspace(LEFT + 10, RIGHT - 10, len(curve.counts))

    def up(rho: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * (min(rho, 1.0) - least) / (1.0 - least):.1f}"

    views = []
    for target, t in found.nats.columns.items():
        row = next((row for row in own.targets if row.target.partition("@")[0] == target), None)
        ceiling = None if row is None else row["task_ceiling"].value
        ends = [f"{number(float(curve.rho_KT[k, t]), 2)} with {curve.counts[k]} runs" for k in (0, -1)]
        views.append(
            {
                "caption": f"{name(target)}: rho " + ", ".join(ends).replace(" with 0 runs", " without runs"),
                "dots": [
                    [f"{x:.1f}", *(up(float(rho_KT[k, t])) for rho_KT in (curve.rho_KT, low_KT, high_KT)), count]
                    for k, (x, count) in enumerate(zip(left_K, curve.counts, strict=True))
                ],
                "ceiling": None if ceiling is None else up(ceiling),
                "y0": signed(least, 1) if least else "0",
                "line": [name(target), *(signed(float(rho), 2) for rho in curve.rho_KT[:, t])],
            }
        )
    return views


def _fidelity_lines(result: MethodResult, report: Evaluation) -> list[View]:
    def line(target: str, row: TargetMetrics) -> View:
        shown = {key: _cell(row[metric]) for key, metric in METRICS.items()}
        return {"method": name(result.method), "target": target, "units": row.n_units} | shown

    lines = [line(name(report.marked(row.target, result)), row) for row in result.targets]
    if len(result.targets) > 1:
        lines.append(line(result.mean.target, result.mean))
    return lines


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    return " ".join(_cell(estimate).values()).rstrip()


def _cell(estimate: Estimate) -> View:
    ends = "" if estimate.low is None or estimate.high is None else f"[{number(estimate.low)}, {number(estimate.high)}]"
    return {"value": "undefined" if estimate.value is None else number(estimate.value), "interval": ends}


# ---------------------------------------------------------------------------------- selection and mixture


def selection(found: SelectionSummary) -> View:
    """What was selected, what it is worth, and what other budgets are worth."""
    points = list(zip(found.curve.rows, found.curve.value, found.curve.effect, strict=True))
    step = max(1, len(points) // CURVE_SHOWN)
    # what is taken of each value, the most first, the tail as one
    pool, taken = sum(one.pool for one in found.labels), sum(one.taken for one in found.labels)
    values = different([one.value for one in found.labels], LONGEST_CELL)
    shares = [(value, one.pool, one.taken) for value, one in zip(values, found.labels, strict=True)]
    shares.sort(key=lambda share: -share[2])
    shares, tail = shares[:SHARES_SHOWN], shares[SHARES_SHOWN:]
    if tail:
        shares.append((f"{len(tail):,} other values", sum(one[1] for one in tail), sum(one[2] for one in tail)))
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
        "lines": [[value, _percent(there, pool), _percent(here, taken)] for value, there, here in shares],
        "notes": [plain(note) for note in found.notes],
    }


def mixture(found: MixtureSummary) -> View:
    """Current and proposed share of every slice, and what the change is worth."""
    values = zip(different([one.value for one in found.slices], LONGEST_CELL), found.slices, strict=True)
    return {
        "title": "The mixture",
        "head": plain(f"{found.headline}; value {signed(found.value)}, protocol {found.protocol.name}.", 400),
        "facts": [],
        **_changes(found.targets, found.scale),
        "curve": [],
        "label": plain(found.label, 40),
        "columns": [plain(found.label, 40), "now", "proposed"],
        "lines": [
            [value, f"{one.now:.1%}", f"{one.proposed:.1%}"]
            for value, one in sorted(values, key=lambda pair: pair[1].now - pair[1].proposed)
        ],
        "notes": [plain(note) for note in found.notes],
    }


def _changes(targets: Sequence[TargetChange], scale: str) -> View:
    """One line a target: the predicted change, and what it is in nats where runs are known."""
    lines: list[View] = []
    for one in targets:
        nats = None
        if one.nats is not None:
            nats = {
                "value": signed(one.nats, 4),
                "interval": f"[{signed(one.nats_low, 4)}, {signed(one.nats_high, 4)}]",
            }
        line = {"name": name(one.target), "weight": f"{one.weight:.0%}", "change": signed(one.change)}
        lines.append(line | {"nats": nats})
    return {"targets": lines, "nats": any(line["nats"] for line in lines), "scale": plain(scale)}


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


# ------------------------------------------------------------------------------------------------ suspects


def suspects(found: ShownSuspects) -> View:
    """What was flagged and by what, how the scores compare with the truth, and the first rows."""
    record, detections = found.record, found.record.detections
    some = next(iter(detections.values()), None)
    rows = []
    for line, row, picture in zip(found.lines, found.rows, found.pictures, strict=True):
        others = [score for score in line if score not in (*OWN_COLUMNS, record.ranking)]
        rows.append(
            {
                "rank": line["rank"],
                "flagged": line["flagged"],
                "scores": [(name(score), signed(line[score])) for score in (record.ranking, *reversed(others))],
                "labels": list(dict.fromkeys(str(row[label]) for label in found.labels if row[label] is not None)),
                "row_id": line["row_id"],
                "text": row["snippet"] or "",
                "picture": None if picture is None else vision().picture_url(picture),
            }
        )
    return {
        "head": f"Held against {name(record.target)}. {plain(record.headline)}",
        "ranking": name(record.ranking),
        "measured": [
            {
                "name": name(score),
                "auroc": {
                    "value": number(one.auroc),
                    "interval": f"[{number(one.auroc_low)}, {number(one.auroc_high)}]",
                },
                "precision": number(one.average_precision),
                "at_k": [number(value) for value in one.at_k.shares],
                "best": f"{number(one.best.f1)} at {one.best.k:,}",
            }
            for score, one in detections.items()
        ],
        "truth": "" if some is None else f"{some.n_planted:,} rows",
        "k": "" if some is None else f"{some.at_k.k:,}",
        "rows": rows,
        "notes": [plain(note) for note in record.notes],
    }
