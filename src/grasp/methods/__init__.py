"""Published attribution methods: their interface, and the registry of installed ones.

Input: an artifact, and retrained runs for methods that are fitted to them. Output: scores of rows, ranks of rows,
predictions of subsets. `contract` defines the base classes and the inputs of a method; `registry` loads methods from
the entry point group `grasp.methods`, validates their settings and runs them. The built-in methods are in
`grasp.baselines`, which no other package imports.
"""
