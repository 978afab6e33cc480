"""The page: findings in words and tables, put into the template; nothing from the corpus leaves it unescaped."""

import base64
import functools
import hashlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import grasp
from grasp.api.predict import few_units
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.artifact.rows import SHORT, short_of
from grasp.extras import require
from grasp.report import views
from grasp.report.findings import Findings, Missing
from grasp.report.payload import payload
from grasp.report.views import View
from grasp.runs.calibration import COVERAGE
from grasp.text import LONGEST_CELL, different, ending, json_text, name, plain, skipped_text

jinja2 = require("jinja2", extra="report", feature="a report")
markupsafe = require("markupsafe", extra="report", feature="a report")

PLAIN_ROWS = 5  # on either side of a target, where scripts are off
SCRIPTS = ("page.js", "whatif.js", "slices.js", "rows.js")
SECTIONS = {
    "answer": "Answer",
    "whatif": "What if?",
    "slices": "Slices",
    "rows": "Questions and rows",
    "trust": "Trust",
    "suspects": "Suspicious rows",
    "act": "Act",
}


def render(found: Findings, live: str = "") -> str:
    """The whole page as text.

    Args:
        live: where a server answers what the page does not hold, e.g. /api; empty: nowhere, and nothing is asked.
    """
    templates = files("grasp.report") / "templates"
    script = "\n".join(["'use strict';", *((templates / file).read_text(encoding="utf-8") for file in SCRIPTS)])
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json_text(payload(found), None)  # made such that it cannot end the element it stands in
    for sign in "&<>":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    targets = different(found.targets, LONGEST_CELL)
    trends = [None] * len(found.labels) if isinstance(found.trends, Missing) else found.trends
    fidelity = views.fidelity(found)
    suspects = None if isinstance(found.suspects, Missing) else views.suspects(found.suspects)
    absent = {
        "whatif": not found.labels,
        "slices": not found.labels,
        "trust": not fidelity,
        "suspects": not suspects,
    }

    # what must be said before anything else, and of intervals
    trust: list[str] = [note for fact, note in found.facts if fact == "leaks"]
    if not isinstance(found.nats, Missing):
        trust += found.nats.notes
    elif found.environment is not None and found.labels:
        trust.append(found.nats.reason)
    interval_note = f"{COVERAGE:.0%} intervals, learned from retrained models."
    if found.unit == found.plain_unit or isinstance(found.nats, Missing):
        few = "".join(f" {plain(note)[0].upper()}{plain(note)[1:]}." for note in few_units(found.units))
        interval_note = (
            "95 % intervals over resamples of the target's questions: what other questions of the same kind would "
            f"say, not how well predictions agree with retraining.{few}"
        )
    crossed = None
    if found.parts is not None:
        first, second = (plain(one.slices.label, 40) for one in found.labels[:2])
        rest = found.parts.slices.slices[-1]
        left_out = f"{rest.name} with {rest.rows:,} rows in all are left out" if found.parts.slices.n_grouped else ""
        crossed = {"first": first, "second": second, "rest": left_out}
    page: str = template().render(
        found=found,
        title=f"{name(found.name)}: what the data is worth",
        version=grasp.__version__,
        live=live,
        policy=(  # no network but a server's own, and no script but ours
            f"default-src 'none'; script-src 'sha256-{checksum}'; style-src 'unsafe-inline'; img-src data:; "
            f"{'connect-src ' + repr('self') + '; ' if live else ''}base-uri 'none'; form-action 'none'"
        ),
        style=markupsafe.Markup((templates / "style.css").read_text(encoding="utf-8")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(data),
        sections=[section for section in SECTIONS.items() if not absent.get(section[0])],
        targets=targets,
        target_options=[[str(t), target] for t, target in enumerate(targets)],
        label_options=[[str(place), plain(one.slices.label, 40)] for place, one in enumerate(found.labels)],
        labels=[views.slices(label, trend, targets) for label, trend in zip(found.labels, trends, strict=True)],
        headline=views.headline(found, targets),
        answers=views.answers(found, targets),
        interval_note=interval_note,
        trust_notes=[plain(note) for note in dict.fromkeys(trust)],
        map=crossed,
        rows=_rows(found, targets),
        fidelity=fidelity,
        selection=None if isinstance(found.selection, Missing) else views.selection(found.selection),
        mixture=None if isinstance(found.mixture, Missing) else views.mixture(found.mixture),
        suspects=suspects,
        skipped=skipped_text(found.skipped),
        lacking=[{"reason": plain(part.reason), "remedy": part.remedy} for part in found.lacking],
        **_commands(found),
    )
    return page


@functools.cache
def template() -> Any:
    """The page, everything that it is given escaped."""
    world = jinja2.RetrainedRuns(
        loader=jinja2.PackageLoader("grasp.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def breakable(text: str) -> Any:
        """Escaped, with a place to break after every underscore or slash."""
        escaped = str(markupsafe.escape(text))
        return markupsafe.Markup(escaped.replace("_", "_<wbr>").replace("/", "/<wbr>"))

    def lines(text: str) -> str:
        return "\n".join(plain(line, 2_000) if line.strip() else "" for line in text.splitlines())

    world.filters |= {"plain": plain, "name": name, "ending": ending, "lines": lines, "breakable": breakable}
    return world.get_template("page.html")


def _rows(found: Findings, targets: Sequence[str]) -> View:
    """What is said of the rows, and those at the ends of each target for who has scripts off."""
    held = found.rows
    ends = []
    for t, target in enumerate(targets):
        order = held.best_first(t)
        shown = [(k, "helps") for k in order[:PLAIN_ROWS]] + [(k, "hurts") for k in order[::-1][:PLAIN_ROWS]]
        lines = [
            {
                "id": name(held.rows[k]["row_id"]),
                "effect": views.signed(float(held.effect_KT[k, t]), 2),
                "text": plain(held.rows[k]["snippet"] or "", 600),
                "kind": kind,
            }
            for k, kind in shown
        ]
        ends.append({"target": target, "rows": lines})
    length = LOSS_TOKENS if all(LOSS_TOKENS in row for row in held.rows) else "n_tokens"
    return {
        "has_text": any(row["snippet"] for row in held.rows),
        "n_rows": f"{held.n_ranked:,}",
        "held": f"{len(held.rows):,}",
        "shortest": f"{SHORT} {short_of(length)}" if any(row[length] >= SHORT for row in held.rows) else "",
        "plain": ends,
    }


def _commands(found: Findings) -> View:
    """Commands that make all of this again, from the run.yaml files on the page; and what to do next, with its own."""
    art, target = shlex.quote(found.artifact_path), shlex.quote(",".join(found.targets))
    environment = found.environment
    again, actions, runs = [f"grasp build --config run.yaml --out {art}"], [], ""
    if environment is not None:
        where = shlex.quote(str(environment.path))
        runs = f" --runs {where}"
        again += [f"grasp retrain --config environment-run.yaml --out {where}", f"grasp evaluate {art}{runs}"]
    again += [f"grasp predict {art} --by {shlex.quote(label.slices.label)}" for label in found.labels]
    again += [found.command] if found.command else []
    if isinstance(found.selection, Missing):
        line = f"grasp select {art} --target {target} --budget 30%{runs} --export kept --out kept.parquet"
        actions.append(("Keep the best 30 % of rows, ready to train on", line))
    if isinstance(found.mixture, Missing) and found.labels:
        by = shlex.quote(found.labels[0].slices.label)
        actions.append(("Weigh the slices", f"grasp mix {art} --target {target} --by {by}{runs} --out mixture.parquet"))
    if not runs:
        actions.append(("Retrain on subsets, to see how far to trust this", "grasp retrain --help"))
    first = shlex.quote(found.targets[0])
    actions.append(("Rank every row", f"grasp score {art} --target {first} --out rows.parquet"))
    return {
        "commands": [plain(line, 4_000) for line in again],
        "actions": [(what, plain(line, 4_000)) for what, line in actions],
    }
