"""Lazy entry points of the subpackage: `grasp.predict.scoring_rule.geometry()` returns this module.

The core of the package reaches `grasp.geometry` only through these names; each imports its module on first use.
"""

from importlib import import_module
from typing import Any

MODULE_OF = {  # module that defines each entry point
    "PAPER": "geometry_rule",
    "bind": "geometry_predictor",
    "check_sketches": "sketch_checks",
    "select_rows": "greedy",
    "controls": "controls",
    "calibration_evidence": "candidates",
    "optimize_mixture": "mixture_search",
    "predictions": "candidate_predictor",
    "protocol_type": "geometry_rule",
}


def __getattr__(name: str) -> Any:
    """Import the module of an entry point on first use."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"grasp.geometry.{MODULE_OF[name]}"), name)
