"""Choose training data: rows under a budget, or shares of a label's values; and export them as a corpus.

In: a predictor for the targets, and limits. Out: a selection or a mixture, and files of it. Read `select` first.
"""
