"""Scorers of text, distilled from the relevance of an artifact: an optional subpackage that is found by entry points.

Input: an artifact, then any text. Output: a scorer that needs no model, then a table of scores. Start with
`distil.distil`, which fits a scorer, and `apply.apply`, which scores a corpus; `commands` adds `grasp distil` and
`grasp apply`.
"""
