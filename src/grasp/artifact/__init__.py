"""The artifact: what one forward pass over the corpus gave, as a directory on disk, and nothing else.

In: arrays, tables and moments, shard by shard. Out: the same, read back in blocks of rows; or what is damaged. Read
`manifest` first (what lies where), then `reader`. `writer` creates an artifact or adds targets to one, `inspection`
describes and verifies.
"""
