"""The one pass: a model reads the corpus and leaves an artifact.

In: settings, or a model, a corpus and targets in memory. Out: a finished artifact directory. Read `pipeline` first, the
build from top to bottom; `score_shard` is the model's work on a shard, in this process or on a cluster (`engine`).
"""
