"""Load targets: benchmark tasks and files of questions, as units of a prompt and an answer whose loss is measured.

`units` defines units and tokenizes them, `margins` computes their utilities, `load` loads and draws them.
`unit_records` converts records to units, with `choices` for multiple choice. Tasks and the logs of harnesses are read
by readers (`grasp.file_readers`). Start with `load_units`.
"""

from grasp.targets.load import load_units
from grasp.targets.units import LossOn, Unit, UnitSet, UnitTokens

__all__ = ["LossOn", "Unit", "UnitSet", "UnitTokens", "load_units"]
