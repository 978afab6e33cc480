"""Predict how the utility of a target changes when rows are dropped, kept or re-weighted.

Input: an artifact, subsets with row weights (`weights`, `families`, `subset_tables`) and a scoring protocol
(`scoring_rule`; the built-in one is in `default_protocol`). Output: for every subset and target, the predicted change
relative to the whole corpus.

Start with `predictor.Predictor`, which holds the mathematics. `task_scores` estimates the score of a task from the
known questions and the text of rows, `weights` sums row values over subsets, and `slices` evaluates every value of a
label. Other packages register further kinds of protocols (`scoring_rule.RegisteredProtocol`).
"""
