"""Distillation of relevance into a scorer of text that needs no model and can be applied to any corpus.

Input: an artifact, then any text. Output: a scorer, then a table of scores. Start with `distil.distil`, which fits a
scorer, and `apply.apply`, which scores a corpus.
"""
