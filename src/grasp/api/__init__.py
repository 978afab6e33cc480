"""What people call: a module a verb, each one page of steps, and the `Artifact` that they hold.

In: an artifact, runs, a question. Out: results that print themselves. Read `artifact` first; `makers` are the verbs
that make or open one, `retrain` makes runs, `evaluate` says how well predictions agree with them.
"""
