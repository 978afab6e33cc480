"""The first screen: what was found and what to do about it, in words; a clause stands where its evidence is there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.predict.predictor import EFFECT_SIZE
from grasp.report import views
from grasp.report.findings import NATS, Findings, LabelFindings, Missing
from grasp.report.texts import interval, number, signed
from grasp.runs.learning import OUTSIDE
from grasp.text import LONGEST_CELL, different, plain

View = dict[str, Any]

NAMED = 2  # slices to keep
BARS = 4  # slices on either side of the picture


def headline(found: Findings, targets: Sequence[str]) -> View:
    """The sentence of the page: what divides the targets, then what helps most of them, and what costs them most."""
    whom = targets[0] if len(targets) == 1 else f"{len(targets)} targets"
    if not found.labels:
        return {"whom": whom, "label": "", "keep": [], "cost": [], "alone": False, "divided": []}
    label = found.labels[0]
    sign_GT, alone = signs(label, list(range(len(targets))))
    change_GT = (label.by_relevance if alone else label.dropped).value_GT
    mean_G, apart_G = change_GT.mean(axis=1), _apart(sign_GT, change_GT)
    named = _named(label, np.where(apart_G > 0, 0, sign_GT.sum(axis=1)), mean_G)
    names = different(label.slices.names, LONGEST_CELL)
    least = min((abs(mean_G[names.index(one)]) for one in (*named["keep"], *named["cost"])), default=0.0)
    order = [g for g in np.argsort(-apart_G, kind="stable").tolist() if apart_G[g] > least][:NAMED]
    divided = [
        {"name": names[g]}
        | {
            what: [name for name, sign in zip(targets, sign_GT[g], strict=True) if sign == side]
            for what, side in (("gain", 1), ("lose", -1))
        }
        for g in order
    ]
    return {"whom": whom, "label": plain(label.slices.label, 40), "alone": alone, "divided": divided} | named


def _apart(sign_GT: NDArray[np.int8], change_GT: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far targets want opposite things of a slice, (G,): half of the way from its largest sure loss to its largest
    sure gain; 0 where one side has more than twice as many targets as the other.
    """
    gains_GT, losses_GT = (np.where(sign_GT == side, -side * change_GT, 0.0) for side in (1, -1))
    counts_2G = np.stack([(sign_GT == side).sum(axis=1) for side in (1, -1)])
    is_apart_G = counts_2G.min(axis=0) * 2 >= np.maximum(counts_2G.max(axis=0), 1)
    return np.where(is_apart_G, (gains_GT.max(axis=1) + losses_GT.max(axis=1)) / 2, 0.0)


def signs(label: LabelFindings, targets: Sequence[int]) -> tuple[NDArray[np.int8], bool]:
    """What helps (1) and what hurts (-1) some targets, (G, T), and whether only relevance says so.

    By runs where they are sure of any slice. A single slice often moves a model less than the noise of the runs: then
    by relevance, whose intervals tell whether other questions would say the same.
    """
    sign_GT = -label.dropped.sign_GT[:, targets]
    if sign_GT.any():
        return sign_GT, False
    sign_GT = -label.by_relevance.sign_GT[:, targets]
    return sign_GT, bool(sign_GT.any())


def _named(label: LabelFindings, votes_G: NDArray[np.integer[Any]], change_G: NDArray[np.float64]) -> View:
    """Slices to keep, and the one that costs most; none whose interval holds zero."""
    names = different(label.slices.names, LONGEST_CELL)
    order = np.argsort(change_G, kind="stable").tolist()
    keep = [names[g] for g in order if votes_G[g] > 0 and change_G[g] < 0][:NAMED]
    return {"keep": keep, "cost": [names[g] for g in order if votes_G[g] < 0 and change_G[g] > 0][-1:]}


def answers(found: Findings, targets: Sequence[str]) -> list[View]:
    """One a target; where they are in different units, each short line says which."""
    views = [_answer(found, t, target) for t, target in enumerate(targets)]
    several = len({view["best"]["unit"] for view in views}) > 1
    return [view | {"short_unit": view["best"]["unit"] if several else ""} for view in views]


def _answer(found: Findings, t: int, target: str) -> View:
    view: View = {"target": target, "keep": [], "cost": [], "bars": [], "alone": False}
    if found.labels:
        label = found.labels[0]
        sign_G1, alone = signs(label, [t])
        dropped = label.by_relevance if alone else label.dropped
        change_G, low_G, high_G = dropped.value_GT[:, t], dropped.low_GT[:, t], dropped.high_GT[:, t]
        names = different(label.slices.names, LONGEST_CELL)
        order = np.argsort(change_G, kind="stable").tolist()
        shown = order if len(order) <= 2 * BARS else order[:BARS] + order[-BARS:]  # those at the ends, the best first
        most = views.scale(change_G[shown])
        bars = [{"name": names[g]} | views.bar(change_G[g], low_G[g], high_G[g], most) for g in shown]
        view |= _named(label, sign_G1[:, 0], change_G) | {"bars": bars, "alone": alone}
    return view | {"best": _best(found, t), "trust": _trust(found, found.targets[t])}


def _best(found: Findings, t: int) -> View:
    """What a choice of rows is worth: the one that was given, else the best part of them."""
    best = found.best
    value, low, high = (float(part[0, t]) for part in (best.kept.value_GT, best.kept.low_GT, best.kept.high_GT))
    what, unit, outside = f"the best {_share(best.share)} of rows", best.units[t], best.outside[t]
    if not isinstance(found.selection, Missing):
        for one in found.selection.targets:
            if one.target == found.targets[t]:
                what = f"the best {_share(found.selection.rows / found.built.n_rows)} of rows"
                if found.selection.documents is not None:
                    what = f"the best {found.selection.documents:,} documents"
                said = next((note for note in found.selection.notes if note.startswith(OUTSIDE)), "")
                outside = said.partition(" (")[2].removesuffix(")")
                known = one.nats is not None
                runs_unit = found.selection.runs_unit or "nats"
                scale = "effect sizes" if found.selection.scale == EFFECT_SIZE else plain(found.selection.scale)
                unit = NATS.get(runs_unit, plain(runs_unit)) if known else scale
                ends = (one.nats, one.nats_low, one.nats_high) if known else (one.change, None, None)
                value, low, high = (float("nan") if end is None else end for end in ends)
    return {
        "what": what,
        "value": signed(value, 2),
        "unit": unit,
        "interval": interval(low, high, 2),
        "kind": "helps" if low > 0 else "hurts" if high < 0 else "",
        "outside": plain(outside),
    }


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"


def _trust(found: Findings, target: str) -> str:
    """How far predictions agree with retraining; empty where nobody knows."""
    if isinstance(found.retraining, Missing):
        return ""
    known = found.retraining.agreement
    (result,) = [one for one in known.report.methods if one.method == known.protocol]
    rows = [row for row in result.targets if row.target.partition("@")[0] == target]
    if not rows or rows[0]["task_rho"].value is None:
        return ""
    rho, ceiling = rows[0]["task_rho"].value, rows[0]["task_ceiling"].value
    seen = ", though the rule was chosen on these very models" if target in result.chosen_on else ""
    models = f"Models retrained on {known.report.n_subsets} subsets"
    if rho <= 0:
        return f"{models} do not agree with these predictions: rho {number(rho, 2)}{seen}."
    if ceiling is None or ceiling <= 0:
        return f"{models} agree with these predictions: rho {number(rho, 2)}{seen}."
    if rho >= ceiling:
        return f"{models} agree with these predictions as far as noise allows to see: rho {number(rho, 2)}{seen}."
    return f"{models} agree with these predictions at {number(rho / ceiling, 2)} of what noise allows{seen}."
