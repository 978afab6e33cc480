"""Find what should not be there: grasp detect."""

from typing import TYPE_CHECKING, Any

import grasp
from grasp.cli.app import command
from grasp.cli.console import check_outputs, show
from grasp.cli.options import Art, Quiet, ResultFile
from grasp.cli.progress_display import Watch

if TYPE_CHECKING:
    from grasp.inspect.detect import Suspects


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --label topic --truth was_changed",
    verb="grasp.inspect.detect",
    more="k neighbours match",
)
def detect(art: Art, out: ResultFile = None, quiet: Quiet = False, **asked: Any) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, tables=["--out"])
    with Watch(quiet=quiet) as watch:
        found = artifact.detect(**asked, progress=watch)
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
