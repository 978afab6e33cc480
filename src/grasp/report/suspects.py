"""The section of suspicious rows: what `grasp detect` wrote, as the template reads it."""

import base64
from typing import Any

from grasp.audit.suspects import SuspectSummary
from grasp.report.texts import number, signed
from grasp.text import name, plain


def suspects_view(found: SuspectSummary) -> dict[str, Any]:
    """What was flagged and by what, how the scores compare with the truth, and the first rows."""
    said, cut = found.said, found.said.threshold
    return {
        "head": f"Held against {name(said.target)}: {cut.n_flagged:,} of {said.rows:,} rows are flagged, with a "
        f"{name(said.ranking)} score above {number(cut.value)}; if all were right about "
        f"{number(cut.expected_false, 1)} would be: {cut.null}.",
        "ranking": name(said.ranking),
        "measured": [
            {
                "name": name(score),
                "auroc": {
                    "value": number(one.auroc),
                    "interval": f"[{number(one.auroc_low)}, {number(one.auroc_high)}]",
                },
                "precision": number(one.average_precision),
                "at_k": [number(value) for value in (one.at_k.precision, one.at_k.recall, one.at_k.f1)],
                "best": f"{number(one.best.f1)} at {one.best.k:,}",
            }
            for score, one in said.detections.items()
        ],
        "truth": next((f"{one.n_planted:,} rows" for one in said.detections.values()), ""),
        "k": next((f"{one.at_k.k:,}" for one in said.detections.values()), ""),
        "rows": [
            {
                "rank": row.rank,
                "flagged": row.flagged,
                "is_copy": row.is_copy,
                "scores": [(name(score), signed(value)) for score, value in reversed(row.scores)],
                "labels": list(dict.fromkeys(value for _, value in row.labels)),
                "row_id": row.row_id,
                "unit": row.unit,
                "text": row.text,
                "picture": row.picture and f"data:image/png;base64,{base64.b64encode(row.picture).decode()}",
            }
            for row in found.rows
        ],
        "notes": [plain(note) for note in said.notes],
    }
