"""The public Python API: one module per function, and the `Artifact` class whose methods are these functions.

Input: an artifact, runs, and options. Output: a `Result` that prints itself and converts to pandas or Arrow. Start with
`artifact`;
`evaluate` compares predictions with retrained models.
"""
