"""What people do with an artifact and with runs: a module a verb, each one page of steps.

In: an artifact, runs, a question. Out: results that print themselves. `predict` and `score` ask what parts of a corpus
are worth, `retrain` makes runs, `evaluate` says how well predictions agree with them.
"""
