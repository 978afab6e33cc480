"""The paper's interaction-aware part: what rows do to one another, beside what each of them does alone.

In: an artifact with sketches, and a protocol that weighs their geometry. Out: prices of subsets, selections, a protocol
chosen on development runs. Read `sums` first, then `terms`.
"""
