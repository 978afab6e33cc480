"""From predictions to decisions: rows under a budget, mixtures of slices, and the corpus to train on.

In: a scorer bound to targets, and limits. Out: a selection or a mixture, and files of it. Read `select` first.
`datatrove_step` is the one module that needs an extra.
"""
