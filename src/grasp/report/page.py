"""HTML rendering of the findings of a report; all corpus text is escaped.

`findings` has numbers, `views` turns them into the texts and bar positions of each section, `payload` into the data of
the scripts, and the template `templates/page.html` shows them. Start with `render`.
"""

import base64
import functools
import hashlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import grasp
from grasp.api.predict import REPLAY_NOTE, few_units
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.artifact.rows import MIN_RELIABLE_TOKENS, length_unit
from grasp.extras import require
from grasp.report import views
from grasp.report.findings import Findings
from grasp.report.payload import payload
from grasp.report.views import View
from grasp.results import Result, cell_text
from grasp.runs.calibration import COVERAGE
from grasp.select.objective import format_targets
from grasp.text import MAX_CELL_CHARS, ending, json_text, name, plain, printable, skipped_text, unique_names

jinja2 = require("jinja2", extra="report", feature="a report")
markupsafe = require("markupsafe", extra="report", feature="a report")

PLAIN_ROWS = 5  # most helpful and most harmful rows per target on a page without JavaScript
SCRIPTS = ("page.js", "whatif.js", "slices.js", "rows.js")
SECTIONS = {
    "answer": "Answer",
    "whatif": "What if?",
    "slices": "Slices",
    "rows": "Questions and rows",
    "training": "Training",
    "trust": "Trust",
    "act": "Act",
}


def render(findings: Findings, live: str = "", training: Result | None = None) -> str:
    """Return the page as HTML text.

    Args:
        live: path of the server's API, e.g. /api, from which the page loads explanations. Empty: the page makes no
            requests.
        training: tables of a training.
    """
    templates = files("grasp.report") / "templates"
    script = "\n".join(["'use strict';", *((templates / file).read_text(encoding="utf-8") for file in SCRIPTS)])
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json_text(payload(findings), None)  # &, < and > are escaped, so text cannot close the script element
    for sign in "&<>":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    targets, artifact_name = unique_names(findings.targets, MAX_CELL_CHARS), Path(findings.artifact_path).resolve().name
    fidelity = views.fidelity(findings)
    # trusted questions that the corpus contains, and notes on the runs, each once
    warnings: list[str] = [] if findings.runs is None else [findings.runs.unfinished()]
    warnings += [note for fact, note in findings.facts if fact == "leaks"]
    if not isinstance(findings.outcomes, str):
        warnings += findings.outcomes.notes
    elif findings.outcomes:
        warnings.append(findings.outcomes)
    absent = {
        "whatif": not findings.labels,
        "slices": not findings.labels,
        "training": training is None,
        "trust": not fidelity,
    }

    page: str = template().render(
        findings=findings,
        artifact=name(artifact_name),
        version=grasp.__version__,
        live=live,
        policy=(  # no network except the server of the page, and no script except the one with this hash
            f"default-src 'none'; script-src 'sha256-{checksum}'; style-src 'unsafe-inline'; img-src data:; "
            f"{'connect-src ' + repr('self') + '; ' if live else ''}base-uri 'none'; form-action 'none'"
        ),
        style=markupsafe.Markup((templates / "style.css").read_text(encoding="utf-8")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(data),
        sections=[section for section in SECTIONS.items() if not absent.get(section[0])],
        targets=targets,
        target_options=[[str(t), target] for t, target in enumerate(targets)],
        label_options=[[str(i), plain(label.slices.label, 40)] for i, label in enumerate(findings.labels)],
        labels=[views.slices(label, findings.weights_T) for label in findings.labels],
        decision=views.decision(findings),
        answers=views.answers(findings, targets),
        interval_note=_interval_note(findings),
        warnings=[plain(note) for note in dict.fromkeys(warnings) if note],
        rows=_rows(findings, targets),
        training=training,
        fidelity=fidelity,
        selection=views.optimized("The selection", findings.selection),
        mixture=None if findings.mixture is None else views.optimized("The mixture", findings.mixture),
        skipped=skipped_text(findings.skipped),
        **_commands(findings),
    )
    return page


def _interval_note(findings: Findings) -> str:
    """Return how the intervals of the page are computed, and what they do not cover."""
    if findings.unit != findings.effect_unit and not isinstance(findings.outcomes, str):
        return f"{COVERAGE:.0%} prediction intervals, fitted to retrained models."
    few = "".join(f" {plain(note)[0].upper()}{plain(note)[1:]}." for note in few_units(findings.units))
    note = (
        "95 % intervals over the target's questions and over documents: they cover the choice of both, not the "
        f"agreement of predictions with retraining.{few}"
    )
    if any(fact == "replay" for fact, _ in findings.facts):
        note += f" {REPLAY_NOTE[0].upper()}{REPLAY_NOTE[1:]}."
    return note


@functools.cache
def template() -> Any:
    """Load the page template with escaping of all values."""
    jinja = jinja2.Environment(
        loader=jinja2.PackageLoader("grasp.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def breakable(text: str) -> Any:
        """Escape a text and add a line-break opportunity after every underscore and slash."""
        escaped = str(markupsafe.escape(text))
        return markupsafe.Markup(escaped.replace("_", "_<wbr>").replace("/", "/<wbr>"))

    jinja.filters |= {"plain": plain, "name": name, "ending": ending, "printable": printable, "breakable": breakable}
    jinja.filters["cell"] = cell_text
    return jinja.get_template("page.html")


def _rows(findings: Findings, targets: Sequence[str]) -> View:
    """Return the counts of the rows section, and the rows that are shown if JavaScript is off."""
    examples = findings.rows
    ends = []
    for t, target in enumerate(targets):
        order = examples.most_helpful_first(t)
        helpful = views.row_views(findings, t, order[:PLAIN_ROWS], "helps")
        harmful = views.row_views(findings, t, order[::-1][:PLAIN_ROWS], "hurts")
        ends.append({"target": target, "rows": helpful + harmful})
    length = LOSS_TOKENS if all(LOSS_TOKENS in row for row in examples.rows) else "n_tokens"
    has_long_rows = any(row[length] >= MIN_RELIABLE_TOKENS for row in examples.rows)
    return {
        "has_text": any(row["snippet"] for row in examples.rows),
        "n_rows": f"{examples.n_ranked:,}",
        "n_examples": f"{len(examples.rows):,}",
        "shortest": f"{MIN_RELIABLE_TOKENS} {length_unit(length)}" if has_long_rows else "",
        "plain": ends,
    }


def _commands(findings: Findings) -> View:
    """Return the command of the selection, commands that reproduce the page, and commands for next steps."""
    art = shlex.quote(findings.artifact_path)
    target = shlex.quote(format_targets({change.target: change.weight for change in findings.selection.targets}))
    runs_record = findings.runs
    reproduce, actions, runs = [f"grasp build --config run.yaml{findings.warm_up} --out {art}"], [], ""
    if runs_record is not None:
        runs_path = shlex.quote(str(runs_record.path))
        runs = f" --runs {runs_path}"
        reproduce += [f"grasp retrain --config environment-run.yaml --out {runs_path}", f"grasp evaluate {art}{runs}"]
    reproduce += [f"grasp predict {art} --by {shlex.quote(label.slices.label)}" for label in findings.labels]
    reproduce += [findings.command] if findings.command else []
    if findings.mixture is None and findings.labels:
        by = shlex.quote(findings.labels[0].slices.label)
        actions.append(
            ("Compute mixture weights", f"grasp mix {art} --target {target} --by {by}{runs} --out mixture.parquet")
        )
    first = shlex.quote(findings.targets[0])
    actions.append(("Rank every row", f"grasp score {art} --target {first} --out rows.parquet"))
    if not runs:
        family = f"mixture:{findings.labels[0].slices.label}" if findings.labels else "uniform:0.5"
        line = f"grasp retrain --like {art} --family {shlex.quote(family)} --out runs"
        actions.append(("Retrain on subsets to validate the predictions", line))
    # the options of the selection of the page
    names = "budget", "train_tokens", "by", "floor", "cap", "exclude_where", "drop_leaks", "cautious"
    options = {key: findings.selection.params.get(key) for key in names} | {"protocol": findings.selection_protocol}
    if runs_record is not None and findings.selection.runs_unit:
        options["runs"] = runs_record.path
    words: list[str] = []
    for key, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            words += [f"--{key.replace('_', '-')}"] * bool(part) + [f"{part}"] * bool(part and part is not True)
    return {
        "keep_command": plain(f"grasp select {art} --target {target} {shlex.join(words)} --export kept", 4_000),
        "commands": [plain(line, 4_000) for line in reproduce],
        "actions": [(description, plain(line, 4_000)) for description, line in actions],
    }
