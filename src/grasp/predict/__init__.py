"""What changes for a target if rows are dropped, kept or re-weighted? The one predictor, which everything else calls.

In: an artifact (`rows`, `labels`), subsets with weights (`weights`, `families`, `subset_tables`) and a protocol
(`protocol`). Out: the change against the whole corpus for every subset and target. All of the mathematics is in
`predictor`; sums of rows over subsets are in `weights`. The verbs that ask are `grasp.api`. Protocols in which rows
bear on one another leave by `protocol.geometry`. `sweep_torch` is the one module that may load torch.
"""
