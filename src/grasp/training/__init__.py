"""Train small Llama models from scratch by a recipe, one at a time or K in one batched program.

`recipe` has the settings, `llama` the model, `train` the training loop. Start with `train.train`.
"""
