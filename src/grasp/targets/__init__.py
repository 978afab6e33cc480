"""Load targets: benchmark tasks and files of questions, as units of a prompt and an answer whose loss is measured.

`units` defines units and tokenizes them, `load` reads files and tables, `olmes` reads tasks, and `sample_logs` reads
logs of lm-evaluation-harness. Start with `load_units`.
"""

from grasp.targets.load import load_units
from grasp.targets.units import LossOn, Unit, UnitSet, UnitTokens

__all__ = ["LossOn", "Unit", "UnitSet", "UnitTokens", "load_units"]
