"""Choose what to train on: grasp select, mix, distil, apply."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import check_outputs
from grasp.cli.options import Art, Quiet, beside
from grasp.cli.progress_display import Watch
from grasp.errors import SettingsError
from grasp.files import check_place
from grasp.text import plain


@command(
    "grasp select art --budget 20% --target sciq --export kept",
    "grasp select art --train-tokens 100B --target sciq=2,openbookqa=1 --out kept.parquet",
    "grasp select art --budget 5000 --by topic --floor 1% --cap Games:20% --out kept.parquet",
    "grasp select art --budget 67%documents --documents all --export kept --left-out dropped",
    "grasp select art --budget 20% --exclude seen.txt --export kept --documents half --ids-out kept.txt",
    verb="grasp.select.select",
    more="exclude exclude_where drop_leaks documents protocol diversity cautious",
)
def select(
    art: Art,
    export: Path | None = option(
        "--export DIR", "New directory for the chosen rows: text, tokens, labels, ready to train on.", None
    ),
    out: Path | None = option("--out FILE", "Parquet of row ids, best first; summary and protocol beside it.", None),
    left_out: Path | None = option(
        "--left-out PATH",
        "What is not kept: a new directory, written as that of --export; or a .parquet or .csv of snippets and labels.",
        None,
    ),
    form: str = rare("--format NAME", "Of the export: parquet, jsonl or datasets.", "parquet"),
    ids_out: Path | None = rare(
        "--ids-out FILE",
        "Names of the documents that --documents takes: .csv or .parquet with their places in the corpus, else text.",
        None,
    ),
    corpus: str | None = rare("--corpus PATH", "Where the corpus lies now. Default: where it was built from.", None),
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    from grasp.select.export import Exporter

    opened = grasp.open(art)
    artifact = opened.files
    documents = asked["documents"]
    # a corpus, as in `dropped-v1.2`; with an ending in letters a table
    dropped = None if left_out is None or left_out.suffix[1:].isalpha() else left_out
    for place in (export, dropped):
        if place is not None:
            check_place(place)
    outputs = {**beside("--out", out), "--left-out": left_out, "--ids-out": ids_out, "--export": export}
    check_outputs(outputs, artifact=artifact, asked=asked, tables=["--left-out"] if dropped is None else [])
    written = export if ids_out else export or dropped
    exporter = None
    if written is not None or documents or ids_out or corpus or form != "parquet":
        exporter = Exporter.from_options(artifact, documents=documents, form=form, corpus=corpus, ids=ids_out)
        if written is None:
            raise SettingsError(
                "--documents, --ids-out, --corpus, --format: say how documents are written; add --export DIR"
            )
    with Watch(quiet=quiet) as watch:
        selection = opened.select(**asked, progress=watch)
    print(selection)
    if out is not None:
        first = "rows of the best documents" if selection.asked["items"] == "documents" else "rows, best"
        print(f"{selection.save(out)}: {first} first; beside it {out.stem}.json, for grasp report --selection")
    if left_out is not None and dropped is None:
        print(f"{left_out}: the {selection.write_left_out(left_out):,} rows that are left out, worst first")
    if exporter is not None and export is not None:
        print(exporter.write(selection, export, say=lambda line: print(plain(line))))
    if exporter is not None and dropped is not None:
        print(replace(exporter, ids=None).write(selection, dropped, left_out=True))


@command(
    "grasp mix art --by topic --target sciq",
    "grasp mix art --by topic --target sciq=2,openbookqa=1 --distance 30% --cap Games:5% --out mixture.parquet",
    "grasp mix art --by source --train-tokens 100B --runs dev --weights weights.parquet",
    verb="grasp.select.mix",
    more="distance protocol diversity cautious",
)
def mix(
    art: Art,
    out: Path | None = option("--out FILE", "Parquet of the mixture; its summary and protocol beside it.", None),
    weights: Path | None = rare(
        "--weights FILE", "Parquet of subset_id, row_id, weight, as grasp predict --subsets reads it.", None
    ),
    **asked: Any,
) -> None:
    opened = grasp.open(art)
    check_outputs({**beside("--out", out), "--weights": weights}, artifact=opened.files, asked=asked)
    mixture = opened.mix(**asked)
    print(mixture)
    if out is not None:
        print(f"{mixture.save(out)}: the shares; beside it {out.stem}.json, for grasp report --mixture")
    if weights is not None:
        mixture.write_weights(weights)
        print(f"{weights}: the rows and their weights, for grasp predict --subsets")


@command(
    "grasp distil art --target sciq --out scorer",
    "grasp info scorer",
    verb="grasp.distil.distil",
    more="protocol seed",
)
def distil(art: Art, quiet: Quiet = False, **asked: Any) -> None:
    with Watch(quiet=quiet) as watch:
        result = grasp.open(art).distil(**asked, progress=watch)
    print(result)


@command(
    "grasp apply scorer --corpus crawl.parquet --out scored",
    "grasp apply scorer --corpus s3://bucket/crawl --out scored --keep 20%",
    verb="grasp.distil.apply",
)
def apply(
    scorer: Path = typer.Argument(..., metavar="SCORER", help="Directory that grasp distil wrote."),
    keep: str | None = option("--keep AMOUNT", "Copy the best documents to DIR/kept: 20%, or a number of them.", None),
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    with Watch(quiet=quiet) as watch:
        result = grasp.apply(scorer, keep=keep, **asked, progress=watch)
    print(result)
