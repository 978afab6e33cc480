"""Train one or K models by a recipe, and differentiate a training run with respect to the weights of its rows.

Inputs are rows, units and a recipe; outputs are models with checkpoints, or scores of rows. Start with `train`; `llama`
is the model. For derivatives, `adjoint` has the mathematics; then read `trajectory` (forward), `metagradient`
(backward) and `replayed_rows` (several orders, and the check of smoothness).
"""
