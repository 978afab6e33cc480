"""grasp mix"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.console import MOST_LINES, show
from grasp.cli.options import beside, chosen_protocol
from grasp.cli.printed import nats, number, print_protocol, print_trust
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.choose.mixture import MixRequest, Mixture
    from grasp.predict.slices import LabelTable
    from grasp.runs.old_trust import Verdict

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp mix art --by topic --target sciq --floor 1% --cap 20%
  grasp mix art --by topic --target sciq=2,openbookqa=1 --distance 30% --cap Games:5% --out mixture.parquet
  grasp mix art --by source --target sciq --diversity 0.25 --environment dev --weights weights.parquet
"""


@command(EXAMPLES)
def mix(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    by: str = typer.Option(..., "--by", metavar="LABEL", help="Label whose values are mixed."),
    target: str = typer.Option(..., "--target", help="Target, or targets and their weights: sciq=2,openbookqa=1."),
    floor: list[str] = typer.Option(
        [], "--floor", metavar="[VALUE:]SHARE", help="At least so much of the mixture, e.g. Games:5%; repeatable."
    ),
    cap: list[str] = typer.Option(
        [], "--cap", metavar="[VALUE:]SHARE", help="At most so much of the mixture, e.g. 20% of each; repeatable."
    ),
    distance: str | None = typer.Option(
        None, "--distance", metavar="SHARE", help="Move at most so much of the data between values, e.g. 30%."
    ),
    protocol: Path | None = typer.Option(None, "--protocol", help="Protocol file; none: the one that ships."),
    calibration: str | None = typer.Option(
        None, "--calibration", help="Family that standardises; none: mixture:LABEL, or the protocol's own if given."
    ),
    diversity: float | None = typer.Option(
        None, "--diversity", help="Penalty on redundancy instead of the protocol's own geometry, e.g. 0.25; 0: none."
    ),
    environment: Path | None = typer.Option(
        None, "--environment", help="Development environment; gives intervals for realized utility, and warnings."
    ),
    out: Path | None = typer.Option(None, "--out", help="Parquet of the mixture; its summary and protocol beside it."),
    weights: Path | None = typer.Option(
        None, "--weights", help="Parquet of subset_id, row_id, weight, as grasp predict --subsets reads it."
    ),
) -> None:
    """Find the mixture of a label's values with the highest utility.

    It maximises what grasp predict predicts. Weights add up to 100%; rows of a value share its weight, and the amount
    of data stays the same.
    """
    if out is not None and out.suffix != ".parquet":
        raise SettingsError(f"--out: got {out}, expected a name that ends in .parquet")
    from grasp.artifact.reader import Artifact
    from grasp.choose.mixture import mix_with, write_weights
    from grasp.predict.predictions import describe
    from grasp.predict.slices import LabelTable
    from grasp.predict.source import checked_targets
    from grasp.predict.subset_tables import RowIndex
    from grasp.runs.old_trust import scorer_and_trust

    artifact = Artifact.open(path)
    read = {"--protocol reads": protocol, "is the environment": environment}
    check_outputs({**beside("--out", out), "--weights": weights}, artifact.reads | read)
    table = LabelTable(artifact.rows_path)
    request = _request(artifact, table, target, by, floor, cap, distance)
    checked_targets(artifact, list(request.targets), "--target")
    chosen = chosen_protocol(protocol, calibration, label=by, diversity=diversity, array_names=artifact.array_names)
    scorer, trust = scorer_and_trust(artifact, chosen, table, list(request.targets), environment)
    mixture = mix_with(scorer, request)
    verdict = None if trust is None else trust.verdict(scorer, mixture.sums, sized=False)
    print_protocol(describe(scorer))
    _print_mixture(mixture, verdict)
    if out is not None:
        _write(mixture, verdict, out)
    if weights is not None:
        write_weights(mixture, request.slices, RowIndex.from_parquet(artifact.rows_path), weights)
        print(f"{weights}: the rows and their weights")
        if out is not None:
            asked = ["--subsets", weights, "--protocol", out.with_suffix(".protocol.yaml")]
            print(f"the same numbers: {shlex.join(['grasp', 'predict', *map(str, [path, *asked])])}")


def _request(
    artifact: "Artifact",
    table: "LabelTable",
    target: str,
    by: str,
    floor: list[str],
    cap: list[str],
    distance: str | None,
) -> "MixRequest":
    """What is asked, in rows and shares."""
    from grasp.choose.amounts import parse_bounds, parse_share, parse_targets
    from grasp.choose.mixture import MixRequest
    from grasp.predict.label_slices import label_slices
    from grasp.predict.row_tables import row_tokens

    return MixRequest(
        label_slices(table.column(by, "--by"), row_tokens(artifact)),
        parse_targets(target),
        parse_bounds(floor, "--floor"),
        parse_bounds(cap, "--cap"),
        None if distance is None else parse_share(distance, "--distance"),
    )


def _print_mixture(mixture: "Mixture", verdict: "Verdict | None") -> None:
    columns = zip(mixture.names, mixture.rows_G, mixture.current_G, mixture.proposed_G, mixture.factor_G, strict=True)
    ordered = sorted(columns, key=lambda line: -line[3])
    show(
        f"mixture by {mixture.label}: {mixture.distance:.1%} of the data change hands",
        (mixture.label, "rows", "now", "proposed", "times as often"),
        [
            (name, f"{int(rows):,}", f"{now:z.1%}", f"{p:z.1%}", f"{factor:.2f}")
            for name, rows, now, p, factor in ordered[:MOST_LINES]
        ],
    )
    if rest := ordered[MOST_LINES:]:
        before, after = (sum(float(line[place]) for line in rest) for place in (2, 3))
        print(f"... and {len(rest):,} more values with {before:z.1%} now and {after:z.1%} proposed in all")
    headings = ["target", "weight", "now", "proposed", "gain"]
    if verdict is not None:
        headings += ["gain expected", "low", "high"]
    lines = []
    for name, weight in mixture.targets.items():
        now, proposed = mixture.current_utility[name], mixture.utility[name]
        line = [name, f"{weight:.2f}", number(now), number(proposed), number(proposed - now)]
        if verdict is not None:
            span = verdict.change.get(name)
            line += [nats(getattr(span, end, None)) for end in ("expected", "low", "high")]
        lines.append(line)
    show("predicted utility", headings, lines)
    optimum = "the best mixture there is" if mixture.is_global else "a local optimum"
    print(f"gain {number(mixture.gain)}: {optimum} for the predictor within the floors, caps and distance")
    for note in mixture.notes:
        print(plain(note))
    if verdict is not None:
        print_trust(verdict.title, verdict.warnings)


def _write(mixture: "Mixture", verdict: "Verdict | None", out: Path) -> None:
    from grasp.choose.records import mixture_table, write_summary, write_table
    from grasp.predict.protocol import save_protocol

    write_table(mixture_table(mixture), out)
    record = out.with_suffix(".json")
    write_summary(mixture.summary() | ({} if verdict is None else {"trust": verdict.summary()}), record)
    save_protocol(mixture.protocol, out.with_suffix(".protocol.yaml"))
    print(f"{out}: {len(mixture.names):,} weights; {record}: the summary, for grasp report --mixture")
