"""Data for the scripts of the page, as JSON: slices and prediction formula of every label, and the example rows.

The scripts in `templates/` read the keys of these records by name. A row refers to its slice in each label by position
("at"), and a question to an example row by position in the list of rows. Start with `payload`.

Shape letters: B mixtures, G slices, T targets, K example rows.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grasp.inspect.explanation import dominant_word_notes
from grasp.predict.predictor import NEW_ROW_VALUE, REPEAT_WORTH, Predictor
from grasp.report.findings import Findings, LabelFindings
from grasp.select.linear_program import MixtureProblem, least_step, solve
from grasp.text import MAX_CELL_CHARS, ending, name, plain, unique_names

DIGITS = 4  # significant digits of displayed numbers; formulas keep full precision
MAX_TEXT_CHARS = 600
MAX_WEIGHT = 4.0  # end of a slider: four times as often as in the corpus
MAX_TARGETS = 12  # with sliders
TARGET_STEPS = 10  # of a slider over a target, to either side
TARGET_REACH = 0.5  # end of such a slider: part of the largest gain or loss within the sliders over slices
# Percentages of a slice at which runs are evaluated; the page interpolates linearly between them.
GRID = (0, 5, *range(10, 100, 10), 95, 100, 105, 110, *range(125, 401, 25))


def payload(findings: Findings) -> dict[str, Any]:
    """Return the data of the page as plain JSON values."""
    outcomes, examples = findings.outcomes, findings.rows
    codes = [label.slices.codes_N[examples.index] for label in findings.labels]
    rows = [
        {
            "id": name(row["row_id"]),
            "tokens": row["n_tokens"],
            "text": plain(row["snippet"] or "", MAX_TEXT_CHARS),
            "at": [int(code_K[k]) for code_K in codes],
            "effect": _rounded(examples.effect_KT[k]),
            "rank": examples.rank_KT[k].tolist(),
            "distinct": examples.distinct_KT[k].tolist(),
        }
        | _shades(findings.shades.get(k))
        for k, row in enumerate(examples.rows)
    ]
    position = {int(index): k for k, index in enumerate(examples.index)}
    questions = [
        {
            "target": question.target,
            "id": name(question.unit_id),
            "prompt": ending(question.prompt),
            "answer": plain(question.completion, 100),
            "rows": [
                [position[row], value]
                for row, value in zip(question.rows.tolist(), _rounded(question.effects), strict=True)
                if row in position
            ],
        }
        for question in examples.questions
    ]
    return {
        "targets": unique_names(findings.targets, MAX_CELL_CHARS),
        "weights": findings.weights_T.tolist(),
        "effectUnit": findings.effect_unit,
        "runsUnit": "" if isinstance(outcomes, str) else outcomes.unit,
        "intervals": "" if isinstance(outcomes, str) else plain(outcomes.title, 400).partition(": ")[2],
        "labels": [_label(findings, label) for label in findings.labels],
        "rows": {"rows": rows, "n": examples.n_ranked, "questions": questions},
    }


def _shades(words_by_target: Mapping[str, Sequence[tuple[str, float | None]]] | None) -> dict[str, Any]:
    """Return the shaded words of a row for each target, and notes on them; empty without words."""
    if words_by_target is None:
        return {}
    notes = {key: dominant_word_notes(*zip(*words, strict=True)) for key, words in words_by_target.items()}
    return {"shades": words_by_target, "notes": notes}


def _label(findings: Findings, label: LabelFindings) -> dict[str, Any]:
    """Return the slices of a label, the presets of their sliders, and the data that predictions are computed from."""
    slices, n_slices = label.slices, len(label.slices.slices)

    # presets: the given mixture, and the corpus without slices that hurt more targets, by weight, than they help
    presets: list[dict[str, Any]] = []
    mixture = findings.mixture
    if mixture is not None and mixture.label == slices.label:
        weight = {share.value: share.proposed / share.now if share.now else 1.0 for share in mixture.slices}
        percent_by_slice = [round(100 * min(weight.get(value, 1.0), MAX_WEIGHT)) for value in slices.names]
        clipped = f", clipped at {MAX_WEIGHT:.0%}" if max(weight.values()) > MAX_WEIGHT else ""
        presets.append({"name": f"Mixture of grasp mix{clipped}", "percent": percent_by_slice, "fromMixture": True})
    votes_G = label.signs(range(len(findings.targets)))[0] @ findings.weights_T
    if (votes_G < 0).any() and (votes_G >= 0).any():
        percent = np.where(votes_G < 0, 0, 100).tolist()
        presets.append({"name": "Drop harmful slices", "percent": percent, "fromMixture": False})

    # Mixtures at which predictions are tabulated, in percent of the corpus: one slider at a time over GRID, slice by
    # slice, then the presets.
    percent_BG = np.full((n_slices * len(GRID), n_slices), 100.0)
    percent_BG[np.arange(len(percent_BG)), np.repeat(np.arange(n_slices), len(GRID))] = GRID * n_slices
    weights = slices.weights(np.concatenate([percent_BG, *([preset["percent"]] for preset in presets)]) / 100)

    def tabulated(values: Sequence[Any]) -> dict[str, Any]:
        by_slice = [values[start : start + len(GRID)] for start in range(0, len(percent_BG), len(GRID))]
        return {"grid": GRID, "single": by_slice, "presets": values[len(percent_BG) :]}

    # Parameters of the closed form, or tabulated changes if rows interact. Every row of slice g has weight f_g: 0 drops
    # the slice, 1 keeps it, 0.3 keeps 30 % of its weight. With n_g the number of rows and e_g the sum of effects of
    # slice g, and n the number of rows with a positive weight, the change relative to the corpus is
    #
    #     (sum_g x_g (e_g + b n_g)) / n - b,    x_g = law(f_g n / sum_h f_h n_h)
    #
    # with the law and b of `grasp.predict.predictor`: b is the value of any unseen row in effect sizes, which
    # repetition loses. Weight f_g on every row gives the expected result of keeping a random fraction f_g of the slice.
    # Source: eq:method-additive.
    model = label.weights_model
    formula: dict[str, Any]
    if isinstance(model, Predictor):
        formula = {"tabulated": tabulated([{"change": _rounded(change_T)} for change_T in model.change(weights)])}
    else:
        law = {"repeatWorth": REPEAT_WORTH, "newRowValue": NEW_ROW_VALUE}
        formula = {"effect": model.tolist(), "exposure": law, "tabulated": None}

    # predictions from runs: change per target, half width of its interval, and how the mixture extrapolates
    expected = None
    if not isinstance(findings.outcomes, str):
        table = findings.outcomes.predict(weights)
        half_width_BT = table.high_BT - table.change_BT
        values = [
            {"change": _rounded(value_T), "half_width": _rounded(half_width_T), "beyond": beyond}
            for value_T, half_width_T, beyond in zip(table.change_BT, half_width_BT, table.outside, strict=True)
        ]
        expected = tabulated(values)

    return {
        "label": slices.label,
        "title": plain(slices.label, 40),
        "slices": [
            {"name": shown, "expression": part.expression, "rows": part.rows, "tokens": part.tokens}
            for shown, part in zip(label.names, slices.slices, strict=True)
        ],
        "order": np.argsort(-(label.contribution.value_GT @ findings.weights_T), kind="stable").tolist(),
        "presets": presets,
        "targetSteps": _target_steps(label),
        "expected": expected,
        **formula,
        "before": f"grasp predict {shlex.quote(findings.artifact_path)}",
        "after": shlex.join(part for flag, value in findings.flags.items() if value for part in (flag, str(value))),
    }


def _target_steps(label: LabelFindings) -> list[dict[str, Any]]:
    """Return per target the gain of a step of its slider, and what a step to either side adds to each percentage.

    To first order around the corpus, the change of a target is linear in the shares: the mean effects of the slices.
    """
    sum_GT, rows_G = label.weights_model, label.slices.rows_G
    if isinstance(sum_GT, Predictor) or not 2 <= sum_GT.shape[1] <= MAX_TARGETS:
        return []
    share_G, steps = rows_G / rows_G.sum(), []
    problem = MixtureProblem(np.zeros(len(share_G)), np.minimum(1.0, MAX_WEIGHT * share_G), share_G)
    for effect_G in (sum_GT / rows_G[:, None]).T:
        reach = min(abs(float(effect_G @ (solve(problem, sign * effect_G) - share_G))) for sign in (1, -1))
        gain = float(f"{TARGET_REACH * reach:.0e}")  # one digit
        ends = [least_step(problem, effect_G, sign * gain) if gain else 0.0 * share_G for sign in (1, -1)]
        up, down = (_rounded(100 * end_G / share_G / TARGET_STEPS) for end_G in ends)
        steps.append({"gain": gain / TARGET_STEPS, "up": up, "down": down})
    return steps


def _rounded(values: Any) -> list[float | None]:
    """Round to `DIGITS` significant digits; nan becomes None, which JSON can hold."""
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]
