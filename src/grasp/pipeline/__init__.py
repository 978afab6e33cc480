"""Build an artifact: two loops over the rows of a corpus, through the model.

In: settings, or a model, a corpus and targets in memory. Out: a finished artifact directory. Read `pipeline` first (the
two loops), then `score_shard` (the work of the model on one shard, in this process or on a cluster, see `engine`).
"""
