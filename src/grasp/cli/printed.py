"""Prints of select, mix and demo, until they return results."""

from collections.abc import Mapping, Sequence
from typing import Any

from grasp.cli.console import MOST_LINES, show
from grasp.text import plain

REALIZED = ("expected", "low", "high")


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


def nats(value: float | None) -> str:
    """Signed, four digits: realized utilities differ little."""
    return "-" if value is None else f"{value:+z.4f}"


def number(value: float | None) -> str:
    """Signed, three digits after the point; a dash where there is none."""
    return "-" if value is None else f"{value:+z.3f}"
