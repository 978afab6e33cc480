"""Training a model by a recipe: one, or K at once.

In: rows, units and a recipe. Out: a model with its checkpoints. Read `train` first; `llama` is the model.
"""
