"""Per-example gradients of a causal LM at chosen parameters, as factors: one forward and one backward pass a batch.

In: a reference model, patterns over its parameters, rows of token ids. Out: for every matrix the factors of each row's
gradient, handed to a consumer batch by batch. Read `per_example` first.
"""
