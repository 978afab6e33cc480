"""The page: findings in words and tables, put into the template; nothing from the corpus leaves it unescaped."""

import base64
import functools
import gzip
import hashlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import grasp
from grasp.choose.summaries import MixtureSummary, SelectionSummary, TargetChange
from grasp.errors import SettingsError
from grasp.extras import require
from grasp.files import written_aside
from grasp.report import figures as draw
from grasp.report.findings import MIN_TOKENS, Findings, LabelFindings, Missing, Retraining
from grasp.report.interactions import Interactions, Pair
from grasp.report.suspects import suspects_view
from grasp.report.texts import interval, number, signed
from grasp.report.trends import LabelTrend
from grasp.report.whatif import payload
from grasp.runs.compare import Agreement, TargetPoints
from grasp.runs.evaluate import Evaluation, MethodResult
from grasp.runs.metrics import Estimate, TargetMetrics
from grasp.text import LONGEST_CELL, different, ending, json_text, name, plain, skipped_text

jinja2 = require("jinja2", extra="report", feature="a report")
markupsafe = require("markupsafe", extra="report", feature="a report")
offline = require("plotly.offline", extra="report", feature="a report")

View = dict[str, Any]

SHARES_SHOWN = 30  # values of a label in a selection
SCRIPTS = ("figures.js", "whatif.js")


def write_report(found: Findings, path: Path) -> int:
    """Write the page; it appears only when whole. Returns its size in bytes.

    Raises:
        SettingsError: it cannot be written there.
    """
    data = render(found).encode()
    try:
        with written_aside(path) as part:
            part.write_bytes(data)
    except (IsADirectoryError, FileNotFoundError, NotADirectoryError) as err:
        raise SettingsError(f"--out: got {path}, which cannot be written ({err.strerror}); name a file") from err
    return len(data)


def render(found: Findings) -> str:
    """The whole page as text."""
    scripts = [_resource(script) for script in SCRIPTS]
    plots: dict[str, draw.Figure] = {}
    context = _context(found, plots)
    page: str = _template().render(
        **context,
        title=f"{name(found.built.name)}: what the data is worth",
        version=grasp.__version__,
        policy=_policy([*scripts, _library()]),
        style=markupsafe.Markup(_resource("style.css")),
        scripts=[markupsafe.Markup(script) for script in scripts],
        figures=_data(plots),
        whatif=_data(payload(found)),
        plotly=_packed(),
    )
    return page


# ----------------------------------------------------------------------------------------------- the file


def _policy(scripts: Sequence[str]) -> str:
    """No network at all, and no script but our own."""
    sums = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{checksum}'" for checksum in sums)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _data(value: Any) -> Any:
    """JSON that cannot end the element it stands in."""
    return markupsafe.Markup(
        json_text(value, None).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    )


def _resource(file: str) -> str:
    return files("grasp.report").joinpath("templates", file).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    source: str = offline.get_plotlyjs()
    return source


@functools.cache
def _packed() -> str:
    """The library at less than half of its size; the page unpacks it."""
    return base64.b64encode(gzip.compress(_library().encode(), 9, mtime=0)).decode()


@functools.cache
def _template() -> Any:
    world = jinja2.Environment(
        loader=jinja2.PackageLoader("grasp.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    world.filters |= {"plain": plain, "name": name, "signed": signed, "ending": ending, "lines": _lines}
    world.filters["breakable"] = _breakable
    return world.get_template("page.html")


def _breakable(text: str) -> Any:
    """Escaped, with a place to break after every underscore or slash."""
    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(escaped.replace("_", "_<wbr>").replace("/", "/<wbr>"))


def _lines(text: str) -> str:
    return "\n".join(plain(line, 2_000) if line.strip() else "" for line in text.splitlines())


# ------------------------------------------------------------------------------------------------ context


def _context(found: Findings, plots: dict[str, draw.Figure]) -> View:
    targets = different(found.targets, LONGEST_CELL)
    labels = [_label(place, label, found, plots) for place, label in enumerate(found.labels)]
    fidelity = None if isinstance(found.retraining, Missing) else _fidelity(found.retraining, plots)
    return {
        "found": found,
        "sections": SECTIONS,
        "targets": targets,
        "labels": labels,
        "cards": [_card(found, t, target) for t, target in enumerate(targets)] if found.labels else [],
        "trust_notes": _trust_notes(found),
        "trends": None if isinstance(found.trends, Missing) else _trends(found, found.trends, plots),
        "fidelity": fidelity,
        "selection": None if isinstance(found.selection, Missing) else _selection(found.selection, plots),
        "mixture": None if isinstance(found.mixture, Missing) else _mixture(found.mixture, plots),
        "suspects": None if isinstance(found.suspects, Missing) else suspects_view(found.suspects),
        "min_tokens": MIN_TOKENS,
        "skipped": skipped_text(found.built.skipped),
        "commands": [plain(line, 4_000) for line in _commands(found)],
    }


SECTIONS = (
    ("summary", "At a glance"),
    ("whatif", "What if?"),
    ("slices", "Slices"),
    ("interactions", "Interactions"),
    ("rows", "Rows"),
    ("checkpoints", "Checkpoints"),
    ("fidelity", "Trust"),
    ("selection", "Selection"),
    ("mixture", "Mixture"),
    ("suspects", "Suspicious rows"),
    ("built", "Repeat"),
)


def _commands(found: Findings) -> list[str]:
    """What makes all of this again, from the run.yaml files below."""
    art, environment = shlex.quote(found.artifact_path), found.question.environment
    lines = [f"grasp build --config run.yaml --out {art}"]
    if environment is not None:
        where = shlex.quote(str(environment.path))
        lines += [f"grasp retrain --config environment-run.yaml --out {where}"]
        lines += [f"grasp evaluate {art} --environment {where}"]
    lines += [f"grasp predict {art} --by {shlex.quote(label.slices.label)}" for label in found.labels]
    return [*lines, found.question.command] if found.question.command else lines


def _trust_notes(found: Findings) -> list[str]:
    """What must be said before anything else."""
    notes: list[str] = []
    if not isinstance(found.nats, Missing):
        notes += found.nats.notes
    elif found.question.environment is not None and found.labels:
        notes.append(found.nats.reason)
    return [plain(note) for note in dict.fromkeys(notes)]


# ------------------------------------------------------------------------------------------------- slices


def _label(place: int, label: LabelFindings, found: Findings, plots: dict[str, draw.Figure]) -> View:
    names = different([one.name for one in label.slices.slices], LONGEST_CELL)
    plots[f"overview-{place}"] = draw.overview(label, found.targets)
    for t in range(len(found.targets)):
        plots[f"effects-{place}-{t}"] = draw.effects(label, t)
    view: View = {
        "title": plain(label.slices.label, 40),
        "count": len(names),
        "shown": min(len(names), 2 * draw.SIDES_SHOWN),
        "grouped": label.slices.n_grouped and f"{label.slices.n_grouped:,}",
        "last": names[-1],
        "tables": [_effect_lines(label, names, t) for t in range(len(found.targets))],
    }
    return view | _interactions(place, label, names, plots)


def _kind(low: float, high: float) -> str:
    """Dropping lowers utility: the slice helps."""
    return "helps" if high < 0 else "hurts" if low > 0 else ""


def _effect_lines(label: LabelFindings, names: Sequence[str], t: int) -> list[View]:
    effects = label.effects
    return [
        {
            "name": names[g],
            "rows": f"{label.slices.slices[g].rows:,}",
            "tokens": f"{label.slices.slices[g].tokens:,}",
            "effect": signed(float(effects.effect_GT[g, t])),
            "dropped": signed(float(effects.dropped_GT[g, t])),
            "interval": interval(float(label.low_GT[g, t]), float(label.high_GT[g, t])),
            "doubled": signed(float(effects.doubled_GT[g, t])),
            "kind": _kind(float(label.low_GT[g, t]), float(label.high_GT[g, t])),
        }
        for g in np.argsort(effects.dropped_GT[:, t], kind="stable").tolist()
    ]


def _interactions(place: int, label: LabelFindings, names: Sequence[str], plots: dict[str, draw.Figure]) -> View:
    known = label.interactions
    if isinstance(known, Missing):
        return {"map": False, "missing_map": known}
    plots[f"interaction-{place}"] = draw.interaction_map(label, known)
    return {"map": True, "half": known.half} | _pairs(known, names)


def _pairs(known: Interactions, names: Sequence[str]) -> View:
    def view(pairs: Sequence[Pair]) -> list[View]:
        return [
            {"first": names[pair.first], "second": names[pair.second], "cosine": signed(pair.cosine, 2)}
            for pair in pairs
        ]

    return {"redundant": view(known.redundant), "completing": view(known.completing)}


def _card(found: Findings, t: int, target: str) -> View:
    """One target in a few lines: of the first label."""
    label = found.labels[0]
    effects, names = label.effects, different([one.name for one in label.slices.slices], LONGEST_CELL)
    dropped, low, high = effects.dropped_GT[:, t], label.low_GT[:, t], label.high_GT[:, t]

    def line(g: int) -> View:
        return {"name": names[g], "change": signed(dropped[g]), "interval": interval(low[g], high[g])}

    best, worst = int(np.argmin(dropped)), int(np.argmax(dropped))
    card: View = {
        "target": target,
        "label": plain(label.slices.label, 40),
        "best": line(best) if high[best] < 0 else None,
        "worst": line(worst) if low[worst] > 0 else None,
    }
    return card | _card_rho(found, found.targets[t])


def _card_rho(found: Findings, target: str) -> View:
    if isinstance(found.retraining, Missing):
        return {"rho": None}
    report, protocol = found.retraining.agreement.report, found.retraining.agreement.protocol
    (result,) = [one for one in report.methods if one.method == protocol]
    rows = [row for row in result.targets if row.target.partition("@")[0] == target]
    if not rows or rows[0]["task_rho"].value is None:
        return {"rho": None}
    return {"rho": _cell(rows[0]["task_rho"]), "ceiling": _value(rows[0]["task_ceiling"])}


def _trends(found: Findings, trends: Sequence[LabelTrend], plots: dict[str, draw.Figure]) -> list[View]:
    views = []
    for place, (label, trend) in enumerate(zip(found.labels, trends, strict=True)):
        names = different([one.name for one in label.slices.slices], LONGEST_CELL)
        for t in range(len(found.targets)):
            plots[f"trend-{place}-{t}"] = draw.trend(trend, names, t)
        tables = [
            [
                {"name": names[g], "means": [signed(float(value)) for value in trend.mean_CGT[:, g, t]]}
                for g in np.argsort(-trend.mean_CGT[-1, :, t], kind="stable").tolist()
            ]
            for t in range(len(found.targets))
        ]
        checkpoints = different(trend.checkpoints, LONGEST_CELL)
        views.append({"title": plain(trend.label, 40), "checkpoints": checkpoints, "tables": tables})
    return views


# ------------------------------------------------------------------------------ trust, selection, mixture


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return f"undefined ({estimate.reason})"
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def _cell(estimate: Estimate) -> View:
    ends = "" if estimate.low is None or estimate.high is None else f"[{number(estimate.low)}, {number(estimate.high)}]"
    return {"value": "undefined" if estimate.value is None else number(estimate.value), "interval": ends}


def _value(estimate: Estimate) -> str:
    """Without its interval; empty where it is undefined."""
    return "" if estimate.value is None else number(estimate.value)


def _fidelity(retraining: Retraining, plots: dict[str, draw.Figure]) -> View:
    known = retraining.agreement
    report = known.report
    plots["fidelity"] = draw.fidelity(report)
    for place, points in enumerate(known.points):
        plots[f"scatter-{place}"] = draw.scatter(points)
    (own,) = [one for one in report.methods if one.method == known.protocol]
    rho = {row.target: row for row in own.targets}
    return {
        "head": plain(
            f"Environment {report.environment} ({retraining.role}): recipe {report.recipe}, {report.family}, "
            f"{report.n_subsets} subsets, seeds {', '.join(map(str, report.seeds))}. Geometry, if the "
            "protocol has any, is standardised by the environment's own family."
        ),
        "unfinished": _unfinished(known),
        "protocol": name(known.protocol),
        "own": _fidelity_lines(own, report),
        "others": [line for one in report.methods if one is not own for line in _fidelity_lines(one, report)],
        "notes": [plain(note) for note in (*report.marks(), *report.notes)],
        "points": [_point(points, rho[points.target]) for points in known.points],
        "settings": retraining.settings,
    }


def _unfinished(known: Agreement) -> str:
    subsets, seeds = known.report.n_subsets, len(known.report.seeds)
    if (subsets, seeds) == (known.n_planned, known.seeds_planned):
        return ""
    return (
        f"Unfinished: {subsets} of {known.n_planned} subsets with {seeds} of {known.seeds_planned} seeds are there; "
        "the figures will move."
    )


def _point(points: TargetPoints, row: TargetMetrics) -> View:
    ceiling = _value(row["task_ceiling"])
    reached = f"rho {_estimate(row['task_rho'])}" + (f", ceiling {ceiling}" if ceiling else "")
    return {"target": name(points.target), "caption": f"{name(points.target)}{_held_out(points.role)}: {reached}"}


def _held_out(role: str) -> str:
    return " (held-out)" if role == "held-out" else ""


def _fidelity_lines(result: MethodResult, report: Evaluation) -> list[View]:
    def line(target: str, units: int, of: Any) -> View:
        shown = {key: _cell(of(metric)) for key, metric in _METRICS.items()}
        return {
            "method": name(result.method),
            "target": target,
            "units": units,
            "ceiling": _value(of("task_ceiling")),
        } | shown

    lines = [line(name(report.marked(row.target, result)), row.n_units, row.__getitem__) for row in result.targets]
    if len(result.targets) > 1:
        lines.append(line(result.average_name, result.n_units, result.average))
    return lines


_METRICS = {"rho": "task_rho", "lds": "mean_lds", "positive": "positive", "pairwise": "pairwise"}


def _selection(found: SelectionSummary, plots: dict[str, draw.Figure]) -> View:
    plots["curve"] = draw.curve(found)
    facts = [
        ("value", f"{signed(found.value)} (weighted mean of the targets)"),
        ("what is guaranteed", plain(found.guarantee)),
        ("scored by", plain(f"protocol {found.protocol.name}")),
    ]
    return {
        "head": plain(found.headline, 400),
        "facts": facts,
        **_changes(found.targets, found.scale),
        "labels": _shares(found),
        "notes": [plain(note) for note in found.notes],
    }


def _shares(found: SelectionSummary) -> list[View]:
    """What is taken of each value, the most first, the tail as one."""
    pool, taken = sum(one.pool for one in found.labels), sum(one.taken for one in found.labels)
    named = list(zip(different([one.value for one in found.labels], LONGEST_CELL), found.labels, strict=True))
    named.sort(key=lambda pair: -pair[1].taken)
    lines = [(one_name, one.pool, one.taken) for one_name, one in named[:SHARES_SHOWN]]
    rest = [one for _, one in named[SHARES_SHOWN:]]
    if rest:
        lines.append((f"{len(rest):,} other values", sum(one.pool for one in rest), sum(one.taken for one in rest)))
    return [{"name": line[0], "pool": _percent(line[1], pool), "taken": _percent(line[2], taken)} for line in lines]


def _mixture(found: MixtureSummary, plots: dict[str, draw.Figure]) -> View:
    plots["mixture"] = draw.mixture(found)
    slices = zip(different([one.value for one in found.slices], LONGEST_CELL), found.slices, strict=True)
    return {
        "label": plain(found.label, 40),
        "head": plain(f"{found.headline}; value {signed(found.value)}, protocol {found.protocol.name}.", 400),
        **_changes(found.targets, found.scale),
        "slices": [
            {"name": one_name, "current": f"{one.now:.1%}", "proposed": f"{one.proposed:.1%}"}
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
