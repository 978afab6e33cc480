"""Mixtures from training runs alone, without an artifact: an optional subpackage that is found by entry points.

Input: tables of runs, i.e. their mixtures and results. Output: predictions of mixtures, the best one, and the ones to
train next. Start with `import_runs`, then `mixture_model`, which fits `mixture_law` and a Gaussian process to the
runs, and `proposals`; `commands` adds `grasp runs`.
"""
