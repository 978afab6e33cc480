"""Lazy entry points of the subpackage, used through `grasp.predict.scoring_rule.geometry`."""

from importlib import import_module
from typing import Any

HOMES = {
    "PAPER": "geometry_rule",
    "bind": "geometry_predictor",
    "check_sketches": "sketch_checks",
    "select_rows": "greedy",
    "controls": "controls",
    "calibration_evidence": "candidates",
    "optimize_mixture": "mixture_search",
    "predictions": "scored",
    "protocol_type": "geometry_rule",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"grasp.geometry.{HOMES[name]}"), name)
