"""Artifact + subsets -> predicted utility: the one predictor, which everything else calls.

In: rows with arrays (`source`), subsets with weights (`blocks`, `families`, `subset_tables`, label expressions in
`slices`) and a protocol (`protocol`). Out: the predicted utility of every subset and target. Read `scorer` first.
`sweep_torch` is the one module that may load torch; `sweep` chooses it.
"""
