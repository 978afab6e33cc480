"""Benchmarks and files of questions become units: a prompt, and the answer whose loss is measured.

In: names of tasks, files, tables in memory. Out: a `UnitSet`, drawn by a seed. Read `units` first, then `load`
(files and tables) and `olmes` (tasks).
"""

from grasp.targets.load import load_units
from grasp.targets.units import LossOn, Unit, UnitSet, UnitTokens

__all__ = ["LossOn", "Unit", "UnitSet", "UnitTokens", "load_units"]
