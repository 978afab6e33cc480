"""Commands that select training data: grasp select, mix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import check_outputs
from grasp.cli.options import Art, table_outputs
from grasp.errors import SettingsError
from grasp.files import check_directory
from grasp.text import plain


@command(
    "grasp select art --budget 20% --target sciq --export kept",
    "grasp select art --train-tokens 100B --target sciq=2,openbookqa=1 --out kept.parquet",
    "grasp select art --budget 5000 --by topic --floor 1% --cap Games:20% --out kept.parquet",
    "grasp select art --budget 67%documents --documents all --export kept --left-out dropped",
    "grasp select art --budget 20% --exclude seen.txt --export kept --documents half --ids-out kept.txt",
    verb="grasp.select.select",
    more="exclude exclude_where drop_leaks documents protocol cautious",
)
def select(
    art: Art,
    export: Path | None = option(
        "--export DIR", "New directory for the selected rows: text, tokens and labels, ready to train on.", None
    ),
    out: Path | None = option(
        "--out FILE", "Parquet of row ids, best first; a summary and the protocol are written next to it.", None
    ),
    left_out: Path | None = option(
        "--left-out PATH",
        "Where to write the remaining rows: a new directory like that of --export, or a .parquet or .csv of snippets "
        "and labels.",
        None,
    ),
    form: str = rare(
        "--format NAME",
        "Format of the export: parquet, jsonl, json (an array), csv, tsv, datasets, or source: that of the corpus.",
        "parquet",
    ),
    ids_out: Path | None = rare(
        "--ids-out FILE",
        "Write the ids of the documents selected by --documents: .csv or .parquet with their positions in the corpus, "
        "or plain text.",
        None,
    ),
    corpus: str | None = rare("--corpus PATH", "Current path of the corpus. Default: the path of the build.", None),
    shard_size: str | None = rare(
        "--shard-size SIZE",
        "Maximum size of an exported file: 256MB before compression, or a number of records. Default: 50,000.",
        None,
    ),
    **params: Any,
) -> None:
    from grasp.select.export import Exporter

    opened = grasp.open(art)
    artifact = opened.files
    documents = params["documents"]
    # --left-out is a table if its suffix has letters only, else a directory, e.g. `dropped-v1.2`
    left_out_directory = None if left_out is None or left_out.suffix[1:].isalpha() else left_out
    for directory in (export, left_out_directory):
        if directory is not None:
            check_directory(directory)
    outputs = {**table_outputs(out), "--left-out": left_out, "--ids-out": ids_out, "--export": export}
    check_outputs(
        outputs, artifact=artifact, params=params, tables=["--left-out"] if left_out_directory is None else []
    )
    # documents are written to one of these; --ids-out lists the documents of --export only
    export_directory = export if ids_out else export or left_out_directory
    exporter = None
    if export_directory is not None or documents or ids_out or corpus or form != "parquet" or shard_size:
        exporter = Exporter.from_options(
            artifact, documents=documents, form=form, corpus=corpus, ids=ids_out, shard_size=shard_size
        )
        if export_directory is None:
            raise SettingsError(
                "--documents, --ids-out, --corpus, --format, --shard-size: only apply to an export; add --export DIR"
            )
    selection = opened.select(**params)
    print(selection)
    if out is not None:
        order = "rows of the best documents" if selection.params["items"] == "documents" else "rows, best"
        print(f"{selection.save(out)}: {order} first; summary for grasp report --selection: {out.stem}.json")
    if left_out is not None and left_out_directory is None:
        print(f"{left_out}: {selection.write_left_out(left_out):,} rows that were not selected, worst first")
    if exporter is not None and export is not None:
        print(exporter.write(selection, export, say=lambda line: print(plain(line))))
    if exporter is not None and left_out_directory is not None:
        print(replace(exporter, ids=None).write(selection, left_out_directory, left_out=True))


@command(
    "grasp mix art --by topic --target sciq",
    "grasp mix art --by topic --target sciq=2,openbookqa=1 --distance 30% --cap Games:5% --out mixture.parquet",
    "grasp mix art --by source --train-tokens 100B --runs dev --weights weights.parquet",
    "grasp mix art --by source --target sciq --format yaml --out mixture.yaml",
    verb="grasp.select.mix",
    more="distance protocol cautious",
)
def mix(
    art: Art,
    out: Path | None = option(
        "--out FILE", "Parquet of the mixture; a summary and the protocol are written next to it.", None
    ),
    form: str = option(
        "--format NAME",
        "Of --out: parquet, or weights as csv, yaml or for a training tool; an unknown NAME lists them.",
        "parquet",
    ),
    weights: Path | None = rare(
        "--weights FILE", "Parquet of subset_id, row_id, weight, for grasp predict --subsets.", None
    ),
    **params: Any,
) -> None:
    from grasp.mixtures import check_format

    opened = grasp.open(art)
    outputs = table_outputs(out) if form == "parquet" else {"--out": out}
    check_outputs({**outputs, "--weights": weights}, artifact=opened.files, params=params)
    if form != "parquet":
        check_format(out, form)
    mixture = opened.mix(**params)
    print(mixture)
    if out is not None and form != "parquet":
        print(mixture.export(out, form))
    elif out is not None:
        print(f"{mixture.save(out)}: mixture weights; summary for grasp report --mixture: {out.stem}.json")
    if weights is not None:
        mixture.write_weights(weights)
        print(f"{weights}: row weights, for grasp predict --subsets")
