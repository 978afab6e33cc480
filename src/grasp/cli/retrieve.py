"""grasp retrieve"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import Art, Cache, MethodSettings, Quiet, asked_names, distinct_names, names
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs


@command(
    "grasp retrieve art --queries pages.jsonl --by topic,format --k 100,1000",
    "grasp retrieve art --queries pages.jsonl --by topic --methods bm25,token,token+bm25 --out lifts.parquet",
    "grasp retrieve art --target sciq --related \"topic = 'Science, Math & Technology'\"",
    also="pages.jsonl is a target of the artifact whose lines have their labels as well:\n"
    '  {"task": "pages", "unit_id": "p1", "prompt": "...", "completion": "...", "topic": "Games"}',
)
def retrieve(
    art: Art,
    target: str | None = typer.Option(None, "--target", metavar="NAME", help="Target whose units ask; with --related."),
    related: str | None = typer.Option(
        None, "--related", metavar="EXPR", help="Rows that should come first, e.g. \"topic = 'Science'\"."
    ),
    queries: Path | None = typer.Option(
        None, "--queries", metavar="FILE", help="Units with labels of their own (JSONL or Parquet); with --by."
    ),
    by: str | None = typer.Option(
        None, "--by", metavar="LABELS", help="Labels of --queries: rows with the unit's own value should come first."
    ),
    k: str = typer.Option("1000", "--k", metavar="NUMBERS", help="First rows that count, e.g. 100,1000."),
    methods: str = typer.Option(
        "grasp,bm25,overlap,grasp+bm25,grasp+overlap",
        "--methods",
        metavar="NAMES",
        help="Scores to rank by: grasp, a kernel (token, input, pooled), a published method, or some joined by +.",
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Write every query's line there: .parquet or .csv."
    ),
    together: bool = typer.Option(
        False, "--together", help="Units of one value ask together, by their mean score.", rich_help_panel=MORE
    ),
    fusion: str | None = typer.Option(
        None,
        "--fusion",
        metavar="NAMES",
        help="How to join scores: rrf (ranks), z (z-scores). Default: both.",
        rich_help_panel=MORE,
    ),
    method_settings: MethodSettings = None,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """See whether the best rows for a unit come from its own domain.

    Recall among the best k rows by that of chance: 1 is what chance finds. With intervals over queries, and against the
    first of the methods.
    """
    places = _numbers(k)
    labels = () if by is None else distinct_names("--by", by) or ()
    if by is not None and not labels:
        raise SettingsError(f"--by: got {by!r}, expected labels, e.g. topic or topic,format")
    artifact = grasp.open(art)
    check_outputs(
        {"--out": out}, artifact.files.reads | {"--queries reads": queries, "--method-settings reads": method_settings}
    )
    with Watch(quiet=quiet) as watch:
        found = artifact.retrieve(
            queries=queries,
            by=labels,
            target=target,
            related=related,
            together=together,
            k=places,
            methods=asked_names("--methods", methods) or (),
            fusion=names(fusion),
            method_settings=method_settings,
            cache=cache,
            progress=watch,
        )
    print(found)
    if out is not None:
        print(f"{found.write(out)}: {len(found):,} lines")


def _numbers(text: str) -> list[int]:
    parts = names(text) or []
    if not parts or not all(part.isdecimal() for part in parts):
        raise SettingsError(f"--k: got {text!r}, expected numbers of rows, e.g. 100,1000")
    return [int(part) for part in dict.fromkeys(parts)]
