"""Training a model by a recipe, one or K at once; and the derivative of a training by the weights of its rows.

In: rows, units and a recipe. Out: a model with its checkpoints, or scores of rows. Read `train` first; `llama` is the
model. For derivatives read `adjoint` for the mathematics, then `trajectory` (forward), `metagradient` (backward) and
`replayed_rows` (several orders, gated).
"""
