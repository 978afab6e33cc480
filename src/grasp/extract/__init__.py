"""From corpus + targets + reference model to an artifact.

`local` is the engine of one process and the file to read first; `forward` and `finish` are the per-shard work that any
engine runs.
"""
