"""Benchmarks become units, drawn by a seed: OLMES request files, files of units in several forms, `datasets`."""

from grasp.targets.load import load_units
from grasp.targets.units import LossOn, Unit, UnitSet, UnitTokens

__all__ = ["LossOn", "Unit", "UnitSet", "UnitTokens", "load_units"]
