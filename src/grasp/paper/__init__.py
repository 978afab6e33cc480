"""Interactions between rows: the geometry terms of the paper, in addition to the additive relevance of rows.

Optional subpackage; imported lazily through `grasp.predict.scoring_rule.geometry`, which resolves the names listed in
`geometry_entry`. Input: an artifact with sketches, and a protocol that weighs their geometry (`protocol`). Output:
predictions for subsets (`interaction_predictor`), selected rows (`greedy`) and mixtures (`mixture_search`). `calibrate`
selects a protocol on development runs, `controls` evaluates ablations, `sketch_checks` measures sketch quality.

Start with `subset_sums`, which defines the geometric components, then `terms` and `interaction_predictor`.
"""
