"""Subsets of a corpus: blocks of weights, families they are drawn from, tables and label expressions."""

from grasp.subsets.blocks import Side, SubsetBlock
from grasp.subsets.families import Family, parse_family
from grasp.subsets.labels import LabelColumn
from grasp.subsets.slices import LabelTable, Selection
from grasp.subsets.tables import RowIndex, read_subsets, write_subsets

__all__ = [
    "Family",
    "LabelColumn",
    "LabelTable",
    "RowIndex",
    "Selection",
    "Side",
    "SubsetBlock",
    "parse_family",
    "read_subsets",
    "write_subsets",
]
