"""What the scripts of the page compute with: the formula of every label, its slices, and the rows that are held."""

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from grasp.predict.predictor import NEW_ROW_VALUE, REPEAT_WORTH
from grasp.predict.slices import SliceFormula
from grasp.report.findings import Findings, LabelFindings, Missing
from grasp.text import LONGEST_CELL, different, ending, name, plain

DIGITS = 4  # of what is shown, not of what is computed with
LONGEST_TEXT = 600
MOST_TIMES = 4.0  # as often as now: the end of a slider
PLACES = (0, 5, *range(10, 100, 10), 95, 100, 105, 110, *range(125, 401, 25))  # percent; between them lines are drawn


def payload(found: Findings) -> dict[str, Any]:
    """Plain JSON."""
    nats, held = found.nats, found.rows
    codes = [label.slices.codes_N[held.index] for label in found.labels]
    rows = [
        {
            "id": name(row["row_id"]),
            "tokens": row["n_tokens"],
            "text": plain(row["snippet"] or "", LONGEST_TEXT),
            "at": [int(code_K[k]) for code_K in codes],
            "effect": _short(held.effect_KT[k]),
            "rank": held.rank_KT[k].tolist(),
        }
        | ({"shades": found.shades[k]} if k in found.shades else {})
        | ({"pictures": found.pictures[k]} if k in found.pictures else {})
        for k, row in enumerate(held.rows)
    ]
    place = {int(index): k for k, index in enumerate(held.index)}
    questions = [
        {
            "target": one.target,
            "id": name(one.unit_id),
            "prompt": ending(one.prompt),
            "answer": plain(one.completion, 100),
            "rows": [
                [place[row], value]
                for row, value in zip(one.rows.tolist(), _short(one.effects), strict=True)
                if row in place
            ],
        }
        for one in held.questions
    ]
    # the parts of the treemap: their two slices, rows, mean effect on each target, and what is sure of it
    cells = None
    if found.parts is not None:
        parts, of_label = found.parts.slices, [label.slices.codes_N for label in found.labels[:2]]
        first_N = np.unique(parts.codes_N, return_index=True)[1]  # of each part some row
        cells = [
            {
                "at": [int(code_N[first_N[cell]]) for code_N in of_label],
                "rows": parts.slices[cell].rows,
                "effect": _short(found.parts.mean_GT[cell]),
                "sign": (-found.parts.dropped.sign_GT[cell]).tolist(),
            }
            for cell in range(len(parts.slices) - bool(parts.n_grouped))
        ]
    return {
        "targets": different(found.targets, LONGEST_CELL),
        "plainUnit": found.plain_unit,
        "runsUnit": "" if isinstance(nats, Missing) else nats.unit,
        "title": "" if isinstance(nats, Missing) else plain(nats.title, 400).partition(": ")[2],
        "labels": [_label(found, label) for label in found.labels],
        "map": cells,
        "rows": {"rows": rows, "n": held.n_ranked, "questions": questions},
    }


def _label(found: Findings, label: LabelFindings) -> dict[str, Any]:
    """The slices of a label, settings of their sliders, and what those, and any others, are worth."""
    slices, n_slices = label.slices, len(label.slices.slices)

    # settings: the mixture that was given, and the corpus without what costs more targets than not
    presets: list[dict[str, Any]] = []
    mixture = found.mixture
    if not isinstance(mixture, Missing) and mixture.label == slices.label:
        times = {one.value: one.proposed / one.now if one.now else 1.0 for one in mixture.slices}
        given = [round(100 * min(times.get(one, 1.0), MOST_TIMES)) for one in slices.names]
        cut = f", cut at {MOST_TIMES:.0%}" if max(times.values()) > MOST_TIMES else ""
        presets.append({"name": f"The mixture of grasp mix{cut}", "percent": given, "given": True})
    votes_G = label.signs(range(len(found.targets)))[0].sum(axis=1)
    if (votes_G < 0).any() and (votes_G >= 0).any():
        percent = np.where(votes_G < 0, 0, 100).tolist()
        presets.append({"name": "Without what costs", "percent": percent, "given": False})

    # all of them, behind those with one slider moved, at PLACES
    moved_BG = np.full((n_slices * len(PLACES), n_slices), 100.0)
    moved_BG[np.arange(len(moved_BG)), np.repeat(np.arange(n_slices), len(PLACES))] = PLACES * n_slices
    weights = slices.weights(np.concatenate([moved_BG, *([preset["percent"]] for preset in presets)]) / 100)

    def placed(values: Sequence[Any]) -> dict[str, Any]:
        alone = [values[at : at + len(PLACES)] for at in range(0, len(moved_BG), len(PLACES))]
        return {"places": PLACES, "alone": alone, "presets": values[len(moved_BG) :]}

    # what a change is computed with; where rows bear on one another, the changes themselves
    price = label.price
    if isinstance(price, SliceFormula):
        law = {"repeatWorth": REPEAT_WORTH, "anyText": NEW_ROW_VALUE}
        priced: dict[str, Any] = {"effect": price.effect_GT.tolist(), "exposure": law, "priced": None}
    else:
        priced = {"priced": placed([{"change": _short(change_T)} for change_T in price.change(weights)])}

    # what runs expect: the change by target, half of its interval, and in which way it lies beyond the runs
    expected = None
    if not isinstance(found.nats, Missing):
        table = found.nats.predict(weights)
        half_BT = table.high_BT - table.nats_BT
        values = [
            {"change": _short(value_T), "half": _short(half_T), "beyond": beyond}
            for value_T, half_T, beyond in zip(table.nats_BT, half_BT, table.outside, strict=True)
        ]
        expected = placed(values)

    return {
        "label": slices.label,
        "title": plain(slices.label, 40),
        "slices": [
            {"name": shown, "expression": one.expression, "rows": one.rows, "tokens": one.tokens}
            for shown, one in zip(label.names, slices.slices, strict=True)
        ],
        "order": np.argsort(label.dropped.value_GT.mean(axis=1), kind="stable").tolist(),
        "presets": presets,
        "expected": expected,
        **priced,
        "before": f"grasp predict {shlex.quote(found.artifact_path)}",
        "after": shlex.join(part for flag, value in found.flags.items() if value for part in (flag, str(value))),
    }


def _short(values: Any) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]
