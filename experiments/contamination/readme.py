"""The table of README.md from result.json: python -m experiments.contamination.readme."""

import json
from pathlib import Path
from typing import Any


def lines(results: dict[str, Any]) -> list[str]:
    """Recall at 100 of every method, the highest mean first."""
    kinds = [kind for kind in ("verbatim", "shuffled", "masked", "natural") if kind in results["rows"]]
    heads = [f"{kind} ({results['rows'][kind]})" for kind in kinds]
    out = [f"| method | {' | '.join(heads)} |"]
    out.append("|---" * (1 + len(kinds)) + "|")
    ranked = sorted(results["table"].items(), key=lambda pair: -sum(cell["recall"] for cell in pair[1].values()))
    for method, by_kind in ranked:
        cells = [f"{cell['recall']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]" for cell in map(by_kind.get, kinds)]
        out.append(f"| {method} | {' | '.join(cells)} |")
    return out


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(__file__).with_name("result.json").read_text()))))
