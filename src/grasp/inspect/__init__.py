"""Explain the effect of a row on a target by its words.

In: an artifact, its model and its corpus. Out: results that print themselves. Start with `explain.explain`.
"""
