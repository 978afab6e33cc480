"""The paper's interaction-aware part: what rows do to one another, beside what each of them does alone.

In: an artifact with sketches, and a protocol that weighs their geometry (`protocol`). Out: something that prices
subsets (`predictor`), chooses rows (`greedy`) and mixes values (`mixture`). `calibrate` chooses a protocol on
development runs, `controls` takes it apart, `checks` looks at the sketches. Nobody on the road imports this room:
`grasp.predict.scoring_rule` opens it, and `room` says what is there. Read `sums` first, then `terms` and `predictor`.
"""
