"""What changes for a target if rows are dropped, kept or re-weighted? The one predictor, which everything else calls.

In: an artifact (`row_arrays`), subsets with weights (`weights`, `blocks`, `families`, `subset_tables`, label
expressions in `expressions`) and a protocol (`protocol`). Out: the change against the whole corpus for every subset and
target. Read `predictor` first, then `relevance`; the verbs that ask it are `grasp.verbs`. Protocols in which rows bear
on one another leave by `interactions`. `sweep_torch` is the one module that may load torch; `row_sums` chooses it.
"""
