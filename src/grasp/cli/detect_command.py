"""The command grasp detect."""

from typing import TYPE_CHECKING, Any

import grasp
from grasp.cli.app import command
from grasp.cli.console import check_outputs, show
from grasp.cli.options import Art, ResultFile
from grasp.progress_display import Watch

if TYPE_CHECKING:
    from grasp.inspect.detect import Suspects


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --label topic --truth was_changed",
    verb="grasp.inspect.detect",
    more="k match",
)
def detect(art: Art, out: ResultFile = None, **params: Any) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, tables=["--out"])
    with Watch() as watch:
        suspects = artifact.detect(**params, progress=watch)
    _print_comparison(suspects)
    print(suspects)
    if out is not None:
        print(f"{suspects.write(out)}: {len(suspects):,} rows")


def _print_comparison(suspects: "Suspects") -> None:
    """Print how well each score finds the rows that the truth marks as wrong."""
    if suspects.record.detections:
        first_scores = next(iter(suspects.record.detections.values()))
        k = first_scores.at_k.k
        show(
            f"evaluation against the truth: {first_scores.n_planted:,} of {first_scores.n_rows:,} rows planted; "
            "best F1: over all thresholds",
            ("score", "AUROC", "95% interval", "AP", f"P@{k}", f"R@{k}", f"F1@{k}", "best F1", "at k"),
            [
                (
                    name,
                    f"{scores.auroc:.3f}",
                    f"{scores.auroc_low:.3f} to {scores.auroc_high:.3f}",
                    *(f"{value:.3f}" for value in (scores.average_precision, *scores.at_k.shares, scores.best.f1)),
                    scores.best.k,
                )
                for name, scores in suspects.record.detections.items()
            ],
        )
