"""grasp predict"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grasp.cli.app import command
from grasp.cli.console import MOST_LINES, show
from grasp.cli.options import chosen_protocol, distinct_names
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.predict.blocks import SubsetBlock
    from grasp.predict.predictions import PredictionTable
    from grasp.predict.protocol import ScoringProtocol
    from grasp.predict.scorer import CalibrationFamily
    from grasp.predict.slices import LabelTable


# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp predict art --by topic --targets sciq
  grasp predict art --drop "topic = 'Games' AND format != 'FAQs'"
  grasp predict art --weight "topic = 'Games': 0.3" --weight "topic = 'Health': 2"
  grasp predict art --subsets subsets.parquet --out predictions.parquet
  grasp predict art --by topic --environment dev
"""
REALIZED = ("expected", "low", "high")


@command(EXAMPLES)
def predict(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    subsets: Path | None = typer.Option(None, "--subsets", help="Parquet: subset_id, row_id[, weight]."),
    drop: str | None = typer.Option(
        None, "--drop", metavar="EXPR", help="Drop the rows for which a label expression is true."
    ),
    keep: str | None = typer.Option(None, "--keep", metavar="EXPR", help="Keep only the rows for which it is true."),
    weight: list[str] = typer.Option(
        [], "--weight", metavar="EXPR:NUMBER", help="Weight of the rows for which it is true, 1 for others; repeatable."
    ),
    by: str | None = typer.Option(None, "--by", metavar="LABEL", help="What each value of a label is worth."),
    family: str | None = typer.Option(None, "--family", help="Draw uniform:F, bernoulli:Q, mixture:L or groups:L."),
    count: int = typer.Option(100, "-B", min=1, help="Subsets drawn with --family."),
    seed: int = typer.Option(0, "--seed", min=0, help="Seed of that draw."),
    targets: str | None = typer.Option(None, "--targets", help="Targets, separated by commas; none: all."),
    omitted: bool = typer.Option(False, "--omitted", help="The subsets of --subsets name the rows that are left out."),
    protocol: Path | None = typer.Option(None, "--protocol", help="Protocol file; none: the one that ships."),
    calibration: str | None = typer.Option(None, "--calibration", help="Family that standardises; see --family."),
    environment: Path | None = typer.Option(
        None, "--environment", help="Development environment; gives intervals for realized utility, and warnings."
    ),
    units: bool = typer.Option(False, "--units", help="A line for every unit as well."),
    components: bool = typer.Option(False, "--components", help="Every component of the prediction."),
    out: Path | None = typer.Option(None, "--out", help="Parquet of the predictions."),
) -> None:
    """Predict the utility of subsets, or the worth of slices.

    Utility is in standard deviations over the calibration family; higher is better.
    """
    from grasp.artifact.reader import Artifact
    from grasp.predict.predictions import predict_with
    from grasp.predict.scorer import CalibrationFamily
    from grasp.predict.slices import LabelTable
    from grasp.predict.source import checked_targets
    from grasp.runs.trust import Watcher, scorer_and_trust, with_intervals

    asked = {"--subsets": subsets, "--drop": drop, "--keep": keep, "--weight": weight or None, "--by": by}
    asked["--family"] = family
    idle = {"--omitted": omitted and subsets is None, "--units": units and by is not None}
    idle["--components"] = components and by is not None
    _check_flags(asked, idle)
    wanted = distinct_names("--targets", targets)
    artifact = Artifact.open(path)
    read = {"--subsets reads": subsets, "--protocol reads": protocol, "is the environment": environment}
    check_outputs({"--out": out}, artifact.reads | read)
    labels = LabelTable(artifact.rows_path)
    checked_targets(artifact, wanted, "--targets")
    if by is not None:
        labels.column(by, "--by")  # or it says what there is
    chosen = chosen_protocol(protocol, calibration, label=by)
    if by is not None:
        _by(artifact, chosen, labels, by, wanted, CalibrationFamily.of(chosen, labels), environment, out)
        return
    if weight:
        blocks, note = _weighted(labels, weight)
    else:
        blocks, note = _blocks(artifact, labels, subsets, drop, keep, family, count, seed, omitted)
    scorer, trust = scorer_and_trust(artifact, chosen, labels, wanted, environment, per_unit=units)
    watcher = None if trust is None else Watcher(trust, scorer)
    table = predict_with(scorer, artifact, blocks, components=components, watch=watcher)
    if trust is not None:
        table = with_intervals(table, trust)
    _tell(table, note, out, components=components)
    if trust is not None and watcher is not None:
        print_trust(trust.title, (*trust.notes, *watcher.warnings))


def _check_flags(asked: Mapping[str, object], idle: Mapping[str, bool]) -> None:
    """See that one thing is asked, and that no flag is given that says nothing of it."""
    given = [flag for flag, value in asked.items() if value is not None]
    if len(given) != 1:
        got = ", ".join(given) or "nothing to predict"
        raise SettingsError(f"predict: got {got}, expected one of {', '.join(asked)}")
    if any(idle.values()):
        useless = ", ".join(flag for flag, value in idle.items() if value)
        raise SettingsError(f"predict: got {useless} with {given[0]}, where it has no meaning; leave it out")


def _tell(table: "PredictionTable", note: str, out: Path | None, *, components: bool) -> None:
    """Write the predictions, or print them; they are made meanwhile."""
    written = table.write(out) if out is not None else None
    lines = table.read().to_pylist() if out is None else []
    if note:
        print(note)
    print_protocol(table.metadata)
    if written is None:
        _print_predictions(lines, components)
    else:
        print(f"{out}: {written:,} predictions")


def _blocks(
    artifact: "Artifact",
    labels: "LabelTable",
    subsets: Path | None,
    drop: str | None,
    keep: str | None,
    family: str | None,
    count: int,
    seed: int,
    omitted: bool,
) -> tuple[Iterator["SubsetBlock"], str]:
    """The subsets asked for, and what is worth saying of them."""
    from grasp.predict.blocks import one_subset
    from grasp.predict.families import parse_family
    from grasp.predict.subset_tables import RowIndex, read_subsets

    if subsets is not None:
        index = RowIndex.from_parquet(artifact.rows_path)
        return read_subsets(subsets, index, side="omitted" if omitted else "retained"), ""
    if family is not None:
        drawn = parse_family(family)
        column = None if drawn.label is None else labels.column(drawn.label, "--family")
        return drawn.draw(count, n_rows=artifact.n_rows, labels=column, seed=seed, purpose="drawn"), ""
    if drop is not None:
        selection = labels.selection(drop)
        name, mask_N = f"drop {drop}", ~selection.mask_N
    else:
        assert keep is not None
        selection = labels.selection(keep)
        name, mask_N = f"keep {keep}", selection.mask_N
    if not mask_N.any():
        raise SettingsError(f"predict: `{name}` leaves none of {artifact.n_rows:,} rows, expected at least one")
    note = f"{name}: {int(mask_N.sum()):,} of {artifact.n_rows:,} rows stay"
    if selection.n_null:
        note += f"; {selection.n_null:,} rows have no label there and count as not selected"
    return iter([one_subset(name, mask_N)]), note


def _weighted(labels: "LabelTable", texts: Sequence[str]) -> tuple[Iterator["SubsetBlock"], str]:
    """The corpus with the rows of each expression at its weight; where a row is in several, their product."""
    import numpy as np

    from grasp.predict.blocks import one_subset

    weight_N = np.ones(labels.n_rows)
    for expression, weight in [_weight(text) for text in texts]:
        weight_N[labels.select(expression)] *= weight
    kept_N = weight_N > 0
    if not kept_N.any():
        raise SettingsError(f"--weight: leaves none of {labels.n_rows:,} rows, expected at least one above 0")
    note = f"{int(kept_N.sum()):,} of {labels.n_rows:,} rows stay, with weights that add up to {weight_N.sum():,.6g}"
    return iter([one_subset("weighted", kept_N, weight_N[kept_N])]), note


def _weight(text: str) -> tuple[str, float]:
    """An expression and its weight; the expression may hold colons, the last one counts."""
    expression, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not expression.strip() or not 0 <= weight < float("inf"):
        raise SettingsError(
            f"--weight: got {text!r}, expected EXPR:NUMBER with 0 or more, e.g. \"topic = 'Games': 0.3\""
        )
    return expression, weight


def _by(
    artifact: "Artifact",
    protocol: "ScoringProtocol",
    labels: "LabelTable",
    by: str,
    targets: Sequence[str] | None,
    calibration: "CalibrationFamily",
    environment: Path | None,
    out: Path | None,
) -> None:
    from grasp.predict.label_slices import label_slices
    from grasp.predict.row_tables import row_tokens, slice_table
    from grasp.predict.scorer import Scorer
    from grasp.runs.environment import Environment
    from grasp.runs.trust import Trust, slice_intervals, slice_warnings

    tokens_N = row_tokens(artifact)
    slices = label_slices(labels.column(by), tokens_N)
    column = slices.column if out is None else labels.column(by)  # a table has room for all values
    table = slice_table(
        artifact,
        protocol,
        column,
        tokens_N=tokens_N,
        targets=targets,
        calibration=calibration,
    )
    trust: Trust | None = None
    warnings: tuple[str, ...] = ()
    if environment is not None:
        scorer = Scorer.prepare(artifact, protocol, targets=targets, calibration=calibration)
        trust = Trust.of(scorer, artifact, Environment.open(environment))
        warnings = slice_warnings(table, trust, scorer)
        table = slice_intervals(table, trust)
    print_protocol({key.decode(): value.decode() for key, value in table.schema.metadata.items()})
    if out is not None:
        from grasp.predict.row_tables import write_table

        write_table(table, out)
        print(f"{out}: {table.num_rows:,} lines")
    lines = table.to_pylist() if out is None else []
    for target in dict.fromkeys(line["target"] for line in lines):
        print_slices(f"{target}: what each {by} is worth", by, [line for line in lines if line["target"] == target])
    if slices.n_grouped:
        print(f"{slices.n_grouped:,} of the values are small and share one slice")
    if trust is not None:
        print_trust(trust.title, (*trust.notes, *warnings))


def print_trust(title: str, notes: Sequence[str]) -> None:
    """What the intervals are, and what should be known of them."""
    for line in (title, *notes):
        print(plain(line))


def print_protocol(metadata: Mapping[str, str]) -> None:
    print(f"protocol {metadata['grasp.protocol']}: {metadata['grasp.provenance']}")
    if metadata["grasp.negative"] != "1":
        print(f"negative relevance of a row to a unit times {metadata['grasp.negative']}")
    print(f"in standard deviations over {metadata['grasp.calibration']}")
    if constant := metadata["grasp.dropped"]:
        print(f"left out, since it does not vary over them: {constant}")


def print_slices(title: str, by: str, lines: Sequence[dict[str, Any]]) -> None:
    """One table of slices, most useful first; of many the most and the least useful."""
    ordered = sorted(lines, key=lambda line: line["if_dropped"] if line["if_dropped"] is not None else 0.0)
    kernel = next(name for name in ordered[0] if name.startswith("relevance_"))
    realized = ("if dropped: expected", "low", "high") if "dropped_expected" in ordered[0] else ()
    shown = ordered if len(ordered) <= MOST_LINES else [*ordered[: MOST_LINES // 2], *ordered[-(MOST_LINES // 2) :]]
    show(
        title,
        (by, "rows", "tokens", "mean relevance", "if dropped", "if doubled", "redundancy", *realized),
        [
            (
                line["value"],
                f"{line['rows']:,}",
                f"{line['tokens']:,}",
                number(line[kernel]),
                number(line["if_dropped"]),
                number(line["if_doubled"]),
                number(line.get("redundancy")),
                *(nats(line[f"dropped_{name}"]) for name in REALIZED if realized),
            )
            for line in shown
        ],
    )
    if len(shown) < len(ordered):
        print(f"... and {len(ordered) - len(shown):,} more values between these halves; --out holds them")


def _print_predictions(lines: Sequence[dict[str, Any]], components: bool) -> None:
    texts = [name for name in ("subset_id", "target", "unit_id") if lines and name in lines[0]]
    numbers = [name for name in (lines[0] if lines else ()) if name not in texts]
    if not components:
        numbers = [name for name in numbers if not name.startswith(("part_", "value_"))]
    spelled = {name: nats if name in REALIZED else number for name in numbers}
    rows = [(*(line[name] or "" for name in texts), *(spelled[name](line[name]) for name in numbers)) for line in lines]
    show("predicted utility", (*texts, *numbers), rows, left=len(texts))


def nats(value: float | None) -> str:
    """Signed, four digits: realized utilities differ little."""
    return "-" if value is None else f"{value:+z.4f}"


def number(value: float | None) -> str:
    """Signed, three digits after the point; a dash where there is none."""
    return "-" if value is None else f"{value:+z.3f}"
