"""Commands that predict effects: grasp score, predict, explain, report."""

from pathlib import Path
from typing import Any

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import check_outputs, print_result
from grasp.cli.options import Art, ModelOverrides, ResultFile, merge_settings
from grasp.errors import SettingsError
from grasp.progress_display import Watch
from grasp.text import size_text

TOP = 10  # default of grasp score --top


@command(
    "grasp score art --target sciq --top 20",
    "grasp score art --target sciq --bottom 20",
    "grasp score art --target sciq --out rows.parquet",
    "grasp score art --target sciq --method bm25",
    verb="grasp.api.score",
    more="protocol unit match method method_settings checkpoints runs",
    python="where",
)
def score(
    art: Art,
    top: int | None = option(
        "--top N", f"Number of most helpful rows. Default: {TOP}, or all with --out.", None, min=0
    ),
    out: ResultFile = None,
    **params: Any,
) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, params=params, tables=["--out"])
    if top is None and out is None and not params["bottom"]:
        top = TOP
    with Watch() as watch:
        result = artifact.score(**params, top=top, out=out, progress=watch)
    print_result(result, out, written=result.lines)


ROWS_PER_END = 5  # number of most helpful and of least helpful rows that explain shows


@command(
    "grasp explain art --target sciq --row doc-17",
    "grasp explain art --target sciq --unit sciq:152",
    "grasp explain art --target sciq --unit sciq:152 --row doc-17 --out why.html",
    verb="grasp.inspect.explain",
    more="protocol",
    python="match",
)
def explain(
    art: Art,
    row: str | None = option("--row ID", "row_id of the row to explain.", None),
    unit: str | None = option(
        "--unit ID", "One question of the target; without --row, list its most and least helpful rows.", None
    ),
    out: Path | None = option("--out FILE", "Write the explanation: .html, or its table as .parquet or .csv.", None),
    assignments: ModelOverrides = [],
    **params: Any,
) -> None:
    artifact = grasp.open(art)
    is_page = row is not None and out is not None and out.suffix == ".html"
    check_outputs({"--out": out}, artifact=artifact.files, params=params, tables=[] if is_page else ["--out"])
    if row is None:
        if unit is None:
            raise SettingsError("explain: missing --row or --unit; pass a row_id, e.g. one printed by grasp score")
        print_result(artifact.score(unit=unit, top=ROWS_PER_END, bottom=ROWS_PER_END, **params), out)
        return
    explanation = artifact.explain(row=row, unit=unit, overrides=merge_settings(None, assignments, {}), **params)
    if out is not None:
        explanation.write(out)
    print(explanation)


@command(
    "grasp report art --out report.html",
    "grasp report art --runs dev --selection kept.json --mixture mixture.json --out report.html",
    verb="grasp.report.build_report",
    more="protocol explain",
)
def report(
    art: Art,
    out: Path = option("--out FILE", "HTML file to write; it works offline."),
    **params: Any,
) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, params=params)
    with Watch() as watch:
        page = artifact.report(out, **params, progress=watch)
    print(f"{page}: {size_text(page.stat().st_size)}; open it in a browser (works offline)")


@command(
    "grasp predict art --by topic --target sciq",
    "grasp predict art --drop \"topic = 'Games' AND format != 'FAQs'\"",
    "grasp predict art --weight \"topic = 'Games': 0.3\" --weight \"topic = 'Health': 2\"",
    "grasp predict art --subsets subsets.parquet --out predictions.parquet",
    "grasp predict art --by topic --runs dev",
    verb="grasp.api.predict",
    more="protocol units",
)
def predict(art: Art, out: ResultFile = None, **params: Any) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, params=params, tables=["--out"])
    result = artifact.predict(**params, out=out)
    print_result(result, out, written=result.lines)
