"""Benchmarks become units: OLMES request files, JSONL and `datasets`, drawn by a seed."""

from grasp.targets.load import load_units
from grasp.targets.units import LossOn, Unit, UnitSet, UnitTokens

__all__ = ["LossOn", "Unit", "UnitSet", "UnitTokens", "load_units"]
