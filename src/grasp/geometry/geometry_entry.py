"""What this room gives to the road, each loaded when it is asked for; see `grasp.predict.scoring_rule`."""

from importlib import import_module
from typing import Any

HOMES = {
    "PAPER": "geometry_rule",
    "bind": "geometry_predictor",
    "checks": "sketch_checks",
    "choose_rows": "greedy",
    "controls": "controls",
    "evidence": "candidates",
    "mixed": "mixture_search",
    "predictions": "scored",
    "protocol_type": "geometry_rule",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"grasp.geometry.{HOMES[name]}"), name)
