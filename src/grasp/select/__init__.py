"""What to train on: the best rows under a budget, the best shares of a label's values, and the corpus that comes of it.

In: a predictor for the targets, and limits. Out: a selection or a mixture, and files of it. Read `select` first.
"""
