"""The page: findings in words and tables, put into the template; nothing from the corpus leaves it unescaped."""

import base64
import functools
import hashlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import grasp
from grasp.artifact.tables import LOSS_TOKENS
from grasp.errors import SettingsError
from grasp.extras import require
from grasp.files import written_aside
from grasp.predict.rows import SHORT, short_of
from grasp.report import views
from grasp.report.answer import answers, headline
from grasp.report.findings import Findings, LabelFindings, Missing
from grasp.report.payload import payload
from grasp.report.suspects import suspects_view
from grasp.report.texts import signed
from grasp.runs.learning import COVERAGE
from grasp.text import LONGEST_CELL, different, ending, json_text, name, plain, skipped_text
from grasp.verbs.predict import few_units

jinja2 = require("jinja2", extra="report", feature="a report")
markupsafe = require("markupsafe", extra="report", feature="a report")

View = dict[str, Any]

PAIRS_SHOWN = 6
PLAIN_ROWS = 5  # on either side of a target, where scripts are off
SCRIPTS = ("page.js", "whatif.js", "slices.js", "rows.js")


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


def render(found: Findings, live: str = "") -> str:
    """The whole page as text.

    Args:
        live: where a server answers what the page does not hold, e.g. /api; empty: nowhere, and nothing is asked.
    """
    script = "\n".join(["'use strict';", *(_resource(file) for file in SCRIPTS)])
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = template().render(
        **_context(found),
        title=f"{name(found.built.name)}: what the data is worth",
        version=grasp.__version__,
        live=live,
        policy=(  # no network but a server's own, and no script but ours
            f"default-src 'none'; script-src 'sha256-{checksum}'; style-src 'unsafe-inline'; img-src data:; "
            f"{'connect-src ' + repr('self') + '; ' if live else ''}base-uri 'none'; form-action 'none'"
        ),
        style=markupsafe.Markup(_resource("style.css")),
        script=markupsafe.Markup(script),
        data=_data(payload(found)),
    )
    return page


# ----------------------------------------------------------------------------------------------- the file


def _data(value: Any) -> Any:
    """JSON that cannot end the element it stands in."""
    return markupsafe.Markup(
        json_text(value, None).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    )


def _resource(file: str) -> str:
    return files("grasp.report").joinpath("templates", file).read_text(encoding="utf-8")


@functools.cache
def template() -> Any:
    """The page, everything that it is given escaped."""
    world = jinja2.Environment(
        loader=jinja2.PackageLoader("grasp.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    world.filters |= {"plain": plain, "name": name, "ending": ending, "lines": _lines, "breakable": _breakable}
    return world.get_template("page.html")


def _breakable(text: str) -> Any:
    """Escaped, with a place to break after every underscore or slash."""
    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(escaped.replace("_", "_<wbr>").replace("/", "/<wbr>"))


def _lines(text: str) -> str:
    return "\n".join(plain(line, 2_000) if line.strip() else "" for line in text.splitlines())


# ------------------------------------------------------------------------------------------------ context


def _context(found: Findings) -> View:
    targets = different(found.targets, LONGEST_CELL)
    trust: Sequence[str] = ()  # what must be said before anything else
    if not isinstance(found.nats, Missing):
        trust = found.nats.notes
    elif found.request.environment is not None and found.labels:
        trust = (found.nats.reason,)
    context: View = {
        "found": found,
        "targets": targets,
        "target_options": [[str(t), target] for t, target in enumerate(targets)],
        "label_options": [[str(place), plain(one.slices.label, 40)] for place, one in enumerate(found.labels)],
        "labels": [_label(place, label, found, targets) for place, label in enumerate(found.labels)],
        "headline": headline(found, targets),
        "answers": answers(found, targets),
        "interval_note": _interval_note(found),
        "trust_notes": [plain(note) for note in dict.fromkeys(trust)],
        "map": _map(found),
        "rows": _rows(found, targets),
        "fidelity": None
        if isinstance(found.retraining, Missing)
        else views.fidelity(found.retraining, found.nats, found.curve),
        "selection": None if isinstance(found.selection, Missing) else views.selection(found.selection),
        "mixture": None if isinstance(found.mixture, Missing) else views.mixture(found.mixture),
        "suspects": None if isinstance(found.suspects, Missing) else suspects_view(found.suspects),
        "skipped": skipped_text(found.built.skipped),
        "commands": [plain(line, 4_000) for line in _commands(found)],
        "actions": [(what, plain(line, 4_000)) for what, line in _actions(found)],
        "lacking": [{"reason": plain(part.reason), "remedy": part.remedy} for part in found.lacking],
    }
    there = {"whatif": "labels", "slices": "labels", "trust": "fidelity", "suspects": "suspects"}
    context["sections"] = [one for one in SECTIONS if one[0] not in there or context[there[one[0]]]]
    return context


SECTIONS = (
    ("answer", "Answer"),
    ("whatif", "What if?"),
    ("slices", "Slices"),
    ("rows", "Questions and rows"),
    ("trust", "Trust"),
    ("suspects", "Suspicious rows"),
    ("act", "Act"),
)


def _interval_note(found: Findings) -> str:
    if found.unit != found.plain_unit and not isinstance(found.nats, Missing):
        return f"{COVERAGE:.0%} intervals, learned from retrained models."
    few = "".join(f" {plain(note)[0].upper()}{plain(note)[1:]}." for note in few_units(found.built.targets))
    return (
        "95 % intervals over resamples of the target's questions: what other questions of the same kind would say, "
        f"not how well predictions agree with retraining.{few}"
    )


def _actions(found: Findings) -> list[tuple[str, str]]:
    """What to do next, each with its command."""
    art, target = shlex.quote(found.artifact_path), shlex.quote(",".join(found.targets))
    asked = found.request
    runs = "" if asked.environment is None else f" --runs {shlex.quote(str(asked.environment.path))}"
    lines = []
    if isinstance(found.selection, Missing):
        line = f"grasp select {art} --target {target} --budget 30%{runs} --export kept --out kept.parquet"
        lines.append(("Keep the best 30 % of rows, ready to train on", line))
    if isinstance(found.mixture, Missing) and found.labels:
        by = shlex.quote(found.labels[0].slices.label)
        lines.append(("Weigh the slices", f"grasp mix {art} --target {target} --by {by}{runs} --out mixture.parquet"))
    if not runs:
        lines.append(("Retrain on subsets, to see how far to trust this", "grasp retrain --help"))
    lines.append(("Rank every row", f"grasp score {art} --target {shlex.quote(found.targets[0])} --out rows.parquet"))
    return lines


def _commands(found: Findings) -> list[str]:
    """What makes all of this again, from the run.yaml files below."""
    art, environment = shlex.quote(found.artifact_path), found.request.environment
    lines = [f"grasp build --config run.yaml --out {art}"]
    if environment is not None:
        where = shlex.quote(str(environment.path))
        lines += [f"grasp retrain --config environment-run.yaml --out {where}"]
        lines += [f"grasp evaluate {art} --runs {where}"]
    lines += [f"grasp predict {art} --by {shlex.quote(label.slices.label)}" for label in found.labels]
    return [*lines, found.request.command] if found.request.command else lines


# ------------------------------------------------------------------------------------------- slices, rows


def _label(place: int, label: LabelFindings, found: Findings, targets: Sequence[str]) -> View:
    names = different(label.slices.names, LONGEST_CELL)
    dropped, mean_G = label.dropped, label.dropped.value_GT.mean(axis=1)
    most = views.scale(dropped.value_GT)
    nothing = float("nan")
    lines = []
    for g in np.argsort(mean_G, kind="stable").tolist():
        ends = zip(dropped.value_GT[g], dropped.low_GT[g], dropped.high_GT[g], strict=True)
        cells = [views.bar(*end, most) for end in ends]
        if len(targets) > 1:
            cells.append(views.bar(mean_G[g], nothing, nothing, most))
        lines.append({"g": g, "name": names[g], "rows": label.slices.slices[g].rows, "cells": cells})
    trends = () if isinstance(found.trends, Missing) else views.trends(found.trends[place], names, targets)
    return {
        "title": plain(label.slices.label, 40),
        "lines": lines,
        "grouped": label.slices.n_grouped and f"{label.slices.n_grouped:,}",
        "last": names[-1],
        "trends": trends,
    } | _pairs(label, names)


def _pairs(label: LabelFindings, names: Sequence[str]) -> View:
    """Slices whose mean sketches point the same way, and those that point apart. Source: eq:ia-discrete-curvature."""
    cosine_GG = label.cosine_GG
    if cosine_GG is None:
        return {"redundant": [], "completing": []}
    i, j = np.triu_indices(len(cosine_GG), 1)
    known = np.isfinite(cosine_GG[i, j])
    i, j = i[known], j[known]
    order = np.argsort(-cosine_GG[i, j], kind="stable").tolist()

    def view(sign: float) -> list[list[str]]:
        ends = [k for k in (order if sign > 0 else order[::-1])[:PAIRS_SHOWN] if sign * cosine_GG[i[k], j[k]] > 0]
        return [[names[i[k]], names[j[k]], signed(float(cosine_GG[i[k], j[k]]), 2)] for k in ends]

    return {"redundant": view(1.0), "completing": view(-1.0)}


def _map(found: Findings) -> View | None:
    if found.parts is None:
        return None
    first, second = (plain(one.slices.label, 40) for one in found.labels[:2])
    rest = found.parts.slices.slices[-1]
    text = f"{rest.name} with {rest.rows:,} rows in all are left out" if found.parts.slices.n_grouped else ""
    return {"first": first, "second": second, "rest": text}


def _rows(found: Findings, targets: Sequence[str]) -> View:
    held = found.rows

    def shown(t: int) -> list[View]:
        ranked = [k for k in np.argsort(held.rank_KT[:, t], kind="stable").tolist() if held.rank_KT[k, t]]
        return [
            {
                "id": name(held.rows[k]["row_id"]),
                "effect": signed(float(held.effect_KT[k, t]), 2),
                "text": plain(held.rows[k]["snippet"] or "", 600),
                "kind": kind,
            }
            for kind, ends in (("helps", ranked[:PLAIN_ROWS]), ("hurts", ranked[::-1][:PLAIN_ROWS]))
            for k in ends
        ]

    length = LOSS_TOKENS if all(LOSS_TOKENS in row for row in held.rows) else "n_tokens"
    return {
        "has_text": any(row["snippet"] for row in held.rows),
        "n_rows": f"{held.n_ranked:,}",
        "held": f"{len(held.rows):,}",
        "shortest": f"{SHORT} {short_of(length)}" if any(row[length] >= SHORT for row in held.rows) else "",
        "plain": [{"target": target, "rows": shown(t)} for t, target in enumerate(targets)],
    }
