"""The artifact: what one forward pass over the corpus gave, as a directory on disk, and nothing else.

In: arrays, tables and moments, shard by shard. Out: the same, read back in blocks of rows; or what is damaged. Read
`layout` first (what lies where), then `manifest`, then `reader`. `writer` creates an artifact or adds targets to one,
`shards` is what both of these write with, `inspection` describes and verifies, `remote` is for URLs.
"""
