"""grasp detect"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.console import show
from grasp.cli.options import asked_names, published_methods
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.audit.detect import F64, Suspects

EXAMPLES = """\b
Examples:
  grasp detect art --target trusted --top 20 --out suspects.parquet
  grasp detect art --target trusted --label topic --truth was_changed
  grasp detect art --target sciq --contamination --against bm25 --truth leaked -k 100
"""


@command(EXAMPLES)
def detect(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    target: str = typer.Option(..., "--target", help="Trusted target that rows are held against."),
    contamination: bool = typer.Option(False, "--contamination", help="Look for rows that hold the target's own text."),
    label: str | None = typer.Option(None, "--label", help="Column of labels; none: the class of images."),
    truth: str | None = typer.Option(None, "--truth", help="Column that is true, or 1, for planted rows."),
    clean: str | None = typer.Option(None, "--clean", help="Column that is true, or 1, for rows checked to be right."),
    k: int | None = typer.Option(None, "-k", help="Rows to look at; none: as many as were planted."),
    neighbours: int = typer.Option(10, "--neighbours", help="Nearest rows whose labels are compared."),
    rate: float = typer.Option(0.01, "--false-positives", help="Share of right rows that the threshold may flag."),
    match: str | None = typer.Option(None, "--match", help="token, input or pooled; token where the artifact has it."),
    against: str | None = typer.Option(None, "--against", help="Published methods to compare with, e.g. bm25."),
    cache: Path | None = typer.Option(None, "--cache", help="Where a method's scores are kept; none: in the artifact."),
    top: int = typer.Option(10, "--top", min=0, help="Show so many of the most suspicious rows."),
    out: Path | None = typer.Option(None, "--out", help="Parquet of all rows, the most suspicious first."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Rank rows by how wrong they look to a trusted target.

    Mislabelled, poisoned or misleading rows have low relevance to trusted units, and neighbours with another label.
    """
    from grasp.artifact.reader import Artifact
    from grasp.audit import detect as auditing

    artifact = Artifact.open(path)
    check_outputs({"--out": out}, artifact.reads)
    if contamination:
        if label is not None:
            raise SettingsError("--label: no meaning with --contamination; leave it out")
        others = _others(artifact, target, against, cache, quiet)
        found = auditing.contamination(
            artifact, target, truth=truth, clean=clean, k=k, match=match, false_positive_rate=rate, others=others
        )
    else:
        if against is not None:
            raise SettingsError("--against: no meaning without --contamination; rank by a method with `grasp score`")
        found = auditing.detect(
            artifact,
            target,
            label=label,
            truth=truth,
            clean=clean,
            k=k,
            neighbours=neighbours,
            match=match,
            false_positive_rate=rate,
        )
    _print(artifact, found, target, top, label or "image_class")
    if out is not None:
        print(f"{out}: {auditing.write_table(artifact, found, target, out):,} rows")


def _others(
    artifact: "Artifact", target: str, against: str | None, cache: Path | None, quiet: bool
) -> "dict[str, F64]":
    from grasp.audit.detect import method_scores
    from grasp.audit.ranking import rows_by_method

    asked = published_methods(asked_names("--against", against), None, {"--cache": cache}, "--against")
    with Watch(quiet=quiet) as watch:
        return {
            one.label: method_scores(rows_by_method(artifact, one, cache=cache, progress=watch), target)
            for one in asked
        }


def _print(artifact: "Artifact", found: "Suspects", target: str, top: int, label: str) -> None:
    from grasp.audit.detect import table

    cut = found.threshold
    print(
        f"{found.ranking} above {cut.value:.4g}: {cut.n_flagged:,} of {artifact.n_rows:,} rows flagged; if all were "
        f"right about {cut.expected_false:,.1f} would be ({cut.false_positive_rate:.1%}): {cut.null}"
    )
    for note in found.notes:
        print(plain(note))
    if found.detections:
        _print_truth(found)
    lines = table(artifact, found, target).slice(0, top).to_pylist()
    rows = artifact.rows(found.order_N[:top]).to_pylist()
    unit = ["unit_id"] if found.match_E is not None else []
    known = [label] if rows and label in rows[0] and not unit else []
    if top:
        show(
            f"most suspicious rows, by {found.ranking}",
            ("rank", found.ranking, "flagged", "row_id", *known, *unit, "text"),
            [
                (
                    line["rank"],
                    f"{line[found.ranking]:.4g}",
                    "yes" if line["flagged"] else "no",
                    line["row_id"],
                    *(row[name] for name in known),
                    *(line[name] for name in unit),
                    row["snippet"],
                )
                for line, row in zip(lines, rows, strict=True)
            ],
            left=0,
        )


def _print_truth(found: "Suspects") -> None:
    some = next(iter(found.detections.values()))
    show(
        f"against the truth: {some.n_planted:,} of {some.n_rows:,} rows planted; best: at the cut that only the truth "
        "tells",
        ("score", "AUROC", "95%", "AP", f"P@{some.at_k.k}", f"R@{some.at_k.k}", f"F1@{some.at_k.k}", "best F1", "at"),
        [
            (
                name,
                f"{one.auroc:.3f}",
                f"{one.auroc_low:.3f} to {one.auroc_high:.3f}",
                f"{one.average_precision:.3f}",
                f"{one.at_k.precision:.3f}",
                f"{one.at_k.recall:.3f}",
                f"{one.at_k.f1:.3f}",
                f"{one.best.f1:.3f}",
                one.best.k,
            )
            for name, one in found.detections.items()
        ],
    )
