"""The one pass: a model reads the corpus and leaves an artifact.

In: settings, or a model, a corpus and targets in memory. Out: a finished artifact directory. Read `local` first, the
engine of one process; `forward` is the work on a shard, whatever the engine.
"""
