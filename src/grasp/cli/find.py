"""Find what should not be there: grasp detect, retrieve."""

from pathlib import Path
from typing import TYPE_CHECKING

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import show
from grasp.cli.options import (
    Art,
    Cache,
    MethodSettings,
    OnlyTarget,
    Quiet,
    ResultFile,
    asked_names,
    distinct_names,
    names,
)
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs

if TYPE_CHECKING:
    from grasp.audit.detect import Suspects


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --label topic --truth was_changed",
    "grasp detect art --target sciq --contamination --against bm25 --truth leaked -k 100",
)
def detect(
    art: Art,
    target: OnlyTarget = None,
    contamination: bool = option("--contamination", "Look for rows that hold the target's own text.", False),
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
        "--match NAME", "token, input, neighbour, shift, tilt or pooled. Default: the first that there is.", None
    ),
    against: str | None = rare("--against NAMES", "Published methods to compare with, e.g. bm25.", None),
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Find rows that look wrong to a target you trust, or that leak it.

    Mislabelled, poisoned or misleading rows teach little of what a trusted target asks, and look like rows with
    another label.
    """
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact.files.reads)
    with Watch(quiet=quiet) as watch:
        found = artifact.detect(
            target,
            contamination=contamination,
            label=label,
            truth=truth,
            clean=clean,
            k=k,
            neighbours=neighbours,
            false_positives=false_positives,
            match=match,
            against=asked_names("--against", against) or (),
            cache=cache,
            top=top,
            progress=watch,
        )
    _print_comparison(found)
    print(found)
    if out is not None:
        print(f"{found.write(out)}: {len(found):,} rows")


def _print_comparison(found: "Suspects") -> None:
    """How well each score finds what is known to be wrong, and how far methods agree."""
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
    if found.agreements:
        k = next(iter(found.agreements.values())).k
        show(
            f"against {found.record.ranking}: do others rank rows alike?",
            ("score", "ranks agree", f"shared of the first {k:,}"),
            [(name, f"{one.ranks:+.3f}", f"{one.shared:.0%}") for name, one in found.agreements.items()],
        )


@command(
    "grasp retrieve art --queries pages.jsonl --by topic,format --k 100,1000",
    "grasp retrieve art --queries pages.jsonl --by topic --methods bm25,token,token+bm25 --out lifts.parquet",
    "grasp retrieve art --target sciq --related \"topic = 'Science, Math & Technology'\"",
    also="pages.jsonl is a target of the artifact whose lines have their labels as well:\n"
    '  {"task": "pages", "unit_id": "p1", "prompt": "...", "completion": "...", "topic": "Games"}',
)
def retrieve(
    art: Art,
    target: str | None = option("--target NAME", "Target whose units ask; with --related.", None),
    related: str | None = option("--related EXPR", "Rows that should come first, e.g. \"topic = 'Science'\".", None),
    queries: Path | None = option(
        "--queries FILE", "Units with labels of their own (JSONL or Parquet); with --by.", None
    ),
    by: str | None = option(
        "--by LABELS", "Labels of --queries: rows with the unit's own value should come first.", None
    ),
    k: str = option("--k NUMBERS", "First rows that count, e.g. 100,1000.", "1000"),
    methods: str = option(
        "--methods NAMES",
        "Scores to rank by: grasp, a kernel (token, input, pooled), a published method, or some joined by +.",
        "grasp,bm25,overlap,grasp+bm25,grasp+overlap",
    ),
    out: Path | None = option("--out FILE", "Write every query's line there: .parquet or .csv.", None),
    together: bool = rare("--together", "Units of one value ask together, by their mean score.", False),
    fusion: str | None = rare("--fusion NAMES", "How to join scores: rrf (ranks), z (z-scores). Default: both.", None),
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
