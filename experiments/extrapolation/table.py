"""The tables of the page, from the results.

python -m experiments.extrapolation.table experiments/extrapolation/extreme.json
"""

import json
import sys
from pathlib import Path

HEAD = (
    "| runs of | left out | k | coverage before | after | its interval | error before | after | half width before "
    "| after | answered |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    lines = json.loads(Path(sys.argv[1]).read_text())
    by_key = {(line["name"], line["world"], line["split"], line["runs"]): line for line in lines}
    print(HEAD)
    for name, *key in by_key:
        if name != "after":
            continue
        after, before = by_key["after", *key], by_key["before", *key]
        low, high = (min(end, 1.0) for end in after["coverage_interval"])
        cells = [*map(str, key), f"{before['coverage']:.0%}", f"{after['coverage']:.0%}", f"{low:.0%} to {high:.0%}"]
        cells += [f"{line[column]:.2f}" for column in ("error", "half_width") for line in (before, after)]
        print("| " + " | ".join([*cells, f"{after['answered']:.0%}"]) + " |")


if __name__ == "__main__":
    main()
