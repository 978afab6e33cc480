"""Find what should not be there: grasp detect."""

from typing import TYPE_CHECKING

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import check_outputs, show
from grasp.cli.options import Art, OnlyTarget, Quiet, ResultFile
from grasp.cli.progress import Watch

if TYPE_CHECKING:
    from grasp.audit.detect import Suspects


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --label topic --truth was_changed",
)
def detect(
    art: Art,
    target: OnlyTarget = None,
    label: str | None = option(
        "--label LABEL", "Column whose values may be wrong. Default: the class of images, if any.", None
    ),
    top: int = option("--top N", "Rows to show.", 10, min=0),
    out: ResultFile = None,
    false_positives: float = option(
        "--false-positives SHARE", "Share of right rows that may be flagged by mistake.", 0.01
    ),
    clean: str | None = option(
        "--clean LABEL", "Column that is true for rows checked to be right: they set the threshold.", None
    ),
    truth: str | None = option(
        "--truth LABEL", "Column that is true for rows known to be wrong: how many are found?", None
    ),
    k: int | None = rare("-k N", "First rows that are counted. Default: as many as are wrong.", None),
    neighbours: int | None = rare("--neighbours N", "Nearest rows whose labels are compared. Default: 10.", None),
    match: str | None = rare(
        "--match NAME",
        "gradient, token, input, neighbour, shift, tilt or pooled. Default: the first there is.",
        None,
    ),
    quiet: Quiet = False,
) -> None:
    """Find rows that look wrong to a target you trust.

    Mislabelled, poisoned or misleading rows teach little of what a trusted target asks, and look like rows with
    another label.
    """
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact.files.reads, tables=["--out"])
    with Watch(quiet=quiet) as watch:
        found = artifact.detect(
            target,
            label=label,
            truth=truth,
            clean=clean,
            k=k,
            neighbours=neighbours,
            false_positives=false_positives,
            match=match,
            top=top,
            progress=watch,
        )
    _print_comparison(found)
    print(found)
    if out is not None:
        print(f"{found.write(out)}: {len(found):,} rows")


def _print_comparison(found: "Suspects") -> None:
    """How well each score finds what is known to be wrong."""
    if found.record.detections:
        some = next(iter(found.record.detections.values()))
        k = some.at_k.k
        show(
            f"against the truth: {some.n_planted:,} of {some.n_rows:,} rows planted; best: at the cut that only the "
            "truth tells",
            ("score", "AUROC", "95%", "AP", f"P@{k}", f"R@{k}", f"F1@{k}", "best F1", "at"),
            [
                (
                    name,
                    f"{one.auroc:.3f}",
                    f"{one.auroc_low:.3f} to {one.auroc_high:.3f}",
                    *(f"{value:.3f}" for value in (one.average_precision, *one.at_k.shares, one.best.f1)),
                    one.best.k,
                )
                for name, one in found.record.detections.items()
            ],
        )
