"""grasp retrieve"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.console import show
from grasp.cli.options import distinct_names, names, published_methods
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.audit.retrieval import Found, Related

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp retrieve art --queries pages.jsonl --by topic,format --k 100,1000
  grasp retrieve art --queries pages.jsonl --by topic --methods bm25,token,token+bm25 --out lifts.parquet
  grasp retrieve art --target sciq --related "topic = 'Science, Math & Technology'"
pages.jsonl is a target of the artifact whose lines have their labels as well:
  {"task": "pages", "unit_id": "p1", "prompt": "...", "completion": "...", "topic": "Games"}
"""


@command(EXAMPLES)
def retrieve(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    queries: Path | None = typer.Option(
        None, "--queries", help="JSONL or Parquet of unit_id and labels: related rows share the unit's label."
    ),
    by: str | None = typer.Option(None, "--by", metavar="LABELS", help="Labels of --queries, separated by commas."),
    target: str | None = typer.Option(None, "--target", help="Target whose units are the queries of --related."),
    related: str | None = typer.Option(
        None, "--related", metavar="EXPR", help="Label expression that selects the rows related to a target."
    ),
    together: bool = typer.Option(
        False, "--together", help="Units of one value are one query, by their mean score; none: every unit is one."
    ),
    k: str = typer.Option("1000", "--k", help="Rows at the top that count, e.g. 100,1000."),
    methods: str = typer.Option(
        "grasp,bm25,overlap,grasp+bm25,grasp+overlap",
        "--methods",
        help="grasp, a kernel (token, input, pooled) or a published method; fused where joined by +.",
    ),
    fusion: str = typer.Option("rrf,z", "--fusion", help="How to fuse: rrf (reciprocal ranks), z (z-scores), or both."),
    method_settings: Path | None = typer.Option(
        None, "--method-settings", help="YAML of settings by method, or by a label of your own; see grasp methods."
    ),
    cache: Path | None = typer.Option(None, "--cache", help="Where a method's scores are kept; none: in the artifact."),
    out: Path | None = typer.Option(None, "--out", help="Parquet with a line a label, k, score and query."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """See whether the best rows for a unit come from its own domain.

    Normalised recall among the best k rows: 1 is what chance finds. With intervals over queries, and against the first
    of the methods.
    """
    _check_question(queries, by, target, related)
    places = _numbers(k)
    from grasp.artifact.reader import Artifact
    from grasp.audit.retrieval import method_names, parse_scores, per_query
    from grasp.audit.retrieval import retrieve as run
    from grasp.choose.records import write_table

    asked = parse_scores(methods, names(fusion) or [])
    published = published_methods(method_names(asked), method_settings, {})
    artifact = Artifact.open(path)
    read = {"--queries reads": queries, "--method-settings reads": method_settings}
    check_outputs({"--out": out}, artifact.reads | read)
    questions = _related(artifact, queries, by, target, related)
    if together:
        questions = [one.together() for one in questions]
    with Watch(quiet=quiet) as watch:
        found = run(artifact, questions, places, asked, published, cache=cache, progress=watch)
    _print(artifact, found)
    if out is not None:
        write_table(per_query(found), out)
        print(f"{out}: {sum(len(one.lift_Q) for one in found):,} lines")


def _check_question(queries: Path | None, by: str | None, target: str | None, related: str | None) -> None:
    """Either queries and labels, or a target and an expression.

    Raises:
        SettingsError: neither, both, or half of one.
    """
    first, second = (queries is not None, by is not None), (target is not None, related is not None)
    if any(first) == any(second) or not (all(first) or all(second)):
        given = {"--queries": queries, "--by": by, "--target": target, "--related": related}
        got = ", ".join(flag for flag, value in given.items() if value is not None) or "none of them"
        raise SettingsError(f"retrieve: got {got}; expected --queries and --by, or --target and --related")


def _numbers(text: str) -> list[int]:
    parts = names(text) or []
    if not parts or not all(part.isdecimal() for part in parts):
        raise SettingsError(f"--k: got {text!r}, expected numbers of rows, e.g. 100,1000")
    return [int(part) for part in dict.fromkeys(parts)]


def _related(
    artifact: "Artifact", queries: Path | None, by: str | None, target: str | None, related: str | None
) -> "Sequence[Related]":
    from grasp.audit.retrieval import related_by_expression, related_by_label

    if queries is not None:
        labels = distinct_names("--by", by) or []
        if not labels or "unit_id" in labels:
            raise SettingsError(f"--by: got {by!r}, expected labels, e.g. topic or topic,format")
        return related_by_label(artifact, queries, labels)
    assert target is not None
    assert related is not None
    return [related_by_expression(artifact, target, related)]


def _print(artifact: "Artifact", found: "Sequence[Found]") -> None:
    for on, k in dict.fromkeys((one.related.name, one.k) for one in found):
        own = [one for one in found if (one.related.name, one.k) == (on, k)]
        query = own[0].related
        n_values = len(set(query.values))
        show(
            f"{on}: normalised recall among the best {k:,} of {artifact.n_rows:,} rows; chance is 1; "
            f"{len(query.unit_ids):,} queries of {n_values:,} values",
            ("score", "recall", "low", "high", f"against {own[0].score}", "low", "high"),
            [
                (
                    one.score,
                    *(f"{value:.3f}" for value in (one.mean.mean, one.mean.low, one.mean.high)),
                    *(
                        ("", "", "")
                        if one.against is None
                        else (f"{value:+z.3f}" for value in (one.against.mean, one.against.low, one.against.high))
                    ),
                )
                for one in own
            ],
        )
        if query.n_without_rows:
            print(plain(f"{query.n_without_rows:,} queries are left out: no row has their value of {on}"))
