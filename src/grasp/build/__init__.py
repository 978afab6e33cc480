"""From corpus + targets + reference model to an artifact.

`local.build` is the engine of one process; `forward` and `finish` are the per-shard work that any engine runs.
"""
