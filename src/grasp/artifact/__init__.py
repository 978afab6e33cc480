"""The artifact: the results of one pass over the corpus, as a directory on disk.

In: arrays, tables and moments, shard by shard. Out: the same, read in blocks of rows, or an error that names the
damage. Read `manifest` first (the layout), then `reader`. `writer` creates an artifact or adds targets to one,
`inspection` describes and verifies.
"""
