"""Published methods beside GRASP: what one must be, and how installed ones are found by name.

In: an artifact, and runs where a method learns from them. Out: scores of rows, ranks of rows, predictions of subsets.
`contract` is what a method is and what it may look at; `registry` finds methods by the entry point group
`grasp.methods`, reads their settings and asks them. Ours are in `grasp.baselines`, which nobody imports.
"""
