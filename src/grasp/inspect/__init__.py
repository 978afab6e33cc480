"""Inspect an artifact: suspicious rows, explanations of rows, and health checks.

In: an artifact, and its model and corpus if rows are recomputed. Out: results that print themselves. Start with
`detect.detect` (suspicious rows; `detection` has its statistics, `copies` finds rows that equal trusted units),
`explain.explain` (effects of single words) and `health.check` (validity of the approximations).
"""
