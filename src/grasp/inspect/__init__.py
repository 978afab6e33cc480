"""Inspect an artifact: explanations of rows, and health checks.

In: an artifact, and its model and corpus if rows are recomputed. Out: results that print themselves. Start with
`explain.explain` (effects of single words) or `health.check` (validity of the approximations).
"""
