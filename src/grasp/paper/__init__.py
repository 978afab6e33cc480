"""Interactions between rows: the geometry terms of the paper, in addition to the additive relevance of rows.

Optional subpackage, found through the entry points `grasp.protocols`, `grasp.kernels` and `grasp.commands`. Input: an
artifact with sketches, and a protocol that weighs their geometry (`protocol`). Output: predictions for subsets
(`interaction_predictor`). `calibrate` selects a protocol on development runs, `controls` evaluates ablations.

Start with `subset_sums`, which defines the geometric components, then `terms` and `interaction_predictor`.
"""
