"""Figures by plotly, as plain JSON. Colours are names of the page's own, so that they follow its light and dark dress.

What a figure shows in colour it shows by shape or position as well. Names of a category axis are its tick labels: the
page cuts them where it is narrow.
Shape letters: G slices, T targets, C checkpoints, B subsets.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from grasp.choose.summaries import MixtureSummary, SelectionSummary
from grasp.extras import require
from grasp.report.findings import LabelFindings
from grasp.report.interactions import Interactions
from grasp.report.texts import plotted
from grasp.report.trends import LabelTrend
from grasp.runs.compare import TargetPoints
from grasp.runs.evaluate import Evaluation
from grasp.runs.metrics import Estimate

go = require("plotly.graph_objects", extra="report", feature="a report")

Figure = dict[str, Any]

HELP, HURT, UNSURE, TEXT, GRID = "var(--help)", "var(--hurt)", "var(--unsure)", "var(--text)", "var(--line)"
DIVERGING = [[0.0, HURT], [0.5, "var(--panel)"], [1.0, HELP]]
SERIES = [f"var(--series-{place})" for place in range(1, 8)]
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "hexagon")
LINE_PIXELS = 21
SIDES_SHOWN = 15  # slices on either side of a figure of effects; the table has all
TREND_SLICES = 6
DIGITS = 6


def overview(label: LabelFindings, targets: Sequence[str]) -> Figure:
    """Slices by targets: what each target loses without the slice."""
    worth_GT = -label.effects.dropped_GT
    order_G = np.argsort(worth_GT.mean(axis=1), kind="stable")  # the best on top
    names = [plotted(label.slices.slices[g].name) for g in order_G]
    figure = _heatmap(
        worth_GT[order_G],
        [plotted(target) for target in targets],
        names,
        "utility lost without it",
        "%{y}<br>%{x}: %{z:+.3f}<extra></extra>",
    )
    return _cut_x(figure, -40)


def effects(label: LabelFindings, t: int) -> Figure:
    """Slices by what one target loses without them, with intervals, the most helpful on top."""
    dropped, low, high = (label.effects.dropped_GT[:, t], label.low_GT[:, t], label.high_GT[:, t])
    order_G = np.argsort(-dropped, kind="stable")
    if len(order_G) > 2 * SIDES_SHOWN:
        order_G = np.concatenate([order_G[:SIDES_SHOWN], order_G[-SIDES_SHOWN:]])
    kinds = (
        ("helps", HELP, "circle", [g for g in order_G if high[g] < 0]),
        ("hurts", HURT, "diamond", [g for g in order_G if low[g] > 0]),
        ("undecided", UNSURE, "circle-open", [g for g in order_G if not (high[g] < 0 or low[g] > 0)]),
    )
    place = {int(g): at for at, g in enumerate(order_G)}
    figure = _figure(height=70 + LINE_PIXELS * len(order_G))
    for kind, colour, symbol, members in kinds:
        if not members:
            continue
        g = np.array(members)
        figure.add_scatter(
            x=_numbers(-dropped[g]),
            y=[place[int(one)] for one in g],
            error_x={
                "array": _numbers(np.nan_to_num(dropped[g] - low[g])),
                "arrayminus": _numbers(np.nan_to_num(high[g] - dropped[g])),
                "color": colour,
                "thickness": 1.5,
                "width": 3,
            },
            mode="markers",
            name=kind,
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=[plotted(label.slices.slices[one].name) for one in g],
            hovertemplate="%{customdata}: %{x:+.3f}<extra></extra>",
        )
    _category(figure, "yaxis", [plotted(label.slices.slices[g].name) for g in order_G])
    figure.update_xaxes(title="utility lost without the slice", zeroline=True, zerolinecolor=TEXT, zerolinewidth=1)
    return _plain(figure)


def interaction_map(label: LabelFindings, found: Interactions) -> Figure:
    """Slices by slices: redundant above 0, completing below."""
    order_G = found.order_G
    cosine_GG = found.cosine_GG[np.ix_(order_G, order_G)].copy()
    np.fill_diagonal(cosine_GG, np.nan)
    names = [plotted(label.slices.slices[g].name) for g in order_G]
    figure = _heatmap(
        cosine_GG,
        names,
        names,
        "cosine",
        "%{y} and %{x}: %{z:+.2f}<extra></extra>",
        [[0.0, HELP], [0.5, "var(--panel)"], [1.0, HURT]],
    )
    return _cut_x(figure, -90)


def trend(found: LabelTrend, names: Sequence[str], t: int) -> Figure:
    """Shares of the slices of one label in what helps and in what hurts one target, checkpoint by checkpoint."""
    share_CG = found.share_CGT[:, :, t]
    largest_G = np.argsort(-np.abs(share_CG).mean(axis=0), kind="stable")[:TREND_SLICES]
    figure = _figure(height=340)
    checkpoints = [plotted(one) for one in found.checkpoints]
    parts = [(plotted(names[g]), share_CG[:, g]) for g in largest_G]
    rest_CG = np.delete(share_CG, largest_G, axis=1)
    for side in (1.0, -1.0) if rest_CG.shape[1] else ():
        side_C = np.where(np.sign(rest_CG) == side, rest_CG, 0.0).sum(axis=1)
        parts.append(("all others", side_C))
    shown: set[str] = set()
    for place, (name, share_C) in enumerate(parts):
        other = name == "all others"
        figure.add_bar(
            x=checkpoints,
            y=_numbers(share_C),
            name=name,
            legendgroup=name,
            showlegend=name not in shown,
            marker={"color": UNSURE if other else SERIES[place], "pattern": {"shape": PATTERNS[place % len(PATTERNS)]}},
            customdata=[name] * len(checkpoints),
        )
        shown.add(name)
    figure.update_traces(hovertemplate="%{customdata}: %{y:+.1%}<extra></extra>")
    figure.update_layout(barmode="relative", bargap=0.45, legend={"orientation": "h", "y": -0.15})
    figure.update_yaxes(title="share of relevance", tickformat=".0%", zeroline=True, zerolinecolor=TEXT)
    figure.update_xaxes(type="category")
    return _plain(figure)


PATTERNS = ("", "/", "", "\\", "", "x", "")


def fidelity(report: Evaluation) -> Figure:
    """Rho of every method on every target, with intervals, and the noise ceiling."""
    targets = [row.target for row in report.methods[0].targets]
    figure = _figure(height=90 + 52 * len(targets))
    offsets = np.linspace(-0.28, 0.28, len(report.methods)) if len(report.methods) > 1 else np.zeros(1)
    for place, method in enumerate(report.methods):
        known = [
            (at, *_ends(row["task_rho"])) for at, row in enumerate(method.targets) if row["task_rho"].value is not None
        ]
        figure.add_scatter(
            x=_numbers([value for _, value, _, _ in known]),
            y=_numbers([at + offsets[place] for at, _, _, _ in known]),
            error_x={
                "array": _numbers([high - value for _, value, _, high in known]),
                "arrayminus": _numbers([value - low for _, value, low, _ in known]),
                "color": SERIES[place % len(SERIES)],
                "thickness": 1.5,
                "width": 3,
            },
            mode="markers",
            name=plotted(method.method),
            marker={"color": SERIES[place % len(SERIES)], "symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9},
            hovertemplate="rho %{x:.3f}<extra>%{fullData.name}</extra>",
        )
    ceilings = [(at, row["task_ceiling"].value) for at, row in enumerate(report.methods[0].targets)]
    marks = [(at, value) for at, value in ceilings if value is not None]
    figure.add_scatter(
        x=_numbers([value for _, value in marks]),
        y=[at for at, _ in marks],
        mode="markers",
        name="noise ceiling",
        marker={"symbol": "line-ns-open", "size": 34, "color": TEXT, "line": {"width": 2}},
        hovertemplate="noise ceiling %{x:.3f}<extra></extra>",
    )
    _category(figure, "yaxis", [plotted(target) for target in targets])
    figure.update_xaxes(
        title="rank correlation with retraining", range=[-1.02, 1.05], zeroline=True, zerolinecolor=TEXT
    )
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return _plain(figure)


def _ends(estimate: Estimate) -> tuple[float, float, float]:
    """Value, low and high; without an interval all the same."""
    value = estimate.value
    assert value is not None
    return value, value if estimate.low is None else estimate.low, value if estimate.high is None else estimate.high


def scatter(points: TargetPoints) -> Figure:
    """Predicted against realized utility of one target, a point a subset."""
    figure = _figure(height=300)
    several = bool(np.isfinite(points.spread_B).all())
    figure.add_scatter(
        x=_numbers(points.predicted_B),
        y=_numbers(points.realized_B),
        error_y={"array": _numbers(points.spread_B), "color": GRID, "thickness": 1, "width": 0} if several else None,
        mode="markers",
        marker={"color": HELP, "size": 7, "opacity": 0.85},
        customdata=[plotted(one) for one in points.subset_ids],
        hovertemplate="%{customdata}<br>predicted %{x:+.2f}, realized %{y:.4f}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title="predicted (standard deviations)")
    figure.update_yaxes(title="realized (nats a token)")
    return _plain(figure)


def curve(selection: SelectionSummary) -> Figure:
    """What other budgets are worth: the next row, and all rows together."""
    figure = _figure(height=320)
    for name, values, colour in (
        ("all rows together", selection.curve.value, HELP),
        ("the next row", selection.curve.effect, TEXT),
    ):
        figure.add_scatter(
            x=list(selection.curve.rows),
            y=_numbers(values),
            mode="lines",
            name=name,
            line={"color": colour},
            hovertemplate="%{x:,} rows: %{y:+.3f}<extra>" + name + "</extra>",
        )
    figure.add_vline(x=selection.rows, line={"color": GRID, "dash": "dash"})
    figure.update_xaxes(title="rows kept", tickformat=",")
    figure.update_yaxes(title="against the corpus average, 0")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return _plain(figure)


def mixture(found: MixtureSummary) -> Figure:
    """Current and proposed weight of every slice."""
    order = sorted(range(len(found.slices)), key=lambda g: found.slices[g].proposed - found.slices[g].now)
    figure = _figure(height=90 + LINE_PIXELS * len(order))
    for g_place, g in enumerate(order):
        one = found.slices[g]
        figure.add_shape(
            type="line",
            x0=one.now,
            x1=one.proposed,
            y0=g_place,
            y1=g_place,
            line={"color": GRID, "width": 3},
            layer="below",
        )
    for name, field, symbol, colour in (
        ("now", "now", "circle-open", TEXT),
        ("proposed", "proposed", "diamond", HELP),
    ):
        figure.add_scatter(
            x=_numbers([getattr(found.slices[g], field) for g in order]),
            y=list(range(len(order))),
            mode="markers",
            name=name,
            marker={"symbol": symbol, "color": colour, "size": 9},
            customdata=[plotted(found.slices[g].value) for g in order],
            hovertemplate="%{customdata}: %{x:.1%}<extra>" + name + "</extra>",
        )
    _category(figure, "yaxis", [plotted(found.slices[g].value) for g in order])
    figure.update_xaxes(title="share of the data", tickformat=".0%", rangemode="tozero")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return _plain(figure)


# ------------------------------------------------------------------------------------------------- parts


def _heatmap(
    value_YX: np.ndarray[Any, np.dtype[np.float64]],
    x_names: Sequence[str],
    y_names: Sequence[str],
    title: str,
    hover: str,
    colours: list[list[Any]] = DIVERGING,
) -> Figure:
    known = np.abs(value_YX[np.isfinite(value_YX)])
    most = float(known.max()) if known.size and known.max() > 0 else 1.0
    figure = _figure(height=130 + LINE_PIXELS * len(y_names))
    figure.add_heatmap(
        z=[_numbers(row) for row in value_YX],
        x=list(range(len(x_names))),
        y=list(range(len(y_names))),
        colorscale=colours,
        zmin=-most,
        zmax=most,
        xgap=1,
        ygap=1,
        colorbar={
            "title": {"text": title, "side": "right", "font": {"size": 13}},
            "thickness": 10,
            "outlinewidth": 0,
            "len": 0.9,
        },
        hovertemplate=hover,
    )
    _category(figure, "xaxis", x_names)
    _category(figure, "yaxis", y_names)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    return _plain(figure)


def _cut_x(figure: Figure, angle: int) -> Figure:
    """Names below the axis are cut at any width."""
    figure["layout"]["xaxis"]["tickangle"] = angle
    figure["layout"]["meta"] = {"cut": ["xaxis"]}
    return figure


def _figure(height: int) -> Any:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 13, "color": TEXT},
        hoverlabel={"bgcolor": "var(--panel)", "bordercolor": GRID, "font": {"color": TEXT}},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        dragmode=False,
    )
    figure.update_xaxes(automargin=True, gridcolor=GRID, linecolor=GRID, zeroline=False, fixedrange=True)
    figure.update_yaxes(automargin=True, gridcolor=GRID, linecolor=GRID, zeroline=False, fixedrange=True)
    return figure


def _category(figure: Any, axis: str, names: Sequence[str]) -> None:
    figure.update_layout(
        {
            axis: {
                "tickmode": "array",
                "tickvals": list(range(len(names))),
                "ticktext": list(names),
                "range": [-0.6, len(names) - 0.4],
            }
        }
    )


def _numbers(values: Any) -> list[float | None]:
    """Rounded to what a figure can show; None where there is none."""
    return [
        None if not np.isfinite(value) else float(f"{value:.{DIGITS}g}") for value in np.asarray(values, dtype=float)
    ]


def _plain(figure: Any) -> Figure:
    plain: Figure = json.loads(figure.to_json())
    plain["layout"].pop("template", None)
    for axis in ("xaxis", "yaxis"):
        if "title" in plain["layout"][axis]:
            plain["layout"][axis]["title"]["font"] = {"size": 13}  # plotly's own is larger than our text
    return plain
