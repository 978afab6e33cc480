"""The artifact: what one forward pass over the corpus gave, as a directory on disk, and nothing else.

Import from the modules: `writer` and `extension` write, `reader` reads, `inspection` verifies and describes,
`features` spools arrays shard by shard.
"""
